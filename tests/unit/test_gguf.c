/* test_gguf.c - GGUF files: what is written is read back, typed getters, shards, files that change; the writer's care.
 *
 * Damaged and hostile files are in test_gguf_bad.c.
 */
#include "file/gguf.h"
#include "file/gguf_write.h"
#include "gguf_build.h"
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#define ARRAY(t, T, ...) ((lr_gguf_array){t, sizeof((T[]){__VA_ARGS__}) / sizeof(T), (T[]){__VA_ARGS__}})
#define OK(expr)                                                                                                       \
    do {                                                                                                               \
        int rc_ = (expr);                                                                                              \
        if (rc_ != 0) fail_msg("%s: %s (%s)", #expr, err.text, lr_error_name(rc_));                                    \
    } while (0)
#define FAILS(expr, want, part)                                                                                        \
    do {                                                                                                               \
        int rc_ = (expr);                                                                                              \
        if (rc_ != (want) || err.code != (want))                                                                       \
            fail_msg("%s: %s, not %s: %s", #expr, lr_error_name(rc_), #want, err.text);                                \
        if (!strstr(err.text, part)) fail_msg("%s: \"%s\" does not say \"%s\"", #expr, err.text, part);                \
    } while (0)

static lr_error err;

/* A key of every type and tensors of several, with an odd alignment; the data of tensor i are bytes i+1, i+2, ... */
static const uint64_t shapes[][4] = {{64, 3, 1, 1}, {256, 2, 1, 1}, {5, 1, 1, 1}, {32, 2, 3, 2}};
static const struct {
    const char *name;
    int type, n_dims;
} tensors[] = {
    {"token_embd.weight", LR_Q8_0, 2}, {"blk.0.ffn.weight", LR_Q4_K, 2}, {"odd", LR_F32, 1}, {"cube", LR_Q4_0, 4}};
enum { N_TENSORS = 4 };

static void put_all_keys(lr_gguf_writer *w)
{
    lr_gguf_array inner[2] = {ARRAY(LR_KV_U16, uint16_t, 1, 2, 3),
                              ARRAY(LR_KV_STR, lr_str, LR_STR("in"), LR_STR("side"))};
    const lr_gguf_kv kvs[] = {
        {"general.architecture", LR_KV_STR, .v.s = LR_STR("llama")},
        {"general.alignment", LR_KV_U32, .v.u = 64},
        {"a.u8", LR_KV_U8, .v.u = 255},
        {"a.i8", LR_KV_I8, .v.i = -128},
        {"a.u16", LR_KV_U16, .v.u = 65535},
        {"a.i16", LR_KV_I16, .v.i = -32768},
        {"a.i32", LR_KV_I32, .v.i = INT32_MIN},
        {"a.u32", LR_KV_U32, .v.u = UINT32_MAX},
        {"a.f32", LR_KV_F32, .v.f = 0.1f},
        {"a.true", LR_KV_BOOL, .v.b = true},
        {"a.false", LR_KV_BOOL, .v.b = false},
        {"a.u64", LR_KV_U64, .v.u = UINT64_MAX},
        {"a.i64", LR_KV_I64, .v.i = INT64_MIN},
        {"a.f64", LR_KV_F64, .v.f = 0.1},
        {"a.empty", LR_KV_STR, .v.s = {NULL, 0}},
        {"a.zero\xff", LR_KV_STR, .v.s = LR_STR("a\0b\xff")},
        {"r.u8", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_U8, uint8_t, 1, 255)},
        {"r.i8", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_I8, int8_t, -1, 127)},
        {"r.u16", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_U16, uint16_t, 1, 65535)},
        {"r.i16", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_I16, int16_t, -1, 32767)},
        {"r.u32", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_U32, uint32_t, 1, UINT32_MAX)},
        {"r.i32", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_I32, int32_t, -1, INT32_MAX)},
        {"r.u64", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_U64, uint64_t, 1, UINT64_MAX)},
        {"r.i64", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_I64, int64_t, -1, INT64_MIN)},
        {"r.f32", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_F32, float, 0.5f, -2)},
        {"r.f64", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_F64, double, 0.1, -2)},
        {"r.bool", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_BOOL, bool, true, false, true)},
        {"r.str", LR_KV_ARRAY, .v.a = ARRAY(LR_KV_STR, lr_str, LR_STR("x"), LR_STR(""), LR_STR("a\0b"))},
        {"r.none", LR_KV_ARRAY, .v.a = {LR_KV_I32, 0, NULL}},
        {"r.nested", LR_KV_ARRAY, .v.a = {LR_KV_ARRAY, 2, inner}},
    };
    for (size_t i = 0; i < sizeof kvs / sizeof *kvs; i++) OK(lr_gguf_writer_put(w, &kvs[i], &err));
}

