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
#include "model/folder.h"
#include "model/from_gguf.h"
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
    const char *path = lr_lua_check_path(L, 1);
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

/* The list at 4 as an array of a type, written "[f32]": strings, bools and numbers of 32 bits. */
static int put_list(lua_State *L, writer_ud *u, const char *key, const char *type)
{
    static const struct {
        const char *name;
        int type;
        size_t size;
    } kinds[] = {{"[str]", LR_KV_STR, sizeof(lr_str)},
                 {"[bool]", LR_KV_BOOL, 1},
                 {"[f32]", LR_KV_F32, 4},
                 {"[i32]", LR_KV_I32, 4},
                 {"[u32]", LR_KV_U32, 4}};
    size_t k = 0, n;
    lr_error err;
    while (k < sizeof kinds / sizeof *kinds && strcmp(type, kinds[k].name) != 0) k++;
    luaL_argcheck(L, k < sizeof kinds / sizeof *kinds, 3, "no type of a list");
    luaL_checktype(L, 4, LUA_TTABLE);
    n = lua_rawlen(L, 4);
    char *list = lua_newuserdatauv(L, (n + 1) * kinds[k].size, 0);
    for (size_t i = 0; i < n; i++) {
        int t = lua_rawgeti(L, 4, (lua_Integer)i + 1);
        char *at = list + i * kinds[k].size;
        if (kinds[k].type == LR_KV_STR) {
            luaL_argcheck(L, t == LUA_TSTRING, 4, "a list of strings");
            lr_str *s = (lr_str *)(void *)at;
            s->s = lua_tolstring(L, -1, &s->n); /* the table keeps it */
        } else if (kinds[k].type == LR_KV_BOOL) {
            *at = (char)lua_toboolean(L, -1);
        } else if (kinds[k].type == LR_KV_F32) {
            float f = (float)luaL_checknumber(L, -1);
            memcpy(at, &f, sizeof f);
        } else {
            uint32_t v = (uint32_t)luaL_checkinteger(L, -1);
            memcpy(at, &v, sizeof v);
        }
        lua_pop(L, 1);
    }
    return done(L, lr_gguf_writer_array(u->w, key, kinds[k].type, list, n, &err), &err);
}

/* w:put(key, type, value) -> true or nil, message, code. type: "u32", "f32", "bool", "str", ..., or "[str]", "[bool]",
 * "[f32]", "[i32]", "[u32]" for a list. */
static int writer_put(lua_State *L)
{
    lr_error err;
    writer_ud *u = check_writer(L);
    lr_gguf_kv kv = {.key = luaL_checkstring(L, 2)};
    const char *type = luaL_checkstring(L, 3);
    if (type[0] == '[') return put_list(L, u, kv.key, type);
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
    int heads;   /* > 0: halves of so many heads become neighbours */
    bool last;   /* nothing follows */
    atomic_size_t next;
    atomic_bool bad;
} job;

/* The row that becomes row r. */
static size_t source_row(const job *j, size_t r)
{
    if (!j->heads) return r;
    size_t d = j->n / (size_t)j->heads, i = r % d;
    return r - i + i % 2 * (d / 2) + i / 2;
}

