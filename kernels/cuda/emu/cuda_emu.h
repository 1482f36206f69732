// cuda_emu.h - runs CUDA kernels on the CPU: a fiber a CUDA thread, blocks one after another.
//
// Fibers switch only at __syncthreads, warp collectives and the end, in an order drawn from a seed. cu_port.h includes
// this in place of NVIDIA's headers when LLMRUN_CUDA_HOST is defined; README.md has the rules for kernels. Three builds
// find different faults: plain (EMU_ORDER=fwd|rev|rand, EMU_SEED=n; memory starts as NaN), ASan + UBSan (-DEMU_ASAN:
// bounds, also of shared memory, alignment), TSan (-DEMU_TSAN, cuda_emu.cpp itself not instrumented: a happens-before
// check of shared and global memory with a TSan fiber a CUDA thread).
#pragma once
#include <functional>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <cuda_runtime_api.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __restrict__
#define __shared__   EMU_use_SHARED_or_SHARED_DYN_instead
#define __constant__ EMU_no_constant_symbols_pass_arguments

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct emu_copy {
    void *dst;
    const void *src;
    int group;
};
struct emu_thread {
    uint3 tid;
    unsigned lin, lane, warp;
    int state;
    const char *file; // where it waits
    int line, site;
    int op, arg, width; // pending warp collective
    unsigned mask;
    size_t isz, osz;
    const void *in;
    void *out;
    void *sp, *stack, *tsan, *asan_fake;
    emu_copy pend[64]; // cp.async that nobody has waited for
    int n_pend, group;
};
extern emu_thread *emu_cur;
extern dim3 emu_bid, emu_bdim, emu_gdim;
#define threadIdx (emu_cur->tid)
#define blockIdx  (emu_bid)
#define blockDim  (emu_bdim)
#define gridDim   (emu_gdim)

enum emu_op {
    EMU_SHFL,
    EMU_SHFL_UP,
    EMU_SHFL_DOWN,
    EMU_SHFL_XOR,
    EMU_BALLOT,
    EMU_SYNCWARP,
    EMU_REDADD,
    EMU_REDMAX,
    EMU_REDMIN,
    EMU_MATCH,
    EMU_MMA_F16,
    EMU_MMA_BF16,
    EMU_LDMATRIX,
    EMU_LDMATRIX_T,
};
void emu_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
int emu_syncthreads(int kind, int pred, const char *file, int line, int site);
void emu_collective(int op, unsigned mask, int arg, int width, const void *in, size_t isz, void *out, size_t osz,
                    const char *file, int line);
void *emu_shared(const void *key, size_t bytes);
void *emu_dyn_shared();
void emu_fence();
cudaError_t emu_launch(const void *kernel, dim3 g, dim3 b, size_t smem, cudaStream_t s, std::function<void()> fn);
cudaError_t emu_allow_shared(const void *kernel, size_t bytes);
float emu_f16_to_f32(uint16_t h);
uint16_t emu_f32_to_f16(float f);

#define SHARED(T, name, ...)                                                                                           \
    typedef T name##_shared_t __VA_ARGS__;                                                                             \
    static const char name##_shared_key = 0;                                                                           \
    name##_shared_t &name = *(name##_shared_t *)emu_shared(&name##_shared_key, sizeof(name##_shared_t))
#define SHARED_DYN(T, name) T *name = (T *)emu_dyn_shared()

template <class... P, class... A>
static inline cudaError_t cu_launch(void (*k)(P...), dim3 g, dim3 b, size_t smem, cudaStream_t s, A... a)
{
    std::tuple<P...> t(static_cast<P>(a)...);
    return emu_launch((const void *)k, g, b, smem, s, [=] { std::apply(k, t); });
}
template <class... P> static inline cudaError_t cu_allow_shared(void (*k)(P...), size_t bytes)
{
    return emu_allow_shared((const void *)k, bytes);
}

