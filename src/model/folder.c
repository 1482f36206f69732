/* folder.c - see folder.h */
#include "model/folder.h"
#include "base/dtype.h"
#include "base/mem.h"
#include "base/pool.h"
#include "file/mapfile.h"
#include "file/names.h"
#include "model/folder_int.h"
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

typedef struct weight {
    const char *name; /* in keep */
    lr_part *parts;   /* in keep */
    size_t n_parts;
    bool stack, columns;
    lr_made made;
    int n_dims;
    int64_t ne[4];
} weight;

typedef struct shard {
    char *path;
    lr_safetensors *s;
} shard;

struct lr_folder {
    shard *files;
    size_t n_files, cap_files;
    weight *weights;
    size_t n_weights, cap_weights;
    lr_keep keep;
    lr_name_slot *index; /* of the weights, once a graph asks */
};

int lr_folder_new(lr_folder **out, lr_error *err)
{
    *out = lr_calloc(1, sizeof **out);
    return *out ? 0 : lr_fail(err, LR_ENOMEM, "no memory for a model's files");
}

void lr_folder_free(lr_folder *f)
{
    if (!f) return;
    for (size_t i = 0; i < f->n_files; i++) {
        lr_safetensors_free(f->files[i].s);
        lr_free(f->files[i].path);
    }
    for (size_t i = 0; i < f->n_weights; i++)
        for (size_t j = 0; j < f->weights[i].n_parts; j++) lr_free(f->weights[i].parts[j].group);
    lr_free(f->files);
    lr_free(f->weights);
    lr_free(f->index);
    lr_keep_deinit(&f->keep);
    lr_free(f);
}

static int grow(void *items, size_t *cap, size_t n, size_t size, lr_error *err)
{
    if (n < *cap) return 0;
    size_t want = *cap ? *cap * 2 : 16;
    void **p = items, *q = lr_reallocarray(*p, want, size);
    if (!q) return lr_fail(err, LR_ENOMEM, "no memory for a model's tables");
    *p = q;
    *cap = want;
    return 0;
}

/* ---- files ---- */

int lr_folder_open(lr_folder *f, const char *path, lr_error *err)
{
    shard new = {lr_strdup(path), NULL};
    int rc = new.path ? grow(&f->files, &f->cap_files, f->n_files, sizeof new, err)
                      : lr_fail(err, LR_ENOMEM, "no memory for a path");
    if (!rc) rc = lr_safetensors_open(&new.s, path, false, err);
    for (size_t i = 0; !rc && i < lr_safetensors_n_tensors(new.s); i++) {
        const char *name = lr_safetensors_tensor_at(new.s, i)->name;
        size_t other = 0;
        char show[160];
        for (; other < f->n_files && !lr_safetensors_find(f->files[other].s, name); other++) {
        }
        if (other < f->n_files)
            rc = lr_fail(err, LR_EFORMAT, "%s: tensor '%s' is in %s too", path,
                         lr_printable(show, sizeof show, name, strlen(name)), f->files[other].path);
    }
    if (rc) {
        lr_safetensors_free(new.s);
        lr_free(new.path);
        return rc;
    }
    f->files[f->n_files++] = new;
    return 0;
}

size_t lr_folder_n_files(const lr_folder *f) { return f->n_files; }
const char *lr_folder_path(const lr_folder *f, size_t i) { return f->files[i].path; }

size_t lr_folder_n_tensors(const lr_folder *f)
{
    size_t n = 0;
    for (size_t i = 0; i < f->n_files; i++) n += lr_safetensors_n_tensors(f->files[i].s);
    return n;
}

const lr_safetensors_tensor *lr_folder_tensor(const lr_folder *f, size_t i, size_t *which)
{
    for (size_t k = 0; k < f->n_files; k++) {
        size_t n = lr_safetensors_n_tensors(f->files[k].s);
        if (which) *which = k;
        if (i < n) return lr_safetensors_tensor_at(f->files[k].s, i);
        i -= n;
    }
    return NULL;
}

