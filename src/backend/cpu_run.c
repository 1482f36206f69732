/* cpu_run.c - runs a compiled plan on a batch: one parallel region for the whole forward pass.
 *
 * Each stage is a phase of the pool's tasks, or two. What a task computes for a row depends on the row alone; which
 * thread takes it, and how rows and columns are cut, does not reach the result.
 */
#include "backend/cpu_run.h"
#include "base/mem.h"
#include <assert.h>
#include <math.h>
#include <string.h>

/* ---- ROWS ---- */

static void rope_angles(const rope_table *t, int pos, float *cs)
{
    for (int i = 0; i < t->n_rot / 2; i++) {
        double a = pos * t->freq[i];
        cs[2 * i] = (float)cos(a) * t->attn_scale;
        cs[2 * i + 1] = (float)sin(a) * t->attn_scale;
    }
}

static void put_kv_in(const run_ctx *c, const plan_op *o, int r, const int32_t *const *table)
{
    const lr_plan *p = c->p;
    const lr_kv_store *kv = c->kv;
    const lr_kv_layer *l = &kv->layers[o->layer];
    int pos = p->row_pos[r];
    int block = table[l->group][pos / kv->block_size];
    char *k = kv->base[l->group] + (size_t)block * kv->block_bytes[l->group] + kv->offset[o->layer];
    size_t w = (size_t)l->n_kv_heads * (size_t)l->head_dim;
    p->be->k->kv_put(p->ptr[o->in[0]] + (size_t)r * w, p->ptr[o->in[1]] + (size_t)r * w, o->center, l->n_kv_heads,
                     l->head_dim, kv->k_types[o->layer], kv->v_types[o->layer], kv->block_size, pos % kv->block_size, k,
                     k + kv->part[o->layer]);
}

static void put_kv(const run_ctx *c, const plan_op *o, int r)
{
    const lr_batch *b = c->b;
    put_kv_in(c, o, r, b->seqs[c->p->row_seq[r]].table);
    for (int i = c->p->row_echo[r]; i < b->n_echoes && b->echoes[i].row == r; i++)
        put_kv_in(c, o, r, b->echoes[i].table);
}

static void norm_row(const lr_cpu_kernels *k, const plan_op *o, const float *x, float *y, int width)
{
    const float *w = o->w ? o->w->vec : NULL, *bias = o->bias ? o->bias->vec : NULL;
    for (int i = 0; i < width; i += o->group) {
        if (o->layer_norm)
            k->layernorm(x + i, w, bias, y + i, o->group, o->eps);
        else
            k->rmsnorm(x + i, w, y + i, o->group, o->eps);
    }
}

/* PART and CONCAT of row r; n: width of y. */
static void part_op(const lr_plan *p, const plan_op *o, const float *x, const float *x2, int r, float *y, int n)
{
    size_t out = (size_t)(n / o->n_heads), in = (size_t)(p->values[o->in[0]].width / o->n_heads), k = (size_t)o->n_part;
    x += (size_t)r * in * (size_t)o->n_heads;
    if (x2) x2 += (size_t)r * (size_t)p->values[o->in[1]].width;
    for (int h = 0; h < o->n_heads; h++, x += in, y += out) {
        if (o->kind == LR_OP_PART) {
            memcpy(y, x + o->first, k * sizeof *y);
            continue;
        }
        memcpy(y, x, in * sizeof *y);
        if (x2)
            memcpy(y + in, x2 + (o->layer_norm ? 0 : (size_t)h * k), k * sizeof *y);
        else
            memset(y + in, 0, k * sizeof *y);
    }
}

/* r: of SPREAD a slot, else a token row. */
static void moe_op(const lr_plan *p, const plan_op *o, const float *x, const float *x2, int r, float *y, int n)
{
    const moe_route *m = &p->routes[o->route];
    size_t w = (size_t)n;
    if (o->kind == LR_OP_ROUTE)
        lr_cpu_route(&o->chosen, x + (size_t)r * (size_t)m->n_experts, o->bias ? o->bias->vec : NULL, y);
    else if (o->kind == LR_OP_MIX)
        lr_cpu_mix(m, x2, x, r, y, n);
    else if (o->kind == OP_SPREAD)
        memcpy(y, x + (size_t)m->slot_row[r] * w, w * sizeof *y);
    else
        p->be->k->quantize(x + (size_t)m->slot_row[r] * w, w, 1, lr_qact_at(p->q[o->out], (size_t)r * w), 0, n);
}

