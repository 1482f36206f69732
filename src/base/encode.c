/* encode.c - plain numbers and blocks of 32; encode_k.c has the super-blocks. */
#include "base/encode.h"
#include "base/encode_fit.h"
#include "base/encode_int.h"
#include <math.h>
#include <string.h>

void lr_put_u16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

bool lr_put_half(uint8_t *p, float v, float *rounded)
{
    uint16_t h = lr_f32_to_f16(v);
    lr_put_u16(p, h);
    *rounded = lr_f16_to_f32(h);
    return isfinite(*rounded);
}

void lr_encode_weights(int n, const float *x, const float *importance, float mean_square, float *w)
{
    float sum = 0;
    for (int i = 0; importance && i < n; i++) {
        w[i] = importance[i] * sqrtf(mean_square + x[i] * x[i]);
        sum += w[i];
    }
    if (sum > 0 && isfinite(sum)) return;
    float rms = sqrtf(mean_square);
    for (int i = 0; i < n; i++) w[i] = rms + fabsf(x[i]);
}

float lr_mean_square(int n, const float *x)
{
    float s = 0;
    for (int i = 0; i < n; i++) s += x[i] * x[i];
    return s / (float)n;
}

static float inverse(float d)
{
    float inv = 1.0f / d;
    return isfinite(inv) ? inv : 0;
}

/* The value furthest from 0, the first of several. */
static float extreme(const float *x)
{
    float m = x[0];
    for (int i = 1; i < 32; i++)
        if (fabsf(x[i]) > fabsf(m)) m = x[i];
    return m;
}

/* Value j of 32 in the low nibble of byte j, value j + 16 in the high one. */
static void put_nibbles(uint8_t *p, const int *q)
{
    for (int j = 0; j < 16; j++) p[j] = (uint8_t)((q[j] & 15) | (q[j + 16] & 15) << 4);
}

static void put_fifths(uint8_t *p, const int *q)
{
    uint32_t h = 0;
    for (int j = 0; j < 32; j++) h |= (uint32_t)(q[j] >> 4 & 1) << j;
    lr_put_u16(p, (uint16_t)h);
    lr_put_u16(p + 2, (uint16_t)(h >> 16));
}

/* Q4_0 and Q5_0: d and levels from -half to half - 1, stored from 0. */
static bool centred(const float *x, const float *w, int half, uint8_t *p)
{
    int q[32];
    float d = w ? lr_fit_signed(32, x, w, half) : extreme(x) / (float)-half, id = inverse(d), got;
    for (int i = 0; i < 32; i++) {
        /* in double, rounded to float before it is cut: what the gguf package does */
        float v = truncf((float)((double)x[i] * (double)id + ((double)half + 0.5)));
        q[i] = v < 0 ? 0 : v > (float)(2 * half - 1) ? 2 * half - 1 : (int)v;
    }
    bool good = lr_put_half(p, d, &got);
    if (half == 16) put_fifths(p + 2, q);
    put_nibbles(p + (half == 16 ? 6 : 2), q);
    return good;
}

/* Q4_1 and Q5_1: d, minimum, and levels from 0 to most. */
static bool ranged(const float *x, const float *w, int most, uint8_t *p)
{
    float lo = x[0], hi = x[0], d, got, got_low;
    int q[32];
    for (int i = 1; i < 32; i++) {
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
    }
    if (!w) {
        d = (hi - lo) / (float)most;
    } else if (lo <= 0) {
        lr_fit_range(32, x, w, most, &d, &lo);
    } else { /* lr_fit_range keeps its minimum below 0 */
        float y[32];
        for (int i = 0; i < 32; i++) y[i] = x[i] - hi;
        lr_fit_range(32, y, w, most, &d, &lo);
        lo += hi;
    }
    float id = inverse(d);
    for (int i = 0; i < 32; i++) q[i] = lr_level(truncf((x[i] - lo) * id + 0.5f), 0, (float)most);
    bool good = lr_put_half(p, d, &got);
    good = lr_put_half(p + 2, lo, &got_low) && good;
    if (most == 31) put_fifths(p + 4, q);
    put_nibbles(p + (most == 31 ? 8 : 4), q);
    return good;
}

