// Elementwise kernels and KV rows on AVX2: ops_lanes.h and rows_lanes.h over the vector of
// lanes_avx2.h.
#include "lanes_avx2.h"
#include "ops_lanes.h"
#include "rows_lanes.h"

void ops_init_avx2(cpu_kernels *k) {
    ops_init_lanes(k);
    rows_init_lanes(k);
}
