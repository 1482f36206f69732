/* cpu_gemm.c - the products of a stage: one, on some rows and strips; a stage cut into tasks. See cpu_run.h. */
#include "backend/cpu_run.h"
#include <math.h>

enum { M_BLOCK_BYTES = 512 << 10 };

/* Rows a task takes: so many that their quantized values stay in the second-level cache. */
static int gemm_m_block(int rows, int k)
{
    int m = M_BLOCK_BYTES / (k > 0 ? k : 1) & ~15;
    if (m < 64) m = 64;
    if (m > 512) m = 512;
    return lr_cpu_less(rows, m);
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

bool lr_cpu_stage_has_peaks(const run_ctx *c, const stage *s)
{
    for (int i = 0; i < s->n; i++)
        if (has_peaks(c, &c->p->ops[c->p->items[s->first + i].a])) return true;
    return false;
}

/* So many that a task's columns are whole quantization blocks, or pieces with a peak. */
int lr_cpu_gemm_strips(const run_ctx *c, const stage *s, int rows)
{
    int total = 0;
    for (int i = 0; i < s->n; i++) {
        const plan_op *o = &c->p->ops[c->p->items[s->first + i].a];
        total += (o->w->n + LR_STRIP - 1) / LR_STRIP * (o->route < 0 ? 1 : c->p->routes[o->route].n_pieces);
    }
    const int least = lr_cpu_stage_has_peaks(c, s) ? LR_PIECE / LR_STRIP : 2;
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

/* The adapter of a row of a stage. */
static const lr_lora *lora_of(const run_ctx *c, bool narrow, int r)
{
    return c->b->seqs[c->p->row_seq[narrow ? c->b->out_rows[r] : r]].lora;
}

void lr_cpu_lora_task(const run_ctx *c, const stage *s, int r)
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
    for (int j = j0; j < j1; j += LR_PIECE) *peak++ = c->p->be->k->max(y + j, lr_cpu_less(LR_PIECE, j1 - j));
}

/* As lr_cpu_product, all logits. */
static void product(const run_ctx *c, bool narrow, const plan_op *o, int mat, int r0, int m, int s0, int s1,
                    const place *then)
{
    const lr_plan *p = c->p;
    const lr_weight *w = o->w;
    size_t ldy = (size_t)w->n, k = (size_t)w->k;
    float *y = p->ptr[o->out] + (size_t)r0 * ldy;
    const float *x = o->in[0] < 0 ? NULL : p->ptr[o->in[0]] + (size_t)r0 * k;
    size_t behind = (size_t)mat * ldy; /* rows of other matrices before this one's */
    int j0 = s0 * LR_STRIP, j1 = lr_cpu_less(s1 * LR_STRIP, w->n);
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

_Static_assert(LR_LISTED % LR_STRIP == 0, "a strip is wanted as a whole");

static bool strip_listed(const run_ctx *c, int strip) { return lr_is_listed(c->b->shortlist, strip * LR_STRIP); }

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
        const int j0 = from * LR_STRIP, j1 = lr_cpu_less(to * LR_STRIP, o->w->n);
        for (int r = 0; r < m; r++)
            for (int j = j0; j < j1; j++) y[(size_t)r * ldy + (size_t)j] = -INFINITY;
    }
}

void lr_cpu_product(const run_ctx *c, const stage *s, const plan_op *o, int mat, int r0, int m, int s0, int s1,
                    const place *then)
{
    if (c->b->shortlist && o->out == c->p->logits)
        listed_product(c, s->narrow, o, r0, m, s0, s1, then);
    else
        product(c, s->narrow, o, mat, r0, m, s0, s1, then);
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

void lr_cpu_glu(const run_ctx *c, const gemm_item *it, int r0, int m, int j0, int j1)
{
    const lr_plan *p = c->p;
    const plan_op *g = &p->ops[it->glu];
    const size_t n = (size_t)p->values[g->out].width, first = (size_t)r0 * n;
    float *y = p->ptr[g->out];
    for (int r = 0; r < m; r++) {
        const size_t x = first + (size_t)r * n + (size_t)j0;
        p->be->k->glu(g->act, p->ptr[g->in[0]] + x, p->ptr[g->in[1]] + x, y + x, j1 - j0);
    }
    if (g->quant < 0) return;
    if (c->shared && p->values[g->quant].wide)
        quantize_wide(c, it, g, m, j0, j1);
    else
        p->be->k->quantize(y + first, n, m, lr_qact_at(p->q[g->quant], first), j0, j1);
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
        *out = (gemm_place){0, row, lr_cpu_less(mb, rows - row), task / n_mb * strips};
        return it;
    }
    int cols = ((a->w->n + LR_STRIP - 1) / LR_STRIP + strips - 1) / strips;
    const moe_piece *piece = &p->routes[a->route].pieces[task / cols];
    *out = (gemm_place){piece->expert, piece->first, piece->n, task % cols * strips};
    return it;
}

void lr_cpu_gemm_task(const run_ctx *c, const stage *s, int task, int rows, int strips)
{
    const lr_plan *p = c->p;
    gemm_place at;
    const gemm_item *it = find_task(p, s, task, rows, strips, &at);
    const plan_op *a = &p->ops[it->a];
    const int n_strips = (a->w->n + LR_STRIP - 1) / LR_STRIP, s0 = at.strip, r0 = at.row, m = at.m, mat = at.mat;
    int s1 = lr_cpu_less(s0 + strips, n_strips);
    lr_cpu_product(c, s, a, mat, r0, m, s0, s1, NULL);
    if (it->b < 0) return;
    lr_cpu_product(c, s, &p->ops[it->b], mat, r0, m, s0, s1, NULL);
    lr_cpu_glu(c, it, r0, m, s0 * LR_STRIP, lr_cpu_less(s1 * LR_STRIP, a->w->n));
}

int lr_cpu_gemm_tasks(const run_ctx *c, const stage *s, int rows, int strips)
{
    int n = 0;
    for (int i = 0; i < s->n; i++) n += item_tasks(c->p, &c->p->items[s->first + i], strips, rows);
    return n;
}
