/* speculate.c - making drafts and judging them: see speculate.h. */
#include "engine/record.h"
#include "engine/speculate_int.h"
#include "base/mem.h"
#include "sample/row.h"
#include <string.h>

enum { K_FREE = 16, K_MODEL = 8, OWN_MAX = 1 << 20, EXIT_ROWS = 256, HEADS_ROWS = 32 };

lr_spec_params lr_spec_defaults(lr_spec_method m)
{
    return (lr_spec_params){.method = m, .min_match = 2, .max_match = 8};
}

/* ---- making ---- */

static int make_state(lr_engine *e, lr_error *err)
{
    if (e->spec) return 0;
    size_t n = (size_t)e->cfg.max_seqs;
    struct lr_spec_state *s = lr_calloc(1, sizeof *s);
    if (!s) return lr_fail(err, LR_ENOMEM, "no memory for drafts");
    s->items = lr_calloc(n, sizeof *s->items);
    s->open = lr_calloc(n, sizeof *s->open);
    s->jobs = lr_calloc(n, sizeof *s->jobs);
    s->job_req = lr_calloc(n, sizeof(lr_request *));
    e->spec = s;
    if (s->items && s->open && s->jobs && s->job_req) return 0;
    lr_spec__free_state(e);
    return lr_fail(err, LR_ENOMEM, "no memory for drafts of %d requests", e->cfg.max_seqs);
}

void lr_spec__free_state(lr_engine *e)
{
    struct lr_spec_state *s = e->spec;
    if (!s) return;
    lr_spec__forget(e);
    lr_draft_free(s->draft);
    lr_free_aligned(s->features);
    lr_free_aligned(s->eagle_in);
    lr_heads_free(s->heads);
    lr_free_aligned(s->heads_logits);
    lr_free_aligned(s->heads_rows);
    for (int i = 0; i < s->n_exits; i++) lr_part_free(s->exits[i].part);
    lr_shortlists_free(&s->lists);
    lr_free(s->items);
    lr_free(s->open);
    lr_free(s->jobs);
    lr_free(s->job_req);
    lr_free(s->row);
    lr_spec__free_branches(s);
    lr_free(s);
    e->spec = NULL;
}

static int make_row(lr_engine *e, lr_error *err)
{
    if (!e->spec->row) e->spec->row = lr_calloc((size_t)e->model->n_vocab, sizeof *e->spec->row);
    return e->spec->row ? 0 : lr_fail(err, LR_ENOMEM, "no memory for a row of logits");
}

/* The part of the model that leaves after `layers` layers; made when it is first asked for. */
static int find_exit(lr_engine *e, int layers, int *exit, lr_error *err)
{
    struct lr_spec_state *st = e->spec;
    for (*exit = 0; *exit < st->n_exits; ++*exit)
        if (st->exits[*exit].layers == layers) return 0;
    if (st->n_exits == SPEC_EXITS)
        return lr_fail(err, LR_EFULL, "early exit: %d numbers of layers are in use already", SPEC_EXITS);
    if (!st->lists.any && lr_shortlists_new(&st->lists, e->model->vocab, e->model->n_vocab, 0, err)) return LR_ENOMEM;
    int rows = e->cfg.max_batch_tokens < EXIT_ROWS ? e->cfg.max_batch_tokens : EXIT_ROWS;
    int rc = lr_part_exit(&st->exits[*exit].part, e->model, layers, rows, e->max_out < rows ? e->max_out : rows, err);
    if (rc) return rc;
    st->exits[*exit].layers = layers;
    st->exits[*exit].max_rows = rows;
    st->n_exits++;
    return make_row(e, err);
}

/* What the engine has goes for the draft where its own is not said. */
static void fill_draft(const lr_engine *e, lr_draft_config *c)
{
    c->now = e->cfg.now;
    c->now_user = e->cfg.now_user;
    if (c->block_size == 0) c->block_size = e->cfg.block_size;
    if (c->kv_type == 0) c->kv_type = e->cfg.kv_type;
    if (c->max_rows == 0) c->max_rows = e->cfg.max_batch_tokens > 64 ? e->cfg.max_batch_tokens : 64;
    if (c->max_seqs == 0) c->max_seqs = e->cfg.max_seqs;
    if (c->context == 0) c->context = e->context;
    if (c->kv_blocks == 0 && c->block_size == e->cfg.block_size) c->kv_blocks = e->cfg.kv_blocks[0] + 1;
}

