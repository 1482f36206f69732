/* chars.h - sets of characters (code points), and how a character of a set is spelt in bytes. */
#ifndef LR_GRAMMAR_CHARS_H
#define LR_GRAMMAR_CHARS_H
#include "grammar/grammar.h"

#define LR_CHAR_MAX 0x10FFFFu

/* Ranges of code points, ascending and apart once lr_chars_fix was called. All zero is the empty set. */
typedef struct lr_chars {
    uint32_t (*r)[2];
    uint32_t n, cap;
} lr_chars;

/* False: no memory. */
bool lr_chars_add(lr_chars *, uint32_t lo, uint32_t hi);
bool lr_chars_add_all(lr_chars *, const lr_chars *other);
void lr_chars_fix(lr_chars *);                   /* sorts and joins */
bool lr_chars_negate(lr_chars *);                /* of a fixed set, surrogates left out; stays fixed */
bool lr_chars_fold(lr_chars *);                  /* adds the other case of ASCII letters; fixes */
bool lr_chars_has(const lr_chars *, uint32_t c); /* of a fixed set */
void lr_chars_free(lr_chars *);
size_t lr_char_put(uint32_t c, char out[4]); /* in UTF-8; the number of bytes */

#endif
