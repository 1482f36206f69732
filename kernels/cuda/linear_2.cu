// linear_2.cu - products with weights of F32, F16, Q4_0, Q4_1.
#include "linear.cuh"

const cu_linear_format *cu_linear_2()
{
    static const cu_linear_format formats[] = {
#ifndef LLMRUN_CUDA_FEW // sanitized test builds and those of faulty copies leave out what is a sibling's twin
        CU_LINEAR_FORMAT(LR_F32, cu_f32_t) CU_LINEAR_FORMAT(LR_F16, cu_f16_t) CU_LINEAR_FORMAT(LR_Q4_0, cu_q4_0_t)
            CU_LINEAR_FORMAT(LR_Q4_1, cu_q4_1_t)
#endif
                {},
    };
    return formats;
}