static int can_draft(lr_engine *e, lr_error *err)
{
    int rc = lr_engine__not_in_step(e, err);
    if (!rc) rc = make_state(e, err);
    if (!rc && e->spec->draft) rc = lr_fail(err, LR_ESTATE, "there is a draft model already");
    return rc;
}

int lr_engine_set_draft(lr_engine *e, lr_model *m, const lr_draft_config *cfg, lr_error *err)
{
    lr_draft_config c = cfg ? *cfg : (lr_draft_config){0};
    int rc = can_draft(e, err);
    if (!rc) rc = lr_spec_check_vocab(e->model, m, &c.common, err);
    if (rc) return rc;
    fill_draft(e, &c);
    rc = make_row(e, err);
    if (rc) return rc;
    return lr_draft_new(&e->spec->draft, m, &c, err);
}

int lr_engine_set_eagle(lr_engine *e, const char *path, const lr_eagle_config *eagle, const lr_draft_config *cfg,
                        lr_error *err)
{
    lr_draft_config c = cfg ? *cfg : (lr_draft_config){0};
    struct lr_spec_state *st;
    lr_model *m;
    size_t rows, n;
    int rc = can_draft(e, err);
    if (!rc) rc = make_row(e, err);
    if (!rc) rc = lr_eagle_new(&m, e->model, path, eagle, err);
    if (rc) return rc;
    st = e->spec;
    fill_draft(e, &c);
    c.features = true;
    rows = (size_t)e->cfg.max_batch_tokens;
    if (!st->features && lr_mul(rows, (size_t)lr_eagle_width(m) * sizeof(float), &n))
        st->features = lr_alloc_aligned(n);
    if (!st->eagle_in && lr_mul(rows, (size_t)m->n_embd * sizeof(float), &n)) st->eagle_in = lr_alloc_aligned(n);
    rc = st->features && st->eagle_in ? lr_draft_new(&st->draft, m, &c, err)
                                      : lr_fail(err, LR_ENOMEM, "no memory for features");
    if (rc)
        lr_model_free(m);
    else
        st->eagle = m;
    return rc;
}

int lr_engine_set_heads(lr_engine *e, const char *path, lr_error *err)
{
    size_t n;
    int rc = lr_engine__not_in_step(e, err);
    if (!rc) rc = make_state(e, err);
    if (rc) return rc;
    struct lr_spec_state *st = e->spec;
    if (st->heads) return lr_fail(err, LR_ESTATE, "there are heads already");
    if (!e->hidden) return lr_fail(err, LR_EUNSUPPORTED, "heads: the model tells no hidden rows");
    lr_heads *h;
    st->heads_most = e->cfg.max_seqs < HEADS_ROWS ? e->cfg.max_seqs : HEADS_ROWS;
    if ((rc = lr_heads_new(&h, e->model, path, st->heads_most, err))) return rc;
    size_t rows = (size_t)st->heads_most * (size_t)lr_heads_count(h);
    if (!st->heads_logits && lr_mul(rows, (size_t)e->model->n_vocab * sizeof(float), &n))
        st->heads_logits = lr_alloc_aligned(n);
    if (!st->heads_rows)
        st->heads_rows = lr_alloc_aligned((size_t)st->heads_most * (size_t)e->model->n_embd * sizeof(float));
    if (!st->heads_logits || !st->heads_rows) {
        lr_heads_free(h);
        return lr_fail(err, LR_ENOMEM, "no memory for the logits of heads");
    }
    st->heads = h;
    return 0;
}

const lr_model *lr_engine_draft(const lr_engine *e)
{
    return e->spec && e->spec->draft ? lr_draft_model(e->spec->draft) : NULL;
}

void lr_engine_pace(const lr_engine *e, int rows, double *step, double *pass)
{
    *step = e->spec ? lr_pace_step_time(&e->spec->pace, rows) : 0;
    *pass = e->spec && e->spec->draft
                ? lr_pace_pass_time(&e->spec->pace, e->spec->eagle ? LR_SPEC_EAGLE : LR_SPEC_DRAFT, rows)
                : 0;
}

void lr_engine_pace_hold(lr_engine *e, bool held)
{
    if (e->spec) e->spec->held = held;
}

double lr_engine_drafting(const lr_engine *e) { return e->spec ? e->spec->draft_time : 0; }

