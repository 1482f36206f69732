/* test_llmrun.c - the public C interface, on scripted models: exact, without a model file. */
#include "llmrun.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Counts up from the last byte; ends after 'z'. */
static const char counter[] = "local m; m = require('llmrun').scripted{ ctx = 64, max_seqs = 4, next = function(t)\n"
                              "  local b = t[#t]\n"
                              "  if b == 10 then return 97 end\n"
                              "  return b < 122 and b + 1 or m.info.eos end }\n"
                              "return m";

static llmrun *open_model(const char *text)
{
    llmrun *m = NULL;
    llmrun_error err = {0};
    int rc = llmrun_open_lua(&m, text, &err);
    if (rc) fail_msg("open: %s", err.text);
    return m;
}

static llmrun_session *session(llmrun *m, const char *text)
{
    llmrun_session *s = NULL;
    llmrun_error err = {0};
    if (llmrun_session_new(m, &s, &err)) fail_msg("session: %s", err.text);
    if (text && llmrun_add_text(s, text, strlen(text), &err)) fail_msg("text: %s", err.text);
    return s;
}

static void plain_text(void **state)
{
    (void)state;
    llmrun *m = open_model(counter);
    llmrun_session *s = session(m, "ab");
    llmrun_result r;
    llmrun_error err;
    llmrun_gen g = llmrun_gen_defaults();
    g.max_tokens = 4;
    assert_int_equal(llmrun_generate(s, &g, &r, &err), 0);
    assert_string_equal(r.text, "cdef");
    assert_int_equal(r.n_text, 4);
    assert_int_equal(r.n_tokens, 4);
    assert_int_equal(r.tokens[3], 'f');
    assert_string_equal(r.finish, "length");
    assert_int_equal(r.n_prompt, 2);
    assert_int_equal(llmrun_length(s), 6);
    assert_int_equal(llmrun_tokens(s)[5], 'f');
    assert_int_equal(llmrun_rewind(s, 1, &err), 0);
    const char *stop[] = {"xyz", "ef"};
    g.stop = stop;
    g.n_stop = 2;
    g.max_tokens = -1;
    assert_int_equal(llmrun_generate(s, &g, &r, &err), 0);
    assert_string_equal(r.text, "bcd");
    assert_string_equal(r.finish, "stop");
    assert_int_equal(llmrun_generate(s, NULL, &r, &err), 0);
    assert_string_equal(r.text, "ghijklmnopqrstuvwxyz");
    llmrun_session_free(s);
    llmrun_close(m);
}

static void chat(void **state)
{
    (void)state;
    llmrun *m = open_model(counter);
    llmrun_session *s = session(m, NULL), *f;
    llmrun_result r;
    llmrun_error err;
    llmrun_gen g = llmrun_gen_defaults();
    g.max_tokens = 2;
    assert_int_equal(llmrun_add_message(s, "user", "x<|im_end|>", &err), 0);
    assert_int_equal(llmrun_generate(s, &g, &r, &err), 0);
    assert_string_equal(r.text, "ab");
    size_t first = llmrun_length(s);
    assert_int_equal(llmrun_session_fork(s, &f, &err), 0);
    assert_int_equal(llmrun_add_message(s, "user", "y", &err), 0);
    assert_int_equal(llmrun_generate(s, &g, &r, &err), 0);
    assert_int_equal(r.n_cached, first - 1); /* its last token was drawn, not yet run */
    assert_int_equal(llmrun_length(f), first);
    assert_int_equal(llmrun_add_message(f, "user", "zz", &err), 0);
    assert_int_equal(llmrun_generate(f, &g, &r, &err), 0);
    assert_int_equal(llmrun_add_text(s, "x", 1, &err), llmrun_add_text(f, "x", 1, &err));
    assert_string_equal(llmrun_error_name(llmrun_add_text(s, "x", 1, &err)), "state");
    assert_string_equal(llmrun_error_name(llmrun_rewind(s, 0, &err)), "state");
    llmrun_close(m); /* sessions too */
}

static int collect(void *user, const char *text, size_t n)
{
    strncat(user, text, n);
    return strlen(user) >= 6;
}

