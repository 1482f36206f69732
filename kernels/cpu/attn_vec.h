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
 * Scores are in units of log2 e: softmax is 2^(s - max), and the factor is in the queries already.
 * Bound by: decode memory, prefill multiply-adds (figures in kernels/README.md).
 */
#include "cpu/attn_int.h"
#include "cpu/vec_math.h"
#include <math.h>
#include <string.h>

#define STEP_V     (LR_ATTN_STEP / VW)
#define TILES      (LR_ATTN_STEP / LR_ATTN_TILE)
#define PANEL      64 /* dimensions of keys, or columns of values, that are worked on at a time */
#define DIRECT_MAX 8  /* pairs up to which halves are converted in registers */
#define LOG2E      1.44269504088896341f

typedef enum kind { IN_F32, IN_F16, IN_BF16 } kind;

/* A step's keys and values: per tile of 16 positions, dimension d of the keys at k + d * ldk, position t of the values
 * at v + t * ldv. */
typedef struct step_ref {
    const char *k[TILES], *v[TILES];
    size_t ldk, ldv;
    size_t panel; /* bytes from PANEL columns of the values to the next */
    int run;      /* positions whose values lie one behind the other: a tile, or the step */
    kind in;
} step_ref;

/* The running state of the pairs over a chunk, or over chunks. */
typedef struct state {
    float *m;   /* (P) largest score */
    float *l;   /* (P) sum of weights */
    float *acc; /* (P, dp) sum of weighted values */
} state;

typedef struct work {
    int dim, dp;    /* head_dim, and rounded up to 16 */
    int pairs;      /* P */
    float cap;      /* softcap in score units, 0 = none */
    float *q;       /* (P, dim) queries times the factor of the scores */
    float *p;       /* (P, STEP) scores, then weights */
    float *lanes;   /* (P, 16) sums of weights, lane by lane */
    float *keep;    /* (P) factor for the sum so far */
    float *kt, *vt; /* (dim, STEP), (dp / PANEL, STEP, PANEL) */
    state sum, one;
} work;

#define UNROLL _Pragma("GCC unroll 24")

VEC_INLINE size_t in_bytes(kind in) { return in == IN_F32 ? 4 : 2; }

VEC_INLINE vf in_load(kind in, const char *p)
{
    switch (in) {
    case IN_F32:
        return vf_load((const float *)p);
    case IN_F16:
        return vf_load_f16((const uint16_t *)p);
    default:
        return vf_load_bf16((const uint16_t *)p);
    }
}

/* ---- the two products ---- */

/* Dimensions d0 .. d1-1 of the scores of pairs i0 .. i0+nr-1. */
VEC_INLINE void scores_block(const work *w, const step_ref *s, int i0, size_t d0, size_t d1, const int nr,
                             const kind in)
{
    const size_t elem = in_bytes(in), ldk = s->ldk * elem, dim = (size_t)w->dim;
    for (int g = 0; g < STEP_V; g += VEC_COLS) {
        const float *q = w->q + i0 * dim;
        float *p = w->p + (size_t)i0 * LR_ATTN_STEP + g * VW;
        const char *k[VEC_COLS];
        vf acc[VEC_ROWS][VEC_COLS];
        UNROLL for (int c = 0; c < VEC_COLS; c++)
        {
            int at = (g + c) * VW;
            k[c] = s->k[at / LR_ATTN_TILE] + at % LR_ATTN_TILE * elem;
        }
        UNROLL for (int i = 0; i < nr * VEC_COLS; i++)
        {
            int r = i / VEC_COLS, c = i % VEC_COLS;
            acc[r][c] = d0 ? vf_load(p + r * LR_ATTN_STEP + c * VW) : vf_set1(0);
        }
        size_t at = d0 * ldk;
        for (size_t d = d0; d < d1; d++, at += ldk) {
            vf b[VEC_COLS];
            UNROLL for (int c = 0; c < VEC_COLS; c++) b[c] = in_load(in, k[c] + at);
            UNROLL for (int r = 0; r < nr; r++)
            {
                vf a = vf_set1(q[r * dim + d]);
                UNROLL for (int c = 0; c < VEC_COLS; c++) acc[r][c] = vf_fma(a, b[c], acc[r][c]);
            }
        }
        UNROLL for (int i = 0; i < nr * VEC_COLS; i++)
        {
            int r = i / VEC_COLS, c = i % VEC_COLS;
            vf_store(p + r * LR_ATTN_STEP + c * VW, acc[r][c]);
        }
    }
}

