// Matrix products with AVX2, FMA and F16C. A block of a panel is unpacked once into bytes on the
// stack and then meets up to GROUP tokens, whose running sums lie beside it: with 16 registers,
// memory is the better place for both. When tokens are few, panels are read side by side, as
// matmul_avx512.c says. Lanes are rows, 8 at a time. Equal to matmul_scalar.c bit for bit.
//
// vpmaddubsw adds two products of unsigned and signed bytes in 16 bits, saturating at 32767. Codes
// up to 63 stay unsigned, their bias is repaid by the value a sum starts from, and a few words are
// added in 16 bits; types with 8-bit values hand the value's sign to the activation instead: 2 *
// 128 * 127 fits, once.

#include <immintrin.h>

#include "matmul_types.h"

enum { GROUP = 16, HALF = 8 };  // tokens; rows in a vector

// Values need 8 bits: the sign trick.
MATMUL_INLINE bool is_wide(const quant_traits q) {
    return q.low_bits == 8 || q.codebook == CODEBOOK_IQ4;
}

// What is added to a signed value to make it unsigned.
MATMUL_INLINE int bias_of(const quant_traits q) {
    return is_wide(q) ? 0 : q.codebook == CODEBOOK_MXFP4 ? 12 : q.bias;
}

// Words whose products fit in 16 bits together: 254 * largest code * words < 32768.
MATMUL_INLINE int words_in_16_bits(const quant_traits q) {
    return is_wide(q) ? 1 : q.low_bits + q.high_bits == 6 ? 2 : 4;
}

// One block of one panel, ready for its tokens.
typedef struct weight_block {
    _Alignas(32) uint8_t word[8][64];  // biased, or signed if wide; [word][16 rows][4 columns]
    _Alignas(32) float scale[16], min[16], sub[2][16],
        sub_min[2][16];  // per row, as panel_block has them
} weight_block;

MATMUL_INLINE __m256i load_bits(const uint8_t *at, const int shift, const int bits) {
    const __m256i v = _mm256_srli_epi16(_mm256_load_si256((const __m256i *)at), shift);
    return bits == 8 ? v : _mm256_and_si256(v, _mm256_set1_epi8((char)((1 << bits) - 1)));
}

// Columns 4 w .. 4 w + 3 of 8 rows, from those rows' first bytes in the block's planes.
MATMUL_INLINE __m256i load_word(const uint8_t *low, const uint8_t *high, const int w,
                                const quant_traits q) {
    const int lb = q.low_bits, hb = q.high_bits;
    __m256i v = load_bits(low + w % lb * 64, w / lb * lb, lb);
    if (hb) {
        const __m256i upper = load_bits(high + w % hb * 64, w / hb * hb, hb);
        v = _mm256_or_si256(v, _mm256_slli_epi16(upper, lb));
    }
    if (q.codebook) {
        const __m128i table = _mm_loadu_si128((const __m128i *)quant_codebooks[q.codebook]);
        const __m128i biased = _mm_add_epi8(table, _mm_set1_epi8((char)bias_of(q)));
        v = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(biased), v);
    } else if (is_wide(q)) {
        v = _mm256_xor_si256(v, _mm256_set1_epi8((char)q.bias));
    }
    return v;
}

MATMUL_INLINE __m256 load_scales(const uint8_t *at, const bool bf16) {
    const __m128i bits = _mm_load_si128((const __m128i *)at);
    if (!bf16) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

MATMUL_INLINE __m256 floats_of_bytes(__m128i v) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
}
MATMUL_INLINE __m128i load_bytes(const uint8_t *at) { return _mm_loadl_epi64((const __m128i *)at); }

