/* cuda_product.c - products with weights: the kernels' own, cuBLAS's for many rows of compute = "loose", and those of
 * experts, with who goes to which and the way back.
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

cudaError_t lr_cuda_multiply(const lr_plan *p, const cuda_step *s, int m)
{
    bool experts = s->kind == LR_OP_EXPERTS;
    if (!experts && p->be->compute == LR_COMPUTE_LOOSE && m >= LR_CUDA_BLAS_ROWS) return through_blas(p, s, m);
    lr_cu_product o = lr_cuda_product(s);
    lr_cu_slots t;
    if (experts) {
        t = lr_cuda_slots(p, s, s->in[2], s->of_rows ? m : m / s->slots.n_used);
        o.slots = &t;
    }
    for (int i = 0; i < o.n_weights; i++) o.y[i] = lr_cuda_at(p, s->out[i]);
    return lr_cu_multiply(p->be->math, &o, lr_cuda_at(p, s->in[0]), m, p->scratch, p->be->stream);
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
