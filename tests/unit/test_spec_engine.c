/* test_spec_engine.c - speculation in whole engines: nobody can tell from the tokens. */
#include "chi_square.h"
#include "engine_fixture.h"
#include "engine/speculate_int.h"
#include "sample/sample.h"

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
    if (x >= chi_square_limit(df)) fail_msg("chi-square %.1f with %d degrees of freedom", x, df);
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
        cmocka_unit_test(test_identity), cmocka_unit_test(test_distribution),     cmocka_unit_test(test_same_text),
        cmocka_unit_test(test_trouble),  cmocka_unit_test(test_branches_counted), cmocka_unit_test(test_beginnings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
