/* unique.c - texts that may not come twice: items of JSON arrays, names of JSON objects.
 *
 * A unique rule (lr_gb_unique) matches one item of an array or one name of an object, and the text as a whole is JSON.
 * When it ends, the text says the rest: what has just been written, and what stands before it in the same array or
 * object. If one of these is the same JSON value, the rule has not ended. Values are compared, not spellings; numbers
 * that are the same floating-point number count as the same.
 *
 * So the automaton knows nothing of it, but token masks do depend on the text where such a rule may end. While a string
 * is written that the rule ends with, only tokens that finish an earlier string of the array or object are in doubt:
 * they are looked up in the vocabulary's trie ("candidates") and judged one by one. Elsewhere the trie is walked.
 */
#include "grammar/chars.h"
#include "grammar/mask_int.h"
#include <stdlib.h>

#define NO_CHAR   UINT32_MAX
#define MAX_EQUAL 64 /* values nested deeper are taken as equal: refused rather than repeated */

/* ---- values in a text ---- */

static bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

static lr_str trim(const char *s, size_t from, size_t to)
{
    while (from < to && is_blank(s[from])) from++;
    while (to > from && is_blank(s[to - 1])) to--;
    return (lr_str){s + from, to - from};
}

/* Behind the value, name or separator-free run that starts at i: the next , : ] or } outside of it, or n. */
static size_t skip_value(const char *s, size_t i, size_t n)
{
    size_t depth = 0;
    for (; i < n; i++) {
        char c = s[i];
        if (c == '"') {
            for (i++; i < n && s[i] != '"'; i++) i += s[i] == '\\';
        } else if (c == '[' || c == '{') {
            depth++;
        } else if (depth == 0 && (c == ',' || c == ':' || c == ']' || c == '}')) {
            return i;
        } else if (c == ']' || c == '}') {
            depth--;
        }
    }
    return n;
}

static int hex4(const char *s)
{
    int v = 0;
    for (int i = 0; i < 4; i++) {
        int c = s[i], d = c >= '0' && c <= '9'                 ? c - '0'
                          : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                               : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    return v;
}

/* The character at *i of a string's inside, which is moved behind it; NO_CHAR: there is only a part of it. */
static uint32_t next_char(lr_str s, size_t *i)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const uint8_t *p = (const uint8_t *)s.s + *i;
    size_t left = s.n - *i;
    if (p[0] != '\\') {
        size_t n = p[0] < 0x80 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
        if (n > left) return NO_CHAR;
        uint32_t c = n == 1 ? p[0] : p[0] & (0x7Fu >> n);
        for (size_t k = 1; k < n; k++) c = c << 6 | (p[k] & 0x3F);
        *i += n;
        return c;
    }
    if (left < 2) return NO_CHAR;
    if (p[1] != 'u') {
        const char *at = strchr(from, p[1]);
        *i += 2;
        return at && p[1] ? (uint8_t)to[at - from] : NO_CHAR;
    }
    int v = left < 6 ? -1 : hex4((const char *)p + 2);
    if (v < 0) return NO_CHAR;
    *i += 6;
    if (v < 0xD800 || v >= 0xDC00) return (uint32_t)v;
    int low = left < 12 || p[6] != '\\' || p[7] != 'u' ? -1 : hex4((const char *)p + 8);
    if (low < 0) return NO_CHAR;
    *i += 6;
    return 0x10000u + ((uint32_t)(v - 0xD800) << 10) + (uint32_t)(low - 0xDC00);
}

/* Whether b's characters begin with a's; *at: where in b that ends. Both are insides of strings. */
static bool begins_with(lr_str b, lr_str a, size_t *at)
{
    size_t i = 0, k = 0;
    while (i < a.n) {
        if (k >= b.n) return false;
        uint32_t x = next_char(a, &i), y = next_char(b, &k);
        if (x == NO_CHAR || x != y) return false;
    }
    *at = k;
    return true;
}

static lr_str inside(lr_str s) { return (lr_str){s.s + 1, s.n - 2}; }

static bool equal(lr_str a, lr_str b, int depth);

/* The next member or item of a container's inside from *i on; false at its end. */
static bool next_part(lr_str s, size_t *i, lr_str *name, lr_str *value)
{
    if (*i >= s.n) return false;
    size_t end = skip_value(s.s, *i, s.n);
    *name = (lr_str){NULL, 0};
    if (end < s.n && s.s[end] == ':') {
        *name = trim(s.s, *i, end);
        *i = end + 1;
        end = skip_value(s.s, *i, s.n);
    }
    *value = trim(s.s, *i, end);
    *i = end + 1;
    return value->n > 0 || name->n > 0;
}

