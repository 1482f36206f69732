/* test_rows.c - the row kernels of every instruction set of this machine against float64 formulas: odd lengths, numbers
 * at the ends of the range, accuracy of exp and tanh, in-place use, and an element's independence of its place.
 */
#include "backend/backend.h"
#include "cpu/fill.h"
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static lr_cpu_kernels tables[3];
static int n_tables;
static uint32_t seed = 7;

static float rnd(void) /* -1 .. 1 */
{
    seed = seed * 1664525u + 1013904223u;
    return (float)(int32_t)seed / 2147483648.0f;
}

#define N_MAX 1100
static float xa[N_MAX], xb[N_MAX], xc[N_MAX], out[N_MAX + 1];
static double want[N_MAX];
static const int lengths[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 95, 576, 1000, 1099};
#define EACH_N(n) for (int ni = 0, n = 0; ni < 17 && (n = lengths[ni]); ni++)

static void fill(int n, float size)
{
    for (int i = 0; i < n; i++) xa[i] = rnd() * size, xb[i] = rnd() * size, xc[i] = rnd();
    out[n] = 123; /* a write past the end shows */
}

/* |out - want| <= rel * |want| + tiny for all n */
static void near(const char *what, const char *table, int n, double rel, double tiny)
{
    for (int i = 0; i < n; i++) {
        double e = fabs(out[i] - want[i]);
        if (!(e <= rel * fabs(want[i]) + tiny)) {
            fail_msg("%s %s n %d at %d: %.9g, expected %.9g", table, what, n, i, (double)out[i], want[i]);
        }
    }
    assert_true(out[n] == 123);
}

static void test_norms(void **state)
{
    static const float sizes[] = {1, 1e20f, 1e-20f, 1e-3f, 3e38f};
    static const float epss[] = {1e-5f, 0};
    for (int t = 0; t < n_tables; t++) {
        EACH_N(n)
        for (int s = 0; s < 10; s++) {
            float size = sizes[s / 2], eps = epss[s % 2];
            fill(n, size);
            double ss = 0, mean = 0, var = 0;
            for (int i = 0; i < n; i++) ss += (double)xa[i] * xa[i], mean += xa[i] / (double)n;
            for (int i = 0; i < n; i++) var += (xa[i] - mean) * (xa[i] - mean);
            double r = 1 / sqrt(ss / n + eps), rv = 1 / sqrt(var / n + eps);
            for (int i = 0; i < n; i++) want[i] = xa[i] * r * xc[i];
            tables[t].rmsnorm(xa, xc, out, n, eps);
            near("rmsnorm", tables[t].name, n, 1e-6, 0);
            for (int i = 0; i < n; i++) want[i] = xa[i] * r;
            memcpy(out, xa, sizeof(float) * (size_t)n);
            tables[t].rmsnorm(out, NULL, out, n, eps); /* in place */
            near("rmsnorm in place", tables[t].name, n, 1e-6, 0);
            if (size > 1e38f || (n == 1 && eps == 0)) continue;
            for (int i = 0; i < n; i++) want[i] = (xa[i] - mean) * rv * xc[i] + xc[n - 1 - i];
            float b[N_MAX];
            for (int i = 0; i < n; i++) b[i] = xc[n - 1 - i];
            tables[t].layernorm(xa, xc, b, out, n, eps);
            near("layernorm", tables[t].name, n, 1e-6, 1e-6);
        }
        for (int i = 0; i < 40; i++) xa[i] = 0;
        tables[t].rmsnorm(xa, NULL, out, 40, 0); /* zeros stay zeros */
        for (int i = 0; i < 40; i++) assert_true(out[i] == 0);
        tables[t].layernorm(xa, NULL, NULL, out, 40, 0);
        for (int i = 0; i < 40; i++) assert_true(out[i] == 0);
    }
}

