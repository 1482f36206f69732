/* cuda_plan.c - turns a layer graph into steps, a launch or two each, and lays out activation memory.
 *
 * Steps keep the script's order; what the kernels do at once is folded into one: a sum and the norm behind it; the
 * norms of heads, the turning of queries and keys and the write to the KV; the packing of rows for products, which the
 * kernel that made them does on the way. A piece of memory lives from the step that fills it to its last reader.
 */
#include "backend/cuda_int.h"
#include <stdio.h>
#include <string.h>

typedef struct pack_entry {
    int value, type, piece;
} pack_entry;

typedef struct builder {
    lr_plan *p;
    cuda_backend *be;
    const lr_program *g;
    const lr_kv_store *kv;
    int *maker;  /* (values) operation */
    int *uses;   /* (values) readers */
    int *piece;  /* (values) float32 piece, -1 = none yet */
    int *writer; /* (values) step whose lr_cu_out it is, -1 = none */
    bool *narrow;
    bool *folded; /* (operations) done as part of another */
    pack_entry *packs;
    int n_packs;
    float *consts; /* host twin of the plan's */
    size_t n_consts;
} builder;

/* ---- pieces and steps ---- */

static int push_piece(builder *b, int width, bool narrow, int type)
{
    b->p->pieces[b->p->n_pieces] = (cuda_piece){.width = width, .narrow = narrow, .type = type, .def = -1, .last = -1};
    return b->p->n_pieces++;
}

static int value(builder *b, int v)
{
    if (v < 0) return -1;
    if (b->piece[v] < 0) b->piece[v] = push_piece(b, b->g->width[v], b->narrow[v], -1);
    return b->piece[v];
}

static cuda_step *push_step(builder *b, int kind, int out, bool narrow)
{
    cuda_step *s = &b->p->steps[b->p->n_steps];
    *s = (cuda_step){.kind = kind, .in = {-1, -1, -1}, .out = -1, .sum = -1, .pack = -1, .narrow = narrow};
    if (out >= 0) {
        s->out = value(b, out);
        s->width = b->g->width[out];
        s->narrow = b->narrow[out];
        if (kind != LR_OP_LINEAR && kind != LR_OP_ROPE && kind != LR_OP_ATTN) b->writer[out] = b->p->n_steps;
    }
    b->p->n_steps++;
    return s;
}

lr_cu_form lr_cuda_form(const cuda_backend *be, int type, int m)
{
    if (be->compute == LR_COMPUTE_LOOSE && m >= LR_CUDA_BLAS_ROWS) return LR_CU_BF16;
    return lr_cu_linear_form(be->math, type, m);
}

static const int sizes[] = {1, 8, 9, LR_CUDA_BLAS_ROWS - 1, LR_CUDA_BLAS_ROWS};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

static bool same_forms(const cuda_backend *be, int a, int b)
{
    for (int i = 0; i < N_SIZES; i++)
        if (lr_cuda_form(be, a, sizes[i]) != lr_cuda_form(be, b, sizes[i])) return false;
    return true;
}

static bool takes_floats(const cuda_backend *be, int type)
{
    for (int i = 0; i < N_SIZES; i++)
        if (lr_cuda_form(be, type, sizes[i]) != LR_CU_F32) return false;
    return true;
}

/* The piece that a product with weights of `type` reads the value from. */
static int packed(builder *b, int v, int type)
{
    if (takes_floats(b->be, type)) return value(b, v);
    for (int i = 0; i < b->n_packs; i++)
        if (b->packs[i].value == v && same_forms(b->be, b->packs[i].type, type)) return b->packs[i].piece;
    int piece = push_piece(b, b->g->width[v], b->narrow[v], type);
    b->packs[b->n_packs++] = (pack_entry){v, type, piece};
    int w = b->writer[v];
    if (w >= 0 && b->p->steps[w].pack < 0) {
        b->p->steps[w].pack = piece;
        return piece;
    }
    cuda_step *s = push_step(b, STEP_PACK, -1, b->narrow[v]);
    s->in[0] = value(b, v);
    s->pack = piece;
    s->width = b->g->width[v];
    return piece;
}

/* n floats among the plan's constants: where they will be on the device. */
static const float *keep(builder *b, const float *host, int n)
{
    const float *at = (const float *)b->p->consts + b->n_consts;
    if (host) memcpy(b->consts + b->n_consts, host, (size_t)n * sizeof *host);
    b->n_consts += ((size_t)n + 3) & ~(size_t)3;
    return at;
}

