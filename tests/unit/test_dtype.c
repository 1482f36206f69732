/* test_dtype.c - names, half and bfloat conversion over every value, dequantization against golden data. */
#include "base/dtype.h"
#include "base/mem.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float float_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* The definition of binary16, in double. */
static double half_value(unsigned h)
{
    double sign = h & 0x8000 ? -1 : 1;
    int e = h >> 10 & 31, m = h & 1023;
    if (e == 31) return m ? NAN : sign * INFINITY;
    return sign * (e ? ldexp(1024 + m, e - 25) : ldexp(m, -24));
}

static void test_names(void **state)
{
    assert_string_equal(lr_dtype_name(LR_Q4_K), "Q4_K");
    assert_int_equal(lr_dtype_block(LR_Q4_K), 256);
    assert_int_equal(lr_dtype_bytes(LR_Q4_K), 144);
    assert_int_equal(lr_dtype_parse("q8_0"), LR_Q8_0);
    assert_int_equal(lr_dtype_parse("BF16"), LR_BF16);
    assert_int_equal(lr_dtype_parse("q8"), -1);
    assert_int_equal(lr_dtype_parse(""), -1);
    static const int bad[] = {-1, 4, 5, 9, 16, 40, 63, 64, 1 << 30, -(1 << 30)};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_null(lr_dtype_name(bad[i]));
        assert_int_equal(lr_dtype_block(bad[i]), 0);
        assert_int_equal(lr_dtype_bytes(bad[i]), 0);
    }
#define X(e, n, name, v, b)                                                                                            \
    assert_int_equal(lr_dtype_parse(name), n);                                                                         \
    assert_string_equal(lr_dtype_name(n), name);
    LR_DTYPE_LIST(X)
#undef X
}

static void test_f16_all(void **state)
{
    for (unsigned h = 0; h < 65536; h++) {
        float f = lr_f16_to_f32((uint16_t)h);
        double want = half_value(h);
        if (isnan(want)) {
            /* sign and payload stay, the quiet bit is set: as the hardware converts */
            assert_int_equal(bits_of(f), (h & 0x8000u) << 16 | 0x7FC00000 | (h & 0x3FF) << 13);
            assert_int_equal(lr_f32_to_f16(f), h | 0x200);
        } else {
            assert_true((double)f == want && !signbit(f) == !(h & 0x8000));
            assert_int_equal(lr_f32_to_f16(f), h);
        }
    }
}

/* Around the midpoint of each pair of neighbours: below goes down, above up, the midpoint to the even one. */
static void test_f16_rounding(void **state)
{
    for (unsigned h = 0; h < 0x7C00; h++) {
        double lo = half_value(h), hi = h == 0x7BFF ? 65536 : half_value(h + 1);
        float mid = (float)((lo + hi) / 2); /* exact: 12 bits */
        unsigned even = h & 1 ? h + 1 : h;
        assert_int_equal(lr_f32_to_f16(mid), even);
        assert_int_equal(lr_f32_to_f16(-mid), even | 0x8000);
        assert_int_equal(lr_f32_to_f16(nextafterf(mid, 0)), h);
        assert_int_equal(lr_f32_to_f16(nextafterf(mid, INFINITY)), h + 1);
        assert_int_equal(lr_f32_to_f16(nextafterf((float)lo, INFINITY)), h);
        if (h) assert_int_equal(lr_f32_to_f16(nextafterf((float)lo, 0)), h);
    }
    assert_int_equal(lr_f32_to_f16(3e38f), 0x7C00);
    assert_int_equal(lr_f32_to_f16(-INFINITY), 0xFC00);
    assert_int_equal(lr_f32_to_f16(1e-40f), 0);
    assert_int_equal(lr_f32_to_f16(-1e-40f), 0x8000);
    assert_int_equal(lr_f32_to_f16(float_of(0x7F800001)), 0x7E00); /* NaN whose payload would be lost */
    assert_int_equal(lr_f32_to_f16(float_of(0xFFFFFFFF)), 0xFFFF);
}

