/* gemm_bf16_amx.c - the matrix product of bfloat16 rows with AMX tiles, for any number of rows.
 *
 * A tile product is 16 rows x 16 features x 32 k with float sums that stay in the tile, so there is nothing to do
 * between blocks and 2 x 2 tiles run at the tile unit's speed (measured 18 cycles a product; the int8 tiles, whose
 * integers must be scaled a block of 32 k at a time, take 42). The price is that weights are unpacked to bfloat16:
 * about 60 cycles a block of 512 weights, which up to 32 rows hides behind memory, and which many rows share.
 *
 * A weight w = s u + c is made as a float with one fused multiply-add: the bits of u, put into the mantissa of 1.0
 * where they happen to lie, give 1 + u 2^(p - 23), p their position, so s and c are taken times powers of two. The
 * upper half of the float is the bfloat16. That cuts instead of rounding, so scales are first taken times UP, which
 * makes the mean error zero; what is left is 2^-8.3 of a weight (root mean square 0.0017 of it).
 *
 * The order of a sum is the tile unit's: for each 32 k, even and odd k apart, fused, from zero; then added to the
 * total. It does not depend on the tile's number of rows, so a row's bits are the same in any company.
 */
#include "cpu/gemm_avx512.h"
#include "cpu/gemm_amx.h"

#define UP 1.0027f /* 1 + 2^-8 ln 2: what truncation takes off on the average */

/* ---- weights to bfloat16 ---- */

/* w = f * s[p] + c[p] for a mantissa part at position 8, 12 or 16. */
typedef struct lifted {
    __m512 s8, c8, s12, c12, s16, c16;
} lifted;

INLINE lifted lift_scales(__m512 s, __m512 c)
{
    lifted o;
    o.s8 = _mm512_mul_ps(s, _mm512_set1_ps(UP * 0x1p15f));
    o.s12 = _mm512_mul_ps(s, _mm512_set1_ps(UP * 0x1p11f));
    o.s16 = _mm512_mul_ps(s, _mm512_set1_ps(UP * 0x1p7f));
    o.c8 = _mm512_fmsub_ps(c, _mm512_set1_ps(UP), o.s8);
    o.c12 = _mm512_fmsub_ps(c, _mm512_set1_ps(UP), o.s12);
    o.c16 = _mm512_fmsub_ps(c, _mm512_set1_ps(UP), o.s16);
    return o;
}

/* The bits of x under a mask, in the mantissa of 1.0. */
INLINE __m512 lift(__m512i x, uint32_t mask)
{
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(x, _mm512_set1_epi32((int)mask), _mm512_set1_epi32(0x3F800000),
                                                         0xEA)); /* (x & mask) | 1.0 */
}

/* bfloat16 pairs: a in the low half of each lane, b in the high one. */
INLINE __m512i pair(__m512 a, __m512 b)
{
    return _mm512_ternarylogic_epi32(_mm512_castps_si512(b), _mm512_set1_epi32((int)0xFFFF0000),
                                     _mm512_srli_epi32(_mm512_castps_si512(a), 16), 0xEA);
}

/* 4 bits in one plane: no byte is ever made, 8 nibbles of a lane come from 2 shifts. */
INLINE void unpack_nibbles(const uint8_t *q, const lifted *l, const lifted *r, uint8_t *out)
{
#define LOW(x, p)  _mm512_fmadd_ps(lift(x, 15u << (p)), l->s##p, l->c##p)
#define HIGH(x, p) _mm512_fmadd_ps(lift(x, 15u << (p)), r->s##p, r->c##p)
    for (int g = 0; g < 4; g++) {
        const __m512i x = _mm512_loadu_si512(q + 64 * g);
        const __m512i up = _mm512_slli_epi32(x, 8), down = _mm512_srli_epi32(x, 12);
        _mm512_store_si512(out + 128 * g, pair(LOW(up, 8), LOW(x, 8)));
        _mm512_store_si512(out + 128 * g + 64, pair(LOW(x, 16), LOW(down, 12)));
        _mm512_store_si512(out + 128 * g + 512, pair(HIGH(up, 12), HIGH(x, 12)));
        _mm512_store_si512(out + 128 * g + 576, pair(HIGH(down, 8), HIGH(down, 16)));
    }
#undef LOW
#undef HIGH
}

