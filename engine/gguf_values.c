// Owns the typed reading of an open GGUF's values and the public functions that list what is in it.
//
// Refuses an index or a range outside the file and a type that the caller did not ask for: numbers
// are never converted to another kind. Invariant: a failing call writes nothing.
#include <float.h>
#include <inttypes.h>
#include <string.h>

#include "error.h"
#include "gguf_file.h"

static const char *type_name(uint32_t type) {
    static const char *const names[] = {
        [MF_GGUF_U8] = "u8",       [MF_GGUF_I8] = "i8",     [MF_GGUF_U16] = "u16",
        [MF_GGUF_I16] = "i16",     [MF_GGUF_U32] = "u32",   [MF_GGUF_I32] = "i32",
        [MF_GGUF_F32] = "f32",     [MF_GGUF_BOOL] = "bool", [MF_GGUF_STRING] = "string",
        [MF_GGUF_ARRAY] = "array", [MF_GGUF_U64] = "u64",   [MF_GGUF_I64] = "i64",
        [MF_GGUF_F64] = "f64",
    };
    return names[type];
}

static bool is_int(const gguf_kv *kv) {
    return kv->type != MF_GGUF_F32 && kv->type != MF_GGUF_F64 && kv->type != MF_GGUF_STRING;
}

static bool is_float(const gguf_kv *kv) {
    return kv->type == MF_GGUF_F32 || kv->type == MF_GGUF_F64;
}

// Element i of integers or bools; false above INT64_MAX. Values in the file are unaligned.
static bool load_int(int64_t *out, const gguf_kv *kv, uint64_t i) {
    const uint8_t *p = kv->data;
    uint16_t u16;
    uint32_t u32;
    uint64_t u64;
    switch (kv->type) {
        case MF_GGUF_BOOL:
        case MF_GGUF_U8:
            *out = p[i];
            return true;
        case MF_GGUF_I8:
            *out = (int8_t)p[i];
            return true;
        case MF_GGUF_U16:
        case MF_GGUF_I16:
            memcpy(&u16, p + i * sizeof u16, sizeof u16);
            *out = kv->type == MF_GGUF_U16 ? (int64_t)u16 : (int16_t)u16;
            return true;
        case MF_GGUF_U32:
        case MF_GGUF_I32:
            memcpy(&u32, p + i * sizeof u32, sizeof u32);
            *out = kv->type == MF_GGUF_U32 ? (int64_t)u32 : (int32_t)u32;
            return true;
        default:
            memcpy(&u64, p + i * sizeof u64, sizeof u64);
            *out = (int64_t)u64;
            return kv->type == MF_GGUF_I64 || u64 <= INT64_MAX;
    }
}

static double load_float(const gguf_kv *kv, uint64_t i) {
    double f64;
    float f32;
    if (kv->type == MF_GGUF_F64) {
        memcpy(&f64, kv->data + i * sizeof f64, sizeof f64);
        return f64;
    }
    memcpy(&f32, kv->data + i * sizeof f32, sizeof f32);
    return f32;
}

// ---- scalars by key ----------------------------------------------------------------------------

static int wrong_type(const gguf_kvs *kvs, const gguf_kv *kv, const char *wanted) {
    return fail(MF_FORMAT, "%s: %.*s is %s%s; %s is needed", kvs->path,
                gguf_shown(kv->key, kv->key_len), kv->key, kv->is_array ? "an array of " : "",
                type_name(kv->type), wanted);
}

static int missing(const gguf_kvs *kvs, const char *key) {
    return fail(MF_FORMAT, "%s: %s is missing; the model cannot be used without it", kvs->path,
                key);
}

int gguf_kvs_u32(uint32_t *out, const gguf_kvs *kvs, const char *key, const uint32_t *fallback,
                 uint32_t min, uint32_t max) {
    const gguf_kv *kv = gguf_kvs_find(kvs, key);
    if (!kv) {
        if (!fallback) return missing(kvs, key);
        *out = *fallback;
        return MF_OK;
    }
    if (kv->is_array || !is_int(kv) || kv->type == MF_GGUF_BOOL) {
        return wrong_type(kvs, kv, "an integer");
    }
    int64_t value;
    if (!load_int(&value, kv, 0)) {
        return fail(MF_FORMAT, "%s: %s is 2^63 or more; %" PRIu32 " to %" PRIu32 " is allowed",
                    kvs->path, key, min, max);
    }
    if (value < (int64_t)min || value > (int64_t)max) {
        return fail(MF_FORMAT, "%s: %s = %" PRId64 "; %" PRIu32 " to %" PRIu32 " is allowed",
                    kvs->path, key, value, min, max);
    }
    *out = (uint32_t)value;
    return MF_OK;
}

