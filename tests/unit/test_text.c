/* test_text.c - tokenizers on small made-up vocabularies: the algorithms, names, BOS and spaces, damaged tables, memory
 * that runs out; and the stop matcher against a plain search.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "text/stop.h"
#include "text/text.h"
#include "text/text_int.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define SP       "\xE2\x96\x81"

static uint32_t seed = 7;
static uint32_t rnd(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)seed * n >> 32);
}

/* ---- vocabularies ---- */

enum { BPE_HE = 256, BPE_LL, BPE_HELL, BPE_HELLO, BPE_SPACE_W, BPE_OR, BPE_START, BPE_END, BPE_TOOL, BPE_SPACES };

static char alphabet[256][2];
/* 256 bytes, a few merges, two control tokens, two user-defined ones. */
static lr_vocab_spec bpe_spec(void)
{
    static const lr_str more[] = {LR_STR("he"),      LR_STR("ll"),  LR_STR("hell"),         LR_STR("hello"),
                                  LR_STR("\u0120w"), LR_STR("or"),  LR_STR("<|im_start|>"), LR_STR("<|im_end|>"),
                                  LR_STR("<tool>"),  LR_STR("    ")};
    static const lr_str merges[] = {LR_STR("h e"),    LR_STR("l l"),      LR_STR("he ll"),
                                    LR_STR("hell o"), LR_STR("\u0120 w"), LR_STR("o r")};
    static lr_str tokens[256 + COUNT(more)];
    static int32_t types[COUNT(tokens)];
    for (int b = 0; b < 256; b++) tokens[b] = (lr_str){alphabet[b], lr_text_bytelevel((uint8_t)b, alphabet[b])};
    memcpy(tokens + 256, more, sizeof more);
    for (size_t i = 0; i < COUNT(tokens); i++) types[i] = LR_TT_NORMAL;
    types[BPE_START] = types[BPE_END] = LR_TT_CONTROL;
    types[BPE_TOOL] = types[BPE_SPACES] = LR_TT_USER;
    return (lr_vocab_spec){.model = "gpt2",
                           .pre = "gpt-2",
                           .n_tokens = COUNT(tokens),
                           .tokens = tokens,
                           .types = types,
                           .merges = merges,
                           .n_merges = COUNT(merges),
                           .bos = -1,
                           .eos = BPE_END,
                           .unk = -1,
                           .eot = -1,
                           .pad = -1};
}

enum {
    SPM_UNK,
    SPM_BOS,
    SPM_EOS,
    SPM_BYTE,
    SPM_SPACE = SPM_BYTE + 256,
    SPM_H,
    SPM_E,
    SPM_L,
    SPM_O,
    SPM_HE,
    SPM_LL,
    SPM_HELL,
    SPM_SPACE_HE,
    SPM_HELLO,
    SPM_TABLE,
    SPM_IM_END,
    SPM_TWO
};

static lr_vocab_spec spm_spec(void)
{
    static const struct {
        lr_str s;
        float score;
        int32_t type;
    } more[] = {{LR_STR(SP), -20, 1},     {LR_STR("h"), -21, 1},     {LR_STR("e"), -22, 1},
                {LR_STR("l"), -23, 1},    {LR_STR("o"), -24, 1},     {LR_STR("he"), -1, 1},
                {LR_STR("ll"), -2, 1},    {LR_STR("hell"), -3, 1},   {LR_STR(SP "he"), -9, 1},
                {LR_STR("hello"), -4, 1}, {LR_STR("<table>"), 0, 4}, {LR_STR("<|im_end|>"), 0, 4},
                {LR_STR(SP SP), 0, 4}};
    static lr_str tokens[SPM_SPACE + COUNT(more)];
    static float scores[COUNT(tokens)];
    static int32_t types[COUNT(tokens)];
    static char names[256][8];
    tokens[0] = LR_STR("<unk>"), tokens[1] = LR_STR("<s>"), tokens[2] = LR_STR("</s>");
    types[0] = LR_TT_UNKNOWN, types[1] = types[2] = LR_TT_CONTROL;
    for (int b = 0; b < 256; b++) {
        snprintf(names[b], sizeof names[b], "<0x%02X>", b);
        tokens[SPM_BYTE + b] = lr_str_of(names[b]);
        types[SPM_BYTE + b] = LR_TT_BYTE;
    }
    for (size_t i = 0; i < COUNT(more); i++) {
        tokens[SPM_SPACE + i] = more[i].s;
        scores[SPM_SPACE + i] = more[i].score;
        types[SPM_SPACE + i] = more[i].type;
    }
    return (lr_vocab_spec){.model = "llama",
                           .n_tokens = COUNT(tokens),
                           .tokens = tokens,
                           .types = types,
                           .scores = scores,
                           .bos = 1,
                           .eos = 2,
                           .unk = 0,
                           .eot = -1,
                           .pad = -1,
                           .add_bos = true,
                           .add_space_prefix = true};
}

