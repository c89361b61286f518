// What this machine can do at most: mf_measure_limits of the CPU.
#ifndef MF_CPU_LIMITS_H
#define MF_CPU_LIMITS_H

#include "../base.h"

int cpu_limits(mf_limits *out, const char *isa, uint32_t n_threads);

#endif
