/* vocab_vec.h - the vocabulary kernels on the vector words; included by one vocab_<isa>.c each, behind vec_<isa>.h.
 *
 * topk: the k-th largest of the maxima of pieces of the row is a lower bound for the k-th largest value, so one pass
 * for the maxima and one that keeps what reaches the bound leave a few more than k candidates; those are sorted as
 * keys. If the candidates are too many (equal or sorted logits, a row that is mostly masked), they are cut back to k as
 * they come. mass adds up blocks of SUM_BLOCK in lanes of double, where their sums are exact.
 */
#include "base/mass.h"
#include "cpu/vec_math.h"
#include "cpu/vocab_int.h"

#define SUM_BLOCK 4096
#define PIECES    2048 /* most pieces for topk's bound */

/* NaN -> -inf, as the maximum of (x, -inf) with NaN first gives the second. */
VEC_INLINE vf no_nan(vf x) { return vf_max(x, vf_set1(-INFINITY)); }

static float max_of(const float *x, int n)
{
    vf a[4];
    for (int c = 0; c < 4; c++) a[c] = vf_set1(-INFINITY);
    int i = 0;
    for (; i + 4 * VW <= n; i += 4 * VW) {
        for (int c = 0; c < 4; c++) a[c] = vf_max(vf_load(x + i + c * VW), a[c]); /* NaN first: passed over */
    }
    float m = vf_hmax(vf_max(vf_max(a[0], a[1]), vf_max(a[2], a[3])));
    for (; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

static int argmax(const float *x, int n)
{
    float m = max_of(x, n);
    vf top = vf_set1(m);
    int i = 0;
    for (; i + VW <= n; i += VW) {
        uint32_t hit = vm_bits(vf_eq(vf_load(x + i), top));
        if (hit) return i + __builtin_ctz(hit);
    }
    for (; i < n; i++) {
        if (x[i] == m) return i;
    }
    return -1;
}

/* lr_mass on vector words: every operation is rounded by itself, so all tables give the same bits. */
VEC_INLINE vf vec_mass(vf d)
{
    vm gone = vf_lt(d, vf_set1(LR_MASS_FAR));
    vf y = vf_max(vf_set1(LR_MASS_FAR), d), n = vf_round(vf_mul(y, vf_set1(LR_MASS_LOG2E)));
    vf r = vf_sub(vf_sub(y, vf_mul(n, vf_set1(LR_MASS_LN2_HI))), vf_mul(n, vf_set1(LR_MASS_LN2_LO)));
    vf p = vf_set1(LR_MASS_C7);
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C6));
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C5));
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C4));
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C3));
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C2));
    p = vf_add(vf_mul(p, r), vf_set1(1.0f));
    p = vf_ldexp_near(vf_add(vf_mul(p, r), vf_set1(1.0f)), n);
    vf small = vf_set1(LR_MASS_SMALL);
    p = vf_select(vf_lt(p, small), vf_sub(vf_add(p, small), small), p);
    return vf_select(gone, vf_set1(0.0f), p);
}

static uint64_t mass(const float *x, int n, float best)
{
    uint64_t sum = 0;
    vf top = vf_set1(best);
    for (int b = 0; b < n; b += SUM_BLOCK) { /* sums of multiples of 2^-40 below 2^13 are exact */
        int end = n - b < SUM_BLOCK ? n : b + SUM_BLOCK, i = b;
        vd s0 = vd_zero(), s1 = s0;
        for (; i + 2 * VW <= end; i += 2 * VW) {
            s0 = vd_add(s0, vd_of(vec_mass(vf_sub(no_nan(vf_load(x + i)), top))));
            s1 = vd_add(s1, vd_of(vec_mass(vf_sub(no_nan(vf_load(x + i + VW)), top))));
        }
        for (; i < end; i += VW) {
            int left = end - i < VW ? end - i : VW;
            vf v = vf_select(vm_first(left), no_nan(vf_loadn(x + i, left)), vf_set1(-INFINITY));
            s0 = vd_add(s0, vd_of(vec_mass(vf_sub(v, top))));
        }
        sum += (uint64_t)(vd_hsum(vd_add(s0, s1)) * (double)LR_MASS_ONE);
    }
    return sum;
}

