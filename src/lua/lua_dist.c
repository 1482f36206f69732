/* lua_dist.c - binds runs on several processes for lua/llmrun/dist.lua: joining, loading on all ranks, following. */
#include "lua/lua_int.h"
#include "model/parallel.h"
#include <string.h>

/* dist_launched() -> how many processes the launcher says that it started; 1 without one */
static int dist_launched(lua_State *L)
{
    lua_pushinteger(L, lr_dist_launched());
    return 1;
}

/* dist_open() -> true; nil, text, code */
static int dist_open(lua_State *L)
{
    lr_error err;
    if (lr_dist_open(&err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

/* dist_divide(tp, pp, micro_rows) -> true; nil, text, code: see lr_parallel_setup */
static int dist_divide(lua_State *L)
{
    lr_error err;
    lua_Integer tp = luaL_checkinteger(L, 1), pp = luaL_checkinteger(L, 2), rows = luaL_optinteger(L, 3, 0);
    luaL_argcheck(L, tp >= 1 && tp <= 1 << 16, 1, "out of range");
    luaL_argcheck(L, pp >= 1 && pp <= 1 << 16, 2, "out of range");
    luaL_argcheck(L, rows >= 0 && rows <= 1 << 20, 3, "out of range");
    if (lr_parallel_setup((int)tp, (int)pp, (int)rows, &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

static void set_int(lua_State *L, const char *name, lua_Integer v)
{
    lua_pushinteger(L, v);
    lua_setfield(L, -2, name);
}

/* dist_info() -> { rank, size, local_rank, local_size, host, carrier, tp, pp, threads }; nil for a single process */
static int dist_info(lua_State *L)
{
    lr_dist_info i;
    const lr_place *p = lr_parallel_place();
    if (!lr_dist_get_info(&i)) return 0;
    lua_createtable(L, 0, 9);
    set_int(L, "rank", i.rank);
    set_int(L, "size", i.size);
    set_int(L, "local_rank", i.local_rank);
    set_int(L, "local_size", i.local_size);
    lua_pushstring(L, i.host);
    lua_setfield(L, -2, "host");
    lua_pushstring(L, i.carrier);
    lua_setfield(L, -2, "carrier");
    if (!p) return 1;
    set_int(L, "tp", p->tp);
    set_int(L, "pp", p->pp);
    set_int(L, "threads", lr_parallel_threads());
    return 1;
}

/* dist_load(text) -> number of the model that all ranks load now; nil, text, code. Rank 0. */
static int dist_load(lua_State *L)
{
    static int id;
    size_t n;
    const char *text = luaL_checklstring(L, 1, &n);
    lr_error err;
    lr_pack p = {0};
    lr_pack_begin(&p, LR_ORDER_LOAD, ++id);
    lr_pack_put(&p, text, n);
    int rc = lr_dist_tell(&p, &err);
    lr_pack_deinit(&p);
    if (rc) return lr_lua_fail(L, &err);
    lua_pushinteger(L, id);
    return 1;
}

/* dist_agree(failure | nil, code | nil, fingerprint) -> true if all ranks succeeded, with the same fingerprint; nil,
 * text, code */
static int dist_agree(lua_State *L)
{
    lr_error err;
    const char *text = luaL_optstring(L, 1, NULL), *name = luaL_optstring(L, 2, "script");
    int rc = 0;
    for (int code = LR_ECODE_FIRST; text && code < 0; code++)
        if (strcmp(lr_error_name(code), name) == 0) rc = lr_fail(&err, code, "%s", text);
    if (text && !rc) rc = lr_fail(&err, LR_ESCRIPT, "%s", text);
    if (lr_dist_agree(rc, (uint64_t)luaL_optinteger(L, 3, 0), &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

/* dist_join(model, id) -> true; nil, text, code. The model is all ranks' then; on ranks but 0 it is used up. */
static int dist_join(lua_State *L)
{
    lr_error err;
    lr_lua_check_model(L, 1);
    lr_lua_model *m = lua_touserdata(L, 1);
    lr_model *all;
    if (lr_parallel_join(&all, m->model, (int)luaL_checkinteger(L, 2), &err)) return lr_lua_fail(L, &err);
    m->model = all;
    lua_pushboolean(L, 1);
    return 1;
}

/* dist_follow() -> "load", number, text | "free", number | "quit" */
static int dist_follow(lua_State *L)
{
    int model = 0;
    const char *body = NULL;
    size_t n = 0;
    switch (lr_parallel_follow(&model, &body, &n)) {
    case LR_ORDER_LOAD:
        lua_pushliteral(L, "load");
        lua_pushinteger(L, model);
        lua_pushlstring(L, body, n);
        return 3;
    case LR_ORDER_FREE:
        lua_pushliteral(L, "free");
        lua_pushinteger(L, model);
        return 2;
    default:
        lua_pushliteral(L, "quit");
        return 1;
    }
}

/* dist_die(what, text): ends the run on all ranks */
static int dist_die(lua_State *L)
{
    lr_error err;
    const char *what = luaL_checkstring(L, 1);
    lr_fail(&err, LR_ESCRIPT, "%s", luaL_checkstring(L, 2));
    lr_dist_die(what, &err);
}

void lr_lua_open_dist(lua_State *L)
{
    static const luaL_Reg fns[] = {{"dist_launched", dist_launched}, {"dist_open", dist_open},
                                   {"dist_divide", dist_divide},     {"dist_info", dist_info},
                                   {"dist_load", dist_load},         {"dist_agree", dist_agree},
                                   {"dist_join", dist_join},         {"dist_follow", dist_follow},
                                   {"dist_die", dist_die},           {NULL, NULL}};
    luaL_setfuncs(L, fns, 0);
}
