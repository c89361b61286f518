// Attention on NEON: attn_lanes.h over the vector of lanes_neon.h.
#include "lanes_neon.h"
#include "attn_lanes.h"

void attn_init_neon(cpu_kernels *k) { attn_init_lanes(k); }
