/* test_kv.c - block pool, tables and prefix index: small cases by hand, then random use with the contents of every slot
 * checked against the tokens that belong there, for blocks of 1, 2, 3 and 16 tokens, with and without a window. */
#include "base/mem.h"
#include "kv/kv.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include <cmocka.h>

#define MAX_SLOTS 4096

/* A store whose slots hold token ids. */
typedef struct store {
    int32_t slot[LR_KV_GROUPS][MAX_SLOTS];
    int bs;
    lr_kv *kv;
} store;

static void do_copy(void *user, int g, int dst, int src)
{
    store *s = user;
    memcpy(s->slot[g] + dst * s->bs, s->slot[g] + src * s->bs, (size_t)s->bs * 4);
}

static void do_read(void *user, int g, int b, void *dst)
{
    store *s = user;
    memcpy(dst, s->slot[g] + b * s->bs, (size_t)s->bs * 4);
}

static void do_write(void *user, int g, int b, const void *src)
{
    store *s = user;
    memcpy(s->slot[g] + b * s->bs, src, (size_t)s->bs * 4);
}

static const char *spill; /* folder of the spill file of the pools to come */

static store *make(int bs, int blocks, int window, bool cache, int hash_bits)
{
    store *s = calloc(1, sizeof *s);
    lr_error err;
    lr_kv_config cfg = {.block_size = bs,
                        .n_groups = window ? 2 : 1,
                        .n_blocks = {blocks, blocks},
                        .window = {0, window},
                        .prefix_cache = cache,
                        .hash_bits = hash_bits,
                        .spill = window ? NULL : spill,
                        .spill_bytes = 160,
                        .mover = {s, do_copy, do_read, do_write, {(size_t)bs * 4, (size_t)bs * 4}}};
    s->bs = bs;
    memset(s->slot, 0xff, sizeof s->slot);
    assert_true(blocks * bs <= MAX_SLOTS);
    assert_int_equal(lr_kv_new(&s->kv, &cfg, &err), 0);
    return s;
}

static void drop(store *s)
{
    lr_kv_free(s->kv);
    free(s);
}

static void check(store *s)
{
    lr_error err;
    if (lr_kv_check(s->kv, &err)) fail_msg("%s", err.text);
}

static void init(store *s, lr_kv_table *t, const char *salt, const char *adapter)
{
    lr_kv_space *sp;
    lr_error err;
    assert_int_equal(lr_kv_space_get(s->kv, lr_str_of(salt), lr_str_of(adapter), &sp, &err), 0);
    lr_kv_table_init(s->kv, t, sp);
    lr_kv_space_unref(s->kv, sp);
}

static bool grow(store *s, lr_kv_table *t, int n)
{
    int g, missing;
    lr_error err;
    assert_int_equal(lr_kv_table_reserve(s->kv, t, t->computed + n, &err), 0);
    return lr_kv_table_grow(s->kv, t, n, &g, &missing);
}

/* "Computes" n tokens: writes their ids through the table. */
static bool run(store *s, lr_kv_table *t, const int32_t *tokens, int n)
{
    if (!grow(s, t, n)) return false;
    for (int g = 0; g < LR_KV_GROUPS && t->block[g]; g++) {
        for (int p = t->computed; p < t->computed + n; p++) {
            s->slot[g][t->block[g][p / s->bs] * s->bs + p % s->bs] = tokens[p];
        }
    }
    lr_kv_table_advance(s->kv, t, tokens, n);
    return true;
}

/* Every slot that the table holds has the token that belongs there. */
static void verify(store *s, const lr_kv_table *t, const int32_t *tokens)
{
    for (int g = 0; g < LR_KV_GROUPS && t->block[g]; g++) {
        for (int p = t->first[g] * s->bs; p < t->computed; p++) {
            int32_t have = s->slot[g][t->block[g][p / s->bs] * s->bs + p % s->bs];
            if (have != tokens[p]) fail_msg("group %d position %d holds %d, not %d", g, p, have, tokens[p]);
        }
    }
}

static int match(store *s, lr_kv_table *t, const int32_t *tokens, int limit)
{
    lr_error err;
    assert_int_equal(lr_kv_table_reserve(s->kv, t, limit, &err), 0);
    return lr_kv_table_match(s->kv, t, tokens, limit);
}