static size_t count_parts(lr_str s)
{
    size_t i = 0, n = 0;
    lr_str name, value;
    while (next_part(s, &i, &name, &value)) n++;
    return n;
}

static bool equal_objects(lr_str a, lr_str b, int depth)
{
    lr_str name, value, other, v;
    if (count_parts(a) != count_parts(b)) return false;
    for (size_t i = 0; next_part(a, &i, &name, &value);) {
        bool found = false;
        for (size_t k = 0; !found && next_part(b, &k, &other, &v);) {
            found = equal(name, other, depth + 1) && equal(value, v, depth + 1);
        }
        if (!found) return false;
    }
    return true;
}

static bool equal(lr_str a, lr_str b, int depth)
{
    if (depth > MAX_EQUAL) return true;
    if (a.n == 0 || b.n == 0) return a.n == b.n;
    bool number = a.s[0] == '-' || (a.s[0] >= '0' && a.s[0] <= '9');
    if (number != (b.s[0] == '-' || (b.s[0] >= '0' && b.s[0] <= '9'))) return false;
    if (number) return strtod(a.s, NULL) == strtod(b.s, NULL); /* what follows a number ends it */
    if (a.s[0] != b.s[0]) return false;
    size_t at, i = 0, k = 0;
    lr_str name, x, y;
    switch (a.s[0]) {
    case '"':
        return a.n > 1 && b.n > 1 && begins_with(inside(b), inside(a), &at) && at == b.n - 2;
    case '[':
        a = inside(a);
        b = inside(b);
        while (next_part(a, &i, &name, &x)) {
            if (!next_part(b, &k, &name, &y) || !equal(x, y, depth + 1)) return false;
        }
        return !next_part(b, &k, &name, &y);
    case '{':
        return equal_objects(inside(a), inside(b), depth);
    default:
        return a.n == b.n; /* true, false, null */
    }
}

/* ---- where a text stands ---- */

/* Free text: whether a mark ends with the byte at i. */
static bool mark_ends(const nfa *g, const char *text, size_t i)
{
    return i + 1 >= g->n_mark && memcmp(text + i + 1 - g->n_mark, g->mark, g->n_mark) == 0;
}

static void scan(jscan *s, const nfa *g, const char *text, size_t n)
{
    for (; s->n < n; s->n++) {
        char c = text[s->n];
        if (g->mark && !s->inside) {
            s->inside = mark_ends(g, text, s->n);
            continue;
        }
        struct jlevel *l = s->depth && s->depth <= LR_G_MAX_LEVELS ? &s->level[s->depth - 1] : NULL;
        if (s->in_string) {
            if (s->escaped) {
                s->escaped = false;
            } else if (c == '\\') {
                s->escaped = true;
            } else if (c == '"') {
                s->in_string = false;
                s->inside = s->depth > 0;
            }
        } else if (c == '"') {
            s->in_string = true;
        } else if (c == '[' || c == '{') {
            if (s->depth < LR_G_MAX_LEVELS)
                s->level[s->depth] = (struct jlevel){.from = s->n + 1, .part = s->n + 1, .name = c == '{'};
            s->depth++;
        } else if ((c == ']' || c == '}') && s->depth) {
            s->inside = --s->depth > 0;
        } else if (c == ',' && l) {
            l->part = s->n + 1;
            l->name = l->object;
        } else if (c == ':' && l) {
            l->name = false;
            l->object = true;
            l->part = s->n + 1;
        } else if (s->depth == 0 && !is_blank(c)) {
            s->inside = false; /* a number, true, false or null */
        }
    }
}

/* The next earlier name, or item, of a level: from *i on; false at the part that is being written. */
static bool next_sibling(const struct jlevel *l, const char *text, size_t *i, lr_str *s)
{
    if (*i >= l->part) return false;
    size_t end = skip_value(text, *i, l->part);
    *s = trim(text, *i, end);
    if (l->name && end < l->part && text[end] == ':') end = skip_value(text, end + 1, l->part);
    *i = end + 1;
    return true;
}

/* The state at the matcher's text; NULL: no memory, or no level is open. */
static jscan *scan_matcher(lr_matcher *m)
{
    size_t n = m->slot[m->at].n_text;
    if (!m->scan) m->scan = lr_calloc(1, sizeof *m->scan);
    if (!m->scan) return NULL;
    if (m->scan->n > n) *m->scan = (jscan){0};
    scan(m->scan, m->g->n, m->text, n);
    return m->scan;
}

