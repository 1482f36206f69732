/* attn_put_vec.h - writing keys and values to their KV slot, on the vector words; part of attn_vec.h.
 *
 * Rounds in registers, then scatters keys (transposed) and copies values. Writes the bytes that the scalar version
 * writes: conversions and divisions are correctly rounded in both.
 */
#include "cpu/attn_int.h"
#include "cpu/vec_math.h"
#include <math.h>
#include <string.h>

static void to_bits(const float *x, int n, int type, uint16_t *h)
{
    vf top = vf_set1(65504.0f), low = vf_set1(-65504.0f);
    for (int d = 0; d < n; d += VW) {
        vf v = n - d >= VW ? vf_load(x + d) : vf_loadn(x + d, n - d);
        if (type == LR_F16)
            vf_store_f16(h + d, vf_max(low, vf_min(top, v)));
        else
            vf_store_bf16(h + d, v);
    }
}

static void put16(const float *x, int dim, int type, uint16_t *at, size_t stride)
{
    uint16_t h[64 + VW];
    for (int d = 0; d < dim; d += 64, x += 64, at += 64 * stride) {
        int n = dim - d < 64 ? dim - d : 64;
        to_bits(x, n, type, h);
        if (stride == 1)
            memcpy(at, h, (size_t)n * 2);
        else
            for (int j = 0; j < n; j++) at[j * stride] = h[j];
    }
}

/* Turns n values, block by block (attn_int.h). Each stage adds and subtracts neighbours and puts the sums into the
 * lower half, the differences into the upper one: after all stages every value is back at its place, and has had the
 * sums of the scalar version. */
static void turn(float *x, int n, int block)
{
    float t[LR_KV_TURN];
    vf f = vf_set1(1 / sqrtf((float)block));
    for (float *end = x + n; x < end; x += block) {
        float *from = x, *to = t;
        for (int stage = 1; stage < block; stage *= 2) {
            int i = 0, half = block / 2;
            for (; i + VW <= half; i += VW) {
                vf a, b;
                vf_load_pairs(from + 2 * i, &a, &b);
                vf_store(to + i, vf_add(a, b));
                vf_store(to + half + i, vf_sub(a, b));
            }
            for (; i < half; i++) {
                to[i] = from[2 * i] + from[2 * i + 1];
                to[half + i] = from[2 * i] - from[2 * i + 1];
            }
            float *next = from;
            from = to;
            to = next;
        }
        int i = 0;
        for (; i + VW <= block; i += VW) vf_store(x + i, vf_mul(vf_load(from + i), f));
        for (; i < block; i++) x[i] = from[i] * vf_first(f);
    }
}

/* n values over the scale of *s, rounded into low .. high; NaN becomes 0. q has room for VW more. */
static void to_int(const float *x, int n, const uint16_t *s, float low, float high, int8_t *q)
{
    float f = vec_f16(*s);
    vf by = vf_set1(f != 0 ? f : INFINITY);
    for (int d = 0; d < n; d += VW) {
        vf v = vf_div(vf_loadn(x + d, n - d < VW ? n - d : VW), by);
        v = vf_select(vf_eq(v, v), v, vf_set1(0));
        vf_store_i8(q + d, vf_max(vf_set1(low), vf_min(vf_set1(high), vf_round(v))));
    }
}

static void put_scale(float x, uint16_t *s)
{
    uint16_t h[VW];
    vf_store_f16(h, vf_max(vf_set1(-65504.0f), vf_min(vf_set1(65504.0f), vf_set1(x))));
    *s = h[0];
}

static void put_group8(const float *x, int n, lr_kv_slot to)
{
    int8_t q[LR_KV_GROUP + VW];
    vf top = vf_set1(0);
    for (int d = 0; d < n; d += VW) top = vf_max(vf_abs(vf_loadn(x + d, n - d < VW ? n - d : VW)), top);
    put_scale(vf_hmax(top) / 127.0f, to.s);
    to_int(x, n, to.s, -127, 127, q);
    for (int d = 0; d < n; d++) to.at[d * to.stride] = q[d];
}

/* The largest value, whatever its sign, becomes the lowest integer. */
static void put_group4(const float *x, lr_kv_slot to)
{
    int8_t q[LR_KV_GROUP + VW];
    vf top = vf_set1(0), high = vf_set1(0);
    for (int d = 0; d < LR_KV_GROUP; d += VW) {
        vf v = vf_load(x + d);
        top = vf_max(vf_abs(v), top);
        high = vf_max(v, high);
    }
    float m = vf_hmax(top), low = to.upper ? -32 : -8;
    put_scale((vf_hmax(high) == m ? m : -m) / low, to.s);
    to_int(x, LR_KV_GROUP, to.s, low, -low - 1, q);
    lr_kv_put4(q, to);
}

static void put_plain(const float *x, int dim, int type, char *part, size_t at, size_t stride)
{
    if (type != LR_F32) {
        put16(x, dim, type, (uint16_t *)part + at, stride);
    } else {
        float *to = (float *)part + at;
        for (int d = 0; d < dim; d++) to[d * stride] = x[d];
    }
}

#include "cpu/attn_put.h"
