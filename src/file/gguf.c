/* gguf.c - see gguf.h: joins the parts of a model and answers questions about it. */
#include "file/gguf_int.h"
#include "base/mem.h"
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

/* ---- opening ---- */

static void part_deinit(lr_gguf_part *p)
{
    lr_keep_deinit(&p->keep);
    lr_free(p->kv);
    lr_free(p->kv_index);
    lr_free(p->tensors);
    lr_free(p->path);
    lr_mapfile_close(&p->map);
    *p = (lr_gguf_part){0};
}

void lr_gguf_free(lr_gguf *g)
{
    if (!g) return;
    for (int i = 0; g->parts && i < g->n_parts; i++) part_deinit(&g->parts[i]);
    lr_free(g->parts);
    if (g->n_parts > 1) lr_free(g->tensors); /* of one part they are its own */
    lr_free(g->tensor_index);
    lr_free(g);
}

static int prefix_path(const char *path, lr_error *err)
{
    char show[240];
    return lr_fail_prefix(err, "%s", lr_printable(show, sizeof show, path, strlen(path)));
}

/* Opens and parses one file into a zeroed part. */
static int part_open(lr_gguf_part *p, const char *path, bool copy, lr_error *err)
{
    p->path = lr_strdup(path);
    if (!p->path) return lr_fail(err, LR_ENOMEM, "no memory for a path");
    int rc = lr_mapfile_open(&p->map, path, copy, err);
    if (rc == 0) rc = lr_gguf__parse(p, err);
    if (rc == 0) rc = lr_mapfile_unchanged(&p->map, err);
    if (rc == 0) return 0;
    part_deinit(p);
    return prefix_path(path, err);
}

static const lr_gguf_kv *part_find(const lr_gguf_part *p, const char *key)
{
    ptrdiff_t i = lr_names_find(p->kv_index, p->n_kv, key);
    return i < 0 ? NULL : &p->kv[i];
}

static int kv_u64(const lr_gguf_kv *kv, uint64_t *out, lr_error *err);

/* A split.* number of a part, as int. */
static int split_number(const lr_gguf_part *p, const char *key, int max, int *out, lr_error *err)
{
    const lr_gguf_kv *kv = part_find(p, key);
    uint64_t v = 0;
    int rc = kv ? kv_u64(kv, &v, err) : lr_fail(err, LR_EFORMAT, "key %s is missing", key);
    if (rc == 0 && v > (uint64_t)max) rc = lr_fail(err, LR_EFORMAT, "key %s: %" PRIu64 " is more than %d", key, v, max);
    if (rc != 0) return prefix_path(p->path, err);
    *out = (int)v;
    return 0;
}

/* Length of path without "-NNNNN-of-NNNNN.gguf" for this shard; -1 if it does not end so. */
static ptrdiff_t shard_stem(const char *path, int no, int count)
{
    char tail[32];
    int n = snprintf(tail, sizeof tail, "-%05d-of-%05d.gguf", no + 1, count);
    size_t len = strlen(path);
    return len > (size_t)n && strcmp(path + len - n, tail) == 0 ? (ptrdiff_t)len - n : -1;
}

/* Checks that part i says of itself what the set says of it. */
static int check_shard(const lr_gguf *g, int i, lr_error *err)
{
    const lr_gguf_part *p = &g->parts[i];
    int count = 0, no = 0;
    int rc = split_number(p, "split.count", LR_GGUF_SHARDS_MAX, &count, err);
    if (rc == 0) rc = split_number(p, "split.no", LR_GGUF_SHARDS_MAX, &no, err);
    if (rc != 0) return rc;
    if (count == g->n_parts && no == i) return 0;
    lr_fail(err, LR_EFORMAT, "says that it is shard %d of %d, but should be %d of %d", no + 1, count, i + 1,
            g->n_parts);
    return prefix_path(p->path, err);
}

