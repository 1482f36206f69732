/* fuzz_regex.c - libFuzzer target: any bytes as a regular expression; see grammar_walk.lua.
 *
 *   scripts/fuzz regex
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/grammar_walk.lua", "regex", data, size);
}