static void fill(int32_t *tokens, int n, int from)
{
    for (int i = 0; i < n; i++) tokens[i] = from + i;
}

static void test_config(void **state)
{
    lr_kv *kv = NULL;
    lr_error err;
    lr_kv_config bad[] = {
        {.block_size = 0, .n_groups = 1, .n_blocks = {1}},
        {.block_size = 257, .n_groups = 1, .n_blocks = {1}},
        {.block_size = 16, .n_groups = 0, .n_blocks = {1}},
        {.block_size = 16, .n_groups = 3, .n_blocks = {1, 1}},
        {.block_size = 16, .n_groups = 2, .n_blocks = {1, 0}},
        {.block_size = 16, .n_groups = 1, .n_blocks = {2147483647}},
        {.block_size = 16, .n_groups = 1, .n_blocks = {1}, .window = {-1}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_int_equal(lr_kv_new(&kv, &bad[i], &err), LR_EINVAL);
    assert_null(kv);
    lr_kv_config ok = {.block_size = 4, .n_groups = 1, .n_blocks = {8}, .prefix_cache = true};
    int n = 0;
    for (; n < 20; n++) {
        lr_mem_fail_at(n + 1);
        int rc = lr_kv_new(&kv, &ok, &err);
        lr_mem_fail_at(0);
        if (rc == 0) break;
        assert_int_equal(rc, LR_ENOMEM);
    }
    assert_true(n > 3 && n < 20);
    lr_kv_free(kv);
}

static void test_share_and_copy(void **state)
{
    store *s = make(4, 8, 0, false, 0);
    lr_kv_table a, b;
    int32_t ta[16], tb[16];
    lr_error err;
    init(s, &a, "", "");
    init(s, &b, "", "");
    fill(ta, 16, 100);
    assert_true(run(s, &a, ta, 6));
    assert_int_equal(lr_kv_table_fork(s->kv, &b, &a, &err), 0);
    memcpy(tb, ta, sizeof ta);
    lr_kv_stats st;
    lr_kv_get_stats(s->kv, 0, &st);
    assert_int_equal(st.used, 2); /* a fork takes nothing */
    tb[6] = 7;
    assert_true(run(s, &b, tb, 1)); /* ... and copies the last partial block when it writes */
    lr_kv_get_stats(s->kv, 0, &st);
    assert_int_equal(st.used, 3);
    assert_int_equal(st.copied, 1);
    assert_true(run(s, &a, ta, 6)); /* a holds its block alone now: no copy */
    lr_kv_get_stats(s->kv, 0, &st);
    assert_int_equal(st.copied, 1);
    verify(s, &a, ta);
    verify(s, &b, tb);
    check(s);
    lr_kv_table_truncate(s->kv, &a, 5);
    assert_int_equal(lr_kv_table_held(&a, 0), 2);
    check(s);
    lr_kv_table_deinit(s->kv, &a);
    verify(s, &b, tb);
    lr_kv_table_deinit(s->kv, &b);
    assert_int_equal(lr_kv_available(s->kv, 0), 8);
    check(s);
    drop(s);
}

static void test_grow_is_all_or_nothing(void **state)
{
    store *s = make(4, 4, 0, true, 0);
    lr_kv_table a, b;
    int32_t t[64];
    int g = -1, missing = -1;
    lr_error err;
    init(s, &a, "", "");
    init(s, &b, "", "");
    fill(t, 64, 0);
    assert_true(run(s, &a, t, 9)); /* 3 blocks */
    assert_int_equal(lr_kv_table_reserve(s->kv, &b, 64, &err), 0);
    assert_false(lr_kv_table_grow(s->kv, &b, 13, &g, &missing));
    assert_int_equal(g, 0);
    assert_int_equal(missing, 3);
    assert_int_equal(lr_kv_table_held(&b, 0), 0);
    check(s);
    assert_true(lr_kv_table_grow(s->kv, &b, 4, &g, &missing));
    lr_kv_table_deinit(s->kv, &a);
    lr_kv_table_deinit(s->kv, &b);
    drop(s);
}

static void test_prefix(void **state)
{
    store *s = make(4, 16, 0, true, 0);
    lr_kv_table a, b;
    int32_t t[32], u[32];
    fill(t, 32, 0);
    init(s, &a, "", "");
    assert_true(run(s, &a, t, 14));
    lr_kv_table_deinit(s->kv, &a);
    lr_kv_stats st;
    lr_kv_get_stats(s->kv, 0, &st);
    assert_int_equal(st.cached, 3);
    assert_int_equal(st.used, 0);
    init(s, &a, "", "");
    assert_int_equal(match(s, &a, t, 13), 12); /* whole blocks */
    verify(s, &a, t);
    init(s, &b, "", "");
    memcpy(u, t, sizeof t);
    u[10] = 99;
    assert_int_equal(match(s, &b, u, 13), 10); /* two blocks and the part of a third, copied */
    assert_int_not_equal(a.block[0][2], b.block[0][2]);
    assert_int_equal(a.block[0][1], b.block[0][1]);
    verify(s, &b, u);
    assert_true(run(s, &b, u, 4));
    verify(s, &a, t);
    verify(s, &b, u);
    check(s);
    lr_kv_table_deinit(s->kv, &b);
    init(s, &b, "", "");
    assert_int_equal(match(s, &b, t, 11), 11); /* never past the limit */
    lr_kv_table_drop(s->kv, &b);
    assert_int_equal(match(s, &b, t, 3), 3);
    lr_kv_table_drop(s->kv, &b);
    u[0] = 77; /* the same tokens behind another first block are another prefix */
    assert_int_equal(match(s, &b, u, 13), 0);
    lr_kv_table_deinit(s->kv, &a);
    lr_kv_table_deinit(s->kv, &b);
    int held;
    lr_kv_space *sp;
    lr_error err;
    lr_kv_space_get(s->kv, LR_STR(""), LR_STR(""), &sp, &err);
    assert_int_equal(lr_kv_space_peek(s->kv, sp, t, 32, &held), 12);
    assert_int_equal(held, 0);
    lr_kv_drop_cached(s->kv);
    assert_int_equal(lr_kv_space_peek(s->kv, sp, t, 32, &held), 0);
    lr_kv_space_unref(s->kv, sp);
    lr_kv_get_stats(s->kv, 0, &st);
    assert_int_equal(st.free, 16);
    check(s);
    drop(s);
}

static void test_salt_and_adapter_are_apart(void **state)
{
    store *s = make(2, 32, 0, true, 0);
    const char *names[][2] = {{"", ""}, {"x", ""}, {"", "x"}, {"xy", ""}, {"x", "y"}, {"", "xy"}};
    lr_kv_table t[6];
    int32_t tokens[8];
    fill(tokens, 8, 0);
    for (int i = 0; i < 6; i++) {
        init(s, &t[i], names[i][0], names[i][1]);
        assert_int_equal(match(s, &t[i], tokens, 8), 0);
        assert_true(run(s, &t[i], tokens, 8));
    }
    for (int i = 0; i < 6; i++) {
        lr_kv_table again;
        init(s, &again, names[i][0], names[i][1]);
        assert_int_equal(match(s, &again, tokens, 8), 8);
        assert_int_equal(again.block[0][0], t[i].block[0][0]);
        lr_kv_table_deinit(s->kv, &again);
    }
    for (int i = 0; i < 6; i++) lr_kv_table_deinit(s->kv, &t[i]);
    check(s);
    drop(s);
}

/* Two sequences that compute the same tokens at once end up sharing. */
static void test_same_blocks_merge(void **state)
{
    store *s = make(4, 16, 0, true, 0);
    lr_kv_table a, b;
    int32_t t[16];
    fill(t, 16, 0);
    init(s, &a, "", "");
    init(s, &b, "", "");
    assert_true(run(s, &a, t, 3));
    assert_true(run(s, &b, t, 3));
    assert_true(run(s, &a, t, 6));
    assert_true(run(s, &b, t, 6));
    assert_int_equal(a.block[0][0], b.block[0][0]);
    assert_int_equal(a.block[0][1], b.block[0][1]);
    assert_int_equal(lr_kv_available(s->kv, 0), 16 - 4);
    check(s);
    /* a rewinds into a shared block: it writes to a copy */
    int32_t u[16];
    memcpy(u, t, sizeof t);
    lr_kv_table_truncate(s->kv, &a, 5);
    u[5] = 50;
    assert_true(run(s, &a, u, 5));
    verify(s, &a, u);
    verify(s, &b, t);
    check(s);
    lr_kv_table_deinit(s->kv, &a);
    lr_kv_table_deinit(s->kv, &b);
    drop(s);
}

/* A pool with not one block to spare: a rewound, indexed block is taken out of the index instead of copied. */
static void test_rewind_in_a_full_pool(void **state)
{
    store *s = make(4, 2, 0, true, 0);
    lr_kv_table a;
    int32_t t[8];
    fill(t, 8, 0);
    init(s, &a, "", "");
    assert_true(run(s, &a, t, 8));
    lr_kv_table_truncate(s->kv, &a, 2);
    assert_int_equal(lr_kv_available(s->kv, 0), 1);
    t[2] = 22;
    assert_true(run(s, &a, t, 6));
    verify(s, &a, t);
    check(s);
    lr_kv_table_truncate(s->kv, &a, 6);
    t[6] = 66;
    assert_true(run(s, &a, t, 2));
    verify(s, &a, t);
    check(s);
    lr_kv_table_deinit(s->kv, &a);
    drop(s);
}

static void test_eviction_is_leaf_first_and_lru(void **state)
{
    store *s = make(2, 6, 0, true, 0);
    lr_kv_table a;
    int32_t p[6], q[6], r[6];
    fill(p, 6, 0);
    fill(q, 6, 100);
    fill(r, 6, 200);
    init(s, &a, "", "");
    assert_true(run(s, &a, p, 6));
    lr_kv_table_drop(s->kv, &a);
    assert_true(run(s, &a, q, 6));
    lr_kv_table_drop(s->kv, &a);
    assert_true(run(s, &a, r, 2)); /* takes p's last block */
    lr_kv_table_drop(s->kv, &a);
    assert_int_equal(match(s, &a, q, 6), 6);
    lr_kv_table_drop(s->kv, &a);
    assert_int_equal(match(s, &a, p, 6), 4);
    lr_kv_table_drop(s->kv, &a);
    check(s);
    lr_kv_table_deinit(s->kv, &a);
    drop(s);
}

static double score_by_tag(void *user, const lr_kv_leaf *leaf)
{
    ++*(int *)user;
    return leaf->tag == 1 ? 10 : 5; /* tag 1 is worth more */
}

static void test_eviction_by_score(void **state)
{
    store *s = make(2, 4, 0, true, 0);
    lr_kv_table a;
    int32_t p[4], q[4], r[4];
    int calls = 0;
    fill(p, 4, 0);
    fill(q, 4, 100);
    fill(r, 4, 200);
    lr_kv_set_score(s->kv, score_by_tag, &calls);
    init(s, &a, "", "");
    a.tag = 1;
    assert_true(run(s, &a, p, 4));
    lr_kv_table_drop(s->kv, &a);
    a.tag = 2;
    assert_true(run(s, &a, q, 4));
    lr_kv_table_drop(s->kv, &a);
    assert_true(run(s, &a, r, 4)); /* p is older, but q goes */
    assert_true(calls > 0);
    lr_kv_table_drop(s->kv, &a);
    a.tag = 1;
    assert_int_equal(match(s, &a, p, 4), 4);
    lr_kv_table_drop(s->kv, &a);
    assert_int_equal(match(s, &a, q, 4), 0);
    check(s);
    lr_kv_table_deinit(s->kv, &a);
    drop(s);
}

static void test_window(void **state)
{
    for (int bs = 1; bs <= 4; bs++) {
        store *s = make(bs, 120, 5, true, 0);
        lr_kv_table a;
        int32_t t[100];
        fill(t, 100, 0);
        init(s, &a, "", "");
        for (int i = 0; i < 100; i++) {
            assert_true(run(s, &a, t, 1));
            assert_true(lr_kv_table_held(&a, 1) <= lr_kv_need(s->kv, 1, i + 1, 0));
            assert_true(a.first[1] * bs <= (i + 1 - 5 + 1 > 0 ? i + 1 - 5 + 1 : 0));
            verify(s, &a, t);
            check(s);
        }
        lr_kv_table_drop(s->kv, &a);
        assert_int_equal(match(s, &a, t, 99), 99 / bs * bs + (99 / bs * bs + bs <= 100 ? 99 % bs : 0));
        assert_int_equal(lr_kv_table_held(&a, 0), (99 + bs - 1) / bs);
        assert_true(lr_kv_table_held(&a, 1) <= lr_kv_need(s->kv, 1, 99, 0));
        verify(s, &a, t);
        check(s);
        /* rewinding past what the window kept gives up everything; the index still helps */
        lr_kv_table_truncate(s->kv, &a, 50);
        assert_int_equal(a.computed, 0);
        assert_int_equal(match(s, &a, t, 50) / bs, 50 / bs);
        verify(s, &a, t);
        lr_kv_table_deinit(s->kv, &a);
        check(s);
        drop(s);
    }
}

/* A prefix whose window blocks are gone is no hit at that length, but may be at another. */
static void test_window_needs_its_blocks(void **state)
{
    store *s = make(2, 40, 4, true, 0);
    lr_kv_table a, b;
    int32_t t[40], u[40];
    fill(t, 40, 0);
    init(s, &a, "", "");
    assert_true(run(s, &a, t, 20));
    /* others push group 1's oldest cached blocks out; group 0 has room for all */
    init(s, &b, "", "");
    fill(u, 40, 1000);
    for (int i = 0; i < 20; i++) assert_true(run(s, &b, u, 1));
    lr_kv_stats g1;
    lr_kv_get_stats(s->kv, 1, &g1);
    assert_true(g1.cached > 0);
    lr_kv_table_deinit(s->kv, &b);
    lr_kv_table_deinit(s->kv, &a);
    init(s, &a, "", "");
    int32_t v[40];
    memcpy(v, t, sizeof t);
    v[10] = 5;
    for (int limit = 1; limit <= 10; limit++) {
        int got = match(s, &a, v, limit);
        assert_true(got <= limit);
        verify(s, &a, v);
        check(s);
        lr_kv_table_drop(s->kv, &a);
    }
    lr_kv_table_deinit(s->kv, &a);
    drop(s);
}

/* The descriptor of the spill file: the only nameless one of that name. */
static int spill_fd(void)
{
    char link[64], target[256];
    for (int fd = 3; fd < 256; fd++) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, target, sizeof target - 1);
        if (n <= 0) continue;
        target[n] = 0;
        if (strstr(target, "llmrun-spill") && strstr(target, "(deleted)")) return fd;
    }
    return -1;
}

