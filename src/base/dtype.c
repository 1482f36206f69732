/* dtype.c - see dtype.h
 *
 * One static function a block format: block bytes in, its values out. Every function evaluates the format's formula in
 * float32, one rounding a product or sum, in the order written here; kernels are tested against these, so clarity comes
 * before speed (though nothing here is slow). A k-quant block is 256 values in sub-blocks of 16 or 32, each with its
 * own small integer scale, times one or two half-precision scales of the whole block.
 */
#include "base/dtype.h"
#include "base/encode_int.h"
#include <assert.h>
#include <string.h>
#include <strings.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "weights are read in place as little-endian");

/* The codebook of IQ4_NL and IQ4_XS, and of MXFP4 (E2M1, doubled). */
const signed char lr_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static const struct {
    const char *name;
    uint16_t block, bytes;
} types[LR_DTYPE_MAX] = {
#define X(e, n, name, v, b) [n] = {name, v, b},
    LR_DTYPE_LIST(X)
#undef X
};

const char *lr_dtype_name(int t) { return t >= 0 && t < LR_DTYPE_MAX ? types[t].name : NULL; }

int lr_dtype_block(int t) { return t >= 0 && t < LR_DTYPE_MAX ? types[t].block : 0; }

int lr_dtype_bytes(int t) { return t >= 0 && t < LR_DTYPE_MAX ? types[t].bytes : 0; }

int lr_dtype_parse(const char *name)
{
    for (int t = 0; t < LR_DTYPE_MAX; t++)
        if (types[t].name && strcasecmp(types[t].name, name) == 0) return t;
    return -1;
}

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float float_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

float lr_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7FFF;
    if (mag >= 0x7C00) return float_of(sign | 0x7F800000 | mag << 13 | (mag > 0x7C00 ? 0x400000 : 0)); /* NaN: quiet */
    if (mag >= 0x0400) return float_of(sign | ((mag << 13) + (112u << 23)));
    return float_of(sign | bits_of((float)(int)mag * 0x1p-24f)); /* subnormal half, normal float: exact */
}

uint16_t lr_f32_to_f16(float f)
{
    uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, mag = u & 0x7FFFFFFF;
    if (mag > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (mag >> 13 & 0x3FF)); /* quiet NaN, high payload bits */
    if (mag >= 0x47800000) return (uint16_t)(sign | 0x7C00);                      /* 65536 and up */
    if (mag < 0x38800000) /* below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the low bits, rounded to even */
        return (uint16_t)(sign | (bits_of(float_of(mag) + 0.5f) - 0x3F000000));
    mag += 0xFFF + (mag >> 13 & 1); /* may carry into the exponent, and from 65504 to infinity */
    return (uint16_t)(sign | (mag - (112u << 23)) >> 13);
}

uint16_t lr_f32_to_bf16(float f)
{
    uint32_t u = bits_of(f);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(u >> 16 | 0x40); /* quiet NaN */
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

static uint32_t u16_at(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }

static uint32_t u32_at(const uint8_t *p) { return u16_at(p) | u16_at(p + 2) << 16; }

static float half_at(const uint8_t *p) { return lr_f16_to_f32((uint16_t)u16_at(p)); }

/* ---- blocks of 32: value j in the low nibble of byte j, value j + 16 in the high one ---- */

/* d:f16 q:16; d * (q - 8) */
static void q4_0(const uint8_t *p, float *y)
{
    float d = half_at(p);
    const uint8_t *q = p + 2;
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)((q[j] & 15) - 8);
        y[j + 16] = d * (float)((q[j] >> 4) - 8);
    }
}

/* d:f16 m:f16 q:16; d * q + m */
static void q4_1(const uint8_t *p, float *y)
{
    float d = half_at(p), m = half_at(p + 2);
    const uint8_t *q = p + 4;
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)(q[j] & 15) + m;
        y[j + 16] = d * (float)(q[j] >> 4) + m;
    }
}

/* d:f16 h:4 q:16, fifth bit of value j is bit j of h; d * (q - 16) */
static void q5_0(const uint8_t *p, float *y)
{
    float d = half_at(p);
    uint32_t h = u32_at(p + 2);
    const uint8_t *q = p + 6;
    for (int j = 0; j < 16; j++) {
        int lo = (q[j] & 15) | (int)(h >> j & 1) << 4, hi = q[j] >> 4 | (int)(h >> (j + 16) & 1) << 4;
        y[j] = d * (float)(lo - 16);
        y[j + 16] = d * (float)(hi - 16);
    }
}

