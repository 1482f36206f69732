/* sched.c - one step being put together: what may run, and who gives way. See policy.h; the built-in rule is rule.c.
 *
 * Everything that a hook asks for ends in lr_step_run or lr_step_preempt, which check it against the budget, the slots,
 * the logit rows and the block pool. Each running request has one logit row set apart; scoring requests may take more
 * of what is left.
 */
#include "engine/engine_int.h"
#include "engine/record.h"
#include <limits.h>
#include <string.h>

int lr_step_n_waiting(const lr_step *s) { return s->e->waiting.n; }
int lr_step_n_running(const lr_step *s) { return s->e->running.n; }
int lr_step_budget(const lr_step *s) { return s->budget; }
int lr_step_slots(const lr_step *s) { return s->e->cfg.max_seqs - s->n_running; }
int lr_step_block_size(const lr_step *s) { return s->e->cfg.block_size; }
int lr_step_n_active(const lr_step *s) { return s->n_running; }
double lr_step_now(const lr_step *s) { return lr_engine__now(s->e); }
lr_engine *lr_step_engine(const lr_step *s) { return s->e; }
const char *lr_step_refusal(const lr_step *s) { return s->refusal; }

lr_request *lr_step_waiting(const lr_step *s, int i)
{
    if (i < 0 || i >= s->e->waiting.n) return NULL;
    lr_request *r = s->e->waiting.at[i];
    return r->info.state == LR_REQ_WAITING && r->barred != s->e->generation ? r : NULL;
}

lr_request *lr_step_running(const lr_step *s, int i)
{
    if (i < 0 || i >= s->e->running.n) return NULL;
    lr_request *r = s->e->running.at[i];
    return r->info.state == LR_REQ_RUNNING ? r : NULL;
}

int lr_step_blocks(const lr_step *s, int g)
{
    return g >= 0 && g < s->e->model->n_groups ? lr_kv_available(s->e->kv, g) : 0;
}

int lr_step_granted(const lr_step *s, const lr_request *r) { return r->e == s->e ? r->granted : 0; }

void lr_step__begin(lr_engine *e)
{
    e->step = (lr_step){.e = e, .budget = e->cfg.max_batch_tokens, .n_running = e->running.n, .prompt_rows = -1};
    e->step.outs = e->max_out - e->running.n;
    for (int i = 0; i < e->running.n; i++) e->running.at[i]->granted = e->running.at[i]->n_out = 0;
    e->step.spare = e->exact ? INT_MAX : lr_engine__spare_rows(e);
    lr_record__begin_step(e);
}

/* ---- giving way ---- */

void lr_step__preempt(lr_step *s, lr_request *r, lr_preempt_how how)
{
    lr_engine *e = s->e;
    lr_seq *q = r->info.seq;
    s->budget += r->granted;
    s->n_granted -= r->granted;
    s->outs += 1 + (r->n_out > 1 ? r->n_out - 1 : 0);
    s->n_running--;
    r->granted = r->n_out = 0;
    r->barred = e->generation;
    bool swapped = how == LR_PREEMPT_SWAP && lr_seq__swap_out(q);
    lr_record__decide(e, r, swapped ? '~' : '!', 0);
    if (swapped) {
        e->metrics.preempt_swap++;
    } else {
        lr_kv_table_drop(e->kv, &q->kv);
        e->metrics.preempt_recompute++;
    }
    r->info.state = LR_REQ_WAITING;
    r->info.n_preempted++;
    r->t_wait = lr_engine__now(e);
    lr_request__update_pending(r);
    if (e->trace) lr_trace_instant(e->trace, LR_TRACE_REQUESTS, r->info.id, "preempted", r->t_wait, NULL);
    lr_request__event(r, LR_EV_PREEMPT);
}

int lr_step_preempt(lr_step *s, lr_request *r, lr_preempt_how how)
{
    if (r->e != s->e || r->info.state != LR_REQ_RUNNING) {
        s->e->metrics.policy_refused++;
        s->refusal = "not running";
        return LR_ESTATE;
    }
    lr_step__preempt(s, r, how);
    return 0;
}

/* The youngest running request; NULL if there is none. */
static lr_request *youngest(const lr_engine *e)
{
    lr_request *y = NULL;
    const req_list *lists[] = {&e->running, &e->started};
    for (int l = 0; l < 2; l++) {
        for (int i = 0; i < lists[l]->n; i++) {
            lr_request *r = lists[l]->at[i];
            if (r->info.state == LR_REQ_RUNNING && (!y || r->info.id > y->info.id)) y = r;
        }
    }
    return y;
}

