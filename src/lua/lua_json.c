/* lua_json.c - JSON (RFC 8259) to Lua values and back; lua/llmrun/json.lua has what users see and the words for it.
 *
 *   object    a table with the metatable object_mt, or, if order matters, one of its own whose __keys lists its keys
 *   array     a table with the metatable array_mt (so that an empty one stays an array)
 *   null      json.null (a light userdata, the NULL pointer: cjson's too)
 *   number    an integer if it is written as one and has 64 bits, else a float
 *
 * The reader is strict: UTF-8 only, no lone surrogates, nothing behind the value, no number beyond a float's range.
 * Both ways have limits of nesting; the reader also one of values, since 64 MiB of "[],[]," would be gigabytes of
 * tables. Metamethods are never called.
 */
#include "lua/lua_int.h"
#include "base/mem.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH  512
#define MAX_VALUES 1000000

static char array_mark, object_mark; /* addresses: registry keys of the two metatables */

/* Length of the UTF-8 character at s (n bytes left), 0 if it is none. */
static size_t utf8_char(const unsigned char *s, size_t n)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (s[0] < 0x80) return 1;
    size_t k = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || k > n) return 0;
    uint32_t c = s[0] & (0xffu >> (k + 1));
    for (size_t i = 1; i < k; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
        c = c << 6 | (s[i] & 0x3fu);
    }
    return c >= least[k] && c <= 0x10ffff && (c < 0xd800 || c > 0xdfff) ? k : 0;
}

/* ---- reading ---- */

typedef struct reader {
    lua_State *L;
    const char *s; /* zero-terminated behind n bytes */
    size_t n, i;
    lua_Integer left; /* values that may still come */
    int depth;
    bool ordered;
    const char *what; /* the error */
    size_t at;
} reader;

static bool bad(reader *r, const char *what, size_t at)
{
    r->what = what;
    r->at = at;
    return false;
}

static void skip_blanks(reader *r)
{
    while (r->i < r->n && (r->s[r->i] == ' ' || r->s[r->i] == '\n' || r->s[r->i] == '\t' || r->s[r->i] == '\r')) r->i++;
}

static int hex4(const char *s)
{
    int v = 0;
    for (int k = 0; k < 4; k++) {
        char c = s[k];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0) return -1;
        v = v << 4 | d;
    }
    return v;
}

static void add_char(luaL_Buffer *b, uint32_t c)
{
    char u[4];
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t k = n - 1; k > 0; k--, c >>= 6) u[k] = (char)(0x80 | (c & 0x3f));
    u[0] = (char)(n == 1 ? c : lead[n] | c);
    luaL_addlstring(b, u, n);
}

/* Reads the escape at r->i (behind the backslash) into b. */
static bool read_escape(reader *r, luaL_Buffer *b)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *p = r->i < r->n && r->s[r->i] ? strchr(from, r->s[r->i]) : NULL;
    if (p) {
        luaL_addchar(b, to[p - from]);
        r->i++;
        return true;
    }
    if (r->s[r->i] != 'u' || r->i + 5 > r->n) return bad(r, "bad escape", r->i - 1);
    int c = hex4(r->s + r->i + 1);
    if (c < 0) return bad(r, "bad escape", r->i - 1);
    size_t at = r->i - 1;
    r->i += 5;
    if (c >= 0xdc00 && c <= 0xdfff) return bad(r, "lone surrogate", at);
    if (c >= 0xd800 && c <= 0xdbff) {
        int low = r->i + 6 <= r->n && r->s[r->i] == '\\' && r->s[r->i + 1] == 'u' ? hex4(r->s + r->i + 2) : -1;
        if (low < 0xdc00 || low > 0xdfff) return bad(r, "lone surrogate", at);
        r->i += 6;
        c = 0x10000 + ((c & 0x3ff) << 10) + (low & 0x3ff);
    }
    add_char(b, (uint32_t)c);
    return true;
}