/* d:f16 m:f16 h:4 q:16; d * q + m */
static void q5_1(const uint8_t *p, float *y)
{
    float d = half_at(p), m = half_at(p + 2);
    uint32_t h = u32_at(p + 4);
    const uint8_t *q = p + 8;
    for (int j = 0; j < 16; j++) {
        int lo = (q[j] & 15) | (int)(h >> j & 1) << 4, hi = q[j] >> 4 | (int)(h >> (j + 16) & 1) << 4;
        y[j] = d * (float)lo + m;
        y[j + 16] = d * (float)hi + m;
    }
}

/* d:f16 q:32 signed; d * q */
static void q8_0(const uint8_t *p, float *y)
{
    float d = half_at(p);
    for (int j = 0; j < 32; j++) y[j] = d * (float)(int8_t)p[2 + j];
}

/* d:f16 q:16; d * codebook[q] */
static void iq4_nl(const uint8_t *p, float *y)
{
    float d = half_at(p);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)lr_iq4_values[p[2 + j] & 15];
        y[j + 16] = d * (float)lr_iq4_values[p[2 + j] >> 4];
    }
}

/* e:8-bit exponent q:16; 2^(e - 127) * E2M1[q], here 2^(e - 128) times twice the value */
static void mxfp4(const uint8_t *p, float *y)
{
    float d = p[0] < 2 ? float_of(0x200000u << p[0]) : float_of((uint32_t)(p[0] - 1) << 23);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)e2m1_doubled[p[1 + j] & 15];
        y[j + 16] = d * (float)e2m1_doubled[p[1 + j] >> 4];
    }
}

/* ---- k-quants: 256 values ---- */

/* scales:16 (low nibble scale, high nibble minimum, of 16 values) q:64 d:f16 dmin:f16; (d * s) * q - dmin * m.
 * Of each 128 values, 32 bytes of q carry 4 groups of 32, group g in bits 2g. */
static void q2_k(const uint8_t *p, float *y)
{
    const uint8_t *scales = p, *q = p + 16;
    float d = half_at(p + 80), dmin = half_at(p + 82);
    for (int i = 0; i < 256; i++) {
        int s = scales[i / 16], half = i / 128, group = i / 32 % 4, j = i % 32;
        float ds = d * (float)(s & 15), dm = dmin * (float)(s >> 4);
        y[i] = ds * (float)(q[32 * half + j] >> 2 * group & 3) - dm;
    }
}

/* h:32 q:64 scales:12 d:f16; (d * (s - 32)) * q. Low two bits of q as in q2_k; its third bit, of value i, is bit i / 32
 * of h[i % 32], and means -4 where clear. Scale k of 16 is six bits: a low nibble in byte k % 8, two high bits in byte
 * 8 + k % 4. */
static void q3_k(const uint8_t *p, float *y)
{
    const uint8_t *h = p, *q = p + 32, *sc = p + 96;
    float d = half_at(p + 108), ds[16];
    for (int k = 0; k < 16; k++) {
        int low = sc[k % 8] >> 4 * (k / 8) & 15, high = sc[8 + k % 4] >> 2 * (k / 4) & 3;
        ds[k] = d * (float)((low | high << 4) - 32);
    }
    for (int i = 0; i < 256; i++) {
        int half = i / 128, group = i / 32 % 4, j = i % 32;
        int v = (q[32 * half + j] >> 2 * group & 3) - (h[j] >> i / 32 & 1 ? 0 : 4);
        y[i] = ds[i / 16] * (float)v;
    }
}

/* Scale and minimum of sub-block k (0..7), six bits each in 12 bytes: 0..3 lie in the low six bits of bytes k and k +
 * 4; 4..7 as low and high nibble of byte k + 4, with their top bits in the top bits of bytes k - 4 and k. */
static void scale_min(const uint8_t *s, int k, int *scale, int *min)
{
    if (k < 4) {
        *scale = s[k] & 63;
        *min = s[k + 4] & 63;
    } else {
        *scale = (s[k + 4] & 15) | (s[k - 4] >> 6) << 4;
        *min = s[k + 4] >> 4 | (s[k] >> 6) << 4;
    }
}

/* d:f16 dmin:f16 scales:12 q:128; (d * s) * q - dmin * m. Of each 64 values, 32 bytes of q: low nibbles, then high. */
static void q4_k(const uint8_t *p, float *y)
{
    float d = half_at(p), dmin = half_at(p + 2);
    for (int k = 0; k < 8; k++) {
        int s, m;
        scale_min(p + 4, k, &s, &m);
        float ds = d * (float)s, dm = dmin * (float)m;
        const uint8_t *q = p + 16 + 32 * (k / 2);
        for (int j = 0; j < 32; j++) y[32 * k + j] = ds * (float)(q[j] >> 4 * (k % 2) & 15) - dm;
    }
}

