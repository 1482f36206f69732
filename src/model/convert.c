/* convert.c - rows of quantized weights in the blocks that the kernels know.
 *
 * A tile of up to 16 rows and 32 inputs is taken out of the source as values v (integers less their zero point, or FP8
 * numbers) and scales s, a weight being v * s, and is then written as blocks of the wanted type. Sources that lie
 * column by column (GPTQ, AWQ) are so read in whole cache lines.
 *
 * Layouts: GPTQ as github.com/AutoGPTQ/AutoGPTQ packs it, AWQ as github.com/casper-hansen/AutoAWQ (gemm), packed and
 * FP8 as github.com/vllm-project/compressed-tensors, MXFP4 as the OCP Microscaling formats 1.0.
 */
#include "base/dtype.h"
#include "model/folder_int.h"
#include <math.h>
#include <string.h>

enum { ROWS = 16, COLS = 32 };

/* ---- single values ---- */

static float scale_value(const lr_part *p, int64_t i)
{
    const uint8_t *s = p->scale;
    if (p->kind == LR_PART_MXFP4) {
        uint32_t e = s[i], u = e ? e << 23 : 1u << 22; /* 2^(e - 127); 0 is subnormal, 255 is no number */
        float f;
        if (e == 255) u = 0x7FC00000;
        memcpy(&f, &u, 4);
        return f;
    }
    float f;
    lr_dtype_to_f32(p->scale_type, s + (size_t)i * (size_t)lr_dtype_bytes(p->scale_type), &f, 1);
    return f * p->mul;
}

static uint32_t word_at(const uint8_t *p, int64_t i)
{
    uint32_t w;
    memcpy(&w, p + 4 * i, 4);
    return w;
}

/* Value number i of a stream of `bits` bits each that runs over words `stride` words apart. */
static uint32_t bits_at(const uint8_t *p, int64_t base, int64_t stride, int64_t i, int bits)
{
    int64_t at = i * bits, word = at / 32;
    int off = (int)(at % 32);
    uint64_t w = word_at(p, base + word * stride);
    if (off + bits > 32) w |= (uint64_t)word_at(p, base + (word + 1) * stride) << 32;
    return (uint32_t)(w >> off) & ((1u << bits) - 1);
}

/* Bit of output c of 8 in an AWQ word. */
static int awq_shift(int64_t c) { return 4 * (int)(c % 8 / 2 + (c % 2 ? 4 : 0)); }

static float fp8_value(uint8_t b)
{
    uint32_t e = b >> 3 & 15, m = b & 7, u = (uint32_t)(b & 0x80) << 24 | (e + 120) << 23 | m << 20;
    float f;
    if (e == 0) return (b & 0x80 ? -0x1p-9f : 0x1p-9f) * (float)m;
    if (e == 15 && m == 7) return NAN;
    memcpy(&f, &u, 4);
    return f;
}

/* The zero point of output r in group g. */
static int zero_at(const lr_part *p, int64_t r, int64_t g)
{
    int mask = (1 << p->bits) - 1;
    switch (p->kind) {
    case LR_PART_GPTQ:
        if (!p->zero) return 1 << (p->bits - 1);
        return ((int)bits_at(p->zero, g * (p->n * p->bits / 32), 1, r, p->bits) + p->zero_offset) &
               (p->zero_offset ? mask : ~0);
    case LR_PART_AWQ:
        return (int)(word_at(p->zero, g * (p->n / 8) + r / 8) >> awq_shift(r) & 15);
    case LR_PART_PACKED:
        return p->zero ? (int)bits_at(p->zero, g, p->groups, r, p->bits) : 1 << (p->bits - 1);
    default:
        return 0;
    }
}

static int64_t group_of(const lr_part *p, int64_t i) { return p->group ? p->group[i] : i / p->scale_cols; }

/* Where the scale of output r and group g lies. */
static int64_t scale_at(const lr_part *p, int64_t r, int64_t g)
{
    if (p->kind == LR_PART_GPTQ || p->kind == LR_PART_AWQ) return g * p->n + r;
    return r / p->scale_rows * p->groups + g;
}

/* ---- tiles ---- */

