/* bpe.c - byte-level BPE: text -> words (presplit.h) -> one symbol a byte -> merges in the order of the file's list.
 *
 * Works on ids alone; the text of a symbol is never looked at again. A byte without a token (small vocabularies leave
 * out those that they never saw) is spelt as U+FFFD, so that the model sees that something was there.
 */
#include "text/text_int.h"
#include "text/unicode.h"

bool lr_text_pair_rank(const lr_tok *t, const lr_sym *a, const lr_sym *b, uint32_t *rank, int32_t *id)
{
    const lr_vocab *v = t->v;
    uint64_t key = ((uint64_t)(uint32_t)a->id << 32 | (uint32_t)b->id) + 1;
    for (uint64_t i = (key * 0x9E3779B97F4A7C15u) >> 32 & v->pair_mask; v->pair[i].key; i = (i + 1) & v->pair_mask)
        if (v->pair[i].key == key) {
            *rank = v->pair[i].rank;
            *id = v->pair[i].id;
            return true;
        }
    return false;
}

static int push_missing(lr_tok *t, uint8_t byte, uint32_t *at)
{
    static const uint8_t fffd[3] = {0xEF, 0xBF, 0xBD};
    const lr_vocab *v = t->v;
    if (v->byte_id[fffd[0]] >= 0 && v->byte_id[fffd[1]] >= 0 && v->byte_id[fffd[2]] >= 0) {
        for (int k = 0; k < 3; k++, (*at)++)
            if (lr_text_merge_push(t, *at, *at + 1, v->byte_id[fffd[k]])) return t->err->code;
        return 0;
    }
    if (v->unk < 0) return lr_fail(t->err, LR_EUNSUPPORTED, "the vocabulary has no token for the byte 0x%02X", byte);
    if (lr_text_merge_push(t, *at, *at + 1, v->unk)) return t->err->code;
    ++*at;
    return 0;
}

/* The token that a whole word is, -1 none. */
static int32_t whole_word(const lr_vocab *v, const uint8_t *s, size_t n)
{
    char raw[2 * LR_TOKEN_MAX];
    size_t o = 0;
    if (n > v->max_piece) return -1;
    for (size_t i = 0; i < n; i++) o += lr_text_bytelevel(s[i], raw + o);
    int32_t id = lr_vocab_raw_id(v, raw, o);
    return id >= 0 && v->type[id] == LR_TT_NORMAL ? id : -1;
}

static int word(void *ctx, size_t start, size_t end)
{
    lr_tok *t = ctx;
    const lr_vocab *v = t->v;
    const uint8_t *s = t->text;
    if (v->whole && end - start > 1) {
        int32_t id = whole_word(v, s + start, end - start);
        if (id >= 0) return lr_text_ids_add(&t->out, id, t->err);
    }
    uint32_t at = 0;
    t->n_sym = 0;
    for (size_t i = start; i < end; i++) {
        int32_t id = v->byte_id[s[i]];
        if (id < 0) {
            if (push_missing(t, s[i], &at)) return t->err->code;
            continue;
        }
        if (lr_text_merge_push(t, at, at + 1, id)) return t->err->code;
        at++;
    }
    if (lr_text_merge_run(t, lr_text_pair_rank)) return t->err->code;
    for (int32_t i = 0; i >= 0; i = t->sym[i].next)
        if (lr_text_ids_add(&t->out, t->sym[i].id, t->err)) return t->err->code;
    return 0;
}

int lr_text_bpe_word(lr_tok *t, const uint8_t *s, size_t n)
{
    t->text = s;
    return n ? word(t, 0, n) : 0;
}

int lr_text_bpe(lr_tok *t, const uint8_t *s, size_t n)
{
    uint8_t *nfc = NULL;
    if (n == 0) return 0;
    if (t->v->nfc && lr_uc_nfc(s, n, &nfc, &n, t->err)) return t->err->code;
    t->text = nfc ? nfc : s;
    int rc = lr_presplit(t->v->pre, t->text, n, word, t);
    lr_free(nfc);
    return rc;
}
