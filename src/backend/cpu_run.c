/* cpu_run.c - runs a compiled plan on a batch: one parallel region for the whole forward pass.
 *
 * Each stage is a phase of the pool's tasks, or two. What a task computes for a row depends on the row alone; which
 * thread takes it, and how rows and columns are cut, does not reach the result.
 */
#include "backend/cpu_int.h"
#include "base/mem.h"
#include <assert.h>
#include <math.h>
#include <string.h>

typedef struct run_ctx {
    lr_plan *p;
    const lr_kv_store *kv;
    const lr_batch *b;
    int n_threads;
    int failed; /* of an exchange */
    lr_error *err;
    bool lora; /* a sequence has an adapter */
    /* the phase at hand */
    int stage;
    bool second; /* of the stage's two */
    int rows, strips, pieces;
    bool shared; /* its units are shared out to the threads: lr_plan.shares */
    int ticked;  /* thread 0's: the stage of the last tick */
} run_ctx;

static int rows_of(const run_ctx *c, bool narrow, int route)
{
    int rows = narrow ? c->b->n_out : c->b->n_rows;
    return route < 0 || rows == 0 ? rows : c->p->routes[route].n_slots;
}

static int min_int(int a, int b) { return a < b ? a : b; }

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
        int at_row = min_int(p->row_pos[r], o->w->n - 1);
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
    int step = rows_per_task(c, rows), r1 = min_int((task + 1) * step, rows);
    for (int r = task * step; r < r1; r++)
        for (int i = 0; i < s->n; i++) row_op(c, &c->p->ops[c->p->order[s->first + i]], r);
}

/* ---- GEMM ---- */

enum { M_BLOCK_BYTES = 512 << 10 };

/* Rows a task takes: so many that their quantized values stay in the second-level cache. */
static int gemm_m_block(int rows, int k)
{
    int m = M_BLOCK_BYTES / (k > 0 ? k : 1) & ~15;
    if (m < 64) m = 64;
    if (m > 512) m = 512;
    return min_int(rows, m);
}

/* Whether a stage quantizes outputs of GLUs to blocks of LR_WIDE. */
static bool glu_is_wide(const lr_plan *p, const stage *s)
{
    for (int i = 0; i < s->n; i++) {
        const int glu = p->items[s->first + i].glu, q = glu < 0 ? -1 : p->ops[glu].quant;
        if (q >= 0 && p->values[q].wide) return true;
    }
    return false;
}

/* Whether a product makes logits whose peaks are wanted. */
static bool has_peaks(const run_ctx *c, const plan_op *o) { return c->b->peaks && o->out == c->p->logits; }

/* The same of any product of a stage. */
static bool stage_has_peaks(const run_ctx *c, const stage *s)
{
    for (int i = 0; i < s->n; i++)
        if (has_peaks(c, &c->p->ops[c->p->items[s->first + i].a])) return true;
    return false;
}

/* Strips a task takes: so many that a task's columns are whole quantization blocks, or pieces with a peak. */
static int gemm_strips(const run_ctx *c, const stage *s, int rows)
{
    int total = 0;
    for (int i = 0; i < s->n; i++) {
        const plan_op *o = &c->p->ops[c->p->items[s->first + i].a];
        total += (o->w->n + LR_STRIP - 1) / LR_STRIP * (o->route < 0 ? 1 : c->p->routes[o->route].n_pieces);
    }
    const int least = stage_has_peaks(c, s) ? LR_PIECE / LR_STRIP : 2;
    const int step = glu_is_wide(c->p, s) ? LR_WIDE / LR_STRIP : least, most = rows > 8 ? 8 : 64;
    int n = total / (c->n_threads * 6);
    n = ((n > most ? most : n) + step / 2) / step * step;
    return n < step ? step : n;
}

