/* gemm_fine_amx.c - rows of 11 bits times packed weights with AMX int8 tiles, for more rows than FEW.
 *
 * A row's block lies in memory as 32 high and 32 low parts: 64 bytes, a whole row of an A tile. The B tile holds the
 * block's weights twice, first times 8 and then as they are, so one tile product gives sum w (8 high + low) in 32 bits:
 * eleven bits for the tile time of eight (the time of a tile product does not depend on its k). Weights of 6 bits leave
 * no room for times 8 in a byte: they go in times 4, and the high parts pass once more. Weights of 8 bits take two
 * products with sums of their own, one of the high parts and one of the low parts. Where scales belong to 16 k, a tile
 * product takes the same A tile with the other half's weights zero.
 *
 * As in gemm_amx.c, products run a pair of units ahead of the float part, and weights with a zero point are signed. Up
 * to GROUP tiles of rows pass over a chunk of a strip while it is in L1, and so are the rows, which all strips of the
 * call use; the pipeline of products runs on from one tile of rows to the next.
 */
#include "cpu/gemm_amx.h"
#include "cpu/gemm_avx512.h"
#include <string.h>

enum {
    KIND_SPLIT = 4,
    FINE_CHUNK = 8, /* blocks that are unpacked at a time */
    GROUP = 4,      /* tiles of rows */
    LAST = 4,       /* rows behind the last whole tile that go the VNNI way */
};

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

INLINE bool splits(const lr_form f) { return f.lut || f.main == 8; }

/* Units of a block: halves of 16 k, or high and low parts. */
INLINE int units_of(const lr_form f) { return f.sub == 16 || splits(f) ? 2 : 1; }

/* How far a form's weights can be shifted inside a byte, at most 3. */
INLINE int shift_of(const lr_form f) { return f.main + f.extra <= 5 ? 3 : 8 - f.main - f.extra; }

/* Zero weights are not written: they are where they were in the blocks before. */
INLINE void unpack_fine(const lr_form f, const lr_strip *st, size_t b0, int nb, size_t ahead, fine_panel *o)
{
    const int shift = shift_of(f), units = units_of(f), per = f.sub == 16 ? 4 : 8;
    for (int b = 0; b < nb; b++) {
        const size_t at = b0 + (size_t)b;
        __m512i w[8];
        const uint8_t *q = st->q + at * (size_t)f.main * 64, *h = st->h + at * (size_t)f.extra * 64;
        for (int i = 0; i < f.main; i++) _mm_prefetch(q + ahead + 64 * i, _MM_HINT_T1);
        for (int i = 0; i < f.extra; i++) _mm_prefetch(h + ahead + 64 * i, _MM_HINT_T1);
        unpack512(f, q, h, w);
        if (f.zero)
            for (int g = 0; g < 8; g++) w[g] = _mm512_sub_epi8(w[g], _mm512_set1_epi8((char)f.zero));
        for (int g = 0; g < 8; g++) {
            const int unit = b * units + g / per;
            if (splits(f)) {
                _mm512_store_si512(o->first[unit] + 64 * g, w[g]);
                _mm512_store_si512(o->first[unit + 1] + 64 * (g + 8), w[g]);
                continue;
            }
            __m512i high = _mm512_slli_epi16(w[g], (unsigned)shift);
            if (f.zero) /* sign bits that a 16-bit shift carries over */
                high = _mm512_and_si512(high, _mm512_set1_epi8((char)(0xFF << shift)));
            _mm512_store_si512(o->first[unit] + 64 * g, high);
            _mm512_store_si512(o->first[unit] + 64 * (g + 8), w[g]);
            if (shift < 3) _mm512_store_si512(o->again[unit] + 64 * g, high);
        }
        o->s[b] = scales_of(f, st, at);
    }
}

typedef int32_t tile_sums[16][16] __attribute__((aligned(64)));

/* What a tile of rows needs of a chunk besides q. */
typedef struct fine_rows {
    float sx[16][FINE_CHUNK];
    float xs[16][FINE_CHUNK];     /* s_x * sum of the block */
    int32_t pair[16][FINE_CHUNK]; /* the two sums of 16, as 16 bits each */
} __attribute__((aligned(64))) fine_rows;

INLINE void prepare(const lr_form f, int nr, const lr_qact *qa, size_t row, size_t b, int nb, fine_rows *o)
{
    const __mmask8 k = (__mmask8)((1u << nb) - 1);
    const size_t blocks = (size_t)qa->k / 32;
    for (int r = 0; r < nr; r++) {
        const size_t at = (row + (size_t)r) * blocks + b;
        const __m256 sx = _mm256_maskz_loadu_ps(k, qa->scale + at);
        _mm256_store_ps(o->sx[r], sx);
        if (!f.min) continue;
        const __m256i pair = _mm256_maskz_loadu_epi32(k, qa->sum16 + 2 * at);
        if (f.sub == 32)
            _mm256_store_ps(o->xs[r],
                            _mm256_mul_ps(sx, _mm256_cvtepi32_ps(_mm256_madd_epi16(pair, _mm256_set1_epi16(1)))));
        else
            _mm256_store_si256((__m256i *)o->pair[r], pair);
    }
}

