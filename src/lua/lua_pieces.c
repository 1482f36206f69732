/* lua_pieces.c - binds texts that are made of pieces: a Lua function sees the text so far and gives a matcher for what
 * comes next, or nothing: the text is complete.
 *
 * pieces(fn) is given to a request in place of a matcher. fn(prefix) is called at the beginning and behind every token
 * with which a piece may have ended. A piece that may end and go on stays beside the next one, so several matchers may
 * be on their way at once; no token belongs to two pieces. What the only one leaves no choice about is forced. fn runs
 * inside a step, so it cannot yield; an error in it is the error of its request.
 */
#include "base/mem.h"
#include "engine/constrain.h"
#include "lua/lua_grammar_int.h"
#include <string.h>

#define PIECES   "llmrun.pieces"
#define MAX_WAYS 16 /* matchers at once */
#define MAX_TEXT ((size_t)64 << 20)

/* A request's constraint. */
typedef struct pieces {
    lua_State *L; /* the main state */
    int ref;      /* registry: the function */
    lr_vocab *v;
    int32_t *eog; /* end-of-generation ids */
    int n_eog;
    lr_matcher *way[MAX_WAYS];
    int n_way;
    bool complete; /* the text may end here */
    bool begun, strip, force;
    lr_forced forced; /* what must come, of the only matcher */
    char *text;
    size_t n_text, cap_text;
    size_t words;
    uint32_t *bits; /* (words) */
} pieces;

/* ---- asking ---- */

static int add_way(pieces *p, lua_State *L, lr_error *err)
{
    if (lua_isnil(L, -1)) {
        p->complete = true;
        return 0;
    }
    lr_matcher *const *given = luaL_testudata(L, -1, LR_LUA_MATCHER);
    if (!given || !*given) return lr_fail(err, LR_ESCRIPT, "lua: a matcher or nil expected");
    if (p->n_way == MAX_WAYS) return lr_fail(err, LR_ELIMIT, "lua: over %d pieces may go on at once", MAX_WAYS);
    if (lr_matcher_words(*given) > p->words)
        return lr_fail(err, LR_EINVAL, "lua: the vocabulary of a piece is not the model's");
    lr_matcher *m;
    int rc = lr_matcher_copy(&m, *given, err);
    if (rc) return rc;
    lr_matcher_strip_space(m, p->strip && p->n_text == 0);
    p->way[p->n_way++] = m;
    return 0;
}

/* What comes next at the present text? */
static int ask(pieces *p, lr_error *err)
{
    lua_State *L = lr_lua_step_state();
    if (!L) L = p->L;
    err->code = 0;
    if (!lua_checkstack(L, 8)) return lr_fail(err, LR_ENOMEM, "no room on Lua's stack");
    lua_rawgeti(L, LUA_REGISTRYINDEX, p->ref);
    lua_pushlstring(L, p->n_text ? p->text : "", p->n_text);
    int rc = lr_lua_ask(L, 1, err);
    if (rc) {
        lr_fail_prefix(err, "lua");
        return rc;
    }
    rc = add_way(p, L, err);
    lua_pop(L, 1);
    return rc;
}

/* ---- the constraint ---- */

/* The token that must come; 0: there is a choice. */
static int next_forced(void *user, int32_t *token, lr_error *err)
{
    pieces *p = user;
    lr_forced *f = &p->forced;
    if (!p->begun) {
        int rc = ask(p, err);
        if (rc) return rc;
        p->begun = true;
    }
    if (!p->force || p->complete || p->n_way != 1) return 0;
    int rc = lr_forced_look(f, p->way[0], err);
    if (rc || f->at == f->n) return rc;
    *token = f->queue[f->at];
    return 1;
}

static int mask(void *user, const uint32_t **bits, lr_error *err)
{
    pieces *p = user;
    size_t count = 0;
    int32_t only = -1;
    int forced = next_forced(p, &only, err);
    if (forced < 0) return forced;
    memset(p->bits, 0, p->words * sizeof *p->bits);
    if (forced) {
        p->bits[only / 32] = 1u << (only % 32);
        *bits = p->bits;
        return 0;
    }
    for (int i = 0; i < p->n_way; i++) {
        lr_token_mask *t;
        int rc = lr_matcher_share_mask(p->way[i], 0, &t, err);
        if (rc) return rc;
        for (size_t w = 0; w < lr_matcher_words(p->way[i]); w++) p->bits[w] |= t->bits[w];
        lr_token_mask_unref(t);
    }
    for (int i = 0; i < p->n_eog; i++) { /* where pieces may end the text need not */
        int32_t id = p->eog[i];
        if (p->complete)
            p->bits[id / 32] |= 1u << (id % 32);
        else
            p->bits[id / 32] &= ~(1u << (id % 32));
    }
    for (size_t w = 0; w < p->words; w++) count += (size_t)__builtin_popcount(p->bits[w]);
    if (count == 0) return lr_fail(err, LR_EINVAL, "no token of the vocabulary goes on as the function of lua wants");
    *bits = p->bits;
    return 0;
}

