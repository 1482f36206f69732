/* rows_scalar.c - the reference of the row kernels, in plain C over libm.
 *
 * Norms sum squares in double: the square of a float is exact there and cannot overflow, so a row of 1e20 or of 1e-20
 * comes out right. 1/rms is held at the largest float, so that a row of zeros gives zeros even with eps = 0.
 */
#include "base/act.h"
#include "cpu/fill.h"
#include <float.h>
#include <math.h>

static float inv_sqrt(double mean)
{
    double r = 1.0 / sqrt(mean);
    return r < FLT_MAX ? (float)r : r >= FLT_MAX ? FLT_MAX : (float)r; /* NaN stays */
}

static void rmsnorm(const float *x, const float *w, float *y, int n, float eps)
{
    double ss = 0;
    for (int i = 0; i < n; i++) ss += (double)x[i] * x[i];
    float r = inv_sqrt(ss / n + eps);
    for (int i = 0; i < n; i++) y[i] = w ? x[i] * r * w[i] : x[i] * r;
}

static void layernorm(const float *x, const float *w, const float *b, float *y, int n, float eps)
{
    double sum = 0, ss = 0;
    for (int i = 0; i < n; i++) sum += x[i];
    double mean = sum / n;
    for (int i = 0; i < n; i++) ss += (x[i] - mean) * (x[i] - mean);
    float r = inv_sqrt(ss / n + eps);
    for (int i = 0; i < n; i++) {
        float v = (float)(x[i] - mean) * r;
        if (w) v *= w[i];
        y[i] = b ? v + b[i] : v;
    }
}

static void add(const float *a, const float *b, float *y, int n)
{
    for (int i = 0; i < n; i++) y[i] = a[i] + b[i];
}

static void mul(const float *a, const float *b, float *y, int n)
{
    for (int i = 0; i < n; i++) y[i] = a[i] * b[i];
}

static void scale(const float *x, float s, float *y, int n)
{
    for (int i = 0; i < n; i++) y[i] = x[i] * s;
}

static void softcap(const float *x, float cap, float *y, int n)
{
    for (int i = 0; i < n; i++) y[i] = cap * tanhf(x[i] / cap);
}

/* gelu with tanh is x * sigmoid(2u); gelu with erf is x/2 * erfc(-x/sqrt 2): both keep small results exact. */
static float act1(int act, float x)
{
    switch (act) {
    case LR_ACT_SILU:
        return x / (1.0f + expf(-x));
    case LR_ACT_GELU_TANH: {
        double u = 0.7978845608028654 * ((double)x + 0.044715 * (double)x * x * x);
        return (float)(x / (1.0 + exp(-2.0 * u)));
    }
    case LR_ACT_GELU_ERF:
        return (float)(0.5 * x * erfc(-x * 0.7071067811865476));
    case LR_ACT_RELU:
        return x > 0 ? x : 0;
    case LR_ACT_SIGMOID:
        return 1.0f / (1.0f + expf(-x));
    default:
        return x > 0 ? x * x : 0; /* LR_ACT_RELU2 */
    }
}

static void act_row(int act, const float *x, float *y, int n)
{
    for (int i = 0; i < n; i++) y[i] = act1(act, x[i]);
}

static void glu(int act, const float *gate, const float *up, float *y, int n)
{
    if (act == LR_ACT_SWIGLU_CLAMP) {
        for (int i = 0; i < n; i++) {
            float g = gate[i] > 7.0f ? 7.0f : gate[i], u = up[i] > 7.0f ? 7.0f : up[i] < -7.0f ? -7.0f : up[i];
            y[i] = g / (1.0f + expf(-1.702f * g)) * (u + 1.0f);
        }
        return;
    }
    for (int i = 0; i < n; i++) y[i] = act1(act, gate[i]) * up[i];
}

static void rope(float *x, int n_heads, int head_dim, int n_rot, bool interleaved, const float *cs)
{
    int half = n_rot / 2, step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
    for (int h = 0; h < n_heads; h++, x += head_dim) {
        for (int i = 0; i < half; i++) {
            float c = cs[2 * i], s = cs[2 * i + 1];
            float a = x[i * step], b = x[i * step + other];
            x[i * step] = a * c - b * s;
            x[i * step + other] = b * c + a * s;
        }
    }
}

void lr_rows_fill_scalar(lr_cpu_kernels *k)
{
    k->rmsnorm = rmsnorm;
    k->layernorm = layernorm;
    k->add = add;
    k->mul = mul;
    k->scale = scale;
    k->softcap = softcap;
    k->act = act_row;
    k->glu = glu;
    k->rope = rope;
}
