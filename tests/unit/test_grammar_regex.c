/* test_grammar_regex.c - regular expressions: random ones against PCRE2, set operations, and spellings. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include "grammar_fixture.h"
#include <pcre2.h>

static lr_vocab *vocab;
static lr_grammar_trie *trie;

static int setup(void **state)
{
    lr_error err;
    vocab = byte_vocab();
    return lr_grammar_trie_get(&trie, vocab, &err);
}

static int teardown(void **state)
{
    lr_grammar_trie_unref(trie);
    lr_vocab_unref(vocab);
    return 0;
}

static lr_grammar *grammar_of(const lr_regex *r, lr_spell spell)
{
    lr_gb *b;
    lr_grammar *g = NULL;
    lr_error err;
    assert_int_equal(lr_gb_new(&b, &err), 0);
    uint32_t rule = lr_gb_rule(b, "root", 4);
    lr_gb_define(b, rule, lr_gb_regex(b, r, spell));
    int rc = lr_gb_compile(b, rule, &g, &err);
    if (rc && !strstr(err.text, "no finite text")) print_error("%s\n", err.text);
    if (rc) assert_non_null(strstr(err.text, "no finite text"));
    lr_gb_free(b);
    return g;
}

static bool accepts(lr_grammar *g, const char *s, size_t n) { return g && matches(g, trie, (lr_str){s, n}, NULL); }

/* ---- random patterns ---- */

static uint64_t rng;
static uint32_t rnd(uint32_t n)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng >> 33) % n;
}

static void put(char *out, const char *s) { strcat(out, s); }

static void random_pattern(char *out, int depth)
{
    static const char *const atoms[] = {"a",    "b", "[ab]", "[^a]", ".", "\\w", "\\W", "\\u00e9", "[a\\u00e9-\\u00ff]",
                                        "\\x61"};
    static const char *const reps[] = {"*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?"};
    uint32_t k = rnd(depth <= 0 ? 4 : 10);
    if (strlen(out) > 150) k = 0;
    if (k < 4) {
        put(out, atoms[rnd(sizeof atoms / sizeof *atoms)]);
    } else if (k == 4) {
        put(out, rnd(2) ? "^" : "$");
    } else if (k <= 6) {
        for (uint32_t i = 0, n = 1 + rnd(3); i < n; i++) random_pattern(out, depth - 1);
    } else if (k == 7) {
        put(out, "(?:");
        random_pattern(out, depth - 1);
        put(out, "|");
        if (rnd(4)) random_pattern(out, depth - 1);
        put(out, ")");
    } else {
        put(out, "(");
        random_pattern(out, depth - 1);
        put(out, ")");
        put(out, reps[rnd(sizeof reps / sizeof *reps)]);
    }
}

/* PCRE2 writes \x{..} for \uXXXX. */
static pcre2_code *oracle(const char *pattern, bool whole)
{
    char text[1024];
    size_t o = 0;
    o += (size_t)snprintf(text, sizeof text, "%s", whole ? "\\A(?:" : "");
    for (const char *p = pattern; *p; p++) {
        if (p[0] == '\\' && p[1] == 'u') {
            o += (size_t)snprintf(text + o, sizeof text - o, "\\x{%.4s}", p + 2);
            p += 5;
        } else {
            text[o++] = *p;
        }
    }
    snprintf(text + o, sizeof text - o, "%s", whole ? ")\\z" : "");
    int code;
    PCRE2_SIZE at;
    pcre2_code *c =
        pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_DOLLAR_ENDONLY, &code, &at, NULL);
    if (!c) print_error("PCRE2 does not take %s\n", text);
    assert_non_null(c);
    return c;
}

static bool oracle_says(pcre2_code *c, const char *s, size_t n)
{
    pcre2_match_data *d = pcre2_match_data_create(4, NULL);
    int rc = pcre2_match(c, (PCRE2_SPTR)s, n, 0, 0, d, NULL);
    pcre2_match_data_free(d);
    return rc >= 0;
}