/* Adds block b, whose integer sums are in i0 (and i1), to the rows of acc. */
INLINE void add_tile(const lr_form f, const bool split, const fine_panel *p, const fine_rows *ri, int b,
                     const tile_sums *i0, const tile_sums *i1, __m512 acc[16])
{
    const scales512 *s = &p->s[b];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
        const __m512 sx = _mm512_set1_ps(ri->sx[r][b]);
        __m512i i = _mm512_load_si512((*i0)[r]);
        if (split) i = _mm512_add_epi32(_mm512_slli_epi32(i, 3), _mm512_load_si512((*i1)[r]));
        const __m512 x0 = _mm512_cvtepi32_ps(i);
        if (f.sub == 32) {
            acc[r] = _mm512_fmadd_ps(x0, _mm512_mul_ps(s->s, sx), acc[r]);
            if (f.min) acc[r] = _mm512_fmadd_ps(s->m, _mm512_set1_ps(ri->xs[r][b]), acc[r]);
        } else {
            const __m512 x1 = _mm512_cvtepi32_ps(_mm512_load_si512((*i1)[r]));
            acc[r] = _mm512_fmadd_ps(_mm512_fmadd_ps(x1, s->sc1, _mm512_mul_ps(x0, s->sc0)), _mm512_mul_ps(s->s, sx),
                                     acc[r]);
            if (!f.min) continue;
            const __m512i j = _mm512_dpwssd_epi32(_mm512_setzero_si512(), s->sm, _mm512_set1_epi32(ri->pair[r][b]));
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(j), _mm512_mul_ps(s->m, sx), acc[r]);
        }
    }
}

/* The product of unit u, counted over all tiles of rows: whose rows are the ones from q on; and its sums to memory.
 * per: units a block. */
#define PRODUCT(q, u, c, a, b)                                                                                         \
    if ((u) < units) {                                                                                                 \
        LR_TILE_LOAD(a, (q) + (size_t)((u) / per) * 64, k2);                                                           \
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

/* Where a chunk of the rows of a call is. */
typedef struct fine_call {
    const fine_panel *p;
    const fine_rows *ri;
    const int8_t *q; /* row 0, block c */
    size_t k2;       /* bytes from a row of q to the next */
    bool is_signed, first;
    int again, nb;
    float *y;
    size_t ldy;
    __mmask16 mask;
} fine_call;

/* nt tiles of nr rows over a chunk of one strip. */
INLINE void tiles(const lr_form f, const bool split, const fine_call *a, int nt, int nr)
{
    const int per = f.sub == 16 || split ? 2 : 1, units = per * a->nb, step = per == 2 ? 1 : 2, nb = a->nb;
    const bool is_signed = a->is_signed;
    const int again = a->again;
    const size_t k2 = a->k2, ldy = a->ldy;
    const fine_panel *p = a->p;
    const __mmask16 mask = a->mask;
    const int8_t *q = a->q;
    tile_sums sums[4];
    __m512 acc[16];
    PRODUCT(q, 0, 0, 2, 4)
    PRODUCT(q, 1, 1, 3, 5)
    for (int t = 0; t < nt; t++) {
        const fine_rows *ri = a->ri + t;
        const int8_t *next = q + 16 * k2;
        float *y = a->y + (size_t)(16 * t) * ldy;
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++)
            acc[r] = !a->first && r < nr ? _mm512_maskz_loadu_ps(mask, y + (size_t)r * ldy) : _mm512_setzero_ps();
        for (int u = 0, b = 0; u < units; u += 4, b += 2 * step) {
            PRODUCT(q, u + 2, 6, 2, 4)
            SUMS(u, 0, 0);
            PRODUCT(q, u + 3, 7, 3, 5)
            SUMS(u + 1, 1, 1);
            add_tile(f, split, p, ri, b, &sums[0], &sums[1], acc);
            if (per == 1 && b + 1 < nb) add_tile(f, split, p, ri, b + 1, &sums[1], NULL, acc);
            const bool over = u + 4 >= units;
            const int8_t *qn = over ? next : q;
            const int un = over ? t + 1 < nt ? 0 : units : u + 4;
            PRODUCT(qn, un, 0, 2, 4)
            SUMS(u + 2, 6, 2);
            PRODUCT(qn, un + 1, 1, 3, 5)
            SUMS(u + 3, 7, 3);
            if (b + step < nb) add_tile(f, split, p, ri, b + step, &sums[2], &sums[3], acc);
            if (per == 1 && b + 3 < nb) add_tile(f, split, p, ri, b + 3, &sums[3], NULL, acc);
        }
        q = next;
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++)
            if (r < nr) _mm512_mask_storeu_ps(y + (size_t)r * ldy, mask, acc[r]);
    }
}

