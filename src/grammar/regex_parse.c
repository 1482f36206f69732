/* regex_parse.c - patterns in ECMAScript's syntax -> trees. See grammar.h for what is known. */
#include "grammar/regex_int.h"
#include "text/unicode.h"
#include <stdio.h>

typedef struct parser {
    rtree *t;
    const uint8_t *s;
    size_t n, i;
    unsigned flags;
    int depth;
    lr_error *err;
    int code;
} parser;

#define NONE UINT32_MAX

static uint32_t fail(parser *p, int code, size_t at, const char *what)
{
    if (!p->code) p->code = lr_fail(p->err, code, "regex, byte %zu: %s", at + 1, what);
    return NONE;
}

/* Where the tree got no node: it has too many, or there is no memory. */
static uint32_t no_node(parser *p)
{
    if (lr_rtree__full(p->t)) return fail(p, LR_ELIMIT, p->i, "the pattern is too large");
    return fail(p, LR_ENOMEM, p->i, "no memory");
}

static int peek(const parser *p) { return p->i < p->n ? p->s[p->i] : -1; }
static bool eat(parser *p, const char *z)
{
    size_t n = strlen(z);
    if (p->n - p->i < n || memcmp(p->s + p->i, z, n) != 0) return false;
    p->i += n;
    return true;
}

/* ---- tree ---- */

static bool grow(void **q, uint32_t *cap, uint32_t n, uint32_t more, size_t size)
{
    if (n + more <= *cap) return true;
    uint32_t want = *cap * 2 > n + more ? *cap * 2 : n + more + 16;
    void *r = lr_reallocarray(*q, want, size);
    if (!r) return false;
    *q = r;
    *cap = want;
    return true;
}

uint32_t lr_rtree__add(rtree *t, rnode n)
{
    if (lr_rtree__full(t) || !grow((void **)&t->node, &t->cap_node, t->n_node, 1, sizeof n)) return NONE;
    t->node[t->n_node] = n;
    return t->n_node++;
}

uint32_t lr_rtree__list(rtree *t, rkind kind, const uint32_t *nodes, uint32_t n)
{
    if (n == 0) return lr_rtree__add(t, (rnode){.kind = R_EMPTY});
    if (n == 1) return nodes[0];
    if (!grow((void **)&t->list, &t->cap_list, t->n_list, n, sizeof *t->list)) return NONE;
    memcpy(t->list + t->n_list, nodes, n * sizeof *nodes);
    t->n_list += n;
    return lr_rtree__add(t, (rnode){.kind = (uint8_t)kind, .a = t->n_list - n, .b = n});
}

uint32_t lr_rtree__set(rtree *t, lr_chars *set)
{
    if (!grow((void **)&t->set, &t->cap_set, t->n_set, 1, sizeof *t->set)) {
        lr_chars_free(set);
        return NONE;
    }
    t->set[t->n_set++] = *set;
    return lr_rtree__add(t, (rnode){.kind = R_SET, .a = t->n_set - 1});
}

void lr_rtree_free(rtree *t)
{
    for (uint32_t i = 0; i < t->n_set; i++) lr_chars_free(&t->set[i]);
    lr_free(t->set);
    lr_free(t->node);
    lr_free(t->list);
    *t = (rtree){0};
}

/* A growing list of nodes. */
typedef struct nodes {
    uint32_t *at, n, cap;
} nodes;

static bool push(nodes *l, uint32_t v)
{
    if (!grow((void **)&l->at, &l->cap, l->n, 1, sizeof *l->at)) return false;
    l->at[l->n++] = v;
    return true;
}

/* ---- characters ---- */

