/* graph.c - see graph.h
 *
 * The builder keeps a list of values (widths) and of lr_op in script order. Two things are done for every architecture
 * here, so that scripts need not: attention gets its KV layer (and block group: windowed layers live in group 1 if the
 * model also has layers without a window), and behind the last attention only the rows whose logits are wanted go on.
 */
#include "model/graph_int.h"
#include "base/dtype.h"
#include "base/mem.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_VALUES = 1 << 16, MAX_WEIGHTS = 1 << 16 };

/* ---- growing arrays ---- */

static int grow(void *array, int *cap, int n, size_t size, lr_error *err)
{
    if (n < *cap) return 0;
    int want = *cap ? *cap * 2 : 64;
    void **p = array, *q = lr_reallocarray(*p, (size_t)want, size);
    if (!q) return lr_fail(err, LR_ENOMEM, "no memory for the layer graph");
    *p = q;
    *cap = want;
    return 0;
}

static int new_value(lr_graph *g, int width, int *out, lr_error *err)
{
    if (g->n_values >= MAX_VALUES) return lr_fail(err, LR_ELIMIT, "the graph has more than %d values", MAX_VALUES);
    int cap = g->cap_values, rc = grow(&g->route, &cap, g->n_values, sizeof *g->route, err);
    if (rc || (rc = grow(&g->width, &g->cap_values, g->n_values, sizeof *g->width, err))) return rc;
    g->route[g->n_values] = -1;
    g->width[g->n_values] = width;
    *out = g->n_values++;
    return 0;
}

static int new_op(lr_graph *g, lr_op op, int width, int *out, lr_error *err)
{
    int rc = grow(&g->ops, &g->cap_ops, g->n_ops, sizeof *g->ops, err);
    if (rc) return rc;
    op.out = -1;
    if (width > 0 && (rc = new_value(g, width, &op.out, err))) return rc;
    if (op.out >= 0 && op.in[0] >= 0 && op.kind != LR_OP_EXPERTS && op.kind != LR_OP_MIX)
        g->route[op.out] = g->route[op.in[0]];
    g->ops[g->n_ops++] = op;
    if (out) *out = op.out;
    return 0;
}

static int check_node(const lr_graph *g, int node, const char *what, lr_error *err)
{
    if (node >= 0 && node < g->n_values) return 0;
    return lr_fail(err, LR_EINVAL, "%s: the input is not a node of this graph (%d)", what, node);
}

/* A node of token rows. */
static int check_rows(const lr_graph *g, int node, const char *what, lr_error *err)
{
    int rc = check_node(g, node, what, err);
    if (!rc && g->route[node] >= 0)
        rc = lr_fail(err, LR_EINVAL, "%s: the input has a row for each chosen expert; mix it first", what);
    return rc;
}

static int check_same_rows(const lr_graph *g, int a, int b, const char *what, lr_error *err)
{
    if (g->route[a] == g->route[b]) return 0;
    return lr_fail(err, LR_EINVAL, "%s: one input has a row for each chosen expert, the other has not", what);
}

/* ---- weights ---- */

static void shape_text(const lr_tensor *t, char *buf, size_t cap)
{
    size_t n = 0;
    buf[0] = 0;
    for (int i = 0; i < t->n_dims && n < cap; i++)
        n += (size_t)snprintf(buf + n, cap - n, "%s%lld", i ? ", " : "", (long long)t->ne[i]);
}

/* Sees to it that a tensor that was found has its data. */
static int load_tensor(lr_graph *g, lr_tensor *t, lr_error *err)
{
    return t->data || !g->src.load ? 0 : g->src.load(g->src.user, t, err);
}

static void tensor_used(lr_graph *g, const lr_tensor *t, bool gone)
{
    if (g->src.used) g->src.used(g->src.user, t, gone);
}

static int find_tensor(lr_graph *g, const char *name, lr_tensor *t, lr_error *err)
{
    if (g->src.find(g->src.user, name, t)) return 0;
    return lr_fail(err, LR_ENOTFOUND, "the model file has no tensor '%s'", name);
}

