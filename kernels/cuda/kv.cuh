// kv.cuh - where a slot's keys and values lie, and how they are read.
#pragma once
#include "cu_port.h"
#include "base/dtype.h"
#include "cuda/kernels.h"
#include "rows.cuh"

// Bytes of the values of a block's part, where the scales begin.
static __host__ __device__ __forceinline__ size_t cu_kv_values(int type, int n_kv_heads, int head_dim, int block_size)
{
    size_t n = (size_t)n_kv_heads * head_dim * block_size;
    n *= type == LR_F32 ? 4 : type == LR_F16 || type == LR_BF16 ? 2 : 1;
    return (n + 15) & ~(size_t)15;
}

static inline bool cu_kv_good(const lr_cu_kv *kv)
{
    return kv->k.type == kv->v.type && lr_cu_kv_bytes(kv->k.type, kv->n_kv_heads, kv->head_dim, kv->block_size) > 0;
}

// The block of a slot of a sequence.
static __device__ __forceinline__ char *cu_kv_block(const lr_cu_kv_part &p, const lr_cu_rows_at &at, int seq, int slot,
                                                    int block_size)
{
    int b = at.table[at.table_at[seq] + slot / block_size];
    return (char *)p.base + (size_t)b * p.block_stride;
}
