/* attn_tiles.h - a step of attention on AMX tiles; included by attn_vec.h for attn_amx.c.
 *
 * Keys and values in bfloat16, or integers of 8 bits, which are bfloat16 numbers as well, go into the tiles without
 * rounding. Queries and weights go in as two planes of bfloat16, the first 8 bits of a number and the next 8
 * (attn_planes.h). Sums are float32. Scales of Q8_0 are multiplied into the sums of 32 dimensions (keys), and into the
 * weights (values).
 *
 * Order of a sum: 32 dimensions (or positions) after 32; of these first the first planes, then the second ones, each as
 * the tile unit adds them up. It does not depend on how many pairs go in together.
 *
 * A tile of keys or values holds, row after row, two neighbouring dimensions (positions) of 16 positions (dimensions).
 * What a row does not see has weight 0: values that nobody sees are put in as 0, and values that only some rows see and
 * that are not finite are run row by row.
 */
#ifndef LR_KERNELS_CPU_ATTN_TILES_H
#define LR_KERNELS_CPU_ATTN_TILES_H
#include "cpu/gemm_amx.h"

enum {
    TILE_BYTES = 1024,
    ROW_TILES = PANEL / 16 /* tiles of 16 columns side by side */
};

/* Whether a task's products run on tiles: depends on nothing but the model's shape and the type of its KV. */
static bool takes_tiles(const lr_attn_task *t)
{
    const bool keys = t->k_type == LR_BF16 || t->k_type == LR_Q8_0,
               values = t->v_type == LR_BF16 || t->v_type == LR_Q8_0;
    return keys && values && t->head_dim % 32 == 0 && t->head_dim <= TILE_DIM_MAX;
}

/* Tiles 0 .. 3 sums, 4 and 5 queries or weights, 6 and 7 keys or values. */
static void use_rows(const work *w, int rows)
{
    lr_tile_config c = {.palette = 1};
    if (*w->rows == rows) return;
    for (int i = 0; i < 8; i++) {
        c.rows[i] = (uint8_t)(i < 6 ? rows : 16);
        c.colsb[i] = 64;
    }
    lr_tiles_load(&c);
    *w->rows = rows;
}

/* ---- keys and values -> tiles ---- */

/* The lines of the step at base. */
static void open_ahead(const lr_attn_task *t, const work *w, int base)
{
    const size_t n = (size_t)t->head_dim * t->block_size, h = (size_t)t->kv_head;
    lines *a = w->ahead;
    int slot;
    *a = (lines){.bytes = {n * lr_kv_elem(t->k_type), n * lr_kv_elem(t->v_type)}};
    a->kind = 2;
    if (t->block_size % LR_ATTN_TILE || LR_ATTN_STEP % t->block_size || base > t->pos) return;
    for (int i = 0; i < LR_ATTN_STEP && base + i <= t->pos; i += t->block_size) {
        a->from[0][a->n] = lr_attn_block(t, t->k, base + i, &slot) + h * a->bytes[0];
        a->from[1][a->n++] = lr_attn_block(t, t->v, base + i, &slot) + h * a->bytes[1];
    }
    a->kind = 0;
    a->some = (int)((a->bytes[0] + a->bytes[1]) * a->n / ((size_t)t->head_dim * 20)) + 1;
}

/* Asks for n lines. */
VEC_INLINE void ask_lines(const work *w, int n)
{
    lines *a = w->ahead;
    for (; n > 0 && a->kind < 2; n--) {
        ask_next(a->from[a->kind][a->i] + a->at);
        if (++a->i < a->n) continue;
        a->i = 0;
        a->at += 64;
        if (a->at < a->bytes[a->kind]) continue;
        a->at = 0;
        a->kind++;
    }
}

/* Two rows of 16 numbers, pair by pair, as bfloat16. */
VEC_INLINE __m512i pairs_of(const char *a, const char *b, const kind in)
{
    if (in == IN_Q8) {
        const __m512i high = _mm512_set1_epi32((int)0xffff0000);
        const __m512i x = _mm512_castps_si512(vf_load_i8((const int8_t *)a));
        const __m512i y = _mm512_castps_si512(vf_load_i8((const int8_t *)b));
        return _mm512_ternarylogic_epi32(high, y, _mm512_srli_epi32(x, 16), 0xca); /* y where the mask is set, else x */
    }
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)a));
    return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(x, _mm256_loadu_si256((const void *)b), 1));
}