/* g->parts[0] is the file that was asked for, a shard no of count; opens the others around it. */
static int open_shards(lr_gguf *g, int no, int count, bool copy, lr_error *err)
{
    lr_gguf_part first = g->parts[0];
    ptrdiff_t stem = shard_stem(first.path, no, count);
    if (stem < 0) {
        lr_fail(err, LR_EFORMAT,
                "is shard %d of %d; its name must end in -%05d-of-%05d.gguf for the others to be found", no + 1, count,
                no + 1, count);
        return prefix_path(first.path, err);
    }
    lr_gguf_part *parts = lr_calloc((size_t)count, sizeof *parts);
    char *path = lr_malloc((size_t)stem + 32);
    if (!parts || !path) {
        lr_free(parts);
        lr_free(path);
        return lr_fail(err, LR_ENOMEM, "no memory for %d shards", count);
    }
    lr_free(g->parts);
    g->parts = parts;
    g->n_parts = count;
    parts[no] = first;
    memcpy(path, first.path, (size_t)stem);
    int rc = 0;
    for (int i = 0; i < count && rc == 0; i++) {
        snprintf(path + stem, 32, "-%05d-of-%05d.gguf", i + 1, count);
        if (i != no) rc = part_open(&parts[i], path, copy, err);
        if (rc == 0) rc = check_shard(g, i, err);
    }
    lr_free(path);
    return rc;
}

/* One list of tensors over all parts, and its index. */
static int join_tensors(lr_gguf *g, lr_error *err)
{
    for (int i = 0; i < g->n_parts; i++) g->n_tensors += g->parts[i].n_tensors; /* each was counted in its file */
    if (g->n_parts == 1) {
        g->tensors = g->parts[0].tensors;
    } else {
        g->tensors = lr_reallocarray(NULL, g->n_tensors, sizeof *g->tensors);
        if (!g->tensors) return lr_fail(err, LR_ENOMEM, "no memory for %zu tensors", g->n_tensors);
        size_t at = 0;
        for (int i = 0; i < g->n_parts; i++) {
            const lr_gguf_part *p = &g->parts[i];
            for (size_t k = 0; k < p->n_tensors; k++) {
                g->tensors[at] = p->tensors[k];
                g->tensors[at++].shard = i;
            }
        }
        int want = 0;
        int rc = split_number(&g->parts[0], "split.tensors.count", INT_MAX, &want, err);
        if (rc != 0) return rc;
        if ((size_t)want != g->n_tensors) {
            lr_fail(err, LR_EFORMAT, "the shards hold %zu tensors, but split.tensors.count says %d", g->n_tensors,
                    want);
            return prefix_path(g->parts[0].path, err);
        }
    }
    int rc = lr_names_index(&g->tensor_index, g->n_tensors ? &g->tensors[0].name : NULL, g->n_tensors,
                            sizeof *g->tensors, "tensor", err);
    return rc == 0 ? 0 : prefix_path(g->parts[0].path, err);
}

static int open_all(lr_gguf **out, const char *path, bool copy, lr_error *err)
{
    lr_gguf *g = lr_calloc(1, sizeof *g);
    if (g) g->parts = lr_calloc(1, sizeof *g->parts);
    if (!g || !g->parts) {
        lr_gguf_free(g);
        return lr_fail(err, LR_ENOMEM, "no memory");
    }
    int rc = part_open(&g->parts[0], path, copy, err);
    if (rc == 0) g->n_parts = 1;
    if (rc == 0 && part_find(&g->parts[0], "split.count")) {
        int count = 0, no = 0;
        rc = split_number(&g->parts[0], "split.count", LR_GGUF_SHARDS_MAX, &count, err);
        if (rc == 0 && count > 1) {
            rc = split_number(&g->parts[0], "split.no", count - 1, &no, err);
            if (rc == 0) rc = open_shards(g, no, count, copy, err);
        }
    }
    if (rc == 0) rc = join_tensors(g, err);
    if (rc == 0)
        *out = g;
    else
        lr_gguf_free(g);
    return rc;
}

int lr_gguf_open(lr_gguf **out, const char *path, lr_error *err) { return open_all(out, path, false, err); }

int lr_gguf_open_copy(lr_gguf **out, const char *path, lr_error *err) { return open_all(out, path, true, err); }

/* ---- the files ---- */

int lr_gguf_n_shards(const lr_gguf *g) { return g->n_parts; }

const char *lr_gguf_shard_path(const lr_gguf *g, int shard) { return g->parts[shard].path; }

int lr_gguf_version(const lr_gguf *g) { return g->parts[0].version; }

