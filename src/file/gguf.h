/* gguf.h - reads GGUF model files, versions 2 and 3: metadata, tensor table and the weights, mapped.
 *
 * A file is header, key-value pairs, tensor table, then tensor data, little-endian (docs/gguf.md in
 * github.com/ggml-org/ggml). A model may be cut into shards NAME-00001-of-0000N.gguf: the first carries the metadata,
 * each carries its own tensors; they open as one.
 *
 * lr_gguf_open checks everything before it returns: counts and lengths against the bytes that are left, names, value
 * types, alignment, and that every tensor is a whole number of blocks, lies aligned inside its file and overlaps no
 * other. What a caller gets needs no second check of memory safety; whether the values make sense as a model (head
 * counts, shapes that fit together) is for the caller to decide.
 *
 * An lr_gguf is immutable: any thread may read it at any time. All pointers it hands out are borrowed until
 * lr_gguf_free. The files must not be cut or written to while they are open: a page past the new end of a mapped file
 * ends the process with SIGBUS. Replacing a file by rename is safe (the old one stays mapped). lr_gguf_read never
 * touches the mapping and turns a cut file into an error; lr_gguf_check_unchanged tells whether a file was touched
 * since it was opened.
 */
#ifndef LR_FILE_GGUF_H
#define LR_FILE_GGUF_H
#include "base/dtype.h"
#include "base/error.h"
#include "base/str.h"

typedef struct lr_gguf lr_gguf;

/* Types of values: enum, number in the file, name, bytes in the file (0: variable). */
#define LR_KV_LIST(X)                                                                                                  \
    X(LR_KV_U8, 0, "u8", 1)                                                                                            \
    X(LR_KV_I8, 1, "i8", 1)                                                                                            \
    X(LR_KV_U16, 2, "u16", 2)                                                                                          \
    X(LR_KV_I16, 3, "i16", 2)                                                                                          \
    X(LR_KV_U32, 4, "u32", 4)                                                                                          \
    X(LR_KV_I32, 5, "i32", 4)                                                                                          \
    X(LR_KV_F32, 6, "f32", 4)                                                                                          \
    X(LR_KV_BOOL, 7, "bool", 1)                                                                                        \
    X(LR_KV_STR, 8, "str", 0)                                                                                          \
    X(LR_KV_ARRAY, 9, "array", 0)                                                                                      \
    X(LR_KV_U64, 10, "u64", 8)                                                                                         \
    X(LR_KV_I64, 11, "i64", 8)                                                                                         \
    X(LR_KV_F64, 12, "f64", 8)
enum lr_kv_type {
#define X(e, n, name, bytes) e = n,
    LR_KV_LIST(X)
#undef X
};
/* "u32"; "unknown" for a number that is no type. */
const char *lr_kv_type_name(int type);

/* count values of one type, in file order. */
typedef struct lr_gguf_array {
    int type;         /* of the elements, LR_KV_... */
    size_t count;     /* may be 0 */
    const void *data; /* numbers and bools: count native values (bool as one byte, 0 or 1), naturally aligned
                       * LR_KV_STR: const lr_str[count], any bytes;  LR_KV_ARRAY: const lr_gguf_array[count] */
} lr_gguf_array;

typedef struct lr_gguf_kv {
    const char *key; /* zero-terminated; 1..65535 bytes, none of them zero, otherwise as in the file */
    int type;        /* LR_KV_... tells which member below is set */
    union {
        uint64_t u; /* U8 U16 U32 U64 */
        int64_t i;  /* I8 I16 I32 I64 */
        double f;   /* F32 F64 (any value, NaN too) */
        bool b;
        lr_str s; /* any bytes */
        lr_gguf_array a;
    } v;
} lr_gguf_kv;

typedef struct lr_gguf_tensor {
    const char *name; /* zero-terminated, as a key; unique over all shards */
    int type;         /* lr_dtype, always a known one */
    int n_dims;       /* 0..4; dimensions beyond it are 1 */
    uint64_t ne[4];   /* values a dimension, >= 1; ne[0] is the row (contiguous), a multiple of the type's block */
    const void *data; /* read-only; aligned to the file's alignment, which is 8 or more (usually 32), as far as 64 */
    size_t size;      /* bytes: rows * row bytes, no padding */
    int shard;        /* index of the file it lies in */
    uint64_t offset;  /* of data from that file's start */
} lr_gguf_tensor;

