/* lua_policy.c - a policy in Lua: a table of optional hooks that the engine asks for its decisions (engine/policy.h).
 *
 * Every hook runs through enter(): on the policy's own thread, under limits of time and memory, never yielding. A
 * failure is told to Lua (which logs the first of each hook) and counted, and that decision is the built-in rule's;
 * after some in a row the policy is set aside: it decides nothing any more and is removed when the step is over. A hook
 * that the policy does not have is not registered with the engine, finish excepted, which ends the requests' userdata.
 */
#include "lua/lua_policy_int.h"
#include "lua/lua_spec_int.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

#define POLICY "llmrun.policy"

const char *const lr_lua_hook_names[N_HOOKS] = {"admit", "schedule", "preempt", "evict", "token", "finish", "draft"};
static const char envs_key; /* registry: policy -> env, weak values */

/* One call of a hook: what goes in, what comes out. */
typedef struct hook_call {
    lr_lua_policy *p;
    int hook;
    lr_request *req;
    int group, need; /* preempt */
    int32_t token;
    int result;
    double score;
    lr_error *why; /* admit: the text of a refusal */
    lr_spec_choice *draft;
} hook_call;

void lr_policy_push_env(lua_State *L, const lr_lua_policy *p)
{
    lua_rawgetp(L, LUA_REGISTRYINDEX, &envs_key);
    lua_rawgetp(L, -1, p);
    lua_remove(L, -2);
}

/* ---- results ---- */

/* admit returns nothing or true to take it; false, or nil and a reason, to refuse. */
static void read_admit(lua_State *L, hook_call *c)
{
    const char *reason = lua_tostring(L, -1);
    if (lua_toboolean(L, -2) || (lua_isnil(L, -2) && !reason)) return;
    c->result = 1;
    lr_fail(c->why, LR_EFULL, "refused by policy '%s'%s%s", c->p->name, reason ? ": " : "", reason ? reason : "");
}

/* preempt may return the request that is to give way, and how. */
static void read_preempt(lua_State *L, hook_call *c)
{
    if (lua_isnil(L, -2)) return;
    lr_policy_req *victim = luaL_testudata(L, -2, POLICY_REQ);
    if (!victim) luaL_error(L, "preempt: a request (or nothing) expected, got %s", luaL_typename(L, -2));
    lr_preempt_how how = lr_policy_check_how(L, lua_gettop(L), c->p);
    if (!victim->r || lr_step_preempt(c->p->step, victim->r, how))
        luaL_error(L, "preempt: request %I is not running", (LUAI_UACINT)victim->id);
}

static void read_evict(lua_State *L, hook_call *c)
{
    if (lua_isnil(L, -2)) return;
    if (lua_type(L, -2) != LUA_TNUMBER) luaL_error(L, "evict: a number expected, got %s", luaL_typename(L, -2));
    c->score = lua_tonumber(L, -2);
}

/* Protected: the call (light userdata). */
static int run_hook(lua_State *L)
{
    hook_call *c = lua_touserdata(L, 1);
    lr_lua_policy *p = c->p;
    lr_policy_push_env(L, p);
    if (lua_isnil(L, 2)) return 0;
    lua_rawgeti(L, 2, ENV_HOOKS + c->hook);
    lua_rawgeti(L, 2, ENV_SELF);
    switch (c->hook) {
    case HOOK_SCHEDULE:
        lua_rawgeti(L, 2, ENV_STEP);
        break;
    case HOOK_PREEMPT:
        lua_rawgeti(L, 2, ENV_STEP);
        lua_rawgeti(L, 2, ENV_NEED);
        lr_policy_push_request(L, p, 2, c->req);
        lua_setfield(L, -2, "request");
        lua_pushinteger(L, c->need);
        lua_setfield(L, -2, "blocks");
        lua_pushinteger(L, c->group + 1);
        lua_setfield(L, -2, "group");
        break;
    case HOOK_EVICT:
        lua_rawgeti(L, 2, ENV_LEAF);
        break;
    case HOOK_TOKEN:
        lr_policy_push_request(L, p, 2, c->req);
        lua_pushinteger(L, c->token);
        break;
    case HOOK_DRAFT:
        lr_policy_push_request(L, p, 2, c->req);
        lua_createtable(L, 0, 4);
        lr_lua_set_draft(L, c->draft);
        break;
    default:
        lr_policy_push_request(L, p, 2, c->req);
    }
    lua_call(L, lua_gettop(L) - 3, 2);
    if (c->hook == HOOK_ADMIT) read_admit(L, c);
    if (c->hook == HOOK_PREEMPT) read_preempt(L, c);
    if (c->hook == HOOK_EVICT) read_evict(L, c);
    if (c->hook == HOOK_DRAFT) lr_lua_read_draft(L, lua_gettop(L) - 1, c->draft);
    if (c->hook == HOOK_TOKEN) c->result = lua_toboolean(L, -2);
    return 0;
}

