/* fuzz_gbnf.c - libFuzzer target: any bytes as a GBNF grammar; see grammar_walk.lua.
 *
 *   scripts/fuzz gbnf
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/grammar_walk.lua", "grammar", data, size);
}
