/* test_sample_more.c - stages that look at entropy, history and earlier draws: by hand, on large rows, in copies, with
 * bad settings. The table of reference values is tests/spec/samplers_spec.lua's. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/mem.h"
#include "sample/sample.h"

enum { BIG = 50000, LEARN = 40 };

static lr_error err;

static lr_sampler *make(const lr_stage *st, size_t n, int n_vocab)
{
    lr_sampler *s = NULL;
    assert_int_equal(lr_sampler_new(&s, st, n, 11, n_vocab, &err), 0);
    return s;
}

/* The distribution of one stage over a row of n logits, by id. */
static void probs(lr_stage st, const float *row, int n, const lr_sample_ctx *c, float *by_id)
{
    float *x = malloc((size_t)n * sizeof *x), *p = malloc((size_t)n * sizeof *p);
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    size_t got = 0;
    lr_sampler *s = make(&st, 1, n);
    memcpy(x, row, (size_t)n * sizeof *x);
    assert_int_equal(lr_sampler_probs(s, x, NULL, c, ids, p, (size_t)n, &got, &err), 0);
    for (int i = 0; i < n; i++) by_id[i] = 0;
    for (size_t i = 0; i < got; i++) by_id[ids[i]] = p[i];
    lr_sampler_free(s);
    free(x);
    free(p);
    free(ids);
}

static void xtc_leaves_the_least_of_the_best(void **state)
{
    (void)state;
    const float row[5] = {logf(.4f), logf(.3f), logf(.2f), logf(.06f), logf(.04f)};
    lr_sample_ctx c = {.seed = 1};
    float p[5];
    probs((lr_stage){.kind = LR_STAGE_XTC, .a = 1, .b = .15f}, row, 5, &c, p);
    assert_true(p[0] == 0 && p[1] == 0);
    assert_float_equal(p[2], .2 / .3, 1e-5);
    probs((lr_stage){.kind = LR_STAGE_XTC, .a = 1, .b = .35f}, row, 5, &c, p); /* one alone is no choice */
    assert_float_equal(p[0], .4, 1e-5);
    probs((lr_stage){.kind = LR_STAGE_XTC, .a = 1, .b = .51f}, row, 5, &c, p);
    assert_float_equal(p[0], .4, 1e-5);
    int struck = 0;
    for (uint64_t seed = 0; seed < 2000; seed++) {
        c.seed = seed;
        probs((lr_stage){.kind = LR_STAGE_XTC, .a = .25f, .b = .1f}, row, 5, &c, p);
        struck += p[0] == 0;
    }
    assert_in_range(struck, 430, 570);
}

static void dry_penalises_the_continuation(void **state)
{
    (void)state;
    const int32_t seen[] = {1, 2, 3, 4, 0, 1, 2, 3};
    const float row[6] = {0, 0, 0, 0, 0, 0};
    const int32_t breaker[] = {2};
    lr_sample_ctx c = {.prompt = seen, .n_prompt = 5, .generated = seen + 5, .n_generated = 3};
    lr_stage st = {.kind = LR_STAGE_DRY, .a = 1, .b = 2, .n = 2};
    float p[6];
    probs(st, row, 6, &c, p); /* "1 2 3" came before 4: 2^(3 - 2) */
    assert_float_equal(logf(p[0] / p[4]), 2, 1e-5);
    assert_float_equal(p[0], p[5], 1e-6);
    st.ids = breaker;
    st.n_ids = 1; /* a match of 3 alone */
    probs(st, row, 6, &c, p);
    assert_float_equal(p[0], p[4], 1e-6);
    st.n = 1;
    probs(st, row, 6, &c, p);
    assert_float_equal(logf(p[0] / p[4]), 1, 1e-5);
    st.last_n = 4; /* the 4 is out of sight */
    probs(st, row, 6, &c, p);
    assert_float_equal(p[0], p[4], 1e-6);
}

