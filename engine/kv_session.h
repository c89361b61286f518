// Layer 3: a KV session as a file. What it holds byte for byte is in docs/session-format.md.
#ifndef MF_KV_SESSION_H
#define MF_KV_SESSION_H

#include "container.h"
#include "kv_image.h"
#include "kvformat.h"

enum { KV_SESSION_MAX_HOST = 1 << 30 };  // bytes of the host's

// All that shapes a row, and so what a file must agree with.
typedef struct kv_session_shape {
    uint32_t backend;  // the device's id
    uint32_t n_layer, n_ctx, n_embd, n_head_kv, head_dim;
    kv_format format;
    uint64_t model[2];                   // gguf_fingerprint
    const uint32_t *layer_group;         // [n_layer]
    const char (*kinds)[KV_KIND_BYTES];  // [n_groups], each another
    kv_config config;                    // of the cache
} kv_session_shape;

// Who does the work beside the caller, and who hears of it.
typedef struct kv_session_work {
    pool *threads;                 // or NULL
    container_progress *progress;  // or NULL
    void *progress_arg;
} kv_session_work;

// A progress whose argument is the caller's two numbers, done and total, which another thread may
// be reading.
void kv_session_report(void *arg, uint64_t done, uint64_t total);

// How rows come and go: [n][row bytes] of K (value = false) or V of a layer. Cannot fail. Layers
// are put by several threads at a time if there are any.
typedef struct kv_session_rows {
    void *arg;
    void (*get)(void *arg, uint32_t layer, bool value, uint32_t cell, uint32_t n, void *rows);
    void (*put)(void *arg, uint32_t layer, bool value, uint32_t cell, uint32_t n, const void *rows);
} kv_session_rows;

typedef struct kv_session {
    const kv_session_shape *shape;
    const kv_session_rows *rows;
    kv_cache *kv;
    kv_session_work work;
} kv_session;

// An open file, verified whole.
struct mf_session {
    container *c;
    kv_session_shape shape;  // as the file says; config is of the smallest cache for its sequences
    kv_image *image;
    uint32_t *layer_group;         // shape's
    char (*kinds)[KV_KIND_BYTES];  // likewise
};

// MF_FORMAT: a file that no engine could have saved, or one of another shape than `here` (NULL: any
// will do).
int kv_session_open(mf_session **out, const char *path, const kv_session_shape *here,
                    const kv_session_work *work);
void kv_session_close(mf_session *s);  // NULL allowed
// [n_rows of the layer's group][row bytes], in the order of the rows' numbers.
const uint8_t *kv_session_layer(const mf_session *s, uint32_t layer, bool value);
const container_section *kv_session_host(const mf_session *s);
// "ROWS": what a section of the file is.
const char *kv_session_section_name(uint32_t type);
size_t kv_session_row_bytes(const kv_session_shape *shape);

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
