// Matrix products with AVX-512 (F, BW, VL, DQ, VNNI). A zmm holds 16 rows of a panel; a tile of up
// to 12 tokens shares the unpacked codes of a block. Codes are unsigned, as vpdpbusd's first
// operand must be; their bias is repaid by the value an integer sum starts from, which costs
// nothing: bias * -(sum of a). Equal to matmul_scalar.c bit for bit.
//
// When tokens are few, memory is the limit, and a tile is of up to four panels: each is a stream of
// its own to the hardware, and four streams are read farther ahead than one.

#include "matmul_avx512.h"

enum {
    TILE = 12,  // tokens of one panel
    SUMS = 16   // of a tile, all in registers
};
_Static_assert(4 * MATMUL_PANELS <= SUMS && TILE <= SUMS, "");

MATMUL_INLINE int log2_of(const int power) { return __builtin_ctz((unsigned)power); }

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
    const __m512i zero = _mm512_setzero_si512();
    const int i = halves ? 2 * t : t;
    const __m512i dot0 =
        dot_words(biased ? _mm512_set1_epi32(sums->start[i]) : zero, w, 0, halves ? 4 : 8, a);
    __m512 sum = _mm512_cvtepi32_ps(dot0);
    if (halves) {
        const __m512i dot1 =
            dot_words(biased ? _mm512_set1_epi32(sums->start[i + 1]) : zero, w, 4, 4, a);
        // Integers below 2^24: exact in floats.
        sum =
            _mm512_fmadd_ps(w->s.sub[1], _mm512_cvtepi32_ps(dot1), _mm512_mul_ps(w->s.sub[0], sum));
    }
    return fold_sum(f, &w->s, sum, ad, sums->neg + i, q);
}

// Blocks of one tile lie n_tokens * 32 bytes apart, a stride no hardware prefetcher follows. first
// may lie behind the last.
MATMUL_INLINE void prefetch_activations(const act_q8 *x, size_t first, const int n) {
    const uintptr_t from = (uintptr_t)x->q + first * ACT_BLOCK;
    MATMUL_UNROLL
    for (int i = 0; i < n; i += 2)
        __builtin_prefetch((const void *)(from + (uintptr_t)i * ACT_BLOCK));
}

// Tokens [t, t + n) of panels [p, p + n_panels).
MATMUL_INLINE void tile_q8(float *y, size_t y_stride, const panels *w, uint32_t p,
                           const uint32_t n_panels, const act_q8 *x, uint32_t t, const uint32_t n,
                           const dtype type) {
    const quant_traits q = quant_traits_of[type];
    const panel_chunk at = panel_chunk_of(type);
    const uint32_t n_blocks = w->n_cols / PANEL_BLOCK;
    const size_t panel_bytes = w->panel_bytes;
    const uint8_t *const data = w->data + p * panel_bytes;
    __m512 f[SUMS];
    MATMUL_UNROLL
    for (uint32_t i = 0; i < n_panels * n; i++) f[i] = _mm512_setzero_ps();
    tile_sums sums[2];
    load_sums(&sums[0], x, t, n, q);
    for (uint32_t b = 0; b < n_blocks; b++) {
        const size_t first = (size_t)b * x->n_tokens + t;
        if (b + 1 < n_blocks) load_sums(&sums[(b + 1) % 2], x, first + x->n_tokens, n, q);
        prefetch_activations(x, first + 2 * (size_t)x->n_tokens, n);
        MATMUL_UNROLL
        for (uint32_t k = 0; k < n_panels; k++) {
            weight_block block;
            const uint8_t *const chunk =
                data + k * panel_bytes + (size_t)(b / at.blocks) * at.bytes;
            if (n < TILE) matmul_prefetch_block(w, p + k, n_panels, b, at);
            load_block(&block, chunk, b % at.blocks, type);
            MATMUL_UNROLL
            for (uint32_t i = 0; i < n; i++) {
                const int8_t *const a = x->q + (first + i) * ACT_BLOCK;
                f[k * n + i] =
                    add_block(f[k * n + i], &block, a, x->d[first + i], &sums[b % 2], i, q);
            }
        }
    }
    MATMUL_UNROLL
    for (uint32_t k = 0; k < n_panels; k++) {
        const __mmask16 rows = rows_of(w, p + k);
        float *const out = y + (size_t)(p + k) * PANEL_ROWS + t * y_stride;
        MATMUL_UNROLL
        for (uint32_t i = 0; i < n; i++) store_rows(out + i * y_stride, rows, f[k * n + i]);
    }
}

// Tokens [t, t + n) of panels [p0, p1), `together` at a time.
MATMUL_INLINE void few_q8(float *y, size_t y_stride, const panels *w, uint32_t p0, uint32_t p1,
                          const uint32_t together, const act_q8 *x, uint32_t t, const uint32_t n,
                          const dtype type) {
    uint32_t p = p0;
    for (; p1 - p >= together; p += together) tile_q8(y, y_stride, w, p, together, x, t, n, type);
    if (together > 1)
        for (; p < p1; p++) tile_q8(y, y_stride, w, p, 1, x, t, n, type);
}

// Tokens [t0, t1) of panels [p0, p1), at most MATMUL_PANELS.
MATMUL_INLINE void panels_q8(float *y, size_t y_stride, const panels *w, uint32_t p0, uint32_t p1,
                             const act_q8 *x, uint32_t t0, uint32_t t1, const dtype type) {
    const uint32_t few = (t1 - t0) % TILE;
    uint32_t t = t1 - few;
    for (uint32_t p = p0; p < p1; p++)
        for (uint32_t i = t0; i < t; i += TILE) tile_q8(y, y_stride, w, p, 1, x, i, TILE, type);
    // 16 sums, 8 words and the scales of a type with minima are too many for the registers.
    const uint32_t of_eight = quant_traits_of[type].has_min ? 1 : 2;
    if (few & 8) few_q8(y, y_stride, w, p0, p1, of_eight, x, t, 8, type), t += 8;
    if (few & 4) few_q8(y, y_stride, w, p0, p1, MATMUL_PANELS, x, t, 4, type), t += 4;
    if (few & 2) few_q8(y, y_stride, w, p0, p1, MATMUL_PANELS, x, t, 2, type), t += 2;
    if (few & 1) few_q8(y, y_stride, w, p0, p1, MATMUL_PANELS, x, t, 1, type);
}

MATMUL_INLINE void matmul_q8(float *y, size_t y_stride, const panels *weights, uint32_t p0,
                             uint32_t p1, const act_q8 *acts, uint32_t t0, uint32_t t1,
                             const dtype type) {
    // Copies, so that storing a result cannot change them: prefill gains 5 to 8 %.
    const panels w = *weights;
    const act_q8 x = *acts;
    const uint32_t step = matmul_token_step(w.n_cols, TILE);
    for (uint32_t t = t0; t < t1; t += step)
        for (uint32_t p = p0; p < p1; p += MATMUL_PANELS)
            panels_q8(y, y_stride, &w, p, u32_min(p + MATMUL_PANELS, p1), &x, t,
                      u32_min(t + step, t1), type);
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
        if (n < TILE) matmul_prefetch((uintptr_t)panel + k * column_bytes);
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
