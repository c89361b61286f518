// What the C tests of models and engines share: a builder of small whole models as GGUF bytes, and
// the steps from bytes to an engine. The same description gives the same bytes.
#ifndef MF_TESTS_MODEL_TEST_H
#define MF_TESTS_MODEL_TEST_H

#include "../engine/alloc.h"
#include "../engine/gguf.h"
#include "gguf_test.h"

typedef struct model_spec {
    const char *arch;  // "llama", "mistral" or "gemma3"
    uint32_t n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, n_vocab, n_ctx;
    uint32_t window, pattern;  // 0: no such key
    dtype type;                // of the matrices: F32, F16, Q4_0 or Q8_0
} model_spec;

// Two groups of cells: layers 0 and 1 have a window of 8, which a short prompt crosses.
static const model_spec two_groups = {.arch = "gemma3",
                                      .n_layer = 3,
                                      .n_embd = 32,
                                      .n_head = 2,
                                      .n_head_kv = 1,
                                      .head_dim = 16,
                                      .n_ff = 32,
                                      .n_vocab = 40,
                                      .n_ctx = 256,
                                      .window = 8,
                                      .pattern = 3,
                                      .type = DTYPE_Q8_0};
static const model_spec smallest = {.arch = "llama",
                                    .n_layer = 1,
                                    .n_embd = 32,
                                    .n_head = 2,
                                    .n_head_kv = 1,
                                    .head_dim = 16,
                                    .n_ff = 32,
                                    .n_vocab = 8,
                                    .n_ctx = 64,
                                    .type = DTYPE_Q4_0};

static inline uint64_t model_rand(uint64_t *state) {  // splitmix64
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// Uniform in [-1, 1).
static inline float model_uniform(uint64_t *state) {
    return (float)(model_rand(state) >> 40) * 0x1p-23f - 1.0f;
}

typedef struct model_writer {
    gguf_build table, data;
    uint64_t n_tensors, state;
} model_writer;

static inline void put_block(model_writer *w, dtype type) {
    static const uint16_t sixteenth = 0x2c00;  // of f16: codes up to 8 give values up to 0.5
    static const uint16_t small = 0x1c00;      // 2^-8: codes up to 127 likewise
    const dtype_info *const info = dtype_get((uint32_t)type);
    if (type == DTYPE_F32) {
        put(&w->data, &(float){model_uniform(&w->state) * 0.5f}, 4);
        return;
    }
    if (type == DTYPE_F16) {  // +-[2^-4, 2^-2)
        put_int(&w->data, 0x2c00 | (model_rand(&w->state) & 0x87ff), 2);
        return;
    }
    put(&w->data, type == DTYPE_Q4_0 ? &sixteenth : &small, 2);
    for (uint32_t i = 2; i < info->block_bytes; i++) put_int(&w->data, model_rand(&w->state), 1);
}

// rows == 0: a vector of floats near 1.
static inline void put_weights(model_writer *w, const char *name, dtype type, uint64_t cols,
                               uint64_t rows) {
    put_padding(&w->data, 32);
    put_tensor(&w->table, name, rows ? type : DTYPE_F32, cols, rows, w->data.n);
    w->n_tensors++;
    if (!rows) {
        for (uint64_t i = 0; i < cols; i++)
            put(&w->data, &(float){1.0f + 0.1f * model_uniform(&w->state)}, 4);
        return;
    }
    const uint64_t blocks = cols / dtype_get((uint32_t)type)->block_elems * rows;
    for (uint64_t i = 0; i < blocks; i++) put_block(w, type);
}

static inline void put_layer(model_writer *w, const model_spec *s, uint32_t layer) {
    const uint64_t q = (uint64_t)s->n_head * s->head_dim, kv = (uint64_t)s->n_head_kv * s->head_dim;
    const bool gemma = !strcmp(s->arch, "gemma3");
    const struct {
        const char *name;
        uint64_t cols, rows;
        bool gemma;
    } tensors[] = {
        {"attn_norm", s->n_embd, 0, false},
        {"ffn_norm", s->n_embd, 0, false},
        {"post_attention_norm", s->n_embd, 0, true},
        {"post_ffw_norm", s->n_embd, 0, true},
        {"attn_q_norm", s->head_dim, 0, true},
        {"attn_k_norm", s->head_dim, 0, true},
        {"attn_q", s->n_embd, q, false},
        {"attn_k", s->n_embd, kv, false},
        {"attn_v", s->n_embd, kv, false},
        {"attn_output", q, s->n_embd, false},
        {"ffn_gate", s->n_embd, s->n_ff, false},
        {"ffn_up", s->n_embd, s->n_ff, false},
        {"ffn_down", s->n_ff, s->n_embd, false},
    };
    char name[64];
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        if (tensors[i].gemma && !gemma) continue;
        snprintf(name, sizeof name, "blk.%u.%s.weight", layer, tensors[i].name);
        put_weights(w, name, s->type, tensors[i].cols, tensors[i].rows);
    }
}