static void put_all_tensors(lr_gguf_writer *w)
{
    static const size_t sizes[N_TENSORS] = {2 * 34 * 3, 144 * 2, 20, 18 * 12};
    for (int i = 0; i < N_TENSORS; i++)
        OK(lr_gguf_writer_tensor(w, tensors[i].name, tensors[i].type, tensors[i].n_dims, shapes[i], &err));
    for (int i = 0; i < N_TENSORS; i++)
        for (size_t k = 0; k < sizes[i]; k++)
            OK(lr_gguf_writer_data(w, &(uint8_t){(uint8_t)(i + 1 + (int)k)}, 1, &err));
}

static const char *write_sample(const char *name)
{
    const char *path = file_in_folder(name);
    lr_gguf_writer *w;
    OK(lr_gguf_writer_new(&w, path, &err));
    put_all_keys(w);
    put_all_tensors(w);
    OK(lr_gguf_writer_finish(w, &err));
    lr_gguf_writer_free(w);
    return path;
}

static void check_sample(const lr_gguf *g)
{
    assert_int_equal(lr_gguf_version(g), 3);
    assert_int_equal(lr_gguf_n_kv(g), 30);
    assert_int_equal(lr_gguf_n_tensors(g), N_TENSORS);
    assert_int_equal(lr_gguf_n_shards(g), 1);
    for (size_t i = 0; i < N_TENSORS; i++) {
        const lr_gguf_tensor *t = lr_gguf_find_tensor(g, tensors[i].name);
        assert_ptr_equal(t, lr_gguf_tensor_at(g, i));
        assert_int_equal(t->type, tensors[i].type);
        assert_int_equal(t->n_dims, tensors[i].n_dims);
        assert_memory_equal(t->ne, shapes[i], sizeof t->ne);
        assert_int_equal((uintptr_t)t->data % 64, 0);
        assert_int_equal(t->offset % 64, 0);
        assert_int_equal(t->shard, 0);
        uint8_t *copy = lr_malloc(t->size);
        OK(lr_gguf_read(g, t, 0, copy, t->size, &err));
        for (size_t k = 0; k < t->size; k++) {
            assert_int_equal(((const uint8_t *)t->data)[k], (uint8_t)(i + 1 + k));
            assert_int_equal(copy[k], (uint8_t)(i + 1 + k));
        }
        OK(lr_gguf_read(g, t, t->size - 1, copy, 1, &err));
        assert_int_equal(copy[0], (uint8_t)(i + t->size));
        FAILS(lr_gguf_read(g, t, t->size, copy, 1, &err), LR_EINVAL, t->name);
        FAILS(lr_gguf_read(g, t, 2, copy, SIZE_MAX - 1, &err), LR_EINVAL, t->name);
        lr_free(copy);
    }
    assert_null(lr_gguf_find_tensor(g, "token_embd"));
    assert_null(lr_gguf_find_tensor(g, ""));
    assert_null(lr_gguf_find(g, "general.architectures"));
}

