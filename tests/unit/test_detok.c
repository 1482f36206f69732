/* test_detok.c - the streaming detokenizer: characters that tokens split, bytes that are no characters, prompts that
 * end inside a character, spaces at word starts, and its cost.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "text_model.h"

static uint32_t seed = 11;
static uint32_t rnd(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)seed * n >> 32);
}

/* A vocabulary whose pieces are these bytes (SentencePiece, plain raw text); id 0 is a control token. */
static lr_vocab *pieces_vocab(const lr_str *pieces, uint32_t n, bool space_prefix)
{
    lr_str *tokens = calloc(n + 1, sizeof *tokens);
    int32_t *types = calloc(n + 1, sizeof *types);
    float *scores = calloc(n + 1, sizeof *scores);
    tokens[0] = LR_STR("<end>");
    types[0] = LR_TT_CONTROL;
    for (uint32_t i = 0; i < n; i++) {
        tokens[i + 1] = pieces[i];
        types[i + 1] = LR_TT_NORMAL;
    }
    lr_vocab_spec spec = {.model = "llama",
                          .n_tokens = n + 1,
                          .tokens = tokens,
                          .types = types,
                          .scores = scores,
                          .bos = -1,
                          .eos = -1,
                          .unk = -1,
                          .eot = -1,
                          .pad = -1,
                          .add_space_prefix = space_prefix};
    lr_vocab *v;
    lr_error err;
    if (lr_vocab_new(&v, &spec, &err)) fail_msg("%s", err.text);
    free(tokens);
    free(types);
    free(scores);
    return v;
}

/* Pushes ids, appends to out (zero-terminated); checks that every event is whole UTF-8 without control. */
static void push(lr_detok *d, const int32_t *ids, size_t n, char *out)
{
    char buf[LR_DETOK_CAP];
    for (size_t i = 0; i < n; i++) {
        size_t k = lr_detok_push(d, ids[i], buf, sizeof buf);
        buf[k] = 0;
        strcat(out, buf);
    }
}

static void test_split_characters(void **state)
{
    static const lr_str pieces[] = {LR_STR("a\xf0\x9f"), LR_STR("\x98\x80"), LR_STR("\xe2\x9d"), LR_STR("\xa4"),
                                    LR_STR("\xef\xb8\x8f"
                                           "b")};
    static const char *const events[] = {"a", "\U0001F600", "", "\u2764",
                                         "\uFE0F"
                                         "b"};
    lr_vocab *v = pieces_vocab(pieces, 5, false);
    lr_detok d;
    lr_detok_init(&d, v, false);
    for (int32_t i = 0; i < 5; i++) {
        char out[64] = "";
        push(&d, (int32_t[]){i + 1, 0}, 2, out); /* a hidden token in between changes nothing */
        assert_string_equal(out, events[i]);
    }
    char buf[8];
    assert_int_equal(lr_detok_flush(&d, buf, sizeof buf), 0);
    lr_vocab_unref(v);
}

static void test_broken_bytes(void **state)
{
    static const lr_str pieces[] = {LR_STR("\xf0\x9f"), LR_STR("x"),        LR_STR("\xff"),        LR_STR("\x80\x80"),
                                    LR_STR("\xe2\x82"), LR_STR("\xed\xa0"), LR_STR("\xc3\xa9\xc3")};
    static const struct {
        int32_t ids[4];
        const char *out;
    } cases[] = {
        {{1, 2}, "\uFFFDx"},
        {{1, 1}, "\uFFFD\uFFFD"},
        {{3, 3}, "\uFFFD\uFFFD"},
        {{4}, "\uFFFD\uFFFD"},
        {{5, 4}, "\u2080\uFFFD"},
        {{6}, "\uFFFD\uFFFD"},
        {{7, 7}, "\u00e9\uFFFD\u00e9\uFFFD"},
        {{1, 5, 2}, "\uFFFD\uFFFDx"},
        {{5, 0, 2}, "\uFFFDx"},
    };
    lr_vocab *v = pieces_vocab(pieces, 7, false);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lr_detok d;
        char out[64] = "", buf[8];
        lr_detok_init(&d, v, false);
        push(&d, cases[i].ids, 4, out);
        size_t k = lr_detok_flush(&d, buf, sizeof buf);
        buf[k] = 0;
        strcat(out, buf);
        assert_string_equal(out, cases[i].out);
    }
    lr_vocab_unref(v);
}

