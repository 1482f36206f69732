/* dtype.h - the number formats of weights and KV: names, block sizes, exact conversion to float.
 *
 * A tensor row is a run of blocks; a block holds lr_dtype_block(t) values in lr_dtype_bytes(t) bytes. The values of the
 * enum are GGUF's own type numbers (ggml.h in github.com/ggml-org/ggml documents the block layouts).
 */
#ifndef LR_BASE_DTYPE_H
#define LR_BASE_DTYPE_H
#include <stddef.h>
#include <stdint.h>

/* enum, GGUF number, name, values a block, bytes a block */
#define LR_DTYPE_LIST(X)                                                                                               \
    X(LR_F32, 0, "F32", 1, 4)                                                                                          \
    X(LR_F16, 1, "F16", 1, 2)                                                                                          \
    X(LR_Q4_0, 2, "Q4_0", 32, 18)                                                                                      \
    X(LR_Q4_1, 3, "Q4_1", 32, 20)                                                                                      \
    X(LR_Q5_0, 6, "Q5_0", 32, 22)                                                                                      \
    X(LR_Q5_1, 7, "Q5_1", 32, 24)                                                                                      \
    X(LR_Q8_0, 8, "Q8_0", 32, 34)                                                                                      \
    X(LR_Q2_K, 10, "Q2_K", 256, 84)                                                                                    \
    X(LR_Q3_K, 11, "Q3_K", 256, 110)                                                                                   \
    X(LR_Q4_K, 12, "Q4_K", 256, 144)                                                                                   \
    X(LR_Q5_K, 13, "Q5_K", 256, 176)                                                                                   \
    X(LR_Q6_K, 14, "Q6_K", 256, 210)                                                                                   \
    X(LR_IQ4_NL, 20, "IQ4_NL", 32, 18)                                                                                 \
    X(LR_IQ4_XS, 23, "IQ4_XS", 256, 136)                                                                               \
    X(LR_I8, 24, "I8", 1, 1)                                                                                           \
    X(LR_I16, 25, "I16", 1, 2)                                                                                         \
    X(LR_I32, 26, "I32", 1, 4)                                                                                         \
    X(LR_BF16, 30, "BF16", 1, 2)                                                                                       \
    X(LR_MXFP4, 39, "MXFP4", 32, 17)

typedef enum lr_dtype {
#define X(e, n, name, v, b) e = n,
    LR_DTYPE_LIST(X)
#undef X
        LR_DTYPE_MAX = 64
} lr_dtype;

/* "Q4_K"; NULL if the number is not a type we know. */
const char *lr_dtype_name(int t);
/* Values and bytes of one block; 0 for an unknown type. */
int lr_dtype_block(int t);
int lr_dtype_bytes(int t);
/* The type of a name ("q8_0", any case); -1 if unknown. */
int lr_dtype_parse(const char *name);

/* src: n values of type t (n a multiple of the block) -> dst[n]. Exact: each value is the block formula evaluated in
 * float32 (products and sums rounded once each). This is the reference every kernel is tested against.
 * Types I8/I16/I32 are converted by value. t must be known. */
void lr_dtype_to_f32(int t, const void *src, float *dst, size_t n);

/* Half and bfloat conversions, round to nearest even, NaN kept. */
float lr_f16_to_f32(uint16_t h);
uint16_t lr_f32_to_f16(float f);
static inline float lr_bf16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)h << 16};
    return v.f;
}
uint16_t lr_f32_to_bf16(float f);

#endif
