/* parallel_run.c - a forward pass on several ranks: see parallel.h.
 *
 * The batch as an order: numbers (rows, sequences, wanted rows, hidden or not, micro-batches), token ids, for each
 * sequence row, n, pos and its tables up to its last row, wanted rows. What comes in is checked number by number before
 * it is used: a block that does not exist would be read outside of memory.
 */
#include "base/mem.h"
#include "base/clock.h"
#include "model/parallel_int.h"
#include <string.h>

/* Blocks of a table up to a position. */
static int blocks_to(const parallel *p, int pos) { return pos / p->block_size + 1; }

/* ---- the order ---- */

static void write_tables(parallel *p, const int32_t *const *table, int pos)
{
    for (int g = 0; g < p->base.n_groups; g++)
        lr_pack_put(&p->pack, table[g], (size_t)blocks_to(p, pos) * sizeof *table[g]);
}

/* The position of a row. */
static int pos_of(const lr_batch *b, int row)
{
    const lr_batch_seq *s = b->seqs;
    while (row >= s->row + s->n) s++;
    return s->pos + row - s->row;
}

static void write_batch(parallel *p, const lr_batch *b, int n_micro)
{
    lr_pack *k = &p->pack;
    const int head[] = {b->n_rows, b->n_seqs, b->n_echoes, b->n_out, b->hidden != NULL, n_micro};
    lr_pack_begin(k, LR_ORDER_FORWARD, p->id);
    for (size_t i = 0; i < sizeof head / sizeof *head; i++) lr_pack_int(k, head[i]);
    lr_pack_put(k, b->tokens, (size_t)b->n_rows * sizeof *b->tokens);
    for (int i = 0; i < b->n_seqs; i++) {
        const lr_batch_seq *s = &b->seqs[i];
        lr_pack_int(k, s->row);
        lr_pack_int(k, s->n);
        lr_pack_int(k, s->pos);
        write_tables(p, s->table, s->pos + s->n - 1);
    }
    for (int i = 0; i < b->n_echoes; i++) {
        lr_pack_int(k, b->echoes[i].row);
        write_tables(p, b->echoes[i].table, pos_of(b, b->echoes[i].row));
    }
    lr_pack_put(k, b->out_rows, (size_t)b->n_out * sizeof *b->out_rows);
}

/* Copies n numbers lo .. hi to `to`, which must have room; the pack is bad if one is not. */
static void take_ids(lr_pack *k, int32_t *to, int n, int32_t lo, int32_t hi)
{
    const void *from = lr_pack_get(k, (size_t)n * sizeof *to);
    if (!from) return;
    memcpy(to, from, (size_t)n * sizeof *to);
    for (int i = 0; i < n; i++)
        if (to[i] < lo || to[i] > hi) k->bad = true;
}

static int room_for_tables(parallel *p, size_t n, lr_error *err)
{
    if (n <= p->cap_tables) return 0;
    int32_t *t = lr_reallocarray(p->tables, n, sizeof *t);
    if (!t) return lr_fail(err, LR_ENOMEM, "no memory for block tables");
    p->tables = t;
    p->cap_tables = n;
    return 0;
}

/* A sequence's tables up to a position, into p->tables from *used on. */
static void read_tables(parallel *p, lr_pack *k, int pos, size_t *used, const int32_t **table)
{
    for (int g = 0; g < p->base.n_groups && !k->bad; g++) {
        int n = blocks_to(p, pos);
        if (*used + (size_t)n > p->cap_tables) {
            k->bad = true;
            return;
        }
        take_ids(k, p->tables + *used, n, -1, p->n_blocks[g] - 1);
        table[g] = p->tables + *used;
        *used += (size_t)n;
    }
}

static int read_seqs(parallel *p, lr_pack *k, lr_batch *b, size_t used, lr_error *err)
{
    int row = 0;
    for (int i = 0; i < b->n_seqs && !k->bad; i++) {
        lr_batch_seq *s = &p->seqs[i];
        s->row = (int)lr_pack_take(k, row, row);
        s->n = (int)lr_pack_take(k, 1, b->n_rows - row);
        s->pos = (int)lr_pack_take(k, 0, 1 << 28);
        row += s->n;
        read_tables(p, k, s->pos + s->n - 1, &used, s->table);
    }
    if (row != b->n_rows) k->bad = true;
    b->seqs = p->seqs;
    for (int i = 0; i < b->n_echoes && !k->bad; i++) {
        lr_batch_echo *e = &p->echoes[i];
        e->row = (int)lr_pack_take(k, i ? p->echoes[i - 1].row : 0, b->n_rows - 1);
        if (!k->bad) read_tables(p, k, pos_of(b, e->row), &used, e->table);
    }
    b->echoes = p->echoes;
    return k->bad ? lr_fail(err, LR_EFORMAT, "a batch whose sequences or block tables are out of range") : 0;
}

static int room_for_echoes(parallel *p, int n, lr_error *err)
{
    if (n <= p->cap_echoes) return 0;
    lr_batch_echo *e = lr_reallocarray(p->echoes, (size_t)n, sizeof *e);
    if (!e) return lr_fail(err, LR_ENOMEM, "no memory for the rows of drafts");
    p->echoes = e;
    p->cap_echoes = n;
    return 0;
}

