/* test_gguf_bad.c - damaged and hostile GGUF files: each is refused with a text that names the fault, or is harmless.
 *
 * Files are opened as copies, whose end AddressSanitizer guards exactly, and mapped.
 */
#include "file/gguf.h"
#include "file/gguf_write.h"
#include "gguf_build.h"
#include <time.h>

static lr_error err;
static buf b;

/* The bytes as a file; LR_OK or the error that both ways of opening agree on. */
static int open_bytes(const void *p, size_t n)
{
    const char *path = file_in_folder("bad.gguf");
    write_file(path, p, n);
    lr_gguf *g;
    int rc = lr_gguf_open(&g, path, &err);
    if (rc == 0) {
        touch_all(g);
        lr_gguf_free(g);
    } else {
        assert_int_equal(rc, err.code);
        assert_true(strlen(err.text) > strlen(path) + 4);
    }
    int rc2 = lr_gguf_open_copy(&g, path, &err);
    assert_int_equal(rc, rc2);
    if (rc2 == 0) {
        touch_all(g);
        lr_gguf_free(g);
    }
    return rc;
}

static void check(int line, int want, const char *part)
{
    int rc = open_bytes(b.p, b.n);
    if (rc != want) fail_msg("line %d: got %s (%s), want %s", line, lr_error_name(rc), err.text, lr_error_name(want));
    if (rc != 0 && !strstr(err.text, part)) fail_msg("line %d: \"%s\" does not say \"%s\"", line, err.text, part);
}
#define REFUSED(code, part) check(__LINE__, code, part)
#define ACCEPTED()          check(__LINE__, LR_OK, "")

/* Opens the file in b, and also cut or padded with zeros to exactly n bytes: for counts that lie, the size is no
 * matter. */
static void refused_at_sizes(int line, const char *part)
{
    static const size_t sizes[] = {0, 64, 4096, 200000};
    size_t n = b.n;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (sizes[i] && sizes[i] < n) continue;
        if (sizes[i]) put_zeros(&b, sizes[i] - n);
        check(line, LR_EFORMAT, part);
        b.n = n;
    }
}
#define REFUSED_AT_SIZES(part) refused_at_sizes(__LINE__, part)

static void test_header(void **state)
{
    put_header(&b, 3, 0, 0);
    ACCEPTED();
    put_header(&b, 2, 0, 0);
    ACCEPTED();
    put_header(&b, 1, 0, 0);
    REFUSED(LR_EUNSUPPORTED, "version 1");
    put_header(&b, 4, 0, 0);
    REFUSED(LR_EUNSUPPORTED, "version 4");
    put_header(&b, 0, 0, 0);
    REFUSED(LR_EUNSUPPORTED, "version 0");
    put_header(&b, 3u << 24, 0, 0);
    REFUSED(LR_EUNSUPPORTED, "big-endian");
    put_header(&b, 3, 0, 0);
    b.p[0] = 'g';
    REFUSED(LR_EFORMAT, "not a GGUF file");
    for (size_t n = 1; n < 24; n++) {
        put_header(&b, 3, 0, 0);
        b.n = n;
        REFUSED(LR_EFORMAT, n < 4 ? "ends in the header" : "ends in the header, at byte");
    }
}

