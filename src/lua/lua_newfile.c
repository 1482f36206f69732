/* lua_newfile.c - binds files that are written whole or not at all (file/newfile.h); lua/llmrun/files.lua is over it.
 */
#include "file/newfile.h"
#include "lua/lua_int.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define NEWFILE "llmrun.newfile"

typedef struct newfile_ud {
    FILE *out; /* over a descriptor of its own of the same file; NULL: closed */
    lr_newfile file;
} newfile_ud;

static int newfile_close(lua_State *L)
{
    newfile_ud *u = luaL_checkudata(L, 1, NEWFILE);
    if (u->out) fclose(u->out);
    u->out = NULL;
    lr_newfile_discard(&u->file);
    u->file = (lr_newfile){.fd = -1};
    return 0;
}

/* newfile(path) -> a file that is not there yet; nil, text, code */
static int core_newfile(lua_State *L)
{
    const char *path = lr_lua_check_path(L, 1);
    newfile_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    *u = (newfile_ud){.file = {.fd = -1}};
    luaL_setmetatable(L, NEWFILE);
    lr_error err;
    if (lr_newfile_open(&u->file, path, 0666, &err)) return lr_lua_fail(L, &err);
    int fd = dup(u->file.fd);
    u->out = fd < 0 ? NULL : fdopen(fd, "wb");
    if (u->out) return 1;
    lr_fail(&err, LR_EIO, "%s: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    return lr_lua_fail(L, &err);
}

static newfile_ud *check_newfile(lua_State *L) { return lr_lua_check_open(L, 1, NEWFILE, "the file"); }

static int failed(lua_State *L, const newfile_ud *u)
{
    lr_error err;
    lr_fail(&err, LR_EIO, "%s: %s", u->file.path, strerror(errno));
    return lr_lua_fail(L, &err);
}

/* f:write(text ...) -> true; nil, text, code */
static int newfile_write(lua_State *L)
{
    newfile_ud *u = check_newfile(L);
    for (int i = 2; i <= lua_gettop(L); i++) {
        size_t n;
        const char *text = luaL_checklstring(L, i, &n);
        if (fwrite(text, 1, n, u->out) != n) return failed(L, u);
    }
    lua_pushboolean(L, true);
    return 1;
}

/* f:finish() -> true: it is there, and f closed; nil, text, code: it is not */
static int newfile_finish(lua_State *L)
{
    newfile_ud *u = check_newfile(L);
    FILE *out = u->out;
    u->out = NULL;
    if (fclose(out) != 0) return failed(L, u);
    lr_error err;
    if (lr_newfile_finish(&u->file, &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, true);
    return 1;
}

void lr_lua_open_newfile(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"write", newfile_write}, {"finish", newfile_finish}, {"close", newfile_close}, {NULL, NULL}};
    lr_lua_class(L, NEWFILE, methods, newfile_close);
    lua_pushcfunction(L, core_newfile);
    lua_setfield(L, -2, "newfile");
}
