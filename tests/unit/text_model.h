/* text_model.h - vocabularies for the tests of src/text: those of real model files, if they are there, and small ones
 * made on the spot.
 */
#ifndef LR_TEST_TEXT_MODEL_H
#define LR_TEST_TEXT_MODEL_H
#include "base/mem.h"
#include "file/gguf.h"
#include "text/text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Processor time of this thread: the tests share their machine with others. */
static inline double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline const lr_gguf_array *kv_array(const lr_gguf *g, const char *key)
{
    const lr_gguf_kv *kv = lr_gguf_find(g, key);
    return kv && kv->type == LR_KV_ARRAY ? &kv->v.a : NULL;
}

static inline int32_t kv_id(const lr_gguf *g, const char *key)
{
    lr_error err;
    int64_t id;
    return lr_gguf_get_i64(g, key, &id, &err) == 0 ? (int32_t)id : -1;
}

static inline bool kv_bool(const lr_gguf *g, const char *key, bool absent)
{
    lr_error err;
    bool b;
    return lr_gguf_get_bool(g, key, &b, &err) == 0 ? b : absent;
}

/* A zero-terminated copy in buf of a string key, or NULL. */
static inline const char *kv_name(const lr_gguf *g, const char *key, char buf[64])
{
    lr_error err;
    lr_str s;
    if (lr_gguf_get_str(g, key, &s, &err) || s.n > 63) return NULL;
    memcpy(buf, s.s, s.n);
    buf[s.n] = 0;
    return buf;
}

/* NULL, with a line on the terminal, if the file is not there. *build_s: time of lr_vocab_new. */
static inline lr_vocab *model_vocab(const char *file, double *build_s)
{
    char path[1024], model[64], pre[64];
    const char *dir = getenv("LLMRUN_MODELS"), *home = getenv("HOME");
    lr_gguf *g;
    lr_error err;
    if (dir)
        snprintf(path, sizeof path, "%s/%s", dir, file);
    else
        snprintf(path, sizeof path, "%s/.cache/llmrun/%s", home ? home : "", file);
    if (lr_gguf_open(&g, path, &err)) {
        printf("skipped: no model: %s\n", err.text);
        return NULL;
    }
    const lr_gguf_array *tokens = kv_array(g, "tokenizer.ggml.tokens"), *scores = kv_array(g, "tokenizer.ggml.scores"),
                        *types = kv_array(g, "tokenizer.ggml.token_type"),
                        *merges = kv_array(g, "tokenizer.ggml.merges");
    lr_vocab_spec spec = {
        .model = kv_name(g, "tokenizer.ggml.model", model),
        .pre = kv_name(g, "tokenizer.ggml.pre", pre),
        .n_tokens = tokens ? (uint32_t)tokens->count : 0,
        .tokens = tokens ? tokens->data : NULL,
        .scores = scores ? scores->data : NULL,
        .types = types ? types->data : NULL,
        .n_merges = merges ? merges->count : 0,
        .merges = merges ? merges->data : NULL,
        .bos = kv_id(g, "tokenizer.ggml.bos_token_id"),
        .eos = kv_id(g, "tokenizer.ggml.eos_token_id"),
        .unk = kv_id(g, "tokenizer.ggml.unknown_token_id"),
        .eot = kv_id(g, "tokenizer.ggml.eot_token_id"),
        .pad = kv_id(g, "tokenizer.ggml.padding_token_id"),
        .add_eos = kv_bool(g, "tokenizer.ggml.add_eos_token", false),
        .add_space_prefix = kv_bool(g, "tokenizer.ggml.add_space_prefix", true),
    };
    spec.add_bos = kv_bool(g, "tokenizer.ggml.add_bos_token", lr_text_default_bos(spec.model, spec.pre));
    lr_vocab *v = NULL;
    double t = now_s();
    if (lr_vocab_new(&v, &spec, &err)) printf("%s: %s\n", path, err.text);
    if (build_s) *build_s = now_s() - t;
    lr_gguf_free(g);
    if (!v) exit(1);
    return v;
}

#endif
