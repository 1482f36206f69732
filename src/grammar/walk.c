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
        bool path = g->n->n_hole || g->n->n_unique;
        if (k && path) k->path = lr_malloc(m->t->max_depth + 1);
        if (k && path) k->trail = lr_reallocarray(NULL, m->t->max_depth + 1, sizeof *k->trail);
        if (!k || !k->lev || (path && (!k->path || !k->trail))) {
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
    k->n_pop = k->skip = k->n_cand = k->n_trail = 0;
    return k;
}

void lr_walker_free(walker *k)
{
    if (!k) return;
    lr_free(k->lev);
    lr_free(k->items);
    lr_free(k->path);
    lr_free(k->trail);
    lr_free(k->pop);
    lr_free(k->cand);
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
    l->trans = n == 1 ? k->g->d[it[0].d].trans : NULL;
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
    l->trans = NULL;
    lr_step__byte(g, above->n == 1 ? &above->one : k->items + above->off, above->n, byte);
    if (g->w.err.code) return false;
    if (g->w.kernel.n == 0) return true;
    lr_str text = {k->path ? k->path + k->skip : "", k->path ? path_n - k->skip : 0};
    if (!lr_step__close(g, k->m, text)) return false;
    return put_level(k, l, above, g->w.out.at, g->w.out.n, g->w.ends);
}

/* As long as one plain state follows another: from node i on; -> the first node that takes more, or end. */
static uint32_t walk_plain(walker *k, uint32_t i, uint32_t end, unsigned base)
{
    const tnode *node = k->t->node;
    const uint8_t *cls = k->g->n->cls;
    const dstate *d = k->g->d;
    uint32_t *bits = k->bits, visited = 0;
    char *path = k->path;
    while (i < end) {
        const tnode *t = &node[i];
        level *l = &k->lev[t->depth - base];
        const uint32_t *trans = l[-1].trans;
        if (!trans) break;
        uint32_t to = trans[cls[t->byte]], same = l[-1].one.d;
        if (path && l[-1].one.f->guarded && d[same].flags & D_NARROW) break;
        visited++;
        if (to != (same | PLAIN)) { /* that branch is why the next table seldom waits for this one */
            if (to == D_DEAD) {
                i = t->skip;
                continue;
            }
            if (to == D_UNKNOWN || !(to & PLAIN)) break;
            same = to & ~PLAIN;
            trans = d[same].trans;
        }
        if (t->token >= 0) lr_walk__allow(k, bits, t);
        if (path) path[t->depth - 1] = (char)t->byte;
        l->n = 1;
        l->off = l[-1].off;
        l->one.d = same;
        l->one.f = l[-1].one.f;
        l->trans = trans;
        l->ends = false;
        i++;
    }
    k->g->walked += visited;
    return i;
}

/* Node i, whatever it takes: l becomes its state. False: w.err. */
static bool walk_node(walker *k, uint32_t i, level *l)
{
    lr_grammar *g = k->g;
    const tnode *t = &k->t->node[i];
    level *above = l - 1;
    bool holes = g->n->n_hole != 0, leaf = t->skip == i + 1;
    if (k->path) k->path[t->depth - 1] = (char)t->byte;
    uint32_t to = above->n == 1 ? lr_dfa__trans(g, above->one.d, g->n->cls[t->byte]) : D_UNKNOWN;
    if (above->n == 1) above->trans = g->d[above->one.d].trans;
    if (to == D_DEAD) {
        l->n = 0;
        l->ends = false;
        return !g->w.err.code;
    }
    if (to != D_UNKNOWN && g->d[to].flags & D_PLAIN && !(above->one.f->guarded && g->d[to].flags & D_NARROW)) {
        *l = (level){.n = 1, .off = above->off, .one = {to, above->one.f}, .trans = g->d[to].trans};
    } else if (!slow_step(k, above, l, t->byte, t->depth)) {
        return false;
    }
    if (t->token >= 0 && (l->n > 0 || (l->ends && (!k->want_pops || !holes)))) lr_walk__allow(k, k->bits, t);
    return !l->ends || !k->want_pops || (leaf && !(holes && l->n == 0)) || lr_walk__add_pop(k, i);
}

bool lr_walk(walker *k, uint32_t v, const gitem *it, uint32_t n, uint32_t but)
{
    const tnode *node = k->t->node;
    bool plain = !but && !k->g->n->n_hole;
    uint32_t end = node[v].skip, i = v + 1;
    unsigned base = node[v].depth;
    if (!put_level(k, &k->lev[0], NULL, it, n, false)) return false;
    if (n == 0) return true;
    for (;;) {
        if (plain) i = walk_plain(k, i, end, base);
        if (i >= end) return true;
        level *l = &k->lev[node[i].depth - base];
        k->g->walked++;
        if (i == but) {
            i = node[i].skip;
            continue;
        }
        if (!walk_node(k, i, l)) return false;
        i = l->n ? i + 1 : node[i].skip;
    }
}
