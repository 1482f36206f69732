/* chars.c - BPE over characters with a list of merges, as tokenizer.json has it for SentencePiece's vocabularies: one
 * symbol a character, or byte tokens for a character that is no token, or the unknown token; merges in the list's
 * order.
 *
 * Words may be as long as the text. A word is cut where no token has the two characters side by side: nothing merges
 * across, and the symbols fit the cache.
 */
#include "text/text_int.h"
#include "text/unicode.h"

static int finish(lr_tok *t)
{
    if (t->n_sym == 0) return 0;
    if (lr_text_merge_run(t, lr_text_pair_rank)) return t->err->code;
    for (int32_t i = 0; i >= 0; i = t->sym[i].next)
        if (lr_text_ids_add(&t->out, t->sym[i].id, t->err)) return t->err->code;
    t->n_sym = 0;
    return 0;
}

/* A character that is no token; *unknown: the last one was unknown too. */
static int other(lr_tok *t, const uint8_t *s, size_t n, bool *unknown)
{
    const lr_vocab *v = t->v;
    bool bytes = true, before = *unknown;
    if (finish(t)) return t->err->code;
    for (size_t i = 0; i < n; i++) bytes = bytes && v->byte_id[s[i]] >= 0;
    for (size_t i = 0; i < n && bytes; i++)
        if (lr_text_ids_add(&t->out, v->byte_id[s[i]], t->err)) return t->err->code;
    *unknown = !bytes;
    if (bytes || (before && v->fuse_unk)) return 0;
    if (v->unk >= 0) return lr_text_ids_add(&t->out, v->unk, t->err);
    return lr_fail(t->err, LR_EUNSUPPORTED, "the vocabulary has no token for the byte 0x%02X", s[0]);
}

int lr_text_chars(lr_tok *t, const uint8_t *s, size_t n)
{
    const lr_vocab *v = t->v;
    bool unknown = false;
    int32_t prev = -1, cp;
    t->n_sym = 0;
    if (v->whole && n > 0) {
        int32_t id = lr_vocab_raw_id(v, (const char *)s, n);
        if (id >= 0 && v->flag[id] & LR_TF_MERGE) return lr_text_ids_add(&t->out, id, t->err);
    }
    for (size_t i = 0; i < n; prev = cp) {
        size_t k = lr_utf8_get(s + i, n - i, &cp);
        int32_t id = lr_vocab_raw_id(v, (const char *)s + i, k);
        if (id >= 0 && !(v->flag[id] & LR_TF_MERGE)) id = -1;
        if (id < 0) {
            if (other(t, s + i, k, &unknown)) return t->err->code;
            i += k;
            continue;
        }
        uint32_t h = lr_near_hash(prev, cp);
        if (t->n_sym && !(v->near[h >> 3] & (1u << (h & 7))) && finish(t)) return t->err->code;
        unknown = false;
        if (lr_text_merge_push(t, (uint32_t)i, (uint32_t)(i + k), id)) return t->err->code;
        i += k;
    }
    return finish(t);
}
