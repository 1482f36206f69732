/* test_engine_load.c - the engine under load: prefix hits that must not be wrong, sliding windows, fairness between
 * long and short prompts, and a soak. */
#include "engine_fixture.h"
#include <malloc.h>
#include <time.h>

/* Seconds of processor time: a busy neighbour does not count. */
static double cpu_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Runs prompt t (n) for max tokens and compares with the model alone; returns the tokens that were cached. */
static int run_one(lr_engine *e, const int32_t *t, int n, int max)
{
    int32_t want[256];
    lr_error err;
    memcpy(want, t, (size_t)n * sizeof *t);
    assert_int_equal(fx_reference(fx_next, NULL, want, n, max), max);
    lr_seq *s = fx_seq(e, t, n);
    lr_request *r = fx_gen(e, s, max);
    while (lr_engine_busy(e)) lr_engine_step(e, &err);
    int cached = lr_request_info(r)->n_cached;
    assert_int_equal(lr_seq_len(s), n + max);
    assert_memory_equal(lr_seq_tokens(s), want, (size_t)(n + max) * sizeof *want);
    lr_request_free(r);
    lr_seq_free(s);
    return cached;
}

/* B27: 500 prompts, each twice, with hashes of 4 bits. */
static void test_prefix_hits_are_compared(void **state)
{
    lr_engine_config cfg = lr_engine_defaults();
    int32_t t[80];
    int cached = 0;
    cfg.hash_bits = 4;
    cfg.block_size = 4;
    cfg.kv_blocks[0] = 600;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, 0);
    fx_seed = 27;
    for (int i = 0; i < 500; i++) {
        int n = 1 + (int)fx_rnd(80);
        for (int k = 0; k < n; k++) t[k] = 3 + (int32_t)fx_rnd(2);
        run_one(e, t, n, 4);
        cached += run_one(e, t, n, 4) >= (n - 1) / 4 * 4;
    }
    assert_int_equal(cached, 500);
    fx_check(e);
    lr_engine_free(e);
}

/* B27: a salt and an adapter of the same name are different. */
static void test_namespaces(void **state)
{
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 256, 0);
    lr_seq_config cfg[] = {
        {.salt = LR_STR("x")}, {.adapter = LR_STR("x")}, {.salt = LR_STR("")}, {.salt = LR_STR("x")}};
    int32_t t[64];
    lr_error err;
    for (int i = 0; i < 64; i++) t[i] = 3 + i % 40;
    for (int i = 0; i < 4; i++) {
        lr_seq *s;
        assert_int_equal(lr_seq_new(e, &cfg[i], &s, &err), 0);
        assert_int_equal(lr_seq_append(s, t, 64, &err), 0);
        assert_int_equal(lr_seq_peek_cached(s), i < 3 ? 0 : 64);
        lr_request *r = fx_gen(e, s, 2);
        fx_run(e);
        assert_int_equal(lr_request_info(r)->n_cached, i < 3 ? 0 : 63);
        lr_seq_free(s);
    }
    lr_engine_free(e);
}

/* B28: lengths around the window, cold, warm, after others, and with the answer as part of the next prompt. */
static void test_window_and_prefix(void **state)
{
    static const int sizes[] = {1, 3, 16};
    enum { W = 24 };
    static const int lens[] = {W - 2, W - 1, W, W + 1, W + 2, 2 * W, 2 * W + 1};
    int hits = 0;
    for (int k = 0; k < 6; k++) {
        lr_engine_config cfg = lr_engine_defaults();
        int bs = cfg.block_size = sizes[k % 3];
        cfg.kv_blocks[0] = 1200 / bs;
        cfg.kv_blocks[1] = k < 3 ? 1200 / bs : 300 / bs; /* in the small one, windows of old prompts are evicted */
        cfg.chunk = k % 2 ? 7 : 512;
        lr_engine *e = fx_engine(&cfg, fx_next, NULL, 256, W);
        for (int l = 0; l < 7; l++) {
            int32_t t[128];
            int n = lens[l];
            for (int i = 0; i < n; i++) t[i] = 3 + (i * 5 + l * 11) % 40;
            assert_true(run_one(e, t, n, 8) < n - 8); /* cold, but the prompts are alike in part */
            hits += run_one(e, t, n, 8) > 0;
            for (int i = 0; i < 20; i++) {
                int32_t u[40];
                for (int j = 0; j < 40; j++) u[j] = 3 + (j * i + j + l) % 40;
                run_one(e, u, 40, 2);
            }
            hits += run_one(e, t, n, 8) > 0;
            fx_reference(fx_next, NULL, t, n, 8);
            run_one(e, t, n + 8, 8);
            fx_check(e);
        }
        lr_engine_free(e);
    }
    assert_true(hits > 40);
}

