/* gemm_avx512.h - what the AVX-512 and the AMX product share: unpacking strips, and where rows are.
 *
 * Everything here is inlined with a constant form, so that the branches on it vanish.
 */
#ifndef LR_KERNELS_CPU_GEMM_AVX512_H
#define LR_KERNELS_CPU_GEMM_AVX512_H
#include "cpu/ahead.h"
#include "cpu/gemm.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

/* Blocks that are unpacked at a time: 512 k; the most, where that is a whole row; rows of the way without. */
enum { CHUNK = 16, WHOLE = 20, FEW = 8 };

/* The scales of a block of a strip, ready for the formulas of gemm.h. */
typedef struct scales512 {
    __m512 s, m;     /* sub 32: S, M; sub 16: d, -dmin */
    __m512 sc0, sc1; /* sub 16: integer scales of the halves, as floats */
    __m512i sm;      /* sub 16 with minima: t_0, t_1 as pairs of 16 bits */
} scales512;

INLINE __m512i select_bits(__m512i into, __m512i from, __m512i mask) /* into | (from & mask) */
{
    return _mm512_ternarylogic_epi32(into, from, mask, 0xF8);
}

INLINE __m512i shift_right(__m512i x, int n)
{
    return n > 0 ? _mm512_srli_epi16(x, (unsigned)n) : n < 0 ? _mm512_slli_epi16(x, (unsigned)-n) : x;
}

/* The 8 registers of a block's values u (with codebook: value + zero). */
INLINE void unpack512(const lr_form f, const uint8_t *q, const uint8_t *h, __m512i w[8])
{
    const __m512i low = _mm512_set1_epi8(f.main == 2 ? 3 : 15);
    if (f.main == 8) {
        for (int g = 0; g < 8; g++) w[g] = _mm512_loadu_si512(q + 64 * g);
        return;
    }
    if (f.main == 4)
        for (int g = 0; g < 4; g++) {
            __m512i r = _mm512_loadu_si512(q + 64 * g);
            w[g] = _mm512_and_si512(r, low);
            w[g + 4] = _mm512_and_si512(shift_right(r, 4), low);
        }
    else
        for (int g = 0; g < 8; g++)
            w[g] = _mm512_and_si512(shift_right(_mm512_loadu_si512(q + 64 * (g / 4)), 2 * (g % 4)), low);
    if (f.extra == 1) {
        const __m512i r = _mm512_loadu_si512(h), bit = _mm512_set1_epi8((char)(1 << f.main));
        for (int g = 0; g < 8; g++) w[g] = select_bits(w[g], shift_right(r, g - f.main), bit);
    }
    if (f.extra == 2)
        for (int g = 0; g < 8; g++)
            w[g] = select_bits(w[g], shift_right(_mm512_loadu_si512(h + 64 * (g / 4)), 2 * (g % 4) - f.main),
                               _mm512_set1_epi8((char)(3 << f.main)));
    if (f.lut) {
        const __m512i lut = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)lr_form_lut[f.lut]));
        for (int g = 0; g < 8; g++) w[g] = _mm512_shuffle_epi8(lut, w[g]);
    }
}

INLINE __m512 halves512(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

INLINE __m512 bytes512(const uint8_t *p) /* signed bytes as floats */
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

INLINE __m512 e8m0_512(const uint8_t *p) /* 2^(e - 128) */
{
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    const __mmask16 tiny = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, tiny, _mm512_set1_epi32(0x200000), e));
}

INLINE __m512 negate512(__m512 x)
{
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000)));
}

/* Scales of block b of a strip. */
INLINE scales512 scales_of(const lr_form f, const lr_strip *s, size_t b)
{
    const size_t sb = f.super ? b / 8 : b;
    const uint8_t *sc = s->sc + b * (size_t)(32 / f.sub) * 16;
    scales512 o = {0};
    const __m512 d = f.e8m0 ? e8m0_512(s->d + sb * 16) : halves512(s->d + sb * 32);
    const __m512 m = f.min ? halves512(s->m + sb * 32) : _mm512_setzero_ps();
    o.s = d;
    o.m = m;
    if (f.sub == 32 && f.super) {
        o.s = _mm512_mul_ps(d, bytes512(sc));
        if (f.min) o.m = negate512(_mm512_mul_ps(m, bytes512(s->sm + b * 16)));
    }
    if (f.sub == 16 && !f.min) {
        o.sc0 = bytes512(sc);
        o.sc1 = bytes512(sc + 16);
    }
    if (f.sub == 16 && f.min) { /* nibbles */
        const __m512i x0 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)sc));
        const __m512i x1 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(sc + 16)));
        const __m512i low = _mm512_set1_epi32(15);
        o.sc0 = _mm512_cvtepi32_ps(_mm512_and_si512(x0, low));
        o.sc1 = _mm512_cvtepi32_ps(_mm512_and_si512(x1, low));
        o.sm = _mm512_or_si512(_mm512_srli_epi32(x0, 4), _mm512_slli_epi32(_mm512_srli_epi32(x1, 4), 16));
        o.m = negate512(m);
    }
    return o;
}