static lr_vocab *build(lr_vocab_spec spec)
{
    lr_vocab *v;
    lr_error err;
    if (lr_vocab_new(&v, &spec, &err)) fail_msg("%s", err.text);
    return v;
}

#define IDS(...) (const int32_t[]){__VA_ARGS__}, COUNT(((const int32_t[]){__VA_ARGS__}))
static void assert_ids(const lr_vocab *v, lr_str text, unsigned flags, const int32_t *want, size_t n_want)
{
    int32_t *ids;
    size_t n;
    lr_error err;
    if (lr_tokenize(v, text.s, text.n, flags, &ids, &n, &err)) fail_msg("%s", err.text);
    if (n != n_want || (n && memcmp(ids, want, n * sizeof *ids) != 0)) {
        printf("\"%.*s\":", (int)text.n, text.s);
        for (size_t i = 0; i < n; i++) printf(" %d", ids[i]);
        printf("\n");
        fail();
    }
    lr_free(ids);
}

static void assert_text(const lr_vocab *v, const int32_t *ids, size_t n, bool special, const char *want)
{
    char *text;
    size_t len;
    lr_error err;
    assert_int_equal(lr_detokenize(v, ids, n, special, &text, &len, &err), 0);
    assert_string_equal(text, want);
    assert_int_equal(len, strlen(want));
    lr_free(text);
}

/* ---- byte-level BPE ---- */

static void test_bpe(void **state)
{
    lr_vocab *v = build(bpe_spec());
    assert_ids(v, LR_STR("hello world"), 0, IDS(BPE_HELLO, BPE_SPACE_W, BPE_OR, 'l', 'd'));
    assert_ids(v, LR_STR("hellhe"), 0, IDS(BPE_HELL, BPE_HE));
    assert_ids(v, LR_STR("lll"), 0, IDS(BPE_LL, 'l'));
    assert_ids(v, LR_STR("x\0\xff"), 0, IDS('x', 0, 0xff));
    assert_ids(v, LR_STR(""), LR_TOK_SPECIAL | LR_TOK_BOS, NULL, 0);
    assert_ids(v, LR_STR("<|im_start|>hello<|im_end|>"), LR_TOK_SPECIAL, IDS(BPE_START, BPE_HELLO, BPE_END));
    assert_ids(v, LR_STR("a    <tool>"), LR_TOK_SPECIAL, IDS('a', BPE_SPACES, BPE_TOOL));
    assert_ids(v, LR_STR("a    <tool>"), 0, IDS('a', BPE_SPACES, '<', 't', 'o', 'o', 'l', '>'));
    assert_text(v, IDS(BPE_START, BPE_HELLO, BPE_SPACE_W, BPE_END), false, "hello w");
    assert_text(v, IDS(BPE_START, BPE_HELLO, BPE_SPACES, BPE_TOOL), true, "<|im_start|>hello    <tool>");
    assert_true(lr_vocab_is_eog(v, BPE_END) && !lr_vocab_is_eog(v, BPE_START) && !lr_vocab_is_eog(v, BPE_TOOL));
    assert_int_equal(lr_vocab_find(v, " w", 2), BPE_SPACE_W);
    assert_int_equal(lr_vocab_find(v, "\u0120w", 3), BPE_SPACE_W);
    assert_int_equal(lr_vocab_find(v, "<|im_end|>", 10), BPE_END);
    assert_int_equal(lr_vocab_find(v, "", 0), -1);
    assert_int_equal(lr_vocab_find(v, "zz", 2), -1);
    lr_vocab_unref(lr_vocab_ref(v));
    lr_vocab_unref(v);
}

