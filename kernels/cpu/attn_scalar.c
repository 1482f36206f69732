/* attn_scalar.c - the reference of paged attention, and the writing of KV slots.
 *
 *   out[r][h] = sum_p softmax_p(cap(scale * q[r][h] . k[p])) v[p]   over the positions p that row r sees
 *
 * Step after step: the step's keys and values become float32 in scratch, then each pair (row, head) takes its scores,
 * the new maximum, its weights, and adds weighted values, dimension by dimension in ascending position.
 * Values kept as float16 are held within its range: an overflow to infinity would spoil every later row.
 */
#include "cpu/attn_int.h"
#include <math.h>
#include <string.h>

/* Turns n values, block by block (attn_int.h). Stage after stage from neighbours to halves: the sums that every
 * instruction set takes. */
static void turn(float *x, int n, int block)
{
    float f = 1 / sqrtf((float)block);
    for (float *b = x; b < x + n; b += block) {
        for (int h = 1; h < block; h *= 2) {
            for (int i = 0; i < block; i++) {
                if (i & h) continue;
                float lo = b[i], hi = b[i + h];
                b[i] = lo + hi;
                b[i + h] = lo - hi;
            }
        }
    }
    for (int i = 0; i < n; i++) x[i] *= f;
}

/* ---- writing ---- */

static uint16_t put_f16(float x)
{
    if (x > 65504.0f) x = 65504.0f;
    if (x < -65504.0f) x = -65504.0f;
    return lr_f32_to_f16(x);
}

/* Writes head_dim values to the slot whose dimension d lies at at + d * stride (in values). */
static void put_plain(const float *x, int head_dim, int type, char *part, size_t at, size_t stride)
{
    for (int d = 0; d < head_dim; d++, at += stride) {
        if (type == LR_F32)
            ((float *)part)[at] = x[d];
        else
            ((uint16_t *)part)[at] = type == LR_F16 ? put_f16(x[d]) : lr_f32_to_bf16(x[d]);
    }
}

/* 0 for NaN. */
static int8_t put_int(float x, float scale, float low, float high)
{
    float v = scale != 0 ? rintf(x / scale) : 0;
    return (int8_t)(v > high ? high : v < low ? low : v == v ? v : 0);
}

static void put_group8(const float *x, int n, lr_kv_slot to)
{
    float top = 0;
    for (int d = 0; d < n; d++) top = fmaxf(top, fabsf(x[d]));
    *to.s = put_f16(top / 127.0f);
    float f = lr_f16_to_f32(*to.s);
    for (int d = 0; d < n; d++) to.at[d * to.stride] = put_int(x[d], f, -127, 127);
}

/* The largest value, whatever its sign, becomes the lowest integer. */
static void put_group4(const float *x, lr_kv_slot to)
{
    float top = 0, high = 0, low = to.upper ? -32 : -8;
    int8_t q[LR_KV_GROUP];
    for (int d = 0; d < LR_KV_GROUP; d++) {
        top = fmaxf(top, fabsf(x[d]));
        high = fmaxf(high, x[d]);
    }
    *to.s = put_f16((high == top ? top : -top) / low);
    float f = lr_f16_to_f32(*to.s);
    for (int d = 0; d < LR_KV_GROUP; d++) q[d] = put_int(x[d], f, low, -low - 1);
    lr_kv_put4(q, to);
}

#include "cpu/attn_put.h"

/* ---- reading ---- */

static float get(const lr_attn_task *t, const char *part, bool keys, size_t d, size_t slot)
{
    size_t dim = (size_t)t->head_dim, bs = (size_t)t->block_size, h = (size_t)t->kv_head;
    size_t at = keys ? (h * dim + d) * bs + slot : (h * bs + slot) * dim + d;
    switch (keys ? t->k_type : t->v_type) {
    case LR_F32:
        return ((const float *)part)[at];
    case LR_F16:
        return lr_f16_to_f32(((const uint16_t *)part)[at]);
    case LR_BF16:
        return lr_bf16_to_f32(((const uint16_t *)part)[at]);
    default: {
        const uint16_t *scale;
        int q = lr_kv_int(t, part, keys, d, slot, &scale);
        return (float)q * lr_f16_to_f32(*scale);
    }
    }
}

