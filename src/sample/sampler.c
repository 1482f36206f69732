/* sampler.c - making, copying and running sampler chains: see sample.h */
#include "base/mass.h"
#include "base/mem.h"
#include "sample/row.h"
#include "sample/sampler_int.h"
#include <math.h>
#include <string.h>

enum { MAX_STAGES = 64, MAX_TOP = 64, FEW_HOLD = 1024 };

static _Thread_local lr_scratch scratch;
static _Thread_local lr_scratch *lent; /* of a desk; NULL: the thread's own */

struct lr_sample_desk {
    lr_scratch scratch;
};

static lr_scratch *desk(void) { return lent ? lent : &scratch; }
lr_scratch *lr_sampler__scratch(void) { return desk(); }
void lr_sample_ahead(const float *logits) { desk()->ahead = logits; }
void lr_sample_peaks(const float *peaks) { desk()->given = peaks; }

/* ---- scratch ---- */

static void scratch_free(lr_scratch *w)
{
    lr_free(w->cand_id);
    lr_free(w->cand);
    lr_free(w->raw);
    lr_free(w->ids);
    lr_free(w->a);
    lr_free(w->b);
    lr_free(w->mark);
    lr_free(w->count);
    lr_free(w->top);
    lr_free(w->prior);
    lr_free(w->peak);
    lr_free(w->sums);
    lr_free(w->sure);
    *w = (lr_scratch){0};
}

static bool scratch_grow(lr_scratch *w, int n_vocab)
{
    if (n_vocab <= w->cap) return true;
    int refs = w->refs;
    scratch_free(w);
    size_t n = (size_t)n_vocab;
    w->refs = refs;
    w->k = lr_cpu_table(NULL);
    w->cand_id = lr_calloc(n, sizeof *w->cand_id);
    w->cand = lr_calloc(n, sizeof *w->cand);
    w->raw = lr_calloc(2 * n, sizeof *w->raw);
    w->ids = lr_calloc(n, sizeof *w->ids);
    w->a = lr_calloc(n, sizeof *w->a);
    w->b = lr_calloc(n, sizeof *w->b);
    w->mark = lr_calloc(n, sizeof *w->mark);
    w->count = lr_calloc(n, sizeof *w->count);
    w->top = lr_calloc(MAX_TOP, sizeof *w->top);
    w->prior = lr_calloc(n, sizeof *w->prior);
    w->peak = lr_calloc((size_t)lr_pieces(n_vocab), sizeof *w->peak);
    w->sums = lr_calloc((size_t)lr_pieces(n_vocab), sizeof *w->sums);
    w->sure = lr_calloc((size_t)lr_pieces(n_vocab), sizeof *w->sure);
    if (!w->cand_id || !w->cand || !w->raw || !w->ids || !w->a || !w->b || !w->mark || !w->count || !w->top ||
        !w->prior || !w->peak || !w->sums || !w->sure) {
        scratch_free(w);
        w->refs = refs;
        return false;
    }
    w->cap = n_vocab;
    return true;
}

lr_sample_desk *lr_sample_desk_new(int n_vocab)
{
    lr_sample_desk *d = lr_calloc(1, sizeof *d);
    if (d && scratch_grow(&d->scratch, n_vocab)) return d;
    lr_free(d);
    return NULL;
}

void lr_sample_desk_free(lr_sample_desk *d)
{
    if (d) scratch_free(&d->scratch);
    lr_free(d);
}

void lr_sample_desk_use(lr_sample_desk *d) { lent = d ? &d->scratch : NULL; }

/* ---- making ---- */

static int check_ids(const lr_stage *s, const char *what, int n_vocab, lr_error *err)
{
    if (s->n_ids && !s->ids) return lr_fail(err, LR_EINVAL, "%s: no token ids", what);
    for (size_t i = 0; i < s->n_ids; i++)
        if (s->ids[i] < 0 || s->ids[i] >= n_vocab)
            return lr_fail(err, LR_EINVAL, "%s: token id %d is outside the vocabulary of %d", what, s->ids[i], n_vocab);
    return 0;
}

static int check_number(float x, float min, const char *what, lr_error *err)
{
    if (isfinite(x) && x >= min) return 0;
    return lr_fail(err, LR_EINVAL, "%s = %g is not a number of at least %g", what, (double)x, (double)min);
}