static void test_plain(void **state)
{
    for (int t = 0; t < n_tables; t++) {
        EACH_N(n)
        {
            fill(n, 3);
            tables[t].add(xa, xb, out, n);
            for (int i = 0; i < n; i++) want[i] = xa[i] + xb[i];
            near("add", tables[t].name, n, 0, 0);
            tables[t].mul(xa, xb, out, n);
            for (int i = 0; i < n; i++) want[i] = xa[i] * xb[i];
            near("mul", tables[t].name, n, 0, 0);
            tables[t].scale(xa, 0.3f, out, n);
            for (int i = 0; i < n; i++) want[i] = xa[i] * 0.3f;
            near("scale", tables[t].name, n, 0, 0);
            memcpy(out, xb, sizeof xb);
            out[n] = 123;
            tables[t].add(xa, out, out, n);
            for (int i = 0; i < n; i++) want[i] = xa[i] + xb[i];
            near("add in place", tables[t].name, n, 0, 0);
        }
    }
}

static void test_softcap(void **state)
{
    static const float in[] = {1, 100, 5000, 1e5f, -1e5f, 65504};
    static const double to[] = {.999867, 48.201379, 50, 50, -50, 50};
    for (int t = 0; t < n_tables; t++) {
        out[6] = 123;
        tables[t].softcap(in, 50, out, 6);
        memcpy(want, to, sizeof to);
        near("softcap", tables[t].name, 6, 1e-6, 0);
        for (int k = 0; k < 200; k++) { /* tanh itself, small and large */
            fill(1000, powf(10, (float)(k % 20) / 2 - 7));
            tables[t].softcap(xa, 1, out, 1000);
            for (int i = 0; i < 1000; i++) want[i] = tanh(xa[i]);
            out[1000] = 123;
            near("tanh", tables[t].name, 1000, 4e-7, 0);
        }
    }
}

static double act_of(int act, double x)
{
    switch (act) {
    case LR_ACT_SILU:
        return x / (1 + exp(-x));
    case LR_ACT_GELU_TANH:
        return x / (1 + exp(-2 * 0.79788456080286536 * (x + 0.044715 * x * x * x)));
    case LR_ACT_GELU_ERF:
        return 0.5 * x * erfc(-x / sqrt(2));
    case LR_ACT_RELU:
        return x > 0 ? x : 0;
    case LR_ACT_SIGMOID:
        return 1 / (1 + exp(-x));
    default:
        return x > 0 ? x * x : 0;
    }
}

static void test_activations(void **state)
{
    for (int t = 0; t < n_tables; t++) {
        for (int a = LR_ACT_SILU; a <= LR_ACT_SIGMOID; a++) {
            EACH_N(n)
            {
                fill(n, ni % 3 == 0 ? 100 : 6);
                xa[0] = n == 1 ? 90 : -90;
                for (int i = 0; i < n; i++) want[i] = act_of(a, xa[i]);
                tables[t].act(a, xa, out, n);
                near("act", tables[t].name, n, a == LR_ACT_GELU_TANH ? 2e-5 : 2e-6, 1e-36);
                for (int i = 0; i < n; i++) assert_true(isfinite(out[i]));
                for (int i = 0; i < n; i++) want[i] *= xb[i];
                tables[t].glu(a, xa, xb, out, n);
                near("glu", tables[t].name, n, a == LR_ACT_GELU_TANH ? 2e-5 : 2e-6, 1e-34);
            }
            if (a == LR_ACT_SIGMOID) continue;
            float ends[4] = {FLT_MAX, -FLT_MAX, 0, -0.0f}, y[4];
            tables[t].act(a, ends, y, 4);
            assert_true(a == LR_ACT_RELU2 ? y[0] == INFINITY : y[0] == FLT_MAX);
            for (int i = 1; i < 4; i++) assert_true(y[i] == 0);
        }
    }
}

static void test_clamped_glu(void **state)
{
    for (int t = 0; t < n_tables; t++) {
        EACH_N(n)
        {
            fill(n, ni % 3 == 0 ? 100 : 6);
            for (int i = 0; i < n; i++) {
                double g = fmin(xa[i], 7), u = fmax(-7, fmin(xb[i], 7));
                want[i] = g / (1 + exp(-1.702 * g)) * (u + 1);
            }
            tables[t].glu(LR_ACT_SWIGLU_CLAMP, xa, xb, out, n);
            near("glu", tables[t].name, n, 2e-5, 1e-34);
        }
        float bad[4] = {NAN, 1, 1, 0}, up[4] = {1, NAN, 1, INFINITY}, y[4];
        tables[t].glu(LR_ACT_SWIGLU_CLAMP, bad, up, y, 4);
        assert_true(isnan(y[0]) && isnan(y[1]) && !isnan(y[2]) && y[3] == 0);
    }
}

