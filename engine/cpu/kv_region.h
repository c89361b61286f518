// The K and V rows of one engine on the CPU: a region for K and one for V in each layer, where the
// cells of the layer's group lie one after the other, and behind them one spare row that moves may
// go through.
#ifndef MF_CPU_KV_REGION_H
#define MF_CPU_KV_REGION_H

#include "../backend.h"
#include "kernels.h"

typedef struct kv_regions {
    const backend_config *c;             // borrowed; must outlive the regions
    size_t row_bytes;                    // of one cell in one region
    uint8_t **k, **v;                    // [n_layer], each [cells of its group + 1][row_bytes]
    size_t region_bytes[KV_MAX_GROUPS];  // with what aligns the next
    uint8_t *memory;                     // all regions
    size_t memory_bytes;
    size_t bytes;  // of all rows
    const cpu_kernels *kernels;
    float *turning;         // [n_threads][n_head_kv * head_dim] a row as floats while it is turned
    float *rope_by;         // [ROPE_KINDS][n_rot]: cos, then sin, of what a call turns by
    bool used[ROPE_KINDS];  // by some layer
} kv_regions;

// Cells per group, row width and format as `c` says. A failure leaves what kv_regions_free takes.
int kv_regions_new(kv_regions *r, const backend_config *c, const cpu_kernels *kernels,
                   uint32_t n_threads);
void kv_regions_free(kv_regions *r);

static inline void *kv_region_row(const kv_regions *r, uint8_t *region, size_t cell) {
    return region + cell * r->row_bytes;
}

// Writes one token's K and V, [n_head_kv * head_dim] each, into a cell of a layer, in the format.
void kv_regions_store(const kv_regions *r, uint32_t layer, uint32_t cell, const float *k,
                      const float *v);
// As device.copy_cells and device.rope_cells say.
void kv_regions_copy(const kv_regions *r, pool *p, const mf_kv_move *moves, uint32_t n);
void kv_regions_rope(const kv_regions *r, pool *p, const kv_cell_run *runs, uint32_t n,
                     int32_t delta);

#endif
