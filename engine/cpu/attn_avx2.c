// Attention on AVX2: attn_lanes.h over the vector of lanes_avx2.h.
#include "lanes_avx2.h"
#include "attn_lanes.h"

void attn_init_avx2(cpu_kernels *k) { attn_init_lanes(k); }