/* d:f16 dmin:f16 scales:12 h:32 q:128; as q4_k, the fifth bit of value j of sub-block k is bit k of h[j]. */
static void q5_k(const uint8_t *p, float *y)
{
    float d = half_at(p), dmin = half_at(p + 2);
    const uint8_t *h = p + 16;
    for (int k = 0; k < 8; k++) {
        int s, m;
        scale_min(p + 4, k, &s, &m);
        float ds = d * (float)s, dm = dmin * (float)m;
        const uint8_t *q = p + 48 + 32 * (k / 2);
        for (int j = 0; j < 32; j++) {
            int v = (q[j] >> 4 * (k % 2) & 15) | (h[j] >> k & 1) << 4;
            y[32 * k + j] = ds * (float)v - dm;
        }
    }
}

/* ql:128 qh:64 scales:16 signed d:f16; (d * s) * (q - 32). Of each 128 values, 64 bytes of ql (64 low nibbles, then 64
 * high ones) and 32 bytes of qh (two bits for each of 4 groups of 32). */
static void q6_k(const uint8_t *p, float *y)
{
    const uint8_t *ql = p, *qh = p + 128, *scales = p + 192;
    float d = half_at(p + 208);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, r = i % 128;
        int low = ql[64 * half + r % 64] >> 4 * (r / 64) & 15, high = qh[32 * half + r % 32] >> 2 * (r / 32) & 3;
        float ds = d * (float)(int8_t)scales[i / 16];
        y[i] = ds * (float)((low | high << 4) - 32);
    }
}

/* d:f16 sh:u16 sl:4 q:128; (d * (s - 32)) * codebook[q]. Sub-block k of 32: s = nibble k of sl, two high bits in sh. */
static void iq4_xs(const uint8_t *p, float *y)
{
    float d = half_at(p);
    uint32_t sh = u16_at(p + 2);
    for (int k = 0; k < 8; k++) {
        int s = (p[4 + k / 2] >> 4 * (k % 2) & 15) | (int)(sh >> 2 * k & 3) << 4;
        float ds = d * (float)(s - 32);
        const uint8_t *q = p + 8 + 16 * k;
        for (int j = 0; j < 16; j++) {
            y[32 * k + j] = ds * (float)lr_iq4_values[q[j] & 15];
            y[32 * k + j + 16] = ds * (float)lr_iq4_values[q[j] >> 4];
        }
    }
}

/* Plain numbers; src may be unaligned. */
static void plain(int t, const uint8_t *p, float *y, size_t n)
{
    switch (t) {
    case LR_F32:
        memcpy(y, p, n * 4);
        break;
    case LR_F16:
        for (size_t i = 0; i < n; i++) y[i] = half_at(p + 2 * i);
        break;
    case LR_BF16:
        for (size_t i = 0; i < n; i++) y[i] = lr_bf16_to_f32((uint16_t)u16_at(p + 2 * i));
        break;
    case LR_I8:
        for (size_t i = 0; i < n; i++) y[i] = (float)(int8_t)p[i];
        break;
    case LR_I16:
        for (size_t i = 0; i < n; i++) y[i] = (float)(int16_t)u16_at(p + 2 * i);
        break;
    case LR_I32:
        for (size_t i = 0; i < n; i++) y[i] = (float)(int32_t)u32_at(p + 4 * i);
        break;
    default:
        assert(!"lr_dtype_to_f32: unknown type");
    }
}

void lr_dtype_to_f32(int t, const void *src, float *dst, size_t n)
{
    void (*f)(const uint8_t *, float *) = NULL;
    switch (t) {
    case LR_Q4_0:
        f = q4_0;
        break;
    case LR_Q4_1:
        f = q4_1;
        break;
    case LR_Q5_0:
        f = q5_0;
        break;
    case LR_Q5_1:
        f = q5_1;
        break;
    case LR_Q8_0:
        f = q8_0;
        break;
    case LR_Q2_K:
        f = q2_k;
        break;
    case LR_Q3_K:
        f = q3_k;
        break;
    case LR_Q4_K:
        f = q4_k;
        break;
    case LR_Q5_K:
        f = q5_k;
        break;
    case LR_Q6_K:
        f = q6_k;
        break;
    case LR_IQ4_NL:
        f = iq4_nl;
        break;
    case LR_IQ4_XS:
        f = iq4_xs;
        break;
    case LR_MXFP4:
        f = mxfp4;
        break;
    default:
        if (n) plain(t, src, dst, n);
        return;
    }
    size_t block = types[t].block, bytes = types[t].bytes;
    assert(n % block == 0);
    const uint8_t *p = src;
    for (size_t i = 0; i < n; i += block, p += bytes) f(p, dst + i);
}
