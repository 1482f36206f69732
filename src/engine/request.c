/* request.c - requests: checks at submission, events, the end, what a caller may read. See engine.h. */
#include "engine/record.h"
#include "engine/speculate_int.h"
#include "base/mem.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STOP_IDS   65536
#define RESERVE_TOKENS 4096 /* results of so many tokens never allocate in a step */

lr_req_params lr_req_defaults(lr_req_kind kind)
{
    return (lr_req_params){.kind = kind, .max_tokens = -1, .n_top = -1, .score_from = 1, .deadline = INFINITY};
}

const char *lr_req_state_name(lr_req_state s)
{
    static const char *const names[] = {"waiting", "running", "done", "failed", "cancelled"};
    return (unsigned)s < 5 ? names[s] : "unknown";
}

const char *lr_finish_name(lr_finish f)
{
    static const char *const names[] = {"none", "stop", "length", "cancelled", "error"};
    return (unsigned)f < 5 ? names[f] : "unknown";
}

/* ---- what it needs ---- */

int lr_request__end_pos(const lr_request *r) { return r->info.seq->len - (r->info.kind == LR_REQ_SCORE); }

int lr_request__need_from(const lr_request *r)
{
    return r->info.kind == LR_REQ_SCORE ? r->next_score - 1 : r->info.seq->len - 1;
}

void lr_request__update_pending(lr_request *r)
{
    int from = r->info.seq->kv.computed, need = lr_request__need_from(r);
    if (r->info.seq->swap && r->info.seq->swap_computed > from) from = r->info.seq->swap_computed;
    r->info.n_pending = lr_request__end_pos(r) - (from < need ? from : need);
}

/* ---- submission ---- */

static int check_params(const lr_engine *e, const lr_seq *s, const lr_req_params *p, lr_error *err)
{
    if (s->e != e) return lr_fail(err, LR_EINVAL, "the sequence belongs to another engine");
    if (s->req) return lr_fail(err, LR_ESTATE, "a request is active on the sequence");
    if ((unsigned)p->kind > LR_REQ_SCORE) return lr_fail(err, LR_EINVAL, "kind %d is none of a request", (int)p->kind);
    if (s->len == 0) return lr_fail(err, LR_EINVAL, "the sequence is empty");
    if (e->model->tells && (p->kind != LR_REQ_GENERATE || p->n_top >= 0 || p->n_stop || p->constraint || p->spec))
        return lr_fail(err, LR_EUNSUPPORTED, "a simulated model has no text and no logits: it only generates tokens");
    if (p->n_top < -1 || p->n_top > 64)
        return lr_fail(err, LR_EINVAL, "%d log-probabilities, at most 64 are given", p->n_top);
    if (p->max_tokens < -1) return lr_fail(err, LR_EINVAL, "max_tokens is %d", p->max_tokens);
    if (p->n_stop_ids > MAX_STOP_IDS)
        return lr_fail(err, LR_ELIMIT, "%zu stop tokens, at most %d", p->n_stop_ids, MAX_STOP_IDS);
    if (p->kind == LR_REQ_SCORE && (p->score_from < 1 || p->score_from >= s->len)) {
        return lr_fail(err, LR_EINVAL, "cannot score from position %d of %d tokens", p->score_from, s->len);
    }
    if (p->kind == LR_REQ_SCORE && p->keep && (size_t)(s->len - p->score_from) > p->keep_rows)
        return lr_fail(err, LR_EINVAL, "room for %zu rows of logits, %d wanted", p->keep_rows, s->len - p->score_from);
    if (p->tenant.n >= sizeof((lr_req_info *)0)->tenant)
        return lr_fail(err, LR_EINVAL, "tenant name of %zu bytes, at most 63", p->tenant.n);
    if (isnan(p->deadline)) return lr_fail(err, LR_EINVAL, "the deadline is not a number");
    return 0;
}

