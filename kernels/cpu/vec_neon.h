/* vec_neon.h - the vector words of vec_avx512.h on AArch64's Advanced SIMD.
 */
#ifndef LR_KERNELS_CPU_VEC_NEON_H
#define LR_KERNELS_CPU_VEC_NEON_H
#include <arm_neon.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define VW          4
#define VEC_ROWS    6
#define VEC_COLS    4
#define VEC_NAME(f) f##_neon
#define VEC_INLINE  static inline __attribute__((always_inline, unused))

typedef float32x4_t vf;
typedef uint32x4_t vm; /* all bits of a lane */
typedef struct vd {
    float64x2_t lo, hi;
} vd;

VEC_INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
VEC_INLINE void vf_store(float *p, vf x) { vst1q_f32(p, x); }
VEC_INLINE uint32x4_t vec_lanes(void) { return (uint32x4_t){0, 1, 2, 3}; }
VEC_INLINE vm vm_first(int n) { return vcltq_u32(vec_lanes(), vdupq_n_u32((uint32_t)n)); }
VEC_INLINE vf vf_loadn(const float *p, int n)
{
    float t[4] = {0, 0, 0, 0};
    memcpy(t, p, (size_t)n * sizeof *p);
    return vld1q_f32(t);
}
VEC_INLINE void vf_storen(float *p, vf x, int n)
{
    float t[4];
    vst1q_f32(t, x);
    memcpy(p, t, (size_t)n * sizeof *p);
}
VEC_INLINE vf vf_set1(float x) { return vdupq_n_f32(x); }
VEC_INLINE vf vf_iota(void) { return (vf){0, 1, 2, 3}; }

VEC_INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
VEC_INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
VEC_INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
VEC_INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
VEC_INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
VEC_INLINE vf vf_fms(vf a, vf b, vf c) { return vfmaq_f32(vnegq_f32(c), a, b); }
VEC_INLINE vf vf_fnma(vf a, vf b, vf c) { return vfmsq_f32(c, a, b); }
VEC_INLINE vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
VEC_INLINE vf vf_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
VEC_INLINE vf vf_abs(vf a) { return vabsq_f32(a); }
VEC_INLINE vf vf_sign_of(vf mag, vf s) { return vbslq_f32(vdupq_n_u32(0x80000000u), s, mag); }
VEC_INLINE vf vf_round(vf x) { return vrndnq_f32(x); }
VEC_INLINE vf vec_pow2(int32x4_t n) /* n in -126 .. 127 */
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
VEC_INLINE vf vf_ldexp_near(vf x, vf n) { return vmulq_f32(x, vec_pow2(vcvtnq_s32_f32(n))); }
VEC_INLINE vf vf_ldexp(vf x, vf n) /* in steps: one factor's exponent does not reach -300 .. 300 */
{
    int32x4_t i = vcvtnq_s32_f32(n), a = vshrq_n_s32(i, 2), b = vsubq_s32(i, vaddq_s32(a, a)), b1 = vshrq_n_s32(b, 1);
    vf f = vec_pow2(a), g = vmulq_f32(vec_pow2(b1), vec_pow2(vsubq_s32(b, b1)));
    return vmulq_f32(vmulq_f32(vmulq_f32(x, f), f), g);
}

VEC_INLINE vm vf_ge(vf a, vf b) { return vcgeq_f32(a, b); }
VEC_INLINE vm vf_le(vf a, vf b) { return vcleq_f32(a, b); }
VEC_INLINE vm vf_lt(vf a, vf b) { return vcltq_f32(a, b); }
VEC_INLINE vm vf_eq(vf a, vf b) { return vceqq_f32(a, b); }
VEC_INLINE vm vm_and(vm a, vm b) { return vandq_u32(a, b); }
VEC_INLINE vf vf_select(vm m, vf a, vf b) { return vbslq_f32(m, a, b); }
VEC_INLINE uint32_t vm_bits(vm m) { return vaddvq_u32(vandq_u32(m, (uint32x4_t){1, 2, 4, 8})); }
VEC_INLINE vm vm_from_bits(uint32_t b) { return vtstq_u32(vdupq_n_u32(b), (uint32x4_t){1, 2, 4, 8}); }

