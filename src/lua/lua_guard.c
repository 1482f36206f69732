/* lua_guard.c - limits on what a hook may take: processor time and memory.
 *
 * Time. A count hook that always runs costs tight loops more than twice their time, so none is set until it is needed.
 * A hook's call only stores a number (odd: inside). A watchdog thread looks at it now and then; when the same call has
 * taken its processor time, it sends the engine's thread a signal, whose handler sets a sticky Lua hook on the thread
 * of the call and on all coroutines that are being resumed in it: every instruction raises an error from then on, so
 * that neither a pcall in a loop swallows it nor a loop that has its work done by one coroutine after the other. The
 * signal comes again until the call has ended. A call inside a call is one of its own
 * for the watchdog, with what is left of the outer one's time if that is less; the outer one goes on with the rest. Not
 * stopped: C functions, in which Lua calls no hooks; those that can go on and on look at the time themselves
 * (lr_lua_check_time, lua_bounded.c). Finalizers, in which it calls none either, run as calls of their own there. A
 * call with a hard limit is preempted instead when its time is up, where it can yield, and goes on when it is called
 * again.
 *
 * Memory. Lua's allocator counts; inside a limited call, growth over the limit is refused, upon which Lua collects
 * garbage and, if that is not enough, raises "not enough memory". When there is none in earnest, what runs meets that
 * error, which ends its task. The run loop and what closes things (core.critical) go on with a reserve, so that others
 * are not lost with it; the loop sees to it that there is one again.
 */
#include "base/mem.h"
#include "base/clock.h"
#include "base/thread.h"
#include "lua/lua_int.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>

#define TIME_SIGNAL SIGVTALRM
#define IDLE_TICKS  80 /* ticks without calls until the watchdog sleeps */
/* The thread sanitizer holds signals back until the program calls something that it knows: there calls have a hook from
 * the start, which coroutines inherit. */
#ifdef __SANITIZE_THREAD__
#define HOOKS_ALWAYS 1
#else
#define HOOKS_ALWAYS 0
#endif
#define RESERVE ((size_t)1 << 20)

const lr_lua_limits lr_lua_step_limits = {.seconds = 1, .bytes = (size_t)256 << 20};

static struct {
    lua_Alloc alloc; /* the allocator below this one */
    void *ud;
    int64_t used, limit; /* bytes, counted from the first state on */
    int depth;           /* limited calls inside each other */
    bool over;           /* an allocation was refused in the present call */
    int critical;        /* calls of core.critical inside each other */
    void *reserve;       /* NULL = it is in use */
    size_t reserve_left; /* bytes of it that nobody has */
    const void *denied;  /* the last request that failed, of so many bytes */
    size_t denied_size;
    int64_t fail_in;    /* for tests: of so many more allocations the last is refused, */
    int64_t fail_count; /* and those after it, so many in all */
} heap = {.limit = INT64_MAX};

