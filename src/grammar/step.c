/* step.c - frames, and what one byte does to a set of items. See grammar.h and grammar_int.h.
 *
 * A step takes each item over the byte, and then closes the result: rules that ended return to where their frames say,
 * rules that may start are entered, each with one frame that holds everybody who called it here. Callers come before
 * callees (ranks), so that a frame is complete when it is made. A rule whose caller has nothing left to do but end
 * itself returns to its caller's callers at once, so returning is never a chain and tail calls need no new frame.
 * Unique rules (unique.c) are the exception: they end by themselves, when the text has been looked at.
 */
#include "grammar/grammar_int.h"
#include <stdlib.h>

static void no_memory(gwork *w)
{
    if (!w->err.code) lr_fail(&w->err, LR_ENOMEM, "no memory for the grammar's state");
}

bool lr_step__push(gwork *w, itemlist *l, uint32_t d, frame *f)
{
    if (d == D_DEAD) return !w->err.code;
    if (l->n == l->cap) {
        uint32_t cap = l->cap ? l->cap * 2 : 32;
        gitem *p = cap <= 4 * LR_G_MAX_RETURNS ? lr_reallocarray(l->at, cap, sizeof *p) : NULL;
        if (!p) {
            if (cap > 4 * LR_G_MAX_RETURNS && !w->err.code)
                lr_fail(&w->err, LR_ELIMIT, "the grammar is too ambiguous here: too many ways to read the text");
            no_memory(w);
            return false;
        }
        l->at = p;
        l->cap = cap;
    }
    l->at[l->n++] = (gitem){d, f};
    return true;
}

static int cmp_item(const void *a, const void *b)
{
    uintptr_t x = (uintptr_t)((const gitem *)a)->f, y = (uintptr_t)((const gitem *)b)->f;
    return (x > y) - (x < y);
}

/* Sorts by frame and joins what has the same one. */
static bool join(lr_grammar *g, itemlist *l)
{
    if (l->n < 2) return true;
    if (l->n > 8) {
        qsort(l->at, l->n, sizeof *l->at, cmp_item);
    } else {
        for (uint32_t i = 1; i < l->n; i++) {
            gitem x = l->at[i];
            uint32_t k = i;
            for (; k > 0 && l->at[k - 1].f > x.f; k--) l->at[k] = l->at[k - 1];
            l->at[k] = x;
        }
    }
    uint32_t n = 1;
    for (uint32_t i = 1; i < l->n; i++) {
        if (l->at[i].f == l->at[n - 1].f) {
            l->at[n - 1].d = lr_dfa__union(g, l->at[n - 1].d, l->at[i].d);
            if (g->w.err.code) return false;
        } else {
            l->at[n++] = l->at[i];
        }
    }
    l->n = n;
    return true;
}

/* ---- frames ---- */

static uint32_t hash_frame(const gitem *it, uint32_t n, bool root, bool unique)
{
    uint64_t h = 0x452821E638D01377u + root + 2u * unique;
    for (uint32_t i = 0; i < n; i++) {
        h = (h ^ it[i].d) * 0x9E3779B97F4A7C15u;
        h = (h ^ (uintptr_t)it[i].f) * 0xC2B2AE3D27D4EB4Fu;
        h ^= h >> 32;
    }
    return (uint32_t)h;
}

static bool grow_frames(lr_grammar *g)
{
    uint32_t n = g->n_fbucket ? g->n_fbucket * 2 : 64;
    frame **b = lr_calloc(n, sizeof *b);
    if (!b) return false;
    for (uint32_t i = 0; i < g->n_fbucket; i++) {
        for (frame *f = g->fbucket[i], *next; f; f = next) {
            next = f->next;
            f->next = b[f->hash & (n - 1)];
            b[f->hash & (n - 1)] = f;
        }
    }
    lr_free(g->fbucket);
    g->fbucket = b;
    g->n_fbucket = n;
    return true;
}