/* The plain algorithm, for comparison: the whole list of pairs again after each merge. */
static size_t slow_bpe(const lr_vocab_spec *spec, const lr_vocab *v, const char *s, size_t n, int32_t *ids)
{
    for (size_t i = 0; i < n; i++) ids[i] = (uint8_t)s[i];
    for (;;) {
        size_t best = n, rank = spec->n_merges;
        for (size_t i = 0; i + 1 < n; i++)
            for (size_t m = 0; m < rank; m++) {
                char pair[64];
                size_t na, nb;
                const char *a = lr_vocab_raw(v, ids[i], &na), *b = lr_vocab_raw(v, ids[i + 1], &nb);
                memcpy(pair, a, na);
                pair[na] = ' ';
                memcpy(pair + na + 1, b, nb);
                if (lr_str_eq((lr_str){pair, na + 1 + nb}, spec->merges[m])) {
                    rank = m;
                    best = i;
                }
            }
        if (best == n) return n;
        char joined[64];
        size_t k = 0;
        for (size_t i = 0; i < spec->merges[rank].n; i++)
            if (spec->merges[rank].s[i] != ' ') joined[k++] = spec->merges[rank].s[i];
        ids[best] = lr_vocab_find(v, joined, k);
        memmove(ids + best + 1, ids + best + 2, (n - best - 2) * sizeof *ids);
        n--;
    }
}

static void test_bpe_merge_order(void **state)
{
    /* Merges that compete: which one is taken first matters, for short words and, by the heap, for long ones. */
    static const lr_str merges[] = {LR_STR("b a"),   LR_STR("a b"),   LR_STR("a a"),    LR_STR("aa ba"),
                                    LR_STR("ab ab"), LR_STR("ba ba"), LR_STR("abab a"), LR_STR("aa aa")};
    static lr_str tokens[256 + COUNT(merges)];
    static char joined[COUNT(merges)][8];
    lr_vocab_spec spec = bpe_spec();
    memcpy(tokens, spec.tokens, 256 * sizeof *tokens);
    for (size_t i = 0; i < COUNT(merges); i++) {
        size_t k = 0;
        for (size_t j = 0; j < merges[i].n; j++)
            if (merges[i].s[j] != ' ') joined[i][k++] = merges[i].s[j];
        tokens[256 + i] = (lr_str){joined[i], k};
    }
    spec.tokens = tokens;
    spec.n_tokens = COUNT(tokens);
    spec.types = NULL;
    spec.eos = -1;
    spec.merges = merges;
    spec.n_merges = COUNT(merges);
    lr_vocab *v = build(spec);
    for (int k = 0; k < 400; k++) {
        char s[128];
        int32_t want[128];
        size_t n = 1 + rnd(k % 2 ? 24 : 120);
        for (size_t i = 0; i < n; i++) s[i] = "abbaac"[rnd(k % 3 ? 6 : 5)];
        assert_ids(v, (lr_str){s, n}, 0, want, slow_bpe(&spec, v, s, n, want));
    }
    lr_vocab_unref(v);
}

static void test_missing_byte(void **state)
{
    lr_vocab_spec spec = bpe_spec();
    lr_str tokens[512];
    int32_t *ids;
    size_t n;
    lr_error err;
    memcpy(tokens, spec.tokens, spec.n_tokens * sizeof *tokens);
    tokens[0x04] = tokens[0xff] = LR_STR("nothing");
    spec.tokens = tokens;
    lr_vocab *v = build(spec);
    assert_ids(v,
               LR_STR("a\xff"
                      "b"),
               0, IDS('a', 0xEF, 0xBF, 0xBD, 'b'));
    lr_vocab_unref(v);
    tokens[0xEF] = LR_STR("nothing");
    v = build(spec);
    assert_int_equal(lr_tokenize(v, "a\x04", 2, 0, &ids, &n, &err), LR_EUNSUPPORTED);
    assert_string_equal(err.text, "the vocabulary has no token for the byte 0x04");
    lr_vocab_unref(v);
    spec.unk = 'u';
    v = build(spec);
    assert_ids(v, LR_STR("a\x04"), 0, IDS('a', 'u'));
    lr_vocab_unref(v);
}

static void test_whole_words(void **state)
{
    /* "or" exists as a token but no merge makes it: only where whole words are looked up is it found. */
    lr_vocab_spec spec = bpe_spec();
    spec.n_merges = 5;
    lr_vocab *v = build(spec);
    assert_ids(v, LR_STR("or"), 0, IDS('o', 'r'));
    lr_vocab_unref(v);
    spec.pre = "llama-bpe";
    v = build(spec);
    assert_ids(v, LR_STR("or"), 0, IDS(BPE_OR));
    assert_ids(v, LR_STR("orr"), 0, IDS('o', 'r', 'r'));
    lr_vocab_unref(v);
}

