/* str.h - a borrowed run of bytes: pointer and length, no terminating zero promised, any bytes (zero included).
 *
 * Passed by value. Who owns the bytes, and for how long, is said where one is handed out.
 */
#ifndef LR_BASE_STR_H
#define LR_BASE_STR_H
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

typedef struct lr_str {
    const char *s; /* may be NULL when n is 0 */
    size_t n;
} lr_str;

/* A string literal, and a zero-terminated string, as lr_str. */
#define LR_STR(lit) ((lr_str){"" lit, sizeof(lit) - 1})
static inline lr_str lr_str_of(const char *z) { return (lr_str){z, strlen(z)}; }

static inline bool lr_str_eq(lr_str a, lr_str b) { return a.n == b.n && (a.n == 0 || memcmp(a.s, b.s, a.n) == 0); }
static inline bool lr_str_is(lr_str a, const char *z) { return lr_str_eq(a, lr_str_of(z)); }

#endif
