/* test_engine_snapshot.c - sequences saved to a file and restored: the same answer, in another engine too; every
 * damaged byte and every cut is refused; what does not fit is computed again. */
#include "engine_fixture.h"
#include <sys/stat.h>
#include <unistd.h>

static char dir[] = "/tmp/llmrun-snapshot-XXXXXX";
static char path[64];

static int setup(void **state)
{
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/s.kv", dir);
    return 0;
}

static int teardown(void **state)
{
    remove(path);
    return rmdir(dir); /* fails if a temporary file was left */
}

static char *slurp(size_t *n)
{
    FILE *f = fopen(path, "rb");
    char *p = malloc(1 << 20);
    *n = fread(p, 1, 1 << 20, f);
    fclose(f);
    return p;
}

static void spit(const char *p, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_int_equal(fwrite(p, 1, n, f), n);
    fclose(f);
}

static lr_engine *engine(int block_size, int blocks, int window)
{
    lr_engine_config cfg = lr_engine_defaults();
    cfg.block_size = block_size;
    cfg.kv_blocks[0] = blocks;
    cfg.kv_blocks[1] = window ? blocks : 0;
    return fx_engine(&cfg, fx_next, NULL, 256, window);
}

/* A session of two turns, saved. */
static int make(int block_size, int window, int32_t *t)
{
    lr_engine *e = engine(block_size, 128, window);
    lr_error err;
    for (int i = 0; i < 33; i++) t[i] = 3 + i;
    lr_seq *s = fx_seq(e, t, 33);
    fx_gen(e, s, 6);
    fx_run(e);
    assert_int_equal(lr_seq_append(s, t, 2, &err), 0);
    int n = (int)lr_seq_len(s);
    memcpy(t, lr_seq_tokens(s), (size_t)n * sizeof *t);
    if (lr_seq_save(s, path, &err)) fail_msg("%s", err.text);
    lr_engine_free(e);
    return n;
}

static void go_on(lr_engine *e, lr_seq *s, int32_t *t, int n)
{
    int32_t want[128];
    memcpy(want, t, (size_t)n * sizeof *t);
    fx_reference(fx_next, NULL, want, n, 8);
    assert_int_equal(lr_seq_len(s), n);
    fx_gen(e, s, 8);
    fx_run(e);
    assert_memory_equal(lr_seq_tokens(s), want, (size_t)(n + 8) * sizeof *want);
    fx_check(e);
}

static void test_round_trip(void **state)
{
    static const int sizes[] = {1, 3, 16};
    for (int i = 0; i < 6; i++) {
        int32_t t[128];
        int window = i < 3 ? 0 : 7, n = make(sizes[i % 3], window, t);
        lr_engine *e = engine(sizes[i % 3], 128, window);
        lr_seq *s;
        lr_error err;
        if (lr_seq_restore(e, path, NULL, &s, &err)) fail_msg("%s", err.text);
        fx_check(e);
        assert_int_equal(lr_seq_computed(s), 38); /* the last drawn token and the two behind it are to be computed */
        go_on(e, s, t, n);
        lr_seq *again; /* into a pool that knows all of it already */
        assert_int_equal(lr_seq_restore(e, path, NULL, &again, &err), 0);
        go_on(e, again, t, n);
        lr_engine_free(e);
    }
}

static void test_what_does_not_fit(void **state)
{
    int32_t t[128];
    lr_seq *s;
    lr_error err;
    int n = make(4, 0, t);
    lr_engine *e = engine(8, 64, 0); /* another block size */
    assert_int_equal(lr_seq_restore(e, path, NULL, &s, &err), 0);
    assert_int_equal(lr_seq_computed(s), 0);
    go_on(e, s, t, n);
    lr_engine_free(e);
    e = engine(4, 13, 0); /* room for it, but an idle sequence has to give way */
    lr_seq *other = fx_seq(e, t, 30);
    fx_gen(e, other, 2);
    fx_run(e);
    assert_int_equal(lr_seq_restore(e, path, NULL, &s, &err), 0);
    assert_int_equal(lr_seq_computed(s), 38);
    assert_int_equal(lr_seq_blocks(other, 0), 0);
    go_on(e, s, t, n);
    lr_engine_free(e);
    e = engine(4, 5, 0);
    assert_int_equal(lr_seq_restore(e, path, NULL, &s, &err), LR_EFULL);
    lr_engine_free(e);
    e = engine(4, 64, 5); /* another model */
    assert_int_equal(lr_seq_restore(e, path, NULL, &s, &err), LR_ESTATE);
    assert_int_equal(lr_seq_restore(e, "/nonexistent/file", NULL, &s, &err), LR_ENOTFOUND);
    assert_int_equal(lr_seq_restore(e, dir, NULL, &s, &err), LR_EIO);
    s = fx_seq(e, t, 3);
    assert_int_equal(lr_seq_save(s, "/nonexistent/file", &err), LR_ENOTFOUND);
    assert_int_equal(lr_seq_save(s, "/dev/null", &err), LR_EINVAL);
    assert_int_equal(lr_seq_save(s, dir, &err), LR_EINVAL);
    lr_engine_info info;
    lr_engine_get_info(e, &info);
    assert_int_equal(info.n_seqs, 1);
    lr_engine_free(e);
}

static void test_damage(void **state)
{
    int32_t t[128];
    size_t n;
    lr_seq *s;
    lr_error err;
    make(4, 7, t);
    char *good = slurp(&n), *bad = malloc(n);
    lr_engine *e = engine(4, 128, 7);
    for (size_t i = 0; i < n; i += i < 72 ? 1 : 7) {
        memcpy(bad, good, n);
        bad[i] ^= (char)(1 << i % 8);
        spit(bad, n);
        if (lr_seq_restore(e, path, NULL, &s, &err) == 0) fail_msg("a flipped bit in byte %zu was taken", i);
        memcpy(bad, good, n);
        bad[i] = (char)~bad[i];
        spit(bad, n);
        assert_true(lr_seq_restore(e, path, NULL, &s, &err) < 0);
        spit(good, i);
        assert_int_equal(lr_seq_restore(e, path, NULL, &s, &err), LR_EFORMAT);
    }
    spit(good, n);
    FILE *f = fopen(path, "ab");
    fputc(0, f);
    fclose(f);
    assert_int_equal(lr_seq_restore(e, path, NULL, &s, &err), LR_EFORMAT);
    lr_engine_info info;
    lr_engine_get_info(e, &info);
    assert_int_equal(info.n_seqs, 0);
    assert_int_equal(info.kv[0].free, 128);
    lr_engine_free(e);
    free(good);
    free(bad);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_what_does_not_fit),
        cmocka_unit_test(test_damage),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
