/* test_sample.c - sampler chains: limits, penalties, determinism, log-probabilities, errors. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <string.h>
#include "base/mass.h"
#include "base/mem.h"
#include "sample/sample.h"

static const float P5[5] = {.5f, .25f, .125f, .0625f, .0625f};
static lr_error err;

static void log_row(float *x)
{
    for (int i = 0; i < 5; i++) x[i] = logf(P5[i]);
}

/* Bits of the ids that 10000 seeds draw from the row. */
static unsigned draws(const lr_stage *st, size_t n, const float *row, int n_vocab, int *count)
{
    unsigned seen = 0;
    if (count) memset(count, 0, 5 * sizeof *count);
    for (uint64_t seed = 0; seed < 10000; seed++) {
        lr_sampler *s;
        float x[8];
        memcpy(x, row, (size_t)n_vocab * sizeof *x);
        assert_int_equal(lr_sampler_new(&s, st, n, seed, n_vocab, &err), 0);
        lr_sample_ctx c = {.seed = seed, .position = seed * 7};
        int32_t t = -1;
        assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &t, NULL, NULL, &err), 0);
        assert_in_range(t, 0, n_vocab - 1);
        seen |= 1u << t;
        if (count) count[t]++;
        lr_sampler_free(s);
    }
    return seen;
}

static unsigned one(lr_stage st)
{
    float x[5];
    log_row(x);
    return draws(&st, 1, x, 5, NULL);
}

static void limits_of_the_usual_stages(void **state)
{
    (void)state;
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_K, .n = 0}), 31);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_K, .n = -1}), 31);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_K, .n = 2}), 3);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_K, .n = 7}), 31);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_P, .a = 0}), 1);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_P, .a = .45f}), 1);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_P, .a = .55f}), 3);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_P, .a = 1}), 31);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_MIN_P, .a = 0}), 31);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_MIN_P, .a = .2f}), 7);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_MIN_P, .a = .4f}), 3);
    float t[] = {0, 1e-4f, 1e-8f, 1e-38f};
    for (int i = 0; i < 4; i++) assert_int_equal(one((lr_stage){.kind = LR_STAGE_TEMPERATURE, .a = t[i]}), 1);
}

static void large_logits_and_ties(void **state)
{
    (void)state;
    float x[5];
    log_row(x);
    for (int i = 0; i < 5; i++) x[i] += 60000;
    lr_stage st = {.kind = LR_STAGE_TEMPERATURE, .a = 1e-4f};
    assert_int_equal(draws(&st, 1, x, 5, NULL), 1);
    float tie[5] = {1, 3, 3, 2, 3};
    lr_stage greedy = {.kind = LR_STAGE_TEMPERATURE, .a = 0};
    assert_int_equal(draws(&greedy, 1, tie, 5, NULL), 2); /* the lowest id of the three */
}

static void draws_follow_the_distribution(void **state)
{
    (void)state;
    int count[5];
    float x[5], chi = 0;
    log_row(x);
    draws(NULL, 0, x, 5, count);
    for (int i = 0; i < 5; i++) {
        float e = 10000 * P5[i];
        chi += ((float)count[i] - e) * ((float)count[i] - e) / e;
    }
    assert_true(chi < 18.5f); /* 4 degrees of freedom, p = 0.001 */
}

static void penalties_count_what_they_should(void **state)
{
    (void)state;
    int32_t prompt[] = {0, 0, 3}, gen[] = {1, 1, 4};
    lr_stage st = {.kind = LR_STAGE_PENALTIES, .repetition = 1.5f, .presence = .4f, .frequency = .3f};
    float want[2][5] = {{1.33333f, -.33333f, .5f, -1.5f, -.7f}, {1.33333f, 1, .5f, -1.5f, 0}};
    for (int first = 0; first < 2; first++) {
        float x[5] = {2, 1, .5f, -1, 0};
        lr_sampler *s;
        assert_int_equal(lr_sampler_new(&s, &st, 1, 1, 5, &err), 0);
        lr_sample_ctx c = {prompt, 3, gen, first ? 0 : 3, 1, 6};
        int32_t t;
        assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &t, NULL, NULL, &err), 0);
        for (int i = 0; i < 5; i++) assert_true(fabsf(x[i] - want[first][i]) < 1e-4f);
        lr_sampler_free(s);
    }
}

