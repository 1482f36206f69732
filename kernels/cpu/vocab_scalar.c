/* vocab_scalar.c - the reference of the kernels over a row of logits, and the selection and sorting of keys.
 *
 * topk keeps a buffer of candidates: whatever beats the k-th best known so far goes in; a full buffer is cut back to
 * its k best. Most of a long row is thus looked at once and dropped.
 */
#include "base/mass.h"
#include "cpu/vocab_int.h"

static int argmax(const float *x, int n)
{
    int best = -1;
    for (int i = 0; i < n; i++) {
        if (x[i] == x[i] && (best < 0 || x[i] > x[best])) best = i;
    }
    return best;
}

static float max_of(const float *x, int n)
{
    float m = -INFINITY;
    for (int i = 0; i < n; i++) {
        if (x[i] > m) m = x[i];
    }
    return m;
}

static uint64_t mass(const float *x, int n, float best)
{
    uint64_t sum = 0;
    for (int i = 0; i < n; i++) sum += lr_mass_units(lr_mass(x[i] - best));
    return sum;
}

void lr_vocab_select(uint64_t *keys, int n, int k)
{
    int lo = 0, hi = n - 1;
    while (lo < hi) { /* invariant: the k-th largest lies in lo .. hi */
        uint64_t a = keys[lo], b = keys[lo + (hi - lo) / 2], c = keys[hi];
        uint64_t pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        int i = lo, j = hi;
        while (i <= j) {
            while (keys[i] > pivot) i++;
            while (keys[j] < pivot) j--;
            if (i <= j) {
                uint64_t s = keys[i];
                keys[i++] = keys[j];
                keys[j--] = s;
            }
        }
        if (k - 1 <= j)
            hi = j;
        else if (k - 1 >= i)
            lo = i;
        else
            return;
    }
}

static void insertion_sort(uint64_t *keys, int n)
{
    for (int i = 1; i < n; i++) {
        uint64_t v = keys[i];
        int j = i;
        for (; j > 0 && keys[j - 1] < v; j--) keys[j] = keys[j - 1];
        keys[j] = v;
    }
}

void lr_vocab_sort(uint64_t *keys, int n)
{
    while (n > 24) { /* the halves of a selection are in order to each other: recurse into the one, loop on the other */
        int k = n / 2;
        lr_vocab_select(keys, n, k);
        lr_vocab_sort(keys, k);
        keys += k;
        n -= k;
    }
    insertion_sort(keys, n);
}

void lr_vocab_unpack(const uint64_t *keys, int k, const float *x, int32_t *ids, float *vals)
{
    for (int i = 0; i < k; i++) {
        ids[i] = lr_vocab_id(keys[i]);
        float v = x[ids[i]];
        vals[i] = v == v ? v : -INFINITY;
    }
}

static bool is_set(const uint32_t *bits, int i) { return !bits || bits[i >> 5] >> (i & 31) & 1; }

static int topk_peaks(const float *x, const uint32_t *bits, int n, const float *peak, int k, int32_t *ids, float *vals)
{
    uint64_t keys[4 * LR_TOPK_MAX], least = 0;
    (void)peak;
    if (k > LR_TOPK_MAX) k = LR_TOPK_MAX;
    if (k > n) k = n;
    if (k <= 0) return 0;
    int m = 0;
    for (int i = 0; i < n; i++) {
        uint64_t key = lr_vocab_key(x[i], i);
        if (key < least || !is_set(bits, i)) continue;
        keys[m++] = key;
        if (m < 4 * LR_TOPK_MAX) continue;
        lr_vocab_select(keys, m, k);
        m = k;
        least = keys[0];
        for (int j = 1; j < k; j++) least = keys[j] < least ? keys[j] : least;
    }
    if (k > m) k = m;
    lr_vocab_select(keys, m, k);
    lr_vocab_sort(keys, k);
    lr_vocab_unpack(keys, k, x, ids, vals);
    return k;
}

static int topk(const float *x, int n, int k, int32_t *ids, float *vals)
{
    return topk_peaks(x, NULL, n, NULL, k, ids, vals);
}

static int count_above(const float *x, int n, float threshold)
{
    int c = 0;
    for (int i = 0; i < n; i++) c += x[i] >= threshold;
    return c;
}

static int compact_above(const float *x, int n, float threshold, int32_t *ids, int cap)
{
    int c = 0;
    for (int i = 0; i < n; i++) {
        if (!(x[i] >= threshold)) continue;
        if (c < cap) ids[c] = i;
        c++;
    }
    return c;
}

static void mask(float *x, const uint32_t *bits, int n)
{
    for (int i = 0; i < n; i++) {
        if (!(bits[i >> 5] >> (i & 31) & 1)) x[i] = -INFINITY;
    }
}

static float peaks(const float *x, const uint32_t *bits, int n, float *peak)
{
    for (int i = 0, p = 0; i < n; p++) {
        peak[p] = -INFINITY;
        for (int end = n - i < LR_PIECE ? n : i + LR_PIECE; i < end; i++)
            if (x[i] > peak[p] && is_set(bits, i)) peak[p] = x[i];
    }
    return max_of(x, n);
}

static int compact_peaks(const float *x, const uint32_t *bits, int n, const float *peak, float threshold, int32_t *ids)
{
    int c = 0;
    (void)peak;
    for (int i = 0; i < n; i++)
        if (x[i] >= threshold && is_set(bits, i)) ids[c++] = i;
    return c;
}

static void temper(float *x, int n, float best, float t)
{
    for (int i = 0; i < n; i++) x[i] = (x[i] - best) / t;
}

static uint64_t mass_warm(const float *x, int n, float best, float t, const float *ahead)
{
    (void)ahead;
    uint64_t sum = 0;
    for (int i = 0; i < n; i++) sum += lr_mass_units(lr_mass((x[i] - best) / t));
    return sum;
}

static void glance(const float *x, const uint32_t *bits, int n, const float *peak, float best, float t, float *sums,
                   const float *ahead)
{
    (void)ahead;
    (void)peak;
    for (int i = 0, p = 0; i < n; p++) {
        uint64_t sum = 0;
        for (int end = n - i < LR_PIECE ? n : i + LR_PIECE; i < end; i++)
            if (is_set(bits, i)) sum += lr_mass_units(lr_mass((x[i] - best) / t));
        sums[p] = (float)((double)sum * 0x1p-40);
    }
}

void lr_vocab_fill_scalar(lr_cpu_kernels *k)
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
