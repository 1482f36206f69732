/* unicode.h - what splitting text into words needs to know of Unicode: decoding, character classes, normal form C.
 *
 * Text is any bytes. A byte that is no part of valid UTF-8 (overlong forms, surrogates and values over U+10FFFF are
 * not valid) counts as a character of its own, of no class, and passes through normalisation untouched.
 * Classes follow the Unicode data of utf8proc, brought up to Unicode 16 where that is older.
 */
#ifndef LR_TEXT_UNICODE_H
#define LR_TEXT_UNICODE_H
#include "base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The character at s[0..n), n >= 1 -> its length 1..4; *cp its number, or -1 for a byte that is not UTF-8 (length 1).
 */
size_t lr_utf8_get(const uint8_t *s, size_t n, int32_t *cp);
/* cp valid -> bytes written to out, 1..4 */
size_t lr_utf8_put(int32_t cp, uint8_t *out);
/* Whether the k >= 1 bytes at s are the beginning, but not all, of a valid character. */
bool lr_utf8_is_start(const uint8_t *s, size_t k);

/* Character classes, as bits: general categories, and \s (the property White_Space). */
enum lr_uc {
    LR_UC_LU = 1,
    LR_UC_LL = 2,
    LR_UC_LT = 4,
    LR_UC_LM = 8,
    LR_UC_LO = 16,
    LR_UC_M = 32,
    LR_UC_N = 64,  /* Nd, Nl, No */
    LR_UC_P = 128, /* all punctuation */
    LR_UC_S = 256, /* all symbols */
    LR_UC_WS = 512,
    LR_UC_L = LR_UC_LU | LR_UC_LL | LR_UC_LT | LR_UC_LM | LR_UC_LO,
};
extern const uint16_t lr_uc_ascii[128];
unsigned lr_uc_class_of(int32_t cp);
static inline unsigned lr_uc_class(int32_t cp) /* 0 for -1 */
{
    return cp >= 0 && cp < 128 ? lr_uc_ascii[cp] : lr_uc_class_of(cp);
}
bool lr_uc_is_han(int32_t cp); /* script Han */

/* Brings the valid parts of a text into normal form C. *out is lr_malloc'd, or NULL if the text already is in that
 * form (then use the text itself). Time n log n. */
int lr_uc_nfc(const uint8_t *s, size_t n, uint8_t **out, size_t *out_n, lr_error *err);

/* Sorts the combining marks of decomposed characters a[0..n), as the normal forms want them; tmp holds n. */
void lr_uc_order_marks(int32_t *a, size_t n, int32_t *tmp);

#endif
