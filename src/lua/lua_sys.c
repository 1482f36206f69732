/* lua_sys.c - the few things of the operating system that lua/llmrun needs and Lua lacks: clock, terminal, files. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "base/mem.h"
#include "base/clock.h"
#include "lua/lua_int.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <lualib.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>
#include <utf8proc.h>

static int fail_errno(lua_State *L, const char *what)
{
    lua_pushnil(L);
    lua_pushfstring(L, "%s: %s", what, strerror(errno));
    lua_pushstring(L, errno == ENOENT ? "not_found" : "io");
    return 3;
}

/* now() -> seconds, monotonic */
static int sys_now(lua_State *L)
{
    lua_pushnumber(L, lr_now());
    return 1;
}

/* thread_seconds() -> processor time that this thread has taken */
static int sys_thread_seconds(lua_State *L)
{
    lua_pushnumber(L, 1e-9 * (lua_Number)lr_clock_ns(CLOCK_THREAD_CPUTIME_ID));
    return 1;
}

/* sleep(seconds): true, or false when a signal cut it short, or Ctrl-C was pressed before */
static int sys_sleep(lua_State *L)
{
    lua_Number s = luaL_checknumber(L, 1);
    if (!(s > 0)) s = 0;
    if (s > 1e6) s = 1e6;
    struct timespec ts = {(time_t)s, (long)((s - (lua_Number)(time_t)s) * 1e9)};
    struct pollfd p = {lr_lua_interrupt_fd(), POLLIN, 0}; /* poll takes none below 0 */
    lua_pushboolean(L, ppoll(&p, 1, &ts, NULL) == 0);
    return 1;
}

/* isatty(fd) */
static int sys_isatty(lua_State *L)
{
    lua_pushboolean(L, isatty((int)luaL_checkinteger(L, 1)));
    return 1;
}

/* term_width() -> columns of the terminal on stdout, 80 if it can't be known */
static int sys_term_width(lua_State *L)
{
    struct winsize w;
    int ok = ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0;
    lua_pushinteger(L, ok ? w.ws_col : 80);
    return 1;
}

static struct termios saved_term;
static bool term_is_raw;
static void restore_term(void)
{
    if (term_is_raw) tcsetattr(STDIN_FILENO, TCSADRAIN, &saved_term);
    term_is_raw = false;
}

/* raw(on): the terminal on stdin gives each key as it is typed, without echo; signals of keys are off too. Restored at
 * exit. true, or nil and why not */
static int sys_raw(lua_State *L)
{
    if (!lua_toboolean(L, 1)) {
        restore_term();
    } else if (!term_is_raw) {
        static bool registered;
        if (tcgetattr(STDIN_FILENO, &saved_term) != 0) return fail_errno(L, "terminal");
        struct termios t = saved_term;
        t.c_iflag &= ~(tcflag_t)(BRKINT | ICRNL | INPCK | ISTRIP | IXON);
        t.c_lflag &= ~(tcflag_t)(ECHO | ICANON | IEXTEN | ISIG);
        t.c_cc[VMIN] = 1;
        t.c_cc[VTIME] = 0;
        if (!registered) registered = atexit(restore_term) == 0;
        if (tcsetattr(STDIN_FILENO, TCSADRAIN, &t) != 0) return fail_errno(L, "terminal");
        term_is_raw = true;
    }
    lua_pushboolean(L, 1);
    return 1;
}

/* read(max, timeout): up to max bytes of stdin as soon as there are any; "" at the end; nil after timeout seconds
 * (none: waits), when a signal came, or if Ctrl-C was pressed before; nil, text, code if it can't be read */
static int sys_read(lua_State *L)
{
    char buf[4096];
    lua_Integer max = luaL_optinteger(L, 1, sizeof buf);
    int ms = lua_isnoneornil(L, 2) ? -1 : (int)(luaL_checknumber(L, 2) * 1000);
    if (max < 1 || max > (lua_Integer)sizeof buf) max = sizeof buf;
    struct pollfd p[2] = {{STDIN_FILENO, POLLIN, 0}, {lr_lua_interrupt_fd(), POLLIN, 0}};
    if (poll(p, 2, ms) <= 0 || p[1].revents) return lua_pushnil(L), 1;
    ssize_t n = read(STDIN_FILENO, buf, (size_t)max);
    if (n < 0 && errno != EINTR && errno != EAGAIN) return fail_errno(L, "standard input");
    if (n < 0) return lua_pushnil(L), 1;
    lua_pushlstring(L, buf, (size_t)n);
    return 1;
}