int gguf_u32(uint32_t *out, const mf_gguf *file, const char *key, uint32_t fallback, uint32_t min,
             uint32_t max) {
    return gguf_kvs_u32(out, &file->kvs, key, &fallback, min, max);
}

int gguf_u32_required(uint32_t *out, const mf_gguf *file, const char *key, uint32_t min,
                      uint32_t max) {
    return gguf_kvs_u32(out, &file->kvs, key, NULL, min, max);
}

static int kvs_f32(float *out, const gguf_kvs *kvs, const char *key, const float *fallback,
                   float min, float max) {
    const gguf_kv *kv = gguf_kvs_find(kvs, key);
    if (!kv) {
        if (!fallback) return missing(kvs, key);
        *out = *fallback;
        return MF_OK;
    }
    if (kv->is_array || !is_float(kv)) return wrong_type(kvs, kv, "a float");
    const double value = load_float(kv, 0);
    // Written so that a NaN is refused; the limit FLT_MAX also makes the conversion exact enough.
    if (!(value >= (double)min && value <= (double)max && value >= -FLT_MAX && value <= FLT_MAX)) {
        return fail(MF_FORMAT, "%s: %s = %g; a finite number from %g to %g is allowed", kvs->path,
                    key, value, (double)min, (double)max);
    }
    *out = (float)value;
    return MF_OK;
}

int gguf_f32(float *out, const mf_gguf *file, const char *key, float fallback, float min,
             float max) {
    return kvs_f32(out, &file->kvs, key, &fallback, min, max);
}

int gguf_f32_required(float *out, const mf_gguf *file, const char *key, float min, float max) {
    return kvs_f32(out, &file->kvs, key, NULL, min, max);
}

int gguf_kvs_str(const char **out, size_t *len, const gguf_kvs *kvs, const char *key) {
    const gguf_kv *kv = gguf_kvs_find(kvs, key);
    if (kv && (kv->is_array || kv->type != MF_GGUF_STRING)) return wrong_type(kvs, kv, "a string");
    *out = kv ? (const char *)kv->data + sizeof(uint64_t) : NULL;
    *len = kv ? kv->bytes : 0;
    return MF_OK;
}

int gguf_str(const char **out, size_t *len, const mf_gguf *file, const char *key) {
    return gguf_kvs_str(out, len, &file->kvs, key);
}

const gguf_tensor *gguf_tensor_at(const mf_gguf *file, uint64_t index) {
    return index < file->n_tensors ? &file->tensors[index] : NULL;
}

// ---- the public surface ------------------------------------------------------------------------

uint64_t mf_gguf_n_kv(const mf_gguf *file) { return file ? file->kvs.n : 0; }

uint64_t mf_gguf_n_tensors(const mf_gguf *file) { return file ? file->n_tensors : 0; }

uint64_t mf_gguf_data_bytes(const mf_gguf *file) { return file ? file->data_bytes : 0; }

int mf_gguf_tensor(mf_tensor_info *out, const mf_gguf *file, uint64_t index) {
    if (!out || !file) return fail(MF_ARG, "mf_gguf_tensor: %s is NULL", out ? "file" : "out");
    const gguf_tensor *t = gguf_tensor_at(file, index);
    if (!t) {
        return fail(MF_ARG, "%s: there is no tensor %" PRIu64 "; the file has %" PRIu32,
                    gguf_path(file), index, file->n_tensors);
    }
    *out = (mf_tensor_info){.name = t->name,
                            .name_len = t->name_len,
                            .type = dtype_get(t->type)->name,
                            .n_dims = t->n_dims,
                            .bytes = t->bytes};
    memcpy(out->dims, t->dims, sizeof out->dims);
    return MF_OK;
}

static int value_at(const gguf_kv **out, const mf_gguf *file, uint64_t index, const char *caller) {
    if (!file) return fail(MF_ARG, "%s: file is NULL", caller);
    if (index >= file->kvs.n) {
        return fail(MF_ARG, "%s: there is no value %" PRIu64 "; the file has %" PRIu32,
                    gguf_path(file), index, file->kvs.n);
    }
    *out = &file->kvs.items[index];
    return MF_OK;
}

int mf_gguf_kv(mf_kv_info *out, const mf_gguf *file, uint64_t index) {
    const gguf_kv *kv = NULL;
    if (!out) return fail(MF_ARG, "mf_gguf_kv: out is NULL");
    TRY(value_at(&kv, file, index, "mf_gguf_kv"));
    *out = (mf_kv_info){.key = kv->key,
                        .key_len = kv->key_len,
                        .type = kv->type,
                        .is_array = kv->is_array,
                        .n = kv->n};
    return MF_OK;
}