typedef struct tile {
    int rows, cols;
    float v[ROWS][COLS], s[ROWS][COLS]; /* a weight is v * s */
} tile;

static float plain_value(const lr_part *p, int64_t r, int64_t i)
{
    int64_t at = p->transpose ? i * p->n + r : r * p->k + i;
    float f;
    lr_dtype_to_f32(p->w_type, p->w + (size_t)at * (size_t)lr_dtype_bytes(p->w_type), &f, 1);
    return f + p->add;
}

/* Integers of words of `bits` each: of output r, inputs col.., as they lie in the file. */
static void words(const lr_part *p, int64_t base, int64_t stride, int64_t col, int cols, float *v)
{
    if (p->bits == 3 || cols != COLS) {
        for (int i = 0; i < cols; i++) v[i] = (float)bits_at(p->w, base, stride, col + i, p->bits);
        return;
    }
    int per = 32 / p->bits;
    uint32_t mask = (1u << p->bits) - 1;
    for (int i = 0; i < COLS; i += per) {
        uint32_t w = word_at(p->w, base + (col + i) / per * stride);
        for (int b = 0; b < per; b++, w >>= p->bits) v[i + b] = (float)(w & mask);
    }
}

/* v[0..cols) of output r, inputs col..; integers without their zero point. */
static void values(const lr_part *p, int64_t r, int64_t col, int cols, float *v)
{
    static const int8_t e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const uint8_t *w = p->w + r * p->k + col;
    switch (p->kind) {
    case LR_PART_PLAIN:
        for (int i = 0; i < cols; i++) v[i] = plain_value(p, r, col + i);
        break;
    case LR_PART_INT8:
        for (int i = 0; i < cols; i++) v[i] = (float)(int8_t)w[i];
        break;
    case LR_PART_FP8:
        for (int i = 0; i < cols; i++) v[i] = fp8_value(w[i]);
        break;
    case LR_PART_MXFP4:
        for (int i = 0; i < cols; i++)
            v[i] = 0.5f * (float)e2m1[p->w[(r * p->k + col + i) / 2] >> 4 * ((col + i) & 1) & 15];
        break;
    case LR_PART_GPTQ:
        words(p, r, p->n, col, cols, v);
        break;
    case LR_PART_AWQ: {
        int shift = awq_shift(r);
        for (int i = 0; i < cols; i++) v[i] = (float)(word_at(p->w, (col + i) * (p->n / 8) + r / 8) >> shift & 15);
        break;
    }
    case LR_PART_PACKED:
        words(p, r * (p->k * p->bits / 32), 1, col, cols, v);
        break;
    }
}

static bool has_zero(const lr_part *p)
{
    return p->kind == LR_PART_GPTQ || p->kind == LR_PART_AWQ || p->kind == LR_PART_PACKED;
}

static void fill(const lr_part *p, int64_t row, int64_t col, tile *t)
{
    bool one = !p->group && p->scale && p->scale_cols % COLS == 0; /* the tile lies in one group */
    for (int j = 0; j < t->rows; j++) {
        int64_t r = p->first + (row + j) * p->step, g = -1;
        float *v = t->v[j], s = 1, z = 0;
        values(p, r, col, t->cols, v);
        for (int i = 0; i < t->cols; i++) {
            int64_t here = !p->scale || (one && i) ? g : group_of(p, col + i);
            if (here != g) {
                g = here;
                s = scale_value(p, scale_at(p, r, g));
                z = has_zero(p) ? (float)zero_at(p, r, g) : 0;
            }
            v[i] -= z;
            t->s[j][i] = s;
        }
    }
}

/* ---- blocks ---- */

static void put_half(uint8_t *dst, float f)
{
    uint16_t h = lr_f32_to_f16(f);
    memcpy(dst, &h, 2);
}

/* 32 integers with one scale, in -8..7, -16..15 or -128..127. */
static void put_q4_0(const float *v, float s, uint8_t *dst)
{
    put_half(dst, s);
    for (int i = 0; i < 16; i++) dst[2 + i] = (uint8_t)((int)v[i] + 8) | (uint8_t)(((int)v[i + 16] + 8) << 4);
}

