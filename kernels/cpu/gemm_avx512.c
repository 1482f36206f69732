/* gemm_avx512.c - the matrix product with AVX-512 VNNI: few rows, and the choice of the way.
 *
 * One vpdpbusd multiplies 4 k of 16 features with a row's 4 activations, broadcast from memory. Few rows, up to 8 at a
 * time: every block is unpacked in registers and used at once; memory is the bound, so the packed bytes ahead are
 * prefetched. Many rows: CHUNK blocks of two strips are unpacked into a buffer that stays in the L1 cache, and all rows
 * pass over it (gemm_many_avx512.c). A sum starts at -zero * sum q, so a zero point costs nothing.
 */
#include "cpu/gemm_avx512.h"

enum { SIDE = 4 }; /* rows whose products run side by side */

/* ---- few rows ---- */

/* Adds block `at`, number b of rb and st, to the sums of nr rows. */
INLINE void block_rows(const lr_form f, const bool fine, const int nr, const __m512i w[8], const scales512 *s,
                       const row_bases *x, size_t at, const row_blocks *rb, int b, const starts512 *st,
                       const lr_ask *ask, __m512 *acc)
{
#pragma GCC unroll 2
    for (int r0 = 0; r0 < nr; r0 += SIDE) {
        /* chains of products that run side by side: a product's latency is ten times its share of a port */
        __m512i i0[SIDE], i1[SIDE], h0[SIDE], h1[SIDE];
#pragma GCC unroll 4
        for (int i = 0; i < SIDE; i++) {
            if (r0 + i >= nr) continue;
            h0[i] = h1[i] = _mm512_setzero_si512();
            i0[i] = f.zero ? _mm512_set1_epi32(st->of[r0 + i][0][b]) : _mm512_setzero_si512();
            i1[i] = f.zero && f.sub == 16 ? _mm512_set1_epi32(st->of[r0 + i][1][b]) : _mm512_setzero_si512();
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const bool second = f.sub == 16 && g >= 4;
            if (r0 == 0) lr_ask_group(f, fine && nr == 1, ask, g);
#pragma GCC unroll 4
            for (int i = 0; i < SIDE; i++) {
                if (r0 + i >= nr) continue;
                const size_t from = fine ? at * 64 : at * 32;
                __m512i *t = second ? &i1[i] : &i0[i], *high = second ? &h1[i] : &h0[i];
                if (fine) {
                    *high = _mm512_dpbusd_epi32(*high, w[g], activations(x, r0 + i, from + 4 * (size_t)g));
                    *t = _mm512_dpbusd_epi32(*t, w[g], activations(x, r0 + i, from + 32 + 4 * (size_t)g));
                } else {
                    *t = _mm512_dpbusd_epi32(*t, w[g], activations(x, r0 + i, from + 4 * (size_t)g));
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < SIDE; i++) {
            if (r0 + i >= nr) continue;
            if (fine) {
                i0[i] = _mm512_add_epi32(i0[i], _mm512_slli_epi32(h0[i], 3));
                if (f.sub == 16) i1[i] = _mm512_add_epi32(i1[i], _mm512_slli_epi32(h1[i], 3));
            }
            acc[r0 + i] = add_block(f, s, rb, r0 + i, b, i0[i], i1[i], acc[r0 + i]);
        }
    }
}

/* ns strips x nr rows. */
INLINE void few(const lr_form f, const bool fine, const int ns, const int nr, const places512 *p, const lr_qact *qa,
                size_t row, size_t ldy)
{
    const int blocks = qa->k / 32;
    const row_bases x = bases_of(qa, row);
    __m512 acc[2][FEW];
    starts512 st;
#pragma GCC unroll 2
    for (int s = 0; s < ns; s++)
#pragma GCC unroll 8
        for (int r = 0; r < nr; r++) acc[s][r] = _mm512_setzero_ps();
    for (int c = 0; c < blocks; c += CHUNK) {
        const int nb = blocks - c < CHUNK ? blocks - c : CHUNK;
        const row_blocks rb = blocks_of(qa, row, c);
        if (f.zero) starts_prepare(f, f.zero, nr, &rb, nb, &st);
        for (int b = 0; b < nb; b++) {
            const size_t at = (size_t)(c + b);
#pragma GCC unroll 2
            for (int s = 0; s < ns; s++) {
                const lr_strip *strip = &p->st[s];
                const uint8_t *q = strip->q + at * (size_t)f.main * 64, *h = strip->h + at * (size_t)f.extra * 64;
                const lr_ask ask = lr_ahead_slow(f, p->a ? &p->a[s] : NULL, strip);
                __m512i w[8];
                unpack512(f, q, h, w);
                const scales512 sc = scales_of(f, strip, at);
                block_rows(f, fine, nr, w, &sc, &x, at, &rb, b, &st, &ask, acc[s]);
            }
        }
    }
#pragma GCC unroll 2
    for (int s = 0; s < ns; s++)
#pragma GCC unroll 8
        for (int r = 0; r < nr; r++) _mm512_mask_storeu_ps(p->y[s] + (size_t)r * ldy, p->mask[s], acc[s][r]);
}

/* One function a type and number of strips and rows. */
#define FEW_ROWS(type, ns, nr, ...)                                                                                    \
    static __attribute__((noinline)) void few##ns##x##nr##_##type(const places512 *p, const lr_qact *qa, size_t row,   \
                                                                  size_t ldy)                                          \
    {                                                                                                                  \
        if (qa->fine)                                                                                                  \
            few(LR_FORM(__VA_ARGS__), true, ns, nr, p, qa, row, ldy);                                                  \
        else                                                                                                           \
            few(LR_FORM(__VA_ARGS__), false, ns, nr, p, qa, row, ldy);                                                 \
    }
#define X(type, ...)                                                                                                   \
    FEW_ROWS(type, 2, 1, __VA_ARGS__)                                                                                  \
    FEW_ROWS(type, 1, 1, __VA_ARGS__)                                                                                  \
    FEW_ROWS(type, 1, 2, __VA_ARGS__)                                                                                  \
    FEW_ROWS(type, 1, 3, __VA_ARGS__)                                                                                  \
    FEW_ROWS(type, 1, 4, __VA_ARGS__)                                                                                  \
    FEW_ROWS(type, 1, 8, __VA_ARGS__)                                                                                  \
    static __attribute__((noinline)) void unpack_##type(const lr_strip *st, size_t b0, int nb, panel *o)               \
    {                                                                                                                  \
        unpack_panel(LR_FORM(__VA_ARGS__), false, st, b0, nb, o);                                                      \
    }
LR_FORM_LIST(X)
#undef X

static const struct {
    fews512 few;
    void (*unpack)(const lr_strip *st, size_t b0, int nb, panel *o);
} types[LR_DTYPE_MAX] = {
#define X(type, ...)                                                                                                   \
    [LR_##type] = {                                                                                                    \
        {few2x1_##type, {[1] = few1x1_##type, few1x2_##type, few1x3_##type, few1x4_##type, [8] = few1x8_##type}},      \
        unpack_##type},
    LR_FORM_LIST(X)
#undef X
};

/* All rows of one strip. */
static void strip_rows(const fews512 *by, const places512 *p, const lr_qact *qa, int m, size_t ldy)
{
    for (int r = 0, nr; r < m; r += nr) {
        const places512 one = {{p->st[0]}, r ? NULL : p->a, {p->y[0] + (size_t)r * ldy}, {p->mask[0]}};
        const int left = m - r < FEW ? m - r : FEW;
        nr = by->few[left] ? left : SIDE;
        by->few[nr](&one, qa, (size_t)r, ldy);
    }
}

void lr_gemm_places_avx512(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1,
                           const fews512 *by)
{
    const lr_parts parts = lr_form_parts(lr_form_of(w->type), w->k);
    const int half = m == 1 ? lr_ahead_half(s0, s1) : s0;
    const int bytes = m == 1 && (qa->fine || qa->wide) ? LR_AHEAD_NEAR : LR_AHEAD;
    lr_ahead a[2];
    if (m == 1) lr_ahead_begin(&a[0], w, s0, s1, 0, 0, bytes);
    lr_ahead_begin(&a[1], w, s0, s1, m == 1 ? 1 : LR_AHEAD_ALL, 0, bytes);
    for (int s = s0, t = half; t < s1; s++, t++) {
        const bool two = s < half;
        const places512 p = places_of(w, &parts, y, two ? s : t, t, two ? a : a + 1);
        if (two)
            by->pair(&p, qa, 0, ldy);
        else
            strip_rows(by, &p, qa, m, ldy);
    }
}

void lr_gemm_few_avx512(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    lr_gemm_places_avx512(w, qa, m, y, ldy, s0, s1, &types[w->type].few);
}

static void product_many(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_form f = *lr_form_of(w->type);
    const lr_parts parts = lr_form_parts(&f, w->k);
    const int blocks = w->k / 32, chunk = blocks <= WHOLE ? blocks : CHUNK;
    panel p[2];
    for (int s = s0, ns; s < s1; s += ns) {
        ns = s + 1 < s1 ? 2 : 1;
        const lr_strip st[2] = {lr_strip_at(&parts, w, s), lr_strip_at(&parts, w, s + ns - 1)};
        const __mmask16 mask[2] = {strip_mask(w, s), strip_mask(w, s + ns - 1)};
        for (int c = 0; c < blocks; c += chunk) {
            const int nb = blocks - c < chunk ? blocks - c : chunk;
            for (int i = 0; i < ns; i++) types[w->type].unpack(&st[i], (size_t)c, nb, &p[i]);
            lr_gemm_many_avx512[kind_of(f)](p, ns, f.zero, c, nb, qa, m, y + 16 * (size_t)s, ldy, mask);
        }
    }
}

/* Rows that are worth unpacking a strip again for each FEW of them, with no values stored: on AMD's cores, where simple
 * operations have ports beside those of products, many; elsewhere FEW. */
static int few_most(const lr_gemm_w *w)
{
    return !__builtin_cpu_is("amd") ? FEW : lr_form_of(w->type)->sub == 16 ? 4 * FEW : 8 * FEW;
}

static void gemm(const lr_gemm_w *w, const lr_qact *qa, const float *xf, size_t ldx, int m, float *y, size_t ldy,
                 int s0, int s1)
{
    if (!w->packed)
        lr_gemm_plain_avx512(w, xf, ldx, m, y, ldy, s0, s1);
    else if (m <= few_most(w))
        lr_gemm_few_avx512(w, qa, m, y, ldy, s0, s1);
    else
        product_many(w, qa, m, y, ldy, s0, s1);
}

const char *lr_way_avx512(const lr_gemm_w *w, const lr_qact *qa, int m)
{
    (void)qa;
    return !w->packed         ? "float fused multiply-adds"
           : m <= few_most(w) ? "vpdpbusd, unpacked in registers"
                              : "vpdpbusd, unpacked in L1";
}

void lr_gemm_fill_avx512(lr_cpu_kernels *k)
{
    k->gemm = gemm;
    k->way = lr_way_avx512;
    k->quantize = lr_quantize_avx512;
}