// Rows [row, row + 8): row is 0 or 8.
MATMUL_INLINE void load_half(weight_block *out, const uint8_t *chunk, uint32_t b,
                             const uint32_t row, const dtype type) {
    const quant_traits q = quant_traits_of[type];
    const panel_chunk at = panel_chunk_of(type);
    const uint8_t *const low = chunk + at.low + b * 64 * q.low_bits + row * 4;
    const uint8_t *const high = chunk + at.high + b * 64 * q.high_bits + row * 4;
    const uint32_t scale_at = ((q.sub_width ? 0 : b * PANEL_ROWS) + row) * 2;
    MATMUL_UNROLL
    for (int w = 0; w < 8; w++)
        _mm256_store_si256((__m256i *)(out->word[w] + row * 4), load_word(low, high, w, q));

    __m256 scale = load_scales(chunk + at.d + scale_at, q.d_is_bf16);
    __m256 min = q.has_min ? load_scales(chunk + at.min + scale_at, false) : _mm256_setzero_ps();
    if (q.sub_width == 32) {
        scale = _mm256_mul_ps(scale,
                              floats_of_bytes(load_bytes(chunk + at.sub + b * PANEL_ROWS + row)));
        if (q.has_min)
            min = _mm256_mul_ps(
                min, floats_of_bytes(load_bytes(chunk + at.sub_min + b * PANEL_ROWS + row)));
    } else if (q.sub_width == 16) {
        const __m128i nibble = _mm_set1_epi8(15);
        for (uint32_t i = 0; i < 2; i++) {
            const __m128i sub = load_bytes(chunk + at.sub + (b * 2 + i) * PANEL_ROWS + row);
            const __m128i sub_min = _mm_and_si128(_mm_srli_epi16(sub, 4), nibble);
            _mm256_store_ps(out->sub[i] + row,
                            floats_of_bytes(q.has_min ? _mm_and_si128(sub, nibble) : sub));
            if (q.has_min) _mm256_store_ps(out->sub_min[i] + row, floats_of_bytes(sub_min));
        }
    }
    _mm256_store_ps(out->scale + row, scale);
    if (q.has_min) _mm256_store_ps(out->min + row, min);
}

