/* fuzz_template.c - libFuzzer target: any bytes as a chat template; see template.lua.
 *
 *   scripts/fuzz template
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/template.lua", NULL, data, size);
}