/* The same penalties behind a narrowing stage give the same distribution as before it. */
static void penalties_on_candidates(void **state)
{
    (void)state;
    int32_t prompt[] = {0, 0, 3}, gen[] = {1, 1, 4};
    lr_stage pen = {.kind = LR_STAGE_PENALTIES, .repetition = 1.5f, .presence = .4f, .frequency = .3f};
    lr_stage cut = {.kind = LR_STAGE_TOP_K, .n = 4};
    lr_stage all[] = {cut, pen};
    float x[5] = {2, 1, .5f, -1, 0}, p[5];
    int32_t ids[5];
    size_t n;
    lr_sampler *s;
    assert_int_equal(lr_sampler_new(&s, all, 2, 1, 5, &err), 0);
    lr_sample_ctx c = {prompt, 3, gen, 3, 1, 6};
    assert_int_equal(lr_sampler_probs(s, x, NULL, &c, ids, p, 5, &n, &err), 0);
    assert_int_equal(n, 4);
    int32_t order[] = {0, 2, 1, 4};
    for (int i = 0; i < 4; i++) assert_int_equal(ids[i], order[i]);
    assert_true(fabsf(p[0] / p[1] - expf(1.33333f - .5f)) < 1e-3f);
    lr_sampler_free(s);
}

static void bias_ban_allow_and_minimum(void **state)
{
    (void)state;
    int32_t ban[] = {0}, force[] = {4}, allow[] = {3, 2, 3};
    float plus[] = {100};
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_BAN, .ids = ban, .n_ids = 1}), 30);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_LOGIT_BIAS, .ids = force, .values = plus, .n_ids = 1}), 16);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_ALLOW, .ids = allow, .n_ids = 3}), 12);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_MIN_TOKENS, .n = 1, .ids = ban, .n_ids = 1}), 30);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_MIN_TOKENS, .n = 0, .ids = ban, .n_ids = 1}), 31);
}

static void typical_and_sigma(void **state)
{
    (void)state;
    /* entropy 1.3 nats; surprises .69 1.39 2.08 2.77 2.77: nearest is id 1, then id 0 */
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TYPICAL, .a = .2f}), 2);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TYPICAL, .a = .7f}), 3);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TYPICAL, .a = 1}), 31);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_N_SIGMA, .a = .5f}), 1);
    assert_int_equal(one((lr_stage){.kind = LR_STAGE_TOP_N_SIGMA, .a = 1.0f}), 3);
}

static void a_mask_holds(void **state)
{
    (void)state;
    uint32_t bits = 1u << 3 | 1u << 4;
    lr_stage st = {.kind = LR_STAGE_TEMPERATURE, .a = 0};
    lr_sampler *s;
    float x[5], lp;
    lr_top top[2];
    int32_t t;
    log_row(x);
    assert_int_equal(lr_sampler_new(&s, &st, 1, 1, 5, &err), 0);
    lr_sample_ctx c = {.position = 1};
    assert_int_equal(lr_sampler_draw(s, x, &bits, &c, 2, &t, &lp, top, &err), 0);
    assert_int_equal(t, 3);
    assert_true(fabsf(lp - logf(.0625f)) < 1e-5f); /* of the full softmax */
    assert_int_equal(top[0].id, 0);
    assert_true(fabsf(top[1].logprob - logf(.25f)) < 1e-5f);
    bits = 0;
    log_row(x);
    assert_int_equal(lr_sampler_draw(s, x, &bits, &c, -1, &t, NULL, NULL, &err), LR_EINVAL);
    lr_sampler_free(s);
}

