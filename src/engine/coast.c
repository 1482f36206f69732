/* coast.c - steps of a simulated model in which nothing has to be decided: see lr_engine_coast.
 *
 * Such a step is what lr_engine_step would do for a batch of decoding requests, without asking who runs: blocks for one
 * more row each, the pass, one token each in order. Whatever could be decided otherwise ends it before: a request that
 * waits, rows of a prompt, memory that might not do, a policy that wants to be asked.
 */
#include "engine/engine_int.h"
#include "model/simulated.h"

static bool plain(const lr_request *r)
{
    return r->info.kind == LR_REQ_GENERATE && r->info.n_pending == 1 && !r->want_cancel && !r->want_free && !r->spec &&
           r->fault == LR_FAULT_NONE && r->info.seq->kv.computed + 1 == r->info.seq->len;
}

static bool may_coast(const lr_engine *e)
{
    if (!lr_simulated_is(e->model) || e->in_step || e->trace) return false;
    if (e->waiting.n > 0 || e->running.n == 0 || e->n_deferred > 0 || e->idle_old) return false;
    if (e->policy.name && !e->policy.steady) return false;
    if (e->running.n > e->cfg.max_batch_tokens) return false;
    for (int i = 0; i < e->running.n; i++)
        if (!plain(e->running.at[i])) return false;
    return true;
}

/* Each request can have one more block without anyone being asked. */
static bool has_room(const lr_engine *e)
{
    lr_kv_stats s;
    if (!e->policy.evict) return lr_kv_available(e->kv, 0) >= e->running.n;
    lr_kv_get_stats(e->kv, 0, &s);
    return s.free > e->running.n + 2;
}

/* Gets the blocks of a step; false if one is missing after all, and then nobody has run. */
static bool get_blocks(lr_engine *e, bool all)
{
    int group, missing, bs = e->cfg.block_size;
    for (int i = 0; i < e->running.n; i++) {
        lr_seq *q = e->running.at[i]->info.seq;
        if (!all && q->kv.computed % bs) continue; /* the block that it writes to is its own since the step before */
        if (!lr_kv_table_grow(e->kv, &q->kv, 1, &group, &missing)) return false;
    }
    return true;
}

/* What the pass did for one request. False if it has ended. */
static bool take_token(lr_request *r)
{
    lr_engine *e = r->e;
    lr_seq *q = r->info.seq;
    lr_error err;
    int32_t id = lr_simulated_next(q->tokens[q->len - 1], q->len - 1);
    r->info.n_computed++;
    e->metrics.computed_tokens++;
    lr_kv_table_advance(e->kv, &q->kv, q->tokens, 1);
    lr_request__stamp(r);
    if (q->len + 1 > q->cap && lr_seq__reserve(q, q->len + 1, &err)) {
        lr_request__fail(r, &err);
        return false;
    }
    q->tokens[q->len++] = id;
    lr_finish how = lr_request__after_token(r, id, false);
    if (how != LR_FINISH_NONE) lr_request__end(r, LR_REQ_DONE, how);
    return lr_engine__active(r);
}

int64_t lr_engine_coast(lr_engine *e, double until)
{
    int64_t steps = 0;
    if (!may_coast(e)) return 0;
    lr_sim_load l = {.rows = e->running.n, .seqs = e->running.n, .outs = e->running.n};
    for (int i = 0; i < e->running.n; i++) l.context += e->running.at[i]->info.seq->len;
    bool go_on = true;
    e->in_step = true;
    while (go_on && lr_simulated_now(e->model) < until && has_room(e)) {
        double t0 = lr_simulated_now(e->model);
        lr_kv_set_time(e->kv, t0);
        if (!get_blocks(e, steps == 0)) break;
        e->generation++;
        lr_simulated_pass(e->model, &l);
        double t1 = lr_simulated_now(e->model);
        lr_kv_set_time(e->kv, t1);
        for (int i = 0; i < l.seqs; i++) go_on = take_token(e->running.at[i]) && go_on;
        go_on = go_on && e->n_deferred == 0;
        if (!go_on) lr_engine__deferred(e);
        lr_engine__account(e, t0, t1, l.rows);
        lr_hist__add_T(&e->metrics.results, 0);
        l.context += l.seqs;
        steps++;
    }
    e->in_step = false;
    return steps;
}
