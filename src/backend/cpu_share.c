/* cpu_share.c - products of few rows: who streams which weights. See cpu_run.h.
 *
 * Weights of few rows come from memory, and the kernels ask for what will be read next a little ahead. So each thread
 * has a share of neighbouring strips, in units of a few, and takes it run by run: a third of what is left of it, so
 * that the last runs are short, and threads are through together. Who is through with its own share takes from others'.
 * Each product is told what the thread reads after it, in this stage or the next one with products.
 */
#include "backend/cpu_run.h"

enum { FEW_ROWS = 8, UNIT_BYTES = 16 << 10, UNIT_MOST = 64, TASK_BYTES = 512 << 10, IDLE_BYTES = 96 << 10 };

/* Not with experts: their tasks are pieces of slots. */
bool lr_cpu_is_shared(const run_ctx *c, const stage *s, int rows)
{
    const lr_plan *p = c->p;
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

/* Outputs of a GLU in whole quantization blocks of 32, logits in whole pieces. */
int lr_cpu_unit_strips(const run_ctx *c, const stage *s)
{
    const gemm_item *it = &c->p->items[s->first];
    int n = lr_cpu_stage_has_peaks(c, s) ? LR_PIECE / LR_STRIP : 1, total = 0;
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

/* Tasks: so many that all but one a thread take task_units, and one a thread that goes on to the end. */
int lr_cpu_share_out(const run_ctx *c, const stage *s, int strips)
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
    o.end = lr_cpu_less(o.strip + n * strips, item_strips(p, it));
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
    const int rows = lr_cpu_rows(c, s->narrow, s->route);
    if (rows == 0 || !lr_cpu_is_shared(c, s, rows)) return false;
    strips = lr_cpu_unit_strips(c, s);
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

/* Strips s0..s1-1 of an item, all rows. */
static void few_rows(const run_ctx *c, const stage *s, const gemm_item *it, int s0, int s1, const place *then)
{
    const lr_plan *p = c->p;
    const plan_op *a = &p->ops[it->a], *b = it->b < 0 ? NULL : &p->ops[it->b];
    const place up = {b ? b->w : NULL, s0, s1};
    lr_cpu_product(c, s, a, 0, 0, c->rows, s0, s1, b ? &up : then);
    if (!b) return;
    lr_cpu_product(c, s, b, 0, 0, c->rows, s0, s1, then);
    lr_cpu_glu(c, it, 0, c->rows, s0 * LR_STRIP, lr_cpu_less(s1 * LR_STRIP, a->w->n));
}

/* Units u0..u1-1. */
static void do_run(const run_ctx *c, const stage *s, int u0, int u1, int thread)
{
    const lr_plan *p = c->p;
    const int strips = c->strips;
    while (u0 < u1) {
        int s0;
        const gemm_item *it = unit_item(p, s, strips, u0, &s0);
        const int left = item_units(p, it, strips) - s0 / strips, n = lr_cpu_less(left, u1 - u0);
        place then;
        bool known = true;
        if (u0 + n < u1)
            then = run_place(p, s, strips, u0 + n, u1 - u0 - n);
        else
            known = reads_next(c, s, strips, thread, &then);
        few_rows(c, s, it, s0, lr_cpu_less(s0 + n * strips, item_strips(p, it)), known ? &then : NULL);
        u0 += n;
    }
}

void lr_cpu_shared_task(const run_ctx *c, const stage *s, int thread)
{
    const int most = task_units(c, s, c->strips);
    int u0, u1;
    for (int done = 0; done < most && take_run(c, thread, &u0, &u1); done += u1 - u0) do_run(c, s, u0, u1, thread);
}
