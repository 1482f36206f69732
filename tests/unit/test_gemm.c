/* The quantized matrix product: against exact dequantization, and bit-identical whatever the company of a row.
 *
 * Weights are random blocks of each format (random integers, scales of sensible size), so every bit pattern of the
 * integers is met. Each table of kernels that this machine can run is held to the scalar one bit for bit.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "base/mem.h"
#include "cpu/cpu.h"
#include "cpu/ahead.h"
#include "cpu/gemm.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int quants[] = {LR_Q4_0, LR_Q4_1, LR_Q5_0, LR_Q5_1,   LR_Q8_0,   LR_Q2_K, LR_Q3_K,
                             LR_Q4_K, LR_Q5_K, LR_Q6_K, LR_IQ4_NL, LR_IQ4_XS, LR_MXFP4};
static const int plains[] = {LR_F32, LR_F16, LR_BF16};
#define COUNT(a) (int)(sizeof(a) / sizeof *(a))

static uint64_t seed = 88172645463325252ull;

static uint32_t rnd(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 32);
}

static float uniform(void) { return (float)(rnd() >> 8) / 8388608.0f - 1.0f; }

static float gauss(void)
{
    float s = 0;
    for (int i = 0; i < 12; i++) s += uniform();
    return s / 2;
}

static void put_half(uint8_t *p, float f)
{
    uint16_t h = lr_f32_to_f16(f);
    memcpy(p, &h, 2);
}

/* Random bytes, with the block's half-precision scales set to small numbers. */
static void random_block(int type, uint8_t *p)
{
    int n = lr_dtype_bytes(type);
    for (int i = 0; i < n; i++) p[i] = (uint8_t)rnd();
    float d = 0.01f * (1.5f + uniform()), m = 0.05f * uniform();
    switch (type) {
    case LR_F32: {
        float f = gauss();
        memcpy(p, &f, 4);
        break;
    }
    case LR_F16:
        put_half(p, gauss());
        break;
    case LR_BF16: {
        uint16_t h = lr_f32_to_bf16(gauss());
        memcpy(p, &h, 2);
        break;
    }
    case LR_Q4_1:
    case LR_Q5_1:
        put_half(p, d);
        put_half(p + 2, m);
        break;
    case LR_Q2_K:
        put_half(p + 80, d);
        put_half(p + 82, d / 3);
        break;
    case LR_Q3_K:
        put_half(p + 108, d);
        break;
    case LR_Q4_K:
    case LR_Q5_K:
        put_half(p, d / 30);
        put_half(p + 2, d / 10);
        break;
    case LR_Q6_K:
        put_half(p + 208, uniform() < 0 ? -d : d);
        break;
    case LR_MXFP4:
        p[0] = (uint8_t)(110 + rnd() % 20);
        break;
    default:
        put_half(p, uniform() < 0 ? -d : d);
    }
}

typedef struct matrix {
    lr_gemm_w w;
    uint8_t *rows;
    size_t row_bytes;
    void *packed;
} matrix;

static matrix matrix_new(int type, int n, int k)
{
    matrix a = {.w = {.type = type, .n = n, .k = k}};
    int block = lr_dtype_block(type), bytes = lr_dtype_bytes(type);
    a.row_bytes = (size_t)(k / block * bytes);
    a.rows = lr_malloc((size_t)n * a.row_bytes);
    for (size_t i = 0; i < (size_t)n * a.row_bytes; i += (size_t)bytes) random_block(type, a.rows + i);
    a.w.strip_bytes = lr_pack_strip_bytes(type, k);
    int strips = (n + LR_STRIP - 1) / LR_STRIP;
    if (a.w.strip_bytes) {
        a.packed = lr_alloc_aligned((size_t)strips * a.w.strip_bytes);
        memset(a.packed, 0xA5, (size_t)strips * a.w.strip_bytes);
        lr_pack_strips(type, a.rows, a.row_bytes, n, k, a.packed, 0, strips / 2);
        lr_pack_strips(type, a.rows, a.row_bytes, n, k, a.packed, strips / 2, strips);
        a.w.packed = true;
        a.w.data = a.packed;
    } else {
        a.w.strip_bytes = a.row_bytes;
        a.w.data = a.rows;
    }
    return a;
}

