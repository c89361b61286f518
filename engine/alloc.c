// Owns the allocation counters that fault tests use; otherwise a thin layer over calloc and mmap.
#define _GNU_SOURCE
#include "alloc.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "error.h"

enum { HUGE_FROM = 8 << 20 };

static _Atomic size_t until_failure = SIZE_MAX;
static _Atomic size_t alive;
static _Atomic uint64_t asked;

void mem_fail_after(size_t n) { atomic_store(&until_failure, n); }

size_t mem_alive(void) { return atomic_load(&alive); }

uint64_t mem_asked(void) { return atomic_load(&asked); }

// Counts a request; true if a test wants it to fail.
static bool refused(size_t bytes) {
    atomic_fetch_add_explicit(&asked, bytes, memory_order_relaxed);
    size_t left = atomic_load_explicit(&until_failure, memory_order_relaxed);
    if (left == SIZE_MAX) return false;
    // Counting down to SIZE_MAX by wrapping would switch the fault off: exactly one allocation
    // fails.
    return atomic_fetch_sub(&until_failure, 1) == 0;
}

static void *no_memory(size_t n, size_t size) {
    fail(MF_NOMEM,
         "out of memory: %zu x %zu bytes; use a smaller n_ctx or n_batch, or close other programs",
         n, size);
    return NULL;
}

void *mem_alloc(size_t n, size_t size) {
    size_t bytes;
    if (!size_mul(&bytes, n, size) || refused(bytes)) return no_memory(n, size);
    void *p = calloc(bytes ? bytes : 1, 1);
    if (!p) return no_memory(n, size);
    atomic_fetch_add(&alive, 1);
    return p;
}

void *mem_grow(void *old, size_t n, size_t size) {
    size_t bytes;
    if (!size_mul(&bytes, n, size) || refused(bytes)) return no_memory(n, size);
    void *p = realloc(old, bytes ? bytes : 1);
    if (!p) return no_memory(n, size);
    if (!old) atomic_fetch_add(&alive, 1);
    return p;
}

void mem_free(void *p) {
    if (!p) return;
    atomic_fetch_sub(&alive, 1);
    free(p);
}

void *mem_pages(size_t bytes) {
    if (refused(bytes)) return no_memory(1, bytes);
    void *p =
        mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return no_memory(1, bytes);
#ifdef MADV_HUGEPAGE
    // Advice only: walking a long cache is a tenth faster with 2 MB pages. In small regions they
    // bring nothing, and each has to be zeroed before its first row: 0.1 s until the first token.
    if (bytes >= HUGE_FROM) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    atomic_fetch_add(&alive, 1);
    return p;
}

void mem_pages_free(void *p, size_t bytes) {
    if (!p) return;
    atomic_fetch_sub(&alive, 1);
    munmap(p, bytes ? bytes : 1);
}