VEC_INLINE float vf_hmax(vf x) { return vmaxnmvq_f32(x); }
VEC_INLINE float vf_hsum(vf x)
{
    float32x2_t a = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(a, 0) + vget_lane_f32(a, 1);
}
VEC_INLINE float vf_first(vf x) { return vgetq_lane_f32(x, 0); }

VEC_INLINE vf vf_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
VEC_INLINE vf vf_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
VEC_INLINE vf vf_load_i8(const int8_t *p)
{
    uint32_t u;
    memcpy(&u, p, 4);
    int16x8_t h = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(u)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(h)));
}
VEC_INLINE int32x4_t vec_i8(const int8_t *p)
{
    uint32_t u;
    memcpy(&u, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(u)))));
}
VEC_INLINE vf vf_load_i4(const int8_t *p, bool low)
{
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(vec_i8(p), vdupq_n_s32(low ? 28 : 24)), 28));
}
VEC_INLINE vf vf_load_i6(const int8_t *p, const int8_t *upper, int pair)
{
    uint32x4_t x = vreinterpretq_u32_s32(vshlq_s32(vec_i8(p), vdupq_n_s32(pair < 2 ? 28 : 24)));
    int32x4_t u = vshrq_n_s32(vshlq_s32(vec_i8(upper), vdupq_n_s32(30 - 2 * pair)), 30);
    return vcvtq_f32_s32(vorrq_s32(vreinterpretq_s32_u32(vshrq_n_u32(x, 28)), vshlq_n_s32(u, 4)));
}
VEC_INLINE float vec_f16(uint16_t h) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0); }
VEC_INLINE void vf_store_f16(uint16_t *p, vf x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
VEC_INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint32x4_t r = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    r = vbslq_u32(vceqq_f32(x, x), r, vorrq_u32(u, vdupq_n_u32(0x400000))); /* NaN: quiet */
    vst1_u16(p, vshrn_n_u32(r, 16));
}
VEC_INLINE void vf_store_i8(int8_t *p, vf x)
{
    int16x4_t h = vqmovn_s32(vcvtnq_s32_f32(x));
    uint32_t u = vget_lane_u32(vreinterpret_u32_s8(vqmovn_s16(vcombine_s16(h, h))), 0);
    memcpy(p, &u, 4);
}

VEC_INLINE vd vd_zero(void) { return (vd){vdupq_n_f64(0), vdupq_n_f64(0)}; }
VEC_INLINE vd vd_of(vf x) { return (vd){vcvt_f64_f32(vget_low_f32(x)), vcvt_high_f64_f32(x)}; }
VEC_INLINE vd vd_add(vd a, vd b) { return (vd){vaddq_f64(a.lo, b.lo), vaddq_f64(a.hi, b.hi)}; }
VEC_INLINE vd vd_sub1(vd a, double b) { return (vd){vsubq_f64(a.lo, vdupq_n_f64(b)), vsubq_f64(a.hi, vdupq_n_f64(b))}; }
VEC_INLINE vd vd_fma(vd a, vd b, vd c) { return (vd){vfmaq_f64(c.lo, a.lo, b.lo), vfmaq_f64(c.hi, a.hi, b.hi)}; }
VEC_INLINE double vd_hsum(vd a) { return vaddvq_f64(vaddq_f64(a.lo, a.hi)); }
VEC_INLINE vf vf_of(vd a) { return vcvt_high_f32_f64(vcvt_f32_f64(a.lo), a.hi); }

VEC_INLINE void vf_load_pairs(const float *p, vf *c, vf *s)
{
    float32x4x2_t v = vld2q_f32(p);
    *c = v.val[0];
    *s = v.val[1];
}
VEC_INLINE vf vf_dup_even(vf x) { return vtrn1q_f32(x, x); }
VEC_INLINE vf vf_dup_odd(vf x) { return vtrn2q_f32(x, x); }
VEC_INLINE vf vf_swap_pairs(vf x) { return vrev64q_f32(x); }
VEC_INLINE vf vf_fmaddsub(vf a, vf b, vf c)
{
    uint32x4_t even = {0x80000000u, 0, 0x80000000u, 0};
    return vfmaq_f32(vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(c), even)), a, b);
}

VEC_INLINE int vec_compact(int32_t *p, vm m, int base)
{
    int n = 0;
    for (uint32_t b = vm_bits(m); b; b &= b - 1) p[n++] = base + __builtin_ctz(b);
    return n;
}

#endif
