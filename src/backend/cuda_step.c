/* cuda_step.c - puts one step of a plan on the stream. What a launch gets by value is the same for every batch of the
 * same number of rows (and reach of attention), so that it may be captured: all else is in the plan's device memory.
 */
#include "backend/cuda_int.h"
#include <stdio.h>

static void *at(const lr_plan *p, int piece) { return lr_cuda_at(p, piece); }

static lr_cu_out out_of(const lr_plan *p, const cuda_step *s, int m)
{
    const cuda_piece *packed = s->pack >= 0 ? &p->pieces[s->pack] : NULL;
    lr_cu_out o = {.f32 = at(p, s->out[0]), .packed = packed ? packed->at : NULL};
    if (packed) o.form = lr_cuda_form(p->be, packed->type, packed->experts, m);
    return o;
}

static lr_cu_rows_at rows_of(const lr_plan *p, const cuda_meta *m, int group)
{
    const int32_t *d = p->meta_dev;
    return (lr_cu_rows_at){.n_rows = m->rows,
                           .seq = d + m->seq,
                           .pos = d + m->pos,
                           .slot = d + m->pos,
                           .table = d + m->table[group],
                           .table_at = d + m->table_at[group]};
}

static lr_cu_kv kv_of(const lr_kv_store *kv, const cuda_kv_layer *l)
{
    int g = l->shape.group;
    char *base = kv->base[g];
    return (lr_cu_kv){.k = {base + l->k_at, kv->block_bytes[g], l->k_type},
                      .v = {base + l->v_at, kv->block_bytes[g], l->v_type},
                      .n_kv_heads = l->shape.n_kv_heads,
                      .head_dim = l->shape.head_dim,
                      .block_size = kv->block_size};
}

/* ---- keys and values ---- */

/* Echoed rows are written to their other tables too: their keys and values are taken as they were before the turning,
 * and go the same way, so the bits in both places are the same. */
static cudaError_t echo(const lr_plan *p, const lr_kv_store *kv, const cuda_step *s, const cuda_meta *m)
{
    const cuda_kv_layer *l = &kv->layers[s->layer];
    int n = m->echoes, width = l->shape.n_kv_heads * l->shape.head_dim;
    const int32_t *d = p->meta_dev;
    float *k = p->echo, *v = k + (size_t)n * (size_t)width;
    cudaStream_t st = p->be->stream;
    cudaError_t e = lr_cu_gather(at(p, s->in[1]), d + m->echo_row, n, width, (lr_cu_out){.f32 = k}, st);
    if (!e) e = lr_cu_gather(at(p, s->in[2]), d + m->echo_row, n, width, (lr_cu_out){.f32 = v}, st);
    lr_cu_rows_at where = rows_of(p, m, l->shape.group);
    where.n_rows = n;
    where.seq = d + m->echo_seq;
    where.pos = where.slot = d + m->echo_pos;
    lr_cu_kv to = kv_of(kv, l);
    to.center = s->center;
    if (!e)
        e = lr_cu_rope_kv(NULL, s->has_rope[1] ? &s->rope[1] : NULL, NULL, s->has_norm[1] ? &s->head_norm[1] : NULL,
                          NULL, k, v, NULL, 0, &to, &where, st);
    return e;
}

static cudaError_t rope_kv(const lr_plan *p, const lr_kv_store *kv, const cuda_step *s, const cuda_meta *m)
{
    const cuda_kv_layer *l = &kv->layers[s->layer];
    const lr_cu_rope *rope[2];
    const lr_cu_norm *norm[2];
    for (int i = 0; i < 2; i++) {
        rope[i] = s->has_rope[i] ? &s->rope[i] : NULL;
        norm[i] = s->has_norm[i] ? &s->head_norm[i] : NULL;
    }
    lr_cu_kv to = kv_of(kv, l);
    to.center = s->center;
    lr_cu_rows_at where = rows_of(p, m, l->shape.group);
    cudaError_t e = lr_cu_rope_kv(rope[0], rope[1], norm[0], norm[1], at(p, s->in[0]), at(p, s->in[1]), at(p, s->in[2]),
                                  at(p, s->out[0]), s->attn.n_heads, &to, &where, p->be->stream);
    return !e && m->echoes ? echo(p, kv, s, m) : e;
}

/* ---- attention ---- */

static int end_of(const lr_cu_tile *t) { return t->row + (t->n > 0 ? t->n : 1); }

/* How many of the n tiles from t on, by ascending rows, have room for what all rows between them leave. */
static int tiles_that_fit(const lr_plan *p, const lr_cu_tile *t, int n, int heads, int dim, int max_slots)
{
    int i = 1;
    while (i < n && lr_cu_attn_work(end_of(&t[i]) - t[0].row, heads, dim, max_slots) <= p->parts_bytes) i++;
    return i;
}

