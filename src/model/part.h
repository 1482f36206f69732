/* part.h - programs that share a model's weights and KV, for drafts: its first layers, with its own norm and head; the
 * model itself, telling what is inside of it.
 *
 * A part runs on batches as its model does, with the same tables; what it writes into KV slots is what the model would
 * write there. It lives no longer than the model, nor than the next lr_model_ops.start. Engine thread only.
 */
#ifndef LR_MODEL_PART_H
#define LR_MODEL_PART_H
#include "model/model.h"

typedef struct lr_part lr_part;

/* The first `layers` layers (1 .. all but one), then what follows the last one. Layers are told by their attentions:
 * between two of them, the last value that all that comes later goes through is where a layer ends. LR_EUNSUPPORTED:
 * there is no such value, or the model is no layer graph. */
int lr_part_exit(lr_part **out, lr_model *, int layers, int max_rows, int max_out, lr_error *err);
void lr_part_free(lr_part *); /* NULL is allowed */
int lr_part_run(lr_part *, const lr_batch *, lr_error *err);

/* From now on the started model's batches can tell features of all their rows (lr_batch.features): its final hidden
 * rows (taps = 1: the last layer and the norm then work on all rows, where logits are wanted of few), or the ends of
 * its first 2, half and all but 3 layers, side by side (taps = 3). LR_EUNSUPPORTED: it has no such places, the device
 * can't, or it tells others already. */
int lr_part_features(lr_model *, int taps, lr_error *err);

#endif
