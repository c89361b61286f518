// What one core can do at most in an instruction set: multiply-adds of registers alone, in
// independent chains. A template; include after a lanes_*.h, which gives vf and v_fma, and
//   vi                  a vector of bytes, or of 32-bit sums of their products
//   vi_set1(byte)       that byte everywhere
//   vi_dot(sum, a, b)   sum + DOT_MACS products of bytes, in the cheapest of the ways in which the
//                       matrix products of this instruction set add them
//   DOT_CHAINS,
//   FMA_CHAINS          sums under way: enough to hide the latency on every pipe, few enough to
//                       stay in registers with all else
#ifndef MF_CPU_PEAK_LANES_H
#define MF_CPU_PEAK_LANES_H

// The register has, as far as the compiler knows, changed: nothing is done in advance, or once
// instead of many times. No instruction.
#if defined(__aarch64__)
#define PEAK_OPAQUE(vector) __asm__ volatile("" : "+w"(vector))
#else
#define PEAK_OPAQUE(vector) __asm__ volatile("" : "+v"(vector))
#endif

#if defined(__clang__)
#define PEAK_UNROLL _Pragma("unroll")
#else
#define PEAK_UNROLL _Pragma("GCC unroll 16")
#endif

static uint64_t peak_int8_lanes(uint64_t rounds) {
    vi sums[DOT_CHAINS], a = vi_set1(3), b = vi_set1(2);
    PEAK_UNROLL
    for (int i = 0; i < DOT_CHAINS; i++) sums[i] = vi_set1(0);
    for (uint64_t r = 0; r < rounds; r++) {
        PEAK_UNROLL
        for (int i = 0; i < DOT_CHAINS; i++) {
            PEAK_OPAQUE(a);
            PEAK_OPAQUE(b);
            sums[i] = vi_dot(sums[i], a, b);
        }
    }
    PEAK_UNROLL
    for (int i = 0; i < DOT_CHAINS; i++) PEAK_OPAQUE(sums[i]);
    return rounds * DOT_CHAINS * DOT_MACS;
}

static uint64_t peak_f32_lanes(uint64_t rounds) {
    vf sums[FMA_CHAINS], a = v_set1(0.5f), b = v_set1(0.25f);
    PEAK_UNROLL
    for (int i = 0; i < FMA_CHAINS; i++) sums[i] = v_set1(0.0f);
    for (uint64_t r = 0; r < rounds; r++) {
        PEAK_UNROLL
        for (int i = 0; i < FMA_CHAINS; i++) {
            PEAK_OPAQUE(a);
            sums[i] = v_fma(a, b, sums[i]);
        }
    }
    PEAK_UNROLL
    for (int i = 0; i < FMA_CHAINS; i++) PEAK_OPAQUE(sums[i]);
    return rounds * FMA_CHAINS * LANES;
}

static void peak_init_lanes(cpu_kernels *k) {
    k->peak_int8 = peak_int8_lanes;
    k->peak_f32 = peak_f32_lanes;
}

#endif
