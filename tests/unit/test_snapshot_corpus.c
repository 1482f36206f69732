/* test_snapshot_corpus.c - every file of tests/fuzz/corpus/snapshot is restored or refused, cleanly. */
#include "../fuzz/snapshot.h"
#include <dirent.h>

#define FOLDER "tests/fuzz/corpus/snapshot"

static void test_corpus(void **state)
{
    DIR *d = opendir(FOLDER);
    if (!d) fail_msg(FOLDER " is missing (tests run from the repository root)");
    int n = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        char path_of[512];
        uint8_t bytes[16384];
        snprintf(path_of, sizeof path_of, FOLDER "/%s", e->d_name);
        FILE *f = fopen(path_of, "rb");
        assert_non_null(f);
        size_t len = fread(bytes, 1, sizeof bytes, f);
        fclose(f);
        snapshot_try(bytes, len);
        n++;
    }
    closedir(d);
    assert_true(n >= 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_corpus)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
