/* encode_k.c - super-blocks of 256 values: the layouts that dtype.c reads.
 *
 * Each sub-block gets a scale (and minimum) of its own first, by encode_fit.h. The super-block's scale spans them in
 * the integers that there are; then every sub-block takes the best of the integers next to its own scale, and the
 * super-block's scales are solved for what was chosen, until that gains no more.
 */
#include "base/encode_fit.h"
#include "base/encode_int.h"
#include <math.h>
#include <string.h>

#define ROUNDS 4 /* of solving and choosing again */

/* A format: 256 / size sub-blocks. */
typedef struct shape {
    int size;                 /* values a sub-block */
    int most;                 /* levels 0..most (range), or -half..half-1 */
    int top;                  /* scales (and minima) 0..top; signed: -top..top-1 */
    const signed char *level; /* levels of a codebook of 16, or NULL: even steps */
} shape;

typedef struct super {
    float d, dmin;
    int scale[16], min[16];
    int q[256];
} super;

/* Levels of a sub-block for x ~ s q - m; returns the error. */
static float levels_range(int n, const float *x, const float *w, int most, float s, float m, int *q)
{
    float inv = s > 0 ? 1.0f / s : 0, err = 0;
    for (int i = 0; i < n; i++) {
        q[i] = lr_level((x[i] + m) * inv, 0, (float)most);
        float e = s * (float)q[i] - m - x[i];
        err += w[i] * e * e;
    }
    return err;
}

/* The best integers for a sub-block near those in *scale, *min; 0, 0 where a tiny block's scales can't do better. */
static float choose_range(const shape *f, const float *x, const float *w, float d, float dmin, int *scale, int *min,
                          int *q)
{
    int best_scale = 0, best_min = 0, trial[32];
    float best = levels_range(f->size, x, w, f->most, 0, 0, q);
    for (int s = *scale - 1; s <= *scale + 1; s++) {
        for (int m = *min - 1; m <= *min + 1; m++) {
            if (s < 0 || s > f->top || m < 0 || m > f->top) continue;
            float err = levels_range(f->size, x, w, f->most, d * (float)s, dmin * (float)m, trial);
            if (!(err < best)) continue;
            best = err;
            best_scale = s;
            best_min = m;
            memcpy(q, trial, sizeof *q * (size_t)f->size);
        }
    }
    *scale = best_scale;
    *min = best_min;
    return best;
}

/* Best d and dmin for the integers chosen: x ~ d (scale q) - dmin min. */
static bool solve_range(const shape *f, const float *x, const float *w, const super *b, float *d, float *dmin)
{
    double aa = 0, ab = 0, bb = 0, ax = 0, bx = 0;
    for (int i = 0; i < 256; i++) {
        int k = i / f->size;
        double p = (double)b->scale[k] * b->q[i], m = -(double)b->min[k];
        aa += w[i] * p * p;
        ab += w[i] * p * m;
        bb += w[i] * m * m;
        ax += w[i] * p * x[i];
        bx += w[i] * m * x[i];
    }
    double det = aa * bb - ab * ab;
    if (det > 1e-12 * aa * bb) {
        *d = (float)((ax * bb - bx * ab) / det);
        *dmin = (float)((aa * bx - ab * ax) / det);
    } else if (aa > 0) {
        *d = (float)(ax / aa);
        *dmin = b->dmin;
    } else {
        return false;
    }
    return *d > 0 && *dmin >= 0;
}

static float half(float v) { return lr_f16_to_f32(lr_f32_to_f16(v)); }

static void range_super(const shape *f, const float *x, const float *w, super *b)
{
    float scale[16], min[16], most_scale = 0, most_min = 0, best = 0;
    int n = 256 / f->size;
    for (int k = 0; k < n; k++) {
        float low;
        lr_fit_range(f->size, x + k * f->size, w + k * f->size, f->most, &scale[k], &low);
        min[k] = -low;
        most_scale = fmaxf(most_scale, scale[k]);
        most_min = fmaxf(most_min, min[k]);
    }
    b->d = half(most_scale / (float)f->top);
    b->dmin = half(most_min / (float)f->top);
    for (int k = 0; k < n; k++) {
        b->scale[k] = b->d > 0 ? lr_level(scale[k] / b->d, 0, (float)f->top) : 0;
        b->min[k] = b->dmin > 0 ? lr_level(min[k] / b->dmin, 0, (float)f->top) : 0;
        int at = k * f->size;
        best += choose_range(f, x + at, w + at, b->d, b->dmin, &b->scale[k], &b->min[k], b->q + at);
    }
    for (int round = 0; round < ROUNDS; round++) {
        super t = *b;
        float err = 0;
        if (!solve_range(f, x, w, b, &t.d, &t.dmin)) return;
        t.d = half(t.d);
        t.dmin = half(t.dmin);
        for (int k = 0; k < n; k++) {
            int at = k * f->size;
            err += choose_range(f, x + at, w + at, t.d, t.dmin, &t.scale[k], &t.min[k], t.q + at);
        }
        if (!(err < best)) return;
        best = err;
        *b = t;
    }
}