/* Makes t its rows first .. first+n-1 (values, if it has one dimension). Matrices one behind the other are one. */
static int take_rows(lr_tensor *t, const char *name, int first, int n, lr_error *err)
{
    if (first < 0) return 0;
    int d = t->n_dims >= 2;
    int64_t k = d ? t->ne[0] : 1;
    int block = lr_dtype_block(t->type);
    if (t->n_dims == 3 && t->ne[2] >= 1 && t->ne[1] <= INT64_MAX / t->ne[2]) {
        t->ne[1] *= t->ne[2];
        t->ne[2] = 1;
        t->n_dims = 2;
    }
    if (t->n_dims > 2 || n < 1 || t->ne[d] - first < n || block < 1 || k % block || (!d && block != 1)) {
        char s[100];
        shape_text(t, s, sizeof s);
        return lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s) has no rows %d to %lld", name, s, first,
                       (long long)first + n - 1);
    }
    size_t row = (size_t)(k / block) * (size_t)lr_dtype_bytes(t->type);
    if (t->data) t->data = (const char *)t->data + (size_t)first * row;
    t->size = (size_t)n * row;
    t->first = first;
    t->ne[d] = n;
    return 0;
}

/* Makes t, a weight of experts, those from .. from+n-1 of them. */
static void take_experts(lr_tensor *t, int from, int n)
{
    size_t one = t->size / (size_t)t->ne[2];
    if (t->data) t->data = (const char *)t->data + (size_t)from * one;
    t->size = (size_t)n * one;
    t->first = (int64_t)from * t->ne[1];
    t->ne[2] = n;
}

int lr_graph__prepare(lr_graph *g, named_weight *w, lr_error *err)
{
    const lr_backend_ops *ops = g->be->ops;
    lr_tensor t = w->t;
    int rc = 0;
    if (w->n > 0 && t.n_dims == 3)
        take_experts(&t, w->from, w->n);
    else if (w->n > 0)
        rc = take_rows(&t, w->name, w->from, w->n, err);
    if (rc) return rc;
    if (w->n > 0) t.first += w->t.first;
    rc = load_tensor(g, &t, err);
    if (!rc) rc = ops->weight_new(g->be, &t, w->linear, w->embed, &w->w, err);
    if (rc == LR_ENOMEM && ops->room && g->src.bytes && !g->parted)
        return lr_fail_prefix(err, "tensor '%s' of the model's %.1f MiB", w->name, (double)g->src.bytes / (1 << 20));
    if (rc) return lr_fail_prefix(err, "tensor '%s'", w->name);
    tensor_used(g, &t, ops->weight_keeps && !ops->weight_keeps(g->be, w->w));
    return 0;
}

/* The prepared weight of a name; made at the first use. A tensor used both as embedding and as output head (tied) is
 * prepared twice, once a use: the embedding keeps reading the mapped file. */
static int get_weight(lr_graph *g, const char *name, lr_tensor *t, bool linear, bool embed, lr_weight **out,
                      lr_error *err)
{
    for (int i = 0; i < g->n_weights; i++) {
        named_weight *w = &g->weights[i];
        if (w->linear == linear && w->embed == embed && w->t.first == t->first && w->t.ne[1] == t->ne[1] &&
            strcmp(w->name, name) == 0) {
            *out = w->w;
            return 0;
        }
    }
    if (g->n_weights >= MAX_WEIGHTS) return lr_fail(err, LR_ELIMIT, "the graph has more than %d weights", MAX_WEIGHTS);
    int rc = grow(&g->weights, &g->cap_weights, g->n_weights, sizeof *g->weights, err);
    if (rc) return rc;
    named_weight w = {.name = lr_strdup(name), .linear = linear, .embed = embed, .t = *t};
    if (!w.name) return lr_fail(err, LR_ENOMEM, "no memory for the layer graph");
    if (g->parted)
        w.w = (lr_weight *)(uintptr_t)(g->n_weights + 1); /* a handle */
    else
        rc = lr_graph__prepare(g, &w, err);
    if (rc) {
        lr_free(w.name);
        return rc;
    }
    g->weights[g->n_weights++] = w;
    *out = w.w;
    return 0;
}

/* A vector of n values (norm weight, bias); first >= 0: that part of it. */
static int get_vector(lr_graph *g, const char *name, int n, int first, lr_weight **out, lr_error *err)
{
    lr_tensor t;
    int rc = find_tensor(g, name, &t, err);
    if (rc || (rc = take_rows(&t, name, first, n, err))) return rc;
    int64_t total = 1;
    for (int i = 0; i < t.n_dims; i++) total *= t.ne[i];
    if (t.ne[0] != n || total != n) {
        char s[100];
        shape_text(&t, s, sizeof s);
        return lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s) where (%d) is needed", name, s, n);
    }
    return get_weight(g, name, &t, false, false, out, err);
}

