// The arguments of the functions of minfer.h but for the cache (test_api_kv.c): what is refused,
// with which status and which words, and that a refusal writes nothing. A marker in the error line
// shows that each refusal wrote its own.
#define _POSIX_C_SOURCE 200809L
#include <limits.h>

#include "api_test.h"

// ---- NULL ------------------------------------------------------------------------------------

static void test_null_gguf(const mf_gguf *file) {
    mf_gguf *opened = NULL;
    mf_kv_info kv;
    mf_tensor_info tensor;
    uint64_t index = 7;
    size_t bytes = 7;
    REFUSED(MF_ARG, "out is NULL", mf_gguf_open(NULL, "x.gguf"));
    REFUSED(MF_ARG, "path is NULL", mf_gguf_open(&opened, NULL));
    REFUSED(MF_ARG, "out is NULL", mf_gguf_kv(NULL, file, 0));
    REFUSED(MF_ARG, "file is NULL", mf_gguf_kv(&kv, NULL, 0));
    REFUSED(MF_ARG, "out is NULL", mf_gguf_tensor(NULL, file, 0));
    REFUSED(MF_ARG, "file is NULL", mf_gguf_tensor(&tensor, NULL, 0));
    REFUSED(MF_ARG, "index is NULL", mf_gguf_find(NULL, file, "x"));
    REFUSED(MF_ARG, "file is NULL", mf_gguf_find(&index, NULL, "x"));
    REFUSED(MF_ARG, "key is NULL", mf_gguf_find(&index, file, NULL));
    REFUSED(MF_ARG, "NULL", mf_gguf_strings(NULL, NULL, 0, NULL, file, 0));
    REFUSED(MF_ARG, "file is NULL", mf_gguf_strings(&bytes, NULL, 0, NULL, NULL, 0));
    check(!opened && index == 7 && bytes == 7, "a refusal wrote: %p %llu %zu", (void *)opened,
          (unsigned long long)index, bytes);
    check(!mf_gguf_n_kv(NULL) && !mf_gguf_n_tensors(NULL) && !mf_gguf_data_bytes(NULL), "no file");
    mf_gguf_free(NULL);
}

static void test_null_values(const mf_gguf *file) {
    uint64_t text, number, real;
    int64_t i;
    double f;
    size_t bytes;
    char c[16];
    if (mf_gguf_find(&text, file, "general.architecture") ||
        mf_gguf_find(&number, file, "gemma3.block_count") ||
        mf_gguf_find(&real, file, "gemma3.attention.layer_norm_rms_epsilon")) {
        check(false, "the model's keys");
        return;
    }
    REFUSED(MF_ARG, "out is NULL", mf_gguf_ints(NULL, file, number, 0, 1));
    REFUSED(MF_ARG, "file is NULL", mf_gguf_ints(&i, NULL, number, 0, 1));
    REFUSED(MF_ARG, "out is NULL", mf_gguf_floats(NULL, file, real, 0, 1));
    REFUSED(MF_ARG, "file is NULL", mf_gguf_floats(&f, NULL, real, 0, 1));
    REFUSED(MF_ARG, "NULL", mf_gguf_strings(&bytes, c, sizeof c, NULL, file, text));
    ACCEPTED(mf_gguf_ints(NULL, file, number, 0, 0));
    REFUSED(MF_ARG, "out of range", mf_gguf_ints(&i, file, number, 1, 1));
    REFUSED(MF_ARG, "out of range", mf_gguf_ints(&i, file, number, UINT64_MAX, 2));
    REFUSED(MF_ARG, "no value", mf_gguf_ints(&i, file, mf_gguf_n_kv(file), 0, 1));
    REFUSED(MF_ARG, "no tensor", mf_gguf_tensor(&(mf_tensor_info){0}, file, UINT64_MAX));
    REFUSED(MF_NOT_FOUND, "no key nothing", mf_gguf_find(&text, file, "nothing"));
    REFUSED(MF_IO, "absent.gguf", mf_gguf_open(&(mf_gguf *){NULL}, "absent.gguf"));
}

