/* stages.c - what each stage of a sampler chain does to a row of logits.
 *
 * A row is dense (l->n_cand < 0: all of l->x counts) or narrowed to candidates that are kept sorted: logit descending,
 * lower id first on ties. Stages that only look at the best few tokens of a dense row never sort the vocabulary: they
 * take all tokens above a threshold, which the vocabulary kernels find in one pass, and sort those.
 */
#include "base/mass.h"
#include "sample/row.h"
#include "sample/sample_int.h"
#include <math.h>
#include <string.h>

/* ---- sorting ---- */

/* Unsigned key that sorts ascending as the floats sort descending. */
static uint32_t descending_key(float f)
{
    uint32_t u;
    f += 0.0f; /* one key for both zeros */
    memcpy(&u, &f, sizeof u);
    return u & 0x80000000u ? u : ~(u | 0x80000000u);
}

/* Stable, by key: least significant digit first, 11 bits at a time. */
static lr_pair *radix_sort(lr_pair *a, lr_pair *b, int n)
{
    for (int shift = 0; shift < 33; shift += 11) {
        uint32_t start[2048] = {0};
        for (int i = 0; i < n; i++) start[a[i].key >> shift & 2047]++;
        uint32_t sum = 0;
        for (int d = 0; d < 2048; d++) {
            uint32_t c = start[d];
            start[d] = sum;
            sum += c;
        }
        for (int i = 0; i < n; i++) b[start[a[i].key >> shift & 2047]++] = a[i];
        lr_pair *t = a;
        a = b;
        b = t;
    }
    return a;
}

static bool before(float x, int32_t i, float y, int32_t j) { return x > y || (x == y && i < j); }

static void insertion_sort(lr_logits *l)
{
    for (int i = 1; i < l->n_cand; i++) {
        float x = l->cand[i];
        int32_t id = l->cand_id[i];
        int j = i;
        for (; j > 0 && before(x, id, l->cand[j - 1], l->cand_id[j - 1]); j--) {
            l->cand[j] = l->cand[j - 1];
            l->cand_id[j] = l->cand_id[j - 1];
        }
        l->cand[j] = x;
        l->cand_id[j] = id;
    }
}

/* Sorts the candidates whatever their order; for many of them ids must ascend among equals, as they do after narrowing.
 */
static void sort_candidates(lr_logits *l, lr_scratch *w)
{
    if (l->n_cand <= 64) {
        insertion_sort(l);
        return;
    }
    bool sorted = true;
    for (int i = 1; i < l->n_cand && sorted; i++)
        sorted = !before(l->cand[i], l->cand_id[i], l->cand[i - 1], l->cand_id[i - 1]);
    if (sorted) return;
    bool ascending = true;
    for (int i = 0; i < l->n_cand; i++) {
        w->a[i] = (lr_pair){(uint32_t)l->cand_id[i], i}; /* by id, so that ties keep it */
        ascending = ascending && (i == 0 || l->cand_id[i] > l->cand_id[i - 1]);
    }
    lr_pair *by_id = ascending ? w->a : radix_sort(w->a, w->b, l->n_cand), *other = by_id == w->a ? w->b : w->a;
    for (int i = 0; i < l->n_cand; i++) by_id[i].key = descending_key(l->cand[by_id[i].id]);
    lr_pair *p = radix_sort(by_id, other, l->n_cand);
    for (int i = 0; i < l->n_cand; i++) {
        w->raw[l->n_vocab + i] = l->cand[p[i].id];
        w->ids[i] = l->cand_id[p[i].id];
    }
    memcpy(l->cand, w->raw + l->n_vocab, (size_t)l->n_cand * sizeof *l->cand);
    memcpy(l->cand_id, w->ids, (size_t)l->n_cand * sizeof *l->cand_id);
}

/* ---- a whole row: its peaks, and a temperature that is applied where values are looked at ---- */

