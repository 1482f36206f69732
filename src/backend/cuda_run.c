/* cuda_run.c - runs a compiled plan on a batch: one small copy to the device, the steps, the results back.
 *
 * Decode steps (one row a sequence, every row's logits wanted) are captured as CUDA graphs: the batch is padded to one
 * of a few sizes, the reach of attention to a power of two, and a graph of these two numbers is launched instead of the
 * steps, if there is one, or made. Padding rows belong to no sequence; the kernels pass them over.
 */
#include "backend/cuda_int.h"
#include <stdio.h>
#include <string.h>

/* ---- the batch's numbers ---- */

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

static size_t take(cuda_meta *m, size_t n)
{
    size_t at = m->n;
    m->n += (n + 3) & ~(size_t)3; /* 16 bytes */
    return at;
}

static int echo_pos(const lr_batch *b, int row)
{
    int s = 0;
    while (s + 1 < b->n_seqs && b->seqs[s + 1].row <= row) s++;
    return b->seqs[s].pos + row - b->seqs[s].row;
}

static void lay_out(const lr_plan *p, const lr_batch *b, int rows, int outs, cuda_meta *m)
{
    int bs = p->kv ? p->kv->block_size : 1;
    size_t r = (size_t)rows, entries = 0;
    *m = (cuda_meta){.rows = rows, .outs = outs, .seqs = rows > b->n_seqs ? rows : b->n_seqs, .echoes = b->n_echoes};
    m->tokens = take(m, r);
    m->pos = take(m, r);
    m->held = p->held ? take(m, r) : 0;
    m->seq = take(m, r);
    m->tiles = take(m, 2 * r);
    m->out_rows = take(m, (size_t)outs);
    m->echo_row = take(m, (size_t)m->echoes);
    m->echo_pos = take(m, (size_t)m->echoes);
    m->echo_seq = take(m, (size_t)m->echoes);
    if (lr_cuda_adapted(b)) {
        m->lora = take(m, r * sizeof(void *) / sizeof(int32_t));
        m->lora_out = take(m, (size_t)outs * sizeof(void *) / sizeof(int32_t));
    }
    for (int i = 0; i < b->n_seqs; i++) entries += (size_t)ceil_div(b->seqs[i].pos + b->seqs[i].n, bs);
    for (int i = 0; i < b->n_echoes; i++) entries += (size_t)(echo_pos(b, b->echoes[i].row) / bs + 1);
    for (int g = 0; g < LR_KV_GROUPS; g++) m->table_at[g] = take(m, (size_t)(m->seqs + m->echoes));
    /* tables come last: their length is no part of what a graph knows, but where they begin is; so those of the groups
     * are one behind the other, and group 1's begin is in its table_at */
    m->table[0] = m->table[1] = m->n;
    for (int g = 0; g < LR_KV_GROUPS; g++)
        if (p->kv && p->kv->n_blocks[g]) m->n += entries;
}

static int make_room(lr_plan *p, size_t n, lr_error *err)
{
    if (n <= p->meta_cap) return 0;
    size_t cap = 2 * p->meta_cap > n ? 2 * p->meta_cap : n;
    lr_cuda_graphs_drop(p);
    if (p->meta_dev) cudaFree(p->meta_dev);
    if (p->meta_host) cudaFreeHost(p->meta_host);
    p->meta_dev = NULL;
    p->meta_host = NULL;
    p->meta_cap = 0;
    void *dev, *host;
    int rc = lr_cuda_plan_alloc(p, &dev, cap * sizeof(int32_t), "block tables", err);
    if (rc || p->dry) return rc;
    p->meta_dev = dev;
    rc = lr_cuda_pin(p->be, &host, cap * sizeof(int32_t), "block tables", err);
    if (rc) return rc;
    p->meta_host = host;
    p->meta_cap = cap;
    return 0;
}

int lr_cuda_meta_open(lr_plan *p, lr_error *err)
{
    size_t n = 12 * (size_t)p->max_rows + (size_t)p->max_out;
    for (int g = 0; g < LR_KV_GROUPS && p->kv; g++) n += (size_t)p->kv->n_blocks[g];
    return make_room(p, n, err);
}

