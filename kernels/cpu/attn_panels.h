/* attn_panels.h - a step's keys and values, panel by panel; included by attn_vec.h.
 *
 * find_keys and find_values tell where a panel lies in the KV store. open_keys and open_values make it ready for the
 * two products: read where it lies, converted to float32 in scratch, or gathered position by position.
 */
#ifndef LR_KERNELS_CPU_ATTN_PANELS_H
#define LR_KERNELS_CPU_ATTN_PANELS_H

/* The panel of aligned tile i as it lies in the KV store -> kt, dimensions of keys; vt, columns of values. */
VEC_INLINE void convert_keys(const work *w, const step *s, int i, int n, const kind in)
{
    float *to = w->kt + i * LR_ATTN_TILE;
    vf scale[LR_ATTN_TILE / VW];
    for (int c = 0; c < LR_ATTN_TILE / VW; c++) scale[c] = vf_set1(0);
    for (size_t d = 0; d < (size_t)n; d++, to += LR_ATTN_STEP) {
        const char *k = s->k[i] + in_place(in, d) * s->ldk * in_bytes(in);
        const char *upper = in == IN_Q6 ? s->k[i] + s->upper + lr_kv_upper_place(d) * s->ldk : NULL;
        UNROLL for (int c = 0; c < LR_ATTN_TILE / VW; c++)
        {
            if (in >= IN_Q8 && d % LR_KV_GROUP == 0)
                scale[c] = vf_load_f16(s->ks[i] + d / LR_KV_GROUP * s->lds + c * VW);
            vf_store(to + c * VW,
                     in_load(in, k + c * VW * in_bytes(in), in == IN_Q6 ? upper + c * VW : NULL, d, scale[c]));
        }
        ask_next(k + s->k_next[i]);
    }
}

VEC_INLINE void convert_values(const work *w, const step *s, int i, int n, const kind in)
{
    const char *v = s->v[i];
    float *to = w->vt + (size_t)i * LR_ATTN_TILE * PANEL;
    for (int j = 0; j < LR_ATTN_TILE; j++, to += PANEL, v += s->ldv * in_bytes(in)) {
        for (size_t d = 0; d < (size_t)n; d += VW) {
            vf scale = vf_set1(in >= IN_Q8 ? vec_f16(s->vs[i][j * s->lds + d / LR_KV_GROUP]) : 0);
            vf_store(to + d, in_load(in, v + in_place(in, d) * in_bytes(in), NULL, d, scale));
            if (d * in_bytes(in) % 64 == 0) ask_next(v + in_place(in, d) * in_bytes(in) + s->v_next[i]);
        }
    }
}

static void convert(const work *w, const step *s, int i, int n, bool keys)
{
    switch (s->in) {
    case IN_F16:
        keys ? convert_keys(w, s, i, n, IN_F16) : convert_values(w, s, i, n, IN_F16);
        break;
    case IN_BF16:
        keys ? convert_keys(w, s, i, n, IN_BF16) : convert_values(w, s, i, n, IN_BF16);
        break;
    case IN_Q8:
        keys ? convert_keys(w, s, i, n, IN_Q8) : convert_values(w, s, i, n, IN_Q8);
        break;
    default:
        keys ? convert_keys(w, s, i, n, IN_Q6) : convert_values(w, s, i, n, IN_Q4);
        break;
    }
}

static float get(const lr_attn_task *t, const char *part, bool keys, size_t d, size_t slot)
{
    size_t dim = (size_t)t->head_dim, bs = (size_t)t->block_size, h = (size_t)t->kv_head;
    size_t at = keys ? (h * dim + d) * bs + slot : (h * bs + slot) * dim + d;
    switch (keys ? t->k_type : t->v_type) {
    case LR_F32:
        return ((const float *)part)[at];
    case LR_F16:
        return vec_f16(((const uint16_t *)part)[at]);
    case LR_BF16:
        return lr_bf16_to_f32(((const uint16_t *)part)[at]);
    default: {
        const uint16_t *scale;
        int q = lr_kv_int(t, part, keys, d, slot, &scale);
        return (float)q * vec_f16(*scale);
    }
    }
}

/* The slow way for blocks and dimensions of any size: one position at a time. Columns past head_dim are 0. */
static void gather_keys(const lr_attn_task *t, const work *w, const step *s, size_t d0, size_t d1)
{
    for (int j = s->lo; j <= s->hi; j++) {
        int slot;
        const char *b = lr_attn_block(t, t->k, s->base + j, &slot);
        for (size_t d = d0; d < d1; d++) w->kt[(d - d0) * LR_ATTN_STEP + j] = get(t, b, true, d, (size_t)slot);
    }
}

