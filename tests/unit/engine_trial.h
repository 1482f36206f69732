/* engine_trial.h - a schedule of random clients on the scripted model: whatever the batch, the chunks, the block size,
 * the prefix cache, forks, drafts, cancellations, preemption by recompute and swap, and a policy that does nonsense,
 * every sequence must hold exactly what the model alone would have said, and every invariant must hold after every
 * step. What is drawn decides all: a seed (test_engine_random.c) or bytes (tests/fuzz/fuzz_policy.c).
 */
#ifndef TESTS_ENGINE_TRIAL_H
#define TESTS_ENGINE_TRIAL_H
#include "engine_fixture.h"

enum { N_CLIENTS = 10, MAX_TOKENS = 160 };

typedef struct client {
    lr_seq *s;
    lr_request *r;
    int len; /* tokens of the sequence when the request was made */
    int max;
    lr_req_kind kind;
    bool free_seq;
} client;

typedef struct trial {
    lr_engine *e;
    client c[N_CLIENTS];
    int eos_every, done, cancelled, limit;
    bool hostile;
} trial;

static int eos_every;
static struct {
    uint64_t done, cancelled, recompute, swap, swap_in, hits, evicted, copied, parked, refused, spilled, joined, taken,
        rejected;
} total;

/* ---- a policy that does nonsense ---- */

static lr_request *any_request(trial *t, lr_step *s)
{
    switch (fx_rnd(3)) {
    case 0:
        return lr_step_waiting(s, (int)fx_rnd(12) - 1);
    case 1:
        return lr_step_running(s, (int)fx_rnd(12) - 1);
    default:
        return t->c[fx_rnd(N_CLIENTS)].r; /* perhaps ended long ago */
    }
}

static int mad_schedule(void *user, lr_step *s)
{
    trial *t = user;
    for (int i = 0, n = (int)fx_rnd(20); i < n; i++) {
        lr_request *r = any_request(t, s);
        if (!r) continue;
        int before = lr_step_budget(s);
        if (fx_rnd(6) == 0) {
            lr_step_preempt(s, r, fx_rnd(2) ? LR_PREEMPT_SWAP : LR_PREEMPT_RECOMPUTE);
        } else if (fx_rnd(40) == 0) {
            lr_request_cancel(r);
        } else {
            int n_want = (int)fx_rnd(50) - 5, got = lr_step_run(s, r, n_want);
            assert_true(got >= 0 && got <= before + 64 && (n_want <= 0 || got <= n_want));
            assert_true(lr_step_budget(s) >= 0);
        }
        lr_step_fits(s, r);
    }
    return fx_rnd(8) == 0 ? -1 : 0;
}

static int mad_preempt(void *user, lr_step *s, lr_request *req, int group, int need)
{
    assert_true(need > 0 && group < 2);
    for (int i = 0, n = (int)fx_rnd(3); i < n; i++) {
        lr_request *r = any_request(user, s);
        if (r) lr_step_preempt(s, r, fx_rnd(2) ? LR_PREEMPT_SWAP : LR_PREEMPT_RECOMPUTE);
    }
    if (fx_rnd(2)) assert_int_equal(lr_step_run(s, req, 1 + (int)fx_rnd(9)), 0); /* it is being given blocks just now */
    return fx_rnd(4) == 0 ? -1 : 0;
}

static double mad_evict(void *user, const lr_kv_leaf *leaf) { return fx_rnd(9) == 0 ? NAN : (double)fx_rnd(100); }

static int mad_admit(void *user, lr_request *r, lr_error *err)
{
    lr_request_set_priority(r, (int)fx_rnd(10));
    return fx_rnd(10) == 0 ? 1 : fx_rnd(10) == 0 ? -1 : 0;
}

static int mad_token(void *user, lr_request *r, int32_t token) { return fx_rnd(30) == 0 ? -1 : 0; }

static void mad_finish(void *user, lr_request *r)
{
    trial *t = user;
    lr_request *o = t->c[fx_rnd(N_CLIENTS)].r;
    if (o && fx_rnd(30) == 0) lr_request_cancel(o);
}

static const lr_policy mad = {.name = "mad",
                              .admit = mad_admit,
                              .schedule = mad_schedule,
                              .preempt = mad_preempt,
                              .evict = mad_evict,
                              .token = mad_token,
                              .finish = mad_finish};

/* ---- clients ---- */

