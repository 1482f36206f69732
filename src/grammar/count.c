/* count.c - masks of states inside a counted loop, from one walk for all counts.
 *
 * A string of at most 80 characters has a state for each number of characters so far, and each would need a walk of
 * most of the vocabulary. But what such a state allows differs only in how many iterations a token takes: one walk with
 * a loop without bounds (counts from OPEN on pass every gate) notes for each token the iterations it takes, and whether
 * it ends inside the loop or behind it. A state with count c then allows those of the first kind with c + n <= max, and
 * of the second with min <= c + n <= max.
 *
 * The walk keeps the part of the state inside the loop, set back to a count of OPEN so that there are few states, and
 * the part that has left the loop, with the iterations n at which it left. That needs a loop whose iterations are never
 * in doubt: one count at a time, and no byte that may both go on inside and be taken behind the loop. Other loops are
 * walked count by count.
 */
#include "grammar/mask_int.h"
#include <stdlib.h>

#define MANY 2048 /* tokens: beyond, masks are kept besides the list */

/* The state at one depth. */
typedef struct clevel {
    uint32_t in;    /* inside the loop (D_DEAD: nothing), at count OPEN */
    uint32_t n;     /* iterations begun since the start */
    uint32_t out;   /* behind the loop: a full state */
    uint32_t out_n; /* iterations at which it left */
} clevel;

typedef struct clist {
    counted *at;
    uint32_t n, cap;
} clist;

typedef struct cwalk {
    walker *k;
    clevel *lev; /* (max_depth + 2) */
    clist stay, leave, pop;
    bool gave_up;
} cwalk;

static bool add(cwalk *c, clist *l, int32_t what, uint32_t n)
{
    if (l->n == l->cap) {
        uint32_t cap = l->cap ? l->cap * 2 : 64;
        counted *p = lr_reallocarray(l->at, cap, sizeof *p);
        if (!p) return lr_walk__no_memory(c->k->g);
        l->at = p;
        l->cap = cap;
    }
    l->at[l->n++] = (counted){what, n};
    return true;
}

static bool add_token(cwalk *c, clist *l, const tnode *t, uint32_t n)
{
    bool ok = add(c, l, t->token, n);
    for (int32_t id = t->many ? c->k->t->same[t->token] : -1; id >= 0 && ok; id = c->k->t->same[id])
        ok = add(c, l, id, n);
    return ok;
}

/* One byte. False: w.err, or gave_up. */
static bool step(cwalk *c, const clevel *a, clevel *l, unsigned byte)
{
    lr_grammar *g = c->k->g;
    unsigned cls = g->n->cls[byte];
    uint32_t in = a->in ? lr_dfa__trans(g, a->in, cls) : D_DEAD, out = D_DEAD;
    if (a->out) {
        uint32_t b = lr_dfa__byte_part(g, a->out);
        if (b) out = lr_dfa__trans(g, b, cls);
    }
    *l = (clevel){.n = a->n, .out_n = a->out_n};
    if (g->w.err.code) return false;
    if (in && out) return !(c->gave_up = true);
    if (in) {
        if (!lr_dfa__split(g, in)) {
            c->gave_up = true;
            return false;
        }
        const dstate *s = &g->d[in];
        l->in = s->part.in;
        l->out = s->part.out;
        if (l->in) l->n = a->n + (s->part.count - OPEN);
        l->out_n = a->n;
    } else {
        l->out = out;
    }
    if ((l->in && g->d[l->in].n_calls) || (l->out && (g->d[l->out].n_calls || (g->d[l->out].flags & D_COUNTED))))
        return !(c->gave_up = true);
    return true;
}

static bool note(cwalk *c, const clevel *l, uint32_t i)
{
    const tnode *t = &c->k->t->node[i];
    bool leaf = t->skip == i + 1, ends = l->out && (c->k->g->d[l->out].flags & D_ENDS);
    if (t->token >= 0) {
        bool ok = l->in ? add_token(c, &c->stay, t, l->out ? l->out_n : l->n) : add_token(c, &c->leave, t, l->out_n);
        if (!ok) return false;
    }
    return !ends || leaf || add(c, &c->pop, (int32_t)i, l->out_n);
}

