/* gemm_wide_avx512.h - what the AVX-512 and the AMX product of rows of 14 bits share: gemm.h has the formulas. */
#ifndef LR_KERNELS_CPU_GEMM_WIDE_AVX512_H
#define LR_KERNELS_CPU_GEMM_WIDE_AVX512_H
#include "cpu/gemm_avx512.h"

/* Scales of a super-block: d, -dmin, and the sub-minima as pairs of 16 bits that meet a row's pairs. */
typedef struct wide_scales {
    __m512 d, m;
    __m512i sm[16]; /* sub 32: 64 t and t of each block; sub 16: 64 times t_0 and t_1, then these, of each block */
} wide_scales;

/* A row's super-block, besides q. */
typedef struct wide_row {
    float sx;
    int32_t
        pair[16]; /* sub 32: sums of high and low parts of each block; sub 16: of the halves' high, then low parts */
} wide_row;

INLINE __m512i wide_sub32(const uint8_t *sm)
{
    const __m512i t = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)sm));
    return _mm512_or_si512(_mm512_slli_epi32(t, 6), _mm512_slli_epi32(t, 16));
}

INLINE void wide_sub16(const uint8_t *sc, __m512i *high, __m512i *low) /* nibbles */
{
    const __m512i t0 = _mm512_srli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)sc)), 4);
    const __m512i t1 = _mm512_srli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(sc + 16))), 4);
    *low = _mm512_or_si512(t0, _mm512_slli_epi32(t1, 16));
    *high = _mm512_slli_epi16(*low, 6);
}

INLINE wide_scales wide_scales_of(const lr_form f, const lr_strip *s, size_t sb)
{
    wide_scales o;
    o.d = halves512(s->d + sb * 32);
    o.m = f.min ? negate512(halves512(s->m + sb * 32)) : _mm512_setzero_ps();
    for (size_t i = 0; f.min && i < 8; i++) {
        if (f.sub == 32)
            o.sm[i] = wide_sub32(s->sm + (8 * sb + i) * 16);
        else
            wide_sub16(s->sc + (8 * sb + i) * 32, &o.sm[2 * i], &o.sm[2 * i + 1]);
    }
    return o;
}

INLINE __m512i wide_sums(const lr_qact *qa, size_t row, size_t sb)
{
    return _mm512_loadu_si512(qa->sum16 + (row * (size_t)qa->k + sb * LR_WIDE) / 8);
}

INLINE void wide_row_set(const lr_form f, const lr_qact *qa, size_t row, size_t sb, wide_row *o)
{
    o->sx = qa->scale[row * ((size_t)qa->k / LR_WIDE) + sb];
    if (!f.min) return;
    const __m512i sums = wide_sums(qa, row, sb);
    if (f.sub == 32)
        _mm256_storeu_si256((__m256i *)o->pair, _mm512_cvtepi32_epi16(_mm512_madd_epi16(sums, _mm512_set1_epi16(1))));
    else
        _mm512_storeu_si512(o->pair, sums);
}

/* T of a row. */
INLINE __m512i wide_minima(const lr_form f, const wide_scales *s, const wide_row *x)
{
    __m512i t = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (f.sub == 16 || i < 8) t = _mm512_dpwssd_epi32(t, s->sm[i], _mm512_set1_epi32(x->pair[i]));
    return t;
}

/* The float part of a super-block. */
INLINE __m512 add_super(const lr_form f, const wide_scales *s, const wide_row *x, __m512i h, __m512i l, __m512i t,
                        __m512 acc)
{
    const __m512 sx = _mm512_set1_ps(x->sx);
    const __m512 v = _mm512_fmadd_ps(_mm512_set1_ps(64), _mm512_cvtepi32_ps(h), _mm512_cvtepi32_ps(l));
    acc = _mm512_fmadd_ps(v, _mm512_mul_ps(s->d, sx), acc);
    return f.min ? _mm512_fmadd_ps(_mm512_cvtepi32_ps(t), _mm512_mul_ps(s->m, sx), acc) : acc;
}

#endif
