/* gemm_few_amx.c - two to four rows of 11 or 14 bits times packed weights with AMX int8 tiles.
 *
 * A row is four rows of a tile of 64 k: its high and its low parts, each of the first and of the second block of 32 k,
 * zero elsewhere. So one tile product gives the sums of both parts and both blocks of four rows and 16 features, apart
 * from each other, and weights go into it as they are unpacked, before their scales. The formulas of gemm.h do the
 * rest.
 *
 * Strips are read like in the product of one row, from end to end and two at a time, one of each half of the strips:
 * both share the rows. While the tiles work on 64 k of both, the next 64 are unpacked and the sums of the 64 before are
 * added. Rows are stacked once a call, SPAN pieces at a time.
 */
#include "cpu/gemm_amx.h"
#include "cpu/gemm_wide_avx512.h"

enum {
    ROWS = 4,
    SPAN = 64,    /* pieces whose rows are stacked at a time: 4096 k */
    FEWEST = 6,   /* strips of a call that are worth stacking rows, */
    LEAST = 1792, /* and values of the rows: less is no faster than the VNNI way */
};

/* The rows of a span: of each 64 k a tile, whose row 4 r + 2 part + block is zero but for that block's 32 bytes
 * (nothing else is ever written). 11 bits: scales of the blocks, and these times their sums. */
typedef struct stack {
    int8_t q[SPAN][4 * ROWS][64];
    float sx[ROWS][2 * SPAN], xs[ROWS][2 * SPAN];
} __attribute__((aligned(64))) stack;

/* 64 k of two strips: B tiles of u - zero. 11 bits: S and M of the blocks. 14: their sub-scales, 32 bits each. */
typedef struct piece {
    uint8_t w[2][1024];
    __m512 s[2][2], m[2][2];
    __m512i sc[2][2];
} piece;

static _Thread_local stack stacked;

static void configure(int rows)
{
    lr_tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.rows[i] = (uint8_t)(i >= 3 ? 16 : 4 * rows);
        c.colsb[i] = 64;
    }
    lr_tiles_load(&c);
}

/* ---- rows ---- */

INLINE void copy32(int8_t *to, const int8_t *from)
{
    _mm256_store_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
}

/* 11 bits: scales of blocks from .. to - 1 of row r. */
INLINE void stack_scales(const lr_qact *qa, size_t r, size_t from, size_t to)
{
    for (size_t b = from; b < to; b += 16) {
        const __mmask16 some = to - b < 16 ? (__mmask16)((1u << (to - b)) - 1) : 0xFFFF;
        const size_t at = r * ((size_t)qa->k / 32) + b;
        const __m512 sx = _mm512_maskz_loadu_ps(some, qa->scale + at);
        const __m512i pairs = _mm512_maskz_loadu_epi32(some, qa->sum16 + 2 * at);
        const __m512i sum = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
        _mm512_store_ps(stacked.sx[r] + (b - from), sx);
        _mm512_store_ps(stacked.xs[r] + (b - from), _mm512_mul_ps(sx, _mm512_cvtepi32_ps(sum)));
    }
}

/* Pieces from .. to - 1 of n rows. */
static void stack_rows(const lr_qact *qa, int n, size_t from, size_t to)
{
    const size_t k = (size_t)qa->k, part = qa->wide ? k : 32, block = qa->wide ? 32 : 64;
    for (size_t r = 0; r < (size_t)n; r++) {
        const int8_t *q = qa->q + 2 * r * k + 2 * block * from;
        for (size_t i = 0; i < to - from; i++, q += 2 * block) {
            int8_t(*o)[64] = stacked.q[i] + 4 * r;
            copy32(o[0], q);
            copy32(o[1] + 32, q + block);
            copy32(o[2], q + part);
            copy32(o[3] + 32, q + part + block);
        }
        if (!qa->wide) stack_scales(qa, r, 2 * from, 2 * to);
    }
}

/* ---- weights ---- */

INLINE void unpack_piece(const lr_form f, const places512 *p, size_t at, piece *o)
{
    for (size_t b = 0; b < 2; b++)
#pragma GCC unroll 2
        for (int s = 0; s < 2; s++) {
            const lr_strip *st = &p->st[s];
            __m512i w[8];
            lr_ahead_step(f, &p->a[s]);
            unpack512(f, st->q + (at + b) * (size_t)f.main * 64, st->h + (at + b) * (size_t)f.extra * 64, w);
#pragma GCC unroll 8
            for (int g = 0; g < 8; g++) {
                if (f.zero) w[g] = _mm512_sub_epi8(w[g], _mm512_set1_epi8((char)f.zero));
                _mm512_store_si512(o->w[s] + 512 * b + 64 * g, w[g]);
            }
            if (f.super) {
                o->sc[s][b] = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(st->sc + (at + b) * 16)));
            } else {
                const scales512 sc = scales_of(f, st, at + b);
                o->s[s][b] = sc.s;
                if (f.min) o->m[s][b] = sc.m;
            }
        }
}