static int add_text(pieces *p, int32_t token, lr_error *err)
{
    size_t n, need;
    const char *s = lr_vocab_piece(p->v, token, &n);
    if (p->strip && p->n_text == 0 && n && s[0] == ' ') {
        s++;
        n--;
    }
    if (!lr_add(p->n_text, n, &need) || need > MAX_TEXT) return lr_fail(err, LR_ELIMIT, "the text is too long");
    if (need > p->cap_text) {
        char *q = lr_realloc(p->text, 2 * need + 64);
        if (!q) return lr_fail(err, LR_ENOMEM, "no memory for the text of a constraint");
        p->text = q;
        p->cap_text = 2 * need + 64;
    }
    if (n) memcpy(p->text + p->n_text, s, n);
    p->n_text = need;
    return 0;
}

static int accept(void *user, int32_t token, lr_error *err)
{
    pieces *p = user;
    int left = 0;
    bool ended = false;
    int rc = add_text(p, token, err);
    for (int i = 0; i < p->n_way; i++) {
        lr_matcher *m = p->way[i];
        int one = rc ? rc : lr_matcher_accept(m, token, err);
        if (one && one != LR_EINVAL) rc = one;
        if (!one && lr_matcher_can_end(m)) ended = true;
        if (one || lr_matcher_done(m))
            lr_matcher_free(m);
        else
            p->way[left++] = m;
    }
    p->n_way = left;
    p->complete = false;
    lr_forced_took(&p->forced, p->v, token);
    if (ended) p->forced.looked = false; /* another piece may come */
    if (!rc && ended) rc = ask(p, err);
    if (rc) return rc;
    if (p->n_way == 0 && !p->complete) return lr_fail(err, LR_EINVAL, "the function of lua does not allow this here");
    return p->n_way == 0;
}

static void start(void *user, bool strip_space, bool force)
{
    pieces *p = user;
    p->strip = strip_space;
    p->force = force;
}

static void destroy(void *user)
{
    pieces *p = user;
    for (int i = 0; i < p->n_way; i++) lr_matcher_free(p->way[i]);
    luaL_unref(p->L, LUA_REGISTRYINDEX, p->ref);
    lr_vocab_unref(p->v);
    lr_free(p->text);
    lr_free(p->bits);
    lr_free(p->eog);
    lr_free(p);
}

int lr_lua_pieces_constraint(lua_State *L, int idx, lr_vocab *v, int n_vocab, lr_constraint *out, lr_error *err)
{
    pieces *p = lr_calloc(1, sizeof *p);
    if (!p) return lr_fail(err, LR_ENOMEM, "no memory for a constraint");
    size_t most = (size_t)n_vocab > lr_vocab_size(v) ? (size_t)n_vocab : lr_vocab_size(v);
    p->words = (most + 31) / 32;
    p->ref = LUA_NOREF;
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    p->L = lua_tothread(L, -1);
    lua_pop(L, 1);
    p->v = lr_vocab_ref(v);
    p->bits = lr_calloc(p->words, sizeof *p->bits);
    for (uint32_t id = 0; id < lr_vocab_size(v); id++) p->n_eog += lr_vocab_is_eog(v, (int32_t)id);
    p->eog = lr_calloc((size_t)p->n_eog + 1, sizeof *p->eog);
    for (uint32_t id = 0, n = 0; p->eog && id < lr_vocab_size(v); id++) {
        if (lr_vocab_is_eog(v, (int32_t)id)) p->eog[n++] = (int32_t)id;
    }
    if (!p->bits || !p->eog) {
        destroy(p);
        return lr_fail(err, LR_ENOMEM, "no memory for a constraint");
    }
    lua_getiuservalue(L, idx, 1);
    p->ref = luaL_ref(L, LUA_REGISTRYINDEX);
    *out = (lr_constraint){
        .user = p, .mask = mask, .accept = accept, .start = start, .forced = next_forced, .free = destroy};
    return 0;
}

bool lr_lua_is_pieces(lua_State *L, int idx) { return luaL_testudata(L, idx, PIECES) != NULL; }

/* pieces(fn) -> what a request takes as its matcher; fn(prefix) -> a matcher, or nil: the text is complete */
static int core_pieces(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_newuserdatauv(L, 1, 1);
    luaL_setmetatable(L, PIECES);
    lua_pushvalue(L, 1);
    lua_setiuservalue(L, -2, 1);
    return 1;
}

void lr_lua_open_pieces(lua_State *L)
{
    lr_lua_class(L, PIECES, NULL, NULL);
    lua_pushcfunction(L, core_pieces);
    lua_setfield(L, -2, "pieces");
}
