/* mask.c - which tokens may come next: walks of the vocabulary's trie, and what is kept of them.
 *
 * The tokens that one item allows fall into two parts. Those that stay inside the item's rule, or end with its end,
 * depend on its DFA state alone: the "base", kept with that state as bits or, if they are few, as a list. Those that
 * go on behind the rule's end depend on the frame too: the base lists the trie nodes at which the rule may have ended
 * ("pops"), and what is below them is walked with what the frame returns to. Bases of rules that call no others are
 * shared by all grammars of a vocabulary, under a hash of their automaton (a JSON string is walked once a process).
 * Whole masks are kept too, for states that come again (loops), if they took a walk.
 */
#include "grammar/grammar_int.h"

#define WHOLE_MASKS  24  /* kept in a grammar */
#define WHOLE_WALK   512 /* trie nodes that a mask must have taken to be kept */
#define SHARED_BYTES ((size_t)64 << 20)

struct lr_base {
    uint32_t refs;
    uint32_t n_pop, n_sparse;
    uint32_t *pop;   /* (n_pop) trie nodes */
    int32_t *sparse; /* (n_sparse) allowed ids; or */
    uint32_t *bits;  /* all as a mask */
    size_t bytes;
};

struct shared_base {
    uint64_t key[2];
    lr_base *base; /* NULL = free */
};

/* A whole mask and the state it is for. */
struct gmaskent {
    uint32_t n;
    gitem *it; /* (n) with references */
    uint32_t *bits;
};

/* The state at one depth of the trie. */
typedef struct level {
    uint32_t n, off; /* n > 1: items at off of the walk's list */
    gitem one;       /* n == 1 */
    bool ends;
} level;

typedef struct walker {
    lr_grammar *g;
    lr_matcher *m;
    const lr_grammar_trie *t;
    uint32_t *bits;
    uint32_t *pop, n_pop, cap_pop; /* when wanted */
    bool want_pops;
    level *lev; /* (max_depth + 2) */
    gitem *items;
    uint32_t cap_items;
    char *path;    /* bytes from the root to the present node, if there are holes */
    uint32_t skip; /* bytes at the start of path that are no text (a stripped space) */
} walker;

static bool no_memory(lr_grammar *g)
{
    if (!g->w.err.code) lr_fail(&g->w.err, LR_ENOMEM, "no memory for a token mask");
    return false;
}

static bool walker_init(walker *k, lr_matcher *m, uint32_t *bits)
{
    *k = (walker){.g = m->g, .m = m, .t = m->t, .bits = bits};
    k->lev = lr_reallocarray(NULL, k->t->max_depth + 2, sizeof *k->lev);
    if (m->g->n->n_hole) k->path = lr_malloc(k->t->max_depth + 1);
    if (!k->lev || (m->g->n->n_hole && !k->path)) {
        lr_free(k->lev);
        return no_memory(m->g);
    }
    return true;
}

static void walker_free(walker *k)
{
    lr_free(k->lev);
    lr_free(k->items);
    lr_free(k->path);
    lr_free(k->pop);
}

static void allow(walker *k, int32_t token)
{
    for (; token >= 0; token = k->t->same[token]) k->bits[token / 32] |= 1u << (token % 32);
}

static bool add_pop(walker *k, uint32_t node)
{
    if (k->n_pop == k->cap_pop) {
        uint32_t cap = k->cap_pop ? k->cap_pop * 2 : 64;
        uint32_t *p = lr_reallocarray(k->pop, cap, sizeof *p);
        if (!p) return no_memory(k->g);
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
        if (!p) return no_memory(k->g);
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

/* Walks what is below node v from a state; of the root's children all but `but` (0 = none). */
static bool walk(walker *k, uint32_t v, const gitem *it, uint32_t n, uint32_t but)
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
        if (t->token >= 0 && (l->n > 0 || !k->want_pops || !holes)) allow(k, t->token);
        if (l->ends && k->want_pops && (!leaf || (holes && l->n == 0)) && !add_pop(k, i)) return false;
        i = l->n ? i + 1 : t->skip;
    }
    g->walked += visited;
    return true;
}