static void test_null_objects(mf_gguf *file, mf_model *model, mf_engine *engine) {
    mf_model *m = NULL;
    mf_engine *e = NULL;
    mf_model_info info = {.size = sizeof info};
    mf_stats stats = {.size = sizeof stats};
    REFUSED(MF_ARG, "out is NULL", mf_model_load(NULL, file, NULL));
    REFUSED(MF_ARG, "file is NULL", mf_model_load(&m, NULL, NULL));
    REFUSED(MF_ARG, "out is NULL", mf_model_get_info(NULL, model));
    REFUSED(MF_ARG, "model is NULL", mf_model_get_info(&info, NULL));
    REFUSED(MF_ARG, "out is NULL", mf_engine_new(NULL, model, NULL));
    REFUSED(MF_ARG, "model is NULL", mf_engine_new(&e, NULL, NULL));
    REFUSED(MF_ARG, "out is NULL", mf_engine_stats(NULL, engine));
    REFUSED(MF_ARG, "engine is NULL", mf_engine_stats(&stats, NULL));
    check(!m && !e, "a refusal wrote a handle");
    REFUSED(MF_ARG, "engine is NULL", mf_engine_isa(NULL) ? MF_OK : MF_ARG);
    REFUSED(MF_ARG, "engine is NULL", mf_engine_kv_format(NULL) ? MF_OK : MF_ARG);
    REFUSED(MF_ARG, "engine is NULL", mf_engine_n_threads(NULL) ? MF_OK : MF_ARG);
    REFUSED(MF_ARG, "engine is NULL", mf_engine_n_ctx(NULL) ? MF_OK : MF_ARG);
    mf_engine_cancel(NULL);
    mf_model_free(NULL);
    mf_engine_free(NULL);
    ACCEPTED(mf_model_load(&m, file, NULL));
    ACCEPTED(mf_engine_new(&e, m, NULL));
    check(e && mf_engine_n_ctx(e) == two_groups.n_ctx, "defaults: n_ctx %u", mf_engine_n_ctx(e));
    mf_engine_free(e);
    mf_model_free(m);
}

static void test_null_sampling(void) {
    const float logits[] = {0.0f, 1.0f};
    const mf_sampling s = {.size = sizeof s};
    int32_t token = -7;
    REFUSED(MF_ARG, "token: NULL", mf_sample(NULL, logits, 2, &s, NULL, 0, 0));
    REFUSED(MF_ARG, "logits: NULL", mf_sample(&token, NULL, 2, &s, NULL, 0, 0));
    REFUSED(MF_ARG, "sampling: NULL", mf_sample(&token, logits, 2, NULL, NULL, 0, 0));
    REFUSED(MF_ARG, "recent: NULL", mf_sample(&token, logits, 2, &s, NULL, 1, 0));
    REFUSED(MF_ARG, "n_vocab", mf_sample(&token, logits, 0, &s, NULL, 0, 0));
    check(token == -7, "a refusal wrote token %d", token);
    ACCEPTED(mf_sample(&token, logits, 2, &s, NULL, 0, 0));
}

// ---- sizes -----------------------------------------------------------------------------------

// A struct with more behind it than this build knows.
typedef struct longer {
    union {
        mf_model_options model;
        mf_engine_options engine;
    } known;
    uint64_t unknown[2];
} longer;

static int start(mf_model *model, const void *options) {
    mf_engine *e = NULL;
    const int status = mf_engine_new(&e, model, options);
    mf_engine_free(e);
    return status;
}

static int load(mf_gguf *file, const void *options) {
    mf_model *m = NULL;
    const int status = mf_model_load(&m, file, options);
    mf_model_free(m);
    return status;
}

static void test_option_sizes(mf_gguf *file, mf_model *model) {
    static const size_t wrong[] = {0, 1, 7, 9, 12, 20, 4104, SIZE_MAX};
    longer o = {.unknown = {0}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        o.known.engine.size = wrong[i];
        REFUSED(MF_ARG, "options.size", start(model, &o));
        REFUSED(MF_ARG, "options.size", load(file, &o));
    }
    o.known.engine.size = sizeof(size_t);  // the first header of all: every field is the default
    ACCEPTED(start(model, &o));
    ACCEPTED(load(file, &o));
    o.known.engine.size = offsetof(longer, unknown) + sizeof o.unknown;
    ACCEPTED(start(model, &o));
    o.unknown[1] = 1;
    REFUSED(MF_UNSUPPORTED, "options.size", start(model, &o));
    o.unknown[1] = 0;
    o.known.model = (mf_model_options){.size = o.known.engine.size};
    ACCEPTED(load(file, &o));
    o.unknown[0] = 1;
    REFUSED(MF_UNSUPPORTED, "options.size", load(file, &o));

    mf_engine_options old = {.size = offsetof(mf_engine_options, n_batch), .n_ctx = 32};
    old.n_batch = UINT32_MAX;  // behind the older struct's end: never read
    ACCEPTED(start(model, &old));
}

