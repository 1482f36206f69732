// attn.cu - attention over paged keys and values, for decoding, prompts and trees of drafts, on tensor cores.
//
// What a row's attention is (so that tiles, splits and company cannot show in its bits):
//   - slots are cut into chunks of LR_CU_CHUNK and those into steps of 64, both at absolute multiples;
//   - a score is one chain of mma over the head's dimensions; a step takes one maximum, rescales the chunk's sums once
//     and adds weights times values, one chain of mma over the step's keys; the weights' own sum is one more column of
//     that product (a column of ones);
//   - a step that a row sees nothing of changes nothing; chunks start afresh and are folded in ascending order.
// Queries and weights are halves (bfloat16 where the cache is), sums float32. A float32 cache goes to attn_f32.cu.
//
// A tile is up to 16 * WM pairs of a row and a head of one KV head. Narrow: one group of 16 pairs, four warps share the
// keys of a step and then the dimensions of the values; a grid over chunks, joined by a second kernel. Wide: a warp for
// each 16 pairs (head sizes over 128: two), chunks one after another, folded in registers.
#include "attn.cuh"

enum { STEP = 64, PAD = 8, THREADS = 128, WARPS = 4 };

// ---- joining chunks ----

struct fold_by {
    float old, add;
};
// Sums scaled by 2^m and 2^part_m -> the factors that bring both to the new m. part_m is finite.
static __device__ __forceinline__ fold_by fold_max(float &m, float part_m)
{
    float top = fmaxf(m, part_m);
    fold_by f = {cu_exp2(__fsub_rn(m, top)), cu_exp2(__fsub_rn(part_m, top))};
    m = top;
    return f;
}
static __device__ __forceinline__ float fold_sum(fold_by f, float sum, float part)
{
    return __fmaf_rn(part, f.add, __fmul_rn(sum, f.old));
}
// What the sums of a row are multiplied with at the end.
static __device__ __forceinline__ float fold_end(float m, float l, const float *sinks, int head)
{
    if (!sinks) return l > 0 ? __fdiv_rn(1.0f, l) : 0.0f;
    float sink = __fmul_rn(sinks[head], 1.4426950408889634f), top = fmaxf(m, sink);
    float scale = cu_exp2(__fsub_rn(m, top));
    return __fdiv_rn(scale, __fmaf_rn(l, scale, cu_exp2(__fsub_rn(sink, top))));
}

__global__ void __launch_bounds__(THREADS) join_k(attn_args a)
{
    int head = blockIdx.y, d = a.kv.head_dim, row = row_of_block(a);
    if (row < 0) return;
    int slot = a.at.slot[row], from = first_slot(a, row);
    const float *part = a.part + ((size_t)(row - a.first_row) * a.p.n_heads + head) * a.chunks * (d + 2);
    for (int j = threadIdx.x; j < d; j += THREADS) {
        float m = -INFINITY, l = 0, o = 0;
        for (int c = from / LR_CU_CHUNK; c <= slot / LR_CU_CHUNK; c++) {
            const float *p = part + (size_t)c * (d + 2);
            if (p[d] == -INFINITY) continue;
            fold_by f = fold_max(m, p[d]);
            l = fold_sum(f, l, p[d + 1]);
            o = fold_sum(f, o, p[j]);
        }
        a.out[((size_t)row * a.p.n_heads + head) * d + j] = __fmul_rn(o, fold_end(m, l, a.p.sinks, head));
    }
}

// ---- tiles ----

static __device__ __forceinline__ row_of find_row(const attn_args &a, lr_cu_tile t, int head0, int pair)
{
    int i = pair / a.heads, h = head0 + pair % a.heads, group_end = (head0 / a.group + 1) * a.group;
    if (i >= t.n || h >= group_end) return {};
    return look_up_row(a, t.row + i, h);
}

