// The vector of ops_lanes.h on AVX-512 (F, BW, VL, DQ): 16 floats. Include from files compiled for
// it only.
#ifndef MF_CPU_LANES_AVX512_H
#define MF_CPU_LANES_AVX512_H

#include <immintrin.h>

#include "kernels.h"

enum { LANES = 16 };
typedef __m512 vf;
typedef __mmask16 vm;

static inline vf v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf v_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void v_store_f16(uint16_t *p, vf a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf v_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf v_set1(float x) { return _mm512_set1_ps(x); }
static inline vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf v_and(vf a, vf b) { return _mm512_and_ps(a, b); }
static inline vf v_or(vf a, vf b) { return _mm512_or_ps(a, b); }
static inline vf v_xor(vf a, vf b) { return _mm512_xor_ps(a, b); }
static inline vm v_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline vm v_equal(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline vf v_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }  // m ? a : b
// The low bits of a sum with MATHF_MAGIC, as the exponent of a power of two.
static inline vf v_exponent(vf t) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23));
}

// Elements of even and of odd index of a, b in sequence; and back.
static inline void v_unzip(vf *even, vf *odd, vf a, vf b) {
    const __m512i e = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *even = _mm512_permutex2var_ps(a, e, b);
    *odd = _mm512_permutex2var_ps(a, _mm512_or_si512(e, _mm512_set1_epi32(1)), b);
}

static inline void v_zip(vf *a, vf *b, vf even, vf odd) {
    const __m512i i = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *a = _mm512_permutex2var_ps(even, i, odd);
    *b = _mm512_permutex2var_ps(even, _mm512_add_epi32(i, _mm512_set1_epi32(8)), odd);
}

// Bits of the largest magnitude of 32 floats, as an integer.
static inline uint32_t v_top32(const float *x) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i a = _mm512_and_si512(_mm512_castps_si512(v_load(x)), magnitude);
    const __m512i b = _mm512_and_si512(_mm512_castps_si512(v_load(x + 16)), magnitude);
    return (uint32_t)_mm512_reduce_max_epi32(_mm512_max_epi32(a, b));
}

// q = x * inverse, to nearest, ties to even; returns the sum.
static inline int32_t v_quantize16(int8_t *q, const float *x, float inverse) {
    const __m128i c = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v_mul(v_load(x), v_set1(inverse))));
    _mm_storeu_si128((__m128i *)q, c);
    const __m128i s = _mm_sad_epu8(_mm_xor_si128(c, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(s) + _mm_extract_epi16(s, 4) - 16 * 128;
}

#endif
