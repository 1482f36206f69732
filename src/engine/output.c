/* output.c - what becomes of a row of logits: a drawn token with its text, a view, or log-probabilities. See engine.h.
 */
#include "engine/record.h"
#include "engine/speculate_int.h"
#include "sample/row.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- text ---- */

/* Puts n bytes through the stop matcher into the request's text. */
static int put_text(lr_request *r, const char *s, size_t n, lr_error *err)
{
    int rc = lr_request__more_text(r, lr_stop_held(&r->stop) + n, err);
    if (rc) return rc;
    size_t out = lr_stop_push(&r->stop, s, n, r->text + r->text_n, r->text_cap - r->text_n);
    r->text_n += out;
    if (out) lr_request__event(r, LR_EV_TEXT);
    return 0;
}

void lr_request__flush_text(lr_request *r)
{
    char tail[8];
    lr_error err;
    if (r->stop.hit >= 0) return;
    size_t n = lr_detok_flush(&r->detok, tail, sizeof tail);
    if (put_text(r, tail, n, &err) || r->stop.hit >= 0) return;
    if (lr_request__more_text(r, lr_stop_held(&r->stop), &err)) return;
    n = lr_stop_flush(&r->stop, r->text + r->text_n, r->text_cap - r->text_n);
    r->text_n += n;
    if (n) lr_request__event(r, LR_EV_TEXT);
}

/* ---- log-probabilities ---- */

enum { MAX_TOP = 64 }; /* lr_request_new allows no more */

/* Log-probability of id and the n_top best. False if the row holds NaN, +inf or nothing finite. */
static bool row_logprob(const float *x, int n_vocab, int32_t id, int n_top, float *logprob, lr_top *top)
{
    int32_t ids[MAX_TOP];
    float values[MAX_TOP];
    unsigned nan = 0;
    for (int i = 0; i < n_vocab; i++) nan |= x[i] != x[i];
    float lse = lr_row_logsumexp(x, n_vocab);
    if (nan || !isfinite(lse)) return false;
    *logprob = x[id] - lse;
    if (n_top <= 0) return true;
    int n = lr_row_topk(x, n_vocab, n_top < n_vocab ? n_top : n_vocab, ids, values);
    for (int i = 0; i < n; i++) top[i] = (lr_top){ids[i], values[i] - lse};
    return true;
}

/* ---- tokens ---- */

static int add_rec(lr_request *r, int32_t id, float logprob, lr_error *err)
{
    size_t n;
    int rc = lr_request__more_recs(r, err);
    if (rc) return rc;
    lr_vocab_piece(r->e->model->vocab, id, &n);
    r->recs[r->n_recs++] = (lr_token_rec){.id = id, .logprob = logprob, .raw_at = r->raw_n, .raw_n = (uint32_t)n};
    r->raw_n += (uint32_t)n;
    lr_request__event(r, LR_EV_TOKEN);
    return 0;
}

bool lr_request__is_end(const lr_request *r, int32_t id)
{
    if (r->n_stop_ids && bsearch(&id, r->stop_ids, r->n_stop_ids, sizeof id, lr_request__cmp_ids)) return true;
    return !r->ignore_eos && lr_vocab_is_eog(r->e->model->vocab, id);
}

void lr_request__stamp(lr_request *r)
{
    lr_engine *e = r->e;
    double now = lr_engine__now(e);
    lr_req_info *i = &r->info;
    if (i->n_generated++ == 0) {
        i->t_first = now;
        lr_hist__add_T(&e->metrics.ttft, now - i->t_arrival);
    } else {
        lr_hist__add_T(&e->metrics.itl, now - i->t_last);
    }
    i->t_last = now;
    e->metrics.generation_tokens++;
}

/* Appends a drawn token to the sequence and the text. */
static int append(lr_request *r, int32_t id, float logprob, lr_error *err)
{
    lr_seq *q = r->info.seq;
    int rc = lr_seq__reserve(q, q->len + 1, err);
    if (!rc && r->e->model->tells) { /* nobody reads its text */
        q->tokens[q->len++] = id;
        return 0;
    }
    if (!rc) rc = add_rec(r, id, logprob, err);
    if (rc) return rc;
    q->tokens[q->len++] = id;
    size_t n = lr_detok_push(&r->detok, id, r->e->scratch, LR_DETOK_CAP);
    return put_text(r, r->e->scratch, n, err);
}

lr_sample_ctx lr_request__sample_ctx(const lr_request *r)
{
    const lr_seq *q = r->info.seq;
    size_t n_prompt = (size_t)r->info.n_prompt;
    return (lr_sample_ctx){.prompt = q->tokens,
                           .n_prompt = n_prompt,
                           .generated = q->tokens + n_prompt,
                           .n_generated = (size_t)q->len - n_prompt,
                           .seed = lr_sampler_seed(r->sampler),
                           .position = (uint64_t)q->len};
}

