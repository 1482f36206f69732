/* lua_cpu.c - llmrun.core's look at the processor: what it can do at best, and which kernels it would take.
 */
#include "backend/look.h"
#include "base/dtype.h"
#include "lua/lua_int.h"

/* cpu_isa([isa]) -> name of the instruction set in use ("amx", "avx2" ...), or nil if it can't be had here */
static int cpu_isa(lua_State *L)
{
    lua_pushstring(L, lr_look_isa(luaL_optstring(L, 1, NULL)));
    return 1;
}

/* cpu_limits(threads, bytes, seconds, isa) -> { read = GB/s, int8_amx = 10^9 operations/s, ... }: takes about ten times
 * `seconds` for each figure */
static int cpu_limits(lua_State *L)
{
    lr_look_limit l[16];
    const lua_Integer threads = luaL_checkinteger(L, 1), bytes = luaL_checkinteger(L, 2);
    const double seconds = luaL_checknumber(L, 3);
    luaL_argcheck(L, threads >= 1 && threads <= 1024, 1, "1 to 1024 expected");
    luaL_argcheck(L, bytes >= 1 << 20 && bytes <= (lua_Integer)1 << 40, 2, "1 MiB to 1 TiB expected");
    luaL_argcheck(L, seconds > 0 && seconds <= 10, 3, "up to 10 seconds expected");
    const int n = lr_look_limits((int)threads, (size_t)bytes, seconds, luaL_checkstring(L, 4), l, 16);
    lua_newtable(L);
    for (int i = 0; i < n; i++) {
        lua_pushnumber(L, l[i].value);
        lua_setfield(L, -2, l[i].name);
    }
    return 1;
}

/* cpu_cache() -> bytes of the last-level cache; 0: not known */
static int cpu_cache(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)lr_look_cache());
    return 1;
}

/* cpu_product(type, k, rows, compute [, isa]) -> in a few words, how `rows` rows times a weight of this type are done
 */
static int cpu_product(lua_State *L)
{
    static const char *const computes[] = {"fast", "int8", "bf16", "f32", NULL};
    static const lr_compute of[] = {LR_COMPUTE_FAST, LR_COMPUTE_INT8, LR_COMPUTE_BF16, LR_COMPUTE_F32};
    const int type = lr_dtype_parse(luaL_checkstring(L, 1));
    const lua_Integer k = luaL_checkinteger(L, 2), rows = luaL_checkinteger(L, 3);
    luaL_argcheck(L, type >= 0, 1, "no such type");
    luaL_argcheck(L, k > 0 && k < 1 << 30, 2, "out of range");
    luaL_argcheck(L, rows > 0 && rows < 1 << 30, 3, "out of range");
    const lr_compute compute = of[luaL_checkoption(L, 4, "fast", computes)];
    lua_pushstring(L, lr_look_product(luaL_optstring(L, 5, NULL), compute, type, (int)k, (int)rows));
    return 1;
}

void lr_lua_open_cpu(lua_State *L)
{
    static const luaL_Reg fns[] = {{"cpu_isa", cpu_isa},
                                   {"cpu_limits", cpu_limits},
                                   {"cpu_cache", cpu_cache},
                                   {"cpu_product", cpu_product},
                                   {NULL, NULL}};
    luaL_setfuncs(L, fns, 0);
}