/* Goes over plain characters; false at a bad one. Stops at a quote or backslash. */
static bool read_plain(reader *r)
{
    while (r->i < r->n) {
        unsigned char c = (unsigned char)r->s[r->i];
        if (c == '"' || c == '\\') return true;
        if (c < 0x20) return bad(r, "control character in a string", r->i);
        size_t k = c < 0x80 ? 1 : utf8_char((const unsigned char *)r->s + r->i, r->n - r->i);
        if (!k) return bad(r, "bytes that are not UTF-8", r->i);
        r->i += k;
    }
    return bad(r, "string without an end", r->i);
}

/* At the opening quote; pushes the text. */
static bool read_string(reader *r)
{
    size_t from = ++r->i;
    if (!read_plain(r)) return false;
    if (r->s[r->i] == '"') {
        lua_pushlstring(r->L, r->s + from, r->i++ - from);
        return true;
    }
    luaL_Buffer b;
    luaL_buffinit(r->L, &b);
    for (;;) {
        luaL_addlstring(&b, r->s + from, r->i - from);
        if (r->s[r->i++] == '"') break;
        if (!read_escape(r, &b)) return false;
        from = r->i;
        if (!read_plain(r)) return false;
    }
    luaL_pushresult(&b);
    return true;
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static bool read_number(reader *r)
{
    const char *s = r->s + r->i, *p = s;
    bool whole = true;
    if (*p == '-') p++;
    if (*p == '0')
        p++;
    else if (is_digit(*p))
        while (is_digit(*p)) p++;
    else
        return bad(r, "unexpected text", r->i);
    if (is_digit(*p)) return bad(r, "number with a leading zero", r->i);
    if (*p == '.') {
        whole = false;
        if (!is_digit(*++p)) return bad(r, "bad number", r->i);
        while (is_digit(*p)) p++;
    }
    if (*p == 'e' || *p == 'E') {
        whole = false;
        p++;
        if (*p == '+' || *p == '-') p++;
        if (!is_digit(*p)) return bad(r, "bad number", r->i);
        while (is_digit(*p)) p++;
    }
    char number[64]; /* the usual one is converted from a copy, so that the cost is its own length's in any library */
    if ((size_t)(p - s) < sizeof number) {
        memcpy(number, s, (size_t)(p - s));
        number[p - s] = 0;
        s = number;
    }
    if (whole && s == number && strlen(s) < 21) {
        errno = 0;
        long long v = strtoll(s, NULL, 10);
        if (errno == 0) {
            lua_pushinteger(r->L, (lua_Integer)v);
            r->i = (size_t)(p - r->s);
            return true;
        }
    }
    double v = strtod(s, NULL);
    if (!isfinite(v)) return bad(r, "number out of range", r->i);
    lua_pushnumber(r->L, v);
    r->i = (size_t)(p - r->s);
    return true;
}

static bool read_value(reader *r);

static bool take(reader *r, lua_Integer n)
{
    r->left -= n;
    return r->left >= 0 || bad(r, "too many values", r->i);
}

static bool read_array(reader *r)
{
    lua_State *L = r->L;
    lua_Integer n = 0;
    lua_newtable(L);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &array_mark);
    lua_setmetatable(L, -2);
    r->i++;
    skip_blanks(r);
    if (r->s[r->i] == ']') return r->i++, true;
    for (;;) {
        if (!read_value(r)) return false;
        lua_rawseti(L, -2, ++n);
        skip_blanks(r);
        char c = r->s[r->i];
        if (c == ']') return r->i++, true;
        if (c != ',') return bad(r, "',' or ']' expected", r->i);
        r->i++;
    }
}

