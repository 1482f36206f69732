/* lua_net.c - what the run loop sleeps in (an epoll set), TCP client sockets, local (Unix) sockets of both sides, and
 * signals as a readable descriptor.
 *
 * Nothing here waits but poller:wait. loop.lua holds the one poller; lua/llmrun/net.lua makes calls that wait of it.
 */
#define _GNU_SOURCE /* struct ucred, accept4 */
#include "base/clock.h"
#include "lua/lua_int.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define POLLER   "llmrun.poller"
#define SOCKET   "llmrun.socket"
#define LISTENER "llmrun.listener"

static int fail_errno(lua_State *L, const char *what, int e)
{
    lua_pushnil(L);
    lua_pushfstring(L, "%s: %s", what, strerror(e));
    lua_pushstring(L, e == EAGAIN || e == EINPROGRESS ? "again" : "io");
    return 3;
}

typedef struct fd_ud {
    int fd; /* -1 = closed */
} fd_ud;

static int fd_close(lua_State *L, const char *name)
{
    fd_ud *u = luaL_checkudata(L, 1, name);
    if (u->fd >= 0) close(u->fd);
    u->fd = -1;
    return 0;
}

static fd_ud *new_fd(lua_State *L, const char *name)
{
    fd_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    u->fd = -1;
    luaL_setmetatable(L, name);
    return u;
}

static int check_fd(lua_State *L, const char *name)
{
    fd_ud *u = luaL_checkudata(L, 1, name);
    if (u->fd < 0) luaL_error(L, "it is closed");
    return u->fd;
}

/* ---- poller ---- */

/* poller() -> an empty set of descriptors */
static int core_poller(lua_State *L)
{
    fd_ud *u = new_fd(L, POLLER);
    struct epoll_event ev = {.events = EPOLLIN, .data.fd = lr_lua_interrupt_fd()};
    if (ev.data.fd < 0) return fail_errno(L, "eventfd", errno);
    u->fd = epoll_create1(EPOLL_CLOEXEC);
    if (u->fd < 0 || epoll_ctl(u->fd, EPOLL_CTL_ADD, ev.data.fd, &ev) != 0) return fail_errno(L, "epoll", errno);
    return 1;
}

static int poller_close(lua_State *L) { return fd_close(L, POLLER); }

/* p:set(fd, "r" | "w" | "rw" | nil): watches it for that from now on (nil: no longer). nil, text, code */
static int poller_set(lua_State *L)
{
    int p = check_fd(L, POLLER), fd = (int)luaL_checkinteger(L, 2);
    const char *what = luaL_optstring(L, 3, NULL);
    if (!what) {
        epoll_ctl(p, EPOLL_CTL_DEL, fd, NULL); /* may be closed already */
        return 0;
    }
    struct epoll_event ev = {.data.fd = fd};
    if (strchr(what, 'r')) ev.events |= EPOLLIN | EPOLLRDHUP;
    if (strchr(what, 'w')) ev.events |= EPOLLOUT;
    if (epoll_ctl(p, EPOLL_CTL_MOD, fd, &ev) != 0 && (errno != ENOENT || epoll_ctl(p, EPOLL_CTL_ADD, fd, &ev) != 0))
        return fail_errno(L, "epoll", errno);
    lua_pushboolean(L, 1);
    return 1;
}

/* As epoll_wait, in seconds (below 0: without end); exact for short times where the system can be (Linux 5.11 on). */
static int wait_seconds(int p, struct epoll_event *ev, int n_ev, double s)
{
    if (s <= 0) return epoll_wait(p, ev, n_ev, s < 0 ? -1 : 0);
    if (s < 0.01) {
        struct timespec t = {0, (long)(s * 1e9)};
        int n = epoll_pwait2(p, ev, n_ev, &t, NULL);
        if (n >= 0 || errno == EINTR) return n;
    }
    return epoll_wait(p, ev, n_ev, s > 1e6 ? 1000000000 : (int)(s * 1000 + 0.999));
}

