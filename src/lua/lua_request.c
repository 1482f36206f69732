/* lua_request.c - binds requests: work on one sequence, and what has come of it so far. */
#include "engine/constrain.h"
#include "lua/lua_engine_int.h"
#include "lua/lua_grammar_int.h"
#include "lua/lua_spec_int.h"
#include <math.h>
#include <string.h>

static lr_request_ud *check_request(lua_State *L, int idx)
{
    lr_request_ud *u = luaL_checkudata(L, idx, LR_LUA_REQUEST);
    if (!u->r || !u->eng->e) luaL_error(L, "request is closed");
    return u;
}

static int request_close(lua_State *L)
{
    lr_request_ud *u = luaL_checkudata(L, 1, LR_LUA_REQUEST);
    if (u->r && u->eng->e) lr_request_free(u->r);
    u->r = NULL;
    return 0;
}

/* Strings of the list opts.stop, borrowed; the userdata that holds them stays on the stack. */
static void read_stop(lua_State *L, int idx, lr_req_params *p)
{
    if (lua_getfield(L, idx, "stop") == LUA_TNIL) return;
    luaL_argcheck(L, lua_istable(L, -1), idx, "stop: list of strings expected");
    size_t n = (size_t)luaL_len(L, -1);
    lr_str *s = lua_newuserdatauv(L, (n + 1) * sizeof *s, 0);
    for (size_t i = 0; i < n; i++) {
        if (lua_rawgeti(L, -2, (lua_Integer)i + 1) != LUA_TSTRING)
            luaL_error(L, "stop[%d]: string expected, got %s", (int)i + 1, luaL_typename(L, -1));
        s[i].s = lua_tolstring(L, -1, &s[i].n);
        lua_pop(L, 1);
    }
    p->stop = s;
    p->n_stop = n;
}

static void read_params(lua_State *L, int idx, lr_req_params *p, int n_vocab)
{
    p->max_tokens = lr_lua_opt_i32(L, idx, "max_tokens", p->max_tokens);
    p->ignore_eos = lr_lua_opt_bool(L, idx, "ignore_eos", p->ignore_eos);
    p->special = lr_lua_opt_bool(L, idx, "special", p->special);
    p->n_top = lr_lua_opt_i32(L, idx, "n_top", p->n_top);
    p->score_from = lr_lua_opt_i32(L, idx, "score_from", p->score_from);
    p->priority = lr_lua_opt_i32(L, idx, "priority", p->priority);
    p->deadline = lr_lua_opt_num(L, idx, "deadline", p->deadline);
    p->tag = lr_lua_opt_tag(L, idx, "tag");
    p->user = (void *)(intptr_t)lr_lua_opt_int(L, idx, "key", 0);
    const char *tenant = lr_lua_opt_str(L, idx, "tenant", NULL);
    if (tenant) p->tenant = lr_str_of(tenant);
    read_stop(L, idx, p);
    if (lua_getfield(L, idx, "stop_ids") != LUA_TNIL)
        p->stop_ids = lr_lua_check_ids(L, lua_gettop(L), n_vocab, &p->n_stop_ids);
}

/* The constraint of opts.matcher, which is at idx: a copy, so that the one in Lua stays where it is. */
static int make_constraint(lua_State *L, int idx, lr_model *model, lr_constraint *con, lr_error *err)
{
    lr_matcher *copy;
    if (lr_lua_is_pieces(L, idx)) return lr_lua_pieces_constraint(L, idx, model->vocab, model->n_vocab, con, err);
    int rc = lr_matcher_copy(&copy, lr_lua_check_matcher(L, idx), err);
    if (rc) return rc;
    rc = lr_constraint_of_matcher(con, copy, model->n_vocab, err);
    if (rc) lr_matcher_free(copy);
    return rc;
}

/* e:request(seq, { kind = "generate" | "logits" | "score", key = integer, stages = {...}, seed = n, max_tokens, stop,
 * stop_ids, ignore_eos, special, n_top, score_from, keep, priority, deadline, tenant, tag, matcher (or pieces),
 * speculate })
 * -> request; nil, text, code. key is what next_event gives. */
