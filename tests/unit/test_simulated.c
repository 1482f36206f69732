/* test_simulated.c - the simulated model: its clock and costs, and that coasting is the same as single steps. */
#include "engine_fixture.h"
#include "model/simulated.h"
#include <math.h>

static const lr_sim_cost plain = {.n_points = 2, .rows = {1, 100}, .seconds = {1, 100}};

static lr_model *model_of(const lr_sim_cost *cost)
{
    lr_model *m;
    lr_error err;
    lr_vocab *v = fx_vocab();
    lr_sim_config c = {.n_ctx = 512, .token_bytes = 8, .cost = *cost, .vocab = v};
    if (lr_simulated_new(&m, &c, &err)) fail_msg("%s", err.text);
    lr_vocab_unref(v);
    return m;
}

static lr_engine *engine_of(const lr_sim_cost *cost, int blocks, int seqs)
{
    lr_engine *e;
    lr_error err;
    lr_model *m = model_of(cost);
    lr_engine_config c = lr_engine_defaults();
    c.kv_blocks[0] = blocks;
    c.block_size = 4;
    c.max_seqs = seqs;
    c.max_batch_tokens = 24;
    c.now = lr_simulated_now;
    c.now_user = m;
    if (lr_engine_new(&e, m, &c, &err)) fail_msg("%s", err.text);
    return e;
}

static lr_request *submit(lr_engine *e, uint64_t salt, int prompt, int output)
{
    int32_t t[400];
    for (int i = 0; i < prompt; i++) t[i] = lr_simulated_text(salt, (uint64_t)i);
    lr_request *r;
    lr_error err;
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    p.max_tokens = output;
    p.ignore_eos = p.free_seq = true;
    if (lr_request_new(e, fx_seq(e, t, prompt), &p, &r, &err)) fail_msg("%s", err.text);
    return r;
}

static void test_costs(void **state)
{
    lr_sim_cost c = {.n_points = 2,
                     .rows = {2, 4},
                     .seconds = {10, 20},
                     .step = 1000,
                     .sequence = 100,
                     .token = 0.5,
                     .decode_context = 0.25,
                     .prefill_pair = 0.125};
    lr_engine *e = engine_of(&c, 64, 4);
    const lr_model *m = lr_engine_model(e);
    lr_sim_load l = {.rows = 1};
    assert_true(lr_simulated_is(m));
    assert_true(lr_simulated_seconds(m, &l) == 1010);
    l.rows = 3;
    assert_true(lr_simulated_seconds(m, &l) == 1015);
    l.rows = 8; /* on along the last two points */
    assert_true(lr_simulated_seconds(m, &l) == 1040);
    l = (lr_sim_load){.rows = 4, .seqs = 2, .outs = 2, .context = 4, .pairs = 8};
    assert_true(lr_simulated_seconds(m, &l) == 1020 + 200 + 1 + 1 + 1);
    lr_engine_free(e);
}

static void test_cold_weights(void **state)
{
    lr_sim_cost c = {.n_points = 1,
                     .rows = {1},
                     .seconds = {1},
                     .cold_narrow = 8,
                     .cold_wide = 4,
                     .narrow_rows = 2,
                     .cool_seconds = 1e5,
                     .cold_keep = 0.5};
    lr_engine *e = engine_of(&c, 64, 4);
    lr_model *m = lr_engine_model(e);
    lr_sim_load narrow = {.rows = 2}, wide = {.rows = 3};
    assert_true(lr_simulated_seconds(m, &narrow) == 9); /* nothing has run yet */
    assert_true(lr_simulated_seconds(m, &wide) == 5);
    lr_simulated_pass(m, &wide);
    assert_true(fabs(lr_simulated_seconds(m, &narrow) - 5) < 1e-3);
    lr_simulated_pass(m, &narrow);
    assert_true(fabs(lr_simulated_seconds(m, &narrow) - 3) < 1e-3);
    lr_simulated_wait(m, lr_simulated_now(m) + 1e5 * log(2));
    assert_true(fabs(lr_simulated_seconds(m, &narrow) - (1 + 8 * 0.625)) < 1e-3); /* 1 - (1 - 0.25) / 2 */
    lr_simulated_wait(m, 1e9);
    assert_true(fabs(lr_simulated_seconds(m, &narrow) - 9) < 1e-3);
    lr_engine_free(e);
}

