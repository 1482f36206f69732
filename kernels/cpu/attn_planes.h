/* attn_planes.h - queries and weights of attention as planes of bfloat16; included by attn_vec.h, see attn_tiles.h.
 *
 * The first plane has a number's first 8 bits, cut off, the second the next 8, rounded: 2^-17 of the number is lost.
 */
#ifndef LR_KERNELS_CPU_ATTN_PLANES_H
#define LR_KERNELS_CPU_ATTN_PLANES_H

enum { TILE_DIM_MAX = 1024 };

/* 32 floats -> 32 bfloat16 at to, and what they lack `second` bytes behind. */
VEC_INLINE void split_32(char *to, size_t second, vf a, vf b)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    const vf p = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), high));
    const vf q = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(b), high));
    const __m512i one = (__m512i)_mm512_cvtne2ps_pbh(q, p);
    const __m512i two = (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(b, q), _mm512_sub_ps(a, p));
    _mm512_storeu_si512((void *)to, one);
    _mm512_storeu_si512((void *)(to + second), two);
}

/* A row of n floats, in place. */
static void split_row(float *x, int n)
{
    float whole[TILE_DIM_MAX] __attribute__((aligned(64)));
    memcpy(whole, x, (size_t)n * sizeof *x);
    for (int d = 0; d < n; d += 32)
        split_32((char *)x + (size_t)d * 2, (size_t)n * 2, vf_load(whole + d), vf_load(whole + d + 16));
}

#endif
