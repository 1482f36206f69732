/* quantize_scalar.c - activation rows to 8 bits, in plain C: the reference; the formula is in gemm.h.
 *
 * The largest magnitude is taken over the bits of |x| as integers, where infinities and NaN are above every number.
 */
#include "cpu/gemm.h"
#include <math.h>
#include <string.h>

static float top_of(const float *x, int n)
{
    uint32_t top = 0;
    float a;
    for (int i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, x + i, 4);
        u &= 0x7FFFFFFF;
        top = u > top ? u : top;
    }
    memcpy(&a, &top, 4);
    return a; /* may be infinite, or no number */
}

static void block(const float *x, int8_t *q, bool fine, float *scale, float *xs, int16_t *sum16)
{
    const float a = top_of(x, LR_QBLK);
    sum16[0] = sum16[1] = 0;
    if (!isfinite(a) || a < LR_QUANT_TINY) {
        memset(q, 0, fine ? 2 * LR_QBLK : LR_QBLK);
        *xs = *scale = !isfinite(a) ? NAN : 0;
        return;
    }
    const float steps = fine ? 1016.0f : 127.0f, inv = steps / a,
                magic = 0x1.8p23f; /* adding it rounds to an integer, to nearest even */
    *scale = a / steps;
    for (int i = 0; i < LR_QBLK; i++) {
        float r = (x[i] * inv + magic) - magic;
        int v = (int)r;
        q[i] = (int8_t)(fine ? (v + 1028) / 8 - 128 : v); /* rounds down: v + 4 over 8 */
        if (fine) q[32 + i] = (int8_t)(v - 8 * q[i]);
        sum16[i / 16] = (int16_t)(sum16[i / 16] + v);
    }
    *xs = *scale * (float)(sum16[0] + sum16[1]);
}

static void wide_block(const float *x, int8_t *q, int8_t *low_q, float *scale, int16_t *sum)
{
    const float a = top_of(x, LR_WIDE), magic = 0x1.8p23f;
    const bool good = isfinite(a) && a >= LR_QUANT_TINY;
    memset(sum, 0, LR_WIDE / 8 * sizeof *sum);
    memset(q, 0, LR_WIDE);
    memset(low_q, 0, LR_WIDE);
    *scale = !isfinite(a) ? NAN : good ? a / 8128.0f : 0;
    if (!good) return;
    const float inv = 8128.0f / a;
    for (int i = 0; i < LR_WIDE; i++) {
        const float r = (x[i] * inv + magic) - magic;
        const int v = (int)r, high = (v + 8224) / 64 - 128, low = v - 64 * high;
        q[i] = (int8_t)high;
        low_q[i] = (int8_t)low;
        int16_t *s = sum + i / 32 * 4 + i % 32 / 16;
        s[0] = (int16_t)(s[0] + high);
        s[2] = (int16_t)(s[2] + low);
    }
}

void lr_quantize_scalar(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1)
{
    for (size_t r = 0; qa.wide && r < (size_t)m; r++)
        for (size_t c = (size_t)c0; c < (size_t)c1; c += LR_WIDE) {
            const size_t at = r * (size_t)qa.k + c;
            int8_t *q = qa.q + at + r * (size_t)qa.k;
            wide_block(x + r * ldx + c, q, q + qa.k, qa.scale + at / LR_WIDE, qa.sum16 + at / 8);
        }
    if (qa.wide) return;
    for (size_t r = 0; r < (size_t)m; r++)
        for (size_t c = (size_t)c0; c < (size_t)c1; c += LR_QBLK) {
            size_t at = r * (size_t)qa.k + c;
            block(x + r * ldx + c, qa.q + (qa.fine ? 2 * at : at), qa.fine, qa.scale + at / 32, qa.xs + at / 32,
                  qa.sum16 + at / 16);
        }
}
