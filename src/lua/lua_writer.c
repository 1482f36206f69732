/* lua_writer.c - binds the GGUF writer, with tensors encoded on the way: gguf_writer and its methods.
 *
 * lua/llmrun/quantize.lua decides which tensor gets which type; rows are read from the mapped file, converted to
 * float32 and encoded on all threads, a piece at a time, so that memory is bounded by the piece.
 */
#include "base/encode.h"
#include "base/mem.h"
#include "base/pool.h"
#include "file/gguf_write.h"
#include "lua/lua_int.h"
#include <limits.h>
#include <stdatomic.h>
#include <string.h>

#define WRITER "llmrun.gguf_writer"

typedef struct writer_ud {
    lr_gguf_writer *w;
    lr_pool *pool;
    uint8_t *out; /* the encoded piece */
    size_t cap;
} writer_ud;

static int writer_close(lua_State *L)
{
    writer_ud *u = luaL_checkudata(L, 1, WRITER);
    lr_gguf_writer_free(u->w);
    lr_pool_free(u->pool);
    lr_free(u->out);
    *u = (writer_ud){0};
    return 0;
}

static writer_ud *check_writer(lua_State *L) { return lr_lua_check_open(L, 1, WRITER, "writer"); }

/* gguf_writer(path, threads) -> writer, or nil, message, code */
static int writer_new(lua_State *L)
{
    lr_error err;
    const char *path = luaL_checkstring(L, 1);
    int threads = (int)luaL_optinteger(L, 2, 0);
    luaL_argcheck(L, threads >= 0 && threads <= 256, 2, "0 to 256 threads");
    writer_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    *u = (writer_ud){0};
    luaL_setmetatable(L, WRITER);
    if (lr_pool_new(&u->pool, threads, &err) || lr_gguf_writer_new(&u->w, path, &err)) return lr_lua_fail(L, &err);
    return 1;
}

static int kv_type(lua_State *L, int idx)
{
    const char *name = luaL_checkstring(L, idx);
#define X(e, n, text, bytes)                                                                                           \
    if (strcmp(name, text) == 0) return e;
    LR_KV_LIST(X)
#undef X
    return luaL_argerror(L, idx, "no type of a GGUF value");
}

static int done(lua_State *L, int failed, const lr_error *err)
{
    if (failed) return lr_lua_fail(L, err);
    lua_pushboolean(L, 1);
    return 1;
}

/* w:put(key, type, value) -> true or nil, message, code. type: "u32", "f32", "bool", "str", or "[str]", "[u32]", ...
 * for a list. */
static int writer_put(lua_State *L)
{
    lr_error err;
    writer_ud *u = check_writer(L);
    lr_gguf_kv kv = {.key = luaL_checkstring(L, 2)};
    const char *type = luaL_checkstring(L, 3);
    lr_str *list = NULL;
    if (strcmp(type, "[str]") == 0) {
        luaL_checktype(L, 4, LUA_TTABLE);
        size_t n = lua_rawlen(L, 4);
        list = lua_newuserdatauv(L, (n + 1) * sizeof *list, 0);
        for (size_t i = 0; i < n; i++) {
            if (lua_rawgeti(L, 4, (lua_Integer)i + 1) != LUA_TSTRING) return luaL_argerror(L, 4, "a list of strings");
            list[i].s = lua_tolstring(L, -1, &list[i].n);
            lua_pop(L, 1); /* the table keeps it */
        }
        return done(L, lr_gguf_writer_array(u->w, kv.key, LR_KV_STR, list, n, &err), &err);
    }
    if (strcmp(type, "[f32]") == 0 || strcmp(type, "[i32]") == 0 || strcmp(type, "[u32]") == 0) {
        luaL_checktype(L, 4, LUA_TTABLE);
        size_t n = lua_rawlen(L, 4);
        uint32_t *v = lua_newuserdatauv(L, (n + 1) * sizeof *v, 0);
        for (size_t i = 0; i < n; i++) {
            lua_rawgeti(L, 4, (lua_Integer)i + 1);
            float f = (float)luaL_checknumber(L, -1);
            if (type[1] == 'f')
                memcpy(v + i, &f, 4);
            else
                v[i] = (uint32_t)luaL_checkinteger(L, -1);
            lua_pop(L, 1);
        }
        int t = type[1] == 'f' ? LR_KV_F32 : type[1] == 'i' ? LR_KV_I32 : LR_KV_U32;
        return done(L, lr_gguf_writer_array(u->w, kv.key, t, v, n, &err), &err);
    }
    kv.type = kv_type(L, 3);
    switch (kv.type) {
    case LR_KV_STR: {
        kv.v.s.s = luaL_checklstring(L, 4, &kv.v.s.n);
        break;
    }
    case LR_KV_BOOL:
        luaL_checktype(L, 4, LUA_TBOOLEAN);
        kv.v.b = lua_toboolean(L, 4);
        break;
    case LR_KV_F32:
    case LR_KV_F64:
        kv.v.f = luaL_checknumber(L, 4);
        break;
    case LR_KV_U8:
    case LR_KV_U16:
    case LR_KV_U32:
    case LR_KV_U64:
        kv.v.u = (uint64_t)luaL_checkinteger(L, 4);
        break;
    case LR_KV_ARRAY:
        return luaL_argerror(L, 3, "a list's type is written as [str]");
    default:
        kv.v.i = luaL_checkinteger(L, 4);
    }
    return done(L, lr_gguf_writer_put(u->w, &kv, &err), &err);
}