static int check_share(float x, const char *what, lr_error *err)
{
    return x >= 0 && x <= 1 ? 0 : lr_fail(err, LR_EINVAL, "%s = %g: 0 to 1 expected", what, (double)x);
}

static int check_stage(const lr_stage *s, int n_vocab, lr_error *err)
{
    int rc;
    switch (s->kind) {
    case LR_STAGE_LOGIT_BIAS:
        if ((rc = check_ids(s, "logit_bias", n_vocab, err))) return rc;
        for (size_t i = 0; i < s->n_ids; i++)
            if (isnan(s->values[i]) || s->values[i] == INFINITY)
                return lr_fail(err, LR_EINVAL, "logit_bias: the bias of token %d is not usable", s->ids[i]);
        return 0;
    case LR_STAGE_PENALTIES:
        if (!(s->repetition > 0) || !isfinite(s->repetition))
            return lr_fail(err, LR_EINVAL, "repetition_penalty = %g is not a positive number", (double)s->repetition);
        if (!isfinite(s->presence)) return lr_fail(err, LR_EINVAL, "presence_penalty is not a number");
        if (!isfinite(s->frequency)) return lr_fail(err, LR_EINVAL, "frequency_penalty is not a number");
        return s->last_n < 0 ? lr_fail(err, LR_EINVAL, "the penalties' window = %d is negative", s->last_n) : 0;
    case LR_STAGE_TEMPERATURE:
        return check_number(s->a, 0, "temperature", err);
    case LR_STAGE_TOP_P:
        return check_share(s->a, "top_p", err);
    case LR_STAGE_MIN_P:
        return check_share(s->a, "min_p", err);
    case LR_STAGE_TYPICAL:
        return check_share(s->a, "typical_p", err);
    case LR_STAGE_TOP_N_SIGMA:
        return check_number(s->a, -1, "top_n_sigma", err);
    case LR_STAGE_TOP_K:
        return s->n < -1 ? lr_fail(err, LR_EINVAL, "top_k = %d is below -1", s->n) : 0;
    case LR_STAGE_ALLOW:
        return check_ids(s, "allowed tokens", n_vocab, err);
    case LR_STAGE_BAN:
        return check_ids(s, "banned tokens", n_vocab, err);
    case LR_STAGE_MIN_TOKENS:
        return s->n < 0 ? lr_fail(err, LR_EINVAL, "min_tokens = %d is negative", s->n)
                        : check_ids(s, "end tokens", n_vocab, err);
    case LR_STAGE_CALLBACK:
        return s->fn ? 0 : lr_fail(err, LR_EINVAL, "a sampler stage without a function");
    case LR_STAGE_DRY:
        if ((rc = check_ids(s, "dry: breakers", n_vocab, err))) return rc;
        break;
    default:
        break;
    }
    return lr_stage_check_more(s, err);
}

static int copy_stage(lr_stage *d, const lr_stage *s, bool dup, lr_error *err)
{
    *d = *s;
    d->ids = NULL;
    d->values = NULL;
    d->user = NULL;
    if (s->n_ids) {
        d->ids = lr_memdup(s->ids, s->n_ids * sizeof *s->ids);
        if (s->values) d->values = lr_memdup(s->values, s->n_ids * sizeof *s->values);
        if (!d->ids || (s->values && !d->values)) return lr_fail(err, LR_ENOMEM, "no memory for a sampler");
    }
    d->user = dup && s->user_dup ? s->user_dup(s->user) : s->user;
    if (dup && !s->user_dup) d->user_free = NULL; /* shared: the first one frees it */
    if (dup && s->user_dup && s->user && !d->user) return lr_fail(err, LR_ENOMEM, "no memory for a sampler");
    return 0;
}

static void free_stage(lr_stage *s, bool with_user)
{
    lr_free((void *)(uintptr_t)s->ids);
    lr_free((void *)(uintptr_t)s->values);
    if (with_user && s->user_free && s->user) s->user_free(s->user);
}

/* A top-k chooses the same tokens before a temperature as behind it, which then has k numbers to divide instead of a
 * vocabulary's. */
static void temperature_last(lr_sampler *s)
{
    for (int i = 0; i + 1 < s->n_stages; i++) {
        lr_stage t = s->stages[i];
        if (t.kind != LR_STAGE_TEMPERATURE || !(t.a > 0) || s->stages[i + 1].kind != LR_STAGE_TOP_K) continue;
        lr_stage_state state = s->state[i];
        s->stages[i] = s->stages[i + 1];
        s->state[i] = s->state[i + 1];
        s->stages[i + 1] = t;
        s->state[i + 1] = state;
    }
}

