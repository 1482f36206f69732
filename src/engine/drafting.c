/* drafting.c - drafts that a model makes: a smaller one, the model's own first layers, or heads trained for it. See
 * speculate.h.
 *
 * The drafts of all requests are made together, a pass for each place. The tokens of a draft come from the request's
 * own sampler, as far as it can be asked twice, and its constraint tries them; they stand behind the sequence's tokens.
 *
 * Early exit writes the KV of its layers into the slots that the step's rows will have, so blocks come first; the step
 * then computes these rows in whole, and writes the same once more.
 */
#include "base/mem.h"
#include "engine/speculate_int.h"
#include "model/adapter.h"
#include "sample/row.h"
#include <math.h>
#include <string.h>

enum { CATCH_UP = 256, GRANTED_MOST = 16, HEADS_WIDE = 4, FEATURES_LONG = 256 };

/* ---- choosing tokens ---- */

/* The likeliest other tokens of a place, as long as the chance of each is worth a row. */
static void add_sides(lr_request *r, int place, const float *logits, int n, const uint32_t *mask, int32_t id)
{
    struct lr_spec_req *s = r->spec;
    lr_spec_tree *t = &r->e->spec->items[s->item].sides;
    int32_t ids[LR_SPEC_BRANCHES + 1];
    float x[LR_SPEC_BRANCHES + 1], lse = lr_row_logsumexp(logits, n);
    int want = s->p.branches, got = lr_row_topk(logits, n, want < n ? want : n, ids, x);
    for (int i = 0, left = want - 1; i < got && left > 0 && t->n < LR_SPEC_MAX; i++) {
        if (ids[i] == id || lr_request__is_end(r, ids[i])) continue;
        if (mask && !(mask[ids[i] / 32] >> ids[i] % 32 & 1)) continue;
        if (s->chance * exp((double)(x[i] - lse)) < s->side_bar) break;
        t->token[t->n] = ids[i];
        t->parent[t->n++] = place - 1;
        left--;
    }
}

static int pick(void *user, lr_draft_job *j, int i, float *logits, int32_t *id)
{
    lr_request *r = user;
    struct lr_spec_req *s = r->spec;
    lr_seq *q = r->info.seq;
    lr_error err;
    float none;
    const uint32_t *mask = NULL;
    size_t n_prompt = (size_t)r->info.n_prompt;
    int n_vocab = r->e->model->n_vocab, have = j->slot ? lr_draft_model(r->e->spec->draft)->n_vocab : n_vocab;
    float *row = r->e->spec->row;
    memcpy(row, logits, (size_t)(have < n_vocab ? have : n_vocab) * sizeof *logits); /* the sampler knows other ids */
    for (int t = have; t < n_vocab; t++) row[t] = -INFINITY;
    lr_sample_ctx ctx = {.prompt = q->tokens,
                         .n_prompt = n_prompt,
                         .generated = q->tokens + n_prompt,
                         .n_generated = (size_t)(q->len + i) - n_prompt,
                         .seed = lr_sampler_seed(s->plain),
                         .position = (uint64_t)(q->len + i)};
    if (s->ahead && r->con.mask(r->con.user, &mask, &err) < 0) return -1;
    int rc;
    if (s->dist_now) {
        spec_dist *d = &s->dist[i];
        rc = lr_sampler_draft(s->plain, row, mask, &ctx, SPEC_BEST, d->ids, d->q, &d->n, id, &err);
    } else {
        rc = lr_sampler_draw(s->plain, row, mask, &ctx, -1, id, &none, NULL, &err);
    }
    if (rc || lr_request__is_end(r, *id)) return -1;
    if (s->p.branches > 1) add_sides(r, i, logits, have, mask, *id);
    q->tokens[q->len + i] = *id;
    if (s->ahead) {
        rc = r->con.accept(r->con.user, *id, &err);
        if (rc < 0) return -1;
        if (rc > 0) return 1;
    }
    if (s->bar > 0) s->chance *= exp((double)(logits[*id] - lr_row_logsumexp(logits, have)));
    return s->chance < s->bar;
}

