/* gemm_amx.c - the matrix product with AMX int8 tiles, for more rows than FEW; fewer go the VNNI way.
 *
 * Scales belong to 32 k, so a tile product is 16 rows x 16 features x 32 k, and its 256 integers must come back as
 * floats: store the tile, convert, times scale, add. That float part (24 cycles on two vector ports) bounds the
 * product, not the tile unit (16 cycles); the two run at once because the tiles work a pair of blocks ahead. Unpacked
 * weights are signed here (u - zero), so no correction is needed; the integers, and so the result, are the same as
 * everywhere.
 */
#include "cpu/gemm_avx512.h"
#include "cpu/gemm_amx.h"

/* Tile numbers: sums of two pairs of units, activations, weights. A unit is what one tile product does: a block of 32
 * k, or half of one where scales belong to 16 k. */
#define C0 0
#define C1 1
#define C2 6
#define C3 7
#define A0 2
#define A1 3
#define B0 4
#define B1 5

/* Tiles for `rows` rows. half: units of 16 k. */
static void configure(int rows, bool half)
{
    lr_tile_config c = {.palette = 1};
    const int cols = half ? 16 : 32;
    for (int i = 0; i < 8; i++) {
        c.rows[i] = (uint8_t)(i == B0 || i == B1 ? cols / 4 : rows);
        c.colsb[i] = (uint16_t)(i == A0 || i == A1 ? cols : 64);
    }
    lr_tiles_load(&c);
}

/* A pair of units: products now, their sums to memory later. */
#define PRODUCT(u, c, a, b)                                                                                            \
    if ((u) < units) {                                                                                                 \
        LR_TILE_LOAD(a, q + (size_t)(u)*cols, k);                                                                      \
        LR_TILE_LOAD(b, p->w[0] + (size_t)(u)*cols * 16, 64);                                                          \
        _tile_zero(c);                                                                                                 \
        _tile_dpbssd(c, a, b);                                                                                         \
    }
#define SUMS(u, c, i)                                                                                                  \
    if ((u) < units) _tile_stored(c, sums[i], 64)

/* What a tile of rows needs of up to CHUNK blocks besides q. */
typedef struct rows512 {
    float sx[16][CHUNK];
    float xs[16][CHUNK];
    int32_t sums[16][CHUNK]; /* the two sums of 16, as 16 bits each */
} rows512;

INLINE void rows_prepare(const lr_form f, const int nr, const lr_qact *qa, size_t row, size_t b, int nb, rows512 *o)
{
    const __mmask16 k = (__mmask16)((1u << nb) - 1);
    for (int r = 0; r < nr; r++) {
        const size_t at = (row + (size_t)r) * ((size_t)qa->k / 32) + b;
        _mm512_storeu_ps(o->sx[r], _mm512_maskz_loadu_ps(k, qa->scale + at));
        if (f.min && f.sub == 32) _mm512_storeu_ps(o->xs[r], _mm512_maskz_loadu_ps(k, qa->xs + at));
        if (f.min && f.sub == 16) _mm512_storeu_si512(o->sums[r], _mm512_maskz_loadu_epi32(k, qa->sum16 + 2 * at));
    }
}

/* Adds block b, whose integer sums are in i0 (and i1). */
INLINE void add_tile(const lr_form f, const panel *p, const rows512 *ri, int b, const lr_tile_sums *i0,
                     const lr_tile_sums *i1, __m512 acc[16])
{
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        acc[r] = add_sums(f, &p->s[b], &ri->sx[r][b], &ri->xs[r][b], &ri->sums[r][b], _mm512_load_si512((*i0)[r]),
                          f.sub == 16 ? _mm512_load_si512((*i1)[r]) : _mm512_setzero_si512(), acc[r]);
}

