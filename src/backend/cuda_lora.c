/* cuda_lora.c - low-rank adapters on the device: their factors, and a table of them by the weights' numbers, in one
 * allocation; what a batch with adapters needs beside its activations.
 *
 * A row of a batch names the table of its sequence's adapter, so rows of any adapters are one launch, and a captured
 * step serves all adapters. Memory for the rows' small products is made when the first batch wants it.
 */
#include "backend/cuda_int.h"
#include <string.h>

static cuda_backend *self(lr_backend *b) { return (cuda_backend *)b; }

void lr_cuda_lora_free(lr_backend *b, lr_lora *l)
{
    if (!l) return;
    cudaSetDevice(self(b)->index);
    cudaStreamSynchronize(self(b)->stream); /* a step that was launched may still read it */
    if (l->mem) {
        cudaFree(l->mem);
        self(b)->bytes_weights -= l->bytes;
    }
    lr_free(l);
}

static int check(const cuda_backend *be, const lr_lora_part *p, lr_error *err)
{
    if (p->rank < 1 || p->rank > LR_LORA_RANK_MAX)
        return lr_fail(err, LR_EUNSUPPORTED, "rank %d is not in 1..%d", p->rank, LR_LORA_RANK_MAX);
    if (p->w->site < 0 || p->w->site >= be->n_sites)
        return lr_fail(err, LR_EUNSUPPORTED, "an adapter of something that is no matrix product");
    return 0;
}

static size_t padded(size_t n) { return (n + 255) & ~(size_t)255; }

/* Bytes of the table and of all factors. */
static bool measure(const cuda_backend *be, const lr_lora_part *parts, int n, size_t *bytes)
{
    size_t na, nb;
    *bytes = padded((size_t)be->n_sites * sizeof(lr_cu_adapter_part));
    for (int i = 0; i < n; i++) {
        const lr_lora_part *p = &parts[i];
        if (!lr_mul((size_t)p->rank * sizeof(float), (size_t)p->w->k, &na) ||
            !lr_mul((size_t)p->rank * sizeof(float), (size_t)p->w->n, &nb) || !lr_add(*bytes, padded(na), bytes) ||
            !lr_add(*bytes, padded(nb), bytes))
            return false;
    }
    return true;
}

/* b as (rank, n), times the scale: threads of neighbouring features then read neighbours. */
static void turn(const lr_lora_part *p, float *to)
{
    size_t n = (size_t)p->w->n, rank = (size_t)p->rank;
    float v;
    for (size_t f = 0; f < n; f++)
        for (size_t r = 0; r < rank; r++) {
            memcpy(&v, p->b + f * rank + r, sizeof v);
            to[r * n + f] = p->scale * v;
        }
}

static int fill(cuda_backend *be, lr_lora *l, const lr_lora_part *parts, int n, lr_error *err)
{
    lr_cu_adapter_part *table = lr_calloc((size_t)be->n_sites + 1, sizeof *table);
    size_t at = padded((size_t)be->n_sites * sizeof *table), widest = 1;
    for (int i = 0; i < n; i++)
        if ((size_t)parts[i].rank * (size_t)parts[i].w->n > widest)
            widest = (size_t)parts[i].rank * (size_t)parts[i].w->n;
    float *turned = lr_reallocarray(NULL, widest, sizeof *turned);
    int rc = table && turned ? 0 : lr_fail(err, LR_ENOMEM, "no memory for the adapter");
    for (int i = 0; i < n && !rc; i++) {
        const lr_lora_part *p = &parts[i];
        lr_cu_adapter_part *t = &table[p->w->site];
        size_t na = (size_t)p->rank * (size_t)p->w->k * sizeof(float),
               nb = (size_t)p->rank * (size_t)p->w->n * sizeof(float);
        char *a = (char *)l->mem + at, *b = a + padded(na);
        at += padded(na) + padded(nb);
        if (t->rank) continue; /* the first counts */
        *t = (lr_cu_adapter_part){(const float *)(void *)a, (const float *)(void *)b, p->rank};
        turn(p, turned);
        rc = lr_cuda_upload(be, a, p->a, na, err);
        if (!rc) rc = lr_cuda_upload(be, b, turned, nb, err);
    }
    if (!rc) rc = lr_cuda_upload(be, l->mem, table, (size_t)be->n_sites * sizeof *table, err);
    lr_free(turned);
    lr_free(table);
    return rc;
}

