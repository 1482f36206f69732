/* test_spec.c - speculation, piece by piece: what proposes drafts, how they are judged, how many pay. */
#include "chi_square.h"
#include "engine_fixture.h"
#include "engine/speculate_int.h"
#include "sample/sample.h"

/* ---- n-grams and suffixes ---- */

static void test_ngram(void **state)
{
    const int32_t text[] = {5, 1, 2, 3, 9, 1, 2, 3, 4, 7, 1, 2, 3};
    int32_t out[32];
    int match, n = (int)(sizeof text / sizeof *text);
    assert_int_equal(lr_ngram_propose(text, n, 2, 8, 3, out, &match), 3);
    assert_int_equal(match, 3); /* the latest place of the longest match */
    assert_int_equal(out[0], 4);
    assert_int_equal(out[1], 7);
    assert_int_equal(out[2], 1);
    assert_int_equal(lr_ngram_propose(text, n, 4, 8, 3, out, &match), 0);
    assert_int_equal(lr_ngram_propose(text, n, 1, 1, 1, out, &match), 1);
    assert_int_equal(out[0], 4);
    assert_int_equal(lr_ngram_propose(text, 1, 1, 8, 3, out, &match), 0);
    assert_int_equal(lr_ngram_propose(text, 0, 1, 8, 3, out, &match), 0);
    assert_int_equal(lr_ngram_propose(text, n, 2, 8, 0, out, &match), 0);
    const int32_t period[] = {1, 2, 3, 1, 2, 3}; /* what repeats is continued past the end */
    assert_int_equal(lr_ngram_propose(period, 6, 2, 8, 7, out, &match), 7);
    for (int i = 0; i < 7; i++) assert_int_equal(out[i], 1 + i % 3);
}

/* ---- trees ---- */

static void test_tree(void **state)
{
    /* 1 -> 2 -> {3, 4}; 5 -> 6; 1 and its child 2 once more; one that follows itself */
    lr_spec_tree t = {.n = 9, .token = {1, 5, 2, 6, 4, 1, 2, 7, 3}, .parent = {-1, -1, 0, 1, 2, -1, 5, 7, 6}};
    const int32_t token[] = {1, 2, 4, 3, 5, 6};
    const int parent[] = {-1, 0, 1, 1, -1, 4}, depth[] = {1, 2, 3, 3, 1, 2}, run[] = {0, 0, 0, 1, 2, 2};
    lr_spec_tree_order(&t);
    assert_int_equal(t.n, 6);
    assert_memory_equal(t.token, token, sizeof token);
    assert_memory_equal(t.parent, parent, sizeof parent);
    assert_memory_equal(t.depth, depth, sizeof depth);
    assert_memory_equal(t.run, run, sizeof run);
    assert_int_equal(t.n_runs, 3);
    assert_int_equal(t.run_first[1], 3);
    assert_int_equal(t.run_first[2], 4);
    assert_int_equal(t.run_first[3], 6);
    assert_int_equal(lr_spec_tree_child(&t, -1, 5), 4);
    assert_int_equal(lr_spec_tree_child(&t, 1, 3), 3);
    assert_int_equal(lr_spec_tree_child(&t, 1, 6), -1);
    assert_true(lr_spec_tree_above(&t, -1, 3) && lr_spec_tree_above(&t, 1, 3) && !lr_spec_tree_above(&t, 2, 3));
    const int32_t text[] = {1, 2, 9, 1, 2, 8, 1, 2, 8, 7, 1, 2};
    lr_spec_tree grown = {.n = 2, .token = {8, 7}, .parent = {-1, 0}};
    lr_ngram_branches(text, 12, 2, 3, 2, &grown); /* 8 7, 8 1, 9 1 */
    lr_spec_tree_order(&grown);
    const int32_t more[] = {8, 7, 1, 9, 1};
    assert_int_equal(grown.n, 5);
    assert_memory_equal(grown.token, more, sizeof more);
    lr_pace pace = {0};
    lr_pace_odds odds = {0};
    lr_pace_item it = {.odds = &odds, .method = LR_SPEC_NGRAM, .match = 2, .least = 0.15};
    lr_pace_cut(&pace, &it, 2, &grown); /* the draft stays, the others' chances are 0.6 * 0.3 * 0.5, and less */
    assert_int_equal(grown.n, 2);
    for (int i = 0; i < 400; i++) lr_pace_learn_side(&pace, &odds, LR_SPEC_NGRAM, true);
    grown = (lr_spec_tree){.n = 3, .token = {8, 9, 4}, .parent = {-1, -1, -1}};
    lr_pace_cut(&pace, &it, 1, &grown);
    assert_int_equal(grown.n, 2); /* 0.6 * 0.5 pays, half of that does not */
}

