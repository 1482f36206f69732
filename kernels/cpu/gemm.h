/* gemm.h - inside the matrix product: the packed layout of weights, and what its files share.
 *
 * A strip is LR_STRIP output features, all of k. Its values are unsigned integers u, laid out in blocks of 32 k so that
 * 64 bytes hold 4 consecutive k of 16 features (byte 4 * feature + k % 4): one register of vpdpbusd, one row of an AMX
 * B tile. "Group" g of a block is its 4 k number g. A weight is
 *     w = scale * (u - zero) + min        or, with a codebook,    w = scale * (lut[u] - zero)
 * The parts of a strip follow each other, every part complete for all k, blocks ascending:
 *   q   main plane, `main` bits a value. 8: 8 registers a block, group g in register g. 4: 4 registers, group g in the
 * low nibbles of register g, group g + 4 in the high ones. 2: 2 registers, group g in bits 2 * (g % 4) of register g /
 * 4 h   extra plane of 0, 1 or 2 more high bits. 1: 1 register a block, group g in bit g. 2: as the main plane of 2
 * bits d   scales as in the file, (blocks or super-blocks of 256, 16 features): half precision, or e8m0 bytes (MXFP4)
 *   m   the same for minima (as in the file: m of w = d u + m, dmin of w = d s u - dmin t)
 *   sc  super-blocks: signed integer sub-scales, (sub-blocks of `sub` values, 16 features) bytes; Q2_K: low nibble the
 *       scale, high nibble the minimum
 *   sm  super-blocks with minima, not Q2_K: integer sub-minima, the same shape
 *
 * The product, for each output element on its own, block after block in ascending k (s_x: scale of the activation
 * block): sub = 32   acc = fma((float)sum (u - zero) q,  S * s_x,  acc), S = d or d * sc (exact in float32) with
 * minima: acc = fma(M, s_x * (float)sum q, acc), M = m or -(dmin * sm) sub = 16   acc = fma((float)(sc_0 sum_0 + sc_1
 * sum_1),  d * s_x,  acc), sum_0 and sum_1 over 16 k each with minima: acc = fma((float)(t_0 sum q_0 + t_1 sum q_1),
 * -dmin * s_x,  acc) The integers are exact in every instruction set
 * and below 2^24, so all tables agree bit for bit.
 *
 * Rows of 14 bits (wide) take super-blocks at once: H = sum sc (u - zero) high, L = sum sc (u - zero) low, T = sum t
 * (64 high + low), t the sub-minima, over all 256 k. The integers are exact in 32 bits. Then
 *     acc = fma(fma(64, (float)H, (float)L), d * s_x, acc), with minima: acc = fma((float)T, -dmin * s_x, acc)
 */
#ifndef LR_KERNELS_CPU_GEMM_H
#define LR_KERNELS_CPU_GEMM_H
#include "cpu/cpu.h"

typedef struct lr_form {
    int main, extra; /* bits of the planes; main = 0: the type is not packed */
    int sub;         /* values that share a scale: 32, or 16 */
    int zero;
    bool super; /* super-blocks of 256 with integer sub-scales */
    bool min;
    bool e8m0;
    int lut; /* 0: u is the value; else the codebook, a row of lr_form_lut */
} lr_form;

/* type, main, extra, sub, zero, super, min, e8m0, lut. The lists (super-blocks, all) are the only place that knows a
 * format by name, apart from pack.c; kernels are instantiated from it. */
#define LR_SUPER_LIST(X)                                                                                               \
    X(Q2_K, 2, 0, 16, 0, 1, 1, 0, 0)                                                                                   \
    X(Q3_K, 2, 1, 16, 4, 1, 0, 0, 0)                                                                                   \
    X(Q4_K, 4, 0, 32, 0, 1, 1, 0, 0)                                                                                   \
    X(Q5_K, 4, 1, 32, 0, 1, 1, 0, 0)                                                                                   \
    X(Q6_K, 4, 2, 16, 32, 1, 0, 0, 0)                                                                                  \
    X(IQ4_XS, 4, 0, 32, 128, 1, 0, 0, 1)