/* One member into the table at t; its key goes into the list at t + 1 if there is one. */
static bool read_member(reader *r, int t, lua_Integer *n)
{
    lua_State *L = r->L;
    skip_blanks(r);
    if (r->s[r->i] != '"') return bad(r, "a key expected", r->i);
    if (!read_string(r)) return false;
    skip_blanks(r);
    if (r->s[r->i] != ':') return bad(r, "':' expected", r->i);
    r->i++;
    if (r->ordered) {
        lua_pushvalue(L, -1);
        if (lua_rawget(L, t) == LUA_TNIL) { /* a key that comes again keeps its first place, the last value counts */
            lua_pushvalue(L, -2);
            lua_rawseti(L, t + 1, ++*n);
        }
        lua_pop(L, 1);
    }
    if (!read_value(r)) return false;
    lua_rawset(L, t);
    return true;
}

static bool read_object(reader *r)
{
    lua_State *L = r->L;
    lua_Integer n = 0;
    if (r->ordered && !take(r, 2)) return false;
    lua_newtable(L);
    int t = lua_gettop(L);
    if (r->ordered) lua_newtable(L);
    r->i++;
    skip_blanks(r);
    if (r->s[r->i] == '}') {
        r->i++;
    } else {
        for (;;) {
            if (!read_member(r, t, &n)) return false;
            skip_blanks(r);
            char c = r->s[r->i];
            if (c != '}' && c != ',') return bad(r, "',' or '}' expected", r->i);
            r->i++;
            if (c == '}') break;
        }
    }
    if (r->ordered) {
        lua_createtable(L, 0, 1);
        lua_insert(L, -2);
        lua_setfield(L, -2, "__keys");
    } else {
        lua_rawgetp(L, LUA_REGISTRYINDEX, &object_mark);
    }
    lua_setmetatable(L, t);
    return true;
}

static bool read_word(reader *r, const char *word)
{
    size_t n = strlen(word);
    if (r->n - r->i < n || memcmp(r->s + r->i, word, n) != 0) return bad(r, "unexpected text", r->i);
    r->i += n;
    if (*word == 'n')
        lua_pushlightuserdata(r->L, NULL);
    else
        lua_pushboolean(r->L, *word == 't');
    return true;
}

static bool read_value(reader *r)
{
    if (!take(r, 1)) return false;
    skip_blanks(r);
    char c = r->s[r->i];
    if (c == '"') return read_string(r);
    if (c == 't') return read_word(r, "true");
    if (c == 'f') return read_word(r, "false");
    if (c == 'n') return read_word(r, "null");
    if (c != '{' && c != '[') return r->i < r->n ? read_number(r) : bad(r, "the text ends too soon", r->i);
    if (r->depth <= 0) return bad(r, "nested too deeply", r->i);
    if (!lua_checkstack(r->L, 10)) return bad(r, "nested too deeply", r->i);
    r->depth--;
    bool ok = c == '{' ? read_object(r) : read_array(r);
    r->depth++;
    return ok;
}

/* json_decode(text, { ordered = false, max_depth = 512, max_values = 1e6 }) -> value; nil, text, code */
static int json_decode(lua_State *L)
{
    reader r = {.L = L};
    r.s = luaL_checklstring(L, 1, &r.n);
    r.ordered = lr_lua_opt_bool(L, 2, "ordered", false);
    r.left = lr_lua_opt_int(L, 2, "max_values", MAX_VALUES);
    lua_Integer depth = lr_lua_opt_int(L, 2, "max_depth", MAX_DEPTH);
    r.depth = depth > MAX_DEPTH ? MAX_DEPTH : (int)depth;
    bool ok = read_value(&r);
    if (ok) {
        skip_blanks(&r);
        if (r.i == r.n) return 1;
        bad(&r, "text behind the value", r.i);
    }
    lua_pushnil(L);
    lua_pushfstring(L, "%s at byte %I", r.at >= r.n ? "the text ends too soon" : r.what, (LUAI_UACINT)(r.at + 1));
    if (r.left < 0) {
        lua_pop(L, 1);
        lua_pushliteral(L, "too many values");
    }
    lua_pushstring(L, r.left < 0 || strcmp(r.what, "nested too deeply") == 0 ? "limit" : "format");
    return 3;
}

