// formats.cuh - GGUF's weight blocks on the device: eight values at a time as floats, or 32 as bytes for integer
// products.
//
// src/base/dtype.c has the layouts in plain words and is the reference. A format is a struct with
//   eight(row, i, v)   values i .. i+7 of a row (i a multiple of 8), by the block formula in float32, the same bits as
//                      lr_dtype_to_f32
//   and, where BYTES:
//   unit(row, u, b)    values 32u .. 32u+31 as b.q (8 words of 4 int8), to be read as d[i / 16] * (q - OFFSET) + m[i /
//   16]
// Blocks lie at any byte (17, 18, 22, 34, 210 bytes), so words are put together from aligned ones: up to 4 bytes are
// read behind what is needed, which the contract of lr_cu_weight allows.
#pragma once
#include "cu_port.h"
#include "base/dtype.h"

struct cu_unit {
    int q[8];
    float d[2], m[2];
};

template <int N> static __device__ __forceinline__ void cu_words(const uint8_t *p, uint32_t *out) // N words, anywhere
{
    const uint32_t *w = (const uint32_t *)((uintptr_t)p & ~(uintptr_t)3);
    unsigned shift = ((unsigned)(uintptr_t)p & 3) * 8;
    uint32_t lo = __ldg(w);
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t hi = __ldg(w + i + 1);
        out[i] = __funnelshift_r(lo, hi, shift);
        lo = hi;
    }
}
static __device__ __forceinline__ uint32_t cu_word(const uint8_t *p)
{
    uint32_t w;
    cu_words<1>(p, &w);
    return w;
}
static __device__ __forceinline__ float cu_half(const uint8_t *p) { return cu_f16((uint16_t)(p[0] | p[1] << 8)); }

// ---- plain numbers ----

struct cu_f32_t {
    enum { BLOCK = 1, BYTES = 0, OFFSET = 0, MINS = 0, HALVES = 0 };
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const float *p = (const float *)row + i;
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = p[j];
    }
    static __device__ __forceinline__ float one(const uint8_t *row, int i) { return ((const float *)row)[i]; }
};
struct cu_f16_t {
    enum { BLOCK = 1, BYTES = 0, OFFSET = 0, MINS = 0, HALVES = 0 };
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        uint32_t w[4];
        cu_words<4>(row + 2 * (size_t)i, w);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = cu_f16((uint16_t)(w[j / 2] >> 16 * (j % 2)));
    }
    static __device__ __forceinline__ float one(const uint8_t *row, int i) { return cu_half(row + 2 * (size_t)i); }
};
struct cu_bf16_t {
    enum { BLOCK = 1, BYTES = 0, OFFSET = 0, MINS = 0, HALVES = 0 };
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        uint32_t w[4];
        cu_words<4>(row + 2 * (size_t)i, w);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __uint_as_float(j % 2 ? w[j / 2] & 0xffff0000u : w[j / 2] << 16);
    }
    static __device__ __forceinline__ float one(const uint8_t *row, int i)
    {
        const uint8_t *p = row + 2 * (size_t)i;
        return cu_bf16((uint16_t)(p[0] | p[1] << 8));
    }
};

template <class F> static __device__ __forceinline__ float cu_one_of_eight(const uint8_t *row, int i)
{
    float v[8], x = 0;
    F::eight(row, i & ~7, v);
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (j == (i & 7)) x = v[j];
    return x;
}
#define CU_ONE(F)                                                                                                      \
    static __device__ __forceinline__ float one(const uint8_t *row, int i) { return cu_one_of_eight<F>(row, i); }

// ---- blocks of 32: value j in the low nibble of byte j, value j + 16 in the high one ----

static __device__ __forceinline__ void cu_nibbles16(const uint8_t *p, int *q) // 16 bytes -> 32 values as bytes
{
    uint32_t w[4];
    cu_words<4>(p, w);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        q[i] = (int)(w[i] & 0x0f0f0f0fu);
        q[i + 4] = (int)(w[i] >> 4 & 0x0f0f0f0fu);
    }
}
// The low four bits of values i .. i+7 of a block of 32.
static __device__ __forceinline__ void cu_nibbles8(const uint8_t *p, int i, uint32_t *w)
{
    cu_words<2>(p + i % 16, w);
    w[0] = w[0] >> i / 16 * 4 & 0x0f0f0f0fu;
    w[1] = w[1] >> i / 16 * 4 & 0x0f0f0f0fu;
}
// Four bits, to bit 4 of four bytes.
static __device__ __forceinline__ uint32_t cu_fifth(uint32_t h)
{
    return (h & 1) << 4 | (h & 2) << 11 | (h & 4) << 18 | (h & 8) << 25;
}
static __device__ __forceinline__ float cu_byte(uint32_t w, int j) { return (float)(int)(w >> 8 * j & 255); }

