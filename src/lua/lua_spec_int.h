/* lua_spec_int.h - speculation, as the bindings of requests, engines and policies use it. */
#ifndef LR_LUA_LUA_SPEC_INT_H
#define LR_LUA_LUA_SPEC_INT_H
#include "engine/speculate.h"
#include "lua/lua_engine_int.h"

/* The parameters in the table at idx: { method =, k =, fixed =, min_match =, max_match =, accept = "same" |
 * "distribution", memory =, fn = }. Raises on misuse. Leaves values on the stack that must stay until the request is
 * made; then, if the result is not NULL, *result = NULL: the function goes with the request. */
void **lr_lua_read_spec(lua_State *L, int idx, lr_spec_params *p);
/* What a drafter returned: the values at idx and idx + 1. Raises on misuse. */
void lr_lua_read_draft(lua_State *L, int idx, lr_spec_choice *c);
/* Sets most, batch, acceptance and method of the table at the stack's top. */
void lr_lua_set_draft(lua_State *L, const lr_spec_choice *c);
/* Pushes a table of them. */
void lr_lua_push_spec_stats(lua_State *L, const lr_spec_stats *s);
/* Methods of engines. */
int lr_lua_engine_set_draft(lua_State *L);
int lr_lua_engine_set_heads(lua_State *L);
int lr_lua_engine_set_eagle(lua_State *L);
int lr_lua_engine_pace(lua_State *L);
int lr_lua_engine_pace_hold(lua_State *L);
int lr_lua_engine_pace_forget(lua_State *L);
int lr_lua_engine_drafting(lua_State *L);

#endif
