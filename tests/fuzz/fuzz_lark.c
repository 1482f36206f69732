/* fuzz_lark.c - libFuzzer target: any bytes as a Lark grammar; see grammar_fuzz.h.
 *
 *   cmake --preset fuzz && cmake --build --preset fuzz --target fuzz_lark
 *   build-fuzz/fuzz_lark -max_len=400 -timeout=20 -max_total_time=300 tests/fuzz/corpus/lark
 */
#include "grammar_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return fuzz_grammar("lark", data, size); }
