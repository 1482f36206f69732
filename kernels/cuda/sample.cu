// sample.cu - from rows of logits to tokens without a visit to the host: a block a row.
//
// What is added up are masses (base/mass.h), whole numbers: sums have no order, so that atomics and trees may be used
// and the token is the host's, bit for bit. Pairs of (logit, id) have one order, best first, lower ids first of equals,
// and every stage that narrows keeps a beginning of it: top_k so many, top_p so much mass, min_p what is above a
// logit. So the state of a chain is the last pair that is kept, and a draw behind such stages looks for the pair at
// which the mass reaches a number. Both are found by counting: into 1024 parts of the distance to the best, then by the
// pairs' bytes, from a list in shared memory where the part's pairs fit into one. A chain that narrows nothing draws in
// the order of ids, by halving the row sixteen ways.
//
// The row is copied to the workspace with its mask and edits, so that logits stay as they are.
#include "base/mass.h"
#include "cu_port.h"
#include "cuda/kernels.h"

enum { THREADS = 512, WARPS = THREADS / 32, PARTS = 1024, PARTS_A_UNIT = 32, LIST = 1024 };

struct draw_args {
    const float *logits;
    int n_vocab;
    const lr_draw *what;
    const lr_draw_edit *edits;
    const uint32_t *masks;
    lr_draw_result *out;
    lr_draw_best *best;
    int top;
    float *work;
};

// Ascends as the floats do.
static __device__ __forceinline__ uint32_t key_of(float f)
{
    if (f == 0) f = 0; // one key for both zeros
    uint32_t u = __float_as_uint(f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
static __device__ __forceinline__ float float_of(uint64_t pair)
{
    uint32_t k = (uint32_t)(pair >> 32);
    return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k);
}
static __device__ __forceinline__ uint64_t pair_of(float x, int id)
{
    return (uint64_t)key_of(x) << 32 | (0xffffffffu - (uint32_t)id);
}
static __device__ __forceinline__ int id_of(uint64_t p) { return (int)(0xffffffffu - (uint32_t)p); }

struct room {
    uint64_t hist[PARTS], list[LIST], sum[32], warp[WARPS];
    uint64_t found, before;
    int count, part;
};

// A row and what is kept of it.
struct row {
    const float *x;
    int n;
    bool all;       // what is -inf counts too
    uint64_t first; // the best pair
    uint64_t last;  // pairs >= it are kept; 0: all
    float late;     // temperature behind the first narrowing; 1 = none
};

static __device__ __forceinline__ uint64_t pair_at(const row &r, int i)
{
    float v = r.x[i];
    if (!(v > -INFINITY)) { // NaN too
        if (!r.all) return 0;
        v = -INFINITY;
    }
    uint64_t p = pair_of(v, i);
    return p >= r.last ? p : 0;
}

// How far below the best, as the stage sees it.
static __device__ __forceinline__ float below(const row &r, uint64_t p)
{
    float d = __fsub_rn(float_of(p), float_of(r.first));
    return r.late == 1.0f ? d : __fdiv_rn(d, r.late);
}

static __device__ __forceinline__ uint64_t units(const row &r, uint64_t p, bool by_mass)
{
    return by_mass ? lr_mass_units(lr_mass(below(r, p))) : 1;
}

static __device__ uint64_t block_sum(uint64_t v, room &m)
{
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(CU_FULL, v, o);
    __syncthreads();
    if (threadIdx.x % 32 == 0) m.warp[threadIdx.x / 32] = v;
    __syncthreads();
    uint64_t s = 0;
    for (int i = 0; i < WARPS; i++) s += m.warp[i];
    return s;
}

static __device__ uint64_t best_of(const float *x, int n, room &m)
{
    uint64_t best = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        uint64_t p = x[i] > -INFINITY ? pair_of(x[i], i) : 0;
        if (p > best) best = p;
    }
    for (int o = 16; o > 0; o >>= 1) {
        uint64_t p = __shfl_xor_sync(CU_FULL, best, o);
        if (p > best) best = p;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) m.warp[threadIdx.x / 32] = best;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        if (m.warp[i] > best) best = m.warp[i];
    return best;
}

