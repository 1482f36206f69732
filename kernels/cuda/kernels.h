/* kernels.h - the CUDA kernels as C sees them: one launcher an operation.
 *
 * A launcher puts its kernels on `stream` and returns at once: cudaSuccess, cudaErrorInvalidValue for arguments that it
 * does not serve (nothing is launched then), or what the launch said. It allocates nothing and copies nothing from the
 * host, so that it can be captured in a graph: sizes that go by value set only the grid, and what changes from step to
 * step (positions, tables, tokens, masks) lies in device memory. All pointers are device pointers unless a comment says
 * "host". Device arrays are aligned to 16 bytes, and rows of values (rows, width) are float32, row-major and without
 * gaps, unless told otherwise.
 *
 * A row whose seq is < 0 is padding (a graph's bucket is larger than the batch): it is skipped, its outputs are left as
 * they were or filled with nonsense, never read by others.
 *
 * Promise 1: every sum of a row is taken in an order that depends on that row alone (its position and the shapes of the
 * model), whatever the number of rows, tiles, blocks and splits. No float is ever added by an atomic.
 */
#ifndef LR_KERNELS_CUDA_H
#define LR_KERNELS_CUDA_H
#include "base/draw.h"
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Once a process and device, before anything else: raises the kernels' limits of shared memory. */
cudaError_t lr_cu_init(void);

/* ---- rows as the matrix product takes them ---- */

typedef enum lr_cu_form {
    LR_CU_F32,  /* (m, k) float: the same values */
    LR_CU_BF16, /* (m, k) bfloat16, rounded to nearest even; also what cublasGemmEx takes */
    LR_CU_F16,  /* (m, k) half x 2^e, then (m) float 2^-e, e a row: the largest value lies in [2^13, 2^14) */
    LR_CU_INT8, /* (m, k) int8, then (m, k/32) float scale: x ~ scale * q, q = -127..127; k a multiple of 32 */
    LR_CU_FORMS,
} lr_cu_form;

/* Bytes of m packed rows (the parts are padded to 16 bytes, in the order above). */
size_t lr_cu_rows_bytes(lr_cu_form, int m, int k);

/* Where a row operation puts its result: either or both. packed is lr_cu_rows_bytes(form, m, width) large. */
typedef struct lr_cu_out {
    float *f32; /* (m, width), or NULL */
    void *packed;
    lr_cu_form form; /* of packed; ignored where that is NULL */
} lr_cu_out;

/* x (m, k) -> out. */
cudaError_t lr_cu_rows(const float *x, int m, int k, lr_cu_out out, cudaStream_t);

/* ---- products with weights: y = x w^T + bias ---- */

/* A weight as it lies in the file: n rows of k values of `type` (lr_dtype), row_bytes apart, the first
 * aligned to 16 bytes. k is a multiple of the type's block, and of 8 for products. 16 readable bytes follow the last
 * row. */
typedef struct lr_cu_weight {
    const void *data;
    int type, n, k;
    size_t row_bytes;
} lr_cu_weight;

typedef enum lr_cu_math {
    LR_CU_EXACT, /* one order for any number of rows: tensor cores, half precision products (bfloat16 for BF16 weights),
                  * float32 sums; k is cut by (n, k) alone */
    LR_CU_FAST,  /* as EXACT for more than 8 rows; up to 8 rows of quantized weights go through 8-bit activations and
                  * integer products, the fastest when the weights come from memory. A row's bits are one of two */
    LR_CU_REF,   /* float32 activations and exact weights, one order for any number of rows; slow */
} lr_cu_math;

bool lr_cu_weight_good(int type); /* is there a product for this type? */
/* The form that lr_cu_linear takes the rows in, for m rows. */
lr_cu_form lr_cu_linear_form(lr_cu_math, int type, int m);
/* Bytes of workspace; the most for any number of rows up to m. */
size_t lr_cu_linear_work(lr_cu_math, int type, int n, int k, int m);
/* x: m rows in lr_cu_linear_form(math, w->type, m). bias (n) or NULL. y (m, n). add: y += instead of y =, after the
 * sum (one rounding more: the residual's). work is aligned to 16 bytes and used by one product at a time. */
