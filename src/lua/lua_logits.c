/* lua_logits.c - the logits view: what Lua may do with a row of logits, at C speed.
 *
 * A row is dense (the whole vocabulary) or, after a narrowing stage of a sampler, a short list of candidates; every
 * method works on both. A token that is no candidate has logit -inf and stays so. Ids are token ids (0-based), lists
 * are Lua's.
 */
#include "base/mem.h"
#include "lua/lua_int.h"
#include "sample/row.h"
#include "sample/sample.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct view {
    lr_logits *l; /* what is shown: NULL = stale */
    lr_logits own;
    void *const *owner; /* NULL: no owner to ask */
    const uint64_t *stamp;
    uint64_t made;
} view;

static view *new_view(lua_State *L)
{
    view *v = lua_newuserdatauv(L, sizeof *v, 1);
    memset(v, 0, sizeof *v);
    luaL_setmetatable(L, LR_LUA_LOGITS);
    return v;
}

void lr_lua_push_row(lua_State *L, float *x, int n, void *const *owner, const uint64_t *stamp)
{
    view *v = new_view(L);
    lua_insert(L, -2);
    lua_setiuservalue(L, -2, 1);
    v->own = (lr_logits){.x = x, .n_vocab = n, .n_cand = -1};
    v->owner = owner;
    v->stamp = stamp;
    v->made = *stamp;
    v->l = &v->own;
}

void lr_lua_push_view(lua_State *L) { new_view(L); }

void lr_lua_point_view(lua_State *L, int idx, lr_logits *l)
{
    view *v = luaL_checkudata(L, idx, LR_LUA_LOGITS);
    v->l = l;
}

lr_logits *lr_lua_check_logits(lua_State *L, int idx)
{
    view *v = luaL_checkudata(L, idx, LR_LUA_LOGITS);
    if (!v->l || (v->owner && (!*v->owner || *v->stamp != v->made)))
        luaL_error(L,
                   "stale view: these logits are gone since the next step began; take what you need before you wait, "
                   "or use logits:copy()");
    return v->l;
}

/* ---- access ---- */

static int32_t check_id(lua_State *L, int idx, const lr_logits *l)
{
    lua_Integer id = luaL_checkinteger(L, idx);
    luaL_argcheck(L, id >= 0 && id < l->n_vocab, idx, "no id of this vocabulary");
    return (int32_t)id;
}

static float *slot(lr_logits *l, int32_t id)
{
    if (l->n_cand < 0) return &l->x[id];
    for (int i = 0; i < l->n_cand; i++)
        if (l->cand_id[i] == id) return &l->cand[i];
    return NULL;
}

static float value(lr_logits *l, int32_t id)
{
    const float *p = slot(l, id);
    return p ? *p : -INFINITY;
}

/* Candidates stay sorted: best first, ties by lower id. After a change of a few, insertion is quick. */
static void resort(lr_logits *l)
{
    for (int i = 1; i < l->n_cand; i++) {
        float x = l->cand[i];
        int32_t id = l->cand_id[i];
        int j = i;
        for (; j > 0 && (l->cand[j - 1] < x || (l->cand[j - 1] == x && l->cand_id[j - 1] > id)); j--) {
            l->cand[j] = l->cand[j - 1];
            l->cand_id[j] = l->cand_id[j - 1];
        }
        l->cand[j] = x;
        l->cand_id[j] = id;
    }
}

static float row_max(const lr_logits *l)
{
    return l->n_cand < 0 ? lr_row_max(l->x, l->n_vocab) : l->n_cand > 0 ? l->cand[0] : -INFINITY;
}

static int count(const lr_logits *l) { return l->n_cand < 0 ? l->n_vocab : l->n_cand; }
static const float *values(const lr_logits *l) { return l->n_cand < 0 ? l->x : l->cand; }

static double logsumexp(const lr_logits *l)
{
    float max = row_max(l);
    const float *x = values(l);
    double sum = 0;
    if (!(max > -INFINITY)) return -INFINITY;
    if (l->n_cand < 0) return (double)lr_row_logsumexp(l->x, l->n_vocab);
    for (int i = 0; i < l->n_cand; i++) sum += exp((double)x[i] - (double)max);
    return (double)max + log(sum);
}

/* ---- reading ---- */