static int item_tasks(const lr_plan *p, const gemm_item *it, int strips, int rows)
{
    const plan_op *o = &p->ops[it->a];
    const lr_weight *w = o->w;
    int n = (w->n + LR_STRIP - 1) / LR_STRIP, mb = gemm_m_block(rows, w->k);
    if (o->route >= 0) return (n + strips - 1) / strips * p->routes[o->route].n_pieces;
    return (n + strips - 1) / strips * ((rows + mb - 1) / mb);
}

/* Where a thread's reading goes on: strips of a weight. */
typedef struct place {
    const lr_weight *w;
    int strip, end;
} place;

/* The adapter of a row of a stage. */
static const lr_lora *lora_of(const run_ctx *c, bool narrow, int r)
{
    return c->b->seqs[c->p->row_seq[narrow ? c->b->out_rows[r] : r]].lora;
}

/* Before the products of a stage: a row with an adapter through the first factors. */
static void lora_task(const run_ctx *c, const stage *s, int r)
{
    const lr_lora *l = lora_of(c, s->narrow, r);
    for (int i = 0; l && i < s->n; i++) {
        const gemm_item *it = &c->p->items[s->first + i];
        lr_cpu_lora_down(c->p, &c->p->ops[it->a], l, r);
        if (it->b >= 0) lr_cpu_lora_down(c->p, &c->p->ops[it->b], l, r);
    }
}

/* The peaks of columns j0..j1-1, which begin with a piece, of row r of the logits, that are in the caches still. */
static void find_peaks(const run_ctx *c, int r, const float *y, int j0, int j1)
{
    const int n = c->p->values[c->p->logits].width;
    float *peak = c->b->peaks + (size_t)r * (size_t)lr_pieces(n) + j0 / LR_PIECE;
    for (int j = j0; j < j1; j += LR_PIECE) *peak++ = c->p->be->k->max(y + j, min_int(LR_PIECE, j1 - j));
}

/* mat: which of the weight's matrices; then: what will be read next, or NULL. */
static void product(const run_ctx *c, bool narrow, const plan_op *o, int mat, int r0, int m, int s0, int s1,
                    const place *then)
{
    const lr_plan *p = c->p;
    const lr_weight *w = o->w;
    size_t ldy = (size_t)w->n, k = (size_t)w->k;
    float *y = p->ptr[o->out] + (size_t)r0 * ldy;
    const float *x = o->in[0] < 0 ? NULL : p->ptr[o->in[0]] + (size_t)r0 * k;
    size_t behind = (size_t)mat * ldy; /* rows of other matrices before this one's */
    int j0 = s0 * LR_STRIP, j1 = min_int(s1 * LR_STRIP, w->n);
    if (p->be->exact) {
        lr_gemm_f32_ref(w->type, w->rows + behind * w->row_bytes, w->row_bytes, w->k, x, k, m, y, ldy, j0, j1);
    } else {
        lr_qact qa = {0};
        if (o->in[1] >= 0) qa = lr_qact_at(p->q[o->in[1]], (size_t)r0 * k);
        lr_gemm_w gw = w->gemm;
        gw.data = (const char *)gw.data + (gw.packed ? (size_t)mat * w->mat_bytes : behind * w->row_bytes);
        if (then && then->w->packed) {
            gw.then = &then->w->gemm;
            gw.then_strip = then->strip;
            gw.then_end = then->end;
        }
        p->be->k->gemm(&gw, &qa, x, k, m, y, ldy, s0, s1);
    }
    for (int r = 0; c->lora && o->route < 0 && r < m; r++)
        lr_cpu_lora_up(p, o, lora_of(c, narrow, r0 + r), r0 + r, y + (size_t)r * ldy, j0, j1);
    for (int r = 0; o->bias && r < m; r++)
        p->be->k->add(y + (size_t)r * ldy + j0, o->bias->vec + behind + j0, y + (size_t)r * ldy + j0, j1 - j0);
    for (int r = 0; has_peaks(c, o) && r < m; r++) find_peaks(c, r0 + r, y + (size_t)r * ldy, j0, j1);
}

