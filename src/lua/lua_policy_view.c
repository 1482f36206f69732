/* lua_policy_view.c - what policy hooks see: the step, requests, cached leaves; and the tags of sequences.
 *
 * All are userdata whose fields are read from the engine at each access, so that nothing is copied for requests that a
 * hook does not look at. A request's userdata is made when a hook first meets it and is the same one until the request
 * ends: a policy may keep fields of its own in it. Each view checks that what it shows is still there: a step outside
 * of its hook, or a request that has ended, raises an error.
 */
#include "lua/lua_policy_int.h"
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC_REQ  0x7e905e71u
#define MAGIC_VIEW 0x57e9b1e3u

/* Userdata of ours at idx, without the cost of looking up its metatable. */
static void *fast_check(lua_State *L, int idx, size_t size, uint32_t magic, const char *name)
{
    uint32_t *u = lua_touserdata(L, idx);
    if (u && lua_type(L, idx) == LUA_TUSERDATA && lua_rawlen(L, idx) == size && *u == magic) return u;
    return luaL_checkudata(L, idx, name);
}

/* Pushes the entry of upvalue 1 for the key at 2; its type. */
static int push_member(lua_State *L)
{
    lua_pushvalue(L, 2);
    return lua_rawget(L, lua_upvalueindex(1));
}

/* ---- tags ---- */

static const char tag_ids, tag_tables; /* registry: table -> id, weak keys; id -> table, weak values */
#define TABLE_TAG ((uint64_t)1 << 63)

static void push_map(lua_State *L, const void *key) { lua_rawgetp(L, LUA_REGISTRYINDEX, key); }

static uint64_t table_tag(lua_State *L, int idx)
{
    static lua_Integer last;
    push_map(L, &tag_ids);
    lua_pushvalue(L, idx);
    lua_rawget(L, -2);
    lua_Integer id = lua_tointeger(L, -1);
    if (id == 0) {
        id = ++last;
        push_map(L, &tag_tables);
        lua_pushvalue(L, idx);
        lua_rawseti(L, -2, id);
        lua_pop(L, 1);
        lua_pushvalue(L, idx);
        lua_pushinteger(L, id);
        lua_rawset(L, -4);
    }
    lua_pop(L, 2);
    return TABLE_TAG | (uint64_t)id;
}

uint64_t lr_lua_tag(lua_State *L, int idx)
{
    if (lua_isnoneornil(L, idx)) return 0;
    if (lua_istable(L, idx)) return table_tag(L, lua_absindex(L, idx));
    int ok;
    lua_Integer v = lua_tointegerx(L, idx, &ok);
    if (!ok || lua_type(L, idx) != LUA_TNUMBER)
        luaL_error(L, "tag: table or integer expected, got %s", luaL_typename(L, idx));
    if (v < 0) luaL_error(L, "tag: %I is negative", (LUAI_UACINT)v);
    return (uint64_t)v;
}

uint64_t lr_lua_opt_tag(lua_State *L, int idx, const char *field)
{
    if (!lua_istable(L, idx)) return 0;
    lua_getfield(L, idx, field);
    uint64_t tag = lr_lua_tag(L, -1);
    lua_pop(L, 1);
    return tag;
}

void lr_lua_push_tag(lua_State *L, uint64_t tag)
{
    if (tag & TABLE_TAG) {
        push_map(L, &tag_tables);
        lua_rawgeti(L, -1, (lua_Integer)(tag & ~TABLE_TAG));
        lua_remove(L, -2);
    } else if (tag) {
        lua_pushinteger(L, (lua_Integer)tag);
    } else {
        lua_pushnil(L);
    }
}

void lr_lua_keep_tag(lua_State *L, int idx, const char *field, int ud, int n)
{
    if (!lua_istable(L, idx)) return;
    if (lua_getfield(L, idx, field) == LUA_TTABLE) {
        lua_setiuservalue(L, ud, n);
    } else {
        lua_pop(L, 1);
    }
}

/* ---- requests ---- */