/* acc[r] (dp apart) = acc[r] * keep[r] + sum of p[r][t] v[t] over places t0 .. t1; keep NULL = ones. acc and the values
 * at byte `at` of a position are those of nc registers of columns. */
VEC_INLINE void values_block(const step_ref *s, const float *p, float *acc, size_t dp, const float *keep, int t0,
                             int t1, size_t at, const int nr, const int nc, const kind in)
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
        const char *v = s->v[t / LR_ATTN_TILE] + t % LR_ATTN_TILE * ldv + at;
        if (end > t1) end = t1;
        for (; t <= end; t++, v += ldv) {
            vf b[VEC_COLS];
            UNROLL for (int c = 0; c < nc; c++) b[c] = in_load(in, v + c * VW * elem);
            UNROLL for (int r = 0; r < nr; r++)
            {
                vf x = vf_set1(p[r * LR_ATTN_STEP + t]);
                UNROLL for (int c = 0; c < nc; c++) a[r][c] = vf_fma(x, b[c], a[r][c]);
            }
        }
    }
    UNROLL for (int i = 0; i < nr * nc; i++) vf_store(acc + i / nc * dp + i % nc * VW, a[i / nc][i % nc]);
}

/* The same for a panel of n columns. */
VEC_INLINE void values_panel(const step_ref *s, const float *p, float *acc, size_t dp, const float *keep, int t0,
                             int t1, size_t at, int n, const int nr, const kind in)
{
    const size_t elem = in_bytes(in);
    int col = 0;
    for (; col + VEC_COLS * VW <= n; col += VEC_COLS * VW) {
        values_block(s, p, acc + col, dp, keep, t0, t1, at + col * elem, nr, VEC_COLS, in);
    }
    if (VEC_COLS > 2 && col + 2 * VW <= n) {
        values_block(s, p, acc + col, dp, keep, t0, t1, at + col * elem, nr, 2, in);
        col += 2 * VW;
    }
    for (; col + VW <= n; col += VW) {
        values_block(s, p, acc + col, dp, keep, t0, t1, at + col * elem, nr, 1, in);
    }
}

#define EACH_ROWS(X, in) X(1, in) X(2, in) X(3, in) X(4, in) X(5, in) X(6, in)
#define EACH_BLOCK(X)    EACH_ROWS(X, IN_F32) EACH_ROWS(X, IN_F16) EACH_ROWS(X, IN_BF16)

/* Pairs are cut into register blocks of even shares: the next block's size when `left` are left. */
static int block_rows(int left)
{
    int blocks = (left + VEC_ROWS - 1) / VEC_ROWS;
    return (left + blocks - 1) / blocks;
}

/* All scores of the step -> w->p; PANEL dimensions at a time, whose keys stay in the nearest cache. */
static void scores(const work *w, const step_ref *s)
{
    for (int d0 = 0; d0 < w->dim; d0 += PANEL) {
        int d1 = d0 + PANEL < w->dim ? d0 + PANEL : w->dim;
        for (int i = 0, nr; i < w->pairs; i += nr) {
            nr = block_rows(w->pairs - i);
            switch (s->in * 8 + nr) {
#define X(n, in)                                                                                                       \
    case in * 8 + n:                                                                                                   \
        scores_block(w, s, i, d0, d1, n, in);                                                                          \
        break;
                EACH_BLOCK(X)
#undef X
            }
        }
    }
}

