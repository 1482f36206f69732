/* cpu.h - the CPU kernels: one table of functions an instruction set.
 *
 * Kernels take raw pointers, sizes and strides; checks happen in src/backend. A table's missing (NULL) entries are
 * filled from the scalar table, which is the reference. Two rules make a row's result independent of its company:
 *  - a sum over k runs in one fixed order per output element, whatever m, n0 and the tile;
 *  - integer sums are exact, so only the float part has an order: block after block, k ascending, fused multiply-add.
 * "row" below is a token row of activations; n = output features, k = input features, m = rows.
 */
#ifndef LR_KERNELS_CPU_H
#define LR_KERNELS_CPU_H
#include "base/dtype.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LR_QBLK  32 /* values of an activation block */
#define LR_STRIP 16 /* output features that are packed together */

/* Rows of activations as the products take them. k is a multiple of 32. The forms:
 *   8 bits   x[r][i] ~ scale[r][i / 32] * q[r][i]. scale = max|x| / 127 of the block (0 for an all-zero block), q =
 *            round to nearest even, in -127..127. Every table takes it.
 *   11 bits  (fine) x[r][i] ~ scale[r][i / 32] * v, scale = max|x| / 1016, v = 8 high + low with low in -4..3. q is
 *            (m, k/32, 64): the 32 high parts of a block, then its 32 low parts; sum16 are sums of v. Tables whose
 *            `fine` is set take it in almost the time of 8 bits; the error is an eighth.
 *   14 bits  (wide) for weights of super-blocks, k a multiple of 256: x[r][i] ~ scale[r][i / 256] * v, scale =
 *            max|x| / 8128, v = 64 high + low with low in -32..31. q is (m, 2, k): the high parts, then the low parts,
 *            so that both of a few rows are rows of one tile. sum16 is (m, k/32, 4): sums of a block's halves, of
 *            high parts, then of low parts. The same tables.
 *   bf16     h, the same values rounded to bfloat16, with q, scale and sum16 unused. Tables whose `bf16` is set take it
 *            when h is not NULL: many rows are then faster, few rows slower. */
typedef struct lr_qact {
    int8_t *q;      /* (m, k), fine and wide (m, 2 k) */
    float *scale;   /* (m, k/32), wide (m, k/256) */
    float *xs;      /* (m, k/32) scale times the block's sum of q; fine: of v; wide: unused */
    int16_t *sum16; /* (m, k/16) sums of 16 consecutive q, wide (m, k/8) */
    int k;
    uint16_t *h; /* (m, k), or NULL */
    bool fine;   /* q holds 11 bits */
    bool wide;   /* q holds 14 bits */
} lr_qact;

#define LR_WIDE 256 /* values of a block of 14 bits */

/* The same rows, `at` values (whole rows, and a multiple of a block of the next one) further on. */
static inline lr_qact lr_qact_at(lr_qact a, size_t at)
{
    if (a.h) a.h += at;
    if (!a.q) return a;
    a.q += a.fine ? 2 * at : a.wide ? at + at / (size_t)a.k * (size_t)a.k : at;
    a.scale += at / (a.wide ? LR_WIDE : LR_QBLK);
    if (a.xs) a.xs += at / LR_QBLK;
    a.sum16 += at / (a.wide ? 8 : 16);
    return a;
}

/* Lays m rows of a's k and form (not bf16) out in mem, from a multiple of 64 on; returns the bytes that they take. mem
 * NULL: only that. */
static inline size_t lr_qact_place(lr_qact *a, char *mem, size_t m)
{
    const size_t cells = m * (size_t)a->k, up = 63;
    const size_t scale = (cells * (a->fine || a->wide ? 2 : 1) + up) & ~up;
    const size_t xs = scale + ((cells / (a->wide ? LR_WIDE : LR_QBLK) * sizeof *a->scale + up) & ~up);
    const size_t sum16 = xs + (a->wide ? 0 : (cells / LR_QBLK * sizeof *a->xs + up) & ~up);
    if (mem) {
        a->q = (int8_t *)mem;
        a->scale = (float *)(void *)(mem + scale);
        a->xs = a->wide ? NULL : (float *)(void *)(mem + xs);
        a->sum16 = (int16_t *)(void *)(mem + sum16);
    }
    return sum16 + ((cells / (a->wide ? 8 : 16) * sizeof *a->sum16 + up) & ~up);
}