/* ---- folding ---- */

static bool whole_norm(const builder *b, const lr_op *o)
{
    return o->kind == LR_OP_NORM && o->u.norm.group == b->g->width[o->in[0]];
}

/* The operation that made v, if it is of that kind and v has no other reader. */
static const lr_op *sole_maker(const builder *b, int v, lr_op_kind kind)
{
    const lr_op *o = b->maker[v] >= 0 ? &b->g->ops[b->maker[v]] : NULL;
    return o && o->kind == kind && b->uses[v] == 1 ? o : NULL;
}

static bool head_norm(const builder *b, const lr_op *o, int head_dim)
{
    return o && o->u.norm.group == head_dim && o->w && !o->bias && !o->u.norm.layer_norm;
}

/* Marks the turning, and the heads' norms, that the KV write of operation i takes along. */
static void fold_side(builder *b, int v, int head_dim)
{
    const lr_op *rope = sole_maker(b, v, LR_OP_ROPE);
    if (rope && rope->u.rope.head_dim == head_dim) {
        b->folded[b->maker[v]] = true;
        v = rope->in[0];
    }
    const lr_op *norm = sole_maker(b, v, LR_OP_NORM);
    if (head_norm(b, norm, head_dim)) b->folded[b->maker[v]] = true;
}

static const lr_op *attn_behind(const builder *b, int i)
{
    const lr_op *o = &b->g->ops[i], *next = i + 1 < b->g->n_ops ? o + 1 : NULL;
    return next && next->kind == LR_OP_ATTN && next->u.attn.layer == o->u.attn.layer ? next : NULL;
}

static void find_folds(builder *b)
{
    for (int i = 0; i < b->g->n_ops; i++) {
        const lr_op *o = &b->g->ops[i], *attn = o->kind == LR_OP_KV ? attn_behind(b, i) : NULL;
        if (o->kind != LR_OP_KV) continue;
        fold_side(b, o->in[0], o->u.attn.head_dim);
        if (attn && attn->in[0] != o->in[0]) fold_side(b, attn->in[0], o->u.attn.head_dim);
    }
}

/* ---- one operation ---- */

static lr_cu_rope rope_of(builder *b, const lr_rope *r)
{
    double *host = (double *)(void *)(b->consts + b->n_consts);
    const double *freq = (const double *)(const void *)keep(b, NULL, r->n_rot);
    lr_cu_rope_freq(r->base, r->freq_scale, r->factors, r->n_rot, host);
    return (lr_cu_rope){r->n_heads, r->head_dim, r->n_rot, r->interleaved, r->attn_scale, freq};
}

static lr_cu_norm norm_of(const builder *b, const lr_op *o)
{
    return (lr_cu_norm){.w = o->w ? o->w->data : NULL,
                        .bias = o->bias ? o->bias->data : NULL,
                        .width = b->g->width[o->in[0]],
                        .group = o->u.norm.group,
                        .eps = o->u.norm.eps,
                        .layer_norm = o->u.norm.layer_norm};
}

/* The side's norm and turning were folded into s: notes them there; the value that s reads. */
static int unfold(builder *b, cuda_step *s, int side, int v)
{
    if (b->maker[v] >= 0 && b->folded[b->maker[v]] && b->g->ops[b->maker[v]].kind == LR_OP_ROPE) {
        const lr_op *rope = &b->g->ops[b->maker[v]];
        s->rope[side] = rope_of(b, &rope->u.rope);
        s->has_rope[side] = true;
        v = rope->in[0];
    }
    if (b->maker[v] >= 0 && b->folded[b->maker[v]]) {
        const lr_op *norm = &b->g->ops[b->maker[v]];
        s->head_norm[side] = norm_of(b, norm);
        s->has_norm[side] = true;
        v = norm->in[0];
    }
    return v;
}

static int kv_step(builder *b, int i, lr_error *err)
{
    const lr_op *o = &b->g->ops[i], *attn = attn_behind(b, i);
    if (o->u.attn.layer < 0 || o->u.attn.layer >= b->kv->n_layers)
        return lr_fail(err, LR_EINVAL, "KV layer %d of %d", o->u.attn.layer, b->kv->n_layers);
    int q = attn && attn->in[0] != o->in[0] ? attn->in[0] : -1;
    bool with_q = q >= 0 && b->maker[q] >= 0 && b->folded[b->maker[q]];
    cuda_step *s = push_step(b, STEP_ROPE_KV, -1, false);
    s->layer = o->u.attn.layer;
    s->in[1] = value(b, unfold(b, s, 1, o->in[0]));
    s->in[2] = value(b, o->in[1]);
    if (with_q) {
        s->attn.n_heads = attn->u.attn.n_heads;
        s->in[0] = value(b, unfold(b, s, 0, q));
        s->out = value(b, q);
    }
    return 0;
}

