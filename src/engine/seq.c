/* seq.c - sequences: tokens, their KV, forks, pins, and how idle ones give way. See engine.h. */
#include "engine/speculate_int.h"
#include "engine/record.h"
#include "base/mem.h"
#include "model/adapter.h"
#include <limits.h>
#include <stdio.h>
#include <string.h>

static int check_free(const lr_seq *s, lr_error *err)
{
    int rc = lr_engine__not_in_step(s->e, err);
    if (rc) return rc;
    return s->req ? lr_fail(err, LR_ESTATE, "a request is active on the sequence") : 0;
}

static int new_in(lr_engine *e, lr_kv_space *space, uint64_t tag, struct lr_adapter *lora, lr_seq **out, lr_error *err)
{
    lr_seq *s = lr_calloc(1, sizeof *s);
    if (!s) return lr_fail(err, LR_ENOMEM, "no memory for a sequence");
    s->e = e;
    s->id = ++e->next_seq;
    lr_kv_table_init(e->kv, &s->kv, space);
    s->kv.tag = tag;
    s->lora = lr_adapter_ref(lora);
    s->next = e->seqs;
    if (e->seqs) e->seqs->prev = s;
    e->seqs = s;
    e->n_seqs++;
    *out = s;
    return 0;
}

/* A number that tells namespaces apart without telling the salt; 0 = none. */
static uint64_t salt_hash(const lr_seq_config *cfg)
{
    const lr_str part[] = {cfg->salt, cfg->adapter};
    uint64_t h = 14695981039346656037u;
    if (cfg->salt.n == 0 && cfg->adapter.n == 0) return 0;
    for (int k = 0; k < 2; k++) {
        for (size_t i = 0; i < part[k].n; i++) h = (h ^ (unsigned char)part[k].s[i]) * 1099511628211u;
        h = (h ^ 256) * 1099511628211u;
    }
    return h | 1;
}

int lr_seq_new(lr_engine *e, const lr_seq_config *cfg, lr_seq **out, lr_error *err)
{
    lr_kv_space *space;
    lr_seq_config none = {0};
    char name[300];
    if (!cfg) cfg = &none;
    lr_str key = cfg->adapter;
    int rc = lr_engine__not_in_step(e, err);
    if (!rc && cfg->lora) {
        if (!lr_adapter_fits(cfg->lora, e->model))
            return lr_fail(err, LR_EINVAL, "the adapter belongs to another model, or its model is closed");
        if (key.n > 256) return lr_fail(err, LR_ELIMIT, "an adapter's name of %zu bytes", key.n);
        int n = snprintf(name, sizeof name, "%016llx", (unsigned long long)lr_adapter_fingerprint(cfg->lora));
        if (key.n) memcpy(name + n, key.s, key.n);
        key = (lr_str){name, (size_t)n + key.n};
    }
    if (!rc) rc = lr_kv_space_get(e->kv, cfg->salt, key, &space, err);
    if (rc) return rc;
    rc = new_in(e, space, cfg->tag, cfg->lora, out, err);
    lr_kv_space_unref(e->kv, space);
    if (rc) return rc;
    (*out)->salt_hash = salt_hash(cfg);
    lr_record__seq(*out);
    return 0;
}

static void idle_remove(lr_seq *s)
{
    lr_engine *e = s->e;
    if (!s->is_idle) return;
    *(s->idle_prev ? &s->idle_prev->idle_next : &e->idle_old) = s->idle_next;
    *(s->idle_next ? &s->idle_next->idle_prev : &e->idle_new) = s->idle_prev;
    s->idle_prev = s->idle_next = NULL;
    s->is_idle = false;
}

void lr_seq__wake(lr_seq *s) { idle_remove(s); }

void lr_seq__rest(lr_seq *s)
{
    lr_engine *e = s->e;
    bool holds = false;
    idle_remove(s);
    if (s->req && s->req->info.state == LR_REQ_RUNNING) return;
    for (int g = 0; g < e->model->n_groups; g++) {
        holds = holds || lr_kv_table_held(&s->kv, g) > 0;
        /* a start that failed must not leave a pinned sequence with more than others reckon with */
        if (s->pinned && lr_kv_table_held(&s->kv, g) > s->pin_blocks[g]) lr_kv_table_drop(e->kv, &s->kv);
    }
    if (!holds || s->pinned) return;
    s->idle_prev = e->idle_new;
    *(e->idle_new ? &e->idle_new->idle_next : &e->idle_old) = s;
    e->idle_new = s;
    s->is_idle = true;
}

