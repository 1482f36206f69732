/* cuda_kv.c - the KV store on a device: one allocation a block group, blocks contiguous over the group's layers.
 *
 * A block is the layers' parts one behind the other, keys before values; the kernels know a part's layout. Blocks that
 * leave the device or come to it (swap, snapshots) go as they are. Copies are ordered with the forward pass by the
 * backend's one stream.
 */
#include "backend/cuda_int.h"
#include "base/mem.h"
#include <stdio.h>

static cuda_backend *self(const lr_backend *b) { return (cuda_backend *)b; }

static void note(lr_kv_store *kv, cudaError_t e)
{
    if (e && !kv->failed) kv->failed = (int)e; /* these calls can't fail: the next forward pass says it */
}

void lr_cuda_kv_free(lr_backend *b, lr_kv_store *kv)
{
    if (!kv) return;
    cudaSetDevice(self(b)->index);
    cudaStreamSynchronize(self(b)->stream);
    for (int g = 0; g < LR_KV_GROUPS; g++) {
        if (!kv->base[g]) continue;
        cudaFree(kv->base[g]);
        self(b)->bytes_kv -= (size_t)kv->n_blocks[g] * kv->block_bytes[g];
    }
    lr_free(kv->layers);
    lr_free(kv);
}

_Static_assert(LR_KV_FP8 == LR_CU_E4M3, "the kernels' name for it");

/* As lr_kv_layer_type, which is not in the plugin: the first layer of few bits stays at F16. Keys of Q4_0 have 6. */
static int layer_type(int type, int layer, bool keys)
{
    if (type != LR_Q8_0 && type != LR_Q4_0) return type;
    return layer == 0 ? LR_F16 : keys && type == LR_Q4_0 ? LR_CU_Q6 : type;
}

static const char *type_name(int type)
{
    const char *name = type == LR_KV_FP8 ? "fp8" : lr_dtype_name(type);
    return name ? name : "?";
}

static int lay_out(lr_kv_store *kv, const lr_kv_spec *s, lr_error *err)
{
    for (int i = 0; i < s->n_layers; i++) {
        cuda_kv_layer *l = &kv->layers[i];
        *l = (cuda_kv_layer){.shape = s->layers[i],
                             .k_type = layer_type(s->type, s->first_layer + i, true),
                             .v_type = layer_type(s->value_type, s->first_layer + i, false)};
        int g = l->shape.group;
        size_t keys = lr_cu_kv_bytes(l->k_type, l->shape.n_kv_heads, l->shape.head_dim, s->block_size);
        size_t values = lr_cu_kv_bytes(l->v_type, l->shape.n_kv_heads, l->shape.head_dim, s->block_size);
        if (!keys || !values)
            return lr_fail(err, LR_EUNSUPPORTED, "CUDA has no KV of type %s with heads of %d",
                           type_name(keys ? s->value_type : s->type), l->shape.head_dim);
        l->k_at = kv->block_bytes[g];
        l->v_at = l->k_at + keys;
        kv->block_bytes[g] = l->v_at + values;
    }
    return 0;
}

static int allocate(cuda_backend *be, lr_kv_store *kv, int g, lr_error *err)
{
    size_t bytes;
    char what[80];
    if (!kv->n_blocks[g] || !kv->block_bytes[g]) return 0;
    if (!lr_mul((size_t)kv->n_blocks[g], kv->block_bytes[g], &bytes))
        return lr_fail(err, LR_EINVAL, "%d KV blocks are too many", kv->n_blocks[g]);
    snprintf(what, sizeof what, "a pool of %d KV blocks", kv->n_blocks[g]);
    int rc = lr_cuda_alloc(be, &kv->base[g], bytes, what, err);
    if (rc) return rc;
    be->bytes_kv += bytes;
    /* what was never written is read by nobody, but a NaN in it must not get through a weight of zero */
    cudaError_t e = cudaMemsetAsync(kv->base[g], 0, bytes, be->stream);
    return e ? lr_cuda_failed(be, (int)e, "clearing KV blocks", err) : 0;
}