static bool walk(cwalk *c, uint32_t in)
{
    const lr_grammar_trie *t = c->k->t;
    uint32_t i = 1, end = t->node[0].skip;
    c->lev[0] = (clevel){.in = in};
    while (i < end) {
        const tnode *node = &t->node[i];
        clevel *l = &c->lev[node->depth];
        if (!step(c, &c->lev[node->depth - 1], l, node->byte)) return false;
        c->k->g->walked++;
        if (!l->in && !l->out) {
            i = node->skip;
            continue;
        }
        if (!note(c, l, i)) return false;
        i++;
    }
    return true;
}

/* By n; what has the same stays in order. */
static bool sort(clist *l)
{
    uint32_t most = 0, sum = 0;
    for (uint32_t i = 0; i < l->n; i++) most = l->at[i].n > most ? l->at[i].n : most;
    counted *out = lr_reallocarray(NULL, l->n + 1, sizeof *out);
    uint32_t *at = lr_calloc((size_t)most + 2, sizeof *at);
    if (out && at) {
        for (uint32_t i = 0; i < l->n; i++) at[l->at[i].n]++;
        for (uint32_t v = 0; v <= most; v++) {
            uint32_t n = at[v];
            at[v] = sum;
            sum += n;
        }
        for (uint32_t i = 0; i < l->n; i++) out[at[l->at[i].n]++] = l->at[i];
        lr_free(l->at);
        l->at = out;
        l->cap = l->n + 1;
        out = NULL;
    }
    bool ok = out == NULL && at != NULL;
    lr_free(out);
    lr_free(at);
    return ok;
}

static void set_bit(uint32_t *bits, int32_t id) { bits[id / 32] |= 1u << (id % 32); }

/* The masks of a long list of tokens, each made of the one before. */
static bool make_masks(lr_count *o, const clist *stay, size_t words)
{
    uint32_t i = 0;
    if (stay->n <= MANY) return true;
    o->all = lr_calloc(words, (1 + LR_COUNT_MASKS) * sizeof *o->all);
    if (!o->all) return false;
    o->upto = o->all + words;
    for (uint32_t n = 0; n < LR_COUNT_MASKS; n++) {
        uint32_t *m = o->upto + n * words;
        if (n) memcpy(m, m - words, words * sizeof *m);
        for (; i < stay->n && stay->at[i].n == n; i++) set_bit(m, stay->at[i].what);
    }
    memcpy(o->all, o->upto + (LR_COUNT_MASKS - 1) * words, words * sizeof *o->all);
    for (; i < stay->n; i++) set_bit(o->all, stay->at[i].what);
    o->bytes += words * (1 + LR_COUNT_MASKS) * sizeof *o->all;
    return true;
}

static lr_count *finish(cwalk *c)
{
    size_t words = ((size_t)c->k->t->n_vocab + 31) / 32;
    lr_count *o = lr_calloc(1, sizeof *o);
    if (!o) return NULL;
    o->refs = 1;
    if (!sort(&c->stay) || !sort(&c->leave) || !sort(&c->pop) || !make_masks(o, &c->stay, words)) {
        lr_free(o);
        return NULL;
    }
    o->stay = c->stay.at;
    o->leave = c->leave.at;
    o->pop = c->pop.at;
    o->n_stay = c->stay.n;
    o->n_leave = c->leave.n;
    o->n_pop = c->pop.n;
    o->bytes += sizeof *o + (c->stay.cap + c->leave.cap + c->pop.cap) * sizeof *o->stay;
    c->stay.at = c->leave.at = c->pop.at = NULL;
    return o;
}

void lr_count_unref(lr_count *c)
{
    if (--c->refs > 0) return;
    lr_free(c->stay);
    lr_free(c->leave);
    lr_free(c->pop);
    lr_free(c->all);
    lr_free(c);
}

void lr_mask__free_count(lr_grammar *g, lr_count *c)
{
    g->base_bytes -= c->bytes;
    lr_count_unref(c);
}

