/* test_place.c - folders in which plugins are looked for: those of this program, which is no shared object. */
#include "base/place.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void program_folder_first(void **state)
{
    (void)state;
    char exe[4096], folder[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    assert_true(n > 0);
    exe[n] = 0;
    *strrchr(exe, '/') = 0;
    assert_true(lr_place_folder(0, folder, sizeof folder));
    assert_string_equal(folder, exe);
    assert_true(lr_place_folder(1, folder, sizeof folder));
    assert_int_equal(strncmp(folder, exe, strlen(exe)), 0);
    assert_non_null(strstr(folder, "/../lib"));
    assert_string_equal(strrchr(folder, '/'), "/llmrun");
}

static void ends_and_holds_its_bounds(void **state)
{
    (void)state;
    char folder[16], guard[32];
    int n = 0;
    while (lr_place_folder(n, folder, sizeof folder)) {
        assert_true(memchr(folder, 0, sizeof folder) != NULL);
        n++;
        assert_true(n < 20);
    }
    assert_true(n >= 3);
    assert_false(lr_place_folder(-1, folder, sizeof folder));
    memset(guard, 7, sizeof guard);
    lr_place_folder(1, guard, 8);
    assert_int_equal(guard[8], 7);
    /* this code is in the program, so there is no folder of a shared object's own */
    assert_true(lr_place_folder(n - 1, folder, sizeof folder));
    assert_string_equal(folder, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(program_folder_first),
        cmocka_unit_test(ends_and_holds_its_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
