/* test_safetensors.c - safetensors files: good ones, and headers that break each rule. */
#include "file/safetensors.h"
#include "gguf_build.h"
#include <sys/stat.h>

static lr_error err;
static buf b;

/* A file of this JSON and so many bytes of data 0, 1, 2, ... */
static void make(const char *json, size_t data)
{
    b.n = 0;
    puts_(&b, json);
    for (size_t i = 0; i < data; i++) put(&b, &(uint8_t){(uint8_t)i}, 1);
}

static uint64_t touch(const lr_safetensors *s)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < lr_safetensors_n_tensors(s); i++) {
        const lr_safetensors_tensor *t = lr_safetensors_tensor_at(s, i);
        assert_ptr_equal(lr_safetensors_find(s, t->name), t);
        for (size_t k = 0; k < t->size; k++) sum += ((const uint8_t *)t->data)[k];
    }
    for (size_t i = 0; i < lr_safetensors_n_meta(s); i++) {
        const lr_safetensors_meta *m = lr_safetensors_meta_at(s, i);
        for (size_t k = 0; k < m->key.n; k++) sum += (uint8_t)m->key.s[k];
        for (size_t k = 0; k < m->value.n; k++) sum += (uint8_t)m->value.s[k];
    }
    return sum;
}

/* Opens b both ways; both must agree. *out may be NULL. */
static int open_bytes(const void *p, size_t n, lr_safetensors **out)
{
    const char *path = file_in_folder("x.safetensors");
    write_file(path, p, n);
    lr_safetensors *s;
    int rc = lr_safetensors_open(&s, path, false, &err);
    if (rc == 0) {
        touch(s);
        lr_safetensors_free(s);
    } else {
        assert_int_equal(rc, err.code);
    }
    assert_int_equal(lr_safetensors_open(&s, path, true, &err), rc);
    if (rc == 0) {
        touch(s);
        if (out)
            *out = s;
        else
            lr_safetensors_free(s);
    }
    return rc;
}

static void refused(int line, const char *json, size_t data, int want, const char *part)
{
    make(json, data);
    int rc = open_bytes(b.p, b.n, NULL);
    if (rc != want || !strstr(err.text, part))
        fail_msg("line %d: %s: got %s (%s), want %s (%s)", line, json, lr_error_name(rc), err.text, lr_error_name(want),
                 part);
}
#define REFUSED(json, data, part) refused(__LINE__, json, data, LR_EFORMAT, part)

static lr_safetensors *opened(int line, const char *json, size_t data)
{
    lr_safetensors *s = NULL;
    make(json, data);
    if (open_bytes(b.p, b.n, &s) != 0) fail_msg("line %d: %s: %s", line, json, err.text);
    return s;
}
#define OPENED(json, data) opened(__LINE__, json, data)

static const char good[] = "{\"__metadata__\":{\"format\":\"pt\",\"\\u00e9\\ud83d\\ude00\\n\":\"a\\u0000b\\/\"},"
                           "\"model.w\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},\n"
                           " \"scalar\" : { \"data_offsets\" : [ 0 , 4 ] , \"shape\" : [ ] , \"dtype\" : \"F32\" } ,"
                           "\"none\":{\"dtype\":\"I64\",\"shape\":[3,0],\"data_offsets\":[16,16]},"
                           "\"mask\":{\"dtype\":\"BOOL\",\"shape\":[1,1,1,1,1,1,1,5],\"data_offsets\":[16,21]}}   ";

static void test_good(void **state)
{
    lr_safetensors *s = OPENED(good, 21);
    assert_int_equal(lr_safetensors_n_tensors(s), 4);
    const lr_safetensors_tensor *t = lr_safetensors_find(s, "model.w");
    assert_ptr_equal(t, lr_safetensors_tensor_at(s, 0));
    assert_true(t->type == LR_BF16 && t->n_dims == 2 && t->shape[0] == 2 && t->shape[1] == 3 && t->size == 12);
    assert_string_equal(t->dtype, "BF16");
    assert_int_equal(*(const uint8_t *)t->data, 4);
    assert_int_equal(t->offset, 8 + strlen(good) + 4);
    t = lr_safetensors_find(s, "scalar");
    assert_true(t->type == LR_F32 && t->n_dims == 0 && t->size == 4);
    t = lr_safetensors_find(s, "none");
    assert_true(t->type == -1 && t->size == 0 && t->shape[1] == 0 && t->data);
    t = lr_safetensors_find(s, "mask");
    assert_true(t->n_dims == 8 && t->shape[7] == 5 && ((const uint8_t *)t->data)[4] == 20);
    assert_null(lr_safetensors_find(s, "model"));
    assert_null(lr_safetensors_find(s, "__metadata__"));
    assert_int_equal(lr_safetensors_n_meta(s), 2);
    const lr_safetensors_meta *m = lr_safetensors_meta_at(s, 1);
    assert_true(lr_str_is(m->key, "\xc3\xa9\xf0\x9f\x98\x80\n") && lr_str_eq(m->value, LR_STR("a\0b/")));
    assert_int_equal(lr_safetensors_check_unchanged(s, &err), 0);
    lr_safetensors_free(s);
    lr_safetensors_free(OPENED("{}", 0));
    lr_safetensors_free(OPENED("{\"__metadata__\":{}}", 0));
    lr_safetensors_free(NULL);
}

