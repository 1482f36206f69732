/* lua_engine.c - binds the engine and its sequences; requests are in lua_request.c.
 *
 * The engine's userdata keeps the model's (and so its file) alive; sequences and requests keep the engine's. Closing an
 * engine kills their handles: each call checks.
 */
#include "lua/lua_engine_int.h"
#include "lua/lua_spec_int.h"
#include "base/dtype.h"
#include "base/mem.h"
#include "engine/look.h"
#include "engine/metrics.h"
#include "engine/record.h"
#include "model/parallel.h"
#include "model/simulated.h"
#include <stdio.h>
#include <string.h>

lr_engine_ud *lr_lua_check_engine(lua_State *L, int idx) { return lr_lua_check_open(L, idx, LR_LUA_ENGINE, "engine"); }

lr_seq_ud *lr_lua_check_seq(lua_State *L, int idx)
{
    lr_seq_ud *u = luaL_checkudata(L, idx, LR_LUA_SEQ);
    if (!u->s || !u->eng->e) luaL_error(L, "session is closed");
    return u;
}

/* ---- steps ---- */

static lua_State *step_state;
lua_State *lr_lua_step_state(void) { return step_state; }
lua_State *lr_lua_enter_step(lua_State *L)
{
    lua_State *before = step_state;
    step_state = L;
    return before;
}
void lr_lua_leave_step(lua_State *before) { step_state = before; }

/* e:step() -> rows that ran; nil, text, code */
static int engine_step(lua_State *L)
{
    lr_engine_ud *u = lr_lua_check_engine(L, 1);
    lr_error err;
    if (!lua_checkstack(L, 40)) return luaL_error(L, "stack overflow");
    u->stamp++;
    lua_State *before = lr_lua_enter_step(L);
    bool was = u->stepping;
    u->stepping = true;
    int rows = lr_engine_step(u->e, &err);
    u->stepping = was;
    lr_lua_leave_step(before);
    if (u->policy) lr_lua_settle_policy(L, 1);
    if (rows < 0) return lr_lua_fail(L, &err);
    lua_pushinteger(L, rows);
    return 1;
}

/* e:last_load() -> rows, sequences, tokens drawn, context, pairs of the last step: see lr_engine_last_load */
static int engine_last_load(lua_State *L)
{
    lr_step_load l;
    lr_engine_last_load(lr_lua_check_engine(L, 1)->e, &l);
    lua_pushinteger(L, l.rows);
    lua_pushinteger(L, l.seqs);
    lua_pushinteger(L, l.outs);
    lua_pushinteger(L, l.context);
    lua_pushinteger(L, l.pairs);
    return 5;
}

/* e:busy() -> requests waiting or running, those of them that wait */
static int engine_busy(lua_State *L)
{
    const lr_engine *e = lr_lua_check_engine(L, 1)->e;
    lua_pushinteger(L, lr_engine_busy(e));
    lua_pushinteger(L, lr_engine_waiting(e));
    return 2;
}

/* e:next_event() -> key of a request that something happened to, event bits; nil when there is none */
static int engine_next_event(lua_State *L)
{
    unsigned what = 0;
    lr_request *r = lr_engine_next_event(lr_lua_check_engine(L, 1)->e, &what);
    if (!r) return 0;
    lua_pushinteger(L, (lua_Integer)(intptr_t)lr_request_info(r)->user);
    lua_pushinteger(L, (lua_Integer)what);
    return 2;
}

static int engine_now(lua_State *L)
{
    lua_pushnumber(L, lr_engine_now(lr_lua_check_engine(L, 1)->e));
    return 1;
}

static int engine_drop_cached(lua_State *L)
{
    lr_engine_drop_cached(lr_lua_check_engine(L, 1)->e);
    return 0;
}

