/* lua_model.c - the model userdata: what a loaded model is, before an engine takes it over. */
#include "lua/lua_int.h"
#include "model/model.h"

static int model_close(lua_State *L)
{
    lr_lua_model *m = luaL_checkudata(L, 1, LR_LUA_MODEL);
    lr_model_free(m->model);
    m->model = NULL;
    return 0;
}

lr_lua_model *lr_lua_new_model(lua_State *L)
{
    lr_lua_model *m = lua_newuserdatauv(L, sizeof *m, 1);
    m->model = NULL;
    luaL_setmetatable(L, LR_LUA_MODEL);
    return m;
}

struct lr_model *lr_lua_check_model(lua_State *L, int idx)
{
    return ((lr_lua_model *)lr_lua_check_open(L, idx, LR_LUA_MODEL, "model"))->model;
}

void lr_lua_push_model_info(lua_State *L, const struct lr_model *m)
{
    lua_createtable(L, 0, 8);
    lua_pushstring(L, m->name);
    lua_setfield(L, -2, "name");
    lua_pushinteger(L, m->n_vocab);
    lua_setfield(L, -2, "n_vocab");
    lua_pushinteger(L, m->n_embd);
    lua_setfield(L, -2, "n_embd");
    lua_pushinteger(L, m->n_ctx);
    lua_setfield(L, -2, "n_ctx");
    lua_pushinteger(L, m->n_kv_layers);
    lua_setfield(L, -2, "n_kv_layers");
    lua_pushinteger(L, (lua_Integer)m->fingerprint);
    lua_setfield(L, -2, "fingerprint");
    lua_createtable(L, m->n_groups, 0);
    for (int i = 0; i < m->n_groups; i++) {
        lua_pushinteger(L, m->window[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "windows");
    lua_createtable(L, m->n_kv_layers, 0);
    for (int i = 0; i < m->n_kv_layers; i++) {
        lua_createtable(L, 0, 3);
        lua_pushinteger(L, m->kv_layers[i].n_kv_heads);
        lua_setfield(L, -2, "kv_heads");
        lua_pushinteger(L, m->kv_layers[i].head_dim);
        lua_setfield(L, -2, "head_dim");
        lua_pushinteger(L, m->kv_layers[i].group);
        lua_setfield(L, -2, "group");
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "kv_layers");
}

/* m:info() -> { name, n_vocab, n_embd, n_ctx, n_kv_layers, fingerprint, windows = {...}, kv_layers = {...} } */
static int model_info(lua_State *L)
{
    lr_lua_push_model_info(L, lr_lua_check_model(L, 1));
    return 1;
}

static int model_vocab(lua_State *L)
{
    lr_lua_push_vocab(L, lr_lua_check_model(L, 1)->vocab);
    return 1;
}

void lr_lua_open_model(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"info", model_info}, {"vocab", model_vocab}, {"close", model_close}, {NULL, NULL}};
    lr_lua_class(L, LR_LUA_MODEL, methods, model_close);
}
