/* account.c - what steps and draft passes take, and what drafts have cost so far: see spec.h, lr_pace.
 *
 * The time of a number of rows is the second least of the last sixteen: what else a machine does makes steps slower and
 * never faster, so that is the time without, as long as it comes and goes. What lasts changes all times; steps with
 * drafts are therefore compared with plain ones that were made next to them, and by how much drafts are dearer than
 * thought (work beside passes, times that are out of date) is learned from such pairs. So that there are some: while
 * drafts pay, one step in 4 to 32 is made without, and one whenever three in a row took other times than was thought.
 *
 * The account of a size of batches and a way to draft counts plain steps. A step with drafts is charged what it took
 * beyond a plain one and paid a plain step's share for each token that came of them. The first account of a way begins
 * with a little; each gets 1 % of the time of each step that could have drafts, and keeps only so much of what drafts
 * gain. When it is empty there are none, whatever seems to pay, and drafts are not longer than it can bear. So in all
 * drafts can cost what it began with, that 1 %, and a step's drafts; and what one way gains is not for another to lose.
 * What a draft model must catch up with before its first draft (a prompt) is paid from what drafts gained beyond that,
 * or charged as well, but lent: it does not stop the drafts that it was paid for at once.
 */
#include "spec/pace_int.h"
#include <math.h>
#include <string.h>

enum { PLAIN_FIRST = 4, PLAIN_EVERY = 32, STALE = 4096, WRITTEN_OFF = 64 };
enum { MANY = 16 };     /* passes of so many rows tell what a row of a prompt takes */
#define REFILL     0.01 /* of the time of steps */
#define FILLED     12.0 /* plain steps that the account of single requests holds; larger batches' less */
#define SAVED      128  /* plain steps that may be kept beside it for prompts */
#define CHANGED    1.25 /* times apart: a step that is not what was thought */
#define DOUBTED    0.12 /* the same of a plain step made to be measured */
#define LEARNED    0.35 /* of what a pair of steps says */
#define MIXED_MORE 1.15 /* a step with logits for each row, next to one with prompts */

/* ---- times ---- */

/* The second least of all that are kept, the least of a few. */
static double least_of(const struct lr_pace_time *p)
{
    float s[LR_PACE_LAST];
    int n = p->n < LR_PACE_LAST ? (int)p->n : LR_PACE_LAST;
    for (int i = 0; i < n; i++) {
        int k = i;
        for (; k > 0 && s[k - 1] > p->last[i]; k--) s[k] = s[k - 1];
        s[k] = p->last[i];
    }
    return (double)s[(n - 1) / 8];
}

static void saw(const lr_pace *pace, struct lr_pace_time *table, int rows, double t)
{
    if (rows < 1 || rows > LR_PACE_ROWS || !(t > 0)) return;
    struct lr_pace_time *p = &table[rows];
    p->last[p->n % LR_PACE_LAST] = (float)t;
    p->at = pace->now;
    p->n = p->n == UINT32_MAX ? p->n - LR_PACE_LAST + 1 : p->n + 1;
    p->t = least_of(p);
}

void lr_pace_saw_step(lr_pace *p, int rows, double t)
{
    p->plain_at = ++p->now;
    saw(p, p->step, rows, t);
}

/* One measurement is none where there is a better one, and an old one neither. */
static bool known(const struct lr_pace_time *p, uint32_t now, uint32_t least)
{
    return p->n >= least && now - p->at < STALE;
}

/* The time at a number of rows, of the first table that knows it; NULL: of the other one. */
static const struct lr_pace_time *find(const struct lr_pace_time *a, const struct lr_pace_time *b, uint32_t now, int i,
                                       uint32_t least)
{
    if (known(&a[i], now, least)) return &a[i];
    return b && known(&b[i], now, least) ? &b[i] : NULL;
}

/* Between two known numbers of rows a line; beyond the last one to what steps with prompts took, or a slope: small
 * while a few rows share the reading of the weights, most of the whole when there are many. */
static double interpolate(const struct lr_pace_time *a, const struct lr_pace_time *b, const struct lr_pace_time *mixed,
                          uint32_t now, int rows, uint32_t least)
{
    const struct lr_pace_time *low = NULL, *high = NULL;
    int lo = rows, hi = rows;
    while (lo > 0 && !(low = find(a, b, now, lo, least))) lo--;
    while (hi <= LR_PACE_ROWS && !(high = find(a, b, now, hi, least))) hi++;
    if (!low && !high) return 0;
    if (lo == hi) return low->t;
    if (!low) return high->t * (0.75 + 0.25 * rows / hi);
    if (high) return low->t + (high->t - low->t) * (rows - lo) / (hi - lo);
    double guess = low->t * (1 + (rows - lo) * (lo < 6 ? 0.08 : 0.7 / lo));
    for (hi = rows; mixed && hi <= LR_PACE_ROWS && !known(&mixed[hi], now, 1);) hi++;
    if (!mixed || hi > LR_PACE_ROWS) return guess;
    double most = mixed[hi].t * MIXED_MORE;
    return most > low->t ? low->t + (most - low->t) * (rows - lo) / (hi - lo) : low->t;
}