/* The batch of an order; what it points to is in the pack's and the model's memory. */
static int read_batch(parallel *p, lr_pack *k, lr_batch *b, bool *hidden, int *n_micro, lr_error *err)
{
    *b = (lr_batch){.n_rows = (int)lr_pack_take(k, 1, p->max_rows)};
    b->n_seqs = (int)lr_pack_take(k, 1, b->n_rows);
    b->n_echoes = (int)lr_pack_take(k, 0, 1 << 24);
    b->n_out = (int)lr_pack_take(k, 0, b->n_rows < p->max_out ? b->n_rows : p->max_out);
    *hidden = lr_pack_take(k, 0, 1) != 0;
    *n_micro = (int)lr_pack_take(k, 1, b->n_echoes > 0 ? 1 : b->n_rows);
    if (k->bad || !p->seqs || (size_t)b->n_echoes > (k->n - k->at) / sizeof(int64_t))
        return lr_fail(err, LR_EFORMAT, "a batch of impossible size");
    /* ids, wanted rows and tables: no more than the order has bytes */
    size_t most = (k->n - k->at) / sizeof(int32_t) + 1;
    int rc = room_for_tables(p, most, err);
    if (rc || (rc = room_for_echoes(p, b->n_echoes, err))) return rc;
    int32_t *tokens = p->tables;
    if ((size_t)b->n_rows + (size_t)b->n_out > most) return lr_fail(err, LR_EFORMAT, "a batch that is cut short");
    take_ids(k, tokens, b->n_rows, 0, p->base.n_vocab - 1);
    if ((rc = read_seqs(p, k, b, (size_t)b->n_rows, err))) return rc;
    const void *out = lr_pack_get(k, (size_t)b->n_out * sizeof(int32_t));
    int32_t last = -1;
    for (int i = 0; i < b->n_out && out; i++) {
        int32_t v;
        memcpy(&v, (const char *)out + (size_t)i * sizeof v, sizeof v);
        if (v <= last || v >= b->n_rows) k->bad = true;
        p->out_all[i] = last = v;
    }
    if (k->bad || k->at != k->n) return lr_fail(err, LR_EFORMAT, "a batch with wanted rows out of range");
    b->tokens = tokens;
    b->out_rows = p->out_all;
    return 0;
}

/* ---- micro-batches ---- */

/* Rows r0 .. r1 - 1 of a batch as a batch of its own; its wanted rows begin at number *out0 of b's. */
static void part_of(parallel *p, const lr_batch *b, int r0, int r1, lr_batch *m, int *out0)
{
    *m = (lr_batch){.n_rows = r1 - r0, .tokens = b->tokens + r0, .seqs = p->micro_seqs, .out_rows = p->out_rows};
    for (int i = 0; i < b->n_seqs; i++) {
        lr_batch_seq s = b->seqs[i];
        int from = s.row > r0 ? s.row : r0, to = s.row + s.n < r1 ? s.row + s.n : r1;
        if (from >= to) continue;
        s.pos += from - s.row;
        s.row = from - r0;
        s.n = to - from;
        p->micro_seqs[m->n_seqs++] = s;
    }
    m->n_echoes = b->n_echoes; /* then this is the whole batch */
    m->echoes = b->echoes;
    *out0 = 0;
    for (int i = 0; i < b->n_out; i++) {
        if (b->out_rows[i] < r0) (*out0)++;
        if (b->out_rows[i] >= r0 && b->out_rows[i] < r1) p->out_rows[m->n_out++] = b->out_rows[i] - r0;
    }
}

/* This stage's share of one micro-batch: rows in, compute, rows on. */
static int run_micro(parallel *p, const lr_batch *b, int r0, int r1, bool hidden, double *busy, lr_error *err)
{
    const lr_place *pl = &lr_parallel__run.place;
    const lr_share *t = p->part;
    size_t in_w = (size_t)t->in_width, width = (size_t)p->own_width;
    lr_batch m;
    int out0, rc = 0;
    part_of(p, b, r0, r1, &m, &out0);
    if (pl->stage > 0) {
        float *in = p->in + (size_t)r0 * in_w;
        m.input = in;
        rc = p->data->ops->recv(p->data, p->data->rank - pl->tp, in, (size_t)m.n_rows * in_w * sizeof *in, err);
    }
    m.logits = p->res + (size_t)(t->partial ? r0 : out0) * width;
    if (hidden && p->hid) m.hidden = p->hid + (size_t)out0 * (size_t)p->base.n_embd;
    if (pl->pp > 1) m.tick = p->data;
    double begin = lr_now();
    if (!rc) rc = p->own->ops->forward(p->own, &m, err);
    *busy += lr_now() - begin;
    if (rc || !t->partial) return rc;
    return p->data->ops->send_start(p->data, p->data->rank + pl->tp, m.logits,
                                    (size_t)m.n_rows * width * sizeof *p->res, err);
}