static const lr_safetensors_tensor *find_tensor(const lr_folder *f, const char *name, const lr_safetensors **file)
{
    for (size_t k = 0; k < f->n_files; k++) {
        const lr_safetensors_tensor *t = lr_safetensors_find(f->files[k].s, name);
        *file = f->files[k].s;
        if (t) return t;
    }
    return NULL;
}

const lr_safetensors_tensor *lr_folder_find(const lr_folder *f, const char *name)
{
    const lr_safetensors *file;
    return find_tensor(f, name, &file);
}

uint64_t lr_folder_bytes(const lr_folder *f)
{
    uint64_t n = 0;
    for (size_t i = 0; i < f->n_files; i++) n += lr_safetensors_file_bytes(f->files[i].s);
    return n;
}

static uint64_t mix(uint64_t h, const void *data, size_t n)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u; /* FNV-1a */
    return h;
}

uint64_t lr_folder_fingerprint(const lr_folder *f, const char *text, size_t n)
{
    uint64_t h = mix(0xcbf29ce484222325u, text, n);
    for (size_t k = 0; k < f->n_files; k++)
        for (size_t i = 0; i < lr_safetensors_n_tensors(f->files[k].s); i++) {
            const lr_safetensors_tensor *t = lr_safetensors_tensor_at(f->files[k].s, i);
            size_t part = t->size < 256 ? t->size : 256;
            h = mix(h, t->name, strlen(t->name));
            h = mix(h, t->dtype, strlen(t->dtype));
            h = mix(h, t->shape, sizeof t->shape);
            h = mix(h, t->data, part);
            h = mix(h, (const char *)t->data + (t->size - part), part);
        }
    return h;
}

/* ---- parts ---- */

static void shape_text(const lr_safetensors_tensor *t, char *buf, size_t cap)
{
    size_t n = 0;
    buf[0] = 0;
    for (int i = 0; i < t->n_dims && n < cap; i++)
        n += (size_t)snprintf(buf + n, cap - n, "%s%" PRIu64, i ? ", " : "", t->shape[i]);
}

/* A tensor of a part, less its first dimension if an index into it is given. */
typedef struct slice {
    const lr_safetensors *file;
    const lr_safetensors_tensor *t;
    const uint8_t *data;
    size_t size;
    int n_dims;
    int64_t shape[LR_SAFETENSORS_DIMS];
} slice;

static int find_slice(lr_folder *f, const char *name, int64_t index, slice *s, lr_error *err)
{
    *s = (slice){0};
    s->t = find_tensor(f, name, &s->file);
    if (!s->t) return lr_fail(err, LR_ENOTFOUND, "no file has a tensor '%s'", name);
    int drop = index >= 0;
    s->n_dims = s->t->n_dims - drop;
    s->size = s->t->size;
    if (drop && (s->t->n_dims < 2 || (uint64_t)index >= s->t->shape[0])) {
        char shape[100];
        shape_text(s->t, shape, sizeof shape);
        return lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s) has no part %" PRId64, name, shape, index);
    }
    if (drop) s->size /= (size_t)s->t->shape[0];
    s->data = (const uint8_t *)s->t->data + (drop ? (size_t)index * s->size : 0);
    for (int i = 0; i < s->n_dims; i++) {
        if (s->t->shape[i + drop] > 1 << 30 || s->t->shape[i + drop] < 1)
            return lr_fail(err, LR_ESHAPE, "tensor '%s': a dimension of %" PRIu64, name, s->t->shape[i + drop]);
        s->shape[i] = (int64_t)s->t->shape[i + drop];
    }
    return 0;
}

static int bad_shape(const slice *s, const char *want, const slice *of, lr_error *err)
{
    char a[100], b[100] = "";
    shape_text(s->t, a, sizeof a);
    if (of) shape_text(of->t, b, sizeof b);
    return of ? lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s), but '%s' is (%s), which needs %s", s->t->name, a,
                        of->t->name, b, want)
              : lr_fail(err, LR_ESHAPE, "tensor '%s': shape (%s) where %s is needed", s->t->name, a, want);
}

