/* cpu_attn.c - attention over the sequences of a batch: who is put together, and how threads share the work.
 *
 * A tile is up to LR_ATTN_ROWS rows of one sequence. Small tiles whose sequences begin with the same blocks (forks of a
 * text, prompts that begin alike, the branches of a draft) form a gang: the kernels read what they have in common once
 * for all of them. The more rows a gang has, the cheaper is the common part for each (figures in kernels/README.md),
 * but fewer tasks are harder to share among threads. Who is in a gang reaches no result (kernels/cpu/cpu.h).
 */
#include "backend/cpu_int.h"
#include <limits.h>

enum { LOOK_BACK = 32 }; /* gangs that a tile is compared with */

static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }

/* ---- gangs ---- */

/* Positions *from .. *to - 1 at which two sequences have the same blocks of a group: from the first that either sees,
 * to at most `most`. */
static void common(const lr_kv_store *kv, int group, int window, const lr_batch_seq *a, const lr_batch_seq *b, int most,
                   int *from, int *to)
{
    int pos = max_int(a->pos, b->pos), size = kv->block_size;
    *from = window > 0 && pos >= window ? pos - window + 1 : 0;
    int first = *from / size, i = first, n = most / size;
    while (i < n && a->table[group][i] == b->table[group][i]) i++;
    *to = i > first ? i * size : *from;
}

/* The gang with tile t in it; how many positions they have in common, 0 if that does not pay. */
static int join(const lr_plan *p, const lr_kv_store *kv, const lr_batch *b, const attn_gang *g, const attn_tile *t,
                attn_gang *out)
{
    const lr_batch_seq *own = &b->seqs[t->seq], *its = &b->seqs[p->tiles[g->first].seq];
    int pos = own->pos + t->row - own->row, n = 0;
    bool alone = p->tiles[g->first].next < 0;
    *out = *g;
    out->rows += t->n;
    out->pos = min_int(g->pos, pos);
    out->last_pos = max_int(g->last_pos, pos + t->n - 1);
    for (int k = 0; k < LR_KV_GROUPS; k++) {
        int from, to;
        if (kv->n_blocks[k] == 0) continue;
        common(kv, k, p->window[k], own, its, out->pos, &from, &to);
        out->from[k] = alone ? from : max_int(from, g->from[k]);
        out->to[k] = alone ? to : min_int(to, g->to[k]);
        int had = g->to[k] - g->from[k], has = out->to[k] - out->from[k];
        if (k == 0 && !alone && has * (out->rows - 1) < had * (g->rows - 1)) return 0; /* the others would lose more */
        if (has >= LR_ATTN_STEP && has >= (out->pos - out->from[k]) / 4) n = max_int(n, has);
    }
    return n;
}

static void add_tile(lr_plan *p, const lr_kv_store *kv, const lr_batch *b, int tile)
{
    attn_tile *t = &p->tiles[tile];
    const lr_batch_seq *q = &b->seqs[t->seq];
    int best = 0, to = -1, low = max_int(0, p->n_gangs - LOOK_BACK);
    attn_gang joined = {0};
    t->next = -1;
    for (int i = p->n_gangs - 1; i >= low; i--) {
        attn_gang with;
        if (p->gangs[i].rows + t->n > p->gang_rows) continue;
        int n = join(p, kv, b, &p->gangs[i], t, &with);
        if (n <= best) continue;
        best = n;
        to = i;
        joined = with;
    }
    if (to < 0) {
        int pos = q->pos + t->row - q->row;
        p->gangs[p->n_gangs++] =
            (attn_gang){.first = tile, .last_tile = tile, .rows = t->n, .pos = pos, .last_pos = pos + t->n - 1};
        return;
    }
    p->tiles[joined.last_tile].next = tile;
    joined.last_tile = tile;
    p->gangs[to] = joined;
}

