// rows.cu - what is done row by row: norms, activations, sums, embedding, packing. A block a row.
#include "act.cuh"
#include "formats.cuh"
#include "rows.cuh"

enum { THREADS = 256 };

// ---- elementwise ----

struct f_copy {
    const float *x;
    __device__ float operator()(size_t i) const { return x[i]; }
};
struct f_add {
    const float *a, *b;
    __device__ float operator()(size_t i) const { return a[i] + b[i]; }
};
struct f_mul {
    const float *a, *b;
    __device__ float operator()(size_t i) const { return a[i] * b[i]; }
};
struct f_act {
    const float *x;
    int act;
    __device__ float operator()(size_t i) const { return cu_act(act, x[i]); }
};
struct f_glu {
    const float *g, *u;
    int act;
    __device__ float operator()(size_t i) const { return cu_glu(act, g[i], u[i]); }
};
struct f_mul_row { // b: a value a row
    const float *a, *b;
    int width;
    __device__ float operator()(size_t i) const { return a[i] * b[i / width]; }
};
struct f_parts {
    lr_cu_parts p;
    const float *a, *b;
    __device__ float operator()(size_t i) const
    {
        size_t row = i / ((size_t)p.n_heads * (p.n_a + p.n_b));
        int at = (int)(i % ((size_t)p.n_heads * (p.n_a + p.n_b))), h = at / (p.n_a + p.n_b), j = at % (p.n_a + p.n_b);
        if (j < p.n_a) return a[(row * p.n_heads + h) * p.stride_a + p.first + j];
        return b ? b[p.shared ? row * p.n_b + j - p.n_a : (row * p.n_heads + h) * p.n_b + j - p.n_a] : 0.0f;
    }
};
struct f_ranks { // rank r's columns at[r] .. at[r+1]-1 of m rows, one rank behind the other
    const float *x;
    const int32_t *at;
    int m, width;
    __device__ float operator()(size_t i) const
    {
        int row = (int)(i / width), c = (int)(i % width), r = 0;
        while (c >= at[r + 1]) r++;
        return x[(size_t)m * at[r] + (size_t)row * (at[r + 1] - at[r]) + c - at[r]];
    }
};
struct f_mix { // a row's experts by rank, times their weights
    const float *slots, *chosen;
    const int32_t *slot_of;
    int n_used, width;
    __device__ float operator()(size_t i) const
    {
        size_t row = i / width, at = i % width;
        const float *w = chosen + (2 * row + 1) * n_used;
        float s = 0;
        for (int r = 0; r < n_used; r++)
            s = __fadd_rn(s, __fmul_rn(w[r], slots[(size_t)slot_of[row * n_used + r] * width + at]));
        return s;
    }
};
struct f_scale {
    const float *x;
    float s;
    __device__ float operator()(size_t i) const { return x[i] * s; }
};
struct f_softcap {
    const float *x;
    float s;
    __device__ float operator()(size_t i) const { return s * tanhf(x[i] / s); }
};

template <class F> struct at_row { // values of one row
    const F &f;
    size_t base;
    __device__ float operator()(int i) const { return f(base + i); }
};

template <class F> __global__ void __launch_bounds__(THREADS) each_k(F f, int width, cu_out o)
{
    SHARED(float, red, [THREADS / 32]);
    at_row<F> r = {f, (size_t)blockIdx.x * width};
    cu_write_row<THREADS>(r, width, o, blockIdx.x, red);
}

template <class F> static cudaError_t each(F f, int m, int width, lr_cu_out out, cudaStream_t s)
{
    cu_out o;
    if (m < 0 || width <= 0 || !cu_out_of(out, m, width, &o)) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    return cu_launch(each_k<F>, dim3(m), dim3(THREADS), 0, s, f, width, o);
}

struct f_gather {
    const float *x; // null: zeros
    __device__ float operator()(int i) const { return x ? x[i] : 0.0f; }
};
__global__ void __launch_bounds__(THREADS) gather_k(const float *x, const int32_t *rows, int width, cu_out o)
{
    SHARED(float, red, [THREADS / 32]);
    int from = rows[blockIdx.x];
    f_gather f = {from < 0 ? nullptr : x + (size_t)from * width};
    cu_write_row<THREADS>(f, width, o, blockIdx.x, red);
}

// ---- embedding ----

