/* gemm_fine_amx.c - rows of 11 bits times packed weights with AMX int8 tiles, for more rows than FEW.
 *
 * A row's block lies in memory as 32 high and 32 low parts: 64 bytes, a whole row of an A tile. The B tile holds the
 * block's weights twice, first times 8 and then as they are, so one tile product gives sum w (8 high + low) in 32 bits:
 * eleven bits for the tile time of eight (the time of a tile product does not depend on its k). Weights of 6 bits leave
 * no room for times 8 in a byte: they go in times 4, and the high parts pass once more. Weights of 8 bits take two
 * products with sums of their own, one of the high parts and one of the low parts. Where scales belong to 16 k, a tile
 * product takes the same A tile with the other half's weights zero. A tiles are gathered, as rows that lie far apart
 * would share few sets of the cache.
 *
 * While tiles are in use, the second vector port takes no products and no conversions (measured: multiply, fused
 * multiply-add, vpdpbusd, vcvtdq2ps, compares run at half their rate; additions and logic do not). So integers become
 * floats by two additions, and weights are shifted by vpermb.
 *
 * As in gemm_amx.c, products run a pair of units ahead of the float part, and weights with a zero point are signed. Up
 * to GROUP tiles of rows pass over a chunk of a strip while it is in L1, and so are the rows, which STRIPS strips use;
 * the pipeline of products runs on from one tile of rows to the next, and the next chunk is unpacked meanwhile.
 */
#include "cpu/gemm_amx.h"
#include "cpu/gemm_avx512.h"
#include <string.h>

enum {
    FINE_CHUNK = 8, /* blocks that are unpacked at a time */
    STRIPS = 16,    /* strips whose sums wait in a buffer between chunks */
    GROUP = 2,      /* tiles of rows: more would leave no room in L1 */
    LAST = 4,       /* rows behind the last whole tile that go the VNNI way */
};

/* Unpacked weights of a unit: `first` is the B tile with the low parts, `again` the one without. */
typedef struct fine_panel {
    uint8_t first[2 * FINE_CHUNK][1024];
    uint8_t again[2 * FINE_CHUNK][1024];
    scales512 s[FINE_CHUNK];
} __attribute__((aligned(64))) fine_panel;

INLINE bool splits(const lr_form f) { return f.lut || f.main == 8; }

/* Units of a block: halves of 16 k, or high and low parts. */
INLINE int units_of(const lr_form f) { return f.sub == 16 || splits(f) ? 2 : 1; }

/* How far a form's weights can be shifted inside a byte, at most 3. */
INLINE int shift_of(const lr_form f) { return f.main + f.extra <= 5 ? 3 : 8 - f.main - f.extra; }

/* How often the high parts pass once more. */
INLINE int again_of(const lr_form f) { return splits(f) ? 0 : (8 >> shift_of(f)) - 1; }

static void configure(const lr_form *f, int rows)
{
    lr_tile_config c = {.palette = 1};
    const bool half = splits(*f); /* high or low parts alone */
    for (int i = 0; i < 8; i++) {
        const bool a = i == 2 || i == 3, b = i == 4 || i == 5;
        c.rows[i] = (uint8_t)(!b ? rows : half ? 8 : 16);
        c.colsb[i] = a && half ? 32 : 64;
    }
    lr_tiles_load(&c);
}

/* Unpacks block `at` of a strip as block b of o, and asks for what lies `ahead` bytes further on. Zero weights are not
 * written: they are where they were in the blocks before. */
