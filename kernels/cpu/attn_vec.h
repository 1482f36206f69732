/* attn_vec.h - paged attention on the vector words; included by one attn_<isa>.c each, behind vec_<isa>.h.
 *
 * A step (64 positions) is two small products with a softmax between: scores (pairs, 64) = Q K^T, then the sums
 * (pairs, D) += P V. Both run in register blocks of VEC_ROWS pairs by VEC_COLS registers, the lanes being keys in the
 * one and dimensions in the other, so each element has one chain of fused multiply-adds: over d, and over positions,
 * both ascending. Cutting the pairs or the positions of a chain into several calls changes no bit: what is in between
 * is stored and loaded as float32.
 *
 * Where a step's keys and values come from does not matter either, as their conversion to float32 is exact or rounded
 * once: few pairs (decode) convert in registers as they go, many pairs (prefill) once into scratch; blocks that are no
 * multiple of 16 slots are gathered into scratch. A row touches only values that it sees; scores that it does not see
 * are computed with the tile and dropped.
 *
 * Tasks that read the same slots (a gang) take these steps together, as one task of more pairs; what a row sees before
 * and behind is run task by task. A row's steps and their order are the same as if it were alone.
 *
 * Scores are in units of log2 e: softmax is 2^(s - max), and the factor is in the queries already.
 * Bound by: decode memory, prefill multiply-adds (figures in kernels/README.md).
 */
#include "cpu/attn_int.h"
#include "cpu/attn_put_vec.h"
#include "cpu/vec_math.h"
#include <limits.h>
#include <math.h>
#include <string.h>

#define STEP_V     (LR_ATTN_STEP / VW)
#define TILES      (LR_ATTN_STEP / LR_ATTN_TILE)
#define PANEL      64 /* dimensions of keys, or columns of values, that are worked on at a time */
#define DIRECT_MAX 8  /* pairs up to which halves are converted in registers */
#define LOG2E      1.44269504088896341f

typedef enum kind { IN_F32, IN_F16, IN_BF16, IN_Q8, IN_Q4, IN_Q6 } kind; /* Q4, Q6: values and keys of Q4_0 */

/* A step of a task: positions base .. base+63, of which the rows see places lo .. hi (together) and c0 .. c1 (each of
 * them; empty if c1 < c0). Then the panel in hand: dimension d of tile i's keys at k[i] + d * ldk, or position j of the
 * tile's values at v[i] + j * ldv (in values). */
typedef struct step {
    int base, lo, hi, c0, c1;
    bool even;                              /* all rows see all of it */
    bool aligned;                           /* tiles lie in one piece each */
    bool direct;                            /* and are read where they lie */
    const char *kb[TILES], *vb[TILES];      /* aligned: the tile's block, */
    size_t slot[TILES];                     /* and its first slot there */
    ptrdiff_t k_next[TILES], v_next[TILES]; /* not for tiles: how far from it that of the next step is, 0: none */
    const char *k[TILES], *v[TILES];
    const uint16_t *ks[TILES],
        *vs[TILES]; /* from IN_Q8 on: scales, of 16 keys (lds apart a group), of a position's groups */
    size_t ldk, ldv, lds;
    size_t upper; /* IN_Q6: from k[i] to the upper bits of the same panel and tile */
    int run;      /* positions whose values lie one behind the other: a tile, or the step */
    kind in;
} step;

/* The running state of the pairs over a chunk, or over chunks. */
typedef struct state {
    float *m;   /* (P) largest score */
    float *l;   /* (P) sum of weights */
    float *acc; /* (P, dp) sum of weighted values */
} state;

/* What tiles ask for of the next step, line by line while this one computes. */
typedef struct lines {
    const char *from[2][TILES]; /* (n) where a block's keys, and its values, begin */
    size_t bytes[2], at;        /* of a block's keys, of its values; where to ask now */
    int n, i, kind,
        some; /* blocks; the block, and keys or values, to ask for now; lines for one place where is asked */
} lines;

