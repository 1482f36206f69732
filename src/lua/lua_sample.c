/* lua_sample.c - samplers: a list of stages from Lua to the native chain, Lua functions as stages of it.
 *
 * A stage is { name, ... }: {"logit_bias", ids, values}, {"penalties", repetition, presence, frequency, last_n},
 * {"temperature", x}, {"top_k", n}, {"top_p", x}, {"min_p", x}, {"typical", x}, {"top_n_sigma", x}, {"allow", ids},
 * {"ban", ids}, {"min_tokens", n, ids}, {"dynamic", temperature, range, exponent}, {"xtc", probability, threshold},
 * {"dry", multiplier, base, allowed_length, last_n, ids}, {"no_repeat", n, last_n}, {"mirostat1", tau, eta, m},
 * {"mirostat2", tau, eta}, {"adaptive_p", target, decay}, {"lua", function}; lua/llmrun/sampler.lua makes them of what
 * users write.
 *
 * A Lua stage is called as f(logits, ctx) inside the engine's step, so it can't wait, and has limits of processor time
 * and memory (lr_lua_step_limits). It may change the logits, and may return a token id, which then is drawn. ctx is a
 * table that lives as long as the request (the stage may keep things in it) with position, n_prompt, n_generated, last
 * (the last token) and the methods tokens(n) and uniform(stream).
 */
#include "base/mem.h"
#include "lua/lua_int.h"
#include "sample/sample.h"
#include <math.h>
#include <string.h>

#define SAMPLER   "llmrun.sampler"
#define CTX       "llmrun.sample_ctx"
#define MAX_STAGE 64

/* ---- Lua stages ---- */

/* What a Lua stage needs: references to a table { function, ctx, view } in the registry. */
typedef struct hook {
    lua_State *L; /* the main state: references live in its registry */
    int ref;
} hook;

static const lr_sample_ctx *current_ctx; /* while a Lua stage runs */

static lua_State *main_state(lua_State *L)
{
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    lua_State *m = lua_tothread(L, -1);
    lua_pop(L, 1);
    return m;
}

static void hook_free(void *user)
{
    hook *h = user;
    luaL_unref(h->L, LUA_REGISTRYINDEX, h->ref);
    lr_free(h);
}

/* Protected: hook (light userdata) -> reference of a new table for its function. */
static int dup_ref(lua_State *L)
{
    const hook *h = lua_touserdata(L, 1);
    lua_createtable(L, 3, 0);
    lua_rawgeti(L, LUA_REGISTRYINDEX, h->ref);
    lua_rawgeti(L, -1, 1);
    lua_rawseti(L, 2, 1);
    lua_newtable(L);
    lua_rawgeti(L, 3, 2); /* the copy begins with what the original keeps in its ctx */
    for (lua_pushnil(L); lua_next(L, -2);) {
        lua_pushvalue(L, -2);
        lua_insert(L, -2);
        lua_rawset(L, 4);
    }
    lua_settop(L, 4);
    luaL_setmetatable(L, CTX);
    lua_rawseti(L, 2, 2);
    lr_lua_push_view(L);
    lua_rawseti(L, 2, 3);
    lua_settop(L, 2);
    lua_pushinteger(L, luaL_ref(L, LUA_REGISTRYINDEX));
    return 1;
}

static void *hook_dup(void *user)
{
    hook *h = user, *d = lr_malloc(sizeof *d);
    lr_error err;
    if (!d) return NULL;
    lua_pushcfunction(h->L, dup_ref);
    lua_pushlightuserdata(h->L, h);
    if (lr_lua_call(h->L, 1, 1, &err)) {
        lr_free(d);
        return NULL;
    }
    *d = (hook){h->L, (int)lua_tointeger(h->L, -1)};
    lua_pop(h->L, 1);
    return d;
}

static void set_field(lua_State *L, const char *name, lua_Integer v)
{
    lua_pushstring(L, name);
    lua_pushinteger(L, v);
    lua_rawset(L, -3);
}

