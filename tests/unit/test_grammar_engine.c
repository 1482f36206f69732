/* test_grammar_engine.c - requests held to a grammar: on a scripted model whose logits favour anything, batched and
 * preempted, with holes that fail, and at the end of the text.
 */
#include "engine/constrain.h"
#include "engine/engine_int.h"
#include "engine_fixture.h"
#include "grammar/grammar.h"

/* Built from a pattern; NULL with err on failure. */
static lr_matcher *matcher_of(const char *pattern, lr_vocab *v)
{
    lr_regex *re;
    lr_gb *b;
    lr_grammar *g;
    lr_grammar_trie *t;
    lr_matcher *m;
    lr_error err;
    if (lr_regex_new(&re, pattern, strlen(pattern), 0, &err) || lr_gb_new(&b, &err)) fail_msg("%s", err.text);
    uint32_t rule = lr_gb_rule(b, "root", 4);
    lr_gb_define(b, rule, lr_gb_regex(b, re, LR_SPELL_RAW));
    if (lr_gb_compile(b, rule, &g, &err) || lr_grammar_trie_get(&t, v, &err) || lr_matcher_new(&m, g, t, NULL, &err))
        fail_msg("%s", err.text);
    lr_regex_free(re);
    lr_gb_free(b);
    lr_grammar_unref(g);
    lr_grammar_trie_unref(t);
    return m;
}

static lr_request *generate(lr_engine *e, lr_matcher *m, int32_t first, int max_tokens, int n_vocab)
{
    lr_request *r;
    lr_error err;
    lr_constraint con;
    int32_t prompt[2] = {1, first};
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    p.max_tokens = max_tokens;
    p.constraint = &con;
    p.free_seq = true;
    if (lr_constraint_of_matcher(&con, m, n_vocab, &err)) fail_msg("%s", err.text);
    if (lr_request_new(e, fx_seq(e, prompt, 2), &p, &r, &err)) fail_msg("%s", err.text);
    return r;
}

static void check_text(lr_request *r, const char *want, lr_finish finish)
{
    size_t n;
    const char *s = lr_request_text(r, &n);
    const lr_req_info *i = lr_request_info(r);
    if (i->state != LR_REQ_DONE) print_error("%s: %s\n", lr_req_state_name(i->state), i->error.text);
    assert_int_equal(i->state, LR_REQ_DONE);
    assert_int_equal(i->finish, finish);
    if (want) assert_int_equal(n, strlen(want));
    if (want && n) assert_memory_equal(s, want, n);
}

static void test_forced(void **state)
{
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 512, 0);
    lr_vocab *v = lr_engine_model(e)->vocab;
    /* nothing may follow: it ends by itself; the model never ends */
    lr_request *a = generate(e, matcher_of("A bCD", v), 5, -1, FX_VOCAB);
    /* it may end, but the model does not want to: until nothing may follow */
    lr_request *b = generate(e, matcher_of("A{2,7}", v), 6, -1, FX_VOCAB);
    lr_request *c = generate(e, matcher_of("[AB]*", v), 7, 20, FX_VOCAB);
    fx_run(e);
    check_text(a, "A bCD", LR_FINISH_STOP);
    check_text(b, "AAAAAAA", LR_FINISH_STOP);
    check_text(c, NULL, LR_FINISH_LENGTH);
    size_t n;
    const char *s = lr_request_text(c, &n);
    assert_int_equal(n, 20);
    for (size_t i = 0; i < n; i++) assert_true(s[i] == 'A' || s[i] == 'B');
    lr_request_free(a);
    lr_request_free(b);
    lr_request_free(c);
    lr_engine_free(e);
}

static double no_time(void *user) { return 1; }

/* Steps and rows that it takes to write "A bCD" and a free letter three times, on a device on which a step of n rows
 * takes 1 + by_rows (n - 1) seconds. */
static void run_forced(double by_rows, int *steps, int *rows, char *text)
{
    lr_engine_config cfg = lr_engine_defaults();
    cfg.now = no_time; /* nothing is measured but what is said here */
    lr_engine *e = fx_engine(&cfg, fx_next, NULL, 512, 0);
    lr_error err;
    for (int n = 1; n <= 32; n++) lr_pace_saw_step(&e->pace, n, 1 + by_rows * (n - 1));
    lr_request *r = generate(e, matcher_of("(A bCD[AB]){3}", lr_engine_model(e)->vocab), 5, -1, FX_VOCAB);
    *steps = *rows = 0;
    while (lr_engine_busy(e)) {
        int n = lr_engine_step(e, &err);
        if (n < 0) fail_msg("%s", err.text);
        *rows += n;
        ++*steps;
        assert_int_equal(lr_engine_check(e, &err), 0);
    }
    check_text(r, NULL, LR_FINISH_STOP);
    size_t n;
    const char *s = lr_request_text(r, &n);
    assert_int_equal(n, 18);
    memcpy(text, s, n);
    assert_int_equal(lr_request_info(r)->n_generated, 15);
    assert_int_equal(lr_request_info(r)->n_forced, 11); /* all but the first one and those that are free */
    lr_request_free(r);
    lr_engine_free(e);
}

