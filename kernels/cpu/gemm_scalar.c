/* gemm_scalar.c - the matrix product in plain C: the reference of every table, for packed and plain weights.
 *
 * It reads the same packed strips and takes the same sums as the vector kernels (gemm.h has the formulas), so they
 * agree bit for bit. A block of a strip is unpacked to signed bytes once for TILE rows.
 */
#include "cpu/gemm.h"
#include <math.h>
#include <string.h>

enum { TILE = 8 }; /* rows that share an unpacked block */

/* One unpacked block of 32 k of a strip. */
typedef struct block {
    int8_t v[32][LR_STRIP]; /* u - zero, or the codebook's value */
    float s[LR_STRIP];      /* S (sub = 32), d (sub = 16) */
    float m[LR_STRIP];      /* M (sub = 32), -dmin (sub = 16) */
    int sc[2][LR_STRIP];    /* sub = 16: scales and minima of the halves */
    int sm[2][LR_STRIP];
} block;

static float half_at(const uint8_t *p, size_t i)
{
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    return lr_f16_to_f32(h);
}

/* 2^(e - 128) */
static float e8m0_half(uint8_t e)
{
    union {
        uint32_t u;
        float f;
    } v = {e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23};
    return v.f;
}

static void unpack_values(const lr_form *f, const lr_strip *s, size_t b, block *o)
{
    const uint8_t *q = s->q + b * (size_t)f->main * 64, *h = s->h + b * (size_t)f->extra * 64;
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < 64; i++) {
            int u = f->main == 8   ? q[64 * g + i]
                    : f->main == 4 ? q[64 * (g % 4) + i] >> 4 * (g / 4) & 15
                                   : q[64 * (g / 4) + i] >> 2 * (g % 4) & 3;
            if (f->extra == 1) u |= (h[i] >> g & 1) << f->main;
            if (f->extra == 2) u |= (h[64 * (g / 4) + i] >> 2 * (g % 4) & 3) << f->main;
            if (f->lut) u = lr_form_lut[f->lut][u];
            o->v[4 * g + i % 4][i / 4] = (int8_t)(u - f->zero);
        }
}

static void unpack_scales(const lr_form *f, const lr_strip *s, size_t b, block *o)
{
    size_t sb = f->super ? b / 8 : b;
    const uint8_t *sc = s->sc + b * ((size_t)(32 / f->sub)) * 16, *sm = s->sm + b * 16;
    for (size_t j = 0; j < LR_STRIP; j++) {
        size_t at = sb * 16 + j;
        float d = f->e8m0 ? e8m0_half(s->d[at]) : half_at(s->d, at), m = f->min ? half_at(s->m, at) : 0;
        if (f->sub == 16) {
            bool split = f->min; /* Q2_K */
            o->s[j] = d;
            o->m[j] = -m;
            for (int i = 0; i < 2; i++) {
                uint8_t x = sc[16 * i + (int)j];
                o->sc[i][j] = split ? x & 15 : (int8_t)x;
                o->sm[i][j] = split ? x >> 4 : 0;
            }
        } else {
            o->s[j] = f->super ? d * (float)(int8_t)sc[j] : d;
            if (f->min) o->m[j] = f->super ? -(m * (float)sm[j]) : m;
        }
    }
}

static void dots(const block *w, const int8_t *q, bool fine, int dot[2][LR_STRIP])
{
    memset(dot, 0, 2 * sizeof *dot);
    for (int k = 0; k < 32; k++) {
        const int v = fine ? 8 * q[k] + q[32 + k] : q[k];
        for (int j = 0; j < LR_STRIP; j++) dot[k / 16][j] += w->v[k][j] * v;
    }
}

/* acc += block b of row r */
static void add_block(const lr_form *f, const block *w, const lr_qact *qa, int r, int b, float *acc)
{
    size_t at = (size_t)r * (size_t)(qa->k / 32) + (size_t)b;
    const float sx = qa->scale[at];
    const int16_t *sum = qa->sum16 + 2 * at;
    int dot[2][LR_STRIP];
    dots(w, qa->q + at * (qa->fine ? 64 : 32), qa->fine, dot);
    if (f->sub == 32) {
        float xs = sx * (float)(sum[0] + sum[1]);
        for (int j = 0; j < LR_STRIP; j++) {
            acc[j] = fmaf((float)(dot[0][j] + dot[1][j]), w->s[j] * sx, acc[j]);
            if (f->min) acc[j] = fmaf(w->m[j], xs, acc[j]);
        }
        return;
    }
    for (int j = 0; j < LR_STRIP; j++) {
        float t = fmaf((float)dot[1][j], (float)w->sc[1][j], (float)dot[0][j] * (float)w->sc[0][j]);
        acc[j] = fmaf(t, w->s[j] * sx, acc[j]);
        if (f->min) acc[j] = fmaf((float)(w->sm[0][j] * sum[0] + w->sm[1][j] * sum[1]), w->m[j] * sx, acc[j]);
    }
}

