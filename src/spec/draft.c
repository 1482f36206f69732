/* draft.c - a small model that drafts for many sequences together: see spec.h.
 *
 * A slot holds the tokens whose KV it has. What the target rejected is cut off when the next draft is wanted: the slot
 * keeps what it shares with the sequence, computes the rest, and goes on token by token, all jobs in one batch a pass.
 * A draft that goes on from features (model/eagle.h) has row i of a sequence from feature i and token i + 1. Features
 * come as the target computes them, and wait in the slot until their rows are run: when a draft is wanted, or when they
 * are many. What the target did not compute for this sequence (a prompt that the prefix index had) a draft only has if
 * it is a fork of another sequence's (engine/inherit.c); else its rows begin behind. Rows of a draft stand in for
 * features with its own hidden rows, and are run again with those of the target.
 *
 * When blocks are short, slots that wait longest lose theirs; the model's prefix index is not used, so slots of
 * different owners never share anything, forks excepted.
 */
#include "base/dtype.h"
#include "base/clock.h"
#include "base/mem.h"
#include "spec/spec.h"
#include <math.h>
#include <string.h>

enum { MAX_PASSES = LR_SPEC_MAX + 64, FEATURES_MOST = 4096 /* rows that wait, at most */ };

struct lr_draft_slot {
    lr_draft *d;
    lr_kv_table kv;
    int32_t *ids; /* (cap): kv.computed tokens, and those of the draft that is being made */
    int cap;
    lr_shortlist list;
    uint64_t used; /* the run that had it last */
    /* with features: row i is of position base + i and token base + i + 1 */
    int base, sure; /* `sure` rows are computed, from the target's features */
    float *in;      /* (cap_in, width) n_in input rows that are not, from row `sure` on */
    int n_in, cap_in;
    float *own; /* (width) input of the row behind those, as the draft has it */
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
    lr_shortlists lists;
    int width;             /* of input rows; 0 = no features */
    float *input, *hidden; /* (max_rows, width), (max_seqs, width) */
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
    if (c->features) {
        d->width = m->n_embd;
        d->input = lr_alloc_aligned((size_t)c->max_rows * (size_t)d->width * sizeof(float));
        d->hidden = lr_alloc_aligned((size_t)c->max_seqs * (size_t)d->width * sizeof(float));
    }
    bool good = d->rows && d->out_rows && d->seqs && d->jobs && d->at && d->logits;
    int rc = good && (!c->features || (d->input && d->hidden))
                 ? make_pool(d, err)
                 : lr_fail(err, LR_ENOMEM, "no memory for drafts of %d sequences", c->max_seqs);
    if (!rc) rc = lr_shortlists_new(&d->lists, m->vocab, m->n_vocab, c->shortlist, err);
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
    lr_shortlists_free(&d->lists);
    lr_free_aligned(d->logits);
    lr_free_aligned(d->input);
    lr_free_aligned(d->hidden);
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
    s->list.of = &d->lists;
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
    lr_shortlist_free(&s->list);
    lr_free(s->ids);
    lr_free(s->in);
    lr_free(s->own);
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

/* Room for n input rows. */
static bool reserve_in(lr_draft_slot *s, int n)
{
    size_t width = (size_t)s->d->width;
    if (!s->own && !(s->own = lr_malloc(width * sizeof *s->own))) return false;
    if (n <= s->cap_in) return true;
    int cap = s->cap_in * 2 > n ? s->cap_in * 2 : n + 32;
    float *p = lr_reallocarray(s->in, (size_t)cap, width * sizeof *p);
    if (!p) return false;
    s->in = p;
    s->cap_in = cap;
    return true;
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
    lr_shortlist_copy(&f->list, &s->list);
    f->base = s->base;
    f->sure = s->sure;
    if (s->n_in && reserve_in(f, s->n_in)) {
        memcpy(f->in, s->in, (size_t)s->n_in * (size_t)s->d->width * sizeof *f->in);
        f->n_in = s->n_in;
    }
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

int lr_draft_behind(const lr_draft_slot *s, const int32_t *tokens, int n)
{
    if (s->d->width) return n - 1 - s->base > s->sure ? n - 1 - s->base - s->sure : 0;
    return n - shared(s, tokens, n);
}

int lr_draft_shares(const lr_draft_slot *s, const int32_t *tokens, int n, int *base)
{
    *base = s->base;
    if (!s->d->width) return shared(s, tokens, n);
    int i = 0;
    while (i < s->sure && i < s->kv.computed && s->base + i + 1 < n && s->ids[i] == tokens[s->base + i + 1]) i++;
    return i;
}

int lr_draft_computed(const lr_draft_slot *s)
{
    return s->d->width && s->sure < s->kv.computed ? s->sure : s->kv.computed;
}

/* ---- features ---- */

/* The rows from `row` on are to come again; if row is none of these, all begin anew at position pos. */
static void forget(lr_draft_slot *s, int row, int pos)
{
    if (row < 0 || row > s->sure + s->n_in) {
        s->base = pos;
        s->sure = s->n_in = 0;
    } else if (row < s->sure) {
        s->sure = row;
        s->n_in = 0;
    } else {
        s->n_in = row - s->sure;
    }
}

void lr_draft_adopt(lr_draft_slot *s, int pos, int32_t token)
{
    forget(s, pos - s->base, pos);
    if (s->sure > 0) s->ids[s->sure - 1] = token;
}

bool lr_draft_feed(lr_draft_slot *s, int pos, int n, const float *in)
{
    size_t width = (size_t)s->d->width;
    forget(s, s->sure + s->n_in > 0 ? pos - s->base : -1, pos);
    if (n > FEATURES_MOST) { /* the last ones */
        in += (size_t)(n - FEATURES_MOST) * width;
        pos += n - FEATURES_MOST;
        n = FEATURES_MOST;
        forget(s, -1, pos);
    }
    if (s->n_in + n > FEATURES_MOST) forget(s, -1, pos);
    if (!reserve_in(s, s->n_in + n)) {
        forget(s, -1, pos + n);
        return false;
    }
    memcpy(s->in + (size_t)s->n_in * width, in, (size_t)n * width * sizeof *in);
    s->n_in += n;
    return true;
}

bool lr_draft_knows(const lr_draft_slot *s, int n)
{
    int rows = n - 1 - s->base;
    return rows > s->sure && rows == s->sure + s->n_in;
}

int lr_draft_waiting(const lr_draft_slot *s) { return s->n_in; }

/* Brings the slot to the sequence: what it has of features is run, as far as it is of this text. */
static void begin_features(lr_draft *d, lr_draft_job *j)
{
    lr_draft_slot *s = j->slot;
    lr_error err;
    int rows = j->n - 1 - s->base, same = 0, most = s->sure + s->n_in;
    if (j->k == 0 && rows > most) rows = most;
    while (same < s->sure && same < rows && s->ids[same] == j->tokens[s->base + same + 1]) same++;
    if (same < s->sure || s->kv.computed < s->sure) { /* another text, or its blocks are gone: what waits is left */
        s->base += s->sure;
        rows -= s->sure;
        s->sure = 0;
    }
    lr_kv_table_truncate(d->kv, &s->kv, s->sure);
    s->sure = s->kv.computed < s->sure ? s->kv.computed : s->sure;
    j->stalled = j->k < 0 || rows <= s->sure || rows > s->sure + s->n_in || rows + j->k > d->cfg.context ||
                 reserve(s, rows + j->k, &err) != 0;
    if (j->stalled) return;
    j->pending = rows - s->sure;
    memcpy(s->ids + s->sure, j->tokens + s->base + 1 + s->sure, (size_t)j->pending * sizeof *s->ids);
    lr_shortlist_see(&s->list, s->ids + s->sure, j->pending);
}

/* Input rows for n rows of the slot from its kv.computed on. */
static void put_input(lr_draft *d, const lr_draft_slot *s, int n, float *to)
{
    size_t width = (size_t)d->width;
    int have = s->sure + s->n_in - s->kv.computed, m = n < have ? n : have < 0 ? 0 : have;
    if (m > 0) memcpy(to, s->in + (size_t)(s->kv.computed - s->sure) * width, (size_t)m * width * sizeof *to);
    if (m < n) memcpy(to + (size_t)m * width, s->own, width * sizeof *to);
}

/* Rows were computed: what was waiting for them goes, and what is behind the last one is kept. */
static void took_input(lr_draft *d, lr_draft_slot *s, int at)
{
    size_t width = (size_t)d->width;
    int n = s->kv.computed - s->sure;
    if (n > s->n_in) n = s->n_in;
    if (n > 0) {
        s->n_in -= n;
        s->sure += n;
        memmove(s->in, s->in + (size_t)n * width, (size_t)s->n_in * width * sizeof *s->in);
    }
    if (at >= 0) memcpy(s->own, d->hidden + (size_t)at * width, width * sizeof *s->own);
}

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

static double seconds(const lr_draft *d) { return d->cfg.now ? d->cfg.now(d->cfg.now_user) : lr_now(); }

/* Puts n of the slot's tokens into the batch; the last one's logits are wanted if `out`. */
static void add(lr_draft *d, lr_batch *b, lr_draft_job *j, int n, bool out)
{
    lr_draft_slot *s = j->slot;
    lr_batch_seq *q = &d->seqs[b->n_seqs];
    *q = (lr_batch_seq){.row = b->n_rows, .n = n, .pos = s->kv.computed};
    for (int g = 0; g < d->m->n_groups; g++) q->table[g] = s->kv.block[g];
    memcpy(d->rows + b->n_rows, s->ids + s->kv.computed, (size_t)n * sizeof *d->rows);
    if (d->width) put_input(d, s, n, d->input + (size_t)b->n_rows * (size_t)d->width);
    b->n_rows += n;
    d->at[b->n_seqs] = out ? b->n_out : -1;
    if (out) d->out_rows[b->n_out++] = b->n_rows - 1;
    d->jobs[b->n_seqs++] = j;
}

static int forward(lr_draft *d, lr_batch *b, lr_error *err)
{
    double t = seconds(d);
    b->tokens = d->rows;
    b->seqs = d->seqs;
    b->out_rows = d->out_rows;
    b->logits = d->logits;
    b->input = d->input;
    b->hidden = d->hidden;
    int rc = d->m->ops->forward(d->m, b, err);
    if (rc) return rc;
    for (int i = 0; i < b->n_seqs; i++) {
        lr_draft_slot *s = d->jobs[i]->slot;
        lr_kv_table_advance(d->kv, &s->kv, s->ids, d->seqs[i].n);
        if (d->width) took_input(d, s, d->at[i]);
        d->jobs[i]->pending -= d->seqs[i].n;
    }
    if (d->n_passes < MAX_PASSES) {
        d->pass_rows[d->n_passes] = b->n_rows;
        d->pass_seconds[d->n_passes++] = seconds(d) - t;
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
    if (d->width) {
        begin_features(d, j);
        return;
    }
    j->stalled = j->k <= 0 || j->n + j->k > d->cfg.context || reserve(s, j->n + j->k, &err) != 0;
    if (j->stalled) return;
    int same = shared(s, j->tokens, j->n - 1);
    lr_kv_table_truncate(d->kv, &s->kv, same);
    same = s->kv.computed;
    memcpy(s->ids + same, j->tokens + same, (size_t)(j->n - same) * sizeof *s->ids);
    j->pending = j->n - same;
    lr_shortlist_see(&s->list, s->ids + same, j->pending);
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

/* The shortlist of a pass; NULL: one of its texts needs all. */
static const uint32_t *pass_list(lr_draft *d, int n)
{
    lr_shortlists_clear(&d->lists);
    for (int i = 0; i < n; i++)
        if (!lr_shortlists_join(&d->lists, &d->jobs[i]->slot->list)) return NULL;
    return d->lists.pass;
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
    b.shortlist = pass_list(d, b.n_seqs);
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
