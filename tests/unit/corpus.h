/* corpus.h - each file of a fuzz target's corpus through a function. */
#ifndef LR_TESTS_CORPUS_H
#define LR_TESTS_CORPUS_H
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

/* Calls one(name, path, bytes, n) for every file of tests/fuzz/corpus/TARGET; there must be so many at least. The bytes
 * lie in a block of just their size. */
static void corpus_replay(const char *target, int least,
                          void (*one)(const char *, const char *, const uint8_t *, size_t))
{
    char path[512];
    int n = 0, base = snprintf(path, sizeof path, "tests/fuzz/corpus/%s", target);
    DIR *d = opendir(path);
    if (!d) fail_msg("%s is missing (tests run from the repository root)", path);
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        snprintf(path + base, sizeof path - (size_t)base, "/%s", e->d_name);
        FILE *f = fopen(path, "rb");
        assert_non_null(f);
        assert_int_equal(fseek(f, 0, SEEK_END), 0);
        long len = ftell(f);
        assert_true(len >= 0);
        rewind(f);
        uint8_t *bytes = malloc(len > 0 ? (size_t)len : 1);
        assert_non_null(bytes);
        assert_int_equal(fread(bytes, 1, (size_t)len, f), len);
        fclose(f);
        one(e->d_name, path, bytes, (size_t)len);
        free(bytes);
        n++;
    }
    closedir(d);
    assert_true(n >= least);
}

#endif
