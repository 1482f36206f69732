/* test_gguf_corpus.c - every file of tests/fuzz/corpus/gguf through the reader, mapped and copied.
 *
 * A name that starts with "ok-" must open, "bad-" must be refused; any other may do either, but cleanly.
 */
#include "gguf_build.h"

#define FOLDER "tests/fuzz/corpus/gguf"

static int replay(const char *path, int (*open)(lr_gguf **, const char *, lr_error *))
{
    lr_gguf *g;
    lr_error err;
    int rc = open(&g, path, &err);
    if (rc != 0) {
        assert_true(err.code == rc && err.text[0]);
        return rc;
    }
    touch_all(g);
    lr_gguf_free(g);
    return 0;
}

static void test_corpus(void **state)
{
    DIR *d = opendir(FOLDER);
    if (!d) fail_msg(FOLDER " is missing (tests run from the repository root)");
    int n = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        char path[512];
        snprintf(path, sizeof path, FOLDER "/%s", e->d_name);
        int rc = replay(path, lr_gguf_open);
        assert_int_equal(replay(path, lr_gguf_open_copy), rc);
        if (strncmp(e->d_name, "ok-", 3) == 0 && rc != 0) fail_msg("%s is refused", e->d_name);
        if (strncmp(e->d_name, "bad-", 4) == 0 && rc == 0) fail_msg("%s opens", e->d_name);
        n++;
    }
    closedir(d);
    assert_true(n >= 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_corpus)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
