/* engine.h - many requests on one model: sequences on paged memory, continuous batching, one step at a time.
 *
 * A sequence (lr_seq) is a list of tokens and the KV of a leading part of it. A request (lr_request) is work on one
 * sequence: generate tokens, give the logits behind its end, or score its tokens. lr_engine_step runs one batch that
 * mixes rows of many requests; requests join and leave at every step. Who runs is the policy's business (policy.h).
 *
 * A result does not depend on the other requests, on chunking, on prefix-cache hits or on preemption.
 *
 * States: waiting -> running -> done | failed | cancelled; running -> waiting when preempted.
 * One thread owns an engine. Calls are made between steps; from inside a step (sampler callbacks, policy hooks) only
 * getters, lr_request_cancel, lr_request_free and lr_seq_free (both then take effect at the step's end) and the
 * functions of policy.h; all others return LR_ESTATE.
 */
#ifndef LR_ENGINE_ENGINE_H
#define LR_ENGINE_ENGINE_H
#include "base/str.h"
#include "kv/kv.h"
#include "model/model.h"
#include "sample/sample.h"
#include "spec/spec.h"

typedef struct lr_engine lr_engine;
typedef struct lr_seq lr_seq;
typedef struct lr_request lr_request;

/* ---- engine ---- */

typedef enum lr_preempt_how { LR_PREEMPT_RECOMPUTE, LR_PREEMPT_SWAP } lr_preempt_how;

/* Start from lr_engine_defaults(). 0 in a size field means its default. */
typedef struct lr_engine_config {
    int max_batch_tokens; /* rows a step; 512 */
    int max_seqs;         /* requests running at once; 64 */
    int max_waiting;      /* requests queued at once; 65536 */
    int chunk;            /* most prompt rows of one request in a step; max_batch_tokens */
    int prompt_rows;      /* of a step that has as many the built-in rule begins no further prompt; 64, on a GPU all */
    int block_size;       /* token slots a KV block, 1..256; 16 */
    int kv_blocks[LR_KV_GROUPS]; /* 0 = by kv_bytes / kv_fraction */
    size_t kv_bytes;             /* for all groups together; 0 = by kv_fraction */
    double kv_fraction;     /* of the memory that is available now, on a device beside a batch's activations; 0 = one
                               context, up to four of them in 16384 tokens, but at most 0.4 of the memory, 0.9 there */
    int kv_type;            /* lr_dtype; LR_F16 */
    int kv_value_type;      /* lr_dtype of values, if they have another than keys; -1 */
    int context;            /* longest sequence; 0 = the model's */
    bool prefix_cache;      /* true */
    int max_pinned;         /* blocks (group 0) that pinned sequences may hold; 0 = half the pool */
    lr_preempt_how preempt; /* the default policy's choice; recompute */
    size_t swap_bytes;      /* host memory for swapped-out sequences; 1 GiB; when full: recompute */
    const char *spill;      /* folder, or file to be made, where evicted blocks go and come back from; NULL = none.
                               Borrowed for lr_engine_new. Not for models with sliding windows */
    size_t spill_bytes;     /* at most; 4 GiB */
    int patience;           /* steps in a row that a policy may leave runnable work lying; then the default runs; 8 */
    int hash_bits;          /* test hook, see lr_kv_config */
    double (*now)(void *user); /* clock in seconds, for simulations and tests; NULL = monotonic time */
    void *now_user;
} lr_engine_config;

lr_engine_config lr_engine_defaults(void);

/* Starts the model with a KV pool. Takes ownership of the model; on failure it stays the caller's. */
int lr_engine_new(lr_engine **out, lr_model *model, const lr_engine_config *cfg, lr_error *err);
/* Frees its requests and sequences too: every handle is dead afterwards. Not from inside a step. */
void lr_engine_free(lr_engine *);

lr_model *lr_engine_model(lr_engine *); /* borrowed */
/* The configuration in force, defaults filled in. */
const lr_engine_config *lr_engine_get_config(const lr_engine *);

typedef struct lr_engine_info {
    int context; /* longest sequence allowed: min(configured, model's, what the pool holds) */
    int n_running, n_waiting, n_seqs;
    int n_groups, block_size;
    lr_kv_stats kv[LR_KV_GROUPS];
    size_t block_bytes[LR_KV_GROUPS];
    int pinned;     /* blocks of pinned sequences, group 0 */
    int slack;      /* token slots allocated but not filled, group 0, over all sequences */
    size_t swapped; /* bytes in host memory */
    uint64_t steps;
    size_t mem_weights, mem_kv, mem_work; /* bytes, see lr_model_ops.memory */
    double busy, block_seconds; /* seconds in steps that ran rows; blocks used (group 0) times seconds of them */
    int block_peak;             /* most blocks used behind a step */
} lr_engine_info;
void lr_engine_get_info(const lr_engine *, lr_engine_info *info);
/* The part of it that costs nothing to know: n_running, n_waiting, context, kv[0], steps, busy and blocks. */
void lr_engine_get_state(const lr_engine *, lr_engine_info *info);

