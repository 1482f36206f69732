/* engine.c - making, sizing and freeing an engine; its lists; its consistency check. See engine.h. */
#include "engine/record.h"
#include "base/clock.h"
#include "engine/speculate_int.h"
#include "sample/row.h"
#include "base/dtype.h"
#include "base/mem.h"
#include <string.h>

enum { PROMPT_ROWS = 64 }; /* of a CPU; see rule.c */

lr_engine_config lr_engine_defaults(void)
{
    return (lr_engine_config){.max_batch_tokens = 512,
                              .max_seqs = 64,
                              .max_waiting = 65536,
                              .block_size = 16,
                              .kv_type = LR_F16,
                              .kv_value_type = -1,
                              .prefix_cache = true,
                              .preempt = LR_PREEMPT_RECOMPUTE,
                              .swap_bytes = (size_t)1 << 30,
                              .spill_bytes = (size_t)4 << 30,
                              .patience = 8};
}

static bool on_device(lr_model *m) { return m->ops->room && m->ops->room(m, NULL, 0, 0) > 0; }

/* Whether many rows of a step take little longer than few. */
static bool has_device(lr_model *m) { return m->tells || on_device(m); }

static int fill_config(lr_engine_config *c, lr_model *m, lr_error *err)
{
    lr_engine_config d = lr_engine_defaults();
    if (c->max_batch_tokens == 0) c->max_batch_tokens = d.max_batch_tokens;
    if (c->max_seqs == 0) c->max_seqs = d.max_seqs;
    if (c->max_waiting == 0) c->max_waiting = d.max_waiting;
    if (c->block_size == 0) c->block_size = d.block_size;
    if (c->chunk == 0 || c->chunk > c->max_batch_tokens) c->chunk = c->max_batch_tokens;
    if (c->prompt_rows == 0) c->prompt_rows = has_device(m) ? c->max_batch_tokens : PROMPT_ROWS;
    if (c->context == 0 || c->context > m->n_ctx) c->context = m->n_ctx;
    if (c->patience == 0) c->patience = d.patience;
    if (c->swap_bytes == 0) c->swap_bytes = d.swap_bytes;
    if (c->spill_bytes == 0) c->spill_bytes = d.spill_bytes;
    const struct {
        const char *name;
        int v, lo, hi;
    } range[] = {{"max_batch_tokens", c->max_batch_tokens, 1, 1 << 16},
                 {"max_seqs", c->max_seqs, 1, 4096},
                 {"max_waiting", c->max_waiting, 1, 1 << 24},
                 {"chunk", c->chunk, 1, 1 << 16},
                 {"prompt_rows", c->prompt_rows, 1, 1 << 16},
                 {"block_size", c->block_size, 1, 256},
                 {"context", c->context, 1, 1 << 28},
                 {"patience", c->patience, 1, 1 << 20},
                 {"max_pinned", c->max_pinned, 0, 1 << 28},
                 {"kv_blocks", c->kv_blocks[0], 0, 1 << 28},
                 {"kv_blocks of windowed layers", c->kv_blocks[1], 0, 1 << 28},
                 {"hash_bits", c->hash_bits, 0, 64}};
    for (size_t i = 0; i < sizeof range / sizeof *range; i++) {
        if (range[i].v < range[i].lo || range[i].v > range[i].hi) {
            return lr_fail(err, LR_EINVAL, "%s %d is not in %d..%d", range[i].name, range[i].v, range[i].lo,
                           range[i].hi);
        }
    }
    if (!(c->kv_fraction >= 0 && c->kv_fraction <= 1))
        return lr_fail(err, LR_EINVAL, "kv_fraction %g is not in 0..1", c->kv_fraction);
    if (c->kv_value_type < 0) c->kv_value_type = c->kv_type;
    int bad = lr_kv_type_good(c->kv_type) ? c->kv_value_type : c->kv_type;
    if (!lr_kv_type_good(bad)) return lr_fail(err, LR_EINVAL, "type %d is none for KV", bad);
    return 0;
}

/* Bytes that KV may take unless told otherwise. On a device most of what is free beside the activations of batches over
 * a pool of spec: the rest is for what comes later (adapters, drafts, captured steps). */
static double kv_room(const lr_engine *e, const lr_kv_spec *spec)
{
    const lr_engine_config *c = &e->cfg;
    lr_model *m = e->model;
    if (c->kv_bytes) return (double)c->kv_bytes;
    size_t device = m->ops->room ? m->ops->room(m, spec, c->max_batch_tokens, e->max_out) : 0;
    if (device) return (double)device * (c->kv_fraction > 0 ? c->kv_fraction : 0.9);
    return lr_mem_available() * (c->kv_fraction > 0 ? c->kv_fraction : 0.4);
}