cudaError_t lr_cu_linear(lr_cu_math, const lr_cu_weight *w, const void *x, int m, const float *bias, bool add, float *y,
                         void *work, cudaStream_t);

/* Products of several weights with the same rows in one launch, and of experts. */
#define LR_CU_JOINT 4
typedef struct lr_cu_slots lr_cu_slots;
typedef struct lr_cu_product {
    int n_weights;                  /* 1 .. LR_CU_JOINT, of one type and k; more than one: EXACT only */
    lr_cu_weight w[LR_CU_JOINT];    /* with slots: n is one expert's, experts lie one behind the other */
    const float *bias[LR_CU_JOINT]; /* (n), or (experts, n), or NULL */
    float *y[LR_CU_JOINT];          /* (m, n) */
    bool add;                       /* as in lr_cu_linear */
    bool glu; /* two weights of one n: y[0] = act(first) * second, with act as in lr_cu_glu; y[1] is not used */
    int act;
    const lr_cu_slots *slots; /* NULL: the rows as they are. Else y are rows of slots, each of its own expert */
    bool of_rows;             /* slots: x are token rows, packed as slots->m of them; else rows of slots */
} lr_cu_product;
/* Bytes of workspace; the most for any number of rows up to m. */
size_t lr_cu_product_work(lr_cu_math, const lr_cu_product *, int m);
/* m: rows of x (slots->m, or slots->m * n_used). x: in lr_cu_linear_form(math, w[0].type, m). Sums are cut by the
 * shapes of the weights (and n_used), and not by m: a row's bits are the same in any company, but need not be those of
 * lr_cu_linear. */
cudaError_t lr_cu_multiply(lr_cu_math, const lr_cu_product *, const void *x, int m, void *work, cudaStream_t);

/* Low-rank adapters: y += (x a^T) b for the rows that have one, behind the product and its bias. */
typedef struct lr_cu_adapter_part {
    const float *a, *b; /* (rank, k), (rank, n): what the adapter's scale multiplies is in b */
    int32_t rank;       /* 0: the adapter leaves this product as it is */
} lr_cu_adapter_part;
typedef struct lr_cu_adapters {
    const lr_cu_adapter_part *const *rows; /* (m) the parts of each row's adapter; NULL = it has none */
    int site[LR_CU_JOINT];                 /* which of the parts are of each weight */
    int ranks;                             /* no part has a higher rank; a row's bits don't depend on it */
} lr_cu_adapters;
size_t lr_cu_adapt_work(int n_weights, int ranks, int m);
/* Behind lr_cu_multiply of the same p, without slots and GLU; x: its rows, in the form that it took. */
cudaError_t lr_cu_adapt(const lr_cu_adapters *, const lr_cu_product *, lr_cu_form, const void *x, int m, void *work,
                        cudaStream_t);

/* All of w as bfloat16 (n, k), for cuBLAS. */
cudaError_t lr_cu_dequant(const lr_cu_weight *w, uint16_t *out, cudaStream_t);
/* y (m, n) += bias (n): behind cuBLAS. */
cudaError_t lr_cu_bias(float *y, const float *bias, int m, int n, cudaStream_t);

/* ---- rows ---- */

/* out[r] = w[tokens[r]] * scale; rows with a token outside 0..n-1 become zeros. */
cudaError_t lr_cu_embed(const lr_cu_weight *w, const int32_t *tokens, int m, float scale, lr_cu_out out, cudaStream_t);

typedef struct lr_cu_norm {
    const float *w;    /* (width) or (group), or NULL for ones */
    const float *bias; /* as w, or NULL; layer norm only */
    int width, group;  /* group divides width; w has `group` values where that is smaller (a head), repeated */
    float eps;
    bool layer_norm;
} lr_cu_norm;

/* sum = x + add (when add is not NULL; sum may be x, add or NULL), out = norm of it. */
cudaError_t lr_cu_norm_rows(const lr_cu_norm *, const float *x, const float *add, float *sum, int m, lr_cu_out out,
                            cudaStream_t);

