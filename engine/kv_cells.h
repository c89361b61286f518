// Layer 2: one arena of cells. It knows how many readers each cell has and where a new run fits
// best; it does not know what a cell holds or who reads it.
#ifndef MF_KV_CELLS_H
#define MF_KV_CELLS_H

#include "base.h"

enum {
    KV_BIT_LEVELS = 6,     // 64^6 cells
    KV_FREE_CLASSES = 31,  // class i: free runs of [2^i, 2^(i+1)) cells
    KV_GROW = 64,          // cells a sequence should find free behind its tail
    KV_LOOK = 64           // runs of a class that are looked at for the best place
};
#define KV_NO_CELL UINT32_MAX

// Which cells start an extent, as a tree of words: a bit of level i+1 says that a word of level i
// is not zero.
typedef struct kv_bits {
    uint64_t *words;  // [n_words] all levels, the lowest first
    size_t n_words;
    size_t level_at[KV_BIT_LEVELS];
    uint32_t n_levels;
} kv_bits;

// Valid at the first cell of an extent only.
typedef struct kv_extent {
    uint32_t len, readers;
    uint32_t prev, next;  // of its free class; readers == 0
    bool guarded;         // right behind another sequence's tail
} kv_extent;

// Extents: maximal runs of cells with one number of readers. They tile [0, n_cells).
typedef struct kv_cells {
    uint32_t n_cells, n_free;
    uint32_t n_shared;  // cells with several readers
    uint32_t n_extents, n_free_runs;
    kv_bits starts;
    kv_extent *at;                        // [n_cells]
    uint32_t free_head[KV_FREE_CLASSES];  // KV_NO_CELL: none
} kv_cells;

// All memory that the arena ever needs: no later call can fail.
int kv_cells_new(kv_cells *cells, uint32_t n_cells);
void kv_cells_free(kv_cells *cells);
// Every cell free again.
void kv_cells_reset(kv_cells *cells);

// How far the extent that holds `cell` goes from there, at least 1 cell, and its readers.
uint32_t kv_cells_extent(uint32_t *readers, const kv_cells *cells, uint32_t cell);
// Cells of the largest free run; 0 if none is free.
uint32_t kv_cells_largest(const kv_cells *cells);

// Free cells right at `cell`, which may be KV_NO_CELL.
uint32_t kv_cells_room(const kv_cells *cells, uint32_t cell);
// The free run right behind a tail is kept for the sequence that ends there, while half of it can
// be.
void kv_cells_guard(kv_cells *cells, uint32_t cell, bool guarded);
// Where up to `n` of the free cells are best taken: *first, and as the result how many, at least 1.
// `tail` is the cell right behind the sequence's last row, or KV_NO_CELL. n_free must not be 0.
uint32_t kv_cells_place(uint32_t *first, const kv_cells *cells, uint32_t n, uint32_t tail);
// One reader more (delta = 1) or less (-1) for each of the cells [first, first + n).
void kv_cells_read(kv_cells *cells, uint32_t first, uint32_t n, int32_t delta);

// `readers` [n_cells] as counted from the sequences.
int kv_cells_check(const kv_cells *cells, const uint32_t *readers);

#endif
