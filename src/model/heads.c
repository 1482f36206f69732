/* heads.c - see heads.h. Each head is a program of its own on the model's backend; heads that share the model's matrix
 * go through it together.
 */
#include "model/heads.h"
#include "base/dtype.h"
#include "base/mem.h"
#include "file/safetensors.h"
#include "model/graph_int.h"
#include <stdio.h>
#include <string.h>

enum { BLOCKS_MAX = 8 };

typedef struct head {
    lr_plan *plan;
    lr_weight *w[2 * BLOCKS_MAX + 1];
    int n_w;
    bool own; /* its output is logits, else a row for the model's matrix */
} head;

struct lr_heads {
    lr_graph *g;
    lr_safetensors *file;
    head heads[LR_HEADS_MAX];
    int n, max_rows;
    lr_plan *tail;                                     /* the model's own matrix, and what follows it */
    float *rows;                                       /* (n, max_rows, n_embd) */
    int32_t *numbers;                                  /* 0, 1, 2 ...: the rows of a batch, all wanted */
    void *copies[LR_HEADS_MAX * (2 * BLOCKS_MAX + 1)]; /* of tensors that do not lie at their type's multiples */
    int n_copies;
};

void lr_heads_free(lr_heads *h)
{
    if (!h) return;
    lr_backend *be = h->g->be;
    for (int i = 0; i < h->n; i++) {
        if (h->heads[i].plan) be->ops->plan_free(be, h->heads[i].plan);
        for (int j = 0; j < h->heads[i].n_w; j++) be->ops->weight_free(be, h->heads[i].w[j]);
    }
    if (h->tail) be->ops->plan_free(be, h->tail);
    for (int i = 0; i < h->n_copies; i++) lr_free_aligned(h->copies[i]);
    lr_safetensors_free(h->file);
    lr_free_aligned(h->rows);
    lr_free(h->numbers);
    lr_free(h);
}

int lr_heads_count(const lr_heads *h) { return h->n; }

/* ---- reading ---- */

static const lr_safetensors_tensor *find(const lr_heads *h, int i, int block, const char *rest)
{
    static const char *const prefixes[] = {"", "medusa_head.", "medusa_heads."};
    char name[80];
    const lr_safetensors_tensor *t = NULL;
    for (size_t p = 0; !t && p < sizeof prefixes / sizeof *prefixes; p++) {
        snprintf(name, sizeof name, "%s%d.%d.%s", prefixes[p], i, block, rest);
        t = lr_safetensors_find(h->file, name);
    }
    return t;
}

/* The tensor as a weight of the head, (n, k) or a vector of n. */
static int add_weight(lr_heads *h, head *to, const lr_safetensors_tensor *t, int n, int k, lr_error *err)
{
    bool vector = k == 0;
    if (t->type < 0) return lr_fail(err, LR_EUNSUPPORTED, "%s: type %s", t->name, t->dtype);
    if (t->n_dims != (vector ? 1 : 2) || t->shape[0] != (uint64_t)n || (!vector && t->shape[1] != (uint64_t)k))
        return lr_fail(err, LR_ESHAPE, "%s: %d dimensions, the first of %llu; %d x %d expected", t->name, t->n_dims,
                       t->n_dims ? (unsigned long long)t->shape[0] : 0ULL, n, vector ? 1 : k);
    lr_tensor x = {.name = t->name, .type = t->type, .n_dims = t->n_dims, .data = t->data, .size = t->size};
    x.ne[0] = vector ? n : k;
    x.ne[1] = vector ? 1 : n;
    x.ne[2] = x.ne[3] = 1;
    if ((uintptr_t)t->data % 4) {
        void *copy = lr_alloc_aligned(t->size);
        if (!copy) return lr_fail(err, LR_ENOMEM, "no memory for %s", t->name);
        memcpy(copy, t->data, t->size);
        x.data = h->copies[h->n_copies++] = copy;
    }
    int rc = h->g->be->ops->weight_new(h->g->be, &x, !vector, false, &to->w[to->n_w], err);
    if (!rc) to->n_w++;
    return rc;
}

/* Reads head h->n and compiles it; *more: there was one. */
static int read_head(lr_heads *h, bool *more, lr_error *err)
{
    int width = h->g->base.n_embd, n_vocab = h->g->base.n_vocab, i = h->n, b = 0, n_ops = 0, rc = 0, x = 1;
    int widths[3 * BLOCKS_MAX + 3], routes[3 * BLOCKS_MAX + 3];
    lr_op ops[3 * BLOCKS_MAX + 3];
    head *to = &h->heads[i];
    const lr_safetensors_tensor *w, *bias;
    for (int v = 0; v < 3 * BLOCKS_MAX + 3; v++) {
        widths[v] = width;
        routes[v] = -1;
    }
    ops[n_ops++] = (lr_op){.kind = LR_OP_INPUT, .in = {-1, -1}, .out = 0};
    ops[n_ops++] = (lr_op){.kind = LR_OP_ROWS, .in = {0, -1}, .out = 1};
    for (; !rc && b < BLOCKS_MAX && (w = find(h, i, b, "linear.weight")); b++) {
        lr_op *o = &ops[n_ops];
        rc = add_weight(h, to, w, width, width, err);
        if (!rc && (bias = find(h, i, b, "linear.bias"))) rc = add_weight(h, to, bias, width, 0, err);
        if (rc) return rc;
        o[0] = (lr_op){.kind = LR_OP_LINEAR, .in = {x, -1}, .out = x + 1, .w = to->w[to->n_w - (bias ? 2 : 1)]};
        o[0].bias = bias ? to->w[to->n_w - 1] : NULL;
        o[1] = (lr_op){.kind = LR_OP_ACT, .in = {x + 1, -1}, .out = x + 2};
        o[1].u.act = LR_ACT_SILU;
        o[2] = (lr_op){.kind = LR_OP_ADD, .in = {x, x + 2}, .out = x + 3};
        n_ops += 3;
        x += 3;
    }
    w = find(h, i, b, "weight");
    *more = b > 0 || w;
    if (!*more) return 0;
    to->own = w != NULL;
    h->n++;
    if (w) {
        if ((rc = add_weight(h, to, w, n_vocab, width, err))) return rc;
        ops[n_ops++] = (lr_op){.kind = LR_OP_LINEAR, .in = {x, -1}, .out = x + 1, .w = to->w[to->n_w - 1]};
        widths[++x] = n_vocab;
    }
    lr_program p = {x + 1, widths, routes, n_ops, ops, x, -1, false, 0};
    return h->g->be->ops->compile(h->g->be, &p, h->g->kv, h->max_rows, h->max_rows, &to->plan, err);
}

