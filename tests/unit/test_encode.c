/* Float32 values to blocks: byte for byte the gguf package's where it writes a type, near the best elsewhere. */
#include "base/encode.h"
#include "base/mem.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
// cmocka needs the four above first
#include <cmocka.h>

#define N 4096

static float *values, *importance, *back;
static uint8_t *blocks;

/* Roughly normal, from a counter. */
static float normal(uint32_t i)
{
    float s = 0;
    for (uint32_t k = 0; k < 12; k++) {
        uint32_t x = (i * 12 + k) * 2654435761u;
        x = (x ^ x >> 15) * 2246822519u;
        x = (x ^ x >> 13) * 3266489917u;
        s += (float)(x >> 8) / 16777216.0f;
    }
    return s - 6;
}

static int setup(void **state)
{
    values = lr_malloc(N * sizeof *values);
    importance = lr_malloc(N * sizeof *values);
    back = lr_malloc(N * sizeof *values);
    blocks = lr_malloc(N * 4);
    for (uint32_t i = 0; i < N; i++) {
        values[i] = 0.02f * normal(i);
        importance[i] = normal(i + N) * normal(i + N);
    }
    return 0;
}

static int teardown(void **state)
{
    lr_free(values);
    lr_free(importance);
    lr_free(back);
    lr_free(blocks);
    return 0;
}

/* Weighted error of type t over the values, as a share of their own square. */
static double error_of(int t, const float *w)
{
    double e = 0, all = 0;
    assert_true(lr_dtype_from_f32(t, values, w, blocks, N));
    lr_dtype_to_f32(t, blocks, back, N);
    for (int i = 0; i < N; i++) {
        double v = w ? w[i] : 1;
        e += v * (back[i] - values[i]) * (back[i] - values[i]);
        all += v * values[i] * values[i];
    }
    return e / all;
}

static void test_golden(void **state)
{
    FILE *f = fopen("tests/data/gguf/encode.bin", "rb");
    char magic[4];
    uint32_t n, head[2];
    int types = 0;
    assert_non_null(f);
    assert_int_equal(fread(magic, 1, 4, f), 4);
    assert_memory_equal(magic, "LRDE", 4);
    assert_int_equal(fread(&n, 4, 1, f), 1);
    float *x = lr_malloc(n * sizeof *x);
    uint8_t *want = lr_malloc(n * 4), *got = lr_malloc(n * 4);
    assert_int_equal(fread(x, 4, n, f), n);
    while (fread(head, 4, 2, f) == 2) {
        int t = (int)head[0];
        assert_int_equal(head[1], n / (uint32_t)lr_dtype_block(t) * (uint32_t)lr_dtype_bytes(t));
        assert_int_equal(fread(want, 1, head[1], f), head[1]);
        assert_true(lr_dtype_from_f32(t, x, NULL, got, n));
        for (uint32_t i = 0; i < head[1]; i++)
            if (got[i] != want[i]) fail_msg("%s: byte %u is %d, not %d", lr_dtype_name(t), i, got[i], want[i]);
        types++;
    }
    assert_int_equal(types, 8);
    fclose(f);
    lr_free(x);
    lr_free(want);
    lr_free(got);
}

/* Errors of normal values: what the number of levels allows. A scale or level stored in a wrong place shows at once. */
static void test_error(void **state)
{
    static const struct {
        int type;
        double most;
    } kinds[] = {{LR_Q2_K, 0.08},    {LR_Q3_K, 0.024},    {LR_Q4_K, 0.0056},   {LR_Q5_K, 0.0014},
                 {LR_Q6_K, 0.00034}, {LR_IQ4_NL, 0.0062}, {LR_IQ4_XS, 0.0064}, {LR_MXFP4, 0.016}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        double e = error_of(kinds[i].type, NULL);
        if (!(e < kinds[i].most && e > kinds[i].most / 3)) fail_msg("%s: %g", lr_dtype_name(kinds[i].type), e);
    }
}

