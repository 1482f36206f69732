/* attn_neon.c - paged attention on AArch64's Advanced SIMD: attn_vec.h says how.
 */
#include "cpu/vec_neon.h"
#include "cpu/attn_vec.h"