/* One step. Returns the rows that ran, 0 if nothing could run, or a negative code if called from inside a step. A
 * failing row, sampler or whole forward pass fails the requests concerned, not the step. */
int lr_engine_step(lr_engine *, lr_error *err);
/* With a simulated model: as many steps as it takes until its clock is at `until`, a request ends, or something has to
 * be decided, as long as nothing waits and all that run are decoding, under the built-in rule or a steady policy. The
 * same as that many lr_engine_step, faster; without events for tokens. Returns their number, 0 with other models. */
int64_t lr_engine_coast(lr_engine *, double until);
/* What the last step ran, for whoever fits a cost model: rows, sequences, tokens drawn or scored; over sequences with
 * one row the tokens that it sees, itself included; over those with more the same, summed over their rows. */
typedef struct lr_step_load {
    int rows, seqs, outs;
    int64_t context, pairs;
} lr_step_load;
void lr_engine_last_load(const lr_engine *, lr_step_load *);
/* Requests that are waiting or running. */
int lr_engine_busy(const lr_engine *);
/* Those of them that wait: not started yet, or preempted. */
int lr_engine_waiting(const lr_engine *);
double lr_engine_now(const lr_engine *); /* seconds on the engine's clock */
/* Grows with each step; logits of an older generation are dead. */
uint64_t lr_engine_generation(const lr_engine *);
/* Writes a trace of all that happens to a file from now on (trace.h); NULL ends it. LR_EIO. */
int lr_engine_trace(lr_engine *, const char *path, lr_error *err);
/* Forgets cached prefixes that no sequence holds. */
void lr_engine_drop_cached(lr_engine *);
/* Every invariant of pool, tables, sequences and lists; LR_ESTATE says which is broken. For tests; slow. */
int lr_engine_check(const lr_engine *, lr_error *err);

/* ---- events ---- */

enum lr_event {
    LR_EV_START = 1,   /* it runs (for the first time, or again) */
    LR_EV_TOKEN = 2,   /* new tokens */
    LR_EV_TEXT = 4,    /* new text */
    LR_EV_PREEMPT = 8, /* went back to the waiting list */
    LR_EV_DONE = 16,   /* finished, failed or cancelled; the last event */
};
/* The next request that something happened to, each at most once per call round, in order of first news; *what: the
 * lr_event bits since the request was last returned. NULL when there is no more. Cheap when empty. */
lr_request *lr_engine_next_event(lr_engine *, unsigned *what);

/* ---- sequences ---- */

typedef struct lr_seq_config {
    lr_str salt, adapter; /* prefix-cache namespace; copied */
    uint64_t tag;         /* for the policy's evict hook; may change later */
    /* What the sequence runs with, NULL = the model alone; a reference is taken. It is part of the namespace.
     * LR_EINVAL: it belongs to another model. */
    struct lr_adapter *lora;
} lr_seq_config;

/* cfg NULL = defaults. The sequence belongs to the caller until lr_seq_free. */
int lr_seq_new(lr_engine *, const lr_seq_config *cfg, lr_seq **out, lr_error *err);
/* Ends a request that is active on it (cancelled) and frees it. What it computed stays in the prefix cache. NULL is
 * allowed. */
void lr_seq_free(lr_seq *);
/* A sequence with the same tokens that shares all blocks; a partly filled last block is copied when one of the two
 * writes to it. Also while a request is active on s. */
int lr_seq_fork(lr_seq *s, lr_seq **out, lr_error *err);
/* LR_EINVAL: an id outside the model's vocabulary; LR_EFULL: longer than the context; LR_ESTATE: a request is active.
 */
int lr_seq_append(lr_seq *, const int32_t *tokens, size_t n, lr_error *err);
/* Cuts to the first n tokens (n <= length). LR_ESTATE: a request is active. */
int lr_seq_truncate(lr_seq *, size_t n, lr_error *err);
size_t lr_seq_len(const lr_seq *);
const int32_t *lr_seq_tokens(const lr_seq *); /* (len) borrowed until the sequence changes */
size_t lr_seq_computed(const lr_seq *);       /* leading tokens whose KV is at hand */
int lr_seq_blocks(const lr_seq *, int group); /* blocks held, shared ones included */
lr_request *lr_seq_request(const lr_seq *);   /* the active request or NULL */
lr_engine *lr_seq_engine(const lr_seq *);
uint64_t lr_seq_id(const lr_seq *);
void lr_seq_set_tag(lr_seq *, uint64_t tag);
uint64_t lr_seq_tag(const lr_seq *);
/* Blocks of an idle sequence go to the prefix cache when memory runs short, and are recomputed later if lost; those of
 * a pinned one stay. LR_EFULL: over max_pinned, or an active request would no longer fit; a pinned sequence that grows
 * past that is pinned no longer. */