static __device__ uint64_t kept(const row &r, bool by_mass, room &m)
{
    uint64_t s = 0;
    for (int i = threadIdx.x; i < r.n; i += THREADS) {
        uint64_t p = pair_at(r, i);
        if (p) s += units(r, p, by_mass);
    }
    return block_sum(s, m);
}

// ---- where a sum is reached ----

static __device__ __forceinline__ int part_of(const row &r, uint64_t p)
{
    float far = __fmul_rn(__fsub_rn(float_of(r.first), float_of(p)), (float)PARTS_A_UNIT);
    return far < (float)(PARTS - 1) ? (int)far : PARTS - 1;
}

// The first of n parts (descending: the last) whose sum with those before it reaches `need`, which they do: to m.part,
// and what those before come to, to m.before.
static __device__ void find_part(room &m, int n, bool descending, uint64_t need)
{
    int t = threadIdx.x, each = n / 32;
    __syncthreads();
    if (t < 32) {
        uint64_t s = 0;
        for (int i = 0; i < each; i++) s += m.hist[descending ? n - 1 - (t * each + i) : t * each + i];
        m.sum[t] = s;
    }
    __syncthreads();
    if (t == 0) {
        uint64_t before = 0;
        int k = 0, i = 0;
        while (k < 31 && before + m.sum[k] < need) before += m.sum[k++];
        for (; i < each - 1; i++) {
            uint64_t h = m.hist[descending ? n - 1 - (k * each + i) : k * each + i];
            if (before + h >= need) break;
            before += h;
        }
        m.part = descending ? n - 1 - (k * each + i) : k * each + i;
        m.before = before;
    }
    __syncthreads();
}

// The last pair of the shortest beginning that holds `need` (by mass, or so many); there is as much.
static __device__ uint64_t reach(const row &r, bool by_mass, uint64_t need, room &m)
{
    __syncthreads();
    for (int i = threadIdx.x; i < PARTS; i += THREADS) m.hist[i] = 0;
    if (threadIdx.x == 0) m.count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < r.n; i += THREADS) {
        uint64_t p = pair_at(r, i), w = p ? units(r, p, by_mass) : 0;
        if (w) atomicAdd((unsigned long long *)&m.hist[part_of(r, p)], (unsigned long long)w);
    }
    find_part(m, PARTS, false, need);
    int part = m.part;
    need -= m.before;
    for (int i = threadIdx.x; i < r.n; i += THREADS) {
        uint64_t p = pair_at(r, i);
        if (!p || part_of(r, p) != part) continue;
        int at = atomicAdd(&m.count, 1);
        if (at < LIST) m.list[at] = p;
    }
    __syncthreads();
    int listed = m.count <= LIST ? m.count : -1;
    uint64_t prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += THREADS) m.hist[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < (listed >= 0 ? listed : r.n); i += THREADS) {
            uint64_t p = listed >= 0 ? m.list[i] : pair_at(r, i);
            if (!p || (listed < 0 && part_of(r, p) != part)) continue;
            if (shift < 56 && p >> (shift + 8) != prefix >> (shift + 8)) continue;
            atomicAdd((unsigned long long *)&m.hist[p >> shift & 255], (unsigned long long)units(r, p, by_mass));
        }
        find_part(m, 256, true, need);
        prefix |= (uint64_t)m.part << shift;
        need -= m.before;
    }
    return prefix;
}

// By ascending id: where the sum of masses becomes larger than `target`, all being less than the row's.
static __device__ int draw_dense(const row &r, double u, room &m)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = 0, end = r.n;
    uint64_t target = 0;
    bool begun = false;
    while (end - at > 32 || !begun) {
        int piece = ((end - at + WARPS - 1) / WARPS + 31) / 32 * 32;
        uint64_t s = 0, all = 0, before = 0;
        for (int i = at + warp * piece + lane; i < min(end, at + (warp + 1) * piece); i += 32) {
            uint64_t p = pair_at(r, i);
            if (p) s += units(r, p, true);
        }
        for (int o = 16; o > 0; o >>= 1) s += __shfl_xor_sync(CU_FULL, s, o);
        __syncthreads();
        if (lane == 0) m.warp[warp] = s;
        __syncthreads();
        for (int i = 0; i < WARPS; i++) all += m.warp[i];
        if (!begun) target = lr_mass_target(u, all);
        begun = true;
        int k = 0;
        while (k < WARPS - 1 && before + m.warp[k] <= target) before += m.warp[k++];
        target -= before;
        at += k * piece;
        end = min(end, at + piece);
        __syncthreads();
    }
    uint64_t sum = 0;
    for (int i = at; i < end; i++) {
        uint64_t p = pair_at(r, i);
        if (p) sum += units(r, p, true);
        if (sum > target) return i;
    }
    return end - 1;
}