/* n dimensions of the panel of keys, of aligned tile i of the step. */
VEC_INLINE void tile_keys(const work *w, const step *s, int i, int n, const kind in)
{
    const size_t ldk = s->ldk * in_bytes(in);
    const char *k = s->k[i];
    for (int d0 = 0; d0 < n; d0 += 32) {
        char *to = (char *)w->kt + (d0 / 32 * ROW_TILES + i) * TILE_BYTES;
        for (int d = 0; d < 32; d += 2, k += 2 * ldk, to += 64)
            _mm512_store_si512((void *)to, pairs_of(k, k + ldk, in));
        ask_lines(w, w->ahead->some / 3);
    }
}

/* n columns of the panel of values, of aligned tile i; places outside of a .. b (of the step) are put in as 0. */
VEC_INLINE void tile_values(const work *w, const step *s, int i, int n, int a, int b, const kind in)
{
    static const char none[32];
    const size_t ldv = s->ldv * in_bytes(in);
    const char *v = s->v[i];
    for (int j = 0; j < LR_ATTN_TILE; j += 2, v += 2 * ldv) {
        char *to = (char *)w->kt + i / 2 * ROW_TILES * TILE_BYTES + (i % 2 * 8 + j / 2) * 64;
        const int at = i * LR_ATTN_TILE + j;
        const bool one = at >= a && at <= b, two = at + 1 >= a && at + 1 <= b;
        for (int d = 0; d < n; d += 16, to += TILE_BYTES) {
            const char *x = v + (size_t)d * in_bytes(in);
            _mm512_store_si512((void *)to, pairs_of(one ? x : none, two ? x + ldv : none, in));
        }
        if (j % 8 == 6) ask_lines(w, w->ahead->some / 3);
    }
}

/* The slow way for blocks of any size: places a .. b, n dimensions from d0 on; the rest of the tiles is left. */
static void gather_tiles(const lr_attn_task *t, const work *w, step *s, bool keys, int d0, int n, int a, int b)
{
    const size_t dim = (size_t)w->dim, bs = (size_t)t->block_size, h = (size_t)t->kv_head;
    uint16_t *to = (uint16_t *)w->kt;
    s->in = kind_of(keys ? t->k_type : t->v_type, keys);
    for (int j = a; j <= b; j++) {
        int slot;
        const char *part = lr_attn_block(t, keys ? t->k : t->v, s->base + j, &slot);
        for (int i = 0; i < n; i++) {
            const size_t d = (size_t)(d0 + i), at = keys ? (h * dim + d) * bs + slot : (h * bs + slot) * dim + d;
            const int row = keys ? i : j, col = keys ? j : i;
            const uint16_t *scale;
            uint16_t x = s->in == IN_Q8 ? lr_f32_to_bf16((float)lr_kv_int(t, part, keys, d, (size_t)slot, &scale))
                                        : ((const uint16_t *)part)[at];
            to[(row / 32 * ROW_TILES + col / 16) * 512 + row % 32 / 2 * 32 + col % 16 * 2 + row % 2] = x;
        }
    }
}

static void keys_to_tiles(const lr_attn_task *t, const work *w, step *s, int d0, int d1)
{
    if (!s->aligned) {
        gather_tiles(t, w, s, true, d0, d1 - d0, s->lo, s->hi);
        return;
    }
    find_keys(t, w, s, d0);
    for (int i = 0; i < TILES; i++) {
        if (!tile_seen(s, i)) continue;
        if (s->in == IN_Q8)
            tile_keys(w, s, i, d1 - d0, IN_Q8);
        else
            tile_keys(w, s, i, d1 - d0, IN_BF16);
    }
}

