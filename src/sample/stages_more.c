/* stages_more.c - stages that look further than one row: at its entropy, at repetitions, at what was drawn before.
 *
 * Dynamic temperature (llama.cpp's temp-ext): t = lo + (hi - lo) * (H / ln n)^c with lo = max(0, a - b), hi = a + b, H
 * the entropy of the n tokens that are left.
 *
 * XTC (exclude top choices): with chance a, of the tokens with p >= b all but the least probable are taken out.
 *
 * DRY (don't repeat yourself): if the last m tokens, none of them a breaker, came before, and t followed there, then t
 * loses a * b^(m - n) for the longest such m, if m >= n.
 *
 * Mirostat, arXiv:2007.14966: keeps the surprise -log2 p of what is drawn near tau. mu begins at 2 tau and moves by eta
 * times the error. Version 1 estimates the exponent s of a Zipf distribution from the best m tokens and takes the best
 * k = ((e 2^mu) / (1 - N^-e))^(1/s) with e = s - 1; version 2 takes the tokens whose surprise is at most mu.
 *
 * Adaptive-p, as llama.cpp defines it: prefers tokens whose probability is near a target, which moves so that the mean
 * of those drawn stays at a. The logit of a token becomes 5 - 10 d^2 / (1 + d) with d = |p - target| / 0.3.
 */
#include "sample/sample_int.h"
#include <math.h>
#include <string.h>

enum { XTC_STREAM = 2 };  /* of lr_sample_uniform */
#define MOST_PENALTY 1e30 /* so that no row ends up all -inf */
#define ZIPF_FLAT    1e-6 /* exponents nearer to 1 count as 1 */

/* ---- checking ---- */

static int check(bool ok, const char *what, float x, const char *want, lr_error *err)
{
    return ok ? 0 : lr_fail(err, LR_EINVAL, "%s = %g: %s expected", what, (double)x, want);
}

static int check_mirostat(const lr_stage *s, lr_error *err)
{
    int rc = check(s->a >= 0 && isfinite(s->a), "mirostat: tau", s->a, "a number of at least 0", err);
    if (!rc) rc = check(s->b >= 0 && isfinite(s->b), "mirostat: eta", s->b, "a number of at least 0", err);
    if (!rc && s->kind == LR_STAGE_MIROSTAT_1)
        rc = check(s->n >= 2 && s->n <= LR_TOPK_MAX, "mirostat: m", (float)s->n, "2 to the most that top_k takes", err);
    return rc;
}

int lr_stage_check_more(const lr_stage *s, lr_error *err)
{
    int rc;
    if (s->last_n < 0) return lr_fail(err, LR_EINVAL, "a window of %d tokens is negative", s->last_n);
    switch (s->kind) {
    case LR_STAGE_DYNAMIC:
        rc = check(s->a >= 0 && isfinite(s->a), "dynamic temperature", s->a, "a number of at least 0", err);
        if (!rc)
            rc = check(s->b >= 0 && isfinite(s->b), "dynamic temperature: range", s->b, "a number of at least 0", err);
        if (!rc) rc = check(s->c > 0 && isfinite(s->c), "dynamic temperature: exponent", s->c, "a number above 0", err);
        return rc;
    case LR_STAGE_XTC:
        rc = check(s->a >= 0 && s->a <= 1, "xtc: probability", s->a, "0 to 1", err);
        return rc ? rc : check(s->b >= 0 && s->b <= 1, "xtc: threshold", s->b, "0 to 1", err);
    case LR_STAGE_DRY:
        rc = check(s->a >= 0 && isfinite(s->a), "dry: multiplier", s->a, "a number of at least 0", err);
        if (!rc) rc = check(s->b >= 1 && isfinite(s->b), "dry: base", s->b, "a number of at least 1", err);
        return rc ? rc : check(s->n >= 0, "dry: allowed length", (float)s->n, "at least 0", err);
    case LR_STAGE_NO_REPEAT:
        return check(s->n >= 0, "no_repeat_ngram", (float)s->n, "at least 0", err);
    case LR_STAGE_MIROSTAT_1:
    case LR_STAGE_MIROSTAT_2:
        return check_mirostat(s, err);
    case LR_STAGE_ADAPTIVE_P:
        rc = check(s->a >= 0 && s->a <= 1, "adaptive_p: target", s->a, "0 to 1", err);
        return rc ? rc : check(s->b >= 0 && s->b <= 0.99f, "adaptive_p: decay", s->b, "0 to 0.99", err);
    default:
        return lr_fail(err, LR_EINVAL, "unknown sampler stage %d", (int)s->kind);
    }
}

