/* pace.c - how many drafts pay: see spec.h.
 *
 * A step of n rows takes T(n), a draft pass over b sequences D(b): both are measured, as moving averages for each
 * number of rows, and interpolated. A token at place j of a draft is taken with probability a^j, where a is what the
 * request's own drafts of that kind have shown. For a bar h, each request gets the places whose probability is at
 * least h; the bar for which
 *
 *     (tokens expected) / (T(rows + drafts) + draft passes + rows to catch up with, spread over what may come)
 *
 * is largest wins, no drafts at all among them. A draft model says how sure it is: its drafts go on as long as the
 * chance of the whole is worth a pass and a row at that rate. As the sum over all requests is what counts, a full
 * batch, whose rows are no longer free, gets fewer drafts or none. What is not tried is not measured: a request without
 * drafts gets one token now and then, more seldom each time that it does not pay.
 */
#include "spec/spec.h"

enum { WAIT_FIRST = 16, WAIT_MODEL = 24, WAIT_MOST = 4096, STALE = 4096 };

static const double PRIOR[LR_SPEC_METHODS][LR_PACE_CLASSES] = {{0, 0, 0},          {0.4, 0.6, 0.8}, {0.4, 0.6, 0.8},
                                                               {0.85, 0.85, 0.85}, {0.7, 0.7, 0.7}, {0.6, 0.6, 0.6},
                                                               {0.5, 0.5, 0.5},    {0.6, 0.6, 0.6}};
#define PRIOR_WEIGHT 12.0
#define PRIOR_SIDE   0.3

/* ---- time ---- */

/* The first time of a number of rows is often slow (memory is touched, something else runs), and what seems slow is not
 * tried again: one measurement is none, and an old one neither. */
static void saw(lr_pace *pace, struct lr_pace_time *table, int rows, double t)
{
    if (rows < 1 || rows > LR_PACE_ROWS || !(t > 0)) return;
    struct lr_pace_time *p = &table[rows];
    p->at = ++pace->now;
    p->n++;
    if (p->n == 1 || (p->n == 2 && t < p->t)) {
        p->t = t;
        return;
    }
    if (t > 2 * p->t) t = 2 * p->t;
    if (p->n > 2) p->t += (t - p->t) / (p->n < 8 ? p->n : 8);
}

void lr_pace_saw_step(lr_pace *p, int rows, double t) { saw(p, p->step, rows, t); }
void lr_pace_saw_pass(lr_pace *p, lr_spec_method m, int rows, double t) { saw(p, p->pass[m], rows, t); }

static bool known(const struct lr_pace_time *p, uint32_t now, uint32_t least)
{
    return p->n >= least && now - p->at < STALE;
}

/* Between two known numbers of rows a line; beyond the last a slope: small while a few rows share the reading of the
 * weights, most of the whole when there are many. */
static double interpolate(const struct lr_pace_time *table, uint32_t now, int rows, uint32_t least)
{
    int lo = rows, hi = rows;
    while (lo > 0 && !known(&table[lo], now, least)) lo--;
    while (hi <= LR_PACE_ROWS && !known(&table[hi], now, least)) hi++;
    if (lo == 0 && hi > LR_PACE_ROWS) return 0;
    if (lo == hi) return table[lo].t;
    if (lo == 0) return table[hi].t * (0.75 + 0.25 * rows / hi);
    if (hi > LR_PACE_ROWS) return table[lo].t * (1 + (rows - lo) * (lo < 6 ? 0.08 : 0.7 / lo));
    return table[lo].t + (table[hi].t - table[lo].t) * (rows - lo) / (hi - lo);
}

static double time_of(const struct lr_pace_time *table, uint32_t now, int rows)
{
    if (rows < 1) return 0;
    if (rows > LR_PACE_ROWS) rows = LR_PACE_ROWS;
    double t = interpolate(table, now, rows, 2);
    return t > 0 ? t : interpolate(table, now, rows, 1);
}

double lr_pace_step_time(const lr_pace *p, int rows) { return time_of(p->step, p->now, rows); }