static void row_op(const run_ctx *c, const plan_op *o, int r)
{
    lr_plan *p = c->p;
    const lr_cpu_kernels *k = p->be->k;
    int out = o->out, n = out >= 0 ? p->values[out].width : 0;
    size_t at = (size_t)r * (size_t)n;
    float *y = out >= 0 && !p->values[out].quant ? p->ptr[out] + at : NULL;
    const float *x = o->in[0] >= 0 ? p->ptr[o->in[0]] : NULL, *x2 = o->in[1] >= 0 ? p->ptr[o->in[1]] : NULL;
    switch (o->kind) {
    case LR_OP_EMBED:
        lr_dtype_to_f32(o->w->type, o->w->rows + (size_t)c->b->tokens[r] * o->w->row_bytes, y, (size_t)n);
        if (o->scale != 1.0f) k->scale(y, o->scale, y, n);
        break;
    case LR_OP_EMBED_AT: {
        int at_row = lr_cpu_less(p->row_pos[r], o->w->n - 1);
        lr_dtype_to_f32(o->w->type, o->w->rows + (size_t)at_row * o->w->row_bytes, y, (size_t)n);
        break;
    }
    case LR_OP_INPUT:
        memcpy(y, c->b->input + at, (size_t)n * sizeof *y);
        break;
    case OP_ROPE_TABLE: {
        const rope_table *t = &p->ropes[o->rope];
        rope_angles(t, p->row_pos[r], t->cs + (size_t)r * (size_t)t->n_rot);
        break;
    }
    case LR_OP_ROPE: {
        const rope_table *t = &p->ropes[o->rope];
        if (y != x + at) memcpy(y, x + at, (size_t)n * sizeof *y);
        k->rope(y, o->n_heads, o->head_dim, t->n_rot, o->layer_norm, t->cs + (size_t)r * (size_t)t->n_rot);
        break;
    }
    case LR_OP_KV:
        put_kv(c, o, r);
        break;
    case LR_OP_NORM:
        norm_row(k, o, x + at, y, n);
        break;
    case LR_OP_ADD:
        k->add(x + at, x2 + at, y, n);
        break;
    case LR_OP_MUL:
        if (p->values[o->in[1]].width == n)
            k->mul(x + at, x2 + at, y, n);
        else
            k->scale(x + at, x2[r], y, n);
        break;
    case LR_OP_ACT:
        k->act(o->act, x + at, y, n);
        break;
    case LR_OP_GLU:
        k->glu(o->act, x + at, x2 + at, y, n);
        break;
    case LR_OP_SCALE:
        k->scale(x + at, o->scale, y, n);
        break;
    case LR_OP_SOFTCAP:
        k->softcap(x + at, o->scale, y, n);
        break;
    case LR_OP_SLICE:
        memcpy(y, x + (size_t)r * (size_t)p->values[o->in[0]].width + o->first, (size_t)n * sizeof *y);
        break;
    case LR_OP_ROWS:
        memcpy(y, x + (size_t)c->b->out_rows[r] * (size_t)n, (size_t)n * sizeof *y);
        break;
    case OP_QUANT: {
        k->quantize(x + at, (size_t)n, 1, lr_qact_at(p->q[out], at), 0, n);
        break;
    }
    case LR_OP_PART:
    case LR_OP_CONCAT:
        part_op(p, o, x, x2, r, y, n);
        break;
    case OP_SPREAD:
    case OP_SPREAD_QUANT:
    case LR_OP_ROUTE:
    case LR_OP_MIX:
        moe_op(p, o, x, x2, r, y, n);
        break;
    default:
        break;
    }
}

static int rows_per_task(const run_ctx *c, int rows)
{
    int n = rows / (c->n_threads * 4);
    return n < 1 ? 1 : n > 32 ? 32 : n;
}

