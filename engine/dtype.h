// Layer 1: tensor element types of GGUF, numbered as in the file.
#ifndef MF_DTYPE_H
#define MF_DTYPE_H

#include "base.h"

typedef enum dtype {
    DTYPE_F32 = 0,
    DTYPE_F16 = 1,
    DTYPE_Q4_0 = 2,
    DTYPE_Q4_1 = 3,
    DTYPE_Q5_0 = 6,
    DTYPE_Q5_1 = 7,
    DTYPE_Q8_0 = 8,
    DTYPE_Q2_K = 10,
    DTYPE_Q3_K = 11,
    DTYPE_Q4_K = 12,
    DTYPE_Q5_K = 13,
    DTYPE_Q6_K = 14,
    DTYPE_IQ4_NL = 20,
    DTYPE_IQ4_XS = 23,
    DTYPE_BF16 = 30,
    DTYPE_MXFP4 = 39,
    DTYPE_COUNT = 40
} dtype;

typedef struct dtype_info {
    const char *name;      // "Q4_K"
    uint32_t block_elems;  // 1, 32 or 256
    uint32_t block_bytes;
} dtype_info;

// NULL for a number that is no supported type.
const dtype_info *dtype_get(uint32_t type);
// Name of a known but unsupported (or removed) type number for error messages; NULL if unknown
// altogether.
const char *dtype_unsupported_name(uint32_t type);

#endif
