/* describe.h - samplers for devices that draw tokens by themselves: which chains they can have, as what. */
#ifndef LR_SAMPLE_DESCRIBE_H
#define LR_SAMPLE_DESCRIBE_H
#include "base/draw.h"
#include "sample/sample.h"

/* Edits of any number of draws; freed with lr_free(at). */
typedef struct lr_draw_edits {
    lr_draw_edit *at;
    size_t n, cap;
} lr_draw_edits;

/* Fills u and the stages of d for the next token, and adds its edits. False, and nothing added: the chain has other
 * stages than biases, bans, penalties, temperature, top-k, top-p and min-p, or one that changes single tokens behind
 * one that does not; it biases a token twice; or there is no memory. Engine thread only. */
bool lr_sampler_describe(const lr_sampler *, const lr_sample_ctx *, lr_draw *d, lr_draw_edits *);

#endif
