/* describe.c - a sampler chain as a device runs it (base/draw.h), where it has no stage that only the host knows. */
#include "base/mem.h"
#include "sample/describe.h"
#include "sample/sampler_int.h"
#include <math.h>

static bool edits(const lr_stage *s)
{
    return s->kind == LR_STAGE_LOGIT_BIAS || s->kind == LR_STAGE_PENALTIES || s->kind == LR_STAGE_BAN ||
           s->kind == LR_STAGE_MIN_TOKENS;
}

/* No stage but biases, bans, penalties, temperature, top-k, top-p and min-p, those that change single tokens first. */
static bool is_plain(const lr_sampler *s)
{
    int changes = 0, warm = 0;
    if (s->n_stages > LR_DRAW_STAGES / 2) return false; /* a penalty is two stages */
    for (int i = 0; i < s->n_stages; i++) {
        switch (s->stages[i].kind) {
        case LR_STAGE_TEMPERATURE:
            warm += s->stages[i].a > 0 && s->stages[i].a != 1.0f;
            changes++;
            break;
        case LR_STAGE_TOP_K:
        case LR_STAGE_TOP_P:
        case LR_STAGE_MIN_P:
            changes++;
            break;
        default:
            if (!edits(&s->stages[i]) || changes) return false; /* of a list that is in order already */
        }
    }
    return warm < 2;
}

static bool room(lr_draw_edits *e, size_t n)
{
    if (e->n + n <= e->cap) return true;
    size_t cap = 2 * e->cap > e->n + n ? 2 * e->cap : e->n + n;
    if (cap > INT32_MAX) return false;
    lr_draw_edit *at = lr_reallocarray(e->at, cap, sizeof *at);
    if (!at) return false;
    e->at = at;
    e->cap = cap;
    return true;
}

static lr_draw_stage *add_stage(lr_draw *d, int kind, const lr_draw_edits *e)
{
    lr_draw_stage *s = &d->stage[d->n_stages++];
    *s = (lr_draw_stage){.kind = kind, .at = (int32_t)e->n};
    return s;
}

/* Each id once; false where one comes twice, or there is no memory. */
static bool add_ids(const lr_stage *s, lr_scratch *w, lr_draw *d, lr_draw_edits *e)
{
    if (s->n_ids == 0) return true;
    if (!room(e, s->n_ids)) return false;
    lr_draw_stage *to = add_stage(d, LR_DRAW_ADD, e);
    lr_stage_unmark(w);
    for (size_t i = 0; i < s->n_ids; i++) {
        bool twice = w->mark[s->ids[i]] == w->epoch;
        w->mark[s->ids[i]] = w->epoch;
        if (twice && s->kind == LR_STAGE_LOGIT_BIAS) return false;
        if (!twice)
            e->at[e->n++] = (lr_draw_edit){s->ids[i], s->kind == LR_STAGE_LOGIT_BIAS ? s->values[i] : -INFINITY};
    }
    to->n = (int32_t)e->n - to->at;
    return true;
}

static bool penalties(const lr_stage *s, int n_vocab, lr_scratch *w, const lr_sample_ctx *c, lr_draw *d,
                      lr_draw_edits *e)
{
    size_t total = c->n_prompt + c->n_generated;
    if (s->repetition != 1.0f) {
        size_t i = s->last_n > 0 && (size_t)s->last_n < total ? total - (size_t)s->last_n : 0;
        if (!room(e, total - i < (size_t)n_vocab ? total - i : (size_t)n_vocab)) return false;
        lr_draw_stage *to = add_stage(d, LR_DRAW_REPEAT, e);
        to->a = s->repetition;
        lr_stage_unmark(w);
        for (; i < total; i++) {
            int32_t id = i < c->n_prompt ? c->prompt[i] : c->generated[i - c->n_prompt];
            if (id < 0 || id >= n_vocab || w->mark[id] == w->epoch) continue;
            w->mark[id] = w->epoch;
            e->at[e->n++] = (lr_draw_edit){id, 0};
        }
        to->n = (int32_t)e->n - to->at;
    }
    if (s->presence != 0.0f || s->frequency != 0.0f) {
        if (!room(e, c->n_generated < (size_t)n_vocab ? c->n_generated : (size_t)n_vocab)) return false;
        lr_draw_stage *to = add_stage(d, LR_DRAW_COUNTS, e);
        to->a = s->presence;
        to->b = s->frequency;
        lr_stage_unmark(w);
        for (size_t i = 0; i < c->n_generated; i++) {
            int32_t id = c->generated[i];
            if (id < 0 || id >= n_vocab) continue;
            if (w->mark[id] != w->epoch) {
                w->mark[id] = w->epoch;
                w->count[id] = (int32_t)e->n;
                e->at[e->n++] = (lr_draw_edit){id, 0};
            }
            e->at[w->count[id]].value += 1;
        }
        to->n = (int32_t)e->n - to->at;
    }
    return true;
}

bool lr_sampler_describe(const lr_sampler *s, const lr_sample_ctx *c, lr_draw *d, lr_draw_edits *e)
{
    if (!is_plain(s)) return false;
    lr_scratch *w = lr_sampler__scratch();
    size_t begin = e->n;
    d->n_stages = 0;
    d->u = lr_sample_uniform(s->seed, c->position, 0);
    bool ok = true;
    for (int i = 0; i < s->n_stages && ok; i++) {
        const lr_stage *t = &s->stages[i];
        switch (t->kind) {
        case LR_STAGE_PENALTIES:
            ok = penalties(t, s->n_vocab, w, c, d, e);
            break;
        case LR_STAGE_TEMPERATURE:
            if (!(t->a > 0))
                add_stage(d, LR_DRAW_TOP_K, e)->n = 1;
            else if (t->a != 1.0f)
                add_stage(d, LR_DRAW_TEMPERATURE, e)->a = t->a;
            break;
        case LR_STAGE_TOP_K:
            if (t->n > 0) add_stage(d, LR_DRAW_TOP_K, e)->n = t->n;
            break;
        case LR_STAGE_TOP_P:
            if (!(t->a > 0))
                add_stage(d, LR_DRAW_TOP_K, e)->n = 1;
            else if (t->a < 1)
                add_stage(d, LR_DRAW_TOP_P, e)->a = t->a;
            break;
        case LR_STAGE_MIN_P:
            if (t->a > 0) add_stage(d, LR_DRAW_MIN_P, e)->a = logf(t->a < 1 ? t->a : 1);
            break;
        default: /* a bias, or tokens that can't come */
            if (t->kind != LR_STAGE_MIN_TOKENS || c->n_generated < (size_t)t->n) ok = add_ids(t, w, d, e);
        }
    }
    if (!ok) e->n = begin;
    return ok;
}
