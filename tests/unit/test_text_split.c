/* test_text_split.c - the hand-written splitting rules against the published regular expressions, run by PCRE2, on
 * random texts that are full of edges.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "text/presplit.h"
#include "text/text.h"
#include "text/unicode.h"

#define CONTR                   "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define PREFIX                  "[^\\r\\n\\p{L}\\p{N}]?"
#define TAIL                    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define GPT2                    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define CL100K(d)               CONTR "|" PREFIX "\\p{L}+|" d "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" TAIL
#define UP                      "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOW                     "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define KUP                     "(?:(?!\\p{sc:Han})" UP ")"
#define KLOW                    "(?:(?!\\p{sc:Han})" LOW ")"
#define O200K(d, u, l, c, tail) PREFIX u "*" l "+" c "|" PREFIX u "+" l "*" c "|" d "| ?[^\\s\\p{L}\\p{N}]+" tail TAIL
#define CJK_WIDE                "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+"
#define CJK_KANA                "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{309f}\\x{30a0}-\\x{30ff}]+"
#define DEEPSEEK3                                                                                                      \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"               \
    " ?[\\p{P}\\p{S}]+[\\r\\n]*" TAIL
#define BLOOM        " ?[^(\\s|.,!?\\x{2026}\\x{3002}\\x{ff0c}\\x{3001}\\x{964}\\x{6d4}\\x{60c})]+"
#define FALCON_PUNCT "[\\p{P}$+<=>^~|`]+"

#define MAX_STAGES 6
static const struct {
    const char *pre, *stage[MAX_STAGES];
} published[] = {
    {"gpt-2", {GPT2}},
    {"smollm", {"\\p{N}", GPT2}},
    {"qwen2", {CL100K("\\p{N}")}},
    {"llama-bpe", {CL100K("\\p{N}{1,3}")}},
    {"qwen35", {CONTR "|" PREFIX "[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" TAIL}},
    {"seed-coder", {CONTR "|" PREFIX "\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+" TAIL}},
    {"bailingmoe",
     {"'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|"
      "\\s+(?!\\S)|\\s+"}},
    {"ufakzeka", {PREFIX "\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" TAIL}},
    {"laguna", {"[^\\n]+|[\\n]+", CL100K("\\p{N}")}},
    {"tekken", {O200K("\\p{N}", UP, LOW, "", "[\\r\\n/]*")}},
    {"gpt-4o", {O200K("\\p{N}{1,3}", UP, LOW, CONTR "?", "[\\r\\n/]*")}},
    {"kimi-k2", {"\\p{sc:Han}+|" O200K("\\p{N}{1,3}", KUP, KLOW, CONTR "?", "[\\r\\n]*")}},
    {"deepseek-coder", {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", CJK_WIDE, "\\p{N}"}},
    {"deepseek-v3", {"\\p{N}{1,3}", CJK_KANA, DEEPSEEK3}},
    {"spark2_5",
     {"\\p{N}{1,3}", CJK_KANA,
      "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
      " ?[\\p{P}\\p{S}]+|[\\r\\n]|\\s+(?!\\S)|\\s+",
      "\\p{N}"}},
    {"falcon", {FALCON_PUNCT, GPT2, "[0-9][0-9][0-9]"}},
    {"default", {"[\\p{P}$+<=>^~|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
    {"bloom", {BLOOM}},
    {"viking", {BLOOM, "\\p{N}"}},
};
#define N_RULES (sizeof published / sizeof *published)

typedef struct ends {
    size_t n, at[512];
} ends;

static int add_end(void *ctx, size_t start, size_t end)
{
    ends *e = ctx;
    assert_true(end > start);
    assert_int_equal(start, e->n ? e->at[e->n - 1] : 0);
    e->at[e->n++] = end;
    return 0;
}

static void by_regex(pcre2_code *const *code, const char *s, size_t from, size_t to, ends *e)
{
    if (from == to) return;
    if (!*code) {
        e->at[e->n++] = to;
        return;
    }
    pcre2_match_data *md = pcre2_match_data_create_from_pattern(*code, NULL);
    size_t gap = from;
    while (gap < to && pcre2_match(*code, (PCRE2_SPTR)(s + from), to - from, gap - from, 0, md, NULL) > 0) {
        const PCRE2_SIZE *o = pcre2_get_ovector_pointer(md);
        by_regex(code + 1, s, gap, from + o[0], e);
        by_regex(code + 1, s, from + o[0], from + o[1], e);
        gap = from + o[1];
    }
    by_regex(code + 1, s, gap, to, e);
    pcre2_match_data_free(md);
}

static uint32_t seed = 1;
static uint32_t rnd(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)seed * n >> 32);
}

/* Whether PCRE2's Unicode data, which may be older than ours, knows the character. */
static bool is_old(int32_t cp)
{
    static pcre2_code *known;
    uint8_t s[4];
    int number;
    PCRE2_SIZE where;
    if (cp >= 0xD800 && cp <= 0xDFFF) return false;
    if (!known) known = pcre2_compile((PCRE2_SPTR) "\\P{Cn}", PCRE2_ZERO_TERMINATED, PCRE2_UTF, &number, &where, NULL);
    pcre2_match_data *md = pcre2_match_data_create(1, NULL);
    bool old = pcre2_match(known, s, lr_utf8_put(cp, s), 0, 0, md, NULL) > 0;
    pcre2_match_data_free(md);
    return old;
}

