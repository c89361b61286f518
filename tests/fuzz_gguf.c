// Fuzz target of the GGUF reader: opens the bytes and walks every value, string and tensor through
// the getters. Beyond crashes it finds broken promises: a failure without a message or with memory
// left behind, a name that cannot be looked up, tensor data outside the file.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/alloc.h"
#include "../engine/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static void require(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "fuzz_gguf: broken promise: %s (last error: %s)\n", what, mf_last_error());
    abort();
}

static void *room_for(uint64_t n, size_t size) {
    void *p = malloc(n ? n * size : 1);
    require(p != NULL, "memory for the walk");
    return p;
}

static char *terminated(const char *s, size_t n) {
    char *copy = room_for(n + 1, 1);
    memcpy(copy, s, n);
    copy[n] = '\0';
    return copy;
}

static void walk_strings(const mf_gguf *file, uint64_t index, const mf_kv_info *kv) {
    size_t total, again;
    require(!mf_gguf_strings(&total, NULL, 0, NULL, file, index), "size of strings");
    char *text = room_for(total, 1);
    uint64_t *ends = room_for(kv->n, sizeof *ends);
    require(!mf_gguf_strings(&again, text, total, ends, file, index), "strings");
    require(again == total, "the same size twice");
    for (uint64_t i = 0; i < kv->n; i++) {
        require(ends[i] >= (i ? ends[i - 1] : 0) && ends[i] <= total, "ends in order");
    }
    require(!kv->n || ends[kv->n - 1] == total, "last end");
    require(!total || mf_gguf_strings(&again, text, total - 1, ends, file, index) == MF_ARG,
            "a buffer too small by one");
    free(text);
    free(ends);
}

static void walk_value(const mf_gguf *file, uint64_t index) {
    mf_kv_info kv;
    require(!mf_gguf_kv(&kv, file, index), "value by index");
    char *key = terminated(kv.key, kv.key_len);
    uint64_t found;
    require(!mf_gguf_find(&found, file, key) && found == index, "value by key");

    int64_t *ints = room_for(kv.n, sizeof *ints);
    double *floats = room_for(kv.n, sizeof *floats);
    const int as_ints = mf_gguf_ints(ints, file, index, 0, kv.n);
    const int as_floats = mf_gguf_floats(floats, file, index, 0, kv.n);
    const bool is_float = kv.type == MF_GGUF_F32 || kv.type == MF_GGUF_F64;
    if (kv.type == MF_GGUF_STRING)
        walk_strings(file, index, &kv);
    else if (is_float)
        require(!as_floats, "floats");
    else
        require(!as_ints || (as_ints == MF_FORMAT && kv.type == MF_GGUF_U64), "integers");
    require(is_float || as_floats == MF_ARG, "only floats are floats");
    require(mf_gguf_ints(ints, file, index, kv.n, 1) == MF_ARG, "an element behind the last");
    require(mf_gguf_floats(floats, file, index, UINT64_MAX, 2) == MF_ARG, "a range that wraps");
    free(ints);
    free(floats);

    uint32_t u32;
    float f32;
    const char *text;
    size_t len;
    int status = gguf_u32(&u32, file, key, 0, 0, UINT32_MAX);
    require(!status || status == MF_FORMAT, "u32 by key");
    status = gguf_f32(&f32, file, key, 0, -1e30f, 1e30f);
    require(status == MF_FORMAT || (!status && f32 >= -1e30f && f32 <= 1e30f), "f32 by key");
    status = gguf_str(&text, &len, file, key);
    require((status == MF_OK) == (kv.type == MF_GGUF_STRING && !kv.is_array), "text by key");
    if (!status && len) require(memchr(text, text[len - 1], len) != NULL, "text is readable");
    free(key);
}

// Returns the tensor's bytes.
static uint64_t walk_tensor(const mf_gguf *file, uint64_t index, const uint8_t *bytes, size_t n) {
    mf_tensor_info info;
    require(!mf_gguf_tensor(&info, file, index), "tensor by index");
    const gguf_tensor *tensor = gguf_tensor_at(file, index);
    char *name = terminated(info.name, info.name_len);
    require(tensor && gguf_find_tensor(file, name) == tensor, "tensor by name");
    free(name);
    require(info.n_dims >= 1 && info.n_dims <= 4 && info.type, "shape and type");
    const dtype_info *type = dtype_get(tensor->type);
    uint64_t blocks = info.dims[0] / type->block_elems;
    for (int i = 1; i < 4; i++) blocks *= info.dims[i];
    require(info.bytes > 0 && info.bytes == blocks * type->block_bytes, "bytes of a tensor");
    const uint8_t *data = tensor->data;
    require(data >= bytes && info.bytes <= n - (size_t)(data - bytes), "data within the file");
    gguf_forget(file, tensor);
    return info.bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    static const char name[] = "fuzz.gguf";
    const size_t alive = mem_alive();
    const uint64_t asked = mem_asked();
    mf_gguf *file = NULL;
    const int status = gguf_open_memory(&file, bytes, n, name);
    require(mem_asked() - asked <= n + (64u << 20), "no memory beyond the file's size and 64 MB");
    if (status) {
        require(status == MF_FORMAT || status == MF_UNSUPPORTED || status == MF_LIMIT, "status");
        require(!file, "nothing is handed out by a failure");
        require(!strncmp(mf_last_error(), name, sizeof name - 1), "the message names the file");
        require(strlen(mf_last_error()) > sizeof name, "the message says more than the name");
    } else {
        uint64_t total = 0;
        for (uint64_t i = 0; i < mf_gguf_n_kv(file); i++) walk_value(file, i);
        for (uint64_t i = 0; i < mf_gguf_n_tensors(file); i++) {
            total += walk_tensor(file, i, bytes, n);
        }
        require(total == mf_gguf_data_bytes(file) && total <= n, "bytes of all tensors");
        mf_gguf_free(file);
    }
    require(mem_alive() == alive, "memory is given back");
    return 0;
}