static int attn_step(builder *b, const lr_op *o, lr_error *err)
{
    const lr_attn *a = &o->u.attn;
    if (a->layer < 0 || a->layer >= b->kv->n_layers)
        return lr_fail(err, LR_EINVAL, "KV layer %d of %d", a->layer, b->kv->n_layers);
    cuda_step *s = push_step(b, LR_OP_ATTN, o->out, false);
    s->in[0] = value(b, o->in[0]);
    s->layer = a->layer;
    s->attn =
        (lr_cu_attn){a->n_heads, a->scale, a->softcap, a->window, a->sinks ? keep(b, a->sinks, a->n_heads) : NULL};
    return 0;
}

/* An addition; a norm of the whole row behind it is made at once. */
static void add_step(builder *b, int i)
{
    const lr_op *o = &b->g->ops[i];
    for (int j = i + 1; j < b->g->n_ops; j++) {
        const lr_op *n = &b->g->ops[j];
        if (b->folded[j] || !whole_norm(b, n) || n->in[0] != o->out) continue;
        b->folded[j] = true;
        cuda_step *s = push_step(b, LR_OP_NORM, n->out, false);
        s->norm = norm_of(b, n);
        s->in[0] = value(b, o->in[0]);
        s->in[1] = value(b, o->in[1]);
        if (b->uses[o->out] > 1) s->sum = value(b, o->out);
        return;
    }
    cuda_step *s = push_step(b, LR_OP_ADD, o->out, false);
    s->in[0] = value(b, o->in[0]);
    s->in[1] = value(b, o->in[1]);
}

static int linear_step(builder *b, const lr_op *o, lr_error *err)
{
    if (o->bias && o->bias->type != LR_F32) return lr_fail(err, LR_EINVAL, "a bias that is no vector");
    int x = packed(b, o->in[0], o->w->type);
    cuda_step *s = push_step(b, LR_OP_LINEAR, o->out, false);
    s->in[0] = x;
    s->w = o->w;
    s->bias = o->bias ? o->bias->data : NULL;
    return 0;
}

static lr_cu_parts parts_of(const builder *b, const lr_op *o)
{
    int width = b->g->width[o->in[0]], heads = o->kind == LR_OP_SLICE ? 1 : o->u.part.n_heads, each = width / heads;
    if (o->kind == LR_OP_CONCAT) return (lr_cu_parts){heads, each, 0, each, o->u.part.n, o->u.part.shared};
    if (o->kind == LR_OP_PART) return (lr_cu_parts){heads, each, o->u.part.first, o->u.part.n, 0, false};
    return (lr_cu_parts){1, width, o->u.first, b->g->width[o->out], 0, false};
}

/* What ranks exchange comes as a block of each; a carrier of host memory can't be captured. */
static int gather_step(builder *b, const lr_op *o, lr_error *err)
{
    lr_comm *c = o->u.gather.comm;
    if (o->in[0] >= 0 && b->g->route && b->g->route[o->in[0]] >= 0)
        return lr_fail(err, LR_EUNSUPPORTED, "the CUDA backend has no operation 'gather' of experts");
    int32_t at[LR_CUDA_RANKS + 1];
    if (c->size > LR_CUDA_RANKS)
        return lr_fail(err, LR_EUNSUPPORTED, "the CUDA backend exchanges between %d ranks at most, not %d",
                       LR_CUDA_RANKS, c->size);
    cuda_step *s = push_step(b, LR_OP_GATHER, o->out, false);
    for (int r = 0; r <= c->size; r++) at[r] = s->gather.at[r] = o->u.gather.at[r];
    s->in[0] = value(b, o->in[0]);
    s->gather.comm = c;
    s->gather.at_dev = (const int32_t *)(const void *)keep(b, (const float *)(const void *)at, c->size + 1);
    if (!c->device) b->p->no_graphs = true;
    size_t bytes = (size_t)(s->narrow ? b->p->max_out : b->p->max_rows) * (size_t)s->width * sizeof(float);
    if (bytes > b->p->exchange_bytes) b->p->exchange_bytes = bytes;
    return 0;
}

