// sample.cu - from rows of logits to tokens without a visit to the host: a block a row.
//
// The row is copied to the workspace with its mask and edits, so that logits stay as they are. Narrowing stages look at
// the best LR_CU_CAND tokens at most: a radix select finds the smallest of them, a sort puts them in the host's order
// (descending, lower id first), and one thread adds up their probabilities in that order, in double. What would need
// more of the row is left to the host (LR_CU_TO_HOST). Sums over the whole row have an order given by its length.
#include "cu_port.h"
#include "cuda/kernels.h"

enum { THREADS = 512, CAND = LR_CU_CAND };

struct sample_args {
    const float *logits;
    int n_vocab;
    const lr_cu_sample *what;
    const lr_cu_edit *edits;
    const uint32_t *masks;
    lr_cu_drawn *out;
    float *work;
};

// lr_sample_uniform of src/sample, for stream 0.
static __device__ double uniform(uint64_t seed, uint64_t position)
{
    uint64_t z = seed ^ (0x9e3779b97f4a7c15u * (position + 1)) ^ 0xd1b54a32d192ed03u;
    for (int i = 0; i < 2; i++) {
        z += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

// Ascends as the floats do.
static __device__ __forceinline__ uint32_t key_of(float f)
{
    if (f == 0) f = 0; // one key for both zeros
    uint32_t u = __float_as_uint(f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
static __device__ __forceinline__ float float_of(uint32_t k)
{
    return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k);
}
static __device__ __forceinline__ uint64_t pair_of(float x, int id)
{
    return (uint64_t)key_of(x) << 32 | (0xffffffffu - (uint32_t)id);
}
static __device__ __forceinline__ int id_of(uint64_t p) { return (int)(0xffffffffu - (uint32_t)p); }

// The row's copy: masked, changed, NaN as -inf.
static __device__ void prepare(const sample_args &a, const lr_cu_sample &w, const float *x, float *y)
{
    const uint32_t *mask = w.mask >= 0 ? a.masks + (size_t)w.mask * ((a.n_vocab + 31) / 32) : nullptr;
    for (int i = threadIdx.x; i < a.n_vocab; i += THREADS) {
        float v = x[i];
        if (!(v > -INFINITY) || (mask && !(mask[i / 32] >> i % 32 & 1))) v = -INFINITY;
        y[i] = v;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < w.n_edits; i += THREADS) {
        lr_cu_edit e = a.edits[w.edit_at + i];
        if (e.id < 0 || e.id >= a.n_vocab) continue;
        float v = y[e.id];
        if (v == -INFINITY) continue;
        v = __fadd_rn(v, e.bias);
        if (e.seen && w.repetition != 1.0f) v = v > 0 ? __fdiv_rn(v, w.repetition) : __fmul_rn(v, w.repetition);
        if (e.count > 0) v = __fsub_rn(v, __fadd_rn(w.presence, __fmul_rn(w.frequency, (float)e.count)));
        y[e.id] = v;
    }
    __syncthreads();
}

// The best place, the lowest of equals; 0 if there is nothing above -inf.
static __device__ uint64_t best_of(const float *y, int n, uint64_t *red)
{
    uint64_t best = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        uint64_t p = y[i] > -INFINITY ? pair_of(y[i], i) : 0;
        if (p > best) best = p;
    }
    for (int o = 16; o > 0; o >>= 1) {
        uint64_t p = __shfl_xor_sync(CU_FULL, best, o);
        if (p > best) best = p;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = best;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++)
        if (red[i] > best) best = red[i];
    return best;
}

static __device__ __forceinline__ float warm(float x, float best, float t) { return t == 1.0f ? x : (x - best) / t; }

// ---- the best few ----

struct chosen {
    uint64_t pair[CAND]; // best first
    int n;               // of them
    int total;           // above -inf in the row
};

// The smallest key among the `want` largest of a row that has more: eight bits at a time. *ties: how many of that key.
static __device__ uint32_t select_key(const float *y, int n, int want, int *hist, int *need)
{
    SHARED(uint32_t, prefix, [1]);
    SHARED(int, left, [1]);
    if (threadIdx.x == 0) {
        prefix[0] = 0;
        left[0] = want;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += THREADS) hist[i] = 0;
        __syncthreads();
        uint32_t p = prefix[0];
        for (int i = threadIdx.x; i < n; i += THREADS) {
            uint32_t k = key_of(y[i]);
            if (y[i] > -INFINITY && (shift == 24 || k >> (shift + 8) == p >> (shift + 8)))
                atomicAdd(&hist[k >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int d = 255, l = left[0];
            while (d > 0 && hist[d] < l) l -= hist[d--];
            prefix[0] = p | (uint32_t)d << shift;
            left[0] = l;
        }
        __syncthreads();
    }
    *need = left[0];
    return prefix[0];
}

// Sorts CAND pairs, descending (bitonic).
static __device__ void sort_pairs(uint64_t *p)
{
    for (int size = 2; size <= CAND; size *= 2)
        for (int d = size / 2; d > 0; d /= 2) {
            __syncthreads();
            for (int t = threadIdx.x; t < CAND / 2; t += THREADS) {
                int i = t / d * 2 * d + t % d, j = i + d;
                uint64_t x = p[i], y = p[j];
                if ((x < y) == ((i & size) == 0)) {
                    p[i] = y;
                    p[j] = x;
                }
            }
        }
    __syncthreads();
}

// The `want` <= CAND best of y.
static __device__ void choose(const float *y, int n, int want, chosen &c, int *hist)
{
    SHARED(int, count, [2]);
    for (int i = threadIdx.x; i < CAND; i += THREADS) c.pair[i] = 0;
    if (threadIdx.x < 2) count[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS)
        if (y[i] > -INFINITY) atomicAdd(&count[0], 1);
    __syncthreads();
    int total = count[0], need = 0;
    uint32_t least = 0;
    if (total > want) least = select_key(y, n, want, hist, &need);
    for (int i = threadIdx.x; i < n; i += THREADS) // all above the least key; the order comes from the sort
        if (y[i] > -INFINITY && key_of(y[i]) > least) c.pair[atomicAdd(&count[1], 1)] = pair_of(y[i], i);
    __syncthreads();
    if (total > want) { // and of those that have it, the lowest ids
        int at = count[1];
        for (int i0 = 0; i0 < n && need > 0; i0 += THREADS) {
            int i = i0 + threadIdx.x;
            int tie = i < n && y[i] > -INFINITY && key_of(y[i]) == least;
            unsigned votes = __ballot_sync(CU_FULL, tie);
            int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
            if (lane == 0) hist[warp] = __popc(votes);
            __syncthreads();
            int before = __popc(votes & ((1u << lane) - 1)), all = 0;
            for (int w = 0; w < THREADS / 32; w++) {
                if (w < warp) before += hist[w];
                all += hist[w];
            }
            if (tie && before < need) c.pair[at + before] = pair_of(y[i], i);
            at += all < need ? all : need;
            need -= all < need ? all : need;
            __syncthreads();
        }
    }
    __syncthreads();
    sort_pairs(c.pair);
    if (threadIdx.x == 0) {
        c.n = total < want ? total : want;
        c.total = total;
    }
    __syncthreads();
}

// One thread: how many candidates stay, -1: more than there are might have to. dense: sum of exp(y - best) over the
// row.
static __device__ int narrow(const lr_cu_sample &w, const chosen &c, const double *p, float t, double dense)
{
    int n = c.n;
    bool all = c.total <= c.n || w.top_k > 0; // the list is all that counts
    if (w.top_p < 1 && w.top_p <= 0) {
        n = 1;
    } else if (w.top_p < 1) {
        double sum = 0, total = dense;
        if (w.top_k > 0) {
            total = 0;
            for (int i = 0; i < n; i++) total += p[i];
        }
        int kept = 0;
        while (kept < n && sum < (double)w.top_p * total) sum += p[kept++];
        if (kept == n && !all && sum < (double)w.top_p * total) return -1;
        n = kept > 0 ? kept : 1;
        all = true;
    }
    if (w.min_p > 0) {
        float best = float_of((uint32_t)(c.pair[0] >> 32)), d = logf(w.min_p < 1 ? w.min_p : 1.0f);
        float top = warm(best, best, t) + d;
        int kept = 0;
        while (kept < n && warm(float_of((uint32_t)(c.pair[kept] >> 32)), best, t) >= top) kept++;
        if (kept == n && !all) return -1;
        n = kept > 0 ? kept : 1;
    }
    return n;
}

static __device__ double block_sum(double v, double *red)
{
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(CU_FULL, v, o);
    __syncthreads();
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = v;
    __syncthreads();
    double s = 0;
    for (int i = 0; i < THREADS / 32; i++) s += red[i];
    return s;
}

static __device__ double sum_exp(const float *y, int n, float best, float t, double *red)
{
    double s = 0;
    for (int i = threadIdx.x; i < n; i += THREADS)
        if (y[i] > -INFINITY) s += (double)expf(warm(y[i], best, t) - warm(best, best, t));
    return block_sum(s, red);
}

// The draw from the whole row, in the order of ids: thread t has a run of them.
static __device__ int draw_dense(const float *y, int n, float best, float t, double u, double *sums)
{
    SHARED(int, token, [1]);
    int run = (n + THREADS - 1) / THREADS, i0 = threadIdx.x * run, i1 = min(n, i0 + run);
    double s = 0;
    for (int i = i0; i < i1; i++)
        if (y[i] > -INFINITY) s += (double)expf(warm(y[i], best, t) - warm(best, best, t));
    sums[threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0, at = 0;
        for (int k = 0; k < THREADS; k++) total += sums[k];
        int k = 0, last = -1;
        while (k < THREADS - 1 && !(at + sums[k] > u * total)) at += sums[k++];
        for (int i = k * run; i < min(n, (k + 1) * run); i++) {
            if (!(y[i] > -INFINITY)) continue;
            last = i;
            at += (double)expf(warm(y[i], best, t) - warm(best, best, t));
            if (at > u * total) break;
        }
        for (int i = min(n, k * run) - 1; last < 0 && i >= 0; i--) // rounding took it past the end
            if (y[i] > -INFINITY) last = i;
        token[0] = last;
    }
    __syncthreads();
    return token[0];
}

// Of the first n candidates. One thread.
static __device__ int draw_candidate(const chosen &c, int n, float t, double u)
{
    float best = float_of((uint32_t)(c.pair[0] >> 32));
    if (n == 1) return id_of(c.pair[0]);
    double sum = 0, at = 0;
    for (int i = 0; i < n; i++)
        sum += exp((double)warm(float_of((uint32_t)(c.pair[i] >> 32)), best, t) - (double)warm(best, best, t));
    for (int i = 0; i < n; i++) {
        at += exp((double)warm(float_of((uint32_t)(c.pair[i] >> 32)), best, t) - (double)warm(best, best, t));
        if (at > u * sum) return id_of(c.pair[i]);
    }
    return id_of(c.pair[n - 1]);
}

__global__ void __launch_bounds__(THREADS) sample_k(sample_args a)
{
    SHARED(chosen, c, [1]);
    SHARED(double, p, [CAND]);
    SHARED(int, hist, [256]);
    SHARED(uint64_t, red, [THREADS / 32]);
    SHARED(lr_cu_drawn, r, [1]);
    lr_cu_sample w = a.what[blockIdx.x];
    if (w.row < 0) {
        if (threadIdx.x == 0) a.out[blockIdx.x] = {-1, LR_CU_NONE_LEFT, 0, 0};
        return;
    }
    const float *x = a.logits + (size_t)w.row * a.n_vocab;
    float *y = a.work + (size_t)blockIdx.x * a.n_vocab;
    uint64_t raw = best_of(x, a.n_vocab, red);
    float top = raw ? float_of((uint32_t)(raw >> 32)) : -INFINITY;
    if (!raw || top == INFINITY) {
        if (threadIdx.x == 0) a.out[blockIdx.x] = {-1, LR_CU_NOT_FINITE, 0, top};
        return;
    }
    double lse = (double)top + log(sum_exp(x, a.n_vocab, top, 1.0f, p));
    prepare(a, w, x, y);
    uint64_t first = best_of(y, a.n_vocab, red);
    float best = float_of((uint32_t)(first >> 32));
    bool narrows = w.top_k > 0 || w.top_p < 1 || w.min_p > 0;
    if (threadIdx.x == 0) r[0] = {id_of(first), LR_CU_DRAWN, 0, top};
    __syncthreads();
    if (!first || best == INFINITY) {
        if (threadIdx.x == 0) a.out[blockIdx.x] = {-1, first ? LR_CU_NOT_FINITE : LR_CU_NONE_LEFT, 0, top};
        return;
    }
    if (w.temperature > 0 && w.top_k != 1) {
        double u = uniform(w.seed, w.position);
        float t = w.temperature_last ? 1.0f : w.temperature;
        if (!narrows) {
            int token = draw_dense(y, a.n_vocab, best, w.temperature, u, p);
            if (threadIdx.x == 0) r[0].token = token;
        } else if (w.top_k > CAND) {
            if (threadIdx.x == 0) r[0] = {-1, LR_CU_TO_HOST, 0, top};
        } else {
            double dense = w.top_p < 1 && w.top_k <= 0 ? sum_exp(y, a.n_vocab, best, t, p) : 0;
            choose(y, a.n_vocab, w.top_k > 0 ? w.top_k : CAND, c[0], hist);
            for (int i = threadIdx.x; i < c[0].n; i += THREADS)
                p[i] =
                    exp((double)warm(float_of((uint32_t)(c[0].pair[i] >> 32)), best, t) - (double)warm(best, best, t));
            __syncthreads();
            if (threadIdx.x == 0) {
                int n = narrow(w, c[0], p, t, dense);
                if (n < 0)
                    r[0] = {-1, LR_CU_TO_HOST, 0, top};
                else
                    r[0].token = draw_candidate(c[0], n, w.temperature, u);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        lr_cu_drawn d = r[0];
        if (d.token >= 0) d.logprob = (float)((double)x[d.token] - lse);
        a.out[blockIdx.x] = d;
    }
}

__global__ void feed_k(const lr_cu_drawn *d, const int32_t *at, int n, int32_t *tokens)
{
    int i = blockIdx.x * 32 + threadIdx.x;
    if (i < n && at[i] >= 0) tokens[at[i]] = d[i].token;
}

extern "C" {

size_t lr_cu_sample_work(int n, int n_vocab) { return n > 0 && n_vocab > 0 ? (size_t)n * n_vocab * 4 : 0; }

cudaError_t lr_cu_sample_rows(const float *logits, int n_vocab, const lr_cu_sample *what, int n,
                              const lr_cu_edit *edits, const uint32_t *masks, lr_cu_drawn *out, void *work,
                              cudaStream_t s)
{
    if (n < 0 || n_vocab <= 0) return cudaErrorInvalidValue;
    if (n == 0) return cudaSuccess;
    sample_args a = {logits, n_vocab, what, edits, masks, out, (float *)work};
    return cu_launch(sample_k, dim3(n), dim3(THREADS), 0, s, a);
}

cudaError_t lr_cu_feed(const lr_cu_drawn *d, const int32_t *at, int n, int32_t *tokens, cudaStream_t s)
{
    if (n < 0) return cudaErrorInvalidValue;
    return n == 0 ? cudaSuccess : cu_launch(feed_k, dim3((n + 31) / 32), dim3(32), 0, s, d, at, n, tokens);
}

} // extern "C"
