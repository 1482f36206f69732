/* test_engine.c - the engine on a scripted model: kinds of requests, stops, limits, faults, cancellation, memory. */
#include "engine_fixture.h"
#include <unistd.h>

static int32_t prompt_of(int32_t *t, int n, int salt)
{
    for (int i = 0; i < n; i++) t[i] = 3 + (i * 7 + salt * 13) % (FX_VOCAB - 3);
    return n;
}

static void assert_tokens(const lr_seq *s, const int32_t *want, int n)
{
    assert_int_equal(lr_seq_len(s), n);
    assert_memory_equal(lr_seq_tokens(s), want, (size_t)n * sizeof *want);
}

static void test_generate(void **state)
{
    lr_engine_config cfg = lr_engine_defaults();
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
    int32_t t[64];
    prompt_of(t, 20, 1);
    lr_seq *s = fx_seq(e, t, 20);
    lr_request *r = fx_gen(e, s, 10);
    unsigned what, all = 0;
    lr_request *ev;
    lr_error err;
    size_t seen = 0, n;
    while (lr_engine_busy(e)) {
        assert_true(lr_engine_step(e, &err) > 0);
        fx_check(e);
        while ((ev = lr_engine_next_event(e, &what))) {
            assert_ptr_equal(ev, r);
            all |= what;
            lr_request_text(r, &n);
            assert_true(n >= seen);
            seen = n;
        }
    }
    assert_int_equal(all, LR_EV_START | LR_EV_TOKEN | LR_EV_TEXT | LR_EV_DONE);
    assert_int_equal(fx_reference(fx_next, NULL, t, 20, 10), 10);
    assert_tokens(s, t, 30);
    const lr_req_info *i = lr_request_info(r);
    assert_int_equal(i->state, LR_REQ_DONE);
    assert_int_equal(i->finish, LR_FINISH_LENGTH);
    assert_int_equal(i->n_prompt, 20);
    assert_int_equal(i->n_generated, 10);
    assert_int_equal(i->n_computed, 29);
    assert_true(i->t_first >= i->t_start && i->t_end >= i->t_last && i->t_last >= i->t_first);
    const lr_token_rec *rec = lr_request_tokens(r, &n);
    assert_int_equal(n, 10);
    const char *text = lr_request_text(r, &n);
    char *want;
    size_t want_n;
    assert_int_equal(lr_detokenize(lr_engine_model(e)->vocab, t + 20, 10, false, &want, &want_n, &err), 0);
    assert_int_equal(n, want_n);
    assert_memory_equal(text, want, n);
    lr_free(want);
    for (int k = 0; k < 10; k++) {
        assert_int_equal(rec[k].id, t[20 + k]);
        assert_true(isnan(rec[k].logprob));
    }
    lr_request_free(r);
    /* the next turn: what was generated is known already */
    assert_int_equal(lr_seq_computed(s), 29);
    assert_int_equal(lr_seq_append(s, t, 5, &err), 0);
    r = fx_gen(e, s, 3);
    fx_run(e);
    assert_int_equal(lr_request_info(r)->n_cached, 29);
    lr_request_free(r);
    lr_seq_free(s);
    fx_check(e);
    lr_engine_free(e);
}

