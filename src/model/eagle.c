/* eagle.c - see eagle.h. The draft is a program of its own on the target's backend, built from what the file holds. */
#include "model/eagle.h"
#include "base/dtype.h"
#include "base/encode.h"
#include "base/mem.h"
#include "file/safetensors.h"
#include "model/graph_int.h"
#include "model/part.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LAYERS_MAX = 8, WEIGHTS_MAX = 16 * LAYERS_MAX + 8, OPS_MAX = 20 * LAYERS_MAX + 16, TAPS = 3 };

typedef struct lr_eagle {
    lr_model base; /* first */
    lr_graph *g;   /* the target */
    lr_safetensors *file;
    lr_eagle_config cfg;
    bool third; /* the second shape */
    lr_weight *w[WEIGHTS_MAX];
    int n_w;
    void *copies[WEIGHTS_MAX]; /* of tensors, where the backend reads them or they lie badly */
    size_t bytes;              /* of weights */
    /* the program */
    lr_op *ops;
    int *width, *route;
    int n_ops, n_values;
    lr_kv_layer layers[LAYERS_MAX];
    int hidden, logits;
    lr_weight *fc, *fc_bias; /* second shape: of the features, a program of its own */
    int taps_width;
    /* running */
    lr_kv_store *kv;
    lr_plan *plan, *fuse;
    size_t kv_bytes;
    int32_t *numbers; /* 0, 1, 2 ... */
    int n_own;        /* vocabulary of the draft; 0 = the target's */
    int32_t *ids;     /* (n_own) the target's ids */
    float *small;     /* (max_out, n_own) */
} lr_eagle;

/* ---- weights ---- */

/* Rows of a matrix as Q8_0 in *to_rows, of *bytes. */
static int rounded(const lr_safetensors_tensor *t, int n, int k, void **to_rows, size_t *bytes, lr_error *err)
{
    size_t from = (size_t)(k * lr_dtype_bytes(t->type)), to = (size_t)(k / 32 * lr_dtype_bytes(LR_Q8_0));
    float *row = lr_malloc((size_t)k * sizeof *row);
    char *out = lr_alloc_aligned((size_t)n * to), *line = lr_malloc(from);
    int rc = row && out && line ? 0 : lr_fail(err, LR_ENOMEM, "no memory for %s", t->name);
    for (int i = 0; !rc && i < n; i++) {
        memcpy(line, (const char *)t->data + (size_t)i * from, from); /* files keep no alignment */
        lr_dtype_to_f32(t->type, line, row, (size_t)k);
        if (!lr_dtype_from_f32(LR_Q8_0, row, NULL, out + (size_t)i * to, (size_t)k))
            rc = lr_fail(err, LR_EFORMAT, "%s: values of row %d are not finite", t->name, i);
    }
    lr_free(row);
    lr_free(line);
    if (rc) lr_free_aligned(out);
    *to_rows = rc ? NULL : out;
    *bytes = (size_t)n * to;
    return rc;
}

/* Tensor `name`, (n, k) or a vector of n (k = 0); n = 0: any. NULL if there is none and it is not needed. */
static int get(lr_eagle *e, const char *name, int n, int k, bool embed, bool needed, lr_weight **out, lr_error *err)
{
    const lr_safetensors_tensor *t = lr_safetensors_find(e->file, name);
    bool vector = k == 0;
    *out = NULL;
    if (!t && !needed) return 0;
    if (!t) return lr_fail(err, LR_EFORMAT, "no tensor %s", name);
    if (t->type < 0) return lr_fail(err, LR_EUNSUPPORTED, "%s: type %s", t->name, t->dtype);
    if (t->n_dims != (vector ? 1 : 2) || (n && t->shape[0] != (uint64_t)n) || (!vector && t->shape[1] != (uint64_t)k) ||
        t->shape[0] < 1 || t->shape[0] > INT32_MAX)
        return lr_fail(err, LR_ESHAPE, "%s: %d dimensions, the first of %llu; %d x %d expected", name, t->n_dims,
                       t->n_dims ? (unsigned long long)t->shape[0] : 0ULL, n, vector ? 1 : k);
    if (e->n_w == WEIGHTS_MAX) return lr_fail(err, LR_ELIMIT, "too many tensors");
    n = (int)t->shape[0];
    lr_tensor x = {.name = t->name, .type = t->type, .n_dims = t->n_dims, .data = t->data, .size = t->size};
    x.ne[0] = vector ? n : k;
    x.ne[1] = vector ? 1 : n;
    x.ne[2] = x.ne[3] = 1;
    void *copy = NULL;
    if (!vector && !embed && !e->cfg.as_is && k % 32 == 0) {
        int rc = rounded(t, n, k, &copy, &x.size, err);
        if (rc) return rc;
        x.type = LR_Q8_0;
    } else if ((uintptr_t)t->data % 4) {
        if (!(copy = lr_alloc_aligned(t->size))) return lr_fail(err, LR_ENOMEM, "no memory for %s", name);
        memcpy(copy, t->data, t->size);
    }
    if (copy) x.data = copy;
    const lr_backend_ops *ops = e->g->be->ops;
    int rc = ops->weight_new(e->g->be, &x, !vector && !embed, embed, out, err);
    if (!rc && copy && ops->weight_keeps && !ops->weight_keeps(e->g->be, *out)) {
        lr_free_aligned(copy);
        copy = NULL;
    }
    if (rc) lr_free_aligned(copy);
    if (rc) return rc;
    e->copies[e->n_w] = copy;
    e->w[e->n_w++] = *out;
    e->bytes += x.size;
    return 0;
}