/* Narrowing from a large dense row agrees with narrowing from the whole sorted row. */
static void large_rows_narrow_exactly(void **state)
{
    (void)state;
    enum { N = 50000 };
    float *x = lr_malloc(N * sizeof *x), *p = lr_malloc(N * sizeof *p), *p2 = lr_malloc(N * sizeof *p2);
    int32_t *ids = lr_malloc(N * sizeof *ids), *ids2 = lr_malloc(N * sizeof *ids2);
    lr_stage direct[] = {{.kind = LR_STAGE_TOP_P, .a = .97f},
                         {.kind = LR_STAGE_TOP_P, .a = .2f},
                         {.kind = LR_STAGE_MIN_P, .a = .01f},
                         {.kind = LR_STAGE_TOP_K, .n = 3000}};
    for (int k = 0; k < 4; k++) {
        size_t n, n2;
        for (int pass = 0; pass < 2; pass++) {
            for (int i = 0; i < N; i++)
                x[i] = (float)(6 * lr_sample_uniform(3, (uint64_t)i, 0) * lr_sample_uniform(3, (uint64_t)i, 1));
            lr_stage all[] = {{.kind = LR_STAGE_TOP_K, .n = N - 1}, direct[k]};
            lr_sampler *s;
            assert_int_equal(lr_sampler_new(&s, pass ? all : &direct[k], pass ? 2 : 1, 1, N, &err), 0);
            lr_sample_ctx c = {.position = 1};
            assert_int_equal(
                lr_sampler_probs(s, x, NULL, &c, pass ? ids2 : ids, pass ? p2 : p, N, pass ? &n2 : &n, &err), 0);
            lr_sampler_free(s);
        }
        assert_true(n > 1 && n < N);
        assert_true(n2 >= n - 1 && n2 <= n + 1); /* the dropped last token shifts the sum a hair */
        for (size_t i = 0; i + 1 < n; i++) {
            assert_int_equal(ids[i], ids2[i]);
            assert_true(p[i] >= p[i + 1]);
        }
    }
    lr_free(x);
    lr_free(p);
    lr_free(p2);
    lr_free(ids);
    lr_free(ids2);
}

static int add_one(void *user, lr_logits *l, const lr_sample_ctx *c, lr_error *e)
{
    (void)c;
    if (*(int *)user < 0) return lr_fail(e, LR_ESCRIPT, "callback says no");
    if (l->n_cand < 0)
        l->x[4] += 10;
    else
        l->cand[l->n_cand - 1] += 10;
    return 0;
}

static void callbacks_change_the_row(void **state)
{
    (void)state;
    int on = 1;
    lr_stage st[] = {{.kind = LR_STAGE_TOP_K, .n = 3},
                     {.kind = LR_STAGE_CALLBACK, .fn = add_one, .user = &on},
                     {.kind = LR_STAGE_TEMPERATURE, .a = 0}};
    float x[5];
    log_row(x);
    assert_int_equal(draws(st, 3, x, 5, NULL), 4);
    assert_int_equal(draws(st + 1, 2, x, 5, NULL), 16);
    on = -1;
    lr_sampler *s;
    int32_t t;
    lr_sample_ctx c = {.position = 1};
    assert_int_equal(lr_sampler_new(&s, st, 3, 1, 5, &err), 0);
    assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &t, NULL, NULL, &err), LR_ESCRIPT);
    lr_sampler_free(s);
}

