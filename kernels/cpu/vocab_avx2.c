/* vocab_avx2.c - the vocabulary kernels on AVX2: vocab_vec.h says how.
 */
#include "cpu/vec_avx2.h"
#include "cpu/vocab_vec.h"
