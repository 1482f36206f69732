/* metrics.h - counters and histograms of an engine: cheap to keep, read directly, or written as Prometheus text.
 *
 * Names in the text follow those that vLLM exports, under the prefix "llmrun:". Counters only grow. Times in seconds.
 */
#ifndef LR_ENGINE_METRICS_H
#define LR_ENGINE_METRICS_H
#include "engine/engine.h"

/* field, name in the text, help */
#define LR_COUNTER_LIST(X)                                                                                             \
    X(prompt_tokens, "prompt_tokens_total", "Tokens of prompts, cached ones included")                                 \
    X(generation_tokens, "generation_tokens_total", "Tokens drawn")                                                    \
    X(forced_tokens, "forced_tokens_total", "Of these, tokens that a constraint left no choice about")                 \
    X(computed_tokens, "computed_tokens_total", "Rows run through the model")                                          \
    X(prefix_queries, "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache")                     \
    X(prefix_hits, "prefix_cache_hits_total", "Prompt tokens found in the prefix cache")                               \
    X(prefix_joined, "prefix_cache_joined_tokens_total", "Of these, tokens left to a request that was computing them") \
    X(preempt_recompute, "preemptions_recompute_total", "Preemptions whose KV is computed again")                      \
    X(preempt_swap, "preemptions_swap_total", "Preemptions whose KV went to host memory")                              \
    X(swap_in, "swap_in_total", "Sequences brought back from host memory")                                             \
    X(parked, "parked_sequences_total", "Idle sequences that gave their blocks to the cache")                          \
    X(steps, "steps_total", "Steps that ran rows")                                                                     \
    X(idle_steps, "idle_steps_total", "Steps in which a policy left runnable work lying")                              \
    X(refused, "requests_refused_total", "Requests refused at admission")                                              \
    X(device_draws, "device_draws_total", "Tokens drawn on the device")                                                \
    X(ahead_taken, "steps_ahead_total",                                                                                \
      "Steps whose pass the device had begun before the last one's tokens were dealt with")                            \
    X(ahead_lost, "steps_ahead_lost_total", "Passes that were begun so, and not what the next step asked for")         \
    X(spec_drafts, "spec_decode_num_drafts_total", "Drafts that were verified")                                        \
    X(spec_drafted, "spec_decode_num_draft_tokens_total", "Tokens of drafts")                                          \
    X(spec_accepted, "spec_decode_num_accepted_tokens_total", "Tokens of drafts that were taken")                      \
    X(spec_failed, "spec_decode_failures_total", "Forward passes of the draft model that failed")                      \
    X(policy_refused, "policy_refusals_total", "Decisions of a policy that could not be honoured")                     \
    X(policy_failed, "policy_errors_total", "Hooks that failed, so that the default decided")

/* field, name, help, kind of bounds: T short times, L long times, N token counts, B batch sizes */
#define LR_HIST_LIST(X)                                                                                                \
    X(ttft, "time_to_first_token_seconds", "From submission to the first token", T)                                    \
    X(tpot, "request_time_per_output_token_seconds", "Mean time per token after the first, per request", T)            \
    X(itl, "inter_token_latency_seconds", "Between two tokens of a request", T)                                        \
    X(queue, "request_queue_time_seconds", "In the waiting list, per request", L)                                      \
    X(e2e, "e2e_request_latency_seconds", "From submission to the end", L)                                             \
    X(step, "step_time_seconds", "One step", T)                                                                        \
    X(results, "results_time_seconds", "Sampling, masks, stop strings and text of one step", T)                        \
    X(hook, "hook_time_seconds", "All policy hooks of one step", T)                                                    \
    X(batch, "iteration_tokens_total", "Rows of one step", B)                                                          \
    X(spec_length, "spec_decode_accepted_length", "Tokens taken of one draft", N)                                      \
    X(spec_draft, "spec_decode_draft_time_seconds", "Making the drafts of one step", T)                                \
    X(spec_verify, "spec_decode_verify_time_seconds", "Forward pass of a step with drafts", T)                         \
    X(prompt, "request_prompt_tokens", "Prompt length of ended requests", N)                                           \
    X(generated, "request_generation_tokens", "Tokens drawn by ended requests", N)

#define LR_HIST_MAX 24

typedef struct lr_hist {
    uint64_t count[LR_HIST_MAX + 1]; /* per bucket, the last one above all bounds */
    uint64_t n;
    double sum;
} lr_hist;

typedef struct lr_metrics {
#define X(field, name, help) uint64_t field;
    LR_COUNTER_LIST(X)
#undef X
    uint64_t finished[5];                                                           /* by lr_finish */
    uint64_t spec_tried_at[LR_SPEC_POSITIONS], spec_accepted_at[LR_SPEC_POSITIONS]; /* by place in the draft */
#define X(field, name, help, kind) lr_hist field;
    LR_HIST_LIST(X)
#undef X
} lr_metrics;

/* Live, borrowed for the engine's life. */
const lr_metrics *lr_engine_metrics(const lr_engine *);
/* All of it as Prometheus text (exposition format 0.0.4), zero-terminated; the caller frees it with lr_free. model: the
 * value of the model_name label. */
int lr_engine_prometheus(const lr_engine *, const char *model, char **text, size_t *n, lr_error *err);
/* Value below which the part q (0..1) of the observations lies, interpolated inside its bucket; NaN without any. */
double lr_metrics_quantile(const lr_metrics *, const lr_hist *, double q);
/* For bindings: the i-th counter or histogram and its field name; NULL past the end. */
const uint64_t *lr_metrics_counter(const lr_metrics *, int i, const char **field);
const lr_hist *lr_metrics_hist(const lr_metrics *, int i, const char **field);

#endif
