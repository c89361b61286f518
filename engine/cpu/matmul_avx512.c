// Matrix products with AVX-512 (F, BW, VL, DQ, VNNI). A zmm holds 16 rows of a panel; a tile of up
// to 12 tokens shares the unpacked codes of a block. Codes are unsigned, as vpdpbusd's first
// operand must be; their bias is repaid by the value an integer sum starts from, which costs
// nothing: bias * -(sum of a). Equal to matmul_scalar.c bit for bit.

#include <immintrin.h>

#include "matmul_types.h"

enum { TILE = 12 };

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

MATMUL_INLINE int log2_of(const int power) { return __builtin_ctz((unsigned)power); }

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

// One block of one panel, ready for its tokens.
typedef struct weight_block {
    __m512i word[8];
    __m512 scale, min;          // as panel_block has them
    __m512 sub[2], sub_min[2];  // where sub-scales are 16 wide
} weight_block;

MATMUL_INLINE void load_block(weight_block *out, const uint8_t *chunk, uint32_t b,
                              const dtype type) {
    const quant_traits q = quant_traits_of[type];
    const panel_chunk at = panel_chunk_of(type);
    const uint8_t *const low = chunk + at.low + b * 64 * q.low_bits;
    const uint8_t *const high = chunk + at.high + b * 64 * q.high_bits;
    const uint32_t scale = q.sub_width ? 0 : b * PANEL_ROWS * 2;
    MATMUL_UNROLL
    for (int w = 0; w < 8; w++) out->word[w] = load_word(low, high, w, q);
    out->scale = load_scales(chunk + at.d + scale, q.d_is_bf16);
    if (q.has_min) out->min = load_scales(chunk + at.min + scale, false);
    if (q.sub_width == 32) {
        out->scale =
            _mm512_mul_ps(out->scale, floats_of_bytes(load_bytes(chunk + at.sub + b * PANEL_ROWS)));
        if (q.has_min) {
            out->min = _mm512_mul_ps(
                out->min, floats_of_bytes(load_bytes(chunk + at.sub_min + b * PANEL_ROWS)));
        }
    } else if (q.sub_width == 16) {
        const __m128i nibble = _mm_set1_epi8(15);
        MATMUL_UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            const __m128i sub = load_bytes(chunk + at.sub + (b * 2 + half) * PANEL_ROWS);
            out->sub[half] = floats_of_bytes(q.has_min ? _mm_and_si128(sub, nibble) : sub);
            if (q.has_min)
                out->sub_min[half] = floats_of_bytes(_mm_and_si128(_mm_srli_epi16(sub, 4), nibble));
        }
    }
}

// Per token of a tile and block: where integer sums start, and the negated sums as floats. Made for
// all tokens at once and one block ahead, read back one broadcast at a time: made when needed, the
// round trip through memory costs an eighth.
typedef struct tile_sums {
    _Alignas(64) int32_t start[32];
    _Alignas(64) float neg[32];
} tile_sums;

MATMUL_INLINE void load_sums(tile_sums *out, const act_q8 *x, size_t first, const int n_tokens,
                             const quant_traits q) {
    const bool halves = q.sub_width == 16;
    const int32_t *const neg = halves ? x->neg_half + 2 * first : x->neg_sum + first;
    const int n = halves ? 2 * n_tokens : n_tokens;
    if (!bias_of(q) && !q.has_min) return;
    MATMUL_UNROLL
    for (int i = 0; i < n; i += 16) {
        const __mmask16 lanes = n - i >= 16 ? 0xffff : (__mmask16)((1 << (n - i)) - 1);
        const __m512i sums = _mm512_maskz_loadu_epi32(lanes, neg + i);
        const int bias = bias_of(q);
        if (bias)
            _mm512_store_si512(out->start + i, _mm512_slli_epi32(sums, (unsigned)log2_of(bias)));
        if (q.has_min) _mm512_store_ps(out->neg + i, _mm512_cvtepi32_ps(sums));
    }
    // Without this the compiler takes the lanes out of the registers by shuffles, on the port the
    // dots need.
    __asm__("" : "+m"(*out));
}

// sum + the dots of n words from word w0 on.
MATMUL_INLINE __m512i dot_words(__m512i sum, const weight_block *w, const int w0, const int n,
                                const int8_t *a) {
    MATMUL_UNROLL
    for (int i = w0; i < w0 + n; i++) {
        int32_t four;
        __builtin_memcpy(&four, a + 4 * i, 4);
        sum = _mm512_dpbusd_epi32(sum, w->word[i], _mm512_set1_epi32(four));
    }
    return sum;
}