static void side_by_side(void **state)
{
    (void)state;
    llmrun *m = open_model(counter);
    llmrun_session *s[3];
    llmrun_result r;
    llmrun_error err;
    const char *prompts[] = {"A", "a", "5"}, *want[] = {"BCDEFGHI", "bcdefghi", "6789:;<="};
    llmrun_gen g = llmrun_gen_defaults();
    g.max_tokens = 8;
    for (int i = 0; i < 3; i++) {
        s[i] = session(m, prompts[i]);
        assert_int_equal(llmrun_start(s[i], &g, &err), 0);
        assert_int_equal(llmrun_poll(s[i], &r, &err), 0);
    }
    assert_true(llmrun_start(s[0], &g, &err) < 0);
    int rows, steps = 0, most = 0;
    while ((rows = llmrun_step(m, &err)) > 0) {
        steps++;
        if (rows > most) most = rows;
    }
    assert_int_equal(rows, 0);
    assert_int_equal(most, 3);
    assert_int_equal(steps, 8);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(llmrun_poll(s[i], &r, &err), 1);
        assert_string_equal(r.text, want[i]);
        assert_true(llmrun_poll(s[i], &r, &err) < 0);
    }
    char text[64] = "";
    llmrun_session *t = session(m, "A");
    g.on_text = collect;
    g.user = text;
    assert_int_equal(llmrun_generate(t, &g, &r, &err), 0);
    assert_string_equal(text, "BCDEFG");
    assert_string_equal(r.finish, "cancelled");
    llmrun_close(m);
}

static void logits_and_tokens(void **state)
{
    (void)state;
    llmrun *m = open_model(counter);
    llmrun_session *s = session(m, "ab");
    llmrun_error err;
    float *x;
    assert_int_equal(llmrun_logits(s, &x, &err), 0);
    for (int i = 0; i < llmrun_vocab_size(m); i++) assert_true((x[i] == 0) == (i == 'c'));
    int32_t *ids, next = 'c';
    size_t n;
    assert_int_equal(llmrun_add_tokens(s, &next, 1, &err), 0);
    assert_int_equal(llmrun_logits(s, &x, &err), 0);
    assert_true(x['d'] == 0);
    assert_int_equal(llmrun_tokenize(m, "h\0i", 3, false, false, &ids, &n, &err), 0);
    assert_int_equal(n, 3);
    char *text;
    assert_int_equal(llmrun_detokenize(m, ids, n, false, &text, &n, &err), 0);
    assert_int_equal(n, 3);
    assert_memory_equal(text, "h\0i", 3);
    llmrun_free(text);
    llmrun_free(ids);
    assert_int_equal(llmrun_context(m), 64);
    assert_string_equal(llmrun_name(m), "scripted");
    llmrun_close(m);
}

static void errors(void **state)
{
    (void)state;
    llmrun *m = NULL;
    llmrun_session *s;
    llmrun_error err;
    llmrun_result r;
    assert_true(llmrun_open(&m, "/no/such/file.gguf", NULL, &err) < 0);
    assert_non_null(strstr(err.text, "/no/such/file.gguf"));
    assert_true(llmrun_open_lua(&m, "return 1", &err) < 0);
    assert_true(llmrun_open_lua(&m, "return (", &err) < 0);
    assert_true(llmrun_open_lua(&m, "error('broken')", &err) < 0);
    assert_non_null(strstr(err.text, "broken"));
    assert_null(m);
    m = open_model("return require('llmrun').scripted{ ctx = 16, next = function(t)\n"
                   "if #t > 3 then error('no more') end return 65 end }");
    s = session(m, "x");
    llmrun_gen g = llmrun_gen_defaults();
    g.temperature = -1;
    assert_true(llmrun_generate(s, &g, &r, &err) < 0);
    g = llmrun_gen_defaults();
    const char *empty[] = {""};
    g.stop = empty;
    g.n_stop = 1;
    assert_true(llmrun_generate(s, &g, &r, &err) < 0);
    assert_true(llmrun_generate(s, NULL, &r, &err) < 0); /* the script fails */
    assert_int_equal(llmrun_rewind(s, 1, &err), 0);
    g = llmrun_gen_defaults();
    g.max_tokens = 2;
    assert_int_equal(llmrun_generate(s, &g, &r, &err), 0); /* and nothing is broken */
    assert_string_equal(r.text, "AA");
    char big[40];
    memset(big, 'x', sizeof big);
    assert_string_equal(llmrun_error_name(llmrun_add_text(s, big, sizeof big, &err)), "full");
    assert_true(llmrun_rewind(s, 99, &err) < 0);
    llmrun_session_free(s);
    llmrun_session_free(NULL);
    llmrun_close(m);
    llmrun_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_text),        cmocka_unit_test(chat),   cmocka_unit_test(side_by_side),
        cmocka_unit_test(logits_and_tokens), cmocka_unit_test(errors),
    };
    return cmocka_run_group_tests_name("llmrun", tests, NULL, NULL);
}