/* What the model does with its hidden rows, as a program. */
static int compile_tail(lr_heads *h, lr_error *err)
{
    lr_graph *g = h->g;
    int from = 0;
    while (from < g->n_ops && g->ops[from].out != g->hidden) from++;
    int n = g->n_ops - from - 1, rows = h->n * h->max_rows;
    if (n < 1 || g->logits == g->hidden)
        return lr_fail(err, LR_EUNSUPPORTED, "the model has no matrix behind its rows");
    lr_op *ops = lr_malloc((size_t)(n + 2) * sizeof *ops);
    int *width = lr_malloc((size_t)(g->n_values + 1) * sizeof *width), rc;
    int *route = lr_malloc((size_t)(g->n_values + 1) * sizeof *route);
    if (ops && width && route) {
        memcpy(route, g->route, (size_t)g->n_values * sizeof *route);
        route[g->n_values] = -1;
        memcpy(width, g->width, (size_t)g->n_values * sizeof *width);
        width[g->n_values] = width[g->hidden];
        ops[0] = (lr_op){.kind = LR_OP_INPUT, .in = {-1, -1}, .out = g->n_values};
        ops[1] = (lr_op){.kind = LR_OP_ROWS, .in = {g->n_values, -1}, .out = g->hidden};
        memcpy(ops + 2, g->ops + from + 1, (size_t)n * sizeof *ops);
        lr_program p = {g->n_values + 1, width, route, n + 2, ops, g->logits, -1, false, 0};
        rc = g->be->ops->compile(g->be, &p, g->kv, rows, rows, &h->tail, err);
    } else {
        rc = lr_fail(err, LR_ENOMEM, "no memory for heads");
    }
    lr_free(width);
    lr_free(route);
    lr_free(ops);
    return rc;
}

int lr_heads_new(lr_heads **out, lr_model *m, const char *path, int max_rows, lr_error *err)
{
    lr_graph *g = lr_graph__of(m);
    bool more = true, shared = false;
    if (!g || g->hidden < 0) return lr_fail(err, LR_EUNSUPPORTED, "heads: the model tells no hidden rows");
    lr_heads *h = lr_calloc(1, sizeof *h);
    if (!h) return lr_fail(err, LR_ENOMEM, "no memory for heads");
    h->g = g;
    h->max_rows = max_rows;
    h->numbers = lr_calloc((size_t)max_rows * LR_HEADS_MAX, sizeof *h->numbers);
    for (int i = 0; h->numbers && i < max_rows * LR_HEADS_MAX; i++) h->numbers[i] = i;
    int rc = h->numbers ? lr_safetensors_open(&h->file, path, false, err) : lr_fail(err, LR_ENOMEM, "no memory");
    while (!rc && more && h->n < LR_HEADS_MAX) rc = read_head(h, &more, err);
    for (int i = 0; i < h->n; i++) shared = shared || !h->heads[i].own;
    if (!rc && h->n == 0) rc = lr_fail(err, LR_EFORMAT, "no tensor 0.0.linear.weight, so there are no heads in it");
    if (!rc && shared) rc = compile_tail(h, err);
    if (!rc && shared) {
        h->rows = lr_alloc_aligned((size_t)h->n * (size_t)max_rows * (size_t)m->n_embd * sizeof(float));
        if (!h->rows) rc = lr_fail(err, LR_ENOMEM, "no memory for heads");
    }
    if (rc) {
        lr_heads_free(h);
        return lr_fail_prefix(err, "%s", path);
    }
    *out = h;
    return 0;
}

/* ---- running ---- */

static int run(lr_heads *h, lr_plan *plan, const float *in, int n, float *out, lr_error *err)
{
    lr_batch b = {.n_rows = n, .n_out = n, .out_rows = h->numbers, .input = in, .logits = out};
    return h->g->be->ops->run(h->g->be, plan, h->g->kv, &b, err);
}

int lr_heads_run(lr_heads *h, const float *hidden, int n, float *logits, lr_error *err)
{
    size_t row = (size_t)h->g->base.n_embd, all = (size_t)n * (size_t)h->g->base.n_vocab;
    int rc = 0, first = 0;
    for (int i = 0; i < h->n && !rc; i++) {
        float *out = h->heads[i].own ? logits + (size_t)i * all : h->rows + (size_t)i * (size_t)n * row;
        rc = run(h, h->heads[i].plan, hidden, n, out, err);
    }
    while (first < h->n && !rc) { /* runs of heads without a matrix of their own */
        int end = first;
        while (end < h->n && !h->heads[end].own) end++;
        if (end > first) {
            const float *in = h->rows + (size_t)first * (size_t)n * row;
            rc = run(h, h->tail, in, (end - first) * n, logits + (size_t)first * all, err);
        }
        first = end + 1;
    }
    return rc;
}