/* With importances the weighted error falls. */
static void test_importance(void **state)
{
    static const int types[] = {LR_Q4_0, LR_Q4_1, LR_Q5_0, LR_Q5_1,   LR_Q2_K,  LR_Q3_K,
                                LR_Q4_K, LR_Q5_K, LR_Q6_K, LR_IQ4_NL, LR_IQ4_XS};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        int t = types[i];
        double with = error_of(t, importance), without = 0, all = 0;
        assert_true(lr_dtype_from_f32(t, values, NULL, blocks, N));
        lr_dtype_to_f32(t, blocks, back, N);
        for (int k = 0; k < N; k++) {
            without += importance[k] * (back[k] - values[k]) * (back[k] - values[k]);
            all += importance[k] * values[k] * values[k];
        }
        if (!(with < without / all)) fail_msg("%s: %g with, %g without", lr_dtype_name(t), with, without / all);
    }
    for (int i = 0; i < N; i++) back[i] = 0; /* no input ever moved: as without */
    assert_true(lr_dtype_from_f32(LR_Q4_K, values, back, blocks, N));
}

/* What a type holds exactly comes back as it was: values made from its own random blocks. */
static void test_exact(void **state)
{
    static const int types[] = {LR_Q4_0, LR_Q5_0, LR_Q8_0, LR_Q4_1, LR_Q5_1, LR_MXFP4, LR_F16, LR_BF16, LR_F32};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        int t = types[i];
        assert_true(lr_dtype_from_f32(t, values, NULL, blocks, N));
        lr_dtype_to_f32(t, blocks, back, N);
        float *again = lr_malloc(N * sizeof *again);
        assert_true(lr_dtype_from_f32(t, back, NULL, blocks, N));
        lr_dtype_to_f32(t, blocks, again, N);
        for (int k = 0; k < N; k++)
            if (fabsf(again[k] - back[k]) > 2e-3f * fabsf(back[k]) + 2e-5f)
                fail_msg("%s value %d: %g after %g", lr_dtype_name(t), k, (double)again[k], (double)back[k]);
        lr_free(again);
    }
}

static void test_edges(void **state)
{
#define X(e, n, name, v, b) (v), (n),
    static const int list[] = {LR_DTYPE_LIST(X)};
#undef X
    static const float scales[] = {0, 1e-40f, 1e-9f, 1e-4f, 1, 1e3f};
    for (size_t i = 0; i < sizeof list / sizeof *list; i += 2) {
        int t = list[i + 1];
        if (!lr_dtype_writable(t)) continue;
        float x[256];
        for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
            for (uint32_t k = 0; k < 256; k++) x[k] = scales[s] * normal(k);
            if (!lr_dtype_from_f32(t, x, NULL, blocks, 256)) fail_msg("%s at %g", lr_dtype_name(t), (double)scales[s]);
            lr_dtype_to_f32(t, blocks, back, 256);
            for (int k = 0; k < 256; k++) assert_true(fabsf(back[k] - x[k]) <= 2.5f * scales[s] + 1e-6f);
        }
        for (int k = 0; k < 256; k++) x[k] = 3.5f;
        assert_true(lr_dtype_from_f32(t, x, NULL, blocks, 256));
        lr_dtype_to_f32(t, blocks, back, 256);
        for (int k = 0; k < 256; k++) assert_true(fabsf(back[k] - 3.5f) < 0.6f);
        x[255] = NAN;
        assert_false(lr_dtype_from_f32(t, x, NULL, blocks, 256));
        x[255] = INFINITY;
        assert_false(lr_dtype_from_f32(t, x, NULL, blocks, 256));
        x[255] = 3e38f;
        if (t != LR_F32 && t != LR_BF16 && t != LR_MXFP4) assert_false(lr_dtype_from_f32(t, x, NULL, blocks, 256));
    }
    assert_false(lr_dtype_writable(LR_I8));
    assert_false(lr_dtype_writable(5));
    assert_false(lr_dtype_writable(-1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden), cmocka_unit_test(test_error),
                                       cmocka_unit_test(test_importance), cmocka_unit_test(test_exact),
                                       cmocka_unit_test(test_edges)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
