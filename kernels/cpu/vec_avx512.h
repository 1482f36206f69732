/* vec_avx512.h - the vector words that the row, attention and vocabulary kernels are written in, on AVX-512.
 *
 * vf: VW floats; vm: one truth value a lane; vd: VW doubles (two registers), for sums that need the range.
 * Every ISA's header gives the same words; vec_math.h builds exp and tanh on them. NaN: vf_max and vf_min give the
 * second operand if either is NaN.
 */
#ifndef LR_KERNELS_CPU_VEC_AVX512_H
#define LR_KERNELS_CPU_VEC_AVX512_H
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#define VW          16 /* lanes */
#define VEC_ROWS    6  /* register block of the attention products: rows ... */
#define VEC_COLS    4  /* ... times registers of columns */
#define VEC_NAME(f) f##_avx512
#define VEC_INLINE  static inline __attribute__((always_inline, unused))

typedef __m512 vf;
typedef __mmask16 vm;
typedef struct vd {
    __m512d lo, hi;
} vd;

VEC_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
VEC_INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
VEC_INLINE vm vm_first(int n) { return (vm)((1u << n) - 1); } /* lanes 0 .. n-1; 0 <= n <= VW */
VEC_INLINE vf vf_loadn(const float *p, int n) { return _mm512_maskz_loadu_ps(vm_first(n), p); } /* the rest is 0 */
VEC_INLINE void vf_storen(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, vm_first(n), x); }
VEC_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
VEC_INLINE vf vf_iota(void) { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

VEC_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
VEC_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
VEC_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
VEC_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
VEC_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }   /* a * b + c */
VEC_INLINE vf vf_fms(vf a, vf b, vf c) { return _mm512_fmsub_ps(a, b, c); }   /* a * b - c */
VEC_INLINE vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); } /* c - a * b */
VEC_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
VEC_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
VEC_INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
VEC_INLINE vf vf_sign_of(vf mag, vf s) /* mag >= 0 with the sign of s */
{
    return _mm512_or_ps(mag, _mm512_and_ps(s, _mm512_set1_ps(-0.0f)));
}
VEC_INLINE vf vf_round(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
VEC_INLINE vf vf_ldexp_near(vf x, vf n) { return _mm512_scalef_ps(x, n); } /* the same, n in -126 .. 127 */
VEC_INLINE vf vf_ldexp(vf x, vf n) { return _mm512_scalef_ps(x, n); } /* x * 2^n, n a whole number in -300 .. 300 */

VEC_INLINE vm vf_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
VEC_INLINE vm vf_le(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
VEC_INLINE vm vf_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
VEC_INLINE vm vf_eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
VEC_INLINE vm vm_and(vm a, vm b) { return a & b; }
VEC_INLINE vf vf_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); } /* m ? a : b */
VEC_INLINE uint32_t vm_bits(vm m) { return m; }
VEC_INLINE vm vm_from_bits(uint32_t b) { return (vm)b; } /* the low VW bits */

VEC_INLINE float vf_hmax(vf x) { return _mm512_reduce_max_ps(x); }
VEC_INLINE float vf_hsum(vf x) { return _mm512_reduce_add_ps(x); }
VEC_INLINE float vf_first(vf x) { return _mm512_cvtss_f32(x); }

/* VW numbers of the format, as floats. */
VEC_INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
VEC_INLINE vf vf_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
VEC_INLINE vf vf_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
/* Of VW bytes the low or the high halves, signed. */
VEC_INLINE vf vf_load_i4(const int8_t *p, bool low)
{
    __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sll_epi32(x, _mm_cvtsi32_si128(low ? 28 : 24)), 28));
}
/* The same with the bits above them: pair `pair` (0 .. 3) of VW bytes more. */
VEC_INLINE vf vf_load_i6(const int8_t *p, const int8_t *upper, int pair)
{
    __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p));
    __m512i u = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)upper));
    x = _mm512_srli_epi32(_mm512_sll_epi32(x, _mm_cvtsi32_si128(pair < 2 ? 28 : 24)), 28);
    u = _mm512_srai_epi32(_mm512_sll_epi32(u, _mm_cvtsi32_si128(30 - 2 * pair)), 30);
    return _mm512_cvtepi32_ps(_mm512_or_si512(x, _mm512_slli_epi32(u, 4)));
}
VEC_INLINE float vec_f16(uint16_t h) { return _cvtsh_ss(h); }

/* The other way, rounded to nearest even; vf_store_i8 takes whole numbers in -128 .. 127. */
VEC_INLINE void vf_store_f16(uint16_t *p, vf x)
{
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
VEC_INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
VEC_INLINE void vf_store_i8(int8_t *p, vf x)
{
    _mm_storeu_si128((void *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

VEC_INLINE vd vd_zero(void) { return (vd){_mm512_setzero_pd(), _mm512_setzero_pd()}; }
VEC_INLINE vd vd_of(vf x)
{
    return (vd){_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
}
VEC_INLINE vd vd_add(vd a, vd b) { return (vd){_mm512_add_pd(a.lo, b.lo), _mm512_add_pd(a.hi, b.hi)}; }
VEC_INLINE vd vd_sub1(vd a, double b)
{
    return (vd){_mm512_sub_pd(a.lo, _mm512_set1_pd(b)), _mm512_sub_pd(a.hi, _mm512_set1_pd(b))};
}
VEC_INLINE vd vd_fma(vd a, vd b, vd c)
{
    return (vd){_mm512_fmadd_pd(a.lo, b.lo, c.lo), _mm512_fmadd_pd(a.hi, b.hi, c.hi)};
}
VEC_INLINE double vd_hsum(vd a) { return _mm512_reduce_add_pd(_mm512_add_pd(a.lo, a.hi)); }
VEC_INLINE vf vf_of(vd a)
{
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(a.lo)), _mm512_cvtpd_ps(a.hi), 1);
}

/* 2 * VW floats c0 s0 c1 s1 ... -> c, s */
VEC_INLINE void vf_load_pairs(const float *p, vf *c, vf *s)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    vf a = vf_load(p), b = vf_load(p + VW);
    *c = _mm512_permutex2var_ps(a, even, b);
    *s = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
}
VEC_INLINE vf vf_dup_even(vf x) { return _mm512_moveldup_ps(x); }                   /* x0 x0 x2 x2 ... */
VEC_INLINE vf vf_dup_odd(vf x) { return _mm512_movehdup_ps(x); }                    /* x1 x1 x3 x3 ... */
VEC_INLINE vf vf_swap_pairs(vf x) { return _mm512_permute_ps(x, 0xb1); }            /* x1 x0 x3 x2 ... */
VEC_INLINE vf vf_fmaddsub(vf a, vf b, vf c) { return _mm512_fmaddsub_ps(a, b, c); } /* even: a*b-c, odd: a*b+c */

/* Writes the lanes of m among base, base + 1, ... to p (which has room for VW); returns how many. */
VEC_INLINE int vec_compact(int32_t *p, vm m, int base)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i ids = _mm512_add_epi32(lane, _mm512_set1_epi32(base));
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(m, ids));
    return __builtin_popcount(m);
}

#endif
