/* device_model.h - models of random weights straight on a backend, for tests and measurements of devices: no file, no
 * vocabulary, no Lua. The same shape and seed give the same weights on every backend.
 *
 *   dm_model m; lr_error err;
 *   dm_open(&m, backend, &shape, "f16", blocks, block size, max rows, &err); dm_run(&m, ...); dm_close(&m);
 */
#ifndef DEVICE_MODEL_H
#define DEVICE_MODEL_H
#include "backend/backend.h"
#include "base/dtype.h"
#include "base/mem.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct dm_shape {
    int width, layers, heads, kv_heads, dim, ff, vocab;
    int type, down_type; /* of weights; of the down projections, the output and the embedding. 0 is F32 */
    bool biases, head_norms, interleaved, sinks, post_norms, layer_norm, positions, untied;
    int window; /* of every other layer; 0 = none */
    float attn_cap, logit_cap;
    lr_act act;
    int experts, used; /* of each layer but the first; 0 = none */
    bool shared;       /* and beside them one for all rows */
    lr_gate gate;
    bool plain_ff;    /* up, act, down in place of the gated form */
    bool one_for_all; /* weights of one type and shape share their bytes: for models too large to make */
    unsigned seed;
} dm_shape;

enum { DM_MAX = 4096 };

typedef struct dm_model {
    lr_backend *be;
    dm_shape s;
    int n_weights, n_values, n_ops;
    lr_weight *w[DM_MAX];
    void *host[DM_MAX]; /* owned bytes */
    int width[DM_MAX], route[DM_MAX];
    lr_op ops[DM_MAX];
    lr_kv_layer kv_layers[256];
    float *sinks;
    lr_program prog;
    lr_kv_store *kv;
    lr_plan *plan;
    int block_size;
    struct {
        int type, n, k;
        void *bytes;
    } shared[64];
    int n_shared;
    size_t weight_bytes; /* of matrices, as in a file; read by a decode step */
    lr_error *err;
    int rc;
} dm_model;

/* ---- random weights ---- */

static inline uint32_t dm_next(uint64_t *s)
{
    *s = *s * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*s >> 32);
}

static inline float dm_float(uint64_t *s) { return (float)(int32_t)dm_next(s) / 2147483648.0f; } /* -1 .. 1 */

static inline void dm_half(char *at, float v)
{
    uint16_t h = lr_f32_to_f16(v);
    memcpy(at, &h, 2);
}

/* Where a block's half scales are: of the values, and of what is taken off them; -1 = none. spread: standard deviation
 * of the values for a scale of 1; off: the scale of what is taken off, for a scale of 1, so that the mean is 0. */
typedef struct dm_block {
    int type, scale, min;
    float spread, off;
} dm_block;

static inline const dm_block *dm_block_of(int type)
{
    static const dm_block blocks[] = {
        {LR_Q4_0, 0, -1, 4.6f, 0},     {LR_Q4_1, 0, 2, 4.6f, -7.5f}, {LR_Q5_0, 0, -1, 9.2f, 0},
        {LR_Q5_1, 0, 2, 9.2f, -15.5f}, {LR_Q8_0, 0, -1, 74, 0},      {LR_Q2_K, 80, 82, 10, 1.5f},
        {LR_Q3_K, 108, -1, 42, 0},     {LR_Q4_K, 0, 2, 210, 7.5f},   {LR_Q5_K, 0, 2, 420, 15.5f},
        {LR_Q6_K, 208, -1, 1360, 0},   {LR_IQ4_NL, 0, -1, 70, 0},    {LR_IQ4_XS, 0, -1, 1300, 0},
    };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        if (blocks[i].type == type) return &blocks[i];
    return NULL;
}

/* n values of a type with a standard deviation of about `spread`. */
static inline void dm_fill(int type, char *out, size_t n, float spread, uint64_t seed)
{
    uint64_t s = seed * 0x9E3779B97F4A7C15ull + 12345;
    const dm_block *b = dm_block_of(type);
    size_t block = (size_t)lr_dtype_block(type), bytes = (size_t)lr_dtype_bytes(type);
    for (size_t i = 0; i < n / block; i++) {
        char *at = out + i * bytes;
        float v = dm_float(&s) * spread * 1.7f;
        if (type == LR_F32) memcpy(at, &v, 4);
        if (type == LR_F16) dm_half(at, v);
        if (type == LR_BF16) {
            uint16_t h = lr_f32_to_bf16(v);
            memcpy(at, &h, 2);
        }
        if (type != LR_MXFP4 && !b) continue;
        for (size_t j = 0; j < bytes; j++) at[j] = (char)(dm_next(&s) >> 11);
        if (type == LR_MXFP4) at[0] = (char)(127 + (int)floorf(log2f(spread / 2.6f)));
        if (!b) continue;
        float scale = spread / b->spread * (1 + 0.2f * v / spread);
        dm_half(at + b->scale, scale);
        if (b->min >= 0) dm_half(at + b->min, scale * b->off);
    }
}