static void gather_values(const lr_attn_task *t, const work *w, const step *s, size_t d0, size_t d1)
{
    for (int j = s->lo; j <= s->hi; j++) {
        int slot;
        const char *b = lr_attn_block(t, t->v, s->base + j, &slot);
        for (size_t d = d0; d < d1; d++)
            w->vt[j * PANEL + d - d0] = d < (size_t)w->dim ? get(t, b, false, d, (size_t)slot) : 0;
    }
}

static bool tile_seen(const step *s, int i) { return i >= s->lo / LR_ATTN_TILE && i <= s->hi / LR_ATTN_TILE; }

static kind kind_of(int type, bool keys)
{
    switch (type) {
    case LR_F32:
        return IN_F32;
    case LR_F16:
        return IN_F16;
    case LR_BF16:
        return IN_BF16;
    default:
        return type == LR_Q8_0 ? IN_Q8 : keys ? IN_Q6 : IN_Q4;
    }
}

/* Where the panel from dimension d0 on lies in the KV store: aligned tiles. */
static void find_keys(const lr_attn_task *t, const work *w, step *s, int d0)
{
    size_t elem = lr_kv_elem(t->k_type), bs = (size_t)t->block_size, dim = (size_t)w->dim, h = (size_t)t->kv_head;
    size_t scales = lr_kv_scales_at(t->k_type, true, t->n_kv_heads, w->dim, t->block_size),
           groups = (size_t)lr_kv_groups(w->dim);
    s->in = kind_of(t->k_type, true);
    s->ldk = s->lds = bs;
    s->upper = lr_kv_upper_at(t->n_kv_heads, w->dim, t->block_size) + lr_kv_upper_place(h * dim + d0) * bs -
               lr_kv_place(LR_Q4_0, h * dim + d0) * bs;
    for (int i = 0; i < TILES; i++) {
        s->k[i] = s->kb[i] + (lr_kv_place(t->k_type, h * dim + d0) * bs + s->slot[i]) * elem;
        s->ks[i] = (const uint16_t *)(s->kb[i] + scales) + (h * groups + d0 / LR_KV_GROUP) * bs + s->slot[i];
    }
}

static void find_values(const lr_attn_task *t, const work *w, step *s, int d0)
{
    size_t elem = lr_kv_elem(t->v_type), bs = (size_t)t->block_size, dim = (size_t)w->dim, h = (size_t)t->kv_head;
    size_t scales = lr_kv_scales_at(t->v_type, false, t->n_kv_heads, w->dim, t->block_size),
           groups = (size_t)lr_kv_groups(w->dim);
    s->in = kind_of(t->v_type, false);
    s->ldv = lr_kv_place(t->v_type, dim);
    s->lds = groups;
    s->run = LR_ATTN_TILE;
    for (int i = 0; i < TILES; i++) {
        s->v[i] = s->vb[i] + lr_kv_place(t->v_type, (h * bs + s->slot[i]) * dim + d0) * elem;
        s->vs[i] = (const uint16_t *)(s->vb[i] + scales) + (h * bs + s->slot[i]) * groups + d0 / LR_KV_GROUP;
    }
}

static void open_keys(const lr_attn_task *t, const work *w, step *s, int d0, int d1)
{
    if (s->aligned) find_keys(t, w, s, d0);
    s->direct = s->aligned && (t->k_type == LR_F32 || w->pairs <= DIRECT_MAX);
    if (s->direct) return;
    for (int i = 0; s->aligned && i < TILES; i++)
        if (tile_seen(s, i)) convert(w, s, i, d1 - d0, true);
    if (!s->aligned) gather_keys(t, w, s, (size_t)d0, (size_t)d1);
    s->in = IN_F32;
    s->ldk = LR_ATTN_STEP;
    for (int i = 0; i < TILES; i++) s->k[i] = (const char *)(w->kt + i * LR_ATTN_TILE);
}

static void open_values(const lr_attn_task *t, const work *w, step *s, int d0, int d1)
{
    if (s->aligned) find_values(t, w, s, d0);
    s->direct = s->aligned && (t->v_type == LR_F32 || w->pairs <= DIRECT_MAX);
    if (s->direct) return;
    for (int i = 0; s->aligned && i < TILES; i++)
        if (tile_seen(s, i)) convert(w, s, i, d1 - d0, false);
    if (!s->aligned) gather_values(t, w, s, (size_t)d0, (size_t)d1);
    s->in = IN_F32;
    s->ldv = PANEL;
    s->run = LR_ATTN_STEP;
    for (int i = 0; i < TILES; i++) s->v[i] = (const char *)(w->vt + (size_t)i * LR_ATTN_TILE * PANEL);
}

#endif