/* A random text of some 15 characters, half of them from a list of those that the rules tell apart. */
static size_t random_text(char *s)
{
    static const char *const bits[] = {
        "a",       "Z",      "b",      "A",      "'s",     "'S",     "'re",    "'LL",    "'",          "\u2019s",
        "'\u017f", " ",      " ",      "  ",     "\t",     "\n",     "\r\n",   "\n\n",   "\u00a0",     "\u3000",
        "\u2028",  "1",      "23",     "456",    "\u00b2", "\u00bd", "\u2163", "\u0663", ".",          "!",
        "/",       "-",      "_",      "$",      "+",      "|",      "`",      "(",      "\u3002",     "\uff0c",
        "\uff01",  "\u2018", "\u65e5", "\u3005", "\u304b", "\uac00", "\u01c5", "\u02b0", "\u0301",     "\u0903",
        "\u00e9",  "\u00df", "\u0416", "\u03c2", "\u20ac", "\u200b", "\u200d", "\ufe0f", "\U0001f600", "\x01",
        "\x7f",    "\u00ad", "\ue000", "\u2e80", "\u00b5", "\u060c", "Hello",  " World"};
    size_t n = 0, count = 1 + rnd(16);
    for (size_t i = 0; i < count; i++) {
        int32_t cp = (int32_t)rnd(rnd(2) ? 0x3000 : 0x11000);
        if (rnd(4)) {
            const char *b = bits[rnd(sizeof bits / sizeof *bits)];
            memcpy(s + n, b, strlen(b));
            n += strlen(b);
        } else if (cp != 0x85 && cp != 0x180E && is_old(cp)) { /* those two are \s in one library and not the other */
            n += lr_utf8_put(cp, (uint8_t *)s + n);
        }
    }
    return n;
}

static void test_rules(void **state)
{
    for (size_t r = 0; r < N_RULES; r++) {
        pcre2_code *code[MAX_STAGES + 1] = {0};
        const lr_pre *pre = lr_pre_find(published[r].pre);
        assert_non_null(pre);
        for (int i = 0; i < MAX_STAGES && published[r].stage[i]; i++) {
            int number;
            PCRE2_SIZE where;
            code[i] = pcre2_compile((PCRE2_SPTR)published[r].stage[i], PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP,
                                    &number, &where, NULL);
            assert_non_null(code[i]);
        }
        for (int k = 0; k < 3000; k++) {
            char s[512];
            size_t n = random_text(s);
            ends got = {0}, want = {0};
            lr_presplit(pre, (const uint8_t *)s, n, add_end, &got);
            by_regex(code, s, 0, n, &want);
            if (got.n != want.n || memcmp(got.at, want.at, got.n * sizeof *got.at) != 0) {
                printf("%s: \"%.*s\"\n got:", published[r].pre, (int)n, s);
                for (size_t i = 0; i < got.n; i++) printf(" %zu", got.at[i]);
                printf("\nwant:");
                for (size_t i = 0; i < want.n; i++) printf(" %zu", want.at[i]);
                printf("\n");
                fail();
            }
        }
        for (int i = 0; code[i]; i++) pcre2_code_free(code[i]);
    }
}

