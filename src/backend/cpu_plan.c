/* cpu_plan.c - turns a layer graph into stages with barriers between them, and lays out activation memory.
 *
 * Scheduling is by readiness, not by script order: first every row-local operation that can run (chains count), then
 * every matrix product that can run (so q, k, v or gate, up share a stage whatever order the script made them in), then
 * one attention. A GLU whose gate and up are products of the same stage, and the quantization behind a GLU or an
 * attention, are folded into that stage. Memory: a value lives from its stage to its last reader; buffers whose lives
 * do not meet share memory.
 */
#include "backend/cpu_int.h"
#include "base/mem.h"
#include <assert.h>
#include <math.h>
#include <string.h>

typedef struct builder {
    lr_plan *p;
    const lr_program *prog;
    int *quant_of; /* (n_values of the program, 2) quantized twin, the one of 14 bits, -1 */
    int *ready;    /* (values) stage that made it, -1 = not yet */
    int *kv_ready; /* (layers) */
    int *uses;     /* (values) number of readers */
    int cap_ops;
} builder;

/* ---- from graph operations to plan operations ---- */

static plan_op *push_op(builder *b)
{
    plan_op *o = &b->p->ops[b->p->n_ops++];
    assert(b->p->n_ops <= b->cap_ops);
    memset(o, 0, sizeof *o);
    o->in[0] = o->in[1] = o->out = o->quant = o->stage = o->route = -1;
    return o;
}

static int push_value(builder *b, int width, bool narrow, bool quant, int route)
{
    value_info *v = &b->p->values[b->p->n_values];
    *v = (value_info){.width = width, .narrow = narrow, .quant = quant, .route = route, .def = -1, .last = -1};
    return b->p->n_values++;
}

static int find_rope(builder *b, const lr_rope *r, lr_error *err)
{
    lr_plan *p = b->p;
    int half = r->n_rot / 2;
    double *freq = lr_malloc((size_t)half * sizeof *freq);
    if (!freq) return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    for (int i = 0; i < half; i++)
        freq[i] = (double)r->freq_scale * pow((double)r->base, -2.0 * i / r->n_rot) /
                  (r->factors ? (double)r->factors[i] : 1.0);
    for (int i = 0; i < p->n_ropes; i++)
        if (p->ropes[i].n_rot == r->n_rot && p->ropes[i].attn_scale == r->attn_scale &&
            memcmp(p->ropes[i].freq, freq, (size_t)half * sizeof *freq) == 0) {
            lr_free(freq);
            return i;
        }
    rope_table *t = lr_reallocarray(p->ropes, (size_t)p->n_ropes + 1, sizeof *t);
    float *cs = lr_alloc_aligned((size_t)p->max_rows * (size_t)r->n_rot * sizeof *cs);
    if (t) p->ropes = t;
    if (!t || !cs) {
        lr_free(freq);
        lr_free_aligned(cs);
        return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    }
    t[p->n_ropes] = (rope_table){.n_rot = r->n_rot, .freq = freq, .attn_scale = r->attn_scale, .cs = cs};
    plan_op *o = push_op(b);
    o->kind = OP_ROPE_TABLE;
    o->rope = p->n_ropes;
    return p->n_ropes++;
}

static int copy_sinks(builder *b, const lr_attn *a, const float **out, lr_error *err)
{
    if (!a->sinks) return 0;
    lr_plan *p = b->p;
    float **s = lr_reallocarray(p->sinks, (size_t)p->n_sinks + 1, sizeof *s);
    if (s) p->sinks = s;
    float *f = s ? lr_memdup(a->sinks, (size_t)a->n_heads * sizeof *f) : NULL;
    if (!f) return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    *out = p->sinks[p->n_sinks++] = f;
    return 0;
}

/* Whether w takes rows of 14 bits. */
static bool is_wide(const builder *b, const lr_weight *w) { return b->p->be->fine && lr_pack_super(w->type); }

/* The quantized twin of a value, in the form that w takes; adds the operation that makes it at the first call. */
static int quantized(builder *b, int value, const lr_weight *w)
{
    const bool wide = is_wide(b, w);
    int *twin = &b->quant_of[2 * value + wide];
    if (*twin < 0) {
        const value_info *v = &b->p->values[value];
        *twin = push_value(b, v->width, v->narrow, true, v->route);
        b->p->values[*twin].wide = wide;
        plan_op *o = push_op(b);
        o->kind = OP_QUANT;
        o->in[0] = value;
        o->out = *twin;
    }
    return *twin;
}

