/* lua_look.c - binds the picture of an engine that the server's page shows. */
#include "engine/look.h"
#include "lua/lua_engine_int.h"

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

static void push_block(lua_State *L, int block, const lr_kv_view *v)
{
    lua_createtable(L, 0, 5);
    set_int(L, "block", block);
    set_int(L, "refs", v->refs);
    if (!v->indexed) return;
    set_int(L, "depth", v->depth);
    set_int(L, "parent", v->parent);
    set_int(L, "hits", (lua_Integer)v->hits);
}

/* Pushes the list of the blocks that are not free, at most max of them. */
static void push_blocks(lua_State *L, const lr_engine *e, lua_Integer max)
{
    lr_kv_view v;
    lua_Integer n = 0;
    lua_newtable(L);
    for (int b = 0; n < max && lr_engine_look_block(e, b, &v); b++) {
        if (v.refs == 0 && !v.indexed) continue;
        push_block(L, b, &v);
        lua_rawseti(L, -2, ++n);
    }
}

typedef struct seq_list {
    lua_State *L;
    lua_Integer n, max;
} seq_list;

static bool push_seq(void *user, const lr_look_seq *s)
{
    seq_list *list = user;
    lua_State *L = list->L;
    if (list->n >= list->max) return false;
    lua_createtable(L, 0, 10);
    set_int(L, "id", (lua_Integer)s->id);
    set_int(L, "len", (lua_Integer)s->len);
    set_int(L, "computed", (lua_Integer)s->computed);
    set_str(L, "state", "idle");
    if (s->request) {
        const lr_req_info *r = lr_request_info(s->request);
        set_str(L, "state", lr_req_state_name(r->state));
        set_int(L, "request", (lua_Integer)r->id);
        set_int(L, "prompt", r->n_prompt);
        set_int(L, "cached", r->n_cached);
        set_int(L, "generated", r->n_generated);
        set_int(L, "pending", r->n_pending);
        set_int(L, "preempted", r->n_preempted);
        set_int(L, "priority", r->priority);
        set_str(L, "tenant", r->tenant);
    }
    lua_createtable(L, s->n_blocks, 0);
    for (int i = 0, n = 0; i < s->n_blocks && i < 4096; i++) {
        if (s->blocks[i] < 0) continue;
        lua_pushinteger(L, s->blocks[i]);
        lua_rawseti(L, -2, ++n);
    }
    lua_setfield(L, -2, "blocks");
    lua_rawseti(L, -2, ++list->n);
    return true;
}

/* look(engine, { blocks = 4096, sequences = 256 }) -> { blocks = { { block, refs, depth, parent, hits }, ... } (those
 * that are not free), sequences = { { id, state, len, computed, blocks = ids, request ... }, ... } } */
static int core_look(lua_State *L)
{
    lr_engine_ud *u = lr_lua_check_engine(L, 1);
    seq_list list = {L, 0, lr_lua_opt_int(L, 2, "sequences", 256)};
    lua_Integer blocks = lr_lua_opt_int(L, 2, "blocks", 4096);
    luaL_checkstack(L, 12, NULL);
    lua_createtable(L, 0, 2);
    push_blocks(L, u->e, blocks);
    lua_setfield(L, -2, "blocks");
    lua_newtable(L);
    lr_engine_look_seqs(u->e, push_seq, &list);
    lua_setfield(L, -2, "sequences");
    return 1;
}

void lr_lua_open_look(lua_State *L)
{
    lua_pushcfunction(L, core_look);
    lua_setfield(L, -2, "look");
}