typedef struct work {
    int dim, dp; /* head_dim, and rounded up to 16 */
    int pairs;   /* P */
    bool tiles;  /* both products on tiles: attn_tiles.h */
    bool planes; /* and weights are left as two planes */
    lines *ahead;
    int *rows;      /* tiles are set up for this many rows */
    float cap;      /* softcap in score units, 0 = none */
    float *q;       /* (P, dim) queries times the factor of the scores; tiles: in two planes */
    float *p;       /* (P, STEP) scores, then weights; or these in two planes */
    float *lanes;   /* (P, 16) sums of weights, lane by lane */
    float *keep;    /* (P) factor for the sum so far */
    float *kt, *vt; /* (dim, STEP), (dp / PANEL, STEP, PANEL) */
    state sum, one;
} work;

#define UNROLL _Pragma("GCC unroll 24")

VEC_INLINE size_t in_bytes(kind in) { return in == IN_F32 ? 4 : in < IN_Q8 ? 2 : 1; }

/* Dimension, or column, d of a panel: the place of its values (lr_kv_place). */
VEC_INLINE size_t in_place(kind in, size_t d) { return in >= IN_Q4 ? lr_kv_place(LR_Q4_0, d) : d; }

/* VW values of a part, times scale if they are scaled; d tells where IN_Q4 and IN_Q6 have them in their bytes, and
 * upper where the upper bits of IN_Q6 are. */
VEC_INLINE vf in_load(kind in, const char *p, const char *upper, size_t d, vf scale)
{
    switch (in) {
    case IN_F32:
        return vf_load((const float *)p);
    case IN_F16:
        return vf_load_f16((const uint16_t *)p);
    case IN_BF16:
        return vf_load_bf16((const uint16_t *)p);
    case IN_Q8:
        return vf_mul(vf_load_i8((const int8_t *)p), scale);
    case IN_Q4:
        return vf_mul(vf_load_i4((const int8_t *)p, d % LR_KV_GROUP < LR_KV_GROUP / 2), scale);
    default:
        return vf_mul(vf_load_i6((const int8_t *)p, (const int8_t *)upper, d % LR_KV_GROUP / 8), scale);
    }
}

/* Asks for the line at p, of the step behind the one in hand, which lies anywhere in memory: one for each line that is
 * read, so that what is read meanwhile does not wait. */
VEC_INLINE void ask_next(const char *p) { __builtin_prefetch(p, 0, 2); }

/* ---- the two products ---- */

/* Adds the panel's dimensions d0 .. d1-1 to the scores of pairs i0 .. i0+nr-1 (the first panel begins them). */
VEC_INLINE void scores_block(const work *w, const step *s, int i0, size_t d0, size_t d1, const int nr, const kind in)
{
    const size_t elem = in_bytes(in), ldk = s->ldk * elem, dim = (size_t)w->dim;
    for (int g = 0; g < STEP_V; g += VEC_COLS) {
        const float *q = w->q + i0 * dim;
        float *p = w->p + (size_t)i0 * LR_ATTN_STEP + g * VW;
        const char *k[VEC_COLS];
        ptrdiff_t next[VEC_COLS];
        vf acc[VEC_ROWS][VEC_COLS], scale[VEC_COLS];
        UNROLL for (int c = 0; c < VEC_COLS; c++)
        {
            int at = (g + c) * VW;
            next[c] = s->k_next[at / LR_ATTN_TILE];
            k[c] = s->k[at / LR_ATTN_TILE] + at % LR_ATTN_TILE * elem;
            scale[c] = vf_set1(0);
        }
        UNROLL for (int i = 0; i < nr * VEC_COLS; i++)
        {
            int r = i / VEC_COLS, c = i % VEC_COLS;
            acc[r][c] = d0 ? vf_load(p + r * LR_ATTN_STEP + c * VW) : vf_set1(0);
        }
        for (size_t d = d0; d < d1;) {
            const size_t span = in == IN_Q6 ? 8 : LR_KV_GROUP, from = d;
            size_t end =
                in >= IN_Q8 && d1 - d > span ? d + span : d1; /* one scale, and one place in bytes, till there */
            size_t at = in_place(in, d - d0) * ldk, up = s->upper + lr_kv_upper_place(d - d0) * ldk;
            if (in >= IN_Q8) {
                const size_t group = (d - d0) / LR_KV_GROUP * s->lds;
                UNROLL for (int c = 0; c < VEC_COLS; c++)
                {
                    int place = (g + c) * VW;
                    scale[c] = vf_load_f16(s->ks[place / LR_ATTN_TILE] + group + place % LR_ATTN_TILE);
                }
            }
            for (; d < end; d++, at += ldk, up += ldk) {
                vf b[VEC_COLS];
                UNROLL for (int c = 0; c < VEC_COLS; c++)
                {
                    b[c] = in_load(in, k[c] + at, in == IN_Q6 ? k[c] + up : NULL, from, scale[c]);
                    if (in != IN_F32) ask_next(k[c] + at + next[c]);
                }
                UNROLL for (int r = 0; r < nr; r++)
                {
                    vf a = vf_set1(q[r * dim + d]);
                    UNROLL for (int c = 0; c < VEC_COLS; c++) acc[r][c] = vf_fma(a, b[c], acc[r][c]);
                }
            }
        }
        UNROLL for (int i = 0; i < nr * VEC_COLS; i++)
        {
            int r = i / VEC_COLS, c = i % VEC_COLS;
            vf_store(p + r * LR_ATTN_STEP + c * VW, acc[r][c]);
        }
    }
}

