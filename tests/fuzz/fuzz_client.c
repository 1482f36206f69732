/* fuzz_client.c - libFuzzer target: any bytes as an answer to our HTTP client; see client.lua.
 *
 *   scripts/fuzz client
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/client.lua", NULL, data, size);
}
