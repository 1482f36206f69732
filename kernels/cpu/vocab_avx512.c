/* vocab_avx512.c - the vocabulary kernels on AVX-512: vocab_vec.h says how.
 */
#include "cpu/vec_avx512.h"
#include "cpu/vocab_vec.h"
