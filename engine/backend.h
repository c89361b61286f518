// Layer 5: what a device must offer. Portable code above it never sees a device's memory.
#ifndef MF_BACKEND_H
#define MF_BACKEND_H

#include <stdatomic.h>

#include "batch.h"
#include "gguf.h"
#include "graph.h"
#include "pool.h"

typedef struct backend backend;

// A rope table: n_rot/2 frequencies in radians per position, and the factor on cos and sin.
typedef struct rope_kind {
    const double *freq;  // [n_rot/2]
    float magnitude;
} rope_kind;

enum { ROPE_KINDS = 2 };

// What does not change while an engine lives and ops read beside the graph.
typedef struct backend_config {
    uint32_t n_layer, n_embd, n_vocab, n_head, n_head_kv, head_dim, n_rot;
    bool rope_interleaved;
    rope_kind rope[ROPE_KINDS];
    float attn_scale, attn_softcap;
    const uint32_t *layer_group;   // [n_layer]
    const uint32_t *layer_window;  // [n_layer] UINT32_MAX: all positions
    const uint32_t *layer_rope;    // [n_layer] index into rope
    const uint32_t *group_cells;   // [n_groups]; each region has one spare row more, for moves
    uint32_t n_groups;
    kv_format kv_format;
    bool kv_widened;  // q8_0 rows are read as floats, not packed: for comparison
    uint32_t n_batch, n_ctx, n_threads;
    const char *isa;  // NULL: MINFER_ISA, else the best present
} backend_config;

typedef struct backend_stats {
    const char *isa;
    uint32_t n_threads;
    size_t kv_bytes, compute_bytes;
} backend_stats;

// What a pass over the weights looks at between steps; cancelling turns ACTIVE into CANCELLED.
enum run_state { RUN_IDLE, RUN_ACTIVE, RUN_CANCELLED };

typedef struct weight_store weight_store;

// One kind of device.
typedef struct device {
    const char *name;                      // "cpu"
    uint32_t id;                           // written into files: appended to, never renumbered
    uint32_t head_dim_step, head_dim_max;  // head_dim must be a multiple of step, at most max
    uint32_t kv_formats;                   // bit set of the kv_formats that its attention reads
    uint32_t rope_formats;                 // bit set of the kv_formats that rope_cells turns
    uint32_t window_modes;                 // bit set of the kv_window_modes that attention reads

    const char *(*isas)(
        void);  // instruction sets that this machine runs, best first, comma separated
    // mf_measure_limits; isa and n_threads as in backend_config.
    int (*limits)(mf_limits *out, const char *isa, uint32_t n_threads);

    // All weights of a model, freed together.
    int (*weights_new)(weight_store **out);
    void (*weights_free)(weight_store *s);
    // Adds a matrix [n_rows][n_cols] or a vector, from the file's bytes to the device's form.
    // `n_done` counts bytes.
    int (*matrix_load)(weight **out, weight_store *in, const gguf_tensor *t, pool *p,
                       uint64_t *n_done);
    int (*vector_load)(weight **out, weight_store *in, const gguf_tensor *t);

    int (*backend_new)(backend **out, const backend_config *config);
    void (*backend_free)(backend *b);
    // Compute memory for graphs up to `bytes`; called before a graph is first run.
    int (*reserve)(backend *b, size_t bytes);
    // Runs the graph; `logits` [n_outputs][n_vocab]. MF_CANCELLED soon after *run is RUN_CANCELLED.
    int (*compute)(backend *b, const graph *g, const batch *in, float *logits,
                   const atomic_int *run);
    // Rows of all layers of a group, K and V, verbatim: the moves one after the other, each with
    // memmove's meaning. All memory was allocated with the backend: cannot fail.
    void (*copy_cells)(backend *b, const mf_kv_move *moves, uint32_t n);
    // Turns the K rows in all layers of a group by `delta` positions more. Cannot fail.
    void (*rope_cells)(backend *b, const kv_cell_run *runs, uint32_t n, int32_t delta);
    // [n][row bytes] of K (value = false) or V of a layer, out of or into cells [cell, cell + n).
    // Cannot fail.
    void (*get_rows)(const backend *b, uint32_t layer, bool value, uint32_t cell, uint32_t n,
                     void *rows);
    void (*put_rows)(backend *b, uint32_t layer, bool value, uint32_t cell, uint32_t n,
                     const void *rows);
    // The threads that compute, for other work while they do not; gives NULL if there are none to
    // lend. If there are, put_rows must take different layers from several of them at a time.
    pool *(*threads)(const backend *b);
    void (*get_stats)(const backend *b, backend_stats *out);
} device;

// NULL with MF_ARG's line set for an unknown name; NULL name: "cpu".
const device *device_find(const char *name);
// NULL for an id that no device has.
const char *device_name(uint32_t id);

extern const device device_cpu;

#endif