static void test_prompt_inside_character(void **state)
{
    static const lr_str pieces[] = {LR_STR("Price: "), LR_STR("\xe2"), LR_STR("\x82"), LR_STR("\xac"), LR_STR(" ok")};
    lr_vocab *v = pieces_vocab(pieces, 5, false);
    lr_detok d;
    char out[64] = "";
    lr_detok_init(&d, v, false);
    lr_detok_prime(&d, (int32_t[]){1, 2, 3}, 3);
    push(&d, (int32_t[]){4}, 1, out);
    assert_string_equal(out, "\u20ac");
    push(&d, (int32_t[]){5}, 1, out);
    assert_string_equal(out, "\u20ac ok");
    out[0] = 0; /* the prompt's character is never finished */
    lr_detok_init(&d, v, false);
    lr_detok_prime(&d, (int32_t[]){1, 2, 3, 0, 0}, 5);
    push(&d, (int32_t[]){5}, 1, out);
    assert_string_equal(out, "\uFFFD ok");
    out[0] = 0;
    lr_detok_init(&d, v, false);
    lr_detok_prime(&d, (int32_t[]){1, 2, 3, 4}, 4);
    push(&d, (int32_t[]){4, 5}, 2, out);
    assert_string_equal(out, "\uFFFD ok");
    lr_vocab_unref(v);
}

static void test_space_prefix(void **state)
{
    static const lr_str pieces[] = {LR_STR("\u2581Hello"), LR_STR("\u2581world"), LR_STR(".")};
    lr_vocab *v = pieces_vocab(pieces, 3, true);
    lr_detok d;
    char out[64] = "";
    lr_detok_init(&d, v, false);
    push(&d, (int32_t[]){0, 1, 2, 3}, 4, out);
    assert_string_equal(out, "Hello world.");
    out[0] = 0; /* after a prompt every space counts */
    lr_detok_init(&d, v, false);
    lr_detok_prime(&d, (int32_t[]){1}, 1);
    push(&d, (int32_t[]){2, 3}, 2, out);
    assert_string_equal(out, " world.");
    out[0] = 0; /* after a control token, and a prompt of nothing, a text begins */
    lr_detok_init(&d, v, true);
    lr_detok_prime(&d, NULL, 0);
    push(&d, (int32_t[]){1, 2, 0, 1}, 4, out);
    assert_string_equal(out, "Hello world<end>Hello");
    out[0] = 0;
    lr_detok_init(&d, v, false);
    lr_detok_prime(&d, (int32_t[]){1, 2, 0}, 3);
    push(&d, (int32_t[]){1, 99, -1}, 3, out);
    assert_string_equal(out, "Hello");
    lr_vocab_unref(v);
}