static float levels_signed(const shape *f, const float *x, const float *w, float s, int *q)
{
    float inv = s != 0 ? 1.0f / s : 0, err = 0;
    for (int i = 0; i < f->size; i++) {
        float v = x[i] * inv;
        q[i] = f->level ? lr_nearest_level(v, f->level, 16) : lr_level(v, (float)-f->most, (float)(f->most - 1));
        float e = s * (float)(f->level ? f->level[q[i]] : q[i]) - x[i];
        err += w[i] * e * e;
    }
    return err;
}

static float choose_signed(const shape *f, const float *x, const float *w, float d, int *scale, int *q)
{
    int best_scale = 0, trial[32];
    float best = levels_signed(f, x, w, 0, q);
    for (int s = *scale - 1; s <= *scale + 1; s++) {
        if (s < -f->top || s >= f->top) continue;
        float err = levels_signed(f, x, w, d * (float)s, trial);
        if (!(err < best)) continue;
        best = err;
        best_scale = s;
        memcpy(q, trial, sizeof *q * (size_t)f->size);
    }
    *scale = best_scale;
    return best;
}

static float solve_signed(const shape *f, const float *x, const float *w, const super *b)
{
    double aa = 0, ax = 0;
    for (int i = 0; i < 256; i++) {
        int k = i / f->size;
        double p = (double)b->scale[k] * (f->level ? f->level[b->q[i]] : b->q[i]);
        aa += w[i] * p * p;
        ax += w[i] * p * x[i];
    }
    return aa > 0 ? (float)(ax / aa) : 0;
}

static void signed_super(const shape *f, const float *x, const float *w, super *b)
{
    float scale[16], most = 0, best = 0;
    int n = 256 / f->size;
    for (int k = 0; k < n; k++) {
        const float *xk = x + k * f->size, *wk = w + k * f->size;
        scale[k] = f->level ? lr_fit_levels(f->size, xk, wk, f->level) : lr_fit_signed(f->size, xk, wk, f->most);
        if (fabsf(scale[k]) > fabsf(most)) most = scale[k];
    }
    b->d = half(most / (float)-f->top);
    for (int k = 0; k < n; k++) {
        int at = k * f->size;
        b->scale[k] = b->d != 0 ? lr_level(scale[k] / b->d, (float)-f->top, (float)(f->top - 1)) : 0;
        best += choose_signed(f, x + at, w + at, b->d, &b->scale[k], b->q + at);
    }
    for (int round = 0; round < ROUNDS; round++) {
        super t = *b;
        float err = 0;
        t.d = half(solve_signed(f, x, w, b));
        if (t.d == 0) return;
        for (int k = 0; k < n; k++) {
            int at = k * f->size;
            err += choose_signed(f, x + at, w + at, t.d, &t.scale[k], t.q + at);
        }
        if (!(err < best)) return;
        best = err;
        *b = t;
    }
}

/* Two bits of each value: of each 128, 32 bytes carry 4 groups of 32. */
static void put_pairs(uint8_t *p, const int *q)
{
    memset(p, 0, 64);
    for (int i = 0; i < 256; i++) p[32 * (i / 128) + i % 32] |= (uint8_t)((q[i] & 3) << 2 * (i / 32 % 4));
}

/* Of each 64 values, 32 bytes: low nibbles, then high. */
static void put_fours(uint8_t *p, const int *q)
{
    memset(p, 0, 128);
    for (int i = 0; i < 256; i++) p[32 * (i / 64) + i % 32] |= (uint8_t)((q[i] & 15) << 4 * (i / 32 % 2));
}

/* Eight scales and minima of six bits in 12 bytes; see scale_min in dtype.c. */
static void put_scale_min(uint8_t *p, const super *b)
{
    memset(p, 0, 12);
    for (int k = 0; k < 8; k++) {
        int s = b->scale[k], m = b->min[k];
        if (k < 4) {
            p[k] |= (uint8_t)s;
            p[k + 4] |= (uint8_t)m;
        } else {
            p[k + 4] = (uint8_t)((s & 15) | (m & 15) << 4);
            p[k - 4] |= (uint8_t)(s >> 4 << 6);
            p[k] |= (uint8_t)(m >> 4 << 6);
        }
    }
}