/* w:copy(gguf, key) -> true or nil, message, code: the key as it is in another file */
static int writer_copy(lua_State *L)
{
    lr_error err;
    writer_ud *u = check_writer(L);
    const lr_gguf_kv *kv = lr_gguf_find(lr_lua_check_gguf(L, 2), luaL_checkstring(L, 3));
    luaL_argcheck(L, kv, 3, "no such key");
    return done(L, lr_gguf_writer_put(u->w, kv, &err), &err);
}

static int check_dtype(lua_State *L, int idx)
{
    int t = lr_dtype_parse(luaL_checkstring(L, idx));
    luaL_argcheck(L, t >= 0, idx, "no type of a tensor");
    return t;
}

/* w:tensor(name, type, shape) -> true or nil, message, code: declares the next tensor */
static int writer_tensor(lua_State *L)
{
    lr_error err;
    writer_ud *u = check_writer(L);
    const char *name = luaL_checkstring(L, 2);
    int type = check_dtype(L, 3);
    luaL_checktype(L, 4, LUA_TTABLE);
    uint64_t ne[4];
    int dims = (int)lua_rawlen(L, 4);
    luaL_argcheck(L, dims <= 4, 4, "at most 4 dimensions");
    for (int i = 0; i < dims; i++) {
        lua_rawgeti(L, 4, i + 1);
        ne[i] = (uint64_t)luaL_checkinteger(L, -1);
        lua_pop(L, 1);
    }
    return done(L, lr_gguf_writer_tensor(u->w, name, type, dims, ne, &err), &err);
}

/* w:data(bytes) -> true or nil, message, code: the next bytes of the tensor at hand, as they are */
static int writer_data(lua_State *L)
{
    lr_error err;
    size_t n;
    writer_ud *u = check_writer(L);
    const char *s = luaL_checklstring(L, 2, &n);
    return done(L, lr_gguf_writer_data(u->w, s, n, &err), &err);
}

typedef struct job {
    int from, to;
    size_t k, n, row_in, row_out; /* values, rows, bytes of a row */
    const uint8_t *in;
    uint8_t *out;
    const float *importance;
    float *rows; /* a row of floats a thread */
    atomic_size_t next;
    atomic_bool bad;
} job;

static void encode_rows(void *arg, int thread, int n_threads)
{
    job *j = arg;
    float *x = j->rows + (size_t)thread * j->k;
    for (;;) {
        size_t r = atomic_fetch_add(&j->next, 1);
        if (r >= j->n || j->bad) return;
        lr_dtype_to_f32(j->from, j->in + r * j->row_in, x, j->k);
        if (!lr_dtype_from_f32(j->to, x, j->importance, j->out + r * j->row_out, j->k)) j->bad = true;
    }
}

static int grow(writer_ud *u, size_t n, lr_error *err)
{
    if (n <= u->cap) return 0;
    lr_free(u->out);
    u->out = lr_malloc(n);
    u->cap = u->out ? n : 0;
    return u->out ? 0 : lr_fail(err, LR_ENOMEM, "no memory for %zu bytes of encoded rows", n);
}

