// Layer 0: what every file may use. Platform checks and integer arithmetic that cannot wrap.
#ifndef MF_BASE_H
#define MF_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Only what the public header declares leaves the library (everything is compiled with hidden
// visibility).
#pragma GCC visibility push(default)
#include "minfer.h"
#pragma GCC visibility pop

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "minfer reads little-endian files in place and needs a little-endian machine"
#endif

#if defined(__GNUC__)
#define MF_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define MF_PRINTF(fmt, args)
#endif

// The one checked-arithmetic helper: true and *out on success, false if the result does not fit.
static inline bool size_mul(size_t *out, size_t a, size_t b) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool size_add(size_t *out, size_t a, size_t b) {
    return !__builtin_add_overflow(a, b, out);
}
static inline bool u64_mul(uint64_t *out, uint64_t a, uint64_t b) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool u64_add(uint64_t *out, uint64_t a, uint64_t b) {
    return !__builtin_add_overflow(a, b, out);
}

// a rounded up to a multiple of `to`, a power of two.
static inline bool u64_align(uint64_t *out, uint64_t a, uint64_t to) {
    if (!u64_add(out, a, to - 1)) return false;
    *out &= ~(to - 1);
    return true;
}

static inline uint32_t u32_min(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint32_t u32_max(uint32_t a, uint32_t b) { return a > b ? a : b; }

#endif
