/* lua_sandbox.c - a Lua state of its own for each untrusted program; lua/llmrun/sandbox.lua makes a sandbox of it.
 *
 * What runs inside shares nothing with the outside: no globals, no string metatable, no modules, no memory limit but
 * its own. The state has its own allocator with a cap; it opens base, table, string, math, utf8 and coroutine only,
 * with string functions whose matching is bounded (lua_pattern.c). Code inside is a coroutine that the outside resumes
 * (step); when it waits, it yields plain data: what it wants done. Only nil, booleans, numbers, strings and tables of
 * these cross the border, by copy, in bounded depth and size. So the border is all that has to hold: what code does to
 * its own state is its own affair.
 *
 * Time: step runs under lr_lua_pcall_limited, whose watchdog stops the coroutines that run (lr_lua_running).
 */
#define _GNU_SOURCE /* CLOCK_THREAD_CPUTIME_ID */
#include "base/mem.h"
#include "base/clock.h"
#include "lua/lua_int.h"
#include <lualib.h>
#include <string.h>

#define SANDBOX "llmrun.sandbox"

enum { MAX_DEPTH = 64, MAX_ITEMS = 1 << 20, MAX_BYTES = 32 << 20, MAX_CHUNKS = 32 };

typedef struct box {
    lua_State *L;  /* NULL = closed */
    lua_State *co; /* the program; anchored in L's registry */
    size_t used, limit;
    bool over;   /* the cap refused something */
    bool inside; /* a step is on its way */
    double cpu;  /* seconds of processor time so far */
} box;

static void *box_alloc(void *ud, void *p, size_t old, size_t n)
{
    box *b = ud;
    if (!p) old = 0;
    if (n == 0) {
        lr_free(p);
        b->used -= old;
        return NULL;
    }
    if (n > old && n - old > b->limit - (b->used < b->limit ? b->used : b->limit)) {
        b->over = true;
        return NULL;
    }
    void *q = lr_realloc(p, n);
    if (q) b->used += n - old;
    return q;
}

static double cpu_now(void) { return 1e-9 * (double)lr_clock_ns(CLOCK_THREAD_CPUTIME_ID); }

/* ---- copies between states ---- */

typedef struct copy {
    lua_State *from;
    size_t items, bytes;
} copy;

static void copy_value(copy *c, lua_State *to, int idx, int depth);

/* The table at idx of c->from, without its metatable. */
static void copy_table(copy *c, lua_State *to, int idx, int depth)
{
    if (depth > MAX_DEPTH) luaL_error(to, "a value that is nested too deeply (or in a circle) can't be passed");
    luaL_checkstack(to, 8, NULL);
    if (!lua_checkstack(c->from, 8)) luaL_error(to, "not enough memory");
    lua_createtable(to, (int)(lua_rawlen(c->from, idx) & 0xFFFF), 0);
    lua_pushnil(c->from);
    while (lua_next(c->from, idx)) {
        int top = lua_gettop(c->from);
        copy_value(c, to, top - 1, depth + 1);
        copy_value(c, to, top, depth + 1);
        lua_rawset(to, -3);
        lua_settop(c->from, top - 1);
    }
}

/* Pushes on `to` a copy of the value at the absolute index idx of c->from. Raises in `to`. */
static void copy_value(copy *c, lua_State *to, int idx, int depth)
{
    if (++c->items > MAX_ITEMS) luaL_error(to, "a value of more than %d parts can't be passed", MAX_ITEMS);
    switch (lua_type(c->from, idx)) {
    case LUA_TNIL:
        lua_pushnil(to);
        break;
    case LUA_TBOOLEAN:
        lua_pushboolean(to, lua_toboolean(c->from, idx));
        break;
    case LUA_TNUMBER:
        if (lua_isinteger(c->from, idx))
            lua_pushinteger(to, lua_tointeger(c->from, idx));
        else
            lua_pushnumber(to, lua_tonumber(c->from, idx));
        break;
    case LUA_TSTRING: {
        size_t n;
        const char *s = lua_tolstring(c->from, idx, &n);
        c->bytes += n;
        if (c->bytes > MAX_BYTES) luaL_error(to, "values of more than %d MiB can't be passed", MAX_BYTES >> 20);
        lua_pushlstring(to, s, n);
        break;
    }
    case LUA_TTABLE:
        copy_table(c, to, idx, depth);
        break;
    case LUA_TLIGHTUSERDATA: /* null */
        if (!lua_touserdata(c->from, idx)) {
            lua_pushlightuserdata(to, NULL);
            break;
        }
        /* fall through */
    default:
        luaL_error(to, "a %s can't be passed into or out of the sandbox", luaL_typename(c->from, idx));
    }
}