// ---- a chain ----

// The row's copy: masked and changed.
static __device__ void prepare(const draw_args &a, const lr_draw &w, const float *x, float *y)
{
    const uint32_t *mask = w.mask >= 0 ? a.masks + (size_t)w.mask * ((a.n_vocab + 31) / 32) : nullptr;
    for (int i = threadIdx.x; i < a.n_vocab; i += THREADS) {
        float v = x[i];
        if (!(v > -INFINITY) || (mask && !(mask[i / 32] >> i % 32 & 1))) v = -INFINITY;
        y[i] = v;
    }
    for (int k = 0; k < w.n_stages && w.stage[k].kind <= LR_DRAW_COUNTS; k++) {
        const lr_draw_stage &s = w.stage[k];
        __syncthreads();
        for (int i = threadIdx.x; i < s.n; i += THREADS) {
            lr_draw_edit e = a.edits[s.at + i];
            if (e.id < 0 || e.id >= a.n_vocab) continue;
            float v = y[e.id];
            if (v == -INFINITY) continue;
            if (s.kind == LR_DRAW_ADD)
                v = __fadd_rn(v, e.value);
            else if (s.kind == LR_DRAW_REPEAT)
                v = v > 0 ? __fdiv_rn(v, s.a) : __fmul_rn(v, s.a);
            else
                v = __fsub_rn(v, __fadd_rn(s.a, __fmul_rn(s.b, e.value)));
            y[e.id] = v;
        }
    }
    __syncthreads();
}

static __device__ void warm_row(float *y, row &r, float t, room &m)
{
    float best = float_of(r.first);
    __syncthreads();
    for (int i = threadIdx.x; i < r.n; i += THREADS)
        if (y[i] > -INFINITY) y[i] = __fdiv_rn(__fsub_rn(y[i], best), t);
    __syncthreads();
    r.first = best_of(y, r.n, m);
}

// How many of the kept are at least d above the best's logit.
static __device__ uint64_t above(const row &r, float d, room &m)
{
    // a row that was warmed up has 0 for the best; one that was not compares logits as they are
    float best = r.late == 1.0f ? float_of(r.first) : 0.0f, least = __fadd_rn(best, d);
    uint64_t s = 0;
    for (int i = threadIdx.x; i < r.n; i += THREADS) {
        uint64_t p = pair_at(r, i);
        if (p) s += (r.late == 1.0f ? float_of(p) : below(r, p)) >= least;
    }
    return block_sum(s, m);
}

static __device__ int run_chain(const lr_draw &w, float *y, row &r, room &m)
{
    bool narrowed = false;
    for (int k = 0; k < w.n_stages; k++) {
        const lr_draw_stage &s = w.stage[k];
        uint64_t n, need = 0;
        switch (s.kind) {
        case LR_DRAW_TEMPERATURE:
            if (narrowed)
                r.late = s.a;
            else
                warm_row(y, r, s.a, m);
            continue;
        case LR_DRAW_TOP_K:
            if (s.n == 1) return id_of(r.first);
            if (!narrowed && s.n >= r.n) continue;
            n = kept(r, false, m);
            if (n > (uint64_t)s.n) r.last = reach(r, false, (uint64_t)s.n, m);
            break;
        case LR_DRAW_TOP_P:
            need = lr_mass_share(s.a, kept(r, true, m));
            r.last = reach(r, true, need, m);
            break;
        case LR_DRAW_MIN_P:
            n = kept(r, false, m);
            need = above(r, s.a, m);
            if (need < n) r.last = reach(r, false, need, m);
            break;
        default:
            continue;
        }
        narrowed = true;
    }
    if (!narrowed) return draw_dense(r, w.u, m);
    return id_of(reach(r, true, lr_mass_target(w.u, kept(r, true, m)) + 1, m));
}

