/* lua_coroutine.c - the one yielding primitive, and coroutines that let it through.
 *
 * A program runs as a coroutine (a "task", lua/llmrun/loop.lua). What waits for the engine calls core.wait, which
 * yields a mark of ours to the loop. A program may make coroutines of its own: core.resume and core.wrap, which replace
 * Lua's, pass the mark on to whoever resumed them, up to the loop, and the loop's answer back down; a program's own
 * yields end at its own resume, as always.
 *
 * A thread's extra space says whether it is parked on the mark. Ctrl-C sets a sticky hook on the thread that runs, so
 * every resume keeps track of it.
 *
 * A coroutine that a hook of a time limit has ended is left as it is: Lua calls no hooks in it any more, so that its
 * close handlers could run on for ever.
 */
#define _GNU_SOURCE /* gettid */
#include "lua/lua_int.h"
#include "base/clock.h"
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

static char mark;      /* its address, as light userdata, is what a waiting task yields */
static char fail_mark; /* first value of an answer: the wait failed, the second value says why */
static lr_lua_frame *volatile running;
static volatile sig_atomic_t interrupted;
static struct {
    int fd;       /* readable while interrupted is set, so that no wait misses it */
    pid_t thread; /* that asked for Ctrl-C: the engine's */
} interrupt = {.fd = -1};
static volatile sig_atomic_t hook_on_interrupt = 1;

enum { IDLE, PARKED, PREEMPTED, LATE };
static void set_parked(lua_State *co, intptr_t v) { memcpy(lua_getextraspace(co), &v, sizeof v); }
static intptr_t parked(lua_State *co)
{
    intptr_t v;
    memcpy(&v, lua_getextraspace(co), sizeof v);
    return v;
}
static bool is_parked(lua_State *co) { return parked(co) == PARKED || parked(co) == PREEMPTED; }

void lr_lua_preempt(lua_State *L)
{
    set_parked(L, PREEMPTED);
    lua_yield(L, 0);
}

bool lr_lua_take_preempted(lua_State *co)
{
    if (parked(co) != PREEMPTED) return false;
    set_parked(co, IDLE);
    return true;
}

/* Pops a table; pushes the key of the function at stack index fn in it, or nothing. */
static bool push_key_of(lua_State *L, int fn)
{
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING || !lua_rawequal(L, -1, fn)) continue;
        lua_pop(L, 1);
        lua_remove(L, -2);
        return true;
    }
    lua_pop(L, 1);
    return false;
}

/* Pushes the name of the function at the activation record, as "table.sort", if a loaded module holds it: Lua's own
 * modules are asked first. */
static bool push_function_name(lua_State *L, lua_Debug *ar)
{
    static const char *const own[] = {"_G", "table", "string", "coroutine", "io", "os", "math", "utf8", "debug"};
    int fn = lua_gettop(L) + 1;
    lua_getinfo(L, "f", ar);
    lua_getfield(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        if (lua_getfield(L, fn + 1, own[i]) != LUA_TTABLE) {
            lua_pop(L, 1);
        } else if (push_key_of(L, fn)) {
            if (i > 0) lua_pushfstring(L, "%s.%s", own[i], lua_tostring(L, -1));
            lua_replace(L, fn);
            lua_settop(L, fn);
            return true;
        }
    }
    for (lua_pushnil(L); lua_next(L, fn + 1); lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING || lua_type(L, -1) != LUA_TTABLE) continue;
        lua_pushvalue(L, -1);
        if (!push_key_of(L, fn)) continue;
        lua_pushfstring(L, "%s.%s", lua_tostring(L, -3), lua_tostring(L, -1));
        lua_replace(L, fn);
        lua_settop(L, fn);
        return true;
    }
    lua_settop(L, fn - 1);
    return false;
}

/* Pushes what keeps L from yielding, as "table.sort": the innermost C function that calls back without being able to
 * go on after a yield. */
