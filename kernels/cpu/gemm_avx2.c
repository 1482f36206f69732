/* gemm_avx2.c - the matrix product with AVX2.
 *
 * A register is 8 features x 4 k, so a strip is worked in two halves, TILE rows at a time. vpmaddubsw multiplies
 * unsigned weights with signed activations and adds neighbours in 16 bits, where they must not saturate: up to 6 bits
 * u * 127 * 2 fits; as many products as fit are added in 16 bits before they are widened (8 for 4 bits, 4 for 5 bits, 2
 * for 6 bits), and a sum begins at -zero * sum q 8 bits         |w| <= 128 with the sign moved to the activation: 128 *
 * 127 * 2 fits, one product at a time All integers are exact, so the bits are those of every table (gemm.h has the
 * formulas).
 */
#include "cpu/gemm.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum { TILE = 4, CHUNK = 8, AHEAD = 8192 }; /* rows, blocks that are prepared at a time, bytes to prefetch ahead */

/* Scales of a block for 8 features, ready for the formulas. */
typedef struct scales256 {
    __m256 s, m;
    __m256 sc0, sc1;
    __m256i sm;
} scales256;

/* What a tile needs of CHUNK blocks besides q. */
typedef struct rows256 {
    float sx[TILE][CHUNK];
    float xs[TILE][CHUNK];
    int32_t pair[TILE][CHUNK];
    int32_t init[TILE][2][CHUNK];
} rows256;

INLINE bool is_wide(const lr_form f) { return f.main == 8 || f.lut; }

/* Products that may be added in 16 bits. */
INLINE int sums_of_16(const lr_form f)
{
    return is_wide(f) ? 1 : f.main == 4 && f.extra == 2 ? 2 : f.main == 4 && f.extra == 1 ? 4 : 8;
}

INLINE __m256i load256(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }

INLINE __m256i shift_right(__m256i x, int n)
{
    return n > 0 ? _mm256_srli_epi16(x, n) : n < 0 ? _mm256_slli_epi16(x, -n) : x;
}

/* Group g of a block for one half of the features: values u, or for wide forms signed weights. q, h: of the block, with
 * the half's offset. */
INLINE __m256i values(const lr_form f, const uint8_t *q, const uint8_t *h, int g)
{
    if (f.main == 8) return _mm256_xor_si256(load256(q + 64 * g), _mm256_set1_epi8((char)0x80));
    __m256i w;
    if (f.main == 4)
        w = _mm256_and_si256(shift_right(load256(q + 64 * (g % 4)), g / 4 * 4), _mm256_set1_epi8(15));
    else
        w = _mm256_and_si256(shift_right(load256(q + 64 * (g / 4)), 2 * (g % 4)), _mm256_set1_epi8(3));
    if (f.extra == 1)
        w = _mm256_or_si256(
            w, _mm256_and_si256(shift_right(load256(h), g - f.main), _mm256_set1_epi8((char)(1 << f.main))));
    if (f.extra == 2)
        w = _mm256_or_si256(w, _mm256_and_si256(shift_right(load256(h + 64 * (g / 4)), 2 * (g % 4) - f.main),
                                                _mm256_set1_epi8((char)(3 << f.main))));
    if (f.lut) {
        const __m128i t = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(const void *)lr_form_lut[f.lut]),
                                        _mm_set1_epi8((char)0x80));
        w = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), w);
    }
    return w;
}

INLINE __m256 halves256(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)); }

INLINE __m128i load64(const uint8_t *p) { return _mm_loadl_epi64((const __m128i *)(const void *)p); }

INLINE __m256 bytes256(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(p))); }

