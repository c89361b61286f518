// Models that are damaged, odd or too large for the memory there is: any status, but no crash, no
// leak, no growth out of proportion, and after an allocation that failed the same bits as before.
#define _DEFAULT_SOURCE
#include <time.h>
#include <unistd.h>

#include "model_test.h"

enum { MOST_BYTES = 64 << 20, MAX_VOCAB = 512 };

static const uint32_t canonical_nan = 0x7fc00000;

static bool is_status(int s) {
    return s == MF_OK || s == MF_FORMAT || s == MF_UNSUPPORTED || s == MF_LIMIT;
}

// Rows of logits hold no NaN but the one that every machine writes.
static void check_nans(const float *logits, size_t n, const char *what) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, logits + i, sizeof bits);
        if (logits[i] != logits[i]) {
            if (bits != canonical_nan) check(false, "%s: logit %zu is the NaN %08x", what, i, bits);
            return;
        }
    }
}

static int run_model(float *logits, mf_model *model, const char *isa, uint32_t n_tokens) {
    static const int32_t tokens[] = {1, 0, 2, 1, 3};
    const mf_engine_options o = {.size = sizeof o, .n_threads = 1, .isa = isa};
    mf_model_info info = {.size = sizeof info};
    mf_stats stats = {.size = sizeof stats};
    mf_engine *e;
    check(!mf_model_get_info(&info, model), "mf_model_get_info");
    if (info.n_vocab > MAX_VOCAB) return MF_LIMIT;
    int status = mf_engine_new(&e, model, &o);
    if (status) return status;
    const mf_chunk c = {.logits = MF_LOGITS_LAST, .tokens = tokens, .n_tokens = n_tokens};
    status = mf_engine_forward(logits, info.n_vocab, e, &c, 1);
    if (!status) check_nans(logits, info.n_vocab, "logits");
    check(!mf_engine_stats(&stats, e), "mf_engine_stats");
    check(stats.kv_bytes + stats.compute_bytes + stats.weight_bytes < MOST_BYTES,
          "KV, compute and weights take %llu, %llu and %llu bytes",
          (unsigned long long)stats.kv_bytes, (unsigned long long)stats.compute_bytes,
          (unsigned long long)stats.weight_bytes);
    check(!mf_kv_check(e), "mf_kv_check");
    mf_engine_free(e);
    return status;
}

// Opens, loads and runs. What is refused must say why, in one line that names the file.
static int try_bytes(const uint8_t *bytes, size_t n) {
    static float logits[MAX_VOCAB];
    const size_t alive = mem_alive();
    mf_model *model = NULL;
    int status = load_bytes(&model, bytes, n);
    if (status) {
        const char *const line = mf_last_error();
        check(is_status(status) && !model, "status %d", status);
        if (!is_one_line(line) || strncmp(line, "test.gguf: ", 11) != 0)
            check(false, "a refusal's line does not name the file");
    } else {
        status = run_model(logits, model, NULL, 2);
        check(is_status(status), "status %d", status);
        mf_model_free(model);
    }
    if (mem_alive() != alive) check(false, "%zu allocations left", mem_alive() - alive);
    return status;
}

// ---- damage ----------------------------------------------------------------------------------

// Bytes before the tensors' data.
static size_t header_bytes(const gguf_build *b) {
    mf_gguf *file;
    if (gguf_open_memory(&file, b->bytes, b->n, "test.gguf")) return 0;
    const uint8_t *first = b->bytes + b->n;
    for (uint64_t i = 0; i < mf_gguf_n_tensors(file); i++) {
        const uint8_t *const data = gguf_tensor_at(file, i)->data;
        if (data < first) first = data;
    }
    mf_gguf_free(file);
    return (size_t)(first - b->bytes);
}

