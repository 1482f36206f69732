/* fuzz_tokenizer.c - libFuzzer target: any bytes as a tokenizer.json; see tokenizer.lua.
 *
 *   scripts/fuzz tokenizer
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/tokenizer.lua", NULL, data, size);
}
