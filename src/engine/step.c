/* step.c - one step: schedule, batch, forward pass, results, and bringing the lists up to date. See engine.h. */
#include "engine/record.h"
#include "engine/speculate_int.h"
#include "model/adapter.h"
#include <stdio.h>
#include <string.h>

/* ---- the batch ---- */

static void add_to_batch(lr_engine *e, lr_batch *b, lr_request *r)
{
    lr_seq *q = r->info.seq;
    lr_batch_seq *s = &e->batch[b->n_seqs];
    int from = lr_request__need_from(r), pos = q->kv.computed, n = r->granted + lr_spec__behind(r);
    int first = b->n_rows;
    *s = (lr_batch_seq){.row = b->n_rows, .n = n, .pos = pos, .lora = lr_adapter_lora(q->lora)};
    for (int g = 0; g < e->model->n_groups; g++) s->table[g] = q->kv.block[g];
    memcpy(e->rows + b->n_rows, q->tokens + pos, (size_t)n * sizeof *e->rows); /* drafts lie behind the tokens */
    r->out = b->n_out;
    r->n_out = 0;
    if (r->info.kind == LR_REQ_LOGITS || (r->spec && r->spec->hidden)) b->hidden = e->hidden;
    if (r->spec && lr_spec__features(r)) b->features = lr_spec__features(r);
    for (int i = 0; i < n; i++) {
        if (pos + i < from) continue;
        e->out_rows[b->n_out++] = b->n_rows + i;
        r->n_out++;
    }
    e->batch_req[b->n_seqs++] = r;
    b->n_rows += n;
    if (lr_spec__n(r) == lr_spec__behind(r)) return;
    lr_spec__add_branches(e, b, r, first);
    r->n_out = b->n_out - r->out;
}

static void make_batch(lr_engine *e, lr_batch *b)
{
    *b = (lr_batch){.tokens = e->rows, .seqs = e->batch, .out_rows = e->out_rows, .logits = e->logits, .told = e->told};
    if (e->model->peaks) b->peaks = e->peaks;
    const req_list *lists[] = {&e->running, &e->started};
    for (int l = 0; l < 2; l++) {
        for (int i = 0; i < lists[l]->n; i++) {
            lr_request *r = lists[l]->at[i];
            /* one that was preempted and started again would be in both lists: it is barred from that */
            if (r->info.state == LR_REQ_RUNNING && r->granted > 0) add_to_batch(e, b, r);
        }
    }
}

/* ---- results ---- */

static void take_result(lr_engine *e, lr_request *r)
{
    lr_seq *q = r->info.seq;
    int n = r->granted;
    r->granted = 0;
    r->info.n_computed += n + lr_spec__n(r);
    e->metrics.computed_tokens += (uint64_t)(n + lr_spec__n(r));
    if (r->n_out == 0) {
        lr_kv_table_advance(e->kv, &q->kv, q->tokens, n);
    } else {
        lr_request__take_logits(r, n);
        r->drawn = NULL;
    }
    if (lr_engine__active(r)) lr_request__update_pending(r);
}

static void take_results(lr_engine *e, const lr_batch *b)
{
    lr_engine__take_draws(e, b);
    if (lr_engine__goes_on(e, b)) {
        for (int i = 0; i < b->n_seqs; i++) /* what comes behind their tokens, the constraint says */
            if (e->batch_req[i]->force) take_result(e, e->batch_req[i]);
        lr_engine__launch_ahead(e, b);
    }
    lr_engine__draw_ahead(e, b);
    for (int i = 0; i < b->n_seqs; i++)
        if (e->batch_req[i] && e->batch_req[i]->granted > 0)
            take_result(e, e->batch_req[i]); /* else: a branch; taken */
}

/* Runs the batch, or takes what was launched for it before; where the device computes by itself, masks are made
 * meanwhile. */
static int forward(lr_engine *e, lr_batch *b, bool *landed, lr_error *err)
{
    const lr_model_ops *ops = e->model->ops;
    lr_batch run = *b;
    int rc = 0;
    *landed = lr_engine__landed(e, &run);
    if (e->model->halves && !*landed) rc = ops->launch(e->model, &run, err);
    if (rc) return rc;
    lr_engine__ask_draws(e, &run);
    b->draws = run.draws;
    return e->model->halves ? ops->finish(e->model, &run, err) : ops->forward(e->model, &run, err);
}

static void fail_batch(lr_engine *e, const lr_batch *b, lr_error *err)
{
    lr_fail_prefix(err, "forward pass");
    for (int i = 0; i < b->n_seqs; i++)
        if (e->batch_req[i]) lr_request__fail(e->batch_req[i], err);
}

/* ---- the end of a step ---- */

/* Brings the lists up to date. */
static void settle(lr_engine *e)
{
    int n = 0;
    for (int i = 0; i < e->waiting.n; i++) {
        lr_request *r = e->waiting.at[i];
        if (r->info.state == LR_REQ_WAITING) e->waiting.at[n++] = r;
    }
    e->waiting.n = n;
    n = 0;
    for (int i = 0; i < e->running.n; i++) {
        lr_request *r = e->running.at[i];
        if (r->info.state == LR_REQ_RUNNING) {
            e->running.at[n++] = r;
        } else if (r->info.state == LR_REQ_WAITING) {
            lr_engine__list_insert(&e->waiting, r); /* room was made at its submission */
            lr_seq__rest(r->info.seq);
        }
    }
    e->running.n = n;
    for (int i = 0; i < e->started.n; i++) {
        lr_request *r = e->started.at[i];
        if (r->info.state == LR_REQ_RUNNING) lr_engine__list_insert(&e->running, r);
    }
    e->started.n = 0;
}