/* Any form, from bytes; wide: values of 8 bits, else of up to 7. */
INLINE void unpack_bytes(const bool wide, const __m512i w[8], const lifted *l, const lifted *r, uint8_t *out)
{
    for (int g = 0; g < 8; g++) {
        const lifted *o = g < 4 ? l : r;
        const __m512 k0 = _mm512_fmadd_ps(lift(_mm512_slli_epi32(w[g], 8), 0xFF00), o->s8, o->c8);
        const __m512 k1 = _mm512_fmadd_ps(lift(w[g], 0xFF00), o->s8, o->c8);
        __m512 k2, k3;
        if (wide) {
            k2 = _mm512_fmadd_ps(lift(_mm512_srli_epi32(w[g], 8), 0xFF00), o->s8, o->c8);
            k3 = _mm512_fmadd_ps(lift(_mm512_srli_epi32(w[g], 16), 0xFF00), o->s8, o->c8);
        } else {
            k2 = _mm512_fmadd_ps(lift(w[g], 0x7F0000), o->s16, o->c16);
            k3 = _mm512_fmadd_ps(lift(_mm512_srli_epi32(w[g], 8), 0x7F0000), o->s16, o->c16);
        }
        _mm512_store_si512(out + 128 * g, pair(k0, k1));
        _mm512_store_si512(out + 128 * g + 64, pair(k2, k3));
    }
}

/* Block b of a strip as a B tile: row i holds k = 2i and 2i + 1 of 16 features. */
INLINE void unpack_block(const lr_form f, const lr_strip *st, size_t b, uint8_t out[1024])
{
    const uint8_t *q = st->q + b * (size_t)f.main * 64, *h = st->h + b * (size_t)f.extra * 64;
    const scales512 s = scales_of(f, st, b);
    const __m512 zero = _mm512_set1_ps((float)-f.zero);
    lifted l, r;
    if (f.sub == 32) {
        l = r = lift_scales(s.s, f.min ? s.m : _mm512_mul_ps(zero, s.s));
    } else {
        const __m512 s0 = _mm512_mul_ps(s.s, s.sc0), s1 = _mm512_mul_ps(s.s, s.sc1);
        __m512 c0 = _mm512_mul_ps(zero, s0), c1 = _mm512_mul_ps(zero, s1);
        if (f.min) {
            const __m512i low = _mm512_set1_epi32(0xFFFF);
            c0 = _mm512_mul_ps(s.m, _mm512_cvtepi32_ps(_mm512_and_si512(s.sm, low)));
            c1 = _mm512_mul_ps(s.m, _mm512_cvtepi32_ps(_mm512_srli_epi32(s.sm, 16)));
        }
        l = lift_scales(s0, c0);
        r = lift_scales(s1, c1);
    }
    if (f.main == 4 && !f.extra && !f.lut) {
        unpack_nibbles(q, &l, &r, out);
        return;
    }
    __m512i w[8];
    unpack512(f, q, h, w);
    unpack_bytes(f.main == 8 || f.lut, w, &l, &r, out);
}

/* ---- up to 32 rows: unpack and multiply in one pass over all k ---- */

enum { AHEAD = 32768, LAG = 2, RING = 4 };

/* Sums to y; a strip that ends inside is stored by way of memory. */
#define STORE_SUMS(t, y, rows)                                                                                         \
    do {                                                                                                               \
        if (mask == 0xFFFF) {                                                                                          \
            _tile_stored(t, y, ldy * 4);                                                                               \
        } else {                                                                                                       \
            float tmp[16][16] __attribute__((aligned(64)));                                                            \
            _tile_stored(t, tmp, 64);                                                                                  \
            for (int i_ = 0; i_ < (rows); i_++)                                                                        \
                _mm512_mask_storeu_ps((y) + (size_t)i_ * ldy, mask, _mm512_load_ps(tmp[i_]));                          \
        }                                                                                                              \
    } while (0)