static struct {
    _Atomic uint64_t call;    /* number of the outermost call; odd while inside */
    _Atomic uint64_t expired; /* the call whose time is up */
    _Atomic int64_t budget;   /* its nanoseconds */
    _Atomic uint64_t seen; /* the call that the watchdog measures, and its thread's processor time when it began to */
    _Atomic int64_t since;
    _Atomic int64_t from; /* the thread's processor time when what counts now began, if it is known (else 0) */
    _Atomic(pthread_t) thread;
    _Atomic bool asleep;
    const lr_lua_frame *volatile base; /* the thread of the outermost call */
    volatile sig_atomic_t held;
    int64_t hard_at; /* the thread's processor time at which a preemptible call is stopped; 0 = it is not preemptible */
    int64_t hard;    /* what it may take until then */
    int64_t limit;   /* nanoseconds of the limit that is the present one, for texts */
    bool works;      /* the watchdog runs */
    pthread_mutex_t lock;
    pthread_cond_t wake;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* ---- memory ---- */

/* For tests. Lua collects garbage and tries again, so that only two refusals in a row make an error. */
static bool refuse(void)
{
    if (heap.fail_count == 0) return false;
    if (heap.fail_in > 0 && --heap.fail_in > 0) return false;
    heap.fail_count--;
    return true;
}

/* A request that failed, also after garbage was collected, of what must go on. */
static void *from_reserve(void *p, size_t old, size_t n, int64_t more)
{
    bool again = heap.denied == p && heap.denied_size == n;
    heap.denied = p;
    heap.denied_size = n;
    if (!again || (heap.critical == 0 && lr_lua_running()) || more > (int64_t)heap.reserve_left) return NULL;
    lr_free(heap.reserve);
    heap.reserve = NULL;
    heap.reserve_left -= (size_t)more;
    return heap.alloc(heap.ud, p, old, n);
}

static void *counted_alloc(void *ud, void *p, size_t old, size_t n)
{
    (void)ud;
    int64_t more = (int64_t)n - (p ? (int64_t)old : 0);
    if (more > 0 && heap.used > heap.limit - more) {
        heap.over = true;
        return NULL;
    }
    void *q = more > 0 && refuse() ? NULL : heap.alloc(heap.ud, p, old, n);
    if (!q && more > 0) q = from_reserve(p, old, n, more);
    if (q || n == 0) heap.used += more;
    return q;
}

/* fail_lua_alloc(n [, count]) -> what was left of the last n (0: it has failed): the n-th allocation of the Lua heap
 * from now and those after it, count (2) in all, fail; 0: none does. */
static int core_fail_lua_alloc(lua_State *L)
{
    int64_t n = luaL_checkinteger(L, 1), count = luaL_optinteger(L, 2, 2);
    luaL_argcheck(L, n >= 0, 1, "a number of allocations expected");
    luaL_argcheck(L, count > 0, 2, "a number of allocations expected");
    int64_t left = heap.fail_in;
    lua_pushinteger(L, left);
    heap.fail_count = n > 0 ? count : 0;
    heap.fail_in = n;
    return 1;
}

/* critical(fn, ...) -> fn's results: it must not fail for want of memory, and can't wait. */
static int core_critical(lua_State *L)
{
    heap.critical++;
    int st = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    heap.critical--;
    return st == LUA_OK ? lua_gettop(L) : lua_error(L);
}

/* memory_low() -> whether the reserve was needed since the last call; it is filled up again if that can be. */
static int core_memory_low(lua_State *L)
{
    bool low = !heap.reserve;
    if (low) heap.reserve = lr_malloc(RESERVE);
    if (heap.reserve) heap.reserve_left = RESERVE;
    lua_pushboolean(L, low);
    return 1;
}

/* Adds to the table on the stack's top. */
void lr_lua_open_guard(lua_State *L)
{
    void *ud;
    static const luaL_Reg fns[] = {{"fail_lua_alloc", core_fail_lua_alloc},
                                   {"critical", core_critical},
                                   {"memory_low", core_memory_low},
                                   {NULL, NULL}};
    luaL_setfuncs(L, fns, 0);
    lua_Alloc f = lua_getallocf(L, &ud);
    if (f == counted_alloc) return;
    heap.alloc = f;
    heap.ud = ud;
    lua_setallocf(L, counted_alloc, NULL);
}

/* ---- time ---- */

static bool time_is_up(void)
{
    uint64_t call = atomic_load(&watch.call);
    return (call & 1) && atomic_load(&watch.expired) == call;
}

/* A function of our own modules, whose steps belong together. Programs in a sandbox can't have chunks of such a name.
 */
static bool is_ours(lua_State *L, lua_Debug *ar)
{
    return lua_getinfo(L, "S", ar) && strncmp(ar->source, "@lua/llmrun/", 12) == 0;
}

/* level: of the function that is named, as for luaL_where. */
static void raise_late(lua_State *L, int level)
{
    int ms = (int)((watch.hard_at ? watch.hard : watch.limit) / 1000000);
    luaL_where(L, level);
    lua_pushfstring(L, "over the time limit%s: %d ms of processor time", watch.hard_at ? "" : " of a hook", ms);
    lua_concat(L, 2);
    lua_error(L);
}

bool lr_lua_limited(void) { return atomic_load_explicit(&watch.call, memory_order_relaxed) & 1; }

bool lr_lua_is_late(void)
{
    return time_is_up() && !watch.held && (!watch.hard_at || lr_clock_ns(CLOCK_THREAD_CPUTIME_ID) >= watch.hard_at);
}

void lr_lua_check_time(lua_State *L)
{
    if (lr_lua_is_late()) raise_late(L, 1);
}

static void time_hook(lua_State *L, lua_Debug *ar);

static void arm(lua_State *L)
{
    lua_sethook(L, time_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKLINE | LUA_MASKCOUNT, 1);
}

/* A call that may be preempted is late. It is where a function of the program's runs that can yield; in our own, and
 * where it can't, a hook of every instruction would only make it slow: looks at calls and returns until it can. */
static void preempt_where_it_can(lua_State *L, lua_Debug *ar)
{
    if (ar->event == LUA_HOOKCOUNT || ar->event == LUA_HOOKLINE) {
        if (lua_isyieldable(L) && !is_ours(L, ar)) {
            lr_lua_preempt(L);
        } else {
            lua_sethook(L, time_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1000);
        }
        return;
    }
    lua_Debug above;
    if (ar->event == LUA_HOOKRET) ar = lua_getstack(L, 1, &above) ? &above : NULL;
    if (ar && lua_isyieldable(L) && !is_ours(L, ar) && ar->what[0] != 'C') arm(L);
}

static void time_hook(lua_State *L, lua_Debug *ar)
{
    if (watch.held) return;
    if (!time_is_up()) {
        if (!HOOKS_ALWAYS || !lr_lua_limited()) lua_sethook(L, NULL, 0, 0); /* left over from a call that has ended */
        return;
    }
    bool looks = ar->event == LUA_HOOKCOUNT || ar->event == LUA_HOOKLINE; /* at the clock */
    if (watch.hard_at && (!looks || lr_clock_ns(CLOCK_THREAD_CPUTIME_ID) < watch.hard_at)) {
        preempt_where_it_can(L, ar);
        return;
    }
    raise_late(L, 0);
}

void lr_lua_watch_early(lua_State *L)
{
    if (HOOKS_ALWAYS && lr_lua_limited()) lua_sethook(L, time_hook, LUA_MASKCOUNT, 1000);
}

/* On the engine's thread, between any two machine instructions: lua_sethook is made for that. */
static void on_signal(int sig)
{
    (void)sig;
    if (watch.held || !time_is_up()) return;
    for (const lr_lua_frame *f = lr_lua_running(); f; f = f->up) {
        arm(f->L);
        if (f == watch.base) break;
    }
}

static void tick(void)
{
    int64_t ns = atomic_load(&watch.budget) / 4;
    if (ns < 1000000) ns = 1000000;
    if (ns > 25000000) ns = 25000000;
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

/* Waits for the next call if there has been none for a while. */
static void sleep_until_called(void)
{
    pthread_mutex_lock(&watch.lock);
    atomic_store(&watch.asleep, true);
    while (atomic_load(&watch.asleep) && !(atomic_load(&watch.call) & 1)) pthread_cond_wait(&watch.wake, &watch.lock);
    atomic_store(&watch.asleep, false);
    pthread_mutex_unlock(&watch.lock);
}

static void *watchdog(void *arg)
{
    (void)arg;
    uint64_t seen = 0;
    int64_t since = 0; /* processor time of the engine's thread when the call was first seen */
    for (int idle = 0;;) {
        if (idle >= IDLE_TICKS) {
            sleep_until_called();
            idle = 0;
        }
        tick();
        uint64_t call = atomic_load(&watch.call);
        bool fresh = call != seen;
        seen = call;
        idle = fresh || (call & 1) ? 0 : idle + 1;
        if (!(call & 1)) continue;
        pthread_t thread = atomic_load(&watch.thread);
        clockid_t clock;
        if (pthread_getcpuclockid(thread, &clock) != 0) continue;
        int64_t now = lr_clock_ns(clock);
        if (fresh) {
            int64_t from = atomic_load(&watch.from);
            since = from ? from : now;
            atomic_store(&watch.since, since);
            atomic_store(&watch.seen, call);
        }
        if (now - since < atomic_load(&watch.budget)) continue;
        atomic_store(&watch.expired, call);
        pthread_kill(thread, TIME_SIGNAL);
    }
    return NULL;
}

/* What has a limit of time does not run without a watchdog. */
static int start_watchdog(lr_error *err)
{
    struct sigaction sa;
    if (watch.works) return 0;
    memset(&sa, 0, sizeof sa);
    sa.sa_handler = on_signal;
    sa.sa_flags = SA_RESTART;
    int e = sigaction(TIME_SIGNAL, &sa, NULL) != 0 ? errno : 0;
    if (!e) e = lr_thread_aside(watchdog, NULL);
    if (e) return lr_fail(err, LR_EIO, "the thread that watches over limits of time can't be started: %s", strerror(e));
    watch.works = true;
    return 0;
}

static void begin_time(double seconds)
{
    watch.limit = (int64_t)(seconds * 1e9);
    atomic_store_explicit(&watch.budget, watch.limit, memory_order_relaxed);
    atomic_store_explicit(&watch.thread, pthread_self(), memory_order_relaxed);
    atomic_store_explicit(&watch.from, 0, memory_order_relaxed);
    atomic_fetch_add(&watch.call, 1);
    if (!atomic_load(&watch.asleep)) return;
    pthread_mutex_lock(&watch.lock);
    atomic_store(&watch.asleep, false);
    pthread_cond_signal(&watch.wake);
    pthread_mutex_unlock(&watch.lock);
}

void lr_lua_hold_time(bool on) { watch.held = on; }

/* ---- the door ---- */

static int outcome(lua_State *L, int st, bool late, const lr_lua_limits *lim, lr_error *err)
{
    if (st == LUA_OK) return 0;
    if (st == LUA_ERRMEM) {
        lua_pop(L, 1); /* says nothing of the limit */
        lua_pushnil(L);
        return heap.over ? lr_fail(err, LR_ELIMIT, "over the memory limit of a hook: %zu MiB", lim->bytes >> 20)
                         : lr_fail(err, LR_ENOMEM, "not enough memory");
    }
    const char *msg = lua_tostring(L, -1);
    return lr_fail(err, late ? LR_ELIMIT : LR_ESCRIPT, "%s", msg ? msg : "unknown error");
}

/* What an outer call has when an inner one begins. */
typedef struct outer_time {
    const lr_lua_frame *base;
    int64_t began, left; /* processor time at the inner one's beginning; of the outer one's budget */
    int64_t hard, hard_at, limit;
} outer_time;

/* An inner call with a limit of its own: false if it has none, or the outer one has none or is over. */
static bool begin_inner(outer_time *o, const lr_lua_limits *lim)
{
    uint64_t call = atomic_load(&watch.call);
    if (!(lim->seconds > 0) || !(call & 1) || time_is_up()) return false;
    *o = (outer_time){
        watch.base, lr_clock_ns(CLOCK_THREAD_CPUTIME_ID), atomic_load(&watch.budget), watch.hard, watch.hard_at,
        watch.limit};
    int64_t from = atomic_load(&watch.from);
    if (!from && atomic_load(&watch.seen) == call) from = atomic_load(&watch.since);
    if (from) o->left -= o->began - from;
    double seconds = (double)o->left * 1e-9;
    watch.hard = (int64_t)(lim->hard * 1e9);
    watch.hard_at = lim->hard > 0 ? o->began + watch.hard : 0;
    if (lim->seconds < seconds) watch.limit = (int64_t)(lim->seconds * 1e9);
    atomic_store(&watch.budget, (int64_t)((lim->seconds < seconds ? lim->seconds : seconds) * 1e9));
    atomic_store(&watch.from, o->began);
    atomic_fetch_add(&watch.call, 2);
    return true;
}

/* If the outer one's time is over, that is told here: one whose time goes into inner calls is never the same for long
 * enough that the watchdog could. */
static void end_inner(const outer_time *o)
{
    int64_t now = lr_clock_ns(CLOCK_THREAD_CPUTIME_ID), left = o->left - (now - o->began);
    watch.base = o->base;
    watch.hard = o->hard;
    watch.hard_at = o->hard_at;
    watch.limit = o->limit;
    atomic_store(&watch.budget, left > 1 ? left : 1);
    atomic_store(&watch.from, now);
    uint64_t call = atomic_fetch_add(&watch.call, 2) + 2;
    if (left > 0) return;
    atomic_store(&watch.expired, call);
    on_signal(TIME_SIGNAL);
}

int lr_lua_pcall_limited(lua_State *L, int n_args, int n_results, const lr_lua_limits *lim, lr_error *err)
{
    if (lim->seconds > 0 && start_watchdog(err)) {
        lua_pop(L, n_args + 1);
        lua_pushnil(L);
        return err->code;
    }
    int64_t limit = heap.limit;
    lr_lua_frame f;
    bool outer = heap.depth++ == 0, timed = outer && lim->seconds > 0, over = heap.over;
    heap.over = false;
    if (lim->bytes && heap.used + (int64_t)lim->bytes < limit) heap.limit = heap.used + (int64_t)lim->bytes;
    lr_lua_enter(&f, L);
    outer_time before;
    bool inner = !outer && begin_inner(&before, lim);
    if (outer || inner) watch.base = &f;
    if (timed) {
        watch.hard = (int64_t)(lim->hard * 1e9);
        watch.hard_at = lim->hard > 0 ? lr_clock_ns(CLOCK_THREAD_CPUTIME_ID) + watch.hard : 0;
        begin_time(lim->seconds);
    }
    lr_lua_watch_early(L);
    int base = lua_gettop(L) - n_args;
    lua_pushcfunction(L, lr_lua_traceback);
    lua_insert(L, base);
    int st = lua_pcall(L, n_args, n_results, base);
    lua_remove(L, base);
    bool late = time_is_up();
    if (timed && (atomic_load(&watch.call) & 1)) atomic_fetch_add(&watch.call, 1);
    if (late) lua_sethook(L, NULL, 0, 0); /* an outer call's time is up too: the next signal tells it */
    if (inner) end_inner(&before);
    if (late) lr_lua_watch_early(L); /* for the outer one */
    lr_lua_leave(&f);
    heap.depth--;
    heap.limit = limit;
    int rc = outcome(L, st, late, lim, err);
    if (!outer) heap.over = over;
    return rc;
}

int lr_lua_call_limited(lua_State *L, int n_args, int n_results, const lr_lua_limits *lim, lr_error *err)
{
    int rc = lr_lua_pcall_limited(L, n_args, n_results, lim, err);
    if (rc) lua_pop(L, 1);
    return rc;
}
