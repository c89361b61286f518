// The definition of the elementwise kernels, as plain as it goes. Every NaN stored is the one NaN
// (mathf_canon); zeros keep the sign IEEE arithmetic gives them. The other ops_*.c files equal this
// one bit for bit.
#include "kernels.h"
#include "mathf.h"

// One block of 32: codes to q, and its scale and negated sums.
static void quantize_block(int8_t *q, float *d, int32_t *neg_sum, int32_t neg_half[2],
                           const float *x) {
    uint32_t top = 0;  // bits of the largest magnitude: as integers, finite < Inf < NaN
    for (uint32_t i = 0; i < ACT_BLOCK; i++) {
        const uint32_t magnitude = mathf_bits(x[i]) & 0x7fffffffu;
        if (magnitude > top) top = magnitude;
    }
    memset(q, 0, ACT_BLOCK);
    *neg_sum = neg_half[0] = neg_half[1] = 0;
    *d = 0.0f;
    if (top >= 0x7f800000u) *d = mathf_from_bits(0x7fc00000u);
    if (top >= 0x7f800000u || mathf_from_bits(top) < 0x1p-100f) return;
    const float amax = mathf_from_bits(top), inverse = 127.0f / amax;
    *d = amax / 127.0f;
    for (uint32_t i = 0; i < ACT_BLOCK; i++) {
        // The sum's low byte is the nearest integer, ties to even.
        q[i] = (int8_t)(uint8_t)mathf_bits(x[i] * inverse + MATHF_ROUND);
        neg_half[i / 16] -= q[i];
    }
    *neg_sum = neg_half[0] + neg_half[1];
}

static void quantize_scalar(act_q8 *out, const float *x, size_t x_stride, uint32_t n_cols,
                            uint32_t t0, uint32_t t1) {
    for (uint32_t b = 0; b < n_cols / ACT_BLOCK; b++) {
        for (uint32_t t = t0; t < t1; t++) {
            const size_t at = (size_t)b * out->n_tokens + t;
            quantize_block(out->q + at * ACT_BLOCK, out->d + at, out->neg_sum + at,
                           out->neg_half + at * 2, x + t * x_stride + (size_t)b * ACT_BLOCK);
        }
    }
}

static void rms_norm_scalar(float *y, const float *x, const float *w, uint32_t n, float eps) {
    float lane[16] = {0};
    for (uint32_t i = 0; i < n; i++) lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
    for (uint32_t width = 8; width; width /= 2)
        for (uint32_t i = 0; i < width; i++) lane[i] = lane[i] + lane[i + width];
    const float inverse = 1.0f / sqrtf(lane[0] / (float)n + eps);
    for (uint32_t i = 0; i < n; i++) {
        const float v = x[i] * inverse;
        y[i] = mathf_canon(w ? v * w[i] : v);
    }
}

static void rope_scalar(float *x, const float *cos, const float *sin, uint32_t n_heads,
                        uint32_t head_dim, uint32_t n_rot, bool interleaved) {
    const uint32_t half = n_rot / 2;
    for (uint32_t h = 0; h < n_heads; h++, x += head_dim) {
        for (uint32_t i = 0; i < half; i++) {
            float *a = interleaved ? x + 2 * i : x + i, *b = interleaved ? a + 1 : a + half;
            const float x0 = *a, x1 = *b;
            *a = mathf_canon(fmaf(x0, cos[i], -(x1 * sin[i])));
            *b = mathf_canon(fmaf(x1, cos[i], x0 * sin[i]));
        }
    }
}

static void glu_scalar(float *y, const float *gate, const float *up, uint32_t n, glu_kind kind) {
    for (uint32_t i = 0; i < n; i++) {
        const float a = kind == GLU_SILU ? mathf_silu(gate[i]) : mathf_gelu_tanh(gate[i]);
        y[i] = mathf_canon(a * up[i]);
    }
}

static void add_scalar(float *y, const float *a, const float *b, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = mathf_canon(a[i] + b[i]);
}

static void scale_scalar(float *y, const float *x, float by, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = mathf_canon(x[i] * by);
}

static void softcap_scalar(float *y, const float *x, float cap, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = mathf_canon(cap * mathf_tanh(x[i] / cap));
}

void ops_init_scalar(cpu_kernels *k) {
    k->quantize = quantize_scalar;
    k->rms_norm = rms_norm_scalar;
    k->rope = rope_scalar;
    k->glu = glu_scalar;
    k->add = add_scalar;
    k->scale = scale_scalar;
    k->softcap = softcap_scalar;
}
