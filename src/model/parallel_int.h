/* parallel_int.h - inside the model on several ranks: parallel.c (its life, KV) and parallel_run.c (forward passes). */
#ifndef LR_MODEL_PARALLEL_INT_H
#define LR_MODEL_PARALLEL_INT_H
#include "model/parallel.h"

typedef struct parallel {
    lr_model base; /* first; rank 0 gives it to the engine */
    lr_model *own; /* this rank's part */
    const lr_share *part;
    int id;
    lr_comm *world, *data; /* orders go over the run's world, rows and blocks over a group of their own */
    int own_width;         /* of the rows in res */
    int send_width;        /* of the logits' columns that rank 0 gets from here */
    int *columns_at;       /* (tp + 1) of the last stage's ranks */
    int max_rows, max_out, n_blocks[LR_KV_GROUPS], block_size;
    int64_t (*block_bytes)[LR_KV_GROUPS]; /* (ranks) */
    size_t all_block_bytes[LR_KV_GROUPS];
    size_t memory[3];   /* weights, KV, work of all ranks, after start */
    void *block;        /* one block of this rank's, for reading and writing */
    float *in;          /* (max_rows, part->in_width) */
    float *res;         /* (max_rows, width) for the next stage, or (max_out, own columns of the logits) */
    float *hid;         /* (max_out, n_embd) on the last stage */
    float *columns;     /* rank 0: (max_out, n_vocab) another rank's columns */
    lr_batch_seq *seqs; /* (max_rows) of a batch that came in */
    lr_batch_seq *micro_seqs;
    int32_t *out_rows; /* (max_out) of a micro-batch */
    int32_t *out_all;  /* (max_out) of a batch that came in */
    int32_t *tables;   /* of a batch that came in */
    size_t cap_tables;
    lr_batch_echo *echoes; /* of a batch that came in */
    int cap_echoes;
    lr_pack pack;
    lr_parallel_stats stats;
} parallel;

/* The division of the run. */
typedef struct lr_division {
    lr_place place;
    lr_comm *data;
    int micro_rows, threads;
} lr_division;
extern lr_division lr_parallel__run;

/* Rank 0: a whole forward pass. */
int lr_parallel__forward(lr_model *, const lr_batch *, lr_error *err);
/* Other ranks: reads a batch from an order, does its share of it. */
int lr_parallel__forwarded(parallel *, lr_pack *, lr_error *err);

#endif
