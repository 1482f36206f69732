/* merge.c - the merge loop of both tokenizers: of all neighbouring symbols, the pair with the lowest rank (of equals
 * the leftmost) becomes one symbol, until no pair can.
 *
 * Candidates, a rank and a symbol that merges with its next one, wait in a 4-ary heap of 8-byte keys (with 20-byte
 * entries that also told the outcome, 200,000 random letters fell out of the cache and took 7 times as long as 50,000).
 * What a candidate says is looked up again when its turn comes, and it is dropped if its symbols have changed since.
 * A word of n symbols makes at most 3 n candidates, so it takes n log n. Short words, nearly all of them, are done by
 * scanning an array of ranks, which is quicker than the heap up to some 30 symbols.
 */
#include "text/text_int.h"

#define SHORT   24
#define NO_RANK UINT32_MAX

typedef bool pair_fn(const lr_tok *t, const lr_sym *a, const lr_sym *b, uint32_t *rank, int32_t *id);

static int grow(lr_tok *t, void **p, size_t *cap, size_t size)
{
    size_t n = *cap ? *cap * 2 : 64;
    void *q = lr_reallocarray(*p, n, size);
    if (!q) return lr_fail(t->err, LR_ENOMEM, "no memory to tokenize a word of %zu symbols", t->n_sym);
    *p = q;
    *cap = n;
    return 0;
}

int lr_text_merge_push(lr_tok *t, uint32_t at, uint32_t end, int32_t id)
{
    if (t->n_sym == t->cap_sym && grow(t, (void **)&t->sym, &t->cap_sym, sizeof *t->sym)) return t->err->code;
    int32_t i = (int32_t)t->n_sym++;
    t->sym[i] = (lr_sym){at, end, i - 1, -1, id};
    if (i > 0) t->sym[i - 1].next = i;
    return 0;
}

/* ---- short words ---- */

static void merge_short(lr_tok *t, pair_fn *pair)
{
    uint32_t rank[SHORT];
    int32_t id[SHORT];
    size_t n = t->n_sym;
    lr_sym *s = t->sym;
    for (size_t i = 0; i + 1 < n; i++)
        if (!pair(t, &s[i], &s[i + 1], &rank[i], &id[i])) rank[i] = NO_RANK;
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NO_RANK) break;
        s[best].end = s[best + 1].end;
        s[best].id = id[best];
        n--;
        memmove(s + best + 1, s + best + 2, (n - best - 1) * sizeof *s);
        if (best + 1 < n) {
            memmove(rank + best + 1, rank + best + 2, (n - best - 2) * sizeof *rank);
            memmove(id + best + 1, id + best + 2, (n - best - 2) * sizeof *id);
            if (!pair(t, &s[best], &s[best + 1], &rank[best], &id[best])) rank[best] = NO_RANK;
        }
        if (best > 0 && !pair(t, &s[best - 1], &s[best], &rank[best - 1], &id[best - 1])) rank[best - 1] = NO_RANK;
    }
    for (size_t i = 0; i < n; i++) {
        s[i].prev = (int32_t)i - 1;
        s[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    t->n_sym = n;
}

/* ---- long words ---- */

static void sift_down(uint64_t *h, size_t n, size_t i)
{
    uint64_t c = h[i];
    for (size_t k; (k = 4 * i + 1) < n; i = k) {
        size_t last = k + 4 < n ? k + 4 : n;
        for (size_t j = k + 1; j < last; j++)
            if (h[j] < h[k]) k = j;
        if (h[k] >= c) break;
        h[i] = h[k];
    }
    h[i] = c;
}

static bool pair_at(const lr_tok *t, int32_t i, pair_fn *pair, uint32_t *rank, int32_t *id)
{
    return i >= 0 && t->sym[i].next >= 0 && pair(t, &t->sym[i], &t->sym[t->sym[i].next], rank, id);
}

/* Adds the candidate of symbol i and the one after it, if they merge; sifts it up if `ordered`. */
static int consider(lr_tok *t, int32_t i, pair_fn *pair, bool ordered)
{
    uint32_t rank;
    int32_t id;
    if (!pair_at(t, i, pair, &rank, &id)) return 0;
    if (t->n_heap == t->cap_heap && grow(t, (void **)&t->heap, &t->cap_heap, sizeof *t->heap)) return t->err->code;
    uint64_t *h = t->heap, c = (uint64_t)rank << 32 | (uint32_t)i;
    size_t k = t->n_heap++;
    for (; ordered && k > 0 && c < h[(k - 1) / 4]; k = (k - 1) / 4) h[k] = h[(k - 1) / 4];
    h[k] = c;
    return 0;
}

static int merge_long(lr_tok *t, pair_fn *pair)
{
    t->n_heap = 0;
    for (size_t i = 0; i + 1 < t->n_sym; i++)
        if (consider(t, (int32_t)i, pair, false)) return t->err->code;
    for (size_t i = t->n_heap / 4 + 1; i-- > 0;)
        if (i < t->n_heap) sift_down(t->heap, t->n_heap, i);
    while (t->n_heap > 0) {
        uint64_t c = t->heap[0];
        uint32_t rank;
        int32_t i = (int32_t)(uint32_t)c, id;
        t->heap[0] = t->heap[--t->n_heap];
        if (t->n_heap) sift_down(t->heap, t->n_heap, 0);
        lr_sym *a = &t->sym[i];
        if (a->end == 0 || !pair_at(t, i, pair, &rank, &id) || rank != c >> 32) continue;
        lr_sym *b = &t->sym[a->next];
        a->end = b->end;
        a->id = id;
        a->next = b->next;
        b->end = 0;
        if (a->next >= 0) t->sym[a->next].prev = i;
        if (consider(t, a->prev, pair, true) || consider(t, i, pair, true)) return t->err->code;
    }
    return 0;
}

int lr_text_merge_run(lr_tok *t, pair_fn *pair)
{
    if (t->n_sym > SHORT) return merge_long(t, pair);
    if (t->n_sym > 1) merge_short(t, pair);
    return 0;
}
