/* lua_api.c - the public C interface (llmrun.h) over the engine. What a model file needs in order to become a model
 * (its architecture's script, its chat template) is Lua, so a model brings a Lua state; all else is C.
 *
 * A session's tokens follow its messages as in lua/llmrun/session.lua: when an answer is asked for, all messages are
 * rendered and the longest prefix of tokens that is there already is kept.
 */
#include "llmrun.h"
#include "base/mem.h"
#include "lua/lua_engine_int.h"
#include "lua/lua_state.h"
#include <string.h>

_Static_assert(sizeof(llmrun_error) == sizeof(lr_error), "an error is an error");

struct llmrun {
    lua_State *L;
    int model; /* registry: the Lua model */
    lr_engine *engine;
    llmrun_session *sessions;
};

struct llmrun_session {
    llmrun *m;
    lr_seq *seq;
    lr_request *req;
    int (*on_text)(void *user, const char *text, size_t n);
    void *user;
    size_t sent;     /* bytes of text that on_text has had */
    int messages;    /* registry: list of { role =, content = }; LUA_NOREF = plain text */
    int32_t *tokens; /* of the last result, as text is */
    char *text;
    llmrun_session *prev, *next;
};

static lr_error *inner(llmrun_error *err) { return (lr_error *)(void *)err; }

const char *llmrun_version(void) { return "0.1.0"; }
const char *llmrun_error_name(int code) { return lr_error_name(code); }
void llmrun_free(void *p) { lr_free(p); }

/* ---- Lua ---- */

/* Protected: options (or NULL), name. Leaves the model. */
static int load_model(lua_State *L)
{
    const llmrun_options *o = lua_touserdata(L, 1);
    const char *name = lua_touserdata(L, 2);
    lua_getglobal(L, "require");
    lua_pushliteral(L, "llmrun");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "load");
    lua_pushstring(L, name);
    lua_newtable(L);
    if (o) {
        const struct {
            const char *key;
            lua_Integer v;
        } ints[] = {
            {"threads", o->threads},
            {"ctx", o->context},
            {"max_batch_tokens", o->max_batch_tokens},
            {"max_seqs", o->max_sessions},
        };
        for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
            if (!ints[i].v) continue;
            lua_pushinteger(L, ints[i].v);
            lua_setfield(L, -2, ints[i].key);
        }
        if (o->device) lua_pushstring(L, o->device), lua_setfield(L, -2, "device");
        if (o->compute) lua_pushstring(L, o->compute), lua_setfield(L, -2, "compute");
        lua_newtable(L);
        if (o->kv_type) lua_pushstring(L, o->kv_type), lua_setfield(L, -2, "type");
        if (o->block_size) lua_pushinteger(L, o->block_size), lua_setfield(L, -2, "block_size");
        if (o->kv_bytes) lua_pushinteger(L, (lua_Integer)o->kv_bytes), lua_setfield(L, -2, "memory");
        lua_setfield(L, -2, "kv");
    }
    lua_call(L, 2, 1);
    return 1;
}

/* Protected: text. Leaves what it returns. */
static int load_text(lua_State *L)
{
    const char *text = lua_touserdata(L, 1);
    if (luaL_loadbufferx(L, text, strlen(text), "=llmrun_open_lua", "t") != LUA_OK) return lua_error(L);
    lua_call(L, 0, 1);
    return 1;
}

/* Protected: model -> light userdata of its engine; keeps the model in the registry. */
static int take_model(lua_State *L)
{
    luaL_argcheck(L, lua_istable(L, 1), 1, "a model expected");
    lua_getfield(L, 1, "engine");
    lr_engine_ud *u = lr_lua_check_engine(L, -1);
    lua_pushlightuserdata(L, u->e);
    lua_pushvalue(L, 1);
    lua_pushinteger(L, luaL_ref(L, LUA_REGISTRYINDEX));
    return 2;
}