static void find_peaks(const lr_logits *l, lr_scratch *w)
{
    if (w->peaks_known) return;
    (void)w->k->peaks(l->x, w->bits, l->n_vocab, w->peak);
    w->peaks_known = true;
    w->rough = false;
}

const float *lr_stage_ahead(lr_scratch *w)
{
    const float *x = w->ahead;
    w->ahead = NULL;
    return x;
}

/* The mask, to n values from a piece's first on. A token that is drawn keeps its value. */
static void apply_mask(const lr_logits *l, const lr_scratch *w, int at, int n)
{
    if (w->bits) w->k->mask(l->x + at, w->bits + at / 32, n);
}

void lr_stage_rough(int n_vocab, lr_scratch *w)
{
    enum { WORDS = LR_PIECE / 32 };
    int whole = n_vocab / LR_PIECE;
    w->rough = true;
    w->settled = 0;
    for (int p = 0; p < whole; p++) {
        const uint32_t *b = w->bits + p * WORDS;
        uint32_t any = 0, all = UINT32_MAX;
        for (int i = 0; i < WORDS; i++) {
            any |= b[i];
            all &= b[i];
        }
        w->sure[p] = !any || all == UINT32_MAX;
        if (!any) w->peak[p] = -INFINITY;
    }
    if (whole < lr_pieces(n_vocab)) w->sure[whole] = false;
}

/* The mask is respected in the peak of piece p. */
static void make_sure(const lr_logits *l, lr_scratch *w, int p)
{
    int at = p * LR_PIECE, n = l->n_vocab - at < LR_PIECE ? l->n_vocab - at : LR_PIECE;
    if (w->rough && w->sure[p]) return;
    apply_mask(l, w, at, n);
    w->peak[p] = w->k->max(l->x + at, n);
    w->sure[p] = true;
}

/* The k largest peaks respect the mask. Of some more the k-th largest that is left is a bound: pieces below it without
 * the mask are so with it. */
static void settle_peaks(const lr_logits *l, lr_scratch *w, int k)
{
    int32_t at[LR_TOPK_MAX];
    float some[LR_TOPK_MAX], top[LR_TOPK_MAX];
    int pieces = lr_pieces(l->n_vocab);
    if (!w->rough || w->settled >= k) return;
    int n = w->k->topk(w->peak, pieces, 2 * k + 6 < LR_TOPK_MAX ? 2 * k + 6 : LR_TOPK_MAX, at, some);
    for (int i = 0; i < n; i++) {
        make_sure(l, w, at[i]);
        some[i] = w->peak[at[i]];
    }
    float bound = w->k->topk(some, n, k, at, top) < k ? -INFINITY : top[k - 1];
    for (int p = 0; p < pieces; p++)
        if (w->peak[p] >= bound) make_sure(l, w, p);
    w->settled = k;
}

float lr_stage_best(const lr_logits *l, lr_scratch *w)
{
    if (w->warm) return 0; /* (from - from) / t */
    find_peaks(l, w);
    settle_peaks(l, w, 1);
    return w->k->max(w->peak, lr_pieces(l->n_vocab));
}

/* Single values of a whole row may be written to. */
static void keep_raw(const lr_logits *l, lr_scratch *w)
{
    if (w->raw_wanted) memcpy(w->raw, l->x, (size_t)l->n_vocab * sizeof *l->x);
    w->raw_wanted = false;
}

void lr_stage_plain(lr_logits *l, lr_scratch *w)
{
    if (l->n_cand >= 0) return;
    keep_raw(l, w);
    apply_mask(l, w, 0, l->n_vocab);
    w->bits = NULL;
    if (!w->warm) return;
    w->k->temper(l->x, l->n_vocab, w->from, w->t);
    w->warm = w->peaks_known = false;
}