/* A weight matrix (n, k) ready for the product. `data` is the packed form, strips of LR_STRIP output features that lie
 * strip_bytes apart (64-byte aligned; the last strip is padded with zero weights), or, when packed is false, the file's
 * own rows. */
typedef struct lr_gemm_w {
    int type; /* lr_dtype of the source */
    int n, k;
    bool packed;
    size_t strip_bytes; /* packed: bytes of a strip; else bytes of a row */
    const void *data;
    /* few rows: what the thread will read after the strips asked for, so that it is on its way by then; or NULL: strips
     * then_strip..then_end-1 of that weight */
    const struct lr_gemm_w *then;
    int then_strip, then_end;
} lr_gemm_w;

/* One query row tile of one sequence against its paged keys and values, for the heads of one KV head. */
typedef struct lr_attn_task {
    const float *q; /* row r, head h at q + r * q_stride + h * head_dim */
    size_t q_stride;
    float *out; /* same shape, out_stride */
    size_t out_stride;
    int n_rows; /* rows, at positions pos, pos+1, ... */
    int pos;
    int kv_head, n_group, head_dim; /* query heads kv_head*n_group .. +n_group-1 */
    int n_kv_heads;
    int window; /* sees positions > p - window; 0 = all */
    float scale, softcap;
    const float *sinks;             /* (n_heads) or NULL */
    int k_type, v_type, block_size; /* lr_dtype of keys and of values */
    const int32_t *table;           /* block numbers of the sequence */
    const char *k, *v;              /* this layer's part of block 0 */
    size_t block_stride;            /* bytes from a block to the next */
} lr_attn_task;

/* Tasks of one layer and KV head that have the same slots at positions from .. to - 1, both multiples of LR_ATTN_STEP,
 * all of which every one of their rows sees: forks of a text, branches of a tree. from = to: nothing in common. */
typedef struct lr_attn_gang {
    const lr_attn_task *tasks; /* (n) at most LR_ATTN_ROWS rows together */
    int n, from, to;
} lr_attn_gang;

/* Layout of a layer's part of a block (T = block_size slots, D = head_dim), element types k_type and v_type (F32, F16,
 * BF16): k: (n_kv_heads, D, T)   transposed, so that a register holds one dimension of 16 keys v: (n_kv_heads, T, D)
 *
 * Q8_0, Q4_0: after the values of the part lie float16 scales, one per 32 dimensions of a slot (the last group may be
 * short in Q8_0; G = ceil(D/32)): k (n_kv_heads, G, T), v (n_kv_heads, T, G). Both keep keys and values in a turned
 * basis (attn_int.h), so that large channels do not take the scale of the others; the attention turns queries in and
 * outputs back.
 *
 * - Q8_0: values are int8 in the same order as above.
 * - Q4_0, values: 4 bits, two's complement. Dimensions j and j+16 of a group share the byte where int8's j would be, 16
 *   bytes a group, j in the low half.
 * - Q4_0, keys: 6 bits, as errors in them cost ten times as much. The lower 4 lie like the values' (n_kv_heads, D/2,
 * T), behind them the upper 2 (n_kv_heads, D/4, T): dimensions j, j+8, j+16, j+24 of a group share a byte, 8 bytes a
 *   group, j in the lowest bits.
 *
 * lr_cpu_kv_bytes() gives the size of a part.
 *
 * A row's result has one definition, whatever the tile, the block size and the threads: positions are cut into chunks
 * of LR_ATTN_CHUNK and those into steps of LR_ATTN_STEP, both at absolute multiples; online softmax runs over the steps
 * of a chunk in ascending order from a fresh state, and the chunks are combined in ascending order. */
#define LR_ATTN_CHUNK 1024
#define LR_ATTN_STEP  64