// The best of the row as it came. The list is sorted by the place of each: how many are before it.
static __device__ void tops(const draw_args &a, row r, int n_top, room &m)
{
    lr_draw_best *to = a.best + (size_t)blockIdx.x * a.top;
    r.all = true;
    if (n_top > r.n) n_top = r.n;
    if (n_top > 0 && n_top < r.n) r.last = reach(r, false, (uint64_t)n_top, m);
    __syncthreads();
    if (threadIdx.x == 0) m.count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < r.n && n_top > 0; i += THREADS) {
        uint64_t p = pair_at(r, i);
        if (p) m.list[atomicAdd(&m.count, 1)] = p;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.top; i += THREADS) {
        int before = 0;
        if (i >= n_top) {
            to[i] = {-1, -INFINITY};
            continue;
        }
        for (int k = 0; k < n_top; k++) before += m.list[k] > m.list[i];
        to[before] = {id_of(m.list[i]), float_of(m.list[i])};
    }
    __syncthreads();
}

__global__ void __launch_bounds__(THREADS) draw_k(draw_args a)
{
    SHARED(room, m, [1]);
    SHARED(lr_draw, w, [1]);
    if (threadIdx.x == 0) w[0] = a.what[blockIdx.x];
    __syncthreads();
    if (w->out < 0) {
        if (threadIdx.x == 0) a.out[blockIdx.x] = {-1, LR_DRAW_NONE_LEFT, 0, 0, 0};
        return;
    }
    const float *x = a.logits + (size_t)w->out * a.n_vocab;
    float *y = a.work + (size_t)blockIdx.x * a.n_vocab;
    row r = {x, a.n_vocab, false, best_of(x, a.n_vocab, m[0]), 0, 1.0f};
    float top = r.first ? float_of(r.first) : -INFINITY;
    if (!r.first || top == INFINITY) {
        if (threadIdx.x == 0) a.out[blockIdx.x] = {-1, LR_DRAW_NOT_FINITE, 0, top, 0};
        return;
    }
    uint64_t all = w->n_top >= 0 ? kept(r, true, m[0]) : 0;
    if (w->n_top > 0) tops(a, r, w->n_top, m[0]);
    if (w->mask < 0 && w->n_stages > 0 && w->stage[0].kind == LR_DRAW_TOP_K && w->stage[0].n == 1) {
        if (threadIdx.x == 0) a.out[blockIdx.x] = {id_of(r.first), LR_DRAWN, top, top, all};
        return;
    }
    prepare(a, w[0], x, y);
    r.x = y;
    r.first = best_of(y, a.n_vocab, m[0]);
    if (!r.first || float_of(r.first) == INFINITY) {
        if (threadIdx.x == 0) a.out[blockIdx.x] = {-1, r.first ? LR_DRAW_NOT_FINITE : LR_DRAW_NONE_LEFT, 0, top, all};
        return;
    }
    int token = run_chain(w[0], y, r, m[0]);
    if (threadIdx.x == 0) a.out[blockIdx.x] = {token, LR_DRAWN, x[token], top, all};
}

extern "C" {

size_t lr_cu_draw_work(int n, int n_vocab) { return n > 0 && n_vocab > 0 ? (size_t)n * n_vocab * 4 : 0; }

cudaError_t lr_cu_draw_rows(const float *logits, int n_vocab, const lr_draw *what, int n, const lr_draw_edit *edits,
                            const uint32_t *masks, lr_draw_result *out, lr_draw_best *best, int top, void *work,
                            cudaStream_t s)
{
    if (n < 0 || n_vocab <= 0 || n_vocab > 1 << 23 || top < 0 || top > LR_DRAW_TOP) return cudaErrorInvalidValue;
    if (n == 0) return cudaSuccess;
    draw_args a = {logits, n_vocab, what, edits, masks, out, best, top, (float *)work};
    return cu_launch(draw_k, dim3(n), dim3(THREADS), 0, s, a);
}

} // extern "C"
