/* graph_model.c - a finished layer graph as a model: what model.h asks of one, passed on to the graph's backend. */
#include "model/adapter.h"
#include "model/graph_int.h"
#include <string.h>

static void model_free(lr_model *m)
{
    lr_adapters_drop(m);
    lr_graph_free((lr_graph *)m);
}

static int model_start(lr_model *m, const lr_kv_spec *spec, int max_rows, int max_out, lr_error *err)
{
    lr_graph *g = (lr_graph *)m;
    const lr_backend_ops *ops = g->be->ops;
    if (g->plan) ops->plan_free(g->be, g->plan);
    if (g->kv) ops->kv_free(g->be, g->kv);
    g->plan = NULL;
    g->kv = NULL;
    lr_kv_spec s = lr_model_kv_spec(&g->base, spec, g->share.first_layer);
    int rc = ops->kv_new(g->be, &s, &g->kv, err);
    if (rc) return rc;
    g->max_rows = max_rows;
    g->max_out = max_out;
    return lr_graph__compile(g, err);
}

static int model_forward(lr_model *m, const lr_batch *b, lr_error *err)
{
    lr_graph *g = (lr_graph *)m;
    int rc = g->be->ops->run(g->be, g->plan, g->kv, b, err);
    return !rc && g->src.intact ? g->src.intact(g->src.user, false, err) : rc;
}

static int model_launch(lr_model *m, const lr_batch *b, lr_error *err)
{
    lr_graph *g = (lr_graph *)m;
    return g->be->ops->launch(g->be, g->plan, g->kv, b, err);
}

static int model_finish(lr_model *m, const lr_batch *b, lr_error *err)
{
    lr_graph *g = (lr_graph *)m;
    int rc = g->be->ops->finish(g->be, g->plan, b, err);
    return !rc && g->src.intact ? g->src.intact(g->src.user, false, err) : rc;
}

static void model_kv_copy(lr_model *m, int group, int dst, int src)
{
    lr_graph *g = (lr_graph *)m;
    g->be->ops->kv_copy(g->be, g->kv, group, dst, src);
}

static size_t model_kv_block_bytes(const lr_model *m, int group)
{
    const lr_graph *g = (const lr_graph *)m;
    return g->be->ops->kv_block_bytes(g->be, g->kv, group);
}

static void model_kv_read(lr_model *m, int group, int block, void *dst)
{
    lr_graph *g = (lr_graph *)m;
    g->be->ops->kv_read(g->be, g->kv, group, block, dst);
}

static void model_kv_write(lr_model *m, int group, int block, const void *src)
{
    lr_graph *g = (lr_graph *)m;
    g->be->ops->kv_write(g->be, g->kv, group, block, src);
}

static void model_memory(const lr_model *m, size_t *weights, size_t *kv, size_t *work)
{
    const lr_graph *g = (const lr_graph *)m;
    g->be->ops->memory(g->be, weights, kv, work);
}

static size_t model_room(lr_model *m, const lr_kv_spec *spec, int max_rows, int max_out)
{
    const lr_graph *g = (lr_graph *)m;
    const lr_backend_ops *ops = g->be->ops;
    size_t room = ops->room ? ops->room(g->be) : 0, work = 0;
    if (room && spec && ops->work) {
        lr_kv_spec s = lr_model_kv_spec(&g->base, spec, g->share.first_layer);
        lr_program p = lr_graph__program(g);
        work = ops->work(g->be, &p, &s, max_rows, max_out);
    }
    return work < room ? room - work : room > 0;
}

static int model_threads(const lr_model *m)
{
    const lr_graph *g = (const lr_graph *)m;
    return g->be->ops->threads ? g->be->ops->threads(g->be) : 1;
}

static void model_parallel(lr_model *m, lr_pool_fn fn, void *arg)
{
    lr_graph *g = (lr_graph *)m;
    if (g->be->ops->parallel)
        g->be->ops->parallel(g->be, fn, arg);
    else
        fn(arg, 0, 1);
}

const lr_model_ops lr_graph__ops = {
    .free = model_free,
    .start = model_start,
    .forward = model_forward,
    .kv_copy = model_kv_copy,
    .kv_block_bytes = model_kv_block_bytes,
    .kv_read = model_kv_read,
    .kv_write = model_kv_write,
    .memory = model_memory,
    .room = model_room,
    .parallel = model_parallel,
    .threads = model_threads,
    .launch = model_launch,
    .finish = model_finish,
};

const lr_share *lr_graph_share(const lr_model *m)
{
    const lr_graph *g = (const lr_graph *)m;
    return m->ops == &lr_graph__ops && g->place.tp ? &g->share : NULL;
}

lr_graph *lr_graph__of(lr_model *m) { return m->ops == &lr_graph__ops ? (lr_graph *)m : NULL; }

bool lr_graph_product(lr_model *m, const char *tensor, int i, lr_graph_product_info *out)
{
    if (m->ops != &lr_graph__ops) return false;
    lr_graph *g = (lr_graph *)m;
    lr_tensor t;
    for (int k = 0; k < g->n_weights; k++) {
        const named_weight *w = &g->weights[k];
        if (!w->linear || strcmp(w->name, tensor) != 0 || i-- > 0) continue;
        if (!g->src.find(g->src.user, tensor, &t) || t.n_dims > 2) return false;
        *out = (lr_graph_product_info){w->w, t.ne[0], t.n_dims == 2 ? t.ne[1] : 1, (int)w->t.first};
        return true;
    }
    return false;
}

lr_backend *lr_model_backend(lr_model *m) { return m->ops == &lr_graph__ops ? ((lr_graph *)m)->be : NULL; }
