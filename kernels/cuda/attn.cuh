// attn.cuh - what the two ways of attention share: arguments, and what a row sees.
#pragma once
#include "kv.cuh"

struct attn_args {
    lr_cu_attn p;
    lr_cu_kv kv;
    lr_cu_rows_at at;
    const float *q;
    float *out;
    const lr_cu_tile *tiles;
    int first_row, group, heads, tile_rows; // heads of a group that a tile takes
    float *part;                            // (rows, n_heads, chunks, head_dim + 2): sums, maximum, weights' sum
    int chunks;                             // 0: the tile goes through all chunks itself
};

// The first slot that a row may see.
static __device__ __forceinline__ int first_slot(const attn_args &a, int row)
{
    int from = a.p.window > 0 ? max(0, a.at.pos[row] - a.p.window + 1) : 0;
    return a.at.tree_at && a.at.tree_at[row] >= 0 ? min(from, a.at.tree_at[row]) : from;
}

// Blocks of a grid over rows (x: tile_rows to a tile) -> the row, -1: none.
static __device__ __forceinline__ int row_of_block(const attn_args &a)
{
    int i = blockIdx.x, row = a.first_row + i;
    if (a.tiles) {
        lr_cu_tile t = a.tiles[i / a.tile_rows];
        if (i % a.tile_rows >= t.n) return -1;
        row = t.row + i % a.tile_rows;
    }
    return a.at.seq[row] < 0 ? -1 : row;
}

// What a thread knows about a row of its scores.
struct row_of {
    bool on;
    int row, head, slot, from; // sees slots from .. slot
    int tree_at;               // and of those from here on, what the bits say
    const uint32_t *bits;
};

static __device__ __forceinline__ bool sees(const row_of &r, int slot)
{
    if (!r.on || slot > r.slot) return false;
    int i = slot - r.tree_at;
    return r.bits && i >= 0 ? r.bits[i / 32] >> i % 32 & 1 : slot >= r.from;
}

static __device__ __forceinline__ row_of look_up_row(const attn_args &a, int row, int head)
{
    row_of r = {};
    r.on = true;
    r.row = row;
    r.head = head;
    r.slot = a.at.slot[row];
    r.from = a.p.window > 0 ? a.at.pos[row] - a.p.window + 1 : 0;
    if (a.at.tree_at && a.at.tree_at[row] >= 0) {
        r.tree_at = a.at.tree_at[row];
        r.bits = a.at.tree_bits + (size_t)row * a.at.tree_words;
    }
    return r;
}

cudaError_t cu_attn_f32(const attn_args &, int n_tiles, cudaStream_t); // attn_f32.cu