/* Takes over n floats, which ops may point to. */
static int own_floats(lr_graph *g, float *f, const float **out, lr_error *err)
{
    int rc = f ? grow(&g->owned, &g->cap_owned, g->n_owned, sizeof *g->owned, err)
               : lr_fail(err, LR_ENOMEM, "no memory for the layer graph");
    if (rc) {
        lr_free(f);
        return rc;
    }
    *out = g->owned[g->n_owned++] = f;
    return 0;
}

static int keep_floats(lr_graph *g, const char *name, int n, const float **out, lr_error *err)
{
    lr_tensor t;
    int rc = find_tensor(g, name, &t, err);
    if (rc) return rc;
    if (t.ne[0] != n || t.n_dims < 1)
        return lr_fail(err, LR_ESHAPE, "tensor '%s': %lld values where %d are needed", name, (long long)t.ne[0], n);
    if (lr_dtype_block(t.type) != 1)
        return lr_fail(err, LR_EUNSUPPORTED, "tensor '%s': type %s cannot hold factors", name, lr_dtype_name(t.type));
    if ((rc = load_tensor(g, &t, err))) return rc;
    float *f = lr_malloc((size_t)n * sizeof *f);
    if (f) lr_dtype_to_f32(t.type, t.data, f, (size_t)n);
    tensor_used(g, &t, true);
    if ((rc = own_floats(g, f, out, err))) return rc;
    return 0;
}

/* ---- building ---- */

int lr_graph_new(lr_graph **out, lr_backend *backend, lr_weight_source source, lr_error *err)
{
    lr_graph *g = lr_calloc(1, sizeof *g);
    if (!g) {
        lr_backend_free(backend);
        if (source.free) source.free(source.user);
        return lr_fail(err, LR_ENOMEM, "no memory for the layer graph");
    }
    g->be = backend;
    g->src = source;
    *out = g;
    return 0;
}

void lr_graph__drop_weights(lr_graph *g)
{
    for (int i = 0; i < g->n_weights; i++) {
        if (!g->parted) g->be->ops->weight_free(g->be, g->weights[i].w); /* else: a handle */
        lr_free(g->weights[i].name);
        lr_free(g->weights[i].seen.sums);
    }
    g->n_weights = 0;
}

void lr_graph_set_place(lr_graph *g, const lr_place *place)
{
    g->parted = true;
    g->place = *place;
}

void lr_graph_free(lr_graph *g)
{
    if (!g) return;
    const lr_backend_ops *ops = g->be->ops;
    if (g->plan) ops->plan_free(g->be, g->plan);
    if (g->kv) ops->kv_free(g->be, g->kv);
    lr_graph__wide_free(g->wide);
    lr_graph__drop_weights(g);
    for (int i = 0; i < g->n_owned; i++) lr_free(g->owned[i]);
    lr_share_deinit(&g->share);
    lr_backend_free(g->be);
    if (g->src.free) g->src.free(g->src.user);
    if (g->base.vocab) lr_vocab_unref(g->base.vocab);
    lr_free(g->base.kv_layers);
    lr_free(g->layer_window);
    lr_free(g->owned);
    lr_free(g->weights);
    lr_free(g->ops);
    lr_free(g->width);
    lr_free(g->route);
    lr_free(g);
}

int lr_graph_width(const lr_graph *g, int node) { return node >= 0 && node < g->n_values ? g->width[node] : 0; }

int lr_graph_shape(lr_graph *g, const char *name, int64_t ne[4])
{
    lr_tensor t;
    if (!g->src.find(g->src.user, name, &t)) return 0;
    memcpy(ne, t.ne, sizeof t.ne);
    return t.n_dims;
}

static int embed(lr_graph *g, lr_op op, const char *weight, lr_tensor *out_t, int *out, lr_error *err)
{
    lr_tensor t;
    lr_weight *w;
    int rc = find_tensor(g, weight, &t, err);
    if (rc) return rc;
    if (t.n_dims != 2 || t.ne[0] < 1 || t.ne[0] > (1 << 20) || t.ne[1] < 1 || t.ne[1] > (1 << 24)) {
        char s[100];
        shape_text(&t, s, sizeof s);
        return lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s) cannot be an embedding", weight, s);
    }
    if ((rc = get_weight(g, weight, &t, false, true, &w, err))) return rc;
    op.w = w;
    *out_t = t;
    return new_op(g, op, (int)t.ne[0], out, err);
}