/* x[id] of a whole row was `old` before. */
static void touched(const lr_logits *l, lr_scratch *w, int32_t id, float old)
{
    if (l->n_cand >= 0 || !w->peaks_known) return;
    int p = id / LR_PIECE;
    if (l->x[id] > w->peak[p]) {
        w->peak[p] = l->x[id];
        w->sure[p] = true;
    } else if (!(old < w->peak[p])) {
        w->sure[p] = false;
        make_sure(l, w, p);
        w->settled = 0;
    }
}

/* The token's value, at x, becomes v. */
static void set(const lr_logits *l, lr_scratch *w, int32_t id, float *x, float v)
{
    float old = *x;
    if (l->n_cand < 0 && w->bits && !(w->bits[id / 32] >> id % 32 & 1)) return; /* it is masked */
    *x = v;
    touched(l, w, id, old);
}

static float value(const lr_scratch *w, float x) { return w->warm ? (x - w->from) / w->t : x; }

/* The places of all values >= threshold, and perhaps of some that are a little smaller. */
static int at_least(const lr_logits *l, lr_scratch *w, float threshold)
{
    find_peaks(l, w);
    float x = threshold;
    if (w->warm) {
        double far = (double)threshold * (double)w->t;
        x = nextafterf((float)((double)w->from + far - 1e-6 * fabs(far)), -INFINITY);
    }
    return w->k->compact_peaks(l->x, w->bits, l->n_vocab, w->peak, x, w->ids);
}

void lr_stage_narrow(lr_logits *l, lr_scratch *w, float threshold)
{
    int n = at_least(l, w, threshold), m = 0;
    for (int i = 0; i < n; i++) {
        float x = value(w, l->x[w->ids[i]]);
        if (x == -INFINITY || !(x >= threshold)) continue;
        l->cand_id[m] = w->ids[i];
        l->cand[m++] = x;
    }
    l->n_cand = m;
    sort_candidates(l, w);
}

static void drop_infinite(lr_logits *l)
{
    while (l->n_cand > 0 && !(l->cand[l->n_cand - 1] > -INFINITY)) l->n_cand--;
}

/* ---- reweighing ---- */

float *lr_stage_slot(lr_logits *l, int32_t id)
{
    if (l->n_cand < 0) return &l->x[id];
    for (int i = 0; i < l->n_cand; i++)
        if (l->cand_id[i] == id) return &l->cand[i];
    return NULL;
}

void lr_stage_changed(lr_logits *l, lr_scratch *w)
{
    if (l->n_cand < 0) return;
    sort_candidates(l, w);
    drop_infinite(l);
}

void lr_stage_unmark(lr_scratch *w)
{
    if (++w->epoch == 0) {
        memset(w->mark, 0, (size_t)w->cap * sizeof *w->mark);
        w->epoch = 1;
    }
}

static void repeat_token(const lr_stage *s, lr_logits *l, lr_scratch *w, int32_t id)
{
    if (id < 0 || id >= l->n_vocab || w->mark[id] == w->epoch) return;
    w->mark[id] = w->epoch;
    float *x = lr_stage_slot(l, id);
    if (x) set(l, w, id, x, *x > 0 ? *x / s->repetition : *x * s->repetition);
}

/* Repetition looks at prompt and output (arXiv:1909.05858); presence and frequency at the output only, as OpenAI's API
 * defines them. */
static void penalties(const lr_stage *s, lr_logits *l, lr_scratch *w, const lr_sample_ctx *c)
{
    if (s->repetition != 1.0f) {
        size_t total = c->n_prompt + c->n_generated,
               skip = s->last_n > 0 && (size_t)s->last_n < total ? total - (size_t)s->last_n : 0;
        lr_stage_unmark(w);
        for (size_t i = skip; i < c->n_prompt; i++) repeat_token(s, l, w, c->prompt[i]);
        for (size_t i = skip > c->n_prompt ? skip - c->n_prompt : 0; i < c->n_generated; i++)
            repeat_token(s, l, w, c->generated[i]);
    }
    if (s->presence != 0.0f || s->frequency != 0.0f) {
        int n = 0;
        lr_stage_unmark(w);
        for (size_t i = 0; i < c->n_generated; i++) {
            int32_t id = c->generated[i];
            if (id < 0 || id >= l->n_vocab) continue;
            if (w->mark[id] != w->epoch) {
                w->mark[id] = w->epoch;
                w->count[id] = 0;
                w->ids[n++] = id;
            }
            w->count[id]++;
        }
        for (int i = 0; i < n; i++) {
            float *x = lr_stage_slot(l, w->ids[i]);
            if (x) set(l, w, w->ids[i], x, *x - (s->presence + s->frequency * (float)w->count[w->ids[i]]));
        }
    }
    lr_stage_changed(l, w);
}