/* All side by side. */
static int everybody(void *user, lr_step *s)
{
    for (int i = 0; i < lr_step_n_running(s); i++) lr_step_run(s, lr_step_running(s, i), 64);
    for (int i = 0; i < lr_step_n_waiting(s); i++) lr_step_run(s, lr_step_waiting(s, i), 64);
    return 0;
}

/* Eight prompts that arrive together and begin alike: what they share is computed once, by the first; whether the
 * others wait for it, as the built-in rule lets them, or are in the batch already. */
static void test_alike_at_once(void **state)
{
    lr_policy p = {.name = "everybody", .schedule = everybody};
    lr_error err;
    static const int sizes[] = {1, 3, 16};
    enum { SHARED = 200, OWN = 5, MAX = 6, N = 8 };
    for (int k = 0; k < 24; k++) {
        lr_engine_config cfg = lr_engine_defaults();
        int bs = cfg.block_size = sizes[k % 3], rows = 0;
        bool beside = k >= 12;
        lr_request *r[N];
        lr_seq *s[N];
        cfg.kv_blocks[0] = 6000 / bs;
        cfg.chunk = k % 2 ? 48 : 512;
        cfg.prefix_cache = k % 12 < 9;
        lr_engine *e = fx_engine(&cfg, fx_next, NULL, 512, k % 12 < 3 ? 40 : 0);
        if (beside) assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
        for (int i = 0; i < N; i++) {
            int32_t t[SHARED + OWN];
            for (int j = 0; j < SHARED + OWN; j++) t[j] = 3 + (j < SHARED ? j * 7 : j * 3 + i * 11) % 41;
            s[i] = fx_seq(e, t, SHARED + OWN);
            r[i] = fx_gen(e, s[i], MAX);
        }
        fx_run(e);
        for (int i = 0; i < N; i++) {
            int32_t want[SHARED + OWN + MAX];
            memcpy(want, lr_seq_tokens(s[i]), (SHARED + OWN) * sizeof *want);
            fx_reference(fx_next, NULL, want, SHARED + OWN, MAX);
            assert_memory_equal(lr_seq_tokens(s[i]), want, sizeof want);
            rows += lr_request_info(r[i])->n_computed;
        }
        uint64_t joined = lr_engine_metrics(e)->prefix_joined;
        if (cfg.prefix_cache) {
            assert_in_range(rows, SHARED, SHARED + N * (OWN + MAX + bs));
            if (beside) assert_in_range(joined, (N - 1) * (SHARED - bs), (N - 1) * SHARED);
        } else {
            assert_true(rows >= N * (SHARED + OWN));
        }
        if (!cfg.prefix_cache) assert_int_equal(joined, 0);
        fx_check(e);
        lr_engine_free(e);
    }
}

static lr_request *pair[2];

/* The first gets a token at a time, the second all that it can take. */
static int unequal(void *user, lr_step *s)
{
    for (int i = 0; i < 2; i++) {
        if (lr_request_active(pair[i])) lr_step_run(s, pair[i], i ? 0 : 1);
    }
    return 0;
}

/* Nobody waits for one that computes less than half of what it could do itself. */
static void test_no_waiting_for_the_slow(void **state)
{
    lr_engine_config cfg = lr_engine_defaults();
    lr_policy p = {.name = "unequal", .schedule = unequal};
    lr_error err;
    int32_t t[200];
    cfg.block_size = 1;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 512, 0);
    for (int j = 0; j < 200; j++) t[j] = 3 + j * 7 % 41;
    for (int i = 0; i < 2; i++) pair[i] = fx_gen(e, fx_seq(e, t, 200), 2);
    assert_int_equal(lr_engine_set_policy(e, &p, &err), 0);
    lr_engine_step(e, &err);
    assert_int_equal(lr_request_info(pair[1])->n_generated, 1);
    assert_int_equal(lr_engine_metrics(e)->prefix_joined, 0);
    assert_int_equal(lr_engine_set_policy(e, NULL, &err), 0);
    fx_run(e);
    assert_true(lr_request_info(pair[0])->n_computed < 10);
    lr_engine_free(e);
}

/* ---- fairness, on a clock of our own: a step takes 5 ms and 0.2 ms a row ---- */

static double fake_now(void *user) { return *(double *)user; }

static double step_cost(int rows) { return 0.005 + 0.0002 * rows; }

static int32_t long_prompt[6000];

/* Seconds from now until r ends its prompt, with nothing else to do. */
static double prefill_alone(void)
{
    double clock = 0;
    lr_engine_config cfg = lr_engine_defaults();
    lr_error err;
    cfg.now = fake_now;
    cfg.now_user = &clock;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 8192, 0);
    lr_request *r = fx_gen(e, fx_seq(e, long_prompt, 6000), 2);
    while (lr_request_info(r)->n_generated == 0) clock += step_cost(lr_engine_step(e, &err));
    lr_engine_free(e);
    return clock;
}

