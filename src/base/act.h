/* act.h - activation functions by name: layer graphs ask for them, kernels compute them. */
#ifndef LR_BASE_ACT_H
#define LR_BASE_ACT_H

typedef enum lr_act {
    LR_ACT_SILU,      /* x / (1 + exp(-x)) */
    LR_ACT_GELU_TANH, /* the tanh form of GELU, arXiv:1606.08415 */
    LR_ACT_GELU_ERF,  /* x * (1 + erf(x / sqrt 2)) / 2 */
    LR_ACT_RELU,
    LR_ACT_RELU2 /* relu(x)^2 */
} lr_act;

#endif