static int need_dtype(const slice *s, const char *word, lr_error *err)
{
    if (strcmp(s->t->dtype, word) == 0) return 0;
    return lr_fail(err, LR_EUNSUPPORTED, "tensor '%s': type %s where %s is needed", s->t->name, s->t->dtype, word);
}

static int need_float(const slice *s, lr_error *err)
{
    if (s->t->type == LR_F32 || s->t->type == LR_F16 || s->t->type == LR_BF16) return 0;
    return lr_fail(err, LR_EUNSUPPORTED, "tensor '%s': type %s where F32, F16 or BF16 is needed", s->t->name,
                   s->t->dtype);
}

static int plain_part(lr_part *p, const lr_part_spec *q, const slice *w, lr_error *err)
{
    int rc = need_float(w, err);
    if (rc) return rc;
    if (w->n_dims > 2) return bad_shape(w, "a matrix or a vector", NULL, err);
    p->w_type = w->t->type;
    p->n = w->n_dims == 2 ? w->shape[0] : 1;
    p->k = w->n_dims == 2 ? w->shape[1] : w->n_dims ? w->shape[0] : 1;
    p->transpose = q->transpose && w->n_dims >= 1;
    if (p->transpose) {
        int64_t n = p->n;
        p->n = p->k;
        p->k = n;
    }
    return 0;
}

/* The group of each input, from a tensor of k of them; none where it says what is so anyway. */
static int read_order(lr_folder *f, lr_part *p, const char *name, const slice *w, lr_error *err)
{
    slice o;
    char want[40];
    int rc = find_slice(f, name, -1, &o, err);
    if (rc || (rc = need_dtype(&o, "I32", err))) return rc;
    snprintf(want, sizeof want, "(%" PRId64 ")", p->k);
    if (o.n_dims != 1 || o.shape[0] != p->k) return bad_shape(&o, want, w, err);
    bool plain = true;
    if (!(p->group = lr_reallocarray(NULL, (size_t)p->k, sizeof *p->group)))
        return lr_fail(err, LR_ENOMEM, "no memory for an order of inputs");
    memcpy(p->group, o.data, (size_t)p->k * sizeof *p->group);
    for (int64_t i = 0; i < p->k; i++) {
        if (p->group[i] < 0 || p->group[i] >= p->groups)
            return lr_fail(err, LR_EFORMAT, "tensor '%s': input %" PRId64 " is in group %d of %" PRId64, name, i,
                           p->group[i], p->groups);
        plain = plain && p->group[i] == i / p->scale_cols;
    }
    if (plain) {
        lr_free(p->group);
        p->group = NULL;
    }
    return 0;
}