/* A route's slots, once LR_OP_ROUTE has been converted. */
static int add_route(builder *b, plan_op *o, const lr_route *t, bool narrow, lr_error *err)
{
    lr_plan *p = b->p;
    int route = lr_cpu_route_new(p, t, narrow, err);
    if (route < 0) return route;
    o->chosen = *t;
    o->route = route;
    int from = o->out;
    plan_op *sort = push_op(b);
    sort->kind = OP_SORT;
    sort->route = route;
    sort->in[0] = from;
    sort->out = push_value(b, 0, narrow, false, -1);
    return 0;
}

/* The op of LR_OP_ROUTE whose output the value is, or of the OP_SORT that reads it; -1 if there is none. */
static int find_route(const lr_plan *p, int value, int kind)
{
    for (int i = 0; i < p->n_ops; i++)
        if (p->ops[i].kind == kind && (kind == OP_SORT ? p->ops[i].in[0] : p->ops[i].out) == value) return i;
    return -1;
}

/* Token rows as slots of a route, quantized as w takes them, or floats for w = NULL; the operation that makes them is
 * added at the first call. */
static int spread(builder *b, int value, int route, int sorted, const lr_weight *w)
{
    lr_plan *p = b->p;
    const bool wide = w && is_wide(b, w);
    int kind = w ? OP_SPREAD_QUANT : OP_SPREAD;
    for (int i = 0; i < p->n_ops; i++)
        if (p->ops[i].kind == kind && p->ops[i].in[0] == value && p->ops[i].route == route &&
            p->values[p->ops[i].out].wide == wide)
            return p->ops[i].out;
    int out = push_value(b, p->values[value].width, p->routes[route].narrow, w != NULL, route);
    p->values[out].wide = wide;
    plan_op *o = push_op(b);
    o->kind = kind;
    o->route = route;
    o->in[0] = value;
    o->in[1] = sorted;
    o->out = out;
    return out;
}

/* LR_OP_EXPERTS and LR_OP_MIX: finds the route, and makes the slots that an EXPERTS reads. */
static int convert_slots(builder *b, const lr_op *s, lr_error *err)
{
    lr_plan *p = b->p;
    int made = find_route(p, s->in[1], LR_OP_ROUTE), sort = find_route(p, s->in[1], OP_SORT);
    if (made < 0 || sort < 0) return lr_fail(err, LR_EINVAL, "experts without a route");
    int route = p->ops[made].route, in[2] = {s->in[0], s->in[1]};
    bool slots = p->values[s->in[0]].route >= 0, packed = s->kind == LR_OP_EXPERTS && s->w->gemm.packed;
    if (slots ? p->values[s->in[0]].route != route : s->kind == LR_OP_MIX)
        return lr_fail(err, LR_EINVAL, "experts of two routes");
    if (s->kind == LR_OP_EXPERTS) {
        int sorted = p->ops[sort].out;
        in[1] = !packed ? -1 : slots ? quantized(b, s->in[0], s->w) : spread(b, s->in[0], route, sorted, s->w);
        if (!slots) in[0] = packed ? -1 : spread(b, s->in[0], route, sorted, NULL);
    }
    plan_op *o = push_op(b);
    o->kind = (int)s->kind;
    o->route = route;
    o->in[0] = in[0];
    o->in[1] = in[1];
    o->out = s->out;
    o->w = s->w;
    o->bias = s->bias;
    p->values[s->out].narrow = p->routes[route].narrow;
    p->values[s->out].route = s->kind == LR_OP_EXPERTS ? route : -1;
    return 0;
}

static int copy_gather(plan_op *o, const lr_op *s, lr_error *err)
{
    o->comm = s->u.gather.comm;
    o->at = lr_memdup(s->u.gather.at, ((size_t)o->comm->size + 1) * sizeof *o->at);
    return o->at ? 0 : lr_fail(err, LR_ENOMEM, "no memory for the plan");
}

