/* simulated.h - a model without a forward pass: steps take the time that a cost model says, on a clock of its own.
 *
 * The engine around it is the real one: scheduler, block pool, prefix index, policies. Instead of logits the model
 * tells tokens (lr_model.tells), each a function of the token and position before, so that equal prompts go on equally,
 * as with greedy sampling. KV blocks have a size and no contents; moving one to host memory or back takes time.
 *
 * A step's time is a table over its rows, plus so much for each token that decoding rows look back at, for each pair of
 * a prompt's row and a token before it, each sequence, each token drawn, and each step. Seconds throughout.
 *
 * Weights that lie in a cache which others use too get cold: after a pause, or a long step, a step takes longer, and
 * the next ones less and less so. How cold they are is a number from 0 to 1; it nears 1 with time (by a factor e in
 * cool_seconds), and each step, which reads them all, multiplies it by cold_keep. Cold steps take up to cold_narrow or
 * cold_wide longer.
 */
#ifndef LR_MODEL_SIMULATED_H
#define LR_MODEL_SIMULATED_H
#include "model/model.h"

#define LR_SIM_POINTS 64

typedef struct lr_sim_cost {
    int n_points;                  /* >= 1; rows ascending. Between two points linear, past the last one on along the
                                      last two, before the first one as it */
    int rows[LR_SIM_POINTS];       /* rows of a step ... */
    double seconds[LR_SIM_POINTS]; /* ... and what they take without a context */
    double step, sequence, token;  /* a step, a sequence in it, a token drawn in it */
    double decode_context;         /* a token that a decoding row looks back at */
    double prefill_pair;           /* a row of a prompt and a token before it, or itself */
    double block_move;             /* a KV block to host memory or back */
    double cold_narrow, cold_wide; /* what a step takes longer if all is cold: of up to narrow_rows rows, of more */
    int narrow_rows;
    double cool_seconds, cold_keep; /* see above; cool_seconds 0: nothing gets cold */
} lr_sim_cost;

typedef struct lr_sim_config {
    int n_ctx;
    size_t token_bytes; /* of KV */
    lr_sim_cost cost;
    lr_vocab *vocab; /* a reference is taken */
} lr_sim_config;

/* LR_EINVAL names the field that is wrong. */
int lr_simulated_new(lr_model **out, const lr_sim_config *cfg, lr_error *err);
/* Whether a model is one of these; what follows is for them only. */
bool lr_simulated_is(const lr_model *);

/* The clock, in the form that lr_engine_config.now wants. */
double lr_simulated_now(void *model);
/* Puts the clock forward; earlier times are left alone. */
void lr_simulated_wait(lr_model *, double until);

/* What one step holds. */
typedef struct lr_sim_load {
    int rows, seqs, outs;
    int64_t context; /* sum over decoding rows of the tokens they see, themselves included */
    int64_t pairs;   /* the same over rows of prompts (sequences with more than one row) */
} lr_sim_load;
/* What it would take now; rows at most those the model was started for. */
double lr_simulated_seconds(const lr_model *, const lr_sim_load *);
/* Lets a step of this load happen. */
void lr_simulated_pass(lr_model *, const lr_sim_load *);

enum { LR_SIM_VOCAB = 1 << 20 }; /* ids of a simulated model's tokens are below */
/* The token that follows `token` at position pos. */
int32_t lr_simulated_next(int32_t token, int pos);
/* The i-th token of the text that a number stands for. */
int32_t lr_simulated_text(uint64_t salt, uint64_t i);

#endif