static void test_spill(void **state)
{
    spill = "/tmp";
    store *s = make(2, 6, 0, true, 0); /* 20 slots */
    lr_kv_table a;
    int32_t t[8][12];
    lr_kv_stats st;
    init(s, &a, "", "");
    for (int i = 0; i < 8; i++) {
        fill(t[i], 12, i * 100);
        if (i >= 4) continue;
        assert_true(run(s, &a, t[i], 12));
        lr_kv_table_drop(s->kv, &a);
        check(s);
    }
    lr_kv_get_stats(s->kv, 0, &st);
    assert_int_equal(st.spilled, 18);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            assert_true(match(s, &a, t[i], 12) >= (round || i ? 8 : 12));
            verify(s, &a, t[i]);
            check(s);
            lr_kv_table_drop(s->kv, &a);
        }
    }
    lr_kv_get_stats(s->kv, 0, &st);
    assert_true(st.spill_in > 20 && st.spill_failed == 0);
    /* contents that changed on the way are a miss, not a hit */
    int fd = spill_fd();
    char junk[160];
    memset(junk, 7, sizeof junk);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, junk, sizeof junk, 0), sizeof junk);
    for (int i = 0; i < 4; i++) {
        assert_true(match(s, &a, t[i], 12) <= 12);
        verify(s, &a, t[i]);
        check(s);
        lr_kv_table_drop(s->kv, &a);
    }
    assert_int_equal(ftruncate(fd, 0), 0);
    for (int i = 4; i < 8; i++) {
        assert_int_equal(match(s, &a, t[i], 12), 0);
        assert_true(run(s, &a, t[i], 12));
        check(s);
        lr_kv_table_drop(s->kv, &a);
    }
    lr_kv_get_stats(s->kv, 0, &st);
    assert_true(st.spill_failed > 0);
    lr_kv_drop_cached(s->kv);
    lr_kv_get_stats(s->kv, 0, &st);
    assert_int_equal(st.spilled, 0);
    assert_int_equal(st.free, 6);
    lr_kv_table_deinit(s->kv, &a);
    check(s);
    drop(s);
    assert_int_equal(spill_fd(), -1);
    spill = NULL;
}

