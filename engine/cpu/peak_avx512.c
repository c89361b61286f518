// The most that a core does with AVX-512 and VNNI: peak_lanes.h over the vector of lanes_avx512.h.
#include "lanes_avx512.h"

enum { DOT_CHAINS = 12, DOT_MACS = 64, FMA_CHAINS = 12 };  // two pipes, five cycles
typedef __m512i vi;

static inline vi vi_set1(char byte) { return _mm512_set1_epi8(byte); }
static inline vi vi_dot(vi sum, vi a, vi b) { return _mm512_dpbusd_epi32(sum, a, b); }

#include "peak_lanes.h"

void peak_init_avx512(cpu_kernels *k) { peak_init_lanes(k); }