static void test_logits_and_score(void **state)
{
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 256, 0);
    int32_t t[40];
    float want[FX_VOCAB];
    lr_error err;
    prompt_of(t, 40, 2);
    lr_seq *s = fx_seq(e, t, 40);
    lr_request *r, *r2;
    lr_req_params p = lr_req_defaults(LR_REQ_LOGITS);
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), 0);
    assert_int_equal(lr_request_new(e, s, &p, &r2, &err), LR_ESTATE);
    fx_run(e);
    uint64_t gen;
    float *x = lr_request_logits(r, &gen);
    fx_next(NULL, t, 40, want);
    assert_memory_equal(x, want, sizeof want);
    assert_int_equal(gen, lr_engine_generation(e));
    /* again, on a sequence that is computed to its end */
    assert_int_equal(lr_request_new(e, s, &p, &r2, &err), 0);
    fx_run(e);
    assert_null(lr_request_logits(r, NULL)); /* stale */
    assert_memory_equal(lr_request_logits(r2, NULL), want, sizeof want);
    assert_int_equal(lr_request_info(r2)->n_computed, 1);
    lr_request_free(r);
    lr_request_free(r2);

    p = lr_req_defaults(LR_REQ_SCORE);
    p.n_top = 3;
    p.score_from = 5;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), 0);
    fx_run(e);
    size_t n;
    int n_top;
    const lr_token_rec *rec = lr_request_tokens(r, &n);
    assert_int_equal(n, 35);
    for (size_t i = 0; i < n; i++) {
        double sum = 0;
        fx_next(NULL, t, 5 + (int)i, want);
        for (int k = 0; k < FX_VOCAB; k++) sum += exp(want[k]);
        assert_int_equal(rec[i].id, t[5 + i]);
        assert_true(fabs(rec[i].logprob - (want[t[5 + i]] - log(sum))) < 1e-5);
        const lr_top *top = lr_request_top(r, i, &n_top);
        assert_int_equal(n_top, 3);
        assert_int_equal(top[0].id, fx_arg_max(want));
        assert_true(top[0].logprob >= top[1].logprob && top[1].logprob >= top[2].logprob);
    }
    lr_request_free(r);
    p.score_from = 0;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), LR_EINVAL);
    p.score_from = 40;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), LR_EINVAL);
    lr_engine_free(e);
}

/* A model that says a fixed list of tokens after a prompt of one token, then the end. */
typedef struct script {
    const int32_t *say;
    int n;
} script;

static int say_next(void *user, const int32_t *tokens, int n, float *logits)
{
    const script *s = user;
    logits[n - 1 < s->n ? s->say[n - 1] : FX_EOS] = 10;
    return 0;
}

static void run_script(script *sc, const lr_str *stop, size_t n_stop, const char *want, lr_finish finish, int n_tokens)
{
    lr_engine *e = fx_engine(NULL, say_next, sc, 256, 0);
    int32_t first = 3;
    lr_seq *s = fx_seq(e, &first, 1);
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    lr_request *r;
    lr_error err;
    size_t n = 0, before = 0;
    p.stop = stop;
    p.n_stop = n_stop;
    if (lr_request_new(e, s, &p, &r, &err)) fail_msg("%s", err.text);
    while (lr_engine_busy(e)) {
        lr_engine_step(e, &err);
        const char *text = lr_request_text(r, &n);
        assert_true(n >= before && n <= strlen(want)); /* the stream never shows more than the answer */
        assert_memory_equal(text, want, n);
        before = n;
    }
    assert_int_equal(n, strlen(want));
    assert_int_equal(lr_request_info(r)->finish, finish);
    assert_int_equal(lr_seq_len(s), 1 + n_tokens);
    lr_engine_free(e);
}

static void test_stop_strings(void **state)
{
    int32_t say[] = {25, 4, 5, 6, 7}; /* "A" " b" " c" " d" " e" */
    script sc = {say, 5};
    lr_str stop[4] = {LR_STR("b c d"), LR_STR("c"), LR_STR("zz"), LR_STR(" e")};
    run_script(&sc, stop, 1, "A ", LR_FINISH_STOP, 4);
    run_script(&sc, stop + 1, 1, "A b ", LR_FINISH_STOP, 3);
    run_script(&sc, stop, 0, "A b c d e", LR_FINISH_STOP, 5);
    run_script(&sc, stop + 2, 1, "A b c d e", LR_FINISH_STOP, 5);
    run_script(&sc, stop + 3, 1, "A b c d", LR_FINISH_STOP, 5);
    run_script(&sc, stop, 4, "A b ", LR_FINISH_STOP, 3);
    lr_str empty = LR_STR(""), held = LR_STR(" e and more");
    run_script(&sc, &held, 1, "A b c d e", LR_FINISH_STOP, 5); /* what was held back comes out at the end */
    lr_engine *e = fx_engine(NULL, say_next, &sc, 256, 0);
    lr_seq *s = fx_seq(e, say, 1);
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    lr_request *r;
    lr_error err;
    p.stop = &empty;
    p.n_stop = 1;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), LR_EINVAL);
    lr_engine_free(e);
}

