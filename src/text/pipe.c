/* pipe.c - see pipe.h
 *
 * The text in work is one buffer, its words are spans of it. A step that cuts replaces the spans; one that changes the
 * text writes a new buffer and new spans.
 */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/pipe.h"
#include "base/mem.h"
#include "text/pipe_int.h"
#include "text/presplit.h"
#include "text/unicode.h"
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#define HEAP_KB     (64u << 10) /* of a match */
#define MATCH_STEPS 5000000u    /* of a match */

typedef struct step {
    lr_step_spec s; /* pattern, content: owned */
    pcre2_code *re;
    lr_charsmap map;
} step;

struct lr_pipe {
    size_t n;
    step steps[LR_PIPE_STEPS];
};

typedef struct span {
    size_t from, to;
} span;

typedef struct work {
    lr_error *err;
    lr_bytes text;
    span *spans;
    size_t n, cap;
    span *next; /* spans that a step makes */
    size_t n_next, cap_next;
    bool first;
    pcre2_match_data *match;
    pcre2_match_context *limits;
} work;

static int no_memory(lr_error *err) { return lr_fail(err, LR_ENOMEM, "no memory to tokenize a text"); }

int lr_bytes_add(lr_bytes *b, const void *s, size_t n, lr_error *err)
{
    if (b->n + n > b->cap || !b->p) {
        size_t cap = b->cap * 2 + n + 64;
        uint8_t *p = lr_realloc(b->p, cap);
        if (!p) return no_memory(err);
        b->p = p;
        b->cap = cap;
    }
    if (n) memcpy(b->p + b->n, s, n);
    b->n += n;
    return 0;
}

static int add_span(work *w, size_t from, size_t to)
{
    if (from >= to) return 0;
    if (w->n_next == w->cap_next) {
        size_t cap = w->cap_next * 2 + 64;
        span *p = lr_reallocarray(w->next, cap, sizeof *p);
        if (!p) return no_memory(w->err);
        w->next = p;
        w->cap_next = cap;
    }
    w->next[w->n_next++] = (span){from, to};
    return 0;
}

static void take_next(work *w)
{
    span *p = w->spans;
    size_t cap = w->cap;
    w->spans = w->next, w->n = w->n_next, w->cap = w->cap_next;
    w->next = p, w->n_next = 0, w->cap_next = cap;
}

static void take_text(work *w, lr_bytes text)
{
    lr_free(w->text.p);
    w->text = text;
}

/* ---- matches ---- */

typedef enum found { NONE, MATCH, FAILED } found;

static size_t text_at(const uint8_t *s, size_t i, size_t n, lr_str what)
{
    if (what.n == 0) return n;
    const uint8_t *p = memmem(s + i, n - i, what.s, what.n);
    return p ? (size_t)(p - s) : n;
}

static bool is_digit(int32_t cp) { return lr_uc_class(cp) & LR_UC_N; }

static bool is_punctuation(int32_t cp)
{
    bool ascii =
        (cp >= '!' && cp <= '/') || (cp >= ':' && cp <= '@') || (cp >= '[' && cp <= '`') || (cp >= '{' && cp <= '~');
    return ascii || lr_uc_class(cp) & LR_UC_P;
}

/* The next single character of a class in s[i..n). */
static found next_char(bool (*is)(int32_t), const uint8_t *s, size_t i, size_t n, size_t *from, size_t *to)
{
    while (i < n) {
        int32_t cp;
        size_t k = lr_utf8_get(s + i, n - i, &cp);
        if (is(cp)) {
            *from = i;
            *to = i + k;
            return MATCH;
        }
        i += k;
    }
    return NONE;
}

static bool is_white(int32_t cp) { return lr_uc_class(cp) & LR_UC_WS; }

static found next_regex(work *w, const step *st, const uint8_t *s, size_t i, size_t n, size_t *from, size_t *to)
{
    while (i <= n) {
        int rc = pcre2_match(st->re, s, n, i, 0, w->match, w->limits);
        if (rc == PCRE2_ERROR_NOMATCH) return NONE;
        if (rc < 0) {
            char text[120] = "";
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)text, sizeof text);
            lr_fail(w->err, LR_ELIMIT, "splitting the text: %s", text);
            return FAILED;
        }
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(w->match);
        if (at[1] > at[0]) {
            *from = at[0];
            *to = at[1];
            return MATCH;
        }
        int32_t cp; /* an empty match cuts nothing */
        i = at[0] < n ? at[0] + lr_utf8_get(s + at[0], n - at[0], &cp) : n + 1;
    }
    return NONE;
}