void lr_engine_pace_forget(lr_engine *e)
{
    if (e->spec) e->spec->pace = (lr_pace){0};
}

int lr_spec__begin(lr_request *r, const lr_spec_params *p, lr_error *err)
{
    lr_engine *e = r->e;
    if (p->k < 0 || p->k > LR_SPEC_MAX)
        return lr_fail(err, LR_EINVAL, "speculate: k = %d is not in 1..%d", p->k, LR_SPEC_MAX);
    if (p->min_match < 1 || p->max_match < p->min_match || p->max_match > 64)
        return lr_fail(err, LR_EINVAL, "speculate: a match of %d to %d tokens is not in 1..64", p->min_match,
                       p->max_match);
    if (p->branches < 0 || p->branches > LR_SPEC_BRANCHES)
        return lr_fail(err, LR_EINVAL, "speculate: branches = %d is not in 1..%d", p->branches, LR_SPEC_BRANCHES);
    if (p->branches > 1 && p->distribution)
        return lr_fail(err, LR_EINVAL, "speculate: accept = \"distribution\" judges drafts without branches only");
    if ((unsigned)p->method >= LR_SPEC_METHODS || (p->method == LR_SPEC_GIVEN && !p->choose))
        return lr_fail(err, LR_EINVAL, "speculate: nobody gives tokens");
    if (p->method == LR_SPEC_EAGLE && !(e->spec && e->spec->eagle))
        return lr_fail(err, LR_EINVAL, "speculate: the model was loaded without an EAGLE head");
    if (p->method == LR_SPEC_DRAFT && (!lr_engine_draft(e) || e->spec->eagle))
        return lr_fail(err, LR_EINVAL, "speculate: the model was loaded without a draft model");
    if (p->method == LR_SPEC_HEADS && !(e->spec && e->spec->heads))
        return lr_fail(err, LR_EINVAL, "speculate: the model was loaded without heads");
    int exit = -1, rc = make_state(e, err);
    if (!rc && (p->method == LR_SPEC_EXIT || p->layers)) rc = find_exit(e, p->layers, &exit, err);
    if (rc) return rc;
    struct lr_spec_req *s = lr_calloc(1, sizeof *s);
    if (!s) return lr_fail(err, LR_ENOMEM, "no memory for drafts");
    s->p = *p;
    s->exit = exit;
    s->list.of = &e->spec->lists;
    s->p.user = NULL; /* taken over at the end of lr_request_new */
    s->p.free = NULL;
    r->spec = s;
    if (p->memory) lr_suffix_ref(p->memory);
    if (!e->spec->heads) return 0;
    s->hidden = lr_alloc_aligned((size_t)e->model->n_embd * sizeof(float));
    return s->hidden ? 0 : lr_fail(err, LR_ENOMEM, "no memory for drafts");
}

void lr_spec__free(lr_request *r)
{
    struct lr_spec_req *s = r->spec;
    if (!s) return;
    if (s->p.free) s->p.free(s->p.user);
    lr_suffix_unref(s->p.memory);
    lr_suffix_unref(s->own);
    lr_sampler_free(s->plain);
    lr_free(s->dist);
    lr_free_aligned(s->hidden);
    lr_shortlist_free(&s->list);
    lr_free(s);
    r->spec = NULL;
}

void lr_spec__end(lr_request *r)
{
    struct lr_spec_req *s = r->spec;
    lr_error err;
    if (!s) return;
    const lr_seq *q = r->info.seq;
    if (!s->p.memory || !q || q->len <= r->info.n_prompt) return;
    if (!lr_suffix_extend(s->p.memory, q->tokens + r->info.n_prompt, q->len - r->info.n_prompt, &err))
        lr_suffix_end(s->p.memory, &err);
}

/* ---- drafts from the text ---- */

