/* backend.h - what a device does for a model: hold weights and KV blocks, compile a layer graph, run batches.
 *
 * A model is a list of lr_op over values. A value is a float32 matrix (rows, width); its rows are the batch's token
 * rows, or, behind LR_OP_ROWS, only the rows whose logits somebody wants. A backend compiles the list once (fusing what
 * it likes) and then runs it on batches. Its promise: a row's result is bit-identical whatever the other rows, the
 * chunk it came in, the pages its KV lies on and the number of threads; every sum is taken in an order that depends on
 * the row alone.
 *
 * Mixture of experts: LR_OP_ROUTE chooses n_used experts for each row. LR_OP_EXPERTS leads from token rows to slots,
 * one for each chosen expert of each row, whose order is the backend's own; values of slots (lr_program.route says
 * which) have n_used times as many rows. Row-local operations work on them as on others, a further LR_OP_EXPERTS takes
 * each slot to its own expert again, and LR_OP_MIX leads back to token rows. An expert that no row chose is not read.
 *
 * KV memory is paged. The backend owns the storage of n_blocks blocks of block_size token slots for all layers; who
 * owns a block is src/kv's business. Layers with a sliding window may live in a block group of their own (own pool,
 * own tables), so that they can free what they no longer see. Called by the engine thread only.
 */
#ifndef LR_BACKEND_BACKEND_H
#define LR_BACKEND_BACKEND_H
#include "base/act.h"
#include "base/comm.h"
#include "base/draw.h"
#include "base/error.h"
#include "base/pool.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LR_KV_GROUPS 2 /* block groups of a model: 0 = layers that see everything, 1 = layers with a window */

/* A tensor in host memory, usually a view of a mapped file. Row-major: ne[0] values a row, ne[1] rows, ... */
typedef struct lr_tensor {
    const char *name;
    int type; /* lr_dtype */
    int n_dims;
    int64_t ne[4];
    const void *data; /* NULL for a tensor that is only planned (memory estimates) */
    size_t size;      /* bytes */
    int64_t first;    /* row (or value, of a vector) of the named tensor that data begins with */
} lr_tensor;

typedef struct lr_weight lr_weight; /* a tensor as the backend keeps it (repacked, or as it is) */

typedef enum lr_op_kind {
    LR_OP_EMBED,    /* out[r] = w[token[r]] * scale */
    LR_OP_EMBED_AT, /* out[r] = w[position of r], held at the last row of w (learned positions) */
    LR_OP_NORM,     /* out = in / rms(in) * w; or layer norm with w and bias; over groups of `group` values (a head) */
    LR_OP_LINEAR,   /* out = in . w^T + bias */
    LR_OP_ROPE,     /* rotate the first n_rot values of each head by the row's position */
    LR_OP_KV,       /* write in[0] (keys) and in[1] (values) of each row to its KV slot of `layer`; no output */
    LR_OP_ATTN,     /* out = attention of in[0] (queries) over the KV of `layer` up to the row's own position */
    LR_OP_ADD,      /* out = in[0] + in[1] */
    LR_OP_MUL,      /* out = in[0] * in[1]; in[1] may be one value a row */
    LR_OP_ACT,      /* out = act(in[0]) */
    LR_OP_GLU,      /* out = act(in[0]) * in[1] */
    LR_OP_SCALE,    /* out = in * scale */
    LR_OP_SOFTCAP,  /* out = scale * tanh(in / scale) */
    LR_OP_INPUT,    /* out = the input rows of the batch */
    LR_OP_ROWS,     /* out = the rows of in whose logits are wanted */
    LR_OP_PART,     /* out = the values first .. first+n-1 of each of n_heads equal parts of in[0] */
    LR_OP_CONCAT,  /* out = for each of n_heads parts: the part of in[0], then that of in[1] (or in[1] as a whole, if it
                    * is one part for all; or zeros, if it is -1), n values of it */
    LR_OP_ROUTE,   /* in[0]: logits of experts; out = (rows, 2 n_used): numbers of the chosen, then their weights */
    LR_OP_EXPERTS, /* out = in[0] . w[e]^T + bias[e], e the slot's expert in route in[1]; w is (n_experts, n, k), bias
                    * (n_experts, n). in[0]: token rows, or slots of the same route */
    LR_OP_MIX,     /* out = the sum over a row's slots in[0], times their weights in in[1], by rank */
    LR_OP_SLICE,   /* out = the columns of in from `first` on, as many as out is wide */
    LR_OP_GATHER,  /* out = the columns that all ranks of the group have in their in, side by side; of slots: those of
                    * all ranks' experts, which MIX needs if a rank has not all of them */
} lr_op_kind;

