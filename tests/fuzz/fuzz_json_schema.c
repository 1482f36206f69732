/* fuzz_json_schema.c - libFuzzer target: any bytes as a JSON schema; see grammar_walk.lua.
 *
 *   scripts/fuzz json_schema
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/grammar_walk.lua", "json", data, size);
}
