/* gemm_wide_avx512.c - few rows of 14 bits times weights of super-blocks, with AVX-512 VNNI.
 *
 * As in gemm_avx512.c every block is unpacked in registers and used at once. A sub-block's sums of high and low parts
 * are multiplied with its integer scale and added up over the super-block. Sums of low parts that fit into 16 bits take
 * one vpdpwssd for that.
 */
#include "cpu/gemm_wide_avx512.h"

enum { SIDE = 4 }; /* rows whose products run side by side: a block is unpacked for each so many */

/* Whether the sums of low parts of a sub-block fit into 16 bits. */
INLINE bool low_is_short(const lr_form f)
{
    const int most = f.lut ? 128 : f.zero ? f.zero : (1 << (f.main + f.extra)) - 1;
    return most * 32 * f.sub < 1 << 15;
}

/* Integer sub-scales of a block: lanes of 32 bits, and pairs of 16 (sub 32: the scale and 0). */
typedef struct sub_scales {
    __m512i sc0, sc1, pair;
} sub_scales;

INLINE sub_scales sub_scales_of(const lr_form f, const lr_strip *s, size_t at)
{
    const __m128i *p = (const __m128i *)(s->sc + at * (size_t)(32 / f.sub) * 16);
    sub_scales o;
    o.sc0 = _mm512_cvtepi8_epi32(_mm_loadu_si128(p));
    o.pair = o.sc1 = o.sc0; /* never negative where the pair is used */
    if (f.sub == 32) return o;
    o.sc1 = _mm512_cvtepi8_epi32(_mm_loadu_si128(p + 1));
    if (f.min) {
        o.sc0 = _mm512_and_si512(o.sc0, _mm512_set1_epi32(15));
        o.sc1 = _mm512_and_si512(o.sc1, _mm512_set1_epi32(15));
    }
    o.pair = _mm512_mask_blend_epi16(0xAAAAAAAA, o.sc0, _mm512_slli_epi32(o.sc1, 16));
    return o;
}

/* What the sums of a row's super-block begin with: -zero times the sums of high and low parts, of blocks (sub 32), or
 * of high parts of the halves, then low parts. */
typedef struct begin {
    int32_t v[32];
} begin;

INLINE void begin_set(const lr_form f, const lr_qact *qa, size_t row, size_t sb, begin *o)
{
    const __m512i sums = wide_sums(qa, row, sb), zero = _mm512_set1_epi32(-f.zero);
    if (f.sub == 32) {
        _mm512_storeu_si512(o->v, _mm512_madd_epi16(sums, _mm512_set1_epi16((short)-f.zero)));
        return;
    }
    const __m512i first = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(sums));
    const __m512i second = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(sums, 1));
    _mm512_storeu_si512(o->v, _mm512_mullo_epi32(zero, first));
    _mm512_storeu_si512(o->v + 16, _mm512_mullo_epi32(zero, second));
}