/* The kind's name, for messages; no default, so that the compiler asks for that of a new kind. */
static inline const char *lr_op_name(lr_op_kind kind)
{
    switch (kind) {
    case LR_OP_INPUT:
        return "input";
    case LR_OP_SLICE:
        return "slice";
    case LR_OP_PART:
        return "part";
    case LR_OP_CONCAT:
        return "concat";
    case LR_OP_GATHER:
        return "gather";
    case LR_OP_EMBED:
        return "embed";
    case LR_OP_EMBED_AT:
        return "embed_at";
    case LR_OP_NORM:
        return "norm";
    case LR_OP_LINEAR:
        return "linear";
    case LR_OP_ROPE:
        return "rope";
    case LR_OP_KV:
        return "kv";
    case LR_OP_ATTN:
        return "attention";
    case LR_OP_ADD:
        return "add";
    case LR_OP_MUL:
        return "mul";
    case LR_OP_ACT:
        return "act";
    case LR_OP_GLU:
        return "glu";
    case LR_OP_SCALE:
        return "scale";
    case LR_OP_SOFTCAP:
        return "softcap";
    case LR_OP_ROWS:
        return "rows";
    case LR_OP_ROUTE:
        return "route";
    case LR_OP_EXPERTS:
        return "experts";
    case LR_OP_MIX:
        return "mix";
    }
    return "?";
}

typedef struct lr_rope {
    int n_heads, head_dim, n_rot; /* n_rot <= head_dim, even */
    bool interleaved;             /* pairs (2i, 2i+1); else (i, i + n_rot/2) */
    float base, freq_scale;       /* angle = pos * freq_scale * base^(-2i/n_rot) / factor[i] */
    float attn_scale;             /* multiplies sin and cos (YaRN); 1 otherwise */
    const float *factors;         /* (n_rot/2) or NULL; borrowed until compile returns */
} lr_rope;

enum { LR_EXPERTS_MAX = 1024 };

typedef enum lr_gate {
    LR_GATE_SOFTMAX,        /* over all experts, before choosing */
    LR_GATE_SIGMOID,        /* of each */
    LR_GATE_SOFTMAX_CHOSEN, /* over the chosen, whose logits are the highest */
} lr_gate;

/* The n_used experts of the highest score (of two equal ones the lower number), by descending score. A score is the
 * gate of the logit, plus the op's bias, if there is one, which counts for choosing only. */
typedef struct lr_route {
    int n_experts, n_used; /* n_used <= n_experts <= LR_EXPERTS_MAX */
    lr_gate gate;
    bool normalize;              /* weights are divided by their sum (SOFTMAX, SIGMOID) */
    float scale;                 /* multiplies the weights */
    int n_groups, n_groups_used; /* n_groups > 0: only experts of the n_groups_used best of n_groups equal parts */
    int group_best;              /* a group's score is the sum of its so many best scores */
    int from, n_own;             /* the experts that this rank computes; 0 = all */
} lr_route;

typedef struct lr_attn {
    int layer;               /* KV layer, 0-based over the layers that have KV */
    int n_heads, n_kv_heads; /* n_heads is a multiple of n_kv_heads */
    int head_dim;            /* of keys, queries and values */
    float scale;             /* multiplies q.k */
    float softcap;           /* cap * tanh(score / cap); 0 = none */
    int window;              /* a row sees positions > pos - window; 0 = all */
    const float *sinks;      /* (n_heads) extra logits in the denominator, or NULL; borrowed until compile returns */
} lr_attn;

