/* lua_spec.c - speculation: options of a request, Lua functions that draft, suffix memories, the draft model.
 *
 * A function that drafts is called as f(ctx) inside the engine's step, once for each step in which its request has a
 * token, so it can't wait. ctx is a table that lives as long as the request (the function may keep things in it) with
 * most, batch, acceptance, method, n_prompt, n_generated, last and the methods tokens(n, all) and cost(rows). What it
 * returns: nothing (as the options say), false (no draft), a number of tokens, a method's name, both, or the tokens,
 * which are a tree if there are `parents` in their list.
 */
#include "engine/speculate.h"
#include "base/mem.h"
#include "lua/lua_spec_int.h"
#include <string.h>

#define SUFFIX "llmrun.suffix"
#define CTX    "llmrun.draft_ctx"
#define HOLDER "llmrun.drafter" /* a hook until a request takes it over */

/* ---- what a drafter returns ---- */

/* { id, id, ..., parents = { place, ... } }: the place of the token that each one follows, 0 = the text. */
static void read_parents(lua_State *L, int idx, lr_spec_choice *c)
{
    int type = lua_getfield(L, idx, "parents");
    c->branches = type != LUA_TNIL;
    if (c->branches && type != LUA_TTABLE)
        luaL_error(L, "draft: parents: a list expected, got %s", luaL_typename(L, -1));
    for (int i = 0; c->branches && i < c->n; i++) {
        int ok;
        lua_rawgeti(L, -1, i + 1);
        lua_Integer p = lua_tointegerx(L, -1, &ok);
        if (!ok || p < 0 || p > i)
            luaL_error(L, "draft: the parent of token %d is no place before it: %s", i + 1,
                       luaL_tolstring(L, -1, NULL));
        lua_pop(L, 1);
        c->parent[i] = (int)p - 1;
    }
    lua_pop(L, 1);
}

static void read_tokens(lua_State *L, int idx, lr_spec_choice *c)
{
    lua_Integer n = luaL_len(L, idx);
    if (n > LR_SPEC_MAX) n = LR_SPEC_MAX;
    c->method = LR_SPEC_GIVEN;
    c->n = 0;
    for (lua_Integer i = 1; i <= n; i++) {
        int ok;
        lua_rawgeti(L, idx, i);
        lua_Integer id = lua_tointegerx(L, -1, &ok);
        if (!ok) luaL_error(L, "draft: token %I is no id but a %s", (LUAI_UACINT)i, luaL_typename(L, -1));
        lua_pop(L, 1);
        if (id < 0 || id > INT32_MAX) break;
        c->tokens[c->n++] = (int32_t)id;
    }
    c->k = c->n;
    read_parents(L, idx, c);
}

static void read_method(lua_State *L, int idx, lr_spec_choice *c)
{
    int m = lr_spec_method_parse(lua_tostring(L, idx));
    if (m < 0 || m == LR_SPEC_GIVEN)
        luaL_error(L,
                   "draft: '%s' is no method: \"ngram\", \"suffix\", \"draft\", \"early_exit\", \"heads\", \"eagle\" "
                   "or \"off\"",
                   lua_tostring(L, idx));
    c->method = (lr_spec_method)m;
}

void lr_lua_read_draft(lua_State *L, int idx, lr_spec_choice *c)
{
    switch (lua_type(L, idx)) {
    case LUA_TNIL:
        return;
    case LUA_TBOOLEAN:
        if (!lua_toboolean(L, idx)) c->method = LR_SPEC_OFF;
        return;
    case LUA_TSTRING:
        read_method(L, idx, c);
        c->k = -1;
        return;
    case LUA_TTABLE:
        read_tokens(L, idx, c);
        return;
    case LUA_TNUMBER: {
        int ok;
        lua_Integer k = lua_tointegerx(L, idx, &ok);
        if (!ok || k < 0) luaL_error(L, "draft: a number of tokens expected, got %s", luaL_tolstring(L, idx, NULL));
        c->k = k > LR_SPEC_MAX ? LR_SPEC_MAX : (int)k;
        if (lua_type(L, idx + 1) == LUA_TSTRING) read_method(L, idx + 1, c);
        return;
    }
    default:
        luaL_error(L, "draft: tokens, a number, a method or nothing expected, got %s", luaL_typename(L, idx));
    }
}