typedef struct lr_cpu_kernels {
    const char *name;        /* "scalar", "avx2", "avx512", "amx" */
    bool (*supported)(void); /* can this machine run it (cpuid, and the OS permission for AMX) */
    bool fine;               /* takes rows of 11 and 14 bits, in almost the time of 8 */
    bool bf16;               /* takes rows in bf16 (lr_qact.h); bits then differ from the 8-bit form's */

    /* ---- matrix product (gemm_*.c) ---- */
    /* Bytes of the packed form of a weight of `type`, or 0: this type is used as it lies in the file. All tables of a
     * process share one packed layout (lr_pack_bytes / lr_pack_strips in pack.c). */
    /* y[r][j] = sum_k x[r][k] w[j][k] (+ nothing else) for rows 0..m-1, strips s0..s1-1 (features 16*s0 .. ), written
     * to y + r*ldy + j for j < w->n only. qa: quantized rows; xf: the same rows in float (k values apart ldx), used by
     * types that are not integer. */
    void (*gemm)(const lr_gemm_w *w, const lr_qact *qa, const float *xf, size_t ldx, int m, float *y, size_t ldy,
                 int s0, int s1);
    /* In a few words, how gemm does m rows of w: for people. Only w->packed, w->type and qa's form are looked at. */
    const char *(*way)(const lr_gemm_w *w, const lr_qact *qa, int m);
    /* x (m, k) with row stride ldx -> qa rows 0..m-1, columns c0..c1-1 (multiples of a block); fills h if it is there
     * and the table takes it, else the integer form that qa says. */
    void (*quantize)(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1);

    /* ---- rows (rows_*.c): each works on one row ---- */
    void (*rmsnorm)(const float *x, const float *w, float *y, int n, float eps); /* y may be x; w NULL = ones */
    void (*layernorm)(const float *x, const float *w, const float *b, float *y, int n, float eps);
    void (*add)(const float *a, const float *b, float *y, int n); /* y may be a or b */
    void (*mul)(const float *a, const float *b, float *y, int n);
    void (*scale)(const float *x, float s, float *y, int n);
    void (*softcap)(const float *x, float cap, float *y, int n);               /* cap * tanh(x / cap), saturating */
    void (*act)(int act, const float *x, float *y, int n);                     /* lr_act of backend.h */
    void (*glu)(int act, const float *gate, const float *up, float *y, int n); /* y = act(gate) * up */
    /* cs: (n_rot/2) pairs cos, sin of the row's position. Rotates n_heads heads in place. */
    void (*rope)(float *x, int n_heads, int head_dim, int n_rot, bool interleaved, const float *cs);

    /* ---- attention (attn_*.c) ---- */
    /* Writes one row's keys and values (n_kv_heads * head_dim each) to slot `slot` of a block's parts k and v. Q4_0
     * takes head_dim in multiples of 32. center (n_kv_heads * head_dim, or NULL) is taken off the keys of Q8_0 and
     * Q4_0: as it is the same for all positions, it shifts all scores of a row alike, which the softmax does not see.
     */
    void (*kv_put)(const float *key, const float *val, const float *center, int n_kv_heads, int head_dim, int k_type,
                   int v_type, int block_size, int slot, char *k, char *v);
    /* scratch: lr_cpu_attn_scratch() bytes, 64-byte aligned, one a thread. A row that sees nothing (a negative
     * position) gives zeros. Slots that no row of the task sees are never read, so their table entries may be anything.
     */
    void (*attn)(const lr_attn_task *t, void *scratch);
    /* The same in pieces, for threads: attn_part writes chunk `chunk` (lr_attn_chunks) to part,
     * lr_cpu_attn_part_floats() floats; attn_combine takes the parts of the chunks in order, one behind the other, and
     * writes t->out. The result has the bits that attn gives. */
    void (*attn_part)(const lr_attn_task *t, int chunk, float *part, void *scratch);
    void (*attn_combine)(const lr_attn_task *t, const float *parts, int n_parts);
    /* attn and attn_part of each task of a gang, parts[i] being that of task i: the same bits, but what the tasks have
     * in common is read once. A chunk that a task does not see gives a part that changes nothing. */
    void (*attn_gang)(const lr_attn_gang *g, void *scratch);
    void (*attn_gang_part)(const lr_attn_gang *g, int chunk, float *const *parts, void *scratch);

    /* ---- vocabulary rows, for sampling (vocab_*.c) ---- */
    int (*argmax)(const float *x, int n); /* lowest index on ties; NaN is never chosen; -1 if all NaN */
    float (*max)(const float *x, int n);  /* NaN is passed over; -inf if there is nothing else */
    /* The sum of lr_mass (base/mass.h) of x[i] - best, in units of 2^-40: the same in every table and any order. NaN is
     * passed over; best is the row's largest value, and finite. */
    uint64_t (*mass)(const float *x, int n, float best);
    /* The k largest, descending, the lower index first on ties, NaN as -inf. k <= LR_TOPK_MAX; returns min(k, n). */
    int (*topk)(const float *x, int n, int k, int32_t *ids, float *vals);
    int (*count_above)(const float *x, int n, float threshold); /* how many x[i] >= threshold */
    /* Writes the indices with x[i] >= threshold, ascending, the first cap of them; returns how many there are. */
    int (*compact_above)(const float *x, int n, float threshold, int32_t *ids, int cap);
    void (*mask)(float *x, const uint32_t *bits, int n); /* bit i % 32 of bits[i / 32] clear: x[i] = -inf */

    /* The same by pieces of LR_PIECE, the last one shorter, whose largest values are known: a piece that has nothing to
     * say is not looked at. */
    /* bits (or NULL) is a mask that x does not have in it yet: what is clear counts as -inf. */
    /* Fills peak (lr_pieces(n)) with each piece's max; returns the max of all without a mask. */
    float (*peaks)(const float *x, const uint32_t *bits, int n, float *peak);
    /* As topk, but with a mask not more than it leaves. */
    int (*topk_peaks)(const float *x, const uint32_t *bits, int n, const float *peak, int k, int32_t *ids, float *vals);
    /* As compact_above, all of them; ids has room for n. */
    int (*compact_peaks)(const float *x, const uint32_t *bits, int n, const float *peak, float threshold, int32_t *ids);
    /* x[i] = (x[i] - best) / t, each operation rounded by itself */
    void (*temper)(float *x, int n, float best, float t);
    /* mass of what temper makes of x; x stays. ahead (n), or NULL: what is read next, asked for meanwhile. */
    uint64_t (*mass_warm)(const float *x, int n, float best, float t, const float *ahead);
    /* About what mass_warm gives for each piece, as a share of the best's: sums of any pieces are within LR_GLANCE of
     * all of them; at t = 1 within LR_GLANCE_1 of themselves and a unit a value. LR_GLANCE_T_MIN <= t <=
     * LR_GLANCE_T_MAX. */
    void (*glance)(const float *x, const uint32_t *bits, int n, const float *peak, float best, float t, float *sums,
                   const float *ahead);
} lr_cpu_kernels;

