/* row.h - what can be asked of a row of logits, with the machine's best kernels. NaN is never chosen. */
#ifndef LR_SAMPLE_ROW_H
#define LR_SAMPLE_ROW_H
#include <stdint.h>

/* The place of the largest value, the lowest of equals; -1 if all are NaN. */
int lr_row_argmax(const float *x, int n);
/* How many peaks a row of n values has: the largest of each piece of it (lr_batch.peaks). */
int lr_row_pieces(int n);
/* -inf if there is nothing but NaN. */
float lr_row_max(const float *x, int n);
float lr_row_logsumexp(const float *x, int n);
/* The same of a row whose best and mass (base/mass.h) are known. */
double lr_row_log_of_mass(float best, uint64_t mass);
#define LR_ROW_TOPK 1024
/* The k (<= n, <= LR_ROW_TOPK) largest, best first, ties by lower place, NaN as -inf -> k. */
int lr_row_topk(const float *x, int n, int k, int32_t *ids, float *values);

#endif
