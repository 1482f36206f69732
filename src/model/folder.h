/* folder.h - a model in safetensors files: its tensors, and the weights that are made of them.
 *
 * A weight has a name of the layer graph's ("blk.0.attn_q.weight") and is made of one tensor as it lies in its file, or
 * of several: quantizers keep integers, scales, zero points and an order of inputs apart, and experts have tensors of
 * their own. What a weight is made of is told once (lr_folder_add), which checks all shapes; it is made, row by row,
 * when the graph asks for it, and freed once the backend has its own form. So memory beside the backend's is bounded by
 * one weight.
 *
 * Each kind of source becomes one of the types that the kernels take (lr_dtype). Integers with a scale for so many
 * inputs become Q4_0, Q5_0 or Q8_0, whichever holds all their values less zero point: nothing is rounded but scales
 * that half precision lacks. FP8, and integers whose groups of inputs are not runs of 32, become Q8_0, which rounds.
 * For the float32 reference (exact) what would be rounded becomes F32 instead.
 *
 * Immutable once a graph uses it; engine thread only.
 */
#ifndef LR_MODEL_FOLDER_H
#define LR_MODEL_FOLDER_H
#include "file/safetensors.h"
#include "model/graph.h"

typedef struct lr_folder lr_folder;

int lr_folder_new(lr_folder **out, lr_error *err);
void lr_folder_free(lr_folder *); /* NULL is allowed */

/* Opens one more file. LR_EFORMAT if it holds a tensor that another one holds too. */
int lr_folder_open(lr_folder *, const char *path, lr_error *err);
size_t lr_folder_n_files(const lr_folder *);
const char *lr_folder_path(const lr_folder *, size_t file);
size_t lr_folder_n_tensors(const lr_folder *);
/* file (may be NULL): the one it lies in. */
const lr_safetensors_tensor *lr_folder_tensor(const lr_folder *, size_t i, size_t *file);
const lr_safetensors_tensor *lr_folder_find(const lr_folder *, const char *name);
/* Bytes of all files. */
uint64_t lr_folder_bytes(const lr_folder *);
/* 64 bits over names, shapes, types and samples of all data, and over text (config.json). */
uint64_t lr_folder_fingerprint(const lr_folder *, const char *text, size_t n);

/* Shapes below are in the files' order: n outputs, k inputs, g groups of inputs; the last index is contiguous. */
typedef enum lr_part_kind {
    LR_PART_PLAIN,  /* w: F32, F16 or BF16 */
    LR_PART_GPTQ,   /* w: I32 (k * bits / 32, n), bits along k; zero: I32 (g, n * bits / 32); scale: (g, n); order:
                       I32 (k), the group of each input, or none */
    LR_PART_AWQ,    /* w: I32 (k, n / 8), 4 bits, outputs 0 2 4 6 1 3 5 7; zero: I32 (g, n / 8); scale: (g, n) */
    LR_PART_PACKED, /* w: I32 (n, k * bits / 32), bits along k, less 2^(bits - 1); scale: (n, g); zero: I32 (n * bits /
                       32, g), bits along n, or none; order as above. Compressed-tensors "pack-quantized" */
    LR_PART_INT8,   /* w: I8 (n, k); scale: (n), (n, 1) or one value; times `mul` */
    LR_PART_FP8,    /* w: F8_E4M3 (n, k); scale: one value, (n), (n, 1), or one a block (n / bn, k / bk) */
    LR_PART_MXFP4,  /* w: U8 (n, k / 32, 16); scale: U8 (n, k / 32), exponents of 2 */
} lr_part_kind;

/* One piece of a weight: rows of it. Names of tensors are borrowed for the call. */
typedef struct lr_part_spec {
    lr_part_kind kind;
    const char *w, *scale, *zero, *order; /* NULL = none */
    int bits;                             /* GPTQ, PACKED: 2, 3, 4 or 8 */
    int zero_offset;                      /* GPTQ: added to zero points (1 in files of its first format) */
    int block[2];                         /* FP8: outputs and inputs that share a scale, 0 = as the shape says */
    float mul;                            /* INT8: 1, or 1/127 (LLM.int8) */
    float add;                            /* PLAIN vectors: added to each value */
    bool transpose;                       /* PLAIN: w is (k, n) */
    int64_t index;                        /* the slice of w's (and scale's) first dimension that this is, -1 = all */
    int64_t first, count, step;           /* rows of it: count 0 = all, from first, each step-th */
} lr_part_spec;

/* How a weight came out. */
typedef struct lr_made {
    int type;   /* lr_dtype */
    bool exact; /* no value is rounded */
} lr_made;

/* Declares a weight: one part, or several whose rows follow each other; stack: as slices of a third dimension. Errors
 * name tensors, and both shapes where two disagree. */
int lr_folder_add(lr_folder *, const char *name, const lr_part_spec *parts, size_t n_parts, bool stack, lr_made *made,
                  lr_error *err);

/* Shape of the last weight of that name (ne[0] = inputs), n_dims; 0 if there is none. */
int lr_folder_shape(const lr_folder *, const char *name, int64_t ne[4]);

/* LR_EIO if a file of it can't be read any more; all: or LR_ESTATE if one was written to since it was opened. */
int lr_folder_intact(const lr_folder *, bool all, lr_error *err);

/* The weights of f for a graph; f must outlive it and its model. exact: for LR_COMPUTE_F32.
 * threads: that make a large weight, 0 = all cores. */
int lr_folder_weights(lr_folder *, bool exact, int threads, lr_weight_source *out, lr_error *err);

#endif
