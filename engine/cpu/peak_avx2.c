// The most that a core does with AVX2 and FMA: peak_lanes.h over the vector of lanes_avx2.h.
#include "lanes_avx2.h"

// Two pipes, five cycles; but a sum of dots waits for an addition only.
enum { DOT_CHAINS = 8, DOT_MACS = 4 * 32, FMA_CHAINS = 10 };
typedef __m256i vi;

static inline vi vi_set1(char byte) { return _mm256_set1_epi8(byte); }
// Four words that add up in 16 bits, as codes of up to 5 bits do; for wider ones it takes more.
static inline vi vi_dot(vi sum, vi a, vi b) {
    const vi ab = _mm256_maddubs_epi16(a, b), ba = _mm256_maddubs_epi16(b, a),
             aa = _mm256_maddubs_epi16(a, a), bb = _mm256_maddubs_epi16(b, b);
    const vi pairs = _mm256_add_epi16(_mm256_add_epi16(ab, ba), _mm256_add_epi16(aa, bb));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#include "peak_lanes.h"

void peak_init_avx2(cpu_kernels *k) { peak_init_lanes(k); }
