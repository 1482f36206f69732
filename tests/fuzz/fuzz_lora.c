/* fuzz_lora.c - libFuzzer target: any bytes as a low-rank adapter; see lora.lua.
 *
 *   scripts/fuzz lora
 */
#include "lua_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_lua("tests/fuzz/lora.lua", NULL, data, size);
}