int lr_cuda_lora_new(lr_backend *b, const lr_lora_part *parts, int n, lr_lora **out, lr_error *err)
{
    cuda_backend *be = self(b);
    size_t bytes = 0;
    int rc = 0;
    for (int i = 0; i < n && !rc; i++) rc = check(be, &parts[i], err);
    if (rc) return rc;
    if (!measure(be, parts, n, &bytes)) return lr_fail(err, LR_ENOMEM, "an adapter of too many bytes");
    lr_lora *l = lr_calloc(1, sizeof *l);
    if (!l) return lr_fail(err, LR_ENOMEM, "no memory for the adapter");
    cudaSetDevice(be->index);
    l->n_sites = be->n_sites;
    rc = lr_cuda_alloc(be, &l->mem, bytes, "an adapter", err);
    if (!rc) {
        l->bytes = bytes;
        be->bytes_weights += bytes;
        rc = fill(be, l, parts, n, err);
    }
    if (rc) {
        lr_cuda_lora_free(b, l);
        return rc;
    }
    for (int i = 0; i < n; i++)
        if (parts[i].rank > be->ranks) be->ranks = (parts[i].rank + 7) / 8 * 8;
    *out = l;
    return 0;
}

/* ---- batches ---- */

bool lr_cuda_adapted(const lr_batch *b)
{
    for (int i = 0; i < b->n_seqs; i++)
        if (b->seqs[i].lora) return true;
    return false;
}

int lr_cuda_lora_room(lr_plan *p, const lr_batch *b, lr_error *err)
{
    size_t bytes = 0;
    for (int i = 0; i < b->n_seqs; i++)
        if (b->seqs[i].lora && b->seqs[i].lora->n_sites < p->n_sites)
            return lr_fail(err, LR_ESTATE, "the adapter is older than some of the model's weights");
    for (int i = 0; i < p->n_steps; i++) {
        const cuda_step *s = &p->steps[i];
        int m = s->narrow ? p->max_out : p->max_rows;
        if (!s->adapts) continue;
        size_t n = lr_cu_adapt_work(s->n_w, p->be->ranks, m);
        if (n > bytes) bytes = n;
    }
    size_t first = padded(bytes), all = first + p->apart_bytes;
    if (all <= p->lora_bytes) return 0;
    cudaStreamSynchronize(p->be->stream);
    lr_cuda_graphs_drop(p);
    lr_cuda_lora_close(p);
    int rc = lr_cuda_alloc(p->be, &p->lora, all, "rows with adapters", err);
    if (rc) return rc;
    p->apart = (char *)p->lora + first;
    p->lora_bytes = all;
    p->be->bytes_work += all;
    return 0;
}

void lr_cuda_lora_close(lr_plan *p)
{
    if (p->lora) cudaFree(p->lora);
    p->be->bytes_work -= p->lora_bytes;
    p->lora = NULL;
    p->lora_bytes = 0;
}

void lr_cuda_lora_rows(const lr_batch *b, const cuda_meta *m, int32_t *host)
{
    const void **rows = (const void **)(void *)(host + m->lora), **outs = (const void **)(void *)(host + m->lora_out);
    for (int i = 0; i < m->rows; i++) rows[i] = NULL;
    for (int s = 0; s < b->n_seqs; s++)
        for (int i = 0; i < b->seqs[s].n && b->seqs[s].lora; i++) rows[b->seqs[s].row + i] = b->seqs[s].lora->mem;
    for (int i = 0; i < m->outs; i++) outs[i] = i < b->n_out ? rows[b->out_rows[i]] : NULL;
}
