/* base.c - bases: what a DFA state allows whatever its frame; and what grammars share of them. See mask.c. */
#include "grammar/mask_int.h"

#define SHARED_BYTES ((size_t)64 << 20)

#if defined(__x86_64__) && !defined(__POPCNT__)
__attribute__((target("popcnt"))) static size_t count_bits_fast(const uint32_t *bits, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i + 1 < n; i += 2) {
        uint64_t w;
        memcpy(&w, bits + i, sizeof w);
        count += (size_t)__builtin_popcountll(w);
    }
    return n % 2 ? count + (size_t)__builtin_popcount(bits[n - 1]) : count;
}
#endif

size_t lr_mask__count(const uint32_t *bits, size_t n)
{
#if defined(__x86_64__) && !defined(__POPCNT__)
    if (__builtin_cpu_supports("popcnt")) return count_bits_fast(bits, n);
#endif
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += (size_t)__builtin_popcount(bits[i]);
    return count;
}

void lr_base_unref(lr_base *b)
{
    if (--b->refs > 0) return;
    lr_free(b->pop);
    lr_free(b->sparse);
    lr_free(b->bits);
    lr_free(b);
}

void lr_mask__free_base(lr_grammar *g, lr_base *b)
{
    g->base_bytes -= b->bytes;
    lr_base_unref(b);
}

void lr_base_or(const lr_base *b, uint32_t *bits, size_t words)
{
    for (size_t i = 0; b->bits && i < words; i++) bits[i] |= b->bits[i];
    for (uint32_t i = 0; i < b->n_sparse; i++) bits[b->sparse[i] / 32] |= 1u << (b->sparse[i] % 32);
}

/* What a walk found, as a base; k->bits (zeros before) is left as zeros. */
static lr_base *base_of(walker *k)
{
    size_t words = ((size_t)k->t->n_vocab + 31) / 32, count = 0;
    lr_base *b = lr_calloc(1, sizeof *b);
    if (!b) goto fail;
    b->refs = 1;
    count = lr_mask__count(k->bits, words);
    if (count <= words / 2) {
        b->sparse = lr_reallocarray(NULL, count + 1, sizeof *b->sparse);
        if (!b->sparse) goto fail;
        for (size_t i = 0; i < words; i++) {
            for (uint32_t w = k->bits[i]; w; w &= w - 1)
                b->sparse[b->n_sparse++] = (int32_t)(32 * i) + __builtin_ctz(w);
        }
    } else {
        b->bits = lr_memdup(k->bits, words * sizeof *b->bits);
        if (!b->bits) goto fail;
    }
    if (k->n_pop) {
        b->pop = lr_memdup(k->pop, k->n_pop * sizeof *b->pop);
        if (!b->pop) goto fail;
    }
    b->n_pop = k->n_pop;
    b->bytes = sizeof *b + b->n_sparse * sizeof *b->sparse + (b->bits ? words * 4 : 0) + b->n_pop * sizeof *b->pop;
    memset(k->bits, 0, words * sizeof *k->bits);
    return b;
fail:
    if (b) lr_base_unref(b);
    lr_walk__no_memory(k->g);
    return NULL;
}

/* Walks from the root with d and the frame that returns nowhere. */
static lr_base *walk_base(walker *k, uint32_t d, bool *hole_hit)
{
    lr_grammar *g = k->g;
    gitem it = {d, lr_frame__root(g)};
    bool hit = g->w.hole_hit;
    if (!it.f) return NULL;
    g->w.hole_hit = false;
    k->want_pops = true;
    k->n_pop = 0;
    bool ok = lr_walk(k, 0, &it, 1, 0);
    k->want_pops = false;
    *hole_hit = g->w.hole_hit;
    g->w.hole_hit = hit || g->w.hole_hit;
    return ok ? base_of(k) : NULL;
}

