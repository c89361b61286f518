// The vector of ops_lanes.h and attn_lanes.h on AArch64 NEON: 4 floats.
#ifndef MF_CPU_LANES_NEON_H
#define MF_CPU_LANES_NEON_H

#include <arm_neon.h>
#include <string.h>

#include "kernels.h"

enum { LANES = 4 };
typedef float32x4_t vf;
typedef uint32x4_t vm;  // all bits of a lane set, or none

static inline uint32x4_t v_bits(vf a) { return vreinterpretq_u32_f32(a); }
static inline vf v_float(uint32x4_t a) { return vreinterpretq_f32_u32(a); }
static inline vf v_load(const float *p) { return vld1q_f32(p); }
static inline void v_store(float *p, vf a) { vst1q_f32(p, a); }
static inline vf v_load_f16(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline void v_store_f16(uint16_t *p, vf a) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)));
}
static inline vf v_load_i8(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
static inline vf v_set1(float x) { return vdupq_n_f32(x); }
static inline vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline vf v_and(vf a, vf b) { return v_float(vandq_u32(v_bits(a), v_bits(b))); }
static inline vf v_or(vf a, vf b) { return v_float(vorrq_u32(v_bits(a), v_bits(b))); }
static inline vf v_xor(vf a, vf b) { return v_float(veorq_u32(v_bits(a), v_bits(b))); }
static inline vm v_less(vf a, vf b) { return vcltq_f32(a, b); }
static inline vm v_equal(vf a, vf b) { return vceqq_f32(a, b); }
static inline vf v_select(vm m, vf a, vf b) { return vbslq_f32(m, a, b); }  // m ? a : b
// The low bits of a sum with MATHF_MAGIC, as the exponent of a power of two.
static inline vf v_exponent(vf t) { return v_float(vshlq_n_u32(v_bits(t), 23)); }

// Lane i: bit i.
static inline vm v_mask(uint32_t bits) {
    static const uint32_t bit[4] = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(bits), vld1q_u32(bit));
}

// Elements of even and of odd index of a, b in sequence; and back.
static inline void v_unzip(vf *even, vf *odd, vf a, vf b) {
    *even = vuzp1q_f32(a, b);
    *odd = vuzp2q_f32(a, b);
}

static inline void v_zip(vf *a, vf *b, vf even, vf odd) {
    *a = vzip1q_f32(even, odd);
    *b = vzip2q_f32(even, odd);
}

// Columns of the LANES x LANES block with rows r: column x to out + x * stride.
static inline void v_transpose(float *out, size_t stride, const vf r[LANES]) {
    const vf l0 = vzip1q_f32(r[0], r[2]), l1 = vzip1q_f32(r[1], r[3]), h0 = vzip2q_f32(r[0], r[2]),
             h1 = vzip2q_f32(r[1], r[3]);
    v_store(out, vzip1q_f32(l0, l1));
    v_store(out + stride, vzip2q_f32(l0, l1));
    v_store(out + 2 * stride, vzip1q_f32(h0, h1));
    v_store(out + 3 * stride, vzip2q_f32(h0, h1));
}

// Exact dots of the 32 codes at rows[i] + at with q, lane i for row i. |q| <= 127.
static inline vf v_dots(const uint8_t *const *rows, size_t at, const int8_t *q) {
    const int8x16_t q0 = vld1q_s8(q), q1 = vld1q_s8(q + 16);
    int32x4_t s[4];
    for (int i = 0; i < 4; i++) {
        const int8_t *codes = (const int8_t *)rows[i] + at;
        const int8x16_t k0 = vld1q_s8(codes), k1 = vld1q_s8(codes + 16);
        s[i] = vpaddlq_s16(vmull_s8(vget_low_s8(k0), vget_low_s8(q0)));
        s[i] = vpadalq_s16(s[i], vmull_high_s8(k0, q0));
        s[i] = vpadalq_s16(s[i], vmull_s8(vget_low_s8(k1), vget_low_s8(q1)));
        s[i] = vpadalq_s16(s[i], vmull_high_s8(k1, q1));
    }
    return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(s[0], s[1]), vpaddq_s32(s[2], s[3])));
}

// Bits of the largest magnitude of 32 floats, as an integer.
static inline uint32_t v_top32(const float *x) {
    uint32x4_t top = vdupq_n_u32(0);
    for (int i = 0; i < 32; i += 4)
        top = vmaxq_u32(top, vandq_u32(v_bits(v_load(x + i)), vdupq_n_u32(0x7fffffffu)));
    return vmaxvq_u32(top);
}

// q = x * inverse, to nearest, ties to even; returns the sum.
static inline int32_t v_quantize16(int8_t *q, const float *x, float inverse) {
    const vf by = v_set1(inverse);
    int32x4_t a[4];
    for (int i = 0; i < 4; i++) a[i] = vcvtnq_s32_f32(v_mul(v_load(x + 4 * i), by));
    const int16x8_t lo = vcombine_s16(vmovn_s32(a[0]), vmovn_s32(a[1])),
                    hi = vcombine_s16(vmovn_s32(a[2]), vmovn_s32(a[3]));
    const int8x16_t c = vcombine_s8(vmovn_s16(lo), vmovn_s16(hi));
    vst1q_s8(q, c);
    return vaddlvq_s8(c);
}

#endif
