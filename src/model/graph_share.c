/* graph_share.c - a layer graph becomes the share of it that one rank computes: see share.h.
 *
 * Until then its operations hold numbers in place of weights; now those of this rank's operations are prepared, and of
 * each only the rows that the rank has.
 */
#include "base/mem.h"
#include "model/graph_int.h"
#include <string.h>

static int weight_of_share(lr_graph *g, const named_weight *old, int from, int n, named_weight *made, int *n_made,
                           const lr_weight **out, lr_error *err)
{
    for (int i = 0; i < *n_made; i++) {
        const named_weight *w = &made[i];
        if (w->t.first == old->t.first && w->t.ne[1] == old->t.ne[1] && strcmp(w->name, old->name) == 0 &&
            w->linear == old->linear && w->embed == old->embed && w->from == from && w->n == n) {
            *out = w->w;
            return 0;
        }
    }
    named_weight w = *old;
    w.from = from;
    w.n = n;
    if (!(w.name = lr_strdup(old->name))) return lr_fail(err, LR_ENOMEM, "no memory for the layer graph");
    int rc = lr_graph__prepare(g, &w, err);
    if (rc) {
        lr_free(w.name);
        return rc;
    }
    made[(*n_made)++] = w;
    *out = w.w;
    return 0;
}

static const named_weight *handle(const lr_graph *g, const lr_weight *w)
{
    return w ? &g->weights[(uintptr_t)w - 1] : NULL;
}

/* Puts prepared weights in the place of handles: of the part's operations alone, and of these its rows. */
static int prepare_share(lr_graph *g, lr_error *err)
{
    lr_share *p = &g->share;
    named_weight *made = lr_calloc((size_t)p->n_ops * 2 + 1, sizeof *made);
    int n = 0, rc = made ? 0 : lr_fail(err, LR_ENOMEM, "no memory for the layer graph");
    for (int i = 0; i < p->n_ops && !rc; i++) {
        lr_op *o = &p->ops[i];
        const named_weight *w = handle(g, o->w), *b = handle(g, o->bias);
        if (w) rc = weight_of_share(g, w, p->rows[i].from, p->rows[i].n, made, &n, &o->w, err);
        if (b && !rc) rc = weight_of_share(g, b, p->rows[i].from, p->rows[i].n, made, &n, &o->bias, err);
    }
    lr_graph__drop_weights(g);
    g->parted = false; /* what is in the list now is prepared */
    lr_free(g->weights);
    g->weights = made;
    g->n_weights = g->cap_weights = n;
    return rc;
}

int lr_graph__take_share(lr_graph *g, lr_error *err)
{
    lr_program whole = {g->n_values, g->width, g->route, g->n_ops, g->ops, g->logits, g->hidden, false, 0};
    size_t *cost = lr_calloc((size_t)g->n_ops + 1, sizeof *cost);
    if (!cost) return lr_fail(err, LR_ENOMEM, "no memory for the layer graph");
    for (int i = 0; i < g->n_ops; i++) {
        const named_weight *w = handle(g, g->ops[i].w);
        if (w && !w->embed) cost[i] = w->t.size;
    }
    lr_share *p = &g->share;
    lr_model *m = &g->base;
    int rc = lr_share_make(p, &whole, m->kv_layers, m->n_kv_layers, cost, &g->place, err);
    lr_free(cost);
    if (!rc) rc = prepare_share(g, err);
    if (rc) return rc;
    lr_free(g->ops);
    lr_free(g->width);
    lr_free(g->route);
    lr_free(m->kv_layers);
    g->ops = p->ops;
    g->width = p->width;
    g->route = p->route;
    g->n_ops = p->n_ops;
    g->n_values = p->n_values;
    m->kv_layers = p->layers;
    m->n_kv_layers = p->n_layers;
    g->logits = p->logits;
    g->hidden = p->hidden;
    p->ops = NULL; /* the graph's now */
    p->width = p->route = NULL;
    p->layers = NULL;
    return 0;
}