// Adds the dots of words [w0, w0 + 4) of 8 rows with n tokens to sum [n]. a: the first token's
// codes; the others follow.
MATMUL_INLINE void dot_four_words(__m256i *sum, const weight_block *w, uint32_t row, const int w0,
                                  const int8_t *a, const int n, const quant_traits q) {
    const int together = words_in_16_bits(q);
    MATMUL_UNROLL
    for (int g = w0; g < w0 + 4; g += together) {
        __m256i narrow[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        MATMUL_UNROLL
        for (int i = g; i < g + together; i++) {
            const __m256i word = _mm256_load_si256((const __m256i *)(w->word[i] + row * 4));
            MATMUL_UNROLL
            for (int t = 0; t < n; t++) {
                int32_t four;
                __builtin_memcpy(&four, a + t * ACT_BLOCK + 4 * i, 4);
                __m256i act = _mm256_set1_epi32(four);
                if (is_wide(q)) act = _mm256_sign_epi8(act, word);
                const __m256i pairs =
                    _mm256_maddubs_epi16(is_wide(q) ? _mm256_abs_epi8(word) : word, act);
                narrow[t] = i == g ? pairs : _mm256_add_epi16(narrow[t], pairs);
            }
        }
        MATMUL_UNROLL
        for (int t = 0; t < n; t++) {
            sum[t] = _mm256_add_epi32(sum[t], _mm256_madd_epi16(narrow[t], _mm256_set1_epi16(1)));
        }
    }
}

// Adds one block's contribution to f [n][16] of n (1 or 2) tokens, the first of them token t.
MATMUL_INLINE void add_block(float *f, const weight_block *w, const act_q8 *x, size_t block_start,
                             uint32_t t, const int n, const quant_traits q) {
    const bool halves = q.sub_width == 16;
    const size_t first = block_start + t;
    const int8_t *const a = x->q + first * ACT_BLOCK;
    const int bias = bias_of(q);
    for (uint32_t row = 0; row < PANEL_ROWS; row += HALF) {
        __m256i dot0[2], dot1[2];
        MATMUL_UNROLL
        for (int i = 0; i < n; i++) {
            const int32_t *const neg =
                halves ? x->neg_half + 2 * (first + (size_t)i) : x->neg_sum + first + i;
            dot0[i] = _mm256_set1_epi32(bias * neg[0]);
            dot1[i] = _mm256_set1_epi32(halves ? bias * neg[1] : 0);
        }
        dot_four_words(dot0, w, row, 0, a, n, q);
        dot_four_words(halves ? dot1 : dot0, w, row, 4, a, n, q);
        MATMUL_UNROLL
        for (int i = 0; i < n; i++) {
            const size_t at = first + (size_t)i;
            const __m256 act = _mm256_set1_ps(x->d[at]);
            float *const out = f + i * PANEL_ROWS + row;
            __m256 dot = _mm256_cvtepi32_ps(dot0[i]);
            if (halves) {  // integers below 2^24: exact in floats
                dot = _mm256_mul_ps(_mm256_load_ps(w->sub[0] + row), dot);
                dot = _mm256_fmadd_ps(_mm256_load_ps(w->sub[1] + row), _mm256_cvtepi32_ps(dot1[i]),
                                      dot);
            }
            __m256 sum = _mm256_load_ps(out);
            sum = _mm256_fmadd_ps(dot, _mm256_mul_ps(_mm256_load_ps(w->scale + row), act), sum);
            if (q.has_min) {
                __m256 neg = _mm256_set1_ps((float)x->neg_sum[at]);
                if (halves) {
                    const __m256 neg1 = _mm256_set1_ps((float)x->neg_half[2 * at + 1]);
                    neg = _mm256_set1_ps((float)x->neg_half[2 * at]);
                    neg = _mm256_mul_ps(_mm256_load_ps(w->sub_min[0] + row), neg);
                    neg = _mm256_fmadd_ps(_mm256_load_ps(w->sub_min[1] + row), neg1, neg);
                }
                sum = _mm256_fmadd_ps(neg, _mm256_mul_ps(_mm256_load_ps(w->min + row), act), sum);
            }
            _mm256_store_ps(out, sum);
        }
    }
}

// Writes the first n_rows of 16 results.
MATMUL_INLINE void store_rows(float *y, uint32_t n_rows, __m256 f0, __m256 f1) {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    MATMUL_UNROLL
    for (int row = 0; row < PANEL_ROWS; row += HALF) {
        const __m256 sum = _mm256_add_ps(row ? f1 : f0, _mm256_setzero_ps());
        const __m256 out = _mm256_blendv_ps(sum, nan, _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
        const __m256i present = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n_rows - row), lane);
        if ((int)n_rows > row) _mm256_maskstore_ps(y + row, present, out);
    }
}

// Tokens [t0, t1), at most GROUP, of panels [p0, p1), at most MATMUL_PANELS.
MATMUL_INLINE void group_q8(float *y, size_t y_stride, const panels *w, uint32_t p0, uint32_t p1,
                            const act_q8 *x, uint32_t t0, uint32_t t1, const dtype type) {
    const quant_traits q = quant_traits_of[type];
    const panel_chunk at = panel_chunk_of(type);
    _Alignas(32) float f[MATMUL_PANELS][GROUP][PANEL_ROWS] = {{{0}}};
    weight_block block;
    for (uint32_t b = 0; b < w->n_cols / PANEL_BLOCK; b++) {
        const size_t block_start = (size_t)b * x->n_tokens;
        for (uint32_t p = p0; p < p1; p++) {
            const uint8_t *const chunk =
                w->data + p * w->panel_bytes + (size_t)(b / at.blocks) * at.bytes;
            float(*const sums)[PANEL_ROWS] = f[p - p0];
            uint32_t t = t0;
            if (t1 - t0 < GROUP) matmul_prefetch_block(w, p, p1 - p0, b, at);
            load_half(&block, chunk, b % at.blocks, 0, type);
            load_half(&block, chunk, b % at.blocks, HALF, type);
            for (; t1 - t >= 2; t += 2) add_block(sums[t - t0], &block, x, block_start, t, 2, q);
            if (t < t1) add_block(sums[t - t0], &block, x, block_start, t, 1, q);
        }
    }
    for (uint32_t p = p0; p < p1; p++) {
        const uint32_t n_rows = u32_min(w->n_rows - p * PANEL_ROWS, PANEL_ROWS);
        for (uint32_t t = t0; t < t1; t++) {
            const float *const sums = f[p - p0][t - t0];
            store_rows(y + t * y_stride + (size_t)p * PANEL_ROWS, n_rows, _mm256_load_ps(sums),
                       _mm256_load_ps(sums + HALF));
        }
    }
}

