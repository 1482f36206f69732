/* fuzz_json_schema.c - libFuzzer target: any bytes as a JSON schema; see grammar_fuzz.h.
 *
 *   cmake --preset fuzz && cmake --build --preset fuzz --target fuzz_json_schema
 *   build-fuzz/fuzz_json_schema -max_len=400 -timeout=20 -max_total_time=300 tests/fuzz/corpus/json_schema
 */
#include "grammar_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return fuzz_grammar("json", data, size); }