/* One tile of rows over a chunk of one strip. The products run a pair ahead of the float part. */
INLINE void tile(const lr_form f, const panel *p, int c, int nb, const lr_qact *qa, size_t row, int nr,
                 const rows512 *ri, float *y, size_t ldy, __mmask16 mask)
{
    const bool half = f.sub == 16;
    const size_t k = (size_t)qa->k, cols = half ? 16 : 32;
    const int units = half ? 2 * nb : nb, step = half ? 1 : 2; /* step: blocks of a pair */
    const int8_t *q = qa->q + row * k + (size_t)c * 32;
    lr_tile_sums sums[4];
    __m512 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        acc[r] = c && r < nr ? _mm512_maskz_loadu_ps(mask, y + (size_t)r * ldy) : _mm512_setzero_ps();
    PRODUCT(0, C0, A0, B0)
    PRODUCT(1, C1, A1, B1)
    for (int u = 0, b = 0; u < units; u += 4, b += 2 * step) {
        PRODUCT(u + 2, C2, A0, B0)
        SUMS(u, C0, 0);
        PRODUCT(u + 3, C3, A1, B1)
        SUMS(u + 1, C1, 1);
        add_tile(f, p, ri, b, &sums[0], &sums[1], acc);
        if (!half && b + 1 < nb) add_tile(f, p, ri, b + 1, &sums[1], NULL, acc);
        PRODUCT(u + 4, C0, A0, B0)
        SUMS(u + 2, C2, 2);
        PRODUCT(u + 5, C1, A1, B1)
        SUMS(u + 3, C3, 3);
        if (b + step < nb) add_tile(f, p, ri, b + step, &sums[2], &sums[3], acc);
        if (!half && b + 3 < nb) add_tile(f, p, ri, b + 3, &sums[3], NULL, acc);
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        if (r < nr) _mm512_mask_storeu_ps(y + (size_t)r * ldy, mask, acc[r]);
}

/* All rows over a chunk of ns strips. */
INLINE void all_rows(const lr_form f, const int ns, const panel *p, int c, int nb, const lr_qact *qa, int m, float *y,
                     size_t ldy, const __mmask16 *mask)
{
    rows512 ri;
    const int rest = m % 16;
    for (int r = 0; r < m; r += 16) {
        const int nr = m - r < 16 ? m - r : 16;
        if (rest && (r == 0 || nr < 16)) configure(nr, f.sub == 16);
        rows_prepare(f, nr, qa, (size_t)r, (size_t)c, nb, &ri);
        for (int s = 0; s < ns; s++)
            tile(f, &p[s], c, nb, qa, (size_t)r, nr, &ri, y + (size_t)r * ldy + 16 * s, ldy, mask[s]);
    }
}

#define KIND(name, sub, min)                                                                                           \
    static __attribute__((noinline)) void name(const panel *p, int ns, int zero, int c, int nb, const lr_qact *qa,     \
                                               int m, float *y, size_t ldy, const __mmask16 *mask)                     \
    {                                                                                                                  \
        (void)zero;                                                                                                    \
        all_rows(LR_FORM(8, 0, sub, 0, 0, min, 0, 0), ns, p, c, nb, qa, m, y, ldy, mask);                              \
    }
KIND(kind32, 32, 0)
KIND(kind32_min, 32, 1)
KIND(kind16, 16, 0)
KIND(kind16_min, 16, 1)

static many512 *const many[4] = {kind32, kind32_min, kind16, kind16_min};

#define X(type, ...)                                                                                                   \
    static __attribute__((noinline)) void unpack_##type(const lr_strip *st, size_t b0, int nb, panel *o)               \
    {                                                                                                                  \
        unpack_panel(LR_FORM(__VA_ARGS__), true, st, b0, nb, o);                                                       \
    }
LR_FORM_LIST(X)
#undef X

static void (*const unpack[LR_DTYPE_MAX])(const lr_strip *st, size_t b0, int nb, panel *o) = {
#define X(type, ...) [LR_##type] = unpack_##type,
    LR_FORM_LIST(X)
#undef X
};

static void product(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_form f = *lr_form_of(w->type);
    const lr_parts parts = lr_form_parts(&f, w->k);
    const int blocks = w->k / 32;
    panel p[2];
    configure(16, f.sub == 16);
    for (int s = s0, ns; s < s1; s += ns) {
        ns = s + 1 < s1 ? 2 : 1;
        const lr_strip st[2] = {lr_strip_at(&parts, w, s), lr_strip_at(&parts, w, s + ns - 1)};
        const __mmask16 mask[2] = {strip_mask(w, s), strip_mask(w, s + ns - 1)};
        for (int c = 0; c < blocks; c += CHUNK) {
            const int nb = blocks - c < CHUNK ? blocks - c : CHUNK;
            for (int i = 0; i < ns; i++) unpack[w->type](&st[i], (size_t)c, nb, &p[i]);
            many[kind_of(f)](p, ns, 0, c, nb, qa, m, y + 16 * (size_t)s, ldy, mask);
        }
    }
    _tile_release();
}

static void gemm(const lr_gemm_w *w, const lr_qact *qa, const float *xf, size_t ldx, int m, float *y, size_t ldy,
                 int s0, int s1)
{
    if (!w->packed)
        lr_gemm_plain_avx512(w, xf, ldx, m, y, ldy, s0, s1);
    else if (qa->h)
        lr_gemm_bf16_amx(w, qa, m, y, ldy, s0, s1);
    else if (lr_gemm_few_amx_takes(w, qa, m, s1 - s0))
        lr_gemm_few_amx(w, qa, m, y, ldy, s0, s1);
    else if (m <= WIDE_FEW && qa->wide)
        lr_gemm_few_wide_avx512(w, qa, m, y, ldy, s0, s1);
    else if (qa->wide)
        lr_gemm_wide_amx(w, qa, m, y, ldy, s0, s1);
    else if (m <= FEW)
        lr_gemm_few_avx512(w, qa, m, y, ldy, s0, s1);
    else if (qa->fine)
        lr_gemm_fine_amx(w, qa, m, y, ldy, s0, s1);
    else if (s0 < s1)
        product(w, qa, m, y, ldy, s0, s1);
}

static void quantize(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1)
{
    if (qa.h)
        lr_quantize_bf16_amx(x, ldx, m, qa, c0, c1);
    else
        lr_quantize_avx512(x, ldx, m, qa, c0, c1);
}

static const char *way(const lr_gemm_w *w, const lr_qact *qa, int m)
{
    if (w->packed && qa->h) return "bf16 tiles";
    if (w->packed && lr_gemm_few_amx_takes(w, qa, m, w->n / LR_STRIP)) return "int8 tiles, parts of rows stacked";
    return !w->packed || m <= (qa->wide ? WIDE_FEW : FEW) ? lr_way_avx512(w, qa, m)
           : qa->wide                                     ? "int8 tiles, 14-bit rows"
           : qa->fine                                     ? "int8 tiles, 11-bit rows"
                                                          : "int8 tiles";
}

void lr_gemm_fill_amx(lr_cpu_kernels *k)
{
    k->gemm = gemm;
    k->way = way;
    k->quantize = quantize;
    k->bf16 = true;
    k->fine = true;
}