// `call` fills an out-struct of `known` bytes, which begins with its size.
static void test_out_size(int (*call)(void *out, void *object), void *object, size_t known) {
    static const size_t wrong[] = {0, 1, 8, 15, 20, 4104, SIZE_MAX};
    uint64_t out[64], before[64];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        memset(out, 0xa5, sizeof out);
        out[0] = wrong[i];
        memcpy(before, out, sizeof out);
        REFUSED(MF_ARG, "out.size", call(out, object));
        check(!memcmp(before, out, sizeof out), "out.size %zu: something was written", wrong[i]);
    }
    for (size_t size = 16; size <= known + 16; size += 8) {
        memset(out, 0xa5, sizeof out);
        memcpy(before, out, sizeof out);
        out[0] = size;
        ACCEPTED(call(out, object));
        const size_t written = size < known ? size : known;
        check(out[0] == size && out[written / 8 - 1] != before[0] &&
                  !memcmp(out + written / 8, before, sizeof out - written),
              "out.size %zu of %zu: size %llu, or more or less than its bytes are written", size,
              known, (unsigned long long)out[0]);
    }
}

static int get_info(void *out, void *model) { return mf_model_get_info(out, model); }
static int get_stats(void *out, void *engine) { return mf_engine_stats(out, engine); }
static int get_group(void *out, void *engine) { return mf_kv_get_group(out, engine, 0); }

// ---- ranges ----------------------------------------------------------------------------------

static void test_engine_ranges(mf_model *model) {
    enum { CTX = (1 << 24) + 1 };
    mf_engine_options o = {.size = sizeof o, .n_ctx = CTX};
    REFUSED(MF_ARG, "n_ctx is 16777217", start(model, &o));
    o = (mf_engine_options){.size = sizeof o, .n_ctx = UINT32_MAX};
    REFUSED(MF_ARG, "n_ctx is 4294967295", start(model, &o));
    o = (mf_engine_options){.size = sizeof o, .n_seq = 4097};
    REFUSED(MF_ARG, "n_seq is 4097", start(model, &o));
    o = (mf_engine_options){.size = sizeof o, .n_batch = 65537};
    REFUSED(MF_ARG, "n_batch is 65537", start(model, &o));
    o = (mf_engine_options){.size = sizeof o, .n_threads = 1025};
    REFUSED(MF_ARG, "n_threads is 1025", start(model, &o));
    o = (mf_engine_options){.size = sizeof o, .n_seq = 4096, .n_batch = 65536, .n_threads = 2};
    ACCEPTED(start(model, &o));
    o = (mf_engine_options){.size = sizeof o, .n_ctx = 1, .n_seq = 3, .n_threads = 1};
    ACCEPTED(start(model, &o));
}

static void test_names(mf_gguf *file, mf_model *model) {
    const mf_model_options gpu = {.size = sizeof gpu, .device = "no-such-device"};
    const mf_model_options threads = {.size = sizeof threads, .n_threads = 1025};
    REFUSED(MF_ARG, "no-such-device", load(file, &gpu));
    REFUSED(MF_ARG, "n_threads is 1025", load(file, &threads));
    uint64_t done = 0;
    const mf_model_options counted = {.size = sizeof counted, .n_threads = 2, .progress = &done};
    ACCEPTED(load(file, &counted));
    check(done == mf_gguf_data_bytes(file), "progress: %llu of %llu bytes",
          (unsigned long long)done, (unsigned long long)mf_gguf_data_bytes(file));
    mf_engine_options o = {.size = sizeof o, .n_threads = 1, .isa = "sse9"};
    REFUSED(MF_ARG, "isa: \"sse9\"", start(model, &o));
    o.isa = "avx51";  // not a prefix of a name
    REFUSED(MF_ARG, "scalar", start(model, &o));
    o = (mf_engine_options){.size = sizeof o, .n_threads = 1, .cache_type = "f64"};
    REFUSED(MF_ARG, "cache_type: unknown KV format \"f64\"", start(model, &o));
    o.cache_type = "F32";
    REFUSED(MF_ARG, "cache_type", start(model, &o));
    o.cache_type = "f16";
    ACCEPTED(start(model, &o));
    o.cache_type = "q8_0";  // heads of 16 do not fill its blocks
    REFUSED(MF_UNSUPPORTED, "heads have 16; use f16", start(model, &o));
    o.cache_type = "auto";
    ACCEPTED(start(model, &o));
}

