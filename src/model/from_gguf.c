/* from_gguf.c - see from_gguf.h */
#include "model/from_gguf.h"
#include "base/mem.h"
#include <stdio.h>
#include <string.h>

/* ---- weights ---- */

static bool find_weight(void *user, const char *name, lr_tensor *t)
{
    const lr_gguf_tensor *s = lr_gguf_find_tensor(user, name);
    if (!s) return false;
    *t = (lr_tensor){.name = s->name, .type = s->type, .n_dims = s->n_dims, .data = s->data, .size = s->size};
    for (int i = 0; i < 4; i++) t->ne[i] = s->ne[i] > INT64_MAX ? INT64_MAX : (int64_t)s->ne[i];
    return true;
}

static void weight_used(void *user, const lr_tensor *t, bool gone)
{
    const lr_gguf_tensor *s = lr_gguf_find_tensor(user, t->name);
    if (s && gone) lr_gguf_advise(user, s, LR_GGUF_DONTNEED);
}

static int weights_intact(void *user, bool all, lr_error *err)
{
    return all ? lr_gguf_check_unchanged(user, err) : lr_gguf_check_intact(user, err);
}

lr_weight_source lr_gguf_weights(const lr_gguf *g)
{
    lr_weight_source s = {
        .user = (void *)(uintptr_t)g, .find = find_weight, .used = weight_used, .intact = weights_intact};
    for (size_t i = 0; i < lr_gguf_n_tensors(g); i++) s.bytes += lr_gguf_tensor_at(g, i)->size;
    return s;
}

/* ---- vocabulary ---- */

/* An optional token id; -1 if the key is missing. */
static int get_id(const lr_gguf *g, const char *key, uint32_t n, int32_t *out, lr_error *err)
{
    uint64_t id;
    *out = -1;
    int rc = lr_gguf_get_u64(g, key, &id, err);
    if (rc == LR_ENOTFOUND) return 0;
    if (rc) return rc;
    if (id == UINT32_MAX) return 0;
    if (id >= n)
        return lr_fail(err, LR_EFORMAT, "key '%s': %llu is not one of the %u tokens", key, (unsigned long long)id, n);
    *out = (int32_t)id;
    return 0;
}

static int get_flag(const lr_gguf *g, const char *key, bool def, bool *out, lr_error *err)
{
    int rc = lr_gguf_get_bool(g, key, out, err);
    if (rc == LR_ENOTFOUND) {
        *out = def;
        return 0;
    }
    return rc;
}

static int get_name(const lr_gguf *g, const char *key, char *buf, size_t cap, bool needed, lr_error *err)
{
    lr_str s;
    int rc = lr_gguf_get_str(g, key, &s, err);
    buf[0] = 0;
    if (rc == LR_ENOTFOUND && !needed) return 0;
    if (rc) return rc;
    if (s.n >= cap || memchr(s.s, 0, s.n)) return lr_fail(err, LR_EFORMAT, "key '%s': not a name", key);
    memcpy(buf, s.s, s.n);
    buf[s.n] = 0;
    return 0;
}

/* An array that, if there, must have n elements of the type. */
static int get_column(const lr_gguf *g, const char *key, int type, size_t n, const void **out, lr_error *err)
{
    const lr_gguf_array *a;
    *out = NULL;
    int rc = lr_gguf_get_array(g, key, type, &a, err);
    if (rc == LR_ENOTFOUND) return 0;
    if (rc) return rc;
    if (a->count != n) return lr_fail(err, LR_EFORMAT, "key '%s': %zu values for %zu tokens", key, a->count, n);
    *out = a->data;
    return 0;
}

