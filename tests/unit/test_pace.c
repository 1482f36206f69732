/* test_pace.c - the built-in policy of drafts never costs much: whole engines on a clock of their own, on which steps
 * and draft passes take what a simulated model's costs say, disturbed in many ways.
 *
 * The policy sees disturbed times; what counts is the undisturbed time that the same number of tokens took.
 */
#include "engine_fixture.h"
#include "engine/speculate.h"
#include "model/simulated.h"

enum { PROMPT = 24, LENGTH = 160 };

/* ---- a clock, and what disturbs it ---- */

enum { CALM, JITTER, SPIKES, BURSTS, DRIFT, COARSE, DISTURBANCES };
static const char *const DISTURBED[] = {"calm", "jitter", "spikes", "bursts", "drift", "coarse"};

static struct {
    int kind;
    uint32_t seed;
    double seen, spent; /* the disturbed clock, and time as it would be without */
    int passes;
    double hidden; /* part of a step that drafts cost beside passes and rows */
    const lr_model *costs[2];
} world;

static double chance(void)
{
    world.seed = world.seed * 1664525u + 1013904223u;
    return (double)(world.seed >> 8) / (1 << 24);
}

static double now(void *user) { return world.kind == COARSE ? floor(world.seen / 0.004) * 0.004 : world.seen; }

static void pass_time(double t)
{
    double by = 1;
    world.passes++;
    switch (world.kind) {
    case JITTER:
        by = exp(0.2 * (chance() + chance() + chance() + chance() - 2));
        break;
    case SPIKES:
        by = chance() < 0.04 ? 6 : 1;
        break;
    case BURSTS: /* another job, of half a second to eight */
        by = fmod(world.seen, 11) < 4 || fmod(world.seen, 3.1) < 0.5 ? 2 : 1;
        break;
    case DRIFT:
        by = 1.5 + 0.5 * sin(world.seen / 4);
        break;
    default:
        break;
    }
    world.spent += t;
    world.seen += t * by;
}

/* ---- models whose passes take time ---- */

static lr_model_ops timed[2];
static const lr_model_ops *plain_ops;

static int run(lr_model *m, const lr_batch *b, lr_error *err)
{
    int which = m->ops == &timed[1];
    lr_sim_load load = {.rows = b->n_rows, .seqs = b->n_seqs, .outs = b->n_out};
    double t = lr_simulated_seconds(world.costs[which], &load);
    if (which == 0 && b->n_rows > b->n_seqs && b->n_out == b->n_rows) t *= 1 + world.hidden;
    pass_time(t);
    return plain_ops->forward(m, b, err);
}

static lr_model *with_time(lr_model *m, int which)
{
    plain_ops = m->ops;
    timed[which] = *m->ops;
    timed[which].forward = run;
    m->ops = &timed[which];
    return m;
}

typedef struct machine {
    const char *name;
    int rows[6];
    double seconds[6], draft; /* draft: of a step */
} machine;

static const machine MACHINES[] = {
    {"memory-bound", {1, 2, 4, 8, 32, 128}, {.060, .063, .074, .100, .290, 1.10}, 0.35},
    {"rows in groups of 16", {1, 4, 16, 32, 64, 128}, {.060, .070, .080, .150, .290, .570}, 0.35},
    {"rows are free", {1, 8, 32, 64, 96, 128}, {.010, .0102, .011, .012, .0135, .015}, 0.15},
    {"rows are dear", {1, 2, 4, 8, 32, 128}, {.020, .040, .080, .160, .640, 2.56}, 0.3},
};

