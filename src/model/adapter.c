/* adapter.c - see adapter.h */
#include "model/adapter.h"
#include "base/mem.h"
#include "model/graph_int.h"
#include <math.h>
#include <string.h>

struct lr_adapter {
    int refs;
    lr_model *model; /* NULL once it is gone */
    lr_adapter *prev, *next;
    lr_lora *lora;
    uint64_t fingerprint;
    size_t bytes;
};

static uint64_t mix(uint64_t h, const void *data, size_t n)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u; /* FNV-1a */
    return h;
}

static int check_part(lr_model *m, const lr_adapter_part *p, int *n_products, lr_error *err)
{
    lr_graph_product_info w;
    int n = 0;
    while (lr_graph_product(m, p->weight, n, &w)) n++;
    *n_products += n;
    if (!n)
        return lr_fail(err, LR_ENOTFOUND, "the model has no matrix product with '%s' that an adapter could change",
                       p->weight);
    lr_graph_product(m, p->weight, 0, &w);
    if (p->rank < 1 || p->rank > LR_LORA_RANK_MAX)
        return lr_fail(err, LR_EUNSUPPORTED, "'%s': rank %d is not in 1..%d", p->weight, p->rank, LR_LORA_RANK_MAX);
    if (!isfinite(p->scale)) return lr_fail(err, LR_EFORMAT, "'%s': the scale is not a number", p->weight);
    if (p->a_width != w.width || p->b_rows != w.rows)
        return lr_fail(err, LR_ESHAPE, "'%s': the adapter is for a matrix of %lld x %lld, the model's has %lld x %lld",
                       p->weight, (long long)p->b_rows, (long long)p->a_width, (long long)w.rows, (long long)w.width);
    return 0;
}

/* One part of the backend's a product: a fused weight has several. */
static int add_products(lr_model *m, const lr_adapter_part *p, lr_lora_part *out)
{
    lr_graph_product_info w;
    int n = 0;
    for (; lr_graph_product(m, p->weight, n, &w); n++)
        out[n] = (lr_lora_part){w.weight, p->rank, p->scale, p->a, p->b + (size_t)w.first * (size_t)p->rank};
    return n;
}

int lr_adapter_new(lr_model *m, const lr_adapter_part *parts, int n, lr_adapter **out, lr_error *err)
{
    lr_backend *be = lr_model_backend(m);
    if (lr_graph__of(m) && lr_graph__of(m)->parted)
        return lr_fail(err, LR_EUNSUPPORTED, "a model that is split over processes takes no adapters");
    if (be && !be->ops->lora_new)
        return lr_fail(err, LR_EUNSUPPORTED, "a model on %s takes no adapters; one with device = \"cpu\" does",
                       be->ops->describe(be));
    if (!be) return lr_fail(err, LR_EUNSUPPORTED, "this kind of model takes no adapters");
    int n_products = 0, rc = 0, at = 0;
    uint64_t h = 0xcbf29ce484222325u;
    size_t bytes = 0;
    for (int i = 0; i < n && !rc; i++) rc = check_part(m, &parts[i], &n_products, err);
    if (rc) return rc;
    lr_adapter *a = lr_calloc(1, sizeof *a);
    lr_lora_part *list = lr_calloc((size_t)n_products + 1, sizeof *list);
    if (!a || !list) rc = lr_fail(err, LR_ENOMEM, "no memory for the adapter");
    for (int i = 0; i < n && !rc; i++) {
        const lr_adapter_part *p = &parts[i];
        size_t na = (size_t)p->a_width * (size_t)p->rank * sizeof(float);
        size_t nb = (size_t)p->b_rows * (size_t)p->rank * sizeof(float);
        h = mix(mix(mix(mix(h, p->weight, strlen(p->weight) + 1), &p->scale, sizeof p->scale), p->a, na), p->b, nb);
        bytes += na + nb;
        at += add_products(m, p, list + at);
    }
    if (!rc) rc = be->ops->lora_new(be, list, at, &a->lora, err);
    lr_free(list);
    if (rc) {
        lr_free(a);
        return rc;
    }
    a->refs = 1;
    a->model = m;
    a->fingerprint = h ? h : 1;
    a->bytes = bytes;
    a->next = m->adapters;
    if (m->adapters) m->adapters->prev = a;
    m->adapters = a;
    *out = a;
    return 0;
}

static void leave_model(lr_adapter *a)
{
    lr_backend *be = lr_model_backend(a->model);
    *(a->prev ? &a->prev->next : &a->model->adapters) = a->next;
    if (a->next) a->next->prev = a->prev;
    be->ops->lora_free(be, a->lora);
    a->lora = NULL;
    a->model = NULL;
    a->prev = a->next = NULL;
}

void lr_adapters_drop(lr_model *m)
{
    while (m->adapters) leave_model(m->adapters);
}

lr_adapter *lr_adapter_ref(lr_adapter *a)
{
    if (a) a->refs++;
    return a;
}

void lr_adapter_unref(lr_adapter *a)
{
    if (!a || --a->refs > 0) return;
    if (a->model) leave_model(a);
    lr_free(a);
}

const lr_lora *lr_adapter_lora(const lr_adapter *a) { return a ? a->lora : NULL; }
bool lr_adapter_fits(const lr_adapter *a, const lr_model *m) { return a->model == m; }
uint64_t lr_adapter_fingerprint(const lr_adapter *a) { return a ? a->fingerprint : 0; }
size_t lr_adapter_bytes(const lr_adapter *a) { return a->bytes; }