/* A file that can't grow: the pool goes on without it. */
static void test_spill_disk_full(void **state)
{
    struct rlimit old, small = {16, RLIM_INFINITY};
    spill = "/tmp";
    store *s = make(2, 6, 0, true, 0);
    spill = NULL;
    lr_kv_table a;
    int32_t t[12];
    lr_kv_stats st;
    getrlimit(RLIMIT_FSIZE, &old);
    small.rlim_max = old.rlim_max;
    void (*was)(int) = signal(SIGXFSZ, SIG_IGN);
    init(s, &a, "", "");
    setrlimit(RLIMIT_FSIZE, &small);
    for (int i = 0; i < 4; i++) {
        fill(t, 12, i * 100);
        assert_true(run(s, &a, t, 12));
        lr_kv_table_drop(s->kv, &a);
    }
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, was);
    check(s);
    lr_kv_get_stats(s->kv, 0, &st);
    assert_int_equal(st.spill_failed, 1);
    assert_int_equal(st.spilled, 2);
    assert_int_equal(match(s, &a, t, 12), 12);
    verify(s, &a, t);
    lr_kv_table_deinit(s->kv, &a);
    drop(s);
}

static void test_spill_config(void **state)
{
    lr_kv *kv;
    lr_error err;
    lr_kv_config c = {.block_size = 4,
                      .n_groups = 1,
                      .n_blocks = {8},
                      .prefix_cache = true,
                      .spill = "/nonexistent/dir/file",
                      .spill_bytes = 100,
                      .mover = {.block_bytes = {16}}};
    assert_int_equal(lr_kv_new(&kv, &c, &err), LR_EIO);
    c.spill = "/tmp";
    c.spill_bytes = 15;
    assert_int_equal(lr_kv_new(&kv, &c, &err), LR_EINVAL);
    c.spill_bytes = 100;
    c.window[0] = 5;
    assert_int_equal(lr_kv_new(&kv, &c, &err), LR_EUNSUPPORTED);
    char path[] = "/tmp/llmrun-kv-XXXXXX";
    close(mkstemp(path));
    c.window[0] = 0;
    c.spill = path; /* never somebody's file */
    assert_int_equal(lr_kv_new(&kv, &c, &err), LR_EIO);
    remove(path);
    assert_int_equal(lr_kv_new(&kv, &c, &err), 0);
    assert_int_not_equal(access(path, F_OK), 0);
    lr_kv_free(kv);
}