int lr_step_default_preempt(lr_step *s, lr_request *r)
{
    lr_request *victim = youngest(s->e);
    if (!victim) return LR_ESTATE;
    lr_step__preempt(s, victim, s->e->cfg.preempt);
    return 0;
}

/* Somebody gives blocks back for r, which may be r itself. False if nobody can. */
static bool make_way(lr_step *s, lr_request *r, int group, int missing)
{
    lr_engine *e = s->e;
    int before = s->n_running;
    if (before <= 1) return false; /* r alone */
    if (e->policy.preempt) {
        double t = lr_engine__hook_begin(e);
        s->giving_way = true; /* r is in the middle of getting blocks: nothing may be granted meanwhile */
        int rc = e->policy.preempt(e->policy.user, s, r, group, missing);
        s->giving_way = false;
        lr_engine__hook_end(e, "preempt", t);
        if (rc < 0) e->metrics.policy_failed++;
        if (s->n_running < before) return true;
    }
    return lr_step_default_preempt(s, r) == 0;
}

/* ---- running ---- */

static int refuse(lr_step *s, const char *why)
{
    if (s->e->policy.schedule) s->e->metrics.policy_refused++;
    s->refusal = why;
    return 0;
}

/* Brings back from host memory what the index does not hold as well. */
static bool swap_in(lr_engine *e, lr_seq *q)
{
    int known = lr_kv_space_peek(e->kv, q->kv.space, q->tokens, q->swap_computed, NULL);
    if (known + e->cfg.block_size > q->swap_computed) {
        lr_seq__swap_drop(q);
        return true;
    }
    lr_kv_table_drop(e->kv, &q->kv);
    while (!lr_kv_table_write(e->kv, &q->kv, q->swap_computed, q->swap_first, q->swap)) {
        if (lr_engine__park_one(e)) continue;
        if (e->step.n_running > 0) return false;
        break; /* alone it must be able to run: compute again */
    }
    if (q->kv.computed) {
        lr_kv_table_advance(e->kv, &q->kv, q->tokens, 0);
        e->metrics.swap_in++;
    }
    lr_seq__swap_drop(q);
    return true;
}

/* Prepares a request that is about to run after waiting: its KV as far as it is known. */
static bool prepare(lr_engine *e, lr_request *r)
{
    lr_seq *q = r->info.seq;
    int from = lr_request__need_from(r);
    lr_seq__wake(q);
    bool ok = !q->swap || swap_in(e, q);
    if (ok) {
        lr_kv_table_truncate(e->kv, &q->kv, from);
        lr_kv_table_match(e->kv, &q->kv, q->tokens, from);
    }
    lr_request__update_pending(r);
    return ok;
}

/* Rows at the end of the pending ones give logits: how many of the next n after those granted. */
static int outs_of(const lr_request *r, int n)
{
    int first = r->info.seq->kv.computed + r->granted, end = first + n;
    int from = lr_request__need_from(r); /* the first row whose logits are wanted */
    return end <= from ? 0 : end - (first > from ? first : from);
}

/* At most n rows such that the logit rows do. */
static int clip_outs(const lr_step *s, const lr_request *r, int n)
{
    if (r->info.kind != LR_REQ_SCORE) return n;
    int have = s->outs + (r->info.state == LR_REQ_RUNNING && r->n_out == 0), over = outs_of(r, n) - have;
    return over > 0 ? n - over : n;
}

/* Blocks for `granted` rows and at most n more; fewer if that is all that fits. 0 = not even one. */
static int get_blocks(lr_engine *e, lr_request *r, int n, int *group, int *missing)
{
    if (e->policy.evict) { /* it is to choose among the blocks of idle sequences as well */
        lr_kv_stats st;
        lr_kv_get_stats(e->kv, 0, &st);
        if ((r->granted + n) / e->cfg.block_size + 2 > st.free) {
            while (lr_engine__park_one(e)) {
            }
        }
    }
    for (; n > 0; n /= 2) {
        do {
            if (lr_kv_table_grow(e->kv, &r->info.seq->kv, r->granted + n, group, missing)) return n;
        } while (lr_engine__park_one(e));
    }
    return 0;
}

