/* test_peaks.c - the largest of each piece of a row of logits, taken where a product writes them on the CPU: they are
 * those of the finished row, whatever rows, threads, type of weights and number of columns, with values that are not
 * numbers among them; and logits that are no product's have none.
 */
#include "small_graph.h"
#include "cpu/cpu.h"
#include "device_model.h"

enum { TOKENS = 40, MOST = 1500 };

static const dm_shape plain = {
    .width = WIDTH, .layers = 1, .heads = 2, .kv_heads = 1, .dim = 32, .ff = 96, .type = LR_Q8_0, .down_type = LR_Q8_0};

static void open_model(dm_model *m, const dm_shape *s, lr_compute compute, int threads)
{
    lr_error err;
    if (dm_open_cpu(m, s, compute, threads, TOKENS, &err)) fail_msg("%s", err.text);
}

/* n rows of one sequence, those from `first` on with logits. */
static void run(dm_model *m, int n, int first, float *logits, float *peaks)
{
    int32_t tokens[TOKENS], out[TOKENS], table[4] = {0, 1, 2, 3};
    lr_error err;
    for (int i = 0; i < n; i++) tokens[i] = i * 37 % m->s.vocab;
    for (int i = first; i < n; i++) out[i - first] = i;
    lr_batch_seq q = {.row = 0, .n = n, .pos = 0, .table = {table}};
    lr_batch b = {.n_rows = n,
                  .tokens = tokens,
                  .n_seqs = 1,
                  .seqs = &q,
                  .n_out = n - first,
                  .out_rows = out,
                  .logits = logits,
                  .peaks = peaks};
    if (m->be->ops->run(m->be, m->plan, m->kv, &b, &err)) fail_msg("%s", err.text);
}

/* The peaks are there, each is its piece's largest, and the logits are what they are without. */
static void check(dm_model *m, int n, int first)
{
    static float with[TOKENS * MOST], without[TOKENS * MOST], peaks[TOKENS * (MOST / LR_PIECE + 1) + 1];
    int v = m->s.vocab, rows = n - first, pieces = lr_pieces(v);
    for (int i = 0; i <= rows * pieces; i++) peaks[i] = 12345;
    run(m, n, first, without, NULL);
    run(m, n, first, with, peaks);
    assert_memory_equal(with, without, (size_t)(rows * v) * sizeof *with);
    for (int i = 0; i < rows * pieces; i++) {
        int at = i % pieces * LR_PIECE;
        const float *x = with + (size_t)(i / pieces * v + at);
        float best = -INFINITY;
        for (int j = 0; j < LR_PIECE && at + j < v; j++) best = x[j] > best ? x[j] : best;
        if (peaks[i] != best)
            fail_msg("%d columns, rows %d to %d: peak %d of row %d is %g, not %g", v, first, n, i % pieces, i / pieces,
                     (double)peaks[i], (double)best);
    }
    assert_true(peaks[rows * pieces] == 12345);
}

static void peaks_are_those_of_the_row(void **state)
{
    static dm_model m;
    static const int columns[] = {70, 128, 129, 640, 1000, MOST}, types[] = {LR_Q8_0, LR_F32, LR_Q5_0};
    static const int rows[] = {1, 2, 5, 8, 9, 17, TOKENS};
    (void)state;
    for (int t = 0; t < 3 * 6; t++)
        for (int threads = 1; threads <= 4; threads += 3) {
            dm_shape s = plain;
            s.vocab = columns[t % 6];
            s.down_type = types[t / 6];
            open_model(&m, &s, LR_COMPUTE_FAST, threads);
            assert_true(m.be->ops->peaks(m.plan));
            for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
                check(&m, rows[i], 0);
                if (rows[i] > 2) check(&m, rows[i], rows[i] - 2);
            }
            dm_close(&m);
        }
    dm_shape s = plain;
    s.vocab = 1000;
    open_model(&m, &s, LR_COMPUTE_F32, 2);
    check(&m, 11, 0);
    dm_close(&m);
}

/* The head has rows of NaN, a whole piece of them among these, and of infinities. Its weights are read where they are.
 */
