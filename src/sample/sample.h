/* sample.h - from a row of logits to a token: a chain of native stages and callbacks.
 *
 * A chain is a list of stages that narrow and reweigh candidates, in the order the user gave. The row is first the
 * whole vocabulary ("dense", in place on the logits); the first stage that narrows (top_k, top_p, min_p ...) turns it
 * into a short sorted candidate list, so later stages are cheap. Random numbers come from (seed, position), never from
 * a shared stream: same seed, same text, whatever else runs (Promise 1). A sampler belongs to one request; a fork
 * copies it, with what it has learnt from its draws (mirostat, adaptive-p). Engine thread only. No stage allocates
 * after lr_sampler_new.
 */
#ifndef LR_SAMPLE_SAMPLE_H
#define LR_SAMPLE_SAMPLE_H
#include "base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum lr_stage_kind {
    LR_STAGE_LOGIT_BIAS,  /* ids, values */
    LR_STAGE_PENALTIES,   /* repetition, presence, frequency, last_n */
    LR_STAGE_TEMPERATURE, /* a; <= 0 (or so small that it overflows) = arg max */
    LR_STAGE_TOP_K,       /* n; <= 0 = off */
    LR_STAGE_TOP_P,       /* a; >= 1 = off; <= 0 keeps one */
    LR_STAGE_MIN_P,       /* a; <= 0 = off */
    LR_STAGE_TYPICAL,     /* a; locally typical sampling, arXiv:2202.00666 */
    LR_STAGE_TOP_N_SIGMA, /* a; arXiv:2411.07641 */
    LR_STAGE_ALLOW,       /* ids: only these */
    LR_STAGE_BAN,         /* ids: never these */
    LR_STAGE_MIN_TOKENS,  /* n: no end-of-generation token before n generated ones (ids: the end tokens) */
    LR_STAGE_CALLBACK,    /* fn, user */
    LR_STAGE_DYNAMIC,     /* temperature between a - b and a + b, by the entropy to the power of c; see stages_more.c */
    LR_STAGE_XTC,         /* a: chance, b: threshold */
    LR_STAGE_DRY,         /* a: multiplier, b: base, n: allowed length, last_n, ids: tokens that break a repetition */
    LR_STAGE_NO_REPEAT,   /* n: no n tokens in a row come twice (in the last last_n tokens); 0 = off */
    LR_STAGE_MIROSTAT_1,  /* a: tau, b: eta, n: tokens that the estimate looks at; the last stage */
    LR_STAGE_MIROSTAT_2,  /* a: tau, b: eta; the last stage */
    LR_STAGE_ADAPTIVE_P,  /* a: target, b: decay; the last stage */
} lr_stage_kind;

/* The row as stages and callbacks see it. */
typedef struct lr_logits {
    float *x; /* (n_vocab) dense logits; meaningful while cand is NULL */
    int n_vocab;
    int n_cand; /* candidates, sorted by descending logit, ties by lower id; -1 = dense */
    int32_t *cand_id;
    float *cand;         /* logits of the candidates */
    uint64_t generation; /* grows with each step: a view made of an older one is stale */
} lr_logits;

/* What a stage may look at. Token arrays are borrowed for the call. */
typedef struct lr_sample_ctx {
    const int32_t *prompt;
    size_t n_prompt; /* tokens before the first generated one */
    const int32_t *generated;
    size_t n_generated;
    uint64_t seed;
    uint64_t position; /* of the token to be drawn, in the sequence */
} lr_sample_ctx;

typedef int (*lr_stage_fn)(void *user, lr_logits *l, const lr_sample_ctx *ctx, lr_error *err);

typedef struct lr_stage {
    lr_stage_kind kind;
    float a, b, c, repetition, presence, frequency;
    int n, last_n; /* last_n: tokens that repetition looks back over; 0 = all, also the prompt */
    const int32_t *ids;
    const float *values;
    size_t n_ids; /* copied by lr_sampler_new */
    lr_stage_fn fn;
    void *user;
    void (*user_free)(void *); /* CALLBACK */
    void *(*user_dup)(void *); /* for copies; NULL = shared as it is */
} lr_stage;

