// Memory: every allocation of the library goes through here, so a test can make the N-th one fail.
#ifndef MF_ALLOC_H
#define MF_ALLOC_H

#include "base.h"

// n * size bytes, zeroed; NULL with MF_NOMEM's line set when the product wraps or memory is short.
// n * size = 0 gives a valid pointer.
void *mem_alloc(size_t n, size_t size);
// Like realloc, with the same rules; new bytes are not zeroed. On failure `old` is untouched.
void *mem_grow(void *old, size_t n, size_t size);
void mem_free(void *p);

// Zeroed pages for weights and KV rows, 64-byte aligned (2 MB pages where the system has them).
void *mem_pages(size_t bytes);
void mem_pages_free(void *p, size_t bytes);

// Many arrays of pages that are freed together and share 2 MB pages where the system has them.
// Starts zeroed.
typedef struct mem_arena {
    struct arena_block *blocks;  // the newest first
    size_t bytes;                // of all
} mem_arena;

// Zeroed, 64-byte aligned; NULL as mem_alloc.
void *mem_arena_alloc(mem_arena *a, size_t bytes);
void mem_arena_free(mem_arena *a);

// Tests: the allocation after `n` more successful ones fails, once (or, with n == SIZE_MAX, none
// does).
void mem_fail_after(size_t n);
// Allocations alive; a test compares before and after.
size_t mem_alive(void);
// Bytes ever asked for, an upper bound of what is held; a test bounds what a call may take.
uint64_t mem_asked(void);

#endif