/* A long repetition with a large base costs a finite penalty; all that repeats the same token is not slow. */
static void dry_stays_finite_and_quick(void **state)
{
    (void)state;
    enum { N = 20000 };
    int32_t *same = malloc(N * sizeof *same);
    for (int i = 0; i < N; i++) same[i] = 3;
    const float row[5] = {0, 0, 0, 0, 0};
    float p[5];
    lr_sample_ctx c = {.prompt = same, .n_prompt = N};
    clock_t begin = clock();
    probs((lr_stage){.kind = LR_STAGE_DRY, .a = 5, .b = 4, .n = 2}, row, 5, &c, p);
    assert_true((double)(clock() - begin) / CLOCKS_PER_SEC < 0.5);
    assert_float_equal(p[0], .25, 1e-6);
    assert_true(p[3] == 0);
    lr_stage both[] = {{.kind = LR_STAGE_DRY, .a = 5, .b = 4, .n = 2},
                       {.kind = LR_STAGE_ALLOW, .ids = same, .n_ids = 1}};
    lr_sampler *s = make(both, 2, 5);
    float x[5] = {0};
    int32_t token = -1;
    assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &token, NULL, NULL, &err), 0); /* nothing else is allowed */
    assert_int_equal(token, 3);
    lr_sampler_free(s);
    free(same);
}

static void ngrams_do_not_come_twice(void **state)
{
    (void)state;
    const int32_t seen[] = {1, 2, 3, 1, 2, 4, 1, 2};
    const float row[6] = {0, 0, 0, 0, 0, 0};
    lr_sample_ctx c = {.generated = seen, .n_generated = 8};
    float p[6];
    probs((lr_stage){.kind = LR_STAGE_NO_REPEAT, .n = 3}, row, 6, &c, p);
    assert_true(p[3] == 0 && p[4] == 0);
    assert_float_equal(p[1], .25, 1e-6);
    probs((lr_stage){.kind = LR_STAGE_NO_REPEAT, .n = 1}, row, 6, &c, p);
    assert_float_equal(p[0], .5, 1e-6);
    probs((lr_stage){.kind = LR_STAGE_NO_REPEAT, .n = 9}, row, 6, &c, p);
    assert_float_equal(p[0], 1 / 6., 1e-6);
    /* where nothing else is left the request ends with an error, as with any ban */
    lr_stage st[] = {{.kind = LR_STAGE_ALLOW, .ids = seen + 2, .n_ids = 1}, {.kind = LR_STAGE_NO_REPEAT, .n = 1}};
    lr_sampler *s = make(st, 2, 6);
    float x[6] = {0};
    int32_t token;
    assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &token, NULL, NULL, &err), LR_EINVAL);
    lr_sampler_free(s);
}

static void dynamic_temperature_follows_entropy(void **state)
{
    (void)state;
    lr_stage st = {.kind = LR_STAGE_DYNAMIC, .a = 1, .b = .5f, .c = 1};
    lr_sample_ctx c = {0};
    float flat[4] = {1, 1, 1, 1}, sharp[4] = {30, 1, 1, 1}, p[4];
    probs(st, flat, 4, &c, p);
    assert_float_equal(p[0], .25, 1e-6);
    probs(st, sharp, 4, &c, p);
    assert_float_equal(p[0], 1, 1e-6);
    float two[4] = {0, -1, -INFINITY, -INFINITY}; /* entropy over the two that are possible */
    probs(st, two, 4, &c, p);
    double q = 1 / (1 + exp(-1)), h = -(q * log(q) + (1 - q) * log(1 - q)) / log(2), t = .5 + h;
    assert_float_equal(logf(p[0] / p[1]), 1 / t, 1e-4);
}

/* A row of many tokens whose probabilities fall like a power law. */
static void zipf_row(float *x, int n, uint32_t shuffle)
{
    for (int i = 0; i < n; i++) x[(uint32_t)i * shuffle % (uint32_t)n] = -1.1f * logf((float)i + 1);
}

