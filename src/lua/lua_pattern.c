/* lua_pattern.c - string.find, match, gmatch and gsub as the Lua manual defines them (6.4.1), with a limit on the work.
 *
 * Lua's own ones can run for hours on a short text, and no hook stops a C function. Here each call has so many steps (a
 * step: one item of the pattern tried at one place); one more is an error, as is the end of the time of a limited call.
 * The sandbox has these only; elsewhere Lua's own ones do the work unless a time limit hangs over it (lua_bounded.c).
 *
 * The matcher goes through the pattern in a loop where there is nothing to come back to, and calls itself where there
 * is: captures, and items that may match more or less. The depth of these calls is bounded as in Lua.
 */
#define _GNU_SOURCE /* memmem */
#include "lua/lua_int.h"
#include <ctype.h>
#include <string.h>

enum { MAX_CAPTURES = 32, MAX_DEPTH = 200, OPEN = -1, PLACE = -2, LOOK_EVERY = 4096 /* steps */ };

#define GMATCH "llmrun.gmatch"

typedef struct capture {
    const char *at;
    ptrdiff_t len; /* OPEN: not closed yet; PLACE: a position capture */
} capture;

typedef struct matcher {
    lua_State *L;
    const char *text, *text_end, *pattern_end;
    lua_Integer steps, limit, look_at; /* look_at: the steps at which the time is looked at next */
    int depth, n;
    capture cap[MAX_CAPTURES];
} matcher;

static const char *match(matcher *m, const char *s, const char *p);

static void look(matcher *m)
{
    if (m->steps > m->limit) luaL_error(m->L, "pattern matching took more than %I steps", (LUAI_UACINT)m->limit);
    lr_lua_check_time(m->L);
    m->look_at = m->limit - m->steps > LOOK_EVERY ? m->steps + LOOK_EVERY : m->limit;
}

static void charge(matcher *m)
{
    if (++m->steps > m->look_at) look(m);
}

/* ---- single characters ---- */

/* The end of the item (a character, a class, a set) that begins at p. */
static const char *item_end(const matcher *m, const char *p)
{
    if (*p == '%') {
        if (p + 1 == m->pattern_end) luaL_error(m->L, "malformed pattern (ends with '%%')");
        return p + 2;
    }
    if (*p++ != '[') return p;
    if (p < m->pattern_end && *p == '^') p++;
    for (bool first = true;; first = false) { /* a ']' that comes first is a member */
        if (p == m->pattern_end) luaL_error(m->L, "malformed pattern (missing ']')");
        if (*p == ']' && !first) return p + 1;
        if (*p == '%' && ++p == m->pattern_end) luaL_error(m->L, "malformed pattern (missing ']')");
        p++;
    }
}

static bool in_class(int c, int class)
{
    bool in;
    switch (tolower(class)) {
    case 'a':
        in = isalpha(c);
        break;
    case 'c':
        in = iscntrl(c);
        break;
    case 'd':
        in = isdigit(c);
        break;
    case 'g':
        in = isgraph(c);
        break;
    case 'l':
        in = islower(c);
        break;
    case 'p':
        in = ispunct(c);
        break;
    case 's':
        in = isspace(c);
        break;
    case 'u':
        in = isupper(c);
        break;
    case 'w':
        in = isalnum(c);
        break;
    case 'x':
        in = isxdigit(c);
        break;
    default:
        return c == class;
    }
    return isupper(class) ? !in : in;
}

static int byte_at(const char *p) { return (unsigned char)*p; }

/* Whether c is in the set from p ('[') to end (behind ']'). */
static bool in_set(int c, const char *p, const char *end)
{
    bool yes = true;
    end--;
    if (*++p == '^') {
        yes = false;
        p++;
    }
    for (; p < end; p++) {
        if (*p == '%') {
            if (in_class(c, byte_at(++p))) return yes;
        } else if (p + 2 < end && p[1] == '-') {
            if (byte_at(p) <= c && c <= byte_at(p + 2)) return yes;
            p += 2;
        } else if (byte_at(p) == c) {
            return yes;
        }
    }
    return !yes;
}

