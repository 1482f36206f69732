/* lua_state.h - the program's Lua state: libraries, the embedded modules, and the run of one command line.
 *
 * The engine thread owns it. What main() needs; the bindings share lua_int.h.
 */
#ifndef LR_LUA_LUA_STATE_H
#define LR_LUA_LUA_STATE_H

#include "base/error.h"

struct lua_State;

/* A state with all libraries and modules in it; closed with lua_close. */
int lr_lua_new_state(struct lua_State **out, lr_error *err);

/* In a state of somebody else's (a lua_CFunction): makes the modules be found, as in a state of ours, and returns what
 * require "llmrun" gives. Other globals stay as they are. */
int lr_lua_open_module(struct lua_State *L);

/* Runs `llmrun ARGS...`: makes the state, hands the arguments to lua/llmrun/cli/main.lua, closes the state. Returns the
 * exit status: 0, 1 for an error (its traceback is on stderr), 2 for wrong usage, 130 after Ctrl-C. */
int lr_lua_main(int argc, char **argv);

#endif
