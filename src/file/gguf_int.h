/* gguf_int.h - the inside of an lr_gguf: one part a file, and what the parts make together.
 *
 * gguf_parse.c turns one mapped file into a part; gguf.c joins parts and answers questions.
 */
#ifndef LR_FILE_GGUF_INT_H
#define LR_FILE_GGUF_INT_H
#include "file/gguf.h"
#include "file/mapfile.h"
#include "file/names.h"

#define LR_GGUF_MAGIC         0x46554747u /* "GGUF" */
#define LR_GGUF_ALIGNMENT     32          /* where general.alignment is absent */
#define LR_GGUF_ALIGNMENT_MAX (1u << 20)
#define LR_GGUF_NAME_MAX      65535
#define LR_GGUF_META_MAX      ((size_t)256 << 20) /* bytes before the tensor data */
#define LR_GGUF_DEPTH_MAX     4                   /* arrays in arrays */
#define LR_GGUF_SHARDS_MAX    512

typedef struct lr_gguf_part {
    char *path;
    lr_mapfile map;
    int version;
    lr_keep keep; /* keys, names and array elements */
    lr_gguf_kv *kv;
    size_t n_kv, cap_kv;
    lr_name_slot *kv_index;
    lr_gguf_tensor *tensors;
    size_t n_tensors, cap_tensors;
    uint32_t alignment;
    size_t data_start;
} lr_gguf_part;

struct lr_gguf {
    int n_parts;
    lr_gguf_part *parts;
    size_t n_tensors;
    lr_gguf_tensor *tensors; /* of all parts */
    lr_name_slot *tensor_index;
};

/* Parses and checks p->map, filling everything but path and map. On failure the caller still frees p. */
int lr_gguf__parse(lr_gguf_part *p, lr_error *err);

#endif