int lr_graph_embed(lr_graph *g, const char *weight, float scale, int *out, lr_error *err)
{
    lr_tensor t = {0};
    lr_op op = {.kind = LR_OP_EMBED, .in = {-1, -1}, .u.scale = scale};
    int rc = embed(g, op, weight, &t, out, err);
    if (rc) return rc;
    if (!g->base.n_vocab || t.ne[1] < g->base.n_vocab) g->base.n_vocab = (int)t.ne[1]; /* ids that may come in */
    return 0;
}

int lr_graph_embed_at(lr_graph *g, const char *weight, int *out, lr_error *err)
{
    lr_tensor t = {0};
    lr_op op = {.kind = LR_OP_EMBED_AT, .in = {-1, -1}};
    int rc = embed(g, op, weight, &t, out, err);
    if (rc) return rc;
    if (!g->n_positions || t.ne[1] < g->n_positions) g->n_positions = (int)t.ne[1];
    return 0;
}

int lr_graph_norm(lr_graph *g, int in, const char *weight, const char *bias, float eps, int group, bool layer_norm,
                  int *out, lr_error *err)
{
    int rc = check_node(g, in, weight ? weight : "norm", err);
    if (rc) return rc;
    int width = g->width[in], n = group > 0 ? group : width;
    if (width % n)
        return lr_fail(err, LR_ESHAPE, "tensor '%s': width %d is not a multiple of the normalised %d",
                       weight ? weight : "norm", width, n);
    if (!(eps >= 0) || !isfinite(eps))
        return lr_fail(err, LR_EINVAL, "norm '%s': eps is not a number >= 0", weight ? weight : "");
    lr_op op = {.kind = LR_OP_NORM, .in = {in, -1}};
    lr_weight *w = NULL, *b = NULL;
    if (weight && (rc = get_vector(g, weight, n, -1, &w, err))) return rc;
    if (bias && (rc = get_vector(g, bias, n, -1, &b, err))) return rc;
    op.w = w;
    op.bias = b;
    op.u.norm.eps = eps;
    op.u.norm.group = n;
    op.u.norm.layer_norm = layer_norm;
    return new_op(g, op, width, out, err);
}

int lr_graph_linear(lr_graph *g, int in, const char *weight, const char *bias, int n_out, int first, int *out,
                    lr_error *err)
{
    lr_tensor t;
    int rc = check_rows(g, in, weight, err);
    if (rc || (rc = find_tensor(g, weight, &t, err)) || (rc = take_rows(&t, weight, first, n_out, err))) return rc;
    char s[100];
    shape_text(&t, s, sizeof s);
    if (t.n_dims > 2 || t.ne[0] != g->width[in])
        return lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s) does not fit an input of width %d", weight, s,
                       g->width[in]);
    int64_t n = t.n_dims == 2 ? t.ne[1] : 1;
    if (n < 1 || n > (1 << 24) || (n_out > 0 && n != n_out))
        return lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s) where (%d, %d) is needed", weight, s, g->width[in],
                       n_out);
    lr_op op = {.kind = LR_OP_LINEAR, .in = {in, -1}};
    lr_weight *w = NULL, *b = NULL;
    if ((rc = get_weight(g, weight, &t, true, false, &w, err))) return rc;
    if (bias && (rc = get_vector(g, bias, (int)n, first, &b, err))) return rc;
    op.w = w;
    op.bias = b;
    return new_op(g, op, (int)n, out, err);
}

int lr_graph_rope(lr_graph *g, int in, const lr_rope *rope, const char *factors_name, int *out, lr_error *err)
{
    int rc = check_rows(g, in, "rope", err);
    if (rc) return rc;
    lr_op op = {.kind = LR_OP_ROPE, .in = {in, -1}};
    op.u.rope = *rope;
    const lr_rope *r = &op.u.rope;
    if (r->n_heads < 1 || r->head_dim < 2 || (int64_t)r->n_heads * r->head_dim != g->width[in])
        return lr_fail(err, LR_ESHAPE, "rope: %d heads of %d do not make the input's width %d", r->n_heads, r->head_dim,
                       g->width[in]);
    if (r->n_rot < 2 || r->n_rot > r->head_dim || r->n_rot % 2)
        return lr_fail(err, LR_EINVAL, "rope: %d rotated values of a head of %d", r->n_rot, r->head_dim);
    if (!(r->base > 0) || !isfinite(r->base))
        return lr_fail(err, LR_EINVAL, "rope: base %g is not a positive number", (double)r->base);
    if (!isfinite(r->freq_scale) || !isfinite(r->attn_scale))
        return lr_fail(err, LR_EINVAL, "rope: a scale is not a number");
    op.u.rope.factors = NULL;
    size_t half = (size_t)r->n_rot / 2;
    for (size_t i = 0; rope->factors && i < half; i++)
        if (!(fabsf(rope->factors[i]) > 0) || !isfinite(rope->factors[i]))
            return lr_fail(err, LR_EINVAL, "rope: factor %zu is %g", i + 1, (double)rope->factors[i]);
    if (rope->factors && (rc = own_floats(g, lr_memdup(rope->factors, half * sizeof(float)), &op.u.rope.factors, err)))
        return rc;
    if (factors_name && (rc = keep_floats(g, factors_name, r->n_rot / 2, &op.u.rope.factors, err))) return rc;
    return new_op(g, op, g->width[in], out, err);
}

