/* lua_exec.c - child processes: started with pipes, none of whose ends ever waits; lua/llmrun/exec.lua makes llm.exec
 * of it.
 *
 * A child has a process group of its own, so that what it starts ends with it, default signals, and no descriptor of
 * ours but the three pipes. Its end is seen through a pidfd, where the system has them.
 */
#define _GNU_SOURCE /* pipe2, posix_spawn_file_actions_addchdir_np */
#include "lua/lua_int.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROCESS "llmrun.process"

extern char **environ;

enum { IN, OUT, ERR };

typedef struct proc_ud {
    pid_t pid; /* 0 = none, or it is gone */
    int fd[3]; /* our ends of its stdin, stdout, stderr; -1 = closed */
    int pidfd; /* readable once it has ended; -1 = not to be had */
    bool ended, by_signal;
    int status; /* or the signal */
} proc_ud;

static int fail_errno(lua_State *L, const char *what, int e)
{
    lua_pushnil(L);
    lua_pushfstring(L, "%s: %s", what, strerror(e));
    lua_pushstring(L, e == ENOENT ? "not_found" : "io");
    return 3;
}

static void close_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static proc_ud *check_proc(lua_State *L) { return luaL_checkudata(L, 1, PROCESS); }

/* Looks whether it has ended. It stays a zombie until it is closed, so that its number and its group's stay its own. */
static void look(proc_ud *p)
{
    siginfo_t si;
    memset(&si, 0, sizeof si);
    if (p->pid <= 0 || p->ended) return;
    if (waitid(P_PID, (id_t)p->pid, &si, WEXITED | WNOHANG | WNOWAIT) == 0 && si.si_pid == 0) return;
    p->ended = true; /* or somebody else has reaped it */
    p->by_signal = si.si_pid != 0 && si.si_code != CLD_EXITED;
    p->status = si.si_status;
}

/* Ends the whole group, also when its first process has ended. */
static void kill_group(const proc_ud *p)
{
    if (p->pid > 0) kill(-p->pid, SIGKILL);
}

static int proc_close(lua_State *L)
{
    proc_ud *p = check_proc(L);
    if (p->pid > 0) {
        kill_group(p);
        while (waitpid(p->pid, NULL, 0) < 0 && errno == EINTR) continue;
        p->pid = 0;
    }
    for (int i = 0; i < 3; i++) close_fd(&p->fd[i]);
    close_fd(&p->pidfd);
    return 0;
}

/* ---- starting ---- */

/* The list at idx as a NULL-ended array in new userdata on the top of the stack. */
static char **string_list(lua_State *L, int idx, const char *what)
{
    lua_Integer n = luaL_len(L, idx);
    char **list = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *list, 0);
    for (lua_Integer i = 0; i < n; i++) {
        size_t len;
        if (lua_rawgeti(L, idx, i + 1) != LUA_TSTRING)
            luaL_error(L, "%s %d: string expected, got %s", what, (int)i + 1, luaL_typename(L, -1));
        list[i] = (char *)(uintptr_t)lua_tolstring(L, -1, &len); /* the list keeps it */
        if (strlen(list[i]) != len) luaL_error(L, "%s %d holds a zero byte", what, (int)i + 1);
        lua_pop(L, 1);
    }
    list[n] = NULL;
    return list;
}

