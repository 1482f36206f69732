/* gemm_wide_amx.c - rows of 14 bits times weights of super-blocks with AMX int8 tiles, for more rows than FEW.
 *
 * A weight of a super-block is d times an integer, sub-scale times (u - zero), of at most 14 bits: 64 a + b with b in
 * 0..63; or, where sub-scales are 6 bits without a sign and u at most 5, 8 a + b, a and b being u times the sub-scale's
 * upper and lower bits, which needs one product each. A row's value is 64 high + low. So four tile products, of a and b
 * with high and low, sum over a whole super-block in int32 tiles, and the float part comes once in 256 k.
 *
 * A unit is one tile of rows times one strip over one super-block: first a with high and low, then b, two result tiles
 * each. Storing the first two overlaps with the products of the others, and the float part of a unit with the products
 * of the next one; the tile unit never waits.
 */
#include "cpu/gemm_amx.h"
#include "cpu/gemm_wide_avx512.h"
#include <string.h>

enum {
    STRIPS = 8,    /* strips that are unpacked at a time */
    FEW_TILES = 2, /* tiles of rows that take strips one by one */
    NEAR = 16,     /* strips that rows wait for then */
    ASK = 4,       /* strips ahead that memory is asked for */
    LAST = 4,      /* rows behind the last whole tile that go the VNNI way */
};

/* A super-block of a strip: B tiles of a and of b, 64 k each, and what the float part needs. */
typedef struct wide_panel {
    uint8_t a[4][1024], b[4][1024];
    wide_scales s;
} __attribute__((aligned(64))) wide_panel;

/* A tile of rows over a super-block. */
typedef struct wide_rows {
    const int8_t *q; /* rows lie k2 bytes apart, their low parts `low` bytes behind */
    size_t k2, low;
    wide_row r[16];
} __attribute__((aligned(64))) wide_rows;

/* What the float part of a unit needs. */
typedef struct unit {
    const wide_panel *p;
    const wide_rows *x;
    float *y;
    lr_tile_sums *sums; /* ah, al, bh, bl */
    __mmask16 mask;
    bool first; /* of its row: y is set */
} unit;

static void configure(int rows)
{
    lr_tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.rows[i] = (uint8_t)(i >= 6 ? 16 : rows);
        c.colsb[i] = 64;
    }
    lr_tiles_load(&c);
}

/* The 64 bytes of 16-bit values (even, odd) taken apart into tiles a and b, by moves of bits, which the vector port
 * that tiles leave idle can do. */
INLINE void take_apart(__m512i even, __m512i odd, uint8_t *a, uint8_t *b)
{
    const __mmask64 odds = 0xAAAAAAAAAAAAAAAA;
    const __m512i low = _mm512_set1_epi64(0x3030202010100000), high = _mm512_add_epi8(low, _mm512_set1_epi8(6));
    const __m512i ah = _mm512_multishift_epi64_epi8(high, even);
    const __m512i bh = _mm512_mask_multishift_epi64_epi8(even, odds, low, odd);
    _mm512_store_si512(a, _mm512_mask_multishift_epi64_epi8(ah, odds, high, odd));
    _mm512_store_si512(b, _mm512_and_si512(bh, _mm512_set1_epi8(63)));
}

/* Whether a weight is taken apart by its sub-scale's 3 upper and 3 lower bits, each times u a byte. */
INLINE bool by_scale(const lr_form f) { return f.min && f.sub == 32; }

/* A weight is a << base_of + b. */
INLINE int base_of(const lr_form f) { return by_scale(f) ? 3 : 6; }

/* Bytes of 16 features to lanes of 32 bits. */
INLINE __m512i lanes_of(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }

