/* gemm_plain_neon.c - the product with weights as they lie in the file (F32, F16, BF16): see gemm.h for the order.
 *
 * The 16 partial sums are four registers; a tile of 2 rows x 2 features runs over k and is folded at the end.
 */
#include "cpu/gemm.h"
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { ROWS = 2, COLS = 2 };

INLINE float32x4_t load_k(const int type, const uint8_t *p, size_t i)
{
    if (type == LR_F32) return vreinterpretq_f32_u8(vld1q_u8(p + 4 * i));
    const uint16x4_t h = vreinterpret_u16_u8(vld1_u8(p + 2 * i));
    if (type == LR_F16) return vcvt_f32_f16(vreinterpret_f16_u16(h));
    return vreinterpretq_f32_u32(vshll_n_u16(h, 16));
}

INLINE float load_one(const int type, const uint8_t *p, size_t i)
{
    uint16_t h;
    float f;
    if (type == LR_F32) {
        memcpy(&f, p + 4 * i, 4);
        return f;
    }
    memcpy(&h, p + 2 * i, 2);
    return type == LR_F16 ? lr_f16_to_f32(h) : lr_bf16_to_f32(h);
}

/* The last k % 16 values go to the first sums. */
INLINE float finish(const int type, float32x4_t a[4], const uint8_t *w, const float *x, int from, int k)
{
    if (from < k) {
        float s[16];
        for (int i = 0; i < 4; i++) vst1q_f32(s + 4 * i, a[i]);
        for (int i = from; i < k; i++) s[i - from] = fmaf(x[i], load_one(type, w, (size_t)i), s[i - from]);
        for (int i = 0; i < 4; i++) a[i] = vld1q_f32(s + 4 * i);
    }
    const float32x4_t b = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
    const float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
    return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}

INLINE void tile(const int type, const int nr, const int nc, const uint8_t *w, size_t row_bytes, int k, const float *x,
                 size_t ldx, float *y, size_t ldy)
{
    float32x4_t a[ROWS][COLS][4];
    int i = 0;
    for (int r = 0; r < nr; r++)
        for (int c = 0; c < nc; c++)
            for (int l = 0; l < 4; l++) a[r][c][l] = vdupq_n_f32(0);
    for (; i + 16 <= k; i += 16)
#pragma GCC unroll 2
        for (int c = 0; c < nc; c++)
#pragma GCC unroll 4
            for (int l = 0; l < 4; l++) {
                const float32x4_t v = load_k(type, w + (size_t)c * row_bytes, (size_t)(i + 4 * l));
#pragma GCC unroll 2
                for (int r = 0; r < nr; r++)
                    a[r][c][l] = vfmaq_f32(a[r][c][l], vld1q_f32(x + (size_t)r * ldx + i + 4 * l), v);
            }
    for (int r = 0; r < nr; r++)
        for (int c = 0; c < nc; c++)
            y[(size_t)r * ldy + (size_t)c] =
                finish(type, a[r][c], w + (size_t)c * row_bytes, x + (size_t)r * ldx, i, k);
}

INLINE void plain(const int type, const lr_gemm_w *w, const float *x, size_t ldx, int m, float *y, size_t ldy, int j0,
                  int j1)
{
    for (int j = j0, nc; j < j1; j += nc) {
        const uint8_t *p = (const uint8_t *)w->data + (size_t)j * w->strip_bytes;
        nc = j1 - j >= COLS ? COLS : 1;
        for (int r = 0, nr; r < m; r += nr) {
            const float *xr = x + (size_t)r * ldx;
            float *yr = y + (size_t)r * ldy + j;
            nr = m - r >= ROWS ? ROWS : 1;
            if (nr == ROWS && nc == COLS)
                tile(type, ROWS, COLS, p, w->strip_bytes, w->k, xr, ldx, yr, ldy);
            else if (nc == COLS)
                tile(type, 1, COLS, p, w->strip_bytes, w->k, xr, ldx, yr, ldy);
            else if (nr == ROWS)
                tile(type, ROWS, 1, p, w->strip_bytes, w->k, xr, ldx, yr, ldy);
            else
                tile(type, 1, 1, p, w->strip_bytes, w->k, xr, ldx, yr, ldy);
        }
    }
}

void lr_gemm_plain_neon(const lr_gemm_w *w, const float *x, size_t ldx, int m, float *y, size_t ldy, int s0, int s1)
{
    const int j0 = s0 * LR_STRIP, j1 = s1 * LR_STRIP < w->n ? s1 * LR_STRIP : w->n;
    if (w->type == LR_F16)
        plain(LR_F16, w, x, ldx, m, y, ldy, j0, j1);
    else if (w->type == LR_BF16)
        plain(LR_BF16, w, x, ldx, m, y, ldy, j0, j1);
    else
        plain(LR_F32, w, x, ldx, m, y, ldy, j0, j1);
}