INLINE __m256 e8m0_256(const uint8_t *p) /* 2^(e - 128) */
{
    const __m256i e = _mm256_cvtepu8_epi32(load64(p));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

INLINE __m256 negate256(__m256 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

/* Scales of block b, features 8 * half .. + 7. */
INLINE scales256 scales_of(const lr_form f, const lr_strip *s, size_t b, int half)
{
    const size_t sb = f.super ? b / 8 : b, at = 8 * (size_t)half;
    const uint8_t *sc = s->sc + b * (size_t)(32 / f.sub) * 16 + at;
    scales256 o = {0};
    o.s = f.e8m0 ? e8m0_256(s->d + sb * 16 + at) : halves256(s->d + sb * 32 + 2 * at);
    o.m = f.min ? halves256(s->m + sb * 32 + 2 * at) : _mm256_setzero_ps();
    if (f.sub == 32 && f.super) {
        o.s = _mm256_mul_ps(o.s, bytes256(sc));
        if (f.min) o.m = negate256(_mm256_mul_ps(o.m, bytes256(s->sm + b * 16 + at)));
    }
    if (f.sub == 16 && !f.min) {
        o.sc0 = bytes256(sc);
        o.sc1 = bytes256(sc + 16);
    }
    if (f.sub == 16 && f.min) {
        const __m256i x0 = _mm256_cvtepu8_epi32(load64(sc)), x1 = _mm256_cvtepu8_epi32(load64(sc + 16));
        const __m256i low = _mm256_set1_epi32(15);
        o.sc0 = _mm256_cvtepi32_ps(_mm256_and_si256(x0, low));
        o.sc1 = _mm256_cvtepi32_ps(_mm256_and_si256(x1, low));
        o.sm = _mm256_or_si256(_mm256_srli_epi32(x0, 4), _mm256_slli_epi32(_mm256_srli_epi32(x1, 4), 16));
        o.m = negate256(o.m);
    }
    return o;
}

/* nb may be less than CHUNK at the end of a row: those blocks are taken one by one. */
INLINE void rows_prepare(const lr_form f, const int nr, const lr_qact *qa, size_t row, size_t b, int nb, rows256 *o)
{
    const size_t blocks = (size_t)qa->k / 32;
    const int zero = is_wide(f) ? 0 : f.zero;
    for (int r = 0; r < nr; r++) {
        const size_t at = (row + (size_t)r) * blocks + b;
        for (int i = 0; i < nb; i++) {
            const int a = qa->sum16[2 * (at + (size_t)i)], c = qa->sum16[2 * (at + (size_t)i) + 1];
            o->sx[r][i] = qa->scale[at + (size_t)i];
            o->xs[r][i] = qa->xs[at + (size_t)i];
            o->pair[r][i] = (int32_t)((uint32_t)(uint16_t)a | (uint32_t)(uint16_t)c << 16);
            o->init[r][0][i] = -zero * (f.sub == 32 ? a + c : a);
            o->init[r][1][i] = -zero * c;
        }
    }
}

INLINE __m256i activations(const int8_t *q)
{
    int32_t v;
    __builtin_memcpy(&v, q, 4);
    return _mm256_set1_epi32(v);
}

/* Integer sums of a block for nr rows: i0 of all 32 k (sub 32), else of the halves in i0 and i1. */
INLINE void block_sums(const lr_form f, const int nr, const uint8_t *q, const uint8_t *h, const int8_t *x, size_t k,
                       __m256i *i0, __m256i *i1)
{
    const __m256i ones = _mm256_set1_epi16(1);
    const int most = sums_of_16(f);
    __m256i s[TILE];
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        const __m256i w = values(f, q, h, g), a = is_wide(f) ? _mm256_abs_epi8(w) : w;
        const bool first = g % most == 0 || (f.sub == 16 && g == 4);
        const bool last = g % most == most - 1 || g == 7 || (f.sub == 16 && g == 3);
#pragma GCC unroll 4
        for (int r = 0; r < nr; r++) {
            __m256i v = activations(x + (size_t)r * k + 4 * g);
            if (is_wide(f)) v = _mm256_sign_epi8(v, w);
            const __m256i p = _mm256_maddubs_epi16(a, v);
            s[r] = first ? p : _mm256_add_epi16(s[r], p);
            if (!last) continue;
            __m256i *i = f.sub == 16 && g >= 4 ? &i1[r] : &i0[r];
            *i = _mm256_add_epi32(*i, _mm256_madd_epi16(s[r], ones));
        }
    }
}

INLINE __m256 add_block(const lr_form f, const scales256 *s, const rows256 *ri, int r, int b, __m256i i0, __m256i i1,
                        __m256 acc)
{
    const __m256 sx = _mm256_set1_ps(ri->sx[r][b]);
    if (f.sub == 32) {
        acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i0), _mm256_mul_ps(s->s, sx), acc);
        return f.min ? _mm256_fmadd_ps(s->m, _mm256_set1_ps(ri->xs[r][b]), acc) : acc;
    }
    __m256 t = _mm256_mul_ps(_mm256_cvtepi32_ps(i0), s->sc0);
    t = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i1), s->sc1, t);
    acc = _mm256_fmadd_ps(t, _mm256_mul_ps(s->s, sx), acc);
    if (!f.min) return acc;
    const __m256i j = _mm256_madd_epi16(s->sm, _mm256_set1_epi32(ri->pair[r][b]));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(j), _mm256_mul_ps(s->m, sx), acc);
}

