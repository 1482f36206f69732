/* test_spec.c - speculation: what proposes drafts, how they are judged, and that nobody can tell from the tokens. */
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

/* Upper 0.1 % points of chi-square for 1 .. 80 degrees of freedom (Wilson and Hilferty's approximation). */
static double limit(int df)
{
    double z = 3.0902, v = 2.0 / (9.0 * df), c = 1 - v + z * sqrt(v);
    return df * c * c * c;
}

static double chi_square(const int *seen, const double *p, int cells, int n, int *df)
{
    double x = 0;
    *df = -1;
    for (int i = 0; i < cells; i++) {
        double want = p[i] * n;
        if (p[i] <= 0) assert_int_equal(seen[i], 0);
        if (p[i] <= 0) continue;
        x += (seen[i] - want) * (seen[i] - want) / want;
        ++*df;
    }
    return x;
}

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
    assert_true(chi_square(seen, P4, 4, N, &df) < limit(df));
    assert_int_equal(df, 2);
    assert_true(fabs(taken / (double)N - .4) < .005);
    const double r[4] = {2. / 3, 1. / 3, 0, 0};
    assert_true(chi_square(rest, r, 4, N - taken, &df) < limit(df));
    assert_true(chi_square(bad, P4, 4, N, &df) > 10 * limit(df)); /* the test would tell */
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

/* ---- whole engines ---- */

/* Drafts that are right, wrong, cut short, or nonsense, at random. */
static int mad_choose(void *user, lr_request *r, lr_spec_choice *c, lr_error *err)
{
    lr_seq *q = lr_request_info(r)->seq;
    int n = (int)lr_seq_len(q);
    int32_t t[600];
    lr_scripted_next next = fx_next;
    assert_true(c->most >= 1 && c->most <= LR_SPEC_MAX && c->batch >= 1);
    switch (fx_rnd(5)) {
    case 0:
        c->method = fx_rnd(2) ? LR_SPEC_NGRAM : LR_SPEC_SUFFIX;
        c->k = (int)fx_rnd(9);
        return 0;
    case 1:
        c->method = LR_SPEC_DRAFT;
        c->k = (int)fx_rnd(9);
        return 0;
    case 2:
        c->method = LR_SPEC_OFF;
        return 0;
    default:
        c->method = LR_SPEC_GIVEN;
        memcpy(t, lr_seq_tokens(q), (size_t)n * sizeof *t);
        c->k = c->n = fx_reference(next, user, t, n, 1 + (int)fx_rnd(12));
        memcpy(c->tokens, t + n, (size_t)c->n * sizeof *t);
        if (c->n && fx_rnd(2)) c->tokens[fx_rnd((uint32_t)c->n)] = (int32_t)fx_rnd(FX_VOCAB + 4) - 2;
        return 0;
    }
}

/* A model that is right most of the time. */
static int nearly(void *user, const int32_t *tokens, int n, float *logits)
{
    fx_next(user, tokens, n, logits);
    if ((n * 7 + tokens[n - 1]) % 5 == 0) logits[(n * 11) % FX_VOCAB] += 1e3f;
    return 0;
}

static lr_request *speculate(lr_engine *e, lr_seq *s, int max, const lr_spec_params *sp, lr_sampler *sampler)
{
    lr_request *r;
    lr_error err;
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    p.max_tokens = max;
    p.spec = sp;
    p.sampler = sampler;
    if (lr_request_new(e, s, &p, &r, &err)) fail_msg("%s", err.text);
    return r;
}

static void set_draft(lr_engine *e, lr_scripted_next next, int blocks)
{
    lr_error err;
    lr_draft_config c = {.kv_blocks = blocks};
    if (lr_engine_set_draft(e, fx_model(next, NULL, 512, 0), &c, &err)) fail_msg("%s", err.text);
}