static void start(lr_step *s, lr_request *r)
{
    lr_engine *e = s->e;
    double now = lr_engine__now(e);
    lr_req_info *i = &r->info;
    i->state = LR_REQ_RUNNING;
    i->t_queued += now - r->t_wait;
    e->started.at[e->started.n++] = r;
    s->n_running++;
    s->outs--;
    lr_request__event(r, LR_EV_START);
    if (r->started) return;
    r->started = true;
    i->t_start = now;
    i->n_cached = i->seq->kv.computed < i->n_prompt ? i->seq->kv.computed : i->n_prompt;
    e->metrics.prompt_tokens += (uint64_t)i->n_prompt;
    e->metrics.prefix_queries += (uint64_t)i->n_prompt;
    e->metrics.prefix_hits += (uint64_t)i->n_cached;
}

static void grant(lr_step *s, lr_request *r, int n)
{
    int outs = outs_of(r, n), had = r->n_out;
    r->n_out += outs;
    if (r->n_out > 1) s->outs -= r->n_out - 1 - (had > 1 ? had - 1 : 0);
    r->granted += n;
    s->budget -= n;
    s->n_granted += n;
    lr_record__decide(s->e, r, ':', n);
}

/* At most n rows of a request whose tokens came without a choice: one, and what is to spare. */
static int clip_spare(lr_step *s, const lr_request *r, int n)
{
    if (s->spare == INT_MAX || !lr_request__in_backlog(r)) return n;
    int most = s->spare + (r->granted == 0);
    if (n > most) n = most;
    if (n > 0) s->spare -= n - (r->granted == 0);
    return n;
}

static bool may_run(lr_step *s, lr_request *r)
{
    lr_engine *e = s->e;
    if (r->e != e || !lr_engine__active(r)) return refuse(s, "not active");
    if (r->barred == e->generation) return refuse(s, "preempted in this step");
    if (r->want_cancel) return refuse(s, "being cancelled");
    if (s->budget <= 0) return refuse(s, "no rows left in this step");
    if (r->info.state == LR_REQ_WAITING &&
        (s->n_running >= e->cfg.max_seqs || s->outs < 1 || e->started.n >= e->started.cap)) {
        return refuse(s, "no place for another request");
    }
    return true;
}

/* Tokens, from the first on, that two sequences of at least n tokens share. */
static int same_tokens(const lr_seq *a, const lr_seq *b, int n)
{
    int i = 0;
    while (i < n && a->tokens[i] == b->tokens[i]) i++;
    return i;
}

/* Others compute the same prompt in this step: r would gain at least a block, and at least half of its n rows, by
 * leaving them to the others and taking the blocks up in the next step. */
static bool others_compute(const lr_engine *e, const lr_request *r, int n)
{
    const lr_seq *q = r->info.seq;
    int bs = e->cfg.block_size, least = n / 2 > bs ? n / 2 : bs, most = lr_request__need_from(r);
    const req_list *lists[] = {&e->running, &e->started};
    if (!e->cfg.prefix_cache || most - q->kv.computed < least) return false;
    for (int l = 0; l < 2; l++) {
        for (int i = 0; i < lists[l]->n; i++) {
            const lr_request *o = lists[l]->at[i];
            if (o == r || o->info.state != LR_REQ_RUNNING || o->granted == 0) continue;
            const lr_seq *p = o->info.seq;
            int from = p->kv.computed / bs, end = p->kv.computed + o->granted;
            if (end > most) end = most;
            if (p->kv.space != q->kv.space || p->kv.n_indexed != from || q->kv.n_indexed < from) continue;
            if (end / bs * bs - q->kv.computed < least) continue;
            if (same_tokens(p, q, end) / bs * bs - q->kv.computed >= least) return true;
        }
    }
    return false;
}

/* A request whose rows others compute: it has its place, and no rows in this step. */
static int join(lr_step *s, lr_request *r, int n)
{
    lr_record__decide(s->e, r, '+', n);
    if (r->info.state == LR_REQ_WAITING) start(s, r);
    r->joins = true;
    return 0;
}

/* Others may have computed the same prompt since r ran last. */
static void match_again(lr_engine *e, lr_request *r)
{
    int more = lr_kv_table_match(e->kv, &r->info.seq->kv, r->info.seq->tokens, lr_request__need_from(r));
    if (r->info.n_preempted == 0) {
        r->info.n_cached += more;
        e->metrics.prefix_hits += (uint64_t)more;
        if (r->joins) e->metrics.prefix_joined += (uint64_t)more;
    }
    lr_request__update_pending(r);
}