void lr_stage_keep_best(lr_logits *l, lr_scratch *w)
{
    if (l->n_cand < 0) {
        if (w->warm) lr_stage_plain(l, w);
        float best = lr_stage_best(l, w);
        int p = 0, n = lr_pieces(l->n_vocab), id = -1;
        while (p < n && w->peak[p] != best) p++;
        if (p < n) {
            int at = p * LR_PIECE, left = l->n_vocab - at;
            apply_mask(l, w, at, left < LR_PIECE ? left : LR_PIECE);
            id = w->k->argmax(l->x + at, left < LR_PIECE ? left : LR_PIECE);
            if (id >= 0) id += at;
        }
        l->cand_id[0] = id;
        l->cand[0] = id >= 0 ? l->x[id] : -INFINITY;
        l->n_cand = id >= 0;
    } else if (l->n_cand > 1) {
        l->n_cand = 1;
    }
}

void lr_stage_temperature(float t, lr_logits *l, lr_scratch *w)
{
    if (!(t > 0)) {
        lr_stage_keep_best(l, w);
        return;
    }
    if (t == 1.0f) return;
    if (l->n_cand < 0) { /* the best becomes 0, so nothing overflows upward */
        if (w->warm) lr_stage_plain(l, w);
        w->from = lr_stage_best(l, w);
        w->t = t;
        w->warm = true;
        if (!isfinite(w->from) || t < LR_GLANCE_T_MIN || t > LR_GLANCE_T_MAX) lr_stage_plain(l, w);
        return;
    }
    float best = l->n_cand > 0 ? l->cand[0] : 0;
    for (int i = 0; i < l->n_cand; i++) l->cand[i] = (l->cand[i] - best) / t;
    drop_infinite(l);
}

/* ---- narrowing ---- */

void lr_stage_top_k(int k, lr_logits *l, lr_scratch *w)
{
    if (k <= 0) return;
    if (l->n_cand >= 0) {
        if (l->n_cand > k) l->n_cand = k;
        return;
    }
    if (k >= l->n_vocab) return;
    if (w->warm) lr_stage_plain(l, w);
    find_peaks(l, w);
    if (k <= LR_TOPK_MAX) {
        if (k <= lr_pieces(l->n_vocab) / 2) settle_peaks(l, w, k); /* what a bound comes from */
        l->n_cand = w->k->topk_peaks(l->x, w->bits, l->n_vocab, w->peak, k, l->cand_id, l->cand);
        drop_infinite(l);
        return;
    }
    if (w->bits) lr_stage_plain(l, w);
    float best = lr_stage_best(l, w);
    for (float d = 4;; d *= 2) { /* the first threshold that leaves enough */
        bool all = d > 1000;
        if (!all && w->k->count_above(l->x, l->n_vocab, best - d) < k) continue;
        lr_stage_narrow(l, w, all ? -INFINITY : best - d);
        break;
    }
    if (l->n_cand > k) l->n_cand = k;
}

double lr_stage_lse(const lr_logits *l, const lr_scratch *w)
{
    if (l->n_cand < 0) return (double)lr_row_logsumexp(l->x, l->n_vocab);
    if (l->n_cand == 0) return 0;
    double sum = 0;
    for (int i = 0; i < l->n_cand; i++) sum += exp((double)l->cand[i] - (double)l->cand[0]);
    return (double)l->cand[0] + log(sum);
}

