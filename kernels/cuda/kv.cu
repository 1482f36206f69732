// kv.cu - rotation by position, keys and values into the paged store, copies of blocks. A block a row, a warp a head.
#include "kv.cuh"
#include <math.h>

enum { THREADS = 128, WARPS = THREADS / 32, MAX_DIM = 256 };

struct head_norm {
    const float *w;
    float eps;
    bool on;
};
struct put_args {
    lr_cu_rope rq, rk;
    bool rot_q, rot_k;
    head_norm nq, nk;
    const float *q, *k, *v;
    float *q_out;
    int n_heads; // of q
    lr_cu_kv kv;
    bool put;
    lr_cu_rows_at at;
};

// cos and sin of a row's angles, in double: a position times a frequency reaches thousands of turns.
static __device__ __forceinline__ void angles(const lr_cu_rope &r, int pos, float *c, float *s)
{
    for (int i = threadIdx.x; i < r.n_rot / 2; i += THREADS) {
        double a = (double)pos * r.freq[i];
        c[i] = (float)cos(a) * r.attn_scale;
        s[i] = (float)sin(a) * r.attn_scale;
    }
}

static __device__ __forceinline__ float rotated(const lr_cu_rope &r, const float *x, int i, const float *c,
                                                const float *s)
{
    if (i >= r.n_rot) return x[i];
    int half = r.n_rot / 2, pair = r.interleaved ? i / 2 : i % half;
    bool second = r.interleaved ? i % 2 : i >= half;
    int other = r.interleaved ? i ^ 1 : second ? i - half : i + half;
    return second ? x[i] * c[pair] + x[other] * s[pair] : x[i] * c[pair] - x[other] * s[pair];
}

// The turn of a head's values in shared memory, by a warp: sums of neighbours first, as on a CPU.
static __device__ __forceinline__ void turn(float *x, int dim)
{
    int block = dim & -dim, lane = threadIdx.x % 32;
    float f = __fdiv_rn(1.0f, __fsqrt_rn((float)block));
    for (int h = 1; h < block; h *= 2) {
        __syncwarp();
        for (int p = lane; p < dim / 2; p += 32) {
            int i = p / h * 2 * h + p % h;
            float lo = x[i], hi = x[i + h];
            x[i] = __fadd_rn(lo, hi);
            x[i + h] = __fsub_rn(lo, hi);
        }
    }
    __syncwarp();
    for (int i = lane; i < dim; i += 32) x[i] = __fmul_rn(x[i], f);
    __syncwarp();
}

static __device__ __forceinline__ int whole(float v, float d, int low, int high)
{
    v = d != 0 ? __fdiv_rn(v, d) : 0;
    return v == v ? max(low, min(high, __float2int_rn(fminf(fmaxf(v, -1000.0f), 1000.0f)))) : 0;
}

// 32 values that share a scale, one a lane; i: of the lane.
static __device__ __forceinline__ void put_group(const lr_cu_kv_part &p, const lr_cu_kv &kv, char *block, size_t at,
                                                 float v)
{
    int lane = threadIdx.x % 32, low = p.type == LR_Q8_0 ? -127 : p.type == LR_Q4_0 ? -8 : -32;
    float top = cu_warp_max(v == v ? fabsf(v) : 0.0f), high = cu_warp_max(v == v ? v : 0.0f);
    // the largest value, whatever its sign, becomes the lowest of 4 or 6 bits
    float d = p.type == LR_Q8_0 ? __fdiv_rn(top, 127.0f) : __fdiv_rn(high == top ? top : -top, (float)low);
    uint16_t half = cu_to_f16(fminf(fmaxf(d, -65504.0f), 65504.0f));
    int q = whole(v, cu_f16(half), low, -low - (p.type != LR_Q8_0));
    size_t group = at / 32;
    if (lane == 0)
        ((uint16_t *)(block + cu_kv_values(p.type, kv.n_kv_heads, kv.head_dim, kv.block_size)))[group] = half;
    if (p.type == LR_Q8_0) {
        ((int8_t *)block)[at] = (int8_t)q;
        return;
    }
    int q16 = __shfl_down_sync(CU_FULL, q, 16), q8 = __shfl_down_sync(CU_FULL, q, 8),
        q24 = __shfl_down_sync(CU_FULL, q, 24);
    if (lane < 16) ((uint8_t *)block)[group * 16 + lane] = (uint8_t)((q & 15) | (q16 & 15) << 4);
    if (p.type == LR_CU_Q6 && lane < 8)
        ((uint8_t *)block + cu_kv_upper(kv))[group * 8 + lane] =
            (uint8_t)((q >> 4 & 3) | (q8 >> 4 & 3) << 2 | (q16 >> 4 & 3) << 4 | (q24 >> 4 & 3) << 6);
}

