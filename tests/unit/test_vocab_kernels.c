/* test_vocab_kernels.c - argmax, max, mass, top-k, compaction and masks of every instruction set of this machine:
 * against plain sorting and float64 sums, with ties, NaN and infinities, at odd lengths and at a vocabulary of 262144.
 */
#include "base/mass.h"
#include "cpu/vocab_int.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static lr_cpu_kernels tables[3];
static int n_tables;
static uint32_t seed = 3;

static uint32_t bits(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}

enum { N = 262144 };
static float x[N + 1];
static int32_t ids[N + 1], sorted[N];
static const int lengths[] = {1, 2, 5, 8, 15, 16, 17, 33, 100, 1000, 4095, 4100, 49152, N};

enum { SPREAD, TIES, EQUAL, ASCENDING, DESCENDING, MASKED, WILD, N_KINDS };

/* Rows as samplers meet them, and as they should not. */
static void fill(int n, int kind)
{
    for (int i = 0; i < n; i++) {
        float u = (float)bits() / 16777216.0f;
        switch (kind) {
        case SPREAD:
            x[i] = u * 40 - 30;
            break;
        case TIES:
            x[i] = (float)(bits() % 7) - 3;
            break;
        case EQUAL:
            x[i] = 2.5f;
            break;
        case ASCENDING:
            x[i] = (float)i;
            break;
        case DESCENDING:
            x[i] = (float)-i;
            break;
        case MASKED:
            x[i] = bits() % 1000 ? -INFINITY : u;
            break;
        default:
            x[i] = bits() % 5 == 0 ? NAN : bits() % 9 == 0 ? -INFINITY : bits() % 4 ? u : bits() % 2 ? 0.0f : -0.0f;
        }
    }
    x[n] = 1e30f; /* a read past the end shows */
}

static int before(const void *a, const void *b)
{
    int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    float u = x[i] == x[i] ? x[i] : -INFINITY, v = x[j] == x[j] ? x[j] : -INFINITY;
    return u > v ? -1 : u < v ? 1 : (i > j) - (i < j);
}

static void sort_row(int n)
{
    for (int i = 0; i < n; i++) sorted[i] = i;
    qsort(sorted, (size_t)n, sizeof *sorted, before);
}

static void test_max(void **state)
{
    for (int li = 0; li < 14; li++) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            int n = lengths[li], best = -1;
            fill(n, kind);
            for (int i = 0; i < n; i++) {
                if (x[i] == x[i] && (best < 0 || x[i] > x[best])) best = i;
            }
            for (int t = 0; t < n_tables; t++) {
                assert_int_equal(tables[t].argmax(x, n), best);
                assert_true(tables[t].max(x, n) == (best < 0 ? -INFINITY : x[best]));
            }
        }
    }
    for (int t = 0; t < n_tables; t++) {
        for (int i = 0; i < 40; i++) x[i] = NAN;
        assert_int_equal(tables[t].argmax(x, 40), -1);
        assert_true(tables[t].max(x, 40) == -INFINITY);
        x[37] = -INFINITY;
        assert_int_equal(tables[t].argmax(x, 40), 37);
    }
}

