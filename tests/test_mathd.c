// math_log, math_exp, math_pow and math_sincos against libm's long doubles, at the ends of their
// domains, and against the bits they give on every machine.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../engine/mathd.h"

static int passed, failed;

static void expect(const char *what, double got, double limit) {
    if (got <= limit) {
        passed++;
        return;
    }
    printf("FAILED %s: %.3g, at most %.3g\n", what, got, limit);
    failed++;
}

static void expect_same(const char *what, double got, double want) {
    if (got == want || (got != got && want != want)) {
        passed++;
        return;
    }
    printf("FAILED %s: %.17g, must be %.17g\n", what, got, want);
    failed++;
}

// Uniform in [0, 1).
static double uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) * 0x1p-53;
}

static uint64_t hash_add(uint64_t h, double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return (h ^ u) * 0x100000001b3u ^ u >> 29;
}

static double relative(double got, long double want) { return (double)fabsl(got / want - 1.0L); }

int main(void) {
    const uint64_t expected_hash = 0x416c2aa39f6d838bu;
    uint64_t rng = 1, hash = 0xcbf29ce484222325u;
    double angle = 0.0, power = 0.0, logarithm = 0.0, exponential = 0.0, s, c;
    for (int i = 0; i < 100000; i++) {
        // Of all sizes; every fourth near a multiple of pi/2, where the reduction cancels.
        double x = (uniform(&rng) - 0.5) * (double)((uint64_t)1 << i % 27);
        if (i % 4 == 0) x = floor(x) * 1.5707963267948966;
        math_sincos(&s, &c, x);
        angle = fmax(angle, (double)fmaxl(fabsl(s - sinl(x)), fabsl(c - cosl(x))));
        const double e = (uniform(&rng) - 0.5) * 1400.0, exp_e = math_exp(e);
        exponential = fmax(exponential, relative(exp_e, expl(e)));
        const double y =
            i % 2 ? exp_e : 1.0 + (uniform(&rng) - 0.5) / (double)((uint64_t)1 << i % 40);
        const double log_y = math_log(y);
        if (y != 1.0) logarithm = fmax(logarithm, relative(log_y, logl(y)));
        const double pow_y = math_pow(1e6, -uniform(&rng));
        hash = hash_add(hash_add(hash_add(hash_add(hash_add(hash, s), c), exp_e), log_y), pow_y);
    }
    for (int i = 0; i < 128; i++) {
        const double e = -i / 128.0;
        power = fmax(power, relative(math_pow(1e6, e), powl(1e6L, e)));
    }
    expect("error of sin and cos", angle, 1e-15);
    expect("relative error of exp", exponential, 3e-16);
    expect("relative error of log", logarithm, 3e-16);
    expect("relative error of pow(1e6, -1..0)", power, 5e-15);
    math_sincos(&s, &c, 0x1p26);
    expect_same("sin(2^26)", s, NAN);
    math_sincos(&s, &c, 0.0);
    expect_same("sin(0)", s, 0.0);
    expect_same("cos(0)", c, 1.0);
    expect_same("exp(1000)", math_exp(1000.0), INFINITY);
    expect_same("exp(-1000)", math_exp(-1000.0), 0.0);
    expect_same("exp(-745)", math_exp(-745.0), 0x1p-1074);
    expect_same("exp(NaN)", math_exp(NAN), NAN);
    expect_same("log(0)", math_log(0.0), -INFINITY);
    expect_same("log(-1)", math_log(-1.0), NAN);
    expect_same("log(Inf)", math_log(INFINITY), INFINITY);
    expect_same("log(1)", math_log(1.0), 0.0);
    expect("log(2^-1074)", relative(math_log(0x1p-1074), logl(0x1p-1074L)), 3e-16);
    expect_same("pow(10000, 0)", math_pow(10000.0, 0.0), 1.0);
    if (hash != expected_hash)
        printf("FAILED hash of the results: %016llx\n", (unsigned long long)hash), failed++;
    else
        passed++;
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
