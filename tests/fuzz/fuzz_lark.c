/* fuzz_lark.c - libFuzzer target: any bytes as a Lark grammar; see grammar_walk.lua.
 *
 *   scripts/fuzz lark
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/grammar_walk.lua", "lark", data, size);
}