/* Whether only some logits of a product are wanted. */
static bool is_listed(const run_ctx *c, const plan_op *o) { return c->b->shortlist && o->out == c->p->logits; }

_Static_assert(LR_LISTED % LR_STRIP == 0, "a strip is wanted as a whole");

static bool strip_listed(const run_ctx *c, int strip)
{
    const unsigned i = (unsigned)strip * LR_STRIP / LR_LISTED;
    return c->b->shortlist[i / 32] >> i % 32 & 1;
}

/* As product, of those of strips s0..s1-1 whose logits are wanted; the others get -inf. */
static void listed_product(const run_ctx *c, bool narrow, const plan_op *o, int r0, int m, int s0, int s1,
                           const place *then)
{
    const size_t ldy = (size_t)o->w->n;
    float *y = c->p->ptr[o->out] + (size_t)r0 * ldy;
    for (int from = s0, to; from < s1; from = to) {
        const bool wanted = strip_listed(c, from);
        for (to = from + 1; to < s1 && strip_listed(c, to) == wanted;) to++;
        if (wanted) {
            product(c, narrow, o, 0, r0, m, from, to, to < s1 ? NULL : then);
            continue;
        }
        const int j0 = from * LR_STRIP, j1 = min_int(to * LR_STRIP, o->w->n);
        for (int r = 0; r < m; r++)
            for (int j = j0; j < j1; j++) y[(size_t)r * ldy + (size_t)j] = -INFINITY;
    }
}

/* Where task `task` of a stage is; the item of it is the result. */
typedef struct gemm_place {
    int mat, row, m, strip; /* matrix, first row, rows, first strip */
} gemm_place;

static const gemm_item *find_task(const lr_plan *p, const stage *s, int task, int rows, int strips, gemm_place *out)
{
    const gemm_item *it = &p->items[s->first];
    for (int n; task >= (n = item_tasks(p, it, strips, rows)); it++) task -= n;
    const plan_op *a = &p->ops[it->a];
    int mb = gemm_m_block(rows, a->w->k), n_mb = (rows + mb - 1) / mb;
    if (a->route < 0) {
        int row = task % n_mb * mb;
        *out = (gemm_place){0, row, min_int(mb, rows - row), task / n_mb * strips};
        return it;
    }
    int cols = ((a->w->n + LR_STRIP - 1) / LR_STRIP + strips - 1) / strips;
    const moe_piece *piece = &p->routes[a->route].pieces[task / cols];
    *out = (gemm_place){piece->expert, piece->first, piece->n, task % cols * strips};
    return it;
}

static void gemm_task(const run_ctx *c, const stage *s, int task, int rows, int strips)
{
    const lr_plan *p = c->p;
    gemm_place at;
    const gemm_item *it = find_task(p, s, task, rows, strips, &at);
    const plan_op *a = &p->ops[it->a];
    const int n_strips = (a->w->n + LR_STRIP - 1) / LR_STRIP, s0 = at.strip, r0 = at.row, m = at.m, mat = at.mat;
    int s1 = min_int(s0 + strips, n_strips);
    if (is_listed(c, a)) {
        listed_product(c, s->narrow, a, r0, m, s0, s1, NULL);
        return;
    }
    product(c, s->narrow, a, mat, r0, m, s0, s1, NULL);
    if (it->b < 0) return;
    product(c, s->narrow, &p->ops[it->b], mat, r0, m, s0, s1, NULL);
    const plan_op *g = &p->ops[it->glu];
    int n = a->w->n, j0 = s0 * LR_STRIP, j1 = min_int(s1 * LR_STRIP, n);
    float *y = p->ptr[g->out];
    for (int r = r0; r < r0 + m; r++) {
        const size_t x = (size_t)r * (size_t)n + (size_t)j0;
        p->be->k->glu(g->act, p->ptr[g->in[0]] + x, p->ptr[g->in[1]] + x, y + x, j1 - j0);
    }
    if (g->quant < 0) return;
    const size_t first = (size_t)r0 * (size_t)n;
    p->be->k->quantize(y + first, (size_t)n, m, lr_qact_at(p->q[g->quant], first), j0, j1);
}

