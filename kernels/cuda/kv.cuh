// kv.cuh - where a slot's keys and values lie, and how they are read.
#pragma once
#include "cu_port.h"
#include "base/dtype.h"
#include "cuda/kernels.h"
#include "rows.cuh"

static __host__ __device__ __forceinline__ size_t cu_kv_round16(size_t n) { return (n + 15) & ~(size_t)15; }

// Where the upper bits of Q6 begin.
static __host__ __device__ __forceinline__ size_t cu_kv_upper(const lr_cu_kv &kv)
{
    return cu_kv_round16((size_t)kv.n_kv_heads * kv.head_dim * kv.block_size / 2);
}

// Bytes of the values of a block's part, where the scales begin.
static __host__ __device__ __forceinline__ size_t cu_kv_values(int type, int n_kv_heads, int head_dim, int block_size)
{
    size_t n = (size_t)n_kv_heads * head_dim * block_size;
    if (type == LR_Q4_0) return cu_kv_round16(n / 2);
    if (type == LR_CU_Q6) return cu_kv_round16(n / 2) + cu_kv_round16(n / 4);
    n *= type == LR_F32 ? 4 : type == LR_F16 || type == LR_BF16 ? 2 : 1;
    return cu_kv_round16(n);
}

static __host__ __device__ __forceinline__ bool cu_kv_turned(int type)
{
    return type == LR_Q8_0 || type == LR_Q4_0 || type == LR_CU_Q6;
}

static inline bool cu_kv_good(const lr_cu_kv *kv)
{
    int k = kv->k.type, v = kv->v.type;
    if (k != v && (k == LR_F32 || k == LR_BF16 || v == LR_F32 || v == LR_BF16)) return false;
    return lr_cu_kv_bytes(k, kv->n_kv_heads, kv->head_dim, kv->block_size) > 0 &&
           lr_cu_kv_bytes(v, kv->n_kv_heads, kv->head_dim, kv->block_size) > 0;
}

// The block of a slot of a sequence.
static __device__ __forceinline__ char *cu_kv_block(const lr_cu_kv_part &p, const lr_cu_rows_at &at, int seq, int slot,
                                                    int block_size)
{
    int b = at.table[at.table_at[seq] + slot / block_size];
    return (char *)p.base + (size_t)b * p.block_stride;
}
