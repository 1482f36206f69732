/* mem.c - see mem.h */
#define _GNU_SOURCE
#include "base/mem.h"
#include <malloc.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20, HUGE_FROM = 2 * HUGE_PAGE };

static atomic_uint_fast64_t n_allocs;
static atomic_int_fast64_t fail_at; /* counts down to 1 */

static bool refuse(void)
{
    atomic_fetch_add_explicit(&n_allocs, 1, memory_order_relaxed);
    if (atomic_load_explicit(&fail_at, memory_order_relaxed) == 0) return false;
    return atomic_fetch_sub_explicit(&fail_at, 1, memory_order_relaxed) == 1;
}

void *lr_malloc(size_t n) { return refuse() ? NULL : malloc(n ? n : 1); }

void *lr_calloc(size_t count, size_t size) { return refuse() ? NULL : calloc(count ? count : 1, size ? size : 1); }

void *lr_realloc(void *p, size_t n) { return refuse() ? NULL : realloc(p, n ? n : 1); }

void *lr_reallocarray(void *p, size_t count, size_t size)
{
    size_t n;
    return lr_mul(count, size, &n) ? lr_realloc(p, n) : NULL;
}

char *lr_strdup(const char *s) { return lr_memdup(s, strlen(s)); }

void *lr_memdup(const void *s, size_t n)
{
    size_t total;
    char *p = lr_add(n, 1, &total) ? lr_malloc(total) : NULL;
    if (!p) return NULL;
    if (n) memcpy(p, s, n);
    p[n] = 0;
    return p;
}

void lr_free(void *p) { free(p); }

void *lr_alloc_aligned(size_t n)
{
    size_t total;
    if (refuse() || !lr_add(n, 63, &total)) return NULL;
    total &= ~(size_t)63;
    if (total < HUGE_FROM) return aligned_alloc(64, total ? total : 64);
    /* large blocks lie in huge pages where the system has them: weights are read from end to end at every token */
    size_t huge;
    if (!lr_add(total, HUGE_PAGE - 1, &huge)) return NULL;
    void *p = aligned_alloc(HUGE_PAGE, huge & ~(size_t)(HUGE_PAGE - 1));
    if (p) madvise(p, total & ~(size_t)(HUGE_PAGE - 1), MADV_HUGEPAGE);
    return p;
}

void lr_free_aligned(void *p) { free(p); }

uint64_t lr_mem_allocs(void) { return atomic_load(&n_allocs); }

int64_t lr_mem_fail_at(int64_t n) { return atomic_exchange(&fail_at, n); }

void lr_mem_trim(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

static double read_number(const char *path, const char *key)
{
    char line[128];
    double v = INFINITY;
    size_t n = strlen(key);
    FILE *f = fopen(path, "r");
    if (!f) return v;
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, key, n) == 0 && sscanf(line + n, "%lf", &v) == 1) break;
    }
    fclose(f);
    return v;
}

double lr_mem_available(void)
{
    double all = read_number("/proc/meminfo", "MemAvailable:") * 1024;
    double group = read_number("/sys/fs/cgroup/memory.max", "") - read_number("/sys/fs/cgroup/memory.current", "");
    if (group >= 0 && group < all) all = group;
    return isfinite(all) ? all : 4e9;
}