static void matrix_free(matrix *a)
{
    lr_free(a->rows);
    lr_free_aligned(a->packed);
}

/* A table that this machine can run, with the form of rows it is given. */
typedef struct variant {
    const lr_cpu_kernels *t;
    bool bf16, fine, wide;
    const char *name;
} variant;

/* Rows for a variant: bf16, 14 bits (wide), 11 bits (fine) or 8. */
static lr_qact qact_new(const variant *v, int m, int k)
{
    size_t n = (size_t)m * (size_t)k;
    lr_qact a = {.k = k, .fine = v->fine, .wide = v->wide};
    if (v->bf16) {
        a.h = lr_alloc_aligned(n * 2);
    } else {
        a.q = lr_alloc_aligned(v->fine || v->wide ? 2 * n : n);
        a.scale = lr_alloc_aligned(n / 32 * 4 + 4);
        if (!v->wide) a.xs = lr_alloc_aligned(n / 32 * 4 + 4);
        a.sum16 = lr_alloc_aligned((v->wide ? n / 8 : n / 16) * 2 + 2);
    }
    return a;
}

static void qact_free(lr_qact *a)
{
    lr_free_aligned(a->q);
    lr_free_aligned(a->scale);
    lr_free_aligned(a->xs);
    lr_free_aligned(a->sum16);
    lr_free_aligned(a->h);
}

static void assert_qact_equal(const lr_qact *a, const lr_qact *b, int m)
{
    size_t n = (size_t)m * (size_t)a->k;
    if (a->h) {
        assert_memory_equal(a->h, b->h, n * 2);
        return;
    }
    assert_memory_equal(a->q, b->q, a->fine || a->wide ? 2 * n : n);
    assert_memory_equal(a->scale, b->scale, n / (a->wide ? 256 : 32) * 4);
    if (a->xs) assert_memory_equal(a->xs, b->xs, n / 32 * 4);
    assert_memory_equal(a->sum16, b->sum16, n / (a->wide ? 8 : 16) * 2);
}

static float *random_rows(int m, int k, size_t ld)
{
    float *x = lr_alloc_aligned((size_t)m * ld * sizeof *x);
    for (int r = 0; r < m; r++)
        for (size_t i = 0; i < ld; i++)
            x[(size_t)r * ld + i] = i < (size_t)k ? gauss() * (i % 64 == 5 ? 3.0f : 1.0f) : NAN;
    return x;
}

/* Normalised mean square error of y against the product in double of dequantized weights and x. */
static double error_of(const matrix *a, const float *x, size_t ldx, int m, const float *y, size_t ldy)
{
    int k = a->w.k, n = a->w.n;
    float *wf = lr_malloc((size_t)k * sizeof *wf);
    double se = 0, ss = 0;
    for (int j = 0; j < n; j++) {
        lr_dtype_to_f32(a->w.type, a->rows + (size_t)j * a->row_bytes, wf, (size_t)k);
        for (int r = 0; r < m; r++) {
            double s = 0;
            for (int i = 0; i < k; i++) s += (double)wf[i] * x[(size_t)r * ldx + (size_t)i];
            double e = s - y[(size_t)r * ldy + (size_t)j];
            se += e * e;
            ss += s * s;
        }
    }
    lr_free(wf);
    return se / ss;
}

static variant variants[16];
static int n_variants;

static int find_variants(void **state)
{
    (void)state;
    for (const lr_cpu_kernels *const *t = lr_cpu_tables(); *t; t++) {
        if (!(*t)->supported()) continue;
        variants[n_variants++] = (variant){.t = *t, .name = (*t)->name};
        if ((*t)->fine) variants[n_variants++] = (variant){.t = *t, .fine = true, .name = "fine"};
        if ((*t)->fine) variants[n_variants++] = (variant){.t = *t, .wide = true, .name = "wide"};
        if ((*t)->bf16) variants[n_variants++] = (variant){.t = *t, .bf16 = true, .name = "bf16"};
    }
    return 0;
}