/* A lower bound for the k-th largest value: -inf, or the k-th largest maximum of pieces. */
static float topk_bound(const float *x, int n, int k)
{
    uint64_t keys[PIECES];
    int len = (n + PIECES - 1) / PIECES;
    len = (len + VW - 1) / VW * VW;
    int pieces = n / len; /* a shorter rest is left out: the bound stays one */
    if (pieces < k) return -INFINITY;
    for (int p = 0; p < pieces; p++) {
        const float *at = x + (size_t)p * len;
        vf m = vf_set1(-INFINITY);
        for (int i = 0; i < len; i += VW) m = vf_max(vf_load(at + i), m);
        keys[p] = lr_vocab_key(vf_hmax(m), p);
    }
    lr_vocab_select(keys, pieces, k);
    int at = 0;
    for (int i = 1; i < k; i++) at = keys[i] < keys[at] ? i : at;
    return max_of(x + (size_t)lr_vocab_id(keys[at]) * len, len);
}

static int topk(const float *x, int n, int k, int32_t *ids, float *vals)
{
    enum { CAP = 4 * LR_TOPK_MAX };
    uint64_t keys[CAP];
    if (k > LR_TOPK_MAX) k = LR_TOPK_MAX;
    if (k > n) k = n;
    if (k <= 0) return 0;
    float bound = topk_bound(x, n, k);
    int m = 0;
    for (int i = 0; i < n; i += VW) {
        int left = n - i < VW ? n - i : VW;
        vf v = no_nan(left == VW ? vf_load(x + i) : vf_loadn(x + i, left));
        uint32_t hit = vm_bits(vf_ge(v, vf_set1(bound)));
        if (left < VW) hit &= (1u << left) - 1;
        for (; hit; hit &= hit - 1) {
            int at = i + __builtin_ctz(hit);
            keys[m++] = lr_vocab_key(x[at], at);
        }
        if (m <= CAP - VW) continue;
        lr_vocab_select(keys, m, k);
        m = k;
        int least = 0;
        for (int j = 1; j < k; j++) least = keys[j] < keys[least] ? j : least;
        float u = x[lr_vocab_id(keys[least])]; /* what equals it from here on has a higher index: it must be beaten */
        bound = nextafterf(u == u ? u : -INFINITY, INFINITY);
    }
    lr_vocab_select(keys, m, k);
    lr_vocab_sort(keys, k);
    lr_vocab_unpack(keys, k, x, ids, vals);
    return k;
}

static int count_above(const float *x, int n, float threshold)
{
    vf t = vf_set1(threshold);
    int i = 0, c = 0;
    for (; i + VW <= n; i += VW) c += __builtin_popcount(vm_bits(vf_ge(vf_load(x + i), t)));
    for (; i < n; i++) c += x[i] >= threshold;
    return c;
}

static int compact_above(const float *x, int n, float threshold, int32_t *ids, int cap)
{
    vf t = vf_set1(threshold);
    int i = 0, c = 0;
    for (; i + VW <= n && c + VW <= cap; i += VW) {
        vm hit = vf_ge(vf_load(x + i), t);
        if (vm_bits(hit)) c += vec_compact(ids + c, hit, i);
    }
    for (; i < n && c < cap; i++) {
        if (x[i] >= threshold) ids[c++] = i;
    }
    return c + count_above(x + i, n - i, threshold);
}

static void mask(float *x, const uint32_t *bits, int n)
{
    vf out = vf_set1(-INFINITY);
    for (int i = 0; i < n; i += VW) {
        uint32_t b = bits[i >> 5] >> (i & 31);
        if ((i & 31) == 0 && b == UINT32_MAX && n - i > 32) { /* nothing to write: in most texts most may come */
            i += 32 - VW;
            continue;
        }
        if (n - i >= VW)
            vf_store(x + i, vf_select(vm_from_bits(b), vf_load(x + i), out));
        else
            vf_storen(x + i, vf_select(vm_from_bits(b), vf_loadn(x + i, n - i), out), n - i);
    }
}

void VEC_NAME(lr_vocab_fill)(lr_cpu_kernels *k)
{
    k->argmax = argmax;
    k->max = max_of;
    k->mass = mass;
    k->topk = topk;
    k->count_above = count_above;
    k->compact_above = compact_above;
    k->mask = mask;
}
