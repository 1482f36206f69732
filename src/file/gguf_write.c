/* gguf_write.c - see gguf_write.h
 *
 * Keys and tensor declarations are gathered in two byte buffers in the form they have in the file; the first data (or
 * finish) writes header and both. Data go through one buffer of 256 KiB.
 */
#define _GNU_SOURCE
#include "file/gguf_write.h"
#include "base/mem.h"
#include "file/gguf_int.h"
#include "file/newfile.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define OUT_SIZE ((size_t)256 << 10)

typedef struct bytes {
    uint8_t *p;
    size_t n, cap;
} bytes;

/* Names given so far; checked for repeats when the header is written. */
typedef struct names {
    char **p;
    size_t n, cap;
} names;

struct lr_gguf_writer {
    char *path;
    lr_newfile file; /* closed once finished */
    lr_error error;  /* the first one; code 0 before */
    bytes meta, table;
    names keys, tensors;
    size_t *sizes; /* bytes of each tensor */
    size_t cap_sizes;
    uint64_t offset; /* of the next tensor, from the start of the data */
    uint32_t alignment;
    bool begun;     /* header written */
    size_t current; /* tensor whose data come next, and how many it has */
    size_t given;
    uint8_t *out; /* OUT_SIZE bytes, n_out filled */
    size_t n_out;
};

/* Remembers the first error. */
static int fail(lr_gguf_writer *w, const lr_error *e)
{
    if (w->error.code == 0) w->error = *e;
    return e->code;
}

#define FAIL(w, err, ...) (lr_fail(err, __VA_ARGS__), fail(w, err))

static int already_failed(const lr_gguf_writer *w, lr_error *err)
{
    if (w->error.code != 0) *err = w->error;
    return w->error.code;
}

static int fail_errno(lr_gguf_writer *w, lr_error *err, const char *what)
{
    int e = errno;
    char text[128], show[240];
    return FAIL(w, err, e == ENOENT ? LR_ENOTFOUND : LR_EIO, "%s: cannot %s: %s",
                lr_printable(show, sizeof show, w->path, strlen(w->path)), what, strerror_r(e, text, sizeof text));
}

/* ---- gathering ---- */

static bool add(bytes *b, const void *data, size_t n)
{
    size_t need;
    if (!lr_add(b->n, n, &need)) return false;
    if (need > b->cap) {
        size_t cap = b->cap ? b->cap : 4096;
        while (cap < need)
            if (!lr_mul(cap, 2, &cap)) return false;
        uint8_t *p = lr_realloc(b->p, cap);
        if (!p) return false;
        b->p = p;
        b->cap = cap;
    }
    if (n) memcpy(b->p + b->n, data, n);
    b->n = need;
    return true;
}

static bool add_u32(bytes *b, uint32_t v) { return add(b, &v, 4); }

static bool add_u64(bytes *b, uint64_t v) { return add(b, &v, 8); }

static bool add_str(bytes *b, lr_str s) { return add_u64(b, s.n) && add(b, s.s, s.n); }

/* Bytes of a fixed-size value; 0 for strings, arrays and unknown types. */
static size_t value_bytes(int type)
{
    static const uint8_t size[] = {
#define X(e, n, name, b) [n] = b,
        LR_KV_LIST(X)
#undef X
    };
    return type >= 0 && (size_t)type < sizeof size ? size[type] : 0;
}

static bool add_array(bytes *b, const lr_gguf_array *a)
{
    size_t n;
    bool ok = add_u32(b, (uint32_t)a->type) && add_u64(b, a->count);
    if (a->type == LR_KV_STR) {
        for (size_t i = 0; i < a->count && ok; i++) ok = add_str(b, ((const lr_str *)a->data)[i]);
        return ok;
    }
    if (a->type == LR_KV_ARRAY) {
        for (size_t i = 0; i < a->count && ok; i++) ok = add_array(b, (const lr_gguf_array *)a->data + i);
        return ok;
    }
    return ok && lr_mul(a->count, value_bytes(a->type), &n) && add(b, a->data, n);
}

