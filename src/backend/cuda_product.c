/* cuda_product.c - products with weights: the kernels' own, cuBLAS's for many rows of compute = "loose", what adapters
 * add to them, and products of experts, with who goes to which and the way back.
 */
#include "backend/cuda_int.h"

static cudaError_t through_blas(const lr_plan *p, const cuda_step *s, int m)
{
    const lr_cu_product o = lr_cuda_product(s);
    const lr_cu_weight *w = &o.w[0];
    const void *dense = w->data;
    float *y = lr_cuda_at(p, s->out[0]);
    cudaError_t e = cudaSuccess;
    if (w->type != LR_BF16) {
        dense = p->dense;
        e = lr_cu_dequant(w, p->dense, p->be->stream);
    }
    if (!e) e = lr_cuda_blas_product(p->be, dense, lr_cuda_at(p, s->in[0]), m, w->n, w->k, y);
    if (!e && o.bias[0]) e = lr_cu_bias(y, o.bias[0], m, w->n, p->be->stream);
    return e;
}

lr_cu_slots lr_cuda_slots(const lr_plan *p, const cuda_step *s, int piece, int rows)
{
    lr_cu_slots t = s->slots;
    lr_cu_slots_in(&t, lr_cuda_at(p, piece), p->be->math, rows);
    return t;
}

/* Behind a product: what adapters add, and then the activation. */
static cudaError_t adapt(const lr_plan *p, const cuda_step *s, const lr_cu_product *o, int m, const cuda_walk *w)
{
    const int32_t *rows = p->meta_dev + (s->narrow ? w->meta->lora_out : w->meta->lora);
    lr_cu_adapters l = {.rows = (const lr_cu_adapter_part *const *)(const void *)rows, .ranks = w->ranks};
    for (int i = 0; i < s->n_w; i++) l.site[i] = s->w[i]->site;
    cudaStream_t st = p->be->stream;
    cudaError_t e =
        lr_cu_adapt(&l, o, lr_cuda_form(p->be, s->w[0]->type, false, m), lr_cuda_at(p, s->in[0]), m, p->lora, st);
    if (!e && s->glu)
        e = lr_cu_glu(s->act, o->y[0], o->y[1], m, s->width, (lr_cu_out){.f32 = lr_cuda_at(p, s->out[0])}, st);
    return e;
}

cudaError_t lr_cuda_multiply(const lr_plan *p, const cuda_step *s, int m, const cuda_walk *w)
{
    bool experts = s->kind == LR_OP_EXPERTS, adapts = s->adapts && w->ranks;
    lr_cu_product o = lr_cuda_product(s);
    for (int i = 0; i < o.n_weights; i++) o.y[i] = lr_cuda_at(p, s->out[i]);
    if (!experts && p->be->compute == LR_COMPUTE_LOOSE && m >= LR_CUDA_BLAS_ROWS) {
        cudaError_t e = through_blas(p, s, m);
        return !e && adapts ? adapt(p, s, &o, m, w) : e;
    }
    lr_cu_slots t;
    if (experts) {
        t = lr_cuda_slots(p, s, s->in[2], s->of_rows ? m : m / s->slots.n_used);
        o.slots = &t;
    }
    if (adapts && s->glu) { /* the activation comes behind what is added */
        o.glu = false;
        for (int i = 0; i < 2; i++) o.y[i] = (float *)p->apart + (size_t)i * (size_t)m * (size_t)s->width;
    }
    cudaError_t e = lr_cu_multiply(p->be->math, &o, lr_cuda_at(p, s->in[0]), m, p->scratch, p->be->stream);
    return !e && adapts ? adapt(p, s, &o, m, w) : e;
}

cudaError_t lr_cuda_route(const lr_plan *p, const cuda_step *s, int rows, const int32_t *live)
{
    const lr_cu_slots t = lr_cuda_slots(p, s, s->out[1], rows);
    return lr_cu_route(&s->choice, &t, lr_cuda_at(p, s->in[0]), s->bias[0], live, lr_cuda_at(p, s->out[0]),
                       p->be->stream);
}

cudaError_t lr_cuda_mix(const lr_plan *p, const cuda_step *s, int rows, lr_cu_out out)
{
    const lr_cu_slots t = lr_cuda_slots(p, s, s->in[2], rows);
    return lr_cu_mix(&t, lr_cuda_at(p, s->in[0]), lr_cuda_at(p, s->in[1]), rows, s->width, out, p->be->stream);
}