static int input_step(builder *b, const lr_op *o, lr_error *err)
{
    if (b->p->n_steps > 0) return lr_fail(err, LR_EINVAL, "the input is not the graph's first operation");
    push_step(b, LR_OP_INPUT, o->out, false);
    b->writer[o->out] = -1; /* it comes from the host */
    b->p->input = value(b, o->out);
    return 0;
}

static int convert(builder *b, int i, lr_error *err)
{
    const lr_op *o = &b->g->ops[i];
    switch (o->kind) {
    case LR_OP_GATHER:
        return gather_step(b, o, err);
    case LR_OP_INPUT:
        return input_step(b, o, err);
    case LR_OP_LINEAR:
        return linear_step(b, o, err);
    case LR_OP_KV:
        return kv_step(b, i, err);
    case LR_OP_ATTN:
        return attn_step(b, o, err);
    case LR_OP_ADD:
        add_step(b, i);
        return 0;
    case LR_OP_EMBED_AT:
        b->p->held = o->w->n;
        break;
    case LR_OP_MUL:
    case LR_OP_ACT:
    case LR_OP_GLU:
    case LR_OP_PART:
    case LR_OP_CONCAT:
    case LR_OP_SLICE:
    case LR_OP_EMBED:
    case LR_OP_NORM:
    case LR_OP_ROPE:
    case LR_OP_SCALE:
    case LR_OP_SOFTCAP:
    case LR_OP_ROWS:
        break;
    default:
        return lr_fail(err, LR_EUNSUPPORTED, "the CUDA backend has no operation '%s'", lr_op_name(o->kind));
    }
    cuda_step *s = push_step(b, (int)o->kind, o->out, false);
    s->in[0] = value(b, o->in[0]);
    s->in[1] = value(b, o->in[1]);
    s->w = o->w;
    if (o->kind == LR_OP_NORM) s->norm = norm_of(b, o);
    if (o->kind == LR_OP_PART || o->kind == LR_OP_CONCAT || o->kind == LR_OP_SLICE) s->parts = parts_of(b, o);
    if (o->kind == LR_OP_MUL) s->by_row = b->g->width[o->in[1]] != b->g->width[o->out];
    if (o->kind == LR_OP_ROPE) s->rope[0] = rope_of(b, &o->u.rope);
    if (o->kind == LR_OP_ACT || o->kind == LR_OP_GLU) s->act = (int)o->u.act;
    if (o->kind == LR_OP_EMBED_AT) s->scale = 1;
    if (o->kind == LR_OP_EMBED || o->kind == LR_OP_SCALE || o->kind == LR_OP_SOFTCAP) s->scale = o->u.scale;
    return 0;
}

/* ---- memory ---- */

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
        bool read = s->pack < 0 || s->out < 0 || s->out == p->logits || s->out == p->hidden;
        for (int j = i + 1; j < p->n_steps && !read; j++)
            for (int k = 0; k < 3; k++)
                if (p->steps[j].in[k] == s->out) read = true;
        if (!read) s->out = -1;
    }
}

static size_t piece_bytes(const lr_plan *p, const cuda_piece *v)
{
    int rows = v->narrow ? p->max_out : p->max_rows;
    size_t most = 0;
    if (v->type < 0) most = (size_t)rows * (size_t)v->width * sizeof(float);
    for (int i = 0; i <= N_SIZES && v->type >= 0; i++) {
        int m = i == N_SIZES || sizes[i] > rows ? rows : sizes[i];
        size_t n = lr_cu_rows_bytes(lr_cuda_form(p->be, v->type, m), m, v->width);
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
        touch(p, s->out, i);
        touch(p, s->sum, i);
        touch(p, s->pack, i);
    }
    touch(p, p->logits, p->n_steps);
    touch(p, p->hidden, p->n_steps);
    for (int i = 0; i < p->n_pieces; i++) {
        cuda_piece *v = &p->pieces[i];
        v->bytes = v->def < 0 ? 0 : piece_bytes(p, v);
        if (v->bytes) place(p, i);
    }
    int rc = lr_cuda_alloc(p->be, &p->work, p->work_bytes, "activations", err);
    for (int i = 0; i < p->n_pieces && !rc; i++)
        if (p->pieces[i].bytes) p->pieces[i].at = (char *)p->work + p->pieces[i].offset;
    return rc;
}

enum { PARTS_BYTES = 64 << 20 };

static void want(size_t *most, size_t n)
{
    if (n > *most) *most = n;
}