/* ---- the program ---- */

static int push(lr_eagle *e, lr_op op, int width)
{
    op.out = -1;
    if (width > 0) {
        e->width[e->n_values] = width;
        e->route[e->n_values] = -1;
        op.out = e->n_values++;
    }
    e->ops[e->n_ops++] = op;
    return op.out;
}

/* x . W^T + b; the bias if there is one. */
static int linear(lr_eagle *e, const char *prefix, const char *name, int in, int n, int *out, lr_error *err)
{
    char text[128];
    lr_op op = {.kind = LR_OP_LINEAR, .in = {in, -1}};
    lr_weight *w, *b;
    snprintf(text, sizeof text, "%s%s.weight", prefix, name);
    int rc = get(e, text, n, e->width[in], false, true, &w, err);
    snprintf(text, sizeof text, "%s%s.bias", prefix, name);
    if (!rc) rc = get(e, text, n, 0, false, false, &b, err);
    if (rc) return rc;
    op.w = w;
    op.bias = b;
    *out = push(e, op, n);
    return 0;
}

/* Normalised by a weight; `needed` or not: without it the value itself. */
static int norm(lr_eagle *e, const char *prefix, const char *name, int in, bool needed, int *out, lr_error *err)
{
    char text[128];
    lr_op op = {.kind = LR_OP_NORM, .in = {in, -1}};
    lr_weight *w;
    snprintf(text, sizeof text, "%s%s.weight", prefix, name);
    int rc = get(e, text, e->width[in], 0, false, needed, &w, err);
    *out = in;
    if (rc || !w) return rc;
    op.w = w;
    op.u.norm.eps = e->cfg.eps;
    op.u.norm.group = e->width[in];
    *out = push(e, op, e->width[in]);
    return 0;
}

static int rope(lr_eagle *e, int in, int n_heads)
{
    lr_op op = {.kind = LR_OP_ROPE, .in = {in, -1}};
    op.u.rope = (lr_rope){.n_heads = n_heads,
                          .head_dim = e->cfg.head_dim,
                          .n_rot = e->cfg.head_dim,
                          .base = e->cfg.rope_base,
                          .freq_scale = 1,
                          .attn_scale = 1};
    return push(e, op, e->width[in]);
}

static int concat(lr_eagle *e, int a, int b)
{
    lr_op op = {.kind = LR_OP_CONCAT, .in = {a, b}};
    op.u.part.n_heads = 1;
    op.u.part.n = e->width[b];
    op.u.part.shared = true;
    return push(e, op, e->width[a] + e->width[b]);
}

static int add(lr_eagle *e, int a, int b) { return push(e, (lr_op){.kind = LR_OP_ADD, .in = {a, b}}, e->width[a]); }

