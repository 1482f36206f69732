/* look.h - looking at a device before or beside running on it: what it can do at best, and which kernels it would take.
 * For people and benchmarks; nothing that runs a model needs it.
 */
#ifndef LR_BACKEND_LOOK_H
#define LR_BACKEND_LOOK_H
#include "backend/backend.h"

typedef struct lr_look_limit {
    const char *name; /* "read", "int8_amx", ... */
    const char *unit; /* "GB/s", "GOPS", "GFLOPS" */
    double value;
} lr_look_limit;

/* Name of the CPU's instruction set in use: that of `isa`, or the best for NULL (LLMRUN_ISA overrides); NULL if it is
 * unknown or not to be had here. */
const char *lr_look_isa(const char *isa);
/* Measures read bandwidth over `bytes` of memory and the arithmetic of one instruction set, in a few times `seconds`
 * each. Returns how many, at most cap. */
int lr_look_limits(int threads, size_t bytes, double seconds, const char *isa, lr_look_limit *out, int cap);
/* Bytes of the last-level cache; 0: not known. */
size_t lr_look_cache(void);
/* How a product of m rows with a weight of `type` and k values a row is done, in a few words. */
const char *lr_look_product(const char *isa, lr_compute compute, int type, int k, int m);

#endif
