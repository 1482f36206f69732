// linear.cu - y = x w^T from the file's own weight blocks.
//
// Exact mode, any number of rows: blocks of weights are unpacked to half precision in shared memory and multiplied with
// mma.m16n8k16 (weights are the 16, rows the 8), sums in float32. k is cut into parts by the shape of the weight alone
// (k_part); a part's sum is one chain of mma in ascending k, and the parts are added in ascending order: by a second
// kernel where there are few rows (the parts then fill the device), in registers where there are many. So an output's
// bits depend on its row and the weight only. Rows come as halves scaled by a power of two each (LR_CU_F16), as
// bfloat16 for BF16 weights.
//
// Fast mode, up to 8 rows: a warp an output feature, 32 values a lane at a time, integer products (dp4a) of 8-bit rows.
// Reference mode: the same shape in float32, weights exact.
#include "formats.cuh"
#include "rows.cuh"
#include <type_traits>

// Sanitized test builds (1) and those of faulty copies (2) leave out what is a sibling's twin: compiling takes the
// time.
#ifdef LLMRUN_CUDA_FEW
#undef CU_FORMATS
#if LLMRUN_CUDA_FEW > 1
#define CU_FORMATS(X)                                                                                                  \
    X(LR_BF16, cu_bf16_t)                                                                                              \
    X(LR_Q8_0, cu_q8_0_t)                                                                                              \
    X(LR_Q6_K, cu_q6_k_t)
#else
#define CU_FORMATS(X)                                                                                                  \
    X(LR_BF16, cu_bf16_t)                                                                                              \
    X(LR_Q5_1, cu_q5_1_t)                                                                                              \
    X(LR_Q8_0, cu_q8_0_t)                                                                                              \
    X(LR_Q5_K, cu_q5_k_t)                                                                                              \
    X(LR_Q6_K, cu_q6_k_t)                                                                                              \
    X(LR_MXFP4, cu_mxfp4_t)
#endif
#endif

enum { STEP = 64, PAD = 8, LD = STEP + PAD }; // values of k a step, and a row of a tile in shared memory

// ---- the cut of k ----

// A part is a multiple of 256 values; the fewest parts that give some 300 blocks of 64 features, at most 16.
static int k_part(int n, int k)
{
    int blocks = (n + 63) / 64, parts = (300 + blocks - 1) / blocks, most = k / 512;
    if (parts > most) parts = most;
    if (parts > 16) parts = 16;
    if (parts < 1) parts = 1;
    int units = (k + 255) / 256;
    return (units + parts - 1) / parts * 256;
}

struct mma_args {
    const uint8_t *w;
    size_t row_bytes;
    const uint16_t *x;
    const float *scale; // (m), or null
    const float *bias;
    float *y, *parts; // parts: (parts, m, n), or null: y is written
    int n, k, m, part;
    bool add;
};

static __device__ __forceinline__ void finish(const mma_args &a, int row, int feature, float v)
{
    if (a.scale) v = __fmul_rn(v, a.scale[row]);
    if (a.bias) v = __fadd_rn(v, a.bias[feature]);
    float *y = a.y + (size_t)row * a.n + feature;
    *y = a.add ? __fadd_rn(*y, v) : v;
}

template <bool BF> static __device__ __forceinline__ uint32_t pack2(float a, float b)
{
    uint16_t lo = BF ? cu_to_bf16(a) : cu_to_f16(a), hi = BF ? cu_to_bf16(b) : cu_to_f16(b);
    return lo | (uint32_t)hi << 16;
}

// Tile of 16 * MT * WM features x 8 * NT * WN rows; WM * WN warps.
template <class W, int WM, int WN, int MT, int NT> struct tile {
    enum {
        THREADS = 32 * WM * WN,
        FEATURES = 16 * MT * WM,
        ROWS = 8 * NT * WN,
        W_PER = FEATURES * STEP / 8 / THREADS, // chunks of 8 values that a thread brings a step
        X_PER = (ROWS * STEP / 8 + THREADS - 1) / THREADS,
        STAGE = (FEATURES + ROWS) * LD, // halves
    };
    static size_t shared() { return 2 * STAGE * sizeof(uint16_t); }
};

