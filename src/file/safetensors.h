/* safetensors.h - reads one safetensors file: a table of named tensors, mapped.
 *
 * The file is a u64 length, so many bytes of JSON, and the data (README of github.com/huggingface/safetensors). The
 * JSON is one object {name: {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, "__metadata__": {string:
 * string}}. Everything is checked on opening: the JSON strictly, sizes against shapes, and that the tensors cover the
 * data without holes or overlaps. A model in several files has an index file beside them; joining them is the caller's
 * work.
 *
 * Immutable, readable from any thread; pointers are borrowed until free. What gguf.h says of files that change while
 * they are open holds here too.
 */
#ifndef LR_FILE_SAFETENSORS_H
#define LR_FILE_SAFETENSORS_H
#include "base/dtype.h"
#include "base/error.h"
#include "base/str.h"

#define LR_SAFETENSORS_DIMS 8

typedef struct lr_safetensors lr_safetensors;

typedef struct lr_safetensors_tensor {
    const char *name;  /* zero-terminated, unique */
    const char *dtype; /* the file's word for the type, as "BF16"; static */
    int type;          /* lr_dtype, or -1 for types that weights do not come in (BOOL, U8, I64, F64, F8_...) */
    int n_dims;        /* 0..8 */
    uint64_t shape[LR_SAFETENSORS_DIMS]; /* in the file's order: the last is contiguous; may be 0 */
    const void *data;                    /* size bytes, not aligned to anything; not NULL */
    size_t size;
    uint64_t offset; /* of data from the file's start */
} lr_safetensors_tensor;

/* One pair of __metadata__; both may hold any bytes. */
typedef struct lr_safetensors_meta {
    lr_str key, value;
} lr_safetensors_meta;

/* Codes as of lr_gguf_open; LR_EUNSUPPORTED: a type this build cannot even size, or more than 8 dimensions; LR_ELIMIT:
 * a header of more than 100 MB. copy: read the file into memory instead of mapping it. */
int lr_safetensors_open(lr_safetensors **out, const char *path, bool copy, lr_error *err);
/* NULL is allowed. */
void lr_safetensors_free(lr_safetensors *s);
/* LR_ESTATE if the file's size or modification time is no longer what it was. */
int lr_safetensors_check_unchanged(const lr_safetensors *s, lr_error *err);
/* LR_EIO if a touch of the mapping has failed: see lr_mapfile_intact. */
int lr_safetensors_check_intact(const lr_safetensors *s, lr_error *err);

uint64_t lr_safetensors_file_bytes(const lr_safetensors *s);
/* The n bytes at data, of this file's, will not be read soon: their pages need not stay in memory. */
void lr_safetensors_drop(const lr_safetensors *s, const void *data, size_t n);

/* In the order of the header; find: NULL if there is none. */
size_t lr_safetensors_n_tensors(const lr_safetensors *s);
const lr_safetensors_tensor *lr_safetensors_tensor_at(const lr_safetensors *s, size_t i);
const lr_safetensors_tensor *lr_safetensors_find(const lr_safetensors *s, const char *name);

size_t lr_safetensors_n_meta(const lr_safetensors *s);
const lr_safetensors_meta *lr_safetensors_meta_at(const lr_safetensors *s, size_t i);

#endif
