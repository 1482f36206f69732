/* branches.c - drafts that branch: their blocks, their rows, and the way through them. See speculate.h.
 *
 * The first run of a tree (spec.h) lies behind the sequence's tokens, in its own blocks, as a draft without branches
 * does. Every other run is a sequence of the batch with a table of its own for this step: a fork of the request's, with
 * blocks of its own from the first row of this step on, into which the rows that lead to the run are echoed. When the
 * walk enters a run, its blocks change places with the sequence's (lr_kv_table_swap): the path that was taken is then
 * in place, and the rest goes with the tables when the step ends.
 */
#include "engine/speculate_int.h"
#include "base/mem.h"
#include "model/adapter.h"

enum { GRANTED_MOST = 16 }; /* rows before a tree's: they are echoed to every branch */

/* The next table of this step's branches, NULL if there is no memory. */
static lr_kv_table *next_table(struct lr_spec_state *st)
{
    if (st->n_tables == st->cap_tables) {
        int cap = st->cap_tables ? st->cap_tables * 2 : 16;
        lr_kv_table **p = lr_reallocarray(st->tables, (size_t)cap, sizeof(lr_kv_table *));
        if (!p) return NULL;
        for (int i = st->cap_tables; i < cap; i++) p[i] = NULL;
        st->tables = p;
        st->cap_tables = cap;
    }
    lr_kv_table **t = &st->tables[st->n_tables];
    if (!*t) *t = lr_calloc(1, sizeof **t);
    return *t;
}

static void release(lr_engine *e, int from)
{
    struct lr_spec_state *st = e->spec;
    while (st->n_tables > from) lr_kv_table_deinit(e->kv, st->tables[--st->n_tables]);
}

void lr_spec__release(lr_engine *e)
{
    if (!e->spec) return;
    release(e, 0);
    e->spec->n_echoes = 0;
    e->spec->want_echoes = 0;
}

void lr_spec__free_branches(struct lr_spec_state *st)
{
    for (int i = 0; i < st->cap_tables; i++) lr_free(st->tables[i]);
    lr_free(st->tables);
    lr_free(st->echoes);
}

static int run_length(const lr_spec_tree *t, int run) { return t->run_first[run + 1] - t->run_first[run]; }

/* Depth of the deepest node. */
static int reach(const lr_spec_tree *t)
{
    int d = 0;
    for (int i = 0; i < t->n; i++)
        if (t->depth[i] > d) d = t->depth[i];
    return d;
}

/* A table for a run, with blocks for it and for all that leads to it. */
static bool open_run(lr_engine *e, lr_request *r, int run)
{
    struct lr_spec_state *st = e->spec;
    struct lr_spec_req *s = r->spec;
    lr_seq *q = r->info.seq;
    lr_error err;
    int group, missing, last = s->tree.run_first[run + 1] - 1;
    lr_kv_table *b = next_table(st);
    if (!b) return false;
    lr_kv_table_init(e->kv, b, q->kv.space);
    st->n_tables++;
    s->table[run] = b;
    if (lr_kv_table_reserve(e->kv, b, q->kv.computed + r->granted + reach(&s->tree), &err)) return false;
    if (lr_kv_table_fork(e->kv, b, &q->kv, &err)) return false;
    return lr_kv_table_grow(e->kv, b, r->granted + s->tree.depth[last], &group, &missing);
}

/* Memory for the echoes of a request's branches. */
static bool reserve_echoes(struct lr_spec_state *st, const lr_request *r)
{
    const lr_spec_tree *t = &r->spec->tree;
    int want = st->want_echoes;
    for (int run = 1; run < t->n_runs; run++) want += r->granted + t->depth[t->run_first[run]] - 1;
    if (want > st->cap_echoes) {
        lr_batch_echo *p = lr_reallocarray(st->echoes, (size_t)want * 2, sizeof *p);
        if (!p) return false;
        st->echoes = p;
        st->cap_echoes = want * 2;
    }
    st->want_echoes = want;
    return true;
}

bool lr_spec__room(lr_engine *e, lr_request *r)
{
    struct lr_spec_state *st = e->spec;
    lr_spec_tree *t = &r->spec->tree;
    lr_seq *q = r->info.seq;
    lr_error err;
    int group, missing, before = st->n_tables;
    if (t->n_runs > 1 && (!e->model->echoes || r->granted > GRANTED_MOST)) { /* the first run by itself */
        t->n = t->run_first[1];
        t->n_runs = 1;
    }
    if (!lr_kv_table_grow(e->kv, &q->kv, r->granted + run_length(t, 0), &group, &missing)) return false;
    if (t->n_runs == 1) return true;
    bool good = !lr_kv_table_reserve(e->kv, &q->kv, q->kv.computed + r->granted + reach(t), &err);
    for (int run = 1; good && run < t->n_runs; run++) good = open_run(e, r, run);
    good = good && reserve_echoes(st, r);
    if (!good) release(e, before);
    return good;
}

static void echo(struct lr_spec_state *st, const lr_engine *e, int row, const lr_kv_table *t)
{
    lr_batch_echo *x = &st->echoes[st->n_echoes++];
    *x = (lr_batch_echo){.row = row};
    for (int g = 0; g < e->model->n_groups; g++) x->table[g] = t->block[g];
}

void lr_spec__add_branches(lr_engine *e, lr_batch *b, const lr_request *r, int first)
{
    struct lr_spec_state *st = e->spec;
    const struct lr_spec_req *s = r->spec;
    const lr_spec_tree *t = &s->tree;
    const lr_seq *q = r->info.seq;
    for (int i = -r->granted; i < t->n && t->n_runs > 1; i++)
        for (int run = 1; run < t->n_runs; run++)
            if (i < 0 || lr_spec_tree_above(t, i, t->parent[t->run_first[run]]))
                echo(st, e, first + r->granted + i, s->table[run]);
    for (int run = 1; run < t->n_runs; run++) {
        lr_batch_seq *to = &e->batch[b->n_seqs];
        int node = t->run_first[run];
        *to = (lr_batch_seq){.row = b->n_rows,
                             .n = run_length(t, run),
                             .pos = q->kv.computed + r->granted - 1 + t->depth[node],
                             .lora = lr_adapter_lora(q->lora)};
        for (int g = 0; g < e->model->n_groups; g++) to->table[g] = s->table[run]->block[g];
        e->batch_req[b->n_seqs++] = NULL;
        for (int i = 0; i < to->n; i++) {
            e->out_rows[b->n_out++] = b->n_rows;
            e->rows[b->n_rows++] = t->token[node + i];
        }
    }
    b->n_echoes = st->n_echoes;
    b->echoes = st->echoes;
}

void lr_spec__enter(lr_request *r, int node)
{
    struct lr_spec_req *s = r->spec;
    if (!s || s->tree.n == 0 || node < 0 || s->tree.run[node] == s->in_run) return;
    s->in_run = s->tree.run[node];
    lr_kv_table_swap(r->e->kv, &r->info.seq->kv, s->table[s->in_run]);
}