/* On failure the users of `stages` stay the caller's. */
static int build(lr_sampler **out, const lr_stage *stages, size_t n, uint64_t seed, int n_vocab, bool dup,
                 lr_error *err)
{
    if (n > MAX_STAGES) return lr_fail(err, LR_ELIMIT, "a sampler of %zu stages; %d are the most", n, MAX_STAGES);
    lr_sampler *s = lr_calloc(1, sizeof *s);
    if (s) s->stages = lr_calloc(n, sizeof *s->stages);
    if (s) s->state = lr_calloc(n, sizeof *s->state);
    if (!s || !s->stages || !s->state || !scratch_grow(&scratch, n_vocab)) {
        if (s) lr_free(s->stages);
        if (s) lr_free(s->state);
        lr_free(s);
        return lr_fail(err, LR_ENOMEM, "no memory for a sampler");
    }
    s->n_vocab = n_vocab;
    s->seed = seed;
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = copy_stage(&s->stages[i], &stages[i], dup, err);
        s->state[i] = lr_stage_begin(&stages[i]);
        s->n_stages++;
    }
    if (rc) {
        for (int i = 0; i < s->n_stages; i++) free_stage(&s->stages[i], dup);
        lr_free(s->stages);
        lr_free(s->state);
        lr_free(s);
        return rc;
    }
    temperature_last(s);
    scratch.refs++;
    *out = s;
    return 0;
}

int lr_sampler_new(lr_sampler **out, const lr_stage *stages, size_t n, uint64_t seed, int n_vocab, lr_error *err)
{
    if (n_vocab < 1) return lr_fail(err, LR_EINVAL, "a vocabulary of %d tokens", n_vocab);
    for (size_t i = 0; i < n; i++) {
        int rc = check_stage(&stages[i], n_vocab, err);
        if (rc) return rc;
        if (lr_stage_learns(&stages[i]) && i + 1 < n)
            return lr_fail(err, LR_EINVAL,
                           "mirostat and adaptive-p learn from what is drawn: they must be the last stage");
    }
    return build(out, stages, n, seed, n_vocab, false, err);
}

int lr_sampler_copy(lr_sampler **out, const lr_sampler *s, lr_error *err)
{
    int rc = build(out, s->stages, (size_t)s->n_stages, s->seed, s->n_vocab, true, err);
    if (!rc && s->n_stages) memcpy((*out)->state, s->state, (size_t)s->n_stages * sizeof *s->state);
    return rc;
}

void lr_sampler_free(lr_sampler *s)
{
    if (!s) return;
    for (int i = 0; i < s->n_stages; i++) free_stage(&s->stages[i], true);
    lr_free(s->stages);
    lr_free(s->state);
    lr_free(s);
    if (--scratch.refs == 0) scratch_free(&scratch);
}

uint64_t lr_sampler_seed(const lr_sampler *s) { return s->seed; }

bool lr_sampler_is_greedy(const lr_sampler *s)
{
    bool greedy = false;
    for (int i = 0; i < s->n_stages; i++) {
        const lr_stage *t = &s->stages[i];
        if (t->kind == LR_STAGE_CALLBACK || t->kind == LR_STAGE_ADAPTIVE_P) return false;
        if (t->kind == LR_STAGE_XTC && t->a > 0 && !greedy) return false;
        if ((t->kind == LR_STAGE_TEMPERATURE && t->a <= 0) || (t->kind == LR_STAGE_TOP_K && t->n == 1)) greedy = true;
    }
    return greedy;
}

bool lr_sampler_calls_nothing(const lr_sampler *s)
{
    for (int i = 0; i < s->n_stages; i++)
        if (s->stages[i].kind == LR_STAGE_CALLBACK) return false;
    return true;
}

bool lr_sampler_takes_any(const lr_sampler *s)
{
    for (int i = 0; i < s->n_stages; i++) {
        switch (s->stages[i].kind) {
        case LR_STAGE_LOGIT_BIAS: /* may ban */
        case LR_STAGE_ALLOW:
        case LR_STAGE_BAN:
        case LR_STAGE_CALLBACK:
        case LR_STAGE_NO_REPEAT:
        case LR_STAGE_MIROSTAT_1:
        case LR_STAGE_MIROSTAT_2:
        case LR_STAGE_ADAPTIVE_P:
            return false;
        default:
            break;
        }
    }
    return true;
}

