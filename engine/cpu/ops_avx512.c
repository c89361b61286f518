// Elementwise kernels and KV rows on AVX-512: ops_lanes.h and rows_lanes.h over the vector of
// lanes_avx512.h.
#include "lanes_avx512.h"
#include "ops_lanes.h"
#include "rows_lanes.h"

void ops_init_avx512(cpu_kernels *k) {
    ops_init_lanes(k);
    rows_init_lanes(k);
}
