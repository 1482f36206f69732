/* pack.c - weights from the file's blocks to strips of 16 features: see gemm.h for the layout.
 *
 * Nothing is rounded: the packed form holds the file's integers and scales, in about as many bytes. Each format has a
 * function that gives 32 consecutive values of a row as bytes; placing them into planes is the same for all.
 */
#include "cpu/gemm.h"
#include <string.h>

const uint8_t lr_form_lut[3][16] = {
    {0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
};

static const lr_form forms[LR_DTYPE_MAX] = {
#define X(type, ...) [LR_##type] = {__VA_ARGS__},
    LR_FORM_LIST(X)
#undef X
};

const lr_form *lr_form_of(int type)
{
    return type >= 0 && type < LR_DTYPE_MAX && forms[type].main ? &forms[type] : NULL;
}

lr_parts lr_form_parts(const lr_form *f, int k)
{
    size_t blocks = (size_t)k / 32, scales = f->super ? (size_t)k / 256 : blocks;
    size_t sub = f->super ? (size_t)(k / f->sub) : 0;
    lr_parts p = {0};
    p.h = blocks * (size_t)f->main * 64;
    p.d = p.h + blocks * (size_t)f->extra * 64;
    p.m = p.d + scales * (f->e8m0 ? 16 : 32);
    p.sc = p.m + (f->min ? scales * 32 : 0);
    p.sm = p.sc + sub * 16;
    p.end = (p.sm + (f->min && f->sub == 32 ? sub * 16 : 0) + 63) & ~(size_t)63;
    return p;
}

size_t lr_pack_strip_bytes(int type, int k)
{
    const lr_form *f = lr_form_of(type);
    return f && k > 0 && k % (f->super ? 256 : 32) == 0 ? lr_form_parts(f, k).end : 0;
}

bool lr_pack_super(int type)
{
    const lr_form *f = lr_form_of(type);
    return f && f->super;
}

/* ---- 32 values of a row, as bytes; p: the file's block, b: which 32 of a super-block ---- */

static void nibbles(const uint8_t *q, uint8_t *u)
{
    for (int i = 0; i < 16; i++) {
        u[i] = q[i] & 15;
        u[i + 16] = q[i] >> 4;
    }
}

/* Adds bit i of the little-endian word at h as value 16 to u[i]. */
static void fifth_bits(const uint8_t *h, uint8_t *u)
{
    uint32_t bits = (uint32_t)h[0] | (uint32_t)h[1] << 8 | (uint32_t)h[2] << 16 | (uint32_t)h[3] << 24;
    for (int i = 0; i < 32; i++) u[i] |= (uint8_t)((bits >> i & 1) << 4);
}

static void values_q8_0(const uint8_t *p, uint8_t *u)
{
    for (int i = 0; i < 32; i++) u[i] = p[2 + i] ^ 0x80;
}

static void values_q2_k(const uint8_t *p, int b, uint8_t *u)
{
    const uint8_t *q = p + 16 + 32 * (b / 4);
    for (int i = 0; i < 32; i++) u[i] = q[i] >> 2 * (b % 4) & 3;
}

static void values_q3_k(const uint8_t *p, int b, uint8_t *u)
{
    const uint8_t *h = p, *q = p + 32 + 32 * (b / 4);
    for (int i = 0; i < 32; i++) u[i] = (uint8_t)((q[i] >> 2 * (b % 4) & 3) | (h[i] >> b & 1) << 2);
}

static void values_q45_k(const uint8_t *p, const uint8_t *h, int b, uint8_t *u)
{
    const uint8_t *q = p + 32 * (b / 2);
    for (int i = 0; i < 32; i++) u[i] = q[i] >> 4 * (b % 2) & 15;
    for (int i = 0; h && i < 32; i++) u[i] |= (uint8_t)((h[i] >> b & 1) << 4);
}

static void values_q6_k(const uint8_t *p, int b, uint8_t *u)
{
    const uint8_t *ql = p + 64 * (b / 4) + 32 * (b % 2), *qh = p + 128 + 32 * (b / 4);
    int low = b % 4 / 2 * 4, high = 2 * (b % 4);
    for (int i = 0; i < 32; i++) u[i] = (uint8_t)((ql[i] >> low & 15) | (qh[i] >> high & 3) << 4);
}

static void values(int type, const uint8_t *p, int b, uint8_t *u)
{
    switch (type) {
    case LR_Q4_0:
    case LR_IQ4_NL:
        nibbles(p + 2, u);
        break;
    case LR_Q4_1:
        nibbles(p + 4, u);
        break;
    case LR_Q5_0:
        nibbles(p + 6, u);
        fifth_bits(p + 2, u);
        break;
    case LR_Q5_1:
        nibbles(p + 8, u);
        fifth_bits(p + 4, u);
        break;
    case LR_MXFP4:
        nibbles(p + 1, u);
        break;
    case LR_Q8_0:
        values_q8_0(p, u);
        break;
    case LR_Q2_K:
        values_q2_k(p, b, u);
        break;
    case LR_Q3_K:
        values_q3_k(p, b, u);
        break;
    case LR_Q4_K:
        values_q45_k(p + 16, NULL, b, u);
        break;
    case LR_Q5_K:
        values_q45_k(p + 48, p + 16, b, u);
        break;
    case LR_Q6_K:
        values_q6_k(p, b, u);
        break;
    case LR_IQ4_XS:
        nibbles(p + 8 + 16 * b, u);
        break;
    }
}

/* ---- scales of a row's block: d and m as they lie in the file, sub-scales and sub-minima as bytes ---- */

typedef struct scales {
    uint8_t d[2], m[2]; /* e8m0: d[0] */
    int8_t sc[16];
    uint8_t sm[8];
} scales;

/* Q4_K, Q5_K: see scale_min in dtype.c for the six-bit packing. */
static void scales_q45_k(const uint8_t *s, scales *o)
{
    for (int i = 0; i < 4; i++) {
        o->sc[i] = (int8_t)(s[i] & 63);
        o->sm[i] = s[i + 4] & 63;
        o->sc[i + 4] = (int8_t)((s[i + 8] & 15) | (s[i] >> 6) << 4);
        o->sm[i + 4] = (uint8_t)(s[i + 8] >> 4 | (s[i + 4] >> 6) << 4);
    }
}

static void scales_q3_k(const uint8_t *s, scales *o)
{
    for (int i = 0; i < 16; i++) {
        int low = s[i % 8] >> 4 * (i / 8) & 15, high = s[8 + i % 4] >> 2 * (i / 4) & 3;
        o->sc[i] = (int8_t)((low | high << 4) - 32);
    }
}

static void scales_iq4_xs(const uint8_t *p, scales *o)
{
    int high = p[2] | p[3] << 8;
    for (int i = 0; i < 8; i++)
        o->sc[i] = (int8_t)(((p[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4) - 32);
}

static void block_scales(int type, const uint8_t *p, scales *o)
{
    int at = type == LR_Q2_K ? 80 : type == LR_Q3_K ? 108 : type == LR_Q6_K ? 208 : 0; /* of d; m follows */
    memcpy(o->d, p + at, 2);
    switch (type) {
    case LR_Q4_1:
    case LR_Q5_1:
        memcpy(o->m, p + 2, 2);
        break;
    case LR_Q2_K:
        memcpy(o->m, p + 82, 2);
        memcpy(o->sc, p, 16);
        break;
    case LR_Q3_K:
        scales_q3_k(p + 96, o);
        break;
    case LR_Q4_K:
    case LR_Q5_K:
        memcpy(o->m, p + 2, 2);
        scales_q45_k(p + 4, o);
        break;
    case LR_Q6_K:
        memcpy(o->sc, p + 192, 16);
        break;
    case LR_IQ4_XS:
        scales_iq4_xs(p, o);
        break;
    }
}

/* ---- placing ---- */

/* A plane of 2 bits: bits `shift` and up of t. */
static void place_pairs(const uint8_t (*t)[64], int shift, uint8_t *out)
{
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 64; i++) {
            int bits = 0;
            for (int g = 0; g < 4; g++) bits |= (t[4 * r + g][i] >> shift & 3) << 2 * g;
            out[64 * r + i] = (uint8_t)bits;
        }
}

/* t: the 8 groups of a block, 64 bytes each. */
static void place_block(const lr_form *f, const uint8_t (*t)[64], uint8_t *q, uint8_t *h)
{
    if (f->main == 8) {
        memcpy(q, t, 512);
        return;
    }
    if (f->main == 4)
        for (int g = 0; g < 4; g++)
            for (int i = 0; i < 64; i++) q[64 * g + i] = (uint8_t)((t[g][i] & 15) | (t[g + 4][i] & 15) << 4);
    else
        place_pairs(t, 0, q);
    if (f->extra == 2) place_pairs(t, f->main, h);
    if (f->extra == 1)
        for (int i = 0; i < 64; i++) {
            int bits = 0;
            for (int g = 0; g < 8; g++) bits |= (t[g][i] >> f->main & 1) << g;
            h[i] = (uint8_t)bits;
        }
}

/* One block (or super-block, number b) of feature f of the strip: scales into their places. */
static void place_scales(const lr_form *f, const scales *s, uint8_t *base, const lr_parts *p, size_t b, int feature)
{
    size_t at = b * 16 + (size_t)feature;
    if (f->e8m0)
        base[p->d + at] = s->d[0];
    else
        memcpy(base + p->d + 2 * at, s->d, 2);
    if (f->min) memcpy(base + p->m + 2 * at, s->m, 2);
    if (!f->super) return;
    size_t n = (size_t)(256 / f->sub);
    for (size_t i = 0; i < n; i++) base[p->sc + (b * n + i) * 16 + (size_t)feature] = (uint8_t)s->sc[i];
    if (f->min && f->sub == 32)
        for (size_t i = 0; i < n; i++) base[p->sm + (b * n + i) * 16 + (size_t)feature] = s->sm[i];
}

static void pack_strip(int type, const uint8_t *rows, size_t row_bytes, int n, int k, uint8_t *dst)
{
    const lr_form *f = lr_form_of(type);
    const lr_parts p = lr_form_parts(f, k);
    const size_t block_bytes = (size_t)lr_dtype_bytes(type), per = f->super ? 8 : 1;
    uint8_t t[8][64], u[32];
    memset(dst + p.d, 0, p.end - p.d);
    for (size_t b = 0; b < (size_t)k / 32; b++) {
        const uint8_t *src = rows + b / per * block_bytes;
        if (n < LR_STRIP) memset(t, f->lut ? 0 : f->zero, sizeof t); /* features that do not exist weigh nothing */
        for (int j = 0; j < n; j++) {
            values(type, src + (size_t)j * row_bytes, (int)(b % per), u);
            for (int g = 0; g < 8; g++) memcpy(&t[g][4 * j], u + 4 * g, 4);
            if (b % per == 0) {
                scales s = {0};
                block_scales(type, src + (size_t)j * row_bytes, &s);
                place_scales(f, &s, dst, &p, b / per, j);
            }
        }
        place_block(f, (const uint8_t(*)[64])t, dst + p.q + b * (size_t)f->main * 64,
                    dst + p.h + b * (size_t)f->extra * 64);
    }
}

void lr_pack_strips(int type, const void *src, size_t row_bytes, int n, int k, void *dst, int s0, int s1)
{
    const size_t strip = lr_pack_strip_bytes(type, k);
    if (!strip) return;
    for (int s = s0; s < s1; s++) {
        int left = n - s * LR_STRIP;
        pack_strip(type, (const uint8_t *)src + (size_t)s * LR_STRIP * row_bytes, row_bytes,
                   left < LR_STRIP ? left : LR_STRIP, k, (uint8_t *)dst + (size_t)s * strip);
    }
}