static int set_up(posix_spawn_file_actions_t *fa, posix_spawnattr_t *at, int ends[3], const char *cwd)
{
    sigset_t none, all;
    int e = 0;
    sigemptyset(&none);
    sigfillset(&all);
    for (int i = 0; i < 3 && !e; i++) e = posix_spawn_file_actions_adddup2(fa, ends[i], i);
#if __GLIBC_PREREQ(2, 34)
    if (!e) e = posix_spawn_file_actions_addclosefrom_np(fa, 3);
#endif
    if (!e && cwd) e = posix_spawn_file_actions_addchdir_np(fa, cwd);
    if (!e) e = posix_spawnattr_setsigmask(at, &none);
    if (!e) e = posix_spawnattr_setsigdefault(at, &all);
    if (!e) e = posix_spawnattr_setpgroup(at, 0);
    if (!e) e = posix_spawnattr_setflags(at, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    return e;
}

static int spawn(proc_ud *p, int ends[3], char **argv, char **env, const char *cwd)
{
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t at;
    pid_t pid;
    int e = posix_spawn_file_actions_init(&fa);
    if (e) return e;
    if (!(e = posix_spawnattr_init(&at))) {
        e = set_up(&fa, &at, ends, cwd);
        if (!e) e = posix_spawnp(&pid, argv[0], &fa, &at, argv, env);
        posix_spawnattr_destroy(&at);
    }
    posix_spawn_file_actions_destroy(&fa);
    if (!e) p->pid = pid;
    return e;
}

/* Pipes: ours into p, the child's into ends. */
static int open_pipes(proc_ud *p, int ends[3])
{
    for (int i = 0; i < 3; i++) {
        int two[2];
        if (pipe2(two, O_CLOEXEC) != 0) return errno;
        p->fd[i] = two[i == IN ? 1 : 0];
        ends[i] = two[i == IN ? 0 : 1];
        if (fcntl(p->fd[i], F_SETFL, O_NONBLOCK) != 0) return errno;
    }
    return 0;
}

/* exec_start(argv, env | nil, cwd | nil) -> process; nil, text, code. env: list of "NAME=value", nil: ours */
static int core_exec_start(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    const char *cwd = luaL_optstring(L, 3, NULL);
    char **argv = string_list(L, 1, "argument"), **env = environ;
    luaL_argcheck(L, argv[0], 1, "a program expected");
    if (!lua_isnoneornil(L, 2)) env = string_list(L, 2, "environment");
    proc_ud *p = lua_newuserdatauv(L, sizeof *p, 0);
    *p = (proc_ud){.fd = {-1, -1, -1}, .pidfd = -1};
    luaL_setmetatable(L, PROCESS);
    int ends[3] = {-1, -1, -1}, e = open_pipes(p, ends);
    if (!e) e = spawn(p, ends, argv, env, cwd);
    for (int i = 0; i < 3; i++) close_fd(&ends[i]);
    if (e) return fail_errno(L, cwd && e == ENOENT && access(cwd, X_OK) != 0 ? cwd : argv[0], e);
#ifdef SYS_pidfd_open
    p->pidfd = (int)syscall(SYS_pidfd_open, p->pid, 0);
    if (p->pidfd >= 0) fcntl(p->pidfd, F_SETFD, FD_CLOEXEC);
#endif
    return 1;
}

/* environment() -> list of "NAME=value" */
static int core_environment(lua_State *L)
{
    lua_newtable(L);
    for (lua_Integer i = 0; environ[i]; i++) {
        lua_pushstring(L, environ[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* ---- using ---- */

/* p:fds() -> our ends of stdin, stdout, stderr, and the descriptor of its end (false: not to be had) */
static int proc_fds(lua_State *L)
{
    const proc_ud *p = check_proc(L);
    for (int i = 0; i < 4; i++) {
        int fd = i < 3 ? p->fd[i] : p->pidfd;
        if (fd >= 0)
            lua_pushinteger(L, fd);
        else
            lua_pushboolean(L, 0);
    }
    return 4;
}

/* p:read("out" | "err") -> some bytes; "" at the end; nil: none now */
static int proc_read(lua_State *L)
{
    static const char *const names[] = {"out", "err", NULL};
    char buf[65536];
    proc_ud *p = check_proc(L);
    int fd = p->fd[OUT + luaL_checkoption(L, 2, NULL, names)];
    ssize_t n = fd < 0 ? 0 : read(fd, buf, sizeof buf);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return lua_pushnil(L), 1;
    lua_pushlstring(L, buf, n > 0 ? (size_t)n : 0);
    return 1;
}

/* p:write(text, from) -> bytes written from that byte on (0 = all); 0: not now; nil: nobody reads any more */
static int proc_write(lua_State *L)
{
    proc_ud *p = check_proc(L);
    size_t n;
    const char *s = luaL_checklstring(L, 2, &n);
    lua_Integer from = luaL_checkinteger(L, 3);
    luaL_argcheck(L, from >= 0 && (size_t)from <= n, 3, "outside of the text");
    if (p->fd[IN] < 0) return lua_pushnil(L), 1;
    sigset_t pipe_set, before, pending;
    sigemptyset(&pipe_set);
    sigaddset(&pipe_set, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_set, &before);
    ssize_t k = write(p->fd[IN], s + from, n - (size_t)from);
    int e = errno;
    sigpending(&pending);
    if (k < 0 && e == EPIPE && sigismember(&pending, SIGPIPE)) sigtimedwait(&pipe_set, NULL, &(struct timespec){0});
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (k < 0 && e != EAGAIN && e != EINTR) return lua_pushnil(L), 1;
    lua_pushinteger(L, k < 0 ? 0 : (lua_Integer)k);
    return 1;
}

/* p:shut("in" | "out" | "err"): closes our end of the pipe */
static int proc_shut(lua_State *L)
{
    static const char *const names[] = {"in", "out", "err", NULL};
    proc_ud *p = check_proc(L);
    close_fd(&p->fd[luaL_checkoption(L, 2, NULL, names)]);
    return 0;
}

/* p:ended() -> nil while it runs; else "exit" and its status, or "signal" and the signal */
static int proc_ended(lua_State *L)
{
    proc_ud *p = check_proc(L);
    look(p);
    if (!p->ended) return 0;
    lua_pushstring(L, p->by_signal ? "signal" : "exit");
    lua_pushinteger(L, p->status);
    return 2;
}

/* p:kill(): ends it and what it has started */
static int proc_kill(lua_State *L)
{
    kill_group(check_proc(L));
    return 0;
}

static int proc_pid(lua_State *L)
{
    lua_pushinteger(L, check_proc(L)->pid);
    return 1;
}

void lr_lua_open_exec(lua_State *L)
{
    static const luaL_Reg methods[] = {{"fds", proc_fds},   {"read", proc_read},   {"write", proc_write},
                                       {"shut", proc_shut}, {"ended", proc_ended}, {"kill", proc_kill},
                                       {"pid", proc_pid},   {"close", proc_close}, {NULL, NULL}};
    lr_lua_class(L, PROCESS, methods, proc_close);
    lua_pushcfunction(L, core_exec_start);
    lua_setfield(L, -2, "exec_start");
    lua_pushcfunction(L, core_environment);
    lua_setfield(L, -2, "environment");
}
