/* test_gguf_corpus.c - every file of tests/fuzz/corpus/gguf through the reader, mapped and copied.
 *
 * A name that starts with "ok-" must open, "bad-" must be refused; any other may do either, but cleanly.
 */
#include "gguf_build.h"
#include "corpus.h"

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

static void one(const char *name, const char *path, const uint8_t *bytes, size_t n)
{
    int rc = replay(path, lr_gguf_open);
    assert_int_equal(replay(path, lr_gguf_open_copy), rc);
    if (strncmp(name, "ok-", 3) == 0 && rc != 0) fail_msg("%s is refused", name);
    if (strncmp(name, "bad-", 4) == 0 && rc == 0) fail_msg("%s opens", name);
}

static void test_corpus(void **state) { corpus_replay("gguf", 50, one); }

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_corpus)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