static void bad_input_is_refused(void **state)
{
    (void)state;
    int32_t bad[] = {5}, neg[] = {-1};
    float nanv[] = {NAN};
    lr_stage st[] = {{.kind = LR_STAGE_BAN, .ids = bad, .n_ids = 1},
                     {.kind = LR_STAGE_ALLOW, .ids = neg, .n_ids = 1},
                     {.kind = LR_STAGE_LOGIT_BIAS, .ids = neg + 0, .values = nanv, .n_ids = 1},
                     {.kind = LR_STAGE_TEMPERATURE, .a = -1},
                     {.kind = LR_STAGE_TEMPERATURE, .a = NAN},
                     {.kind = LR_STAGE_TOP_K, .n = -2},
                     {.kind = LR_STAGE_TOP_P, .a = -.1f},
                     {.kind = LR_STAGE_PENALTIES, .repetition = 0},
                     {.kind = LR_STAGE_CALLBACK}};
    lr_sampler *s = NULL;
    for (size_t i = 0; i < sizeof st / sizeof *st; i++)
        assert_int_equal(lr_sampler_new(&s, &st[i], 1, 1, 5, &err), LR_EINVAL);
    float x[5] = {NAN, NAN, NAN, NAN, NAN}, inf[5] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
    int32_t t;
    lr_sample_ctx c = {.position = 1};
    assert_int_equal(lr_sampler_new(&s, NULL, 0, 1, 5, &err), 0);
    assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &t, NULL, NULL, &err), LR_EINVAL);
    assert_int_equal(lr_sampler_draw(s, inf, NULL, &c, -1, &t, NULL, NULL, &err), LR_EINVAL);
    lr_sampler_free(s);
}

static void a_draw_allocates_nothing_and_copies_agree(void **state)
{
    (void)state;
    lr_stage st[] = {{.kind = LR_STAGE_TEMPERATURE, .a = .8f}, {.kind = LR_STAGE_TOP_P, .a = .9f}};
    lr_sampler *s, *t;
    assert_int_equal(lr_sampler_new(&s, st, 2, 42, 5, &err), 0);
    assert_int_equal(lr_sampler_copy(&t, s, &err), 0);
    uint64_t before = lr_mem_allocs();
    for (uint64_t i = 0; i < 200; i++) {
        float x[5], y[5];
        int32_t a, b;
        log_row(x);
        log_row(y);
        lr_sample_ctx c = {.seed = 42, .position = i};
        assert_int_equal(lr_sampler_draw(s, x, NULL, &c, -1, &a, NULL, NULL, &err), 0);
        assert_int_equal(lr_sampler_draw(t, y, NULL, &c, -1, &b, NULL, NULL, &err), 0);
        assert_int_equal(a, b);
    }
    assert_int_equal(lr_mem_allocs(), before);
    lr_sampler_free(s);
    lr_sampler_free(t);
}

/* The token by exact masses of all, as base/mass.h defines a draw: by ascending id, or of the fewest best that reach p
 * (by descending value, then ascending id). */
static int32_t reference_draw(const float *x, int n, float t, float p, double u)
{
    static float y[2500];
    static int32_t order[2500];
    float best = -INFINITY;
    uint64_t all = 0, sum = 0;
    int m = n;
    for (int i = 0; i < n; i++) best = x[i] > best ? x[i] : best;
    for (int i = 0; i < n; i++) {
        y[i] = t == 1.0f ? x[i] : (x[i] - best) / t;
        order[i] = i;
    }
    if (t != 1.0f) best = 0;
    for (int i = 0; i < n; i++) all += lr_mass_units(lr_mass(y[i] - best));
    if (p < 1) {
        uint64_t need = lr_mass_share(p, all);
        for (m = 0; sum < need; m++) { /* selection: few are taken */
            int at = m;
            for (int i = m; i < n; i++) {
                int32_t a = order[i], b = order[at];
                if (y[a] > y[b] || (y[a] == y[b] && a < b)) at = i;
            }
            int32_t id = order[at];
            order[at] = order[m];
            order[m] = id;
            sum += lr_mass_units(lr_mass(y[id] - best));
        }
        all = sum;
    }
    uint64_t target = lr_mass_target(u, all), seen = 0;
    int i = 0;
    while (i + 1 < m && (seen += lr_mass_units(lr_mass(y[order[i]] - best))) <= target) i++;
    return order[i];
}

