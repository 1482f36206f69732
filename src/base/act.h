/* act.h - activation functions by name: layer graphs ask for them, kernels compute them. */
#ifndef LR_BASE_ACT_H
#define LR_BASE_ACT_H

typedef enum lr_act {
    LR_ACT_SILU,      /* x / (1 + exp(-x)) */
    LR_ACT_GELU_TANH, /* the tanh form of GELU, arXiv:1606.08415 */
    LR_ACT_GELU_ERF,  /* x * (1 + erf(x / sqrt 2)) / 2 */
    LR_ACT_RELU,
    LR_ACT_RELU2,   /* relu(x)^2 */
    LR_ACT_SIGMOID, /* 1 / (1 + exp(-x)) */
    /* Of a GLU only (gpt-oss): g / (1 + exp(-1.702 g)) * (u + 1), with gate g held at most at 7 and u in -7..7. As an
     * ACT it is no activation of one value; layer graphs refuse it. */
    LR_ACT_SWIGLU_CLAMP
} lr_act;

#endif