/* Prompts are cut from three long texts, so that prefixes meet. */
static int make_prompt(int32_t *t)
{
    int n = 1 + (int)fx_rnd(60), family = (int)fx_rnd(3), own = fx_rnd(3) ? (int)fx_rnd(10) : 0;
    for (int i = 0; i < n; i++) t[i] = 3 + (int32_t)(fx_mix((uint64_t)family + 9, (uint64_t)i) % 40);
    for (int i = own < n ? n - own : 0; i < n; i++) t[i] = 3 + (int32_t)fx_rnd(40);
    return n;
}

/* ---- drafts of all kinds, right and wrong ---- */

static int mad_draft(void *user, lr_request *r, lr_spec_choice *c, lr_error *err)
{
    const lr_seq *q = lr_request_info(r)->seq;
    int n = (int)lr_seq_len(q);
    int32_t t[MAX_TOKENS + 16];
    c->method = (lr_spec_method)fx_rnd(LR_SPEC_METHODS);
    c->k = (int)fx_rnd(12) - 1;
    if (c->method != LR_SPEC_GIVEN) return 0;
    memcpy(t, lr_seq_tokens(q), (size_t)n * sizeof *t);
    c->n = fx_reference(fx_next, user, t, n, 1 + (int)fx_rnd(10));
    memcpy(c->tokens, t + n, (size_t)c->n * sizeof *t);
    if (c->n && fx_rnd(2)) c->tokens[fx_rnd((uint32_t)c->n)] = (int32_t)fx_rnd(FX_VOCAB + 4) - 2;
    return 0;
}

static int unsure(void *user, const int32_t *tokens, int n, float *logits)
{
    fx_next(user, tokens, n, logits);
    if (n % 4 == 0) logits[n % FX_VOCAB] += 200;
    return n % 50 == 49 ? -1 : 0;
}

static void submit(trial *t, client *c)
{
    lr_req_params p = lr_req_defaults(fx_rnd(6) == 0 ? LR_REQ_SCORE : fx_rnd(6) == 0 ? LR_REQ_LOGITS : LR_REQ_GENERATE);
    lr_error err;
    c->kind = p.kind;
    c->len = (int)lr_seq_len(c->s);
    c->max = p.max_tokens = 1 + (int)fx_rnd(20);
    if (p.kind == LR_REQ_SCORE) {
        if (c->len < 2) return;
        p.score_from = 1 + (int)fx_rnd((uint32_t)c->len - 1);
    }
    p.free_seq = c->free_seq = fx_rnd(4) == 0;
    p.n_top = (int)fx_rnd(3) - 1;
    lr_spec_params spec = lr_spec_defaults(LR_SPEC_SUFFIX);
    spec.choose = mad_draft;
    spec.user = &eos_every;
    if (fx_rnd(2)) p.spec = &spec;
    int rc = lr_request_new(t->e, c->s, &p, &c->r, &err);
    if (rc) { /* the policy's refusal, or no room left */
        assert_true(rc == LR_EFULL && c->r == NULL);
        lr_seq_free(c->s);
        c->s = NULL;
        return;
    }
    if (p.kind == LR_REQ_GENERATE) c->max = lr_request_info(c->r)->max_tokens; /* clipped to what fits */
    if (fx_rnd(4) == 0) lr_request_inject(c->r, fx_rnd(2) ? LR_FAULT_SWAP : LR_FAULT_PREEMPT, (int)fx_rnd(5));
}

static void open_seq(trial *t, client *c)
{
    int32_t tok[MAX_TOKENS];
    client *o = &t->c[fx_rnd(N_CLIENTS)];
    lr_error err;
    bool gone = o->r && o->free_seq && !lr_request_active(o->r);
    if (o->s && !gone && fx_rnd(2)) {
        assert_int_equal(lr_seq_fork(o->s, &c->s, &err), 0);
        if (lr_seq_len(c->s) > 1 && fx_rnd(2)) {
            assert_int_equal(lr_seq_truncate(c->s, 1 + fx_rnd((uint32_t)lr_seq_len(c->s)), &err), 0);
        }
    } else {
        lr_seq_config sc = {.salt = fx_rnd(3) ? LR_STR("") : LR_STR("x"), .tag = fx_rnd(3)};
        int n = make_prompt(tok);
        if (n > t->limit - 2) n = t->limit - 2;
        assert_int_equal(lr_seq_new(t->e, &sc, &c->s, &err), 0);
        assert_int_equal(lr_seq_append(c->s, tok, (size_t)n, &err), 0);
    }
}

