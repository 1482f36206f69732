/* dfa.c - sets of automaton states, made when they are first needed and found again by content. See grammar_int.h. */
#include "grammar/grammar_int.h"
#include <stdlib.h>

static int cmp_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void sort_u64(uint64_t *v, uint32_t n)
{
    if (n > 24) {
        qsort(v, n, sizeof *v, cmp_u64);
        return;
    }
    for (uint32_t i = 1; i < n; i++) {
        uint64_t x = v[i];
        uint32_t k = i;
        for (; k > 0 && v[k - 1] > x; k--) v[k] = v[k - 1];
        v[k] = x;
    }
}

static void no_memory(gwork *w)
{
    if (!w->err.code) lr_fail(&w->err, LR_ENOMEM, "no memory for the grammar's states");
}

/* ---- closure ---- */

static bool grow_u32(gwork *w, uint32_t **p, uint32_t *cap, uint32_t need)
{
    if (need <= *cap) return true;
    uint32_t want = *cap * 2 > need ? *cap * 2 : need + 64;
    uint32_t *q = lr_reallocarray(*p, want, sizeof *q);
    if (!q) {
        no_memory(w);
        return false;
    }
    *p = q;
    *cap = want;
    return true;
}

static bool grow_seen(gwork *w, uint32_t n)
{
    if (n <= w->cap_seen) return true;
    uint32_t old = w->cap_seen, cap = old, cap2 = old, want = n + n / 2 + 64;
    if (!grow_u32(w, &w->seen, &cap, want) || !grow_u32(w, &w->seen_count, &cap2, want)) return false;
    w->cap_seen = cap < cap2 ? cap : cap2;
    memset(w->seen + old, 0, (w->cap_seen - old) * sizeof *w->seen);
    return true;
}

static bool begin_set(lr_grammar *g)
{
    gwork *w = &g->w;
    w->n_sub = 0;
    if (!grow_seen(w, g->n->n_st)) return false;
    if (++w->stamp == 0) {
        memset(w->seen, 0, w->cap_seen * sizeof *w->seen);
        w->stamp = 1;
    }
    return true;
}

static bool add_item(gwork *w, uint64_t item)
{
    if (w->n_sub == w->cap_sub) {
        uint32_t cap = w->cap_sub ? w->cap_sub * 2 : 64;
        uint64_t *q = lr_reallocarray(w->sub, cap, sizeof *q);
        if (!q) {
            no_memory(w);
            return false;
        }
        w->sub = q;
        w->cap_sub = cap;
    }
    w->sub[w->n_sub++] = item;
    return true;
}

static bool too_much(gwork *w)
{
    if (!w->err.code) lr_fail(&w->err, LR_ELIMIT, "the grammar is too ambiguous here: too much work for one token");
    return false;
}

