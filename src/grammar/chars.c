/* chars.c - see chars.h: sets of characters, and the nodes that match their spellings.
 *
 * A range of numbers is split into pieces that are products of digit ranges, for UTF-8 (6-bit digits behind a lead
 * byte) as for the hexadecimal digits of \uXXXX.
 *
 * In a JSON string a character may be spelt raw (all but controls, " and \), with a short escape (\" \\ \/ \b \f \n \r
 * \t), or as \uXXXX (a surrogate pair beyond U+FFFF). Printable ASCII is spelt \uXXXX only in sets that hold all of it,
 * so that the letters of a pattern are letters.
 */
#include "grammar/chars.h"
#include "grammar/grammar_int.h"
#include <stdlib.h>

bool lr_chars_add(lr_chars *c, uint32_t lo, uint32_t hi)
{
    if (c->n == c->cap) {
        uint32_t cap = c->cap ? c->cap * 2 : 8;
        void *p = lr_reallocarray(c->r, cap, sizeof *c->r);
        if (!p) return false;
        c->r = p;
        c->cap = cap;
    }
    c->r[c->n][0] = lo;
    c->r[c->n][1] = hi;
    c->n++;
    return true;
}

bool lr_chars_add_all(lr_chars *c, const lr_chars *o)
{
    for (uint32_t i = 0; i < o->n; i++) {
        if (!lr_chars_add(c, o->r[i][0], o->r[i][1])) return false;
    }
    return true;
}

static int cmp_range(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;
    return (x[0] > y[0]) - (x[0] < y[0]);
}

void lr_chars_fix(lr_chars *c)
{
    uint32_t n = 0;
    if (c->n > 1) qsort(c->r, c->n, sizeof *c->r, cmp_range);
    for (uint32_t i = 0; i < c->n; i++) {
        if (c->r[i][0] > c->r[i][1]) continue;
        if (n > 0 && c->r[i][0] <= c->r[n - 1][1] + 1) {
            if (c->r[i][1] > c->r[n - 1][1]) c->r[n - 1][1] = c->r[i][1];
        } else {
            c->r[n][0] = c->r[i][0];
            c->r[n][1] = c->r[i][1];
            n++;
        }
    }
    c->n = n;
}

bool lr_chars_negate(lr_chars *c)
{
    lr_chars out = {0};
    uint32_t from = 0;
    bool ok = lr_chars_add(c, 0xD800, 0xDFFF);
    lr_chars_fix(c);
    for (uint32_t i = 0; i < c->n && ok; i++) {
        if (c->r[i][0] > from) ok = lr_chars_add(&out, from, c->r[i][0] - 1);
        from = c->r[i][1] + 1;
    }
    if (ok && from <= LR_CHAR_MAX) ok = lr_chars_add(&out, from, LR_CHAR_MAX);
    lr_chars_free(c);
    *c = out;
    return ok;
}

bool lr_chars_fold(lr_chars *c)
{
    lr_chars_fix(c);
    for (uint32_t i = 0, n = c->n; i < n; i++) {
        for (int up = 0; up < 2; up++) {
            uint32_t a = up ? 'A' : 'a', z = up ? 'Z' : 'z';
            uint32_t lo = c->r[i][0] > a ? c->r[i][0] : a, hi = c->r[i][1] < z ? c->r[i][1] : z;
            if (lo <= hi && !lr_chars_add(c, lo ^ 32, hi ^ 32)) return false;
        }
    }
    lr_chars_fix(c);
    return true;
}

bool lr_chars_has(const lr_chars *c, uint32_t v)
{
    uint32_t lo = 0, hi = c->n;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (c->r[mid][1] < v)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < c->n && c->r[lo][0] <= v;
}

void lr_chars_free(lr_chars *c)
{
    lr_free(c->r);
    *c = (lr_chars){0};
}

/* ---- spelling ---- */

/* The alternatives of a spelling. */
typedef struct spelling {
    lr_gb *b;
    gset single; /* one byte */
    lr_gnode *alt;
    uint32_t n, cap;
} spelling;

static void add_alt(spelling *s, lr_gnode node)
{
    if (!lr_gb__grow(s->b, (void **)&s->alt, &s->cap, s->n, 1, sizeof *s->alt)) return;
    s->alt[s->n++] = node;
}

/* Makes the node of one digit's range. */
typedef lr_gnode (*digit_fn)(lr_gb *, unsigned place, uint32_t lo, uint32_t hi);

