/* pool.c - see pool.h
 *
 * Two words carry everything: `run_gen` grows when there is work, `bar_gen` when a barrier opens. A waiter spins on the
 * word, then sleeps on it with futex(2); who changes the word wakes only if `sleepers` says that somebody sleeps.
 * The end of a run is a barrier too.
 */
#define _GNU_SOURCE
#include "base/pool.h"
#include "base/mem.h"
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPIN_NS = 60000, MAX_THREADS = 256 };

typedef struct word {
    _Alignas(64) atomic_uint gen;
    atomic_int sleepers;
} word;

struct lr_pool {
    word run, bar;
    _Alignas(64) atomic_int arrived;
    int n;
    bool stop;
    lr_pool_fn fn;
    void *arg;
    int n_started;
    pthread_t threads[MAX_THREADS];
    struct worker {
        struct lr_pool *pool;
        int id;
    } workers[MAX_THREADS];
};

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void word_wait(word *w, unsigned old)
{
    for (int64_t end = 0;;) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&w->gen, memory_order_acquire) != old) return;
            relax();
        }
        int64_t t = now_ns();
        if (!end) end = t + SPIN_NS;
        if (t > end) break;
    }
    atomic_fetch_add(&w->sleepers, 1);
    while (atomic_load(&w->gen) == old) syscall(SYS_futex, &w->gen, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&w->sleepers, 1);
}

static void word_bump(word *w)
{
    atomic_fetch_add(&w->gen, 1);
    if (atomic_load(&w->sleepers) > 0) syscall(SYS_futex, &w->gen, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void lr_pool_barrier(lr_pool *p)
{
    if (p->n == 1) return;
    unsigned gen = atomic_load_explicit(&p->bar.gen, memory_order_acquire);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) + 1 == p->n) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        word_bump(&p->bar);
    } else {
        word_wait(&p->bar, gen);
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    lr_pool *p = w->pool;
    for (unsigned gen = 0;; gen++) {
        word_wait(&p->run, gen);
        if (p->stop) return NULL;
        p->fn(p->arg, w->id, p->n);
        lr_pool_barrier(p);
    }
}

void lr_pool_run(lr_pool *p, lr_pool_fn fn, void *arg)
{
    p->fn = fn;
    p->arg = arg;
    if (p->n > 1) word_bump(&p->run);
    fn(arg, 0, p->n);
    lr_pool_barrier(p);
}

/* cgroup v2 quota in whole cores, rounded up; 0 = none. */
static int cgroup_cores(void)
{
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (!f) return 0;
    long quota = 0, period = 0;
    int got = fscanf(f, "%ld %ld", &quota, &period);
    fclose(f);
    return got == 2 && quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}

int lr_pool_cores(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    int quota = cgroup_cores();
    if (quota > 0 && quota < n) n = quota;
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
}

int lr_pool_new(lr_pool **out, int threads, lr_error *err)
{
    if (threads < 0 || threads > MAX_THREADS)
        return lr_fail(err, LR_EINVAL, "threads = %d is not in 0..%d", threads, MAX_THREADS);
    lr_pool *p = lr_alloc_aligned(sizeof *p);
    if (!p) return lr_fail(err, LR_ENOMEM, "no memory for the thread pool");
    memset(p, 0, sizeof *p);
    p->n = threads ? threads : lr_pool_cores();
    sigset_t all, old; /* signals go to the thread that owns the program, never to a worker */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = 0;
    for (int i = 1; i < p->n && rc == 0; i++) {
        p->workers[i] = (struct worker){p, i};
        rc = pthread_create(&p->threads[i], NULL, worker_main, &p->workers[i]);
        if (rc == 0) p->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc) {
        lr_pool_free(p);
        return lr_fail(err, LR_ENOMEM, "cannot start %d threads: %s", threads, strerror(rc));
    }
    *out = p;
    return 0;
}

void lr_pool_free(lr_pool *p)
{
    if (!p) return;
    p->stop = true;
    word_bump(&p->run);
    for (int i = 1; i <= p->n_started; i++) pthread_join(p->threads[i], NULL);
    lr_free_aligned(p);
}

int lr_pool_threads(const lr_pool *p) { return p->n; }
