/* engine_int.h - inside of src/engine: the structs, and the calls between its files.
 *
 * seq.c sequences and idle ones giving way; request.c submission, end, events; step.c the step and the batch; sched.c
 * what a hook may do to a step; rule.c the built-in rule; output.c what becomes of a row of logits; metrics.c, trace.c,
 * snapshot.c; speculate.c drafts.
 *
 * Lists. `waiting` and `running` are arrays in order of request id. During a step they keep their length: an entry
 * whose state no longer fits is skipped, requests that start are put into `started`; settle() at the step's end brings
 * the arrays up to date and carries out what was put off (cancel, free).
 */
#ifndef LR_ENGINE_ENGINE_INT_H
#define LR_ENGINE_ENGINE_INT_H
#include "engine/metrics.h"
#include "engine/policy.h"
#include "engine/trace.h"
#include "spec/spec.h"
#include "text/stop.h"

struct lr_seq {
    lr_engine *e;
    uint64_t id;
    int32_t *tokens; /* (cap), len in use */
    int len, cap;
    lr_kv_table kv;
    lr_request *req;               /* active request */
    struct lr_adapter *lora;       /* a reference, NULL = none */
    lr_draft_slot *draft;          /* its KV in the draft model, NULL = none */
    lr_seq *prev, *next;           /* all sequences */
    lr_seq *idle_prev, *idle_next; /* those that hold blocks and do not run, longest idle first */
    uint64_t salt_hash;            /* tells namespaces apart in records; 0 = none */
    bool is_idle, pinned, dead;    /* in that list; see lr_seq_pin; to be freed at the step's end */
    int pin_blocks[LR_KV_GROUPS];  /* counted in the engine's `pinned` */
    void *swap;                    /* KV in host memory */
    size_t swap_bytes;
    int swap_computed, swap_first[LR_KV_GROUPS];
};

struct lr_request {
    lr_req_info info;
    lr_engine *e;
    lr_sampler *sampler;
    lr_constraint con;        /* all NULL = none */
    struct lr_spec_req *spec; /* drafts (speculate_int.h), NULL = none */
    lr_stopset *stops;
    lr_stop stop;
    lr_detok detok;
    int32_t *stop_ids;
    size_t n_stop_ids;
    bool ignore_eos, free_seq;
    bool force;     /* take what the constraint leaves no choice about */
    int n_backlog;  /* tokens at the sequence's end that came so, since the last logits */
    int n_top;      /* -1 = no log-probabilities */
    int next_score; /* SCORE: position of the next token to score */
    float *keep;    /* SCORE: where the next row of logits goes, NULL = nowhere */
    int limit;      /* longest that the sequence may get */
    char *text;
    size_t text_n, text_cap;
    lr_token_rec *recs;
    lr_top *tops; /* (recs_cap, n_top) */
    size_t n_recs, recs_cap;
    uint32_t raw_n;
    struct lr_drawn *drawn; /* its token of this step, if it was drawn ahead */
    float *logits;
    uint64_t logits_generation;
    double t_wait; /* since when it waits */
    /* this step */
    int granted, n_out, out; /* rows, logit rows, index of the first of these */
    uint64_t barred;         /* generation in which it may not run any more */
    bool started;            /* has ever run */
    bool joins;              /* left its rows to another request that computes the same prompt */
    void *policy_data;
    bool want_cancel, want_free;
    unsigned events;
    bool queued; /* in the event list */
    lr_request *ev_prev, *ev_next;
    lr_request *prev, *next; /* all requests */
    lr_fault fault;
    int fault_after;
};

typedef struct req_list {
    lr_request **at;
    int n, cap;
} req_list;

struct lr_step {
    lr_engine *e;
    int budget, outs; /* rows and logit rows left; each running request has one logit row set apart */
    int n_running;    /* running now, started ones included */
    int n_granted;    /* rows granted */
    const char *refusal;
    bool giving_way; /* inside a preempt hook */
    int spare;       /* rows left for tokens that came without a choice, besides one a request */
    int prompt_rows; /* that the built-in rule takes of prompts; -1: not looked at yet */
};

