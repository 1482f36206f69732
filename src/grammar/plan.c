/* plan.c - decides which rules are copied into the automata of their callers and which are called.
 *
 * Copying saves a call and return at each use; calling shares. A rule is called if it is recursive, if it is a hole or
 * was asked to be kept, if it is large, or if it is "heavy and closed": it runs over text of a wide class (a string's
 * inside) and ends with something else (its closing quote). The masks of such states take a walk of most of the
 * vocabulary, so all uses should share them. A heavy rule that is not closed is copied: called, it could return
 * after each byte, and each mask would have to look behind it.
 */
#include "grammar/grammar_int.h"

enum { TAIL_NEUTRAL, TAIL_CLOSED, TAIL_OPEN }; /* how a node's text ends: nothing needed, narrow, inside a heavy loop */
enum { KNOWN = 1, WIDE = 2, HEAVY = 4 };
#define WIDE_BYTES 64
#define SMALL      64u   /* states: copied wherever it is used */
#define MEDIUM     2000u /* copied if it is used once */

typedef struct facts {
    uint8_t flags, tail;
} facts;

typedef struct planner {
    const lr_gb *b;
    gplan *p;
    facts *f;          /* (n_node) */
    uint32_t *edge_at; /* (n_rule + 1) references of each rule: place in edge */
    uint32_t *edge;    /* rules */
    uint32_t n_edge, cap_edge;
    uint32_t *uses; /* (n_rule) REF nodes that lead to it */
    uint32_t *seen; /* (n_node) rule + 1 that saw it last */
    uint32_t *stack, n_stack, cap_stack;
    uint32_t *comp, *order; /* (n_rule) see lr_scc */
} planner;

static bool push(planner *p, uint32_t v)
{
    if (p->n_stack == p->cap_stack) {
        uint32_t cap = p->cap_stack ? p->cap_stack * 2 : 256;
        uint32_t *q = lr_reallocarray(p->stack, cap, sizeof *q);
        if (!q) return false;
        p->stack = q;
        p->cap_stack = cap;
    }
    p->stack[p->n_stack++] = v;
    return true;
}

/* Child i of a node; false if there is none. */
static bool child(const lr_gb *b, const gnode *n, uint32_t i, lr_gnode *out)
{
    switch (n->kind) {
    case G_SEQ:
    case G_ALT:
        if (i >= n->b) return false;
        *out = b->list[n->a + i];
        return true;
    case G_REP:
        *out = n->a;
        return i == 0;
    case G_GRAPH:
        if (i >= b->list[n->a + 1]) return false;
        *out = b->list[n->a + 2 + 3 * i + 2];
        return true;
    default:
        return false;
    }
}

/* Appends the rules that rule r refers to. */
static bool collect(planner *p, uint32_t r)
{
    const lr_gb *b = p->b;
    if (!b->rule[r].node) return true;
    p->n_stack = 0;
    if (!push(p, b->rule[r].node)) return false;
    while (p->n_stack) {
        lr_gnode id = p->stack[--p->n_stack], c;
        if (p->seen[id] == r + 1) continue;
        p->seen[id] = r + 1;
        const gnode *n = &b->node[id];
        if (n->kind == G_REF) {
            if (p->n_edge == p->cap_edge) {
                uint32_t cap = p->cap_edge ? p->cap_edge * 2 : 256;
                uint32_t *q = lr_reallocarray(p->edge, cap, sizeof *q);
                if (!q) return false;
                p->edge = q;
                p->cap_edge = cap;
            }
            p->edge[p->n_edge++] = n->a;
            p->uses[n->a]++;
        }
        for (uint32_t i = 0; child(b, n, i, &c); i++) {
            if (!push(p, c)) return false;
        }
    }
    return true;
}

/* ---- facts ---- */

static uint32_t sat_add(uint32_t a, uint32_t b) { return a + b < a || a + b > 1u << 24 ? 1u << 24 : a + b; }
static uint32_t sat_mul(uint32_t a, uint32_t b)
{
    uint64_t v = (uint64_t)a * b;
    return v > 1u << 24 ? 1u << 24 : (uint32_t)v;
}

static int popcount(const gset *s)
{
    int n = 0;
    for (int i = 0; i < 4; i++) n += __builtin_popcountll(s->w[i]);
    return n;
}

static void learn(planner *p, lr_gnode id);

static facts fact_of(planner *p, lr_gnode id)
{
    if (!(p->f[id].flags & KNOWN)) learn(p, id);
    return p->f[id];
}

static facts learn_rep(planner *p, const gnode *n, uint32_t *size)
{
    facts c = fact_of(p, n->a), f = {c.flags, c.tail};
    bool many = n->max == LR_REP_INF || n->max > 8;
    uint32_t s = p->p->size[n->a], copies = n->max == LR_REP_INF ? (uint32_t)n->min + 1 : (uint32_t)n->max;
    *size = sat_mul(s, copies) <= 64 ? sat_add(sat_mul(s, copies), 1) : sat_add(s, 2);
    if (many && (c.flags & WIDE)) {
        f.flags |= HEAVY;
        f.tail = TAIL_OPEN;
    } else if (n->min == 0 && c.tail == TAIL_CLOSED) {
        f.tail = TAIL_NEUTRAL;
    }
    return f;
}

static facts learn_ref(planner *p, const gnode *n, uint32_t *size)
{
    uint32_t r = n->a;
    lr_gnode body = p->b->rule[r].node;
    *size = 1;
    if (!p->p->copy[r]) return (facts){0, TAIL_CLOSED};
    *size = p->p->size[body];
    return fact_of(p, body);
}

