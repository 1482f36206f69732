// moe.cu - mixture of experts: who goes to which expert. The products are in linear.cu, the way back in rows.cu.
//
// A warp a row chooses. Then one block sorts the slots by expert with a counting sort that has one outcome: a warp
// counts a stretch of the slots, and places are given in the order of warps and lanes. What the sort gives, among it
// the pieces that products take a block each, stays on the device: a captured graph has a grid for the most pieces that
// there can be.
#include "cu_port.h"
#include "cuda/kernels.h"

enum { SOFTMAX, SIGMOID, SOFTMAX_CHOSEN }; // lr_gate
enum { ROWS = 4, WARPS = 16, PAD = LR_CU_EXPERTS + 1 };

typedef unsigned long long key;

// Larger for what is chosen before: by the score (a NaN behind all), then the lower number; never 0.
static __device__ __forceinline__ key key_of(float score, int number)
{
    unsigned u = __float_as_uint(score == 0 ? 0.0f : score);
    u = (u & 0x80000000u) ? ~u : u | 0x80000000u;
    if (score != score) u = 1;
    return (key)u << 32 | (0xffffffffu - (unsigned)number);
}
static __device__ __forceinline__ int number_of(key k) { return (int)(0xffffffffu - (unsigned)k); }
static __device__ __forceinline__ key warp_best(key k)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        key other = __shfl_xor_sync(CU_FULL, k, o);
        if (other > k) k = other;
    }
    return k;
}

struct route_args {
    lr_cu_choice c;
    lr_cu_slots slots;
    const float *logits, *bias;
    const int32_t *live;
    float *chosen;
    bool single; // one row, of a rank with all experts: its slots are told here
};

// The gate of each logit, by the lanes that look at it later.
static __device__ __forceinline__ void gates(const lr_cu_choice &c, const float *x, float *p, int lane)
{
    float top = -INFINITY, sum = 0;
    if (c.gate == SOFTMAX) {
        for (int e = lane; e < c.n_experts; e += 32) top = fmaxf(top, x[e]);
        top = cu_warp_max(top);
        for (int e = lane; e < c.n_experts; e += 32) {
            p[e] = expf(x[e] - top);
            sum = __fadd_rn(sum, p[e]);
        }
        sum = cu_warp_sum(sum);
    }
    for (int e = lane; e < c.n_experts; e += 32)
        p[e] = c.gate == SOFTMAX ? p[e] / sum : c.gate == SIGMOID ? 1.0f / (1.0f + expf(-x[e])) : x[e];
}

// kept[g] for the best groups; a lane a group.
static __device__ __forceinline__ void choose_groups(const lr_cu_choice &c, const float *score, float *group,
                                                     bool *kept, int lane)
{
    int n = c.n_experts / c.n_groups;
    for (int g = lane; g < c.n_groups; g += 32) {
        float sum = 0;
        key last = ~0ull;
        for (int i = 0; i < c.group_best && i < n; i++) {
            key best = 0;
            for (int e = 0; e < n; e++) {
                key k = key_of(score[g * n + e], e);
                if (k < last && k > best) best = k;
            }
            sum = __fadd_rn(sum, score[g * n + number_of(best)]);
            last = best;
        }
        group[g] = sum;
        kept[g] = false;
    }
    key last = ~0ull;
    for (int i = 0; i < c.n_groups_used; i++) {
        key best = 0;
        for (int g = lane; g < c.n_groups; g += 32) {
            key k = key_of(group[g], g);
            if (k < last && k > best) best = k;
        }
        last = warp_best(best);
        if (number_of(last) % 32 == lane) kept[number_of(last)] = true;
    }
}

// Weights of the chosen, by one lane in the order of choosing.
static __device__ __forceinline__ void weigh(const lr_cu_choice &c, float *w)
{
    float sum = 0, top = -INFINITY;
    for (int i = 0; i < c.n_used; i++) top = fmaxf(top, w[i]);
    if (c.gate == SOFTMAX_CHOSEN)
        for (int i = 0; i < c.n_used; i++) w[i] = expf(w[i] - top);
    for (int i = 0; i < c.n_used; i++) sum = __fadd_rn(sum, w[i]);
    bool divide = c.gate == SOFTMAX_CHOSEN || c.normalize;
    for (int i = 0; i < c.n_used; i++) w[i] = (divide ? w[i] / sum : w[i]) * c.scale;
}

