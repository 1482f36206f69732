/* cuda.c - the CUDA plugin's door: opens a device, says why one can't be had, the table of operations.
 *
 * What the runtime answers on machines without a GPU: cudaGetDeviceCount gives 35 where there is no driver or an old
 * one, 34 where the toolkit's stub of libcuda stands in for it, 100 where a driver finds no GPU, and leaves the count
 * as it was each time. It is the first call that is made; nothing of cuBLAS is touched before it has succeeded.
 */
#include "backend/cuda_int.h"
#include "backend/plugin.h"
#include "base/mem.h"
#include <stdio.h>
#include <string.h>

static double mib(size_t n) { return (double)n / (1 << 20); }

void lr_cuda_room(size_t *free_bytes, size_t *total)
{
    *free_bytes = *total = 0;
    cudaMemGetInfo(free_bytes, total);
}

int lr_cuda_failed(const cuda_backend *be, int code, const char *what, lr_error *err)
{
    int n = be->index;
    cudaError_t e = (cudaError_t)code;
    if (e == cudaErrorMemoryAllocation) {
        size_t room, all;
        cudaGetLastError();
        lr_cuda_room(&room, &all);
        return lr_fail(err, LR_ENOMEM, "cuda:%d is full: no memory for %s, %.1f of %.1f MiB are free", n, what,
                       mib(room), mib(all));
    }
    return lr_fail(err, LR_EIO, "cuda:%d: %s: %s (%d)", n, what, cudaGetErrorString(e), code);
}

int lr_cuda_alloc(cuda_backend *be, void **out, size_t bytes, const char *what, lr_error *err)
{
    void *p = NULL;
    cudaError_t e = cudaMalloc(&p, bytes ? bytes : 1);
    if (e == cudaErrorMemoryAllocation) {
        size_t room, all;
        cudaGetLastError(); /* this one leaves the device as it was */
        lr_cuda_room(&room, &all);
        return lr_fail(err, LR_ENOMEM,
                       "cuda:%d is full: %zu bytes (%.1f MiB) are needed for %s, %zu (%.1f MiB) of %.1f MiB are free; "
                       "this model has %.1f MiB of weights, %.1f MiB of KV and %.1f MiB of activations there",
                       be->index, bytes, mib(bytes), what, room, mib(room), mib(all), mib(be->bytes_weights),
                       mib(be->bytes_kv), mib(be->bytes_work));
    }
    if (e) return lr_cuda_failed(be, (int)e, what, err);
    *out = p;
    return 0;
}

int lr_cuda_pin(cuda_backend *be, void **out, size_t bytes, const char *what, lr_error *err)
{
    void *p = NULL;
    cudaError_t e = cudaMallocHost(&p, bytes ? bytes : 1);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return lr_fail(err, LR_ENOMEM, "cuda:%d: the host has no %.1f MiB of page-locked memory for %s", be->index,
                       mib(bytes), what);
    }
    if (e) return lr_cuda_failed(be, (int)e, what, err);
    *out = p;
    return 0;
}

/* ---- looking for devices ---- */

static int no_device(cudaError_t e, lr_error *err)
{
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    int major = runtime / 1000, minor = runtime % 1000 / 10;
    switch (e) {
    case cudaErrorInsufficientDriver:
        if (driver == 0)
            return lr_fail(err, LR_ENOTFOUND, "no NVIDIA driver is installed (%d); this build needs one for CUDA %d.%d",
                           (int)e, major, minor);
        return lr_fail(err, LR_ENOTFOUND, "the NVIDIA driver is for CUDA %d.%d, too old for this build's %d.%d (%d)",
                       driver / 1000, driver % 1000 / 10, major, minor, (int)e);
    case cudaErrorStubLibrary:
        return lr_fail(err, LR_ENOTFOUND,
                       "the toolkit's stub of libcuda.so.1 was found in place of the NVIDIA driver's (%d); take the "
                       "folder 'stubs' out of LD_LIBRARY_PATH",
                       (int)e);
    case cudaErrorNoDevice:
        return lr_fail(err, LR_ENOTFOUND, "the NVIDIA driver finds no GPU, or CUDA_VISIBLE_DEVICES hides them all (%d)",
                       (int)e);
    default:
        return lr_fail(err, LR_EIO, "CUDA can't be used: %s (%d)", cudaGetErrorString(e), (int)e);
    }
}

static int find_device(int index, lr_error *err)
{
    int n = 0; /* left untouched where there is no driver */
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e) return no_device(e, err);
    if (n == 0) return no_device(cudaErrorNoDevice, err);
    if (index >= n)
        return lr_fail(err, LR_ENOTFOUND, "there is no cuda:%d: this process sees %d GPU%s, the last is cuda:%d", index,
                       n, n == 1 ? "" : "s", n - 1);
    return 0;
}

/* ---- the backend ---- */

static cuda_backend *self(const lr_backend *b) { return (cuda_backend *)b; }