static int get_ids(const lr_gguf *g, lr_vocab_spec *s, lr_error *err)
{
    int rc;
    uint32_t n = s->n_tokens;
    if ((rc = get_id(g, "tokenizer.ggml.bos_token_id", n, &s->bos, err)) ||
        (rc = get_id(g, "tokenizer.ggml.eos_token_id", n, &s->eos, err)) ||
        (rc = get_id(g, "tokenizer.ggml.unknown_token_id", n, &s->unk, err)) ||
        (rc = get_id(g, "tokenizer.ggml.eot_token_id", n, &s->eot, err)) ||
        (rc = get_id(g, "tokenizer.ggml.padding_token_id", n, &s->pad, err)))
        return rc;
    if ((rc = get_flag(g, "tokenizer.ggml.add_bos_token", lr_text_default_bos(s->model, s->pre), &s->add_bos, err)) ||
        (rc = get_flag(g, "tokenizer.ggml.add_eos_token", false, &s->add_eos, err)) ||
        (rc = get_flag(g, "tokenizer.ggml.add_space_prefix", true, &s->add_space_prefix, err)))
        return rc;
    return 0;
}

int lr_gguf_vocab(const lr_gguf *g, lr_vocab **out, lr_error *err)
{
    char model[64], pre[64];
    const lr_gguf_array *a;
    const void *scores, *types;
    lr_vocab_spec s = {.model = model, .pre = pre};
    int rc;
    if ((rc = get_name(g, "tokenizer.ggml.model", model, sizeof model, true, err)) ||
        (rc = get_name(g, "tokenizer.ggml.pre", pre, sizeof pre, false, err)))
        return rc;
    if ((rc = lr_gguf_get_array(g, "tokenizer.ggml.tokens", LR_KV_STR, &a, err))) return rc;
    if (a->count > LR_VOCAB_MAX)
        return lr_fail(err, LR_EFORMAT, "key 'tokenizer.ggml.tokens': %zu tokens are too many", a->count);
    s.n_tokens = (uint32_t)a->count;
    s.tokens = a->data;
    if ((rc = get_column(g, "tokenizer.ggml.scores", LR_KV_F32, s.n_tokens, &scores, err)) ||
        (rc = get_column(g, "tokenizer.ggml.token_type", LR_KV_I32, s.n_tokens, &types, err)))
        return rc;
    s.scores = scores;
    s.types = types;
    rc = lr_gguf_get_array(g, "tokenizer.ggml.merges", LR_KV_STR, &a, err);
    if (rc && rc != LR_ENOTFOUND) return rc;
    if (!rc) {
        s.n_merges = a->count;
        s.merges = a->data;
    }
    if ((rc = get_ids(g, &s, err))) return rc;
    return lr_vocab_new(out, &s, err);
}

/* ---- fingerprint ---- */

static uint64_t mix(uint64_t h, const void *data, size_t n)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u; /* FNV-1a */
    return h;
}

uint64_t lr_gguf_fingerprint(const lr_gguf *g)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < lr_gguf_n_kv(g); i++) {
        const lr_gguf_kv *kv = lr_gguf_kv_at(g, i);
        h = mix(h, kv->key, strlen(kv->key));
        if (kv->type == LR_KV_STR)
            h = mix(h, kv->v.s.s, kv->v.s.n);
        else if (kv->type == LR_KV_ARRAY)
            h = mix(h, &kv->v.a.count, sizeof kv->v.a.count);
        else if (kv->type == LR_KV_BOOL)
            h = mix(h, &kv->v.b, sizeof kv->v.b);
        else
            h = mix(h, &kv->v.u, sizeof kv->v.u);
    }
    for (size_t i = 0; i < lr_gguf_n_tensors(g); i++) {
        const lr_gguf_tensor *t = lr_gguf_tensor_at(g, i);
        h = mix(h, t->name, strlen(t->name));
        h = mix(h, t->ne, sizeof t->ne);
        h = mix(h, &t->type, sizeof t->type);
        size_t n = t->size < 256 ? t->size : 256;
        h = mix(h, t->data, n);
        h = mix(h, (const char *)t->data + (t->size - n), n);
    }
    return h;
}