static int open_with(llmrun **out, lua_CFunction loader, const void *a, const void *b, llmrun_error *err)
{
    llmrun *m = lr_calloc(1, sizeof *m);
    if (!m) return lr_fail(inner(err), LR_ENOMEM, "not enough memory");
    int rc = lr_lua_new_state(&m->L, inner(err));
    if (rc) goto fail;
    lua_pushcfunction(m->L, loader);
    lua_pushlightuserdata(m->L, (void *)(uintptr_t)a);
    lua_pushlightuserdata(m->L, (void *)(uintptr_t)b);
    rc = lr_lua_call(m->L, 2, 1, inner(err));
    if (rc) goto fail;
    lua_pushcfunction(m->L, take_model);
    lua_insert(m->L, -2);
    rc = lr_lua_call(m->L, 1, 2, inner(err));
    if (rc) goto fail;
    m->engine = lua_touserdata(m->L, -2);
    m->model = (int)lua_tointeger(m->L, -1);
    lua_pop(m->L, 2);
    *out = m;
    return 0;
fail:
    llmrun_close(m);
    return rc;
}

int llmrun_open(llmrun **out, const char *model, const llmrun_options *options, llmrun_error *err)
{
    return open_with(out, load_model, options, model, err);
}

int llmrun_open_lua(llmrun **out, const char *text, llmrun_error *err)
{
    return open_with(out, load_text, text, NULL, err);
}

void llmrun_close(llmrun *m)
{
    if (!m) return;
    while (m->sessions) llmrun_session_free(m->sessions);
    if (m->L) lua_close(m->L);
    lr_free(m);
}

/* ---- models ---- */

static lr_model *model_of(const llmrun *m) { return lr_engine_model(m->engine); }

const char *llmrun_name(const llmrun *m) { return model_of(m)->name; }
int llmrun_vocab_size(const llmrun *m) { return model_of(m)->n_vocab; }
bool llmrun_is_end(const llmrun *m, int32_t token) { return lr_vocab_is_eog(model_of(m)->vocab, token); }

int llmrun_context(const llmrun *m)
{
    lr_engine_info in;
    lr_engine_get_info(m->engine, &in);
    return in.context;
}

int llmrun_tokenize(const llmrun *m, const char *text, size_t n, bool special, bool bos, int32_t **ids, size_t *n_ids,
                    llmrun_error *err)
{
    unsigned flags = (special ? LR_TOK_SPECIAL : 0u) | (bos ? LR_TOK_BOS : 0u);
    return lr_tokenize(model_of(m)->vocab, text, n, flags, ids, n_ids, inner(err));
}

int llmrun_detokenize(const llmrun *m, const int32_t *ids, size_t n, bool special, char **text, size_t *n_text,
                      llmrun_error *err)
{
    return lr_detokenize(model_of(m)->vocab, ids, n, special, text, n_text, inner(err));
}

/* ---- sessions ---- */

static int new_session(llmrun *m, llmrun_session **out, lr_error *err)
{
    llmrun_session *s = lr_calloc(1, sizeof *s);
    if (!s) return lr_fail(err, LR_ENOMEM, "not enough memory");
    s->m = m;
    s->messages = LUA_NOREF;
    s->next = m->sessions;
    if (s->next) s->next->prev = s;
    m->sessions = s;
    *out = s;
    return 0;
}

int llmrun_session_new(llmrun *m, llmrun_session **out, llmrun_error *err)
{
    llmrun_session *s = NULL;
    int rc = new_session(m, &s, inner(err));
    if (rc) return rc;
    rc = lr_seq_new(m->engine, NULL, &s->seq, inner(err));
    if (rc) {
        llmrun_session_free(s);
        return rc;
    }
    *out = s;
    return 0;
}

void llmrun_session_free(llmrun_session *s)
{
    if (!s) return;
    lr_request_free(s->req);
    lr_seq_free(s->seq);
    luaL_unref(s->m->L, LUA_REGISTRYINDEX, s->messages);
    lr_free(s->tokens);
    lr_free(s->text);
    if (s->prev) s->prev->next = s->next;
    if (s->next) s->next->prev = s->prev;
    if (s->m->sessions == s) s->m->sessions = s->next;
    lr_free(s);
}

/* Protected: reference of a list, or LUA_NOREF -> reference of a copy. */
static int copy_list(lua_State *L)
{
    lua_newtable(L);
    lua_rawgeti(L, LUA_REGISTRYINDEX, lua_tointeger(L, 1));
    for (lua_Integer i = 1, n = luaL_len(L, -1); i <= n; i++) {
        lua_rawgeti(L, -1, i);
        lua_rawseti(L, -3, i);
    }
    lua_pop(L, 1);
    lua_pushinteger(L, luaL_ref(L, LUA_REGISTRYINDEX));
    return 1;
}

