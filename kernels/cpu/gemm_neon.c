/* gemm_neon.c - the matrix product with Advanced SIMD and its dot product (sdot).
 *
 * A register is 4 features x 4 k; sdot by lane multiplies it with 4 activations of a row. A tile is half a strip (8
 * features) x up to TILE rows. Weights are unpacked to signed bytes (u - zero), so no correction is needed. All
 * integers are exact, so the bits are those of every table (gemm.h has the formulas).
 */
#include "cpu/gemm.h"
#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))

enum { TILE = 4, AHEAD = 4096 }; /* rows; bytes to prefetch ahead */

/* 8 features of a block: two registers of each. */
typedef struct scales_neon {
    float32x4_t s[2], m[2];
    float32x4_t sc0[2], sc1[2];
    int32x4_t t0[2], t1[2];
} scales_neon;

INLINE uint8x16_t shift(uint8x16_t x, int n) /* right, or left if negative */
{
    return n ? vshlq_u8(x, vdupq_n_s8((int8_t)-n)) : x;
}

/* Group g of a block, 4 features: signed weights. q, h: of the block, with the features' offset. */
INLINE int8x16_t values(const lr_form f, const uint8_t *q, const uint8_t *h, int g)
{
    uint8x16_t w;
    if (f.main == 8)
        w = vld1q_u8(q + 64 * g);
    else if (f.main == 4)
        w = vandq_u8(shift(vld1q_u8(q + 64 * (g % 4)), g / 4 * 4), vdupq_n_u8(15));
    else
        w = vandq_u8(shift(vld1q_u8(q + 64 * (g / 4)), 2 * (g % 4)), vdupq_n_u8(3));
    if (f.extra == 1) w = vorrq_u8(w, vandq_u8(shift(vld1q_u8(h), g - f.main), vdupq_n_u8((uint8_t)(1 << f.main))));
    if (f.extra == 2)
        w = vorrq_u8(
            w, vandq_u8(shift(vld1q_u8(h + 64 * (g / 4)), 2 * (g % 4) - f.main), vdupq_n_u8((uint8_t)(3 << f.main))));
    if (f.lut) w = vqtbl1q_u8(vld1q_u8(lr_form_lut[f.lut]), w);
    if (f.zero) w = vsubq_u8(w, vdupq_n_u8((uint8_t)f.zero));
    return vreinterpretq_s8_u8(w);
}

INLINE float32x4_t halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

INLINE void signed_bytes(const uint8_t *p, int32x4_t o[2])
{
    const int16x8_t x = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    o[0] = vmovl_s16(vget_low_s16(x));
    o[1] = vmovl_s16(vget_high_s16(x));
}

INLINE float32x4_t e8m0(int32x4_t e) /* 2^(e - 128) */
{
    const int32x4_t normal = vshlq_n_s32(vsubq_s32(e, vdupq_n_s32(1)), 23);
    const int32x4_t tiny = vshlq_s32(vdupq_n_s32(0x200000), e);
    return vreinterpretq_f32_s32(vbslq_s32(vcltq_s32(e, vdupq_n_s32(2)), tiny, normal));
}

