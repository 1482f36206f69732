/* lua_bounded.c - what Lua's own library has that can run on and on inside C, where no hook stops it, made to heed the
 * limits of a call (lua_guard.c): hooks of policies, lines of a console, stages of samplers.
 *
 * The functions replace those in the library's tables, and hand everything to them unless a time limit hangs over the
 * call. Under one, patterns are matched by lua_pattern.c, which looks at the time; loops over elements that a table
 * only claims to have (__len) or that a range names are refused from so many on; and the message handler of xpcall is
 * not called for an error that says that the time is over, since hooks are off in it. What takes memory as it goes is
 * stopped by the limit on that. A repetition of nothing would count to the end in any case, and is left out.
 *
 * Finalizers come at any time, also where nothing has a limit, and hooks are off in them: setmetatable has others
 * finalized in their place, which call them on a thread of their own, as a call with limits. The metatables of C's
 * objects can't be reached by getmetatable. The debug library still leads there: it is for who is trusted.
 *
 * The sandbox has guards of its own (lua/llmrun/sandbox/inside.lua).
 */
#include "lua/lua_int.h"
#include <lualib.h>
#include <stdio.h>
#include <string.h>

enum { MOST = 10000000, LONG = 100000 }; /* elements: a fraction of a second, and of a hundredth of one */

/* Hands the call to Lua's own function, upvalue n, in the same frame. */
static int original(lua_State *L, int n) { return lua_tocfunction(L, lua_upvalueindex(n))(L); }

/* ---- string ---- */

/* upvalues: the bounded function, Lua's own */
static int either(lua_State *L)
{
    if (!lr_lua_limited()) return original(L, 2);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
    return lua_gettop(L);
}

static int string_rep(lua_State *L)
{
    size_t n = 1, n_sep = 0;
    int is_count;
    lua_tointegerx(L, 2, &is_count);
    if (lua_type(L, 1) == LUA_TSTRING) lua_tolstring(L, 1, &n);
    if (lua_type(L, 3) == LUA_TSTRING) lua_tolstring(L, 3, &n_sep);
    if (n > 0 || n_sep > 0 || !is_count) return original(L, 1);
    lua_pushliteral(L, "");
    return 1;
}

/* ---- table ---- */

static void check_count(lua_State *L, const char *name, lua_Integer n)
{
    if (n > MOST) luaL_error(L, "table.%s: %I elements are too many under a time limit", name, (LUAI_UACINT)n);
}

/* insert, remove, sort; upvalues: Lua's own, the name */
static int over_list(lua_State *L)
{
    if (lr_lua_limited() && luaL_getmetafield(L, 1, "__len") != LUA_TNIL) {
        lua_pop(L, 1);
        check_count(L, lua_tostring(L, lua_upvalueindex(2)), luaL_len(L, 1));
    }
    return original(L, 1);
}

/* a < b, as a function: hooks see it called */
static int less(lua_State *L)
{
    lua_pushboolean(L, lua_compare(L, 1, 2, LUA_OPLT));
    return 1;
}

static int table_sort(lua_State *L)
{
    if (lr_lua_limited() && lua_istable(L, 1) && lua_rawlen(L, 1) > LONG && lua_isnoneornil(L, 2)) {
        lua_settop(L, 1);
        lua_pushcfunction(L, less);
    }
    return over_list(L);
}

static int table_move(lua_State *L)
{
    int first, last;
    lua_Integer from = lua_tointegerx(L, 2, &first), to = lua_tointegerx(L, 3, &last);
    if (first && last && to > from && lr_lua_limited()) {
        lua_Unsigned n = (lua_Unsigned)to - (lua_Unsigned)from;
        check_count(L, "move", n > (lua_Unsigned)LUA_MAXINTEGER ? LUA_MAXINTEGER : (lua_Integer)n);
    }
    return original(L, 1);
}

/* ---- xpcall ---- */

/* A message handler; upvalue: the one that was given */
static int handler(lua_State *L)
{
    if (lr_lua_is_late()) return 1;
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, lua_gettop(L) - 1, 1);
    return 1;
}

