/* part.c - see part.h. */
#include "model/part.h"
#include "base/mem.h"
#include "model/graph_int.h"
#include <string.h>

struct lr_part {
    lr_graph *g;
    lr_plan *plan;
};

void lr_part_free(lr_part *p)
{
    if (!p) return;
    if (p->plan) p->g->be->ops->plan_free(p->g->be, p->plan);
    lr_free(p);
}

int lr_part_run(lr_part *p, const lr_batch *b, lr_error *err)
{
    return p->g->be->ops->run(p->g->be, p->plan, p->g->kv, b, err);
}

/* ---- where layers end ---- */

/* The operation that writes the KV of a layer. */
static int kv_op(const lr_graph *g, int layer)
{
    for (int i = 0; i < g->n_ops; i++)
        if (g->ops[i].kind == LR_OP_KV && g->ops[i].u.attn.layer == layer) return i;
    return -1;
}

/* Whether all that comes behind operation i depends on what came before it by its result alone. since: (n_values) the
 * operation that made each value. */
static bool is_cut(const lr_graph *g, int i, const int *since)
{
    if (g->ops[i].out < 0) return false;
    for (int j = i + 1; j < g->n_ops; j++)
        for (int k = 0; k < 2; k++) {
            int v = g->ops[j].in[k];
            if (v >= 0 && v != g->ops[i].out && since[v] <= i) return false;
        }
    return true;
}

/* Cuts among operations from .. to - 1; *op: the nth of them (the last for n = 0), -1 = none. */
static int cuts(const lr_graph *g, const int *since, int from, int to, int n, int *op)
{
    int count = 0;
    *op = -1;
    for (int i = from; i < to; i++)
        if (is_cut(g, i, since)) {
            count++;
            if (n == 0 || count == n) *op = i;
        }
    return count;
}

/* The operations that end layer `layers` - 1 and the last layer. */
static int find_ends(const lr_graph *g, int layers, int *exit, int *last, lr_error *err)
{
    int *since = lr_malloc((size_t)g->n_values * sizeof *since);
    if (!since) return lr_fail(err, LR_ENOMEM, "no memory for a part of the model");
    for (int i = 0; i < g->n_ops; i++)
        if (g->ops[i].out >= 0) since[g->ops[i].out] = i;
    int here = kv_op(g, layers - 1), next = kv_op(g, layers), end = kv_op(g, g->base.n_kv_layers - 1);
    int n = cuts(g, since, here, next, 0, exit);
    cuts(g, since, end, g->n_ops, n, last);
    lr_free(since);
    if (n > 0 && *last >= 0 && g->width[g->ops[*exit].out] == g->width[g->ops[*last].out]) return 0;
    return lr_fail(err, LR_EUNSUPPORTED, "layer %d of the model has no end where its head could stand", layers);
}

/* ---- the program ---- */

int lr_part_exit(lr_part **out, lr_model *m, int layers, int max_rows, int max_out, lr_error *err)
{
    lr_graph *g = lr_graph__of(m);
    int exit = 0, last = 0, rc;
    if (!g) return lr_fail(err, LR_EUNSUPPORTED, "the model has no layers to leave early");
    if (layers < 1 || layers >= m->n_kv_layers)
        return lr_fail(err, LR_EINVAL, "early exit: %d layers are not in 1..%d", layers, m->n_kv_layers - 1);
    if ((rc = find_ends(g, layers, &exit, &last, err))) return rc;
    int tail = g->n_ops - last - 1, n = exit + 1 + 1 + tail, rows = g->n_values;
    lr_part *p = lr_calloc(1, sizeof *p);
    lr_op *ops = lr_malloc((size_t)n * sizeof *ops);
    int *width = lr_malloc((size_t)(g->n_values + 1) * sizeof *width);
    int *route = lr_malloc((size_t)(g->n_values + 1) * sizeof *route);
    if (p && ops && width && route) {
        int from = g->ops[last].out, to = g->ops[exit].out;
        memcpy(width, g->width, (size_t)g->n_values * sizeof *width);
        width[rows] = width[to];
        memcpy(route, g->route, (size_t)g->n_values * sizeof *route);
        route[rows] = -1;
        memcpy(ops, g->ops, (size_t)(exit + 1) * sizeof *ops);
        ops[exit + 1] = (lr_op){.kind = LR_OP_ROWS, .in = {to, -1}, .out = rows};
        memcpy(ops + exit + 2, g->ops + last + 1, (size_t)tail * sizeof *ops);
        for (int i = exit + 2; i < n; i++)
            for (int k = 0; k < 2; k++)
                if (ops[i].in[k] == from) ops[i].in[k] = rows;
        lr_program prog = {g->n_values + 1, width, route, n, ops, g->logits, -1, false, 0};
        p->g = g;
        rc = g->be->ops->compile(g->be, &prog, g->kv, max_rows, max_out, &p->plan, err);
    } else {
        rc = lr_fail(err, LR_ENOMEM, "no memory for a part of the model");
    }
    lr_free(ops);
    lr_free(width);
    lr_free(route);
    if (rc) {
        lr_part_free(p);
        return rc;
    }
    *out = p;
    return 0;
}

/* ---- features ---- */

void lr_graph__wide_free(struct lr_graph_wide *w)
{
    if (!w) return;
    lr_free(w->ops);
    lr_free(w->width);
    lr_free(w->route);
    lr_free(w);
}

lr_program lr_graph__program(const lr_graph *g)
{
    if (g->wide) return g->wide->p;
    return (lr_program){g->n_values, g->width, g->route, g->n_ops, g->ops, g->logits, g->hidden, g->share.partial, 0};
}