static bool add_value(bytes *b, const lr_gguf_kv *kv)
{
    float f = (float)kv->v.f;
    switch (kv->type) {
    case LR_KV_STR:
        return add_str(b, kv->v.s);
    case LR_KV_ARRAY:
        return add_array(b, &kv->v.a);
    case LR_KV_F32:
        return add(b, &f, 4);
    case LR_KV_F64:
        return add(b, &kv->v.f, 8);
    case LR_KV_BOOL:
        return add(b, kv->v.b ? "\1" : "\0", 1);
    case LR_KV_I8:
    case LR_KV_I16:
    case LR_KV_I32:
    case LR_KV_I64:
        return add(b, &kv->v.i, value_bytes(kv->type));
    default:
        return add(b, &kv->v.u, value_bytes(kv->type));
    }
}

/* Every array inside has a known element type and is not nested too deep for the reader. */
static bool good_array(const lr_gguf_array *a, int depth)
{
    if (a->type != LR_KV_ARRAY) return a->type == LR_KV_STR || value_bytes(a->type);
    if (depth == LR_GGUF_DEPTH_MAX) return false;
    for (size_t i = 0; i < a->count; i++)
        if (!good_array((const lr_gguf_array *)a->data + i, depth + 1)) return false;
    return true;
}

static int add_name(lr_gguf_writer *w, names *list, const char *name, const char *what, lr_error *err)
{
    size_t n = strlen(name);
    if (n == 0 || n > LR_GGUF_NAME_MAX) return FAIL(w, err, LR_EINVAL, "%s of %zu bytes", what, n);
    if (list->n == list->cap) {
        size_t cap = list->cap ? list->cap * 2 : 64;
        char **p = lr_reallocarray(list->p, cap, sizeof *p);
        if (!p) return FAIL(w, err, LR_ENOMEM, "no memory for a %s", what);
        list->p = p;
        list->cap = cap;
    }
    char *copy = lr_memdup(name, n);
    if (!copy) return FAIL(w, err, LR_ENOMEM, "no memory for a %s", what);
    list->p[list->n++] = copy;
    return 0;
}

static int set_alignment(lr_gguf_writer *w, const lr_gguf_kv *kv, lr_error *err)
{
    uint64_t a = kv->v.u;
    if (kv->type != LR_KV_U32 || a < 8 || a > LR_GGUF_ALIGNMENT_MAX || (a & (a - 1)) != 0 || w->tensors.n)
        return FAIL(w, err, LR_EINVAL,
                    "general.alignment must be a u32 power of two from 8 to %u, put before any tensor",
                    LR_GGUF_ALIGNMENT_MAX);
    w->alignment = (uint32_t)a;
    return 0;
}

int lr_gguf_writer_put(lr_gguf_writer *w, const lr_gguf_kv *kv, lr_error *err)
{
    if (already_failed(w, err)) return err->code;
    if (w->begun) return FAIL(w, err, LR_EINVAL, "key %.150s: put after data were written", kv->key);
    bool known =
        kv->type == LR_KV_STR || (kv->type == LR_KV_ARRAY ? good_array(&kv->v.a, 1) : value_bytes(kv->type) > 0);
    if (!known) return FAIL(w, err, LR_EINVAL, "key %.150s: unknown type, or arrays nested too deep", kv->key);
    int rc = strcmp(kv->key, "general.alignment") == 0 ? set_alignment(w, kv, err) : 0;
    if (rc == 0) rc = add_name(w, &w->keys, kv->key, "key", err);
    if (rc != 0) return rc;
    if (!add_str(&w->meta, lr_str_of(kv->key)) || !add_u32(&w->meta, (uint32_t)kv->type) || !add_value(&w->meta, kv))
        return FAIL(w, err, LR_ENOMEM, "no memory for key %.150s", kv->key);
    return 0;
}

int lr_gguf_writer_u32(lr_gguf_writer *w, const char *key, uint32_t v, lr_error *err)
{
    return lr_gguf_writer_put(w, &(lr_gguf_kv){.key = key, .type = LR_KV_U32, .v.u = v}, err);
}

int lr_gguf_writer_f32(lr_gguf_writer *w, const char *key, float v, lr_error *err)
{
    return lr_gguf_writer_put(w, &(lr_gguf_kv){.key = key, .type = LR_KV_F32, .v.f = (double)v}, err);
}