/* Of which places a .. b are wanted; the others are 0. */
static void values_to_tiles(const lr_attn_task *t, const work *w, step *s, int d0, int n, int a, int b)
{
    if (!s->aligned) {
        memset(w->kt, 0, (size_t)2 * ROW_TILES * TILE_BYTES);
        gather_tiles(t, w, s, false, d0, n, a, b);
        return;
    }
    find_values(t, w, s, d0);
    for (int i = 0; i < TILES; i++) {
        const int from = tile_seen(s, i) ? a : LR_ATTN_STEP;
        if (s->in == IN_Q8)
            tile_values(w, s, i, n, from, b, IN_Q8);
        else
            tile_values(w, s, i, n, from, b, IN_BF16);
    }
}

/* ---- products ---- */

#define COLUMN(n, x)                                                                                                   \
    do {                                                                                                               \
        LR_TILE_LOAD(x, b + (k * ROW_TILES + (n)) * TILE_BYTES, 64);                                                   \
        _tile_dpbf16ps(n, 4, x);                                                                                       \
        _tile_dpbf16ps(n, 5, x);                                                                                       \
        ask_lines(w, w->ahead->some);                                                                                  \
    } while (0)

#define OPEN_SUMS(n)                                                                                                   \
    do {                                                                                                               \
        if (fresh)                                                                                                     \
            _tile_zero(n);                                                                                             \
        else                                                                                                           \
            LR_TILE_LOAD(n, sums + (n)*16, ld);                                                                        \
    } while (0)

/* sums (rows, 16 * columns), ld bytes apart: += A B over nk tiles of 32, from 0 if fresh. a: rows, lda bytes apart,
 * their second plane lda / 2 bytes behind the first; b: tiles, ROW_TILES apart. */
VEC_INLINE void product(const work *w, float *sums, size_t ld, bool fresh, const char *a, size_t lda, const char *b,
                        int nk, const int columns)
{
    OPEN_SUMS(0);
    OPEN_SUMS(1);
    if (columns > 2) OPEN_SUMS(2);
    if (columns > 2) OPEN_SUMS(3);
    for (int k = 0; k < nk; k++, a += 64) {
        LR_TILE_LOAD(4, a, lda);
        LR_TILE_LOAD(5, a + lda / 2, lda);
        COLUMN(0, 6);
        COLUMN(1, 7);
        if (columns > 2) COLUMN(2, 6);
        if (columns > 2) COLUMN(3, 7);
    }
    _tile_stored(0, sums, ld);
    _tile_stored(1, sums + 16, ld);
    if (columns > 2) _tile_stored(2, sums + 32, ld);
    if (columns > 2) _tile_stored(3, sums + 48, ld);
}

/* Pairs of a register block when `left` are left: even shares. */
static int tile_pairs(int left)
{
    const int blocks = (left + 15) / 16;
    return (left + blocks - 1) / blocks;
}

/* Scales of the step's places a .. b, 0 for the others: of dimensions group * 32 .. of the panel, keys or values. */
static void scales_of(const lr_attn_task *t, const step *s, bool keys, int d0, size_t group, int a, int b, float *out)
{
    if (!s->aligned) {
        memset(out, 0, LR_ATTN_STEP * sizeof *out);
        for (int j = a > s->lo ? a : s->lo, slot; j <= b && j <= s->hi; j++) {
            const uint16_t *x;
            const char *part = lr_attn_block(t, keys ? t->k : t->v, s->base + j, &slot);
            lr_kv_int(t, part, keys, (size_t)d0 + group * 32, (size_t)slot, &x);
            out[j] = vec_f16(*x);
        }
        return;
    }
    for (int i = 0; i < TILES; i++, out += 16) {
        const int lo = a - i * 16, hi = b - i * 16;
        if (!tile_seen(s, i) || lo > 15 || hi < 0) {
            vf_store(out, vf_set1(0));
            continue;
        }
        const uint32_t seen = (0xffffu << (lo > 0 ? lo : 0)) & (0xffffu >> (hi < 15 ? 15 - hi : 0));
        uint16_t apart[16];
        const uint16_t *x = keys ? s->ks[i] + group * s->lds : apart;
        for (size_t j = 0; !keys && j < 16; j++) apart[j] = s->vs[i][j * s->lds + group];
        vf_store(out, vf_select(vm_from_bits(seen & 0xffff), vf_load_f16(x), vf_set1(0)));
    }
}

