/* fuzz_safetensors.c - libFuzzer target: any bytes as a safetensors file; all that opens is read to the last byte.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -Isrc tests/fuzz/fuzz_safetensors.c src/file/[a-z]*.c \
 *       src/base/dtype.c src/base/error.c src/base/mem.c -o build/fuzz_safetensors
 *   build/fuzz_safetensors -max_len=1024 -max_total_time=120 FOLDER
 */
#define _GNU_SOURCE
#include "file/safetensors.h"
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    lr_error err;
    lr_safetensors *s;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) return 0;
    if (lr_safetensors_open(&s, path, true, &err) != 0) {
        if (err.code >= 0 || !err.text[0]) abort();
        return 0;
    }
    for (size_t i = 0; i < lr_safetensors_n_tensors(s); i++) {
        const lr_safetensors_tensor *t = lr_safetensors_tensor_at(s, i);
        if (lr_safetensors_find(s, t->name) != t) abort();
        touch(t->data, t->size);
        float y[64];
        if (t->type >= 0) lr_dtype_to_f32(t->type, t->data, y, t->size / (size_t)lr_dtype_bytes(t->type) % 65);
    }
    for (size_t i = 0; i < lr_safetensors_n_meta(s); i++) {
        const lr_safetensors_meta *m = lr_safetensors_meta_at(s, i);
        touch(m->key.s, m->key.n + 1);
        touch(m->value.s, m->value.n + 1);
    }
    lr_safetensors_free(s);
    return 0;
}