static facts learn_list(planner *p, const gnode *n, uint32_t *size)
{
    const uint32_t *list = p->b->list + n->a;
    facts f = {0, TAIL_NEUTRAL};
    bool open = false, closed = true;
    *size = n->kind == G_ALT ? n->b : 0;
    for (uint32_t i = 0; i < n->b; i++) {
        facts c = fact_of(p, list[i]);
        f.flags |= c.flags;
        *size = sat_add(*size, p->p->size[list[i]]);
        open = open || c.tail == TAIL_OPEN;
        closed = closed && c.tail == TAIL_CLOSED;
        if (c.tail != TAIL_NEUTRAL) f.tail = c.tail; /* of a sequence: that of the last one that is not neutral */
    }
    if (n->kind == G_ALT) f.tail = open ? TAIL_OPEN : closed ? TAIL_CLOSED : TAIL_NEUTRAL;
    return f;
}

static facts learn_graph(planner *p, const gnode *n, uint32_t *size)
{
    const uint32_t *list = p->b->list + n->a;
    facts f = {0, TAIL_CLOSED};
    *size = sat_add(list[0], list[1]);
    for (uint32_t i = 0; i < list[1]; i++) {
        const uint32_t *e = list + 2 + 3 * i;
        facts c = fact_of(p, e[2]);
        f.flags |= c.flags;
        *size = sat_add(*size, p->p->size[e[2]]);
        if (e[1] == list[0] - 1 && c.tail != TAIL_CLOSED) f.tail = TAIL_OPEN;
        if (e[1] <= e[0] && (c.flags & WIDE)) f.flags |= HEAVY;
    }
    return f;
}

/* Nesting of nodes is bounded, and copied rules add at most what their size allows. */
static void learn(planner *p, lr_gnode id)
{
    const gnode *n = &p->b->node[id];
    uint32_t size = 1;
    facts f = {0, TAIL_CLOSED};
    switch (n->kind) {
    case G_EMPTY:
        f.tail = TAIL_NEUTRAL;
        break;
    case G_LIT:
        size = n->b;
        break;
    case G_BYTES:
        if (popcount(&p->b->set[n->a]) >= WIDE_BYTES) f.flags = WIDE;
        break;
    case G_LITS:
        for (uint32_t i = 0; i < n->b; i++) size = sat_add(size, p->b->lits[n->a + 2 * i + 1]);
        break;
    case G_SEQ:
    case G_ALT:
        f = learn_list(p, n, &size);
        break;
    case G_REP:
        f = learn_rep(p, n, &size);
        break;
    case G_REF:
        f = learn_ref(p, n, &size);
        break;
    case G_GRAPH:
        f = learn_graph(p, n, &size);
        break;
    default:
        break;
    }
    f.flags |= KNOWN;
    p->f[id] = f;
    p->p->size[id] = size;
}

static void decide(planner *p, uint32_t r)
{
    const grule *rule = &p->b->rule[r];
    if (!rule->node) return;
    facts f = fact_of(p, rule->node);
    uint32_t size = p->p->size[rule->node];
    bool closed = (f.flags & HEAVY) && f.tail == TAIL_CLOSED;
    if (rule->keep || closed) return;
    p->p->copy[r] = size <= SMALL || (p->uses[r] <= 1 && size <= MEDIUM);
}

static bool run(planner *p)
{
    uint32_t n = p->b->n_rule;
    for (uint32_t r = 0; r < n; r++) {
        p->edge_at[r] = p->n_edge;
        if (!collect(p, r)) return false;
    }
    p->edge_at[n] = p->n_edge;
    if (!push(p, 0) || lr_scc(n, p->edge_at, p->edge, p->comp, p->order) != 0) return false;
    for (uint32_t i = 0; i < n; i++) { /* callees first */
        uint32_t r = p->order[i], c = p->comp[r];
        bool recursive = (i > 0 && p->comp[p->order[i - 1]] == c) || (i + 1 < n && p->comp[p->order[i + 1]] == c);
        for (uint32_t k = p->edge_at[r]; k < p->edge_at[r + 1]; k++) recursive = recursive || p->edge[k] == r;
        if (!recursive) decide(p, r);
    }
    return true;
}

int lr_gplan_make(const lr_gb *b, gplan *out, lr_error *err)
{
    size_t nr = (size_t)b->n_rule + 2, nn = (size_t)b->n_node + 1;
    *out = (gplan){lr_calloc(nr, 1), lr_calloc(nn, sizeof(uint32_t))};
    planner p = {.b = b, .p = out, .f = lr_calloc(nn, sizeof(facts)), .seen = lr_calloc(nn, sizeof(uint32_t))};
    p.edge_at = lr_calloc(nr, sizeof(uint32_t));
    p.uses = lr_calloc(nr, sizeof(uint32_t));
    p.comp = lr_calloc(nr, sizeof(uint32_t));
    p.order = lr_calloc(nr, sizeof(uint32_t));
    bool ok = out->copy && out->size && p.f && p.seen && p.edge_at && p.uses && p.comp && p.order && run(&p);
    lr_free(p.f);
    lr_free(p.seen);
    lr_free(p.edge_at);
    lr_free(p.edge);
    lr_free(p.uses);
    lr_free(p.comp);
    lr_free(p.order);
    lr_free(p.stack);
    if (ok) return 0;
    lr_gplan_free(out);
    return lr_fail(err, LR_ENOMEM, "no memory for the grammar");
}

void lr_gplan_free(gplan *p)
{
    lr_free(p->copy);
    lr_free(p->size);
    *p = (gplan){0};
}