void lr_policy_push_request(lua_State *L, lr_lua_policy *p, int env, lr_request *r)
{
    lr_policy_req *q = lr_request_policy_data(r);
    lua_rawgeti(L, env, ENV_REQUESTS);
    if (q) {
        lua_rawgeti(L, -1, q->ref);
        lua_remove(L, -2);
        return;
    }
    q = lua_newuserdatauv(L, sizeof *q, 1);
    *q = (lr_policy_req){.magic = MAGIC_REQ, .id = lr_request_info(r)->id, .p = p};
    luaL_setmetatable(L, POLICY_REQ);
    lua_pushvalue(L, -1);
    q->ref = luaL_ref(L, -3);
    q->r = r;
    q->next = p->requests;
    if (q->next) q->next->prev = q;
    p->requests = q;
    lr_request_set_policy_data(r, q);
    lua_remove(L, -2);
}

void lr_policy_forget(lr_lua_policy *p, lr_policy_req *q)
{
    lua_State *L = p->L;
    lr_request_set_policy_data(q->r, NULL);
    q->r = NULL;
    *(q->prev ? &q->prev->next : &p->requests) = q->next;
    if (q->next) q->next->prev = q->prev;
    if (!lua_checkstack(L, 6)) return; /* its place is lost until the policy goes */
    lr_policy_push_env(L, p);
    if (lua_istable(L, -1)) {
        lua_rawgeti(L, -1, ENV_REQUESTS);
        luaL_unref(L, -1, q->ref); /* both slots that it writes exist: no memory is needed */
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

lr_policy_req *lr_policy_check_request(lua_State *L, int idx)
{
    return fast_check(L, idx, sizeof(lr_policy_req), MAGIC_REQ, POLICY_REQ);
}

static lr_policy_req *live_request(lua_State *L, int idx)
{
    lr_policy_req *q = lr_policy_check_request(L, idx);
    if (!q->r) luaL_error(L, "request %I has ended", (LUAI_UACINT)q->id);
    return q;
}

enum {
    F_ID = 1,
    F_KIND,
    F_STATE,
    F_TENANT,
    F_TAG,
    F_PRIORITY,
    F_DEADLINE,
    F_ARRIVAL,
    F_QUEUE_TIME,
    F_PROMPT_TOKENS,
    F_CACHED_TOKENS,
    F_COMPUTED_TOKENS,
    F_GENERATED_TOKENS,
    F_MAX_TOKENS,
    F_PENDING,
    F_WANTS,
    F_WRITING,
    F_GRANTED,
    F_BLOCKS,
    F_BLOCK_SECONDS,
    F_PREEMPTED,
    F_SEQ
};

static const struct {
    const char *name;
    int field;
} req_fields[] = {{"id", F_ID},
                  {"kind", F_KIND},
                  {"state", F_STATE},
                  {"tenant", F_TENANT},
                  {"tag", F_TAG},
                  {"priority", F_PRIORITY},
                  {"deadline", F_DEADLINE},
                  {"arrival", F_ARRIVAL},
                  {"queue_time", F_QUEUE_TIME},
                  {"prompt_tokens", F_PROMPT_TOKENS},
                  {"cached_tokens", F_CACHED_TOKENS},
                  {"computed_tokens", F_COMPUTED_TOKENS},
                  {"generated_tokens", F_GENERATED_TOKENS},
                  {"max_tokens", F_MAX_TOKENS},
                  {"pending", F_PENDING},
                  {"wants", F_WANTS},
                  {"writing", F_WRITING},
                  {"granted", F_GRANTED},
                  {"blocks", F_BLOCKS},
                  {"block_seconds", F_BLOCK_SECONDS},
                  {"preempted", F_PREEMPTED},
                  {"seq", F_SEQ}};

static int granted(const lr_policy_req *q) { return q->p->step ? lr_step_granted(q->p->step, q->r) : 0; }

static lua_Integer int_field(const lr_request *r, int granted, int field)
{
    const lr_req_info *in = lr_request_info(r);
    switch (field) {
    case F_PRIORITY:
        return in->priority;
    case F_PROMPT_TOKENS:
        return in->n_prompt;
    case F_CACHED_TOKENS:
        return in->n_cached;
    case F_COMPUTED_TOKENS:
        return in->n_computed;
    case F_GENERATED_TOKENS:
        return in->n_generated;
    case F_MAX_TOKENS:
        return in->max_tokens;
    case F_PENDING:
        return in->n_pending;
    case F_WANTS:
        return lr_step_wants(r);
    case F_GRANTED:
        return granted;
    case F_BLOCKS:
        return lr_request_blocks(r, 0);
    case F_PREEMPTED:
        return in->n_preempted;
    default: /* F_SEQ */
        return in->seq ? (lua_Integer)lr_seq_id(in->seq) : 0;
    }
}

static int push_field(lua_State *L, const lr_request *r, int granted, int field)
{
    static const char *const kinds[] = {"generate", "logits", "score"};
    const lr_req_info *in = lr_request_info(r);
    switch (field) {
    case F_KIND:
        lua_pushstring(L, kinds[in->kind]);
        break;
    case F_STATE:
        lua_pushstring(L, lr_req_state_name(in->state));
        break;
    case F_TENANT:
        lua_pushstring(L, in->tenant);
        break;
    case F_TAG:
        lr_lua_push_tag(L, in->tag);
        break;
    case F_DEADLINE:
        lua_pushnumber(L, in->deadline);
        break;
    case F_ARRIVAL:
        lua_pushnumber(L, in->t_arrival);
        break;
    case F_QUEUE_TIME:
        lua_pushnumber(L, lr_request_queue_time(r));
        break;
    case F_WRITING:
        lua_pushboolean(L, lr_step_writes(r));
        break;
    case F_BLOCK_SECONDS:
        lua_pushnumber(L, in->block_seconds);
        break;
    default:
        lua_pushinteger(L, int_field(r, granted, field));
    }
    return 1;
}

void lr_lua_push_request_field(lua_State *L, const lr_request *r, const char *name)
{
    for (size_t i = 0; i < sizeof req_fields / sizeof *req_fields; i++) {
        if (strcmp(req_fields[i].name, name) != 0) continue;
        if (req_fields[i].field == F_ID) {
            lua_pushinteger(L, (lua_Integer)lr_request_info(r)->id);
        } else {
            push_field(L, r, 0, req_fields[i].field);
        }
        return;
    }
    lua_pushnil(L);
}

lua_Integer lr_lua_request_prefix(const lr_request *r)
{
    const lr_seq *s = lr_request_info(r)->seq;
    return s ? (lua_Integer)lr_seq_peek_cached(s) : 0;
}

lua_Integer lr_lua_request_head(const lr_request *r, lua_Integer n)
{
    const lr_seq *s = lr_request_info(r)->seq;
    uint64_t h = 14695981039346656037u;
    for (lua_Integer i = 0; s && i < n && i < (lua_Integer)lr_seq_len(s); i++)
        h = (h ^ (uint64_t)(uint32_t)lr_seq_tokens(s)[i]) * 1099511628211u;
    return (lua_Integer)h;
}

/* r.field: of the engine's, a method, or what the policy has put there. */
static int req_index(lua_State *L)
{
    lr_policy_req *q = lr_policy_check_request(L, 1);
    int t = push_member(L);
    if (t == LUA_TNUMBER) {
        int field = (int)lua_tointeger(L, -1);
        if (field == F_ID) {
            lua_pushinteger(L, (lua_Integer)q->id);
            return 1;
        }
        if (!q->r && field == F_STATE) {
            lua_pushliteral(L, "ended");
            return 1;
        }
        if (!q->r) live_request(L, 1);
        return push_field(L, q->r, field == F_GRANTED ? granted(q) : 0, field);
    }
    if (t != LUA_TNIL) return 1;
    if (lua_getiuservalue(L, 1, 1) != LUA_TTABLE) return 0;
    lua_pushvalue(L, 2);
    lua_rawget(L, -2);
    return 1;
}

static int req_newindex(lua_State *L)
{
    lr_policy_req *q = lr_policy_check_request(L, 1);
    int t = push_member(L);
    int field = t == LUA_TNUMBER ? (int)lua_tointeger(L, -1) : 0;
    if (field == F_PRIORITY) {
        lua_Integer v = luaL_checkinteger(L, 3);
        if (v < INT_MIN || v > INT_MAX) return luaL_error(L, "priority %I is out of range", (LUAI_UACINT)v);
        lr_request_set_priority(live_request(L, 1)->r, (int)v);
    } else if (field == F_DEADLINE) {
        lua_Number v = luaL_checknumber(L, 3);
        if (isnan(v)) return luaL_error(L, "the deadline is not a number");
        lr_request_set_deadline(live_request(L, 1)->r, v);
    } else if (t != LUA_TNIL) {
        return luaL_error(L, "'%s' of a request can't be changed", lua_tostring(L, 2));
    } else {
        if (q->r == NULL && lua_isnil(L, 3)) return 0;
        if (lua_getiuservalue(L, 1, 1) != LUA_TTABLE) {
            lua_newtable(L);
            lua_pushvalue(L, -1);
            lua_setiuservalue(L, 1, 1);
        }
        lua_pushvalue(L, 2);
        lua_pushvalue(L, 3);
        lua_rawset(L, -3);
    }
    return 0;
}

static int req_tostring(lua_State *L)
{
    lr_policy_req *q = lr_policy_check_request(L, 1);
    lua_pushfstring(L, "request %I (%s)", (LUAI_UACINT)q->id,
                    q->r ? lr_req_state_name(lr_request_info(q->r)->state) : "ended");
    return 1;
}

/* r:cancel(): ends it when the step is over */
static int req_cancel(lua_State *L)
{
    lr_request_cancel(live_request(L, 1)->r);
    return 0;
}

/* r:prefix() -> tokens that would need no computing now: its own and what the prefix cache holds. Takes time in
 * proportion to the prompt. */
static int req_prefix(lua_State *L)
{
    lua_pushinteger(L, lr_lua_request_prefix(live_request(L, 1)->r));
    return 1;
}

/* r:head(n) -> a number that prompts share whose first n tokens are the same */
static int req_head(lua_State *L)
{
    const lr_request *r = live_request(L, 1)->r;
    lua_pushinteger(L, lr_lua_request_head(r, luaL_checkinteger(L, 2)));
    return 1;
}

/* ---- the step ---- */

lr_policy_view *lr_policy_push_view(lua_State *L, lr_lua_policy *p, const char *class_name, int env)
{
    lr_policy_view *v = lua_newuserdatauv(L, sizeof *v, 1);
    *v = (lr_policy_view){MAGIC_VIEW, p};
    luaL_setmetatable(L, class_name);
    lua_pushvalue(L, env);
    lua_setiuservalue(L, -2, 1);
    return v;
}

/* The policy whose step the value at 1 is; raises outside of the hooks that may use it. */
static lr_lua_policy *check_step(lua_State *L, const char *what, bool schedule_only)
{
    lr_policy_view *v = fast_check(L, 1, sizeof *v, MAGIC_VIEW, POLICY_STEP);
    lr_lua_policy *p = v->p;
    if (!p || !p->step) {
        if (p && p->phase != N_HOOKS)
            luaL_error(L, "step: %s can't be used in the hook %s", what, lr_lua_hook_names[p->phase]);
        luaL_error(L, "step: %s is used after the step is over", what);
    }
    if (schedule_only && p->phase != HOOK_SCHEDULE)
        luaL_error(L, "step: %s can be used in the hook schedule only, not in %s", what, lr_lua_hook_names[p->phase]);
    return p;
}

enum {
    S_RUNNING = 1,
    S_WAITING,
    S_BUDGET,
    S_PROMPT_ROWS,
    S_PROMPT_LEAST,
    S_SLOTS,
    S_ACTIVE,
    S_FREE_BLOCKS,
    S_BLOCK_SIZE,
    S_NOW
};

static const struct {
    const char *name;
    int field;
} step_fields[] = {
    {"running", S_RUNNING},         {"waiting", S_WAITING},          {"budget", S_BUDGET}, {"slots", S_SLOTS},
    {"active", S_ACTIVE},           {"free_blocks", S_FREE_BLOCKS},  {"now", S_NOW},       {"block_size", S_BLOCK_SIZE},
    {"prompt_rows", S_PROMPT_ROWS}, {"prompt_least", S_PROMPT_LEAST}};

/* Pushes the list of running or waiting requests, filled once a step. */
static int push_list(lua_State *L, lr_lua_policy *p, bool running)
{
    lr_step *s = p->step;
    uint64_t step = lr_engine_generation(p->e);
    if (p->listed != step) {
        p->listed = step;
        p->has_running = p->has_waiting = false;
    }
    bool *has = running ? &p->has_running : &p->has_waiting;
    int *n = running ? &p->n_running : &p->n_waiting;
    lua_getiuservalue(L, 1, 1);
    int env = lua_gettop(L);
    lua_rawgeti(L, env, running ? ENV_RUNNING : ENV_WAITING);
    if (*has) return 1;
    int count = running ? lr_step_n_running(s) : lr_step_n_waiting(s), k = 0, list = env + 1;
    lua_rawgeti(L, env, ENV_REQUESTS);
    for (int i = 0; i < count; i++) {
        lr_request *r = running ? lr_step_running(s, i) : lr_step_waiting(s, i);
        if (!r) continue;
        lr_policy_req *q = lr_request_policy_data(r);
        if (q) {
            lua_rawgeti(L, list + 1, q->ref);
        } else {
            lr_policy_push_request(L, p, env, r);
        }
        lua_rawseti(L, list, ++k);
    }
    int old = (int)lua_rawlen(L, list); /* a hook may have added to it */
    for (int i = k + 1; i <= *n || i <= old; i++) {
        lua_pushnil(L);
        lua_rawseti(L, list, i);
    }
    *n = k;
    *has = true;
    lua_settop(L, list);
    return 1;
}

static int step_index(lua_State *L)
{
    int t = push_member(L);
    if (t != LUA_TNUMBER && t != LUA_TNIL) return 1; /* a method */
    const char *name = lua_tostring(L, 2);
    if (t == LUA_TNIL) return luaL_error(L, "step has no field '%s'", name ? name : luaL_typename(L, 2));
    lr_lua_policy *p = check_step(L, name, false);
    lr_step *s = p->step;
    switch (lua_tointeger(L, -1)) {
    case S_RUNNING:
        return push_list(L, p, true);
    case S_WAITING:
        return push_list(L, p, false);
    case S_BUDGET:
        lua_pushinteger(L, lr_step_budget(s));
        break;
    case S_PROMPT_ROWS:
        lua_pushinteger(L, lr_step_prompt_rows(s));
        break;
    case S_PROMPT_LEAST:
        lua_pushinteger(L, lr_engine_get_config(p->e)->prompt_rows);
        break;
    case S_SLOTS:
        lua_pushinteger(L, lr_step_slots(s));
        break;
    case S_ACTIVE:
        lua_pushinteger(L, lr_step_n_active(s));
        break;
    case S_FREE_BLOCKS:
        lua_pushinteger(L, lr_step_blocks(s, 0));
        break;
    case S_BLOCK_SIZE:
        lua_pushinteger(L, lr_step_block_size(s));
        break;
    default:
        lua_pushnumber(L, lr_step_now(s));
    }
    return 1;
}

static int refused(lua_State *L, const char *why)
{
    lua_pushnil(L);
    lua_pushstring(L, why);
    return 2;
}

/* step:run(r [, n]) -> rows granted now; nil and a reason. Without n: all that it may have. */
static int step_run(lua_State *L)
{
    lr_lua_policy *p = check_step(L, "run", true);
    lr_policy_req *q = lr_policy_check_request(L, 2);
    lua_Integer n = luaL_optinteger(L, 3, INT_MAX);
    if (!q->r) return refused(L, "it has ended");
    if (n <= 0) return refused(L, n < 0 ? "a negative number of rows" : "no rows asked for");
    int got = lr_step_run(p->step, q->r, n > INT_MAX ? INT_MAX : (int)n);
    if (got <= 0 && lr_step_refusal(p->step)) return refused(L, lr_step_refusal(p->step));
    lua_pushinteger(L, got);
    return 1;
}

lr_preempt_how lr_policy_check_how(lua_State *L, int idx, const lr_lua_policy *p)
{
    if (lua_isnoneornil(L, idx)) return lr_engine_get_config(p->e)->preempt;
    const char *how = lua_tostring(L, idx);
    if (how && strcmp(how, "swap") == 0) return LR_PREEMPT_SWAP;
    if (!how || strcmp(how, "recompute") != 0)
        luaL_error(L, "preempt: \"recompute\" or \"swap\" expected, got %s", how ? how : luaL_typename(L, idx));
    return LR_PREEMPT_RECOMPUTE;
}

/* step:preempt(r [, "recompute" | "swap"]) -> true; nil and a reason */
static int step_preempt(lua_State *L)
{
    lr_lua_policy *p = check_step(L, "preempt", false);
    lr_policy_req *q = lr_policy_check_request(L, 2);
    lr_preempt_how how = lr_policy_check_how(L, 3, p);
    if (!q->r) return refused(L, "it has ended");
    if (lr_step_preempt(p->step, q->r, how)) return refused(L, lr_step_refusal(p->step));
    lua_pushboolean(L, 1);
    return 1;
}

/* step:fits(r) -> whether all of a waiting request would fit now without preempting anybody */
static int step_fits(lua_State *L)
{
    lr_lua_policy *p = check_step(L, "fits", true);
    lr_policy_req *q = lr_policy_check_request(L, 2);
    lua_pushboolean(L, q->r && lr_step_fits(p->step, q->r));
    return 1;
}

/* step:default(): the built-in rule takes what is left of the step */
static int step_default(lua_State *L)
{
    lr_lua_policy *p = check_step(L, "default", true);
    lr_step_default(p->step);
    return 0;
}

/* step:blocks([group]) -> blocks free or evictable; group 1 unless given */
static int step_blocks(lua_State *L)
{
    lr_lua_policy *p = check_step(L, "blocks", false);
    lua_Integer g = luaL_optinteger(L, 2, 1);
    lua_pushinteger(L, g >= 1 && g <= LR_KV_GROUPS ? lr_step_blocks(p->step, (int)g - 1) : 0);
    return 1;
}

typedef struct sort_item {
    double key;
    int i;
} sort_item;

static int by_key(const void *a, const void *b)
{
    const sort_item *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return x->i - y->i;
}

/* step:sorted(list, key) -> a new list, ordered by key(item), a number, least first; equals keep their order */
static int step_sorted(lua_State *L)
{
    luaL_checktype(L, 2, LUA_TTABLE);
    luaL_checktype(L, 3, LUA_TFUNCTION);
    lua_settop(L, 3);
    lua_Unsigned len = lua_rawlen(L, 2);
    if (len > INT_MAX / 2) return luaL_error(L, "step:sorted: the list is too long");
    int n = (int)len;
    sort_item *items = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *items, 0);
    for (int i = 0; i < n; i++) {
        lua_pushvalue(L, 3);
        lua_rawgeti(L, 2, i + 1);
        lua_call(L, 1, 1);
        if (lua_type(L, -1) != LUA_TNUMBER)
            return luaL_error(L, "step:sorted: the key of item %d is no number but %s", i + 1, luaL_typename(L, -1));
        items[i] = (sort_item){lua_tonumber(L, -1), i};
        if (isnan(items[i].key)) return luaL_error(L, "step:sorted: the key of item %d is not a number", i + 1);
        lua_pop(L, 1);
    }
    qsort(items, (size_t)n, sizeof *items, by_key);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, 2, items[i].i + 1);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* ---- leaves ---- */

enum { L_TAG = 1, L_TOKENS, L_HITS, L_LAST_USED, L_IDLE };

static const struct {
    const char *name;
    int field;
} leaf_fields[] = {
    {"tag", L_TAG}, {"tokens", L_TOKENS}, {"hits", L_HITS}, {"last_used", L_LAST_USED}, {"idle", L_IDLE}};

static int leaf_index(lua_State *L)
{
    lr_policy_view *v = fast_check(L, 1, sizeof *v, MAGIC_VIEW, POLICY_LEAF);
    if (!v->p || !v->p->leaf) return luaL_error(L, "leaf: used after its hook is over");
    const lr_kv_leaf *leaf = v->p->leaf;
    push_member(L);
    switch (lua_tointeger(L, -1)) {
    case L_TAG:
        lr_lua_push_tag(L, leaf->tag);
        break;
    case L_TOKENS:
        lua_pushinteger(L, leaf->n_tokens);
        break;
    case L_HITS:
        lua_pushinteger(L, (lua_Integer)leaf->hits);
        break;
    case L_LAST_USED:
        lua_pushnumber(L, leaf->last_used);
        break;
    case L_IDLE:
        lua_pushnumber(L, lr_engine_now(v->p->e) - leaf->last_used);
        break;
    default:
        return luaL_error(L, "leaf has no field '%s'", luaL_tolstring(L, 2, NULL));
    }
    return 1;
}

/* ---- classes ---- */

static int read_only(lua_State *L) { return luaL_error(L, "it can't be changed"); }

/* The metatable of a class whose members are in the table on the stack's top, which stays. */
static void make_class(lua_State *L, const char *name, lua_CFunction index, lua_CFunction newindex)
{
    luaL_newmetatable(L, name);
    lua_pushvalue(L, -2);
    lua_pushcclosure(L, index, 1);
    lua_setfield(L, -2, "__index");
    lua_pushvalue(L, -2);
    lua_pushcclosure(L, newindex, 1);
    lua_setfield(L, -2, "__newindex");
    lua_pushliteral(L, "llmrun");
    lua_setfield(L, -2, "__metatable");
    lua_pop(L, 1);
}

static void set_member(lua_State *L, const char *name, int field)
{
    lua_pushinteger(L, field);
    lua_setfield(L, -2, name);
}

void lr_policy_open_views(lua_State *L)
{
    static const luaL_Reg req_methods[] = {
        {"cancel", req_cancel}, {"prefix", req_prefix}, {"head", req_head}, {NULL, NULL}};
    static const luaL_Reg step_methods[] = {
        {"run", step_run},       {"preempt", step_preempt}, {"fits", step_fits}, {"default", step_default},
        {"blocks", step_blocks}, {"sorted", step_sorted},   {NULL, NULL}};
    lr_lua_weak_table(L, &tag_ids, "k");
    lr_lua_weak_table(L, &tag_tables, "v");
    lua_newtable(L);
    for (size_t i = 0; i < sizeof leaf_fields / sizeof *leaf_fields; i++)
        set_member(L, leaf_fields[i].name, leaf_fields[i].field);
    make_class(L, POLICY_LEAF, leaf_index, read_only);
    lua_pop(L, 1);
    lua_newtable(L);
    for (size_t i = 0; i < sizeof req_fields / sizeof *req_fields; i++)
        set_member(L, req_fields[i].name, req_fields[i].field);
    luaL_setfuncs(L, req_methods, 0);
    make_class(L, POLICY_REQ, req_index, req_newindex);
    luaL_getmetatable(L, POLICY_REQ);
    lua_pushcfunction(L, req_tostring);
    lua_setfield(L, -2, "__tostring");
    lua_pop(L, 2);
    lua_newtable(L);
    for (size_t i = 0; i < sizeof step_fields / sizeof *step_fields; i++)
        set_member(L, step_fields[i].name, step_fields[i].field);
    luaL_setfuncs(L, step_methods, 0);
    make_class(L, POLICY_STEP, step_index, read_only);
    lua_setfield(L, -2, "policy_step"); /* Lua adds methods to it */
}