typedef struct lr_sampler lr_sampler;

/* Checks ranges (ids against n_vocab, NaN, negative) and copies. seed: same seed, same draws. */
int lr_sampler_new(lr_sampler **out, const lr_stage *stages, size_t n, uint64_t seed, int n_vocab, lr_error *err);
int lr_sampler_copy(lr_sampler **out, const lr_sampler *, lr_error *err);
void lr_sampler_free(lr_sampler *);
uint64_t lr_sampler_seed(const lr_sampler *);
/* True if a token that a mask leaves alone is drawn whatever the row, and nothing is learnt from that. */
bool lr_sampler_takes_any(const lr_sampler *);
/* True if the chain always takes the arg max of the (biased, penalised) row. */
bool lr_sampler_is_greedy(const lr_sampler *);
/* The chain has no callback: its draws may be made by any thread that has a desk, one at a time. */
bool lr_sampler_calls_nothing(const lr_sampler *);

/* Work memory for draws on another thread than the one that makes the samplers (which has its own). NULL: no memory. */
typedef struct lr_sample_desk lr_sample_desk;
lr_sample_desk *lr_sample_desk_new(int n_vocab);
void lr_sample_desk_free(lr_sample_desk *);
/* This thread's draws use it from now on, until it says NULL. */
void lr_sample_desk_use(lr_sample_desk *);
/* The row that this thread draws from after the next draw, of as many logits; NULL: not known. It is brought near. */
void lr_sample_ahead(const float *logits);

/* The peaks of the row that this thread draws from next (lr_batch.peaks), so that they need not be looked for; NULL:
 * not known. They are copied by that draw. */
void lr_sample_peaks(const float *peaks);

/* The log-probability of a token and of the best few, from the full softmax before any stage. */
typedef struct lr_top {
    int32_t id;
    float logprob;
} lr_top;

#define LR_SAMPLE_NOT_FINITE "logits are not finite"
#define LR_SAMPLE_NONE_LEFT  "no token is left to draw: all are masked, banned or -inf"

/* Draws a token. logits (n_vocab) is overwritten. mask: allowed-token bits from a grammar, or NULL. n_top >= 0:
 * *logprob and top[0..n_top-1] are filled first (n_top <= 64; sorted, best first), -1 = not wanted. Errors: a row
 * without any finite logit (NaN, all -inf) is LR_EINVAL "logits are not finite"; a callback's own. */
int lr_sampler_draw(lr_sampler *, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int n_top,
                    int32_t *token, float *logprob, lr_top *top, lr_error *err);

/* Runs the chain without drawing and gives the resulting distribution: ids and probabilities of all tokens with p > 0,
 * best first, at most cap; *n is their number. For exact verification of drafts and for tests. */
int lr_sampler_probs(lr_sampler *, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int32_t *ids,
                     float *p, size_t cap, size_t *n, lr_error *err);

/* ---- drafts: see engine/speculate.h ---- */

/* A copy without what only the real draw may run: callbacks, and stages that learn. For choosing drafts. */
int lr_sampler_copy_plain(lr_sampler **out, const lr_sampler *, lr_error *err);
/* Draws from the best `cap` (<= 1024) tokens of the chain's distribution alone, and gives what it drew from: ids, q
 * (n), best first. The random number is not that of lr_sampler_draw. */
int lr_sampler_draft(lr_sampler *, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int cap, int32_t *ids,
                     float *q, int *n, int32_t *token, lr_error *err);
/* As lr_sampler_draw, for a place that has a draft, drawn from q (n) over ids: takes it with probability min(1, p/q),
 * else draws from max(0, p - q). *token == draft says that it was taken; it is distributed as p, whatever q is
 * (arXiv:2211.17192). */
int lr_sampler_judge(lr_sampler *, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int32_t draft,
                     const int32_t *ids, const float *q, int n, int n_top, int32_t *token, float *logprob, lr_top *top,
                     lr_error *err);

/* A uniform number in [0, 1) from (seed, position, stream): a counter-based hash. */
double lr_sample_uniform(uint64_t seed, uint64_t position, uint32_t stream);

#endif