static void put_q5_0(const float *v, float s, uint8_t *dst)
{
    uint32_t high = 0;
    put_half(dst, s);
    for (int i = 0; i < 32; i++) high |= (uint32_t)(((int)v[i] + 16) >> 4 & 1) << i;
    memcpy(dst + 2, &high, 4);
    for (int i = 0; i < 16; i++) dst[6 + i] = (uint8_t)((((int)v[i] + 16) & 15) | (((int)v[i + 16] + 16) & 15) << 4);
}

static void put_q8_0(const float *v, float s, uint8_t *dst)
{
    put_half(dst, s);
    for (int i = 0; i < 32; i++) dst[2 + i] = (uint8_t)(int8_t)v[i];
}

/* Any weights v * s in 8 bits: rounds. What is no number makes its block none. */
static void put_rounded(const float *v, const float *s, uint8_t *dst)
{
    float w[32], q[32], most = 0;
    for (int i = 0; i < 32; i++) {
        w[i] = v[i] * s[i];
        most = fabsf(w[i]) <= most ? most : fabsf(w[i]); /* NaN stays */
    }
    float d = most / 127, inverse = d > 0 ? 1 / d : 0;
    bool good = isfinite(d) && isfinite(inverse);
    for (int i = 0; i < 32; i++) q[i] = good ? nearbyintf(w[i] * inverse) : 0;
    put_q8_0(q, d, dst);
}

static void put_mxfp4(const lr_part *p, int64_t r, int64_t col, uint8_t *dst)
{
    const uint8_t *src = p->w + (r * p->k + col) / 2;
    dst[0] = p->scale[r * p->groups + col / 32];
    for (int i = 0; i < 16; i++) {
        int a = src[i / 2] >> 4 * (i & 1) & 15, b = src[8 + i / 2] >> 4 * (i & 1) & 15;
        dst[1 + i] = (uint8_t)(a | b << 4);
    }
}

/* Whether the part's weights in 8 bits are rounded ones: their 32 have no scale in common, or are no integers. */
static bool rounds(const lr_part *p) { return p->kind == LR_PART_FP8 || p->group || p->scale_cols % 32; }

static void put_tile(const lr_part *p, int type, const tile *t, int64_t row, int64_t col, uint8_t *dst,
                     size_t row_bytes)
{
    size_t at = (size_t)(col / lr_dtype_block(type)) * (size_t)lr_dtype_bytes(type);
    for (int j = 0; j < t->rows; j++) {
        uint8_t *d = dst + (size_t)j * row_bytes + at;
        const float *v = t->v[j], *s = t->s[j];
        switch (type) {
        case LR_Q4_0:
            put_q4_0(v, s[0], d);
            break;
        case LR_Q5_0:
            put_q5_0(v, s[0], d);
            break;
        case LR_Q8_0:
            if (rounds(p))
                put_rounded(v, s, d);
            else
                put_q8_0(v, s[0], d);
            break;
        case LR_MXFP4:
            put_mxfp4(p, p->first + (row + j) * p->step, col, d);
            break;
        default: /* F32, F16 */
            for (int i = 0; i < t->cols; i++) {
                float w = v[i] * s[i];
                if (type == LR_F32)
                    memcpy(d + 4 * i, &w, 4);
                else
                    put_half(d + 2 * i, w);
            }
        }
    }
}

/* Rows of a plain part in its own type. */
static void copy_rows(const lr_part *p, int64_t r0, int64_t r1, uint8_t *dst)
{
    size_t size = (size_t)lr_dtype_bytes(p->w_type);
    for (int64_t j = r0; j < r1; j++) {
        int64_t r = p->first + j * p->step;
        if (!p->transpose) {
            memcpy(dst, p->w + (size_t)(r * p->k) * size, (size_t)p->k * size);
            dst += (size_t)p->k * size;
            continue;
        }
        for (int64_t i = 0; i < p->k; i++, dst += size) memcpy(dst, p->w + (size_t)(i * p->n + r) * size, size);
    }
}

