// What the SIMD matmul files share: each is one template, a set of always-inlined functions that
// take the type and the numbers of tokens and panels as constants, instantiated once per type by
// MATMUL_Q8_TYPES.
#ifndef MF_CPU_MATMUL_TYPES_H
#define MF_CPU_MATMUL_TYPES_H

#include "kernels.h"

#define MATMUL_INLINE static inline __attribute__((always_inline))

// Arrays of vectors stay in registers only if the loops over them are unrolled completely.
#if defined(__clang__)
#define MATMUL_UNROLL _Pragma("unroll")
#else
#define MATMUL_UNROLL _Pragma("GCC unroll 16")
#endif

// X(isa, name in a function's name, dtype)
#define MATMUL_Q8_TYPES(X, isa) \
    X(isa, q4_0, DTYPE_Q4_0)    \
    X(isa, q4_1, DTYPE_Q4_1)    \
    X(isa, q5_0, DTYPE_Q5_0)    \
    X(isa, q5_1, DTYPE_Q5_1)    \
    X(isa, q8_0, DTYPE_Q8_0)    \
    X(isa, q2k, DTYPE_Q2_K)     \
    X(isa, q3k, DTYPE_Q3_K)     \
    X(isa, q4k, DTYPE_Q4_K)     \
    X(isa, q5k, DTYPE_Q5_K)     \
    X(isa, q6k, DTYPE_Q6_K)     \
    X(isa, iq4nl, DTYPE_IQ4_NL) \
    X(isa, iq4xs, DTYPE_IQ4_XS) \
    X(isa, mxfp4, DTYPE_MXFP4)

#define MATMUL_FLOAT_TYPES(X, isa) \
    X(isa, f32, DTYPE_F32)         \
    X(isa, f16, DTYPE_F16)         \
    X(isa, bf16, DTYPE_BF16)

// One kernel per type from the file's matmul_q8 and matmul_float, and the function that installs
// them.
#define MATMUL_KERNEL_Q8(isa, name, type)                                                         \
    static void matmul_q8_##name##_##isa(float *y, size_t y_stride, const panels *w, uint32_t p0, \
                                         uint32_t p1, const matmul_input *x, uint32_t t0,         \
                                         uint32_t t1) {                                           \
        matmul_q8(y, y_stride, w, p0, p1, &x->q, t0, t1, type);                                   \
    }
#define MATMUL_KERNEL_FLOAT(isa, name, type)                                                       \
    static void matmul_f32_##name##_##isa(float *y, size_t y_stride, const panels *w, uint32_t p0, \
                                          uint32_t p1, const matmul_input *x, uint32_t t0,         \
                                          uint32_t t1) {                                           \
        matmul_float(y, y_stride, w, p0, p1, x, t0, t1, type);                                     \
    }
#define MATMUL_INSTALL_Q8(isa, name, type) k->matmul[type] = matmul_q8_##name##_##isa;
#define MATMUL_INSTALL_FLOAT(isa, name, type) k->matmul[type] = matmul_f32_##name##_##isa;
#define MATMUL_DEFINE(isa)                            \
    MATMUL_Q8_TYPES(MATMUL_KERNEL_Q8, isa)            \
    MATMUL_FLOAT_TYPES(MATMUL_KERNEL_FLOAT, isa)      \
    void matmul_init_##isa(cpu_kernels *k) {          \
        MATMUL_Q8_TYPES(MATMUL_INSTALL_Q8, isa)       \
        MATMUL_FLOAT_TYPES(MATMUL_INSTALL_FLOAT, isa) \
    }

enum { MATMUL_AHEAD = 4096 };

// Asks for the weights that come MATMUL_AHEAD bytes later, into the second-level cache: it waits
// for more lines at a time than the first. They may lie behind the last panel, so the address is a
// number. With few tokens memory is the limit, and hardware prefetching alone reaches 60 % of it
// with K-quants and nearly 90 % with Q8_0, of four panels side by side.
MATMUL_INLINE void matmul_prefetch(uintptr_t weights) {
    enum { READ, LEVEL_2 = 2 };
    __builtin_prefetch((const void *)(weights + MATMUL_AHEAD), READ, LEVEL_2);
}

// The same for block b of panel p, one of n_panels that are read side by side: behind its end comes
// one that is being read, and n_panels - 1 farther the one that will be.
MATMUL_INLINE void matmul_prefetch_block(const panels *w, uint32_t p, const uint32_t n_panels,
                                         uint32_t b, const panel_chunk at) {
    const uint32_t bytes = at.bytes / at.blocks;
    const size_t from = (size_t)(b / at.blocks) * at.bytes + b % at.blocks * bytes;
    const bool ends = from + bytes + MATMUL_AHEAD > w->panel_bytes;
    const uintptr_t block =
        (uintptr_t)w->data + (p + (ends ? n_panels - 1 : 0)) * w->panel_bytes + from;
    MATMUL_UNROLL
    for (uint32_t i = 0; i < bytes; i += 64) matmul_prefetch(block + i);
}

// Activation bytes of the tokens that visit all panels before the next ones do: they stay in the
// second-level cache or near it.
enum { MATMUL_TOKEN_BYTES = 1024 * 1024 };

// Tokens per visit, a multiple of `tile`.
static inline uint32_t matmul_token_step(size_t token_bytes, uint32_t tile) {
    const size_t tiles = MATMUL_TOKEN_BYTES / (token_bytes * tile);
    return tile * (tiles < 4 ? 4 : tiles > 1024 ? 1024 : (uint32_t)tiles);
}

#endif