/* Whatever is drafted, however the steps go: the tokens are those of the model alone. */
static void test_identity(void **state)
{
    enum { CLIENTS = 6, TRIALS = 40 };
    uint64_t accepted = 0, drafted = 0, preempted = 0;
    for (int trial = 0; trial < TRIALS; trial++) {
        lr_engine_config cfg = lr_engine_defaults();
        cfg.block_size = 1 + (int)fx_rnd(5);
        cfg.kv_blocks[0] = 260 / cfg.block_size;
        cfg.kv_blocks[1] = trial % 3 == 0 ? 260 / cfg.block_size : 0;
        cfg.max_batch_tokens = 8 + (int)fx_rnd(60);
        cfg.max_seqs = 2 + (int)fx_rnd(5);
        cfg.prefix_cache = fx_rnd(2);
        cfg.preempt = fx_rnd(2) ? LR_PREEMPT_SWAP : LR_PREEMPT_RECOMPUTE;
        lr_engine *e = fx_engine(&cfg, fx_next, NULL, 512, trial % 3 == 0 ? 24 : 0);
        set_draft(e, nearly, trial % 2 ? 0 : 100 / cfg.block_size);
        lr_spec_params sp = lr_spec_defaults(LR_SPEC_NGRAM);
        sp.choose = mad_choose;
        lr_request *r[CLIENTS];
        lr_seq *s[CLIENTS], *f[CLIENTS] = {0};
        int32_t want[CLIENTS][256];
        int n[CLIENTS];
        for (int i = 0; i < CLIENTS; i++) {
            int len = 2 + (int)fx_rnd(40), max = 1 + (int)fx_rnd(60);
            for (int k = 0; k < len; k++) want[i][k] = 3 + (int32_t)fx_rnd(FX_VOCAB - 3);
            s[i] = fx_seq(e, want[i], len);
            r[i] = speculate(e, s[i], max, fx_rnd(6) ? &sp : NULL, NULL);
            n[i] = len + fx_reference(fx_next, NULL, want[i], len, max);
            if (fx_rnd(3) == 0) lr_request_inject(r[i], fx_rnd(2) ? LR_FAULT_PREEMPT : LR_FAULT_SWAP, (int)fx_rnd(8));
        }
        lr_error err;
        for (int step = 0; lr_engine_busy(e); step++) {
            if (lr_engine_step(e, &err) < 0) fail_msg("%s", err.text);
            fx_check(e);
            int i = (int)fx_rnd(CLIENTS);
            if (!f[i] && fx_rnd(8) == 0) assert_int_equal(lr_seq_fork(s[i], &f[i], &err), 0);
            assert_true(step < 5000);
        }
        for (int i = 0; i < CLIENTS; i++) {
            const lr_req_info *in = lr_request_info(r[i]);
            if (in->state != LR_REQ_DONE) fail_msg("%s", in->error.text);
            assert_int_equal(lr_seq_len(s[i]), n[i]);
            assert_memory_equal(lr_seq_tokens(s[i]), want[i], (size_t)n[i] * sizeof(int32_t));
            if (f[i]) { /* the fork goes on as its original did */
                int at = (int)lr_seq_len(f[i]);
                assert_memory_equal(lr_seq_tokens(f[i]), want[i], (size_t)at * sizeof(int32_t));
                if (at < n[i]) {
                    lr_request *g = speculate(e, f[i], n[i] - at, &sp, NULL);
                    fx_run(e);
                    fx_check(e);
                    assert_memory_equal(lr_seq_tokens(f[i]), want[i], (size_t)n[i] * sizeof(int32_t));
                    lr_request_free(g);
                }
            }
            accepted += in->spec.accepted;
            drafted += in->spec.drafted;
            preempted += (uint64_t)in->n_preempted;
            lr_request_free(r[i]);
        }
        lr_engine_free(e);
    }
    assert_true(accepted > 500 && drafted > accepted + 500 && preempted > 10);
}

/* ---- distributions ---- */

enum { CELLS_VOCAB = 4, PLACES = 3, CELLS = 64 };

/* Four tokens (3, 4, 5, 6) that depend on the last two. */
static int four(const int32_t *tokens, int n, float *logits, int salt)
{
    for (int i = 0; i < FX_VOCAB; i++) logits[i] = -INFINITY;
    for (int i = 0; i < CELLS_VOCAB; i++) {
        uint32_t h = (uint32_t)(tokens[n - 1] * 31 + (n > 1 ? tokens[n - 2] : 0) * 17 + i * 101 + salt) * 2654435761u;
        logits[3 + i] = (float)(h >> 20) / 2048.0f;
    }
    return 0;
}

static int four_target(void *user, const int32_t *tokens, int n, float *logits) { return four(tokens, n, logits, 0); }
static int four_draft(void *user, const int32_t *tokens, int n, float *logits) { return four(tokens, n, logits, 5); }

