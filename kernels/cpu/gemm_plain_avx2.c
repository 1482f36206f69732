/* gemm_plain_avx2.c - the product with weights as they lie in the file (F32, F16, BF16): see gemm.h for the order.
 *
 * The 16 partial sums are two registers; a tile of 2 rows x 2 features runs over k and is folded at the end.
 */
#include "cpu/gemm.h"
#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))

enum { ROWS = 2, COLS = 2 };

INLINE __m256 load_k(const int type, const uint8_t *p, size_t i)
{
    if (type == LR_F32) return _mm256_loadu_ps((const float *)(const void *)(p + 4 * i));
    const __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(p + 2 * i));
    if (type == LR_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

INLINE float load_one(const int type, const uint8_t *p, size_t i)
{
    uint16_t h;
    float f;
    if (type == LR_F32) {
        __builtin_memcpy(&f, p + 4 * i, 4);
        return f;
    }
    __builtin_memcpy(&h, p + 2 * i, 2);
    return type == LR_F16 ? _cvtsh_ss(h) : lr_bf16_to_f32(h);
}

/* The last k % 16 values go to the first lanes. */
INLINE float finish(const int type, __m256 a, __m256 b, const uint8_t *w, const float *x, int from, int k)
{
    if (from < k) {
        float s[16];
        _mm256_storeu_ps(s, a);
        _mm256_storeu_ps(s + 8, b);
        for (int i = from; i < k; i++) s[i - from] = fmaf(x[i], load_one(type, w, (size_t)i), s[i - from]);
        a = _mm256_loadu_ps(s);
        b = _mm256_loadu_ps(s + 8);
    }
    a = _mm256_add_ps(a, b);
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

INLINE void tile(const int type, const int nr, const int nc, const uint8_t *w, size_t row_bytes, int k, const float *x,
                 size_t ldx, float *y, size_t ldy)
{
    __m256 a[ROWS][COLS], b[ROWS][COLS];
    int i = 0;
#pragma GCC unroll 2
    for (int r = 0; r < nr; r++)
#pragma GCC unroll 2
        for (int c = 0; c < nc; c++) a[r][c] = b[r][c] = _mm256_setzero_ps();
    for (; i + 16 <= k; i += 16) {
#pragma GCC unroll 2
        for (int c = 0; c < nc; c++) {
            const uint8_t *p = w + (size_t)c * row_bytes;
            const __m256 v0 = load_k(type, p, (size_t)i), v1 = load_k(type, p, (size_t)i + 8);
#pragma GCC unroll 2
            for (int r = 0; r < nr; r++) {
                const float *xr = x + (size_t)r * ldx + i;
                a[r][c] = _mm256_fmadd_ps(_mm256_loadu_ps(xr), v0, a[r][c]);
                b[r][c] = _mm256_fmadd_ps(_mm256_loadu_ps(xr + 8), v1, b[r][c]);
            }
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < nr; r++)
#pragma GCC unroll 2
        for (int c = 0; c < nc; c++)
            y[(size_t)r * ldy + (size_t)c] =
                finish(type, a[r][c], b[r][c], w + (size_t)c * row_bytes, x + (size_t)r * ldx, i, k);
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

void lr_gemm_plain_avx2(const lr_gemm_w *w, const float *x, size_t ldx, int m, float *y, size_t ldy, int s0, int s1)
{
    const int j0 = s0 * LR_STRIP, j1 = s1 * LR_STRIP < w->n ? s1 * LR_STRIP : w->n;
    if (w->type == LR_F16)
        plain(LR_F16, w, x, ldx, m, y, ldy, j0, j1);
    else if (w->type == LR_BF16)
        plain(LR_BF16, w, x, ldx, m, y, ldy, j0, j1);
    else
        plain(LR_F32, w, x, ldx, m, y, ldy, j0, j1);
}