/* Block `at` of a strip: its half (8 rows) of the B tiles of a and of b. */
INLINE void unpack_parts(const lr_form f, const lr_strip *st, size_t at, uint8_t *a, uint8_t *b)
{
    __m512i w[8];
    unpack512(f, st->q + at * (size_t)f.main * 64, st->h + at * (size_t)f.extra * 64, w);
    for (int half = 0; half < 32 / f.sub; half++) {
        __m512i sc = lanes_of(st->sc + (at * (size_t)(32 / f.sub) + (size_t)half) * 16);
        if (f.sub == 16 && f.min) sc = _mm512_and_si512(sc, _mm512_set1_epi32(15));
        if (by_scale(f)) { /* products of two bytes at once: none is above 7 * 31 */
            const __m512i both = _mm512_or_si512(sc, _mm512_slli_epi32(sc, 16));
            const __m512i s1 = _mm512_srli_epi16(both, 3), s0 = _mm512_and_si512(both, _mm512_set1_epi16(7));
            for (int g = 0; g < 8; g++) {
                _mm512_store_si512(a + 64 * g, _mm512_mullo_epi16(w[g], s1));
                _mm512_store_si512(b + 64 * g, _mm512_mullo_epi16(w[g], s0));
            }
            continue;
        }
        const __m512i even = _mm512_or_si512(sc, _mm512_slli_epi32(sc, 16)), odd = _mm512_slli_epi16(even, 8);
        const __m512i zero =
            _mm512_mullo_epi16(_mm512_srai_epi16(odd, 8), _mm512_set1_epi16((short)f.zero)); /* zero * sc */
        for (int g = half * 4; g < (f.sub == 32 ? 8 : half * 4 + 4); g++) {
            __m512i e = _mm512_maddubs_epi16(w[g], even), d = _mm512_maddubs_epi16(w[g], odd);
            if (f.zero) e = _mm512_sub_epi16(e, zero), d = _mm512_sub_epi16(d, zero);
            take_apart(e, d, a + 64 * g, b + 64 * g);
        }
    }
}

/* Sums of a and b put together. */
INLINE __m512i joined(const lr_form f, __m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_slli_epi32(a, (unsigned)base_of(f)), b);
}

/* Asks for block i of super-block sb of a strip, and for its share of the scales: spread over the blocks, as a thread
 * has few requests to memory at a time. */
INLINE void ask_for(const lr_form f, const lr_strip *st, size_t sb, size_t i)
{
    const size_t at = 8 * sb + i, subs = (size_t)(32 / f.sub) * 16;
    for (size_t l = 0; l < (size_t)f.main; l++) _mm_prefetch(st->q + (at * (size_t)f.main + l) * 64, _MM_HINT_T1);
    for (size_t l = 0; l < (size_t)f.extra; l++) _mm_prefetch(st->h + (at * (size_t)f.extra + l) * 64, _MM_HINT_T1);
    if (i * subs % 64 == 0) {
        _mm_prefetch(st->sc + at * subs, _MM_HINT_T1);
        if (f.min && f.sub == 32) _mm_prefetch(st->sm + at * subs, _MM_HINT_T1);
    }
    if (i == 0) _mm_prefetch(st->d + sb * 32, _MM_HINT_T1);
    if (i == 0 && f.min) _mm_prefetch(st->m + sb * 32, _MM_HINT_T1);
}

INLINE void unpack_wide(const lr_form f, const lr_strip *st, size_t sb, const lr_strip *ahead, size_t sb_ahead,
                        wide_panel *o)
{
    for (size_t i = 0; i < 8; i++) {
        ask_for(f, ahead, sb_ahead, i);
        unpack_parts(f, st, 8 * sb + i, o->a[i / 2] + 512 * (i % 2), o->b[i / 2] + 512 * (i % 2));
    }
    o->s = wide_scales_of(f, st, sb);
}

/* Adds a unit's sums to rows r0..r1-1 of y. s: the scales of u's panel, in registers. */
INLINE void add_rows(const lr_form f, const unit u, const wide_scales *s, size_t ldy, int r0, int r1)
{
#pragma GCC unroll 4
    for (int r = r0; r < r1; r++) {
        float *y = u.y + (size_t)r * ldy;
        const __m512i h = joined(f, _mm512_load_si512(u.sums[0][r]), _mm512_load_si512(u.sums[2][r]));
        const __m512i l = joined(f, _mm512_load_si512(u.sums[1][r]), _mm512_load_si512(u.sums[3][r]));
        const __m512 acc = u.first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(u.mask, y);
        const __m512i t = f.min ? wide_minima(f, s, &u.x->r[r]) : _mm512_setzero_si512();
        _mm512_mask_storeu_ps(y, u.mask, add_super(f, s, &u.x->r[r], h, l, t, acc));
    }
}

/* Tile c += a b, weights' part in b. */
#define PRODUCT(c, a, b)                                                                                               \
    if (by_scale(f))                                                                                                   \
        _tile_dpbsud(c, a, b);                                                                                         \
    else                                                                                                               \
        _tile_dpbssd(c, a, b)
#define PRODUCTS(ks)                                                                                                   \
    LR_TILE_LOAD(4, q + 64 * (ks), k2);                                                                                \
    LR_TILE_LOAD(6, p->a[ks], 64);                                                                                     \
    PRODUCT(0, 4, 6);                                                                                                  \
    LR_TILE_LOAD(5, low + 64 * (ks), k2);                                                                              \
    PRODUCT(1, 5, 6);                                                                                                  \
    LR_TILE_LOAD(7, p->b[ks], 64);                                                                                     \
    PRODUCT(2, 4, 7);                                                                                                  \
    PRODUCT(3, 5, 7)

