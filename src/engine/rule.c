/* rule.c - the built-in rule, first come, first served: who runs in a step when no policy says. See policy.h.
 *
 * A step's time goes by its rows, so what a prompt takes, everybody waits for. Prompts are computed one after another,
 * not side by side: of eight that come together the first then has its first token after an eighth of the time, and the
 * last no later. So a step begins another prompt only as long as it has few rows of prompts, fewer than take about ten
 * times as long as reading the weights. One prompt may have more, and the more rows wait, the more: then it is the
 * prompts that everybody waits for, and long steps read the weights less often.
 *
 * policy/serve.lua is the same rule in any other order.
 */
#include "engine/engine_int.h"
#include "engine/policy.h"

enum {
    SHARE = 8, /* steps in which the rows that wait would be computed */
    MORE = 3   /* times cfg.prompt_rows that a step takes in any case */
};

bool lr_step_writes(const lr_request *r) { return r->info.n_pending <= 1 || lr_request__in_backlog(r); }

int lr_step_wants(const lr_request *r)
{
    int n = r->info.n_pending - r->granted, most = r->e->cfg.chunk - r->granted;
    return n < most ? n : most;
}

void lr_request__look_up(lr_request *r)
{
    lr_engine *e = r->e;
    const lr_seq *q = r->info.seq;
    lr_request__update_pending(r);
    if (!e->cfg.prefix_cache || r->info.n_pending <= e->cfg.block_size) return;
    int need = lr_request__need_from(r), known = lr_kv_space_peek(e->kv, q->kv.space, q->tokens, need, NULL);
    int pending = lr_request__end_pos(r) - (known < need ? known : need);
    if (pending < r->info.n_pending) r->info.n_pending = pending;
}

int lr_engine__prompt_rows(lr_engine *e)
{
    int all = e->cfg.max_batch_tokens, n = e->running.n, slots = e->cfg.max_seqs - n;
    int64_t rows = 0;
    for (int i = 0; i < e->running.n; i++)
        if (!lr_step_writes(e->running.at[i])) rows += e->running.at[i]->info.n_pending;
    for (int i = 0; i < e->waiting.n && i < slots && rows < (int64_t)SHARE * all; i++, n++) {
        lr_request__look_up(e->waiting.at[i]);
        rows += e->waiting.at[i]->info.n_pending;
    }
    rows = n == 1 ? all : rows / SHARE;
    if (rows < MORE * e->cfg.prompt_rows) rows = MORE * e->cfg.prompt_rows;
    return rows < all ? (int)rows : all;
}

int lr_step_prompt_rows(lr_step *s)
{
    if (s->prompt_rows < 0) s->prompt_rows = lr_engine__prompt_rows(s->e);
    return s->prompt_rows;
}

/* ---- the prompts of a step ---- */

typedef struct prompts {
    lr_step *s;
    int left;  /* rows that they may have together, less those granted */
    int fresh; /* rows until no further one is begun */
    bool cut;  /* one got only half of what was left */
} prompts;

static int run(prompts *p, lr_request *r, int n)
{
    int got = lr_step_run(p->s, r, n);
    p->left -= got;
    p->fresh -= got;
    return got;
}

/* Rows for the next prompt: all of it if there is room, half of what is left for the first that is too long; none if
 * the step has enough. */
static int rows_of(prompts *p, const lr_request *r)
{
    int n = lr_step_wants(r), half = (p->left + 1) / 2;
    if (p->fresh <= 0) return 0;
    if (r->info.n_pending <= p->left) return n;
    if (p->cut) return 0;
    p->cut = true;
    return n < half ? n : half;
}

/* Waiting requests start in order, as long as there is memory for a whole one. Gives how many were looked at. */
static int start_waiting(prompts *p)
{
    lr_step *s = p->s;
    lr_engine *e = s->e;
    int i;
    for (i = 0; i < e->waiting.n && i < e->cfg.max_seqs && p->left > 0 && lr_step_slots(s) > 0; i++) {
        if (p->fresh <= 0 && !p->cut) break;
        lr_request *r = lr_step_waiting(s, i);
        if (!r || r->want_cancel) continue;
        if (!lr_step_fits(s, r) && s->n_running > 0) break;
        int n = rows_of(p, r);
        if (n > 0 && run(p, r, n) == 0 && r->info.state != LR_REQ_RUNNING) break;
    }
    return i;
}

static void least_of(const req_list *list, int n, lr_request **least)
{
    for (int i = 0; i < n; i++) {
        lr_request *r = list->at[i];
        if (!lr_engine__active(r) || r->want_cancel || r->barred == r->e->generation || lr_step_wants(r) <= 0) continue;
        if (r->info.state == LR_REQ_RUNNING && lr_step_writes(r)) continue;
        if (!*least || r->info.n_pending - r->granted < (*least)->info.n_pending - (*least)->granted) *least = r;
    }
}

/* What is left goes to the prompts that have the least to do. */
static void use_rest(prompts *p, int looked_at)
{
    lr_engine *e = p->s->e;
    while (p->left > 0 && (p->cut || p->fresh > 0)) {
        lr_request *r = NULL;
        least_of(&e->running, e->running.n, &r);
        least_of(&e->started, e->started.n, &r);
        if (lr_step_slots(p->s) > 0) least_of(&e->waiting, looked_at, &r);
        if (!r || run(p, r, p->left) == 0) return;
    }
}

int lr_step_default(lr_step *s)
{
    lr_engine *e = s->e;
    for (int i = 0; i < e->running.n; i++) {
        lr_request *r = lr_step_running(s, i);
        if (r && r->granted == 0 && lr_step_writes(r)) lr_step_run(s, r, r->info.n_pending);
    }
    prompts p = {.s = s, .left = lr_step_prompt_rows(s), .fresh = e->cfg.prompt_rows};
    if (p.left > s->budget) p.left = s->budget;
    for (int i = 0; i < e->running.n && p.left > 0; i++) {
        lr_request *r = lr_step_running(s, i);
        if (!r || r->granted > 0 || lr_step_writes(r)) continue;
        int n = rows_of(&p, r);
        if (n > 0) run(&p, r, n);
    }
    use_rest(&p, start_waiting(&p));
    return 0;
}