/* Probability of each run of three tokens behind `prompt`, by the chain alone. */
static void exact(lr_sampler *s, double *p)
{
    int32_t t[2 + PLACES] = {1, 3}, ids[8];
    float x[FX_VOCAB], q[8];
    lr_error err;
    for (int cell = 0; cell < CELLS; cell++) {
        p[cell] = 1;
        for (int k = 0; k < PLACES; k++) {
            size_t n;
            four(t, 2 + k, x, 0);
            lr_sample_ctx ctx = {.prompt = t, .n_prompt = 2, .generated = t + 2, .n_generated = (size_t)k};
            assert_int_equal(lr_sampler_probs(s, x, NULL, &ctx, ids, q, 8, &n, &err), 0);
            int id = 3 + (cell >> (2 * k) & 3);
            double pk = 0;
            for (size_t i = 0; i < n; i++)
                if (ids[i] == id) pk = (double)q[i];
            p[cell] *= pk;
            t[2 + k] = id;
        }
    }
}

/* A wrong way: what is rejected is simply drawn anew, in a test of its own so that its failure is seen. */
static int given_bad(void *user, lr_request *r, lr_spec_choice *c, lr_error *err)
{
    c->method = LR_SPEC_GIVEN;
    c->k = c->n = *(int *)user;
    for (int i = 0; i < c->n; i++) c->tokens[i] = 3 + (int32_t)(lr_request_info(r)->id + (uint64_t)i) % 4;
    return 0;
}

static void count(lr_request *r, int *seen)
{
    size_t n;
    const lr_token_rec *rec = lr_request_tokens(r, &n);
    if (lr_request_info(r)->state != LR_REQ_DONE) fail_msg("%s", lr_request_info(r)->error.text);
    assert_int_equal(n, PLACES);
    int cell = 0;
    for (int k = 0; k < PLACES; k++) cell |= (rec[k].id - 3) << (2 * k);
    seen[cell]++;
}

/* Many seeded runs of three tokens: their counts against the exact probabilities. */
static void run_many(lr_engine *e, const lr_stage *stages, size_t n_stages, const lr_spec_params *sp, int runs,
                     uint64_t *accepted)
{
    int seen[CELLS] = {0}, df;
    double p[CELLS];
    lr_error err;
    lr_sampler *s;
    lr_request *r[16];
    assert_int_equal(lr_sampler_new(&s, stages, n_stages, 0, FX_VOCAB, &err), 0);
    exact(s, p);
    lr_sampler_free(s);
    for (int run = 0; run < runs; run += 16) {
        for (int i = 0; i < 16; i++) {
            const int32_t prompt[2] = {1, 3};
            assert_int_equal(lr_sampler_new(&s, stages, n_stages, (uint64_t)(run + i) * 77 + 1, FX_VOCAB, &err), 0);
            lr_seq *q = fx_seq(e, prompt, 2);
            lr_req_params rp = lr_req_defaults(LR_REQ_GENERATE);
            rp.max_tokens = PLACES;
            rp.sampler = s;
            rp.spec = sp;
            rp.free_seq = true;
            if (lr_request_new(e, q, &rp, &r[i], &err)) fail_msg("%s", err.text);
        }
        fx_run(e);
        for (int i = 0; i < 16; i++) {
            count(r[i], seen);
            *accepted += lr_request_info(r[i])->spec.accepted;
            lr_request_free(r[i]);
        }
    }
    double x = chi_square(seen, p, CELLS, runs, &df);
    if (x >= limit(df)) fail_msg("chi-square %.1f with %d degrees of freedom", x, df);
}

static void test_distribution(void **state)
{
    const lr_stage plain[] = {{.kind = LR_STAGE_TEMPERATURE, .a = 1}},
                   filtered[] = {{.kind = LR_STAGE_PENALTIES, .repetition = 1.3f, .presence = .5f, .frequency = .2f},
                                 {.kind = LR_STAGE_TEMPERATURE, .a = 1.4f},
                                 {.kind = LR_STAGE_TOP_P, .a = .95f}};
    const struct {
        lr_spec_method method;
        int k;
        bool distribution;
    } how[] = {{LR_SPEC_DRAFT, 1, true},  {LR_SPEC_DRAFT, 2, true},  {LR_SPEC_DRAFT, 5, true},
               {LR_SPEC_DRAFT, 5, false}, {LR_SPEC_GIVEN, 2, false}, {LR_SPEC_NGRAM, 4, false},
               {LR_SPEC_SUFFIX, 4, false}};
    for (size_t i = 0; i < sizeof how / sizeof *how; i++) {
        lr_engine *e = fx_engine(NULL, four_target, NULL, 64, 0);
        set_draft(e, four_draft, 0);
        lr_spec_params sp = lr_spec_defaults(how[i].method);
        int k = how[i].k;
        sp.k = k;
        sp.fixed = true;
        sp.min_match = 1;
        sp.distribution = how[i].distribution;
        if (how[i].method == LR_SPEC_GIVEN) {
            sp.choose = given_bad;
            sp.user = &k;
        }
        uint64_t accepted = 0;
        run_many(e, plain, 1, &sp, 8000, &accepted);
        run_many(e, filtered, 3, &sp, 8000, &accepted);
        if (how[i].method != LR_SPEC_NGRAM && how[i].method != LR_SPEC_SUFFIX) assert_true(accepted > 1000);
        lr_engine_free(e);
    }
}