/* Adds to w.sub what state q with count c reaches without a byte. */
static bool reach(lr_grammar *g, uint32_t q, uint32_t c)
{
    gwork *w = &g->w;
    const nfa *n = g->n;
    uint32_t top = 0, base = 2;
    if (!grow_u32(w, &w->stack, &w->cap_stack, base)) return false;
    w->stack[top++] = q;
    w->stack[top++] = c;
    while (top) {
        c = w->stack[--top];
        q = w->stack[--top];
        if (w->seen[q] == w->stamp && w->seen_count[q] == c) continue;
        if (w->steps == 0 || w->n_sub > LR_G_MAX_SUBSET) return too_much(w);
        w->steps--;
        w->seen[q] = w->stamp;
        w->seen_count[q] = c;
        if (!grow_u32(w, &w->stack, &w->cap_stack, top + 4)) return false;
        const nstate *s = &n->st[q];
        switch (s->kind) {
        case N_SPLIT:
            w->stack[top++] = s->b;
            w->stack[top++] = c;
            w->stack[top++] = s->a;
            w->stack[top++] = c;
            break;
        case N_ENTER:
            if (n->loop[s->x].min == 0) {
                w->stack[top++] = s->b;
                w->stack[top++] = c;
            }
            w->stack[top++] = s->a;
            w->stack[top++] = 1;
            break;
        case N_LOOP: {
            const gloop *l = &n->loop[s->x];
            if (c >= OPEN) {
                w->stack[top++] = s->b;
                w->stack[top++] = 0;
                w->stack[top++] = s->a;
                w->stack[top++] = c + 1;
                break;
            }
            if (c >= l->min) {
                w->stack[top++] = s->b;
                w->stack[top++] = 0;
            }
            if (c < l->max) {
                w->stack[top++] = s->a;
                w->stack[top++] = l->max == UINT32_MAX && c >= l->min ? c : c + 1;
            }
            break;
        }
        case N_CALL:
            if (!add_item(w, (uint64_t)c << 32 | q)) return false;
            if (s->b == 0 && n->rule[s->x].nullable) {
                w->stack[top++] = s->a;
                w->stack[top++] = c;
            }
            break;
        case N_BYTES:
        case N_END:
            if (!add_item(w, (uint64_t)c << 32 | q)) return false;
            break;
        default:
            break;
        }
    }
    return true;
}

/* ---- table ---- */

static uint32_t hash_items(const uint64_t *v, uint32_t n)
{
    uint64_t h = n;
    for (uint32_t i = 0; i < n; i++) {
        h = (h ^ v[i]) * 0x9E3779B97F4A7C15u;
        h ^= h >> 32;
    }
    return (uint32_t)h;
}

static bool rehash(lr_grammar *g, uint32_t n_bucket)
{
    uint32_t *b = lr_calloc(n_bucket, sizeof *b);
    if (!b) {
        no_memory(&g->w);
        return false;
    }
    lr_free(g->bucket);
    g->bucket = b;
    g->n_bucket = n_bucket;
    for (uint32_t d = 1; d < g->n_d; d++) {
        if (g->d[d].flags & D_FREE) continue;
        uint32_t *slot = &b[g->d[d].hash & (n_bucket - 1)];
        g->d[d].next = *slot;
        *slot = d;
    }
    return true;
}

/* A free place in the table; 0 on failure. Place 0 is never used: it is D_DEAD. */
static uint32_t new_place(lr_grammar *g)
{
    if (g->d_free) {
        uint32_t d = g->d_free;
        g->d_free = g->d[d].next;
        return d;
    }
    if (g->n_d == g->cap_d) {
        uint32_t cap = g->cap_d ? g->cap_d * 2 : 64;
        dstate *p = lr_reallocarray(g->d, cap, sizeof *p);
        if (!p) {
            no_memory(&g->w);
            return 0;
        }
        g->d = p;
        g->cap_d = cap;
    }
    if (g->n_d == 0) g->d[g->n_d++] = (dstate){.flags = D_FREE};
    return g->n_d++;
}

static size_t state_bytes(const lr_grammar *g, const dstate *s)
{
    return sizeof *s + (s->n + s->n_calls) * sizeof *s->items + (s->trans ? g->n->n_cls * sizeof *s->trans : 0);
}

/* Rules that the items call, each once, ascending; -> their number. */
static uint32_t find_calls(lr_grammar *g, uint32_t *out, uint32_t max)
{
    gwork *w = &g->w;
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_sub; i++) {
        const nstate *s = &g->n->st[(uint32_t)w->sub[i]];
        if (s->kind != N_CALL) continue;
        uint32_t k = n;
        while (k > 0 && out[k - 1] > s->x) k--;
        if (k > 0 && out[k - 1] == s->x) continue;
        if (n == max) {
            lr_fail(&w->err, LR_ELIMIT, "too many rules may start at one place");
            return n;
        }
        memmove(out + k + 1, out + k, (n - k) * sizeof *out);
        out[k] = s->x;
        n++;
    }
    return n;
}