template <class W> struct f_embed {
    const uint8_t *row; // null: zeros
    float scale;
    __device__ float operator()(int i) const { return row ? W::one(row, i) * scale : 0.0f; }
};
template <class W>
__global__ void __launch_bounds__(THREADS)
    embed_k(const uint8_t *w, size_t row_bytes, int n, int width, const int32_t *tokens, float scale, cu_out o)
{
    SHARED(float, red, [THREADS / 32]);
    int t = tokens[blockIdx.x];
    f_embed<W> f = {t >= 0 && t < n ? w + (size_t)t * row_bytes : nullptr, scale};
    cu_write_row<THREADS>(f, width, o, blockIdx.x, red);
}

// ---- norms ----

struct norm_args {
    const float *w, *bias, *x, *add;
    float *sum;
    int width, group;
    float eps;
    bool layer;
};

// What a row is before its norm; when there is a sum, it has been written by the thread that asks.
static __device__ __forceinline__ float norm_in(const norm_args &a, size_t at)
{
    if (a.sum) return a.sum[at];
    return a.add ? a.x[at] + a.add[at] : a.x[at];
}

struct f_norm {
    const norm_args &a;
    size_t base;
    float mean, inv;
    __device__ float operator()(int i) const
    {
        float v = (norm_in(a, base + i) - mean) * inv;
        if (a.w) v *= a.w[i];
        return a.bias ? v + a.bias[i] : v;
    }
};

__global__ void __launch_bounds__(THREADS) norm_k(norm_args a, cu_out o)
{
    SHARED(float, red, [THREADS / 32]);
    size_t base = (size_t)blockIdx.x * a.width;
    float mean = 0, s = 0;
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        float v = a.add ? a.x[base + i] + a.add[base + i] : a.x[base + i];
        if (a.sum) a.sum[base + i] = v;
        s += a.layer ? v : v * v;
    }
    s = cu_block_sum<THREADS>(s, red);
    if (a.layer) {
        mean = s / (float)a.width;
        s = 0;
        for (int i = threadIdx.x; i < a.width; i += THREADS) {
            float v = norm_in(a, base + i) - mean;
            s += v * v;
        }
        s = cu_block_sum<THREADS>(s, red);
    }
    f_norm f = {a, base, mean, 1.0f / sqrtf(s / (float)a.width + a.eps)};
    cu_write_row<THREADS>(f, a.width, o, blockIdx.x, red);
}

// Groups (heads) of a row: a warp each.
__global__ void __launch_bounds__(THREADS) norm_groups_k(norm_args a, float *out)
{
    int lane = threadIdx.x % 32;
    for (int g = threadIdx.x / 32; g < a.width / a.group; g += THREADS / 32) {
        size_t base = (size_t)blockIdx.x * a.width + (size_t)g * a.group;
        float mean = 0, s = 0;
        for (int i = lane; i < a.group; i += 32) {
            float v = a.add ? a.x[base + i] + a.add[base + i] : a.x[base + i];
            if (a.sum) a.sum[base + i] = v;
            s += a.layer ? v : v * v;
        }
        s = cu_warp_sum(s);
        if (a.layer) {
            mean = s / (float)a.group;
            s = 0;
            for (int i = lane; i < a.group; i += 32) {
                float v = norm_in(a, base + i) - mean;
                s += v * v;
            }
            s = cu_warp_sum(s);
        }
        f_norm f = {a, base, mean, 1.0f / sqrtf(s / (float)a.group + a.eps)};
        for (int i = lane; i < a.group; i += 32) out[base + i] = f(i);
    }
}

__global__ void __launch_bounds__(THREADS) bias_k(float *y, const float *bias, int n)
{
    for (int i = threadIdx.x; i < n; i += THREADS) y[(size_t)blockIdx.x * n + i] += bias[i];
}