static found next_match(work *w, const step *st, const uint8_t *s, size_t i, size_t n, size_t *from, size_t *to)
{
    switch (st->s.kind) {
    case LR_STEP_DIGITS:
        return next_char(is_digit, s, i, n, from, to);
    case LR_STEP_PUNCTUATION:
        return next_char(is_punctuation, s, i, n, from, to);
    case LR_STEP_SPACES:
        return next_char(is_white, s, i, n, from, to);
    default:
        break;
    }
    if (st->re) return next_regex(w, st, s, i, n, from, to);
    *from = text_at(s, i, n, st->s.pattern);
    *to = *from + st->s.pattern.n;
    return *from < n ? MATCH : NONE;
}

/* ---- cutting ---- */

/* Pieces of one word as they come: what lies between matches, and matches. */
typedef struct cutter {
    work *w;
    lr_split_behavior how;
    size_t from, to; /* a piece that may still grow */
    bool open, was_match;
} cutter;

static int flush(cutter *c)
{
    int rc = c->open ? add_span(c->w, c->from, c->to) : 0;
    c->open = false;
    return rc;
}

static int piece(cutter *c, size_t from, size_t to, bool match)
{
    bool join = false;
    int rc = 0;
    if (from == to) return 0;
    switch (c->how) {
    case LR_SPLIT_REMOVED:
        if (match) return flush(c);
        break;
    case LR_SPLIT_ISOLATED:
        break;
    case LR_SPLIT_PREVIOUS:
        join = match && c->open && !c->was_match;
        break;
    case LR_SPLIT_NEXT: /* a match waits for what follows; before another one it stands alone */
        join = !match && c->open && c->was_match;
        break;
    case LR_SPLIT_CONTIGUOUS:
        join = c->open && match == c->was_match;
        break;
    }
    if (!join) {
        rc = flush(c);
        c->from = from;
    }
    c->to = to;
    c->open = true;
    c->was_match = match;
    return rc;
}

static int cut_word(work *w, const step *st, lr_split_behavior how, span word)
{
    const uint8_t *s = w->text.p + word.from;
    size_t n = word.to - word.from, i = 0, from, to;
    cutter c = {.w = w, .how = how};
    while (i < n) {
        found f = next_match(w, st, s, i, n, &from, &to);
        if (f == FAILED) return w->err->code;
        if (f == NONE) from = to = n;
        if (piece(&c, word.from + i, word.from + from, st->s.kind == LR_STEP_SPLIT && st->s.a) ||
            piece(&c, word.from + from, word.from + to, !(st->s.kind == LR_STEP_SPLIT && st->s.a)))
            return w->err->code;
        i = to;
    }
    return flush(&c);
}

static int cut(work *w, const step *st)
{
    lr_split_behavior how = st->s.behavior;
    if (st->s.kind == LR_STEP_DIGITS) how = st->s.a ? LR_SPLIT_ISOLATED : LR_SPLIT_CONTIGUOUS;
    if (st->s.kind == LR_STEP_SPACES) how = LR_SPLIT_REMOVED;
    for (size_t i = 0; i < w->n; i++)
        if (cut_word(w, st, how, w->spans[i])) return w->err->code;
    take_next(w);
    return 0;
}

typedef struct gpt2_word {
    work *w;
    size_t at;
} gpt2_word;

static int gpt2_piece(void *ctx, size_t from, size_t to)
{
    gpt2_word *g = ctx;
    return add_span(g->w, g->at + from, g->at + to);
}

/* Writes all words anew, each changed by `edit`, as words of the same number. */
static int rewrite(work *w, const step *st, int (*edit)(work *, const step *, size_t, span, lr_bytes *))
{
    lr_bytes out = {0};
    int rc = lr_bytes_add(&out, NULL, 0, w->err);
    for (size_t i = 0; i < w->n && !rc; i++) {
        size_t from = out.n;
        rc = edit(w, st, i, w->spans[i], &out);
        if (!rc) rc = add_span(w, from, out.n);
    }
    if (rc) {
        lr_free(out.p);
        return rc;
    }
    take_text(w, out);
    take_next(w);
    return 0;
}