/* Scales of block b, features 8 * half .. + 7. */
INLINE scales_neon scales_of(const lr_form f, const lr_strip *st, size_t b, int half)
{
    const size_t sb = f.super ? b / 8 : b, at = 8 * (size_t)half;
    const uint8_t *sc = st->sc + b * (size_t)(32 / f.sub) * 16 + at;
    scales_neon o;
    int32x4_t a[2], c[2];
    if (f.super) signed_bytes(sc, a);
    if (f.super && f.min && f.sub == 32) signed_bytes(st->sm + b * 16 + at, c);
    if (f.sub == 16) signed_bytes(sc + 16, c);
    for (int i = 0; i < 2; i++) {
        if (f.e8m0) {
            const uint16x8_t e = vmovl_u8(vld1_u8(st->d + sb * 16 + at));
            o.s[i] = e8m0(vreinterpretq_s32_u32(vmovl_u16(i ? vget_high_u16(e) : vget_low_u16(e))));
        } else {
            o.s[i] = halves(st->d + sb * 32 + 2 * at + 8 * (size_t)i);
        }
        if (f.min) o.m[i] = halves(st->m + sb * 32 + 2 * at + 8 * (size_t)i);
        if (f.sub == 32 && f.super) {
            o.s[i] = vmulq_f32(o.s[i], vcvtq_f32_s32(a[i]));
            if (f.min) o.m[i] = vnegq_f32(vmulq_f32(o.m[i], vcvtq_f32_s32(c[i])));
        }
        if (f.sub == 16 && !f.min) {
            o.sc0[i] = vcvtq_f32_s32(a[i]);
            o.sc1[i] = vcvtq_f32_s32(c[i]);
        }
        if (f.sub == 16 && f.min) { /* nibbles */
            const int32x4_t low = vdupq_n_s32(15);
            o.sc0[i] = vcvtq_f32_s32(vandq_s32(a[i], low));
            o.sc1[i] = vcvtq_f32_s32(vandq_s32(c[i], low));
            o.t0[i] = vandq_s32(vshrq_n_s32(a[i], 4), low);
            o.t1[i] = vandq_s32(vshrq_n_s32(c[i], 4), low);
            o.m[i] = vnegq_f32(o.m[i]);
        }
    }
    return o;
}

INLINE float32x4_t add_block(const lr_form f, const scales_neon *s, int i, float sx, const int16_t *sum, int32x4_t i0,
                             int32x4_t i1, float32x4_t acc)
{
    if (f.sub == 32) {
        acc = vfmaq_f32(acc, vcvtq_f32_s32(i0), vmulq_n_f32(s->s[i], sx));
        return f.min ? vfmaq_n_f32(acc, s->m[i], sx * (float)(sum[0] + sum[1])) : acc;
    }
    float32x4_t t = vmulq_f32(vcvtq_f32_s32(i0), s->sc0[i]);
    t = vfmaq_f32(t, vcvtq_f32_s32(i1), s->sc1[i]);
    acc = vfmaq_f32(acc, t, vmulq_n_f32(s->s[i], sx));
    if (!f.min) return acc;
    const int32x4_t j = vmlaq_n_s32(vmulq_n_s32(s->t0[i], sum[0]), s->t1[i], sum[1]);
    return vfmaq_f32(acc, vcvtq_f32_s32(j), vmulq_n_f32(s->m[i], sx));
}

/* sdot with lane `g % 4`, which must be a constant. */
INLINE int32x4_t dot(int32x4_t i, int8x16_t w, int8x16_t x, const int g)
{
    switch (g % 4) {
    case 0:
        return vdotq_laneq_s32(i, w, x, 0);
    case 1:
        return vdotq_laneq_s32(i, w, x, 1);
    case 2:
        return vdotq_laneq_s32(i, w, x, 2);
    default:
        return vdotq_laneq_s32(i, w, x, 3);
    }
}