/* ---- a whole row's mass ---- */

/* What the values of a dense row weigh, in units of base/mass.h. */
static uint64_t exact_mass(const lr_logits *l, const lr_scratch *w, int at, int n, float best)
{
    apply_mask(l, w, at, n);
    return w->warm ? w->k->mass_warm(l->x + at, n, w->from, w->t, NULL) : w->k->mass(l->x + at, n, best);
}

/* About the same as a share of the best's, by pieces into w->sums, and how far off any of their sums may be; < 0: this
 * can't be told. Exact masses take four times as long, and hardly ever decide anything. */
static double glance(const lr_logits *l, lr_scratch *w, float best, double *off)
{
    if (l->n_vocab > LR_GLANCE_N) return -1;
    find_peaks(l, w);
    w->k->glance(l->x, w->bits, l->n_vocab, w->peak, w->warm ? w->from : best, w->warm ? w->t : 1.0f, w->sums,
                 lr_stage_ahead(w));
    double all = 0;
    for (int p = 0; p < lr_pieces(l->n_vocab); p++) all += (double)w->sums[p];
    *off = LR_GLANCE * all;
    return all;
}

static int32_t draw_exactly(const lr_logits *l, const lr_scratch *w, float best, double u)
{
    enum { PARTS = 256 };
    uint64_t part[PARTS], all = 0, at = 0;
    int len = (l->n_vocab + PARTS - 1) / PARTS, n = 0, p = 0, i;
    len = (len + 31) / 32 * 32; /* words of a mask */
    for (i = 0; i < l->n_vocab; i += len, n++) {
        part[n] = exact_mass(l, w, i, l->n_vocab - i < len ? l->n_vocab - i : len, best);
        all += part[n];
    }
    uint64_t target = lr_mass_target(u, all);
    while (p + 1 < n && at + part[p] <= target) at += part[p++];
    for (i = p * len; i + 1 < l->n_vocab; i++)
        if ((at += lr_mass_units(lr_mass(value(w, l->x[i]) - best))) > target) break;
    return i;
}

/* The token that the exact masses would give, if all that they may be gives the same; else -1. */
static int32_t draw_at_a_glance(const lr_logits *l, lr_scratch *w, float best, double u)
{
    double off, all = glance(l, w, best, &off), before = 0;
    int p = 0, n = lr_pieces(l->n_vocab);
    if (!(all > 0)) return -1;
    while (p < n && before + (double)w->sums[p] <= u * all) before += (double)w->sums[p++];
    if (p == n) return -1;
    /* what the number falls on lies so far behind the piece's beginning, give or take 2 off */
    double least = (u * all - before - 2 * off) * (double)LR_MASS_ONE - 2, at = 0;
    double most = (u * all - before + 2 * off) * (double)LR_MASS_ONE + 2;
    if (least < 0) return -1;
    int end = l->n_vocab - p * LR_PIECE < LR_PIECE ? l->n_vocab : (p + 1) * LR_PIECE;
    apply_mask(l, w, p * LR_PIECE, end - p * LR_PIECE);
    for (int i = p * LR_PIECE; i < end; i++) {
        double next = at + (double)lr_mass_units(lr_mass(value(w, l->x[i]) - best));
        if (next > least) return next > most ? i : -1;
        at = next;
    }
    return -1;
}

int32_t lr_stage_draw_dense(const lr_logits *l, lr_scratch *w, double u)
{
    float best = lr_stage_best(l, w);
    int32_t id = draw_at_a_glance(l, w, best, u);
    return id >= 0 ? id : draw_exactly(l, w, best, u);
}

/* Makes a list of the tokens that surely hold the probability p of the best, and not many more: sorting them is what
 * takes time. Those within d of the best are taken, d growing until they reach p, and then cut in thin slices; a slice
 * holds at least what its mean says of each of its tokens, as exp is convex. */