static void push_obstacle(lua_State *L)
{
    lua_Debug ar;
    bool in_xpcall = false;
    if (lr_lua_is_finalizer(L)) {
        lua_pushliteral(L, "a finalizer (__gc)");
        return;
    }
    for (int level = 1; lua_getstack(L, level, &ar); level++) {
        lua_getinfo(L, "Sn", &ar);
        if (ar.namewhat && strcmp(ar.namewhat, "metamethod") == 0 && ar.name && strstr(ar.name, "gc")) {
            lua_pushliteral(L, "a finalizer (__gc)");
            return;
        }
        if (strcmp(ar.what, "C") != 0 || !push_function_name(L, &ar)) continue;
        const char *name = lua_tostring(L, -1);
        bool handler = strcmp(name, "xpcall") == 0 || strcmp(name, "error") == 0;
        bool yields = strcmp(name, "pcall") == 0 || strncmp(name, "llmrun.", 7) == 0 ||
                      strncmp(name, "coroutine.", 10) == 0 || strcmp(name, "dofile") == 0;
        if (!handler && !yields) return;
        in_xpcall = in_xpcall || handler;
        lua_pop(L, 1);
    }
    if (in_xpcall)
        lua_pushliteral(L, "an xpcall message handler");
    else
        lua_pushliteral(L, "a callback from C or a close handler of an ended branch");
}

static int wait_done(lua_State *L, int status, lua_KContext ctx)
{
    (void)status;
    set_parked(L, IDLE);
    int top = (int)ctx;
    return lua_gettop(L) - top;
}

/* wait(): parks the task until the loop wakes it; returns what the loop gives, or core.failed and the name of what
 * keeps a coroutine on the way to the loop from yielding. */
static int core_wait(lua_State *L)
{
    lua_settop(L, 0);
    if (!lua_isyieldable(L)) {
        lua_pushlightuserdata(L, &fail_mark);
        push_obstacle(L);
        return 2;
    }
    set_parked(L, PARKED);
    lua_pushlightuserdata(L, &mark);
    return lua_yieldk(L, 1, 0, wait_done);
}

/* obstacle(): nil if the caller can wait; else the name of what keeps it from that. For calls that must do something
 * before they wait. */
static int core_obstacle(lua_State *L)
{
    if (lua_isyieldable(L)) return 0;
    push_obstacle(L);
    return 1;
}

static void stop_hook(lua_State *L, lua_Debug *ar);

static bool ended_late(lua_State *co) { return parked(co) == LATE; }

/* After a resume that ended with an error. */
static void note_late(lua_State *co)
{
    if (lr_lua_is_late()) set_parked(co, LATE);
}

/* lua_resetthread, which runs close handlers: they are what runs then, for those who stop what runs. Not those of a
 * coroutine that was over its time. A Ctrl-C that came just before the coroutine parked is not theirs: they run to
 * their end. */
static int reset(lua_State *co)
{
    lr_lua_frame f;
    if (ended_late(co)) {
        if (lua_checkstack(co, 1)) lua_pushliteral(co, "over the time limit");
        return LUA_ERRRUN;
    }
    if (lua_gethook(co) == stop_hook) lua_sethook(co, NULL, 0, 0);
    lr_lua_enter(&f, co);
    int st = lua_resetthread(co);
    lr_lua_leave(&f);
    return st;
}

/* __close of the guard: the coroutine that waits inside this resume is closed with it. */
#define GUARD "llmrun.resume_guard"
static int guard_close(lua_State *L)
{
    luaL_checkudata(L, 1, GUARD);
    lua_getiuservalue(L, 1, 1);
    lua_State *co = lua_tothread(L, -1);
    if (!co || !is_parked(co)) return 0;
    set_parked(co, IDLE);
    reset(co);
    return 0;
}

static void push_guard(lua_State *L)
{
    lua_newuserdatauv(L, 0, 1);
    if (luaL_newmetatable(L, GUARD)) {
        lua_pushcfunction(L, guard_close);
        lua_setfield(L, -2, "__close");
    }
    lua_setmetatable(L, -2);
    lua_pushvalue(L, 1);
    lua_setiuservalue(L, -2, 1);
    lua_toclose(L, -1);
}

/* ctx: 1 = wrap (errors are raised), 0 = resume. L's stack: 1 the thread, 2 the guard (once it has been parked). */
static int resume_more(lua_State *L, int status, lua_KContext ctx);

