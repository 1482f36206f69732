/* gguf_parse.c - from the bytes of one GGUF file to its checked tables.
 *
 * The file is not trusted. A cursor runs over the metadata once; every count and length is compared with the bytes that
 * are left before memory is asked for, so memory stays within a small multiple of the metadata that is really there.
 * The cursor's end is LR_GGUF_META_MAX at most. Keys, names and array elements are copied (terminated or aligned);
 * strings that are values are views into the file.
 */
#include "file/gguf_int.h"
#include "base/mem.h"
#include <string.h>

typedef struct reader {
    lr_gguf_part *p;
    size_t at, end;
    const char *where; /* what is being read, for the text of "the file ends in ..." */
    char show[160];    /* printable form of the name being dealt with */
    lr_error *err;
} reader;

static const uint8_t kv_bytes[] = {
#define X(e, n, name, bytes) [n] = bytes,
    LR_KV_LIST(X)
#undef X
};

const char *lr_kv_type_name(int type)
{
    switch (type) {
#define X(e, n, name, bytes)                                                                                           \
    case n:                                                                                                            \
        return name;
        LR_KV_LIST(X)
#undef X
    default:
        return "unknown";
    }
}

/* Fewest bytes a value of the type takes in the file; 0 for an unknown type. */
static size_t least_bytes(uint32_t type)
{
    if (type == LR_KV_STR) return 8;
    if (type == LR_KV_ARRAY) return 12;
    return type < sizeof kv_bytes ? kv_bytes[type] : 0;
}

static int no_memory(reader *r) { return lr_fail(r->err, LR_ENOMEM, "no memory for %s", r->where); }

static int ends_early(reader *r)
{
    if (r->end < r->p->map.size)
        return lr_fail(r->err, LR_ELIMIT, "metadata is larger than %zu bytes", LR_GGUF_META_MAX);
    return lr_fail(r->err, LR_EFORMAT, "the file ends in %s, at byte %zu of %zu", r->where, r->at, r->end);
}

/* The next n bytes in place; NULL with err filled. */
static const uint8_t *take(reader *r, size_t n)
{
    if (n > r->end - r->at) {
        ends_early(r);
        return NULL;
    }
    const uint8_t *p = r->p->map.base + r->at;
    r->at += n;
    return p;
}

static int take_u32(reader *r, uint32_t *out)
{
    const uint8_t *b = take(r, 4);
    if (!b) return r->err->code;
    memcpy(out, b, 4);
    return 0;
}

static int take_u64(reader *r, uint64_t *out)
{
    const uint8_t *b = take(r, 8);
    if (!b) return r->err->code;
    memcpy(out, b, 8);
    return 0;
}

static int take_str(reader *r, lr_str *out)
{
    uint64_t n = 0;
    int rc = take_u64(r, &n);
    if (rc != 0) return rc;
    if (n > r->end - r->at) {
        if (r->end < r->p->map.size && n <= r->p->map.size - r->at) return ends_early(r);
        return lr_fail(r->err, LR_EFORMAT, "%s has a string of %llu bytes at byte %zu, more than the file holds",
                       r->where, (unsigned long long)n, r->at - 8);
    }
    const uint8_t *b = take(r, (size_t)n);
    if (!b) return r->err->code;
    *out = (lr_str){(const char *)b, (size_t)n};
    return 0;
}

/* A key or tensor name: terminated copy, checked; what is "key" or "tensor name". */
static int take_name(reader *r, const char *what, const char **out)
{
    lr_str s = {0};
    int rc = take_str(r, &s);
    if (rc != 0) return rc;
    lr_printable(r->show, sizeof r->show, s.s, s.n);
    if (s.n == 0) return lr_fail(r->err, LR_EFORMAT, "empty %s at byte %zu", what, r->at);
    if (s.n > LR_GGUF_NAME_MAX) return lr_fail(r->err, LR_EFORMAT, "%s of %zu bytes: %s", what, s.n, r->show);
    char *z = lr_keep_get(&r->p->keep, s.n + 1);
    if (!z) return no_memory(r);
    memcpy(z, s.s, s.n);
    z[s.n] = 0;
    if (strlen(z) != s.n) return lr_fail(r->err, LR_EFORMAT, "%s with a zero byte: %s", what, r->show);
    *out = z;
    return 0;
}

/* Makes room for one more item in a growing array of at most limit items. */
static int grow(reader *r, void **items, size_t n, size_t *cap, size_t size, uint64_t limit)
{
    if (n < *cap) return 0;
    size_t want = *cap ? *cap * 2 : 64;
    if (want > limit) want = (size_t)limit;
    void *p = lr_reallocarray(*items, want, size);
    if (!p) return no_memory(r);
    *items = p;
    *cap = want;
    return 0;
}