static int bounded_xpcall(lua_State *L)
{
    if (lr_lua_limited() && lua_type(L, 2) == LUA_TFUNCTION) {
        lua_pushvalue(L, 2);
        lua_pushcclosure(L, handler, 1);
        lua_replace(L, 2);
    }
    return original(L, 1);
}

/* ---- coroutines ---- */

static int coroutine_close(lua_State *L)
{
    lua_State *co = lua_tothread(L, 1);
    lua_Debug ar;
    if (!co || co == L || (lua_status(co) == LUA_OK && lua_getstack(co, 0, &ar))) return original(L, 1);
    return lr_lua_close_coroutine(L);
}

/* Takes away the hook that stops what runs, and may do that again and again. */
static int debug_sethook(lua_State *L)
{
    lua_State *of = lua_isthread(L, 1) ? lua_tothread(L, 1) : L;
    int n = original(L, 1);
    lr_lua_check_time(L);
    lr_lua_watch_early(of);
    return n;
}

/* ---- finalizers ----
 *
 * Lua calls as a finalizer what stands in the metatable when an object is collected, whatever stood there when it got
 * it. So it must not know of the object: it gets the metatable while __gc is out of it. A guard is finalized in its
 * place, which holds the object, and which only an ephemeron table holds, under the object: they are collected
 * together, and the guard brings the object back for its finalizer. */

static const char guards, guard_class; /* keys in the registry: that table, the guards' metatable */

static const lua_State *finalizer; /* the thread of the one that runs; they never run inside each other */

bool lr_lua_is_finalizer(const lua_State *L) { return L == finalizer; }

/* __gc of a guard: calls the object's. An error becomes a warning (warn "@on"), as of any finalizer. */
static int finalize(lua_State *L)
{
    lr_error err;
    lua_settop(L, 1);
    lua_getiuservalue(L, 1, 1);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &guards);
    lua_pushvalue(L, 2);
    lua_pushnil(L);
    lua_rawset(L, 3); /* setmetatable may give it a new one */
    if (!lua_getmetatable(L, 2)) return 0;
    lua_pushliteral(L, "__gc");
    if (lua_rawget(L, -2) == LUA_TNIL) return 0;
    lua_State *co = lua_newthread(L);
    lua_insert(L, -2);
    lua_pushvalue(L, 2);
    lua_xmove(L, co, 2);
    const lua_State *before = finalizer;
    finalizer = co;
    int rc = lr_lua_call_limited(co, 1, 0, &lr_lua_step_limits, &err);
    finalizer = before;
    if (!rc) return 0;
    static bool told;
    if (rc == LR_ELIMIT && !told) fprintf(stderr, "llmrun: a finalizer (__gc): %s\n", err.text);
    told = told || rc == LR_ELIMIT;
    return luaL_error(L, "%s", err.text);
}

/* Gives the object at 1 a guard, unless it has one. */
static void guard_object(lua_State *L)
{
    lua_rawgetp(L, LUA_REGISTRYINDEX, &guards);
    lua_pushvalue(L, 1);
    if (lua_rawget(L, -2) == LUA_TNIL) {
        lua_newuserdatauv(L, 0, 1);
        lua_pushvalue(L, 1);
        lua_setiuservalue(L, -2, 1);
        lua_pushvalue(L, 1);
        lua_pushvalue(L, -2);
        lua_rawset(L, -5);
        lua_rawgetp(L, LUA_REGISTRYINDEX, &guard_class);
        lua_setmetatable(L, -2);
    }
    lua_settop(L, 2);
}

/* Whether 1 and 2 are a table and a metatable with a finalizer. */
static bool has_finalizer(lua_State *L)
{
    if (!lua_istable(L, 1) || !lua_istable(L, 2)) return false;
    lua_pushliteral(L, "__gc");
    bool has = lua_rawget(L, 2) != LUA_TNIL;
    lua_pop(L, 1);
    return has;
}

