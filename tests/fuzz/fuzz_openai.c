/* fuzz_openai.c - libFuzzer target: any bytes as a request to the server; see openai.lua.
 *
 *   scripts/fuzz openai
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/openai.lua", NULL, data, size);
}
