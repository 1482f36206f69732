/* gemm_plain_avx512.c - the product with weights as they lie in the file (F32, F16, BF16): see gemm.h for the order.
 *
 * A lane is a partial sum, so a tile of rows x features runs over k with two loads a product pair; the lanes are folded
 * at the end. Few rows: bound by memory. Many rows: 4 x 4 tiles, bound by the multiply-add units.
 */
#include "cpu/gemm_avx512.h"

enum { ROWS = 4, COLS = 4 };

INLINE __m512 load_k(const int type, const uint8_t *p, size_t i, __mmask16 k)
{
    if (type == LR_F32) return _mm512_maskz_loadu_ps(k, p + 4 * i);
    const __m256i h = _mm256_maskz_loadu_epi16(k, p + 2 * i);
    if (type == LR_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

INLINE float fold16(__m512 s)
{
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

INLINE void tile(const int type, const int nr, const int nc, const uint8_t *w, size_t row_bytes, int k, const float *x,
                 size_t ldx, float *y, size_t ldy)
{
    __m512 acc[ROWS][COLS];
#pragma GCC unroll 4
    for (int r = 0; r < nr; r++)
#pragma GCC unroll 4
        for (int c = 0; c < nc; c++) acc[r][c] = _mm512_setzero_ps();
    for (int i = 0; i < k; i += 16) {
        const __mmask16 mask = k - i >= 16 ? 0xFFFF : (__mmask16)((1u << (k - i)) - 1);
        __m512 v[COLS];
#pragma GCC unroll 4
        for (int c = 0; c < nc; c++) {
            v[c] = load_k(type, w + (size_t)c * row_bytes, (size_t)i, mask);
            if (nr == 1)
                _mm_prefetch(w + (size_t)c * row_bytes + (size_t)i * (type == LR_F32 ? 4 : 2) + 1024, _MM_HINT_T0);
        }
#pragma GCC unroll 4
        for (int r = 0; r < nr; r++) {
            const __m512 xv = _mm512_maskz_loadu_ps(mask, x + (size_t)r * ldx + i);
#pragma GCC unroll 4
            for (int c = 0; c < nc; c++) acc[r][c] = _mm512_mask3_fmadd_ps(xv, v[c], acc[r][c], mask);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < nr; r++)
#pragma GCC unroll 4
        for (int c = 0; c < nc; c++) y[(size_t)r * ldy + (size_t)c] = fold16(acc[r][c]);
}

/* Features j0..j1-1 for all rows. */
INLINE void plain(const int type, const lr_gemm_w *w, const float *x, size_t ldx, int m, float *y, size_t ldy, int j0,
                  int j1)
{
    const uint8_t *rows = w->data;
    for (int j = j0; j < j1;) {
        const int nc = j1 - j >= COLS ? COLS : 1;
        const uint8_t *p = rows + (size_t)j * w->strip_bytes;
        for (int r = 0; r < m;) {
            const int nr = m - r >= ROWS ? ROWS : 1;
            const float *xr = x + (size_t)r * ldx;
            float *yr = y + (size_t)r * ldy + j;
            if (nr == ROWS && nc == COLS)
                tile(type, ROWS, COLS, p, w->strip_bytes, w->k, xr, ldx, yr, ldy);
            else if (nc == COLS)
                tile(type, 1, COLS, p, w->strip_bytes, w->k, xr, ldx, yr, ldy);
            else if (nr == ROWS)
                tile(type, ROWS, 1, p, w->strip_bytes, w->k, xr, ldx, yr, ldy);
            else
                tile(type, 1, 1, p, w->strip_bytes, w->k, xr, ldx, yr, ldy);
            r += nr;
        }
        j += nc;
    }
}

void lr_gemm_plain_avx512(const lr_gemm_w *w, const float *x, size_t ldx, int m, float *y, size_t ldy, int s0, int s1)
{
    const int j0 = s0 * LR_STRIP, j1 = s1 * LR_STRIP < w->n ? s1 * LR_STRIP : w->n;
    if (w->type == LR_F16)
        plain(LR_F16, w, x, ldx, m, y, ldy, j0, j1);
    else if (w->type == LR_BF16)
        plain(LR_BF16, w, x, ldx, m, y, ldy, j0, j1);
    else
        plain(LR_F32, w, x, ldx, m, y, ldy, j0, j1);
}
