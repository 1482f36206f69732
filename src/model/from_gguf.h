/* from_gguf.h - what a model takes from a GGUF file: its weights, its vocabulary, and its fingerprint. */
#ifndef LR_MODEL_FROM_GGUF_H
#define LR_MODEL_FROM_GGUF_H
#include "file/gguf.h"
#include "model/graph.h"

/* The tensors of g as weights. The source borrows g, which must outlive the graph and its model. Pages of weights that
 * were repacked are given back to the page cache, so that the process does not hold them twice. */
lr_weight_source lr_gguf_weights(const lr_gguf *g);
/* The vocabulary of tokenizer.ggml.*. LR_ENOTFOUND / LR_EFORMAT name the key. */
int lr_gguf_vocab(const lr_gguf *g, lr_vocab **out, lr_error *err);
/* 64 bits over the metadata that shape a model and over samples of every tensor's data: cheap, and other weights give
 * another value. Ties snapshots to a model. */
uint64_t lr_gguf_fingerprint(const lr_gguf *g);

#endif
