/* pool.h - the compute pool: a fixed set of threads that do tasks together.
 *
 * The caller takes part as thread 0. Work comes in phases of tasks; a phase begins when all tasks of the one before are
 * done, and only a thread in the middle of a task is waited for: one that has lost its core to something else between
 * tasks just misses some. An idle thread spins briefly (tens of microseconds), then sleeps in the kernel, so an idle
 * program takes no CPU. One caller at a time.
 */
#ifndef LR_BASE_POOL_H
#define LR_BASE_POOL_H
#include "base/error.h"
#include <stdbool.h>
#include <stddef.h>

typedef struct lr_pool lr_pool;
typedef void (*lr_pool_fn)(void *arg, int thread, int n_threads);

/* n: tasks, 0 = the work is done. caller: only thread 0 may do them. */
typedef struct lr_pool_phase {
    int n;
    bool caller;
} lr_pool_phase;

/* next: the next phase; called by any thread, while no task is being done. task: does one of 0..n-1 of the phase;
 * thread: who does it. */
typedef struct lr_pool_work {
    lr_pool_phase (*next)(void *arg);
    void (*task)(void *arg, int task, int thread);
    void *arg;
} lr_pool_work;

/* threads: 1..256, or 0 = the cores this process may use (affinity mask and cgroup quota). */
int lr_pool_new(lr_pool **out, int threads, lr_error *err);
void lr_pool_free(lr_pool *);
int lr_pool_threads(const lr_pool *);
/* Does phase after phase; returns when next has given one of 0 tasks. */
void lr_pool_walk(lr_pool *, const lr_pool_work *);
/* For a thread in a task: n bytes from p are what it will read soon. While it waits for its next task, it asks memory
 * for them. */
void lr_pool_ahead(lr_pool *, int thread, const void *p, size_t n);
/* Calls fn(arg, thread, n) n times, n the number of threads: by the caller as thread 0, and by the others, at the same
 * time, if they are free; else some call it again. So fn takes what there is to do from a counter, until all is taken.
 */
void lr_pool_run(lr_pool *, lr_pool_fn fn, void *arg);
/* Cores that this process may use, at least 1. */
int lr_pool_cores(void);

#endif
