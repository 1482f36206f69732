/* pipe.h - what a tokenizer.json does to a text before its model cuts it into tokens: normalizers, then pre-tokenizers.
 *
 * A pipe is a list of steps. Normalizers change the text; pre-tokenizers cut it into words, and some change it too.
 * Steps do what those of the same name in github.com/huggingface/tokenizers do. Bytes that are not UTF-8 pass through
 * all steps as they are.
 *
 * Immutable; any thread. Regular expressions run in PCRE2 with a limit of memory and of work a match: a text that needs
 * more is refused (LR_ELIMIT), never let through wrongly cut.
 */
#ifndef LR_TEXT_PIPE_H
#define LR_TEXT_PIPE_H
#include "base/error.h"
#include "base/str.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum lr_step_kind {
    LR_STEP_NFC,           /* normal forms of Unicode */
    LR_STEP_NFD,           /**/
    LR_STEP_NFKC,          /**/
    LR_STEP_NFKD,          /**/
    LR_STEP_LOWER,         /* lower case, character by character */
    LR_STEP_STRIP,         /* white space at the left (a), at the right (b) */
    LR_STEP_STRIP_ACCENTS, /* combining marks */
    LR_STEP_REPLACE,       /* every match of `pattern` becomes `content` */
    LR_STEP_PREPEND,       /* `content` before a text that is not empty */
    LR_STEP_CHARSMAP,      /* SentencePiece's compiled rules in `content`: a trie and the texts it points to */
    LR_STEP_SPLIT,         /* cuts at matches of `pattern`, as `behavior` says; a: at what lies between them */
    LR_STEP_GPT2,          /* cuts as GPT-2 does; a: a space is put before words that begin with none */
    LR_STEP_METASPACE,     /* spaces become `content`, which is put first (`prepend`); a: cuts before each */
    LR_STEP_DIGITS,        /* cuts at runs of digits; a: at each */
    LR_STEP_PUNCTUATION,   /* cuts at punctuation, as `behavior` says */
    LR_STEP_SPACES,        /* cuts at white space and drops it */
} lr_step_kind;

/* What becomes of matches. */
typedef enum lr_split_behavior {
    LR_SPLIT_REMOVED,
    LR_SPLIT_ISOLATED,   /* words of their own */
    LR_SPLIT_PREVIOUS,   /* join the word before */
    LR_SPLIT_NEXT,       /* join the word behind */
    LR_SPLIT_CONTIGUOUS, /* neighbouring matches are one word */
} lr_split_behavior;

enum { LR_PREPEND_NEVER, LR_PREPEND_FIRST /* at the text's start */, LR_PREPEND_ALWAYS };

typedef struct lr_step_spec {
    lr_step_kind kind;
    bool regex;              /* pattern is a regular expression, not a text */
    lr_str pattern, content; /* borrowed for lr_pipe_new */
    lr_split_behavior behavior;
    int prepend;
    bool a, b;
} lr_step_spec;

#define LR_PIPE_STEPS 32

typedef struct lr_pipe lr_pipe;

/* LR_EUNSUPPORTED: an expression that PCRE2 does not take, or would read otherwise than Oniguruma; LR_EFORMAT: damaged
 * tables. */
int lr_pipe_new(lr_pipe **out, const lr_step_spec *steps, size_t n, lr_error *err);
void lr_pipe_free(lr_pipe *); /* NULL is allowed */

/* Puts s[0..n) through the steps and calls word(ctx, text, start, end) for each word in order, text being as the steps
 * left it; stops at the first result that is not 0. first: s is the beginning of the whole text. */
int lr_pipe_run(const lr_pipe *, const uint8_t *s, size_t n, bool first,
                int (*word)(void *ctx, const uint8_t *text, size_t start, size_t end), void *ctx, lr_error *err);

#endif