int lr_step_run(lr_step *s, lr_request *r, int n)
{
    lr_engine *e = s->e;
    s->refusal = NULL;
    if (s->giving_way) return refuse(s, "inside a preempt hook");
    if (!may_run(s, r)) return 0;
    bool waiting = r->info.state == LR_REQ_WAITING;
    int group = 0, missing = 0;
    if (waiting && !prepare(e, r)) {
        lr_record__decide(e, r, '-', n > 0 ? n : 0);
        lr_seq__rest(r->info.seq);
        return refuse(s, "no free blocks to bring it back");
    }
    if (!waiting && r->granted == 0 && r->info.n_pending > e->cfg.block_size) match_again(e, r);
    int want = r->info.n_pending - r->granted;
    if (want <= 0) return refuse(s, "nothing more to compute");
    if (n <= 0 || n > want) n = want;
    if (n > e->cfg.chunk - r->granted) n = e->cfg.chunk - r->granted;
    if (n > s->budget) n = s->budget;
    n = clip_spare(s, r, clip_outs(s, r, n));
    if (n > 0 && r->granted == 0 && others_compute(e, r, n)) return join(s, r, n);
    int got = n > 0 ? get_blocks(e, r, n, &group, &missing) : 0;
    while (n > 0 && got == 0 && !waiting && r->granted == 0) {
        if (!make_way(s, r, group, missing)) {
            lr_error err;
            lr_fail(&err, LR_EFULL, "the KV pool has no room for one more token (%d blocks are missing)", missing);
            s->n_running--;
            lr_request__fail(r, &err);
            return refuse(s, "the pool is too small for it");
        }
        if (r->info.state != LR_REQ_RUNNING) return refuse(s, "it had to give way itself");
        got = get_blocks(e, r, n, &group, &missing);
    }
    if (got > 0 && waiting) start(s, r);
    if (got > 0) grant(s, r, got);
    if (got == 0 && n > 0) lr_record__decide(e, r, '-', n);
    if (waiting && got == 0) lr_seq__rest(r->info.seq);
    if (got == 0) return refuse(s, n > 0 ? "no free blocks" : "its share of this step is used up");
    return got;
}

bool lr_step_fits(lr_step *s, lr_request *r)
{
    lr_engine *e = s->e;
    if (r->e != e || r->info.state != LR_REQ_WAITING) return false;
    lr_seq *q = r->info.seq;
    int end = lr_request__end_pos(r), rows = end - q->kv.computed, held = 0;
    bool fits = true;
    lr_request__look_up(r);
    if (rows > e->cfg.chunk) rows = e->cfg.chunk;
    lr_kv_space_peek(e->kv, q->kv.space, q->tokens, end, &held);
    lr_seq__wake(q); /* its own blocks are not to be parked */
    for (int g = 0; g < e->model->n_groups && fits; g++) {
        int own = lr_kv_table_held(&q->kv, g);
        int need = lr_kv_need(e->kv, g, end - rows, rows) + 1 - (g == 0 && held > own ? held : own);
        while (fits && need > lr_kv_available(e->kv, g)) fits = lr_engine__park_one(e);
    }
    lr_seq__rest(q);
    return fits;
}

/* Test hooks that preempt: as if the pool had run out. */
static void inject(lr_step *s)
{
    for (int i = 0; i < s->e->running.n; i++) {
        lr_request *r = lr_step_running(s, i);
        if (!r || r->fault_after > 0 || (r->fault != LR_FAULT_PREEMPT && r->fault != LR_FAULT_SWAP)) continue;
        lr_step__preempt(s, r, r->fault == LR_FAULT_SWAP ? LR_PREEMPT_SWAP : LR_PREEMPT_RECOMPUTE);
        r->fault = LR_FAULT_NONE;
    }
}

void lr_step__schedule(lr_engine *e)
{
    lr_step *s = &e->step;
    bool ask = e->policy.schedule && e->idle_steps < e->cfg.patience;
    inject(s);
    if (ask) {
        double t = lr_engine__hook_begin(e);
        int rc = e->policy.schedule(e->policy.user, s);
        lr_engine__hook_end(e, "schedule", t);
        if (rc >= 0) {
            if (s->n_granted == 0 && e->n_requests > 0) {
                e->idle_steps++;
                e->metrics.idle_steps++;
            } else {
                e->idle_steps = 0;
            }
            return;
        }
        e->metrics.policy_failed++;
    }
    e->idle_steps = 0;
    lr_step_default(s);
}
