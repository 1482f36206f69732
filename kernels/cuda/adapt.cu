// adapt.cu - low-rank adapters: what they add to products, two kernels behind the product's own.
//
// down_k: t = x a^T of each row by its adapter. A warp has one number of the rank, a lane 8 values of k at a time,
// lanes are joined by a tree. up_k: y += t b, a thread a feature, ascending over the rank. Rows of a tile that have one
// adapter share what is read of it; sums are each row's own, so tiles of 1 and of 8 rows give the same bits.
#include "rows.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, FEW = 64, TILE = 8 };

struct adapt_args {
    const lr_cu_adapter_part *const *rows;
    int32_t site[LR_CU_JOINT], n[LR_CU_JOINT];
    float *y[LR_CU_JOINT];
    const void *x;
    const float *scale; // of x's rows, or of their 32 values
    float *t;           // (weights, m, ranks)
    int k, m, ranks;
};

// By constant indices: the arguments are no memory that a variable one could reach.
template <class T> static __device__ __forceinline__ T of_weight(const T (&v)[LR_CU_JOINT], int i)
{
    T r = v[0];
#pragma unroll
    for (int j = 1; j < LR_CU_JOINT; j++)
        if (j == i) r = v[j];
    return r;
}

// Rows r0 .. of the tile that have one adapter, taken out of those that are left.
template <int M>
static __device__ __forceinline__ const lr_cu_adapter_part *next_rows(const adapt_args &a, int r0, unsigned &left,
                                                                      unsigned &same)
{
    const lr_cu_adapter_part *parts = a.rows[r0 + __ffs((int)left) - 1];
    same = 0;
#pragma unroll
    for (int i = 0; i < M; i++)
        if (left >> i & 1 && a.rows[r0 + i] == parts) same |= 1u << i;
    left &= ~same;
    return parts;
}

template <int M> static __device__ __forceinline__ unsigned tile_rows(int r0, int m)
{
    return m - r0 < M ? (1u << (m - r0)) - 1 : (1u << M) - 1;
}

// Eight values of a row from i on, but for the scale of a row of halves.
template <int FORM> static __device__ __forceinline__ void eight_of(const adapt_args &a, int row, int i, float v[8])
{
    size_t at = (size_t)row * a.k + i;
    if (FORM == LR_CU_F32) {
        const float4 *p = (const float4 *)((const float *)a.x + at);
        float4 p0 = p[0], p1 = p[1];
        v[0] = p0.x, v[1] = p0.y, v[2] = p0.z, v[3] = p0.w, v[4] = p1.x, v[5] = p1.y, v[6] = p1.z, v[7] = p1.w;
    } else if (FORM == LR_CU_INT8) {
        uint2 p = *(const uint2 *)((const int8_t *)a.x + at);
        float d = a.scale[at / 32];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = d * (float)(int8_t)((j < 4 ? p.x : p.y) >> j % 4 * 8);
    } else {
        uint4 p = *(const uint4 *)((const uint16_t *)a.x + at);
        uint32_t w[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            uint16_t h = (uint16_t)(w[j / 2] >> j % 2 * 16);
            v[j] = FORM == LR_CU_BF16 ? cu_bf16(h) : cu_f16(h);
        }
    }
}