static void test_tree_of_guesses(void **state)
{
    const int32_t ids[] = {10, 11, 20, 21};
    const float chance[] = {0.6f, 0.25f, 0.5f, 0.4f};
    const int32_t token[] = {10, 20, 11, 21, 20, 21}; /* 0.6, 0.3, 0.25, 0.24, 0.125, 0.1 */
    const int parent[] = {-1, 0, -1, 0, 2, 2};
    lr_spec_tree t;
    lr_spec_tree_best(&t, ids, chance, 2, 2, 32, 0);
    assert_int_equal(t.n, 6);
    assert_memory_equal(t.token, token, sizeof token);
    assert_memory_equal(t.parent, parent, sizeof parent);
    lr_spec_tree_best(&t, ids, chance, 2, 2, 3, 0);
    assert_int_equal(t.n, 3);
    lr_spec_tree_best(&t, ids, chance, 2, 2, 32, 0.2);
    assert_int_equal(t.n, 4);
    lr_spec_tree_best(&t, ids, chance, 2, 2, 32, 0.7);
    assert_int_equal(t.n, 0);
}

/* The longest suffix of t (n) that ends before n too. */
static int longest(const int32_t *t, int n)
{
    int best = 0;
    for (int e = 1; e < n; e++) {
        int m = 0;
        while (m < e && t[e - 1 - m] == t[n - 1 - m]) m++;
        if (m > best) best = m;
    }
    return best;
}

/* Whether t (n) goes on with out (k) behind an earlier place where its last m tokens stood. */
static bool follows(const int32_t *t, int n, int m, const int32_t *out, int k)
{
    for (int e = m; e < n; e++) {
        if (memcmp(t + e - m, t + n - m, (size_t)m * sizeof *t) != 0) continue;
        int i = 0;
        while (i < k && (e + i < n ? t[e + i] : out[e + i - n]) == out[i]) i++;
        if (i == k) return true;
    }
    return false;
}

static void test_suffix(void **state)
{
    for (int trial = 0; trial < 60; trial++) {
        int32_t t[200], out[8];
        int match, alphabet = 1 + trial % 4;
        lr_suffix *s;
        lr_error err;
        assert_int_equal(lr_suffix_new(&s, 1000, &err), 0);
        for (int n = 0; n < 200; n++) {
            t[n] = (int32_t)fx_rnd((uint32_t)alphabet);
            assert_int_equal(lr_suffix_extend(s, &t[n], 1, &err), 0);
            int want = longest(t, n + 1), got = lr_suffix_propose(s, 1, 8, out, &match);
            assert_int_equal(match, want);
            assert_int_equal(got, want ? 8 : 0);
            if (want) assert_true(follows(t, n + 1, want, out, 8));
        }
        lr_suffix_unref(s);
    }
}

