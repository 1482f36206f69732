/* lua_folder.c - binds models in safetensors files: folder_new and its methods. What a folder holds beside them, and
 * which tensors make which weight, is decided in lua/llmrun/hf.
 */
#include "lua/lua_int.h"
#include "model/folder.h"
#include <string.h>

#define FOLDER "llmrun.folder"

typedef struct folder_ud {
    lr_folder *f;
} folder_ud;

static int folder_close(lua_State *L)
{
    folder_ud *u = luaL_checkudata(L, 1, FOLDER);
    lr_folder_free(u->f);
    u->f = NULL;
    return 0;
}

static lr_folder *check_folder(lua_State *L, int idx)
{
    return ((folder_ud *)lr_lua_check_open(L, idx, FOLDER, "folder"))->f;
}

lr_folder *lr_lua_to_folder(lua_State *L, int idx)
{
    return luaL_testudata(L, idx, FOLDER) ? check_folder(L, idx) : NULL;
}

/* folder_new() -> folder */
static int folder_new(lua_State *L)
{
    lr_error err;
    folder_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    u->f = NULL;
    luaL_setmetatable(L, FOLDER);
    return lr_folder_new(&u->f, &err) ? lr_lua_fail(L, &err) : 1;
}

/* f:open(path) -> true; nil, text, code */
static int folder_open(lua_State *L)
{
    lr_error err;
    if (lr_folder_open(check_folder(L, 1), lr_lua_check_path(L, 2), &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, true);
    return 1;
}

/* f:floats(name) -> the tensor's values as a text of float32; nil if there is none, or its type is no plain one */
static int folder_floats(lua_State *L)
{
    lr_error err;
    lr_folder *folder = check_folder(L, 1);
    const lr_safetensors_tensor *t = lr_folder_find(folder, luaL_checkstring(L, 2));
    if (!t || t->type < 0 || lr_dtype_block(t->type) != 1) return 0;
    size_t n = t->size / (size_t)lr_dtype_bytes(t->type);
    luaL_Buffer b;
    float *f = (float *)(void *)luaL_buffinitsize(L, &b, n * sizeof *f);
    lr_dtype_to_f32(t->type, t->data, f, n);
    luaL_pushresultsize(&b, n * sizeof *f);
    return lr_folder_intact(folder, false, &err) ? lr_lua_raise(L, &err) : 1;
}

/* f:tensors() -> list of {name=, dtype=, shape={as in the file}, bytes=, file=} */
static int folder_tensors(lua_State *L)
{
    lr_folder *f = check_folder(L, 1);
    size_t n = lr_folder_n_tensors(f), file = 0;
    lua_createtable(L, (int)n, 0);
    for (size_t i = 0; i < n; i++) {
        const lr_safetensors_tensor *t = lr_folder_tensor(f, i, &file);
        lua_createtable(L, 0, 5);
        lua_pushstring(L, t->name);
        lua_setfield(L, -2, "name");
        lua_pushstring(L, t->dtype);
        lua_setfield(L, -2, "dtype");
        lua_pushinteger(L, (lua_Integer)t->size);
        lua_setfield(L, -2, "bytes");
        lua_pushstring(L, lr_folder_path(f, file));
        lua_setfield(L, -2, "file");
        lr_lua_push_shape(L, t->shape, t->n_dims);
        lua_setfield(L, -2, "shape");
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* f:info(text) -> { bytes=, files={paths}, fingerprint= (of text too) } */
static int folder_info(lua_State *L)
{
    lr_folder *f = check_folder(L, 1);
    size_t n;
    const char *text = luaL_optlstring(L, 2, "", &n);
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, (lua_Integer)lr_folder_bytes(f));
    lua_setfield(L, -2, "bytes");
    lua_pushinteger(L, (lua_Integer)lr_folder_fingerprint(f, text, n));
    lua_setfield(L, -2, "fingerprint");
    lua_createtable(L, (int)lr_folder_n_files(f), 0);
    for (size_t i = 0; i < lr_folder_n_files(f); i++) {
        lua_pushstring(L, lr_folder_path(f, i));
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    lua_setfield(L, -2, "files");
    return 1;
}

static lr_part_spec check_part(lua_State *L, int idx)
{
    static const char *const kinds[] = {"plain", "gptq", "awq", "packed", "int8", "fp8", "mxfp4", NULL};
    luaL_checktype(L, idx, LUA_TTABLE);
    lr_part_spec p = {
        .w = lr_lua_opt_str(L, idx, "w", NULL),
        .scale = lr_lua_opt_str(L, idx, "scale", NULL),
        .zero = lr_lua_opt_str(L, idx, "zero", NULL),
        .order = lr_lua_opt_str(L, idx, "order", NULL),
        .bits = lr_lua_opt_i32(L, idx, "bits", 0),
        .zero_offset = lr_lua_opt_i32(L, idx, "zero_offset", 0),
        .block = {lr_lua_opt_i32(L, idx, "block_out", 0), lr_lua_opt_i32(L, idx, "block_in", 0)},
        .mul = (float)lr_lua_opt_num(L, idx, "mul", 1),
        .add = (float)lr_lua_opt_num(L, idx, "add", 0),
        .transpose = lr_lua_opt_bool(L, idx, "transpose", false),
        .index = lr_lua_opt_int(L, idx, "index", -1),
        .first = lr_lua_opt_int(L, idx, "first", 0),
        .count = lr_lua_opt_int(L, idx, "count", 0),
        .step = lr_lua_opt_int(L, idx, "step", 1),
    };
    const char *kind = lr_lua_opt_str(L, idx, "kind", "plain");
    int k = 0;
    while (kinds[k] && strcmp(kinds[k], kind) != 0) k++;
    if (!kinds[k]) luaL_error(L, "part of a weight: kind '%s'", kind);
    if (!p.w || (k != LR_PART_PLAIN && !p.scale)) luaL_error(L, "part of a weight: a tensor's name is missing");
    if (k == LR_PART_AWQ && !p.zero) luaL_error(L, "part of a weight: awq without zero points");
    p.kind = (lr_part_kind)k;
    return p;
}

/* f:add(name, {part, ...}, stack) -> type name, exact, {shape as the graph sees it}, bytes; nil, text, code. A part:
 * see check_part and lr_part_spec. */
static int folder_add(lua_State *L)
{
    lr_error err;
    lr_made made;
    lr_folder *f = check_folder(L, 1);
    const char *name = luaL_checkstring(L, 2);
    luaL_checktype(L, 3, LUA_TTABLE);
    lua_Integer n = luaL_len(L, 3);
    luaL_argcheck(L, n > 0 && n <= 1 << 16, 3, "a list of parts expected");
    lr_part_spec *parts = lua_newuserdatauv(L, (size_t)n * sizeof *parts, 0);
    for (lua_Integer i = 1; i <= n; i++) {
        lua_rawgeti(L, 3, i);
        parts[i - 1] = check_part(L, lua_gettop(L));
        lua_pop(L, 1); /* its strings stay in the list */
    }
    if (lr_folder_add(f, name, parts, (size_t)n, lua_toboolean(L, 4), &made, &err)) return lr_lua_fail(L, &err);
    int64_t ne[4];
    int dims = lr_folder_shape(f, name, ne);
    lua_pushstring(L, lr_dtype_name(made.type));
    lua_pushboolean(L, made.exact);
    lua_createtable(L, dims, 0);
    int64_t blocks = ne[0] / lr_dtype_block(made.type);
    for (int i = 0; i < dims; i++) {
        lua_pushinteger(L, ne[i]);
        lua_rawseti(L, -2, i + 1);
        if (i) blocks *= ne[i];
    }
    lua_pushinteger(L, blocks * lr_dtype_bytes(made.type));
    return 4;
}

void lr_lua_open_folder(lua_State *L)
{
    static const luaL_Reg methods[] = {{"open", folder_open}, {"tensors", folder_tensors}, {"floats", folder_floats},
                                       {"info", folder_info}, {"add", folder_add},         {"close", folder_close},
                                       {NULL, NULL}};
    lr_lua_class(L, FOLDER, methods, folder_close);
    lua_pushcfunction(L, folder_new);
    lua_setfield(L, -2, "folder_new");
}