static void test_round_trip(void **state)
{
    const char *path = write_sample("sample.gguf");
    lr_gguf *g;
    OK(lr_gguf_open(&g, path, &err));
    check_sample(g);
    assert_string_equal(lr_gguf_shard_path(g, 0), path);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(lr_gguf_file_bytes(g), st.st_size);
    assert_int_equal(st.st_size % 64, 0);
    OK(lr_gguf_check_unchanged(g, &err));

    /* what was read, written again, is the same file */
    const char *again = file_in_folder("again.gguf");
    lr_gguf_writer *w;
    OK(lr_gguf_writer_new(&w, again, &err));
    for (size_t i = 0; i < lr_gguf_n_kv(g); i++) OK(lr_gguf_writer_put(w, lr_gguf_kv_at(g, i), &err));
    for (size_t i = 0; i < N_TENSORS; i++) {
        const lr_gguf_tensor *t = lr_gguf_tensor_at(g, i);
        OK(lr_gguf_writer_tensor(w, t->name, t->type, t->n_dims, t->ne, &err));
    }
    for (size_t i = 0; i < N_TENSORS; i++)
        OK(lr_gguf_writer_data(w, lr_gguf_tensor_at(g, i)->data, lr_gguf_tensor_at(g, i)->size, &err));
    OK(lr_gguf_writer_finish(w, &err));
    lr_gguf_writer_free(w);
    uint8_t *a = lr_malloc((size_t)st.st_size), *b = lr_malloc((size_t)st.st_size);
    FILE *fa = fopen(path, "rb"), *fb = fopen(again, "rb");
    assert_int_equal(fread(a, 1, (size_t)st.st_size, fa), st.st_size);
    assert_int_equal(fread(b, 1, (size_t)st.st_size, fb), st.st_size);
    assert_int_equal(fgetc(fb), EOF);
    assert_memory_equal(a, b, st.st_size);
    fclose(fa);
    fclose(fb);
    lr_free(a);
    lr_free(b);
    lr_gguf_free(g);

    OK(lr_gguf_open_copy(&g, path, &err));
    check_sample(g);
    lr_gguf_advise(g, NULL, LR_GGUF_WILLNEED);
    lr_gguf_free(g);
    lr_gguf_free(NULL);
}

static void test_getters(void **state)
{
    lr_gguf *g;
    OK(lr_gguf_open(&g, write_sample("getters.gguf"), &err));
    uint64_t u;
    int64_t i;
    double f;
    bool b;
    lr_str s;
    static const struct {
        const char *key;
        int64_t want;
    } ints[] = {{"a.u8", 255},        {"a.i8", -128},        {"a.u16", 65535},    {"a.i16", -32768},
                {"a.i32", INT32_MIN}, {"a.u32", UINT32_MAX}, {"a.i64", INT64_MIN}};
    for (size_t k = 0; k < sizeof ints / sizeof *ints; k++) {
        OK(lr_gguf_get_i64(g, ints[k].key, &i, &err));
        assert_true(i == ints[k].want);
        if (i >= 0) {
            OK(lr_gguf_get_u64(g, ints[k].key, &u, &err));
            assert_true(u == (uint64_t)i);
        } else {
            FAILS(lr_gguf_get_u64(g, ints[k].key, &u, &err), LR_EFORMAT, ints[k].key);
        }
    }
    OK(lr_gguf_get_u64(g, "a.u64", &u, &err));
    assert_true(u == UINT64_MAX);
    i = 42;
    FAILS(lr_gguf_get_i64(g, "a.u64", &i, &err), LR_EFORMAT, "a.u64");
    assert_int_equal(i, 42); /* results are untouched on failure */
    OK(lr_gguf_get_f64(g, "a.f32", &f, &err));
    assert_true(f == (double)0.1f);
    OK(lr_gguf_get_f64(g, "a.f64", &f, &err));
    assert_true(f == 0.1);
    OK(lr_gguf_get_bool(g, "a.true", &b, &err));
    assert_true(b);
    OK(lr_gguf_get_bool(g, "a.false", &b, &err));
    assert_false(b);
    OK(lr_gguf_get_str(g, "a.zero\xff", &s, &err));
    assert_true(lr_str_eq(s, LR_STR("a\0b\xff")));
    OK(lr_gguf_get_str(g, "a.empty", &s, &err));
    assert_int_equal(s.n, 0);

    FAILS(lr_gguf_get_u64(g, "no.such", &u, &err), LR_ENOTFOUND, "no.such");
    FAILS(lr_gguf_get_i64(g, "", &i, &err), LR_ENOTFOUND, "key");
    FAILS(lr_gguf_get_u64(g, "a.f32", &u, &err), LR_EFORMAT, "key a.f32: type is f32, wanted an integer");
    FAILS(lr_gguf_get_u64(g, "a.true", &u, &err), LR_EFORMAT, "type is bool");
    FAILS(lr_gguf_get_i64(g, "general.architecture", &i, &err), LR_EFORMAT, "type is str");
    FAILS(lr_gguf_get_f64(g, "a.u8", &f, &err), LR_EFORMAT, "key a.u8: type is u8, wanted f32 or f64");
    FAILS(lr_gguf_get_bool(g, "a.u8", &b, &err), LR_EFORMAT, "a.u8");
    FAILS(lr_gguf_get_str(g, "r.str", &s, &err), LR_EFORMAT, "key r.str: type is array, wanted str");
    lr_gguf_free(g);
}

