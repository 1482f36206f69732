/* presplit.h - cuts a text into the words that byte-level BPE works on, by the rule that a model was trained with.
 *
 * A rule is named by a GGUF file's tokenizer.ggml.pre and is one stage or several: every stage cuts each piece that the
 * stage before it made. A stage looks for matches from left to right; a match is a piece, and so is what lies between
 * two matches (the "Isolated" behaviour of the tokenizers library). The published rules are regular expressions; the
 * stages here are their meaning written out, which takes linear time and no stack for every input. The expressions
 * stand next to the code, and the tests compare the two.
 */
#ifndef LR_TEXT_PRESPLIT_H
#define LR_TEXT_PRESPLIT_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A match of a stage at s[i]: returns true and its end (> i) in *end; or false and in *end (> i) the next place where a
 * match may begin. p: the stage's parameters. */
typedef struct lr_stage lr_stage;
typedef bool lr_stage_fn(const lr_stage *p, const uint8_t *s, size_t i, size_t n, size_t *end);

struct lr_stage {
    lr_stage_fn *match;
    unsigned flags;             /* of the stage's kind */
    int digits;                 /* most digits in a run, 0 = any number */
    const int32_t (*ranges)[2]; /* sorted character ranges, ended by {0, 0} */
};

#define LR_PRE_STAGES 6
typedef struct lr_pre {
    const char *names;             /* the values of tokenizer.ggml.pre, each with a space before and after */
    bool nfc;                      /* normal form C first */
    bool whole;                    /* a word that is a token is that token, whatever the merges ("ignore_merges") */
    bool bos;                      /* BOS first if the file does not say */
    lr_stage stage[LR_PRE_STAGES]; /* the first without a function ends the list */
} lr_pre;

/* NULL if the name is unknown. */
const lr_pre *lr_pre_find(const char *name);

/* Calls word(ctx, start, end) for each piece of s[0..n), in order, together all of it; stops at and returns the first
 * result that is not 0. */
int lr_presplit(const lr_pre *pre, const uint8_t *s, size_t n, int (*word)(void *ctx, size_t start, size_t end),
                void *ctx);

#endif