INLINE void few(const lr_form f, const lr_strip *st, const lr_qact *qa, int m, float *y, size_t ldy, __mmask16 mask)
{
    const int blocks = qa->k / 32;
    const size_t stride = (size_t)qa->k * 2;
    const uint8_t *x0 = (const uint8_t *)qa->h, *x1 = x0 + 16 * stride;
    uint8_t ring[RING][1024] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(2);
    for (int b = 0; b < blocks + LAG; b++) {
        if (b >= LAG) {
            const size_t at = (size_t)(b - LAG) * 64;
            LR_TILE_LOAD(6, ring[(b - LAG) % RING], 64);
            LR_TILE_LOAD(4, x0 + at, stride);
            _tile_dpbf16ps(0, 4, 6);
            if (m > 16) {
                LR_TILE_LOAD(5, x1 + at, stride);
                _tile_dpbf16ps(2, 5, 6);
            }
        }
        if (b < blocks) {
            const uint8_t *q = st->q + (size_t)(b * f.main) * 64, *h = st->h + (size_t)(b * f.extra) * 64;
            for (int i = 0; i < f.main; i++) _mm_prefetch(q + AHEAD + 64 * i, _MM_HINT_T1);
            for (int i = 0; i < f.extra; i++) _mm_prefetch(h + AHEAD + 64 * i, _MM_HINT_T1);
            unpack_block(f, st, (size_t)b, ring[b % RING]);
        }
    }
    STORE_SUMS(0, y, m < 16 ? m : 16);
    if (m > 16) STORE_SUMS(2, y + 16 * ldy, m - 16);
}

/* ---- more rows: chunks of PANELS strips, unpacked, and groups of 32 rows over them ---- */

enum { PANELS = 16 }; /* strips that are unpacked at a time */

typedef struct bf16_panel {
    uint8_t w[CHUNK][1024];
} __attribute__((aligned(64))) bf16_panel;

#define LOAD_SUMS(t, y, rows)                                                                                          \
    do {                                                                                                               \
        if (!c) {                                                                                                      \
            _tile_zero(t);                                                                                             \
        } else if (mask == 0xFFFF) {                                                                                   \
            LR_TILE_LOAD(t, y, ldy * 4);                                                                               \
        } else {                                                                                                       \
            float tmp[16][16] __attribute__((aligned(64)));                                                            \
            for (int i_ = 0; i_ < (rows); i_++)                                                                        \
                _mm512_store_ps(tmp[i_], _mm512_maskz_loadu_ps(mask, (y) + (size_t)i_ * ldy));                         \
            LR_TILE_LOAD(t, tmp, 64);                                                                                  \
        }                                                                                                              \
    } while (0)

/* One group of rows (r0 in the first row tile, r1 in the second) over a chunk of ns strips. mask: of the last strip. */
INLINE void group(const int ns, const bool two, const bf16_panel *p, int c, int nb, const uint8_t *x, size_t stride,
                  int r0, int r1, float *y, size_t ldy, __mmask16 last)
{
    const uint8_t *x1 = x + 16 * stride;
    float *y1 = y + 16 * ldy;
    __mmask16 mask = ns == 2 ? 0xFFFF : last;
    LOAD_SUMS(0, y, r0);
    if (two) LOAD_SUMS(2, y1, r1);
    mask = last;
    if (ns == 2) LOAD_SUMS(1, y + 16, r0);
    if (ns == 2 && two) LOAD_SUMS(3, y1 + 16, r1);
    for (int b = 0; b < nb; b++) {
        LR_TILE_LOAD(4, x + 64 * b, stride);
        LR_TILE_LOAD(6, p[0].w[b], 64);
        _tile_dpbf16ps(0, 4, 6);
        if (ns == 2) {
            LR_TILE_LOAD(7, p[1].w[b], 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (!two) continue;
        LR_TILE_LOAD(5, x1 + 64 * b, stride);
        _tile_dpbf16ps(2, 5, 6);
        if (ns == 2) _tile_dpbf16ps(3, 5, 7);
    }
    mask = ns == 2 ? 0xFFFF : last;
    STORE_SUMS(0, y, r0);
    if (two) STORE_SUMS(2, y1, r1);
    mask = last;
    if (ns == 2) STORE_SUMS(1, y + 16, r0);
    if (ns == 2 && two) STORE_SUMS(3, y1 + 16, r1);
}

/* Tiles for groups of r0 + r1 rows: 0..3 sums, 4 and 5 rows, 6 and 7 weights. */
static void configure(int r0, int r1)
{
    lr_tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.rows[i] = (uint8_t)(i >= 6 ? 16 : i == 2 || i == 3 || i == 5 ? r1 : r0);
        c.colsb[i] = 64;
    }
    lr_tiles_load(&c);
}

/* All rows over a chunk of ns strips. A group's rows stay in the first cache for all strips, the panels in the second.
 */
static void all_rows(const bf16_panel *p, int ns, int c, int nb, const lr_qact *qa, int m, float *y, size_t ldy,
                     __mmask16 last)
{
    const size_t stride = (size_t)qa->k * 2;
    const uint8_t *x = (const uint8_t *)qa->h + (size_t)c * 64;
    const int rest = m % 32;
    for (int r = 0; r < m; r += 32) {
        const uint8_t *xr = x + (size_t)r * stride;
        const int r0 = m - r < 16 ? m - r : 16, r1 = m - r < 32 ? m - r - r0 : 16;
        if (rest && (r == 0 || r + 32 > m)) configure(r0, r1 ? r1 : 16);
        for (int s = 0; s < ns; s += 2) {
            float *yr = y + (size_t)r * ldy + 16 * s;
            const __mmask16 mask = s + 2 < ns ? 0xFFFF : last;
            if (s + 1 < ns && r1)
                group(2, true, p + s, c, nb, xr, stride, r0, r1, yr, ldy, mask);
            else if (s + 1 < ns)
                group(2, false, p + s, c, nb, xr, stride, r0, r1, yr, ldy, mask);
            else if (r1)
                group(1, true, p + s, c, nb, xr, stride, r0, r1, yr, ldy, mask);
            else
                group(1, false, p + s, c, nb, xr, stride, r0, r1, yr, ldy, mask);
        }
    }
}

/* ---- a type's product ---- */

#define X(type, ...)                                                                                                   \
    static __attribute__((noinline)) void few_##type(const lr_strip *st, const lr_qact *qa, int m, float *y,           \
                                                     size_t ldy, __mmask16 mask)                                       \
    {                                                                                                                  \
        few(LR_FORM(__VA_ARGS__), st, qa, m, y, ldy, mask);                                                            \
    }                                                                                                                  \
    static __attribute__((noinline)) void unpack_##type(const lr_strip *st, size_t b0, int nb, bf16_panel *o)          \
    {                                                                                                                  \
        for (int b = 0; b < nb; b++) unpack_block(LR_FORM(__VA_ARGS__), st, b0 + (size_t)b, o->w[b]);                  \
    }