/* acc[r] (dp apart) = acc[r] * keep[r] + sum of p[r][t] v[t] over places t0 .. t1; keep NULL = ones. acc is that of nc
 * registers of columns, from column col of the panel on. */
VEC_INLINE void values_block(const step *s, const float *p, float *acc, size_t dp, const float *keep, int t0, int t1,
                             size_t col, const int nr, const int nc, const kind in)
{
    const size_t elem = in_bytes(in), ldv = s->ldv * elem;
    vf a[VEC_ROWS][VEC_COLS];
    UNROLL for (int i = 0; i < nr * nc; i++)
    {
        int r = i / nc, c = i % nc;
        a[r][c] = vf_load(acc + r * dp + c * VW);
        if (keep) a[r][c] = vf_mul(a[r][c], vf_set1(keep[r]));
    }
    for (int t = t0; t <= t1;) {
        int end = t / s->run * s->run + s->run - 1;
        const char *v = s->v[t / LR_ATTN_TILE] + t % LR_ATTN_TILE * ldv;
        const ptrdiff_t next = s->v_next[t / LR_ATTN_TILE];
        const uint16_t *vs = in >= IN_Q8 ? s->vs[t / LR_ATTN_TILE] + t % LR_ATTN_TILE * s->lds : NULL;
        if (end > t1) end = t1;
        for (; t <= end; t++, v += ldv, vs += in >= IN_Q8 ? s->lds : 0) {
            vf b[VEC_COLS];
            UNROLL for (int c = 0; c < nc; c++)
            {
                size_t d = col + c * VW;
                vf scale = vf_set1(in >= IN_Q8 ? vec_f16(vs[d / LR_KV_GROUP]) : 0);
                b[c] = in_load(in, v + in_place(in, d) * elem, NULL, d, scale);
                if (in != IN_F32 && c * VW * elem % 64 == 0) ask_next(v + in_place(in, d) * elem + next);
            }
            UNROLL for (int r = 0; r < nr; r++)
            {
                vf x = vf_set1(p[r * LR_ATTN_STEP + t]);
                UNROLL for (int c = 0; c < nc; c++) a[r][c] = vf_fma(x, b[c], a[r][c]);
            }
        }
    }
    UNROLL for (int i = 0; i < nr * nc; i++) vf_store(acc + i / nc * dp + i % nc * VW, a[i / nc][i % nc]);
}

/* The same for the n columns of a panel. */
VEC_INLINE void values_rows(const step *s, const float *p, float *acc, size_t dp, const float *keep, int t0, int t1,
                            int n, const int nr, const kind in)
{
    int col = 0;
    for (; col + VEC_COLS * VW <= n; col += VEC_COLS * VW) {
        values_block(s, p, acc + col, dp, keep, t0, t1, col, nr, VEC_COLS, in);
    }
    if (VEC_COLS > 2 && col + 2 * VW <= n) {
        values_block(s, p, acc + col, dp, keep, t0, t1, col, nr, 2, in);
        col += 2 * VW;
    }
    for (; col + VW <= n; col += VW) values_block(s, p, acc + col, dp, keep, t0, t1, col, nr, 1, in);
}

#define EACH_ROWS(X, in) X(1, in) X(2, in) X(3, in) X(4, in) X(5, in) X(6, in)
#define EACH_BLOCK(X, quarter)                                                                                         \
    EACH_ROWS(X, IN_F32) EACH_ROWS(X, IN_F16) EACH_ROWS(X, IN_BF16) EACH_ROWS(X, IN_Q8) EACH_ROWS(X, quarter)