static void test_arrays(void **state)
{
    lr_gguf *g;
    OK(lr_gguf_open(&g, write_sample("arrays.gguf"), &err));
    const lr_gguf_array *a;
    static const struct {
        const char *key;
        int type;
        int64_t first, second;
    } ints[] = {{"r.u8", LR_KV_U8, 1, 255},
                {"r.i8", LR_KV_I8, -1, 127},
                {"r.u16", LR_KV_U16, 1, 65535},
                {"r.i16", LR_KV_I16, -1, 32767},
                {"r.u32", LR_KV_U32, 1, UINT32_MAX},
                {"r.i32", LR_KV_I32, -1, INT32_MAX},
                {"r.u64", LR_KV_U64, 1, INT64_MAX /* saturated */},
                {"r.i64", LR_KV_I64, -1, INT64_MIN},
                {"r.bool", LR_KV_BOOL, 1, 0}};
    for (size_t k = 0; k < sizeof ints / sizeof *ints; k++) {
        OK(lr_gguf_get_array(g, ints[k].key, ints[k].type, &a, &err));
        assert_true(a->count >= 2);
        assert_int_equal((uintptr_t)a->data % 8, 0);
        assert_true(lr_gguf_array_i64(a, 0) == ints[k].first);
        assert_true(lr_gguf_array_i64(a, 1) == ints[k].second);
        assert_true(lr_gguf_array_f64(a, 0) == 0);
    }
    OK(lr_gguf_get_array(g, "r.f32", LR_KV_F32, &a, &err));
    assert_true(lr_gguf_array_f64(a, 0) == 0.5 && lr_gguf_array_f64(a, 1) == -2 && lr_gguf_array_i64(a, 0) == 0);
    OK(lr_gguf_get_array(g, "r.f64", -1, &a, &err));
    assert_true(a->type == LR_KV_F64 && lr_gguf_array_f64(a, 0) == 0.1);
    OK(lr_gguf_get_array(g, "r.none", LR_KV_I32, &a, &err));
    assert_int_equal(a->count, 0);
    OK(lr_gguf_get_array(g, "r.str", LR_KV_STR, &a, &err));
    const lr_str *s = a->data;
    assert_true(a->count == 3 && lr_str_is(s[0], "x") && s[1].n == 0 && lr_str_eq(s[2], LR_STR("a\0b")));
    OK(lr_gguf_get_array(g, "r.nested", LR_KV_ARRAY, &a, &err));
    const lr_gguf_array *in = a->data;
    assert_true(a->count == 2 && in[0].type == LR_KV_U16 && in[0].count == 3 && lr_gguf_array_i64(&in[0], 2) == 3);
    assert_true(in[1].type == LR_KV_STR && lr_str_is(((const lr_str *)in[1].data)[1], "side"));
    assert_true(lr_gguf_array_i64(a, 0) == 0 && lr_gguf_array_i64(&in[1], 0) == 0);
    FAILS(lr_gguf_get_array(g, "r.i32", LR_KV_STR, &a, &err), LR_EFORMAT, "key r.i32: elements are i32, wanted str");
    FAILS(lr_gguf_get_array(g, "a.u8", -1, &a, &err), LR_EFORMAT, "key a.u8: type is u8, wanted array");
    FAILS(lr_gguf_get_array(g, "none", -1, &a, &err), LR_ENOTFOUND, "key none");
    lr_gguf_free(g);
}

/* ---- shards ---- */

static const char *shard_name(int i, int count)
{
    char name[64];
    snprintf(name, sizeof name, "m-%05d-of-%05d.gguf", i + 1, count);
    return file_in_folder(name);
}

/* Shard i of count, one tensor "t<i>" of 4 floats; the numbers inside may lie. */
static void write_shard(const char *path, int no, int count, const char *tensor, uint32_t total)
{
    lr_gguf_writer *w;
    OK(lr_gguf_writer_new(&w, path, &err));
    if (no == 0) OK(lr_gguf_writer_str(w, "general.architecture", LR_STR("llama"), &err));
    lr_gguf_kv kv[] = {{"split.no", LR_KV_U16, .v.u = (uint64_t)no},
                       {"split.count", LR_KV_U16, .v.u = (uint64_t)count}};
    OK(lr_gguf_writer_put(w, &kv[0], &err));
    OK(lr_gguf_writer_put(w, &kv[1], &err));
    OK(lr_gguf_writer_put(w, &(lr_gguf_kv){"split.tensors.count", LR_KV_I32, .v.i = (int64_t)total}, &err));
    OK(lr_gguf_writer_tensor(w, tensor, LR_F32, 1, (uint64_t[]){4}, &err));
    float data[4] = {(float)no, 1, 2, 3};
    OK(lr_gguf_writer_data(w, data, sizeof data, &err));
    OK(lr_gguf_writer_finish(w, &err));
    lr_gguf_writer_free(w);
}

