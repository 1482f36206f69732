/* ahead.c - the next step's forward pass, begun as soon as this step's tokens are known, on devices that compute while
 * the host goes on (lr_model.halves).
 *
 * What a step's tokens lead to (masks, stop strings, text, hooks of policies, programs that are resumed, what they
 * stream) takes the host's time; meanwhile the device may compute what comes next if it is what it looks like: all that
 * runs generates, and each request goes on with the token it has just got. So that pass is launched on a guess, and
 * nothing depends on it. The next step is put together as ever, from what all hooks and programs said; if its rows are
 * among those that were launched (same requests, places, tokens, blocks), their results are taken, and rows of requests
 * that have ended, were cancelled or gave way are left lying. If it is another step the pass counts for nothing, and
 * the step is computed. Either way the tokens are those without this.
 *
 * A row that nobody wanted has written its keys and values to a slot behind its sequence's computed ones, in a block
 * that was the sequence's own. Whoever has the block afterwards writes a slot before it reads it, and does so behind
 * that pass, on the device's one stream.
 */
#include "base/mem.h"
#include "engine/speculate_int.h"
#include "model/adapter.h"
#include <string.h>

enum { MOST_MISSES = 6 };

struct lr_ahead {
    bool under_way;
    lr_batch b;
    int32_t *rows, *out_rows; /* (max_seqs) */
    lr_batch_seq *seqs;       /* (max_seqs) */
    struct lr_ahead_row {
        uint64_t request;
        int32_t block[LR_KV_GROUPS]; /* that it writes to */
    } * at;                          /* (max_seqs) */
    int misses;                      /* in a row */
    int wait;                        /* steps before the next guess: guesses that fail cost a pass each */
};

static bool make(lr_engine *e)
{
    size_t n = (size_t)e->cfg.max_seqs;
    struct lr_ahead *a = e->ahead;
    if (a) return a->at != NULL;
    a = e->ahead = lr_calloc(1, sizeof *a);
    if (!a) return false;
    a->rows = lr_calloc(n, sizeof *a->rows);
    a->out_rows = lr_calloc(n, sizeof *a->out_rows);
    a->seqs = lr_calloc(n, sizeof *a->seqs);
    if (a->rows && a->out_rows && a->seqs) a->at = lr_calloc(n, sizeof *a->at);
    return a->at != NULL;
}

void lr_engine__free_ahead(lr_engine *e)
{
    struct lr_ahead *a = e->ahead;
    if (!a) return;
    lr_free(a->rows);
    lr_free(a->out_rows);
    lr_free(a->seqs);
    lr_free(a->at);
    lr_free(a);
    e->ahead = NULL;
}

/* One row a sequence, each with logits. */
static bool decodes(const lr_batch *b)
{
    return b->n_rows == b->n_seqs && b->n_out == b->n_rows && !b->n_echoes && !b->hidden && !b->features;
}

bool lr_engine__goes_on(const lr_engine *e, const lr_batch *b)
{
    if (!e->model->halves || e->record || e->exact || e->n_deferred > 0) return false;
    if (!decodes(b) || !b->draws || b->draws->n != b->n_seqs) return false;
    if (e->running.n + e->started.n != b->n_seqs) return false;
    return e->waiting.n == 0 || b->n_seqs == e->cfg.max_seqs;
}

static bool room(const lr_engine *e, int n)
{
    for (int g = 0; g < e->model->n_groups; g++)
        if (lr_kv_available(e->kv, g) < n) return false; /* nobody gives way for a guess */
    return true;
}

