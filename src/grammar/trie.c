/* trie.c - the pieces of a vocabulary as a trie, flat and in depth-first order. See grammar.h. */
#include "grammar/grammar_int.h"
#include <stdlib.h>

static lr_grammar_trie *tries;   /* all that are alive; one thread */
static lr_grammar_trie *kept[2]; /* the last two that were asked for: they are not built again for each matcher */

/* User-defined tokens that are names of chat machinery end turns or open roles: no text should come to mean them. */
static bool is_machinery(const char *s, size_t n)
{
    return n >= 4 && s[0] == '<' && s[1] == '|' && s[n - 2] == '|' && s[n - 1] == '>';
}

bool lr_trie__is_text(const lr_vocab *v, int32_t id)
{
    size_t n;
    if (id < 0 || id >= (int32_t)lr_vocab_size(v) || lr_vocab_is_control(v, id) || lr_vocab_is_eog(v, id)) return false;
    int type = lr_vocab_type(v, id);
    const char *s = lr_vocab_piece(v, id, &n);
    if (n == 0 || n > LR_TOKEN_MAX || type == LR_TT_UNUSED) return false;
    return type != LR_TT_USER || !is_machinery(s, n);
}

typedef struct entry {
    lr_str s;
    int32_t id;
} entry;

static int cmp_entry(const void *pa, const void *pb)
{
    const entry *a = pa, *b = pb;
    size_t n = a->s.n < b->s.n ? a->s.n : b->s.n;
    int c = memcmp(a->s.s, b->s.s, n);
    if (c) return c;
    if (a->s.n != b->s.n) return a->s.n < b->s.n ? -1 : 1;
    return (a->id > b->id) - (a->id < b->id);
}

static size_t common(lr_str a, lr_str b)
{
    size_t i = 0, n = a.n < b.n ? a.n : b.n;
    while (i < n && a.s[i] == b.s[i]) i++;
    return i;
}

/* Sorted pieces -> nodes. path: (LR_TOKEN_MAX + 1) open nodes. */
static int make_nodes(lr_grammar_trie *t, const entry *e, size_t n, lr_error *err)
{
    uint32_t *path = lr_reallocarray(NULL, LR_TOKEN_MAX + 1, sizeof *path);
    size_t count = 1;
    for (size_t i = 0; i < n; i++) count += e[i].s.n - (i ? common(e[i - 1].s, e[i].s) : 0);
    t->node = count < UINT32_MAX ? lr_reallocarray(NULL, count, sizeof *t->node) : NULL;
    if (!path || !t->node) {
        lr_free(path);
        return lr_fail(err, LR_ENOMEM, "no memory for the trie of a vocabulary");
    }
    t->node[0] = (tnode){.token = -1};
    t->n_node = 1;
    path[0] = 0;
    lr_str prev = {NULL, 0};
    for (size_t i = 0; i < n; i++) {
        size_t same = common(prev, e[i].s);
        while (prev.n > same) t->node[path[prev.n--]].skip = t->n_node;
        for (size_t d = same; d < e[i].s.n; d++) {
            path[d + 1] = t->n_node;
            t->node[t->n_node++] = (tnode){.token = -1, .depth = (uint16_t)(d + 1), .byte = (uint8_t)e[i].s.s[d]};
        }
        prev = e[i].s;
        if (prev.n > t->max_depth) t->max_depth = (uint32_t)prev.n;
        tnode *last = &t->node[path[prev.n]];
        int32_t *tok = &last->token;
        if (*tok >= 0) last->many = 1;
        while (*tok >= 0) tok = &t->same[*tok];
        *tok = e[i].id;
    }
    while (prev.n > 0) t->node[path[prev.n--]].skip = t->n_node;
    t->node[0].skip = t->n_node;
    lr_free(path);
    return 0;
}

static int build(lr_grammar_trie *t, lr_error *err)
{
    const lr_vocab *v = t->v;
    entry *e = lr_reallocarray(NULL, (size_t)t->n_vocab + 1, sizeof *e);
    t->same = lr_reallocarray(NULL, (size_t)t->n_vocab + 1, sizeof *t->same);
    t->eog = lr_reallocarray(NULL, (size_t)t->n_vocab + 1, sizeof *t->eog);
    if (!e || !t->same || !t->eog) {
        lr_free(e);
        return lr_fail(err, LR_ENOMEM, "no memory for the trie of a vocabulary");
    }
    size_t n = 0;
    for (int32_t id = 0; id < (int32_t)t->n_vocab; id++) {
        t->same[id] = -1;
        if (lr_vocab_is_eog(v, id)) t->eog[t->n_eog++] = id;
        if (!lr_trie__is_text(v, id)) continue;
        e[n].s.s = lr_vocab_piece(v, id, &e[n].s.n);
        e[n++].id = id;
    }
    qsort(e, n, sizeof *e, cmp_entry);
    int rc = make_nodes(t, e, n, err);
    lr_free(e);
    return rc;
}

/* Keeps t alive in place of what was kept longest. */
static void keep(lr_grammar_trie *t)
{
    if (kept[0] == t) return;
    lr_grammar_trie *old = kept[1];
    kept[1] = kept[0];
    kept[0] = old == t ? t : lr_grammar_trie_ref(t);
    if (old != t) lr_grammar_trie_unref(old);
}

int lr_grammar_trie_get(lr_grammar_trie **out, lr_vocab *v, lr_error *err)
{
    for (lr_grammar_trie *t = tries; t; t = t->next) {
        if (t->v != v) continue;
        *out = lr_grammar_trie_ref(t);
        keep(t);
        return 0;
    }
    lr_grammar_trie *t = lr_calloc(1, sizeof *t);
    if (!t) return lr_fail(err, LR_ENOMEM, "no memory for the trie of a vocabulary");
    t->refs = 1;
    t->v = lr_vocab_ref(v);
    t->n_vocab = lr_vocab_size(v);
    t->next = tries;
    tries = t;
    int rc = build(t, err);
    if (rc) {
        lr_grammar_trie_unref(t);
        return rc;
    }
    *out = t;
    keep(t);
    return 0;
}

void lr_grammar_trie_drop(void)
{
    for (int i = 0; i < 2; i++) {
        lr_grammar_trie *t = kept[i];
        kept[i] = NULL;
        lr_grammar_trie_unref(t);
    }
}

lr_grammar_trie *lr_grammar_trie_ref(lr_grammar_trie *t)
{
    t->refs++;
    return t;
}

void lr_grammar_trie_unref(lr_grammar_trie *t)
{
    if (!t || --t->refs > 0) return;
    lr_grammar_trie **p = &tries;
    while (*p != t) p = &(*p)->next;
    *p = t->next;
    lr_mask__free_shared(t);
    lr_vocab_unref(t->v);
    lr_free(t->node);
    lr_free(t->same);
    lr_free(t->eog);
    lr_free(t);
}

uint32_t lr_grammar_trie_nodes(const lr_grammar_trie *t) { return t->n_node; }
