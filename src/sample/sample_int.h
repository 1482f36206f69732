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
    float *top; /* (64) */
    const lr_cpu_kernels *k;
} lr_scratch;

/* Runs one stage on the row. */
int lr_stage_run(const lr_stage *s, lr_logits *l, lr_scratch *w, const lr_sample_ctx *ctx, lr_error *err);
/* Makes all tokens with a finite logit >= threshold the candidates, sorted. */
void lr_stage_narrow(lr_logits *l, lr_scratch *w, float threshold);

#endif
