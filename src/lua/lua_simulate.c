/* lua_simulate.c - binds the simulated model, and fleets: engines on virtual clocks that are driven together.
 *
 * A fleet lets its engines run up to a time, takes requests in, and says what has become of them. What decides (the
 * policies, the router) is Lua above it; prompts are made here, from numbers that stand for texts, as a million of them
 * would be slow as lists.
 */
#include "base/mem.h"
#include "engine/policy.h"
#include "lua/lua_engine_int.h"
#include "model/simulated.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FLEET "llmrun.fleet"
enum { NO_PROGRESS = 100000 }; /* steps in a row without a row */
#define IDLE_STEP 1e-4         /* seconds that such a step takes */

/* What came of a request. */
typedef struct ended {
    lua_Integer key;
    int replica, n_prompt, n_cached, n_generated, n_preempted;
    bool done;
    double t_arrival, t_first, t_last, t_end;
} ended;

typedef struct replica {
    lr_engine_ud *u;
    int64_t requests;
    int n_last; /* requests that ended in the last step */
} replica;

typedef struct fleet {
    replica *at; /* (n); user value 1 holds the engines */
    int n, next; /* the replica that comes next among equals */
    double now;  /* up to when they have run */
    ended *out;  /* (n_out), those from `taken` on are to be fetched */
    size_t n_out, cap_out, taken;
    int32_t *text; /* scratch of submit */
    size_t cap_text;
    bool failed; /* no memory for what ended */
} fleet;

static fleet *check_fleet(lua_State *L) { return luaL_checkudata(L, 1, FLEET); }

static lr_engine *engine_of(lua_State *L, const replica *r)
{
    if (!r->u->e) luaL_error(L, "an engine of the fleet is closed");
    return r->u->e;
}

static double clock_of(const replica *r) { return lr_simulated_now(lr_engine_model(r->u->e)); }

static int check_replica(lua_State *L, const fleet *f, int arg)
{
    lua_Integer i = luaL_checkinteger(L, arg);
    luaL_argcheck(L, i >= 1 && i <= f->n, arg, "no such replica");
    engine_of(L, &f->at[i - 1]);
    return (int)i - 1;
}

/* ---- running ---- */

/* Notes what has ended, and lets go of it. */
static void collect(fleet *f, int i)
{
    replica *r = &f->at[i];
    lr_request *q;
    unsigned what;
    r->n_last = 0;
    while ((q = lr_engine_next_event(r->u->e, &what))) {
        if (!(what & 16)) continue; /* LR_EV_DONE */
        const lr_req_info *in = lr_request_info(q);
        if (f->n_out == f->cap_out) {
            size_t cap = f->cap_out ? f->cap_out * 2 : 256;
            ended *p = lr_reallocarray(f->out, cap, sizeof *p);
            if (!p) {
                f->failed = true;
                return;
            }
            f->out = p;
            f->cap_out = cap;
        }
        f->out[f->n_out++] = (ended){.key = (lua_Integer)(intptr_t)in->user,
                                     .replica = i + 1,
                                     .n_prompt = in->n_prompt,
                                     .n_cached = in->n_cached,
                                     .n_generated = in->n_generated,
                                     .n_preempted = in->n_preempted,
                                     .done = in->state == LR_REQ_DONE,
                                     .t_arrival = in->t_arrival,
                                     .t_first = in->t_first,
                                     .t_last = in->t_last,
                                     .t_end = in->t_end};
        r->n_last++;
        lr_request_free(q);
    }
}

/* One step, or several in which nothing is decided, of replica i, and what ended in it. Steps begin before `until`. The
 * fleet is at 1 on the stack. */