/* Nothing here takes memory between taking __gc out and putting it back. */
static int set_guarded(lua_State *L)
{
    lua_settop(L, 2);
    guard_object(L);
    lua_pushliteral(L, "__gc");
    lua_pushvalue(L, 3);
    lua_rawget(L, 2);
    lua_pushvalue(L, 3);
    lua_pushnil(L);
    lua_rawset(L, 2);
    lua_pushvalue(L, 2);
    lua_setmetatable(L, 1);
    lua_rawset(L, 2);
    lua_settop(L, 1);
    return 1;
}

static int base_setmetatable(lua_State *L)
{
    if (!has_finalizer(L) || luaL_getmetafield(L, 1, "__metatable") != LUA_TNIL) return original(L, 1);
    return set_guarded(L);
}

static int debug_setmetatable(lua_State *L) { return has_finalizer(L) ? set_guarded(L) : original(L, 1); }

/* A metatable of C's objects, under its name in the registry (if it is there), is shown as a copy without __gc: Lua
 * knows of these objects, and would call whatever is put there. */
void lr_lua_hide_finalizer(lua_State *L, const char *name)
{
    int top = lua_gettop(L);
    if (luaL_getmetatable(L, name) == LUA_TTABLE && lua_getfield(L, -1, "__metatable") == LUA_TNIL) {
        lua_newtable(L);
        for (lua_pushnil(L); lua_next(L, -4);) {
            lua_pushvalue(L, -2);
            lua_insert(L, -2);
            lua_rawset(L, -4);
        }
        lua_pushnil(L);
        lua_setfield(L, -2, "__gc");
        lua_setfield(L, -3, "__metatable");
    }
    lua_settop(L, top);
}

static void open_finalizers(lua_State *L)
{
    lr_lua_weak_table(L, &guards, "k");
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, finalize);
    lua_setfield(L, -2, "__gc");
    lua_rawsetp(L, LUA_REGISTRYINDEX, &guard_class);
}

/* ---- putting them in place ---- */

/* Puts f in the place of t[name] (t at the stack's top), with what was there as its first upvalue and the name as its
 * second. Nothing if that is no C function: somebody else's. */
static void replace(lua_State *L, const char *name, lua_CFunction f)
{
    lua_getfield(L, -1, name);
    if (!lua_iscfunction(L, -1) || lua_tocfunction(L, -1) == f) {
        lua_pop(L, 1);
        return;
    }
    lua_pushstring(L, name);
    lua_pushcclosure(L, f, 2);
    lua_setfield(L, -2, name);
}

static void replace_patterns(lua_State *L)
{
    static const char *const names[] = {"find", "match", "gmatch", "gsub"};
    lr_lua_push_patterns(L, LUA_MAXINTEGER);
    for (int i = 0; i < 4; i++) {
        lua_getfield(L, -2, names[i]);
        bool is_c = lua_iscfunction(L, -1) && lua_tocfunction(L, -1) != either;
        lua_pop(L, 1);
        if (!is_c) continue;
        lua_getfield(L, -1, names[i]);
        lua_getfield(L, -3, names[i]);
        lua_pushcclosure(L, either, 2);
        lua_setfield(L, -3, names[i]);
    }
    lua_pop(L, 1);
}

void lr_lua_open_bounded(lua_State *L)
{
    open_finalizers(L);
    lr_lua_hide_finalizer(L, LUA_FILEHANDLE);
    static const char *const lists[] = {"insert", "remove"};
    lua_getglobal(L, LUA_STRLIBNAME);
    replace_patterns(L);
    replace(L, "rep", string_rep);
    lua_getglobal(L, LUA_TABLIBNAME);
    for (int i = 0; i < 2; i++) replace(L, lists[i], over_list);
    replace(L, "sort", table_sort);
    replace(L, "move", table_move);
    lua_pushglobaltable(L);
    replace(L, "xpcall", bounded_xpcall);
    replace(L, "setmetatable", base_setmetatable);
    lua_getglobal(L, LUA_COLIBNAME);
    replace(L, "close", coroutine_close);
    lua_getglobal(L, LUA_DBLIBNAME);
    replace(L, "sethook", debug_sethook);
    replace(L, "setmetatable", debug_setmetatable);
    lua_pop(L, 5);
}