static int resume_failed(lua_State *L, lua_State *co, lua_KContext wrap)
{
    if (!wrap) {
        lua_pushboolean(L, 0);
        lua_xmove(co, L, 1);
        return 2;
    }
    int st = lua_status(co);
    if (st != LUA_OK && st != LUA_YIELD && !ended_late(co)) {
        st = reset(co); /* closes what is pending, and leaves the error on top */
        lua_xmove(co, L, 1);
    } else {
        lua_xmove(co, L, 1);
    }
    if (st != LUA_ERRMEM && lua_type(L, -1) == LUA_TSTRING) {
        luaL_where(L, 1);
        lua_insert(L, -2);
        lua_concat(L, 2);
    }
    return lua_error(L);
}

static int resume_step(lua_State *L, lua_State *co, int n_args, lua_KContext wrap)
{
    for (;;) {
        int n = 0;
        lr_lua_frame f;
        lr_lua_enter(&f, co);
        lr_lua_watch_early(co);
        set_parked(co, IDLE);
        int st = lua_resume(co, L, n_args, &n);
        lr_lua_leave(&f);
        if (st == LUA_OK || (st == LUA_YIELD && !is_parked(co))) {
            if (!lua_checkstack(L, n + 1)) {
                lua_pop(co, n);
                return luaL_error(L, "too many results to resume");
            }
            if (!wrap) lua_pushboolean(L, 1);
            lua_xmove(co, L, n);
            return wrap ? n : n + 1;
        }
        if (st != LUA_YIELD) {
            note_late(co);
            return resume_failed(L, co, wrap);
        }
        lua_pop(co, n);
        if (lua_isyieldable(L)) {
            if (lua_gettop(L) < 2) push_guard(L);
            set_parked(L, parked(co));
            lua_pushlightuserdata(L, &mark);
            return lua_yieldk(L, 1, wrap, resume_more);
        }
        if (lr_lua_take_preempted(co)) {
            n_args = 0; /* not here: it goes on */
            continue;
        }
        /* whoever resumed it can't yield: the wait inside fails */
        lua_pushlightuserdata(co, &fail_mark);
        push_obstacle(L);
        lua_xmove(L, co, 1);
        n_args = 2;
    }
}

static int resume_more(lua_State *L, int status, lua_KContext ctx)
{
    (void)status;
    set_parked(L, IDLE);
    lua_State *co = lua_tothread(L, 1);
    int n = lua_gettop(L) - 2;
    if (!lua_checkstack(co, n)) return luaL_error(L, "too many arguments to resume");
    lua_xmove(L, co, n);
    return resume_step(L, co, n, ctx);
}

/* L's stack: the thread and the arguments. */
static int resume_start(lua_State *L, lua_KContext wrap)
{
    lua_State *co = lua_tothread(L, 1);
    int n = lua_gettop(L) - 1;
    const char *bad = NULL;
    if (is_parked(co))
        bad = "cannot resume a coroutine that waits for the engine";
    else if ((lua_status(co) == LUA_OK && lua_gettop(co) == 0) || ended_late(co))
        bad = "cannot resume dead coroutine";
    else if (!lua_checkstack(co, n))
        bad = "too many arguments to resume";
    if (bad) {
        if (wrap) return luaL_error(L, "%s", bad);
        lua_pushboolean(L, 0);
        lua_pushstring(L, bad);
        return 2;
    }
    lua_xmove(L, co, n);
    return resume_step(L, co, n, wrap);
}

static int core_resume(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTHREAD);
    return resume_start(L, 0);
}

static int wrapped(lua_State *L)
{
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    return resume_start(L, 1);
}

static int core_wrap(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_State *co = lua_newthread(L);
    lua_pushvalue(L, 1);
    lua_xmove(L, co, 1);
    lua_pushcclosure(L, wrapped, 1);
    return 1;
}

/* step(co, ...): the loop's resume of a task. "parked", "yielded", or "done" with the results, or "dead" with the error
 * (the thread is left as it is, for a traceback). */
