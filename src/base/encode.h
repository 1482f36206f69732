/* encode.h - float32 values to the number formats of weights: the way back from lr_dtype_to_f32.
 *
 * What is written is a matter of choice: many blocks stand for nearly the same values, and the one with the least error
 * is looked for. An error of a value costs its square times the value's importance, which is how much its input moves
 * (mean of the squared activations over a text; see `llmrun imatrix`). Without importances, blocks of 32 are written
 * by the formulas of the gguf package (gguf/quants.py in github.com/ggml-org/llama.cpp), byte for byte, and
 * super-blocks with larger values counting more.
 */
#ifndef LR_BASE_ENCODE_H
#define LR_BASE_ENCODE_H
#include "base/dtype.h"
#include <stdbool.h>

/* Can values be written in this type? (Every type of weights but Q8_K and integers.) */
bool lr_dtype_writable(int t);

/* x: n values, n a multiple of the type's block; importance: (n) of them, >= 0, or NULL -> dst, n / block blocks.
 * False, with dst undefined, if a value or a block's scale isn't finite in the type. Pure: any number of threads. */
bool lr_dtype_from_f32(int t, const float *x, const float *importance, void *dst, size_t n);

#endif