typedef void fine512(const fine_call *a, int nt, int nr);

#define KIND(name, sub, min, split)                                                                                    \
    static __attribute__((noinline)) void name##_tiles(const fine_call *a, int nt, int nr)                             \
    {                                                                                                                  \
        tiles(LR_FORM(8, 0, sub, 0, 0, min, 0, 0), split, a, nt, nr);                                                  \
    }                                                                                                                  \
    static void name##_prepare(int nr, const lr_qact *qa, size_t row, size_t b, int nb, fine_rows *o)                  \
    {                                                                                                                  \
        prepare(LR_FORM(8, 0, sub, 0, 0, min, 0, 0), nr, qa, row, b, nb, o);                                           \
    }
KIND(kind32, 32, 0, false)
KIND(kind32_min, 32, 1, false)
KIND(kind16, 16, 0, false)
KIND(kind16_min, 16, 1, false)
KIND(split32, 32, 0, true)

static const struct {
    fine512 *tiles;
    void (*prepare)(int nr, const lr_qact *qa, size_t row, size_t b, int nb, fine_rows *o);
} kinds[] = {{kind32_tiles, kind32_prepare},
             {kind32_min_tiles, kind32_min_prepare},
             {kind16_tiles, kind16_prepare},
             {kind16_min_tiles, kind16_min_prepare},
             {split32_tiles, split32_prepare}};

#define X(type, ...)                                                                                                   \
    static __attribute__((noinline)) void unpack_##type(const lr_strip *st, size_t b0, int nb, size_t ahead,           \
                                                        fine_panel *o)                                                 \
    {                                                                                                                  \
        unpack_fine(LR_FORM(__VA_ARGS__), st, b0, nb, ahead, o);                                                       \
    }
LR_FORM_LIST(X)
#undef X

static void (*const unpack[LR_DTYPE_MAX])(const lr_strip *st, size_t b0, int nb, size_t ahead, fine_panel *o) = {
#define X(type, ...) [LR_##type] = unpack_##type,
    LR_FORM_LIST(X)
#undef X
};

/* nt tiles of nr rows from row `row` on (nt is 1, or nr 16), strips s0..s1-1: a chunk of all strips, then the next, so
 * that what is prepared of the rows serves them all. */
static void group(const lr_gemm_w *w, const lr_form *f, const lr_qact *qa, size_t row, int nt, int nr, float *y,
                  size_t ldy, int s0, int s1)
{
    const lr_parts parts = lr_form_parts(f, w->k);
    const int blocks = w->k / 32, kind = splits(*f) ? KIND_SPLIT : kind_of(*f);
    fine_panel p;
    fine_rows ri[GROUP];
    fine_call a = {.p = &p, .ri = ri, .k2 = 2 * (size_t)qa->k, .is_signed = f->zero != 0, .ldy = ldy};
    if (!splits(*f)) a.again = (8 >> shift_of(*f)) - 1;
    if (units_of(*f) == 2) memset(p.first, 0, sizeof p.first);
    if (a.again) memset(p.again, 0, sizeof p.again);
    for (int c = 0; c < blocks; c += FINE_CHUNK) {
        a.nb = blocks - c < FINE_CHUNK ? blocks - c : FINE_CHUNK;
        a.first = c == 0;
        a.q = qa->q + row * a.k2 + (size_t)c * 64;
        for (int t = 0; t < nt; t++) kinds[kind].prepare(nr, qa, row + 16 * (size_t)t, (size_t)c, a.nb, &ri[t]);
        for (int s = s0; s < s1; s++) {
            const lr_strip st = lr_strip_at(&parts, w, s);
            unpack[w->type](&st, (size_t)c, a.nb, w->strip_bytes, &p);
            a.y = y + row * ldy + 16 * (size_t)s;
            a.mask = strip_mask(w, s);
            kinds[kind].tiles(&a, nt, nr);
        }
    }
}

void lr_gemm_fine_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_form *f = lr_form_of(w->type);
    int r = 0;
    configure(16);
    for (int n; m - r >= 16; r += 16 * n) {
        n = (m - r) / 16 < GROUP ? (m - r) / 16 : GROUP;
        group(w, f, qa, (size_t)r, n, 16, y, ldy, s0, s1);
    }
    if (m - r > LAST) {
        configure(m - r);
        group(w, f, qa, (size_t)r, 1, m - r, y, ldy, s0, s1);
        r = m;
    }
    _tile_release();
    if (r < m) {
        const lr_qact rest = lr_qact_at(*qa, (size_t)r * (size_t)qa->k);
        lr_gemm_few_avx512(w, &rest, m - r, y + (size_t)r * ldy, ldy, s0, s1);
    }
}