/* Blocks of a windowed group beside n0 blocks of the full ones: what max_seqs sequences can look back at. */
static int window_blocks(const lr_engine_config *c, const lr_model *m, int n0)
{
    int64_t bs = c->block_size, per_seq = (m->window[1] + 3 * bs) / bs;
    int64_t n = per_seq * c->max_seqs + (c->max_batch_tokens + bs - 1) / bs;
    if (m->window[1] <= 0 || n > n0) n = n0;
    return (int)n;
}

static double pool_bytes(const lr_engine_config *c, const lr_model *m, const size_t bytes[], int n0)
{
    double b = (double)bytes[0] * n0;
    if (m->n_groups > 1) b += (double)bytes[1] * (c->kv_blocks[1] ? c->kv_blocks[1] : window_blocks(c, m, n0));
    return b;
}

/* How many blocks the pool gets: as configured, or as many as the bytes hold. */
static int size_pool(lr_engine *e, lr_kv_spec *spec, lr_error *err)
{
    lr_engine_config *c = &e->cfg;
    size_t bytes[LR_KV_GROUPS] = {0};
    for (int g = 0; g < e->model->n_groups; g++) bytes[g] = lr_kv_spec_block_bytes(spec, g);
    if (c->kv_blocks[0] == 0) {
        int64_t bs = c->block_size, tokens = (int64_t)c->context * 4;
        if (tokens > 16384) tokens = c->context > 16384 ? c->context : 16384;
        int lo = 0, hi = c->kv_bytes || c->kv_fraction > 0 ? (1 << 28) / c->block_size : (int)((tokens + bs - 1) / bs);
        bool beside = !c->kv_bytes && on_device(e->model); /* the more blocks, the more work on them takes */
        double room = beside ? 0 : kv_room(e, spec);
        while (lo < hi) { /* the most blocks that fit */
            int mid = lo + (hi - lo + 1) / 2;
            for (int g = 0; beside && g < e->model->n_groups; g++) spec->n_blocks[g] = mid;
            if (beside) room = kv_room(e, spec);
            if (pool_bytes(c, e->model, bytes, mid) <= room) {
                lo = mid;
            } else {
                hi = mid - 1;
            }
        }
        if (lo < 1) {
            if (beside)
                return lr_fail(err, LR_EFULL,
                               "the device's free %.1f MiB hold no KV block of %d tokens (%zu bytes) beside the "
                               "activations of batches of %d rows; max_batch_tokens makes them smaller",
                               (double)e->model->ops->room(e->model, NULL, 0, 0) / (1 << 20), c->block_size, bytes[0],
                               c->max_batch_tokens);
            return lr_fail(err, LR_EFULL, "%.0f bytes hold no KV block of %d tokens (%zu bytes)", room, c->block_size,
                           bytes[0]);
        }
        c->kv_blocks[0] = lo;
    }
    if (e->model->n_groups < 2) {
        c->kv_blocks[1] = 0;
    } else if (c->kv_blocks[1] == 0) {
        c->kv_blocks[1] = window_blocks(c, e->model, c->kv_blocks[0]);
    }
    memcpy(spec->n_blocks, c->kv_blocks, sizeof spec->n_blocks);
    return 0;
}

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

static int make_pool(lr_engine *e, lr_error *err)
{
    lr_model *m = e->model;
    lr_kv_spec spec = {.n_layers = m->n_kv_layers,
                       .layers = m->kv_layers,
                       .type = e->cfg.kv_type,
                       .value_type = e->cfg.kv_value_type,
                       .block_size = e->cfg.block_size};
    int rc = size_pool(e, &spec, err);
    if (!rc) rc = m->ops->start(m, &spec, e->cfg.max_batch_tokens, e->max_out, err);
    if (rc) return rc;
    lr_kv_config kc = {.block_size = e->cfg.block_size,
                       .n_groups = m->n_groups,
                       .prefix_cache = e->cfg.prefix_cache,
                       .hash_bits = e->cfg.hash_bits,
                       .spill = e->cfg.spill,
                       .spill_bytes = e->cfg.spill_bytes,
                       .mover = {.user = m, .copy = mover_copy, .read = mover_read, .write = mover_write}};
    for (int g = 0; g < m->n_groups; g++) {
        kc.n_blocks[g] = spec.n_blocks[g];
        kc.window[g] = m->window[g];
        kc.mover.block_bytes[g] = m->ops->kv_block_bytes(m, g);
    }
    rc = lr_kv_new(&e->kv, &kc, err);
    if (rc) return rc;
    e->cfg.spill = NULL; /* was borrowed */
    if (e->cfg.max_pinned == 0) e->cfg.max_pinned = e->cfg.kv_blocks[0] / 2;
    int cap = lr_engine__capacity(e, NULL);
    e->context = e->cfg.context < cap ? e->cfg.context : cap;
    return 0;
}