void lr_frame__unref(lr_grammar *g, frame *f)
{
    if (--f->refs > 0) return;
    frame **p = &g->fbucket[f->hash & (g->n_fbucket - 1)];
    while (*p != f) p = &(*p)->next;
    *p = f->next;
    g->n_frame--;
    for (uint32_t i = 0; i < f->n; i++) lr_frame__unref(g, f->ret[i].f);
    lr_free(f);
}

static bool keep_tmp(gwork *w, frame *f)
{
    if (w->n_tmp == w->cap_tmp) {
        uint32_t cap = w->cap_tmp ? w->cap_tmp * 2 : 64;
        frame **p = lr_reallocarray(w->tmp, cap, sizeof *p);
        if (!p) return false;
        w->tmp = p;
        w->cap_tmp = cap;
    }
    w->tmp[w->n_tmp++] = f;
    return true;
}

/* The frame with these returns (sorted, joined); alive at least until the call ends. */
static frame *make_frame(lr_grammar *g, const gitem *it, uint32_t n, bool root, bool unique)
{
    gwork *w = &g->w;
    uint32_t hash = hash_frame(it, n, root, unique), depth = 0;
    for (frame *f = g->n_fbucket ? g->fbucket[hash & (g->n_fbucket - 1)] : NULL; f; f = f->next) {
        if (f->hash == hash && f->n == n && f->root == root && f->unique == unique &&
            (n == 0 || memcmp(f->ret, it, n * sizeof *it) == 0))
            return f;
    }
    frame *f = NULL;
    if (g->n_frame < g->n_fbucket || grow_frames(g)) f = lr_calloc(1, sizeof *f + n * sizeof *it);
    if (!f || !keep_tmp(w, f)) {
        lr_free(f);
        no_memory(w);
        return NULL;
    }
    f->refs = 1;
    f->hash = hash;
    f->n = n;
    f->root = root;
    f->unique = f->guarded = unique;
    for (uint32_t i = 0; i < n; i++) {
        f->ret[i].d = it[i].d;
        f->ret[i].f = lr_frame__ref(it[i].f);
        if (it[i].f->depth >= depth) depth = it[i].f->depth + 1u;
        f->guarded = f->guarded || (it[i].f->guarded && g->d[it[i].d].flags & D_ENDS);
    }
    f->depth = (uint16_t)depth;
    frame **b = &g->fbucket[hash & (g->n_fbucket - 1)];
    f->next = *b;
    *b = f;
    g->n_frame++;
    return f;
}

frame *lr_frame__root(lr_grammar *g)
{
    if (!g->root) {
        frame *f = make_frame(g, NULL, 0, true, false);
        if (f) g->root = lr_frame__ref(f);
    }
    return g->root;
}

/* ---- calls ---- */

static bool rule_before(const lr_grammar *g, uint32_t a, uint32_t b) { return g->n->rule[a].rank < g->n->rule[b].rank; }

static void heap_push(lr_grammar *g, uint32_t r)
{
    gwork *w = &g->w;
    uint32_t i = w->n_heap++;
    for (; i > 0 && rule_before(g, r, w->heap[(i - 1) / 2]); i = (i - 1) / 2) w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = r;
}

static uint32_t heap_pop(lr_grammar *g)
{
    gwork *w = &g->w;
    uint32_t top = w->heap[0], r = w->heap[--w->n_heap], i = 0;
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= w->n_heap) break;
        if (c + 1 < w->n_heap && rule_before(g, w->heap[c + 1], w->heap[c])) c++;
        if (!rule_before(g, w->heap[c], r)) break;
        w->heap[i] = w->heap[c];
        i = c;
    }
    w->heap[i] = r;
    return top;
}

