/* model.h - a model as the engine sees it: a vocabulary, a KV shape and a forward pass.
 *
 * lr_model is a small base "class": a real model (graph.c: weights, layer graph, backend) and the scripted model
 * (scripted.c: a callback gives the logits) both begin with it. The engine calls `start` once, when it knows how much
 * KV memory there is, and `forward` at every step. Engine thread only.
 */
#ifndef LR_MODEL_MODEL_H
#define LR_MODEL_MODEL_H
#include "backend/backend.h"
#include "text/text.h"

typedef struct lr_model lr_model;

typedef struct lr_model_ops {
    void (*free)(lr_model *);
    /* Makes the KV store of spec and everything sized by max_rows (token rows a batch) and max_out (logit rows a
     * batch). Called again it replaces both (the old KV is gone). spec->n_layers/layers are the model's own. */
    int (*start)(lr_model *, const lr_kv_spec *spec, int max_rows, int max_out, lr_error *err);
    /* Runs a batch: see lr_batch. Fails as a whole (out of memory, device lost); the KV slots of its rows are then
     * undefined. */
    int (*forward)(lr_model *, const lr_batch *, lr_error *err);
    /* KV blocks: see lr_backend_ops. */
    void (*kv_copy)(lr_model *, int group, int dst, int src);
    size_t (*kv_block_bytes)(const lr_model *, int group);
    void (*kv_read)(lr_model *, int group, int block, void *dst);
    void (*kv_write)(lr_model *, int group, int block, const void *src);
    /* Bytes held: weights beyond the mapped file, KV, activations. */
    void (*memory)(const lr_model *, size_t *weights, size_t *kv, size_t *work);
    /* Bytes of a device's memory that are free; 0 if KV lies in the machine's. NULL = 0. With a spec: those that are
     * left for its KV beside what `start` makes else, 1 at least; its n_blocks: as many as there might be. */
    size_t (*room)(lr_model *, const lr_kv_spec *, int max_rows, int max_out);
    /* Runs fn(arg, thread, n_threads) on the threads that compute, and how many these are. NULL: there are none. */
    void (*parallel)(lr_model *, lr_pool_fn fn, void *arg);
    int (*threads)(const lr_model *);
    /* forward in two halves, where `halves` says so: see lr_backend_ops. */
    int (*launch)(lr_model *, const lr_batch *, lr_error *err);
    int (*finish)(lr_model *, const lr_batch *, lr_error *err);
} lr_model_ops;

struct lr_model {
    const lr_model_ops *ops;
    int n_vocab; /* logits a row; at least the vocabulary's size */
    int n_embd;  /* width of the hidden rows */
    int n_ctx;   /* longest sequence that the model was trained for */
    int n_kv_layers;
    lr_kv_layer *kv_layers;      /* (n_kv_layers) owned */
    int n_groups;                /* KV block groups in use */
    int window[LR_KV_GROUPS];    /* positions a layer of the group looks back over; 0 = all */
    bool echoes;                 /* forward knows echoes (lr_batch_echo): drafts may be trees */
    bool draws;                  /* forward draws tokens (lr_batch.draws) */
    bool halves;                 /* launch and finish may be called */
    bool peaks;                  /* forward gives lr_batch.peaks; known once it has started */
    bool tells;                  /* forward tells tokens (lr_batch.told) and no logits: requests only generate, without
                                    text, log-probabilities, constraints or drafts */
    uint64_t fingerprint;        /* of file and graph: ties snapshots to the model */
    lr_vocab *vocab;             /* a reference, never NULL */
    struct lr_adapter *adapters; /* made for it (adapter.h) */
    char name[128];
};

/* A spec for the layers of this model, the first of which is number first_layer of those that are shared among ranks.
 */
static inline lr_kv_spec lr_model_kv_spec(const lr_model *m, const lr_kv_spec *spec, int first_layer)
{
    lr_kv_spec s = *spec;
    s.n_layers = m->n_kv_layers;
    s.layers = m->kv_layers;
    s.first_layer = first_layer;
    return s;
}

static inline void lr_model_free(lr_model *m)
{
    if (m) m->ops->free(m);
}

/* A model whose logits a callback gives. Its KV holds the token ids themselves, so the callback sees exactly what the
 * block tables say: a wrong page, copy or eviction shows at once in its output. next: tokens (n) of one sequence up to
 * and including the row -> logits (n_vocab), preset to 0; returns 0, or anything else to fail that row's request: the
 * row's logits are then filled with NaN. A slot that was never written fails the whole batch. */
typedef int (*lr_scripted_next)(void *user, const int32_t *tokens, int n, float *logits);
typedef struct lr_scripted_config {
    int n_vocab, n_ctx;
    lr_scripted_next next;
    void *user;
    lr_vocab *vocab; /* a reference is taken */
    int window;      /* > 0: a second KV group with this window exists (its blocks hold the ids too) */
    int64_t cost_ns; /* time that each batch row is to take at least */
} lr_scripted_config;
int lr_scripted_new(lr_model **out, const lr_scripted_config *cfg, lr_error *err);

#endif
