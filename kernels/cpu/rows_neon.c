/* rows_neon.c - the row kernels on AArch64's Advanced SIMD: rows_vec.h says how.
 */
#include "cpu/vec_neon.h"
#include "cpu/rows_vec.h"
