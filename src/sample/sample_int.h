/* sample_int.h - inside src/sample: scratch memory, and what a stage does to a row. */
#ifndef LR_SAMPLE_SAMPLE_INT_H
#define LR_SAMPLE_SAMPLE_INT_H
#include "cpu/cpu.h"
#include "sample/sample.h"

typedef struct lr_pair {
    uint32_t key;
    int32_t id;
} lr_pair;

/* Shared by all samplers of a thread: draws follow one another, so one set is enough. Sized at lr_sampler_new. */
typedef struct lr_scratch {
    int cap, refs;     /* cap: largest vocabulary so far */
    int32_t *cand_id;  /* (cap) */
    float *cand, *raw; /* (cap) candidates; the row before any stage */
    int32_t *ids;      /* (cap) */
    lr_pair *a, *b;    /* (cap) for sorting */
    uint32_t *mark;    /* (cap) == epoch: token was seen */
    int32_t *count;    /* (cap) valid where marked */
    uint32_t epoch;
    float *top;   /* (64) */
    float *prior; /* (cap) adaptive-p: probabilities by token id, before it changed them */
    /* Of a dense row: the largest value of each LR_PIECE, while peaks_known says so ... */
    float *peak, *sums; /* (lr_pieces(cap)) */
    bool peaks_known;
    /* Those with masked values are the row's without its mask, so nowhere too small, unless `sure` says otherwise. */
    bool rough;
    bool *sure;         /* (lr_pieces(cap)) */
    int settled;        /* so many of the largest are sure */
    const float *given; /* the next row's peaks without a mask, borrowed; NULL = to be looked for */
    /* ... and a temperature that is still to be applied: a value is (x - from) / t, and from the row's largest x. */
    bool warm;
    float from, t;
    const uint32_t *bits; /* ... and a mask: what is clear counts as -inf; NULL = none */
    bool raw_wanted;    /* the row as it came is to be kept in raw before x is written to; false = it has been, or no */
    const float *ahead; /* a row that is drawn from next, to be asked for while this one is computed with; or NULL */
    const lr_cpu_kernels *k;
} lr_scratch;

/* What a stage remembers from draw to draw. */
typedef struct lr_stage_state {
    double x, y;
} lr_stage_state;

/* Runs one stage on the row. */
int lr_stage_run(const lr_stage *s, const lr_stage_state *state, lr_logits *l, lr_scratch *w, const lr_sample_ctx *ctx,
                 lr_error *err);

/* A whole row's values are in x after this, whatever mask and temperature, and x may be written to. */
void lr_stage_plain(lr_logits *l, lr_scratch *w);
/* w->ahead, once. */
const float *lr_stage_ahead(lr_scratch *w);
/* The largest of the row's values. */
float lr_stage_best(const lr_logits *l, lr_scratch *w);
/* The peaks are known, of the row of n_vocab values without its mask. */
void lr_stage_rough(int n_vocab, lr_scratch *w);
/* The first of n values whose mass, with those before it, is at least so many units of base/mass.h: n = none. *sum:
 * what they come to. */
int lr_stage_reach(const lr_scratch *w, const float *x, int n, float best, uint64_t least, uint64_t *sum);
/* By ascending id, with a number from [0, 1). */
int32_t lr_stage_draw_dense(const lr_logits *l, lr_scratch *w, double u);

/* stages_more.c */
int lr_stage_check_more(const lr_stage *s, lr_error *err);
lr_stage_state lr_stage_begin(const lr_stage *s);
void lr_stage_run_more(const lr_stage *s, const lr_stage_state *state, lr_logits *l, lr_scratch *w,
                       const lr_sample_ctx *ctx);
/* The token was drawn from l, with that probability. */
void lr_stage_took(const lr_stage *s, lr_stage_state *state, const lr_scratch *w, int32_t token, double p);
/* True for stages that learn from what is drawn. */
bool lr_stage_learns(const lr_stage *s);

/* stages.c, for the others */

/* Makes all tokens with a finite logit >= threshold the candidates, sorted. */
void lr_stage_narrow(lr_logits *l, lr_scratch *w, float threshold);
void lr_stage_top_k(int k, lr_logits *l, lr_scratch *w);
void lr_stage_keep_best(lr_logits *l, lr_scratch *w);
void lr_stage_temperature(float t, lr_logits *l, lr_scratch *w);
/* Natural log of the sum of exp over the row as it is. */
double lr_stage_lse(const lr_logits *l, const lr_scratch *w);
/* Where the logit of a token is, NULL if it is no candidate. */
float *lr_stage_slot(lr_logits *l, int32_t id);
/* After logits were changed: candidates are sorted again, those without a chance dropped. */
void lr_stage_changed(lr_logits *l, lr_scratch *w);
/* A new epoch for w->mark: nothing is marked. */
void lr_stage_unmark(lr_scratch *w);

#endif
