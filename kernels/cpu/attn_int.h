/* attn_int.h - what the attention kernels of all instruction sets share: who sees what, and where a slot's values lie.
 *
 * "pair" = one query row and one head; the pairs of a task are numbered row * n_group + head.
 * A part (the result of one chunk) is, for P pairs: float m[P] (the largest score, in the kernel's own unit, -inf if
 * the row sees nothing of the chunk), float l[P] (sum of weights), float acc[P][head_dim] (weighted sum of values).
 */
#ifndef LR_KERNELS_CPU_ATTN_INT_H
#define LR_KERNELS_CPU_ATTN_INT_H
#include "base/dtype.h"
#include "cpu/cpu.h"
#include "cpu/fill.h"

#define LR_ATTN_TILE      16 /* positions that a register holds */
#define LR_KV_GROUP       32 /* dimensions that share a scale in Q8_0 and Q4_0 */
#define LR_ATTN_PAIRS_MAX (LR_ATTN_ROWS * 64)

/* Positions that row r sees: *lo .. *hi, none if *hi < *lo. */
static inline void lr_attn_row_range(const lr_attn_task *t, int r, int *lo, int *hi)
{
    int p = t->pos + r;
    *hi = p;
    *lo = t->window > 0 && p >= t->window ? p - t->window + 1 : 0;
}

/* The same, cut to positions base .. base + n - 1. */
static inline void lr_attn_row_clip(const lr_attn_task *t, int r, int base, int n, int *lo, int *hi)
{
    lr_attn_row_range(t, r, lo, hi);
    if (*lo < base) *lo = base;
    if (*hi > base + n - 1) *hi = base + n - 1;
}

static inline int lr_kv_groups(int head_dim) { return (head_dim + LR_KV_GROUP - 1) / LR_KV_GROUP; }

/* Quantized keys and values are stored in a turned basis: each block of this many dimensions, the largest power of two
 * that divides head_dim, times the Hadamard matrix over the root of its size (orthonormal, and its own inverse). That
 * spreads a channel that is far larger than the others, which would otherwise take the scale of its group. */
#define LR_KV_TURN 256 /* the largest block */
static inline bool lr_kv_turned(int type) { return type == LR_Q8_0 || type == LR_Q4_0; }
static inline int lr_kv_turn_block(int head_dim)
{
    int n = head_dim & -head_dim;
    return n < LR_KV_TURN ? n : LR_KV_TURN;
}

/* Bytes of one value, scales aside; of two in Q4_0. */
static inline size_t lr_kv_elem(int type) { return type == LR_F32 ? 4 : lr_kv_turned(type) ? 1 : 2; }

/* Value i of rows of dimensions -> its place. In Q4_0, dimensions j and j + 16 of a group share a byte: the first has
 * the low half. i is counted from the start of a group. */
static inline size_t lr_kv_place(int type, size_t i)
{
    return type == LR_Q4_0 ? i / LR_KV_GROUP * (LR_KV_GROUP / 2) + i % (LR_KV_GROUP / 2) : i;
}

/* Where the scales of a part begin, if it has any. */
static inline size_t lr_kv_scales_at(int type, int n_kv_heads, int head_dim, int block_size)
{
    return lr_kv_place(type, (size_t)n_kv_heads * head_dim) * block_size * lr_kv_elem(type);
}

/* The part of the block that holds position p; *slot is p's place in it. */
static inline const char *lr_attn_block(const lr_attn_task *t, const char *part, int p, int *slot)
{
    *slot = p % t->block_size;
    return part + (size_t)t->table[p / t->block_size] * t->block_stride;
}

#endif