/* ---- SentencePiece ---- */

static void test_spm(void **state)
{
    lr_vocab *v = build(spm_spec());
    assert_ids(v, LR_STR("hello"), LR_TOK_BOS, IDS(SPM_BOS, SPM_SPACE, SPM_HELLO));
    assert_ids(v, LR_STR("hehe"), 0, IDS(SPM_SPACE_HE, SPM_HE));
    assert_ids(v, LR_STR(""), LR_TOK_BOS, IDS(SPM_BOS));
    assert_ids(v, LR_STR("x"), 0, IDS(SPM_SPACE, SPM_BYTE + 'x'));
    assert_ids(v, LR_STR("\u00e9\xff"), 0, IDS(SPM_SPACE, SPM_BYTE + 0xC3, SPM_BYTE + 0xA9, SPM_BYTE + 0xFF));
    assert_ids(v, LR_STR("o" SP "o"), 0,
               IDS(SPM_SPACE, SPM_O, SPM_BYTE + 0xE2, SPM_BYTE + 0x96, SPM_BYTE + 0x81, SPM_O));
    assert_ids(v, LR_STR("<table>"), 0, IDS(SPM_SPACE, SPM_TABLE));
    assert_ids(v, LR_STR("o  o"), 0, IDS(SPM_SPACE, SPM_O, SPM_TWO, SPM_O));
    assert_ids(v, LR_STR("<s>he</s>he"), LR_TOK_SPECIAL | LR_TOK_BOS,
               IDS(SPM_BOS, SPM_SPACE_HE, SPM_EOS, SPM_SPACE_HE));
    assert_ids(v, LR_STR("<s><s>he"), LR_TOK_SPECIAL | LR_TOK_BOS, IDS(SPM_BOS, SPM_BOS, SPM_SPACE_HE));
    assert_text(v, IDS(SPM_BOS, SPM_SPACE_HE, SPM_EOS, SPM_SPACE_HE, SPM_SPACE_HE), true, "<s>he</s>he he");
    assert_text(v, IDS(SPM_BOS, SPM_SPACE_HE, SPM_SPACE_HE), false, "he he");
    assert_text(v, IDS(SPM_SPACE, SPM_TWO, SPM_UNK, SPM_HE), false, "  he");
    assert_true(lr_vocab_is_eog(v, SPM_EOS) && lr_vocab_is_eog(v, SPM_IM_END) && !lr_vocab_is_eog(v, SPM_TABLE));
    assert_int_equal(lr_vocab_find(v, " he", 3), SPM_SPACE_HE);
    assert_int_equal(lr_vocab_find(v, "\n", 1), SPM_BYTE + '\n');
    assert_int_equal(lr_vocab_type(v, SPM_BYTE), LR_TT_BYTE);
    lr_vocab_unref(v);

    lr_vocab_spec spec = spm_spec();
    spec.add_space_prefix = false;
    spec.add_eos = true;
    v = build(spec);
    assert_ids(v, LR_STR("hello"), LR_TOK_BOS, IDS(SPM_BOS, SPM_HELLO, SPM_EOS));
    assert_ids(v, LR_STR("he</s>"), LR_TOK_BOS | LR_TOK_SPECIAL, IDS(SPM_BOS, SPM_HE, SPM_EOS));
    assert_text(v, IDS(SPM_BOS, SPM_SPACE_HE), false, " he");
    lr_vocab_unref(v);
}

static void test_any_bytes(void **state)
{
    lr_vocab *vs[] = {build(bpe_spec()), build(spm_spec())};
    static const char *const bits[] = {
        "\xE2\x96\x81", "\xE2",         " ",    "  ",   "he",   "ll", "<table>", "<0x41>", "<s>", "\xF0\x9F\x98",
        "</s>",         "\xED\xA0\x80", "\xC0", "\x80", "\xFF", "o",  "\n",      "\u65e5"};
    for (int k = 0; k < 2000; k++) {
        char s[200], *back;
        size_t n = 0, n_ids, len;
        int32_t *ids;
        lr_error err;
        while (n < 150 && rnd(40)) {
            const char *b = bits[rnd(COUNT(bits))];
            if (rnd(3) == 0)
                s[n++] = (char)rnd(256);
            else
                n += (size_t)snprintf(s + n, 20, "%s", b);
        }
        for (int i = 0; i < 4; i++) {
            assert_int_equal(lr_tokenize(vs[i / 2], s, n, i % 2 ? LR_TOK_SPECIAL : 0, &ids, &n_ids, &err), 0);
            assert_int_equal(lr_detokenize(vs[i / 2], ids, n_ids, true, &back, &len, &err), 0);
            assert_int_equal(len, n);
            assert_memory_equal(back, s, n);
            lr_free(ids);
            lr_free(back);
        }
    }
    lr_vocab_unref(vs[0]);
    lr_vocab_unref(vs[1]);
}