/* Scores of Q8_0: those of 32 dimensions in a buffer, times their scales, on top of those before. */
static void scaled_scores(const lr_attn_task *t, const work *w, const step *s, int d0, int d1)
{
    const size_t lda = (size_t)w->dim * 4, ld = LR_ATTN_STEP * sizeof(float);
    float scales[PANEL / 32][LR_ATTN_STEP] __attribute__((aligned(64))), *part = w->vt;
    for (int g = 0; g < (d1 - d0) / 32; g++) scales_of(t, s, true, d0, (size_t)g, 0, LR_ATTN_STEP - 1, scales[g]);
    for (int i = 0, nr; i < w->pairs; i += nr) {
        nr = tile_pairs(w->pairs - i);
        use_rows(w, nr);
        for (int g = 0; g < (d1 - d0) / 32; g++) {
            const char *q = (const char *)w->q + (size_t)i * lda + (size_t)(d0 + g * 32) * 2;
            float *p = w->p + (size_t)i * LR_ATTN_STEP;
            product(w, part, ld, true, q, lda, (const char *)w->kt + g * ROW_TILES * TILE_BYTES, 1, 4);
            for (int j = 0; j < nr * LR_ATTN_STEP; j += VW) {
                const vf scale = vf_load(scales[g] + j % LR_ATTN_STEP), x = vf_load(part + j);
                vf_store(p + j, d0 + g ? vf_fma(x, scale, vf_load(p + j)) : vf_mul(x, scale));
            }
        }
    }
}

/* The panel's part of all scores -> w->p. */
static void tile_scores(const lr_attn_task *t, const work *w, const step *s, int d0, int d1)
{
    const size_t lda = (size_t)w->dim * 4;
    if (s->in == IN_Q8) {
        scaled_scores(t, w, s, d0, d1);
        return;
    }
    for (int i = 0, nr; i < w->pairs; i += nr) {
        const char *q = (const char *)w->q + (size_t)i * lda + (size_t)d0 * 2;
        nr = tile_pairs(w->pairs - i);
        use_rows(w, nr);
        product(w, w->p + (size_t)i * LR_ATTN_STEP, LR_ATTN_STEP * sizeof(float), d0 == 0, q, lda, (const char *)w->kt,
                (d1 - d0) / 32, 4);
    }
}

/* Adds the columns of values of Q8_0 to the sums of pairs i .. i + nr - 1: the weights times the scales of 32 columns
 * are split into planes for each. */
static void scaled_sums(const work *w, const float *scales, float *sums, int n, int i, int nr)
{
    const float *p = w->p + (size_t)i * LR_ATTN_STEP;
    for (int g = 0; g < n / 32; g++, scales += LR_ATTN_STEP) {
        char *to = (char *)w->vt;
        for (int j = 0; j < nr * LR_ATTN_STEP; j += 32) {
            const float *f = scales + j % LR_ATTN_STEP;
            split_32(to + j / LR_ATTN_STEP * 256 + j % LR_ATTN_STEP * 2, 128, vf_mul(vf_load(p + j), vf_load(f)),
                     vf_mul(vf_load(p + j + 16), vf_load(f + 16)));
        }
        product(w, sums + g * 32, (size_t)w->dp * 4, false, to, 256, (const char *)w->kt + g * 2 * TILE_BYTES, 2, 2);
    }
}

/* Adds the panel of values, n columns from d0 on, to the sums of pairs i0 .. i1 - 1; scales: of Q8_0. */
static void tile_sums(const work *w, const step *s, float *acc, const float *scales, int d0, int n, int i0, int i1)
{
    const size_t ld = (size_t)w->dp * 4, lda = LR_ATTN_STEP * 4;
    for (int i = i0, nr; i < i1; i += nr) {
        const char *p = (const char *)w->p + (size_t)i * lda, *v = (const char *)w->kt;
        float *sums = acc + (size_t)i * w->dp + d0;
        nr = tile_pairs(i1 - i);
        use_rows(w, nr);
        if (s->in == IN_Q8)
            scaled_sums(w, scales, sums, n, i, nr);
        else if (n == PANEL)
            product(w, sums, ld, false, p, lda, v, 2, 4);
        else
            product(w, sums, ld, false, p, lda, v, 2, 2);
    }
}