/* A memory of several texts: no proposal crosses from one to the other; the older half goes when it is full. */
static void test_memory(void **state)
{
    const int32_t a[] = {1, 2, 3, 4, 5}, b[] = {7, 3, 4, 9}, ask[] = {8, 8, 3, 4}, twice[] = {2, 3, 4};
    int32_t out[8];
    int match;
    lr_suffix *s;
    lr_error err;
    assert_int_equal(lr_suffix_new(&s, 64, &err), 0);
    assert_int_equal(lr_suffix_extend(s, a, 5, &err), 0);
    assert_int_equal(lr_suffix_end(s, &err), 0);
    assert_int_equal(lr_suffix_extend(s, b, 4, &err), 0);
    assert_int_equal(lr_suffix_end(s, &err), 0);
    assert_int_equal(lr_suffix_end(s, &err), 0);
    lr_suffix_at at = {0};
    lr_suffix_follow(s, &at, ask, 4);
    assert_int_equal(lr_suffix_propose_at(s, &at, 2, 8, out, &match), 1);
    assert_int_equal(match, 2);
    assert_int_equal(out[0], 9); /* the latest; the end of a text ends it */
    lr_suffix_at longer = {0};
    lr_suffix_follow(s, &longer, twice, 3);
    assert_int_equal(lr_suffix_propose_at(s, &longer, 2, 8, out, &match), 1);
    assert_int_equal(match, 3);
    assert_int_equal(out[0], 5);
    assert_int_equal(lr_suffix_propose_at(s, &longer, 4, 8, out, &match), 0);
    for (int i = 0; i < 500; i++) {
        int32_t t = 20 + i;
        assert_int_equal(lr_suffix_extend(s, &t, 1, &err), 0);
        assert_true(lr_suffix_len(s) <= 64);
    }
    assert_int_equal(lr_suffix_propose_at(s, &longer, 1, 8, out, &match), 0); /* of before: no place any more */
    const int32_t late[] = {500};
    lr_suffix_follow(s, &longer, late, 1);
    assert_int_equal(lr_suffix_propose_at(s, &longer, 1, 3, out, &match), 3);
    assert_int_equal(out[0], 501);
    lr_suffix_unref(s);
}

/* ---- judging ---- */

static const double P4[4] = {.5, .3, .2, 0}, Q4[4] = {.1, .1, .3, .5};

/* One place, judged by the rule of lr_sampler_judge, or by a wrong one that draws what was rejected from p. */
static int judge_one(lr_sampler *s, uint64_t place, bool wrong, int *draft)
{
    static const int32_t ids[4] = {0, 1, 2, 3};
    lr_error err;
    float q[4], x[4], logprob;
    double at = 0, u = lr_sample_uniform(99, place, 7);
    *draft = 3;
    for (int i = 3; i >= 0; i--) {
        q[i] = (float)Q4[i];
        x[i] = P4[i] > 0 ? (float)log(P4[i]) : -INFINITY;
    }
    for (int i = 0; i < 4; i++) {
        at += Q4[i];
        if (u < at) {
            *draft = i;
            break;
        }
    }
    lr_sample_ctx ctx = {.seed = 5, .position = place};
    int32_t token;
    assert_int_equal(lr_sampler_judge(s, x, NULL, &ctx, *draft, ids, q, 4, -1, &token, &logprob, NULL, &err), 0);
    if (!wrong || token == *draft) return token;
    for (int i = 0; i < 4; i++) x[i] = P4[i] > 0 ? (float)log(P4[i]) : -INFINITY;
    assert_int_equal(lr_sampler_draw(s, x, NULL, &ctx, -1, &token, &logprob, NULL, &err), 0);
    return token;
}

static void test_judge(void **state)
{
    enum { N = 200000 };
    lr_error err;
    lr_sampler *s;
    lr_stage t = {.kind = LR_STAGE_TEMPERATURE, .a = 1};
    int seen[4] = {0}, rest[4] = {0}, bad[4] = {0}, taken = 0, draft, df;
    assert_int_equal(lr_sampler_new(&s, &t, 1, 5, 4, &err), 0);
    for (int i = 0; i < N; i++) {
        int token = judge_one(s, (uint64_t)i, false, &draft);
        seen[token]++;
        if (token == draft) {
            taken++;
        } else {
            rest[token]++;
        }
        bad[judge_one(s, (uint64_t)i, true, &draft)]++;
    }
    assert_true(chi_square(seen, P4, 4, N, &df) < chi_square_limit(df));
    assert_int_equal(df, 2);
    assert_true(fabs(taken / (double)N - .4) < .005);
    const double r[4] = {2. / 3, 1. / 3, 0, 0};
    assert_true(chi_square(rest, r, 4, N - taken, &df) < chi_square_limit(df));
    assert_true(chi_square(bad, P4, 4, N, &df) > 10 * chi_square_limit(df)); /* the test would tell */
    lr_sampler_free(s);
}