template <int SIZE, bool MIN, bool FIFTH> struct cu_q45_t {
    enum { BLOCK = 32, BYTES = 1, MINS = MIN, OFFSET = MIN ? 0 : FIFTH ? 16 : 8, HALVES = 0 };
    enum { AT_H = MIN ? 4 : 2, AT_Q = AT_H + (FIFTH ? 4 : 0) };
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const uint8_t *p = row + (size_t)(i / 32) * SIZE;
        float d = cu_half(p), m = MIN ? cu_half(p + 2) : 0;
        uint32_t w[2];
        cu_nibbles8(p + AT_Q, i % 32, w);
        if (FIFTH) {
            uint32_t h = cu_word(p + AT_H) >> i % 32;
            w[0] |= cu_fifth(h);
            w[1] |= cu_fifth(h >> 4);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float q = cu_byte(w[j / 4], j % 4);
            v[j] = MIN ? __fadd_rn(__fmul_rn(d, q), m) : d * (q - (float)OFFSET);
        }
    }
    static __device__ __forceinline__ void unit(const uint8_t *row, int u, cu_unit &b)
    {
        const uint8_t *p = row + (size_t)u * SIZE;
        b.d[0] = b.d[1] = cu_half(p);
        b.m[0] = b.m[1] = MIN ? cu_half(p + 2) : 0;
        cu_nibbles16(p + AT_Q, b.q);
        if (FIFTH) {
            uint32_t h = cu_word(p + AT_H);
#pragma unroll
            for (int i = 0; i < 8; i++) b.q[i] |= (int)cu_fifth(h >> 4 * i);
        }
    }
    CU_ONE(cu_q45_t)
};
typedef cu_q45_t<18, false, false> cu_q4_0_t;
typedef cu_q45_t<20, true, false> cu_q4_1_t;
typedef cu_q45_t<22, false, true> cu_q5_0_t;
typedef cu_q45_t<24, true, true> cu_q5_1_t;

struct cu_q8_0_t {
    enum { BLOCK = 32, BYTES = 1, OFFSET = 0, MINS = 0, HALVES = 0 };
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const uint8_t *p = row + (size_t)(i / 32) * 34;
        float d = cu_half(p);
        uint32_t w[2];
        cu_words<2>(p + 2 + i % 32, w);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = d * (float)(int8_t)(w[j / 4] >> 8 * (j % 4));
    }
    static __device__ __forceinline__ void unit(const uint8_t *row, int u, cu_unit &b)
    {
        const uint8_t *p = row + (size_t)u * 34;
        b.d[0] = b.d[1] = cu_half(p);
        cu_words<8>(p + 2, (uint32_t *)b.q);
    }
    CU_ONE(cu_q8_0_t)
};

struct cu_mxfp4_t {
    enum { BLOCK = 32, BYTES = 1, OFFSET = 0, MINS = 0, HALVES = 0 };
    static __device__ __forceinline__ float scale(uint8_t e) // 2^(e - 128): the values below are doubled
    {
        return __uint_as_float(e < 2 ? 0x200000u << e : (unsigned)(e - 1) << 23);
    }
    // Eight codes, two a byte -> the doubled values of the low ones and of the high ones, as bytes.
    static __device__ __forceinline__ void look(uint32_t w, uint32_t &low, uint32_t &high)
    {
        uint32_t a = __byte_perm(0x03020100u, 0x0c080604u, w & 0x7777), mag,
                 b = __byte_perm(0x03020100u, 0x0c080604u, w >> 16 & 0x7777), neg = (w >> 3 & 0x01010101u) * 255;
        mag = __byte_perm(a, b, 0x6420);
        low = __vsub4(mag ^ neg, neg);
        mag = __byte_perm(a, b, 0x7531);
        neg = (w >> 7 & 0x01010101u) * 255;
        high = __vsub4(mag ^ neg, neg);
    }
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const uint8_t *p = row + (size_t)(i / 32) * 17;
        float d = scale(p[0]);
        uint32_t w[2], low[2], high[2];
        cu_words<2>(p + 1 + i % 16, w);
        look(w[0], low[0], high[0]);
        look(w[1], low[1], high[1]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            uint32_t x = i % 32 < 16 ? low[j / 4] : high[j / 4];
            v[j] = d * (float)(int8_t)(x >> 8 * (j % 4));
        }
    }
    static __device__ __forceinline__ void unit(const uint8_t *row, int u, cu_unit &b)
    {
        const uint8_t *p = row + (size_t)u * 17;
        uint32_t w[4], low, high;
        b.d[0] = b.d[1] = scale(p[0]);
        cu_words<4>(p + 1, w);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            look(w[i], low, high);
            b.q[i] = (int)low;
            b.q[i + 4] = (int)high;
        }
    }
    CU_ONE(cu_mxfp4_t)
};