/* Protected in the destination: source state (light userdata), first index, number -> copies of the values. */
static int copy_values(lua_State *to)
{
    copy c = {lua_touserdata(to, 1), 0, 0};
    int first = (int)lua_tointeger(to, 2), n = (int)lua_tointeger(to, 3);
    lua_settop(to, 0);
    luaL_checkstack(to, n, "too many values");
    for (int i = 0; i < n; i++) copy_value(&c, to, first + i, 0);
    return n;
}

/* Copies n values of `from` from the absolute index first on to the top of `to`. 0, or a pcall status with a message
 * (or nil) on `to`. What an error leaves on `from` is taken off. */
static int transfer(lua_State *from, int first, int n, lua_State *to)
{
    int top = lua_gettop(from);
    if (!lua_checkstack(to, 8)) return LUA_ERRMEM;
    lua_pushcfunction(to, copy_values);
    lua_pushlightuserdata(to, from);
    lua_pushinteger(to, first);
    lua_pushinteger(to, n);
    int st = lua_pcall(to, 3, LUA_MULTRET, 0);
    lua_settop(from, top);
    return st;
}

/* ---- making one ---- */

static int inside_now(lua_State *L)
{
    lua_pushnumber(L, lr_now());
    return 1;
}

/* For modules of ours: of debug, what can't stop a hook. User code gets none of it. */
static void open_debug(lua_State *L)
{
    static const char *const names[] = {"traceback", "getinfo", "getmetatable"};
    luaL_requiref(L, LUA_DBLIBNAME, luaopen_debug, 0);
    lua_newtable(L);
    for (int i = 0; i < 3; i++) {
        lua_getfield(L, -2, names[i]);
        lua_setfield(L, -2, names[i]);
    }
    lua_setglobal(L, "debug");
    lua_pop(L, 1);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_pushnil(L);
    lua_setfield(L, -2, LUA_DBLIBNAME);
    lua_pop(L, 1);
}

static void open_libraries(lua_State *L, lua_Integer steps)
{
    static const luaL_Reg libs[] = {{LUA_GNAME, luaopen_base},
                                    {LUA_TABLIBNAME, luaopen_table},
                                    {LUA_STRLIBNAME, luaopen_string},
                                    {LUA_MATHLIBNAME, luaopen_math},
                                    {LUA_UTF8LIBNAME, luaopen_utf8},
                                    {LUA_COLIBNAME, luaopen_coroutine},
                                    {NULL, NULL}};
    static const char *const gone[] = {"dofile", "loadfile", "collectgarbage"};
    for (const luaL_Reg *l = libs; l->name; l++) {
        luaL_requiref(L, l->name, l->func, 1);
        lua_pop(L, 1);
    }
    for (int i = 0; i < 3; i++) {
        lua_pushnil(L);
        lua_setglobal(L, gone[i]);
    }
    open_debug(L);
    lua_getglobal(L, LUA_STRLIBNAME);
    lr_lua_push_patterns(L, steps);
    for (lua_pushnil(L); lua_next(L, -2);) {
        lua_pushvalue(L, -2);
        lua_insert(L, -2);
        lua_settable(L, -5);
    }
    lua_pop(L, 1);
    lua_pushnil(L);
    lua_setfield(L, -2, "dump");
    lua_pop(L, 1);
}

/* What open_box needs; the strings are the option table's. */
typedef struct setup {
    box *b;
    lua_Integer steps;
    int n;
    struct {
        const char *name, *code;
        size_t len;
    } chunk[MAX_CHUNKS];
} setup;

/* Protected, in the new state: the setup (light userdata). Leaves the program as a function on co. */
static int open_box(lua_State *L)
{
    const setup *su = lua_touserdata(L, 1);
    box *b = su->b;
    lua_settop(L, 0);
    open_libraries(L, su->steps);
    lua_newtable(L); /* what the modules of ours know as llmrun.core */
    lr_lua_open_coroutine(L);
    lr_lua_open_json(L);
    lua_pushnil(L);
    lua_setfield(L, -2, "catch_interrupts");
    lua_pushcfunction(L, inside_now);
    lua_setfield(L, -2, "now");
    lua_setglobal(L, "core");
    lua_newtable(L); /* chunks: name -> function */
    for (int i = 0; i < su->n; i++) {
        if (luaL_loadbufferx(L, su->chunk[i].code, su->chunk[i].len, su->chunk[i].name, "b") != LUA_OK)
            return lua_error(L);
        lua_setfield(L, -2, su->chunk[i].name);
    }
    lua_setglobal(L, "chunks");
    b->co = lua_newthread(L);
    lua_setfield(L, LUA_REGISTRYINDEX, "program");
    lua_getglobal(L, "chunks");
    lua_getfield(L, -1, "llmrun.sandbox.inside");
    lua_xmove(L, b->co, 1);
    return 0;
}