static void test_shards(void **state)
{
    static const char *const names[] = {"t0", "t1", "t2"};
    lr_gguf *g;
    for (int i = 0; i < 3; i++) write_shard(shard_name(i, 3), i, 3, names[i], 3);
    for (int from = 0; from < 3; from++) {
        OK(lr_gguf_open(&g, shard_name(from, 3), &err));
        assert_int_equal(lr_gguf_n_shards(g), 3);
        assert_int_equal(lr_gguf_n_tensors(g), 3);
        assert_non_null(lr_gguf_find(g, "general.architecture"));
        for (int i = 0; i < 3; i++) {
            const lr_gguf_tensor *t = lr_gguf_find_tensor(g, names[i]);
            assert_true(t && t->shard == i && *(const float *)t->data == (float)i);
            assert_string_equal(lr_gguf_shard_path(g, i), shard_name(i, 3));
            float first;
            OK(lr_gguf_read(g, t, 0, &first, 4, &err));
            assert_true(first == (float)i);
            lr_gguf_advise(g, t, LR_GGUF_DONTNEED);
        }
        lr_gguf_advise(g, NULL, LR_GGUF_SEQUENTIAL);
        OK(lr_gguf_check_unchanged(g, &err));
        lr_gguf_free(g);
    }

    write_shard(shard_name(1, 3), 2, 3, "t1", 3); /* says it is the third */
    FAILS(lr_gguf_open(&g, shard_name(0, 3), &err), LR_EFORMAT, "shard 3 of 3, but should be 2 of 3");
    write_shard(shard_name(1, 3), 1, 4, "t1", 3);
    FAILS(lr_gguf_open(&g, shard_name(0, 3), &err), LR_EFORMAT, "shard 2 of 4");
    write_shard(shard_name(1, 3), 1, 3, "t0", 3);
    FAILS(lr_gguf_open(&g, shard_name(0, 3), &err), LR_EFORMAT, "tensor t0 appears twice");
    write_shard(shard_name(1, 3), 1, 3, "t1", 3);
    write_shard(shard_name(0, 3), 0, 3, "t0", 4);
    FAILS(lr_gguf_open(&g, shard_name(2, 3), &err), LR_EFORMAT, "split.tensors.count says 4");
    write_shard(shard_name(0, 3), 0, 3, "t0", 3);
    unlink(shard_name(1, 3));
    FAILS(lr_gguf_open(&g, shard_name(0, 3), &err), LR_ENOTFOUND, "m-00002-of-00003.gguf: cannot open");
    write_shard(file_in_folder("plain.gguf"), 0, 3, "t0", 3);
    FAILS(lr_gguf_open(&g, file_in_folder("plain.gguf"), &err), LR_EFORMAT, "must end in -00001-of-00003.gguf");
    write_shard(shard_name(0, 2), 2, 2, "t0", 3);
    FAILS(lr_gguf_open(&g, shard_name(0, 2), &err), LR_EFORMAT, "split.no");
    write_shard(shard_name(0, 2), 0, 60000, "t0", 3);
    FAILS(lr_gguf_open(&g, shard_name(0, 2), &err), LR_EFORMAT, "split.count");
    write_shard(file_in_folder("single.gguf"), 0, 1, "t0", 1); /* one of one needs no special name */
    OK(lr_gguf_open(&g, file_in_folder("single.gguf"), &err));
    lr_gguf_free(g);
}

/* ---- files that are none, or that change ---- */