int lr_cuda_kv_shape(const lr_kv_spec *s, lr_kv_store **out, lr_error *err)
{
    if (s->block_size < 1 || s->block_size > 256)
        return lr_fail(err, LR_EINVAL, "KV block size %d is not in 1..256", s->block_size);
    for (int i = 0; i < 2; i++) {
        int type = i ? s->value_type : s->type;
        if (!lr_cu_kv_bytes(type, 1, 32, 16))
            return lr_fail(err, LR_EUNSUPPORTED,
                           "KV type %s is not one that CUDA has (f32, f16, bf16, fp8, q8_0, q4_0)", type_name(type));
        if (s->type != s->value_type && (type == LR_F32 || type == LR_BF16))
            return lr_fail(err, LR_EUNSUPPORTED,
                           "keys of type %s and values of type %s: on CUDA %s goes with itself only",
                           type_name(s->type), type_name(s->value_type), type_name(type));
    }
    lr_kv_store *kv = lr_calloc(1, sizeof *kv);
    if (kv) kv->layers = lr_calloc((size_t)s->n_layers, sizeof *kv->layers);
    if (!kv || !kv->layers) {
        lr_free(kv);
        return lr_fail(err, LR_ENOMEM, "no memory for the KV store");
    }
    kv->n_layers = s->n_layers;
    kv->block_size = s->block_size;
    for (int g = 0; g < LR_KV_GROUPS; g++) kv->n_blocks[g] = s->n_blocks[g];
    int rc = lay_out(kv, s, err);
    if (rc) {
        lr_free(kv->layers);
        lr_free(kv);
        return rc;
    }
    *out = kv;
    return 0;
}

int lr_cuda_kv_new(lr_backend *b, const lr_kv_spec *s, lr_kv_store **out, lr_error *err)
{
    lr_kv_store *kv = NULL;
    int rc = lr_cuda_kv_shape(s, &kv, err);
    if (rc) return rc;
    cudaSetDevice(self(b)->index);
    for (int g = 0; g < LR_KV_GROUPS && !rc; g++) rc = allocate(self(b), kv, g, err);
    if (rc) {
        lr_cuda_kv_free(b, kv);
        return rc;
    }
    *out = kv;
    return 0;
}

static char *block_at(const lr_kv_store *kv, int g, int block)
{
    return (char *)kv->base[g] + (size_t)block * kv->block_bytes[g];
}

void lr_cuda_kv_copy(lr_backend *b, lr_kv_store *kv, int g, int dst, int src)
{
    cudaSetDevice(self(b)->index);
    note(kv, cudaMemcpyAsync(block_at(kv, g, dst), block_at(kv, g, src), kv->block_bytes[g], cudaMemcpyDeviceToDevice,
                             self(b)->stream));
}

size_t lr_cuda_kv_block_bytes(const lr_backend *b, const lr_kv_store *kv, int g)
{
    (void)b;
    return kv->block_bytes[g];
}

void lr_cuda_kv_read(lr_backend *b, lr_kv_store *kv, int g, int block, void *dst)
{
    cudaStream_t s = self(b)->stream;
    cudaSetDevice(self(b)->index);
    cudaError_t e = cudaMemcpyAsync(dst, block_at(kv, g, block), kv->block_bytes[g], cudaMemcpyDeviceToHost, s);
    note(kv, e ? e : cudaStreamSynchronize(s));
}

void lr_cuda_kv_write(lr_backend *b, lr_kv_store *kv, int g, int block, const void *src)
{
    cudaStream_t s = self(b)->stream;
    cudaSetDevice(self(b)->index);
    cudaError_t e = cudaMemcpyAsync(block_at(kv, g, block), src, kv->block_bytes[g], cudaMemcpyHostToDevice, s);
    note(kv, e ? e : cudaStreamSynchronize(s));
}