/* Of the levels only those that are open are copied. */
static void copy_scan(jscan *to, const jscan *s)
{
    to->n = s->n;
    to->depth = s->depth;
    to->in_string = s->in_string;
    to->escaped = s->escaped;
    to->inside = s->inside;
    memcpy(to->level, s->level, (s->depth < LR_G_MAX_LEVELS ? s->depth : LR_G_MAX_LEVELS) * sizeof *s->level);
}

bool lr_unique__repeats(lr_matcher *m, lr_str more)
{
    size_t n = m->slot[m->at].n_text + more.n, i;
    const char *text = lr_matcher__join_text(m, more);
    jscan *s = text ? scan_matcher(m) : NULL;
    if (!s) {
        lr_fail(&m->g->w.err, LR_ENOMEM, "no memory for the text of a matcher");
        return true;
    }
    jscan now;
    copy_scan(&now, s);
    scan(&now, m->g->n, text, n);
    if (now.depth == 0) return false;
    if (now.depth > LR_G_MAX_LEVELS) return true;
    const struct jlevel *l = &now.level[now.depth - 1];
    lr_str mine = trim(text, l->part, n), other;
    for (i = l->from; next_sibling(l, text, &i, &other);) {
        if (equal(mine, other, 0)) return true;
    }
    return false;
}

/* ---- what is left to say ---- */

/* Edges of state q into to[4]; a bounded loop does not lead back. */
static uint32_t edges_of(const nfa *n, uint32_t q, uint32_t to[4])
{
    const nstate *s = &n->st[q];
    uint32_t k = 0;
    if (s->kind == N_END || s->kind == N_DEAD) return 0;
    if (s->kind != N_LOOP || n->loop[s->x].max == UINT32_MAX) to[k++] = s->a;
    if (s->kind >= N_SPLIT) to[k++] = s->b;
    if (s->kind == N_CALL && n->rule[s->x].hole < 0) to[k++] = n->rule[s->x].start;
    return k;
}

int lr_nfa_widen(nfa *n, lr_error *err)
{
    uint32_t to[4], n_st = n->n_st, n_edge = 0;
    uint32_t *at = lr_calloc((size_t)n_st + 1, sizeof *at), *edge = NULL, *comp = NULL, *order = NULL;
    n->wide = lr_calloc((size_t)n_st + 1, 1);
    int rc = LR_ENOMEM;
    if (!at || !n->wide) goto done;
    for (uint32_t q = 0; q < n_st; q++) n_edge += edges_of(n, q, to);
    edge = lr_reallocarray(NULL, (size_t)n_edge + 1, sizeof *edge);
    comp = lr_reallocarray(NULL, (size_t)n_st + 1, sizeof *comp);
    order = lr_reallocarray(NULL, (size_t)n_st + 1, sizeof *order);
    if (!edge || !comp || !order) goto done;
    n_edge = 0;
    for (uint32_t q = 0; q < n_st; q++) {
        at[q] = n_edge;
        uint32_t k = edges_of(n, q, to);
        for (uint32_t i = 0; i < k; i++) edge[n_edge++] = to[i];
    }
    at[n_st] = n_edge;
    rc = lr_scc(n_st, at, edge, comp, order);
    for (uint32_t i = 0; !rc && i < n_st; i++) { /* what can be reached comes first, but for circles */
        uint32_t q = order[i];
        bool circle = (i > 0 && comp[order[i - 1]] == comp[q]) || (i + 1 < n_st && comp[order[i + 1]] == comp[q]);
        n->wide[q] = circle || (n->st[q].kind == N_CALL && n->rule[n->st[q].x].hole >= 0);
        for (uint32_t e = at[q]; e < at[q + 1]; e++) n->wide[q] |= edge[e] == q || n->wide[edge[e]];
    }
    n->n_wide = n_st;
done:
    lr_free(at);
    lr_free(edge);
    lr_free(comp);
    lr_free(order);
    return rc ? lr_fail(err, LR_ENOMEM, "no memory for the grammar") : 0;
}

/* A value as bytes to be compared: strings without escapes (a character that needs one is a backslash), the rest as it
 * is. Into out, which has room for s.n bytes. */
static size_t flatten(lr_str s, char *out)
{
    if (s.n == 0 || s.s[0] != '"') {
        if (s.n) memcpy(out, s.s, s.n);
        return s.n;
    }
    size_t n = 1, i = 1;
    out[0] = '"';
    while (i < s.n && s.s[i] != '"') {
        uint32_t c = next_char(s, &i);
        if (c == NO_CHAR) return 0;
        n += lr_char_put(c < 0x20 || c == '"' || c == '\\' ? '\\' : c, out + n);
    }
    if (i < s.n) out[n++] = '"';
    return n;
}

