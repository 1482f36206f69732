/* ahead.c - see ahead.h */
#include "cpu/ahead.h"

static int less(int a, int b) { return a < b ? a : b; }

/* To the first strip, at block b. */
static void span_from(lr_ahead *a, int b)
{
    const int blocks = a->w->k / 32;
    a->b = b;
    a->b1 = a->span ? less(b + a->span, blocks) : blocks;
    a->s = a->s0;
    a->at = lr_strip_at(&a->parts, a->w, a->s);
}

static void over(lr_ahead *a, const lr_gemm_w *w, int s0, int s1)
{
    const int half = lr_ahead_half(s0, s1);
    a->w = w;
    a->form = lr_form_of(w->type);
    a->parts = lr_form_parts(a->form, w->k);
    a->s0 = a->place == 1 ? half : s0;
    a->s1 = a->place == 0 ? half : s1;
    span_from(a, 0);
    if (a->s == a->s1) a->at.q = NULL;
}

void lr_ahead_strip(lr_ahead *a)
{
    const lr_gemm_w *then = a->own ? a->w->then : NULL;
    if (++a->s < a->s1) {
        a->b = a->span ? (a->b1 - 1) / a->span * a->span : 0;
        a->at = lr_strip_at(&a->parts, a->w, a->s);
        return;
    }
    if (a->s0 < a->s1 && a->b1 < a->w->k / 32) {
        span_from(a, a->b1);
        return;
    }
    a->own = false;
    a->at.q = NULL;
    if (then) over(a, then, a->w->then_strip, a->w->then_end);
}

void lr_ahead_begin(lr_ahead *a, const lr_gemm_w *w, int s0, int s1, int place, int span, int bytes)
{
    int b = bytes / (int)lr_form_bytes(*lr_form_of(w->type));
    a->own = true;
    a->place = place;
    a->span = span;
    over(a, w, s0, s1);
    if (!a->at.q) lr_ahead_strip(a);
    while (a->at.q && b >= a->b1 - a->b) {
        b -= a->b1 - a->b;
        lr_ahead_strip(a);
    }
    a->b += b;
}

void lr_ask_any(const lr_ahead *a) { lr_ask_block(*a->form, &a->at, (size_t)a->b); }
