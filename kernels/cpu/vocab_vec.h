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

#define AHEAD_OF_PEAKS 512 /* floats: the row comes from beyond the second-level cache */

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

/* lr_mass on vector words: every operation is rounded by itself, so all tables give the same bits; n times the high
 * part is exact. What is far, or NaN, weighs nothing whatever comes of it on the way. */
VEC_INLINE vf vec_mass(vf d)
{
    vf n = vf_round(vf_mul(d, vf_set1(LR_MASS_LOG2E)));
    vf r = vf_sub(vf_fnma(n, vf_set1(LR_MASS_LN2_HI), d), vf_mul(n, vf_set1(LR_MASS_LN2_LO)));
    vf p = vf_set1(LR_MASS_C7), small = vf_set1(LR_MASS_SMALL);
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C6));
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C5));
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C4));
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C3));
    p = vf_add(vf_mul(p, r), vf_set1(LR_MASS_C2));
    p = vf_add(vf_mul(p, r), vf_set1(1.0f));
    p = vf_ldexp_near(vf_add(vf_mul(p, r), vf_set1(1.0f)), n);
    p = vf_select(vf_lt(p, small), vf_sub(vf_add(p, small), small), p);
    return vf_select(vf_ge(d, vf_set1(LR_MASS_FAR)), p, vf_set1(0.0f));
}

/* Asks for LR_PIECE values at p, into the second-level cache. */
VEC_INLINE void ask_piece(const float *p)
{
    for (int l = 0; l < LR_PIECE; l += 16) __builtin_prefetch(p + l, 0, 2);
}

VEC_INLINE uint64_t mass_of(const float *x, int n, float best, float t, bool warm, const float *ahead)
{
    uint64_t sum = 0;
    vf top = vf_set1(best), by = vf_set1(t);
    for (int b = 0; b < n; b += SUM_BLOCK) { /* sums of multiples of 2^-40 below 2^13 are exact */
        int end = n - b < SUM_BLOCK ? n : b + SUM_BLOCK, i = b;
        vd s0 = vd_zero(), s1 = s0;
        for (; i + 2 * VW <= end; i += 2 * VW) {
            if (ahead && i % LR_PIECE == 0) ask_piece(ahead + i);
            vf d0 = vf_sub(vf_load(x + i), top), d1 = vf_sub(vf_load(x + i + VW), top);
            s0 = vd_add(s0, vd_of(vec_mass(warm ? vf_div(d0, by) : d0)));
            s1 = vd_add(s1, vd_of(vec_mass(warm ? vf_div(d1, by) : d1)));
        }
        for (; i < end; i += VW) {
            int left = end - i < VW ? end - i : VW;
            vf v = vf_select(vm_first(left), vf_loadn(x + i, left), vf_set1(-INFINITY));
            vf d = vf_sub(v, top);
            s0 = vd_add(s0, vd_of(vec_mass(warm ? vf_div(d, by) : d)));
        }
        sum += (uint64_t)(vd_hsum(vd_add(s0, s1)) * (double)LR_MASS_ONE);
    }
    return sum;
}

