/* vec_avx2.h - the vector words of vec_avx512.h on AVX2 with FMA and F16C.
 */
#ifndef LR_KERNELS_CPU_VEC_AVX2_H
#define LR_KERNELS_CPU_VEC_AVX2_H
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#define VW          8
#define VEC_ROWS    6
#define VEC_COLS    2
#define VEC_NAME(f) f##_avx2
#define VEC_INLINE  static inline __attribute__((always_inline, unused))

typedef __m256 vf;
typedef __m256 vm; /* all bits of a lane */
typedef struct vd {
    __m256d lo, hi;
} vd;

VEC_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
VEC_INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
VEC_INLINE __m256i vec_lanes(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
VEC_INLINE vm vm_first(int n) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), vec_lanes())); }
VEC_INLINE vf vf_loadn(const float *p, int n) { return _mm256_maskload_ps(p, _mm256_castps_si256(vm_first(n))); }
VEC_INLINE void vf_storen(float *p, vf x, int n) { _mm256_maskstore_ps(p, _mm256_castps_si256(vm_first(n)), x); }
VEC_INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
VEC_INLINE vf vf_iota(void) { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

VEC_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
VEC_INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
VEC_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
VEC_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
VEC_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
VEC_INLINE vf vf_fms(vf a, vf b, vf c) { return _mm256_fmsub_ps(a, b, c); }
VEC_INLINE vf vf_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
VEC_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
VEC_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
VEC_INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
VEC_INLINE vf vf_sign_of(vf mag, vf s) { return _mm256_or_ps(mag, _mm256_and_ps(s, _mm256_set1_ps(-0.0f))); }
VEC_INLINE vf vf_round(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
VEC_INLINE vf vec_pow2(__m256i n) /* n in -126 .. 127 */
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
VEC_INLINE vf vf_ldexp_near(vf x, vf n) { return _mm256_mul_ps(x, vec_pow2(_mm256_cvtps_epi32(n))); }
VEC_INLINE vf vf_ldexp(vf x, vf n) /* in steps: one factor's exponent does not reach -300 .. 300 */
{
    __m256i i = _mm256_cvtps_epi32(n), a = _mm256_srai_epi32(i, 2), b = _mm256_sub_epi32(i, _mm256_add_epi32(a, a));
    __m256i b1 = _mm256_srai_epi32(b, 1);
    vf f = vec_pow2(a), g = _mm256_mul_ps(vec_pow2(b1), vec_pow2(_mm256_sub_epi32(b, b1)));
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_mul_ps(x, f), f), g);
}

VEC_INLINE vm vf_ge(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
VEC_INLINE vm vf_le(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
VEC_INLINE vm vf_lt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
VEC_INLINE vm vf_eq(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
VEC_INLINE vm vm_and(vm a, vm b) { return _mm256_and_ps(a, b); }
VEC_INLINE vf vf_select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
VEC_INLINE uint32_t vm_bits(vm m) { return (uint32_t)_mm256_movemask_ps(m); }
VEC_INLINE vm vm_from_bits(uint32_t b)
{
    __m256i bit = _mm256_sllv_epi32(_mm256_set1_epi32(1), vec_lanes());
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)b), bit), bit));
}

VEC_INLINE float vf_hmax(vf x)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
VEC_INLINE float vf_hsum(vf x)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
VEC_INLINE float vf_first(vf x) { return _mm256_cvtss_f32(x); }

VEC_INLINE vf vf_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
VEC_INLINE vf vf_load_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
VEC_INLINE vf vf_load_i8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}
VEC_INLINE vf vf_load_i4(const int8_t *p, bool low)
{
    __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sll_epi32(x, _mm_cvtsi32_si128(low ? 28 : 24)), 28));
}
VEC_INLINE vf vf_load_i6(const int8_t *p, const int8_t *upper, int pair)
{
    __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p));
    __m256i u = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)upper));
    x = _mm256_srli_epi32(_mm256_sll_epi32(x, _mm_cvtsi32_si128(pair < 2 ? 28 : 24)), 28);
    u = _mm256_srai_epi32(_mm256_sll_epi32(u, _mm_cvtsi32_si128(30 - 2 * pair)), 30);
    return _mm256_cvtepi32_ps(_mm256_or_si256(x, _mm256_slli_epi32(u, 4)));
}
VEC_INLINE float vec_f16(uint16_t h) { return _cvtsh_ss(h); }

VEC_INLINE void vf_store_f16(uint16_t *p, vf x)
{
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
VEC_INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    r = _mm256_packus_epi32(_mm256_srli_epi32(r, 16), _mm256_setzero_si256());
    _mm_storeu_si128((void *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(r, 0x08)));
}
VEC_INLINE void vf_store_i8(int8_t *p, vf x)
{
    __m256i i = _mm256_cvtps_epi32(x);
    __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((void *)p, _mm_packs_epi16(h, h));
}

VEC_INLINE vd vd_zero(void) { return (vd){_mm256_setzero_pd(), _mm256_setzero_pd()}; }
VEC_INLINE vd vd_of(vf x)
{
    return (vd){_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
VEC_INLINE vd vd_add(vd a, vd b) { return (vd){_mm256_add_pd(a.lo, b.lo), _mm256_add_pd(a.hi, b.hi)}; }
VEC_INLINE vd vd_sub1(vd a, double b)
{
    return (vd){_mm256_sub_pd(a.lo, _mm256_set1_pd(b)), _mm256_sub_pd(a.hi, _mm256_set1_pd(b))};
}
VEC_INLINE vd vd_fma(vd a, vd b, vd c)
{
    return (vd){_mm256_fmadd_pd(a.lo, b.lo, c.lo), _mm256_fmadd_pd(a.hi, b.hi, c.hi)};
}
VEC_INLINE double vd_hsum(vd a)
{
    __m256d s = _mm256_add_pd(a.lo, a.hi);
    __m128d t = _mm_add_pd(_mm256_castpd256_pd128(s), _mm256_extractf128_pd(s, 1));
    return _mm_cvtsd_f64(_mm_add_sd(t, _mm_unpackhi_pd(t, t)));
}
VEC_INLINE vf vf_of(vd a)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(a.lo)), _mm256_cvtpd_ps(a.hi), 1);
}

VEC_INLINE void vf_load_pairs(const float *p, vf *c, vf *s)
{
    vf a = vf_load(p), b = vf_load(p + VW);
    vf even = _mm256_shuffle_ps(a, b, 0x88), odd = _mm256_shuffle_ps(a, b, 0xdd); /* 0 1 4 5 2 3 6 7 */
    *c = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8));
    *s = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8));
}
VEC_INLINE vf vf_dup_even(vf x) { return _mm256_moveldup_ps(x); }
VEC_INLINE vf vf_dup_odd(vf x) { return _mm256_movehdup_ps(x); }
VEC_INLINE vf vf_swap_pairs(vf x) { return _mm256_permute_ps(x, 0xb1); }
VEC_INLINE vf vf_fmaddsub(vf a, vf b, vf c) { return _mm256_fmaddsub_ps(a, b, c); }

VEC_INLINE int vec_compact(int32_t *p, vm m, int base)
{
    uint32_t b = vm_bits(m);
    int n = 0;
    for (; b; b &= b - 1) p[n++] = base + __builtin_ctz(b);
    return n;
}

#endif
