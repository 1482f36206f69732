/* lua_text.c - binds vocabularies: text to ids and back, what a token is, the streaming detokenizer. */
#include "base/mem.h"
#include "lua/lua_int.h"
#include "text/pipe.h"
#include "text/text.h"
#include <string.h>

typedef struct vocab_ud {
    lr_vocab *v;
} vocab_ud;

static int vocab_close(lua_State *L)
{
    vocab_ud *u = luaL_checkudata(L, 1, LR_LUA_VOCAB);
    lr_vocab_unref(u->v);
    u->v = NULL;
    return 0;
}

void lr_lua_push_vocab(lua_State *L, struct lr_vocab *v)
{
    vocab_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    u->v = NULL;
    luaL_setmetatable(L, LR_LUA_VOCAB);
    u->v = lr_vocab_ref(v);
}

struct lr_vocab *lr_lua_check_vocab(lua_State *L, int idx)
{
    return ((vocab_ud *)lr_lua_check_open(L, idx, LR_LUA_VOCAB, "vocabulary"))->v;
}

/* A block of lr_malloc that the collector frees: for results that are pushed while an error may be raised. */
#define BLOCK "llmrun.block"
static int block_close(lua_State *L)
{
    void **p = luaL_checkudata(L, 1, BLOCK);
    lr_free(*p);
    *p = NULL;
    return 0;
}

static void **new_block(lua_State *L)
{
    void **p = lua_newuserdatauv(L, sizeof *p, 0);
    *p = NULL;
    luaL_setmetatable(L, BLOCK);
    return p;
}

unsigned lr_lua_tok_flags(lua_State *L, int idx)
{
    return (lr_lua_opt_bool(L, idx, "special", false) ? LR_TOK_SPECIAL : 0u) |
           (lr_lua_opt_bool(L, idx, "bos", false) ? LR_TOK_BOS : 0u);
}

/* v:encode(text, {special=, bos=}) -> ids; nil, text, code */
static int vocab_encode(lua_State *L)
{
    lr_vocab *v = lr_lua_check_vocab(L, 1);
    size_t len, n = 0;
    const char *text = luaL_checklstring(L, 2, &len);
    unsigned flags = lr_lua_tok_flags(L, 3);
    lr_error err;
    int32_t *ids = NULL;
    void **block = new_block(L);
    if (lr_tokenize(v, text, len, flags, &ids, &n, &err)) return lr_lua_fail(L, &err);
    *block = ids;
    lr_lua_push_ids(L, ids, n);
    lr_free(*block);
    *block = NULL;
    return 1;
}

/* v:decode(ids, special) -> text */
static int vocab_decode(lua_State *L)
{
    lr_vocab *v = lr_lua_check_vocab(L, 1);
    size_t n, len = 0;
    bool special = lua_toboolean(L, 3);
    const int32_t *ids = lr_lua_check_ids(L, 2, lr_vocab_size(v), &n);
    lr_error err;
    char *text = NULL;
    void **block = new_block(L);
    if (lr_detokenize(v, ids, n, special, &text, &len, &err)) return lr_lua_fail(L, &err);
    *block = text;
    lua_pushlstring(L, text, len);
    lr_free(*block);
    *block = NULL;
    return 1;
}

static int32_t check_id(lua_State *L, const lr_vocab *v, int idx)
{
    lua_Integer id = luaL_checkinteger(L, idx);
    luaL_argcheck(L, id >= 0 && id < (lua_Integer)lr_vocab_size(v), idx, "no id of this vocabulary");
    return (int32_t)id;
}

/* v:piece(id) -> bytes it stands for, its raw text in the file */
static int vocab_piece(lua_State *L)
{
    lr_vocab *v = lr_lua_check_vocab(L, 1);
    int32_t id = check_id(L, v, 2);
    size_t n = 0;
    const char *s = lr_vocab_piece(v, id, &n);
    lua_pushlstring(L, n ? s : "", n);
    s = lr_vocab_raw(v, id, &n);
    lua_pushlstring(L, n ? s : "", n);
    return 2;
}

/* v:kind(id) -> "normal", "unknown", "control", "user", "unused" or "byte"; whether it ends generation */
static int vocab_kind(lua_State *L)
{
    static const char *const names[] = {"normal", "normal", "unknown", "control", "user", "unused", "byte"};
    lr_vocab *v = lr_lua_check_vocab(L, 1);
    int32_t id = check_id(L, v, 2);
    int t = lr_vocab_type(v, id);
    lua_pushstring(L, t >= 0 && t <= LR_TT_BYTE ? names[t] : "normal");
    lua_pushboolean(L, lr_vocab_is_eog(v, id));
    return 2;
}