static int attention_shapes(const lr_graph *g, int q, int k, int v, const lr_attn *a, lr_error *err)
{
    if (a->n_heads < 1 || a->n_kv_heads < 1 || a->head_dim < 1)
        return lr_fail(err, LR_EINVAL, "attention: %d heads, %d KV heads, head width %d", a->n_heads, a->n_kv_heads,
                       a->head_dim);
    if (a->n_heads % a->n_kv_heads)
        return lr_fail(err, LR_ESHAPE, "attention: %d heads are not a multiple of %d KV heads", a->n_heads,
                       a->n_kv_heads);
    if ((int64_t)a->n_heads * a->head_dim != g->width[q])
        return lr_fail(err, LR_ESHAPE, "attention: %d heads of %d do not make the queries' width %d", a->n_heads,
                       a->head_dim, g->width[q]);
    int64_t w = (int64_t)a->n_kv_heads * a->head_dim;
    if (w != g->width[k] || w != g->width[v])
        return lr_fail(err, LR_ESHAPE, "attention: %d KV heads of %d, but keys are %d and values %d wide",
                       a->n_kv_heads, a->head_dim, g->width[k], g->width[v]);
    if (!isfinite(a->scale) || !(a->softcap >= 0) || a->window < 0)
        return lr_fail(err, LR_EINVAL, "attention: scale %g, softcap %g, window %d", (double)a->scale,
                       (double)a->softcap, a->window);
    return 0;
}

int lr_graph_attention(lr_graph *g, int q, int k, int v, lr_attn attn, const char *sinks_name, int *out, lr_error *err)
{
    int rc;
    if ((rc = check_rows(g, q, "attention", err)) || (rc = check_rows(g, k, "attention", err)) ||
        (rc = check_rows(g, v, "attention", err)))
        return rc;
    if ((rc = attention_shapes(g, q, k, v, &attn, err))) return rc;
    lr_model *m = &g->base;
    int cap = g->cap_layers;
    if ((rc = grow(&g->layer_window, &cap, m->n_kv_layers, sizeof *g->layer_window, err))) return rc;
    if (cap != g->cap_layers) {
        lr_kv_layer *l = lr_reallocarray(m->kv_layers, (size_t)cap, sizeof *l);
        if (!l) return lr_fail(err, LR_ENOMEM, "no memory for the layer graph");
        m->kv_layers = l;
        g->cap_layers = cap;
    }
    attn.sinks = NULL;
    if (sinks_name && (rc = keep_floats(g, sinks_name, attn.n_heads, &attn.sinks, err))) return rc;
    attn.layer = m->n_kv_layers;
    lr_op kv = {.kind = LR_OP_KV, .in = {k, v}}, at = {.kind = LR_OP_ATTN, .in = {q, -1}};
    kv.u.attn = attn;
    at.u.attn = attn;
    if ((rc = new_op(g, kv, 0, NULL, err)) || (rc = new_op(g, at, g->width[q], out, err))) return rc;
    m->kv_layers[m->n_kv_layers] = (lr_kv_layer){attn.n_kv_heads, attn.head_dim, 0};
    g->layer_window[m->n_kv_layers++] = attn.window;
    return 0;
}

int lr_graph_binary(lr_graph *g, lr_op_kind kind, int a, int b, int *out, lr_error *err)
{
    const char *what = kind == LR_OP_ADD ? "add" : "mul";
    int rc;
    if ((rc = check_node(g, a, what, err)) || (rc = check_node(g, b, what, err)) ||
        (rc = check_same_rows(g, a, b, what, err)))
        return rc;
    if (g->width[a] != g->width[b] && !(kind == LR_OP_MUL && g->width[b] == 1))
        return lr_fail(err, LR_ESHAPE, "%s: widths %d and %d differ", what, g->width[a], g->width[b]);
    lr_op op = {.kind = kind, .in = {a, b}};
    return new_op(g, op, g->width[a], out, err);
}