/* p:wait(seconds | nil) -> list of descriptors that are ready; after that many seconds, or a signal, or at once if
 * Ctrl-C was pressed, an empty one. nil: waits */
static int poller_wait(lua_State *L)
{
    int p = check_fd(L, POLLER);
    struct epoll_event ev[128];
    double seconds = lua_isnoneornil(L, 2) ? -1 : fmax(0, luaL_checknumber(L, 2));
    int n = wait_seconds(p, ev, 128, seconds), k = 0;
    lua_createtable(L, n > 0 ? n : 0, 0);
    for (int i = 0; i < n; i++) {
        if (ev[i].data.fd == lr_lua_interrupt_fd()) continue;
        lua_pushinteger(L, ev[i].data.fd);
        lua_rawseti(L, -2, ++k);
    }
    return 1;
}

/* ---- sockets ---- */

static int socket_close(lua_State *L) { return fd_close(L, SOCKET); }

static int socket_fd(lua_State *L)
{
    lua_pushinteger(L, check_fd(L, SOCKET));
    return 1;
}

/* tcp(address, port) -> a socket whose connection is on its way (writable when it is there); nil, text, code. Names are
 * looked up before, by lookup. */
static int core_tcp(lua_State *L)
{
    const char *host = luaL_checkstring(L, 1);
    lua_pushfstring(L, "%d", (int)luaL_checkinteger(L, 2));
    fd_ud *u = new_fd(L, SOCKET);
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST}, *list;
    int rc = getaddrinfo(host, lua_tostring(L, -2), &hints, &list);
    if (rc) {
        lua_pushnil(L);
        lua_pushfstring(L, "%s: %s", host, gai_strerror(rc));
        lua_pushliteral(L, "io");
        return 3;
    }
    int on = 1, e = 0;
    u->fd = socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (u->fd < 0 || (connect(u->fd, list->ai_addr, list->ai_addrlen) != 0 && errno != EINPROGRESS)) e = errno;
    freeaddrinfo(list);
    if (e) return fail_errno(L, host, e);
    setsockopt(u->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return 1;
}

/* s:check() -> true if the connection is there; nil, text, code */
static int socket_check(lua_State *L)
{
    int e = 0;
    socklen_t n = sizeof e;
    if (getsockopt(check_fd(L, SOCKET), SOL_SOCKET, SO_ERROR, &e, &n) != 0) e = errno;
    if (e) return fail_errno(L, "connect", e);
    lua_pushboolean(L, 1);
    return 1;
}

/* s:send(text [, from]) -> bytes sent from that byte on (0 = all); nil, text, code ("again": not now) */
static int socket_send(lua_State *L)
{
    int fd = check_fd(L, SOCKET);
    size_t n;
    const char *s = luaL_checklstring(L, 2, &n);
    lua_Integer from = luaL_optinteger(L, 3, 0);
    luaL_argcheck(L, from >= 0 && (size_t)from <= n, 3, "outside of the text");
    ssize_t k = send(fd, s + from, n - (size_t)from, MSG_NOSIGNAL);
    if (k < 0) return fail_errno(L, "send", errno);
    lua_pushinteger(L, (lua_Integer)k);
    return 1;
}

/* s:recv() -> some bytes; "" at the end; nil, text, code ("again": none now) */
static int socket_recv(lua_State *L)
{
    char buf[32768];
    ssize_t k = recv(check_fd(L, SOCKET), buf, sizeof buf, 0);
    if (k < 0) return fail_errno(L, "receive", errno);
    lua_pushlstring(L, buf, (size_t)k);
    return 1;
}

/* s:shutdown(): nothing more will be sent */
static int socket_shutdown(lua_State *L)
{
    shutdown(check_fd(L, SOCKET), SHUT_WR);
    return 0;
}

