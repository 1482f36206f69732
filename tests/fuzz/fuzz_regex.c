/* fuzz_regex.c - libFuzzer target: any bytes as a regular expression; see grammar_fuzz.h.
 *
 *   cmake --preset fuzz && cmake --build --preset fuzz --target fuzz_regex
 *   build-fuzz/fuzz_regex -max_len=400 -timeout=20 -max_total_time=300 tests/fuzz/corpus/regex
 */
#include "grammar_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return fuzz_grammar("regex", data, size); }
