/* draft.c - a small model that drafts for many sequences together: see spec.h.
 *
 * A slot holds the tokens whose KV it has. What the target rejected is cut off when the next draft is wanted: the slot
 * keeps what it shares with the sequence, computes the rest, and goes on token by token, all jobs in one batch a pass.
 * When blocks are short, slots that wait longest lose theirs; the model's prefix index is not used, so slots of
 * different owners never share anything, forks excepted.
 */
#include "base/dtype.h"
#include "base/mem.h"
#include "spec/spec.h"
#include <math.h>
#include <string.h>
#include <time.h>

enum { MAX_PASSES = LR_SPEC_MAX + 64 };

struct lr_draft_slot {
    lr_draft *d;
    lr_kv_table kv;
    int32_t *ids; /* (cap): kv.computed tokens, and those of the draft that is being made */
    int cap;
    uint64_t used; /* the run that had it last */
    lr_draft_slot *prev, *next;
};

struct lr_draft {
    lr_model *m;
    lr_kv *kv;
    lr_kv_space *space;
    lr_draft_config cfg;
    lr_draft_slot *slots;
    uint64_t run;
    /* the batch */
    int32_t *rows, *out_rows;
    lr_batch_seq *seqs;
    lr_draft_job **jobs;
    int *at; /* logit row of each job in the batch, -1 = none */
    float *logits;
    int n_passes, pass_rows[MAX_PASSES];
    double pass_seconds[MAX_PASSES];
};

/* ---- making ---- */

static void mover_copy(void *user, int g, int dst, int src)
{
    lr_model *m = user;
    m->ops->kv_copy(m, g, dst, src);
}

static void mover_read(void *user, int g, int b, void *dst)
{
    lr_model *m = user;
    m->ops->kv_read(m, g, b, dst);
}

static void mover_write(void *user, int g, int b, const void *src)
{
    lr_model *m = user;
    m->ops->kv_write(m, g, b, src);
}

static int make_pool(lr_draft *d, lr_error *err)
{
    lr_model *m = d->m;
    lr_draft_config *c = &d->cfg;
    if (c->kv_blocks == 0) {
        int64_t tokens = (int64_t)c->context * c->max_seqs;
        if (tokens > 16384) tokens = c->context > 16384 ? c->context : 16384;
        c->kv_blocks = (int)((tokens + c->block_size - 1) / c->block_size) + 1;
    }
    lr_kv_spec spec = {.n_layers = m->n_kv_layers,
                       .layers = m->kv_layers,
                       .type = c->kv_type,
                       .value_type = c->kv_type,
                       .block_size = c->block_size};
    lr_kv_config kc = {.block_size = c->block_size,
                       .n_groups = m->n_groups,
                       .mover = {.user = m, .copy = mover_copy, .read = mover_read, .write = mover_write}};
    for (int g = 0; g < m->n_groups; g++) spec.n_blocks[g] = c->kv_blocks;
    int rc = m->ops->start(m, &spec, c->max_rows, c->max_seqs, err);
    if (rc) return rc;
    for (int g = 0; g < m->n_groups; g++) {
        kc.n_blocks[g] = c->kv_blocks;
        kc.window[g] = m->window[g];
        kc.mover.block_bytes[g] = m->ops->kv_block_bytes(m, g);
    }
    rc = lr_kv_new(&d->kv, &kc, err);
    return rc ? rc : lr_kv_space_get(d->kv, (lr_str){NULL, 0}, (lr_str){NULL, 0}, &d->space, err);
}

