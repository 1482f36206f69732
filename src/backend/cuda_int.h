/* cuda_int.h - inside the CUDA backend: device state, weights, KV store, compiled plans.
 *
 * cuda.c opens devices, cuda_weight.c and cuda_kv.c hold memory, cuda_plan.c turns a layer graph into steps (fusing
 * what the kernels can do at once), cuda_layout.c lays out their memory, cuda_run.c walks the steps, or has a captured
 * graph do it, cuda_step.c launches one step, cuda_product.c products with weights and of experts, cuda_lora.c has
 * adapters, cuda_blas.c is cuBLAS, opened when compute = "loose" wants it. All of it is compiled a second time against
 * the emulated runtime of kernels/cuda/emu.
 */
#ifndef LR_BACKEND_CUDA_INT_H
#define LR_BACKEND_CUDA_INT_H
#include "backend/backend.h"
#include "base/dtype.h"
#include "base/mem.h"
#include "cuda/kernels.h"

enum {
    LR_CUDA_SLACK = 256,     /* readable bytes behind a weight */
    LR_CUDA_BLAS_ROWS = 128, /* loose: products of so many rows go through bfloat16 and cuBLAS */
    LR_CUDA_GRAPHS = 48,     /* captured graphs of a plan */
    LR_CUDA_RANKS = 64,      /* ranks that exchange columns, at most */
    LR_CUDA_GRAPH_ROWS = 256 /* decode steps of up to so many rows are captured */
};

typedef struct cuda_bytes cuda_bytes; /* bytes on the device that weights share */
typedef struct cuda_blas cuda_blas;

typedef struct cuda_backend {
    lr_backend base;
    int index; /* of the device */
    int n_sm;
    lr_compute compute;
    lr_cu_math math;
    cudaStream_t stream;
    void *pin[2]; /* for uploads */
    cudaEvent_t pin_free[2];
    int pin_next;
    cuda_bytes *loaded;
    cuda_blas *blas;
    int n_sites; /* weights of products so far */
    int ranks;   /* no adapter's rank is higher; a multiple of 8 */
    size_t bytes_weights, bytes_kv, bytes_work;
    char text[400];
} cuda_backend;

struct lr_weight {
    int type, n, k; /* n rows of k values, of each expert */
    int n_experts;  /* 0: a matrix, and no more */
    int site;       /* its number among weights of products, for adapters; -1 = it is none */
    size_t row_bytes;
    void *data; /* on the device */
    cuda_bytes *bytes;
};

typedef struct cuda_kv_layer {
    lr_kv_layer shape;
    int k_type, v_type; /* as the kernels name them */
    size_t k_at, v_at;  /* in a block of its group */
} cuda_kv_layer;

struct lr_kv_store {
    int n_layers, block_size;
    cuda_kv_layer *layers;
    int n_blocks[LR_KV_GROUPS];
    size_t block_bytes[LR_KV_GROUPS];
    void *base[LR_KV_GROUPS];
    int failed; /* cudaError of a copy that had nobody to tell */
};

struct lr_lora {
    void *mem; /* on the device: lr_cu_adapter_part by site, and what they point to */
    size_t bytes;
    int n_sites;
};

/* ---- plans ---- */

/* A piece of activation memory: rows of a value as float32, or packed for products. Pieces whose lives do not meet
 * share memory. */
typedef struct cuda_piece {
    int width, type; /* type: of the weights that a packed one is for; -1 = float32 */
    bool narrow;     /* rows: those whose logits are wanted */
    bool experts;    /* a packed one is for products of experts, which are none of cuBLAS's */
    int times;       /* rows of slots: n_used of the route; else 1 */
    size_t fixed;    /* so many bytes in place of rows; 0 = rows */
    int def, last;   /* steps */
    size_t offset, bytes;
    char *at;
} cuda_piece;

/* Steps beside the operations of lr_op_kind. */
enum { STEP_PACK = 100, STEP_ROPE_KV };

