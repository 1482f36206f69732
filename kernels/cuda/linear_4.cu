// linear_4.cu - products with weights of Q4_K, Q5_K, IQ4_XS, MXFP4.
#include "linear.cuh"

const cu_linear_format *cu_linear_4()
{
    static const cu_linear_format formats[] = {
        CU_LINEAR_FORMAT(LR_Q5_K, cu_q5_k_t) CU_LINEAR_FORMAT(LR_IQ4_XS, cu_iq4_xs_t)
            CU_LINEAR_FORMAT(LR_MXFP4, cu_mxfp4_t)
#ifndef LLMRUN_CUDA_FEW // sanitized test builds and those of faulty copies leave out what is a sibling's twin
                CU_LINEAR_FORMAT(LR_Q4_K, cu_q4_k_t)
#endif
                    {},
    };
    return formats;
}