/* nr rows of one half of a strip; n: features to store. */
INLINE void tile(const lr_form f, const int nr, const lr_strip *st, int half, const lr_qact *qa, size_t row, float *y,
                 size_t ldy, int n)
{
    const size_t k = (size_t)qa->k, blocks = k / 32;
    float32x4_t acc[TILE][2];
    for (int r = 0; r < nr; r++) acc[r][0] = acc[r][1] = vdupq_n_f32(0);
    for (size_t b = 0; b < blocks; b++) {
        const uint8_t *q = st->q + b * (size_t)f.main * 64 + 32 * half,
                      *h = st->h + b * (size_t)f.extra * 64 + 32 * half;
        int32x4_t i0[TILE][2], i1[TILE][2];
        int8x16_t x[TILE][2];
        for (int r = 0; r < nr; r++) {
            const int8_t *p = qa->q + (row + (size_t)r) * k + b * 32;
            x[r][0] = vld1q_s8(p);
            x[r][1] = vld1q_s8(p + 16);
            i0[r][0] = i0[r][1] = i1[r][0] = i1[r][1] = vdupq_n_s32(0);
        }
        for (int i = 0; half == 0 && i < f.main; i++) __builtin_prefetch(q + AHEAD + 64 * i);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const int8x16_t w = values(f, q + 16 * i, h + 16 * i, g);
#pragma GCC unroll 4
                for (int r = 0; r < nr; r++) {
                    if (f.sub == 16 && g >= 4)
                        i1[r][i] = dot(i1[r][i], w, x[r][1], g);
                    else
                        i0[r][i] = dot(i0[r][i], w, x[r][g / 4], g);
                }
            }
        const scales_neon s = scales_of(f, st, b, half);
        for (int r = 0; r < nr; r++) {
            const size_t at = (row + (size_t)r) * blocks + b;
            for (int i = 0; i < 2; i++)
                acc[r][i] = add_block(f, &s, i, qa->scale[at], qa->sum16 + 2 * at, i0[r][i], i1[r][i], acc[r][i]);
        }
    }
    for (int r = 0; r < nr; r++) {
        float out[8], *to = n == 8 ? y + (size_t)r * ldy : out;
        vst1q_f32(to, acc[r][0]);
        vst1q_f32(to + 4, acc[r][1]);
        for (int i = 0; n < 8 && i < n; i++) y[(size_t)r * ldy + (size_t)i] = out[i];
    }
}

/* One function a type and number of rows. */
typedef void tile_neon(const lr_strip *st, int half, const lr_qact *qa, size_t row, float *y, size_t ldy, int n);
#define TILE_ROWS(type, nr, ...)                                                                                       \
    static __attribute__((noinline)) void tile##nr##_##type(const lr_strip *st, int half, const lr_qact *qa,           \
                                                            size_t row, float *y, size_t ldy, int n)                   \
    {                                                                                                                  \
        tile(LR_FORM(__VA_ARGS__), nr, st, half, qa, row, y, ldy, n);                                                  \
    }
#define X(type, ...)                                                                                                   \
    TILE_ROWS(type, 1, __VA_ARGS__)                                                                                    \
    TILE_ROWS(type, 2, __VA_ARGS__)                                                                                    \
    TILE_ROWS(type, 4, __VA_ARGS__)
LR_FORM_LIST(X)
#undef X

static tile_neon *const tiles[LR_DTYPE_MAX][TILE + 1] = {
#define X(type, ...) [LR_##type] = {[1] = tile1_##type, [2] = tile2_##type, [4] = tile4_##type},
    LR_FORM_LIST(X)
#undef X
};

static void gemm_packed(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_parts parts = lr_form_parts(lr_form_of(w->type), w->k);
    for (int s = s0; s < s1; s++) {
        const lr_strip st = lr_strip_at(&parts, w, s);
        for (int r = 0, nr; r < m; r += nr) {
            nr = m - r >= 4 ? 4 : m - r >= 2 ? 2 : 1;
            for (int half = 0; half < 2; half++) {
                const int j = s * LR_STRIP + 8 * half, n = w->n - j;
                if (n > 0) tiles[w->type][nr](&st, half, qa, (size_t)r, y + (size_t)r * ldy + j, ldy, n < 8 ? n : 8);
            }
        }
    }
}

static void gemm(const lr_gemm_w *w, const lr_qact *qa, const float *xf, size_t ldx, int m, float *y, size_t ldy,
                 int s0, int s1)
{
    if (w->packed)
        gemm_packed(w, qa, m, y, ldy, s0, s1);
    else
        lr_gemm_plain_neon(w, xf, ldx, m, y, ldy, s0, s1);
}

static const char *way(const lr_gemm_w *w, const lr_qact *qa, int m)
{
    (void)qa;
    return !w->packed ? "float fused multiply-adds" : m > 1 ? "sdot, up to 4 rows in registers" : "sdot";
}

void lr_gemm_fill_neon(lr_cpu_kernels *k)
{
    k->gemm = gemm;
    k->way = way;
    k->quantize = lr_quantize_neon;
}