// ---- barriers, fences ----
#define __syncthreads()        ((void)emu_syncthreads(0, 0, __FILE__, __LINE__, __COUNTER__))
#define __syncthreads_count(p) emu_syncthreads(1, (p) != 0, __FILE__, __LINE__, __COUNTER__)
#define __syncthreads_and(p)   emu_syncthreads(2, (p) != 0, __FILE__, __LINE__, __COUNTER__)
#define __syncthreads_or(p)    emu_syncthreads(3, (p) != 0, __FILE__, __LINE__, __COUNTER__)
#define __threadfence()        emu_fence()
#define __threadfence_block()  emu_fence()

// ---- warp collectives ----
template <class T> static inline T emu_shfl(int op, unsigned m, T v, int arg, int width, const char *f, int l)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffle of 4 or 8 bytes");
    T r;
    emu_collective(op, m, arg, width, &v, sizeof v, &r, sizeof r, f, l);
    return r;
}
static inline int emu_w() { return 32; }
static inline int emu_w(int w) { return w; }
#define __shfl_sync(m, v, s, ...)      emu_shfl(EMU_SHFL, m, v, s, emu_w(__VA_ARGS__), __FILE__, __LINE__)
#define __shfl_up_sync(m, v, s, ...)   emu_shfl(EMU_SHFL_UP, m, v, s, emu_w(__VA_ARGS__), __FILE__, __LINE__)
#define __shfl_down_sync(m, v, s, ...) emu_shfl(EMU_SHFL_DOWN, m, v, s, emu_w(__VA_ARGS__), __FILE__, __LINE__)
#define __shfl_xor_sync(m, v, s, ...)  emu_shfl(EMU_SHFL_XOR, m, v, s, emu_w(__VA_ARGS__), __FILE__, __LINE__)
template <class T> static inline T emu_wred(int op, unsigned m, T v, const char *f, int l)
{
    static_assert(sizeof(T) == 4, "reduction of 4 bytes");
    T r;
    emu_collective(op, m, (T)-1 < (T)0, 0, &v, sizeof v, &r, sizeof r, f, l);
    return r;
}
static inline unsigned emu_ballot(unsigned m, int p, const char *f, int l)
{
    unsigned r;
    p = p != 0;
    emu_collective(EMU_BALLOT, m, 0, 0, &p, sizeof p, &r, sizeof r, f, l);
    return r;
}
#define __ballot_sync(m, p) emu_ballot(m, p, __FILE__, __LINE__)
static inline unsigned emu_match(unsigned m, int v, const char *f, int l)
{
    unsigned r;
    emu_collective(EMU_MATCH, m, 0, 0, &v, sizeof v, &r, sizeof r, f, l);
    return r;
}
#define __match_any_sync(m, v)  emu_match(m, v, __FILE__, __LINE__)
#define __any_sync(m, p)        (emu_ballot(m, p, __FILE__, __LINE__) != 0)
#define __all_sync(m, p)        (emu_ballot(m, !(p), __FILE__, __LINE__) == 0)
#define __reduce_add_sync(m, v) emu_wred(EMU_REDADD, m, v, __FILE__, __LINE__)
#define __reduce_max_sync(m, v) emu_wred(EMU_REDMAX, m, v, __FILE__, __LINE__)
#define __reduce_min_sync(m, v) emu_wred(EMU_REDMIN, m, v, __FILE__, __LINE__)
static inline void emu_syncwarp(const char *f, int l, unsigned m = 0xffffffffu)
{
    emu_collective(EMU_SYNCWARP, m, 0, 0, nullptr, 0, nullptr, 0, f, l);
}
#define __syncwarp(...) emu_syncwarp(__FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__)

// ---- cp.async: the copy really happens only at the wait ----
void emu_copy_later(void *dst, const void *src); // the queue is the emulation's own: no sanitizer sees it
void emu_copy_commit();
bool emu_copy_due(int n, emu_copy *c);
static inline void cu_copy_async16(void *dst, const void *src)
{
    if (((uintptr_t)dst | (uintptr_t)src) % 16) emu_fail("cp.async misaligned: dst %p src %p", dst, src);
    emu_copy_later(dst, src);
}
static inline void cu_copy_commit() { emu_copy_commit(); }
template <int N> static inline void cu_copy_wait()
{
    for (emu_copy c; emu_copy_due(N, &c);) memcpy(c.dst, c.src, 16);
}