int lr_gguf_writer_bool(lr_gguf_writer *w, const char *key, bool v, lr_error *err)
{
    return lr_gguf_writer_put(w, &(lr_gguf_kv){.key = key, .type = LR_KV_BOOL, .v.b = v}, err);
}

int lr_gguf_writer_str(lr_gguf_writer *w, const char *key, lr_str v, lr_error *err)
{
    return lr_gguf_writer_put(w, &(lr_gguf_kv){.key = key, .type = LR_KV_STR, .v.s = v}, err);
}

int lr_gguf_writer_array(lr_gguf_writer *w, const char *key, int type, const void *data, size_t count, lr_error *err)
{
    lr_gguf_kv kv = {.key = key, .type = LR_KV_ARRAY, .v.a = {type, count, data}};
    return lr_gguf_writer_put(w, &kv, err);
}

/* Bytes of a tensor; false if the shape is not one. */
static bool tensor_bytes(int type, int n_dims, const uint64_t *ne, size_t *out)
{
    size_t block = (size_t)lr_dtype_block(type), n = (size_t)lr_dtype_bytes(type);
    if (block == 0 || n_dims < 1 || n_dims > 4 || ne[0] == 0 || ne[0] % block != 0) return false;
    if (!lr_mul(n, ne[0] / block, &n)) return false;
    for (int i = 1; i < n_dims; i++)
        if (ne[i] == 0 || !lr_mul(n, ne[i], &n)) return false;
    *out = n;
    return true;
}

int lr_gguf_writer_tensor(lr_gguf_writer *w, const char *name, int type, int n_dims, const uint64_t *ne, lr_error *err)
{
    size_t size, end;
    if (already_failed(w, err)) return err->code;
    if (w->begun) return FAIL(w, err, LR_EINVAL, "tensor %.150s: declared after data were written", name);
    if (!tensor_bytes(type, n_dims, ne, &size) || !lr_add(w->offset, size, &end) || end > INT64_MAX / 2)
        return FAIL(w, err, LR_EINVAL, "tensor %.150s: type %d does not fit its shape", name, type);
    if (w->tensors.n == w->cap_sizes) {
        size_t cap = w->cap_sizes ? w->cap_sizes * 2 : 64;
        size_t *p = lr_reallocarray(w->sizes, cap, sizeof *p);
        if (!p) return FAIL(w, err, LR_ENOMEM, "no memory for tensor %.150s", name);
        w->sizes = p;
        w->cap_sizes = cap;
    }
    int rc = add_name(w, &w->tensors, name, "tensor name", err);
    if (rc != 0) return rc;
    w->sizes[w->tensors.n - 1] = size;
    bool ok = add_str(&w->table, lr_str_of(name)) && add_u32(&w->table, (uint32_t)n_dims);
    for (int i = 0; i < n_dims && ok; i++) ok = add_u64(&w->table, ne[i]);
    if (!ok || !add_u32(&w->table, (uint32_t)type) || !add_u64(&w->table, w->offset))
        return FAIL(w, err, LR_ENOMEM, "no memory for tensor %.150s", name);
    w->offset = (end + w->alignment - 1) & ~(uint64_t)(w->alignment - 1);
    return 0;
}

/* ---- writing ---- */

static int write_all(lr_gguf_writer *w, const void *data, size_t n, lr_error *err)
{
    const uint8_t *p = data;
    while (n > 0) {
        ssize_t done = write(w->file.fd, p, n < (1u << 30) ? n : 1u << 30);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return fail_errno(w, err, "write");
        p += done;
        n -= (size_t)done;
    }
    return 0;
}

static int flush(lr_gguf_writer *w, lr_error *err)
{
    int rc = write_all(w, w->out, w->n_out, err);
    w->n_out = 0;
    return rc;
}

static int put_out(lr_gguf_writer *w, const void *data, size_t n, lr_error *err)
{
    if (n > OUT_SIZE - w->n_out && flush(w, err) != 0) return err->code;
    if (n > OUT_SIZE) return write_all(w, data, n, err);
    if (n) memcpy(w->out + w->n_out, data, n);
    w->n_out += n;
    return 0;
}