static cudaError_t attention(const lr_plan *p, const lr_kv_store *kv, const cuda_step *s, const cuda_walk *w)
{
    const cuda_kv_layer *l = &kv->layers[s->layer];
    const cuda_meta *m = w->meta;
    const lr_cu_tile *host = (const lr_cu_tile *)(const void *)(p->meta_host + m->tiles);
    const lr_cu_tile *dev = (const lr_cu_tile *)(const void *)(p->meta_dev + m->tiles);
    lr_cu_kv from = kv_of(kv, l);
    lr_cu_rows_at where = rows_of(p, m, l->shape.group);
    cudaError_t e = cudaSuccess;
    if (s->turn_q)
        e = lr_cu_turn_rows(at(p, s->in[0]), m->rows, s->attn.n_heads, from.head_dim, at(p, s->in[0]), p->be->stream);
    for (int t = 0; t < w->n_narrow && !e;) {
        int n = tiles_that_fit(p, host + t, w->n_narrow - t, s->attn.n_heads, l->shape.head_dim, w->max_slots);
        e = lr_cu_attn_rows(&s->attn, &from, at(p, s->in[0]), &where, dev + t, n, host[t].row, false, w->max_slots,
                            at(p, s->out[0]), p->parts, p->be->stream);
        t += n;
    }
    if (!e && w->n_wide)
        e = lr_cu_attn_rows(&s->attn, &from, at(p, s->in[0]), &where, dev + w->n_narrow, w->n_wide, 0, true,
                            w->max_slots, at(p, s->out[0]), NULL, p->be->stream);
    if (!e && lr_cu_kv_turned(from.v.type))
        e = lr_cu_turn_rows(at(p, s->out[0]), m->rows, s->attn.n_heads, from.head_dim, at(p, s->out[0]), p->be->stream);
    return e;
}

/* ---- other ranks ---- */

/* Between GPUs: the carrier's stream waits for ours, and ours for it. */
static cudaError_t through_devices(lr_plan *p, const cuda_step *s, const int *bytes, void *to)
{
    lr_comm *c = s->gather.comm->device;
    cudaStream_t theirs = s->gather.comm->stream;
    cudaError_t e = cudaEventRecord(p->met, p->be->stream);
    if (!e) e = cudaStreamWaitEvent(theirs, p->met, 0);
    if (!e) p->exchange_failed = c->ops->all_gather(c, at(p, s->in[0]), to, bytes, &p->exchange_err);
    if (!e && !p->exchange_failed) e = cudaEventRecord(p->met, theirs);
    if (!e && !p->exchange_failed) e = cudaStreamWaitEvent(p->be->stream, p->met, 0);
    return e;
}

static cudaError_t through_host(lr_plan *p, const cuda_step *s, const int *bytes, void *to, size_t all)
{
    lr_comm *c = s->gather.comm;
    cudaStream_t st = p->be->stream;
    char *own = p->staged, *others = own + p->exchange_bytes;
    cudaError_t e = cudaMemcpyAsync(own, at(p, s->in[0]), (size_t)bytes[c->rank], cudaMemcpyDeviceToHost, st);
    if (!e) e = cudaStreamSynchronize(st);
    if (!e) p->exchange_failed = c->ops->all_gather(c, own, others, bytes, &p->exchange_err);
    if (!e && !p->exchange_failed) e = cudaMemcpyAsync(to, others, all, cudaMemcpyHostToDevice, st);
    return e;
}

static cudaError_t exchange(lr_plan *p, const cuda_step *s, const int *bytes, void *to)
{
    size_t all = 0;
    for (int r = 0; r < s->gather.comm->size; r++) all += (size_t)bytes[r];
    cudaError_t e = s->gather.comm->device ? through_devices(p, s, bytes, to) : through_host(p, s, bytes, to, all);
    return !e && p->exchange_failed ? cudaErrorUnknown : e;
}

static cudaError_t gather(lr_plan *p, const cuda_step *s, int m, lr_cu_out out)
{
    int bytes[LR_CUDA_RANKS];
    const int *first = s->gather.at;
    for (int r = 0; r < s->gather.comm->size; r++) bytes[r] = m * (first[r + 1] - first[r]) * (int)sizeof(float);
    cudaError_t e = exchange(p, s, bytes, p->exchange);
    return e ? e : lr_cu_ranks(p->exchange, s->gather.at_dev, m, s->width, out, p->be->stream);
}

