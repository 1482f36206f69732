/* vec_math.h - exp, tanh and erfc on the vector words of vec_<isa>.h, which is included first.
 *
 * Each is 2^n times a polynomial of the rest. The coefficients are minimax fits (Remez) of the function named, over
 * |r| <= 1/2; the constant term of 2^r is exactly 1, so that exp(0) = 1. Errors, measured over the whole range
 * (tests/unit/test_rows.c): exp 1 ulp, exp2 of the softmax 2 ulp, tanh 3 ulp, erfc 1e-6 relative.
 */
#ifndef LR_KERNELS_CPU_VEC_MATH_H
#define LR_KERNELS_CPU_VEC_MATH_H

#define VEC_LOG2E_HI 1.44269502162933349609375f /* log2(e) as a float, and what it lacks */
#define VEC_LOG2E_LO 1.925963033500e-8f

/* (2^r - 1) / r */
VEC_INLINE vf vec_exp2_rest(vf r)
{
    vf p = vf_fma(vf_set1(0.0001535336207f), r, vf_set1(0.001339887439f));
    p = vf_fma(p, r, vf_set1(0.009618437357f));
    p = vf_fma(p, r, vf_set1(0.05550332471f));
    p = vf_fma(p, r, vf_set1(0.2402264791f));
    return vf_fma(p, r, vf_set1(0.6931472029f));
}

/* 2^x for x <= 0, the weights of a softmax: 0 below 2^-125 (so no denormal ever meets a product), NaN stays. */
VEC_INLINE vf vec_exp2_softmax(vf x)
{
    vm low = vf_lt(x, vf_set1(-125.0f));
    vf y = vf_max(vf_set1(-125.0f), x), n = vf_round(y), r = vf_sub(y, n);
    vf p = vf_fma(vf_set1(0.001326472714f), r, vf_set1(0.00967151264f));
    p = vf_fma(p, r, vf_set1(0.05550733743f));
    p = vf_fma(p, r, vf_set1(0.2402224209f));
    p = vf_fma(p, r, vf_set1(0.6931469776f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_select(low, vf_set1(0.0f), vf_ldexp_near(p, n));
}

/* n and r with e^x = 2^n 2^r */
VEC_INLINE vf vec_exp_split(vf x, vf *n)
{
    *n = vf_round(vf_mul(x, vf_set1(VEC_LOG2E_HI)));
    return vf_fma(x, vf_set1(VEC_LOG2E_LO), vf_fms(x, vf_set1(VEC_LOG2E_HI), *n));
}

/* e^x; infinity and 0 beyond the range. */
VEC_INLINE vf vec_exp(vf x)
{
    vf n, r = vec_exp_split(vf_max(vf_set1(-140.0f), vf_min(vf_set1(140.0f), x)), &n);
    return vf_ldexp(vf_fma(vec_exp2_rest(r), r, vf_set1(1.0f)), n);
}

/* With y = e^2|x| - 1: tanh|x| = y / (y + 2), exact for small x and 1 from 10 on. */
VEC_INLINE vf vec_tanh(vf x)
{
    vf n, a = vf_min(vf_set1(10.0f), vf_abs(x)), r = vec_exp_split(vf_add(a, a), &n);
    vf two_n = vf_ldexp(vf_set1(1.0f), n);
    vf y = vf_fma(vf_mul(vec_exp2_rest(r), r), two_n, vf_sub(two_n, vf_set1(1.0f)));
    return vf_sign_of(vf_div(y, vf_add(y, vf_set1(2.0f))), x);
}

/* x * sigmoid(z): the common form of silu and of gelu with tanh. */
VEC_INLINE vf vec_gate(vf x, vf z) { return vf_div(x, vf_add(vf_set1(1.0f), vec_exp(vf_sub(vf_set1(0.0f), z)))); }

VEC_INLINE vf vec_gelu_tanh(vf x)
{
    vf u = vf_fma(vf_mul(vf_mul(x, x), vf_set1(0.044715f)), x, x);
    return vec_gate(x, vf_mul(u, vf_set1(1.5957691216f))); /* 2 sqrt(2/pi) */
}

/* x/2 erfc(-x/sqrt 2) = max(x, 0) - |x|/2 c, with c = erfc(a) = e^-a^2 P(t), a = |x|/sqrt 2, t = 1 / (1 + 0.4 a). */
VEC_INLINE vf vec_gelu_erf(vf x)
{
    vf ax = vf_min(vf_set1(20.0f), vf_abs(x));
    vf t = vf_div(vf_set1(1.0f), vf_fma(ax, vf_set1(0.28284271247f), vf_set1(1.0f)));
    vf p = vf_fma(vf_set1(0.02835979996f), t, vf_set1(-0.07295587067f));
    p = vf_fma(p, t, vf_set1(-0.06782486948f));
    p = vf_fma(p, t, vf_set1(0.2811983661f));
    p = vf_fma(p, t, vf_set1(-0.07297199266f));
    p = vf_fma(p, t, vf_set1(0.2709499119f));
    p = vf_fma(p, t, vf_set1(0.1766354041f));
    p = vf_fma(p, t, vf_set1(0.2315185271f));
    p = vf_fma(p, t, vf_set1(0.2250633841f));
    p = vf_fma(p, t, vf_set1(2.736913614e-05f));
    vf sq = vf_mul(ax, ax), lost = vf_fms(ax, ax, sq); /* a large square's rounding would show in its exp */
    vf e = vec_exp(vf_mul(sq, vf_set1(-0.5f)));
    vf c = vf_mul(p, vf_fnma(vf_mul(lost, vf_set1(0.5f)), e, e));
    return vf_fnma(vf_mul(vf_set1(0.5f), vf_abs(x)), c, vf_max(vf_set1(0.0f), x));
}

#endif