/* x + attention(in), then that plus its feed-forward network. */
static int layer(lr_eagle *e, const char *prefix, int x, int in, int *out, lr_error *err)
{
    const lr_eagle_config *c = &e->cfg;
    int q, k, v, y, up, n = e->base.n_kv_layers++, d = e->width[x], rc;
    int wide = c->n_heads * c->head_dim, narrow = c->n_kv_heads * c->head_dim;
    char text[128];
    if ((rc = linear(e, prefix, "self_attn.q_proj", in, wide, &q, err)) ||
        (rc = linear(e, prefix, "self_attn.k_proj", in, narrow, &k, err)) ||
        (rc = linear(e, prefix, "self_attn.v_proj", in, narrow, &v, err)))
        return rc;
    q = rope(e, q, c->n_heads);
    k = rope(e, k, c->n_kv_heads);
    e->layers[n] = (lr_kv_layer){c->n_kv_heads, c->head_dim, 0};
    lr_op kv = {.kind = LR_OP_KV, .in = {k, v}}, at = {.kind = LR_OP_ATTN, .in = {q, -1}};
    kv.u.attn = at.u.attn = (lr_attn){.layer = n,
                                      .n_heads = c->n_heads,
                                      .n_kv_heads = c->n_kv_heads,
                                      .head_dim = c->head_dim,
                                      .scale = 1 / sqrtf((float)c->head_dim)};
    push(e, kv, 0);
    y = push(e, at, wide);
    if ((rc = linear(e, prefix, "self_attn.o_proj", y, d, &y, err))) return rc;
    x = add(e, x, y);
    if ((rc = norm(e, prefix, "post_attention_layernorm", x, true, &in, err))) return rc;
    snprintf(text, sizeof text, "%smlp.gate_proj.weight", prefix);
    const lr_safetensors_tensor *t = lr_safetensors_find(e->file, text);
    int n_ff = t && t->n_dims == 2 && t->shape[0] <= 1 << 20 ? (int)t->shape[0] : 1;
    if ((rc = linear(e, prefix, "mlp.gate_proj", in, n_ff, &y, err)) ||
        (rc = linear(e, prefix, "mlp.up_proj", in, n_ff, &up, err)))
        return rc;
    lr_op glu = {.kind = LR_OP_GLU, .in = {y, up}};
    glu.u.act = LR_ACT_SILU;
    y = push(e, glu, n_ff);
    if ((rc = linear(e, prefix, "mlp.down_proj", y, d, &y, err))) return rc;
    *out = add(e, x, y);
    return 0;
}

/* Embedded tokens: by the file's embedding, or the target's. */
static int embed(lr_eagle *e, int *out, lr_error *err)
{
    const lr_graph *g = e->g;
    lr_op op = {.kind = LR_OP_EMBED, .in = {-1, -1}};
    lr_weight *w;
    op.u.scale = 1;
    int rc = get(e, "embed_tokens.weight", g->base.n_vocab, e->base.n_embd, true, false, &w, err);
    if (rc) return rc;
    op.w = w;
    for (int i = 0; i < g->n_ops && !op.w; i++)
        if (g->ops[i].kind == LR_OP_EMBED && g->width[g->ops[i].out] == e->base.n_embd) op = g->ops[i];
    if (!op.w) return lr_fail(err, LR_ESHAPE, "no tensor embed_tokens.weight, and the model has none of its width");
    *out = push(e, op, e->base.n_embd);
    return 0;
}

/* The ids of a draft's own vocabulary. */
static int read_ids(lr_eagle *e, lr_error *err)
{
    const lr_safetensors_tensor *t = lr_safetensors_find(e->file, "d2t");
    if (!t && e->n_own == e->g->base.n_vocab) return 0;
    if (!t || strcmp(t->dtype, "I64") != 0 || t->n_dims != 1 || t->shape[0] != (uint64_t)e->n_own)
        return lr_fail(err, LR_ESHAPE,
                       "lm_head.weight has %d rows, the model's vocabulary %d, and no d2t (I64) of as "
                       "many says which they are",
                       e->n_own, e->g->base.n_vocab);
    e->ids = lr_calloc((size_t)e->n_own, sizeof *e->ids);
    if (!e->ids) return lr_fail(err, LR_ENOMEM, "no memory for a vocabulary");
    for (int i = 0; i < e->n_own; i++) {
        int64_t more;
        memcpy(&more, (const char *)t->data + (size_t)i * 8, 8);
        if (more < -i || more >= e->g->base.n_vocab - i)
            return lr_fail(err, LR_EFORMAT, "d2t: token %d is none of the model's", i);
        e->ids[i] = (int32_t)(i + more);
    }
    return 0;
}