static int core_step(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTHREAD);
    lua_State *co = lua_tothread(L, 1);
    int n = lua_gettop(L) - 1;
    if (!lua_checkstack(co, n)) return luaL_error(L, "too many arguments to resume");
    lua_xmove(L, co, n);
    lr_lua_frame f;
    lr_lua_enter(&f, co);
    lr_lua_watch_early(co);
    set_parked(co, IDLE);
    int st = lua_resume(co, L, n, &n);
    lr_lua_leave(&f);
    if (st == LUA_YIELD) {
        const char *how = lr_lua_take_preempted(co) ? "preempted" : is_parked(co) ? "parked" : "yielded";
        lua_pushstring(L, how);
        lua_pop(co, n);
        return 1;
    }
    lua_pushstring(L, st == LUA_OK ? "done" : "dead");
    if (st != LUA_OK) {
        note_late(co);
        n = 1;
    }
    if (!lua_checkstack(L, n + 1)) return luaL_error(L, "too many results");
    lua_xmove(co, L, n);
    return n + 1;
}

/* close(co): ends a parked task from outside: its to-be-closed variables are closed, innermost coroutine first.
 * true, or false and the error of a close handler. */
int lr_lua_close_coroutine(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTHREAD);
    lua_State *co = lua_tothread(L, 1);
    if (is_parked(co)) set_parked(co, IDLE);
    if (reset(co) == LUA_OK) {
        lua_pushboolean(L, 1);
        return 1;
    }
    lua_pushboolean(L, 0);
    lua_xmove(co, L, 1);
    return 2;
}

/* step_limited(seconds, hard, co, ...): as step, for a task that a time limit hangs over: when it has been busy for so
 * many seconds of processor time, it is interrupted ("preempted") where it can be; where it can't, an error ends it
 * after `hard` seconds. */
static int core_step_limited(lua_State *L)
{
    lua_Number seconds = luaL_checknumber(L, 1), hard = luaL_checknumber(L, 2);
    luaL_checktype(L, 3, LUA_TTHREAD);
    if (!(seconds > 0 && hard > 0)) return luaL_error(L, "limits above 0 expected");
    if (hard > 1e9) hard = 1e9;
    const lr_lua_limits lim = {.seconds = hard < seconds ? hard : seconds, .hard = hard};
    lr_error err;
    lua_pushvalue(L, 3);
    lua_replace(L, 1);
    lua_pushcfunction(L, core_step);
    lua_replace(L, 2);
    if (lr_lua_pcall_limited(L, lua_gettop(L) - 2, LUA_MULTRET, &lim, &err) == 0) return lua_gettop(L) - 1;
    lua_settop(L, 1); /* its time was up just as it stopped by itself */
    lua_pushliteral(L, "dead");
    lua_pushstring(L, err.text);
    lua_pushcfunction(L, lr_lua_close_coroutine);
    lua_pushvalue(L, 1);
    lr_lua_call_limited(L, 1, 0, &(lr_lua_limits){.seconds = hard}, &err);
    return 2;
}

/* call_limited(seconds, bytes, fn, ...) -> true and fn's results; false, the error with its traceback, "limit" or
 * "script". The call may take so many seconds of processor time and bytes of memory (0: any), and can't wait. */
static int core_call_limited(lua_State *L)
{
    lua_Number seconds = luaL_checknumber(L, 1);
    lua_Integer bytes = luaL_checkinteger(L, 2);
    if (!(seconds >= 0 && seconds < 1e6) || bytes < 0) return luaL_error(L, "limits of at least 0 expected");
    const lr_lua_limits lim = {.seconds = seconds, .bytes = (size_t)bytes};
    lr_error err;
    luaL_checkany(L, 3);
    lua_remove(L, 1);
    lua_pushboolean(L, 1);
    lua_replace(L, 1);
    if (lr_lua_pcall_limited(L, lua_gettop(L) - 2, LUA_MULTRET, &lim, &err) == 0) return lua_gettop(L);
    lua_pushboolean(L, 0);
    if (lua_isstring(L, -2)) {
        lua_pushvalue(L, -2);
    } else {
        lua_pushstring(L, err.text);
    }
    lua_pushstring(L, lr_error_name(err.code));
    return 3;
}

/* Ctrl-C ------------------------------------------------------------------------------------------------------------*/

static void stop_hook(lua_State *L, lua_Debug *ar)
{
    (void)ar;
    lua_sethook(L, NULL, 0, 0);
    luaL_where(L, 0);
    lua_pushliteral(L, "interrupted");
    lua_concat(L, 2);
    lua_error(L);
}

