/* walk.c - goes over a vocabulary's trie with a state, and notes the tokens that it allows. See mask.c. */
#include "grammar/mask_int.h"

bool lr_walk__no_memory(lr_grammar *g)
{
    if (!g->w.err.code) lr_fail(&g->w.err, LR_ENOMEM, "no memory for a token mask");
    return false;
}

walker *lr_walker_get(lr_matcher *m, uint32_t *bits)
{
    lr_grammar *g = m->g;
    walker *k = g->walker;
    if (!k || k->t != m->t) {
        lr_walker_free(k);
        g->walker = k = lr_calloc(1, sizeof *k);
        if (k) k->lev = lr_reallocarray(NULL, m->t->max_depth + 2, sizeof *k->lev);
        if (k && g->n->n_hole) k->path = lr_malloc(m->t->max_depth + 1);
        if (!k || !k->lev || (g->n->n_hole && !k->path)) {
            lr_walker_free(k);
            g->walker = NULL;
            lr_walk__no_memory(g);
            return NULL;
        }
        k->g = g;
        k->t = m->t;
    }
    k->m = m;
    k->bits = bits;
    k->want_pops = false;
    k->n_pop = k->skip = 0;
    return k;
}

void lr_walker_free(walker *k)
{
    if (!k) return;
    lr_free(k->lev);
    lr_free(k->items);
    lr_free(k->path);
    lr_free(k->pop);
    lr_free(k);
}

bool lr_walk__add_pop(walker *k, uint32_t node)
{
    if (k->n_pop == k->cap_pop) {
        uint32_t cap = k->cap_pop ? k->cap_pop * 2 : 64;
        uint32_t *p = lr_reallocarray(k->pop, cap, sizeof *p);
        if (!p) return lr_walk__no_memory(k->g);
        k->pop = p;
        k->cap_pop = cap;
    }
    k->pop[k->n_pop++] = node;
    return true;
}

/* Puts items behind those of `above` and makes them level l. */
static bool put_level(walker *k, level *l, const level *above, const gitem *it, uint32_t n, bool ends)
{
    l->n = n;
    l->ends = ends;
    l->off = above ? above->off + (above->n > 1 ? above->n : 0) : 0;
    if (n == 1) l->one = it[0];
    if (n < 2) return true;
    if (l->off + n > k->cap_items) {
        uint32_t cap = (l->off + n) * 2 + 64;
        gitem *p = lr_reallocarray(k->items, cap, sizeof *p);
        if (!p) return lr_walk__no_memory(k->g);
        k->items = p;
        k->cap_items = cap;
    }
    memcpy(k->items + l->off, it, n * sizeof *it);
    return true;
}

/* The level below `above` by a byte, when more than a table is needed. */
static bool slow_step(walker *k, const level *above, level *l, unsigned byte, unsigned path_n)
{
    lr_grammar *g = k->g;
    l->n = 0;
    l->ends = false;
    lr_step__byte(g, above->n == 1 ? &above->one : k->items + above->off, above->n, byte);
    if (g->w.err.code) return false;
    if (g->w.kernel.n == 0) return true;
    lr_str text = {k->path ? k->path + k->skip : "", k->path ? path_n - k->skip : 0};
    if (!lr_step__close(g, k->m, text)) return false;
    return put_level(k, l, above, g->w.out.at, g->w.out.n, g->w.ends);
}

bool lr_walk(walker *k, uint32_t v, const gitem *it, uint32_t n, uint32_t but)
{
    lr_grammar *g = k->g;
    const tnode *node = k->t->node;
    const uint8_t *cls = g->n->cls;
    bool holes = g->n->n_hole != 0;
    uint32_t end = node[v].skip, i = v + 1, visited = 0;
    unsigned base = node[v].depth;
    if (!put_level(k, &k->lev[0], NULL, it, n, false)) return false;
    if (n == 0) return true;
    while (i < end) {
        const tnode *t = &node[i];
        const level *above = &k->lev[t->depth - base - 1];
        level *l = &k->lev[t->depth - base];
        visited++;
        if (i == but) {
            i = t->skip;
            continue;
        }
        if (k->path) k->path[t->depth - 1] = (char)t->byte;
        uint32_t to = above->n == 1 ? lr_dfa__trans(g, above->one.d, cls[t->byte]) : D_UNKNOWN;
        if (to != D_UNKNOWN && to != D_DEAD && (g->d[to].flags & D_PLAIN)) {
            l->n = 1;
            l->off = above->off;
            l->one = (gitem){to, above->one.f};
            l->ends = false;
        } else if (to == D_DEAD) {
            if (g->w.err.code) return false;
            i = t->skip;
            continue;
        } else if (!slow_step(k, above, l, t->byte, t->depth)) {
            return false;
        }
        if (l->n == 0 && !l->ends) {
            i = t->skip;
            continue;
        }
        bool leaf = t->skip == i + 1;
        if (t->token >= 0 && (l->n > 0 || !k->want_pops || !holes)) lr_walk__allow(k, k->bits, t);
        if (l->ends && k->want_pops && (!leaf || (holes && l->n == 0)) && !lr_walk__add_pop(k, i)) return false;
        i = l->n ? i + 1 : t->skip;
    }
    g->walked += visited;
    return true;
}