/* ---- random use ---- */

typedef struct seq {
    lr_kv_table t;
    int32_t tok[128];
    int len;
    bool live;
    void *swap; /* contents while swapped out */
    int swap_computed, swap_first[LR_KV_GROUPS];
} seq;

static uint32_t rng;
static uint32_t rnd(uint32_t n)
{
    rng ^= rng << 13;
    rng ^= rng >> 17;
    rng ^= rng << 5;
    return rng % n;
}

static void swap_out(store *s, seq *q)
{
    lr_kv_table_trim(s->kv, &q->t);
    q->swap = malloc(lr_kv_table_bytes(s->kv, &q->t) + 1);
    lr_kv_table_read(s->kv, &q->t, q->swap);
    q->swap_computed = q->t.computed;
    memcpy(q->swap_first, q->t.first, sizeof q->swap_first);
    lr_kv_table_drop(s->kv, &q->t);
}

static void swap_in(store *s, seq *q)
{
    if (!lr_kv_table_write(s->kv, &q->t, q->swap_computed, q->swap_first, q->swap)) return;
    lr_kv_table_advance(s->kv, &q->t, q->tok, 0);
    free(q->swap);
    q->swap = NULL;
}

static void random_op(store *s, seq *all, int n_seq, int alphabet)
{
    seq *q = &all[rnd((uint32_t)n_seq)], *o = &all[rnd((uint32_t)n_seq)];
    lr_error err;
    if (!q->live) {
        if (o->live && !o->swap && rnd(2)) {
            init(s, &q->t, o - all < 2 ? "salt" : "", "");
            lr_kv_table_deinit(s->kv, &q->t);
            lr_kv_table_init(s->kv, &q->t, o->t.space);
            assert_int_equal(lr_kv_table_fork(s->kv, &q->t, &o->t, &err), 0);
            memcpy(q->tok, o->tok, sizeof q->tok);
            q->len = o->len;
        } else {
            init(s, &q->t, rnd(4) ? "" : "salt", "");
            q->len = 1 + (int)rnd(80);
            for (int i = 0; i < q->len; i++) q->tok[i] = (int32_t)rnd((uint32_t)alphabet);
            match(s, &q->t, q->tok, q->len - 1);
        }
        q->live = true;
        return;
    }
    if (q->swap) {
        swap_in(s, q);
        return;
    }
    switch (rnd(10)) {
    case 0: /* end */
        lr_kv_table_deinit(s->kv, &q->t);
        q->live = false;
        break;
    case 1: /* rewind, go on differently */
        q->len = 1 + (int)rnd((uint32_t)q->len);
        lr_kv_table_truncate(s->kv, &q->t, q->len);
        break;
    case 2:
        swap_out(s, q);
        break;
    case 3: /* preempt by recompute */
        lr_kv_table_drop(s->kv, &q->t);
        match(s, &q->t, q->tok, q->len - 1);
        break;
    case 4: /* room taken, then given back */
        if (q->t.computed < q->len && grow(s, &q->t, q->len - q->t.computed)) lr_kv_table_trim(s->kv, &q->t);
        break;
    default: /* compute some, append some */
        if (q->t.computed < q->len) {
            int n = 1 + (int)rnd((uint32_t)(q->len - q->t.computed));
            if (!run(s, &q->t, q->tok, n)) {
                lr_kv_table_deinit(s->kv, &q->t);
                q->live = false;
            }
        } else if (q->len < 120) {
            q->tok[q->len++] = (int32_t)rnd((uint32_t)alphabet);
        }
    }
}

