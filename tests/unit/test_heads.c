/* test_heads.c - heads and early exits of a small layer graph, against sums in double precision. */
#include "small_graph.h"
#include "model/heads.h"
#include <math.h>
#include <stdio.h>
#include <unistd.h>

enum { ROWS = 3 };

/* A file with one head of two blocks and a matrix of its own, and one of a block and none. */
static void write_file(const char *path, const float *w)
{
    static const char header[] =
        "{\"0.0.linear.weight\":{\"dtype\":\"F32\",\"shape\":[64,64],\"data_offsets\":[0,16384]},"
        "\"0.0.linear.bias\":{\"dtype\":\"F32\",\"shape\":[64],\"data_offsets\":[16384,16640]},"
        "\"0.1.linear.weight\":{\"dtype\":\"F32\",\"shape\":[64,64],\"data_offsets\":[16640,33024]},"
        "\"0.2.weight\":{\"dtype\":\"F32\",\"shape\":[%d,64],\"data_offsets\":[33024,%d]},"
        "\"1.0.linear.weight\":{\"dtype\":\"F32\",\"shape\":[64,64],\"data_offsets\":[%d,%d]}}";
    char text[800];
    int end = 33024 + FX_VOCAB * 256, n = snprintf(text, sizeof text, header, FX_VOCAB, end, end, end + 16384);
    uint64_t size = (uint64_t)n;
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fwrite(&size, sizeof size, 1, f);
    fwrite(text, 1, (size_t)n, f);
    fwrite(w, 1, (size_t)end + 16384, f);
    assert_int_equal(fclose(f), 0);
}

/* x + silu(W x + b), in place. */
static void block(double *x, const float *w, const float *b)
{
    double y[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
        y[i] = b ? (double)b[i] : 0;
        for (int j = 0; j < WIDTH; j++) y[i] += (double)w[i * WIDTH + j] * x[j];
    }
    for (int i = 0; i < WIDTH; i++) x[i] += y[i] / (1 + exp(-y[i]));
}

static void check_row(const double *x, const float *matrix, const float *logits)
{
    for (int i = 0; i < FX_VOCAB; i++) {
        double want = 0;
        for (int j = 0; j < WIDTH; j++) want += (double)matrix[i * WIDTH + j] * x[j];
        assert_true(fabs(want - (double)logits[i]) < 1e-3);
    }
}

static void test_heads(void **state)
{
    static float w[2 * BIG + 4096 * 4], hidden[ROWS * WIDTH], logits[2 * ROWS * FX_VOCAB];
    char path[] = "/tmp/llmrun_heads_XXXXXX";
    int fd = mkstemp(path);
    uint32_t seed = 3;
    lr_error err;
    lr_heads *h;
    assert_true(fd >= 0);
    close(fd);
    for (size_t i = 0; i < sizeof w / sizeof *w; i++) w[i] = random_float(&seed) * 0.2f;
    for (int i = 0; i < ROWS * WIDTH; i++) hidden[i] = random_float(&seed);
    write_file(path, w);
    lr_model *m = sg_make(2, -1);
    assert_int_equal(lr_heads_new(&h, m, path, ROWS, &err), 0);
    assert_int_equal(lr_heads_count(h), 2);
    for (int n = 1; n <= ROWS; n += 2) {
        assert_int_equal(lr_heads_run(h, hidden, n, logits, &err), 0);
        for (int r = 0; r < n; r++) {
            double x[WIDTH], y[WIDTH];
            for (int i = 0; i < WIDTH; i++) x[i] = y[i] = (double)hidden[r * WIDTH + i];
            block(x, w, w + 4096);
            block(x, w + 4160, NULL);
            check_row(x, w + 8256, logits + r * FX_VOCAB);
            block(y, w + 8256 + FX_VOCAB * WIDTH, NULL);
            check_row(y, sg_head, logits + (n + r) * FX_VOCAB); /* the model's own matrix */
        }
    }
    lr_heads_free(h);
    lr_model_free(m);
    unlink(path);
}

/* A model whose second layer adds nothing says what its first layer says, bit by bit; another one does not. */
static void test_exit(void **state)
{
    for (int idle = 0; idle < 2; idle++) {
        lr_model *m = sg_make(2, idle ? 1 : -1);
        lr_part *p;
        lr_error err;
        float x[2][2 * FX_VOCAB];
        int32_t tokens[] = {3, 4, 5, 6, 7}, table[] = {2}, outs[] = {2, 4};
        lr_batch_seq s = {.row = 0, .n = 5, .pos = 0, .table = {table}};
        lr_batch b = {.n_rows = 5, .tokens = tokens, .n_seqs = 1, .seqs = &s, .n_out = 2, .out_rows = outs};
        assert_int_equal(lr_part_exit(&p, m, 2, 16, 16, &err), LR_EINVAL);
        assert_int_equal(lr_part_exit(&p, m, 1, 16, 16, &err), 0);
        b.logits = x[0];
        assert_int_equal(m->ops->forward(m, &b, &err), 0);
        b.logits = x[1];
        assert_int_equal(lr_part_run(p, &b, &err), 0);
        assert_int_equal(memcmp(x[0], x[1], sizeof x[0]) == 0, idle);
        lr_part_free(p);
        lr_model_free(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_heads), cmocka_unit_test(test_exit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
