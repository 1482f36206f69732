/* sampler_int.h - inside src/sample: what a sampler is made of. */
#ifndef LR_SAMPLE_SAMPLER_INT_H
#define LR_SAMPLE_SAMPLER_INT_H
#include "sample/sample_int.h"

struct lr_sampler {
    lr_stage *stages;
    lr_stage_state *state; /* (n_stages) */
    int n_stages, n_vocab;
    uint64_t seed, generation;
};

/* The calling thread's. */
lr_scratch *lr_sampler__scratch(void);

#endif
