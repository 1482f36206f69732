/* quantize_avx2.c - activation rows to 8 bits: the formula is in gemm.h. Four registers of 8 lanes a block of 32. */
#include "cpu/gemm.h"
#include <immintrin.h>
#include <math.h>

static inline uint32_t top_of(__m256i a)
{
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

static inline int sum_of(__m256i a)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
    return _mm_cvtsi128_si32(s);
}

static inline void block(const float *x, int8_t *q, float *scale, float *xs, int16_t *sum16)
{
    const __m256i abs = _mm256_set1_epi32(0x7FFFFFFF);
    __m256 v[4];
    __m256i top = _mm256_setzero_si256(), i[4];
    for (int j = 0; j < 4; j++) {
        v[j] = _mm256_loadu_ps(x + 8 * j);
        top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(v[j]), abs));
    }
    const uint32_t bits = top_of(top);
    const float a = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)bits)));
    if (bits >= 0x7F800000 || a < LR_QUANT_TINY) {
        _mm256_storeu_si256((__m256i *)(void *)q, _mm256_setzero_si256());
        *xs = *scale = bits >= 0x7F800000 ? NAN : 0;
        sum16[0] = sum16[1] = 0;
        return;
    }
    const __m256 inv = _mm256_set1_ps(127.0f / a);
    *scale = a / 127.0f;
    for (int j = 0; j < 4; j++)
        i[j] = _mm256_cvtps_epi32(
            _mm256_round_ps(_mm256_mul_ps(v[j], inv), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    sum16[0] = (int16_t)sum_of(_mm256_add_epi32(i[0], i[1]));
    sum16[1] = (int16_t)sum_of(_mm256_add_epi32(i[2], i[3]));
    *xs = *scale * (float)(sum16[0] + sum16[1]);
    /* the packs work within 128-bit lanes: dwords come out as 0 2 4 6 | 1 3 5 7 */
    const __m256i p = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)(void *)q, _mm256_permutevar8x32_epi32(p, order));
}

void lr_quantize_avx2(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1)
{
    for (size_t r = 0; r < (size_t)m; r++)
        for (size_t c = (size_t)c0; c < (size_t)c1; c += LR_QBLK) {
            const size_t at = r * (size_t)qa.k + c;
            block(x + r * ldx + c, qa.q + at, qa.scale + at / 32, qa.xs + at / 32, qa.sum16 + at / 16);
        }
}