/* From the wanted rows to logits: by a matrix of the draft's, or what the target does with its hidden rows. */
static int head(lr_eagle *e, int rows, lr_error *err)
{
    const lr_graph *g = e->g;
    const lr_safetensors_tensor *t = lr_safetensors_find(e->file, "lm_head.weight");
    int y, from = 0, rc = norm(e, "", "norm", rows, false, &y, err);
    if (rc) return rc;
    if (t) {
        e->n_own = t->n_dims == 2 && t->shape[0] <= (uint64_t)g->base.n_vocab ? (int)t->shape[0] : 0;
        if ((rc = read_ids(e, err))) return rc;
        return linear(e, "", "lm_head", y, e->n_own, &e->logits, err);
    }
    while (from < g->n_ops && g->ops[from].out != g->hidden) from++;
    if (from + 1 >= g->n_ops || e->width[y] != g->width[g->hidden])
        return lr_fail(err, LR_EFORMAT, "no tensor lm_head.weight, and the model's own matrix does not fit");
    int base = e->n_values;
    memcpy(e->width + base, g->width, (size_t)g->n_values * sizeof *e->width);
    memcpy(e->route + base, g->route, (size_t)g->n_values * sizeof *e->route);
    e->n_values += g->n_values;
    for (int i = from + 1; i < g->n_ops; i++) {
        lr_op *o = &e->ops[e->n_ops++];
        *o = g->ops[i];
        for (int k = 0; k < 2; k++)
            if (o->in[k] >= 0) o->in[k] = o->in[k] == g->hidden ? y : base + o->in[k];
        o->out = o->out < 0 ? -1 : base + o->out;
    }
    e->logits = base + g->logits;
    return 0;
}

static int build(lr_eagle *e, lr_error *err)
{
    const lr_safetensors_tensor *fc = lr_safetensors_find(e->file, "fc.weight");
    int x, y, rc, d, target = e->g->base.n_embd;
    if (!fc || fc->n_dims != 2 || fc->shape[0] < 1 || fc->shape[0] > 1 << 20 || fc->shape[1] > 1 << 22)
        return lr_fail(err, LR_EFORMAT, "no matrix fc.weight, so this is no EAGLE head");
    e->base.n_embd = d = (int)fc->shape[0];
    e->third = lr_safetensors_find(e->file, "midlayer.hidden_norm.weight") != NULL;
    e->taps_width = e->third ? TAPS * target : target;
    int input = push(e, (lr_op){.kind = LR_OP_INPUT, .in = {-1, -1}}, d);
    if (!e->third && d != target)
        return lr_fail(err, LR_ESHAPE, "fc.weight gives rows of %d, the model's are of %d", d, target);
    if ((rc = embed(e, &x, err))) return rc;
    if (e->third) {
        if ((rc = get(e, "fc.weight", d, e->taps_width, false, true, &e->fc, err)) ||
            (rc = get(e, "fc.bias", d, 0, false, false, &e->fc_bias, err)) ||
            (rc = norm(e, "midlayer.", "input_layernorm", x, true, &x, err)) ||
            (rc = norm(e, "midlayer.", "hidden_norm", input, true, &y, err)) ||
            (rc = layer(e, "midlayer.", input, concat(e, x, y), &x, err)))
            return rc;
    } else {
        char prefix[32], name[64];
        if ((rc = linear(e, "", "fc", concat(e, x, input), d, &x, err))) return rc;
        for (int i = 0; i < LAYERS_MAX; i++) {
            snprintf(prefix, sizeof prefix, "layers.%d.", i);
            snprintf(name, sizeof name, "layers.%d.self_attn.q_proj.weight", i);
            if (i > 0 && !lr_safetensors_find(e->file, name)) break;
            if ((rc = norm(e, prefix, "input_layernorm", x, false, &y, err)) || (rc = layer(e, prefix, x, y, &x, err)))
                return rc;
        }
    }
    e->hidden = push(e, (lr_op){.kind = LR_OP_ROWS, .in = {x, -1}}, d);
    return head(e, e->hidden, err);
}

/* ---- the model ---- */

static lr_eagle *of(lr_model *m) { return (lr_eagle *)m; }

static void drop_plans(lr_eagle *e)
{
    lr_backend *be = e->g->be;
    if (e->plan) be->ops->plan_free(be, e->plan);
    if (e->fuse) be->ops->plan_free(be, e->fuse);
    if (e->kv) be->ops->kv_free(be, e->kv);
    e->plan = e->fuse = NULL;
    e->kv = NULL;
    lr_free(e->numbers);
    lr_free_aligned(e->small);
    e->numbers = NULL;
    e->small = NULL;
}