static lr_count *walk_count(walker *k, uint32_t in)
{
    cwalk c = {.k = k};
    lr_count *o = NULL;
    c.lev = lr_reallocarray(NULL, (size_t)k->t->max_depth + 2, sizeof *c.lev);
    if (c.lev && walk(&c, in)) o = finish(&c);
    if (!o && !c.gave_up && !k->g->w.err.code) lr_walk__no_memory(k->g);
    lr_free(c.lev);
    lr_free(c.stay.at);
    lr_free(c.leave.at);
    lr_free(c.pop.at);
    return o;
}

lr_count *lr_count_get(walker *k, uint32_t in)
{
    lr_grammar *g = k->g;
    if (g->d[in].cnt) return g->d[in].cnt;
    if (g->d[in].flags & D_NO_COUNT) return NULL;
    const nrule *home = lr_shared__home(g, in);
    uint64_t key[2] = {0, 0};
    lr_count *c = NULL;
    if (home) {
        lr_shared__key(g, home, home->loose, in, key);
        const struct shared_base *s = lr_shared__find(k->t, key);
        c = s ? s->cnt : NULL;
        if (c) c->refs++;
    }
    if (!c) {
        bool hit = g->w.hole_hit;
        g->w.hole_hit = false;
        c = walk_count(k, in);
        if (c && g->w.hole_hit) { /* the text has a say in it: not to be kept */
            lr_count_unref(c);
            c = NULL;
        }
        g->w.hole_hit = hit;
        if (!c) {
            if (!g->w.err.code) g->d[in].flags |= D_NO_COUNT;
            return NULL;
        }
        if (home) lr_shared__put(k->m->t, key, NULL, c);
    }
    g->d[in].cnt = c;
    g->base_bytes += c->bytes;
    return c;
}

/* ---- use ---- */

/* First entry with n >= v. */
static uint32_t lower(const counted *l, uint32_t n, uint64_t v)
{
    uint32_t lo = 0, hi = n;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (l[mid].n < v)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

void lr_count_or(const lr_count *c, uint32_t need, uint32_t left, uint32_t *bits, uint32_t *scratch, size_t words)
{
    uint32_t end = left == UINT32_MAX ? c->n_stay : lower(c->stay, c->n_stay, (uint64_t)left + 1);
    if (!c->all) {
        for (uint32_t i = 0; i < end; i++) set_bit(bits, c->stay[i].what);
    } else if (left < LR_COUNT_MASKS) {
        for (size_t i = 0; i < words; i++) bits[i] |= c->upto[left * words + i];
    } else if (end == c->n_stay) {
        for (size_t i = 0; i < words; i++) bits[i] |= c->all[i];
    } else {
        memcpy(scratch, c->all, words * sizeof *scratch);
        for (uint32_t i = end; i < c->n_stay; i++) scratch[c->stay[i].what / 32] &= ~(1u << (c->stay[i].what % 32));
        for (size_t i = 0; i < words; i++) bits[i] |= scratch[i];
    }
    for (uint32_t i = lower(c->leave, c->n_leave, need); i < c->n_leave && c->leave[i].n <= left; i++)
        set_bit(bits, c->leave[i].what);
}

uint32_t lr_count_most(const lr_count *c)
{
    uint32_t most = c->n_stay ? c->stay[c->n_stay - 1].n : 0;
    if (c->n_leave && c->leave[c->n_leave - 1].n > most) most = c->leave[c->n_leave - 1].n;
    return c->n_pop && c->pop[c->n_pop - 1].n > most ? c->pop[c->n_pop - 1].n : most;
}

const counted *lr_count_pops(const lr_count *c, uint32_t need, uint32_t left, uint32_t *n)
{
    uint32_t from = lower(c->pop, c->n_pop, need);
    uint32_t to = left == UINT32_MAX ? c->n_pop : lower(c->pop, c->n_pop, (uint64_t)left + 1);
    *n = to > from ? to - from : 0;
    return c->pop + from;
}