/* GPTQ, AWQ and packed: integers in words, with groups. columns: words run over k (the first dimension) or n. */
static int grouped_part(lr_folder *f, lr_part *p, const lr_part_spec *q, const slice *w, lr_error *err)
{
    slice s, z;
    char want[60];
    bool awq = q->kind == LR_PART_AWQ, packed = q->kind == LR_PART_PACKED;
    int rc = need_dtype(w, "I32", err);
    if (rc || (rc = find_slice(f, q->scale, q->index, &s, err)) || (rc = need_float(&s, err))) return rc;
    if (w->n_dims != 2) return bad_shape(w, "a matrix", NULL, err);
    if (s.n_dims != 2) return bad_shape(&s, "a matrix", w, err);
    if (p->bits != 2 && p->bits != 3 && p->bits != 4 && p->bits != 8)
        return lr_fail(err, LR_EUNSUPPORTED, "tensor '%s': %d bits; 2, 3, 4 and 8 are supported", w->t->name, p->bits);
    int64_t words = packed ? w->shape[1] : w->shape[0], values = awq ? words : words * 32 / p->bits;
    p->k = values;
    p->n = packed ? w->shape[0] : awq ? w->shape[1] * 8 : w->shape[1];
    if (!awq && words * 32 % p->bits) return bad_shape(w, "a whole number of values", NULL, err);
    p->groups = packed ? s.shape[1] : s.shape[0];
    if ((packed ? s.shape[0] : s.shape[1]) != p->n || p->groups < 1 || p->k % p->groups) {
        snprintf(want, sizeof want, "%" PRId64 " outputs, and groups of %" PRId64 " inputs", p->n, p->k);
        return bad_shape(&s, want, w, err);
    }
    p->scale = s.data;
    p->scale_type = s.t->type;
    p->scale_rows = 1;
    p->scale_cols = p->k / p->groups;
    if (q->zero) {
        int64_t zero_words = p->n * p->bits / 32;
        if ((rc = find_slice(f, q->zero, q->index, &z, err)) || (rc = need_dtype(&z, "I32", err))) return rc;
        snprintf(want, sizeof want, "(%" PRId64 ", %" PRId64 ")", packed ? zero_words : p->groups,
                 packed ? p->groups : zero_words);
        if (z.n_dims != 2 || z.shape[0] != (packed ? zero_words : p->groups) || p->n * p->bits % 32 ||
            z.shape[1] != (packed ? p->groups : zero_words))
            return bad_shape(&z, want, w, err);
        p->zero = z.data;
    }
    return q->order ? read_order(f, p, q->order, w, err) : 0;
}

/* INT8 and FP8: a byte a value; a scale for all, for each output, or for each block. */
static int bytes_part(lr_folder *f, lr_part *p, const lr_part_spec *q, const slice *w, lr_error *err)
{
    slice s;
    char want[80];
    int rc = need_dtype(w, q->kind == LR_PART_INT8 ? "I8" : "F8_E4M3", err);
    if (rc || (rc = find_slice(f, q->scale, -1, &s, err)) || (rc = need_float(&s, err))) return rc;
    if (w->n_dims != 2) return bad_shape(w, "a matrix", NULL, err);
    p->n = w->shape[0];
    p->k = w->shape[1];
    p->scale = s.data;
    p->scale_type = s.t->type;
    p->groups = 1;
    p->scale_cols = p->k;
    int64_t count = 1;
    for (int i = 0; i < s.n_dims; i++) count *= s.shape[i];
    if (count == 1) {
        p->scale_rows = p->n;
    } else if (count == p->n && s.shape[0] == p->n) {
        p->scale_rows = 1;
    } else {
        int64_t bn = q->block[0], bk = q->block[1];
        snprintf(want, sizeof want, "one, %" PRId64 ", or one for each block of %" PRId64 " x %" PRId64, p->n, bn, bk);
        if (s.n_dims != 2 || bn < 1 || bk < 1 || s.shape[0] != (p->n + bn - 1) / bn ||
            s.shape[1] != (p->k + bk - 1) / bk)
            return bad_shape(&s, want, w, err);
        p->scale_rows = bn;
        p->scale_cols = bk;
        p->groups = s.shape[1];
    }
    return 0;
}

static int mxfp4_part(lr_folder *f, lr_part *p, const lr_part_spec *q, const slice *w, lr_error *err)
{
    slice s;
    int rc = need_dtype(w, "U8", err);
    if (rc || (rc = find_slice(f, q->scale, q->index, &s, err)) || (rc = need_dtype(&s, "U8", err))) return rc;
    if (w->n_dims != 3 || w->shape[2] != 16) return bad_shape(w, "(..., inputs / 32, 16)", NULL, err);
    if (s.n_dims != 2 || s.shape[0] != w->shape[0] || s.shape[1] != w->shape[1])
        return bad_shape(&s, "a scale for each block", w, err);
    p->n = w->shape[0];
    p->k = w->shape[1] * 32;
    p->scale = s.data;
    p->scale_rows = 1;
    p->scale_cols = 32;
    p->groups = w->shape[1];
    return 0;
}

