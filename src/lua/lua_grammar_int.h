/* lua_grammar_int.h - what the bindings of grammars and matchers share. */
#ifndef LR_LUA_LUA_GRAMMAR_INT_H
#define LR_LUA_LUA_GRAMMAR_INT_H
#include "grammar/grammar.h"
#include "lua/lua_int.h"

#define LR_LUA_GRAMMAR "llmrun.grammar"

#define LR_LUA_MATCHER "llmrun.matcher"

lr_grammar *lr_lua_check_grammar(lua_State *L, int idx);
lr_matcher *lr_lua_check_matcher(lua_State *L, int idx);
/* Adds the matchers' functions (lua_matcher.c). */
void lr_lua_open_matcher(lua_State *L);

#endif