static uint32_t make_state(lr_grammar *g, uint32_t hash)
{
    enum { MAX_CALLS = 4096 };
    uint32_t calls[MAX_CALLS];
    gwork *w = &g->w;
    if (g->d_bytes > LR_G_HARD_DFA) {
        lr_fail(&w->err, LR_ELIMIT, "the grammar needs too many states: over %zu MB", LR_G_HARD_DFA >> 20);
        return D_DEAD;
    }
    uint32_t n_calls = find_calls(g, calls, MAX_CALLS), d = w->err.code ? 0 : new_place(g);
    uint64_t *items = d ? lr_reallocarray(NULL, (size_t)w->n_sub + n_calls, sizeof *items) : NULL;
    if (!items) {
        if (d) {
            g->d[d] = (dstate){.flags = D_FREE, .next = g->d_free};
            g->d_free = d;
            no_memory(w);
        }
        return D_DEAD;
    }
    memcpy(items, w->sub, w->n_sub * sizeof *items);
    dstate *s = &g->d[d];
    *s = (dstate){.items = items, .n = w->n_sub, .hash = hash, .byte = D_UNKNOWN, .n_calls = n_calls};
    uint32_t *c = lr_dfa__calls(s);
    for (uint32_t i = 0; i < n_calls; i++) {
        c[2 * i] = calls[i];
        c[2 * i + 1] = D_UNKNOWN;
    }
    bool narrow = g->n->wide != NULL;
    for (uint32_t i = 0; i < s->n; i++) {
        uint32_t q = (uint32_t)items[i];
        if (q == 0) s->flags |= D_ENDS;
        if (items[i] >> 32) s->flags |= D_COUNTED;
        narrow = narrow && q < g->n->n_wide && !g->n->wide[q];
    }
    if (narrow) s->flags |= D_NARROW;
    if (!n_calls && !(s->flags & D_ENDS)) {
        s->flags |= D_PLAIN;
        s->byte = d;
    }
    uint32_t *slot = &g->bucket[hash & (g->n_bucket - 1)];
    s->next = *slot;
    *slot = d;
    g->d_bytes += state_bytes(g, s);
    return d;
}

uint32_t lr_dfa__intern(lr_grammar *g)
{
    gwork *w = &g->w;
    if (w->err.code || w->n_sub == 0) return D_DEAD;
    sort_u64(w->sub, w->n_sub);
    uint32_t n = 1;
    for (uint32_t i = 1; i < w->n_sub; i++) {
        if (w->sub[i] != w->sub[n - 1]) w->sub[n++] = w->sub[i];
    }
    w->n_sub = n;
    uint32_t hash = hash_items(w->sub, n);
    for (uint32_t d = g->n_bucket ? g->bucket[hash & (g->n_bucket - 1)] : 0; d; d = g->d[d].next) {
        const dstate *s = &g->d[d];
        if (s->hash == hash && s->n == n && memcmp(s->items, w->sub, n * sizeof *w->sub) == 0) return d;
    }
    if (g->n_d >= g->n_bucket && !rehash(g, g->n_bucket ? g->n_bucket * 2 : 64)) return D_DEAD;
    return make_state(g, hash);
}

/* ---- states from states ---- */

uint32_t lr_dfa__of_state(lr_grammar *g, uint32_t q, uint32_t count)
{
    if (!begin_set(g) || !reach(g, q, count)) return D_DEAD;
    return lr_dfa__intern(g);
}

uint32_t lr_dfa__byte_part(lr_grammar *g, uint32_t d)
{
    dstate *s = &g->d[d];
    if (s->byte != D_UNKNOWN) return s->byte;
    if (!begin_set(g)) return D_DEAD;
    for (uint32_t i = 0; i < s->n; i++) {
        if (g->n->st[(uint32_t)s->items[i]].kind == N_BYTES && !add_item(&g->w, s->items[i])) return D_DEAD;
    }
    uint32_t b = lr_dfa__intern(g);
    if (!g->w.err.code) g->d[d].byte = b;
    return b;
}