/* The mean surprise of what mirostat draws comes near tau. */
static double surprise(lr_stage st, double *left)
{
    float *x = malloc(BIG * sizeof *x), *row = malloc(BIG * sizeof *row);
    double sum = 0, kept = 0;
    enum { STEPS = 400, SKIP = 100 };
    lr_sampler *s = make(&st, 1, BIG);
    zipf_row(row, BIG, 7919);
    for (uint64_t n = 0; n < STEPS; n++) {
        lr_sample_ctx c = {.position = n};
        int32_t token;
        float lp;
        memcpy(x, row, BIG * sizeof *x);
        assert_int_equal(lr_sampler_draw(s, x, NULL, &c, 0, &token, &lp, NULL, &err), 0);
        if (n >= SKIP) sum -= (double)lp / M_LN2;
    }
    int32_t *ids = malloc(BIG * sizeof *ids);
    size_t got = 0;
    lr_sample_ctx c = {0};
    memcpy(x, row, BIG * sizeof *x);
    assert_int_equal(lr_sampler_probs(s, x, NULL, &c, ids, row, BIG, &got, &err), 0);
    kept = (double)got;
    lr_sampler_free(s);
    free(ids);
    free(x);
    free(row);
    *left = kept;
    return sum / (STEPS - SKIP);
}

static void mirostat_keeps_the_surprise(void **state)
{
    (void)state;
    double left;
    for (int version = 1; version <= 2; version++) {
        lr_stage st = {.kind = version == 1 ? LR_STAGE_MIROSTAT_1 : LR_STAGE_MIROSTAT_2, .b = .1f, .n = 100};
        st.a = 3;
        double low = surprise(st, &left);
        assert_in_range((int)left, 2, 1000);
        st.a = 6;
        double high = surprise(st, &left);
        /* what is drawn is measured among those that are left, so the full row's surprise lies above tau */
        assert_true(low > 2.5 && low < 5);
        assert_true(high > 5.5 && high < 9);
        assert_true(high > low + 1.5);
    }
}

/* probs learns nothing; a copy goes on from where the original is, on its own. */
static void learning_is_by_draws_and_copied(void **state)
{
    (void)state;
    const lr_stage kinds[] = {{.kind = LR_STAGE_MIROSTAT_1, .a = 3, .b = .9f, .n = 20},
                              {.kind = LR_STAGE_MIROSTAT_2, .a = 2, .b = .9f},
                              {.kind = LR_STAGE_ADAPTIVE_P, .a = .3f, .b = .5f}};
    float row[LEARN];
    zipf_row(row, LEARN, 7);
    for (size_t k = 0; k < 3; k++) {
        lr_sampler *s = make(&kinds[k], 1, LEARN), *d = NULL;
        int32_t ids[LEARN], token;
        float before[LEARN], after[LEARN], copied[LEARN], x[LEARN];
        size_t n, m;
        lr_sample_ctx c = {0};
        for (int i = 0; i < 3; i++) {
            memcpy(x, row, sizeof x);
            assert_int_equal(lr_sampler_probs(s, x, NULL, &c, ids, before, LEARN, &n, &err), 0);
        }
        memcpy(x, row, sizeof x);
        assert_int_equal(lr_sampler_probs(s, x, NULL, &c, ids, after, LEARN, &m, &err), 0);
        assert_int_equal(n, m);
        assert_memory_equal(before, after, n * sizeof *before);
        for (uint64_t i = 0; i < 5; i++) {
            c.position = i;
            memcpy(x, row, sizeof x);
            assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &token, NULL, NULL, &err), 0);
        }
        assert_int_equal(lr_sampler_copy(&d, s, &err), 0);
        memcpy(x, row, sizeof x);
        assert_int_equal(lr_sampler_probs(s, x, NULL, &c, ids, after, LEARN, &m, &err), 0);
        assert_true(n != m || memcmp(before, after, n * sizeof *before) != 0);
        memcpy(x, row, sizeof x);
        assert_int_equal(lr_sampler_probs(d, x, NULL, &c, ids, copied, LEARN, &n, &err), 0);
        assert_int_equal(n, m);
        assert_memory_equal(after, copied, n * sizeof *after);
        for (uint64_t i = 0; i < 4; i++) {
            memcpy(x, row, sizeof x);
            assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &token, NULL, NULL, &err), 0);
        }
        memcpy(x, row, sizeof x);
        assert_int_equal(lr_sampler_probs(d, x, NULL, &c, ids, after, LEARN, &m, &err), 0);
        assert_int_equal(n, m);
        assert_memory_equal(after, copied, n * sizeof *after);
        lr_sampler_free(d);
        lr_sampler_free(s);
    }
}

