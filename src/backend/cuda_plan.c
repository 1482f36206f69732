/* cuda_plan.c - turns a layer graph into steps, a launch or two each.
 *
 * Steps keep the script's order; what the kernels do at once is folded into one: a sum and the norm behind it; the
 * norms of heads, the turning of queries and keys and the write to the KV; the packing of rows for products, which the
 * kernel that made them does on the way. A piece of memory lives from the step that fills it to its last reader.
 */
#include "backend/cuda_int.h"
#include "backend/kv_center.h"
#include <stdio.h>
#include <string.h>

typedef struct pack_entry {
    int value, piece;
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
    int *router;  /* (values) of a route: its step */
    bool *folded; /* (operations) done as part of another */
    bool *joined; /* (operations) products that are made with another, or with a GLU */
    bool *glued;  /* (operations) such a GLU */
    pack_entry *packs;
    int n_packs;
    float *consts; /* host twin of the plan's */
    size_t n_consts;
} builder;

/* ---- pieces and steps ---- */

/* Rows of a value for each token row. */
static int times(const builder *b, int v)
{
    int route = b->g->route ? b->g->route[v] : -1;
    return route < 0 || b->router[route] < 0 ? 1 : b->p->steps[b->router[route]].slots.n_used;
}

static int push_piece(builder *b, int v, int type)
{
    b->p->pieces[b->p->n_pieces] = (cuda_piece){
        .width = b->g->width[v], .narrow = b->narrow[v], .times = times(b, v), .type = type, .def = -1, .last = -1};
    return b->p->n_pieces++;
}

static int value(builder *b, int v)
{
    if (v < 0) return -1;
    if (b->piece[v] < 0) b->piece[v] = push_piece(b, v, -1);
    return b->piece[v];
}

static cuda_step *push_step(builder *b, int kind, int out, bool narrow)
{
    cuda_step *s = &b->p->steps[b->p->n_steps];
    *s = (cuda_step){.kind = kind, .in = {-1, -1, -1}, .sum = -1, .pack = -1, .narrow = narrow, .times = 1};
    for (int i = 0; i < LR_CU_JOINT; i++) s->out[i] = -1;
    if (out >= 0) {
        bool packs = kind != LR_OP_LINEAR && kind != LR_OP_ROPE && kind != LR_OP_ATTN && kind != LR_OP_EXPERTS &&
                     kind != LR_OP_ROUTE;
        s->out[0] = value(b, out);
        s->width = b->g->width[out];
        s->narrow = b->narrow[out];
        s->times = times(b, out);
        if (packs) b->writer[out] = b->p->n_steps;
    }
    b->p->n_steps++;
    return s;
}

lr_cu_form lr_cuda_form(const cuda_backend *be, int type, bool experts, int m)
{
    if (!experts && be->compute == LR_COMPUTE_LOOSE && m >= LR_CUDA_BLAS_ROWS) return LR_CU_BF16;
    return lr_cu_linear_form(be->math, type, m);
}

const int lr_cuda_sizes[LR_CUDA_SIZES] = {1, 8, 9, LR_CUDA_BLAS_ROWS - 1, LR_CUDA_BLAS_ROWS};

static bool same_forms(const cuda_backend *be, const cuda_piece *a, int type, bool experts)
{
    for (int i = 0; i < LR_CUDA_SIZES; i++)
        if (lr_cuda_form(be, a->type, a->experts, lr_cuda_sizes[i]) !=
            lr_cuda_form(be, type, experts, lr_cuda_sizes[i]))
            return false;
    return true;
}

static bool takes_floats(const cuda_backend *be, int type)
{
    for (int i = 0; i < LR_CUDA_SIZES; i++)
        if (lr_cuda_form(be, type, true, lr_cuda_sizes[i]) != LR_CU_F32) return false;
    return true;
}