static void set_int(lua_State *L, const char *name, lua_Integer v)
{
    lua_pushinteger(L, v);
    lua_setfield(L, -2, name);
}

void lr_lua_set_draft(lua_State *L, const lr_spec_choice *c)
{
    set_int(L, "most", c->most);
    set_int(L, "batch", c->batch);
    lua_pushnumber(L, c->acceptance);
    lua_setfield(L, -2, "acceptance");
    lua_pushstring(L, lr_spec_method_name(c->method));
    lua_setfield(L, -2, "method");
}

/* ---- functions that draft ---- */

/* References a table { function, ctx } in the registry. */
typedef struct hook {
    lua_State *L; /* the main state */
    int ref;
} hook;

static lr_request *current; /* while a function drafts */

static void hook_free(void *user)
{
    hook *h = user;
    luaL_unref(h->L, LUA_REGISTRYINDEX, h->ref);
    lr_free(h);
}

/* Protected: hook, choice (light userdata). */
static int run_drafter(lua_State *L)
{
    const hook *h = lua_touserdata(L, 1);
    lr_spec_choice *c = lua_touserdata(L, 2);
    const lr_req_info *in = lr_request_info(current);
    size_t n = lr_seq_len(in->seq);
    lua_rawgeti(L, LUA_REGISTRYINDEX, h->ref);
    lua_rawgeti(L, 3, 1);
    lua_rawgeti(L, 3, 2);
    lr_lua_set_draft(L, c);
    set_int(L, "n_prompt", in->n_prompt);
    set_int(L, "n_generated", (lua_Integer)n - in->n_prompt);
    set_int(L, "last", lr_seq_tokens(in->seq)[n - 1]);
    lua_call(L, 1, 2);
    lr_lua_read_draft(L, lua_gettop(L) - 1, c);
    return 0;
}

static int choose(void *user, lr_request *r, lr_spec_choice *c, lr_error *err)
{
    hook *h = user;
    lua_State *L = lr_lua_step_state() ? lr_lua_step_state() : h->L;
    lr_request *before = current;
    if (!lua_checkstack(L, 8)) return lr_fail(err, LR_ENOMEM, "the Lua stack is full");
    current = r;
    lua_pushcfunction(L, run_drafter);
    lua_pushlightuserdata(L, h);
    lua_pushlightuserdata(L, c);
    int rc = lr_lua_call(L, 2, 0, err);
    current = before;
    return rc ? lr_fail_prefix(err, "draft function") : 0;
}

static lr_request *check_current(lua_State *L)
{
    if (!current) luaL_error(L, "ctx can be asked inside its draft function only");
    return current;
}

/* ctx:tokens([n [, all]]) -> list of the last n generated tokens (all of them by default); all: prompt tokens too */
static int ctx_tokens(lua_State *L)
{
    const lr_req_info *in = lr_request_info(check_current(L));
    size_t len = lr_seq_len(in->seq), have = lua_toboolean(L, 3) ? len : len - (size_t)in->n_prompt, n = have;
    if (!lua_isnoneornil(L, 2)) {
        lua_Integer k = luaL_checkinteger(L, 2);
        luaL_argcheck(L, k >= 0, 2, "negative");
        if ((size_t)k < n) n = (size_t)k;
    }
    lr_lua_push_ids(L, lr_seq_tokens(in->seq) + len - n, n);
    return 1;
}

/* ctx:cost(rows) -> seconds that a step of so many rows takes, and those of a pass of the draft model; 0 = not known */
static int ctx_cost(lua_State *L)
{
    double step, pass;
    lua_Integer rows = luaL_checkinteger(L, 2);
    luaL_argcheck(L, rows >= 0 && rows <= INT32_MAX, 2, "not a number of rows");
    lr_engine_pace(lr_request_engine(check_current(L)), (int)rows, &step, &pass);
    lua_pushnumber(L, step);
    lua_pushnumber(L, pass);
    return 2;
}