template <bool BF> static __device__ __forceinline__ uint16_t narrow16(float v)
{
    if (BF) return cu_to_bf16(v);
    return cu_to_f16(v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v);
}
template <bool BF> static __device__ __forceinline__ uint32_t pair16(float a, float b)
{
    return narrow16<BF>(a) | (uint32_t)narrow16<BF>(b) << 16;
}
template <bool BF> static __device__ __forceinline__ void mma16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    if (BF)
        cu_mma_bf16(d, a, b);
    else
        cu_mma_f16(d, a, b);
}

// Eight values of a slot, as 16-bit values; what lies behind head_dim is 0.
template <bool BF>
static __device__ __forceinline__ uint4 kv_eight(const lr_cu_kv_part &p, const lr_cu_kv &kv, const char *block,
                                                 size_t at, int left)
{
    float v[8] = {};
    if (p.type == LR_CU_E4M3 && left >= 8 && at % 8 == 0) {
        uint2 w = *(const uint2 *)(block + at);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = cu_e4m3((uint8_t)((j < 4 ? w.x : w.y) >> 8 * (j % 4)));
    } else if (cu_kv_turned(p.type)) { // at is a multiple of 8
        size_t values = cu_kv_values(p.type, kv.n_kv_heads, kv.head_dim, kv.block_size);
        float d = cu_f16(((const uint16_t *)(block + values))[at / 32]);
        uint2 w = *(const uint2 *)(block + (p.type == LR_Q8_0 ? at : at / 32 * 16 + at % 16)), u = make_uint2(0, 0);
        int half = at % 32 / 16 * 4, pair = (int)(at % 32 / 8) * 2;
        if (p.type == LR_CU_Q6) u = *(const uint2 *)(block + cu_kv_upper(kv) + at / 32 * 8);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int b = (int)((j < 4 ? w.x : w.y) >> 8 * (j % 4)) & 255, q = b >> half & 15;
            int up = (int)((j < 4 ? u.x : u.y) >> (8 * (j % 4) + pair)) & 3;
            q = p.type == LR_Q8_0 ? (int)(int8_t)b : p.type == LR_Q4_0 ? (q ^ 8) - 8 : ((up << 4 | q) ^ 32) - 32;
            v[j] = __fmul_rn(d, (float)q);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j >= left) break;
            v[j] = p.type == LR_F16    ? cu_f16(((const uint16_t *)block)[at + j])
                   : p.type == LR_BF16 ? cu_bf16(((const uint16_t *)block)[at + j])
                                       : cu_e4m3(((const uint8_t *)block)[at + j]);
        }
    }
    return make_uint4(pair16<BF>(v[0], v[1]), pair16<BF>(v[2], v[3]), pair16<BF>(v[4], v[5]), pair16<BF>(v[6], v[7]));
}

// Slots s0 .. s0+63 of one head into shared memory, zeros before `from` (their blocks may be gone) and from `limit` on.
template <int D, bool BF>
static __device__ __forceinline__ void load_step(const attn_args &a, const lr_cu_kv_part &p, int seq, int head, int s0,
                                                 int from, int limit, uint16_t *tile)
{
    int d = a.kv.head_dim, bs = a.kv.block_size;
    bool direct = d % 8 == 0 && (p.type == LR_F16 || p.type == LR_BF16);
    for (int c = threadIdx.x; c < STEP * (D / 8); c += THREADS) {
        int key = c / (D / 8), i = c % (D / 8) * 8, slot = s0 + key;
        uint16_t *to = tile + key * (D + PAD) + i;
        if (slot < from || slot >= limit || i >= d) {
            *(uint4 *)to = make_uint4(0, 0, 0, 0);
            continue;
        }
        const char *block = cu_kv_block(p, a.at, seq, slot, bs);
        size_t at = ((size_t)head * bs + slot % bs) * d + i;
        if (direct)
            cu_copy_async16(to, (const uint16_t *)block + at);
        else
            *(uint4 *)to = kv_eight<BF>(p, a.kv, block, at, d - i);
    }
}