/* Pairs are cut into register blocks of even shares: the next block's size when `left` are left. */
static int block_rows(int left)
{
    int blocks = (left + VEC_ROWS - 1) / VEC_ROWS;
    return (left + blocks - 1) / blocks;
}

/* The panel's part of all scores -> w->p. */
static void scores(const work *w, const step *s, int d0, int d1)
{
    for (int i = 0, nr; i < w->pairs; i += nr) {
        nr = block_rows(w->pairs - i);
        switch (s->in * 8 + nr) {
#define X(n, in)                                                                                                       \
    case in * 8 + n:                                                                                                   \
        scores_block(w, s, i, d0, d1, n, in);                                                                          \
        break;
            EACH_BLOCK(X, IN_Q6)
#undef X
        }
    }
}

/* Adds places t0 .. t1 of the panel, n columns from col, to the sums of pairs i0 .. i1-1, after multiplying these with
 * keep (NULL = ones). */
static void values(const work *w, const step *s, float *acc, int col, int n, int i0, int i1, const float *keep, int t0,
                   int t1)
{
    size_t dp = (size_t)w->dp;
    for (int i = i0, nr; i < i1; i += nr) {
        nr = block_rows(i1 - i);
        const float *p = w->p + (size_t)i * LR_ATTN_STEP, *kp = keep ? keep + i : NULL;
        float *at = acc + i * dp + col;
        switch (s->in * 8 + nr) {
#define X(r, in)                                                                                                       \
    case in * 8 + r:                                                                                                   \
        values_rows(s, p, at, dp, kp, t0, t1, n, r, in);                                                               \
        break;
            EACH_BLOCK(X, IN_Q4)
#undef X
        }
    }
}

/* ---- softmax of a step ---- */

#ifdef ATTN_TILES
#include "cpu/attn_planes.h"
#else
VEC_INLINE void split_32(char *to, size_t second, vf a, vf b) { (void)to, (void)second, (void)a, (void)b; }
#endif

static float exp2_one(float x) { return vf_first(vec_exp2_softmax(vf_set1(x))); }

/* Scores p (pairs, STEP) of n <= VW pairs -> weights; maxima, lanes of the sums and keep move on. Places a .. b are
 * seen. m, keep, lanes: of the first pair. The rescaling factors are taken for all pairs at once. */
VEC_INLINE void weights(float cap, int n, float *p, float *m, float *keep, float *lanes, bool whole, int a, int b,
                        bool planes)
{
    float top[VW];
    for (int i = 0; i < n; i++) {
        vf s[STEP_V];
        UNROLL for (int c = 0; c < STEP_V; c++)
        {
            float *at = p + i * LR_ATTN_STEP + c * VW;
            s[c] = vf_load(at);
            if (cap > 0) s[c] = vf_mul(vec_tanh(s[c]), vf_set1(cap));
            if (!whole) {
                vf place = vf_add(vf_iota(), vf_set1((float)(c * VW)));
                vm seen = vm_and(vf_ge(place, vf_set1((float)a)), vf_le(place, vf_set1((float)b)));
                s[c] = vf_select(seen, s[c], vf_set1(-INFINITY));
            }
            if (cap > 0 || !whole) vf_store(at, s[c]);
        }
        UNROLL for (int c = 1; c < STEP_V; c++) s[0] = vf_max(s[0], s[c]);
        top[i] = vf_hmax(s[0]);
    }
    vf low = vf_set1(-INFINITY), old = vf_loadn(m, n), high = vf_max(old, vf_loadn(top, n));
    vf_storen(m, high, n);
    high = vf_select(vf_eq(high, low), vf_set1(0), high); /* all scores -inf: weights of 0, not of NaN */
    vf_storen(top, high, n);
    vf_storen(keep, vec_exp2_softmax(vf_sub(old, high)), n);
    for (int i = 0; i < n; i++, lanes += 16) {
        vf ref = vf_set1(top[i]), e[STEP_V], sum = vf_set1(0);
        float *at = p + i * LR_ATTN_STEP;
        UNROLL for (int c = 0; c < STEP_V; c++)
        {
            e[c] = vec_exp2_softmax(vf_sub(vf_load(at + c * VW), ref));
            if (!planes) vf_store(at + c * VW, e[c]);
            sum = c ? vf_add(sum, e[c]) : e[c];
        }
        if (planes) {
            UNROLL for (int c = 0; c < STEP_V; c += 2) split_32((char *)(at + c * VW / 2), 128, e[c], e[c + 1]);
        }
        vf_store(lanes, vf_fma(vf_load(lanes), vf_set1(keep[i]), sum));
    }
}