static void byte_range(gset *s, uint32_t lo, uint32_t hi)
{
    for (uint32_t c = lo; c <= hi; c++) gset_add(s, c);
}

static lr_gnode utf8_digit(lr_gb *b, unsigned place, uint32_t lo, uint32_t hi)
{
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    gset s = {{0}};
    /* place 0: a continuation byte; else the lead byte of that many bytes */
    uint32_t base = place ? lead[place] : 0x80;
    byte_range(&s, base + lo, base + hi);
    return lr_gb_bytes(b, s.w);
}

static lr_gnode hex_digit(lr_gb *b, unsigned place, uint32_t lo, uint32_t hi)
{
    gset s = {{0}};
    for (uint32_t c = lo; c <= hi; c++) {
        gset_add(&s, c < 10 ? '0' + c : 'a' + c - 10);
        gset_add(&s, c < 10 ? '0' + c : 'A' + c - 10);
    }
    return lr_gb_bytes(b, s.w);
}

/* Numbers lo..hi as `digits` digits of `bits` bits, most significant first; pre (n) stands before. The first digit is
 * made with place `first`, the others with place 0. */
typedef struct splitter {
    spelling *s;
    digit_fn digit;
    unsigned bits, first;
    lr_gnode tail; /* 0 = none */
} splitter;

static void split(const splitter *p, uint32_t lo, uint32_t hi, unsigned digits, lr_gnode *pre, unsigned n_pre,
                  bool is_first)
{
    uint32_t unit = 1u << (p->bits * (digits - 1)), mask = unit - 1, a = lo / unit, z = hi / unit;
    unsigned place = is_first ? p->first : 0;
    if (p->s->b->err.code) return;
    if (digits == 1) {
        pre[n_pre++] = p->digit(p->s->b, place, lo, hi);
        if (p->tail) pre[n_pre++] = p->tail;
        add_alt(p->s, lr_gb_seq(p->s->b, pre, n_pre));
        return;
    }
    if (a == z) {
        pre[n_pre] = p->digit(p->s->b, place, a, a);
        split(p, lo & mask, hi & mask, digits - 1, pre, n_pre + 1, false);
        return;
    }
    if (lo & mask) { /* a part at the bottom */
        pre[n_pre] = p->digit(p->s->b, place, a, a);
        split(p, lo & mask, mask, digits - 1, pre, n_pre + 1, false);
        a++;
    }
    uint32_t last = (hi & mask) == mask ? z : z - 1;
    if (a <= last) { /* whole ones */
        pre[n_pre] = p->digit(p->s->b, place, a, last);
        split(p, 0, mask, digits - 1, pre, n_pre + 1, false);
    }
    if (last != z) {
        pre[n_pre] = p->digit(p->s->b, place, z, z);
        split(p, 0, hi & mask, digits - 1, pre, n_pre + 1, false);
    }
}

/* A range cut to lo..hi; false if nothing is left. */
static bool clip(const uint32_t r[2], uint32_t lo, uint32_t hi, uint32_t out[2])
{
    out[0] = r[0] > lo ? r[0] : lo;
    out[1] = r[1] < hi ? r[1] : hi;
    return out[0] <= out[1];
}

/* UTF-8 of a range without surrogates. */
static void spell_raw(spelling *s, const uint32_t range[2])
{
    static const uint32_t part[][3] = {
        {0x80, 0x7FF, 2}, {0x800, 0xD7FF, 3}, {0xE000, 0xFFFF, 3}, {0x10000, LR_CHAR_MAX, 4}};
    lr_gnode pre[8];
    uint32_t r[2];
    if (clip(range, 0, 0x7F, r)) byte_range(&s->single, r[0], r[1]);
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        splitter p = {.s = s, .digit = utf8_digit, .bits = 6, .first = part[i][2]};
        if (clip(range, part[i][0], part[i][1], r)) split(&p, r[0], r[1], part[i][2], pre, 0, true);
    }
}

