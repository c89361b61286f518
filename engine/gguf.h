// Layer 1: reads GGUF files (v2, v3, split). Everything is validated at open; later reads cannot
// fail for the file's sake.
#ifndef MF_GGUF_H
#define MF_GGUF_H

#include "dtype.h"

typedef struct gguf_tensor {
    const char *name;  // [name_len], in the mapping
    uint32_t name_len;
    dtype type;
    uint32_t n_dims;
    uint64_t dims[4];  // fastest first, 1 beyond n_dims
    const void *data;  // in the mapping, [bytes]
    uint64_t bytes;
    bool is_mapped;  // of a file: pages that were read may leave memory (os_map_forget)
} gguf_tensor;

// Like mf_gguf_open, for one part's bytes in memory: borrowed until the last mf_gguf_free, 8-byte
// aligned. `name` is for messages.
int gguf_open_memory(mf_gguf **out, const void *bytes, size_t n, const char *name);

// Same, but counted: mf_gguf is shared between the file's handle and the models made from it.
void gguf_retain(mf_gguf *file);

const char *gguf_path(const mf_gguf *file);  // for messages
// 128 bits of what the file holds: all metadata, the tensor table, samples of every tensor's data.
void gguf_fingerprint(uint64_t out[2], const mf_gguf *file);
const gguf_tensor *gguf_find_tensor(const mf_gguf *file,
                                    const char *name);  // NULL if absent; O(log n)
const gguf_tensor *gguf_tensor_at(const mf_gguf *file, uint64_t index);
// Tells the system that a tensor's pages are not needed any more.
void gguf_forget(const mf_gguf *file, const gguf_tensor *tensor);

// Where a key is, if it is there; unlike mf_gguf_find it leaves no error for what is optional.
bool gguf_find_key(uint64_t *index, const mf_gguf *file, const char *key);
// Scalars by key. When absent: *out = fallback (or MF_FORMAT naming the key, for the _required
// ones). A value of the wrong type or outside [min, max] is MF_FORMAT naming file, key and value,
// always.
int gguf_u32(uint32_t *out, const mf_gguf *file, const char *key, uint32_t fallback, uint32_t min,
             uint32_t max);
int gguf_u32_required(uint32_t *out, const mf_gguf *file, const char *key, uint32_t min,
                      uint32_t max);
int gguf_f32(float *out, const mf_gguf *file, const char *key, float fallback, float min,
             float max);
int gguf_f32_required(float *out, const mf_gguf *file, const char *key, float min, float max);
// Borrowed, not zero-terminated; *out = NULL and *len = 0 when absent.
int gguf_str(const char **out, size_t *len, const mf_gguf *file, const char *key);

#endif