uint32_t lr_dfa__trans_slow(lr_grammar *g, uint32_t d, unsigned cls)
{
    dstate *s = &g->d[d];
    if (!s->trans) {
        s->trans = lr_reallocarray(NULL, g->n->n_cls, sizeof *s->trans);
        if (!s->trans) {
            no_memory(&g->w);
            return D_DEAD;
        }
        memset(s->trans, 0xFF, g->n->n_cls * sizeof *s->trans);
        g->d_bytes += g->n->n_cls * sizeof *s->trans;
    }
    if (!begin_set(g)) return D_DEAD;
    unsigned byte = g->n->rep[cls];
    for (uint32_t i = 0; i < s->n; i++) {
        const nstate *q = &g->n->st[(uint32_t)s->items[i]];
        if (q->kind != N_BYTES || !gset_has(&g->n->set[q->x], byte)) continue;
        if (!reach(g, q->a, (uint32_t)(s->items[i] >> 32))) return D_DEAD;
    }
    uint32_t t = lr_dfa__intern(g);
    if (!g->w.err.code) g->d[d].trans[cls] = g->d[t].flags & D_PLAIN ? t | PLAIN : t;
    return t;
}

uint32_t lr_dfa__after_call(lr_grammar *g, uint32_t d, uint32_t i)
{
    const dstate *s = &g->d[d];
    uint32_t rule = lr_dfa__calls(s)[2 * i], t = lr_dfa__calls(s)[2 * i + 1];
    if (t != D_UNKNOWN) return t;
    if (!begin_set(g)) return D_DEAD;
    for (uint32_t k = 0; k < s->n; k++) {
        const nstate *q = &g->n->st[(uint32_t)s->items[k]];
        if (q->kind != N_CALL || q->x != rule) continue;
        if (!reach(g, q->a, (uint32_t)(s->items[k] >> 32))) return D_DEAD;
    }
    t = lr_dfa__intern(g);
    if (!g->w.err.code) lr_dfa__calls(&g->d[d])[2 * i + 1] = t;
    return t;
}

uint32_t lr_dfa__union(lr_grammar *g, uint32_t a, uint32_t b)
{
    if (a == b || b == D_DEAD) return a;
    if (a == D_DEAD) return b;
    if (!begin_set(g)) return D_DEAD;
    const uint32_t both[2] = {a, b};
    for (int k = 0; k < 2; k++) {
        const dstate *s = &g->d[both[k]];
        for (uint32_t i = 0; i < s->n; i++) {
            if (!add_item(&g->w, s->items[i])) return D_DEAD;
        }
        if (g->w.steps < s->n) {
            too_much(&g->w);
            return D_DEAD;
        }
        g->w.steps -= s->n;
    }
    return lr_dfa__intern(g);
}

/* Interns the items of d that have a count, with OPEN for it (in), or those that have none. */
static uint32_t half(lr_grammar *g, uint32_t d, bool in)
{
    if (!begin_set(g)) return D_DEAD;
    for (uint32_t i = 0; i < g->d[d].n; i++) {
        uint64_t item = g->d[d].items[i];
        if ((item >> 32 != 0) != in) continue;
        if (in) item = (uint64_t)OPEN << 32 | (uint32_t)item;
        if (!add_item(&g->w, item)) return D_DEAD;
    }
    return lr_dfa__intern(g);
}