static void narrow_to_mass(double p, double lse, lr_logits *l, lr_scratch *w)
{
    enum { A_UNIT = 64, FAR = 96 };
    double below[A_UNIT * FAR], margin = 4 * LR_GLANCE; /* what masses may be off */
    int count[A_UNIT * FAR];
    float best = lr_stage_best(l, w);
    double one = exp((double)best - lse), step = exp(-1.0 / A_UNIT);
    for (float d = 3; d <= FAR; d *= 1.5f) { /* a row may have ten times as many within twice as far */
        int slices = (int)(A_UNIT * d), k = 0, n = at_least(l, w, best - d);
        double sum = 0, edge = one;
        memset(below, 0, (size_t)slices * sizeof *below);
        memset(count, 0, (size_t)slices * sizeof *count);
        for (int i = 0; i < n; i++) {
            float y = best - value(w, l->x[w->ids[i]]), at = y * A_UNIT;
            int slice = at >= 0 && at < (float)slices ? (int)at : slices - 1;
            below[slice] += (double)y;
            count[slice]++;
        }
        for (; k < slices && sum < p + margin; k++, edge *= step) {
            double in = count[k] ? below[k] / count[k] - (double)k / A_UNIT : 0; /* behind the slice's edge */
            if (in < 0 || in > 1.0 / A_UNIT)
                sum += count[k] * one * exp(-below[k] / count[k]);
            else
                sum += count[k] * edge * (1 - in * (1 - in * (0.5 - in / 6))); /* e^-in, a little less */
        }
        if (sum < p + margin) continue;
        lr_stage_narrow(l, w, best - (float)(k < slices ? k + 1 : k) / A_UNIT);
        return;
    }
    lr_stage_narrow(l, w, -INFINITY);
}

int lr_stage_reach(const lr_scratch *w, const float *x, int n, float best, uint64_t least, uint64_t *sum)
{
    enum { AT_ONCE = 64 };
    int i = 0;
    *sum = 0;
    for (; n - i >= AT_ONCE; i += AT_ONCE) {
        uint64_t some = w->k->mass(x + i, AT_ONCE, best);
        if (*sum + some >= least) break;
        *sum += some;
    }
    for (; i < n; i++)
        if ((*sum += lr_mass_units(lr_mass(x[i] - best))) >= least) break;
    return i;
}

/* A whole row, by exact masses. */
static void top_p_exactly(float p, float best, uint64_t all, lr_logits *l, lr_scratch *w)
{
    uint64_t need = lr_mass_share(p, all), sum;
    if (l->n_cand < 0) narrow_to_mass((double)p, lr_row_log_of_mass(best, all), l, w);
    int i = lr_stage_reach(w, l->cand, l->n_cand, best, need, &sum);
    if (i < l->n_cand) l->n_cand = i + 1;
}

/* Nucleus sampling, arXiv:1904.09751: the fewest best tokens whose probabilities reach p. */
static void top_p(float p, lr_logits *l, lr_scratch *w)
{
    if (p >= 1) return;
    if (!(p > 0)) {
        lr_stage_keep_best(l, w);
        return;
    }
    float best = l->n_cand < 0 ? lr_stage_best(l, w) : l->n_cand > 0 ? l->cand[0] : 0;
    if (isinf(best)) return;
    if (l->n_cand >= 0) {
        top_p_exactly(p, best, w->k->mass(l->cand, l->n_cand, best), l, w);
        return;
    }
    double off, about = glance(l, w, best, &off);
    if (!(about > 0)) {
        top_p_exactly(p, best, exact_mass(l, w, 0, l->n_vocab, best), l, w);
        return;
    }
    narrow_to_mass((double)p, (double)best + log(about), l, w);
    double least = (double)p * (about - off) * (double)LR_MASS_ONE - 2;
    double most = (double)p * (about + off) * (double)LR_MASS_ONE + 2;
    uint64_t sum;
    int i = lr_stage_reach(w, l->cand, l->n_cand, best, least > 0 ? (uint64_t)ceil(least) : 0, &sum);
    if (i == l->n_cand) return;
    if ((double)sum >= most)
        l->n_cand = i + 1;
    else
        top_p_exactly(p, best, exact_mass(l, w, 0, l->n_vocab, best), l, w);
}