static int convert(builder *b, const lr_op *s, lr_error *err)
{
    lr_plan *p = b->p;
    if (s->kind == LR_OP_EXPERTS || s->kind == LR_OP_MIX) return convert_slots(b, s, err);
    int slots = s->in[0] >= 0 ? p->values[s->in[0]].route : -1;
    bool narrow = s->kind == LR_OP_ROWS;
    for (int j = 0; j < 2; j++)
        if (s->in[j] >= 0 && p->values[s->in[j]].narrow) narrow = true;
    int quant = s->kind == LR_OP_LINEAR && s->w->gemm.packed ? quantized(b, s->in[0], s->w) : -1, rope = 0;
    const float *sinks = NULL;
    if (s->kind == LR_OP_ROPE && (rope = find_rope(b, &s->u.rope, err)) < 0) return rope;
    if (s->kind == LR_OP_ATTN && copy_sinks(b, &s->u.attn, &sinks, err)) return err->code;
    if (narrow && (s->kind == LR_OP_ROPE || s->kind == LR_OP_KV || s->kind == LR_OP_ATTN))
        return lr_fail(err, LR_EINVAL, "the graph attends to rows that were left out");
    plan_op *o = push_op(b);
    o->kind = (int)s->kind;
    o->in[0] = s->in[0];
    o->in[1] = s->kind == LR_OP_LINEAR ? quant : s->in[1];
    o->out = s->out;
    o->w = s->w;
    o->bias = s->bias;
    if (s->out >= 0) {
        p->values[s->out].narrow = narrow;
        p->values[s->out].route = slots;
    }
    switch (s->kind) {
    case LR_OP_ROUTE:
        return add_route(b, o, &s->u.route, narrow, err);
    case LR_OP_NORM:
        o->eps = s->u.norm.eps;
        o->group = s->u.norm.group;
        o->layer_norm = s->u.norm.layer_norm;
        break;
    case LR_OP_ROPE:
        o->rope = rope;
        o->n_heads = s->u.rope.n_heads;
        o->head_dim = s->u.rope.head_dim;
        o->layer_norm = s->u.rope.interleaved;
        break;
    case LR_OP_KV:
    case LR_OP_ATTN:
        o->layer = s->u.attn.layer;
        o->n_heads = s->u.attn.n_heads;
        o->n_kv_heads = s->u.attn.n_kv_heads;
        o->head_dim = s->u.attn.head_dim;
        o->scale = s->u.attn.scale;
        o->softcap = s->u.attn.softcap;
        o->window = s->u.attn.window;
        o->sinks = sinks;
        break;
    case LR_OP_PART:
    case LR_OP_CONCAT:
        o->n_heads = s->u.part.n_heads;
        o->first = s->u.part.first;
        o->n_part = s->u.part.n;
        o->layer_norm = s->u.part.shared;
        break;
    case LR_OP_ACT:
    case LR_OP_GLU:
        o->act = (int)s->u.act;
        break;
    case LR_OP_EMBED:
    case LR_OP_SCALE:
    case LR_OP_SOFTCAP:
        o->scale = s->u.scale;
        break;
    case LR_OP_SLICE:
        o->first = s->u.first;
        break;
    case LR_OP_GATHER:
        o->route = slots;
        return copy_gather(o, s, err);
    default:
        break;
    }
    return 0;
}

/* ---- scheduling ---- */

static bool is_product(const plan_op *o) { return o->kind == LR_OP_LINEAR || o->kind == LR_OP_EXPERTS; }

static bool is_row_op(const plan_op *o)
{
    return !is_product(o) && o->kind != LR_OP_ATTN && o->kind != OP_SORT && o->kind != LR_OP_GATHER;
}

/* Reads other rows than it writes: what it reads is to be there altogether. */
static bool crosses_rows(const plan_op *o)
{
    return o->kind == LR_OP_ROWS || o->kind == LR_OP_MIX || o->kind == OP_SPREAD || o->kind == OP_SPREAD_QUANT;
}

static bool op_narrow(const builder *b, const plan_op *o) { return o->out >= 0 && b->p->values[o->out].narrow; }

static int op_route(const builder *b, const plan_op *o) { return o->out >= 0 ? b->p->values[o->out].route : -1; }

