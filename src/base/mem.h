/* mem.h - checked allocation with a counter, and size arithmetic that cannot wrap.
 *
 * Everything the engine allocates goes through here, so that a test can ask how many allocations a decode step made
 * (none) and let the n-th one fail. Thread-safe. Sizes that come from files go through lr_mul / lr_add first.
 */
#ifndef LR_BASE_MEM_H
#define LR_BASE_MEM_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* malloc/calloc/realloc with the counter; NULL on failure (or when the test hook says so). n = 0 gives a valid block.
 */
void *lr_malloc(size_t n);
void *lr_calloc(size_t count, size_t size); /* count * size is checked */
void *lr_realloc(void *p, size_t n);        /* p stays valid on failure */
void *lr_reallocarray(void *p, size_t count, size_t size);
char *lr_strdup(const char *s);
void *lr_memdup(const void *s, size_t n); /* n bytes plus a terminating zero */
void lr_free(void *p);
/* 64-byte aligned, for kernels; free with lr_free_aligned. */
void *lr_alloc_aligned(size_t n);
void lr_free_aligned(void *p);

/* Number of calls to the allocating functions above since the start. */
uint64_t lr_mem_allocs(void);
/* Test hook: the n-th allocation from now fails (1 = the next); 0 = off. Returns what was left of the last n: 0 if that
 * allocation has failed. */
int64_t lr_mem_fail_at(int64_t n);

/* Gives the system back what is free in the heaps of all threads. Takes a millisecond or so. */
void lr_mem_trim(void);

/* Bytes that this process may still take: what the machine has available, less if its control group has less. */
double lr_mem_available(void);

/* *out = a * b or a + b; false if it wraps. */
static inline bool lr_mul(size_t a, size_t b, size_t *out) { return !__builtin_mul_overflow(a, b, out); }
static inline bool lr_add(size_t a, size_t b, size_t *out) { return !__builtin_add_overflow(a, b, out); }

#endif