/* Whatever the pieces, streamed = whole with the broken bytes replaced, cut anywhere into prompt and output. */
static void test_random_pieces(void **state)
{
    static const char *const bits[] = {"\xe2", "\x82", "\xac", "\xf0",   "\x9f", "\x98",
                                       "\x80", "a",    " ",    "\u00e9", "\xc3", "\xff"};
    for (int k = 0; k < 500; k++) {
        lr_str pieces[12];
        char text[12][8];
        for (int i = 0; i < 12; i++) {
            pieces[i] = (lr_str){text[i], 1 + rnd(3)};
            for (size_t j = 0; j < pieces[i].n; j++) text[i][j] = bits[rnd(12)][0];
        }
        lr_vocab *v = pieces_vocab(pieces, 12, false);
        int32_t ids[40];
        for (int i = 0; i < 40; i++) ids[i] = (int32_t)rnd(13);
        char all[1024] = "", tail[1024], buf[8];
        lr_detok d, e;
        size_t cut = rnd(41), before;
        lr_detok_init(&d, v, false);
        push(&d, ids, cut, all);
        before = strlen(all);
        e = d; /* a fork */
        push(&d, ids + cut, 40 - cut, all);
        tail[0] = 0;
        push(&e, ids + cut, 40 - cut, tail);
        assert_string_equal(all + before, tail);
        tail[0] = 0;
        lr_detok_init(&e, v, false);
        lr_detok_prime(&e, ids, cut);
        push(&e, ids + cut, 40 - cut, tail);
        assert_string_equal(all + before, tail);
        size_t a = lr_detok_flush(&d, buf, sizeof buf), b = lr_detok_flush(&e, buf, sizeof buf);
        assert_int_equal(a, b);
        lr_vocab_unref(v);
    }
}

/* The gemma case: streamed one by one and after any prompt, the text is the same, no space lost. */
static void test_gemma_stream(void **state)
{
    lr_vocab *v = model_vocab("gemma-3-270m-q4_k_m.gguf", NULL);
    const char *text = "Hello world. It is 3 o'clock.";
    int32_t *ids, mixed[64];
    size_t n, m = 0, len, all_len;
    char *whole;
    lr_error err;
    if (!v) return;
    assert_int_equal(lr_tokenize(v, text, strlen(text), LR_TOK_BOS, &ids, &n, &err), 0);
    for (size_t i = 0; i < n; i++) {
        mixed[m++] = ids[i];
        if (i % 2) mixed[m++] = lr_vocab_eot(v) >= 0 ? lr_vocab_eot(v) : 106;
    }
    for (size_t cut = 0; cut <= m; cut++) {
        char out[256] = "", *before;
        lr_detok d;
        lr_detok_init(&d, v, false);
        lr_detok_prime(&d, mixed, cut);
        push(&d, mixed + cut, m - cut, out);
        assert_int_equal(lr_detokenize(v, mixed, cut, false, &before, &len, &err), 0);
        assert_int_equal(lr_detokenize(v, mixed, m, false, &whole, &all_len, &err), 0);
        assert_string_equal(whole + len, out);
        assert_string_equal(whole, text);
        lr_free(before);
        lr_free(whole);
    }
    lr_free(ids);
    lr_vocab_unref(v);
}

/* 20000 tokens: nothing allocated, and the last thousand cost what the first do. */
static void test_cost(void **state)
{
    static const lr_str pieces[] = {LR_STR("word"), LR_STR("\u2581more"), LR_STR("\xe6\x97"), LR_STR("\xa5")};
    lr_vocab *v = pieces_vocab(pieces, 4, true);
    lr_detok d;
    char buf[LR_DETOK_CAP];
    double t[2] = {1e9, 1e9};
    lr_detok_init(&d, v, false);
    uint64_t allocs = lr_mem_allocs();
    for (int block = 0; block < 200; block++) {
        double from = now_s();
        for (int i = 0; i < 1000; i++) lr_detok_push(&d, 1 + i % 4, buf, sizeof buf);
        double took = now_s() - from;
        if (took < t[block >= 100]) t[block >= 100] = took;
    }
    assert_int_equal(lr_mem_allocs(), allocs);
    assert_true(t[1] < 3 * t[0] + 1e-4);
    lr_vocab_unref(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_characters),
        cmocka_unit_test(test_broken_bytes),
        cmocka_unit_test(test_prompt_inside_character),
        cmocka_unit_test(test_space_prefix),
        cmocka_unit_test(test_random_pieces),
        cmocka_unit_test(test_gemma_stream),
        cmocka_unit_test(test_cost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