/* s:buffers(bytes): a small receive buffer, for tests of slow readers */
static int socket_buffers(lua_State *L)
{
    int n = (int)luaL_checkinteger(L, 2);
    setsockopt(check_fd(L, SOCKET), SOL_SOCKET, SO_RCVBUF, &n, sizeof n);
    return 0;
}

/* s:reset(): closes it so that the other side gets a reset */
static int socket_reset(lua_State *L)
{
    struct linger l = {1, 0};
    setsockopt(check_fd(L, SOCKET), SOL_SOCKET, SO_LINGER, &l, sizeof l);
    return socket_close(L);
}

/* ---- local sockets ---- */

/* The address of a path; false if it is too long for one. */
static bool local_address(const char *path, struct sockaddr_un *a)
{
    size_t n = strlen(path);
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    if (n == 0 || n >= sizeof a->sun_path) return false;
    memcpy(a->sun_path, path, n);
    return true;
}

static int too_long(lua_State *L, const char *path)
{
    lua_pushnil(L);
    lua_pushfstring(L, "%s: a socket's path has 1 to %d bytes", path,
                    (int)sizeof((struct sockaddr_un *)0)->sun_path - 1);
    lua_pushliteral(L, "invalid");
    return 3;
}

/* Whether somebody listens there. */
static bool answers(const struct sockaddr_un *a)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool there = fd >= 0 && (connect(fd, (const struct sockaddr *)a, sizeof *a) == 0 || errno == EAGAIN);
    if (fd >= 0) close(fd);
    return there;
}

/* local_listen(path) -> a listening socket that only the owner may connect to; nil, text, code. One that nobody listens
 * on any more is replaced. */
static int core_local_listen(lua_State *L)
{
    const char *path = lr_lua_check_path(L, 1);
    struct sockaddr_un a;
    struct stat st;
    if (!local_address(path, &a)) return too_long(L, path);
    fd_ud *u = new_fd(L, LISTENER);
    u->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (u->fd < 0) return fail_errno(L, path, errno);
    if (lstat(path, &st) == 0 && S_ISSOCK(st.st_mode) && !answers(&a)) unlink(path);
    /* the mode of the socket is that of its file from the first moment on */
    if (fchmod(u->fd, 0600) != 0 || bind(u->fd, (struct sockaddr *)&a, sizeof a) != 0 || chmod(path, 0600) != 0 ||
        listen(u->fd, 8) != 0)
        return fail_errno(L, path, errno);
    return 1;
}

static int listener_close(lua_State *L) { return fd_close(L, LISTENER); }

static int listener_fd(lua_State *L)
{
    lua_pushinteger(L, check_fd(L, LISTENER));
    return 1;
}

/* l:accept() -> a socket, user id and process id of who connected; nil, text, code ("again": nobody now) */
static int listener_accept(lua_State *L)
{
    int fd = check_fd(L, LISTENER);
    struct ucred who;
    socklen_t n = sizeof who;
    fd_ud *u = new_fd(L, SOCKET);
    u->fd = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (u->fd < 0) return fail_errno(L, "accept", errno);
    if (getsockopt(u->fd, SOL_SOCKET, SO_PEERCRED, &who, &n) != 0) return fail_errno(L, "accept", errno);
    lua_pushinteger(L, (lua_Integer)who.uid);
    lua_pushinteger(L, (lua_Integer)who.pid);
    return 3;
}

/* local_connect(path) -> a connected socket; nil, text, code */
static int core_local_connect(lua_State *L)
{
    const char *path = lr_lua_check_path(L, 1);
    struct sockaddr_un a;
    if (!local_address(path, &a)) return too_long(L, path);
    fd_ud *u = new_fd(L, SOCKET);
    u->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (u->fd < 0 || connect(u->fd, (struct sockaddr *)&a, sizeof a) != 0) return fail_errno(L, path, errno);
    return 1;
}

/* ---- signals ---- */