static void test_not_a_file(void **state)
{
    lr_gguf *g;
    FAILS(lr_gguf_open(&g, file_in_folder("missing.gguf"), &err), LR_ENOTFOUND,
          "missing.gguf: cannot open: No such file");
    FAILS(lr_gguf_open(&g, test_folder, &err), LR_EINVAL, "is a directory");
    const char *fifo = file_in_folder("fifo.gguf");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    FAILS(lr_gguf_open(&g, fifo, &err), LR_EINVAL, "is a pipe"); /* and does not wait for a writer */
    FAILS(lr_gguf_open(&g, "/dev/zero", &err), LR_EINVAL, "is a device");
    write_file(file_in_folder("empty.gguf"), "", 0);
    FAILS(lr_gguf_open(&g, file_in_folder("empty.gguf"), &err), LR_EFORMAT, "is empty");
    char longer[600];
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = 0;
    FAILS(lr_gguf_open(&g, longer, &err), LR_EIO, "...");
    char control[] = "no\x01such\xff";
    FAILS(lr_gguf_open(&g, control, &err), LR_ENOTFOUND, "no?such?:");
}

static void test_changed_file(void **state)
{
    const char *path = write_sample("changing.gguf");
    lr_gguf *g, *copy;
    OK(lr_gguf_open(&g, path, &err));
    OK(lr_gguf_open_copy(&copy, path, &err));
    const lr_gguf_tensor *last = lr_gguf_find_tensor(g, "cube");
    uint8_t bytes[8];

    /* replaced by rename: the old file stays what it was */
    write_sample("other.gguf");
    assert_int_equal(rename(file_in_folder("other.gguf"), path), 0);
    OK(lr_gguf_check_unchanged(g, &err));
    check_sample(g);
    lr_gguf_free(g);
    OK(lr_gguf_open(&g, path, &err));
    last = lr_gguf_find_tensor(g, "cube");

    /* written to in place */
    struct timespec times[2] = {{0, UTIME_OMIT}, {1, 0}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    FAILS(lr_gguf_check_unchanged(g, &err), LR_ESTATE, "was written to");

    /* cut in place: the mapping must not be touched any more, but a read ends in an error */
    assert_int_equal(truncate(path, (off_t)last->offset + 4), 0);
    FAILS(lr_gguf_check_unchanged(g, &err), LR_ESTATE, "has changed since it was opened");
    FAILS(lr_gguf_read(g, last, 0, bytes, 8, &err), LR_EIO, "shorter");
    OK(lr_gguf_read(g, last, 0, bytes, 4, &err));
    lr_gguf_free(g);
    check_sample(copy); /* whose file was replaced, not cut */
    lr_gguf_free(copy);
    FAILS(lr_gguf_open(&g, path, &err), LR_EFORMAT, "tensor cube");
}

/* ---- the writer ---- */

static void test_writer_refusals(void **state)
{
    const char *path = file_in_folder("refused.gguf");
    static const uint64_t row[] = {32}, odd[] = {33}, zero[] = {32, 0}, huge[] = {1ull << 62, 1ull << 3};
    lr_gguf_array deep[5];
    for (int i = 0; i < 5; i++) deep[i] = (lr_gguf_array){LR_KV_ARRAY, i < 4, &deep[i + 1]};
    deep[4] = ARRAY(LR_KV_U8, uint8_t, 1);
    lr_gguf_writer *w;
    for (int i = 0; i < 14; i++) {
        OK(lr_gguf_writer_new(&w, path, &err));
        switch (i) {
        case 0:
            FAILS(lr_gguf_writer_u32(w, "", 1, &err), LR_EINVAL, "key of 0 bytes");
            break;
        case 1:
            FAILS(lr_gguf_writer_put(w, &(lr_gguf_kv){"k", 13, .v.u = 0}, &err), LR_EINVAL, "key k");
            break;
        case 2:
            FAILS(lr_gguf_writer_array(w, "k", LR_KV_ARRAY, deep, 1, &err), LR_EINVAL, "key k");
            break;
        case 3:
            FAILS(lr_gguf_writer_u32(w, "general.alignment", 48, &err), LR_EINVAL, "general.alignment");
            break;
        case 4:
            FAILS(lr_gguf_writer_tensor(w, "t", LR_Q8_0, 1, odd, &err), LR_EINVAL, "tensor t");
            break;
        case 5:
            FAILS(lr_gguf_writer_tensor(w, "t", LR_Q8_0, 2, zero, &err), LR_EINVAL, "tensor t");
            break;
        case 6:
            FAILS(lr_gguf_writer_tensor(w, "t", LR_F32, 2, huge, &err), LR_EINVAL, "tensor t");
            break;
        case 7:
            FAILS(lr_gguf_writer_tensor(w, "t", 4, 1, row, &err), LR_EINVAL, "tensor t");
            break;
        case 8:
            FAILS(lr_gguf_writer_data(w, "x", 1, &err), LR_EINVAL, "more data");
            break;
        case 9:
            OK(lr_gguf_writer_tensor(w, "t", LR_Q8_0, 1, row, &err));
            FAILS(lr_gguf_writer_u32(w, "general.alignment", 64, &err), LR_EINVAL, "before any tensor");
            break;
        case 10:
            OK(lr_gguf_writer_tensor(w, "t", LR_I8, 1, row, &err));
            OK(lr_gguf_writer_data(w, deep, 31, &err));
            FAILS(lr_gguf_writer_finish(w, &err), LR_EINVAL, "tensor t: 31 of 32 bytes");
            break;
        case 11:
            OK(lr_gguf_writer_u32(w, "twice", 1, &err));
            OK(lr_gguf_writer_u32(w, "twice", 2, &err));
            FAILS(lr_gguf_writer_finish(w, &err), LR_EFORMAT, "key twice appears twice");
            break;
        case 12:
            OK(lr_gguf_writer_tensor(w, "t", LR_I8, 1, row, &err));
            OK(lr_gguf_writer_data(w, deep, 1, &err));
            FAILS(lr_gguf_writer_u32(w, "late", 1, &err), LR_EINVAL, "late");
            break;
        default:
            OK(lr_gguf_writer_tensor(w, "t", LR_I8, 1, row, &err));
            FAILS(lr_gguf_writer_data(w, deep, 33, &err), LR_EINVAL, "more data than tensor t");
        }
        lr_error first = err;
        FAILS(lr_gguf_writer_finish(w, &err), first.code, first.text); /* it stays failed */
        lr_gguf_writer_free(w);
        assert_int_equal(access(path, F_OK), -1);
        assert_int_equal(count_files("refused"), 0); /* nor a temporary file */
    }
    FAILS(lr_gguf_writer_new(&w, file_in_folder("no/such.gguf"), &err), LR_ENOTFOUND, "such.gguf: cannot create");
}

/* A failed write leaves the old file alone and nothing else behind. */
static void test_writer_disk_full(void **state)
{
    const char *path = write_sample("full.gguf");
    struct rlimit old, small = {0};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){100000, old.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    lr_gguf_writer *w;
    OK(lr_gguf_writer_new(&w, path, &err));
    OK(lr_gguf_writer_tensor(w, "big", LR_I8, 1, (uint64_t[]){400000}, &err));
    uint8_t *zeros = lr_calloc(1, 400000);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int rc = lr_gguf_writer_data(w, zeros, 400000, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, handler);
    assert_int_equal(rc, LR_EIO);
    assert_non_null(strstr(err.text, "full.gguf: cannot write"));
    lr_gguf_writer_free(w);
    lr_free(zeros);
    assert_int_equal(count_files("full.gguf"), 1);
    lr_gguf *g;
    OK(lr_gguf_open(&g, path, &err));
    check_sample(g);
    lr_gguf_free(g);
}

/* Pieces smaller and larger than the writer's buffer; permissions as for any new file. */
static void test_writer_large(void **state)
{
    const char *path = file_in_folder("large.gguf");
    size_t n = 1 << 20;
    uint32_t *data = lr_malloc(n * 4);
    for (size_t i = 0; i < n; i++) data[i] = (uint32_t)i * 2654435761u;
    mode_t mask = umask(027);
    lr_gguf_writer *w;
    OK(lr_gguf_writer_new(&w, path, &err));
    umask(mask);
    OK(lr_gguf_writer_tensor(w, "a", LR_I32, 1, (uint64_t[]){n}, &err));
    OK(lr_gguf_writer_tensor(w, "b", LR_I32, 1, (uint64_t[]){n}, &err));
    for (size_t at = 0, k = 1; at < n * 4; at += k, k = k * 3 < n * 4 - at ? k * 3 : n * 4 - at)
        OK(lr_gguf_writer_data(w, (uint8_t *)data + at, k, &err));
    OK(lr_gguf_writer_data(w, data, n * 4, &err));
    OK(lr_gguf_writer_finish(w, &err));
    FAILS(lr_gguf_writer_finish(w, &err), LR_ESTATE, "finished");
    lr_gguf_writer_free(w);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);
    lr_gguf *g;
    OK(lr_gguf_open(&g, path, &err));
    assert_memory_equal(lr_gguf_find_tensor(g, "a")->data, data, n * 4);
    assert_memory_equal(lr_gguf_find_tensor(g, "b")->data, data, n * 4);
    lr_gguf_free(g);
    lr_free(data);
}