/* nr rows of one half of a strip; n: features to store. */
INLINE void tile(const lr_form f, const int nr, const lr_strip *st, int half, const lr_qact *qa, size_t row, float *y,
                 size_t ldy, int n)
{
    const int blocks = qa->k / 32;
    const size_t k = (size_t)qa->k;
    const int8_t *x = qa->q + row * k;
    __m256 acc[TILE];
    rows256 ri;
#pragma GCC unroll 4
    for (int r = 0; r < nr; r++) acc[r] = _mm256_setzero_ps();
    for (int c = 0; c < blocks; c += CHUNK) {
        const int nb = blocks - c < CHUNK ? blocks - c : CHUNK;
        rows_prepare(f, nr, qa, row, (size_t)c, nb, &ri);
        for (int b = 0; b < nb; b++) {
            const size_t at = (size_t)(c + b);
            const uint8_t *q = st->q + at * (size_t)f.main * 64 + 32 * half;
            const uint8_t *h = st->h + at * (size_t)f.extra * 64 + 32 * half;
            if (half == 0)
                for (int i = 0; i < f.main; i++) _mm_prefetch((const char *)q + AHEAD + 64 * i, _MM_HINT_T1);
            __m256i i0[TILE], i1[TILE];
#pragma GCC unroll 4
            for (int r = 0; r < nr; r++) {
                i0[r] = _mm256_set1_epi32(ri.init[r][0][b]);
                i1[r] = _mm256_set1_epi32(ri.init[r][1][b]);
            }
            block_sums(f, nr, q, h, x + at * 32, k, i0, i1);
            const scales256 s = scales_of(f, st, at, half);
#pragma GCC unroll 4
            for (int r = 0; r < nr; r++) acc[r] = add_block(f, &s, &ri, r, b, i0[r], i1[r], acc[r]);
        }
    }
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
#pragma GCC unroll 4
    for (int r = 0; r < nr; r++) _mm256_maskstore_ps(y + (size_t)r * ldy, mask, acc[r]);
}

/* One function a type and number of rows. */
typedef void tile256(const lr_strip *st, int half, const lr_qact *qa, size_t row, float *y, size_t ldy, int n);
#define TILE_ROWS(type, nr, ...)                                                                                       \
    static __attribute__((noinline)) void tile##nr##_##type(const lr_strip *st, int half, const lr_qact *qa,           \
                                                            size_t row, float *y, size_t ldy, int n)                   \
    {                                                                                                                  \
        tile(LR_FORM(__VA_ARGS__), nr, st, half, qa, row, y, ldy, n);                                                  \
    }
#define X(type, ...)                                                                                                   \
    TILE_ROWS(type, 1, __VA_ARGS__)                                                                                    \
    TILE_ROWS(type, 2, __VA_ARGS__)                                                                                    \
    TILE_ROWS(type, 4, __VA_ARGS__)
LR_FORM_LIST(X)
#undef X

static tile256 *const tiles[LR_DTYPE_MAX][TILE + 1] = {
#define X(type, ...) [LR_##type] = {[1] = tile1_##type, [2] = tile2_##type, [4] = tile4_##type},
    LR_FORM_LIST(X)
#undef X
};

static void gemm_packed(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_parts parts = lr_form_parts(lr_form_of(w->type), w->k);
    for (int s = s0; s < s1; s++) {
        const lr_strip st = lr_strip_at(&parts, w, s);
        for (int r = 0, nr; r < m; r += nr) {
            nr = m - r >= 4 ? 4 : m - r >= 2 ? 2 : 1;
            for (int half = 0; half < 2; half++) {
                const int j = s * LR_STRIP + 8 * half, n = w->n - j;
                if (n > 0) tiles[w->type][nr](&st, half, qa, (size_t)r, y + (size_t)r * ldy + j, ldy, n < 8 ? n : 8);
            }
        }
    }
}

static void gemm(const lr_gemm_w *w, const lr_qact *qa, const float *xf, size_t ldx, int m, float *y, size_t ldy,
                 int s0, int s1)
{
    if (w->packed)
        gemm_packed(w, qa, m, y, ldy, s0, s1);
    else
        lr_gemm_plain_avx2(w, xf, ldx, m, y, ldy, s0, s1);
}

static const char *way(const lr_gemm_w *w, const lr_qact *qa, int m)
{
    (void)qa;
    return !w->packed ? "float fused multiply-adds" : m > 1 ? "maddubs, up to 4 rows in registers" : "maddubs";
}

void lr_gemm_fill_avx2(lr_cpu_kernels *k)
{
    k->gemm = gemm;
    k->way = way;
    k->quantize = lr_quantize_avx2;
}