int lr_graph__compile(lr_graph *g, lr_error *err)
{
    const lr_backend_ops *ops = g->be->ops;
    lr_program p = lr_graph__program(g);
    lr_plan *plan;
    int rc = ops->compile(g->be, &p, g->kv, g->max_rows, g->max_out, &plan, err);
    if (rc) return rc;
    if (g->plan) ops->plan_free(g->be, g->plan);
    g->plan = plan;
    g->base.peaks = ops->peaks && ops->peaks(plan);
    return 0;
}

/* Appends an operation to the wide program; its new value, as wide as `width`. */
static int append(struct lr_graph_wide *w, lr_op op, int width)
{
    w->width[w->p.n_values] = width;
    w->route[w->p.n_values] = -1;
    op.out = w->p.n_values++;
    w->ops[w->p.n_ops++] = op;
    return op.out;
}

/* Rows are narrowed behind the final hidden rows, and nowhere before. */
static int widen(const lr_graph *g, struct lr_graph_wide *w, lr_error *err)
{
    int last = kv_op(g, g->base.n_kv_layers - 1), rows = -1;
    int *as =
        lr_malloc((size_t)g->n_values * sizeof *as); /* what a value is now; -1: only its narrowed rows are left */
    if (!as) return lr_fail(err, LR_ENOMEM, "no memory for a part of the model");
    for (int i = 0; i < g->n_values; i++) as[i] = i;
    for (int i = 0; i < g->n_ops; i++) {
        lr_op op = g->ops[i];
        if (i > last && op.kind == LR_OP_ROWS) {
            as[op.out] = as[op.in[0]];
            continue;
        }
        for (int k = 0; k < 2; k++) {
            if (op.in[k] < 0) continue;
            op.in[k] = as[op.in[k]];
            if (op.in[k] >= 0) continue;
            lr_free(as);
            return lr_fail(err, LR_EUNSUPPORTED, "the model's head reads more than its hidden rows");
        }
        w->ops[w->p.n_ops++] = op;
        if (op.out != g->hidden) continue;
        rows = append(w, (lr_op){.kind = LR_OP_ROWS, .in = {op.out, -1}}, g->width[op.out]);
        for (int v = 0; v < g->n_values; v++) as[v] = -1;
        as[op.out] = rows;
        for (int j = i + 1; j < g->n_ops; j++)
            if (g->ops[j].out >= 0) as[g->ops[j].out] = g->ops[j].out;
    }
    lr_free(as);
    if (rows < 0 || g->logits == g->hidden)
        return lr_fail(err, LR_EUNSUPPORTED, "the model tells no hidden rows before its head");
    w->p.features = g->hidden + 1;
    w->p.hidden = rows;
    return 0;
}

/* The ends of three layers side by side, behind all else. */
static int tap(const lr_graph *g, struct lr_graph_wide *w, lr_error *err)
{
    int n = g->base.n_kv_layers, at[] = {2, n / 2, n - 3}, x = -1, exit, last;
    memcpy(w->ops, g->ops, (size_t)g->n_ops * sizeof *w->ops);
    w->p.n_ops = g->n_ops;
    for (int i = 0; i < 3; i++) {
        if (at[i] < 1 || at[i] >= n)
            return lr_fail(err, LR_EUNSUPPORTED, "%d layers are too few to tell features of three", n);
        int rc = find_ends(g, at[i], &exit, &last, err), y = rc ? -1 : g->ops[exit].out;
        if (rc) return rc;
        lr_op op = {.kind = LR_OP_CONCAT, .in = {x, y}};
        op.u.part.n_heads = 1;
        op.u.part.n = g->width[y];
        op.u.part.shared = true;
        x = i == 0 ? y : append(w, op, w->width[x] + g->width[y]);
    }
    w->p.features = x + 1;
    return 0;
}

int lr_part_features(lr_model *m, int taps, lr_error *err)
{
    lr_graph *g = lr_graph__of(m);
    if (!g || !g->be->ops->features || g->hidden < 0)
        return lr_fail(err, LR_EUNSUPPORTED, "the model, or its device, tells no features of its rows");
    if (g->wide) return lr_fail(err, LR_EUNSUPPORTED, "the model tells features to another draft already");
    struct lr_graph_wide *w = lr_calloc(1, sizeof *w);
    size_t ops = (size_t)g->n_ops + 4, values = (size_t)g->n_values + 4;
    int rc = w ? 0 : LR_ENOMEM;
    if (w) {
        w->ops = lr_malloc(ops * sizeof *w->ops);
        w->width = lr_malloc(values * sizeof *w->width);
        w->route = lr_malloc(values * sizeof *w->route);
        if (!w->ops || !w->width || !w->route) rc = LR_ENOMEM;
    }
    if (rc) {
        lr_fail(err, rc, "no memory for a part of the model");
    } else {
        memcpy(w->width, g->width, (size_t)g->n_values * sizeof *w->width);
        memcpy(w->route, g->route, (size_t)g->n_values * sizeof *w->route);
        w->p = (lr_program){g->n_values, w->width, w->route, 0, w->ops, g->logits, g->hidden, g->share.partial, 0};
        rc = taps == 1 ? widen(g, w, err) : tap(g, w, err);
    }
    g->wide = rc ? NULL : w;
    if (!rc) rc = lr_graph__compile(g, err);
    if (!rc) return 0;
    g->wide = NULL;
    lr_graph__wide_free(w);
    return rc;
}
