/* test_pool.c - the compute pool: each task of each phase once, phases in order, what the caller alone may do, phases
 * of more tasks than a part holds, and a thread that is kept from its core. */
#define _GNU_SOURCE
#include "base/pool.h"
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { PHASES = 400, MOST = 37 };

typedef struct walk {
    int phase; /* plain: one phase's writes must be seen by the next */
    int n[PHASES];
    bool caller[PHASES];
    int done[PHASES][MOST]; /* plain: no task may be done by two */
    int sum;                /* of the phase before, made by next */
    int wrong;
    pthread_t owner;
    int sleep_us; /* task 0 of every 50th phase takes so long */
} walk;

static lr_pool_phase walk_next(void *arg)
{
    walk *w = arg;
    if (w->phase >= 0) {
        w->sum = 0;
        for (int i = 0; i < w->n[w->phase]; i++) w->sum += w->done[w->phase][i];
        if (w->sum != w->n[w->phase]) w->wrong++;
    }
    w->phase++;
    return w->phase < PHASES ? (lr_pool_phase){w->n[w->phase], w->caller[w->phase]} : (lr_pool_phase){0, false};
}

static void walk_task(void *arg, int task, int thread)
{
    walk *w = arg;
    if (task < 0 || task >= w->n[w->phase]) {
        w->wrong++;
        return;
    }
    if (w->caller[w->phase] && (thread != 0 || !pthread_equal(pthread_self(), w->owner))) w->wrong++;
    if (w->phase > 0 && w->sum != w->n[w->phase - 1]) w->wrong++;
    w->done[w->phase][task]++;
    if (w->sleep_us && w->phase % 50 == 0 && task == 0) usleep((unsigned)w->sleep_us);
}

static void check_walk(int threads, int rounds, int sleep_us)
{
    lr_error err;
    lr_pool *p;
    assert_int_equal(lr_pool_new(&p, threads, &err), 0);
    assert_int_equal(lr_pool_threads(p), threads);
    walk *w = malloc(sizeof *w);
    unsigned seed = (unsigned)threads;
    for (int round = 0; round < rounds; round++) {
        memset(w, 0, sizeof *w);
        w->phase = -1;
        w->owner = pthread_self();
        w->sleep_us = sleep_us;
        for (int i = 0; i < PHASES; i++) {
            seed = seed * 1103515245 + 12345;
            w->n[i] = seed >> 16 & 1 ? 1 : 1 + (int)(seed >> 17) % MOST;
            w->caller[i] = (seed >> 24) % 7 == 0;
        }
        lr_pool_walk(p, &(lr_pool_work){walk_next, walk_task, w});
        assert_int_equal(w->phase, PHASES);
        assert_int_equal(w->wrong, 0);
    }
    free(w);
    lr_pool_free(p);
}

static void test_walk(void **state)
{
    (void)state;
    check_walk(1, 3, 0);
    check_walk(2, 20, 0);
    check_walk(7, 5, 0); /* more than there are cores, perhaps */
    check_walk(3, 1, 2000);
}

enum { MANY = (1 << 20) + 5 };

typedef struct many {
    int left;
    atomic_uchar *seen;
} many;

static lr_pool_phase many_next(void *arg)
{
    many *m = arg;
    return (lr_pool_phase){m->left-- > 0 ? MANY : 0, false};
}

static void many_task(void *arg, int task, int thread)
{
    (void)thread;
    atomic_fetch_add_explicit(&((many *)arg)->seen[task], 1, memory_order_relaxed);
}

/* More tasks than the pool's word has room for. */
static void test_many(void **state)
{
    (void)state;
    lr_error err;
    lr_pool *p;
    many m = {2, calloc(MANY, 1)};
    assert_int_equal(lr_pool_new(&p, 2, &err), 0);
    lr_pool_walk(p, &(lr_pool_work){many_next, many_task, &m});
    for (int i = 0; i < MANY; i++) assert_int_equal(m.seen[i], 2);
    free(m.seen);
    lr_pool_free(p);
}

static void all(void *arg, int thread, int n)
{
    int *seen = arg;
    assert_int_equal(n, 3);
    seen[thread]++;
}

static void test_run(void **state)
{
    (void)state;
    lr_error err;
    lr_pool *p;
    int seen[3] = {0};
    assert_int_equal(lr_pool_new(&p, 3, &err), 0);
    for (int i = 0; i < 1000; i++) {
        if (i % 100 == 0) usleep(1000); /* the threads sleep by then */
        lr_pool_run(p, all, seen);
    }
    assert_true(seen[0] >= 1000);
    assert_int_equal(seen[0] + seen[1] + seen[2], 3000);
    lr_pool_free(p);
    assert_int_not_equal(lr_pool_new(&p, -1, &err), 0);
    assert_int_not_equal(lr_pool_new(&p, 257, &err), 0);
}

typedef struct stuck {
    int phase;
    atomic_int free_now, by_caller;
} stuck;

static lr_pool_phase stuck_next(void *arg)
{
    stuck *s = arg;
    return (lr_pool_phase){s->phase++ < 2000 ? 2 : 0, false};
}

static void stuck_task(void *arg, int task, int thread)
{
    (void)task;
    stuck *s = arg;
    atomic_fetch_add(&s->by_caller, thread == 0);
}

static int64_t cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* A pool of many threads on one core, most of which don't run at any time: nobody waits for them. */
static void test_one_core(void **state)
{
    (void)state;
    cpu_set_t old, one;
    lr_error err;
    lr_pool *p;
    assert_int_equal(sched_getaffinity(0, sizeof old, &old), 0);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &old)) {
            CPU_SET(i, &one);
            break;
        }
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(lr_pool_cores(), 1);
    assert_int_equal(lr_pool_new(&p, 8, &err), 0);
    stuck s = {0};
    int64_t t = cpu_us();
    lr_pool_walk(p, &(lr_pool_work){stuck_next, stuck_task, &s});
    t = cpu_us() - t;
    assert_true(t < 2000000); /* about 2 ms; a wait for each thread in each phase would take 2000 time slices */
    usleep(20000);
    t = cpu_us();
    usleep(100000);
    assert_true(cpu_us() - t < 20000); /* and it sleeps when there is nothing to do */
    lr_pool_free(p);
    assert_int_equal(sched_setaffinity(0, sizeof old, &old), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_walk),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_run),
        cmocka_unit_test(test_one_core),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
