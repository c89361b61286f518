// Weights on the CPU: matrices as panels, vectors as floats.
#ifndef MF_CPU_WEIGHT_H
#define MF_CPU_WEIGHT_H

#include "../backend.h"
#include "panel.h"

typedef struct cpu_weight {
    weight base;
    panels p;    // matrices
    float *vec;  // vectors, [base.n_cols]
} cpu_weight;

int cpu_weights_new(weight_store **out);
void cpu_weights_free(weight_store *s);
int cpu_matrix_load(weight **out, weight_store *in, const gguf_tensor *t, pool *p,
                    uint64_t *n_done);
int cpu_vector_load(weight **out, weight_store *in, const gguf_tensor *t);

#endif
