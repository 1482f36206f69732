/* gemm_wide_amx.h - what the tile products of rows of 14 bits share: weights as a and b.
 *
 * A weight of a super-block is d times an integer, sub-scale times (u - zero), of at most 14 bits: 64 a + b with b in
 * 0..63; or, where sub-scales are 6 bits without a sign and u at most 5, 8 a + b, a and b being u times the sub-scale's
 * upper and lower bits, which needs one product each.
 */
#ifndef LR_KERNELS_CPU_GEMM_WIDE_AMX_H
#define LR_KERNELS_CPU_GEMM_WIDE_AMX_H
#include "cpu/gemm_amx.h"
#include "cpu/gemm_wide_avx512.h"

typedef int32_t tile_sums[16][16] __attribute__((aligned(64)));

/* The 64 bytes of 16-bit values (even, odd) taken apart into tiles a and b, by moves of bits, which the vector port
 * that tiles leave idle can do. */
INLINE void take_apart(__m512i even, __m512i odd, uint8_t *a, uint8_t *b)
{
    const __mmask64 odds = 0xAAAAAAAAAAAAAAAA;
    const __m512i low = _mm512_set1_epi64(0x3030202010100000), high = _mm512_add_epi8(low, _mm512_set1_epi8(6));
    const __m512i ah = _mm512_multishift_epi64_epi8(high, even);
    const __m512i bh = _mm512_mask_multishift_epi64_epi8(even, odds, low, odd);
    _mm512_store_si512(a, _mm512_mask_multishift_epi64_epi8(ah, odds, high, odd));
    _mm512_store_si512(b, _mm512_and_si512(bh, _mm512_set1_epi8(63)));
}

/* Whether a weight is taken apart by its sub-scale's 3 upper and 3 lower bits, each times u a byte. */
INLINE bool by_scale(const lr_form f) { return f.min && f.sub == 32; }

/* A weight is a << base_of + b. */
INLINE int base_of(const lr_form f) { return by_scale(f) ? 3 : 6; }

/* Bytes of 16 features to lanes of 32 bits. */
INLINE __m512i lanes_of(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }

/* Block `at` of a strip: its half (8 rows) of the B tiles of a and of b. */
INLINE void unpack_parts(const lr_form f, const lr_strip *st, size_t at, uint8_t *a, uint8_t *b)
{
    __m512i w[8];
    unpack512(f, st->q + at * (size_t)f.main * 64, st->h + at * (size_t)f.extra * 64, w);
    for (int half = 0; half < 32 / f.sub; half++) {
        __m512i sc = lanes_of(st->sc + (at * (size_t)(32 / f.sub) + (size_t)half) * 16);
        if (f.sub == 16 && f.min) sc = _mm512_and_si512(sc, _mm512_set1_epi32(15));
        if (by_scale(f)) { /* products of two bytes at once: none is above 7 * 31 */
            const __m512i both = _mm512_or_si512(sc, _mm512_slli_epi32(sc, 16));
            const __m512i s1 = _mm512_srli_epi16(both, 3), s0 = _mm512_and_si512(both, _mm512_set1_epi16(7));
            for (int g = 0; g < 8; g++) {
                _mm512_store_si512(a + 64 * g, _mm512_mullo_epi16(w[g], s1));
                _mm512_store_si512(b + 64 * g, _mm512_mullo_epi16(w[g], s0));
            }
            continue;
        }
        const __m512i even = _mm512_or_si512(sc, _mm512_slli_epi32(sc, 16)), odd = _mm512_slli_epi16(even, 8);
        const __m512i zero =
            _mm512_mullo_epi16(_mm512_srai_epi16(odd, 8), _mm512_set1_epi16((short)f.zero)); /* zero * sc */
        for (int g = half * 4; g < (f.sub == 32 ? 8 : half * 4 + 4); g++) {
            __m512i e = _mm512_maddubs_epi16(w[g], even), d = _mm512_maddubs_epi16(w[g], odd);
            if (f.zero) e = _mm512_sub_epi16(e, zero), d = _mm512_sub_epi16(d, zero);
            take_apart(e, d, a + 64 * g, b + 64 * g);
        }
    }
}

/* Sums of a and b put together. */
INLINE __m512i joined(const lr_form f, __m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_slli_epi32(a, (unsigned)base_of(f)), b);
}

/* Tile c += a b, weights' part in b. */
#define LR_WIDE_PRODUCT(c, a, b)                                                                                       \
    if (by_scale(f))                                                                                                   \
        _tile_dpbsud(c, a, b);                                                                                         \
    else                                                                                                               \
        _tile_dpbssd(c, a, b)

#endif
