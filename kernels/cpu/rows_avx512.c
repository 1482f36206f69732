/* rows_avx512.c - the row kernels on AVX-512: rows_vec.h says how.
 */
#include "cpu/vec_avx512.h"
#include "cpu/rows_vec.h"