static inline void *dm_bytes(dm_model *m, int type, int n, int k, float spread)
{
    for (int i = 0; i < m->n_shared && m->s.one_for_all; i++)
        if (m->shared[i].type == type && m->shared[i].n == n && m->shared[i].k == k) return m->shared[i].bytes;
    size_t bytes = (size_t)n * (size_t)(k / lr_dtype_block(type)) * (size_t)lr_dtype_bytes(type);
    char *p = malloc(bytes + 64);
    if (!p) {
        m->rc = lr_fail(m->err, LR_ENOMEM, "no memory for random weights");
        return NULL;
    }
    dm_fill(type, p, (size_t)n * (size_t)k, spread, m->s.seed + (uint64_t)m->n_weights * 977 + 1);
    if (m->s.one_for_all && m->n_shared < 64) {
        m->shared[m->n_shared].type = type;
        m->shared[m->n_shared].n = n;
        m->shared[m->n_shared].k = k;
        m->shared[m->n_shared++].bytes = p;
    }
    m->host[m->n_weights] = p;
    return p;
}

/* ---- building the program ---- */

static inline const lr_weight *dm_weight(dm_model *m, int type, int n, int k, float spread, float mean, bool linear,
                                         bool embed)
{
    char name[32];
    if (m->rc) return NULL;
    void *p = dm_bytes(m, type, n, k, spread);
    if (!p) return NULL;
    if (mean != 0 && m->host[m->n_weights] == p)
        for (int i = 0; i < k; i++) ((float *)p)[i] += mean;
    snprintf(name, sizeof name, "w%d", m->n_weights);
    lr_tensor t = {.name = name, .type = type, .n_dims = n > 1 ? 2 : 1, .ne = {k, n, 1, 1}, .data = p};
    t.size = (size_t)n * (size_t)(k / lr_dtype_block(type)) * (size_t)lr_dtype_bytes(type);
    if (linear) m->weight_bytes += t.size;
    m->rc = m->be->ops->weight_new(m->be, &t, linear, embed, &m->w[m->n_weights], m->err);
    return m->rc ? NULL : m->w[m->n_weights++];
}

static inline int dm_op(dm_model *m, lr_op op, int width)
{
    op.out = -1;
    if (width > 0) {
        m->width[m->n_values] = width;
        m->route[m->n_values] = -1;
        op.out = m->n_values++;
    }
    m->ops[m->n_ops++] = op;
    return op.out;
}

static inline int dm_norm(dm_model *m, int x, int group)
{
    bool ln = m->s.layer_norm && group == m->width[x];
    lr_op op = {.kind = LR_OP_NORM, .in = {x, -1}, .w = dm_weight(m, LR_F32, 1, group, 0.1f, 1, false, false)};
    if (ln) op.bias = dm_weight(m, LR_F32, 1, group, 0.1f, 0, false, false);
    op.u.norm.eps = 1e-5f;
    op.u.norm.group = group;
    op.u.norm.layer_norm = ln;
    return dm_op(m, op, m->width[x]);
}

static inline int dm_linear(dm_model *m, int x, int n, int type, bool bias)
{
    int k = m->width[x];
    lr_op op = {.kind = LR_OP_LINEAR, .in = {x, -1}};
    op.w = dm_weight(m, type, n, k, 1.0f / sqrtf((float)k), 0, true, false);
    if (bias) op.bias = dm_weight(m, LR_F32, 1, n, 0.3f, 0, false, false);
    return dm_op(m, op, n);
}

static inline int dm_rope(dm_model *m, int x, int heads)
{
    lr_op op = {.kind = LR_OP_ROPE, .in = {x, -1}};
    op.u.rope = (lr_rope){.n_heads = heads,
                          .head_dim = m->s.dim,
                          .n_rot = m->s.dim,
                          .interleaved = m->s.interleaved,
                          .base = 10000,
                          .freq_scale = 1,
                          .attn_scale = 1};
    return dm_op(m, op, m->width[x]);
}

static inline int dm_two(dm_model *m, lr_op_kind kind, int a, int b)
{
    lr_op op = {.kind = kind, .in = {a, b}};
    if (kind == LR_OP_GLU) op.u.act = m->s.act;
    return dm_op(m, op, m->width[a]);
}