void lr_engine__deferred(lr_engine *e)
{
    bool was = e->in_step;
    e->in_step = true; /* what hooks ask for in here is put off as well */
    settle(e);
    while (e->n_deferred > 0) {
        e->n_deferred = 0;
        for (lr_request *r = e->requests; r; r = r->next) {
            if (r->want_cancel && lr_engine__active(r)) lr_request__end(r, LR_REQ_CANCELLED, LR_FINISH_CANCELLED);
        }
        settle(e);
        for (lr_request *r = e->requests, *next; r; r = next) {
            next = r->next;
            if (r->want_free && !lr_engine__active(r)) lr_request__free_now(r);
        }
        for (lr_seq *q = e->seqs, *next; q; q = next) {
            next = q->next;
            if (q->dead && !q->req) lr_seq__free_now(q);
        }
    }
    e->in_step = was;
}

void lr_engine__account(lr_engine *e, double t0, double t1, int rows)
{
    for (int i = 0; i < e->running.n; i++) {
        lr_req_info *r = &e->running.at[i]->info;
        r->block_seconds += lr_kv_table_held(&r->seq->kv, 0) * (t1 - t0);
    }
    if (e->policy.name) lr_hist__add_T(&e->metrics.hook, e->hook_time);
    e->hook_time = 0;
    if (rows == 0) return;
    lr_kv_stats kv;
    lr_kv_get_stats(e->kv, 0, &kv);
    e->busy += t1 - t0;
    e->block_seconds += kv.used * (t1 - t0);
    if (kv.used > e->block_peak) e->block_peak = kv.used;
    e->metrics.steps++;
    lr_hist__add_T(&e->metrics.step, t1 - t0);
    lr_hist__add_B(&e->metrics.batch, rows);
}

static void trace_step(lr_engine *e, const lr_batch *b, double t0, double tf, double t1, double t2)
{
    char args[200];
    lr_kv_stats kv;
    if (!e->trace) return;
    lr_kv_get_stats(e->kv, 0, &kv);
    snprintf(args, sizeof args, "\"rows\":%d,\"sequences\":%d,\"logits\":%d,\"hook_us\":%.1f", b->n_rows, b->n_seqs,
             b->n_out, e->hook_time * 1e6);
    lr_trace_span(e->trace, LR_TRACE_ENGINE, LR_TRACE_STEPS, "step", t0, t2, args);
    lr_trace_span(e->trace, LR_TRACE_ENGINE, LR_TRACE_STEPS, "schedule", t0, tf, NULL);
    if (b->n_rows) {
        lr_trace_span(e->trace, LR_TRACE_ENGINE, LR_TRACE_STEPS, "forward", tf, t1, NULL);
        lr_trace_span(e->trace, LR_TRACE_ENGINE, LR_TRACE_STEPS, "results", t1, t2, NULL);
    }
    snprintf(args, sizeof args, "\"used\":%d,\"cached\":%d", kv.used, kv.cached);
    lr_trace_counter(e->trace, "KV blocks", t2, args);
    snprintf(args, sizeof args, "\"running\":%d,\"waiting\":%d", e->running.n, e->waiting.n);
    lr_trace_counter(e->trace, "requests", t2, args);
}

void lr_engine_last_load(const lr_engine *e, lr_step_load *l)
{
    *l = (lr_step_load){.seqs = e->n_batch, .outs = e->n_outs};
    for (int i = 0; i < e->n_batch; i++) {
        int64_t n = e->batch[i].n, before = e->batch[i].pos;
        l->rows += (int)n;
        if (n == 1) {
            l->context += before + 1;
        } else {
            l->pairs += n * before + n * (n + 1) / 2;
        }
    }
}

int lr_engine_step(lr_engine *e, lr_error *err)
{
    lr_batch b;
    lr_error why;
    int rc = lr_engine__not_in_step(e, err);
    if (rc) return rc;
    if (e->n_requests == 0) return 0;
    double t0 = lr_engine__now(e), tf, t1, t2;
    e->in_step = true;
    e->generation++;
    lr_kv_set_time(e->kv, t0);
    lr_step__begin(e);
    lr_step__schedule(e);
    lr_spec__plan(e);
    tf = t1 = lr_engine__now(e);
    make_batch(e, &b);
    e->n_batch = b.n_seqs;
    e->n_outs = b.n_out;
    if (b.n_rows > 0) {
        bool landed;
        rc = forward(e, &b, &landed, &why);
        t1 = lr_engine__now(e);
        lr_kv_set_time(e->kv, t1);
        if (!landed) lr_spec__saw_forward(e, &b, t1 - tf);
        if (!landed) lr_pace_saw_step(&e->pace, b.n_rows, t1 - tf);
        if (rc) {
            fail_batch(e, &b, &why);
        } else {
            if (b.features) lr_spec__feed(e, &b);
            take_results(e, &b);
        }
        lr_spec__settle(e, lr_engine__now(e) - t1);
    }
    lr_spec__release(e);
    lr_engine__deferred(e);
    t2 = lr_engine__now(e);
    trace_step(e, &b, t0, tf, t1, t2);
    lr_record__end_step(e, t0, t2, b.n_rows);
    lr_engine__account(e, t0, t2, b.n_rows);
    if (b.n_out > 0) lr_hist__add_T(&e->metrics.results, t2 - t1);
    e->in_step = false;
    return b.n_rows;
}
