/* mask.c - which tokens may come next.
 *
 * The tokens that one item allows fall into two parts. Those that stay inside the item's rule, or end with its end,
 * depend on its DFA state alone: the "base", kept with that state as bits or, if they are few, as a list (base.c).
 * Those that go on behind the rule's end depend on the frame too: the base lists the trie nodes at which the rule may
 * have ended ("pops"), and what is below them is walked with what the frame returns to (walk.c). States inside counted
 * loops have bases for all counts at once (count.c). Bases of rules that call no others are shared by all grammars of a
 * vocabulary, under a hash of their automaton: a JSON string is walked once a process. Whole masks are kept too, and
 * shared by all matchers that come to the same state, or to one that differs in a count which makes no difference.
 */
#include "grammar/mask_int.h"

#define WHOLE_MASKS 32 /* kept in a grammar */
#define KEY_ITEMS   4  /* of states that have one */

/* What a whole mask depends on. What is counted says no more of a count than makes a difference to tokens, so that all
 * places in a long string have the same mask. */
typedef struct maskkey {
    uint32_t n, ends;
    struct {
        uint32_t d, need, left, out; /* d: the state, or its part inside the loop, with need = 1 + iterations */
        frame *f;
    } it[KEY_ITEMS];
} maskkey;

struct gmaskent {
    maskkey key; /* with references */
    lr_token_mask *mask;
    uint64_t used;
};

/* ---- whole masks ---- */

void lr_token_mask_unref(lr_token_mask *t)
{
    if (t && --t->refs == 0) lr_free(t);
}

static void drop_whole(lr_grammar *g, gmaskent *e)
{
    for (uint32_t i = 0; i < e->key.n; i++) lr_frame__unref(g, e->key.it[i].f);
    lr_token_mask_unref(e->mask);
}

void lr_grammar__drop_masks(lr_grammar *g)
{
    for (uint32_t i = 0; i < g->n_mask; i++) drop_whole(g, &g->mask[i]);
    lr_free(g->mask);
    g->mask = NULL;
    g->n_mask = 0;
    g->mask_bytes = 0;
    for (uint32_t d = 1; d < g->n_d; d++) {
        dstate *s = &g->d[d];
        if (s->flags & D_FREE) continue;
        if (s->base) lr_mask__free_base(g, s->base);
        if (s->cnt) lr_mask__free_count(g, s->cnt);
        s->base = NULL;
        s->cnt = NULL;
    }
}

static bool count_key(walker *k, maskkey *key, uint32_t i, uint32_t d)
{
    lr_grammar *g = k->g;
    if (!(g->d[d].flags & D_COUNTED) || g->n->n_hole || !lr_dfa__split(g, d)) return !g->w.err.code;
    uint32_t in = g->d[d].part.in, out = g->d[d].part.out, c = g->d[d].part.count;
    const gloop *l = &g->n->loop[g->d[d].part.loop];
    const lr_count *cnt = lr_count_get(k, in);
    if (!cnt) return !g->w.err.code;
    uint32_t most = lr_count_most(cnt), left = l->max == UINT32_MAX ? UINT32_MAX : l->max - c;
    uint32_t need = c < l->min ? l->min - c : 0;
    key->it[i].d = in;
    key->it[i].need = 1 + (need > most ? most + 1 : need);
    key->it[i].left = left >= most ? UINT32_MAX : left;
    key->it[i].out = out;
    return true;
}

/* *has: the state's mask may be kept, under this key. False: w.err. */
static bool key_of(walker *k, const gstate *s, maskkey *key, bool *has)
{
    *has = s->n <= KEY_ITEMS;
    memset(key, 0, sizeof *key);
    key->n = *has ? s->n : 0;
    key->ends = s->ends;
    for (uint32_t i = 0; i < key->n; i++) {
        key->it[i].d = s->it[i].d;
        key->it[i].f = s->it[i].f;
        if (!count_key(k, key, i, s->it[i].d)) return false;
    }
    return true;
}

