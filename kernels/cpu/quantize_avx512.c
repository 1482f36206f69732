/* quantize_avx512.c - activation rows to 8 bits: the formula is in gemm.h. Two blocks of 16 lanes a block of 32. */
#include "cpu/gemm.h"
#include <immintrin.h>
#include <math.h>

static inline void block(const float *x, int8_t *q, bool fine, float *scale, int16_t *sum16)
{
    const __m512i abs = _mm512_set1_epi32(0x7FFFFFFF);
    const __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
    const __m512i a0 = _mm512_and_si512(_mm512_castps_si512(x0), abs);
    const __m512i a1 = _mm512_and_si512(_mm512_castps_si512(x1), abs);
    const uint32_t top = _mm512_reduce_max_epu32(_mm512_max_epu32(a0, a1));
    const float a = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)top)));
    if (top >= 0x7F800000 || a < LR_QUANT_TINY) {
        _mm256_storeu_si256((__m256i *)q, _mm256_setzero_si256());
        if (fine) _mm256_storeu_si256((__m256i *)(q + 32), _mm256_setzero_si256());
        *scale = top >= 0x7F800000 ? NAN : 0;
        sum16[0] = sum16[1] = 0;
        return;
    }
    const float steps = fine ? 1016.0f : 127.0f;
    const __m512 inv = _mm512_set1_ps(steps / a);
    *scale = a / steps;
    const __m512i q0 = _mm512_cvt_roundps_epi32(_mm512_mul_ps(x0, inv), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i q1 = _mm512_cvt_roundps_epi32(_mm512_mul_ps(x1, inv), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512i h0 = q0, h1 = q1;
    if (fine) {
        const __m512i four = _mm512_set1_epi32(4);
        h0 = _mm512_srai_epi32(_mm512_add_epi32(q0, four), 3);
        h1 = _mm512_srai_epi32(_mm512_add_epi32(q1, four), 3);
        _mm_storeu_si128((__m128i *)(q + 32), _mm512_cvtepi32_epi8(_mm512_sub_epi32(q0, _mm512_slli_epi32(h0, 3))));
        _mm_storeu_si128((__m128i *)(q + 48), _mm512_cvtepi32_epi8(_mm512_sub_epi32(q1, _mm512_slli_epi32(h1, 3))));
    }
    _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(h0));
    _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtepi32_epi8(h1));
    sum16[0] = (int16_t)_mm512_reduce_add_epi32(q0);
    sum16[1] = (int16_t)_mm512_reduce_add_epi32(q1);
}

static void wide_block(const float *x, int8_t *q, int8_t *low_q, float *scale, int16_t *sum)
{
    enum { N = LR_WIDE / 16 };
    const __m512i abs = _mm512_set1_epi32(0x7FFFFFFF), half = _mm512_set1_epi32(32);
    __m512i tops = _mm512_setzero_si512();
    for (int i = 0; i < N; i++)
        tops = _mm512_max_epu32(tops, _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x + 16 * i)), abs));
    const uint32_t top = _mm512_reduce_max_epu32(tops);
    const float a = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)top)));
    const bool infinite = top >= 0x7F800000, good = !infinite && a >= LR_QUANT_TINY;
    const __m512 inv = _mm512_set1_ps(good ? 8128.0f / a : 0);
    *scale = infinite ? NAN : good ? a / 8128.0f : 0;
    for (int i = 0; i < N; i++) {
        const __m512 y = good ? _mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), inv) : _mm512_setzero_ps();
        const __m512i v = _mm512_cvt_roundps_epi32(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, half), 6);
        const __m512i low = _mm512_sub_epi32(v, _mm512_slli_epi32(high, 6));
        _mm_storeu_si128((__m128i *)(q + 16 * i), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i *)(low_q + 16 * i), _mm512_cvtepi32_epi8(low));
        /* both sums in one go: a low sum is within 9 bits of either sign, 16 bits of its own */
        const int both = _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 16), low));
        const int16_t l = (int16_t)both;
        sum[i / 2 * 4 + i % 2] = (int16_t)((both - l) >> 16);
        sum[i / 2 * 4 + i % 2 + 2] = l;
    }
}

void lr_quantize_avx512(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1)
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
            const size_t at = r * (size_t)qa.k + c;
            block(x + r * ldx + c, qa.q + (qa.fine ? 2 * at : at), qa.fine, qa.scale + at / 32, qa.sum16 + at / 16);
        }
}