/* Every input was made before stage `now`, or in it if `chain`. */
static bool inputs_ready(const builder *b, const plan_op *o, int now, bool chain)
{
    for (int j = 0; j < 2; j++) {
        if (o->in[j] < 0) continue;
        int r = b->ready[o->in[j]];
        if (r < 0 || (r == now && !chain)) return false;
    }
    if (o->kind == LR_OP_ATTN) {
        int r = b->kv_ready[o->layer];
        return r >= 0 && r < now;
    }
    return true;
}

static void mark(builder *b, plan_op *o, int now)
{
    o->stage = now;
    if (o->out >= 0) b->ready[o->out] = now;
    if (o->kind == LR_OP_KV) b->kv_ready[o->layer] = now;
}

static stage *new_stage(builder *b, stage_kind kind, bool narrow, int first)
{
    stage *s = &b->p->stages[b->p->n_stages++];
    *s = (stage){kind, narrow, -1, first, 0};
    return s;
}

static bool schedule_rows(builder *b, bool narrow, int route)
{
    lr_plan *p = b->p;
    int now = p->n_stages, first = p->n_order;
    for (bool more = true; more;) {
        more = false;
        for (int i = 0; i < p->n_ops; i++) {
            plan_op *o = &p->ops[i];
            if (o->stage >= 0 || !is_row_op(o) || op_narrow(b, o) != narrow || op_route(b, o) != route) continue;
            if (!inputs_ready(b, o, now, !crosses_rows(o))) continue;
            p->order[p->n_order++] = i;
            mark(b, o, now);
            more = true;
        }
    }
    if (p->n_order == first) return false;
    stage *s = new_stage(b, STAGE_ROWS, narrow, first);
    s->route = route;
    s->n = p->n_order - first;
    return true;
}

/* Of the slots of whatever route comes first. */
static bool schedule_slots(builder *b)
{
    for (int i = 0; i < b->p->n_ops; i++) {
        const plan_op *o = &b->p->ops[i];
        if (o->stage < 0 && is_row_op(o) && op_route(b, o) >= 0 && inputs_ready(b, o, b->p->n_stages, !crosses_rows(o)))
            return schedule_rows(b, op_narrow(b, o), op_route(b, o));
    }
    return false;
}

static bool schedule_sort(builder *b)
{
    lr_plan *p = b->p;
    int now = p->n_stages;
    for (int i = 0; i < p->n_ops; i++) {
        plan_op *o = &p->ops[i];
        if (o->stage >= 0 || o->kind != OP_SORT || !inputs_ready(b, o, now, false)) continue;
        p->order[p->n_order++] = i;
        mark(b, o, now);
        new_stage(b, STAGE_SORT, p->routes[o->route].narrow, p->n_order - 1)->n = 1;
        return true;
    }
    return false;
}

static plan_op *pending_quant(builder *b, int value)
{
    for (int i = 0; i < b->p->n_ops; i++) {
        plan_op *o = &b->p->ops[i];
        if (o->kind == OP_QUANT && o->in[0] == value && o->stage < 0) return o;
    }
    return NULL;
}

static gemm_item *item_of(builder *b, int first, int value)
{
    for (int i = first; i < b->p->n_items; i++)
        if (b->p->items[i].b < 0 && b->p->ops[b->p->items[i].a].out == value) return &b->p->items[i];
    return NULL;
}

static void absorb_glu(builder *b, int first, int now)
{
    lr_plan *p = b->p;
    for (int i = 0; i < p->n_ops; i++) {
        plan_op *o = &p->ops[i];
        if (o->kind != LR_OP_GLU || o->stage >= 0 || o->in[0] == o->in[1]) continue;
        gemm_item *x = item_of(b, first, o->in[0]), *y = item_of(b, first, o->in[1]);
        if (!x || !y || b->uses[o->in[0]] != 1 || b->uses[o->in[1]] != 1) continue;
        x->b = y->a;
        x->glu = i;
        *y = p->items[--p->n_items];
        mark(b, o, now);
        plan_op *q = pending_quant(b, o->out);
        if (!q) continue;
        o->quant = q->out;
        mark(b, q, now);
    }
}

