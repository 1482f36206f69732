/* cpu_lora.c - low-rank adapters beside the matrix products.
 *
 * A stage of products is preceded, if a sequence of the batch has an adapter, by one that computes t = x a^T of its
 * rows; after the product of a tile of columns each such row adds b t to it, and the row's bits depend on nothing else.
 * Both factors are float32 and go through the kernels of plain weights, one row at a time. Rows without an adapter are
 * not touched.
 */
#include "backend/cpu_int.h"
#include "base/mem.h"
#include <string.h>

typedef struct lora_entry {
    const lr_weight *w;
    int rank;
    const float *a, *b; /* (rank, k), (n, rank) with the scale in it */
} lora_entry;

struct lr_lora {
    int n;
    lora_entry *entries;
    float **owned; /* (2 n) */
    size_t bytes;
};

int lr_cpu_lora_new(lr_backend *be, const lr_lora_part *parts, int n, lr_lora **out, lr_error *err)
{
    lr_lora *l = lr_calloc(1, sizeof *l);
    size_t slots = n > 0 ? (size_t)n : 1;
    if (l) l->entries = lr_calloc(slots, sizeof *l->entries);
    if (l) l->owned = lr_calloc(2 * slots, sizeof *l->owned);
    int rc = l && l->entries && l->owned ? 0 : lr_fail(err, LR_ENOMEM, "no memory for the adapter");
    for (int i = 0; i < n && !rc; i++) {
        const lr_lora_part *p = &parts[i];
        size_t na = 0, nb = 0;
        if (p->rank < 1 || p->rank > LR_LORA_RANK_MAX)
            rc = lr_fail(err, LR_EUNSUPPORTED, "rank %d is not in 1..%d", p->rank, LR_LORA_RANK_MAX);
        else if (!lr_mul((size_t)p->rank, (size_t)p->w->k, &na) || !lr_mul((size_t)p->rank, (size_t)p->w->n, &nb) ||
                 !(l->owned[2 * i] = lr_alloc_aligned(na * sizeof(float))) ||
                 !(l->owned[2 * i + 1] = lr_alloc_aligned(nb * sizeof(float))))
            rc = lr_fail(err, LR_ENOMEM, "no memory for the adapter");
        if (rc) break;
        memcpy(l->owned[2 * i], p->a, na * sizeof(float));
        for (size_t j = 0; j < nb; j++) {
            float b;
            memcpy(&b, p->b + j, sizeof b);
            l->owned[2 * i + 1][j] = p->scale * b;
        }
        l->entries[l->n++] = (lora_entry){p->w, p->rank, l->owned[2 * i], l->owned[2 * i + 1]};
        l->bytes += (na + nb) * sizeof(float);
    }
    if (rc) {
        if (l) lr_cpu_lora_free(be, l);
        return rc;
    }
    ((cpu_backend *)be)->bytes_weights += l->bytes;
    *out = l;
    return 0;
}

void lr_cpu_lora_free(lr_backend *be, lr_lora *l)
{
    if (!l) return;
    if (l->bytes) ((cpu_backend *)be)->bytes_weights -= l->bytes;
    for (int i = 0; l->owned && i < 2 * l->n; i++) lr_free_aligned(l->owned[i]);
    lr_free(l->owned);
    lr_free(l->entries);
    lr_free(l);
}

static const lora_entry *entry_of(const lr_lora *l, const lr_weight *w)
{
    for (int i = 0; l && i < l->n; i++)
        if (l->entries[i].w == w) return &l->entries[i];
    return NULL;
}

/* y (n) = x (k) . w (n, k)^T */
static void product(const cpu_backend *be, const float *w, int n, int k, const float *x, float *y)
{
    lr_gemm_w g = {LR_F32, n, k, false, (size_t)k * sizeof *w, w, NULL, 0, 0};
    lr_qact none = {0};
    if (be->exact)
        lr_gemm_f32_ref(LR_F32, w, g.strip_bytes, k, x, (size_t)k, 1, y, (size_t)n, 0, n);
    else
        be->k->gemm(&g, &none, x, (size_t)k, 1, y, (size_t)n, 0, (n + LR_STRIP - 1) / LR_STRIP);
}

static float *down_of(const lr_plan *p, const plan_op *o, int row)
{
    return p->lora + ((size_t)o->lora * (size_t)p->max_rows + (size_t)row) * LR_LORA_RANK_MAX;
}

void lr_cpu_lora_down(const lr_plan *p, const plan_op *o, const lr_lora *l, int row)
{
    const lora_entry *e = o->kind == LR_OP_LINEAR ? entry_of(l, o->w) : NULL;
    if (e) product(p->be, e->a, e->rank, o->w->k, p->ptr[o->in[0]] + (size_t)row * (size_t)o->w->k, down_of(p, o, row));
}

void lr_cpu_lora_up(const lr_plan *p, const plan_op *o, const lr_lora *l, int row, float *y, int j0, int j1)
{
    enum { COLUMNS = 256 };
    const lora_entry *e = o->kind == LR_OP_LINEAR ? entry_of(l, o->w) : NULL;
    float more[COLUMNS];
    for (int j = j0; e && j < j1; j += COLUMNS) {
        int n = j1 - j < COLUMNS ? j1 - j : COLUMNS;
        product(p->be, e->b + (size_t)j * (size_t)e->rank, n, e->rank, down_of(p, o, row), more);
        p->be->k->add(y + j, more, y + j, n);
    }
}