/* ---- metadata ---- */

static int bad_type(reader *r, uint32_t type)
{
    return lr_fail(r->err, LR_EFORMAT, "key %s: unknown value type %u", r->show, type);
}

static int take_numbers(reader *r, lr_gguf_array *a)
{
    size_t bytes = a->count * kv_bytes[a->type];
    const uint8_t *src = take(r, bytes);
    if (!src) return r->err->code;
    void *dst = lr_keep_get(&r->p->keep, bytes);
    if (!dst) return no_memory(r);
    if (bytes) memcpy(dst, src, bytes);
    a->data = dst;
    if (a->type == LR_KV_BOOL)
        for (size_t i = 0; i < a->count; i++)
            if (src[i] > 1)
                return lr_fail(r->err, LR_EFORMAT, "key %s: element %zu is no bool: %d", r->show, i, src[i]);
    return 0;
}

static int take_array(reader *r, lr_gguf_array *a, int depth)
{
    uint32_t type = 0;
    uint64_t count = 0;
    int rc = take_u32(r, &type);
    if (rc == 0) rc = take_u64(r, &count);
    if (rc != 0) return rc;
    size_t least = least_bytes(type), bytes;
    if (!least) return bad_type(r, type);
    if (count > (r->end - r->at) / least) {
        if (r->end < r->p->map.size && count <= (r->p->map.size - r->at) / least) return ends_early(r);
        return lr_fail(r->err, LR_EFORMAT, "key %s: an array of %llu elements does not fit into the file", r->show,
                       (unsigned long long)count);
    }
    *a = (lr_gguf_array){.type = (int)type, .count = (size_t)count};
    if (type == LR_KV_STR) {
        lr_str *s = lr_mul(a->count, sizeof *s, &bytes) ? lr_keep_get(&r->p->keep, bytes) : NULL;
        if (!s) return no_memory(r);
        for (size_t i = 0; i < a->count && rc == 0; i++) rc = take_str(r, &s[i]);
        a->data = s;
        return rc;
    }
    if (type == LR_KV_ARRAY) {
        if (depth == LR_GGUF_DEPTH_MAX)
            return lr_fail(r->err, LR_ELIMIT, "key %s: arrays nested deeper than %d", r->show, LR_GGUF_DEPTH_MAX);
        lr_gguf_array *sub = lr_mul(a->count, sizeof *sub, &bytes) ? lr_keep_get(&r->p->keep, bytes) : NULL;
        if (!sub) return no_memory(r);
        for (size_t i = 0; i < a->count && rc == 0; i++) rc = take_array(r, &sub[i], depth + 1);
        a->data = sub;
        return rc;
    }
    return take_numbers(r, a);
}

/* A number or bool from its little-endian bytes. */
static int scalar(reader *r, const uint8_t *b, lr_gguf_kv *kv)
{
    union {
        uint8_t u8;
        int16_t i16;
        int32_t i32;
        int64_t i64;
        float f32;
        double f64;
    } x = {0};
    memcpy(&x, b, kv_bytes[kv->type]);
    switch (kv->type) {
    case LR_KV_U8:
        kv->v.u = x.u8;
        break;
    case LR_KV_U16:
        kv->v.u = (uint16_t)x.i16;
        break;
    case LR_KV_U32:
        kv->v.u = (uint32_t)x.i32;
        break;
    case LR_KV_U64:
        kv->v.u = (uint64_t)x.i64;
        break;
    case LR_KV_I8:
        kv->v.i = (x.u8 ^ 0x80) - 0x80; /* sign-extended */
        break;
    case LR_KV_I16:
        kv->v.i = x.i16;
        break;
    case LR_KV_I32:
        kv->v.i = x.i32;
        break;
    case LR_KV_I64:
        kv->v.i = x.i64;
        break;
    case LR_KV_F32:
        kv->v.f = (double)x.f32;
        break;
    case LR_KV_F64:
        kv->v.f = x.f64;
        break;
    default:
        if (*b > 1) return lr_fail(r->err, LR_EFORMAT, "key %s: is no bool: %d", r->show, *b);
        kv->v.b = *b;
    }
    return 0;
}

static int take_kv(reader *r, lr_gguf_kv *kv)
{
    *kv = (lr_gguf_kv){0};
    uint32_t type = 0;
    int rc = take_name(r, "key", &kv->key);
    if (rc == 0) rc = take_u32(r, &type);
    if (rc != 0) return rc;
    if (!least_bytes(type)) return bad_type(r, type);
    kv->type = (int)type;
    if (type == LR_KV_STR) return take_str(r, &kv->v.s);
    if (type == LR_KV_ARRAY) return take_array(r, &kv->v.a, 1);
    const uint8_t *b = take(r, kv_bytes[type]);
    return b ? scalar(r, b, kv) : r->err->code;
}