/* Without `distribution`, the same seed gives the same text, sampled or not. */
static void test_same_text(void **state)
{
    const lr_stage hot[] = {{.kind = LR_STAGE_PENALTIES, .repetition = 1.1f, .presence = .2f},
                            {.kind = LR_STAGE_TEMPERATURE, .a = 1.5f},
                            {.kind = LR_STAGE_MIROSTAT_2, .a = 3, .b = .1f}};
    lr_error err;
    for (int seed = 0; seed < 30; seed++) {
        int32_t text[2][80];
        for (int with = 0; with < 2; with++) {
            const int32_t prompt[3] = {1, 3 + seed % 5, 4};
            lr_engine *e = fx_engine(NULL, fx_next, NULL, 128, 0);
            lr_sampler *s;
            lr_spec_params sp = lr_spec_defaults(LR_SPEC_DRAFT);
            sp.choose = mad_choose;
            set_draft(e, nearly, 0);
            assert_int_equal(lr_sampler_new(&s, hot, 3, (uint64_t)seed, FX_VOCAB, &err), 0);
            lr_seq *q = fx_seq(e, prompt, 3);
            lr_request *r = speculate(e, q, 70, with ? &sp : NULL, s);
            fx_run(e);
            size_t n = lr_seq_len(q);
            memset(text[with], 0, sizeof text[with]);
            memcpy(text[with], lr_seq_tokens(q), n * sizeof(int32_t));
            lr_request_free(r);
            lr_engine_free(e);
        }
        assert_memory_equal(text[0], text[1], sizeof text[0]);
    }
}

/* ---- a draft model that fails, is closed in use, or has no room ---- */

static int broken(void *user, const int32_t *tokens, int n, float *logits)
{
    nearly(user, tokens, n, logits);
    return n % 3 == 0 ? -1 : 0;
}

static void test_trouble(void **state)
{
    for (int kind = 0; kind < 2; kind++) {
        lr_engine *e = fx_engine(NULL, fx_next, NULL, 256, 0);
        lr_error err;
        lr_spec_params sp = lr_spec_defaults(LR_SPEC_DRAFT);
        sp.fixed = true;
        sp.k = 4;
        lr_request *none;
        lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
        int32_t want[2][200] = {{1, 5, 6}, {1, 7, 8}};
        lr_seq *q[2] = {fx_seq(e, want[0], 3), fx_seq(e, want[1], 3)};
        p.spec = &sp;
        assert_int_equal(lr_request_new(e, q[0], &p, &none, &err), LR_EINVAL); /* there is no draft model */
        assert_non_null(strstr(err.text, "without a draft model"));
        set_draft(e, kind ? nearly : broken, kind ? 1 : 0); /* one block: room for next to nothing */
        sp.k = 99;
        assert_int_equal(lr_request_new(e, q[0], &p, &none, &err), LR_EINVAL);
        sp.k = 4;
        lr_request *r[2];
        for (int i = 0; i < 2; i++) r[i] = speculate(e, q[i], 60, &sp, NULL);
        fx_run(e);
        fx_check(e);
        for (int i = 0; i < 2; i++) {
            int n = 3 + fx_reference(fx_next, NULL, want[i], 3, 60);
            assert_int_equal(lr_request_info(r[i])->state, LR_REQ_DONE);
            assert_int_equal(lr_seq_len(q[i]), n);
            assert_memory_equal(lr_seq_tokens(q[i]), want[i], (size_t)n * sizeof(int32_t));
            lr_request_free(r[i]);
        }
        lr_engine_free(e);
    }
}

/* ---- branches ---- */