static bool q8_0(const float *x, uint8_t *p)
{
    float d = fabsf(extreme(x)) / 127.0f, id = inverse(d), got;
    for (int i = 0; i < 32; i++) p[2 + i] = (uint8_t)(int8_t)roundf(x[i] * id);
    return lr_put_half(p, d, &got);
}

static bool iq4_nl(const float *x, const float *w, uint8_t *p)
{
    float d = lr_fit_levels(32, x, w, lr_iq4_values), got;
    int q[32];
    bool good = lr_put_half(p, d, &got);
    float id = inverse(got);
    for (int i = 0; i < 32; i++) q[i] = lr_nearest_level(x[i] * id, lr_iq4_values, 16);
    put_nibbles(p + 2, q);
    return good;
}

/* Error of a block with exponent e; q gets the codes: sign and one of 8 magnitudes, twice 0 0.5 1 1.5 2 3 4 6. */
static float mxfp4_with(const float *x, const float *w, int e, int *q)
{
    static const signed char magnitude[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    float d = ldexpf(1.0f, e - 128), err = 0;
    for (int i = 0; i < 32; i++) {
        int m = lr_nearest_level(fabsf(x[i]) / d, magnitude, 8);
        float back = d * (float)magnitude[m], off = fabsf(x[i]) - back;
        err += (w ? w[i] : 1.0f) * off * off;
        q[i] = m | (x[i] < 0 && m ? 8 : 0);
    }
    return err;
}

static bool mxfp4(const float *x, const float *w, uint8_t *p)
{
    float m = fabsf(extreme(x)), best = INFINITY;
    int q[32], top = 0, e = 0;
    if (m > 0) {
        frexpf(m, &top);
        top += 127 - 3; /* the largest value lies in [4, 8) times the scale */
    }
    for (int k = top; k <= top + (w ? 1 : 0); k++) {
        if (k < 0 || k > 254) continue;
        float err = mxfp4_with(x, w, k, q);
        if (err < best) {
            best = err;
            e = k;
        }
    }
    if (!isfinite(best)) e = top < 0 ? 0 : 254;
    mxfp4_with(x, w, e, q);
    p[0] = (uint8_t)e;
    put_nibbles(p + 1, q);
    return true;
}

static bool block32(int t, const float *x, const float *importance, uint8_t *p)
{
    float w[32];
    const float *used = importance ? w : NULL;
    float mean = lr_mean_square(32, x);
    if (!isfinite(mean)) return false;
    lr_encode_weights(32, x, importance, mean, w);
    switch (t) {
    case LR_Q4_0:
        return centred(x, used, 8, p);
    case LR_Q5_0:
        return centred(x, used, 16, p);
    case LR_Q4_1:
        return ranged(x, used, 15, p);
    case LR_Q5_1:
        return ranged(x, used, 31, p);
    case LR_Q8_0:
        return q8_0(x, p);
    case LR_IQ4_NL:
        return iq4_nl(x, w, p);
    default:
        return mxfp4(x, used, p);
    }
}

static bool plain(int t, const float *x, uint8_t *p, size_t n)
{
    if (t == LR_F32) {
        memcpy(p, x, 4 * n);
        return true;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t h = t == LR_F16 ? lr_f32_to_f16(x[i]) : lr_f32_to_bf16(x[i]);
        if (!isfinite(t == LR_F16 ? lr_f16_to_f32(h) : lr_bf16_to_f32(h))) return false;
        lr_put_u16(p + 2 * i, h);
    }
    return true;
}

bool lr_dtype_writable(int t) { return lr_dtype_block(t) && t != LR_I8 && t != LR_I16 && t != LR_I32; }

bool lr_dtype_from_f32(int t, const float *x, const float *importance, void *dst, size_t n)
{
    size_t block = (size_t)lr_dtype_block(t), bytes = (size_t)lr_dtype_bytes(t);
    uint8_t *p = dst;
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return false;
    if (block == 1) return plain(t, x, p, n);
    for (size_t i = 0; i < n; i += block, p += bytes) {
        const float *imp = importance ? importance + i : NULL;
        if (!(block == 32 ? block32(t, x + i, imp, p) : lr_encode_super(t, x + i, imp, p))) return false;
    }
    return true;
}