static void test_bad_costs(void **state)
{
    lr_sim_cost bad[] = {plain, plain, plain, plain, plain};
    const char *want[] = {"rows", "seconds[2]", "token", "rows[2]", "cold_keep"};
    bad[0].n_points = 0;
    bad[1].seconds[1] = -1;
    bad[2].token = NAN;
    bad[3].rows[1] = 1;
    bad[4].cold_keep = 1.5;
    lr_vocab *v = fx_vocab();
    for (int i = 0; i < 5; i++) {
        lr_model *m;
        lr_error err;
        lr_sim_config c = {.n_ctx = 512, .token_bytes = 8, .cost = bad[i], .vocab = v};
        assert_int_equal(lr_simulated_new(&m, &c, &err), LR_EINVAL);
        assert_non_null(strstr(err.text, want[i]));
    }
    lr_vocab_unref(v);
}

static void test_only_generates(void **state)
{
    lr_engine *e = engine_of(&plain, 64, 4);
    int32_t t[] = {1, 2, 3};
    lr_seq *s = fx_seq(e, t, 3);
    lr_req_params p = lr_req_defaults(LR_REQ_LOGITS);
    lr_request *r;
    lr_error err;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), LR_EUNSUPPORTED);
    p = lr_req_defaults(LR_REQ_GENERATE);
    p.max_tokens = 3;
    p.n_top = 2;
    assert_int_equal(lr_request_new(e, s, &p, &r, &err), LR_EUNSUPPORTED);
    r = fx_gen(e, s, 3);
    fx_run(e);
    assert_int_equal(lr_seq_len(s), 6);
    for (int i = 3; i < 6; i++) /* each token follows from the one before */
        assert_int_equal(lr_seq_tokens(s)[i], lr_simulated_next(lr_seq_tokens(s)[i - 1], i - 1));
    assert_true(lr_engine_now(e) == 3 + 1 + 1);
    lr_request_free(r);
    lr_engine_free(e);
}

/* A workload that preempts, shares prefixes and evicts; coast: steps are left out where that is possible. */
static lr_engine *workload(bool coast, double times[], int64_t *coasted)
{
    enum { N = 24 };
    lr_engine *e = engine_of(&plain, 26, 6);
    lr_request *r[N];
    lr_error err;
    *coasted = 0;
    for (int i = 0; i < N; i++) {
        r[i] = submit(e, (uint64_t)(i % 4), 8 + i * 7 % 23, 1 + i * 11 % 53);
        double until = lr_engine_now(e) + (i % 8 == 7 ? 500 : 10);
        while (lr_engine_busy(e) && (lr_engine_now(e) < until || i == N - 1)) {
            int64_t n = coast ? lr_engine_coast(e, i == N - 1 ? INFINITY : until) : 0;
            *coasted += n;
            if (n == 0 && lr_engine_step(e, &err) < 0) fail_msg("%s", err.text);
            fx_check(e);
        }
    }
    for (int i = 0; i < N; i++) {
        const lr_req_info *in = lr_request_info(r[i]);
        times[2 * i] = in->t_first;
        times[2 * i + 1] = in->t_end;
        assert_int_equal(in->state, LR_REQ_DONE);
        lr_request_free(r[i]);
    }
    return e;
}

static void test_coasting_is_stepping(void **state)
{
    double a[48], b[48];
    int64_t none, some;
    lr_engine *e = workload(false, a, &none), *f = workload(true, b, &some);
    assert_int_equal(none, 0);
    assert_true(some > 60);
    assert_memory_equal(a, b, sizeof a);
    lr_engine_info x, y;
    lr_engine_get_info(e, &x);
    lr_engine_get_info(f, &y);
    assert_memory_equal(&x, &y, sizeof x);
    const lr_metrics *m = lr_engine_metrics(e), *n = lr_engine_metrics(f);
    assert_true(m->preempt_recompute > 0);
    assert_true(m->prefix_hits > 0);
    assert_memory_equal(m, n, sizeof *m);
    lr_engine_free(e);
    lr_engine_free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_costs), cmocka_unit_test(test_cold_weights),
                                       cmocka_unit_test(test_bad_costs), cmocka_unit_test(test_only_generates),
                                       cmocka_unit_test(test_coasting_is_stepping)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