/* ---- jobs ---- */

bool lr_spec__ready(lr_request *r, lr_spec_method m)
{
    struct lr_spec_req *s = r->spec;
    lr_seq *q = r->info.seq;
    lr_error err;
    const lr_engine *e = r->e;
    lr_draft *d = e->spec->draft;
    if (m == LR_SPEC_HEADS) return s->hidden && s->hidden_at == q->kv.computed && q->len == q->kv.computed + 1;
    if (!lr_spec_has_passes(m)) return true;
    if (m == LR_SPEC_EXIT && (s->exit < 0 || r->granted > GRANTED_MOST)) return false;
    if (m == LR_SPEC_EAGLE && (!e->spec->eagle || !q->draft || r->granted != 1 || !lr_draft_knows(q->draft, q->len)))
        return false;
    if (m == LR_SPEC_DRAFT && (!d || e->spec->eagle || (!q->draft && lr_spec__open_draft(r->e, q, -1, &err))))
        return false;
    if (s->plain) return true;
    if (s->p.distribution && !s->dist && !(s->dist = lr_calloc(LR_SPEC_MAX, sizeof *s->dist))) return false;
    return lr_sampler_copy_plain(&s->plain, r->sampler, &err) == 0;
}

/* Jobs for the items of a method (and exit); returns how many. */
static int open_jobs(lr_engine *e, lr_spec_method m, int exit)
{
    struct lr_spec_state *st = e->spec;
    lr_error err;
    int n = 0;
    for (int i = 0; i < st->n_items; i++) {
        struct lr_spec_item *it = &st->items[i];
        lr_request *r = it->r;
        struct lr_spec_req *s = r->spec;
        lr_seq *q = r->info.seq;
        if (it->choice.method != m || it->pace.k <= 0 || (m == LR_SPEC_EXIT && s->exit != exit)) continue;
        s->dist_now = s->p.distribution && s->dist && !lr_sampler_is_greedy(r->sampler);
        s->ahead = r->con.mask && r->con.accept && r->con.ahead && r->con.ahead(r->con.user, true, &err) == 0;
        s->chance = 1;
        s->bar = s->side_bar = it->fixed ? 0 : it->pace.bar;
        s->item = i;
        if (m == LR_SPEC_EXIT && q->len > s->n_listed) {
            lr_shortlist_see(&s->list, q->tokens + s->n_listed, q->len - s->n_listed);
            s->n_listed = q->len;
        }
        it->sides.n = 0;
        st->job_req[n] = r;
        st->jobs[n++] = (lr_draft_job){.slot = m == LR_SPEC_EXIT ? NULL : q->draft,
                                       .tokens = q->tokens,
                                       .n = q->len,
                                       .k = it->pace.k,
                                       .pick = pick,
                                       .user = r,
                                       .out = it->choice.tokens};
    }
    return n;
}

static void close_jobs(lr_engine *e, int n, double seconds, bool failed)
{
    struct lr_spec_state *st = e->spec;
    lr_error err;
    for (int i = 0; i < n; i++) {
        lr_request *r = st->job_req[i];
        r->info.spec.draft_time += seconds / n;
        st->items[r->spec->item].pace.k = failed ? 0 : st->jobs[i].got;
        if (r->spec->ahead && r->con.ahead(r->con.user, false, &err)) lr_request__fail(r, &err);
    }
    if (failed) e->metrics.spec_failed++;
}

/* Requests whose features have waited for long: their rows are run although no draft is wanted. */
static int open_waiting(lr_engine *e, int n)
{
    struct lr_spec_state *st = e->spec;
    const req_list *lists[] = {&e->running, &e->started};
    for (int l = 0; l < 2; l++)
        for (int i = 0; i < lists[l]->n && n < e->cfg.max_seqs; i++) {
            lr_request *r = lists[l]->at[i];
            lr_seq *q = r->info.seq;
            bool has = false;
            if (!r->spec || !q->draft || lr_draft_waiting(q->draft) < FEATURES_LONG) continue;
            for (int k = 0; k < n; k++) has = has || st->jobs[k].slot == q->draft;
            if (!has) st->jobs[n++] = (lr_draft_job){.slot = q->draft, .tokens = q->tokens, .n = q->len, .user = r};
        }
    return n;
}