static lr_model *simulated(const machine *x, double by)
{
    lr_model *m;
    lr_error err;
    lr_vocab *v = fx_vocab();
    lr_kv_spec spec = {.block_size = 16, .n_blocks = {4}};
    lr_sim_config c = {.n_ctx = 64, .token_bytes = 1, .vocab = v, .cost = {.n_points = 6}};
    for (int i = 0; i < 6; i++) {
        c.cost.rows[i] = x->rows[i];
        c.cost.seconds[i] = x->seconds[i] * by;
    }
    assert_int_equal(lr_simulated_new(&m, &c, &err), 0);
    assert_int_equal(m->ops->start(m, &spec, 1024, 1024, &err), 0);
    lr_vocab_unref(v);
    return m;
}

/* ---- texts, and who guesses them ---- */

typedef struct guesser {
    const char *name;
    double right, other; /* chance of a guess, and of one in every other stretch of 100 tokens */
    double sure;         /* what it gives itself; 0 = that chance */
    bool halves;         /* of the texts one half is guessed with `right`, the other with `other` */
} guesser;

static const guesser GUESSERS[] = {
    {"good", .9, .9, 0, false},      {"fair", .7, .7, 0, false},           {"poor", .35, .35, 0, false},
    {"blind", .03, .03, .95, false}, {"by stretches", .93, .1, .9, false}, {"half of the texts", .93, .1, .9, true},
};
static const guesser *guess;

enum { N_MACHINES = sizeof MACHINES / sizeof *MACHINES, N_GUESSERS = sizeof GUESSERS / sizeof *GUESSERS };

static int32_t truth(const int32_t *t, int n)
{
    return 3 +
           (int32_t)(fx_mix(fx_mix((uint64_t)t[0] + 1, (uint64_t)t[n - 1] + 9), (uint64_t)n) >> 40) % (FX_VOCAB - 3);
}

static int say(void *user, const int32_t *t, int n, float *logits)
{
    logits[truth(t, n)] = 20;
    return 0;
}

static double odds_at(const int32_t *t, int n)
{
    bool other = guess->halves ? t[1] % 2 : n / 100 % 2;
    return other ? guess->other : guess->right;
}

static int32_t guessed(const int32_t *t, int n)
{
    double u = (double)(fx_mix(fx_mix((uint64_t)t[n - 1] + 5, (uint64_t)n), (uint64_t)t[2]) >> 40) / (1 << 24);
    int32_t right = truth(t, n);
    return u < odds_at(t, n) ? right : 3 + (right - 3 + 7) % (FX_VOCAB - 3);
}

static int draft(void *user, const int32_t *t, int n, float *logits)
{
    double p = guess->sure > 0 ? guess->sure : odds_at(t, n);
    logits[guessed(t, n)] = (float)log(p / (1 - p) * (FX_VOCAB - 1));
    return 0;
}

/* The same guesses at no cost. */
static int give(void *user, lr_request *r, lr_spec_choice *c, lr_error *err)
{
    int32_t t[512];
    lr_seq *q = lr_request_info(r)->seq;
    int n = (int)lr_seq_len(q);
    memcpy(t, lr_seq_tokens(q), (size_t)n * sizeof *t);
    c->method = LR_SPEC_GIVEN;
    for (c->n = 0; c->n < 8; c->n++) c->tokens[c->n] = t[n + c->n] = guessed(t, n + c->n);
    return 0;
}

/* ---- runs ---- */

static lr_request *begin(lr_engine *e, lr_spec_method m, uint32_t *seed, int length)
{
    int32_t prompt[PROMPT];
    lr_error err;
    lr_request *r;
    lr_spec_params sp = lr_spec_defaults(m);
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    for (int i = 0; i < PROMPT; i++) {
        *seed = *seed * 1664525u + 1013904223u;
        prompt[i] = 3 + (int32_t)(*seed >> 10) % (FX_VOCAB - 3);
    }
    if (m == LR_SPEC_GIVEN) sp.choose = give;
    p.max_tokens = length ? length : LENGTH - (int)(*seed >> 20) % 64;
    p.spec = m == LR_SPEC_OFF ? NULL : &sp;
    if (lr_request_new(e, fx_seq(e, prompt, PROMPT), &p, &r, &err)) fail_msg("%s", err.text);
    return r;
}

