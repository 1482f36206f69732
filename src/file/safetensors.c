/* safetensors.c - see safetensors.h
 *
 * The header's JSON has a fixed shape, so the parser is one function a level and knows no other values: strings, arrays
 * of unsigned integers, two kinds of objects. It never recurses, and asks for memory only for what it has read.
 */
#define _DEFAULT_SOURCE
#include "file/safetensors.h"
#include "base/mem.h"
#include "file/mapfile.h"
#include "file/names.h"
#include <inttypes.h>
#include <sys/mman.h>

#define HEADER_MAX     100000000u
#define NAME_MAX_BYTES 65535

struct lr_safetensors {
    char *path;
    lr_mapfile map;
    lr_keep keep; /* names and metadata */
    lr_safetensors_tensor *tensors;
    size_t n_tensors, cap_tensors;
    lr_name_slot *index;
    lr_safetensors_meta *meta;
    size_t n_meta, cap_meta;
    bool has_meta;
};

typedef struct reader {
    lr_safetensors *s;
    const uint8_t *p, *end, *start; /* the JSON */
    char show[160];                 /* printable name of the tensor being read */
    lr_error *err;
} reader;

/* name, lr_dtype or -1, bytes a value */
static const struct {
    const char *name;
    int type, bytes;
} dtypes[] = {
    {"F32", LR_F32, 4}, {"F16", LR_F16, 2}, {"BF16", LR_BF16, 2}, {"I8", LR_I8, 1},   {"I16", LR_I16, 2},
    {"I32", LR_I32, 4}, {"I64", -1, 8},     {"U8", -1, 1},        {"U16", -1, 2},     {"U32", -1, 4},
    {"U64", -1, 8},     {"F64", -1, 8},     {"BOOL", -1, 1},      {"F8_E4M3", -1, 1}, {"F8_E5M2", -1, 1},
    {"F8_E8M0", -1, 1}, {"C64", -1, 8},
};

/* ---- JSON ---- */

static int bad(reader *r, const char *what)
{
    return lr_fail(r->err, LR_EFORMAT, "header: %s at byte %zu", what, (size_t)(r->p - r->start));
}

static int no_memory(reader *r) { return lr_fail(r->err, LR_ENOMEM, "no memory for the header"); }

static void skip_space(reader *r)
{
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t')) r->p++;
}

/* Takes c if it comes next, after white space. */
static bool take(reader *r, char c)
{
    skip_space(r);
    if (r->p == r->end || *r->p != (uint8_t)c) return false;
    r->p++;
    return true;
}

static int expect(reader *r, char c, const char *what) { return take(r, c) ? 0 : bad(r, what); }

/* Four hex digits at p; -1 if they are not. */
static int hex4(const uint8_t *p, const uint8_t *end)
{
    int v = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = p[i], lower = c | 0x20;
        if (c >= '0' && c <= '9')
            v = v * 16 + c - '0';
        else if (lower >= 'a' && lower <= 'f')
            v = v * 16 + lower - 'a' + 10;
        else
            return -1;
    }
    return v;
}

static char *put_utf8(char *out, int c)
{
    if (c < 0x80) {
        *out++ = (char)c;
    } else if (c < 0x800) {
        *out++ = (char)(0xC0 | c >> 6);
        *out++ = (char)(0x80 | (c & 63));
    } else if (c < 0x10000) {
        *out++ = (char)(0xE0 | c >> 12);
        *out++ = (char)(0x80 | (c >> 6 & 63));
        *out++ = (char)(0x80 | (c & 63));
    } else {
        *out++ = (char)(0xF0 | c >> 18);
        *out++ = (char)(0x80 | (c >> 12 & 63));
        *out++ = (char)(0x80 | (c >> 6 & 63));
        *out++ = (char)(0x80 | (c & 63));
    }
    return out;
}

/* The character of the escape at r->p, which is just past the backslash; -1 with err filled. */
static int take_escape(reader *r)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    int c = r->p < r->end ? *r->p++ : 0;
    const char *at = c ? strchr(from, c) : NULL;
    if (at) return to[at - from];
    int v = c == 'u' ? hex4(r->p, r->end) : -1;
    if (v >= 0) r->p += 4;
    if (v >= 0xD800 && v < 0xDC00 && r->end - r->p >= 6 && r->p[0] == '\\' && r->p[1] == 'u') {
        int low = hex4(r->p + 2, r->end);
        if (low >= 0xDC00 && low < 0xE000) {
            r->p += 6;
            return 0x10000 + ((v - 0xD800) << 10) + (low - 0xDC00);
        }
    }
    if (v < 0 || (v >= 0xD800 && v < 0xE000)) {
        bad(r, "bad escape in a string");
        return -1;
    }
    return v;
}

