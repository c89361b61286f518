// What tests see of the CPU device beside its table of functions.
#ifndef MF_BACKEND_CPU_H
#define MF_BACKEND_CPU_H

#include "kv_region.h"

const kv_regions *cpu_regions(const backend *b);

#endif