/* v:find(text) -> id or nil */
static int vocab_find(lua_State *L)
{
    size_t n;
    const char *s = luaL_checklstring(L, 2, &n);
    int32_t id = lr_vocab_find(lr_lua_check_vocab(L, 1), s, n);
    if (id < 0) return 0;
    lua_pushinteger(L, id);
    return 1;
}

static void set_id(lua_State *L, const char *name, int32_t id)
{
    if (id < 0) return;
    lua_pushinteger(L, id);
    lua_setfield(L, -2, name);
}

/* v:info() -> { size, bos, eos, eot, unk, pad, add_bos, add_eos, eog = {ids} }; absent where there is none */
static int vocab_info(lua_State *L)
{
    lr_vocab *v = lr_lua_check_vocab(L, 1);
    lua_createtable(L, 0, 10);
    lua_pushinteger(L, lr_vocab_size(v));
    lua_setfield(L, -2, "size");
    set_id(L, "bos", lr_vocab_bos(v));
    set_id(L, "eos", lr_vocab_eos(v));
    set_id(L, "eot", lr_vocab_eot(v));
    set_id(L, "unk", lr_vocab_unk(v));
    set_id(L, "pad", lr_vocab_pad(v));
    lua_pushboolean(L, lr_vocab_add_bos(v));
    lua_setfield(L, -2, "add_bos");
    lua_pushboolean(L, lr_vocab_add_eos(v));
    lua_setfield(L, -2, "add_eos");
    lua_newtable(L);
    lua_Integer n = 0;
    for (uint32_t i = 0; i < lr_vocab_size(v); i++) {
        if (!lr_vocab_is_eog(v, (int32_t)i)) continue;
        lua_pushinteger(L, i);
        lua_rawseti(L, -2, ++n);
    }
    lua_setfield(L, -2, "eog");
    return 1;
}

static int vocab_len(lua_State *L)
{
    lua_pushinteger(L, lr_vocab_size(lr_lua_check_vocab(L, 1)));
    return 1;
}

/* Streaming detokenizer: a plain value beside a vocabulary, which the user value keeps. */
#define DETOK "llmrun.detok"

/* v:detok(special, prompt_ids) -> detokenizer */
static int vocab_detok(lua_State *L)
{
    lr_vocab *v = lr_lua_check_vocab(L, 1);
    bool special = lua_toboolean(L, 2), primed = !lua_isnoneornil(L, 3);
    size_t n = 0;
    const int32_t *ids = primed ? lr_lua_check_ids(L, 3, lr_vocab_size(v), &n) : NULL;
    lr_detok *d = lua_newuserdatauv(L, sizeof *d, 1);
    luaL_setmetatable(L, DETOK);
    lua_pushvalue(L, 1);
    lua_setiuservalue(L, -2, 1);
    lr_detok_init(d, v, special);
    if (primed) lr_detok_prime(d, ids, n);
    return 1;
}

/* d:push(id) -> text that is complete now, perhaps "" */
static int detok_push(lua_State *L)
{
    lr_detok *d = luaL_checkudata(L, 1, DETOK);
    char buf[LR_DETOK_CAP];
    size_t n = lr_detok_push(d, check_id(L, d->v, 2), buf, sizeof buf);
    lua_pushlstring(L, buf, n);
    return 1;
}

/* d:flush() -> what is left, U+FFFD for half a character */
static int detok_flush(lua_State *L)
{
    lr_detok *d = luaL_checkudata(L, 1, DETOK);
    char buf[LR_DETOK_CAP];
    lua_pushlstring(L, buf, lr_detok_flush(d, buf, sizeof buf));
    return 1;
}

/* Strings of the list t[field] into borrowed lr_str (they stay on the table); NULL if absent. A userdata that holds the
 * array is left on the stack. */
static const lr_str *str_list(lua_State *L, int idx, const char *field, size_t *n)
{
    *n = 0;
    if (lua_getfield(L, idx, field) == LUA_TNIL) return NULL;
    luaL_argcheck(L, lua_istable(L, -1), idx, "lists of strings expected");
    size_t count = (size_t)luaL_len(L, -1);
    lr_str *s = lua_newuserdatauv(L, (count + 1) * sizeof *s, 0);
    for (size_t i = 0; i < count; i++) {
        if (lua_rawgeti(L, -2, (lua_Integer)i + 1) != LUA_TSTRING)
            luaL_error(L, "%s[%d]: string expected, got %s", field, (int)i + 1, luaL_typename(L, -1));
        s[i].s = lua_tolstring(L, -1, &s[i].n);
        lua_pop(L, 1);
    }
    *n = count;
    return s;
}