static void encode_rows(void *arg, int thread, int n_threads)
{
    job *j = arg;
    float *x = j->rows + (size_t)thread * j->k;
    for (;;) {
        size_t r = atomic_fetch_add(&j->next, 1);
        if (r >= j->n || j->bad) return;
        const uint8_t *row = j->in + source_row(j, r) * j->row_in;
        if (j->from == j->to) {
            memcpy(j->out + r * j->row_out, row, j->row_out);
            continue;
        }
        lr_dtype_to_f32(j->from, row, x, j->k);
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

/* Where a file's or folder's weights come from; what is rounded on the way is kept small (exact). */
static int source_of(lua_State *L, int idx, lr_weight_source *src, lr_error *err)
{
    lr_folder *f = lr_lua_to_folder(L, idx);
    if (f) return lr_folder_weights(f, true, 0, src, err);
    *src = lr_gguf_weights(lr_lua_check_gguf(L, idx));
    return 0;
}

static int rows_of(const lr_tensor *t, job *j, lua_Integer from, lua_Integer n, const char *name, lr_error *err)
{
    int64_t rows = 1;
    for (int i = 1; i < t->n_dims; i++) rows *= t->ne[i];
    j->k = (size_t)(t->n_dims ? t->ne[0] : 1);
    if (t->n_dims == 1 && j->heads) { /* a bias: its values are the rows */
        rows = t->ne[0];
        j->k = 1;
    }
    if (n < 0) n = rows - from;
    if (from < 0 || from > rows || n > rows - from)
        return lr_fail(err, LR_EINVAL, "tensor '%s' has %lld rows", name, (long long)rows);
    if (j->k % (size_t)lr_dtype_block(j->to))
        return lr_fail(err, LR_EINVAL, "rows of tensor '%s' are no whole blocks of %s", name, lr_dtype_name(j->to));
    if (j->heads && (rows % (2 * j->heads) || from || n != rows))
        return lr_fail(err, LR_EINVAL, "tensor '%s': %lld rows can't be %d heads' pairs", name, (long long)rows,
                       j->heads);
    j->n = (size_t)n;
    j->from = t->type;
    j->row_in = j->k / (size_t)lr_dtype_block(j->from) * (size_t)lr_dtype_bytes(j->from);
    j->row_out = j->k / (size_t)lr_dtype_block(j->to) * (size_t)lr_dtype_bytes(j->to);
    j->in = (const uint8_t *)t->data + (size_t)from * j->row_in;
    j->last = from + n == rows;
    return 0;
}

/* w:encode(source, name, type, from, n [, importance [, heads]]) -> true or nil, message, code: rows from .. from+n-1
 * (n < 0: all that follow) of a tensor of a GGUF file or folder become the next rows of the tensor at hand. importance:
 * float32s as a string, one a value of a row. heads: the rows are those of so many heads, whose halves are to become
 * neighbours (RoPE as GGUF files of some architectures want it). */
static int writer_encode(lua_State *L)
{
    lr_error err;
    lr_weight_source src;
    lr_tensor t = {0};
    writer_ud *u = check_writer(L);
    const char *name = luaL_checkstring(L, 3);
    job j = {.to = check_dtype(L, 4), .heads = (int)luaL_optinteger(L, 8, 0)};
    lua_Integer from = luaL_checkinteger(L, 5), n = luaL_checkinteger(L, 6);
    luaL_argcheck(L, lr_dtype_writable(j.to) || j.heads == 0, 4, "can't be written");
    luaL_argcheck(L, j.heads >= 0 && j.heads <= 1 << 16, 8, "no number of heads");
    size_t len = 0;
    const char *imp = luaL_optlstring(L, 7, NULL, &len);
    if (source_of(L, 2, &src, &err)) return lr_lua_fail(L, &err);
    int rc = src.find(src.user, name, &t) ? 0 : lr_fail(&err, LR_ENOTFOUND, "there is no tensor '%s'", name);
    if (!rc && !t.data) rc = src.load(src.user, &t, &err);
    if (!rc) rc = rows_of(&t, &j, from, n, name, &err);
    if (!rc && imp && (len != j.k * sizeof(float) || (uintptr_t)imp % _Alignof(float)))
        rc =
            lr_fail(&err, LR_EINVAL, "importances of tensor '%s': %zu, where a row has %zu values", name, len / 4, j.k);
    j.importance = (const float *)(const void *)imp;
    if (!rc && j.from == j.to && !j.heads)
        rc = lr_gguf_writer_data(u->w, j.in, j.n * j.row_in, &err);
    else if (!rc)
        rc = encode(u, &j, name, &err);
    if (!rc && src.intact) rc = src.intact(src.user, true, &err);
    if (t.data && src.used && (rc || j.last)) src.used(src.user, &t, true);
    if (src.free) src.free(src.user);
    return done(L, rc, &err);
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