static int from_suffix(lr_request *r, int k, int32_t *out, int *match)
{
    struct lr_spec_req *s = r->spec;
    const lr_seq *q = r->info.seq;
    lr_error err;
    int other = 0, got = 0;
    *match = 0;
    if (!s->own && lr_suffix_new(&s->own, OWN_MAX, &err)) return 0;
    if (lr_suffix_extend(s->own, q->tokens + s->own_n, q->len - s->own_n, &err)) return 0;
    s->own_n = q->len;
    got = lr_suffix_propose(s->own, s->p.min_match, k, out, match);
    if (!s->p.memory) return got;
    if (s->at.epoch == 0) s->at_n = q->len > 256 ? q->len - 256 : 0;
    lr_suffix_follow(s->p.memory, &s->at, q->tokens + s->at_n, q->len - s->at_n);
    s->at_n = q->len;
    int32_t more[LR_SPEC_MAX];
    int n = lr_suffix_propose_at(s->p.memory, &s->at, s->p.min_match, k, more, &other);
    if (n == 0 || other <= *match) return got;
    *match = other;
    memcpy(out, more, (size_t)n * sizeof *out);
    return n;
}

/* Cuts a draft before a token that would end the request or that the constraint forbids; behind one that ends it. */
static int trim(lr_request *r, const int32_t *t, int n)
{
    lr_error err;
    int keep = 0, n_vocab = r->e->model->n_vocab;
    bool ahead = r->con.accept && r->con.ahead;
    if (ahead && r->con.ahead(r->con.user, true, &err)) ahead = false;
    for (bool go = true; go && keep < n; keep++) {
        if (t[keep] < 0 || t[keep] >= n_vocab || lr_request__is_end(r, t[keep])) break;
        if (!ahead) continue;
        int rc = r->con.accept(r->con.user, t[keep], &err);
        if (rc < 0) break;
        go = rc == 0;
    }
    if (ahead && r->con.ahead(r->con.user, false, &err)) {
        lr_request__fail(r, &err);
        return 0;
    }
    return keep;
}

/* What the constraint makes of the path to a node: 1 = may go on, 0 = the text ends with it, -1 = forbidden. */
static int try_path(lr_request *r, const lr_spec_tree *t, int node)
{
    int32_t path[LR_SPEC_MAX];
    lr_error err;
    int n = 0, rc = 0;
    for (int i = node; i >= 0; i = t->parent[i]) path[n++] = t->token[i];
    if (!r->con.accept || !r->con.ahead || r->con.ahead(r->con.user, true, &err)) return 1;
    while (n > 0 && rc == 0) rc = r->con.accept(r->con.user, path[--n], &err);
    if (rc < 0) n = 1;
    if (r->con.ahead(r->con.user, false, &err)) {
        lr_request__fail(r, &err);
        return -1;
    }
    return n > 0 ? -1 : rc == 0;
}

/* The same for a tree whose first `from` nodes are a draft that was trimmed. */
static void trim_tree(lr_request *r, lr_spec_tree *t, int from, int most)
{
    int to[LR_SPEC_MAX], n = 0, depth[LR_SPEC_MAX], n_vocab = r->e->model->n_vocab;
    bool ends[LR_SPEC_MAX];
    for (int i = 0; i < t->n && r->info.state == LR_REQ_RUNNING; i++) {
        int p = t->parent[i], how = 1;
        to[i] = -1;
        if (p >= i || (p >= 0 && (to[p] < 0 || ends[to[p]]))) continue;
        t->token[n] = t->token[i];
        t->parent[n] = p < 0 ? -1 : to[p];
        depth[n] = p < 0 ? 1 : depth[to[p]] + 1;
        if (depth[n] > most || t->token[n] < 0 || t->token[n] >= n_vocab || lr_request__is_end(r, t->token[n]) ||
            (i >= from && (how = try_path(r, t, n)) < 0))
            continue;
        ends[n] = how == 0;
        to[i] = n++;
    }
    t->n = n;
}

/* ---- a step ---- */

static bool wants(const lr_request *r)
{
    return r->info.kind == LR_REQ_GENERATE && r->info.state == LR_REQ_RUNNING && r->granted > 0 && r->n_out > 0;
}

/* A tree that somebody gave, without what can't be; its nodes. */
static int given_tree(lr_request *r, lr_spec_choice *c, int n, int most)
{
    lr_spec_tree t = {.n = n};
    memcpy(t.token, c->tokens, (size_t)n * sizeof *t.token);
    memcpy(t.parent, c->parent, (size_t)n * sizeof *t.parent);
    trim_tree(r, &t, 0, most);
    memcpy(c->tokens, t.token, (size_t)t.n * sizeof *t.token);
    memcpy(c->parent, t.parent, (size_t)t.n * sizeof *t.parent);
    return t.n;
}

static int heads_places(const lr_engine *e, int k)
{
    int n = lr_heads_count(e->spec->heads);
    return k < n ? k : n;
}

