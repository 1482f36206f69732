/* lua_matcher.c - binds matchers: one text on its way through a grammar.
 *
 * A hole's function is called as fn(id, text) with the text so far, and returns a list of strings. It runs inside a
 * step or a method, so it cannot yield; an error in it is the error of what asked.
 */
#include "base/clock.h"
#include "base/mem.h"
#include "lua/lua_grammar_int.h"
#include <string.h>

#define MAX_STRINGS 200000
#define MAX_BYTES   ((size_t)32 << 20)

/* ---- holes ---- */

/* Lives in C memory, as a request may outlive its Lua objects. */
typedef struct holes {
    lua_State *L; /* the main state; the function is called in the state of the step or method */
    int ref;      /* registry: the function */
    char *text;   /* the strings last given */
    lr_str *s;
    size_t cap_text, cap_s;
} holes;

static lua_State *calling; /* the state of the method that runs now */

static lua_State *main_state(lua_State *L)
{
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    lua_State *m = lua_tothread(L, -1);
    lua_pop(L, 1);
    return m;
}

static void holes_free(void *user)
{
    holes *h = user;
    luaL_unref(h->L, LUA_REGISTRYINDEX, h->ref);
    lr_free(h->text);
    lr_free(h->s);
    lr_free(h);
}

static void *holes_dup(void *user)
{
    const holes *h = user;
    holes *c = lr_calloc(1, sizeof *c);
    if (!c) return NULL;
    c->L = h->L;
    lua_rawgeti(h->L, LUA_REGISTRYINDEX, h->ref);
    c->ref = luaL_ref(h->L, LUA_REGISTRYINDEX);
    return c;
}

static bool grow(void **p, size_t *cap, size_t need)
{
    if (need <= *cap) return true;
    void *q = lr_realloc(*p, need + need / 2 + 64);
    if (!q) return false;
    *p = q;
    *cap = need + need / 2 + 64;
    return true;
}

/* Copies the list on the top of the stack. */
static int copy_strings(lua_State *L, holes *h, size_t *n, lr_error *err)
{
    if (!lua_istable(L, -1))
        return lr_fail(err, LR_ESCRIPT, "its function returned %s, not a list of strings", luaL_typename(L, -1));
    size_t count = (size_t)lua_rawlen(L, -1), used = 0;
    if (count > MAX_STRINGS) return lr_fail(err, LR_ELIMIT, "its function returned more than %d strings", MAX_STRINGS);
    if (!grow((void **)&h->s, &h->cap_s, (count + 1) * sizeof *h->s)) return lr_fail(err, LR_ENOMEM, "no memory");
    for (size_t i = 0; i < count; i++) {
        lua_rawgeti(L, -1, (lua_Integer)i + 1);
        size_t len;
        const char *s = lua_type(L, -1) == LUA_TSTRING ? lua_tolstring(L, -1, &len) : NULL;
        if (!s) {
            lr_fail(err, LR_ESCRIPT, "its function returned a list with a %s at %zu", luaL_typename(L, -1), i + 1);
        } else if (used + len > MAX_BYTES) {
            lr_fail(err, LR_ELIMIT, "its function returned more than %zu MB", MAX_BYTES >> 20);
        } else if (!grow((void **)&h->text, &h->cap_text, used + len + 1)) {
            lr_fail(err, LR_ENOMEM, "no memory");
        } else {
            memcpy(h->text + used, s, len);
            h->s[i].n = len;
            used += len;
        }
        lua_pop(L, 1);
        if (err->code) return err->code;
    }
    for (size_t i = 0, at = 0; i < count; at += h->s[i++].n) h->s[i].s = h->text + at;
    *n = count;
    return 0;
}

int lr_lua_ask(lua_State *L, int n_args, lr_error *err)
{
    static const char yield[] = "attempt to yield";
    int rc = lr_lua_call_limited(L, n_args, 1, &lr_lua_step_limits, err);
    if (rc && strncmp(err->text, yield, sizeof yield - 1) == 0)
        return lr_fail(err, LR_ESCRIPT, "its function cannot wait: it is called in the middle of a step");
    return rc;
}

static int ask(void *user, int id, lr_str text, const lr_str **strings, size_t *n, lr_error *err)
{
    holes *h = user;
    lua_State *L = calling ? calling : lr_lua_step_state();
    if (!L) L = h->L;
    err->code = 0;
    if (!lua_checkstack(L, 8)) return lr_fail(err, LR_ENOMEM, "no room on Lua's stack");
    lua_rawgeti(L, LUA_REGISTRYINDEX, h->ref);
    lua_pushinteger(L, id);
    lua_pushlstring(L, text.s, text.n);
    int rc = lr_lua_ask(L, 2, err);
    if (rc) return rc;
    rc = copy_strings(L, h, n, err);
    lua_pop(L, 1);
    *strings = h->s;
    return rc;
}