static void test_flipped_bits(const gguf_build *b) {
    const size_t header = header_bytes(b);
    size_t accepted = 0;
    for (size_t bit = 0; bit < 8 * header; bit++) {
        b->bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        accepted += try_bytes(b->bytes, b->n) == MF_OK;
        b->bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    check(header > 500, "a header of %zu bytes", header);
    // Padding, numbers that may differ (eps, context_length) and nothing else.
    check(accepted < header * 8 / 8, "%zu of %zu flipped bits make a model", accepted, header * 8);
    uint64_t state = 3;
    for (int i = 0; i < 300; i++) {
        const size_t at = header + (size_t)(model_rand(&state) % (b->n - header));
        const uint8_t old = b->bytes[at];
        b->bytes[at] = (uint8_t)model_rand(&state);
        check(try_bytes(b->bytes, b->n) == MF_OK, "other data at byte %zu", at);
        b->bytes[at] = old;
    }
    check(try_bytes(b->bytes, b->n) == MF_OK, "the model itself");
}

static void test_truncations(const gguf_build *b) {
    const size_t header = header_bytes(b), step = (b->n - header) / 64;
    for (size_t n = 0; n < b->n; n += n < header ? 1 : step) {
        uint8_t *const copy = malloc(n ? n : 1);  // so that a read of byte n is caught
        if (!copy) return;
        memcpy(copy, b->bytes, n);
        check(try_bytes(copy, n) == MF_FORMAT, "the first %zu bytes", n);
        free(copy);
    }
}

// NaN, infinite and largest scales anywhere: a result, and the same one on every instruction set.
static void test_wild_weights(const model_spec *spec) {
    static const uint16_t halves[] = {0x7e01, 0xfe01, 0x7c00, 0xfc00, 0x7bff};
    static const uint32_t floats[] = {0x7fc12345, 0xff800001, 0x7f800000, 0xff800000, 0x7f7fffff};
    static float first[MAX_VOCAB], other[MAX_VOCAB];
    gguf_build b = build_model(spec);
    mf_gguf *file;
    if (gguf_open_memory(&file, b.bytes, b.n, "test.gguf")) {
        check(false, "%s is refused", spec->arch);
        return;
    }
    size_t nans = 0;
    for (uint64_t i = 0; i < mf_gguf_n_tensors(file); i++) {
        const gguf_tensor *const t = gguf_tensor_at(file, i);
        uint8_t *const data = b.bytes + ((const uint8_t *)t->data - b.bytes);
        const size_t width = t->type == DTYPE_F32 ? 4 : 2;
        for (size_t v = 0; v < 5; v++) {
            uint8_t old[4];
            memcpy(old, data, width);
            memcpy(data, width == 4 ? (const void *)&floats[v] : (const void *)&halves[v], width);
            mf_model *model = must_load(&b);
            memcpy(data, old, width);
            char isas[64];
            snprintf(isas, sizeof isas, "%s", mf_isas());
            char *save, *isa = strtok_r(isas, ",", &save);
            check(!run_model(first, model, isa, 5), "%.*s, value %zu", (int)t->name_len, t->name,
                  v);
            nans += first[0] != first[0];
            while ((isa = strtok_r(NULL, ",", &save)) != NULL) {
                check(!run_model(other, model, isa, 5), "%.*s, value %zu, %s", (int)t->name_len,
                      t->name, v, isa);
                check(!memcmp(first, other, spec->n_vocab * sizeof *first),
                      "%s %s, tensor %.*s, value %zu: logits differ", spec->arch, isa,
                      (int)t->name_len, t->name, v);
            }
            mf_model_free(model);
        }
    }
    check(nans > 5, "only %zu models gave NaN", nans);
    mf_gguf_free(file);
    free(b.bytes);
}

// ---- odd shapes ------------------------------------------------------------------------------

static void test_shapes(void) {
    static const model_spec specs[] = {
        // Every layer that may be, each as small as it may be.
        {"llama", 1024, 1, 1, 1, 16, 1, 2, 1 << 23, 0, 0, DTYPE_F32},
        // Every head that may be, on one KV head.
        {"llama", 1, 1, 4096, 1, 16, 1, 1, 64, 0, 0, DTYPE_F16},
        {"llama", 1, 3, 5, 5, 512, 7, 17, 64, 0, 0, DTYPE_F16},
        {"mistral", 2, 5, 1, 1, 16, 3, 3, 4096, 1, 0, DTYPE_F32},  // a window of one
        {"mistral", 2, 32, 1, 1, 32, 32, 3, 4096, 4095, 0, DTYPE_Q8_0},
        {"gemma3", 1, 1, 1, 1, 16, 1, 1, 1, 0, 0, DTYPE_F32},  // a context of one
    };
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        const gguf_build b = build_model(&specs[i]);
        const size_t alive = mem_alive();
        mf_model *model = must_load(&b);
        const mf_engine_options o = {.size = sizeof o, .n_threads = 1, .n_batch = 4};
        mf_engine *e = must_start(model, &o);
        float logits[MAX_VOCAB];
        const uint32_t n = mf_engine_n_ctx(e) < 6 ? mf_engine_n_ctx(e) : 6;
        const int32_t tokens[6] = {0};
        const mf_chunk c = {.logits = MF_LOGITS_LAST, .tokens = tokens, .n_tokens = n};
        check(!mf_engine_forward(logits, specs[i].n_vocab, e, &c, 1), "shape %zu", i);
        check_nans(logits, specs[i].n_vocab, "odd shape");
        check(!mf_kv_check(e), "mf_kv_check");
        mf_engine_free(e);
        mf_model_free(model);
        check(mem_alive() == alive, "shape %zu: %zu allocations left", i, mem_alive() - alive);
        free(b.bytes);
    }
}

// ---- memory that runs out ----------------------------------------------------------------------

typedef struct steps {
    mf_gguf *file;
    mf_model *model;
    mf_engine *engine;
    float logits[40];
    int32_t sampled;
} steps;

static const char *path;

static int forward(steps *s, int32_t seq, uint32_t n) {
    static const int32_t tokens[] = {1,  5,  39, 0, 22, 7, 8, 1, 2, 30,
                                     31, 32, 5,  5, 5,  6, 7, 9, 9, 9};
    const mf_chunk c = {.seq = seq, .logits = MF_LOGITS_LAST, .tokens = tokens, .n_tokens = n};
    return mf_engine_forward(s->logits, 40, s->engine, &c, 1);
}