/* ---- damaged or strange tables ---- */

static void assert_refused(const lr_vocab_spec *spec, int code, const char *words)
{
    lr_vocab *v;
    lr_error err;
    assert_int_equal(lr_vocab_new(&v, spec, &err), code);
    if (!strstr(err.text, words)) fail_msg("\"%s\" does not say \"%s\"", err.text, words);
}

static void test_refused(void **state)
{
    static const lr_str bad_merges[][1] = {{LR_STR("h zz")}, {LR_STR("he")}, {LR_STR("")},
                                           {LR_STR(" h")},   {LR_STR("h ")}, {LR_STR("h h")}};
    static char huge[LR_TOKEN_MAX + 1];
    lr_vocab_spec ok = bpe_spec(), s;
    s = ok, s.model = "t5", assert_refused(&s, LR_EUNSUPPORTED, "\"t5\"");
    s = ok, s.model = NULL, assert_refused(&s, LR_EUNSUPPORTED, "tokenizer.ggml.model");
    s = ok, s.pre = "nobody-2", assert_refused(&s, LR_EUNSUPPORTED, "\"nobody-2\"");
    s = ok, s.pre = NULL, assert_refused(&s, LR_EUNSUPPORTED, "missing");
    s = ok, s.n_tokens = 0, assert_refused(&s, LR_EFORMAT, "0 tokens");
    s = ok, s.n_tokens = LR_VOCAB_MAX + 1, assert_refused(&s, LR_EFORMAT, "tokens");
    s = ok, s.eos = (int32_t)ok.n_tokens, assert_refused(&s, LR_EFORMAT, "eos");
    s = ok, s.bos = -2, assert_refused(&s, LR_EFORMAT, "bos");
    for (size_t i = 0; i < COUNT(bad_merges); i++)
        s = ok, s.merges = bad_merges[i], s.n_merges = 1, assert_refused(&s, LR_EFORMAT, "merge 0");
    s = spm_spec(), s.scores = NULL, assert_refused(&s, LR_EFORMAT, "scores");
    lr_str one = {huge, sizeof huge};
    s = spm_spec(), s.tokens = &one, s.n_tokens = 1, s.bos = s.eos = s.unk = -1;
    assert_refused(&s, LR_EFORMAT, "2049 bytes");
}

static void test_odd_tables(void **state)
{
    /* Empty and equal texts, scores that are no numbers, types out of range. */
    static const lr_str tokens[] = {LR_STR("a"), LR_STR(""), LR_STR("a"), LR_STR("aa"), LR_STR("aaa"), LR_STR("b")};
    static const float scores[] = {0, 0, 0, 0, 0, 0};
    float odd[COUNT(tokens)];
    static const int32_t types[] = {1, 4, 3, 99, -7, 0};
    lr_vocab_spec s = {.model = "llama",
                       .n_tokens = COUNT(tokens),
                       .tokens = tokens,
                       .scores = scores,
                       .types = types,
                       .bos = -1,
                       .eos = -1,
                       .unk = -1,
                       .eot = -1,
                       .pad = -1};
    int32_t *ids;
    size_t n;
    lr_error err;
    lr_vocab *v = build(s);
    assert_ids(v, LR_STR("aaaa"), 0, IDS(4, 0)); /* equal scores: always the leftmost pair */
    assert_int_equal(lr_tokenize(v, "c", 1, 0, &ids, &n, &err), LR_EUNSUPPORTED);
    lr_vocab_unref(v);
    for (size_t i = 0; i < COUNT(odd); i++) odd[i] = (float)(i % 2 ? 0.0 / 0.0 : -1.0 / 0.0);
    s.scores = odd;
    v = build(s);
    assert_ids(v, LR_STR("aaaaa"), 0, IDS(4, 3));
    lr_vocab_unref(v);
    s.unk = 5;
    v = build(s);
    assert_ids(v, LR_STR("c\xff"), 0, IDS(5, 5));
    lr_vocab_unref(v);
}