const float *lr_request__peaks(const lr_request *r, int place)
{
    const lr_engine *e = r->e;
    if (!e->peaks || !e->model->peaks || r->fault != LR_FAULT_NONE) return NULL;
    return e->peaks + (size_t)(r->out + place) * (size_t)lr_row_pieces(e->model->n_vocab);
}

/* place: of the draft whose logits these are, 0 if there is none. */
static int draw(lr_request *r, int place, float *logits, int32_t *id, float *logprob, lr_error *err)
{
    if (r->e->told) {
        *id = r->e->told[r->out];
        *logprob = NAN;
        return 0;
    }
    lr_sample_ctx ctx = lr_request__sample_ctx(r);
    if (r->drawn) {
        lr_drawn *d = r->drawn;
        r->drawn = NULL;
        *id = d->id;
        *logprob = d->logprob;
        if (d->rc) *err = d->err;
        return d->rc;
    }
    int rc = lr_request__more_recs(r, err); /* the best of this token have their place behind those before */
    if (rc) return rc;
    lr_top *top = r->n_top > 0 ? r->tops + r->n_recs * (size_t)r->n_top : NULL;
    const uint32_t *mask = NULL;
    if (r->con.mask) rc = r->con.mask(r->con.user, &mask, err);
    if (rc < 0) return rc;
    *logprob = NAN;
    lr_sample_peaks(lr_request__peaks(r, place));
    return lr_spec__draw(r, place, logits, mask, &ctx, id, logprob, top, err);
}

lr_finish lr_request__after_token(lr_request *r, int32_t id, bool closed)
{
    lr_engine *e = r->e;
    lr_finish how = LR_FINISH_NONE;
    if (r->stop.hit >= 0) {
        r->info.stop_string = r->stop.hit;
        how = LR_FINISH_STOP;
    } else if (closed) {
        how = LR_FINISH_STOP;
    } else if (r->info.n_generated >= r->info.max_tokens) {
        how = LR_FINISH_LENGTH;
    }
    if (e->policy.token) {
        double t = lr_engine__hook_begin(e);
        int rc = e->policy.token(e->policy.user, r, id);
        lr_engine__hook_end(e, "token", t);
        if (rc < 0) e->metrics.policy_failed++;
        if (rc > 0 && how == LR_FINISH_NONE) how = LR_FINISH_STOP;
    }
    return how;
}

/* Takes a token that does not end the request by itself. *how: what else ends it now. */
static int take(lr_request *r, int32_t id, float logprob, lr_finish *how, lr_error *err)
{
    bool closed = false;
    if (r->con.accept) {
        int rc = r->con.accept(r->con.user, id, err);
        if (rc < 0) return rc;
        closed = rc > 0;
    }
    int rc = append(r, id, logprob, err);
    if (!rc) *how = lr_request__after_token(r, id, closed);
    return rc;
}

/* Takes the tokens that must come next: their rows are computed together with that of the last one. */
static int take_forced(lr_request *r, lr_finish *how, lr_error *err)
{
    int32_t id = -1;
    r->n_backlog = 0;
    while (*how == LR_FINISH_NONE && !r->want_cancel) {
        int rc = r->con.forced(r->con.user, &id, err);
        if (rc <= 0) return rc;
        lr_request__stamp(r);
        lr_record__token(r, id);
        r->info.n_forced++;
        r->n_backlog++;
        r->e->metrics.forced_tokens++;
        rc = take(r, id, NAN, how, err);
        if (rc) return rc;
    }
    return 0;
}

/* One token behind n more computed ones, and those that must come behind it. */
static int generate_one(lr_request *r, int place, float *logits, int n, lr_error *err)
{
    int32_t id = 0;
    float logprob;
    lr_finish how = LR_FINISH_NONE;
    lr_seq *q = r->info.seq;
    int rc = draw(r, place, logits, &id, &logprob, err);
    if (rc) return rc;
    lr_kv_table_advance(r->e->kv, &q->kv, q->tokens, n);
    lr_request__stamp(r);
    lr_record__token(r, id);
    if (lr_request__is_end(r, id)) {
        r->info.stop_token = id;
        lr_request__end(r, LR_REQ_DONE, LR_FINISH_STOP);
        return 0;
    }
    rc = take(r, id, logprob, &how, err);
    if (!rc && r->force) rc = take_forced(r, &how, err);
    if (rc) return rc;
    if (how != LR_FINISH_NONE) lr_request__end(r, LR_REQ_DONE, how);
    return 0;
}