static void test_environment(mf_model *model) {
    mf_engine_options o = {.size = sizeof o, .n_threads = 1};
    char name[16], isas[64], long_name[600];
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    snprintf(isas, sizeof isas, "%s", mf_isas());
    for (char *save, *isa = strtok_r(isas, ",", &save); isa; isa = strtok_r(NULL, ",", &save)) {
        setenv("MINFER_ISA", isa, 1);
        mf_engine *e = must_start(model, &o);
        snprintf(name, sizeof name, "%s", mf_engine_isa(e));
        check(!strcmp(name, isa), "MINFER_ISA=%s gave %s", isa, name);
        mf_engine_free(e);
    }
    const char *const garbage[] = {"avx9", "avx2,scalar", " scalar", "SCALAR", "\xff\n", long_name};
    for (size_t i = 0; i < sizeof garbage / sizeof *garbage; i++) {
        setenv("MINFER_ISA", garbage[i], 1);
        REFUSED(MF_ARG, "MINFER_ISA", start(model, &o));
        o.isa = "scalar";  // the argument comes first
        ACCEPTED(start(model, &o));
        o.isa = NULL;
        setenv("MINFER_ISA", "", 1);
        setenv("MINFER_CACHE_TYPE", garbage[i], 1);
        REFUSED(MF_ARG, "MINFER_CACHE_TYPE", start(model, &o));
        o.cache_type = "f32";
        ACCEPTED(start(model, &o));
        o.cache_type = NULL;
        unsetenv("MINFER_CACHE_TYPE");
    }
    ACCEPTED(start(model, &o));  // MINFER_ISA is empty
    unsetenv("MINFER_ISA");
    setenv("MINFER_CACHE_TYPE", "q8_0", 1);
    REFUSED(MF_UNSUPPORTED, "MINFER_CACHE_TYPE", start(model, &o));
    setenv("MINFER_CACHE_TYPE", "f32", 1);
    ACCEPTED(start(model, &o));
    unsetenv("MINFER_CACHE_TYPE");
}

// ---- forward --------------------------------------------------------------------------------

enum { N_SEQ = 2, CTX = 48, MAX_ROWS = 8, VOCAB = 40 };

static float logits[MAX_ROWS * VOCAB + 1];

static int forward_one(mf_engine *e, mf_chunk c, size_t n_floats) {
    return mf_engine_forward(logits, n_floats, e, &c, 1);
}

static void test_forward_arguments(mf_engine *e) {
    const int32_t ok[] = {1, 2, 3};
    const mf_chunk good = {.seq = 0, .logits = MF_LOGITS_LAST, .tokens = ok, .n_tokens = 3};
    mf_chunk c[3] = {good, good, good}, bad = good;
    memset(logits, 0xa5, sizeof logits);
    float before[sizeof logits / sizeof *logits];
    memcpy(before, logits, sizeof logits);
    REFUSED(MF_ARG, "engine is NULL", mf_engine_forward(logits, VOCAB, NULL, c, 1));
    REFUSED(MF_ARG, "no chunks", mf_engine_forward(logits, VOCAB, e, NULL, 1));
    REFUSED(MF_ARG, "no chunks", mf_engine_forward(logits, 0, e, c, 0));
    REFUSED(MF_ARG, "logits is NULL", mf_engine_forward(NULL, VOCAB, e, c, 1));
    REFUSED(MF_ARG, "3 chunks for 2 sequences", mf_engine_forward(logits, 3 * VOCAB, e, c, 3));
    REFUSED(MF_ARG, "sequence 0 occurs twice", mf_engine_forward(logits, 2 * VOCAB, e, c, 2));
    REFUSED(MF_ARG, "chunks", mf_engine_forward(logits, VOCAB, e, c, SIZE_MAX));
    static const int32_t wrong_seq[] = {-1, N_SEQ, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong_seq / sizeof *wrong_seq; i++) {
        bad.seq = wrong_seq[i];
        REFUSED(MF_ARG, "sequence", forward_one(e, bad, VOCAB));
    }
    static const int32_t wrong_token[] = {-1, VOCAB, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong_token / sizeof *wrong_token; i++) {
        const int32_t tokens[] = {1, 2, wrong_token[i]};
        bad = good;
        bad.tokens = tokens;
        REFUSED(MF_ARG, "at index 2 of chunk 0", forward_one(e, bad, VOCAB));
    }
    static const int32_t wrong_mode[] = {-1, 3, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong_mode / sizeof *wrong_mode; i++) {
        bad = good;
        bad.logits = wrong_mode[i];
        REFUSED(MF_ARG, "logits of chunk 0", forward_one(e, bad, VOCAB));
    }
    bad = good;
    bad.n_tokens = 0;
    REFUSED(MF_ARG, "no tokens", forward_one(e, bad, 0));
    bad.tokens = NULL;
    bad.n_tokens = 3;
    REFUSED(MF_ARG, "no tokens", forward_one(e, bad, VOCAB));
    bad = good;
    bad.n_tokens = ((size_t)1 << 24) + 1;  // refused before the tokens are read
    REFUSED(MF_KV_RANGE, "16777217 tokens", forward_one(e, bad, VOCAB));
    bad.n_tokens = SIZE_MAX;
    REFUSED(MF_KV_RANGE, "tokens", forward_one(e, bad, VOCAB));
    static const size_t wrong_floats[] = {0, VOCAB - 1, VOCAB + 1, 2 * VOCAB, SIZE_MAX};
    for (size_t i = 0; i < sizeof wrong_floats / sizeof *wrong_floats; i++)
        REFUSED(MF_ARG, "n_floats", forward_one(e, good, wrong_floats[i]));
    bad = good;
    bad.logits = MF_LOGITS_NONE;
    REFUSED(MF_ARG, "n_floats is 40", forward_one(e, bad, VOCAB));
    check(!memcmp(before, logits, sizeof logits), "a refused forward wrote logits");
    uint32_t len = 7;
    check(!mf_kv_len(&len, e, 0) && len == 0, "refused forwards left %u rows", len);
    REFUSED(MF_ARG, "not an open", mf_engine_forward(logits, VOCAB, (mf_engine *)before, c, 1));

    ACCEPTED(mf_engine_forward(NULL, 0, e, &bad, 1));
    ACCEPTED(forward_one(e, good, VOCAB));
    check(!memcmp(before + VOCAB, logits + VOCAB, sizeof logits - VOCAB * sizeof *logits),
          "one row was wanted, more was written");
    ACCEPTED(mf_kv_free(e, 0));
}