/* Positions lo .. hi of the step that begins at base -> k (D, STEP), v (STEP, D). */
static void load_step(const lr_attn_task *t, int base, int lo, int hi, float *k, float *v)
{
    size_t dim = (size_t)t->head_dim;
    for (int p = lo; p <= hi; p++) {
        int slot, j = p - base;
        const char *kb = lr_attn_block(t, t->k, p, &slot), *vb = lr_attn_block(t, t->v, p, &slot);
        for (size_t d = 0; d < dim; d++) {
            k[d * LR_ATTN_STEP + j] = get(t, kb, true, d, (size_t)slot);
            v[j * dim + d] = get(t, vb, false, d, (size_t)slot);
        }
    }
}

/* ---- one pair ---- */

/* Scores of places lo .. hi of the step. */
static void scores(const lr_attn_task *t, const float *q, const float *k, int lo, int hi, float *s)
{
    for (int j = lo; j <= hi; j++) s[j] = 0;
    for (int d = 0; d < t->head_dim; d++) {
        const float *kd = k + d * LR_ATTN_STEP;
        for (int j = lo; j <= hi; j++) s[j] += q[d] * kd[j];
    }
    for (int j = lo; j <= hi; j++) {
        s[j] *= t->scale;
        if (t->softcap > 0) s[j] = t->softcap * tanhf(s[j] / t->softcap);
    }
}

/* Adds places lo .. hi of the step to the running state (m, l, acc). */
static void pair_step(const lr_attn_task *t, const float *q, const float *k, const float *v, int lo, int hi, float *m,
                      float *l, float *acc)
{
    float p[LR_ATTN_STEP], top = *m;
    scores(t, q, k, lo, hi, p);
    for (int j = lo; j <= hi; j++) top = fmaxf(top, p[j]);
    float ref = top == -INFINITY ? 0 : top; /* all scores -inf: weights of 0, not of NaN */
    float keep = expf(*m - ref), sum = 0;
    for (int j = lo; j <= hi; j++) sum += p[j] = expf(p[j] - ref);
    *l = *l * keep + sum;
    *m = top;
    for (int d = 0; d < t->head_dim; d++) acc[d] *= keep;
    for (int j = lo; j <= hi; j++) {
        for (int d = 0; d < t->head_dim; d++) acc[d] += p[j] * v[j * t->head_dim + d];
    }
}

static void take_query(const lr_attn_task *t, int i, float *q)
{
    int h = t->kv_head * t->n_group + i % t->n_group, dim = t->head_dim;
    memcpy(q, t->q + i / t->n_group * t->q_stride + (size_t)h * dim, (size_t)dim * sizeof(float));
    if (lr_kv_turned(t->k_type)) turn(q, dim, lr_kv_turn_block(dim));
}

static void attn_part(const lr_attn_task *t, int chunk, float *part, void *scratch)
{
    int dim = t->head_dim, pairs = t->n_rows * t->n_group, begin = chunk * LR_ATTN_CHUNK;
    float *m = part, *l = m + pairs, *acc = l + pairs;
    float *k = scratch, *v = k + dim * LR_ATTN_STEP, *queries = v + dim * LR_ATTN_STEP;
    for (int i = 0; i < pairs; i++) m[i] = -INFINITY;
    memset(l, 0, (size_t)pairs * (dim + 1) * sizeof(float));
    for (int i = 0; i < pairs; i++) take_query(t, i, queries + (size_t)i * dim);
    int lo, hi, unused;
    lr_attn_row_clip(t, 0, begin, LR_ATTN_CHUNK, &lo, &unused);
    lr_attn_row_clip(t, t->n_rows - 1, begin, LR_ATTN_CHUNK, &unused, &hi);
    for (int base = lo / LR_ATTN_STEP * LR_ATTN_STEP; base <= hi; base += LR_ATTN_STEP) {
        int end = base + LR_ATTN_STEP - 1;
        load_step(t, base, lo > base ? lo : base, hi < end ? hi : end, k, v);
        for (int i = 0; i < pairs; i++) {
            size_t at = (size_t)i * dim;
            int from, to;
            lr_attn_row_clip(t, i / t->n_group, base, LR_ATTN_STEP, &from, &to);
            if (to < from) continue;
            pair_step(t, queries + at, k, v, from - base, to - base, m + i, l + i, acc + at);
        }
    }
}