int llmrun_session_fork(llmrun_session *s, llmrun_session **out, llmrun_error *err)
{
    llmrun_session *f = NULL;
    lua_State *L = s->m->L;
    int rc = new_session(s->m, &f, inner(err));
    if (rc) return rc;
    rc = lr_seq_fork(s->seq, &f->seq, inner(err));
    if (!rc && s->messages != LUA_NOREF) {
        lua_pushcfunction(L, copy_list);
        lua_pushinteger(L, s->messages);
        rc = lr_lua_call(L, 1, 1, inner(err));
        if (!rc) {
            f->messages = (int)lua_tointeger(L, -1);
            lua_pop(L, 1);
        }
    }
    if (rc) {
        llmrun_session_free(f);
        return rc;
    }
    *out = f;
    return 0;
}

static int check_idle(const llmrun_session *s, lr_error *err)
{
    return s->req ? lr_fail(err, LR_ESTATE, "the session is generating; poll or cancel first") : 0;
}

/* Protected: reference or LUA_NOREF, role, content, n -> reference of the list with the message. */
static int add_message(lua_State *L)
{
    int ref = (int)lua_tointeger(L, 1);
    if (ref == LUA_NOREF)
        lua_newtable(L);
    else
        lua_rawgeti(L, LUA_REGISTRYINDEX, ref);
    lua_createtable(L, 0, 2);
    lua_pushstring(L, lua_touserdata(L, 2));
    lua_setfield(L, -2, "role");
    lua_pushlstring(L, lua_touserdata(L, 3), (size_t)lua_tointeger(L, 4));
    lua_setfield(L, -2, "content");
    lua_rawseti(L, -2, luaL_len(L, -2) + 1);
    if (ref == LUA_NOREF) ref = luaL_ref(L, LUA_REGISTRYINDEX);
    lua_pushinteger(L, ref);
    return 1;
}

static int put_message(llmrun_session *s, const char *role, const char *content, size_t n, lr_error *err)
{
    lua_State *L = s->m->L;
    lua_pushcfunction(L, add_message);
    lua_pushinteger(L, s->messages);
    lua_pushlightuserdata(L, (void *)(uintptr_t)role);
    lua_pushlightuserdata(L, (void *)(uintptr_t)content);
    lua_pushinteger(L, (lua_Integer)n);
    int rc = lr_lua_call(L, 4, 1, err);
    if (rc) return rc;
    s->messages = (int)lua_tointeger(L, -1);
    lua_pop(L, 1);
    return 0;
}

int llmrun_add_message(llmrun_session *s, const char *role, const char *content, llmrun_error *err)
{
    int rc = check_idle(s, inner(err));
    if (rc) return rc;
    if (s->messages == LUA_NOREF && lr_seq_len(s->seq) > 0)
        return lr_fail(inner(err), LR_ESTATE, "the session holds plain text; a chat begins with an empty one");
    return put_message(s, role, content, strlen(content), inner(err));
}

int llmrun_add_tokens(llmrun_session *s, const int32_t *ids, size_t n, llmrun_error *err)
{
    int rc = check_idle(s, inner(err));
    if (rc) return rc;
    if (s->messages != LUA_NOREF) return lr_fail(inner(err), LR_ESTATE, "the session is a chat; add messages to it");
    return lr_seq_append(s->seq, ids, n, inner(err));
}

int llmrun_add_text(llmrun_session *s, const char *text, size_t n, llmrun_error *err)
{
    int32_t *ids;
    size_t count;
    int rc = llmrun_tokenize(s->m, text, n, false, lr_seq_len(s->seq) == 0, &ids, &count, err);
    if (rc) return rc;
    rc = llmrun_add_tokens(s, ids, count, err);
    lr_free(ids);
    return rc;
}

size_t llmrun_length(const llmrun_session *s) { return lr_seq_len(s->seq); }
const int32_t *llmrun_tokens(const llmrun_session *s) { return lr_seq_tokens(s->seq); }

int llmrun_rewind(llmrun_session *s, size_t n, llmrun_error *err)
{
    int rc = check_idle(s, inner(err));
    if (rc) return rc;
    if (s->messages != LUA_NOREF) return lr_fail(inner(err), LR_ESTATE, "a chat can't be cut; fork it before");
    if (n > lr_seq_len(s->seq))
        return lr_fail(inner(err), LR_EINVAL, "%zu tokens of a session of %zu", n, lr_seq_len(s->seq));
    return lr_seq_truncate(s->seq, n, inner(err));
}

