/* cuda_blas.c - cuBLAS, opened at run time and only for compute = "loose": its libraries take half a gigabyte of disk,
 * a program that doesn't use them needn't have them.
 */
#define _GNU_SOURCE
#include "backend/cuda_int.h"
#include <cublas_v2.h>
#include <dlfcn.h>

/* name in cuda_blas, symbol */
#define CALLS(X)                                                                                                       \
    X(create, cublasCreate_v2)                                                                                         \
    X(destroy, cublasDestroy_v2)                                                                                       \
    X(set_stream, cublasSetStream_v2)                                                                                  \
    X(set_workspace, cublasSetWorkspace_v2)                                                                            \
    X(gemm, cublasGemmEx)

struct cuda_blas {
#define X(name, symbol) __typeof__(&(symbol)) name;
    CALLS(X)
#undef X
    cublasHandle_t handle;
    void *workspace;
};

enum { WORKSPACE = 32 << 20 };

#ifdef LLMRUN_CUDA_HOST
static int find_calls(cuda_blas *b, lr_error *err)
{
    (void)err;
#define X(name, symbol) b->name = symbol;
    CALLS(X)
#undef X
    return 0;
}
#else
#define TEXT2(x) #x
#define TEXT(x)  TEXT2(x)

static int find_calls(cuda_blas *b, lr_error *err)
{
    static const char file[] = "libcublas.so." TEXT(CUBLAS_VER_MAJOR);
    static const char usual[] = "/usr/local/cuda/lib64/libcublas.so." TEXT(CUBLAS_VER_MAJOR);
    void *so = dlopen(file, RTLD_NOW | RTLD_LOCAL); /* stays open: see plugin.c */
    if (!so) so = dlopen(usual, RTLD_NOW | RTLD_LOCAL);
    if (!so) {
        const char *why = dlerror();
        return lr_fail(err, LR_ENOTFOUND, "compute \"loose\" needs cuBLAS: %s", why ? why : file);
    }
#define X(name, symbol)                                                                                                \
    *(void **)(&b->name) = dlsym(so, #symbol);                                                                         \
    if (!b->name) return lr_fail(err, LR_ENOTFOUND, "%s has no " #symbol, file);
    CALLS(X)
#undef X
    return 0;
}
#endif

int lr_cuda_blas_open(cuda_backend *be, lr_error *err)
{
    cuda_blas *b = be->blas = lr_calloc(1, sizeof *b);
    if (!b) return lr_fail(err, LR_ENOMEM, "no memory for cuBLAS");
    int rc = find_calls(b, err);
    if (rc) return rc;
    cublasStatus_t st = b->create(&b->handle);
    if (st != CUBLAS_STATUS_SUCCESS) {
        b->handle = NULL;
        return lr_fail(err, LR_EIO, "cuda:%d: cuBLAS can't be started (%d)", be->index, (int)st);
    }
    /* a workspace of its own: a captured graph must not depend on one that cuBLAS may move */
    if ((rc = lr_cuda_alloc(be, &b->workspace, WORKSPACE, "cuBLAS", err))) return rc;
    st = b->set_stream(b->handle, be->stream);
    if (st == CUBLAS_STATUS_SUCCESS) st = b->set_workspace(b->handle, b->workspace, WORKSPACE);
    return st == CUBLAS_STATUS_SUCCESS ? 0 : lr_fail(err, LR_EIO, "cuda:%d: cuBLAS: status %d", be->index, (int)st);
}

void lr_cuda_blas_close(cuda_backend *be)
{
    cuda_blas *b = be->blas;
    if (!b) return;
    if (b->handle) b->destroy(b->handle);
    if (b->workspace) cudaFree(b->workspace);
    lr_free(b);
    be->blas = NULL;
}

cudaError_t lr_cuda_blas_product(cuda_backend *be, const void *w, const void *x, int m, int n, int k, float *y)
{
    /* column-major: y^T (n, m) = w (k, n)^T . x (k, m) */
    const float one = 1, zero = 0;
    cublasStatus_t st =
        be->blas->gemm(be->blas->handle, CUBLAS_OP_T, CUBLAS_OP_N, n, m, k, &one, w, CUDA_R_16BF, k, x, CUDA_R_16BF, k,
                       &zero, y, CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return st == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}
