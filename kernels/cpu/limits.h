/* limits.h - what this machine can do at best: the roof under which a model runs.
 *
 * Read bandwidth bounds decode: tokens/s <= bandwidth / bytes of weights and KV. Arithmetic bounds prefill and batches;
 * a multiply and its add count as two operations.
 */
#ifndef LR_KERNELS_CPU_LIMITS_H
#define LR_KERNELS_CPU_LIMITS_H
#include <stddef.h>

typedef struct lr_limit {
    const char *name; /* "read", "int8_amx", ... */
    const char *unit; /* "GB/s", "GOPS", "GFLOPS" */
    const char *isa;  /* "avx2", "avx512", "amx", "neon"; "" for read */
    double value;
} lr_limit;

/* Measures with so many threads: read bandwidth over a buffer of `bytes` (left out if it can't be had), then each kind
 * of arithmetic that the machine has, of one instruction set or, with isa NULL, of all. Each figure is the best of
 * three runs of about `seconds`, or of ten passes over the buffer. Returns how many, at most cap. */
int lr_limits(int threads, size_t bytes, double seconds, const char *isa, lr_limit *out, int cap);
/* Bytes of the largest cache that the first processor sees; 0: not known. */
size_t lr_last_cache(void);

#endif
