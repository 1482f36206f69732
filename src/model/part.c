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
        lr_program prog = {g->n_values + 1, width, route, n, ops, g->logits, -1, false};
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