/* The rows of a draft that branches are counted once, however many sequences they stand in. */
static void test_branches_counted(void **state)
{
    lr_error err;
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 512, 0);
    lr_spec_params sp = lr_spec_defaults(LR_SPEC_NGRAM);
    int32_t t[64];
    uint64_t before = 0;
    bool branched = false;
    for (int i = 0; i < 64; i++) t[i] = 3 + (i * i / 5) % 7;
    sp.fixed = true;
    sp.min_match = 1;
    sp.k = 3;
    sp.branches = 3;
    lr_seq *q = fx_seq(e, t, 64);
    lr_request *r = speculate(e, q, 40, &sp, NULL);
    while (lr_request_info(r)->state != LR_REQ_DONE) {
        if (lr_engine_step(e, &err) < 0) fail_msg("%s", err.text);
        const lr_spec_stats *s = &lr_request_info(r)->spec;
        assert_int_equal(e->spec->made.drafts, s->drafted - before);
        branched = branched || s->drafted - before > 3;
        before = s->drafted;
    }
    assert_true(branched);
    lr_request_free(r);
    lr_seq_free(q);
    lr_engine_free(e);
}

/* ---- beginnings ---- */

static lr_model_ops counting;
static const lr_model_ops *counted;
static int draft_rows;

static int count_rows(lr_model *m, const lr_batch *b, lr_error *err)
{
    draft_rows += b->n_rows;
    return counted->forward(m, b, err);
}

/* A draft model catches up with what others of its namespace did not compute. */
static void test_beginnings(void **state)
{
    enum { SAME = 100, ALL = 110 };
    int rows[4];
    lr_error err;
    lr_draft_config c = {0};
    lr_engine *e = fx_engine(NULL, fx_next, NULL, 512, 0);
    lr_model *m = fx_model(nearly, NULL, 512, 0);
    lr_spec_params sp = lr_spec_defaults(LR_SPEC_DRAFT);
    counted = m->ops;
    counting = *m->ops;
    counting.forward = count_rows;
    m->ops = &counting;
    sp.fixed = true;
    sp.k = 2;
    if (lr_engine_set_draft(e, m, &c, &err)) fail_msg("%s", err.text);
    for (int round = 0; round < 4; round++) {
        lr_seq_config sc = {.salt = round == 2 ? LR_STR("other") : (lr_str){NULL, 0}};
        int32_t t[ALL + 20];
        lr_seq *q;
        for (int i = 0; i < ALL; i++) t[i] = 3 + (i * i + (i < SAME ? 0 : round)) % 40;
        if (lr_seq_new(e, &sc, &q, &err) || lr_seq_append(q, t, ALL, &err)) fail_msg("%s", err.text);
        lr_request *r = speculate(e, q, 10, &sp, NULL);
        draft_rows = 0;
        fx_run(e);
        rows[round] = draft_rows;
        fx_check(e);
        assert_int_equal(fx_reference(fx_next, NULL, t, ALL, 10), 10);
        assert_memory_equal(lr_seq_tokens(q), t, sizeof(int32_t) * (ALL + 10));
        lr_request_free(r);
        lr_seq_free(q);
    }
    assert_true(rows[0] >= ALL && rows[2] >= ALL);
    assert_true(rows[1] < ALL - SAME + 40 && rows[3] < ALL - SAME + 40);
    for (int i = 0; i < 30; i++) { /* more than are kept */
        int32_t t[20];
        for (int j = 0; j < 20; j++) t[j] = 3 + (i * 7 + j) % 40;
        lr_seq *q = fx_seq(e, t, 20);
        lr_request *r = speculate(e, q, 4, &sp, NULL);
        fx_run(e);
        lr_request_free(r);
        lr_seq_free(q);
    }
    fx_check(e);
    lr_engine_free(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tree),        cmocka_unit_test(test_tree_of_guesses),
        cmocka_unit_test(test_ngram),       cmocka_unit_test(test_suffix),
        cmocka_unit_test(test_memory),      cmocka_unit_test(test_judge),
        cmocka_unit_test(test_vocab),       cmocka_unit_test(test_judge_extremes),
        cmocka_unit_test(test_pace),        cmocka_unit_test(test_trouble),
        cmocka_unit_test(test_identity),    cmocka_unit_test(test_pace_gives_up),
        cmocka_unit_test(test_same_text),   cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_beginnings),  cmocka_unit_test(test_branches_counted),
        cmocka_unit_test(test_catching_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