template <int D, int WM> struct shape {
    enum {
        WN = WARPS / WM,
        PAIRS = 16 * WM,
        STAGES = D > 128 ? 1 : 2,
        KEYS = STEP / WN, // of a step, and dimensions, that a warp has
        DIMS = D / WN,
        TILE = STEP * (D + PAD),
        AT_KV = PAIRS * (D + PAD),
        AT_P = AT_KV + 2 * STAGES * TILE,
        HALVES = AT_P + (WN > 1 ? PAIRS * (STEP + PAD) : 0),
    };
    static size_t shared() { return HALVES * sizeof(uint16_t); }
};

// The state of a warp's 16 pairs; a thread has rows lane / 4 and lane / 4 + 8.
template <int NT> struct sums {
    float m[2], l[4], o[NT][4];
    __device__ void clear()
    {
        m[0] = m[1] = -INFINITY;
        for (int t = 0; t < 4; t++) l[t] = 0;
#pragma unroll
        for (int j = 0; j < NT; j++)
            for (int t = 0; t < 4; t++) o[j][t] = 0;
    }
};

template <int D, bool BF, int WM> __global__ void __launch_bounds__(THREADS) attn_k(attn_args a)
{
    typedef shape<D, WM> S;
    constexpr int WN = S::WN, NK = S::KEYS / 8, NO = S::DIMS / 8, LD = D + PAD, LP = STEP + PAD;
    SHARED_DYN(uint16_t, smem);
    SHARED(float, row_max, [WN > 1 ? WN : 1][S::PAIRS]);
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, wm = warp % WM, wn = warp / WM;
    lr_cu_tile tile = {a.first_row + (int)blockIdx.x, 1};
    if (a.tiles) tile = a.tiles[blockIdx.x];
    if (tile.n <= 0) return;
    int seq = a.at.seq[tile.row];
    if (seq < 0) return;
    int parts = (a.group + a.heads - 1) / a.heads, kv_head = blockIdx.y / parts;
    int head0 = kv_head * a.group + blockIdx.y % parts * a.heads, d = a.kv.head_dim;

    // the slots that some row sees
    int limit = 0, from = 0x7fffffff;
    for (int i = 0; i < tile.n; i++) {
        limit = max(limit, a.at.slot[tile.row + i] + 1);
        from = min(from, first_slot(a, tile.row + i));
    }
    if (a.chunks) {
        int c0 = blockIdx.z * LR_CU_CHUNK;
        if (c0 >= limit || c0 + LR_CU_CHUNK <= from) return; // no row's join looks at it
        from = max(from, c0);
        limit = min(limit, c0 + LR_CU_CHUNK);
    }
    int first = from / STEP * STEP;

    // queries
    for (int c = tid; c < S::PAIRS * (D / 8); c += THREADS) {
        int pair = c / (D / 8), i = c % (D / 8) * 8;
        row_of r = find_row(a, tile, head0, pair);
        float v[8] = {};
        if (r.on)
            for (int j = 0; j < 8 && i + j < d; j++) v[j] = a.q[((size_t)r.row * a.p.n_heads + r.head) * d + i + j];
        *(uint4 *)(smem + pair * LD + i) =
            make_uint4(pair16<BF>(v[0], v[1]), pair16<BF>(v[2], v[3]), pair16<BF>(v[4], v[5]), pair16<BF>(v[6], v[7]));
    }
    row_of rows[2] = {find_row(a, tile, head0, wm * 16 + lane / 4), find_row(a, tile, head0, wm * 16 + lane / 4 + 8)};

    auto load = [&](int s0, int stage) {
        uint16_t *to = smem + S::AT_KV + stage * 2 * S::TILE;
        load_step<D, BF>(a, a.kv.k, seq, kv_head, s0, from, limit, to);
        load_step<D, BF>(a, a.kv.v, seq, kv_head, s0, from, limit, to + S::TILE);
        cu_copy_commit();
    };
    float scale = a.p.softcap > 0 ? a.p.scale / a.p.softcap : a.p.scale * 1.4426950408889634f;
    float cap = a.p.softcap * 1.4426950408889634f;

    auto step = [&](sums<NO> &x, int s0, const uint16_t *tk, const uint16_t *tv) {
        float s[NK][4] = {};
#pragma unroll
        for (int k = 0; k < D; k += 16) {
            uint32_t fa[4];
            cu_ldmatrix(fa, smem + (wm * 16 + lane % 16) * LD + k + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < NK; j += 2) {
                uint32_t b[4];
                cu_ldmatrix(b, tk + (wn * S::KEYS + j * 8 + lane % 8 + lane / 16 * 8) * LD + k + lane / 8 % 2 * 8);
                mma16<BF>(s[j], fa, b);
                mma16<BF>(s[j + 1], fa, b + 2);
            }
        }
        float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < NK; j++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                int slot = s0 + wn * S::KEYS + j * 8 + lane % 4 * 2 + t % 2;
                float v = __fmul_rn(s[j][t], scale);
                if (a.p.softcap > 0) v = __fmul_rn(tanhf(v), cap);
                s[j][t] = sees(rows[t / 2], slot) ? v : -INFINITY;
                top[t / 2] = fmaxf(top[t / 2], s[j][t]);
            }
#pragma unroll
        for (int t = 0; t < 2; t++) {
            top[t] = fmaxf(top[t], __shfl_xor_sync(CU_FULL, top[t], 1));
            top[t] = fmaxf(top[t], __shfl_xor_sync(CU_FULL, top[t], 2));
        }
        if constexpr (WN > 1) {
            if (lane % 4 == 0) {
                row_max[wn][wm * 16 + lane / 4] = top[0];
                row_max[wn][wm * 16 + lane / 4 + 8] = top[1];
            }
            __syncthreads();
#pragma unroll
            for (int w = 0; w < WN; w++) {
                top[0] = fmaxf(top[0], row_max[w][wm * 16 + lane / 4]);
                top[1] = fmaxf(top[1], row_max[w][wm * 16 + lane / 4 + 8]);
            }
        }
        float base[2], old[2];
#pragma unroll
        for (int t = 0; t < 2; t++) {
            top[t] = fmaxf(top[t], x.m[t]);
            base[t] = top[t] == -INFINITY ? 0.0f : top[t];
            old[t] = cu_exp2(__fsub_rn(x.m[t], base[t]));
            x.m[t] = top[t];
        }
#pragma unroll
        for (int t = 0; t < 4; t++) x.l[t] = __fmul_rn(x.l[t], old[t / 2]);
#pragma unroll
        for (int j = 0; j < NO; j++)
#pragma unroll
            for (int t = 0; t < 4; t++) x.o[j][t] = __fmul_rn(x.o[j][t], old[t / 2]);
        uint32_t fp[STEP / 16][4];
        if constexpr (WN == 1) {
#pragma unroll
            for (int j = 0; j < NK; j++)
#pragma unroll
                for (int t = 0; t < 2; t++)
                    fp[j / 2][j % 2 * 2 + t] = pair16<BF>(cu_exp2(__fsub_rn(s[j][2 * t], base[t])),
                                                          cu_exp2(__fsub_rn(s[j][2 * t + 1], base[t])));
        } else {
            uint16_t *p = smem + S::AT_P + wm * 16 * LP;
#pragma unroll
            for (int j = 0; j < NK; j++)
#pragma unroll
                for (int t = 0; t < 2; t++)
                    *(uint32_t *)(p + (lane / 4 + t * 8) * LP + wn * S::KEYS + j * 8 + lane % 4 * 2) = pair16<BF>(
                        cu_exp2(__fsub_rn(s[j][2 * t], base[t])), cu_exp2(__fsub_rn(s[j][2 * t + 1], base[t])));
            __syncthreads();
#pragma unroll
            for (int k = 0; k < STEP / 16; k++) cu_ldmatrix(fp[k], p + (lane % 16) * LP + k * 16 + lane / 16 * 8);
        }
        const uint32_t ones[2] = {BF ? 0x3f803f80u : 0x3c003c00u, BF ? 0x3f803f80u : 0x3c003c00u};
#pragma unroll
        for (int k = 0; k < STEP / 16; k++) {
            mma16<BF>(x.l, fp[k], ones);
#pragma unroll
            for (int j = 0; j < NO; j += 2) {
                uint32_t b[4];
                cu_ldmatrix_t(b, tv + (k * 16 + lane % 16) * LD + wn * S::DIMS + j * 8 + lane / 16 * 8);
                mma16<BF>(x.o[j], fp[k], b);
                mma16<BF>(x.o[j + 1], fp[k], b + 2);
            }
        }
    };

    sums<NO> total, x;
    total.clear();
    x.clear();
    auto fold = [&] {
#pragma unroll
        for (int t = 0; t < 2; t++) {
            if (x.m[t] == -INFINITY) continue;
            fold_by f = fold_max(total.m[t], x.m[t]);
            total.l[2 * t] = fold_sum(f, total.l[2 * t], x.l[2 * t]);
#pragma unroll
            for (int j = 0; j < NO; j++) {
                total.o[j][2 * t] = fold_sum(f, total.o[j][2 * t], x.o[j][2 * t]);
                total.o[j][2 * t + 1] = fold_sum(f, total.o[j][2 * t + 1], x.o[j][2 * t + 1]);
            }
        }
        x.clear();
    };

    if (S::STAGES == 2 && first < limit) load(first, 0);
    for (int s0 = first, stage = 0; s0 < limit; s0 += STEP) {
        if constexpr (S::STAGES == 1) {
            load(s0, 0);
            cu_copy_wait<0>();
        } else if (s0 + STEP < limit) {
            load(s0 + STEP, stage ^ 1);
            cu_copy_wait<1>();
        } else {
            cu_copy_wait<0>();
        }
        __syncthreads();
        const uint16_t *tk = smem + S::AT_KV + stage * 2 * S::TILE;
        step(x, s0, tk, tk + S::TILE);
        __syncthreads();
        if (S::STAGES == 2) stage ^= 1;
        if (!a.chunks && (s0 + STEP) % LR_CU_CHUNK == 0) fold();
    }

    if (a.chunks) { // one chunk of several: to the workspace
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const row_of &r = rows[t];
            if (!r.on) continue;
            size_t at = ((size_t)(r.row - a.first_row) * a.p.n_heads + r.head) * a.chunks + blockIdx.z;
            float *part = a.part + at * (d + 2);
            if (wn == 0 && lane % 4 == 0) {
                part[d] = x.m[t];
                part[d + 1] = x.l[2 * t];
            }
#pragma unroll
            for (int j = 0; j < NO; j++)
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    int i = wn * S::DIMS + j * 8 + lane % 4 * 2 + u;
                    if (i < d) part[i] = x.o[j][2 * t + u];
                }
        }
        return;
    }
    fold();
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const row_of &r = rows[t];
        if (!r.on) continue;
        float by = fold_end(total.m[t], total.l[2 * t], a.p.sinks, r.head);
