/* lua_graph.c - binds GGUF files and layer graphs: gguf_open, graph_new and their methods.
 *
 * A graph's nodes are integers here; lua/llmrun/graph.lua makes the objects that architecture scripts handle. Building
 * calls raise on error (they run inside a script that is loaded under pcall, so the traceback names the line).
 */
#include "base/dtype.h"
#include "base/mem.h"
#include "file/gguf.h"
#include "lua/lua_int.h"
#include "model/folder.h"
#include "model/from_gguf.h"
#include "model/graph.h"
#include "model/parallel.h"
#include <string.h>

#define GGUF  "llmrun.gguf"
#define GRAPH "llmrun.graph"

typedef struct gguf_ud {
    lr_gguf *g;
} gguf_ud;
typedef struct graph_ud {
    lr_graph *g;
} graph_ud;

/* ---- GGUF ---- */

static int gguf_close(lua_State *L)
{
    gguf_ud *u = luaL_checkudata(L, 1, GGUF);
    lr_gguf_free(u->g);
    u->g = NULL;
    return 0;
}

lr_gguf *lr_lua_check_gguf(lua_State *L, int idx)
{
    return ((gguf_ud *)lr_lua_check_open(L, idx, GGUF, "gguf file"))->g;
}

static int gguf_open(lua_State *L)
{
    lr_error err;
    const char *path = lr_lua_check_path(L, 1);
    gguf_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    u->g = NULL;
    luaL_setmetatable(L, GGUF);
    return lr_gguf_open(&u->g, path, &err) ? lr_lua_fail(L, &err) : 1;
}