int lr_seq_pin(lr_seq *, bool on, lr_error *err);
/* Tokens of the sequence that would not need computing now: its own and what the prefix cache holds. */
size_t lr_seq_peek_cached(const lr_seq *);

/* Tokens and KV to a file, written whole or not at all; computes nothing. Restoring checks version, checksum and the
 * model's fingerprint: LR_EFORMAT (damaged), LR_EUNSUPPORTED (other version), LR_ESTATE (other model). If KV type or
 * block size differ, or the pool has no room, the sequence gets the tokens only and computes them again. What is
 * restored enters the prefix cache of cfg's namespace: a file from a stranger is to be given a salt of its own. */
int lr_seq_save(lr_seq *, const char *path, lr_error *err);
int lr_seq_restore(lr_engine *, const char *path, const lr_seq_config *cfg, lr_seq **out, lr_error *err);

/* ---- requests ---- */

typedef enum lr_req_kind {
    LR_REQ_GENERATE, /* append tokens until a stop */
    LR_REQ_LOGITS,   /* compute what is pending and hand out the last row's logits */
    LR_REQ_SCORE,    /* log-probabilities of the tokens from position score_from on */
} lr_req_kind;

typedef enum lr_req_state { LR_REQ_WAITING, LR_REQ_RUNNING, LR_REQ_DONE, LR_REQ_FAILED, LR_REQ_CANCELLED } lr_req_state;

typedef enum lr_finish {
    LR_FINISH_NONE,
    LR_FINISH_STOP,
    LR_FINISH_LENGTH,
    LR_FINISH_CANCELLED,
    LR_FINISH_ERROR
} lr_finish;

/* Restricts which tokens may come (a grammar). Called in a step; user is borrowed unless free is set. */
typedef struct lr_constraint {
    void *user;
    /* *bits: allowed-token bits (n_vocab bits, bit i % 32 of word i / 32) for the next token, or NULL: all. They stay
     * valid until the next call, of any constraint's unless lasting. Negative = error: the request fails with it. */
    int (*mask)(void *user, const uint32_t **bits, lr_error *err);
    bool lasting; /* the bits stay until the next call for this user */
    /* The token was taken: 0 = go on, 1 = nothing may follow (finish "stop"), negative = error. Not called for the
     * token that ends a request. */
    int (*accept)(void *user, int32_t token, lr_error *err);
    /* The request is queued. strip_space: the text's first piece will lose a first space (after a control token, in
     * vocabularies that put one before a text). force: where what comes next is no choice, mask may leave one token
     * alone; else the sampler may want any that spells it. NULL: not wanted. */
    void (*start)(void *user, bool strip_space, bool force);
    /* 1 and the token that comes next whatever the logits say; 0: there is a choice; negative = error. Such tokens are
     * taken without a forward pass of their own. NULL = never. */
    int (*forced)(void *user, int32_t *token, lr_error *err);
    /* Drafts: what is accepted after (true) is taken back by (false), so that they can be chosen among what is allowed.
     * NULL: they are not. */
    int (*ahead)(void *user, bool on, lr_error *err);
    void (*free)(void *user); /* with the request, or NULL */
} lr_constraint;

/* Start from lr_req_defaults(). Arrays and strings are copied. */
typedef struct lr_req_params {
    lr_req_kind kind;
    lr_sampler *sampler; /* GENERATE: NULL = arg max. Ownership passes when lr_request_new succeeds */
    int max_tokens;      /* GENERATE: -1 = to the end of the context */
    const lr_str *stop;  /* stop strings; an empty one is LR_EINVAL */
    size_t n_stop;
    const int32_t *stop_ids; /* end tokens besides the vocabulary's own */
    size_t n_stop_ids;
    bool ignore_eos; /* the vocabulary's end-of-generation tokens are taken like others */
    bool special;    /* control tokens show their names in the text */
    int n_top;       /* GENERATE, SCORE: -1 = no log-probabilities; 0..64 = log-probability and that many best.
                        SCORE always gives the log-probability */
    int score_from;  /* SCORE: first position to score, 1 .. len - 1 */
    float *keep;     /* SCORE: room for the logits behind each scored token's predecessor, (keep_rows, n_vocab), or
                        NULL; borrowed until the request has ended */
    size_t keep_rows;
    const struct lr_spec_params *spec; /* GENERATE: drafts, see speculate.h; NULL = none; copied */
    const lr_constraint *constraint;   /* GENERATE: NULL = none; copied; ownership of user as the sampler's */
    int priority;                      /* larger is more urgent (priority policy) */
    double deadline;                   /* seconds on the engine's clock; INFINITY = none (policies look at it) */
    lr_str tenant;                     /* at most 63 bytes */
    uint64_t tag;
    void *user;
    bool free_seq; /* the sequence goes with the request: freed when that ends (on failure of lr_request_new it
                      stays the caller's) */
} lr_req_params;