bool gguf_find_key(uint64_t *index, const mf_gguf *file, const char *key) {
    const gguf_kv *kv = gguf_kvs_find(&file->kvs, key);
    if (kv) *index = (uint64_t)(kv - file->kvs.items);
    return kv;
}

int mf_gguf_find(uint64_t *index, const mf_gguf *file, const char *key) {
    if (!index || !file || !key) {
        return fail(MF_ARG, "mf_gguf_find: %s is NULL", !index ? "index" : !file ? "file" : "key");
    }
    if (gguf_find_key(index, file, key)) return MF_OK;
    return fail(MF_NOT_FOUND, "%s: there is no key %s", gguf_path(file), key);
}

// What mf_gguf_ints and mf_gguf_floats check alike.
static int check_range(const mf_gguf *file, const gguf_kv *kv, const void *out, uint64_t first,
                       uint64_t n, bool fits, const char *wanted) {
    uint64_t end;
    if (!fits) {
        return fail(MF_ARG, "%s: %.*s is %s%s, not %s", gguf_path(file),
                    gguf_shown(kv->key, kv->key_len), kv->key, kv->is_array ? "an array of " : "",
                    type_name(kv->type), wanted);
    }
    if (!u64_add(&end, first, n) || end > kv->n) {
        return fail(MF_ARG,
                    "%s: %.*s has %" PRIu64 " elements; %" PRIu64 " from %" PRIu64
                    " on are out of range",
                    gguf_path(file), gguf_shown(kv->key, kv->key_len), kv->key, kv->n, n, first);
    }
    if (n && !out) return fail(MF_ARG, "%s: out is NULL", gguf_path(file));
    return MF_OK;
}

int mf_gguf_ints(int64_t *out, const mf_gguf *file, uint64_t index, uint64_t first, uint64_t n) {
    const gguf_kv *kv = NULL;
    TRY(value_at(&kv, file, index, "mf_gguf_ints"));
    TRY(check_range(file, kv, out, first, n, is_int(kv), "integers"));
    for (uint64_t i = 0; kv->type == MF_GGUF_U64 && i < n; i++) {
        int64_t value;
        if (load_int(&value, kv, first + i)) continue;
        return fail(MF_FORMAT,
                    "%s: element %" PRIu64 " of %.*s is 2^63 or more, too large to hand out",
                    gguf_path(file), first + i, gguf_shown(kv->key, kv->key_len), kv->key);
    }
    for (uint64_t i = 0; i < n; i++) load_int(&out[i], kv, first + i);
    return MF_OK;
}

int mf_gguf_floats(double *out, const mf_gguf *file, uint64_t index, uint64_t first, uint64_t n) {
    const gguf_kv *kv = NULL;
    TRY(value_at(&kv, file, index, "mf_gguf_floats"));
    TRY(check_range(file, kv, out, first, n, is_float(kv), "floats"));
    for (uint64_t i = 0; i < n; i++) out[i] = load_float(kv, first + i);
    return MF_OK;
}

int mf_gguf_strings(size_t *n_bytes, char *bytes, size_t capacity, uint64_t *ends,
                    const mf_gguf *file, uint64_t index) {
    const gguf_kv *kv = NULL;
    if (!n_bytes) return fail(MF_ARG, "mf_gguf_strings: n_bytes is NULL");
    TRY(value_at(&kv, file, index, "mf_gguf_strings"));
    TRY(check_range(file, kv, kv, 0, 0, kv->type == MF_GGUF_STRING, "strings"));
    if (!bytes) {
        *n_bytes = kv->bytes;
        return MF_OK;
    }
    if (capacity < kv->bytes || (kv->n && !ends)) {
        return fail(MF_ARG,
                    "%s: the strings of %.*s need room for %" PRIu64
                    " bytes (given: %zu) and "
                    "%" PRIu64 " ends%s",
                    gguf_path(file), gguf_shown(kv->key, kv->key_len), kv->key, kv->bytes, capacity,
                    kv->n, ends ? "" : " (given: NULL)");
    }
    const uint8_t *p = kv->data;
    uint64_t used = 0;
    for (uint64_t i = 0; i < kv->n; i++) {
        uint64_t len;
        // Checked again although it was at open: another process may have written to the file
        // since.
        bool sound = (uint64_t)(kv->end - p) >= sizeof len;
        if (sound) memcpy(&len, p, sizeof len);
        sound = sound && len <= (uint64_t)(kv->end - p) - sizeof len && len <= kv->bytes - used;
        if (!sound)
            return fail(MF_IO, "%s: the file was changed while it was open", gguf_path(file));
        memcpy(bytes + used, p + sizeof len, len);
        p += sizeof len + len;
        used += len;
        ends[i] = used;
    }
    *n_bytes = used;
    return MF_OK;
}