/* Block i of the super-block, nr rows: adds to H and L. */
INLINE void add_block_wide(const lr_form f, const int nr, const __m512i w[8], const sub_scales *sc, const row_bases *x,
                           size_t at, int i, const begin *begins, const lr_ask *ask, __m512i *hs, __m512i *ls)
{
    __m512i h[SIDE][2], l[SIDE][2];
#pragma GCC unroll 4
    for (int r = 0; r < nr; r++) {
        const int32_t *v = begins[r].v + (f.sub == 32 ? 2 : 4) * i;
        h[r][0] = f.zero ? _mm512_set1_epi32(v[0]) : _mm512_setzero_si512();
        h[r][1] = f.zero && f.sub == 16 ? _mm512_set1_epi32(v[1]) : _mm512_setzero_si512();
        l[r][0] = f.zero ? _mm512_set1_epi32(v[f.sub == 32 ? 1 : 2]) : _mm512_setzero_si512();
        l[r][1] = f.zero && f.sub == 16 ? _mm512_set1_epi32(v[3]) : _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        const int half = f.sub == 16 && g >= 4;
        lr_ask_group(f, nr == 1, ask, g);
#pragma GCC unroll 4
        for (int r = 0; r < nr; r++) {
            h[r][half] = _mm512_dpbusd_epi32(h[r][half], w[g], activations(x, 2 * r, at * 32 + 4 * (size_t)g));
            l[r][half] = _mm512_dpbusd_epi32(l[r][half], w[g], activations(x, 2 * r + 1, at * 32 + 4 * (size_t)g));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < nr; r++) {
        __m512i *ho = &hs[r], *lo = &ls[r];
        *ho = _mm512_add_epi32(*ho, _mm512_mullo_epi32(h[r][0], sc->sc0));
        if (f.sub == 16) *ho = _mm512_add_epi32(*ho, _mm512_mullo_epi32(h[r][1], sc->sc1));
        if (low_is_short(f)) {
            if (f.sub == 16) l[r][0] = _mm512_mask_blend_epi16(0xAAAAAAAA, l[r][0], _mm512_slli_epi32(l[r][1], 16));
            *lo = _mm512_dpwssd_epi32(*lo, l[r][0], sc->pair);
            continue;
        }
        *lo = _mm512_add_epi32(*lo, _mm512_mullo_epi32(l[r][0], sc->sc0));
        if (f.sub == 16) *lo = _mm512_add_epi32(*lo, _mm512_mullo_epi32(l[r][1], sc->sc1));
    }
}

/* ns strips x nr rows. */
INLINE void few_wide(const lr_form f, const int ns, const int nr, const places512 *p, const lr_qact *qa, size_t row,
                     size_t ldy)
{
    const size_t supers = (size_t)qa->k / LR_WIDE;
    const row_bases x = bases_of(qa, row);
    __m512 acc[2][SIDE];
#pragma GCC unroll 2
    for (int s = 0; s < ns; s++)
#pragma GCC unroll 4
        for (int r = 0; r < nr; r++) acc[s][r] = _mm512_setzero_ps();
    for (size_t sb = 0; sb < supers; sb++) {
        begin begins[SIDE];
        wide_row rows[SIDE];
        __m512i h[2][SIDE], l[2][SIDE];
#pragma GCC unroll 4
        for (int r = 0; r < nr; r++) {
            if (f.zero) begin_set(f, qa, row + (size_t)r, sb, &begins[r]);
            wide_row_set(f, qa, row + (size_t)r, sb, &rows[r]);
            h[0][r] = h[1][r] = l[0][r] = l[1][r] = _mm512_setzero_si512();
        }
        for (int i = 0; i < 8; i++) {
            const size_t at = 8 * sb + (size_t)i;
#pragma GCC unroll 2
            for (int s = 0; s < ns; s++) {
                const lr_strip *st = &p->st[s];
                const lr_ask ask = lr_ahead_slow(f, p->a ? &p->a[s] : NULL, st);
                __m512i w[8];
                unpack512(f, st->q + at * (size_t)f.main * 64, st->h + at * (size_t)f.extra * 64, w);
                const sub_scales sc = sub_scales_of(f, st, at);
                add_block_wide(f, nr, w, &sc, &x, at, i, begins, &ask, h[s], l[s]);
            }
        }
#pragma GCC unroll 2
        for (int s = 0; s < ns; s++) {
            const wide_scales ws = wide_scales_of(f, &p->st[s], sb);
#pragma GCC unroll 4
            for (int r = 0; r < nr; r++) {
                const __m512i t = f.min ? wide_minima(f, &ws, &rows[r]) : _mm512_setzero_si512();
                acc[s][r] = add_super(f, &ws, &rows[r], h[s][r], l[s][r], t, acc[s][r]);
            }
        }
    }
#pragma GCC unroll 2
    for (int s = 0; s < ns; s++)
#pragma GCC unroll 4
        for (int r = 0; r < nr; r++) _mm512_mask_storeu_ps(p->y[s] + (size_t)r * ldy, p->mask[s], acc[s][r]);
}

#define FEW_ROWS(type, ns, nr, ...)                                                                                    \
    static __attribute__((noinline)) void few##ns##x##nr##_##type(const places512 *p, const lr_qact *qa, size_t row,   \
                                                                  size_t ldy)                                          \
    {                                                                                                                  \
        few_wide(LR_FORM(__VA_ARGS__), ns, nr, p, qa, row, ldy);                                                       \
    }
#define X(type, ...)                                                                                                   \
    FEW_ROWS(type, 2, 1, __VA_ARGS__)                                                                                  \
    FEW_ROWS(type, 1, 1, __VA_ARGS__)                                                                                  \
    FEW_ROWS(type, 1, 2, __VA_ARGS__)                                                                                  \
    FEW_ROWS(type, 1, 3, __VA_ARGS__)                                                                                  \
    FEW_ROWS(type, 1, 4, __VA_ARGS__)
LR_SUPER_LIST(X)
#undef X

static const fews512 types[LR_DTYPE_MAX] = {
#define X(type, ...) [LR_##type] = {few2x1_##type, {[1] = few1x1_##type, few1x2_##type, few1x3_##type, few1x4_##type}},
    LR_SUPER_LIST(X)
#undef X
};

void lr_gemm_few_wide_avx512(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    lr_gemm_places_avx512(w, qa, m, y, ldy, s0, s1, &types[w->type]);
}