/* B31 */
static void test_long_prompt_stops_nobody(void **state)
{
    double clock = 0, t_long = 0, t_short = 0, start, last = 0, gap = 0;
    lr_engine_config cfg = lr_engine_defaults();
    lr_error err;
    cfg.now = fake_now;
    cfg.now_user = &clock;
    for (int i = 0; i < 6000; i++) long_prompt[i] = 3 + i * 7 % 41;
    double alone = prefill_alone();
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 8192, 0);
    lr_request *d[4], *l = NULL, *s = NULL;
    for (int i = 0; i < 4; i++) d[i] = fx_gen(e, fx_seq(e, long_prompt + 50 * i, 20), 2000);
    for (int i = 0; i < 20; i++) clock += step_cost(lr_engine_step(e, &err));
    int32_t tiny[10];
    for (int i = 0; i < 10; i++) tiny[i] = 40 - i;
    start = clock;
    l = fx_gen(e, fx_seq(e, long_prompt, 6000), 2);
    while (t_long == 0 || t_short == 0) {
        int before = lr_request_info(d[3])->n_generated;
        if (!s && clock > start + 1) s = fx_gen(e, fx_seq(e, tiny, 10), 2);
        clock += step_cost(lr_engine_step(e, &err));
        for (int i = 0; i < 4; i++)
            assert_int_equal(lr_request_info(d[i])->n_generated, before + 1); /* in every step */
        if (last > 0 && clock - last > gap) gap = clock - last;
        last = clock;
        if (t_long == 0 && lr_request_info(l)->n_generated) t_long = clock - start;
        if (s && t_short == 0 && lr_request_info(s)->n_generated) t_short = clock - start;
    }
    assert_true(gap <= 3 * step_cost(4) + 512 * 0.0002);
    assert_true(t_short < t_long && t_short < 1.4);
    assert_true(t_long <= 1.25 * alone);
    lr_engine_free(e);
}

/* B31: short requests that keep coming starve nobody. */
static void test_many_short_ones(void **state)
{
    double clock = 0, next = 0, worst = 0;
    lr_engine_config cfg = lr_engine_defaults();
    lr_error err;
    cfg.now = fake_now;
    cfg.now_user = &clock;
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 8192, 0);
    lr_request *l = fx_gen(e, fx_seq(e, long_prompt, 6000), 20), *s[200];
    int n = 0;
    while (lr_engine_busy(e) || n < 200) {
        if (n < 200 && clock >= next) {
            int32_t t[10];
            for (int i = 0; i < 10; i++) t[i] = 3 + (n + i) % 40;
            s[n++] = fx_gen(e, fx_seq(e, t, 10), 5);
            next += 0.05;
        }
        clock += step_cost(lr_engine_step(e, &err));
    }
    for (int i = 0; i < 200; i++) {
        const lr_req_info *r = lr_request_info(s[i]);
        assert_int_equal(r->state, LR_REQ_DONE);
        if (r->t_first - r->t_arrival > worst) worst = r->t_first - r->t_arrival;
    }
    assert_true(worst < 0.5);
    assert_int_equal(lr_request_info(l)->state, LR_REQ_DONE);
    assert_true(lr_request_info(l)->t_first - lr_request_info(l)->t_arrival < 3);
    lr_engine_free(e);
}

/* Eight prompts that come together end one after another, and the last not much later than in steps of all rows; their
 * first tokens come in little more than half of its time, on average. */
static void test_burst(void **state)
{
    enum { N = 8, LEN = 70 };
    double sum[2] = {0}, last[2] = {0};
    for (int k = 0; k < 2; k++) {
        double clock = 0, first[N] = {0};
        lr_engine_config cfg = lr_engine_defaults();
        lr_error err;
        lr_request *r[N];
        cfg.now = fake_now;
        cfg.now_user = &clock;
        cfg.prompt_rows = k ? 512 : 0;
        cfg.prefix_cache = false;
        lr_engine *e = fx_engine(&cfg, fx_next, NULL, 512, 0);
        for (int i = 0; i < N; i++) r[i] = fx_gen(e, fx_seq(e, long_prompt + 300 * i, LEN), 20);
        while (lr_engine_busy(e)) {
            clock += step_cost(lr_engine_step(e, &err));
            for (int i = 0; i < N; i++)
                if (first[i] == 0 && lr_request_info(r[i])->n_generated) first[i] = clock;
        }
        for (int i = 0; i < N; i++) {
            if (k == 0 && i > 0) assert_true(first[i] > first[i - 1]);
            sum[k] += first[i] / N;
        }
        last[k] = first[N - 1];
        lr_engine_free(e);
    }
    assert_true(sum[0] < 0.65 * last[0]);
    assert_true(sum[0] < 0.9 * sum[1]);
    assert_true(last[0] < 1.4 * last[1]);
}