template <class W, bool BF, int WM, int WN, int MT, int NT>
__global__ void __launch_bounds__(32 * WM * WN) mma_k(mma_args a)
{
    typedef tile<W, WM, WN, MT, NT> T;
    SHARED_DYN(uint16_t, smem);
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, wm = warp % WM, wn = warp / WM;
    int f0 = blockIdx.x * T::FEATURES, r0 = blockIdx.y * T::ROWS;
    int k0 = a.parts ? blockIdx.z * a.part : 0, k1 = a.parts ? min(a.k, k0 + a.part) : a.k;
    float acc[MT][NT][4] = {}, total[MT][NT][4] = {};
    uint32_t rw[T::W_PER][4], rx[T::X_PER][4];

    auto load = [&](int k) { // the next step's values into registers, zeros beyond the edges
#pragma unroll
        for (int c = 0; c < T::W_PER; c++) {
            int at = c * T::THREADS + tid, f = f0 + at / (STEP / 8), i = k + at % (STEP / 8) * 8;
            float v[8] = {};
            if (f < a.n && i < k1) W::eight(a.w + (size_t)f * a.row_bytes, i, v);
#pragma unroll
            for (int j = 0; j < 4; j++) rw[c][j] = pack2<BF>(v[2 * j], v[2 * j + 1]);
        }
#pragma unroll
        for (int c = 0; c < T::X_PER; c++) {
            int at = c * T::THREADS + tid, r = r0 + at / (STEP / 8), i = k + at % (STEP / 8) * 8;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (at < T::ROWS * (STEP / 8) && r < a.m && i < k1) v = *(const uint4 *)(a.x + (size_t)r * a.k + i);
            rx[c][0] = v.x, rx[c][1] = v.y, rx[c][2] = v.z, rx[c][3] = v.w;
        }
    };
    auto store = [&](uint16_t *stage) {
#pragma unroll
        for (int c = 0; c < T::W_PER; c++) {
            int at = c * T::THREADS + tid;
            *(uint4 *)(stage + at / (STEP / 8) * LD + at % (STEP / 8) * 8) =
                make_uint4(rw[c][0], rw[c][1], rw[c][2], rw[c][3]);
        }
#pragma unroll
        for (int c = 0; c < T::X_PER; c++) {
            int at = c * T::THREADS + tid;
            if (at < T::ROWS * (STEP / 8))
                *(uint4 *)(stage + (T::FEATURES + at / (STEP / 8)) * LD + at % (STEP / 8) * 8) =
                    make_uint4(rx[c][0], rx[c][1], rx[c][2], rx[c][3]);
        }
    };
    auto compute = [&](const uint16_t *stage) {
        const uint16_t *tw = stage + wm * MT * 16 * LD, *tx = stage + (T::FEATURES + wn * NT * 8) * LD;
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint32_t fa[MT][4], fb[NT][2];
#pragma unroll
            for (int i = 0; i < MT; i++) cu_ldmatrix(fa[i], tw + (i * 16 + lane % 16) * LD + k + lane / 16 * 8);
            if constexpr (NT % 2 == 0) {
#pragma unroll
                for (int j = 0; j < NT; j += 2) {
                    uint32_t b[4];
                    cu_ldmatrix(b, tx + (j * 8 + lane % 8 + lane / 16 * 8) * LD + k + lane / 8 % 2 * 8);
                    fb[j][0] = b[0], fb[j][1] = b[1], fb[j + 1][0] = b[2], fb[j + 1][1] = b[3];
                }
            } else {
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    const uint16_t *p = tx + (j * 8 + lane / 4) * LD + k + lane % 4 * 2;
                    fb[j][0] = *(const uint32_t *)p;
                    fb[j][1] = *(const uint32_t *)(p + 8);
                }
            }
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
                    if (BF)
                        cu_mma_bf16(acc[i][j], fa[i], fb[j]);
                    else
                        cu_mma_f16(acc[i][j], fa[i], fb[j]);
        }
    };
    auto fold = [&] { // a part of k ends
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    total[i][j][t] = __fadd_rn(total[i][j][t], acc[i][j][t]);
                    acc[i][j][t] = 0;
                }
    };

    for (int k = k0 - STEP, stage = 1; k < k1; k += STEP, stage ^= 1) {
        if (k >= k0) {
            store(smem + stage * T::STAGE); // nobody reads this stage any more: all have passed the last barrier
            __syncthreads();
        }
        if (k + STEP < k1) load(k + STEP);
        if (k >= k0) compute(smem + stage * T::STAGE);
        if (k + STEP >= k1 || (k + STEP) % a.part == 0) fold();
    }

