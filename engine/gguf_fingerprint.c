// Owns the identity of a model's file: what a session was computed with. It covers all metadata and
// the tensor table, and of every tensor's data a few samples, so that it takes milliseconds for a
// file of any size.
//
// Invariant: the same for equal contents, wherever the file lies and however its parts are cut.
#include <string.h>

#include "gguf_file.h"
#include "hash.h"

enum { SAMPLES = 4, SAMPLE_BYTES = 1024 };  // of each tensor, spread over its data

static void add_u64(hash64 *h, uint64_t value) { hash64_add(h, &value, sizeof value); }

static void add_value(hash64 *h, const gguf_kv *kv) {
    static const char split[] = "split.";  // how the file is cut, not what it holds
    const size_t n = sizeof split - 1;
    if (kv->key_len > n && !memcmp(kv->key, split, n)) return;
    add_u64(h, kv->key_len);
    hash64_add(h, kv->key, kv->key_len);
    add_u64(h, kv->type | (uint64_t)kv->is_array << 8);
    add_u64(h, kv->n);
    hash64_add(h, kv->data, (size_t)(kv->end - kv->data));
}

static void add_tensor(hash64 *h, const gguf_tensor *t) {
    add_u64(h, t->name_len);
    hash64_add(h, t->name, t->name_len);
    add_u64(h, (uint64_t)t->type);
    for (int i = 0; i < 4; i++) add_u64(h, t->dims[i]);
    if (t->bytes <= (uint64_t)SAMPLES * SAMPLE_BYTES) {
        hash64_add(h, t->data, (size_t)t->bytes);
        return;
    }
    const uint64_t last = t->bytes - SAMPLE_BYTES;
    for (uint64_t i = 0; i < SAMPLES; i++)
        hash64_add(h, (const uint8_t *)t->data + last / (SAMPLES - 1) * i, SAMPLE_BYTES);
}

void gguf_fingerprint(uint64_t out[2], const mf_gguf *file) {
    for (uint64_t seed = 0; seed < 2; seed++) {
        hash64 h;
        hash64_begin(&h, seed);
        for (uint32_t i = 0; i < file->kvs.n; i++) add_value(&h, &file->kvs.items[i]);
        for (uint32_t i = 0; i < file->n_tensors; i++) add_tensor(&h, &file->tensors[i]);
        out[seed] = hash64_end(&h);
    }
}