/* Whether the item from p to end matches the character at s. */
static bool one(matcher *m, const char *s, const char *p, const char *end)
{
    charge(m);
    if (s >= m->text_end) return false;
    int c = byte_at(s);
    switch (*p) {
    case '.':
        return true;
    case '%':
        return in_class(c, byte_at(p + 1));
    case '[':
        m->steps += (end - p) / 8; /* a long set is more work */
        return in_set(c, p, end);
    default:
        return byte_at(p) == c;
    }
}

/* ---- items that match more ---- */

static const char *longest(matcher *m, const char *s, const char *p, const char *end)
{
    ptrdiff_t n = 0;
    while (one(m, s + n, p, end)) n++;
    for (; n >= 0; n--) {
        const char *r = match(m, s + n, end + 1);
        if (r) return r;
    }
    return NULL;
}

static const char *shortest(matcher *m, const char *s, const char *p, const char *end)
{
    for (;;) {
        const char *r = match(m, s, end + 1);
        if (r) return r;
        if (!one(m, s, p, end)) return NULL;
        s++;
    }
}

/* %bxy, p at x: the end of the balanced text at s, or NULL. */
static const char *balanced(matcher *m, const char *s, const char *p)
{
    if (m->pattern_end - p < 2) luaL_error(m->L, "malformed pattern (missing arguments to '%%b')");
    if (s >= m->text_end || *s != p[0]) return NULL;
    for (int open = 1; ++s < m->text_end;) {
        charge(m);
        if (*s == p[1]) {
            if (--open == 0) return s + 1;
        } else if (*s == p[0]) {
            open++;
        }
    }
    return NULL;
}

/* ---- captures ---- */

static const char *open_capture(matcher *m, const char *s, const char *p, ptrdiff_t what)
{
    if (m->n >= MAX_CAPTURES) luaL_error(m->L, "too many captures");
    m->cap[m->n++] = (capture){s, what};
    const char *r = match(m, s, p);
    if (!r) m->n--;
    return r;
}

static const char *close_capture(matcher *m, const char *s, const char *p)
{
    int i = m->n - 1;
    while (i >= 0 && m->cap[i].len != OPEN) i--;
    if (i < 0) luaL_error(m->L, "invalid pattern capture");
    m->cap[i].len = s - m->cap[i].at;
    const char *r = match(m, s, p);
    if (!r) m->cap[i].len = OPEN;
    return r;
}

static const capture *closed(const matcher *m, int digit)
{
    int i = digit - '1';
    if (i < 0 || i >= m->n || m->cap[i].len == OPEN) luaL_error(m->L, "invalid capture index %%%d", i + 1);
    return &m->cap[i];
}

static const char *again(matcher *m, const char *s, int digit)
{
    const capture *c = closed(m, digit);
    size_t n = c->len > 0 ? (size_t)c->len : 0;
    if (c->len == PLACE || (size_t)(m->text_end - s) < n || memcmp(c->at, s, n) != 0) return NULL;
    m->steps += (lua_Integer)n;
    return s + n;
}

/* ---- the matcher ---- */

static bool at_frontier(matcher *m, const char *s, const char *p, const char *end)
{
    int before = s == m->text ? 0 : byte_at(s - 1), here = s < m->text_end ? byte_at(s) : 0;
    charge(m);
    m->steps += (end - p) / 4;
    return !in_set(before, p, end) && in_set(here, p, end);
}

/* %b, %f and %1 at p: where the text goes on, with *next behind the item; NULL: no match. *is: it is one of them. */
static const char *special(matcher *m, const char *s, const char *p, const char **next, bool *is)
{
    *is = true;
    if (p[1] == 'b') {
        const char *r = balanced(m, s, p + 2);
        *next = p + 4;
        return r;
    }
    if (p[1] == 'f') {
        if (p + 2 == m->pattern_end || p[2] != '[') luaL_error(m->L, "missing '[' after '%%f' in pattern");
        *next = item_end(m, p + 2);
        return at_frontier(m, s, p + 2, *next) ? s : NULL;
    }
    if (isdigit(byte_at(p + 1))) {
        *next = p + 2;
        return again(m, s, p[1]);
    }
    *is = false;
    return s;
}