/* ---- writing ---- */

#define BUFFER "llmrun.json_buffer"

/* The one text being written: kept for the next time if it is small. */
typedef struct writer {
    char *s;
    size_t n, cap;
    bool replace; /* bytes that are not UTF-8 become U+FFFD */
    int depth;
} writer;

static int writer_close(lua_State *L)
{
    writer *w = luaL_checkudata(L, 1, BUFFER);
    lr_free(w->s);
    *w = (writer){0};
    return 0;
}

static char *room(lua_State *L, writer *w, size_t n)
{
    if (w->cap - w->n < n) {
        size_t cap = w->cap ? w->cap : 1024;
        while (cap - w->n < n) cap *= 2;
        char *p = lr_realloc(w->s, cap);
        if (!p) luaL_error(L, "not enough memory for JSON");
        w->s = p;
        w->cap = cap;
    }
    return w->s + w->n;
}

static void put(lua_State *L, writer *w, const char *s, size_t n)
{
    memcpy(room(L, w, n), s, n);
    w->n += n;
}

static int put_escaped(char *out, unsigned char c)
{
    static const char plain[] = "\"\\\b\f\n\r\t", shown[] = "\"\\bfnrt";
    const char *p = c ? strchr(plain, c) : NULL;
    if (!p) return sprintf(out, "\\u%04x", c);
    out[0] = '\\';
    out[1] = shown[p - plain];
    return 2;
}

static void put_string(lua_State *L, writer *w, const char *s, size_t n)
{
    char *out = room(L, w, n * 6 + 2), *o = out;
    *o++ = '"';
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        size_t k = c < 0x80 ? 1 : utf8_char((const unsigned char *)s + i, n - i);
        if (c < 0x20 || c == '"' || c == '\\') {
            o += put_escaped(o, c);
        } else if (k) {
            memcpy(o, s + i, k);
            o += k;
        } else if (w->replace) {
            memcpy(o, "\xef\xbf\xbd", 3); // NOLINT(bugprone-not-null-terminated-result): a part of a string
            o += 3;
            k = 1;
        } else {
            luaL_error(L, "bytes that are not UTF-8 in a string, at byte %I", (LUAI_UACINT)(i + 1));
        }
        i += k;
    }
    *o++ = '"';
    w->n += (size_t)(o - out);
}

static void put_number(lua_State *L, writer *w, int idx)
{
    char *out = room(L, w, 40);
    if (lua_isinteger(L, idx)) {
        w->n += (size_t)sprintf(out, "%lld", (long long)lua_tointeger(L, idx));
        return;
    }
    double v = lua_tonumber(L, idx);
    if (!isfinite(v)) luaL_error(L, "JSON has no %s", isnan(v) ? "NaN" : "infinity");
    int n = 0;
    for (int digits = 15; digits <= 17; digits++) {
        n = sprintf(out, "%.*g", digits, v);
        if (strtod(out, NULL) == v) break;
    }
    if (!strpbrk(out, ".e")) n += sprintf(out + n, ".0");
    w->n += (size_t)n;
}

static void put_value(lua_State *L, writer *w, int idx);

enum kind { ARRAY, OBJECT, ORDERED };

/* What the table at idx is; for ORDERED its list of keys is pushed. */
static enum kind kind_of(lua_State *L, int idx)
{
    if (lua_getmetatable(L, idx)) {
        int mt = lua_gettop(L);
        lua_pushliteral(L, "__keys");
        if (lua_rawget(L, mt) == LUA_TTABLE) {
            lua_remove(L, mt);
            return ORDERED;
        }
        lua_pushliteral(L, "__jsontype");
        lua_rawget(L, mt);
        const char *name = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "";
        bool array = strcmp(name, "array") == 0, object = strcmp(name, "object") == 0;
        lua_settop(L, mt - 1);
        if (array || object) return array ? ARRAY : OBJECT;
    }
    return lua_rawlen(L, idx) > 0 ? ARRAY : OBJECT;
}

