/* clock_shim.c - preloaded into a program, makes the wall clock jump at every look: hours forward, then days back, and
 * on the whole backwards. Clocks that only go forward are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/time.h>
#include <time.h>

static time_t jump(time_t t)
{
    static atomic_long looks;
    long n = atomic_fetch_add(&looks, 1);
    return t - n * 600 + (n % 3 == 0 ? 36000 : n % 3 == 1 ? -200000 : 0);
}

int clock_gettime(clockid_t clock, struct timespec *t)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(clock, t);
    if (rc == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec = jump(t->tv_sec);
    return rc;
}

time_t time(time_t *out)
{
    struct timespec t = {0, 0};
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone)
{
    struct timespec t = {0, 0};
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &t);
    tv->tv_sec = t.tv_sec;
    tv->tv_usec = (suseconds_t)(t.tv_nsec / 1000);
    return 0;
}