static void eagle_free(lr_model *m)
{
    lr_eagle *e = of(m);
    drop_plans(e);
    for (int i = 0; i < e->n_w; i++) {
        e->g->be->ops->weight_free(e->g->be, e->w[i]);
        lr_free_aligned(e->copies[i]);
    }
    lr_safetensors_free(e->file);
    lr_vocab_unref(m->vocab);
    lr_free(e->ops);
    lr_free(e->width);
    lr_free(e->route);
    lr_free(e->ids);
    lr_free(e);
}

static int compile_fuse(lr_eagle *e, int max_rows, lr_error *err)
{
    int width[] = {e->taps_width, e->taps_width, e->base.n_embd}, route[] = {-1, -1, -1};
    lr_op ops[] = {{.kind = LR_OP_INPUT, .in = {-1, -1}, .out = 0},
                   {.kind = LR_OP_ROWS, .in = {0, -1}, .out = 1},
                   {.kind = LR_OP_LINEAR, .in = {1, -1}, .out = 2, .w = e->fc, .bias = e->fc_bias}};
    lr_program p = {3, width, route, 3, ops, 2, -1, false, 0};
    return e->g->be->ops->compile(e->g->be, &p, e->kv, max_rows, max_rows, &e->fuse, err);
}

static int eagle_start(lr_model *m, const lr_kv_spec *spec, int max_rows, int max_out, lr_error *err)
{
    lr_eagle *e = of(m);
    lr_backend *be = e->g->be;
    lr_kv_spec s = *spec;
    size_t n;
    drop_plans(e);
    s.n_layers = m->n_kv_layers;
    s.layers = e->layers;
    int rc = be->ops->kv_new(be, &s, &e->kv, err);
    if (rc) return rc;
    e->kv_bytes = be->ops->kv_block_bytes(be, e->kv, 0) * (size_t)s.n_blocks[0];
    lr_program p = {e->n_values, e->width, e->route, e->n_ops, e->ops, e->logits, e->hidden, false, 0};
    rc = be->ops->compile(be, &p, e->kv, max_rows, max_out, &e->plan, err);
    if (!rc && e->third) rc = compile_fuse(e, max_rows, err);
    if (rc) return rc;
    e->numbers = lr_calloc((size_t)max_rows, sizeof *e->numbers);
    if (e->ids && lr_mul((size_t)max_out, (size_t)e->n_own * sizeof(float), &n)) e->small = lr_alloc_aligned(n);
    if (!e->numbers || (e->ids && !e->small)) return lr_fail(err, LR_ENOMEM, "no memory for drafts");
    for (int i = 0; i < max_rows; i++) e->numbers[i] = i;
    return 0;
}

static int eagle_forward(lr_model *m, const lr_batch *b, lr_error *err)
{
    lr_eagle *e = of(m);
    lr_batch x = *b;
    if (e->ids) {
        x.logits = e->small;
        x.shortlist = NULL; /* its ids are others */
    }
    int rc = e->g->be->ops->run(e->g->be, e->plan, e->kv, &x, err);
    for (int r = 0; !rc && e->ids && r < b->n_out; r++) {
        float *row = b->logits + (size_t)r * (size_t)m->n_vocab;
        const float *from = e->small + (size_t)r * (size_t)e->n_own;
        for (int i = 0; i < m->n_vocab; i++) row[i] = -INFINITY;
        for (int i = 0; i < e->n_own; i++) row[e->ids[i]] = from[i];
    }
    return rc;
}

int lr_eagle_width(const lr_model *m) { return ((const lr_eagle *)m)->taps_width; }

int lr_eagle_input(lr_model *m, const float *features, int n, float *out, lr_error *err)
{
    lr_eagle *e = of(m);
    if (!e->third) {
        memcpy(out, features, (size_t)n * (size_t)m->n_embd * sizeof *out);
        return 0;
    }
    lr_batch b = {.n_rows = n, .n_out = n, .out_rows = e->numbers, .input = features, .logits = out};
    return e->g->be->ops->run(e->g->be, e->fuse, e->kv, &b, err);
}

static void eagle_kv_copy(lr_model *m, int group, int dst, int src)
{
    of(m)->g->be->ops->kv_copy(of(m)->g->be, of(m)->kv, group, dst, src);
}