// f plus one block's contribution to token t of the tile. a [32], ad: the token's codes and scale.
MATMUL_INLINE __m512 add_block(__m512 f, const weight_block *w, const int8_t *a, float ad,
                               const tile_sums *sums, const int t, const quant_traits q) {
    const bool halves = q.sub_width == 16, biased = bias_of(q) != 0;
    const __m512 act = _mm512_set1_ps(ad);
    const __m512i zero = _mm512_setzero_si512();
    if (!halves) {
        const __m512i dot =
            dot_words(biased ? _mm512_set1_epi32(sums->start[t]) : zero, w, 0, 8, a);
        f = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(w->scale, act), f);
        if (q.has_min)
            f = _mm512_fmadd_ps(_mm512_set1_ps(sums->neg[t]), _mm512_mul_ps(w->min, act), f);
        return f;
    }
    const __m512i dot0 =
        dot_words(biased ? _mm512_set1_epi32(sums->start[2 * t]) : zero, w, 0, 4, a);
    const __m512i dot1 =
        dot_words(biased ? _mm512_set1_epi32(sums->start[2 * t + 1]) : zero, w, 4, 4, a);
    // Integers below 2^24: exact in floats.
    const __m512 sum = _mm512_fmadd_ps(w->sub[1], _mm512_cvtepi32_ps(dot1),
                                       _mm512_mul_ps(w->sub[0], _mm512_cvtepi32_ps(dot0)));
    f = _mm512_fmadd_ps(sum, _mm512_mul_ps(w->scale, act), f);
    if (q.has_min) {
        const __m512 min_sum =
            _mm512_fmadd_ps(w->sub_min[1], _mm512_set1_ps(sums->neg[2 * t + 1]),
                            _mm512_mul_ps(w->sub_min[0], _mm512_set1_ps(sums->neg[2 * t])));
        f = _mm512_fmadd_ps(min_sum, _mm512_mul_ps(w->min, act), f);
    }
    return f;
}

MATMUL_INLINE void store_rows(float *y, __mmask16 rows, __m512 f) {
    const __m512 sum = _mm512_add_ps(f, _mm512_setzero_ps());
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    _mm512_mask_storeu_ps(y, rows,
                          _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), nan));
}

// Blocks of one tile lie n_tokens * 32 bytes apart, a stride no hardware prefetcher follows. first
// may lie behind the last.
MATMUL_INLINE void prefetch_activations(const act_q8 *x, size_t first, const int n) {
    const uintptr_t from = (uintptr_t)x->q + first * ACT_BLOCK;
    MATMUL_UNROLL
    for (int i = 0; i < n; i += 2)
        __builtin_prefetch((const void *)(from + (uintptr_t)i * ACT_BLOCK));
}

// Tokens [t, t + n) of one panel. y: row 0 of the panel, token 0.
MATMUL_INLINE void tile_q8(float *y, size_t y_stride, __mmask16 rows, const uint8_t *panel,
                           uint32_t n_blocks, const act_q8 *x, uint32_t t, const int n,
                           const dtype type) {
    const quant_traits q = quant_traits_of[type];
    const panel_chunk at = panel_chunk_of(type);
    __m512 f[TILE];
    MATMUL_UNROLL
    for (int i = 0; i < n; i++) f[i] = _mm512_setzero_ps();
    tile_sums sums[2];
    load_sums(&sums[0], x, t, n, q);
    for (uint32_t b = 0; b < n_blocks; b++) {
        const size_t first = (size_t)b * x->n_tokens + t;
        weight_block w;
        const uint8_t *const chunk = panel + (size_t)(b / at.blocks) * at.bytes;
        if (n < TILE) matmul_prefetch_block(chunk, b % at.blocks, at);
        load_block(&w, chunk, b % at.blocks, type);
        if (b + 1 < n_blocks) load_sums(&sums[(b + 1) % 2], x, first + x->n_tokens, n, q);
        prefetch_activations(x, first + 2 * (size_t)x->n_tokens, n);
        MATMUL_UNROLL
        for (int i = 0; i < n; i++) {
            const int8_t *const a = x->q + (first + (size_t)i) * ACT_BLOCK;
            f[i] = add_block(f[i], &w, a, x->d[first + (size_t)i], &sums[b % 2], i, q);
        }
    }
    MATMUL_UNROLL
    for (int i = 0; i < n; i++) store_rows(y + (t + (size_t)i) * y_stride, rows, f[i]);
}

