// init.cu - what has to be said to the device once.
#include "cu_port.h"
#include "cuda/kernels.h"

cudaError_t cu_init_linear(); // linear.cu
cudaError_t cu_init_attn();   // attn.cu
cudaError_t cu_init_moe();    // moe.cu

extern "C" cudaError_t lr_cu_init(void)
{
    cudaError_t e = cu_init_linear();
    if (!e) e = cu_init_attn();
    return e ? e : cu_init_moe();
}