static const char *match_from(matcher *m, const char *s, const char *p)
{
    while (p < m->pattern_end) {
        charge(m);
        if (*p == '(') {
            bool place = p + 1 < m->pattern_end && p[1] == ')';
            return open_capture(m, s, p + 1 + place, place ? PLACE : OPEN);
        }
        if (*p == ')') return close_capture(m, s, p + 1);
        if (*p == '$' && p + 1 == m->pattern_end) return s == m->text_end ? s : NULL;
        if (*p == '%' && p + 1 < m->pattern_end) {
            bool is;
            const char *next = NULL, *r = special(m, s, p, &next, &is);
            if (!r) return NULL;
            if (is) {
                s = r;
                p = next;
                continue;
            }
        }
        const char *end = item_end(m, p);
        m->steps += (end - p) / 8;
        char how = end < m->pattern_end ? *end : '\0';
        if (how == '*') return longest(m, s, p, end);
        if (how == '-') return shortest(m, s, p, end);
        bool hit = one(m, s, p, end);
        if (how == '+') return hit ? longest(m, s + 1, p, end) : NULL;
        if (how == '?') {
            const char *r = hit ? match(m, s + 1, end + 1) : NULL;
            if (r) return r;
            p = end + 1;
            continue;
        }
        if (!hit) return NULL;
        s++;
        p = end;
    }
    return s;
}

static const char *match(matcher *m, const char *s, const char *p)
{
    if (m->depth == 0) luaL_error(m->L, "pattern too complex");
    m->depth--;
    const char *r = match_from(m, s, p);
    m->depth++;
    return r;
}

static const char *match_at(matcher *m, const char *s, const char *p)
{
    m->n = 0;
    m->depth = MAX_DEPTH;
    return match(m, s, p);
}

static void begin(matcher *m, lua_State *L, const char *s, size_t n, const char *p, size_t n_p)
{
    *m = (matcher){.L = L, .text = s, .text_end = s + n, .pattern_end = p + n_p};
    m->limit = lua_tointeger(L, lua_upvalueindex(1));
    m->look_at = m->limit < LOOK_EVERY ? m->limit : LOOK_EVERY;
}

/* Pushes capture i; the whole match (s to e) if there are none and i is 0. */
static void push_capture(matcher *m, int i, const char *s, const char *e)
{
    if (i >= m->n) {
        if (i != 0) luaL_error(m->L, "invalid capture index %%%d", i + 1);
        lua_pushlstring(m->L, s, (size_t)(e - s));
        return;
    }
    const capture *c = &m->cap[i];
    if (c->len == OPEN) luaL_error(m->L, "unfinished capture");
    if (c->len == PLACE)
        lua_pushinteger(m->L, c->at - m->text + 1);
    else
        lua_pushlstring(m->L, c->at, (size_t)c->len);
}

/* Pushes all captures; whole: the match itself if there are none. Returns their number. */
static int push_captures(matcher *m, const char *s, const char *e, bool whole)
{
    int n = m->n == 0 && whole ? 1 : m->n;
    luaL_checkstack(m->L, n, "too many captures");
    for (int i = 0; i < n; i++) push_capture(m, i, s, e);
    return n;
}

/* ---- find and match ---- */

/* First byte (0-based) that argument idx means; more than the length if there is none. */
static size_t start_of(lua_State *L, int idx, size_t len)
{
    lua_Integer i = luaL_optinteger(L, idx, 1);
    if (i > 0) return i - 1 > (lua_Integer)len ? len + 1 : (size_t)(i - 1);
    if (i == 0 || i < -(lua_Integer)len) return 0;
    return len - (size_t)-i;
}

