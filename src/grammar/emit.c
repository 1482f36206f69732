/* emit.c - nodes become states of the automaton.
 *
 * States are made from the end to the front: emit(node, next) gives the entry of "node, then next". The pair is
 * remembered within a rule, so that equal endings are shared. Repetitions with small bounds are copied, others counted;
 * a counted loop inside another's body becomes a rule of its own, as an item carries one count.
 */
#include "grammar/grammar_int.h"

#define COPY_MAX   64u  /* states that the copies of a bounded repetition may take */
#define COPY_MORE  256u /* the same inside a counted loop */
#define MAX_INLINE 1000 /* nesting of nodes, those of copied rules counted in */

typedef struct memo {
    uint32_t node, next, entry;
} memo;

typedef struct emitter {
    lr_gb *b;
    const gplan *p;
    nfa *n;
    uint32_t *rule; /* (b->n_rule) automaton rule of a rule, N_NONE = none yet */
    lr_gnode *body; /* (n->n_rule) node of each automaton rule, 0 = hole */
    uint32_t cap_body;
    memo *memo; /* hash table; entries of other rules count as free */
    uint32_t n_memo, cap_memo;
    int depth, counted; /* counted loops around this place */
    int code;           /* why it failed */
} emitter;

static uint32_t fail(emitter *e, int code)
{
    if (!e->code) e->code = code;
    return N_NONE;
}

/* ---- memory of pairs ---- */

static uint32_t memo_hash(uint32_t node, uint32_t next)
{
    uint64_t h = ((uint64_t)node << 32 | next) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(h >> 32);
}

static memo *memo_at(emitter *e, uint32_t node, uint32_t next)
{
    uint32_t i = memo_hash(node, next) & (e->cap_memo - 1);
    while (e->memo[i].node && (e->memo[i].node != node || e->memo[i].next != next)) i = (i + 1) & (e->cap_memo - 1);
    return &e->memo[i];
}

static bool memo_put(emitter *e, uint32_t node, uint32_t next, uint32_t entry)
{
    if (2 * e->n_memo >= e->cap_memo) {
        memo *old = e->memo;
        uint32_t cap = e->cap_memo;
        e->memo = lr_calloc((size_t)cap * 2, sizeof *old);
        if (!e->memo) {
            e->memo = old;
            return false;
        }
        e->cap_memo = cap * 2;
        for (uint32_t i = 0; i < cap; i++) {
            if (old[i].node) *memo_at(e, old[i].node, old[i].next) = old[i];
        }
        lr_free(old);
    }
    *memo_at(e, node, next) = (memo){node, next, entry};
    e->n_memo++;
    return true;
}

static void memo_clear(emitter *e)
{
    if (e->n_memo) memset(e->memo, 0, e->cap_memo * sizeof *e->memo);
    e->n_memo = 0;
}

/* ---- rules ---- */

/* A new automaton rule for a node (0: a hole). */
static uint32_t new_rule(emitter *e, lr_gnode body, const char *name)
{
    if (e->n->n_rule >= e->cap_body) {
        uint32_t cap = e->cap_body ? e->cap_body * 2 : 64;
        lr_gnode *q = lr_reallocarray(e->body, cap, sizeof *q);
        if (!q) return fail(e, LR_ENOMEM);
        e->body = q;
        e->cap_body = cap;
    }
    uint32_t r = lr_nfa__rule(e->n, name);
    if (r == N_NONE) return fail(e, LR_ENOMEM);
    e->body[r] = body;
    return r;
}

static uint32_t rule_of(emitter *e, uint32_t r)
{
    const grule *g = &e->b->rule[r];
    if (e->rule[r] != N_NONE) return e->rule[r];
    uint32_t x = e->rule[r] = new_rule(e, g->node, g->name);
    if (x != N_NONE && g->unique) {
        e->n->rule[x].unique = true;
        e->n->n_unique++;
    }
    if (x != N_NONE && g->hole >= 0) {
        e->n->rule[x].hole = g->hole;
        e->n->rule[x].hole_id = g->hole_id;
    }
    return x;
}

/* ---- nodes ---- */

static uint32_t emit(emitter *e, lr_gnode id, uint32_t next);

