// What an engine is after a call that failed or was cancelled, and what the host may do around a
// call without changing one bit: threads, fork, its floating-point modes and its locale.
#define _DEFAULT_SOURCE
#include <fenv.h>
#include <locale.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../engine/engine.h"
#include "model_test.h"

enum { VOCAB = 40, MAX_TOKENS = 4000 };

static int32_t tokens[MAX_TOKENS];
static float one[VOCAB], two[VOCAB];

static mf_engine_options small(void) {
    return (mf_engine_options){
        .size = sizeof(mf_engine_options), .n_ctx = 32, .n_seq = 2, .n_batch = 8, .n_threads = 2};
}

static int feed(mf_engine *e, int32_t seq, uint32_t first, uint32_t n, float *last) {
    const mf_chunk c = {.seq = seq,
                        .logits = last ? MF_LOGITS_LAST : MF_LOGITS_NONE,
                        .tokens = tokens + first,
                        .n_tokens = n};
    return mf_engine_forward(last, last ? VOCAB : 0, e, &c, 1);
}

static void must_feed(mf_engine *e, int32_t seq, uint32_t first, uint32_t n, float *last) {
    check(!feed(e, seq, first, n, last), "forward of %u tokens from %u on", n, first);
}

static uint32_t length(mf_engine *e, int32_t seq) {
    uint32_t n = UINT32_MAX;
    check(!mf_kv_len(&n, e, seq), "mf_kv_len");
    return n;
}

static void same(const float *a, const float *b, const char *what) {
    check(!memcmp(a, b, VOCAB * sizeof *a), "%s: logits differ, [0] is %.9g and %.9g", what,
          (double)a[0], (double)b[0]);
}

// The logits behind tokens [0, n) of a sequence that nothing ever happened to.
static void plain(float *last, mf_model *model, uint32_t n) {
    mf_engine_options o = small();
    o.n_ctx = MAX_TOKENS;
    mf_engine *e = must_start(model, &o);
    must_feed(e, 0, 0, n, last);
    mf_engine_free(e);
}

// ---- failures --------------------------------------------------------------------------------

static void test_full(mf_model *model) {
    const mf_engine_options o = small();
    mf_engine *e = must_start(model, &o);
    must_feed(e, 0, 0, 12, NULL);
    must_feed(e, 1, 0, 8, NULL);
    const mf_chunk both[] = {{.seq = 1, .tokens = tokens + 8, .n_tokens = 5},
                             {.seq = 0, .tokens = tokens + 12, .n_tokens = 8}};
    check(mf_engine_forward(NULL, 0, e, both, 2) == MF_KV_FULL, "13 rows for 12 cells");
    check(is_one_line(mf_last_error()) && strstr(mf_last_error(), "n_ctx"), "words of MF_KV_FULL");
    check(feed(e, 0, 12, 13, NULL) == MF_KV_FULL, "13 rows for 12 cells, in two batches");
    check(feed(e, 0, 12, MAX_TOKENS - 12, NULL) == MF_KV_FULL, "far too many rows");
    check(length(e, 0) == 12 && length(e, 1) == 8, "refusals left %u and %u rows", length(e, 0),
          length(e, 1));
    must_feed(e, 0, 12, 12, one);
    plain(two, model, 24);
    same(one, two, "after refused batches");
    check(feed(e, 1, 8, 1, NULL) == MF_KV_FULL, "no cell is left");
    check(!mf_kv_free(e, 0), "mf_kv_free");
    must_feed(e, 1, 8, 16, one);
    same(one, two, "in another sequence's cells");
    check(!mf_kv_check(e), "mf_kv_check");
    mf_engine_free(e);
}

