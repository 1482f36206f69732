/* test_grammar.c - grammars and matchers: random ones against a slow recogniser, and the cases that are hard. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "grammar_oracle.h"
#include <time.h>

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- random grammars ---- */

/* Pieces over a..c, of 1 to 4 bytes, some twice. */
static lr_vocab *abc_vocab(void)
{
    static char text[64][8];
    lr_str s[64];
    size_t n = 0;
    for (int len = 1; len <= 3; len++) {
        int count = len == 1 ? 3 : len == 2 ? 9 : 27;
        for (int v = 0; v < count; v++, n++) {
            for (int k = 0, x = v; k < len; k++, x /= 3) text[n][k] = (char)('a' + x % 3);
            s[n] = (lr_str){text[n], (size_t)len};
        }
    }
    static const char *const more[] = {"abca", "bbbb", "cabc", "d", "ad", "aaaa"};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) s[n++] = lr_str_of(more[i]);
    return piece_vocab(s, n);
}

typedef struct walk_state {
    oracle *o;
    lr_vocab *v;
    lr_grammar *g;
    lr_matcher *m;
    char text[O_TEXT + 8];
    int n;
} walk_state;

enum { LIMIT = -2 };

/* Compares the mask with the judgement on every token; picks a random allowed one, -1 if there is none; LIMIT if the
 * grammar is too ambiguous. */
static int32_t check_mask(walk_state *w, uint64_t seed)
{
    uint32_t bits[8];
    lr_error err = {0};
    size_t n_allowed = 0, count = 0;
    int rc = lr_matcher_mask(w->m, bits, &n_allowed, &err);
    if (rc == LR_ELIMIT) return LIMIT;
    if (rc) print_error("seed %u: mask: %s\n", (unsigned)seed, err.text);
    assert_int_equal(rc, 0);
    int here = o_judge(w->o, w->text, w->n);
    int32_t end = lr_vocab_eos(w->v), pick = -1;
    for (int32_t id = 0; id < (int32_t)lr_vocab_size(w->v); id++) {
        bool allowed = bits[id / 32] >> (id % 32) & 1, want;
        size_t n;
        const char *s = lr_vocab_piece(w->v, id, &n);
        if (id == end) {
            want = here & 1;
        } else {
            if (w->n + (int)n > O_TEXT) continue;
            memcpy(w->text + w->n, s, n);
            want = o_judge(w->o, w->text, w->n + (int)n) != 0;
        }
        if (allowed != want) {
            print_error("seed %u: after \"%.*s\": token \"%.*s\" allowed %d, should be %d\n", (unsigned)seed, w->n,
                        w->text, (int)n, s, allowed, want);
        }
        assert_int_equal(allowed, want);
        assert_int_equal(lr_matcher_allows(w->m, id), want);
        count += allowed;
        if (id != end && want && (pick < 0 || o_rand(w->o, (uint32_t)count) == 0)) pick = id;
    }
    if (lr_matcher_can_end(w->m) != (here & 1) || lr_matcher_done(w->m) != !(here & 2)) {
        print_error("seed %u: after \"%.*s\": can end %d, done %d; judged %d\n", (unsigned)seed, w->n, w->text,
                    lr_matcher_can_end(w->m), lr_matcher_done(w->m), here);
    }
    assert_int_equal(lr_matcher_can_end(w->m), here & 1);
    assert_int_equal(lr_matcher_done(w->m), !(here & 2));
    return pick;
}

/* False: it ended at a limit. */
static bool random_walk(walk_state *w, lr_grammar_trie *t, uint64_t seed)
{
    lr_error err;
    assert_int_equal(lr_matcher_new(&w->m, w->g, t, NULL, &err), 0);
    w->n = 0;
    int taken = 0;
    int len[O_TEXT + 1];
    for (int step = 0; step < 14; step++) {
        int32_t id = check_mask(w, seed);
        if (id == LIMIT) {
            lr_matcher_free(w->m);
            return false;
        }
        if (taken > 0 && o_rand(w->o, 5) == 0) { /* back, or on with a copy */
            if (o_rand(w->o, 2)) {
                int back = 1 + (int)o_rand(w->o, (uint32_t)taken);
                assert_int_equal(lr_matcher_rollback(w->m, (size_t)back, &err), 0);
                while (back-- > 0) w->n -= len[--taken];
            } else {
                lr_matcher *c;
                assert_int_equal(lr_matcher_copy(&c, w->m, &err), 0);
                lr_matcher_free(w->m);
                w->m = c;
            }
            continue;
        }
        size_t n;
        if (id < 0) break;
        const char *s = lr_vocab_piece(w->v, id, &n);
        memcpy(w->text + w->n, s, n);
        w->n += (int)n;
        len[taken++] = (int)n;
        assert_int_equal(lr_matcher_accept(w->m, id, &err), 0);
    }
    lr_matcher_free(w->m);
    return true;
}

static void test_random(void **state)
{
    static oracle o;
    lr_vocab *v = abc_vocab();
    lr_grammar_trie *t;
    lr_error err;
    const char *only = getenv("GRAMMAR_SEED"), *many = getenv("GRAMMAR_SEEDS");
    assert_int_equal(lr_grammar_trie_get(&t, v, &err), 0);
    uint64_t from = only ? strtoull(only, NULL, 10) : 1, to = only ? from : many ? strtoull(many, NULL, 10) : 400;
    int refused = 0, done = 0, limited = 0;
    for (uint64_t seed = from; seed <= to; seed++) {
        walk_state w = {.o = &o, .v = v};
        o_make(&o, seed);
        bool productive = o_productive(&o);
        for (int r = 0; only && r < o.n_rule; r++) {
            printf("r%d ::= ", r);
            o_print(&o, o.rule[r]);
            printf("\n");
        }
        int rc = o_build(&o, seed % 3 == 0, &w.g, &err);
        if (rc) {
            if (rc == LR_EUNSUPPORTED) refused++;
            if (rc != LR_EUNSUPPORTED && productive) print_error("seed %u: %s\n", (unsigned)seed, err.text);
            assert_true(rc == LR_EUNSUPPORTED || !productive);
            continue;
        }
        if (!productive) print_error("seed %u: not refused\n", (unsigned)seed);
        assert_true(productive);
        if (!random_walk(&w, t, seed) || !random_walk(&w, t, seed)) limited++;
        lr_grammar_unref(w.g);
        done++;
    }
    printf("%d grammars walked, %d refused for left recursion in a count, %d too ambiguous\n", done, refused, limited);
    if (!only) assert_true(done * 3 > (int)(to - from) && refused * 20 < done && limited * 100 < done);
    lr_grammar_trie_unref(t);
    lr_vocab_unref(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
    };
    (void)now_s;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