/* Sets the longest length that the sequence may reach, or says why it can never fit. */
static int set_limit(const lr_engine *e, const lr_seq *s, const lr_req_params *p, lr_request *r, lr_error *err)
{
    int cap = lr_engine__capacity(e, s), context = e->cfg.context < cap ? e->cfg.context : cap;
    int need = s->len + (p->kind == LR_REQ_GENERATE && p->max_tokens != 0);
    if (need > context) {
        const char *what = p->kind == LR_REQ_GENERATE ? " and at least one to generate" : "";
        if (context == e->cfg.context) {
            return lr_fail(err, LR_EFULL, "%d tokens%s do not fit into the context of %d", s->len, what, context);
        }
        return lr_fail(err, LR_EFULL,
                       "%d tokens%s do not fit into the %d that the KV pool holds (%d blocks of %d, %d pinned)", s->len,
                       what, context, e->cfg.kv_blocks[0], e->cfg.block_size, e->pinned[0]);
    }
    r->limit = s->len;
    if (p->kind == LR_REQ_GENERATE) {
        int room = context - s->len;
        r->info.max_tokens = p->max_tokens >= 0 && p->max_tokens < room ? p->max_tokens : room;
        r->limit = s->len + r->info.max_tokens;
    }
    return 0;
}

static int grow_recs(lr_request *r, size_t cap, lr_error *err)
{
    lr_token_rec *recs = lr_reallocarray(r->recs, cap, sizeof *recs);
    if (recs) r->recs = recs;
    bool ok = recs != NULL;
    if (ok && r->n_top > 0) {
        size_t n;
        lr_top *tops = lr_mul(cap, (size_t)r->n_top, &n) ? lr_reallocarray(r->tops, n, sizeof *tops) : NULL;
        if (tops) r->tops = tops;
        ok = tops != NULL;
    }
    if (!ok) return lr_fail(err, LR_ENOMEM, "no memory for the results of %zu tokens", cap);
    r->recs_cap = cap;
    return 0;
}

int lr_request__more_recs(lr_request *r, lr_error *err)
{
    return r->n_recs < r->recs_cap ? 0 : grow_recs(r, r->recs_cap * 2, err);
}

int lr_request__more_text(lr_request *r, size_t n, lr_error *err)
{
    size_t need, cap = r->text_cap * 2;
    if (!lr_add(r->text_n, n, &need)) return lr_fail(err, LR_ENOMEM, "text too long");
    if (need <= r->text_cap) return 0;
    char *p = lr_realloc(r->text, cap > need ? cap : need);
    if (!p) return lr_fail(err, LR_ENOMEM, "no memory for %zu bytes of text", need);
    r->text = p;
    r->text_cap = cap > need ? cap : need;
    return 0;
}

/* Memory for results, so that the steps of an ordinary request allocate nothing. */
static int reserve_results(lr_request *r, lr_seq *s, lr_error *err)
{
    int n = r->info.kind == LR_REQ_GENERATE ? r->info.max_tokens
            : r->info.kind == LR_REQ_SCORE  ? s->len - r->next_score
                                            : 0;
    int some = n < RESERVE_TOKENS ? n : RESERVE_TOKENS;
    int rc = lr_seq__reserve(s, s->len + (r->info.kind == LR_REQ_GENERATE ? some : 0), err);
    if (r->e->model->tells) return rc;
    if (!rc) rc = grow_recs(r, (size_t)some + 1, err);
    if (!rc && r->info.kind == LR_REQ_GENERATE) {
        rc = lr_request__more_text(
            r, 8 * (size_t)some + 64 + lr_stopset_max_held(r->stops) + 3 * lr_vocab_max_piece(r->e->model->vocab), err);
    }
    return rc;
}

static int make_sampler(lr_request *r, const lr_req_params *p, lr_error *err)
{
    if (p->kind != LR_REQ_GENERATE || p->sampler || r->e->model->tells) return 0;
    lr_stage greedy = {.kind = LR_STAGE_TEMPERATURE, .a = 0};
    return lr_sampler_new(&r->sampler, &greedy, 1, 0, r->e->model->n_vocab, err);
}

