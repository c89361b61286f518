// Reading a panel into 512-bit registers, scaling and adding its dots, and writing results: what
// matmul_avx512.c and matmul_amx.c share. A zmm holds the panel's 16 rows.
#ifndef MF_CPU_MATMUL_AVX512_H
#define MF_CPU_MATMUL_AVX512_H

#include <immintrin.h>

#include "matmul_types.h"

// A shift that is a constant after inlining; left for positive counts.
MATMUL_INLINE __m512i shift_words(__m512i v, const int by) {
    if (by > 0) return _mm512_slli_epi16(v, by);
    if (by < 0) return _mm512_srli_epi16(v, -by);
    return v;
}

// What is added to a signed code to make it unsigned. A power of two or 0.
MATMUL_INLINE int bias_of(const quant_traits q) {
    return q.codebook == CODEBOOK_IQ4 ? 128 : q.codebook == CODEBOOK_MXFP4 ? 16 : q.bias;
}

// Columns 4 w .. 4 w + 3 of 16 rows, biased. low, high: the block's planes.
MATMUL_INLINE __m512i load_word(const uint8_t *low, const uint8_t *high, const int w,
                                const quant_traits q) {
    const int lb = q.low_bits, hb = q.high_bits;
    __m512i v = _mm512_load_si512(low + w % lb * 64);
    if (lb < 8)
        v = _mm512_and_si512(shift_words(v, -(w / lb * lb)),
                             _mm512_set1_epi8((char)((1 << lb) - 1)));
    if (hb) {
        const __m512i upper = shift_words(_mm512_load_si512(high + w % hb * 64), lb - w / hb * hb);
        v = _mm512_ternarylogic_epi32(v, upper, _mm512_set1_epi8((char)(((1 << hb) - 1) << lb)),
                                      0xf8);  // v | upper & mask
    }
    if (q.codebook) {
        const __m128i table = _mm_loadu_si128((const __m128i *)quant_codebooks[q.codebook]);
        const __m128i biased = _mm_add_epi8(table, _mm_set1_epi8((char)bias_of(q)));
        v = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(biased), v);
    }
    return v;
}

MATMUL_INLINE __m512 load_scales(const uint8_t *at, const bool bf16) {
    const __m256i bits = _mm256_load_si256((const __m256i *)at);
    if (!bf16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

MATMUL_INLINE __m512 floats_of_bytes(__m128i v) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v));
}
MATMUL_INLINE __m128i load_bytes(const uint8_t *at) { return _mm_load_si128((const __m128i *)at); }

// What a block's dots are multiplied with, a row each.
typedef struct weight_scales {
    __m512 scale, min;          // as panel_block has them
    __m512 sub[2], sub_min[2];  // where sub-scales are 16 wide
} weight_scales;

// One block of one panel, ready for its tokens.
typedef struct weight_block {
    __m512i word[8];  // biased
    weight_scales s;
} weight_block;

MATMUL_INLINE void load_block(weight_block *out, const uint8_t *chunk, uint32_t b,
                              const dtype type) {
    const quant_traits q = quant_traits_of[type];
    const panel_chunk at = panel_chunk_of(type);
    const uint8_t *const low = chunk + at.low + b * 64 * q.low_bits;
    const uint8_t *const high = chunk + at.high + b * 64 * q.high_bits;
    const uint32_t scale = q.sub_width ? 0 : b * PANEL_ROWS * 2;
    weight_scales *const s = &out->s;
    MATMUL_UNROLL
    for (int w = 0; w < 8; w++) out->word[w] = load_word(low, high, w, q);
    s->scale = load_scales(chunk + at.d + scale, q.d_is_bf16);
    if (q.has_min) s->min = load_scales(chunk + at.min + scale, false);
    if (q.sub_width == 32) {
        s->scale =
            _mm512_mul_ps(s->scale, floats_of_bytes(load_bytes(chunk + at.sub + b * PANEL_ROWS)));
        if (q.has_min) {
            s->min = _mm512_mul_ps(
                s->min, floats_of_bytes(load_bytes(chunk + at.sub_min + b * PANEL_ROWS)));
        }
    } else if (q.sub_width == 16) {
        const __m128i nibble = _mm_set1_epi8(15);
        MATMUL_UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            const __m128i sub = load_bytes(chunk + at.sub + (b * 2 + half) * PANEL_ROWS);
            s->sub[half] = floats_of_bytes(q.has_min ? _mm_and_si128(sub, nibble) : sub);
            if (q.has_min)
                s->sub_min[half] = floats_of_bytes(_mm_and_si128(_mm_srli_epi16(sub, 4), nibble));
        }
    }
}

// f plus one block's contribution to one token. sum: its dot, or sub0 * dot0 + sub1 * dot1 where
// sub-scales are 16 wide; ad: the token's scale; neg: its negated sums, where the type has minima.
MATMUL_INLINE __m512 fold_sum(__m512 f, const weight_scales *s, __m512 sum, float ad,
                              const float *neg, const quant_traits q) {
    const __m512 act = _mm512_set1_ps(ad);
    f = _mm512_fmadd_ps(sum, _mm512_mul_ps(s->scale, act), f);
    if (q.has_min) {
        __m512 min_sum = _mm512_set1_ps(neg[0]);
        if (q.sub_width == 16)
            min_sum = _mm512_fmadd_ps(s->sub_min[1], _mm512_set1_ps(neg[1]),
                                      _mm512_mul_ps(s->sub_min[0], min_sum));
        f = _mm512_fmadd_ps(min_sum, _mm512_mul_ps(s->min, act), f);
    }
    return f;
}

MATMUL_INLINE void store_rows(float *y, __mmask16 rows, __m512 f) {
    const __m512 sum = _mm512_add_ps(f, _mm512_setzero_ps());
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    _mm512_mask_storeu_ps(y, rows,
                          _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), nan));
}

MATMUL_INLINE __mmask16 rows_of(const panels *w, uint32_t p) {
    const uint32_t n = u32_min(w->n_rows - p * PANEL_ROWS, PANEL_ROWS);
    return (__mmask16)((1u << n) - 1);
}

#endif