/* Adds places t0 .. t1 to the sums of pairs i0 .. i1-1, after multiplying these with keep (NULL = ones). */
static void values(const work *w, const step_ref *s, const state *st, int i0, int i1, const float *keep, int t0, int t1)
{
    size_t dp = (size_t)w->dp;
    for (int col = 0; col < w->dp; col += PANEL) {
        int n = w->dp - col < PANEL ? w->dp - col : PANEL;
        size_t at = col / PANEL * s->panel;
        for (int i = i0, nr; i < i1; i += nr) {
            nr = block_rows(i1 - i);
            const float *p = w->p + (size_t)i * LR_ATTN_STEP, *kp = keep ? keep + i : NULL;
            float *acc = st->acc + i * dp + col;
            switch (s->in * 8 + nr) {
#define X(r, in)                                                                                                       \
    case in * 8 + r:                                                                                                   \
        values_panel(s, p, acc, dp, kp, t0, t1, at, n, r, in);                                                         \
        break;
                EACH_BLOCK(X)
#undef X
            }
        }
    }
}

/* ---- softmax of a step ---- */

static float exp2_one(float x) { return vf_first(vec_exp2_softmax(vf_set1(x))); }

/* Scores p (pairs, STEP) of n <= VW pairs -> weights; maxima, lanes of the sums and keep move on. Places a .. b are
 * seen. m, keep, lanes: of the first pair. The rescaling factors are taken for all pairs at once. */
VEC_INLINE void weights(float cap, int n, float *p, float *m, float *keep, float *lanes, bool whole, int a, int b)
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
        vf ref = vf_set1(top[i]), sum = vf_set1(0);
        UNROLL for (int c = 0; c < STEP_V; c++)
        {
            float *at = p + i * LR_ATTN_STEP + c * VW;
            vf e = vec_exp2_softmax(vf_sub(vf_load(at), ref));
            vf_store(at, e);
            sum = c ? vf_add(sum, e) : e;
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
            weights(0, n, p, st->m + i, w->keep + i, lanes, true, 0, 0);
        else
            weights(w->cap, n, p, st->m + i, w->keep + i, lanes, false, a, b);
    }
}

/* ---- keys and values into scratch ---- */

/* Place of dimension d of the step's values at `place`. */
VEC_INLINE float *vt_at(const work *w, int place, size_t d)
{
    return w->vt + (d / PANEL * LR_ATTN_STEP + (size_t)place) * PANEL + d % PANEL;
}

/* Values of the position in slot `slot` of block part v: dims col .. col+VW-1, float32. */
VEC_INLINE vf load_q8_v(const char *v, size_t scales, size_t at, size_t scale_at)
{
    const uint16_t *s = (const uint16_t *)(v + scales);
    return vf_mul(vf_load_i8((const int8_t *)v + at), vf_set1(vec_f16(s[scale_at])));
}

