// Measures what the machine can do at most, all threads together: multiply-adds of registers alone,
// and bytes read from memory. Each rate is the best of a few runs that a clock ends, so that a slow
// build takes no longer than a fast one; all memory is had before the first of them.
//
// In a run every task works until the end, and so has a thread of its own. A thread that the system
// keeps from starting leaves its task to another, which finds the time over.
#define _GNU_SOURCE
#include "cpu_limits.h"

#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "../alloc.h"
#include "../error.h"
#include "../pool.h"
#include "kernels.h"

enum {
    RUNS = 10,
    RUN_MS = 20,
    PEAK_ROUNDS = 1 << 14,     // between two looks at the clock: some 40 us
    READ_STEP = 1 << 20,       // bytes, likewise
    MEMORY_MAX = 1 << 30,      // bytes to read: far more than caches hold,
    MEMORY_PART = 8,           // and at most this part of the machine's memory
    LINE = 64,                 // bytes that memory gives at a time
    PREFETCH_BYTES = 4 << 10,  // ahead, as the matrix products do
    PAGE = 4 << 10
};

// The memory that one task reads, in circles through all runs: what comes next has been out of the
// caches for longest.
typedef struct share {
    uint8_t *from;
    size_t at;
} share;

typedef struct trial {
    pool *threads;
    peak_fn *peak;
    share *shares;       // [pool_threads]
    size_t share_bytes;  // a multiple of READ_STEP
    double end;          // of the run, as now() has it
    _Atomic uint64_t done;
} trial;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run_peak(void *arg, uint32_t task, uint32_t thread) {
    (void)task;
    (void)thread;
    trial *const t = arg;
    uint64_t done = 0;
    do done += t->peak(PEAK_ROUNDS);
    while (now() < t->end);
    atomic_fetch_add(&t->done, done);
}

// The first touch is what makes memory of a mapping; untouched, all of it is one page of zeros.
static void touch(void *arg, uint32_t task, uint32_t thread) {
    (void)thread;
    const trial *const t = arg;
    for (size_t i = 0; i < t->share_bytes; i += PAGE) t->shares[task].from[i] = 1;
}

static void read_lines(const uint8_t *from) {
    uint64_t sum = 0;
    for (size_t i = 0; i < READ_STEP; i += LINE) {
        // A number: it may lie behind the mapping.
        __builtin_prefetch((const void *)((uintptr_t)(from + i) + PREFETCH_BYTES));
        sum += *(const uint64_t *)(const void *)(from + i);
    }
    __asm__ volatile("" : : "r"(sum));
}

static void run_reads(void *arg, uint32_t task, uint32_t thread) {
    (void)thread;
    trial *const t = arg;
    share *const s = &t->shares[task];
    uint64_t done = 0;
    do {
        read_lines(s->from + s->at);
        s->at = (s->at + READ_STEP) % t->share_bytes;
        done += READ_STEP;
    } while (now() < t->end);
    atomic_fetch_add(&t->done, done);
}

// Per second.
static double best_rate(trial *t, pool_task *task) {
    double best = 0;
    for (int i = 0; i < RUNS; i++) {
        const double start = now();
        t->end = start + 1e-3 * RUN_MS;
        atomic_store(&t->done, 0);
        pool_run(t->threads, task, t, pool_threads(t->threads));
        const double rate = (double)atomic_load(&t->done) / (now() - start);
        if (rate > best) best = rate;
    }
    return best;
}

// A whole number of steps, at least one.
static size_t choose_share_bytes(uint32_t n_threads) {
    size_t bytes = MEMORY_MAX;
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page > 0 && (size_t)pages / MEMORY_PART < bytes / (size_t)page)
        bytes = (size_t)pages / MEMORY_PART * (size_t)page;
    const size_t steps = bytes / n_threads / READ_STEP;
    return (steps ? steps : 1) * READ_STEP;
}

static void measure(mf_limits *out, trial *t, const cpu_kernels *k) {
    t->peak = k->peak_int8;
    out->int8_macs = best_rate(t, run_peak);
    t->peak = k->peak_f32;
    out->f32_fmas = best_rate(t, run_peak);
    pool_run(t->threads, touch, t, pool_threads(t->threads));
    out->read_bytes = best_rate(t, run_reads);
}

int cpu_limits(mf_limits *out, const char *isa, uint32_t n_threads) {
    const cpu_kernels *k;
    TRY(kernels_choose(&k, isa));
    trial t = {0};
    TRY(pool_new(&t.threads, n_threads ? n_threads : pool_default_threads()));
    const uint32_t n = pool_threads(t.threads);
    t.share_bytes = choose_share_bytes(n);
    uint8_t *const memory = mem_pages(n * t.share_bytes);
    t.shares = memory ? mem_alloc(n, sizeof *t.shares) : NULL;
    if (t.shares) {
        for (uint32_t i = 0; i < n; i++) t.shares[i].from = memory + i * t.share_bytes;
        measure(out, &t, k);
    }
    const int status = t.shares ? MF_OK : MF_NOMEM;
    mem_free(t.shares);
    mem_pages_free(memory, n * t.share_bytes);
    pool_free(t.threads);
    return status;
}