/* Protected: hook, logits, ctx (light userdata): calls the function; returns the id it chose, or -1. */
static int run_stage(lua_State *L)
{
    const hook *h = lua_touserdata(L, 1);
    lr_logits *l = lua_touserdata(L, 2);
    const lr_sample_ctx *c = lua_touserdata(L, 3);
    lua_rawgeti(L, LUA_REGISTRYINDEX, h->ref); /* 4 */
    lua_rawgeti(L, 4, 1);
    lua_rawgeti(L, 4, 3);
    lr_lua_point_view(L, -1, l);
    lua_rawgeti(L, 4, 2);
    set_field(L, "position", (lua_Integer)c->position);
    set_field(L, "n_prompt", (lua_Integer)c->n_prompt);
    set_field(L, "n_generated", (lua_Integer)c->n_generated);
    set_field(L, "last",
              c->n_generated ? c->generated[c->n_generated - 1]
              : c->n_prompt  ? c->prompt[c->n_prompt - 1]
                             : -1);
    lua_call(L, 2, 1);
    int ok = 1;
    lua_Integer id = -1;
    if (!lua_isnil(L, -1)) {
        id = lua_tointegerx(L, -1, &ok);
        if (id < 0 || id >= l->n_vocab) ok = 0;
    }
    if (!ok)
        return luaL_error(L, "a sampler stage must return a token id or nothing, not %s", luaL_tolstring(L, -1, NULL));
    lua_pushinteger(L, id);
    return 1;
}

static int stage_call(void *user, lr_logits *l, const lr_sample_ctx *ctx, lr_error *err)
{
    hook *h = user;
    lua_State *L = lr_lua_step_state() ? lr_lua_step_state() : h->L;
    const lr_sample_ctx *before = current_ctx;
    if (!lua_checkstack(L, 8)) return lr_fail(err, LR_ENOMEM, "the Lua stack is full");
    current_ctx = ctx;
    lua_pushcfunction(L, run_stage);
    lua_pushlightuserdata(L, h);
    lua_pushlightuserdata(L, l);
    lua_pushlightuserdata(L, (void *)(uintptr_t)ctx);
    int rc = lr_lua_call_limited(L, 3, 1, &lr_lua_step_limits, err);
    current_ctx = before;
    lua_rawgeti(L, LUA_REGISTRYINDEX, h->ref);
    lua_rawgeti(L, -1, 3);
    lr_lua_point_view(L, -1, NULL);
    lua_pop(L, 2);
    if (rc) return lr_fail_prefix(err, "sampler stage");
    lua_Integer id = lua_tointeger(L, -1);
    lua_pop(L, 1);
    if (id >= 0) {
        l->n_cand = 1;
        l->cand_id[0] = (int32_t)id;
        l->cand[0] = 0;
    }
    return 0;
}

static const lr_sample_ctx *check_ctx(lua_State *L)
{
    if (!current_ctx) luaL_error(L, "ctx can be asked for tokens and random numbers inside its sampler stage only");
    return current_ctx;
}