#define ROWS(r0, r1)                                                                                                   \
    if (last) add_rows(f, l, &scales, ldy, full ? (r0) : (r0) < nr ? (r0) : nr, full ? (r1) : (r1) < nr ? (r1) : nr)

/* The products of u, and the float part of the unit before it. u NULL: only that. */
INLINE void step(const lr_form f, const bool full, const unit *u, const unit *last, int nr, size_t ldy)
{
    const unit l = last ? *last : (unit){0};
    const wide_scales scales = last ? l.p->s : (wide_scales){0};
    if (!u) {
        ROWS(0, 16);
        return;
    }
    const int8_t *q = u->x->q, *low = q + u->x->low;
    const size_t k2 = u->x->k2;
    const wide_panel *p = u->p;
    lr_tile_sums *sums = u->sums;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    PRODUCTS(0);
    ROWS(0, 2);
    PRODUCTS(1);
    ROWS(2, 4);
    PRODUCTS(2);
    ROWS(4, 7);
    PRODUCTS(3);
    ROWS(7, 10);
    _tile_stored(0, sums[0], 64);
    ROWS(10, 12);
    _tile_stored(1, sums[1], 64);
    ROWS(12, 14);
    _tile_stored(2, sums[2], 64);
    ROWS(14, 16);
    _tile_stored(3, sums[3], 64);
}

typedef void step512(const unit *u, const unit *last, int nr, size_t ldy);

/* The kinds of forms, as far as the float part differs. */
#define KIND(name, sub, min)                                                                                           \
    static __attribute__((noinline)) void name(const unit *u, const unit *last, int nr, size_t ldy)                    \
    {                                                                                                                  \
        if (nr == 16)                                                                                                  \
            step(LR_FORM(8, 0, sub, 0, 1, min, 0, 0), true, u, last, nr, ldy);                                         \
        else                                                                                                           \
            step(LR_FORM(8, 0, sub, 0, 1, min, 0, 0), false, u, last, nr, ldy);                                        \
    }
KIND(step_plain, 32, 0)
KIND(step_min32, 32, 1)
KIND(step_min16, 16, 1)

INLINE step512 *step_of(const lr_form *f) { return !f->min ? step_plain : f->sub == 32 ? step_min32 : step_min16; }

#define X(type, ...)                                                                                                   \
    static __attribute__((noinline)) void unpack_##type(const lr_strip *st, size_t sb, const lr_strip *ahead,          \
                                                        size_t sb_ahead, wide_panel *o)                                \
    {                                                                                                                  \
        unpack_wide(LR_FORM(__VA_ARGS__), st, sb, ahead, sb_ahead, o);                                                 \
    }
LR_SUPER_LIST(X)
#undef X

static void (*const unpack[LR_DTYPE_MAX])(const lr_strip *st, size_t sb, const lr_strip *ahead, size_t sb_ahead,
                                          wide_panel *o) = {
#define X(type, ...) [LR_##type] = unpack_##type,
    LR_SUPER_LIST(X)
#undef X
};

static void prepare(const lr_form *f, const lr_qact *qa, size_t row, size_t sb, int nr, wide_rows *o)
{
    o->low = (size_t)qa->k;
    o->k2 = 2 * o->low;
    o->q = qa->q + row * o->k2 + sb * LR_WIDE;
    for (int r = 0; r < nr; r++) wide_row_set(*f, qa, row + (size_t)r, sb, &o->r[r]);
}

/* Moves the rows together: far apart they would share few sets of the cache. */
static void gather(wide_rows *o, int nr, int8_t to[16][512])
{
    for (int r = 0; r < nr; r++)
        for (size_t i = 0; i < LR_WIDE; i += 64)
            for (size_t low = 0; low < 2; low++)
                _mm512_store_si512(to[r] + low * LR_WIDE + i,
                                   _mm512_loadu_si512(o->q + (size_t)r * o->k2 + low * o->low + i));
    o->q = to[0];
    o->low = LR_WIDE;
    o->k2 = 2 * LR_WIDE;
}

/* What a call works on, and its pipeline of units. */
typedef struct wide_call {
    const lr_gemm_w *w;
    const lr_form *f;
    lr_parts parts;
    const lr_qact *qa;
    float *y;
    size_t ldy;
    step512 *step;
    int nr; /* rows of a tile */
    int n;  /* of units, the one in turn */
    const unit *last;
    unit units[2];
    lr_tile_sums sums[2][4];
} wide_call;

