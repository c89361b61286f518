// What the C tests of the GGUF reader share: the count of checks, and a writer that puts GGUF bytes
// field by field, right or wrong as the test wants them.
#ifndef MF_TESTS_GGUF_TEST_H
#define MF_TESTS_GGUF_TEST_H

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/dtype.h"

static int passed, failed;

static inline void check(bool ok, const char *format, ...) __attribute__((format(printf, 2, 3)));

static inline void check(bool ok, const char *format, ...) {
    if (ok) {
        passed++;
        return;
    }
    failed++;
    va_list args;
    va_start(args, format);
    printf("FAILED: ");
    vprintf(format, args);
    printf("; last error: %s\n", mf_last_error());
    va_end(args);
}

typedef struct gguf_build {
    uint8_t *bytes;  // [n], room for `room`
    size_t n, room;
} gguf_build;

static inline void put(gguf_build *b, const void *p, size_t n) {
    if (b->n + n > b->room) {
        b->room = 2 * (b->n + n);
        b->bytes = realloc(b->bytes, b->room);
        if (!b->bytes) {
            fputs("gguf_build: out of memory\n", stderr);
            exit(1);
        }
    }
    if (n) memcpy(b->bytes + b->n, p, n);
    b->n += n;
}

// The low `width` bytes of value.
static inline void put_int(gguf_build *b, uint64_t value, size_t width) { put(b, &value, width); }

static inline void put_text(gguf_build *b, const char *s) {
    put_int(b, strlen(s), 8);
    put(b, s, strlen(s));
}

static inline void put_header(gguf_build *b, uint32_t version, uint64_t n_tensors, uint64_t n_kv) {
    put(b, "GGUF", 4);
    put_int(b, version, 4);
    put_int(b, n_tensors, 8);
    put_int(b, n_kv, 8);
}

// Starts a value: the caller puts it.
static inline void put_key(gguf_build *b, const char *key, mf_gguf_type type) {
    put_text(b, key);
    put_int(b, type, 4);
}

static inline void put_array(gguf_build *b, const char *key, mf_gguf_type type, uint64_t n) {
    put_key(b, key, MF_GGUF_ARRAY);
    put_int(b, type, 4);
    put_int(b, n, 8);
}

