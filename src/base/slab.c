/* slab.c - see slab.h
 *
 * A piece is filled from its start; what does not fit any more opens the next one. Its memory is touched as blocks are
 * written, so a piece that is not full costs addresses, and at most one huge page.
 */
#define _GNU_SOURCE
#include "base/slab.h"
#include "base/mem.h"
#include <stdint.h>
#include <sys/mman.h>

enum { PIECE = 64 << 20, LEAST = 64 << 10, MOST = PIECE / 2, PAGE = 4096 };

struct lr_slab {
    lr_slab *next;
    char *base;
    size_t used;
    size_t blocks; /* alive */
};

static size_t rounded(size_t n) { return (n + 63) & ~(size_t)63; }

static int is_own(size_t n) { return n < LEAST || n > MOST; }

static lr_slab *slab_new(lr_slab *next)
{
    lr_slab *s = lr_malloc(sizeof *s);
    if (!s) return NULL;
    *s = (lr_slab){.next = next, .base = lr_alloc_aligned(PIECE)};
    if (s->base) return s;
    lr_free(s);
    return NULL;
}

void *lr_slab_alloc(lr_slab **slabs, size_t n)
{
    if (is_own(n)) return lr_alloc_aligned(n);
    lr_slab *s = *slabs;
    if (!s || PIECE - s->used < rounded(n)) {
        if (!(s = slab_new(s))) return NULL;
        *slabs = s;
    }
    char *p = s->base + s->used;
    s->used += rounded(n);
    s->blocks++;
    return p;
}

/* Gives pages that lie wholly in a freed block back to the system. */
static void drop_pages(char *p, size_t n)
{
    const uintptr_t from = ((uintptr_t)p + PAGE - 1) & ~(uintptr_t)(PAGE - 1);
    const uintptr_t to = ((uintptr_t)p + n) & ~(uintptr_t)(PAGE - 1);
    if (from < to) madvise(p + (from - (uintptr_t)p), to - from, MADV_DONTNEED);
}

void lr_slab_free(lr_slab **slabs, void *p, size_t n)
{
    if (!p) return;
    if (is_own(n)) {
        lr_free_aligned(p);
        return;
    }
    lr_slab **at = slabs;
    while ((uintptr_t)p - (uintptr_t)(*at)->base >= PIECE) at = &(*at)->next;
    lr_slab *s = *at;
    if (--s->blocks > 0) {
        drop_pages(p, n);
        return;
    }
    *at = s->next;
    lr_free_aligned(s->base);
    lr_free(s);
}