static int make_part(lr_folder *f, const lr_part_spec *q, lr_part *p, lr_error *err)
{
    slice w;
    int rc = find_slice(f, q->w, q->index, &w, err);
    if (rc) return rc;
    *p = (lr_part){.kind = q->kind,
                   .name = w.t->name,
                   .file = w.file,
                   .w = w.data,
                   .w_bytes = w.size,
                   .bits = q->kind == LR_PART_AWQ ? 4 : q->bits,
                   .zero_offset = q->zero_offset,
                   .step = q->step > 0 ? q->step : 1,
                   .first = q->first,
                   .mul = q->mul != 0 ? q->mul : 1,
                   .add = q->add};
    if (q->kind == LR_PART_PLAIN)
        rc = plain_part(p, q, &w, err);
    else if (q->kind == LR_PART_MXFP4)
        rc = mxfp4_part(f, p, q, &w, err);
    else if (q->kind == LR_PART_INT8 || q->kind == LR_PART_FP8)
        rc = bytes_part(f, p, q, &w, err);
    else
        rc = grouped_part(f, p, q, &w, err);
    if (rc) return rc;
    int64_t left = p->n - p->first;
    p->out = q->count > 0 ? q->count : p->first >= 0 && left > 0 ? (left + p->step - 1) / p->step : 0;
    if (p->first < 0 || p->out < 1 || p->first + (p->out - 1) * p->step >= p->n)
        return lr_fail(err, LR_ESHAPE, "tensor '%s': %" PRId64 " rows have no rows %" PRId64 " to %" PRId64, p->name,
                       p->n, p->first, p->first + (p->out - 1) * p->step);
    return 0;
}

/* ---- weights ---- */

/* The type that holds what both hold. */
static lr_made both(lr_made a, lr_made b)
{
    static const int up[] = {LR_Q4_0, LR_Q5_0, LR_Q8_0};
    int ia = -1, ib = -1;
    bool exact = a.exact && b.exact;
    if (a.type == b.type) return (lr_made){a.type, exact};
    for (int i = 0; i < 3; i++) {
        if (up[i] == a.type) ia = i;
        if (up[i] == b.type) ib = i;
    }
    if (ia >= 0 && ib >= 0) return (lr_made){up[ia > ib ? ia : ib], exact};
    return (lr_made){LR_F32, true};
}

static int make_parts(lr_folder *f, weight *w, const lr_part_spec *specs, lr_error *err)
{
    for (size_t i = 0; i < w->n_parts; i++) {
        lr_made one = {0};
        lr_part *p = &w->parts[i];
        int rc = make_part(f, &specs[i], p, err);
        if (rc || (rc = lr_part_best(p, &one, err))) return rc;
        w->made = i ? both(w->made, one) : one;
        if (i && (p->k != w->parts[0].k || (w->stack && p->out != w->parts[0].out)))
            return lr_fail(err, LR_ESHAPE,
                           "tensors '%s' (%" PRId64 " x %" PRId64 ") and '%s' (%" PRId64 " x %" PRId64
                           ") do not belong together",
                           w->parts[0].name, w->parts[0].out, w->parts[0].k, p->name, p->out, p->k);
        w->ne[1] = i && !w->stack ? w->ne[1] + p->out : p->out;
    }
    w->ne[0] = w->parts[0].k;
    w->ne[2] = w->stack ? (int64_t)w->n_parts : 1;
    w->ne[3] = 1;
    w->columns = w->stack && specs[0].transpose && w->ne[0] == 1;
    if (w->columns) { /* a vector of each: rows of a matrix */
        w->ne[0] = w->ne[1];
        w->ne[1] = w->ne[2];
        w->ne[2] = 1;
        w->n_dims = 2;
        return 0;
    }
    const lr_part_spec *q = &specs[0];
    bool vector = w->n_parts == 1 && q->kind == LR_PART_PLAIN && lr_folder_find(f, q->w)->n_dims - (q->index >= 0) < 2;
    w->n_dims = w->stack ? 3 : vector ? 1 : 2;
    return 0;
}

