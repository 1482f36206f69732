/* test_scripted.c - the scripted model by itself: what the callback sees through block tables, windows, errors. */
#include "engine_fixture.h"

static int32_t seen[64];
static int n_seen;

static int note(void *user, const int32_t *tokens, int n, float *logits)
{
    memcpy(seen, tokens, (size_t)n * sizeof *tokens);
    n_seen = n;
    logits[5] = (float)n;
    return user && n == *(int *)user;
}

static lr_model *started(int window, void *user)
{
    lr_model *m = fx_model(note, user, 32, window);
    lr_kv_spec spec = {
        .n_layers = m->n_kv_layers, .layers = m->kv_layers, .block_size = 4, .n_blocks = {8, window ? 8 : 0}};
    lr_error err;
    assert_int_equal(m->ops->start(m, &spec, 16, 4, &err), 0);
    return m;
}

static int run(lr_model *m, const int32_t *tokens, int n, int pos, int32_t *t0, int32_t *t1, float *logits,
               lr_error *err)
{
    int32_t last = n - 1;
    lr_batch_seq s = {.row = 0, .n = n, .pos = pos, .table = {t0, t1}};
    lr_batch b = {
        .n_rows = n, .tokens = tokens, .n_seqs = 1, .seqs = &s, .n_out = 1, .out_rows = &last, .logits = logits};
    return m->ops->forward(m, &b, err);
}

static void test_sees_the_tables(void **state)
{
    lr_model *m = started(0, NULL);
    int32_t t[] = {3, 4, 5, 6, 7, 8}, table[] = {6, 1}, other[] = {6, 2};
    float x[FX_VOCAB];
    lr_error err;
    assert_int_equal(run(m, t, 6, 0, table, NULL, x, &err), 0);
    assert_int_equal(n_seen, 6);
    assert_memory_equal(seen, t, sizeof t);
    assert_true(x[5] == 6 && x[6] == 0);
    /* a wrong page: the slots behind it were never written */
    assert_int_equal(run(m, t, 1, 6, other, NULL, x, &err), LR_ESTATE);
    m->ops->kv_copy(m, 0, 2, 1);
    assert_int_equal(run(m, t, 1, 6, other, NULL, x, &err), 0);
    assert_memory_equal(seen, t, sizeof t);
    assert_int_equal(seen[6], 3);
    char buf[64];
    assert_int_equal(m->ops->kv_block_bytes(m, 0), 16);
    m->ops->kv_read(m, 0, 6, buf);
    m->ops->kv_write(m, 0, 2, buf);
    assert_int_equal(run(m, t, 1, 6, other, NULL, x, &err), 0);
    assert_int_equal(seen[4], 3); /* block 2 now holds what block 6 held, and the row's own token */
    assert_int_equal(seen[6], 3);
    lr_model_free(m);
}

static void test_window_group(void **state)
{
    lr_model *m = started(3, NULL);
    int32_t t[] = {3, 4, 5, 6, 7, 8}, t0[] = {0, 1}, t1[] = {5, 3};
    float x[FX_VOCAB];
    lr_error err;
    assert_int_equal(m->n_groups, 2);
    assert_int_equal(run(m, t, 6, 0, t0, t1, x, &err), 0);
    assert_memory_equal(seen, t, sizeof t);
    t1[0] = -1; /* out of the window of position 6: not looked at */
    assert_int_equal(run(m, t, 1, 6, t0, t1, x, &err), 0);
    t0[0] = 7; /* but the full group needs it */
    assert_int_equal(run(m, t, 1, 6, t0, t1, x, &err), LR_ESTATE);
    lr_model_free(m);
}

/* A trunk of two rows and a branch off its first one, whose row is echoed to the branch's block. */
static void test_branch(void **state)
{
    lr_model *m = started(0, NULL);
    int32_t t[] = {3, 4, 5, 6}, batch[] = {7, 8, 9}, table[] = {6, 1}, branch[] = {6, 2}, outs[] = {2};
    float x[FX_VOCAB];
    lr_error err;
    assert_int_equal(run(m, t, 4, 0, table, NULL, x, &err), 0);
    lr_batch_seq s[] = {{.row = 0, .n = 2, .pos = 4, .table = {table}},
                        {.row = 2, .n = 1, .pos = 5, .table = {branch}}};
    lr_batch_echo echo = {.row = 0, .table = {branch}};
    lr_batch b = {.n_rows = 3, .tokens = batch, .n_seqs = 2, .seqs = s, .n_out = 1, .out_rows = outs, .logits = x};
    assert_int_equal(m->ops->forward(m, &b, &err), LR_ESTATE); /* nobody wrote its ancestor there */
    b.n_echoes = 1;
    b.echoes = &echo;
    assert_true(m->echoes);
    assert_int_equal(m->ops->forward(m, &b, &err), 0);
    int32_t path[] = {3, 4, 5, 6, 7, 9};
    assert_int_equal(n_seen, 6);
    assert_memory_equal(seen, path, sizeof path);
    lr_model_free(m);
}

static void test_failing_row(void **state)
{
    int bad = 3;
    lr_model *m = started(0, &bad);
    int32_t t[] = {3, 4, 5}, table[] = {0};
    float x[FX_VOCAB];
    lr_error err;
    assert_int_equal(run(m, t, 3, 0, table, NULL, x, &err), 0);
    for (int i = 0; i < FX_VOCAB; i++) assert_true(isnan(x[i]));
    lr_model_free(m);
}

static void test_config(void **state)
{
    lr_vocab *v = fx_vocab();
    lr_scripted_config bad[] = {{.n_vocab = 0, .n_ctx = 8, .next = note, .vocab = v},
                                {.n_vocab = 8, .n_ctx = 0, .next = note, .vocab = v},
                                {.n_vocab = 8, .n_ctx = 8, .vocab = v},
                                {.n_vocab = 8, .n_ctx = 8, .next = note},
                                {.n_vocab = 8, .n_ctx = 8, .next = note, .vocab = v, .window = -1},
                                {.n_vocab = 8, .n_ctx = 8, .next = note, .vocab = v, .cost_ns = -1}};
    lr_model *m = NULL;
    lr_error err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(lr_scripted_new(&m, &bad[i], &err), LR_EINVAL);
    assert_null(m);
    lr_vocab_unref(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sees_the_tables), cmocka_unit_test(test_window_group), cmocka_unit_test(test_branch),
        cmocka_unit_test(test_failing_row),     cmocka_unit_test(test_config),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