// A trim that the window forbids, and the longest that it allows.
static void test_gone(mf_model *model) {
    mf_engine_options o = small();
    o.n_ctx = 64;  // the window's arena has 2 * 2 * 8 + 8 cells: 60 rows wrap it
    mf_engine *e = must_start(model, &o);
    must_feed(e, 0, 0, 60, NULL);
    uint32_t most = 0;
    check(!mf_kv_max_trim(&most, e, 0) && most < 52, "max_trim %u", most);
    check(mf_kv_trim(e, 0, most + 1) == MF_KV_GONE, "a trim of %u", most + 1);
    check(is_one_line(mf_last_error()), "words of MF_KV_GONE");
    check(length(e, 0) == 60, "a refused trim left %u rows", length(e, 0));
    must_feed(e, 0, 60, 1, one);
    plain(two, model, 61);
    same(one, two, "after a refused trim");
    // The row just appended took cells of older ones: less can be trimmed now.
    check(!mf_kv_trim(e, 0, 1) && !mf_kv_max_trim(&most, e, 0), "a trim of 1");
    check(most >= 8 && !mf_kv_trim(e, 0, most), "a trim of %u", most);
    must_feed(e, 0, 60 - most, most + 1, one);
    same(one, two, "after the longest trim");
    check(!mf_kv_check(e), "mf_kv_check");
    mf_engine_free(e);
}

static void test_decode_allocates_nothing(mf_model *model) {
    const mf_engine_options o = small();
    mf_engine *e = must_start(model, &o);
    must_feed(e, 0, 0, 10, NULL);
    must_feed(e, 0, 10, 1, one);  // the graph of one token is built
    const uint64_t asked = mem_asked();
    for (uint32_t i = 11; i < 30; i++) must_feed(e, 0, i, 1, one);
    check(mem_asked() == asked, "decode steps asked for %llu bytes",
          (unsigned long long)(mem_asked() - asked));
    mf_engine_free(e);
}

// ---- cancelling --------------------------------------------------------------------------------

typedef struct canceller {
    mf_engine *engine;
    long wait_ns;
    atomic_bool stop;
} canceller;

static void *cancel_until_stopped(void *arg) {
    canceller *c = arg;
    nanosleep(&(struct timespec){.tv_nsec = c->wait_ns}, NULL);
    while (!atomic_load(&c->stop)) mf_engine_cancel(c->engine);
    return NULL;
}

static void test_cancel(mf_model *model, long wait_ns, uint32_t n_batch) {
    mf_engine_options o = small();
    o.n_ctx = MAX_TOKENS;
    o.n_batch = n_batch;
    mf_engine *e = must_start(model, &o);
    mf_engine_cancel(e);  // nothing runs: nothing happens
    must_feed(e, 0, 0, 10, NULL);
    canceller c = {.engine = e, .wait_ns = wait_ns};
    pthread_t thread;
    if (pthread_create(&thread, NULL, cancel_until_stopped, &c)) {
        check(false, "a thread");
        return;
    }
    int status;
    uint32_t len;
    for (;;) {  // a fast machine may be done before it is cancelled
        status = feed(e, 0, 10, MAX_TOKENS - 100, NULL);
        len = length(e, 0);
        if (status) break;
        check(!mf_kv_free(e, 0), "mf_kv_free");
        while (feed(e, 0, 0, 10, NULL) == MF_CANCELLED) continue;
    }
    atomic_store(&c.stop, true);
    pthread_join(thread, NULL);
    check(status == MF_CANCELLED, "a cancelled forward: %d", status);
    check(len >= 10 && (len - 10) % n_batch == 0 && len < MAX_TOKENS - 90,
          "%u rows: not 10 and whole batches of %u", len, n_batch);
    check(!mf_kv_check(e), "mf_kv_check");
    must_feed(e, 0, len, 9, one);
    plain(two, model, len + 9);
    same(one, two, "after a cancelled forward");
    mf_engine_free(e);
}

// ---- threads and processes ---------------------------------------------------------------------

typedef struct feeder {
    mf_engine *engine;
    int32_t seq;
    uint32_t step, n;
    float last[VOCAB];
    int failures;
} feeder;

static void *feed_in_steps(void *arg) {
    feeder *f = arg;
    for (uint32_t i = 0; i < f->n; i += f->step) {
        const uint32_t n = f->n - i < f->step ? f->n - i : f->step;
        f->failures += feed(f->engine, f->seq, i, n, f->last) != 0;
    }
    return NULL;
}