/* e:check() -> true; nil, text, code: a broken invariant */
static int engine_check(lua_State *L)
{
    lr_error err;
    if (lr_engine_check(lr_lua_check_engine(L, 1)->e, &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

/* e:trace(path | nil) -> true; nil, text, code */
static int engine_trace(lua_State *L)
{
    lr_error err;
    if (lr_engine_trace(lr_lua_check_engine(L, 1)->e, lua_isnoneornil(L, 2) ? NULL : lr_lua_check_path(L, 2), &err))
        return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

/* e:record(on) -> true; nil, text, code: begins or ends a record (engine/record.h) */
static int engine_record(lua_State *L)
{
    lr_error err;
    if (lr_engine_record(lr_lua_check_engine(L, 1)->e, lua_toboolean(L, 2), &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

/* e:record_take() -> its lines since the last call; nil, text, code */
static int engine_record_take(lua_State *L)
{
    const char *text;
    size_t n;
    lr_error err;
    if (lr_engine_record_take(lr_lua_check_engine(L, 1)->e, &text, &n, &err)) return lr_lua_fail(L, &err);
    lua_pushlstring(L, text, n);
    return 1;
}

/* e:room() -> blocks free or evictable, blocks (shared ones counted more than once) that idle sequences would give up,
 * rows that the built-in rule would take of prompts now */
static int engine_room(lua_State *L)
{
    int available, idle, prompt_rows;
    lr_engine_room(lr_lua_check_engine(L, 1)->e, &available, &idle, &prompt_rows);
    lua_pushinteger(L, available);
    lua_pushinteger(L, idle);
    lua_pushinteger(L, prompt_rows);
    return 3;
}

/* e:set_exact(on): for replays */
static int engine_set_exact(lua_State *L)
{
    lr_engine_set_exact(lr_lua_check_engine(L, 1)->e, lua_toboolean(L, 2));
    return 0;
}

/* ---- what it is and does ---- */

static void set_int(lua_State *L, const char *name, lua_Integer v)
{
    lua_pushinteger(L, v);
    lua_setfield(L, -2, name);
}

static void push_kv(lua_State *L, const lr_engine_info *in, int g)
{
    lua_createtable(L, 0, 11);
    set_int(L, "total", in->kv[g].total);
    set_int(L, "free", in->kv[g].free);
    set_int(L, "used", in->kv[g].used);
    set_int(L, "cached", in->kv[g].cached);
    set_int(L, "evicted", (lua_Integer)in->kv[g].evicted);
    set_int(L, "copied", (lua_Integer)in->kv[g].copied);
    set_int(L, "spilled", in->kv[g].spilled);
    set_int(L, "spill_out", (lua_Integer)in->kv[g].spill_out);
    set_int(L, "spill_in", (lua_Integer)in->kv[g].spill_in);
    set_int(L, "block_bytes", (lua_Integer)in->block_bytes[g]);
}

/* Field ranks: what a model on several ranks has done so far. */
static void push_ranks(lua_State *L, const lr_model *m)
{
    lr_parallel_stats s;
    if (!lr_parallel_get_stats(m, &s)) return;
    lua_createtable(L, 0, 9);
    set_int(L, "tp", s.tp);
    set_int(L, "pp", s.pp);
    set_int(L, "passes", (lua_Integer)s.passes);
    set_int(L, "micro_batches", (lua_Integer)s.micro);
    set_int(L, "gathers", (lua_Integer)s.gathers);
    set_int(L, "gather_bytes", (lua_Integer)s.bytes);
    lua_pushnumber(L, s.forward);
    lua_setfield(L, -2, "forward_seconds");
    lua_pushnumber(L, s.gather);
    lua_setfield(L, -2, "gather_seconds");
    lua_pushnumber(L, s.busy);
    lua_setfield(L, -2, "busy_seconds");
    lua_setfield(L, -2, "ranks");
}

/* e:info() -> what runs and what memory holds; kv is a list, one entry a block group */
static int engine_info(lua_State *L)
{
    lr_engine *e = lr_lua_check_engine(L, 1)->e;
    const lr_engine_config *c = lr_engine_get_config(e);
    lr_engine_info in;
    lr_engine_get_info(e, &in);
    lua_createtable(L, 0, 20);
    set_int(L, "context", in.context);
    set_int(L, "running", in.n_running);
    set_int(L, "waiting", in.n_waiting);
    set_int(L, "sequences", in.n_seqs);
    set_int(L, "block_size", in.block_size);
    set_int(L, "pinned", in.pinned);
    set_int(L, "slack", in.slack);
    set_int(L, "swapped", (lua_Integer)in.swapped);
    set_int(L, "steps", (lua_Integer)in.steps);
    set_int(L, "weight_bytes", (lua_Integer)in.mem_weights);
    set_int(L, "kv_bytes", (lua_Integer)in.mem_kv);
    set_int(L, "work_bytes", (lua_Integer)in.mem_work);
    set_int(L, "max_batch_tokens", c->max_batch_tokens);
    set_int(L, "max_seqs", c->max_seqs);
    set_int(L, "chunk", c->chunk);
    set_int(L, "prompt_rows", c->prompt_rows);
    lua_pushstring(L, lr_kv_type_text(c->kv_type));
    lua_setfield(L, -2, "kv_type");
    lua_pushstring(L, lr_kv_type_text(c->kv_value_type));
    lua_setfield(L, -2, "kv_value_type");
    lr_backend *be = lr_model_backend(lr_parallel_own(lr_engine_model(e)));
    lua_pushstring(L, be ? be->ops->describe(be) : "scripted");
    lua_setfield(L, -2, "backend");
    push_ranks(L, lr_engine_model(e));
    lua_createtable(L, in.n_groups, 0);
    for (int g = 0; g < in.n_groups; g++) {
        push_kv(L, &in, g);
        lua_rawseti(L, -2, g + 1);
    }
    lua_setfield(L, -2, "kv");
    return 1;
}

/* e:observe(on) -> true or nil, message, code: begins, or ends, to add up what matrices are multiplied with */
static int engine_observe(lua_State *L)
{
    lr_error err;
    lr_engine *e = lr_lua_check_engine(L, 1)->e;
    if (lr_model_observe(lr_engine_model(e), lua_toboolean(L, 2), &err)) return lr_lua_fail(L, &err);
    lua_pushboolean(L, 1);
    return 1;
}

/* e:observed() -> list of { name =, rows =, width =, sums = squares of the inputs, summed over rows, as float32s } */
static int engine_observed(lua_State *L)
{
    lr_engine *e = lr_lua_check_engine(L, 1)->e;
    const lr_observed *seen;
    const char *name;
    int k;
    lua_newtable(L);
    for (size_t i = 0; lr_model_observed(lr_engine_model(e), i, &name, &k, &seen); i++) {
        luaL_Buffer b;
        lua_createtable(L, 0, 4);
        char *at = luaL_buffinitsize(L, &b, (size_t)k * sizeof(float));
        for (int j = 0; j < k; j++) {
            float v = (float)seen->sums[j];
            memcpy(at + (size_t)j * sizeof v, &v, sizeof v);
        }
        luaL_pushresultsize(&b, (size_t)k * sizeof(float));
        lua_setfield(L, -2, "sums");
        lua_pushstring(L, name);
        lua_setfield(L, -2, "name");
        set_int(L, "rows", (lua_Integer)seen->rows);
        set_int(L, "width", k);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

static void push_hist(lua_State *L, const lr_metrics *m, const lr_hist *h)
{
    static const struct {
        const char *name;
        double q;
    } qs[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}};
    lua_createtable(L, 0, 6);
    set_int(L, "n", (lua_Integer)h->n);
    lua_pushnumber(L, h->sum);
    lua_setfield(L, -2, "sum");
    lua_pushnumber(L, h->n ? h->sum / (double)h->n : 0);
    lua_setfield(L, -2, "mean");
    for (size_t i = 0; i < sizeof qs / sizeof *qs; i++) {
        lua_pushnumber(L, lr_metrics_quantile(m, h, qs[i].q));
        lua_setfield(L, -2, qs[i].name);
    }
}

/* e:metrics() -> counters as numbers, histograms as { n, sum, mean, p50, p90, p99 }, finished = { stop = n, ... } */
static int engine_metrics(lua_State *L)
{
    const lr_metrics *m = lr_engine_metrics(lr_lua_check_engine(L, 1)->e);
    const char *name;
    lua_newtable(L);
    for (int i = 0; lr_metrics_counter(m, i, &name); i++)
        set_int(L, name, (lua_Integer)*lr_metrics_counter(m, i, &name));
    for (int i = 0; lr_metrics_hist(m, i, &name); i++) {
        const lr_hist *h = lr_metrics_hist(m, i, &name);
        push_hist(L, m, h);
        lua_setfield(L, -2, name);
    }
    lr_spec_stats s = {.drafts = m->spec_drafts,
                       .drafted = m->spec_drafted,
                       .accepted = m->spec_accepted,
                       .draft_time = m->spec_draft.sum,
                       .verify_time = m->spec_verify.sum};
    memcpy(s.tried_at, m->spec_tried_at, sizeof s.tried_at);
    memcpy(s.accepted_at, m->spec_accepted_at, sizeof s.accepted_at);
    lr_lua_push_spec_stats(L, &s);
    lua_setfield(L, -2, "speculation");
    lua_createtable(L, 0, 4);
    for (int f = LR_FINISH_STOP; f <= LR_FINISH_ERROR; f++) set_int(L, lr_finish_name(f), (lua_Integer)m->finished[f]);
    lua_setfield(L, -2, "finished");
    return 1;
}

/* Protected copy of a C string into Lua: the block is freed whatever happens. */
static int push_text(lua_State *L)
{
    lua_pushlstring(L, lua_touserdata(L, 1), (size_t)lua_tointeger(L, 2));
    return 1;
}

/* e:prometheus(model_name) -> text; nil, text, code */
static int engine_prometheus(lua_State *L)
{
    lr_engine *e = lr_lua_check_engine(L, 1)->e;
    const char *name = luaL_optstring(L, 2, lr_engine_model(e)->name);
    lr_error err;
    char *text;
    size_t n;
    luaL_checkstack(L, 4, NULL);
    if (lr_engine_prometheus(e, name, &text, &n, &err)) return lr_lua_fail(L, &err);
    lua_pushcfunction(L, push_text);
    lua_pushlightuserdata(L, text);
    lua_pushinteger(L, (lua_Integer)n);
    int st = lua_pcall(L, 2, 1, 0);
    lr_free(text);
    return st == LUA_OK ? 1 : lua_error(L);
}

/* ---- making and closing ---- */

static int engine_close(lua_State *L)
{
    lr_engine_ud *u = luaL_checkudata(L, 1, LR_LUA_ENGINE);
    if (u->e && (u->stepping || lr_lua_in_hook(u))) /* those of others do not matter: it may be collected in one */
        return luaL_error(L, "an engine can't be closed inside a step");
    lr_error err;
    if (u->e && lr_engine_trace(u->e, NULL, &err)) fprintf(stderr, "llmrun: %s\n", err.text);
    lr_engine_free(u->e);
    u->e = NULL;
    u->stamp++;
    return 0;
}

static int opt_size(lua_State *L, int idx, const char *field, int def)
{
    lua_Integer v = lr_lua_opt_int(L, idx, field, def);
    if (v < 0 || v > INT32_MAX)
        return luaL_error(L, "%s = %I is out of range", strcmp(field, "context") == 0 ? "ctx" : field, v);
    return (int)v;
}

static size_t opt_bytes(lua_State *L, int idx, const char *field, size_t def)
{
    lua_Integer v = lr_lua_opt_int(L, idx, field, (lua_Integer)def);
    if (v < 0) luaL_error(L, "%s = %I is negative", field, v);
    return (size_t)v;
}

static int block_count(lua_State *L, lua_Integer v)
{
    if (v < 0 || v > INT32_MAX) return luaL_error(L, "kv.blocks = %I is out of range", v);
    return (int)v;
}

static void read_blocks(lua_State *L, int idx, lr_engine_config *c)
{
    if (lua_getfield(L, idx, "kv_blocks") == LUA_TTABLE) {
        for (int g = 0; g < LR_KV_GROUPS; g++) {
            lua_rawgeti(L, -1, g + 1);
            c->kv_blocks[g] = block_count(L, luaL_optinteger(L, -1, 0));
            lua_pop(L, 1);
        }
    } else if (!lua_isnil(L, -1)) {
        for (int g = 0; g < LR_KV_GROUPS; g++) c->kv_blocks[g] = block_count(L, luaL_checkinteger(L, -1));
    }
    lua_pop(L, 1);
}

/* Protected: lr_engine_config* (light userdata), options -> the configuration says what they do. */
static int read_config(lua_State *L)
{
    lr_engine_config *out = lua_touserdata(L, 1), c = *out;
    c.max_batch_tokens = opt_size(L, 2, "max_batch_tokens", c.max_batch_tokens);
    c.max_seqs = opt_size(L, 2, "max_seqs", c.max_seqs);
    c.max_waiting = opt_size(L, 2, "max_waiting", c.max_waiting);
    c.chunk = opt_size(L, 2, "chunk", c.chunk);
    c.prompt_rows = opt_size(L, 2, "prompt_rows", c.prompt_rows);
    c.block_size = opt_size(L, 2, "block_size", c.block_size);
    c.context = opt_size(L, 2, "context", c.context);
    c.max_pinned = opt_size(L, 2, "max_pinned", c.max_pinned);
    c.patience = opt_size(L, 2, "patience", c.patience);
    c.hash_bits = opt_size(L, 2, "hash_bits", c.hash_bits);
    c.prefix_cache = lr_lua_opt_bool(L, 2, "prefix_cache", c.prefix_cache);
    c.kv_fraction = lr_lua_opt_num(L, 2, "kv_fraction", c.kv_fraction);
    c.kv_bytes = opt_bytes(L, 2, "kv_bytes", c.kv_bytes);
    c.swap_bytes = opt_bytes(L, 2, "swap_bytes", c.swap_bytes);
    c.spill = lr_lua_opt_str(L, 2, "spill", NULL);
    c.spill_bytes = opt_bytes(L, 2, "spill_bytes", c.spill_bytes);
    if (!lua_isnoneornil(L, 2)) read_blocks(L, 2, &c);
    const char *type = lr_lua_opt_str(L, 2, "kv_type", NULL), *preempt = lr_lua_opt_str(L, 2, "preempt", NULL);
    if (type && (c.kv_type = lr_kv_type_parse(type)) < 0) return luaL_error(L, "unknown KV type '%s'", type);
    type = lr_lua_opt_str(L, 2, "kv_value_type", NULL);
    if (type && (c.kv_value_type = lr_kv_type_parse(type)) < 0) return luaL_error(L, "unknown KV type '%s'", type);
    if (preempt && strcmp(preempt, "swap") != 0 && strcmp(preempt, "recompute") != 0)
        return luaL_error(L, "preempt: \"swap\" or \"recompute\" expected, got '%s'", preempt);
    if (preempt) c.preempt = strcmp(preempt, "swap") == 0 ? LR_PREEMPT_SWAP : LR_PREEMPT_RECOMPUTE;
    *out = c;
    return 0;
}

/* engine_new(model, options) -> engine, which takes the model over; nil, text, code. Options: the fields of
 * lr_engine_config; kv_type and kv_value_type are names, kv_blocks a number or a list (one a group). */
static int core_engine_new(lua_State *L)
{
    lr_lua_check_model(L, 1);
    lr_lua_model *m = lua_touserdata(L, 1);
    lr_engine_config c = lr_engine_defaults();
    lua_settop(L, 2);
    lua_pushcfunction(L, read_config);
    lua_pushlightuserdata(L, &c);
    lua_pushvalue(L, 2);
    if (lua_pcall(L, 2, 0, 0) != LUA_OK) {
        lua_pushnil(L);
        lua_insert(L, -2);
        lua_pushliteral(L, "invalid");
        return 3;
    }
    if (lr_simulated_is(m->model)) {
        c.now = lr_simulated_now;
        c.now_user = m->model;
    }
    lr_engine_ud *u = lua_newuserdatauv(L, sizeof *u, 3);
    *u = (lr_engine_ud){0};
    luaL_setmetatable(L, LR_LUA_ENGINE);
    lua_pushvalue(L, 1);
    lua_setiuservalue(L, -2, 1);
    lr_error err;
    if (lr_engine_new(&u->e, m->model, &c, &err)) return lr_lua_fail(L, &err);
    m->model = NULL;
    return 1;
}

/* e:model_info() -> see lua_model.c */
static int engine_model_info(lua_State *L)
{
    lr_lua_push_model_info(L, lr_engine_model(lr_lua_check_engine(L, 1)->e));
    return 1;
}

/* ---- sequences ---- */

static int seq_close(lua_State *L)
{
    lr_seq_ud *u = luaL_checkudata(L, 1, LR_LUA_SEQ);
    if (u->s && u->eng->e) lr_seq_free(u->s);
    u->s = NULL;
    return 0;
}

/* Pushes an empty sequence userdata of the engine userdata at idx. */
static lr_seq_ud *new_seq(lua_State *L, int engine_idx, lr_engine_ud *eng)
{
    engine_idx = lua_absindex(L, engine_idx);
    lr_seq_ud *u = lua_newuserdatauv(L, sizeof *u, 2);
    *u = (lr_seq_ud){NULL, eng};
    lua_pushvalue(L, engine_idx);
    lua_setiuservalue(L, -2, 1);
    luaL_setmetatable(L, LR_LUA_SEQ);
    return u;
}

static lr_str opt_lstr(lua_State *L, int idx, const char *field)
{
    const char *s = lr_lua_opt_str(L, idx, field, NULL);
    if (!s) return (lr_str){NULL, 0};
    lua_getfield(L, idx, field);
    lr_str r;
    r.s = lua_tolstring(L, -1, &r.n);
    lua_pop(L, 1);
    return r;
}

static lr_seq_config seq_config(lua_State *L, int idx)
{
    lr_seq_config c = {.salt = opt_lstr(L, idx, "salt"),
                       .adapter = opt_lstr(L, idx, "adapter"),
                       .tag = lr_lua_opt_tag(L, idx, "tag"),
                       .lora = lr_lua_opt_adapter(L, idx, "lora")};
    return c;
}

/* e:seq({ salt=, adapter=, lora=, tag= }) -> sequence; nil, text, code. adapter: a name in the cache's key; lora: of
 * adapter_new. */
static int engine_seq(lua_State *L)
{
    lr_engine_ud *u = lr_lua_check_engine(L, 1);
    lr_error err;
    lua_settop(L, 2);
    lr_seq_config c = seq_config(L, 2);
    lr_seq_ud *s = new_seq(L, 1, u);
    lr_lua_keep_tag(L, 2, "tag", lua_gettop(L), 2);
    return lr_seq_new(u->e, &c, &s->s, &err) ? lr_lua_fail(L, &err) : 1;
}

/* e:restore(path, { salt=, adapter=, lora=, tag= }) -> sequence; nil, text, code */
static int engine_restore(lua_State *L)
{
    lr_engine_ud *u = lr_lua_check_engine(L, 1);
    const char *path = lr_lua_check_path(L, 2);
    lr_error err;
    lua_settop(L, 3);
    lr_seq_config c = seq_config(L, 3);
    lr_seq_ud *s = new_seq(L, 1, u);
    lr_lua_keep_tag(L, 3, "tag", lua_gettop(L), 2);
    return lr_seq_restore(u->e, path, &c, &s->s, &err) ? lr_lua_fail(L, &err) : 1;
}

static int done(lua_State *L, int rc, const lr_error *err)
{
    if (rc) return lr_lua_fail(L, err);
    lua_pushboolean(L, 1);
    return 1;
}

/* s:fork() -> sequence; nil, text, code */
static int seq_fork(lua_State *L)
{
    lr_seq_ud *u = lr_lua_check_seq(L, 1);
    lr_error err;
    lua_getiuservalue(L, 1, 1);
    lr_seq_ud *f = new_seq(L, -1, u->eng);
    if (lua_getiuservalue(L, 1, 2) == LUA_TTABLE) {
        lua_setiuservalue(L, -2, 2);
    } else {
        lua_pop(L, 1);
    }
    return lr_seq_fork(u->s, &f->s, &err) ? lr_lua_fail(L, &err) : 1;
}

/* s:append(id | ids) -> true; nil, text, code */
static int seq_append(lua_State *L)
{
    lr_seq_ud *u = lr_lua_check_seq(L, 1);
    lr_error err;
    size_t n = 1;
    int32_t one;
    const int32_t *ids = &one;
    int n_vocab = lr_engine_model(u->eng->e)->n_vocab;
    if (lua_istable(L, 2)) {
        ids = lr_lua_check_ids(L, 2, n_vocab, &n);
    } else {
        lua_Integer id = luaL_checkinteger(L, 2);
        if (id < 0 || id >= n_vocab)
            return luaL_error(L, "token %I is no id of this vocabulary (0 to %d)", id, n_vocab - 1);
        one = (int32_t)id;
    }
    return done(L, lr_seq_append(u->s, ids, n, &err), &err);
}

/* s:truncate(n) -> true; nil, text, code */
static int seq_truncate(lua_State *L)
{
    lr_seq_ud *u = lr_lua_check_seq(L, 1);
    lua_Integer n = luaL_checkinteger(L, 2);
    lr_error err;
    luaL_argcheck(L, n >= 0 && (size_t)n <= lr_seq_len(u->s), 2, "not a length of the sequence");
    return done(L, lr_seq_truncate(u->s, (size_t)n, &err), &err);
}

static int seq_len(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)lr_seq_len(lr_lua_check_seq(L, 1)->s));
    return 1;
}

/* s:tokens([first [, last]]) -> ids, 1-based and inclusive as string.sub */
static int seq_tokens(lua_State *L)
{
    lr_seq_ud *u = lr_lua_check_seq(L, 1);
    lua_Integer n = (lua_Integer)lr_seq_len(u->s);
    lua_Integer from = luaL_optinteger(L, 2, 1), to = luaL_optinteger(L, 3, n);
    if (from < 0) from = from + n + 1;
    if (to < 0) to = to + n + 1;
    if (from < 1) from = 1;
    if (to > n) to = n;
    lr_lua_push_ids(L, from <= to ? lr_seq_tokens(u->s) + from - 1 : NULL, from <= to ? (size_t)(to - from + 1) : 0);
    return 1;
}

/* s:common(ids) -> length of the prefix that s shares with them */
static int seq_common(lua_State *L)
{
    lr_seq_ud *u = lr_lua_check_seq(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    const int32_t *have = lr_seq_tokens(u->s);
    lua_Integer n = luaL_len(L, 2), i = 0, len = (lua_Integer)lr_seq_len(u->s);
    for (; i < n && i < len; i++) {
        lua_rawgeti(L, 2, i + 1);
        bool same = lua_tointeger(L, -1) == have[i];
        lua_pop(L, 1);
        if (!same) break;
    }
    lua_pushinteger(L, i);
    return 1;
}

/* s:info() -> { len, computed, cached, blocks = {...}, id, tag } */
static int seq_info(lua_State *L)
{
    lr_seq_ud *u = lr_lua_check_seq(L, 1);
    int groups = lr_engine_model(u->eng->e)->n_groups;
    lua_createtable(L, 0, 6);
    set_int(L, "len", (lua_Integer)lr_seq_len(u->s));
    set_int(L, "computed", (lua_Integer)lr_seq_computed(u->s));
    set_int(L, "cached", (lua_Integer)lr_seq_peek_cached(u->s));
    set_int(L, "id", (lua_Integer)lr_seq_id(u->s));
    lr_lua_push_tag(L, lr_seq_tag(u->s));
    lua_setfield(L, -2, "tag");
    lua_createtable(L, groups, 0);
    for (int g = 0; g < groups; g++) {
        lua_pushinteger(L, lr_seq_blocks(u->s, g));
        lua_rawseti(L, -2, g + 1);
    }
    lua_setfield(L, -2, "blocks");
    return 1;
}

/* s:set_tag(integer | table | nil) */
static int seq_set_tag(lua_State *L)
{
    lr_seq_ud *u = lr_lua_check_seq(L, 1);
    lr_seq_set_tag(u->s, lr_lua_tag(L, 2));
    lua_settop(L, 2);
    lua_setiuservalue(L, 1, 2); /* keeps a table */
    return 0;
}

/* s:pin(on) -> true; nil, text, code */
static int seq_pin(lua_State *L)
{
    lr_seq_ud *u = lr_lua_check_seq(L, 1);
    lr_error err;
    return done(L, lr_seq_pin(u->s, lua_toboolean(L, 2), &err), &err);
}

/* s:park() -> whether it was idle and gave up its blocks; for replays */
static int seq_park(lua_State *L)
{
    lua_pushboolean(L, lr_seq_park(lr_lua_check_seq(L, 1)->s));
    return 1;
}

/* s:save(path) -> true; nil, text, code */
static int seq_save(lua_State *L)
{
    lr_seq_ud *u = lr_lua_check_seq(L, 1);
    lr_error err;
    return done(L, lr_seq_save(u->s, lr_lua_check_path(L, 2), &err), &err);
}

void lr_lua_open_engine(lua_State *L)
{
    static const luaL_Reg engine_methods[] = {{"step", engine_step},
                                              {"busy", engine_busy},
                                              {"last_load", engine_last_load},
                                              {"next_event", engine_next_event},
                                              {"now", engine_now},
                                              {"drop_cached", engine_drop_cached},
                                              {"check", engine_check},
                                              {"trace", engine_trace},
                                              {"record", engine_record},
                                              {"record_take", engine_record_take},
                                              {"set_exact", engine_set_exact},
                                              {"room", engine_room},
                                              {"info", engine_info},
                                              {"observe", engine_observe},
                                              {"observed", engine_observed},
                                              {"model_info", engine_model_info},
                                              {"metrics", engine_metrics},
                                              {"prometheus", engine_prometheus},
                                              {"seq", engine_seq},
                                              {"restore", engine_restore},
                                              {"request", lr_lua_engine_request},
                                              {"set_policy", lr_lua_engine_set_policy},
                                              {"set_draft", lr_lua_engine_set_draft},
                                              {"set_heads", lr_lua_engine_set_heads},
                                              {"set_eagle", lr_lua_engine_set_eagle},
                                              {"pace", lr_lua_engine_pace},
                                              {"pace_hold", lr_lua_engine_pace_hold},
                                              {"pace_forget", lr_lua_engine_pace_forget},
                                              {"drafting", lr_lua_engine_drafting},
                                              {"close", engine_close},
                                              {NULL, NULL}};
    static const luaL_Reg seq_methods[] = {{"fork", seq_fork}, {"append", seq_append},   {"truncate", seq_truncate},
                                           {"len", seq_len},   {"tokens", seq_tokens},   {"common", seq_common},
                                           {"info", seq_info}, {"set_tag", seq_set_tag}, {"pin", seq_pin},
                                           {"save", seq_save}, {"park", seq_park},       {"close", seq_close},
                                           {NULL, NULL}};
    lr_lua_class(L, LR_LUA_ENGINE, engine_methods, engine_close);
    lr_lua_class(L, LR_LUA_SEQ, seq_methods, seq_close);
    lr_lua_open_request(L);
    lua_pushcfunction(L, core_engine_new);
    lua_setfield(L, -2, "engine_new");
}