int lr_folder_add(lr_folder *f, const char *name, const lr_part_spec *specs, size_t n_parts, bool stack, lr_made *made,
                  lr_error *err)
{
    weight w = {.n_parts = n_parts, .stack = stack};
    size_t len = strlen(name) + 1, bytes;
    if (n_parts < 1 || n_parts > 1 << 16 || !lr_mul(n_parts, sizeof *w.parts, &bytes))
        return lr_fail(err, LR_EINVAL, "weight '%s': %zu parts", name, n_parts);
    int rc = grow(&f->weights, &f->cap_weights, f->n_weights, sizeof w, err);
    if (rc) return rc;
    char *kept = lr_keep_get(&f->keep, len);
    w.parts = lr_keep_get(&f->keep, bytes);
    if (!kept || !w.parts) return lr_fail(err, LR_ENOMEM, "no memory for a model's tables");
    memcpy(kept, name, len);
    memset(w.parts, 0, bytes);
    w.name = kept;
    if ((rc = make_parts(f, &w, specs, err))) {
        for (size_t i = 0; i < n_parts; i++) lr_free(w.parts[i].group);
        return rc;
    }
    *made = w.made;
    f->weights[f->n_weights++] = w;
    return 0;
}

int lr_folder_shape(const lr_folder *f, const char *name, int64_t ne[4])
{
    for (size_t i = f->n_weights; i-- > 0;)
        if (strcmp(f->weights[i].name, name) == 0) {
            memcpy(ne, f->weights[i].ne, sizeof f->weights[i].ne);
            return f->weights[i].n_dims;
        }
    return 0;
}

/* ---- for graphs ---- */

/* What a graph has of a folder: the copies that its backend reads from. */
typedef struct source {
    lr_folder *f;
    bool exact;
    int threads;
    void **kept;
    size_t n_kept, cap_kept;
} source;

static int type_of(const source *s, const weight *w) { return s->exact && !w->made.exact ? LR_F32 : w->made.type; }

static const weight *find(const source *s, const char *name)
{
    ptrdiff_t i = lr_names_find(s->f->index, s->f->n_weights, name);
    return i < 0 ? NULL : &s->f->weights[i];
}

static bool source_find(void *user, const char *name, lr_tensor *t)
{
    const weight *w = find(user, name);
    if (!w) return false;
    *t = (lr_tensor){.name = w->name, .type = type_of(user, w), .n_dims = w->n_dims};
    memcpy(t->ne, w->ne, sizeof t->ne);
    const lr_part *p = &w->parts[0];
    if (w->n_parts == 1 && lr_part_is_view(p) && t->type == p->w_type)
        t->data = p->w + (size_t)(p->first * p->k) * (size_t)lr_dtype_bytes(t->type);
    return true;
}

/* Rows of a weight in the making, in runs that threads take. */
typedef struct making {
    const lr_part *p;
    int type;
    int64_t first, n;
    uint8_t *dst;
    size_t row;
    atomic_llong next;
} making;

enum { RUN = 64, LARGE = 1 << 20 };

static void make_rows(void *arg, int thread, int n_threads)
{
    (void)thread;
    (void)n_threads;
    making *m = arg;
    for (int64_t r; (r = atomic_fetch_add(&m->next, RUN)) < m->n;) {
        int64_t end = r + RUN < m->n ? r + RUN : m->n;
        lr_part_rows(m->p, m->type, m->first + r, m->first + end, m->dst + (size_t)r * m->row);
    }
}

/* n rows of a part from `first` on. */
static int part_rows(const source *s, const lr_part *p, int type, int64_t first, int64_t n, uint8_t *dst, size_t row,
                     lr_error *err)
{
    making m = {.p = p, .type = type, .first = first, .n = n, .dst = dst, .row = row};
    lr_pool *pool = NULL;
    atomic_init(&m.next, 0);
    if ((size_t)n * row < LARGE) {
        make_rows(&m, 0, 1);
        return 0;
    }
    int rc = lr_pool_new(&pool, s->threads, err);
    if (!rc) lr_pool_run(pool, make_rows, &m);
    lr_pool_free(pool);
    return rc;
}