#define LR_PIECE        128
#define LR_GLANCE       4e-6 /* with at most LR_GLANCE_N values; see vocab_vec.h */
#define LR_GLANCE_1     1.3e-6
#define LR_GLANCE_N     1048576
#define LR_GLANCE_T_MIN 0.01f
#define LR_GLANCE_T_MAX 100.0f
static inline int lr_pieces(int n) { return n / LR_PIECE + (n % LR_PIECE != 0); }

/* The tables in this build, best first, ending in NULL; the scalar one is always the last. Entries are complete. */
const lr_cpu_kernels *const *lr_cpu_tables(void);
/* The table of a name, or the best supported one for NULL; NULL if unknown or not supported here. */
const lr_cpu_kernels *lr_cpu_table(const char *name);

/* Packing (pack.c), the same for all tables. */
size_t lr_pack_strip_bytes(int type, int k); /* 0 = the type is not packed */
bool lr_pack_super(int type);                /* packed in super-blocks: takes rows of 14 bits in place of 11 */
/* Packs strips s0..s1-1 of a matrix of n rows that lie row_bytes apart in the file's format. */
void lr_pack_strips(int type, const void *src, size_t row_bytes, int n, int k, void *dst, int s0, int s1);

/* The float32 reference product: weight rows of `type`, row_bytes apart, dequantized exactly, times float rows x (m,
 * k); y[r][j] for features j0..j1-1. Sums in 16 fixed partial sums. */
void lr_gemm_f32_ref(int type, const void *rows, size_t row_bytes, int k, const float *x, size_t ldx, int m, float *y,
                     size_t ldy, int j0, int j1);

/* Of a k part, or a v part. */
size_t lr_cpu_kv_bytes(int type, bool keys, int n_kv_heads, int head_dim, int block_size);
size_t lr_cpu_attn_scratch(int n_group, int head_dim, int max_rows); /* bytes for a tile of max_rows rows */
size_t lr_cpu_attn_part_floats(const lr_attn_task *t);               /* floats of one part */
void lr_attn_chunks(const lr_attn_task *t, int *first,
                    int *last); /* chunks that a row of t sees (last < first: none) */
void lr_attn_gang_chunks(const lr_attn_gang *g, int *first, int *last); /* that any task's row sees */
#define LR_ATTN_ROWS 16 /* most rows that a caller puts into one lr_attn_task */
#define LR_TOPK_MAX  1024

#endif