INLINE void unpack_block(const lr_form f, const lr_strip *st, size_t at, size_t ahead, const uint8_t *shifts,
                         fine_panel *o, int b)
{
    const int shift = shift_of(f), per = f.sub == 16 ? 4 : 8;
    const __m512i zero = _mm512_set1_epi8((char)f.zero), shifted = _mm512_load_si512(shifts);
    __m512i w[8];
    const uint8_t *q = st->q + at * (size_t)f.main * 64, *h = st->h + at * (size_t)f.extra * 64;
#pragma GCC unroll 8
    for (int i = 0; i < f.main; i++) _mm_prefetch(q + ahead + 64 * i, _MM_HINT_T1);
#pragma GCC unroll 2
    for (int i = 0; i < f.extra; i++) _mm_prefetch(h + ahead + 64 * i, _MM_HINT_T1);
    if (!f.super && at % 2 == 0) _mm_prefetch(st->d + ahead + at * 32, _MM_HINT_T1);
    if (!f.super && f.min && at % 2 == 0) _mm_prefetch(st->m + ahead + at * 32, _MM_HINT_T1);
    unpack512(f, q, h, w);
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        if (splits(f)) {
            _mm512_store_si512(o->first[b] + 64 * g, f.zero ? _mm512_sub_epi8(w[g], zero) : w[g]);
            continue;
        }
        const int unit = b * units_of(f) + g / per;
        const __m512i high = _mm512_permutexvar_epi8(w[g], shifted);
        if (f.zero) w[g] = _mm512_sub_epi8(w[g], zero);
        _mm512_store_si512(o->first[unit] + 64 * g, high);
        _mm512_store_si512(o->first[unit] + 64 * (g + 8), w[g]);
        if (shift < 3) _mm512_store_si512(o->again[unit] + 64 * g, high);
    }
    const scales512 s = scales_of(f, st, at);
    o->s[b].s = s.s;
    if (f.min) o->s[b].m = s.m;
    if (f.sub == 32) return;
    o->s[b].sc0 = s.sc0;
    o->s[b].sc1 = s.sc1;
    if (f.min) o->s[b].sm = s.sm;
}

/* What a tile of rows needs of a chunk. */
typedef struct fine_rows {
    int8_t q[FINE_CHUNK][16][64]; /* A tiles */
    float sx[16][FINE_CHUNK];
    float xs[16][FINE_CHUNK];     /* s_x * sum of the block */
    int32_t pair[16][FINE_CHUNK]; /* the two sums of 16, as 16 bits each */
} __attribute__((aligned(64))) fine_rows;

static void prepare(const lr_form *f, int nr, const lr_qact *qa, size_t row, size_t b, int nb, fine_rows *o)
{
    const __mmask8 k = (__mmask8)((1u << nb) - 1);
    const size_t blocks = (size_t)qa->k / 32;
    for (int r = 0; r < nr; r++) {
        const size_t at = (row + (size_t)r) * blocks + b;
        for (int i = 0; i < nb; i++) _mm512_store_si512(o->q[i][r], _mm512_loadu_si512(qa->q + (at + (size_t)i) * 64));
        const __m256 sx = _mm256_maskz_loadu_ps(k, qa->scale + at);
        _mm256_store_ps(o->sx[r], sx);
        if (!f->min) continue;
        const __m256i pair = _mm256_maskz_loadu_epi32(k, qa->sum16 + 2 * at);
        if (f->sub == 32)
            _mm256_store_ps(o->xs[r],
                            _mm256_mul_ps(sx, _mm256_cvtepi32_ps(_mm256_madd_epi16(pair, _mm256_set1_epi16(1)))));
        else
            _mm256_store_si256((__m256i *)o->pair[r], pair);
    }
}

/* Integers below 2^22, by additions. */
INLINE __m512 small_to_float(__m512i i)
{
    const __m512i magic = _mm512_set1_epi32(0x4B400000);
    return _mm512_sub_ps(_mm512_castsi512_ps(_mm512_add_epi32(i, magic)), _mm512_castsi512_ps(magic));
}

