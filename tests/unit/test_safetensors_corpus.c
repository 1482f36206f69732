/* test_safetensors_corpus.c - every file of tests/fuzz/corpus/safetensors through what the fuzz target does with it:
 * it is read to its last byte or refused, cleanly. */
#include "../fuzz/fuzz_safetensors.c"
#include "corpus.h"

static void one(const char *name, const char *path, const uint8_t *bytes, size_t n)
{
    LLVMFuzzerTestOneInput(bytes, n);
}

static void test_corpus(void **state) { corpus_replay("safetensors", 20, one); }

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_corpus)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
