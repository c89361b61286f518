// Matrix products with NEON. Compiled twice: for armv8-a it defines matmul_init_neon; for
// armv8.2-a+dotprod
// (__ARM_FEATURE_DOTPROD) matmul_init_dotprod, which differs only in add_words. A block of a panel
// is unpacked once into bytes on the stack and then meets up to GROUP tokens, whose running sums
// lie beside it. When tokens are few, panels are read side by side, as matmul_avx512.c says. Lanes
// are rows, 4 at a time. Bytes are signed; codes of 7 bits or less keep their
// bias, repaid by the value a sum starts from. Equal to matmul_scalar.c bit for bit.

#include <arm_neon.h>

#include "matmul_types.h"

enum { GROUP = 16, QUAD = 4 };  // tokens; rows in a vector

// What is added to a signed value in weight_block; 8-bit codes and codebooks are stored signed.
MATMUL_INLINE int bias_of(const quant_traits q) { return q.low_bits == 8 ? 0 : q.bias; }

// One block of one panel, ready for its tokens.
typedef struct weight_block {
    _Alignas(16) int8_t word[8][64];  // [word][16 rows][4 columns]
    _Alignas(16) float scale[16], min[16], sub[2][16],
        sub_min[2][16];  // per row, as panel_block has them
} weight_block;

// By a constant; vshlq_u8 by a negative count shifts right and takes no special case for 0.
MATMUL_INLINE uint8x16_t load_bits(const uint8_t *at, const int shift, const int bits) {
    const uint8x16_t v = vshlq_u8(vld1q_u8(at), vdupq_n_s8((int8_t)-shift));
    return bits == 8 ? v : vandq_u8(v, vdupq_n_u8((uint8_t)((1 << bits) - 1)));
}

// Columns 4 w .. 4 w + 3 of 4 rows, from those rows' first bytes in the block's planes.
MATMUL_INLINE int8x16_t load_word(const uint8_t *low, const uint8_t *high, const int w,
                                  const quant_traits q) {
    const int lb = q.low_bits, hb = q.high_bits;
    uint8x16_t v = load_bits(low + w % lb * 64, w / lb * lb, lb);
    if (hb) {
        const uint8x16_t upper = load_bits(high + w % hb * 64, w / hb * hb, hb);
        v = vorrq_u8(v, vshlq_u8(upper, vdupq_n_s8((int8_t)lb)));
    }
    if (q.codebook) return vqtbl1q_s8(vld1q_s8(quant_codebooks[q.codebook]), v);
    if (lb == 8) v = veorq_u8(v, vdupq_n_u8(q.bias));
    return vreinterpretq_s8_u8(v);
}

MATMUL_INLINE float32x4_t load_scales(const uint8_t *at, const bool bf16) {
    const uint16x4_t bits = vreinterpret_u16_u8(vld1_u8(at));
    if (!bf16) return vcvt_f32_f16(vreinterpret_f16_u16(bits));
    return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}

// One sub-scale byte per row; a byte's bits [shift, shift + 4) if it packs two, all of it (signed)
// otherwise.
MATMUL_INLINE float32x4_t load_subs(const uint8_t *at, const bool packed, const int shift) {
    int32_t values[QUAD];
    for (int i = 0; i < QUAD; i++) values[i] = packed ? at[i] >> shift & 15 : (int8_t)at[i];
    return vcvtq_f32_s32(vld1q_s32(values));
}

// Rows [row, row + 4).
MATMUL_INLINE void load_quad(weight_block *out, const uint8_t *chunk, uint32_t b,
                             const uint32_t row, const dtype type) {
    const quant_traits q = quant_traits_of[type];
    const panel_chunk at = panel_chunk_of(type);
    const uint8_t *const low = chunk + at.low + b * 64 * q.low_bits + row * 4;
    const uint8_t *const high = chunk + at.high + b * 64 * q.high_bits + row * 4;
    const uint32_t scale_at = ((q.sub_width ? 0 : b * PANEL_ROWS) + row) * 2;
    MATMUL_UNROLL
    for (int w = 0; w < 8; w++) vst1q_s8(out->word[w] + row * 4, load_word(low, high, w, q));

    float32x4_t scale = load_scales(chunk + at.d + scale_at, q.d_is_bf16);
    float32x4_t min = q.has_min ? load_scales(chunk + at.min + scale_at, false) : vdupq_n_f32(0.0f);
    if (q.sub_width == 32) {
        scale = vmulq_f32(scale, load_subs(chunk + at.sub + b * PANEL_ROWS + row, false, 0));
        if (q.has_min)
            min = vmulq_f32(min, load_subs(chunk + at.sub_min + b * PANEL_ROWS + row, false, 0));
    } else if (q.sub_width == 16) {
        for (uint32_t i = 0; i < 2; i++) {
            const uint8_t *const sub = chunk + at.sub + (b * 2 + i) * PANEL_ROWS + row;
            vst1q_f32(out->sub[i] + row, load_subs(sub, q.has_min, 0));
            if (q.has_min) vst1q_f32(out->sub_min[i] + row, load_subs(sub, true, 4));
        }
    }
    vst1q_f32(out->scale + row, scale);
    if (q.has_min) vst1q_f32(out->min + row, min);
}