// ---- life ------------------------------------------------------------------------------------

// Objects may be freed in any order, and an engine works when it is the last one.
static void test_free_orders(const gguf_build *b) {
    static const char *const orders[] = {"gme", "gem", "mge", "meg", "egm", "emg"};
    const mf_chunk c = {.logits = MF_LOGITS_LAST, .tokens = (const int32_t[]){1, 2}, .n_tokens = 2};
    const mf_engine_options o = {.size = sizeof o, .n_threads = 2, .n_ctx = CTX};
    for (size_t i = 0; i < 6; i++) {
        const size_t alive = mem_alive();
        mf_gguf *file;
        mf_model *model;
        if (gguf_open_memory(&file, b->bytes, b->n, "test.gguf") ||
            mf_model_load(&model, file, NULL)) {
            check(false, "the model is refused");
            return;
        }
        mf_engine *engine = must_start(model, &o);
        for (const char *which = orders[i]; *which; which++) {
            if (*which == 'g') mf_gguf_free(file);
            if (*which == 'm') mf_model_free(model);
            if (*which == 'e') {
                check(!mf_engine_forward(logits, VOCAB, engine, &c, 1), "order %s", orders[i]);
                mf_engine_free(engine);
            }
        }
        check(mem_alive() == alive, "order %s: %zu allocations left", orders[i],
              mem_alive() - alive);
    }
}

int main(void) {
    unsetenv("MINFER_ISA");
    unsetenv("MINFER_CACHE_TYPE");
    const size_t alive = mem_alive();
    const gguf_build b = build_model(&two_groups);
    mf_gguf *file;
    if (gguf_open_memory(&file, b.bytes, b.n, "test.gguf")) {
        printf("FAILED: %s\n", mf_last_error());
        return 1;
    }
    mf_model *model = must_load(&b);
    const mf_engine_options o = {
        .size = sizeof o, .n_ctx = CTX, .n_seq = N_SEQ, .n_batch = 8, .n_threads = 2};
    mf_engine *engine = must_start(model, &o);
    test_null_gguf(file);
    test_null_values(file);
    test_null_objects(file, model, engine);
    test_null_sampling();
    test_option_sizes(file, model);
    test_out_size(get_info, model, sizeof(mf_model_info));
    test_out_size(get_stats, engine, sizeof(mf_stats));
    test_out_size(get_group, engine, sizeof(mf_kv_group));
    test_engine_ranges(model);
    test_names(file, model);
    test_environment(model);
    test_forward_arguments(engine);
    test_free_orders(&b);
    mf_engine_free(engine);
    mf_model_free(model);
    mf_gguf_free(file);
    check(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
    free(b.bytes);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