static void fill_rows(const lr_plan *p, int32_t *h, const lr_batch *b, const cuda_meta *m)
{
    int r = 0;
    for (int s = 0; s < b->n_seqs; s++)
        for (int i = 0; i < b->seqs[s].n; i++, r++) {
            h[m->tokens + (size_t)r] = b->tokens ? b->tokens[r] : 0;
            h[m->pos + (size_t)r] = b->seqs[s].pos + i;
            h[m->seq + (size_t)r] = s;
        }
    for (; r < m->rows; r++) { /* without positions, or padding */
        bool real = r < b->n_rows;
        h[m->tokens + (size_t)r] = real && b->tokens ? b->tokens[r] : 0;
        h[m->pos + (size_t)r] = 0;
        h[m->seq + (size_t)r] = real ? 0 : -1;
    }
    for (int i = 0; i < m->rows && p->held; i++) {
        int32_t pos = h[m->pos + (size_t)i];
        h[m->held + (size_t)i] = pos < p->held ? pos : p->held - 1;
    }
    for (int i = 0; i < m->outs; i++) h[m->out_rows + (size_t)i] = i < b->n_out ? b->out_rows[i] : -1;
}

static size_t put_table(int32_t *h, size_t at, const int32_t *table, int n)
{
    memcpy(h + at, table, (size_t)n * sizeof *h);
    return at + (size_t)n;
}

static void fill_tables(const lr_plan *p, int32_t *h, const lr_batch *b, const cuda_meta *m)
{
    if (!p->kv) return;
    int bs = p->kv->block_size;
    size_t next = m->table[0];
    for (int g = 0; g < LR_KV_GROUPS; g++) {
        int32_t *begin = h + m->table_at[g];
        memset(begin, 0, (size_t)(m->seqs + m->echoes) * sizeof *begin);
        if (!p->kv->n_blocks[g]) continue;
        for (int s = 0; s < b->n_seqs; s++) {
            begin[s] = (int32_t)(next - m->table[g]);
            next = put_table(h, next, b->seqs[s].table[g], ceil_div(b->seqs[s].pos + b->seqs[s].n, bs));
        }
        for (int i = 0; i < b->n_echoes; i++) {
            begin[m->seqs + i] = (int32_t)(next - m->table[g]);
            next = put_table(h, next, b->echoes[i].table[g], echo_pos(b, b->echoes[i].row) / bs + 1);
        }
    }
    for (int i = 0; i < b->n_echoes; i++) {
        h[m->echo_row + (size_t)i] = b->echoes[i].row;
        h[m->echo_pos + (size_t)i] = echo_pos(b, b->echoes[i].row);
        h[m->echo_seq + (size_t)i] = m->seqs + i;
    }
}

/* Tiles of attention: those of sequences with few rows first, as the kernels have two sizes of them. */
static void fill_tiles(const lr_plan *p, int32_t *h, const lr_batch *b, cuda_walk *w)
{
    const cuda_meta *m = w->meta;
    lr_cu_tile *t = (lr_cu_tile *)(void *)(h + m->tiles);
    int n = 0;
    for (int wide = 0; wide < 2; wide++) {
        for (int s = 0; s < b->n_seqs; s++) {
            const lr_batch_seq *q = &b->seqs[s];
            if ((q->n > p->tile_narrow) != (wide == 1)) continue;
            int most = wide ? p->tile_wide : p->tile_narrow;
            for (int i = 0; i < q->n; i += most) t[n++] = (lr_cu_tile){q->row + i, q->n - i < most ? q->n - i : most};
        }
        if (wide == 0) w->n_narrow = n;
    }
    w->n_wide = n - w->n_narrow;
}

/* ---- steps ---- */

static int walk(lr_plan *p, lr_kv_store *kv, const cuda_walk *w, lr_error *err)
{
    char what[160];
    for (int i = 0; i < p->n_steps; i++) {
        cudaError_t e = lr_cuda_step(p, kv, &p->steps[i], w);
        if (!e) continue;
        if (p->exchange_failed) {
            *err = p->exchange_err;
            return p->exchange_failed;
        }
        lr_cuda_step_text(p, &p->steps[i], what, sizeof what);
        return lr_cuda_failed(p->be, (int)e, what, err);
    }
    return 0;
}

/* ---- graphs ---- */

void lr_cuda_graphs_drop(lr_plan *p)
{
    for (int i = 0; i < p->n_graphs; i++) cudaGraphExecDestroy(p->graphs[i].exec);
    p->n_graphs = 0;
}

static cuda_graph *find_graph(lr_plan *p, const cuda_walk *w)
{
    for (int i = 0; i < p->n_graphs; i++)
        if (p->graphs[i].rows == w->meta->rows && p->graphs[i].max_slots == w->max_slots &&
            p->graphs[i].ranks == w->ranks)
            return &p->graphs[i];
    return NULL;
}