/* Whether a node certainly matches no empty text. */
static bool surely_nonempty(const emitter *e, lr_gnode id, int depth)
{
    const gnode *n = &e->b->node[id];
    switch (n->kind) {
    case G_LIT:
    case G_BYTES:
        return true;
    case G_SEQ:
    case G_ALT:
        if (depth > 20) return false;
        for (uint32_t i = 0; i < n->b; i++) {
            if (surely_nonempty(e, e->b->list[n->a + i], depth + 1) == (n->kind == G_SEQ)) return n->kind == G_SEQ;
        }
        return n->kind == G_ALT;
    case G_REP:
        return depth <= 20 && n->min > 0 && surely_nonempty(e, n->a, depth + 1);
    case G_REF:
        return depth <= 20 && e->p->copy[n->a] && surely_nonempty(e, e->b->rule[n->a].node, depth + 1);
    case G_LITS:
        for (uint32_t i = 0; i < n->b; i++) {
            if (e->b->lits[n->a + 2 * i + 1] == 0) return false;
        }
        return true;
    default:
        return false;
    }
}

static uint32_t emit_lit(emitter *e, const gnode *n, uint32_t next)
{
    for (uint32_t i = n->b; i-- > 0 && next != N_NONE;) {
        unsigned c = (uint8_t)e->b->text[n->a + i];
        next = lr_nfa__state(e->n, N_BYTES, lr_nfa__one(e->n, c), next, 0);
    }
    return next;
}

static uint32_t emit_alt(emitter *e, const gnode *n, uint32_t next)
{
    uint32_t entry = N_NONE;
    for (uint32_t i = n->b; i-- > 0;) {
        uint32_t s = emit(e, e->b->list[n->a + i], next);
        if (s == N_NONE) return s;
        entry = lr_nfa__either(e->n, s, entry);
        if (entry == N_NONE) return entry;
    }
    return entry;
}

static uint32_t emit_star(emitter *e, lr_gnode body, uint32_t next)
{
    uint32_t loop = lr_nfa__state(e->n, N_SPLIT, 0, 0, next);
    if (loop == N_NONE) return loop;
    uint32_t entry = emit(e, body, loop);
    if (entry == N_NONE) return entry;
    e->n->st[loop].a = entry;
    return loop;
}

/* A loop with a count. */
static uint32_t emit_counted(emitter *e, lr_gnode id, const gnode *n, uint32_t next)
{
    if (e->counted) { /* a rule of its own */
        uint32_t r = new_rule(e, id, "repetition");
        return r == N_NONE ? r : lr_nfa__state(e->n, N_CALL, r, next, 0);
    }
    uint32_t max = n->max == LR_REP_INF ? UINT32_MAX : (uint32_t)n->max, rule = N_NONE;
    if (!surely_nonempty(e, n->a, 0)) {
        rule = new_rule(e, n->a, "repetition");
        if (rule == N_NONE) return rule;
    }
    uint32_t x = lr_nfa__loop(e->n, (uint32_t)n->min, max, rule);
    uint32_t loop = lr_nfa__state(e->n, N_LOOP, x, 0, next), entry;
    if (loop == N_NONE) return loop;
    if (rule != N_NONE) {
        e->n->in_loop = x;
        entry = lr_nfa__state(e->n, N_CALL, rule, loop, 1);
        e->n->in_loop = N_NONE;
    } else {
        e->counted++;
        e->n->in_loop = x;
        entry = emit(e, n->a, loop);
        e->n->in_loop = N_NONE;
        e->counted--;
    }
    if (entry == N_NONE) return entry;
    e->n->st[loop].a = entry;
    return lr_nfa__state(e->n, N_ENTER, x, entry, next);
}

static uint32_t emit_rep(emitter *e, lr_gnode id, const gnode *n, uint32_t next)
{
    uint64_t copies = n->max == LR_REP_INF ? (uint64_t)n->min : (uint64_t)n->max;
    uint64_t size = copies * e->p->size[n->a], most = e->counted ? COPY_MORE : COPY_MAX;
    if (copies > 1 && size > most) return emit_counted(e, id, n, next);
    uint32_t s = next;
    if (n->max == LR_REP_INF) {
        s = emit_star(e, n->a, next);
    } else {
        for (int32_t i = n->min; i < n->max && s != N_NONE; i++) {
            s = emit(e, n->a, s);
            if (s != N_NONE) s = lr_nfa__either(e->n, s, next);
        }
    }
    for (int32_t i = 0; i < n->min && s != N_NONE; i++) s = emit(e, n->a, s);
    return s;
}