/* Adds block b, whose integer sums are in i0 (and i1), to the rows of acc. */
INLINE void add_tile(const lr_form f, const fine_panel *p, const fine_rows *ri, int b, const lr_tile_sums *i0,
                     const lr_tile_sums *i1, __m512 acc[16])
{
    const scales512 *s = &p->s[b];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
        const __m512 sx = _mm512_set1_ps(ri->sx[r][b]);
        __m512i i = _mm512_load_si512((*i0)[r]);
        if (splits(f)) i = _mm512_add_epi32(_mm512_slli_epi32(i, 3), _mm512_load_si512((*i1)[r]));
        const __m512 x0 = small_to_float(i);
        if (f.sub == 32) {
            acc[r] = _mm512_fmadd_ps(x0, _mm512_mul_ps(s->s, sx), acc[r]);
            if (f.min) acc[r] = _mm512_fmadd_ps(s->m, _mm512_set1_ps(ri->xs[r][b]), acc[r]);
        } else {
            const __m512 x1 = small_to_float(_mm512_load_si512((*i1)[r]));
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
        LR_TILE_LOAD(a, (q) + (size_t)((u) / per) * 1024 + (splits(f) ? (u) % 2 * 32 : 0), 64);                        \
        LR_TILE_LOAD(b, p->first[splits(f) ? (u) / 2 : (u)], 64);                                                      \
        _tile_zero(c);                                                                                                 \
        if (f.zero)                                                                                                    \
            _tile_dpbssd(c, a, b);                                                                                     \
        else                                                                                                           \
            _tile_dpbsud(c, a, b);                                                                                     \
        if (again_of(f)) {                                                                                             \
            LR_TILE_LOAD(b, p->again[u], 64);                                                                          \
            for (int i_ = 0; i_ < again_of(f); i_++) _tile_dpbssd(c, a, b);                                            \
        }                                                                                                              \
    }
#define SUMS(u, c, i)                                                                                                  \
    if ((u) < units) _tile_stored(c, sums[i], 64)

/* A chunk of a strip, and where the rows of a call are; and the chunk that is unpacked meanwhile. */
typedef struct fine_call {
    const fine_panel *p;
    const fine_rows *ri;
    int nb;
    bool first, last; /* of a row's chunks */
    float *kept;      /* sums between chunks: (tiles, 16, 16) */
    float *y;
    size_t ldy;
    __mmask16 mask;
    fine_panel *to;
    lr_strip next;
    size_t next_at, ahead;
    int next_nb;
    const uint8_t *shifted; /* (64) the shifted value of each u */
} fine_call;

/* Up to n of the next chunk's blocks from block b on; returns how far it came. */
INLINE int meanwhile(const lr_form f, const fine_call *a, int b, int n)
{
    for (const int end = b + n < a->next_nb ? b + n : a->next_nb; b < end; b++)
        unpack_block(f, &a->next, a->next_at + (size_t)b, a->ahead, a->shifted, a->to, b);
    return b;
}

/* nt tiles of nr rows over a chunk of one strip. */
INLINE void tiles(const lr_form f, const fine_call *a, int nt, int nr)
{
    const int per = units_of(f), units = per * a->nb, step = per == 2 ? 1 : 2, nb = a->nb;
    const size_t ldy = a->ldy;
    const fine_panel *p = a->p;
    const __mmask16 mask = a->mask;
    const int8_t *q = a->ri->q[0][0];
    const int quota = (a->next_nb + nt * ((units + 3) / 4) - 1) / (nt * ((units + 3) / 4));
    int unpacked = 0;
    lr_tile_sums sums[4];
    __m512 acc[16];
    PRODUCT(q, 0, 0, 2, 4)
    PRODUCT(q, 1, 1, 3, 5)
    for (int t = 0; t < nt; t++) {
        const fine_rows *ri = a->ri + t;
        const int8_t *next = ri[1].q[0][0]; /* not read from behind the last tile */
        float *y = a->y + (size_t)(16 * t) * ldy, *kept = a->kept + 256 * t;
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) acc[r] = a->first ? _mm512_setzero_ps() : _mm512_load_ps(kept + 16 * r);
        for (int u = 0, b = 0; u < units; u += 4, b += 2 * step) {
            PRODUCT(q, u + 2, 6, 2, 4)
            SUMS(u, 0, 0);
            PRODUCT(q, u + 3, 7, 3, 5)
            SUMS(u + 1, 1, 1);
            unpacked = meanwhile(f, a, unpacked, (quota + 1) / 2);
            add_tile(f, p, ri, b, &sums[0], &sums[1], acc);
            if (per == 1 && b + 1 < nb) add_tile(f, p, ri, b + 1, &sums[1], NULL, acc);
            const bool over = u + 4 >= units;
            const int8_t *qn = over ? next : q;
            const int un = over ? t + 1 < nt ? 0 : units : u + 4;
            PRODUCT(qn, un, 0, 2, 4)
            SUMS(u + 2, 6, 2);
            PRODUCT(qn, un + 1, 1, 3, 5)
            SUMS(u + 3, 7, 3);
            unpacked = meanwhile(f, a, unpacked, quota / 2);
            if (b + step < nb) add_tile(f, p, ri, b + step, &sums[2], &sums[3], acc);
            if (per == 1 && b + 3 < nb) add_tile(f, p, ri, b + 3, &sums[3], NULL, acc);
        }
        q = next;
        if (a->last) {
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++)
                if (r < nr) _mm512_mask_storeu_ps(y + (size_t)r * ldy, mask, acc[r]);
        } else {
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++) _mm512_store_ps(kept + 16 * r, acc[r]);
        }
    }
}

#define X(type, ...)                                                                                                   \
    static __attribute__((noinline)) void tiles_##type(const fine_call *a, int nt, int nr)                             \
    {                                                                                                                  \
        tiles(LR_FORM(__VA_ARGS__), a, nt, nr);                                                                        \
    }                                                                                                                  \
    static __attribute__((noinline)) void unpack_##type(const fine_call *a)                                            \
    {                                                                                                                  \
        meanwhile(LR_FORM(__VA_ARGS__), a, 0, FINE_CHUNK);                                                             \
    }