static void run_some(lua_State *L, fleet *f, int i, double until, int *idle)
{
    replica *r = &f->at[i];
    lr_error err;
    double before = clock_of(r);
    r->u->stamp++;
    r->u->stepping = true;
    lua_State *was = lr_lua_enter_step(L);
    int64_t n = lr_engine_coast(r->u->e, until);
    int rows = n > 0 ? 1 : lr_engine_step(r->u->e, &err);
    lr_lua_leave_step(was);
    r->u->stepping = false;
    if (r->u->policy) {
        lua_getiuservalue(L, 1, 1);
        lua_rawgeti(L, -1, i + 1);
        lr_lua_settle_policy(L, -1);
        lua_pop(L, 2);
    }
    if (rows < 0) lr_lua_raise(L, &err);
    collect(f, i);
    if (f->failed) luaL_error(L, "no memory for what %d requests have done", (int)f->n_out);
    if (rows == 0) {
        if (!lr_engine_busy(r->u->e)) return;
        if (++*idle > NO_PROGRESS)
            luaL_error(L, "policy '%s' lets nothing run, though %d requests are there", lr_engine_policy_name(r->u->e),
                       lr_engine_busy(r->u->e));
        lr_simulated_wait(lr_engine_model(r->u->e), before + IDLE_STEP);
        return;
    }
    *idle = 0;
}

/* The busy replica whose clock is behind all others; *second: that of the next one. -1 = none. */
static int earliest(const fleet *f, double *second)
{
    int best = -1;
    double t = INFINITY;
    *second = INFINITY;
    for (int i = 0; i < f->n; i++) {
        if (!lr_engine_busy(f->at[i].u->e)) continue;
        double c = clock_of(&f->at[i]);
        if (c < t) {
            *second = t;
            t = c;
            best = i;
        } else if (c < *second) {
            *second = c;
        }
    }
    return best;
}

static int by_end(const void *a, const void *b)
{
    const ended *x = a, *y = b;
    if (x->t_end != y->t_end) return x->t_end < y->t_end ? -1 : 1;
    return (x->key > y->key) - (x->key < y->key);
}

/* f:advance(until, ordered) -> requests that ended, whether `until` was reached. All engines run until their clocks are
 * at `until` or they have nothing to do. ordered: in the order of their clocks, and no further than the first request's
 * end, since that may bring another one. */
static int fleet_advance(lua_State *L)
{
    fleet *f = check_fleet(L);
    double until = luaL_checknumber(L, 2), second;
    bool ordered = lua_toboolean(L, 3), reached = true;
    int idle = 0;
    lua_settop(L, 3);
    luaL_checkstack(L, 40, NULL);
    for (int i = 0; i < f->n; i++) engine_of(L, &f->at[i]);
    if (f->taken == f->n_out) f->taken = f->n_out = 0;
    if (ordered) {
        for (int i; (i = earliest(f, &second)) >= 0 && clock_of(&f->at[i]) < until;) {
            run_some(L, f, i, second < until ? second : until, &idle);
            reached = f->n_out == f->taken;
            if (!reached) break;
        }
    } else {
        for (int i = 0; i < f->n; i++) {
            idle = 0;
            while (lr_engine_busy(f->at[i].u->e) && clock_of(&f->at[i]) < until) {
                run_some(L, f, i, until, &idle);
                if (lr_lua_interrupted()) return luaL_error(L, "interrupted");
            }
        }
    }
    if (reached && isfinite(until) && until > f->now) f->now = until;
    if (f->n_out - f->taken > 1) qsort(f->out + f->taken, f->n_out - f->taken, sizeof *f->out, by_end);
    lua_pushinteger(L, (lua_Integer)(f->n_out - f->taken));
    lua_pushboolean(L, reached);
    return 2;
}

/* f:next() -> key, replica, whether it is done (else it failed or was cancelled), t_arrival, t_first, t_last, t_end,
 * n_prompt, n_cached, n_generated, n_preempted of one that ended, in the order of their ends; nil when there is none */
static int fleet_next(lua_State *L)
{
    fleet *f = check_fleet(L);
    if (f->taken == f->n_out) return 0;
    const ended *x = &f->out[f->taken++];
    lua_pushinteger(L, x->key);
    lua_pushinteger(L, x->replica);
    lua_pushboolean(L, x->done);
    lua_pushnumber(L, x->t_arrival);
    lua_pushnumber(L, x->t_first);
    lua_pushnumber(L, x->t_last);
    lua_pushnumber(L, x->t_end);
    lua_pushinteger(L, x->n_prompt);
    lua_pushinteger(L, x->n_cached);
    lua_pushinteger(L, x->n_generated);
    lua_pushinteger(L, x->n_preempted);
    return 11;
}

/* ---- submitting ---- */

/* The tokens of a text: a list { salt, n, salt, n, ... }; a salt of -1: what the model itself would say next. At most
 * `limit` tokens. */