static void test_no_memory(void **state)
{
    lr_vocab_spec specs[] = {bpe_spec(), spm_spec()};
    specs[0].pre = "qwen2";
    for (int k = 0; k < 2; k++) {
        lr_vocab *v = NULL;
        lr_error err;
        int rc = LR_ENOMEM;
        for (int64_t at = 1; rc; at++) {
            lr_mem_fail_at(at);
            rc = lr_vocab_new(&v, &specs[k], &err);
            assert_true(rc == 0 || rc == LR_ENOMEM);
        }
        rc = LR_ENOMEM;
        for (int64_t at = 1; rc; at++) {
            int32_t *ids;
            char *text;
            size_t n, len;
            lr_mem_fail_at(at);
            rc = lr_tokenize(v, "hello e\u0301 <s>hehehehehehehehehehehehehehehehehehehellhellhell", 60, LR_TOK_SPECIAL,
                             &ids, &n, &err);
            assert_true(rc == 0 || rc == LR_ENOMEM);
            if (rc) continue;
            lr_mem_fail_at(1);
            assert_int_equal(lr_detokenize(v, ids, n, true, &text, &len, &err), LR_ENOMEM);
            lr_free(ids);
        }
        lr_mem_fail_at(0);
        lr_vocab_unref(v);
    }
}

/* ---- stop strings ---- */

/* Feeds text in random pieces; out gets what came out. -> index of the stop string, -1 none. */
static int32_t feed(const lr_stopset *set, const char *s, size_t n, char *out, size_t *n_out)
{
    lr_stop st;
    size_t o = 0, i = 0;
    lr_stop_init(&st, set);
    while (i < n) {
        size_t k = rnd(6) + 1;
        if (k > n - i) k = n - i;
        size_t cap = lr_stop_held(&st) + k;
        lr_stop fork = st;
        o += lr_stop_push(&st, s + i, k, out + o, cap);
        if (rnd(4) == 0) { /* a copy goes on just the same */
            char buf[256];
            size_t m = lr_stop_push(&fork, s + i, k, buf, cap);
            assert_memory_equal(out + o - m, buf, m);
            assert_int_equal(fork.node, st.node);
        }
        assert_true(lr_stop_held(&st) <= lr_stopset_max_held(set));
        i += k;
        if (st.hit < 0) assert_int_equal(o + lr_stop_held(&st), i);
    }
    o += lr_stop_flush(&st, out + o, lr_stop_held(&st));
    assert_int_equal(lr_stop_held(&st), 0);
    *n_out = o;
    return st.hit;
}

/* The plain search. */
static int32_t slow_stop(const lr_str *stops, size_t n_stops, const char *s, size_t n, size_t *start)
{
    for (size_t end = 1; end <= n; end++) {
        int32_t hit = -1;
        for (size_t i = 0; i < n_stops; i++)
            if (stops[i].n <= end && memcmp(s + end - stops[i].n, stops[i].s, stops[i].n) == 0 &&
                (hit < 0 || stops[i].n > stops[hit].n))
                hit = (int32_t)i;
        if (hit >= 0) {
            *start = end - stops[hit].n;
            return hit;
        }
    }
    *start = n;
    return -1;
}

static void test_stop_random(void **state)
{
    for (int k = 0; k < 3000; k++) {
        lr_str stops[8];
        char text[8][12], s[120], out[256];
        size_t n_stops = 1 + rnd(8), n = rnd(120), n_out, start;
        lr_stopset *set;
        lr_error err;
        unsigned letters = 1 + rnd(3);
        for (size_t i = 0; i < n_stops; i++) {
            stops[i] = (lr_str){text[i], 1 + rnd(11)};
            for (size_t j = 0; j < stops[i].n; j++) text[i][j] = (char)('a' + rnd(letters));
        }
        for (size_t j = 0; j < n; j++) s[j] = (char)('a' + rnd(letters + 1));
        assert_int_equal(lr_stopset_new(&set, stops, n_stops, &err), 0);
        int32_t want = slow_stop(stops, n_stops, s, n, &start), got = feed(set, s, n, out, &n_out);
        assert_int_equal(got, want);
        assert_int_equal(n_out, start);
        assert_memory_equal(out, s, start);
        lr_stopset_unref(set);
    }
}