static void test_two_threads(mf_model *model) {
    mf_engine_options o = small();
    o.n_ctx = 256;
    mf_engine *e = must_start(model, &o);
    feeder a = {.engine = e, .seq = 0, .step = 1, .n = 60};
    feeder b = {.engine = e, .seq = 1, .step = 7, .n = 90};
    pthread_t thread;
    if (pthread_create(&thread, NULL, feed_in_steps, &a)) {
        check(false, "a thread");
        return;
    }
    feed_in_steps(&b);
    pthread_join(thread, NULL);
    check(!a.failures && !b.failures, "%d and %d failures", a.failures, b.failures);
    plain(two, model, 60);
    same(a.last, two, "the first thread's sequence");
    plain(two, model, 90);
    same(b.last, two, "the second thread's sequence");
    check(!mf_kv_check(e), "mf_kv_check");
    mf_engine_free(e);
}

static void test_fork(mf_model *model) {
    const mf_engine_options o = small();
    mf_engine *e = must_start(model, &o);
    must_feed(e, 0, 0, 10, NULL);
    plain(two, model, 20);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        const int status = feed(e, 0, 10, 10, one);
        mf_engine_free(e);
        _exit(status ? 1 : memcmp(one, two, sizeof one) ? 2 : 0);
    }
    int status = -1;
    check(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
              WEXITSTATUS(status) == 0,
          "the child ended with %d", status);
    must_feed(e, 0, 10, 10, one);
    same(one, two, "the parent after a fork");
    mf_engine_free(e);
}

static atomic_bool fed_enough;

static void *feed_on(void *arg) {
    while (!atomic_load(&fed_enough) && !feed(arg, 0, 0, MAX_TOKENS - 100, NULL) &&
           !mf_kv_free(arg, 0))
        continue;
    return NULL;
}

// The child of a process whose other thread computes: the engine's lock is held for ever, and is
// refused.
static void test_fork_while_computing(mf_model *model) {
    mf_engine_options o = small();
    o.n_ctx = MAX_TOKENS;
    mf_engine *e = must_start(model, &o);
    pthread_t thread;
    if (pthread_create(&thread, NULL, feed_on, e)) {
        check(false, "a thread");
        return;
    }
    bool met = false, right = true;
    for (int tries = 0; tries < 200 && !met && right;
         tries++) {  // a fork may fall between two calls
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        const pid_t child = fork();
        if (child == 0) {
            uint32_t n;
            alarm(30);
            const int status = mf_kv_len(&n, e, 0);
            _exit(status == MF_OK ? 0 : status == MF_UNSUPPORTED ? 1 : 2);
        }
        int status = -1;
        right = child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
                WEXITSTATUS(status) < 2;
        met = right && WEXITSTATUS(status) == 1;
    }
    check(right && met, "a child forked from a computing process: %s",
          right ? "never met" : "no answer");
    atomic_store(&fed_enough, true);
    mf_engine_cancel(e);
    pthread_join(thread, NULL);
    mf_engine_free(e);
}

// ---- the host's modes --------------------------------------------------------------------------

// Rounding up, and where the machine has it, denormals flushed to zero: what a host may have set.
static void set_modes(void) {
    fesetround(FE_UPWARD);
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);  // FTZ, DAZ
#elif defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr | 1u << 24));  // FZ
#endif
}

static uint64_t modes(void) {
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr() & ~0x3fu;  // without the flags of what happened
#elif defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return fpcr;
#else
    return (uint64_t)fegetround();
#endif
}

static void test_modes(const gguf_build *b, mf_model *plain_model) {
    const mf_engine_options o = small();
    plain(two, plain_model, 20);
    fenv_t before;
    fegetenv(&before);
    set_modes();
    const uint64_t set = modes();
    mf_model *model = must_load(b);
    const bool kept_by_load = modes() == set;
    mf_engine *e = must_start(model, &o);
    const bool kept_by_new = modes() == set;
    const int status = feed(e, 0, 0, 20, one);
    const bool kept_by_forward = modes() == set;
    fesetenv(&before);
    check(set != modes(), "the modes cannot be set here");
    check(kept_by_load && kept_by_new && kept_by_forward,
          "the host's modes: kept by load %d, engine_new %d, forward %d", kept_by_load, kept_by_new,
          kept_by_forward);
    check(!status, "a forward in other modes");
    same(one, two, "loaded and run in other modes");
    mf_engine_free(e);
    mf_model_free(model);
}