/* The sums of all tables are the same number, and near what they stand for. */
static void test_mass(void **state)
{
    for (int li = 0; li < 14; li++) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            int n = lengths[li];
            fill(n, kind);
            float top = -INFINITY;
            double sum = 0;
            uint64_t want = 0;
            for (int i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
            if (isinf(top)) continue;
            for (int i = 0; i < n; i++) {
                if (x[i] == x[i]) sum += exp((double)x[i] - top);
                want += lr_mass_units(lr_mass(x[i] - top));
            }
            for (int t = 0; t < n_tables; t++) {
                uint64_t got = tables[t].mass(x, n, top);
                if (got != want || !(fabs((double)got * 0x1p-40 / sum - 1) <= 5e-7))
                    fail_msg("%s: mass n %d kind %d: %.12g, expected %.12g, near %.12g", tables[t].name, n, kind,
                             (double)got * 0x1p-40, (double)want * 0x1p-40, sum);
            }
        }
    }
    for (int t = 0; t < n_tables; t++) {
        float few[4] = {-INFINITY, 88.5f, NAN, 60.4f}, flat[9];
        assert_true(tables[t].mass(few, 4, 88.5f) == (uint64_t)1 << 40);
        for (int i = 0; i < 9; i++) flat[i] = 3e38f;
        assert_true(tables[t].mass(flat, 9, 3e38f) == 9 * ((uint64_t)1 << 40));
    }
    for (int i = 0; i < 100000; i++) { /* e^d all along its range */
        float d = -(float)i * 2.9e-4f;
        double want = exp((double)d), got = lr_mass(d);
        assert_true(fabs(got - want) <= 2.5e-7 * want + 0x1p-41 + (d < -27.9f ? 0x1p-40 : 0));
    }
    assert_true(lr_mass_share(1, 77) == 77 && lr_mass_share(0, 77) == 1 && lr_mass_share(0.5f, 77) == 39);
    assert_true(lr_mass_target(0, 9) == 0 &&
                lr_mass_target(1 - 0x1p-53, ((uint64_t)1 << 60) + 1) < ((uint64_t)1 << 60) + 1);
}

static void test_topk(void **state)
{
    static const int ks[] = {1, 2, 17, 40, 64, 500, 1024};
    float vals[LR_TOPK_MAX + 1];
    for (int li = 0; li < 14; li++) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            int n = lengths[li];
            if (n == N && kind != SPREAD && kind != TIES && kind != MASKED) continue; /* qsort takes its time */
            fill(n, kind);
            sort_row(n);
            for (int t = 0; t < n_tables; t++) {
                for (int ki = 0; ki < 7; ki++) {
                    int k = ks[ki] < n ? ks[ki] : n;
                    ids[k] = -7;
                    vals[k] = -7;
                    assert_int_equal(tables[t].topk(x, n, ks[ki], ids, vals), k);
                    for (int i = 0; i < k; i++) {
                        if (ids[i] != sorted[i]) {
                            fail_msg("%s: topk n %d kind %d k %d at %d: %d, expected %d", tables[t].name, n, kind, k, i,
                                     ids[i], sorted[i]);
                        }
                        float v = x[ids[i]] == x[ids[i]] ? x[ids[i]] : -INFINITY;
                        assert_memory_equal(&vals[i], &v, 4);
                    }
                    assert_true(ids[k] == -7 && vals[k] == -7);
                }
            }
        }
    }
    for (int t = 0; t < n_tables; t++) assert_int_equal(tables[t].topk(x, 10, 0, ids, vals), 0);
}

static void test_above(void **state)
{
    static const float thresholds[] = {-INFINITY, -3, 0, 0.5f, 2.5f, 9, INFINITY};
    for (int li = 0; li < 14; li++) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            int n = lengths[li];
            fill(n, kind);
            for (int h = 0; h < 7; h++) {
                int c = 0;
                for (int i = 0; i < n; i++) {
                    if (x[i] >= thresholds[h]) sorted[c++] = i;
                }
                for (int t = 0; t < n_tables; t++) {
                    assert_int_equal(tables[t].count_above(x, n, thresholds[h]), c);
                    for (int cap = 0; cap <= n; cap += 1 + cap * 3) {
                        int m = c < cap ? c : cap;
                        ids[cap] = -7;
                        assert_int_equal(tables[t].compact_above(x, n, thresholds[h], ids, cap), c);
                        assert_memory_equal(ids, sorted, sizeof *ids * (size_t)m);
                        assert_int_equal(ids[cap], -7);
                    }
                }
            }
        }
    }
}

