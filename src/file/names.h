/* names.h - what both readers of model files need for their tables: memory that lives as long as the file is open, and
 * an index from names to items that an attacker's choice of names cannot make slow.
 */
#ifndef LR_FILE_NAMES_H
#define LR_FILE_NAMES_H
#include "base/error.h"
#include <stddef.h>
#include <stdint.h>

/* A list of chunks; zero-initialised. Freed as a whole. */
typedef struct lr_keep {
    struct lr_keep_chunk *chunks;
} lr_keep;

/* n bytes, 16-byte aligned, not zeroed; NULL without memory. */
void *lr_keep_get(lr_keep *k, size_t n);
void lr_keep_deinit(lr_keep *k);

/* Sorted by (hash, name): a search compares a few names, whatever they are. */
typedef struct lr_name_slot {
    uint64_t hash;
    const char *name; /* borrowed */
    size_t i;         /* of the item that is so named */
} lr_name_slot;

/* Makes the index (lr_free it) of n zero-terminated names: name i is the const char * that lies i * stride bytes after
 * names. LR_EFORMAT if two are equal: "WHAT NAME appears twice". */
int lr_names_index(lr_name_slot **out, const char *const *names, size_t n, size_t stride, const char *what,
                   lr_error *err);
/* Item of that name, or -1. */
ptrdiff_t lr_names_find(const lr_name_slot *index, size_t n, const char *name);

/* Where the data of item i lie. */
typedef struct lr_span {
    uint64_t start, size;
    size_t i;
} lr_span;

/* Sorts by start, and the shorter first where two start together. */
void lr_spans_sort(lr_span *spans, size_t n);

#endif