/* Numbers of the list t[field], which must have n of them; NULL if absent. Left on the stack as str_list does. */
static void *num_list(lua_State *L, int idx, const char *field, size_t n, bool floats)
{
    if (lua_getfield(L, idx, field) == LUA_TNIL) return NULL;
    luaL_argcheck(L, lua_istable(L, -1), idx, "lists of numbers expected");
    if ((size_t)luaL_len(L, -1) != n)
        luaL_error(L, "%s has %d entries, tokens %d", field, (int)luaL_len(L, -1), (int)n);
    void *p = lua_newuserdatauv(L, (n + 1) * 4, 0);
    for (size_t i = 0; i < n; i++) {
        lua_rawgeti(L, -2, (lua_Integer)i + 1);
        if (floats)
            ((float *)p)[i] = (float)luaL_checknumber(L, -1);
        else
            ((int32_t *)p)[i] = (int32_t)luaL_checkinteger(L, -1);
        lua_pop(L, 1);
    }
    return p;
}

/* The list of ids t[field], as num_list's; *n of them. */
static const int32_t *id_list(lua_State *L, int idx, const char *field, size_t *n)
{
    lua_Integer len = lua_getfield(L, idx, field) == LUA_TTABLE ? luaL_len(L, -1) : 0;
    lua_pop(L, 1);
    *n = len > 0 && len < INT32_MAX ? (size_t)len : 0;
    return *n ? num_list(L, idx, field, *n, false) : NULL;
}

static int choice(lua_State *L, const char *value, const char *const *names, const char *what)
{
    for (int i = 0; names[i]; i++)
        if (strcmp(value, names[i]) == 0) return i;
    return luaL_error(L, "%s: '%s'", what, value);
}

static lr_str str_field(lua_State *L, int idx, const char *field)
{
    lr_str s = {"", 0};
    if (lua_getfield(L, idx, field) == LUA_TSTRING) s.s = lua_tolstring(L, -1, &s.n);
    lua_pop(L, 1); /* the table keeps it */
    return s;
}

/* The steps of the list t.steps: { kind=, regex=, pattern=, content=, behavior=, prepend=, a=, b= }; left on the stack.
 */
static const lr_step_spec *step_list(lua_State *L, int idx, size_t *n)
{
    static const char *const kinds[] = {"nfc",           "nfd",     "nfkc",        "nfkd",     "lower", "strip",
                                        "strip_accents", "replace", "prepend",     "charsmap", "split", "gpt2",
                                        "metaspace",     "digits",  "punctuation", "spaces",   NULL};
    static const char *const behaviors[] = {"removed", "isolated", "previous", "next", "contiguous", NULL};
    static const char *const prepends[] = {"never", "first", "always", NULL};
    *n = 0;
    if (lua_getfield(L, idx, "steps") == LUA_TNIL) return NULL;
    luaL_argcheck(L, lua_istable(L, -1), idx, "steps: a list expected");
    lua_Integer count = luaL_len(L, -1);
    luaL_argcheck(L, count >= 0 && count <= LR_PIPE_STEPS, idx, "too many steps");
    lr_step_spec *steps = lua_newuserdatauv(L, (size_t)(count + 1) * sizeof *steps, 0);
    for (lua_Integer i = 0; i < count; i++) {
        lua_rawgeti(L, -2, i + 1);
        int t = lua_gettop(L);
        luaL_argcheck(L, lua_istable(L, t), idx, "steps: tables expected");
        steps[i] = (lr_step_spec){
            .kind = (lr_step_kind)choice(L, lr_lua_opt_str(L, t, "kind", ""), kinds, "kind of a step"),
            .regex = lr_lua_opt_bool(L, t, "regex", false),
            .pattern = str_field(L, t, "pattern"),
            .content = str_field(L, t, "content"),
            .behavior =
                (lr_split_behavior)choice(L, lr_lua_opt_str(L, t, "behavior", "isolated"), behaviors, "behavior"),
            .prepend = choice(L, lr_lua_opt_str(L, t, "prepend", "never"), prepends, "prepend"),
            .a = lr_lua_opt_bool(L, t, "a", false),
            .b = lr_lua_opt_bool(L, t, "b", false),
        };
        lua_pop(L, 1);
    }
    *n = (size_t)count;
    return steps;
}