/* Equal distributions: always taken. Nothing in common: never. */
static void test_judge_extremes(void **state)
{
    static const int32_t ids[2] = {0, 1};
    lr_error err;
    lr_sampler *s;
    int32_t token;
    float logprob;
    assert_int_equal(lr_sampler_new(&s, NULL, 0, 5, 4, &err), 0);
    for (int i = 0; i < 2000; i++) {
        float same[4] = {0, 0, -INFINITY, -INFINITY}, other[4] = {-INFINITY, -INFINITY, 0, 0}, q[2] = {.5f, .5f};
        lr_sample_ctx ctx = {.seed = 5, .position = (uint64_t)i};
        assert_int_equal(lr_sampler_judge(s, same, NULL, &ctx, i % 2, ids, q, 2, -1, &token, &logprob, NULL, &err), 0);
        assert_int_equal(token, i % 2);
        assert_int_equal(lr_sampler_judge(s, other, NULL, &ctx, i % 2, ids, q, 2, -1, &token, &logprob, NULL, &err), 0);
        assert_true(token >= 2);
    }
    lr_sampler_free(s);
}

/* ---- vocabularies ---- */

static lr_vocab *some_vocab(int n, int renamed, int bos)
{
    static char text[64][8];
    static lr_str tok[64];
    int32_t types[64];
    float scores[64] = {0};
    for (int i = 0; i < n; i++) {
        snprintf(text[i], sizeof text[i], i == renamed ? "other" : "t%d", i);
        tok[i] = lr_str_of(text[i]);
        types[i] = i < 3 ? LR_TT_CONTROL : LR_TT_NORMAL;
    }
    lr_vocab_spec spec = {.model = "llama",
                          .n_tokens = (uint32_t)n,
                          .tokens = tok,
                          .scores = scores,
                          .types = types,
                          .bos = bos,
                          .eos = 2,
                          .unk = 0,
                          .eot = -1,
                          .pad = -1};
    lr_vocab *v;
    lr_error err;
    if (lr_vocab_new(&v, &spec, &err)) fail_msg("%s", err.text);
    return v;
}

static int check_vocab(lr_vocab *a, lr_vocab *b, int *common, lr_error *err)
{
    lr_model *m[2];
    lr_vocab *v[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        lr_scripted_config c = {.n_vocab = (int)lr_vocab_size(v[i]), .n_ctx = 8, .next = fx_next, .vocab = v[i]};
        if (lr_scripted_new(&m[i], &c, err)) fail_msg("%s", err->text);
    }
    int rc = lr_spec_check_vocab(m[0], m[1], common, err);
    for (int i = 0; i < 2; i++) {
        lr_model_free(m[i]);
        lr_vocab_unref(v[i]);
    }
    return rc;
}

static void test_vocab(void **state)
{
    lr_error err;
    int n;
    assert_int_equal(check_vocab(some_vocab(40, -1, 1), some_vocab(40, -1, 1), &n, &err), 0);
    assert_int_equal(n, 40);
    assert_int_equal(check_vocab(some_vocab(40, -1, 1), some_vocab(43, -1, 1), &n, &err), 0);
    assert_int_equal(n, 40);
    assert_int_equal(check_vocab(some_vocab(40, -1, 1), some_vocab(37, -1, 1), &n, &err), 0);
    assert_int_equal(n, 37);
    assert_int_equal(check_vocab(some_vocab(40, -1, 1), some_vocab(40, 20, 1), &n, &err), LR_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "token 20 is 'other' there and 't20' here"));
    assert_int_equal(check_vocab(some_vocab(40, -1, 1), some_vocab(40, -1, 3), &n, &err), LR_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "beginning-of-text token is 3, the model's 1"));
}