/* The next token, and more as long as what comes is in the draft that was computed with it. */
static int generate(lr_request *r, float *logits, int n, lr_error *err)
{
    lr_seq *q = r->info.seq;
    bool drafts = lr_spec__n(r) > 0;
    int node = -1, rc;
    for (;;) {
        int len = q->len, next;
        lr_spec__enter(r, node);
        float *row = logits ? logits + (size_t)(node + 1) * (size_t)r->e->model->n_vocab : NULL;
        rc = generate_one(r, node + 1, row, n, err);
        if (!rc) lr_spec__drawn(r, node);
        if (!drafts || rc) break;
        for (n = 0; len < q->len && (next = lr_spec__child(r, node, q->tokens[len])) >= 0; len++, n++) node = next;
        if (len < q->len || n == 0 || !lr_engine__active(r) || r->want_cancel) break;
    }
    if (drafts && rc == 0) lr_spec__verified(r, node, lr_engine__active(r) && !r->want_cancel);
    if (drafts && lr_engine__active(r)) lr_kv_table_trim(r->e->kv, &q->kv);
    return rc;
}

static int score(lr_request *r, const float *logits, int n, lr_error *err)
{
    lr_seq *q = r->info.seq;
    int n_vocab = r->e->model->n_vocab;
    for (int i = 0; i < r->n_out; i++) {
        int rc = lr_request__more_recs(r, err);
        if (rc) return rc;
        float logprob;
        int32_t id = q->tokens[r->next_score];
        lr_top *top = r->n_top > 0 ? r->tops + r->n_recs * (size_t)r->n_top : NULL;
        if (!row_logprob(logits + (size_t)i * (size_t)n_vocab, n_vocab, id, r->n_top, &logprob, top)) {
            return lr_fail(err, LR_EINVAL, "logits at position %d are not finite", r->next_score - 1);
        }
        rc = add_rec(r, id, logprob, err);
        if (rc) return rc;
        if (r->keep) {
            memcpy(r->keep, logits + (size_t)i * (size_t)n_vocab, (size_t)n_vocab * sizeof *r->keep);
            r->keep += n_vocab;
        }
        r->next_score++;
    }
    lr_kv_table_advance(r->e->kv, &q->kv, q->tokens, n);
    if (r->next_score == q->len) lr_request__end(r, LR_REQ_DONE, LR_FINISH_LENGTH);
    return 0;
}

static bool all_finite(const float *x, int n)
{
    enum { LANES = 32 }; /* side by side: one sum would wait for itself at each value */
    float sum[LANES] = {0}, all = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) sum[l] += x[i + l] * 0; /* NaN if one is NaN or infinite */
    for (; i < n; i++) all += x[i] * 0;
    for (int l = 0; l < LANES; l++) all += sum[l];
    return !isnan(all);
}

static int give_logits(lr_request *r, float *logits, int n, lr_error *err)
{
    lr_seq *q = r->info.seq;
    if (!all_finite(logits, r->e->model->n_vocab)) {
        bool any = false;
        for (int i = 0; i < r->e->model->n_vocab; i++) {
            if (isnan(logits[i])) return lr_fail(err, LR_EINVAL, "logits are not finite");
            any = any || isfinite(logits[i]);
        }
        if (!any) return lr_fail(err, LR_EINVAL, "logits are not finite");
    }
    lr_kv_table_advance(r->e->kv, &q->kv, q->tokens, n);
    r->logits = logits;
    r->logits_generation = r->e->generation;
    lr_request__end(r, LR_REQ_DONE, LR_FINISH_LENGTH);
    return 0;
}

/* The test hooks that strike here. */
static int inject(lr_request *r, float *logits, lr_error *err)
{
    if (r->fault == LR_FAULT_NONE) return 0;
    if (r->fault_after > 0) {
        r->fault_after--;
        return 0;
    }
    if (r->fault == LR_FAULT_ERROR) return lr_fail(err, LR_ESTATE, "injected error");
    if (r->fault != LR_FAULT_NAN || !logits) return 0;
    for (int i = 0; i < r->e->model->n_vocab * r->n_out; i++) logits[i] = NAN;
    return 0;
}

bool lr_request__take_logits(lr_request *r, int n)
{
    lr_error err;
    float *logits = r->e->logits ? r->e->logits + (size_t)r->out * (size_t)r->e->model->n_vocab : NULL;
    int rc = inject(r, logits, &err);
    if (!rc) {
        switch (r->info.kind) {
        case LR_REQ_GENERATE:
            rc = generate(r, logits, n, &err);
            break;
        case LR_REQ_LOGITS:
            rc = give_logits(r, logits, n, &err);
            break;
        case LR_REQ_SCORE:
            rc = score(r, logits, n, &err);
            break;
        }
    }
    if (rc) lr_request__fail(r, &err);
    return rc == 0;
}
