/* pace.c - how many drafts pay: see spec.h.
 *
 * A step of n rows takes T(n), a draft pass over b sequences D(b): both are measured (account.c), and interpolated. A
 * token at place j of a draft is taken with probability a^j, where a is what the request's own drafts of that kind have
 * shown. For a bar h, each request gets the places whose probability is at least h; the bar for which
 *
 *     (tokens expected) / (T(rows + drafts) + draft passes + rows to catch up with, spread over what may come)
 *
 * is largest wins, no drafts at all among them. A draft model says how sure it is: its drafts go on as long as the
 * chance of the whole is worth a pass and a row at that rate. As the sum over all requests is what counts, a full
 * batch, whose rows are no longer free, gets fewer drafts or none. What is not tried is not measured: a request without
 * drafts gets one token now and then, more seldom each time that it does not pay, if it could pay were it always right,
 * and if the account has what that costs.
 */
#include "spec/pace_int.h"
#include <math.h>

enum { WAIT_FIRST = 16, WAIT_MODEL = 24, WAIT_MOST = 4096, BEHIND = 8, TRIES = 3, LASTING = 8, SURE = 50 };
enum { SPREAD = 128 }; /* tokens over which what a draft model catches up with is spread, at most */
enum { LOAN = 20 };    /* plain steps that are lent for it, at most */

static const double PRIOR[LR_SPEC_METHODS][LR_PACE_CLASSES] = {{0, 0, 0},          {0.4, 0.6, 0.8}, {0.4, 0.6, 0.8},
                                                               {0.85, 0.85, 0.85}, {0.7, 0.7, 0.7}, {0.6, 0.6, 0.6},
                                                               {0.5, 0.5, 0.5},    {0.6, 0.6, 0.6}};
#define PRIOR_WEIGHT 12.0
#define PRIOR_SIDE   0.3
/* What a plain step's rate must be exceeded by: to begin with drafts, to go on with them. */
#define BEGIN 1.05
#define GO_ON 1.02
#define DARED 0.7  /* of what drafts are known to take, where that is doubted */
#define HOPED 0.02 /* of a step: a row, as long as nothing is known */

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

/* What is being chosen. */
typedef struct choice {
    const lr_pace *p;
    const lr_pace_item *items;
    const double *a; /* chance of a token of each */
    int n, rows, others, room;
    double one; /* seconds of a plain step of these requests */
    bool hope;  /* rows that were never seen are thought to cost next to nothing, and the others less */
} choice;

static double step_time(const choice *c, int drafts)
{
    double t = lr_pace__drafted_time(c->p, c->rows + drafts), base = lr_pace_step_time(c->p, c->rows);
    if (c->hope && !lr_pace__has_seen(c->p, c->rows + drafts)) t = fmin(t, base * (1 + HOPED * drafts));
    return t;
}

/* Tokens a second with the bar at h, -1 if that takes more than `room` rows. */
static double rate(const choice *c, double h)
{
    const lr_pace *p = c->p;
    const lr_pace_item *items = c->items;
    int n = c->n;
    int drafts = 0, depth[LR_SPEC_METHODS][LR_SPEC_MAX + 1] = {0};
    double tokens = c->others + n, cost, sum;
    double extra = 0;
    for (int i = 0; i < n; i++) {
        int k = places(&items[i], c->a[i], h, &sum);
        tokens += sum;
        drafts += k;
        lr_spec_method m = items[i].method;
        if (m == LR_SPEC_HEADS) depth[m][0] += k > 0; /* one pass has all places */
        if (!lr_spec_has_passes(m) || k == 0) continue;
        for (int j = 0; j < k; j++) depth[m][j]++;
        if (items[i].behind > 2) {
            extra += lr_pace__row_time(p, m) * items[i].behind / fmax(fmin(items[i].remaining, SPREAD), 1) * (1 + sum);
        }
    }
    if (drafts > c->room) return -1;
    cost = drafts ? step_time(c, drafts) + extra : lr_pace_step_time(p, c->rows);
    for (int m = 0; m < LR_SPEC_METHODS; m++)
        for (int j = 0; j < LR_SPEC_MAX && depth[m][j]; j++) cost += lr_pace_pass_time(p, m, depth[m][j]);
    if (drafts) cost *= c->hope ? DARED : lr_pace__dearer(p);
    return cost > 0 ? tokens / cost : tokens / (1 + 0.1 * drafts);
}