static lr_token_mask *find_whole(lr_grammar *g, const maskkey *key, size_t words)
{
    for (uint32_t i = 0; i < g->n_mask; i++) {
        gmaskent *e = &g->mask[i];
        if (memcmp(&e->key, key, sizeof *key) != 0 || e->mask->words < words) continue;
        e->used = ++g->mask_use;
        e->mask->refs++;
        return e->mask;
    }
    return NULL;
}

static void keep_whole(lr_grammar *g, const maskkey *key, lr_token_mask *t)
{
    if (!g->mask) g->mask = lr_calloc(WHOLE_MASKS, sizeof *g->mask);
    if (!g->mask) return;
    gmaskent *e = &g->mask[g->n_mask];
    if (g->n_mask == WHOLE_MASKS) {
        e = &g->mask[0];
        for (uint32_t i = 1; i < WHOLE_MASKS; i++) e = g->mask[i].used < e->used ? &g->mask[i] : e;
        g->mask_bytes -= e->mask->words * sizeof *e->mask->bits;
        drop_whole(g, e);
        g->n_mask--;
    }
    for (uint32_t i = 0; i < key->n; i++) lr_frame__ref(key->it[i].f);
    t->refs++;
    *e = (gmaskent){*key, t, ++g->mask_use};
    g->n_mask++;
    g->mask_bytes += t->words * sizeof *t->bits;
}

/* ---- behind a rule's end ---- */

/* What frame f returns to, as a state in w.out and w.ends. */
static bool returned(walker *k, const frame *f, lr_str text)
{
    gwork *w = &k->g->w;
    w->kernel.n = w->out.n = 0;
    w->ends = false;
    if (f->unique) {
        w->hole_hit = true;
        if (lr_unique__repeats(k->m, text)) return !w->err.code;
    }
    for (uint32_t i = 0; i < f->n; i++) {
        if (!lr_step__push(w, &w->kernel, f->ret[i].d, f->ret[i].f)) return false;
    }
    if (w->kernel.n && !lr_step__close(k->g, k->m, text)) return false;
    w->ends = w->ends || f->root;
    return true;
}

/* The bytes from the root to node v into k->path. From one node to the next of an ascending list it is a short way;
 * k->n_trail = 0 where something else may have written to the path. */
static lr_str path_to(walker *k, uint32_t v)
{
    const tnode *node = k->t->node;
    uint32_t *trail = k->trail, left = 0;
    while (k->n_trail && (v < trail[k->n_trail - 1] || v >= node[trail[k->n_trail - 1]].skip))
        left = trail[--k->n_trail];
    uint32_t at = k->n_trail ? trail[k->n_trail - 1] : 0, c = left && left <= v ? left : at + 1;
    while (at != v) {
        while (node[c].skip <= v) c = node[c].skip;
        k->path[node[c].depth - 1] = (char)node[c].byte;
        trail[k->n_trail++] = c;
        at = c;
        c = at + 1;
    }
    return (lr_str){k->path, node[v].depth};
}

/* What a frame returns to, kept while pops are walked. */
typedef struct behind {
    const frame *f;
    gitem few[8], *it;
    uint32_t n, cap;
    bool known, live;
} behind;

static bool learn(walker *k, behind *r, uint32_t v)
{
    lr_grammar *g = k->g;
    if (r->known) return true;
    if (!returned(k, r->f, k->path ? path_to(k, v) : (lr_str){"", 0})) return false;
    if (g->w.out.n > r->cap) {
        gitem *q = lr_reallocarray(r->it == r->few ? NULL : r->it, g->w.out.n, sizeof *q);
        if (!q) return lr_walk__no_memory(g);
        r->it = q;
        r->cap = g->w.out.n;
    }
    r->n = g->w.out.n;
    if (r->n) memcpy(r->it, g->w.out.at, r->n * sizeof *r->it);
    r->live = r->n > 0 || g->w.ends;
    r->known = g->n->n_hole == 0; /* a hole may say something else at each node */
    return true;
}

static bool in_doubt(const walker *k, uint32_t v)
{
    for (uint32_t i = 0; i < k->n_cand; i++) {
        if (k->cand[i] == v) return true;
    }
    return false;
}

