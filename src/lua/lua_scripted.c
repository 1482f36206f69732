/* lua_scripted.c - binds the scripted model: a Lua function gives the logits.
 *
 * next(tokens) is called once for each row whose logits are wanted, with the list of ids up to and including it. It
 * returns a token id (which any sampler then draws), a table { [id] = logit, default = logit of the rest, -inf }, or
 * { row = list of all logits }. An error in it, or more than lr_lua_step_limits, fails the request; its text is kept
 * for whoever asks (script:last_error()).
 */
#include "base/mem.h"
#include "lua/lua_int.h"
#include "model/model.h"
#include <math.h>
#include <string.h>

/* What the callback needs; lives in userdata that the model's user value keeps. */
typedef struct script {
    int n_vocab;
    int ref; /* registry: { next, last error } */
} script;

static void fill(float *logits, int n, float x)
{
    for (int i = 0; i < n; i++) logits[i] = x;
}

static int32_t check_token(lua_State *L, int idx, int n_vocab)
{
    int ok;
    lua_Integer id = lua_tointegerx(L, idx, &ok);
    if (!ok || id < 0 || id >= n_vocab)
        luaL_error(L, "next: %s is no id of this vocabulary (0 to %d)", luaL_tolstring(L, idx, NULL), n_vocab - 1);
    return (int32_t)id;
}

static void read_row(lua_State *L, int idx, float *logits, int n_vocab)
{
    if (luaL_len(L, idx) != n_vocab)
        luaL_error(L, "next: a row of %d logits, but the vocabulary has %d tokens", (int)luaL_len(L, idx), n_vocab);
    for (int i = 0; i < n_vocab; i++) {
        lua_rawgeti(L, idx, i + 1);
        logits[i] = (float)luaL_checknumber(L, -1);
        lua_pop(L, 1);
    }
}

static void read_map(lua_State *L, int idx, float *logits, int n_vocab)
{
    lua_getfield(L, idx, "default");
    fill(logits, n_vocab, lua_isnil(L, -1) ? -INFINITY : (float)luaL_checknumber(L, -1));
    for (lua_pushnil(L); lua_next(L, idx); lua_pop(L, 1)) {
        if (lua_type(L, -2) == LUA_TSTRING && strcmp(lua_tostring(L, -2), "default") == 0) continue;
        logits[check_token(L, -2, n_vocab)] = (float)luaL_checknumber(L, -1);
    }
}

/* Protected: script, tokens, n, logits. */
static int call_next(lua_State *L)
{
    script *s = lua_touserdata(L, 1);
    float *logits = lua_touserdata(L, 4);
    lua_rawgeti(L, LUA_REGISTRYINDEX, s->ref);
    lua_rawgeti(L, -1, 1);
    lr_lua_push_ids(L, lua_touserdata(L, 2), (size_t)lua_tointeger(L, 3));
    lua_call(L, 1, 1);
    int r = lua_gettop(L);
    if (lua_istable(L, r)) {
        if (lua_getfield(L, r, "row") == LUA_TTABLE)
            read_row(L, lua_gettop(L), logits, s->n_vocab);
        else
            read_map(L, r, logits, s->n_vocab);
    } else {
        int32_t id = check_token(L, r, s->n_vocab);
        fill(logits, s->n_vocab, -INFINITY);
        logits[id] = 0;
    }
    return 0;
}

static int next_row(void *user, const int32_t *tokens, int n, float *logits)
{
    script *s = user;
    lua_State *L = lr_lua_step_state();
    if (!L || !lua_checkstack(L, 10)) return -1;
    lr_error err;
    lua_pushcfunction(L, call_next);
    lua_pushlightuserdata(L, s);
    lua_pushlightuserdata(L, (void *)(uintptr_t)tokens);
    lua_pushinteger(L, n);
    lua_pushlightuserdata(L, logits);
    if (lr_lua_call_limited(L, 4, 0, &lr_lua_step_limits, &err) == 0) return 0;
    lua_rawgeti(L, LUA_REGISTRYINDEX, s->ref);
    lua_pushstring(L, err.text);
    lua_rawseti(L, -2, 2);
    lua_pop(L, 1);
    return -1;
}

/* __gc of the script: gives its reference back. */
static int script_close(lua_State *L)
{
    script *s = luaL_checkudata(L, 1, "llmrun.script");
    luaL_unref(L, LUA_REGISTRYINDEX, s->ref);
    s->ref = LUA_NOREF;
    return 0;
}

/* script:last_error() -> text of the last error of next, and forgets it */
static int script_last_error(lua_State *L)
{
    script *s = luaL_checkudata(L, 1, "llmrun.script");
    lua_rawgeti(L, LUA_REGISTRYINDEX, s->ref);
    lua_rawgeti(L, -1, 2);
    lua_pushnil(L);
    lua_rawseti(L, -3, 2);
    return 1;
}

/* scripted_new{ vocab =, ctx =, next =, window = } -> model, script; nil, text, code */
static int core_scripted_new(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_getfield(L, 1, "vocab");
    struct lr_vocab *v = lr_lua_check_vocab(L, -1);
    lua_getfield(L, 1, "next");
    luaL_checktype(L, -1, LUA_TFUNCTION);
    script *s = lua_newuserdatauv(L, sizeof *s, 0);
    *s = (script){(int)lr_vocab_size(v), LUA_NOREF};
    luaL_setmetatable(L, "llmrun.script");
    lua_createtable(L, 2, 0);
    lua_getfield(L, 1, "next");
    lua_rawseti(L, -2, 1);
    s->ref = luaL_ref(L, LUA_REGISTRYINDEX);
    int self = lua_gettop(L);
    lr_scripted_config c = {.n_vocab = s->n_vocab,
                            .n_ctx = lr_lua_opt_i32(L, 1, "ctx", 4096),
                            .next = next_row,
                            .user = s,
                            .vocab = v,
                            .window = lr_lua_opt_i32(L, 1, "window", 0)};
    lr_lua_model *m = lr_lua_new_model(L);
    lua_pushvalue(L, self); /* the model keeps the script */
    lua_setiuservalue(L, -2, 1);
    lr_error err;
    if (lr_scripted_new(&m->model, &c, &err)) return lr_lua_fail(L, &err);
    lua_pushvalue(L, self);
    return 2;
}

void lr_lua_open_scripted(lua_State *L)
{
    static const luaL_Reg methods[] = {{"last_error", script_last_error}, {NULL, NULL}};
    lr_lua_class(L, "llmrun.script", methods, script_close);
    lua_pushcfunction(L, core_scripted_new);
    lua_setfield(L, -2, "scripted_new");
}