int lr_draft_new(lr_draft **out, lr_model *m, const lr_draft_config *cfg, lr_error *err)
{
    lr_draft *d = lr_calloc(1, sizeof *d);
    size_t n;
    if (!d) return lr_fail(err, LR_ENOMEM, "no memory for a draft model");
    d->m = m;
    d->cfg = *cfg;
    lr_draft_config *c = &d->cfg;
    if (c->block_size == 0) c->block_size = 16;
    if (c->context == 0 || c->context > m->n_ctx) c->context = m->n_ctx;
    if (c->common <= 0 || c->common > m->n_vocab) c->common = m->n_vocab;
    d->rows = lr_calloc((size_t)c->max_rows, sizeof *d->rows);
    d->out_rows = lr_calloc((size_t)c->max_seqs, sizeof *d->out_rows);
    d->seqs = lr_calloc((size_t)c->max_seqs, sizeof *d->seqs);
    d->jobs = lr_calloc((size_t)c->max_seqs, sizeof(lr_draft_job *));
    d->at = lr_calloc((size_t)c->max_seqs, sizeof *d->at);
    if (lr_mul((size_t)c->max_seqs, (size_t)m->n_vocab, &n) && lr_mul(n, sizeof(float), &n))
        d->logits = lr_alloc_aligned(n);
    int rc = d->rows && d->out_rows && d->seqs && d->jobs && d->at && d->logits
                 ? make_pool(d, err)
                 : lr_fail(err, LR_ENOMEM, "no memory for drafts of %d sequences", c->max_seqs);
    if (rc) {
        d->m = NULL; /* stays the caller's */
        lr_draft_free(d);
        return rc;
    }
    *out = d;
    return 0;
}

void lr_draft_free(lr_draft *d)
{
    if (!d) return;
    while (d->slots) lr_draft_close(d->slots);
    if (d->space) lr_kv_space_unref(d->kv, d->space);
    if (d->kv) lr_kv_free(d->kv);
    lr_model_free(d->m);
    lr_free(d->rows);
    lr_free(d->out_rows);
    lr_free(d->seqs);
    lr_free(d->jobs);
    lr_free(d->at);
    lr_free_aligned(d->logits);
    lr_free(d);
}

const lr_model *lr_draft_model(const lr_draft *d) { return d->m; }

void lr_draft_memory(const lr_draft *d, size_t *weights, size_t *kv, size_t *work)
{
    d->m->ops->memory(d->m, weights, kv, work);
}

int lr_draft_passes(const lr_draft *d, const int **rows, const double **seconds)
{
    *rows = d->pass_rows;
    *seconds = d->pass_seconds;
    return d->n_passes;
}

int lr_draft_check(const lr_draft *d, lr_error *err) { return lr_kv_check(d->kv, err); }

/* ---- slots ---- */

int lr_draft_open(lr_draft *d, lr_draft_slot **out, lr_error *err)
{
    lr_draft_slot *s = lr_calloc(1, sizeof *s);
    if (!s) return lr_fail(err, LR_ENOMEM, "no memory for a draft");
    s->d = d;
    lr_kv_table_init(d->kv, &s->kv, d->space);
    s->next = d->slots;
    if (d->slots) d->slots->prev = s;
    d->slots = s;
    *out = s;
    return 0;
}

void lr_draft_close(lr_draft_slot *s)
{
    if (!s) return;
    lr_draft *d = s->d;
    lr_kv_table_deinit(d->kv, &s->kv);
    *(s->prev ? &s->prev->next : &d->slots) = s->next;
    if (s->next) s->next->prev = s->prev;
    lr_free(s->ids);
    lr_free(s);
}

static int reserve(lr_draft_slot *s, int n, lr_error *err)
{
    if (n > s->cap) {
        int cap = s->cap * 2 > n ? s->cap * 2 : n + 64;
        int32_t *p = lr_reallocarray(s->ids, (size_t)cap, sizeof *p);
        if (!p) return lr_fail(err, LR_ENOMEM, "no memory for a draft");
        s->ids = p;
        s->cap = cap;
    }
    return lr_kv_table_reserve(s->d->kv, &s->kv, n, err);
}