static int signal_fd = -1;
static _Atomic int64_t first_at[NSIG]; /* when a signal came; 0: not yet */

/* On any thread. A second one ends the process; one that follows at once is the same, as for Ctrl-C (lua_coroutine.c).
 */
static void on_signal(int sig)
{
    int64_t now = lr_clock_ns(CLOCK_MONOTONIC), first = 0;
    int saved = errno;
    if (atomic_compare_exchange_strong(&first_at[sig], &first, now)) {
        if (write(signal_fd, &(uint64_t){1}, sizeof(uint64_t)) < 0) _exit(128 + sig);
    } else if (now - first >= LR_LUA_SAME_SIGNAL_NS) {
        signal(sig, SIG_DFL);
        raise(sig);
    }
    errno = saved;
}

/* Of a pipe whose reader has gone: the write fails, which is enough. Not SIG_IGN, which programs that we start would
 * inherit. */
static void no_pipe(int sig) { (void)sig; }

static bool is_ignored(int sig)
{
    struct sigaction sa;
    return sigaction(sig, NULL, &sa) == 0 && sa.sa_handler == SIG_IGN;
}

/* catch_terminate(on): from now on SIGTERM, SIGINT and SIGHUP (unless it is ignored, as by nohup) make the descriptor
 * that it returns readable, once each; the next one ends the process. A log that nobody reads any more (SIGPIPE) ends
 * nothing. false: all but SIGINT are left to the system again (core.catch_interrupts sets that). */
static int core_catch_terminate(lua_State *L)
{
    if (!lua_toboolean(L, 1)) {
        signal(SIGTERM, SIG_DFL);
        if (!is_ignored(SIGPIPE)) signal(SIGPIPE, SIG_DFL);
        if (!is_ignored(SIGHUP)) signal(SIGHUP, SIG_DFL);
        return 0;
    }
    uint64_t n;
    if (signal_fd < 0) signal_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (signal_fd < 0) return fail_errno(L, "eventfd", errno);
    if (read(signal_fd, &n, sizeof n) < 0) n = 0; /* nothing is left of the last time */
    for (int i = 0; i < NSIG; i++) first_at[i] = 0;
    struct sigaction sa;
    memset(&sa, 0, sizeof sa);
    sa.sa_handler = on_signal;
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGINT, &sa, NULL);
    if (!is_ignored(SIGHUP)) sigaction(SIGHUP, &sa, NULL);
    sa.sa_handler = no_pipe;
    sa.sa_flags = SA_RESTART;
    if (!is_ignored(SIGPIPE)) sigaction(SIGPIPE, &sa, NULL);
    lua_pushinteger(L, signal_fd);
    return 1;
}

void lr_lua_open_net(lua_State *L)
{
    static const luaL_Reg poller[] = {
        {"set", poller_set}, {"wait", poller_wait}, {"close", poller_close}, {NULL, NULL}};
    static const luaL_Reg sock[] = {{"fd", socket_fd},       {"check", socket_check},       {"send", socket_send},
                                    {"recv", socket_recv},   {"shutdown", socket_shutdown}, {"buffers", socket_buffers},
                                    {"reset", socket_reset}, {"close", socket_close},       {NULL, NULL}};
    static const luaL_Reg fns[] = {{"poller", core_poller},
                                   {"tcp", core_tcp},
                                   {"local_listen", core_local_listen},
                                   {"local_connect", core_local_connect},
                                   {"catch_terminate", core_catch_terminate},
                                   {NULL, NULL}};
    static const luaL_Reg listener[] = {
        {"fd", listener_fd}, {"accept", listener_accept}, {"close", listener_close}, {NULL, NULL}};
    lr_lua_class(L, POLLER, poller, poller_close);
    lr_lua_class(L, SOCKET, sock, socket_close);
    lr_lua_class(L, LISTENER, listener, listener_close);
    luaL_setfuncs(L, fns, 0);
}