/* What the request would like: its own wish, then the policy's, then the tokens themselves if they cost nothing. */
static void consider(lr_engine *e, lr_request *r)
{
    struct lr_spec_state *st = e->spec;
    struct lr_spec_req *s = r->spec;
    lr_seq *q = r->info.seq;
    lr_error err;
    struct lr_spec_item *it = &st->items[st->n_items];
    const int remaining = r->info.max_tokens - r->info.n_generated;
    const int most = remaining - 1 < LR_SPEC_MAX ? remaining - 1 : LR_SPEC_MAX;
    if (most <= 0 || r->want_cancel) return;
    lr_spec_choice *c = &it->choice;
    c->method = s->p.method;
    c->k = s->p.fixed ? s->p.k : -1;
    c->n = 0;
    c->branches = false;
    c->most = most;
    c->batch = st->generating;
    lr_spec_method kind = c->method == LR_SPEC_OFF ? LR_SPEC_GIVEN : c->method;
    c->acceptance = lr_pace_odds_of(&st->pace, &s->odds, kind, s->match);
    if (s->p.choose && s->p.choose(s->p.user, r, c, &err)) {
        lr_request__fail(r, &err);
        return;
    }
    if (e->policy.draft) {
        lr_spec_choice mine = *c;
        double t = lr_engine__hook_begin(e);
        int rc = e->policy.draft(e->policy.user, r, c);
        lr_engine__hook_end(e, "draft", t);
        if (rc < 0) e->metrics.policy_failed++;
        if (rc < 0) *c = mine;
    }
    int k = s->p.k ? s->p.k : lr_spec_has_passes(c->method) ? K_MODEL : K_FREE, match = 0;
    it->fixed = c->k >= 0;
    if (it->fixed) k = c->k;
    if (k > most) k = most;
    if (k <= 0 || c->method == LR_SPEC_OFF || !lr_spec__ready(r, c->method)) return;
    if (lr_seq__reserve(q, q->len + k + 1, &err)) return;
    if (c->method == LR_SPEC_NGRAM)
        k = lr_ngram_propose(q->tokens, q->len, s->p.min_match, s->p.max_match, k, c->tokens, &match);
    if (c->method == LR_SPEC_SUFFIX) k = from_suffix(r, k, c->tokens, &match);
    if (c->method == LR_SPEC_GIVEN && c->n < k) k = c->n;
    if (c->method == LR_SPEC_GIVEN && c->branches)
        k = given_tree(r, c, k, most);
    else if (!lr_spec_has_passes(c->method) && c->method != LR_SPEC_HEADS)
        k = trim(r, c->tokens, k);
    if (k <= 0 || r->info.state != LR_REQ_RUNNING) return;
    it->r = r;
    it->pace = (lr_pace_item){.odds = &s->odds,
                              .method = c->method,
                              .match = match,
                              .most = c->method == LR_SPEC_HEADS ? heads_places(e, k) : k,
                              .remaining = remaining,
                              .k = it->fixed ? k : 0};
    it->most = k;
    if (c->method == LR_SPEC_DRAFT || c->method == LR_SPEC_EAGLE)
        it->pace.behind = lr_draft_behind(q->draft, q->tokens, q->len);
    st->n_items++;
}

/* How many of each: what is fixed first, then what pays. */
static void choose(lr_engine *e)
{
    struct lr_spec_state *st = e->spec;
    int rows = e->step.n_granted, n = 0, room = e->step.budget < e->step.outs ? e->step.budget : e->step.outs;
    for (int i = 0; i < st->n_items; i++) {
        lr_pace_item *p = &st->items[i].pace;
        if (st->items[i].fixed) {
            if (p->k > room) p->k = room;
            room -= p->k;
            rows += p->k;
        } else {
            st->open[n++] = *p;
        }
    }
    if (n == 0) return;
    lr_pace_choose(&st->pace, st->open, n, rows, st->generating - n, room);
    n = 0;
    for (int i = 0; i < st->n_items; i++)
        if (!st->items[i].fixed) st->items[i].pace = st->open[n++];
}