static size_t make_text(lua_State *L, fleet *f, int idx, lua_Integer limit)
{
    size_t n = 0;
    int parts = (int)luaL_len(L, idx);
    for (int k = 1; k < parts && (lua_Integer)n < limit; k += 2) {
        lua_rawgeti(L, idx, k);
        lua_rawgeti(L, idx, k + 1);
        lua_Integer salt = lua_tointeger(L, -2), more = lua_tointeger(L, -1);
        lua_pop(L, 2);
        if (more < 0 || more > limit - (lua_Integer)n) more = limit - (lua_Integer)n;
        if (n + (size_t)more > f->cap_text) {
            size_t cap = (n + (size_t)more) * 2;
            int32_t *p = lr_reallocarray(f->text, cap, sizeof *p);
            if (!p) luaL_error(L, "no memory for a prompt of %d tokens", (int)(n + (size_t)more));
            f->text = p;
            f->cap_text = cap;
        }
        for (lua_Integer i = 0; i < more; i++, n++)
            f->text[n] = salt == -1 ? (n ? lr_simulated_next(f->text[n - 1], (int)n - 1) : 0)
                                    : lr_simulated_text((uint64_t)salt, (uint64_t)i);
    }
    return n;
}

/* f:submit(replica, at, key, { salt, n, ... }, prompt, output, { tenant =, priority =, deadline =, tag = integer }) ->
 * true; nil, text, code. prompt: so many tokens of the text. An engine with nothing to do puts its clock to `at`. */
static int fleet_submit(lua_State *L)
{
    fleet *f = check_fleet(L);
    int i = check_replica(L, f, 2);
    lr_engine *e = f->at[i].u->e;
    double at = luaL_checknumber(L, 3);
    lua_Integer key = luaL_checkinteger(L, 4), prompt = luaL_checkinteger(L, 6), output = luaL_checkinteger(L, 7);
    luaL_checktype(L, 5, LUA_TTABLE);
    luaL_argcheck(L, prompt >= 1 && prompt < INT32_MAX / 2, 6, "a number of tokens expected");
    luaL_argcheck(L, output >= 1 && output < INT32_MAX / 2, 7, "a number of tokens expected");
    lr_error err;
    lr_engine_info info;
    lr_engine_get_state(e, &info);
    if (prompt + output > info.context) {
        lr_fail(&err, LR_EFULL, "%d prompt tokens and %d new ones do not fit into the %d that a replica holds",
                (int)prompt, (int)output, info.context);
        return lr_lua_fail(L, &err);
    }
    size_t n = make_text(L, f, 5, prompt);
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    p.max_tokens = (int)output;
    p.ignore_eos = p.free_seq = true;
    p.user = (void *)(intptr_t)key;
    if (lua_istable(L, 8)) {
        const char *tenant = lr_lua_opt_str(L, 8, "tenant", NULL);
        if (tenant) p.tenant = lr_str_of(tenant);
        p.priority = lr_lua_opt_i32(L, 8, "priority", 0);
        p.deadline = lr_lua_opt_num(L, 8, "deadline", INFINITY);
        p.tag = (uint64_t)lr_lua_opt_int(L, 8, "tag", 0);
    }
    lr_simulated_wait(lr_engine_model(e), at);
    lr_seq *s;
    lr_request *r;
    if (lr_seq_new(e, NULL, &s, &err)) return lr_lua_fail(L, &err);
    lua_State *was = lr_lua_enter_step(L); /* the hook admit */
    int rc = lr_seq_append(s, f->text, n, &err);
    if (!rc) rc = lr_request_new(e, s, &p, &r, &err);
    lr_lua_leave_step(was);
    if (rc) {
        lr_seq_free(s);
        return lr_lua_fail(L, &err);
    }
    f->at[i].requests++;
    lua_pushboolean(L, 1);
    return 1;
}

/* ---- looking ---- */

/* Requests that a router has sent to a replica and not heard of again: one that ended in a step that is not over yet is
 * among them. */
static int outstanding(const fleet *f, const replica *r)
{
    return lr_engine_busy(r->u->e) + (clock_of(r) > f->now ? r->n_last : 0);
}