static int make_batch(lr_engine *e, lr_error *err)
{
    size_t n, seqs = (size_t)e->cfg.max_seqs + (size_t)e->cfg.max_batch_tokens; /* branches are sequences too */
    e->rows = lr_calloc((size_t)e->cfg.max_batch_tokens, sizeof *e->rows);
    e->batch = lr_calloc(seqs, sizeof *e->batch);
    e->batch_req = lr_calloc(seqs, sizeof(lr_request *));
    e->out_rows = lr_calloc((size_t)e->max_out, sizeof *e->out_rows);
    e->scratch = lr_malloc(LR_DETOK_CAP);
    if (e->model->tells) {
        e->told = lr_calloc((size_t)e->max_out, sizeof *e->told);
    } else if (lr_mul((size_t)e->max_out, (size_t)e->model->n_vocab, &n) && lr_mul(n, sizeof(float), &n)) {
        e->logits = lr_alloc_aligned(n);
    }
    if (e->model->n_embd > 0 && lr_mul((size_t)e->max_out, (size_t)e->model->n_embd, &n) &&
        lr_mul(n, sizeof(float), &n) && !(e->hidden = lr_malloc(n)))
        return lr_fail(err, LR_ENOMEM, "no memory for hidden rows");
    if (!e->rows || !e->batch || !e->batch_req || !e->out_rows || !e->scratch || (!e->logits && !e->told) ||
        lr_engine__list_reserve(&e->running, e->cfg.max_seqs) ||
        lr_engine__list_reserve(&e->started, e->cfg.max_seqs)) {
        return lr_fail(err, LR_ENOMEM, "no memory for a batch of %d rows with %d rows of %d logits",
                       e->cfg.max_batch_tokens, e->max_out, e->model->n_vocab);
    }
    return 0;
}

int lr_engine_new(lr_engine **out, lr_model *model, const lr_engine_config *cfg, lr_error *err)
{
    lr_engine *e = lr_calloc(1, sizeof *e);
    if (!e) return lr_fail(err, LR_ENOMEM, "no memory for an engine");
    e->cfg = cfg ? *cfg : lr_engine_defaults();
    e->model = model;
    int rc = fill_config(&e->cfg, model, err);
    if (rc) goto fail;
    /* scoring takes many logit rows a step, generating one per request */
    e->max_out = e->cfg.max_batch_tokens < 64 ? e->cfg.max_batch_tokens : 64;
    if (e->max_out < e->cfg.max_seqs) e->max_out = e->cfg.max_seqs;
    rc = make_batch(e, err);
    if (!rc) rc = make_pool(e, err);
    if (rc) goto fail;
    if (model->peaks) /* without memory for them they are looked for, as those of other models */
        e->peaks = lr_calloc((size_t)e->max_out * (size_t)lr_row_pieces(model->n_vocab), sizeof *e->peaks);
    *out = e;
    return 0;
fail:
    e->model = NULL; /* stays the caller's */
    lr_engine_free(e);
    return rc;
}

void lr_engine_free(lr_engine *e)
{
    if (!e || e->in_step) return;
    lr_error err;
    if (e->policy.free) e->policy.free(e->policy.user);
    e->policy = (lr_policy){0};
    while (e->requests) lr_request__free_now(e->requests);
    while (e->seqs) lr_seq__free_now(e->seqs);
    lr_trace_close(e->trace, &err);
    lr_record__free(e);
    lr_spec__free_state(e);
    lr_engine__free_draws(e);
    lr_engine__free_asked(e);
    lr_engine__free_ahead(e);
    lr_kv_free(e->kv);
    lr_model_free(e->model);
    lr_free(e->waiting.at);
    lr_free(e->running.at);
    lr_free(e->started.at);
    lr_free(e->rows);
    lr_free(e->batch);
    lr_free(e->batch_req);
    lr_free(e->out_rows);
    lr_free(e->scratch);
    lr_free_aligned(e->logits);
    lr_free(e->peaks);
    lr_free(e->hidden);
    lr_free(e->told);
    lr_free(e);
}