/* Zeros up to the next multiple of the alignment after n bytes. */
static int pad_out(lr_gguf_writer *w, size_t n, lr_error *err)
{
    static const uint8_t zeros[4096];
    size_t need = (w->alignment - n % w->alignment) % w->alignment;
    for (size_t k; need > 0; need -= k) {
        k = need < sizeof zeros ? need : sizeof zeros;
        if (put_out(w, zeros, k, err) != 0) return err->code;
    }
    return 0;
}

static int check_names(lr_gguf_writer *w, const names *list, const char *what, lr_error *err)
{
    lr_name_slot *index;
    int rc = lr_names_index(&index, (const char *const *)list->p, list->n, sizeof *list->p, what, err);
    if (rc != 0) return fail(w, err);
    lr_free(index);
    return 0;
}

static int begin(lr_gguf_writer *w, lr_error *err)
{
    if (w->begun) return 0;
    if (check_names(w, &w->keys, "key", err) != 0 || check_names(w, &w->tensors, "tensor", err) != 0) return err->code;
    w->begun = true;
    uint8_t head[24];
    uint32_t v[2] = {LR_GGUF_MAGIC, 3};
    uint64_t n[2] = {w->tensors.n, w->keys.n};
    memcpy(head, v, 8);
    memcpy(head + 8, n, 16);
    int rc = put_out(w, head, sizeof head, err);
    if (rc == 0) rc = put_out(w, w->meta.p, w->meta.n, err);
    if (rc == 0) rc = put_out(w, w->table.p, w->table.n, err);
    return rc == 0 ? pad_out(w, sizeof head + w->meta.n + w->table.n, err) : rc;
}

int lr_gguf_writer_data(lr_gguf_writer *w, const void *data, size_t n, lr_error *err)
{
    if (already_failed(w, err) || begin(w, err) != 0) return err->code;
    if (n == 0) return 0;
    if (w->current == w->tensors.n || n > w->sizes[w->current] - w->given)
        return FAIL(w, err, LR_EINVAL, "more data than tensor %.150s takes",
                    w->current < w->tensors.n ? w->tensors.p[w->current] : "(none)");
    int rc = put_out(w, data, n, err);
    if (rc != 0) return rc;
    w->given += n;
    if (w->given < w->sizes[w->current]) return 0;
    rc = pad_out(w, w->given, err);
    w->current++;
    w->given = 0;
    return rc;
}

int lr_gguf_writer_finish(lr_gguf_writer *w, lr_error *err)
{
    if (already_failed(w, err) || begin(w, err) != 0) return err->code;
    if (w->file.fd < 0) return lr_fail(err, LR_ESTATE, "finished already");
    if (w->current < w->tensors.n)
        return FAIL(w, err, LR_EINVAL, "tensor %.150s: %zu of %zu bytes were given", w->tensors.p[w->current], w->given,
                    w->sizes[w->current]);
    int rc = flush(w, err);
    if (rc != 0) return rc;
    rc = lr_newfile_finish(&w->file, err);
    return rc != 0 ? fail(w, err) : 0;
}

int lr_gguf_writer_new(lr_gguf_writer **out, const char *path, lr_error *err)
{
    lr_gguf_writer *w = lr_calloc(1, sizeof *w);
    if (!w) return lr_fail(err, LR_ENOMEM, "no memory for a writer");
    w->file.fd = -1;
    w->alignment = LR_GGUF_ALIGNMENT;
    w->path = lr_strdup(path);
    w->out = lr_malloc(OUT_SIZE);
    int rc = w->path && w->out ? lr_newfile_open(&w->file, path, 0666, err)
                               : lr_fail(err, LR_ENOMEM, "no memory for a writer");
    if (rc == 0)
        *out = w;
    else
        lr_gguf_writer_free(w);
    return rc;
}

static void names_deinit(names *list)
{
    for (size_t i = 0; i < list->n; i++) lr_free(list->p[i]);
    lr_free(list->p);
}

void lr_gguf_writer_free(lr_gguf_writer *w)
{
    if (!w) return;
    lr_newfile_discard(&w->file);
    names_deinit(&w->keys);
    names_deinit(&w->tensors);
    lr_free(w->meta.p);
    lr_free(w->table.p);
    lr_free(w->sizes);
    lr_free(w->out);
    lr_free(w->path);
    lr_free(w);
}