uint64_t lr_gguf_file_bytes(const lr_gguf *g)
{
    uint64_t n = 0;
    for (int i = 0; i < g->n_parts; i++) n += g->parts[i].map.size;
    return n;
}

int lr_gguf_check_unchanged(const lr_gguf *g, lr_error *err)
{
    for (int i = 0; i < g->n_parts; i++)
        if (lr_mapfile_unchanged(&g->parts[i].map, err) != 0) return prefix_path(g->parts[i].path, err);
    return 0;
}

int lr_gguf_check_intact(const lr_gguf *g, lr_error *err)
{
    for (int i = 0; i < g->n_parts; i++)
        if (lr_mapfile_intact(&g->parts[i].map, err) != 0) return prefix_path(g->parts[i].path, err);
    return 0;
}

/* ---- metadata ---- */

size_t lr_gguf_n_kv(const lr_gguf *g) { return g->parts[0].n_kv; }

const lr_gguf_kv *lr_gguf_kv_at(const lr_gguf *g, size_t i) { return &g->parts[0].kv[i]; }

const lr_gguf_kv *lr_gguf_find(const lr_gguf *g, const char *key) { return part_find(&g->parts[0], key); }

static int bad_type(const lr_gguf_kv *kv, const char *wanted, lr_error *err)
{
    char show[160];
    return lr_fail(err, LR_EFORMAT, "key %s: type is %s, wanted %s",
                   lr_printable(show, sizeof show, kv->key, strlen(kv->key)), lr_kv_type_name(kv->type), wanted);
}

/* kv under key, or NULL with err filled. */
static const lr_gguf_kv *must_find(const lr_gguf *g, const char *key, lr_error *err)
{
    const lr_gguf_kv *kv = lr_gguf_find(g, key);
    char show[160];
    if (!kv) lr_fail(err, LR_ENOTFOUND, "key %s is missing", lr_printable(show, sizeof show, key, strlen(key)));
    return kv;
}

static bool is_unsigned(int t) { return t == LR_KV_U8 || t == LR_KV_U16 || t == LR_KV_U32 || t == LR_KV_U64; }

static bool is_signed(int t) { return t == LR_KV_I8 || t == LR_KV_I16 || t == LR_KV_I32 || t == LR_KV_I64; }

static int kv_u64(const lr_gguf_kv *kv, uint64_t *out, lr_error *err)
{
    if (!is_unsigned(kv->type) && !is_signed(kv->type)) return bad_type(kv, "an integer", err);
    if (is_signed(kv->type) && kv->v.i < 0)
        return lr_fail(err, LR_EFORMAT, "key %.150s: %" PRId64 " is negative", kv->key, kv->v.i);
    *out = is_signed(kv->type) ? (uint64_t)kv->v.i : kv->v.u;
    return 0;
}

int lr_gguf_get_u64(const lr_gguf *g, const char *key, uint64_t *out, lr_error *err)
{
    const lr_gguf_kv *kv = must_find(g, key, err);
    return kv ? kv_u64(kv, out, err) : err->code;
}

int lr_gguf_get_i64(const lr_gguf *g, const char *key, int64_t *out, lr_error *err)
{
    const lr_gguf_kv *kv = must_find(g, key, err);
    if (!kv) return err->code;
    if (!is_unsigned(kv->type) && !is_signed(kv->type)) return bad_type(kv, "an integer", err);
    if (is_unsigned(kv->type) && kv->v.u > INT64_MAX)
        return lr_fail(err, LR_EFORMAT, "key %.150s: %" PRIu64 " is too large", kv->key, kv->v.u);
    *out = is_signed(kv->type) ? kv->v.i : (int64_t)kv->v.u;
    return 0;
}

int lr_gguf_get_f64(const lr_gguf *g, const char *key, double *out, lr_error *err)
{
    const lr_gguf_kv *kv = must_find(g, key, err);
    if (!kv) return err->code;
    if (kv->type != LR_KV_F32 && kv->type != LR_KV_F64) return bad_type(kv, "f32 or f64", err);
    *out = kv->v.f;
    return 0;
}