lr_model *lr_engine_model(lr_engine *e) { return e->model; }
const lr_engine_config *lr_engine_get_config(const lr_engine *e) { return &e->cfg; }
int lr_engine_busy(const lr_engine *e) { return e->n_requests; }
int lr_engine_waiting(const lr_engine *e) { return e->waiting.n; }
double lr_engine_now(const lr_engine *e) { return lr_engine__now(e); }
uint64_t lr_engine_generation(const lr_engine *e) { return e->generation; }
const lr_metrics *lr_engine_metrics(const lr_engine *e) { return &e->metrics; }

double lr_engine__now(const lr_engine *e) { return e->cfg.now ? e->cfg.now(e->cfg.now_user) : lr_now(); }

int lr_engine__not_in_step(const lr_engine *e, lr_error *err)
{
    return e->in_step ? lr_fail(err, LR_ESTATE, "not possible from inside a step") : 0;
}

void lr_engine_drop_cached(lr_engine *e)
{
    if (e->in_step) return;
    lr_record__forget(e);
    lr_kv_drop_cached(e->kv);
}

int lr_engine_trace(lr_engine *e, const char *path, lr_error *err)
{
    lr_trace *t = NULL;
    int rc = path ? lr_trace_open(&t, path, err) : 0;
    if (rc) return rc;
    rc = lr_trace_close(e->trace, err);
    e->trace = t;
    return rc;
}

int lr_engine__capacity(const lr_engine *e, const lr_seq *s)
{
    int64_t bs = e->cfg.block_size, cap = INT32_MAX;
    for (int g = 0; g < e->model->n_groups; g++) {
        int64_t n = e->cfg.kv_blocks[g] - e->pinned[g] + (s ? s->pin_blocks[g] : 0);
        int64_t w = e->model->window[g];
        if (w > 0 && n >= (w + 1 + 2 * bs - 2) / bs) continue; /* blocks come free as the window moves on */
        if (n * bs < cap) cap = n * bs;
    }
    return (int)cap;
}

void lr_engine_get_state(const lr_engine *e, lr_engine_info *info)
{
    memset(info, 0, sizeof *info);
    info->context = e->context;
    info->n_running = e->running.n;
    info->n_waiting = e->waiting.n;
    lr_kv_get_stats(e->kv, 0, &info->kv[0]);
    info->steps = e->metrics.steps;
    info->busy = e->busy;
    info->block_seconds = e->block_seconds;
    info->block_peak = e->block_peak;
}

void lr_engine_get_info(const lr_engine *e, lr_engine_info *info)
{
    lr_engine_get_state(e, info);
    info->n_seqs = e->n_seqs;
    info->n_groups = e->model->n_groups;
    info->block_size = e->cfg.block_size;
    for (int g = 0; g < info->n_groups; g++) {
        lr_kv_get_stats(e->kv, g, &info->kv[g]);
        info->block_bytes[g] = e->model->ops->kv_block_bytes(e->model, g);
    }
    info->pinned = e->pinned[0];
    for (const lr_seq *s = e->seqs; s; s = s->next) info->slack += s->kv.n[0] * e->cfg.block_size - s->kv.computed;
    info->swapped = e->swapped;
    e->model->ops->memory(e->model, &info->mem_weights, &info->mem_kv, &info->mem_work);
    if (!lr_engine_draft(e)) return;
    size_t more[3];
    lr_draft_memory(e->spec->draft, &more[0], &more[1], &more[2]);
    info->mem_weights += more[0];
    info->mem_kv += more[1];
    info->mem_work += more[2];
}

double lr_engine__hook_begin(lr_engine *e) { return e->hook_depth++ == 0 ? lr_engine__now(e) : 0; }

void lr_engine__hook_end(lr_engine *e, const char *name, double begin)
{
    if (--e->hook_depth > 0) return;
    double end = lr_engine__now(e);
    e->hook_time += end - begin;
    if (e->trace) lr_trace_span(e->trace, LR_TRACE_ENGINE, LR_TRACE_HOOKS, name, begin, end, NULL);
}

static double score(void *user, const lr_kv_leaf *leaf)
{
    lr_engine *e = user;
    double t = lr_engine__hook_begin(e), v = e->policy.evict(e->policy.user, leaf);
    lr_engine__hook_end(e, "evict", t);
    return v;
}

int lr_engine_set_policy(lr_engine *e, const lr_policy *p, lr_error *err)
{
    int rc = lr_engine__not_in_step(e, err);
    if (rc) return rc;
    if (e->policy.free) e->policy.free(e->policy.user);
    e->policy = p ? *p : (lr_policy){0};
    if (p && !e->policy.name) e->policy.name = "custom";
    e->idle_steps = 0;
    lr_kv_set_score(e->kv, e->policy.evict ? score : NULL, e);
    return 0;
}