// Step `i` of a life from a path to a sampled token; -1 behind the last.
static int step(steps *s, int i) {
    const mf_model_options load = {.size = sizeof load, .n_threads = 2};
    const mf_engine_options start = {
        .size = sizeof start, .n_ctx = 64, .n_seq = 2, .n_batch = 8, .n_threads = 2};
    const mf_sampling sampling = {.size = sizeof sampling,
                                  .temperature = 1.0f,
                                  .top_k = 10,
                                  .top_p = 0.9f,
                                  .repeat_penalty = 1.1f};
    const int32_t recent[] = {1, 2, 3};
    mf_kv_span spans[4];
    size_t n;
    switch (i) {
        case 0:
            return mf_gguf_open(&s->file, path);
        case 1:
            return mf_model_load(&s->model, s->file, &load);
        case 2:
            return mf_engine_new(&s->engine, s->model, &start);
        case 3:
            return forward(s, 1, 3);
        case 4:
            return forward(s, 0, 8);
        case 5:
            return forward(s, 0, 1);
        case 6:
            return mf_kv_trim(s->engine, 0, 2);
        case 7:
            return mf_kv_spans(&n, spans, 4, s->engine, 0, 0);
        case 8:
            return mf_kv_check(s->engine);
        case 9:
            return mf_kv_free(s->engine, 1);
        case 10:
            return forward(s, 1, 8);
        case 11:
            return mf_sample(&s->sampled, s->logits, 40, &sampling, recent, 3, 15);
        default:
            return -1;
    }
}

// Fails allocation `n` and does the refused step again. Returns whether one was refused.
static bool live(steps *s, size_t n) {
    bool refused = false;
    memset(s, 0, sizeof *s);
    mem_fail_after(n);
    for (int i = 0, status; (status = step(s, i)) >= 0; i++) {
        if (!status) continue;
        check(status == MF_NOMEM && !refused && is_one_line(mf_last_error()) &&
                  strstr(mf_last_error(), "memory"),
              "fault %zu, step %d: status %d", n, i, status);
        refused = true;
        uint32_t before = 0, after = 0;
        if (s->engine) check(!mf_kv_check(s->engine), "fault %zu, step %d: mf_kv_check", n, i);
        if (s->engine && i < 6) check(!mf_kv_len(&before, s->engine, 0), "mf_kv_len");
        check(step(s, i) == MF_OK, "fault %zu, step %d again", n, i);
        if (s->engine && i < 6) check(!mf_kv_len(&after, s->engine, 0), "mf_kv_len");
        check(i != 4 || (before == 0 && after == 8), "fault %zu: %u, then %u rows", n, before,
              after);
    }
    mem_fail_after(SIZE_MAX);
    mf_engine_free(s->engine);
    mf_model_free(s->model);
    mf_gguf_free(s->file);
    return refused;
}

static void test_faults(const gguf_build *b) {
    char name[] = "/tmp/test_model_XXXXXX";
    const int fd = mkstemp(name);
    if (fd < 0 || write(fd, b->bytes, b->n) != (ssize_t)b->n) {
        check(false, "a temporary file");
        return;
    }
    close(fd);
    path = name;
    steps plain, s;
    const size_t alive = mem_alive();
    check(!live(&plain, SIZE_MAX), "a life without faults");
    size_t n = 0, quiet = 0;
    for (; quiet < 20 && n < 5000; n++) {  // a swallowed fault would be a quiet one before others
        const bool refused = live(&s, n);
        check(!refused || !quiet, "fault %zu fires, the one before it did not", n);
        quiet = refused ? 0 : quiet + 1;
        check(!memcmp(plain.logits, s.logits, sizeof s.logits) && plain.sampled == s.sampled,
              "fault %zu: logits or token differ", n);
        check(mem_alive() == alive, "fault %zu: %zu allocations left", n, mem_alive() - alive);
    }
    check(n > 120, "only %zu allocations could fail", n);
    unlink(name);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define TIMED(call)                                               \
    do {                                                          \
        const double timed_start = seconds();                     \
        call;                                                     \
        printf("%-36s %.2f s\n", #call, seconds() - timed_start); \
    } while (0)

int main(void) {
    unsetenv("MINFER_ISA");
    unsetenv("MINFER_CACHE_TYPE");
    gguf_build small = build_model(&smallest), groups = build_model(&two_groups);
    model_spec wild_floats = two_groups, wild_halves = smallest;
    wild_floats.type = DTYPE_F32;
    wild_halves.type = DTYPE_F16;
    TIMED(test_faults(&groups));
    TIMED(test_flipped_bits(&small));
    TIMED(test_truncations(&small));
    TIMED(test_wild_weights(&two_groups));
    TIMED(test_wild_weights(&wild_floats));
    TIMED(test_wild_weights(&wild_halves));
    TIMED(test_wild_weights(&smallest));
    TIMED(test_shapes());
    free(small.bytes);
    free(groups.bytes);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