/* The same for pairs i0 .. i1-1. */
static void softmax(const work *w, state *st, int i0, int i1, int a, int b)
{
    bool whole = a == 0 && b == LR_ATTN_STEP - 1;
    for (int i = i0, n; i < i1; i += n) {
        float *p = w->p + (size_t)i * LR_ATTN_STEP, *lanes = w->lanes + (size_t)i * 16;
        n = i1 - i < VW ? i1 - i : VW;
        if (whole && w->cap == 0)
            weights(0, n, p, st->m + i, w->keep + i, lanes, true, 0, 0, w->planes);
        else
            weights(w->cap, n, p, st->m + i, w->keep + i, lanes, false, a, b, w->planes);
    }
}

#include "cpu/attn_panels.h"

/* Tile i's place in the next step begins at position p. */
static void find_next(const lr_attn_task *t, step *s, int i, int p)
{
    int slot = (int)s->slot[i];
    const char *k = s->kb[i], *v = s->vb[i];
    if (p <= t->pos) {
        k = lr_attn_block(t, t->k, p, &slot);
        v = lr_attn_block(t, t->v, p, &slot);
    }
    const ptrdiff_t slots = slot - (ptrdiff_t)s->slot[i];
    s->k_next[i] = k - s->kb[i] + slots * (ptrdiff_t)lr_kv_elem(t->k_type);
    s->v_next[i] = v - s->vb[i] + slots * (ptrdiff_t)(lr_kv_place(t->v_type, t->head_dim) * lr_kv_elem(t->v_type));
}

/* Who sees what of the step at base, and where its tiles lie. */
static void open_step(const lr_attn_task *t, const work *w, int base, step *s)
{
    int a, b, unused;
    lr_attn_row_clip(t, 0, base, LR_ATTN_STEP, &a, &unused);
    lr_attn_row_clip(t, t->n_rows - 1, base, LR_ATTN_STEP, &unused, &b);
    s->base = base;
    s->lo = a - base;
    s->hi = b - base;
    lr_attn_row_clip(t, t->n_rows - 1, base, LR_ATTN_STEP, &a, &unused);
    lr_attn_row_clip(t, 0, base, LR_ATTN_STEP, &unused, &b);
    s->c0 = a - base;
    s->c1 = b - base;
    s->even = s->c0 == 0 && s->c1 == LR_ATTN_STEP - 1;
    s->aligned = t->block_size % LR_ATTN_TILE == 0 && w->dp == w->dim;
    for (int i = 0; s->aligned && i < TILES; i++) {
        int tile = i, slot,
            first = s->lo / LR_ATTN_TILE; /* scores of a tile that nobody sees are computed and dropped: */
        if (i < first || i > s->hi / LR_ATTN_TILE) tile = first; /* any readable place will do */
        s->kb[i] = lr_attn_block(t, t->k, base + tile * LR_ATTN_TILE, &slot);
        s->vb[i] = lr_attn_block(t, t->v, base + tile * LR_ATTN_TILE, &slot);
        s->slot[i] = (size_t)slot;
        if (!w->tiles) find_next(t, s, i, base + LR_ATTN_STEP + tile * LR_ATTN_TILE);
    }
}

/* ---- a chunk ---- */

/* Places of the step that row r sees: false if none. */
static bool row_places(const lr_attn_task *t, const step *s, int r, int *a, int *b)
{
    lr_attn_row_clip(t, r, s->base, LR_ATTN_STEP, a, b);
    *a -= s->base;
    *b -= s->base;
    return *a <= *b;
}

static void rescale(const work *w, float *acc, int col, int n, int i0, int i1)
{
    for (int i = i0; i < i1; i++) {
        float *at = acc + (size_t)i * w->dp + col;
        for (int d = 0; d < n; d += VW) vf_store(at + d, vf_mul(vf_load(at + d), vf_set1(w->keep[i])));
    }
}

/* The values of a step that the rows see in different parts: first what each sees before the part that all see, then
 * that, then the rest of each. */