/* A string: kept, unescaped, zero-terminated after its n bytes. */
static int take_string(reader *r, lr_str *out)
{
    int rc = expect(r, '"', "a string is expected");
    if (rc != 0) return rc;
    const uint8_t *close = r->p;
    while (close < r->end && *close != '"') close += *close == '\\' && close + 1 < r->end ? 2 : 1;
    if (close >= r->end) return bad(r, "unfinished string");
    char *s = lr_keep_get(&r->s->keep, (size_t)(close - r->p) + 1), *w = s; /* unescaping never makes it longer */
    if (!s) return no_memory(r);
    while (r->p < close) {
        if (*r->p < 0x20) return bad(r, "control byte in a string");
        if (*r->p != '\\') {
            *w++ = (char)*r->p++;
            continue;
        }
        r->p++;
        int c = take_escape(r);
        if (c < 0) return r->err->code;
        w = put_utf8(w, c);
    }
    r->p++;
    *w = 0;
    *out = (lr_str){s, (size_t)(w - s)};
    return 0;
}

static int take_u64(reader *r, uint64_t *out)
{
    skip_space(r);
    const uint8_t *first = r->p;
    uint64_t v = 0;
    for (; r->p < r->end && *r->p >= '0' && *r->p <= '9'; r->p++)
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, (uint64_t)(*r->p - '0'), &v))
            return bad(r, "number too large");
    if (r->p == first || (*first == '0' && r->p - first > 1)) return bad(r, "an unsigned integer is expected");
    *out = v;
    return 0;
}

/* [a, b, ...] of at most max numbers. */
static int take_numbers(reader *r, uint64_t *out, int max, int *n)
{
    int rc = expect(r, '[', "a list is expected");
    *n = 0;
    if (rc != 0 || take(r, ']')) return rc;
    do {
        if (*n == max)
            return lr_fail(r->err, LR_EUNSUPPORTED, "tensor %s: a list of more than %d numbers", r->show, max);
        rc = take_u64(r, &out[(*n)++]);
    } while (rc == 0 && take(r, ','));
    return rc == 0 ? expect(r, ']', "',' or ']' is expected") : rc;
}

/* Makes room for one more item. */
static int grow(reader *r, void **items, size_t n, size_t *cap, size_t size)
{
    if (n < *cap) return 0;
    size_t want = *cap ? *cap * 2 : 64;
    void *p = lr_reallocarray(*items, want, size);
    if (!p) return no_memory(r);
    *items = p;
    *cap = want;
    return 0;
}

/* {"key": "value", ...} */
static int take_metadata(reader *r)
{
    lr_safetensors *s = r->s;
    if (s->has_meta) return bad(r, "a second __metadata__");
    s->has_meta = true;
    int rc = expect(r, '{', "an object is expected");
    if (rc != 0 || take(r, '}')) return rc;
    do {
        lr_safetensors_meta m = {0};
        rc = grow(r, (void **)&s->meta, s->n_meta, &s->cap_meta, sizeof m);
        if (rc == 0) rc = take_string(r, &m.key);
        if (rc == 0) rc = expect(r, ':', "':' is expected");
        if (rc == 0) rc = take_string(r, &m.value);
        if (rc == 0) s->meta[s->n_meta++] = m;
    } while (rc == 0 && take(r, ','));
    return rc == 0 ? expect(r, '}', "',' or '}' is expected") : rc;
}

/* ---- tensors ---- */

static int set_dtype(reader *r, lr_safetensors_tensor *t, int *bytes)
{
    lr_str word = {0};
    int rc = take_string(r, &word);
    if (rc != 0) return rc;
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (!lr_str_is(word, dtypes[i].name)) continue;
        t->dtype = dtypes[i].name;
        t->type = dtypes[i].type;
        *bytes = dtypes[i].bytes;
        return 0;
    }
    char show[40];
    return lr_fail(r->err, LR_EUNSUPPORTED, "tensor %s: type %s is not supported", r->show,
                   lr_printable(show, sizeof show, word.s, word.n));
}