/* ctx:tokens([n [, all]]) -> list of the last n generated tokens (all of them by default); all: prompt tokens too */
static int ctx_tokens(lua_State *L)
{
    const lr_sample_ctx *c = check_ctx(L);
    bool all = lua_toboolean(L, 3);
    size_t have = c->n_generated + (all ? c->n_prompt : 0), n = have;
    if (!lua_isnoneornil(L, 2)) {
        lua_Integer k = luaL_checkinteger(L, 2);
        luaL_argcheck(L, k >= 0, 2, "negative");
        if ((size_t)k < n) n = (size_t)k;
    }
    lua_createtable(L, (int)n, 0);
    for (size_t i = 0; i < n; i++) {
        size_t at = have - n + i;
        if (all && at < c->n_prompt)
            lua_pushinteger(L, c->prompt[at]);
        else
            lua_pushinteger(L, c->generated[at - (all ? c->n_prompt : 0)]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* ctx:uniform([stream]) -> a number in [0, 1) that depends on the request's seed, the position and the stream only */
static int ctx_uniform(lua_State *L)
{
    const lr_sample_ctx *c = check_ctx(L);
    lua_pushnumber(L, lr_sample_uniform(c->seed, c->position, (uint32_t)luaL_optinteger(L, 2, 1)));
    return 1;
}

/* ---- stages ---- */

static float num(lua_State *L, int st, int i, const char *what)
{
    lua_rawgeti(L, st, i);
    if (lua_type(L, -1) != LUA_TNUMBER) luaL_error(L, "%s: number expected, got %s", what, luaL_typename(L, -1));
    float x = (float)lua_tonumber(L, -1);
    lua_pop(L, 1);
    return x;
}

static int whole(lua_State *L, int st, int i, const char *what)
{
    int ok = 0;
    lua_rawgeti(L, st, i);
    lua_Integer n = lua_type(L, -1) == LUA_TNUMBER ? lua_tointegerx(L, -1, &ok) : 0;
    if (!ok || n > INT32_MAX || n < INT32_MIN)
        luaL_error(L, "%s: integer expected, got %s", what, luaL_tolstring(L, -1, NULL));
    lua_pop(L, 1);
    return (int)n;
}

/* Ids of element i; the userdata that holds them stays on the stack. */
static void ids_of(lua_State *L, int st, int i, int n_vocab, lr_stage *s)
{
    lua_rawgeti(L, st, i);
    s->ids = lr_lua_check_ids(L, lua_gettop(L), n_vocab, &s->n_ids);
}

static void values_of(lua_State *L, int st, int i, lr_stage *s)
{
    lua_rawgeti(L, st, i);
    int list = lua_gettop(L);
    luaL_checktype(L, list, LUA_TTABLE);
    if ((size_t)luaL_len(L, list) != s->n_ids) luaL_error(L, "logit_bias: as many values as ids expected");
    float *v = lua_newuserdatauv(L, (s->n_ids + 1) * sizeof *v, 0);
    for (size_t k = 0; k < s->n_ids; k++) {
        lua_rawgeti(L, list, (lua_Integer)k + 1);
        v[k] = (float)luaL_checknumber(L, -1);
        lua_pop(L, 1);
    }
    s->values = v;
}

/* A new hook for the function on the top of the stack (popped). */
static void lua_stage(lua_State *L, lr_stage *s)
{
    if (!lua_isfunction(L, -1)) luaL_error(L, "a Lua stage needs a function, not %s", luaL_typename(L, -1));
    lua_createtable(L, 3, 0);
    lua_insert(L, -2);
    lua_rawseti(L, -2, 1);
    lua_newtable(L);
    luaL_setmetatable(L, CTX);
    lua_rawseti(L, -2, 2);
    lr_lua_push_view(L);
    lua_rawseti(L, -2, 3);
    int ref = luaL_ref(L, LUA_REGISTRYINDEX);
    hook *h = lr_malloc(sizeof *h);
    if (!h) {
        luaL_unref(L, LUA_REGISTRYINDEX, ref);
        luaL_error(L, "not enough memory");
    }
    *h = (hook){main_state(L), ref};
    s->fn = stage_call;
    s->user = h;
    s->user_free = hook_free;
    s->user_dup = hook_dup;
}

static void read_stage(lua_State *L, int st, int n_vocab, lr_stage *s)
{
    static const char *const names[] = {"logit_bias", "penalties", "temperature", "top_k",       "top_p",
                                        "min_p",      "typical",   "allow",       "top_n_sigma", "ban",
                                        "min_tokens", "lua",       "dynamic",     "xtc",         "dry",
                                        "no_repeat",  "mirostat1", "mirostat2",   "adaptive_p",  NULL};
    static const lr_stage_kind kinds[] = {
        LR_STAGE_LOGIT_BIAS, LR_STAGE_PENALTIES,  LR_STAGE_TEMPERATURE, LR_STAGE_TOP_K,       LR_STAGE_TOP_P,
        LR_STAGE_MIN_P,      LR_STAGE_TYPICAL,    LR_STAGE_ALLOW,       LR_STAGE_TOP_N_SIGMA, LR_STAGE_BAN,
        LR_STAGE_MIN_TOKENS, LR_STAGE_CALLBACK,   LR_STAGE_DYNAMIC,     LR_STAGE_XTC,         LR_STAGE_DRY,
        LR_STAGE_NO_REPEAT,  LR_STAGE_MIROSTAT_1, LR_STAGE_MIROSTAT_2,  LR_STAGE_ADAPTIVE_P};
    luaL_checktype(L, st, LUA_TTABLE);
    lua_rawgeti(L, st, 1);
    const char *name = lua_tostring(L, -1);
    int i = 0;
    while (names[i] && (!name || strcmp(names[i], name) != 0)) i++;
    if (!names[i]) luaL_error(L, "unknown sampler stage '%s'", name ? name : luaL_typename(L, -1));
    s->kind = kinds[i];
    switch (s->kind) {
    case LR_STAGE_LOGIT_BIAS:
        ids_of(L, st, 2, n_vocab, s);
        values_of(L, st, 3, s);
        break;
    case LR_STAGE_PENALTIES:
        s->repetition = num(L, st, 2, name);
        s->presence = num(L, st, 3, name);
        s->frequency = num(L, st, 4, name);
        s->last_n = whole(L, st, 5, name);
        break;
    case LR_STAGE_TOP_K:
        s->n = whole(L, st, 2, name);
        break;
    case LR_STAGE_ALLOW:
    case LR_STAGE_BAN:
        ids_of(L, st, 2, n_vocab, s);
        break;
    case LR_STAGE_MIN_TOKENS:
        s->n = whole(L, st, 2, name);
        ids_of(L, st, 3, n_vocab, s);
        break;
    case LR_STAGE_DYNAMIC:
        s->c = num(L, st, 4, name);
        /* fall through */
    case LR_STAGE_XTC:
    case LR_STAGE_MIROSTAT_2:
    case LR_STAGE_ADAPTIVE_P:
        s->a = num(L, st, 2, name);
        s->b = num(L, st, 3, name);
        break;
    case LR_STAGE_MIROSTAT_1:
        s->a = num(L, st, 2, name);
        s->b = num(L, st, 3, name);
        s->n = whole(L, st, 4, name);
        break;
    case LR_STAGE_NO_REPEAT:
        s->n = whole(L, st, 2, name);
        s->last_n = whole(L, st, 3, name);
        break;
    case LR_STAGE_DRY:
        s->a = num(L, st, 2, name);
        s->b = num(L, st, 3, name);
        s->n = whole(L, st, 4, name);
        s->last_n = whole(L, st, 5, name);
        ids_of(L, st, 6, n_vocab, s);
        break;
    case LR_STAGE_CALLBACK:
        break; /* made last, when nothing can fail any more but memory */
    default:
        s->a = num(L, st, 2, name);
    }
}

/* Stages under construction: the hooks made so far are freed with it. */
#define STAGES "llmrun.stages"
typedef struct stages {
    size_t n;
    lr_stage s[MAX_STAGE];
} stages;

static int stages_close(lua_State *L)
{
    stages *t = luaL_checkudata(L, 1, STAGES);
    for (size_t i = 0; i < t->n; i++)
        if (t->s[i].user) hook_free(t->s[i].user);
    t->n = 0;
    return 0;
}

lr_sampler *lr_lua_make_sampler(lua_State *L, int idx, uint64_t seed, int n_vocab)
{
    idx = lua_absindex(L, idx);
    int top = lua_gettop(L);
    luaL_checktype(L, idx, LUA_TTABLE);
    size_t n = (size_t)luaL_len(L, idx);
    if (n > MAX_STAGE) luaL_error(L, "a sampler of %d stages; %d are the most", (int)n, MAX_STAGE);
    luaL_checkstack(L, (int)(4 * n) + 20, "too many sampler stages");
    stages *t = lua_newuserdatauv(L, sizeof *t, 0);
    memset(t, 0, sizeof *t);
    luaL_setmetatable(L, STAGES);
    for (size_t i = 0; i < n; i++) {
        lua_rawgeti(L, idx, (lua_Integer)i + 1);
        int st = lua_gettop(L);
        read_stage(L, st, n_vocab, &t->s[i]);
        t->n = i + 1;
        if (t->s[i].kind == LR_STAGE_CALLBACK) {
            lua_rawgeti(L, st, 2);
            lua_stage(L, &t->s[i]);
        }
    }
    lr_error err;
    lr_sampler *s = NULL;
    if (lr_sampler_new(&s, t->s, n, seed, n_vocab, &err)) lr_lua_raise(L, &err);
    t->n = 0; /* the hooks are the sampler's now */
    lua_settop(L, top);
    return s;
}

/* ---- samplers of their own, for token-level loops and tests ---- */

typedef struct sampler_ud {
    lr_sampler *s;
    int n_vocab;
} sampler_ud;

static int sampler_close(lua_State *L)
{
    sampler_ud *u = luaL_checkudata(L, 1, SAMPLER);
    lr_sampler_free(u->s);
    u->s = NULL;
    return 0;
}

/* sampler_new(stages, seed, n_vocab) -> sampler */
static int core_sampler_new(lua_State *L)
{
    uint64_t seed = (uint64_t)luaL_checkinteger(L, 2);
    int n_vocab = (int)luaL_checkinteger(L, 3);
    sampler_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    u->s = NULL;
    u->n_vocab = n_vocab;
    luaL_setmetatable(L, SAMPLER);
    u->s = lr_lua_make_sampler(L, 1, seed, n_vocab);
    return 1;
}

/* The row of the logits at idx in new userdata (a draw overwrites it), and the context of the table after it:
 * { prompt = ids, generated = ids, position = n }. */
static float *draw_args(lua_State *L, const sampler_ud *u, lr_sample_ctx *c)
{
    if (lr_lua_step_state()) luaL_error(L, "a sampler can't be used inside a step of the engine");
    const lr_logits *l = lr_lua_check_logits(L, 2);
    if (l->n_vocab != u->n_vocab) luaL_error(L, "logits of %d tokens, a sampler for %d", l->n_vocab, u->n_vocab);
    if (l->n_cand >= 0) luaL_error(L, "the logits are narrowed already");
    float *x = lua_newuserdatauv(L, (size_t)l->n_vocab * sizeof *x, 0);
    memcpy(x, l->x, (size_t)l->n_vocab * sizeof *x);
    memset(c, 0, sizeof *c);
    c->seed = lr_sampler_seed(u->s);
    if (lua_isnoneornil(L, 3)) return x;
    luaL_checktype(L, 3, LUA_TTABLE);
    if (lua_getfield(L, 3, "prompt") != LUA_TNIL) c->prompt = lr_lua_check_ids(L, -1, u->n_vocab, &c->n_prompt);
    if (lua_getfield(L, 3, "generated") != LUA_TNIL)
        c->generated = lr_lua_check_ids(L, -1, u->n_vocab, &c->n_generated);
    c->position = (uint64_t)lr_lua_opt_int(L, 3, "position", (lua_Integer)(c->n_prompt + c->n_generated));
    return x;
}

/* s:draw(logits, ctx) -> id, log-probability in the full distribution; nil, text, code */
static int sampler_draw(lua_State *L)
{
    sampler_ud *u = lr_lua_check_open(L, 1, SAMPLER, "sampler");
    lr_sample_ctx c;
    lr_error err;
    int32_t id;
    float logprob;
    float *x = draw_args(L, u, &c);
    if (lr_sampler_draw(u->s, x, NULL, &c, 0, &id, &logprob, NULL, &err)) return lr_lua_fail(L, &err);
    lua_pushinteger(L, id);
    lua_pushnumber(L, (lua_Number)logprob);
    return 2;
}

/* s:probs(logits, ctx) -> ids, probabilities of all tokens that could be drawn, best first; nil, text, code */
static int sampler_probs(lua_State *L)
{
    sampler_ud *u = lr_lua_check_open(L, 1, SAMPLER, "sampler");
    lr_sample_ctx c;
    lr_error err;
    float *x = draw_args(L, u, &c);
    size_t n = 0, cap = (size_t)u->n_vocab;
    int32_t *ids = lua_newuserdatauv(L, cap * (sizeof *ids + sizeof(float)), 0);
    float *p = (float *)(void *)(ids + cap);
    if (lr_sampler_probs(u->s, x, NULL, &c, ids, p, cap, &n, &err)) return lr_lua_fail(L, &err);
    while (n > 1 && p[n - 1] == 0) n--; /* underflowed: can't be drawn */
    lr_lua_push_ids(L, ids, n);
    lua_createtable(L, (int)n, 0);
    for (size_t i = 0; i < n; i++) {
        lua_pushnumber(L, (lua_Number)p[i]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 2;
}

/* s:greedy() -> whether it always takes the arg max */
static int sampler_greedy(lua_State *L)
{
    sampler_ud *u = lr_lua_check_open(L, 1, SAMPLER, "sampler");
    lua_pushboolean(L, lr_sampler_is_greedy(u->s));
    return 1;
}

/* uniform(seed, position, stream) -> number in [0, 1) */
static int core_uniform(lua_State *L)
{
    lua_pushnumber(L, lr_sample_uniform((uint64_t)luaL_checkinteger(L, 1), (uint64_t)luaL_checkinteger(L, 2),
                                        (uint32_t)luaL_optinteger(L, 3, 0)));
    return 1;
}

void lr_lua_open_sample(lua_State *L)
{
    static const luaL_Reg sampler_methods[] = {{"draw", sampler_draw},
                                               {"probs", sampler_probs},
                                               {"greedy", sampler_greedy},
                                               {"close", sampler_close},
                                               {NULL, NULL}};
    static const luaL_Reg ctx_methods[] = {{"tokens", ctx_tokens}, {"uniform", ctx_uniform}, {NULL, NULL}};
    lr_lua_class(L, SAMPLER, sampler_methods, sampler_close);
    lr_lua_class(L, STAGES, NULL, stages_close);
    lr_lua_class(L, CTX, ctx_methods, NULL);
    lua_pushcfunction(L, core_sampler_new);
    lua_setfield(L, -2, "sampler_new");
    lua_pushcfunction(L, core_uniform);
    lua_setfield(L, -2, "uniform");
}