static inline uint64_t put_params(gguf_build *b, const model_spec *s) {
    const struct {
        const char *suffix;
        uint32_t value;
    } keys[] = {
        {"block_count", s->n_layer},
        {"embedding_length", s->n_embd},
        {"feed_forward_length", s->n_ff},
        {"context_length", s->n_ctx},
        {"attention.head_count", s->n_head},
        {"attention.head_count_kv", s->n_head_kv},
        {"attention.key_length", s->head_dim},
        {"attention.value_length", s->head_dim},
        {"attention.sliding_window", s->window},
        {"attention.sliding_window_pattern", s->pattern},
    };
    char key[96];
    uint64_t n = 2;
    put_kv_text(b, "general.architecture", s->arch);
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", s->arch);
    put_kv_f32(b, key, 1e-6f);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (i >= 8 && !keys[i].value) continue;
        snprintf(key, sizeof key, "%s.%s", s->arch, keys[i].suffix);
        put_kv_int(b, key, MF_GGUF_U32, keys[i].value);
        n++;
    }
    return n;
}

// A whole model with a tied head. The caller frees `bytes`.
static inline gguf_build build_model(const model_spec *s) {
    model_writer w = {.state = 1};
    put_weights(&w, "token_embd.weight", s->type, s->n_embd, s->n_vocab);
    put_weights(&w, "output_norm.weight", DTYPE_F32, s->n_embd, 0);
    for (uint32_t i = 0; i < s->n_layer; i++) put_layer(&w, s, i);
    gguf_build params = {0}, b = {0};
    const uint64_t n_kv = put_params(&params, s);
    put_header(&b, 3, w.n_tensors, n_kv);
    put(&b, params.bytes, params.n);
    put(&b, w.table.bytes, w.table.n);
    put_padding(&b, 32);
    put(&b, w.data.bytes, w.data.n);
    free(params.bytes);
    free(w.table.bytes);
    free(w.data.bytes);
    return b;
}

// Opens and loads; the model alone keeps the file.
static inline int load_bytes(mf_model **out, const void *bytes, size_t n) {
    mf_gguf *file;
    const mf_model_options options = {.size = sizeof options, .n_threads = 1};
    int status = gguf_open_memory(&file, bytes, n, "test.gguf");
    if (status) return status;
    status = mf_model_load(out, file, &options);
    mf_gguf_free(file);
    return status;
}

static inline mf_model *must_load(const gguf_build *b) {
    mf_model *model = NULL;
    if (!load_bytes(&model, b->bytes, b->n)) return model;
    printf("FAILED: a valid model is refused: %s\n", mf_last_error());
    exit(1);
}

static inline mf_engine *must_start(mf_model *model, const mf_engine_options *options) {
    mf_engine *engine = NULL;
    if (!mf_engine_new(&engine, model, options)) return engine;
    printf("FAILED: a valid engine is refused: %s\n", mf_last_error());
    exit(1);
}

// One line, not empty: what every failure owes its caller.
static inline bool is_one_line(const char *s) { return *s && !strpbrk(s, "\r\n"); }

#endif