/* The size that the shape asks for must be the one that the offsets give, within the data. */
static int check_size(reader *r, lr_safetensors_tensor *t, int bytes, const uint64_t range[2])
{
    const lr_mapfile *m = &r->s->map;
    size_t data = (size_t)(r->end - m->base), n = (size_t)bytes;
    bool ok = true;
    for (int i = 0; i < t->n_dims && ok; i++) ok = lr_mul(n, t->shape[i], &n);
    if (!ok) return lr_fail(r->err, LR_EFORMAT, "tensor %s: its shape is too large", r->show);
    if (range[0] > range[1] || range[1] > m->size - data)
        return lr_fail(r->err, LR_EFORMAT,
                       "tensor %s: bytes %" PRIu64 " to %" PRIu64 " are not within the %zu bytes of data (cut off?)",
                       r->show, range[0], range[1], m->size - data);
    if (range[1] - range[0] != n)
        return lr_fail(r->err, LR_EFORMAT, "tensor %s: its shape takes %zu bytes, its offsets span %" PRIu64, r->show,
                       n, range[1] - range[0]);
    t->size = n;
    t->offset = data + range[0];
    t->data = m->base + t->offset;
    return 0;
}

/* {"dtype": ..., "shape": ..., "data_offsets": ...} in any order. */
static int take_tensor(reader *r, lr_str name)
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    lr_safetensors *s = r->s;
    lr_safetensors_tensor t = {.name = name.s};
    uint64_t range[2] = {0};
    int seen = 0, bytes = 0, n = 0;
    int rc = expect(r, '{', "an object is expected");
    if (rc != 0) return rc;
    do {
        lr_str key = {0};
        rc = take_string(r, &key);
        if (rc == 0) rc = expect(r, ':', "':' is expected");
        if (rc != 0) return rc;
        int which = lr_str_is(key, "dtype")          ? DTYPE
                    : lr_str_is(key, "shape")        ? SHAPE
                    : lr_str_is(key, "data_offsets") ? OFFSETS
                                                     : 0;
        if (!which || (seen & which))
            return lr_fail(r->err, LR_EFORMAT, "tensor %s: field %.40s is unknown or repeated", r->show,
                           which ? key.s : "(other)");
        seen |= which;
        rc = which == DTYPE   ? set_dtype(r, &t, &bytes)
             : which == SHAPE ? take_numbers(r, t.shape, LR_SAFETENSORS_DIMS, &t.n_dims)
                              : take_numbers(r, range, 2, &n);
    } while (rc == 0 && take(r, ','));
    if (rc == 0) rc = expect(r, '}', "',' or '}' is expected");
    if (rc != 0) return rc;
    if (seen != (DTYPE | SHAPE | OFFSETS) || n != 2)
        return lr_fail(r->err, LR_EFORMAT, "tensor %s: dtype, shape or data_offsets is missing or incomplete", r->show);
    rc = check_size(r, &t, bytes, range);
    if (rc == 0) rc = grow(r, (void **)&s->tensors, s->n_tensors, &s->cap_tensors, sizeof t);
    if (rc == 0) s->tensors[s->n_tensors++] = t;
    return rc;
}

static int take_entry(reader *r)
{
    lr_str name = {0};
    int rc = take_string(r, &name);
    if (rc == 0) rc = expect(r, ':', "':' is expected");
    if (rc != 0) return rc;
    if (lr_str_is(name, "__metadata__")) return take_metadata(r);
    lr_printable(r->show, sizeof r->show, name.s, name.n);
    if (name.n == 0 || name.n > NAME_MAX_BYTES || memchr(name.s, 0, name.n))
        return lr_fail(r->err, LR_EFORMAT, "tensor name of %zu bytes, or with a zero byte: %s", name.n, r->show);
    return take_tensor(r, name);
}

/* The tensors, by offset, lie end to end from the first to the last byte of the data. */
static int check_cover(reader *r)
{
    lr_safetensors *s = r->s;
    uint64_t at = (uint64_t)(r->end - s->map.base);
    lr_span *spans = lr_reallocarray(NULL, s->n_tensors, sizeof *spans);
    if (!spans) return no_memory(r);
    for (size_t i = 0; i < s->n_tensors; i++) spans[i] = (lr_span){s->tensors[i].offset, s->tensors[i].size, i};
    lr_spans_sort(spans, s->n_tensors);
    int rc = 0;
    for (size_t i = 0; i < s->n_tensors && rc == 0; i++) {
        const lr_safetensors_tensor *t = &s->tensors[spans[i].i];
        lr_printable(r->show, sizeof r->show, t->name, strlen(t->name));
        if (t->offset != at)
            rc = lr_fail(r->err, LR_EFORMAT, "tensor %s: there is %s before its data", r->show,
                         t->offset > at ? "a hole" : "an overlap");
        at += t->size;
    }
    lr_free(spans);
    if (rc == 0 && at != s->map.size)
        rc = lr_fail(r->err, LR_EFORMAT, "%zu bytes follow the last tensor", (size_t)(s->map.size - at));
    return rc;
}

