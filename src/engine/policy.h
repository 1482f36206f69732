/* policy.h - the decisions of the engine as a table of optional hooks, and what a hook may do in a step.
 *
 * Every hook may be NULL; then, and whenever a hook returns a negative value, the built-in first-come-first-served rule
 * decides. A hook cannot break anything: what can't be had (tokens past the budget, blocks that are not free, a request
 * that is not there any more) is refused. Hooks run inside a step: see engine.h for what they may call.
 *
 * The built-in rule (rule.c): decodes first, then prompts one after another in order of arrival, up to the step's
 * prompt rows (lr_step_prompt_rows); the first that is longer than what is left of them gets half, so that short ones
 * get by it, and what remains goes to those with the least to do. New requests start while there is memory for their
 * whole prompt. When blocks run out the youngest request yields.
 */
#ifndef LR_ENGINE_POLICY_H
#define LR_ENGINE_POLICY_H
#include "engine/speculate.h"

typedef struct lr_step lr_step; /* one step being put together; valid inside a hook only */

typedef struct lr_policy {
    const char *name;
    void *user;
    /* Where nothing waits and each running request has one row to compute, schedule gives each its row, in order, and
     * nothing else comes of it: simulations then need not ask it (lr_engine_coast). */
    bool steady;
    /* A new request: 0 = take it (priority and deadline may be changed), 1 = refuse it with err filled. Default: take.
     */
    int (*admit)(void *user, lr_request *req, lr_error *err);
    /* Fills the step with lr_step_run. Default: see above. */
    int (*schedule)(void *user, lr_step *step);
    /* `need` more blocks of `group` are wanted for req: preempt others (or req) with lr_step_preempt. Called again as
     * long as that is not enough; the default decides if nothing was preempted. */
    int (*preempt)(void *user, lr_step *step, lr_request *req, int group, int need);
    /* Score of a cached leaf: the lowest goes first. NaN or NULL: least recently used. */
    double (*evict)(void *user, const lr_kv_leaf *leaf);
    /* The draft that a request is about to get, as its own options want it: change it, and return 0. Asked for requests
     * that speculate (their method may be LR_SPEC_OFF). */
    int (*draft)(void *user, lr_request *req, lr_spec_choice *choice);
    /* A token was drawn: 1 = finish the request ("stop") after it. Default 0. */
    int (*token)(void *user, lr_request *req, int32_t token);
    /* The request has ended, however. */
    void (*finish)(void *user, lr_request *req);
    /* The policy is replaced or the engine freed. */
    void (*free)(void *user);
} lr_policy;

/* Takes a copy; NULL = the built-in rule. The old policy's free is called. Between steps. */
int lr_engine_set_policy(lr_engine *, const lr_policy *, lr_error *err);
const char *lr_engine_policy_name(const lr_engine *);

/* The lists as they stood when the step began, in order of arrival. An entry that left the list in this step is NULL.
 */
int lr_step_n_waiting(const lr_step *);
lr_request *lr_step_waiting(const lr_step *, int i);
int lr_step_n_running(const lr_step *);
lr_request *lr_step_running(const lr_step *, int i);
int lr_step_budget(const lr_step *);            /* rows left */
int lr_step_slots(const lr_step *);             /* requests that may still start */
int lr_step_blocks(const lr_step *, int group); /* blocks free or evictable */
int lr_step_block_size(const lr_step *);
double lr_step_now(const lr_step *);
int lr_step_n_active(const lr_step *); /* running now: the list, less those that left it, and those started */
lr_engine *lr_step_engine(const lr_step *);

/* Rows that the built-in rule takes of prompts in this step at most: an eighth of those of running and startable
 * requests, at least three times cfg.prompt_rows, at most the step's; all for a request that is alone. Looks up what
 * the prefix cache holds. */
int lr_step_prompt_rows(lr_step *);
/* Rows that a request may still have in this step: those pending and not granted, within cfg.chunk. */
int lr_step_wants(const lr_request *);
/* Whether a running request is about to draw its next token, rather than in the middle of a prompt. */
bool lr_step_writes(const lr_request *);

/* Why the last lr_step_run gave less than was asked; static text, NULL if it did not. */
const char *lr_step_refusal(const lr_step *);
/* Runs up to n pending tokens of a waiting or running request in this step (a decode is one token); n <= 0 = all that
 * are allowed. Called again for the same request it adds to its share. Returns the rows granted by this call; 0 =
 * refused, or (lr_step_refusal is NULL) it runs but leaves its rows to others that compute the same prompt in this
 * step, and takes up their blocks in the next. May preempt others (hook or default) when a running request lacks
 * blocks; never for a waiting one. Not from inside a preempt hook. Of tokens that came without a choice it runs no more
 * in a step than pays (spare.c). */
int lr_step_run(lr_step *, lr_request *, int n);
/* Rows granted to a request in this step so far. */
int lr_step_granted(const lr_step *, const lr_request *);
/* Sends a running request back to the waiting list and takes its blocks; its share of this step is void and it cannot
 * run again in this step. 0, or LR_ESTATE if it is not running. A swap that has no host memory recomputes. */
int lr_step_preempt(lr_step *, lr_request *, lr_preempt_how how);
/* True if a waiting request's whole prompt and one more block would fit now without preempting anyone. Brings its
 * n_pending up to date with the prefix cache. */
bool lr_step_fits(lr_step *, lr_request *);
/* The built-in schedule and preempt rules, for policies that only adjust them. */
int lr_step_default(lr_step *);
int lr_step_default_preempt(lr_step *, lr_request *req);

/* A pointer of the policy's own with each request; NULL at first. The engine never looks at it: a policy that uses it
 * clears it when it is replaced. */
void lr_request_set_policy_data(lr_request *, void *data);
void *lr_request_policy_data(const lr_request *);
/* Counts a failed hook that has no result to say so by (evict, finish). */
void lr_policy_failed(lr_engine *);

#endif
