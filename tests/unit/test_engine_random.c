/* test_engine_random.c - hundreds of random schedules on the scripted model (engine_trial.h), and those that the fuzzer
 * found. */
#include "engine_trial.h"
#include "corpus.h"

/* The trials must have met what they are about. */
static void assert_totals(bool hostile)
{
    const uint64_t v[] = {total.done,    total.cancelled, total.recompute, total.swap,    total.swap_in,
                          total.hits,    total.evicted,   total.copied,    total.parked,  hostile ? total.refused : 100,
                          total.spilled, total.joined,    total.taken,     total.rejected};
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        if (v[i] < 100) fail_msg("count %zu is only %llu", i, (unsigned long long)v[i]);
    }
    memset(&total, 0, sizeof total);
}

static void run_seed(uint32_t seed, bool hostile, int steps)
{
    fx_seed = seed * 2654435761u | 1;
    assert_true(run_trial(hostile, steps) > 0);
}

static void one(const char *name, const char *path, const uint8_t *bytes, size_t n) { run_bytes(bytes, n); }

/* The corpus of tests/fuzz/fuzz_policy.c. */
static void test_corpus(void **state) { corpus_replay("policy", 20, one); }

static void test_schedules(void **state)
{
    for (uint32_t seed = 1; seed <= 250; seed++) run_seed(seed, false, 120);
    assert_totals(false);
}

static void test_mad_policy(void **state)
{
    for (uint32_t seed = 1001; seed <= 1250; seed++) run_seed(seed, true, 150);
    assert_totals(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_corpus),
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_mad_policy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
