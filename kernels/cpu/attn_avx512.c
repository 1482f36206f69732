/* attn_avx512.c - paged attention on AVX-512: attn_vec.h says how.
 */
#include "cpu/vec_avx512.h"
#include "cpu/attn_vec.h"