static size_t eagle_kv_block_bytes(const lr_model *m, int group)
{
    const lr_eagle *e = (const lr_eagle *)m;
    return e->g->be->ops->kv_block_bytes(e->g->be, e->kv, group);
}

static void eagle_kv_read(lr_model *m, int group, int block, void *dst)
{
    of(m)->g->be->ops->kv_read(of(m)->g->be, of(m)->kv, group, block, dst);
}

static void eagle_kv_write(lr_model *m, int group, int block, const void *src)
{
    of(m)->g->be->ops->kv_write(of(m)->g->be, of(m)->kv, group, block, src);
}

static void eagle_memory(const lr_model *m, size_t *weights, size_t *kv, size_t *work)
{
    const lr_eagle *e = (const lr_eagle *)m;
    *weights = e->bytes;
    *kv = e->kv_bytes;
    *work = 0; /* in the target's */
}

static const lr_model_ops eagle_ops = {
    .free = eagle_free,
    .start = eagle_start,
    .forward = eagle_forward,
    .kv_copy = eagle_kv_copy,
    .kv_block_bytes = eagle_kv_block_bytes,
    .kv_read = eagle_kv_read,
    .kv_write = eagle_kv_write,
    .memory = eagle_memory,
};

/* Features are told at these places and no others. */
static int check_taps(const lr_eagle *e, lr_error *err)
{
    int n = e->g->base.n_kv_layers, at[TAPS] = {2, n / 2, n - 3};
    const int *t = e->cfg.taps;
    for (int i = 0; i < TAPS && e->third && t[0] > 0; i++)
        if (t[i] != at[i])
            return lr_fail(err, LR_EUNSUPPORTED, "features behind layers %d, %d, %d; of %d layers only %d, %d, %d",
                           t[0], t[1], t[2], n, at[0], at[1], at[2]);
    return 0;
}

static int check_config(const lr_eagle_config *c, lr_error *err)
{
    if (c->n_heads < 1 || c->n_heads > 1024 || c->n_kv_heads < 1 || c->n_heads % c->n_kv_heads || c->head_dim < 2 ||
        c->head_dim > 1024 || c->head_dim % 2)
        return lr_fail(err, LR_EINVAL, "%d heads, %d of keys, %d dimensions are no attention", c->n_heads,
                       c->n_kv_heads, c->head_dim);
    if (!(c->eps >= 0) || !isfinite(c->eps) || !(c->rope_base > 0) || !isfinite(c->rope_base))
        return lr_fail(err, LR_EINVAL, "eps %g or the base of positions %g is no such number", (double)c->eps,
                       (double)c->rope_base);
    return 0;
}

int lr_eagle_new(lr_model **out, lr_model *target, const char *path, const lr_eagle_config *cfg, lr_error *err)
{
    lr_graph *g = lr_graph__of(target);
    if (!g || g->hidden < 0) return lr_fail(err, LR_EUNSUPPORTED, "eagle: the model tells no hidden rows");
    int rc = check_config(cfg, err);
    if (rc) return lr_fail_prefix(err, "%s", path);
    lr_eagle *e = lr_calloc(1, sizeof *e);
    if (!e) return lr_fail(err, LR_ENOMEM, "no memory for a draft");
    size_t n = OPS_MAX + (size_t)g->n_ops, v = OPS_MAX + (size_t)g->n_values;
    e->g = g;
    e->cfg = *cfg;
    e->base.ops = &eagle_ops;
    e->base.vocab = lr_vocab_ref(target->vocab);
    e->base.n_vocab = target->n_vocab;
    e->base.n_ctx = target->n_ctx;
    e->base.n_groups = 1;
    e->base.kv_layers = e->layers;
    snprintf(e->base.name, sizeof e->base.name, "eagle");
    e->ops = lr_calloc(n, sizeof *e->ops);
    e->width = lr_calloc(v, sizeof *e->width);
    e->route = lr_calloc(v, sizeof *e->route);
    rc = e->ops && e->width && e->route ? lr_safetensors_open(&e->file, path, false, err)
                                        : lr_fail(err, LR_ENOMEM, "no memory for a draft");
    if (!rc) rc = build(e, err);
    if (!rc) rc = check_taps(e, err);
    if (!rc) rc = lr_part_features(target, e->third ? TAPS : 1, err);
    if (rc) {
        eagle_free(&e->base);
        return lr_fail_prefix(err, "%s", path);
    }
    *out = &e->base;
    return 0;
}