/* Rows of 14 bits are for super-blocks. */
static bool takes(const variant *v, int type) { return !v->wide || lr_pack_super(type); }

static double limit_of(const variant *v) { return v->bf16 ? 2e-5 : v->wide ? 1e-7 : v->fine ? 2e-6 : 1e-4; }

#define EACH_VARIANT(v) for (const variant *v = variants; v < variants + n_variants; v++)

static void check_error(const variant *v, int type, int n, int k, int m, double limit)
{
    if (!takes(v, type)) return;
    matrix a = matrix_new(type, n, k);
    size_t ldx = (size_t)k + 3, ldy = (size_t)n + 5;
    float *x = random_rows(m, k, ldx), *y = lr_malloc((size_t)m * ldy * sizeof *y);
    lr_qact qa = a.w.packed ? qact_new(v, m, k) : (lr_qact){0};
    if (a.w.packed) v->t->quantize(x, ldx, m, qa, 0, k);
    v->t->gemm(&a.w, &qa, x, ldx, m, y, ldy, 0, (n + 15) / 16);
    double e = error_of(&a, x, ldx, m, y, ldy);
    if (!(e < limit)) fail_msg("%s %s n %d k %d m %d: error %.2e", v->name, lr_dtype_name(type), n, k, m, e);
    if (a.w.packed) { /* quantizing piecewise gives the same bits */
        lr_qact qb = qact_new(v, m, k);
        const int step = v->wide ? 256 : 64;
        for (int c = 0; c < k; c += step) v->t->quantize(x, ldx, m, qb, c, c + step < k ? c + step : k);
        assert_qact_equal(&qa, &qb, m);
        qact_free(&qa);
        qact_free(&qb);
    }
    lr_free(y);
    lr_free_aligned(x);
    matrix_free(&a);
}

static void test_error(void **state)
{
    (void)state;
    EACH_VARIANT(v)
    {
        for (int i = 0; i < COUNT(quants); i++) {
            check_error(v, quants[i], 50, 512, 5, limit_of(v));
            check_error(v, quants[i], 33, 1280, 37, limit_of(v));
        }
        for (int i = 0; i < COUNT(plains); i++) {
            check_error(v, plains[i], 50, 511, 5, 1e-11);
            check_error(v, plains[i], 18, 64, 37, 1e-11);
            check_error(v, plains[i], 3, 7, 3, 1e-11);
        }
    }
}

/* k that is a multiple of 32 only, and the smallest. */
static void test_small_k(void **state)
{
    (void)state;
    EACH_VARIANT(v)
    for (int i = 0; i < COUNT(quants); i++) {
        if (lr_dtype_block(quants[i]) == 256) continue;
        check_error(v, quants[i], 16, 32, 3, 1e-3);
        check_error(v, quants[i], 17, 96, 20, 1e-3);
        check_error(v, quants[i], 40, 1056, 33, 1e-4);
    }
}