int lr_lua_engine_request(lua_State *L)
{
    static const char *const kinds[] = {"generate", "logits", "score", NULL};
    lr_engine_ud *eng = lr_lua_check_engine(L, 1);
    lr_seq_ud *seq = lr_lua_check_seq(L, 2);
    luaL_checktype(L, 3, LUA_TTABLE);
    luaL_argcheck(L, seq->eng == eng, 2, "a session of another model");
    lua_getfield(L, 3, "kind");
    lr_req_params p = lr_req_defaults((lr_req_kind)luaL_checkoption(L, -1, "generate", kinds));
    int n_vocab = lr_engine_model(eng->e)->n_vocab;
    read_params(L, 3, &p, n_vocab);
    lua_Integer seed = lr_lua_opt_int(L, 3, "seed", 0);
    lr_request_ud *u = lua_newuserdatauv(L, sizeof *u, 4);
    *u = (lr_request_ud){NULL, eng};
    luaL_setmetatable(L, LR_LUA_REQUEST);
    int self = lua_gettop(L);
    lua_pushvalue(L, 1);
    lua_setiuservalue(L, self, 1);
    lua_pushvalue(L, 2);
    lua_setiuservalue(L, self, 2);
    lr_lua_keep_tag(L, 3, "tag", self, 3);
    if (p.kind == LR_REQ_SCORE && lua_getfield(L, 3, "keep") != LUA_TNIL) {
        p.keep = lr_lua_check_rows(L, lua_gettop(L), n_vocab, &p.keep_rows);
        lua_setiuservalue(L, self, 4);
    }
    lr_spec_params spec;
    void **drafter = NULL;
    if (p.kind == LR_REQ_GENERATE && lua_getfield(L, 3, "speculate") != LUA_TNIL) {
        drafter = lr_lua_read_spec(L, lua_gettop(L), &spec);
        p.spec = &spec;
    }
    lr_error err;
    lr_constraint con;
    int rc = 0, held = 0;
    if (p.kind == LR_REQ_GENERATE && lua_getfield(L, 3, "matcher") != LUA_TNIL) {
        held = lua_gettop(L);
        if (!lr_lua_is_pieces(L, held)) lr_lua_check_matcher(L, held);
    }
    if (p.kind == LR_REQ_GENERATE && lua_getfield(L, 3, "stages") != LUA_TNIL)
        p.sampler = lr_lua_make_sampler(L, lua_gettop(L), (uint64_t)seed, n_vocab);
    if (held) {
        rc = make_constraint(L, held, lr_engine_model(eng->e), &con, &err);
        if (!rc) p.constraint = &con;
    }
    if (!rc) rc = lr_request_new(eng->e, seq->s, &p, &u->r, &err);
    if (rc) {
        lr_sampler_free(p.sampler);
        if (p.constraint) con.free(con.user);
        return lr_lua_fail(L, &err);
    }
    if (drafter) *drafter = NULL;
    lua_settop(L, self);
    return 1;
}

/* ---- results ---- */

static void set_num(lua_State *L, const char *name, double v)
{
    lua_pushnumber(L, v);
    lua_setfield(L, -2, name);
}

static void set_int(lua_State *L, const char *name, lua_Integer v)
{
    lua_pushinteger(L, v);
    lua_setfield(L, -2, name);
}

static void set_str(lua_State *L, const char *name, const char *v)
{
    lua_pushstring(L, v);
    lua_setfield(L, -2, name);
}

/* r:info() -> the fields of lr_req_info; state and finish as names; error and code when it failed */
static int request_info(lua_State *L)
{
    const lr_req_info *in = lr_request_info(check_request(L, 1)->r);
    lua_createtable(L, 0, 24);
    set_int(L, "id", (lua_Integer)in->id);
    set_str(L, "state", lr_req_state_name(in->state));
    set_str(L, "finish", lr_finish_name(in->finish));
    if (in->state == LR_REQ_FAILED) {
        set_str(L, "error", in->error.text);
        set_str(L, "code", lr_error_name(in->error.code));
    }
    set_num(L, "t_arrival", in->t_arrival);
    set_num(L, "t_start", in->t_start);
    set_num(L, "t_first", in->t_first);
    set_num(L, "t_last", in->t_last);
    set_num(L, "t_end", in->t_end);
    set_num(L, "t_queued", in->t_queued);
    set_num(L, "block_seconds", in->block_seconds);
    set_int(L, "n_prompt", in->n_prompt);
    set_int(L, "n_cached", in->n_cached);
    set_int(L, "n_computed", in->n_computed);
    set_int(L, "n_generated", in->n_generated);
    set_int(L, "n_forced", in->n_forced);
    set_int(L, "n_pending", in->n_pending);
    set_int(L, "n_preempted", in->n_preempted);
    set_int(L, "max_tokens", in->max_tokens);
    set_int(L, "priority", in->priority);
    set_int(L, "stop_token", in->stop_token);
    set_int(L, "stop_string", in->stop_string);
    if (in->spec.drafts) {
        lr_lua_push_spec_stats(L, &in->spec);
        lua_setfield(L, -2, "speculation");
    }
    return 1;
}

/* r:text([from]) -> text from that byte on (0 = all), length of all */
static int request_text(lua_State *L)
{
    size_t n;
    const char *s = lr_request_text(check_request(L, 1)->r, &n);
    lua_Integer from = luaL_optinteger(L, 2, 0);
    luaL_argcheck(L, from >= 0, 2, "negative");
    size_t at = (size_t)from < n ? (size_t)from : n;
    lua_pushlstring(L, n > at ? s + at : "", n - at);
    lua_pushinteger(L, (lua_Integer)n);
    return 2;
}

/* r:tokens([from]) -> ids from that number on (0 = all), count of all */
static int request_tokens(lua_State *L)
{
    size_t n;
    const lr_token_rec *rec = lr_request_tokens(check_request(L, 1)->r, &n);
    lua_Integer from = luaL_optinteger(L, 2, 0);
    luaL_argcheck(L, from >= 0, 2, "negative");
    size_t at = (size_t)from < n ? (size_t)from : n;
    lua_createtable(L, (int)(n - at), 0);
    for (size_t i = at; i < n; i++) {
        lua_pushinteger(L, rec[i].id);
        lua_rawseti(L, -2, (lua_Integer)(i - at) + 1);
    }
    lua_pushinteger(L, (lua_Integer)n);
    return 2;
}

