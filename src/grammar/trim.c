/* trim.c - which rules may be empty, and which states lead nowhere. See grammar_int.h. */
#include "grammar/grammar_int.h"

/* Who leads to a state, who calls a rule: chains of states. */
typedef struct back {
    uint32_t *head, *next;             /* (n_st), (2 n_st): entry 2 q + k is edge k of state q */
    uint32_t *call_head, *call_next;   /* (n_rule), (n_st) */
    uint32_t *start_head, *start_next; /* (n_st), (n_rule): rules that start at a state */
    uint32_t *todo, n_todo;            /* (n_st) */
    uint8_t *flag;                     /* (n_st) the property that spreads */
} back;

static void back_free(back *k)
{
    lr_free(k->head);
    lr_free(k->next);
    lr_free(k->call_head);
    lr_free(k->call_next);
    lr_free(k->start_head);
    lr_free(k->start_next);
    lr_free(k->todo);
    lr_free(k->flag);
}

static uint32_t *filled(size_t n)
{
    uint32_t *p = lr_reallocarray(NULL, n + 1, sizeof *p);
    for (size_t i = 0; p && i < n; i++) p[i] = N_NONE;
    return p;
}

static void link_edge(back *k, uint32_t q, uint32_t which, uint32_t to)
{
    k->next[2 * q + which] = k->head[to];
    k->head[to] = 2 * q + which;
}

static bool back_make(back *k, const nfa *n)
{
    *k = (back){.head = filled(n->n_st), .next = filled(2 * (size_t)n->n_st), .call_head = filled(n->n_rule)};
    k->call_next = filled(n->n_st);
    k->start_head = filled(n->n_st);
    k->start_next = filled(n->n_rule);
    k->todo = filled(n->n_st);
    k->flag = lr_calloc(n->n_st, 1);
    if (!k->head || !k->next || !k->call_head || !k->call_next || !k->start_head || !k->start_next || !k->todo ||
        !k->flag) {
        back_free(k);
        return false;
    }
    for (uint32_t q = 0; q < n->n_st; q++) {
        const nstate *s = &n->st[q];
        if (s->kind == N_END || s->kind == N_DEAD) continue;
        link_edge(k, q, 0, s->a);
        if (s->kind >= N_SPLIT) link_edge(k, q, 1, s->b);
        if (s->kind != N_CALL) continue;
        k->call_next[q] = k->call_head[s->x];
        k->call_head[s->x] = q;
    }
    for (uint32_t r = 0; r < n->n_rule; r++) {
        k->start_next[r] = k->start_head[n->rule[r].start];
        k->start_head[n->rule[r].start] = r;
    }
    return true;
}

static void set(back *k, uint32_t q)
{
    if (k->flag[q]) return;
    k->flag[q] = 1;
    k->todo[k->n_todo++] = q;
}

static bool null_now(const nfa *n, const back *k, uint32_t q)
{
    const nstate *s = &n->st[q];
    switch (s->kind) {
    case N_SPLIT:
        return k->flag[s->a] || k->flag[s->b];
    case N_CALL:
        return s->b == 0 && n->rule[s->x].nullable && k->flag[s->a];
    case N_ENTER:
        return n->loop[s->x].min == 0 && k->flag[s->b];
    default:
        return false;
    }
}

static void rule_is_null(nfa *n, back *k, uint32_t r)
{
    if (n->rule[r].nullable || n->rule[r].hole >= 0) return;
    n->rule[r].nullable = true;
    for (uint32_t q = k->call_head[r]; q != N_NONE; q = k->call_next[q]) {
        if (null_now(n, k, q)) set(k, q);
    }
}

int lr_nfa_nullable(nfa *n, lr_error *err)
{
    back k;
    if (!back_make(&k, n)) return lr_fail(err, LR_ENOMEM, "no memory for the grammar");
    set(&k, 0);
    bool again = true;
    while (again) { /* again only where a counted loop's body turned out to be empty at times */
        while (k.n_todo) {
            uint32_t q = k.todo[--k.n_todo];
            for (uint32_t r = k.start_head[q]; r != N_NONE; r = k.start_next[r]) rule_is_null(n, &k, r);
            for (uint32_t e = k.head[q]; e != N_NONE; e = k.next[e]) {
                if (null_now(n, &k, e / 2)) set(&k, e / 2);
            }
        }
        again = false;
        for (uint32_t i = 0; i < n->n_loop; i++) {
            gloop *l = &n->loop[i];
            if (l->min == 0 || l->rule == N_NONE || !n->rule[l->rule].nullable) continue;
            l->min = 0;
            again = true;
        }
        for (uint32_t q = 0; again && q < n->n_st; q++) {
            if (n->st[q].kind == N_ENTER && null_now(n, &k, q)) set(&k, q);
        }
    }
    back_free(&k);
    return 0;
}

static bool live_now(const nfa *n, const back *k, uint32_t q)
{
    const nstate *s = &n->st[q];
    switch (s->kind) {
    case N_BYTES:
        return k->flag[s->a];
    case N_SPLIT:
        return k->flag[s->a] || k->flag[s->b];
    case N_CALL: {
        const nrule *r = &n->rule[s->x];
        return k->flag[s->a] && (r->hole >= 0 || k->flag[r->start] || (s->b == 0 && r->nullable));
    }
    case N_ENTER:
        return k->flag[s->a] || (n->loop[s->x].min == 0 && k->flag[s->b]);
    case N_LOOP:
        return k->flag[s->b];
    default:
        return false;
    }
}

int lr_nfa_trim(nfa *n, lr_error *err)
{
    back k;
    if (!back_make(&k, n)) return lr_fail(err, LR_ENOMEM, "no memory for the grammar");
    set(&k, 0);
    while (k.n_todo) {
        uint32_t q = k.todo[--k.n_todo];
        for (uint32_t e = k.head[q]; e != N_NONE; e = k.next[e]) {
            if (live_now(n, &k, e / 2)) set(&k, e / 2);
        }
        for (uint32_t r = k.start_head[q]; r != N_NONE; r = k.start_next[r]) {
            for (uint32_t c = k.call_head[r]; c != N_NONE; c = k.call_next[c]) {
                if (live_now(n, &k, c)) set(&k, c);
            }
        }
    }
    for (uint32_t q = 1; q < n->n_st; q++) {
        if (!k.flag[q]) n->st[q] = (nstate){.kind = N_DEAD};
    }
    back_free(&k);
    return 0;
}