/* All rows in one call against row by row, other groupings, split strips, another place in memory. */
static void check_company(const variant *v, int type, int n, int k)
{
    enum { M = 70 };
    if (!takes(v, type)) return;
    matrix a = matrix_new(type, n, k), next = matrix_new(LR_Q5_K, 40, 256);
    int strips = (n + 15) / 16;
    size_t ldx = (size_t)k, ldy = (size_t)strips * 16 + 16;
    float *x = random_rows(M, k, ldx), *y = lr_malloc(M * ldy * 4), *z = lr_malloc(M * ldy * 4);
    lr_qact qa = a.w.packed ? qact_new(v, M, k) : (lr_qact){0};
    if (a.w.packed) v->t->quantize(x, ldx, M, qa, 0, k);
    memset(y, 0x7B, M * ldy * 4);
    v->t->gemm(&a.w, &qa, x, ldx, M, y, ldy, 0, strips);
    for (int round = 0; round < 40; round++) {
        int m = round < 33 ? round + 1 : 34 + (int)(rnd() % (M - 33)), r0 = (int)(rnd() % (unsigned)(M - m + 1));
        int cut = (int)(rnd() % (unsigned)(strips + 1)), cut2 = cut + (int)(rnd() % (unsigned)(strips - cut + 1));
        lr_qact qr = lr_qact_at(qa, (size_t)r0 * (size_t)k);
        const float *xr = x + (size_t)r0 * ldx;
        memset(z, 0x7B, M * ldy * 4);
        a.w.then = a.w.packed && round % 2 ? round % 4 == 1 ? &next.w : &a.w : NULL;
        a.w.then_strip = a.w.then == &a.w ? cut : 1;
        a.w.then_end = a.w.then_strip + 1;
        if (cut) v->t->gemm(&a.w, &qr, xr, ldx, m, z, ldy, 0, cut);
        if (cut2 < strips) v->t->gemm(&a.w, &qr, xr, ldx, m, z, ldy, cut2, strips);
        if (cut < cut2) v->t->gemm(&a.w, &qr, xr, ldx, m, z, ldy, cut, cut2);
        for (int r = 0; r < m; r++)
            if (memcmp(y + (size_t)(r0 + r) * ldy, z + (size_t)r * ldy, ldy * 4))
                fail_msg("%s %s: row %d differs in rows %d..%d", v->name, lr_dtype_name(type), r0 + r, r0, r0 + m - 1);
    }
    lr_free(y);
    lr_free(z);
    lr_free_aligned(x);
    if (a.w.packed) qact_free(&qa);
    matrix_free(&a);
    matrix_free(&next);
}

static void test_company(void **state)
{
    (void)state;
    EACH_VARIANT(v)
    {
        bool scalar = v->t == lr_cpu_table("scalar");
        for (int i = 0; i < COUNT(quants); i++) check_company(v, quants[i], scalar ? 18 : 77, scalar ? 256 : 1280);
        for (int i = 0; i < COUNT(plains); i++) check_company(v, plains[i], scalar ? 18 : 77, scalar ? 70 : 333);
    }
}

/* What is asked for ahead, in a place: the blocks behind the first bytes of its strips, each once, then those of its
 * part of what comes next. */
static void check_ahead(const matrix *a, int s0, int s1, int place)
{
    const lr_form f = *lr_form_of(LR_Q4_K);
    const lr_gemm_w *then = a->w.then;
    const bool all = place == LR_AHEAD_ALL;
    const int half = s0 + (s1 - s0) / 2, from = place == 1 ? half : s0, to = place == 0 ? half : s1;
    const int half2 = (a->w.then_strip + a->w.then_end) / 2, from2 = place == 1 ? half2 : a->w.then_strip;
    const int to2 = place == 0 ? half2 : a->w.then_end, own = (to - from) * 32;
    const int bytes = all ? LR_AHEAD : LR_AHEAD_NEAR, first = bytes / (int)lr_form_bytes(f);
    lr_ahead c;
    lr_ahead_begin(&c, &a->w, s0, s1, place, 0, bytes);
    for (int n = first; n < own; n++) {
        assert_true(c.own);
        assert_int_equal(c.s, from + n / 32);
        assert_int_equal(c.b, n % 32);
        assert_ptr_equal(c.at.q, (const uint8_t *)a->packed + (size_t)c.s * a->w.strip_bytes);
        lr_ahead_step(f, &c);
    }
    assert_false(c.own);
    const int over = first > own ? first - own : 0; /* begins beyond its own strips */
    const int blocks = 3;
    for (int n = over; then && n < (to2 - from2) * blocks; n++) {
        assert_int_equal(c.s, from2 + n / blocks);
        assert_int_equal(c.b, n % blocks);
        assert_ptr_equal(c.at.q, (const uint8_t *)then->data + (size_t)c.s * then->strip_bytes);
        lr_ahead_step(f, &c);
    }
    assert_null(c.at.q);
    lr_ahead_step(f, &c);
    assert_null(c.at.q);
}

