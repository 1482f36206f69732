/* lua_lookup.c - names of hosts are looked up aside, on a thread each: a name server that does not answer takes the
 * system's resolver many seconds, for which the engine's thread, that of Lua, would halt all others, and Ctrl-C.
 *
 * A job waits for its descriptor in the run loop (lua/llmrun/net.lua). Job and thread hold it together; who is last
 * frees it, so a job that is dropped leaves the thread to end when the resolver does. Where no thread can be started,
 * the caller looks up.
 */
#include "base/mem.h"
#include "base/thread.h"
#include "lua/lua_int.h"
#include <errno.h>
#include <netdb.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define LOOKUP "llmrun.lookup"

typedef struct job {
    atomic_int holders;
    char *host;
    int fd; /* readable once it is done */
    atomic_bool done;
    int rc; /* of getaddrinfo */
    struct addrinfo *list;
} job;

static void release(job *j)
{
    if (atomic_fetch_sub(&j->holders, 1) > 1) return;
    if (j->list) freeaddrinfo(j->list);
    if (j->fd >= 0) close(j->fd);
    lr_free(j->host);
    lr_free(j);
}

static void *work(void *arg)
{
    job *j = arg;
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    j->rc = getaddrinfo(j->host, NULL, &hints, &j->list);
    atomic_store(&j->done, true);
    (void)!write(j->fd, &(uint64_t){1}, sizeof(uint64_t)); /* can't fail: the counter was 0 */
    release(j);
    return NULL;
}

static void start(job *j)
{
    atomic_fetch_add(&j->holders, 1);
    if (lr_thread_aside(work, j)) work(j);
}

static int job_close(lua_State *L)
{
    job **u = luaL_checkudata(L, 1, LOOKUP);
    if (*u) release(*u);
    *u = NULL;
    return 0;
}

/* lookup(host) -> a job; nil, text, code */
static int core_lookup(lua_State *L)
{
    const char *host = luaL_checkstring(L, 1);
    lr_error err;
    job **u = lua_newuserdatauv(L, sizeof *u, 0);
    *u = NULL;
    luaL_setmetatable(L, LOOKUP);
    job *j = lr_calloc(1, sizeof *j);
    if (j) {
        atomic_init(&j->holders, 1);
        j->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        j->host = lr_strdup(host);
    }
    if (!j || j->fd < 0 || !j->host) {
        if (j && j->fd < 0)
            lr_fail(&err, LR_EIO, "eventfd: %s", strerror(errno));
        else
            lr_fail(&err, LR_ENOMEM, "no memory to look up a name");
        if (j) release(j);
        return lr_lua_fail(L, &err);
    }
    *u = j;
    start(j);
    return 1;
}

static job *check_job(lua_State *L) { return *(job **)lr_lua_check_open(L, 1, LOOKUP, "the lookup of a name"); }

/* job:fd() -> a descriptor that can be read once it is done */
static int job_fd(lua_State *L)
{
    lua_pushinteger(L, check_job(L)->fd);
    return 1;
}

/* job:result() -> list of addresses; nil, text, code; nothing while it is not done */
static int job_result(lua_State *L)
{
    const job *j = check_job(L);
    char text[NI_MAXHOST];
    lua_Integer n = 0;
    if (!atomic_load(&j->done)) return 0;
    if (j->rc) {
        lua_pushnil(L);
        lua_pushfstring(L, "%s: %s", j->host, gai_strerror(j->rc));
        lua_pushliteral(L, "io");
        return 3;
    }
    lua_newtable(L);
    for (const struct addrinfo *a = j->list; a; a = a->ai_next) {
        if (getnameinfo(a->ai_addr, a->ai_addrlen, text, sizeof text, NULL, 0, NI_NUMERICHOST) != 0) continue;
        lua_pushstring(L, text);
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

void lr_lua_open_lookup(lua_State *L)
{
    static const luaL_Reg methods[] = {{"fd", job_fd}, {"result", job_result}, {"close", job_close}, {NULL, NULL}};
    lr_lua_class(L, LOOKUP, methods, job_close);
    lua_pushcfunction(L, core_lookup);
    lua_setfield(L, -2, "lookup");
}