static uint32_t emit_strings(emitter *e, const gnode *n, uint32_t next)
{
    lr_str *s = lr_reallocarray(NULL, n->b, sizeof *s);
    if (!s) return fail(e, LR_ENOMEM);
    size_t count = n->b;
    bool empty;
    for (uint32_t i = 0; i < n->b; i++) {
        const uint32_t *p = e->b->lits + n->a + 2 * i;
        s[i] = (lr_str){e->b->text + p[0], p[1]};
    }
    lr_nfa__sort_strings(s, &count, &empty);
    uint32_t entry = count ? lr_nfa__strings(e->n, s, count, next) : N_NONE;
    lr_free(s);
    if (count && entry == N_NONE) return entry;
    return empty ? lr_nfa__either(e->n, entry, next) : entry;
}

/* Each place is a state that chooses among its edges. */
static uint32_t emit_graph(emitter *e, const gnode *n, uint32_t next)
{
    uint32_t at = n->a, places = e->b->list[at], edges = e->b->list[at + 1];
    uint32_t *place = lr_reallocarray(NULL, places, sizeof *place), entry = N_NONE;
    if (!place) return fail(e, LR_ENOMEM);
    for (uint32_t i = 0; i < places; i++) {
        place[i] = lr_nfa__state(e->n, N_DEAD, 0, 0, 0);
        if (place[i] == N_NONE) goto done;
    }
    nstate *end = &e->n->st[place[places - 1]];
    *end = (nstate){.kind = N_SPLIT, .a = next, .b = next};
    for (uint32_t i = edges; i-- > 0;) {
        const uint32_t *ed = e->b->list + at + 2 + 3 * (size_t)i;
        uint32_t from = place[ed[0]], s = emit(e, ed[2], place[ed[1]]);
        if (s == N_NONE) goto done;
        nstate old = e->n->st[from];
        uint32_t rest = s;
        if (old.kind == N_SPLIT) {
            rest = old.a == old.b ? old.a : lr_nfa__state(e->n, N_SPLIT, 0, old.a, old.b);
            if (rest == N_NONE) goto done;
        }
        e->n->st[from] = (nstate){.kind = N_SPLIT, .a = s, .b = rest};
    }
    entry = place[0];
done:
    lr_free(place);
    return entry;
}

static uint32_t emit_ref(emitter *e, const gnode *n, uint32_t next)
{
    if (e->p->copy[n->a] && e->depth < MAX_INLINE - LR_G_MAX_DEPTH) return emit(e, e->b->rule[n->a].node, next);
    uint32_t r = rule_of(e, n->a);
    return r == N_NONE ? r : lr_nfa__state(e->n, N_CALL, r, next, 0);
}

static uint32_t emit_kind(emitter *e, lr_gnode id, uint32_t next)
{
    gnode n = e->b->node[id];
    switch ((gkind)n.kind) {
    case G_NEVER:
        return lr_nfa__state(e->n, N_DEAD, 0, 0, 0);
    case G_EMPTY:
        return next;
    case G_LIT:
        return emit_lit(e, &n, next);
    case G_BYTES:
        return lr_nfa__state(e->n, N_BYTES, n.a, next, 0);
    case G_SEQ:
        for (uint32_t i = n.b; i-- > 0 && next != N_NONE;) next = emit(e, e->b->list[n.a + i], next);
        return next;
    case G_ALT:
        return emit_alt(e, &n, next);
    case G_REP:
        return emit_rep(e, id, &n, next);
    case G_REF:
        return emit_ref(e, &n, next);
    case G_LITS:
        return emit_strings(e, &n, next);
    case G_GRAPH:
        return emit_graph(e, &n, next);
    }
    return N_NONE;
}

static uint32_t emit(emitter *e, lr_gnode id, uint32_t next)
{
    memo *m = memo_at(e, id, next);
    if (m->node) return m->entry;
    if (e->depth >= MAX_INLINE) return fail(e, LR_ELIMIT);
    e->depth++;
    uint32_t s = emit_kind(e, id, next);
    e->depth--;
    if (s != N_NONE && !memo_put(e, id, next, s)) return fail(e, LR_ENOMEM);
    return s;
}

