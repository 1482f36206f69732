/* cpu_int.h - inside the CPU backend: weights, KV store, compiled plans. See cpu.c, cpu_plan.c, cpu_run.c, cpu_gemm.c.
 *
 * A plan is a list of stages; each begins when the one before is done. Five kinds:
 *   ROWS  a chain of row-local operations, done row by row: no barrier inside the chain
 *   GEMM  matrix products with the same number of rows and ready inputs; a gate/up pair with its GLU is one item
 *   ATTN  attention of one layer: tasks are (gang of tiles, KV head), a tile being rows of one sequence
 *   SORT  the slots of a mixture of experts: one task (cpu_moe.c)
 *   COMM  an exchange with other ranks: thread 0 does it, all put the columns in their places
 * Each stage is cut into tasks that threads take as they are free; who does a task never changes its result.
 */
#ifndef LR_BACKEND_CPU_INT_H
#define LR_BACKEND_CPU_INT_H
#include "backend/backend.h"
#include "base/pool.h"
#include "base/slab.h"
#include "cpu/cpu.h"
#include <stdatomic.h>

typedef struct cpu_backend {
    lr_backend base;
    lr_pool *pool;
    const lr_cpu_kernels *k;
    bool exact, bf16; /* LR_COMPUTE_F32, LR_COMPUTE_BF16 */
    bool fine;        /* activations of 11 bits, or 14 */
    int observed;     /* weights with `seen` */
    lr_slab *slabs;   /* packed weights */
    size_t bytes_weights, bytes_kv, bytes_work;
    char text[128];
} cpu_backend;

struct lr_weight {
    int type, n, k;   /* n rows of k values */
    int n_mats;       /* so many times, of linear weights: one matrix an expert */
    size_t mat_bytes; /* from one packed matrix to the next */
    const char *rows; /* the file's rows (mapped), row_bytes apart */
    size_t row_bytes;
    float *vec;        /* vectors (norms, biases) as float */
    lr_gemm_w gemm;    /* linear weights */
    void *packed;      /* owned, or NULL */
    lr_observed *seen; /* borrowed, or NULL */
    size_t bytes;      /* owned */
};

struct lr_kv_store {
    lr_kv_layer *layers;
    size_t *offset;         /* (n_layers) of a layer's K part in a block; V follows at offset + part */
    size_t *part;           /* (n_layers) bytes of a K part */
    int *k_types, *v_types; /* (n_layers) lr_kv_layer_type */
    int n_layers, block_size;
    int n_blocks[LR_KV_GROUPS];
    size_t block_bytes[LR_KV_GROUPS];
    char *base[LR_KV_GROUPS]; /* mmap'ed lazily: untouched blocks take no memory */
};

/* Operations that exist only inside a plan. */
enum {
    OP_QUANT = 100,
    OP_ROPE_TABLE,
    OP_SORT,        /* in[0]: what LR_OP_ROUTE chose; out: a value without content, which says that slots are known */
    OP_SPREAD,      /* in[0]: token rows, in[1]: of OP_SORT; out = slots, copies of their rows */
    OP_SPREAD_QUANT /* the same, quantized */
};

typedef struct plan_op {
    int kind;       /* lr_op_kind or OP_... */
    int in[2], out; /* value ids; OP_QUANT: out = id of the quantized value; LINEAR: in[1] = quantized input or -1 */
    const lr_weight *w, *bias;
    float eps, scale;
    int group, act, rope; /* rope: index into ropes */
    bool layer_norm;
    int layer, n_heads, n_kv_heads, head_dim, window;
    float softcap;
    const float *sinks; /* owned by the plan */
    float *center;      /* KV: owned; what is taken off the keys (kv_put), or NULL */
    int quant;          /* ATTN, GLU: quantized value that it fills as well, -1 = none */
    int route;          /* ROUTE, SORT, SPREAD, EXPERTS, MIX, GATHER of slots: index into routes; else -1 */
    int first;          /* SLICE */
    lr_comm *comm;      /* GATHER */
    int *at;            /* GATHER: (comm->size + 1), owned; with a route: experts, not columns */
    int n_part;         /* PART, CONCAT (layer_norm: shared) */
    int lora;           /* LINEAR: which of its stage's products it is */
    int stage;
    lr_route chosen; /* ROUTE */
} plan_op;

typedef struct gemm_item {
    int a, b;        /* ops; b: the second product of a GLU pair, or -1 */
    int glu;         /* GLU op, or -1 */
    int first_block; /* of lr_plan.glu_done, if the GLU is quantized to 14 bits */
} gemm_item;

typedef enum stage_kind { STAGE_ROWS, STAGE_GEMM, STAGE_ATTN, STAGE_SORT, STAGE_COMM } stage_kind;

typedef struct stage {
    stage_kind kind;
    bool narrow;  /* works on the wanted rows */
    int route;    /* ROWS: on the slots of this route; -1 = on token rows */
    int first, n; /* ROWS, ATTN, COMM: order[first..]; GEMM: items[first..] */
} stage;

typedef struct rope_table {
    int n_rot, n_heads, head_dim;
    bool interleaved;
    double *freq; /* (n_rot/2) */
    float attn_scale;
    float *cs; /* (max_rows, n_rot) cos, sin pairs */
} rope_table;

typedef struct value_info {
    int width;
    bool narrow, quant; /* quant: int8 rows with scales */
    int route;          /* its rows are slots of this route; -1 = token rows */
    bool wide;          /* of 14 bits */
    int def, last;      /* stages */
    int in_place;       /* lies where this value did, which only the operation that makes it reads; -1 = no */
    size_t offset, bytes;
} value_info;

enum { MOE_PIECE = 256 }; /* most slots of a task */

typedef struct moe_piece {
    int expert, first, n; /* expert: among this rank's; slots */
} moe_piece;

