/* forced.c - tokens that must come next: the bytes that a grammar leaves no choice about, cut as the model's own
 * tokenizer cuts them.
 *
 * Where such bytes end, what is free begins, and a tokenizer does not know of that border: its last tokens might be
 * longer ones if the text went on. Those are left to the model: only tokens before the first one count from which a
 * longer token that the grammar allows would reach past the border.
 */
#include "grammar/grammar_int.h"

#define MAX_BYTES 512

lr_vocab *lr_matcher_vocab(const lr_matcher *m) { return m->t->v; }

/* The last of the tokens that spell exactly s: from which on. first: s is a text's start, so its first piece may bring
 * a space that is not shown. */
static bool spelling(const lr_vocab *v, const int32_t *ids, size_t n, lr_str s, bool first, size_t *from)
{
    size_t left = s.n;
    while (left > 0 && n > 0) {
        size_t len;
        const char *piece = lr_vocab_piece(v, ids[--n], &len);
        if (first && n == 0 && len == left + 1 && piece[0] == ' ') {
            piece++;
            len--;
        }
        if (len > left || memcmp(piece, s.s + left - len, len) != 0 || !lr_trie__is_text(v, ids[n])) return false;
        left -= len;
    }
    *from = n;
    return left == 0 && (!first || n == 0);
}

/* s as the tokenizer cuts it behind the text `before`. -> tokens, 0 if it can't be told. */
static size_t cut(const lr_matcher *m, lr_str before, lr_str s, int32_t *ids, size_t cap)
{
    char buf[2 * MAX_BYTES];
    bool first = m->taken == 0 && m->o.strip_space;
    const lr_vocab *v = m->t->v;
    size_t n = 0;
    if (before.n == 0 && !first) before = (lr_str){"\n", 1}; /* else a tokenizer may put a space first */
    if (first || before.n > sizeof buf - s.n) before.n = 0;
    if (before.n) memcpy(buf, before.s, before.n);
    memcpy(buf + before.n, s.s, s.n);
    for (int alone = 0; alone < 2 && n == 0; alone++) {
        lr_error err;
        int32_t *all;
        size_t n_all, from, skip = alone ? before.n : 0;
        if (lr_tokenize(v, buf + skip, before.n + s.n - skip, 0, &all, &n_all, &err)) continue;
        if (spelling(v, all, n_all, s, first, &from)) {
            n = n_all - from < cap ? n_all - from : cap;
            memcpy(ids, all + from, n * sizeof *ids);
        }
        lr_free(all);
    }
    return n;
}

/* The node of s; 0 if no piece begins so. */
static uint32_t find(const lr_grammar_trie *t, lr_str s)
{
    uint32_t at = 0;
    for (size_t i = 0; i < s.n; i++) {
        uint32_t c = at + 1;
        while (c < t->node[at].skip && t->node[c].byte != (uint8_t)s.s[i]) c = t->node[c].skip;
        if (c >= t->node[at].skip) return 0;
        at = c;
    }
    return at;
}

/* Whether a token may come here that begins with s and is longer. 1, 0 or an error. */
static int reaches_past(lr_matcher *m, lr_str s, lr_error *err)
{
    const tnode *node = m->t->node;
    uint32_t v = s.n <= m->t->max_depth ? find(m->t, s) : 0;
    if (v == 0 || node[v].skip == v + 1) return 0;
    lr_token_mask *t;
    int rc = lr_matcher_share_mask(m, 0, &t, err);
    if (rc) return rc;
    for (uint32_t c = v + 1; c < node[v].skip && !rc; c++) { /* all ids of a piece are allowed or none */
        rc = node[c].token >= 0 && t->bits[node[c].token / 32] >> (node[c].token % 32) & 1;
    }
    lr_token_mask_unref(t);
    return rc;
}

int lr_matcher_forced_tokens(lr_matcher *m, lr_str before, int32_t *ids, size_t cap, size_t *n, lr_error *err)
{
    char text[MAX_BYTES];
    size_t len = lr_matcher_forced(m, text, sizeof text), at = 0, taken = 0;
    *n = 0;
    if (m->g->n->n_hole && m->g->w.err.code) { /* it was asked, and would be again */
        *err = m->g->w.err;
        return err->code;
    }
    if (len == 0) return 0;
    if (cap > LR_MATCHER_HISTORY / 2) cap = LR_MATCHER_HISTORY / 2;
    size_t count = cut(m, before, (lr_str){text, len}, ids, cap);
    int past = 0;
    while (taken < count) {
        size_t piece;
        bool first = m->taken == 0 && m->o.strip_space;
        const char *s = lr_vocab_piece(m->t->v, ids[taken], &piece);
        past = reaches_past(m, (lr_str){text + at, len - at}, err);
        if (past || lr_matcher_accept(m, ids[taken], err)) break;
        at += piece - (first && s[0] == ' ');
        taken++;
    }
    *n = taken;
    lr_error none;
    if (taken) lr_matcher_rollback(m, taken, &none);
    if (past >= 0) return 0;
    *n = 0;
    return past;
}