#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                int f = f0 + (wm * MT + i) * 16 + lane / 4 + t / 2 * 8,
                    r = r0 + (wn * NT + j) * 8 + lane % 4 * 2 + t % 2;
                if (f >= a.n || r >= a.m) continue;
                if (a.parts)
                    a.parts[((size_t)blockIdx.z * a.m + r) * a.n + f] = total[i][j][t];
                else
                    finish(a, r, f, total[i][j][t]);
            }
}

__global__ void __launch_bounds__(256) join_k(mma_args a, int parts)
{
    size_t size = (size_t)a.m * a.n, at = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (at >= size) return;
    float s = 0;
    for (int p = 0; p < parts; p++) s = __fadd_rn(s, a.parts[p * size + at]);
    finish(a, (int)(at / a.n), (int)(at % a.n), s);
}

// Rows up to which a tile of 8 and of 32 is taken, and up to which parts of k are blocks of their own: few rows give
// few tiles, and 132 multiprocessors want work.
enum { SMALL = 8, MIDDLE = 64, SPLIT = 256 };

template <class W, bool BF, int WM, int WN, int MT, int NT>
static cudaError_t mma_launch(const mma_args &a, int parts, cudaStream_t s)
{
    typedef tile<W, WM, WN, MT, NT> T;
    dim3 grid((a.n + T::FEATURES - 1) / T::FEATURES, (a.m + T::ROWS - 1) / T::ROWS, parts);
    return cu_launch(mma_k<W, BF, WM, WN, MT, NT>, grid, dim3(T::THREADS), T::shared(), s, a);
}

template <class W, bool BF> static cudaError_t mma_run(mma_args a, void *work, cudaStream_t s)
{
    int parts = (a.k + a.part - 1) / a.part;
    if (a.m > SPLIT) parts = 1;
    if (parts > 1) a.parts = (float *)work;
    cudaError_t e = a.m <= SMALL    ? mma_launch<W, BF, 4, 1, 1, 1>(a, parts, s)
                    : a.m <= MIDDLE ? mma_launch<W, BF, 4, 1, 1, 4>(a, parts, s)
                                    : mma_launch<W, BF, 4, 2, 2, 8>(a, parts, s);
    if (e || parts == 1) return e;
    return cu_launch(join_k, dim3(((size_t)a.m * a.n + 255) / 256), dim3(256), 0, s, a, parts);
}

// ---- one warp a feature ----

enum { WARPS = 4 };

struct vec_args {
    const uint8_t *w;
    size_t row_bytes;
    const void *x;
    const float *scale;
    const float *bias;
    float *y;
    int n, k, m;
    bool add;
};

static __device__ __forceinline__ void vec_finish(const vec_args &a, int row, int feature, float v)
{
    if (a.bias) v = __fadd_rn(v, a.bias[feature]);
    float *y = a.y + (size_t)row * a.n + feature;
    *y = a.add ? __fadd_rn(*y, v) : v;
}