static void rows_task(const run_ctx *c, const stage *s, int task, int rows)
{
    int step = rows_per_task(c, rows), r1 = lr_cpu_less((task + 1) * step, rows);
    for (int r = task * step; r < r1; r++)
        for (int i = 0; i < s->n; i++) row_op(c, &c->p->ops[c->p->order[s->first + i]], r);
}

/* ---- COMM ---- */

/* Slots lie as all ranks' do, sorted by expert: nothing has to be put in place. */
static void gather_slots(run_ctx *c, const plan_op *o)
{
    lr_plan *p = c->p;
    const int *start = p->routes[o->route].start;
    int bytes = p->values[o->out].width * (int)sizeof(float);
    for (int r = 0; r < o->comm->size; r++) p->exchange_bytes[r] = (start[o->at[r + 1]] - start[o->at[r]]) * bytes;
    c->failed = o->comm->ops->all_gather(o->comm, p->ptr[o->in[0]], p->ptr[o->out], p->exchange_bytes, c->err);
}

/* Each rank's rows come as a block of their own: they go side by side, if there is more than one. */
static void exchange(run_ctx *c, const plan_op *o)
{
    lr_plan *p = c->p;
    float *out = p->ptr[o->out];
    for (int r = 0; r < o->comm->size; r++)
        p->exchange_bytes[r] = c->rows * (o->at[r + 1] - o->at[r]) * (int)sizeof *out;
    c->failed = o->comm->ops->all_gather(o->comm, p->ptr[o->in[0]], c->rows == 1 ? out : p->exchange, p->exchange_bytes,
                                         c->err);
}

static void exchanged_row(const run_ctx *c, const plan_op *o, int row)
{
    const lr_plan *p = c->p;
    float *out = p->ptr[o->out] + (size_t)row * (size_t)p->values[o->out].width;
    for (int r = 0; r < o->comm->size; r++) {
        const size_t w = (size_t)(o->at[r + 1] - o->at[r]);
        memcpy(out + o->at[r], p->exchange + (size_t)c->rows * (size_t)o->at[r] + (size_t)row * w, w * sizeof *out);
    }
}

/* ---- the walk ---- */

/* Adds up what the weights of a stage are multiplied with, for those who asked. */
static void observe(const run_ctx *c, const stage *s, int rows)
{
    const lr_plan *p = c->p;
    for (int i = s->first; i < s->first + s->n; i++) {
        const int ops[2] = {p->items[i].a, p->items[i].b};
        for (int k = 0; k < 2; k++) {
            if (ops[k] < 0 || !p->ops[ops[k]].w->seen) continue;
            const plan_op *o = &p->ops[ops[k]];
            const float *x = p->ptr[o->in[0]];
            for (int r = 0; r < rows; r++, x += o->w->k)
                for (int j = 0; j < o->w->k; j++) o->w->seen->sums[j] += (double)x[j] * (double)x[j];
            o->w->seen->rows += (uint64_t)rows;
        }
    }
}

/* The tasks of phase c->stage, c->second; 0: there is nothing to do. */
static lr_pool_phase phase_of(run_ctx *c)
{
    const lr_plan *p = c->p;
    const stage *s = &p->stages[c->stage];
    const plan_op *o = s->kind == STAGE_GEMM ? NULL : &p->ops[p->order[s->first]];
    c->rows = lr_cpu_rows(c, s->narrow, s->route);
    if (c->rows == 0) return (lr_pool_phase){0};
    switch (s->kind) {
    case STAGE_SORT:
        return (lr_pool_phase){!c->second, false};
    case STAGE_ATTN:
        if (!c->second) c->pieces = lr_cpu_attn_pieces(p, c->kv, c->b, o);
        return (lr_pool_phase){lr_cpu_attn_tasks(p, o, c->pieces, c->second), false};
    case STAGE_COMM:
        if (!c->second) return (lr_pool_phase){1, true};
        return (lr_pool_phase){o->route >= 0 || c->rows == 1 ? 0 : c->rows, false};
    case STAGE_ROWS:
        return (lr_pool_phase){c->second ? 0 : (c->rows + rows_per_task(c, c->rows) - 1) / rows_per_task(c, c->rows),
                               false};
    default:
        if (!c->second) return (lr_pool_phase){c->lora && s->route < 0 ? c->rows : 0, false};
        if (p->be->observed) observe(c, s, c->rows);
        c->shared = lr_cpu_is_shared(c, s, c->rows);
        c->strips = c->shared ? lr_cpu_unit_strips(c, s) : lr_cpu_gemm_strips(c, s, c->rows);
        return (lr_pool_phase){
            c->shared ? lr_cpu_share_out(c, s, c->strips) : lr_cpu_gemm_tasks(c, s, c->rows, c->strips), false};
    }
}