static void test_rows(void **state)
{
    int steps, rows;
    char text[32], other[32];
    run_forced(0.1, &steps, &rows, text);
    assert_int_equal(rows, 2 + 14);
    assert_int_equal(steps, 4);            /* the prompt, and one before each free letter */
    run_forced(1.5, &steps, &rows, other); /* rows are dear: one at a time */
    assert_int_equal(rows, 2 + 14);
    assert_int_equal(steps, 1 + 14);
    assert_memory_equal(text, other, 18);
    /* nothing but the tokens at the end of the text need no row at all */
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 512, 0);
    lr_request *r = generate(e, matcher_of("A bCD", lr_engine_model(e)->vocab), 5, -1, FX_VOCAB);
    fx_run(e);
    check_text(r, "A bCD", LR_FINISH_STOP);
    assert_int_equal(lr_request_info(r)->n_computed, 2);
    assert_int_equal(lr_request_info(r)->n_forced, 3);
    lr_request_free(r);
    lr_engine_free(e);
}

/* A model that always wants to end: it may only where the grammar may. */
static int wants_end(void *user, const int32_t *tokens, int n, float *logits)
{
    fx_next(user, tokens, n, logits);
    logits[FX_EOS] = 1e6f;
    return 0;
}

static void test_end(void **state)
{
    lr_engine *e = fx_engine(NULL, wants_end, NULL, 512, 0);
    lr_vocab *v = lr_engine_model(e)->vocab;
    lr_request *a = generate(e, matcher_of("A{5,}", v), 5, -1, FX_VOCAB);
    lr_request *b = generate(e, matcher_of("(AB)*", v), 6, -1, FX_VOCAB);
    fx_run(e);
    check_text(a, "AAAAA", LR_FINISH_STOP);
    assert_int_equal(lr_request_info(a)->stop_token, FX_EOS);
    check_text(b, "", LR_FINISH_STOP);
    lr_request_free(a);
    lr_request_free(b);
    lr_engine_free(e);
}

/* Preempted in any way, the text is the same. */
static void test_preempted(void **state)
{
    for (int fault = LR_FAULT_NONE; fault <= LR_FAULT_SWAP; fault++) {
        static char first[512];
        lr_engine *e = fx_engine(NULL, fx_next, NULL, 512, 0);
        lr_request *r = generate(e, matcher_of("([A-D] [a-e]){12}", lr_engine_model(e)->vocab), 9, -1, FX_VOCAB);
        if (fault) lr_request_inject(r, (lr_fault)fault, 7);
        fx_run(e);
        check_text(r, NULL, LR_FINISH_STOP);
        size_t n;
        const char *s = lr_request_text(r, &n);
        if (fault == LR_FAULT_NONE) snprintf(first, sizeof first, "%.*s", (int)n, s);
        if (fault) assert_int_equal(lr_request_info(r)->n_preempted, 1);
        assert_int_equal(n, 36);
        assert_memory_equal(s, first, n);
        lr_request_free(r);
        lr_engine_free(e);
    }
}

/* What the vocabulary cannot spell ends the request, not the engine. */
static void test_dead_end(void **state)
{
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 512, 0);
    lr_vocab *v = lr_engine_model(e)->vocab;
    lr_request *a = generate(e, matcher_of("AB1", v), 5, -1, FX_VOCAB);
    lr_request *b = generate(e, matcher_of("ABC", v), 6, -1, FX_VOCAB);
    fx_run(e);
    assert_int_equal(lr_request_info(a)->state, LR_REQ_FAILED);
    assert_string_equal(lr_request_info(a)->error.text, "no token of the vocabulary goes on as the grammar wants");
    check_text(b, "ABC", LR_FINISH_STOP);
    lr_request_free(a);
    lr_request_free(b);
    lr_engine_free(e);
}