int lr_draft_fork(lr_draft_slot *s, lr_draft_slot **out, lr_error *err)
{
    lr_draft_slot *f = NULL;
    int n = s->kv.computed, rc = lr_draft_open(s->d, &f, err);
    if (rc) return rc;
    rc = n ? reserve(f, n, err) : 0;
    if (!rc && n) rc = lr_kv_table_fork(s->d->kv, &f->kv, &s->kv, err);
    if (rc) {
        lr_draft_close(f);
        return rc;
    }
    if (n) memcpy(f->ids, s->ids, (size_t)n * sizeof *f->ids);
    *out = f;
    return 0;
}

void lr_draft_drop(lr_draft_slot *s)
{
    if (s) lr_kv_table_drop(s->d->kv, &s->kv);
}

/* Leading tokens that the slot has computed already, at most n. */
static int shared(const lr_draft_slot *s, const int32_t *tokens, int n)
{
    int m = s->kv.computed < n ? s->kv.computed : n, i = 0;
    while (i < m && s->ids[i] == tokens[i]) i++;
    return i;
}

int lr_draft_behind(const lr_draft_slot *s, const int32_t *tokens, int n) { return n - shared(s, tokens, n); }

/* ---- running ---- */

/* The slot that was not used for longest gives its blocks; false if only those of this run have any. */
static bool make_room(lr_draft *d)
{
    lr_draft_slot *old = NULL;
    for (lr_draft_slot *s = d->slots; s; s = s->next)
        if (s->kv.computed > 0 && s->used != d->run && (!old || s->used < old->used)) old = s;
    if (!old) return false;
    lr_kv_table_drop(d->kv, &old->kv);
    return true;
}