/* ---- bases ---- */

static void base_unref(lr_base *b)
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
    base_unref(b);
}

/* What a walk found, as a base; k->bits (zeros before) is left as zeros. */
static lr_base *base_of(walker *k)
{
    size_t words = ((size_t)k->t->n_vocab + 31) / 32, count = 0;
    lr_base *b = lr_calloc(1, sizeof *b);
    if (!b) goto fail;
    b->refs = 1;
    for (size_t i = 0; i < words; i++) count += (size_t)__builtin_popcount(k->bits[i]);
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
    b->pop = lr_memdup(k->pop ? k->pop : (uint32_t *)"", k->n_pop * sizeof *b->pop);
    if (!b->pop) goto fail;
    b->n_pop = k->n_pop;
    b->bytes = sizeof *b + b->n_sparse * sizeof *b->sparse + (b->bits ? words * 4 : 0) + b->n_pop * sizeof *b->pop;
    memset(k->bits, 0, words * sizeof *k->bits);
    return b;
fail:
    if (b) base_unref(b);
    no_memory(k->g);
    return NULL;
}

/* The rule whose own states hold all items of d, if its bases may be shared; NULL otherwise. */
static const nrule *home_rule(const lr_grammar *g, uint32_t d)
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

static void shared_key(const lr_grammar *g, const nrule *r, uint32_t d, uint64_t key[2])
{
    texthash h = {r->sig[0], r->sig[1]};
    for (uint32_t i = 0; i < g->d[d].n; i++) {
        uint64_t v = g->d[d].items[i] - r->lo;
        for (int k = 0; k < 8; k++) texthash_add(&h, v >> 8 * k & 0xFF);
    }
    key[0] = h.a;
    key[1] = h.b;
}

static struct shared_base *shared_at(const lr_grammar_trie *t, const uint64_t key[2])
{
    uint32_t i = (uint32_t)(key[0] >> 20) & (t->cap_shared - 1);
    while (t->shared[i].base && (t->shared[i].key[0] != key[0] || t->shared[i].key[1] != key[1])) {
        i = (i + 1) & (t->cap_shared - 1);
    }
    return &t->shared[i];
}

void lr_mask__free_shared(lr_grammar_trie *t)
{
    for (uint32_t i = 0; i < t->cap_shared; i++) {
        if (t->shared[i].base) base_unref(t->shared[i].base);
    }
    lr_free(t->shared);
    t->shared = NULL;
    t->cap_shared = t->n_shared = 0;
    t->shared_bytes = 0;
}

/* Keeps b for other grammars; it does no harm if that fails. */
static void share(lr_grammar_trie *t, const uint64_t key[2], lr_base *b)
{
    if (t->shared_bytes > SHARED_BYTES) lr_mask__free_shared(t);
    if (2 * t->n_shared >= t->cap_shared) {
        uint32_t cap = t->cap_shared ? t->cap_shared * 2 : 64, old = t->cap_shared;
        struct shared_base *s = lr_calloc(cap, sizeof *s), *before = t->shared;
        if (!s) return;
        t->shared = s;
        t->cap_shared = cap;
        for (uint32_t i = 0; i < old; i++) {
            if (before[i].base) *shared_at(t, before[i].key) = before[i];
        }
        lr_free(before);
    }
    *shared_at(t, key) = (struct shared_base){{key[0], key[1]}, b};
    b->refs++;
    t->n_shared++;
    t->shared_bytes += b->bytes;
}