// ---- tensor cores ----
struct emu_mma_in {
    uint32_t a[4], b[2];
    float c[4];
};
static inline void emu_mma(int op, float d[4], const uint32_t a[4], const uint32_t b[2], const char *f, int l)
{
    emu_mma_in in;
    memcpy(in.a, a, 16);
    memcpy(in.b, b, 8);
    memcpy(in.c, d, 16);
    emu_collective(op, ~0u, 0, 0, &in, sizeof in, d, 16, f, l);
}
#define cu_mma_f16(d, a, b)  emu_mma(EMU_MMA_F16, d, a, b, __FILE__, __LINE__)
#define cu_mma_bf16(d, a, b) emu_mma(EMU_MMA_BF16, d, a, b, __FILE__, __LINE__)
static inline void emu_ldmatrix(int op, uint32_t r[4], const void *p, const char *f, int l)
{
    if ((uintptr_t)p % 16) emu_fail("ldmatrix row not 16-byte aligned");
    uint32_t row[4];
    memcpy(row, p, 16); // read by the lane itself: the sanitizers see the access
    emu_collective(op, ~0u, 0, 0, row, 16, r, 16, f, l);
}
#define cu_ldmatrix(r, p)   emu_ldmatrix(EMU_LDMATRIX, r, p, __FILE__, __LINE__)
#define cu_ldmatrix_t(r, p) emu_ldmatrix(EMU_LDMATRIX_T, r, p, __FILE__, __LINE__)

// ---- atomics (relaxed, as in CUDA); kernels add integers only ----
template <class T, class F> static inline T emu_rmw(T *p, F f)
{
    T o, n;
    __atomic_load(p, &o, __ATOMIC_RELAXED);
    do n = f(o);
    while (!__atomic_compare_exchange(p, &o, &n, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return o;
}
static inline int atomicAdd(int *p, int v)
{
    return emu_rmw(p, [=](int o) { return o + v; });
}
static inline unsigned atomicAdd(unsigned *p, unsigned v)
{
    return emu_rmw(p, [=](unsigned o) { return o + v; });
}
static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long v)
{
    return emu_rmw(p, [=](unsigned long long o) { return o + v; });
}

// ---- scalars ----
template <class T> static inline T __ldg(const T *p) { return *p; }
template <class A, class B> static inline A emu_bits(B b)
{
    static_assert(sizeof(A) == sizeof(B), "");
    A a;
    memcpy(&a, &b, sizeof a);
    return a;
}
static inline int __float_as_int(float f) { return emu_bits<int>(f); }
static inline float __int_as_float(int i) { return emu_bits<float>(i); }
static inline unsigned __float_as_uint(float f) { return emu_bits<unsigned>(f); }
static inline float __uint_as_float(unsigned i) { return emu_bits<float>(i); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
    return c;
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31));
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s)
{
    uint64_t v = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned sel = s >> 4 * i & 15, b = (unsigned)(v >> 8 * (sel & 7)) & 255;
        if (sel & 8) b = b & 128 ? 255 : 0;
        r |= b << 8 * i;
    }
    return r;
}
static inline unsigned __vsub4(unsigned a, unsigned b)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) r |= (((a >> i) - (b >> i)) & 255) << i;
    return r;
}
static inline int min(int a, int b) { return b < a ? b : a; }
static inline int max(int a, int b) { return a < b ? b : a; }

// ---- what cu_port.h has in PTX or in NVIDIA's types ----
static inline float cu_exp2(float x) { return exp2f(x); }
static inline float cu_f16(uint16_t h) { return emu_f16_to_f32(h); }
static inline uint16_t cu_to_f16(float f) { return emu_f32_to_f16(f); }