/* f:least() -> the replica with the fewest requests; equals take turns */
static int fleet_least(lua_State *L)
{
    fleet *f = check_fleet(L);
    int best = -1, least = 0;
    for (int k = 0; k < f->n; k++) {
        int i = (f->next + k) % f->n, n;
        engine_of(L, &f->at[i]);
        n = outstanding(f, &f->at[i]);
        if (best >= 0 && n >= least) continue;
        best = i;
        least = n;
        if (n == 0) break;
    }
    f->next = (best + 1) % f->n;
    lua_pushinteger(L, best + 1);
    return 1;
}

/* f:look(replica) -> requests outstanding, running, waiting, KV blocks used, cached, in all */
static int fleet_look(lua_State *L)
{
    fleet *f = check_fleet(L);
    const replica *r = &f->at[check_replica(L, f, 2)];
    lr_engine_info info;
    lr_engine_get_state(r->u->e, &info);
    lua_pushinteger(L, outstanding(f, r));
    lua_pushinteger(L, info.n_running);
    lua_pushinteger(L, info.n_waiting);
    lua_pushinteger(L, info.kv[0].used);
    lua_pushinteger(L, info.kv[0].cached);
    lua_pushinteger(L, info.kv[0].total);
    return 6;
}

/* f:total() -> requests running, waiting, KV blocks used, in all, over all replicas */
static int fleet_total(lua_State *L)
{
    fleet *f = check_fleet(L);
    lua_Integer sum[4] = {0};
    for (int i = 0; i < f->n; i++) {
        lr_engine_info info;
        lr_engine_get_state(engine_of(L, &f->at[i]), &info);
        sum[0] += info.n_running;
        sum[1] += info.n_waiting;
        sum[2] += info.kv[0].used;
        sum[3] += info.kv[0].total;
    }
    for (int i = 0; i < 4; i++) lua_pushinteger(L, sum[i]);
    return 4;
}

/* f:stats(replica) -> requests, steps, busy seconds, block seconds, most blocks, its clock */
static int fleet_stats(lua_State *L)
{
    fleet *f = check_fleet(L);
    const replica *r = &f->at[check_replica(L, f, 2)];
    lr_engine_info info;
    lr_engine_get_state(r->u->e, &info);
    lua_pushinteger(L, r->requests);
    lua_pushinteger(L, (lua_Integer)info.steps);
    lua_pushnumber(L, info.busy);
    lua_pushnumber(L, info.block_seconds);
    lua_pushinteger(L, info.block_peak);
    lua_pushnumber(L, clock_of(r));
    return 6;
}

/* ---- making ---- */

static int fleet_close(lua_State *L)
{
    fleet *f = check_fleet(L);
    lr_free(f->at);
    lr_free(f->out);
    lr_free(f->text);
    *f = (fleet){0};
    return 0;
}

/* fleet_new(list of engines of simulated models) -> fleet */
static int core_fleet_new(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_Integer n = luaL_len(L, 1);
    luaL_argcheck(L, n >= 1 && n <= 100000, 1, "1 to 100000 engines expected");
    lua_settop(L, 1);
    fleet *f = lua_newuserdatauv(L, sizeof *f, 1);
    *f = (fleet){0};
    luaL_setmetatable(L, FLEET);
    f->at = lr_calloc((size_t)n, sizeof *f->at);
    if (!f->at) return luaL_error(L, "no memory for %I replicas", n);
    lua_createtable(L, (int)n, 0);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, 1, i + 1);
        f->at[i].u = lr_lua_check_engine(L, lua_gettop(L));
        luaL_argcheck(L, lr_simulated_is(lr_engine_model(f->at[i].u->e)), 1, "an engine's model is not simulated");
        lua_rawseti(L, -2, i + 1);
    }
    lua_setiuservalue(L, -2, 1);
    f->n = (int)n;
    return 1;
}

static void read_points(lua_State *L, int idx, lr_sim_cost *c)
{
    lua_getfield(L, idx, "rows");
    lua_getfield(L, idx, "seconds");
    int rows = lua_gettop(L) - 1;
    luaL_argcheck(L, lua_istable(L, rows) && lua_istable(L, rows + 1), idx, "rows and seconds: lists expected");
    lua_Integer n = luaL_len(L, rows);
    if (n != luaL_len(L, rows + 1) || n < 1 || n > LR_SIM_POINTS)
        luaL_error(L, "rows and seconds: lists of the same length, 1 to %d, expected", LR_SIM_POINTS);
    c->n_points = (int)n;
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, rows, i + 1);
        lua_rawgeti(L, rows + 1, i + 1);
        lua_Integer v = luaL_checkinteger(L, -2);
        if (v < 1 || v > 1 << 20) luaL_error(L, "rows[%d] is out of range", i + 1);
        c->rows[i] = (int)v;
        c->seconds[i] = luaL_checknumber(L, -1);
        lua_pop(L, 2);
    }
    lua_pop(L, 2);
}

