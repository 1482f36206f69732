// linear.cuh - products with weights of one format: the kernels, and a table of their launchers. Each linear_N.cu makes
// those of some formats, so that they compile side by side; linear.cu finds the format and says what the product is.
#pragma once
#include "act.cuh"
#include "formats.cuh"
#include "rows.cuh"
#include <type_traits>

enum { STEP = 64, PAD = 8, LD = STEP + PAD }; // values of k a step, and a row of a tile in shared memory

// One weight of a product: features first .. first + n - 1 of all.
struct segment {
    const uint8_t *w;
    size_t row_bytes, matrix; // matrix: bytes of an expert
    const float *bias;
    float *y;
    int n, first, block; // block: its first along x of the grid
};
// What the rows of y are, if not those of x.
struct slot_rows {
    const lr_cu_piece *pieces; // null: rows as they are
    const int32_t *row, *own;  // row null: x are slots too
};
struct mma_args {
    segment seg[LR_CU_JOINT];
    int n_seg;
    const uint16_t *x;
    const float *scale; // of x's rows, or null
    float *parts;       // (parts, m, n), or null: y is written
    int n, k, m, part;  // n: of all segments; m: rows of y
    int act;            // two segments: y of the first is act(first) * second; < 0: no
    bool add;
    slot_rows at;
};

static __device__ __forceinline__ int row_of_x(const slot_rows &at, int row) { return at.row ? at.row[row] : row; }

static __device__ __forceinline__ float biased(const segment &g, float v, float scale, int expert, int feature)
{
    v = __fmul_rn(v, scale);
    return g.bias ? __fadd_rn(v, g.bias[(size_t)expert * g.n + feature]) : v;
}

// The last segment that fits, by constant indices: the arguments are no memory that a variable one could reach.
template <class F> static __device__ __forceinline__ segment segment_at(const mma_args &a, const F &fits)
{
    segment g = a.seg[0];
#pragma unroll
    for (int i = 1; i < LR_CU_JOINT; i++)
        if (i < a.n_seg && a.act < 0 && fits(a.seg[i])) g = a.seg[i];
    return g;
}