static cuda_graph *free_graph(lr_plan *p)
{
    if (p->n_graphs < LR_CUDA_GRAPHS) return &p->graphs[p->n_graphs++];
    cuda_graph *oldest = &p->graphs[0];
    for (int i = 1; i < p->n_graphs; i++)
        if (p->graphs[i].used < oldest->used) oldest = &p->graphs[i];
    cudaGraphExecDestroy(oldest->exec);
    return oldest;
}

/* Captures the steps; NULL in *out if the runtime can't, which costs speed only. */
static int capture(lr_plan *p, lr_kv_store *kv, const cuda_walk *w, cuda_graph **out, lr_error *err)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    *out = NULL;
    cudaError_t e = cudaStreamBeginCapture(p->be->stream, cudaStreamCaptureModeThreadLocal);
    if (e) goto without;
    int rc = walk(p, kv, w, err);
    e = cudaStreamEndCapture(p->be->stream, &graph);
    if (rc) {
        if (graph) cudaGraphDestroy(graph);
        return rc;
    }
    if (!e) e = cudaGraphInstantiate(&exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (e) goto without;
    cuda_graph *g = free_graph(p);
    *g = (cuda_graph){.rows = w->meta->rows, .max_slots = w->max_slots, .ranks = w->ranks, .exec = exec};
    *out = g;
    return 0;
without:
    cudaGetLastError();
    p->no_graphs = true;
    return 0;
}

static int run_graph(lr_plan *p, lr_kv_store *kv, const cuda_walk *w, lr_error *err)
{
    cuda_graph *g = find_graph(p, w);
    int rc = g ? 0 : capture(p, kv, w, &g, err);
    if (rc) return rc;
    if (!g) return walk(p, kv, w, err);
    g->used = ++p->clock;
    cudaError_t e = cudaGraphLaunch(g->exec, p->be->stream);
    return e ? lr_cuda_failed(p->be, (int)e, "launching a decode step", err) : 0;
}

/* The rows that a decode step of n is padded to; 0: it is not captured. */
static int bucket(const lr_plan *p, const lr_batch *b)
{
    static const int sizes[] = {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256};
    int most = p->max_rows < p->max_out ? p->max_rows : p->max_out, n = b->n_rows;
    if (p->no_graphs || n != b->n_seqs || n != b->n_out || b->n_echoes || n > LR_CUDA_GRAPH_ROWS) return 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] >= n) return sizes[i] <= most ? sizes[i] : n;
    return 0;
}

/* Slots that attention reaches over: as they are, or for a graph a power of two of chunks. */
static int reach(const lr_plan *p, const lr_batch *b, bool rounded)
{
    int most = 1, n = LR_CU_CHUNK;
    for (int s = 0; s < b->n_seqs; s++)
        if (b->seqs[s].pos + b->seqs[s].n > most) most = b->seqs[s].pos + b->seqs[s].n;
    if (!rounded) return most;
    while (n < most) n *= 2;
    return n < p->slots_cap || most > p->slots_cap ? n : p->slots_cap;
}

/* ---- results ---- */

static cudaError_t fetch(lr_plan *p, void *dst, int piece, size_t bytes)
{
    cudaStream_t st = p->be->stream;
    bool small = bytes <= p->bounce_bytes;
    cudaError_t e = cudaMemcpyAsync(small ? p->bounce : dst, p->pieces[piece].at, bytes, cudaMemcpyDeviceToHost, st);
    if (!e) e = cudaStreamSynchronize(st);
    if (!e && small) memcpy(dst, p->bounce, bytes);
    return e;
}

/* Logits of the rows that nobody draws from here, to their places. */
static cudaError_t fetch_logits(lr_plan *p, const lr_batch *b, int n)
{
    size_t row = (size_t)p->n_vocab * sizeof(float);
    char *drawn = p->drawn;
    cudaError_t e = cudaSuccess;
    if (!b->draws || b->draws->n == 0) return fetch(p, b->logits, p->logits, (size_t)n * row);
    memset(drawn, 0, (size_t)n);
    for (int i = 0; i < b->draws->n; i++)
        if (b->draws->at[i].out >= 0) drawn[b->draws->at[i].out] = 1;
    for (int i = 0, end; i < n && !e; i = end + 1) {
        for (end = i; end < n && !drawn[end]; end++) {
        }
        if (end > i)
            e = cudaMemcpyAsync((char *)b->logits + (size_t)i * row, p->pieces[p->logits].at + (size_t)i * row,
                                (size_t)(end - i) * row, cudaMemcpyDeviceToHost, p->be->stream);
    }
    return e;
}