extern "C" {

size_t lr_cu_rows_bytes(lr_cu_form form, int m, int k)
{
    if (m < 0 || k < 0) return 0;
    size_t n = cu_packed_bytes(form, m, k);
    if (form == LR_CU_F16) n += cu_round16((size_t)m * 4);
    if (form == LR_CU_INT8) n += cu_round16((size_t)m * (k / 32) * 4);
    return n;
}

cudaError_t lr_cu_rows(const float *x, int m, int k, lr_cu_out out, cudaStream_t s)
{
    return each(f_copy{x}, m, k, out, s);
}
cudaError_t lr_cu_add(const float *a, const float *b, int m, int width, lr_cu_out out, cudaStream_t s)
{
    return each(f_add{a, b}, m, width, out, s);
}
cudaError_t lr_cu_mul(const float *a, const float *b, int m, int width, lr_cu_out out, cudaStream_t s)
{
    return each(f_mul{a, b}, m, width, out, s);
}
cudaError_t lr_cu_mul_row(const float *a, const float *b, int m, int width, lr_cu_out out, cudaStream_t s)
{
    return each(f_mul_row{a, b, width}, m, width, out, s);
}
cudaError_t lr_cu_parts_of(const lr_cu_parts *p, const float *a, const float *b, int m, lr_cu_out out, cudaStream_t s)
{
    if (p->n_heads < 1 || p->n_a < 1 || p->n_b < 0 || p->first < 0 || p->first + p->n_a > p->stride_a)
        return cudaErrorInvalidValue;
    return each(f_parts{*p, a, b}, m, p->n_heads * (p->n_a + p->n_b), out, s);
}
cudaError_t lr_cu_ranks(const float *x, const int32_t *at, int m, int width, lr_cu_out out, cudaStream_t s)
{
    return each(f_ranks{x, at, m, width}, m, width, out, s);
}
cudaError_t lr_cu_act(int act, const float *x, int m, int width, lr_cu_out out, cudaStream_t s)
{
    if (act < LR_ACT_SILU || act > LR_ACT_SIGMOID) return cudaErrorInvalidValue;
    return each(f_act{x, act}, m, width, out, s);
}
cudaError_t lr_cu_glu(int act, const float *gate, const float *up, int m, int width, lr_cu_out out, cudaStream_t s)
{
    if (act < LR_ACT_SILU || act > LR_ACT_SWIGLU_CLAMP) return cudaErrorInvalidValue;
    return each(f_glu{gate, up, act}, m, width, out, s);
}
cudaError_t lr_cu_scale(const float *x, float scale, int m, int width, lr_cu_out out, cudaStream_t s)
{
    return each(f_scale{x, scale}, m, width, out, s);
}
cudaError_t lr_cu_softcap(const float *x, float scale, int m, int width, lr_cu_out out, cudaStream_t s)
{
    return each(f_softcap{x, scale}, m, width, out, s);
}

cudaError_t lr_cu_mix(const lr_cu_slots *t, const float *slots, const float *chosen, int m, int width, lr_cu_out out,
                      cudaStream_t s)
{
    return each(f_mix{slots, chosen, t->at, t->n_used, width}, m, width, out, s);
}

cudaError_t lr_cu_gather(const float *x, const int32_t *rows, int m, int width, lr_cu_out out, cudaStream_t s)
{
    cu_out o;
    if (m < 0 || width <= 0 || !cu_out_of(out, m, width, &o)) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    return cu_launch(gather_k, dim3(m), dim3(THREADS), 0, s, x, rows, width, o);
}

cudaError_t lr_cu_embed(const lr_cu_weight *w, const int32_t *tokens, int m, float scale, lr_cu_out out, cudaStream_t s)
{
    cu_out o;
    if (m < 0 || w->k <= 0 || !cu_out_of(out, m, w->k, &o)) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    switch (w->type) {
#define X(type, format)                                                                                                \
    case type:                                                                                                         \
        if (w->k % format::BLOCK) return cudaErrorInvalidValue;                                                        \
        return cu_launch(embed_k<format>, dim3(m), dim3(THREADS), 0, s, (const uint8_t *)w->data, w->row_bytes, w->n,  \
                         w->k, tokens, scale, o);
        CU_FORMATS(X)
#undef X
    default:
        return cudaErrorInvalidValue;
    }
}

cudaError_t lr_cu_norm_rows(const lr_cu_norm *n, const float *x, const float *add, float *sum, int m, lr_cu_out out,
                            cudaStream_t s)
{
    cu_out o;
    int group = n->group > 0 ? n->group : n->width;
    if (m < 0 || n->width <= 0 || n->width % group || !cu_out_of(out, m, n->width, &o)) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    norm_args a = {n->w, n->layer_norm ? n->bias : nullptr, x, add, sum, n->width, group, n->eps, n->layer_norm};
    if (group == n->width) return cu_launch(norm_k, dim3(m), dim3(THREADS), 0, s, a, o);
    if (out.packed && out.form != LR_CU_F32) return cudaErrorInvalidValue;
    float *to = out.f32 ? out.f32 : (float *)out.packed;
    if (out.f32 && out.packed) return cudaErrorInvalidValue;
    return cu_launch(norm_groups_k, dim3(m), dim3(THREADS), 0, s, a, to);
}

cudaError_t lr_cu_bias(float *y, const float *bias, int m, int n, cudaStream_t s)
{
    if (m < 0 || n <= 0) return cudaErrorInvalidValue;
    return m == 0 ? cudaSuccess : cu_launch(bias_k, dim3(m), dim3(THREADS), 0, s, y, bias, n);
}

} // extern "C"