/* One aligned tile: keys (dim, 16) -> kt columns, values (16, dim) -> vt rows. kb, vb: the block's parts. */
static void convert_tile(const lr_attn_task *t, const work *w, const char *kb, const char *vb, int slot, int place)
{
    size_t dim = (size_t)w->dim, bs = (size_t)t->block_size, h = (size_t)t->kv_head;
    size_t k_at = h * dim * bs + slot, v_at = (h * bs + slot) * dim;
    float *kt = w->kt + place;
    if (t->kv_type == LR_Q8_0) {
        size_t groups = (size_t)lr_kv_groups(w->dim), sc = lr_kv_scales_at(t->n_kv_heads, w->dim, t->block_size);
        for (size_t d = 0; d < dim; d++, kt += LR_ATTN_STEP, k_at += bs) {
            const uint16_t *s = (const uint16_t *)(kb + sc) + (h * groups + d / LR_KV_GROUP) * bs + slot;
            for (int c = 0; c < LR_ATTN_TILE; c += VW) {
                vf_store(kt + c, vf_mul(vf_load_i8((const int8_t *)kb + k_at + c), vf_load_f16(s + c)));
            }
        }
        for (int j = 0; j < LR_ATTN_TILE; j++, v_at += dim) {
            size_t s_at = (h * bs + slot + j) * groups;
            for (size_t d = 0; d < dim; d += VW) {
                vf_store(vt_at(w, place + j, d), load_q8_v(vb, sc, v_at + d, s_at + d / LR_KV_GROUP));
            }
        }
        return;
    }
    const uint16_t *k = (const uint16_t *)kb + k_at, *v = (const uint16_t *)vb + v_at;
    kind in = t->kv_type == LR_F16 ? IN_F16 : IN_BF16;
    for (size_t d = 0; d < dim; d++, kt += LR_ATTN_STEP, k += bs) {
        for (int c = 0; c < LR_ATTN_TILE; c += VW) vf_store(kt + c, in_load(in, (const char *)(k + c)));
    }
    for (int j = 0; j < LR_ATTN_TILE; j++, v += dim) {
        for (size_t d = 0; d < dim; d += VW) vf_store(vt_at(w, place + j, d), in_load(in, (const char *)(v + d)));
    }
}

static float get(const lr_attn_task *t, const char *part, size_t at, size_t scale_at)
{
    switch (t->kv_type) {
    case LR_F32:
        return ((const float *)part)[at];
    case LR_F16:
        return vec_f16(((const uint16_t *)part)[at]);
    case LR_BF16:
        return lr_bf16_to_f32(((const uint16_t *)part)[at]);
    default: {
        const char *s = part + lr_kv_scales_at(t->n_kv_heads, t->head_dim, t->block_size);
        return (float)((const int8_t *)part)[at] * vec_f16(((const uint16_t *)s)[scale_at]);
    }
    }
}

/* The slow way for blocks of any size: one position at a time. */
static void gather(const lr_attn_task *t, const work *w, int base, int lo, int hi)
{
    size_t dim = (size_t)w->dim, bs = (size_t)t->block_size, groups = (size_t)lr_kv_groups(w->dim),
           h = (size_t)t->kv_head;
    for (int p = lo; p <= hi; p++) {
        int slot;
        const char *kb = lr_attn_block(t, t->k, p, &slot), *vb = lr_attn_block(t, t->v, p, &slot);
        float *kt = w->kt + (p - base);
        for (size_t d = 0; d < dim; d++) {
            size_t g = d / LR_KV_GROUP;
            kt[d * LR_ATTN_STEP] = get(t, kb, (h * dim + d) * bs + slot, (h * groups + g) * bs + slot);
            *vt_at(w, p - base, d) = get(t, vb, (h * bs + slot) * dim + d, (h * bs + slot) * groups + g);
        }
        for (int d = w->dim; d < w->dp; d++) *vt_at(w, p - base, (size_t)d) = 0;
    }
}

