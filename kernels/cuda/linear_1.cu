// linear_1.cu - products with weights of BF16, Q8_0, Q2_K, Q6_K: faulty copies of the kernels are made of these.
#include "linear.cuh"

const cu_linear_format *cu_linear_1()
{
    static const cu_linear_format formats[] = {
        CU_LINEAR_FORMAT(LR_BF16, cu_bf16_t) CU_LINEAR_FORMAT(LR_Q8_0, cu_q8_0_t) CU_LINEAR_FORMAT(LR_Q2_K, cu_q2_k_t)
            CU_LINEAR_FORMAT(LR_Q6_K, cu_q6_k_t){},
    };
    return formats;
}