/* ---- by entropy ---- */

static void dynamic(const lr_stage *s, lr_logits *l, lr_scratch *w)
{
    const float *x = l->n_cand < 0 ? l->x : l->cand;
    int n = l->n_cand < 0 ? l->n_vocab : l->n_cand, m = 0;
    double lse = lr_stage_lse(l, w), entropy = 0;
    if (s->b <= 0) {
        lr_stage_temperature(s->a, l, w);
        return;
    }
    for (int i = 0; i < n; i++) {
        if (!(x[i] > -INFINITY)) continue;
        double lp = (double)x[i] - lse;
        entropy -= exp(lp) * lp;
        m++;
    }
    if (m <= 1) return;
    double lo = s->a > s->b ? (double)s->a - (double)s->b : 0, hi = (double)s->a + (double)s->b;
    double part = entropy / log((double)m);
    part = part < 0 ? 0 : part > 1 ? 1 : part; /* rounding */
    lr_stage_temperature((float)(lo + (hi - lo) * pow(part, (double)s->c)), l, w);
}

/* ---- XTC ---- */

/* Dense: takes out all of w->ids[0..n-1] but the least probable, of equals the one with the highest id. */
static void exclude_dense(lr_logits *l, const lr_scratch *w, int n)
{
    int least = 0;
    for (int i = 1; i < n; i++)
        if (l->x[w->ids[i]] <= l->x[w->ids[least]]) least = i;
    for (int i = 0; i < n; i++)
        if (i != least) l->x[w->ids[i]] = -INFINITY;
}

static void xtc(const lr_stage *s, lr_logits *l, lr_scratch *w, const lr_sample_ctx *c)
{
    if (!(s->a > 0) || s->b > 0.5f) return; /* no two tokens can both have more than a half */
    if (lr_sample_uniform(c->seed, c->position, XTC_STREAM) > (double)s->a) return;
    double threshold = lr_stage_lse(l, w) + (s->b > 0 ? log((double)s->b) : -INFINITY);
    if (l->n_cand < 0) {
        float t = (float)threshold;
        int n = w->k->compact_above(l->x, l->n_vocab, t, w->ids, l->n_vocab), m = 0;
        for (int i = 0; i < n; i++)
            if (l->x[w->ids[i]] > -INFINITY) w->ids[m++] = w->ids[i];
        exclude_dense(l, w, m);
        return;
    }
    int n = 0;
    while (n < l->n_cand && (double)l->cand[n] >= threshold) n++;
    if (n < 2) return;
    l->n_cand -= n - 1;
    memmove(l->cand, l->cand + n - 1, (size_t)l->n_cand * sizeof *l->cand);
    memmove(l->cand_id, l->cand_id + n - 1, (size_t)l->n_cand * sizeof *l->cand_id);
}

/* ---- repetitions ---- */

/* The last n tokens of prompt and output as one list. */
typedef struct history {
    const lr_sample_ctx *c;
    size_t skip;
    int n;
} history;

static history history_of(const lr_sample_ctx *c, int last_n)
{
    size_t total = c->n_prompt + c->n_generated, n = last_n > 0 && (size_t)last_n < total ? (size_t)last_n
                                                     : total > INT32_MAX                  ? INT32_MAX
                                                                                          : total;
    return (history){c, total - n, (int)n};
}

