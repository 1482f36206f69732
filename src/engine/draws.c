/* draws.c - the tokens of a step, drawn by the compute pool's threads before the engine takes them one by one.
 *
 * A draw reads a whole vocabulary; with many requests that is a share of the step that one thread alone would pay. So
 * whatever may run anywhere is drawn ahead: requests without a draft, whose chain calls nothing back. Masks are asked
 * for here first, on the engine's thread. A draw depends on its request alone, so the tokens are the same without. See
 * engine_int.h.
 */
#include "base/mem.h"
#include "engine/speculate_int.h"
#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum { MAX_THREADS = 8 }; /* each has several vocabularies of memory */
#define WORTH 65536       /* logits of a step below which waking threads costs more */

struct lr_own_draws {
    lr_drawn *at; /* (max_seqs) */
    int n, cap;
    uint32_t *masks; /* (n_masks, words) copies: a mask is good until the next one is asked for */
    int n_masks, cap_masks, words;
    lr_sample_desk *desk[MAX_THREADS]; /* of threads but the first, which has its own */
    atomic_int next;
};

bool lr_request__draws_plainly(const lr_request *r)
{
    return r->info.kind == LR_REQ_GENERATE && r->n_out == 1 && lr_spec__n(r) == 0 && r->fault == LR_FAULT_NONE &&
           !r->want_cancel && lr_engine__active(r) && lr_sampler_calls_nothing(r->sampler);
}

/* May its token be drawn by any thread, ahead of what is done with it? */
static bool anywhere(const lr_request *r) { return r && !r->drawn && lr_request__draws_plainly(r); }

static float *row_of(const lr_request *r) { return r->e->logits + (size_t)r->out * (size_t)r->e->model->n_vocab; }

static void draw(lr_drawn *d)
{
    lr_request *r = d->r;
    lr_sample_ctx ctx = lr_request__sample_ctx(r);
    lr_sample_peaks(lr_request__peaks(r, 0));
    d->rc = lr_sampler_draw(r->sampler, row_of(r), d->mask, &ctx, r->n_top, &d->id, &d->logprob, d->top, &d->err);
}

static void draw_some(void *arg, int thread, int n_threads)
{
    struct lr_own_draws *s = arg;
    if (thread >= MAX_THREADS || (thread > 0 && !s->desk[thread])) return;
    (void)n_threads;
    lr_sample_desk_use(thread > 0 ? s->desk[thread] : NULL);
    int i = atomic_fetch_add(&s->next, 1), next;
    for (; i < s->n; i = next) {
        next = atomic_fetch_add(&s->next, 1);
        if (next < s->n && !lr_request__peaks(s->at[next].r, 0)) lr_sample_ahead(row_of(s->at[next].r));
        if (s->at[i].rc == 0) draw(&s->at[i]);
    }
    lr_sample_desk_use(NULL);
}

/* Memory for the draws of a batch of n. False: there is none, and all is drawn as it is taken. */
static bool make_room(lr_engine *e, int n)
{
    struct lr_own_draws *s = e->draws;
    if (!s) {
        s = e->draws = lr_calloc(1, sizeof *s);
        if (!s) return false;
        s->words = (e->model->n_vocab + 31) / 32;
        for (int i = 1; i < MAX_THREADS && i < e->model->ops->threads(e->model); i++)
            s->desk[i] = lr_sample_desk_new(e->model->n_vocab); /* a thread without one has nothing to do */
    }
    if (n <= s->cap) return true;
    lr_drawn *at = lr_calloc((size_t)n, sizeof *at);
    if (!at) return false;
    lr_free(s->at);
    s->at = at;
    s->cap = n;
    return true;
}

/* A copy of the mask, or NULL if there is no memory. */
static const uint32_t *keep_mask(struct lr_own_draws *s, const uint32_t *mask)
{
    if (s->n_masks == s->cap_masks) return NULL;
    uint32_t *copy = s->masks + (size_t)s->n_masks++ * (size_t)s->words;
    memcpy(copy, mask, (size_t)s->words * sizeof *copy);
    return copy;
}

/* Adds a request's draw, with all that needs the engine's thread done. */
static void add(struct lr_own_draws *s, lr_request *r)
{
    lr_drawn *d = &s->at[s->n];
    const uint32_t *mask = NULL;
    d->r = r;
    d->logprob = NAN;
    d->mask = NULL;
    d->rc = lr_request__more_recs(r, &d->err); /* the best of this token have their place behind those before */
    d->top = r->n_top > 0 ? r->tops + r->n_recs * (size_t)r->n_top : NULL;
    if (d->rc == 0 && r->con.mask) {
        if (!r->con.lasting && s->n_masks == s->cap_masks) return; /* drawn as it is taken, with a mask of its own */
        int rc = r->con.mask(r->con.user, &mask, &d->err);
        d->rc = rc < 0 ? rc : 0;
        if (d->rc == 0 && mask) d->mask = r->con.lasting ? mask : keep_mask(s, mask);
    }
    r->drawn = d;
    s->n++;
}

/* Room for the copies of n masks. */
static void mask_room(struct lr_own_draws *s, int n)
{
    if (n <= s->cap_masks) return;
    uint32_t *masks = lr_calloc((size_t)n, (size_t)s->words * sizeof *masks);
    if (!masks) return;
    lr_free(s->masks);
    s->masks = masks;
    s->cap_masks = n;
}

void lr_engine__draw_ahead(lr_engine *e, const lr_batch *b)
{
    int n = 0, masks = 0;
    if (!e->model->ops->parallel || e->model->ops->threads(e->model) < 2) return;
    for (int i = 0; i < b->n_seqs; i++) {
        if (!anywhere(e->batch_req[i])) continue;
        n++;
        masks += e->batch_req[i]->con.mask != NULL && !e->batch_req[i]->con.lasting;
    }
    if (n < 2 || (long)n * e->model->n_vocab < WORTH || !make_room(e, n)) return;
    struct lr_own_draws *s = e->draws;
    s->n = s->n_masks = 0;
    mask_room(s, masks);
    for (int i = 0; i < b->n_seqs; i++)
        if (anywhere(e->batch_req[i])) add(s, e->batch_req[i]);
    atomic_store(&s->next, 0);
    e->model->ops->parallel(e->model, draw_some, s);
}

void lr_engine__free_draws(lr_engine *e)
{
    struct lr_own_draws *s = e->draws;
    if (!s) return;
    for (int i = 0; i < MAX_THREADS; i++) lr_sample_desk_free(s->desk[i]);
    lr_free(s->at);
    lr_free(s->masks);
    lr_free(s);
    e->draws = NULL;
}