/* ---- failures ---- */

/* Protected: policy, hook, the short text of the error, and the whole message if there is one: calls the function that
 * was given for that. */
static int tell(lua_State *L)
{
    const lr_lua_policy *p = lua_touserdata(L, 1);
    int hook = (int)lua_tointeger(L, 2);
    lr_policy_push_env(L, p);
    if (lua_isnil(L, -1) || lua_rawgeti(L, -1, ENV_FAILED) != LUA_TFUNCTION) return 0;
    lua_pushstring(L, lr_lua_hook_names[hook]);
    if (lua_isstring(L, 4)) {
        lua_pushvalue(L, 4);
    } else {
        lua_pushstring(L, lua_touserdata(L, 3));
    }
    lua_pushinteger(L, (lua_Integer)p->hook[hook].failures);
    lua_pushboolean(L, p->set_aside);
    lua_call(L, 4, 0);
    return 0;
}

/* The message (or what the error left) is on the stack's top, and is popped. */
static void failed(lr_lua_policy *p, int hook, lr_error *err)
{
    lua_State *L = p->L;
    p->hook[hook].failures++;
    if (hook == HOOK_EVICT || hook == HOOK_FINISH) lr_policy_failed(p->e);
    if (lr_lua_interrupted()) { /* not the hook's fault */
        lua_pop(L, 1);
        return;
    }
    if (++p->hook[hook].in_a_row >= p->max_failures) p->set_aside = true;
    if (p->hook[hook].logged && !p->set_aside) {
        lua_pop(L, 1);
        return;
    }
    p->hook[hook].logged = true;
    lr_lua_hold_time(true);
    lua_pushcfunction(L, tell);
    lua_pushlightuserdata(L, p);
    lua_pushinteger(L, hook);
    lua_pushlightuserdata(L, err->text);
    lua_pushvalue(L, -5);
    if (lua_pcall(L, 4, 0, 0) != LUA_OK) {
        fprintf(stderr, "llmrun: policy '%s': hook %s: %s\n", p->name, lr_lua_hook_names[hook], err->text);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    lr_lua_hold_time(false);
}

/* The one door. 0, or negative: the built-in rule decides. */
static int enter(hook_call *c, lr_step *step)
{
    lr_lua_policy *p = c->p;
    lua_State *L = p->L;
    lr_error err;
    if (p->set_aside || !lua_checkstack(L, 10)) return -1;
    int phase = p->phase;
    lr_step *before = p->step;
    p->phase = c->hook;
    p->step = step;
    lua_pushcfunction(L, run_hook);
    lua_pushlightuserdata(L, c);
    int rc = lr_lua_pcall_limited(L, 1, 0, &p->limits, &err);
    p->phase = phase;
    p->step = before;
    if (rc) {
        failed(p, c->hook, &err);
    } else {
        p->hook[c->hook].in_a_row = 0;
    }
    return rc;
}

/* ---- hooks ---- */

static int on_admit(void *user, lr_request *r, lr_error *err)
{
    lr_lua_policy *p = user;
    if (p->set_aside) return 0;
    hook_call c = {.p = p, .hook = HOOK_ADMIT, .req = r, .why = err};
    int rc = enter(&c, NULL);
    lr_policy_req *q = lr_request_policy_data(r);
    if (rc < 0) return -1;
    if (c.result && q) lr_policy_forget(p, q);
    return c.result;
}

static int on_schedule(void *user, lr_step *step)
{
    lr_lua_policy *p = user;
    if (p->set_aside) return lr_step_default(step);
    hook_call c = {.p = p, .hook = HOOK_SCHEDULE};
    return enter(&c, step) ? -1 : 0;
}

static int on_preempt(void *user, lr_step *step, lr_request *req, int group, int need)
{
    lr_lua_policy *p = user;
    if (p->set_aside) return 0;
    hook_call c = {.p = p, .hook = HOOK_PREEMPT, .req = req, .group = group, .need = need};
    return enter(&c, step) ? -1 : 0;
}

static double on_evict(void *user, const lr_kv_leaf *leaf)
{
    lr_lua_policy *p = user;
    hook_call c = {.p = p, .hook = HOOK_EVICT, .score = NAN};
    const lr_kv_leaf *before = p->leaf;
    p->leaf = leaf;
    int rc = enter(&c, NULL);
    p->leaf = before;
    return rc ? NAN : c.score;
}

static int on_token(void *user, lr_request *req, int32_t token)
{
    lr_lua_policy *p = user;
    if (p->set_aside) return 0;
    hook_call c = {.p = p, .hook = HOOK_TOKEN, .req = req, .token = token};
    return enter(&c, NULL) ? -1 : c.result;
}

static int on_draft(void *user, lr_request *req, lr_spec_choice *choice)
{
    lr_lua_policy *p = user;
    if (p->set_aside) return 0;
    hook_call c = {.p = p, .hook = HOOK_DRAFT, .req = req, .draft = choice};
    return enter(&c, NULL) ? -1 : 0;
}

static void on_finish(void *user, lr_request *req)
{
    lr_lua_policy *p = user;
    hook_call c = {.p = p, .hook = HOOK_FINISH, .req = req};
    if (p->hook[HOOK_FINISH].there) enter(&c, NULL);
    lr_policy_req *q = lr_request_policy_data(req);
    if (q) lr_policy_forget(p, q);
}

/* All userdata that Lua may still hold are dead from now on. */
static void on_free(void *user)
{
    lr_lua_policy *p = user;
    while (p->requests) lr_policy_forget(p, p->requests);
    p->step_view->p = p->leaf_view->p = NULL;
    p->eng->policy = NULL;
}

/* ---- installing ---- */

static void check_hooks(lua_State *L, lr_lua_policy *p, int env)
{
    for (int h = 0; h < N_HOOKS; h++) {
        int t = lua_getfield(L, 2, lr_lua_hook_names[h]);
        if (t != LUA_TNIL && t != LUA_TFUNCTION)
            luaL_error(L, "policy '%s': %s: function expected, got %s", p->name, lr_lua_hook_names[h],
                       lua_typename(L, t));
        p->hook[h].there = t == LUA_TFUNCTION;
        lua_rawseti(L, env, ENV_HOOKS + h);
    }
}

/* Fills the env at its index, and enters it into the table of all. */
static void make_env(lua_State *L, lr_lua_policy *p, int env)
{
    lua_getfield(L, 2, "self");
    lua_rawseti(L, env, ENV_SELF);
    p->L = lua_newthread(L);
    lua_rawseti(L, env, ENV_THREAD);
    p->step_view = lr_policy_push_view(L, p, POLICY_STEP, env);
    lua_rawseti(L, env, ENV_STEP);
    p->leaf_view = lr_policy_push_view(L, p, POLICY_LEAF, env);
    lua_rawseti(L, env, ENV_LEAF);
    for (int i = ENV_NEED; i <= ENV_WAITING; i++) {
        lua_newtable(L);
        lua_rawseti(L, env, i);
    }
    lua_getfield(L, 2, "failed");
    lua_rawseti(L, env, ENV_FAILED);
    check_hooks(L, p, env);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &envs_key);
    lua_pushvalue(L, env);
    lua_rawsetp(L, -2, p);
    lua_pop(L, 1);
}