static void count_scratch(lr_plan *p)
{
    int slots = 1;
    for (int g = 0; g < LR_KV_GROUPS; g++)
        if (p->kv->n_blocks[g] * p->kv->block_size > slots) slots = p->kv->n_blocks[g] * p->kv->block_size;
    p->slots_cap = slots;
    for (int i = 0; i < p->n_steps; i++) {
        const cuda_step *s = &p->steps[i];
        int m = s->narrow ? p->max_out : p->max_rows;
        if (s->kind == LR_OP_LINEAR) {
            want(&p->scratch_bytes, lr_cu_linear_work(p->be->math, s->w->type, s->w->n, s->w->k, m));
            if (p->be->compute == LR_COMPUTE_LOOSE && m >= LR_CUDA_BLAS_ROWS && s->w->type != LR_BF16)
                want(&p->dense_bytes, (size_t)s->w->n * (size_t)s->w->k * 2);
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
    int rc = lr_cuda_alloc(p->be, &p->scratch, p->scratch_bytes, "workspace of products", err);
    if (!rc) rc = lr_cuda_alloc(p->be, &p->parts, p->parts_bytes, "workspace of attention", err);
    if (!rc && p->dense_bytes) rc = lr_cuda_alloc(p->be, &p->dense, p->dense_bytes, "a weight as bfloat16", err);
    if (rc) return rc;
    if (!rc && p->exchange_bytes) {
        rc = lr_cuda_alloc(p->be, &p->exchange, p->exchange_bytes, "rows of other ranks", err);
        cudaError_t pinned = rc ? cudaSuccess : cudaMallocHost(&p->staged, 2 * p->exchange_bytes);
        if (!rc && !pinned) pinned = cudaEventCreateWithFlags(&p->met, cudaEventDisableTiming);
        if (pinned) rc = lr_cuda_failed(p->be, (int)pinned, "pinned memory for rows of other ranks", err);
        if (rc) return rc;
    }
    p->bounce_bytes = (size_t)(p->partial ? p->max_rows : p->max_out) * (size_t)p->n_vocab * sizeof(float);
    if (p->bounce_bytes > BOUNCE) p->bounce_bytes = BOUNCE;
    cudaError_t e = cudaMallocHost(&p->bounce, p->bounce_bytes);
    return e ? lr_cuda_failed(p->be, (int)e, "pinned memory for logits", err) : 0;
}

/* ---- entry points ---- */

static int alloc_builder(builder *b, lr_error *err)
{
    lr_plan *p = b->p;
    const lr_program *g = b->g;
    size_t nv = (size_t)g->n_values, no = (size_t)g->n_ops, floats = 4;
    for (size_t i = 0; i < no; i++) {
        const lr_op *o = &g->ops[i];
        if (o->kind == LR_OP_ROPE) floats += (size_t)o->u.rope.n_rot + 4;
        if (o->kind == LR_OP_ATTN) floats += (size_t)o->u.attn.n_heads + 4;
        if (o->kind == LR_OP_GATHER) floats += LR_CUDA_RANKS + 4;
    }
    p->pieces = lr_calloc(nv + 2 * no + 1, sizeof *p->pieces);
    p->steps = lr_calloc(2 * no + 1, sizeof *p->steps);
    b->maker = lr_calloc(nv, sizeof *b->maker);
    b->uses = lr_calloc(nv, sizeof *b->uses);
    b->piece = lr_calloc(nv, sizeof *b->piece);
    b->writer = lr_calloc(nv, sizeof *b->writer);
    b->narrow = lr_calloc(nv, sizeof *b->narrow);
    b->folded = lr_calloc(no, sizeof *b->folded);
    b->packs = lr_calloc(no, sizeof *b->packs);
    b->consts = lr_alloc_aligned(floats * sizeof *b->consts);
    if (!p->pieces || !p->steps || !b->maker || !b->uses || !b->piece || !b->writer || !b->narrow || !b->folded ||
        !b->packs || !b->consts)
        return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    for (size_t i = 0; i < nv; i++) b->maker[i] = b->piece[i] = b->writer[i] = -1;
    return lr_cuda_alloc(b->be, &p->consts, floats * sizeof(float), "constants", err);
}

static void free_builder(builder *b)
{
    lr_free(b->maker);
    lr_free(b->uses);
    lr_free(b->piece);
    lr_free(b->writer);
    lr_free(b->narrow);
    lr_free(b->folded);
    lr_free(b->packs);
    lr_free_aligned(b->consts);
}

static int look_through(builder *b, lr_error *err)
{
    const lr_program *g = b->g;
    for (int i = 0; i < g->n_ops; i++) {
        const lr_op *o = &g->ops[i];
        bool narrow = o->kind == LR_OP_ROWS;
        for (int k = 0; k < 2; k++) {
            if (o->in[k] < 0) continue;
            b->uses[o->in[k]]++;
            narrow = narrow || b->narrow[o->in[k]];
        }
        if (narrow && (o->kind == LR_OP_ROPE || o->kind == LR_OP_KV || o->kind == LR_OP_ATTN))
            return lr_fail(err, LR_EINVAL, "the graph attends to rows that were left out");
        if (o->out < 0) continue;
        b->maker[o->out] = i;
        b->narrow[o->out] = narrow;
    }
    b->uses[g->logits]++;
    if (g->hidden >= 0) b->uses[g->hidden]++;
    if (!b->narrow[g->logits] && !g->partial)
        return lr_fail(err, LR_EINVAL, "the logits are not made behind the last attention");
    find_folds(b);
    return 0;
}

static int build(builder *b, lr_error *err)
{
    lr_plan *p = b->p;
    int rc = alloc_builder(b, err);
    if (!rc) rc = look_through(b, err);
    for (int i = 0; i < b->g->n_ops && !rc; i++)
        if (!b->folded[i]) rc = convert(b, i, err);
    if (rc) return rc;
    p->logits = value(b, b->g->logits);
    p->hidden = b->g->hidden >= 0 ? value(b, b->g->hidden) : -1;
    p->partial = b->g->partial;
    p->n_vocab = b->g->width[b->g->logits];
    p->n_hidden = b->g->hidden >= 0 ? b->g->width[b->g->hidden] : 0;
    rc = lr_cuda_upload(b->be, p->consts, b->consts, b->n_consts * sizeof(float), err);
    if (!rc) rc = layout(p, err);
    return rc ? rc : alloc_scratch(p, err);
}

int lr_cuda_compile(lr_backend *be, const lr_program *prog, const lr_kv_store *kv, int max_rows, int max_out,
                    lr_plan **out, lr_error *err)
{
    if (max_rows < 1 || max_out < 1 || max_rows > 1 << 20)
        return lr_fail(err, LR_EINVAL, "a batch of %d rows, %d with logits", max_rows, max_out);
    lr_plan *p = lr_calloc(1, sizeof *p);
    if (!p) return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    *p = (lr_plan){.be = (cuda_backend *)be,
                   .kv = kv,
                   .max_rows = max_rows,
                   .max_out = max_out,
                   .hidden = -1,
                   .input = -1,
                   .tile_narrow = max_rows,
                   .tile_wide = max_rows};
    cudaSetDevice(p->be->index);
    builder b = {.p = p, .be = p->be, .g = prog, .kv = kv};
    int rc = (p->drawn = lr_malloc((size_t)max_out)) ? 0 : lr_fail(err, LR_ENOMEM, "no memory for the plan");
    if (!rc) rc = build(&b, err);
    free_builder(&b);
    if (!rc) {
        cudaError_t e = cudaStreamSynchronize(p->be->stream);
        if (e) rc = lr_cuda_failed(p->be, (int)e, "uploading the model", err);
    }
    p->counted = p->work_bytes + p->scratch_bytes + p->parts_bytes + p->dense_bytes;
    p->be->bytes_work += p->counted;
    if (rc) {
        lr_cuda_plan_free(be, p);
        return rc;
    }
    *out = p;
    return 0;
}

void lr_cuda_plan_free(lr_backend *be, lr_plan *p)
{
    if (!p) return;
    cudaSetDevice(((cuda_backend *)be)->index);
    cudaStreamSynchronize(p->be->stream);
    lr_cuda_graphs_drop(p);
    lr_cuda_draw_close(p);
    p->be->bytes_work -= p->counted;
    void *const device[] = {p->work, p->consts, p->scratch, p->parts, p->dense, p->exchange, p->echo, p->meta_dev};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        if (device[i]) cudaFree(device[i]);
    if (p->meta_host) cudaFreeHost(p->meta_host);
    if (p->bounce) cudaFreeHost(p->bounce);
    if (p->staged) cudaFreeHost(p->staged);
    if (p->met) cudaEventDestroy(p->met);
    lr_free(p->pieces);
    lr_free(p->steps);
    lr_free(p->drawn);
    lr_free(p);
}