// Sums of 4 rows under way.
typedef struct quad_sum {
    int32x4_t all;     // with dotprod
    int32x4_t lo, hi;  // without: rows (0, 0, 1, 1) and (2, 2, 3, 3), in two parts each
} quad_sum;

// Adds the dots of words i and i + 1. 16 bits hold two products: 2 * 128 * 127 < 32768.
MATMUL_INLINE void add_words(quad_sum *sum, const int8x16_t word[2], const int8x16_t act[2]) {
#ifdef __ARM_FEATURE_DOTPROD
    sum->all = vdotq_s32(vdotq_s32(sum->all, word[0], act[0]), word[1], act[1]);
#else
    const int16x8_t lo = vmull_s8(vget_low_s8(word[0]), vget_low_s8(act[0]));
    const int16x8_t hi = vmull_s8(vget_high_s8(word[0]), vget_high_s8(act[0]));
    sum->lo = vpadalq_s16(sum->lo, vmlal_s8(lo, vget_low_s8(word[1]), vget_low_s8(act[1])));
    sum->hi = vpadalq_s16(sum->hi, vmlal_s8(hi, vget_high_s8(word[1]), vget_high_s8(act[1])));
#endif
}

MATMUL_INLINE int32x4_t total(const quad_sum *sum) {
#ifdef __ARM_FEATURE_DOTPROD
    return sum->all;
#else
    return vaddq_s32(sum->all, vpaddq_s32(sum->lo, sum->hi));
#endif
}

MATMUL_INLINE int8x16_t repeat_word(const int8_t *four) {
    int32_t bits;
    __builtin_memcpy(&bits, four, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(bits));
}

// out = start + the dots of words [w0, w0 + n) of all 16 rows.
MATMUL_INLINE void dot_words(int32x4_t out[4], int32_t start, const weight_block *w, const int w0,
                             const int n, const int8_t *a) {
    quad_sum sum[4];
    MATMUL_UNROLL
    for (int r = 0; r < 4; r++)
        sum[r] = (quad_sum){vdupq_n_s32(start), vdupq_n_s32(0), vdupq_n_s32(0)};
    MATMUL_UNROLL
    for (int i = w0; i < w0 + n; i += 2) {
        const int8x16_t act[2] = {repeat_word(a + 4 * i), repeat_word(a + 4 * i + 4)};
        MATMUL_UNROLL
        for (int r = 0; r < 4; r++) {
            const int8x16_t word[2] = {vld1q_s8(w->word[i] + 16 * r),
                                       vld1q_s8(w->word[i + 1] + 16 * r)};
            add_words(&sum[r], word, act);
        }
    }
    MATMUL_UNROLL
    for (int r = 0; r < 4; r++) out[r] = total(&sum[r]);
}

// Adds one block's contribution to f [16] of one token, block-and-token index `at`.
MATMUL_INLINE void add_block(float *f, const weight_block *w, const act_q8 *x, size_t at,
                             const quant_traits q) {
    const bool halves = q.sub_width == 16;
    const int8_t *const a = x->q + at * ACT_BLOCK;
    const int32_t *const neg = x->neg_half + 2 * at;
    const int bias = bias_of(q);
    const float act = x->d[at];
    int32x4_t dot0[4], dot1[4];
    if (halves) {
        dot_words(dot0, bias * neg[0], w, 0, 4, a);
        dot_words(dot1, bias * neg[1], w, 4, 4, a);
    } else {
        dot_words(dot0, bias * x->neg_sum[at], w, 0, 8, a);
    }
    MATMUL_UNROLL
    for (int r = 0; r < 4; r++) {
        const int row = r * QUAD;
        float32x4_t dot = vcvtq_f32_s32(dot0[r]), sum = vld1q_f32(f + row);
        if (halves) {  // integers below 2^24: exact in floats
            dot = vmulq_f32(vld1q_f32(w->sub[0] + row), dot);
            dot = vfmaq_f32(dot, vld1q_f32(w->sub[1] + row), vcvtq_f32_s32(dot1[r]));
        }
        sum = vfmaq_f32(sum, dot, vmulq_n_f32(vld1q_f32(w->scale + row), act));
        if (q.has_min) {
            float32x4_t min_sum = vdupq_n_f32((float)x->neg_sum[at]);
            if (halves) {
                min_sum = vmulq_n_f32(vld1q_f32(w->sub_min[0] + row), (float)neg[0]);
                min_sum = vfmaq_n_f32(min_sum, vld1q_f32(w->sub_min[1] + row), (float)neg[1]);
            }
            sum = vfmaq_f32(sum, min_sum, vmulq_n_f32(vld1q_f32(w->min + row), act));
        }
        vst1q_f32(f + row, sum);
    }
}

