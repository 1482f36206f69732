/* bench_count.c - one product of the AVX2 kernels, for valgrind to count its instructions: see tests/bench/count.
 *
 *   bench_count TYPE ROWS     64 features of 1536 values; what is counted is in the function `counted`
 */
#include "base/mem.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 64, K = 1536 };

void counted(const lr_cpu_kernels *t, const lr_gemm_w *w, lr_qact qa, const float *x, int m, float *y);

__attribute__((noinline)) void counted(const lr_cpu_kernels *t, const lr_gemm_w *w, lr_qact qa, const float *x, int m,
                                       float *y)
{
    t->quantize(x, K, m, qa, 0, K);
    t->gemm(w, &qa, x, K, m, y, N, 0, N / LR_STRIP);
}

int main(int argc, char **argv)
{
    const lr_cpu_kernels *t = lr_cpu_table("avx2");
    const int type = argc == 3 ? lr_dtype_parse(argv[1]) : -1, m = argc == 3 ? atoi(argv[2]) : 0;
    const size_t strip = type >= 0 ? lr_pack_strip_bytes(type, K) : 0;
    if (!t || !strip || m < 1 || m > 512) return fprintf(stderr, "usage: bench_count TYPE ROWS (with AVX2)\n"), 2;
    char *weights = lr_alloc_aligned(strip * (N / LR_STRIP));
    const size_t cells = (size_t)m * K;
    float *x = lr_alloc_aligned(cells * 4), *y = lr_alloc_aligned((size_t)m * N * 4);
    lr_qact qa = {.k = K};
    char *rows = lr_alloc_aligned(lr_qact_place(&qa, NULL, (size_t)m));
    if (!weights || !x || !y || !rows) return 1;
    (void)lr_qact_place(&qa, rows, (size_t)m);
    memset(weights, 0x1C, strip * (N / LR_STRIP)); /* a half of 0x1C1C is 0.004 */
    for (size_t i = 0; i < cells; i++) x[i] = (float)(int)(i * 2654435761u >> 8 & 0xFFFF) / 65536.0f - 0.5f;
    const lr_gemm_w w = {.type = type, .n = N, .k = K, .packed = true, .strip_bytes = strip, .data = weights};
    counted(t, &w, qa, x, m, y);
    return 0;
}