/* What has ended must be what the model says. */
static void verify(trial *t, client *c)
{
    const lr_req_info *i = lr_request_info(c->r);
    int32_t tok[2 * MAX_TOKENS];
    size_t n;
    const lr_token_rec *rec = lr_request_tokens(c->r, &n);
    if (i->state == LR_REQ_FAILED) fail_msg("request failed: %s", i->error.text);
    if (i->state == LR_REQ_CANCELLED) t->cancelled++;
    if (i->state == LR_REQ_DONE) t->done++;
    if (c->kind != LR_REQ_GENERATE) {
        if (c->kind == LR_REQ_SCORE && i->state == LR_REQ_DONE) assert_true(n > 0);
        return;
    }
    if (c->free_seq) return;
    assert_int_equal(lr_seq_len(c->s), c->len + (int)n);
    memcpy(tok, lr_seq_tokens(c->s), (size_t)c->len * sizeof *tok);
    int want = fx_reference(fx_next, &eos_every, tok, c->len, c->max);
    if (i->state == LR_REQ_DONE) assert_int_equal(n, want);
    assert_true((int)n <= want);
    for (size_t k = 0; k < n; k++) {
        if (rec[k].id != tok[c->len + (int)k])
            fail_msg("token %zu of %zu is %d, not %d", k, n, rec[k].id, tok[c->len + (int)k]);
    }
    assert_memory_equal(lr_seq_tokens(c->s), tok, (size_t)lr_seq_len(c->s) * sizeof *tok);
}

/* Scores and logits are checked against the row by row computation. */
static void verify_values(trial *t, client *c)
{
    float x[FX_VOCAB];
    size_t n;
    const lr_token_rec *rec = lr_request_tokens(c->r, &n);
    const int32_t *tok = lr_seq_tokens(c->s);
    if (c->kind == LR_REQ_LOGITS) {
        const float *have = lr_request_logits(c->r, NULL);
        fx_next(&eos_every, tok, c->len, x);
        if (have) assert_memory_equal(have, x, sizeof x);
        return;
    }
    for (size_t k = 0; k < n; k++) {
        int pos = c->len - (int)n + (int)k;
        double sum = 0;
        fx_next(&eos_every, tok, pos, x);
        for (int i = 0; i < FX_VOCAB; i++) sum += exp(x[i]);
        assert_int_equal(rec[k].id, tok[pos]);
        assert_true(fabs(rec[k].logprob - (x[tok[pos]] - log(sum))) < 1e-4);
    }
}

static void act(trial *t)
{
    client *c = &t->c[fx_rnd(N_CLIENTS)];
    lr_error err;
    if (c->r && !lr_request_active(c->r)) {
        verify(t, c);
        if (lr_request_info(c->r)->state == LR_REQ_DONE && !c->free_seq && c->kind != LR_REQ_GENERATE)
            verify_values(t, c);
        lr_request_free(c->r);
        c->r = NULL;
        if (c->free_seq || fx_rnd(3) == 0) {
            if (!c->free_seq) lr_seq_free(c->s);
            c->s = NULL;
        }
    } else if (c->r) {
        if (fx_rnd(12) == 0) lr_request_cancel(c->r);
    } else if (!c->s) {
        open_seq(t, c);
    } else if ((int)lr_seq_len(c->s) >= t->limit - 1 || lr_seq_len(c->s) > 120) {
        lr_seq_free(c->s);
        c->s = NULL;
    } else if (fx_rnd(4) == 0) {
        int32_t more[3] = {(int32_t)fx_rnd(45) + 3, 7, 8};
        lr_seq_append(c->s, more, 1 + fx_rnd(3), &err);
        if (fx_rnd(4) == 0) lr_seq_pin(c->s, fx_rnd(2), &err);
    } else {
        submit(t, c);
    }
}

