/* graph_int.h - a layer graph from the inside: its builder (graph.c), the model that it
 * becomes (graph_model.c), and programs that share its weights (part.c). */
#ifndef LR_MODEL_GRAPH_INT_H
#define LR_MODEL_GRAPH_INT_H
#include "model/graph.h"

typedef struct named_weight {
    char *name;
    lr_weight *w;
    bool linear, embed;
    lr_tensor t;
    int from, n; /* rows of t (matrices, if it has three dimensions) that w has; n = 0: all */
    lr_observed seen;
} named_weight;

struct lr_graph {
    lr_model base; /* first: a finished graph is the model */
    lr_backend *be;
    lr_weight_source src;
    int n_values, cap_values, n_ops, cap_ops, n_weights, cap_weights;
    int *width;
    int *route; /* (n_values) the route whose slots a value's rows are, -1 = token rows */
    lr_op *ops;
    named_weight *weights;
    int *layer_window; /* (n_kv_layers) */
    int cap_layers;
    float **owned; /* small float arrays that ops point to until compile */
    int n_owned, cap_owned;
    int logits, hidden;
    int n_positions; /* rows of a weight of positions; 0 = none */
    lr_kv_store *kv;
    lr_plan *plan;
    int max_rows, max_out; /* of the plan */
    /* The program with features (part.c): operations and values of its own; NULL = it tells none. */
    struct lr_graph_wide {
        lr_op *ops;
        int *width, *route;
        lr_program p;
    } * wide;
    /* A model on several ranks: weights are prepared when this rank's share is known. Until then an operation's w is
     * one more than the weight's number. */
    bool parted;
    lr_place place;
    lr_share share;
};

/* What the plan is made of. */
lr_program lr_graph__program(const lr_graph *);
/* Compiles the plan for the KV that there is. */
int lr_graph__compile(lr_graph *, lr_error *err);
void lr_graph__wide_free(struct lr_graph_wide *); /* NULL is allowed */

/* Makes w->w, of some rows or all. */
int lr_graph__prepare(lr_graph *, named_weight *w, lr_error *err);
void lr_graph__drop_weights(lr_graph *);
/* The graph becomes its place's share. */
int lr_graph__take_share(lr_graph *, lr_error *err);

/* A finished graph's functions as a model (graph_model.c). */
extern const lr_model_ops lr_graph__ops;
/* The model as a graph; NULL if it is another kind. */
lr_graph *lr_graph__of(lr_model *);

#endif