/* ---- options of a request ---- */

static lr_suffix **check_suffix(lua_State *L, int idx) { return lr_lua_check_open(L, idx, SUFFIX, "memory"); }

static int holder_close(lua_State *L)
{
    hook **h = luaL_checkudata(L, 1, HOLDER);
    if (*h) hook_free(*h);
    *h = NULL;
    return 0;
}

/* The function at the stack's top as a hook; pushes its holder. */
static hook **make_hook(lua_State *L)
{
    if (!lua_isfunction(L, -1)) luaL_error(L, "speculate: a function expected, got %s", luaL_typename(L, -1));
    hook **holder = lua_newuserdatauv(L, sizeof(hook *), 0);
    *holder = NULL;
    luaL_setmetatable(L, HOLDER);
    lua_pushvalue(L, -2);
    lua_createtable(L, 2, 0);
    lua_insert(L, -2);
    lua_rawseti(L, -2, 1);
    lua_newtable(L);
    luaL_setmetatable(L, CTX);
    lua_rawseti(L, -2, 2);
    int ref = luaL_ref(L, LUA_REGISTRYINDEX);
    hook *h = lr_malloc(sizeof *h);
    if (!h) {
        luaL_unref(L, LUA_REGISTRYINDEX, ref);
        luaL_error(L, "no memory for a draft function");
        return NULL;
    }
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    *h = (hook){lua_tothread(L, -1), ref};
    lua_pop(L, 1);
    *holder = h;
    return holder;
}

void **lr_lua_read_spec(lua_State *L, int idx, lr_spec_params *p)
{
    const char *name = lr_lua_opt_str(L, idx, "method", "off"), *accept = lr_lua_opt_str(L, idx, "accept", "same");
    int m = lr_spec_method_parse(name);
    if (m < 0) luaL_error(L, "speculate: unknown method '%s'", name);
    *p = lr_spec_defaults((lr_spec_method)m);
    p->k = lr_lua_opt_i32(L, idx, "k", 0);
    p->fixed = lr_lua_opt_bool(L, idx, "fixed", false);
    p->branches = lr_lua_opt_i32(L, idx, "branches", 0);
    p->min_match = lr_lua_opt_i32(L, idx, "min_match", p->min_match);
    p->max_match = lr_lua_opt_i32(L, idx, "max_match", p->max_match > p->min_match ? p->max_match : p->min_match);
    p->layers = lr_lua_opt_i32(L, idx, "layers", 0);
    p->distribution = strcmp(accept, "distribution") == 0;
    if (!p->distribution && strcmp(accept, "same") != 0) luaL_error(L, "speculate: unknown accept '%s'", accept);
    if (lua_getfield(L, idx, "memory") != LUA_TNIL) p->memory = *check_suffix(L, lua_gettop(L));
    lua_pop(L, 1);
    if (lua_getfield(L, idx, "fn") == LUA_TNIL) return NULL;
    hook **holder = make_hook(L);
    p->user = *holder;
    p->choose = choose;
    p->free = hook_free;
    return (void **)holder;
}

void lr_lua_push_spec_stats(lua_State *L, const lr_spec_stats *s)
{
    lua_createtable(L, 0, 7);
    set_int(L, "drafts", (lua_Integer)s->drafts);
    set_int(L, "drafted", (lua_Integer)s->drafted);
    set_int(L, "accepted", (lua_Integer)s->accepted);
    lua_pushnumber(L, s->draft_time);
    lua_setfield(L, -2, "draft_time");
    lua_pushnumber(L, s->verify_time);
    lua_setfield(L, -2, "verify_time");
    lua_newtable(L);
    lua_newtable(L);
    for (int i = 0; i < LR_SPEC_POSITIONS && s->tried_at[i]; i++) {
        lua_pushinteger(L, (lua_Integer)s->accepted_at[i]);
        lua_rawseti(L, -2, i + 1);
        lua_pushinteger(L, (lua_Integer)s->tried_at[i]);
        lua_rawseti(L, -3, i + 1);
    }
    lua_setfield(L, -3, "accepted_at");
    lua_setfield(L, -2, "tried_at");
}