static void call_unit(wide_call *c, const wide_panel *p, const wide_rows *x, size_t row, size_t sb, int s)
{
    unit *const u = &c->units[c->n];
    *u = (unit){p, x, c->y + row * c->ldy + 16 * (size_t)s, c->sums[c->n], strip_mask(c->w, s), sb == 0};
    c->step(u, c->last, c->nr, c->ldy);
    c->last = u;
    c->n ^= 1;
}

static void call_end(wide_call *c)
{
    if (c->last) c->step(NULL, c->last, c->nr, c->ldy);
    c->last = NULL;
}

/* nt tiles of rows from row `row` on: STRIPS strips are unpacked at a time, which all tiles pass over. */
static void many_tiles(wide_call *c, size_t row, int nt, int s0, int s1)
{
    wide_panel p[STRIPS];
    wide_rows x[2];
    for (int sg = s0, se; sg < s1; sg = se) {
        se = sg + STRIPS < s1 ? sg + STRIPS : s1;
        for (size_t sb = 0; sb < (size_t)c->w->k / LR_WIDE; sb++) {
            for (int s = sg; s < se; s++) {
                const lr_strip st = lr_strip_at(&c->parts, c->w, s);
                unpack[c->w->type](&st, sb, &st, sb + 1 < (size_t)c->w->k / LR_WIDE ? sb + 1 : sb, &p[s - sg]);
            }
            for (int t = 0; t < nt; t++) {
                const size_t r = row + 16 * (size_t)t;
                prepare(c->f, c->qa, r, sb, c->nr, &x[t & 1]);
                for (int s = sg; s < se; s++) call_unit(c, &p[s - sg], &x[t & 1], r, sb, s);
            }
            call_end(c);
        }
    }
}

/* A super-block of a strip. */
typedef struct at_super {
    int s;
    size_t sb;
} at_super;

/* The same for few tiles: a strip is unpacked where it stays in L1, as do the rows, for NEAR strips. */
static void few_tiles(wide_call *c, size_t row, int nt, int s0, int s1)
{
    wide_panel p[2];
    wide_rows x[2][FEW_TILES];
    int8_t q[FEW_TILES][16][512] __attribute__((aligned(64)));
    const size_t supers = (size_t)c->w->k / LR_WIDE;
    for (int sg = s0, se, i = 0, j = 0; sg < s1; sg = se) {
        se = sg + NEAR < s1 ? sg + NEAR : s1;
        for (size_t sb = 0; sb < supers; sb++, j ^= 1) {
            for (int t = 0; t < nt; t++) {
                prepare(c->f, c->qa, row + 16 * (size_t)t, sb, c->nr, &x[j][t]);
                gather(&x[j][t], c->nr, q[t]);
            }
            for (int s = sg; s < se; s++, i ^= 1) {
                const lr_strip st = lr_strip_at(&c->parts, c->w, s);
                at_super next = {s + ASK < se ? s + ASK : sg + (s + ASK - se), s + ASK < se ? sb : sb + 1};
                if (next.sb == supers) next = (at_super){next.s - sg + se, 0};
                if (next.s >= s1) next = (at_super){s, sb};
                const lr_strip ahead = lr_strip_at(&c->parts, c->w, next.s);
                unpack[c->w->type](&st, sb, &ahead, next.sb, &p[i]);
                for (int t = 0; t < nt; t++) call_unit(c, &p[i], &x[j][t], row + 16 * (size_t)t, sb, s);
            }
        }
    }
    call_end(c);
}

void lr_gemm_wide_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_form *f = lr_form_of(w->type);
    const int tiles = m / 16, rest = m % 16;
    wide_call c = {.w = w, .f = f, .parts = lr_form_parts(f, w->k), .qa = qa, .y = y, .ldy = ldy, .step = step_of(f)};
    if (s0 >= s1) return;
    if (tiles) {
        configure(c.nr = 16);
        (tiles > FEW_TILES ? many_tiles : few_tiles)(&c, 0, tiles, s0, s1);
    }
    if (rest > LAST) {
        configure(c.nr = rest);
        few_tiles(&c, 16 * (size_t)tiles, 1, s0, s1);
    }
    _tile_release();
    if (rest && rest <= LAST) {
        const size_t row = 16 * (size_t)tiles;
        const lr_qact few = lr_qact_at(*qa, row * (size_t)qa->k);
        lr_gemm_few_wide_avx512(w, &few, rest, y + row * ldy, ldy, s0, s1);
    }
}
