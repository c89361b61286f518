// The definition of the matrix product: one row, one token, one block at a time, as panel.h writes
// it down. Every other matmul file must give these bits.

#include <math.h>
#include <string.h>

#include "kernels.h"

// Tokens that share one reading of a weight block: keeps the definition usable as an engine,
// changes no order of sums.
enum { SHARED_TOKENS = 32 };

static float canonical(float f) {
    const uint32_t quiet_nan = 0x7fc00000;
    if (f != f) memcpy(&f, &quiet_nan, sizeof f);
    return f + 0.0f;
}

static int32_t dot_half(const int8_t w[16], const int8_t a[16]) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += w[i] * a[i];
    return sum;
}

// f plus the contribution of one block of 32 columns for token t.
static float add_block(float f, const panel_block *w, bool has_min, const act_q8 *x, uint32_t block,
                       uint32_t t) {
    const size_t i = (size_t)block * x->n_tokens + t;
    const int8_t *const a = x->q + i * ACT_BLOCK;
    const int32_t *const neg_half = x->neg_half + i * 2;
    const int32_t sum = w->sub[0] * dot_half(w->q, a) + w->sub[1] * dot_half(w->q + 16, a + 16);
    f = fmaf((float)sum, w->scale * x->d[i], f);
    if (has_min) {
        const int32_t min_sum = w->sub_min[0] * neg_half[0] + w->sub_min[1] * neg_half[1];
        f = fmaf((float)min_sum, w->min * x->d[i], f);
    }
    return f;
}

// y [t1 - t0 tokens][y_stride], at row `row`.
static void row_q8(float *y, size_t y_stride, const panels *w, uint32_t row, const act_q8 *x,
                   uint32_t t0, uint32_t t1) {
    const bool has_min = quant_traits_of[w->type].has_min;
    float f[SHARED_TOKENS] = {0};
    panel_block block;
    for (uint32_t b = 0; b < w->n_cols / PANEL_BLOCK; b++) {
        panel_read(&block, w, row, b);
        for (uint32_t t = t0; t < t1; t++)
            f[t - t0] = add_block(f[t - t0], &block, has_min, x, b, t);
    }
    for (uint32_t t = t0; t < t1; t++) y[t * y_stride + row] = canonical(f[t - t0]);
}

static void matmul_q8_scalar(float *y, size_t y_stride, const panels *w, uint32_t p0, uint32_t p1,
                             const matmul_input *x, uint32_t t0, uint32_t t1) {
    const uint32_t row_end = u32_min(p1 * PANEL_ROWS, w->n_rows);
    for (uint32_t row = p0 * PANEL_ROWS; row < row_end; row++) {
        for (uint32_t t = t0; t < t1; t += SHARED_TOKENS) {
            row_q8(y, y_stride, w, row, &x->q, t, u32_min(t + SHARED_TOKENS, t1));
        }
    }
}

static void matmul_float_scalar(float *y, size_t y_stride, const panels *w, uint32_t p0,
                                uint32_t p1, const matmul_input *x, uint32_t t0, uint32_t t1) {
    const uint32_t row_end = u32_min(p1 * PANEL_ROWS, w->n_rows);
    for (uint32_t row = p0 * PANEL_ROWS; row < row_end; row++) {
        for (uint32_t t = t0; t < t1; t++) {
            float f = 0.0f;
            for (uint32_t k = 0; k < w->n_cols; k++) {
                f = fmaf(panel_value(w, row, k), x->f[t * x->f_stride + k], f);
            }
            y[t * y_stride + row] = canonical(f);
        }
    }
}

void matmul_init_scalar(cpu_kernels *k) {
    for (int type = 0; type < DTYPE_COUNT; type++) {
        if (quant_traits_of[type].low_bits) k->matmul[type] = matmul_q8_scalar;
    }
    k->matmul[DTYPE_F32] = k->matmul[DTYPE_F16] = k->matmul[DTYPE_BF16] = matmul_float_scalar;
}