/* Slots lie as all ranks' do, sorted by expert. How many are whose is in the route's result. */
static cudaError_t gather_slots(lr_plan *p, const cuda_step *s, int rows)
{
    int bytes[LR_CUDA_RANKS];
    int32_t start[LR_CU_EXPERTS + 1];
    const lr_cu_slots t = lr_cuda_slots(p, s, s->in[2], rows);
    cudaError_t e = cudaMemcpyAsync(start, t.start, ((size_t)t.n_experts + 1) * sizeof *start, cudaMemcpyDeviceToHost,
                                    p->be->stream);
    if (!e) e = cudaStreamSynchronize(p->be->stream);
    if (e) return e;
    for (int r = 0; r < s->gather.comm->size; r++)
        bytes[r] = (start[s->gather.at[r + 1]] - start[s->gather.at[r]]) * s->width * (int)sizeof(float);
    return exchange(p, s, bytes, at(p, s->out[0]));
}

/* ---- all kinds ---- */

cudaError_t lr_cuda_step(lr_plan *p, const lr_kv_store *kv, const cuda_step *s, const cuda_walk *w)
{
    const cuda_meta *meta = w->meta;
    int rows = s->narrow ? meta->outs : meta->rows, m = rows * s->times;
    if (m == 0) return cudaSuccess;
    cudaStream_t st = p->be->stream;
    const float *x = at(p, s->in[0]), *x2 = at(p, s->in[1]);
    lr_cu_out out = out_of(p, s, m);
    switch (s->kind) {
    case LR_OP_EMBED:
    case LR_OP_EMBED_AT: {
        const lr_cu_weight table = {s->w[0]->data, s->w[0]->type, s->w[0]->n, s->w[0]->k, s->w[0]->row_bytes};
        size_t ids = s->kind == LR_OP_EMBED ? meta->tokens : meta->held;
        return lr_cu_embed(&table, p->meta_dev + ids, m, s->scale, out, st);
    }
    case LR_OP_NORM:
        return lr_cu_norm_rows(&s->norm, x, x2, at(p, s->sum), m, out, st);
    case LR_OP_LINEAR:
        return lr_cuda_multiply(p, s, m, w);
    case LR_OP_EXPERTS:
        return lr_cuda_multiply(p, s, s->of_rows ? rows : m, w);
    case LR_OP_ROUTE:
        return lr_cuda_route(p, s, rows, p->meta_dev + (s->narrow ? meta->out_rows : meta->seq));
    case LR_OP_MIX:
        return lr_cuda_mix(p, s, rows, out);
    case LR_OP_ROPE: {
        lr_cu_rows_at where = rows_of(p, meta, 0);
        return lr_cu_rope_rows(&s->rope[0], x, &where, out.f32, st);
    }
    case STEP_ROPE_KV:
        return rope_kv(p, kv, s, meta);
    case LR_OP_ATTN:
        return attention(p, kv, s, w);
    case LR_OP_ADD:
        return lr_cu_add(x, x2, m, s->width, out, st);
    case LR_OP_MUL:
        return s->by_row ? lr_cu_mul_row(x, x2, m, s->width, out, st) : lr_cu_mul(x, x2, m, s->width, out, st);
    case LR_OP_PART:
    case LR_OP_CONCAT:
    case LR_OP_SLICE:
        return lr_cu_parts_of(&s->parts, x, x2, m, out, st);
    case LR_OP_GATHER:
        return s->in[2] >= 0 ? gather_slots(p, s, rows) : gather(p, s, m, out);
    case LR_OP_INPUT:
        return cudaSuccess;
    case LR_OP_ACT:
        return lr_cu_act(s->act, x, m, s->width, out, st);
    case LR_OP_GLU:
        return lr_cu_glu(s->act, x, x2, m, s->width, out, st);
    case LR_OP_SCALE:
        return lr_cu_scale(x, s->scale, m, s->width, out, st);
    case LR_OP_SOFTCAP:
        return lr_cu_softcap(x, s->scale, m, s->width, out, st);
    case LR_OP_ROWS:
        return lr_cu_gather(x, p->meta_dev + meta->out_rows, m, s->width, out, st);
    case STEP_PACK:
        return lr_cu_rows(x, m, s->width, out, st);
    default:
        return cudaErrorInvalidValue;
    }
}

void lr_cuda_step_text(const lr_plan *p, const cuda_step *s, char *buf, size_t cap)
{
    const char *name = s->kind == STEP_PACK      ? "packing rows"
                       : s->kind == STEP_ROPE_KV ? "keys and values"
                                                 : lr_op_name((lr_op_kind)s->kind);
    if (s->kind == LR_OP_LINEAR || s->kind == LR_OP_EXPERTS)
        snprintf(buf, cap, "%s %d x %d of type %s", name, s->w[0]->n, s->w[0]->k, lr_dtype_name(s->w[0]->type));
    else if (s->kind == LR_OP_ATTN || s->kind == STEP_ROPE_KV)
        snprintf(buf, cap, "%s of layer %d, %d KV heads of %d", name, s->layer,
                 p->kv->layers[s->layer].shape.n_kv_heads, p->kv->layers[s->layer].shape.head_dim);
    else
        snprintf(buf, cap, "%s, width %d", name, s->width);
}
