/* cuda_layout.c - device memory of a plan: activations, whose pieces share it where their lives do not meet, and the
 * workspaces of products, attention and exchanges.
 */
#include "backend/cuda_int.h"

/* ---- activations ---- */

static void touch(lr_plan *p, int piece, int at)
{
    if (piece < 0) return;
    cuda_piece *v = &p->pieces[piece];
    if (v->def < 0 || at < v->def) v->def = at;
    if (at > v->last) v->last = at;
}

/* A float32 result that nobody reads, beside a packed one that somebody does, is not made. */
static void drop_unread(lr_plan *p)
{
    for (int i = 0; i < p->n_steps; i++) {
        cuda_step *s = &p->steps[i];
        int out = s->out[0];
        bool read = s->pack < 0 || out < 0 || out == p->logits || out == p->hidden || out == p->features;
        for (int j = i + 1; j < p->n_steps && !read; j++)
            for (int k = 0; k < 3; k++)
                if (p->steps[j].in[k] == out) read = true;
        if (!read) s->out[0] = -1;
    }
}

static size_t piece_bytes(const lr_plan *p, const cuda_piece *v)
{
    int rows = (v->narrow ? p->max_out : p->max_rows) * v->times;
    size_t most = v->fixed;
    if (most) return (most + 255) & ~(size_t)255;
    if (v->type < 0) most = (size_t)rows * (size_t)v->width * sizeof(float);
    for (int i = 0; i <= LR_CUDA_SIZES && v->type >= 0; i++) {
        int m = i == LR_CUDA_SIZES || lr_cuda_sizes[i] > rows ? rows : lr_cuda_sizes[i];
        size_t n = lr_cu_rows_bytes(lr_cuda_form(p->be, v->type, v->experts, m), m, v->width);
        if (n > most) most = n;
    }
    return (most + 255) & ~(size_t)255;
}

/* First fit: the lowest offset that is free of every earlier piece whose life meets this one's. */
static void place(lr_plan *p, int i)
{
    cuda_piece *v = &p->pieces[i];
    for (bool moved = true; moved;) {
        moved = false;
        for (int j = 0; j < i; j++) {
            const cuda_piece *u = &p->pieces[j];
            if (!u->bytes || u->def > v->last || u->last < v->def) continue;
            if (u->offset < v->offset + v->bytes && v->offset < u->offset + u->bytes) {
                v->offset = u->offset + u->bytes;
                moved = true;
            }
        }
    }
    if (v->offset + v->bytes > p->work_bytes) p->work_bytes = v->offset + v->bytes;
}

static int layout(lr_plan *p, lr_error *err)
{
    drop_unread(p);
    for (int i = 0; i < p->n_steps; i++) {
        const cuda_step *s = &p->steps[i];
        for (int k = 0; k < 3; k++) touch(p, s->in[k], i);
        for (int k = 0; k < LR_CU_JOINT; k++) touch(p, s->out[k], i);
        touch(p, s->sum, i);
        touch(p, s->pack, i);
    }
    touch(p, p->logits, p->n_steps);
    touch(p, p->hidden, p->n_steps);
    touch(p, p->features, p->n_steps);
    for (int i = 0; i < p->n_pieces; i++) {
        cuda_piece *v = &p->pieces[i];
        v->bytes = v->def < 0 ? 0 : piece_bytes(p, v);
        if (v->bytes) place(p, i);
    }
    int rc = lr_cuda_plan_alloc(p, &p->work, p->work_bytes, "activations", err);
    for (int i = 0; i < p->n_pieces && !rc && !p->dry; i++)
        if (p->pieces[i].bytes) p->pieces[i].at = (char *)p->work + p->pieces[i].offset;
    return rc;
}

/* ---- the rest ---- */

enum { PARTS_BYTES = 64 << 20 };

static void want(size_t *most, size_t n)
{
    if (n > *most) *most = n;
}