/* ---- memory and time ---- */

static void test_no_memory(void **state)
{
    const char *path = write_sample("memory.gguf");
    lr_gguf *g;
    for (int copy = 0; copy < 2; copy++) {
        int rc = LR_ENOMEM, n = 0;
        while (rc != 0) {
            lr_mem_fail_at(++n);
            rc = copy ? lr_gguf_open_copy(&g, path, &err) : lr_gguf_open(&g, path, &err);
            lr_mem_fail_at(0);
            if (rc != 0) assert_int_equal(rc, LR_ENOMEM);
        }
        assert_true(n > 8 && n < 40);
        check_sample(g);
        lr_gguf_free(g);
    }
    static const char *const names[] = {"t0", "t1"};
    for (int i = 0; i < 2; i++) write_shard(shard_name(i, 2), i, 2, names[i], 2);
    int rc = LR_ENOMEM;
    for (int n = 1; rc != 0; n++) {
        lr_mem_fail_at(n);
        rc = lr_gguf_open(&g, shard_name(1, 2), &err);
        lr_mem_fail_at(0);
        if (rc != 0) assert_int_equal(rc, LR_ENOMEM);
    }
    lr_gguf_free(g);
}

static int write_small(const char *path)
{
    lr_gguf_writer *w;
    int rc = lr_gguf_writer_new(&w, path, &err);
    if (rc != 0) return rc;
    rc = lr_gguf_writer_u32(w, "k", 1, &err);
    if (rc == 0) rc = lr_gguf_writer_tensor(w, "t", LR_I8, 1, (uint64_t[]){8}, &err);
    if (rc == 0) rc = lr_gguf_writer_data(w, "12345678", 8, &err);
    if (rc == 0) rc = lr_gguf_writer_finish(w, &err);
    lr_gguf_writer_free(w);
    return rc;
}

