/* gguf_write.h - writes GGUF version 3 files.
 *
 * In this order: new; put keys and declare tensors, freely mixed; data of each tensor, in the order declared, in pieces
 * of any size; finish. Everything goes to a file beside the target, which has no name where the file system can do
 * that (newfile.h); finish makes it durable and puts it in the target's place, so that at no time a half-written file
 * has that name. free before finish leaves nothing of it.
 *
 * After an error the writer stays failed: each later call returns the first error again.
 */
#ifndef LR_FILE_GGUF_WRITE_H
#define LR_FILE_GGUF_WRITE_H
#include "file/gguf.h"

typedef struct lr_gguf_writer lr_gguf_writer;

/* Creates the temporary file in path's folder. */
int lr_gguf_writer_new(lr_gguf_writer **out, const char *path, lr_error *err);
/* NULL is allowed. */
void lr_gguf_writer_free(lr_gguf_writer *w);

/* A key with a value of any type; kv is copied. LR_EINVAL: empty, overlong or repeated key, unknown type, or data have
 * been written already. general.alignment (u32) sets the alignment, 32 without it; it must come before any tensor. */
int lr_gguf_writer_put(lr_gguf_writer *w, const lr_gguf_kv *kv, lr_error *err);
/* The usual ones. */
int lr_gguf_writer_u32(lr_gguf_writer *w, const char *key, uint32_t v, lr_error *err);
int lr_gguf_writer_f32(lr_gguf_writer *w, const char *key, float v, lr_error *err);
int lr_gguf_writer_bool(lr_gguf_writer *w, const char *key, bool v, lr_error *err);
int lr_gguf_writer_str(lr_gguf_writer *w, const char *key, lr_str v, lr_error *err);
/* data as in lr_gguf_array: numbers, or lr_str for LR_KV_STR. */
int lr_gguf_writer_array(lr_gguf_writer *w, const char *key, int type, const void *data, size_t count, lr_error *err);

/* Declares the next tensor: type an lr_dtype, ne[n_dims] with ne[0] the row. */
int lr_gguf_writer_tensor(lr_gguf_writer *w, const char *name, int type, int n_dims, const uint64_t *ne, lr_error *err);

/* The next n bytes of the tensor that is not yet complete; a piece must not reach into the next tensor. */
int lr_gguf_writer_data(lr_gguf_writer *w, const void *data, size_t n, lr_error *err);

/* Checks that all data were given, syncs and renames. The writer then only waits to be freed. */
int lr_gguf_writer_finish(lr_gguf_writer *w, lr_error *err);

#endif