/* Candidates and dense rows agree: a narrowing that narrows nothing changes no probability. */
static void dense_and_candidates_agree(void **state)
{
    (void)state;
    enum { N = 300 };
    int32_t past[60];
    float row[N], dense[N];
    for (int i = 0; i < 60; i++) past[i] = i * i % 17;
    zipf_row(row, N, 7);
    const lr_stage kinds[] = {
        {.kind = LR_STAGE_DYNAMIC, .a = 1, .b = .6f, .c = 2},     {.kind = LR_STAGE_XTC, .a = 1, .b = .02f},
        {.kind = LR_STAGE_DRY, .a = 1, .b = 1.5f, .n = 1},        {.kind = LR_STAGE_NO_REPEAT, .n = 2},
        {.kind = LR_STAGE_MIROSTAT_1, .a = 3, .b = .1f, .n = 50}, {.kind = LR_STAGE_MIROSTAT_2, .a = 2, .b = .1f},
        {.kind = LR_STAGE_ADAPTIVE_P, .a = .2f, .b = .5f}};
    lr_sample_ctx c = {.prompt = past, .n_prompt = 40, .generated = past + 40, .n_generated = 20, .position = 60};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        probs(kinds[k], row, N, &c, dense);
        lr_stage st[] = {{.kind = LR_STAGE_TYPICAL, .a = .999999f}, kinds[k]}; /* all of them, as candidates */
        lr_sampler *s = make(st, 2, N);
        int32_t ids[N];
        float p[N], x[N];
        size_t n = 0;
        memcpy(x, row, sizeof x);
        assert_int_equal(lr_sampler_probs(s, x, NULL, &c, ids, p, N, &n, &err), 0);
        for (size_t i = 0; i < n; i++) assert_float_equal(p[i], dense[ids[i]], 1e-4);
        lr_sampler_free(s);
    }
}

static void a_draw_allocates_nothing(void **state)
{
    (void)state;
    const lr_stage st[] = {{.kind = LR_STAGE_DRY, .a = 1, .b = 1.5f, .n = 1},
                           {.kind = LR_STAGE_NO_REPEAT, .n = 3},
                           {.kind = LR_STAGE_DYNAMIC, .a = 1, .b = .5f, .c = 1},
                           {.kind = LR_STAGE_XTC, .a = .5f, .b = .1f},
                           {.kind = LR_STAGE_ADAPTIVE_P, .a = .3f, .b = .5f}};
    lr_sampler *s = make(st, 5, BIG);
    float *x = malloc(BIG * sizeof *x);
    int32_t past[100], token;
    for (int i = 0; i < 100; i++) past[i] = i % 7;
    uint64_t before = lr_mem_allocs();
    for (uint64_t i = 0; i < 5; i++) {
        lr_sample_ctx c = {.prompt = past, .n_prompt = 100, .position = i};
        zipf_row(x, BIG, 7919);
        assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &token, NULL, NULL, &err), 0);
    }
    assert_int_equal(lr_mem_allocs(), before);
    lr_sampler_free(s);
    free(x);
}