static void test_mask(void **state)
{
    static uint32_t m[N / 32 + 1];
    static float y[N + 1];
    for (int li = 0; li < 14; li++) {
        int n = lengths[li];
        fill(n, WILD);
        for (int i = 0; i < n / 32 + 1; i++) m[i] = bits() ^ bits() << 16;
        for (int t = 0; t < n_tables; t++) {
            memcpy(y, x, sizeof x);
            tables[t].mask(y, m, n);
            for (int i = 0; i < n; i++) {
                if (m[i / 32] >> (i % 32) & 1)
                    assert_memory_equal(&y[i], &x[i], 4);
                else
                    assert_true(y[i] == -INFINITY);
            }
            assert_true(y[n] == 1e30f);
        }
    }
}

/* Peaks, and what goes by them, against the kernels that look at everything; with a mask, against a row that has it in
 * it. */
static void test_pieces(void **state)
{
    static uint32_t mask[N / 32 + 1];
    static float y[N + 1], peak[N / LR_PIECE + 2], vals[LR_TOPK_MAX], want[LR_TOPK_MAX];
    for (int c = 0; c < 14 * N_KINDS * 2; c++) {
        int n = lengths[c % 14], kind = c / 14 % N_KINDS;
        const uint32_t *m = c / 14 / N_KINDS ? mask : NULL;
        fill(n, kind);
        for (int i = 0; i < n / 32 + 1; i++) mask[i] = i % 5 ? UINT32_MAX : i % 3 ? bits() ^ bits() << 16 : 0;
        for (int t = 0; t < n_tables; t++) {
            const lr_cpu_kernels *k = &tables[t];
            memcpy(y, x, ((size_t)n + 1) * sizeof *x);
            if (m) tables[0].mask(y, m, n);
            peak[lr_pieces(n)] = 7;
            assert_true(k->peaks(x, m, n, peak) == tables[0].max(x, n));
            assert_true(peak[lr_pieces(n)] == 7);
            for (int p = 0; p < lr_pieces(n); p++) {
                int at = p * LR_PIECE;
                assert_true(peak[p] == tables[0].max(y + at, n - at < LR_PIECE ? n - at : LR_PIECE));
            }
            for (int q = 1; q <= 500; q += 13) {
                int got = k->topk_peaks(x, m, n, peak, q, ids, vals), all;
                all = tables[0].topk(y, n, q, sorted + N / 2, want);
                while (m && all > got && want[all - 1] == -INFINITY)
                    all--; /* those that the mask leaves out, in part */
                while (m && got > all && vals[got - 1] == -INFINITY) got--;
                assert_int_equal(got, all);
                assert_memory_equal(vals, want, (size_t)got * sizeof *vals);
                for (int i = 0; i < got; i++)
                    if (vals[i] > -INFINITY || !m) assert_int_equal(ids[i], sorted[N / 2 + i]);
                if (n > 100000) q += 100;
            }
            for (float h = -3; h < 4; h += 1.5f) {
                int got = k->compact_peaks(x, m, n, peak, h, ids);
                assert_int_equal(got, tables[0].compact_above(y, n, h, sorted + N / 2, N / 2));
                if (got <= N / 2) assert_memory_equal(ids, sorted + N / 2, (size_t)got * sizeof *ids);
            }
        }
    }
}