LR_FORM_LIST(X)
#undef X

static const struct {
    void (*few)(const lr_strip *st, const lr_qact *qa, int m, float *y, size_t ldy, __mmask16 mask);
    void (*unpack)(const lr_strip *st, size_t b0, int nb, bf16_panel *o);
} types[LR_DTYPE_MAX] = {
#define X(type, ...) [LR_##type] = {few_##type, unpack_##type},
    LR_FORM_LIST(X)
#undef X
};

static void many(const lr_gemm_w *w, const lr_parts *parts, const lr_qact *qa, int m, float *y, size_t ldy, int s0,
                 int s1)
{
    const int blocks = w->k / 32;
    bf16_panel p[PANELS];
    for (int s = s0, ns; s < s1; s += ns) {
        ns = s1 - s < PANELS ? s1 - s : PANELS;
        for (int c = 0; c < blocks; c += CHUNK) {
            const int nb = blocks - c < CHUNK ? blocks - c : CHUNK;
            for (int i = 0; i < ns; i++) {
                const lr_strip st = lr_strip_at(parts, w, s + i);
                types[w->type].unpack(&st, (size_t)c, nb, &p[i]);
            }
            all_rows(p, ns, c, nb, qa, m, y + 16 * (size_t)s, ldy, strip_mask(w, s + ns - 1));
        }
    }
}

void lr_gemm_bf16_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_parts parts = lr_form_parts(lr_form_of(w->type), w->k);
    if (m > 32) {
        configure(16, 16);
        many(w, &parts, qa, m, y, ldy, s0, s1);
    } else {
        configure(m < 16 ? m : 16, m > 16 ? m - 16 : 16);
        for (int s = s0; s < s1; s++) {
            const lr_strip st = lr_strip_at(&parts, w, s);
            types[w->type].few(&st, qa, m, y + 16 * (size_t)s, ldy, strip_mask(w, s));
        }
    }
    _tile_release();
}

/* Rounds to nearest even; values below 2^-126 become zero, as the tile unit takes them anyway. */
void lr_quantize_bf16_amx(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1)
{
    for (size_t r = 0; r < (size_t)m; r++)
        for (size_t c = (size_t)c0; c < (size_t)c1; c += 32) {
            const float *p = x + r * ldx + c;
            _mm512_storeu_si512(qa.h + r * (size_t)qa.k + c,
                                (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + 16), _mm512_loadu_ps(p)));
        }
}
