/* gemm_fine_amx.c - rows of 11 bits times packed weights with AMX int8 tiles, for more rows than FEW.
 *
 * A row's block lies in memory as 32 high and 32 low parts: 64 bytes, a whole row of an A tile. The B tile holds the
 * block's weights twice, first times 8 and then as they are, so one tile product gives sum w (8 high + low) in 32 bits:
 * eleven bits for the tile time of eight (the time of a tile product does not depend on its k). Weights of more than 5
 * bits leave no room for times 8 in a byte: they go in times 2^shift, and the high parts pass again until it is 8 times
 * (6 bits: once more; 8 bits: 7 times more, but such weights are few in the models people run). Where scales belong to
 * 16 k, a tile product takes the same A tile with the other half's weights zero.
 *
 * As in gemm_amx.c, products run a pair of units ahead of the float part, and weights with a zero point are signed.
 */
#include "cpu/gemm_amx.h"
#include "cpu/gemm_avx512.h"

enum { FINE_CHUNK = 8 }; /* blocks that are unpacked at a time */

/* Unpacked weights of a unit: `first` is the B tile with the low parts, `again` the one without. */
typedef struct fine_panel {
    uint8_t first[2 * FINE_CHUNK][1024];
    uint8_t again[2 * FINE_CHUNK][1024];
    scales512 s[FINE_CHUNK];
} __attribute__((aligned(64))) fine_panel;

static void configure(int rows)
{
    lr_tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.rows[i] = (uint8_t)(i == 4 || i == 5 ? 16 : rows);
        c.colsb[i] = 64;
    }
    lr_tiles_load(&c);
}

/* How far a form's weights can be shifted inside a byte, at most 3. */
INLINE int shift_of(const lr_form f)
{
    const int bits = f.lut ? 8 : f.main + f.extra;
    return bits <= 5 ? 3 : 8 - bits;
}

INLINE void unpack_fine(const lr_form f, const lr_strip *st, size_t b0, int nb, fine_panel *o)
{
    const int shift = shift_of(f), halves = f.sub == 16 ? 2 : 1, per = 8 / halves;
    const __m512i zero = _mm512_setzero_si512();
    for (int b = 0; b < nb; b++) {
        const size_t at = b0 + (size_t)b;
        __m512i w[8];
        unpack512(f, st->q + at * (size_t)f.main * 64, st->h + at * (size_t)f.extra * 64, w);
        if (f.zero)
            for (int g = 0; g < 8; g++) w[g] = _mm512_sub_epi8(w[g], _mm512_set1_epi8((char)f.zero));
        for (int i = 0; i < halves; i++) {
            uint8_t *p = o->first[b * halves + i], *again = o->again[b * halves + i];
            for (int g = 0; g < 8; g++) {
                const bool mine = g / per == i;
                /* sign bits that a 16-bit shift carries over are masked away */
                const __m512i keep = _mm512_set1_epi8((char)(0xFF << shift));
                const __m512i high = _mm512_and_si512(_mm512_slli_epi16(w[g], (unsigned)shift), keep);
                _mm512_store_si512(p + 64 * g, mine ? high : zero);
                _mm512_store_si512(p + 64 * (g + 8), mine ? w[g] : zero);
                if (shift < 3) {
                    _mm512_store_si512(again + 64 * g, mine ? high : zero);
                    _mm512_store_si512(again + 64 * (g + 8), zero);
                }
            }
        }
        o->s[b] = scales_of(f, st, at);
    }
}

typedef int32_t tile_sums[16][16] __attribute__((aligned(64)));

/* A unit's product, and its sums to memory. halves: units a block. */
#define PRODUCT(u, c, a, b)                                                                                            \
    if ((u) < units) {                                                                                                 \
        LR_TILE_LOAD(a, q + (size_t)((u) / halves) * 64, k2);                                                          \
        LR_TILE_LOAD(b, p->first[u], 64);                                                                              \
        _tile_zero(c);                                                                                                 \
        if (is_signed)                                                                                                 \
            _tile_dpbssd(c, a, b);                                                                                     \
        else                                                                                                           \
            _tile_dpbsud(c, a, b);                                                                                     \
        if (again) {                                                                                                   \
            LR_TILE_LOAD(b, p->again[u], 64);                                                                          \
            for (int i = 0; i < again; i++) _tile_dpbssd(c, a, b);                                                     \
        }                                                                                                              \
    }
#define SUMS(u, c, i)                                                                                                  \
    if ((u) < units) _tile_stored(c, sums[i], 64)

INLINE void add_tile(const lr_form f, const fine_panel *p, const rows512 *ri, int b, const tile_sums *i0,
                     const tile_sums *i1, __m512 acc[16])
{
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        acc[r] = add_block(f, &p->s[b], ri, r, b, _mm512_load_si512((*i0)[r]),
                           f.sub == 16 ? _mm512_load_si512((*i1)[r]) : _mm512_setzero_si512(), acc[r]);
}