void lr_part_rows(const lr_part *p, int type, int64_t r0, int64_t r1, void *dst)
{
    if (p->kind == LR_PART_PLAIN && type == p->w_type && p->add == 0) {
        copy_rows(p, r0, r1, dst);
        return;
    }
    size_t row_bytes = (size_t)(p->k / lr_dtype_block(type)) * (size_t)lr_dtype_bytes(type);
    tile t;
    for (int64_t r = r0; r < r1; r += ROWS) {
        t.rows = (int)(r1 - r < ROWS ? r1 - r : ROWS);
        for (int64_t c = 0; c < p->k; c += COLS) {
            t.cols = (int)(p->k - c < COLS ? p->k - c : COLS);
            if (type != LR_MXFP4) fill(p, r, c, &t);
            put_tile(p, type, &t, r, c, (uint8_t *)dst + (size_t)(r - r0) * row_bytes, row_bytes);
        }
    }
}

/* ---- which type ---- */

bool lr_part_is_view(const lr_part *p)
{
    return p->kind == LR_PART_PLAIN && !p->transpose && p->step == 1 && p->add == 0 &&
           (uintptr_t)p->w % (uintptr_t)lr_dtype_bytes(p->w_type) == 0;
}

/* Goes over all scales: are they numbers, does half precision hold them as they are, or at all? */
static int check_scales(const lr_part *p, bool *exact, bool *fits, lr_error *err)
{
    int64_t rows =
        p->kind == LR_PART_GPTQ || p->kind == LR_PART_AWQ ? p->n : (p->n + p->scale_rows - 1) / p->scale_rows;
    int64_t count = rows * p->groups;
    *exact = *fits = true;
    for (int64_t i = 0; i < count; i++) {
        float s = scale_value(p, i);
        if (!isfinite(s))
            return lr_fail(err, LR_EFORMAT, "tensor '%s': scale %lld is not a number", p->name, (long long)i);
        float h = lr_f16_to_f32(lr_f32_to_f16(s));
        if (h != s) *exact = false;
        if (fabsf(s) > 255) *fits = false; /* 8 bits times that may overflow */
    }
    return 0;
}

/* The least and the greatest zero point. */
static void zero_range(const lr_part *p, int *low, int *high)
{
    *low = *high = zero_at(p, 0, 0);
    if (!p->zero) return;
    for (int64_t g = 0; g < p->groups; g++)
        for (int64_t r = 0; r < p->n; r++) {
            int z = zero_at(p, r, g);
            if (z < *low) *low = z;
            if (z > *high) *high = z;
        }
}

static int best_integers(const lr_part *p, lr_made *made, lr_error *err)
{
    bool exact, fits, blocks = p->k % 32 == 0;
    int low = -128, high = 127, rc = check_scales(p, &exact, &fits, err);
    if (rc) return rc;
    if (p->kind != LR_PART_INT8) {
        int zl, zh;
        zero_range(p, &zl, &zh);
        low = -zh;
        high = (1 << p->bits) - 1 - zl;
    }
    made->exact = exact;
    if (!fits)
        *made = (lr_made){LR_F32, true};
    else if (blocks && rounds(p))
        *made = (lr_made){LR_Q8_0, false};
    else if (blocks && low >= -8 && high <= 7)
        made->type = LR_Q4_0;
    else if (blocks && low >= -16 && high <= 15)
        made->type = LR_Q5_0;
    else if (blocks && low >= -128 && high <= 127)
        made->type = LR_Q8_0;
    else
        *made = (lr_made){LR_F16, false};
    return 0;
}

int lr_part_best(const lr_part *p, lr_made *made, lr_error *err)
{
    bool exact, fits;
    int rc;
    switch (p->kind) {
    case LR_PART_PLAIN:
        *made = (lr_made){p->add != 0 ? LR_F32 : p->w_type, true};
        return 0;
    case LR_PART_MXFP4:
        *made = (lr_made){LR_MXFP4, true};
        return 0;
    case LR_PART_FP8:
        if ((rc = check_scales(p, &exact, &fits, err))) return rc;
        *made = (lr_made){p->k % 32 == 0 && fits ? LR_Q8_0 : LR_F32, false};
        made->exact = made->type == LR_F32;
        return 0;
    default:
        return best_integers(p, made, err);
    }
}
