/* test_shortlist.c - the part of a vocabulary that drafts are chosen from: what is in it, and that a forward pass with
 * a list gives the same logits for what is, and -inf for all else.
 */
#include "small_graph.h"
#include "cpu/cpu.h"
#include "device_model.h"
#include "spec/spec.h"

enum { TOKENS = 24, MOST = 1500 };

/* ---- lists ---- */

static void test_lists(void **state)
{
    enum { SIZE = 256 };
    lr_vocab *v = fx_vocab();
    lr_error err;
    lr_shortlists l;
    const int small[] = {0, SIZE, -1}; /* 0: large ones' */
    assert_int_equal(lr_shortlist_words(SIZE), 1);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(lr_shortlists_new(&l, v, SIZE, small[i], &err), 0);
        assert_null(l.any);
    }
    const int32_t seen[] = {1, 2, 140, 3, -5, SIZE, INT32_MAX};
    lr_shortlist none = {.of = &l};
    lr_shortlist_see(&none, seen, 7);
    assert_null(none.bits);
    assert_false(lr_shortlists_join(&l, &none));

    assert_int_equal(lr_shortlists_new(&l, v, SIZE, 64, &err), 0);
    assert_non_null(l.any);
    for (int id = 0; id < SIZE; id++)
        if (id < 64 || lr_vocab_is_control(v, id) || lr_vocab_is_eog(v, id)) assert_true(lr_is_listed(l.any, id));
    assert_false(lr_is_listed(l.any, 130));
    lr_shortlist a = {.of = &l}, b = a;
    assert_false(lr_shortlists_join(&l, &a)); /* nothing was seen: nothing is known of the text */
    lr_shortlist_see(&a, seen, 7);
    assert_true(lr_shortlists_join(&l, &a));
    assert_int_equal(l.pass[0], l.any[0] | 1u << 140 / LR_LISTED);
    lr_shortlist_copy(&b, &a);
    const int32_t more[] = {200};
    lr_shortlist_see(&b, more, 1);
    assert_false(lr_is_listed(a.bits, 200));
    assert_true(lr_shortlists_join(&l, &b));
    assert_true(lr_is_listed(l.pass, 140) && lr_is_listed(l.pass, 200) && lr_is_listed(l.pass, 5));
    lr_shortlists_clear(&l);
    assert_false(lr_is_listed(l.pass, 5));
    lr_shortlist_free(&a);
    lr_shortlist_free(&b);
    lr_shortlists_free(&l);
    lr_vocab_unref(v);
}

/* A text whose tokens are mostly new is not drafted from a list, until it goes on with what it has. */
static void test_novel(void **state)
{
    enum { N = 1 << 17 };
    lr_vocab *v = fx_vocab();
    lr_error err;
    lr_shortlists l;
    assert_int_equal(lr_shortlists_new(&l, v, N, 0, &err), 0);
    assert_non_null(l.any);
    lr_shortlist a = {.of = &l};
    int32_t id = 5;
    lr_shortlist_see(&a, &id, 1);
    assert_true(lr_shortlists_join(&l, &a));
    for (int i = 0; i < 30; i++) {
        id = 40000 + 1000 * i;
        lr_shortlist_see(&a, &id, 1);
    }
    assert_false(lr_shortlists_join(&l, &a));
    for (int i = 0; i < 300; i++) {
        id = 40000 + 1000 * (i % 30);
        lr_shortlist_see(&a, &id, 1);
    }
    assert_true(lr_shortlists_join(&l, &a));
    lr_shortlist_free(&a);
    lr_shortlists_free(&l);
    lr_vocab_unref(v);
}

/* ---- what a draft model's passes ask for ---- */

enum { WORDS = 256 };

static struct {
    lr_model_ops ops; /* the model's own but for forward */
    int (*forward)(lr_model *, const lr_batch *, lr_error *);
    int passes, lists;
    uint32_t last;
} watched;

static int watched_forward(lr_model *m, const lr_batch *b, lr_error *err)
{
    watched.passes++;
    if (b->shortlist) watched.lists++;
    if (b->shortlist) watched.last = b->shortlist[0];
    return watched.forward(m, b, err);
}

static int next_word(void *user, const int32_t *tokens, int n, float *logits)
{
    logits[(tokens[n - 1] + 1) % WORDS] = 9;
    return user != NULL;
}

static int pick_best(void *user, lr_draft_job *j, int i, float *logits, int32_t *id)
{
    *id = 0;
    for (int t = 1; t < WORDS; t++)
        if (logits[t] > logits[*id]) *id = t;
    return user || j->got != i;
}

