/* pipe_int.h - normalizers of pipe.c, in normal.c. Each adds what it makes of s[0..n) to out. */
#ifndef LR_TEXT_PIPE_INT_H
#define LR_TEXT_PIPE_INT_H
#include "text/pipe.h"

typedef struct lr_bytes {
    uint8_t *p;
    size_t n, cap;
} lr_bytes;
int lr_bytes_add(lr_bytes *b, const void *s, size_t n, lr_error *err);

enum { LR_UC_NFC, LR_UC_NFD, LR_UC_NFKC, LR_UC_NFKD };
int lr_normal_form(unsigned form, const uint8_t *s, size_t n, lr_bytes *out, lr_error *err);
int lr_normal_lower(const uint8_t *s, size_t n, lr_bytes *out, lr_error *err);
int lr_normal_strip(const uint8_t *s, size_t n, bool left, bool right, lr_bytes *out, lr_error *err);
int lr_normal_unmark(const uint8_t *s, size_t n, lr_bytes *out, lr_error *err);

/* SentencePiece's compiled rules: a double-array trie of what is replaced, and the texts that replace it. Points into
 * the blob that it was made of. */
typedef struct lr_charsmap {
    const uint8_t *trie; /* units of 4 bytes */
    size_t units;
    const char *text;
    size_t text_n;
} lr_charsmap;
int lr_charsmap_init(lr_charsmap *m, lr_str blob, lr_error *err);
int lr_charsmap_run(const lr_charsmap *m, const uint8_t *s, size_t n, lr_bytes *out, lr_error *err);

#endif