static int results(lr_plan *p, const lr_batch *b, lr_error *err)
{
    int n = p->partial ? b->n_rows : b->n_out;
    cudaError_t e = cudaSuccess;
    if (n && b->logits) e = fetch_logits(p, b, n);
    if (!e && n && b->hidden && p->hidden >= 0)
        e = fetch(p, b->hidden, p->hidden, (size_t)n * (size_t)p->n_hidden * sizeof(float));
    if (!e && b->features && p->features >= 0)
        e = fetch(p, b->features, p->features, (size_t)b->n_rows * (size_t)p->n_features * sizeof(float));
    int rc = !e && b->draws && b->draws->n ? lr_cuda_draw(p, b->draws, err) : 0;
    if (rc) return rc;
    if (!e) e = cudaStreamSynchronize(p->be->stream);
    return e ? lr_cuda_failed(p->be, (int)e, "running a batch", err) : 0;
}

static int make_echo_room(lr_plan *p, const lr_batch *b, lr_error *err)
{
    if (!b->n_echoes || p->echo) return 0;
    return lr_cuda_alloc(p->be, &p->echo, p->echo_bytes, "drafts' keys and values", err);
}

int lr_cuda_launch(lr_backend *be, lr_plan *p, lr_kv_store *kv, const lr_batch *b, lr_error *err)
{
    cuda_meta m;
    if (b->n_rows < 1 || b->n_rows > p->max_rows || b->n_out > p->max_out || b->n_echoes > p->max_rows)
        return lr_fail(err, LR_EINVAL, "a batch of %d rows (%d with logits) for a plan of %d (%d)", b->n_rows, b->n_out,
                       p->max_rows, p->max_out);
    cudaSetDevice(p->be->index);
    if (kv && kv->failed) return lr_cuda_failed((cuda_backend *)be, kv->failed, "copying KV blocks", err);
    if (p->under_way) cudaStreamSynchronize(p->be->stream); /* nobody wants it: its numbers are written over */
    p->under_way = false;
    int padded = bucket(p, b), rows = padded ? padded : b->n_rows;
    lay_out(p, b, rows, padded ? padded : b->n_out, &m);
    int rc = make_room(p, m.n, err);
    if (!rc) rc = make_echo_room(p, b, err);
    bool adapted = lr_cuda_adapted(b);
    if (!rc && adapted) rc = lr_cuda_lora_room(p, b, err);
    if (rc) return rc;
    cuda_walk w = {.meta = &m, .max_slots = reach(p, b, padded > 0), .ranks = adapted ? p->be->ranks : 0};
    if (adapted) lr_cuda_lora_rows(b, &m, p->meta_host);
    fill_rows(p, p->meta_host, b, &m);
    fill_tables(p, p->meta_host, b, &m);
    fill_tiles(p, p->meta_host, b, &w);
    if (padded) {
        lr_cu_tile *t = (lr_cu_tile *)(void *)(p->meta_host + m.tiles);
        for (; w.n_narrow < padded; w.n_narrow++) t[w.n_narrow] = (lr_cu_tile){w.n_narrow, 0};
    }
    cudaError_t e =
        cudaMemcpyAsync(p->meta_dev, p->meta_host, m.n * sizeof(int32_t), cudaMemcpyHostToDevice, p->be->stream);
    if (!e && p->input >= 0) {
        const cuda_piece *in = &p->pieces[p->input];
        e = cudaMemcpyAsync(in->at, b->input, (size_t)b->n_rows * (size_t)in->width * sizeof(float),
                            cudaMemcpyHostToDevice, p->be->stream);
    }
    if (e) return lr_cuda_failed(p->be, (int)e, "copying a batch's tables", err);
    rc = padded ? run_graph(p, kv, &w, err) : walk(p, kv, &w, err);
    p->under_way = rc == 0;
    return rc;
}

int lr_cuda_finish(lr_backend *be, lr_plan *p, const lr_batch *b, lr_error *err)
{
    cudaSetDevice(((cuda_backend *)be)->index);
    if (!p->under_way) return lr_fail(err, LR_ESTATE, "no batch is under way");
    p->under_way = false;
    return results(p, b, err);
}

int lr_cuda_run(lr_backend *be, lr_plan *p, lr_kv_store *kv, const lr_batch *b, lr_error *err)
{
    int rc = lr_cuda_launch(be, p, kv, b, err);
    return rc ? rc : lr_cuda_finish(be, p, b, err);
}