/* What is known of a row at a glance never decides differently than all of it. */
static void a_glance_draws_what_exact_masses_do(void **state)
{
    (void)state;
    enum { N = 2500 };
    static float x[N], y[N];
    static const float ts[] = {1, 0.7f, 1.9f, 0.05f, 0.004f}, ps[] = {1, 0.95f, 0.5f, 0.999f};
    uint32_t r = 7;
    for (int kind = 0; kind < 4; kind++) {
        for (int i = 0; i < N; i++) {
            r = r * 1664525u + 1013904223u;
            float f = (float)(r >> 8) / 16777216.0f;
            x[i] = kind == 0 ? f * 9 : kind == 1 ? f * f * f * 30 : kind == 2 ? (float)(r >> 29) : 2.5f - f * 1e-3f;
            if (r >> 24 == 1) x[i] = -INFINITY;
        }
        for (int c = 0; c < 20; c++) {
            float t = ts[c % 5], p = ps[c / 5];
            lr_stage st[] = {{.kind = LR_STAGE_TEMPERATURE, .a = t}, {.kind = LR_STAGE_TOP_P, .a = p}};
            lr_sampler *s;
            assert_int_equal(lr_sampler_new(&s, st, 2, 11, N, &err), 0);
            for (uint64_t at = 0; at < (p < 1 && kind != 1 ? 4 : 60); at++) {
                lr_sample_ctx ctx = {.seed = 11, .position = at};
                int32_t id;
                float logprob;
                lr_top top;
                memcpy(y, x, sizeof x);
                assert_int_equal(lr_sampler_draw(s, y, NULL, &ctx, (int)(at % 3) - 1, &id, &logprob, &top, &err), 0);
                int32_t want = reference_draw(x, N, t, p, lr_sample_uniform(11, at, 0));
                if (id != want)
                    fail_msg("kind %d t %g p %g at %d: %d, expected %d", kind, (double)t, (double)p, (int)at, id, want);
                if (at % 3) assert_true(logprob <= 0 && logprob > x[id] - 40);
            }
            lr_sampler_free(s);
        }
    }
}

/* Biases, bans and penalties change what is known of a row's pieces as they change the row. */
static void edits_are_seen_in_every_piece(void **state)
{
    (void)state;
    enum { N = 1000 };
    static float x[N];
    for (int c = 0; c < 200; c++) {
        int32_t ban[40], up[2] = {c * 5 % N, (c * 7 + 3) % N}, id, best = -1;
        float by[2] = {0.2f, -3}, y[N], logprob;
        for (int i = 0; i < N; i++) x[i] = (float)((i * 37 + c * 11) % N) / N;
        for (int i = 0; i < 40; i++) ban[i] = (i * i + c * 13) % N;
        lr_stage st[] = {{.kind = LR_STAGE_LOGIT_BIAS, .ids = up, .values = by, .n_ids = 2},
                         {.kind = LR_STAGE_BAN, .ids = ban, .n_ids = 40},
                         {.kind = LR_STAGE_PENALTIES, .repetition = 1, .presence = 0.5f},
                         {.kind = LR_STAGE_TEMPERATURE, .a = c % 2 ? 0 : 1e-4f}};
        int32_t before[3] = {(999 - c * 11 % N) * 973 % N, 7, 8}; /* 37 * 973 = 1 modulo 1000 */
        lr_sample_ctx ctx = {.seed = 3, .position = 9, .generated = before, .n_generated = 3};
        memcpy(y, x, sizeof x);
        y[up[0]] += by[0];
        y[up[1]] += by[1];
        for (int i = 0; i < 40; i++) y[ban[i]] = -INFINITY;
        for (int i = 0; i < 3; i++) y[before[i]] -= 0.5f;
        for (int i = 0; i < N; i++) best = best < 0 || y[i] > y[best] ? i : best;
        lr_sampler *s;
        float raw[N];
        lr_top top[2];
        memcpy(raw, x, sizeof x);
        assert_int_equal(lr_sampler_new(&s, st, 4, 3, N, &err), 0);
        assert_int_equal(lr_sampler_draw(s, raw, NULL, &ctx, 2, &id, &logprob, top, &err), 0);
        assert_int_equal(id, best);
        double sum = 0;
        for (int i = 0; i < N; i++) sum += exp((double)x[i]);
        assert_true(fabs((double)logprob - ((double)x[id] - log(sum))) < 1e-5); /* of the row as it came */
        assert_true(top[0].id == before[0] && fabsf(x[top[0].id] - 0.999f) < 1e-6f);
        lr_sampler_free(s);
    }
}