static int source_load(void *user, lr_tensor *t, lr_error *err)
{
    source *s = user;
    const weight *w = find(s, t->name);
    int64_t rows = w->n_dims == 1 ? 1 : t->ne[1] * t->ne[2], first = w->n_dims == 1 ? 0 : t->first;
    size_t row = (size_t)(w->ne[0] / lr_dtype_block(t->type)) * (size_t)lr_dtype_bytes(t->type), total;
    if (!lr_mul(row, (size_t)rows, &total)) return lr_fail(err, LR_ENOMEM, "tensor '%s' is too large", t->name);
    int rc = grow(&s->kept, &s->cap_kept, s->n_kept, sizeof *s->kept, err);
    if (rc) return rc;
    uint8_t *dst = lr_alloc_aligned(total), *at = dst;
    if (!dst) return lr_fail(err, LR_ENOMEM, "no memory for %zu bytes of '%s'", total, t->name);
    for (size_t i = 0; i < w->n_parts && w->columns; i++) {
        lr_part_rows(&w->parts[i], t->type, 0, w->parts[i].out, at);
        at += row;
    }
    for (size_t i = 0; i < w->n_parts && rows > 0 && !w->columns; i++) {
        const lr_part *p = &w->parts[i];
        int64_t n = p->out - first < rows ? p->out - first : rows;
        if (n > 0) {
            if ((rc = part_rows(s, p, t->type, first, n, at, row, err))) break;
            at += (size_t)n * row;
            rows -= n;
        }
        first = first > p->out ? first - p->out : 0;
    }
    if (w->n_dims == 1 && t->first)
        memmove(dst, dst + (size_t)t->first * (size_t)lr_dtype_bytes(t->type),
                (size_t)t->ne[0] * (size_t)lr_dtype_bytes(t->type));
    if (rc) {
        lr_free_aligned(dst);
        return rc;
    }
    s->kept[s->n_kept++] = dst;
    t->data = dst;
    t->size = total;
    return 0;
}

static void source_used(void *user, const lr_tensor *t, bool gone)
{
    source *s = user;
    const weight *w = find(s, t->name);
    bool copied = false;
    for (size_t i = s->n_kept; i-- > 0 && !copied;)
        if (s->kept[i] == t->data) {
            copied = true;
            if (!gone) break;
            lr_free_aligned(s->kept[i]);
            s->kept[i] = s->kept[--s->n_kept];
        }
    for (size_t i = 0; i < w->n_parts && (copied || gone); i++)
        lr_safetensors_drop(w->parts[i].file, w->parts[i].w, w->parts[i].w_bytes);
}

int lr_folder_intact(const lr_folder *f, bool all, lr_error *err)
{
    int rc = 0;
    for (size_t i = 0; i < f->n_files && !rc; i++)
        rc = (all ? lr_safetensors_check_unchanged : lr_safetensors_check_intact)(f->files[i].s, err);
    return rc;
}

static int source_intact(void *user, bool all, lr_error *err)
{
    return lr_folder_intact(((source *)user)->f, all, err);
}

static void source_free(void *user)
{
    source *s = user;
    for (size_t i = 0; i < s->n_kept; i++) lr_free_aligned(s->kept[i]);
    lr_free(s->kept);
    lr_free(s);
}

int lr_folder_weights(lr_folder *f, bool exact, int threads, lr_weight_source *out, lr_error *err)
{
    if (!f->index) {
        int rc = lr_names_index(&f->index, f->n_weights ? &f->weights[0].name : NULL, f->n_weights, sizeof *f->weights,
                                "weight", err);
        if (rc) return rc;
    }
    source *s = lr_calloc(1, sizeof *s);
    if (!s) return lr_fail(err, LR_ENOMEM, "no memory for a model's weights");
    s->f = f;
    s->exact = exact;
    s->threads = threads;
    *out = (lr_weight_source){s, source_find, source_load, source_used, source_intact, source_free, 0};
    return 0;
}
