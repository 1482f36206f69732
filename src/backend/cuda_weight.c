/* cuda_weight.c - weights go to the device once, in the order the graph asks for them, through two pinned buffers:
 * while one is on its way, the next piece of the mapped file is read into the other. The host keeps no copy.
 *
 * A tensor that is both embedding and output head lies on the device once: weights of the same bytes share them.
 */
#include "backend/cuda_int.h"
#include "base/mem.h"
#include <string.h>

enum { PIECE = 16 << 20 };

struct cuda_bytes {
    char *name;       /* of the tensor, where the bytes are the file's: two weights of one tensor share them */
    const void *from; /* and where those were on the host: a weight may be some rows of a tensor */
    size_t bytes;
    int uses;
    char *at; /* on the device */
    cuda_bytes *next;
};

/* ---- the way to the device ---- */

static int open_pipe(cuda_backend *be, lr_error *err)
{
    int rc = 0;
    for (int i = 0; i < 2 && !rc; i++) {
        if (!be->pin[i]) rc = lr_cuda_pin(be, &be->pin[i], PIECE, "copying weights", err);
        if (rc || be->pin_free[i]) continue;
        cudaError_t e = cudaEventCreateWithFlags(&be->pin_free[i], cudaEventDisableTiming);
        if (e) {
            be->pin_free[i] = NULL;
            rc = lr_cuda_failed(be, (int)e, "an event", err);
        }
    }
    return rc;
}

void lr_cuda_upload_close(cuda_backend *be)
{
    for (int i = 0; i < 2; i++) {
        if (be->pin_free[i]) cudaEventDestroy(be->pin_free[i]);
        if (be->pin[i]) cudaFreeHost(be->pin[i]);
        be->pin[i] = NULL;
        be->pin_free[i] = NULL;
    }
}

int lr_cuda_upload(cuda_backend *be, void *to, const void *from, size_t n, lr_error *err)
{
    char *dst = to;
    const char *src = from;
    int rc = open_pipe(be, err);
    for (size_t done = 0; done < n && !rc; done += PIECE) {
        size_t part = n - done < PIECE ? n - done : PIECE;
        int i = be->pin_next;
        be->pin_next = 1 - i;
        cudaError_t e = cudaEventSynchronize(be->pin_free[i]); /* done at once if it was never recorded */
        if (!e) {
            memcpy(be->pin[i], src + done, part);
            e = cudaMemcpyAsync(dst + done, be->pin[i], part, cudaMemcpyHostToDevice, be->stream);
        }
        if (!e) e = cudaEventRecord(be->pin_free[i], be->stream);
        if (e) rc = lr_cuda_failed(be, (int)e, "copying weights", err);
    }
    return rc;
}

/* ---- shared bytes ---- */

static void put_back(cuda_backend *be, cuda_bytes *b)
{
    if (!b || --b->uses > 0) return;
    cuda_bytes **p = &be->loaded;
    while (*p && *p != b) p = &(*p)->next;
    if (*p) *p = b->next;
    if (b->at) cudaFree(b->at);
    be->bytes_weights -= b->at ? b->bytes : 0;
    lr_free(b->name);
    lr_free(b);
}

/* The device's copy of n bytes at src; `name` NULL: shared with nobody. */
static int get(cuda_backend *be, const char *name, const void *src, size_t n, cuda_bytes **out, lr_error *err)
{
    for (cuda_bytes *b = be->loaded; b && name; b = b->next) {
        if (!b->name || strcmp(b->name, name) != 0 || b->from != src || b->bytes != n) continue;
        b->uses++;
        *out = b;
        return 0;
    }
    cuda_bytes *b = lr_calloc(1, sizeof *b);
    if (!b) return lr_fail(err, LR_ENOMEM, "no memory for a weight");
    *b = (cuda_bytes){.name = name ? lr_strdup(name) : NULL, .from = src, .bytes = n, .uses = 1, .next = be->loaded};
    be->loaded = b;
    void *at = NULL;
    int rc = lr_cuda_alloc(be, &at, n + LR_CUDA_SLACK, "a weight", err);
    if (!rc) {
        b->at = at;
        be->bytes_weights += n;
        rc = lr_cuda_upload(be, b->at, src, n, err);
    }
    if (rc) {
        put_back(be, b);
        return rc;
    }
    *out = b;
    return 0;
}

/* ---- weights ---- */

static int vector(cuda_backend *be, lr_weight *w, const lr_tensor *t, lr_error *err)
{
    size_t n = (size_t)w->n * (size_t)w->k;
    float *f = lr_malloc(n * sizeof *f);
    if (!f) return lr_fail(err, LR_ENOMEM, "no memory for %zu values", n);
    lr_dtype_to_f32(t->type, t->data, f, n);
    w->type = LR_F32;
    w->row_bytes = (size_t)w->k * sizeof *f;
    int rc = get(be, NULL, f, n * sizeof *f, &w->bytes, err);
    lr_free(f);
    return rc;
}

static int type_good(int type, lr_error *err)
{
    if (lr_cu_weight_good(type)) return 0;
    return lr_fail(err, LR_EUNSUPPORTED, "the CUDA kernels have no type %s", lr_dtype_name(type));
}

void lr_cuda_weight_free(lr_backend *b, lr_weight *w)
{
    if (!w) return;
    cudaSetDevice(((cuda_backend *)b)->index);
    put_back((cuda_backend *)b, w->bytes);
    lr_free(w);
}

int lr_cuda_weight_new(lr_backend *b, const lr_tensor *t, bool linear, bool embed, lr_weight **out, lr_error *err)
{
    cuda_backend *be = (cuda_backend *)b;
    int block = lr_dtype_block(t->type);
    if (!block) return lr_fail(err, LR_EUNSUPPORTED, "unknown type %d", t->type);
    int64_t k = t->ne[0], n = 1;
    for (int i = 1; i < t->n_dims; i++) n *= t->ne[i];
    if (k < 1 || n < 1 || k > 1 << 24 || n > 1 << 26 || k % block)
        return lr_fail(err, LR_ESHAPE, "%lld x %lld values of type %s", (long long)n, (long long)k,
                       lr_dtype_name(t->type));
    lr_weight *w = lr_calloc(1, sizeof *w);
    if (!w) return lr_fail(err, LR_ENOMEM, "no memory for a weight");
    cudaSetDevice(be->index);
    w->type = t->type;
    w->n = (int)n;
    w->k = (int)k;
    w->site = linear && t->n_dims < 3 ? be->n_sites++ : -1;
    w->row_bytes = (size_t)(k / block) * (size_t)lr_dtype_bytes(t->type);
    int rc = 0;
    if (linear || embed) {
        rc = type_good(t->type, err);
        if (!rc) rc = get(be, t->name, t->data, w->row_bytes * (size_t)n, &w->bytes, err);
        if (linear && t->n_dims == 3) { /* a matrix an expert */
            w->n_experts = (int)t->ne[2];
            w->n = (int)t->ne[1];
        }
    } else {
        rc = vector(be, w, t, err);
    }
    if (rc) {
        lr_cuda_weight_free(b, w);
        return rc;
    }
    w->data = w->bytes->at;
    *out = w;
    return 0;
}
