/* encode_int.h - what the writers of blocks and of super-blocks share. */
#ifndef LR_BASE_ENCODE_INT_H
#define LR_BASE_ENCODE_INT_H
#include "base/dtype.h"
#include <stdbool.h>

/* The 16 values of IQ4_NL and IQ4_XS. */
extern const signed char lr_iq4_values[16];

void lr_put_u16(uint8_t *p, uint16_t v);
/* v as a half at p, and what it became; false if that isn't finite. */
bool lr_put_half(uint8_t *p, float v, float *rounded);

float lr_mean_square(int n, const float *x);
/* What an error of each of n values costs: w. mean_square is that of the block the values belong to. */
void lr_encode_weights(int n, const float *x, const float *importance, float mean_square, float *w);

/* One super-block of 256 values. */
bool lr_encode_super(int t, const float *x, const float *importance, uint8_t *p);

#endif