struct lr_engine {
    lr_engine_config cfg;
    lr_model *model;
    lr_kv *kv;
    lr_policy policy; /* name NULL = built-in */
    int context;
    req_list waiting, running, started;
    lr_request *requests;
    lr_seq *seqs, *idle_old, *idle_new;
    lr_request *ev_first, *ev_last;
    int n_seqs, n_requests, n_deferred;
    int pinned[LR_KV_GROUPS];
    size_t swapped;
    uint64_t next_req, next_seq, generation;
    bool in_step, in_forward;
    int idle_steps;   /* in a row */
    int hook_depth;   /* hooks that run inside of each other */
    double hook_time; /* seconds of hooks since the last step's end */
    lr_step step;
    /* the batch */
    int max_out;
    int32_t *rows;          /* (max_batch_tokens) */
    lr_batch_seq *batch;    /* (max_seqs + max_batch_tokens) */
    int n_batch, n_outs;    /* sequences and logit rows of the last one */
    lr_request **batch_req; /* NULL = a branch of a draft of the one before */
    int32_t *out_rows;      /* (max_out) */
    float *logits;          /* (max_out, n_vocab) */
    float *peaks;           /* (max_out, lr_row_pieces(n_vocab)) of models that give them, else NULL */
    float *hidden;          /* (max_out, n_embd), NULL if the model tells none */
    int32_t *told;          /* (max_out) tokens of models that tell them; logits is NULL then */
    char *scratch;          /* (LR_DETOK_CAP) */
    lr_metrics metrics;
    double busy, block_seconds; /* see lr_engine_info */
    int block_peak;
    lr_pace pace; /* times of steps by rows (spare.c) */
    lr_trace *trace;
    struct lr_record *record;   /* record.h; NULL = none is kept */
    bool exact;                 /* a replay: see lr_engine_set_exact */
    struct lr_spec_state *spec; /* speculate_int.h; NULL = nobody asked for drafts */
    struct lr_own_draws *draws; /* draws.c */
    struct lr_asked *asked;     /* told_draws.c */
    struct lr_ahead *ahead;     /* ahead.c */
};

static inline bool lr_engine__active(const lr_request *r)
{
    return r->info.state == LR_REQ_WAITING || r->info.state == LR_REQ_RUNNING;
}

/* engine.c */
double lr_engine__now(const lr_engine *);
int lr_engine__list_reserve(req_list *, int n);
/* Puts a request in its place by id; room must be there. */
void lr_engine__list_insert(req_list *, lr_request *);
void lr_engine__list_remove(req_list *, lr_request *);
int lr_engine__not_in_step(const lr_engine *, lr_error *err);

/* Every hook of a policy is called between these two: its time is counted (of hooks inside a hook only that of the
 * outer one), and traced. */
double lr_engine__hook_begin(lr_engine *);
void lr_engine__hook_end(lr_engine *, const char *name, double begin);

/* seq.c */
void lr_seq__free_now(lr_seq *);
/* The sequence does not run any more / runs now: in and out of the idle list. */
void lr_seq__rest(lr_seq *);
void lr_seq__wake(lr_seq *);
/* Takes blocks from the longest idle sequence; false if there is none. */
bool lr_engine__park_one(lr_engine *);
int lr_seq__reserve(lr_seq *, int n_tokens, lr_error *err);
/* Counts a pinned sequence's blocks anew; over the bound it is pinned no longer. */
void lr_seq__repin(lr_seq *);
/* KV to host memory: false (and nothing done) if that is full. */
bool lr_seq__swap_out(lr_seq *);
void lr_seq__swap_drop(lr_seq *);
/* Tokens of a sequence that fit beside what other sequences pin. */
int lr_engine__capacity(const lr_engine *, const lr_seq *s);

/* request.c */
void lr_request__event(lr_request *, unsigned what);
/* Ends an active request; inside a step its list entries stay until settle. */
void lr_request__end(lr_request *, lr_req_state state, lr_finish how);
void lr_request__fail(lr_request *, const lr_error *err);
void lr_request__free_now(lr_request *);
/* Room for one more record, for n more bytes of text. */
int lr_request__more_recs(lr_request *, lr_error *err);
/* What a draw of the request's next token depends on; pointers into its sequence. */
lr_sample_ctx lr_request__sample_ctx(const lr_request *);

