// wrong.cpp - small wrong kernels that the emulation has to report, each in one build at least. wrong N runs number N;
// status 0: silent, 1: reported. Number 0 is right. tests/cuda/mutants says which build must report which.
#include "cuda/cu_port.h"
#include <stdio.h>
#include <stdlib.h>

__global__ void right(int *o)
{
    SHARED(int, s, [64]);
    s[threadIdx.x] = threadIdx.x;
    __syncthreads();
    o[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void leaves_early(int *o)
{
    if (threadIdx.x >= 60) return;
    __syncthreads();
    o[threadIdx.x] = 1;
}
__global__ void two_barriers(int *o)
{
    if (threadIdx.x & 1)
        __syncthreads();
    else
        __syncthreads();
    o[threadIdx.x] = 1;
}
__global__ void half_a_warp(int *o)
{
    int v = threadIdx.x;
    if (v < 16) v = __shfl_xor_sync(0xffffffffu, v, 1);
    o[threadIdx.x] = v;
    __syncthreads();
}
__global__ void mask_without_caller(int *o) { o[threadIdx.x] = __shfl_sync(0x0000ffffu, (int)threadIdx.x, 0); }
__global__ void shared_bounds(int *o)
{
    SHARED(int, s, [64]);
    s[threadIdx.x] = 1;
    __syncthreads();
    o[threadIdx.x] = s[threadIdx.x + 1];
}
__global__ void reads_unset(int *o)
{
    SHARED(float, s, [64]);
    if (threadIdx.x < 32) s[threadIdx.x] = 1;
    __syncthreads();
    o[threadIdx.x] = s[threadIdx.x] == 1;
}
__global__ void no_syncwarp(int *o)
{
    SHARED(int, s, [64]);
    s[threadIdx.x] = threadIdx.x;
    o[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void lost_update(int *o)
{
    SHARED(int, s, [64]);
    s[threadIdx.x] = 0;
    __syncthreads();
    s[threadIdx.x / 2] += 1;
    __syncthreads();
    o[threadIdx.x] = s[threadIdx.x];
}
__global__ void blocks_race(int *o) { o[0] = (int)blockIdx.x; }
__global__ void never_waits(int *o)
{
    SHARED(uint4, s, [64]);
    cu_copy_async16(&s[threadIdx.x], o);
    cu_copy_commit();
}
__global__ void dynamic_bounds(int *o)
{
    SHARED_DYN(int, s);
    s[threadIdx.x] = 1;
    __syncthreads();
    o[threadIdx.x] = s[threadIdx.x];
}
__global__ void misaligned(int *o)
{
    float4 v = *(const float4 *)((const float *)o + 1);
    o[threadIdx.x] = (int)v.x;
}
__global__ void device_bounds(int *o) { o[threadIdx.x + 1] = 1; }

int main(int argc, char **argv)
{
    void (*k[])(int *) = {right,         leaves_early,   two_barriers, half_a_warp,  mask_without_caller,
                          shared_bounds, reads_unset,    no_syncwarp,  lost_update,  blocks_race,
                          never_waits,   dynamic_bounds, misaligned,   device_bounds};
    int i = argc > 1 ? atoi(argv[1]) : 0, n = sizeof k / sizeof *k, *d, h[64];
    if (i < 0 || i >= n) return 2;
    cudaMalloc((void **)&d, 256);
    cudaMemset(d, 0, 256);
    cudaError_t e = cu_launch(k[i], dim3(i == 9 ? 4 : 1), dim3(64), i == 11 ? 128 : 0, 0, d);
    if (!e) e = cudaDeviceSynchronize();
    cudaError_t c = cudaMemcpy(h, d, 256, cudaMemcpyDeviceToHost);
    cudaFree(d);
    if (e || c) {
        printf("reported: %s\n", cudaGetErrorString(e ? e : c));
        return 1;
    }
    for (int j = 0; i == 6 && j < 64; j++)
        if (!h[j]) {
            printf("a wrong value\n");
            return 1;
        }
    return 0;
}