MATMUL_INLINE __mmask16 rows_of(const panels *w, uint32_t p) {
    const uint32_t n = u32_min(w->n_rows - p * PANEL_ROWS, PANEL_ROWS);
    return (__mmask16)((1u << n) - 1);
}

MATMUL_INLINE void matmul_q8(float *y, size_t y_stride, const panels *w, uint32_t p0, uint32_t p1,
                             const act_q8 *x, uint32_t t0, uint32_t t1, const dtype type) {
    const uint32_t n_blocks = w->n_cols / PANEL_BLOCK, step = matmul_token_step(w->n_cols, TILE);
    for (uint32_t from = t0; from < t1; from += step) {
        const uint32_t to = t1 - from < step ? t1 : from + step;
        for (uint32_t p = p0; p < p1; p++) {
            const uint8_t *const panel = w->data + p * w->panel_bytes;
            const __mmask16 rows = rows_of(w, p);
            float *const out = y + (size_t)p * PANEL_ROWS;
            uint32_t t = from;
            for (; to - t >= TILE; t += TILE)
                tile_q8(out, y_stride, rows, panel, n_blocks, x, t, TILE, type);
            for (; to - t >= 4; t += 4)
                tile_q8(out, y_stride, rows, panel, n_blocks, x, t, 4, type);
            for (; to - t >= 2; t += 2)
                tile_q8(out, y_stride, rows, panel, n_blocks, x, t, 2, type);
            if (t < to) tile_q8(out, y_stride, rows, panel, n_blocks, x, t, 1, type);
        }
    }
}

// Column k of 16 rows of a float type.
MATMUL_INLINE __m512 load_column(const uint8_t *panel, size_t k, const dtype type) {
    if (type == DTYPE_F32) return _mm512_load_ps(panel + k * PANEL_ROWS * 4);
    return load_scales(panel + k * PANEL_ROWS * 2, type == DTYPE_BF16);
}

MATMUL_INLINE void tile_float(float *y, size_t y_stride, __mmask16 rows, const uint8_t *panel,
                              uint32_t n_cols, const matmul_input *x, uint32_t t, const int n,
                              const dtype type) {
    const float *const a = x->f + t * x->f_stride;
    const size_t column_bytes = type == DTYPE_F32 ? PANEL_ROWS * 4 : PANEL_ROWS * 2;
    __m512 f[TILE];
    MATMUL_UNROLL
    for (int i = 0; i < n; i++) f[i] = _mm512_setzero_ps();
    for (size_t k = 0; k < n_cols; k++) {
        const __m512 column = load_column(panel, k, type);
        if (n < TILE) matmul_prefetch(panel + k * column_bytes);
        MATMUL_UNROLL
        for (int i = 0; i < n; i++)
            f[i] = _mm512_fmadd_ps(column, _mm512_set1_ps(a[(size_t)i * x->f_stride + k]), f[i]);
    }
    MATMUL_UNROLL
    for (int i = 0; i < n; i++) store_rows(y + (t + (size_t)i) * y_stride, rows, f[i]);
}

MATMUL_INLINE void matmul_float(float *y, size_t y_stride, const panels *w, uint32_t p0,
                                uint32_t p1, const matmul_input *x, uint32_t t0, uint32_t t1,
                                const dtype type) {
    const uint32_t n_cols = w->n_cols, step = matmul_token_step((size_t)n_cols * 4, TILE);
    for (uint32_t from = t0; from < t1; from += step) {
        const uint32_t to = t1 - from < step ? t1 : from + step;
        for (uint32_t p = p0; p < p1; p++) {
            const uint8_t *const panel = w->data + p * w->panel_bytes;
            const __mmask16 rows = rows_of(w, p);
            float *const out = y + (size_t)p * PANEL_ROWS;
            uint32_t t = from;
            for (; to - t >= TILE; t += TILE)
                tile_float(out, y_stride, rows, panel, n_cols, x, t, TILE, type);
            for (; to - t >= 4; t += 4)
                tile_float(out, y_stride, rows, panel, n_cols, x, t, 4, type);
            for (; t < to; t++) tile_float(out, y_stride, rows, panel, n_cols, x, t, 1, type);
        }
    }
}

MATMUL_DEFINE(avx512)