int lr_graph_glu(lr_graph *g, int gate, int up, lr_act act, int *out, lr_error *err)
{
    int rc;
    if ((rc = check_node(g, gate, "glu", err)) || (rc = check_node(g, up, "glu", err)) ||
        (rc = check_same_rows(g, gate, up, "glu", err)))
        return rc;
    if (g->width[gate] != g->width[up])
        return lr_fail(err, LR_ESHAPE, "glu: widths %d and %d differ", g->width[gate], g->width[up]);
    lr_op op = {.kind = LR_OP_GLU, .in = {gate, up}};
    op.u.act = act;
    return new_op(g, op, g->width[gate], out, err);
}

int lr_graph_act(lr_graph *g, int in, lr_act act, int *out, lr_error *err)
{
    int rc = check_node(g, in, "act", err);
    if (rc) return rc;
    if (act == LR_ACT_SWIGLU_CLAMP) return lr_fail(err, LR_EINVAL, "act: swiglu_clamp needs a gate and an input");
    lr_op op = {.kind = LR_OP_ACT, .in = {in, -1}};
    op.u.act = act;
    return new_op(g, op, g->width[in], out, err);
}

int lr_graph_scale(lr_graph *g, lr_op_kind kind, int in, float scale, int *out, lr_error *err)
{
    int rc = check_node(g, in, kind == LR_OP_SCALE ? "scale" : "softcap", err);
    if (rc) return rc;
    if (!isfinite(scale) || (kind == LR_OP_SOFTCAP && scale <= 0))
        return lr_fail(err, LR_EINVAL, "scale: %g is not usable", (double)scale);
    lr_op op = {.kind = kind, .in = {in, -1}};
    op.u.scale = scale;
    return new_op(g, op, g->width[in], out, err);
}

/* ---- parts of heads ---- */

static int check_heads(const lr_graph *g, int in, int n_heads, const char *what, lr_error *err)
{
    int rc = check_node(g, in, what, err);
    if (!rc && (n_heads < 1 || g->width[in] % n_heads))
        rc = lr_fail(err, LR_ESHAPE, "%s: width %d is not a multiple of %d heads", what, g->width[in], n_heads);
    return rc;
}

int lr_graph_slice(lr_graph *g, int in, int n_heads, int first, int n, int *out, lr_error *err)
{
    int rc = check_heads(g, in, n_heads, "slice", err);
    if (rc) return rc;
    int width = g->width[in] / n_heads;
    if (first < 0 || n < 1 || first > width || n > width - first)
        return lr_fail(err, LR_ESHAPE, "slice: values %d to %lld of heads of %d", first, (long long)first + n - 1,
                       width);
    lr_op op = {.kind = LR_OP_PART, .in = {in, -1}};
    op.u.part.n_heads = n_heads;
    op.u.part.first = first;
    op.u.part.n = n;
    return new_op(g, op, n_heads * n, out, err);
}

int lr_graph_concat(lr_graph *g, int a, int b, int n_heads, int n, int *out, lr_error *err)
{
    int rc = check_rows(g, a, "concat", err);
    if (rc || (rc = check_heads(g, a, n_heads, "concat", err)) || (b >= 0 && (rc = check_rows(g, b, "concat", err))))
        return rc;
    int64_t width = g->width[a] + (int64_t)n_heads * n;
    if (n < 1 || width > 1 << 24 || (b >= 0 && g->width[b] != n && g->width[b] != (int64_t)n_heads * n))
        return lr_fail(err, LR_ESHAPE, "concat: %d heads with %d values more, out of %d", n_heads, n,
                       b >= 0 ? g->width[b] : 0);
    lr_op op = {.kind = LR_OP_CONCAT, .in = {a, b}};
    op.u.part.n_heads = n_heads;
    op.u.part.n = n;
    op.u.part.shared = b >= 0 && g->width[b] == n;
    return new_op(g, op, (int)width, out, err);
}

/* ---- mixture of experts ---- */