/* ---- rows of 14 bits: whole super-blocks ---- */

/* Sub-scale (or, minima, sub-minimum) of half `half` of block b, feature j. */
static int sub_at(const lr_form *f, const lr_strip *s, bool minima, size_t b, int half, size_t j)
{
    if (f->sub == 32) return minima ? s->sm[b * 16 + j] : (int8_t)s->sc[b * 16 + j];
    const uint8_t x = s->sc[(2 * b + (size_t)half) * 16 + j];
    return !f->min ? (int8_t)x : minima ? x >> 4 : x & 15;
}

typedef struct wide_sums {
    int h[LR_STRIP], l[LR_STRIP], t[LR_STRIP];
} wide_sums;

static void add_wide(const lr_form *f, const block *w, const lr_strip *s, const lr_qact *qa, size_t row, size_t b,
                     wide_sums *o)
{
    const size_t at = row * (size_t)qa->k + b * 32;
    const int8_t *q = qa->q + at + row * (size_t)qa->k;
    const int16_t *sum = qa->sum16 + at / 8;
    for (int k = 0; k < 32; k++)
        for (size_t j = 0; j < LR_STRIP; j++) {
            const int v = sub_at(f, s, false, b, k / 16, j) * w->v[k][j];
            o->h[j] += v * q[k];
            o->l[j] += v * q[qa->k + k];
        }
    for (int half = 0; f->min && half < 2; half++)
        for (size_t j = 0; j < LR_STRIP; j++)
            o->t[j] += sub_at(f, s, true, b, half, j) * (64 * sum[half] + sum[2 + half]);
}

static void gemm_wide(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_form *f = lr_form_of(w->type);
    const lr_parts parts = lr_form_parts(f, w->k);
    block o;
    for (int s = s0; s < s1; s++) {
        const lr_strip strip = lr_strip_at(&parts, w, s);
        int n = w->n - s * LR_STRIP < LR_STRIP ? w->n - s * LR_STRIP : LR_STRIP;
        for (int r0 = 0; r0 < m; r0 += TILE) {
            int nr = m - r0 < TILE ? m - r0 : TILE;
            float acc[TILE][LR_STRIP] = {{0}};
            for (size_t sb = 0; sb < (size_t)w->k / LR_WIDE; sb++) {
                wide_sums sums[TILE] = {0};
                for (size_t b = 8 * sb; b < 8 * sb + 8; b++) {
                    unpack_values(f, &strip, b, &o);
                    for (int r = 0; r < nr; r++) add_wide(f, &o, &strip, qa, (size_t)(r0 + r), b, &sums[r]);
                }
                for (int r = 0; r < nr; r++) {
                    const float sx = qa->scale[(size_t)(r0 + r) * ((size_t)w->k / LR_WIDE) + sb];
                    for (size_t j = 0; j < LR_STRIP; j++) {
                        const float t = fmaf(64, (float)sums[r].h[j], (float)sums[r].l[j]);
                        acc[r][j] = fmaf(t, half_at(strip.d, sb * 16 + j) * sx, acc[r][j]);
                        if (f->min)
                            acc[r][j] = fmaf((float)sums[r].t[j], -half_at(strip.m, sb * 16 + j) * sx, acc[r][j]);
                    }
                }
            }
            for (int r = 0; r < nr; r++)
                memcpy(y + (size_t)(r0 + r) * ldy + (size_t)s * LR_STRIP, acc[r], (size_t)n * sizeof(float));
        }
    }
}

static void gemm_packed(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1)
{
    const lr_form *f = lr_form_of(w->type);
    const lr_parts parts = lr_form_parts(f, w->k);
    block o;
    for (int s = s0; s < s1; s++) {
        const lr_strip strip = lr_strip_at(&parts, w, s);
        int n = w->n - s * LR_STRIP < LR_STRIP ? w->n - s * LR_STRIP : LR_STRIP;
        for (int r0 = 0; r0 < m; r0 += TILE) {
            int nr = m - r0 < TILE ? m - r0 : TILE;
            float acc[TILE][LR_STRIP] = {{0}};
            for (int b = 0; b < w->k / 32; b++) {
                unpack_values(f, &strip, (size_t)b, &o);
                unpack_scales(f, &strip, (size_t)b, &o);
                for (int r = 0; r < nr; r++) add_block(f, &o, qa, r0 + r, b, acc[r]);
            }
            for (int r = 0; r < nr; r++)
                memcpy(y + (size_t)(r0 + r) * ldy + (size_t)s * LR_STRIP, acc[r], (size_t)n * sizeof(float));
        }
    }
}