/* A glance at a row and a mask sees what it sees of the row with the mask in it, as near as it says. */
static void test_masked_glance(void **state)
{
    static uint32_t m[N / 32 + 1];
    static float y[N + 1], peak[N / LR_PIECE + 1], sums[N / LR_PIECE + 1];
    for (int c = 0; c < 14 * N_KINDS * 2; c++) {
        int n = lengths[c % 14], kind = c / 14 % N_KINDS, masked = c / 14 / N_KINDS;
        fill(n, kind);
        for (int i = 0; i < n / 32 + 1; i++) m[i] = !masked || i % 5 ? UINT32_MAX : i % 3 ? bits() ^ bits() << 16 : 0;
        memcpy(y, x, ((size_t)n + 1) * sizeof *x);
        tables[0].mask(y, m, n);
        for (int k = 0; k < n_tables; k++) {
            tables[k].peaks(x, m, n, peak);
            float best = tables[k].max(peak, lr_pieces(n));
            if (isinf(best)) continue;
            tables[k].glance(x, m, n, peak, best, 1, sums, NULL);
            for (int p = 0; p < lr_pieces(n); p++) {
                int at = p * LR_PIECE, len = n - at < LR_PIECE ? n - at : LR_PIECE;
                double exact = (double)tables[0].mass(y + at, len, best) * 0x1p-40;
                if (!(fabs((double)sums[p] - exact) <= LR_GLANCE_1 * exact + len * 0x1p-40))
                    fail_msg("%s: n %d kind %d piece %d: %.12g, exactly %.12g", tables[k].name, n, kind, p, sums[p],
                             exact);
            }
        }
    }
}

/* What a temperature does to a row, and masses at it: the same bits in all tables; a glance is as near as it says. */
static void test_warm(void **state)
{
    static const float ts[] = {LR_GLANCE_T_MIN, 0.3f, 0.8f, 1, 1.7f, LR_GLANCE_T_MAX};
    static float y[N + 1], z[N + 1], peak[N / LR_PIECE + 1], sums[N / LR_PIECE + 1];
    for (int c = 0; c < 14 * N_KINDS * 6; c++) {
        int n = lengths[c % 14], kind = c / 14 % N_KINDS;
        float t = ts[c / 14 / N_KINDS], best;
        fill(n, kind);
        best = tables[0].peaks(x, NULL, n, peak);
        if (isinf(best)) continue;
        memcpy(y, x, ((size_t)n + 1) * sizeof *x);
        tables[0].temper(y, n, best, t);
        uint64_t want = tables[0].mass(y, n, 0);
        for (int k = 0; k < n_tables; k++) {
            memcpy(z, x, ((size_t)n + 1) * sizeof *x);
            tables[k].temper(z, n, best, t);
            for (int i = 0; i <= n; i++) assert_true(z[i] == y[i] || (isnan(z[i]) && isnan(y[i])));
            assert_true(tables[k].mass_warm(x, n, best, t, k ? x : NULL) == want);
            tables[k].glance(x, NULL, n, peak, best, t, sums, k ? x : NULL);
            double about = 0, exact = 0;
            for (int p = 0; p < lr_pieces(n); p++) { /* all sums from the beginning on */
                int at = p * LR_PIECE, len = n - at < LR_PIECE ? n - at : LR_PIECE;
                about += (double)sums[p];
                exact += (double)tables[0].mass(y + at, len, 0) * 0x1p-40;
                if (!(fabs(about - exact) <= LR_GLANCE * (double)want * 0x1p-40))
                    fail_msg("%s: glance n %d kind %d t %g piece %d: %.12g, exactly %.12g of %.12g", tables[k].name, n,
                             kind, (double)t, p, about, exact, (double)want * 0x1p-40);
            }
        }
    }
}

int main(void)
{
    static lr_cpu_kernels all[3] = {{.name = "scalar"}};
    bool has[3] = {true, false, false};
    lr_vocab_fill_scalar(&all[0]);
#if defined(__x86_64__)
    all[1].name = "avx2";
    all[2].name = "avx512";
    lr_vocab_fill_avx2(&all[1]);
    lr_vocab_fill_avx512(&all[2]);
    has[1] = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    has[2] = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
    all[1].name = "neon";
    lr_vocab_fill_neon(&all[1]);
    has[1] = true;
#endif
    for (int i = 0; i < 3; i++) {
        if (has[i]) tables[n_tables++] = all[i];
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_max),           cmocka_unit_test(test_mass),  cmocka_unit_test(test_topk),
        cmocka_unit_test(test_masked_glance), cmocka_unit_test(test_above), cmocka_unit_test(test_mask),
        cmocka_unit_test(test_pieces),        cmocka_unit_test(test_warm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