// ---- super-blocks of 256 ----

// Six-bit scale and minimum of sub-block k of Q4_K and Q5_K.
static __device__ __forceinline__ void cu_scale_min(const uint8_t *s, int k, int &scale, int &min)
{
    if (k < 4) {
        scale = s[k] & 63;
        min = s[k + 4] & 63;
    } else {
        scale = (s[k + 4] & 15) | s[k - 4] >> 6 << 4;
        min = s[k + 4] >> 4 | s[k] >> 6 << 4;
    }
}
template <int SIZE, bool FIFTH> struct cu_q45k_t {
    enum { BLOCK = 256, BYTES = 1, OFFSET = 0, MINS = 1, HALVES = 0 };
    enum { AT_Q = FIFTH ? 48 : 16 };
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const uint8_t *p = row + (size_t)(i / 256) * SIZE;
        int k = i / 32 % 8, j = i % 32, s, m;
        cu_scale_min(p + 4, k, s, m);
        float d = __fmul_rn(cu_half(p), (float)s), dm = __fmul_rn(cu_half(p + 2), (float)m);
        uint32_t w[2], h[2];
        cu_words<2>(p + AT_Q + 32 * (k / 2) + j, w);
        if (FIFTH) cu_words<2>(p + 16 + j, h);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            w[t] = w[t] >> 4 * (k % 2) & 0x0f0f0f0fu;
            if (FIFTH) w[t] |= (h[t] >> k & 0x01010101u) << 4;
        }
#pragma unroll
        for (int t = 0; t < 8; t++) v[t] = __fsub_rn(__fmul_rn(d, cu_byte(w[t / 4], t % 4)), dm);
    }
    static __device__ __forceinline__ void unit(const uint8_t *row, int u, cu_unit &b)
    {
        const uint8_t *p = row + (size_t)(u / 8) * SIZE;
        int k = u % 8, s, m;
        cu_scale_min(p + 4, k, s, m);
        b.d[0] = b.d[1] = cu_half(p) * (float)s;
        b.m[0] = b.m[1] = -(cu_half(p + 2) * (float)m);
        uint32_t w[8], h[8];
        cu_words<8>(p + AT_Q + 32 * (k / 2), w);
        if (FIFTH) cu_words<8>(p + 16, h);
#pragma unroll
        for (int t = 0; t < 8; t++) {
            b.q[t] = (int)(w[t] >> 4 * (k % 2) & 0x0f0f0f0fu);
            if (FIFTH) b.q[t] |= (int)((h[t] >> k & 0x01010101u) << 4);
        }
    }
    CU_ONE(cu_q45k_t)
};
typedef cu_q45k_t<144, false> cu_q4_k_t;
typedef cu_q45k_t<176, true> cu_q5_k_t;

struct cu_q6_k_t {
    enum { BLOCK = 256, BYTES = 1, OFFSET = 32, MINS = 0, HALVES = 1 };
    // Words of values i, i+4, .. of a super-block: i % 128 picks 64 + 32 bytes and shifts.
    template <int N> static __device__ __forceinline__ void bits(const uint8_t *p, int i, uint32_t *w)
    {
        int half = i / 128, r = i % 128;
        uint32_t h[N];
        cu_words<N>(p + 64 * half + r % 64, w);
        cu_words<N>(p + 128 + 32 * half + r % 32, h);
#pragma unroll
        for (int t = 0; t < N; t++)
            w[t] = (w[t] >> 4 * (r / 64) & 0x0f0f0f0fu) | (h[t] >> 2 * (r / 32) & 0x03030303u) << 4;
    }
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const uint8_t *p = row + (size_t)(i / 256) * 210;
        float d = __fmul_rn(cu_half(p + 208), (float)(int8_t)p[192 + i % 256 / 16]);
        uint32_t w[2];
        bits<2>(p, i % 256, w);
#pragma unroll
        for (int t = 0; t < 8; t++) v[t] = d * (cu_byte(w[t / 4], t % 4) - 32.0f);
    }
    static __device__ __forceinline__ void unit(const uint8_t *row, int u, cu_unit &b)
    {
        const uint8_t *p = row + (size_t)(u / 8) * 210;
        float d = cu_half(p + 208);
        b.d[0] = d * (float)(int8_t)p[192 + u % 8 * 2];
        b.d[1] = d * (float)(int8_t)p[192 + u % 8 * 2 + 1];
        bits<8>(p, u % 8 * 32, (uint32_t *)b.q);
    }
    CU_ONE(cu_q6_k_t)
};

