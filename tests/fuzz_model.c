// Fuzz target of the road from bytes to logits: opens, loads, starts an engine and runs three
// tokens. Beyond crashes it finds broken promises: a failure without a message, memory left behind
// or taken out of proportion to the bytes, an invariant of the cache, a NaN that is not the one
// NaN.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/alloc.h"
#include "../engine/gguf.h"

enum { MAX_BYTES = 1 << 20, MAX_LOGITS = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static void require(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "fuzz_model: broken promise: %s (last error: %s)\n", what, mf_last_error());
    abort();
}

static void require_line(int status) {
    const char *const line = mf_last_error();
    require(status == MF_FORMAT || status == MF_UNSUPPORTED || status == MF_LIMIT, "status");
    require(*line && !strpbrk(line, "\r\n"), "one line");
}

static void run(mf_model *model, size_t n) {
    static float logits[3 * MAX_LOGITS];
    const mf_engine_options o = {
        .size = sizeof o, .n_ctx = 16, .n_seq = 2, .n_batch = 2, .n_threads = 1};
    mf_model_info info = {.size = sizeof info};
    mf_stats stats = {.size = sizeof stats};
    require(!mf_model_get_info(&info, model), "information");
    // Rows are packed in panels of 16, so a matrix of one row takes 16 times its bytes; F32 of F16.
    require(info.weight_bytes <= 64 * n + 65536, "weights in proportion");
    if (info.n_vocab > MAX_LOGITS) return;

    mf_engine *engine;
    const int status = mf_engine_new(&engine, model, &o);
    if (status) {
        require_line(status);
        return;
    }
    const int32_t tokens[] = {0, (int32_t)info.n_vocab - 1, (int32_t)info.n_vocab / 2};
    const mf_chunk chunks[] = {
        {.seq = 1, .logits = MF_LOGITS_ALL, .tokens = tokens, .n_tokens = 3}};
    const size_t n_floats = 3 * (size_t)info.n_vocab;
    require(!mf_engine_forward(logits, n_floats, engine, chunks, 1), "a forward of three tokens");
    for (size_t i = 0; i < n_floats; i++) {
        uint32_t bits;
        memcpy(&bits, logits + i, sizeof bits);
        require(logits[i] == logits[i] || bits == 0x7fc00000, "one NaN");
    }
    require(!mf_engine_stats(&stats, engine), "statistics");
    require(stats.kv_bytes <= 16 * 4 * 64 * n + (16u << 20), "KV rows in proportion");
    require(stats.compute_bytes <= 64 * n + (16u << 20), "compute memory in proportion");
    require(!mf_kv_check(engine), "the cache's invariants");
    mf_engine_free(engine);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    static const char name[] = "fuzz.gguf";
    if (n > MAX_BYTES) return 0;
    const size_t alive = mem_alive();
    const mf_model_options o = {.size = sizeof o, .n_threads = 1};
    mf_gguf *file = NULL;
    mf_model *model = NULL;
    int status = gguf_open_memory(&file, bytes, n, name);
    if (!status) status = mf_model_load(&model, file, &o);
    mf_gguf_free(file);
    if (status) {
        require_line(status);
        require(!model, "nothing is handed out by a failure");
        require(!strncmp(mf_last_error(), name, sizeof name - 1), "the message names the file");
    } else {
        run(model, n);
        mf_model_free(model);
    }
    require(mem_alive() == alive, "memory is given back");
    return 0;
}