/* A schedule of so many steps, or until the bytes that decide it are used up. Returns how many requests were done. */
static int run_trial(bool hostile, int steps)
{
    static const int sizes[] = {1, 2, 3, 16};
    trial t = {.hostile = hostile};
    lr_engine_config cfg = lr_engine_defaults();
    lr_engine_info info;
    lr_error err;
    eos_every = fx_rnd(2) ? 12 : 0;
    cfg.block_size = sizes[fx_rnd(4)];
    cfg.kv_blocks[0] = 100 / cfg.block_size + (int)fx_rnd(200) / cfg.block_size + 2;
    cfg.max_batch_tokens = 1 + (int)fx_rnd(fx_rnd(2) ? 40 : 200);
    cfg.chunk = 1 + (int)fx_rnd(64);
    cfg.max_seqs = 1 + (int)fx_rnd(8);
    cfg.prefix_cache = fx_rnd(4) != 0;
    cfg.hash_bits = fx_rnd(3) ? 0 : 4;
    cfg.preempt = fx_rnd(2) ? LR_PREEMPT_SWAP : LR_PREEMPT_RECOMPUTE;
    cfg.swap_bytes = fx_rnd(2) ? 300 : 1 << 20;
    int window = fx_rnd(2) ? 1 + (int)fx_rnd(20) : 0;
    if (window) cfg.kv_blocks[1] = fx_rnd(2) ? cfg.kv_blocks[0] : (2 * window + 60) / cfg.block_size + 4;
    if (!window && fx_rnd(2)) {
        cfg.spill = "/tmp";
        cfg.spill_bytes = 100 + fx_rnd(2000);
    }
    t.e = fx_engine(&cfg, fx_next, &eos_every, MAX_TOKENS, window);
    lr_draft_config draft = {.kv_blocks = 1 + (int)fx_rnd(100)};
    if (lr_engine_set_draft(t.e, fx_model(unsure, &eos_every, MAX_TOKENS, window), &draft, &err))
        fail_msg("%s", err.text);
    lr_engine_get_info(t.e, &info);
    t.limit = info.context;
    lr_policy p = mad;
    p.user = &t;
    if (hostile) assert_int_equal(lr_engine_set_policy(t.e, &p, &err), 0);
    for (int i = 0; i < steps && !fx_bytes_over(); i++) {
        for (int k = (int)fx_rnd(6); k > 0; k--) act(&t);
        if (lr_engine_step(t.e, &err) < 0) fail_msg("%s", err.text);
        if (i % 2 || steps < 300) fx_check(t.e);
        lr_engine_get_info(t.e, &info);
        assert_in_range(info.slack, 0, info.n_seqs * (cfg.block_size - 1)); /* at most a sequence's last block */
        unsigned what;
        while (fx_rnd(4) && lr_engine_next_event(t.e, &what)) {
        }
    }
    lr_engine_set_policy(t.e, NULL, &err);
    fx_run(t.e);
    fx_check(t.e);
    for (int i = 0; i < N_CLIENTS; i++) {
        if (t.c[i].r) verify(&t, &t.c[i]);
        lr_request_free(t.c[i].r);
        if (t.c[i].s && !(t.c[i].r && t.c[i].free_seq)) lr_seq_free(t.c[i].s);
    }
    const lr_metrics *m = lr_engine_metrics(t.e);
    lr_engine_get_info(t.e, &info);
    total.done += (uint64_t)t.done;
    total.cancelled += (uint64_t)t.cancelled;
    total.recompute += m->preempt_recompute;
    total.swap += m->preempt_swap;
    total.swap_in += m->swap_in;
    total.hits += m->prefix_hits;
    total.joined += m->prefix_joined;
    total.taken += m->spec_accepted;
    total.rejected += m->spec_drafted - m->spec_accepted;
    total.parked += m->parked;
    total.refused += m->policy_refused;
    for (int g = 0; g < info.n_groups; g++) {
        total.evicted += info.kv[g].evicted;
        total.copied += info.kv[g].copied;
        total.spilled += info.kv[g].spill_in;
    }
    lr_engine_drop_cached(t.e);
    lr_engine_get_info(t.e, &info);
    for (int g = 0; g < info.n_groups; g++) assert_int_equal(info.kv[g].free, info.kv[g].total);
    assert_int_equal(info.n_seqs, 0);
    assert_int_equal(info.swapped, 0);
    lr_engine_free(t.e);
    return t.done;
}

/* A schedule that bytes decide. */
static void run_bytes(const uint8_t *p, size_t n)
{
    if (n < 1) return;
    fx_bytes.p = p + 1;
    fx_bytes.end = p + n;
    run_trial(p[0] & 1, 400);
    fx_bytes.p = NULL;
}

#endif