static int parse_metadata(reader *r, uint64_t count)
{
    lr_gguf_part *p = r->p;
    r->where = "the key list";
    for (uint64_t i = 0; i < count; i++) {
        int rc = grow(r, (void **)&p->kv, p->n_kv, &p->cap_kv, sizeof *p->kv, count);
        if (rc == 0) rc = take_kv(r, &p->kv[p->n_kv]);
        if (rc != 0) return rc;
        p->n_kv++;
    }
    int rc = lr_names_index(&p->kv_index, count ? &p->kv[0].key : NULL, p->n_kv, sizeof *p->kv, "key", r->err);
    if (rc != 0) return rc;

    p->alignment = LR_GGUF_ALIGNMENT;
    ptrdiff_t at = lr_names_find(p->kv_index, p->n_kv, "general.alignment");
    if (at < 0) return 0;
    const lr_gguf_kv *kv = &p->kv[at];
    if (kv->type != LR_KV_U32)
        return lr_fail(r->err, LR_EFORMAT, "key general.alignment: type is %s, wanted u32", lr_kv_type_name(kv->type));
    uint64_t a = kv->v.u;
    if (a < 8 || a > LR_GGUF_ALIGNMENT_MAX || (a & (a - 1)) != 0)
        return lr_fail(r->err, LR_EFORMAT, "key general.alignment: %llu is not a power of two from 8 to %u",
                       (unsigned long long)a, LR_GGUF_ALIGNMENT_MAX);
    p->alignment = (uint32_t)a;
    return 0;
}

/* ---- tensor table ---- */

/* Types that exist in GGUF files but not here, for the text of the refusal. */
static const char *foreign_type(uint32_t t)
{
    static const char *const names[] = {
        [9] = "Q8_1",   [15] = "Q8_K",  [16] = "IQ2_XXS", [17] = "IQ2_XS", [18] = "IQ3_XXS",
        [19] = "IQ1_S", [21] = "IQ3_S", [22] = "IQ2_S",   [27] = "I64",    [28] = "F64",
        [29] = "IQ1_M", [34] = "TQ1_0", [35] = "TQ2_0",
    };
    return t < sizeof names / sizeof *names && names[t] ? names[t] : "unknown";
}

/* Fills t->size from type and ne. */
static int tensor_size(reader *r, lr_gguf_tensor *t)
{
    size_t block = (size_t)lr_dtype_block(t->type), rows = 1;
    for (int i = 0; i < t->n_dims; i++)
        if (t->ne[i] == 0) return lr_fail(r->err, LR_EFORMAT, "tensor %s: dimension %d is 0", r->show, i);
    if (t->ne[0] % block != 0)
        return lr_fail(r->err, LR_EFORMAT, "tensor %s: rows of %llu values are no multiple of %s's block of %zu",
                       r->show, (unsigned long long)t->ne[0], lr_dtype_name(t->type), block);
    bool fits = lr_mul(rows, t->ne[1], &rows) && lr_mul(rows, t->ne[2], &rows) && lr_mul(rows, t->ne[3], &rows) &&
                lr_mul(t->ne[0] / block, (size_t)lr_dtype_bytes(t->type), &t->size) && lr_mul(t->size, rows, &t->size);
    if (!fits || t->size > r->p->map.size)
        return lr_fail(r->err, LR_EFORMAT,
                       "tensor %s: %llu x %llu x %llu x %llu values of %s are more than the file holds (cut off?)",
                       r->show, (unsigned long long)t->ne[0], (unsigned long long)t->ne[1],
                       (unsigned long long)t->ne[2], (unsigned long long)t->ne[3], lr_dtype_name(t->type));
    return 0;
}

static int take_tensor(reader *r, lr_gguf_tensor *t)
{
    *t = (lr_gguf_tensor){.ne = {1, 1, 1, 1}};
    uint32_t n_dims = 0, type = 0;
    int rc = take_name(r, "tensor name", &t->name);
    if (rc == 0) rc = take_u32(r, &n_dims);
    if (rc != 0) return rc;
    if (n_dims > 4)
        return lr_fail(r->err, LR_EFORMAT, "tensor %s: %u dimensions, at most 4 are known", r->show, n_dims);
    t->n_dims = (int)n_dims;
    for (int i = 0; i < t->n_dims && rc == 0; i++) rc = take_u64(r, &t->ne[i]);
    if (rc == 0) rc = take_u32(r, &type);
    if (rc == 0) rc = take_u64(r, &t->offset);
    if (rc != 0) return rc;
    if (type >= LR_DTYPE_MAX || lr_dtype_block((int)type) == 0)
        return lr_fail(r->err, LR_EUNSUPPORTED, "tensor %s: type %u (%s) is not supported", r->show, type,
                       foreign_type(type));
    t->type = (int)type;
    if (t->offset % r->p->alignment != 0)
        return lr_fail(r->err, LR_EFORMAT, "tensor %s: offset %llu is not aligned to %u", r->show,
                       (unsigned long long)t->offset, r->p->alignment);
    return tensor_size(r, t);
}