static void test_end_tokens(void **state)
{
    int32_t say[] = {25, 4, 5, FX_EOS, 7};
    script sc = {say, 5};
    lr_engine *e = fx_engine(NULL, say_next, &sc, 256, 0);
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    lr_request *r;
    lr_error err;
    lr_seq *s = fx_seq(e, say, 1);
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), 0);
    fx_run(e);
    assert_int_equal(lr_request_info(r)->stop_token, FX_EOS);
    assert_int_equal(lr_request_info(r)->n_generated, 4);
    assert_int_equal(lr_seq_len(s), 4); /* the end token is not appended */
    lr_seq_free(s);
    s = fx_seq(e, say, 1);
    p.ignore_eos = true;
    p.max_tokens = 7;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), 0);
    fx_run(e);
    assert_int_equal(lr_request_info(r)->finish, LR_FINISH_LENGTH);
    assert_int_equal(lr_seq_len(s), 8);
    assert_int_equal(lr_seq_tokens(s)[4], FX_EOS);
    lr_seq_free(s);
    s = fx_seq(e, say, 1);
    int32_t ids[] = {40, 5, 30};
    p.stop_ids = ids;
    p.n_stop_ids = 3;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), 0);
    fx_run(e);
    assert_int_equal(lr_request_info(r)->stop_token, 5);
    assert_int_equal(lr_seq_len(s), 3);
    lr_seq_free(s);
    s = fx_seq(e, say, 1);
    p.max_tokens = 0;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), 0);
    assert_int_equal(lr_request_info(r)->state, LR_REQ_DONE);
    assert_int_equal(lr_engine_busy(e), 0);
    lr_engine_free(e);
}

/* B30: what can't fit is refused at once, with numbers; at the end of the context a request ends. */
static void test_limits(void **state)
{
    lr_engine_config cfg = lr_engine_defaults();
    cfg.kv_blocks[0] = 32;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 2048, 0);
    lr_engine_info info;
    lr_engine_get_info(e, &info);
    assert_int_equal(info.context, 512);
    static int32_t t[2049];
    for (int i = 0; i < 2049; i++) t[i] = 3 + i % 40;
    lr_error err;
    lr_seq *s;
    lr_request *r;
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    for (int k = 0; k < 10; k++) {
        static const int lens[] = {513, 2047, 2048, 2049};
        assert_int_equal(lr_seq_new(e, NULL, &s, &err), 0);
        assert_int_equal(lr_seq_append(s, t, (size_t)lens[k % 4], &err), LR_EFULL);
        assert_non_null(strstr(err.text, "512"));
        lr_seq_free(s);
    }
    s = fx_seq(e, t, 512);
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), LR_EFULL); /* no place for an answer */
    assert_non_null(strstr(err.text, "512"));
    lr_seq_free(s);
    s = fx_seq(e, t, 500);
    p.max_tokens = 100;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), 0);
    assert_int_equal(lr_request_info(r)->max_tokens, 12);
    lr_seq *other = fx_seq(e, t, 511);
    lr_request *r2;
    p.max_tokens = -1;
    assert_int_equal(lr_request_new(e, other, &p, &r2, &err), 0); /* waits until the first is through */
    fx_run(e);
    assert_int_equal(lr_request_info(r)->finish, LR_FINISH_LENGTH);
    assert_int_equal(lr_seq_len(s), 512);
    assert_int_equal(lr_request_info(r2)->finish, LR_FINISH_LENGTH);
    assert_int_equal(lr_seq_len(other), 512);
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), LR_EFULL);
    fx_check(e);
    lr_engine_free(e);
}