static bool put_two(uint8_t *p, const super *b)
{
    float got;
    bool good = lr_put_half(p, b->d, &got);
    return lr_put_half(p + 2, b->dmin, &got) && good;
}

static bool put_q2_k(uint8_t *p, const super *b)
{
    for (int k = 0; k < 16; k++) p[k] = (uint8_t)(b->scale[k] | b->min[k] << 4);
    put_pairs(p + 16, b->q);
    return put_two(p + 80, b);
}

static bool put_q3_k(uint8_t *p, const super *b)
{
    int low[256];
    float got;
    memset(p, 0, 32);
    for (int i = 0; i < 256; i++) {
        low[i] = b->q[i] & 3;
        if (b->q[i] >= 0) p[i % 32] |= (uint8_t)(1 << i / 32);
    }
    put_pairs(p + 32, low);
    memset(p + 96, 0, 12);
    for (int k = 0; k < 16; k++) {
        int s = b->scale[k] + 32;
        p[96 + k % 8] |= (uint8_t)((s & 15) << 4 * (k / 8));
        p[104 + k % 4] |= (uint8_t)(s >> 4 << 2 * (k / 4));
    }
    return lr_put_half(p + 108, b->d, &got);
}

static bool put_q4_k(uint8_t *p, const super *b)
{
    put_scale_min(p + 4, b);
    put_fours(p + 16, b->q);
    return put_two(p, b);
}

static bool put_q5_k(uint8_t *p, const super *b)
{
    put_scale_min(p + 4, b);
    memset(p + 16, 0, 32);
    for (int i = 0; i < 256; i++) p[16 + i % 32] |= (uint8_t)((b->q[i] >> 4 & 1) << i / 32);
    put_fours(p + 48, b->q);
    return put_two(p, b);
}

static bool put_q6_k(uint8_t *p, const super *b)
{
    float got;
    memset(p, 0, 192);
    for (int i = 0; i < 256; i++) {
        int v = b->q[i] + 32, part = i / 128, r = i % 128;
        p[64 * part + r % 64] |= (uint8_t)((v & 15) << 4 * (r / 64));
        p[128 + 32 * part + r % 32] |= (uint8_t)(v >> 4 << 2 * (r / 32));
    }
    for (int k = 0; k < 16; k++) p[192 + k] = (uint8_t)(int8_t)b->scale[k];
    return lr_put_half(p + 208, b->d, &got);
}

static bool put_iq4_xs(uint8_t *p, const super *b)
{
    uint16_t high = 0;
    float got;
    memset(p + 4, 0, 4);
    for (int k = 0; k < 8; k++) {
        int s = b->scale[k] + 32;
        p[4 + k / 2] |= (uint8_t)((s & 15) << 4 * (k % 2));
        high |= (uint16_t)(s >> 4 << 2 * k);
        for (int j = 0; j < 16; j++) p[8 + 16 * k + j] = (uint8_t)(b->q[32 * k + j] | b->q[32 * k + j + 16] << 4);
    }
    lr_put_u16(p + 2, high);
    return lr_put_half(p, b->d, &got);
}

bool lr_encode_super(int t, const float *x, const float *importance, uint8_t *p)
{
    static const struct {
        int type;
        shape f;
        bool range;
        bool (*put)(uint8_t *, const super *);
    } kinds[] = {
        {LR_Q2_K, {16, 3, 15, NULL}, true, put_q2_k},    {LR_Q3_K, {16, 4, 32, NULL}, false, put_q3_k},
        {LR_Q4_K, {32, 15, 63, NULL}, true, put_q4_k},   {LR_Q5_K, {32, 31, 63, NULL}, true, put_q5_k},
        {LR_Q6_K, {16, 32, 128, NULL}, false, put_q6_k}, {LR_IQ4_XS, {32, 0, 32, lr_iq4_values}, false, put_iq4_xs},
    };
    float w[256], mean = lr_mean_square(256, x);
    if (!isfinite(mean)) return false;
    lr_encode_weights(256, x, importance, mean, w);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kinds[i].type != t) continue;
        super b = {0};
        if (kinds[i].range)
            range_super(&kinds[i].f, x, w, &b);
        else
            signed_super(&kinds[i].f, x, w, &b);
        return kinds[i].put(p, &b);
    }
    return false;
}
