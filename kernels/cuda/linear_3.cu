// linear_3.cu - products with weights of Q5_0, Q5_1, Q3_K, IQ4_NL.
#include "linear.cuh"

const cu_linear_format *cu_linear_3()
{
    static const cu_linear_format formats[] = {
        CU_LINEAR_FORMAT(LR_Q5_1, cu_q5_1_t) CU_LINEAR_FORMAT(LR_Q3_K, cu_q3_k_t)
#ifndef LLMRUN_CUDA_FEW // sanitized test builds and those of faulty copies leave out what is a sibling's twin
            CU_LINEAR_FORMAT(LR_Q5_0, cu_q5_0_t) CU_LINEAR_FORMAT(LR_IQ4_NL, cu_iq4_nl_t)
#endif
                {},
    };
    return formats;
}
