/* gemm_many_avx512.c - many rows over unpacked strips, with AVX-512 VNNI.
 *
 * A tile is 2 strips x 6 rows: 12 integer sums, 12 float sums, and a broadcast that both strips share; 8 of 11 vector
 * operations of a block are products. Scales of rows, and their sums for minima, are broadcast from where the quantizer
 * put them. Sums of a row pause in y between chunks, which changes no bit.
 */
#include "cpu/gemm_avx512.h"

enum { TILE32 = 6, TILE16 = 4 }; /* rows of a tile of two strips: 16-value scales keep more sums alive */

INLINE void tile(const lr_form f, const int zero, const int ns, const int nr, const panel *p, int c, int nb,
                 const lr_qact *qa, size_t row, float *y, size_t ldy, const __mmask16 *mask)
{
    const row_bases x = bases_of(qa, row);
    __m512 acc[2][TILE32];
    const row_blocks rb = blocks_of(qa, row, c);
    starts512 st;
    if (!f.min) starts_prepare(f, zero, nr, &rb, nb, &st);
#pragma GCC unroll 8
    for (int r = 0; r < nr; r++)
#pragma GCC unroll 2
        for (int s = 0; s < ns; s++)
            acc[s][r] = c ? _mm512_maskz_loadu_ps(mask[s], y + (size_t)r * ldy + 16 * s) : _mm512_setzero_ps();
    for (int b = 0; b < nb; b++) {
        __m512i i0[2][TILE32], i1[2][TILE32];
        const size_t at = (size_t)(c + b) * 32;
#pragma GCC unroll 8
        for (int r = 0; r < nr; r++)
#pragma GCC unroll 2
            for (int s = 0; s < ns; s++) {
                i0[s][r] = f.min ? _mm512_setzero_si512() : _mm512_set1_epi32(st.of[r][0][b]);
                i1[s][r] = f.min || f.sub == 32 ? _mm512_setzero_si512() : _mm512_set1_epi32(st.of[r][1][b]);
            }
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
#pragma GCC unroll 8
            for (int r = 0; r < nr; r++) {
                const __m512i v = activations(&x, r, at + 4 * (size_t)g);
#pragma GCC unroll 2
                for (int s = 0; s < ns; s++) {
                    const __m512i w = _mm512_load_si512(p[s].w[b] + 64 * g);
                    if (f.sub == 16 && g >= 4)
                        i1[s][r] = _mm512_dpbusd_epi32(i1[s][r], w, v);
                    else
                        i0[s][r] = _mm512_dpbusd_epi32(i0[s][r], w, v);
                }
            }
#pragma GCC unroll 8
        for (int r = 0; r < nr; r++)
#pragma GCC unroll 2
            for (int s = 0; s < ns; s++) acc[s][r] = add_block(f, &p[s].s[b], &rb, r, b, i0[s][r], i1[s][r], acc[s][r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < nr; r++)
#pragma GCC unroll 2
        for (int s = 0; s < ns; s++) _mm512_mask_storeu_ps(y + (size_t)r * ldy + 16 * s, mask[s], acc[s][r]);
}

/* The tiles of all rows over one chunk of ns strips. */
INLINE void all_rows(const lr_form f, const int zero, const int ns, const panel *p, int c, int nb, const lr_qact *qa,
                     int m, float *y, size_t ldy, const __mmask16 *mask)
{
    const int rows = f.sub == 32 ? TILE32 : TILE16;
    int r = 0;
    for (; r + rows <= m; r += rows) tile(f, zero, ns, rows, p, c, nb, qa, (size_t)r, y + (size_t)r * ldy, ldy, mask);
    for (; r + 2 <= m; r += 2) tile(f, zero, ns, 2, p, c, nb, qa, (size_t)r, y + (size_t)r * ldy, ldy, mask);
    if (r < m) tile(f, zero, ns, 1, p, c, nb, qa, (size_t)r, y + (size_t)r * ldy, ldy, mask);
}

#define KIND(name, sub, min)                                                                                           \
    static void name(const panel *p, int ns, int zero, int c, int nb, const lr_qact *qa, int m, float *y, size_t ldy,  \
                     const __mmask16 *mask)                                                                            \
    {                                                                                                                  \
        const lr_form f = LR_FORM(8, 0, sub, 0, 0, min, 0, 0);                                                         \
        if (ns == 2)                                                                                                   \
            all_rows(f, zero, 2, p, c, nb, qa, m, y, ldy, mask);                                                       \
        else                                                                                                           \
            all_rows(f, zero, 1, p, c, nb, qa, m, y, ldy, mask);                                                       \
    }
KIND(kind32, 32, 0)
KIND(kind32_min, 32, 1)
KIND(kind16, 16, 0)
KIND(kind16_min, 16, 1)

many512 *const lr_gemm_many_avx512[4] = {kind32, kind32_min, kind16, kind16_min};
