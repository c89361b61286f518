// Layer 4: the inputs of one pass over the weights. The graph never depends on them.
#ifndef MF_BATCH_H
#define MF_BATCH_H

#include "kv_cache.h"

// Neighbouring tokens of one sequence.
typedef struct batch_run {
    int32_t seq;
    uint32_t first_token, n_tokens;
    uint32_t pos0;  // of first_token; the others follow
} batch_run;

// Where the rows of one KV group lie.
typedef struct batch_group {
    int32_t *cells;    // [n_tokens] cell that the token's K and V are stored in
    kv_window window;  // the rows that each token sees, itself included; an item is a run
} batch_group;

typedef struct batch {
    uint32_t n_tokens, n_runs, n_outputs;
    int32_t *tokens;      // [n_tokens]
    uint32_t *positions;  // [n_tokens]
    uint32_t *outputs;    // [n_outputs] tokens whose logits are wanted
    batch_run *runs;      // [n_runs]
    kv_append *appends;   // [n_runs] the same as the cell store takes it
    uint32_t n_groups;
    batch_group groups[KV_MAX_GROUPS];
    uint32_t max_tokens, max_runs;
} batch;

// Memory for batches of at most max_tokens tokens in max_runs runs.
int batch_new(batch **out, uint32_t max_tokens, uint32_t max_runs, uint32_t n_groups);
void batch_free(batch *b);
void batch_clear(batch *b);
// Adds tokens at the end; the caller keeps within max_tokens and max_runs. `outputs`: how many of
// the last tokens have logits.
void batch_add(batch *b, int32_t seq, const int32_t *tokens, uint32_t n, uint32_t outputs);
// The one entry point that takes cells: appends all runs to the cache (all or nothing) and fills in
// positions, cells and windows of every group; `modes` as in kv_cache_window. On failure the
// batch's rows are not in the cache. `work` must be done in any case, before anything is read or
// stored: where a group was regrouped, the other rows have moved even if the batch was refused.
int batch_fill_inputs(kv_work *work, batch *b, kv_cache *kv, uint32_t modes);
// Takes the rows of batch_fill_inputs back, after a pass that failed or was cancelled.
void batch_undo(const batch *b, kv_cache *kv);

#endif
