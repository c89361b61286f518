// Layer 4: what portable code knows of a weight; the device keeps its own form of the numbers
// behind it.
#ifndef MF_WEIGHT_H
#define MF_WEIGHT_H

#include "dtype.h"

typedef struct weight {
    dtype type;
    uint32_t n_rows, n_cols;  // a vector has one row
    size_t bytes;             // in the device's memory
} weight;

static inline bool weight_is_float(const weight *w) {
    return w->type == DTYPE_F32 || w->type == DTYPE_F16 || w->type == DTYPE_BF16;
}

#endif