static bool schedule_gemm(builder *b, bool narrow)
{
    lr_plan *p = b->p;
    int now = p->n_stages, first = p->n_items;
    for (int i = 0; i < p->n_ops; i++) {
        plan_op *o = &p->ops[i];
        if (o->stage >= 0 || !is_product(o) || op_narrow(b, o) != narrow || !inputs_ready(b, o, now, false)) continue;
        o->lora = p->n_items - first;
        p->items[p->n_items++] = (gemm_item){i, -1, -1, 0};
        mark(b, o, now);
    }
    if (p->n_items == first) return false;
    absorb_glu(b, first, now);
    new_stage(b, STAGE_GEMM, narrow, first)->n = p->n_items - first;
    return true;
}

static bool schedule_attn(builder *b)
{
    lr_plan *p = b->p;
    int now = p->n_stages;
    for (int i = 0; i < p->n_ops; i++) {
        plan_op *o = &p->ops[i];
        if (o->stage >= 0 || o->kind != LR_OP_ATTN || !inputs_ready(b, o, now, false)) continue;
        mark(b, o, now);
        plan_op *q = pending_quant(b, o->out);
        if (q && o->n_heads / o->n_kv_heads * o->head_dim % (p->values[q->out].wide ? LR_WIDE : LR_QBLK) == 0) {
            o->quant = q->out;
            mark(b, q, now);
        }
        p->order[p->n_order++] = i;
        new_stage(b, STAGE_ATTN, false, p->n_order - 1)->n = 1;
        return true;
    }
    return false;
}

/* One exchange, the first that can be: the order is that of the graph, so it is the same on all ranks. */
static bool schedule_comm(builder *b)
{
    lr_plan *p = b->p;
    int now = p->n_stages;
    for (int i = 0; i < p->n_ops; i++) {
        plan_op *o = &p->ops[i];
        if (o->stage >= 0 || o->kind != LR_OP_GATHER || !inputs_ready(b, o, now, false)) continue;
        mark(b, o, now);
        p->order[p->n_order++] = i;
        new_stage(b, STAGE_COMM, op_narrow(b, o), p->n_order - 1)->n = 1;
        return true;
    }
    return false;
}

static int schedule(builder *b, lr_error *err)
{
    for (;;) {
        if (schedule_rows(b, false, -1) || schedule_rows(b, true, -1) || schedule_sort(b) || schedule_slots(b) ||
            schedule_gemm(b, false) || schedule_attn(b) || schedule_gemm(b, true) || schedule_comm(b))
            continue;
        break;
    }
    for (int i = 0; i < b->p->n_ops; i++)
        if (b->p->ops[i].stage < 0)
            return lr_fail(err, LR_EINVAL, "the layer graph has an operation that can never run (%d)", i);
    return 0;
}

/* ---- memory ---- */

static void touch(lr_plan *p, int value, int at)
{
    if (value < 0) return;
    value_info *v = &p->values[value];
    if (v->def < 0 || at < v->def) v->def = at;
    if (at > v->last) v->last = at;
}

static size_t value_rows(const lr_plan *p, const value_info *v)
{
    return (size_t)(v->narrow ? p->max_out : p->max_rows) * (size_t)(v->route < 0 ? 1 : p->routes[v->route].n_used);
}

/* The form of a value's quantized rows. */
static lr_qact quant_form(const lr_plan *p, const value_info *v)
{
    return (lr_qact){.k = v->width, .fine = p->be->fine && !v->wide, .wide = v->wide};
}

static size_t value_bytes(const lr_plan *p, const value_info *v)
{
    size_t rows = value_rows(p, v), w = (size_t)v->width;
    if (!v->quant) return (rows * w * sizeof(float) + 63) & ~(size_t)63;
    if (p->be->bf16) return (rows * w * sizeof(uint16_t) + 63) & ~(size_t)63;
    lr_qact form = quant_form(p, v);
    return lr_qact_place(&form, NULL, rows);
}

/* Whether an operation works value by value, so that its output may take the place of an input. */
static bool works_in_place(const plan_op *o)
{
    switch (o->kind) {
    case LR_OP_GLU:
    case LR_OP_ADD:
    case LR_OP_MUL:
    case LR_OP_ACT:
    case LR_OP_SCALE:
    case LR_OP_SOFTCAP:
    case LR_OP_NORM:
    case LR_OP_ROPE:
        return true;
    default:
        return false;
    }
}