static void test_alignment(void **state)
{
    static const struct {
        uint32_t type, value;
        bool ok;
    } cases[] = {{4, 0, 0},        {4, 1, 0},          {4, 3, 0},   {4, 4, 0},  {4, 48, 0},
                 {4, 1u << 31, 0}, {4, UINT32_MAX, 0}, {4, 8, 1},   {4, 32, 1}, {4, 4096, 1},
                 {4, 1 << 20, 1},  {4, 1 << 21, 0},    {5, -8u, 0}, {5, 32, 0}, {6, 0x42000000, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_header(&b, 3, 0, 1);
        put_kv32(&b, "general.alignment", cases[i].type, cases[i].value);
        if (cases[i].ok)
            ACCEPTED();
        else
            REFUSED(LR_EFORMAT, "general.alignment");
    }
    put_header(&b, 3, 0, 1);
    puts_(&b, "general.alignment");
    put32(&b, LR_KV_STR);
    puts_(&b, "32");
    REFUSED(LR_EFORMAT, "key general.alignment: type is str, wanted u32");
    put_header(&b, 3, 0, 1);
    puts_(&b, "general.alignment");
    put32(&b, LR_KV_ARRAY);
    put32(&b, LR_KV_U32);
    put64(&b, 1);
    put32(&b, 32);
    REFUSED(LR_EFORMAT, "key general.alignment: type is array, wanted u32");
}

static void test_counts(void **state)
{
    static const uint64_t many[] = {1ull << 63, (1ull << 60) + 1, UINT64_MAX, 1ull << 32, 200000};
    for (size_t i = 0; i < sizeof many / sizeof *many; i++) {
        put_header(&b, 3, many[i], 0);
        REFUSED_AT_SIZES("tensors do not fit");
        put_header(&b, 3, 0, many[i]);
        REFUSED_AT_SIZES("keys do not fit");
        put_header(&b, 3, 0, 1); /* the length of a key */
        put64(&b, many[i]);
        put_zeros(&b, 30);
        REFUSED_AT_SIZES("string of");
        put_header(&b, 3, 0, 1); /* of a string value */
        puts_(&b, "k");
        put32(&b, LR_KV_STR);
        put64(&b, many[i]);
        put_zeros(&b, 30);
        REFUSED_AT_SIZES("string of");
        for (uint32_t t = 0; t <= LR_KV_F64; t++) { /* the elements of an array */
            if (many[i] == 200000 && (t == LR_KV_U8 || t == LR_KV_I8 || t == LR_KV_BOOL)) continue; /* may fit */
            put_header(&b, 3, 0, 1);
            puts_(&b, "kk");
            put32(&b, LR_KV_ARRAY);
            put32(&b, t);
            put64(&b, many[i]);
            REFUSED_AT_SIZES("key kk: an array of");
        }
        put_header(&b, 3, 0, 1); /* a string in an array */
        puts_(&b, "k");
        put32(&b, LR_KV_ARRAY);
        put32(&b, LR_KV_STR);
        put64(&b, 2);
        puts_(&b, "fine");
        put64(&b, many[i]);
        REFUSED_AT_SIZES("string of");
        put_header(&b, 3, 1, 0); /* a tensor's name */
        put64(&b, many[i]);
        put_zeros(&b, 40);
        REFUSED_AT_SIZES("string of");
    }
}

/* The least that a key and a tensor take, to the byte. */
static void test_least_sizes(void **state)
{
    put_header(&b, 3, 0, 2);
    put_zeros(&b, 27);
    REFUSED(LR_EFORMAT, "2 keys do not fit");
    put_zeros(&b, 1);
    REFUSED(LR_EFORMAT, "empty key");
    put_header(&b, 3, 2, 0);
    put_zeros(&b, 49);
    REFUSED(LR_EFORMAT, "2 tensors do not fit");
    put_zeros(&b, 1);
    REFUSED(LR_EFORMAT, "empty tensor name");
}

static void test_keys(void **state)
{
    static char name[66561];
    memset(name, 'n', sizeof name);
    put_header(&b, 3, 0, 1);
    putn(&b, name, 65535);
    put32(&b, LR_KV_U8);
    put(&b, "", 1);
    ACCEPTED();
    static const size_t lengths[] = {65536, 66560, 0};
    for (int i = 0; i < 3; i++) {
        put_header(&b, 3, 0, 1);
        putn(&b, name, lengths[i]);
        put32(&b, LR_KV_U8);
        put_zeros(&b, 8);
        REFUSED(LR_EFORMAT, i == 2 ? "empty key" : "key of 6");
    }
    put_header(&b, 3, 0, 1);
    putn(&b, "a\0b", 3);
    put32(&b, LR_KV_U8);
    put_zeros(&b, 8);
    REFUSED(LR_EFORMAT, "key with a zero byte: a?b");
    put_header(&b, 3, 0, 3);
    put_kv32(&b, "one", LR_KV_U32, 1);
    put_kv32(&b, "two", LR_KV_U32, 1);
    put_kv32(&b, "one", LR_KV_I32, 2);
    REFUSED(LR_EFORMAT, "key one appears twice");
    static const uint32_t types[] = {13, 255, UINT32_MAX};
    for (int i = 0; i < 3; i++) {
        put_header(&b, 3, 0, 1);
        put_kv32(&b, "odd", types[i], 0);
        put_zeros(&b, 20);
        REFUSED(LR_EFORMAT, "key odd: unknown value type");
        put_header(&b, 3, 0, 1);
        put_kv32(&b, "odd", LR_KV_ARRAY, types[i]);
        put_zeros(&b, 20);
        REFUSED(LR_EFORMAT, "key odd: unknown value type");
    }
    put_header(&b, 3, 0, 1);
    put_kv32(&b, "truth", LR_KV_BOOL, 2);
    REFUSED(LR_EFORMAT, "key truth: is no bool: 2");
    put_header(&b, 3, 0, 1);
    put_kv32(&b, "truths", LR_KV_ARRAY, LR_KV_BOOL);
    put64(&b, 4);
    put32(&b, 0x03000100);
    REFUSED(LR_EFORMAT, "key truths: element 3 is no bool: 3");
    put_header(&b, 3, 0, 1); /* text that is unfit to print */
    put_kv32(&b, "a\x1b[31m\xff\xc3\xa9", 99, 0);
    REFUSED(LR_EFORMAT, "key a?[31m?\xc3\xa9: unknown");
}

static void test_nesting(void **state)
{
    for (int depth = 1; depth <= 2000; depth = depth < 8 ? depth + 1 : depth * 2) {
        put_header(&b, 3, 0, 1);
        put_kv32(&b, "deep", LR_KV_ARRAY, LR_KV_ARRAY);
        for (int i = 2; i < depth; i++) {
            put64(&b, 1);
            put32(&b, LR_KV_ARRAY);
        }
        put64(&b, 1);
        put32(&b, LR_KV_U8);
        put64(&b, 1);
        put(&b, "", 1);
        if (depth <= 4 && depth > 0)
            ACCEPTED();
        else
            REFUSED(LR_ELIMIT, "key deep: arrays nested deeper than 4");
    }
    put_header(&b, 3, 0, 1); /* empty arrays at each level are no way around */
    put_kv32(&b, "wide", LR_KV_ARRAY, LR_KV_ARRAY);
    put64(&b, 5000);
    for (int i = 0; i < 5000; i++) {
        put32(&b, LR_KV_ARRAY);
        put64(&b, 0);
    }
    ACCEPTED();
}

/* One tensor of the given type and shape with data bytes behind it. */
static void one_tensor(uint32_t type, uint32_t n_dims, uint64_t d0, uint64_t d1, uint64_t d2, uint64_t d3, uint64_t off,
                       size_t data)
{
    put_header(&b, 3, 1, 0);
    put_tensor(&b, "t.weight", type, n_dims, (uint64_t[]){d0, d1, d2, d3, 1, 1}, off);
    pad_to(&b, 32);
    put_zeros(&b, data);
}

static void test_tensor_shapes(void **state)
{
    one_tensor(LR_F32, 2, 8, 4, 1, 1, 0, 128);
    ACCEPTED();
    one_tensor(LR_F32, 4, 2, 2, 2, 4, 0, 128);
    ACCEPTED();
    one_tensor(LR_F32, 0, 1, 1, 1, 1, 0, 4); /* a scalar */
    ACCEPTED();
    one_tensor(LR_F32, 2, 8, 4, 1, 1, 0, 127);
    REFUSED(LR_EFORMAT, "tensor t.weight: its 128 bytes at offset 0 lie beyond the file's end");
    one_tensor(LR_F32, 5, 1, 1, 1, 1, 0, 128);
    REFUSED(LR_EFORMAT, "tensor t.weight: 5 dimensions");
    static const uint64_t bad[][4] = {
        {1ull << 32, 1ull << 32, 1, 1},
        {1ull << 63, 2, 1, 1},
        {2, 1ull << 63, 1, 1},
        {UINT64_MAX, 1, 1, 1},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX},
        {1ull << 62, 1, 1, 1},
        {1ull << 61, 1, 1, 1},
        {1, 1, 1, UINT64_MAX},
        {1ull << 16, 1ull << 16, 1ull << 16, 1ull << 16},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        one_tensor(LR_F32, 4, bad[i][0], bad[i][1], bad[i][2], bad[i][3], 0, 128);
        REFUSED_AT_SIZES("tensor t.weight: ");
        one_tensor(LR_I8, 4, bad[i][0], bad[i][1], bad[i][2], bad[i][3], 0, 128);
        REFUSED_AT_SIZES("tensor t.weight: ");
    }
    for (int i = 0; i < 4; i++) {
        uint64_t ne[4] = {8, 8, 8, 8};
        ne[i] = 0;
        char text[64];
        snprintf(text, sizeof text, "tensor t.weight: dimension %d is 0", i);
        one_tensor(LR_F32, 4, ne[0], ne[1], ne[2], ne[3], 0, 128);
        REFUSED_AT_SIZES(text);
    }
    one_tensor(LR_Q8_0, 1, 33, 1, 1, 1, 0, 128);
    REFUSED(LR_EFORMAT, "tensor t.weight: rows of 33 values are no multiple of Q8_0's block of 32");
    one_tensor(LR_Q4_K, 1, 128, 1, 1, 1, 0, 128);
    REFUSED(LR_EFORMAT, "block of 256");
    static const uint32_t types[] = {4, 5, 9, 16, 31, 40, 63, 64, 1000, UINT32_MAX};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        char text[64];
        snprintf(text, sizeof text, "tensor t.weight: type %u (", types[i]);
        one_tensor(types[i], 1, 256, 1, 1, 1, 0, 1024);
        REFUSED(LR_EUNSUPPORTED, text);
    }
}

