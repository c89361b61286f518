// The most that a core does with the definition's plain C, whatever the compiler makes of it: dots
// of 16 bytes and fmaf, as matmul_scalar.c has them.
#include <math.h>

#include "kernels.h"

enum { CHAINS = 12, DOT = 16 };

static uint64_t peak_int8_scalar(uint64_t rounds) {
    int8_t a[DOT] = {3}, b[DOT] = {2};
    uint32_t sums[CHAINS] = {0};
    for (uint64_t r = 0; r < rounds; r++) {
        for (int i = 0; i < CHAINS; i++) {
            int32_t dot = 0;
            __asm__ volatile("" : "+m"(a), "+m"(b));  // for all the compiler knows, they are new
            for (int j = 0; j < DOT; j++) dot += a[j] * b[j];
            sums[i] += (uint32_t)dot;
        }
    }
    __asm__ volatile("" : "+m"(sums));
    return rounds * CHAINS * DOT;
}

static uint64_t peak_f32_scalar(uint64_t rounds) {
    float sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = (float)i;
    for (uint64_t r = 0; r < rounds; r++)
        for (int i = 0; i < CHAINS; i++) sums[i] = fmaf(0.5f, 0.25f, sums[i]);
    __asm__ volatile("" : "+m"(sums));
    return rounds * CHAINS;
}

void peak_init_scalar(cpu_kernels *k) {
    k->peak_int8 = peak_int8_scalar;
    k->peak_f32 = peak_f32_scalar;
}