INLINE __mmask16 strip_mask(const lr_gemm_w *w, int s)
{
    const int left = w->n - s * LR_STRIP;
    return left >= LR_STRIP ? 0xFFFF : (__mmask16)((1u << left) - 1);
}

/* ---- a block's sums ---- */

/* Rows r0.. of q: row r is at base + r * k; three bases keep the addresses within base + {0,1,2} * k. Rows of 14 bits
 * are two here, of high and of low parts. */
typedef struct row_bases {
    const int8_t *p[3];
    size_t k;
} row_bases;

INLINE row_bases bases_of(const lr_qact *qa, size_t row)
{
    const size_t k = (size_t)qa->k * (qa->fine ? 2 : 1);
    const int8_t *p = qa->q + row * k * (qa->wide ? 2 : 1);
    return (row_bases){{p, p + 3 * k, p + 6 * k}, k};
}

INLINE __m512i four_bytes(const void *p) /* in each lane */
{
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

INLINE __m512i activations(const row_bases *x, int r, size_t at)
{
    return four_bytes(x->p[r / 3] + (size_t)(r % 3) * x->k + at);
}

/* What blocks of rows have besides q: of row r, block b at p[r / 3] + r % 3 * blocks + b, pairs of sums twice as far.
 */
typedef struct row_blocks {
    const float *scale[3], *xs[3];
    const int16_t *sum16[3];
    size_t blocks;
} row_blocks;

/* Rows row.., from block c on. */
INLINE row_blocks blocks_of(const lr_qact *qa, size_t row, int c)
{
    const size_t n = (size_t)qa->k / 32, at = row * n + (size_t)c;
    row_blocks o = {.blocks = n};
    for (size_t i = 0; i < 3; i++) {
        o.scale[i] = qa->scale + at + 3 * i * n;
        o.xs[i] = qa->xs + at + 3 * i * n;
        o.sum16[i] = qa->sum16 + 2 * (at + 3 * i * n);
    }
    return o;
}

/* What the sums of a tile of rows begin with, -zero * sum: sub 32 of the block in [0], sub 16 of the halves. */
typedef struct starts512 {
    int32_t of[FEW][2][(WHOLE + 15) / 16 * 16];
} starts512;

INLINE void starts_prepare(const lr_form f, const int zero, const int nr, const row_blocks *rb, int nb, starts512 *o)
{
    const __m512i low = f.sub == 32 ? _mm512_set1_epi16((short)-zero) : _mm512_set1_epi32(-zero & 0xFFFF);
    const __m512i high = _mm512_set1_epi32(-zero * 65536);
    for (int b = 0; b < nb; b += 16) {
        const __mmask16 some = nb - b < 16 ? (__mmask16)((1u << (nb - b)) - 1) : 0xFFFF;
        for (int r = 0; r < nr; r++) {
            const int16_t *sums = rb->sum16[r / 3] + 2 * ((size_t)(r % 3) * rb->blocks + (size_t)b);
            const __m512i pair = _mm512_maskz_loadu_epi32(some, sums);
            _mm512_storeu_si512(o->of[r][0] + b, _mm512_madd_epi16(pair, low));
            if (f.sub == 16) _mm512_storeu_si512(o->of[r][1] + b, _mm512_madd_epi16(pair, high));
        }
    }
}

/* Adds a row's block to acc, given its integer sums: i0 of all 32 k (sub 32), or of the halves; xs: sub 32 with minima,
 * sums (the two of 16): sub 16 with minima. */
INLINE __m512 add_sums(const lr_form f, const scales512 *s, const float *scale, const float *xs, const void *sums,
                       __m512i i0, __m512i i1, __m512 acc)
{
    const __m512 sx = _mm512_set1_ps(*scale);
    if (f.sub == 32) {
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i0), _mm512_mul_ps(s->s, sx), acc);
        return f.min ? _mm512_fmadd_ps(s->m, _mm512_set1_ps(*xs), acc) : acc;
    }
    __m512 t = _mm512_mul_ps(_mm512_cvtepi32_ps(i0), s->sc0);
    t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i1), s->sc1, t);
    acc = _mm512_fmadd_ps(t, _mm512_mul_ps(s->s, sx), acc);
    if (!f.min) return acc;
    const __m512i j = _mm512_dpwssd_epi32(_mm512_setzero_si512(), s->sm, four_bytes(sums));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(j), _mm512_mul_ps(s->m, sx), acc);
}

