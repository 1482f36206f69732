/* ahead.h - asks memory for packed weights before a product of few rows reads them.
 *
 * One row is read in two places at once, half of the strips that the product was asked for each, as memory then gives
 * more; more rows in one, unless tiles take them. A cursor of each place runs some KB before the block at hand, over
 * its strips, then over those that the caller says come next (lr_gemm_w.then). It asks for all parts of a block,
 * however far apart they lie, into the second-level cache (one row, where there are tiles: the first), and lines of a
 * block one by one between its products, as memory gives less to bursts. So nothing is asked for that is not read, and
 * a product begins with what the one before has brought.
 */
#ifndef LR_KERNELS_CPU_AHEAD_H
#define LR_KERNELS_CPU_AHEAD_H
#include "cpu/gemm.h"

enum { LR_AHEAD = 8192, LR_AHEAD_NEAR = 4096 }; /* bytes of a place; of one of two where there are tiles */

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
/* The cursor of a place of strips s0..s1-1, which are read `span` blocks at a time (0: whole), `bytes` ahead. */
void lr_ahead_begin(lr_ahead *a, const lr_gemm_w *w, int s0, int s1, int place, int span, int bytes);
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

/* Lines of scales that begin with a block, or soon before. */
static inline __attribute__((always_inline)) void lr_ask_scales(const lr_form f, const lr_strip *s, size_t b)
{
    if (f.super) {
        const size_t sc = (size_t)(32 / f.sub) * 16, line = 64 / sc;
        if (b % line == 0) LR_ASK(s->sc + b * sc);
        if (f.min && f.sub == 32 && b % line == 2) LR_ASK(s->sm + (b - 2) * sc);
        if (b % 16 == 1) LR_ASK(s->d + (b - 1) * 4);
        if (f.min && b % 16 == 3) LR_ASK(s->m + (b - 3) * 4);
    } else {
        const size_t d = f.e8m0 ? 16 : 32, line = 64 / d;
        if (b % line == 0) LR_ASK(s->d + b * d);
        if (f.min && b % line == 1) LR_ASK(s->m + (b - 1) * d);
    }
}

/* Every line of the block's values, and of scales. */
static inline __attribute__((always_inline)) void lr_ask_block(const lr_form f, const lr_strip *s, size_t b)
{
    for (int i = 0; i < f.main; i++) LR_ASK(s->q + (b * (size_t)f.main + (size_t)i) * 64);
    for (int i = 0; i < f.extra; i++) LR_ASK(s->h + (b * (size_t)f.extra + (size_t)i) * 64);
    lr_ask_scales(f, s, b);
}

void lr_ask_any(const lr_ahead *a);

static inline __attribute__((always_inline)) void lr_ahead_next(lr_ahead *a)
{
    if (++a->b == a->b1) lr_ahead_strip(a);
}

/* Once a block of the product; f: the form of the product's weights. */
static inline __attribute__((always_inline)) void lr_ahead_step(const lr_form f, lr_ahead *a)
{
    if (a->own)
        lr_ask_block(f, &a->at, (size_t)a->b);
    else if (a->at.q)
        lr_ask_any(a);
    else
        return;
    lr_ahead_next(a);
}

/* A block whose values are asked for line by line, between the products of another. */
typedef struct lr_ask {
    const uint8_t *q, *h;
} lr_ask;

/* As lr_ahead_step, but the values of an own strip's block are left to lr_ask_group, groups 0 to 7: memory gives more
 * to requests that come one by one. Otherwise, and without a cursor (NULL), `near` stands for the block. */
static inline __attribute__((always_inline)) lr_ask lr_ahead_slow(const lr_form f, lr_ahead *a, const lr_strip *near)
{
    lr_ask o = {near->q, near->h};
    if (a && a->own) {
        o.q = a->at.q + (size_t)a->b * (size_t)f.main * 64;
        o.h = a->at.h + (size_t)a->b * (size_t)f.extra * 64;
        lr_ask_scales(f, &a->at, (size_t)a->b);
        lr_ahead_next(a);
    } else if (a) {
        lr_ahead_step(f, a);
    }
    return o;
}

/* l1: into the first-level cache. It pays for one row only, and not on every machine: see kernels/README.md. */
static inline __attribute__((always_inline)) void lr_ask_group(const lr_form f, const bool l1, const lr_ask *o, int g)
{
    const uint8_t *q = o->q + 64 * (g * f.main / 8), *h = o->h + 64 * (g / 4);
    if (f.main == 8 || (f.main == 4 && g % 2 == 0) || (f.main == 2 && g % 4 == 0))
        l1 ? __builtin_prefetch(q, 0, 3) : LR_ASK(q);
    if ((f.extra == 2 && g % 4 == 1) || (f.extra == 1 && g == 3)) l1 ? __builtin_prefetch(h, 0, 3) : LR_ASK(h);
}

#endif
