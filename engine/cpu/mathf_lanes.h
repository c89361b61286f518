// mathf.h's functions on the vector that a lanes_*.h has defined: the same operations in the same
// order.
#ifndef MF_CPU_MATHF_LANES_H
#define MF_CPU_MATHF_LANES_H

#include "mathf.h"

static inline vf v_canon(vf x) {
    return v_select(v_equal(x, x), x, v_set1(mathf_from_bits(0x7fc00000u)));
}

static inline vf v_exp2_neg(vf x) {
    const vf magic = v_set1(MATHF_MAGIC), t = v_add(x, magic), r = v_sub(x, v_sub(t, magic));
    vf y = v_set1(MATHF_C6);
    y = v_fma(y, r, v_set1(MATHF_C5));
    y = v_fma(y, r, v_set1(MATHF_C4));
    y = v_fma(y, r, v_set1(MATHF_C3));
    y = v_fma(y, r, v_set1(MATHF_C2));
    y = v_fma(y, r, v_set1(MATHF_C1));
    y = v_fma(y, r, v_set1(1.0f));
    y = v_mul(y, v_exponent(t));
    return v_select(v_less(x, v_set1(MATHF_EXP2_MIN)), v_set1(0.0f), y);
}

static inline vf v_exp2(vf x) {
    return v_select(v_less(v_set1(MATHF_EXP2_MAX), x), v_set1(mathf_from_bits(0x7f800000u)),
                    v_exp2_neg(x));
}

static inline vf v_tanh(vf z) {
    const vf sign = v_and(z, v_set1(-0.0f)), one = v_set1(1.0f);
    const vf e = v_exp2_neg(v_mul(v_xor(z, sign), v_set1(-2.0f * MATHF_LOG2E)));
    return v_or(v_div(v_sub(one, e), v_add(one, e)), sign);
}

static inline vf v_silu(vf x) {
    return v_div(x, v_add(v_set1(1.0f), v_exp2(v_mul(x, v_set1(-MATHF_LOG2E)))));
}

static inline vf v_gelu_tanh(vf x) {
    const vf u = v_fma(v_mul(x, x), v_set1(MATHF_GELU_3), v_set1(MATHF_GELU_1));
    return v_div(x, v_add(v_set1(1.0f), v_exp2(v_mul(x, u))));
}

#endif