/* The draft as a tree: its k tokens, then what branches off, as far as that pays. */
static void lay_tree(lr_engine *e, struct lr_spec_item *it, lr_spec_tree *t)
{
    lr_request *r = it->r;
    const struct lr_spec_req *s = r->spec;
    const lr_spec_choice *c = &it->choice;
    int k = it->pace.k, most = r->info.max_tokens - r->info.n_generated - 1;
    if (c->method == LR_SPEC_HEADS) {
        if (k > 0) *t = it->sides; /* else they are of another step */
        trim_tree(r, t, 0, most);
        return;
    }
    t->n = k;
    memcpy(t->token, c->tokens, (size_t)k * sizeof *t->token);
    for (int i = 0; i < k; i++) t->parent[i] = c->branches ? c->parent[i] : i - 1;
    if (s->p.branches < 2 || c->branches || k == 0 || !e->model->echoes) return;
    if (lr_spec_has_passes(c->method)) {
        for (int i = 0; i < it->sides.n && t->n < LR_SPEC_MAX; i++) {
            if (it->sides.parent[i] >= k) break;
            t->token[t->n] = it->sides.token[i];
            t->parent[t->n++] = it->sides.parent[i];
        }
    } else if (c->method == LR_SPEC_NGRAM) {
        const lr_seq *q = r->info.seq;
        lr_ngram_branches(q->tokens, q->len, it->pace.match, s->p.branches - 1, k, t);
        if (!it->fixed) lr_pace_cut(&e->spec->pace, &it->pace, k, t);
    }
    trim_tree(r, t, k, most);
}

static void count_draft(lr_engine *e, lr_request *r)
{
    const lr_spec_tree *t = &r->spec->tree;
    bool tried[LR_SPEC_POSITIONS] = {false};
    r->info.spec.drafts++;
    r->info.spec.drafted += (uint64_t)t->n;
    e->metrics.spec_drafts++;
    e->metrics.spec_drafted += (uint64_t)t->n;
    for (int i = 0; i < t->n; i++) {
        int at = t->depth[i] <= LR_SPEC_POSITIONS ? t->depth[i] - 1 : LR_SPEC_POSITIONS - 1;
        if (tried[at] && at < LR_SPEC_POSITIONS - 1) continue;
        tried[at] = true;
        r->info.spec.tried_at[at]++;
        e->metrics.spec_tried_at[at]++;
    }
}

/* Rows for a draft, as far as rows and blocks are left. */
static void place(lr_engine *e, struct lr_spec_item *it)
{
    lr_step *step = &e->step;
    lr_request *r = it->r;
    lr_seq *q = r->info.seq;
    struct lr_spec_req *s = r->spec;
    lr_spec_tree whole = {0};
    if (r->info.state != LR_REQ_RUNNING) return;
    lay_tree(e, it, &whole);
    int k = whole.n;
    if (k > step->budget) k = step->budget;
    if (k > step->outs) k = step->outs;
    for (; k > 0; k /= 2) {
        s->tree = whole;
        s->tree.n = k;
        lr_spec_tree_order(&s->tree);
        if (s->tree.n > 0 && lr_spec__room(e, r)) break;
    }
    s->tree.n = k > 0 ? s->tree.n : 0;
    if (s->tree.n == 0) return;
    memcpy(q->tokens + q->len, s->tree.token, (size_t)s->tree.run_first[1] * sizeof *q->tokens);
    step->budget -= s->tree.n;
    step->outs -= s->tree.n;
    s->in_run = 0;
    s->method = it->choice.method;
    s->match = it->pace.match;
    s->dist_now = s->dist_now && lr_spec_has_passes(it->choice.method);
    lr_record__draft(r, s->tree.token, s->tree.parent, s->tree.n);
    count_draft(e, r);
}

void lr_spec__plan(lr_engine *e)
{
    struct lr_spec_state *st = e->spec;
    const req_list *lists[] = {&e->running, &e->started};
    if (!st) return;
    double t = lr_engine__now(e);
    st->n_items = st->generating = 0;
    st->may = false;
    st->draft_time = 0;
    for (int l = 0; l < 2; l++)
        for (int i = 0; i < lists[l]->n; i++) {
            lr_request *r = lists[l]->at[i];
            if (r->spec) r->spec->tree.n = 0;
            st->generating += wants(r);
        }
    for (int l = 0; l < 2; l++)
        for (int i = 0; i < lists[l]->n; i++) {
            lr_request *r = lists[l]->at[i];
            if (!r->spec || !wants(r) || st->n_items == e->cfg.max_seqs) continue;
            st->may = true;
            consider(e, r);
        }
    for (int i = 0; i < st->n_items; i++) st->may = st->may && !st->items[i].fixed;
    if (st->n_items == 0 && !st->eagle) return;
    choose(e);
    lr_spec__run_models(e);
    for (int i = 0; i < st->n_items; i++) place(e, &st->items[i]);
    double end = lr_engine__now(e);
    st->draft_time = end - t;
    if (e->trace) lr_trace_span(e->trace, LR_TRACE_ENGINE, LR_TRACE_STEPS, "drafts", t, end, NULL);
}

