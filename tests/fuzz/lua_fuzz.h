/* lua_fuzz.h - fuzz targets whose work is a Lua function: a file of tests/fuzz returns function(text), which raises
 * where something is wrong. tests/spec/fuzz_corpus_spec.lua replays the corpora through the same files.
 *
 * The parsers are Lua, of which clang's instrumentation sees nothing: a line hook counts pairs of lines, so that the
 * fuzzer keeps inputs that reach new ones. Run from the repository root.
 */
#ifndef LR_TESTS_LUA_FUZZ_H
#define LR_TESTS_LUA_FUZZ_H
#include "lua/lua_state.h"
#include <lauxlib.h>
#include <lua.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

__attribute__((section("__libfuzzer_extra_counters"))) static uint8_t fuzz_lines[1 << 16];

static void fuzz_line_hook(lua_State *L, lua_Debug *ar)
{
    static uintptr_t before;
    lua_getinfo(L, "S", ar);
    uintptr_t here = ((uintptr_t)ar->source >> 4) * 31 + (uintptr_t)ar->currentline * 0x9E3779B1u;
    uint8_t *n = &fuzz_lines[(here ^ before >> 1) % sizeof fuzz_lines];
    if (*n < 255) ++*n;
    before = here;
}

/* A state with loop.run at 1 and the function of the file at 2. */
static lua_State *fuzz_state(const char *file)
{
    lua_State *L = NULL;
    lr_error err;
    if (lr_lua_new_state(&L, &err)) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    lua_settop(L, 0);
    if (luaL_dostring(L, "return require('llmrun.loop').run") || luaL_loadfile(L, file) || lua_pcall(L, 0, 1, 0)) {
        fprintf(stderr, "%s\n", lua_tostring(L, -1));
        abort();
    }
    return L;
}

/* extra: a further argument, or NULL. */
static int fuzz_lua(const char *file, const char *extra, const uint8_t *data, size_t size)
{
    static lua_State *L;
    if (!L) L = fuzz_state(file);
    lua_settop(L, 2);
    lua_sethook(L, fuzz_line_hook, LUA_MASKLINE, 0);
    lua_pushvalue(L, 1);
    lua_pushvalue(L, 2);
    lua_pushlstring(L, (const char *)data, size);
    lua_pushstring(L, extra);
    if (lua_pcall(L, 3, 2, 0) || lua_tostring(L, -2)[0] != 'd') { /* "done" */
        fprintf(stderr, "%s\n", lua_tostring(L, -1));
        abort();
    }
    return 0;
}

#endif
