/* cuda_draw.c - tokens of a batch, drawn on the device behind its logits: one copy there, one back (base/draw.h). */
#include "backend/cuda_int.h"
#include <string.h>

enum {
    DRAW_ROWS = 256, /* draws in one launch at most: each needs a row of the vocabulary */
    LEAST = 8 << 10  /* bytes that are asked for and come back, to begin with */
};

static size_t padded(size_t n) { return (n + 15) & ~(size_t)15; }

void lr_cuda_draw_close(lr_plan *p)
{
    cuda_draws *d = &p->draws;
    if (d->work) cudaFree(d->work);
    if (d->dev) cudaFree(d->dev);
    if (d->host) cudaFreeHost(d->host);
    p->be->bytes_work -= d->work_bytes;
    *d = (cuda_draws){0};
}

/* Room for the copies of rows: as many as there are draws, or what the device still has. */
static int make_work(lr_plan *p, lr_error *err)
{
    cuda_draws *d = &p->draws;
    int want = p->max_out < DRAW_ROWS ? p->max_out : DRAW_ROWS, rc = 0;
    if (d->work) return 0;
    for (; want > 0; want /= 2) {
        size_t bytes = lr_cu_draw_work(want, p->n_vocab);
        rc = lr_cuda_plan_alloc(p, &d->work, bytes, "drawing tokens", err);
        if (rc) continue;
        if (p->dry) return 0;
        d->rows = want;
        d->work_bytes = bytes;
        p->be->bytes_work += bytes;
        return 0;
    }
    return rc;
}

static int make_room(lr_plan *p, size_t bytes, lr_error *err)
{
    cuda_draws *d = &p->draws;
    size_t cap = d->cap ? d->cap : LEAST;
    if (bytes <= d->cap) return 0;
    while (cap < bytes) cap *= 2;
    if (d->dev) cudaFree(d->dev);
    if (d->host) cudaFreeHost(d->host);
    d->dev = NULL;
    d->host = NULL;
    d->cap = 0;
    int rc = lr_cuda_plan_alloc(p, &d->dev, cap, "draws", err);
    if (rc || p->dry) return rc;
    void *host;
    rc = lr_cuda_pin(p->be, &host, cap, "draws", err);
    if (rc) return rc;
    d->host = host;
    d->cap = cap;
    return 0;
}

int lr_cuda_draw_open(lr_plan *p, lr_error *err)
{
    int rc = make_work(p, err);
    return rc ? rc : make_room(p, LEAST, err);
}

int lr_cuda_draw(lr_plan *p, const lr_draws *w, lr_error *err)
{
    cuda_draws *d = &p->draws;
    cudaStream_t st = p->be->stream;
    size_t words = (size_t)(p->n_vocab + 31) / 32, n = (size_t)w->n;
    size_t draws = padded(n * sizeof *w->at), edits = padded((size_t)w->n_edits * sizeof *w->edits),
           masks = padded((size_t)w->n_masks * words * sizeof *w->masks), in = draws + edits + masks;
    size_t out = padded(n * sizeof *w->results), best = padded(n * (size_t)w->top * sizeof *w->best);
    int rc = make_work(p, err);
    if (!rc) rc = make_room(p, in + out + best, err);
    if (rc) return rc;
    memcpy(d->host, w->at, n * sizeof *w->at);
    if (w->n_edits) memcpy(d->host + draws, w->edits, (size_t)w->n_edits * sizeof *w->edits);
    if (w->n_masks) memcpy(d->host + draws + edits, w->masks, (size_t)w->n_masks * words * sizeof *w->masks);
    cudaError_t e = cudaMemcpyAsync(d->dev, d->host, in, cudaMemcpyHostToDevice, st);
    for (int i = 0; i < w->n && !e; i += d->rows)
        e = lr_cu_draw_rows(
            (const float *)(const void *)p->pieces[p->logits].at, p->n_vocab, (const lr_draw *)d->dev + i,
            w->n - i < d->rows ? w->n - i : d->rows, (const lr_draw_edit *)(const void *)((char *)d->dev + draws),
            (const uint32_t *)(const void *)((char *)d->dev + draws + edits),
            (lr_draw_result *)(void *)((char *)d->dev + in) + i,
            (lr_draw_best *)(void *)((char *)d->dev + in + out) + (size_t)i * (size_t)w->top, w->top, d->work, st);
    char *back = d->host + in;
    if (!e) e = cudaMemcpyAsync(back, (char *)d->dev + in, out + best, cudaMemcpyDeviceToHost, st);
    if (!e) e = cudaStreamSynchronize(st);
    if (e) return lr_cuda_failed(p->be, (int)e, "drawing tokens", err);
    memcpy(w->results, back, n * sizeof *w->results);
    if (w->top) memcpy(w->best, back + out, n * (size_t)w->top * sizeof *w->best);
    return 0;
}