/* char_width(code point) -> terminal columns it takes */
static int sys_char_width(lua_State *L)
{
    int w = utf8proc_charwidth((utf8proc_int32_t)luaL_checkinteger(L, 1));
    lua_pushinteger(L, w < 0 ? 0 : w);
    return 1;
}

/* fail_alloc(n) -> what was left of the last n: the n-th allocation from now, of all that C code makes, fails; 0: none
 * does. For tests. */
static int sys_fail_alloc(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)lr_mem_fail_at(luaL_checkinteger(L, 1)));
    return 1;
}

/* memory() -> bytes resident now, at most so far, and that may still be taken */
static int sys_memory(lua_State *L)
{
    long pages = 0, dummy = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f) {
        if (fscanf(f, "%ld %ld", &dummy, &pages) != 2) pages = 0;
        fclose(f);
    }
    struct rusage ru;
    getrusage(RUSAGE_SELF, &ru);
    lua_pushinteger(L, (lua_Integer)pages * sysconf(_SC_PAGESIZE));
    lua_pushinteger(L, (lua_Integer)ru.ru_maxrss * 1024);
    lua_pushinteger(L, (lua_Integer)lr_mem_available());
    return 3;
}

/* trim_memory(): gives the system back what is free */
static int sys_trim_memory(lua_State *L)
{
    (void)L;
    lr_mem_trim();
    return 0;
}

/* cpus() -> number of processors this process may run on */
static int sys_cpus(lua_State *L)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
    if (n <= 0) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
    lua_pushinteger(L, n > 0 ? n : 1);
    return 1;
}

/* stat(path) -> "file", "folder" or "other", the size, the time of the last change in seconds; nil, text, code if it
 * isn't there */
static int sys_stat(lua_State *L)
{
    const char *path = lr_lua_check_path(L, 1);
    struct stat st;
    if (stat(path, &st) != 0) return fail_errno(L, path);
    lua_pushstring(L, S_ISREG(st.st_mode) ? "file" : S_ISDIR(st.st_mode) ? "folder" : "other");
    lua_pushinteger(L, (lua_Integer)st.st_size);
    lua_pushnumber(L, (double)st.st_mtim.tv_sec + (double)st.st_mtim.tv_nsec * 1e-9);
    return 3;
}

static int dir_close(lua_State *L)
{
    DIR **d = luaL_checkudata(L, 1, "llmrun.dir");
    if (*d) closedir(*d);
    *d = NULL;
    return 0;
}