/* Opens, checks and maps a file. If it is one shard of several (any of them), opens all of them from the same folder.
 * LR_ENOTFOUND no such file, LR_EIO the system refused, LR_EINVAL not a regular file, LR_EFORMAT damaged,
 * LR_EUNSUPPORTED version 1, big-endian, or a tensor type this build does not know, LR_ELIMIT more than 256 MiB of
 * metadata. The text starts with the path and names the key or tensor. */
int lr_gguf_open(lr_gguf **out, const char *path, lr_error *err);
/* The same, but the files are read into memory instead of mapped: for filesystems where mapping is slow, and for
 * callers who want to be immune to changes of the file. Takes lr_gguf_file_bytes of memory. */
int lr_gguf_open_copy(lr_gguf **out, const char *path, lr_error *err);
/* NULL is allowed. Unmaps and closes. */
void lr_gguf_free(lr_gguf *g);

/* The files, in shard order. */
int lr_gguf_n_shards(const lr_gguf *g);
const char *lr_gguf_shard_path(const lr_gguf *g, int shard);
/* 2 or 3, of the first shard; bytes of all files together. */
int lr_gguf_version(const lr_gguf *g);
uint64_t lr_gguf_file_bytes(const lr_gguf *g);
/* LR_ESTATE if a file's size or modification time is no longer what it was when it was opened. */
int lr_gguf_check_unchanged(const lr_gguf *g, lr_error *err);
/* LR_EIO if a touch of the mapping has failed: see lr_mapfile_intact. */
int lr_gguf_check_intact(const lr_gguf *g, lr_error *err);

/* Metadata: of the first shard, in file order; keys are unique. find: NULL if there is none. */
size_t lr_gguf_n_kv(const lr_gguf *g);
const lr_gguf_kv *lr_gguf_kv_at(const lr_gguf *g, size_t i);
const lr_gguf_kv *lr_gguf_find(const lr_gguf *g, const char *key);

/* Typed getters. LR_ENOTFOUND if the key is missing, LR_EFORMAT if its type (or value) does not fit; the text names key
 * and types. Integers take any integer type whose value fits; f64 takes f32 and f64; nothing else is converted. */
int lr_gguf_get_u64(const lr_gguf *g, const char *key, uint64_t *out, lr_error *err);
int lr_gguf_get_i64(const lr_gguf *g, const char *key, int64_t *out, lr_error *err);
int lr_gguf_get_f64(const lr_gguf *g, const char *key, double *out, lr_error *err);
int lr_gguf_get_bool(const lr_gguf *g, const char *key, bool *out, lr_error *err);
int lr_gguf_get_str(const lr_gguf *g, const char *key, lr_str *out, lr_error *err);
/* The array under key; its elements must be of type, or of any type if type is -1. */
int lr_gguf_get_array(const lr_gguf *g, const char *key, int type, const lr_gguf_array **out, lr_error *err);
/* Element i (< count) of an array of integers or bools, or of floats, widened; 0 if the array is of another kind.
 * A u64 over INT64_MAX saturates. */
int64_t lr_gguf_array_i64(const lr_gguf_array *a, size_t i);
double lr_gguf_array_f64(const lr_gguf_array *a, size_t i);

/* Tensors: of all shards, in file order. find: NULL if there is none. */
size_t lr_gguf_n_tensors(const lr_gguf *g);
const lr_gguf_tensor *lr_gguf_tensor_at(const lr_gguf *g, size_t i);
const lr_gguf_tensor *lr_gguf_find_tensor(const lr_gguf *g, const char *name);

/* A hint about a tensor's pages; t NULL: all tensor data. Failure is harmless and not reported. */
enum lr_gguf_advice {
    LR_GGUF_WILLNEED,  /* read ahead */
    LR_GGUF_DONTNEED,  /* drop from memory; pages shared with a neighbour are kept */
    LR_GGUF_SEQUENTIAL /* will be read once, front to back */
};
void lr_gguf_advise(const lr_gguf *g, const lr_gguf_tensor *t, enum lr_gguf_advice how);
/* Copies bytes [from, from + n) of a tensor's data by a file read instead of the mapping. LR_EINVAL out of range,
 * LR_EIO read error or the file has become shorter. */
int lr_gguf_read(const lr_gguf *g, const lr_gguf_tensor *t, size_t from, void *dst, size_t n, lr_error *err);

#endif