static inline int dm_attention(dm_model *m, int x, int l)
{
    const dm_shape *s = &m->s;
    int h = dm_norm(m, x, s->width);
    int q = dm_linear(m, h, s->heads * s->dim, s->type, s->biases);
    int k = dm_linear(m, h, s->kv_heads * s->dim, s->type, s->biases);
    int v = dm_linear(m, h, s->kv_heads * s->dim, s->type, s->biases);
    if (s->head_norms) q = dm_norm(m, q, s->dim);
    if (s->head_norms) k = dm_norm(m, k, s->dim);
    if (!s->positions) q = dm_rope(m, q, s->heads);
    if (!s->positions) k = dm_rope(m, k, s->kv_heads);
    bool narrow = s->window && l % 2 == 1;
    lr_attn a = {.layer = l,
                 .n_heads = s->heads,
                 .n_kv_heads = s->kv_heads,
                 .head_dim = s->dim,
                 .scale = 1.0f / sqrtf((float)s->dim),
                 .softcap = s->attn_cap,
                 .window = narrow ? s->window : 0,
                 .sinks = s->sinks ? m->sinks : NULL};
    m->kv_layers[l] = (lr_kv_layer){s->kv_heads, s->dim, narrow ? 1 : 0};
    lr_op kv = {.kind = LR_OP_KV, .in = {k, v}}, at = {.kind = LR_OP_ATTN, .in = {q, -1}};
    kv.u.attn = at.u.attn = a;
    dm_op(m, kv, 0);
    return dm_op(m, at, s->heads * s->dim);
}

static inline int dm_rows(dm_model *m, int x)
{
    return dm_op(m, (lr_op){.kind = LR_OP_ROWS, .in = {x, -1}}, m->width[x]);
}

/* Each row of x, token rows or slots of the route, with its expert's matrix. */
static inline int dm_experts(dm_model *m, int x, int route, int n, int type)
{
    int k = m->width[x], e = m->s.experts;
    lr_op op = {.kind = LR_OP_EXPERTS, .in = {x, route}};
    char name[32];
    void *p = m->rc ? NULL : dm_bytes(m, type, n * e, k, 1.0f / sqrtf((float)k));
    if (p) {
        snprintf(name, sizeof name, "w%d", m->n_weights);
        lr_tensor t = {.name = name, .type = type, .n_dims = 3, .ne = {k, n, e, 1}, .data = p};
        t.size = (size_t)(n * e) * (size_t)(k / lr_dtype_block(type)) * (size_t)lr_dtype_bytes(type);
        m->rc = m->be->ops->weight_new(m->be, &t, true, false, &m->w[m->n_weights], m->err);
        if (!m->rc) op.w = m->w[m->n_weights++];
    }
    if (m->s.biases) op.bias = dm_weight(m, LR_F32, e, n, 0.3f, 0, false, false);
    int out = dm_op(m, op, n);
    m->route[out] = route;
    return out;
}

static inline int dm_moe(dm_model *m, int h)
{
    const dm_shape *s = &m->s;
    lr_op r = {.kind = LR_OP_ROUTE, .in = {dm_linear(m, h, s->experts, LR_F32, false), -1}};
    r.u.route = (lr_route){.n_experts = s->experts, .n_used = s->used, .gate = s->gate, .normalize = true, .scale = 1};
    int route = dm_op(m, r, 2 * s->used);
    int gate = dm_experts(m, h, route, s->ff, s->type), up = dm_experts(m, h, route, s->ff, s->type);
    int y = dm_two(m, LR_OP_GLU, gate, up);
    m->route[y] = route;
    y = dm_experts(m, y, route, s->width, s->down_type);
    return dm_op(m, (lr_op){.kind = LR_OP_MIX, .in = {y, route}}, s->width);
}

static inline int dm_ff(dm_model *m, int x, bool experts)
{
    const dm_shape *s = &m->s;
    int h = dm_norm(m, x, s->width), y;
    if (experts) x = dm_two(m, LR_OP_ADD, x, dm_moe(m, h));
    if (experts && !s->shared) return x;
    if (s->plain_ff) {
        lr_op op = {.kind = LR_OP_ACT, .in = {dm_linear(m, h, s->ff, s->type, s->biases), -1}};
        op.u.act = s->act;
        y = dm_op(m, op, s->ff);
    } else {
        int gate = dm_linear(m, h, s->ff, s->type, false), up = dm_linear(m, h, s->ff, s->type, false);
        y = dm_two(m, LR_OP_GLU, gate, up);
    }
    y = dm_linear(m, y, s->width, s->down_type, s->biases);
    if (s->post_norms) y = dm_norm(m, y, s->width);
    return dm_two(m, LR_OP_ADD, x, y);
}

