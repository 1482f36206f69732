/* told_draws.c - tokens that the model draws by itself, where its device can (lr_batch.draws): requests whose sampler
 * has none but the device's stages, without a draft. Their rows of logits stay on the device. Masks are asked for
 * before the results are; everything a draw depends on is known then, so the tokens are those of any other way.
 */
#include "base/mem.h"
#include "engine/speculate_int.h"
#include "sample/describe.h"
#include "sample/row.h"
#include <math.h>
#include <string.h>

struct lr_asked {
    lr_draws d;
    lr_draw *at;             /* (cap) */
    lr_draw_result *results; /* (cap) */
    lr_drawn *drawn;         /* (cap) */
    lr_draw_best *best;      /* (cap, LR_DRAW_TOP) */
    int cap;
    lr_draw_edits edits;
    uint32_t *masks;
    size_t words;
    int cap_masks;
};

static bool make_room(lr_engine *e)
{
    struct lr_asked *a = e->asked;
    if (a) return a->cap > 0;
    a = e->asked = lr_calloc(1, sizeof *a);
    if (!a) return false;
    size_t n = (size_t)e->max_out;
    a->words = ((size_t)e->model->n_vocab + 31) / 32;
    a->at = lr_calloc(n, sizeof *a->at);
    a->results = lr_calloc(n, sizeof *a->results);
    a->drawn = lr_calloc(n, sizeof *a->drawn);
    a->best = lr_calloc(n, LR_DRAW_TOP * sizeof *a->best);
    if (a->at && a->results && a->drawn && a->best) a->cap = e->max_out;
    return a->cap > 0;
}

void lr_engine__free_asked(lr_engine *e)
{
    struct lr_asked *a = e->asked;
    if (!a) return;
    lr_free(a->at);
    lr_free(a->results);
    lr_free(a->drawn);
    lr_free(a->best);
    lr_free(a->edits.at);
    lr_free(a->masks);
    lr_free(a);
    e->asked = NULL;
}

/* A copy, as a mask is good until the next one is asked for. */
static bool keep_mask(struct lr_asked *a, const uint32_t *mask)
{
    if (a->d.n_masks == a->cap_masks) {
        int cap = a->cap_masks ? 2 * a->cap_masks : 8;
        uint32_t *m = lr_reallocarray(a->masks, (size_t)cap, a->words * sizeof *m);
        if (!m) return false;
        a->masks = m;
        a->cap_masks = cap;
    }
    memcpy(a->masks + (size_t)a->d.n_masks++ * a->words, mask, a->words * sizeof *mask);
    return true;
}

static void ask(struct lr_asked *a, lr_request *r)
{
    lr_sample_ctx ctx = lr_request__sample_ctx(r);
    lr_draw *d = &a->at[a->d.n];
    lr_drawn *to = &a->drawn[a->d.n];
    const uint32_t *mask = NULL;
    *d = (lr_draw){.out = r->out, .mask = -1, .n_top = r->n_top};
    if (r->n_top > LR_DRAW_TOP || !lr_sampler_describe(r->sampler, &ctx, d, &a->edits)) return;
    *to = (lr_drawn){.r = r};
    if (r->con.mask && r->con.mask(r->con.user, &mask, &to->err) < 0) return; /* it is said when the token is taken */
    if (mask) {
        d->mask = a->d.n_masks;
        if (!keep_mask(a, mask)) return;
    }
    if (r->n_top > a->d.top) a->d.top = r->n_top;
    a->d.n++;
}

void lr_engine__ask_draws(lr_engine *e, lr_batch *b)
{
    struct lr_asked *a;
    b->draws = NULL;
    if (!e->model->draws || b->n_out == 0 || !make_room(e)) return;
    a = e->asked;
    a->d = (lr_draws){0};
    a->edits.n = 0;
    for (int i = 0; i < b->n_seqs; i++) {
        lr_request *r = e->batch_req[i];
        if (r && lr_request__draws_plainly(r)) ask(a, r);
    }
    if (a->d.n == 0) return;
    a->d.at = a->at;
    a->d.edits = a->edits.at;
    a->d.n_edits = (int)a->edits.n;
    a->d.masks = a->masks;
    a->d.results = a->results;
    a->d.best = a->best;
    b->draws = &a->d;
}

/* As lr_sampler_draw says it. */
static int status(const lr_draw_result *t, lr_error *err)
{
    switch (t->status) {
    case LR_DRAWN:
        return 0;
    case LR_DRAW_NONE_LEFT:
        return lr_fail(err, LR_EINVAL, LR_SAMPLE_NONE_LEFT);
    default:
        return lr_fail(err, LR_EINVAL, LR_SAMPLE_NOT_FINITE);
    }
}

void lr_engine__take_draws(lr_engine *e, const lr_batch *b)
{
    if (!b->draws) return;
    struct lr_asked *a = e->asked;
    for (int i = 0; i < a->d.n; i++) {
        const lr_draw_result *t = &a->results[i];
        lr_drawn *d = &a->drawn[i];
        lr_request *r = d->r;
        d->rc = status(t, &d->err);
        if (!d->rc) d->rc = lr_request__more_recs(r, &d->err);
        d->id = t->token;
        d->logprob = NAN;
        r->drawn = d;
        e->metrics.device_draws++;
        if (d->rc || r->n_top < 0) continue;
        float lse = (float)lr_row_log_of_mass(t->best, t->mass);
        d->logprob = t->logit - lse;
        lr_top *top = r->n_top > 0 ? r->tops + r->n_recs * (size_t)r->n_top : NULL;
        const lr_draw_best *best = a->best + (size_t)i * (size_t)a->d.top;
        for (int k = 0; k < r->n_top; k++)
            top[k] = (lr_top){best[k].id, best[k].id < 0 ? -INFINITY : best[k].logit - lse};
    }
}