static int check_overlap(reader *r)
{
    const lr_gguf_part *p = r->p;
    lr_span *spans = lr_reallocarray(NULL, p->n_tensors, sizeof *spans);
    if (!spans) return no_memory(r);
    for (size_t i = 0; i < p->n_tensors; i++) spans[i] = (lr_span){p->tensors[i].offset, p->tensors[i].size, i};
    lr_spans_sort(spans, p->n_tensors);
    int rc = 0;
    for (size_t i = 1; i < p->n_tensors && rc == 0; i++) {
        if (spans[i].start - spans[i - 1].start >= spans[i - 1].size) continue;
        const char *a = p->tensors[spans[i - 1].i].name, *b = p->tensors[spans[i].i].name;
        char other[160];
        lr_printable(r->show, sizeof r->show, a, strlen(a));
        lr_printable(other, sizeof other, b, strlen(b));
        rc = lr_fail(r->err, LR_EFORMAT, "tensor %s: its data overlaps that of %s", r->show, other);
    }
    lr_free(spans);
    return rc;
}

static int parse_tensors(reader *r, uint64_t count)
{
    lr_gguf_part *p = r->p;
    r->where = "the tensor list";
    for (uint64_t i = 0; i < count; i++) {
        int rc = grow(r, (void **)&p->tensors, p->n_tensors, &p->cap_tensors, sizeof *p->tensors, count);
        if (rc == 0) rc = take_tensor(r, &p->tensors[p->n_tensors]);
        if (rc != 0) return rc;
        p->n_tensors++;
    }
    size_t mask = p->alignment - 1;
    p->data_start = (r->at + mask) & ~mask; /* cannot wrap: at <= LR_GGUF_META_MAX */
    for (size_t i = 0; i < p->n_tensors; i++) {
        lr_gguf_tensor *t = &p->tensors[i];
        size_t start, end;
        if (!lr_add(t->offset, p->data_start, &start) || !lr_add(start, t->size, &end) || end > p->map.size) {
            lr_printable(r->show, sizeof r->show, t->name, strlen(t->name));
            return lr_fail(r->err, LR_EFORMAT,
                           "tensor %s: its %zu bytes at offset %llu lie beyond the file's end (cut off?)", r->show,
                           t->size, (unsigned long long)t->offset);
        }
        t->offset = start;
        t->data = p->map.base + start;
    }
    return count ? check_overlap(r) : 0;
}

int lr_gguf__parse(lr_gguf_part *p, lr_error *err)
{
    reader r = {.p = p, .end = p->map.size < LR_GGUF_META_MAX ? p->map.size : LR_GGUF_META_MAX, .err = err};
    uint32_t magic = 0, version = 0;
    uint64_t n_tensors = 0, n_kv = 0;
    r.where = "the header";
    int rc = take_u32(&r, &magic);
    if (rc != 0) return rc;
    if (magic != LR_GGUF_MAGIC) return lr_fail(err, LR_EFORMAT, "is not a GGUF file: it starts with %08x", magic);
    rc = take_u32(&r, &version);
    if (rc != 0) return rc;
    if (version != 0 && (version & 0xFFFF) == 0)
        return lr_fail(err, LR_EUNSUPPORTED, "is a big-endian GGUF file; only little-endian ones are supported");
    if (version != 2 && version != 3)
        return lr_fail(err, LR_EUNSUPPORTED, "is GGUF version %u; 2 and 3 are supported", version);
    p->version = (int)version;
    rc = take_u64(&r, &n_tensors);
    if (rc == 0) rc = take_u64(&r, &n_kv);
    if (rc != 0) return rc;
    /* a key takes at least 8 + 1 + 4 + 1 bytes, a tensor 8 + 1 + 4 + 4 + 8 */
    size_t left = r.end - r.at;
    if (n_kv > left / 14)
        return lr_fail(err, LR_EFORMAT, "%llu keys do not fit into the file", (unsigned long long)n_kv);
    if (n_tensors > left / 25)
        return lr_fail(err, LR_EFORMAT, "%llu tensors do not fit into the file", (unsigned long long)n_tensors);
    rc = parse_metadata(&r, n_kv);
    return rc == 0 ? parse_tensors(&r, n_tensors) : rc;
}