/* ---- the draft model ---- */

/* e:set_draft(model, { kv_blocks =, context =, shortlist = }) -> true; nil, text, code. The engine takes the model
 * over. */
int lr_lua_engine_set_draft(lua_State *L)
{
    lr_engine_ud *u = lr_lua_check_engine(L, 1);
    lr_lua_check_model(L, 2);
    lr_lua_model *m = lua_touserdata(L, 2);
    lr_error err;
    lr_draft_config c = {.kv_blocks = lr_lua_opt_i32(L, 3, "kv_blocks", 0),
                         .context = lr_lua_opt_i32(L, 3, "context", 0),
                         .shortlist = lr_lua_opt_i32(L, 3, "shortlist", 0)};
    if (c.kv_blocks < 0 || c.context < 0) return luaL_error(L, "draft: a negative size");
    if (lr_engine_set_draft(u->e, m->model, &c, &err)) return lr_lua_fail(L, &err);
    m->model = NULL;
    lua_pushvalue(L, 2);
    lua_setiuservalue(L, 1, 3); /* keeps its file */
    lua_pushboolean(L, 1);
    return 1;
}

/* e:set_eagle(path, { heads =, kv_heads =, head_dim =, eps =, rope_base =, taps =, as_is =, kv_blocks = }) -> true;
 * nil, text, code */