LR_FORM_LIST(X)
#undef X

static const struct {
    void (*tiles)(const fine_call *a, int nt, int nr);
    void (*unpack)(const fine_call *a); /* the next chunk */
} types[LR_DTYPE_MAX] = {
#define X(type, ...) [LR_##type] = {tiles_##type, unpack_##type},
    LR_FORM_LIST(X)
#undef X
};

/* The chunks of a call in their order: all chunks of STRIPS strips, strip after strip in each, then the next strips. */
typedef struct fine_walk {
    int s, c; /* the chunk: strip and first block */
    int sg;   /* first strip of the group */
} fine_walk;

/* The chunk behind w, of strips up to s1; false behind the last. */
static bool walk_on(fine_walk *w, int chunk, int blocks, int s1)
{
    const int se = w->sg + STRIPS < s1 ? w->sg + STRIPS : s1;
    if (++w->s < se) return true;
    w->c += chunk;
    if (w->c >= blocks) w->c = 0, w->sg = se;
    w->s = w->sg;
    return w->sg < s1;
}

/* nt tiles of nr rows from row `row` on (nt is 1, or nr 16), strips s0..s1-1. What is prepared of the rows for a chunk
 * serves STRIPS strips. */
static void group(const lr_gemm_w *w, const lr_form *f, const lr_qact *qa, size_t row, int nt, int nr, float *y,
                  size_t ldy, int s0, int s1)
{
    const lr_parts parts = lr_form_parts(f, w->k);
    const int blocks = w->k / 32, most = nt == 1 ? FINE_CHUNK : 6, chunks = (blocks + most - 1) / most;
    const int chunk = (blocks + chunks - 1) / chunks;
    fine_panel p[2];
    fine_rows ri[GROUP];
    float kept[STRIPS * GROUP * 256] __attribute__((aligned(64)));
    uint8_t shifted[64] __attribute__((aligned(64)));
    for (int i = 0; i < 64; i++) shifted[i] = (uint8_t)((i - f->zero) * (1 << shift_of(*f)));
    fine_walk at = {s0, 0, s0}, next = at;
    fine_call a = {.ri = ri, .ldy = ldy, .to = p, .ahead = w->strip_bytes, .shifted = shifted};
    if (f->sub == 16) memset(p, 0, sizeof p);
    if (nr < 16) memset(ri, 0, sizeof ri); /* what the float part takes for rows that are not there */
    a.next = lr_strip_at(&parts, w, s0);
    a.next_nb = chunk;
    types[w->type].unpack(&a);
    for (bool more = true; more; at = next) {
        more = walk_on(&next, chunk, blocks, s1);
        a.p = a.to;
        a.nb = a.next_nb;
        a.to = &p[a.p == p];
        a.next_nb = 0;
        if (more) {
            a.next = lr_strip_at(&parts, w, next.s);
            a.next_at = (size_t)next.c;
            a.next_nb = blocks - next.c < chunk ? blocks - next.c : chunk;
        }
        a.first = at.c == 0;
        a.last = at.c + a.nb == blocks;
        for (int t = 0; at.s == at.sg && t < nt; t++)
            prepare(f, nr, qa, row + 16 * (size_t)t, (size_t)at.c, a.nb, &ri[t]);
        a.kept = kept + (at.s - at.sg) * nt * 256;
        a.y = y + row * ldy + 16 * (size_t)at.s;
        a.mask = strip_mask(w, at.s);
        types[w->type].tiles(&a, nt, nr);
    }
}

void lr_gemm_fine_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_form *f = lr_form_of(w->type);
    int r = 0;
    if (s0 >= s1) return;
    configure(f, 16);
    for (int n; m - r >= 16; r += 16 * n) {
        n = (m - r) / 16 < GROUP ? (m - r) / 16 : GROUP;
        group(w, f, qa, (size_t)r, n, 16, y, ldy, s0, s1);
    }
    if (m - r > LAST) {
        configure(f, m - r);
        group(w, f, qa, (size_t)r, 1, m - r, y, ldy, s0, s1);
        r = m;
    }
    _tile_release();
    if (r < m) {
        const lr_qact rest = lr_qact_at(*qa, (size_t)r * (size_t)qa->k);
        lr_gemm_few_avx512(w, &rest, m - r, y + (size_t)r * ldy, ldy, s0, s1);
    }
}