static int count_tasks(const run_ctx *c, const stage *s, int rows, int strips)
{
    if (s->kind == STAGE_ROWS) return (rows + rows_per_task(c, rows) - 1) / rows_per_task(c, rows);
    int n = 0;
    for (int i = 0; i < s->n; i++) n += item_tasks(c->p, &c->p->items[s->first + i], strips, rows);
    return n;
}

/* ---- few rows: who streams which weights ---- */

/* Weights of few rows come from memory, and the kernels ask for what will be read next a little ahead. So each thread
 * has a share of neighbouring strips, in units of a few, and takes it run by run: a third of what is left of it, so
 * that the last runs are short, and threads are through together. Who is through with its own share takes from others'.
 * Each product is told what the thread reads after it, in this stage or the next one with products. */
enum { FEW_ROWS = 8, UNIT_BYTES = 16 << 10, UNIT_MOST = 64, TASK_BYTES = 512 << 10, IDLE_BYTES = 96 << 10 };

/* Not with experts: their tasks are pieces of slots. */
static bool is_shared(const lr_plan *p, const stage *s, int rows)
{
    for (int i = 0; s->kind == STAGE_GEMM && i < s->n; i++)
        if (p->ops[p->items[s->first + i].a].route >= 0) return false;
    return s->kind == STAGE_GEMM && rows <= FEW_ROWS;
}

/* Bytes of a strip of an item. */
static size_t strip_bytes(const lr_plan *p, const gemm_item *it)
{
    const lr_weight *w[2] = {p->ops[it->a].w, it->b < 0 ? NULL : p->ops[it->b].w};
    size_t n = 0;
    for (int i = 0; i < 2 && w[i]; i++) n += w[i]->packed ? w[i]->gemm.strip_bytes : LR_STRIP * w[i]->row_bytes;
    return n;
}

static int item_strips(const lr_plan *p, const gemm_item *it) { return (p->ops[it->a].w->n + LR_STRIP - 1) / LR_STRIP; }

/* Strips of a unit: outputs of a GLU in whole quantization blocks of 32, logits in whole pieces. */
static int unit_strips(const run_ctx *c, const stage *s)
{
    const gemm_item *it = &c->p->items[s->first];
    int n = stage_has_peaks(c, s) ? LR_PIECE / LR_STRIP : 1, total = 0;
    for (int i = 0; i < s->n; i++) {
        if (it[i].glu >= 0 && n < 2) n = 2;
        total += item_strips(c->p, &it[i]);
    }
    while (n < UNIT_MOST && (size_t)n * strip_bytes(c->p, it) < UNIT_BYTES && total / (2 * n) >= 4 * c->n_threads)
        n *= 2;
    return n;
}

static int item_units(const lr_plan *p, const gemm_item *it, int strips)
{
    return (item_strips(p, it) + strips - 1) / strips;
}

/* The first unit of a thread's share, by bytes; thread = n_threads: how many units there are. */
static int share_begin(const run_ctx *c, const stage *s, int strips, int thread)
{
    const gemm_item *it = &c->p->items[s->first];
    size_t total = 0;
    for (int i = 0; i < s->n; i++) total += (size_t)item_units(c->p, &it[i], strips) * strip_bytes(c->p, &it[i]);
    size_t want = total / (size_t)c->n_threads * (size_t)thread;
    int unit = 0;
    for (int i = 0; i < s->n; i++) {
        const int n = item_units(c->p, &it[i], strips);
        const size_t one = strip_bytes(c->p, &it[i]);
        if (thread < c->n_threads && want < (size_t)n * one) return unit + (int)(want / one);
        want -= (size_t)n * one;
        unit += n;
    }
    return unit;
}

static int run_length(int left) { return left > 3 ? left / 3 : 1; }