int lr_lua_engine_set_eagle(lua_State *L)
{
    lr_engine *e = lr_lua_check_engine(L, 1)->e;
    const char *path = lr_lua_check_path(L, 2);
    lr_error err;
    lr_eagle_config c = {.n_heads = lr_lua_opt_i32(L, 3, "heads", 0),
                         .n_kv_heads = lr_lua_opt_i32(L, 3, "kv_heads", 0),
                         .head_dim = lr_lua_opt_i32(L, 3, "head_dim", 0)};
    lr_draft_config d = {.kv_blocks = lr_lua_opt_i32(L, 3, "kv_blocks", 0)};
    lua_getfield(L, 3, "eps");
    c.eps = (float)luaL_optnumber(L, -1, 1e-6);
    lua_getfield(L, 3, "rope_base");
    c.rope_base = (float)luaL_optnumber(L, -1, 10000);
    lua_getfield(L, 3, "as_is");
    c.as_is = lua_toboolean(L, -1);
    for (int i = 0; i < 3 && lua_getfield(L, 3, "taps") == LUA_TTABLE; i++) {
        lua_geti(L, -1, i + 1);
        c.taps[i] = (int)luaL_optinteger(L, -1, 0);
    }
    if (d.kv_blocks < 0) return luaL_error(L, "eagle: a negative size");
    if (lr_engine_set_eagle(e, path, &c, &d, &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

/* e:set_heads(path) -> true; nil, text, code */
int lr_lua_engine_set_heads(lua_State *L)
{
    lr_error err;
    if (lr_engine_set_heads(lr_lua_check_engine(L, 1)->e, lr_lua_check_path(L, 2), &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

/* e:pace(rows) -> seconds of a step of so many rows, and of a pass of the draft model; 0 = not known */
int lr_lua_engine_pace(lua_State *L)
{
    double step, pass;
    lua_Integer rows = luaL_checkinteger(L, 2);
    lr_engine_pace(lr_lua_check_engine(L, 1)->e, rows < 0 || rows > INT32_MAX ? 0 : (int)rows, &step, &pass);
    lua_pushnumber(L, step);
    lua_pushnumber(L, pass);
    return 2;
}

/* e:pace_hold(held): while held, steps say nothing of what plain ones and drafts take */
int lr_lua_engine_pace_hold(lua_State *L)
{
    lr_engine_pace_hold(lr_lua_check_engine(L, 1)->e, lua_toboolean(L, 2));
    return 0;
}

/* e:pace_forget(): what was measured, and what drafts gained */
int lr_lua_engine_pace_forget(lua_State *L)
{
    lr_engine_pace_forget(lr_lua_check_engine(L, 1)->e);
    return 0;
}

/* e:drafting() -> seconds that making the drafts of the last step took */
int lr_lua_engine_drafting(lua_State *L)
{
    lua_pushnumber(L, lr_engine_drafting(lr_lua_check_engine(L, 1)->e));
    return 1;
}

/* ---- memories ---- */

static int suffix_close(lua_State *L)
{
    lr_suffix **s = luaL_checkudata(L, 1, SUFFIX);
    lr_suffix_unref(*s);
    *s = NULL;
    return 0;
}

/* suffix_new([max_tokens]) -> memory; nil, text, code */
static int core_suffix_new(lua_State *L)
{
    lua_Integer max = luaL_optinteger(L, 1, 1 << 18);
    luaL_argcheck(L, max >= 1 && max <= 1 << 26, 1, "not a number of tokens");
    lr_suffix **s = lua_newuserdatauv(L, sizeof *s, 0);
    lr_error err;
    *s = NULL;
    luaL_setmetatable(L, SUFFIX);
    return lr_suffix_new(s, (int)max, &err) ? lr_lua_fail(L, &err) : 1;
}

/* m:add(ids) -> m: one text */
static int suffix_add(lua_State *L)
{
    lr_suffix *s = *check_suffix(L, 1);
    size_t n;
    lr_error err;
    const int32_t *ids = lr_lua_check_ids(L, 2, INT32_MAX, &n);
    if (lr_suffix_extend(s, ids, (int)(n > INT32_MAX ? INT32_MAX : n), &err) || lr_suffix_end(s, &err))
        return lr_lua_raise(L, &err);
    lua_settop(L, 1);
    return 1;
}

/* m:propose(ids, k [, min]) -> what followed the longest suffix of ids (at least min tokens, 2) in it: at most k ids;
 * and how many tokens that suffix has */
static int suffix_propose(lua_State *L)
{
    const lr_suffix *s = *check_suffix(L, 1);
    size_t n;
    lua_Integer k = luaL_checkinteger(L, 3), min = luaL_optinteger(L, 4, 2);
    const int32_t *ids = lr_lua_check_ids(L, 2, INT32_MAX, &n);
    lr_suffix_at at = {0};
    int32_t out[LR_SPEC_MAX];
    int match;
    lr_suffix_follow(s, &at, ids, (int)(n > INT32_MAX ? INT32_MAX : n));
    int got = lr_suffix_propose_at(s, &at,
                                   min < 1      ? 1
                                   : min > 4096 ? 4096
                                                : (int)min,
                                   k < 0             ? 0
                                   : k > LR_SPEC_MAX ? LR_SPEC_MAX
                                                     : (int)k,
                                   out, &match);
    lr_lua_push_ids(L, out, (size_t)got);
    lua_pushinteger(L, match);
    return 2;
}

static int suffix_len(lua_State *L)
{
    lua_pushinteger(L, lr_suffix_len(*check_suffix(L, 1)));
    return 1;
}

void lr_lua_open_spec(lua_State *L)
{
    static const luaL_Reg ctx_methods[] = {{"tokens", ctx_tokens}, {"cost", ctx_cost}, {NULL, NULL}};
    static const luaL_Reg no_methods[] = {{NULL, NULL}};
    static const luaL_Reg methods[] = {
        {"add", suffix_add}, {"propose", suffix_propose}, {"len", suffix_len}, {"close", suffix_close}, {NULL, NULL}};
    lr_lua_class(L, CTX, ctx_methods, NULL);
    lr_lua_class(L, HOLDER, no_methods, holder_close);
    lr_lua_class(L, SUFFIX, methods, suffix_close);
    lua_pushcfunction(L, core_suffix_new);
    lua_setfield(L, -2, "suffix_new");
}