static lr_engine *open_engine(lr_spec_method m, int batch)
{
    lr_engine_config cfg = lr_engine_defaults();
    lr_error err;
    lr_draft_config dc = {0};
    lr_engine *e;
    cfg.kv_blocks[0] = 32 * 20;
    cfg.max_seqs = batch;
    cfg.now = now;
    cfg.prefix_cache = false;
    world.seen = world.spent = world.passes = 0;
    world.seed = 5;
    if (lr_engine_new(&e, with_time(fx_model(say, NULL, 256, 0), 0), &cfg, &err)) fail_msg("%s", err.text);
    if (m == LR_SPEC_DRAFT && lr_engine_set_draft(e, with_time(fx_model(draft, NULL, 256, 0), 1), &dc, &err))
        fail_msg("%s", err.text);
    return e;
}

/* Undisturbed seconds for so many tokens, by `batch` requests at a time of `length` each, 0 = 97 to 160. */
static double run_of(lr_engine *e, lr_spec_method m, int batch, int tokens, int length, uint32_t *seed)
{
    lr_error err;
    lr_request *live[32];
    int done = 0, all = 0;
    double began = world.spent;
    for (int i = 0; i < batch; i++) live[i] = begin(e, m, seed, length);
    while (all < tokens) {
        if (lr_engine_step(e, &err) < 0) fail_msg("%s", err.text);
        all = done;
        for (int i = 0; i < batch; i++) {
            const lr_req_info *info = lr_request_info(live[i]);
            all += info->n_generated;
            if (info->state != LR_REQ_DONE) continue;
            lr_seq *q = info->seq;
            done += info->n_generated;
            lr_request_free(live[i]);
            lr_seq_free(q);
            live[i] = begin(e, m, seed, length);
        }
    }
    double spent = world.spent - began;
    for (int i = 0; i < batch; i++) {
        lr_seq *q = lr_request_info(live[i])->seq;
        lr_request_free(live[i]);
        lr_seq_free(q);
    }
    return spent / all * tokens;
}

static double spend(lr_spec_method m, int batch, int tokens)
{
    uint32_t seed = 17;
    lr_engine *e = open_engine(m, batch);
    double spent = run_of(e, m, batch, tokens, 0, &seed);
    fx_check(e);
    lr_engine_free(e);
    return spent;
}

static double plain_cost(int mac, int batch, int tokens)
{
    static double known[N_MACHINES][33];
    double *k = &known[mac][batch];
    int kind = world.kind;
    world.kind = CALM;
    if (*k == 0) *k = spend(LR_SPEC_OFF, batch, tokens) / tokens;
    world.kind = kind;
    return *k * tokens;
}

static void set_machine(int i)
{
    world.costs[0] = simulated(&MACHINES[i], 1);
    world.costs[1] = simulated(&MACHINES[i], MACHINES[i].draft);
}

static void drop_machine(void)
{
    for (int i = 0; i < 2; i++) lr_model_free((lr_model *)world.costs[i]);
}

/* What drafts cost, as a part of the time without. */
static double ratio(int mac, lr_spec_method m, int batch, int tokens)
{
    return spend(m, batch, tokens) / plain_cost(mac, batch, tokens);
}

/* Each machine, way to draft, guesser and disturbance, with one size of batches each. Where another job comes and goes
 * within a few steps, single steps say little: there it may be a little more. */