static double time_of(const lr_pace *p, const struct lr_pace_time *a, const struct lr_pace_time *b,
                      const struct lr_pace_time *mixed, int rows)
{
    if (rows < 1) return 0;
    if (rows > LR_PACE_ROWS) rows = LR_PACE_ROWS;
    double t = interpolate(a, b, mixed, p->now, rows, 2);
    return t > 0 ? t : interpolate(a, b, mixed, p->now, rows, 1);
}

double lr_pace_step_time(const lr_pace *p, int rows) { return time_of(p, p->step, NULL, p->mixed, rows); }

double lr_pace__drafted_time(const lr_pace *p, int rows) { return time_of(p, p->drafted, p->step, p->mixed, rows); }

double lr_pace__dearer(const lr_pace *p) { return exp(p->dearer); }

/* A pass before one was seen, as a part of a step. */
static double first_guess(lr_spec_method m)
{
    return m == LR_SPEC_DRAFT ? 0.35 : m == LR_SPEC_HEADS || m == LR_SPEC_EAGLE ? 0.2 : 0.5;
}

double lr_pace_pass_time(const lr_pace *p, lr_spec_method m, int rows)
{
    double t = time_of(p, p->pass[m], NULL, NULL, rows), guess = first_guess(m) * lr_pace_step_time(p, rows);
    int lo = rows < LR_PACE_ROWS ? rows : LR_PACE_ROWS;
    while (lo > 0 && !known(&p->pass[m][lo], p->now, 1)) lo--;
    if (lo > 0) return t;
    return t > 0 && (t < guess || guess <= 0) ? t : guess; /* a prompt's rows say little of a few */
}

double lr_pace__row_time(const lr_pace *p, lr_spec_method m)
{
    int r = LR_PACE_ROWS;
    while (r >= MANY && !known(&p->pass[m][r], p->now, 1)) r--;
    if (r >= MANY) return p->pass[m][r].t / r;
    for (r = LR_PACE_ROWS; r > 0 && !known(&p->mixed[r], p->now, 1);) r--;
    return r > 0 ? first_guess(m) * MIXED_MORE * p->mixed[r].t / r
                 : lr_pace_pass_time(p, m, LR_PACE_ROWS) / LR_PACE_ROWS;
}

void lr_pace_saw_pass(lr_pace *p, lr_spec_method m, int rows, int drafts, double t)
{
    if (rows < 1 || !(t > 0)) return;
    double part = rows > LR_PACE_ROWS ? (double)rows / LR_PACE_ROWS : 1;
    int at = rows > LR_PACE_ROWS ? LR_PACE_ROWS : rows;
    bool sure = p->pass[m][at].n >= 3;
    double usual = sure ? p->pass[m][at].t * part : t;
    saw(p, p->pass[m], at, t / part);
    p->made += usual;
    p->ran += t;
    p->sure_made += sure ? usual : 0;
    p->sure_ran += sure ? t : 0;
    if (rows > drafts) p->caught_up += usual * (rows - drafts) / rows;
}

/* ---- steps with drafts next to steps without ---- */