/* ---- generating ---- */

/* Protected: model, list of messages, sequence (light userdata), error (light userdata) -> code: renders the chat and
 * brings the sequence up to it. */
static int render(lua_State *L)
{
    lr_seq *seq = lua_touserdata(L, 3);
    lr_error *err = lua_touserdata(L, 4);
    lua_getfield(L, 1, "apply_template");
    lua_pushvalue(L, 1);
    lua_pushvalue(L, 2);
    lua_call(L, 2, 2);
    size_t n, keep = 0;
    const int32_t *ids = lr_lua_check_ids(L, -1, INT32_MAX, &n);
    while (keep < n && keep < lr_seq_len(seq) && lr_seq_tokens(seq)[keep] == ids[keep]) keep++;
    int rc = keep < lr_seq_len(seq) ? lr_seq_truncate(seq, keep, err) : 0;
    if (!rc && keep < n) rc = lr_seq_append(seq, ids + keep, n - keep, err);
    lua_pushinteger(L, rc);
    return 1;
}

static int sync_chat(llmrun_session *s, lr_error *err)
{
    lua_State *L = s->m->L;
    if (s->messages == LUA_NOREF) return 0;
    lua_pushcfunction(L, render);
    lua_rawgeti(L, LUA_REGISTRYINDEX, s->m->model);
    lua_rawgeti(L, LUA_REGISTRYINDEX, s->messages);
    lua_pushlightuserdata(L, s->seq);
    lua_pushlightuserdata(L, err);
    int rc = lr_lua_call(L, 4, 1, err);
    if (rc) return rc;
    rc = (int)lua_tointeger(L, -1);
    lua_pop(L, 1);
    return rc;
}

llmrun_gen llmrun_gen_defaults(void)
{
    return (llmrun_gen){.max_tokens = -1, .temperature = 1, .top_p = 1, .repetition_penalty = 1};
}

static int make_sampler(const llmrun_gen *g, int n_vocab, lr_sampler **out, lr_error *err)
{
    lr_stage st[5];
    size_t n = 0;
    if (g->repetition_penalty != 1 || g->presence_penalty != 0 || g->frequency_penalty != 0)
        st[n++] = (lr_stage){.kind = LR_STAGE_PENALTIES,
                             .repetition = g->repetition_penalty,
                             .presence = g->presence_penalty,
                             .frequency = g->frequency_penalty};
    if (g->temperature != 1) st[n++] = (lr_stage){.kind = LR_STAGE_TEMPERATURE, .a = g->temperature};
    if (g->min_p != 0) st[n++] = (lr_stage){.kind = LR_STAGE_MIN_P, .a = g->min_p};
    if (g->top_k != 0) st[n++] = (lr_stage){.kind = LR_STAGE_TOP_K, .n = g->top_k};
    if (g->top_p != 1) st[n++] = (lr_stage){.kind = LR_STAGE_TOP_P, .a = g->top_p};
    return lr_sampler_new(out, st, n, g->seed, n_vocab, err);
}

int llmrun_start(llmrun_session *s, const llmrun_gen *gen, llmrun_error *err)
{
    lr_error *e = inner(err);
    llmrun_gen g = gen ? *gen : llmrun_gen_defaults();
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    lr_str *stop = NULL;
    int rc = check_idle(s, e);
    if (!rc) rc = sync_chat(s, e);
    if (rc) return rc;
    rc = make_sampler(&g, llmrun_vocab_size(s->m), &p.sampler, e);
    if (rc) return rc;
    if (g.n_stop) {
        stop = lr_reallocarray(NULL, g.n_stop, sizeof *stop);
        if (!stop) rc = lr_fail(e, LR_ENOMEM, "not enough memory");
        for (size_t i = 0; stop && i < g.n_stop; i++) stop[i] = lr_str_of(g.stop[i]);
    }
    p.max_tokens = g.max_tokens;
    p.ignore_eos = g.ignore_eos;
    p.stop = stop;
    p.n_stop = g.n_stop;
    if (!rc) rc = lr_request_new(s->m->engine, s->seq, &p, &s->req, e);
    if (rc) lr_sampler_free(p.sampler);
    lr_free(stop);
    s->on_text = g.on_text;
    s->user = g.user;
    s->sent = 0;
    return rc;
}

