// Layer 6: a model with its KV cache, its graphs and its threads. One call at a time; api.c holds
// the lock.
#ifndef MF_ENGINE_H
#define MF_ENGINE_H

#include <pthread.h>

#include "builder.h"

enum { ENGINE_MAGIC = 0x6d66656e, ENGINE_MAX_GRAPHS = 64 };

struct mf_engine {
    uint32_t magic;
    pthread_mutex_t lock;
    _Atomic int lock_pid;  // process of the thread that took it last
    mf_model *m;
    backend *b;
    kv_cache *kv;
    kv_config kv_config;  // of kv
    batch *batch;
    kv_append *wanted;  // [n_seq] all rows of a call
    kv_format kv_format;
    bool kv_widened;        // see backend_config
    uint32_t window_modes;  // bit set of the kv_window_modes that may be chosen: the device's
    uint32_t n_ctx, n_seq, n_batch;
    uint32_t n_groups;
    uint32_t group_window[KV_MAX_GROUPS], group_layers[KV_MAX_GROUPS];
    uint32_t *layer_group;  // [n_layer]
    char kinds[KV_MAX_GROUPS][KV_KIND_BYTES];
    graph *graphs[ENGINE_MAX_GRAPHS];  // [n_graphs], the one used last at the end
    uint32_t n_graphs;
    const float *rope_factors;  // of the model, or NULL
    uint32_t pos_end;           // first position this engine does not compute
    const char *isa;
    uint32_t n_threads;
    atomic_int run;  // run_state
    mf_stats stats;
};

int engine_new(mf_engine **out, mf_model *m, const mf_engine_options *options);
void engine_free(mf_engine *e);
// Chunks are valid: known sequences, each once; at least one token each.
int engine_forward(mf_engine *e, float *logits, const mf_chunk *chunks, size_t n_chunks);

// engine_kv.c: edits of the cache, rows included.
int engine_kv_rm(mf_engine *e, int32_t seq, int32_t p0, int32_t p1);
int engine_kv_shift(mf_engine *e, int32_t seq, int32_t p0, int32_t delta);
// The moves are the caller's to free (mem_free), NULL if there are none.
int engine_kv_reserve_with_defrag(mf_kv_move **moves, size_t *n_moves, mf_engine *e, int32_t seq,
                                  uint32_t n);
int engine_kv_defrag(mf_kv_move **moves, size_t *n_moves, mf_engine *e, uint32_t need);
// engine_session.c: session files.
int engine_kv_save(mf_engine *e, const char *path, const mf_kv_save_options *o);
int engine_kv_load(void **host, size_t *n_host, mf_engine *e, const char *path,
                   const mf_kv_load_options *o);
// Lets the device do what the cell store asks for.
void engine_kv_work(mf_engine *e, const kv_work *work);

uint64_t engine_bytes_per_token(const mf_engine *e, uint32_t group);
void engine_get_stats(const mf_engine *e, mf_stats *out);

#endif
