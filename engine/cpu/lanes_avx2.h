// The vector of ops_lanes.h and attn_lanes.h on AVX2 and FMA: 8 floats. Include from files compiled
// for it only.
#ifndef MF_CPU_LANES_AVX2_H
#define MF_CPU_LANES_AVX2_H

#include <immintrin.h>

#include "kernels.h"

enum { LANES = 8 };
typedef __m256 vf;
typedef __m256 vm;  // all bits of a lane set, or none

static inline vf v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf v_load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void v_store_f16(uint16_t *p, vf a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf v_load_i8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf v_set1(float x) { return _mm256_set1_ps(x); }
static inline vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf v_and(vf a, vf b) { return _mm256_and_ps(a, b); }
static inline vf v_or(vf a, vf b) { return _mm256_or_ps(a, b); }
static inline vf v_xor(vf a, vf b) { return _mm256_xor_ps(a, b); }
static inline vm v_less(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline vm v_equal(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
static inline vf v_select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }  // m ? a : b
// The low bits of a sum with MATHF_MAGIC, as the exponent of a power of two.
static inline vf v_exponent(vf t) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23));
}

// Lane i: bit i.
static inline vm v_mask(uint32_t bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), bit), bit));
}

// Elements of even and of odd index of a, b in sequence; and back.
static inline void v_unzip(vf *even, vf *odd, vf a, vf b) {
    const __m256d e = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)),
                  o = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd));
    *even = _mm256_castpd_ps(_mm256_permute4x64_pd(e, 0xd8));
    *odd = _mm256_castpd_ps(_mm256_permute4x64_pd(o, 0xd8));
}

static inline void v_zip(vf *a, vf *b, vf even, vf odd) {
    const vf l = _mm256_unpacklo_ps(even, odd), h = _mm256_unpackhi_ps(even, odd);
    *a = _mm256_permute2f128_ps(l, h, 0x20);
    *b = _mm256_permute2f128_ps(l, h, 0x31);
}

// Columns of the LANES x LANES block with rows r: column x to out + x * stride.
static inline void v_transpose(float *out, size_t stride, const vf r[LANES]) {
    vf a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (size_t i = 0; i < 4; i++) {
        v_store(out + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        v_store(out + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}

// Exact dots of the 32 codes at rows[i] + at with q, lane i for row i. |q| <= 127.
static inline vf v_dots(const uint8_t *const *rows, size_t at, const int8_t *q) {
    const __m256i by = _mm256_loadu_si256((const __m256i *)q), one = _mm256_set1_epi16(1);
    __m256i s[8];
    for (int i = 0; i < 8; i++) {
        const __m256i k = _mm256_loadu_si256((const __m256i *)(rows[i] + at));
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(k), _mm256_sign_epi8(by, k));
        s[i] = _mm256_madd_epi16(pairs, one);
    }
    for (int i = 0; i < 4; i++) s[i] = _mm256_hadd_epi32(s[2 * i], s[2 * i + 1]);
    const __m256i a = _mm256_hadd_epi32(s[0], s[1]), b = _mm256_hadd_epi32(s[2], s[3]);
    return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                                               _mm256_permute2x128_si256(a, b, 0x31)));
}

// Bits of the largest magnitude of 32 floats, as an integer.
static inline uint32_t v_top32(const float *x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i top = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8)
        top =
            _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v_load(x + i)), magnitude));
    __m128i t = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}

// q = x * inverse, to nearest, ties to even; returns the sum.
static inline int32_t v_quantize16(int8_t *q, const float *x, float inverse) {
    const vf by = v_set1(inverse);
    const __m256i a = _mm256_cvtps_epi32(v_mul(v_load(x), by)),
                  b = _mm256_cvtps_epi32(v_mul(v_load(x + 8), by));
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    const __m128i c = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storeu_si128((__m128i *)q, c);
    const __m128i s = _mm_sad_epu8(_mm_xor_si128(c, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(s) + _mm_extract_epi16(s, 4) - 16 * 128;
}

#endif
