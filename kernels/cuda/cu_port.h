// cu_port.h - the only header of the CUDA world that a kernel includes, and the only place with PTX.
//
// The same .cu builds with nvcc, or as C++ with -DLLMRUN_CUDA_HOST on the emulation in emu/ (every CUDA thread is a
// fiber). Shared memory: SHARED(float, name, [32]) and SHARED_DYN(float, name). Launches: cu_launch(kernel<..>, grid,
// block, shared bytes, stream, arguments...). Half and bfloat16 values are uint16_t in memory.
#pragma once
#ifdef LLMRUN_CUDA_HOST
#include "cuda_emu.h"
#else
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdint.h>

#define SHARED(T, name, ...) __shared__ T name __VA_ARGS__
#define SHARED_DYN(T, name)                                                                                            \
    extern __shared__ __align__(16) unsigned char lr_dyn_smem[];                                                       \
    T *name = reinterpret_cast<T *>(lr_dyn_smem)

template <class... P, class... A>
static inline cudaError_t cu_launch(void (*k)(P...), dim3 g, dim3 b, size_t smem, cudaStream_t s, A... a)
{
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = g;
    cfg.blockDim = b;
    cfg.dynamicSmemBytes = smem;
    cfg.stream = s;
    return cudaLaunchKernelEx(&cfg, k, static_cast<P>(a)...);
}
// A kernel may ask for more than 48 KiB of dynamic shared memory only after this.
template <class... P> static inline cudaError_t cu_allow_shared(void (*k)(P...), size_t bytes)
{
    return cudaFuncSetAttribute((const void *)k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

// ---- PTX; each has a twin in emu/cuda_emu.h ----

// d (16 x 8) += a (16 x 16, row-major) * b (16 x 8); thread l holds d[l/4][l%4*2 + 0,1], d[l/4 + 8][..]; a's four
// registers are (row, k) = (l/4, l%4*2), (+8, ..), (.., +8), (+8, +8); b's two are (k, column) = (l%4*2, l/4), (+8,
// ..).
static __device__ __forceinline__ void cu_mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ __forceinline__ void cu_mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four 8 x 8 matrices of 16-bit values; lane l names row l % 8 of matrix l / 8, and gets (l/4, l%4*2 + 0,1) of each.
static __device__ __forceinline__ void cu_ldmatrix(uint32_t r[4], const void *row)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 :);
}
// The same, transposed: lane l gets (l%4*2 + 0,1 ; l/4) of each.
static __device__ __forceinline__ void cu_ldmatrix_t(uint32_t r[4], const void *row)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 :);
}
static __device__ __forceinline__ void cu_copy_async16(void *dst, const void *src)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(dst);
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(at), "l"(src) : "memory");
}
static __device__ __forceinline__ void cu_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> static __device__ __forceinline__ void cu_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
static __device__ __forceinline__ float cu_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ float cu_f16(uint16_t h) { return __half2float(__ushort_as_half(h)); }
static __device__ __forceinline__ uint16_t cu_to_f16(float f) { return __half_as_ushort(__float2half_rn(f)); }
#endif

// ---- the same everywhere ----

#define CU_FULL 0xffffffffu

static __device__ __forceinline__ float cu_bf16(uint16_t h) { return __uint_as_float((unsigned)h << 16); }
static __device__ __forceinline__ uint16_t cu_to_bf16(float f) // nearest even, NaN kept
{
    unsigned u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
// E4M3 is a half's layout with three bits of mantissa and 8 less in the exponent.
static __device__ __forceinline__ float cu_e4m3(uint8_t b)
{
    return cu_f16((uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7)) * 256.0f;
}
static __device__ __forceinline__ uint8_t cu_to_e4m3(float f) // nearest even, held within +-448
{
    unsigned sign = __float_as_uint(f) >> 24 & 0x80;
    float a = fminf(fabsf(f), 448.0f);
    if (a < 0x1p-6f) return (uint8_t)(sign | (unsigned)__float2int_rn(a * 512.0f)); // steps of 2^-9; 8 is 2^-6
    unsigned u = __float_as_uint(a);
    u += 0x7ffff + (u >> 20 & 1);
    return (uint8_t)(sign | (u - (120u << 23)) >> 20);
}

static __device__ __forceinline__ float cu_warp_sum(float v)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(CU_FULL, v, o);
    return v;
}
static __device__ __forceinline__ float cu_warp_max(float v)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(CU_FULL, v, o));
    return v;
}
// Sum and maximum over a block of THREADS; all threads get them. Two barriers.
template <int THREADS> static __device__ __forceinline__ float cu_block_sum(float v, float *red)
{
    v = cu_warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = v;
    __syncthreads();
    float s = 0;
    for (int i = 0; i < THREADS / 32; i++) s += red[i];
    return s;
}
template <int THREADS> static __device__ __forceinline__ float cu_block_max(float v, float *red)
{
    v = cu_warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = v;
    __syncthreads();
    float s = red[0];
    for (int i = 1; i < THREADS / 32; i++) s = fmaxf(s, red[i]);
    return s;
}