/* The same by spans of 12 blocks: all strips' first 12, then their next. */
static void check_spans(const matrix *a, int s0, int s1)
{
    enum { SPAN = 12, BLOCKS = 32 };
    const lr_form f = *lr_form_of(LR_Q4_K);
    lr_ahead c;
    lr_ahead_begin(&c, &a->w, s0, s1, LR_AHEAD_ALL, SPAN, LR_AHEAD);
    int skip = LR_AHEAD / (int)lr_form_bytes(f);
    for (int from = 0; from < BLOCKS; from += SPAN)
        for (int s = s0; s < s1; s++)
            for (int b = from; b < from + SPAN && b < BLOCKS; b++) {
                if (skip-- > 0) continue;
                assert_true(c.own);
                assert_int_equal(c.s, s);
                assert_int_equal(c.b, b);
                assert_ptr_equal(c.at.q, (const uint8_t *)a->packed + (size_t)s * a->w.strip_bytes);
                lr_ahead_step(f, &c);
            }
    assert_false(c.own);
}

static void test_ahead(void **state)
{
    (void)state;
    matrix a = matrix_new(LR_Q4_K, 16 * 7, 1024), b = matrix_new(LR_Q8_0, 16 * 5 - 3, 96);
    for (int s0 = 0; s0 < 7; s0++)
        for (int with = 0; with < 2; with++)
            for (int place = LR_AHEAD_ALL; place < 2; place++) {
                a.w.then = with ? &b.w : NULL;
                a.w.then_strip = 2;
                a.w.then_end = 5;
                check_ahead(&a, s0, 7, place);
                check_spans(&a, s0, 7);
            }
    matrix_free(&a);
    matrix_free(&b);
}

/* Every table gives the scalar table's bits on rows of 8, 11 and 14 bits. */
static void check_agrees(const variant *v, int type, int n, int k, int m)
{
    const lr_cpu_kernels *ref = lr_cpu_table("scalar"), *t = v->t;
    if (!takes(v, type)) return;
    matrix a = matrix_new(type, n, k);
    size_t cells = (size_t)m * (size_t)n;
    float *x = random_rows(m, k, (size_t)k), *y = lr_calloc(cells, 4), *z = lr_calloc(cells, 4);
    lr_qact qa = qact_new(v, m, (k + 31) / 32 * 32), qb = qact_new(v, m, (k + 31) / 32 * 32);
    if (a.w.packed) {
        ref->quantize(x, (size_t)k, m, qa, 0, k);
        t->quantize(x, (size_t)k, m, qb, 0, k);
        assert_qact_equal(&qa, &qb, m);
    }
    ref->gemm(&a.w, &qa, x, (size_t)k, m, y, (size_t)n, 0, (n + 15) / 16);
    t->gemm(&a.w, &qa, x, (size_t)k, m, z, (size_t)n, 0, (n + 15) / 16);
    for (size_t e = 0; e < cells; e++)
        if (memcmp(y + e, z + e, 4))
            fail_msg("%s %s m %d: (%zu, %zu) is %.9g, not %.9g", t->name, lr_dtype_name(type), m, e / (size_t)n,
                     e % (size_t)n, (double)z[e], (double)y[e]);
    qact_free(&qa);
    qact_free(&qb);
    lr_free(y);
    lr_free(z);
    lr_free_aligned(x);
    matrix_free(&a);
}

static void test_tables_agree(void **state)
{
    (void)state;
    int ms[] = {1, 2, 3, 7, 40};
    EACH_VARIANT(v)
    for (int i = 0; !v->bf16 && i < COUNT(quants) + COUNT(plains); i++) {
        int type = i < COUNT(quants) ? quants[i] : plains[i - COUNT(quants)];
        check_agrees(v, type, 53, i < COUNT(quants) ? 768 : 301, ms[i % COUNT(ms)]);
        check_agrees(v, type, 53, i < COUNT(quants) ? 768 : 301, 41 - ms[i % COUNT(ms)]);
        /* many rows: of one chunk, longer than the usual one, and of two */
        for (int k = 576; i < COUNT(quants) && k <= 672; k += 32)
            if (!lr_pack_super(type) || k == 640) check_agrees(v, type, 53, lr_pack_super(type) ? 1024 : k, 75);
    }
}