// One value of a head into its slot. All lanes come, i = lane + multiples of 32.
static __device__ __forceinline__ void put_value(const lr_cu_kv_part &p, const put_args &a, char *block, int head,
                                                 int in_block, int i, float v, bool there)
{
    const lr_cu_kv &kv = a.kv;
    size_t slot = (size_t)head * kv.block_size + in_block, at = slot * kv.head_dim + i;
    if (cu_kv_turned(p.type)) { // head_dim is of 32: whole warps
        put_group(p, kv, block, at, v);
        return;
    }
    if (!there) return;
    switch (p.type) {
    case LR_F32:
        ((float *)block)[at] = v;
        break;
    case LR_F16:
        ((uint16_t *)block)[at] = cu_to_f16(v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v);
        break;
    case LR_BF16:
        ((uint16_t *)block)[at] = cu_to_bf16(v);
        break;
    default:
        ((uint8_t *)block)[at] = cu_to_e4m3(v);
    }
}

__global__ void __launch_bounds__(THREADS) rope_kv_k(put_args a)
{
    SHARED(float, cs, [4][MAX_DIM / 2]);
    SHARED(float, head, [WARPS][MAX_DIM]);
    int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int seq = a.at.seq[row];
    if (seq < 0) return;
    if (a.rot_q) angles(a.rq, a.at.pos[row], cs[0], cs[1]);
    if (a.rot_k) angles(a.rk, a.at.pos[row], cs[2], cs[3]);
    __syncthreads();
    int nq = a.q ? a.n_heads : 0, nkv = a.put ? a.kv.n_kv_heads : 0, dim = a.put ? a.kv.head_dim : a.rq.head_dim;
    int slot = a.put ? a.at.slot[row] : 0;
    for (int h = warp; h < nq + 2 * nkv; h += WARPS) {
        int what = h < nq ? 0 : h < nq + nkv ? 1 : 2, n = what == 0 ? h : (h - nq) % nkv;
        const float *x = (what == 0 ? a.q : what == 1 ? a.k : a.v) + ((size_t)row * (what == 0 ? nq : nkv) + n) * dim;
        const head_norm &norm = what == 0 ? a.nq : a.nk;
        float *y = head[warp], inv = 1;
        if (what < 2 && norm.on) {
            float s = 0;
            for (int i = lane; i < dim; i += 32) s += x[i] * x[i];
            inv = 1.0f / sqrtf(cu_warp_sum(s) / (float)dim + norm.eps);
        }
        __syncwarp(); // the head before has been read
        for (int i = lane; i < dim; i += 32)
            y[i] = what < 2 && norm.on ? (norm.w ? x[i] * inv * norm.w[i] : x[i] * inv) : x[i];
        __syncwarp();
        bool rotate = what == 0 ? a.rot_q : what == 1 && a.rot_k;
        const lr_cu_rope &r = what == 0 ? a.rq : a.rk;
        const lr_cu_kv_part &part = what == 1 ? a.kv.k : a.kv.v;
        char *block = what ? cu_kv_block(part, a.at, seq, slot, a.kv.block_size) : nullptr;
        if (a.put && cu_kv_turned(what == 2 ? a.kv.v.type : a.kv.k.type)) {
            float v[MAX_DIM / 32];
            for (int k = 0; k < dim / 32; k++)
                v[k] = rotate ? rotated(r, y, lane + k * 32, what ? cs[2] : cs[0], what ? cs[3] : cs[1])
                              : y[lane + k * 32];
            __syncwarp();
            const float *center = what == 1 && a.kv.center ? a.kv.center + (size_t)n * dim : nullptr;
            for (int k = 0; k < dim / 32; k++)
                y[lane + k * 32] = center ? __fsub_rn(v[k], center[lane + k * 32]) : v[k];
            turn(y, dim);
            rotate = false;
        }
        for (int i0 = 0; i0 < dim; i0 += 32) {
            int i = i0 + lane;
            bool there = i < dim;
            float v = !there ? 0 : rotate ? rotated(r, y, i, what ? cs[2] : cs[0], what ? cs[3] : cs[1]) : y[i];
            if (what)
                put_value(part, a, block, n, slot % a.kv.block_size, i, v, there);
            else if (there)
                a.q_out[((size_t)row * nq + n) * dim + i] = v;
        }
    }
}

__global__ void __launch_bounds__(THREADS) turn_k(const float *x, int n, int dim, float *out)
{
    SHARED(float, head, [WARPS][MAX_DIM]);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * WARPS + warp;
    if (i >= n) return;
    float *y = head[warp];
    for (int j = lane; j < dim; j += 32) y[j] = x[(size_t)i * dim + j];
    turn(y, dim);
    for (int j = lane; j < dim; j += 32) out[(size_t)i * dim + j] = y[j];
}

__global__ void __launch_bounds__(THREADS)
    copy_k(char *base, size_t block_bytes, const int32_t *dst, const int32_t *src)
{
    const uint4 *from = (const uint4 *)(base + (size_t)src[blockIdx.x] * block_bytes);
    uint4 *to = (uint4 *)(base + (size_t)dst[blockIdx.x] * block_bytes);
    size_t n = block_bytes / 16;
    for (size_t i = (size_t)blockIdx.y * THREADS + threadIdx.x; i < n; i += (size_t)gridDim.y * THREADS)
        to[i] = from[i];
}

