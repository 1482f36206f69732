/* stop.h - finds the first of many stop strings in a text that arrives in pieces.
 *
 * An Aho-Corasick automaton: the cost of a byte depends neither on the number of strings nor on how much text went
 * before. Text is given out as soon as no stop string can begin in it; what is held back is always the beginning of a
 * stop string, so a matcher's state is just a node of the automaton: a plain value, copied to fork, nothing to free.
 *
 * The match that ends first wins; of those that end at the same byte, the longest. The text before it is given out,
 * the stop string and everything after it is not.
 */
#ifndef LR_TEXT_STOP_H
#define LR_TEXT_STOP_H
#include "base/error.h"
#include "base/str.h"
#include <stdint.h>

#define LR_STOP_MAX_STRINGS 4096
#define LR_STOP_MAX_BYTES   ((size_t)1 << 20) /* of all strings together */

typedef struct lr_stopset lr_stopset; /* immutable, any thread, ref-counted */

/* n strings (0 is allowed: matches nothing), borrowed for the call. LR_EINVAL: an empty string; LR_ELIMIT: too many or
 * too long. */
int lr_stopset_new(lr_stopset **out, const lr_str *strings, size_t n, lr_error *err);
lr_stopset *lr_stopset_ref(lr_stopset *s);
void lr_stopset_unref(lr_stopset *s); /* NULL is allowed */

typedef struct lr_stop {
    const lr_stopset *set; /* borrowed; NULL: nothing ever matches */
    uint32_t node;
    int32_t hit; /* index of the string that was found, -1 none yet */
} lr_stop;

void lr_stop_init(lr_stop *st, const lr_stopset *set);
/* Takes n bytes; writes those that are now safe (held-back ones first) to out and returns how many; cap must be at
 * least lr_stop_held(st) + n. Once a stop string was found (st->hit >= 0) nothing more comes out. */
size_t lr_stop_push(lr_stop *st, const char *text, size_t n, char *out, size_t cap);
/* The end of the text: what was held back comes out. cap >= lr_stop_held(st). */
size_t lr_stop_flush(lr_stop *st, char *out, size_t cap);
/* Bytes held back now; the bound of it over all texts is lr_stopset_max_held. */
size_t lr_stop_held(const lr_stop *st);
size_t lr_stopset_max_held(const lr_stopset *s);

#endif