// 8-bit rows. A unit's sum is exact; units are added by fused multiply-adds, ascending within a lane.
template <class W, int M> __global__ void __launch_bounds__(32 * WARPS) dot_k(vec_args a)
{
    int feature = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (feature >= a.n) return;
    const uint8_t *w = a.w + (size_t)feature * a.row_bytes;
    const int8_t *x = (const int8_t *)a.x;
    int units = a.k / 32;
    float s[M] = {};
    for (int u = lane; u < units; u += 32) {
        cu_unit b;
        W::unit(w, u, b);
#pragma unroll
        for (int r = 0; r < M; r++) {
            if (r >= a.m) break;
            const uint4 *xp = (const uint4 *)(x + (size_t)r * a.k + u * 32);
            uint4 x0 = xp[0], x1 = xp[1];
            int xs[8] = {(int)x0.x, (int)x0.y, (int)x0.z, (int)x0.w, (int)x1.x, (int)x1.y, (int)x1.z, (int)x1.w};
            int dot[2] = {}, sum[2] = {};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                dot[i / 4] = __dp4a(b.q[i], xs[i], dot[i / 4]);
                if (W::OFFSET > 0 || W::MINS > 0) sum[i / 4] = __dp4a(0x01010101, xs[i], sum[i / 4]);
            }
            float sx = a.scale[(size_t)r * units + u], v;
            if (W::HALVES > 0) {
                v = __fmul_rn(b.d[0], (float)(dot[0] - W::OFFSET * sum[0]));
                v = __fmaf_rn(b.d[1], (float)(dot[1] - W::OFFSET * sum[1]), v);
            } else {
                v = __fmul_rn(b.d[0], (float)(dot[0] + dot[1] - W::OFFSET * (sum[0] + sum[1])));
            }
            if (W::MINS > 0) v = __fmaf_rn(b.m[0], (float)(sum[0] + sum[1]), v);
            s[r] = __fmaf_rn(sx, v, s[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < M; r++) {
        if (r >= a.m) break;
        float v = cu_warp_sum(s[r]);
        if (lane == 0) vec_finish(a, r, feature, v);
    }
}

// Float rows, exact weights.
template <class W, int M> __global__ void __launch_bounds__(32 * WARPS) ref_k(vec_args a)
{
    int feature = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, r0 = blockIdx.y * M;
    if (feature >= a.n) return;
    const uint8_t *w = a.w + (size_t)feature * a.row_bytes;
    float s[M] = {};
    for (int i = lane * 8; i < a.k; i += 256) {
        float v[8];
        W::eight(w, i, v);
#pragma unroll
        for (int r = 0; r < M; r++) {
            if (r0 + r >= a.m) break;
            const float4 *xp = (const float4 *)((const float *)a.x + (size_t)(r0 + r) * a.k + i);
            float4 x0 = xp[0], x1 = xp[1];
            float xs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
            for (int j = 0; j < 8; j++) s[r] = __fmaf_rn(v[j], xs[j], s[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < M; r++) {
        if (r0 + r >= a.m) break;
        float v = cu_warp_sum(s[r]);
        if (lane == 0) vec_finish(a, r0 + r, feature, v);
    }
}

template <class W> static cudaError_t dot_run(const vec_args &a, cudaStream_t s)
{
    dim3 grid((a.n + WARPS - 1) / WARPS), block(32 * WARPS);
    if constexpr (!W::BYTES)
        return cudaErrorInvalidValue;
    else if (a.m == 1)
        return cu_launch(dot_k<W, 1>, grid, block, 0, s, a);
    else
        return cu_launch(dot_k<W, 8>, grid, block, 0, s, a);
}

template <class W> static cudaError_t ref_run(const vec_args &a, cudaStream_t s)
{
    dim3 block(32 * WARPS);
    unsigned g = (unsigned)(a.n + WARPS - 1) / WARPS;
    return cu_launch(ref_k<W, 4>, dim3(g, (a.m + 3) / 4), block, 0, s, a);
}

// ---- unpacking ----

template <class W>
__global__ void __launch_bounds__(256) unpack_k(const uint8_t *w, size_t row_bytes, int k, uint16_t *out)
{
    for (int i = threadIdx.x * 8; i < k; i += 256 * 8) {
        float v[8];
        W::eight(w + (size_t)blockIdx.x * row_bytes, i, v);
        *(uint4 *)(out + (size_t)blockIdx.x * k + i) = make_uint4(pack2<true>(v[0], v[1]), pack2<true>(v[2], v[3]),
                                                                  pack2<true>(v[4], v[5]), pack2<true>(v[6], v[7]));
    }
}

// ---- launchers ----

static bool is_plain(int type) { return type == LR_F32 || type == LR_F16 || type == LR_BF16; }

static int block_of(int type)
{
    switch (type) {
#define X(t, format)                                                                                                   \
    case t:                                                                                                            \
        return format::BLOCK;
        CU_FORMATS(X)
#undef X
    default:
        return 0;
    }
}

template <class W> static cudaError_t allow()
{
    constexpr bool BF = std::is_same<W, cu_bf16_t>::value;
    return cu_allow_shared(mma_k<W, BF, 4, 2, 2, 8>, tile<W, 4, 2, 2, 8>::shared());
}

cudaError_t cu_init_linear()
{
    cudaError_t e = cudaSuccess;
#define X(t, format)                                                                                                   \
    if (!e) e = allow<format>();
    CU_FORMATS(X)
#undef X
    return e;
}

extern "C" {

bool lr_cu_weight_good(int type) { return block_of(type) != 0; }

lr_cu_form lr_cu_linear_form(lr_cu_math math, int type, int m)
{
    if (math == LR_CU_REF) return LR_CU_F32;
    if (math == LR_CU_FAST && m <= SMALL) return is_plain(type) ? LR_CU_F32 : LR_CU_INT8;
    return type == LR_BF16 ? LR_CU_BF16 : LR_CU_F16;
}

size_t lr_cu_linear_work(lr_cu_math math, int type, int n, int k, int m)
{
    (void)type;
    if (math == LR_CU_REF || n <= 0 || k <= 0 || m <= 0) return 0;
    int part = k_part(n, k), parts = (k + part - 1) / part;
    return parts > 1 ? (size_t)parts * (size_t)(m < SPLIT ? m : SPLIT) * (size_t)n * 4 : 0;
}

cudaError_t lr_cu_linear(lr_cu_math math, const lr_cu_weight *w, const void *x, int m, const float *bias, bool add,
                         float *y, void *work, cudaStream_t s)
{
    int block = block_of(w->type);
    if (!block || m < 0 || w->n <= 0 || w->k <= 0 || w->k % block || w->k % 8) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    lr_cu_form form = lr_cu_linear_form(math, w->type, m);
    const float *scale = form == LR_CU_F16 || form == LR_CU_INT8
                             ? (const float *)((const char *)x + cu_packed_bytes(form, m, w->k))
                             : nullptr;
    if (form == LR_CU_F32 || form == LR_CU_INT8) {
        vec_args a = {(const uint8_t *)w->data, w->row_bytes, x, scale, bias, y, w->n, w->k, m, add};
        switch (w->type) {
#define X(type, format)                                                                                                \
    case type:                                                                                                         \
        return form == LR_CU_F32 ? ref_run<format>(a, s) : dot_run<format>(a, s);
            CU_FORMATS(X)
#undef X
        default:
            return cudaErrorInvalidValue;
        }
    }
    mma_args a = {(const uint8_t *)w->data, w->row_bytes, (const uint16_t *)x, scale, bias, y, nullptr, w->n, w->k, m,
                  k_part(w->n, w->k),       add};
    switch (w->type) {
#define X(type, format)                                                                                                \
    case type:                                                                                                         \
        return mma_run<format, std::is_same<format, cu_bf16_t>::value>(a, work, s);
        CU_FORMATS(X)
#undef X
    default:
        return cudaErrorInvalidValue;
    }
}

cudaError_t lr_cu_dequant(const lr_cu_weight *w, uint16_t *out, cudaStream_t s)
{
    if (w->n <= 0 || w->k <= 0 || w->k % 8) return cudaErrorInvalidValue;
    switch (w->type) {
#define X(type, format)                                                                                                \
    case type:                                                                                                         \
        if (w->k % format::BLOCK) return cudaErrorInvalidValue;                                                        \
        return cu_launch(unpack_k<format>, dim3(w->n), dim3(256), 0, s, (const uint8_t *)w->data, w->row_bytes, w->k,  \
                         out);
        CU_FORMATS(X)
#undef X
    default:
        return cudaErrorInvalidValue;
    }
}

} // extern "C"