/* ---- all rules ---- */

static void mix(uint64_t sig[2], uint64_t v)
{
    sig[0] = (sig[0] ^ v) * 0x9E3779B97F4A7C15u;
    sig[0] ^= sig[0] >> 29;
    sig[1] = (sig[1] + v) * 0xC2B2AE3D27D4EB4Fu;
    sig[1] ^= sig[1] >> 31;
}

/* The signature of a rule that calls none: equal automata have equal ones, in any grammar. Bounds of loops count only
 * if asked for. */
static void sign(const nfa *n, const nrule *r, bool bounds, uint64_t sig[2])
{
    sig[0] = 0x13198A2E03707344u + bounds;
    sig[1] = 0xA4093822299F31D0u;
    for (uint32_t i = r->lo; i < r->hi; i++) {
        const nstate *s = &n->st[i];
        mix(sig, (uint64_t)s->kind << 32 | (s->a ? s->a - r->lo + 1 : 0));
        mix(sig, s->kind == N_BYTES ? 0 : s->b ? s->b - r->lo + 1 : 0);
        if (s->kind == N_BYTES) {
            for (int k = 0; k < 4; k++) mix(sig, n->set[s->x].w[k]);
        } else if (bounds && (s->kind == N_ENTER || s->kind == N_LOOP)) {
            mix(sig, (uint64_t)n->loop[s->x].min << 32 | n->loop[s->x].max);
        }
    }
    mix(sig, r->start - r->lo);
}

static void sign_rule(const nfa *n, nrule *r)
{
    r->shares = true;
    for (uint32_t i = r->lo; i < r->hi; i++) r->shares = r->shares && n->st[i].kind != N_CALL;
    sign(n, r, true, r->sig);
    sign(n, r, false, r->loose);
}

static int emit_all(emitter *e, uint32_t root, lr_error *err)
{
    e->n->root = rule_of(e, root);
    for (uint32_t r = 0; r < e->n->n_rule && !e->code; r++) {
        uint32_t lo = e->n->n_st, start = 0;
        memo_clear(e);
        if (e->body[r]) start = emit(e, e->body[r], 0);
        if (start == N_NONE)
            return e->code == LR_ELIMIT ? lr_fail(err, LR_ELIMIT, "the grammar is nested too deeply")
                                        : lr_nfa__full(e->n, err);
        nrule *rule = &e->n->rule[r];
        rule->start = start;
        rule->lo = lo;
        rule->hi = e->n->n_st;
        if (e->body[r]) sign_rule(e->n, rule);
    }
    return e->code ? lr_nfa__full(e->n, err) : 0;
}

int lr_emit(lr_gb *b, uint32_t root, const gplan *p, nfa *n, lr_error *err)
{
    emitter e = {.b = b, .p = p, .n = n, .cap_memo = 256};
    int rc = 0;
    e.rule = lr_reallocarray(NULL, (size_t)b->n_rule + 1, sizeof *e.rule);
    e.memo = lr_calloc(e.cap_memo, sizeof *e.memo);
    n->set = lr_reallocarray(NULL, (size_t)b->n_set + 1, sizeof *n->set);
    if (!e.rule || !e.memo || !n->set) {
        rc = lr_fail(err, LR_ENOMEM, "no memory for the grammar");
        goto done;
    }
    if (b->n_set) memcpy(n->set, b->set, b->n_set * sizeof *n->set);
    n->n_set = b->n_set;
    n->cap_set = b->n_set + 1;
    n->n_hole = b->n_hole;
    if (b->mark) {
        n->mark = lr_memdup(b->mark, b->n_mark);
        n->n_mark = b->n_mark;
        if (!n->mark) {
            rc = lr_fail(err, LR_ENOMEM, "no memory for the grammar");
            goto done;
        }
    }
    for (uint32_t i = 0; i < b->n_rule; i++) e.rule[i] = N_NONE;
    if (b->n_hole) {
        for (unsigned c = 0; c < 256; c++) (void)lr_nfa__one(n, c);
    }
    rc = emit_all(&e, root, err);
done:
    lr_free(e.rule);
    lr_free(e.body);
    lr_free(e.memo);
    return rc;
}