static int parse(lr_safetensors *s, lr_error *err)
{
    uint64_t n = 0;
    if (s->map.size < 8) return lr_fail(err, LR_EFORMAT, "the file ends in the header's length");
    memcpy(&n, s->map.base, 8);
    if (n > s->map.size - 8)
        return lr_fail(err, LR_EFORMAT, "a header of %" PRIu64 " bytes does not fit into the file", n);
    if (n > HEADER_MAX) return lr_fail(err, LR_ELIMIT, "the header is larger than %u bytes", HEADER_MAX);
    const uint8_t *json = s->map.base + 8;
    reader r = {.s = s, .p = json, .start = json, .end = json + n, .err = err};
    if (n == 0 || *json != '{') return bad(&r, "'{' is expected");
    r.p++;
    int rc = 0;
    if (!take(&r, '}')) {
        do {
            rc = take_entry(&r);
        } while (rc == 0 && take(&r, ','));
        if (rc == 0) rc = expect(&r, '}', "',' or '}' is expected");
    }
    skip_space(&r);
    if (rc == 0 && r.p != r.end) rc = bad(&r, "something follows the object");
    if (rc == 0) rc = check_cover(&r);
    if (rc == 0)
        rc = lr_names_index(&s->index, s->n_tensors ? &s->tensors[0].name : NULL, s->n_tensors, sizeof *s->tensors,
                            "tensor", err);
    return rc;
}

/* ---- interface ---- */

int lr_safetensors_open(lr_safetensors **out, const char *path, bool copy, lr_error *err)
{
    lr_safetensors *s = lr_calloc(1, sizeof *s);
    if (s) s->path = lr_strdup(path);
    if (!s || !s->path) {
        lr_safetensors_free(s);
        return lr_fail(err, LR_ENOMEM, "no memory");
    }
    int rc = lr_mapfile_open(&s->map, path, copy, err);
    if (rc == 0) rc = parse(s, err);
    if (rc == 0) rc = lr_mapfile_unchanged(&s->map, err);
    if (rc == 0) {
        *out = s;
        return 0;
    }
    char show[240];
    lr_safetensors_free(s);
    return lr_fail_prefix(err, "%s", lr_printable(show, sizeof show, path, strlen(path)));
}

void lr_safetensors_free(lr_safetensors *s)
{
    if (!s) return;
    lr_mapfile_close(&s->map);
    lr_keep_deinit(&s->keep);
    lr_free(s->tensors);
    lr_free(s->index);
    lr_free(s->meta);
    lr_free(s->path);
    lr_free(s);
}

static int prefix_path(const lr_safetensors *s, lr_error *err)
{
    char show[240];
    return lr_fail_prefix(err, "%s", lr_printable(show, sizeof show, s->path, strlen(s->path)));
}

int lr_safetensors_check_unchanged(const lr_safetensors *s, lr_error *err)
{
    return lr_mapfile_unchanged(&s->map, err) == 0 ? 0 : prefix_path(s, err);
}

int lr_safetensors_check_intact(const lr_safetensors *s, lr_error *err)
{
    return lr_mapfile_intact(&s->map, err) == 0 ? 0 : prefix_path(s, err);
}

uint64_t lr_safetensors_file_bytes(const lr_safetensors *s) { return s->map.size; }

void lr_safetensors_drop(const lr_safetensors *s, const void *data, size_t n)
{
    lr_mapfile_advise(&s->map, (size_t)((const uint8_t *)data - s->map.base), n, MADV_DONTNEED, true);
}

size_t lr_safetensors_n_tensors(const lr_safetensors *s) { return s->n_tensors; }

const lr_safetensors_tensor *lr_safetensors_tensor_at(const lr_safetensors *s, size_t i) { return &s->tensors[i]; }

const lr_safetensors_tensor *lr_safetensors_find(const lr_safetensors *s, const char *name)
{
    ptrdiff_t i = lr_names_find(s->index, s->n_tensors, name);
    return i < 0 ? NULL : &s->tensors[i];
}

size_t lr_safetensors_n_meta(const lr_safetensors *s) { return s->n_meta; }

const lr_safetensors_meta *lr_safetensors_meta_at(const lr_safetensors *s, size_t i) { return &s->meta[i]; }