static int with_space(work *w, const step *st, size_t i, span word, lr_bytes *out)
{
    (void)st;
    (void)i;
    int rc = word.from < word.to && w->text.p[word.from] != ' ' ? lr_bytes_add(out, " ", 1, w->err) : 0;
    return rc ? rc : lr_bytes_add(out, w->text.p + word.from, word.to - word.from, w->err);
}

static int gpt2(work *w, const step *st)
{
    if (st->s.a && rewrite(w, st, with_space)) return w->err->code;
    for (size_t i = 0; i < w->n; i++) {
        gpt2_word g = {w, w->spans[i].from};
        if (lr_presplit(lr_pre_find("gpt-2"), w->text.p + g.at, w->spans[i].to - g.at, gpt2_piece, &g))
            return w->err->code;
    }
    take_next(w);
    return 0;
}

static int meta_word(work *w, const step *st, size_t i, span word, lr_bytes *out)
{
    lr_str mark = st->s.content;
    const uint8_t *s = w->text.p + word.from;
    size_t n = word.to - word.from;
    bool wants = st->s.prepend == LR_PREPEND_ALWAYS || (st->s.prepend == LR_PREPEND_FIRST && w->first && i == 0);
    bool has = n && (s[0] == ' ' || (n >= mark.n && memcmp(s, mark.s, mark.n) == 0));
    int rc = wants && !has ? lr_bytes_add(out, mark.s, mark.n, w->err) : 0;
    for (size_t k = 0; k < n && !rc;) {
        const uint8_t *space = memchr(s + k, ' ', n - k);
        size_t to = space ? (size_t)(space - s) : n;
        rc = lr_bytes_add(out, s + k, to - k, w->err);
        if (!rc && space) rc = lr_bytes_add(out, mark.s, mark.n, w->err);
        k = to + 1;
    }
    return rc;
}

static int metaspace(work *w, const step *st)
{
    if (rewrite(w, st, meta_word)) return w->err->code;
    if (!st->s.a) return 0;
    step at = {.s = {.kind = LR_STEP_SPLIT, .pattern = st->s.content, .behavior = LR_SPLIT_NEXT}};
    return cut(w, &at);
}

/* ---- normalizers ---- */

static int replace(work *w, const step *st, lr_bytes *out)
{
    const uint8_t *s = w->text.p;
    size_t n = w->text.n, i = 0, from, to;
    while (i < n) {
        found f = next_match(w, st, s, i, n, &from, &to);
        if (f == FAILED) return w->err->code;
        if (f == NONE) from = to = n;
        if (lr_bytes_add(out, s + i, from - i, w->err) ||
            (to > from && lr_bytes_add(out, st->s.content.s, st->s.content.n, w->err)))
            return w->err->code;
        i = to;
    }
    return 0;
}

static int normalize(work *w, const step *st)
{
    static const unsigned forms[] = {LR_UC_NFC, LR_UC_NFD, LR_UC_NFKC, LR_UC_NFKD};
    lr_bytes out = {0};
    const uint8_t *s = w->text.p;
    size_t n = w->text.n;
    int rc = lr_bytes_add(&out, NULL, 0, w->err);
    if (rc) return rc;
    switch (st->s.kind) {
    case LR_STEP_LOWER:
        rc = lr_normal_lower(s, n, &out, w->err);
        break;
    case LR_STEP_STRIP:
        rc = lr_normal_strip(s, n, st->s.a, st->s.b, &out, w->err);
        break;
    case LR_STEP_STRIP_ACCENTS:
        rc = lr_normal_unmark(s, n, &out, w->err);
        break;
    case LR_STEP_REPLACE:
        rc = replace(w, st, &out);
        break;
    case LR_STEP_PREPEND:
        if (n) rc = lr_bytes_add(&out, st->s.content.s, st->s.content.n, w->err);
        if (!rc) rc = lr_bytes_add(&out, s, n, w->err);
        break;
    case LR_STEP_CHARSMAP:
        rc = lr_charsmap_run(&st->map, s, n, &out, w->err);
        break;
    default:
        rc = lr_normal_form(forms[st->s.kind - LR_STEP_NFC], s, n, &out, w->err);
    }
    if (rc) {
        lr_free(out.p);
        return rc;
    }
    take_text(w, out);
    return 0;
}

/* ---- running ---- */