typedef struct cuda_step {
    int kind; /* lr_op_kind or STEP_... */
    bool narrow;
    int in[3]; /* pieces, -1 = none. NORM: in[1] is added first; ROPE_KV: q, k, v; LINEAR: in[0] is packed or float32;
                * EXPERTS, MIX, GATHER of slots: in[2] are the slots, which ROUTE tells in out[1] */
    int out[LR_CU_JOINT]; /* float32 pieces, -1 = none; more than one of joint products */
    int sum;              /* NORM: piece of in[0] + in[1] */
    int pack;             /* packed piece that it fills as well */
    int width;
    int times; /* rows of out, as the piece's */
    int n_w;   /* LINEAR, EXPERTS: products in one */
    const lr_weight *w[LR_CU_JOINT];
    const float *bias[LR_CU_JOINT]; /* device */
    bool glu, of_rows;              /* as lr_cu_product's */
    bool adapts;                    /* LINEAR: adapters may add to it */
    lr_cu_choice choice;            /* ROUTE */
    lr_cu_slots slots;              /* ROUTE, and those that read them: its counts */
    lr_cu_norm norm;                /* NORM */
    lr_cu_norm head_norm[2];
    bool has_norm[2], has_rope[2]; /* ROPE_KV: of q and k */
    lr_cu_rope rope[2];            /* ROPE: [0]; ROPE_KV: q, k */
    lr_cu_attn attn;
    lr_cu_parts parts; /* PART, CONCAT, SLICE */
    struct {
        lr_comm *comm;
        int at[LR_CUDA_RANKS + 1]; /* first column of each rank, and the width */
        const int32_t *at_dev;     /* the same on the device */
    } gather;                      /* GATHER */
    bool by_row;                   /* MUL: in[1] is one value a row */
    bool turn_q;                   /* ATTN: queries have not been turned as the keys are */
    const float *center;           /* ROPE_KV: taken off all keys, or NULL */
    int layer, act;
    float scale;
} cuda_step;

/* Where a batch's numbers lie in the one small copy to the device, in int32 from its start. */
typedef struct cuda_meta {
    int rows, outs, seqs, echoes; /* as padded */
    size_t tokens, pos, held, seq, out_rows, tiles, echo_row, echo_pos, echo_seq;
    size_t lora, lora_out; /* addresses, of batches with adapters */
    size_t table_at[LR_KV_GROUPS], table[LR_KV_GROUPS];
    size_t n; /* all */
} cuda_meta;

/* What one walk over the steps needs to know. */
typedef struct cuda_walk {
    const cuda_meta *meta;
    int max_slots;
    int n_narrow, n_wide; /* tiles, the narrow ones first */
    int ranks;            /* rows may have adapters of up to this rank; 0 = none has one */
} cuda_walk;

typedef struct cuda_graph {
    int rows, max_slots, ranks;
    cudaGraphExec_t exec;
    uint64_t used;
} cuda_graph;

/* Draws of tokens. */
typedef struct cuda_draws {
    void *work; /* copies of so many rows */
    int rows;
    size_t work_bytes;
    void *dev;  /* what is asked for, then the results */
    char *host; /* the same, pinned */
    size_t cap; /* bytes of both */
} cuda_draws;