static inline void dm_build(dm_model *m)
{
    const dm_shape *s = &m->s;
    lr_op e = {.kind = LR_OP_EMBED, .in = {-1, -1}};
    e.w = dm_weight(m, s->down_type, s->vocab, s->width, 1, 0, false, true);
    e.u.scale = s->post_norms ? 1.5f : 1;
    int x = dm_op(m, e, s->width);
    if (s->positions) {
        lr_op p = {.kind = LR_OP_EMBED_AT, .in = {-1, -1}};
        p.w = dm_weight(m, LR_F32, 64, s->width, 1, 0, false, true);
        x = dm_two(m, LR_OP_ADD, x, dm_op(m, p, s->width));
    }
    for (int l = 0; l < s->layers && !m->rc; l++) {
        int a = dm_attention(m, x, l);
        if (l == s->layers - 1) { /* behind the last attention only the wanted rows go on */
            a = dm_rows(m, a);
            x = dm_rows(m, x);
        }
        a = dm_linear(m, a, s->width, s->type, s->biases);
        if (s->post_norms) a = dm_norm(m, a, s->width);
        x = dm_ff(m, dm_two(m, LR_OP_ADD, x, a), s->experts && l > 0);
    }
    int hidden = dm_norm(m, x, s->width), logits = dm_linear(m, hidden, s->vocab, s->down_type, false);
    if (s->logit_cap > 0) {
        lr_op cap = {.kind = LR_OP_SOFTCAP, .in = {logits, -1}};
        cap.u.scale = s->logit_cap;
        logits = dm_op(m, cap, s->vocab);
    }
    m->prog = (lr_program){.n_values = m->n_values,
                           .width = m->width,
                           .route = m->route,
                           .n_ops = m->n_ops,
                           .ops = m->ops,
                           .logits = logits,
                           .hidden = hidden};
}

/* ---- the interface ---- */

/* Frees what dm_open made, and the backend. */
static inline void dm_close(dm_model *m)
{
    const lr_backend_ops *ops = m->be->ops;
    if (m->plan) ops->plan_free(m->be, m->plan);
    if (m->kv) ops->kv_free(m->be, m->kv);
    for (int i = 0; i < m->n_weights; i++) ops->weight_free(m->be, m->w[i]);
    for (int i = 0; i < DM_MAX; i++) free(m->host[i]);
    free(m->sinks);
    lr_backend_free(m->be);
    memset(m, 0, sizeof *m);
}

/* Replaces KV and plan by ones of other sizes. */
static inline int dm_start(dm_model *m, int kv_type, int n_blocks, int block_size, int max_rows, int max_out,
                           lr_error *err)
{
    const lr_backend_ops *ops = m->be->ops;
    if (m->plan) ops->plan_free(m->be, m->plan);
    if (m->kv) ops->kv_free(m->be, m->kv);
    m->plan = NULL;
    m->kv = NULL;
    lr_kv_spec spec = {.n_layers = m->s.layers,
                       .layers = m->kv_layers,
                       .type = kv_type,
                       .value_type = kv_type,
                       .block_size = block_size,
                       .n_blocks = {n_blocks, m->s.window ? n_blocks : 0}};
    m->block_size = block_size;
    int rc = ops->kv_new(m->be, &spec, &m->kv, err);
    return rc ? rc : ops->compile(m->be, &m->prog, m->kv, max_rows, max_out, &m->plan, err);
}

/* Takes over the backend, also on failure. */
static inline int dm_open(dm_model *m, lr_backend *be, const dm_shape *s, lr_error *err)
{
    memset(m, 0, sizeof *m);
    m->be = be;
    m->s = *s;
    m->err = err;
    m->sinks = calloc((size_t)s->heads, sizeof *m->sinks);
    for (int i = 0; i < s->heads && m->sinks; i++) m->sinks[i] = 0.5f * (float)(i % 3) - 0.3f;
    if (s->layers * 20 + 20 > DM_MAX || s->layers > 256)
        m->rc = lr_fail(err, LR_EINVAL, "%d layers are too many", s->layers);
    else
        dm_build(m);
    int rc = m->rc;
    if (rc) dm_close(m);
    return rc;
}

/* A model on a CPU backend of its own, started with KV for 64 positions and batches of so many rows. */
static inline int dm_open_cpu(dm_model *m, const dm_shape *s, lr_compute compute, int threads, int rows, lr_error *err)
{
    lr_backend *be = NULL;
    lr_backend_config c = {.device = "cpu", .threads = threads, .compute = compute};
    int rc = lr_backend_new(&be, &c, err);
    if (!rc) rc = dm_open(m, be, s, err);
    return rc ? rc : dm_start(m, LR_F32, 4, 16, rows, rows, err);
}

/* Square error of n values, as a share of the square of what they should be. */
static inline double dm_error(const float *a, const float *b, size_t n)
{
    double d = 0, v = 0;
    for (size_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        v += (double)b[i] * (double)b[i];
    }
    return v > 0 ? d / v : 1;
}

#endif
