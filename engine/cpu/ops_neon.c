// Elementwise kernels on NEON: ops_lanes.h over the vector of lanes_neon.h.
#include "lanes_neon.h"
#include "ops_lanes.h"

void ops_init_neon(cpu_kernels *k) { ops_init_lanes(k); }
