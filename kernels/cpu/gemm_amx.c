/* gemm_amx.c - the matrix product with AMX int8 tiles, for more rows than FEW; fewer go the VNNI way.
 *
 * Scales belong to 32 k, so a tile product is 16 rows x 16 features x 32 k, and its 256 integers must come back as
 * floats: store the tile, convert, times scale, add. That float part (24 cycles on two vector ports) bounds the
 * product, not the tile unit (16 cycles); the two run at once because the tiles work one pair of blocks ahead. Unpacked
 * weights are signed here (u - zero), so no correction is needed; the integers, and so the result, are the same as
 * everywhere.
 */
#include "cpu/gemm_avx512.h"
#include "cpu/gemm_amx.h"

/* Tile numbers: sums, activations, weights for two blocks in flight; then the same for a last tile of fewer rows. */
#define C0 0
#define C1 1
#define A0 2
#define A1 3
#define B0 4
#define B1 5
#define CR 6
#define AR 7

/* rest: rows of the last tile, 1..16. half: tiles of 16 k instead of 32. */
static void configure(int rest, bool half)
{
    lr_tile_config c = {.palette = 1};
    const int cols = half ? 16 : 32;
    for (int i = 0; i < 8; i++) {
        c.rows[i] = (uint8_t)(i == B0 || i == B1 ? cols / 4 : i == CR || i == AR ? rest : 16);
        c.colsb[i] = (uint16_t)(i == A0 || i == A1 || i == AR ? cols : 64);
    }
    lr_tiles_load(&c);
}

typedef int32_t tile_sums[16][16] __attribute__((aligned(64)));

/* The integer sums of block b: one tile for all 32 k, or two for the halves. */
INLINE void sums_of(const bool half, const bool rest, const int8_t *q, size_t k, const uint8_t *w, tile_sums *out)
{
    if (rest) {
        for (int i = 0; i < (half ? 2 : 1); i++) {
            LR_TILE_LOAD(AR, q + 16 * i, k);
            LR_TILE_LOAD(B0, w + 256 * i, 64);
            _tile_zero(CR);
            _tile_dpbssd(CR, AR, B0);
            _tile_stored(CR, out[i], 64);
        }
        return;
    }
    LR_TILE_LOAD(A0, q, k);
    LR_TILE_LOAD(B0, w, 64);
    _tile_zero(C0);
    _tile_dpbssd(C0, A0, B0);
    _tile_stored(C0, out[0], 64);
    if (half) {
        LR_TILE_LOAD(A1, q + 16, k);
        LR_TILE_LOAD(B1, w + 256, 64);
        _tile_zero(C1);
        _tile_dpbssd(C1, A1, B1);
        _tile_stored(C1, out[1], 64);
    }
}

/* One tile of rows over a chunk of one strip. */
INLINE void tile(const lr_form f, const bool rest, const panel *p, int c, int nb, const lr_qact *qa, size_t row, int nr,
                 const rows512 *ri, float *y, size_t ldy, __mmask16 mask)
{
    const bool half = f.sub == 16;
    const size_t k = (size_t)qa->k;
    const int8_t *q = qa->q + row * k + (size_t)c * 32;
    tile_sums buf[2][2];
    __m512 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        acc[r] = c && r < nr ? _mm512_maskz_loadu_ps(mask, y + (size_t)r * ldy) : _mm512_setzero_ps();
    sums_of(half, rest, q, k, p->w[0], buf[0]);
    for (int b = 0; b < nb; b++) {
        if (b + 1 < nb) sums_of(half, rest, q + 32 * (b + 1), k, p->w[b + 1], buf[(b + 1) & 1]);
        const tile_sums *i = (const tile_sums *)buf[b & 1];
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++)
            acc[r] = add_block(f, &p->s[b], ri, r, b, _mm512_load_si512(i[0][r]),
                               half ? _mm512_load_si512(i[1][r]) : _mm512_setzero_si512(), acc[r]);
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
    for (int r = 0; r < m; r += 16) {
        const int nr = m - r < 16 ? m - r : 16;
        rows_prepare(f, 0, nr, qa, (size_t)r, (size_t)c, nb, &ri);
        for (int s = 0; s < ns; s++) {
            float *ys = y + (size_t)r * ldy + 16 * s;
            if (nr == 16)
                tile(f, false, &p[s], c, nb, qa, (size_t)r, 16, &ri, ys, ldy, mask[s]);
            else
                tile(f, true, &p[s], c, nb, qa, (size_t)r, nr, &ri, ys, ldy, mask[s]);
        }
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
    configure(m % 16 ? m % 16 : 16, f.sub == 16);
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
    else if (m <= FEW)
        lr_gemm_few_avx512(w, qa, m, y, ldy, s0, s1);
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

void lr_gemm_fill_amx(lr_cpu_kernels *k)
{
    k->gemm = gemm;
    k->quantize = quantize;
    k->bf16 = true;
}