static bool rope_good(const lr_cu_rope *r)
{
    return r->head_dim > 0 && r->head_dim <= MAX_DIM && r->n_rot >= 0 && r->n_rot % 2 == 0 && r->n_rot <= r->head_dim;
}

extern "C" {

size_t lr_cu_kv_bytes(int type, int n_kv_heads, int head_dim, int block_size)
{
    bool turned = cu_kv_turned(type);
    if (type != LR_F32 && type != LR_F16 && type != LR_BF16 && type != LR_CU_E4M3 && !turned) return 0;
    if (n_kv_heads <= 0 || head_dim < 2 || head_dim > MAX_DIM || head_dim % 2 || block_size < 1 || block_size > 256)
        return 0;
    size_t n = cu_kv_values(type, n_kv_heads, head_dim, block_size);
    if (!turned) return n;
    return head_dim % 32 ? 0 : n + cu_round16((size_t)n_kv_heads * block_size * (head_dim / 32) * 2);
}

bool lr_cu_kv_turned(int type) { return cu_kv_turned(type); }

cudaError_t lr_cu_turn_rows(const float *x, int m, int n_heads, int head_dim, float *out, cudaStream_t s)
{
    if (m < 0 || n_heads <= 0 || head_dim < 2 || head_dim > MAX_DIM || head_dim % 2) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    int n = m * n_heads;
    return cu_launch(turn_k, dim3((n + WARPS - 1) / WARPS), dim3(THREADS), 0, s, x, n, head_dim, out);
}

void lr_cu_rope_freq(float base, float freq_scale, const float *factors, int n_rot, double *freq)
{
    for (int i = 0; i < n_rot / 2; i++)
        freq[i] = (double)freq_scale * pow((double)base, -2.0 * i / n_rot) / (factors ? (double)factors[i] : 1.0);
}

cudaError_t lr_cu_rope_rows(const lr_cu_rope *r, const float *x, const lr_cu_rows_at *at, float *out, cudaStream_t s)
{
    if (!rope_good(r) || r->n_heads <= 0 || at->n_rows < 0) return cudaErrorInvalidValue;
    if (at->n_rows == 0) return cudaSuccess;
    put_args a = {};
    a.rq = *r;
    a.rot_q = true;
    a.q = x;
    a.q_out = out;
    a.n_heads = r->n_heads;
    a.at = *at;
    return cu_launch(rope_kv_k, dim3(at->n_rows), dim3(THREADS), 0, s, a);
}

cudaError_t lr_cu_rope_kv(const lr_cu_rope *rq, const lr_cu_rope *rk, const lr_cu_norm *nq, const lr_cu_norm *nk,
                          const float *q, const float *k, const float *v, float *q_out, int n_heads, const lr_cu_kv *kv,
                          const lr_cu_rows_at *at, cudaStream_t s)
{
    if (!cu_kv_good(kv) || at->n_rows < 0 || (q && n_heads <= 0)) return cudaErrorInvalidValue;
    if ((rq && (!rope_good(rq) || rq->head_dim != kv->head_dim)) ||
        (rk && (!rope_good(rk) || rk->head_dim != kv->head_dim)))
        return cudaErrorInvalidValue;
    if ((nq && (nq->layer_norm || nq->group != kv->head_dim)) || (nk && (nk->layer_norm || nk->group != kv->head_dim)))
        return cudaErrorInvalidValue;
    if (at->n_rows == 0) return cudaSuccess;
    put_args a = {};
    if (rq) a.rq = *rq;
    if (rk) a.rk = *rk;
    a.rot_q = rq && q;
    a.rot_k = rk != nullptr;
    if (nq) a.nq = {nq->w, nq->eps, true};
    if (nk) a.nk = {nk->w, nk->eps, true};
    a.q = q;
    a.k = k;
    a.v = v;
    a.q_out = q_out;
    a.n_heads = n_heads;
    a.kv = *kv;
    a.put = true;
    a.at = *at;
    return cu_launch(rope_kv_k, dim3(at->n_rows), dim3(THREADS), 0, s, a);
}

cudaError_t lr_cu_kv_put(const lr_cu_kv *kv, const float *k, const float *v, const lr_cu_rows_at *at, cudaStream_t s)
{
    return lr_cu_rope_kv(nullptr, nullptr, nullptr, nullptr, nullptr, k, v, nullptr, 0, kv, at, s);
}

cudaError_t lr_cu_kv_copy(void *base, size_t block_bytes, const int32_t *dst, const int32_t *src, int n, cudaStream_t s)
{
    if (n < 0 || block_bytes % 16) return cudaErrorInvalidValue;
    if (n == 0 || block_bytes == 0) return cudaSuccess;
    size_t y = (block_bytes / 16 + THREADS * 8 - 1) / (THREADS * 8);
    return cu_launch(copy_k, dim3(n, (unsigned)(y > 64 ? 64 : y)), dim3(THREADS), 0, s, (char *)base, block_bytes, dst,
                     src);
}

} // extern "C"