/* Numbers of the list t[field], n of them, as num_list does. */
static const double *double_list(lua_State *L, int idx, const char *field, size_t n)
{
    if (lua_getfield(L, idx, field) == LUA_TNIL) return NULL;
    luaL_argcheck(L, lua_istable(L, -1) && (size_t)luaL_len(L, -1) == n, idx, "a score for each token expected");
    double *p = lua_newuserdatauv(L, (n + 1) * sizeof *p, 0);
    for (size_t i = 0; i < n; i++) {
        lua_rawgeti(L, -2, (lua_Integer)i + 1);
        p[i] = luaL_checknumber(L, -1);
        lua_pop(L, 1);
    }
    return p;
}

/* -1, 1 for false, true; 0 for nil */
static int opt_choice(lua_State *L, int idx, const char *field)
{
    int type = lua_getfield(L, idx, field), on = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return type == LUA_TNIL ? 0 : on ? 1 : -1;
}

/* vocab_new{ model=, pre=, tokens=, scores=, types=, merges=, bos=, eos=, unk=, eot=, pad=, add_bos=, add_eos=,
 * add_space_prefix=, prefix_once=, fuse_unk=, logs=, steps=, nfc=, whole=, eogs={ids}, flags={id, lr_token_edge, ...} }
 * -> vocabulary; nil, text, code */
static int core_vocab_new(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lr_vocab_spec s = {
        .model = lr_lua_opt_str(L, 1, "model", "gpt2"),
        .pre = lr_lua_opt_str(L, 1, "pre", NULL),
        .bos = lr_lua_opt_i32(L, 1, "bos", -1),
        .eos = lr_lua_opt_i32(L, 1, "eos", -1),
        .unk = lr_lua_opt_i32(L, 1, "unk", -1),
        .eot = lr_lua_opt_i32(L, 1, "eot", -1),
        .pad = lr_lua_opt_i32(L, 1, "pad", -1),
        .add_bos = lr_lua_opt_bool(L, 1, "add_bos", false),
        .add_eos = lr_lua_opt_bool(L, 1, "add_eos", false),
        .add_space_prefix = lr_lua_opt_bool(L, 1, "add_space_prefix", false),
        .prefix_once = lr_lua_opt_bool(L, 1, "prefix_once", false),
        .fuse_unk = lr_lua_opt_bool(L, 1, "fuse_unk", false),
    };
    size_t n;
    s.tokens = str_list(L, 1, "tokens", &n);
    luaL_argcheck(L, s.tokens && n > 0 && n <= LR_VOCAB_MAX, 1, "tokens: a list of strings expected");
    s.n_tokens = (uint32_t)n;
    s.scores = num_list(L, 1, "scores", n, true);
    s.types = num_list(L, 1, "types", n, false);
    s.merges = str_list(L, 1, "merges", &s.n_merges);
    s.eogs = id_list(L, 1, "eogs", &s.n_eogs);
    s.edges = id_list(L, 1, "flags", &s.n_edges);
    s.n_edges /= 2;
    s.logs = double_list(L, 1, "logs", n);
    s.steps = step_list(L, 1, &s.n_steps);
    s.nfc = opt_choice(L, 1, "nfc");
    s.whole = opt_choice(L, 1, "whole");
    vocab_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    u->v = NULL;
    luaL_setmetatable(L, LR_LUA_VOCAB);
    lr_error err;
    return lr_vocab_new(&u->v, &s, &err) ? lr_lua_fail(L, &err) : 1;
}

void lr_lua_open_text(lua_State *L)
{
    static const luaL_Reg vocab_methods[] = {
        {"encode", vocab_encode}, {"decode", vocab_decode}, {"piece", vocab_piece}, {"kind", vocab_kind},
        {"find", vocab_find},     {"info", vocab_info},     {"detok", vocab_detok}, {NULL, NULL}};
    static const luaL_Reg detok_methods[] = {{"push", detok_push}, {"flush", detok_flush}, {NULL, NULL}};
    lr_lua_class(L, BLOCK, NULL, block_close);
    lr_lua_class(L, LR_LUA_VOCAB, vocab_methods, vocab_close);
    lr_lua_class(L, DETOK, detok_methods, NULL);
    luaL_getmetatable(L, LR_LUA_VOCAB);
    lua_pushcfunction(L, vocab_len);
    lua_setfield(L, -2, "__len");
    lua_pop(L, 1);
    lua_pushcfunction(L, core_vocab_new);
    lua_setfield(L, -2, "vocab_new");
}
