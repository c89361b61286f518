// Elementwise kernels and KV rows on NEON: ops_lanes.h and rows_lanes.h over the vector of
// lanes_neon.h.
#include "lanes_neon.h"
#include "ops_lanes.h"
#include "rows_lanes.h"

void ops_init_neon(cpu_kernels *k) {
    ops_init_lanes(k);
    rows_init_lanes(k);
}
