/* grammar_fuzz.h - any bytes as a text of one front end of grammars; what compiles is walked over a byte vocabulary.
 *
 * The work is done by tests/fuzz/grammar_walk.lua, which tests/spec/grammar_corpus_spec.lua runs on the corpora, too.
 * Run from the repository root.
 */
#ifndef LR_TESTS_GRAMMAR_FUZZ_H
#define LR_TESTS_GRAMMAR_FUZZ_H
#include "lua/lua_state.h"
#include <lauxlib.h>
#include <lua.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int fuzz_grammar(const char *kind, const uint8_t *data, size_t size)
{
    static lua_State *L;
    lr_error err;
    if (!L) {
        if (lr_lua_new_state(&L, &err) || luaL_loadfile(L, "tests/fuzz/grammar_walk.lua") || lua_pcall(L, 0, 1, 0)) {
            fprintf(stderr, "%s\n", L ? lua_tostring(L, -1) : err.text);
            abort();
        }
    }
    lua_pushvalue(L, 1);
    lua_pushstring(L, kind);
    lua_pushlstring(L, (const char *)data, size);
    if (lua_pcall(L, 2, 0, 0)) {
        fprintf(stderr, "%s\n", lua_tostring(L, -1));
        abort();
    }
    return 0;
}

#endif