/* min-p, arXiv:2407.01082: tokens at least min_p times as likely as the best. */
static void min_p(float p, lr_logits *l, lr_scratch *w)
{
    if (!(p > 0)) return;
    float d = logf(p < 1 ? p : 1);
    if (l->n_cand < 0) {
        lr_stage_narrow(l, w, lr_stage_best(l, w) + d);
        return;
    }
    int n = 0;
    while (n < l->n_cand && l->cand[n] >= l->cand[0] + d) n++;
    l->n_cand = n;
}

/* Locally typical sampling, arXiv:2202.00666: tokens whose surprise is nearest to the entropy, until they reach p. */
static void typical(float p, lr_logits *l, lr_scratch *w)
{
    if (p >= 1) return;
    if (l->n_cand < 0) lr_stage_narrow(l, w, -INFINITY);
    double lse = lr_stage_lse(l, w), entropy = 0, sum = 0;
    int n = l->n_cand;
    for (int i = 0; i < n; i++) entropy -= exp((double)l->cand[i] - lse) * ((double)l->cand[i] - lse);
    for (int i = 0; i < n; i++) {
        float far = (float)fabs(lse - (double)l->cand[i] - entropy);
        w->a[i] = (lr_pair){~descending_key(far), i};
    }
    lr_pair *o = radix_sort(w->a, w->b, n);
    lr_stage_unmark(w);
    for (int i = 0; i < n; i++) {
        w->mark[o[i].id] = w->epoch; /* marks by place in the list here */
        sum += exp((double)l->cand[o[i].id] - lse);
        if (sum >= (double)p) break;
    }
    int m = 0;
    for (int i = 0; i < n; i++)
        if (w->mark[i] == w->epoch) {
            l->cand[m] = l->cand[i];
            l->cand_id[m++] = l->cand_id[i];
        }
    l->n_cand = m;
}

/* Top-n-sigma, arXiv:2411.07641: logits within a standard deviations of the best. */
static void top_n_sigma(float a, lr_logits *l, lr_scratch *w)
{
    if (!(a > 0)) return;
    const float *x = l->n_cand < 0 ? l->x : l->cand;
    int n = l->n_cand < 0 ? l->n_vocab : l->n_cand, m = 0;
    double sum = 0, sq = 0, best = -INFINITY;
    for (int i = 0; i < n; i++)
        if (isfinite(x[i])) {
            sum += (double)x[i];
            m++;
            if ((double)x[i] > best) best = (double)x[i];
        }
    if (m == 0) return;
    for (int i = 0; i < n; i++)
        if (isfinite(x[i])) sq += ((double)x[i] - sum / m) * ((double)x[i] - sum / m);
    float threshold = (float)(best - (double)a * sqrt(sq / m));
    if (l->n_cand < 0) {
        lr_stage_narrow(l, w, threshold);
        return;
    }
    while (l->n_cand > 0 && l->cand[l->n_cand - 1] < threshold) l->n_cand--;
}

static void allow(const lr_stage *s, lr_logits *l, lr_scratch *w)
{
    int m = 0;
    lr_stage_unmark(w);
    if (l->n_cand < 0) {
        for (size_t i = 0; i < s->n_ids; i++) {
            int32_t id = s->ids[i];
            if (w->mark[id] == w->epoch || !(l->x[id] > -INFINITY)) continue;
            w->mark[id] = w->epoch;
            l->cand_id[m] = id;
            l->cand[m++] = l->x[id];
        }
        l->n_cand = m;
        sort_candidates(l, w);
        return;
    }
    for (size_t i = 0; i < s->n_ids; i++) w->mark[s->ids[i]] = w->epoch;
    for (int i = 0; i < l->n_cand; i++)
        if (w->mark[l->cand_id[i]] == w->epoch) {
            l->cand[m] = l->cand[i];
            l->cand_id[m++] = l->cand_id[i];
        }
    l->n_cand = m;
}