static void random_use(int bs, int window, int blocks, bool cache, int hash_bits, uint32_t seed)
{
    enum { N = 6 };
    store *s = make(bs, blocks, window, cache, hash_bits);
    seq *all = calloc(N, sizeof *all);
    rng = seed * 2654435761u + 1;
    for (int step = 0; step < 600; step++) {
        random_op(s, all, N, 1 + (int)(seed % 3));
        check(s);
        for (int i = 0; i < N; i++) {
            if (all[i].live) verify(s, &all[i].t, all[i].tok);
        }
    }
    for (int i = 0; i < N; i++) {
        free(all[i].swap);
        if (all[i].live) lr_kv_table_deinit(s->kv, &all[i].t);
    }
    lr_kv_drop_cached(s->kv);
    check(s);
    lr_kv_stats st;
    for (int g = 0; g < (window ? 2 : 1); g++) {
        lr_kv_get_stats(s->kv, g, &st);
        assert_int_equal(st.free, blocks);
    }
    free(all);
    drop(s);
}

static void test_random(void **state)
{
    static const int sizes[] = {1, 2, 3, 16};
    uint32_t seed = 0;
    for (int i = 0; i < 4; i++) {
        for (int w = 0; w < 4; w++) {
            int window = w == 0 ? 0 : w == 1 ? 1 : w == 2 ? 7 : 20;
            for (int k = 0; k < 4; k++) {
                spill = seed % 2 ? "/tmp" : NULL;
                random_use(sizes[i], window, 150 / sizes[i] + 8 * k, k != 3, k == 1 ? 4 : 0, ++seed);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config),
        cmocka_unit_test(test_share_and_copy),
        cmocka_unit_test(test_grow_is_all_or_nothing),
        cmocka_unit_test(test_prefix),
        cmocka_unit_test(test_salt_and_adapter_are_apart),
        cmocka_unit_test(test_same_blocks_merge),
        cmocka_unit_test(test_rewind_in_a_full_pool),
        cmocka_unit_test(test_eviction_is_leaf_first_and_lru),
        cmocka_unit_test(test_eviction_by_score),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_window_needs_its_blocks),
        cmocka_unit_test(test_spill),
        cmocka_unit_test(test_spill_disk_full),
        cmocka_unit_test(test_spill_config),
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