static void what_is_no_number_is_passed_over(void **state)
{
    static dm_model m;
    (void)state;
    for (int threads = 1; threads <= 4; threads += 3) {
        dm_shape s = plain;
        s.vocab = 1000;
        s.down_type = LR_F32;
        open_model(&m, &s, LR_COMPUTE_FAST, threads);
        float *head = m.host[m.n_weights - 1];
        for (int j = 0; j < 1000; j++) {
            float v = j == 7 || j / LR_PIECE == 3 || j == 999 ? NAN : j == 200 ? INFINITY : j == 201 ? -INFINITY : 0;
            if (v != 0) head[(size_t)j * WIDTH] = v;
        }
        check(&m, TOKENS, 0);
        check(&m, 3, 0);
        static float logits[1000], peaks[8];
        run(&m, 1, 0, logits, peaks);
        assert_true(isnan(logits[7]) && isnan(logits[500]) && isinf(logits[200]));
        assert_true(peaks[3] == -INFINITY);
        dm_close(&m);
    }
}

/* A cap comes behind the product. */
static void other_logits_have_none(void **state)
{
    static dm_model m;
    (void)state;
    dm_shape s = plain;
    s.vocab = 300;
    s.logit_cap = 5;
    open_model(&m, &s, LR_COMPUTE_FAST, 2);
    assert_false(m.be->ops->peaks(m.plan));
    dm_close(&m);
}

/* The tokens of six requests, of various chains, that an engine computes together. */
static void generate(bool with_peaks, int32_t tokens[6][20])
{
    lr_engine_config cfg = lr_engine_defaults();
    lr_engine *e;
    lr_error err;
    lr_request *r[6];
    lr_stage chains[3][2] = {{{.kind = LR_STAGE_TEMPERATURE, .a = 0}},
                             {{.kind = LR_STAGE_PENALTIES, .repetition = 1.2f, .presence = 0.3f}},
                             {{.kind = LR_STAGE_TEMPERATURE, .a = 0.7f}, {.kind = LR_STAGE_TOP_K, .n = 5}}};
    cfg.max_seqs = 6;
    if (lr_engine_new(&e, sg_make(2, -1), &cfg, &err)) fail_msg("%s", err.text);
    assert_true(lr_engine_model(e)->peaks);
    lr_engine_model(e)->peaks = with_peaks;
    for (int i = 0; i < 6; i++) {
        int32_t prompt[] = {3 + i, 9, 4, 20 + i};
        lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
        p.max_tokens = 20;
        p.ignore_eos = true;
        if (lr_sampler_new(&p.sampler, chains[i % 3], i % 3 == 2 ? 2 : 1, (uint64_t)i, FX_VOCAB, &err))
            fail_msg("%s", err.text);
        if (lr_request_new(e, fx_seq(e, prompt, 4), &p, &r[i], &err)) fail_msg("%s", err.text);
    }
    fx_run(e);
    for (int i = 0; i < 6; i++) {
        const lr_seq *q = lr_request_info(r[i])->seq;
        assert_int_equal(lr_seq_len(q), 24);
        memcpy(tokens[i], lr_seq_tokens(q) + 4, 20 * sizeof **tokens);
    }
    lr_engine_free(e);
}

static void an_engine_draws_the_same_with_and_without(void **state)
{
    static int32_t with[6][20], without[6][20];
    (void)state;
    generate(true, with);
    generate(false, without);
    assert_memory_equal(with, without, sizeof with);
}

/* A row that is spoilt behind the forward pass has peaks that look well. */
static void a_spoilt_row_is_refused(void **state)
{
    lr_engine *e;
    lr_error err;
    int32_t prompt[] = {3, 9, 4};
    (void)state;
    if (lr_engine_new(&e, sg_make(2, -1), NULL, &err)) fail_msg("%s", err.text);
    assert_true(lr_engine_model(e)->peaks);
    lr_request *r = fx_gen(e, fx_seq(e, prompt, 3), 20);
    lr_request_inject(r, LR_FAULT_NAN, 2);
    fx_run(e);
    assert_int_equal(lr_request_info(r)->state, LR_REQ_FAILED);
    assert_non_null(strstr(lr_request_info(r)->error.text, "not finite"));
    lr_engine_free(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(peaks_are_those_of_the_row), cmocka_unit_test(what_is_no_number_is_passed_over),
        cmocka_unit_test(other_logits_have_none), cmocka_unit_test(an_engine_draws_the_same_with_and_without),
        cmocka_unit_test(a_spoilt_row_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