/* Walks what is below node v with what the frame returns to. */
static bool walk_pop(walker *k, behind *r, uint32_t v)
{
    bool doubt = k->n_cand && in_doubt(k, v);
    if (doubt) r->known = false; /* here it may be nothing, or once again something */
    if (!learn(k, r, v)) return false;
    if (k->path) (void)path_to(k, v);
    if (r->live && k->t->node[v].token >= 0) lr_walk__allow(k, k->bits, &k->t->node[v]);
    bool ok = r->n == 0 || lr_walk(k, v, r->it, r->n, 0);
    if (doubt) r->known = false;
    return ok;
}

/* ---- one mask ---- */

static bool add_base(walker *k, behind *r, uint32_t d, uint32_t *bits, size_t words)
{
    bool temporary, ok = true;
    k->bits = k->g->scratch;
    lr_base *b = lr_base_get(k, d, &temporary);
    k->bits = bits;
    if (!b) return false;
    lr_base_or(b, bits, words);
    k->n_trail = 0;
    for (uint32_t i = 0; i < b->n_pop && ok; i++) ok = walk_pop(k, r, b->pop[i]);
    if (temporary) lr_base_unref(b);
    return ok;
}

/* The same for a state inside a counted loop. *done: it could be done so. */
static bool add_counted(walker *k, behind *r, uint32_t d, uint32_t *bits, size_t words, bool *done)
{
    lr_grammar *g = k->g;
    *done = false;
    if (g->n->n_hole || !lr_dfa__split(g, d)) return !g->w.err.code;
    uint32_t in = g->d[d].part.in, out = g->d[d].part.out, c = g->d[d].part.count;
    const gloop *l = &g->n->loop[g->d[d].part.loop];
    const lr_count *cnt = lr_count_get(k, in);
    if (!cnt) return !g->w.err.code;
    *done = true;
    uint32_t need = c < l->min ? l->min - c : 0, left = l->max == UINT32_MAX ? UINT32_MAX : l->max - c, n;
    lr_count_or(cnt, need, left, bits, g->scratch + words, words);
    const counted *pop = lr_count_pops(cnt, need, left, &n);
    bool ok = true;
    k->n_trail = 0;
    for (uint32_t i = 0; i < n && ok; i++) ok = walk_pop(k, r, (uint32_t)pop[i].what);
    return ok && (out == D_DEAD || add_base(k, r, out, bits, words));
}

/* Which tokens of a state the text has a say in; those of k->cand, or the result tells that all are to be walked. */
static bool doubtful(walker *k, const gstate *s, bool *all)
{
    *all = false;
    k->n_cand = 0;
    for (uint32_t i = 0; k->g->n->n_unique && i < s->n && !*all; i++) {
        if (s->it[i].f->guarded) *all = lr_unique__doubt(k, s->it[i].d) == LR_DOUBT_ALL;
    }
    return !k->g->w.err.code;
}

/* Sets the bits of the tokens at k->cand as they are. */
static bool settle(walker *k, const gstate *s, uint32_t *bits)
{
    lr_grammar *g = k->g;
    gwork *w = &g->w;
    k->n_trail = 0;
    for (uint32_t i = 0; i < k->n_cand; i++) {
        const tnode *t = &k->t->node[k->cand[i]];
        if (t->token < 0) continue;
        lr_str path = path_to(k, k->cand[i]);
        w->out.n = 0;
        for (uint32_t n = 0; n < s->n; n++) {
            if (!lr_step__push(w, &w->out, s->it[n].d, s->it[n].f)) return false;
        }
        for (size_t n = 0; n < path.n && w->out.n; n++) {
            lr_step__byte(g, w->out.at, w->out.n, (uint8_t)path.s[n]);
            if (w->err.code || !lr_step__close(g, k->m, (lr_str){path.s, n + 1})) return false;
        }
        bool yes = w->out.n > 0 || w->ends;
        for (int32_t id = t->token; id >= 0; id = k->t->same[id]) {
            if (yes)
                bits[id / 32] |= 1u << (id % 32);
            else
                bits[id / 32] &= ~(1u << (id % 32));
        }
    }
    return true;
}

