// Shared by the programs that compare kernels: a random stream, and the checks of one candidate
// table against the scalar one.
#ifndef MF_TESTS_CHECK_H
#define MF_TESTS_CHECK_H

#include <math.h>
#include <stdint.h>

#include "../engine/cpu/kernels.h"

// xorshift64*; a state of 0 would stay 0, so it is replaced.
static inline uint64_t check_rand(uint64_t *state) {
    uint64_t x = *state ? *state : 0x9e3779b97f4a7c15u;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545f4914f6cdd1du;
}

// 0 .. n-1
static inline uint32_t check_below(uint64_t *state, uint32_t n) {
    return (uint32_t)((check_rand(state) >> 32) * n >> 32);
}

// Roughly normal, mean 0, deviation 1: the sum of 12 uniform numbers, minus 6.
static inline float check_normal(uint64_t *state) {
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) sum += (float)(check_rand(state) >> 40) * 0x1p-24f;
    return sum;
}

// Each returns the number of failures, one printed line per failure.
int check_matmul(const cpu_kernels *candidate, const cpu_kernels *scalar, uint64_t seed);
int check_ops(const cpu_kernels *candidate, const cpu_kernels *scalar, uint64_t seed);
int check_attention(const cpu_kernels *candidate, const cpu_kernels *scalar, uint64_t seed);

#endif
