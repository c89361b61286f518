// Layer 1, private to gguf_part.c (reads the bytes of a part), gguf.c (puts a model together from
// its parts) and gguf_values.c (hands out values): what an open GGUF consists of.
#ifndef MF_GGUF_FILE_H
#define MF_GGUF_FILE_H

#include <stdatomic.h>

#include "gguf.h"
#include "os_posix.h"

typedef struct gguf_kv {
    const char *key;  // [key_len], in the file
    uint32_t key_len;
    uint8_t type;  // mf_gguf_type of the scalar or of the elements
    bool is_array;
    uint64_t n;  // elements; 1 for a scalar
    const uint8_t
        *data;       // the first element, unaligned; a string is its length (u64), then its bytes
    uint64_t bytes;  // of the elements; for strings of their contents alone
    const uint8_t *end;  // behind the last element
} gguf_kv;

typedef struct gguf_kvs {
    const char *path;  // of the file they are from, for messages
    gguf_kv *items;    // [n], in file order
    uint32_t n;
    uint32_t *by_key;  // [n], indices in the order of the keys
} gguf_kvs;

struct mf_gguf {
    _Atomic uint32_t refs;
    char *path;    // as given
    os_map *maps;  // [n_maps], the parts of a split model; none for borrowed memory
    uint32_t n_maps;
    gguf_kvs kvs;          // of the first part
    gguf_tensor *tensors;  // [n_tensors], of all parts, in file order
    uint32_t n_tensors;
    uint32_t *by_name;  // [n_tensors], indices in the order of the names
    uint64_t data_bytes;
};

enum { GGUF_MAX_TENSORS = 1 << 18 };  // of all parts

// gguf_part.c: everything of one part: its values into the empty `kvs` (to be freed also after a
// failure), its tensors behind those that `file` has. `path` is for messages and must live on.
int gguf_read_part(mf_gguf *file, gguf_kvs *kvs, const char *path, const uint8_t *bytes,
                   uint64_t size);
void gguf_free_kvs(gguf_kvs *kvs);

// Sorts indices 0..n-1 into `order`. Heap sort: no input is slow and nothing is allocated, neither
// of which qsort promises.
typedef int gguf_compare(const void *items, uint32_t a, uint32_t b);
void gguf_sort(uint32_t *order, uint32_t n, const void *items, gguf_compare *compare);
int gguf_compare_text(const char *a, size_t a_len, const char *b, size_t b_len);

// The length to print of a text of n bytes: at most 80, not cutting a UTF-8 character.
int gguf_shown(const char *s, uint64_t n);

// gguf.c: NULL when absent.
const gguf_kv *gguf_kvs_find(const gguf_kvs *kvs, const char *key);

// gguf_values.c: what gguf_u32 and gguf_str do, also before there is an mf_gguf. fallback == NULL:
// the value is required.
int gguf_kvs_u32(uint32_t *out, const gguf_kvs *kvs, const char *key, const uint32_t *fallback,
                 uint32_t min, uint32_t max);
int gguf_kvs_str(const char **out, size_t *len, const gguf_kvs *kvs, const char *key);

#endif