static void test_random(void **state)
{
    static const char *const letters[] = {"a", "b", "\xC3\xA9", "\n", "_"};
    const char *many = getenv("GRAMMAR_SEEDS");
    uint64_t n_seeds = many ? strtoull(many, NULL, 10) : 150;
    int done = 0;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        char pattern[512] = "";
        bool whole = seed % 2;
        rng = seed * 7919;
        random_pattern(pattern, 4);
        lr_regex *r, *not_r;
        lr_error err;
        int rc = lr_regex_new(&r, pattern, strlen(pattern), whole ? 0 : LR_RE_SEARCH, &err);
        if (rc) print_error("%s: %s\n", pattern, err.text);
        assert_int_equal(rc, 0);
        pcre2_code *c = oracle(pattern, whole);
        lr_grammar *g = grammar_of(r, LR_SPELL_RAW);
        if (lr_regex_not(&not_r, r, &err)) { /* too large once its counts are written out */
            assert_int_equal(err.code, LR_ELIMIT);
            not_r = NULL;
        }
        lr_grammar *ng = not_r ? grammar_of(not_r, LR_SPELL_RAW) : NULL;
        for (uint32_t t = 0; t < 130; t++) {
            char text[64] = "";
            uint32_t len = t < 2 ? t : rnd(7);
            for (uint32_t i = 0; i < len; i++) strcat(text, letters[rnd(t % 3 ? 3 : 5)]);
            size_t n = strlen(text);
            bool want = oracle_says(c, text, n), yes = want;
            if (not_r) assert_int_equal(lr_regex_matches(r, text, n, &yes, &err), 0);
            bool got = accepts(g, text, n);
            if (yes != want || got != want || (not_r && accepts(ng, text, n) == want)) {
                print_error("seed %d: /%s/ %s on \"%s\": %d, automaton %d, grammar %d\n", (int)seed, pattern,
                            whole ? "whole" : "search", text, want, yes, got);
            }
            assert_int_equal(yes, want);
            assert_int_equal(got, want);
            if (not_r) assert_int_equal(accepts(ng, text, n), !want);
        }
        pcre2_code_free(c);
        lr_grammar_unref(g);
        lr_grammar_unref(ng);
        lr_regex_free(r);
        lr_regex_free(not_r);
        done++;
    }
    assert_true(done > 100);
}

/* ---- errors ---- */