/* What one more token of a draft model costs: its part of a pass of n, and a row of the step. */
static double marginal(const lr_pace *p, lr_spec_method m, int rows, int n)
{
    double row = (lr_pace__drafted_time(p, rows + 4) - lr_pace_step_time(p, rows)) / 4;
    return (m == LR_SPEC_HEADS ? 0 : lr_pace_pass_time(p, m, n) / n) + (row > 0 ? row : 0);
}

/* The bar at which the tokens a second are most, 2 if none beats *best, which becomes that rate. */
static double best_bar(const choice *c, double *best)
{
    static const double bars[] = {0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05};
    double h = 2;
    for (size_t b = 0; b < sizeof bars / sizeof *bars; b++) {
        double v = rate(c, bars[b]);
        if (v < 0) break;
        if (v <= *best) continue;
        *best = v;
        h = bars[b];
    }
    return h;
}

/* Whether drafts of one item would pay if they were always right, for all that is known. */
static bool could_pay(const choice *all, const lr_pace_item *it)
{
    double sure = 0.97, best;
    choice c = *all;
    c.items = it;
    c.a = &sure;
    c.others += c.n - 1;
    c.n = 1;
    c.hope = true;
    best = rate(&c, 2);
    return best_bar(&c, &best) < 2;
}

/* One that has had no draft for long gets one token, so that its chance is known. What that costs in plain steps is
 * taken from *credit. */
static void probe(const choice *c, lr_pace_item *it, double reserve, double *credit)
{
    lr_pace_odds *o = it->odds;
    bool model = lr_spec_has_passes(it->method) || it->method == LR_SPEC_HEADS;
    uint32_t first = model ? WAIT_MODEL : WAIT_FIRST;
    if (it->k > 0) {
        o->idle = o->wait = 0;
        return;
    }
    if (o->wait < first) o->wait = first;
    if (++o->idle < o->wait * (uint32_t)c->n) return;
    double one = c->one, cost = lr_pace__drafted_time(c->p, c->rows + 1) - lr_pace_step_time(c->p, c->rows);
    if (model) cost += lr_pace_pass_time(c->p, it->method, 1) + it->behind * lr_pace__row_time(c->p, it->method);
    if (one > 0 && cost > (*credit - reserve) * one) return;
    o->idle = 0;
    if (o->wait < WAIT_MOST) o->wait *= 2;
    if (one > 0 && !could_pay(c, it)) return;
    if (one > 0) *credit -= cost / one;
    it->k = it->most > 1 ? 1 : it->most;
}

/* As many requests as may have a token drafted for so many plain steps, if none is right, and one at least; the others,
 * in turns, have none. */
static void share_out(const choice *c, double *a, double most)
{
    int m = 1;
    for (; m < c->n; m++) {
        double t = lr_pace__worst_time(c->p, c->rows + m + 1) - lr_pace_step_time(c->p, c->rows);
        if (lr_spec_has_passes(c->p->kind) || c->p->kind == LR_SPEC_HEADS)
            t += lr_pace_pass_time(c->p, c->p->kind, m + 1);
        if (t * lr_pace__dearer(c->p) > most * c->one) break;
    }
    for (int i = m; i < c->n; i++) a[(i + (int)(c->p->now % (uint32_t)c->n)) % c->n] = 0;
}

/* If the account is well filled, what does not seem to pay is tried again after a while, for some steps: times may be
 * known wrongly, or not at all. */
static double explore(choice *c, double *a, struct lr_pace_account *account, double *best)
{
    double h;
    if (account->trying == 0) {
        if (account->credit < account->most / 4 || c->p->now - account->explored < account->wait) return 2;
        account->explored = c->p->now;
        account->wait = account->wait < WAIT_FIRST  ? WAIT_FIRST
                        : account->wait < WAIT_MOST ? account->wait * 2
                                                    : WAIT_MOST;
        account->trying = TRIES;
    }
    account->trying--;
    share_out(c, a, account->credit);
    c->hope = true;
    h = best_bar(c, best);
    c->hope = false;
    return h;
}

/* The longest drafts that would cost so many plain steps at most if none of them were right, and one at least. */
static int affordable(const choice *c, double most)
{
    double passes = 0, plain = lr_pace_step_time(c->p, c->rows);
    int k = 0;
    while (k < LR_SPEC_MAX) {
        double step = lr_pace__worst_time(c->p, c->rows + c->n * (k + 1)) - plain, pass = 0;
        for (int m = 0; m < LR_SPEC_METHODS; m++) {
            int n = 0;
            for (int i = 0; i < c->n; i++) n += (int)c->items[i].method == m && c->items[i].most > k;
            if (n && (lr_spec_has_passes(m) || (m == LR_SPEC_HEADS && k == 0))) pass += lr_pace_pass_time(c->p, m, n);
        }
        passes += pass;
        if (k > 0 && (step + passes) * lr_pace__dearer(c->p) > most * c->one) break;
        k++;
    }
    return k;
}