static void run_draft(lr_engine *e)
{
    struct lr_spec_state *st = e->spec;
    lr_spec_method m = st->eagle ? LR_SPEC_EAGLE : LR_SPEC_DRAFT;
    lr_error err;
    int n = st->draft ? open_jobs(e, m, 0) : 0, all = st->eagle ? open_waiting(e, n) : n;
    if (all == 0) return;
    double t = lr_engine__now(e);
    int rows = e->step.budget > CATCH_UP ? CATCH_UP : e->step.budget;
    if (all > n) rows = e->cfg.max_batch_tokens;
    int rc = lr_draft_run(st->draft, st->jobs, all, rows > 64 ? rows : 64, &err);
    const int *pass_rows;
    const double *pass_time;
    for (int i = 0, k = lr_draft_passes(st->draft, &pass_rows, &pass_time); i < k; i++)
        lr_pace_saw_pass(&st->pace, m, pass_rows[i], n, pass_time[i]);
    close_jobs(e, n, lr_engine__now(e) - t, rc != 0);
}

/* ---- early exit ---- */

/* Blocks for the rows of a job; it gets as many places as there is room for. */
static void make_room(lr_engine *e, lr_draft_job *j, const lr_request *r)
{
    int group, missing;
    while (j->k > 0 && !lr_kv_table_grow(e->kv, &r->info.seq->kv, r->granted + j->k - 1, &group, &missing)) j->k /= 2;
    j->pending = j->k > 0 ? r->granted : 0;
}

/* The shortlist of a pass; NULL: one of its texts needs all. */
static const uint32_t *exit_list(struct lr_spec_state *st, const int *jobs, int n)
{
    lr_shortlists_clear(&st->lists);
    for (int i = 0; i < n; i++)
        if (!lr_shortlists_join(&st->lists, &st->job_req[jobs[i]]->spec->list)) return NULL;
    return st->lists.pass;
}

/* One more token for each job that goes on; false: none does, or the model failed. */
static bool exit_pass(lr_engine *e, const struct lr_spec_exit *x, int n, int place, int *rc)
{
    struct lr_spec_state *st = e->spec;
    lr_error err;
    lr_batch b = {.tokens = e->rows, .seqs = e->batch, .out_rows = e->out_rows, .logits = e->logits};
    int n_vocab = e->model->n_vocab, at[LR_PACE_ROWS];
    for (int i = 0; i < n && b.n_out < LR_PACE_ROWS && b.n_out < e->max_out; i++) {
        lr_draft_job *j = &st->jobs[i];
        const lr_seq *q = st->job_req[i]->info.seq;
        int pos = place ? q->len + place - 1 : q->kv.computed;
        if (j->pending < 1 || j->k <= place || b.n_rows + j->pending > x->max_rows) continue;
        lr_batch_seq *s = &e->batch[b.n_seqs];
        *s = (lr_batch_seq){.row = b.n_rows, .n = j->pending, .pos = pos, .lora = lr_adapter_lora(q->lora)};
        for (int g = 0; g < e->model->n_groups; g++) s->table[g] = q->kv.block[g];
        memcpy(e->rows + b.n_rows, q->tokens + pos, (size_t)j->pending * sizeof *e->rows);
        b.n_rows += j->pending;
        at[b.n_seqs++] = i;
        e->out_rows[b.n_out++] = b.n_rows - 1;
        j->pending = 0;
    }
    if (b.n_seqs == 0) return false;
    b.shortlist = exit_list(st, at, b.n_seqs);
    double t = lr_engine__now(e);
    if ((*rc = lr_part_run(x->part, &b, &err))) return false;
    lr_pace_saw_pass(&st->pace, LR_SPEC_EXIT, b.n_rows, b.n_rows, lr_engine__now(e) - t);
    for (int i = 0; i < b.n_seqs; i++) {
        lr_draft_job *j = &st->jobs[at[i]];
        int32_t id;
        int go = pick(j->user, j, place, e->logits + (size_t)i * (size_t)n_vocab, &id);
        if (go < 0) continue;
        j->out[j->got++] = id;
        j->pending = go == 0 && j->got < j->k;
    }
    return true;
}