/* Of each of n_heads parts of a row of a (stride_a wide) the n_a values from `first` on, and behind them n_b of b: its
 * part of the same head, or (shared) its whole row; b NULL: zeros. */
typedef struct lr_cu_parts {
    int n_heads, stride_a, first, n_a, n_b;
    bool shared;
} lr_cu_parts;
cudaError_t lr_cu_parts_of(const lr_cu_parts *, const float *a, const float *b, int m, lr_cu_out out, cudaStream_t);
/* Rows of `width` from what ranks gathered: rank r's columns at[r] .. at[r+1]-1 of all m rows, one rank behind the
 * other; at is on the device, at[0] = 0 and its last is width. */
cudaError_t lr_cu_ranks(const float *x, const int32_t *at, int m, int width, lr_cu_out out, cudaStream_t);

/* Elementwise over m rows of `width`; out.f32 may be an input. act: lr_act. */
cudaError_t lr_cu_add(const float *a, const float *b, int m, int width, lr_cu_out out, cudaStream_t);
cudaError_t lr_cu_mul(const float *a, const float *b, int m, int width, lr_cu_out out, cudaStream_t);
/* b: a value a row */
cudaError_t lr_cu_mul_row(const float *a, const float *b, int m, int width, lr_cu_out out, cudaStream_t);
cudaError_t lr_cu_act(int act, const float *x, int m, int width, lr_cu_out out, cudaStream_t);
/* act(gate) * up */
cudaError_t lr_cu_glu(int act, const float *gate, const float *up, int m, int width, lr_cu_out out, cudaStream_t);
cudaError_t lr_cu_scale(const float *x, float scale, int m, int width, lr_cu_out out, cudaStream_t);
/* scale * tanh(x / scale) */
cudaError_t lr_cu_softcap(const float *x, float scale, int m, int width, lr_cu_out out, cudaStream_t);
/* out[i] = x[rows[i]], i < m; a row < 0 gives zeros. */
cudaError_t lr_cu_gather(const float *x, const int32_t *rows, int m, int width, lr_cu_out out, cudaStream_t);

/* ---- mixture of experts ---- */

#define LR_CU_EXPERTS 1024 /* at most */

/* As lr_route: the n_used experts of the highest score for each row. */
typedef struct lr_cu_choice {
    int n_experts, n_used;
    int gate; /* lr_gate: 0 softmax over all, 1 sigmoid, 2 softmax over the chosen */
    bool normalize;
    float scale;
    int n_groups, n_groups_used, group_best;
} lr_cu_choice;

/* Rows of neighbouring slots of one expert. */
typedef struct lr_cu_piece {
    int32_t expert, first, n; /* expert: of this rank's, from 0; n = 0: nothing to do */
} lr_cu_piece;

/* Who goes to which expert. A slot is a (row, chosen expert) pair; slots are sorted by expert, rows ascending in one
 * (a single row of a rank that has all experts: in the order of choosing). Padding rows' slots come last. This rank's
 * slots, those of experts from .. from + n_own - 1, are counted from the first of them. */
struct lr_cu_slots {
    int n_experts, n_used, from, n_own;
    int m;          /* token rows */
    int tile;       /* slots a piece, at most; pieces */
    int n_pieces;   /* of the grid: at least as many as there can be */
    int32_t *row;   /* (m * n_used) token row of own slots; -1 behind them */
    int32_t *own;   /* (m * n_used) expert of own slots, from 0; -1 behind them */
    int32_t *at;    /* (m, n_used) slot of a row's experts, among those of all ranks */
    int32_t *start; /* (n_experts + 1) first slot of each expert; not told where a single row isn't sorted */
    lr_cu_piece *pieces;
};
/* Bytes of what they point to, the most for up to m rows; and host: the pointers into mem, and all but from, n_own. */
size_t lr_cu_slots_bytes(int n_experts, int n_used, int m);
void lr_cu_slots_in(lr_cu_slots *, void *mem, lr_cu_math, int m);
/* chosen (m, 2 n_used): numbers of the experts, then their weights, as LR_OP_ROUTE; and the slots. live (m): < 0: the
 * row is padding, its experts are none (number n_experts, weights 0). */