static int32_t at(const history *h, int i)
{
    size_t k = h->skip + (size_t)i;
    return k < h->c->n_prompt ? h->c->prompt[k] : h->c->generated[k - h->c->n_prompt];
}

/* Tokens at the end since the last breaker. */
static int unbroken(const lr_stage *s, const history *h, lr_scratch *w, int n_vocab)
{
    int n = 0;
    lr_stage_unmark(w);
    for (size_t i = 0; i < s->n_ids; i++) w->mark[s->ids[i]] = w->epoch;
    while (n < h->n) {
        int32_t id = at(h, h->n - 1 - n);
        if (id < 0 || id >= n_vocab || w->mark[id] == w->epoch) break;
        n++;
    }
    return n;
}

/* How many tokens before place i are the same as at the end; at most `most`. */
static int match(const history *h, int i, int most)
{
    int m = 0;
    while (m < most && m < i && at(h, i - 1 - m) == at(h, h->n - 1 - m)) m++;
    return m;
}

static void dry(const lr_stage *s, lr_logits *l, lr_scratch *w, const lr_sample_ctx *c)
{
    history h = history_of(c, s->last_n);
    if (!(s->a > 0)) return;
    int most = unbroken(s, &h, w, l->n_vocab), n_ids = 0;
    if (s->b > 1.0f) { /* longer matches cost no more */
        double useful = s->n + ceil(log(MOST_PENALTY / (double)s->a) / log((double)s->b));
        if (useful < most) most = useful < s->n ? s->n : (int)useful;
    }
    if (most < s->n || most == 0) return;
    lr_stage_unmark(w);
    for (int i = 1; i < h.n; i++) {
        int32_t id = at(&h, i);
        int m = match(&h, i, most);
        if (m == 0 || m < s->n || id < 0 || id >= l->n_vocab) continue;
        if (w->mark[id] != w->epoch) {
            w->mark[id] = w->epoch;
            w->count[id] = m;
            w->ids[n_ids++] = id;
        } else if (m > w->count[id]) {
            w->count[id] = m;
        }
    }
    for (int i = 0; i < n_ids; i++) {
        float *x = lr_stage_slot(l, w->ids[i]);
        double penalty = (double)s->a * pow((double)s->b, w->count[w->ids[i]] - s->n);
        if (x) *x -= (float)(penalty < MOST_PENALTY ? penalty : MOST_PENALTY);
    }
    lr_stage_changed(l, w);
}

static void no_repeat(const lr_stage *s, lr_logits *l, lr_scratch *w, const lr_sample_ctx *c)
{
    history h = history_of(c, s->last_n);
    if (s->n <= 0 || h.n < s->n) return;
    for (int i = s->n - 1; i < h.n; i++) {
        int32_t id = at(&h, i);
        if (id < 0 || id >= l->n_vocab || match(&h, i, s->n - 1) < s->n - 1) continue;
        float *x = lr_stage_slot(l, id);
        if (x) *x = -INFINITY;
    }
    lr_stage_changed(l, w);
}

/* ---- learning ---- */

/* Zipf exponent from the m best logits, sorted: least squares through the logs of neighbours' ratios. */
static double zipf(const float *x, int m)
{
    double tb = 0, tt = 0;
    for (int i = 0; i + 1 < m && x[i + 1] > -INFINITY; i++) {
        double t = log((double)(i + 2) / (i + 1));
        tb += t * ((double)x[i] - (double)x[i + 1]);
        tt += t * t;
    }
    return tt > 0 ? tb / tt : 0;
}

