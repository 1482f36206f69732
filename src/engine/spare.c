/* spare.c - rows of tokens that came without a choice: how many of them a step takes up. See sched.c, take_forced.
 *
 * A request with such tokens has them and the last one to compute before it can go on. On a device where a few rows
 * more cost nothing, one step does. On one that works through rows in groups, a full batch is better off with one row a
 * request, as if each token had been drawn. What a step of so many rows takes is measured; the number for which rows a
 * second are most wins; steps of microseconds are not worth it. No token depends on it.
 */
#include "engine/engine_int.h"
#include <limits.h>

enum { TRY_EVERY = 64 }; /* steps after which all are taken, to measure */
#define SHORT 1e-4

bool lr_request__in_backlog(const lr_request *r)
{
    return r->n_backlog > 0 && r->info.state == LR_REQ_RUNNING && r->info.n_pending > 1 &&
           r->info.n_pending <= r->n_backlog + 1;
}

int lr_engine__spare_rows(const lr_engine *e)
{
    int rows = e->running.n, more = 0;
    if (e->waiting.n > 0 && rows < e->cfg.max_seqs) return INT_MAX;
    for (int i = 0; i < e->running.n; i++) {
        const lr_request *r = e->running.at[i];
        if (lr_request__in_backlog(r))
            more += r->info.n_pending - 1;
        else if (r->info.n_pending > 1)
            return INT_MAX; /* a prompt: the step is a large one */
    }
    if (more == 0 || rows + more > LR_PACE_ROWS || e->generation % TRY_EVERY == 0) return INT_MAX;
    int best = 0;
    double most = 0;
    for (int k = 0; k <= more; k++) {
        double t = lr_pace_step_time(&e->pace, rows + k);
        if (t < SHORT) return INT_MAX;
        if ((rows + k) / t < most) continue;
        most = (rows + k) / t;
        best = k;
    }
    return best;
}
