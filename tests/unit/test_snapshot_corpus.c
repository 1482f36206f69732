/* test_snapshot_corpus.c - every file of tests/fuzz/corpus/snapshot is restored or refused, cleanly. */
#include "../fuzz/snapshot.h"
#include "corpus.h"

static void one(const char *name, const char *path, const uint8_t *bytes, size_t n) { snapshot_try(bytes, n); }

static void test_corpus(void **state) { corpus_replay("snapshot", 10, one); }

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_corpus)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