/* Makes positions lo .. hi of the step at base readable through s. */
static void open_step(const lr_attn_task *t, const work *w, int base, int lo, int hi, step_ref *s)
{
    bool aligned = t->block_size % LR_ATTN_TILE == 0 && w->dp == w->dim;
    bool direct = aligned && (t->kv_type == LR_F32 || (t->kv_type != LR_Q8_0 && w->pairs <= DIRECT_MAX));
    int t0 = (lo - base) / LR_ATTN_TILE, t1 = (hi - base) / LR_ATTN_TILE;
    size_t elem = lr_kv_elem(t->kv_type), dim = (size_t)w->dim, bs = (size_t)t->block_size, h = (size_t)t->kv_head;
    s->in = !direct || t->kv_type == LR_F32 ? IN_F32 : t->kv_type == LR_F16 ? IN_F16 : IN_BF16;
    s->ldk = direct ? bs : LR_ATTN_STEP;
    s->ldv = direct ? dim : PANEL;
    s->panel = direct ? PANEL * elem : PANEL * LR_ATTN_STEP * sizeof(float);
    s->run = direct ? LR_ATTN_TILE : LR_ATTN_STEP;
    for (int i = 0; i < TILES;
         i++) { /* scores of a tile that nobody sees are computed and dropped: any readable place */
        int tile = i < t0 || i > t1 ? t0 : i, slot = 0;
        const char *kb = NULL, *vb = NULL;
        if (aligned) {
            kb = lr_attn_block(t, t->k, base + tile * LR_ATTN_TILE, &slot);
            vb = lr_attn_block(t, t->v, base + tile * LR_ATTN_TILE, &slot);
        }
        if (direct) {
            s->k[i] = kb + (h * dim * bs + slot) * elem;
            s->v[i] = vb + (h * bs + slot) * dim * elem;
            continue;
        }
        if (aligned && tile == i) convert_tile(t, w, kb, vb, slot, i * LR_ATTN_TILE);
        s->k[i] = (const char *)(w->kt + i * LR_ATTN_TILE);
        s->v[i] = (const char *)vt_at(w, i * LR_ATTN_TILE, 0);
    }
    if (!aligned) gather(t, w, base, lo, hi);
}

/* ---- a chunk ---- */

static void rescale(const work *w, state *st, int i0, int i1)
{
    for (int i = i0; i < i1; i++) {
        float *acc = st->acc + (size_t)i * w->dp;
        if (w->keep[i] == 1.0f) continue;
        for (int d = 0; d < w->dp; d += VW) vf_store(acc + d, vf_mul(vf_load(acc + d), vf_set1(w->keep[i])));
    }
}

/* A step that the rows see in different parts: first what each sees before the part that all see, then that, then the
 * rest of each. c0 .. c1: the common part, may be empty. */
static void uneven_step(const lr_attn_task *t, const work *w, const step_ref *s, state *st, int base, int c0, int c1)
{
    int g = t->n_group, a, b;
    for (int r = 0, i = 0; r < t->n_rows; r++, i += g) {
        lr_attn_row_clip(t, r, base, LR_ATTN_STEP, &a, &b);
        if (b < a) continue;
        a -= base;
        b -= base;
        softmax(w, st, i, i + g, a, b);
        rescale(w, st, i, i + g);
        if (c1 < c0)
            values(w, s, st, i, i + g, NULL, a, b);
        else if (a < c0)
            values(w, s, st, i, i + g, NULL, a, c0 - 1);
    }
    if (c1 < c0) return;
    values(w, s, st, 0, w->pairs, NULL, c0, c1);
    for (int r = 0, i = 0; r < t->n_rows; r++, i += g) {
        lr_attn_row_clip(t, r, base, LR_ATTN_STEP, &a, &b);
        if (b - base > c1) values(w, s, st, i, i + g, NULL, c1 + 1, b - base);
    }
}

static void run_chunk(const lr_attn_task *t, int chunk, const work *w, state *st)
{
    int begin = chunk * LR_ATTN_CHUNK, lo, hi, unused, n = w->pairs;
    for (int i = 0; i < n; i++) st->m[i] = -INFINITY;
    memset(st->acc, 0, (size_t)n * w->dp * sizeof(float));
    memset(w->lanes, 0, (size_t)n * 16 * sizeof(float));
    lr_attn_row_clip(t, 0, begin, LR_ATTN_CHUNK, &lo, &unused);
    lr_attn_row_clip(t, t->n_rows - 1, begin, LR_ATTN_CHUNK, &unused, &hi);
    for (int base = lo / LR_ATTN_STEP * LR_ATTN_STEP; base <= hi; base += LR_ATTN_STEP) {
        int end = base + LR_ATTN_STEP - 1, c0, c1;
        step_ref s;
        open_step(t, w, base, lo > base ? lo : base, hi < end ? hi : end, &s);
        lr_attn_row_clip(t, t->n_rows - 1, base, LR_ATTN_STEP, &c0, &unused);
        lr_attn_row_clip(t, 0, base, LR_ATTN_STEP, &unused, &c1);
        scores(w, &s);
        if (c0 != base || c1 != end) {
            uneven_step(t, w, &s, st, base, c0 - base, c1 - base);
            continue;
        }
        softmax(w, st, 0, n, 0, LR_ATTN_STEP - 1);
        values(w, &s, st, 0, n, w->keep, 0, LR_ATTN_STEP - 1);
    }
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
}