int lr_request__cmp_ids(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static int fill(lr_request *r, lr_seq *s, const lr_req_params *p, lr_error *err)
{
    lr_req_info *i = &r->info;
    i->kind = p->kind;
    i->priority = p->priority;
    i->deadline = p->deadline;
    if (p->tenant.n) memcpy(i->tenant, p->tenant.s, p->tenant.n);
    i->tag = p->tag;
    i->user = p->user;
    i->seq = s;
    i->n_prompt = s->len;
    i->stop_token = i->stop_string = -1;
    r->ignore_eos = p->ignore_eos;
    r->free_seq = p->free_seq;
    r->n_top = p->kind == LR_REQ_LOGITS ? -1 : p->n_top;
    r->next_score = p->score_from;
    r->keep = p->keep;
    int rc = set_limit(r->e, s, p, r, err);
    if (!rc) rc = make_sampler(r, p, err);
    if (!rc && p->n_stop) rc = lr_stopset_new(&r->stops, p->stop, p->n_stop, err);
    if (!rc) rc = reserve_results(r, s, err);
    if (rc) return rc;
    if (p->n_stop_ids) {
        r->stop_ids = lr_reallocarray(NULL, p->n_stop_ids, sizeof *r->stop_ids);
        if (!r->stop_ids) return lr_fail(err, LR_ENOMEM, "no memory for %zu stop tokens", p->n_stop_ids);
        memcpy(r->stop_ids, p->stop_ids, p->n_stop_ids * sizeof *p->stop_ids);
        qsort(r->stop_ids, p->n_stop_ids, sizeof *r->stop_ids, lr_request__cmp_ids);
        r->n_stop_ids = p->n_stop_ids;
    }
    lr_stop_init(&r->stop, r->stops);
    lr_detok_init(&r->detok, r->e->model->vocab, p->special);
    lr_detok_prime(&r->detok, s->tokens, (size_t)s->len);
    return 0;
}

/* Frees everything; the sampler and constraint only if they are the request's. */
static void destroy(lr_request *r)
{
    lr_spec__free(r);
    if (r->con.free) r->con.free(r->con.user);
    lr_sampler_free(r->sampler);
    lr_stopset_unref(r->stops);
    lr_free(r->stop_ids);
    lr_free(r->text);
    lr_free(r->recs);
    lr_free(r->tops);
    lr_free(r);
}

static int ask_policy(lr_engine *e, lr_request *r, lr_error *err)
{
    if (!e->policy.admit) return 0;
    lr_error why = {0};
    e->in_step = true; /* the same rules hold inside this hook */
    double t = lr_engine__hook_begin(e);
    int rc = e->policy.admit(e->policy.user, r, &why);
    lr_engine__hook_end(e, "admit", t);
    e->in_step = false;
    r->want_free = false; /* there is no handle yet */
    if (r->info.seq->dead) return lr_fail(err, LR_ESTATE, "the policy freed the sequence");
    if (rc < 0) e->metrics.policy_failed++;
    if (rc <= 0) return 0;
    return lr_fail(err, why.code ? why.code : LR_EFULL, "%s", why.code ? why.text : "refused by the policy");
}

static void enqueue(lr_engine *e, lr_request *r)
{
    r->info.seq->req = r;
    r->info.state = LR_REQ_WAITING;
    lr_engine__list_insert(&e->waiting, r);
    e->n_requests++;
    lr_request__update_pending(r);
    if (r->info.kind == LR_REQ_GENERATE && r->info.max_tokens == 0) lr_request__end(r, LR_REQ_DONE, LR_FINISH_LENGTH);
}

int lr_request_new(lr_engine *e, lr_seq *s, const lr_req_params *p, lr_request **out, lr_error *err)
{
    int rc = lr_engine__not_in_step(e, err);
    if (!rc) rc = check_params(e, s, p, err);
    if (rc) return rc;
    lr_request *r = lr_calloc(1, sizeof *r);
    if (!r) return lr_fail(err, LR_ENOMEM, "no memory for a request");
    r->e = e;
    if (e->waiting.n >= e->cfg.max_waiting) {
        rc = lr_fail(err, LR_EFULL, "%d requests are waiting, that is the most", e->waiting.n);
    } else if (lr_engine__list_reserve(&e->waiting, e->n_requests + 1)) {
        rc = lr_fail(err, LR_ENOMEM, "no memory for a queue of %d requests", e->n_requests + 1);
    }
    if (!rc) rc = fill(r, s, p, err);
    if (!rc && p->spec && p->kind == LR_REQ_GENERATE) rc = lr_spec__begin(r, p->spec, err);
    if (rc) goto fail;
    r->info.id = e->next_req + 1;
    r->info.t_arrival = r->t_wait = lr_engine__now(e);
    lr_request__update_pending(r);
    rc = ask_policy(e, r, err);
    if (rc) goto fail;
    e->next_req++;
    if (p->sampler && p->kind == LR_REQ_GENERATE) r->sampler = p->sampler;
    if (p->constraint && p->kind == LR_REQ_GENERATE) r->con = *p->constraint;
    bool force = p->kind == LR_REQ_GENERATE && r->sampler && lr_sampler_takes_any(r->sampler);
    r->force = force && r->con.forced && r->n_top < 0; /* who wants log-probabilities needs each row */
    if (r->con.start) r->con.start(r->con.user, r->detok.strip, force);
    if (r->spec) r->spec->p.user = p->spec->user;
    if (r->spec) r->spec->p.free = p->spec->free;
    r->next = e->requests;
    if (e->requests) e->requests->prev = r;
    e->requests = r;
    enqueue(e, r);
    *out = r;
    return 0;
fail:
    e->metrics.refused++;
    destroy(r);
    return rc;
}

/* ---- events ---- */

void lr_request__event(lr_request *r, unsigned what)
{
    lr_engine *e = r->e;
    r->events |= what;
    if (r->queued || r->want_free) return;
    r->queued = true;
    r->ev_next = NULL;
    r->ev_prev = e->ev_last;
    *(e->ev_last ? &e->ev_last->ev_next : &e->ev_first) = r;
    e->ev_last = r;
}

static void unqueue(lr_request *r)
{
    lr_engine *e = r->e;
    if (!r->queued) return;
    *(r->ev_prev ? &r->ev_prev->ev_next : &e->ev_first) = r->ev_next;
    *(r->ev_next ? &r->ev_next->ev_prev : &e->ev_last) = r->ev_prev;
    r->queued = false;
}

lr_request *lr_engine_next_event(lr_engine *e, unsigned *what)
{
    lr_request *r = e->ev_first;
    if (!r) return NULL;
    unqueue(r);
    *what = r->events;
    r->events = 0;
    return r;
}

/* ---- the end ---- */

static void count_end(lr_engine *e, lr_request *r)
{
    lr_req_info *i = &r->info;
    lr_metrics *m = &e->metrics;
    m->finished[i->finish]++;
    lr_hist__add_L(&m->e2e, i->t_end - i->t_arrival);
    lr_hist__add_L(&m->queue, i->t_queued);
    lr_hist__add_N(&m->prompt, i->n_prompt);
    if (i->kind != LR_REQ_GENERATE) return;
    lr_hist__add_N(&m->generated, i->n_generated);
    if (i->n_generated > 1) lr_hist__add_T(&m->tpot, (i->t_last - i->t_first) / (i->n_generated - 1));
}

static void trace_end(lr_engine *e, const lr_request *r)
{
    char args[160];
    const lr_req_info *i = &r->info;
    if (!e->trace) return;
    snprintf(args, sizeof args,
             "\"finish\":\"%s\",\"prompt\":%d,\"cached\":%d,\"computed\":%d,\"generated\":%d,\"preempted\":%d",
             lr_finish_name(i->finish), i->n_prompt, i->n_cached, i->n_computed, i->n_generated, i->n_preempted);
    lr_trace_span(e->trace, LR_TRACE_REQUESTS, i->id, lr_req_state_name(i->state), i->t_arrival, i->t_end, args);
}

static void release_seq(lr_engine *e, lr_request *r)
{
    lr_seq *s = r->info.seq;
    s->req = NULL;
    lr_seq__swap_drop(s);
    if (!r->free_seq) {
        lr_kv_table_trim(e->kv, &s->kv);
        lr_seq__repin(s);
        lr_seq__rest(s);
        return;
    }
    r->info.seq = NULL;
    if (e->in_step) {
        s->dead = true;
        e->n_deferred++;
    } else {
        lr_seq__free_now(s);
    }
}

void lr_request__end(lr_request *r, lr_req_state state, lr_finish how)
{
    lr_engine *e = r->e;
    lr_req_info *i = &r->info;
    if (i->kind == LR_REQ_GENERATE && state != LR_REQ_FAILED) lr_request__flush_text(r);
    i->t_end = lr_engine__now(e);
    if (i->state == LR_REQ_WAITING) i->t_queued += i->t_end - r->t_wait;
    if (!e->in_step) lr_engine__list_remove(i->state == LR_REQ_WAITING ? &e->waiting : &e->running, r);
    i->state = state;
    i->finish = how;
    i->n_pending = 0;
    r->granted = 0;
    e->n_requests--;
    lr_kv_set_time(e->kv, i->t_end);
    lr_record__end(r);
    lr_spec__end(r);
    release_seq(e, r);
    count_end(e, r);
    trace_end(e, r);
    lr_request__event(r, LR_EV_DONE);
    if (e->policy.finish) {
        bool was = e->in_step;
        e->in_step = true;
        double t = lr_engine__hook_begin(e);
        e->policy.finish(e->policy.user, r);
        lr_engine__hook_end(e, "finish", t);
        e->in_step = was;
        if (!was) lr_engine__deferred(e);
    }
}

void lr_request__fail(lr_request *r, const lr_error *err)
{
    r->info.error = *err;
    lr_request__end(r, LR_REQ_FAILED, LR_FINISH_ERROR);
}

void lr_request_cancel(lr_request *r)
{
    if (!lr_engine__active(r) || r->want_cancel) return;
    if (r->e->in_step) {
        r->want_cancel = true;
        r->e->n_deferred++;
    } else {
        lr_request__end(r, LR_REQ_CANCELLED, LR_FINISH_CANCELLED);
    }
}

void lr_request__free_now(lr_request *r)
{
    lr_engine *e = r->e;
    r->want_free = true;
    if (lr_engine__active(r)) lr_request__end(r, LR_REQ_CANCELLED, LR_FINISH_CANCELLED);
    unqueue(r);
    *(r->prev ? &r->prev->next : &e->requests) = r->next;
    if (r->next) r->next->prev = r->prev;
    destroy(r);
}

void lr_request_free(lr_request *r)
{
    if (!r || r->want_free) return;
    if (r->e->in_step) {
        lr_request_cancel(r);
        r->want_free = true;
        r->e->n_deferred++;
    } else {
        lr_request__free_now(r);
    }
}

/* ---- reading ---- */

const lr_req_info *lr_request_info(const lr_request *r) { return &r->info; }
lr_engine *lr_request_engine(const lr_request *r) { return r->e; }
bool lr_request_active(const lr_request *r) { return lr_engine__active(r); }
void lr_request_set_priority(lr_request *r, int priority) { r->info.priority = priority; }

void lr_request_set_deadline(lr_request *r, double deadline)
{
    if (!isnan(deadline)) r->info.deadline = deadline;
}

void lr_request_set_policy_data(lr_request *r, void *data) { r->policy_data = data; }
void *lr_request_policy_data(const lr_request *r) { return r->policy_data; }

double lr_request_queue_time(const lr_request *r)
{
    double t = r->info.t_queued;
    return r->info.state == LR_REQ_WAITING ? t + lr_engine__now(r->e) - r->t_wait : t;
}

int lr_request_blocks(const lr_request *r, int g) { return r->info.seq ? lr_seq_blocks(r->info.seq, g) : 0; }

const char *lr_request_text(const lr_request *r, size_t *n)
{
    *n = r->text_n;
    return r->text ? r->text : "";
}

const lr_token_rec *lr_request_tokens(const lr_request *r, size_t *n)
{
    *n = r->n_recs;
    return r->recs;
}

const lr_top *lr_request_top(const lr_request *r, size_t i, int *n)
{
    *n = 0;
    if (i >= r->n_recs || r->n_top <= 0) return NULL;
    *n = r->n_top < r->e->model->n_vocab ? r->n_top : r->e->model->n_vocab;
    return r->tops + i * (size_t)r->n_top;
}

float *lr_request_logits(lr_request *r, uint64_t *generation)
{
    if (generation) *generation = r->logits_generation;
    return r->logits && r->logits_generation == r->e->generation ? r->logits : NULL;
}

const float *lr_request_hidden(const lr_request *r, int *n)
{
    const lr_engine *e = r->e;
    *n = e->model->n_embd;
    if (!e->hidden || !r->logits || r->logits_generation != e->generation) return NULL;
    return e->hidden + (size_t)(r->logits - e->logits) / (size_t)e->model->n_vocab * (size_t)*n;
}

void lr_request_inject(lr_request *r, lr_fault fault, int after)
{
    r->fault = fault;
    r->fault_after = after < 0 ? 0 : after;
}
