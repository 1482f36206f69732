/* clock.h - the clocks by which things are timed. */
#ifndef LR_BASE_CLOCK_H
#define LR_BASE_CLOCK_H
#include <stdint.h>
#include <time.h>

/* Nanoseconds; 0 if there is no such clock. Safe in signal handlers. */
static inline int64_t lr_clock_ns(clockid_t id)
{
    struct timespec t;
    if (clock_gettime(id, &t) != 0) return 0;
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Seconds, monotonic. */
static inline double lr_now(void) { return 1e-9 * (double)lr_clock_ns(CLOCK_MONOTONIC); }

#endif
