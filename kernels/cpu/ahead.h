/* ahead.h - asks memory for packed weights before a product of few rows reads them.
 *
 * One row is read in two places at once, half of the strips that the product was asked for each, as memory then gives
 * more; more rows in one. A cursor of each place runs some KB before the block at hand, over its strips, then over
 * those that the caller says come next (lr_gemm_w.then). It asks for all parts of a block, however far apart they lie,
 * into the second-level cache. So nothing is asked for that is not read, and a product begins with what the one before
 * has brought.
 */
#ifndef LR_KERNELS_CPU_AHEAD_H
#define LR_KERNELS_CPU_AHEAD_H
#include "cpu/gemm.h"

enum { LR_AHEAD = 8192, LR_AHEAD_HALF = 4096 }; /* bytes; of each of two places */

typedef struct lr_ahead {
    lr_strip at;   /* q = NULL: nothing is left to be asked for */
    int b, b1;     /* block of that strip, end of the span */
    int span;      /* blocks of all strips that are read before those behind them */
    int s, s0, s1; /* strip, first, end */
    int place;     /* 0, 1, or LR_AHEAD_ALL: the only one */
    bool own;      /* still in the strips that were asked for, whose form the caller knows */
    const lr_form *form;
    lr_parts parts;
    const lr_gemm_w *w;
} lr_ahead;

/* The first strip of the second place. An odd number leaves that one a strip more. */
static inline int lr_ahead_half(int s0, int s1) { return s0 + (s1 - s0) / 2; }

enum { LR_AHEAD_ALL = -1 };
/* The cursor of a place of strips s0..s1-1, which are read `span` blocks at a time (0: whole). */
void lr_ahead_begin(lr_ahead *a, const lr_gemm_w *w, int s0, int s1, int place, int span);
/* To the next strip; the next span; to the strips that come next; to nothing. */
void lr_ahead_strip(lr_ahead *a);

/* Bytes of a block of a strip, with its share of the scales, rounded down. */
static inline size_t lr_form_bytes(const lr_form f)
{
    const size_t values = (size_t)(f.main + f.extra) * 64, scale = f.e8m0 ? 16 : f.min ? 64 : 32;
    const size_t sub = f.super ? (size_t)(32 / f.sub) * 16 + (f.min && f.sub == 32 ? 16 : 0) : 0;
    return values + sub + scale / (f.super ? 8 : 1);
}

#define LR_ASK(p) __builtin_prefetch(p, 0, 2)

/* Every line of the block's values, and lines of scales that begin with it. */
static inline __attribute__((always_inline)) void lr_ask_block(const lr_form f, const lr_strip *s, size_t b)
{
    for (int i = 0; i < f.main; i++) LR_ASK(s->q + (b * (size_t)f.main + (size_t)i) * 64);
    for (int i = 0; i < f.extra; i++) LR_ASK(s->h + (b * (size_t)f.extra + (size_t)i) * 64);
    if (f.super) {
        const size_t sc = (size_t)(32 / f.sub) * 16;
        if (b % (64 / sc) == 0) {
            LR_ASK(s->sc + b * sc);
            if (f.min && f.sub == 32) LR_ASK(s->sm + b * sc);
        }
        if (b % 16 == 0) {
            LR_ASK(s->d + b * 4);
            if (f.min) LR_ASK(s->m + b * 4);
        }
    } else {
        const size_t d = f.e8m0 ? 16 : 32;
        if (b % (64 / d) == 0) {
            LR_ASK(s->d + b * d);
            if (f.min) LR_ASK(s->m + b * d);
        }
    }
}

void lr_ask_any(const lr_ahead *a);

/* Once a block of the product; f: the form of the product's weights. */
static inline __attribute__((always_inline)) void lr_ahead_step(const lr_form f, lr_ahead *a)
{
    if (a->own)
        lr_ask_block(f, &a->at, (size_t)a->b);
    else if (a->at.q)
        lr_ask_any(a);
    else
        return;
    if (++a->b == a->b1) lr_ahead_strip(a);
}

#endif