/* The input whose place an output takes, as nobody else reads it, so that what is written is in the caches; or -1. */
static int place_of_input(const builder *b, const plan_op *o)
{
    const lr_plan *p = b->p;
    const value_info *out = &p->values[o->out];
    for (int i = 0; works_in_place(o) && o->out != p->logits && i < 2; i++) {
        if (o->in[i] < 0 || b->uses[o->in[i]] != 1) continue;
        const value_info *in = &p->values[o->in[i]];
        if (in->width == out->width && in->narrow == out->narrow && in->route == out->route) return o->in[i];
    }
    return -1;
}

/* The value whose memory a value lies in. */
static int holder_of(const lr_plan *p, int i)
{
    while (p->values[i].in_place >= 0) i = p->values[i].in_place;
    return i;
}

/* First fit: the lowest offset that is free of every earlier value whose life meets this one's. */
static void place(lr_plan *p, int i)
{
    value_info *v = &p->values[i];
    v->offset = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (int j = 0; j < i; j++) {
            const value_info *u = &p->values[j];
            if (!u->bytes || u->def > v->last || u->last < v->def) continue;
            if (u->offset < v->offset + v->bytes && v->offset < u->offset + u->bytes) {
                v->offset = u->offset + u->bytes;
                moved = true;
            }
        }
    }
    if (v->offset + v->bytes > p->work_bytes) p->work_bytes = v->offset + v->bytes;
}

static void point(lr_plan *p, int i)
{
    const value_info *v = &p->values[holder_of(p, i)];
    if (i == p->logits) return;
    char *at = p->work + v->offset;
    p->ptr[i] = (float *)(void *)at;
    if (!v->quant) return;
    if (p->be->bf16) {
        p->q[i] = (lr_qact){.k = v->width, .h = (uint16_t *)(void *)at};
        return;
    }
    p->q[i] = quant_form(p, v);
    (void)lr_qact_place(&p->q[i], at, value_rows(p, v));
}

static int layout(const builder *b, lr_error *err)
{
    lr_plan *p = b->p;
    for (int i = 0; i < p->n_ops; i++) {
        const plan_op *o = &p->ops[i];
        touch(p, o->in[0], o->stage);
        touch(p, o->in[1], o->stage);
        touch(p, o->out, o->stage);
    }
    if (p->hidden >= 0) p->values[p->hidden].last = p->n_stages;
    if (p->features >= 0) p->values[p->features].last = p->n_stages;
    for (int i = 0; i < p->n_values; i++) p->values[i].in_place = -1;
    for (int i = 0; i < p->n_ops; i++)
        if (p->ops[i].out >= 0) p->values[p->ops[i].out].in_place = place_of_input(b, &p->ops[i]);
    for (int i = 0; i < p->n_values; i++) {
        value_info *v = &p->values[holder_of(p, i)];
        if (v->last < p->values[i].last) v->last = p->values[i].last;
    }
    for (int i = 0; i < p->n_values; i++) {
        value_info *v = &p->values[i];
        v->bytes = v->def < 0 || i == p->logits || v->in_place >= 0 ? 0 : value_bytes(p, v);
        if (v->bytes) place(p, i);
    }
    p->work = lr_alloc_aligned(p->work_bytes);
    if (!p->work)
        return lr_fail(err, LR_ENOMEM, "no memory for activations (%zu MiB for %d rows)", p->work_bytes >> 20,
                       p->max_rows);
    for (int i = 0; i < p->n_values; i++) point(p, i);
    return 0;
}

static int alloc_exchange(lr_plan *p, const plan_op *o, lr_error *err)
{
    const value_info *v = &p->values[o->out];
    size_t want = (size_t)(v->narrow ? p->max_out : p->max_rows) * (size_t)v->width;
    if (want <= p->exchange_cap) return 0;
    lr_free_aligned(p->exchange);
    p->exchange = lr_alloc_aligned(want * sizeof *p->exchange);
    p->exchange_cap = p->exchange ? want : 0;
    if (!p->exchange_bytes) p->exchange_bytes = lr_calloc((size_t)o->comm->size, sizeof *p->exchange_bytes);
    if (!p->exchange || !p->exchange_bytes)
        return lr_fail(err, LR_ENOMEM, "no memory to exchange rows with other ranks");
    return 0;
}