/* In a vocabulary that puts a space before a text, the first piece behind a control token has one that is not shown. */
static void test_space(void **state)
{
    for (int kind = 0; kind < 2; kind++) {
        lr_str tok[] = {LR_STR("<unk>"),
                        LR_STR("<s>"),
                        LR_STR("</s>"),
                        LR_STR("\xe2\x96\x81"),
                        LR_STR("\xe2\x96\x81"
                               "a"),
                        LR_STR("a"),
                        LR_STR("b")};
        enum { N = sizeof tok / sizeof *tok };
        int32_t types[N] = {LR_TT_UNKNOWN, LR_TT_CONTROL, LR_TT_CONTROL, 1, 1, 1, 1};
        float scores[N] = {0};
        lr_vocab_spec spec = {.model = "llama",
                              .n_tokens = N,
                              .tokens = tok,
                              .scores = scores,
                              .types = types,
                              .bos = 1,
                              .eos = 2,
                              .eot = -1,
                              .pad = -1,
                              .add_space_prefix = kind == 1};
        lr_vocab *v;
        lr_error err;
        if (lr_vocab_new(&v, &spec, &err)) fail_msg("%s", err.text);
        lr_matcher *m = matcher_of("ab", v);
        lr_matcher_strip_space(m, kind == 1);
        uint32_t bits[1];
        assert_int_equal(lr_matcher_mask(m, bits, NULL, &err), 0);
        assert_int_equal(bits[0], kind ? 1u << 4 | 1u << 5 : 1u << 5); /* never the space alone */
        assert_int_equal(lr_matcher_allows(m, 4), kind == 1);
        assert_int_equal(lr_matcher_accept(m, kind ? 4 : 5, &err), 0);
        assert_int_equal(lr_matcher_mask(m, bits, NULL, &err), 0);
        assert_int_equal(bits[0], 1u << 6);
        assert_int_equal(lr_matcher_rollback(m, 1, &err), 0);
        assert_int_equal(lr_matcher_allows(m, 4), kind == 1);
        lr_matcher_free(m);
        /* the text starts with a space: it takes two */
        m = matcher_of(" a", v);
        lr_matcher_strip_space(m, kind == 1);
        assert_int_equal(lr_matcher_mask(m, bits, NULL, &err), 0);
        assert_int_equal(bits[0], kind ? 0 : 1u << 3 | 1u << 4);
        lr_matcher_free(m);
        lr_vocab_unref(v);
    }
}

/* ---- holes ---- */

typedef struct asked {
    int calls;
    bool fail;
    int freed;
} asked;

static int names(void *user, int id, lr_str text, const lr_str **strings, size_t *n, lr_error *err)
{
    static const lr_str list[] = {LR_STR("AB"), LR_STR("CD")};
    asked *a = user;
    a->calls++;
    if (a->fail && text.n > 3) return lr_fail(err, LR_ESCRIPT, "no table today");
    *strings = list;
    *n = 2;
    return 0;
}

static void count_free(void *user) { ((asked *)user)->freed++; }

static lr_matcher *hole_matcher(lr_vocab *v, asked *a)
{
    lr_gb *b;
    lr_grammar *g;
    lr_grammar_trie *t;
    lr_matcher *m;
    lr_error err;
    if (lr_gb_new(&b, &err)) fail_msg("%s", err.text);
    uint32_t rule = lr_gb_rule(b, "root", 4);
    lr_gnode hole = lr_gb_hole(b, 7, "table", 5);
    lr_gnode parts[4] = {lr_gb_lit(b, "P", 1), hole, lr_gb_lit(b, "Q", 1), hole};
    lr_gb_define(b, rule, lr_gb_seq(b, parts, 4));
    if (lr_gb_compile(b, rule, &g, &err) || lr_grammar_trie_get(&t, v, &err)) fail_msg("%s", err.text);
    lr_matcher_options o = {.hole = names, .hole_user = a, .hole_free = count_free};
    assert_int_equal(lr_matcher_new(&m, g, t, NULL, &err), LR_EINVAL);
    if (lr_matcher_new(&m, g, t, &o, &err)) fail_msg("%s", err.text);
    lr_gb_free(b);
    lr_grammar_unref(g);
    lr_grammar_trie_unref(t);
    return m;
}

static void test_holes(void **state)
{
    asked ok = {0}, bad = {.fail = true};
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 512, 0);
    lr_vocab *v = lr_engine_model(e)->vocab;
    lr_request *a = generate(e, hole_matcher(v, &ok), 5, -1, FX_VOCAB);
    lr_request *b = generate(e, hole_matcher(v, &bad), 5, -1, FX_VOCAB);
    fx_run(e);
    check_text(a, NULL, LR_FINISH_STOP);
    size_t n;
    const char *s = lr_request_text(a, &n);
    assert_int_equal(n, 6);
    assert_true(memcmp(s + 1, "AB", 2) == 0 || memcmp(s + 1, "CD", 2) == 0);
    assert_true(memcmp(s + 4, "AB", 2) == 0 || memcmp(s + 4, "CD", 2) == 0);
    assert_int_equal(lr_request_info(b)->state, LR_REQ_FAILED);
    assert_string_equal(lr_request_info(b)->error.text, "hole table: no table today");
    lr_request_free(a);
    lr_request_free(b);
    assert_int_equal(ok.freed, 1);
    assert_int_equal(bad.freed, 1);
    assert_true(ok.calls >= 2 && ok.calls <= 8);
    lr_engine_free(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),      cmocka_unit_test(test_forced),   cmocka_unit_test(test_end),
        cmocka_unit_test(test_preempted), cmocka_unit_test(test_dead_end), cmocka_unit_test(test_space),
        cmocka_unit_test(test_holes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
