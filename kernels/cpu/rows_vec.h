/* rows_vec.h - the row kernels on the vector words; included by one rows_<isa>.c each, behind vec_<isa>.h.
 *
 * Tails go through the same arithmetic with the missing lanes 0, so an element's result does not depend on its place.
 * Sums run in VW * 2 lanes of double, then pairwise over the lanes.
 */
#include "base/act.h"
#include "cpu/fill.h"
#include "cpu/vec_math.h"
#include <float.h>
#include <math.h>

/* Runs a body for i = 0, VW, ...; LOAD and STORE take VW values, or the `left` values of the last piece. */
#define ROW_LOOP(n, ...)                                                                                               \
    do {                                                                                                               \
        int i = 0;                                                                                                     \
        for (; i + VW <= (n); i += VW) {                                                                               \
            enum { WHOLE = 1 };                                                                                        \
            const int left = VW;                                                                                       \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
        if (i < (n)) {                                                                                                 \
            enum { WHOLE = 0 };                                                                                        \
            const int left = (n)-i;                                                                                    \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    } while (0)
#define LOAD(p)     (WHOLE ? vf_load((p) + i) : vf_loadn((p) + i, left))
#define STORE(p, v) (WHOLE ? vf_store((p) + i, v) : vf_storen((p) + i, v, left))

static float inv_sqrt(double mean)
{
    double r = 1.0 / sqrt(mean);
    return r < FLT_MAX ? (float)r : r >= FLT_MAX ? FLT_MAX : (float)r; /* NaN stays */
}

static void rmsnorm(const float *x, const float *w, float *y, int n, float eps)
{
    vd ss = vd_zero(), s2 = vd_zero();
    int j = 0;
    for (; j + 2 * VW <= n; j += 2 * VW) {
        vd a = vd_of(vf_load(x + j)), b = vd_of(vf_load(x + j + VW));
        ss = vd_fma(a, a, ss);
        s2 = vd_fma(b, b, s2);
    }
    for (; j < n; j += VW) {
        vd a = vd_of(vf_loadn(x + j, n - j < VW ? n - j : VW));
        ss = vd_fma(a, a, ss);
    }
    vf r = vf_set1(inv_sqrt(vd_hsum(vd_add(ss, s2)) / n + eps));
    if (w) {
        ROW_LOOP(n, STORE(y, vf_mul(vf_mul(LOAD(x), r), LOAD(w))););
    } else {
        ROW_LOOP(n, STORE(y, vf_mul(LOAD(x), r)););
    }
}

static void layernorm(const float *x, const float *w, const float *b, float *y, int n, float eps)
{
    vd sum = vd_zero(), ss = vd_zero();
    ROW_LOOP(n, sum = vd_add(sum, vd_of(LOAD(x))););
    double mean = vd_hsum(sum) / n;
    int j = 0;
    for (; j + VW <= n; j += VW) {
        vd a = vd_sub1(vd_of(vf_load(x + j)), mean);
        ss = vd_fma(a, a, ss);
    }
    double sq = vd_hsum(ss);
    for (; j < n; j++) sq += (x[j] - mean) * (x[j] - mean);
    vf r = vf_set1(inv_sqrt(sq / n + eps));
    ROW_LOOP(n, {
        vf v = vf_mul(vf_of(vd_sub1(vd_of(LOAD(x)), mean)), r);
        if (w) v = vf_mul(v, LOAD(w));
        if (b) v = vf_add(v, LOAD(b));
        STORE(y, v);
    });
}

static void add(const float *a, const float *b, float *y, int n) { ROW_LOOP(n, STORE(y, vf_add(LOAD(a), LOAD(b)));); }

static void mul(const float *a, const float *b, float *y, int n) { ROW_LOOP(n, STORE(y, vf_mul(LOAD(a), LOAD(b)));); }

static void scale(const float *x, float s, float *y, int n) { ROW_LOOP(n, STORE(y, vf_mul(LOAD(x), vf_set1(s)));); }

static void softcap(const float *x, float cap, float *y, int n)
{
    vf top = vf_set1(cap);
    ROW_LOOP(n, STORE(y, vf_mul(top, vec_tanh(vf_div(LOAD(x), top)))););
}

VEC_INLINE vf act1(int act, vf x)
{
    switch (act) {
    case LR_ACT_SILU:
        return vec_gate(x, x);
    case LR_ACT_GELU_TANH:
        return vec_gelu_tanh(x);
    case LR_ACT_GELU_ERF:
        return vec_gelu_erf(x);
    case LR_ACT_RELU:
        return vf_max(vf_set1(0.0f), x);
    case LR_ACT_SIGMOID:
        return vec_gate(vf_set1(1.0f), x);
    default: {
        vf r = vf_max(vf_set1(0.0f), x);
        return vf_mul(r, r);
    }
    }
}

/* The switch is outside the loop: one loop an activation. */
#define EACH_ACT(act, X)                                                                                               \
    switch (act) {                                                                                                     \
    case LR_ACT_SILU:                                                                                                  \
        X(LR_ACT_SILU);                                                                                                \
        break;                                                                                                         \
    case LR_ACT_GELU_TANH:                                                                                             \
        X(LR_ACT_GELU_TANH);                                                                                           \
        break;                                                                                                         \
    case LR_ACT_GELU_ERF:                                                                                              \
        X(LR_ACT_GELU_ERF);                                                                                            \
        break;                                                                                                         \
    case LR_ACT_RELU:                                                                                                  \
        X(LR_ACT_RELU);                                                                                                \
        break;                                                                                                         \
    case LR_ACT_SIGMOID:                                                                                               \
        X(LR_ACT_SIGMOID);                                                                                             \
        break;                                                                                                         \
    default:                                                                                                           \
        X(LR_ACT_RELU2);                                                                                               \
        break;                                                                                                         \
    }

static void act_row(int act, const float *x, float *y, int n)
{
#define X(A) ROW_LOOP(n, STORE(y, act1(A, LOAD(x)));)
    EACH_ACT(act, X)
#undef X
}

/* LR_ACT_SWIGLU_CLAMP. vf_min and vf_max give their second operand for a NaN, which so stays one. */
static void glu_clamp(const float *gate, const float *up, float *y, int n)
{
    vf top = vf_set1(7.0f), low = vf_set1(-7.0f), one = vf_set1(1.0f), slope = vf_set1(1.702f);
    ROW_LOOP(n, {
        vf g = vf_min(top, LOAD(gate));
        vf u = vf_max(low, vf_min(top, LOAD(up)));
        STORE(y, vf_mul(vec_gate(g, vf_mul(slope, g)), vf_add(u, one)));
    });
}

static void glu(int act, const float *gate, const float *up, float *y, int n)
{
    if (act == LR_ACT_SWIGLU_CLAMP) {
        glu_clamp(gate, up, y, n);
        return;
    }
#define X(A) ROW_LOOP(n, STORE(y, vf_mul(act1(A, LOAD(gate)), LOAD(up)));)
    EACH_ACT(act, X)
#undef X
}

static void rope_halves(float *x, int n_heads, int head_dim, int half, const float *cs)
{
    int i = 0;
    for (; i + VW <= half; i += VW) {
        vf c, s;
        vf_load_pairs(cs + 2 * i, &c, &s);
        for (int h = 0; h < n_heads; h++) {
            float *pa = x + (size_t)h * head_dim + i, *pb = pa + half;
            vf a = vf_load(pa), b = vf_load(pb);
            vf_store(pa, vf_fms(a, c, vf_mul(b, s)));
            vf_store(pb, vf_fma(b, c, vf_mul(a, s)));
        }
    }
    for (; i < half; i++) {
        for (int h = 0; h < n_heads; h++) {
            float *pa = x + (size_t)h * head_dim + i, *pb = pa + half, a = *pa, b = *pb;
            *pa = fmaf(a, cs[2 * i], -(b * cs[2 * i + 1]));
            *pb = fmaf(b, cs[2 * i], a * cs[2 * i + 1]);
        }
    }
}

static void rope(float *x, int n_heads, int head_dim, int n_rot, bool interleaved, const float *cs)
{
    if (!interleaved) {
        rope_halves(x, n_heads, head_dim, n_rot / 2, cs);
        return;
    }
    ROW_LOOP(n_rot, {
        vf v = LOAD(cs);
        vf co = vf_dup_even(v);
        vf si = vf_dup_odd(v);
        for (int h = 0; h < n_heads; h++) {
            float *row = x + (size_t)h * head_dim;
            vf a = LOAD(row);
            STORE(row, vf_fmaddsub(a, co, vf_mul(vf_swap_pairs(a), si)));
        }
    });
}

void VEC_NAME(lr_rows_fill)(lr_cpu_kernels *k)
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