static int find_plain(lua_State *L, const char *s, size_t n, size_t from, const char *p, size_t n_p)
{
    const char *at = n_p == 0 ? s + from : memmem(s + from, n - from, p, n_p);
    if (!at) return luaL_pushfail(L), 1;
    lua_pushinteger(L, at - s + 1);
    lua_pushinteger(L, at - s + (lua_Integer)n_p);
    return 2;
}

static bool has_specials(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] && strchr("^$*+?.([%-", p[i])) return true;
    return false;
}

static int find_or_match(lua_State *L, bool find)
{
    size_t n, n_p;
    const char *s = luaL_checklstring(L, 1, &n), *p = luaL_checklstring(L, 2, &n_p);
    size_t from = start_of(L, 3, n);
    if (from > n) return luaL_pushfail(L), 1;
    if (find && (lua_toboolean(L, 4) || !has_specials(p, n_p))) return find_plain(L, s, n, from, p, n_p);
    bool anchored = n_p > 0 && *p == '^';
    matcher m;
    p += anchored;
    begin(&m, L, s, n, p, n_p - anchored);
    for (const char *at = s + from; at <= s + n; at++) {
        const char *e = match_at(&m, at, p);
        if (e) {
            if (!find) return push_captures(&m, at, e, true);
            lua_pushinteger(L, at - s + 1);
            lua_pushinteger(L, e - s);
            return push_captures(&m, at, e, false) + 2;
        }
        if (anchored) break;
    }
    return luaL_pushfail(L), 1;
}

static int pattern_find(lua_State *L) { return find_or_match(L, true); }
static int pattern_match(lua_State *L) { return find_or_match(L, false); }

/* ---- gmatch ---- */

/* Text and pattern are user values 1 and 2. */
typedef struct gmatch_ud {
    size_t at, last; /* place in the text; end of the last match, + 1 (0 = none yet) */
} gmatch_ud;

static int gmatch_next(lua_State *L)
{
    size_t n, n_p;
    gmatch_ud *g = luaL_checkudata(L, lua_upvalueindex(2), GMATCH);
    lua_settop(L, 0);
    lua_getiuservalue(L, lua_upvalueindex(2), 1);
    lua_getiuservalue(L, lua_upvalueindex(2), 2);
    const char *s = lua_tolstring(L, 1, &n), *p = lua_tolstring(L, 2, &n_p);
    matcher m;
    begin(&m, L, s, n, p, n_p);
    for (; g->at <= n; g->at++) {
        const char *e = match_at(&m, s + g->at, p);
        if (!e || (size_t)(e - s) + 1 == g->last) continue; /* nothing again where the last match ended */
        const char *from = s + g->at;
        g->at = (size_t)(e - s);
        g->last = g->at + 1;
        return push_captures(&m, from, e, true);
    }
    return 0;
}

static int pattern_gmatch(lua_State *L)
{
    size_t n;
    luaL_checklstring(L, 1, &n);
    luaL_checkstring(L, 2);
    size_t from = start_of(L, 3, n);
    lua_settop(L, 2);
    lua_pushvalue(L, lua_upvalueindex(1));
    gmatch_ud *g = lua_newuserdatauv(L, sizeof *g, 2);
    *g = (gmatch_ud){from, 0};
    luaL_setmetatable(L, GMATCH);
    for (int i = 1; i <= 2; i++) {
        lua_pushvalue(L, i);
        lua_setiuservalue(L, -2, i);
    }
    lua_pushcclosure(L, gmatch_next, 2);
    return 1;
}

/* ---- gsub ---- */

