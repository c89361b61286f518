// The elementwise kernels once for all SIMD instruction sets: included by an ops_*.c after the
// lanes_*.h that defines its vector. Each does ops_scalar.c's operations in its order; what does
// not fill a vector goes through mathf.h's scalar forms.
#ifndef MF_CPU_OPS_LANES_H
#define MF_CPU_OPS_LANES_H

#include "mathf_lanes.h"

static void quantize_lanes(act_q8 *out, const float *x, size_t x_stride, uint32_t n_cols,
                           uint32_t t0, uint32_t t1) {
    for (uint32_t b = 0; b < n_cols / ACT_BLOCK; b++) {
        for (uint32_t t = t0; t < t1; t++) {
            const float *v = x + t * x_stride + (size_t)b * ACT_BLOCK;
            const size_t at = (size_t)b * out->n_tokens + t;
            const uint32_t top = v_top32(v);
            const float amax = mathf_from_bits(top);
            int8_t *q = out->q + at * ACT_BLOCK;
            if (top >= 0x7f800000u || amax < 0x1p-100f) {
                memset(q, 0, ACT_BLOCK);
                out->d[at] = top >= 0x7f800000u ? mathf_from_bits(0x7fc00000u) : 0.0f;
                out->neg_sum[at] = out->neg_half[2 * at] = out->neg_half[2 * at + 1] = 0;
                continue;
            }
            const float inverse = 127.0f / amax;
            const int32_t low = v_quantize16(q, v, inverse),
                          high = v_quantize16(q + 16, v + 16, inverse);
            out->d[at] = amax / 127.0f;
            out->neg_sum[at] = -(low + high);
            out->neg_half[2 * at] = -low;
            out->neg_half[2 * at + 1] = -high;
        }
    }
}

static void rms_norm_lanes(float *y, const float *x, const float *w, uint32_t n, float eps) {
    vf sum[16 / LANES];
    float lane[16];
    uint32_t i = 0;
    for (uint32_t v = 0; v < 16 / LANES; v++) sum[v] = v_set1(0.0f);
    for (; i + 16 <= n; i += 16) {
        for (uint32_t v = 0; v < 16 / LANES; v++) {
            const vf a = v_load(x + i + v * LANES);
            sum[v] = v_fma(a, a, sum[v]);
        }
    }
    for (uint32_t v = 0; v < 16 / LANES; v++) v_store(lane + v * LANES, sum[v]);
    for (; i < n; i++) lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
    for (uint32_t width = 8; width; width /= 2)
        for (uint32_t j = 0; j < width; j++) lane[j] = lane[j] + lane[j + width];
    const float inverse = 1.0f / sqrtf(lane[0] / (float)n + eps);
    const vf by = v_set1(inverse);
    i = 0;
    if (w)
        for (; i + LANES <= n; i += LANES)
            v_store(y + i, v_canon(v_mul(v_mul(v_load(x + i), by), v_load(w + i))));
    else
        for (; i + LANES <= n; i += LANES) v_store(y + i, v_canon(v_mul(v_load(x + i), by)));
    for (; i < n; i++) {
        const float v = x[i] * inverse;
        y[i] = mathf_canon(w ? v * w[i] : v);
    }
}

static void rope_lanes(float *x, const float *cos, const float *sin, uint32_t n_heads,
                       uint32_t head_dim, uint32_t n_rot, bool interleaved) {
    const uint32_t half = n_rot / 2;
    for (uint32_t h = 0; h < n_heads; h++, x += head_dim) {
        uint32_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            const vf c = v_load(cos + i), s = v_load(sin + i);
            vf x0, x1;
            if (interleaved) {
                v_unzip(&x0, &x1, v_load(x + 2 * i), v_load(x + 2 * i + LANES));
            } else {
                x0 = v_load(x + i);
                x1 = v_load(x + half + i);
            }
            const vf y0 = v_canon(v_fma(x0, c, v_xor(v_mul(x1, s), v_set1(-0.0f))));
            const vf y1 = v_canon(v_fma(x1, c, v_mul(x0, s)));
            if (interleaved) {
                v_zip(&x0, &x1, y0, y1);
                v_store(x + 2 * i, x0);
                v_store(x + 2 * i + LANES, x1);
            } else {
                v_store(x + i, y0);
                v_store(x + half + i, y1);
            }
        }
        for (; i < half; i++) {
            float *a = interleaved ? x + 2 * i : x + i, *b = interleaved ? a + 1 : a + half;
            const float x0 = *a, x1 = *b;
            *a = mathf_canon(fmaf(x0, cos[i], -(x1 * sin[i])));
            *b = mathf_canon(fmaf(x1, cos[i], x0 * sin[i]));
        }
    }
}

static void glu_lanes(float *y, const float *gate, const float *up, uint32_t n, glu_kind kind) {
    uint32_t i = 0;
    if (kind == GLU_SILU)
        for (; i + LANES <= n; i += LANES)
            v_store(y + i, v_canon(v_mul(v_silu(v_load(gate + i)), v_load(up + i))));
    else
        for (; i + LANES <= n; i += LANES)
            v_store(y + i, v_canon(v_mul(v_gelu_tanh(v_load(gate + i)), v_load(up + i))));
    for (; i < n; i++) {
        const float a = kind == GLU_SILU ? mathf_silu(gate[i]) : mathf_gelu_tanh(gate[i]);
        y[i] = mathf_canon(a * up[i]);
    }
}

static void add_lanes(float *y, const float *a, const float *b, uint32_t n) {
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store(y + i, v_canon(v_add(v_load(a + i), v_load(b + i))));
    for (; i < n; i++) y[i] = mathf_canon(a[i] + b[i]);
}

static void scale_lanes(float *y, const float *x, float by, uint32_t n) {
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store(y + i, v_canon(v_mul(v_load(x + i), v_set1(by))));
    for (; i < n; i++) y[i] = mathf_canon(x[i] * by);
}

static void softcap_lanes(float *y, const float *x, float cap, uint32_t n) {
    const vf c = v_set1(cap);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        v_store(y + i, v_canon(v_mul(c, v_tanh(v_div(v_load(x + i), c)))));
    for (; i < n; i++) y[i] = mathf_canon(cap * mathf_tanh(x[i] / cap));
}

static void ops_init_lanes(cpu_kernels *k) {
    k->quantize = quantize_lanes;
    k->rms_norm = rms_norm_lanes;
    k->rope = rope_lanes;
    k->glu = glu_lanes;
    k->add = add_lanes;
    k->scale = scale_lanes;
    k->softcap = softcap_lanes;
}

#endif