/* Two to four rows and some more, which have ways of their own: odd numbers of strips, rows of several spans. */
static void test_few_rows(void **state)
{
    (void)state;
    EACH_VARIANT(v)
    for (int i = 0; !v->bf16 && v->t != lr_cpu_table("scalar") && i < COUNT(quants); i++)
        for (int m = 2; m <= 8; m++) {
            check_agrees(v, quants[i], m % 2 ? 101 : 112, m == 5 ? 4096 + 768 : m == 2 ? 1024 : 256 + 512 * (m % 3), m);
            if (m == 4) check_agrees(v, quants[i], 101, 8192 + 256, m);
        }
}

/* The float32 reference path is the dequantized product, for every type. */
static void test_reference(void **state)
{
    (void)state;
    for (int i = 0; i < COUNT(quants) + COUNT(plains); i++) {
        int type = i < COUNT(quants) ? quants[i] : plains[i - COUNT(quants)];
        int n = 7, k = i % 2 ? 256 : 8192 + 512, m = 19;
        if (i >= COUNT(quants)) k -= 3;
        matrix a = matrix_new(type, n, k);
        float *x = random_rows(m, k, (size_t)k), *y = lr_calloc((size_t)(m * n), 4);
        lr_gemm_f32_ref(type, a.rows, a.row_bytes, k, x, (size_t)k, m, y, (size_t)n, 0, 3);
        lr_gemm_f32_ref(type, a.rows, a.row_bytes, k, x, (size_t)k, m, y, (size_t)n, 3, n);
        double e = error_of(&a, x, (size_t)k, m, y, (size_t)n);
        if (!(e < 1e-10)) fail_msg("%s: error %.2e", lr_dtype_name(type), e);
        float one[7];
        lr_gemm_f32_ref(type, a.rows, a.row_bytes, k, x + 17 * k, (size_t)k, 1, one, (size_t)n, 0, n);
        assert_memory_equal(one, y + 17 * n, sizeof one);
        lr_free(y);
        lr_free_aligned(x);
        matrix_free(&a);
    }
}

/* Activations far beyond the usual, zero rows, and rows that are not numbers. */
/* The integer of value i of the first row. */
static int value_at(const lr_qact *a, int i)
{
    if (a->wide) return 64 * a->q[i] + a->q[a->k + i];
    if (!a->fine) return a->q[i];
    const int8_t *block = a->q + i / 32 * 64;
    return 8 * block[i % 32] + block[32 + i % 32];
}

static void check_extremes(const variant *v, int type)
{
    enum { K = 512, M = 9, N = 32 };
    if (!takes(v, type)) return;
    const int block = v->wide ? 256 : 32;
    matrix a = matrix_new(type, N, K);
    float *x = random_rows(M, K, K), y[M * N];
    for (int j = 0; j < K; j++) {
        x[1 * K + j] = 0;
        x[2 * K + j] *= 1e30f;
        x[3 * K + j] *= 1e-30f;
        x[6 * K + j] *= 1e-39f;
        x[8 * K + j] = -x[8 * K + j];
    }
    x[0 * K + 100] = 15000.0f; /* one massive activation must not blur the other blocks */
    x[4 * K + 511] = NAN;
    x[5 * K + 3] = INFINITY;
    x[7 * K + 40] = -INFINITY;
    lr_qact qa = qact_new(v, M, K);
    v->t->quantize(x, K, M, qa, 0, K);
    if (!v->bf16) {
        lr_qact ref = qact_new(v, M, K);
        lr_cpu_table("scalar")->quantize(x, K, M, ref, 0, K);
        assert_qact_equal(&qa, &ref, M);
        qact_free(&ref);
    }
    v->t->gemm(&a.w, &qa, x, K, M, y, N, 0, 2);
    for (int j = 0; j < N; j++) {
        assert_true(y[1 * N + j] == 0);
        assert_true(isfinite(y[0 * N + j]) && isfinite(y[2 * N + j]) && isfinite(y[3 * N + j]));
        assert_true(isnan(y[4 * N + j]) && !isfinite(y[5 * N + j]) && !isfinite(y[7 * N + j]));
        assert_true(y[6 * N + j] == 0);
    }
    for (int j = 0; j < K; j++) {
        if (v->bf16)
            assert_true(fabsf(lr_bf16_to_f32(qa.h[j]) - x[j]) <= fabsf(x[j]) / 256);
        else if (j / block != 100 / block)
            assert_true(fabsf((float)value_at(&qa, j) * qa.scale[j / block] - x[j]) <= 0.5001f * qa.scale[j / block]);
    }
    qact_free(&qa);
    lr_free_aligned(x);
    matrix_free(&a);
}

