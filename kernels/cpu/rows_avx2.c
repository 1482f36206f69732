/* rows_avx2.c - the row kernels on AVX2: rows_vec.h says how.
 */
#include "cpu/vec_avx2.h"
#include "cpu/rows_vec.h"
