/* heads.h - heads trained for a model, each of which says what comes one token later than the one before (Medusa).
 *
 * A head is a few blocks x + silu(W x + b) over the model's final hidden row, then a matrix to the vocabulary: its own,
 * or, if the file has none for it, the model's. Head i (0-based) guesses the token i + 2 behind the row: the model's
 * own head has the next one. The file is a safetensors file with the usual names: `<i>.<j>.linear.weight`, `.bias` for
 * block j, `<i>.<blocks>.weight` for the matrix, all of them perhaps behind `medusa_head.`. Engine thread only.
 */
#ifndef LR_MODEL_HEADS_H
#define LR_MODEL_HEADS_H
#include "model/model.h"

#define LR_HEADS_MAX 16

typedef struct lr_heads lr_heads;

/* Reads the heads of a started model. LR_ESHAPE, LR_EFORMAT: the file does not fit; LR_EUNSUPPORTED: the model tells no
 * hidden rows. max_rows: of a run. The model must outlive them, unchanged. */
int lr_heads_new(lr_heads **out, lr_model *, const char *path, int max_rows, lr_error *err);
void lr_heads_free(lr_heads *); /* NULL is allowed */
int lr_heads_count(const lr_heads *);
/* hidden (n, n_embd) -> logits (count, n, n_vocab), n <= max_rows. */
int lr_heads_run(lr_heads *, const float *hidden, int n, float *logits, lr_error *err);

#endif