// Two bits of each of N words of values i, i+4, .. of a super-block: 64 bytes at p.
template <int N> static __device__ __forceinline__ void cu_two_bits(const uint8_t *p, int i, uint32_t *w)
{
    cu_words<N>(p + i / 128 * 32 + i % 32, w);
#pragma unroll
    for (int t = 0; t < N; t++) w[t] = w[t] >> i % 128 / 32 * 2 & 0x03030303u;
}

struct cu_q2_k_t {
    enum { BLOCK = 256, BYTES = 1, OFFSET = 0, MINS = 1, HALVES = 1 };
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const uint8_t *p = row + (size_t)(i / 256) * 84;
        int s = p[i % 256 / 16];
        float d = __fmul_rn(cu_half(p + 80), (float)(s & 15)), dm = __fmul_rn(cu_half(p + 82), (float)(s >> 4));
        uint32_t w[2];
        cu_two_bits<2>(p + 16, i % 256, w);
#pragma unroll
        for (int t = 0; t < 8; t++) v[t] = __fsub_rn(__fmul_rn(d, cu_byte(w[t / 4], t % 4)), dm);
    }
    static __device__ __forceinline__ void unit(const uint8_t *row, int u, cu_unit &b)
    {
        const uint8_t *p = row + (size_t)(u / 8) * 84;
        float d = cu_half(p + 80), min = cu_half(p + 82);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            int s = p[u % 8 * 2 + t];
            b.d[t] = d * (float)(s & 15);
            b.m[t] = -(min * (float)(s >> 4));
        }
        cu_two_bits<8>(p + 16, u % 8 * 32, (uint32_t *)b.q);
    }
    CU_ONE(cu_q2_k_t)
};

struct cu_q3_k_t {
    enum { BLOCK = 256, BYTES = 1, OFFSET = 4, MINS = 0, HALVES = 1 };
    static __device__ __forceinline__ float scale(const uint8_t *p, int k) // of values 16k .. 16k + 15
    {
        const uint8_t *s = p + 96;
        int low = s[k % 8] >> 4 * (k / 8) & 15, high = s[8 + k % 4] >> 2 * (k / 4) & 3;
        return __fmul_rn(cu_half(p + 108), (float)((low | high << 4) - 32));
    }
    template <int N> static __device__ __forceinline__ void bits(const uint8_t *p, int i, uint32_t *w)
    {
        uint32_t h[N];
        cu_two_bits<N>(p + 32, i, w);
        cu_words<N>(p + i % 32, h);
#pragma unroll
        for (int t = 0; t < N; t++) w[t] |= (h[t] >> i / 32 & 0x01010101u) << 2;
    }
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const uint8_t *p = row + (size_t)(i / 256) * 110;
        float d = scale(p, i % 256 / 16);
        uint32_t w[2];
        bits<2>(p, i % 256, w);
#pragma unroll
        for (int t = 0; t < 8; t++) v[t] = d * (cu_byte(w[t / 4], t % 4) - 4.0f);
    }
    static __device__ __forceinline__ void unit(const uint8_t *row, int u, cu_unit &b)
    {
        const uint8_t *p = row + (size_t)(u / 8) * 110;
        b.d[0] = scale(p, u % 8 * 2);
        b.d[1] = scale(p, u % 8 * 2 + 1);
        bits<8>(p, u % 8 * 32, (uint32_t *)b.q);
    }
    CU_ONE(cu_q3_k_t)
};

// ---- four bits by a table ----