/* A second one ends the process if nobody has taken note of the first. One that follows at once is the same: who
 * signals a process and its group (timeout, supervisors) sends two.
 *
 * The system gives it to any thread that lets it in, also to those of libraries (libcurl's, which look up names). Only
 * the one that asked for it may touch the Lua state, and is to wake from what it waits in, so it is handed on. */
static void on_sigint(int sig)
{
    static volatile int64_t first;
    int saved = errno;
    if (gettid() != interrupt.thread && syscall(SYS_tgkill, getpid(), interrupt.thread, sig) == 0) {
        errno = saved;
        return;
    }
    if (interrupted) {
        if (lr_clock_ns(CLOCK_MONOTONIC) - first < LR_LUA_SAME_SIGNAL_NS) return;
        signal(sig, SIG_DFL);
        raise(sig);
    }
    first = lr_clock_ns(CLOCK_MONOTONIC);
    interrupted = 1;
    if (write(interrupt.fd, &(uint64_t){1}, sizeof(uint64_t)) < 0) _exit(128 + sig);
    errno = saved;
    lua_State *L = running ? running->L : NULL;
    if (L && hook_on_interrupt) lua_sethook(L, stop_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKLINE | LUA_MASKCOUNT, 1);
}

const lr_lua_frame *lr_lua_running(void) { return running; }

void lr_lua_enter(lr_lua_frame *f, lua_State *L)
{
    *f = (lr_lua_frame){L, running};
    atomic_signal_fence(memory_order_seq_cst); /* a handler sees the frame whole */
    running = f;
}

void lr_lua_leave(const lr_lua_frame *f) { running = f->up; }

bool lr_lua_interrupted(void) { return interrupted != 0; }

int lr_lua_interrupt_fd(void)
{
    if (interrupt.fd < 0) interrupt.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return interrupt.fd;
}

/* catch_interrupts(mode): "stop" raises an error in the Lua code that runs and sets the flag, "flag" sets the flag
 * only, "default" leaves the signal to the system, "before" to whoever had it before the first call of this. */
static int core_catch_interrupts(lua_State *L)
{
    static const char *const modes[] = {"stop", "flag", "default", "before", NULL};
    static struct sigaction before;
    static bool have_before;
    int mode = luaL_checkoption(L, 1, NULL, modes);
    hook_on_interrupt = mode == 0;
    if (mode == 2) {
        signal(SIGINT, SIG_DFL);
        return 0;
    } else if (mode == 3) {
        if (have_before) sigaction(SIGINT, &before, NULL);
        have_before = false;
        return 0;
    }
    if (lr_lua_interrupt_fd() < 0) return luaL_error(L, "eventfd: %s", strerror(errno));
    if (!have_before) have_before = sigaction(SIGINT, NULL, &before) == 0;
    interrupt.thread = gettid();
    struct sigaction sa;
    memset(&sa, 0, sizeof sa);
    sa.sa_handler = on_sigint; /* without SA_RESTART: a blocking read ends with EINTR */
    sigaction(SIGINT, &sa, NULL);
    return 0;
}

/* interrupted([clear]) -> whether Ctrl-C was pressed since the flag was last cleared */
static int core_interrupted(lua_State *L)
{
    bool clear = lua_toboolean(L, 1) && interrupted;
    uint64_t n;
    lua_pushboolean(L, interrupted != 0);
    if (!clear) return 1;
    if (read(interrupt.fd, &n, sizeof n) < 0) n = 0; /* what comes now is the same Ctrl-C, and writes nothing */
    interrupted = 0;
    return 1;
}

void lr_lua_open_coroutine(lua_State *L)
{
    static const luaL_Reg fns[] = {
        {"wait", core_wait},
        {"obstacle", core_obstacle},
        {"resume", core_resume},
        {"wrap", core_wrap},
        {"step", core_step},
        {"step_limited", core_step_limited},
        {"call_limited", core_call_limited},
        {"close", lr_lua_close_coroutine},
        {"catch_interrupts", core_catch_interrupts},
        {"interrupted", core_interrupted},
        {NULL, NULL},
    };
    set_parked(L, IDLE); /* new threads copy the main one's extra space */
    luaL_setfuncs(L, fns, 0);
    lua_pushlightuserdata(L, &fail_mark);
    lua_setfield(L, -2, "failed");
}