static void test_extremes(void **state)
{
    (void)state;
    EACH_VARIANT(v)
    for (int i = 0; i < COUNT(quants); i++) check_extremes(v, quants[i]);
}

/* Rounding is to nearest even, sums are the sums, the largest value becomes 127 (1016, 8128). */
static void test_quantize(void **state)
{
    (void)state;
    EACH_VARIANT(v)
    {
        enum { K = 512 };
        const int block = v->wide ? 256 : 32, most = v->wide ? 8128 : v->fine ? 1016 : 127;
        float x[K];
        for (int i = 0; i < K; i++) x[i] = i < block ? (float)(i % 32) - 15.5f : gauss() * 1e-3f;
        x[0] = 127;
        x[1] = -127;
        lr_qact qa = qact_new(v, 1, K);
        v->t->quantize(x, K, 1, qa, 0, K);
        for (int i = 0; v->bf16 && i < K; i++) assert_int_equal(qa.h[i], lr_f32_to_bf16(x[i]));
        if (!v->bf16) {
            assert_true(qa.scale[0] == 127.0f / (float)most);
            int sum[K / 16] = {0}, top = 0;
            for (int i = 0; i < block; i++) assert_int_equal(value_at(&qa, i), (int)rintf(x[i] * ((float)most / 127)));
            for (int i = 0; i < K; i++) sum[i / 16] += value_at(&qa, i);
            for (int i = 0; i < K / 16; i++) {
                const int16_t *s = qa.sum16 + (v->wide ? i / 2 * 4 + i % 2 : i);
                assert_int_equal(v->wide ? 64 * s[0] + s[2] : s[0], sum[i]);
            }
            for (int i = block; i < 2 * block; i++) top = abs(value_at(&qa, i)) > top ? abs(value_at(&qa, i)) : top;
            assert_int_equal(top, most);
        }
        qact_free(&qa);
    }
}

static void test_pack_bytes(void **state)
{
    (void)state;
    for (int i = 0; i < COUNT(plains); i++) assert_int_equal(lr_pack_strip_bytes(plains[i], 512), 0);
    assert_int_equal(lr_pack_strip_bytes(LR_I32, 512), 0);
    assert_int_equal(lr_pack_strip_bytes(-1, 512), 0);
    assert_int_equal(lr_pack_strip_bytes(LR_Q8_0, 48), 0);
    assert_int_equal(lr_pack_strip_bytes(LR_Q4_K, 288), 0);
    for (int i = 0; i < COUNT(quants); i++) { /* not much above the file's own size */
        size_t file = (size_t)(2560 / lr_dtype_block(quants[i]) * lr_dtype_bytes(quants[i])) * LR_STRIP;
        size_t got = lr_pack_strip_bytes(quants[i], 2560);
        assert_true(got >= file * 99 / 100 && got <= file * 104 / 100 + 64 && got % 64 == 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pack_bytes), cmocka_unit_test(test_quantize),  cmocka_unit_test(test_error),
        cmocka_unit_test(test_small_k),    cmocka_unit_test(test_company),   cmocka_unit_test(test_tables_agree),
        cmocka_unit_test(test_few_rows),   cmocka_unit_test(test_reference), cmocka_unit_test(test_ahead),
        cmocka_unit_test(test_extremes),
    };
    return cmocka_run_group_tests(tests, find_variants, NULL);
}