static void uneven_values(const lr_attn_task *t, const work *w, const step *s, float *acc, int col, int n)
{
    int g = t->n_group, a, b;
    for (int r = 0, i = 0; r < t->n_rows; r++, i += g) {
        if (!row_places(t, s, r, &a, &b)) continue;
        rescale(w, acc, col, n, i, i + g);
        if (s->c1 < s->c0)
            values(w, s, acc, col, n, i, i + g, NULL, a, b);
        else if (a < s->c0)
            values(w, s, acc, col, n, i, i + g, NULL, a, s->c0 - 1);
    }
    if (s->c1 < s->c0) return;
    values(w, s, acc, col, n, 0, w->pairs, NULL, s->c0, s->c1);
    for (int r = 0, i = 0; r < t->n_rows; r++, i += g) {
        row_places(t, s, r, &a, &b);
        if (b > s->c1) values(w, s, acc, col, n, i, i + g, NULL, s->c1 + 1, b);
    }
}

#ifdef ATTN_TILES
#include "cpu/attn_tiles.h"
#endif

static void run_step(const lr_attn_task *t, const work *w, step *s, state *st)
{
    int a, b;
#ifdef ATTN_TILES
    if (w->tiles) {
        tile_step(t, w, s, st);
        return;
    }
#endif
    for (int d0 = 0; d0 < w->dim; d0 += PANEL) {
        int d1 = d0 + PANEL < w->dim ? d0 + PANEL : w->dim;
        open_keys(t, w, s, d0, d1);
        scores(w, s, d0, d1);
    }
    if (s->even) softmax(w, st, 0, w->pairs, 0, LR_ATTN_STEP - 1);
    for (int r = 0; !s->even && r < t->n_rows; r++) {
        if (row_places(t, s, r, &a, &b)) softmax(w, st, r * t->n_group, (r + 1) * t->n_group, a, b);
    }
    for (int d0 = 0; d0 < w->dp; d0 += PANEL) {
        int n = w->dp - d0 < PANEL ? w->dp - d0 : PANEL;
        open_values(t, w, s, d0, d0 + n);
        if (s->even)
            values(w, s, st->acc, d0, n, 0, w->pairs, w->keep, 0, LR_ATTN_STEP - 1);
        else
            uneven_values(t, w, s, st->acc, d0, n);
    }
}

/* The pairs of a task of a gang, `first` being the first of them, as work and state of their own. */
static work work_of(const work *w, int first, int n)
{
    work one = *w;
    one.pairs = n;
    one.q += (size_t)first * w->dim;
    one.p += (size_t)first * LR_ATTN_STEP;
    one.lanes += (size_t)first * 16;
    one.keep += first;
    return one;
}

static state state_of(const state *st, int first, size_t dp)
{
    return (state){st->m + first, st->l + first, st->acc + first * dp};
}

/* The steps of a chunk at positions from .. to - 1, as far as rows of t see them. */
static void run_steps(const lr_attn_task *t, const work *w, state *st, int chunk, int from, int to)
{
    int begin = chunk * LR_ATTN_CHUNK, lo, hi, unused;
    lr_attn_row_clip(t, 0, begin, LR_ATTN_CHUNK, &lo, &unused);
    lr_attn_row_clip(t, t->n_rows - 1, begin, LR_ATTN_CHUNK, &unused, &hi);
    if (lo < from) lo = from;
    if (hi >= to) hi = to - 1;
    for (int base = lo / LR_ATTN_STEP * LR_ATTN_STEP; base <= hi; base += LR_ATTN_STEP) {
        step s;
        open_step(t, w, base, &s);
        run_step(t, w, &s, st);
    }
}

static void run_alone(const lr_attn_gang *g, const work *w, const state *st, int chunk, int from, int to)
{
    for (int i = 0, first = 0, n; i < g->n; i++, first += n) {
        n = g->tasks[i].n_rows * g->tasks[i].n_group;
        work one = work_of(w, first, n);
        state its = state_of(st, first, (size_t)w->dp);
        run_steps(&g->tasks[i], &one, &its, chunk, from, to);
    }
}