static void test_stop_pieces(void **state)
{
    static const lr_str stops[] = {LR_STR("B C D"), LR_STR("\n\nUser:")};
    static const char *const pieces[] = {"A", " B", " C", " D", " E"};
    static const char *const shown[] = {"A", " ", "", "", ""};
    char out[64];
    lr_stopset *set;
    lr_stop st;
    lr_error err;
    assert_int_equal(lr_stopset_new(&set, stops, 2, &err), 0);
    lr_stop_init(&st, set);
    for (size_t i = 0; i < COUNT(pieces); i++) {
        size_t n = lr_stop_push(&st, pieces[i], strlen(pieces[i]), out, sizeof out);
        assert_int_equal(n, strlen(shown[i]));
        assert_memory_equal(out, shown[i], n);
    }
    assert_int_equal(st.hit, 0);
    lr_stop_init(&st, set); /* what only began like a stop string comes out */
    size_t n = lr_stop_push(&st, "x B C", 5, out, sizeof out);
    assert_int_equal(n, 2);
    assert_int_equal(lr_stop_held(&st), 3);
    n = lr_stop_flush(&st, out, sizeof out);
    assert_int_equal(n, 3);
    assert_memory_equal(out, "B C", 3);
    lr_stopset_unref(set);

    assert_int_equal(lr_stopset_new(&set, NULL, 0, &err), 0);
    lr_stop_init(&st, set);
    assert_int_equal(lr_stop_push(&st, "abc", 3, out, sizeof out), 3);
    lr_stopset_unref(set);
    lr_stop_init(&st, NULL);
    assert_int_equal(lr_stop_push(&st, "abc", 3, out, sizeof out), 3);
    assert_int_equal(lr_stop_flush(&st, out, 0), 0);
    const lr_str empty = LR_STR("");
    assert_int_equal(lr_stopset_new(&set, &empty, 1, &err), LR_EINVAL);
    lr_str *many = calloc(LR_STOP_MAX_STRINGS + 1, sizeof *many);
    assert_int_equal(lr_stopset_new(&set, many, LR_STOP_MAX_STRINGS + 1, &err), LR_ELIMIT);
    many[0] = (lr_str){"", LR_STOP_MAX_BYTES + 1};
    assert_int_equal(lr_stopset_new(&set, many, 1, &err), LR_ELIMIT);
    free(many);
    int rc = LR_ENOMEM;
    for (int64_t at = 1; rc; at++) {
        lr_mem_fail_at(at);
        rc = lr_stopset_new(&set, stops, 2, &err);
        assert_true(rc == 0 || rc == LR_ENOMEM);
    }
    lr_mem_fail_at(0);
    lr_stopset_unref(set);
}

/* 64 stop strings of 40 bytes, a text that keeps beginning them: no byte may cost more, late in the text or early. */
static void test_stop_cost(void **state)
{
    static char strings[64][40], s[100000], out[100064];
    lr_str stops[64];
    lr_stopset *set;
    lr_error err;
    for (int i = 0; i < 64; i++) {
        memset(strings[i], 'a', 40);
        strings[i][39] = (char)(128 + i);
        stops[i] = (lr_str){strings[i], 40};
    }
    memset(s, 'a', sizeof s);
    assert_int_equal(lr_stopset_new(&set, stops, 64, &err), 0);
    lr_stop st;
    lr_stop_init(&st, set);
    uint64_t allocs = lr_mem_allocs();
    size_t o = 0;
    for (size_t i = 0; i < sizeof s; i += 4) o += lr_stop_push(&st, s + i, 4, out + o, lr_stop_held(&st) + 4);
    assert_int_equal(o, sizeof s - 39);
    assert_int_equal(lr_mem_allocs(), allocs);
    lr_stopset_unref(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bpe),          cmocka_unit_test(test_bpe_merge_order),
        cmocka_unit_test(test_missing_byte), cmocka_unit_test(test_whole_words),
        cmocka_unit_test(test_spm),          cmocka_unit_test(test_any_bytes),
        cmocka_unit_test(test_refused),      cmocka_unit_test(test_odd_tables),
        cmocka_unit_test(test_no_memory),    cmocka_unit_test(test_stop_random),
        cmocka_unit_test(test_stop_pieces),  cmocka_unit_test(test_stop_cost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