/* ---- results ---- */

int lr_spec__draw(lr_request *r, int i, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int32_t *id,
                  float *logprob, lr_top *top, lr_error *err)
{
    struct lr_spec_req *s = r->spec;
    if (!s || i >= s->tree.n || !s->dist_now || s->dist[i].n == 0)
        return lr_sampler_draw(r->sampler, logits, mask, ctx, r->n_top, id, logprob, top, err);
    const spec_dist *d = &s->dist[i];
    return lr_sampler_judge(r->sampler, logits, mask, ctx, s->tree.token[i], d->ids, d->q, d->n, r->n_top, id, logprob,
                            top, err);
}

void lr_spec__verified(lr_request *r, int node, bool open)
{
    struct lr_spec_req *s = r->spec;
    lr_engine *e = r->e;
    lr_spec_tree *t = &s->tree;
    int right = node < 0 ? 0 : t->depth[node], first = t->run_first[1], main = 0;
    while (main < first && lr_spec_tree_above(t, main, node)) main++;
    bool left = main < right, sides = false; /* the first run was left for a branch; there was one to leave it for */
    for (int run = 1; run < t->n_runs; run++) sides = sides || t->parent[t->run_first[run]] == main - 1;
    bool wrong = main < first && (left || open);
    lr_pace_learn(&e->spec->pace, &s->odds, s->method, s->match, main + wrong, main);
    if (wrong && sides) lr_pace_learn_side(&e->spec->pace, &s->odds, s->method, left);
    r->info.spec.accepted += (uint64_t)right;
    e->metrics.spec_accepted += (uint64_t)right;
    e->spec->made.more += right;
    for (int i = 0; i < right; i++) {
        int at = i < LR_SPEC_POSITIONS ? i : LR_SPEC_POSITIONS - 1;
        r->info.spec.accepted_at[at]++;
        e->metrics.spec_accepted_at[at]++;
    }
    lr_hist__add_N(&e->metrics.spec_length, right);
    t->n = 0;
}

void lr_spec__drawn(lr_request *r, int node)
{
    struct lr_spec_req *s = r->spec;
    size_t width = (size_t)r->e->model->n_embd;
    if (s && node >= 0 && lr_spec__features(r)) lr_spec__feed_path(r, node);
    if (!s || !s->hidden) return;
    memcpy(s->hidden, r->e->hidden + (size_t)(r->out + node + 1) * width, width * sizeof *s->hidden);
    s->hidden_at = r->info.seq->kv.computed;
}

void lr_spec__settle(lr_engine *e, double seconds)
{
    if (e->spec) e->spec->made.seconds += seconds; /* draws at the places of drafts are work, too */
    if (e->spec && e->spec->made.rows && !e->spec->held) lr_pace_settle(&e->spec->pace, &e->spec->made);
    if (e->spec) e->spec->made.rows = 0;
}

void lr_spec__saw_forward(lr_engine *e, const lr_batch *b, double seconds)
{
    struct lr_spec_state *st = e->spec;
    lr_request *owner = NULL;
    int drafts = 0;
    if (!st) return;
    st->made = (lr_pace_step){.rows = b->n_rows,
                              .pure = b->n_rows == b->n_out,
                              .generating = st->generating,
                              .open = st->may,
                              .seconds = seconds,
                              .drafting = st->draft_time};
    for (int i = 0; i < b->n_seqs; i++) {
        lr_request *r = e->batch_req[i];
        if (r) owner = r; /* else a branch of the one before */
        int k = lr_spec__n(owner);
        if (k) owner->info.spec.verify_time += seconds * b->seqs[i].n / b->n_rows;
        drafts += r ? k : 0;
    }
    st->made.drafts = drafts;
    if (drafts == 0) return;
    lr_hist__add_T(&e->metrics.spec_draft, st->draft_time);
    lr_hist__add_T(&e->metrics.spec_verify, seconds);
}