/* r:logprobs([from]) -> { { id =, logprob =, top = { { id =, logprob = }, ... } }, ... } from that number on (0 = all);
 * top only if asked for */
static int request_logprobs(lua_State *L)
{
    lr_request *r = check_request(L, 1)->r;
    size_t n;
    const lr_token_rec *rec = lr_request_tokens(r, &n);
    lua_Integer from = luaL_optinteger(L, 2, 0);
    luaL_argcheck(L, from >= 0, 2, "negative");
    size_t at = (size_t)from < n ? (size_t)from : n;
    lua_createtable(L, (int)(n - at), 0);
    for (size_t i = at; i < n; i++) {
        int n_top = 0;
        const lr_top *top = lr_request_top(r, i, &n_top);
        lua_createtable(L, 0, 3);
        set_int(L, "id", rec[i].id);
        set_num(L, "logprob", (double)rec[i].logprob);
        if (top) {
            lua_createtable(L, n_top, 0);
            for (int k = 0; k < n_top && top[k].id >= 0; k++) {
                lua_createtable(L, 0, 2);
                set_int(L, "id", top[k].id);
                set_num(L, "logprob", (double)top[k].logprob);
                lua_rawseti(L, -2, k + 1);
            }
            lua_setfield(L, -2, "top");
        }
        lua_rawseti(L, -2, (lua_Integer)(i - at) + 1);
    }
    return 1;
}

/* r:logprob_sum() -> of all tokens, their number */
static int request_logprob_sum(lua_State *L)
{
    size_t n;
    const lr_token_rec *rec = lr_request_tokens(check_request(L, 1)->r, &n);
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)rec[i].logprob;
    lua_pushnumber(L, sum);
    lua_pushinteger(L, (lua_Integer)n);
    return 2;
}

/* r:logits() -> view of the row behind the sequence's end; nil if there is none */
static int request_logits(lua_State *L)
{
    lr_request_ud *u = check_request(L, 1);
    uint64_t generation;
    float *x = lr_request_logits(u->r, &generation);
    if (!x) return 0;
    lua_pushvalue(L, 1);
    lr_lua_push_row(L, x, lr_engine_model(u->eng->e)->n_vocab, (void *const *)(void *)&u->r, &u->eng->stamp);
    return 1;
}

/* r:hidden() -> the final hidden row behind these logits, as the bytes of its floats; nil if there is none */
static int request_hidden(lua_State *L)
{
    int n;
    const float *x = lr_request_hidden(check_request(L, 1)->r, &n);
    if (!x) return 0;
    lua_pushlstring(L, (const char *)x, (size_t)n * sizeof *x);
    return 1;
}

/* r:field(name) -> what policies see under that name, granted excepted; nil if there is none */
static int request_field(lua_State *L)
{
    lr_lua_push_request_field(L, check_request(L, 1)->r, luaL_checkstring(L, 2));
    return 1;
}

static int request_prefix(lua_State *L)
{
    lua_pushinteger(L, lr_lua_request_prefix(check_request(L, 1)->r));
    return 1;
}

static int request_head(lua_State *L)
{
    lua_pushinteger(L, lr_lua_request_head(check_request(L, 1)->r, luaL_checkinteger(L, 2)));
    return 1;
}

static int request_cancel(lua_State *L)
{
    lr_request_cancel(check_request(L, 1)->r);
    return 0;
}

static int request_active(lua_State *L)
{
    lua_pushboolean(L, lr_request_active(check_request(L, 1)->r));
    return 1;
}

static int request_set_priority(lua_State *L)
{
    lr_request_set_priority(check_request(L, 1)->r, (int)luaL_checkinteger(L, 2));
    return 0;
}

/* r:inject("preempt" | "swap" | "error" | "nan", after): a fault, for tests */
static int request_inject(lua_State *L)
{
    static const char *const faults[] = {"none", "preempt", "swap", "error", "nan", NULL};
    lr_request *r = check_request(L, 1)->r;
    lr_request_inject(r, (lr_fault)luaL_checkoption(L, 2, NULL, faults), (int)luaL_optinteger(L, 3, 0));
    return 0;
}

void lr_lua_open_request(lua_State *L)
{
    static const luaL_Reg methods[] = {{"info", request_info},
                                       {"text", request_text},
                                       {"tokens", request_tokens},
                                       {"logprobs", request_logprobs},
                                       {"logprob_sum", request_logprob_sum},
                                       {"logits", request_logits},
                                       {"hidden", request_hidden},
                                       {"cancel", request_cancel},
                                       {"active", request_active},
                                       {"field", request_field},
                                       {"prefix", request_prefix},
                                       {"head", request_head},
                                       {"set_priority", request_set_priority},
                                       {"inject", request_inject},
                                       {"close", request_close},
                                       {NULL, NULL}};
    lr_lua_class(L, LR_LUA_REQUEST, methods, request_close);
}