/* ---- drawing ---- */

double lr_sample_uniform(uint64_t seed, uint64_t position, uint32_t stream)
{
    /* Two rounds of the splitmix64 finalizer (Steele, Lea, Flood 2014) over the three inputs. */
    uint64_t z = seed ^ 0x9e3779b97f4a7c15u * (position + 1) ^ 0xd1b54a32d192ed03u * ((uint64_t)stream + 1);
    for (int i = 0; i < 2; i++) {
        z += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

/* Takes the row's peaks as they were told, or looks for them if they are not known yet; returns the largest. Those that
 * are looked for respect the mask, others are rough. */
static float take_peaks(lr_scratch *w, const float *logits, const uint32_t *mask, int n_vocab)
{
    if (w->given) memcpy(w->peak, w->given, (size_t)lr_pieces(n_vocab) * sizeof *w->peak);
    const bool known = w->peaks_known || w->given;
    w->given = NULL;
    w->peaks_known = true;
    if (!known) return w->k->peaks(logits, mask, n_vocab, w->peak);
    const float best = w->k->max(w->peak, lr_pieces(n_vocab));
    if (mask) lr_stage_rough(n_vocab, w);
    return best;
}

static int run_chain(lr_sampler *s, lr_logits *l, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx,
                     lr_error *err)
{
    lr_scratch *w = desk();
    *l = (lr_logits){logits, s->n_vocab, -1, w->cand_id, w->cand, ++s->generation};
    w->warm = false;
    w->bits = mask;
    w->rough = false;
    const float best = take_peaks(w, logits, mask, s->n_vocab);
    if (!(best > -INFINITY) || best == INFINITY) return lr_fail(err, LR_EINVAL, LR_SAMPLE_NOT_FINITE);
    for (int i = 0; i < s->n_stages; i++) {
        int rc = lr_stage_run(&s->stages[i], &s->state[i], l, w, ctx, err);
        if (rc) return rc;
        if (l->n_cand == 0) break;
    }
    float top = l->n_cand < 0 ? lr_stage_best(l, w) : l->n_cand > 0 ? l->cand[0] : -INFINITY;
    if (!(top > -INFINITY)) return lr_fail(err, LR_EINVAL, LR_SAMPLE_NONE_LEFT);
    if (top == INFINITY) return lr_fail(err, LR_EINVAL, LR_SAMPLE_NOT_FINITE);
    return 0;
}

static int32_t draw_candidate(const lr_logits *l, const lr_scratch *w, double u)
{
    if (l->n_cand == 1) return l->cand_id[0];
    uint64_t target = lr_mass_target(u, w->k->mass(l->cand, l->n_cand, l->cand[0])), sum;
    int i = lr_stage_reach(w, l->cand, l->n_cand, l->cand[0], target + 1, &sum);
    return l->cand_id[i < l->n_cand ? i : l->n_cand - 1];
}

/* Tells a stage that learns, which is the last, what was drawn. */
static void learn(lr_sampler *s, lr_logits *l, int32_t token)
{
    int i = s->n_stages - 1;
    if (i < 0 || !lr_stage_learns(&s->stages[i])) return;
    lr_stage_plain(l, desk());
    const float *x = lr_stage_slot(l, token);
    double p = x ? exp((double)*x - lr_stage_lse(l, desk())) : 0;
    lr_stage_took(&s->stages[i], &s->state[i], desk(), token, p);
}

/* What exact masses of the pieces from p to end come to, of those that hold much or of the others; *about: less what
 * was thought of them, *values: less how many values they have. */
static uint64_t exactly(const lr_scratch *w, const float *x, int n, int p, int end, float best, double much, bool few,
                        double *about, int *values)
{
    uint64_t units = 0;
    for (; p < end; p++) {
        int at = p * LR_PIECE, len = n - at < LR_PIECE ? n - at : LR_PIECE;
        if (((double)w->sums[p] > much) != few) continue;
        units += w->k->mass(x + at, len, best);
        *about -= (double)w->sums[p];
        *values -= len;
    }
    return units;
}

/* The natural logarithm of the sum of e^x over a row whose peaks are known: what exact masses give. The few pieces that
 * hold nearly all are added up exactly, and of the others as many as it takes until the result is a single float
 * whatever the rest may be. */
static float log_sum(lr_scratch *w, const float *x, int n, float best)
{
    enum { AT_ONCE = 64 };
    const float *ahead = lr_stage_ahead(w);
    double all = 0, rest;
    int left = n, pieces = lr_pieces(n);
    if (isinf(best)) return best;
    if (n > LR_GLANCE_N) return (float)lr_row_log_of_mass(best, w->k->mass_warm(x, n, best, 1.0f, ahead));
    w->k->glance(x, NULL, n, w->peak, best, 1.0f, w->sums, ahead);
    for (int p = 0; p < pieces; p++) all += (double)w->sums[p];
    rest = all;
    uint64_t units = exactly(w, x, n, 0, pieces, best, all / FEW_HOLD, true, &rest, &left);
    for (int p = 0; p < pieces; p += AT_ONCE) {
        double off = LR_GLANCE_1 * rest + left * 0x1p-40 + 1e-12 * all, sum = (double)units * 0x1p-40 + rest;
        float least = (float)((double)best + log(sum - off)), most = (float)((double)best + log(sum + off));
        if (least == most) return least;
        units +=
            exactly(w, x, n, p, p + AT_ONCE < pieces ? p + AT_ONCE : pieces, best, all / FEW_HOLD, false, &rest, &left);
    }
    return (float)lr_row_log_of_mass(best, units);
}

static void fill_top(lr_scratch *w, const float *x, int n_vocab, float lse, int n_top, lr_top *top)
{
    int32_t ids[MAX_TOP];
    int n = n_top > 0 ? w->k->topk_peaks(x, NULL, n_vocab, w->peak, n_top, ids, w->top) : 0;
    for (int i = 0; i < n_top; i++) top[i] = i < n ? (lr_top){ids[i], w->top[i] - lse} : (lr_top){-1, -INFINITY};
}

/* The row as the chain leaves it, after its log-probabilities were noted if they are wanted (*lse: of the raw row). */
static int prepare(lr_sampler *s, lr_logits *l, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx,
                   int n_top, float *lse, lr_top *top, lr_error *err)
{
    lr_scratch *w = desk();
    *lse = 0;
    w->peaks_known = w->raw_wanted = false;
    if (n_top > MAX_TOP) {
        w->given = NULL;
        return lr_fail(err, LR_EINVAL, "%d log-probabilities a token; %d are the most", n_top, MAX_TOP);
    }
    if (n_top >= 0) {
        *lse = log_sum(w, logits, s->n_vocab, take_peaks(w, logits, NULL, s->n_vocab));
        w->raw_wanted = true;
        fill_top(w, logits, s->n_vocab, *lse, n_top, top);
    }
    return run_chain(s, l, logits, mask, ctx, err);
}

/* The token's logit in the row as it came. */
static float raw_logit(const lr_logits *l, int32_t token)
{
    return desk()->raw_wanted ? l->x[token] : desk()->raw[token];
}

int lr_sampler_draw(lr_sampler *s, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int n_top,
                    int32_t *token, float *logprob, lr_top *top, lr_error *err)
{
    lr_logits l;
    float lse;
    int rc = prepare(s, &l, logits, mask, ctx, n_top, &lse, top, err);
    if (rc) desk()->ahead = NULL;
    if (rc) return rc;
    double u = lr_sample_uniform(s->seed, ctx->position, 0);
    *token = l.n_cand < 0 ? lr_stage_draw_dense(&l, desk(), u) : draw_candidate(&l, desk(), u);
    learn(s, &l, *token);
    desk()->ahead = NULL;
    if (n_top >= 0) *logprob = raw_logit(&l, *token) - lse;
    return 0;
}

int lr_sampler_probs(lr_sampler *s, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int32_t *ids,
                     float *p, size_t cap, size_t *n, lr_error *err)
{
    lr_logits l;
    desk()->peaks_known = desk()->raw_wanted = false;
    int rc = run_chain(s, &l, logits, mask, ctx, err);
    if (rc) return rc;
    if (l.n_cand < 0) lr_stage_narrow(&l, desk(), -INFINITY);
    double sum = 0;
    for (int i = 0; i < l.n_cand; i++) sum += exp((double)l.cand[i] - (double)l.cand[0]);
    *n = (size_t)l.n_cand;
    for (size_t i = 0; i < *n && i < cap; i++) {
        ids[i] = l.cand_id[i];
        p[i] = (float)(exp((double)l.cand[i] - (double)l.cand[0]) / sum);
    }
    return 0;
}

/* ---- drafts ---- */

enum { STREAM_DRAFT = 0x5bec0, STREAM_JUDGE, STREAM_REST };

int lr_sampler_copy_plain(lr_sampler **out, const lr_sampler *s, lr_error *err)
{
    lr_stage plain[MAX_STAGES];
    size_t n = 0;
    for (int i = 0; i < s->n_stages; i++)
        if (s->stages[i].kind != LR_STAGE_CALLBACK && !lr_stage_learns(&s->stages[i])) plain[n++] = s->stages[i];
    return build(out, plain, n, s->seed, s->n_vocab, true, err);
}

int lr_sampler_draft(lr_sampler *s, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int cap,
                     int32_t *ids, float *q, int *n, int32_t *token, lr_error *err)
{
    lr_logits l;
    desk()->peaks_known = desk()->raw_wanted = false;
    int rc = run_chain(s, &l, logits, mask, ctx, err);
    if (rc) return rc;
    lr_stage_top_k(cap, &l, desk());
    if (l.n_cand < 0) lr_stage_narrow(&l, desk(), -INFINITY); /* the vocabulary is that small */
    double sum = 0, at = 0, u = lr_sample_uniform(s->seed, ctx->position, STREAM_DRAFT);
    for (int i = 0; i < l.n_cand; i++) sum += exp((double)l.cand[i] - (double)l.cand[0]);
    *n = l.n_cand;
    *token = l.cand_id[0];
    bool found = false;
    for (int i = 0; i < l.n_cand; i++) {
        ids[i] = l.cand_id[i];
        q[i] = (float)(exp((double)l.cand[i] - (double)l.cand[0]) / sum);
        at += (double)q[i];
        if (!found && q[i] > 0) *token = ids[i];
        found = found || at > u;
    }
    return 0;
}

static double draft_chance(const int32_t *ids, const float *q, int n, int32_t token)
{
    for (int i = 0; i < n; i++)
        if (ids[i] == token) return (double)q[i];
    return 0;
}

/* Draws from max(0, p - q), p being the row; the draft itself if nothing is left of it, which rounding may bring. */
static int32_t draw_rest(lr_logits *l, double lse, int32_t draft, const int32_t *ids, const float *q, int n, double u)
{
    int m = l->n_cand < 0 ? l->n_vocab : l->n_cand;
    const float *x = l->n_cand < 0 ? l->x : l->cand;
    lr_scratch *w = desk();
    lr_stage_unmark(w);
    for (int i = 0; i < n; i++) { /* where a token is in q */
        w->mark[ids[i]] = w->epoch;
        w->count[ids[i]] = i;
    }
    double sum = 0, at = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < m; i++) {
            int32_t id = l->n_cand < 0 ? i : l->cand_id[i];
            double p = x[i] > -INFINITY ? exp((double)x[i] - lse) : 0;
            if (w->mark[id] == w->epoch) p -= (double)q[w->count[id]];
            if (!(p > 0)) continue;
            if (pass == 0) {
                sum += p;
                continue;
            }
            draft = id;
            at += p;
            if (at > u * sum) return draft;
        }
    }
    return draft;
}

int lr_sampler_judge(lr_sampler *s, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int32_t draft,
                     const int32_t *ids, const float *q, int n, int n_top, int32_t *token, float *logprob, lr_top *top,
                     lr_error *err)
{
    lr_logits l;
    float lse;
    int rc = prepare(s, &l, logits, mask, ctx, n_top, &lse, top, err);
    if (rc) return rc;
    lr_stage_plain(&l, desk());
    double all = lr_stage_lse(&l, desk());
    const float *x = lr_stage_slot(&l, draft);
    double p = x && *x > -INFINITY ? exp((double)*x - all) : 0;
    *token = draft;
    if (!(lr_sample_uniform(s->seed, ctx->position, STREAM_JUDGE) * draft_chance(ids, q, n, draft) < p))
        *token = draw_rest(&l, all, draft, ids, q, n, lr_sample_uniform(s->seed, ctx->position, STREAM_REST));
    learn(s, &l, *token);
    if (n_top >= 0) *logprob = raw_logit(&l, *token) - lse;
    return 0;
}
