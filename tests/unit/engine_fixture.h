/* engine_fixture.h - a small vocabulary and a scripted model whose every logit depends on all tokens before it, so that
 * one wrong KV slot changes the output; and the same model run by hand, without an engine, as the reference. */
#ifndef TESTS_ENGINE_FIXTURE_H
#define TESTS_ENGINE_FIXTURE_H
#include "base/mem.h"
#include "engine/metrics.h"
#include "engine/policy.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#pragma GCC diagnostic ignored "-Wunused-function" /* each test uses some of these */

enum { FX_VOCAB = 48, FX_EOS = 2 };

/* 0 <unk>, 1 <s>, 2 </s>, then " a" " b" ... and "A" "B" ... */
static lr_vocab *fx_vocab(void)
{
    static char text[FX_VOCAB][8];
    lr_str tok[FX_VOCAB] = {LR_STR("<unk>"), LR_STR("<s>"), LR_STR("</s>")};
    int32_t types[FX_VOCAB] = {LR_TT_UNKNOWN, LR_TT_CONTROL, LR_TT_CONTROL};
    float scores[FX_VOCAB] = {0};
    for (int i = 3; i < FX_VOCAB; i++) {
        int k = i - 3;
        snprintf(text[i], sizeof text[i], k < 22 ? "\xe2\x96\x81%c" : "%c", k < 22 ? 'a' + k : 'A' + k - 22);
        tok[i] = lr_str_of(text[i]);
        types[i] = LR_TT_NORMAL;
        scores[i] = -(float)i;
    }
    lr_vocab_spec spec = {.model = "llama",
                          .n_tokens = FX_VOCAB,
                          .tokens = tok,
                          .scores = scores,
                          .types = types,
                          .bos = 1,
                          .eos = 2,
                          .unk = 0,
                          .eot = -1,
                          .pad = -1};
    lr_vocab *v;
    lr_error err;
    if (lr_vocab_new(&v, &spec, &err)) fail_msg("%s", err.text);
    return v;
}

static uint64_t fx_mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 31;
}

/* Logits from a hash of all tokens. The end token never wins unless *(int *)user > 0: then about every user-th time. */
static int fx_next(void *user, const int32_t *tokens, int n, float *logits)
{
    uint64_t h = 1;
    for (int i = 0; i < n; i++) h = fx_mix(h, (uint64_t)tokens[i] + 1);
    for (int i = 0; i < FX_VOCAB; i++) logits[i] = (float)(fx_mix(h, (uint64_t)i + 77) >> 40) / (float)(1 << 22);
    logits[0] = logits[1] = -100;
    logits[FX_EOS] = user && *(int *)user > 0 && h % (uint64_t) * (int *)user == 0 ? 100 : -100;
    return 0;
}

static lr_model *fx_model(lr_scripted_next next, void *user, int n_ctx, int window)
{
    lr_model *m;
    lr_error err;
    lr_vocab *v = fx_vocab();
    lr_scripted_config cfg = {
        .n_vocab = FX_VOCAB, .n_ctx = n_ctx, .next = next, .user = user, .vocab = v, .window = window};
    if (lr_scripted_new(&m, &cfg, &err)) fail_msg("%s", err.text);
    lr_vocab_unref(v);
    return m;
}

static lr_engine *fx_engine(const lr_engine_config *cfg, lr_scripted_next next, void *user, int n_ctx, int window)
{
    lr_engine *e;
    lr_error err;
    if (lr_engine_new(&e, fx_model(next, user, n_ctx, window), cfg, &err)) fail_msg("%s", err.text);
    return e;
}

static lr_seq *fx_seq(lr_engine *e, const int32_t *tokens, int n)
{
    lr_seq *s;
    lr_error err;
    if (lr_seq_new(e, NULL, &s, &err) || lr_seq_append(s, tokens, (size_t)n, &err)) fail_msg("%s", err.text);
    return s;
}

static lr_request *fx_gen(lr_engine *e, lr_seq *s, int max_tokens)
{
    lr_request *r;
    lr_error err;
    lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
    p.max_tokens = max_tokens;
    if (lr_request_new(e, s, &p, &r, &err)) fail_msg("%s", err.text);
    return r;
}

static void fx_check(lr_engine *e)
{
    lr_error err;
    if (lr_engine_check(e, &err)) fail_msg("%s", err.text);
}

/* Steps until nothing is left to do. */
static int fx_run(lr_engine *e)
{
    lr_error err;
    int steps = 0;
    while (lr_engine_busy(e)) {
        if (lr_engine_step(e, &err) < 0) fail_msg("%s", err.text);
        if (++steps > 100000) fail_msg("no end after %d steps", steps);
    }
    return steps;
}

static int fx_arg_max(const float *x)
{
    int best = 0;
    for (int i = 1; i < FX_VOCAB; i++) {
        if (x[i] > x[best]) best = i;
    }
    return best;
}

/* The greedy continuation of tokens (n), at most max tokens, appended in place; returns how many. Stops before an end
 * token. */
static int fx_reference(lr_scripted_next next, void *user, int32_t *tokens, int n, int max)
{
    float x[FX_VOCAB];
    for (int k = 0; k < max; k++) {
        memset(x, 0, sizeof x);
        next(user, tokens, n + k, x);
        int t = fx_arg_max(x);
        if (t == FX_EOS) return k;
        tokens[n + k] = t;
    }
    return max;
}

static uint32_t fx_seed = 1;
static struct {
    const uint8_t *p, *end; /* bytes that are drawn in place of random numbers; NULL = none */
} fx_bytes;

static bool fx_bytes_over(void) { return fx_bytes.p && fx_bytes.p == fx_bytes.end; }

/* 0 .. n-1: from the bytes, zeros when they are used up; or from the seed. */
static uint32_t fx_rnd(uint32_t n)
{
    if (fx_bytes.p) {
        uint32_t v = 0;
        for (uint32_t most = n - 1; most > 0 && !fx_bytes_over(); most >>= 8) v = v << 8 | *fx_bytes.p++;
        return v % n;
    }
    fx_seed ^= fx_seed << 13;
    fx_seed ^= fx_seed >> 17;
    fx_seed ^= fx_seed << 5;
    return fx_seed % n;
}

#endif