static void test_refused(void **state)
{
    static const struct {
        const char *pattern;
        int code;
        const char *text;
    } cases[] = {
        {"a(b", LR_EFORMAT, "byte 2: a ( without its )"},
        {"a)b", LR_EFORMAT, "byte 2: a ) without its ("},
        {"[a", LR_EFORMAT, "byte 1: a [ without its ]"},
        {"[b-a]", LR_EFORMAT, "byte 2: a range that is out of order"},
        {"[\\d-a]", LR_EFORMAT, "byte 2: a range with a class"},
        {"a**", LR_EFORMAT, "byte 3: nothing to repeat"},
        {"*a", LR_EFORMAT, "byte 1: nothing to repeat"},
        {"a{3,2}", LR_EFORMAT, "byte 2: the bounds"},
        {"a{1048577}", LR_ELIMIT, "byte 2: the bound"},
        {"a{99999999999999999999}", LR_ELIMIT, "byte 2: the bound"},
        {"\\b", LR_EUNSUPPORTED, "byte 1: \\b"},
        {"a(?=b)", LR_EUNSUPPORTED, "byte 2: lookahead"},
        {"(?<=b)a", LR_EUNSUPPORTED, "byte 1: lookbehind"},
        {"(a)\\1", LR_EUNSUPPORTED, "byte 4: back references"},
        {"\\p{L}", LR_EUNSUPPORTED, "byte 1: \\p"},
        {"\\q", LR_EFORMAT, "byte 1: an unknown escape"},
        {"\\u12", LR_EFORMAT, "byte 1: \\u needs"},
        {"\\ud800", LR_EUNSUPPORTED, "byte 1: half a surrogate"},
        {"a\xFFz", LR_EFORMAT, "byte 2: the pattern is not UTF-8"},
        {"a\\", LR_EFORMAT, "byte 2: a backslash at the end"},
        {"(?x)a", LR_EUNSUPPORTED, "byte 1: a kind of group"},
        {"(?#c)a", LR_EUNSUPPORTED, "byte 1: a kind of group"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lr_regex *r;
        lr_error err = {0};
        int rc = lr_regex_new(&r, cases[i].pattern, strlen(cases[i].pattern), LR_RE_SEARCH, &err);
        if (rc != cases[i].code || !strstr(err.text, cases[i].text))
            print_error("/%s/: %d %s\n", cases[i].pattern, rc, rc ? err.text : "taken");
        assert_int_equal(rc, cases[i].code);
        assert_non_null(strstr(err.text, cases[i].text));
    }
}

static void test_hostile(void **state)
{
    lr_error err;
    lr_regex *r, *o;
    char *deep = malloc(70000);
    memset(deep, '(', 60000);
    assert_int_equal(lr_regex_new(&r, deep, 60000, 0, &err), LR_ELIMIT);
    memset(deep, 'a', 70000);
    assert_int_equal(lr_regex_new(&r, deep, 70000, 0, &err), LR_ELIMIT);
    free(deep);
    /* exponential as an automaton: refused by what needs one */
    const char *wide = "(a|b)*a(a|b){22}";
    assert_int_equal(lr_regex_new(&r, wide, strlen(wide), 0, &err), 0);
    assert_int_equal(lr_regex_not(&o, r, &err), LR_ELIMIT);
    assert_non_null(strstr(err.text, "too many states"));
    assert_null(strstr(err.text, "memory"));
    lr_regex_free(r);
    const char *tall = "((((a{1000}){1000}){1000}){1000})";
    assert_int_equal(lr_regex_new(&r, tall, strlen(tall), 0, &err), 0);
    assert_int_equal(lr_regex_not(&o, r, &err), LR_ELIMIT);
    lr_grammar *g = grammar_of(r, LR_SPELL_RAW); /* counted */
    assert_non_null(g);
    lr_grammar_unref(g);
    lr_regex_free(r);
}

/* Every allocation in turn fails: each failure says that memory was missing, none that the pattern is too large. */
static void test_no_memory(void **state)
{
    int rc = LR_ENOMEM;
    for (int64_t n = 1; rc; n++) {
        static const char pattern[] = "^(?!no)[a-z]{2,5}(x|\\d+)$";
        lr_str lits[2] = {{"yes", 3}, {"no", 2}};
        lr_error err;
        lr_regex *r = NULL, *l = NULL, *o[5] = {0};
        lr_mem_fail_at(n);
        rc = lr_regex_new(&r, pattern, sizeof pattern - 1, 0, &err);
        if (!rc) rc = lr_regex_lits(&l, lits, 2, &err);
        if (!rc) rc = lr_regex_or(&o[0], r, l, &err);
        if (!rc) rc = lr_regex_and(&o[1], r, o[0], &err);
        if (!rc) rc = lr_regex_not(&o[2], o[1], &err);
        if (!rc) rc = lr_regex_length(&o[3], o[2], 1, 4, &err);
        if (!rc) rc = lr_regex_multiple(&o[4], 25, 2, &err);
        bool failed = lr_mem_fail_at(0) == 0;
        if (rc) {
            assert_true(failed);
            assert_int_equal(rc, LR_ENOMEM);
            assert_non_null(strstr(err.text, "no memory"));
        }
        lr_regex_free(r);
        lr_regex_free(l);
        for (size_t i = 0; i < 5; i++) lr_regex_free(o[i]);
        assert_true(n < 10000);
    }
}

/* ---- operations ---- */

static lr_regex *re(const char *pattern, unsigned flags)
{
    lr_regex *r;
    lr_error err;
    int rc = lr_regex_new(&r, pattern, strlen(pattern), flags, &err);
    if (rc) print_error("%s\n", err.text);
    assert_int_equal(rc, 0);
    return r;
}

static bool has(const lr_regex *r, const char *s)
{
    bool yes;
    lr_error err;
    assert_int_equal(lr_regex_matches(r, s, strlen(s), &yes, &err), 0);
    lr_grammar *g = grammar_of(r, LR_SPELL_RAW);
    assert_int_equal(accepts(g, s, strlen(s)), yes);
    lr_grammar_unref(g);
    return yes;
}

static void test_operations(void **state)
{
    lr_error err;
    lr_regex *a = re("^[a-z]+$", LR_RE_SEARCH), *b = re("b", LR_RE_SEARCH), *o;
    bool yes;
    assert_int_equal(lr_regex_and(&o, a, b, &err), 0);
    assert_true(has(o, "abc") && has(o, "b") && !has(o, "ac") && !has(o, "ab1"));
    lr_regex_free(o);
    assert_int_equal(lr_regex_or(&o, a, b, &err), 0);
    assert_true(has(o, "abc") && has(o, "1b") && has(o, "ac") && !has(o, "1"));
    lr_regex_free(o);
    assert_int_equal(lr_regex_length(&o, a, 2, 3, &err), 0);
    assert_true(!has(o, "a") && has(o, "ab") && has(o, "abc") && !has(o, "abcd"));
    lr_regex *c = re("....", 0);
    assert_int_equal(lr_regex_overlaps(o, c, &yes, &err), 0);
    assert_false(yes);
    assert_int_equal(lr_regex_overlaps(a, c, &yes, &err), 0);
    assert_true(yes);
    lr_regex_free(c);
    lr_regex_free(o);
    lr_str names[] = {LR_STR("a"), LR_STR("id"), LR_STR("")};
    lr_regex *lits, *no;
    assert_int_equal(lr_regex_lits(&lits, names, 3, &err), 0);
    assert_true(has(lits, "id") && has(lits, "") && !has(lits, "i"));
    assert_int_equal(lr_regex_not(&no, lits, &err), 0);
    assert_true(!has(no, "id") && !has(no, "") && has(no, "i") && has(no, "idx") && has(no, "\xF0\x9F\x98\x80"));
    assert_int_equal(lr_regex_and(&o, no, lits, &err), 0);
    assert_int_equal(lr_regex_is_empty(o, &yes, &err), 0);
    assert_true(yes);
    lr_regex_free(o);
    lr_regex_free(no);
    lr_regex_free(lits);
    lr_regex_free(a);
    lr_regex_free(b);
    o = re("^(?=.*[A-Z])(?=.*\\d)(?!.*x).{3,5}$", LR_RE_SEARCH);
    assert_true(has(o, "aB1") && !has(o, "ab1") && !has(o, "xB1") && !has(o, "B1") && has(o, "1B___") &&
                !has(o, "1B____"));
    lr_regex_free(o);
    o = re("(?i:aB)c", 0);
    assert_true(has(o, "abc") && has(o, "ABc") && !has(o, "ABC"));
    lr_regex_free(o);
}

/* ---- spelling in JSON ---- */

static void test_json(void **state)
{
    static const struct {
        const char *pattern, *text;
        bool want;
    } cases[] = {
        {"^.*$", "a\\\"b", true},
        {"^.*$", "a\"", false},
        {"^.*$", "\\n", false},
        {"^[^a]*$", "\\n", true},
        {"^[^a]*$", "\n", false},
        {"^[^a]*$", "\\u000a", true},
        {"^[^a]*$", "\\u0061", false},
        {"^\\n$", "\\n", true},
        {"^\\n$", "\\u000A", true},
        {"^/$", "/", true},
        {"^/$", "\\/", true},
        {"^\\\\$", "\\\\", true},
        {"^\\\\$", "\\", false},
        {"^\"$", "\\\"", true},
        {"^\\u00e9$", "\\u00e9", true},
        {"^\\u00e9$", "\xC3\xA9", true},
        {"^.$", "\xF0\x9F\x98\x80", true},
        {"^.$", "\\ud83d\\ude00", true},
        {"^.$", "\\ud83d", false},
        {"^.$", "\\ude00", false},
        {"^.$", "\\ud83d\\ud83d", false},
        {"^..$", "\\ud83d\\ude00", false},
        {"^[\\u{1F600}-\\u{1F64F}]$", "\\uD83D\\uDE4F", true},
        {"^[\\u{1F600}-\\u{1F64F}]$", "\\uD83D\\uDE50", false},
        {"^[\\u{10300}-\\u{10900}]$", "\\uD800\\uDF00", true},
        {"^[\\u{10300}-\\u{10900}]$", "\\uD800\\uDEFF", false},
        {"^[\\u{10300}-\\u{10900}]$", "\\uD801\\uDC00", true},
        {"^[\\u{10300}-\\u{10900}]$", "\\uD802\\uDD00", true},
        {"^[\\u{10300}-\\u{10900}]$", "\\uD802\\uDD01", false},
        {"^[a-z]$", "\\u0061", false},
        {"^\\s\\S*$", "\\u2028x", true},
        {"^\\t$", "\t", false},
        {"^[\\u007f]$", "\x7F", true},
        {"", "\\u0041\\u00e9", true},
        {"", "\\x41", false},
        {"", "\\u12", false},
        {"", "\xC3", false},
        {"", "\xED\xA0\x80", false},
        {"", "\xC0\x80", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lr_regex *r = re(cases[i].pattern, LR_RE_SEARCH), *two, *twice;
        lr_error err;
        lr_grammar *g = grammar_of(r, LR_SPELL_JSON);
        bool got = accepts(g, cases[i].text, strlen(cases[i].text));
        if (got != cases[i].want) print_error("/%s/ on %s: %d\n", cases[i].pattern, cases[i].text, got);
        assert_int_equal(got, cases[i].want);
        lr_grammar_unref(g);
        /* the same over its automaton */
        assert_int_equal(lr_regex_not(&two, r, &err), 0);
        assert_int_equal(lr_regex_not(&twice, two, &err), 0);
        g = grammar_of(twice, LR_SPELL_JSON);
        assert_int_equal(accepts(g, cases[i].text, strlen(cases[i].text)), cases[i].want);
        lr_grammar_unref(g);
        lr_regex_free(two);
        lr_regex_free(twice);
        lr_regex_free(r);
    }
}

/* Every code point is spelt raw exactly as UTF-8 says, at the edges of all kinds of ranges. */
static void test_utf8(void **state)
{
    static const uint32_t edges[] = {0,       0x7F,     0x80,     0x7FF,   0x800,   0xFFF,   0x1000,
                                     0xCFFF,  0xD7FF,   0xE000,   0xFFFF,  0x10000, 0x3FFFF, 0x40000,
                                     0xFFFFF, 0x100000, 0x10FFFF, 0x1F600, 0x20AC,  0xC0};
    for (uint64_t seed = 1; seed < 60; seed++) {
        rng = seed;
        uint32_t r[2] = {edges[rnd(20)], edges[rnd(20)]};
        if (r[0] > r[1]) r[0] = r[1];
        if (rnd(3) == 0) r[1] = r[0] + rnd(300);
        if (r[1] > 0x10FFFF) r[1] = 0x10FFFF;
        lr_gb *b;
        lr_grammar *g;
        lr_error err;
        assert_int_equal(lr_gb_new(&b, &err), 0);
        uint32_t rule = lr_gb_rule(b, "r", 1);
        lr_gb_define(b, rule, lr_gb_chars(b, (const uint32_t(*)[2])r, 1, LR_SPELL_RAW));
        int rc = lr_gb_compile(b, rule, &g, &err);
        lr_gb_free(b);
        if (r[0] >= 0xD800 && r[1] < 0xE000) {
            assert_int_equal(rc, LR_EINVAL);
            continue;
        }
        assert_int_equal(rc, 0);
        for (int k = 0; k < 60; k++) {
            uint32_t c = k < 20 ? edges[k] : k < 40 ? r[k % 2] + rnd(5) - 2 : rnd(0x110000);
            if (c > 0x10FFFF || (c >= 0xD800 && c < 0xE000)) continue;
            char s[4];
            size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
            if (n == 1) s[0] = (char)c;
            for (size_t i = n; i-- > 1;) s[i] = (char)(0x80 | (c >> 6 * (n - 1 - i) & 63));
            if (n > 1) s[0] = (char)((0xF00 >> n & 0xFF) | c >> 6 * (n - 1));
            bool want = c >= r[0] && c <= r[1];
            if (accepts(g, s, n) != want) print_error("U+%04X in U+%04X..U+%04X: not %d\n", c, r[0], r[1], want);
            assert_int_equal(accepts(g, s, n), want);
        }
        lr_grammar_unref(g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),    cmocka_unit_test(test_refused),    cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_no_memory), cmocka_unit_test(test_operations), cmocka_unit_test(test_json),
        cmocka_unit_test(test_utf8),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