/* Units that a task takes, unless all are taken. */
static int task_units(const run_ctx *c, const stage *s, int strips)
{
    const size_t n = TASK_BYTES / ((size_t)strips * strip_bytes(c->p, &c->p->items[s->first]));
    return n > 1 ? (int)n : 1;
}

/* Sets the shares of stage c->stage; how many tasks are enough for them: so many that all but one a thread take
 * task_units, and one a thread that goes on to the end. */
static int share_out(const run_ctx *c, const stage *s, int strips)
{
    int next = 0;
    for (int t = 0; t < c->n_threads; t++) {
        atomic_store_explicit(&c->p->shares[t].next, next, memory_order_relaxed);
        c->p->shares[t].end = next = share_begin(c, s, strips, t + 1);
    }
    return next / task_units(c, s, strips) + c->n_threads;
}

/* A run for the thread: units *u0..*u1-1; false: all are taken. */
static bool take_run(const run_ctx *c, int thread, int *u0, int *u1)
{
    for (int i = 0; i < c->n_threads; i++) {
        share *own = &c->p->shares[(thread + i) % c->n_threads];
        int at = atomic_load_explicit(&own->next, memory_order_relaxed);
        while (at < own->end) {
            const int n = run_length(own->end - at);
            if (!atomic_compare_exchange_weak_explicit(&own->next, &at, at + n, memory_order_relaxed,
                                                       memory_order_relaxed))
                continue;
            *u0 = at;
            *u1 = at + n;
            return true;
        }
    }
    return false;
}

/* The item that a unit belongs to, and its first strip. */
static const gemm_item *unit_item(const lr_plan *p, const stage *s, int strips, int unit, int *strip)
{
    const gemm_item *it = &p->items[s->first];
    for (int n; unit >= (n = item_units(p, it, strips)); it++) unit -= n;
    *strip = unit * strips;
    return it;
}

/* The first product of a run of n units. */
static place run_place(const lr_plan *p, const stage *s, int strips, int unit, int n)
{
    place o;
    const gemm_item *it = unit_item(p, s, strips, unit, &o.strip);
    o.w = p->ops[it->a].w;
    o.end = min_int(o.strip + n * strips, item_strips(p, it));
    return o;
}

/* What a thread reads after its current run: its share, then that of the next products. False: not known. */
static bool reads_next(const run_ctx *c, const stage *s, int strips, int thread, place *out)
{
    const lr_plan *p = c->p;
    const share *own = &p->shares[thread];
    const int at = atomic_load_explicit(&own->next, memory_order_relaxed);
    if (at < own->end) {
        *out = run_place(p, s, strips, at, run_length(own->end - at));
        return true;
    }
    int i = c->stage + 1;
    while (i < p->n_stages && p->stages[i].kind != STAGE_GEMM) i++;
    if (i == p->n_stages) return false;
    s = &p->stages[i];
    const int rows = rows_of(c, s->narrow, s->route);
    if (rows == 0 || !is_shared(p, s, rows)) return false;
    strips = unit_strips(c, s);
    const int first = share_begin(c, s, strips, thread), left = share_begin(c, s, strips, thread + 1) - first;
    if (left <= 0) return false;
    *out = run_place(p, s, strips, first, run_length(left));
    if (out->w->packed) {
        const lr_gemm_w *g = &out->w->gemm;
        const size_t from = (size_t)out->strip * g->strip_bytes, bytes = out->w->bytes - from;
        lr_pool_ahead(p->be->pool, thread, (const char *)g->data + from, bytes < IDLE_BYTES ? bytes : IDLE_BYTES);
    }
    return true;
}