/* A mask beside the row draws what the same row with -inf in it does, through every stage; and the log-probabilities
 * are those of exact masses, to the bit. */
static void a_mask_is_as_good_as_a_masked_row(void **state)
{
    enum { N = 2500, CHAINS = 14 };
    static float x[N], y[N];
    static uint32_t bits[N / 32 + 1];
    int32_t some[] = {5, 700, 701, 2499}, before[] = {5, 9, 700, 1301, 5};
    float by[] = {3, -2, 1, 4};
    lr_stage t = {.kind = LR_STAGE_TEMPERATURE, .a = .7f}, k = {.kind = LR_STAGE_TOP_K, .n = 20};
    lr_stage p = {.kind = LR_STAGE_TOP_P, .a = .9f},
             bias = {.kind = LR_STAGE_LOGIT_BIAS, .ids = some, .values = by, .n_ids = 4};
    lr_stage ban = {.kind = LR_STAGE_BAN, .ids = some, .n_ids = 4},
             allow = {.kind = LR_STAGE_ALLOW, .ids = some, .n_ids = 4};
    lr_stage pen = {.kind = LR_STAGE_PENALTIES, .repetition = 1.3f, .presence = .4f, .frequency = .1f};
    lr_stage chains[CHAINS][3] = {{t},
                                  {t, p},
                                  {k},
                                  {{.kind = LR_STAGE_TOP_K, .n = 1200}, t},
                                  {{.kind = LR_STAGE_MIN_P, .a = .1f}},
                                  {pen, t, k},
                                  {bias, ban, p},
                                  {t, bias, p},
                                  {allow, t},
                                  {{.kind = LR_STAGE_TYPICAL, .a = .8f}, t},
                                  {{.kind = LR_STAGE_TOP_N_SIGMA, .a = 1}},
                                  {{.kind = LR_STAGE_MIROSTAT_2, .a = 3, .b = .1f}},
                                  {{.kind = LR_STAGE_TEMPERATURE, .a = 0}},
                                  {p, {.kind = LR_STAGE_XTC, .a = .5f, .b = .1f}, t}};
    uint32_t r = 3;
    (void)state;
    for (int c = 0; c < 40 * CHAINS; c++) {
        lr_stage *st = chains[c % CHAINS];
        size_t n = 0;
        while (n < 3 && (n == 0 || st[n].a != 0 || st[n].n != 0 || st[n].n_ids || st[n].repetition != 0)) n++;
        for (int i = 0; i < N; i++) {
            r = r * 1664525u + 1013904223u;
            float f = (float)(r >> 8) / 16777216.0f;
            x[i] = c % 3 ? f * 9 : f * f * f * 30;
            uint32_t bit = 1u << i % 32, clear = c % 4 == 0 || i / 300 % 2 ? 0 : r >> 13 & 1;
            bits[i / 32] = clear ? bits[i / 32] & ~bit : bits[i / 32] | bit;
        }
        bits[5 / 32] |= 1u << 5; /* for allow */
        memcpy(y, x, sizeof x);
        double best = 0;
        uint64_t mass = 0;
        for (int i = 0; i < N; i++) best = fmax(best, (double)x[i]);
        for (int i = 0; i < N; i++) mass += lr_mass_units(lr_mass(x[i] - (float)best));
        for (int i = 0; i < N; i++)
            if (!(bits[i / 32] >> i % 32 & 1)) y[i] = -INFINITY;
        lr_sampler *s, *o;
        lr_sample_ctx ctx = {.seed = 4, .position = (uint64_t)c, .generated = before, .n_generated = 5};
        int32_t one, other;
        float logprob, none;
        lr_top top[3];
        assert_int_equal(lr_sampler_new(&s, st, n, 4, N, &err), 0);
        assert_int_equal(lr_sampler_new(&o, st, n, 4, N, &err), 0);
        assert_int_equal(lr_sampler_draw(o, y, NULL, &ctx, -1, &other, &none, NULL, &err), 0);
        memcpy(y, x, sizeof x);
        assert_int_equal(lr_sampler_draw(s, y, bits, &ctx, c % 2 ? 3 : -1, &one, &logprob, top, &err), 0);
        if (one != other) fail_msg("chain %d: %d, expected %d", c % CHAINS, one, other);
        assert_true(bits[one / 32] >> one % 32 & 1);
        float lse = (float)(best + log((double)mass * 0x1p-40));
        if (c % 2 && logprob != x[one] - lse)
            fail_msg("chain %d: %.9g, expected %.9g", c % CHAINS, logprob, x[one] - lse);
        lr_sampler_free(s);
        lr_sampler_free(o);
    }
}