static void test_faults_stay_alone(void **state)
{
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 256, 0);
    lr_request *r[4];
    lr_seq *s[4];
    int32_t t[4][64];
    lr_error err;
    for (int i = 0; i < 4; i++) {
        prompt_of(t[i], 10 + i, i);
        s[i] = fx_seq(e, t[i], 10 + i);
        r[i] = fx_gen(e, s[i], 8);
    }
    lr_request_inject(r[0], LR_FAULT_NAN, 2);
    lr_request_inject(r[1], LR_FAULT_ERROR, 0);
    lr_request_inject(r[2], LR_FAULT_PREEMPT, 3);
    while (lr_engine_busy(e)) {
        lr_engine_step(e, &err);
        fx_check(e);
    }
    assert_int_equal(lr_request_info(r[0])->state, LR_REQ_FAILED);
    assert_non_null(strstr(lr_request_info(r[0])->error.text, "finite"));
    assert_int_equal(lr_seq_len(s[0]), 12);
    assert_int_equal(lr_request_info(r[1])->state, LR_REQ_FAILED);
    assert_int_equal(lr_seq_len(s[1]), 11);
    for (int i = 2; i < 4; i++) {
        assert_int_equal(lr_request_info(r[i])->state, LR_REQ_DONE);
        fx_reference(fx_next, NULL, t[i], 10 + i, 8);
        assert_tokens(s[i], t[i], 18 + i);
    }
    assert_int_equal(lr_request_info(r[2])->n_preempted, 1);
    /* a failed request leaves a sequence that works */
    lr_request *again = fx_gen(e, s[0], 6);
    fx_run(e);
    assert_int_equal(lr_request_info(again)->state, LR_REQ_DONE);
    fx_reference(fx_next, NULL, t[0], 10, 8);
    assert_tokens(s[0], t[0], 18);
    lr_engine_free(e);
}

static int bad_next(void *user, const int32_t *tokens, int n, float *logits)
{
    if (n > *(int *)user) return 1;
    return fx_next(NULL, tokens, n, logits);
}

static void test_nan_row_of_the_model(void **state)
{
    int good = 12;
    lr_engine *e = fx_engine(NULL, bad_next, &good, 256, 0);
    int32_t t[64];
    prompt_of(t, 10, 0);
    lr_seq *s = fx_seq(e, t, 10), *s2 = fx_seq(e, t, 4);
    lr_request *r = fx_gen(e, s, 8), *r2 = fx_gen(e, s2, 8);
    fx_run(e);
    assert_int_equal(lr_request_info(r)->state, LR_REQ_FAILED);
    assert_int_equal(lr_seq_len(s), 13);
    assert_int_equal(lr_request_info(r2)->state, LR_REQ_DONE);
    lr_engine_free(e);
}

/* B32: in every state a cancelled request's blocks are free when the call returns. */
static void test_cancel(void **state)
{
    lr_engine_config cfg = lr_engine_defaults();
    cfg.max_batch_tokens = 8;
    cfg.max_seqs = 2;
    cfg.prefix_cache = false;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
    lr_engine_info before, info;
    lr_error err;
    int32_t t[64];
    prompt_of(t, 40, 0);
    lr_engine_get_info(e, &before);
    for (int steps = 0; steps < 14; steps++) { /* queued, in the prompt, decoding */
        lr_request *r[3];
        for (int i = 0; i < 3; i++) {
            lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
            p.free_seq = true;
            assert_int_equal(lr_request_new(e, fx_seq(e, t, 40), &p, &r[i], &err), 0);
        }
        for (int i = 0; i < steps; i++) lr_engine_step(e, &err);
        for (int i = 2; i >= 0; i--) {
            if (i == 1) {
                lr_request_free(r[i]);
            } else {
                lr_request_cancel(r[i]);
                assert_int_equal(lr_request_info(r[i])->state, LR_REQ_CANCELLED);
                assert_null(lr_request_info(r[i])->seq);
            }
            fx_check(e);
        }
        lr_engine_get_info(e, &info);
        assert_int_equal(info.kv[0].free, before.kv[0].free);
        assert_int_equal(info.n_seqs, 0);
        assert_int_equal(info.n_running + info.n_waiting, 0);
        lr_request_free(r[0]);
        lr_request_free(r[2]);
    }
    unsigned what;
    assert_null(lr_engine_next_event(e, &what));
    lr_engine_free(e);
}

