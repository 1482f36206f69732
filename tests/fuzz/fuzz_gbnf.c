/* fuzz_gbnf.c - libFuzzer target: any bytes as a GBNF grammar; see grammar_fuzz.h.
 *
 *   cmake --preset fuzz && cmake --build --preset fuzz --target fuzz_gbnf
 *   build-fuzz/fuzz_gbnf -max_len=400 -timeout=20 -max_total_time=300 tests/fuzz/corpus/gbnf
 */
#include "grammar_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return fuzz_grammar("grammar", data, size); }