/* The piece that a product with weights of `type` reads the value from. */
static int packed(builder *b, int v, int type, bool experts)
{
    if (takes_floats(b->be, type)) return value(b, v);
    for (int i = 0; i < b->n_packs; i++)
        if (b->packs[i].value == v && same_forms(b->be, &b->p->pieces[b->packs[i].piece], type, experts))
            return b->packs[i].piece;
    int piece = push_piece(b, v, type);
    b->p->pieces[piece].experts = experts;
    b->packs[b->n_packs++] = (pack_entry){v, piece};
    int w = b->writer[v];
    if (w >= 0 && b->p->steps[w].pack < 0) {
        b->p->steps[w].pack = piece;
        return piece;
    }
    cuda_step *s = push_step(b, STEP_PACK, -1, b->narrow[v]);
    s->in[0] = value(b, v);
    s->pack = piece;
    s->width = b->g->width[v];
    s->times = times(b, v);
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

/* Queries are turned in their place. */
static int read_twice(lr_error *err)
{
    return lr_fail(err, LR_EUNSUPPORTED, "CUDA has no KV of integers for a graph that reads queries twice");
}

/* Scores of the layer have no fixed point that a shift would move: no sink beside them, no cap on them. */
static bool shift_free(const builder *b, int layer)
{
    for (int i = 0; i < b->g->n_ops; i++) {
        const lr_op *o = &b->g->ops[i];
        if (o->kind == LR_OP_ATTN && o->u.attn.layer == layer && (o->u.attn.sinks || o->u.attn.softcap > 0))
            return false;
    }
    return true;
}

static const lr_op *made_by(const builder *b, int v) { return b->maker[v] >= 0 ? &b->g->ops[b->maker[v]] : NULL; }

/* What the keys have in common, for few bits: as cpu_center.c. */
static int center_of(builder *b, cuda_step *s, int keys, lr_error *err)
{
    const lr_op *made = made_by(b, keys), *rope = made && made->kind == LR_OP_ROPE ? made : NULL;
    int width = b->g->width[keys];
    if (!lr_cu_kv_turned(b->kv->layers[s->layer].k_type)) return 0;
    if (rope) made = made_by(b, rope->in[0]);
    if (!made || made->kind != LR_OP_LINEAR || !made->bias || !shift_free(b, s->layer)) return 0;
    if (b->p->dry) {
        s->center = keep(b, NULL, width);
        return 0;
    }
    float *c = lr_malloc((size_t)width * sizeof *c);
    double *freq = lr_malloc((size_t)width * sizeof *freq);
    cudaError_t e = cudaSuccess;
    if (c && freq) e = cudaStreamSynchronize(b->be->stream); /* it may still be on its way */
    if (c && freq && !e) e = cudaMemcpy(c, made->bias->data, (size_t)width * sizeof *c, cudaMemcpyDeviceToHost);
    if (c && freq && !e) {
        const lr_rope *r = rope ? &rope->u.rope : NULL;
        if (r) lr_cu_rope_freq(r->base, r->freq_scale, r->factors, r->n_rot, freq);
        for (int h = 0; r && h < r->n_heads; h++)
            lr_kv_center_turn(freq, r->n_rot, r->interleaved, r->attn_scale, c + (size_t)h * (size_t)r->head_dim);
        s->center = keep(b, c, width);
    }
    int rc = !c || !freq ? lr_fail(err, LR_ENOMEM, "no memory for the plan") : 0;
    if (e) rc = lr_cuda_failed(b->be, (int)e, "reading a bias", err);
    lr_free(c);
    lr_free(freq);
    return rc;
}

static int kv_step(builder *b, int i, lr_error *err)
{
    const lr_op *o = &b->g->ops[i], *attn = attn_behind(b, i);
    if (o->u.attn.layer < 0 || !b->kv || o->u.attn.layer >= b->kv->n_layers)
        return lr_fail(err, LR_EINVAL, "KV layer %d of %d", o->u.attn.layer, b->kv ? b->kv->n_layers : 0);
    int q = attn && attn->in[0] != o->in[0] ? attn->in[0] : -1;
    bool with_q = q >= 0 && b->maker[q] >= 0 && b->folded[b->maker[q]];
    cuda_step *s = push_step(b, STEP_ROPE_KV, -1, false);
    s->layer = o->u.attn.layer;
    s->in[1] = value(b, unfold(b, s, 1, o->in[0]));
    s->in[2] = value(b, o->in[1]);
    int rc = center_of(b, s, o->in[0], err);
    if (rc) return rc;
    if (with_q && b->uses[q] > 1 && lr_cu_kv_turned(b->kv->layers[s->layer].k_type)) return read_twice(err);
    if (with_q) {
        s->attn.n_heads = attn->u.attn.n_heads;
        s->in[0] = value(b, unfold(b, s, 0, q));
        s->out[0] = value(b, q);
    }
    return 0;
}

static int attn_step(builder *b, const lr_op *o, lr_error *err)
{
    const lr_attn *a = &o->u.attn;
    if (a->layer < 0 || !b->kv || a->layer >= b->kv->n_layers)
        return lr_fail(err, LR_EINVAL, "KV layer %d of %d", a->layer, b->kv ? b->kv->n_layers : 0);
    cuda_step *s = push_step(b, LR_OP_ATTN, o->out, false);
    s->in[0] = value(b, o->in[0]);
    s->layer = a->layer;
    int maker = b->maker[o->in[0]];
    s->turn_q = lr_cu_kv_turned(b->kv->layers[a->layer].k_type) && !(maker >= 0 && b->folded[maker]);
    if (s->turn_q && b->uses[o->in[0]] > 1) return read_twice(err);
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

/* ---- products ---- */

/* Products that read the same rows as a's, of weights of one kind, may be one launch. */
static bool joins(const builder *b, const lr_op *a, const lr_op *o)
{
    return b->be->math == LR_CU_EXACT && a->kind == o->kind && a->in[0] == o->in[0] && a->in[1] == o->in[1] &&
           a->w->type == o->w->type && a->w->k == o->w->k;
}

static int add_product(builder *b, cuda_step *s, const lr_op *o, lr_error *err)
{
    if (o->bias && o->bias->type != LR_F32) return lr_fail(err, LR_EINVAL, "a bias that is no vector");
    s->adapts = o->kind == LR_OP_LINEAR && (!b->g->route || b->g->route[o->in[0]] < 0);
    if (s->adapts && o->w->site >= b->p->n_sites) b->p->n_sites = o->w->site + 1;
    s->w[s->n_w] = o->w;
    s->bias[s->n_w++] = o->bias ? o->bias->data : NULL;
    return 0;
}

/* LINEAR or EXPERTS; `out`: the value that is made of it. */
static cuda_step *product_step(builder *b, const lr_op *o, int out, lr_error *err)
{
    bool experts = o->kind == LR_OP_EXPERTS;
    int router = experts ? b->router[o->in[1]] : -1;
    if (experts && (router < 0 || o->w->n_experts != b->p->steps[router].slots.n_own)) {
        lr_fail(err, LR_EINVAL, "experts without a route");
        return NULL;
    }
    int x = packed(b, o->in[0], o->w->type, experts);
    cuda_step *s = push_step(b, (int)o->kind, out, false);
    s->in[0] = x;
    s->of_rows = experts && b->g->route[o->in[0]] < 0;
    if (experts) {
        s->slots = b->p->steps[router].slots;
        s->in[2] = b->p->steps[router].out[1];
    }
    return add_product(b, s, o, err) ? NULL : s;
}

/* A product, and those behind it that read the same: queries, keys and values. */
static int product(builder *b, int i, lr_error *err)
{
    const lr_op *o = &b->g->ops[i];
    cuda_step *s = product_step(b, o, o->out, err);
    int rc = s ? 0 : err->code;
    for (int j = i + 1; j < b->g->n_ops && s && !rc && s->n_w < LR_CU_JOINT && o->kind == LR_OP_LINEAR; j++) {
        const lr_op *n = &b->g->ops[j];
        if (b->joined[j] || !joins(b, o, n)) continue;
        b->joined[j] = true;
        s->out[s->n_w] = value(b, n->out);
        rc = add_product(b, s, n, err);
    }
    return rc;
}

/* The two products that a GLU alone reads, if they and it are one launch. */
static bool glu_pair(const builder *b, const lr_op *glu, const lr_op **gate, const lr_op **up)
{
    const lr_op *of[2];
    for (int i = 0; i < 2; i++) {
        of[i] = sole_maker(b, glu->in[i], LR_OP_LINEAR);
        if (!of[i]) of[i] = sole_maker(b, glu->in[i], LR_OP_EXPERTS);
    }
    *gate = of[0];
    *up = of[1];
    return of[0] && of[1] && of[0] != of[1] && joins(b, of[0], of[1]) && of[0]->w->n == of[1]->w->n;
}

static void find_pairs(builder *b)
{
    for (int i = 0; i < b->g->n_ops; i++) {
        const lr_op *gate, *up;
        if (b->g->ops[i].kind != LR_OP_GLU || !glu_pair(b, &b->g->ops[i], &gate, &up)) continue;
        b->glued[i] = b->joined[gate - b->g->ops] = b->joined[up - b->g->ops] = true;
    }
}

static int glu_step(builder *b, const lr_op *glu, lr_error *err)
{
    const lr_op *gate, *up;
    glu_pair(b, glu, &gate, &up);
    cuda_step *s = product_step(b, gate, glu->out, err);
    if (!s) return err->code;
    s->glu = true;
    s->act = (int)glu->u.act;
    return add_product(b, s, up, err);
}

lr_cu_product lr_cuda_product(const cuda_step *s)
{
    lr_cu_product p = {.n_weights = s->n_w, .glu = s->glu, .act = s->act, .of_rows = s->of_rows};
    if (s->kind == LR_OP_EXPERTS) p.slots = &s->slots;
    for (int i = 0; i < s->n_w; i++) {
        const lr_weight *w = s->w[i];
        p.w[i] = (lr_cu_weight){.data = w->data, .type = w->type, .n = w->n, .k = w->k, .row_bytes = w->row_bytes};
        p.bias[i] = s->bias[i];
    }
    return p;
}

/* ---- experts ---- */

static int route_step(builder *b, const lr_op *o)
{
    const lr_route *r = &o->u.route;
    cuda_step *s = push_step(b, LR_OP_ROUTE, o->out, false);
    b->router[o->out] = b->p->n_steps - 1;
    s->in[0] = value(b, o->in[0]);
    s->bias[0] = o->bias ? o->bias->data : NULL;
    s->choice = (lr_cu_choice){r->n_experts, r->n_used,   (int)r->gate,     r->normalize,
                               r->scale,     r->n_groups, r->n_groups_used, r->group_best};
    s->slots = (lr_cu_slots){.n_experts = r->n_experts,
                             .n_used = r->n_used,
                             .from = r->n_own ? r->from : 0,
                             .n_own = r->n_own ? r->n_own : r->n_experts};
    s->out[1] = push_piece(b, o->out, -1);
    b->p->pieces[s->out[1]].fixed =
        lr_cu_slots_bytes(r->n_experts, r->n_used, s->narrow ? b->p->max_out : b->p->max_rows);
    return 0;
}

static int mix_step(builder *b, const lr_op *o, lr_error *err)
{
    int router = b->router[o->in[1]];
    if (router < 0 || b->g->route[o->in[0]] != o->in[1]) return lr_fail(err, LR_EINVAL, "experts of two routes");
    cuda_step *s = push_step(b, LR_OP_MIX, o->out, false);
    s->in[0] = value(b, o->in[0]);
    s->in[1] = value(b, o->in[1]);
    s->in[2] = b->p->steps[router].out[1];
    s->slots = b->p->steps[router].slots;
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
    int route = b->g->route ? b->g->route[o->in[0]] : -1;
    int32_t at[LR_CUDA_RANKS + 1];
    if (c->size > LR_CUDA_RANKS)
        return lr_fail(err, LR_EUNSUPPORTED, "the CUDA backend exchanges between %d ranks at most, not %d",
                       LR_CUDA_RANKS, c->size);
    cuda_step *s = push_step(b, LR_OP_GATHER, o->out, false);
    for (int r = 0; r <= c->size; r++) at[r] = s->gather.at[r] = o->u.gather.at[r];
    s->in[0] = value(b, o->in[0]);
    s->gather.comm = c;
    s->gather.at_dev = (const int32_t *)(const void *)keep(b, (const float *)(const void *)at, c->size + 1);
    if (route >= 0) { /* as they lie: each rank's behind the other's */
        s->slots = b->p->steps[b->router[route]].slots;
        s->in[2] = b->p->steps[b->router[route]].out[1];
        b->writer[o->out] = -1;
    }
    if (!c->device || route >= 0) b->p->no_graphs = true; /* how many slots a rank has is asked of the device */
    size_t rows = (size_t)(s->narrow ? b->p->max_out : b->p->max_rows) * (size_t)s->times;
    size_t bytes = rows * (size_t)s->width * sizeof(float);
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
    case LR_OP_EXPERTS:
        return product(b, i, err);
    case LR_OP_ROUTE:
        return route_step(b, o);
    case LR_OP_MIX:
        return mix_step(b, o, err);
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
    case LR_OP_GLU:
        if (b->glued[i]) return glu_step(b, o, err);
        break;
    case LR_OP_MUL:
    case LR_OP_ACT:
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
    s->w[0] = o->w;
    if (o->kind == LR_OP_NORM) s->norm = norm_of(b, o);
    if (o->kind == LR_OP_PART || o->kind == LR_OP_CONCAT || o->kind == LR_OP_SLICE) s->parts = parts_of(b, o);
    if (o->kind == LR_OP_MUL) s->by_row = b->g->width[o->in[1]] != b->g->width[o->out];
    if (o->kind == LR_OP_ROPE) s->rope[0] = rope_of(b, &o->u.rope);
    if (o->kind == LR_OP_ACT || o->kind == LR_OP_GLU) s->act = (int)o->u.act;
    if (o->kind == LR_OP_EMBED_AT) s->scale = 1;
    if (o->kind == LR_OP_EMBED || o->kind == LR_OP_SCALE || o->kind == LR_OP_SOFTCAP) s->scale = o->u.scale;
    return 0;
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
        if (o->kind == LR_OP_KV) floats += (size_t)g->width[o->in[0]] + 4;
        if (o->kind == LR_OP_ATTN) floats += (size_t)o->u.attn.n_heads + 4;
        if (o->kind == LR_OP_GATHER) floats += LR_CUDA_RANKS + 4;
    }
    p->pieces = lr_calloc(nv + 3 * no + 1, sizeof *p->pieces);
    p->steps = lr_calloc(2 * no + 1, sizeof *p->steps);
    b->maker = lr_calloc(nv, sizeof *b->maker);
    b->uses = lr_calloc(nv, sizeof *b->uses);
    b->piece = lr_calloc(nv, sizeof *b->piece);
    b->writer = lr_calloc(nv, sizeof *b->writer);
    b->narrow = lr_calloc(nv, sizeof *b->narrow);
    b->router = lr_calloc(nv, sizeof *b->router);
    b->glued = lr_calloc(no, sizeof *b->glued);
    b->joined = lr_calloc(no, sizeof *b->joined);
    b->folded = lr_calloc(no, sizeof *b->folded);
    b->packs = lr_calloc(no, sizeof *b->packs);
    b->consts = lr_alloc_aligned(floats * sizeof *b->consts);
    if (!p->pieces || !p->steps || !b->maker || !b->uses || !b->piece || !b->writer || !b->narrow || !b->router ||
        !b->glued || !b->joined || !b->folded || !b->packs || !b->consts)
        return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    for (size_t i = 0; i < nv; i++) b->maker[i] = b->piece[i] = b->writer[i] = b->router[i] = -1;
    int rc = lr_cuda_plan_alloc(p, &p->consts, floats * sizeof(float), "constants", err);
    if (p->dry) p->consts = b->consts; /* addresses are counted from it */
    return rc;
}

static void free_builder(builder *b)
{
    lr_free(b->maker);
    lr_free(b->uses);
    lr_free(b->piece);
    lr_free(b->writer);
    lr_free(b->narrow);
    lr_free(b->router);
    lr_free(b->glued);
    lr_free(b->joined);
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
    if (g->features) b->uses[g->features - 1]++;
    if (!b->narrow[g->logits] && !g->partial)
        return lr_fail(err, LR_EINVAL, "the logits are not made behind the last attention");
    find_folds(b);
    find_pairs(b);
    return 0;
}

static int build(builder *b, lr_error *err)
{
    lr_plan *p = b->p;
    int rc = alloc_builder(b, err);
    if (!rc) rc = look_through(b, err);
    for (int i = 0; i < b->g->n_ops && !rc; i++)
        if (!b->folded[i] && !b->joined[i]) rc = convert(b, i, err);
    if (rc) return rc;
    p->logits = value(b, b->g->logits);
    p->hidden = b->g->hidden >= 0 ? value(b, b->g->hidden) : -1;
    p->features = b->g->features ? value(b, b->g->features - 1) : -1;
    p->n_features = b->g->features ? b->g->width[b->g->features - 1] : 0;
    p->partial = b->g->partial;
    p->n_vocab = b->g->width[b->g->logits];
    p->n_hidden = b->g->hidden >= 0 ? b->g->width[b->g->hidden] : 0;
    if (!p->dry) rc = lr_cuda_upload(b->be, p->consts, b->consts, b->n_consts * sizeof(float), err);
    if (!rc) rc = lr_cuda_layout(p, err);
    if (!rc) rc = lr_cuda_meta_open(p, err);
    return rc || p->partial ? rc : lr_cuda_draw_open(p, err);
}

static int make_plan(lr_backend *be, const lr_program *prog, const lr_kv_store *kv, int max_rows, int max_out, bool dry,
                     lr_plan **out, lr_error *err)
{
    if (max_rows < 1 || max_out < 1 || max_rows > 1 << 20)
        return lr_fail(err, LR_EINVAL, "a batch of %d rows, %d with logits", max_rows, max_out);
    lr_plan *p = lr_calloc(1, sizeof *p);
    if (!p) return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    *p = (lr_plan){.be = (cuda_backend *)be,
                   .kv = kv,
                   .dry = dry,
                   .max_rows = max_rows,
                   .max_out = max_out,
                   .hidden = -1,
                   .features = -1,
                   .input = -1,
                   .tile_narrow = max_rows,
                   .tile_wide = max_rows};
    cudaSetDevice(p->be->index);
    builder b = {.p = p, .be = p->be, .g = prog, .kv = kv};
    int rc = (p->drawn = lr_malloc((size_t)max_out)) ? 0 : lr_fail(err, LR_ENOMEM, "no memory for the plan");
    if (!rc) rc = build(&b, err);
    free_builder(&b);
    if (!rc && !dry) {
        cudaError_t e = cudaStreamSynchronize(p->be->stream);
        if (e) rc = lr_cuda_failed(p->be, (int)e, "uploading the model", err);
    }
    if (!dry) p->counted = p->work_bytes + p->scratch_bytes + p->parts_bytes + p->dense_bytes;
    p->be->bytes_work += p->counted;
    if (rc) {
        lr_cuda_plan_free(be, p);
        return rc;
    }
    *out = p;
    return 0;
}

int lr_cuda_compile(lr_backend *be, const lr_program *prog, const lr_kv_store *kv, int max_rows, int max_out,
                    lr_plan **out, lr_error *err)
{
    return make_plan(be, prog, kv, max_rows, max_out, false, out, err);
}

int lr_cuda_plan_alloc(lr_plan *p, void **out, size_t bytes, const char *what, lr_error *err)
{
    p->asked += bytes;
    return p->dry ? 0 : lr_cuda_alloc(p->be, out, bytes, what, err);
}

size_t lr_cuda_work(lr_backend *be, const lr_program *prog, const lr_kv_spec *spec, int max_rows, int max_out)
{
    lr_kv_store *kv = NULL;
    lr_plan *p = NULL;
    lr_error err;
    size_t bytes = 0;
    if (!lr_cuda_kv_shape(spec, &kv, &err) && !make_plan(be, prog, kv, max_rows, max_out, true, &p, &err))
        bytes = p->asked + p->echo_bytes;
    lr_cuda_plan_free(be, p);
    lr_cuda_kv_free(be, kv);
    return bytes;
}

void lr_cuda_plan_free(lr_backend *be, lr_plan *p)
{
    if (!p) return;
    if (p->dry) p->consts = NULL; /* was the host's */
    cudaSetDevice(((cuda_backend *)be)->index);
    cudaStreamSynchronize(p->be->stream);
    lr_cuda_graphs_drop(p);
    lr_cuda_draw_close(p);
    lr_cuda_lora_close(p);
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