typedef struct lr_op {
    lr_op_kind kind;
    int in[2], out;        /* value ids, -1 = none */
    const lr_weight *w;    /* EMBED, EMBED_AT, NORM, LINEAR, EXPERTS */
    const lr_weight *bias; /* NORM, LINEAR, ROUTE, EXPERTS; NULL = none */
    union {
        struct {
            float eps;
            int group;
            bool layer_norm;
        } norm; /* group divides the width */
        lr_rope rope;
        lr_attn attn;
        lr_route route;
        struct {
            int n_heads, first, n;
            bool shared; /* CONCAT: in[1] is one part for all heads */
        } part;          /* PART, CONCAT */
        lr_act act;      /* ACT, GLU */
        float scale;     /* EMBED, SCALE, SOFTCAP */
        int first;       /* SLICE */
        struct {
            lr_comm *comm; /* borrowed as long as the plan lives */
            const int *at; /* (comm->size + 1) first column (of slots: expert) of each rank, and behind the last;
                              borrowed until compile returns */
        } gather;
    } u;
} lr_op;

/* A compiled layer graph's description: values, ops in execution order, and the id of the logits. */
typedef struct lr_program {
    int n_values;
    const int *width; /* (n_values) */
    const int *route; /* (n_values) the value of the LR_OP_ROUTE whose slots a value's rows are; -1 = token rows */
    int n_ops;
    const lr_op *ops;
    int logits; /* value id: (wanted rows, vocabulary); if partial: what the next part of the model gets as input */
    int hidden; /* value id of the final normalised rows (embeddings), -1 = none */
    bool partial;
    int features; /* 1 + the id of a value of token rows that lr_batch.features wants, 0 = none */
} lr_program;

/* The KV of a model: one entry a KV layer. */
typedef struct lr_kv_layer {
    int n_kv_heads, head_dim;
    int group; /* block group, 0 .. LR_KV_GROUPS-1 */
} lr_kv_layer;

typedef struct lr_kv_spec {
    int n_layers;
    const lr_kv_layer *layers;
    int type;                   /* of keys: LR_F32, LR_F16, LR_BF16, LR_Q8_0, LR_Q4_0, LR_KV_FP8; see below */
    int value_type;             /* of values */
    int block_size;             /* token slots a block, 1..256 */
    int n_blocks[LR_KV_GROUPS]; /* 0 = the group is not in use */
    int first_layer;            /* number of layers[0] in the whole model (the types of layers go by it) */
} lr_kv_spec;

/* The type that a layer's keys and values have in a store of `type`. Q8_0 and Q4_0 leave the first layer at F16: its
 * keys stand for single tokens, not yet mixed, and small errors in them cost more than those of all other layers
 * together. */
int lr_kv_layer_type(int type, int layer);
/* Can keys or values have this type? */
bool lr_kv_type_good(int type);
/* A type that only KV has, on GPUs: a byte a value, 4 bits of exponent and 3 of mantissa, up to 448. */
#define LR_KV_FP8 60
/* The types' names: lr_dtype's, and "fp8"; -1 and NULL for others. */
int lr_kv_type_parse(const char *name);
const char *lr_kv_type_text(int type);

typedef struct lr_lora lr_lora; /* a low-rank adapter as the backend keeps it */

/* Of one LINEAR weight (n, k): a (rank, k), b (n, rank), not aligned. */
typedef struct lr_lora_part {
    const lr_weight *w;
    int rank;
    float scale;
    const float *a, *b;
} lr_lora_part;
enum { LR_LORA_RANK_MAX = 256 };

/* One sequence's share of a batch: rows row .. row+n-1 are its tokens at positions pos .. pos+n-1. Their KV slots are
 * in blocks table[g][p / block_size], all positions before pos hold valid KV or get it by an echo. */
typedef struct lr_batch_seq {
    int row, n;
    int pos;
    const int32_t *table[LR_KV_GROUPS];
    const lr_lora *lora; /* adds to the products of these rows; NULL = none */
} lr_batch_seq;

/* The keys and values of a row go to the slot of its position in another table as well. That is how a batch holds a
 * tree of drafts: each branch is a sequence of its own, at the positions of its depths, whose table shares the blocks
 * of what is committed and has blocks of its own behind; its ancestors, rows of other sequences of the batch, are
 * echoed into them. So a row sees the committed tokens and its ancestors and nothing else, each at its position, and
 * its result is that of the same path in a plain sequence, whatever kernels there are. In each layer all echoes are
 * written before any row attends. Only for backends with `echoes`. */
typedef struct lr_batch_echo {
    int row;
    const int32_t *table[LR_KV_GROUPS];
} lr_batch_echo;