static void mirostat_1(const lr_stage *s, double mu, lr_logits *l, lr_scratch *w)
{
    int m = l->n_cand >= 0 ? l->n_cand : l->n_vocab;
    if (m > s->n) m = s->n;
    if (l->n_cand < 0) m = w->k->topk(l->x, l->n_vocab, m, w->ids, w->cand);
    if (m < 2) return;
    double z = zipf(w->cand, m), e = z - 1, n = l->n_vocab;
    double head = fabs(e) < ZIPF_FLAT ? 1 / log(n) : e / (1 - pow(n, -e));
    double k = pow(head * exp2(mu), 1 / z);
    int most = l->n_cand >= 0 ? l->n_cand : l->n_vocab;
    lr_stage_top_k(k >= (double)most ? most : k < 1 ? 1 : (int)k, l, w);
}

static void mirostat_2(double mu, lr_logits *l, lr_scratch *w)
{
    double threshold = lr_stage_lse(l, w) - mu * M_LN2;
    float best = l->n_cand < 0 ? w->k->max(l->x, l->n_vocab) : l->n_cand > 0 ? l->cand[0] : -INFINITY;
    if ((double)best <= threshold) {
        lr_stage_keep_best(l, w);
        return;
    }
    if (l->n_cand < 0) lr_stage_narrow(l, w, (float)threshold);
    while (l->n_cand > 1 && (double)l->cand[l->n_cand - 1] < threshold) l->n_cand--;
}

static void adaptive(const lr_stage *s, const lr_stage_state *st, lr_logits *l, lr_scratch *w)
{
    float *x = l->n_cand < 0 ? l->x : l->cand;
    int n = l->n_cand < 0 ? l->n_vocab : l->n_cand;
    double lse = lr_stage_lse(l, w), target = (double)s->a;
    if (st->y > 0) target = 2 * target - st->x / st->y;
    target = target < 0 ? 0 : target > 1 ? 1 : target;
    for (int i = 0; i < n; i++) {
        if (!(x[i] > -INFINITY)) continue;
        double p = exp((double)x[i] - lse), d = fabs(p - target) / 0.3;
        w->prior[l->n_cand < 0 ? i : l->cand_id[i]] = (float)p;
        x[i] = (float)(5 - 10 * d * d / (1 + d));
    }
    lr_stage_changed(l, w);
}

bool lr_stage_learns(const lr_stage *s)
{
    return s->kind == LR_STAGE_MIROSTAT_1 || s->kind == LR_STAGE_MIROSTAT_2 || s->kind == LR_STAGE_ADAPTIVE_P;
}

lr_stage_state lr_stage_begin(const lr_stage *s)
{
    if (s->kind == LR_STAGE_ADAPTIVE_P) { /* as if it had been on the target for ever */
        double weight = 1 / (1 - (double)s->b);
        return (lr_stage_state){(double)s->a * weight, weight};
    }
    return (lr_stage_state){2 * (double)s->a, 0}; /* mirostat: mu */
}

void lr_stage_took(const lr_stage *s, lr_stage_state *st, const lr_scratch *w, int32_t token, double p)
{
    if (s->kind == LR_STAGE_ADAPTIVE_P) {
        st->x = (double)w->prior[token] + (double)s->b * st->x;
        st->y = 1 + (double)s->b * st->y;
    } else if (p > 0) {
        st->x -= (double)s->b * (-log2(p) - (double)s->a);
    }
}

void lr_stage_run_more(const lr_stage *s, const lr_stage_state *st, lr_logits *l, lr_scratch *w, const lr_sample_ctx *c)
{
    switch (s->kind) {
    case LR_STAGE_DYNAMIC:
        dynamic(s, l, w);
        break;
    case LR_STAGE_XTC:
        xtc(s, l, w, c);
        break;
    case LR_STAGE_DRY:
        dry(s, l, w, c);
        break;
    case LR_STAGE_NO_REPEAT:
        no_repeat(s, l, w, c);
        break;
    case LR_STAGE_MIROSTAT_1:
        mirostat_1(s, st->x, l, w);
        break;
    case LR_STAGE_MIROSTAT_2:
        mirostat_2(st->x, l, w);
        break;
    default:
        adaptive(s, st, l, w);
    }
}