__global__ void __launch_bounds__(32 * ROWS) route_k(route_args a)
{
    SHARED_DYN(float, smem); // a row: gates, scores, scores of groups, which are kept
    const lr_cu_choice &c = a.c;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * ROWS + warp;
    if (row >= a.slots.m) return;
    float *p = smem + warp * 4 * c.n_experts, *score = p + c.n_experts, *group = score + c.n_experts;
    bool *kept = (bool *)(group + c.n_experts);
    float *out = a.chosen + (size_t)row * 2 * c.n_used, *w = out + c.n_used;
    if (a.live && a.live[row] < 0) {
        for (int i = lane; i < c.n_used; i += 32) {
            out[i] = (float)c.n_experts;
            w[i] = 0;
        }
    } else {
        gates(c, a.logits + (size_t)row * c.n_experts, p, lane);
        for (int e = lane; e < c.n_experts; e += 32) score[e] = a.bias ? p[e] + a.bias[e] : p[e];
        __syncwarp();
        int each = c.n_groups > 1 ? c.n_experts / c.n_groups : c.n_experts;
        if (c.n_groups > 1) choose_groups(c, score, group, kept, lane);
        __syncwarp();
        key last = ~0ull;
        for (int i = 0; i < c.n_used; i++) {
            key best = 0;
            for (int e = lane; e < c.n_experts; e += 32) {
                key k = key_of(score[e], e);
                if (k < last && k > best && (c.n_groups <= 1 || kept[e / each])) best = k;
            }
            last = warp_best(best);
            if (lane == 0) {
                int e = last ? number_of(last) : 0;
                out[i] = (float)e;
                w[i] = p[e];
            }
        }
        if (lane == 0) weigh(c, w);
    }
    if (!a.single) return;
    __syncwarp();
    for (int i = lane; i < c.n_used; i += 32) {
        int e = (int)out[i], n = e < c.n_experts;
        a.slots.row[i] = n ? 0 : -1;
        a.slots.own[i] = n ? e : -1;
        a.slots.at[i] = i;
    }
    for (int i = lane; i < a.slots.n_pieces; i += 32) {
        int e = i < c.n_used ? (int)out[i] : c.n_experts;
        a.slots.pieces[i] = {e, i, e < c.n_experts};
    }
}

// Number of the expert of slot i in the order of rows.
static __device__ __forceinline__ int expert_of(const float *chosen, int n_used, int i)
{
    return (int)chosen[(size_t)(i / n_used) * 2 * n_used + i % n_used];
}

// first[i] becomes the sum of what is before it, first[n] of all; by one warp.
static __device__ __forceinline__ void add_up(int *first, int n, int lane)
{
    int each = (n + 31) / 32, begin = lane * each, end = min(n, begin + each), sum = 0;
    for (int i = begin; i < end; i++) sum += first[i];
    int before = sum;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        int v = __shfl_up_sync(CU_FULL, before, o);
        if (lane >= o) before += v;
    }
    if (lane == 31) first[n] = before;
    before -= sum;
    for (int i = begin; i < end; i++) {
        int v = first[i];
        first[i] = before;
        before += v;
    }
}

// Where the slots of a warp's stretch go, in ascending order; counts[e] is moved on. give(i, e, place) for each.
template <class F>
static __device__ __forceinline__ void each_slot(const float *chosen, int n_used, int begin, int end, int none,
                                                 int *counts, int lane, const F &give)
{
    for (int i0 = begin; i0 < end; i0 += 32) {
        int i = i0 + lane, e = i < end ? expert_of(chosen, n_used, i) : none + 1;
        unsigned same = __match_any_sync(CU_FULL, e);
        if (i < end) give(i, e, counts[e] + __popc(same & ((1u << lane) - 1)));
        __syncwarp();
        if (i < end && lane == __ffs((int)same) - 1) counts[e] += __popc(same);
        __syncwarp();
    }
}

