// Layer 3: a KV session as a file. What it holds byte for byte is in docs/session-format.md.
#ifndef MF_KV_SESSION_H
#define MF_KV_SESSION_H

#include "container.h"
#include "kv_cache.h"
#include "kvformat.h"

// All that shapes a row, and so what a file must agree with.
typedef struct kv_session_shape {
    uint32_t backend;  // the device's id
    uint32_t n_layer, n_ctx, n_embd, n_head_kv, head_dim;
    kv_format format;
    uint64_t model[2];                   // gguf_fingerprint
    const uint32_t *layer_group;         // [n_layer]
    const char (*kinds)[KV_KIND_BYTES];  // [n_groups]
    kv_config config;                    // of the cache
} kv_session_shape;

// How rows come and go: [n][row bytes] of K (value = false) or V of a layer. Cannot fail.
typedef struct kv_session_rows {
    void *arg;
    void (*get)(void *arg, uint32_t layer, bool value, uint32_t cell, uint32_t n, void *rows);
    void (*put)(void *arg, uint32_t layer, bool value, uint32_t cell, uint32_t n, const void *rows);
} kv_session_rows;

typedef struct kv_session {
    const kv_session_shape *shape;
    const kv_session_rows *rows;
    kv_cache *kv;
    container_progress *progress;  // or NULL
    void *progress_arg;
} kv_session;

// Replaces the file `path` by one of these sequences, host bytes beside them. Whatever fails, the
// old file or the new one is there, whole.
int kv_session_save(const kv_session *s, const char *path, const int32_t *seqs, uint32_t n_seqs,
                    const void *host, size_t n_host);
// Verifies the whole file, then makes its i-th sequence the cache's sequence into[i] (NULL: the one
// of the same number), replacing it; the others are left alone. *host [*n_host] is the caller's to
// free (mem_free). Refused: nothing has changed.
int kv_session_load(void **host, size_t *n_host, const kv_session *s, const char *path,
                    const int32_t *into, uint32_t n_into);

#endif