static void two_tensors(const char *a, const char *c, uint64_t off_a, uint64_t off_c)
{
    put_header(&b, 3, 2, 0);
    put_tensor(&b, a, LR_F32, 1, (uint64_t[]){8}, off_a);
    put_tensor(&b, c, LR_F32, 1, (uint64_t[]){9}, off_c);
    pad_to(&b, 32);
    put_zeros(&b, 256);
}

static void test_tensor_offsets(void **state)
{
    two_tensors("a", "c", 0, 32);
    ACCEPTED();
    two_tensors("a", "c", 64, 0); /* any order, gaps */
    ACCEPTED();
    two_tensors("a", "c", 192, 64);
    ACCEPTED();
    two_tensors("a", "c", 0, 0);
    REFUSED(LR_EFORMAT, "overlaps");
    two_tensors("a", "c", 32, 0);
    REFUSED(LR_EFORMAT, "tensor c: its data overlaps that of a");
    put_header(&b, 3, 2, 0); /* by one byte */
    put_tensor(&b, "a", LR_I8, 1, (uint64_t[]){33}, 0);
    put_tensor(&b, "c", LR_I8, 1, (uint64_t[]){1}, 32);
    pad_to(&b, 32);
    put_zeros(&b, 64);
    REFUSED(LR_EFORMAT, "tensor a: its data overlaps that of c");
    two_tensors("a", "a", 0, 32);
    REFUSED(LR_EFORMAT, "tensor a appears twice");
    two_tensors("a", "c", 0, 33);
    REFUSED(LR_EFORMAT, "tensor c: offset 33 is not aligned to 32");
    static const uint64_t far[] = {224, 256, 1ull << 40, -32ull, -64ull, 1ull << 63, UINT64_MAX - 31};
    for (size_t i = 0; i < sizeof far / sizeof *far; i++) {
        two_tensors("a", "c", 0, far[i]);
        REFUSED(LR_EFORMAT, "tensor c: its 36 bytes");
    }
    two_tensors("a\xff", "c", 0, 0x7fffffffffffffe0);
    REFUSED(LR_EFORMAT, "tensor c");
    two_tensors("", "c", 0, 32);
    REFUSED(LR_EFORMAT, "empty tensor name");
}