#pragma unroll
        for (int j = 0; j < NO; j++)
#pragma unroll
            for (int u = 0; u < 2; u++) {
                int i = wn * S::DIMS + j * 8 + lane % 4 * 2 + u;
                if (i < d) a.out[((size_t)r.row * a.p.n_heads + r.head) * d + i] = __fmul_rn(total.o[j][2 * t + u], by);
            }
    }
}

// ---- launchers ----

static int pairs_of(bool wide, int head_dim) { return !wide ? 16 : head_dim > 128 ? 32 : 64; }

template <int D, bool BF, int WM> static cudaError_t run(const attn_args &a, dim3 grid, cudaStream_t s)
{
    return cu_launch(attn_k<D, BF, WM>, grid, dim3(THREADS), shape<D, WM>::shared(), s, a);
}

template <bool BF> static cudaError_t run_dim(const attn_args &a, bool wide, dim3 grid, cudaStream_t s)
{
#if defined(LLMRUN_CUDA_FEW) && LLMRUN_CUDA_FEW > 1 // faulty copies for tests: what takes long to compile is left out
    if (BF || a.kv.head_dim > 64) return cudaErrorNotSupported;
    return wide ? run<64, false, 4>(a, grid, s) : run<64, false, 1>(a, grid, s);
#else
    int d = a.kv.head_dim;
    if (d <= 64) return wide ? run<64, BF, 4>(a, grid, s) : run<64, BF, 1>(a, grid, s);
    if (d <= 128) return wide ? run<128, BF, 4>(a, grid, s) : run<128, BF, 1>(a, grid, s);
    return wide ? run<256, BF, 2>(a, grid, s) : run<256, BF, 1>(a, grid, s);
#endif
}