/* Adds the replacement string at index 3, with captures for %0 to %9. */
static void add_template(matcher *m, luaL_Buffer *b, const char *s, const char *e)
{
    size_t n;
    const char *r = lua_tolstring(m->L, 3, &n), *end = r + n;
    while (r < end) {
        const char *percent = memchr(r, '%', (size_t)(end - r));
        if (!percent) percent = end;
        luaL_addlstring(b, r, (size_t)(percent - r));
        if (percent == end) return;
        r = percent + 1;
        if (r < end && *r == '%') {
            luaL_addchar(b, '%');
        } else if (r < end && *r == '0') {
            luaL_addlstring(b, s, (size_t)(e - s));
        } else if (r < end && isdigit(byte_at(r))) {
            push_capture(m, *r - '1', s, e);
            luaL_tolstring(m->L, -1, NULL); /* a place is a number */
            lua_remove(m->L, -2);
            luaL_addvalue(b);
        } else {
            luaL_error(m->L, "invalid use of '%%' in replacement string");
        }
        r++;
    }
}

/* Adds what a match becomes. */
static void add_replacement(matcher *m, luaL_Buffer *b, const char *s, const char *e, int type)
{
    lua_State *L = m->L;
    if (type == LUA_TFUNCTION) {
        lua_pushvalue(L, 3);
        lua_call(L, push_captures(m, s, e, true), 1);
    } else if (type == LUA_TTABLE) {
        push_capture(m, 0, s, e);
        lua_gettable(L, 3);
    } else {
        add_template(m, b, s, e);
        return;
    }
    if (!lua_toboolean(L, -1)) {
        lua_pop(L, 1);
        luaL_addlstring(b, s, (size_t)(e - s));
    } else if (!lua_isstring(L, -1)) {
        luaL_error(L, "invalid replacement value (a %s)", luaL_typename(L, -1));
    } else {
        luaL_addvalue(b);
    }
}

static int pattern_gsub(lua_State *L)
{
    size_t n, n_p;
    const char *s = luaL_checklstring(L, 1, &n), *p = luaL_checklstring(L, 2, &n_p), *last = NULL, *at = s;
    int type = lua_type(L, 3);
    lua_Integer most = luaL_optinteger(L, 4, (lua_Integer)n + 1), count = 0;
    luaL_argexpected(L, type == LUA_TNUMBER || type == LUA_TSTRING || type == LUA_TFUNCTION || type == LUA_TTABLE, 3,
                     "string/function/table");
    if (type == LUA_TNUMBER) lua_tolstring(L, 3, NULL);
    bool anchored = n_p > 0 && *p == '^';
    matcher m;
    luaL_Buffer b;
    p += anchored;
    begin(&m, L, s, n, p, n_p - anchored);
    luaL_buffinit(L, &b);
    while (count < most) {
        const char *e = match_at(&m, at, p);
        if (e && e != last) {
            count++;
            add_replacement(&m, &b, at, e, type);
            at = last = e;
        } else if (at < s + n) {
            luaL_addchar(&b, *at++);
        } else {
            break;
        }
        if (anchored) break;
    }
    luaL_addlstring(&b, at, (size_t)(s + n - at));
    luaL_pushresult(&b);
    lua_pushinteger(L, count);
    return 2;
}

void lr_lua_push_patterns(lua_State *L, lua_Integer steps)
{
    static const luaL_Reg fns[] = {{"find", pattern_find},
                                   {"match", pattern_match},
                                   {"gmatch", pattern_gmatch},
                                   {"gsub", pattern_gsub},
                                   {NULL, NULL}};
    luaL_newmetatable(L, GMATCH);
    lua_pop(L, 1);
    luaL_newlibtable(L, fns);
    lua_pushinteger(L, steps);
    luaL_setfuncs(L, fns, 1);
}

/* patterns(steps) -> { find, match, gmatch, gsub } that take at most so many steps a call */
static int core_patterns(lua_State *L)
{
    lua_Integer steps = luaL_checkinteger(L, 1);
    luaL_argcheck(L, steps > 0, 1, "a number of steps expected");
    lr_lua_push_patterns(L, steps);
    return 1;
}

void lr_lua_open_pattern(lua_State *L)
{
    lua_pushcfunction(L, core_patterns);
    lua_setfield(L, -2, "patterns");
}