/* Notes for each rule that d calls that it returns to f. */
static bool add_calls(lr_grammar *g, uint32_t d, frame *f)
{
    gwork *w = &g->w;
    if (g->d[d].n_calls && f->depth >= LR_G_MAX_NEST) return true; /* not taken */
    for (uint32_t i = 0; i < g->d[d].n_calls; i++) {
        uint32_t after = lr_dfa__after_call(g, d, i), rule = lr_dfa__calls(&g->d[d])[2 * i];
        if (w->err.code) return false;
        if (after == D_DEAD) continue;
        if (w->n_contrib == w->cap_contrib) {
            uint32_t cap = w->cap_contrib ? w->cap_contrib * 2 : 64;
            struct contrib *p = lr_reallocarray(w->contrib, cap, sizeof *p);
            if (!p) {
                no_memory(w);
                return false;
            }
            w->contrib = p;
            w->cap_contrib = cap;
        }
        w->contrib[w->n_contrib] = (struct contrib){{after, f}, w->first[rule]};
        if (!w->first[rule]) heap_push(g, rule);
        w->first[rule] = ++w->n_contrib;
    }
    return true;
}

/* The frame of a rule from all who call it here; NULL on failure. */
static frame *gather(lr_grammar *g, uint32_t rule, itemlist *l)
{
    gwork *w = &g->w;
    bool root = false;
    l->n = 0;
    for (uint32_t c = w->first[rule]; c; c = w->contrib[c - 1].next) {
        gitem it = w->contrib[c - 1].item;
        const dstate *s = &g->d[it.d];
        bool through = s->flags & D_ENDS && !it.f->unique; /* a unique rule has to end by itself */
        if (through) {
            root = root || it.f->root;
            for (uint32_t i = 0; i < it.f->n; i++) {
                if (!lr_step__push(w, l, it.f->ret[i].d, it.f->ret[i].f)) return NULL;
            }
        }
        if (!through || s->n > 1) {
            if (!lr_step__push(w, l, it.d, it.f)) return NULL;
        }
    }
    if (!join(g, l)) return NULL;
    if (l->n > LR_G_MAX_RETURNS) {
        lr_fail(&w->err, LR_ELIMIT, "the grammar is too ambiguous here: too many ways to read the text");
        return NULL;
    }
    return make_frame(g, l->at, l->n, root, g->n->rule[rule].unique);
}

static bool enter_rule(lr_grammar *g, lr_matcher *m, uint32_t rule, frame *f, lr_str text)
{
    gwork *w = &g->w;
    nrule *r = &g->n->rule[rule];
    uint32_t d;
    if (r->hole >= 0) {
        w->hole_hit = true;
        d = m ? lr_matcher__hole(m, rule, text) : D_DEAD;
    } else {
        if (!r->d0) r->d0 = lr_dfa__of_state(g, r->start, 0);
        d = r->d0;
    }
    if (w->err.code) return false;
    if (d == D_DEAD) return true;
    uint32_t b = lr_dfa__byte_part(g, d);
    return !w->err.code && lr_step__push(w, &w->out, b, f) && add_calls(g, d, f);
}

/* Enters all rules that were noted. */
static bool enter_all(lr_grammar *g, lr_matcher *m, lr_str text)
{
    gwork *w = &g->w;
    bool ok = true;
    while (w->n_heap) {
        uint32_t rule = heap_pop(g);
        frame *f = ok ? gather(g, rule, &w->ret) : NULL;
        w->first[rule] = 0;
        ok = f && enter_rule(g, m, rule, f, text);
    }
    w->n_contrib = 0;
    return ok;
}

/* ---- steps ---- */

/* Drops items of unique rules that could only end with what was there before. */
static bool drop_spent(lr_grammar *g, lr_matcher *m, lr_str text)
{
    gwork *w = &g->w;
    uint32_t n = 0;
    if (!g->n->n_unique || !m) return true;
    for (uint32_t i = 0; i < w->out.n; i++) {
        gitem it = w->out.at[i];
        bool narrow = it.f->guarded && g->d[it.d].flags & D_NARROW;
        w->hole_hit = w->hole_hit || narrow;
        if (!narrow || lr_unique__alive(m, it.d, text)) w->out.at[n++] = it;
    }
    w->out.n = n;
    return !w->err.code;
}