/* deepseek-llm's letters are too long a list to write twice; some cases by hand. */
static void test_deepseek_llm(void **state)
{
    static const struct {
        const char *text;
        size_t n, at[8];
    } cases[] = {
        {"abc def", 2, {3, 7}},       {"a\n\nb", 4, {1, 2, 3, 4}},  {"x  ", 2, {1, 3}},
        {"a1234 5", 4, {1, 5, 6, 7}}, {" \u65e5\u672c", 2, {1, 7}}, {"d\u00e9j\u00e0 vu", 5, {1, 3, 4, 6, 9}},
        {"a!, b", 3, {1, 3, 5}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ends got = {0};
        lr_presplit(lr_pre_find("deepseek-llm"), (const uint8_t *)cases[i].text, strlen(cases[i].text), add_end, &got);
        assert_int_equal(got.n, cases[i].n);
        assert_memory_equal(got.at, cases[i].at, got.n * sizeof *got.at);
    }
}

static void test_names(void **state)
{
    static const char *const known[] = {"smollm",    "qwen2",        "llama-bpe",      "llama3",      "gpt-2",
                                        "falcon",    "deepseek-llm", "deepseek-coder", "starcoder",   "refact",
                                        "command-r", "olmo",         "dbrx",           "default",     "tekken",
                                        "smaug-bpe", "gpt-4o",       "stablelm2",      "chatglm-bpe", "qwen35"};
    static const char *const unknown[] = {"", "qwen", "qwen22", "wen2", "gpt", " ", "gpt-2 phi-2", "qwen2 ", "SMOLLM"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) assert_true(lr_text_pre_known(known[i]));
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) assert_false(lr_text_pre_known(unknown[i]));
    assert_false(lr_text_pre_known(NULL));
    assert_true(lr_text_default_bos("llama", NULL) && lr_text_default_bos("gpt2", "llama-bpe"));
    assert_false(lr_text_default_bos("gpt2", "qwen2") || lr_text_default_bos("gpt2", NULL));
}

/* Any bytes, any rule: the pieces are not empty and make up the text (add_end checks). */
static void test_any_bytes(void **state)
{
    for (size_t r = 0; r < N_RULES; r++)
        for (int k = 0; k < 300; k++) {
            uint8_t s[64];
            size_t n = rnd(64);
            ends got = {0};
            for (size_t i = 0; i < n; i++) s[i] = (uint8_t)(rnd(2) ? 0xC0 + rnd(0x40) : rnd(256));
            lr_presplit(lr_pre_find(published[r].pre), s, n, add_end, &got);
            assert_int_equal(n, got.n ? got.at[got.n - 1] : 0);
        }
}

static void test_normal_form(void **state)
{
    static const struct {
        lr_str in, out;
    } cases[] = {
        {LR_STR("e\u0301"), LR_STR("\u00e9")},
        {LR_STR("\u1100\u1161\u11a8"), LR_STR("\uac01")},
        {LR_STR("a\u0301\u0323"), LR_STR("\u1ea1\u0301")},
        {LR_STR("\u212b \u2126"), LR_STR("\u00c5 \u03a9")},
        {LR_STR("\xff"
                "e\u0301\xcc"),
         LR_STR("\xff\u00e9\xcc")},
        {LR_STR("\u0958"), LR_STR("\u0915\u093c")},
        {LR_STR("\u0344"), LR_STR("\u0308\u0301")},
    };
    static const char *const stable[] = {"abc", "\u00e9\u00fc", "\u65e5\u672c", "", "\u0301", "a\u0323\u0301x"};
    uint8_t *out;
    size_t n;
    lr_error err;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(lr_uc_nfc((const uint8_t *)cases[i].in.s, cases[i].in.n, &out, &n, &err), 0);
        assert_non_null(out);
        assert_int_equal(n, cases[i].out.n);
        assert_memory_equal(out, cases[i].out.s, n);
        lr_free(out);
    }
    assert_int_equal(lr_uc_nfc((const uint8_t *)"a\u0323\u0301", 5, &out, &n, &err), 0);
    assert_non_null(out);
    lr_free(out);
    for (size_t i = 0; i + 1 < sizeof stable / sizeof *stable; i++) {
        assert_int_equal(lr_uc_nfc((const uint8_t *)stable[i], strlen(stable[i]), &out, &n, &err), 0);
        assert_null(out);
    }
}

/* 100000 marks of changing class: the sort that a normal form needs must not be quadratic. */
static void test_many_marks(void **state)
{
    size_t n = 1, out_n;
    uint8_t *s = malloc(400001), *out;
    lr_error err;
    s[0] = 'x';
    for (int i = 0; i < 100000; i++) {
        memcpy(s + n, i % 2 ? "\u0323" : "\u0301", 2);
        n += 2;
    }
    assert_int_equal(lr_uc_nfc(s, n, &out, &out_n, &err), 0);
    assert_non_null(out);
    assert_int_equal(out_n, n);
    assert_memory_equal(out, "x\u0323\u0323", 5);
    assert_memory_equal(out + n - 4, "\u0301\u0301", 4);
    lr_free(out);
    free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),     cmocka_unit_test(test_deepseek_llm), cmocka_unit_test(test_names),
        cmocka_unit_test(test_any_bytes), cmocka_unit_test(test_normal_form),  cmocka_unit_test(test_many_marks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