/* The base of byte part d. *temporary: it is the caller's (a hole was reached). NULL: w.err. */
static lr_base *base_get(walker *k, uint32_t d, bool *temporary)
{
    lr_grammar *g = k->g;
    *temporary = false;
    if (g->d[d].base) return g->d[d].base;
    const nrule *home = home_rule(g, d);
    uint64_t key[2] = {0, 0};
    lr_base *b = NULL;
    if (home) {
        shared_key(g, home, d, key);
        b = k->t->cap_shared ? shared_at(k->t, key)->base : NULL;
        if (b) b->refs++;
    }
    if (!b) {
        gitem it = {d, lr_frame__root(g)};
        if (!it.f) return NULL;
        bool hit = g->w.hole_hit;
        g->w.hole_hit = false;
        k->want_pops = true;
        k->n_pop = 0;
        bool ok = walk(k, 0, &it, 1, 0);
        k->want_pops = false;
        *temporary = g->w.hole_hit;
        g->w.hole_hit = hit || g->w.hole_hit;
        b = ok ? base_of(k) : NULL;
        if (!b || *temporary) return b;
        if (home) share(k->m->t, key, b);
    }
    g->d[d].base = b;
    g->base_bytes += b->bytes;
    return b;
}

/* ---- whole masks ---- */

static void drop_whole(lr_grammar *g, gmaskent *e)
{
    for (uint32_t i = 0; i < e->n; i++) lr_frame__unref(g, e->it[i].f);
    lr_free(e->it);
    lr_free(e->bits);
}

void lr_grammar__drop_masks(lr_grammar *g)
{
    for (uint32_t i = 0; i < g->n_mask; i++) drop_whole(g, &g->mask[i]);
    lr_free(g->mask);
    g->mask = NULL;
    g->n_mask = 0;
    g->mask_bytes = 0;
    for (uint32_t d = 1; d < g->n_d; d++) {
        if ((g->d[d].flags & D_FREE) || !g->d[d].base) continue;
        lr_mask__free_base(g, g->d[d].base);
        g->d[d].base = NULL;
    }
}

static bool find_whole(lr_grammar *g, const gstate *s, uint32_t *bits, size_t words)
{
    for (uint32_t i = 0; i < g->n_mask; i++) {
        gmaskent e = g->mask[i];
        if (e.n != s->n || memcmp(e.it, s->it, s->n * sizeof *s->it) != 0) continue;
        memcpy(bits, e.bits, words * sizeof *bits);
        memmove(g->mask + 1, g->mask, i * sizeof e);
        g->mask[0] = e;
        return true;
    }
    return false;
}

static void keep_whole(lr_grammar *g, const gstate *s, const uint32_t *bits, size_t words)
{
    if (!g->mask) g->mask = lr_calloc(WHOLE_MASKS, sizeof *g->mask);
    if (!g->mask) return;
    if (g->n_mask == WHOLE_MASKS) drop_whole(g, &g->mask[--g->n_mask]);
    gmaskent e = {
        .n = s->n, .it = lr_memdup(s->it, s->n * sizeof *s->it), .bits = lr_memdup(bits, words * sizeof *bits)};
    if (!e.it || !e.bits) {
        lr_free(e.it);
        lr_free(e.bits);
        return;
    }
    for (uint32_t i = 0; i < e.n; i++) lr_frame__ref(e.it[i].f);
    memmove(g->mask + 1, g->mask, g->n_mask * sizeof e);
    g->mask[0] = e;
    g->n_mask++;
    g->mask_bytes = g->n_mask * words * sizeof *bits;
}

/* ---- one mask ---- */

/* What frame f returns to, as a state in w.out. */
static bool returned(walker *k, const frame *f, lr_str text)
{
    gwork *w = &k->g->w;
    w->kernel.n = 0;
    for (uint32_t i = 0; i < f->n; i++) {
        if (!lr_step__push(w, &w->kernel, f->ret[i].d, f->ret[i].f)) return false;
    }
    uint32_t n = w->kernel.n;
    /* Ends of what it returns to are in the frame already. */
    return n == 0 ? (w->out.n = 0, true) : lr_step__close(k->g, k->m, text);
}

/* The bytes from the root to node v into k->path. */
static lr_str path_to(walker *k, uint32_t v)
{
    const tnode *node = k->t->node;
    uint32_t at = 0, c = 1;
    while (at != v) {
        while (node[c].skip <= v) c = node[c].skip;
        k->path[node[c].depth - 1] = (char)node[c].byte;
        at = c;
        c = at + 1;
    }
    return (lr_str){k->path, node[v].depth};
}