static void bad_settings_are_refused(void **state)
{
    (void)state;
    const int32_t far[] = {99};
    const struct {
        lr_stage st;
        const char *text;
    } cases[] = {
        {{.kind = LR_STAGE_DYNAMIC, .a = -1, .c = 1}, "dynamic temperature = -1"},
        {{.kind = LR_STAGE_DYNAMIC, .a = 1, .b = NAN, .c = 1}, "range"},
        {{.kind = LR_STAGE_DYNAMIC, .a = 1, .b = 1, .c = 0}, "exponent"},
        {{.kind = LR_STAGE_XTC, .a = 1.5f}, "xtc: probability"},
        {{.kind = LR_STAGE_XTC, .a = NAN}, "xtc: probability"},
        {{.kind = LR_STAGE_XTC, .a = 1, .b = -1}, "xtc: threshold"},
        {{.kind = LR_STAGE_DRY, .a = -1, .b = 2}, "dry: multiplier"},
        {{.kind = LR_STAGE_DRY, .a = 1, .b = .5f}, "dry: base"},
        {{.kind = LR_STAGE_DRY, .a = 1, .b = 2, .n = -1}, "dry: allowed length"},
        {{.kind = LR_STAGE_DRY, .a = 1, .b = 2, .ids = far, .n_ids = 1}, "dry: breakers: token id 99"},
        {{.kind = LR_STAGE_NO_REPEAT, .n = -1}, "no_repeat_ngram"},
        {{.kind = LR_STAGE_NO_REPEAT, .n = 2, .last_n = -1}, "window"},
        {{.kind = LR_STAGE_MIROSTAT_1, .a = 5, .b = .1f, .n = 1}, "mirostat: m"},
        {{.kind = LR_STAGE_MIROSTAT_2, .a = INFINITY, .b = .1f}, "mirostat: tau"},
        {{.kind = LR_STAGE_MIROSTAT_2, .a = 5, .b = -1}, "mirostat: eta"},
        {{.kind = LR_STAGE_ADAPTIVE_P, .a = 2}, "adaptive_p: target"},
        {{.kind = LR_STAGE_ADAPTIVE_P, .a = .5f, .b = 1}, "adaptive_p: decay"},
        {{.kind = (lr_stage_kind)99}, "unknown sampler stage 99"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lr_sampler *s = NULL;
        assert_int_equal(lr_sampler_new(&s, &cases[i].st, 1, 0, 8, &err), LR_EINVAL);
        assert_non_null(strstr(err.text, cases[i].text));
    }
    lr_stage st[] = {{.kind = LR_STAGE_MIROSTAT_2, .a = 5, .b = .1f}, {.kind = LR_STAGE_TOP_K, .n = 3}};
    lr_sampler *s = NULL;
    assert_int_equal(lr_sampler_new(&s, st, 2, 0, 8, &err), LR_EINVAL);
    assert_non_null(strstr(err.text, "must be the last stage"));
}

static void greedy_is_known(void **state)
{
    (void)state;
    const lr_stage zero = {.kind = LR_STAGE_TEMPERATURE, .a = 0};
    const lr_stage before[] = {{.kind = LR_STAGE_XTC, .a = .5f, .b = .1f}, zero},
                   after[] = {zero, {.kind = LR_STAGE_XTC, .a = .5f, .b = .1f}},
                   dry[] = {{.kind = LR_STAGE_DRY, .a = 1, .b = 2}, zero};
    const struct {
        const lr_stage *st;
        bool greedy;
    } cases[] = {{before, false}, {after, true}, {dry, true}};
    for (size_t i = 0; i < 3; i++) {
        lr_sampler *s = make(cases[i].st, 2, 8);
        assert_int_equal(lr_sampler_is_greedy(s), cases[i].greedy);
        lr_sampler_free(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(xtc_leaves_the_least_of_the_best),
        cmocka_unit_test(dry_penalises_the_continuation),
        cmocka_unit_test(dry_stays_finite_and_quick),
        cmocka_unit_test(ngrams_do_not_come_twice),
        cmocka_unit_test(dynamic_temperature_follows_entropy),
        cmocka_unit_test(mirostat_keeps_the_surprise),
        cmocka_unit_test(learning_is_by_draws_and_copied),
        cmocka_unit_test(dense_and_candidates_agree),
        cmocka_unit_test(a_draw_allocates_nothing),
        cmocka_unit_test(bad_settings_are_refused),
        cmocka_unit_test(greedy_is_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
