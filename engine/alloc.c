// Owns the allocation counters that fault tests use; otherwise a thin layer over calloc and mmap.
#define _GNU_SOURCE
#include "alloc.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "error.h"

enum {
    HUGE_FROM = 8 << 20,
    HUGE_PAGE = 2 << 20,
    PAGE_MAX = 64 << 10  // a multiple of the page sizes of x86-64 and ARM
};

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

static bool is_huge(size_t bytes) { return bytes >= HUGE_FROM && bytes < SIZE_MAX - 2 * HUGE_PAGE; }

// What is mapped for so many bytes: whole pages where it is cut out of more.
static size_t mapped_bytes(size_t bytes) {
    if (!is_huge(bytes)) return bytes ? bytes : 1;
    return (bytes + PAGE_MAX - 1) / PAGE_MAX * PAGE_MAX;
}

// The part of a mapping of bytes + HUGE_PAGE that begins with a huge page; the rest is given back.
// Advice only. A core reads half as much again from 2 MB pages; what it costs is that each is
// zeroed whole at its first touch, so that small regions go without.
static void *cut_huge(uint8_t *p, size_t bytes) {
    const size_t before = -(uintptr_t)p % HUGE_PAGE;
    if (before) munmap(p, before);
    p += before;
    munmap(p + bytes, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return p;
}

void *mem_pages(size_t bytes) {
    if (refused(bytes)) return no_memory(1, bytes);
    const size_t size = mapped_bytes(bytes), more = is_huge(bytes) ? HUGE_PAGE : 0;
    void *p = mmap(NULL, size + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return no_memory(1, bytes);
    if (more) p = cut_huge(p, size);
    atomic_fetch_add(&alive, 1);
    return p;
}

void mem_pages_free(void *p, size_t bytes) {
    if (!p) return;
    atomic_fetch_sub(&alive, 1);
    munmap(p, mapped_bytes(bytes));
}

// Lies at the start of its pages; arrays follow.
typedef struct arena_block {
    struct arena_block *next;
    size_t bytes, used;  // with this
} arena_block;

enum { ARENA_ALIGN = 64, BLOCK_MIN = HUGE_FROM, BLOCK_MAX = 256 << 20 };

// As large as all before it, so that there are few. What is left of the one before stays untouched:
// addresses, no memory.
static arena_block *add_block(mem_arena *a, size_t needed) {
    size_t bytes = a->bytes < BLOCK_MIN ? BLOCK_MIN : a->bytes > BLOCK_MAX ? BLOCK_MAX : a->bytes;
    if (bytes < needed) bytes = needed;
    arena_block *const block = mem_pages(bytes);
    if (!block) return NULL;
    *block = (arena_block){.next = a->blocks, .bytes = bytes, .used = ARENA_ALIGN};
    a->blocks = block;
    a->bytes += bytes;
    return block;
}

void *mem_arena_alloc(mem_arena *a, size_t bytes) {
    if (bytes > SIZE_MAX - 2 * ARENA_ALIGN) return no_memory(1, bytes);
    const size_t size = (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    arena_block *block = a->blocks;
    if (!block || block->bytes - block->used < size) block = add_block(a, ARENA_ALIGN + size);
    if (!block) return NULL;
    void *const p = (char *)block + block->used;
    block->used += size;
    return p;
}

void mem_arena_free(mem_arena *a) {
    for (arena_block *block = a->blocks, *next; block; block = next) {
        next = block->next;
        mem_pages_free(block, block->bytes);
    }
    *a = (mem_arena){0};
}