cudaError_t lr_cu_route(const lr_cu_choice *, const lr_cu_slots *, const float *logits, const float *bias,
                        const int32_t *live, float *chosen, cudaStream_t);
/* out (m, width) = a row's slots times their weights, by rank */
cudaError_t lr_cu_mix(const lr_cu_slots *, const float *slots, const float *chosen, int m, int width, lr_cu_out,
                      cudaStream_t);

/* ---- positions, keys and values ---- */

/* The batch as the kernels see it: a row's sequence, position and place in the KV. */
typedef struct lr_cu_rows_at {
    int n_rows;
    const int32_t *seq;   /* (n_rows) index into table_at; -1 = padding */
    const int32_t *pos;   /* (n_rows) position, for rotation and windows */
    const int32_t *slot;  /* (n_rows) KV slot of the row in its sequence; the same as pos but for trees */
    const int32_t *table; /* block numbers of all sequences (of the layer's group) */
    const int32_t
        *table_at; /* (seqs) where a sequence's own begin: slot s is in block table[table_at[seq] + s / size] */
    /* Trees of drafts: row r sees slots below tree_at[r], and slot tree_at[r] + i where bit i of its tree_words words
     * at tree_bits + r * tree_words is set (its ancestors and itself). tree_at[r] < 0, or tree_at NULL: all slots up to
     * its own. */
    const int32_t *tree_at;
    const uint32_t *tree_bits;
    int tree_words;
} lr_cu_rows_at;

/* Keys and values have types of their own beside lr_dtype's: fp8, and the keys of a Q4_0 cache, of 6 bits. */
#define LR_CU_E4M3 60
#define LR_CU_Q6   61

/* Keys or values of one layer. Block b begins at base + b * block_stride and holds (n_kv_heads, block_size, head_dim)
 * values. Q8_0, Q4_0, Q6: integers in that order and then half scales (n_kv_heads, block_size, head_dim / 32), the
 * first of them at a multiple of 16 bytes. Of 32 that share a scale, Q4_0 has j and j + 16 in a byte (j the lower
 * half), 16 bytes; Q6 has its lower 4 bits so, and behind all of them, from a multiple of 16 bytes on, the upper two:
 * j, j + 8, j + 16, j + 24 in a byte, 8 bytes.
 *
 * These three keep a turned basis: each part of head_dim whose size is the largest power of two that divides it, times
 * the Hadamard matrix over the root of its size, which is its own inverse. It spreads what is large in few dimensions.
 * Queries over such keys are turned as well, and sums over such values have to be turned back: lr_cu_turn_rows. */
typedef struct lr_cu_kv_part {
    void *base;
    size_t block_stride; /* bytes, a multiple of 16 */
    int type;            /* LR_F32, LR_F16, LR_BF16, LR_Q8_0, LR_Q4_0, LR_CU_Q6, LR_CU_E4M3 */
} lr_cu_kv_part;

typedef struct lr_cu_kv {
    lr_cu_kv_part k, v;                   /* F32 and BF16 have only each other; all else goes with all */
    int n_kv_heads, head_dim, block_size; /* block_size 1..256; head_dim 2..256, even; of 32 for integers */
    const float *center; /* (n_kv_heads, head_dim) taken off keys of integer types before they are turned, or NULL */
} lr_cu_kv;

/* Bytes of one block's keys (or values), a multiple of 16; 0 for a type that can't be. */
size_t lr_cu_kv_bytes(int type, int n_kv_heads, int head_dim, int block_size);
bool lr_cu_kv_turned(int type);

/* As lr_rope, with the angles' frequencies made by lr_cu_rope_freq and kept on the device. */
typedef struct lr_cu_rope {
    int n_heads, head_dim, n_rot;
    bool interleaved;
    float attn_scale;
    const double *freq; /* (n_rot / 2); double, as angles grow to a million times a turn */
} lr_cu_rope;

/* Host: freq[i] = freq_scale * base^(-2i/n_rot) / factors[i]; factors (host) or NULL. */
void lr_cu_rope_freq(float base, float freq_scale, const float *factors, int n_rot, double *freq);

