/* leftrec.c - rewrites left recursion, so that at one place in the text no rule calls itself, and ranks the rules.
 *
 * Rules that call each other (or themselves) before their first byte form a component K. A text of a rule A of K starts
 * with a text of some B in K that begins with something outside of K, and then goes on: whenever a B is complete, any
 * C of K that begins with a call of B may be continued behind that call, up to the completion of a C, and so on; when
 * an A is complete the text may end. That is an automaton without left calls inside K. It is made for each A of K: the
 * rest of each B behind its first byte is copied, its end leads to a state "B is complete", and from there edges lead
 * behind each left call of B. The start of each B is copied apart, without its left calls into K and without its end (a
 * call matches at least one byte).
 */
#include "grammar/grammar_int.h"

typedef struct pend {
    uint32_t rule, to; /* when `rule` is complete, go on at state `to` */
} pend;

typedef struct rewrite {
    nfa *n;
    const uint32_t *comp;
    uint32_t k;              /* the component */
    const uint32_t *of;      /* (n_of) its rules */
    uint32_t n_of, n_old;    /* n_old: states before any copy */
    uint32_t *inner, *outer; /* (n_old) copies for the present B: behind the first byte, and before; 0 = none yet */
    uint32_t *touched, n_touched; /* (2 n_old) old states with a copy */
    uint32_t *todo, n_todo;       /* (n_old) old states whose inner copy lacks its edges */
    uint32_t done;                /* "B is complete" */
    pend *pend;
    uint32_t n_pend, cap_pend;
    bool counted; /* a left call inside a counted loop */
} rewrite;

/* ---- the left calls of rules ---- */

/* Calls fn for each live call that a rule's start reaches without a byte. seen: (n_st) stamps. */
typedef struct closure {
    const nfa *n;
    uint32_t *seen, stamp, *stack;
} closure;

static uint32_t left_calls(closure *c, uint32_t start, uint32_t *out)
{
    uint32_t n_stack = 0, n_out = 0;
    c->stamp++;
    c->stack[n_stack++] = start;
    c->seen[start] = c->stamp;
    while (n_stack) {
        uint32_t q = c->stack[--n_stack], to[2], n_to = 0;
        const nstate *s = &c->n->st[q];
        if (s->kind == N_SPLIT) {
            to[n_to++] = s->a;
            to[n_to++] = s->b;
        } else if (s->kind == N_ENTER) {
            to[n_to++] = s->a;
            if (c->n->loop[s->x].min == 0) to[n_to++] = s->b;
        } else if (s->kind == N_CALL) {
            if (out) out[n_out] = s->x;
            n_out++;
            if (s->b == 0 && c->n->rule[s->x].nullable) to[n_to++] = s->a;
        }
        for (uint32_t i = 0; i < n_to; i++) {
            if (c->seen[to[i]] == c->stamp) continue;
            c->seen[to[i]] = c->stamp;
            c->stack[n_stack++] = to[i];
        }
    }
    return n_out;
}

/* ---- copies ---- */

static bool in_k(const rewrite *w, uint32_t rule) { return w->comp[rule] == w->k; }

/* The copy of a state behind the first byte; its edges are made later. */
static uint32_t inner(rewrite *w, uint32_t q)
{
    if (q == 0) return w->done;
    if (w->inner[q]) return w->inner[q];
    uint32_t c = lr_nfa__state(w->n, N_DEAD, 0, 0, 0);
    if (c == N_NONE) return c;
    w->inner[q] = c;
    w->touched[w->n_touched++] = q;
    w->todo[w->n_todo++] = q;
    return c;
}

static bool finish_inner(rewrite *w)
{
    while (w->n_todo) {
        uint32_t q = w->todo[--w->n_todo];
        nstate s = w->n->st[q];
        if (s.kind != N_DEAD) {
            s.a = inner(w, s.a);
            if (s.kind >= N_SPLIT) s.b = inner(w, s.b);
        }
        if (s.a == N_NONE || s.b == N_NONE) return false;
        w->n->st[w->inner[q]] = s;
    }
    return true;
}

static bool add_pend(rewrite *w, uint32_t rule, uint32_t to)
{
    if (w->n_pend == w->cap_pend) {
        uint32_t cap = w->cap_pend ? w->cap_pend * 2 : 64;
        pend *p = lr_reallocarray(w->pend, cap, sizeof *p);
        if (!p) return false;
        w->pend = p;
        w->cap_pend = cap;
    }
    w->pend[w->n_pend++] = (pend){rule, to};
    return true;
}

