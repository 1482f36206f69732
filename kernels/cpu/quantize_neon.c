/* quantize_neon.c - activation rows to 8 bits: the formula is in gemm.h. Eight registers of 4 lanes a block of 32. */
#include "cpu/gemm.h"
#include <arm_neon.h>
#include <math.h>
#include <string.h>

static inline void block(const float *x, int8_t *q, float *scale, float *xs, int16_t *sum16)
{
    uint32x4_t top4 = vdupq_n_u32(0);
    int32x4_t i[8];
    for (int j = 0; j < 8; j++)
        top4 = vmaxq_u32(top4, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + 4 * j)), vdupq_n_u32(0x7FFFFFFF)));
    const uint32_t top = vmaxvq_u32(top4);
    float a;
    memcpy(&a, &top, 4);
    if (top >= 0x7F800000 || a < LR_QUANT_TINY) {
        memset(q, 0, LR_QBLK);
        *xs = *scale = top >= 0x7F800000 ? NAN : 0;
        sum16[0] = sum16[1] = 0;
        return;
    }
    const float inv = 127.0f / a;
    *scale = a / 127.0f;
    for (int j = 0; j < 8; j++) i[j] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4 * j), inv));
    for (int j = 0; j < 2; j++) {
        const int32x4_t *p = i + 4 * j;
        sum16[j] = (int16_t)vaddvq_s32(vaddq_s32(vaddq_s32(p[0], p[1]), vaddq_s32(p[2], p[3])));
        const int16x8_t lo = vcombine_s16(vmovn_s32(p[0]), vmovn_s32(p[1]));
        const int16x8_t hi = vcombine_s16(vmovn_s32(p[2]), vmovn_s32(p[3]));
        vst1q_s8(q + 16 * j, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
    }
    *xs = *scale * (float)(sum16[0] + sum16[1]);
}

void lr_quantize_neon(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1)
{
    for (size_t r = 0; r < (size_t)m; r++)
        for (size_t c = (size_t)c0; c < (size_t)c1; c += LR_QBLK) {
            const size_t at = r * (size_t)qa.k + c;
            block(x + r * ldx + c, qa.q + at, qa.scale + at / 32, qa.xs + at / 32, qa.sum16 + at / 16);
        }
}