#define LR_LISTED 32 /* logits that a bit of a shortlist stands for */
static inline bool lr_is_listed(const uint32_t *shortlist, int id)
{
    return shortlist[id / (32 * LR_LISTED)] >> id / LR_LISTED % 32 & 1;
}

typedef struct lr_batch {
    int n_rows;               /* <= max_rows of the plan */
    const int32_t *tokens;    /* (n_rows) */
    const float *input;       /* (n_rows, width) for INPUT, else NULL */
    int n_seqs;               /* 0 for a program without positions */
    const lr_batch_seq *seqs; /* (n_seqs), rows ascending and without gaps */
    int n_echoes;
    const lr_batch_echo *echoes; /* (n_echoes), rows ascending */
    int n_out;                   /* rows whose logits are wanted */
    const int32_t *out_rows;     /* (n_out) row numbers, ascending */
    float *logits;               /* (n_out, vocab) result; a device keeps it to itself if NULL */
    const uint32_t *shortlist; /* bit i: logits LR_LISTED * i and those behind it are wanted, the others may be -inf; or
                                * NULL = all are wanted. Not with peaks */
    float *peaks;              /* (n_out, lr_pieces(vocab)) result: the largest of each LR_PIECE logits; or NULL */
    float *hidden;             /* (n_out, width of hidden) result, or NULL */
    int32_t *told;             /* (n_out) tokens, the result of models that tell them; else NULL */
    float *features;           /* (n_rows, width of features) result, or NULL */
    const lr_draws *draws;     /* tokens wanted in place of rows of logits, of backends with `draws`; or NULL */
    lr_comm *tick;             /* its tick is called now and then while this runs; NULL = nobody's */
} lr_batch;

typedef struct lr_backend lr_backend;
typedef struct lr_plan lr_plan; /* a compiled program with its activation memory */
typedef struct lr_kv_store lr_kv_store;

/* The arithmetic of matrix products. Results of one are bit-identical in any company; those of two are not. */
typedef enum lr_compute {
    LR_COMPUTE_FAST,  /* activations in 11 bits where the kernels take them in the time of 8 (AMX), else in 8; a scale
                       * for each 32. On GPUs activations in half precision (bfloat16 for weights of that type) */
    LR_COMPUTE_INT8,  /* activations in 8 bits */
    LR_COMPUTE_BF16,  /* activations in bfloat16: nearer to exact; on CPUs with AMX prompts and batches are about 1.5
                       * times as fast, single rows slower. LR_EUNSUPPORTED elsewhere; as FAST on GPUs */
    LR_COMPUTE_F32,   /* the float32 reference: exact weights, scalar kernels, slow */
    LR_COMPUTE_LOOSE, /* GPUs: whatever is fastest for the number of rows, cuBLAS among it; a row's bits then depend on
                       * its batch. Elsewhere as FAST */
} lr_compute;

typedef struct lr_backend_config {
    const char *device; /* "cpu", "cuda:0"; "auto" or NULL: LLMRUN_DEVICE, else the first GPU if one can be used, else
                         * the CPU */
    int threads;        /* 0 = all cores this process may use */
    const char *isa;    /* "scalar", "avx2", "avx512", "amx", or NULL = the best there is (LLMRUN_ISA overrides) */
    lr_compute compute;
} lr_backend_config;

/* What a weight has been multiplied with, as `llmrun imatrix` wants to know it. */
typedef struct lr_observed {
    double *sums;  /* (k): squares of each input, added up over rows in batch order; NULL = nobody asks */
    uint64_t rows; /* how many */
} lr_observed;