/* list(folder) -> names in it, sorted; nil, text, code */
static int sys_list(lua_State *L)
{
    const char *path = lr_lua_check_path(L, 1);
    lua_newtable(L);
    DIR **d = lua_newuserdatauv(L, sizeof *d, 0);
    *d = NULL;
    luaL_setmetatable(L, "llmrun.dir");
    *d = opendir(path);
    if (!*d) return fail_errno(L, path);
    lua_Integer n = 0;
    for (struct dirent *e; (e = readdir(*d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        lua_pushstring(L, e->d_name);
        lua_rawseti(L, 2, ++n);
    }
    closedir(*d);
    *d = NULL;
    lua_getglobal(L, "table");
    lua_getfield(L, -1, "sort");
    lua_pushvalue(L, 2);
    lua_call(L, 1, 0);
    lua_settop(L, 2);
    return 1;
}

/* executable() -> path of the running program; nil, text, code */
static int sys_executable(lua_State *L)
{
    char buf[4096];
    ssize_t n = readlink("/proc/self/exe", buf, sizeof buf);
    if (n < 0) return fail_errno(L, "/proc/self/exe");
    lua_pushlstring(L, buf, (size_t)n);
    return 1;
}

/* mkdir(path): true if it is there afterwards; nil, text, code */
static int sys_mkdir(lua_State *L)
{
    const char *path = lr_lua_check_path(L, 1);
    if (mkdir(path, 0777) != 0 && errno != EEXIST) return fail_errno(L, path);
    lua_pushboolean(L, 1);
    return 1;
}

/* ---- what is nobody else's business ---- */

#define PRIVATE_FILE "llmrun.private_file"

typedef struct private_file {
    int fd; /* -1 = closed */
} private_file;

static int private_close(lua_State *L)
{
    private_file *f = luaL_checkudata(L, 1, PRIVATE_FILE);
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
    return 0;
}

/* private_file(path) -> an empty file that only its owner can read; nil, text, code */
static int sys_private_file(lua_State *L)
{
    const char *path = lr_lua_check_path(L, 1);
    struct stat st;
    private_file *f = lua_newuserdatauv(L, sizeof *f, 0);
    f->fd = -1;
    luaL_setmetatable(L, PRIVATE_FILE);
    f->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (f->fd < 0 || fstat(f->fd, &st) != 0) return fail_errno(L, path);
    if (S_ISREG(st.st_mode) && (st.st_mode & 077) && fchmod(f->fd, 0600) != 0) return fail_errno(L, path);
    return 1;
}

/* f:write(text) -> true once the system has all of it; nil, text, code */
static int private_write(lua_State *L)
{
    private_file *f = luaL_checkudata(L, 1, PRIVATE_FILE);
    size_t n;
    const char *s = luaL_checklstring(L, 2, &n);
    if (f->fd < 0) return luaL_error(L, "the file is closed");
    while (n > 0) {
        ssize_t k = write(f->fd, s, n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return fail_errno(L, "write");
        s += k;
        n -= (size_t)k;
    }
    lua_pushboolean(L, 1);
    return 1;
}

/* private_folder(path) -> true: it is there (made, if it was not), and nobody but its owner, who runs this, can look
 * into it; nil, text, code */
static int sys_private_folder(lua_State *L)
{
    const char *path = lr_lua_check_path(L, 1);
    struct stat st;
    if (mkdir(path, 0700) != 0 && errno != EEXIST) return fail_errno(L, path);
    if (lstat(path, &st) != 0) return fail_errno(L, path);
    if (S_ISDIR(st.st_mode) && st.st_uid == geteuid() && (st.st_mode & 077) == 0) return lua_pushboolean(L, 1), 1;
    lua_pushnil(L);
    lua_pushfstring(L, "%s: a folder of your own that nobody else can look into (mode 0700) expected", path);
    lua_pushliteral(L, "invalid");
    return 3;
}

/* ids() -> the user's id, the process's */
static int sys_ids(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)geteuid());
    lua_pushinteger(L, (lua_Integer)getpid());
    return 2;
}

/* os.setlocale; upvalue: Lua's own. Numbers keep their point: with a comma JSON, Lua's own source and the texts of
 * numbers in all files would be read and written wrongly. */
static int sys_setlocale(lua_State *L)
{
    int n = lua_tocfunction(L, lua_upvalueindex(1))(L);
    if (strcmp(localeconv()->decimal_point, ".") == 0) return n;
    setlocale(LC_NUMERIC, "C");
    bool numeric = strcmp(luaL_optstring(L, 2, "all"), "numeric") == 0;
    lua_pushstring(L, numeric ? NULL : setlocale(LC_ALL, NULL));
    return 1;
}

static void keep_point(lua_State *L)
{
    lua_getglobal(L, LUA_OSLIBNAME);
    lua_getfield(L, -1, "setlocale");
    if (lua_iscfunction(L, -1) && lua_tocfunction(L, -1) != sys_setlocale) {
        lua_pushcclosure(L, sys_setlocale, 1);
        lua_setfield(L, -2, "setlocale");
    } else {
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

void lr_lua_open_sys(lua_State *L)
{
    static const luaL_Reg fns[] = {
        {"now", sys_now},
        {"thread_seconds", sys_thread_seconds},
        {"sleep", sys_sleep},
        {"isatty", sys_isatty},
        {"term_width", sys_term_width},
        {"raw", sys_raw},
        {"read", sys_read},
        {"char_width", sys_char_width},
        {"memory", sys_memory},
        {"trim_memory", sys_trim_memory},
        {"fail_alloc", sys_fail_alloc},
        {"cpus", sys_cpus},
        {"stat", sys_stat},
        {"list", sys_list},
        {"mkdir", sys_mkdir},
        {"executable", sys_executable},
        {"private_file", sys_private_file},
        {"private_folder", sys_private_folder},
        {"ids", sys_ids},
        {NULL, NULL},
    };
    static const luaL_Reg private_methods[] = {{"write", private_write}, {"close", private_close}, {NULL, NULL}};
    keep_point(L);
    lr_lua_class(L, "llmrun.dir", NULL, dir_close);
    lr_lua_class(L, PRIVATE_FILE, private_methods, private_close);
    luaL_setfuncs(L, fns, 0);
}