typedef void unpack_fn(const places512 *p, size_t at, piece *o);
#define X(type, ...)                                                                                                   \
    static __attribute__((noinline)) void unpack_##type(const places512 *p, size_t at, piece *o)                       \
    {                                                                                                                  \
        const lr_form f = LR_FORM(__VA_ARGS__);                                                                        \
        if (f.sub == 32) unpack_piece(f, p, at, o);                                                                    \
    }
LR_FORM_LIST(X)
#undef X

static unpack_fn *const unpack[LR_DTYPE_MAX] = {
#define X(type, ...) [LR_##type] = unpack_##type,
    LR_FORM_LIST(X)
#undef X
};

/* ---- products ---- */

/* Sums of a pair of strips: 14 bits H and L of the super-block at hand. */
typedef struct pair_sums {
    __m512 acc[2][ROWS];
    __m512i h[2][ROWS], l[2][ROWS];
} pair_sums;

/* 14 bits: adds a piece's sums c of strip s. short_low: the sums of low parts fit into 16 bits. */
INLINE void add_wide(const bool short_low, const int n, const piece *w, int s, const lr_tile_sums *c, pair_sums *z)
{
#pragma GCC unroll 4
    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
        for (int b = 0; b < 2; b++) {
            const __m512i h = _mm512_load_si512((*c)[4 * r + b]), l = _mm512_load_si512((*c)[4 * r + 2 + b]);
            z->h[s][r] = _mm512_add_epi32(z->h[s][r], _mm512_mullo_epi32(h, w->sc[s][b]));
            z->l[s][r] = short_low ? _mm512_dpwssd_epi32(z->l[s][r], l, w->sc[s][b])
                                   : _mm512_add_epi32(z->l[s][r], _mm512_mullo_epi32(l, w->sc[s][b]));
        }
}

/* 11 bits: the same of piece i of the span. */
INLINE void add_fine(const bool min, const int n, const piece *w, int s, size_t i, const lr_tile_sums *c, pair_sums *z)
{
#pragma GCC unroll 2
    for (int b = 0; b < 2; b++)
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            const __m512i h = _mm512_load_si512((*c)[4 * r + b]), l = _mm512_load_si512((*c)[4 * r + 2 + b]);
            const __m512 v = _mm512_cvtepi32_ps(_mm512_add_epi32(l, _mm512_slli_epi32(h, 3)));
            const __m512 scale = _mm512_mul_ps(w->s[s][b], _mm512_set1_ps(stacked.sx[r][2 * i + (size_t)b]));
            z->acc[s][r] = _mm512_fmadd_ps(v, scale, z->acc[s][r]);
            if (min)
                z->acc[s][r] =
                    _mm512_fmadd_ps(w->m[s][b], _mm512_set1_ps(stacked.xs[r][2 * i + (size_t)b]), z->acc[s][r]);
        }
}

/* The float part of super-block sb. */
INLINE void add_supers(const lr_form f, const int n, const places512 *p, const lr_qact *qa, size_t sb, pair_sums *z)
{
#pragma GCC unroll 2
    for (int s = 0; s < 2; s++) {
        const wide_scales scales = wide_scales_of(f, &p->st[s], sb);
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            wide_row row;
            wide_row_set(f, qa, (size_t)r, sb, &row);
            const __m512i t = f.min ? wide_minima(f, &scales, &row) : _mm512_setzero_si512();
            z->acc[s][r] = add_super(f, &scales, &row, z->h[s][r], z->l[s][r], t, z->acc[s][r]);
            z->h[s][r] = z->l[s][r] = _mm512_setzero_si512();
        }
    }
}

/* What all pairs of strips of a call share. */
typedef struct few_call {
    const lr_qact *qa;
    unpack_fn *unpack;
    size_t from, to; /* pieces of the span */
    size_t ldy;
} few_call;

/* Adds piece i, whose sums are in c; after the last one of a super-block its float part. */
INLINE void add_piece(const lr_form f, const bool short_low, const int n, const few_call *k, const places512 *p,
                      size_t i, const piece *w, const lr_tile_sums *c, pair_sums *z)
{
#pragma GCC unroll 2
    for (int s = 0; s < 2; s++)
        if (f.super)
            add_wide(short_low, n, w, s, &c[s], z);
        else
            add_fine(f.min, n, w, s, i - k->from, &c[s], z);
    if (f.super && i % 4 == 3) add_supers(f, n, p, k->qa, i / 4, z);
}