static void test_locale(const gguf_build *b, mf_model *plain_model) {
    static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "C.UTF-8", ""};
    const mf_engine_options o = small();
    plain(two, plain_model, 20);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!setlocale(LC_ALL, names[i])) continue;
        mf_model *model = must_load(b);
        mf_engine *e = must_start(model, &o);
        must_feed(e, 0, 0, 20, one);
        same(one, two, "in another locale");
        mf_engine_free(e);
        mf_model_free(model);
    }
    setlocale(LC_ALL, "C");
}

// All instruction sets, thread counts and cuts of the prompt give the same bits.
static void test_law(mf_model *model) {
    char isas[64];
    snprintf(isas, sizeof isas, "%s", mf_isas());
    plain(two, model, 50);
    for (char *save, *isa = strtok_r(isas, ",", &save); isa; isa = strtok_r(NULL, ",", &save)) {
        for (uint32_t threads = 1; threads <= 3; threads++) {
            mf_engine_options o = small();
            o.isa = isa;
            o.n_ctx = 50;
            o.n_threads = threads;
            o.n_batch = 1 + 6 * threads;
            mf_engine *e = must_start(model, &o);
            must_feed(e, 0, 0, 50, one);
            same(one, two, isa);
            mf_engine_free(e);
        }
    }
}

// A device that reads or turns fewer formats: refused by name, at the load or at the edit.
static void test_poor_device(mf_model *model) {
    const device *const dev = model->dev;
    device poor = *dev;
    poor.name = "poor";
    poor.kv_formats = 1 << KV_FORMAT_F32 | 1 << KV_FORMAT_F16;
    poor.rope_formats = 1 << KV_FORMAT_F32;
    model->dev = &poor;
    mf_engine_options o = small();
    mf_engine *e = NULL;
    o.cache_type = "q8_0";
    check(mf_engine_new(&e, model, &o) == MF_UNSUPPORTED &&
              strstr(mf_last_error(), "the poor device does not read a q8_0 cache"),
          "q8_0: %s", mf_last_error());
    o.cache_type = "f16";
    check(!mf_engine_new(&e, model, &o), "f16: %s", mf_last_error());
    must_feed(e, 0, 0, 10, NULL);
    check(mf_kv_shift(e, 0, 8, 2) == MF_UNSUPPORTED && mf_kv_rm(e, 0, 7, 8) == MF_UNSUPPORTED &&
              strstr(mf_last_error(), "trim sequence 0 or free it"),
          "edits: %s", mf_last_error());
    check(length(e, 0) == 10, "%u rows", length(e, 0));
    check(!mf_kv_trim(e, 0, 1), "trim: %s", mf_last_error());
    must_feed(e, 0, 9, 1, one);
    mf_kv_free(e, 0);
    must_feed(e, 0, 0, 10, two);
    check(!memcmp(one, two, sizeof one), "logits after refused edits");
    mf_engine_free(e);
    model->dev = dev;
}

int main(void) {
    unsetenv("MINFER_ISA");
    unsetenv("MINFER_CACHE_TYPE");
    const size_t alive = mem_alive();
    uint64_t state = 5;
    for (size_t i = 0; i < MAX_TOKENS; i++) tokens[i] = (int32_t)(model_rand(&state) % VOCAB);
    const gguf_build b = build_model(&two_groups);
    mf_model *model = must_load(&b);
    test_law(model);
    test_full(model);
    test_gone(model);
    test_cancel(model, 0, 8);
    test_cancel(model, 3000000, 16);
    test_two_threads(model);
    test_decode_allocates_nothing(model);
    test_fork(model);
    test_fork_while_computing(model);
    test_modes(&b, model);
    test_locale(&b, model);
    test_poor_device(model);
    mf_model_free(model);
    check(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
    free(b.bytes);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