/* ---- how many pay ---- */

static int chosen(lr_pace *p, int n, int rows, double a, lr_spec_method m)
{
    static lr_pace_odds odds[64];
    lr_pace_item items[64];
    int k = 0;
    for (int round = 0; round < 5; round++) { /* what does not seem to pay may be tried for a few steps */
        memset(odds, 0, sizeof odds);
        for (int i = 0; i < n; i++) {
            odds[i].at[m][2].right = odds[i].at[m][0].right = (float)(a * 1000);
            odds[i].at[m][2].tried = odds[i].at[m][0].tried = 1000;
            items[i] = (lr_pace_item){.odds = &odds[i], .method = m, .match = 8, .most = 12, .remaining = 100};
        }
        lr_pace_choose(p, items, n, rows, 0, 64);
        k = 0;
        for (int i = 0; i < n; i++) k += items[i].k;
    }
    return k;
}

static void test_pace(void **state)
{
    lr_pace cheap = {0}, dear = {0};
    for (int i = 0; i < 10; i++) {
        for (int r = 1; r <= 64; r++) {
            lr_pace_saw_step(&cheap, r, 0.040 * (1 + 0.05 * (r - 1)));
            lr_pace_saw_step(&dear, r, 0.040 * r);
            lr_pace_saw_pass(&cheap, LR_SPEC_DRAFT, r, r, 0.015);
            lr_pace_saw_pass(&dear, LR_SPEC_DRAFT, r, r, 0.015);
        }
    }
    int sure = chosen(&cheap, 1, 1, .95, LR_SPEC_NGRAM), unsure = chosen(&cheap, 1, 1, .5, LR_SPEC_NGRAM);
    assert_true(sure >= 8 && unsure >= 1 && unsure < sure);
    assert_int_equal(chosen(&cheap, 1, 1, .02, LR_SPEC_NGRAM), 0);
    assert_int_equal(chosen(&dear, 1, 1, .9, LR_SPEC_NGRAM), 0); /* a row costs as much as a token is worth */
    assert_true(chosen(&cheap, 1, 1, .9, LR_SPEC_DRAFT) > 0);
    assert_int_equal(chosen(&cheap, 1, 1, .3, LR_SPEC_DRAFT), 0); /* a pass costs more */
    assert_int_equal(chosen(&dear, 32, 32, .9, LR_SPEC_DRAFT), 0);
    assert_true(lr_pace_step_time(&cheap, 2) > 0.0419 && lr_pace_step_time(&cheap, 2) < 0.0421);
    lr_pace two = {0};
    for (int i = 0; i < 2; i++) {
        lr_pace_saw_step(&two, 1, 1);
        lr_pace_saw_step(&two, 5, 2);
    }
    lr_pace_saw_step(&two, 3, 50); /* once is never */
    assert_true(fabs(lr_pace_step_time(&two, 3) - 1.5) < 1e-9);
    assert_true(lr_pace_step_time(&(lr_pace){0}, 3) == 0);
}

/* What a draft model must catch up with is begun where the batch is whole, and what was begun is finished. */
static void test_catching_up(void **state)
{
    lr_pace p = {0};
    lr_pace_odds odds = {0}, other = {0};
    for (int i = 0; i < 10; i++)
        for (int r = 1; r <= 64; r++) {
            lr_pace_saw_step(&p, r, 0.040 * (1 + 0.05 * (r - 1)));
            lr_pace_saw_pass(&p, LR_SPEC_DRAFT, r, r, 0.005);
        }
    lr_pace_item it = {.odds = &odds, .method = LR_SPEC_DRAFT, .most = 8, .remaining = 100, .behind = 270};
    lr_pace_choose(&p, &it, 1, 200, 0, 64);
    assert_int_equal(it.k, 0); /* beside a prompt */
    assert_int_equal(odds.granted, 0);
    lr_pace_choose(&p, &it, 1, 1, 0, 64);
    assert_true(it.k > 0 && odds.granted >= 270);
    p.account[LR_SPEC_DRAFT][0].credit = -5; /* a part of the prompt has cost it */
    p.account[LR_SPEC_DRAFT][0].lent = 8;
    it.behind = 15;
    it.most = 8;
    lr_pace_choose(&p, &it, 1, 1, 0, 64);
    assert_true(it.k > 0);
    it.odds = &other;
    lr_pace_choose(&p, &it, 1, 1, 0, 64);
    assert_int_equal(it.k, 0);
}