static void run_chunk(const lr_attn_gang *g, int chunk, const work *w, state *st)
{
    int n = w->pairs;
    for (int i = 0; i < n; i++) st->m[i] = -INFINITY;
    memset(st->acc, 0, (size_t)n * w->dp * sizeof(float));
    memset(w->lanes, 0, (size_t)n * 16 * sizeof(float));
    if (g->from > 0) run_alone(g, w, st, chunk, 0, g->from);
    if (g->to > g->from) run_steps(&g->tasks[0], w, st, chunk, g->from, g->to);
    run_alone(g, w, st, chunk, g->to, INT_MAX);
    for (int i = 0; i < n; i++) st->l[i] = vf_hsum(vf_load(w->lanes + (size_t)i * 16));
}

/* ---- over chunks ---- */

/* (m, l, acc) += (m2, l2, acc2) */
static void merge(float *m, float *l, float *acc, float m2, float l2, const float *acc2, int n)
{
    if (m2 == -INFINITY) return;
    float top = *m > m2 ? *m : m2, fa = exp2_one(*m - top), fb = exp2_one(m2 - top);
    *m = top;
    *l = fmaf(l2, fb, *l * fa);
    vf a = vf_set1(fa), b = vf_set1(fb);
    int d = 0;
    for (; d + VW <= n; d += VW) vf_store(acc + d, vf_fma(vf_load(acc2 + d), b, vf_mul(vf_load(acc + d), a)));
    if (d < n) vf_storen(acc + d, vf_fma(vf_loadn(acc2 + d, n - d), b, vf_mul(vf_loadn(acc + d, n - d), a)), n - d);
}

static float *out_of(const lr_attn_task *t, int i)
{
    return t->out + i / t->n_group * t->out_stride + (size_t)(t->kv_head * t->n_group + i % t->n_group) * t->head_dim;
}

/* The pair's state -> its output (acc may be the output); the sink is one more logit in the denominator. */
static void finish(const lr_attn_task *t, int i, float m, float l, const float *acc)
{
    float *out = out_of(t, i), f = 1;
    if (t->sinks && m != -INFINITY) {
        float sink = t->sinks[t->kv_head * t->n_group + i % t->n_group] * LOG2E, top = m > sink ? m : sink;
        f = exp2_one(m - top);
        l = fmaf(l, f, exp2_one(sink - top));
    }
    vf x = vf_set1(l != 0 ? f / l : 0), zero = vf_set1(0);
    int d = 0, n = t->head_dim;
    for (; d + VW <= n; d += VW) vf_store(out + d, vf_fma(vf_load(acc + d), x, zero));
    if (d < n) vf_storen(out + d, vf_fma(vf_loadn(acc + d, n - d), x, zero), n - d);
    if (lr_kv_turned(t->v_type)) turn(out, n, lr_kv_turn_block(n));
}

/* ---- entries ---- */

static float *carve(float **next, size_t n)
{
    float *p = *next;
    *next += (n + 15) / 16 * 16;
    return p;
}

/* The task's queries, times the factor of the scores -> w->q from pair `first` on. */
static void open_queries(const lr_attn_task *t, const work *w, int first)
{
    float f = t->softcap > 0 ? t->scale / t->softcap : t->scale * LOG2E;
    for (int i = 0; i < t->n_rows * t->n_group; i++) {
        const float *q =
            t->q + i / t->n_group * t->q_stride + (size_t)(t->kv_head * t->n_group + i % t->n_group) * w->dim;
        float *to = w->q + (size_t)(first + i) * w->dim;
        int d = 0;
        for (; d + VW <= w->dim; d += VW) vf_store(to + d, vf_mul(vf_load(q + d), vf_set1(f)));
        for (; d < w->dim; d++) to[d] = q[d] * f;
        if (lr_kv_turned(t->k_type)) turn(to, w->dim, lr_kv_turn_block(w->dim));
#ifdef ATTN_TILES
        if (w->tiles) split_row(to, w->dim);
#endif
    }
}

