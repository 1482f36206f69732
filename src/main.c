/* main.c - the llmrun program: its arguments go to the embedded Lua command line (lua/llmrun/cli/main.lua). */
#include "lua/lua_state.h"

int main(int argc, char **argv) { return lr_lua_main(argc, argv); }