typedef struct left {
    lr_grammar *g;
    lr_str *s; /* what earlier values have behind what is written */
    size_t n;
    uint32_t steps;
} left;

/* Whether some text leads from d to the rule's end that is not among s[0 .. n - 1], cut by `cut` bytes. */
static bool other_way(left *l, uint32_t d, const lr_str *s, size_t n, size_t cut)
{
    lr_grammar *g = l->g;
    if (n == 0 || g->d[d].n_calls || l->steps < n + 256) return true;
    l->steps -= (uint32_t)n + 256;
    lr_str *sub = lr_reallocarray(NULL, n, sizeof *sub);
    bool any = false, yes = !sub;
    for (unsigned b = 0; b < 256 && !yes; b++) {
        uint32_t t = lr_dfa__trans(g, d, g->n->cls[b]);
        if (t == D_DEAD) continue;
        if (b == '\\') continue; /* another spelling of what stands beside it */
        any = true;
        size_t n_sub = 0;
        bool ended = false;
        for (size_t i = 0; i < n; i++) {
            if (s[i].n <= cut || (uint8_t)s[i].s[cut] != b) continue;
            ended = ended || s[i].n == cut + 1;
            sub[n_sub++] = s[i];
        }
        yes = n_sub == 0 || (g->d[t].flags & D_ENDS && !ended) || g->w.err.code;
        uint32_t in = yes ? D_DEAD : lr_dfa__byte_part(g, t);
        if (in != D_DEAD) yes = other_way(l, in, sub, n_sub, cut + 1);
    }
    lr_free(sub);
    return yes || !any;
}

bool lr_unique__alive(lr_matcher *m, uint32_t d, lr_str more)
{
    size_t n = m->slot[m->at].n_text + more.n, used = 0, count = 0, head;
    const char *text = lr_matcher__join_text(m, more);
    jscan *s = text ? scan_matcher(m) : NULL, now;
    if (!s || s->depth > LR_G_MAX_LEVELS) return true;
    copy_scan(&now, s);
    scan(&now, m->g->n, text, n);
    if (now.depth == 0 || now.depth > LR_G_MAX_LEVELS || now.escaped) return true;
    const struct jlevel *l = &now.level[now.depth - 1];
    lr_str mine = trim(text, l->part, n), other;
    mine.n = (size_t)(text + n - mine.s);
    char *buf = lr_malloc(n + 1);
    lr_str *rest = lr_reallocarray(NULL, n / 2 + 2, sizeof *rest);
    bool yes = !buf || !rest;
    if (!yes) head = flatten(mine, buf);
    if (!yes && head == 0 && mine.n) yes = true; /* in the middle of a character */
    if (!yes) used = head;
    for (size_t i = l->from; !yes && next_sibling(l, text, &i, &other);) {
        size_t k = flatten(other, buf + used);
        if (k > head && memcmp(buf, buf + used, head) == 0) rest[count++] = (lr_str){buf + used + head, k - head};
        used += k;
    }
    left work = {.g = m->g, .s = rest, .n = count, .steps = 100000};
    if (!yes) yes = other_way(&work, d, rest, count, 0);
    lr_free(buf);
    lr_free(rest);
    return yes;
}

/* ---- candidates ---- */

static uint32_t child(const tnode *node, uint32_t v, unsigned byte)
{
    for (uint32_t c = v + 1; c < node[v].skip; c = node[c].skip) {
        if (node[c].byte == byte) return c;
        if (node[c].byte > byte) break;
    }
    return 0;
}

static bool note(walker *k, uint32_t v)
{
    for (uint32_t i = 0; i < k->n_cand; i++) {
        if (k->cand[i] == v) return true;
    }
    if (k->n_cand == k->cap_cand) {
        uint32_t cap = k->cap_cand ? k->cap_cand * 2 : 32;
        uint32_t *p = lr_reallocarray(k->cand, cap, sizeof *p);
        if (!p) return lr_walk__no_memory(k->g);
        k->cand = p;
        k->cap_cand = cap;
    }
    k->cand[k->n_cand++] = v;
    return true;
}

static bool spell(walker *k, uint32_t v, lr_str s, size_t i);

