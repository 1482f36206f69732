/* unigram.c - the Unigram model: of all ways to write a word in tokens the one whose scores add up to the most, found
 * from left to right (Viterbi). A character that is no token by itself costs the lowest score less 10 and is the
 * unknown token, neighbouring ones together, or byte tokens if the vocabulary has them.
 */
#include "text/text_int.h"
#include "text/unicode.h"

#define UNKNOWN_COST 10.0

typedef struct node {
    double score; /* of the best way to here */
    int32_t id;   /* of its last token, -2: no way yet, -1: unknown */
    uint32_t from;
} node;

static int compare(const void *pa, const void *pb, const lr_vocab *v)
{
    int32_t a = *(const int32_t *)pa, b = *(const int32_t *)pb;
    lr_str s = lr_vocab_raw_str(v, (uint32_t)a), t = lr_vocab_raw_str(v, (uint32_t)b);
    int c = memcmp(s.s, t.s, s.n < t.n ? s.n : t.n);
    if (c) return c;
    if (s.n != t.n) return s.n < t.n ? -1 : 1;
    return a < b ? -1 : 1;
}

/* Merge sort: qsort has no place for the vocabulary. */
static void sort_ids(const lr_vocab *v, int32_t *a, int32_t *tmp, size_t n)
{
    for (size_t w = 1; w < n; w *= 2) {
        for (size_t lo = 0; lo < n; lo += 2 * w) {
            size_t mid = lo + w < n ? lo + w : n, hi = lo + 2 * w < n ? lo + 2 * w : n;
            size_t i = lo, j = mid, k = lo;
            while (i < mid || j < hi) tmp[k++] = j >= hi || (i < mid && compare(&a[i], &a[j], v) < 0) ? a[i++] : a[j++];
        }
        memcpy(a, tmp, n * sizeof *a);
    }
}

int lr_unigram_init(lr_vocab *v, const double *scores, lr_error *err)
{
    lr_unigram *u = &v->uni;
    int32_t *tmp = lr_reallocarray(NULL, (size_t)v->n + 1, sizeof *tmp);
    u->score = lr_reallocarray(NULL, (size_t)v->n + 1, sizeof *u->score);
    u->id = lr_reallocarray(NULL, (size_t)v->n + 1, sizeof *u->id);
    if (!tmp || !u->score || !u->id) {
        lr_free(tmp);
        return lr_fail(err, LR_ENOMEM, "no memory for the scores of %u tokens", v->n);
    }
    double low = 0;
    for (uint32_t id = 0; id < v->n; id++) {
        double s = scores[id];
        u->score[id] = s == s && s > -1e30 && s < 1e30 ? s : -1e30;
        if (v->type[id] == LR_TT_NORMAL && u->score[id] < low) low = u->score[id];
        if (v->type[id] == LR_TT_NORMAL && lr_vocab_raw_str(v, id).n) u->id[u->n++] = (int32_t)id;
    }
    u->unknown = low - UNKNOWN_COST;
    sort_ids(v, u->id, tmp, u->n);
    lr_free(tmp);
    uint32_t k = 0;
    for (unsigned b = 0; b < 256; b++) {
        u->first[b] = k;
        while (k < u->n && (uint8_t)lr_vocab_raw_str(v, (uint32_t)u->id[k]).s[0] == b) k++;
    }
    u->first[256] = u->n;
    return 0;
}

/* First of [lo, hi) whose byte d is at least c. */
static uint32_t lower(const lr_vocab *v, uint32_t lo, uint32_t hi, size_t d, unsigned c)
{
    while (lo < hi) {
        uint32_t m = lo + (hi - lo) / 2;
        if ((uint8_t)lr_vocab_raw_str(v, (uint32_t)v->uni.id[m]).s[d] < c)
            lo = m + 1;
        else
            hi = m;
    }
    return lo;
}

static void reach(node *t, double score, int32_t id, size_t from)
{
    if (t->id == -2 || score > t->score) *t = (node){score, id, (uint32_t)from};
}

/* All tokens that begin at s[i], and the unknown if none is one character long. */
static void step(const lr_vocab *v, const uint8_t *s, size_t i, size_t n, node *best)
{
    const lr_unigram *u = &v->uni;
    uint32_t lo = u->first[s[i]], hi = u->first[s[i] + 1];
    int32_t cp;
    size_t one = lr_utf8_get(s + i, n - i, &cp);
    bool single = false;
    for (size_t d = 1; lo < hi; d++) { /* [lo, hi): the tokens that begin with the d bytes seen so far */
        if (lr_vocab_raw_str(v, (uint32_t)u->id[lo]).n == d) {
            reach(&best[i + d], best[i].score + u->score[u->id[lo]], u->id[lo], i);
            single = single || d == one;
        }
        while (lo < hi && lr_vocab_raw_str(v, (uint32_t)u->id[lo]).n == d) lo++;
        if (i + d >= n) break;
        lo = lower(v, lo, hi, d, s[i + d]);
        hi = lower(v, lo, hi, d, s[i + d] + 1u);
    }
    if (!single) reach(&best[i + one], best[i].score + u->unknown, -1, i);
}

static int add_unknown(lr_tok *t, const uint8_t *s, size_t n, bool *fused)
{
    const lr_vocab *v = t->v;
    bool bytes = true;
    for (size_t i = 0; i < n; i++) bytes = bytes && v->byte_id[s[i]] >= 0;
    if (!bytes) {
        if (*fused) return 0;
        *fused = true;
        if (v->unk < 0)
            return lr_fail(t->err, LR_EUNSUPPORTED, "the vocabulary has no token for the byte 0x%02X", s[0]);
        return lr_text_ids_add(&t->out, v->unk, t->err);
    }
    for (size_t i = 0; i < n; i++)
        if (lr_text_ids_add(&t->out, v->byte_id[s[i]], t->err)) return t->err->code;
    return 0;
}

int lr_text_unigram(lr_tok *t, const uint8_t *s, size_t n)
{
    const lr_vocab *v = t->v;
    if (n == 0) return 0;
    node *best = lr_reallocarray(NULL, n + 1, sizeof *best);
    uint32_t *path = lr_reallocarray(NULL, n + 1, sizeof *path), k = 0;
    int rc = best && path ? 0 : lr_fail(t->err, LR_ENOMEM, "no memory to tokenize %zu bytes", n);
    if (!rc) {
        for (size_t i = 0; i <= n; i++) best[i] = (node){0, -2, 0};
        best[0].id = -1;
        int32_t cp;
        for (size_t i = 0; i < n; i += lr_utf8_get(s + i, n - i, &cp)) step(v, s, i, n, best);
        for (size_t at = n; at > 0; at = best[at].from) path[k++] = (uint32_t)at;
    }
    bool fused = false;
    while (k-- > 0 && !rc) {
        const node *b = &best[path[k]];
        if (b->id == -1) {
            rc = add_unknown(t, s + b->from, path[k] - b->from, &fused);
            continue;
        }
        fused = false;
        rc = lr_text_ids_add(&t->out, b->id, t->err);
    }
    lr_free(best);
    lr_free(path);
    return rc;
}
