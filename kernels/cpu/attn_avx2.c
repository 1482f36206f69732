/* attn_avx2.c - paged attention on AVX2: attn_vec.h says how.
 */
#include "cpu/vec_avx2.h"
#include "cpu/attn_vec.h"