/* ---- matchers ---- */

static int matcher_close(lua_State *L)
{
    lr_matcher **m = luaL_checkudata(L, 1, LR_LUA_MATCHER);
    lr_matcher_free(*m);
    *m = NULL;
    return 0;
}

lr_matcher *lr_lua_check_matcher(lua_State *L, int idx)
{
    return *(lr_matcher **)lr_lua_check_open(L, idx, LR_LUA_MATCHER, "matcher");
}

static lr_matcher **new_matcher(lua_State *L)
{
    lr_matcher **m = lua_newuserdatauv(L, sizeof *m, 1);
    *m = NULL;
    luaL_setmetatable(L, LR_LUA_MATCHER);
    return m;
}

static lua_State *enter(lua_State *L)
{
    lua_State *before = calling;
    calling = L;
    return before;
}

/* matcher(grammar, vocab, { hole = function, strip_space = boolean }) -> matcher; nil, text, code */
static int core_matcher(lua_State *L)
{
    lr_grammar *g = lr_lua_check_grammar(L, 1);
    struct lr_vocab *v = lr_lua_check_vocab(L, 2);
    lr_matcher_options o = {.strip_space = lr_lua_opt_bool(L, 3, "strip_space", false)};
    lr_error err;
    lr_grammar_trie *t;
    lua_settop(L, 3);
    lr_matcher **m = new_matcher(L);
    if (lua_istable(L, 3) && lua_getfield(L, 3, "hole") != LUA_TNIL) {
        luaL_argcheck(L, lua_isfunction(L, -1), 3, "hole: function expected");
        holes *h = lr_calloc(1, sizeof *h);
        if (!h) return luaL_error(L, "not enough memory");
        h->L = main_state(L);
        h->ref = luaL_ref(L, LUA_REGISTRYINDEX);
        o.hole = ask;
        o.hole_user = h;
        o.hole_dup = holes_dup;
        o.hole_free = holes_free;
    }
    int rc = lr_grammar_trie_get(&t, v, &err);
    if (!rc) {
        lua_State *before = enter(L);
        rc = lr_matcher_new(m, g, t, &o, &err);
        calling = before;
        lr_grammar_trie_unref(t);
    }
    if (rc && o.hole_user) holes_free(o.hole_user);
    if (rc) return lr_lua_fail(L, &err);
    lua_settop(L, 4);
    return 1;
}

/* m:copy() -> matcher; nil, text, code */
static int matcher_copy(lua_State *L)
{
    lr_matcher *o = lr_lua_check_matcher(L, 1);
    lr_error err;
    return lr_matcher_copy(new_matcher(L), o, &err) ? lr_lua_fail(L, &err) : 1;
}

/* Room for a mask, in a userdata that is left on the stack. */
static uint32_t *new_mask(lua_State *L, const lr_matcher *m)
{
    return lua_newuserdatauv(L, (lr_matcher_words(m) + 1) * sizeof(uint32_t), 0);
}

/* The mask into bits; NULL, with three results pushed, on failure. */
static const uint32_t *get_mask(lua_State *L, lr_matcher *m, uint32_t *bits, size_t *n)
{
    lr_error err;
    lua_State *before = enter(L);
    int rc = lr_matcher_mask(m, bits, n, &err);
    calling = before;
    if (!rc) return bits;
    lr_lua_fail(L, &err);
    return NULL;
}

/* m:allowed() -> list of the ids that may come next; nil, text, code */
static int matcher_allowed(lua_State *L)
{
    lr_matcher *m = lr_lua_check_matcher(L, 1);
    size_t n;
    const uint32_t *bits = get_mask(L, m, new_mask(L, m), &n);
    if (!bits) return 3;
    lua_createtable(L, (int)n, 0);
    lua_Integer k = 0;
    for (size_t i = 0; i < lr_matcher_words(m); i++) {
        for (uint32_t w = bits[i]; w; w &= w - 1) {
            lua_pushinteger(L, (lua_Integer)(32 * i) + __builtin_ctz(w));
            lua_rawseti(L, -2, ++k);
        }
    }
    return 1;
}

/* m:count() -> number of tokens that may come next, processor seconds that it took to find them; nil, text, code */
static int matcher_count(lua_State *L)
{
    lr_matcher *m = lr_lua_check_matcher(L, 1);
    lr_token_mask *t;
    lr_error err;
    lua_State *before = enter(L);
    const int64_t from = lr_clock_ns(CLOCK_THREAD_CPUTIME_ID);
    int rc = lr_matcher_share_mask(m, 0, &t, &err);
    const int64_t took = lr_clock_ns(CLOCK_THREAD_CPUTIME_ID) - from;
    calling = before;
    if (rc) return lr_lua_fail(L, &err);
    lua_Integer n = (lua_Integer)t->n;
    lr_token_mask_unref(t);
    lua_pushinteger(L, n);
    lua_pushnumber(L, 1e-9 * (double)took);
    return 2;
}