/* ---- weights as they lie in the file ---- */

static float plain_at(int type, const uint8_t *row, int i)
{
    float x;
    if (type == LR_F16) return half_at(row, (size_t)i);
    if (type == LR_F32) {
        memcpy(&x, row + 4 * (size_t)i, 4);
        return x;
    }
    uint16_t h;
    memcpy(&h, row + 2 * (size_t)i, 2);
    return lr_bf16_to_f32(h);
}

static float fold16(float *s)
{
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; i++) s[i] += s[i + w];
    return s[0];
}

static void gemm_plain(const lr_gemm_w *w, const float *x, size_t ldx, int m, float *y, size_t ldy, int j0, int j1)
{
    for (int j = j0; j < j1; j++) {
        const uint8_t *row = (const uint8_t *)w->data + (size_t)j * w->strip_bytes;
        for (int r0 = 0; r0 < m; r0 += TILE) {
            int nr = m - r0 < TILE ? m - r0 : TILE;
            float sum[TILE][16] = {{0}};
            for (int i = 0; i < w->k; i++) {
                float v = plain_at(w->type, row, i);
                for (int r = 0; r < nr; r++)
                    sum[r][i % 16] = fmaf(x[(size_t)(r0 + r) * ldx + (size_t)i], v, sum[r][i % 16]);
            }
            for (int r = 0; r < nr; r++) y[(size_t)(r0 + r) * ldy + (size_t)j] = fold16(sum[r]);
        }
    }
}

static void gemm(const lr_gemm_w *w, const lr_qact *qa, const float *xf, size_t ldx, int m, float *y, size_t ldy,
                 int s0, int s1)
{
    if (w->packed && qa->wide)
        gemm_wide(w, qa, m, y, ldy, s0, s1);
    else if (w->packed)
        gemm_packed(w, qa, m, y, ldy, s0, s1);
    else
        gemm_plain(w, xf, ldx, m, y, ldy, s0 * LR_STRIP, s1 * LR_STRIP < w->n ? s1 * LR_STRIP : w->n);
}

/* ---- the float32 reference ---- */

enum {
    REF_CHUNK = 8192,
    REF_ROWS = 16
}; /* dequantized values at once (a multiple of every block), rows that share them */

static void ref_add(const float *wf, const float *x, int n, float *sum)
{
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) sum[l] += wf[i + l] * x[i + l];
    for (int l = 0; i + l < n; l++) sum[l] += wf[i + l] * x[i + l];
}

void lr_gemm_f32_ref(int type, const void *rows, size_t row_bytes, int k, const float *x, size_t ldx, int m, float *y,
                     size_t ldy, int j0, int j1)
{
    const size_t per = (size_t)lr_dtype_block(type), bytes = (size_t)lr_dtype_bytes(type);
    float wf[REF_CHUNK];
    for (int j = j0; j < j1; j++) {
        const uint8_t *row = (const uint8_t *)rows + (size_t)j * row_bytes;
        for (int r0 = 0; r0 < m; r0 += REF_ROWS) {
            int nr = m - r0 < REF_ROWS ? m - r0 : REF_ROWS;
            float sum[REF_ROWS][16] = {{0}};
            for (int c = 0; c < k; c += REF_CHUNK) {
                int n = k - c < REF_CHUNK ? k - c : REF_CHUNK;
                if (r0 == 0 || k > REF_CHUNK) lr_dtype_to_f32(type, row + (size_t)c / per * bytes, wf, (size_t)n);
                for (int r = 0; r < nr; r++) ref_add(wf, x + (size_t)(r0 + r) * ldx + c, n, sum[r]);
            }
            for (int r = 0; r < nr; r++) y[(size_t)(r0 + r) * ldy + (size_t)j] = fold16(sum[r]);
        }
    }
}

static const char *way(const lr_gemm_w *w, const lr_qact *qa, int m)
{
    (void)qa, (void)m;
    return w->packed ? "plain C" : "plain C, float sums";
}

void lr_gemm_fill_scalar(lr_cpu_kernels *k)
{
    k->gemm = gemm;
    k->way = way;
    k->quantize = lr_quantize_scalar;
    k->fine = true;
}
