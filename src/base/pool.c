/* pool.c - see pool.h
 *
 * One word carries the phase: how many tasks it has, how many were taken, how many are done. A thread takes a task,
 * and says that one is done, by one compare-and-swap; who completes the last task asks for the next phase and opens it.
 * So nothing waits for a thread that holds no task: one that is not running, because something else has its core,
 * misses phases and finds the word as it is when it comes back. An idle thread spins on the word, then sleeps in
 * futex(2); who opens a phase wakes only those who said that they sleep.
 *
 * A thread that shares its core loses it at a clock tick, in the middle of a task that the others then wait for. So
 * threads give way by themselves between two tasks, a little before a tick: if nobody waits for the core that costs
 * nothing.
 */
#define _GNU_SOURCE
#include "base/pool.h"
#include "base/clock.h"
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
#include <unistd.h>

enum { SPIN_NS = 60000, MAX_THREADS = 256, BITS = 20, MOST = (1 << BITS) - 1, LEAST_STACK = 1 << 20 };

/* the word: tasks of the phase, tasks taken, tasks done; whether only the caller may take them */
#define N_OF(w)     ((int)((w)&MOST))
#define TAKEN_OF(w) ((int)((w) >> BITS & MOST))
#define DONE_OF(w)  ((int)((w) >> 2 * BITS & MOST))
#define TAKE        ((uint64_t)1 << BITS)
#define DONE        ((uint64_t)1 << 2 * BITS)
#define CALLERS     ((uint64_t)1 << 3 * BITS)

/* where threads sleep */
typedef struct bed {
    _Alignas(64) atomic_uint gen;
    atomic_int sleepers;
} bed;