/* simulated_new{ vocab =, ctx =, token_bytes =, rows = {...}, seconds = {...}, step, sequence, token, decode_context,
 * prefill_pair, block_move, cold_narrow, cold_wide, cool_seconds = seconds, narrow_rows, cold_keep } -> model;
 * nil, text, code */
static int core_simulated_new(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lr_sim_config c = {.n_ctx = lr_lua_opt_i32(L, 1, "ctx", 131072)};
    lua_Integer bytes = lr_lua_opt_int(L, 1, "token_bytes", 1);
    luaL_argcheck(L, bytes >= 1, 1, "token_bytes: a size expected");
    c.token_bytes = (size_t)bytes;
    read_points(L, 1, &c.cost);
    c.cost.step = lr_lua_opt_num(L, 1, "step", 0);
    c.cost.sequence = lr_lua_opt_num(L, 1, "sequence", 0);
    c.cost.token = lr_lua_opt_num(L, 1, "token", 0);
    c.cost.decode_context = lr_lua_opt_num(L, 1, "decode_context", 0);
    c.cost.prefill_pair = lr_lua_opt_num(L, 1, "prefill_pair", 0);
    c.cost.block_move = lr_lua_opt_num(L, 1, "block_move", 0);
    c.cost.cold_narrow = lr_lua_opt_num(L, 1, "cold_narrow", 0);
    c.cost.cold_wide = lr_lua_opt_num(L, 1, "cold_wide", 0);
    c.cost.narrow_rows = lr_lua_opt_i32(L, 1, "narrow_rows", 0);
    c.cost.cool_seconds = lr_lua_opt_num(L, 1, "cool_seconds", 0);
    c.cost.cold_keep = lr_lua_opt_num(L, 1, "cold_keep", 0);
    lua_getfield(L, 1, "vocab");
    c.vocab = lr_lua_check_vocab(L, -1);
    lr_error err;
    lr_lua_model *m = lr_lua_new_model(L);
    return lr_simulated_new(&m->model, &c, &err) ? lr_lua_fail(L, &err) : 1;
}

/* step_seconds(model, rows, seqs, outs, context, pairs) -> what the cost model says */
static int core_step_seconds(lua_State *L)
{
    lr_engine *e = lr_lua_check_engine(L, 1)->e;
    luaL_argcheck(L, lr_simulated_is(lr_engine_model(e)), 1, "the engine's model is not simulated");
    lr_sim_load l = {.rows = (int)luaL_checkinteger(L, 2),
                     .seqs = (int)luaL_checkinteger(L, 3),
                     .outs = (int)luaL_checkinteger(L, 4),
                     .context = luaL_checkinteger(L, 5),
                     .pairs = luaL_checkinteger(L, 6)};
    luaL_argcheck(L, l.rows >= 0 && l.rows <= lr_engine_get_config(e)->max_batch_tokens, 2, "more than a step has");
    lua_pushnumber(L, lr_simulated_seconds(lr_engine_model(e), &l));
    return 1;
}

void lr_lua_open_simulate(lua_State *L)
{
    static const luaL_Reg methods[] = {{"advance", fleet_advance}, {"next", fleet_next},   {"submit", fleet_submit},
                                       {"least", fleet_least},     {"look", fleet_look},   {"total", fleet_total},
                                       {"stats", fleet_stats},     {"close", fleet_close}, {NULL, NULL}};
    lr_lua_class(L, FLEET, methods, fleet_close);
    lua_pushcfunction(L, core_fleet_new);
    lua_setfield(L, -2, "fleet_new");
    lua_pushcfunction(L, core_simulated_new);
    lua_setfield(L, -2, "simulated_new");
    lua_pushcfunction(L, core_step_seconds);
    lua_setfield(L, -2, "step_seconds");
}
