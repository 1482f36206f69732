/* lua_grammar_int.h - what the bindings of grammars and matchers share. */
#ifndef LR_LUA_LUA_GRAMMAR_INT_H
#define LR_LUA_LUA_GRAMMAR_INT_H
#include "engine/engine.h"
#include "grammar/grammar.h"
#include "lua/lua_int.h"

#define LR_LUA_GRAMMAR "llmrun.grammar"

#define LR_LUA_MATCHER "llmrun.matcher"

lr_grammar *lr_lua_check_grammar(lua_State *L, int idx);
lr_matcher *lr_lua_check_matcher(lua_State *L, int idx);
/* As lr_lua_call_limited, for functions that say what may come next: one result; a yield is told as what it is. */
int lr_lua_ask(lua_State *L, int n_args, lr_error *err);
/* Adds the matchers' functions (lua_matcher.c). */
void lr_lua_open_matcher(lua_State *L);

/* Whether there is an object of pieces (lua_pieces.c); the constraint of a request that it stands for. */
bool lr_lua_is_pieces(lua_State *L, int idx);
int lr_lua_pieces_constraint(lua_State *L, int idx, lr_vocab *v, int n_vocab, lr_constraint *out, lr_error *err);
void lr_lua_open_pieces(lua_State *L);

#endif