/* The copy of a state before the first byte. What it reaches without a byte is bounded by the nesting of nodes and the
 * length of chains of choices; depth guards against the latter. */
static uint32_t outer(rewrite *w, uint32_t q, bool counted, int depth)
{
    if (w->outer[q]) return w->outer[q];
    uint32_t c = depth < 20000 ? lr_nfa__state(w->n, N_DEAD, 0, 0, 0) : N_NONE;
    if (c == N_NONE) return c;
    w->outer[q] = c;
    w->touched[w->n_touched++] = q;
    nstate s = w->n->st[q];
    switch (s.kind) {
    case N_BYTES:
        s.a = inner(w, s.a);
        break;
    case N_SPLIT:
        s.a = outer(w, s.a, counted, depth + 1);
        s.b = outer(w, s.b, counted, depth + 1);
        break;
    case N_ENTER:
        s.a = outer(w, s.a, true, depth + 1);
        if (w->n->loop[s.x].min == 0)
            s.b = outer(w, s.b, counted, depth + 1);
        else
            s.b = c; /* not taken */
        break;
    case N_CALL: {
        uint32_t after = inner(w, s.a), around = N_NONE;
        if (after == N_NONE) return after;
        if (s.b == 0 && w->n->rule[s.x].nullable) {
            around = outer(w, s.a, counted, depth + 1);
            if (around == N_NONE) return around;
        }
        uint32_t call = N_NONE;
        if (in_k(w, s.x)) {
            w->counted = w->counted || counted;
            if (!add_pend(w, s.x, after)) return N_NONE;
            call = lr_nfa__state(w->n, N_DEAD, 0, 0, 0);
        } else {
            call = lr_nfa__state(w->n, N_CALL, s.x, after, 1);
            if (call != N_NONE) w->n->st[call].loop = s.loop;
        }
        if (call == N_NONE) return call;
        s = (nstate){.kind = N_SPLIT, .a = call, .b = around == N_NONE ? call : around};
        break;
    }
    default:
        s = (nstate){.kind = N_DEAD};
        break;
    }
    if (s.a == N_NONE || s.b == N_NONE) return N_NONE;
    w->n->st[c] = s;
    return c;
}

/* The new start of rule a; N_NONE if the automaton is full. */
static uint32_t rewrite_rule(rewrite *w, uint32_t a, uint32_t *done)
{
    uint32_t start = N_NONE;
    w->n_pend = 0;
    for (uint32_t i = 0; i < w->n_of; i++) {
        done[i] = lr_nfa__state(w->n, N_DEAD, 0, 0, 0);
        if (done[i] == N_NONE) return N_NONE;
    }
    for (uint32_t i = 0; i < w->n_of; i++) {
        w->done = done[i];
        uint32_t s = outer(w, w->n->rule[w->of[i]].start, false, 0);
        if (s == N_NONE || !finish_inner(w)) return N_NONE;
        start = lr_nfa__either(w->n, s, start);
        if (start == N_NONE) return N_NONE;
        while (w->n_touched) {
            uint32_t q = w->touched[--w->n_touched];
            w->inner[q] = w->outer[q] = 0;
        }
    }
    for (uint32_t i = 0; i < w->n_of; i++) {
        uint32_t chain = w->of[i] == a ? 0 : N_NONE;
        for (uint32_t k = 0; k < w->n_pend; k++) {
            if (w->pend[k].rule != w->of[i]) continue;
            chain = lr_nfa__either(w->n, w->pend[k].to, chain);
            if (chain == N_NONE) return N_NONE;
        }
        if (chain != N_NONE) w->n->st[done[i]] = (nstate){.kind = N_SPLIT, .a = chain, .b = chain};
    }
    return start;
}

