// rows.cuh - one block a row: values from a functor, written as float32 and in the forms that products take.
//
// cu_write_row<THREADS>(f, width, out, row, red): out = f(i) for all i < width. f is called up to twice for each i,
// always by the same thread, so it may read what out.f32 overwrites at i.
#pragma once
#include "cu_port.h"
#include "cuda/kernels.h"

// lr_cu_out with its parts found.
struct cu_out {
    float *f32;
    void *packed;
    float *scale;
    int form;
};

static inline size_t cu_round16(size_t n) { return (n + 15) & ~(size_t)15; }

static inline size_t cu_packed_bytes(int form, int m, int k) // of the values alone
{
    size_t n = (size_t)m * k;
    return cu_round16(form == LR_CU_F32 ? 4 * n : form == LR_CU_INT8 ? n : 2 * n);
}

// False: this width has no such form.
static inline bool cu_out_of(lr_cu_out o, int m, int width, cu_out *out)
{
    *out = {o.f32, o.packed, nullptr, (int)o.form};
    if (!o.packed) return o.f32 != nullptr;
    if (o.form < 0 || o.form >= LR_CU_FORMS || (o.form == LR_CU_INT8 && width % 32)) return false;
    out->scale = (float *)((char *)o.packed + cu_packed_bytes(o.form, m, width));
    return true;
}

// The exponent e that takes max into [2^13, 2^14); 0 for a row of zeros.
static __device__ __forceinline__ int cu_row_exponent(float max)
{
    if (!(max > 0)) return 0;
    int x = (int)(__float_as_uint(max) >> 23 & 255) - 126; // max = f * 2^x, f in [1/2, 1)
    int e = 14 - x;
    return e < -126 ? -126 : e > 126 ? 126 : e;
}
static __device__ __forceinline__ float cu_exp2i(int e) { return __uint_as_float((unsigned)(e + 127) << 23); }

template <int THREADS, class F>
static __device__ __forceinline__ void cu_write_row(const F &f, int width, const cu_out &o, int row, float *red)
{
    size_t at = (size_t)row * width;
    if (o.packed && o.form == LR_CU_INT8) {
        int lane = threadIdx.x % 32;
        for (int i = threadIdx.x; i < width; i += THREADS) { // width is of 32: whole warps
            float v = f(i), max = cu_warp_max(fabsf(v)), d = max / 127.0f;
            if (o.f32) o.f32[at + i] = v;
            ((int8_t *)o.packed)[at + i] = (int8_t)(d > 0 ? __float2int_rn(v / d) : 0);
            if (lane == 0) o.scale[(at + i) / 32] = d;
        }
        return;
    }
    float up = 1;
    if (o.packed && o.form == LR_CU_F16) {
        float max = 0;
        for (int i = threadIdx.x; i < width; i += THREADS) max = fmaxf(max, fabsf(f(i)));
        int e = cu_row_exponent(cu_block_max<THREADS>(max, red));
        up = cu_exp2i(e);
        if (threadIdx.x == 0) o.scale[row] = cu_exp2i(-e);
    }
    for (int i = threadIdx.x; i < width; i += THREADS) {
        float v = f(i);
        if (o.f32) o.f32[at + i] = v;
        if (!o.packed) continue;
        if (o.form == LR_CU_F32)
            ((float *)o.packed)[at + i] = v;
        else
            ((uint16_t *)o.packed)[at + i] = o.form == LR_CU_BF16 ? cu_to_bf16(v) : cu_to_f16(v * up);
    }
}
