// exp2, tanh and the activations, once: the scalar forms here are the definition and the constants
// are shared by every instruction set, whose vector forms do the same operations in the same order.
// Only + - * /, fma and bit shifts, so the bits are the same on every machine; no libm call but
// fmaf, which is exact everywhere. Nothing here has undefined behaviour for any input: arguments
// out of range are replaced by a select, never by a branch or a conversion.
#ifndef MF_CPU_MATHF_H
#define MF_CPU_MATHF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define MATHF_LOG2E 0x1.715476p+0f
// Adding it leaves n + 127, n the nearest integer (ties to even), in the low bits of the sum: a
// shift makes it 2^n.
#define MATHF_MAGIC (12582912.0f + 127.0f)
#define MATHF_ROUND 12582912.0f
// 2^r = 1 + r * (C1 + r * (C2 + ...)) for |r| <= 1/2: relative error 9e-9 before rounding.
#define MATHF_C1 0x1.62e43p-1f
#define MATHF_C2 0x1.ebfbep-3f
#define MATHF_C3 0x1.c6af6cp-5f
#define MATHF_C4 0x1.3b2a1cp-7f
#define MATHF_C5 0x1.5f0896p-10f
#define MATHF_C6 0x1.444004p-13f
#define MATHF_EXP2_MIN (-126.0f)  // below: 0
#define MATHF_EXP2_MAX 127.5f     // above: Inf
// gelu's -2 * log2(e) * sqrt(2/pi), and that times 0.044715.
#define MATHF_GELU_1 (-0x1.26aec2p+1f)
#define MATHF_GELU_3 (-0x1.a5a7dp-4f)

static inline uint32_t mathf_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float mathf_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

// The one NaN: machines differ in the sign and payload of the NaNs they make.
static inline float mathf_canon(float x) { return x == x ? x : mathf_from_bits(0x7fc00000u); }

// The nearest f16's bits, ties to even; Inf from 65520 on; every NaN is 0x7e00.
static inline uint16_t mathf_f16(float x) {
    const uint32_t sign = mathf_bits(x) >> 16 & 0x8000u, size = mathf_bits(x) & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7e00;
    if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (size < 0x38800000u) {  // 0.5 has the unit of subnormals, 2^-24, as its last bit
        const uint32_t sum = mathf_bits(mathf_from_bits(size) + 0.5f);
        return (uint16_t)(sign | (sum - 0x3f000000u));
    }
    return (uint16_t)(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13));
}

// x <= 0 or NaN. Exactly 1 at 0 of either sign, 0 below -126, never subnormal; NaN gives some NaN.
static inline float mathf_exp2_neg(float x) {
    const float t = x + MATHF_MAGIC, r = x - (t - MATHF_MAGIC);
    float y = MATHF_C6;
    y = fmaf(y, r, MATHF_C5);
    y = fmaf(y, r, MATHF_C4);
    y = fmaf(y, r, MATHF_C3);
    y = fmaf(y, r, MATHF_C2);
    y = fmaf(y, r, MATHF_C1);
    y = fmaf(y, r, 1.0f);
    y = y * mathf_from_bits(mathf_bits(t) << 23);
    return x < MATHF_EXP2_MIN ? 0.0f : y;
}

// Any x; Inf above 127.5.
static inline float mathf_exp2(float x) {
    const float y = mathf_exp2_neg(x);
    return x > MATHF_EXP2_MAX ? mathf_from_bits(0x7f800000u) : y;
}

// (1 - e) / (1 + e) with z's sign, e = 2^(-2 |z| log2(e)). Absolute error below 2e-7; tanh(-0) =
// -0; NaN gives some NaN.
static inline float mathf_tanh(float z) {
    const uint32_t sign = mathf_bits(z) & 0x80000000u;
    const float e = mathf_exp2_neg(mathf_from_bits(mathf_bits(z) ^ sign) * (-2.0f * MATHF_LOG2E));
    const float t = (1.0f - e) / (1.0f + e);
    return mathf_from_bits(mathf_bits(t) | sign);
}

// x / (1 + e^-x). -Inf gives NaN (-Inf / Inf), a very negative x gives -0.
static inline float mathf_silu(float x) { return x / (1.0f + mathf_exp2(x * -MATHF_LOG2E)); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3). -Inf gives NaN.
static inline float mathf_gelu_tanh(float x) {
    return x / (1.0f + mathf_exp2(x * fmaf(x * x, MATHF_GELU_3, MATHF_GELU_1)));
}

#endif