static void ban(const lr_stage *s, lr_logits *l, lr_scratch *w)
{
    for (size_t i = 0; i < s->n_ids; i++) {
        float *x = lr_stage_slot(l, s->ids[i]);
        if (x) set(l, w, s->ids[i], x, -INFINITY);
    }
    lr_stage_changed(l, w);
}

static void bias(const lr_stage *s, lr_logits *l, lr_scratch *w)
{
    for (size_t i = 0; i < s->n_ids; i++) {
        float *x = lr_stage_slot(l, s->ids[i]);
        if (x) set(l, w, s->ids[i], x, *x + s->values[i]);
    }
    lr_stage_changed(l, w);
}

static int run(const lr_stage *s, const lr_stage_state *state, lr_logits *l, lr_scratch *w, const lr_sample_ctx *ctx,
               lr_error *err)
{
    switch (s->kind) {
    case LR_STAGE_LOGIT_BIAS:
        bias(s, l, w);
        break;
    case LR_STAGE_PENALTIES:
        penalties(s, l, w, ctx);
        break;
    case LR_STAGE_TEMPERATURE:
        lr_stage_temperature(s->a, l, w);
        break;
    case LR_STAGE_TOP_K:
        lr_stage_top_k(s->n, l, w);
        break;
    case LR_STAGE_TOP_P:
        top_p(s->a, l, w);
        break;
    case LR_STAGE_MIN_P:
        min_p(s->a, l, w);
        break;
    case LR_STAGE_TYPICAL:
        typical(s->a, l, w);
        break;
    case LR_STAGE_TOP_N_SIGMA:
        top_n_sigma(s->a, l, w);
        break;
    case LR_STAGE_ALLOW:
        allow(s, l, w);
        break;
    case LR_STAGE_BAN:
        ban(s, l, w);
        break;
    case LR_STAGE_MIN_TOKENS:
        if (ctx->n_generated < (size_t)s->n) ban(s, l, w);
        break;
    case LR_STAGE_CALLBACK: {
        int rc = s->fn(s->user, l, ctx, err);
        if (rc) return rc;
        lr_stage_changed(l, w);
        break;
    }
    default:
        lr_stage_run_more(s, state, l, w, ctx);
    }
    return 0;
}

/* Stages that take a row as it is, whatever the temperature, and do not write to it. */
static bool only_reads(const lr_stage *s)
{
    return s->kind == LR_STAGE_TEMPERATURE || s->kind == LR_STAGE_TOP_K || s->kind == LR_STAGE_TOP_P ||
           s->kind == LR_STAGE_MIN_P;
}

/* Stages that change single values, by set. */
static bool sets_values(const lr_stage *s)
{
    return s->kind == LR_STAGE_LOGIT_BIAS || s->kind == LR_STAGE_PENALTIES || s->kind == LR_STAGE_BAN ||
           s->kind == LR_STAGE_MIN_TOKENS;
}

int lr_stage_run(const lr_stage *s, const lr_stage_state *state, lr_logits *l, lr_scratch *w, const lr_sample_ctx *ctx,
                 lr_error *err)
{
    bool keeps = only_reads(s) || sets_values(s) || s->kind == LR_STAGE_ALLOW;
    if (l->n_cand < 0 && sets_values(s) && !w->warm)
        keep_raw(l, w);
    else if (!only_reads(s))
        lr_stage_plain(l, w);
    if (!keeps) w->peaks_known = false;
    int rc = run(s, state, l, w, ctx, err);
    if (!keeps) w->peaks_known = false;
    return rc;
}
