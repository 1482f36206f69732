// act.cuh - activations of one value, and of a gate and its partner.
#pragma once
#include "cu_port.h"
#include "base/act.h"

static __device__ __forceinline__ float cu_act(int act, float x)
{
    switch (act) {
    case LR_ACT_SILU:
        return x / (1.0f + expf(-x));
    case LR_ACT_GELU_TANH: { // x * sigmoid(2u) keeps small results exact; the sum is fused, or not, alike wherever it
                             // is
        float u = 0.7978845608f * __fadd_rn(x, __fmul_rn(__fmul_rn(__fmul_rn(0.044715f, x), x), x));
        return x / (1.0f + expf(-2.0f * u));
    }
    case LR_ACT_GELU_ERF:
        return 0.5f * x * erfcf(-x * 0.7071067812f);
    case LR_ACT_RELU:
        return x > 0 ? x : 0;
    case LR_ACT_SIGMOID:
        return 1.0f / (1.0f + expf(-x));
    default:
        return x > 0 ? x * x : 0;
    }
}

static __device__ __forceinline__ float cu_clamped_glu(float g, float u)
{
    g = fminf(g, 7.0f);
    u = fminf(fmaxf(u, -7.0f), 7.0f);
    return g / (1.0f + expf(-1.702f * g)) * (u + 1.0f);
}

static __device__ __forceinline__ float cu_glu(int act, float g, float u)
{
    return act == LR_ACT_SWIGLU_CLAMP ? cu_clamped_glu(g, u) : cu_act(act, g) * u;
}