/* What one LR_OP_ROUTE chose for the batch at hand. A rank that has some of the experts works on their slots alone;
 * they are neighbours among those of all ranks, which MIX sees. */
typedef struct moe_route {
    int n_experts, n_used;
    int from, n_own; /* this rank's experts */
    bool narrow;
    int n_slots;   /* this rank's */
    int *slot_row; /* (n_slots) */
    int *slot_of;  /* (rows, n_used) among all ranks' slots */
    int *start;    /* (n_experts + 1) first slot of each expert among all ranks' */
    moe_piece *pieces;
    int n_pieces;
} moe_route;

typedef struct attn_tile {
    int seq, row, n;
    int next; /* tile of the same gang, -1 = none */
} attn_tile;

/* Tiles whose sequences have the same blocks at positions from .. to - 1 of a block group (cpu_attn.c). */
typedef struct attn_gang {
    int first, last_tile; /* tiles, linked by next */
    int rows;
    int from[LR_KV_GROUPS], to[LR_KV_GROUPS];
    int pos, last_pos; /* smallest position of a tile's first row, largest of a last row */
} attn_gang;

typedef struct share share;

struct lr_plan {
    cpu_backend *be;
    int max_rows, max_out;
    int n_values;
    value_info *values;
    float **ptr; /* (n_values) */
    lr_qact *q;  /* (n_values) of quantized ones */
    int n_ops;
    plan_op *ops;
    int *order; /* op numbers by stage */
    int n_order;
    gemm_item *items;
    int n_items;
    stage *stages;
    int n_stages;
    rope_table *ropes;
    int n_ropes;
    float **sinks;
    int n_sinks;
    moe_route *routes;
    int n_routes;
    int logits, hidden;
    int features;    /* value id, -1 = none */
    float *exchange; /* (rows of the largest gathered value): what comes from the ranks, before it is put in place */
    size_t exchange_cap; /* floats */
    int *exchange_bytes; /* (ranks) */
    char *work;
    size_t work_bytes;
    int *row_pos, *row_seq, *row_echo; /* (max_rows) position, sequence, echoes before those of the row */
    attn_tile *tiles;                  /* (max_rows) */
    int n_tiles;
    attn_gang *gangs;         /* (max_rows) */
    int n_gangs, gang_rows;   /* most rows of tiles that are put together */
    int kv_heads;             /* of the layer that has the fewest; 0 = no attention */
    int window[LR_KV_GROUPS]; /* positions that the group's layers look back over, 0 = all */
    float *lora;  /* (products of a stage, max_rows, LR_LORA_RANK_MAX) rows through the adapters' first factors */
    float *parts; /* attention of long sequences in pieces: ATTN_PARTS floats */
    struct share {
        _Alignas(64) atomic_int next;
        int end;
    } * shares;           /* (threads) of the units of a product with few rows */
    atomic_int *glu_done; /* columns of each block of 14 bits that are there, or 0 */
    char *scratch;        /* attention scratch, one a thread */
    size_t scratch_bytes;
};

enum { ATTN_PARTS = 1 << 18 };

int lr_cpu_compile(lr_backend *, const lr_program *, const lr_kv_store *, int max_rows, int max_out, lr_plan **out,
                   lr_error *err);
/* Sets the centers of the plan's KV operations. */
int lr_cpu_centers(lr_plan *, lr_error *err);
void lr_cpu_plan_free(lr_backend *, lr_plan *);
/* Whether the logits are a product's: their peaks are taken where they are written. */
bool lr_cpu_plan_peaks(const lr_plan *);
/* cpu_lora.c. The first factor of row `row` of a product's input, and the second one added to columns j0..j1-1 of its
 * output y; both do nothing where l is NULL or has nothing for the product. */
int lr_cpu_lora_new(lr_backend *, const lr_lora_part *parts, int n, lr_lora **out, lr_error *err);
void lr_cpu_lora_free(lr_backend *, lr_lora *);
void lr_cpu_lora_down(const lr_plan *, const plan_op *, const lr_lora *l, int row);
void lr_cpu_lora_up(const lr_plan *, const plan_op *, const lr_lora *l, int row, float *y, int j0, int j1);

/* cpu_moe.c. A row's choice: out as LR_OP_ROUTE's. */
void lr_cpu_route(const lr_route *, const float *logits, const float *bias, float *out);
/* Sets slots and pieces from the rows' choices. */
void lr_cpu_sort(moe_route *, const float *chosen, int rows);
void lr_cpu_mix(const moe_route *, const float *chosen, const float *slots, int row, float *y, int width);
/* A new route of the plan: its index, or an error. */
int lr_cpu_route_new(lr_plan *, const lr_route *, bool narrow, lr_error *err);
void lr_cpu_routes_free(lr_plan *);

/* cpu_attn.c. Cuts a batch into tiles and gangs. */
void lr_cpu_lay_tiles(lr_plan *, const lr_kv_store *, const lr_batch *);
/* Long sequences in a small batch leave threads idle if a task is a whole (gang, head): then each is cut into the
 * kernels' chunks of positions. The most chunks of any task, or 0 where cutting does not pay. */
int lr_cpu_attn_pieces(const lr_plan *, const lr_kv_store *, const lr_batch *, const plan_op *);
/* How many tasks an attention has; joins: those that put pieces together, after the others. */
int lr_cpu_attn_tasks(const lr_plan *, const plan_op *, int n_pieces, bool joins);
void lr_cpu_attn_task(const lr_plan *, const lr_kv_store *, const lr_batch *, const plan_op *, int n_pieces, bool joins,
                      int task, int thread);

int lr_cpu_run(lr_backend *, lr_plan *, lr_kv_store *, const lr_batch *, lr_error *err);

#endif