/* exp, seen through silu: x / silu(x) - 1 = e^-x. Bounds in units of the last place. */
static void test_exp_accuracy(void **state)
{
    for (int t = 0; t < n_tables; t++) {
        double worst = 0;
        for (int k = 0; k < 300; k++) {
            for (int i = 0; i < 1000; i++) xa[i] = -20 - 67 * fabsf(rnd()); /* 1 + e^-x = e^-x here */
            tables[t].act(LR_ACT_SILU, xa, out, 1000);
            for (int i = 0; i < 1000; i++) {
                double w = xa[i] / (1 + exp(-(double)xa[i]));
                worst = fmax(worst, fabs(out[i] - w) / fabs(w) / FLT_EPSILON);
            }
        }
        if (worst > 2) fail_msg("%s: exp is off by %.2f ulp", tables[t].name, worst);
    }
}

static void test_rope(void **state)
{
    static const int dims[] = {64, 64, 80, 96, 128, 256, 24, 64, 128};
    static const int rots[] = {64, 32, 80, 96, 64, 256, 6, 2, 90};
    for (int t = 0; t < n_tables; t++) {
        for (int k = 0; k < 18; k++) {
            int dim = dims[k / 2], rot = rots[k / 2], n = 3 * dim, half = rot / 2;
            bool inter = k % 2;
            float cs[256];
            for (int i = 0; i < half; i++) cs[2 * i] = cosf((float)i), cs[2 * i + 1] = sinf((float)i);
            fill(n, 2);
            for (int h = 0; h < 3; h++) {
                const float *x = xa + h * dim;
                double *w = want + h * dim;
                for (int i = 0; i < dim; i++) w[i] = x[i];
                for (int i = 0; i < half; i++) {
                    int a = inter ? 2 * i : i, b = inter ? 2 * i + 1 : i + half;
                    w[a] = (double)x[a] * cs[2 * i] - (double)x[b] * cs[2 * i + 1];
                    w[b] = (double)x[b] * cs[2 * i] + (double)x[a] * cs[2 * i + 1];
                }
            }
            memcpy(out, xa, sizeof(float) * (size_t)n);
            tables[t].rope(out, 3, dim, rot, inter, cs);
            near(inter ? "rope, neighbours" : "rope, halves", tables[t].name, n, 1e-6, 4e-7);
        }
    }
}

/* An element's result does not depend on where in the row it stands. */
static void test_place(void **state)
{
    for (int t = 0; t < n_tables; t++) {
        fill(200, 8);
        float y[200];
        for (int a = LR_ACT_SILU; a <= LR_ACT_SIGMOID; a++) {
            tables[t].act(a, xa, out, 200);
            for (int from = 0; from < 40; from++) {
                tables[t].act(a, xa + from, y, 200 - from * 5);
                assert_memory_equal(y, out + from, sizeof(float) * (size_t)(200 - from * 5));
            }
        }
        tables[t].softcap(xa, 3, out, 200);
        tables[t].softcap(xa + 3, 3, y, 101);
        assert_memory_equal(y, out + 3, sizeof(float) * 101);
    }
}

int main(void)
{
    static lr_cpu_kernels all[3] = {{.name = "scalar"}};
    bool has[3] = {true, false, false};
    lr_rows_fill_scalar(&all[0]);
#if defined(__x86_64__)
    all[1].name = "avx2";
    all[2].name = "avx512";
    lr_rows_fill_avx2(&all[1]);
    lr_rows_fill_avx512(&all[2]);
    has[1] = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    has[2] = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
    all[1].name = "neon";
    lr_rows_fill_neon(&all[1]);
    has[1] = true;
#endif
    for (int i = 0; i < 3; i++) {
        if (has[i]) tables[n_tables++] = all[i];
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norms),       cmocka_unit_test(test_plain),       cmocka_unit_test(test_softcap),
        cmocka_unit_test(test_activations), cmocka_unit_test(test_clamped_glu), cmocka_unit_test(test_exp_accuracy),
        cmocka_unit_test(test_rope),        cmocka_unit_test(test_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