static double within(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

/* A step took `by` times what was thought. If one of the other kind was made just before, both had the same machine;
 * the middle one of three such pairs counts. */
static void compare(lr_pace *p, double by, bool drafts)
{
    struct lr_pace_seen *mine = &p->seen[drafts], *other = &p->seen[!drafts];
    if (other->at && p->now - other->at == 1) {
        p->pair[p->n_pairs++ % 3] = log(by / other->by) * (drafts ? 1 : -1);
        double a = p->pair[0], b = p->pair[1], c = p->pair[2], mid = fmax(fmin(a, b), fmin(fmax(a, b), c));
        if (p->n_pairs >= 3) p->dearer = within(p->dearer + LEARNED * within(mid, -0.5, 0.5), -1, 1);
    }
    *mine = (struct lr_pace_seen){by, p->now};
}

/* Three steps with drafts in a row that are all faster, or all slower, than was thought: what does a plain one take? */
static void look_for_change(lr_pace *p, double by)
{
    bool more = by > CHANGED, less = by < 1 / CHANGED;
    if ((!more && !less) || (p->n_odd > 0 && more != p->odd_more)) p->n_odd = 0;
    if (!more && !less) return;
    p->odd_more = more;
    if (++p->n_odd % 3 == 0 && p->n_odd < 10) p->due = more ? 1 : 2;
}

double lr_pace__worst_time(const lr_pace *p, int rows)
{
    int lo = rows < LR_PACE_ROWS ? rows : LR_PACE_ROWS;
    const struct lr_pace_time *e = NULL;
    if (lr_pace__has_seen(p, rows)) return lr_pace__drafted_time(p, rows);
    while (lo > 0 && !(e = find(p->drafted, p->step, p->now, lo, 1))) lo--;
    return e ? e->t * rows / lo : 0;
}

bool lr_pace__has_seen(const lr_pace *p, int rows)
{
    if (rows > LR_PACE_ROWS) return true;
    for (int r = rows - rows / 8; r <= rows + rows / 8 && r <= LR_PACE_ROWS; r++)
        if (find(p->drafted, p->step, p->now, r, 2)) return true;
    return false;
}

bool lr_pace__wants_plain(const lr_pace *p, int rows, bool drafting)
{
    if (rows > LR_PACE_ROWS) return false;
    if (drafting && (p->due > 0 || p->now - p->plain_at > p->every)) return true;
    int lo = rows, hi = rows; /* the nearest that are known */
    while (lo > 0 && !known(&p->step[lo], p->now, 2)) lo--;
    while (hi <= LR_PACE_ROWS && !known(&p->step[hi], p->now, 2)) hi++;
    return p->now > 0 && lo < rows && (lo == 0 || hi > LR_PACE_ROWS || hi - lo > (rows + 3) / 4);
}

/* ---- the account ---- */

static int size_of(int requests)
{
    int size = 0;
    while (size < LR_PACE_SIZES - 1 && requests >> (size + 1)) size++;
    return size;
}

struct lr_pace_account *lr_pace__account(lr_pace *p, int requests)
{
    int size = size_of(requests);
    struct lr_pace_account *a = &p->account[p->kind][size];
    a->most = FILLED / pow(1 + size, 1.5); /* a run of a large batch has fewer steps */
    if (!a->open) {
        bool first = true;
        for (int i = 0; i < LR_PACE_SIZES; i++) first = first && !p->account[p->kind][i].open;
        a->credit = a->saved = first ? a->most / 3 : 0;
    }
    a->open = true;
    return a;
}

/* What a step with prompts took for its drafts: their part of its rows. */
static double beside_prompts(const lr_pace_step *s) { return s->drafting + s->seconds * s->drafts / s->rows; }

/* A plain step was made while drafts seem to pay: if it is not what was thought, the next ones follow soon. */
static void probed(lr_pace *p, double by)
{
    bool doubted = fabs(by - 1) > DOUBTED;
    p->every = doubted ? PLAIN_FIRST : p->every * 2 < PLAIN_EVERY ? p->every * 2 : PLAIN_EVERY;
}

/* Takes the times of a step; what it took beyond a plain one. */
static double learn_times(lr_pace *p, const lr_pace_step *s, double plain)
{
    struct lr_pace_time *table = s->drafts ? p->drafted : p->step, *e = &table[s->rows];
    bool sure = e->n >= 3 && p->now - e->at < STALE, drafting = p->account[p->kind][size_of(s->generating)].drafting;
    double known = p->sure_made + (sure ? e->t : 0), ran = p->sure_ran + (sure ? s->seconds : 0);
    double took = s->seconds + s->drafting, usual = e->t, thought = usual + p->made, dearer = lr_pace__dearer(p);
    saw(p, table, s->rows, s->seconds);
    if (!s->drafts) {
        p->plain_at = p->now;
        p->due -= p->due > 0;
        if (!drafting) p->every = PLAIN_FIRST;
        if (sure && drafting) probed(p, s->seconds / usual);
        if (sure) compare(p, s->seconds / usual, false);
        return p->made + within(s->drafting - p->ran, 0, 0.1 * plain);
    }
    if (known > 0) {
        compare(p, (sure ? took : ran) / (sure ? thought : known) / dearer, true);
        look_for_change(p, ran / known);
    }
    return (sure ? thought * dearer : took) - plain;
}

/* What a step lost and gained, in the account of its batch. */
static void book(lr_pace *p, const lr_pace_step *s, double lost)
{
    struct lr_pace_account *a = lr_pace__account(p, s->generating);
    double one = lr_pace_step_time(p, s->generating), behind = p->caught_up / one;
    a->credit += (REFILL * (s->seconds + s->drafting) - lost) / one + (double)s->more / s->generating;
    double paid = behind < a->saved ? behind : a->saved;
    a->saved -= paid;
    a->credit += paid;
    a->lent = a->lent * (1 - 1.0 / WRITTEN_OFF) + behind - paid;
    if (a->credit <= a->most) return;
    a->saved = fmin(a->saved + a->credit - a->most, SAVED);
    a->credit = a->most;
}

void lr_pace_settle(lr_pace *p, const lr_pace_step *s)
{
    double lost, plain;
    if (s->rows < 1) return;
    p->now++;
    plain = lr_pace_step_time(p, s->rows - s->drafts);
    if (s->pure && s->rows <= LR_PACE_ROWS)
        lost = learn_times(p, s, plain);
    else
        lost = s->drafts ? beside_prompts(s) : s->drafting;
    if (!s->pure) {
        double part = s->rows > LR_PACE_ROWS ? (double)s->rows / LR_PACE_ROWS : 1;
        saw(p, p->mixed, s->rows > LR_PACE_ROWS ? LR_PACE_ROWS : s->rows, s->seconds / part);
    }
    if (s->generating > 0 && s->open && plain > 0) book(p, s, lost);
    p->made = p->ran = p->caught_up = p->sure_made = p->sure_ran = 0;
}