bool lr_step__close(lr_grammar *g, lr_matcher *m, lr_str text)
{
    gwork *w = &g->w;
    itemlist *k = &w->kernel;
    w->out.n = 0;
    w->ends = false;
    if (w->err.code) return false;
    uint32_t n = k->n;
    if (w->steps <= n) return !lr_fail(&w->err, LR_ELIMIT, "the grammar is too ambiguous here: too much work");
    w->steps -= n + 1;
    for (uint32_t i = 0; i < k->n; i++) {
        const frame *f = k->at[i].f;
        if (!(g->d[k->at[i].d].flags & D_ENDS) || (i >= n && !f->unique)) continue;
        if (f->unique && m) {
            w->hole_hit = true; /* the text has a say in it */
            if (lr_unique__repeats(m, text)) {
                if (w->err.code) return false;
                continue;
            }
        }
        w->ends = w->ends || f->root;
        for (uint32_t r = 0; r < f->n; r++) {
            if (!lr_step__push(w, k, f->ret[r].d, f->ret[r].f)) return false;
        }
    }
    if (!join(g, k)) return false;
    bool calls = false;
    for (uint32_t i = 0; i < k->n; i++) {
        uint32_t b = lr_dfa__byte_part(g, k->at[i].d);
        if (w->err.code || !lr_step__push(w, &w->out, b, k->at[i].f)) return false;
        calls = calls || g->d[k->at[i].d].n_calls;
    }
    if (!calls) return drop_spent(g, m, text);
    bool ok = true;
    for (uint32_t i = 0; i < k->n && ok; i++) ok = add_calls(g, k->at[i].d, k->at[i].f);
    ok = enter_all(g, m, text) && ok && join(g, &w->out);
    if (ok && w->out.n > LR_G_MAX_ITEMS)
        return !lr_fail(&w->err, LR_ELIMIT, "the grammar is too ambiguous here: too many ways to read the text");
    return ok && drop_spent(g, m, text);
}

void lr_step__byte(lr_grammar *g, const gitem *it, uint32_t n, unsigned b)
{
    gwork *w = &g->w;
    unsigned cls = g->n->cls[b];
    w->kernel.n = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t t = lr_dfa__trans(g, it[i].d, cls);
        if (t != D_DEAD && !lr_step__push(w, &w->kernel, t, it[i].f)) return;
    }
}

bool lr_step__start(lr_grammar *g, lr_matcher *m)
{
    gwork *w = &g->w;
    const nrule *root = &g->n->rule[g->n->root];
    w->out.n = 0;
    frame *f = lr_frame__root(g);
    if (!f || !enter_rule(g, m, g->n->root, f, (lr_str){"", 0})) return false;
    if (!enter_all(g, m, (lr_str){"", 0}) || !join(g, &w->out)) return false;
    w->ends = root->nullable;
    return true;
}

void lr_step__begin_call(lr_grammar *g)
{
    g->w.err.code = 0;
    g->w.hole_hit = false;
    g->w.steps = LR_G_MAX_WORK;
}

void lr_step__end_call(lr_grammar *g)
{
    gwork *w = &g->w;
    while (w->n_tmp) lr_frame__unref(g, w->tmp[--w->n_tmp]);
    if (w->cap_tmp > 65536) { /* after an unusual call */
        lr_free(w->tmp);
        w->tmp = NULL;
        w->cap_tmp = 0;
    }
}

/* ---- states ---- */

void lr_state__clear(lr_grammar *g, gstate *s)
{
    for (uint32_t i = 0; i < s->n; i++) lr_frame__unref(g, s->it[i].f);
    s->n = 0;
    s->ends = false;
}

bool lr_state__set(lr_grammar *g, gstate *s, const gitem *it, uint32_t n, bool ends)
{
    if (n > s->cap) {
        gitem *p = lr_reallocarray(NULL, n < 4 ? 4 : n, sizeof *p);
        if (!p) return false;
        if (s->n) memcpy(p, s->it, s->n * sizeof *p);
        lr_free(s->it);
        s->it = p;
        s->cap = n < 4 ? 4 : n;
    }
    for (uint32_t i = 0; i < n; i++) lr_frame__ref(it[i].f);
    lr_state__clear(g, s);
    if (n) memcpy(s->it, it, n * sizeof *it);
    s->n = n;
    s->ends = ends;
    return true;
}