static void push_array(lua_State *L, const lr_gguf_array *a, int depth)
{
    luaL_checkstack(L, 4, "metadata arrays are nested too deep");
    lua_createtable(L, a->count < 1 << 24 ? (int)a->count : 0, 0);
    for (size_t i = 0; i < a->count; i++) {
        if (a->type == LR_KV_STR)
            lua_pushlstring(L, ((const lr_str *)a->data)[i].s ? ((const lr_str *)a->data)[i].s : "",
                            ((const lr_str *)a->data)[i].n);
        else if (a->type == LR_KV_ARRAY)
            push_array(L, (const lr_gguf_array *)a->data + i, depth + 1);
        else if (a->type == LR_KV_BOOL)
            lua_pushboolean(L, lr_gguf_array_i64(a, i) != 0);
        else if (a->type == LR_KV_F32 || a->type == LR_KV_F64)
            lua_pushnumber(L, lr_gguf_array_f64(a, i));
        else
            lua_pushinteger(L, lr_gguf_array_i64(a, i));
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
}

static void push_value(lua_State *L, const lr_gguf_kv *kv)
{
    switch (kv->type) {
    case LR_KV_U8:
    case LR_KV_U16:
    case LR_KV_U32:
        lua_pushinteger(L, (lua_Integer)kv->v.u);
        break;
    case LR_KV_U64:
        if (kv->v.u <= INT64_MAX)
            lua_pushinteger(L, (lua_Integer)kv->v.u);
        else
            lua_pushnumber(L, (lua_Number)kv->v.u);
        break;
    case LR_KV_I8:
    case LR_KV_I16:
    case LR_KV_I32:
    case LR_KV_I64:
        lua_pushinteger(L, kv->v.i);
        break;
    case LR_KV_F32:
    case LR_KV_F64:
        lua_pushnumber(L, kv->v.f);
        break;
    case LR_KV_BOOL:
        lua_pushboolean(L, kv->v.b);
        break;
    case LR_KV_STR:
        lua_pushlstring(L, kv->v.s.s ? kv->v.s.s : "", kv->v.s.n);
        break;
    case LR_KV_ARRAY:
        push_array(L, &kv->v.a, 0);
        break;
    default:
        lua_pushnil(L);
    }
}

/* g:get(key) -> value, type name ("u32", "array" ...) or nil */
static int gguf_get(lua_State *L)
{
    const lr_gguf_kv *kv = lr_gguf_find(lr_lua_check_gguf(L, 1), luaL_checkstring(L, 2));
    if (!kv) return 0;
    push_value(L, kv);
    lua_pushstring(L, lr_kv_type_name(kv->type));
    return 2;
}

/* g:floats(name) -> the tensor's values as a text of float32; nil if there is none, or its type is no plain one */
static int gguf_floats(lua_State *L)
{
    lr_error err;
    lr_gguf *g = lr_lua_check_gguf(L, 1);
    const lr_gguf_tensor *t = lr_gguf_find_tensor(g, luaL_checkstring(L, 2));
    if (!t || lr_dtype_block(t->type) != 1) return 0;
    size_t n = t->size / (size_t)lr_dtype_bytes(t->type);
    luaL_Buffer b;
    float *f = (float *)(void *)luaL_buffinitsize(L, &b, n * sizeof *f);
    lr_dtype_to_f32(t->type, t->data, f, n);
    luaL_pushresultsize(&b, n * sizeof *f);
    return lr_gguf_check_intact(g, &err) ? lr_lua_raise(L, &err) : 1;
}

/* g:keys() -> list of {key=, type=, count= (arrays)} in file order */
static int gguf_keys(lua_State *L)
{
    lr_gguf *g = lr_lua_check_gguf(L, 1);
    lua_createtable(L, (int)lr_gguf_n_kv(g), 0);
    for (size_t i = 0; i < lr_gguf_n_kv(g); i++) {
        const lr_gguf_kv *kv = lr_gguf_kv_at(g, i);
        lua_createtable(L, 0, 3);
        lua_pushstring(L, kv->key);
        lua_setfield(L, -2, "key");
        lua_pushstring(L, lr_kv_type_name(kv->type == LR_KV_ARRAY ? kv->v.a.type : kv->type));
        lua_setfield(L, -2, "type");
        if (kv->type == LR_KV_ARRAY) {
            lua_pushinteger(L, (lua_Integer)kv->v.a.count);
            lua_setfield(L, -2, "count");
        }
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* g:tensors() -> list of {name=, type=, shape={...}, bytes=} in file order */
static int gguf_tensors(lua_State *L)
{
    lr_gguf *g = lr_lua_check_gguf(L, 1);
    lua_createtable(L, (int)lr_gguf_n_tensors(g), 0);
    for (size_t i = 0; i < lr_gguf_n_tensors(g); i++) {
        const lr_gguf_tensor *t = lr_gguf_tensor_at(g, i);
        lua_createtable(L, 0, 4);
        lua_pushstring(L, t->name);
        lua_setfield(L, -2, "name");
        lua_pushstring(L, lr_dtype_name(t->type));
        lua_setfield(L, -2, "type");
        lua_pushinteger(L, (lua_Integer)t->size);
        lua_setfield(L, -2, "bytes");
        lr_lua_push_shape(L, t->ne, t->n_dims);
        lua_setfield(L, -2, "shape");
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* g:info() -> {version=, bytes=, shards={paths}, fingerprint=} */
static int gguf_info(lua_State *L)
{
    lr_gguf *g = lr_lua_check_gguf(L, 1);
    lua_createtable(L, 0, 4);
    lua_pushinteger(L, lr_gguf_version(g));
    lua_setfield(L, -2, "version");
    lua_pushinteger(L, (lua_Integer)lr_gguf_file_bytes(g));
    lua_setfield(L, -2, "bytes");
    lua_pushinteger(L, (lua_Integer)lr_gguf_fingerprint(g));
    lua_setfield(L, -2, "fingerprint");
    lua_createtable(L, lr_gguf_n_shards(g), 0);
    for (int i = 0; i < lr_gguf_n_shards(g); i++) {
        lua_pushstring(L, lr_gguf_shard_path(g, i));
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "shards");
    return 1;
}

/* g:vocab() -> vocabulary, or nil, message, code */
static int gguf_vocab(lua_State *L)
{
    lr_error err;
    lr_vocab *v;
    lr_gguf *g = lr_lua_check_gguf(L, 1);
    if (lr_gguf_vocab(g, &v, &err)) return lr_lua_fail(L, &err);
    lr_lua_push_vocab(L, v);
    lr_vocab_unref(v);
    return 1;
}

/* g:bytes(name) -> a tensor's data as they lie in the file; nil if there is none of that name */
static int gguf_bytes(lua_State *L)
{
    const lr_gguf_tensor *t = lr_gguf_find_tensor(lr_lua_check_gguf(L, 1), luaL_checkstring(L, 2));
    if (!t) return 0;
    lua_pushlstring(L, t->data, t->size);
    return 1;
}

/* ---- graphs ---- */

static int graph_close(lua_State *L)
{
    graph_ud *u = luaL_checkudata(L, 1, GRAPH);
    lr_graph_free(u->g);
    u->g = NULL;
    return 0;
}

static lr_graph *check_graph(lua_State *L) { return ((graph_ud *)lr_lua_check_open(L, 1, GRAPH, "graph"))->g; }

static lr_compute check_compute(lua_State *L, const char *s)
{
    static const char *const names[] = {"fast", "int8", "bf16", "f32", "loose"};
    for (int i = 0; i < 5; i++)
        if (strcmp(s, names[i]) == 0) return (lr_compute)i;
    luaL_error(L, "compute = '%s' is not one of fast, int8, bf16, f32, loose", s);
    return LR_COMPUTE_FAST;
}

/* graph_new(gguf or folder, {device=, threads=, isa=, compute="fast"|"bf16"|"f32", parted=}) -> graph, or nil, message,
 * code. parted: the model will be this rank's part of it. */
static int graph_new(lua_State *L)
{
    lr_error err;
    lr_folder *folder = lr_lua_to_folder(L, 1);
    lr_gguf *g = folder ? NULL : lr_lua_check_gguf(L, 1);
    lua_Integer threads = lr_lua_opt_int(L, 2, "threads", 0);
    if (threads < 0 || threads > INT32_MAX) {
        lr_fail(&err, LR_EINVAL, "threads = %lld is out of range", (long long)threads);
        return lr_lua_fail(L, &err);
    }
    lr_backend_config cfg = {
        .device = lr_lua_opt_str(L, 2, "device", NULL),
        .threads = (int)threads,
        .isa = lr_lua_opt_str(L, 2, "isa", NULL),
        .compute = check_compute(L, lr_lua_opt_str(L, 2, "compute", "fast")),
    };
    graph_ud *u = lua_newuserdatauv(L, sizeof *u, 1);
    u->g = NULL;
    luaL_setmetatable(L, GRAPH);
    lua_pushvalue(L, 1); /* the file stays open as long as the graph */
    lua_setiuservalue(L, -2, 1);
    lr_backend *be;
    lr_weight_source source;
    if (lr_backend_new(&be, &cfg, &err)) return lr_lua_fail(L, &err);
    if (!folder) {
        source = lr_gguf_weights(g);
    } else if (lr_folder_weights(folder, cfg.compute == LR_COMPUTE_F32, cfg.threads, &source, &err)) {
        lr_backend_free(be);
        return lr_lua_fail(L, &err);
    }
    if (lr_graph_new(&u->g, be, source, &err)) return lr_lua_fail(L, &err);
    if (lr_lua_opt_bool(L, 2, "parted", false) && lr_parallel_place()) lr_graph_set_place(u->g, lr_parallel_place());
    return 1;
}

static int check_node(lua_State *L, int idx)
{
    lua_Integer n = luaL_checkinteger(L, idx);
    luaL_argcheck(L, n >= 0 && n < 1 << 24, idx, "not a node");
    return (int)n;
}

static int node_or_raise(lua_State *L, int rc, int node, const lr_error *err)
{
    if (rc) return lr_lua_raise(L, err);
    lua_pushinteger(L, node);
    return 1;
}

/* g:shape(name) -> {ne...} or nil */
static int graph_shape(lua_State *L)
{
    int64_t ne[4];
    int n = lr_graph_shape(check_graph(L), luaL_checkstring(L, 2), ne);
    if (!n) return 0;
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushinteger(L, ne[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int graph_width(lua_State *L)
{
    lua_pushinteger(L, lr_graph_width(check_graph(L), check_node(L, 2)));
    return 1;
}

static int graph_embed(lua_State *L)
{
    lr_error err;
    int out = -1,
        rc = lr_graph_embed(check_graph(L), luaL_checkstring(L, 2), (float)luaL_optnumber(L, 3, 1.0), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:embed_at(weight): rows by position */
static int graph_embed_at(lua_State *L)
{
    lr_error err;
    int out = -1, rc = lr_graph_embed_at(check_graph(L), luaL_checkstring(L, 2), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:norm(x, weight | nil, {bias=, eps=, group=, layer_norm=}) */
static int graph_norm(lua_State *L)
{
    lr_error err;
    int out = -1,
        rc = lr_graph_norm(check_graph(L), check_node(L, 2), luaL_optstring(L, 3, NULL),
                           lr_lua_opt_str(L, 4, "bias", NULL), (float)lr_lua_opt_num(L, 4, "eps", 1e-5),
                           lr_lua_opt_i32(L, 4, "group", 0), lr_lua_opt_bool(L, 4, "layer_norm", false), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:linear(x, weight, bias | nil, n_out | 0, first row | -1) */
static int graph_linear(lua_State *L)
{
    lr_error err;
    int out = -1,
        rc = lr_graph_linear(check_graph(L), check_node(L, 2), luaL_checkstring(L, 3), luaL_optstring(L, 4, NULL),
                             (int)luaL_optinteger(L, 5, 0), (int)luaL_optinteger(L, 6, -1), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* The list `factors` of the options at 3, as a userdata on the stack; NULL and nil if it is a name or is not there. */
static const float *opt_factors(lua_State *L, int n)
{
    lua_getfield(L, 3, "factors");
    if (!lua_istable(L, -1)) {
        lua_pop(L, 1);
        lua_pushnil(L);
        return NULL;
    }
    if (n < 1 || luaL_len(L, -1) != n) luaL_error(L, "rope: %d factors where %d are needed", (int)luaL_len(L, -1), n);
    float *f = lua_newuserdatauv(L, (size_t)n * sizeof *f, 0);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, -2, i + 1);
        f[i] = (float)luaL_checknumber(L, -1);
        lua_pop(L, 1);
    }
    lua_remove(L, -2);
    return f;
}

/* g:rope(x, {heads=, head_dim=, rot=, interleaved=, base=, scale=, attn_scale=, factors= name or list}) */
static int graph_rope(lua_State *L)
{
    lr_error err;
    lr_rope r = {
        .n_heads = lr_lua_opt_i32(L, 3, "heads", 0),
        .head_dim = lr_lua_opt_i32(L, 3, "head_dim", 0),
        .interleaved = lr_lua_opt_bool(L, 3, "interleaved", false),
        .base = (float)lr_lua_opt_num(L, 3, "base", 10000),
        .freq_scale = (float)lr_lua_opt_num(L, 3, "scale", 1),
        .attn_scale = (float)lr_lua_opt_num(L, 3, "attn_scale", 1),
    };
    r.n_rot = lr_lua_opt_i32(L, 3, "rot", r.head_dim);
    r.factors = opt_factors(L, r.n_rot / 2);
    int out = -1, rc = lr_graph_rope(check_graph(L), check_node(L, 2), &r,
                                     r.factors ? NULL : lr_lua_opt_str(L, 3, "factors", NULL), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:attention(q, k, v, {heads=, kv_heads=, head_dim=, scale=, softcap=, window=, sinks=}) */
static int graph_attention(lua_State *L)
{
    lr_error err;
    lr_attn a = {
        .n_heads = lr_lua_opt_i32(L, 5, "heads", 0),
        .n_kv_heads = lr_lua_opt_i32(L, 5, "kv_heads", 0),
        .head_dim = lr_lua_opt_i32(L, 5, "head_dim", 0),
        .scale = (float)lr_lua_opt_num(L, 5, "scale", 0),
        .softcap = (float)lr_lua_opt_num(L, 5, "softcap", 0),
        .window = lr_lua_opt_i32(L, 5, "window", 0),
    };
    int out = -1, rc = lr_graph_attention(check_graph(L), check_node(L, 2), check_node(L, 3), check_node(L, 4), a,
                                          lr_lua_opt_str(L, 5, "sinks", NULL), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

static int binary(lua_State *L, lr_op_kind kind)
{
    lr_error err;
    int out = -1, rc = lr_graph_binary(check_graph(L), kind, check_node(L, 2), check_node(L, 3), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

static int graph_add(lua_State *L) { return binary(L, LR_OP_ADD); }
static int graph_mul(lua_State *L) { return binary(L, LR_OP_MUL); }

static lr_act check_act(lua_State *L, int idx)
{
    static const char *const names[] = {"silu", "gelu", "gelu_erf", "relu", "relu2", "sigmoid", "swiglu_clamp", NULL};
    return (lr_act)luaL_checkoption(L, idx, NULL, names);
}

static int graph_glu(lua_State *L)
{
    lr_error err;
    int out = -1, rc = lr_graph_glu(check_graph(L), check_node(L, 2), check_node(L, 3), check_act(L, 4), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

static int graph_act(lua_State *L)
{
    lr_error err;
    int out = -1, rc = lr_graph_act(check_graph(L), check_node(L, 2), check_act(L, 3), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

static int graph_scale(lua_State *L)
{
    lr_error err;
    int out = -1,
        rc = lr_graph_scale(check_graph(L), LR_OP_SCALE, check_node(L, 2), (float)luaL_checknumber(L, 3), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

static int graph_softcap(lua_State *L)
{
    lr_error err;
    int out = -1,
        rc = lr_graph_scale(check_graph(L), LR_OP_SOFTCAP, check_node(L, 2), (float)luaL_checknumber(L, 3), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:slice(x, heads, first, n) */
static int graph_slice(lua_State *L)
{
    lr_error err;
    int out = -1, rc = lr_graph_slice(check_graph(L), check_node(L, 2), (int)luaL_checkinteger(L, 3),
                                      (int)luaL_checkinteger(L, 4), (int)luaL_checkinteger(L, 5), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:concat(a, b | nil, heads, n) */
static int graph_concat(lua_State *L)
{
    lr_error err;
    int b = lua_isnil(L, 3) ? -1 : check_node(L, 3), out = -1,
        rc = lr_graph_concat(check_graph(L), check_node(L, 2), b, (int)luaL_checkinteger(L, 4),
                             (int)luaL_checkinteger(L, 5), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:route(logits, {experts=, used=, gate=, normalize=, scale=, groups=, groups_used=, group_best=, bias=}) */
static int graph_route(lua_State *L)
{
    static const char *const gates[] = {"softmax", "sigmoid", "softmax_chosen"};
    lr_error err;
    lr_route t = {
        .n_experts = lr_lua_opt_i32(L, 3, "experts", 0),
        .n_used = lr_lua_opt_i32(L, 3, "used", 0),
        .normalize = lr_lua_opt_bool(L, 3, "normalize", false),
        .scale = (float)lr_lua_opt_num(L, 3, "scale", 1),
        .n_groups = lr_lua_opt_i32(L, 3, "groups", 0),
        .n_groups_used = lr_lua_opt_i32(L, 3, "groups_used", 0),
        .group_best = lr_lua_opt_i32(L, 3, "group_best", 1),
    };
    const char *gate = lr_lua_opt_str(L, 3, "gate", gates[0]);
    int i = 0, out = -1;
    while (i < 3 && strcmp(gate, gates[i]) != 0) i++;
    if (i == 3) return luaL_error(L, "route: gate '%s' is not one of softmax, sigmoid, softmax_chosen", gate);
    t.gate = (lr_gate)i;
    int rc = lr_graph_route(check_graph(L), check_node(L, 2), &t, lr_lua_opt_str(L, 3, "bias", NULL), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:experts(x, route, weight, bias | nil, n_out | 0) */
static int graph_experts(lua_State *L)
{
    lr_error err;
    int out = -1, rc = lr_graph_experts(check_graph(L), check_node(L, 2), check_node(L, 3), luaL_checkstring(L, 4),
                                        luaL_optstring(L, 5, NULL), (int)luaL_optinteger(L, 6, 0), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:mix(x, route) */
static int graph_mix(lua_State *L)
{
    lr_error err;
    int out = -1, rc = lr_graph_mix(check_graph(L), check_node(L, 2), check_node(L, 3), &out, &err);
    return node_or_raise(L, rc, out, &err);
}

/* g:finish(logits, hidden | nil, vocab, {name=, ctx=, fingerprint=}) -> model, and the graph is
 * used up; nil, text, code */
static int graph_finish(lua_State *L)
{
    lr_error err;
    lr_graph *g = check_graph(L);
    graph_ud *u = lua_touserdata(L, 1);
    int logits = check_node(L, 2), hidden = lua_isnoneornil(L, 3) ? -1 : check_node(L, 3);
    lr_graph_info info = {
        .name = lr_lua_opt_str(L, 5, "name", NULL),
        .n_ctx = lr_lua_opt_i32(L, 5, "ctx", 0),
        .vocab = lr_lua_check_vocab(L, 4),
        .fingerprint = (uint64_t)lr_lua_opt_int(L, 5, "fingerprint", 0),
    };
    lr_lua_model *m = lr_lua_new_model(L);
    lua_getiuservalue(L, 1, 1); /* the model keeps the file open */
    lua_setiuservalue(L, -2, 1);
    if (lr_graph_finish(g, logits, hidden, &info, &m->model, &err)) return lr_lua_fail(L, &err);
    u->g = NULL;
    return 1;
}

static const luaL_Reg gguf_methods[] = {{"get", gguf_get},       {"keys", gguf_keys},   {"tensors", gguf_tensors},
                                        {"info", gguf_info},     {"vocab", gguf_vocab}, {"bytes", gguf_bytes},
                                        {"floats", gguf_floats}, {"close", gguf_close}, {NULL, NULL}};
static const luaL_Reg graph_methods[] = {{"shape", graph_shape}, {"width", graph_width},
                                         {"embed", graph_embed}, {"embed_at", graph_embed_at},
                                         {"norm", graph_norm},   {"linear", graph_linear},
                                         {"rope", graph_rope},   {"attention", graph_attention},
                                         {"add", graph_add},     {"mul", graph_mul},
                                         {"glu", graph_glu},     {"act", graph_act},
                                         {"scale", graph_scale}, {"softcap", graph_softcap},
                                         {"slice", graph_slice}, {"concat", graph_concat},
                                         {"route", graph_route}, {"experts", graph_experts},
                                         {"mix", graph_mix},     {"finish", graph_finish},
                                         {"close", graph_close}, {NULL, NULL}};

void lr_lua_open_graph(lua_State *L)
{
    lr_lua_class(L, GGUF, gguf_methods, gguf_close);
    lr_lua_class(L, GRAPH, graph_methods, graph_close);
    lua_pushcfunction(L, gguf_open);
    lua_setfield(L, -2, "gguf_open");
    lua_pushcfunction(L, graph_new);
    lua_setfield(L, -2, "graph_new");
}