int lr_graph_route(lr_graph *g, int logits, const lr_route *t, const char *bias_name, int *out, lr_error *err)
{
    int rc = check_rows(g, logits, "route", err);
    if (rc) return rc;
    if (t->n_experts < 1 || t->n_experts > LR_EXPERTS_MAX || t->n_experts != g->width[logits])
        return lr_fail(err, LR_ESHAPE, "route: %d experts (of at most %d), but the logits are %d wide", t->n_experts,
                       LR_EXPERTS_MAX, g->width[logits]);
    if (t->n_used < 1 || t->n_used > t->n_experts)
        return lr_fail(err, LR_EINVAL, "route: %d experts used of %d", t->n_used, t->n_experts);
    if (!isfinite(t->scale)) return lr_fail(err, LR_EINVAL, "route: the scale is not a number");
    int n = t->n_groups, per = n > 0 ? t->n_experts / n : 0;
    if (n < 0 || (n && (t->n_experts % n || t->n_groups_used < 1 || t->n_groups_used > n || t->group_best < 1 ||
                        t->group_best > per || t->n_used > t->n_groups_used * per)))
        return lr_fail(err, LR_EINVAL, "route: %d of %d experts out of %d of %d groups, by the best %d", t->n_used,
                       t->n_experts, t->n_groups_used, n, t->group_best);
    lr_op op = {.kind = LR_OP_ROUTE, .in = {logits, -1}, .u.route = *t};
    lr_weight *b = NULL;
    if (bias_name && (rc = get_vector(g, bias_name, t->n_experts, -1, &b, err))) return rc;
    op.bias = b;
    return new_op(g, op, 2 * t->n_used, out, err);
}

/* The choice that a route stands for; NULL and an error if the node is none. */
static const lr_route *check_route(const lr_graph *g, int node, const char *what, lr_error *err)
{
    for (int i = 0; i < g->n_ops; i++)
        if (g->ops[i].kind == LR_OP_ROUTE && g->ops[i].out == node) return &g->ops[i].u.route;
    lr_fail(err, LR_EINVAL, "%s: node %d is no route", what, node);
    return NULL;
}

int lr_graph_experts(lr_graph *g, int in, int route, const char *weight, const char *bias, int n_out, int *out,
                     lr_error *err)
{
    lr_tensor t;
    int rc = check_node(g, in, weight, err);
    const lr_route *r = rc ? NULL : check_route(g, route, weight, err);
    if (!r) return err->code;
    if (g->route[in] >= 0 && g->route[in] != route)
        return lr_fail(err, LR_EINVAL, "%s: the input's rows belong to another route", weight);
    if ((rc = find_tensor(g, weight, &t, err))) return rc;
    char s[100];
    shape_text(&t, s, sizeof s);
    if (t.n_dims != 3 || t.ne[0] != g->width[in] || t.ne[2] != r->n_experts || t.ne[1] < 1 || t.ne[1] > (1 << 24) ||
        (n_out > 0 && t.ne[1] != n_out))
        return lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s) where (%d, %d, %d) is needed", weight, s, g->width[in],
                       n_out, r->n_experts);
    lr_op op = {.kind = LR_OP_EXPERTS, .in = {in, route}};
    lr_weight *w = NULL, *b = NULL;
    int n_experts = r->n_experts, n = (int)t.ne[1];
    if ((rc = get_weight(g, weight, &t, true, false, &w, err))) return rc;
    if (bias) {
        if ((rc = find_tensor(g, bias, &t, err))) return rc;
        shape_text(&t, s, sizeof s);
        if (t.n_dims != 2 || t.ne[0] != n || t.ne[1] != n_experts)
            return lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s) where (%d, %d) is needed", bias, s, n, n_experts);
        if ((rc = get_weight(g, bias, &t, false, false, &b, err))) return rc;
    }
    op.w = w;
    op.bias = b;
    if ((rc = new_op(g, op, n, out, err))) return rc;
    g->route[*out] = route;
    return 0;
}

int lr_graph_mix(lr_graph *g, int in, int route, int *out, lr_error *err)
{
    int rc = check_node(g, in, "mix", err);
    if (rc || !check_route(g, route, "mix", err)) return err->code;
    if (g->route[in] != route) return lr_fail(err, LR_EINVAL, "mix: the input's rows are not those of this route");
    lr_op op = {.kind = LR_OP_MIX, .in = {in, route}};
    return new_op(g, op, g->width[in], out, err);
}

/* ---- finishing ---- */

/* Puts LR_OP_ROWS behind the last attention: values made before it and read after it are narrowed to the wanted rows.
 */