/* ---- a good file, damaged everywhere ---- */

static size_t sample(uint8_t *out, size_t room, size_t *header)
{
    const char *path = file_in_folder("whole.gguf");
    lr_gguf_writer *w;
    assert_int_equal(lr_gguf_writer_new(&w, path, &err), 0);
    lr_str strs[] = {LR_STR("one"), LR_STR(""), LR_STR("three")};
    float floats[] = {1, 2, 3};
    assert_int_equal(lr_gguf_writer_str(w, "general.architecture", LR_STR("llama"), &err), 0);
    assert_int_equal(lr_gguf_writer_u32(w, "general.alignment", 32, &err), 0);
    assert_int_equal(lr_gguf_writer_array(w, "tokens", LR_KV_STR, strs, 3, &err), 0);
    assert_int_equal(lr_gguf_writer_array(w, "scores", LR_KV_F32, floats, 3, &err), 0);
    assert_int_equal(lr_gguf_writer_bool(w, "flag", true, &err), 0);
    lr_gguf_array inner[2] = {{LR_KV_U8, 3, "abc"}, {LR_KV_STR, 2, strs}};
    assert_int_equal(lr_gguf_writer_array(w, "nested", LR_KV_ARRAY, inner, 2, &err), 0);
    assert_int_equal(lr_gguf_writer_tensor(w, "token_embd.weight", LR_Q8_0, 2, (uint64_t[]){32, 3}, &err), 0);
    assert_int_equal(lr_gguf_writer_tensor(w, "norm", LR_F32, 1, (uint64_t[]){8}, &err), 0);
    assert_int_equal(lr_gguf_writer_data(w, "", 1, &err), 0);
    for (int i = 1; i < 34 * 3; i++) assert_int_equal(lr_gguf_writer_data(w, "x", 1, &err), 0);
    assert_int_equal(lr_gguf_writer_data(w, floats, 12, &err), 0);
    for (int i = 12; i < 32; i++) assert_int_equal(lr_gguf_writer_data(w, "y", 1, &err), 0);
    assert_int_equal(lr_gguf_writer_finish(w, &err), 0);
    lr_gguf_writer_free(w);
    lr_gguf *g;
    assert_int_equal(lr_gguf_open(&g, path, &err), 0);
    *header = (size_t)lr_gguf_tensor_at(g, 0)->offset;
    lr_gguf_free(g);
    FILE *f = fopen(path, "rb");
    size_t n = fread(out, 1, room, f);
    fclose(f);
    return n;
}