lr_req_params lr_req_defaults(lr_req_kind kind);

/* Read at any time; live until lr_request_free. Times are seconds on the engine's clock, 0 = not yet. */
typedef struct lr_req_info {
    uint64_t id; /* 1, 2, ... per engine */
    lr_req_kind kind;
    lr_req_state state;
    lr_finish finish;
    lr_error error; /* when failed */
    int priority;
    double deadline;
    char tenant[64];
    uint64_t tag;
    void *user;
    lr_seq *seq;                                       /* NULL once it is gone */
    double t_arrival, t_start, t_first, t_last, t_end; /* submitted, first scheduled, first and last token, ended */
    double t_queued;                                   /* seconds spent in the waiting list in all */
    int n_prompt;                                      /* tokens of the sequence at submission */
    int n_cached;    /* of these, how many needed no computing when it was first scheduled */
    int n_computed;  /* rows computed for it so far, repeats included */
    int n_generated; /* tokens drawn, an end token included */
    int n_forced;    /* of these, how many were taken without a forward pass of their own (lr_constraint.forced) */
    int max_tokens;  /* limit in force (the context counted in) */
    int n_pending;   /* tokens to be computed before the next logits */
    int n_preempted;
    double block_seconds; /* integral of blocks held over step time */
    lr_spec_stats spec;   /* drafts */
    int32_t stop_token;   /* end token that finished it, -1; it is not appended to the sequence */
    int stop_string;      /* index of the stop string that finished it, -1 */
} lr_req_info;

/* A drawn (GENERATE) or scored (SCORE) token. */
typedef struct lr_token_rec {
    int32_t id;
    float logprob;          /* NaN when not wanted */
    uint32_t raw_at, raw_n; /* byte range in the raw text of all records' pieces */
} lr_token_rec;

/* Queues a request on a sequence. One at a time per sequence: LR_ESTATE. LR_EFULL: it can never fit (the text has the
 * numbers) or the queue is full; LR_EINVAL: bad parameters or an empty sequence; or the policy's refusal. */
int lr_request_new(lr_engine *, lr_seq *, const lr_req_params *, lr_request **out, lr_error *err);
/* Gives the handle back; an active request is cancelled first. NULL is allowed. */
void lr_request_free(lr_request *);
/* Ends it now if active: its place, and its blocks if the sequence goes with it, are free when this returns (inside a
 * step: when the step returns). The sequence keeps its tokens, generated ones included. */
void lr_request_cancel(lr_request *);
const lr_req_info *lr_request_info(const lr_request *);
lr_engine *lr_request_engine(const lr_request *);
bool lr_request_active(const lr_request *);
void lr_request_set_priority(lr_request *, int priority);
void lr_request_set_deadline(lr_request *, double deadline);
int lr_request_blocks(const lr_request *, int group);
double lr_request_queue_time(const lr_request *); /* t_queued and the present wait */
/* Text that is safe to show so far: valid UTF-8, no part of a stop string; only grows. Borrowed until the next step. */
const char *lr_request_text(const lr_request *, size_t *n);
const lr_token_rec *lr_request_tokens(const lr_request *, size_t *n); /* borrowed until the next step */
/* The n_top best of record i, best first; NULL if none are kept. *n: their number. */
const lr_top *lr_request_top(const lr_request *, size_t i, int *n);
/* LOGITS: (n_vocab), NULL once a further step has begun. The caller may write to it. */
float *lr_request_logits(lr_request *, uint64_t *generation);
/* LOGITS: the final hidden row behind the same logits (*n: its width, lr_model.n_embd), NULL once a further step has
 * begun or if the model does not tell it. */
const float *lr_request_hidden(const lr_request *, int *n);

/* "waiting", "length", ... static strings; finish "none" before the end */
const char *lr_req_state_name(lr_req_state);
const char *lr_finish_name(lr_finish);

/* ---- test hooks ---- */

typedef enum lr_fault { LR_FAULT_NONE, LR_FAULT_PREEMPT, LR_FAULT_SWAP, LR_FAULT_ERROR, LR_FAULT_NAN } lr_fault;
/* The fault strikes in the step in which the request has logits for the after-th time from now (0 = the next time);
 * PREEMPT and SWAP strike before that step's batch is made. */
void lr_request_inject(lr_request *, lr_fault, int after);

#endif
