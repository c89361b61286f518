// Elementwise kernels on AVX-512: ops_lanes.h over the vector of lanes_avx512.h.
#include "lanes_avx512.h"
#include "ops_lanes.h"

void ops_init_avx512(cpu_kernels *k) { ops_init_lanes(k); }