template <int FORM, int M> __global__ void __launch_bounds__(THREADS) down_k(adapt_args a)
{
    int w = blockIdx.z, r = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, r0 = blockIdx.y * M;
    unsigned left = tile_rows<M>(r0, a.m), same;
    while (left) {
        const lr_cu_adapter_part *parts = next_rows<M>(a, r0, left, same);
        if (!parts) continue;
        lr_cu_adapter_part p = parts[of_weight(a.site, w)];
        if (r >= p.rank) continue;
        float s[M] = {};
        for (int i = lane * 8; i < a.k; i += 256) {
            const float4 *q = (const float4 *)(p.a + (size_t)r * a.k + i);
            float4 q0 = q[0], q1 = q[1];
            float f[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
#pragma unroll
            for (int j = 0; j < M; j++) {
                if (!(same >> j & 1)) continue;
                float v[8];
                eight_of<FORM>(a, r0 + j, i, v);
#pragma unroll
                for (int c = 0; c < 8; c++) s[j] = __fmaf_rn(f[c], v[c], s[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < M; j++) {
            if (!(same >> j & 1)) continue;
            float v = cu_warp_sum(s[j]);
            if (FORM == LR_CU_F16) v = __fmul_rn(v, a.scale[r0 + j]);
            if (lane == 0) a.t[((size_t)w * a.m + r0 + j) * a.ranks + r] = v;
        }
    }
}

template <int M> __global__ void __launch_bounds__(THREADS) up_k(adapt_args a)
{
    int w = blockIdx.z, f = blockIdx.x * THREADS + threadIdx.x, r0 = blockIdx.y * M, n = of_weight(a.n, w);
    if (f >= n) return;
    unsigned left = tile_rows<M>(r0, a.m), same;
    while (left) {
        const lr_cu_adapter_part *parts = next_rows<M>(a, r0, left, same);
        if (!parts) continue;
        lr_cu_adapter_part p = parts[of_weight(a.site, w)];
        float s[M] = {};
        for (int r = 0; r < p.rank; r++) {
            float b = p.b[(size_t)r * n + f];
#pragma unroll
            for (int j = 0; j < M; j++)
                if (same >> j & 1) s[j] = __fmaf_rn(b, a.t[((size_t)w * a.m + r0 + j) * a.ranks + r], s[j]);
        }
        float *y = of_weight(a.y, w) + (size_t)r0 * n + f;
#pragma unroll
        for (int j = 0; j < M; j++)
            if (same >> j & 1 && p.rank > 0) y[(size_t)j * n] = __fadd_rn(y[(size_t)j * n], s[j]);
    }
}

template <int FORM> static cudaError_t down(const adapt_args &a, int n_weights, cudaStream_t s)
{
    unsigned ranks = (unsigned)(a.ranks + WARPS - 1) / WARPS, z = (unsigned)n_weights;
    if (a.m <= FEW) return cu_launch(down_k<FORM, 1>, dim3(ranks, a.m, z), dim3(THREADS), 0, s, a);
    return cu_launch(down_k<FORM, TILE>, dim3(ranks, (a.m + TILE - 1) / TILE, z), dim3(THREADS), 0, s, a);
}

static cudaError_t down_of(lr_cu_form form, const adapt_args &a, int n_weights, cudaStream_t s)
{
    switch (form) {
    case LR_CU_F32:
        return down<LR_CU_F32>(a, n_weights, s);
    case LR_CU_BF16:
        return down<LR_CU_BF16>(a, n_weights, s);
    case LR_CU_F16:
        return down<LR_CU_F16>(a, n_weights, s);
    case LR_CU_INT8:
        return down<LR_CU_INT8>(a, n_weights, s);
    default:
        return cudaErrorInvalidValue;
    }
}

extern "C" {

size_t lr_cu_adapt_work(int n_weights, int ranks, int m)
{
    return n_weights > 0 && ranks > 0 && m > 0 ? (size_t)n_weights * (size_t)ranks * (size_t)m * sizeof(float) : 0;
}

cudaError_t lr_cu_adapt(const lr_cu_adapters *l, const lr_cu_product *p, lr_cu_form form, const void *x, int m,
                        void *work, cudaStream_t s)
{
    int k = p->w[0].k, widest = 0;
    if (m < 0 || p->n_weights < 1 || p->n_weights > LR_CU_JOINT || p->slots || p->glu || k < 8 ||
        k % (form == LR_CU_INT8 ? 32 : 8) || l->ranks < 1)
        return cudaErrorInvalidValue;
    adapt_args a = {};
    a.rows = l->rows;
    a.x = x;
    a.scale = (const float *)((const char *)x + cu_packed_bytes(form, m, k));
    a.t = (float *)work;
    a.k = k;
    a.m = m;
    a.ranks = l->ranks;
    for (int i = 0; i < p->n_weights; i++) {
        if (p->w[i].n < 1 || p->w[i].k != k || l->site[i] < 0) return cudaErrorInvalidValue;
        a.site[i] = l->site[i];
        a.n[i] = p->w[i].n;
        a.y[i] = p->y[i];
        if (p->w[i].n > widest) widest = p->w[i].n;
    }
    if (m == 0) return cudaSuccess;
    cudaError_t e = down_of(form, a, p->n_weights, s);
    if (e) return e;
    unsigned blocks = (unsigned)(widest + THREADS - 1) / THREADS, z = (unsigned)p->n_weights;
    if (m <= FEW) return cu_launch(up_k<1>, dim3(blocks, m, z), dim3(THREADS), 0, s, a);
    return cu_launch(up_k<TILE>, dim3(blocks, (m + TILE - 1) / TILE, z), dim3(THREADS), 0, s, a);
}

} // extern "C"
