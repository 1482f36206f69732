/* test_slab.c - blocks side by side, what is freed goes back, blocks of other sizes on their own. */
#define _DEFAULT_SOURCE
#include "base/slab.h"
#include "base/mem.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

enum { KB = 1 << 10, MB = 1 << 20 };

static void blocks_are_neighbours(void **state)
{
    (void)state;
    lr_slab *s = NULL;
    char *a = lr_slab_alloc(&s, 100 * KB + 1), *b = lr_slab_alloc(&s, 3 * MB), *c = lr_slab_alloc(&s, 100);
    assert_true(a && b && c);
    assert_ptr_equal(b, a + 100 * KB + 64);
    assert_int_equal((uintptr_t)a % 64, 0);
    memset(a, 1, 100 * KB + 1);
    memset(b, 2, 3 * MB);
    memset(c, 3, 100);
    assert_int_equal(a[100 * KB], 1);
    assert_int_equal(b[0], 2);
    lr_slab_free(&s, c, 100);
    assert_non_null(s);
    lr_slab_free(&s, a, 100 * KB + 1);
    assert_int_equal(b[0], 2);
    assert_int_equal(b[3 * MB - 1], 2);
    lr_slab_free(&s, NULL, 5);
    lr_slab_free(&s, b, 3 * MB);
    assert_null(s);
}

static void pages_of_freed_blocks_go_back(void **state)
{
    (void)state;
    lr_slab *s = NULL;
    char *a = lr_slab_alloc(&s, 8 * MB), *b = lr_slab_alloc(&s, MB);
    memset(a, 1, 8 * MB);
    memset(b, 2, MB);
    lr_slab_free(&s, a, 8 * MB);
    unsigned char there[2 * MB / 4096];
    char *middle = (char *)(((uintptr_t)a + 3 * MB) & ~(uintptr_t)4095);
    assert_int_equal(mincore(middle, 2 * MB, there), 0);
    for (size_t i = 0; i < sizeof there; i++) assert_int_equal(there[i] & 1, 0);
    assert_int_equal(b[0], 2);
    lr_slab_free(&s, b, MB);
    assert_null(s);
}

static void more_than_a_piece(void **state)
{
    (void)state;
    enum { N = 9 };
    lr_slab *s = NULL;
    char *p[N];
    for (int i = 0; i < N; i++) {
        p[i] = lr_slab_alloc(&s, 20 * MB);
        assert_non_null(p[i]);
        p[i][0] = p[i][20 * MB - 1] = (char)i;
    }
    char *large = lr_slab_alloc(&s, 100 * MB);
    assert_non_null(large);
    large[100 * MB - 1] = 1;
    for (int i = 0; i < N; i++) {
        const int at = i * 4 % N; /* in another order */
        assert_int_equal(p[at][0], at);
        assert_int_equal(p[at][20 * MB - 1], at);
        lr_slab_free(&s, p[at], 20 * MB);
    }
    assert_null(s);
    lr_slab_free(&s, large, 100 * MB);
}

static void no_memory(void **state)
{
    (void)state;
    lr_slab *s = NULL;
    for (int nth = 1; nth <= 2; nth++) { /* the piece's record, the piece */
        lr_mem_fail_at(nth);
        assert_null(lr_slab_alloc(&s, MB));
        assert_int_equal(lr_mem_fail_at(0), 0);
        assert_null(s);
    }
    assert_null(lr_slab_alloc(&s, SIZE_MAX - 100));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_neighbours),
        cmocka_unit_test(pages_of_freed_blocks_go_back),
        cmocka_unit_test(more_than_a_piece),
        cmocka_unit_test(no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