// Eight codes, two a byte -> the values of the low ones and of the high ones, as bytes.
static __device__ __forceinline__ void cu_iq4_look(uint32_t w, uint32_t &low, uint32_t &high)
{
    uint32_t first = w & 0x7777, second = w >> 16 & 0x7777;
    uint32_t a = __byte_perm(0xbfad9881u, 0xf6eaddcfu, first), b = __byte_perm(0xbfad9881u, 0xf6eaddcfu, second),
             c = __byte_perm(0x26190d01u, 0x71594535u, first), d = __byte_perm(0x26190d01u, 0x71594535u, second);
    uint32_t upper = (w >> 3 & 0x01010101u) * 255;
    low = (__byte_perm(a, b, 0x6420) & ~upper) | (__byte_perm(c, d, 0x6420) & upper);
    upper = (w >> 7 & 0x01010101u) * 255;
    high = (__byte_perm(a, b, 0x7531) & ~upper) | (__byte_perm(c, d, 0x7531) & upper);
}
// Values i .. i+7 of 32, 16 bytes at q, times d.
static __device__ __forceinline__ void cu_iq4_eight(const uint8_t *q, int i, float d, float *v)
{
    uint32_t w[2], low[2], high[2];
    cu_words<2>(q + i % 16, w);
    cu_iq4_look(w[0], low[0], high[0]);
    cu_iq4_look(w[1], low[1], high[1]);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = d * (float)(int8_t)((i < 16 ? low[j / 4] : high[j / 4]) >> 8 * (j % 4));
}
static __device__ __forceinline__ void cu_iq4_unit(const uint8_t *q, float d, cu_unit &b)
{
    uint32_t w[4], low, high;
    b.d[0] = b.d[1] = d;
    cu_words<4>(q, w);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        cu_iq4_look(w[i], low, high);
        b.q[i] = (int)low;
        b.q[i + 4] = (int)high;
    }
}

struct cu_iq4_nl_t {
    enum { BLOCK = 32, BYTES = 1, OFFSET = 0, MINS = 0, HALVES = 0 };
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const uint8_t *p = row + (size_t)(i / 32) * 18;
        cu_iq4_eight(p + 2, i % 32, cu_half(p), v);
    }
    static __device__ __forceinline__ void unit(const uint8_t *row, int u, cu_unit &b)
    {
        const uint8_t *p = row + (size_t)u * 18;
        cu_iq4_unit(p + 2, cu_half(p), b);
    }
    CU_ONE(cu_iq4_nl_t)
};

struct cu_iq4_xs_t {
    enum { BLOCK = 256, BYTES = 1, OFFSET = 0, MINS = 0, HALVES = 0 };
    static __device__ __forceinline__ float scale(const uint8_t *p, int k) // of values 32k .. 32k + 31
    {
        int low = p[4 + k / 2] >> 4 * (k % 2) & 15, high = p[2 + k / 4] >> 2 * (k % 4) & 3;
        return __fmul_rn(cu_half(p), (float)((low | high << 4) - 32));
    }
    static __device__ __forceinline__ void eight(const uint8_t *row, int i, float *v)
    {
        const uint8_t *p = row + (size_t)(i / 256) * 136;
        int k = i % 256 / 32;
        cu_iq4_eight(p + 8 + 16 * k, i % 32, scale(p, k), v);
    }
    static __device__ __forceinline__ void unit(const uint8_t *row, int u, cu_unit &b)
    {
        const uint8_t *p = row + (size_t)(u / 8) * 136;
        cu_iq4_unit(p + 8 + 16 * (u % 8), scale(p, u % 8), b);
    }
    CU_ONE(cu_iq4_xs_t)
};

// Calls f<format>(arguments...) for a type; cudaErrorInvalidValue for one that has no kernels.
#define CU_FORMATS(X)                                                                                                  \
    X(LR_F32, cu_f32_t)                                                                                                \
    X(LR_F16, cu_f16_t)                                                                                                \
    X(LR_BF16, cu_bf16_t)                                                                                              \
    X(LR_Q4_0, cu_q4_0_t)                                                                                              \
    X(LR_Q4_1, cu_q4_1_t)                                                                                              \
    X(LR_Q5_0, cu_q5_0_t)                                                                                              \
    X(LR_Q5_1, cu_q5_1_t)                                                                                              \
    X(LR_Q8_0, cu_q8_0_t)                                                                                              \
    X(LR_Q2_K, cu_q2_k_t)                                                                                              \
    X(LR_Q3_K, cu_q3_k_t)                                                                                              \
    X(LR_Q4_K, cu_q4_k_t)                                                                                              \
    X(LR_Q5_K, cu_q5_k_t)                                                                                              \
    X(LR_Q6_K, cu_q6_k_t)                                                                                              \
    X(LR_IQ4_NL, cu_iq4_nl_t)                                                                                          \
    X(LR_IQ4_XS, cu_iq4_xs_t)                                                                                          \
    X(LR_MXFP4, cu_mxfp4_t)
