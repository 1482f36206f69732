/* pool.h - the compute pool: a fixed set of threads that run one function together.
 *
 * The caller takes part as thread 0. Inside the function threads meet at lr_pool_barrier. A waiting thread spins
 * briefly (tens of microseconds), then sleeps in the kernel, so an idle program takes no CPU and a busy neighbour does
 * not stall the pool for a whole time slice of spinning. One caller at a time.
 */
#ifndef LR_BASE_POOL_H
#define LR_BASE_POOL_H
#include "base/error.h"

typedef struct lr_pool lr_pool;
typedef void (*lr_pool_fn)(void *arg, int thread, int n_threads);

/* threads: 1..256, or 0 = the cores this process may use (affinity mask and cgroup quota). */
int lr_pool_new(lr_pool **out, int threads, lr_error *err);
void lr_pool_free(lr_pool *);
int lr_pool_threads(const lr_pool *);
/* Runs fn(arg, t, n) on all threads; returns when all have returned. */
void lr_pool_run(lr_pool *, lr_pool_fn fn, void *arg);
/* Inside fn: returns when every thread of the pool has called it. */
void lr_pool_barrier(lr_pool *);
/* Cores that this process may use, at least 1. */
int lr_pool_cores(void);

#endif