/* Rows of a gang: so few that the threads have as much to do as each other, where tasks can't be cut into chunks. */
static int gang_rows(const lr_plan *p, const lr_batch *b)
{
    int threads = lr_pool_threads(p->be->pool), n = 1, least = INT_MAX;
    for (int i = 0; i < b->n_seqs; i++) least = min_int(least, b->seqs[i].pos);
    if (least >= 2 * LR_ATTN_CHUNK) return LR_ATTN_ROWS;
    while (n * p->kv_heads % threads && n * p->kv_heads < 4 * threads) n++;
    return min_int(max_int((b->n_rows + n - 1) / n, 4), LR_ATTN_ROWS);
}

void lr_cpu_lay_tiles(lr_plan *p, const lr_kv_store *kv, const lr_batch *b)
{
    p->n_tiles = p->n_gangs = 0;
    p->gang_rows = b->n_seqs > 1 && p->kv_heads > 0 ? gang_rows(p, b) : 0;
    for (int s = 0; s < b->n_seqs; s++) {
        const lr_batch_seq *q = &b->seqs[s];
        for (int i = 0; i < q->n; i += LR_ATTN_ROWS) {
            p->tiles[p->n_tiles] = (attn_tile){s, q->row + i, min_int(LR_ATTN_ROWS, q->n - i), -1};
            add_tile(p, kv, b, p->n_tiles++);
        }
    }
}

/* ---- a gang's tasks ---- */

typedef struct gang_tasks {
    lr_attn_gang gang;
    lr_attn_task tasks[LR_ATTN_ROWS];
} gang_tasks;

static lr_attn_task task_of(const lr_plan *p, const lr_kv_store *kv, const lr_batch *b, const plan_op *o,
                            const attn_tile *t, int head)
{
    const lr_batch_seq *seq = &b->seqs[t->seq];
    int g = kv->layers[o->layer].group;
    size_t width = (size_t)o->n_heads * (size_t)o->head_dim, at = (size_t)t->row * width;
    char *base = kv->base[g] + kv->offset[o->layer];
    return (lr_attn_task){
        .q = p->ptr[o->in[0]] + at,
        .q_stride = width,
        .out = p->ptr[o->out] + at,
        .out_stride = width,
        .n_rows = t->n,
        .pos = seq->pos + t->row - seq->row,
        .kv_head = head,
        .n_group = o->n_heads / o->n_kv_heads,
        .head_dim = o->head_dim,
        .n_kv_heads = o->n_kv_heads,
        .window = o->window,
        .scale = o->scale,
        .softcap = o->softcap,
        .sinks = o->sinks,
        .k_type = kv->k_types[o->layer],
        .v_type = kv->v_types[o->layer],
        .block_size = kv->block_size,
        .table = seq->table[g],
        .k = base,
        .v = base + kv->part[o->layer],
        .block_stride = kv->block_bytes[g],
    };
}

/* Of pair (gang, KV head), numbered gang after gang. */
static void gang_of(const lr_plan *p, const lr_kv_store *kv, const lr_batch *b, const plan_op *o, int pair,
                    gang_tasks *out)
{
    const attn_gang *g = &p->gangs[pair / o->n_kv_heads];
    int group = kv->layers[o->layer].group, from = g->from[group], to = g->to[group] & -LR_ATTN_STEP;
    out->gang = (lr_attn_gang){.tasks = out->tasks};
    for (int t = g->first; t >= 0; t = p->tiles[t].next)
        out->tasks[out->gang.n++] = task_of(p, kv, b, o, &p->tiles[t], pair % o->n_kv_heads);
    if (o->window > 0) from = max_int(from, g->last_pos - o->window + 1);
    from = (from + LR_ATTN_STEP - 1) & -LR_ATTN_STEP;
    if (out->gang.n > 1 && from < to) {
        out->gang.from = from;
        out->gang.to = to;
    }
}

static void quantize_heads(const lr_plan *p, const plan_op *o, const lr_attn_gang *g)
{
    for (int i = 0; i < g->n && o->quant >= 0; i++) {
        const lr_attn_task *a = &g->tasks[i];
        size_t at = (size_t)(a->out - p->ptr[o->out]);
        int n = a->n_group * a->head_dim, c0 = a->kv_head * n;
        p->be->k->quantize(a->out, a->out_stride, a->n_rows, lr_qact_at(p->q[o->quant], at), c0, c0 + n);
    }
}