static void put_array(lua_State *L, writer *w, int idx)
{
    lua_Integer n = (lua_Integer)lua_rawlen(L, idx), count = 0;
    lua_pushnil(L);
    while (lua_next(L, idx)) {
        lua_pop(L, 1);
        lua_Integer k = lua_isinteger(L, -1) ? lua_tointeger(L, -1) : 0;
        if (k < 1 || k > n)
            luaL_error(L, "a table is neither a list nor an object (key %s)", luaL_tolstring(L, -1, NULL));
        count++;
    }
    if (count != n) luaL_error(L, "a list has holes (json.null stands for nothing)");
    put(L, w, "[", 1);
    for (lua_Integer i = 1; i <= n; i++) {
        if (i > 1) put(L, w, ",", 1);
        lua_rawgeti(L, idx, i);
        put_value(L, w, lua_gettop(L));
        lua_pop(L, 1);
    }
    put(L, w, "]", 1);
}

/* The key and value on the top of the stack, popped. */
static void put_member(lua_State *L, writer *w, bool first)
{
    int top = lua_gettop(L);
    size_t n;
    if (lua_type(L, top - 1) != LUA_TSTRING)
        luaL_error(L, "keys of an object are strings (key %s)", luaL_tolstring(L, top - 1, NULL));
    const char *key = lua_tolstring(L, top - 1, &n);
    if (!first) put(L, w, ",", 1);
    put_string(L, w, key, n);
    put(L, w, ":", 1);
    put_value(L, w, top);
    lua_settop(L, top - 2);
}

typedef struct name {
    const char *s;
    size_t n;
} name;

static int by_name(const void *a, const void *b)
{
    const name *x = a, *y = b;
    int c = memcmp(x->s, y->s, x->n < y->n ? x->n : y->n);
    return c ? c : x->n < y->n ? -1 : x->n > y->n;
}

/* Keys in the order of their bytes; those in the table `seen` (0: none) are left out. */
static void put_sorted(lua_State *L, writer *w, int idx, int seen, bool first)
{
    size_t count = 0, cap = 0;
    for (lua_pushnil(L); lua_next(L, idx); lua_pop(L, 1)) cap++;
    if (cap == 0) return;
    name *names = lua_newuserdatauv(L, cap * sizeof *names, 0);
    for (lua_pushnil(L); lua_next(L, idx); lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            luaL_error(L, "keys of an object are strings (key %s)", luaL_tolstring(L, -2, NULL));
        if (seen) {
            lua_pushvalue(L, -2);
            bool was = lua_rawget(L, seen) != LUA_TNIL;
            lua_pop(L, 1);
            if (was) continue;
        }
        names[count].s = lua_tolstring(L, -2, &names[count].n); /* the table keeps it */
        count++;
    }
    qsort(names, count, sizeof *names, by_name);
    for (size_t i = 0; i < count; i++) {
        lua_pushlstring(L, names[i].s, names[i].n);
        lua_pushvalue(L, -1);
        lua_rawget(L, idx);
        put_member(L, w, first && i == 0);
    }
    lua_pop(L, 1);
}

/* Keys of the list at -1 that are there, in its order, then others. */
static void put_ordered(lua_State *L, writer *w, int idx)
{
    int keys = lua_gettop(L);
    lua_newtable(L);
    lua_Integer n = (lua_Integer)lua_rawlen(L, keys), written = 0, there = 0;
    for (lua_Integer i = 1; i <= n; i++) {
        lua_rawgeti(L, keys, i);
        lua_pushvalue(L, -1);
        lua_rawget(L, keys + 1);
        bool again = !lua_isnil(L, -1);
        lua_pop(L, 1);
        lua_pushvalue(L, -1);
        if (again || lua_rawget(L, idx) == LUA_TNIL) {
            lua_settop(L, keys + 1);
            continue;
        }
        lua_pushvalue(L, -2);
        lua_pushboolean(L, 1);
        lua_rawset(L, keys + 1);
        put_member(L, w, written++ == 0);
    }
    for (lua_pushnil(L); lua_next(L, idx); lua_pop(L, 1)) there++;
    if (there > written) put_sorted(L, w, idx, keys + 1, written == 0);
}