static void read_chunks(lua_State *L, setup *su)
{
    lua_getfield(L, 1, "chunks");
    luaL_checktype(L, -1, LUA_TTABLE);
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
        if (su->n == MAX_CHUNKS) luaL_error(L, "too many chunks");
        if (lua_type(L, -1) != LUA_TSTRING || lua_type(L, -2) != LUA_TSTRING)
            luaL_error(L, "chunks: names and code expected");
        su->chunk[su->n].name = lua_tostring(L, -2);
        su->chunk[su->n].code = lua_tolstring(L, -1, &su->chunk[su->n].len);
        su->n++;
    }
    lua_pop(L, 1);
}

static int sandbox_close(lua_State *L)
{
    box *b = luaL_checkudata(L, 1, SANDBOX);
    if (b->inside) return luaL_error(L, "a sandbox can't be closed from the inside");
    if (b->L) lua_close(b->L);
    b->L = b->co = NULL;
    return 0;
}

/* sandbox_new{ memory = bytes, steps = n, chunks = { [module name] = binary chunk } } -> sandbox; nil, text, code. The
 * chunks come from us, never from users: binary ones can't be checked. */
static int core_sandbox_new(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_Integer memory = lr_lua_opt_int(L, 1, "memory", 64 << 20);
    luaL_argcheck(L, memory > 0, 1, "memory: a number of bytes expected");
    setup su = {.steps = lr_lua_opt_int(L, 1, "steps", 10000000)};
    read_chunks(L, &su);
    box *b = lua_newuserdatauv(L, sizeof *b, 0);
    memset(b, 0, sizeof *b);
    luaL_setmetatable(L, SANDBOX);
    su.b = b;
    b->limit = (size_t)memory;
    b->L = lua_newstate(box_alloc, b);
    lr_error err;
    if (!b->L) {
        lr_fail(&err, LR_ELIMIT, "a sandbox needs more memory than %zu bytes", b->limit);
        return lr_lua_fail(L, &err);
    }
    lua_pushcfunction(b->L, open_box);
    lua_pushlightuserdata(b->L, &su);
    if (lua_pcall(b->L, 1, 0, 0) == LUA_OK) return 1;
    const char *why = lua_tostring(b->L, -1);
    lr_fail(&err, b->over ? LR_ELIMIT : LR_ESCRIPT, "the sandbox can't be set up: %s", why ? why : "?");
    lua_close(b->L);
    b->L = b->co = NULL;
    return lr_lua_fail(L, &err);
}

/* ---- running it ---- */

enum { STEP_DONE, STEP_IDLE, STEP_SLICE, STEP_FAILED };

#define SLICE 0.01 /* seconds of processor time after which others have their turn */
#define STUCK 1.0  /* and these are the most where it can't be interrupted, in callbacks of table.sort and the like */

/* Called under limits: the box (light userdata), number of arguments on its coroutine -> STEP_..., number of values on
 * the coroutine. */
static int resume_box(lua_State *L)
{
    box *b = lua_touserdata(L, 1);
    int n_args = (int)lua_tointeger(L, 2), n = 0;
    lr_lua_frame f;
    lr_lua_enter(&f, b->co);
    lr_lua_watch_early(b->co);
    int st = lua_resume(b->co, NULL, n_args, &n);
    lr_lua_leave(&f);
    bool slice = st == LUA_YIELD && lr_lua_take_preempted(b->co);
    if (slice) n = 0;
    lua_pushinteger(L, st == LUA_OK ? STEP_DONE : slice ? STEP_SLICE : st == LUA_YIELD ? STEP_IDLE : STEP_FAILED);
    lua_pushinteger(L, n);
    return 2;
}

/* Protected, in the box: the error value on co's top as a text. */
static int error_text(lua_State *L)
{
    lua_State *co = lua_touserdata(L, 1);
    lua_settop(L, 0);
    if (lua_type(co, -1) != LUA_TSTRING) {
        lua_pushfstring(L, "(error object is a %s value)", luaL_typename(co, -1));
        return 1;
    }
    size_t n;
    const char *s = lua_tolstring(co, -1, &n);
    lua_pushlstring(L, s, n < 8000 ? n : 8000);
    return 1;
}

static int fail(lua_State *L, const char *how, const char *text)
{
    lua_pushstring(L, how);
    lua_pushstring(L, text);
    return 2;
}