/* x (rows, n_heads * head_dim) -> out.f32; the same place or another. */
cudaError_t lr_cu_rope_rows(const lr_cu_rope *, const float *x, const lr_cu_rows_at *, float *out, cudaStream_t);
/* Writes keys and values (rows, n_kv_heads * head_dim) to the rows' slots. */
cudaError_t lr_cu_kv_put(const lr_cu_kv *, const float *k, const float *v, const lr_cu_rows_at *, cudaStream_t);
/* All of it at once: q (rotated by rq, and turned if keys are, to q_out), k (rotated by rk) and v into the KV. rq or rk
 * NULL: not rotated; q may be NULL. Optional norms of each head come first: w (head_dim), no bias, no residual. */
cudaError_t lr_cu_rope_kv(const lr_cu_rope *rq, const lr_cu_rope *rk, const lr_cu_norm *nq, const lr_cu_norm *nk,
                          const float *q, const float *k, const float *v, float *q_out, int n_heads, const lr_cu_kv *,
                          const lr_cu_rows_at *, cudaStream_t);

/* x (m, n_heads * head_dim) -> out: the turn of the integer types, and back. The same place or another. */
cudaError_t lr_cu_turn_rows(const float *x, int m, int n_heads, int head_dim, float *out, cudaStream_t);

/* Copies n whole blocks inside the store, block_bytes (a multiple of 16) each: src[i] -> dst[i] (device arrays). */
cudaError_t lr_cu_kv_copy(void *base, size_t block_bytes, const int32_t *dst, const int32_t *src, int n, cudaStream_t);

/* ---- attention ---- */

#define LR_CU_CHUNK 256 /* positions that are summed by themselves; chunks are joined in ascending order */

typedef struct lr_cu_attn {
    int n_heads;
    float scale, softcap; /* softcap 0 = none */
    int window;           /* 0 = all */
    const float *sinks;   /* (n_heads) or NULL */
} lr_cu_attn;

/* Rows of one sequence, consecutive, that share a pass over its keys. */
typedef struct lr_cu_tile {
    int32_t row, n;
} lr_cu_tile;

/* Host: the most rows a tile of `wide` attention may have, at least 1. */
int lr_cu_attn_tile_rows(int n_heads, int n_kv_heads, int head_dim, bool wide);
/* Bytes of workspace for tiles of n_rows rows over contexts of up to max_slots; 0 up to LR_CU_CHUNK. Wide tiles need
 * none. */
size_t lr_cu_attn_work(int n_rows, int n_heads, int head_dim, int max_slots);
/* out (rows, n_heads * head_dim) = attention of q over the KV of the rows' sequences; q is in the keys' basis, out in
 * that of the values. tiles: n_tiles of them (n = 0:
 * none), of any of the rows; NULL: rows first_row .. first_row + n_tiles - 1 are one each. Rows from first_row to
 * first_row + n_rows of lr_cu_attn_work have workspace. wide: tiles of up to
 * lr_cu_attn_tile_rows(.., true) rows, for prompts; else up to those of false, for decoding. max_slots: the grid
 * reaches over slots 0 .. max_slots-1; a row's bits depend on neither. A row that sees nothing gives zeros. */
cudaError_t lr_cu_attn_rows(const lr_cu_attn *, const lr_cu_kv *, const float *q, const lr_cu_rows_at *,
                            const lr_cu_tile *tiles, int n_tiles, int first_row, bool wide, int max_slots, float *out,
                            void *work, cudaStream_t);

/* ---- from logits to tokens ---- */

/* Draws n tokens as base/draw.h says: the tokens of the host's samplers, bit for bit. logits (rows, n_vocab) stay as
 * they are; each draw uses its own row of `work`, lr_cu_draw_work(n, n_vocab) bytes. best: (n, top), what a draw wants
 * is at most `top`. n_vocab up to 2^23. */
size_t lr_cu_draw_work(int n, int n_vocab);
cudaError_t lr_cu_draw_rows(const float *logits, int n_vocab, const lr_draw *, int n, const lr_draw_edit *edits,
                            const uint32_t *masks, lr_draw_result *out, lr_draw_best *best, int top, void *work,
                            cudaStream_t);

#ifdef __cplusplus
}
#endif
#endif