/* l:get(id) -> logit; l:get(ids) -> list of them */
static int logits_get(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    if (!lua_istable(L, 2)) {
        lua_pushnumber(L, (lua_Number)value(l, check_id(L, 2, l)));
        return 1;
    }
    size_t n;
    const int32_t *ids = lr_lua_check_ids(L, 2, l->n_vocab, &n);
    lua_createtable(L, (int)n, 0);
    for (size_t i = 0; i < n; i++) {
        lua_pushnumber(L, (lua_Number)value(l, ids[i]));
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* l:argmax() -> id, logit; the lowest id of equals; nil if nothing is finite */
static int logits_argmax(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    int id = l->n_cand < 0 ? lr_row_argmax(l->x, l->n_vocab) : l->n_cand > 0 ? l->cand_id[0] : -1;
    if (id < 0 || !(value(l, id) > -INFINITY)) return 0;
    lua_pushinteger(L, id);
    lua_pushnumber(L, (lua_Number)value(l, id));
    return 2;
}

typedef struct entry {
    float x;
    int32_t id;
} entry;

static int by_logit(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->x != y->x) return x->x > y->x ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The k best of a dense row by sorting all of it; the memory is a userdata left on the stack. */
static void sort_row(lua_State *L, const lr_logits *l, int k, int32_t *ids, float *vals)
{
    entry *e = lua_newuserdatauv(L, (size_t)l->n_vocab * sizeof *e, 0);
    for (int i = 0; i < l->n_vocab; i++) e[i] = (entry){isnan(l->x[i]) ? -INFINITY : l->x[i], i};
    qsort(e, (size_t)l->n_vocab, sizeof *e, by_logit);
    for (int i = 0; i < k; i++) {
        ids[i] = e[i].id;
        vals[i] = e[i].x;
    }
}

/* l:topk(k) -> ids, logits: best first, without those that can't be drawn */
static int logits_topk(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    lua_Integer k = luaL_checkinteger(L, 2);
    luaL_argcheck(L, k >= 1, 2, "at least 1 expected");
    if (k > count(l)) k = count(l);
    int32_t *ids = lua_newuserdatauv(L, ((size_t)k + 1) * (sizeof *ids + sizeof(float)), 0);
    float *vals = (float *)(void *)(ids + k);
    int n = (int)k;
    if (l->n_cand < 0) {
        if (n <= LR_ROW_TOPK)
            n = lr_row_topk(l->x, l->n_vocab, n, ids, vals);
        else
            sort_row(L, l, n, ids, vals);
    } else {
        memcpy(ids, l->cand_id, (size_t)n * sizeof *ids);
        memcpy(vals, l->cand, (size_t)n * sizeof *vals);
    }
    while (n > 0 && !(vals[n - 1] > -INFINITY)) n--;
    lr_lua_push_ids(L, ids, (size_t)n);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushnumber(L, (lua_Number)vals[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 2;
}

/* l:logsumexp() */
static int logits_logsumexp(lua_State *L)
{
    lua_pushnumber(L, logsumexp(lr_lua_check_logits(L, 1)));
    return 1;
}

static int push_softmax(lua_State *L, bool log_domain)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    double lse = logsumexp(l);
    if (!lua_istable(L, 2)) {
        double v = (double)value(l, check_id(L, 2, l)) - lse;
        lua_pushnumber(L, log_domain ? v : exp(v));
        return 1;
    }
    size_t n;
    const int32_t *ids = lr_lua_check_ids(L, 2, l->n_vocab, &n);
    lua_createtable(L, (int)n, 0);
    for (size_t i = 0; i < n; i++) {
        double v = (double)value(l, ids[i]) - lse;
        lua_pushnumber(L, log_domain ? v : exp(v));
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* l:softmax(id | ids) -> probability, or list of them */
static int logits_softmax(lua_State *L) { return push_softmax(L, false); }
/* l:logprob(id | ids) */
static int logits_logprob(lua_State *L) { return push_softmax(L, true); }

/* l:entropy() -> of the distribution, in nats */
static int logits_entropy(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    double lse = logsumexp(l), h = 0;
    const float *x = values(l);
    for (int i = 0, n = count(l); i < n; i++) {
        if (!(x[i] > -INFINITY)) continue;
        double lp = (double)x[i] - lse;
        h -= exp(lp) * lp;
    }
    lua_pushnumber(L, h);
    return 1;
}

/* l:sample(u) -> id drawn from the distribution with a number u in [0, 1) */
static int logits_sample(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    lua_Number u = luaL_checknumber(L, 2);
    luaL_argcheck(L, u >= 0 && u < 1, 2, "number in [0, 1) expected");
    double max = (double)row_max(l), sum = 0, at = 0;
    const float *x = values(l);
    int n = count(l), last = -1;
    if (!(max > -INFINITY)) return luaL_error(L, "no token is left to draw");
    for (int i = 0; i < n; i++) sum += exp((double)x[i] - max);
    for (int i = 0; i < n; i++) {
        if (!(x[i] > -INFINITY)) continue;
        last = i;
        at += exp((double)x[i] - max);
        if (at > u * sum) break;
    }
    lua_pushinteger(L, l->n_cand < 0 ? last : l->cand_id[last]);
    return 1;
}

/* #l -> tokens that it has logits for: the vocabulary, or the candidates that are left */
static int logits_len(lua_State *L)
{
    lua_pushinteger(L, count(lr_lua_check_logits(L, 1)));
    return 1;
}

/* l:vocab_size() */
static int logits_vocab_size(lua_State *L)
{
    lua_pushinteger(L, lr_lua_check_logits(L, 1)->n_vocab);
    return 1;
}

/* l:candidates() -> ids of a narrowed row, best first; nil if it is dense */
static int logits_candidates(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    if (l->n_cand < 0) return 0;
    lr_lua_push_ids(L, l->cand_id, (size_t)l->n_cand);
    return 1;
}

/* l:copy() -> logits of its own memory */
static int logits_copy(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    view *v = new_view(L);
    float *x = lua_newuserdatauv(L, (size_t)l->n_vocab * sizeof *x, 0);
    lua_setiuservalue(L, -2, 1);
    if (l->n_cand < 0) {
        memcpy(x, l->x, (size_t)l->n_vocab * sizeof *x);
    } else {
        for (int i = 0; i < l->n_vocab; i++) x[i] = -INFINITY;
        for (int i = 0; i < l->n_cand; i++) x[l->cand_id[i]] = l->cand[i];
    }
    v->own = (lr_logits){.x = x, .n_vocab = l->n_vocab, .n_cand = -1};
    v->l = &v->own;
    return 1;
}

/* ---- changing ---- */

static float check_weight(lua_State *L, int idx)
{
    lua_Number x = luaL_checknumber(L, idx);
    luaL_argcheck(L, !isnan(x), idx, "not a number");
    return (float)x;
}

static int add_other(lua_State *L, lr_logits *l)
{
    const lr_logits *o = lr_lua_check_logits(L, 2);
    float w = lua_isnoneornil(L, 3) ? 1.0f : check_weight(L, 3);
    if (o->n_vocab != l->n_vocab)
        return luaL_error(L, "logits of two vocabularies (%d and %d tokens)", l->n_vocab, o->n_vocab);
    if (l->n_cand >= 0 || o->n_cand >= 0) return luaL_error(L, "both must be dense: add before a narrowing stage");
    for (int i = 0; i < l->n_vocab; i++) l->x[i] += w * o->x[i];
    return 0;
}

/* l:add(id | ids, x): adds x to these; l:add{ [id] = x, ... }; l:add(logits [, weight]): all of another row */
static int logits_add(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    if (luaL_testudata(L, 2, LR_LUA_LOGITS)) {
        add_other(L, l);
    } else if (lua_isinteger(L, 2)) {
        float *p = slot(l, check_id(L, 2, l)), x = check_weight(L, 3);
        if (p) *p += x;
    } else if (lua_isnoneornil(L, 3)) {
        luaL_checktype(L, 2, LUA_TTABLE);
        for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) {
            lua_pushvalue(L, -2);
            float *p = slot(l, check_id(L, -1, l)), x = check_weight(L, -2);
            lua_pop(L, 1);
            if (p) *p += x;
        }
    } else {
        size_t n;
        float x = check_weight(L, 3);
        const int32_t *ids = lr_lua_check_ids(L, 2, l->n_vocab, &n);
        for (size_t i = 0; i < n; i++) {
            float *p = slot(l, ids[i]);
            if (p) *p += x;
        }
    }
    if (l->n_cand >= 0) resort(l);
    lua_settop(L, 1);
    return 1;
}

/* l:scale(f): multiplies all; l:scale(id | ids, f): these */
static int logits_scale(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    if (lua_isnoneornil(L, 3)) {
        float f = check_weight(L, 2), *x = l->n_cand < 0 ? l->x : l->cand;
        for (int i = 0, n = count(l); i < n; i++)
            if (x[i] > -INFINITY) x[i] *= f;
    } else if (lua_isinteger(L, 2)) {
        float *p = slot(l, check_id(L, 2, l)), f = check_weight(L, 3);
        if (p && *p > -INFINITY) *p *= f;
    } else {
        size_t n;
        float f = check_weight(L, 3);
        const int32_t *ids = lr_lua_check_ids(L, 2, l->n_vocab, &n);
        for (size_t i = 0; i < n; i++) {
            float *p = slot(l, ids[i]);
            if (p && *p > -INFINITY) *p *= f;
        }
    }
    if (l->n_cand >= 0) resort(l);
    lua_settop(L, 1);
    return 1;
}

/* An id, which goes to *one, or a list of them. */
static const int32_t *check_one_or_ids(lua_State *L, int idx, const lr_logits *l, int32_t *one, size_t *n)
{
    if (lua_istable(L, idx)) return lr_lua_check_ids(L, idx, l->n_vocab, n);
    *one = check_id(L, idx, l);
    *n = 1;
    return one;
}

/* l:mask(id | ids): these can't be drawn */
static int logits_mask(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    size_t n;
    int32_t one;
    const int32_t *ids = check_one_or_ids(L, 2, l, &one, &n);
    for (size_t i = 0; i < n; i++) {
        float *p = slot(l, ids[i]);
        if (p) *p = -INFINITY;
    }
    if (l->n_cand >= 0) resort(l);
    lua_settop(L, 1);
    return 1;
}

/* l:keep(id | ids): only these can be drawn */
static int logits_keep(lua_State *L)
{
    lr_logits *l = lr_lua_check_logits(L, 1);
    size_t n;
    int32_t one;
    const int32_t *ids = check_one_or_ids(L, 2, l, &one, &n);
    float *kept = lua_newuserdatauv(L, (n + 1) * sizeof *kept, 0), *x = l->n_cand < 0 ? l->x : l->cand;
    for (size_t i = 0; i < n; i++) kept[i] = value(l, ids[i]);
    for (int i = 0, m = count(l); i < m; i++) x[i] = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        float *p = slot(l, ids[i]);
        if (p) *p = kept[i];
    }
    if (l->n_cand >= 0) resort(l);
    lua_settop(L, 1);
    return 1;
}

/* logits_new(list of numbers) -> logits of their own memory, for tests and for combining rows */
static int core_logits_new(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_Integer n = luaL_len(L, 1);
    luaL_argcheck(L, n >= 1 && n <= 1 << 24, 1, "a list of 1 to 2^24 numbers expected");
    view *v = new_view(L);
    float *x = lua_newuserdatauv(L, (size_t)n * sizeof *x, 0);
    lua_setiuservalue(L, -2, 1);
    for (lua_Integer i = 0; i < n; i++) {
        lua_rawgeti(L, 1, i + 1);
        x[i] = (float)luaL_checknumber(L, -1);
        lua_pop(L, 1);
    }
    v->own = (lr_logits){.x = x, .n_vocab = (int)n, .n_cand = -1};
    v->l = &v->own;
    return 1;
}

void lr_lua_open_logits(lua_State *L)
{
    static const luaL_Reg methods[] = {{"get", logits_get},
                                       {"argmax", logits_argmax},
                                       {"topk", logits_topk},
                                       {"logsumexp", logits_logsumexp},
                                       {"softmax", logits_softmax},
                                       {"logprob", logits_logprob},
                                       {"entropy", logits_entropy},
                                       {"sample", logits_sample},
                                       {"vocab_size", logits_vocab_size},
                                       {"candidates", logits_candidates},
                                       {"copy", logits_copy},
                                       {"add", logits_add},
                                       {"scale", logits_scale},
                                       {"mask", logits_mask},
                                       {"keep", logits_keep},
                                       {NULL, NULL}};
    lr_lua_class(L, LR_LUA_LOGITS, methods, NULL);
    luaL_getmetatable(L, LR_LUA_LOGITS);
    lua_pushcfunction(L, logits_len);
    lua_setfield(L, -2, "__len");
    lua_pop(L, 1);
    lua_pushcfunction(L, core_logits_new);
    lua_setfield(L, -2, "logits_new");
}
