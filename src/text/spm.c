/* spm.c - SentencePiece BPE: text -> one symbol a character -> merges of neighbours whose joined text is a token, the
 * best score first -> ids; characters that are no token are spelt in byte tokens.
 *
 * A space is written U+2581 ("▁") as in the tokens' raw text. A U+2581 of the text itself and a byte that is not UTF-8
 * are spelt in byte tokens at once and merge with nothing.
 *
 * The text has no words, so a naive merge would work on all of it at once. It is cut between two characters that stand
 * side by side in no token at all (a bitmap of hashed pairs, made with the vocabulary): nothing merges across, and the
 * symbols of one word fit the cache.
 */
#include "text/text_int.h"
#include "text/unicode.h"

#define SPACE_CHAR 0x2581

static bool text_rank(const lr_tok *t, const lr_sym *a, const lr_sym *b, uint32_t *rank, int32_t *id)
{
    int32_t got = lr_vocab_raw_id(t->v, t->word + a->at, b->end - a->at);
    if (got < 0 || !(t->v->flag[got] & LR_TF_MERGE)) return false;
    *rank = t->v->rank[got];
    *id = got;
    return true;
}

static int add_byte(lr_tok *t, uint8_t b)
{
    const lr_vocab *v = t->v;
    int32_t id = v->byte_id[b] >= 0 ? v->byte_id[b] : v->unk;
    if (id < 0) return lr_fail(t->err, LR_EUNSUPPORTED, "the vocabulary has no token for the byte 0x%02X", b);
    return lr_text_ids_add(&t->out, id, t->err);
}

/* A character that is no token. Without byte tokens it is one unknown token. */
static int add_char(lr_tok *t, const char *s, size_t n)
{
    const lr_vocab *v = t->v;
    if (n == 3 && memcmp(s, "\xE2\x96\x81", 3) == 0) return add_byte(t, ' ');
    if (v->byte_id[(uint8_t)s[0]] < 0 && v->unk >= 0) return lr_text_ids_add(&t->out, v->unk, t->err);
    for (size_t i = 0; i < n; i++)
        if (add_byte(t, (uint8_t)s[i])) return t->err->code;
    return 0;
}

/* Merges and writes out the word that was collected, and begins a new one. */
static int finish_word(lr_tok *t)
{
    if (t->n_sym == 0) return 0;
    if (lr_text_merge_run(t, text_rank)) return t->err->code;
    for (int32_t i = 0; i >= 0; i = t->sym[i].next) {
        const lr_sym *s = &t->sym[i];
        if (s->id >= 0 ? lr_text_ids_add(&t->out, s->id, t->err) : add_char(t, t->word + s->at, s->end - s->at))
            return t->err->code;
    }
    t->n_sym = 0;
    return 0;
}

/* Adds one character, spelt raw, to the word. */
static int push_char(lr_tok *t, const char *s, size_t n)
{
    uint32_t at = t->n_sym ? t->sym[t->n_sym - 1].end : 0;
    if (at + n > t->cap_word) {
        size_t cap = t->cap_word ? t->cap_word * 2 : 256;
        char *w = lr_realloc(t->word, cap);
        if (!w) return lr_fail(t->err, LR_ENOMEM, "no memory to tokenize a word of %u bytes", at);
        t->word = w;
        t->cap_word = cap;
    }
    memcpy(t->word + at, s, n);
    int32_t id = lr_vocab_raw_id(t->v, s, n);
    if (id >= 0 && !(t->v->flag[id] & LR_TF_MERGE)) id = -1;
    return lr_text_merge_push(t, at, at + (uint32_t)n, id);
}

int lr_text_spm(lr_tok *t, const uint8_t *s, size_t n, bool space_prefix)
{
    int32_t prev = -1; /* the character before, if the word goes on */
    t->n_sym = 0;
    if (space_prefix) {
        if (push_char(t, "\xE2\x96\x81", 3)) return t->err->code;
        prev = SPACE_CHAR;
    }
    for (size_t i = 0; i < n;) {
        int32_t cp;
        size_t k = lr_utf8_get(s + i, n - i, &cp);
        if (cp < 0 || cp == SPACE_CHAR) {
            if (finish_word(t)) return t->err->code;
            for (size_t j = 0; j < k; j++)
                if (add_byte(t, s[i + j])) return t->err->code;
            prev = -1;
            i += k;
            continue;
        }
        int32_t c = cp == ' ' ? SPACE_CHAR : cp;
        if (prev >= 0) {
            uint32_t h = lr_near_hash(prev, c);
            if (!(t->v->near[h >> 3] & (1u << (h & 7))) && finish_word(t)) return t->err->code;
        }
        if (cp == ' ' ? push_char(t, "\xE2\x96\x81", 3) : push_char(t, (const char *)s + i, k)) return t->err->code;
        prev = c;
        i += k;
    }
    return finish_word(t);
}