/* \uXXXX with digits of either case, from digit d on; then the low half of a pair, then the rest of the string. */
static bool spell_hex(walker *k, uint32_t v, uint32_t unit, int d, uint32_t low, lr_str s, size_t i)
{
    const tnode *node = k->t->node;
    if (d == 4) {
        if (!low) return spell(k, v, s, i);
        v = child(node, v, '\\');
        v = v ? child(node, v, 'u') : 0;
        return !v || spell_hex(k, v, low, 0, 0, s, i);
    }
    unsigned x = unit >> (12 - 4 * d) & 15;
    uint32_t a = child(node, v, x < 10 ? '0' + x : 'a' + x - 10), b = x < 10 ? 0 : child(node, v, 'A' + x - 10);
    return (!a || spell_hex(k, a, unit, d + 1, low, s, i)) && (!b || spell_hex(k, b, unit, d + 1, low, s, i));
}

/* Notes the nodes below v that spell the string's inside from i on in any way, and its closing quote. */
static bool spell(walker *k, uint32_t v, lr_str s, size_t i)
{
    static const char from[] = "\"\\/\b\f\n\r\t", to[] = "\"\\/bfnrt";
    const tnode *node = k->t->node;
    if (k->narrow && node[v].token >= 0 && !note(k, v)) return false;
    if (node[v].skip == v + 1) return true;
    if (i >= s.n) {
        uint32_t q = child(node, v, '"');
        return !q || note(k, q);
    }
    uint32_t c = next_char(s, &i), raw = v;
    if (c == NO_CHAR) return true;
    char utf8[4];
    size_t n = lr_char_put(c, utf8);
    for (size_t b = 0; b < n && (raw || b == 0); b++) raw = child(node, raw, (uint8_t)utf8[b]);
    if (raw && !spell(k, raw, s, i)) return false;
    uint32_t esc = child(node, v, '\\');
    if (!esc) return true;
    const char *at = c && c < 0x80 ? strchr(from, (int)c) : NULL;
    uint32_t q = at ? child(node, esc, (uint8_t)to[at - from]) : 0;
    if (q && !spell(k, q, s, i)) return false;
    q = child(node, esc, 'u');
    if (!q) return true;
    if (c < 0x10000) return spell_hex(k, q, c, 0, 0, s, i);
    return spell_hex(k, q, 0xD800 + ((c - 0x10000) >> 10), 0, 0xDC00 + ((c - 0x10000) & 0x3FF), s, i);
}

/* Whether the rule of d, inside a string, ends with that string's closing quote. */
static bool ends_with_quote(lr_grammar *g, uint32_t d)
{
    uint32_t t = lr_dfa__trans(g, d, g->n->cls['"']);
    return t != D_DEAD && g->d[t].flags & D_ENDS;
}

lr_doubt lr_unique__doubt(walker *k, uint32_t d)
{
    lr_matcher *m = k->m;
    k->n_cand = 0;
    k->narrow = k->g->d[d].flags & D_NARROW;
    const char *text = lr_matcher__join_text(m, (lr_str){"", 0});
    const jscan *s = text ? scan_matcher(m) : NULL;
    if (!s) {
        lr_walk__no_memory(k->g);
        return LR_DOUBT_ALL;
    }
    if (s->depth == 0) return LR_DOUBT_NONE;
    if (!s->in_string && s->depth <= LR_G_MAX_LEVELS) {
        bool first = true; /* of all that is being written */
        for (uint32_t i = 0; i < s->depth && first; i++) first = s->level[i].part == s->level[i].from;
        if (first) return LR_DOUBT_NONE;
    }
    if (s->depth > LR_G_MAX_LEVELS || !s->in_string || s->escaped || !ends_with_quote(k->g, d)) return LR_DOUBT_ALL;
    const struct jlevel *l = &s->level[s->depth - 1];
    lr_str mine = trim(text, l->part, s->n), other;
    if (mine.n == 0 || mine.s[0] != '"') return LR_DOUBT_ALL;
    mine = (lr_str){mine.s + 1, (size_t)(text + s->n - mine.s) - 1}; /* blanks at its end belong to it */
    for (size_t i = 0; i < mine.n;) {
        if (next_char(mine, &i) == NO_CHAR) return LR_DOUBT_ALL;
    }
    for (size_t i = l->from, at; next_sibling(l, text, &i, &other);) {
        if (other.n < 2 || other.s[0] != '"' || !begins_with(inside(other), mine, &at)) continue;
        if (!spell(k, 0, inside(other), at)) return LR_DOUBT_ALL;
    }
    return k->n_cand ? LR_DOUBT_SOME : LR_DOUBT_NONE;
}