static int encode(writer_ud *u, job *j, const char *name, lr_error *err)
{
    size_t floats, bytes;
    if (!lr_mul(j->k, (size_t)lr_pool_threads(u->pool) * sizeof(float), &floats) || !lr_mul(j->n, j->row_out, &bytes))
        return lr_fail(err, LR_ELIMIT, "tensor '%s' is too large", name);
    if (grow(u, bytes, err)) return err->code;
    j->out = u->out;
    j->rows = lr_malloc(floats);
    if (!j->rows) return lr_fail(err, LR_ENOMEM, "no memory for rows of tensor '%s'", name);
    lr_pool_run(u->pool, encode_rows, j);
    lr_free(j->rows);
    if (j->bad)
        return lr_fail(err, LR_EFORMAT, "tensor '%s' has values that %s can't hold (infinite, or no number)", name,
                       lr_dtype_name(j->to));
    return lr_gguf_writer_data(u->w, u->out, bytes, err);
}

/* w:encode(gguf, name, type, from, n [, importance]) -> true or nil, message, code: rows from .. from+n-1 of another
 * file's tensor become the next rows of the tensor at hand. importance: float32s as a string, one a value of a row. */
static int writer_encode(lua_State *L)
{
    lr_error err;
    writer_ud *u = check_writer(L);
    const char *name = luaL_checkstring(L, 3);
    const lr_gguf_tensor *t = lr_gguf_find_tensor(lr_lua_check_gguf(L, 2), name);
    luaL_argcheck(L, t, 3, "no such tensor");
    job j = {.from = t->type, .to = check_dtype(L, 4), .k = (size_t)t->ne[0]};
    luaL_argcheck(L, lr_dtype_writable(j.to), 4, "can't be written");
    luaL_argcheck(L, j.k % (size_t)lr_dtype_block(j.to) == 0, 4, "its blocks don't divide a row");
    uint64_t rows = t->ne[1] * t->ne[2] * t->ne[3];
    lua_Integer from = luaL_checkinteger(L, 5), n = luaL_checkinteger(L, 6);
    luaL_argcheck(L, from >= 0 && n >= 0 && (uint64_t)from <= rows && (uint64_t)n <= rows - (uint64_t)from, 5,
                  "the tensor has no such rows");
    j.n = (size_t)n;
    j.row_in = j.k / (size_t)lr_dtype_block(j.from) * (size_t)lr_dtype_bytes(j.from);
    j.row_out = j.k / (size_t)lr_dtype_block(j.to) * (size_t)lr_dtype_bytes(j.to);
    j.in = (const uint8_t *)t->data + (size_t)from * j.row_in;
    if (!lua_isnoneornil(L, 7)) {
        size_t len;
        const char *s = luaL_checklstring(L, 7, &len);
        luaL_argcheck(L, len == j.k * sizeof(float) && (uintptr_t)s % _Alignof(float) == 0, 7,
                      "not one float32 a value of a row");
        j.importance = (const float *)(const void *)s;
    }
    if (j.from == j.to) return done(L, lr_gguf_writer_data(u->w, j.in, j.n * j.row_in, &err), &err);
    return done(L, encode(u, &j, name, &err), &err);
}

/* w:finish() -> true or nil, message, code: the file gets its name */
static int writer_finish(lua_State *L)
{
    lr_error err;
    return done(L, lr_gguf_writer_finish(check_writer(L)->w, &err), &err);
}

static const luaL_Reg methods[] = {
    {"put", writer_put},       {"copy", writer_copy},     {"tensor", writer_tensor}, {"data", writer_data},
    {"encode", writer_encode}, {"finish", writer_finish}, {"close", writer_close},   {NULL, NULL}};

/* dtype_info(name) -> name as it is written, values a block, bytes a block, whether it can be encoded; nil if unknown
 */
static int dtype_info(lua_State *L)
{
    int t = lr_dtype_parse(luaL_checkstring(L, 1));
    if (t < 0) return 0;
    lua_pushstring(L, lr_dtype_name(t));
    lua_pushinteger(L, lr_dtype_block(t));
    lua_pushinteger(L, lr_dtype_bytes(t));
    lua_pushboolean(L, lr_dtype_writable(t));
    return 4;
}

void lr_lua_open_writer(lua_State *L)
{
    lr_lua_class(L, WRITER, methods, writer_close);
    lua_pushcfunction(L, writer_new);
    lua_setfield(L, -2, "gguf_writer");
    lua_pushcfunction(L, dtype_info);
    lua_setfield(L, -2, "dtype_info");
}