/* To a request by itself what its draft must catch up with is lent, if it may generate enough to pay that back. */
static void test_loan(void **state)
{
    const struct {
        int behind, remaining, others;
        bool pays;
    } cases[] = {{270, 256, 0, true}, {270, 40, 0, false}, {270, 256, 3, false}, {5000, 256, 0, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lr_pace p = {0};
        lr_pace_odds odds = {0};
        const int n = 1 + cases[i].others;
        lr_pace_settle(&p, &(lr_pace_step){.rows = 256, .seconds = 1.3}); /* a prompt */
        for (int j = 0; j < 8; j++) lr_pace_saw_step(&p, 1 + j % 4, 0.030 * (1 + 0.05 * (j % 4)));
        lr_pace_item it = {.odds = &odds,
                           .method = LR_SPEC_DRAFT,
                           .most = 8,
                           .remaining = cases[i].remaining,
                           .behind = cases[i].behind};
        lr_pace_choose(&p, &it, 1, n, cases[i].others, 64);
        assert_int_equal(it.k > 0, cases[i].pays);
        assert_int_equal(odds.granted > 0, cases[i].pays);
    }
}

/* What a prompt's rows took says nothing of a pass of one: a draft that has caught up goes on. */
static void test_first_pass(void **state)
{
    lr_pace p = {0};
    lr_pace_saw_step(&p, 1, 0.030);
    const double guess = lr_pace_pass_time(&p, LR_SPEC_DRAFT, 1);
    assert_true(guess > 0 && guess < 0.015);
    lr_pace_saw_pass(&p, LR_SPEC_DRAFT, 256, 0, 0.300);
    assert_true(lr_pace_pass_time(&p, LR_SPEC_DRAFT, 1) <= guess);
    for (int i = 0; i < 2; i++) lr_pace_saw_pass(&p, LR_SPEC_DRAFT, 1, 1, 0.020);
    assert_true(fabs(lr_pace_pass_time(&p, LR_SPEC_DRAFT, 1) - 0.020) < 1e-6);
}

/* Drafts that are never right cost next to nothing: they are tried more and more seldom. */
static void test_pace_gives_up(void **state)
{
    lr_pace p = {0};
    lr_pace_odds odds = {0};
    int drafted = 0;
    for (int i = 0; i < 1000; i++) {
        lr_pace_saw_step(&p, 1, 0.040);
        lr_pace_saw_step(&p, 2, 0.046);
        lr_pace_item it = {.odds = &odds, .method = LR_SPEC_NGRAM, .match = 8, .most = 12, .remaining = 100};
        lr_pace_choose(&p, &it, 1, 1, 0, 64);
        drafted += it.k;
        if (it.k) lr_pace_learn(&p, &odds, LR_SPEC_NGRAM, 8, 1, 0);
    }
    assert_true(drafted > 0 && drafted < 120);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ngram),          cmocka_unit_test(test_tree),   cmocka_unit_test(test_tree_of_guesses),
        cmocka_unit_test(test_suffix),         cmocka_unit_test(test_memory), cmocka_unit_test(test_judge),
        cmocka_unit_test(test_judge_extremes), cmocka_unit_test(test_vocab),  cmocka_unit_test(test_pace),
        cmocka_unit_test(test_catching_up),    cmocka_unit_test(test_loan),   cmocka_unit_test(test_first_pass),
        cmocka_unit_test(test_pace_gives_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