static uint64_t mass(const float *x, int n, float best) { return mass_of(x, n, best, 1.0f, false, NULL); }
static uint64_t mass_warm(const float *x, int n, float best, float t, const float *ahead)
{
    return t == 1.0f ? mass_of(x, n, best, t, false, ahead) : mass_of(x, n, best, t, true, ahead);
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

enum { KEYS = 4 * LR_TOPK_MAX };

/* The best of what was looked at, as keys, cut back to k as they come. */
typedef struct best_k {
    uint64_t key[KEYS];
    int m, k;
    float bound; /* what is below it is none of the k best */
} best_k;

VEC_INLINE void look_for_best(best_k *s, const float *x, const uint32_t *bits, int from, int to)
{
    for (int i = from; i < to; i += VW) {
        int left = to - i < VW ? to - i : VW;
        vf v = no_nan(left == VW ? vf_load(x + i) : vf_loadn(x + i, left));
        uint32_t hit = vm_bits(vf_ge(v, vf_set1(s->bound)));
        if (left < VW) hit &= (1u << left) - 1;
        if (bits) hit &= bits[i >> 5] >> (i & 31);
        for (; hit; hit &= hit - 1) {
            int at = i + __builtin_ctz(hit);
            s->key[s->m++] = lr_vocab_key(x[at], at);
        }
        if (s->m <= KEYS - VW) continue;
        lr_vocab_select(s->key, s->m, s->k);
        s->m = s->k;
        int least = 0;
        for (int j = 1; j < s->k; j++) least = s->key[j] < s->key[least] ? j : least;
        float u = x[lr_vocab_id(s->key[least])]; /* what equals it from here on has a higher index: to be beaten */
        s->bound = nextafterf(u == u ? u : -INFINITY, INFINITY);
    }
}

static void sort_best(best_k *s, const float *x, int32_t *ids, float *vals)
{
    if (s->k > s->m) s->k = s->m;
    lr_vocab_select(s->key, s->m, s->k);
    lr_vocab_sort(s->key, s->k);
    lr_vocab_unpack(s->key, s->k, x, ids, vals);
}

static int topk(const float *x, int n, int k, int32_t *ids, float *vals)
{
    if (k > LR_TOPK_MAX) k = LR_TOPK_MAX;
    if (k > n) k = n;
    if (k <= 0) return 0;
    best_k s; /* without zeros for the keys */
    s.m = 0;
    s.k = k;
    s.bound = topk_bound(x, n, k);
    look_for_best(&s, x, NULL, 0, n);
    sort_best(&s, x, ids, vals);
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

/* ---- by pieces ---- */

/* Of a whole piece: in most texts most tokens may come. */
VEC_INLINE bool all_may_come(const uint32_t *bits, int n)
{
    return n == LR_PIECE && (bits[0] & bits[1] & bits[2] & bits[3]) == UINT32_MAX;
}

_Static_assert(LR_PIECE == 4 * 32, "words of a piece");

static float peaks(const float *x, const uint32_t *bits, int n, float *peak)
{
    vf none = vf_set1(-INFINITY), best = none;
    for (int from = 0, p = 0; from < n; from += LR_PIECE, p++) {
        int to = n - from < LR_PIECE ? n : from + LR_PIECE, i = from;
        vf a = none, b = a, raw = a;
        for (int l = 0; l < LR_PIECE; l += 16) __builtin_prefetch(x + from + AHEAD_OF_PEAKS + l, 0, 3);
        if (bits && !all_may_come(bits + from / 32, to - from)) {
            for (; i < to; i += VW) {
                int left = to - i < VW ? to - i : VW;
                vf v = left == VW ? vf_load(x + i) : vf_select(vm_first(left), vf_loadn(x + i, left), none);
                raw = vf_max(v, raw); /* NaN first: passed over */
                b = vf_max(vf_select(vm_from_bits(bits[i >> 5] >> (i & 31)), v, none), b);
            }
            a = b;
        } else {
            for (; i + 2 * VW <= to; i += 2 * VW) {
                a = vf_max(vf_load(x + i), a);
                b = vf_max(vf_load(x + i + VW), b);
            }
            for (; i < to; i += VW) {
                int left = to - i < VW ? to - i : VW;
                a = vf_max(vf_select(vm_first(left), vf_loadn(x + i, left), none), a);
            }
            raw = a = vf_max(a, b);
        }
        peak[p] = vf_hmax(a);
        best = vf_max(best, raw);
    }
    return vf_hmax(best);
}

/* k pieces have one each that is no smaller than the k-th largest peak, so the k best are none of the smaller ones. */
static int topk_peaks(const float *x, const uint32_t *bits, int n, const float *peak, int k, int32_t *ids, float *vals)
{
    int32_t at[LR_TOPK_MAX];
    float top[LR_TOPK_MAX];
    int pieces = lr_pieces(n);
    best_k s; /* without zeros for the keys */
    s.bound = -INFINITY;
    if (k > LR_TOPK_MAX) k = LR_TOPK_MAX;
    if (k > 0 && k <= pieces / 2) {
        topk(peak, pieces, k, at, top);
        s.bound = top[k - 1];
    }
    if (!bits && !(s.bound > -INFINITY)) return topk(x, n, k, ids, vals);
    if (k > n) k = n;
    if (k <= 0) return 0;
    s.m = 0;
    s.k = k;
    for (int p = 0; p < pieces; p++) {
        if (!(peak[p] >= s.bound)) continue;
        int from = p * LR_PIECE;
        look_for_best(&s, x, bits, from, n - from < LR_PIECE ? n : from + LR_PIECE);
    }
    sort_best(&s, x, ids, vals);
    return s.k;
}

static int compact_peaks(const float *x, const uint32_t *bits, int n, const float *peak, float threshold, int32_t *ids)
{
    vf t = vf_set1(threshold);
    int c = 0;
    for (int from = 0, p = 0; from < n; from += LR_PIECE, p++) {
        if (!(peak[p] >= threshold)) continue;
        int to = n - from < LR_PIECE ? n : from + LR_PIECE, i = from;
        for (; i + VW <= to; i += VW) {
            vm hit = vf_ge(vf_load(x + i), t);
            if (bits) hit = vm_and(hit, vm_from_bits(bits[i >> 5] >> (i & 31)));
            if (vm_bits(hit)) c += vec_compact(ids + c, hit, i);
        }
        for (; i < to; i++) {
            if (x[i] >= threshold && (!bits || bits[i >> 5] >> (i & 31) & 1)) ids[c++] = i;
        }
    }
    return c;
}

static void temper(float *x, int n, float best, float t)
{
    vf b = vf_set1(best), by = vf_set1(t);
    int i = 0;
    for (; i + VW <= n; i += VW) vf_store(x + i, vf_div(vf_sub(vf_load(x + i), b), by));
    for (; i < n; i++) x[i] = (x[i] - best) / t;
}

/* e^(d / t) to 3e-7 of it, for d <= 0; d far below gives next to nothing, NaN too. hi + lo: log2(e) / t */
VEC_INLINE vf about_exp(vf d, vf low, vf hi, vf lo)
{
    vf y = vf_max(d, low), n = vf_round(vf_mul(y, hi));
    vf r = vf_fma(y, lo, vf_fms(y, hi, n));
    vf p = vf_fma(vf_set1(0.001326472714f), r, vf_set1(0.00967151264f));
    p = vf_fma(p, r, vf_set1(0.05550733743f));
    p = vf_fma(p, r, vf_set1(0.2402224209f));
    p = vf_fma(p, r, vf_set1(0.6931469776f));
    return vf_ldexp_near(vf_fma(p, r, vf_set1(1.0f)), n);
}

/* How far off: lr_mass 2e-7 of itself, about_exp 3e-7, their difference by the rounding of d / t, which temper makes
 * and this does not, 6e-8 of d / t: n values of e^-y of the best are at most n e^-y of all, so that y beyond ln n
 * hardly counts, and 14 of it make 9e-7. Sums of a piece: 5 roundings of VW lanes and 4 or 3 behind, 6e-7. Mass's
 * unit and end at e^-28: n 1.2e-12. In all 3.3e-6 where n is a million. At t = 1 d / t is exact, so a piece's sum is
 * off by 2e-7, 3e-7 and 6e-7 (with lanes of 4: 7.2e-7) of itself, and a unit, e^-27.7, a value. */
static void glance(const float *x, const uint32_t *bits, int n, const float *peak, float best, float t, float *sums,
                   const float *ahead)
{
    double factor = M_LOG2E / (double)t;
    vf b = vf_set1(best), low = vf_set1(-60 * t), hi = vf_set1((float)factor);
    vf lo = vf_set1((float)(factor - (double)(float)factor)), none = vf_set1(-INFINITY);
    float far = best - 30 * t;
    for (int from = 0, p = 0; from < n; from += LR_PIECE, p++) {
        int to = n - from < LR_PIECE ? n : from + LR_PIECE, i = from;
        vf s0 = vf_set1(0.0f), s1 = s0;
        sums[p] = 0;
        if (ahead && to - from == LR_PIECE) ask_piece(ahead + from);
        if (peak[p] < far) continue;
        bool masked = bits && !all_may_come(bits + from / 32, to - from);
        for (; masked && i + 2 * VW <= to; i += 2 * VW) {
            vf v0 = vf_select(vm_from_bits(bits[i >> 5] >> (i & 31)), vf_load(x + i), none);
            vf v1 = vf_select(vm_from_bits(bits[(i + VW) >> 5] >> ((i + VW) & 31)), vf_load(x + i + VW), none);
            s0 = vf_add(s0, about_exp(vf_sub(v0, b), low, hi, lo));
            s1 = vf_add(s1, about_exp(vf_sub(v1, b), low, hi, lo));
        }
        for (; i + 4 * VW <= to; i += 4 * VW) {
            s0 = vf_add(s0, vf_add(about_exp(vf_sub(vf_load(x + i), b), low, hi, lo),
                                   about_exp(vf_sub(vf_load(x + i + VW), b), low, hi, lo)));
            s1 = vf_add(s1, vf_add(about_exp(vf_sub(vf_load(x + i + 2 * VW), b), low, hi, lo),
                                   about_exp(vf_sub(vf_load(x + i + 3 * VW), b), low, hi, lo)));
        }
        for (; i < to; i += VW) {
            int left = to - i < VW ? to - i : VW;
            vf v = left == VW ? vf_load(x + i) : vf_select(vm_first(left), vf_loadn(x + i, left), none);
            if (masked) v = vf_select(vm_from_bits(bits[i >> 5] >> (i & 31)), v, none);
            s0 = vf_add(s0, about_exp(vf_sub(v, b), low, hi, lo));
        }
        sums[p] = vf_hsum(vf_add(s0, s1));
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
    k->peaks = peaks;
    k->topk_peaks = topk_peaks;
    k->compact_peaks = compact_peaks;
    k->temper = temper;
    k->mass_warm = mass_warm;
    k->glance = glance;
}
