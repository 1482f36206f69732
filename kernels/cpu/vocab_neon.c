/* vocab_neon.c - the vocabulary kernels on AArch64's Advanced SIMD: vocab_vec.h says how.
 */
#include "cpu/vec_neon.h"
#include "cpu/vocab_vec.h"