/* A pass before one was seen, as a part of a step. */
static double first_guess(lr_spec_method m)
{
    return m == LR_SPEC_DRAFT ? 0.35 : m == LR_SPEC_HEADS || m == LR_SPEC_EAGLE ? 0.2 : 0.5;
}

double lr_pace_pass_time(const lr_pace *p, lr_spec_method m, int rows)
{
    double t = time_of(p->pass[m], p->now, rows);
    return t > 0 ? t : first_guess(m) * time_of(p->step, p->now, rows);
}

/* ---- chances ---- */

static int class_of(int match) { return match < 3 ? 0 : match < 6 ? 1 : 2; }

static double mix(const lr_pace_odds *o, lr_spec_method m, int c, double prior)
{
    return ((double)o->at[m][c].right + PRIOR_WEIGHT * prior) / ((double)o->at[m][c].tried + PRIOR_WEIGHT);
}

double lr_pace_odds_of(const lr_pace *p, const lr_pace_odds *o, lr_spec_method m, int match)
{
    int c = class_of(match);
    return mix(o, m, c, mix(&p->all, m, c, PRIOR[m][c]));
}

static void learn(lr_pace_odds *o, lr_spec_method m, int c, bool right, float keep)
{
    o->at[m][c].right = o->at[m][c].right * keep + right;
    o->at[m][c].tried = o->at[m][c].tried * keep + 1;
}

void lr_pace_learn(lr_pace *p, lr_pace_odds *o, lr_spec_method m, int match, int tried, int right)
{
    for (int i = 0; i < tried; i++) { /* about the last 50 of the request and 500 of all count */
        learn(o, m, class_of(match), i < right, 0.98f);
        learn(&p->all, m, class_of(match), i < right, 0.998f);
    }
}

void lr_pace_learn_side(lr_pace *p, lr_pace_odds *o, lr_spec_method m, bool right)
{
    lr_pace_odds *both[] = {o, &p->all};
    for (int i = 0; i < 2; i++) {
        both[i]->side[m].right = both[i]->side[m].right * (i ? 0.998f : 0.98f) + (float)right;
        both[i]->side[m].tried = both[i]->side[m].tried * (i ? 0.998f : 0.98f) + 1;
    }
}

static double side_odds(const lr_pace *p, const lr_pace_odds *o, lr_spec_method m)
{
    double all =
        ((double)p->all.side[m].right + PRIOR_WEIGHT * PRIOR_SIDE) / ((double)p->all.side[m].tried + PRIOR_WEIGHT);
    return ((double)o->side[m].right + PRIOR_WEIGHT * all) / ((double)o->side[m].tried + PRIOR_WEIGHT);
}

void lr_pace_cut(const lr_pace *p, const lr_pace_item *it, int k, lr_spec_tree *t)
{
    double chance[LR_SPEC_MAX], a = lr_pace_odds_of(p, it->odds, it->method, it->match),
                                side = (1 - a) * side_odds(p, it->odds, it->method);
    int to[LR_SPEC_MAX], n = 0, branches[LR_SPEC_MAX + 1] = {0}; /* of the nodes of the draft, and of the root */
    for (int i = 0; i < t->n; i++) {
        int at = t->parent[i];
        double before = at < 0 ? 1 : chance[at];
        chance[i] = before * a;
        if (i >= k && at < k) { /* a branch off the draft: each further one of a place has half the chance */
            chance[i] = before * side;
            for (int b = ++branches[at + 1]; b > 0; b--) chance[i] *= 0.5;
        }
        to[i] = i < k || chance[i] >= it->least ? n : -1;
        if (to[i] < 0 || (i >= k && at >= 0 && to[at] < 0)) {
            to[i] = -1;
            continue;
        }
        t->token[n] = t->token[i];
        t->parent[n++] = at < 0 ? -1 : to[at];
    }
    t->n = n;
}

/* ---- choosing ---- */

/* Places of the item whose chance is at least h; *sum: tokens expected of them. */
static int places(const lr_pace_item *it, double a, double h, double *sum)
{
    int k = 0;
    double chance = a;
    *sum = 0;
    for (; k < it->most && chance >= h; k++, chance *= a) *sum += chance;
    return k;
}

