/* share.h - which part of a layer graph a rank computes, so that no architecture script needs a word about it.
 *
 * Two cuts, alone or together. Pipeline: the list of operations is cut into `pp` stages where one value alone goes on
 * (between layers), stages as even in weight bytes as can be; each keeps the KV of its own layers. Tensor: inside a
 * stage every matrix product is split by the columns of its result, over `tp` ranks: attention's by whole heads (a KV
 * head is copied where there are more ranks than KV heads), others in runs of up to 32, the vocabulary too, even or
 * not. What needs whole rows (a product's input, a norm) has the columns gathered before it. So each sum is taken
 * whole, by one rank, in the order in which a single process takes it, and results are the same bit for bit.
 *
 * Of a mixture's experts each rank has some, neighbours: it works on the slots that lead to them, and the results of
 * all ranks' slots are gathered before they are mixed. All choose, since that costs next to nothing.
 *
 * Operations that are unknown here get whole inputs and are computed by all ranks of the stage.
 */
#ifndef LR_MODEL_SHARE_H
#define LR_MODEL_SHARE_H
#include "backend/backend.h"

typedef struct lr_place {
    int tp, pp;         /* ranks a stage, stages; rank = stage * tp + tp_rank */
    int tp_rank, stage; /* this rank's */
    lr_comm *group;     /* the ranks of this stage; borrowed; NULL where nothing is run (plans, tests) */
} lr_place;

typedef struct lr_share {
    int n_values, n_ops;
    int *width, *route; /* as in lr_program */
    lr_op *ops;
    struct lr_share_rows {
        int from, n; /* rows of the op's weight (and values of its bias); of EXPERTS: matrices; n = 0: all of it */
    } * rows;        /* (n_ops) */
    int logits, hidden;
    bool partial;     /* the result is the next stage's input: all rows */
    int result_width; /* of the result as this rank has it */
    int *logits_at;   /* (tp + 1) the columns of the result that each rank of the stage has */
    int in_width;     /* of the input from the stage before; 0 = none */
    int first_layer, n_layers;
    lr_kv_layer *layers; /* (n_layers) as this rank keeps them */
    int n_whole_layers;
    lr_kv_layer *whole_layers; /* (n_whole_layers) of the model */
    int n_at, cap_at;
    int **at; /* what GATHER operations point to */
} lr_share;

/* Can the heads of these KV operations be split over tp ranks? */
bool lr_share_fits(const lr_program *whole, int tp);
/* Makes the part of a place. layers: (n_layers) of the whole model; cost: (n_ops) bytes of weight that an operation
 * reads. LR_ESHAPE: heads that cannot be split so, with the counts that can; or too few layers for the stages. */
int lr_share_make(lr_share *out, const lr_program *whole, const lr_kv_layer *layers, int n_layers, const size_t *cost,
                  const lr_place *place, lr_error *err);
void lr_share_deinit(lr_share *);

/* In stage.c: cuts operations into pp stages. first: (pp + 1) operations; value: (pp + 1) what goes into a stage (-1:
 * the first one's nothing). */
int lr_share_stages(const lr_program *whole, int n_layers, const size_t *cost, int pp, int *first, int *value,
                    lr_error *err);

#endif