/* Blocks for n more rows. */
static bool room_for(lr_draft *d, lr_draft_slot *s, int n)
{
    int group, missing;
    while (!lr_kv_table_grow(d->kv, &s->kv, n, &group, &missing))
        if (!make_room(d)) return false;
    return true;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Puts n of the slot's tokens into the batch; the last one's logits are wanted if `out`. */
static void add(lr_draft *d, lr_batch *b, lr_draft_job *j, int n, bool out)
{
    lr_draft_slot *s = j->slot;
    lr_batch_seq *q = &d->seqs[b->n_seqs];
    *q = (lr_batch_seq){.row = b->n_rows, .n = n, .pos = s->kv.computed};
    for (int g = 0; g < d->m->n_groups; g++) q->table[g] = s->kv.block[g];
    memcpy(d->rows + b->n_rows, s->ids + s->kv.computed, (size_t)n * sizeof *d->rows);
    b->n_rows += n;
    d->at[b->n_seqs] = out ? b->n_out : -1;
    if (out) d->out_rows[b->n_out++] = b->n_rows - 1;
    d->jobs[b->n_seqs++] = j;
}

static int forward(lr_draft *d, lr_batch *b, lr_error *err)
{
    double t = seconds();
    b->tokens = d->rows;
    b->seqs = d->seqs;
    b->out_rows = d->out_rows;
    b->logits = d->logits;
    int rc = d->m->ops->forward(d->m, b, err);
    if (rc) return rc;
    for (int i = 0; i < b->n_seqs; i++) {
        lr_draft_slot *s = d->jobs[i]->slot;
        lr_kv_table_advance(d->kv, &s->kv, s->ids, d->seqs[i].n);
        d->jobs[i]->pending -= d->seqs[i].n;
    }
    if (d->n_passes < MAX_PASSES) {
        d->pass_rows[d->n_passes] = b->n_rows;
        d->pass_seconds[d->n_passes++] = seconds() - t;
    }
    return 0;
}

/* Brings the slot to the sequence: cut to what they share, the rest to be computed. */
static void begin(lr_draft *d, lr_draft_job *j)
{
    lr_draft_slot *s = j->slot;
    lr_error err;
    j->got = 0;
    j->pending = 0;
    j->stalled = j->k <= 0 || j->n + j->k > d->cfg.context || reserve(s, j->n + j->k, &err) != 0;
    if (j->stalled) return;
    int same = shared(s, j->tokens, j->n - 1);
    lr_kv_table_truncate(d->kv, &s->kv, same);
    same = s->kv.computed;
    memcpy(s->ids + same, j->tokens + same, (size_t)(j->n - same) * sizeof *s->ids);
    j->pending = j->n - same;
    for (int i = same; i < j->n; i++) j->stalled = j->stalled || s->ids[i] >= d->m->n_vocab;
}

/* What jobs lack beyond one row, in chunks, until `rows` are spent. A job that is still behind then is stalled. */
static int catch_up(lr_draft *d, lr_draft_job *jobs, int n_jobs, int rows, lr_error *err)
{
    for (bool more = true; more;) {
        lr_batch b = {0};
        more = false;
        for (int i = 0; i < n_jobs; i++) {
            lr_draft_job *j = &jobs[i];
            int n = j->pending - 1, left = d->cfg.max_rows - b.n_rows;
            if (j->stalled || n < 4) continue; /* a few rows go with the first pass */
            if (n > rows) n = rows;
            if (n > left) n = left;
            if (n <= 0 || !room_for(d, j->slot, n)) {
                j->stalled = rows <= 0 || n > 0;
                more = more || (!j->stalled && left <= 0);
                continue;
            }
            add(d, &b, j, n, false);
            rows -= n;
            more = true;
        }
        if (b.n_seqs == 0) break;
        int rc = forward(d, &b, err);
        if (rc) return rc;
    }
    return 0;
}

/* One more token for each job that wants one; *any: there was one. */
static int one_pass(lr_draft *d, lr_draft_job *jobs, int n_jobs, int place, bool *any, lr_error *err)
{
    lr_batch b = {0};
    *any = false;
    for (int i = 0; i < n_jobs; i++) {
        lr_draft_job *j = &jobs[i];
        if (j->stalled || j->k <= place || j->pending < 1) continue;
        if (b.n_seqs >= d->cfg.max_seqs || b.n_rows + j->pending > d->cfg.max_rows ||
            !room_for(d, j->slot, j->pending)) {
            j->stalled = true;
            continue;
        }
        add(d, &b, j, j->pending, true);
    }
    if (b.n_seqs == 0) return 0;
    int rc = forward(d, &b, err);
    if (rc) return rc;
    for (int i = 0; i < b.n_seqs; i++) {
        lr_draft_job *j = d->jobs[i];
        float *x = d->logits + (size_t)d->at[i] * (size_t)d->m->n_vocab;
        int32_t id = 0;
        for (int t = d->cfg.common; t < d->m->n_vocab; t++) x[t] = -INFINITY;
        int go = j->pick(j->user, j, place, x, &id);
        if (go < 0) continue; /* pending is 0: it takes no further part */
        j->out[j->got++] = id;
        if (go > 0 || j->got >= j->k || id >= d->m->n_vocab) continue;
        j->slot->ids[j->slot->kv.computed] = id;
        j->pending = 1;
        *any = true;
    }
    return 0;
}

int lr_draft_run(lr_draft *d, lr_draft_job *jobs, int n_jobs, int rows, lr_error *err)
{
    bool any = true;
    d->n_passes = 0;
    d->run++;
    for (int i = 0; i < n_jobs; i++) {
        jobs[i].slot->used = d->run;
        begin(d, &jobs[i]);
    }
    int rc = catch_up(d, jobs, n_jobs, rows, err);
    for (int place = 0; !rc && any; place++) rc = one_pass(d, jobs, n_jobs, place, &any, err);
    for (int i = 0; i < n_jobs; i++) {
        if (rc) jobs[i].got = 0;
        if (rc) lr_kv_table_drop(d->kv, &jobs[i].slot->kv);
        lr_kv_table_trim(d->kv, &jobs[i].slot->kv);
    }
    return rc;
}
