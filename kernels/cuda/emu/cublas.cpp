// cublas.cpp - a stand-in for cuBLAS: bfloat16 times bfloat16 into float32, queued on the handle's stream like a kernel.
//
// It checks what the library checks (leading dimensions, types) and, so that nobody counts on a row's bits being the
// same for every number of rows, sums in an order that depends on it.
#include <cublas_v2.h>
#include "cuda_emu_int.h"
#include <new>
#include <string.h>

struct cublasContext {
    cudaStream_t stream;
};

static float widen(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *out)
{
    *out = new (std::nothrow) cublasContext{nullptr};
    return *out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t h)
{
    delete h;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s)
{
    h->stream = s;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void *p, size_t n)
{
    return p && n ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType at, int lda, const void *b, cudaDataType bt,
                            int ldb, const void *beta, void *c, cudaDataType ct, int ldc, cublasComputeType_t,
                            cublasGemmAlgo_t)
{
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (ta != CUBLAS_OP_T || tb != CUBLAS_OP_N || at != CUDA_R_16BF || bt != CUDA_R_16BF || ct != CUDA_R_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (m < 0 || n < 0 || k < 0 || lda < k || ldb < k || ldc < m) return CUBLAS_STATUS_INVALID_VALUE;
    float x = *(const float *)alpha, y = *(const float *)beta;
    const uint16_t *pa = (const uint16_t *)a, *pb = (const uint16_t *)b;
    float *pc = (float *)c;
    emu_submit(h->stream, [=] {
        int lanes = n % 2 ? 2 : 4;
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) {
                float sum[4] = {};
                for (int p = 0; p < k; p++)
                    sum[p % lanes] += widen(pa[(size_t)i * lda + p]) * widen(pb[(size_t)j * ldb + p]);
                float *to = &pc[(size_t)j * ldc + i], all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
                *to = y == 0 ? x * all : x * all + y * *to;
            }
    });
    return CUBLAS_STATUS_SUCCESS;
}