/* Tokens a second with the bar at h, -1 if that takes more than `room` rows. */
static double rate(const lr_pace *p, const lr_pace_item *items, const double *a, int n, int rows, int others, int room,
                   double h)
{
    int drafts = 0, depth[LR_SPEC_METHODS][LR_SPEC_MAX + 1] = {0};
    double tokens = others + n, cost, sum;
    double extra = 0;
    for (int i = 0; i < n; i++) {
        int k = places(&items[i], a[i], h, &sum);
        tokens += sum;
        drafts += k;
        lr_spec_method m = items[i].method;
        if (m == LR_SPEC_HEADS) depth[m][0] += k > 0; /* one pass has all places */
        if (!lr_spec_has_passes(m) || k == 0) continue;
        for (int j = 0; j < k; j++) depth[m][j]++;
        if (items[i].behind > 2) {
            int spread = items[i].remaining < 128 ? items[i].remaining : 128;
            double row = lr_pace_pass_time(p, m, LR_PACE_ROWS) / LR_PACE_ROWS;
            extra += row * items[i].behind / (spread < 1 ? 1 : spread) * (1 + sum);
        }
    }
    if (drafts > room) return -1;
    cost = lr_pace_step_time(p, rows + drafts) + extra;
    for (int m = 0; m < LR_SPEC_METHODS; m++)
        for (int j = 0; j < LR_SPEC_MAX && depth[m][j]; j++) cost += lr_pace_pass_time(p, m, depth[m][j]);
    return cost > 0 ? tokens / cost : tokens / (1 + 0.1 * drafts);
}

/* What one more token of a draft model costs: its part of a pass of n, and a row of the step. */
static double marginal(const lr_pace *p, lr_spec_method m, int rows, int n)
{
    double row = (lr_pace_step_time(p, rows + 4) - lr_pace_step_time(p, rows)) / 4;
    return (m == LR_SPEC_HEADS ? 0 : lr_pace_pass_time(p, m, n) / n) + (row > 0 ? row : 0);
}

/* One that has had no draft for long gets one token, so that its chance is known. */
static void probe(lr_pace_item *it, int n)
{
    lr_pace_odds *o = it->odds;
    uint32_t first = lr_spec_has_passes(it->method) || it->method == LR_SPEC_HEADS ? WAIT_MODEL : WAIT_FIRST;
    if (it->k > 0) {
        o->idle = o->wait = 0;
        return;
    }
    if (o->wait < first) o->wait = first;
    if (++o->idle < o->wait * (uint32_t)n) return;
    o->idle = 0;
    if (o->wait < WAIT_MOST) o->wait *= 2;
    it->k = it->most > 1 ? 1 : it->most;
}

void lr_pace_choose(const lr_pace *p, lr_pace_item *items, int n, int rows, int others, int room)
{
    static const double bars[] = {0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05};
    double a[LR_PACE_ROWS], sum, h = 2;
    if (n > LR_PACE_ROWS) n = LR_PACE_ROWS;
    for (int i = 0; i < n; i++) {
        a[i] = lr_pace_odds_of(p, items[i].odds, items[i].method, items[i].match);
        if (a[i] > 0.99) a[i] = 0.99;
        items[i].k = 0;
    }
    double best = rate(p, items, a, n, rows, others, room, h) * 1.02;
    for (size_t b = 0; b < sizeof bars / sizeof *bars; b++) {
        double v = rate(p, items, a, n, rows, others, room, bars[b]);
        if (v < 0) break;
        if (v <= best) continue;
        best = v;
        h = bars[b];
    }
    int models[LR_SPEC_METHODS] = {0};
    for (int i = 0; i < n; i++) models[items[i].method]++;
    for (int i = 0; i < n; i++) {
        items[i].k = places(&items[i], a[i], h, &sum);
        items[i].bar = 0;
        items[i].least = h;
        if (items[i].k > 0 && (lr_spec_has_passes(items[i].method) || items[i].method == LR_SPEC_HEADS)) {
            items[i].k = items[i].most; /* it knows how sure it is, token by token */
            items[i].bar = marginal(p, items[i].method, rows + n, models[items[i].method]) * best;
        }
        if (room > 0) probe(&items[i], n);
    }
}