static void test_bf16(void **state)
{
    for (unsigned h = 0; h < 65536; h++) {
        float f = lr_bf16_to_f32((uint16_t)h);
        assert_int_equal(bits_of(f), h << 16);
        bool nan = isnan(f);
        assert_int_equal(lr_f32_to_bf16(f), nan ? h | 0x40 : h);
        if (nan || isinf(f)) continue;
        uint32_t u = h << 16;
        assert_int_equal(lr_f32_to_bf16(float_of(u | 0x7FFF)), h);
        assert_int_equal(lr_f32_to_bf16(float_of(u | 0x8000)), h & 1 ? h + 1 : h);
        assert_int_equal(lr_f32_to_bf16(float_of(u | 0x8001)), h + 1);
    }
    assert_int_equal(lr_f32_to_bf16(float_of(0x7F800001)), 0x7FC0); /* must not become infinity */
}

static uint8_t *read_file(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("%s is missing (tests run from the repository root)", path);
    fseek(f, 0, SEEK_END);
    *size = (size_t)ftell(f);
    rewind(f);
    uint8_t *p = lr_malloc(*size);
    assert_non_null(p);
    assert_int_equal(fread(p, 1, *size, f), *size);
    fclose(f);
    return p;
}

/* Bit for bit; where both are NaN the payload is free (Python's depends on the machine). */
static void compare(int type, const uint8_t *raw, const uint8_t *want, size_t n)
{
    float *got = lr_malloc(n * 4);
    assert_non_null(got);
    lr_dtype_to_f32(type, raw, got, n);
    for (size_t i = 0; i < n; i++) {
        float w;
        memcpy(&w, want + 4 * i, 4);
        if (isnan(w) && isnan(got[i])) continue;
        if (bits_of(w) != bits_of(got[i]))
            fail_msg("%s value %zu: got %a, want %a", lr_dtype_name(type), i, (double)got[i], (double)w);
    }
    lr_free(got);
}

static void test_golden(void **state)
{
    size_t size, at = 4;
    uint8_t *p = read_file("tests/data/gguf/dtype.bin", &size);
    assert_memory_equal(p, "LRDT", 4);
    bool seen[LR_DTYPE_MAX] = {0};
    while (at < size) {
        uint32_t h[3];
        memcpy(h, p + at, 12);
        at += 12;
        int t = (int)h[0];
        assert_int_not_equal(lr_dtype_block(t), 0);
        assert_int_equal(h[1] / (unsigned)lr_dtype_block(t) * (unsigned)lr_dtype_bytes(t), h[2]);
        assert_true(at + h[2] + 4 * h[1] <= size);
        compare(t, p + at, p + at + h[2], h[1]);
        at += h[2] + 4 * h[1];
        seen[t] = true;
    }
    assert_int_equal(at, size);
#define X(e, n, name, v, b) assert_true(seen[n] || n == LR_I8 || n == LR_I16 || n == LR_I32);
    LR_DTYPE_LIST(X)
#undef X
    lr_free(p);
}

static void test_integers(void **state)
{
    static const int8_t a[] = {-128, -1, 0, 127};
    static const int16_t b[] = {-32768, -1, 0, 32767};
    static const int32_t c[] = {INT32_MIN, -1, 16777217, INT32_MAX};
    float y[4];
    lr_dtype_to_f32(LR_I8, a, y, 4);
    for (int i = 0; i < 4; i++) assert_true(y[i] == (float)a[i]);
    lr_dtype_to_f32(LR_I16, b, y, 4);
    for (int i = 0; i < 4; i++) assert_true(y[i] == (float)b[i]);
    lr_dtype_to_f32(LR_I32, c, y, 4);
    for (int i = 0; i < 4; i++) assert_true(y[i] == (float)c[i]);
    y[0] = 7;
    lr_dtype_to_f32(LR_Q4_K, a, y, 0); /* nothing to do, nothing touched */
    assert_true(y[0] == 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names), cmocka_unit_test(test_f16_all), cmocka_unit_test(test_f16_rounding),
        cmocka_unit_test(test_bf16),  cmocka_unit_test(test_golden),  cmocka_unit_test(test_integers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