static const uint32_t digits[][2] = {{'0', '9'}};
static const uint32_t words[][2] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
static const uint32_t spaces[][2] = {{9, 13},          {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                                     {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                                     {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
static const uint32_t breaks[][2] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
#define COUNT(a) (sizeof(a) / sizeof *(a))

static bool add_ranges(lr_chars *c, const uint32_t (*r)[2], size_t n, bool negate)
{
    lr_chars part = {0};
    bool ok = true;
    for (size_t i = 0; i < n && ok; i++) ok = lr_chars_add(&part, r[i][0], r[i][1]);
    if (ok && negate) ok = lr_chars_negate(&part);
    ok = ok && lr_chars_add_all(c, &part);
    lr_chars_free(&part);
    return ok;
}

/* \d \D \w \W \s \S into c: 1; 0 if it is none of these; -1 no memory. */
static int class_escape(int e, lr_chars *c)
{
    bool ok;
    switch (e) {
    case 'd':
    case 'D':
        ok = add_ranges(c, digits, COUNT(digits), e == 'D');
        break;
    case 'w':
    case 'W':
        ok = add_ranges(c, words, COUNT(words), e == 'W');
        break;
    case 's':
    case 'S':
        ok = add_ranges(c, spaces, COUNT(spaces), e == 'S');
        break;
    default:
        return 0;
    }
    return ok ? 1 : -1;
}

static int hex_value(int c)
{
    if (c >= '0' && c <= '9') return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Exactly `count` hexadecimal digits. */
static bool hex(parser *p, int count, uint32_t *v)
{
    *v = 0;
    for (int k = 0; k < count; k++) {
        int h = p->i < p->n ? hex_value(p->s[p->i]) : -1;
        if (h < 0) return false;
        *v = *v * 16 + (uint32_t)h;
        p->i++;
    }
    return true;
}

/* Behind "\u": XXXX, a pair of surrogates, or {X...}. */
static uint32_t unicode_escape(parser *p, size_t at)
{
    uint32_t v, low;
    if (eat(p, "{")) {
        v = 0;
        int count = 0;
        for (int h; p->i < p->n && (h = hex_value(p->s[p->i])) >= 0 && count < 8; p->i++, count++)
            v = v * 16 + (uint32_t)h;
        if (!count || !eat(p, "}") || v > LR_CHAR_MAX) return fail(p, LR_EFORMAT, at, "a bad \\u{...}");
        return v;
    }
    if (!hex(p, 4, &v)) return fail(p, LR_EFORMAT, at, "\\u needs four hexadecimal digits");
    if (v >= 0xD800 && v < 0xDC00 && p->n - p->i >= 6 && p->s[p->i] == '\\' && p->s[p->i + 1] == 'u') {
        size_t back = p->i;
        p->i += 2;
        if (hex(p, 4, &low) && low >= 0xDC00 && low < 0xE000) return 0x10000 + ((v & 0x3FF) << 10) + (low & 0x3FF);
        p->i = back;
    }
    if (v >= 0xD800 && v < 0xE000) return fail(p, LR_EUNSUPPORTED, at, "half a surrogate pair");
    return v;
}

/* The character that an escape stands for; the backslash was read. */
static uint32_t char_escape(parser *p, bool in_class)
{
    static const char from[] = "tnvfr0", to[] = "\t\n\v\f\r";
    size_t at = p->i - 1;
    uint32_t v;
    int e = peek(p);
    if (e < 0) return fail(p, LR_EFORMAT, at, "a backslash at the end");
    p->i++;
    const char *k = strchr(from, e);
    if (k && *k) {
        if (e == '0' && peek(p) >= '0' && peek(p) <= '9') return fail(p, LR_EUNSUPPORTED, at, "octal escapes");
        return (uint8_t)to[k - from];
    }
    switch (e) {
    case 'x':
        return hex(p, 2, &v) ? v : fail(p, LR_EFORMAT, at, "\\x needs two hexadecimal digits");
    case 'u':
        return unicode_escape(p, at);
    case 'c':
        v = p->i < p->n ? p->s[p->i++] : 0;
        if ((v | 32) < 'a' || (v | 32) > 'z') return fail(p, LR_EFORMAT, at, "\\c needs a letter");
        return v & 31;
    case 'b':
        if (in_class) return 8;
        return fail(p, LR_EUNSUPPORTED, at, "\\b (a word's border) cannot be enforced");
    case 'B':
        return fail(p, LR_EUNSUPPORTED, at, "\\B (no word's border) cannot be enforced");
    case 'p':
    case 'P':
        return fail(p, LR_EUNSUPPORTED, at, "\\p{...} is not known");
    case 'k':
        return fail(p, LR_EUNSUPPORTED, at, "back references cannot be enforced");
    default:
        if (e >= '1' && e <= '9') return fail(p, LR_EUNSUPPORTED, at, "back references cannot be enforced");
        if ((e | 32) >= 'a' && (e | 32) <= 'z') return fail(p, LR_EFORMAT, at, "an unknown escape");
        if (e < 0x80) return (uint32_t)e;
        p->i--;
        int32_t cp;
        p->i += lr_utf8_get(p->s + p->i, p->n - p->i, &cp);
        return cp < 0 ? fail(p, LR_EFORMAT, at, "the pattern is not UTF-8") : (uint32_t)cp;
    }
}

static uint32_t plain_char(parser *p)
{
    int32_t cp;
    size_t at = p->i;
    p->i += lr_utf8_get(p->s + p->i, p->n - p->i, &cp);
    return cp < 0 ? fail(p, LR_EFORMAT, at, "the pattern is not UTF-8") : (uint32_t)cp;
}

static uint32_t set_node(parser *p, lr_chars *c, bool negate)
{
    bool ok = true;
    lr_chars_fix(c);
    if (p->flags & LR_RE_ICASE) ok = lr_chars_fold(c);
    if (ok && negate) ok = lr_chars_negate(c);
    uint32_t node = ok ? lr_rtree__set(p->t, c) : NONE;
    if (!ok) lr_chars_free(c);
    return node == NONE ? no_node(p) : node;
}

static uint32_t char_node(parser *p, uint32_t c)
{
    lr_chars set = {0};
    if (p->code) return NONE;
    if (!lr_chars_add(&set, c, c)) return no_node(p);
    return set_node(p, &set, false);
}

static uint32_t any_node(parser *p)
{
    lr_chars set = {0};
    bool ok = (p->flags & LR_RE_DOTALL) || add_ranges(&set, breaks, COUNT(breaks), false);
    if (!ok || !lr_chars_negate(&set)) {
        lr_chars_free(&set);
        return no_node(p);
    }
    uint32_t node = lr_rtree__set(p->t, &set);
    return node == NONE ? no_node(p) : node;
}

/* One end of a class's range; *is_class if it was \d and the like, which are then in c. */
static uint32_t class_atom(parser *p, lr_chars *c, bool *is_class)
{
    *is_class = false;
    if (!eat(p, "\\")) return plain_char(p);
    int k = class_escape(peek(p), c);
    if (k < 0) return no_node(p);
    if (k == 0) return char_escape(p, true);
    p->i++;
    *is_class = true;
    return 0;
}

/* Behind "[". */
static uint32_t parse_class(parser *p)
{
    size_t at = p->i - 1;
    lr_chars c = {0};
    bool negate = eat(p, "^"), class_lo, class_hi;
    while (!p->code && peek(p) != ']') {
        if (p->i >= p->n) {
            fail(p, LR_EFORMAT, at, "a [ without its ]");
            break;
        }
        size_t from = p->i;
        uint32_t lo = class_atom(p, &c, &class_lo), hi = lo;
        if (p->code) break;
        if (p->n - p->i >= 2 && p->s[p->i] == '-' && p->s[p->i + 1] != ']') {
            p->i++;
            hi = class_atom(p, &c, &class_hi);
            if (p->code) break;
            if (class_lo || class_hi) {
                fail(p, LR_EFORMAT, from, "a range with a class at its end");
                break;
            }
            if (hi < lo) {
                fail(p, LR_EFORMAT, from, "a range that is out of order");
                break;
            }
        }
        if (!class_lo && !lr_chars_add(&c, lo, hi)) no_node(p);
    }
    if (p->code) {
        lr_chars_free(&c);
        return NONE;
    }
    p->i++;
    return set_node(p, &c, negate);
}

/* ---- structure ---- */

static uint32_t parse_alt(parser *p);

/* (?i), (?s), (?i:, (?-i: and the like, behind "(?". Returns false if it is none. *scoped: a ":" follows. */
static bool read_flags(parser *p, unsigned *flags, bool *scoped)
{
    size_t i = p->i;
    unsigned f = p->flags;
    bool off = false, any = false;
    for (; i < p->n; i++) {
        unsigned bit = p->s[i] == 'i' ? LR_RE_ICASE : p->s[i] == 's' ? LR_RE_DOTALL : 0;
        if (p->s[i] == '-' && !off) {
            off = true;
        } else if (bit) {
            f = off ? f & ~bit : f | bit;
            any = true;
        } else {
            break;
        }
    }
    if (!any || i >= p->n || (p->s[i] != ':' && p->s[i] != ')')) return false;
    *flags = f;
    *scoped = p->s[i] == ':';
    p->i = i + 1;
    return true;
}

/* Behind "(". */
static uint32_t parse_group(parser *p)
{
    size_t at = p->i - 1;
    unsigned before = p->flags, flags = before;
    bool scoped = true;
    if (eat(p, "?")) {
        if (eat(p, "=") || eat(p, "!"))
            return fail(p, LR_EUNSUPPORTED, at, "lookahead is allowed only at the start of the pattern, behind ^");
        if (eat(p, "<=") || eat(p, "<!")) return fail(p, LR_EUNSUPPORTED, at, "lookbehind cannot be enforced");
        if (eat(p, "P<") || eat(p, "<")) {
            while (p->i < p->n && p->s[p->i] != '>' && p->s[p->i] != ')') p->i++;
            if (!eat(p, ">")) return fail(p, LR_EFORMAT, at, "a bad name of a group");
        } else if (!eat(p, ":") && !read_flags(p, &flags, &scoped)) {
            return fail(p, LR_EUNSUPPORTED, at, "a kind of group that is not known");
        }
    }
    p->flags = flags;
    if (!scoped) return lr_rtree__add(p->t, (rnode){.kind = R_EMPTY}); /* to the end of the enclosing group */
    if (++p->depth > LR_RE_MAX_DEPTH) return fail(p, LR_ELIMIT, at, "nested too deeply");
    uint32_t node = parse_alt(p);
    p->depth--;
    p->flags = before;
    if (p->code) return NONE;
    return eat(p, ")") ? node : fail(p, LR_EFORMAT, at, "a ( without its )");
}

static uint32_t parse_escape(parser *p)
{
    lr_chars c = {0};
    if (peek(p) == 'A' || peek(p) == 'z')
        return lr_rtree__add(p->t, (rnode){.kind = p->s[p->i++] == 'A' ? R_BOL : R_EOL});
    int k = class_escape(peek(p), &c);
    if (k == 0) return char_node(p, char_escape(p, false));
    p->i++;
    return k < 0 ? no_node(p) : set_node(p, &c, false);
}

static uint32_t parse_atom(parser *p)
{
    size_t at = p->i;
    switch (peek(p)) {
    case '(':
        p->i++;
        return parse_group(p);
    case '[':
        p->i++;
        return parse_class(p);
    case '.':
        p->i++;
        return any_node(p);
    case '^':
        p->i++;
        return lr_rtree__add(p->t, (rnode){.kind = R_BOL});
    case '$':
        p->i++;
        return lr_rtree__add(p->t, (rnode){.kind = R_EOL});
    case '\\':
        p->i++;
        return parse_escape(p);
    case '*':
    case '+':
    case '?':
        return fail(p, LR_EFORMAT, at, "nothing to repeat");
    default:
        return char_node(p, plain_char(p));
    }
}

/* "{m}", "{m,}", "{m,n}"; false, and nothing read, if it is none. */
static bool read_bounds(parser *p, int32_t *min, int32_t *max)
{
    size_t i = p->i + 1, from;
    int64_t v[2] = {0, -1};
    for (int k = 0; k < 2; k++) {
        from = i;
        int64_t x = 0;
        for (; i < p->n && p->s[i] >= '0' && p->s[i] <= '9'; i++) x = x > INT32_MAX ? x : x * 10 + (p->s[i] - '0');
        if (i > from)
            v[k] = x;
        else if (k == 0)
            return false;
        if (i >= p->n) return false;
        if (k == 0 && p->s[i] == '}') v[1] = v[0];
        if (p->s[i] == '}') break;
        if (p->s[i] != ',' || k == 1) return false;
        i++;
    }
    size_t at = p->i;
    p->i = i + 1;
    if (v[0] > 1 << 20 || v[1] > 1 << 20)
        fail(p, LR_ELIMIT, at, "the bound of a repetition is over 1048576");
    else if (v[1] >= 0 && v[1] < v[0])
        fail(p, LR_EFORMAT, at, "the bounds of a repetition are out of order");
    *min = (int32_t)v[0];
    *max = (int32_t)v[1];
    return true;
}

static uint32_t parse_repeat(parser *p)
{
    uint32_t node = parse_atom(p);
    for (int times = 0; !p->code; times++) {
        if (node == NONE) return no_node(p);
        int32_t min = 0, max = -1;
        size_t at = p->i;
        int c = peek(p);
        if (c == '*' || c == '+' || c == '?') {
            p->i++;
            min = c == '+';
            max = c == '?' ? 1 : -1;
        } else if (c != '{' || !read_bounds(p, &min, &max)) {
            return node;
        }
        if (p->code) return NONE;
        if (times > 0) return fail(p, LR_EFORMAT, at, "nothing to repeat");
        (void)eat(p, "?"); /* as few as possible: the same texts */
        if (max == 0)
            node = lr_rtree__add(p->t, (rnode){.kind = R_EMPTY});
        else
            node = lr_rtree__add(p->t, (rnode){.kind = R_REP, .a = node, .min = min, .max = max});
    }
    return NONE;
}

static uint32_t parse_seq(parser *p)
{
    nodes l = {0};
    while (!p->code && p->i < p->n && peek(p) != '|' && peek(p) != ')') {
        uint32_t node = parse_repeat(p);
        if (!p->code && (node == NONE || !push(&l, node))) no_node(p);
    }
    uint32_t out = p->code ? NONE : lr_rtree__list(p->t, R_SEQ, l.at, l.n);
    lr_free(l.at);
    return out == NONE ? no_node(p) : out;
}

static uint32_t parse_alt(parser *p)
{
    nodes l = {0};
    do {
        uint32_t node = parse_seq(p);
        if (!p->code && !push(&l, node)) no_node(p);
    } while (!p->code && eat(p, "|"));
    uint32_t out = p->code ? NONE : lr_rtree__list(p->t, R_ALT, l.at, l.n);
    lr_free(l.at);
    return out == NONE ? no_node(p) : out;
}

/* Lookaheads at the start: "^(?=...)(?!...)rest". They hold for the whole text only if the match starts there. */
static void parse_looks(parser *p)
{
    size_t back = p->i;
    p->t->anchored = eat(p, "^");
    while (!p->code && p->n - p->i >= 3 && p->s[p->i] == '(' && p->s[p->i + 1] == '?' &&
           (p->s[p->i + 2] == '=' || p->s[p->i + 2] == '!')) {
        size_t at = p->i;
        rtree *t = p->t;
        if (!t->anchored && (p->flags & LR_RE_SEARCH)) {
            fail(p, LR_EUNSUPPORTED, at, "lookahead is allowed only at the start of the pattern, behind ^");
            return;
        }
        if (t->n_look == LR_RE_MAX_LOOKS) {
            fail(p, LR_ELIMIT, at, "too many lookaheads");
            return;
        }
        t->look_not[t->n_look] = p->s[p->i + 2] == '!';
        p->i += 3;
        p->depth++;
        uint32_t node = parse_alt(p);
        p->depth--;
        if (p->code) return;
        t->look[t->n_look++] = node;
        if (!eat(p, ")")) fail(p, LR_EFORMAT, at, "a ( without its )");
    }
    if (!p->t->n_look) {
        p->i = back; /* ^ is parsed with the rest */
        p->t->anchored = false;
    }
}

int lr_rtree_parse(rtree *t, const char *s, size_t n, unsigned flags, lr_error *err)
{
    parser p = {.t = t, .s = (const uint8_t *)s, .n = n, .flags = flags, .err = err};
    if (n > LR_RE_MAX_PATTERN) return lr_fail(err, LR_ELIMIT, "regex: longer than %d bytes", LR_RE_MAX_PATTERN);
    parse_looks(&p);
    if (!p.code) t->root = parse_alt(&p);
    if (!p.code && p.i < n) fail(&p, LR_EFORMAT, p.i, "a ) without its (");
    if (!p.code && t->n_look && t->node[t->root].kind == R_ALT)
        fail(&p, LR_EUNSUPPORTED, 0, "a lookahead beside alternatives; put these in a group");
    return p.code;
}