static void test_cut_everywhere(void **state)
{
    uint8_t whole[4096];
    size_t header, n = sample(whole, sizeof whole, &header);
    assert_int_equal(open_bytes(whole, n), 0);
    for (size_t cut = 1; cut < n; cut++) { /* the last tensor ends at the last byte */
        int rc = open_bytes(whole, cut);
        if (rc != LR_EFORMAT) fail_msg("cut at %zu of %zu: %s", cut, n, lr_error_name(rc));
    }
}

static void test_flip_everywhere(void **state)
{
    static const uint8_t patterns[] = {0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF};
    uint8_t whole[4096];
    size_t header, n = sample(whole, sizeof whole, &header), refused = 0;
    for (size_t i = 0; i < header; i++) {
        for (size_t k = 0; k < sizeof patterns; k++) {
            whole[i] ^= patterns[k];
            refused += open_bytes(whole, n) != 0;
            whole[i] ^= patterns[k];
        }
    }
    assert_true(refused > header); /* most flips matter; some only change a text or a number */
}

/* Every aligned and unaligned u64 of the header overwritten by extreme values. */
static void test_extreme_everywhere(void **state)
{
    static const uint64_t values[] = {0, UINT64_MAX, 1ull << 63, INT64_MAX, 1ull << 32, UINT32_MAX, 1u << 31};
    uint8_t whole[4096], save[8];
    size_t header, n = sample(whole, sizeof whole, &header);
    for (size_t i = 4; i + 8 <= header; i++) {
        memcpy(save, whole + i, 8);
        for (size_t k = 0; k < sizeof values / sizeof *values; k++) {
            memcpy(whole + i, &values[k], 8);
            open_bytes(whole, n);
        }
        memcpy(whole + i, save, 8);
    }
    assert_int_equal(open_bytes(whole, n), 0);
}

/* A file that claims much must not be given much: what is refused has asked for less than a few MB. */
static void test_claims_cost_nothing(void **state)
{
    put_header(&b, 3, 0, 1);
    put_kv32(&b, "k", LR_KV_ARRAY, LR_KV_STR);
    put64(&b, 1ull << 38);
    lr_gguf *g;
    const char *path = file_in_folder("sparse.gguf");
    write_file(path, b.p, b.n);
    assert_int_equal(truncate(path, (off_t)1 << 42), 0); /* 4 TiB of nothing: the count would fit */
    int rc = lr_gguf_open(&g, path, &err);
    if (rc == LR_EIO) skip(); /* no address space for the mapping */
    assert_int_equal(rc, LR_ELIMIT);
    assert_non_null(strstr(err.text, "metadata is larger than"));
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_header),
        cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_least_sizes),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_nesting),
        cmocka_unit_test(test_tensor_shapes),
        cmocka_unit_test(test_tensor_offsets),
        cmocka_unit_test(test_cut_everywhere),
        cmocka_unit_test(test_flip_everywhere),
        cmocka_unit_test(test_extreme_everywhere),
        cmocka_unit_test(test_claims_cost_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