static int alloc_run_state(lr_plan *p, lr_error *err)
{
    size_t rows = (size_t)p->max_rows;
    int group = 1, dim = 1;
    for (int i = 0; i < p->n_ops; i++) {
        const plan_op *o = &p->ops[i];
        int rc = o->kind == LR_OP_GATHER ? alloc_exchange(p, o, err) : 0;
        if (rc) return rc;
        if (o->kind != LR_OP_ATTN) continue;
        if (o->n_heads / o->n_kv_heads > group) group = o->n_heads / o->n_kv_heads;
        if (o->head_dim > dim) dim = o->head_dim;
    }
    p->scratch_bytes = (lr_cpu_attn_scratch(group, dim, LR_ATTN_ROWS) + 63) & ~(size_t)63;
    p->scratch = lr_alloc_aligned(p->scratch_bytes * (size_t)lr_pool_threads(p->be->pool));
    p->parts = lr_alloc_aligned(ATTN_PARTS * sizeof *p->parts);
    p->shares = lr_alloc_aligned((size_t)lr_pool_threads(p->be->pool) * sizeof *p->shares);
    size_t blocks = 0;
    for (int i = 0; i < p->n_items; i++) {
        p->items[i].first_block = (int)blocks;
        if (p->items[i].glu >= 0) blocks += (size_t)p->values[p->ops[p->items[i].glu].out].width / LR_WIDE;
    }
    p->glu_done = lr_calloc(blocks, sizeof *p->glu_done);
    p->row_pos = lr_calloc(rows, sizeof *p->row_pos);
    p->row_seq = lr_calloc(rows, sizeof *p->row_seq);
    p->row_echo = lr_calloc(rows, sizeof *p->row_echo);
    p->tiles = lr_calloc(rows, sizeof *p->tiles);
    p->gangs = lr_calloc(rows, sizeof *p->gangs);
    size_t products = 0; /* of a stage, at most */
    for (int i = 0; i < p->n_ops; i++)
        if (is_product(&p->ops[i]) && (size_t)p->ops[i].lora >= products) products = (size_t)p->ops[i].lora + 1;
    p->lora = lr_calloc(products * rows * LR_LORA_RANK_MAX, sizeof *p->lora); /* pages come with their use */
    if (!p->scratch || !p->parts || !p->shares || !p->glu_done || !p->row_pos || !p->row_seq || !p->row_echo ||
        !p->tiles || !p->gangs || !p->lora)
        return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    return 0;
}

/* ---- entry points ---- */

static int alloc_plan(builder *b, lr_error *err)
{
    lr_plan *p = b->p;
    const lr_program *g = b->prog;
    /* at most: every op, a quantization and a rope table for each */
    b->cap_ops = 3 * g->n_ops + 1;
    size_t nv = (size_t)g->n_values + (size_t)g->n_ops, no = (size_t)b->cap_ops;
    p->values = lr_calloc(nv, sizeof *p->values);
    p->ptr = lr_calloc(nv, sizeof *p->ptr);
    p->q = lr_calloc(nv, sizeof *p->q);
    p->ops = lr_calloc(no, sizeof *p->ops);
    p->order = lr_calloc(no, sizeof *p->order);
    p->items = lr_calloc(no, sizeof *p->items);
    p->stages = lr_calloc(no + 1, sizeof *p->stages);
    b->quant_of = lr_calloc(2 * nv, sizeof *b->quant_of);
    b->ready = lr_calloc(nv, sizeof *b->ready);
    b->uses = lr_calloc(nv, sizeof *b->uses);
    b->kv_ready = lr_calloc((size_t)g->n_ops, sizeof *b->kv_ready);
    if (!p->values || !p->ptr || !p->q || !p->ops || !p->order || !p->items || !p->stages || !b->quant_of ||
        !b->ready || !b->uses || !b->kv_ready)
        return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    for (size_t i = 0; i < nv; i++) b->quant_of[2 * i] = b->quant_of[2 * i + 1] = b->ready[i] = -1;
    for (int i = 0; i < g->n_ops; i++) b->kv_ready[i] = -1;
    for (int i = 0; i < g->n_values; i++) push_value(b, g->width[i], false, false, -1);
    return 0;
}

