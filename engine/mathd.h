// Layer 0: log, exp, pow, sin and cos of doubles, made of + - * / and integer bit tricks only. libm
// differs from machine to machine in the last bit, and tables of RoPE must not. Not fast: for
// tables and for the sampler, not for kernels.
#ifndef MF_MATHD_H
#define MF_MATHD_H

#include "base.h"

// Both within 1e-15, for |x| < 2^26. Beyond that, or for NaN: NaN.
void math_sincos(double *s, double *c, double x);
// Relative error below 3e-16; 0 or Inf out of range, NaN for NaN.
double math_exp(double x);
// Relative error below 3e-16 (near 1 too). -Inf at 0, NaN below.
double math_log(double x);
// base^e as exp(e * log(base)): relative error below 3e-16 * (1 + |e * log(base)|). NaN for a
// negative base; e == 0 gives 1.
double math_pow(double base, double e);

#endif