static int rewrite_component(rewrite *w, lr_error *err)
{
    uint32_t *start = lr_reallocarray(NULL, w->n_of, 2 * sizeof *start), *done = start + w->n_of;
    int rc = 0;
    if (!start) return lr_fail(err, LR_ENOMEM, "no memory for the grammar");
    for (uint32_t i = 0; i < w->n_of && !rc; i++) {
        start[i] = rewrite_rule(w, w->of[i], done);
        if (w->counted) {
            rc = lr_fail(err, LR_EUNSUPPORTED, "rule %s: left recursion through a counted repetition",
                         w->n->rule[w->of[i]].name);
        } else if (start[i] == N_NONE) {
            rc = lr_nfa__full(w->n, err);
        }
    }
    for (uint32_t i = 0; i < w->n_of && !rc; i++) {
        w->n->rule[w->of[i]].start = start[i];
        w->n->rule[w->of[i]].shares = false;
    }
    lr_free(start);
    return rc;
}

/* ---- all rules ---- */

typedef struct graph {
    uint32_t *edge_at, *edge, *comp, *order;
} graph;

static void graph_free(graph *g)
{
    lr_free(g->edge_at);
    lr_free(g->edge);
    lr_free(g->comp);
    lr_free(g->order);
}

static int left_graph(const nfa *n, graph *g, lr_error *err)
{
    closure c = {.n = n, .seen = lr_calloc(n->n_st, sizeof(uint32_t)), .stack = NULL};
    c.stack = lr_reallocarray(NULL, n->n_st, sizeof(uint32_t));
    *g = (graph){.edge_at = lr_calloc((size_t)n->n_rule + 1, sizeof(uint32_t))};
    g->comp = lr_calloc((size_t)n->n_rule + 1, sizeof(uint32_t));
    g->order = lr_calloc((size_t)n->n_rule + 1, sizeof(uint32_t));
    size_t total = 0;
    bool ok = c.seen && c.stack && g->edge_at && g->comp && g->order;
    for (uint32_t r = 0; r < n->n_rule && ok; r++) {
        g->edge_at[r] = (uint32_t)total;
        total += left_calls(&c, n->rule[r].start, NULL);
        ok = total < 1u << 26;
    }
    if (ok) g->edge = lr_reallocarray(NULL, total + 1, sizeof(uint32_t));
    ok = ok && g->edge;
    if (ok) g->edge_at[n->n_rule] = (uint32_t)total;
    for (uint32_t r = 0; r < n->n_rule && ok; r++) left_calls(&c, n->rule[r].start, g->edge + g->edge_at[r]);
    ok = ok && lr_scc(n->n_rule, g->edge_at, g->edge, g->comp, g->order) == 0;
    lr_free(c.seen);
    lr_free(c.stack);
    return ok ? 0 : lr_fail(err, LR_ENOMEM, "no memory for the grammar");
}

static bool calls_itself(const graph *g, uint32_t r)
{
    for (uint32_t k = g->edge_at[r]; k < g->edge_at[r + 1]; k++) {
        if (g->edge[k] == r) return true;
    }
    return false;
}

static int rewrite_all(nfa *n, const graph *g, lr_error *err)
{
    rewrite w = {.n = n, .comp = g->comp, .n_old = n->n_st};
    int rc = 0;
    for (uint32_t i = 0, end; i < n->n_rule && !rc; i = end) {
        for (end = i + 1; end < n->n_rule && g->comp[g->order[end]] == g->comp[g->order[i]];) end++;
        if (end == i + 1 && !calls_itself(g, g->order[i])) continue;
        if (!w.inner) {
            w.inner = lr_calloc(w.n_old, sizeof(uint32_t));
            w.outer = lr_calloc(w.n_old, sizeof(uint32_t));
            w.touched = lr_reallocarray(NULL, w.n_old, 2 * sizeof(uint32_t));
            w.todo = lr_reallocarray(NULL, w.n_old, sizeof(uint32_t));
        }
        w.k = g->comp[g->order[i]];
        w.of = g->order + i;
        w.n_of = end - i;
        rc = w.inner && w.outer && w.touched && w.todo ? rewrite_component(&w, err)
                                                       : lr_fail(err, LR_ENOMEM, "no memory for the grammar");
    }
    lr_free(w.inner);
    lr_free(w.outer);
    lr_free(w.touched);
    lr_free(w.todo);
    lr_free(w.pend);
    return rc;
}

int lr_nfa_unleft(nfa *n, lr_error *err)
{
    graph g;
    int rc = left_graph(n, &g, err);
    for (uint32_t i = 0; i < n->n_rule && !rc; i++) n->rule[g.order[i]].rank = n->n_rule - 1 - i;
    if (!rc) rc = rewrite_all(n, &g, err);
    graph_free(&g);
    return rc;
}
