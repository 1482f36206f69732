/* draw.h - draws of tokens as a device makes them: what the host asks for, and the numbers that come back in place of
 * a row of logits. The same chain gives the same token as on the host (sample/sample.h), bit for bit: see mass.h.
 *
 * Also read by the kernels of a GPU.
 */
#ifndef LR_BASE_DRAW_H
#define LR_BASE_DRAW_H
#include <stdint.h>

enum { LR_DRAW_STAGES = 12, LR_DRAW_TOP = 64 };

/* Stages run in their order; those that change single tokens come first. */
enum {
    LR_DRAW_ADD,         /* x[id] += value */
    LR_DRAW_REPEAT,      /* x[id] divided by a where it is above 0, else times a */
    LR_DRAW_COUNTS,      /* x[id] -= a + b * value */
    LR_DRAW_TEMPERATURE, /* a > 0; once at most */
    LR_DRAW_TOP_K,       /* n > 0 */
    LR_DRAW_TOP_P,       /* 0 < a < 1 */
    LR_DRAW_MIN_P,       /* a: logarithm of the least share of the best */
};

typedef struct lr_draw_edit {
    int32_t id; /* of the vocabulary, distinct within a stage */
    float value;
} lr_draw_edit;

typedef struct lr_draw_stage {
    int32_t kind;
    float a, b;
    int32_t n;  /* TOP_K: tokens; ADD, REPEAT, COUNTS: edits ... */
    int32_t at; /* ... from here on */
} lr_draw_stage;

typedef struct lr_draw {
    int32_t out;   /* which of the batch's rows of logits; -1 = nothing to do */
    int32_t mask;  /* its row of masks, -1 = none; comes before all stages */
    int32_t n_top; /* -1: no log-probabilities; else so many best tokens of the row as it came, at most LR_DRAW_TOP */
    int32_t n_stages;
    double u; /* lr_sample_uniform's number */
    lr_draw_stage stage[LR_DRAW_STAGES];
} lr_draw;

enum { LR_DRAWN, LR_DRAW_NOT_FINITE, LR_DRAW_NONE_LEFT }; /* as the host's errors */

typedef struct lr_draw_result {
    int32_t token, status; /* token -1 unless DRAWN */
    float logit, best;     /* n_top >= 0: of the row as it came, the token's and the largest */
    uint64_t mass;         /* and the row's mass, in base/mass.h's units */
} lr_draw_result;

typedef struct lr_draw_best {
    int32_t id; /* -1 behind the last */
    float logit;
} lr_draw_best;

/* What a batch wants drawn; borrowed. Results in the order of the draws. */
typedef struct lr_draws {
    int n, n_edits, n_masks, top; /* top: the largest n_top, 0 at least */
    const lr_draw *at;            /* (n) each of another row */
    const lr_draw_edit *edits;
    const uint32_t *masks; /* (n_masks, (n_vocab + 31) / 32) bit set = allowed */
    lr_draw_result *results;
    lr_draw_best *best; /* (n, top) */
} lr_draws;

#endif