/* The operations of a device. Every member is required unless its comment says otherwise. */
typedef struct lr_backend_ops {
    const char *name;
    bool echoes;   /* run knows what to do with a batch's echoes */
    bool features; /* run gives lr_batch.features */
    bool draws;    /* run draws tokens (lr_batch.draws) */
    void (*free)(lr_backend *);
    /* Prepares a weight. Linear weights are repacked for the matrix product (with three dimensions: one matrix an
     * expert); `embed` ones are also read row by row. The tensor's data stays mapped and valid until the weight is
     * freed, or weight_keeps says no. Safe to call from the engine thread only; uses the compute pool inside. */
    int (*weight_new)(lr_backend *, const lr_tensor *, bool linear, bool embed, lr_weight **out, lr_error *err);
    void (*weight_free)(lr_backend *, lr_weight *);
    /* Whether the weight still reads its tensor's data. NULL = it does. */
    bool (*weight_keeps)(const lr_backend *, const lr_weight *);
    /* From now on adds what the linear weight is multiplied with to *seen, which is borrowed until it is NULL again;
     * for measuring, not for speed. NULL: the device can't. */
    void (*observe)(lr_backend *, lr_weight *, lr_observed *seen);
    int (*kv_new)(lr_backend *, const lr_kv_spec *, lr_kv_store **out, lr_error *err);
    void (*kv_free)(lr_backend *, lr_kv_store *);
    /* Copies whole blocks of a group inside the store (copy on write). */
    void (*kv_copy)(lr_backend *, lr_kv_store *, int group, int dst, int src);
    /* Moves a block of a group to / from host memory of kv_block_bytes(group) bytes (swap, snapshots). The layout is
     * the store's own and the same for every block of the group. */
    size_t (*kv_block_bytes)(const lr_backend *, const lr_kv_store *, int group);
    void (*kv_read)(lr_backend *, lr_kv_store *, int group, int block, void *dst);
    void (*kv_write)(lr_backend *, lr_kv_store *, int group, int block, const void *src);
    int (*compile)(lr_backend *, const lr_program *, const lr_kv_store *, int max_rows, int max_out, lr_plan **out,
                   lr_error *err);
    void (*plan_free)(lr_backend *, lr_plan *);
    /* Whether run gives lr_batch.peaks, at hardly any cost. NULL = it does not. */
    bool (*peaks)(const lr_plan *);
    /* Runs one batch; returns when the results are in place. Allocates nothing. */
    int (*run)(lr_backend *, lr_plan *, lr_kv_store *, const lr_batch *, lr_error *err);
    /* run in two halves, for what the host does meanwhile; NULL = there is only run. launch returns when the batch is
     * under way; what the batch points to but tables, tokens and input is only looked at by finish, which gives the
     * results, and takes the same batch with other `draws`, if it likes. A batch that was launched and never finished
     * is as if it had not been, but for the KV slots of its rows. The store may be used in between: that comes behind.
     */
    int (*launch)(lr_backend *, lr_plan *, lr_kv_store *, const lr_batch *, lr_error *err);
    int (*finish)(lr_backend *, lr_plan *, const lr_batch *, lr_error *err);
    /* Adapters: out = in . w^T + scale (in . a^T) . b^T for the rows of sequences that have one. The parts are copied.
     * NULL = the backend takes none. */
    int (*lora_new)(lr_backend *, const lr_lora_part *parts, int n, lr_lora **out, lr_error *err);
    void (*lora_free)(lr_backend *, lr_lora *);
    /* Bytes that the backend holds for weights beyond the mapped file, KV, and activations. */
    void (*memory)(const lr_backend *, size_t *weights, size_t *kv, size_t *work);
    /* One line about the kernels in use: "cpu avx512+vnni, 2 threads". Valid until free. */
    const char *(*describe)(const lr_backend *);
    /* Bytes of the device's memory that are free now; NULL where KV lies in the machine's. */
    size_t (*room)(const lr_backend *);
    /* Bytes of the device's memory that compile would take of it for such a store, which there need not be; 0 if it
     * would fail. NULL where `room` is. */
    size_t (*work)(lr_backend *, const lr_program *, const lr_kv_spec *, int max_rows, int max_out);
    /* Runs fn(arg, thread, n_threads) on the host threads that compute, and how many these are. NULL: there are none.
     */
    void (*parallel)(lr_backend *, lr_pool_fn fn, void *arg);
    int (*threads)(const lr_backend *);
    /* The number of its GPU in this process, for carriers between GPUs; NULL, or negative: it has none. */
    int (*gpu)(const lr_backend *);
} lr_backend_ops;

struct lr_backend {
    const lr_backend_ops *ops;
};

int lr_backend_new(lr_backend **out, const lr_backend_config *cfg, lr_error *err);
void lr_backend_free(lr_backend *);

/* Bytes that one block of a group takes over all its layers: for memory planning, without a store. */
size_t lr_kv_spec_block_bytes(const lr_kv_spec *, int group);

#endif