bool lr_seq_park(lr_seq *s)
{
    if (!s->is_idle) return false;
    idle_remove(s);
    lr_kv_table_drop(s->e->kv, &s->kv);
    s->e->metrics.parked++;
    lr_record__park(s);
    return true;
}

bool lr_engine__park_one(lr_engine *e) { return e->idle_old && lr_seq_park(e->idle_old); }

void lr_seq__free_now(lr_seq *s)
{
    lr_engine *e = s->e;
    lr_record__free_seq(s);
    idle_remove(s);
    s->pinned = false;
    lr_seq__repin(s);
    lr_seq__swap_drop(s);
    if (s->draft) lr_spec__retire(s);
    lr_kv_table_deinit(e->kv, &s->kv);
    *(s->prev ? &s->prev->next : &e->seqs) = s->next;
    if (s->next) s->next->prev = s->prev;
    e->n_seqs--;
    lr_adapter_unref(s->lora);
    lr_free(s->tokens);
    lr_free(s);
}

void lr_seq_free(lr_seq *s)
{
    if (!s || s->dead) return;
    lr_engine *e = s->e;
    if (s->req) {
        s->req->free_seq = true;
        if (e->in_step) {
            s->dead = true;
        }
        lr_request_cancel(s->req); /* frees it, at the latest at the step's end */
    } else if (e->in_step) {
        s->dead = true;
        e->n_deferred++;
    } else {
        lr_seq__free_now(s);
    }
}

int lr_seq__reserve(lr_seq *s, int n, lr_error *err)
{
    if (n > s->cap) {
        int cap = s->cap < INT_MAX / 2 && s->cap * 2 > n ? s->cap * 2 : n;
        int32_t *p = lr_reallocarray(s->tokens, (size_t)cap, sizeof *p);
        if (!p) return lr_fail(err, LR_ENOMEM, "no memory for a sequence of %d tokens", cap);
        s->tokens = p;
        s->cap = cap;
    }
    return lr_kv_table_reserve(s->e->kv, &s->kv, n, err);
}

int lr_seq_fork(lr_seq *s, lr_seq **out, lr_error *err)
{
    lr_seq *f = NULL;
    int rc = lr_engine__not_in_step(s->e, err);
    if (!rc) rc = new_in(s->e, s->kv.space, s->kv.tag, s->lora, &f, err);
    if (!f) return rc;
    rc = lr_seq__reserve(f, s->len, err);
    if (!rc) rc = lr_kv_table_fork(s->e->kv, &f->kv, &s->kv, err);
    if (rc) {
        lr_seq__free_now(f);
        return rc;
    }
    if (s->len) memcpy(f->tokens, s->tokens, (size_t)s->len * sizeof *f->tokens);
    f->len = s->len;
    f->salt_hash = s->salt_hash;
    lr_record__fork(f, s);
    if (s->draft && lr_draft_fork(s->draft, &f->draft, err)) f->draft = NULL; /* computed again when it is wanted */
    lr_seq__rest(f);
    *out = f;
    return 0;
}

int lr_seq_append(lr_seq *s, const int32_t *tokens, size_t n, lr_error *err)
{
    int rc = check_free(s, err);
    if (rc) return rc;
    if (n > (size_t)(s->e->context - s->len)) {
        return lr_fail(err, LR_EFULL, "%zu tokens do not fit behind %d into the context of %d", n, s->len,
                       s->e->context);
    }
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= s->e->model->n_vocab) {
            return lr_fail(err, LR_EINVAL, "token %zu is %d, the vocabulary has 0..%d", i, tokens[i],
                           s->e->model->n_vocab - 1);
        }
    }
    rc = lr_seq__reserve(s, s->len + (int)n, err);
    if (rc) return rc;
    if (n) memcpy(s->tokens + s->len, tokens, n * sizeof *tokens);
    s->len += (int)n;
    lr_record__append(s, tokens, n);
    return 0;
}