struct lr_plan {
    cuda_backend *be;
    const lr_kv_store *kv;
    int max_rows, max_out;
    int n_pieces;
    cuda_piece *pieces;
    int n_steps;
    cuda_step *steps;
    int held;                            /* rows of the table of learned positions, 0 = none */
    int logits, hidden, features, input; /* pieces, -1 = none */
    bool partial;                        /* the result is all rows: what the next part of the model gets */
    int n_vocab, n_hidden, n_features;
    int slots_cap;              /* no sequence is longer: the KV store has no more slots */
    int tile_narrow, tile_wide; /* rows of attention tiles */
    void *work;                 /* all pieces */
    size_t work_bytes;
    void *consts;  /* frequencies and sinks */
    void *scratch; /* of products */
    size_t scratch_bytes;
    void *parts; /* of attention */
    size_t parts_bytes;
    void *dense; /* loose: a weight as bfloat16 */
    size_t dense_bytes;
    void *exchange;  /* what comes from other ranks, before it is put in place */
    void *staged;    /* pinned: on its way through a carrier that wants host memory */
    cudaEvent_t met; /* the carrier's stream and ours wait for each other by it */
    size_t exchange_bytes;
    lr_error exchange_err; /* what an exchange that failed has said */
    int exchange_failed;
    void *echo; /* keys and values of echoed rows */
    size_t echo_bytes;
    int n_sites; /* products are of weights with lower numbers */
    void *lora;  /* adapters: products of a rank's width, then ... */
    void *apart; /* ... gate and partner of a GLU, which is behind what they are added to */
    size_t lora_bytes, apart_bytes;
    size_t counted;     /* in bytes_work of the backend */
    bool dry;           /* nothing is allocated on the device: only `asked` is wanted */
    size_t asked;       /* bytes of the device's memory, so far */
    int32_t *meta_host; /* pinned */
    int32_t *meta_dev;
    size_t meta_cap; /* int32 */
    void *bounce;    /* pinned: small results on their way to the host */
    size_t bounce_bytes;
    cuda_draws draws;
    char *drawn;    /* (max_out) rows of the batch that a draw takes */
    bool under_way; /* launched, and not finished */
    cuda_graph graphs[LR_CUDA_GRAPHS];
    int n_graphs;
    uint64_t clock;
    bool no_graphs;
};

/* ---- cuda.c ---- */

/* code: a cudaError_t; `what` is what was being done, or for what memory was asked. */
int lr_cuda_failed(const cuda_backend *, int code, const char *what, lr_error *err);
/* Device memory; a full device is LR_ENOMEM with the bytes that are missing. */
int lr_cuda_alloc(cuda_backend *, void **out, size_t bytes, const char *what, lr_error *err);
/* Page-locked memory of the host, for copies. */
int lr_cuda_pin(cuda_backend *, void **out, size_t bytes, const char *what, lr_error *err);
void lr_cuda_room(size_t *free_bytes, size_t *total);

/* ---- cuda_weight.c ---- */

int lr_cuda_weight_new(lr_backend *, const lr_tensor *, bool linear, bool embed, lr_weight **out, lr_error *err);
void lr_cuda_weight_free(lr_backend *, lr_weight *);
/* Host bytes to the device through pinned memory; the source may go at the return, the copy may still be under way. */
int lr_cuda_upload(cuda_backend *, void *dst, const void *src, size_t n, lr_error *err);
void lr_cuda_upload_close(cuda_backend *);

/* ---- cuda_kv.c ---- */

/* A store without memory. */
int lr_cuda_kv_shape(const lr_kv_spec *, lr_kv_store **out, lr_error *err);
int lr_cuda_kv_new(lr_backend *, const lr_kv_spec *, lr_kv_store **out, lr_error *err);
void lr_cuda_kv_free(lr_backend *, lr_kv_store *);
void lr_cuda_kv_copy(lr_backend *, lr_kv_store *, int group, int dst, int src);
size_t lr_cuda_kv_block_bytes(const lr_backend *, const lr_kv_store *, int group);
void lr_cuda_kv_read(lr_backend *, lr_kv_store *, int group, int block, void *dst);
void lr_cuda_kv_write(lr_backend *, lr_kv_store *, int group, int block, const void *src);

/* ---- cuda_plan.c ---- */

int lr_cuda_compile(lr_backend *, const lr_program *, const lr_kv_store *, int max_rows, int max_out, lr_plan **out,
                    lr_error *err);