static void test_fork_and_rewind(void **state)
{
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 256, 0);
    int32_t t[64], u[64];
    lr_error err;
    lr_engine_info info;
    prompt_of(t, 20, 0);
    lr_seq *s = fx_seq(e, t, 20), *f, *g;
    lr_request *r = fx_gen(e, s, 4);
    fx_run(e);
    lr_request_free(r);
    fx_reference(fx_next, NULL, t, 20, 4);
    assert_int_equal(lr_seq_fork(s, &f, &err), 0);
    assert_int_equal(lr_seq_fork(s, &g, &err), 0);
    lr_engine_get_info(e, &info);
    assert_int_equal(info.kv[0].used, 2);
    memcpy(u, t, sizeof u);
    u[24] = 9;
    assert_int_equal(lr_seq_append(f, u + 24, 1, &err), 0);
    assert_int_equal(lr_seq_truncate(g, 10, &err), 0);
    int32_t v[64];
    memcpy(v, t, sizeof v);
    fx_gen(e, f, 5);
    fx_gen(e, s, 5);
    fx_gen(e, g, 5);
    assert_int_equal(lr_seq_append(s, u, 1, &err), LR_ESTATE);
    assert_int_equal(lr_seq_truncate(s, 1, &err), LR_ESTATE);
    fx_run(e);
    fx_check(e);
    assert_int_equal(fx_reference(fx_next, NULL, t, 24, 5), 5);
    assert_tokens(s, t, 29);
    fx_reference(fx_next, NULL, u, 25, 5);
    assert_tokens(f, u, 30);
    fx_reference(fx_next, NULL, v, 10, 5);
    assert_tokens(g, v, 15);
    assert_int_equal(lr_seq_truncate(g, 16, &err), LR_EINVAL);
    int32_t bad = FX_VOCAB;
    assert_int_equal(lr_seq_append(g, &bad, 1, &err), LR_EINVAL);
    bad = -1;
    assert_int_equal(lr_seq_append(g, &bad, 1, &err), LR_EINVAL);
    lr_engine_free(e);
}

/* A decode step allocates nothing. */
static void test_no_allocation(void **state)
{
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 4096, 0);
    int32_t t[64];
    lr_error err;
    lr_str stop[2] = {LR_STR("never this"), LR_STR("nor that")};
    prompt_of(t, 30, 0);
    for (int i = 0; i < 8; i++) {
        lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
        lr_request *r;
        p.max_tokens = 400;
        p.n_top = i;
        p.stop = stop;
        p.n_stop = 2;
        assert_int_equal(lr_request_new(e, fx_seq(e, t, 10 + i), &p, &r, &err), 0);
    }
    for (int i = 0; i < 3; i++) lr_engine_step(e, &err);
    uint64_t before = lr_mem_allocs();
    unsigned what;
    for (int i = 0; i < 300; i++) {
        assert_int_equal(lr_engine_step(e, &err), 8);
        while (lr_engine_next_event(e, &what)) {
        }
    }
    assert_int_equal(lr_mem_allocs(), before);
    lr_engine_free(e);
}

static void test_n_th_allocation_fails(void **state)
{
    int32_t t[64];
    lr_error err;
    lr_str stop = LR_STR("zz");
    prompt_of(t, 30, 0);
    for (int n = 1, done = 0; !done && n < 200; n++) {
        lr_model *m = fx_model(fx_next, NULL, 128, 8);
        lr_engine *e = NULL;
        lr_seq *s = NULL, *f = NULL;
        lr_request *r = NULL;
        lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
        p.stop = &stop;
        p.n_stop = 1;
        p.n_top = 2;
        p.max_tokens = 20;
        lr_mem_fail_at(n);
        int rc = lr_engine_new(&e, m, NULL, &err);
        if (!rc) rc = lr_seq_new(e, NULL, &s, &err);
        if (!rc) rc = lr_seq_append(s, t, 30, &err);
        if (!rc) rc = lr_request_new(e, s, &p, &r, &err);
        if (!rc) {
            fx_run(e);
            if (lr_request_info(r)->state == LR_REQ_FAILED) rc = lr_request_info(r)->error.code;
        }
        if (!rc) rc = lr_seq_fork(s, &f, &err);
        lr_mem_fail_at(0);
        assert_true(rc == 0 || rc == LR_ENOMEM);
        done = rc == 0;
        if (e) {
            fx_check(e);
            lr_engine_free(e);
        } else {
            lr_model_free(m);
        }
        assert_true(done || n < 150);
    }
}