static void count_scratch(lr_plan *p)
{
    int slots = 1;
    for (int g = 0; g < LR_KV_GROUPS && p->kv; g++)
        if (p->kv->n_blocks[g] * p->kv->block_size > slots) slots = p->kv->n_blocks[g] * p->kv->block_size;
    p->slots_cap = slots;
    for (int i = 0; i < p->n_steps; i++) {
        const cuda_step *s = &p->steps[i];
        int m = s->narrow ? p->max_out : p->max_rows;
        if (s->kind == LR_OP_LINEAR || s->kind == LR_OP_EXPERTS) {
            const lr_cu_product o = lr_cuda_product(s);
            const lr_weight *w = s->w[0];
            want(&p->scratch_bytes, lr_cu_product_work(p->be->math, &o, s->of_rows ? m : m * s->times));
            if (s->adapts && s->glu) want(&p->apart_bytes, 2 * (size_t)m * (size_t)w->n * sizeof(float));
            if (p->be->compute == LR_COMPUTE_LOOSE && m >= LR_CUDA_BLAS_ROWS && !w->n_experts && w->type != LR_BF16)
                want(&p->dense_bytes, (size_t)w->n * (size_t)w->k * 2);
        }
        if (s->kind == LR_OP_ATTN) {
            const lr_kv_layer *l = &p->kv->layers[s->layer].shape;
            int h = s->attn.n_heads, few = lr_cu_attn_tile_rows(h, l->n_kv_heads, l->head_dim, false);
            int many = lr_cu_attn_tile_rows(h, l->n_kv_heads, l->head_dim, true);
            if (many < p->tile_wide) p->tile_wide = many;
            if (few < p->tile_narrow) p->tile_narrow = few;
            size_t all = lr_cu_attn_work(m, h, l->head_dim, slots);
            want(&p->parts_bytes, all < PARTS_BYTES ? all : PARTS_BYTES);
            want(&p->parts_bytes, lr_cu_attn_work(few < m ? few : m, h, l->head_dim, slots));
        }
        if (s->kind == STEP_ROPE_KV) {
            const lr_kv_layer *l = &p->kv->layers[s->layer].shape;
            want(&p->echo_bytes, (size_t)m * (size_t)(l->n_kv_heads * l->head_dim) * 2 * sizeof(float));
        }
    }
}

static int alloc_scratch(lr_plan *p, lr_error *err)
{
    enum { BOUNCE = 8 << 20 };
    count_scratch(p);
    int rc = lr_cuda_plan_alloc(p, &p->scratch, p->scratch_bytes, "workspace of products", err);
    if (!rc) rc = lr_cuda_plan_alloc(p, &p->parts, p->parts_bytes, "workspace of attention", err);
    if (!rc && p->dense_bytes) rc = lr_cuda_plan_alloc(p, &p->dense, p->dense_bytes, "a weight as bfloat16", err);
    if (!rc && p->exchange_bytes)
        rc = lr_cuda_plan_alloc(p, &p->exchange, p->exchange_bytes, "rows of other ranks", err);
    if (rc || p->dry) return rc;
    if (p->exchange_bytes) {
        rc = lr_cuda_pin(p->be, &p->staged, 2 * p->exchange_bytes, "rows of other ranks", err);
        cudaError_t e = rc ? cudaSuccess : cudaEventCreateWithFlags(&p->met, cudaEventDisableTiming);
        if (e) rc = lr_cuda_failed(p->be, (int)e, "an event", err);
        if (rc) return rc;
    }
    p->bounce_bytes = (size_t)(p->partial ? p->max_rows : p->max_out) * (size_t)p->n_vocab * sizeof(float);
    if (p->bounce_bytes > BOUNCE) p->bounce_bytes = BOUNCE;
    return lr_cuda_pin(p->be, &p->bounce, p->bounce_bytes, "logits", err);
}

int lr_cuda_layout(lr_plan *p, lr_error *err)
{
    int rc = layout(p, err);
    return rc ? rc : alloc_scratch(p, err);
}