/* ---- chunks ---- */

/* Adds part b to state a, both in the shape of a part. */
static void merge(float *a, const float *b, int pairs, int dim)
{
    for (int i = 0; i < pairs; i++) {
        if (b[i] == -INFINITY) continue;
        float *acc = a + 2 * pairs + (size_t)i * dim;
        const float *add = b + 2 * pairs + (size_t)i * dim;
        float m = fmaxf(a[i], b[i]), fa = expf(a[i] - m), fb = expf(b[i] - m);
        a[i] = m;
        a[pairs + i] = a[pairs + i] * fa + b[pairs + i] * fb;
        for (int d = 0; d < dim; d++) acc[d] = acc[d] * fa + add[d] * fb;
    }
}

/* The pair's state -> its output; the sink is one more logit in the denominator. */
static void finish(const lr_attn_task *t, int i, float m, float l, const float *acc)
{
    int r = i / t->n_group, h = t->kv_head * t->n_group + i % t->n_group, dim = t->head_dim;
    float *out = t->out + r * t->out_stride + (size_t)h * dim, f = 1;
    if (t->sinks && m != -INFINITY) {
        float top = fmaxf(m, t->sinks[h]);
        f = expf(m - top);
        l = l * f + expf(t->sinks[h] - top);
    }
    f = l != 0 ? f / l : 0;
    for (int d = 0; d < dim; d++) out[d] = acc[d] * f + 0.0f;
    if (lr_kv_turned(t->v_type)) turn(out, dim, lr_kv_turn_block(dim));
}

static void attn_combine(const lr_attn_task *t, const float *parts, int n_parts)
{
    int dim = t->head_dim, pairs = t->n_rows * t->n_group;
    size_t part = lr_cpu_attn_part_floats(t);
    for (int i = 0; i < pairs; i++) {
        float m = -INFINITY, l = 0;
        int r = i / t->n_group, h = t->kv_head * t->n_group + i % t->n_group;
        float *out = t->out + r * t->out_stride + (size_t)h * dim; /* holds the sum until it is finished */
        memset(out, 0, (size_t)dim * sizeof(float));
        for (int c = 0; c < n_parts; c++) {
            const float *b = parts + c * part, *add = b + 2 * pairs + (size_t)i * dim;
            if (b[i] == -INFINITY) continue;
            float top = fmaxf(m, b[i]), fa = expf(m - top), fb = expf(b[i] - top);
            m = top;
            l = l * fa + b[pairs + i] * fb;
            for (int d = 0; d < dim; d++) out[d] = out[d] * fa + add[d] * fb;
        }
        finish(t, i, m, l, out);
    }
}

static void attn(const lr_attn_task *t, void *scratch)
{
    int dim = t->head_dim, pairs = t->n_rows * t->n_group, first, last;
    size_t part = lr_cpu_attn_part_floats(t);
    float *all = scratch, *one = all + part, *rest = one + part;
    for (int i = 0; i < pairs; i++) all[i] = -INFINITY;
    memset(all + pairs, 0, (size_t)pairs * (dim + 1) * sizeof(float));
    lr_attn_chunks(t, &first, &last);
    for (int c = first; c <= last; c++) {
        attn_part(t, c, one, rest);
        merge(all, one, pairs, dim);
    }
    for (int i = 0; i < pairs; i++) finish(t, i, all[i], all[pairs + i], all + 2 * pairs + (size_t)i * dim);
}

/* Nothing is gained here by reading what is common once. */
static void attn_gang(const lr_attn_gang *g, void *scratch)
{
    for (int i = 0; i < g->n; i++) attn(&g->tasks[i], scratch);
}

static void attn_gang_part(const lr_attn_gang *g, int chunk, float *const *parts, void *scratch)
{
    for (int i = 0; i < g->n; i++) attn_part(&g->tasks[i], chunk, parts[i], scratch);
}

void lr_attn_fill_scalar(lr_cpu_kernels *k)
{
    k->kv_put = kv_put;
    k->attn = attn;
    k->attn_part = attn_part;
    k->attn_combine = attn_combine;
    k->attn_gang = attn_gang;
    k->attn_gang_part = attn_gang_part;
}