/* f: as far as the float part differs. Products of piece i, unpacking i + 1 and the sums of i - 1 overlap. */
INLINE void pair_of_strips(const lr_form f, const bool short_low, const int n, const few_call *k, const places512 *p)
{
    piece w[3];
    lr_tile_sums c[2][2];
    pair_sums z;
#pragma GCC unroll 2
    for (int s = 0; s < 2; s++)
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            z.acc[s][r] =
                k->from ? _mm512_maskz_loadu_ps(p->mask[s], p->y[s] + (size_t)r * k->ldy) : _mm512_setzero_ps();
            z.h[s][r] = z.l[s][r] = _mm512_setzero_si512();
        }
    k->unpack(p, 2 * k->from, &w[0]);
    size_t now = 0, last = 2; /* of w */
    for (size_t i = k->from; i < k->to; i++) {
        const size_t next = now == 2 ? 0 : now + 1;
        _tile_zero(0);
        _tile_zero(1);
        LR_TILE_LOAD(2, stacked.q[i - k->from], 64);
        LR_TILE_LOAD(3, w[now].w[0], 64);
        _tile_dpbssd(0, 2, 3);
        LR_TILE_LOAD(4, w[now].w[1], 64);
        _tile_dpbssd(1, 2, 4);
        if (i + 1 < k->to) k->unpack(p, 2 * (i + 1), &w[next]);
        if (i > k->from) add_piece(f, short_low, n, k, p, i - 1, &w[last], c[(i - 1) & 1], &z);
        _tile_stored(0, c[i & 1][0], 64);
        _tile_stored(1, c[i & 1][1], 64);
        last = now;
        now = next;
    }
    add_piece(f, short_low, n, k, p, k->to - 1, &w[last], c[(k->to - 1) & 1], &z);
#pragma GCC unroll 2
    for (int s = 0; s < 2; s++)
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) _mm512_mask_storeu_ps(p->y[s] + (size_t)r * k->ldy, p->mask[s], z.acc[s][r]);
}

typedef void pair_fn(const few_call *k, const places512 *p);
#define ROWS_OF(name, n, short_low, super, min)                                                                        \
    static __attribute__((noinline)) void name##n(const few_call *k, const places512 *p)                               \
    {                                                                                                                  \
        pair_of_strips(LR_FORM(8, 0, 32, 0, super, min, 0, 0), short_low, n, k, p);                                    \
    }
#define KIND(name, short_low, super, min)                                                                              \
    ROWS_OF(name, 2, short_low, super, min)                                                                            \
    ROWS_OF(name, 3, short_low, super, min)                                                                            \
    ROWS_OF(name, 4, short_low, super, min)
KIND(fine, 0, 0, 0)
KIND(fine_min, 0, 0, 1)
KIND(wide, 0, 1, 0)
KIND(wide_min, 1, 1, 1)

static pair_fn *const kinds[4][ROWS + 1] = {
    {NULL, NULL, fine2, fine3, fine4},
    {NULL, NULL, fine_min2, fine_min3, fine_min4},
    {NULL, NULL, wide2, wide3, wide4},
    {NULL, NULL, wide_min2, wide_min3, wide_min4},
};

bool lr_gemm_few_amx_takes(const lr_gemm_w *w, const lr_qact *qa, int m, int strips)
{
    if (m < 2 || m > ROWS || strips < FEWEST || m * w->k < LEAST || !w->packed || w->k % 64) return false;
    const lr_form *f = lr_form_of(w->type);
    return f->sub == 32 && (f->super ? qa->wide : qa->fine);
}

void lr_gemm_few_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_form *f = lr_form_of(w->type);
    const lr_parts parts = lr_form_parts(f, w->k);
    pair_fn *const pair = kinds[2 * f->super + f->min][m];
    const size_t pieces = (size_t)w->k / 64;
    const int half = lr_ahead_half(s0, s1);
    if (s0 >= s1) return;
    lr_ahead a[2];
    for (int i = 0; i < 2; i++) lr_ahead_begin(&a[i], w, s0, s1, i, SPAN * 2, LR_AHEAD_NEAR);
    configure(m);
    for (size_t from = 0; from < pieces; from += SPAN) {
        const few_call k = {qa, unpack[w->type], from, from + SPAN < pieces ? from + SPAN : pieces, ldy};
        stack_rows(qa, m, k.from, k.to);
        for (int s = s0, t = half; t < s1; s++, t++) { /* an odd number: the last strip is both */
            const places512 p = places_of(w, &parts, y, s < half ? s : t, t, a);
            pair(&k, &p);
        }
    }
    _tile_release();
}
