/* slab.h - blocks that lie side by side in large pieces of memory, for what is read from end to end again and again.
 *
 * A processor translates addresses page by page, and reads ahead within a page only: weights in pages of 4 KB are read
 * a third slower than in huge pages of 2 MB, which a block smaller than several of them can't have by itself. So blocks
 * share pieces of 64 MB that are given huge pages where the system has them. Small blocks, for which a piece would be a
 * waste, and very large ones, which need none, are allocated on their own. Not thread-safe.
 */
#ifndef LR_BASE_SLAB_H
#define LR_BASE_SLAB_H
#include <stddef.h>

typedef struct lr_slab lr_slab;

/* n bytes, 64-byte aligned, not cleared; NULL on failure. *slabs begins as NULL. */
void *lr_slab_alloc(lr_slab **slabs, size_t n);
/* Frees p (or NULL), which lr_slab_alloc gave for n bytes of the same slabs. A piece goes with its last block, its
 * pages before that with the blocks they belong to. */
void lr_slab_free(lr_slab **slabs, void *p, size_t n);

#endif