// Writes the first n_rows of 16 results.
MATMUL_INLINE void store_rows(float *y, uint32_t n_rows, const float f[PANEL_ROWS]) {
    float out[PANEL_ROWS];
    for (int row = 0; row < PANEL_ROWS; row += QUAD) {
        const float32x4_t sum = vaddq_f32(vld1q_f32(f + row), vdupq_n_f32(0.0f));
        const float32x4_t nan = vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000));
        vst1q_f32(out + row, vbslq_f32(vceqq_f32(sum, sum), sum, nan));
    }
    __builtin_memcpy(y, out, n_rows * sizeof *y);
}

// Tokens [t0, t1), at most GROUP, of panels [p0, p1), at most MATMUL_PANELS.
MATMUL_INLINE void group_q8(float *y, size_t y_stride, const panels *w, uint32_t p0, uint32_t p1,
                            const act_q8 *x, uint32_t t0, uint32_t t1, const dtype type) {
    const quant_traits q = quant_traits_of[type];
    const panel_chunk at = panel_chunk_of(type);
    float f[MATMUL_PANELS][GROUP][PANEL_ROWS] = {{{0}}};
    weight_block block;
    for (uint32_t b = 0; b < w->n_cols / PANEL_BLOCK; b++)
        for (uint32_t p = p0; p < p1; p++) {
            const uint8_t *const chunk =
                w->data + p * w->panel_bytes + (size_t)(b / at.blocks) * at.bytes;
            if (t1 - t0 < GROUP) matmul_prefetch_block(w, p, p1 - p0, b, at);
            for (uint32_t row = 0; row < PANEL_ROWS; row += QUAD)
                load_quad(&block, chunk, b % at.blocks, row, type);
            for (uint32_t t = t0; t < t1; t++)
                add_block(f[p - p0][t - t0], &block, x, (size_t)b * x->n_tokens + t, q);
        }
    for (uint32_t p = p0; p < p1; p++) {
        const uint32_t n_rows = u32_min(w->n_rows - p * PANEL_ROWS, PANEL_ROWS);
        for (uint32_t t = t0; t < t1; t++)
            store_rows(y + t * y_stride + (size_t)p * PANEL_ROWS, n_rows, f[p - p0][t - t0]);
    }
}

#include "matmul_groups.h"

// Column k of rows [row, row + 4) of a float type.
MATMUL_INLINE float32x4_t load_column(const uint8_t *panel, size_t k, const size_t row,
                                      const dtype type) {
    if (type == DTYPE_F32)
        return vreinterpretq_f32_u8(vld1q_u8(panel + (k * PANEL_ROWS + row) * 4));
    return load_scales(panel + (k * PANEL_ROWS + row) * 2, type == DTYPE_BF16);
}

// n (at most 4) tokens from t on, of one panel.
MATMUL_INLINE void tile_float(float *y, size_t y_stride, const panels *w, uint32_t p,
                              const matmul_input *x, uint32_t t, const int n, const dtype type) {
    const uint8_t *const panel = w->data + p * w->panel_bytes;
    const float *const a = x->f + t * x->f_stride;
    const size_t column_bytes = type == DTYPE_F32 ? PANEL_ROWS * 4 : PANEL_ROWS * 2;
    const uint32_t n_rows = u32_min(w->n_rows - p * PANEL_ROWS, PANEL_ROWS);
    float32x4_t f[4][4];
    MATMUL_UNROLL
    for (int i = 0; i < n; i++) f[i][0] = f[i][1] = f[i][2] = f[i][3] = vdupq_n_f32(0.0f);
    for (size_t k = 0; k < w->n_cols; k++) {
        if (n < 4) matmul_prefetch((uintptr_t)panel + k * column_bytes);
        MATMUL_UNROLL
        for (size_t r = 0; r < 4; r++) {
            const float32x4_t column = load_column(panel, k, r * QUAD, type);
            MATMUL_UNROLL
            for (int i = 0; i < n; i++)
                f[i][r] = vfmaq_n_f32(f[i][r], column, a[(size_t)i * x->f_stride + k]);
        }
    }
    MATMUL_UNROLL
    for (int i = 0; i < n; i++) {
        float sums[PANEL_ROWS];
        for (int r = 0; r < 4; r++) vst1q_f32(sums + r * QUAD, f[i][r]);
        store_rows(y + (t + (size_t)i) * y_stride, n_rows, sums);
    }
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

#ifdef __ARM_FEATURE_DOTPROD
MATMUL_DEFINE(dotprod)
#else
MATMUL_DEFINE(neon)
#endif