static void test_json(void **state)
{
    REFUSED("", 0, "'{' is expected");
    REFUSED(" {}", 0, "'{' is expected");
    REFUSED("[]", 0, "'{' is expected");
    REFUSED("{", 0, "a string is expected");
    REFUSED("{}}", 0, "something follows");
    REFUSED("{},", 0, "something follows");
    REFUSED("{\"a\"}", 0, "':' is expected");
    REFUSED("{\"a", 0, "unfinished string");
    REFUSED("{\"a\\", 0, "unfinished string");
    REFUSED("{\"a\\\"", 0, "unfinished string");
    REFUSED("{\"a\":1}", 0, "an object is expected");
    REFUSED("{\"a\tb\":{}}", 0, "control byte");
    REFUSED("{\"\\x41\":{}}", 0, "bad escape");
    REFUSED("{\"\\u12\":{}}", 0, "bad escape");
    REFUSED("{\"\\u12g4\":{}}", 0, "bad escape");
    REFUSED("{\"\\ud83d\":{}}", 0, "bad escape");
    REFUSED("{\"\\ud83d\\u0041\":{}}", 0, "bad escape");
    REFUSED("{\"\\ude00\":{}}", 0, "bad escape");
    REFUSED("{\"\\u0000\":{}}", 0, "zero byte");
    REFUSED("{\"\":{}}", 0, "tensor name of 0 bytes");
    REFUSED("{\"__metadata__\":{\"a\":1}}", 0, "a string is expected");
    REFUSED("{\"__metadata__\":{\"a\":\"b\",}}", 0, "a string is expected");
    REFUSED("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "a second __metadata__");
    REFUSED("{\"__metadata__\":{},}", 0, "a string is expected");
    REFUSED("{\"__metadata__\":[]}", 0, "an object is expected");
    REFUSED("{\"__metadata__\":{\"a\":{\"a\":{}}}}", 0, "a string is expected");
}

/* One F32 tensor t whose entry is text. */
#define ENTRY(text)                   "{\"t\":{" text "}}"
#define SHAPE_OFFSETS(shape, offsets) ENTRY("\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets)

static void test_entries(void **state)
{
    lr_safetensors_free(OPENED(SHAPE_OFFSETS("[2]", "[0,8]"), 8));
    REFUSED(ENTRY(""), 0, "a string is expected");
    REFUSED(ENTRY("\"dtype\":\"F32\""), 0, "tensor t: dtype, shape or data_offsets is missing");
    REFUSED(ENTRY("\"shape\":[2],\"data_offsets\":[0,8]"), 8, "missing");
    REFUSED(ENTRY("\"dtype\":\"F32\",\"data_offsets\":[0,8]"), 8, "missing");
    REFUSED(ENTRY("\"dtype\":\"F32\",\"shape\":[2]"), 8, "missing");
    REFUSED(ENTRY("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"shape\":[2]"), 8,
            "field shape is unknown or");
    REFUSED(ENTRY("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1"), 8, "is unknown or");
    REFUSED(ENTRY("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],"), 8, "a string is expected");
    REFUSED(ENTRY("\"dtype\":7"), 0, "a string is expected");
    refused(__LINE__, ENTRY("\"dtype\":\"F7\""), 0, LR_EUNSUPPORTED, "tensor t: type F7");
    refused(__LINE__, SHAPE_OFFSETS("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, LR_EUNSUPPORTED, "more than 8");
    refused(__LINE__, SHAPE_OFFSETS("[1]", "[0,4,4]"), 4, LR_EUNSUPPORTED, "more than 2");
    REFUSED(SHAPE_OFFSETS("[1]", "[0]"), 4, "incomplete");
    REFUSED(SHAPE_OFFSETS("[1]", "[]"), 4, "incomplete");
    REFUSED(SHAPE_OFFSETS("2", "[0,8]"), 8, "a list is expected");
    REFUSED(SHAPE_OFFSETS("[2 3]", "[0,8]"), 8, "',' or ']' is expected");
    REFUSED(SHAPE_OFFSETS("[2,]", "[0,8]"), 8, "an unsigned integer is expected");
    REFUSED(SHAPE_OFFSETS("[-2]", "[0,8]"), 8, "an unsigned integer is expected");
    REFUSED(SHAPE_OFFSETS("[2.0]", "[0,8]"), 8, "',' or ']' is expected");
    REFUSED(SHAPE_OFFSETS("[2e0]", "[0,8]"), 8, "',' or ']' is expected");
    REFUSED(SHAPE_OFFSETS("[02]", "[0,8]"), 8, "an unsigned integer is expected");
    REFUSED(SHAPE_OFFSETS("[\"2\"]", "[0,8]"), 8, "an unsigned integer is expected");
    REFUSED(SHAPE_OFFSETS("[18446744073709551616]", "[0,8]"), 8, "number too large");
    REFUSED(SHAPE_OFFSETS("[99999999999999999999999]", "[0,8]"), 8, "number too large");
    REFUSED(SHAPE_OFFSETS("[18446744073709551615]", "[0,8]"), 8, "shape is too large");
    REFUSED(SHAPE_OFFSETS("[4294967296,4294967296]", "[0,0]"), 0, "shape is too large");
    REFUSED(SHAPE_OFFSETS("[2]", "[0,4]"), 4, "its shape takes 8 bytes, its offsets span 4");
    REFUSED(SHAPE_OFFSETS("[2]", "[8,0]"), 8, "are not within");
    REFUSED(SHAPE_OFFSETS("[2]", "[0,9]"), 8, "are not within");
    REFUSED(SHAPE_OFFSETS("[2]", "[0,18446744073709551615]"), 8, "are not within");
    REFUSED(SHAPE_OFFSETS("[2]", "[0,8]"), 9, "1 bytes follow the last tensor");
    REFUSED(SHAPE_OFFSETS("[2]", "[4,12]"), 12, "a hole");
    REFUSED("{}", 1, "1 bytes follow");
#define T(name, offsets) "\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" offsets "}"
    lr_safetensors_free(OPENED("{" T("a", "[4,8]") "," T("b", "[0,4]") "}", 8));
    REFUSED("{" T("a", "[0,4]") "," T("a", "[4,8]") "}", 8, "tensor a appears twice");
    REFUSED("{" T("a", "[0,4]") "," T("b", "[0,4]") "}", 4, "an overlap");
    REFUSED("{" T("a", "[0,4]") "," T("b", "[3,7]") "}", 7, "tensor b: there is an overlap");
    REFUSED("{" T("a", "[0,4]") "," T("b", "[5,9]") "}", 9, "tensor b: there is a hole");
}

static void test_length(void **state)
{
    static const uint64_t lengths[] = {UINT64_MAX, 1ull << 63, 1ull << 32, 100, 11};
    make("{}", 8);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        memcpy(b.p, &lengths[i], 8);
        assert_int_equal(open_bytes(b.p, b.n, NULL), LR_EFORMAT);
        assert_non_null(strstr(err.text, "does not fit"));
    }
    const char *path = file_in_folder("sparse.safetensors"); /* the length would fit */
    uint64_t n = 100000001;
    write_file(path, &n, 8);
    assert_int_equal(truncate(path, 200000000), 0);
    lr_safetensors *s;
    assert_int_equal(lr_safetensors_open(&s, path, false, &err), LR_ELIMIT);
    unlink(path);
    assert_int_equal(lr_safetensors_open(&s, path, false, &err), LR_ENOTFOUND);
    assert_int_equal(lr_safetensors_open(&s, test_folder, false, &err), LR_EINVAL);
}

static void test_damage_everywhere(void **state)
{
    static const uint8_t patterns[] = {0x01, 0x02, 0x04, 0x10, 0x20, 0x40, 0x80, 0xFF};
    make(good, 21);
    size_t n = b.n, refusals = 0;
    for (size_t cut = 1; cut < n; cut++) assert_int_equal(open_bytes(b.p, cut, NULL), LR_EFORMAT);
    for (size_t i = 0; i < n - 21; i++) {
        for (size_t k = 0; k < sizeof patterns; k++) {
            b.p[i] ^= patterns[k];
            refusals += open_bytes(b.p, n, NULL) != 0;
            b.p[i] ^= patterns[k];
        }
    }
    assert_true(refusals > n);
}

static void test_no_memory(void **state)
{
    make(good, 21);
    const char *path = file_in_folder("m.safetensors");
    write_file(path, b.p, b.n);
    int rc = LR_ENOMEM, n = 0;
    lr_safetensors *s = NULL;
    while (rc != 0) {
        lr_mem_fail_at(++n);
        rc = lr_safetensors_open(&s, path, true, &err);
        lr_mem_fail_at(0);
        if (rc != 0) assert_int_equal(rc, LR_ENOMEM);
    }
    assert_true(n > 6);
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(truncate(path, 30), 0);
    assert_int_equal(lr_safetensors_check_unchanged(s, &err), LR_ESTATE);
    touch(s); /* a copy does not mind */
    lr_safetensors_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_entries),
        cmocka_unit_test(test_length),
        cmocka_unit_test(test_damage_everywhere),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
