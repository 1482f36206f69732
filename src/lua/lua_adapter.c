/* lua_adapter.c - low-rank adapters: adapter_new(engine, parts) and what sequences are given.
 *
 * The userdata holds one reference; sequences hold their own, so it may be closed while they run.
 */
#include "base/mem.h"
#include "lua/lua_engine_int.h"
#include "lua/lua_int.h"
#include "model/adapter.h"

#define ADAPTER "llmrun.adapter"

typedef struct adapter_ud {
    lr_adapter *a;
} adapter_ud;

static int adapter_close(lua_State *L)
{
    adapter_ud *u = luaL_checkudata(L, 1, ADAPTER);
    lr_adapter_unref(u->a);
    u->a = NULL;
    return 0;
}

struct lr_adapter *lr_lua_opt_adapter(lua_State *L, int idx, const char *field)
{
    if (!lua_istable(L, idx) || lua_getfield(L, idx, field) == LUA_TNIL) return NULL;
    adapter_ud *u = lr_lua_check_open(L, -1, ADAPTER, "adapter");
    lua_pop(L, 1);
    return u->a;
}

/* a:info() -> { fingerprint = 16 hex digits, bytes = n } */
static int adapter_info(lua_State *L)
{
    adapter_ud *u = lr_lua_check_open(L, 1, ADAPTER, "adapter");
    char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)lr_adapter_fingerprint(u->a));
    lua_createtable(L, 0, 2);
    lua_pushstring(L, text);
    lua_setfield(L, -2, "fingerprint");
    lua_pushinteger(L, (lua_Integer)lr_adapter_bytes(u->a));
    lua_setfield(L, -2, "bytes");
    return 1;
}

/* float32 values of a field; raises if it is no text of n values. */
static const float *check_floats(lua_State *L, int idx, const char *field, lua_Integer n)
{
    size_t len = 0;
    lua_getfield(L, idx, field);
    const char *s = lua_tolstring(L, -1, &len);
    if (!s || n < 0 || len / sizeof(float) != (size_t)n || len % sizeof(float))
        luaL_error(L, "adapter_new: '%s' is not a text of %d values", field, (int)n);
    lua_pop(L, 1); /* the table holds it */
    return (const float *)(const void *)s;
}

static void read_part(lua_State *L, int idx, lr_adapter_part *p)
{
    p->weight = lr_lua_opt_str(L, idx, "weight", "");
    p->rank = lr_lua_opt_i32(L, idx, "rank", 0);
    p->scale = (float)lr_lua_opt_num(L, idx, "scale", 1);
    p->a_width = lr_lua_opt_i32(L, idx, "width", 0);
    p->b_rows = lr_lua_opt_i32(L, idx, "rows", 0);
    p->a = check_floats(L, idx, "a", p->a_width * p->rank);
    p->b = check_floats(L, idx, "b", p->b_rows * p->rank);
}

/* adapter_new(engine, { { weight=, rank=, scale=, width=, rows=, a=, b= } ... }) -> adapter; nil, message, code.
 * a (rank, width) and b (rows, rank) are texts of float32. */
static int adapter_new(lua_State *L)
{
    lr_error err;
    lr_engine_ud *e = lr_lua_check_engine(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_Integer n = luaL_len(L, 2);
    luaL_argcheck(L, n >= 1 && n <= 1 << 20, 2, "1 to 1048576 parts");
    adapter_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    u->a = NULL;
    luaL_setmetatable(L, ADAPTER);
    lr_adapter_part *parts = lua_newuserdatauv(L, (size_t)n * sizeof *parts, 0);
    for (lua_Integer i = 0; i < n; i++) {
        lua_rawgeti(L, 2, i + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        read_part(L, lua_gettop(L), &parts[i]);
        lua_pop(L, 1);
    }
    if (lr_adapter_new(lr_engine_model(e->e), parts, (int)n, &u->a, &err)) return lr_lua_fail(L, &err);
    lua_pop(L, 1);
    return 1;
}

void lr_lua_open_adapter(lua_State *L)
{
    static const luaL_Reg methods[] = {{"info", adapter_info}, {"close", adapter_close}, {NULL, NULL}};
    lr_lua_class(L, ADAPTER, methods, adapter_close);
    lua_pushcfunction(L, adapter_new);
    lua_setfield(L, -2, "adapter_new");
}
