/* test_experts.c - mixtures of experts on the CPU with few rows: a stage may hold products of experts beside those of
 * all rows (an expert for all, a router), whose work is cut in other ways, by other numbers of rows and threads.
 *
 * Every row's logits are near those of the float32 reference, and have the same bits alone and among others, with one
 * thread and with three.
 */
#include "cpu/cpu.h"
#include "device_model.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

enum { TOKENS = 20, VOCAB = 70 };

static const dm_shape shapes[] = {
    {.width = 64,
     .layers = 3,
     .heads = 2,
     .kv_heads = 1,
     .dim = 32,
     .ff = 96,
     .vocab = VOCAB,
     .type = LR_Q8_0,
     .down_type = LR_Q8_0,
     .experts = 8,
     .used = 2,
     .shared = true},
    {.width = 256,
     .layers = 2,
     .heads = 4,
     .kv_heads = 2,
     .dim = 64,
     .ff = 256,
     .vocab = VOCAB,
     .type = LR_Q4_K,
     .down_type = LR_Q6_K,
     .experts = 5,
     .used = 5,
     .shared = true},
    {.width = 64,
     .layers = 3,
     .heads = 2,
     .kv_heads = 1,
     .dim = 32,
     .ff = 64,
     .vocab = VOCAB,
     .type = LR_MXFP4,
     .down_type = LR_MXFP4,
     .biases = true,
     .experts = 6,
     .used = 3,
     .gate = LR_GATE_SOFTMAX_CHOSEN,
     .act = LR_ACT_SWIGLU_CLAMP},
};

/* Logits of all rows of one sequence, `step` rows a batch (the last one shorter). */
static void run(const dm_shape *s, lr_compute compute, int threads, int step, float *logits)
{
    static dm_model m;
    lr_error err;
    if (dm_open_cpu(&m, s, compute, threads, TOKENS, &err)) fail_msg("%s", err.text);
    int32_t tokens[TOKENS], out[TOKENS], table[4] = {0, 1, 2, 3};
    for (int pos = 0; pos < TOKENS; pos += step) {
        int n = TOKENS - pos < step ? TOKENS - pos : step;
        for (int i = 0; i < n; i++) {
            tokens[i] = (pos + i) * 37 % VOCAB;
            out[i] = i;
        }
        lr_batch_seq q = {.row = 0, .n = n, .pos = pos, .table = {table}};
        lr_batch b = {.n_rows = n,
                      .tokens = tokens,
                      .n_seqs = 1,
                      .seqs = &q,
                      .n_out = n,
                      .out_rows = out,
                      .logits = logits + (size_t)pos * VOCAB};
        if (m.be->ops->run(m.be, m.plan, m.kv, &b, &err)) fail_msg("%s", err.text);
    }
    dm_close(&m);
}

static void test_few_rows(void **st)
{
    (void)st;
    static float want[TOKENS * VOCAB], one[TOKENS * VOCAB], got[TOKENS * VOCAB];
    static const int steps[] = {2, 3, 5, 8, 9, TOKENS};
    const double most = lr_cpu_table(NULL)->fine ? 3e-3 : 5e-2; /* rows of 11 and 14 bits, or of 8 */
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        run(&shapes[i], LR_COMPUTE_F32, 1, TOKENS, want);
        run(&shapes[i], LR_COMPUTE_FAST, 1, 1, one);
        for (int r = 0; r < TOKENS; r++) { /* each row: one that lacks an expert is far off */
            double e = dm_error(one + (size_t)r * VOCAB, want + (size_t)r * VOCAB, VOCAB);
            if (!(e < most)) fail_msg("shape %zu, row %d: error %.3g", i, r, e);
        }
        for (size_t k = 0; k < sizeof steps / sizeof *steps; k++)
            for (int threads = 1; threads <= 3; threads += 2) {
                memset(got, 0, sizeof got);
                run(&shapes[i], LR_COMPUTE_FAST, threads, steps[k], got);
                if (memcmp(got, one, sizeof got) != 0)
                    fail_msg("shape %zu: other bits, %d rows, %d threads", i, steps[k], threads);
            }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_few_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