/* ---- soak ---- */

static int soak_eos = 15;

typedef struct load {
    lr_engine *e;
    lr_request *r[256];
    lr_seq *kept[8];
    int submitted, ended;
} load;

static void arrive(load *l)
{
    int32_t t[64];
    lr_seq *s;
    lr_error err;
    int slot = 0;
    while (slot < 256 && l->r[slot]) slot++;
    if (slot == 256) return;
    lr_seq **kept = &l->kept[fx_rnd(8)];
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    if (*kept && fx_rnd(4) == 0) {
        assert_int_equal(lr_seq_fork(*kept, &s, &err), 0);
    } else {
        int n = 4 + (int)fx_rnd(28), family = (int)fx_rnd(5);
        for (int i = 0; i < n; i++) t[i] = i < n - 3 ? 3 + (family * 9 + i) % 40 : 3 + (int32_t)fx_rnd(40);
        s = fx_seq(l->e, t, n);
        if (fx_rnd(50) == 0) {
            lr_seq_free(*kept);
            assert_int_equal(lr_seq_fork(s, kept, &err), 0);
        }
    }
    p.max_tokens = 1 + (int)fx_rnd(24);
    p.priority = (int)fx_rnd(5);
    p.free_seq = true;
    if (lr_request_new(l->e, s, &p, &l->r[slot], &err)) fail_msg("%s", err.text);
    if (fx_rnd(30) == 0) lr_request_inject(l->r[slot], fx_rnd(2) ? LR_FAULT_SWAP : LR_FAULT_NAN, (int)fx_rnd(4));
    l->submitted++;
}

static void soak(load *l, int upto)
{
    lr_error err;
    unsigned what;
    while (l->submitted < upto || lr_engine_busy(l->e)) {
        for (int k = (int)fx_rnd(12); k > 0 && l->submitted < upto; k--) arrive(l);
        lr_engine_step(l->e, &err);
        if (fx_rnd(64) == 0) fx_check(l->e);
        lr_request *r = l->r[fx_rnd(256)];
        if (r && fx_rnd(4) == 0) lr_request_cancel(r);
        while (lr_engine_next_event(l->e, &what)) {
        }
        for (int i = 0; i < 256; i++) {
            if (!l->r[i] || lr_request_active(l->r[i])) continue;
            l->ended++;
            lr_request_free(l->r[i]);
            l->r[i] = NULL;
        }
    }
    for (int i = 0; i < 8; i++) {
        lr_seq_free(l->kept[i]);
        l->kept[i] = NULL;
    }
    lr_engine_drop_cached(l->e);
}

static void test_soak(void **state)
{
    load l = {0};
    lr_engine_config cfg = lr_engine_defaults();
    lr_engine_info info;
    cfg.block_size = 3;
    cfg.max_seqs = 48;
    cfg.kv_blocks[0] = 48 * 60 / 3 / 8; /* an eighth of what 48 sequences of 60 tokens need */
    l.e = fx_engine(&cfg, fx_next, &soak_eos, 256, 0);
    fx_seed = 99;
    double t0 = cpu_time();
    soak(&l, 2000);
    size_t before = mallinfo2().uordblks;
    soak(&l, 10000);
    size_t after = mallinfo2().uordblks;
    print_message(
        "soak: %.1f s, %llu preemptions, %llu steps\n", cpu_time() - t0,
        (unsigned long long)(lr_engine_metrics(l.e)->preempt_recompute + lr_engine_metrics(l.e)->preempt_swap),
        (unsigned long long)lr_engine_metrics(l.e)->steps);
    assert_int_equal(l.ended, 10000);
    assert_true(after <= before + 32768); /* the allocator's own caches vary */
    const lr_metrics *m = lr_engine_metrics(l.e);
    assert_int_equal(m->finished[1] + m->finished[2] + m->finished[3] + m->finished[4], 10000);
    assert_true(m->preempt_recompute > 100 && m->finished[LR_FINISH_CANCELLED] > 100 &&
                m->finished[LR_FINISH_ERROR] > 50);
    lr_engine_get_info(l.e, &info);
    assert_int_equal(info.kv[0].free, info.kv[0].total);
    assert_int_equal(info.n_seqs + info.n_running + info.n_waiting, 0);
    assert_int_equal(info.swapped, 0);
    fx_check(l.e);
    lr_engine_free(l.e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prefix_hits_are_compared),
        cmocka_unit_test(test_namespaces),
        cmocka_unit_test(test_window_and_prefix),
        cmocka_unit_test(test_alike_at_once),
        cmocka_unit_test(test_no_waiting_for_the_slow),
        cmocka_unit_test(test_long_prompt_stops_nobody),
        cmocka_unit_test(test_many_short_ones),
        cmocka_unit_test(test_burst),
        cmocka_unit_test(test_soak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
