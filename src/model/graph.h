/* graph.h - a layer graph: built once at load (by an architecture script), then compiled and run.
 *
 * A node is a small integer: the id of a value of some width; all calls check widths and weight shapes and say which
 * layer and which two shapes disagree. Weights are named as in the model file and come from a source (a GGUF file, a
 * folder of safetensors); each is prepared by the backend the moment it is first used. lr_graph_finish compiles nothing
 * yet: the result is an lr_model, which plans its memory when the engine starts it.
 *
 *   lr_graph *g; lr_graph_new(&g, backend, source, err);
 *   int x; lr_graph_embed(g, "token_embd.weight", 1.0f, &x, err); ... lr_graph_linear(g, x, "output.weight", NULL, 0,
 * &y, err); lr_model *m; lr_graph_finish(g, y, -1, &info, &m, err);
 *
 * Engine thread only. On any error the graph stays valid and is to be freed.
 */
#ifndef LR_MODEL_GRAPH_H
#define LR_MODEL_GRAPH_H
#include "model/model.h"
#include "model/share.h"

typedef struct lr_graph lr_graph;

/* Where weights come from. find: fills *t and returns true, or false if there is no such tensor; data stays NULL where
 * it has to be made first. load: makes those rows of it that t is. used: told once a weight has been prepared; gone:
 * the backend has a form of its own and no longer reads the data. intact: whether what was read can be relied on; all:
 * looks at the files too, whether they were written to. free: called with the graph or model. */
typedef struct lr_weight_source {
    void *user;
    bool (*find)(void *user, const char *name, lr_tensor *t);
    int (*load)(void *user, lr_tensor *t, lr_error *err);    /* NULL = find always gives data */
    void (*used)(void *user, const lr_tensor *t, bool gone); /* NULL = nothing */
    int (*intact)(void *user, bool all, lr_error *err);      /* NULL = always */
    void (*free)(void *user);                                /* NULL = nothing */
    size_t bytes;                                            /* of all tensors; 0 = not known */
} lr_weight_source;

/* Takes over the backend and the source (also on failure). */
int lr_graph_new(lr_graph **out, lr_backend *backend, lr_weight_source source, lr_error *err);
void lr_graph_free(lr_graph *);

/* Before anything is built: the model will be this rank's part, prepared by lr_graph_finish. What it computes then is
 * no model for an engine; see parallel.h. */
void lr_graph_set_place(lr_graph *, const lr_place *);

int lr_graph_width(const lr_graph *, int node); /* 0 if there is no such node */
/* Shape of a tensor of the source; n_dims, 0 if absent. */
int lr_graph_shape(lr_graph *, const char *name, int64_t ne[4]);

int lr_graph_embed(lr_graph *, const char *weight, float scale, int *out, lr_error *err);
/* group: the width that is normalised at once (head_dim for per-head norms), 0 = the whole row. bias may be NULL. */
/* Rows of a weight by position: learned positions. A sequence is never longer than the weight has rows. */
int lr_graph_embed_at(lr_graph *, const char *weight, int *out, lr_error *err);
int lr_graph_norm(lr_graph *, int in, const char *weight, const char *bias, float eps, int group, bool layer_norm,
                  int *out, lr_error *err);
/* n_out: the width that the caller expects, 0 = whatever the weight says. bias may be NULL (none). first >= 0: only the
 * n_out rows of weight and bias from there on, where a file keeps several matrices as one (q, k and v; gate and up). */
int lr_graph_linear(lr_graph *, int in, const char *weight, const char *bias, int n_out, int first, int *out,
                    lr_error *err);
/* rope->factors is the name's tensor if factors_name is not NULL; else its values, if any, are copied. */
int lr_graph_rope(lr_graph *, int in, const lr_rope *rope, const char *factors_name, int *out, lr_error *err);
/* Writes k and v to a new KV layer and attends; attn->layer is set here. sinks_name may be NULL. */
int lr_graph_attention(lr_graph *, int q, int k, int v, lr_attn attn, const char *sinks_name, int *out, lr_error *err);
/* Equal widths; b of a MUL may have width 1. */
int lr_graph_binary(lr_graph *, lr_op_kind kind /* ADD, MUL */, int a, int b, int *out, lr_error *err);
int lr_graph_glu(lr_graph *, int gate, int up, lr_act act, int *out, lr_error *err);
int lr_graph_act(lr_graph *, int in, lr_act act, int *out, lr_error *err);
int lr_graph_scale(lr_graph *, lr_op_kind kind /* SCALE, SOFTCAP */, int in, float scale, int *out, lr_error *err);

/* Of each of n_heads equal parts of a row the values first .. first+n-1. */
int lr_graph_slice(lr_graph *, int in, int n_heads, int first, int n, int *out, lr_error *err);
/* For each of n_heads parts of a, that part and behind it the one of b, which has as many or is one for all; b < 0: n
 * zeros. */
int lr_graph_concat(lr_graph *, int a, int b, int n_heads, int n, int *out, lr_error *err);
/* Mixture of experts: see backend.h. logits has one value an expert; bias_name may be NULL. The result has width
 * 2 n_used. */
int lr_graph_route(lr_graph *, int logits, const lr_route *route, const char *bias_name, int *out, lr_error *err);
/* A product with each slot's own expert: weight (in, n, experts), bias (n, experts) or NULL. n_out as in linear. The
 * result is one of slots, which act, glu, add, mul, scale, norm, slice, experts and mix take, with the same route only.
 */
int lr_graph_experts(lr_graph *, int in, int route, const char *weight, const char *bias, int n_out, int *out,
                     lr_error *err);
int lr_graph_mix(lr_graph *, int in, int route, int *out, lr_error *err);

typedef struct lr_graph_info {
    const char *name;
    int n_ctx;
    lr_vocab *vocab; /* a reference is taken */
    uint64_t fingerprint;
} lr_graph_info;

/* Turns the graph into a model and takes it over (freed on success; still the caller's on failure). hidden: node of the
 * final hidden rows, -1 = none. */
int lr_graph_finish(lr_graph *, int logits, int hidden, const lr_graph_info *info, lr_model **out, lr_error *err);

/* The part that a finished graph's model is, NULL if it is a whole model. Borrowed. */
const lr_share *lr_graph_share(const lr_model *);

/* Begins (or ends) to add up the squares of what each matrix is multiplied with: their importances for a quantizer.
 * LR_EUNSUPPORTED for models without a layer graph and devices that can't. */
int lr_model_observe(lr_model *, bool on, lr_error *err);
/* The i-th matrix that is observed: false behind the last. seen->sums has *k values; valid until it ends. A matrix that
 * is used in parts, or twice, comes up more than once. */
bool lr_model_observed(lr_model *, size_t i, const char **name, int *k, const lr_observed **seen);

/* A prepared weight of matrix products. */
typedef struct lr_graph_product_info {
    const lr_weight *weight;
    int64_t width, rows; /* of the whole tensor */
    int first;           /* the row of it that the weight begins with */
} lr_graph_product_info;
/* The i-th product (from 0) with the named tensor in a finished graph's model; false if there are no more. Experts are
 * not among them. */
bool lr_graph_product(lr_model *, const char *tensor, int i, lr_graph_product_info *out);

/* The backend of a finished graph's model (for reports); NULL for other models. Borrowed. */
lr_backend *lr_model_backend(lr_model *);

#endif