static inline void put_kv_int(gguf_build *b, const char *key, mf_gguf_type type, uint64_t value) {
    static const uint8_t width[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    put_key(b, key, type);
    put_int(b, value, width[type]);
}

static inline void put_kv_text(gguf_build *b, const char *key, const char *value) {
    put_key(b, key, MF_GGUF_STRING);
    put_text(b, value);
}

static inline void put_kv_f32(gguf_build *b, const char *key, float value) {
    put_key(b, key, MF_GGUF_F32);
    put(b, &value, sizeof value);
}

static inline void put_kv_f64(gguf_build *b, const char *key, double value) {
    put_key(b, key, MF_GGUF_F64);
    put(b, &value, sizeof value);
}

// A tensor of the table: at most two dimensions, dim1 == 0 for one.
static inline void put_tensor(gguf_build *b, const char *name, uint32_t type, uint64_t dim0,
                              uint64_t dim1, uint64_t offset) {
    put_text(b, name);
    put_int(b, dim1 ? 2 : 1, 4);
    put_int(b, dim0, 8);
    if (dim1) put_int(b, dim1, 8);
    put_int(b, type, 4);
    put_int(b, offset, 8);
}

static inline void put_padding(gguf_build *b, size_t alignment) {
    while (b->n % alignment) put_int(b, 0, 1);
}

// ---- a valid file of about 4 KB ----------------------------------------------------------------

enum mark {  // places of the file that tests damage
    AT_START,
    AT_KEY,       // the name of general.name, its length 8 bytes earlier
    AT_TYPE,      // of general.name's value
    AT_TEXT,      // the length of its value
    AT_ALIGN,     // the value of general.alignment, its type 4 bytes earlier
    AT_BOOL,      // a bool's value
    AT_ARRAY,     // the element type of an array of u8, its length 4 bytes later
    AT_STRINGS,   // the element type of an array of strings
    AT_BOOLS,     // the first element of an array of bools
    AT_LAST_KEY,  // the name of the last key, as long as that of the first
    AT_TENSOR,    // the name of tensor 1, of two dimensions, its length 8 bytes earlier
    AT_LAST,      // the name of the last tensor, as long as the name of tensor 1
    AT_DATA,      // the first byte behind the header's padding
    N_MARKS
};

static const char first_key[] = "general.architecture";
static const char last_key[] = "general.quantization";
static const char tensor_1[] = "blk.0.ffn_up.weight", last_tensor[] = "blk.0.ffn_dn.weight";

enum {
    N_TOKENS = 100,
    // Distances from a tensor's name (19 bytes, two dimensions) to what follows it.
    N_DIMS = 19,
    DIM_0 = N_DIMS + 4,
    DIM_1 = DIM_0 + 8,
    TYPE = DIM_1 + 8,
    OFFSET = TYPE + 4
};

static inline void put_vocabulary(gguf_build *b, size_t *mark) {
    put_array(b, "tokenizer.ggml.tokens", MF_GGUF_STRING, N_TOKENS);
    mark[AT_STRINGS] = b->n - 12;
    for (int i = 0; i < N_TOKENS; i++) {
        char token[24];
        snprintf(token, sizeof token, "token%d", i);
        // Tokens may be any bytes: token 3 is not UTF-8, token 4 is empty.
        if (i == 3) memcpy(token, "\xff\xfe", 3);
        if (i == 4) token[0] = '\0';
        put_text(b, token);
    }
    put_array(b, "tokenizer.ggml.scores", MF_GGUF_F32, N_TOKENS);
    for (int i = 0; i < N_TOKENS; i++) put(b, &(float){(float)-i}, 4);
    put_array(b, "tokenizer.ggml.token_type", MF_GGUF_I32, N_TOKENS);
    for (int i = 0; i < N_TOKENS; i++) put_int(b, (uint64_t)(int64_t)(i - 1), 4);
}

static inline void put_scalars(gguf_build *b, size_t *mark) {
    put_kv_int(b, "x.u8", MF_GGUF_U8, 255);
    put_kv_int(b, "x.i8", MF_GGUF_I8, (uint64_t)-128);
    put_kv_int(b, "x.u16", MF_GGUF_U16, 65535);
    put_kv_int(b, "x.i16", MF_GGUF_I16, (uint64_t)-32768);
    put_kv_int(b, "x.u32", MF_GGUF_U32, 4294967295u);
    put_kv_int(b, "x.i32", MF_GGUF_I32, (uint64_t)INT32_MIN);
    put_kv_int(b, "x.u64", MF_GGUF_U64, UINT64_MAX);
    put_kv_int(b, "x.i64", MF_GGUF_I64, (uint64_t)INT64_MIN);
    put_kv_f32(b, "x.f32", 0.5f);
    put_kv_f64(b, "x.f64", -0.25);
    put_kv_f32(b, "x.nan", NAN);
    put_kv_f32(b, "x.inf", INFINITY);
    put_kv_f64(b, "x.huge", 1e300);
    put_kv_f32(b, "x.zero", 0.0f);
    put_kv_int(b, "x.bool", MF_GGUF_BOOL, 1);
    mark[AT_BOOL] = b->n - 1;
    put_array(b, "x.u8s", MF_GGUF_U8, 5);
    mark[AT_ARRAY] = b->n - 12;
    put(b, "\1\2\3\4\5", 5);
    put_array(b, "x.bools", MF_GGUF_BOOL, 3);
    mark[AT_BOOLS] = b->n;
    put(b, "\1\0\1", 3);
    put_array(b, "x.none", MF_GGUF_STRING, 0);
}

static inline gguf_build build_tiny(uint32_t version, size_t *mark) {
    gguf_build b = {0};
    mark[AT_START] = 0;
    put_header(&b, version, 4, 25);
    put_kv_text(&b, first_key, "llama");
    mark[AT_KEY] = b.n + 8;
    put_key(&b, "general.name", MF_GGUF_STRING);
    mark[AT_TYPE] = b.n - 4;
    mark[AT_TEXT] = b.n;
    put_text(&b, "caf\xc3\xa9 \xf0\x9f\x98\x80");
    put_kv_int(&b, "general.alignment", MF_GGUF_U32, 32);
    mark[AT_ALIGN] = b.n - 4;
    put_scalars(&b, mark);
    put_vocabulary(&b, mark);
    mark[AT_LAST_KEY] = b.n + 8;
    put_kv_int(&b, last_key, MF_GGUF_U32, 2);

    put_tensor(&b, "norm", DTYPE_F32, 7, 0, 0);  // 28 bytes, then padding
    mark[AT_TENSOR] = b.n + 8;
    put_tensor(&b, tensor_1, DTYPE_Q4_0, 64, 2, 32);  // 72 bytes, then padding
    put_tensor(&b, "b", DTYPE_F16, 16, 3, 128);       // 96 bytes
    mark[AT_LAST] = b.n + 8;
    put_tensor(&b, last_tensor, DTYPE_Q6_K, 256, 1, 224);  // 210 bytes to the end of the file
    put_padding(&b, 32);
    mark[AT_DATA] = b.n;
    for (int i = 0; i < 224 + 210; i++) put_int(&b, (uint64_t)i * 7, 1);
    return b;
}

#endif
