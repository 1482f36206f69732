/* fuzz_trace.c - libFuzzer target: any bytes as a trace of requests; see trace.lua.
 *
 *   scripts/fuzz trace
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/trace.lua", NULL, data, size);
}