/* ---- in pieces ---- */

static size_t part_floats(const lr_attn_gang *g)
{
    size_t n = 0;
    for (int i = 0; i < g->n; i++) n += lr_cpu_attn_part_floats(&g->tasks[i]);
    return n;
}

int lr_cpu_attn_pieces(const lr_plan *p, const lr_kv_store *kv, const lr_batch *b, const plan_op *o)
{
    int pairs = p->n_gangs * o->n_kv_heads, most = 0, threads = lr_pool_threads(p->be->pool);
    size_t floats = 0;
    if (pairs >= 2 * threads || threads == 1) return 0;
    for (int i = 0; i < p->n_gangs; i++) {
        gang_tasks t;
        int first, last;
        gang_of(p, kv, b, o, i * o->n_kv_heads, &t);
        lr_attn_gang_chunks(&t.gang, &first, &last);
        if (last - first + 1 > most) most = last - first + 1;
        if (part_floats(&t.gang) > floats) floats = part_floats(&t.gang);
    }
    return most >= 2 && (size_t)pairs * (size_t)most * floats <= ATTN_PARTS ? most : 0;
}

/* The parts of the pair's tasks: those of one task, n of them, lie one behind the other; a pair's are ATTN_PARTS /
 * pairs floats from the next pair's. */
static void parts_of(const lr_plan *p, const plan_op *o, const lr_attn_gang *g, int pair, int n, float **parts)
{
    float *at = p->parts + (size_t)pair * (size_t)(ATTN_PARTS / (p->n_gangs * o->n_kv_heads));
    for (int i = 0; i < g->n; i++) {
        parts[i] = at;
        at += (size_t)n * lr_cpu_attn_part_floats(&g->tasks[i]);
    }
}

static void run_piece(const lr_plan *p, const plan_op *o, const lr_attn_gang *g, int pair, int piece, int n,
                      void *scratch)
{
    float *parts[LR_ATTN_ROWS];
    int first, last;
    lr_attn_gang_chunks(g, &first, &last);
    if (first + piece > last) return;
    parts_of(p, o, g, pair, n, parts);
    for (int i = 0; i < g->n; i++) parts[i] += (size_t)piece * lr_cpu_attn_part_floats(&g->tasks[i]);
    p->be->k->attn_gang_part(g, first + piece, parts, scratch);
}

static void join_pieces(const lr_plan *p, const plan_op *o, const lr_attn_gang *g, int pair, int n)
{
    float *parts[LR_ATTN_ROWS];
    int first, last;
    lr_attn_gang_chunks(g, &first, &last);
    parts_of(p, o, g, pair, n, parts);
    for (int i = 0; i < g->n; i++) p->be->k->attn_combine(&g->tasks[i], parts[i], last - first + 1);
    quantize_heads(p, o, g);
}

int lr_cpu_attn_tasks(const lr_plan *p, const plan_op *o, int n_pieces, bool joins)
{
    const int pairs = p->n_gangs * o->n_kv_heads;
    return joins ? (n_pieces ? pairs : 0) : pairs * (n_pieces ? n_pieces : 1);
}

void lr_cpu_attn_task(const lr_plan *p, const lr_kv_store *kv, const lr_batch *b, const plan_op *o, int n_pieces,
                      bool joins, int task, int thread)
{
    const int pair = joins || !n_pieces ? task : task / n_pieces;
    void *scratch = p->scratch + (size_t)thread * p->scratch_bytes;
    gang_tasks g;
    gang_of(p, kv, b, o, pair, &g);
    if (joins) {
        join_pieces(p, o, &g.gang, pair, n_pieces);
    } else if (n_pieces) {
        run_piece(p, o, &g.gang, pair, task % n_pieces, n_pieces, scratch);
    } else {
        p->be->k->attn_gang(&g.gang, scratch);
        quantize_heads(p, o, &g.gang);
    }
}
