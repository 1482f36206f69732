/* module.c - llmrun.so: what require "llmrun" of a Lua that is not ours opens. Lua's own functions are left undefined:
 * the program that opens it has them. */
#include "lua/lua_state.h"

__attribute__((visibility("default"))) int luaopen_llmrun(struct lua_State *L);

int luaopen_llmrun(struct lua_State *L) { return lr_lua_open_module(L); }
