/* mass.h - how much a token weighs in a draw: e^d for d = logit - best, as a whole number of 2^-40.
 *
 * Every operation is one of float32, rounded by itself, so that scalar code, vector code and GPUs give the same bits;
 * and the result is a multiple of 2^-40, so that sums are exact integers and have no order. A row's weights, what they
 * come to, and the token that a random number falls on are thus the same on every machine, whatever adds them up.
 * Relative error 2e-7, and 2^-41 from the rounding; what is e^-28 of the best or less weighs nothing.
 *
 * Also compiled by nvcc, for the kernels of a GPU.
 */
#ifndef LR_BASE_MASS_H
#define LR_BASE_MASS_H
#include <stdint.h>
#ifndef __cplusplus
#include <stdbool.h>
#endif
#ifdef __CUDACC__
#define LR_MASS_FN        static __device__ __forceinline__
#define LR_MASS_MUL(a, b) __fmul_rn(a, b)
#define LR_MASS_ADD(a, b) __fadd_rn(a, b)
#else
#define LR_MASS_FN        static inline
#define LR_MASS_MUL(a, b) ((a) * (b))
#define LR_MASS_ADD(a, b) ((a) + (b))
#endif

#define LR_MASS_ONE    0x1p40f /* units of the best token */
#define LR_MASS_FAR    -28.0f
#define LR_MASS_SMALL  0x1p-17f /* below it a float's last bit is less than a unit */
#define LR_MASS_LOG2E  1.44269502162933349609375f
#define LR_MASS_LN2_HI 0.693359375f /* ten bits: times a whole number it is exact */
#define LR_MASS_LN2_LO -2.12194440e-4f
#define LR_MASS_C2     0.5f /* 1/n! */
#define LR_MASS_C3     0.166666667f
#define LR_MASS_C4     0.0416666667f
#define LR_MASS_C5     0.00833333333f
#define LR_MASS_C6     0.00138888889f
#define LR_MASS_C7     0.000198412698f
#define LR_MASS_ROUND  12582912.0f /* 1.5 * 2^23: adding it leaves no fraction */

/* e^d as a float, a multiple of 2^-40. d <= 0; NaN and -inf: 0. */
LR_MASS_FN float lr_mass(float d)
{
    if (!(d >= LR_MASS_FAR)) return 0;
    float n = LR_MASS_ADD(LR_MASS_ADD(LR_MASS_MUL(d, LR_MASS_LOG2E), LR_MASS_ROUND), -LR_MASS_ROUND);
    float r = LR_MASS_ADD(d, -LR_MASS_MUL(n, LR_MASS_LN2_HI));
    r = LR_MASS_ADD(r, -LR_MASS_MUL(n, LR_MASS_LN2_LO));
    float p = LR_MASS_ADD(LR_MASS_MUL(LR_MASS_C7, r), LR_MASS_C6);
    p = LR_MASS_ADD(LR_MASS_MUL(p, r), LR_MASS_C5);
    p = LR_MASS_ADD(LR_MASS_MUL(p, r), LR_MASS_C4);
    p = LR_MASS_ADD(LR_MASS_MUL(p, r), LR_MASS_C3);
    p = LR_MASS_ADD(LR_MASS_MUL(p, r), LR_MASS_C2);
    p = LR_MASS_ADD(LR_MASS_MUL(p, r), 1.0f);
    p = LR_MASS_ADD(LR_MASS_MUL(p, r), 1.0f);
    union {
        uint32_t u;
        float f;
    } two_n; /* 2^n, n = -41 .. 0 */
    two_n.u = (uint32_t)(127 + (int)n) << 23;
    p = LR_MASS_MUL(p, two_n.f);
    return p < LR_MASS_SMALL ? LR_MASS_ADD(LR_MASS_ADD(p, LR_MASS_SMALL), -LR_MASS_SMALL) : p;
}

LR_MASS_FN uint64_t lr_mass_units(float m) { return (uint64_t)LR_MASS_MUL(m, LR_MASS_ONE); }

/* The least whole number that is at least a share p of all, 1 at least. */
LR_MASS_FN uint64_t lr_mass_share(float p, uint64_t all)
{
    double q = (double)p * (double)all;
    uint64_t need = (uint64_t)q;
    if ((double)need < q) need++;
    return need < 1 ? 1 : need > all ? all : need;
}

/* What a number from [0, 1) falls on: the first token whose sum with those before it is larger. all > 0. */
LR_MASS_FN uint64_t lr_mass_target(double u, uint64_t all)
{
    uint64_t at = (uint64_t)(u * (double)all);
    return at < all ? at : all - 1;
}

#endif