/* ---- a step ---- */

/* Rows that see nothing of the step. */
static void no_weights(const work *w, int i0, int i1)
{
    memset(w->p + (size_t)i0 * LR_ATTN_STEP, 0, (size_t)(i1 - i0) * LR_ATTN_STEP * sizeof(float));
    for (int i = i0; i < i1; i++) w->keep[i] = 1;
}

static void tile_weights(const lr_attn_task *t, const work *w, const step *s, state *st)
{
    int a, b;
    if (s->even) softmax(w, st, 0, w->pairs, 0, LR_ATTN_STEP - 1);
    for (int r = 0, g = t->n_group; !s->even && r < t->n_rows; r++) {
        if (row_places(t, s, r, &a, &b))
            softmax(w, st, r * g, (r + 1) * g, a, b);
        else
            no_weights(w, r * g, (r + 1) * g);
    }
}

static void rescale_all(const work *w, float *acc)
{
    const size_t dp = (size_t)w->dp;
    for (int i = 0; i < w->pairs; i++, acc += dp) {
        if (w->keep[i] == 1) continue;
        const vf keep = vf_set1(w->keep[i]);
        for (size_t d = 0; d < dp; d += VW) vf_store(acc + d, vf_mul(vf_load(acc + d), keep));
    }
}

/* Whether all values of the panel are finite: those of Q8_0 if their scales are. */
static bool all_finite(const work *w, const step *s, const float *scales)
{
    const __m512i top = _mm512_set1_epi16(0x7f80);
    const size_t n = s->in == IN_Q8 ? sizeof(float) * PANEL / 32 * LR_ATTN_STEP : 2 * ROW_TILES * TILE_BYTES;
    const char *v = s->in == IN_Q8 ? (const char *)scales : (const char *)w->kt;
    __mmask32 bad = 0;
    for (size_t i = 0; i < n; i += 64) {
        const __m512i x = _mm512_and_si512(_mm512_loadu_si512((const void *)(v + i)), top);
        const __mmask32 here = _mm512_cmpeq_epi16_mask(x, top);
        bad |= s->in == IN_Q8 ? here & 0xaaaaaaaa : here; /* of a float the upper half counts */
    }
    return !bad;
}

static void open_panel(const lr_attn_task *t, const work *w, step *s, int d0, int n, int a, int b, float *scales)
{
    values_to_tiles(t, w, s, d0, n, a, b);
    if (s->in != IN_Q8) return;
    for (int g = 0; g < n / 32; g++) scales_of(t, s, false, d0, (size_t)g, a, b, scales + (size_t)g * LR_ATTN_STEP);
}

static void tile_step(const lr_attn_task *t, const work *w, step *s, state *st)
{
    float scales[PANEL / 32 * LR_ATTN_STEP] __attribute__((aligned(64))) = {0};
    int a, b;
    open_ahead(t, w, s->base + LR_ATTN_STEP);
    for (int d0 = 0; d0 < w->dim; d0 += PANEL) {
        const int d1 = d0 + PANEL < w->dim ? d0 + PANEL : w->dim;
        keys_to_tiles(t, w, s, d0, d1);
        tile_scores(t, w, s, d0, d1);
    }
    tile_weights(t, w, s, st);
    rescale_all(w, st->acc);
    for (int d0 = 0; d0 < w->dim; d0 += PANEL) {
        const int n = d0 + PANEL < w->dim ? PANEL : w->dim - d0;
        open_panel(t, w, s, d0, n, s->lo, s->hi, scales);
        if (s->even || t->n_rows == 1 || all_finite(w, s, scales)) {
            tile_sums(w, s, st->acc, scales, d0, n, 0, w->pairs);
            continue;
        }
        for (int r = 0, g = t->n_group; r < t->n_rows; r++) {
            if (!row_places(t, s, r, &a, &b)) continue;
            open_panel(t, w, s, d0, n, a, b, scales);
            tile_sums(w, s, st->acc, scales, d0, n, r * g, (r + 1) * g);
        }
    }
}

#endif
