/* quantize_avx512.c - activation rows to 8 bits, and to 11 and 14: the formulas are in gemm.h. Two registers a block of
 * 32; blocks of 8 bits four at a time, as what is found for one of 32 values costs as much for four. */
#include "cpu/gemm.h"
#include <immintrin.h>
#include <math.h>

static inline __m512i rounded(__m512 x, __m512 by) /* x * by */
{
    return _mm512_cvt_roundps_epi32(_mm512_mul_ps(x, by), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline void block(const float *x, int8_t *q, bool fine, float *scale, float *xs, int16_t *sum16)
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
        *xs = *scale = top >= 0x7F800000 ? NAN : 0;
        sum16[0] = sum16[1] = 0;
        return;
    }
    const float steps = fine ? 1016.0f : 127.0f;
    const __m512 inv = _mm512_set1_ps(steps / a);
    *scale = a / steps;
    const __m512i q0 = rounded(x0, inv), q1 = rounded(x1, inv);
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
    *xs = *scale * (float)(sum16[0] + sum16[1]);
}

/* A register of each of four blocks: the largest of each, as integers. */
static inline __m128i tops_of(const __m512i m[4])
{
    const __m512i a = _mm512_max_epu32(_mm512_unpacklo_epi32(m[0], m[1]), _mm512_unpackhi_epi32(m[0], m[1]));
    const __m512i b = _mm512_max_epu32(_mm512_unpacklo_epi32(m[2], m[3]), _mm512_unpackhi_epi32(m[2], m[3]));
    const __m512i c = _mm512_max_epu32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i d = _mm256_max_epu32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

/* Four blocks of 8 bits together: a few operations for all in place of some for each. False, and nothing is done: not
 * all are numbers of a common size. */
static inline bool four_blocks(const float *x, int8_t *q, float *scale, float *xs, int16_t *sum16)
{
    const __m512i abs = _mm512_set1_epi32(0x7FFFFFFF);
    __m512 v[4][2];
    __m512i m[4], bytes[2];
    for (int i = 0; i < 4; i++) {
        v[i][0] = _mm512_loadu_ps(x + 32 * i);
        v[i][1] = _mm512_loadu_ps(x + 32 * i + 16);
        m[i] = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(v[i][0]), abs),
                                _mm512_and_si512(_mm512_castps_si512(v[i][1]), abs));
    }
    const __m128 a = _mm_castsi128_ps(tops_of(m)), steps = _mm_set1_ps(127.0f);
    const __mmask8 good = _mm_cmp_ps_mask(a, _mm_set1_ps(LR_QUANT_TINY), _CMP_GE_OQ) &
                          _mm_cmp_ps_mask(a, _mm_set1_ps(INFINITY), _CMP_LT_OQ);
    if (good != 0xF) return false;
    const __m128 inv = _mm_div_ps(steps, a), sx = _mm_div_ps(a, steps);
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int i = 0; i < 2; i++) { /* packing works within lanes of 128 bits */
        __m512i w[2];
        for (int j = 0; j < 2; j++) {
            const __m512 by = _mm512_permutexvar_ps(_mm512_set1_epi32(2 * i + j), _mm512_castps128_ps512(inv));
            w[j] = _mm512_packs_epi32(rounded(v[2 * i + j][0], by), rounded(v[2 * i + j][1], by));
        }
        bytes[i] = _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(w[0], w[1]));
        _mm512_storeu_si512(q + 64 * i, bytes[i]);
    }
    /* sums of 4; of 8, those of bytes[0] and [1] side by side; of 16, one a lane and register */
    const __m512i ones = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
    const __m512i s0 = _mm512_dpbusd_epi32(zero, ones, bytes[0]), s1 = _mm512_dpbusd_epi32(zero, ones, bytes[1]);
    __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi64(s0, s1), _mm512_unpackhi_epi64(s0, s1));
    s = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, _MM_PERM_CDAB));
    s = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0), s);
    const __m128i sums = _mm256_cvtepi32_epi16(_mm512_castsi512_si256(s));
    _mm_storeu_si128((__m128i *)sum16, sums);
    _mm_storeu_ps(scale, sx);
    _mm_storeu_ps(xs, _mm_mul_ps(sx, _mm_cvtepi32_ps(_mm_madd_epi16(sums, _mm_set1_epi16(1)))));
    return true;
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
        for (size_t c = (size_t)c0, n; c < (size_t)c1; c += n) {
            const size_t at = r * (size_t)qa.k + c, b = at / LR_QBLK;
            const float *from = x + r * ldx + c;
            n = 4 * LR_QBLK;
            if (!qa.fine && c + n <= (size_t)c1 &&
                four_blocks(from, qa.q + at, qa.scale + b, qa.xs + b, qa.sum16 + 2 * b))
                continue;
            n = LR_QBLK;
            block(from, qa.q + (qa.fine ? 2 * at : at), qa.fine, qa.scale + b, qa.xs + b, qa.sum16 + 2 * b);
        }
}