/* ---- entries ---- */

static float *carve(float **next, size_t n)
{
    float *p = *next;
    *next += (n + 15) / 16 * 16;
    return p;
}

static void open_work(const lr_attn_task *t, void *scratch, work *w)
{
    float *next = scratch;
    w->dim = t->head_dim;
    w->dp = (t->head_dim + 15) / 16 * 16;
    w->pairs = t->n_rows * t->n_group;
    size_t n = (size_t)w->pairs, dp = (size_t)w->dp;
    w->kt = carve(&next, dp * LR_ATTN_STEP);
    w->vt = carve(&next, (dp + PANEL - 1) / PANEL * PANEL * LR_ATTN_STEP);
    w->q = carve(&next, n * dp);
    w->p = carve(&next, n * LR_ATTN_STEP);
    w->lanes = carve(&next, n * 16);
    w->keep = carve(&next, n);
    w->sum = (state){carve(&next, n), carve(&next, n), carve(&next, n * dp)};
    w->one = (state){carve(&next, n), carve(&next, n), carve(&next, n * dp)};
    w->cap = t->softcap > 0 ? t->softcap * LOG2E : 0;
    float f = t->softcap > 0 ? t->scale / t->softcap : t->scale * LOG2E;
    for (int i = 0; i < w->pairs; i++) {
        const float *q =
            t->q + i / t->n_group * t->q_stride + (size_t)(t->kv_head * t->n_group + i % t->n_group) * w->dim;
        float *to = w->q + (size_t)i * w->dim;
        int d = 0;
        for (; d + VW <= w->dim; d += VW) vf_store(to + d, vf_mul(vf_load(q + d), vf_set1(f)));
        for (; d < w->dim; d++) to[d] = q[d] * f;
    }
}

static void attn(const lr_attn_task *t, void *scratch)
{
    work w;
    int first, last;
    open_work(t, scratch, &w);
    lr_attn_chunks(t, &first, &last);
    if (last < first) {
        for (int i = 0; i < w.pairs; i++) memset(out_of(t, i), 0, (size_t)w.dim * sizeof(float));
        return;
    }
    run_chunk(t, first, &w, &w.sum);
    for (int c = first + 1; c <= last; c++) {
        run_chunk(t, c, &w, &w.one);
        for (int i = 0; i < w.pairs; i++) {
            size_t at = (size_t)i * w.dp;
            merge(w.sum.m + i, w.sum.l + i, w.sum.acc + at, w.one.m[i], w.one.l[i], w.one.acc + at, w.dp);
        }
    }
    for (int i = 0; i < w.pairs; i++) finish(t, i, w.sum.m[i], w.sum.l[i], w.sum.acc + (size_t)i * w.dp);
}