lr_base *lr_base_get(walker *k, uint32_t d, bool *temporary)
{
    lr_grammar *g = k->g;
    *temporary = false;
    if (g->d[d].base) return g->d[d].base;
    const nrule *home = lr_shared__home(g, d);
    uint64_t key[2] = {0, 0};
    lr_base *b = NULL;
    if (home) {
        lr_shared__key(g, home, home->sig, d, key);
        const struct shared_base *s = lr_shared__find(k->t, key);
        b = s ? s->base : NULL;
        if (b) b->refs++;
    }
    if (!b) {
        b = walk_base(k, d, temporary);
        if (!b || *temporary) return b;
        if (home) lr_shared__put(k->m->t, key, b, NULL);
    }
    g->d[d].base = b;
    g->base_bytes += b->bytes;
    return b;
}

/* ---- shared ---- */

const nrule *lr_shared__home(const lr_grammar *g, uint32_t d)
{
    const dstate *s = &g->d[d];
    const nfa *n = g->n;
    uint32_t q = (uint32_t)s->items[0], lo = 0, hi = n->n_rule;
    while (hi - lo > 1) { /* rules were emitted in order */
        uint32_t mid = lo + (hi - lo) / 2;
        if (n->rule[mid].lo <= q)
            lo = mid;
        else
            hi = mid;
    }
    const nrule *r = &n->rule[lo];
    if (!r->shares) return NULL;
    for (uint32_t i = 0; i < s->n; i++) {
        q = (uint32_t)s->items[i];
        if (q < r->lo || q >= r->hi) return NULL;
    }
    return r;
}

void lr_shared__key(const lr_grammar *g, const nrule *r, const uint64_t sig[2], uint32_t d, uint64_t key[2])
{
    texthash h = {sig[0], sig[1]};
    for (uint32_t i = 0; i < g->d[d].n; i++) {
        uint64_t v = g->d[d].items[i] - r->lo;
        for (int k = 0; k < 8; k++) texthash_add(&h, v >> 8 * k & 0xFF);
    }
    key[0] = h.a;
    key[1] = h.b;
}

static bool used(const struct shared_base *s) { return s->base || s->cnt; }

static struct shared_base *shared_at(const lr_grammar_trie *t, const uint64_t key[2])
{
    uint32_t i = (uint32_t)(key[0] >> 20) & (t->cap_shared - 1);
    while (used(&t->shared[i]) && (t->shared[i].key[0] != key[0] || t->shared[i].key[1] != key[1])) {
        i = (i + 1) & (t->cap_shared - 1);
    }
    return &t->shared[i];
}

const struct shared_base *lr_shared__find(const lr_grammar_trie *t, const uint64_t key[2])
{
    const struct shared_base *s = t->cap_shared ? shared_at(t, key) : NULL;
    return s && used(s) ? s : NULL;
}

void lr_mask__free_shared(lr_grammar_trie *t)
{
    for (uint32_t i = 0; i < t->cap_shared; i++) {
        if (t->shared[i].base) lr_base_unref(t->shared[i].base);
        if (t->shared[i].cnt) lr_count_unref(t->shared[i].cnt);
    }
    lr_free(t->shared);
    t->shared = NULL;
    t->cap_shared = t->n_shared = 0;
    t->shared_bytes = 0;
}

void lr_shared__put(lr_grammar_trie *t, const uint64_t key[2], lr_base *base, lr_count *cnt)
{
    if (t->shared_bytes > SHARED_BYTES) lr_mask__free_shared(t);
    if (2 * t->n_shared >= t->cap_shared) {
        uint32_t cap = t->cap_shared ? t->cap_shared * 2 : 64, old = t->cap_shared;
        struct shared_base *s = lr_calloc(cap, sizeof *s), *before = t->shared;
        if (!s) return;
        t->shared = s;
        t->cap_shared = cap;
        for (uint32_t i = 0; i < old; i++) {
            if (used(&before[i])) *shared_at(t, before[i].key) = before[i];
        }
        lr_free(before);
    }
    struct shared_base *s = shared_at(t, key);
    if (used(s)) return;
    *s = (struct shared_base){{key[0], key[1]}, base, cnt};
    if (base) base->refs++;
    if (cnt) cnt->refs++;
    t->n_shared++;
    t->shared_bytes += base ? base->bytes : cnt->bytes;
}
