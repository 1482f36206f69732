/* fuzz_gguf.c - libFuzzer target: any bytes as a GGUF file; all that opens is read to the last byte.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -Isrc tests/fuzz/fuzz_gguf.c src/file/[a-z]*.c \
 *       src/base/dtype.c src/base/error.c src/base/mem.c -o build/fuzz_gguf
 *   build/fuzz_gguf -max_len=4096 -max_total_time=180 tests/fuzz/corpus/gguf
 *
 * tests/unit/test_gguf_corpus.c replays the corpus. Files that must be refused start with "bad-", others with "ok-";
 * what the fuzzer adds has neither.
 */
#define _GNU_SOURCE
#include "file/gguf.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint64_t sum; /* keeps the reads */

static void touch(const void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) sum += ((const uint8_t *)p)[i];
}

static void touch_array(const lr_gguf_array *a)
{
    for (size_t i = 0; i < a->count; i++) {
        if (a->type == LR_KV_ARRAY)
            touch_array((const lr_gguf_array *)a->data + i);
        else if (a->type == LR_KV_STR)
            touch(((const lr_str *)a->data)[i].s, ((const lr_str *)a->data)[i].n);
        else
            sum += (uint64_t)lr_gguf_array_i64(a, i) + (lr_gguf_array_f64(a, i) > 0);
    }
}

static void touch_tensor(const lr_gguf *g, const lr_gguf_tensor *t)
{
    lr_error err;
    float y[256];
    if (lr_gguf_find_tensor(g, t->name) != t) abort();
    touch(t->data, t->size);
    uint64_t n = t->ne[0] < 256 ? t->ne[0] : 256;
    lr_dtype_to_f32(t->type, t->data, y, n);
    if (lr_gguf_read(g, t, 0, y, t->size < sizeof y ? t->size : sizeof y, &err) != 0) abort();
    lr_gguf_advise(g, t, LR_GGUF_WILLNEED);
    lr_gguf_advise(g, t, LR_GGUF_DONTNEED);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    lr_error err;
    lr_gguf *g;
    if (fd < 0) {
        fd = memfd_create("fuzz.gguf", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) return 0;
    if (lr_gguf_open_copy(&g, path, &err) != 0) {
        if (err.code >= 0 || !err.text[0]) abort();
        return 0;
    }
    for (size_t i = 0; i < lr_gguf_n_kv(g); i++) {
        const lr_gguf_kv *kv = lr_gguf_kv_at(g, i);
        if (lr_gguf_find(g, kv->key) != kv) abort();
        if (kv->type == LR_KV_STR) touch(kv->v.s.s, kv->v.s.n);
        if (kv->type == LR_KV_ARRAY) touch_array(&kv->v.a);
        uint64_t u;
        double f;
        (void)lr_gguf_get_u64(g, kv->key, &u, &err);
        (void)lr_gguf_get_f64(g, kv->key, &f, &err);
    }
    for (size_t i = 0; i < lr_gguf_n_tensors(g); i++) touch_tensor(g, lr_gguf_tensor_at(g, i));
    lr_gguf_free(g);
    return 0;
}