static void test_asked(void **state)
{
    static const int32_t other[] = {1, 200, 1};
    int32_t text[200];
    for (int how = -1; how <= 64; how += 65) {
        lr_vocab *v = fx_vocab();
        lr_scripted_config c = {.n_vocab = WORDS, .n_ctx = 256, .next = next_word, .vocab = v};
        lr_draft_config dc = {.max_rows = 256, .max_seqs = 2, .shortlist = how, .kv_type = LR_F16};
        int32_t out[2][4];
        lr_model *m;
        lr_draft *d;
        lr_draft_slot *slot[2];
        lr_error err;
        if (lr_scripted_new(&m, &c, &err)) fail_msg("%s", err.text);
        memset(&watched, 0, sizeof watched);
        watched.ops = *m->ops;
        watched.forward = m->ops->forward;
        watched.ops.forward = watched_forward;
        m->ops = &watched.ops;
        if (lr_draft_new(&d, m, &dc, &err)) fail_msg("%s", err.text);
        for (int i = 0; i < 200; i++) text[i] = i % 4;
        text[100] = 140;
        lr_draft_job jobs[2];
        for (int i = 0; i < 2; i++) {
            assert_int_equal(lr_draft_open(d, &slot[i], &err), 0);
            jobs[i] =
                (lr_draft_job){.slot = slot[i], .tokens = text, .n = 120, .k = 4, .pick = pick_best, .out = out[i]};
        }
        assert_int_equal(lr_draft_run(d, jobs, 1, 256, &err), 0);
        assert_int_equal(jobs[0].got, 4);
        assert_int_equal(watched.passes, 5); /* the first computes the text */
        assert_int_equal(watched.lists, how < 0 ? 0 : 4);
        if (how > 0) assert_int_equal(watched.last, 3 | 1u << 140 / LR_LISTED);
        jobs[1].tokens = other;
        jobs[1].n = 3;
        assert_int_equal(lr_draft_run(d, jobs, 2, 256, &err), 0);
        assert_int_equal(jobs[1].got, 4);
        if (how > 0) assert_int_equal(watched.last, 3 | 1u << 140 / LR_LISTED | 1u << 200 / LR_LISTED);
        for (int i = 0; i < 2; i++) lr_draft_close(slot[i]);
        lr_draft_free(d);
        lr_vocab_unref(v);
    }
}

/* ---- passes ---- */

static const dm_shape plain = {
    .width = WIDTH, .layers = 1, .heads = 2, .kv_heads = 1, .dim = 32, .ff = 96, .type = LR_Q8_0, .down_type = LR_Q8_0};

static void open_model(dm_model *m, const dm_shape *s, lr_compute compute, int threads)
{
    lr_error err;
    if (dm_open_cpu(m, s, compute, threads, TOKENS, &err)) fail_msg("%s", err.text);
}

static void run(dm_model *m, int n, const uint32_t *list, float *logits)
{
    int32_t tokens[TOKENS], out[TOKENS], table[4] = {0, 1, 2, 3};
    lr_error err;
    for (int i = 0; i < n; i++) {
        tokens[i] = i * 37 % m->s.vocab;
        out[i] = i;
    }
    lr_batch_seq q = {.row = 0, .n = n, .pos = 0, .table = {table}};
    lr_batch b = {.n_rows = n,
                  .tokens = tokens,
                  .n_seqs = 1,
                  .seqs = &q,
                  .n_out = n,
                  .out_rows = out,
                  .shortlist = list,
                  .logits = logits};
    if (m->be->ops->run(m->be, m->plan, m->kv, &b, &err)) fail_msg("%s", err.text);
}

static void test_pass(void **state)
{
    static float all[TOKENS * MOST], some[TOKENS * MOST];
    static dm_model m;
    static const int columns[] = {70, 128, 1000, MOST}, types[] = {LR_Q8_0, LR_F32, LR_Q5_0}, rows[] = {1, 2, 8, 9, 24};
    static const lr_compute computes[] = {LR_COMPUTE_FAST, LR_COMPUTE_FAST, LR_COMPUTE_F32};
    uint32_t seed = 3;
    (void)state;
    for (int t = 0; t < 3 * 4; t++)
        for (int threads = 1; threads <= 4; threads += 3) {
            dm_shape s = plain;
            s.vocab = columns[t % 4];
            s.down_type = types[t / 4];
            open_model(&m, &s, computes[t / 4], threads);
            for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
                const int n = rows[i], v = s.vocab;
                run(&m, n, NULL, all);
                for (int k = 0; k < 4; k++) { /* none, all, some */
                    uint32_t list[MOST / (32 * LR_LISTED) + 1];
                    for (int w = 0; w < lr_shortlist_words(v); w++) {
                        (void)random_float(&seed);
                        list[w] = k == 0 ? 0 : k == 1 ? UINT32_MAX : seed;
                    }
                    for (int j = 0; j < n * v; j++) some[j] = 12345;
                    run(&m, n, list, some);
                    for (int j = 0; j < n * v; j++) {
                        const float want = lr_is_listed(list, j % v) ? all[j] : -INFINITY;
                        if (memcmp(&some[j], &want, sizeof want) != 0)
                            fail_msg("%d columns, %d rows, list %d: %g at column %d of row %d, not %g", v, n, k,
                                     (double)some[j], j % v, j / v, (double)want);
                    }
                }
            }
            dm_close(&m);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lists), cmocka_unit_test(test_novel),
                                       cmocka_unit_test(test_asked), cmocka_unit_test(test_pass)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