static void test_sampler_and_position(void **state)
{
    int32_t alone[40], t[64];
    prompt_of(t, 20, 0);
    for (int round = 0; round < 2; round++) { /* alone, then in company */
        lr_engine *e = fx_engine(NULL, fx_next, NULL, 256, 0);
        lr_seq *s = fx_seq(e, t, 20);
        lr_stage st[] = {{.kind = LR_STAGE_TOP_K, .n = 10}, {.kind = LR_STAGE_TEMPERATURE, .a = 1.5f}};
        lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
        lr_request *r;
        lr_error err;
        for (int i = 0; i < round * 5; i++) fx_gen(e, fx_seq(e, t, 5 + i), 30);
        assert_int_equal(lr_sampler_new(&p.sampler, st, 2, 42, FX_VOCAB, &err), 0);
        p.max_tokens = 20;
        p.n_top = 1;
        assert_int_equal(lr_request_new(e, s, &p, &r, &err), 0);
        fx_run(e);
        if (round == 0) {
            memcpy(alone, lr_seq_tokens(s), sizeof alone);
        } else {
            assert_memory_equal(alone, lr_seq_tokens(s), sizeof alone);
        }
        size_t n;
        int k;
        const lr_token_rec *rec = lr_request_tokens(r, &n);
        assert_true(rec[0].logprob < 0 && lr_request_top(r, 0, &k)->logprob >= rec[0].logprob);
        lr_engine_free(e);
    }
}

/* Idle sequences give their blocks when others need them, and go on correctly afterwards; pinned ones don't. */
static void test_idle_and_pinned(void **state)
{
    lr_engine_config cfg = lr_engine_defaults();
    cfg.block_size = 2;
    cfg.kv_blocks[0] = 20;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
    int32_t a[64], b[64], c[64];
    lr_error err;
    lr_engine_info info;
    prompt_of(a, 11, 0);
    prompt_of(b, 30, 1);
    prompt_of(c, 30, 2);
    lr_seq *s = fx_seq(e, a, 11), *q = fx_seq(e, b, 30), *x = fx_seq(e, c, 30);
    lr_request_free(fx_gen(e, s, 2)); /* cancelled before it ran */
    assert_int_equal(lr_seq_computed(s), 0);
    fx_gen(e, s, 3);
    fx_run(e);
    assert_int_equal(lr_seq_blocks(s, 0), 7);
    fx_gen(e, q, 4);
    fx_run(e);
    assert_int_equal(lr_seq_blocks(s, 0), 0); /* gave way */
    fx_check(e);
    fx_gen(e, s, 3);
    fx_run(e);
    fx_reference(fx_next, NULL, a, 11, 6);
    assert_tokens(s, a, 17);
    assert_int_equal(lr_seq_pin(s, true, &err), 0);
    lr_engine_get_info(e, &info);
    assert_int_equal(info.pinned, 8);
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    lr_request *r;
    assert_int_equal(lr_request_new(e, x, &p, &r, &err), LR_EFULL); /* 12 blocks are left */
    assert_non_null(strstr(err.text, "8 pinned"));
    assert_int_equal(lr_seq_truncate(x, 20, &err), 0);
    p.max_tokens = 2;
    assert_int_equal(lr_request_new(e, x, &p, &r, &err), 0);
    fx_run(e);
    assert_int_equal(lr_seq_blocks(s, 0), 8);
    assert_int_equal(lr_seq_pin(x, true, &err), LR_EFULL);
    assert_int_equal(lr_seq_pin(s, false, &err), 0);
    fx_check(e);
    lr_engine_free(e);
}