static int install(lua_State *L, lr_engine_ud *u, lr_lua_policy *p)
{
    lr_error err;
    lr_policy hooks = {.name = p->name, .user = p, .steady = p->steady, .finish = on_finish, .free = on_free};
    if (p->hook[HOOK_ADMIT].there) hooks.admit = on_admit;
    if (p->hook[HOOK_SCHEDULE].there) hooks.schedule = on_schedule;
    if (p->hook[HOOK_PREEMPT].there) hooks.preempt = on_preempt;
    if (p->hook[HOOK_EVICT].there) hooks.evict = on_evict;
    if (p->hook[HOOK_TOKEN].there) hooks.token = on_token;
    if (p->hook[HOOK_DRAFT].there) hooks.draft = on_draft;
    if (lr_engine_set_policy(u->e, &hooks, &err)) return lr_lua_fail(L, &err);
    u->policy = p;
    lua_setiuservalue(L, 1, 2); /* the policy's userdata */
    lua_pushboolean(L, 1);
    return 1;
}

/* e:set_policy({ name =, self =, admit = ... finish = functions, failed = function(hook, message, failures, set_aside),
 * seconds =, bytes =, failures = in a row, steady = bool }) or e:set_policy(nil) -> true; nil, text, code */
int lr_lua_engine_set_policy(lua_State *L)
{
    lr_engine_ud *u = lr_lua_check_engine(L, 1);
    lr_error err;
    lua_settop(L, 2);
    if (lua_isnil(L, 2)) {
        if (lr_engine_set_policy(u->e, NULL, &err)) return lr_lua_fail(L, &err);
        lua_setiuservalue(L, 1, 2);
        lua_pushboolean(L, 1);
        return 1;
    }
    luaL_checktype(L, 2, LUA_TTABLE);
    lr_lua_policy *p = lua_newuserdatauv(L, sizeof *p, 1);
    *p = (lr_lua_policy){.eng = u, .e = u->e, .phase = N_HOOKS};
    const char *name = lr_lua_opt_str(L, 2, "name", "custom");
    snprintf(p->name, sizeof p->name, "%s", name);
    p->limits.seconds = lr_lua_opt_num(L, 2, "seconds", 0);
    lua_Integer bytes = lr_lua_opt_int(L, 2, "bytes", 0), failures = lr_lua_opt_int(L, 2, "failures", 8);
    if (!(p->limits.seconds >= 0 && p->limits.seconds < 1e6) || bytes < 0 || bytes > (lua_Integer)1 << 50 ||
        failures < 1 || failures > INT32_MAX) {
        return luaL_error(L, "policy '%s': a limit is out of range", p->name);
    }
    p->limits.bytes = (size_t)bytes;
    p->steady = lr_lua_opt_bool(L, 2, "steady", false);
    p->max_failures = (int)failures;
    lua_createtable(L, ENV_HOOKS + N_HOOKS, 0);
    make_env(L, p, 4);
    lua_pushvalue(L, 4);
    lua_setiuservalue(L, 3, 1);
    lua_settop(L, 3);
    return install(L, u, p);
}

bool lr_lua_in_hook(const lr_engine_ud *u) { return u->policy && u->policy->phase != N_HOOKS; }

void lr_lua_settle_policy(lua_State *L, int idx)
{
    idx = lua_absindex(L, idx);
    lr_engine_ud *u = lua_touserdata(L, idx);
    lr_error err;
    if (!u->policy->set_aside || lr_engine_set_policy(u->e, NULL, &err)) return;
    lua_pushnil(L);
    lua_setiuservalue(L, idx, 2);
}

void lr_lua_open_policy(lua_State *L)
{
    lr_lua_weak_table(L, &envs_key, "v");
    lr_policy_open_views(L);
}
