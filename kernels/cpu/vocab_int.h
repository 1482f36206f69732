/* vocab_int.h - keys that order (value, index) pairs: larger value first, then lower index; shared by the vocab
 * kernels.
 */
#ifndef LR_KERNELS_CPU_VOCAB_INT_H
#define LR_KERNELS_CPU_VOCAB_INT_H
#include "cpu/cpu.h"
#include "cpu/fill.h"
#include <math.h>
#include <string.h>

/* A float's order as an unsigned number: NaN lowest (as -inf), -0 equal to +0. */
static inline uint32_t lr_vocab_order(float x)
{
    uint32_t u;
    if (x != x) x = -INFINITY;
    x += 0.0f;
    memcpy(&u, &x, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

static inline uint64_t lr_vocab_key(float x, int32_t id) { return (uint64_t)lr_vocab_order(x) << 32 | (uint32_t)~id; }
static inline int32_t lr_vocab_id(uint64_t key) { return (int32_t) ~(uint32_t)key; }

/* Puts the k largest of n keys first, in no order. k <= n. */
void lr_vocab_select(uint64_t *keys, int n, int k);
/* Sorts n keys in descending order. */
void lr_vocab_sort(uint64_t *keys, int n);
/* ids and values of the first k keys of an x; a NaN's value is given as -inf. */
void lr_vocab_unpack(const uint64_t *keys, int k, const float *x, int32_t *ids, float *vals);

#endif
