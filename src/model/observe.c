/* observe.c - what a model's matrices are multiplied with, added up while it runs: see lr_model_observe. */
#include "base/mem.h"
#include "model/graph_int.h"

static void forget(lr_graph *g)
{
    for (int i = 0; i < g->n_weights; i++) {
        named_weight *w = &g->weights[i];
        if (!w->seen.sums) continue;
        g->be->ops->observe(g->be, w->w, NULL);
        lr_free(w->seen.sums);
        w->seen = (lr_observed){0};
    }
}

int lr_model_observe(lr_model *m, bool on, lr_error *err)
{
    lr_graph *g = lr_graph__of(m);
    if (!g || !g->be->ops->observe)
        return lr_fail(err, LR_EUNSUPPORTED, "what this model's matrices are multiplied with can't be observed");
    forget(g);
    for (int i = 0; on && i < g->n_weights; i++) {
        named_weight *w = &g->weights[i];
        if (!w->linear || w->t.ne[2] > 1) continue;
        w->seen.sums = lr_calloc((size_t)w->t.ne[0], sizeof *w->seen.sums);
        if (!w->seen.sums) {
            forget(g);
            return lr_fail(err, LR_ENOMEM, "no memory for sums of %lld inputs", (long long)w->t.ne[0]);
        }
        g->be->ops->observe(g->be, w->w, &w->seen);
    }
    return 0;
}

bool lr_model_observed(lr_model *m, size_t i, const char **name, int *k, const lr_observed **seen)
{
    lr_graph *g = lr_graph__of(m);
    if (!g) return false;
    for (int j = 0; j < g->n_weights; j++) {
        const named_weight *w = &g->weights[j];
        if (!w->seen.sums || i-- > 0) continue;
        *name = w->name;
        *k = (int)w->t.ne[0];
        *seen = &w->seen;
        return true;
    }
    return false;
}
