/* row.c - see row.h */
#include "sample/row.h"
#include "cpu/cpu.h"
#include <math.h>

_Static_assert(LR_ROW_TOPK == LR_TOPK_MAX, "the kernels' bound");

/* Looking for the best table asks the processor, which is slow in a virtual machine. Engine thread only. */
static const lr_cpu_kernels *kernels(void)
{
    static const lr_cpu_kernels *best;
    if (!best) best = lr_cpu_table(NULL);
    return best;
}

int lr_row_argmax(const float *x, int n) { return kernels()->argmax(x, n); }
int lr_row_pieces(int n) { return lr_pieces(n); }
float lr_row_max(const float *x, int n) { return kernels()->max(x, n); }
double lr_row_log_of_mass(float best, uint64_t mass) { return (double)best + log((double)mass * 0x1p-40); }
float lr_row_logsumexp(const float *x, int n)
{
    float best = kernels()->max(x, n);
    return isinf(best) ? best : (float)lr_row_log_of_mass(best, kernels()->mass(x, n, best));
}
int lr_row_topk(const float *x, int n, int k, int32_t *ids, float *values)
{
    return kernels()->topk(x, n, k, ids, values);
}