/* One tile of rows over a chunk of one strip. */
INLINE void tile(const lr_form f, const bool is_signed, const int again, const fine_panel *p, int c, int nb,
                 const lr_qact *qa, size_t row, int nr, const rows512 *ri, float *y, size_t ldy, __mmask16 mask)
{
    const int halves = f.sub == 16 ? 2 : 1, units = halves * nb, step = halves == 2 ? 1 : 2;
    const size_t k2 = 2 * (size_t)qa->k;
    const int8_t *q = qa->q + row * k2 + (size_t)c * 64;
    tile_sums sums[4];
    __m512 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        acc[r] = c && r < nr ? _mm512_maskz_loadu_ps(mask, y + (size_t)r * ldy) : _mm512_setzero_ps();
    PRODUCT(0, 0, 2, 4)
    PRODUCT(1, 1, 3, 5)
    for (int u = 0, b = 0; u < units; u += 4, b += 2 * step) {
        PRODUCT(u + 2, 6, 2, 4)
        SUMS(u, 0, 0);
        PRODUCT(u + 3, 7, 3, 5)
        SUMS(u + 1, 1, 1);
        add_tile(f, p, ri, b, &sums[0], &sums[1], acc);
        if (halves == 1 && b + 1 < nb) add_tile(f, p, ri, b + 1, &sums[1], NULL, acc);
        PRODUCT(u + 4, 0, 2, 4)
        SUMS(u + 2, 6, 2);
        PRODUCT(u + 5, 1, 3, 5)
        SUMS(u + 3, 7, 3);
        if (b + step < nb) add_tile(f, p, ri, b + step, &sums[2], &sums[3], acc);
        if (halves == 1 && b + 3 < nb) add_tile(f, p, ri, b + 3, &sums[3], NULL, acc);
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        if (r < nr) _mm512_mask_storeu_ps(y + (size_t)r * ldy, mask, acc[r]);
}

typedef void fine512(const fine_panel *p, bool is_signed, int again, int c, int nb, const lr_qact *qa, int m, float *y,
                     size_t ldy, __mmask16 mask);

/* All rows over a chunk of a strip. */
#define KIND(name, sub, min)                                                                                           \
    static __attribute__((noinline)) void name(const fine_panel *p, bool is_signed, int again, int c, int nb,          \
                                               const lr_qact *qa, int m, float *y, size_t ldy, __mmask16 mask)         \
    {                                                                                                                  \
        const lr_form f = LR_FORM(8, 0, sub, 0, 0, min, 0, 0);                                                         \
        rows512 ri;                                                                                                    \
        for (int r = 0; r < m; r += 16) {                                                                              \
            const int nr = m - r < 16 ? m - r : 16;                                                                    \
            if (nr < 16) configure(nr);                                                                                \
            rows_prepare(f, 0, nr, qa, (size_t)r, (size_t)c, nb, &ri);                                                 \
            tile(f, is_signed, again, p, c, nb, qa, (size_t)r, nr, &ri, y + (size_t)r * ldy, ldy, mask);               \
            if (nr < 16) configure(16);                                                                                \
        }                                                                                                              \
    }
KIND(kind32, 32, 0)
KIND(kind32_min, 32, 1)
KIND(kind16, 16, 0)
KIND(kind16_min, 16, 1)

static fine512 *const kinds[4] = {kind32, kind32_min, kind16, kind16_min};

#define X(type, ...)                                                                                                   \
    static __attribute__((noinline)) void unpack_##type(const lr_strip *st, size_t b0, int nb, fine_panel *o)          \
    {                                                                                                                  \
        unpack_fine(LR_FORM(__VA_ARGS__), st, b0, nb, o);                                                              \
    }
LR_FORM_LIST(X)
#undef X

static void (*const unpack[LR_DTYPE_MAX])(const lr_strip *st, size_t b0, int nb, fine_panel *o) = {
#define X(type, ...) [LR_##type] = unpack_##type,
    LR_FORM_LIST(X)
#undef X
};

void lr_gemm_fine_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_form f = *lr_form_of(w->type);
    const lr_parts parts = lr_form_parts(&f, w->k);
    const int blocks = w->k / 32, again = (8 >> shift_of(f)) - 1;
    fine_panel p;
    configure(16);
    for (int s = s0; s < s1; s++) {
        const lr_strip st = lr_strip_at(&parts, w, s);
        for (int c = 0; c < blocks; c += FINE_CHUNK) {
            const int nb = blocks - c < FINE_CHUNK ? blocks - c : FINE_CHUNK;
            unpack[w->type](&st, (size_t)c, nb, &p);
            kinds[kind_of(f)](&p, f.zero != 0, again, c, nb, qa, m, y + 16 * (size_t)s, ldy, strip_mask(w, s));
        }
    }
    _tile_release();
}