static void test_writer_no_memory(void **state)
{
    const char *path = file_in_folder("small.gguf");
    int rc = LR_ENOMEM, n = 0;
    while (rc != 0) {
        lr_mem_fail_at(++n);
        rc = write_small(path);
        lr_mem_fail_at(0);
        if (rc != 0) {
            assert_int_equal(rc, LR_ENOMEM);
            assert_int_equal(count_files("small"), 0);
        }
    }
    assert_true(n > 8);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* 50 MB of metadata, a million strings: under a second, and no allocation a string. */
static void test_large_metadata(void **state)
{
    size_t n = 1000000;
    lr_str *s = lr_malloc(n * sizeof *s);
    static const char text[] = "a token of a large vocabulary, or a merge";
    for (size_t i = 0; i < n; i++) s[i] = (lr_str){text, i % sizeof text};
    const char *path = file_in_folder("metadata.gguf");
    lr_gguf_writer *w;
    OK(lr_gguf_writer_new(&w, path, &err));
    OK(lr_gguf_writer_array(w, "tokens", LR_KV_STR, s, n, &err));
    OK(lr_gguf_writer_array(w, "merges", LR_KV_STR, s, n / 2, &err));
    OK(lr_gguf_writer_array(w, "scores", LR_KV_I64, s, 2 * n / 2, &err));
    OK(lr_gguf_writer_finish(w, &err));
    lr_gguf_writer_free(w);
    lr_gguf *g;
    uint64_t before = lr_mem_allocs();
    double t = seconds();
    OK(lr_gguf_open(&g, path, &err));
    t = seconds() - t;
    assert_true(lr_gguf_file_bytes(g) > 50000000);
    assert_true(lr_mem_allocs() - before < 30);
    assert_true(t < 10);
    const lr_gguf_array *a;
    OK(lr_gguf_get_array(g, "tokens", LR_KV_STR, &a, &err));
    for (size_t i = 0; i < n; i += 9973) assert_true(lr_str_eq(((const lr_str *)a->data)[i], s[i]));
    lr_gguf_free(g);
    lr_free(s);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),       cmocka_unit_test(test_getters),
        cmocka_unit_test(test_arrays),           cmocka_unit_test(test_shards),
        cmocka_unit_test(test_not_a_file),       cmocka_unit_test(test_changed_file),
        cmocka_unit_test(test_writer_refusals),  cmocka_unit_test(test_writer_disk_full),
        cmocka_unit_test(test_writer_large),     cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_writer_no_memory), cmocka_unit_test(test_large_metadata),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