static void attn_part(const lr_attn_task *t, int chunk, float *part, void *scratch)
{
    work w;
    open_work(t, scratch, &w);
    run_chunk(t, chunk, &w, &w.one);
    size_t n = (size_t)w.pairs, dim = (size_t)w.dim;
    memcpy(part, w.one.m, n * sizeof(float));
    memcpy(part + n, w.one.l, n * sizeof(float));
    for (size_t i = 0; i < n; i++) memcpy(part + 2 * n + i * dim, w.one.acc + i * w.dp, dim * sizeof(float));
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

/* ---- writing KV: the bytes that the scalar version writes ---- */

static void to_bits(const float *x, int n, int type, uint16_t *h)
{
    vf top = vf_set1(65504.0f), low = vf_set1(-65504.0f);
    for (int d = 0; d < n; d += VW) {
        vf v = n - d >= VW ? vf_load(x + d) : vf_loadn(x + d, n - d);
        if (type == LR_F16)
            vf_store_f16(h + d, vf_max(low, vf_min(top, v)));
        else
            vf_store_bf16(h + d, v);
    }
}

static void put16(const float *x, int dim, int type, uint16_t *at, size_t stride)
{
    uint16_t h[64 + VW];
    for (int d = 0; d < dim; d += 64, x += 64, at += 64 * stride) {
        int n = dim - d < 64 ? dim - d : 64;
        to_bits(x, n, type, h);
        if (stride == 1)
            memcpy(at, h, (size_t)n * 2);
        else
            for (int j = 0; j < n; j++) at[j * stride] = h[j];
    }
}

static void put8(const float *x, int dim, int8_t *at, size_t stride, uint16_t *s, size_t s_stride)
{
    for (int g = 0; g < dim; g += LR_KV_GROUP, s += s_stride, x += LR_KV_GROUP) {
        int n = dim - g < LR_KV_GROUP ? dim - g : LR_KV_GROUP;
        vf top = vf_set1(0);
        for (int d = 0; d < n; d += VW) top = vf_max(vf_abs(vf_loadn(x + d, n - d < VW ? n - d : VW)), top);
        uint16_t h[VW];
        vf_store_f16(h, vf_min(vf_set1(65504.0f), vf_set1(vf_hmax(top) / 127.0f)));
        *s = h[0];
        float f = vec_f16(h[0]);
        for (int d = 0; d < n; d += VW) {
            int8_t q[VW];
            vf v = vf_div(vf_loadn(x + d, n - d < VW ? n - d : VW), vf_set1(f > 0 ? f : INFINITY));
            vf_store_i8(q, vf_max(vf_set1(-127), vf_min(vf_set1(127), vf_round(v))));
            for (int j = 0; j < VW && d + j < n; j++, at += stride) *at = q[j];
        }
    }
}

static void kv_put(const float *key, const float *val, int n_kv_heads, int head_dim, int type, int block_size, int slot,
                   char *k, char *v)
{
    size_t bs = (size_t)block_size, groups = (size_t)lr_kv_groups(head_dim), dim = (size_t)head_dim;
    size_t scales = lr_kv_scales_at(n_kv_heads, head_dim, block_size);
    for (size_t h = 0; h < (size_t)n_kv_heads; h++, key += dim, val += dim) {
        size_t k_at = h * dim * bs + slot, v_at = (h * bs + slot) * dim;
        if (type == LR_Q8_0) {
            put8(key, head_dim, (int8_t *)k + k_at, bs, (uint16_t *)(k + scales) + h * groups * bs + slot, bs);
            put8(val, head_dim, (int8_t *)v + v_at, 1, (uint16_t *)(v + scales) + (h * bs + slot) * groups, 1);
        } else if (type == LR_F32) {
            for (size_t d = 0; d < dim; d++) ((float *)k)[k_at + d * bs] = key[d];
            memcpy((float *)v + v_at, val, dim * sizeof(float));
        } else {
            put16(key, head_dim, type, (uint16_t *)k + k_at, bs);
            put16(val, head_dim, type, (uint16_t *)v + v_at, 1);
        }
    }
}

void VEC_NAME(lr_attn_fill)(lr_cpu_kernels *k)
{
    k->kv_put = kv_put;
    k->attn = attn;
    k->attn_part = attn_part;
    k->attn_combine = attn_combine;
}
