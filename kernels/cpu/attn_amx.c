/* attn_amx.c - paged attention whose products run on AMX tiles: attn_tiles.h says how, attn_vec.h the rest.
 *
 * Heads of no multiple of 32 dimensions, or of more than 1024, and keys or values in float32, float16 or Q4_0 take the
 * AVX-512 way. Which way is taken depends on nothing but these, so the promise of attn_vec.h holds; the bits of the two
 * ways differ.
 */
#include "cpu/vec_avx512.h"
#undef VEC_NAME
#define VEC_NAME(f) f##_amx
#define ATTN_TILES
#include "cpu/attn_vec.h"