/* Quantizes columns j0..j1-1 of a GLU's rows, in blocks of 14 bits: who completes a block does it. */
static void quantize_wide(const run_ctx *c, const gemm_item *it, const plan_op *g, int rows, int j0, int j1)
{
    const lr_plan *p = c->p;
    const int n = p->values[g->out].width;
    for (int b = j0 / LR_WIDE; b * LR_WIDE < j1; b++) {
        const int from = b * LR_WIDE, to = from + LR_WIDE;
        const int have = (j1 < to ? j1 : to) - (j0 > from ? j0 : from);
        atomic_int *done = &p->glu_done[it->first_block + b];
        if (atomic_fetch_add_explicit(done, have, memory_order_acq_rel) + have < LR_WIDE) continue;
        atomic_store_explicit(done, 0, memory_order_relaxed);
        p->be->k->quantize(p->ptr[g->out], (size_t)n, rows, p->q[g->quant], from, to);
    }
}

/* Strips s0..s1-1 of an item, all rows. */
static void few_rows(const run_ctx *c, const stage *s, const gemm_item *it, int s0, int s1, const place *then)
{
    const lr_plan *p = c->p;
    const plan_op *a = &p->ops[it->a];
    if (it->b < 0) {
        if (is_listed(c, a))
            listed_product(c, s->narrow, a, 0, c->rows, s0, s1, then);
        else
            product(c, s->narrow, a, 0, 0, c->rows, s0, s1, then);
        return;
    }
    product(c, s->narrow, a, 0, 0, c->rows, s0, s1, &(place){p->ops[it->b].w, s0, s1});
    product(c, s->narrow, &p->ops[it->b], 0, 0, c->rows, s0, s1, then);
    const plan_op *g = &p->ops[it->glu];
    const int n = a->w->n, j0 = s0 * LR_STRIP, j1 = min_int(s1 * LR_STRIP, n);
    for (int r = 0; r < c->rows; r++) {
        const size_t x = (size_t)r * (size_t)n + (size_t)j0;
        p->be->k->glu(g->act, p->ptr[g->in[0]] + x, p->ptr[g->in[1]] + x, p->ptr[g->out] + x, j1 - j0);
    }
    if (g->quant < 0) return;
    if (p->values[g->quant].wide)
        quantize_wide(c, it, g, c->rows, j0, j1);
    else
        p->be->k->quantize(p->ptr[g->out], (size_t)n, c->rows, p->q[g->quant], j0, j1);
}

/* Units u0..u1-1. */
static void do_run(const run_ctx *c, const stage *s, int u0, int u1, int thread)
{
    const lr_plan *p = c->p;
    const int strips = c->strips;
    while (u0 < u1) {
        int s0;
        const gemm_item *it = unit_item(p, s, strips, u0, &s0);
        const int left = item_units(p, it, strips) - s0 / strips, n = min_int(left, u1 - u0);
        place then;
        bool known = true;
        if (u0 + n < u1)
            then = run_place(p, s, strips, u0 + n, u1 - u0 - n);
        else
            known = reads_next(c, s, strips, thread, &then);
        few_rows(c, s, it, s0, min_int(s0 + n * strips, item_strips(p, it)), known ? &then : NULL);
        u0 += n;
    }
}

static void shared_task(const run_ctx *c, const stage *s, int thread)
{
    const int most = task_units(c, s, c->strips);
    int u0, u1;
    for (int done = 0; done < most && take_run(c, thread, &u0, &u1); done += u1 - u0) do_run(c, s, u0, u1, thread);
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
    c->rows = rows_of(c, s->narrow, s->route);
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
        return (lr_pool_phase){c->second ? 0 : count_tasks(c, s, c->rows, 0), false};
    default:
        if (!c->second) return (lr_pool_phase){c->lora && s->route < 0 ? c->rows : 0, false};
        if (p->be->observed) observe(c, s, c->rows);
        c->shared = is_shared(p, s, c->rows);
        c->strips = c->shared ? unit_strips(c, s) : gemm_strips(c, s, c->rows);
        return (lr_pool_phase){c->shared ? share_out(c, s, c->strips) : count_tasks(c, s, c->rows, c->strips), false};
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
            lora_task(c, s, task);
        else if (c->shared)
            shared_task(c, s, thread);
        else
            gemm_task(c, s, task, c->rows, c->strips);
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