static lr_pool_phase next_phase(void *arg)
{
    run_ctx *c = arg;
    while (!c->failed) {
        c->stage += c->second;
        c->second = !c->second;
        if (c->stage >= c->p->n_stages) break;
        lr_pool_phase f = phase_of(c);
        if (f.n > 0) return f;
    }
    return (lr_pool_phase){0};
}

static void run_task(void *arg, int task, int thread)
{
    run_ctx *c = arg;
    const stage *s = &c->p->stages[c->stage];
    const plan_op *o = s->kind == STAGE_GEMM ? NULL : &c->p->ops[c->p->order[s->first]];
    if (thread == 0 && c->b->tick && c->ticked != c->stage) {
        c->ticked = c->stage;
        c->b->tick->ops->tick(c->b->tick);
    }
    switch (s->kind) {
    case STAGE_SORT:
        lr_cpu_sort(&c->p->routes[o->route], c->p->ptr[o->in[0]], c->rows);
        break;
    case STAGE_ATTN:
        lr_cpu_attn_task(c->p, c->kv, c->b, o, c->pieces, c->second, task, thread);
        break;
    case STAGE_COMM:
        if (c->second)
            exchanged_row(c, o, task);
        else if (o->route >= 0)
            gather_slots(c, o);
        else
            exchange(c, o);
        break;
    case STAGE_ROWS:
        rows_task(c, s, task, c->rows);
        break;
    default:
        if (!c->second)
            lr_cpu_lora_task(c, s, task);
        else if (c->shared)
            lr_cpu_shared_task(c, s, thread);
        else
            lr_cpu_gemm_task(c, s, task, c->rows, c->strips);
    }
}

static void lay_rows(lr_plan *p, const lr_batch *b)
{
    for (int r = 0, i = 0; r < b->n_rows; r++) {
        while (i < b->n_echoes && b->echoes[i].row < r) i++;
        p->row_echo[r] = i;
    }
    for (int s = 0; s < b->n_seqs; s++) {
        const lr_batch_seq *q = &b->seqs[s];
        for (int i = 0; i < q->n; i++) {
            p->row_pos[q->row + i] = q->pos + i;
            p->row_seq[q->row + i] = s;
        }
    }
}

int lr_cpu_run(lr_backend *be, lr_plan *p, lr_kv_store *kv, const lr_batch *b, lr_error *err)
{
    (void)be;
    if (b->n_rows < 1 || b->n_rows > p->max_rows || b->n_out > p->max_out)
        return lr_fail(err, LR_EINVAL, "a batch of %d rows (%d with logits) for a plan of %d (%d)", b->n_rows, b->n_out,
                       p->max_rows, p->max_out);
    assert(!b->shortlist || !b->peaks); /* a piece may be wanted in part */
    lay_rows(p, b);
    lr_cpu_lay_tiles(p, kv, b);
    p->ptr[p->logits] = b->logits;
    run_ctx c = {.p = p,
                 .kv = kv,
                 .b = b,
                 .n_threads = lr_pool_threads(p->be->pool),
                 .err = err,
                 .stage = -1,
                 .second = true,
                 .ticked = -1};
    for (int i = 0; i < b->n_seqs; i++) c.lora = c.lora || b->seqs[i].lora;
    lr_pool_walk(p->be->pool, &(lr_pool_work){next_phase, run_task, &c});
    if (c.failed) return c.failed;
    if (b->hidden && p->hidden >= 0)
        memcpy(b->hidden, p->ptr[p->hidden], (size_t)b->n_out * (size_t)p->values[p->hidden].width * sizeof(float));
    if (b->features && p->features >= 0)
        memcpy(b->features, p->ptr[p->features],
               (size_t)b->n_rows * (size_t)p->values[p->features].width * sizeof(float));
    return 0;
}