static int run_all(parallel *p, const lr_batch *b, int n_micro, bool hidden, double *busy, lr_error *err)
{
    int rc = 0;
    *busy = 0;
    for (int i = 0; i < n_micro && !rc; i++) {
        int r0 = (int)((int64_t)b->n_rows * i / n_micro), r1 = (int)((int64_t)b->n_rows * (i + 1) / n_micro);
        rc = run_micro(p, b, r0, r1, hidden, busy, err);
    }
    return rc ? rc : p->data->ops->finish(p->data, err);
}

/* ---- results ---- */

/* A rank other than 0: sends what it has of the results, and its stage's time. */
static int send_results(parallel *p, const lr_batch *b, bool hidden, double busy, lr_error *err)
{
    const lr_place *pl = &lr_parallel__run.place;
    lr_comm *c = p->data;
    size_t bytes = (size_t)b->n_out * (size_t)p->send_width * sizeof *p->res;
    int rc = 0;
    if (bytes > 0) rc = c->ops->send_start(c, 0, p->res, bytes, err);
    if (!rc && p->hid && hidden && b->n_out > 0 && pl->tp_rank == 0)
        rc = c->ops->send_start(c, 0, p->hid, (size_t)b->n_out * (size_t)p->base.n_embd * sizeof *p->hid, err);
    if (!rc && pl->tp_rank == 0) rc = c->ops->send_start(c, 0, &busy, sizeof busy, err);
    return rc ? rc : c->ops->finish(c, err);
}

/* Rank 0: the columns of rank r of the last stage go to their places. */
static int take_columns(parallel *p, const lr_batch *b, int r, int from, int width, lr_error *err)
{
    lr_comm *c = p->data;
    const float *cols = r == 0 ? p->res : p->columns;
    int rc = 0;
    if (width == 0 || b->n_out == 0) return 0;
    if (r > 0)
        rc = c->ops->recv(c, r, b->n_out == 1 ? b->logits + from : p->columns,
                          (size_t)b->n_out * (size_t)width * sizeof *cols, err);
    if (rc || (r > 0 && b->n_out == 1)) return rc;
    for (int i = 0; i < b->n_out; i++)
        memcpy(b->logits + (size_t)i * (size_t)p->base.n_vocab + from, cols + (size_t)i * (size_t)width,
               (size_t)width * sizeof *cols);
    return 0;
}

static int take_results(parallel *p, const lr_batch *b, double *busy, lr_error *err)
{
    const lr_place *pl = &lr_parallel__run.place;
    lr_comm *c = p->data;
    int first = (pl->pp - 1) * pl->tp, rc = 0;
    size_t hidden = (size_t)b->n_out * (size_t)p->base.n_embd * sizeof *b->hidden;
    for (int r = 0; r < pl->tp && !rc; r++) {
        rc = take_columns(p, b, first + r, p->columns_at[r], p->columns_at[r + 1] - p->columns_at[r], err);
        if (rc || r > 0 || !b->hidden || hidden == 0) continue;
        if (first > 0)
            rc = c->ops->recv(c, first, b->hidden, hidden, err);
        else
            memcpy(b->hidden, p->hid, hidden);
    }
    for (int s = 1; s < pl->pp && !rc; s++) {
        double t = 0;
        rc = c->ops->recv(c, s * pl->tp, &t, sizeof t, err);
        *busy += t;
    }
    return rc;
}

/* ---- entry points ---- */

int lr_parallel__forward(lr_model *m, const lr_batch *b, lr_error *err)
{
    parallel *p = (parallel *)m;
    const lr_division *d = &lr_parallel__run;
    double begin = lr_now(), gathering = d->place.group->seconds, busy = 0;
    uint64_t calls = d->place.group->calls, bytes = d->place.group->bytes;
    int n_micro = d->place.pp == 1 ? 1 : b->n_rows / d->micro_rows, rc;
    if (n_micro > 4 * d->place.pp) n_micro = 4 * d->place.pp;
    if (n_micro < 1 || b->n_echoes > 0) n_micro = 1; /* echoes go to rows of other sequences */
    write_batch(p, b, n_micro);
    rc = lr_dist_tell(&p->pack, err);
    if (!rc) rc = run_all(p, b, n_micro, b->hidden != NULL, &busy, err);
    if (!rc) rc = take_results(p, b, &busy, err);
    if (rc) lr_dist_die("forward pass", err); /* the others wait for what does not come */
    lr_parallel_stats *s = &p->stats;
    s->passes++;
    s->micro += (uint64_t)n_micro;
    s->gathers += d->place.group->calls - calls;
    s->bytes += d->place.group->bytes - bytes;
    s->gather += d->place.group->seconds - gathering;
    s->forward += lr_now() - begin;
    s->busy += busy;
    return 0;
}

int lr_parallel__forwarded(parallel *p, lr_pack *k, lr_error *err)
{
    lr_batch b;
    bool hidden;
    int n_micro, rc = read_batch(p, k, &b, &hidden, &n_micro, err);
    double busy;
    if (!rc) rc = run_all(p, &b, n_micro, hidden, &busy, err);
    return rc ? rc : send_results(p, &b, hidden, busy, err);
}