static void open_work(const lr_attn_gang *g, void *scratch, work *w)
{
    float *next = scratch;
    const lr_attn_task *t = g->tasks;
    w->dim = t->head_dim;
    w->dp = (t->head_dim + 15) / 16 * 16;
    w->pairs = 0;
    for (int i = 0; i < g->n; i++) w->pairs += t[i].n_rows * t[i].n_group;
    size_t n = (size_t)w->pairs, dp = (size_t)w->dp;
    w->kt = carve(&next, PANEL * LR_ATTN_STEP);
    w->vt = carve(&next, PANEL * LR_ATTN_STEP);
    w->q = carve(&next, n * dp);
    w->p = carve(&next, n * LR_ATTN_STEP);
    w->lanes = carve(&next, n * 16);
    w->keep = carve(&next, n);
    w->sum = (state){carve(&next, n), carve(&next, n), carve(&next, n * dp)};
    w->one = (state){carve(&next, n), carve(&next, n), carve(&next, n * dp)};
    w->cap = t->softcap > 0 ? t->softcap * LOG2E : 0;
#ifdef ATTN_TILES
    w->tiles = takes_tiles(t);
#else
    w->tiles = false;
#endif
    w->planes = w->tiles && t->v_type == LR_BF16;
    for (int i = 0, first = 0; i < g->n; first += t[i].n_rows * t[i].n_group, i++) open_queries(&t[i], w, first);
}

/* Tile registers that are in use make every switch of tasks dearer. */
static void close_work(const work *w)
{
#ifdef ATTN_TILES
    if (*w->rows) _tile_release();
#endif
    (void)w;
}

static void attn_gang(const lr_attn_gang *g, void *scratch)
{
    work w;
    int first, last, rows = 0;
    lines ahead;
    w.rows = &rows;
    w.ahead = &ahead;
    open_work(g, scratch, &w);
    lr_attn_gang_chunks(g, &first, &last);
    run_chunk(g, first, &w, &w.sum); /* of no chunk at all: a state that gives zeros */
    for (int c = first + 1; c <= last; c++) {
        run_chunk(g, c, &w, &w.one);
        for (int i = 0; i < w.pairs; i++) {
            size_t at = (size_t)i * w.dp;
            merge(w.sum.m + i, w.sum.l + i, w.sum.acc + at, w.one.m[i], w.one.l[i], w.one.acc + at, w.dp);
        }
    }
    for (int i = 0, k = 0; i < g->n; i++)
        for (int j = 0; j < g->tasks[i].n_rows * g->tasks[i].n_group; j++, k++)
            finish(&g->tasks[i], j, w.sum.m[k], w.sum.l[k], w.sum.acc + (size_t)k * w.dp);
    close_work(&w);
}

static void attn(const lr_attn_task *t, void *scratch) { attn_gang(&(lr_attn_gang){t, 1, 0, 0}, scratch); }

static void attn_gang_part(const lr_attn_gang *g, int chunk, float *const *parts, void *scratch)
{
    work w;
    int rows = 0;
    lines ahead;
    w.rows = &rows;
    w.ahead = &ahead;
    open_work(g, scratch, &w);
    run_chunk(g, chunk, &w, &w.one);
    close_work(&w);
    for (int i = 0, k = 0; i < g->n; i++) {
        size_t n = (size_t)g->tasks[i].n_rows * g->tasks[i].n_group, dim = (size_t)w.dim;
        memcpy(parts[i], w.one.m + k, n * sizeof(float));
        memcpy(parts[i] + n, w.one.l + k, n * sizeof(float));
        for (size_t j = 0; j < n; j++, k++)
            memcpy(parts[i] + 2 * n + j * dim, w.one.acc + (size_t)k * w.dp, dim * sizeof(float));
    }
}

static void attn_part(const lr_attn_task *t, int chunk, float *part, void *scratch)
{
    attn_gang_part(&(lr_attn_gang){t, 1, 0, 0}, chunk, &part, scratch);
}

static void attn_combine(const lr_attn_task *t, const float *parts, int n_parts)
{
    int pairs = t->n_rows * t->n_group, dim = t->head_dim;
    size_t size = lr_cpu_attn_part_floats(t);
    for (int i = 0; i < pairs; i++) {
        float m = -INFINITY, l = 0, *out = out_of(t, i); /* the sum is kept in the output */
        memset(out, 0, (size_t)dim * sizeof(float));
        for (int c = 0; c < n_parts; c++) {
            const float *b = parts + c * size;
            merge(&m, &l, out, b[i], b[pairs + i], b + 2 * pairs + (size_t)i * dim, dim);
        }
        finish(t, i, m, l, out);
    }
}

void VEC_NAME(lr_attn_fill)(lr_cpu_kernels *k)
{
    k->kv_put = kv_put;
    k->attn = attn;
    k->attn_part = attn_part;
    k->attn_combine = attn_combine;
    k->attn_gang = attn_gang;
    k->attn_gang_part = attn_gang_part;
}