/* Walks what is below the pops of base b with what frame f returns to. */
static bool walk_pops(walker *k, const lr_base *b, const frame *f)
{
    lr_grammar *g = k->g;
    gitem few[8], *it = few;
    uint32_t n = 0, cap = 8;
    bool ok = true, known = false, live = false;
    if (b->n_pop == 0) return true;
    for (uint32_t p = 0; p < b->n_pop && ok; p++) {
        uint32_t v = b->pop[p];
        if (!known) {
            ok = returned(k, f, k->path ? path_to(k, v) : (lr_str){"", 0});
            if (!ok) break;
            n = g->w.out.n;
            if (n > cap) {
                gitem *q = lr_reallocarray(it == few ? NULL : it, n, sizeof *q);
                if (!q) {
                    ok = no_memory(g);
                    break;
                }
                it = q;
                cap = n;
            }
            if (n) memcpy(it, g->w.out.at, n * sizeof *it);
            live = n > 0 || f->root;
            known = g->n->n_hole == 0;
        }
        if (live && k->t->node[v].token >= 0) allow(k, k->t->node[v].token);
        if (n) ok = walk(k, v, it, n, 0);
    }
    if (it != few) lr_free(it);
    return ok;
}

static bool add_item(walker *k, uint32_t *bits, uint32_t *scratch, size_t words, gitem it)
{
    bool temporary;
    k->bits = scratch;
    lr_base *b = base_get(k, it.d, &temporary);
    k->bits = bits;
    if (!b) return false;
    if (b->bits) {
        for (size_t i = 0; i < words; i++) bits[i] |= b->bits[i];
    }
    for (uint32_t i = 0; i < b->n_sparse; i++) bits[b->sparse[i] / 32] |= 1u << (b->sparse[i] % 32);
    bool ok = walk_pops(k, b, it.f);
    if (temporary) base_unref(b);
    return ok;
}

/* The first token of a text whose first space is dropped. */
static bool stripped(walker *k, const gstate *s)
{
    const tnode *node = k->t->node;
    uint32_t space = 1;
    while (space < node[0].skip && node[space].byte != ' ') space = node[space].skip;
    bool has = space < node[0].skip;
    if (!walk(k, 0, s->it, s->n, has ? space : 0)) return false;
    if (!has) return true;
    k->skip = 1;
    if (k->path) k->path[0] = ' ';
    bool ok = walk(k, space, s->it, s->n, 0);
    k->skip = 0;
    return ok;
}

bool lr_mask__compute(lr_matcher *m, uint32_t *bits)
{
    lr_grammar *g = m->g;
    size_t words = lr_matcher_words(m);
    const gstate *s = lr_matcher__state(m);
    if (s->n == 0) return true;
    if (g->trie != m->t || g->base_bytes > LR_G_BASE_BYTES) {
        lr_grammar__drop_masks(g);
        lr_grammar_trie_unref(g->trie);
        g->trie = lr_grammar_trie_ref(m->t);
    }
    bool first = m->o.strip_space && m->taken == 0;
    if (!first && find_whole(g, s, bits, words)) return true;
    walker k;
    uint64_t before = g->walked;
    if (!walker_init(&k, m, bits)) return false;
    bool ok = true;
    if (first) {
        ok = stripped(&k, s);
    } else {
        uint32_t *scratch = g->scratch;
        if (g->n_scratch < words) {
            lr_free(scratch);
            g->scratch = scratch = lr_calloc(words, sizeof *scratch);
            g->n_scratch = scratch ? words : 0;
        }
        if (!scratch) ok = no_memory(g);
        for (uint32_t i = 0; i < s->n && ok; i++) ok = add_item(&k, bits, scratch, words, s->it[i]);
        if (!ok && scratch) memset(scratch, 0, words * sizeof *scratch);
        if (ok && !g->w.hole_hit && g->walked - before > WHOLE_WALK) keep_whole(g, s, bits, words);
    }
    walker_free(&k);
    return ok;
}