static void run_exit(lr_engine *e, int exit)
{
    struct lr_spec_state *st = e->spec;
    int n = open_jobs(e, LR_SPEC_EXIT, exit), rc = 0;
    if (n == 0) return;
    double t = lr_engine__now(e);
    for (int i = 0; i < n; i++) make_room(e, &st->jobs[i], st->job_req[i]);
    for (int place = 0; exit_pass(e, &st->exits[exit], n, place, &rc);) place++;
    close_jobs(e, n, lr_engine__now(e) - t, rc != 0);
}

/* ---- heads ---- */

/* The best guesses of a place, with their chances; those that would end the request have none. */
static void guess(const lr_request *r, const float *logits, int wide, int32_t *ids, float *chance)
{
    int n = r->e->model->n_vocab, got = lr_row_topk(logits, n, wide < n ? wide : n, ids, chance);
    float lse = lr_row_logsumexp(logits, n);
    for (int i = 0; i < wide; i++) chance[i] = i < got && !lr_request__is_end(r, ids[i]) ? expf(chance[i] - lse) : 0;
}

/* The tree of one request, whose row is the i-th of n. */
static void grow_tree(lr_engine *e, struct lr_spec_item *it, int i, int n)
{
    struct lr_spec_state *st = e->spec;
    int32_t ids[LR_HEADS_MAX * LR_SPEC_BRANCHES];
    float chance[LR_HEADS_MAX * LR_SPEC_BRANCHES];
    int wide = it->r->spec->p.branches ? it->r->spec->p.branches : HEADS_WIDE, places = lr_heads_count(st->heads);
    if (!e->model->echoes) wide = 1;
    for (int p = 0; p < places; p++)
        guess(it->r, st->heads_logits + (size_t)(p * n + i) * (size_t)e->model->n_vocab, wide, ids + (size_t)p * wide,
              chance + (size_t)p * wide);
    lr_spec_tree_best(&it->sides, ids, chance, places, wide, it->most, it->fixed ? 0 : it->pace.bar);
    it->pace.k = it->sides.n;
}

static void run_heads(lr_engine *e)
{
    struct lr_spec_state *st = e->spec;
    size_t width = (size_t)e->model->n_embd;
    lr_error err;
    for (int from = 0; from < st->n_items;) {
        int at[LR_PACE_ROWS], n = 0;
        double t = lr_engine__now(e);
        for (; from < st->n_items && n < st->heads_most; from++) {
            struct lr_spec_item *it = &st->items[from];
            if (it->choice.method != LR_SPEC_HEADS || it->pace.k <= 0) continue;
            memcpy(st->heads_rows + (size_t)n * width, it->r->spec->hidden, width * sizeof(float));
            at[n++] = from;
        }
        if (n == 0) return;
        bool failed = lr_heads_run(st->heads, st->heads_rows, n, st->heads_logits, &err) != 0;
        double seconds = lr_engine__now(e) - t;
        if (failed)
            e->metrics.spec_failed++;
        else
            lr_pace_saw_pass(&st->pace, LR_SPEC_HEADS, n, n, seconds);
        for (int i = 0; i < n; i++) {
            struct lr_spec_item *it = &st->items[at[i]];
            it->r->info.spec.draft_time += seconds / n;
            it->sides.n = it->pace.k = 0;
            if (!failed) grow_tree(e, it, i, n);
        }
    }
}

void lr_spec__run_models(lr_engine *e)
{
    run_draft(e);
    if (e->spec->heads) run_heads(e);
    for (int i = 0; i < e->spec->n_exits; i++) run_exit(e, i);
}