/* A row whose peaks are told is drawn from as one whose peaks are looked for: the same token, log-probabilities and
 * row's best, or the same error, whatever stages, mask and values; and they are forgotten behind that draw. */
static void told_peaks_change_nothing(void **state)
{
    enum { N = 2500, CHAINS = 9, MASKS = 6, KINDS = 6, PIECE = 128, PIECES = (N + PIECE - 1) / PIECE };
    static float x[N], y[2][N], peaks[PIECES], kept[PIECES];
    static uint32_t bits[N / 32 + 1];
    int32_t some[] = {5, 700, 701, 2499}, before[] = {5, 9, 700, 1301, 5};
    float by[] = {3, -2, 1, 4};
    lr_stage t = {.kind = LR_STAGE_TEMPERATURE, .a = .7f}, k = {.kind = LR_STAGE_TOP_K, .n = 5};
    lr_stage chains[CHAINS][3] = {
        {t},
        {t, {.kind = LR_STAGE_TOP_P, .a = .9f}},
        {k, t},
        {{.kind = LR_STAGE_TOP_K, .n = 1200}, t},
        {{.kind = LR_STAGE_MIN_P, .a = .1f}},
        {{.kind = LR_STAGE_PENALTIES, .repetition = 1.3f, .presence = .4f, .frequency = .1f}, t, k},
        {{.kind = LR_STAGE_LOGIT_BIAS, .ids = some, .values = by, .n_ids = 4},
         {.kind = LR_STAGE_BAN, .ids = some, .n_ids = 2},
         {.kind = LR_STAGE_TOP_P, .a = .9f}},
        {{.kind = LR_STAGE_TYPICAL, .a = .8f}, t},
        {{.kind = LR_STAGE_BAN, .ids = some, .n_ids = 4}, {.kind = LR_STAGE_TOP_K, .n = 1}},
    };
    static const size_t length[CHAINS] = {1, 2, 2, 2, 1, 3, 3, 2, 2};
    uint32_t r = 3;
    (void)state;
    for (int c = 0; c < 4 * CHAINS * MASKS * KINDS; c++) {
        int chain = c % CHAINS, mask = c / CHAINS % MASKS, kind = c / CHAINS / MASKS % KINDS;
        for (int i = 0; i < N; i++) {
            r = r * 1664525u + 1013904223u;
            float f = (float)(r >> 8) / 16777216.0f;
            x[i] = kind % 2 ? f * 9 : f * f * f * 30;
            if (kind == 2) x[i] = (float)(r >> 29); /* many of the same */
            if (kind == 3 && (r >> 20 & 7) == 0) x[i] = NAN;
            if (kind == 4 && i / 400 % 2) x[i] = c & 1 ? -INFINITY : NAN;
            if (kind == 5 && c % 7 < 2) x[i] = c % 7 ? NAN : i == 1234 ? INFINITY : x[i];
            uint32_t part = r >> 13 & 1023, bit = 1u << i % 32;
            bool may = mask == 1 ? part > 50 : mask == 2 ? part > 600 : mask == 3 ? part > 1020 : mask != 4 || i > 2480;
            if (mask == 5) may = i / 200 % 3 != 0;
            bits[i / 32] = may ? bits[i / 32] | bit : bits[i / 32] & ~bit;
        }
        for (int p = 0; p < PIECES; p++) {
            peaks[p] = -INFINITY;
            for (int i = p * PIECE; i < N && i < (p + 1) * PIECE; i++) peaks[p] = x[i] > peaks[p] ? x[i] : peaks[p];
        }
        memcpy(kept, peaks, sizeof peaks);
        lr_sampler *s;
        lr_sample_ctx ctx = {.seed = 4, .position = (uint64_t)c, .generated = before, .n_generated = 5};
        int32_t id[3] = {-1, -1, -1};
        float logprob[3] = {0};
        lr_top top[3][4];
        lr_error e[2];
        int rc[3], n_top = c % 5 - 1;
        assert_int_equal(lr_sampler_new(&s, chains[chain], length[chain], 4, N, &err), 0);
        memset(top, 0, sizeof top);
        for (int told = 0; told < 3; told++) {
            memcpy(y[told % 2], x, sizeof x);
            if (told == 1) lr_sample_peaks(peaks);
            for (int p = 0; p < PIECES && told == 2; p++) peaks[p] = 1000; /* of another row, and not asked for */
            rc[told] = lr_sampler_draw(s, y[told % 2], mask ? bits : NULL, &ctx, n_top, &id[told], &logprob[told],
                                       top[told], &e[told % 2]);
            if (told == 1) assert_memory_equal(peaks, kept, sizeof peaks);
        }
        if (rc[0] != rc[1] || id[0] != id[1] || memcmp(&logprob[0], &logprob[1], sizeof *logprob) != 0)
            fail_msg("chain %d, mask %d, kind %d: %d, token %d, %.9g; told %d, %d, %.9g", chain, mask, kind, rc[0],
                     id[0], (double)logprob[0], rc[1], id[1], (double)logprob[1]);
        if (rc[0]) assert_string_equal(e[0].text, e[1].text);
        assert_memory_equal(top[0], top[1], sizeof top[0]);
        assert_int_equal(id[2], id[0]);
        lr_sampler_free(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(limits_of_the_usual_stages),
        cmocka_unit_test(large_logits_and_ties),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(penalties_count_what_they_should),
        cmocka_unit_test(penalties_on_candidates),
        cmocka_unit_test(bias_ban_allow_and_minimum),
        cmocka_unit_test(typical_and_sigma),
        cmocka_unit_test(a_mask_holds),
        cmocka_unit_test(large_rows_narrow_exactly),
        cmocka_unit_test(callbacks_change_the_row),
        cmocka_unit_test(bad_input_is_refused),
        cmocka_unit_test(a_draw_allocates_nothing_and_copies_agree),
        cmocka_unit_test(a_glance_draws_what_exact_masses_do),
        cmocka_unit_test(edits_are_seen_in_every_piece),
        cmocka_unit_test(a_mask_is_as_good_as_a_masked_row),
        cmocka_unit_test(told_peaks_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