/* draws.c: a token that was drawn before it is taken, or the error that came instead */
typedef struct lr_drawn {
    lr_request *r;
    const uint32_t *mask;
    lr_top *top;
    int rc;
    int32_t id;
    float logprob;
    lr_error err;
} lr_drawn;

/* Is its next token one draw, that nobody's callbacks have a say in? */
bool lr_request__draws_plainly(const lr_request *);
/* Draws what can be drawn by all threads; sets the requests' `drawn`. */
void lr_engine__draw_ahead(lr_engine *, const lr_batch *);
void lr_engine__free_draws(lr_engine *);

/* told_draws.c: draws that the model makes. Before its results: b->draws; behind them: the requests' `drawn`. */
void lr_engine__ask_draws(lr_engine *, lr_batch *);
void lr_engine__take_draws(lr_engine *, const lr_batch *);
void lr_engine__free_asked(lr_engine *);

/* ahead.c: whether the next step will probably be made of b's requests and nothing else, which may be said on a device
 * that computes by itself. (Blocks then come a step earlier; a recording, which is to be the same on every device, has
 * none of it.) The pass of that step, launched on a guess when b's tokens are drawn, but not all dealt with; and
 * whether it is what the next b asks for: then b becomes the launched batch, and the requests' `out` its rows. */
bool lr_engine__goes_on(const lr_engine *, const lr_batch *b);
void lr_engine__launch_ahead(lr_engine *, const lr_batch *b);
bool lr_engine__landed(lr_engine *, lr_batch *b);
void lr_engine__free_ahead(lr_engine *);
int lr_request__more_text(lr_request *, size_t n, lr_error *err);
int lr_request__cmp_ids(const void *a, const void *b);   /* order of stop_ids */
bool lr_request__is_end(const lr_request *, int32_t id); /* the token ends it */
/* First position that has to be computed for the next logits wanted, and one past the last. */
int lr_request__need_from(const lr_request *);
int lr_request__end_pos(const lr_request *);
void lr_request__update_pending(lr_request *);

/* output.c: what a token does that was drawn */
void lr_request__stamp(lr_request *);
/* After a token that does not end the request by itself: does anything else end it? */
lr_finish lr_request__after_token(lr_request *, int32_t id, bool closed);

/* step.c */
/* What a step that took the time from t0 to t1 adds to requests and metrics. */
void lr_engine__account(lr_engine *, double t0, double t1, int rows);
/* Carries out what was put off: cancels, then frees. */
void lr_engine__deferred(lr_engine *);

/* spare.c */
/* Whether it is a running request that has only tokens to compute that came without a choice, and the one before. */
bool lr_request__in_backlog(const lr_request *);
/* How many rows of such tokens a step should take up besides one a request. */
int lr_engine__spare_rows(const lr_engine *);

/* rule.c */
/* What a waiting request has to compute, less what the prefix cache holds now. */
void lr_request__look_up(lr_request *);

/* rule.c */
/* Rows that the built-in rule would take of prompts in a step made now. */
int lr_engine__prompt_rows(lr_engine *);

/* sched.c */
void lr_step__begin(lr_engine *);
void lr_step__schedule(lr_engine *);
void lr_step__preempt(lr_step *, lr_request *, lr_preempt_how how);

/* output.c */
/* Deals with the logits of a request that ran n rows in this step; counts the rows as computed. False: the request
 * was failed. */
bool lr_request__take_logits(lr_request *, int n);
/* The peaks of the request's logits at a place of its draft (0: of its own last row), as the model gave them; NULL: it
 * does not, or the logits have changed since. */
const float *lr_request__peaks(const lr_request *, int place);
/* What is held back comes out. */
void lr_request__flush_text(lr_request *);

/* metrics.c */
void lr_hist__add_T(lr_hist *, double v);
void lr_hist__add_L(lr_hist *, double v);
void lr_hist__add_N(lr_hist *, double v);
void lr_hist__add_B(lr_hist *, double v);

#endif