static void test_config(void **state)
{
    lr_error err;
    lr_engine *e;
    lr_model *m = fx_model(fx_next, NULL, 100, 0);
    lr_engine_config bad[6];
    for (int i = 0; i < 6; i++) bad[i] = lr_engine_defaults();
    bad[0].block_size = 257;
    bad[1].max_seqs = -1;
    bad[2].kv_fraction = 2;
    bad[3].kv_type = 9999;
    bad[4].kv_bytes = 10;
    bad[5].max_batch_tokens = 1 << 30;
    for (int i = 0; i < 6; i++) assert_true(lr_engine_new(&e, m, &bad[i], &err) < 0);
    lr_engine_config cfg = lr_engine_defaults();
    cfg.kv_bytes = 1 << 20;
    assert_int_equal(lr_engine_new(&e, m, &cfg, &err), 0);
    assert_in_range((1 << 20) / lr_engine_get_config(e)->kv_blocks[0], 1, 1 << 16);
    lr_engine_free(e);
}

static void test_metrics_and_trace(void **state)
{
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 256, 0);
    char path[] = "/tmp/llmrun-trace-XXXXXX", line[1024];
    lr_error err;
    int32_t t[64];
    int fd = mkstemp(path), lines = 0, last = 0;
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(lr_engine_trace(e, path, &err), 0);
    prompt_of(t, 40, 0);
    for (int i = 0; i < 3; i++) {
        lr_seq *s = fx_seq(e, t, 40);
        lr_request_free(fx_gen(e, s, 5));
        fx_gen(e, s, 5);
        fx_run(e);
    }
    assert_int_equal(lr_engine_trace(e, NULL, &err), 0);
    const lr_metrics *m = lr_engine_metrics(e);
    assert_int_equal(m->generation_tokens, 15);
    assert_int_equal(m->finished[LR_FINISH_LENGTH], 3);
    assert_int_equal(m->finished[LR_FINISH_CANCELLED], 3);
    assert_int_equal(m->ttft.n, 3);
    assert_int_equal(m->itl.n, 12);
    assert_int_equal(m->prefix_hits, 2 * 32); /* whole blocks */
    assert_true(lr_metrics_quantile(m, &m->prompt, 0.5) > 20 && lr_metrics_quantile(m, &m->prompt, 0.5) <= 50);
    char *text;
    size_t n;
    assert_int_equal(lr_engine_prometheus(e, "a\"b", &text, &n, &err), 0);
    assert_int_equal(strlen(text), n);
    assert_non_null(strstr(text, "llmrun:generation_tokens_total{model_name=\"a\\\"b\"} 15\n"));
    assert_non_null(strstr(text, "llmrun:request_success_total{model_name=\"a\\\"b\",finished_reason=\"length\"} 3\n"));
    assert_non_null(strstr(text, "llmrun:time_to_first_token_seconds_count{model_name=\"a\\\"b\"} 3\n"));
    lr_free(text);
    FILE *f = fopen(path, "r");
    while (fgets(line, sizeof line, f)) {
        lines++;
        last = line[0];
        if (line[0] == '{') assert_non_null(strstr(line, "\"ph\":"));
    }
    fclose(f);
    remove(path);
    assert_int_equal(last, ']');
    assert_true(lines > 30);
    assert_int_equal(lr_engine_trace(e, "/nonexistent/x", &err), LR_ENOTFOUND);
    assert_int_equal(lr_engine_trace(e, "/dev/full", &err), 0);
    lr_request_free(fx_gen(e, fx_seq(e, t, 40), 5));
    assert_int_equal(lr_engine_trace(e, NULL, &err), LR_EIO);
    assert_non_null(strstr(err.text, "/dev/full: the trace could not be written to its end: No space left"));
    lr_engine_free(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_generate),
        cmocka_unit_test(test_logits_and_score),
        cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_end_tokens),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_faults_stay_alone),
        cmocka_unit_test(test_nan_row_of_the_model),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_fork_and_rewind),
        cmocka_unit_test(test_no_allocation),
        cmocka_unit_test(test_n_th_allocation_fails),
        cmocka_unit_test(test_sampler_and_position),
        cmocka_unit_test(test_idle_and_pinned),
        cmocka_unit_test(test_config),
        cmocka_unit_test(test_metrics_and_trace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