int lr_gguf_get_bool(const lr_gguf *g, const char *key, bool *out, lr_error *err)
{
    const lr_gguf_kv *kv = must_find(g, key, err);
    if (!kv) return err->code;
    if (kv->type != LR_KV_BOOL) return bad_type(kv, "bool", err);
    *out = kv->v.b;
    return 0;
}

int lr_gguf_get_str(const lr_gguf *g, const char *key, lr_str *out, lr_error *err)
{
    const lr_gguf_kv *kv = must_find(g, key, err);
    if (!kv) return err->code;
    if (kv->type != LR_KV_STR) return bad_type(kv, "str", err);
    *out = kv->v.s;
    return 0;
}

int lr_gguf_get_array(const lr_gguf *g, const char *key, int type, const lr_gguf_array **out, lr_error *err)
{
    const lr_gguf_kv *kv = must_find(g, key, err);
    if (!kv) return err->code;
    if (kv->type != LR_KV_ARRAY) return bad_type(kv, "array", err);
    if (type >= 0 && kv->v.a.type != type)
        return lr_fail(err, LR_EFORMAT, "key %.150s: elements are %s, wanted %s", key, lr_kv_type_name(kv->v.a.type),
                       lr_kv_type_name(type));
    *out = &kv->v.a;
    return 0;
}

int64_t lr_gguf_array_i64(const lr_gguf_array *a, size_t i)
{
    switch (a->type) {
    case LR_KV_BOOL:
    case LR_KV_U8:
        return ((const uint8_t *)a->data)[i];
    case LR_KV_I8:
        return ((const int8_t *)a->data)[i];
    case LR_KV_U16:
        return ((const uint16_t *)a->data)[i];
    case LR_KV_I16:
        return ((const int16_t *)a->data)[i];
    case LR_KV_U32:
        return ((const uint32_t *)a->data)[i];
    case LR_KV_I32:
        return ((const int32_t *)a->data)[i];
    case LR_KV_I64:
        return ((const int64_t *)a->data)[i];
    case LR_KV_U64: {
        uint64_t v = ((const uint64_t *)a->data)[i];
        return v > INT64_MAX ? INT64_MAX : (int64_t)v;
    }
    default:
        return 0;
    }
}

double lr_gguf_array_f64(const lr_gguf_array *a, size_t i)
{
    if (a->type == LR_KV_F32) return (double)((const float *)a->data)[i];
    return a->type == LR_KV_F64 ? ((const double *)a->data)[i] : 0;
}

/* ---- tensors ---- */

size_t lr_gguf_n_tensors(const lr_gguf *g) { return g->n_tensors; }

const lr_gguf_tensor *lr_gguf_tensor_at(const lr_gguf *g, size_t i) { return &g->tensors[i]; }

const lr_gguf_tensor *lr_gguf_find_tensor(const lr_gguf *g, const char *name)
{
    ptrdiff_t i = lr_names_find(g->tensor_index, g->n_tensors, name);
    return i < 0 ? NULL : &g->tensors[i];
}

void lr_gguf_advise(const lr_gguf *g, const lr_gguf_tensor *t, enum lr_gguf_advice how)
{
    int advice = how == LR_GGUF_WILLNEED ? MADV_WILLNEED : how == LR_GGUF_DONTNEED ? MADV_DONTNEED : MADV_SEQUENTIAL;
    bool whole = how == LR_GGUF_DONTNEED;
    if (t) {
        lr_mapfile_advise(&g->parts[t->shard].map, t->offset, t->size, advice, whole);
        return;
    }
    for (int i = 0; i < g->n_parts; i++) {
        const lr_gguf_part *p = &g->parts[i];
        if (p->n_tensors) lr_mapfile_advise(&p->map, p->data_start, p->map.size - p->data_start, advice, whole);
    }
}

int lr_gguf_read(const lr_gguf *g, const lr_gguf_tensor *t, size_t from, void *dst, size_t n, lr_error *err)
{
    if (from > t->size || n > t->size - from)
        return lr_fail(err, LR_EINVAL, "tensor %.150s: bytes %zu + %zu are not within its %zu", t->name, from, n,
                       t->size);
    const lr_gguf_part *p = &g->parts[t->shard];
    return lr_mapfile_read(&p->map, t->offset + from, dst, n, err) == 0 ? 0 : prefix_path(p->path, err);
}