static void cuda_free(lr_backend *b)
{
    cuda_backend *be = self(b);
    if (!be) return;
    cudaSetDevice(be->index);
    lr_cuda_blas_close(be);
    lr_cuda_upload_close(be);
    if (be->stream) cudaStreamDestroy(be->stream);
    lr_free(be);
}

static void cuda_memory(const lr_backend *b, size_t *weights, size_t *kv, size_t *work)
{
    *weights = self(b)->bytes_weights;
    *kv = self(b)->bytes_kv;
    *work = self(b)->bytes_work;
}

static size_t cuda_room(const lr_backend *b)
{
    size_t room, all;
    cudaSetDevice(self(b)->index);
    lr_cuda_room(&room, &all);
    return room;
}

static bool cuda_weight_keeps(const lr_backend *b, const lr_weight *w)
{
    (void)b;
    (void)w;
    return false; /* all of it is on the device */
}

static const char *cuda_describe(const lr_backend *b) { return self(b)->text; }

static int cuda_gpu(const lr_backend *b)
{
#ifdef LLMRUN_CUDA_HOST
    (void)b;
    return -1; /* emulated: its memory is the host's */
#else
    return ((const cuda_backend *)b)->index;
#endif
}

static const lr_backend_ops cuda_ops = {
    .name = "cuda",
    .echoes = true,
    .draws = true,
    .features = true,
    .free = cuda_free,
    .weight_new = lr_cuda_weight_new,
    .weight_free = lr_cuda_weight_free,
    .weight_keeps = cuda_weight_keeps,
    .kv_new = lr_cuda_kv_new,
    .kv_free = lr_cuda_kv_free,
    .kv_copy = lr_cuda_kv_copy,
    .kv_block_bytes = lr_cuda_kv_block_bytes,
    .kv_read = lr_cuda_kv_read,
    .kv_write = lr_cuda_kv_write,
    .compile = lr_cuda_compile,
    .plan_free = lr_cuda_plan_free,
    .run = lr_cuda_run,
    .launch = lr_cuda_launch,
    .finish = lr_cuda_finish,
    .lora_new = lr_cuda_lora_new,
    .lora_free = lr_cuda_lora_free,
    .memory = cuda_memory,
    .describe = cuda_describe,
    .room = cuda_room,
    .work = lr_cuda_work,
    .gpu = cuda_gpu,
};

static const char *mode_name(lr_compute c)
{
    return c == LR_COMPUTE_F32 ? " float32" : c == LR_COMPUTE_LOOSE ? " loose" : "";
}

static int open_device(cuda_backend *be, lr_error *err)
{
    struct cudaDeviceProp prop;
    cudaError_t e = cudaSetDevice(be->index);
    if (!e) e = cudaFree(NULL); /* makes the context: the first thing that a full device refuses */
    if (!e) e = cudaGetDeviceProperties(&prop, be->index);
    if (!e) e = lr_cu_init();
    if (e) return lr_cuda_failed(be, (int)e, "opening the device", err);
    if (prop.major < 8)
        return lr_fail(err, LR_EUNSUPPORTED, "cuda:%d, %s, has compute capability %d.%d; 8.0 is needed", be->index,
                       prop.name, prop.major, prop.minor);
    e = cudaStreamCreateWithFlags(&be->stream, cudaStreamNonBlocking);
    if (e) return lr_cuda_failed(be, (int)e, "a stream", err);
    be->n_sm = prop.multiProcessorCount;
    snprintf(be->text, sizeof be->text, "cuda:%d %s, sm_%d%d%s", be->index, prop.name, prop.major, prop.minor,
             mode_name(be->compute));
    return be->compute == LR_COMPUTE_LOOSE ? lr_cuda_blas_open(be, err) : 0;
}

static int open_backend(lr_backend **out, const lr_backend_config *cfg, int index, lr_error *err)
{
    int rc = find_device(index, err);
    if (rc) return rc;
    if (cfg->compute == LR_COMPUTE_INT8)
        return lr_fail(err, LR_EUNSUPPORTED, "compute \"int8\" is one of CPUs; a GPU has fast, bf16, f32 and loose");
    cuda_backend *be = lr_calloc(1, sizeof *be);
    if (!be) return lr_fail(err, LR_ENOMEM, "no memory for the CUDA backend");
    be->base.ops = &cuda_ops;
    be->index = index;
    be->compute = cfg->compute;
    be->math = cfg->compute == LR_COMPUTE_F32 ? LR_CU_REF : cfg->compute == LR_COMPUTE_LOOSE ? LR_CU_FAST : LR_CU_EXACT;
    if ((rc = open_device(be, err))) {
        cuda_free(&be->base);
        return rc;
    }
    *out = &be->base;
    return 0;
}

__attribute__((visibility("default"))) const lr_plugin *llmrun_plugin(void);

const lr_plugin *llmrun_plugin(void)
{
    static const lr_plugin plugin = {LR_PLUGIN_ABI, open_backend};
    return &plugin;
}