static bool add_item(walker *k, uint32_t *bits, size_t words, gitem it)
{
    behind r = {.f = it.f, .cap = 8};
    bool done = false, ok = true;
    r.it = r.few;
    if (k->g->d[it.d].flags & D_COUNTED) ok = add_counted(k, &r, it.d, bits, words, &done);
    if (ok && !done) ok = add_base(k, &r, it.d, bits, words);
    if (r.it != r.few) lr_free(r.it);
    return ok;
}

/* The first token of a text whose first space is dropped. */
static bool stripped(walker *k, const gstate *s)
{
    const tnode *node = k->t->node;
    uint32_t space = 1;
    while (space < node[0].skip && node[space].byte != ' ') space = node[space].skip;
    bool has = space < node[0].skip;
    if (!lr_walk(k, 0, s->it, s->n, has ? space : 0)) return false;
    if (!has) return true;
    k->skip = 1;
    if (k->path) k->path[0] = ' ';
    bool ok = lr_walk(k, space, s->it, s->n, 0);
    k->skip = 0;
    return ok;
}

static bool make_scratch(lr_grammar *g, size_t words)
{
    if (g->n_scratch >= words) return true;
    lr_free(g->scratch);
    g->scratch = lr_calloc(words, 2 * sizeof *g->scratch);
    g->n_scratch = g->scratch ? words : 0;
    return g->scratch || lr_walk__no_memory(g);
}

/* What the cached masks are of is what this matcher needs. */
static bool make_ready(lr_matcher *m, size_t words)
{
    lr_grammar *g = m->g;
    if (g->trie != m->t || g->base_bytes > LR_G_BASE_BYTES) {
        lr_grammar__drop_masks(g);
        lr_grammar_trie_unref(g->trie);
        g->trie = lr_grammar_trie_ref(m->t);
    }
    return make_scratch(g, words);
}

/* The tokens of a state that has some, into bits (zeros before). all: the text has a say in each. */
static bool compute(walker *k, const gstate *s, bool first, bool all, uint32_t *bits, size_t words)
{
    lr_grammar *g = k->g;
    bool ok = true;
    if (first) return stripped(k, s);
    if (all) return lr_walk(k, 0, s->it, s->n, 0);
    for (uint32_t i = 0; i < s->n && ok; i++) ok = add_item(k, bits, words, s->it[i]);
    if (!ok) memset(g->scratch, 0, words * sizeof *g->scratch);
    return ok && (!k->n_cand || settle(k, s, bits));
}

lr_token_mask *lr_mask__of(lr_matcher *m, size_t words)
{
    lr_grammar *g = m->g;
    size_t mine = lr_matcher_words(m);
    const gstate *s = lr_matcher__state(m);
    bool first = m->o.strip_space && m->taken == 0, all, has;
    maskkey key;
    walker *k = make_ready(m, mine) ? lr_walker_get(m, NULL) : NULL;
    if (!k || !doubtful(k, s, &all) || !key_of(k, s, &key, &has)) return NULL;
    has = has && !first && !all && !k->n_cand;
    if (words < mine) words = mine;
    lr_token_mask *t = has ? find_whole(g, &key, words) : NULL;
    if (t) return t;
    t = lr_calloc(1, sizeof *t + words * sizeof *t->bits);
    if (!t) return NULL;
    t->refs = 1;
    t->words = words;
    k->bits = t->bits;
    if (s->n && !compute(k, s, first, all, t->bits, mine)) {
        lr_token_mask_unref(t);
        return NULL;
    }
    for (uint32_t i = 0; s->ends && i < m->t->n_eog; i++) t->bits[m->t->eog[i] / 32] |= 1u << (m->t->eog[i] % 32);
    t->n = lr_mask__count(t->bits, mine);
    if (has && !g->w.hole_hit) keep_whole(g, &key, t);
    return t;
}
