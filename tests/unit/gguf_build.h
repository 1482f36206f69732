/* gguf_build.h - for the tests of GGUF files: raw bytes put together by hand, a folder for files, and a full read.
 *
 * Hostile files cannot come from the writer, which refuses to make them; here nothing is checked.
 */
#ifndef LR_TEST_GGUF_BUILD_H
#define LR_TEST_GGUF_BUILD_H
#include "base/mem.h"
#include "file/gguf.h"
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

typedef struct buf {
    uint8_t p[1 << 18];
    size_t n;
} buf;

static inline void put(buf *b, const void *p, size_t n)
{
    assert_true(b->n + n <= sizeof b->p);
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
}
static inline void put32(buf *b, uint32_t v) { put(b, &v, 4); }
static inline void put64(buf *b, uint64_t v) { put(b, &v, 8); }
static inline void putn(buf *b, const char *s, size_t n)
{
    put64(b, n);
    put(b, s, n);
}
static inline void puts_(buf *b, const char *s) { putn(b, s, strlen(s)); }
static inline void put_header(buf *b, uint32_t version, uint64_t n_tensors, uint64_t n_kv)
{
    b->n = 0;
    put(b, "GGUF", 4);
    put32(b, version);
    put64(b, n_tensors);
    put64(b, n_kv);
}
static inline void put_kv32(buf *b, const char *key, uint32_t type, uint32_t v)
{
    puts_(b, key);
    put32(b, type);
    put32(b, v);
}
static inline void put_tensor(buf *b, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *ne,
                              uint64_t off)
{
    puts_(b, name);
    put32(b, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) put64(b, ne[i]);
    put32(b, type);
    put64(b, off);
}
static inline void pad_to(buf *b, size_t align)
{
    while (b->n % align) put(b, "", 1);
}
static inline void put_zeros(buf *b, size_t n)
{
    while (n--) put(b, "", 1);
}

/* One folder a test program, made at the first call; remove_folder empties and removes it. */
static char test_folder[256];
static inline const char *file_in_folder(const char *name)
{
    static char path[4][512];
    static int turn;
    if (!test_folder[0]) {
        const char *tmp = getenv("TMPDIR");
        snprintf(test_folder, sizeof test_folder, "%s/llmrun-test-XXXXXX", tmp ? tmp : "/tmp");
        assert_non_null(mkdtemp(test_folder));
    }
    char *p = path[turn++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", test_folder, name);
    return p;
}

/* Number of entries of the folder whose name contains part. */
static inline int count_files(const char *part)
{
    int n = 0;
    DIR *d = opendir(test_folder);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.' && strstr(e->d_name, part);
    closedir(d);
    return n;
}

static inline int remove_folder(void **state)
{
    DIR *d = test_folder[0] ? opendir(test_folder) : NULL;
    if (!d) return 0;
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.') unlinkat(dirfd(d), e->d_name, 0);
    closedir(d);
    rmdir(test_folder);
    test_folder[0] = 0;
    return 0;
}

static inline void write_file(const char *path, const void *p, size_t n)
{
    unlink(path); /* a new file: some filesystems write one that was truncated to the disk at close */
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static inline uint64_t touch_array(const lr_gguf_array *a)
{
    uint64_t sum = a->count;
    for (size_t i = 0; i < a->count; i++) {
        if (a->type == LR_KV_ARRAY) {
            sum += touch_array((const lr_gguf_array *)a->data + i);
        } else if (a->type == LR_KV_STR) {
            lr_str s = ((const lr_str *)a->data)[i];
            for (size_t k = 0; k < s.n; k++) sum += (uint8_t)s.s[k];
        } else {
            double f = lr_gguf_array_f64(a, i);
            sum += (uint64_t)lr_gguf_array_i64(a, i) + (f > 0 && f < 1e9 ? (uint64_t)f : 0);
        }
    }
    return sum;
}

/* Reads every byte that an opened file hands out, for the sanitizers to see. */
static inline uint64_t touch_all(const lr_gguf *g)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < lr_gguf_n_kv(g); i++) {
        const lr_gguf_kv *kv = lr_gguf_kv_at(g, i);
        assert_ptr_equal(lr_gguf_find(g, kv->key), kv);
        if (kv->type == LR_KV_ARRAY) sum += touch_array(&kv->v.a);
        if (kv->type == LR_KV_STR)
            for (size_t k = 0; k < kv->v.s.n; k++) sum += (uint8_t)kv->v.s.s[k];
    }
    for (size_t i = 0; i < lr_gguf_n_tensors(g); i++) {
        const lr_gguf_tensor *t = lr_gguf_tensor_at(g, i);
        assert_ptr_equal(lr_gguf_find_tensor(g, t->name), t);
        for (size_t k = 0; k < t->size; k++) sum += ((const uint8_t *)t->data)[k];
    }
    return sum;
}

#endif
