// Elementary functions by argument reduction and Taylor series long enough that the first term left
// out is below half a unit in the last place. Refuses nothing: arguments outside a domain give NaN.
// Invariant: the same bits on every machine that has IEEE doubles, which also asks for
// -ffp-contract=off.
#include <string.h>

#include "mathd.h"

static uint64_t bits_of(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static double from_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static double nan_value(void) { return from_bits(0x7ff8000000000000u); }

// 2^k for a normal result.
static double pow2(int64_t k) { return from_bits((uint64_t)(k + 1023) << 52); }

// Nearest integer, ties to even, for |x| < 2^51.
static double nearest(double x) {
    const double magic = 0x1.8p52;
    return (x + magic) - magic;
}

// pi/2 = PI2_A + PI2_B + PI2_C; the first two have 26 bits, so that n * PI2_A is exact for |n| <
// 2^27.
static const double PI2_A = 0x1.921fb5p+0, PI2_B = 0x1.110b46p-26, PI2_C = 0x1.1a62633145c07p-54;
static const double TWO_BY_PI = 0x1.45f306dc9c883p-1;
// ln 2 = LN2_A + LN2_B; LN2_A has 32 bits.
static const double LN2_A = 0x1.62e42feep-1, LN2_B = 0x1.a39ef35793c76p-33,
                    LOG2E = 0x1.71547652b82fep+0;

// sin(x + low) and cos(x + low) for |x| < 0.8, |low| < 2^-53.
static void sincos_small(double *s, double *c, double x, double low) {
    const double z = x * x;
    double p = 1.0 / 355687428096000.0, q = -1.0 / 6402373705728000.0;  // 1/17!, -1/18!
    p = p * z - 1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    q = q * z + 1.0 / 20922789888000.0;
    q = q * z - 1.0 / 87178291200.0;
    q = q * z + 1.0 / 479001600.0;
    q = q * z - 1.0 / 3628800.0;
    q = q * z + 1.0 / 40320.0;
    q = q * z - 1.0 / 720.0;
    q = q * z + 1.0 / 24.0;
    q = q * z - 0.5;
    *s = x + (x * z * p + low);
    *c = 1.0 + (z * q - x * low);
}

void math_sincos(double *s, double *c, double x) {
    if (!(x > -0x1p26 && x < 0x1p26)) {
        *s = *c = nan_value();
        return;
    }
    const double n = nearest(x * TWO_BY_PI);
    // a is exact; a - b and its rounding error are kept as a pair, because a may have cancelled to
    // almost nothing.
    const double a = x - n * PI2_A, b = n * PI2_B, d = a - b;
    const double back = d - a, error = (a - (d - back)) - (b + back);
    const double rest = error - n * PI2_C;
    const double r = d + rest, low = (d - r) + rest;
    double u, v;
    sincos_small(&u, &v, r, low);
    const int64_t quadrant = (int64_t)n & 3;
    *s = quadrant & 1 ? v : u;
    *c = quadrant & 1 ? u : v;
    if (quadrant & 2) *s = -*s;
    if (quadrant == 1 || quadrant == 2) *c = -*c;
}

double math_exp(double x) {
    if (x != x) return nan_value();
    if (x > 800.0) return from_bits(0x7ff0000000000000u);
    if (x < -800.0) return 0.0;
    const double n = nearest(x * LOG2E);
    const double a = x - n * LN2_A, b = n * LN2_B;
    const double r = a - b, low = (a - r) - b;
    double p = 1.0 / 6227020800.0;  // 1/13!
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    const double y = 1.0 + (r + (r * r * p + low));
    // In two steps, since 2^n itself may be out of range where the product is not.
    const int64_t k = (int64_t)n, half = k / 2;
    return y * pow2(half) * pow2(k - half);
}

double math_log(double x) {
    if (!(x >= 0.0)) return nan_value();
    if (x == 0.0) return from_bits(0xfff0000000000000u);
    uint64_t u = bits_of(x);
    if (u == 0x7ff0000000000000u) return x;
    int64_t e = 0;
    if (u < (uint64_t)1 << 52) {  // subnormal
        u = bits_of(x * 0x1p54);
        e = -54;
    }
    // x = m * 2^e with m in [sqrt(1/2), sqrt(2))
    e += (int64_t)(u >> 52) - 1023;
    double m = from_bits((u & 0xfffffffffffffu) | (uint64_t)1023 << 52);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m *= 0.5;
        e++;
    }
    // log(1 + f) = 2 atanh(s), s = f / (2 + f); 2s = f - s*f keeps the exact f as the leading term.
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s;
    double p = 2.0 / 23.0;
    p = p * z + 2.0 / 21.0;
    p = p * z + 2.0 / 19.0;
    p = p * z + 2.0 / 17.0;
    p = p * z + 2.0 / 15.0;
    p = p * z + 2.0 / 13.0;
    p = p * z + 2.0 / 11.0;
    p = p * z + 2.0 / 9.0;
    p = p * z + 2.0 / 7.0;
    p = p * z + 2.0 / 5.0;
    p = p * z + 2.0 / 3.0;
    const double k = (double)e;
    return k * LN2_A + (f - (s * (f - z * p) - k * LN2_B));
}

double math_pow(double base, double e) {
    if (e == 0.0 || base == 1.0) return 1.0;
    return math_exp(e * math_log(base));
}