/* Hands new text to whoever wants it. */
static void tell(llmrun_session *s)
{
    size_t n;
    if (!s->req || !s->on_text) return;
    const char *text = lr_request_text(s->req, &n);
    if (n == s->sent) return;
    size_t from = s->sent;
    s->sent = n;
    if (s->on_text(s->user, text + from, n - from)) lr_request_cancel(s->req);
}

int llmrun_step(llmrun *m, llmrun_error *err)
{
    unsigned what;
    if (!lr_engine_busy(m->engine)) return 0;
    lua_State *before = lr_lua_enter_step(m->L);
    int rows = lr_engine_step(m->engine, inner(err));
    lr_lua_leave_step(before);
    while (lr_engine_next_event(m->engine, &what)) {
    } /* sessions look for themselves */
    for (llmrun_session *s = m->sessions, *next; s; s = next) {
        next = s->next;
        tell(s);
    }
    return rows;
}

static int fill_result(llmrun_session *s, llmrun_result *out, lr_error *err)
{
    const lr_req_info *in = lr_request_info(s->req);
    size_t n, n_text;
    const lr_token_rec *rec = lr_request_tokens(s->req, &n);
    const char *text = lr_request_text(s->req, &n_text);
    int32_t *ids = lr_reallocarray(NULL, n + 1, sizeof *ids);
    char *copy = lr_memdup(text, n_text);
    if (!ids || !copy) {
        lr_free(ids);
        lr_free(copy);
        return lr_fail(err, LR_ENOMEM, "not enough memory");
    }
    lr_free(s->tokens);
    lr_free(s->text);
    s->tokens = ids;
    s->text = copy;
    for (size_t i = 0; i < n; i++) ids[i] = rec[i].id;
    out->text = copy;
    out->n_text = n_text;
    out->tokens = ids;
    out->n_tokens = n;
    out->finish = lr_finish_name(in->finish);
    out->n_prompt = in->n_prompt;
    out->n_cached = in->n_cached;
    out->first_token = in->t_first > 0 ? in->t_first - in->t_arrival : 0;
    out->total = in->t_end - in->t_arrival;
    return 0;
}

int llmrun_poll(llmrun_session *s, llmrun_result *out, llmrun_error *err)
{
    lr_error *e = inner(err);
    if (!s->req) return lr_fail(e, LR_ESTATE, "the session generates nothing");
    if (lr_request_active(s->req)) return 0;
    const lr_req_info *in = lr_request_info(s->req);
    int rc;
    if (in->state == LR_REQ_FAILED)
        rc = lr_fail(e, in->error.code, "%s", in->error.text);
    else
        rc = fill_result(s, out, e);
    if (!rc && s->messages != LUA_NOREF) rc = put_message(s, "assistant", out->text, out->n_text, e);
    lr_request_free(s->req);
    s->req = NULL;
    return rc ? rc : 1;
}

void llmrun_cancel(llmrun_session *s)
{
    if (s->req) lr_request_cancel(s->req);
}

int llmrun_generate(llmrun_session *s, const llmrun_gen *gen, llmrun_result *out, llmrun_error *err)
{
    int rc = llmrun_start(s, gen, err);
    if (rc) return rc;
    while ((rc = llmrun_poll(s, out, err)) == 0) {
        rc = llmrun_step(s->m, err);
        if (rc < 0) return rc;
    }
    return rc < 0 ? rc : 0;
}

int llmrun_logits(llmrun_session *s, float **out, llmrun_error *err)
{
    lr_error *e = inner(err);
    lr_req_params p = lr_req_defaults(LR_REQ_LOGITS);
    int rc = check_idle(s, e);
    if (!rc) rc = sync_chat(s, e);
    if (!rc) rc = lr_request_new(s->m->engine, s->seq, &p, &s->req, e);
    if (rc) return rc;
    while (lr_request_active(s->req) && (rc = llmrun_step(s->m, err)) >= 0) {
    }
    const lr_req_info *in = lr_request_info(s->req);
    uint64_t generation;
    float *x = rc >= 0 ? lr_request_logits(s->req, &generation) : NULL;
    if (x)
        *out = x;
    else if (rc >= 0)
        rc = lr_fail(e, in->error.code ? in->error.code : LR_ESTATE, "%s",
                     in->error.code ? in->error.text : "no logits");
    lr_request_free(s->req);
    s->req = NULL;
    return x ? 0 : rc;
}

int llmrun_main(int argc, char **argv) { return lr_lua_main(argc, argv); }
