/* merge.c - the merge loop of both tokenizers: of all neighbouring symbols, the pair with the lowest rank (of equals
 * the leftmost) becomes one symbol, until no pair can.
 *
 * Candidates wait in a binary heap; one whose symbols have changed since is recognised by its places and dropped. A
 * word of n symbols makes at most 3 n candidates, so it takes n log n. Short words, nearly all of them, are done by
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

int lr_merge_push(lr_tok *t, uint32_t at, uint32_t end, int32_t id)
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

static inline bool before(const lr_cand *a, const lr_cand *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->sym < b->sym;
}

static void sift_down(lr_cand *h, size_t n, size_t i)
{
    lr_cand c = h[i];
    for (size_t k; (k = 2 * i + 1) < n; i = k) {
        if (k + 1 < n && before(&h[k + 1], &h[k])) k++;
        if (!before(&h[k], &c)) break;
        h[i] = h[k];
    }
    h[i] = c;
}

/* Adds the candidate of symbol i and the one after it, if they merge; sifts it up if `ordered`. */
static int consider(lr_tok *t, int32_t i, pair_fn *pair, bool ordered)
{
    lr_cand c;
    if (i < 0 || t->sym[i].next < 0) return 0;
    const lr_sym *a = &t->sym[i], *b = &t->sym[a->next];
    if (!pair(t, a, b, &c.rank, &c.id)) return 0;
    c.sym = (uint32_t)i;
    c.mid = a->end;
    c.end = b->end;
    if (t->n_heap == t->cap_heap && grow(t, (void **)&t->heap, &t->cap_heap, sizeof *t->heap)) return t->err->code;
    lr_cand *h = t->heap;
    size_t k = t->n_heap++;
    for (; ordered && k > 0 && before(&c, &h[(k - 1) / 2]); k = (k - 1) / 2) h[k] = h[(k - 1) / 2];
    h[k] = c;
    return 0;
}

static int merge_long(lr_tok *t, pair_fn *pair)
{
    t->n_heap = 0;
    for (size_t i = 0; i + 1 < t->n_sym; i++)
        if (consider(t, (int32_t)i, pair, false)) return t->err->code;
    for (size_t i = t->n_heap / 2; i-- > 0;) sift_down(t->heap, t->n_heap, i);
    while (t->n_heap > 0) {
        lr_cand c = t->heap[0];
        t->heap[0] = t->heap[--t->n_heap];
        if (t->n_heap) sift_down(t->heap, t->n_heap, 0);
        lr_sym *a = &t->sym[c.sym];
        if (a->end != c.mid || a->next < 0 || t->sym[a->next].end != c.end) continue;
        lr_sym *b = &t->sym[a->next];
        a->end = b->end;
        a->id = c.id;
        a->next = b->next;
        b->end = 0;
        if (a->next >= 0) t->sym[a->next].prev = (int32_t)c.sym;
        if (consider(t, a->prev, pair, true) || consider(t, (int32_t)c.sym, pair, true)) return t->err->code;
    }
    return 0;
}

int lr_merge_run(lr_tok *t, pair_fn *pair)
{
    if (t->n_sym > SHORT) return merge_long(t, pair);
    if (t->n_sym > 1) merge_short(t, pair);
    return 0;
}