static void test_bound(void **state)
{
    int turn = 0, few = getenv("LLMRUN_TEST_SANITIZE") ? 7 : 1;
    for (int mac = 0; mac < N_MACHINES; mac++) {
        set_machine(mac);
        for (int i = 0; i < 2 * N_GUESSERS * DISTURBANCES; i++, turn++) {
            lr_spec_method m = i % 2 ? LR_SPEC_GIVEN : LR_SPEC_DRAFT;
            int batch = 1 << (i + i / 6 + i / 36 + mac) % 6;
            if (turn % few) continue;
            guess = &GUESSERS[i / 2 % N_GUESSERS];
            world.kind = i / 2 / N_GUESSERS;
            double r = ratio(mac, m, batch, 1000 * batch);
            if (r > (world.kind == BURSTS ? 1.04 : 1.03))
                fail_msg("%s, %s, %s, %s, %d requests: %.3f", MACHINES[mac].name,
                         m == LR_SPEC_DRAFT ? "draft" : "given", guess->name, DISTURBED[world.kind], batch, r);
        }
        drop_machine();
    }
}

/* Steps with drafts that take longer than passes and rows explain. */
static void test_hidden_cost(void **state)
{
    for (int mac = 0; mac < 3; mac += 2) {
        set_machine(mac);
        world.hidden = mac ? 3 : 0.8;
        for (int batch = 1; batch <= 4; batch *= 2) {
            guess = &GUESSERS[1];
            world.kind = CALM;
            double r = ratio(mac, LR_SPEC_DRAFT, batch, 1000 * batch);
            if (r > 1.03) fail_msg("%s, %d requests: %.3f", MACHINES[mac].name, batch, r);
        }
        world.hidden = 0;
        drop_machine();
    }
}

/* ---- short runs in turns ---- */

/* What drafts of one kind gain is not for those of another kind to lose: runs of 40 tokens without drafts, with a draft
 * model that is hardly ever right, and with given tokens that are, in turns. All runs of the draft model, and each. */
static void test_turns(void **state)
{
    static const int batches[] = {4, 8, 16, 32};
    world.kind = CALM;
    for (int mac = 0; mac < N_MACHINES; mac++) {
        set_machine(mac);
        for (int c = 0; c < 8; c += getenv("LLMRUN_TEST_SANITIZE") ? 3 : 1) {
            int batch = batches[c / 2];
            lr_engine *e = open_engine(LR_SPEC_DRAFT, batch);
            uint32_t seed = 17;
            double off = 0, on = 0, worst = 0;
            for (int round = 0; round < 6; round++) {
                double plain = run_of(e, LR_SPEC_OFF, batch, 40 * batch, 60, &seed);
                guess = &GUESSERS[c % 2 ? 3 : 2];
                double with = run_of(e, LR_SPEC_DRAFT, batch, 40 * batch, 60, &seed);
                guess = &GUESSERS[0];
                run_of(e, LR_SPEC_GIVEN, batch, 40 * batch, 60, &seed);
                if (round == 0) continue; /* nothing is known yet */
                off += plain;
                on += with;
                worst = fmax(worst, with / plain);
            }
            lr_engine_free(e);
            if (on / off > 1.03 || worst > 1.045)
                fail_msg("%s, %s, %d requests: %.3f, worst %.3f", MACHINES[mac].name, c % 2 ? "blind" : "poor", batch,
                         on / off, worst);
        }
        drop_machine();
    }
}

/* What pays is done, however it is disturbed. */
static void test_gain(void **state)
{
    static const double most[N_MACHINES][2] = {{.82, .42}, {.78, .32}, {.6, .26}};
    world.hidden = 0;
    for (int mac = 0; mac < N_MACHINES - 1; mac++) {
        set_machine(mac);
        guess = &GUESSERS[0];
        for (world.kind = 0; world.kind < DISTURBANCES; world.kind++)
            for (int i = 0; i < 2; i++) {
                double r = ratio(mac, i ? LR_SPEC_GIVEN : LR_SPEC_DRAFT, 1, 1000);
                if (r > most[mac][i])
                    fail_msg("%s, %s, %s: %.3f", MACHINES[mac].name, i ? "given" : "draft", DISTURBED[world.kind], r);
            }
        drop_machine();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bound), cmocka_unit_test(test_hidden_cost),
                                       cmocka_unit_test(test_turns), cmocka_unit_test(test_gain)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