static int32_t check_token(lua_State *L, int idx)
{
    lua_Integer v = luaL_checkinteger(L, idx);
    return v >= INT32_MIN && v <= INT32_MAX ? (int32_t)v : -1;
}

/* m:allows(id) -> boolean */
static int matcher_allows(lua_State *L)
{
    lr_matcher *m = lr_lua_check_matcher(L, 1);
    int32_t id = check_token(L, 2);
    lua_State *before = enter(L);
    bool yes = lr_matcher_allows(m, id);
    calling = before;
    lua_pushboolean(L, yes);
    return 1;
}

/* m:in_mask(id) -> whether the mask of the tokens that may come next has it; nil, text, code */
static int matcher_in_mask(lua_State *L)
{
    lr_matcher *m = lr_lua_check_matcher(L, 1);
    int32_t id = check_token(L, 2);
    const uint32_t *bits = get_mask(L, m, new_mask(L, m), NULL);
    if (!bits) return 3;
    lua_pushboolean(L, (size_t)id / 32 < lr_matcher_words(m) && bits[id / 32] >> (id % 32) & 1);
    return 1;
}

/* m:accept(id) -> true; nil, text, code */
static int matcher_accept(lua_State *L)
{
    lr_matcher *m = lr_lua_check_matcher(L, 1);
    int32_t id = check_token(L, 2);
    lr_error err;
    lua_State *before = enter(L);
    int rc = lr_matcher_accept(m, id, &err);
    calling = before;
    if (rc) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

/* m:accept_text(text) -> true; nil, text, code, number of bytes that would be taken. All or nothing; one token for
 * rollback. */
static int matcher_accept_text(lua_State *L)
{
    lr_matcher *m = lr_lua_check_matcher(L, 1), *probe = NULL;
    size_t n, good = 0;
    const char *s = luaL_checklstring(L, 2, &n);
    lr_error err, other;
    lua_State *before = enter(L);
    int rc = lr_matcher_accept_bytes(m, s, n, &err);
    if (rc && lr_matcher_copy(&probe, m, &other) == 0) {
        while (good < n && lr_matcher_accept_bytes(probe, s + good, 1, &other) == 0) good++;
        lr_matcher_free(probe);
    }
    calling = before;
    if (!rc) {
        lua_pushboolean(L, 1);
        return 1;
    }
    lr_lua_fail(L, &err);
    lua_pushinteger(L, (lua_Integer)good);
    return 4;
}

static int matcher_can_end(lua_State *L)
{
    lua_pushboolean(L, lr_matcher_can_end(lr_lua_check_matcher(L, 1)));
    return 1;
}

static int matcher_done(lua_State *L)
{
    lua_pushboolean(L, lr_matcher_done(lr_lua_check_matcher(L, 1)));
    return 1;
}

/* m:rollback(n) -> true; nil, text, code */
static int matcher_rollback(lua_State *L)
{
    lr_matcher *m = lr_lua_check_matcher(L, 1);
    lua_Integer n = luaL_checkinteger(L, 2);
    luaL_argcheck(L, n >= 0, 2, "negative");
    lr_error err;
    if (lr_matcher_rollback(m, (size_t)n, &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

static int matcher_taken(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)lr_matcher_taken(lr_lua_check_matcher(L, 1)));
    return 1;
}

/* m:forced() -> bytes that must come next, at most 1024 */
static int matcher_forced(lua_State *L)
{
    char buf[1024];
    lr_matcher *m = lr_lua_check_matcher(L, 1);
    lua_State *before = enter(L);
    size_t n = lr_matcher_forced(m, buf, sizeof buf);
    calling = before;
    lua_pushlstring(L, buf, n);
    return 1;
}

void lr_lua_open_matcher(lua_State *L)
{
    static const luaL_Reg methods[] = {{"copy", matcher_copy},
                                       {"allowed", matcher_allowed},
                                       {"count", matcher_count},
                                       {"allows", matcher_allows},
                                       {"in_mask", matcher_in_mask},
                                       {"accept", matcher_accept},
                                       {"accept_text", matcher_accept_text},
                                       {"can_end", matcher_can_end},
                                       {"done", matcher_done},
                                       {"rollback", matcher_rollback},
                                       {"taken", matcher_taken},
                                       {"forced", matcher_forced},
                                       {NULL, NULL}};
    lr_lua_class(L, LR_LUA_MATCHER, methods, matcher_close);
    lua_pushcfunction(L, core_matcher);
    lua_setfield(L, -2, "matcher");
    lr_lua_open_pieces(L);
}