struct lr_pool {
    _Alignas(64) _Atomic uint64_t word; /* N = 0: between runs */
    bed caller, others;
    /* of the run; written before the word, read by those who took a task */
    _Alignas(64) lr_pool_work work;
    int base, rest; /* of a phase of more than MOST tasks: done before this part, left behind it */
    bool callers_only;
    atomic_bool stop;
    int n, n_started;
    int64_t tick_ns; /* of the system's clock, 0 = unknown */
    pthread_t threads[MAX_THREADS];
    struct worker {
        _Alignas(64) struct lr_pool *pool;
        int id;
        int64_t yielded;               /* time */
        const char *ahead, *ahead_end; /* to be asked for while it waits; its own */
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

static bool may_take(uint64_t w, int thread) { return TAKEN_OF(w) < N_OF(w) && (thread == 0 || !(w & CALLERS)); }

static bool has_reason(lr_pool *p, uint64_t w, int thread)
{
    return may_take(w, thread) || (thread == 0 ? N_OF(w) == 0 : atomic_load(&p->stop));
}

static void wake(bed *b)
{
    if (atomic_load(&b->sleepers) == 0 || atomic_exchange(&b->sleepers, 0) == 0) return;
    atomic_fetch_add(&b->gen, 1);
    syscall(SYS_futex, &b->gen, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void ask_some(struct worker *w)
{
    for (int i = 0; i < 8 && w->ahead < w->ahead_end; i++, w->ahead += 64) __builtin_prefetch(w->ahead, 0, 2);
}

/* Waits until there is a task for the thread, or the run's end (thread 0) or the pool's (others). */
static void wait_for_work(lr_pool *p, int thread)
{
    bed *b = thread == 0 ? &p->caller : &p->others;
    struct worker *me = &p->workers[thread];
    for (int64_t end = 0;;) {
        for (int i = 0; i < 64; i++) {
            if (has_reason(p, atomic_load_explicit(&p->word, memory_order_relaxed), thread)) return;
            if (me->ahead < me->ahead_end)
                ask_some(me);
            else
                relax();
        }
        int64_t t = lr_clock_ns(CLOCK_MONOTONIC);
        if (!end) end = t + SPIN_NS;
        if (t > end) break;
    }
    for (;;) {
        unsigned gen = atomic_load(&b->gen);
        atomic_fetch_add(&b->sleepers, 1);
        if (has_reason(p, atomic_load(&p->word), thread)) return; /* who opens the next phase wakes nobody, once */
        syscall(SYS_futex, &b->gen, FUTEX_WAIT_PRIVATE, gen, NULL, NULL, 0);
        if (has_reason(p, atomic_load(&p->word), thread)) return;
    }
}

/* Opens the next part of a phase, or the next phase, or ends the run. Called by one thread, no task being out. */
static void open_next(lr_pool *p)
{
    if (p->rest > 0) {
        p->base += MOST;
    } else {
        lr_pool_phase f = p->work.next(p->work.arg);
        p->base = 0;
        p->rest = f.n;
        p->callers_only = f.caller;
    }
    int n = p->rest < MOST ? p->rest : MOST;
    p->rest -= n;
    const bool caller = p->callers_only;
    atomic_store(&p->word, (uint64_t)n | (caller ? CALLERS : 0));
    if (n != 1 || caller) wake(&p->caller);
    if (n > 1 && !caller) wake(&p->others);
}

/* Whether the next clock tick is near, for the first time since the last one. */
static bool tick_is_near(lr_pool *p, int64_t *last)
{
    if (!p->tick_ns) return false;
    const int64_t now = lr_clock_ns(CLOCK_MONOTONIC), next = lr_clock_ns(CLOCK_MONOTONIC_COARSE) + p->tick_ns;
    if (next - now > p->tick_ns / 8 || now - *last < p->tick_ns / 2) return false;
    *last = now;
    return true;
}

/* Does tasks as long as there are any. */
static void do_tasks(lr_pool *p, int thread)
{
    struct worker *me = &p->workers[thread];
    uint64_t w = atomic_load_explicit(&p->word, memory_order_relaxed);
    for (bool have = false, yield = false;;) {
        const bool take = may_take(w, thread) && !yield;
        if (!have && !take) return;
        const uint64_t next = w + (have ? DONE : 0) + (take ? TAKE : 0);
        if (!atomic_compare_exchange_weak_explicit(&p->word, &w, next, memory_order_acq_rel, memory_order_relaxed))
            continue;
        if (take) {
            p->work.task(p->work.arg, p->base + TAKEN_OF(w), thread);
            have = true;
            yield = tick_is_near(p, &me->yielded);
        } else {
            if (DONE_OF(next) == N_OF(next)) open_next(p);
            if (yield) sched_yield();
            have = yield = false;
        }
        w = atomic_load_explicit(&p->word, memory_order_relaxed);
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    lr_pool *p = w->pool;
    for (;;) {
        wait_for_work(p, w->id);
        if (atomic_load(&p->stop)) return NULL;
        do_tasks(p, w->id);
    }
}

/* The caller's part of a run that is open. */
static void finish(lr_pool *p)
{
    while (N_OF(atomic_load_explicit(&p->word, memory_order_acquire)) != 0) {
        do_tasks(p, 0);
        wait_for_work(p, 0);
    }
}

void lr_pool_walk(lr_pool *p, const lr_pool_work *work)
{
    if (p->n == 1) {
        for (lr_pool_phase f; (f = work->next(work->arg)).n > 0;)
            for (int t = 0; t < f.n; t++) work->task(work->arg, t, 0);
        return;
    }
    p->work = *work;
    p->rest = 0;
    open_next(p);
    finish(p);
}

void lr_pool_ahead(lr_pool *p, int thread, const void *at, size_t n)
{
    p->workers[thread].ahead = at;
    p->workers[thread].ahead_end = (const char *)at + n;
}

typedef struct run_all {
    lr_pool_fn fn;
    void *arg;
    int n;
    bool begun;
} run_all;

static lr_pool_phase run_next(void *arg)
{
    run_all *r = arg;
    const int n = r->begun ? 0 : r->n - 1;
    r->begun = true;
    return (lr_pool_phase){n, false};
}

static void run_task(void *arg, int task, int thread)
{
    (void)task;
    const run_all *r = arg;
    r->fn(r->arg, thread, r->n);
}

void lr_pool_run(lr_pool *p, lr_pool_fn fn, void *arg)
{
    run_all r = {fn, arg, p->n, false};
    p->work = (lr_pool_work){run_next, run_task, &r};
    p->rest = 0;
    if (p->n > 1) {
        open_next(p);
        wake(&p->others);
    }
    fn(arg, 0, p->n);
    if (p->n > 1) finish(p);
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

/* A thread gets what the limit of the main thread's stack is (ulimit -s), unless that is too little for kernels. */
static int start(pthread_t *thread, struct worker *w)
{
    pthread_attr_t at;
    size_t size = 0;
    int rc = pthread_attr_init(&at);
    if (rc) return rc;
    if (pthread_attr_getstacksize(&at, &size) != 0 || size < LEAST_STACK)
        rc = pthread_attr_setstacksize(&at, LEAST_STACK);
    if (!rc) rc = pthread_create(thread, &at, worker_main, w);
    pthread_attr_destroy(&at);
    return rc;
}

int lr_pool_new(lr_pool **out, int threads, lr_error *err)
{
    if (threads < 0 || threads > MAX_THREADS)
        return lr_fail(err, LR_EINVAL, "threads = %d is not in 0..%d", threads, MAX_THREADS);
    lr_pool *p = lr_alloc_aligned(sizeof *p);
    if (!p) return lr_fail(err, LR_ENOMEM, "no memory for the thread pool");
    memset(p, 0, sizeof *p);
    p->n = threads ? threads : lr_pool_cores();
    struct timespec tick;
    if (clock_getres(CLOCK_MONOTONIC_COARSE, &tick) == 0 && tick.tv_sec == 0) p->tick_ns = tick.tv_nsec;
    sigset_t all, old; /* signals go to the thread that owns the program, never to a worker */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = 0;
    for (int i = 1; i < p->n && rc == 0; i++) {
        p->workers[i] = (struct worker){p, i, 0, NULL, NULL};
        rc = start(&p->threads[i], &p->workers[i]);
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
    atomic_store(&p->stop, true);
    wake(&p->others);
    for (int i = 1; i <= p->n_started; i++) pthread_join(p->threads[i], NULL);
    lr_free_aligned(p);
}

int lr_pool_threads(const lr_pool *p) { return p->n; }
