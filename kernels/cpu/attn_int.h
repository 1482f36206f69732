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

/* Value i of rows of dimensions, counted from the start of a group -> its place. In Q4_0, dimensions j and j + 16 of a
 * group share a byte: the first has the low half. */
static inline size_t lr_kv_place(int type, size_t i)
{
    return type == LR_Q4_0 ? i / LR_KV_GROUP * (LR_KV_GROUP / 2) + i % (LR_KV_GROUP / 2) : i;
}

/* Keys of Q4_0: the place of the byte with the upper two bits; dimensions j, j + 8, j + 16, j + 24 of a group share it,
 * the first has the lowest bits. */
static inline size_t lr_kv_upper_place(size_t i) { return i / LR_KV_GROUP * 8 + i % 8; }

/* Where the upper bits of keys begin, and where the scales of a part, if it has any. */
static inline size_t lr_kv_upper_at(int n_kv_heads, int head_dim, int block_size)
{
    return (size_t)n_kv_heads * head_dim / 2 * block_size;
}

static inline size_t lr_kv_scales_at(int type, bool keys, int n_kv_heads, int head_dim, int block_size)
{
    size_t n = (size_t)n_kv_heads * head_dim * block_size;
    return type != LR_Q4_0 ? n * lr_kv_elem(type) : keys ? n / 4 * 3 : n / 2;
}

/* Where a head's values of one slot go: at at, stride apart; the upper bits, if there are any; scales. */
typedef struct lr_kv_slot {
    char *at, *upper;
    uint16_t *s;
    size_t stride, s_stride;
} lr_kv_slot;

static inline lr_kv_slot lr_kv_key_slot(char *k, int type, int n_heads, int dim, int block_size, int h, int slot)
{
    size_t t = (size_t)block_size, row = (size_t)h * dim;
    char *s = k + lr_kv_scales_at(type, true, n_heads, dim, block_size);
    char *upper = k + lr_kv_upper_at(n_heads, dim, block_size) + lr_kv_upper_place(row) * t + slot;
    return (lr_kv_slot){k + lr_kv_place(type, row) * t + slot, type == LR_Q4_0 ? upper : NULL,
                        (uint16_t *)s + (size_t)h * lr_kv_groups(dim) * t + slot, t, t};
}

static inline lr_kv_slot lr_kv_value_slot(char *v, int type, int n_heads, int dim, int block_size, int h, int slot)
{
    size_t row = (size_t)h * block_size + slot;
    char *s = v + lr_kv_scales_at(type, false, n_heads, dim, block_size);
    return (lr_kv_slot){v + lr_kv_place(type, row * dim), NULL, (uint16_t *)s + row * lr_kv_groups(dim), 1, 1};
}

static inline void lr_kv_next_group(lr_kv_slot *to, int type)
{
    to->at += lr_kv_place(type, LR_KV_GROUP) * to->stride;
    if (to->upper) to->upper += lr_kv_upper_place(LR_KV_GROUP) * to->stride;
    to->s += to->s_stride;
}

/* Writes the integers of a group of Q4_0. */
static inline void lr_kv_put4(const int8_t *q, lr_kv_slot to)
{
    for (int d = 0; d < 16; d++) to.at[d * to.stride] = (char)((q[d] & 15) | (q[d + 16] & 15) << 4);
    for (int d = 0; to.upper && d < 8; d++) {
        int u = 0;
        for (int j = 0; j < 4; j++) u |= (q[d + j * 8] >> 4 & 3) << j * 2;
        to.upper[d * to.stride] = (char)u;
    }
}

/* The integer of dimension d of a slot in Q8_0 or Q4_0, and its scale. */
static inline int lr_kv_int(const lr_attn_task *t, const char *part, bool keys, size_t d, size_t slot,
                            const uint16_t **scale)
{
    size_t dim = (size_t)t->head_dim, bs = (size_t)t->block_size, groups = (size_t)lr_kv_groups(t->head_dim);
    int type = keys ? t->k_type : t->v_type;
    size_t h = (size_t)t->kv_head, g = d / LR_KV_GROUP, row = h * bs + slot, i = keys ? h * dim + d : row * dim + d;
    size_t at = lr_kv_place(type, i), s = keys ? (h * groups + g) * bs + slot : row * groups + g;
    int q = (signed char)part[keys ? at * bs + slot : at]; // NOLINT(bugprone-signed-char-misuse): signed on purpose
    *scale = (const uint16_t *)(part + lr_kv_scales_at(type, keys, t->n_kv_heads, t->head_dim, t->block_size));
    *scale += s;
    if (type == LR_Q8_0) return q;
    q = (d % LR_KV_GROUP < LR_KV_GROUP / 2 ? q : q >> 4) & 15;
    if (!keys) return (q ^ 8) - 8;
    const char *upper = part + lr_kv_upper_at(t->n_kv_heads, t->head_dim, t->block_size);
    int u = upper[lr_kv_upper_place(i) * bs + slot] >> d % LR_KV_GROUP / 8 * 2 & 3;
    return ((u << 4 | q) ^ 32) - 32;
}

/* The part of the block that holds position p; *slot is p's place in it. */
static inline const char *lr_attn_block(const lr_attn_task *t, const char *part, int p, int *slot)
{
    *slot = p % t->block_size;
    return part + (size_t)t->table[p / t->block_size] * t->block_stride;
}

#endif