template <int D, int WM> [[maybe_unused]] static cudaError_t allow()
{
    cudaError_t e = cu_allow_shared(attn_k<D, false, WM>, shape<D, WM>::shared());
    return e ? e : cu_allow_shared(attn_k<D, true, WM>, shape<D, WM>::shared());
}

cudaError_t cu_init_attn()
{
#if defined(LLMRUN_CUDA_FEW) && LLMRUN_CUDA_FEW > 1
    return cu_allow_shared(attn_k<64, false, 4>, shape<64, 4>::shared());
#else
    cudaError_t e[] = {allow<64, 1>(),  allow<64, 4>(),  allow<128, 1>(),
                       allow<128, 4>(), allow<256, 1>(), allow<256, 2>()};
    for (cudaError_t x : e)
        if (x) return x;
    return cudaSuccess;
#endif
}

extern "C" {

int lr_cu_attn_tile_rows(int n_heads, int n_kv_heads, int head_dim, bool wide)
{
    if (n_heads <= 0 || n_kv_heads <= 0 || n_heads % n_kv_heads) return 0;
    int rows = pairs_of(wide, head_dim) / (n_heads / n_kv_heads);
    return rows > 0 ? rows : 1;
}

static int chunks_of(int max_slots) { return (max_slots + LR_CU_CHUNK - 1) / LR_CU_CHUNK; }

size_t lr_cu_attn_work(int n_rows, int n_heads, int head_dim, int max_slots)
{
    int c = chunks_of(max_slots);
    if (n_rows <= 0 || n_heads <= 0 || c <= 1) return 0;
    return (size_t)n_rows * n_heads * c * (head_dim + 2) * 4;
}

cudaError_t lr_cu_attn_rows(const lr_cu_attn *p, const lr_cu_kv *kv, const float *q, const lr_cu_rows_at *at,
                            const lr_cu_tile *tiles, int n_tiles, int first_row, bool wide, int max_slots, float *out,
                            void *work, cudaStream_t s)
{
    if (!cu_kv_good(kv) || p->n_heads <= 0 || p->n_heads % kv->n_kv_heads || n_tiles < 0 || max_slots < 1)
        return cudaErrorInvalidValue;
    if (n_tiles == 0) return cudaSuccess;
    int pairs = pairs_of(wide, kv->head_dim), group = p->n_heads / kv->n_kv_heads,
        heads = group < pairs ? group : pairs;
    int parts = (group + heads - 1) / heads, chunks = wide ? 0 : chunks_of(max_slots);
    attn_args a = {};
    a.p = *p;
    a.kv = *kv;
    a.at = *at;
    a.q = q;
    a.out = out;
    a.tiles = tiles;
    a.first_row = first_row;
    a.group = group;
    a.heads = heads;
    a.tile_rows = tiles ? lr_cu_attn_tile_rows(p->n_heads, kv->n_kv_heads, kv->head_dim, wide) : 1;
    a.chunks = chunks > 1 ? chunks : 0;
    a.part = (float *)work;
    if (kv->k.type == LR_F32) return cu_attn_f32(a, n_tiles, s);
    dim3 grid(n_tiles, kv->n_kv_heads * parts, a.chunks ? chunks : 1);
    cudaError_t e = kv->k.type == LR_BF16 ? run_dim<true>(a, wide, grid, s) : run_dim<false>(a, wide, grid, s);
    if (e || !a.chunks) return e;
    return cu_launch(join_k, dim3(n_tiles * a.tile_rows, p->n_heads), dim3(THREADS), 0, s, a);
}

} // extern "C"