static int run_steps(work *w, const lr_pipe *p)
{
    size_t i = 0;
    for (; i < p->n && p->steps[i].s.kind < LR_STEP_SPLIT; i++)
        if (normalize(w, &p->steps[i])) return w->err->code;
    if (add_span(w, 0, w->text.n)) return w->err->code;
    take_next(w);
    for (; i < p->n; i++) {
        const step *st = &p->steps[i];
        if ((st->s.kind == LR_STEP_GPT2 ? gpt2 : st->s.kind == LR_STEP_METASPACE ? metaspace : cut)(w, st))
            return w->err->code;
    }
    return 0;
}

int lr_pipe_run(const lr_pipe *p, const uint8_t *s, size_t n, bool first,
                int (*word)(void *ctx, const uint8_t *text, size_t start, size_t end), void *ctx, lr_error *err)
{
    work w = {.err = err, .first = first};
    int rc = lr_bytes_add(&w.text, s, n, err);
    w.match = pcre2_match_data_create(1, NULL);
    w.limits = pcre2_match_context_create(NULL);
    if (!rc && (!w.match || !w.limits)) rc = no_memory(err);
    if (!rc) {
        pcre2_set_heap_limit(w.limits, HEAP_KB);
        pcre2_set_match_limit(w.limits, MATCH_STEPS);
        rc = run_steps(&w, p);
    }
    for (size_t i = 0; i < w.n && !rc; i++) rc = word(ctx, w.text.p, w.spans[i].from, w.spans[i].to);
    pcre2_match_data_free(w.match);
    pcre2_match_context_free(w.limits);
    lr_free(w.text.p);
    lr_free(w.spans);
    lr_free(w.next);
    return rc;
}

/* ---- building ---- */

static int copy_str(lr_str *s, lr_error *err)
{
    char *p = lr_memdup(s->s ? s->s : "", s->n);
    if (!p) {
        *s = (lr_str){NULL, 0};
        return no_memory(err);
    }
    s->s = p;
    return 0;
}

static int compile(step *st, lr_error *err)
{
    int code;
    PCRE2_SIZE at;
    lr_str p = st->s.pattern;
    if (memmem(p.s, p.n, "&&", 2))
        return lr_fail(err, LR_EUNSUPPORTED, "the expression \"%.*s\" has an intersection of classes",
                       (int)(p.n < 80 ? p.n : 80), p.s);
    /* as in Ruby, whose syntax the expressions have, ^ and $ are ends of lines */
    uint32_t how = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_MATCH_INVALID_UTF | PCRE2_NEVER_BACKSLASH_C;
    st->re = pcre2_compile((PCRE2_SPTR)p.s, p.n, how, &code, &at, NULL);
    if (st->re) return 0;
    char text[120] = "";
    pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
    return lr_fail(err, LR_EUNSUPPORTED, "the expression \"%.*s\": %s", (int)(p.n < 80 ? p.n : 80), p.s, text);
}

int lr_pipe_new(lr_pipe **out, const lr_step_spec *steps, size_t n, lr_error *err)
{
    if (n > LR_PIPE_STEPS) return lr_fail(err, LR_EUNSUPPORTED, "%zu steps before the model", n);
    lr_pipe *p = lr_calloc(1, sizeof *p);
    int rc = p ? 0 : no_memory(err);
    for (size_t i = 0; i < n && !rc; i++) {
        step *st = &p->steps[p->n++];
        st->s = steps[i];
        st->s.pattern = st->s.content = (lr_str){NULL, 0};
        lr_str pattern = steps[i].pattern, content = steps[i].content;
        if (!(rc = copy_str(&pattern, err))) st->s.pattern = pattern;
        if (!rc && !(rc = copy_str(&content, err))) st->s.content = content;
        if (!rc && st->s.regex) rc = compile(st, err);
        if (!rc && st->s.kind == LR_STEP_CHARSMAP) rc = lr_charsmap_init(&st->map, st->s.content, err);
    }
    if (rc) {
        lr_pipe_free(p);
        return rc;
    }
    *out = p;
    return 0;
}

void lr_pipe_free(lr_pipe *p)
{
    for (size_t i = 0; p && i < p->n; i++) {
        lr_free((void *)(uintptr_t)p->steps[i].s.pattern.s);
        lr_free((void *)(uintptr_t)p->steps[i].s.content.s);
        pcre2_code_free(p->steps[i].re);
    }
    lr_free(p);
}