__global__ void __launch_bounds__(32 * WARPS) sort_k(lr_cu_slots s, const float *chosen)
{
    SHARED_DYN(int, smem); // counts of each warp
    SHARED(int, start, [PAD + 1]);
    SHARED(int, tiles, [PAD + 1]);
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, bins = s.n_experts + 1, n = s.m * s.n_used;
    int each = ((n + WARPS - 1) / WARPS + 31) / 32 * 32, begin = min(n, warp * each), end = min(n, begin + each);
    int *counts = smem + warp * bins;
    for (int e = lane; e < bins; e += 32) counts[e] = 0;
    __syncwarp();
    each_slot(chosen, s.n_used, begin, end, s.n_experts, counts, lane, [](int, int, int) {});
    __syncthreads();
    for (int e = tid; e < bins; e += 32 * WARPS) {
        int sum = 0;
        for (int w = 0; w < WARPS; w++) {
            int c = smem[w * bins + e];
            smem[w * bins + e] = sum;
            sum += c;
        }
        bool own = e >= s.from && e < s.from + s.n_own;
        start[e] = sum;
        tiles[e] = own ? (sum + s.tile - 1) / s.tile : 0;
    }
    __syncthreads();
    if (warp == 0) add_up(start, bins, lane);
    if (warp == 1) add_up(tiles, bins, lane);
    __syncthreads();
    int first = start[s.from], own = start[s.from + s.n_own] - first;
    for (int e = tid; e <= s.n_experts; e += 32 * WARPS) s.start[e] = start[e];
    for (int e = s.from + tid; e < s.from + s.n_own; e += 32 * WARPS) {
        int at = start[e] - first, last = start[e + 1] - first;
        for (int t = tiles[e]; at < last; at += s.tile, t++) s.pieces[t] = {e - s.from, at, min(s.tile, last - at)};
    }
    for (int t = tiles[bins] + tid; t < s.n_pieces; t += 32 * WARPS) s.pieces[t] = {0, 0, 0};
    for (int i = own + tid; i < n; i += 32 * WARPS) s.row[i] = s.own[i] = -1;
    each_slot(chosen, s.n_used, begin, end, s.n_experts, counts, lane, [&](int i, int e, int place) {
        int at = start[e] + place;
        s.at[i] = at;
        if (e < s.from || e >= s.from + s.n_own) return;
        s.row[at - first] = i / s.n_used;
        s.own[at - first] = e - s.from;
    });
}

cudaError_t cu_init_moe()
{
    cudaError_t e = cu_allow_shared(sort_k, WARPS * PAD * sizeof(int));
    return e ? e : cu_allow_shared(route_k, ROWS * 4 * LR_CU_EXPERTS * sizeof(float));
}

static int most_pieces(int n_experts, int n_used, int m, int tile)
{
    long long slots = (long long)m * n_used;
    return (int)((slots < n_experts ? slots : n_experts) + slots / tile);
}

extern "C" {

// A piece is a block of the product: of the size that an expert gets on average, so that few are left half empty.
static int tile_of(lr_cu_math math, int n_experts, int n_used, int m)
{
    long long mean = (long long)m * n_used / n_experts;
    return math == LR_CU_REF || (math == LR_CU_FAST && m <= 8) ? 4 : mean <= 8 ? 8 : mean <= 64 ? 32 : 128;
}

size_t lr_cu_slots_bytes(int n_experts, int n_used, int m)
{
    size_t slots = (size_t)m * n_used, ints = 3 * ((slots + 3) & ~(size_t)3) + (((size_t)n_experts + 4) & ~(size_t)3);
    return 4 * ints + ((size_t)n_experts + slots / 4 + 1) * sizeof(lr_cu_piece);
}

void lr_cu_slots_in(lr_cu_slots *s, void *mem, lr_cu_math math, int m)
{
    size_t slots = ((size_t)m * s->n_used + 3) & ~(size_t)3;
    s->m = m;
    s->tile = tile_of(math, s->n_experts, s->n_used, m);
    s->n_pieces = most_pieces(s->n_experts, s->n_used, m, s->tile);
    s->row = (int32_t *)mem;
    s->own = s->row + slots;
    s->at = s->own + slots;
    s->start = s->at + slots;
    s->pieces = (lr_cu_piece *)(s->start + ((s->n_experts + 4) & ~3));
}

cudaError_t lr_cu_route(const lr_cu_choice *c, const lr_cu_slots *s, const float *logits, const float *bias,
                        const int32_t *live, float *chosen, cudaStream_t st)
{
    int groups = c->n_groups > 1 ? c->n_groups : 1;
    if (c->n_experts < 1 || c->n_experts > LR_CU_EXPERTS || c->n_used < 1 || c->n_used > c->n_experts || s->m < 0 ||
        c->n_experts % groups ||
        (groups > 1 && (c->n_groups_used < 1 || c->n_groups_used > groups ||
                        c->n_groups_used * (c->n_experts / groups) < c->n_used)) ||
        s->n_experts != c->n_experts || s->n_used != c->n_used || s->from < 0 || s->n_own < 0 ||
        s->from + s->n_own > s->n_experts || c->gate < SOFTMAX || c->gate > SOFTMAX_CHOSEN)
        return cudaErrorInvalidValue;
    if (s->m == 0) return cudaSuccess;
    bool single = s->m == 1 && s->n_own == s->n_experts;
    route_args a = {*c, *s, logits, bias, live, chosen, single};
    cudaError_t e = cu_launch(route_k, dim3((s->m + ROWS - 1) / ROWS), dim3(32 * ROWS),
                              ROWS * 4 * c->n_experts * sizeof(float), st, a);
    if (e || single) return e;
    return cu_launch(sort_k, dim3(1), dim3(32 * WARPS), WARPS * (s->n_experts + 1) * sizeof(int), st, *s, chosen);
}

} // extern "C"