static void put_table(lua_State *L, writer *w, int idx)
{
    int top = lua_gettop(L);
    if (++w->depth > MAX_DEPTH) luaL_error(L, "nested too deeply, or in a circle");
    luaL_checkstack(L, 16, "JSON");
    enum kind kind = kind_of(L, idx);
    if (kind == ARRAY) {
        put_array(L, w, idx);
    } else {
        put(L, w, "{", 1);
        if (kind == ORDERED)
            put_ordered(L, w, idx);
        else
            put_sorted(L, w, idx, 0, true);
        put(L, w, "}", 1);
    }
    w->depth--;
    lua_settop(L, top);
}

static void put_value(lua_State *L, writer *w, int idx)
{
    size_t n;
    const char *s;
    switch (lua_type(L, idx)) {
    case LUA_TSTRING:
        s = lua_tolstring(L, idx, &n);
        put_string(L, w, s, n);
        return;
    case LUA_TNUMBER:
        put_number(L, w, idx);
        return;
    case LUA_TBOOLEAN:
        if (lua_toboolean(L, idx))
            put(L, w, "true", 4);
        else
            put(L, w, "false", 5);
        return;
    case LUA_TTABLE:
        put_table(L, w, idx);
        return;
    case LUA_TLIGHTUSERDATA:
        if (!lua_touserdata(L, idx)) {
            put(L, w, "null", 4);
            return;
        }
    }
    luaL_error(L, "a %s can't be JSON", luaL_typename(L, idx));
}

static int encode_into(lua_State *L)
{
    writer *w = lua_touserdata(L, 2);
    put_value(L, w, 1);
    return 0;
}

/* json_encode(value [, replace]) -> text; nil, text. replace: bytes that are not UTF-8 become U+FFFD instead of an
 * error */
static int json_encode(lua_State *L)
{
    luaL_checkany(L, 1);
    writer *w = lua_touserdata(L, lua_upvalueindex(1));
    w->n = 0;
    w->depth = 0;
    w->replace = lua_toboolean(L, 2);
    lua_settop(L, 1);
    lua_pushcfunction(L, encode_into);
    lua_insert(L, 1);
    lua_pushlightuserdata(L, w);
    if (lua_pcall(L, 2, 0, 0) != LUA_OK) {
        lua_pushnil(L);
        lua_insert(L, -2);
        lua_pushliteral(L, "invalid");
        return 3;
    }
    lua_pushlstring(L, w->s, w->n);
    if (w->cap > 65536) {
        lr_free(w->s);
        w->s = NULL;
        w->n = w->cap = 0;
    }
    return 1;
}

static void new_mark(lua_State *L, const void *mark, const char *type, const char *field)
{
    lua_createtable(L, 0, 1);
    lua_pushstring(L, type);
    lua_setfield(L, -2, "__jsontype");
    lua_pushvalue(L, -1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, mark);
    lua_setfield(L, -2, field);
}

void lr_lua_open_json(lua_State *L)
{
    lr_lua_class(L, BUFFER, NULL, writer_close);
    new_mark(L, &array_mark, "array", "json_array_mt");
    new_mark(L, &object_mark, "object", "json_object_mt");
    lua_pushcfunction(L, json_decode);
    lua_setfield(L, -2, "json_decode");
    writer *w = lua_newuserdatauv(L, sizeof *w, 0);
    *w = (writer){0};
    luaL_setmetatable(L, BUFFER);
    lua_pushcclosure(L, json_encode, 1);
    lua_setfield(L, -2, "json_encode");
}
