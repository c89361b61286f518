// The most that a core does with NEON: peak_lanes.h over the vector of lanes_neon.h. Compiled
// twice, as matmul_neon.c is: for armv8.2-a+dotprod it defines peak_init_dotprod, which differs in
// vi_dot only.
#include "lanes_neon.h"

enum { DOT_CHAINS = 16, DOT_MACS = 16, FMA_CHAINS = 16 };  // four pipes, four cycles
typedef int32x4_t vi;

static inline vi vi_set1(int8_t byte) { return vreinterpretq_s32_s8(vdupq_n_s8(byte)); }
static inline vi vi_dot(vi sum, vi a, vi b) {
    const int8x16_t x = vreinterpretq_s8_s32(a), y = vreinterpretq_s8_s32(b);
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, x, y);
#else
    // Two products add up in 16 bits.
    const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y));
    return vpadalq_s16(sum, vmlal_high_s8(low, x, y));
#endif
}

#include "peak_lanes.h"

#ifdef __ARM_FEATURE_DOTPROD
void peak_init_dotprod(cpu_kernels *k) { peak_init_lanes(k); }
#else
void peak_init_neon(cpu_kernels *k) { peak_init_lanes(k); }
#endif