/* Adds the row of a token at `pos`, which comes behind `before` others that are not computed yet. False: no place. */
static bool add(lr_engine *e, lr_request *r, int32_t token, int pos, int before)
{
    struct lr_ahead *a = e->ahead;
    lr_seq *q = r->info.seq;
    lr_error err;
    int group, missing, k = a->b.n_rows;
    if (q->kv.computed + before != pos || lr_kv_table_reserve(e->kv, &q->kv, pos + 1, &err) ||
        !lr_kv_table_grow(e->kv, &q->kv, before + 1, &group, &missing))
        return false;
    a->rows[k] = token;
    a->out_rows[k] = k;
    a->seqs[k] = (lr_batch_seq){.row = k, .n = 1, .pos = pos, .lora = lr_adapter_lora(q->lora)};
    a->at[k].request = r->info.id;
    for (int g = 0; g < e->model->n_groups; g++) {
        a->seqs[k].table[g] = q->kv.block[g];
        a->at[k].block[g] = q->kv.block[g][pos / e->cfg.block_size];
    }
    a->b.n_rows = a->b.n_seqs = a->b.n_out = k + 1;
    return true;
}

/* The request's next row, if it will have one. */
static bool add_next(lr_engine *e, lr_request *r)
{
    const lr_seq *q = r->info.seq;
    if (r->spec) return false;
    if (r->want_cancel || !lr_engine__active(r)) return true;
    if (r->granted == 0) return add(e, r, q->tokens[q->len - 1], q->len - 1, 0); /* has been dealt with */
    if (!r->drawn || r->drawn->rc) return false;
    if (lr_request__is_end(r, r->drawn->id) || r->info.n_generated + 1 >= r->info.max_tokens || q->len + 1 >= r->limit)
        return true;
    return add(e, r, r->drawn->id, q->len, 1);
}

void lr_engine__launch_ahead(lr_engine *e, const lr_batch *b)
{
    lr_error err;
    if (!make(e)) return;
    struct lr_ahead *a = e->ahead;
    if (a->wait > 0) {
        a->wait--;
        return;
    }
    if (!room(e, b->n_seqs)) return;
    a->b = (lr_batch){.tokens = a->rows, .seqs = a->seqs, .out_rows = a->out_rows};
    for (int i = 0; i < b->n_seqs; i++)
        if (!add_next(e, e->batch_req[i])) return;
    /* an error is the device's, and the next step's to say */
    a->under_way = a->b.n_rows > 0 && e->model->ops->launch(e->model, &a->b, &err) == 0;
}

static bool same_row(const lr_engine *e, const lr_batch *b, int i, int k)
{
    const struct lr_ahead *a = e->ahead;
    const lr_batch_seq *s = &b->seqs[i], *t = &a->seqs[k];
    if (s->pos != t->pos || s->lora != t->lora || b->tokens[s->row] != a->rows[k]) return false;
    for (int g = 0; g < e->model->n_groups; g++)
        if (s->table[g][s->pos / e->cfg.block_size] != a->at[k].block[g]) return false;
    return true;
}

/* Which row of the launched pass each of b's sequences has: in `out` of its request, if `take`. Both are in one order.
 */
static bool find_rows(lr_engine *e, const lr_batch *b, bool take)
{
    const struct lr_ahead *a = e->ahead;
    int k = 0;
    for (int i = 0; i < b->n_seqs; i++, k++) {
        lr_request *r = e->batch_req[i];
        while (r && k < a->b.n_rows && a->at[k].request != r->info.id) k++;
        if (!r || k == a->b.n_rows || !same_row(e, b, i, k)) return false;
        if (take) r->out = k;
    }
    return true;
}

bool lr_engine__landed(lr_engine *e, lr_batch *b)
{
    struct lr_ahead *a = e->ahead;
    if (!a || !a->under_way) return false;
    a->under_way = false;
    if (!decodes(b) || !find_rows(e, b, false)) {
        a->misses += a->misses < MOST_MISSES;
        a->wait = (1 << a->misses) - 1;
        e->metrics.ahead_lost++;
        return false;
    }
    find_rows(e, b, true);
    a->misses = 0;
    float *logits = b->logits;
    *b = a->b;
    b->logits = logits;
    e->metrics.ahead_taken++;
    return true;
}