int lr_seq_truncate(lr_seq *s, size_t n, lr_error *err)
{
    int rc = check_free(s, err);
    if (rc) return rc;
    if (n > (size_t)s->len) return lr_fail(err, LR_EINVAL, "cannot cut a sequence of %d tokens to %zu", s->len, n);
    s->len = (int)n;
    lr_record__truncate(s);
    lr_kv_set_time(s->e->kv, lr_engine__now(s->e));
    lr_kv_table_truncate(s->e->kv, &s->kv, s->len);
    lr_seq__repin(s);
    lr_seq__rest(s);
    return 0;
}

size_t lr_seq_len(const lr_seq *s) { return (size_t)s->len; }
const int32_t *lr_seq_tokens(const lr_seq *s) { return s->tokens; }
size_t lr_seq_computed(const lr_seq *s) { return (size_t)s->kv.computed; }
lr_request *lr_seq_request(const lr_seq *s) { return s->req; }
lr_engine *lr_seq_engine(const lr_seq *s) { return s->e; }
uint64_t lr_seq_id(const lr_seq *s) { return s->id; }
uint64_t lr_seq_tag(const lr_seq *s) { return s->kv.tag; }
void lr_seq_set_tag(lr_seq *s, uint64_t tag) { lr_kv_table_set_tag(&s->kv, tag); }

int lr_seq_blocks(const lr_seq *s, int g)
{
    return g >= 0 && g < s->e->model->n_groups ? lr_kv_table_held(&s->kv, g) : 0;
}

size_t lr_seq_peek_cached(const lr_seq *s)
{
    int n = lr_kv_space_peek(s->e->kv, s->kv.space, s->tokens, s->len, NULL);
    return (size_t)(n > s->kv.computed ? n : s->kv.computed);
}

/* ---- pins ---- */

static void count_pin(lr_seq *s)
{
    lr_engine *e = s->e;
    for (int g = 0; g < e->model->n_groups; g++) {
        int n = s->pinned ? lr_kv_table_held(&s->kv, g) : 0;
        e->pinned[g] += n - s->pin_blocks[g];
        s->pin_blocks[g] = n;
    }
}

/* Every active request still fits beside the pinned blocks. */
static bool all_fit(const lr_engine *e)
{
    const req_list *lists[] = {&e->waiting, &e->running};
    for (int l = 0; l < 2; l++) {
        for (int i = 0; i < lists[l]->n; i++) {
            const lr_request *r = lists[l]->at[i];
            if (lr_engine__active(r) && r->limit > lr_engine__capacity(e, r->info.seq)) return false;
        }
    }
    return true;
}

void lr_seq__repin(lr_seq *s)
{
    count_pin(s);
    if (!s->pinned || (s->e->pinned[0] <= s->e->cfg.max_pinned && all_fit(s->e))) return;
    s->pinned = false;
    count_pin(s);
}

int lr_seq_pin(lr_seq *s, bool on, lr_error *err)
{
    lr_engine *e = s->e;
    int rc = lr_engine__not_in_step(e, err);
    if (rc || s->pinned == on) return rc;
    s->pinned = on;
    int would = e->pinned[0] + lr_kv_table_held(&s->kv, 0);
    lr_seq__repin(s);
    if (on && !s->pinned) {
        return lr_fail(err, LR_EFULL, "%d KV blocks would be pinned, %d may be, of %d, beside what requests need",
                       would, e->cfg.max_pinned, e->cfg.kv_blocks[0]);
    }
    lr_record__pin(s, on);
    lr_seq__rest(s);
    return 0;
}

/* ---- host memory ---- */

void lr_seq__swap_drop(lr_seq *s)
{
    lr_free(s->swap);
    s->swap = NULL;
    s->e->swapped -= s->swap_bytes;
    s->swap_bytes = 0;
}

bool lr_seq__swap_out(lr_seq *s)
{
    lr_engine *e = s->e;
    lr_kv_table_trim(e->kv, &s->kv);
    size_t n = lr_kv_table_bytes(e->kv, &s->kv);
    if (n == 0 || n > e->cfg.swap_bytes || e->swapped > e->cfg.swap_bytes - n) return false;
    lr_seq__swap_drop(s);
    s->swap = lr_malloc(n);
    if (!s->swap) return false;
    lr_kv_table_read(e->kv, &s->kv, s->swap);
    s->swap_bytes = n;
    s->swap_computed = s->kv.computed;
    memcpy(s->swap_first, s->kv.first, sizeof s->swap_first);
    e->swapped += n;
    lr_kv_table_drop(e->kv, &s->kv);
    return true;
}
