/* parallel.h - a model on several ranks, as the engine sees it: one model.
 *
 * lr_parallel_setup says once how the ranks of the run are divided: tp ranks a stage, pp stages. Then each model is
 * loaded by all ranks at once: each builds its part (lr_graph_set_place) and joins with it. On rank 0 the result is an
 * lr_model whose calls become orders to the others (dist.h) and its own share of the work; the other ranks sit in
 * lr_parallel_follow and do what they are told. What fails on one rank while loading or starting fails on all with that
 * rank's name; what fails in a forward pass ends the run.
 *
 * A forward pass: rank 0 sends the batch; with several stages it is cut into micro-batches of `micro_rows` rows or
 * more, which follow each other through the stages; the last stage's ranks send rank 0 their columns of the logits. KV
 * blocks have the same numbers on all ranks, each of which keeps its layers and heads of them; read and written (swap,
 * snapshots), a block is all ranks' bytes one behind the other.
 */
#ifndef LR_MODEL_PARALLEL_H
#define LR_MODEL_PARALLEL_H
#include "dist/dist.h"
#include "model/graph.h"

/* All ranks, once, after lr_dist_open. LR_EINVAL if tp * pp is not the number of ranks. micro_rows 0: 128. */
int lr_parallel_setup(int tp, int pp, int micro_rows, lr_error *err);
/* NULL before setup. Borrowed. */
const lr_place *lr_parallel_place(void);
/* Threads that fall to this rank where none are asked for: its cores over the ranks that share them. */
int lr_parallel_threads(void);

/* All ranks: takes over the part and makes it model `id` (1 ..) of the run. Rank 0 gets the model; on the others it is
 * kept for lr_parallel_follow and *out is NULL. On failure the part is still the caller's. */
int lr_parallel_join(lr_model **out, lr_model *part, int id, lr_error *err);

/* Other ranks: follows rank 0 until an order that is not for a model comes (LOAD, QUIT), or one of them was freed
 * (FREE): its kind, number and body (borrowed until the next call). Errors end the run. */
lr_order lr_parallel_follow(int *model, const char **body, size_t *len);

typedef struct lr_parallel_stats {
    int tp, pp;
    uint64_t passes, micro;  /* forward passes, micro-batches of them */
    uint64_t gathers, bytes; /* exchanges inside rank 0's stage, bytes that rank 0 sent in them */
    double forward;          /* seconds that rank 0 spent in forward passes */
    double gather;           /* of these, in exchanges, waiting for others included */
    double busy;             /* seconds that stages computed (exchanges included), added over the stages */
} lr_parallel_stats;

/* False if m is no model on several ranks. Share of bubbles: 1 - busy / (pp * forward). */
bool lr_parallel_get_stats(const lr_model *m, lr_parallel_stats *);
/* Rank 0's own part; m itself if it is on one rank. */
lr_model *lr_parallel_own(lr_model *m);

#endif