/* The same of block b of row r. */
INLINE __m512 add_block(const lr_form f, const scales512 *s, const row_blocks *rb, int r, int b, __m512i i0, __m512i i1,
                        __m512 acc)
{
    const size_t at = (size_t)(r % 3) * rb->blocks + (size_t)b;
    return add_sums(f, s, rb->scale[r / 3] + at, rb->xs[r / 3] + at, rb->sum16[r / 3] + 2 * at, i0, i1, acc);
}

/* Where a product of few rows reads: one strip, or two of them far from each other, as memory gives more that way. */
typedef struct places512 {
    lr_strip st[2];
    lr_ahead *a; /* (2) or NULL */
    float *y[2];
    __mmask16 mask[2];
} places512;

/* Strips s and t of y = x w^T; a: a cursor for each. */
INLINE places512 places_of(const lr_gemm_w *w, const lr_parts *parts, float *y, int s, int t, lr_ahead *a)
{
    return (places512){{lr_strip_at(parts, w, s), lr_strip_at(parts, w, t)},
                       a,
                       {y + 16 * (size_t)s, y + 16 * (size_t)t},
                       {strip_mask(w, s), strip_mask(w, t)}};
}

/* A type's products of rows from row on: two strips and one row; one strip and as many rows as the index says, 1 to 4
 * and perhaps more (else NULL). */
typedef void few512(const places512 *p, const lr_qact *qa, size_t row, size_t ldy);
typedef struct fews512 {
    few512 *pair, *few[FEW + 1];
} fews512;
/* Strips s0..s1-1, m rows. One row: two strips at a time, from both halves, and one more if their number is odd; more
 * rows, which have no registers for that: one by one. */
void lr_gemm_places_avx512(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1,
                           const fews512 *by);

const char *lr_way_avx512(const lr_gemm_w *w, const lr_qact *qa, int m);
/* Packed weights that are unpacked in registers, for FEW rows at a time. */
void lr_gemm_few_avx512(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1);

/* The same for rows of 14 bits. */
void lr_gemm_few_wide_avx512(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1);

/* ---- many rows (gemm_many_avx512.c) ---- */

/* A chunk of a strip, unpacked: values u, scales. */
typedef struct panel {
    uint8_t w[WHOLE][512];
    scales512 s[WHOLE];
} __attribute__((aligned(64))) panel;

/* The kinds of forms, as far as unpacked weights differ. */
enum { KIND32, KIND32_MIN, KIND16, KIND16_MIN };
INLINE int kind_of(const lr_form f) { return (f.sub == 16 ? KIND16 : KIND32) + (f.min ? 1 : 0); }

/* Adds nb blocks from block c on, of ns (1 or 2) strips, to rows 0..m-1 of y (c = 0: sets them). */
typedef void many512(const panel *p, int ns, int zero, int c, int nb, const lr_qact *qa, int m, float *y, size_t ldy,
                     const __mmask16 *mask);
extern many512 *const lr_gemm_many_avx512[4]; /* by kind */

/* is_signed: stores u - zero. */
INLINE void unpack_panel(const lr_form f, const bool is_signed, const lr_strip *st, size_t b0, int nb, panel *o)
{
    for (int b = 0; b < nb; b++) {
        const size_t at = b0 + (size_t)b;
        __m512i w[8];
        unpack512(f, st->q + at * (size_t)f.main * 64, st->h + at * (size_t)f.extra * 64, w);
        if (is_signed && f.zero)
            for (int g = 0; g < 8; g++) w[g] = _mm512_sub_epi8(w[g], _mm512_set1_epi8((char)f.zero));
        for (int g = 0; g < 8; g++) _mm512_store_si512(o->w[b] + 64 * g, w[g]);
        o->s[b] = scales_of(f, st, at);
    }
}

#endif