void lr_policy_failed(lr_engine *e) { e->metrics.policy_failed++; }

const char *lr_engine_policy_name(const lr_engine *e) { return e->policy.name ? e->policy.name : "fcfs"; }

/* ---- lists ---- */

int lr_engine__list_reserve(req_list *l, int n)
{
    if (n <= l->cap) return 0;
    int cap = l->cap * 2 > n ? l->cap * 2 : n;
    lr_request **p = lr_reallocarray(l->at, (size_t)cap, sizeof(lr_request *));
    if (!p) return LR_ENOMEM;
    l->at = p;
    l->cap = cap;
    return 0;
}

void lr_engine__list_insert(req_list *l, lr_request *r)
{
    int i = l->n++;
    for (; i > 0 && l->at[i - 1]->info.id > r->info.id; i--) l->at[i] = l->at[i - 1];
    l->at[i] = r;
}

void lr_engine__list_remove(req_list *l, lr_request *r)
{
    for (int i = 0; i < l->n; i++) {
        if (l->at[i] != r) continue;
        memmove(&l->at[i], &l->at[i + 1], (size_t)(l->n - i - 1) * sizeof(lr_request *));
        l->n--;
        return;
    }
}

/* ---- check ---- */

static int check_list(const req_list *l, lr_req_state state, lr_error *err)
{
    for (int i = 0; i < l->n; i++) {
        const lr_request *r = l->at[i];
        if (r->info.state != state || !r->info.seq || r->info.seq->req != r) {
            return lr_fail(err, LR_ESTATE, "request %llu is in a list it does not belong to",
                           (unsigned long long)r->info.id);
        }
        if (i > 0 && l->at[i - 1]->info.id >= r->info.id)
            return lr_fail(err, LR_ESTATE, "a request list is out of order");
    }
    return 0;
}

static int check_seqs(const lr_engine *e, lr_error *err)
{
    int n = 0, n_idle = 0, n_listed = 0, pinned[LR_KV_GROUPS] = {0};
    size_t swapped = 0;
    for (const lr_seq *s = e->seqs; s; s = s->next, n++) {
        bool runs = s->req && s->req->info.state == LR_REQ_RUNNING, holds = false;
        for (int g = 0; g < e->model->n_groups; g++) {
            pinned[g] += s->pin_blocks[g];
            holds = holds || lr_kv_table_held(&s->kv, g) > 0;
            if (!s->pinned && s->pin_blocks[g])
                return lr_fail(err, LR_ESTATE, "a sequence counts as pinned, but is not");
        }
        if (s->kv.computed > s->len) return lr_fail(err, LR_ESTATE, "a sequence computed more than it has");
        if (s->is_idle != (holds && !runs && !s->pinned)) {
            return lr_fail(err, LR_ESTATE, "sequence %llu is wrongly %s the idle list", (unsigned long long)s->id,
                           s->is_idle ? "in" : "not in");
        }
        n_idle += s->is_idle;
        swapped += s->swap_bytes;
    }
    for (const lr_seq *s = e->idle_old; s && n_listed <= n; s = s->idle_next) n_listed++;
    if (n != e->n_seqs || n_idle != n_listed || swapped != e->swapped) {
        return lr_fail(err, LR_ESTATE, "%d sequences (%d counted), %d idle (%d listed)", e->n_seqs, n, n_idle,
                       n_listed);
    }
    if (memcmp(pinned, e->pinned, sizeof pinned) != 0) return lr_fail(err, LR_ESTATE, "pinned blocks are miscounted");
    return 0;
}

int lr_engine_check(const lr_engine *e, lr_error *err)
{
    int rc = lr_kv_check(e->kv, err);
    if (!rc) rc = check_list(&e->waiting, LR_REQ_WAITING, err);
    if (!rc) rc = check_list(&e->running, LR_REQ_RUNNING, err);
    if (!rc) rc = check_seqs(e, err);
    if (!rc && e->spec && e->spec->draft) rc = lr_draft_check(e->spec->draft, err);
    if (rc) return rc;
    if (e->n_requests != e->waiting.n + e->running.n) {
        return lr_fail(err, LR_ESTATE, "%d active requests, %d waiting, %d running", e->n_requests, e->waiting.n,
                       e->running.n);
    }
    return e->running.n <= e->cfg.max_seqs ? 0 : lr_fail(err, LR_ESTATE, "%d requests run at once", e->running.n);
}
