/* adapter.h - low-rank adapters (LoRA, arXiv:2106.09685): y = x w^T + scale (x a^T) b^T for the rows of sequences that
 * have one. Many may be in a batch; a row without one is computed as if there were none anywhere.
 *
 * An adapter belongs to the model that it was made for, is counted by references (each sequence holds one), and may
 * outlive the model. Engine thread only.
 */
#ifndef LR_MODEL_ADAPTER_H
#define LR_MODEL_ADAPTER_H
#include "model/model.h"

/* The two factors for one weight of the model, named as in the graph. Borrowed. */
typedef struct lr_adapter_part {
    const char *weight;
    int rank;
    float scale;
    int64_t a_width, b_rows; /* the shapes that a and b have */
    const float *a;          /* (rank, a_width), not aligned */
    const float *b;          /* (b_rows, rank) */
} lr_adapter_part;

typedef struct lr_adapter lr_adapter;

/* LR_ESHAPE names the weight and both shapes; LR_ENOTFOUND: the model has no product with that weight;
 * LR_EUNSUPPORTED: its backend, or its kind, takes no adapters. A new adapter has one reference. */
int lr_adapter_new(lr_model *, const lr_adapter_part *parts, int n, lr_adapter **out, lr_error *err);
lr_adapter *lr_adapter_ref(lr_adapter *); /* NULL is allowed */
void lr_adapter_unref(lr_adapter *);
/* What a batch's sequences refer to; NULL for NULL. */
const struct lr_lora *lr_adapter_lora(const lr_adapter *);
/* Of this very model, whose weights are still there? */
bool lr_adapter_fits(const lr_adapter *, const lr_model *);
/* 64 bits over what is in it: two adapters of the same content have the same KV. 0 for NULL. */
uint64_t lr_adapter_fingerprint(const lr_adapter *);
size_t lr_adapter_bytes(const lr_adapter *);
/* The model goes: its adapters stay as objects, without content. */
void lr_adapters_drop(lr_model *);

#endif