bool lr_dfa__split(lr_grammar *g, uint32_t d)
{
    if (g->d[d].flags & D_SPLIT) return g->d[d].part.in != D_UNKNOWN;
    const dstate *s = &g->d[d];
    uint32_t count = 0, loop = N_NONE, in = D_UNKNOWN, out = D_DEAD;
    bool ok = true;
    for (uint32_t i = 0; i < s->n && ok; i++) {
        uint32_t c = (uint32_t)(s->items[i] >> 32), l = g->n->st[(uint32_t)s->items[i]].loop;
        if (!c) continue;
        ok = (!count || c == count) && (loop == N_NONE || l == loop) && l != N_NONE;
        count = c;
        loop = l;
    }
    if (ok) {
        in = half(g, d, true);
        if (!g->w.err.code) out = half(g, d, false);
        if (g->w.err.code) return false;
    }
    dstate *t = &g->d[d];
    t->part.in = in;
    t->part.out = out;
    t->part.count = count;
    t->part.loop = loop;
    t->flags |= D_SPLIT;
    return ok;
}

/* ---- dropping ---- */

static void drop_state(lr_grammar *g, uint32_t d)
{
    dstate *s = &g->d[d];
    g->d_bytes -= state_bytes(g, s);
    if (s->base) lr_mask__free_base(g, s->base);
    if (s->cnt) lr_mask__free_count(g, s->cnt);
    lr_free(s->items);
    lr_free(s->trans);
    *s = (dstate){.flags = D_FREE, .next = g->d_free};
    g->d_free = d;
}

static void mark(lr_grammar *g, uint32_t d)
{
    if (d != D_DEAD && d != D_UNKNOWN) g->d[d].flags |= D_MARK;
}

static void forget(lr_grammar *g, uint32_t *d)
{
    if (*d != D_DEAD && *d != D_UNKNOWN && !(g->d[*d & ~PLAIN].flags & D_MARK)) *d = D_UNKNOWN;
}

static void mark_all(lr_grammar *g)
{
    for (uint32_t i = 0; i < g->n_fbucket; i++) {
        for (const frame *f = g->fbucket[i]; f; f = f->next) {
            for (uint32_t k = 0; k < f->n; k++) mark(g, f->ret[k].d);
        }
    }
    for (lr_matcher *m = g->matchers; m; m = m->next) {
        for (uint32_t i = 0; i <= LR_MATCHER_HISTORY; i++) {
            for (uint32_t k = 0; k < m->slot[i].s.n; k++) mark(g, m->slot[i].s.it[k].d);
        }
        for (size_t i = 0; i < m->n_memo; i++) mark(g, m->memo[i].d);
    }
}

void lr_grammar__collect(lr_grammar *g)
{
    if (g->d_bytes < LR_G_SOFT_DFA) return;
    lr_grammar__drop_masks(g);
    mark_all(g);
    for (uint32_t r = 0; r < g->n->n_rule; r++) {
        if (g->n->rule[r].d0 && !(g->d[g->n->rule[r].d0].flags & D_MARK)) g->n->rule[r].d0 = 0;
    }
    for (uint32_t d = 1; d < g->n_d; d++) {
        dstate *s = &g->d[d];
        if ((s->flags & D_FREE) || !(s->flags & D_MARK)) continue;
        forget(g, &s->byte);
        s->flags &= (uint8_t)~D_SPLIT;
        for (uint32_t i = 0; i < s->n_calls; i++) forget(g, &lr_dfa__calls(s)[2 * i + 1]);
        for (uint32_t i = 0; s->trans && i < g->n->n_cls; i++) forget(g, &s->trans[i]);
    }
    for (uint32_t d = 1; d < g->n_d; d++) {
        if (!(g->d[d].flags & (D_FREE | D_MARK))) drop_state(g, d);
        g->d[d].flags &= (uint8_t)~D_MARK;
    }
    (void)rehash(g, g->n_bucket);
}

void lr_dfa__free_all(lr_grammar *g)
{
    for (uint32_t d = 1; d < g->n_d; d++) {
        if (!(g->d[d].flags & D_FREE)) drop_state(g, d);
    }
    lr_free(g->d);
    lr_free(g->bucket);
}