static int narrow_rows(lr_graph *g, lr_error *err)
{
    int last = -1;
    for (int i = 0; i < g->n_ops; i++)
        if (g->ops[i].kind == LR_OP_ATTN) last = i;
    if (last < 0) return lr_fail(err, LR_EINVAL, "the graph has no attention");
    int n_tail = g->n_ops - last - 1, n_old = g->n_values;
    lr_op *tail = lr_malloc((size_t)(n_tail + 1) * sizeof *tail);
    int *narrowed = lr_malloc((size_t)n_old * sizeof *narrowed), rc = 0;
    if (!tail || !narrowed) rc = lr_fail(err, LR_ENOMEM, "no memory for the layer graph");
    if (!rc) {
        memcpy(tail, g->ops + last + 1, (size_t)n_tail * sizeof *tail);
        g->n_ops = last + 1;
        for (int i = 0; i < n_old; i++) narrowed[i] = -1;
        for (int i = 0; i < n_tail; i++)
            if (tail[i].out >= 0) narrowed[tail[i].out] = tail[i].out; /* made behind: already narrow */
    }
    for (int i = 0; i < n_tail && !rc; i++)
        for (int j = 0; j < 2 && !rc; j++) {
            int v = tail[i].in[j];
            if (v < 0 || narrowed[v] >= 0) continue;
            if (g->route[v] >= 0 || tail[i].kind == LR_OP_MIX || (tail[i].kind == LR_OP_EXPERTS && j == 1)) {
                rc = lr_fail(err, LR_EINVAL, "the last attention stands between experts and their route");
                continue;
            }
            lr_op op = {.kind = LR_OP_ROWS, .in = {v, -1}};
            rc = new_op(g, op, g->width[v], &narrowed[v], err);
        }
    for (int i = 0; i < n_tail && !rc; i++) {
        for (int j = 0; j < 2; j++)
            if (tail[i].in[j] >= 0) tail[i].in[j] = narrowed[tail[i].in[j]];
        if (!(rc = grow(&g->ops, &g->cap_ops, g->n_ops, sizeof *g->ops, err))) g->ops[g->n_ops++] = tail[i];
    }
    lr_free(tail);
    lr_free(narrowed);
    return rc;
}

static void set_groups(lr_graph *g)
{
    lr_model *m = &g->base;
    bool plain = false;
    int widest = 0;
    for (int i = 0; i < m->n_kv_layers; i++) {
        if (g->layer_window[i] == 0)
            plain = true;
        else if (g->layer_window[i] > widest)
            widest = g->layer_window[i];
    }
    m->n_groups = 1;
    m->window[0] = plain ? 0 : widest;
    if (!plain || !widest) return;
    m->n_groups = 2;
    m->window[1] = widest;
    for (int i = 0; i < m->n_kv_layers; i++) m->kv_layers[i].group = g->layer_window[i] > 0;
}

int lr_graph_finish(lr_graph *g, int logits, int hidden, const lr_graph_info *info, lr_model **out, lr_error *err)
{
    int rc = check_node(g, logits, "logits", err);
    if (rc || (hidden >= 0 && (rc = check_node(g, hidden, "hidden", err)))) return rc;
    int n_vocab = g->width[logits];
    if (g->base.n_vocab && n_vocab > g->base.n_vocab)
        return lr_fail(err, LR_ESHAPE, "logits are %d wide, but the embedding has %d rows", n_vocab, g->base.n_vocab);
    if ((uint32_t)n_vocab < lr_vocab_size(info->vocab))
        return lr_fail(err, LR_ESHAPE, "logits are %d wide, but the vocabulary has %u tokens", n_vocab,
                       lr_vocab_size(info->vocab));
    if ((rc = narrow_rows(g, err))) return rc;
    set_groups(g);
    g->logits = logits;
    g->hidden = hidden;
    lr_model *m = &g->base;
    m->n_embd = hidden >= 0 ? g->width[hidden] : 0;
    if (g->parted && (rc = lr_graph__take_share(g, err))) return rc;
    if (g->src.intact && (rc = g->src.intact(g->src.user, true, err))) return rc;
    m->ops = &lr_graph__ops;
    m->n_vocab = n_vocab;
    m->n_ctx = info->n_ctx;
    m->echoes = g->be->ops->echoes;
    m->draws = g->be->ops->draws;
    m->halves = g->be->ops->launch != NULL;
    if (g->n_positions && g->n_positions < m->n_ctx) m->n_ctx = g->n_positions;
    m->fingerprint = info->fingerprint;
    m->vocab = lr_vocab_ref(info->vocab);
    snprintf(m->name, sizeof m->name, "%s", info->name ? info->name : "model");
    *out = m;
    return 0;
}