#include "matmul_groups.h"

// Column k of rows [row, row + 8) of a float type.
MATMUL_INLINE __m256 load_column(const uint8_t *panel, size_t k, const uint32_t row,
                                 const dtype type) {
    if (type == DTYPE_F32)
        return _mm256_load_ps((const float *)(const void *)(panel + (k * PANEL_ROWS + row) * 4));
    return load_scales(panel + (k * PANEL_ROWS + row) * 2, type == DTYPE_BF16);
}

// n (at most 4) tokens from t on, of one panel.
MATMUL_INLINE void tile_float(float *y, size_t y_stride, const panels *w, uint32_t p,
                              const matmul_input *x, uint32_t t, const int n, const dtype type) {
    const uint8_t *const panel = w->data + p * w->panel_bytes;
    const float *const a = x->f + t * x->f_stride;
    const size_t column_bytes = type == DTYPE_F32 ? PANEL_ROWS * 4 : PANEL_ROWS * 2;
    const uint32_t n_rows = u32_min(w->n_rows - p * PANEL_ROWS, PANEL_ROWS);
    __m256 f[4][2];
    MATMUL_UNROLL
    for (int i = 0; i < n; i++) f[i][0] = f[i][1] = _mm256_setzero_ps();
    for (size_t k = 0; k < w->n_cols; k++) {
        if (n < 4) matmul_prefetch((uintptr_t)panel + k * column_bytes);
        const __m256 column0 = load_column(panel, k, 0, type),
                     column1 = load_column(panel, k, HALF, type);
        MATMUL_UNROLL
        for (int i = 0; i < n; i++) {
            const __m256 act = _mm256_set1_ps(a[(size_t)i * x->f_stride + k]);
            f[i][0] = _mm256_fmadd_ps(column0, act, f[i][0]);
            f[i][1] = _mm256_fmadd_ps(column1, act, f[i][1]);
        }
    }
    MATMUL_UNROLL
    for (int i = 0; i < n; i++)
        store_rows(y + (t + (size_t)i) * y_stride, n_rows, f[i][0], f[i][1]);
}

MATMUL_INLINE void matmul_float(float *y, size_t y_stride, const panels *w, uint32_t p0,
                                uint32_t p1, const matmul_input *x, uint32_t t0, uint32_t t1,
                                const dtype type) {
    const uint32_t step = matmul_token_step((size_t)w->n_cols * 4, 4);
    for (uint32_t from = t0; from < t1; from += step) {
        const uint32_t to = t1 - from < step ? t1 : from + step;
        for (uint32_t p = p0; p < p1; p++) {
            float *const out = y + (size_t)p * PANEL_ROWS;
            uint32_t t = from;
            for (; to - t >= 4; t += 4) tile_float(out, y_stride, w, p, x, t, 4, type);
            for (; t < to; t++) tile_float(out, y_stride, w, p, x, t, 1, type);
        }
    }
}

MATMUL_DEFINE(avx2)