/* How far layers of each block group look back, and their heads. */
static void see_layers(lr_plan *p, const lr_kv_store *kv)
{
    bool all[LR_KV_GROUPS] = {false};
    for (int i = 0; i < p->n_ops; i++) {
        const plan_op *o = &p->ops[i];
        if (o->kind != LR_OP_ATTN) continue;
        int g = kv->layers[o->layer].group;
        if (p->kv_heads == 0 || o->n_kv_heads < p->kv_heads) p->kv_heads = o->n_kv_heads;
        all[g] = all[g] || o->window == 0;
        if (o->window > p->window[g]) p->window[g] = o->window;
    }
    for (int g = 0; g < LR_KV_GROUPS; g++)
        if (all[g]) p->window[g] = 0;
}

int lr_cpu_compile(lr_backend *be, const lr_program *prog, const lr_kv_store *kv, int max_rows, int max_out,
                   lr_plan **out, lr_error *err)
{
    if (max_rows < 1 || max_out < 1 || max_rows > 1 << 20)
        return lr_fail(err, LR_EINVAL, "a batch of %d rows, %d with logits", max_rows, max_out);
    lr_plan *p = lr_calloc(1, sizeof *p);
    if (!p) return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    p->be = (cpu_backend *)be;
    p->max_rows = max_rows;
    p->max_out = max_out;
    p->logits = prog->logits;
    p->hidden = prog->hidden;
    p->features = prog->features - 1;
    builder b = {.p = p, .prog = prog};
    int rc = alloc_plan(&b, err);
    for (int i = 0; i < prog->n_ops && !rc; i++) rc = convert(&b, &prog->ops[i], err);
    if (!rc) rc = lr_cpu_centers(p, err);
    for (int i = 0; i < p->n_ops && !rc; i++)
        for (int j = 0; j < 2; j++)
            if (p->ops[i].in[j] >= 0) b.uses[p->ops[i].in[j]]++;
    if (!rc && !p->values[p->logits].narrow && !prog->partial)
        rc = lr_fail(err, LR_EINVAL, "the logits are not made behind the last attention");
    if (!rc) {
        b.uses[p->logits]++;
        if (p->hidden >= 0) b.uses[p->hidden]++;
        if (p->features >= 0) b.uses[p->features]++;
        rc = schedule(&b, err);
    }
    if (!rc) rc = layout(&b, err);
    if (!rc) rc = alloc_run_state(p, err);
    if (!rc) see_layers(p, kv);
    lr_free(b.quant_of);
    lr_free(b.ready);
    lr_free(b.uses);
    lr_free(b.kv_ready);
    p->be->bytes_work += p->work_bytes;
    if (rc) {
        lr_cpu_plan_free(be, p);
        return rc;
    }
    *out = p;
    return 0;
}

bool lr_cpu_plan_peaks(const lr_plan *p)
{
    for (int i = 0; i < p->n_ops; i++)
        if (p->ops[i].kind == LR_OP_LINEAR && p->ops[i].out == p->logits) return true;
    return false;
}

void lr_cpu_plan_free(lr_backend *be, lr_plan *p)
{
    (void)be;
    if (!p) return;
    p->be->bytes_work -= p->work_bytes;
    for (int i = 0; i < p->n_ropes; i++) {
        lr_free(p->ropes[i].freq);
        lr_free_aligned(p->ropes[i].cs);
    }
    for (int i = 0; i < p->n_sinks; i++) lr_free(p->sinks[i]);
    for (int i = 0; i < p->n_ops; i++) {
        lr_free(p->ops[i].center);
        lr_free(p->ops[i].at);
    }
    lr_cpu_routes_free(p);
    lr_free(p->ropes);
    lr_free(p->sinks);
    lr_free(p->values);
    lr_free(p->ptr);
    lr_free(p->q);
    lr_free(p->ops);
    lr_free(p->order);
    lr_free(p->items);
    lr_free(p->stages);
    lr_free(p->row_pos);
    lr_free(p->row_seq);
    lr_free(p->row_echo);
    lr_free(p->tiles);
    lr_free(p->gangs);
    lr_free(p->lora);
    lr_free_aligned(p->work);
    lr_free_aligned(p->scratch);
    lr_free_aligned(p->parts);
    lr_free_aligned(p->shares);
    lr_free(p->glu_done);
    lr_free_aligned(p->exchange);
    lr_free(p->exchange_bytes);
    lr_free(p);
}