void lr_cuda_plan_free(lr_backend *, lr_plan *);
/* What compile would allocate on the device, echoes' memory included. */
size_t lr_cuda_work(lr_backend *, const lr_program *, const lr_kv_spec *, int max_rows, int max_out);
/* lr_cuda_alloc for the plan: counted, and left out if it is dry. */
int lr_cuda_plan_alloc(lr_plan *, void **out, size_t bytes, const char *what, lr_error *err);
/* Numbers of rows on both sides of each change of form. */
enum { LR_CUDA_SIZES = 5 };
extern const int lr_cuda_sizes[LR_CUDA_SIZES];
/* The form in which m rows go into a product with weights of `type`, of experts or not. */
lr_cu_form lr_cuda_form(const cuda_backend *, int type, bool experts, int m);
/* A step's product, without addresses of rows. */
lr_cu_product lr_cuda_product(const cuda_step *);

/* ---- cuda_layout.c ---- */

/* Memory for all pieces, and workspaces. */
int lr_cuda_layout(lr_plan *, lr_error *err);

static inline void *lr_cuda_at(const lr_plan *p, int piece) { return piece >= 0 ? p->pieces[piece].at : NULL; }

/* ---- cuda_lora.c ---- */

int lr_cuda_lora_new(lr_backend *, const lr_lora_part *parts, int n, lr_lora **out, lr_error *err);
void lr_cuda_lora_free(lr_backend *, lr_lora *);
bool lr_cuda_adapted(const lr_batch *); /* has a sequence an adapter? */
/* Memory for batches with adapters, made at the first. */
int lr_cuda_lora_room(lr_plan *, const lr_batch *, lr_error *err);
void lr_cuda_lora_close(lr_plan *);
/* Writes which rows have which adapter, and of those whose logits are wanted. */
void lr_cuda_lora_rows(const lr_batch *, const cuda_meta *, int32_t *host);

/* ---- cuda_product.c ---- */

/* m: rows of the step's input. */
cudaError_t lr_cuda_multiply(const lr_plan *, const cuda_step *, int m, const cuda_walk *);
/* rows: token rows. live: what is < 0 for padding. */
cudaError_t lr_cuda_route(const lr_plan *, const cuda_step *, int rows, const int32_t *live);
cudaError_t lr_cuda_mix(const lr_plan *, const cuda_step *, int rows, lr_cu_out out);
/* Where slots of so many token rows lie. */
lr_cu_slots lr_cuda_slots(const lr_plan *, const cuda_step *, int piece, int rows);

/* ---- cuda_step.c ---- */

/* Puts one step on the stream. */
cudaError_t lr_cuda_step(lr_plan *, const lr_kv_store *, const cuda_step *, const cuda_walk *);
/* What a step is, in words, for errors. */
void lr_cuda_step_text(const lr_plan *, const cuda_step *, char *buf, size_t cap);

/* ---- cuda_run.c ---- */

int lr_cuda_run(lr_backend *, lr_plan *, lr_kv_store *, const lr_batch *, lr_error *err);
int lr_cuda_launch(lr_backend *, lr_plan *, lr_kv_store *, const lr_batch *, lr_error *err);
/* Makes room for the numbers of most batches: more is made when tables that share blocks need it. */
int lr_cuda_meta_open(lr_plan *, lr_error *err);
int lr_cuda_finish(lr_backend *, lr_plan *, const lr_batch *, lr_error *err);
/* Forgets captured graphs: what they point to has moved. */
void lr_cuda_graphs_drop(lr_plan *);

/* ---- cuda_draw.c ---- */

/* Makes what draws need beside the logits, so that a device that is full says so when the model is started. */
int lr_cuda_draw_open(lr_plan *, lr_error *err);
/* Draws from the logits that the stream is about to have, and waits for the results. */
int lr_cuda_draw(lr_plan *, const lr_draws *, lr_error *err);
void lr_cuda_draw_close(lr_plan *);

/* ---- cuda_blas.c ---- */

/* Opens cuBLAS; LR_ENOTFOUND if it is not installed. */
int lr_cuda_blas_open(cuda_backend *, lr_error *err);
void lr_cuda_blas_close(cuda_backend *);
/* y (m, n) = x (m, k) . w (n, k)^T, bfloat16 in, float32 out. */
cudaError_t lr_cuda_blas_product(cuda_backend *, const void *w, const void *x, int m, int n, int k, float *y);

#endif
