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

static void put_group8(const float *x, int n, char *at, size_t stride, uint16_t *s)
{
    int8_t q[LR_KV_GROUP + VW];
    vf top = vf_set1(0);
    for (int d = 0; d < n; d += VW) top = vf_max(vf_abs(vf_loadn(x + d, n - d < VW ? n - d : VW)), top);
    put_scale(vf_hmax(top) / 127.0f, s);
    to_int(x, n, s, -127, 127, q);
    for (int d = 0; d < n; d++) at[d * stride] = q[d];
}

/* The largest value, whatever its sign, becomes -8. */
static void put_group4(const float *x, char *at, size_t stride, uint16_t *s)
{
    int8_t q[LR_KV_GROUP + VW];
    vf top = vf_set1(0), high = vf_set1(0);
    for (int d = 0; d < LR_KV_GROUP; d += VW) {
        vf v = vf_load(x + d);
        top = vf_max(vf_abs(v), top);
        high = vf_max(v, high);
    }
    float m = vf_hmax(top);
    put_scale((vf_hmax(high) == m ? m : -m) / -8.0f, s);
    to_int(x, LR_KV_GROUP, s, -8, 7, q);
    for (int d = 0; d < LR_KV_GROUP / 2; d++) at[d * stride] = (char)((q[d] & 15) | (q[d + LR_KV_GROUP / 2] & 15) << 4);
}

/* Writes a head's row x - center: values stride apart from at, scales s_stride apart from s. */
static void put_turned(const float *x, const float *center, int dim, int type, char *at, size_t stride, uint16_t *s,
                       size_t s_stride)
{
    float t[LR_KV_TURN];
    for (int d = 0; d < dim; d += LR_KV_TURN) {
        int n = dim - d < LR_KV_TURN ? dim - d : LR_KV_TURN;
        memcpy(t, x + d, (size_t)n * sizeof(float));
        for (int i = 0; center && i < n; i++) t[i] -= center[d + i];
        turn(t, n, lr_kv_turn_block(dim));
        for (int g = 0; g < n; g += LR_KV_GROUP, s += s_stride) {
            char *to = at + lr_kv_place(type, (size_t)(d + g)) * stride;
            if (type == LR_Q4_0)
                put_group4(t + g, to, stride, s);
            else
                put_group8(t + g, n - g < LR_KV_GROUP ? n - g : LR_KV_GROUP, to, stride, s);
        }
    }
}

static void kv_put(const float *key, const float *val, const float *center, int n_kv_heads, int head_dim, int type,
                   int block_size, int slot, char *k, char *v)
{
    size_t bs = (size_t)block_size, groups = (size_t)lr_kv_groups(head_dim), dim = (size_t)head_dim;
    size_t scales = lr_kv_scales_at(type, n_kv_heads, head_dim, block_size);
    for (size_t h = 0; h < (size_t)n_kv_heads; h++, key += dim, val += dim) {
        size_t k_at = lr_kv_place(type, h * dim) * bs + slot, v_at = lr_kv_place(type, (h * bs + slot) * dim);
        if (lr_kv_turned(type)) {
            uint16_t *ks = (uint16_t *)(k + scales) + h * groups * bs + slot;
            uint16_t *vs = (uint16_t *)(v + scales) + (h * bs + slot) * groups;
            put_turned(key, center ? center + h * dim : NULL, head_dim, type, k + k_at, bs, ks, bs);
            put_turned(val, NULL, head_dim, type, v + v_at, 1, vs, 1);
        } else if (type == LR_F32) {
            for (size_t d = 0; d < dim; d++) ((float *)k)[k_at + d * bs] = key[d];
            memcpy((float *)v + v_at, val, dim * sizeof(float));
        } else {
            put16(key, head_dim, type, (uint16_t *)k + k_at, bs);
            put16(val, head_dim, type, (uint16_t *)v + v_at, 1);
        }
    }
}