static __device__ __forceinline__ void finish(const mma_args &a, const segment &g, int row, int expert, int feature,
                                              float v)
{
    v = biased(g, v, a.scale ? a.scale[row_of_x(a.at, row)] : 1.0f, expert, feature);
    float *y = g.y + (size_t)row * g.n + feature;
    *y = a.add ? __fadd_rn(*y, v) : v;
}
static __device__ __forceinline__ void finish_glu(const mma_args &a, int row, int expert, int feature, float gate,
                                                  float up)
{
    float scale = a.scale ? a.scale[row_of_x(a.at, row)] : 1.0f;
    gate = biased(a.seg[0], gate, scale, expert, feature);
    up = biased(a.seg[1], up, scale, expert, feature);
    a.seg[0].y[(size_t)row * a.seg[0].n + feature] = cu_glu(a.act, gate, up);
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
    int r0 = blockIdx.y * T::ROWS, r1 = a.m, expert = 0;
    segment g = segment_at(a, [&](const segment &s) { return (int)blockIdx.x >= s.block; });
    int f0 = (blockIdx.x - g.block) * (a.act < 0 ? T::FEATURES : T::FEATURES / 2);
    if (a.at.pieces) {
        lr_cu_piece p = a.at.pieces[blockIdx.y];
        if (p.n == 0) return;
        r0 = p.first, r1 = r0 + p.n, expert = p.expert;
    }
    int k0 = a.parts ? blockIdx.z * a.part : 0, k1 = a.parts ? min(a.k, k0 + a.part) : a.k;
    float acc[MT][NT][4] = {}, total[MT][NT][4] = {};
    uint32_t rw[T::W_PER][4] = {}, rx[T::X_PER][4] = {};

    const uint8_t *ws[T::W_PER]; // rows that this thread brings; null: beyond the edge
    const uint16_t *xs[T::X_PER];
#pragma unroll
    for (int c = 0; c < T::W_PER; c++) {
        int t = (c * T::THREADS + tid) / (STEP / 8), f = f0 + t;
        const uint8_t *w = g.w;
        if (a.act >= 0) { // eight of the gate, then the same eight of its partner: one thread gets both results
            f = f0 + t / 16 * 8 + t % 8;
            if (t / 8 % 2) w = a.seg[1].w;
        }
        ws[c] = f < g.n ? w + expert * g.matrix + (size_t)f * g.row_bytes : nullptr;
    }
#pragma unroll
    for (int c = 0; c < T::X_PER; c++) {
        int t = (c * T::THREADS + tid) / (STEP / 8), r = r0 + t;
        xs[c] = t < T::ROWS && r < r1 ? a.x + (size_t)row_of_x(a.at, r) * a.k : nullptr;
    }

    auto load = [&](int k) { // the next step's values into registers, zeros beyond the edges
#pragma unroll
        for (int c = 0; c < T::W_PER; c++) {
            int i = k + (c * T::THREADS + tid) % (STEP / 8) * 8;
            float v[8] = {};
            if (ws[c] && i < k1) W::eight(ws[c], i, v);
#pragma unroll
            for (int j = 0; j < 4; j++) rw[c][j] = pack2<BF>(v[2 * j], v[2 * j + 1]);
        }
#pragma unroll
        for (int c = 0; c < T::X_PER; c++) {
            int i = k + (c * T::THREADS + tid) % (STEP / 8) * 8;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (xs[c] && i < k1) v = *(const uint4 *)(xs[c] + i);
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

    float *parts = a.parts ? a.parts + (size_t)blockIdx.z * a.m * a.n : nullptr;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                int r = r0 + (wn * NT + j) * 8 + lane % 4 * 2 + t % 2;
                if (a.act >= 0) { // results 2 and 3 are the partners of 0 and 1
                    int f = f0 + (wm * MT + i) * 8 + lane / 4;
                    if (f >= g.n || r >= r1) continue;
                    if (parts)
                        parts[(size_t)r * a.n + t / 2 * g.n + f] = total[i][j][t];
                    else if (t < 2)
                        finish_glu(a, r, expert, f, total[i][j][t], total[i][j][t + 2]);
                    continue;
                }
                int f = f0 + (wm * MT + i) * 16 + lane / 4 + t / 2 * 8;
                if (f >= g.n || r >= r1) continue;
                if (parts)
                    parts[(size_t)r * a.n + g.first + f] = total[i][j][t];
                else
                    finish(a, g, r, expert, f, total[i][j][t]);
            }
}

// Rows up to which a tile of 8 and of 32 is taken, and up to which parts of k are blocks of their own: few rows give
// few tiles, and 132 multiprocessors want work.
enum { SMALL = 8, MIDDLE = 64, SPLIT = 256 };

template <class W, bool BF, int WM, int WN, int MT, int NT>
static cudaError_t mma_launch(mma_args &a, int parts, int n_pieces, cudaStream_t s)
{
    typedef tile<W, WM, WN, MT, NT> T;
    int blocks = 0;
    for (int i = 0; i < a.n_seg; i++) {
        a.seg[i].block = blocks;
        blocks += (a.seg[i].n + T::FEATURES - 1) / T::FEATURES;
    }
    if (a.act >= 0) { // both are in each block
        a.seg[1].block = 0;
        blocks = (2 * a.seg[0].n + T::FEATURES - 1) / T::FEATURES;
    }
    dim3 grid(blocks, n_pieces ? n_pieces : (a.m + T::ROWS - 1) / T::ROWS, parts);
    return cu_launch(mma_k<W, BF, WM, WN, MT, NT>, grid, dim3(T::THREADS), T::shared(), s, a);
}

template <class W> static cudaError_t mma_run(mma_args &a, int parts, const lr_cu_slots *slots, cudaStream_t s)
{
    constexpr bool BF = std::is_same<W, cu_bf16_t>::value;
    int rows = slots ? slots->tile : a.m, n = slots ? slots->n_pieces : 0;
    if (rows <= SMALL) return mma_launch<W, BF, 4, 1, 1, 1>(a, parts, n, s);
    if (rows <= MIDDLE) return mma_launch<W, BF, 4, 1, 1, 4>(a, parts, n, s);
    return mma_launch<W, BF, 4, 2, 2, 8>(a, parts, n, s);
}

// ---- one warp a feature ----

enum { WARPS = 4 };

struct vec_args {
    segment g;
    const void *x;
    const float *scale;
    int k, m;
    bool add;
    slot_rows at;
};

static __device__ __forceinline__ void vec_finish(const vec_args &a, int row, int expert, int feature, float v)
{
    v = biased(a.g, v, 1.0f, expert, feature);
    float *y = a.g.y + (size_t)row * a.g.n + feature;
    *y = a.add ? __fadd_rn(*y, v) : v;
}

// The rows of a block: n of them from r0 on, of an expert; false: none.
template <int M> static __device__ __forceinline__ bool vec_rows(const vec_args &a, int &r0, int &n, int &expert)
{
    r0 = blockIdx.y * M, n = min(M, a.m - r0), expert = 0;
    if (a.at.pieces) {
        lr_cu_piece p = a.at.pieces[blockIdx.y];
        r0 = p.first, n = p.n, expert = p.expert;
    }
    return n > 0;
}

// 8-bit rows. A unit's sum is exact; units are added by fused multiply-adds, ascending within a lane.
template <class W, int M> __global__ void __launch_bounds__(32 * WARPS) dot_k(vec_args a)
{
    int feature = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, r0, n, expert;
    if (feature >= a.g.n || !vec_rows<M>(a, r0, n, expert)) return;
    const uint8_t *w = a.g.w + expert * a.g.matrix + (size_t)feature * a.g.row_bytes;
    const int8_t *x = (const int8_t *)a.x;
    int units = a.k / 32;
    size_t from[M];
    float s[M] = {};
#pragma unroll
    for (int r = 0; r < M; r++) from[r] = r < n ? row_of_x(a.at, r0 + r) : 0;
    for (int u = lane; u < units; u += 32) {
        cu_unit b;
        W::unit(w, u, b);
#pragma unroll
        for (int r = 0; r < M; r++) {
            if (r >= n) continue;
            const uint4 *xp = (const uint4 *)(x + from[r] * a.k + u * 32);
            uint4 x0 = xp[0], x1 = xp[1];
            int xs[8] = {(int)x0.x, (int)x0.y, (int)x0.z, (int)x0.w, (int)x1.x, (int)x1.y, (int)x1.z, (int)x1.w};
            int dot[2] = {}, sum[2] = {};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                dot[i / 4] = __dp4a(b.q[i], xs[i], dot[i / 4]);
                if (W::OFFSET > 0 || W::MINS > 0) sum[i / 4] = __dp4a(0x01010101, xs[i], sum[i / 4]);
            }
            float sx = a.scale[from[r] * units + u], v;
            if (W::HALVES > 0) {
                v = __fmul_rn(b.d[0], (float)(dot[0] - W::OFFSET * sum[0]));
                v = __fmaf_rn(b.d[1], (float)(dot[1] - W::OFFSET * sum[1]), v);
            } else {
                v = __fmul_rn(b.d[0], (float)(dot[0] + dot[1] - W::OFFSET * (sum[0] + sum[1])));
            }
            if (W::MINS > 0 && W::HALVES > 0)
                v = __fmaf_rn(b.m[1], (float)sum[1], __fmaf_rn(b.m[0], (float)sum[0], v));
            else if (W::MINS > 0)
                v = __fmaf_rn(b.m[0], (float)(sum[0] + sum[1]), v);
            s[r] = __fmaf_rn(sx, v, s[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < M; r++) {
        if (r >= n) continue;
        float v = cu_warp_sum(s[r]);
        if (lane == 0) vec_finish(a, r0 + r, expert, feature, v);
    }
}

// Float rows, exact weights.
template <class W, int M> __global__ void __launch_bounds__(32 * WARPS) ref_k(vec_args a)
{
    int feature = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, r0, n, expert;
    if (feature >= a.g.n || !vec_rows<M>(a, r0, n, expert)) return;
    const uint8_t *w = a.g.w + expert * a.g.matrix + (size_t)feature * a.g.row_bytes;
    size_t from[M];
    float s[M] = {};
#pragma unroll
    for (int r = 0; r < M; r++) from[r] = r < n ? row_of_x(a.at, r0 + r) : 0;
    for (int i = lane * 8; i < a.k; i += 256) {
        float v[8];
        W::eight(w, i, v);
#pragma unroll
        for (int r = 0; r < M; r++) {
            if (r >= n) continue;
            const float4 *xp = (const float4 *)((const float *)a.x + from[r] * a.k + i);
            float4 x0 = xp[0], x1 = xp[1];
            float xs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
            for (int j = 0; j < 8; j++) s[r] = __fmaf_rn(v[j], xs[j], s[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < M; r++) {
        if (r >= n) continue;
        float v = cu_warp_sum(s[r]);
        if (lane == 0) vec_finish(a, r0 + r, expert, feature, v);
    }
}

template <class W> static cudaError_t dot_run(const vec_args &a, const lr_cu_slots *slots, cudaStream_t s)
{
    dim3 grid((a.g.n + WARPS - 1) / WARPS, slots ? (unsigned)slots->n_pieces : 1u), block(32 * WARPS);
    if constexpr (!W::BYTES)
        return cudaErrorInvalidValue;
    else if (slots ? slots->m == 1 : a.m == 1) // a row has an expert once
        return cu_launch(dot_k<W, 1>, grid, block, 0, s, a);
    else
        return cu_launch(dot_k<W, 8>, grid, block, 0, s, a);
}

template <class W> static cudaError_t ref_run(const vec_args &a, const lr_cu_slots *slots, cudaStream_t s)
{
    dim3 block(32 * WARPS);
    unsigned g = (unsigned)(a.g.n + WARPS - 1) / WARPS;
    return cu_launch(ref_k<W, 4>, dim3(g, slots ? slots->n_pieces : (a.m + 3) / 4), block, 0, s, a);
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

template <class W> static cudaError_t unpack_run(const lr_cu_weight *w, uint16_t *out, cudaStream_t s)
{
    return cu_launch(unpack_k<W>, dim3(w->n), dim3(256), 0, s, (const uint8_t *)w->data, w->row_bytes, w->k, out);
}

// ---- a format's launchers ----

template <class W> static cudaError_t allow()
{
    constexpr bool BF = std::is_same<W, cu_bf16_t>::value;
    return cu_allow_shared(mma_k<W, BF, 4, 2, 2, 8>, tile<W, 4, 2, 2, 8>::shared());
}

struct cu_linear_format {
    int type, block;
    cudaError_t (*allow)();
    cudaError_t (*mma)(mma_args &, int parts, const lr_cu_slots *, cudaStream_t); // sets the segments' blocks
    cudaError_t (*dot)(const vec_args &, const lr_cu_slots *, cudaStream_t);
    cudaError_t (*ref)(const vec_args &, const lr_cu_slots *, cudaStream_t);
    cudaError_t (*unpack)(const lr_cu_weight *, uint16_t *out, cudaStream_t);
};
#define CU_LINEAR_FORMAT(type, W) {type, W::BLOCK, allow<W>, mma_run<W>, dot_run<W>, ref_run<W>, unpack_run<W>},

// What a file makes; a table's last entry has no launchers.
const cu_linear_format *cu_linear_1();
const cu_linear_format *cu_linear_2();
const cu_linear_format *cu_linear_3();
const cu_linear_format *cu_linear_4();