#define LR_FORM_LIST(X)                                                                                                \
    LR_SUPER_LIST(X)                                                                                                   \
    X(Q4_0, 4, 0, 32, 8, 0, 0, 0, 0)                                                                                   \
    X(Q4_1, 4, 0, 32, 0, 0, 1, 0, 0)                                                                                   \
    X(Q5_0, 4, 1, 32, 16, 0, 0, 0, 0)                                                                                  \
    X(Q5_1, 4, 1, 32, 0, 0, 1, 0, 0)                                                                                   \
    X(Q8_0, 8, 0, 32, 128, 0, 0, 0, 0)                                                                                 \
    X(IQ4_NL, 4, 0, 32, 128, 0, 0, 0, 1)                                                                               \
    X(MXFP4, 4, 0, 32, 128, 0, 0, 1, 2)
#define LR_FORM(main, extra, sub, zero, super, min, e8m0, lut)                                                         \
    ((lr_form){main, extra, sub, zero, super, min, e8m0, lut})

/* Codebook value + zero of index u: row 1 IQ4_NL and IQ4_XS, row 2 MXFP4 (E2M1, doubled). */
extern const uint8_t lr_form_lut[3][16];

/* The form of a type; NULL when the type is not packed. */
const lr_form *lr_form_of(int type);

/* Where the parts of a strip begin, in bytes, for rows of k values. Parts that a form lacks have no size. */
typedef struct lr_parts {
    size_t q, h, d, m, sc, sm, end; /* end: strip bytes, a multiple of 64 */
} lr_parts;

lr_parts lr_form_parts(const lr_form *f, int k);

/* One strip of a matrix. */
typedef struct lr_strip {
    const uint8_t *q, *h, *d, *m;
    const uint8_t *sc, *sm;
} lr_strip;

static inline lr_strip lr_strip_at(const lr_parts *p, const lr_gemm_w *w, int strip)
{
    const uint8_t *base = (const uint8_t *)w->data + (size_t)strip * w->strip_bytes;
    return (lr_strip){base + p->q, base + p->h, base + p->d, base + p->m, base + p->sc, base + p->sm};
}

/* The product of rows that are not packed (F32, F16, BF16): element (r, j) is 16 partial sums, sum i over k = i mod 16
 * by fused multiply-add in ascending k, then sums i and i + 8 added, i and i + 4, i and i + 2, i and i + 1. */

/* Activations to 8 bits (quantize_*.c), the same bits in every table. With a = max |x| of the block of 32:
 *   a < 1e-36       scale = 0,       q = 0
 *   a not finite    scale = NaN,     q = 0      (so that a row with a NaN or an infinity gives NaN, not noise)
 *   else            scale = a / 127, q = x * (127 / a) rounded to nearest even
 * Rows of 11 bits: 1016 in place of 127; the integer v is kept as high = floor((v + 4) / 8) and low = v - 8 high.
 * Rows of 14 bits: blocks of 256, 8128 in place of 127; high = floor((v + 32) / 64), low = v - 64 high. */
#define LR_QUANT_TINY 1e-36f
void lr_quantize_scalar(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1);
void lr_quantize_avx2(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1);
void lr_quantize_avx512(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1);
void lr_quantize_neon(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1);

/* Plain weights (F32, F16, BF16), strips s0..s1-1. */
void lr_gemm_plain_avx2(const lr_gemm_w *w, const float *x, size_t ldx, int m, float *y, size_t ldy, int s0, int s1);
void lr_gemm_plain_avx512(const lr_gemm_w *w, const float *x, size_t ldx, int m, float *y, size_t ldy, int s0, int s1);
void lr_gemm_plain_neon(const lr_gemm_w *w, const float *x, size_t ldx, int m, float *y, size_t ldy, int s0, int s1);

void lr_gemm_fill_scalar(lr_cpu_kernels *k);
void lr_gemm_fill_avx2(lr_cpu_kernels *k);
void lr_gemm_fill_avx512(lr_cpu_kernels *k);
void lr_gemm_fill_amx(lr_cpu_kernels *k);
void lr_gemm_fill_neon(lr_cpu_kernels *k);

/* The float32 reference product, for any type: y[r][j] = sum_k x[r][k] w[j][k] for rows 0..m-1 of x (ldx values apart)
 * and features j0..j1-1, whose rows lie row_bytes apart in the file's format. Nothing is quantized: each weight is its
 * exact float32 value, each sum 16 partial sums of k mod 16, added as above (multiplied and added, not fused). */
void lr_gemm_f32_ref(int type, const void *rows, size_t row_bytes, int k, const float *x, size_t ldx, int m, float *y,
                     size_t ldy, int j0, int j1);

#endif