/* Plain steps that drafts of a request by itself are thought to save in what it may still generate, once they have
 * caught up. */
static double hoped_for(const choice *c, const double *a)
{
    lr_pace_item it = c->items[0];
    choice one = *c;
    it.behind = 0;
    one.items = &it;
    one.a = a;
    double plain = rate(&one, 2), best = plain;
    return best_bar(&one, &best) < 2 ? (1 - plain / best) * fmin(it.remaining, SPREAD) : 0;
}

/* What drafts must catch up with first, as far as that can be paid: the others have none. Half of what an account holds
 * is lent where it is known how often drafts of that kind are right; to a request by itself half of what its drafts are
 * thought to save. What was granted once is not asked for again; beside prompts nothing is, as the batch is still to
 * grow, and may be one in which drafts don't pay. */
static void pay_ahead(const choice *c, double *a, const struct lr_pace_account *account)
{
    double most = account->credit > 0 ? account->credit + account->saved : 0;
    bool lends = account->credit > 0, grows = c->rows > c->n + c->others;
    for (int i = 0; i < c->n; i++) {
        const lr_pace_item *it = &c->items[i];
        if (it->behind <= BEHIND) continue;
        double t = lr_pace__row_time(c->p, it->method) * it->behind / c->one, loan = 0;
        bool sure = c->p->all.at[it->method][class_of(it->match)].tried >= SURE;
        if (it->behind > it->odds->granted) {
            if (lends && sure) loan = account->most / 2;
            if (lends && c->n + c->others == 1) loan = fmax(loan, fmin(hoped_for(c, a) / 2, LOAN));
            it->odds->granted = grows || t > most + loan ? 0 : it->behind + BEHIND;
        }
        if (it->behind > it->odds->granted)
            a[i] = 0;
        else
            most -= t;
    }
}

void lr_pace_choose(lr_pace *p, lr_pace_item *items, int n, int rows, int others, int room)
{
    double a[LR_PACE_ROWS], sum, h = 2, best, credit;
    int models[LR_SPEC_METHODS] = {0};
    if (n > LR_PACE_ROWS) n = LR_PACE_ROWS;
    for (int i = 0; i < n; i++) models[items[i].method]++;
    for (int m = 0; m < LR_SPEC_METHODS; m++)
        if (models[m] > models[p->kind]) p->kind = (lr_spec_method)m;
    struct lr_pace_account *account = lr_pace__account(p, n + others);
    choice c = {.p = p, .items = items, .a = a, .n = n, .rows = rows, .others = others, .room = room};
    c.one = lr_pace_step_time(p, n + others);
    if (lr_pace_step_time(p, rows) <= 0) {
        for (int i = 0; i < n; i++) items[i].k = 0;
        return;
    }
    credit = account->credit;
    for (int i = 0; i < n; i++) {
        a[i] = lr_pace_odds_of(p, items[i].odds, items[i].method, items[i].match);
        if (a[i] > 0.99) a[i] = 0.99;
        items[i].k = 0;
    }
    pay_ahead(&c, a, account);
    int most = affordable(&c, credit + account->lent);
    for (int i = 0; i < n; i++)
        if (items[i].most > most) items[i].most = most;
    best = rate(&c, h) * (account->drafting ? GO_ON : BEGIN);
    if (credit + account->lent > 0) h = best_bar(&c, &best);
    if (h < 2 && ++account->lasted > LASTING) account->wait = 0;
    if (h == 2) {
        account->lasted = 0;
        h = explore(&c, a, account, &best);
    }
    account->drafting = h < 2;
    if (rows == n + others && lr_pace__wants_plain(p, rows, h < 2)) return;
    for (int i = 0; i < n; i++) {
        items[i].k = places(&items[i], a[i], h, &sum);
        items[i].bar = 0;
        items[i].least = h;
        if (items[i].k > 0 && (lr_spec_has_passes(items[i].method) || items[i].method == LR_SPEC_HEADS)) {
            items[i].k = items[i].most; /* it knows how sure it is, token by token */
            items[i].bar = marginal(p, items[i].method, rows + n, models[items[i].method]) * best;
        }
        if (room > 0) probe(&c, &items[i], account->most / 6, &credit);
    }
}
