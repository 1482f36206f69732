/* tokenize.c - text to ids: takes names of tokens out of the text, hands what lies between them to the model's own
 * algorithm (bpe.c, spm.c), and puts BOS and EOS where the file wants them.
 */
#include "text/text_int.h"
#include "text/unicode.h"

int lr_text_ids_add(lr_ids *o, int32_t id, lr_error *err)
{
    if (o->n == o->cap) {
        size_t cap = o->cap ? o->cap + o->cap / 2 : 64;
        int32_t *p = lr_reallocarray(o->id, cap, sizeof *p);
        if (!p) return lr_fail(err, LR_ENOMEM, "no memory for %zu token ids", cap);
        o->id = p;
        o->cap = cap;
    }
    o->id[o->n++] = id;
    return 0;
}

static int pipe_word(void *ctx, const uint8_t *text, size_t start, size_t end)
{
    lr_tok *t = ctx;
    const uint8_t *s = text + start;
    size_t n = end - start;
    return t->v->kind == LR_VOCAB_BPE     ? lr_text_bpe_word(t, s, n)
           : t->v->kind == LR_VOCAB_CHARS ? lr_text_chars(t, s, n)
                                          : lr_text_unigram(t, s, n);
}

/* Text without names; *fresh: it follows the start or a control token, so SentencePiece may want a space before it. */
static int segment(lr_tok *t, const uint8_t *s, size_t n, bool *fresh)
{
    const lr_vocab *v = t->v;
    if (v->pipe) return n ? lr_pipe_run(v->pipe, s, n, s == t->start, pipe_word, t, t->err) : 0;
    bool prefix = *fresh && v->add_space_prefix;
    *fresh = false;
    return v->kind == LR_VOCAB_BPE ? lr_text_bpe(t, s, n) : lr_text_spm(t, s, n, prefix);
}

static bool word_char(const uint8_t *s, size_t i, size_t n)
{
    int32_t cp;
    lr_utf8_get(s + i, n - i, &cp);
    return cp == '_' || lr_uc_class(cp) & (LR_UC_L | LR_UC_N | LR_UC_M);
}

/* Where the character before s[i] begins, i > from. */
static size_t char_before(const uint8_t *s, size_t from, size_t i)
{
    size_t k = i - 1;
    while (k > from && i - k < 4 && (s[k] & 0xC0) == 0x80) k--;
    int32_t cp;
    return k + lr_utf8_get(s + k, i - k, &cp) == i ? k : i - 1;
}

static bool white(const uint8_t *s, size_t i, size_t n)
{
    int32_t cp;
    lr_utf8_get(s + i, n - i, &cp);
    return (lr_uc_class(cp) & LR_UC_WS) != 0;
}

/* A name at s[*i..*end): whether it counts there, and what it takes along of s[from..n). */
static bool edges(const lr_vocab *v, int32_t id, const uint8_t *s, size_t from, size_t n, size_t *i, size_t *end)
{
    unsigned e = v->edge ? v->edge[id] : 0;
    if (e & LR_EDGE_WORD && ((*i > 0 && word_char(s, char_before(s, 0, *i), n)) || (*end < n && word_char(s, *end, n))))
        return false;
    for (size_t k; e & LR_EDGE_LEFT && *i > from && white(s, k = char_before(s, from, *i), n);) *i = k;
    while (e & LR_EDGE_RIGHT && *end < n && white(s, *end, n)) {
        int32_t cp;
        *end += lr_utf8_get(s + *end, n - *end, &cp);
    }
    return true;
}

static int tokenize(lr_tok *t, const uint8_t *s, size_t n, unsigned flags)
{
    const lr_vocab *v = t->v;
    const lr_vocab_names *names = flags & LR_TOK_SPECIAL ? &v->special : &v->plain;
    bool fresh = true;
    size_t from = 0, i = 0;
    t->start = s;
    while (i < n) {
        int32_t id = names->first[s[i]] < names->first[s[i] + 1] ? lr_vocab_names_match(v, names, s, i, n) : -1;
        size_t at = i, end = id < 0 ? 0 : i + lr_vocab_piece_str(v, (uint32_t)id).n;
        if (id < 0 || !edges(v, id, s, from, n, &at, &end)) {
            i++;
            continue;
        }
        bool control = v->flag[id] & LR_TF_CONTROL;
        if (at > from && segment(t, s + from, at - from, &fresh)) return t->err->code;
        if (!control && fresh && segment(t, s, 0, &fresh)) return t->err->code;
        if (lr_text_ids_add(&t->out, id, t->err)) return t->err->code;
        if (control) fresh = true;
        from = i = end;
    }
    return from < n ? segment(t, s + from, n - from, &fresh) : 0;
}

int lr_tokenize(const lr_vocab *v, const char *text, size_t n, unsigned flags, int32_t **ids, size_t *n_ids,
                lr_error *err)
{
    lr_tok t = {.v = v, .err = err};
    bool bos = flags & LR_TOK_BOS && v->add_bos && v->bos >= 0, eos = flags & LR_TOK_BOS && v->add_eos && v->eos >= 0;
    int rc = 0;
    if (n > LR_TEXT_MAX) return lr_fail(err, LR_ELIMIT, "text of %zu bytes; at most %zu", n, LR_TEXT_MAX);
    t.out.cap = n / 3 + 16;
    t.out.id = lr_reallocarray(NULL, t.out.cap, sizeof *t.out.id);
    if (!t.out.id) return lr_fail(err, LR_ENOMEM, "no memory to tokenize %zu bytes", n);
    if (bos) rc = lr_text_ids_add(&t.out, v->bos, err);
    if (rc == 0 && n) rc = tokenize(&t, (const uint8_t *)text, n, flags);
    if (rc == 0 && bos && t.out.n > 1 && t.out.id[1] == v->bos) /* the text brought its own */
        memmove(t.out.id, t.out.id + 1, --t.out.n * sizeof *t.out.id);
    if (rc == 0 && eos && (t.out.n == 0 || t.out.id[t.out.n - 1] != v->eos)) rc = lr_text_ids_add(&t.out, v->eos, err);
    lr_free(t.sym);
    lr_free(t.heap);
    lr_free(t.word);
    if (rc) {
        lr_free(t.out.id);
        return rc;
    }
    *ids = t.out.id;
    *n_ids = t.out.n;
    return 0;
}