/* \uXXXX of a range. */
static void spell_hex(spelling *s, const uint32_t range[2], lr_gnode u)
{
    lr_gnode pre[8] = {u};
    uint32_t r[2];
    splitter p = {.s = s, .digit = hex_digit, .bits = 4};
    if (clip(range, 0, 0xD7FF, r)) split(&p, r[0], r[1], 4, pre, 1, false);
    if (clip(range, 0xE000, 0xFFFF, r)) split(&p, r[0], r[1], 4, pre, 1, false);
    if (!clip(range, 0x10000, LR_CHAR_MAX, r)) return;
    uint32_t lo = r[0] - 0x10000, hi = r[1] - 0x10000;
    while (lo <= hi && !s->b->err.code) { /* high surrogates with the same set of low ones */
        uint32_t h = lo >> 10, h2 = h, from = lo & 0x3FF, to = hi >> 10 == h ? hi & 0x3FF : 0x3FF;
        if (from == 0 && to == 0x3FF) h2 = (hi & 0x3FF) == 0x3FF ? hi >> 10 : (hi >> 10) - 1;
        spelling low = {.b = s->b};
        splitter pl = {.s = &low, .digit = hex_digit, .bits = 4};
        pre[0] = u;
        split(&pl, 0xDC00 + from, 0xDC00 + to, 4, pre, 1, false);
        p.tail = lr_gb_alt(s->b, low.alt, low.n);
        lr_free(low.alt);
        pre[0] = u;
        split(&p, 0xD800 + h, 0xD800 + h2, 4, pre, 1, false);
        lo = (h2 + 1) << 10;
    }
}

static void spell_json(spelling *s, const lr_chars *set)
{
    static const char name[] = "\"\\/bfnrt", value[] = "\"\\/\b\f\n\r\t";
    static const uint32_t raw[][2] = {{0x20, 0x21}, {0x23, 0x5B}, {0x5D, LR_CHAR_MAX}};
    bool ascii = false;
    gset esc = {{0}};
    for (uint32_t i = 0; i < set->n; i++) {
        uint32_t r[2];
        ascii = ascii || (set->r[i][0] <= 0x20 && set->r[i][1] >= 0x7E);
        for (size_t k = 0; k < 3; k++) {
            if (clip(set->r[i], raw[k][0], raw[k][1], r)) spell_raw(s, r);
        }
    }
    for (size_t k = 0; k < 8; k++) {
        if (lr_chars_has(set, (uint8_t)value[k])) gset_add(&esc, (uint8_t)name[k]);
    }
    lr_gnode slash = lr_gb_lit(s->b, "\\", 1), u = lr_gb_lit(s->b, "\\u", 2);
    if (esc.w[0] | esc.w[1]) {
        lr_gnode two[2] = {slash, lr_gb_bytes(s->b, esc.w)};
        add_alt(s, lr_gb_seq(s->b, two, 2));
    }
    for (uint32_t i = 0; i < set->n; i++) {
        uint32_t r[2];
        if (ascii) {
            spell_hex(s, set->r[i], u);
            continue;
        }
        if (clip(set->r[i], 0, 0x1F, r)) spell_hex(s, r, u);
        if (clip(set->r[i], 0x7F, LR_CHAR_MAX, r)) spell_hex(s, r, u);
    }
}

lr_gnode lr_gb_chars(lr_gb *b, const uint32_t (*ranges)[2], size_t n, lr_spell spell)
{
    lr_chars set = {0};
    spelling s = {.b = b};
    bool ok = !b->err.code;
    for (size_t i = 0; i < n && ok; i++) {
        uint32_t r[2];
        ok = !clip(ranges[i], 0, 0xD7FF, r) || lr_chars_add(&set, r[0], r[1]);
        ok = ok && (!clip(ranges[i], 0xE000, LR_CHAR_MAX, r) || lr_chars_add(&set, r[0], r[1]));
    }
    if (!ok) lr_gb_fail(b, LR_ENOMEM, "no memory for the grammar");
    lr_chars_fix(&set);
    if (spell == LR_SPELL_JSON)
        spell_json(&s, &set);
    else
        for (uint32_t i = 0; i < set.n; i++) spell_raw(&s, set.r[i]);
    if (s.single.w[0] | s.single.w[1]) add_alt(&s, lr_gb_bytes(b, s.single.w));
    lr_gnode node = lr_gb_alt(b, s.alt, s.n);
    lr_free(s.alt);
    lr_chars_free(&set);
    return b->err.code ? 0 : node;
}

size_t lr_char_put(uint32_t c, char out[4])
{
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t b = n - 1; b > 0; b--, c >>= 6) out[b] = (char)(0x80 | (c & 0x3F));
    out[0] = (char)(n == 1 ? c : (0xF00u >> n & 0xFF) | c);
    return n;
}