static int failed(lua_State *L, box *b)
{
    if (b->over && lua_status(b->co) == LUA_ERRMEM) {
        lr_error err;
        lr_fail(&err, LR_ELIMIT, "over the memory limit of %zu KiB", b->limit >> 10);
        return fail(L, "limit", err.text);
    }
    lua_pushcfunction(b->L, error_text);
    lua_pushlightuserdata(b->L, b->co);
    if (lua_pcall(b->L, 1, 1, 0) != LUA_OK) return fail(L, "failed", "not enough memory");
    lua_pushliteral(L, "failed");
    size_t n;
    const char *s = lua_tolstring(b->L, -1, &n);
    lua_pushlstring(L, s ? s : "", s ? n : 0);
    lua_settop(b->L, 0);
    return 2;
}

/* Runs the coroutine under a limit of time. An error, or 0 with *how and *n. */
static int run_limited(lua_State *L, box *b, int n_args, double seconds, int *how, int *n, lr_error *err)
{
    double hard = seconds < STUCK ? seconds : STUCK;
    const lr_lua_limits lim = {.seconds = hard < SLICE ? hard : SLICE, .hard = hard};
    double began = cpu_now();
    b->inside = true;
    lua_pushcfunction(L, resume_box);
    lua_pushlightuserdata(L, b);
    lua_pushinteger(L, n_args);
    int rc = lr_lua_call_limited(L, 2, 2, &lim, err);
    b->inside = false;
    b->cpu += cpu_now() - began;
    if (rc) return rc;
    *how = (int)lua_tointeger(L, -2);
    *n = (int)lua_tointeger(L, -1);
    lua_pop(L, 2);
    return 0;
}

/* s:step(seconds, ...): goes on with these values; seconds: of processor time that are left in all. "done" and the
 * results, "idle" and what it yielded, "slice" (to be stepped again, without values, when others had their turn),
 * "failed" and a text, "limit" and a text. After the last two and "done" it is over. */
static int sandbox_step(lua_State *L)
{
    box *b = lr_lua_check_open(L, 1, SANDBOX, "sandbox");
    double seconds = luaL_checknumber(L, 2);
    int how, n, n_args = lua_gettop(L) - 2;
    if (b->inside) return luaL_error(L, "a sandbox can't be resumed from the inside");
    if (seconds <= 0) return fail(L, "limit", "over the limit of processor time");
    int st = transfer(L, 3, n_args, b->co);
    if (st != LUA_OK) {
        const char *why = st == LUA_ERRMEM ? NULL : lua_tostring(b->co, -1);
        if (!why && b->over) return fail(L, "limit", "over the memory limit: what was passed in does not fit");
        return fail(L, "failed", why ? why : "not enough memory");
    }
    lua_settop(L, 1);
    double before = b->cpu;
    lr_error err;
    int rc = run_limited(L, b, n_args, seconds, &how, &n, &err);
    if (rc == LR_EIO) return fail(L, "failed", err.text);
    if (rc) return fail(L, "limit", "over the limit of processor time");
    double taken = b->cpu - before;
    if (how == STEP_FAILED && taken >= (seconds < STUCK ? seconds : STUCK))
        return fail(L, "limit",
                    taken >= seconds ? "over the limit of processor time"
                                     : "it held up everything else for too long, inside a call that can't wait");
    if (how == STEP_FAILED) return failed(L, b);
    if (how == STEP_SLICE) return lua_pushliteral(L, "slice"), 1;
    lua_pushstring(L, how == STEP_DONE ? "done" : "idle");
    st = transfer(b->co, lua_gettop(b->co) - n + 1, n, L);
    lua_settop(b->co, lua_gettop(b->co) - n);
    if (st != LUA_OK) {
        const char *why = lua_tostring(L, -1);
        return fail(L, "failed", why ? why : "not enough memory");
    }
    return lua_gettop(L) - 1;
}

/* s:usage() -> bytes of memory now, seconds of processor time so far */
static int sandbox_usage(lua_State *L)
{
    const box *b = luaL_checkudata(L, 1, SANDBOX);
    lua_pushinteger(L, (lua_Integer)b->used);
    lua_pushnumber(L, b->cpu);
    return 2;
}

void lr_lua_open_sandbox(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"step", sandbox_step}, {"usage", sandbox_usage}, {"close", sandbox_close}, {NULL, NULL}};
    lr_lua_class(L, SANDBOX, methods, sandbox_close);
    lua_pushcfunction(L, core_sandbox_new);
    lua_setfield(L, -2, "sandbox_new");
}
