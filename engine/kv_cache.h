// Layer 2: which cell holds which row. Pure integers: no float, no I/O, no model. One object owns,
// per group, an arena of cells, and per sequence the positions of its rows and, per group, its
// spans. Rows are moved by nobody here: an accepted call says what is to be done to them.
//
// Every call does all it was asked or, with a status and a line, nothing.
#ifndef MF_KV_CACHE_H
#define MF_KV_CACHE_H

#include "base.h"

enum {
    KV_POS_MAX = 1 << 24,  // first illegal position: each one below is exact in a float
    KV_MAX_GROUPS = 8,
    KV_MAX_SEQS = 4096,    // of an engine, and so of a file
    KV_MAP_MAX_SPANS = 64  // runs of cells that one read may carry
};

typedef enum kv_kind { KV_FULL, KV_SLIDING } kv_kind;

typedef struct kv_group_spec {
    kv_kind kind;
    uint32_t window;   // KV_SLIDING: a query at q sees positions (q - window, q]; at least 1
    uint32_t n_cells;  // of the arena, below 2^31; cell n_cells is a spare row of the device's
} kv_group_spec;

typedef struct kv_config {
    kv_group_spec groups[KV_MAX_GROUPS];
    uint32_t n_groups;
    uint32_t n_seq;    // below 2^31
    uint32_t n_batch;  // most rows of one append
    bool can_rope;     // the device can move rows to other positions
} kv_config;

typedef struct kv_append {
    int32_t seq;
    uint32_t n;  // rows, at least 1
} kv_append;

// Cells [cell, cell + len) of a group.
typedef struct kv_cell_run {
    uint32_t group, cell, len;
} kv_cell_run;

// What an accepted call asks of the device, before anything is read or stored: the moves in their
// order, then the K rows in `roped` turned by `delta` positions more. Borrowed until the next call
// that gives work.
typedef struct kv_work {
    const mf_kv_move *moves;
    uint32_t n_moves;
    const kv_cell_run *roped;
    uint32_t n_roped;
    int32_t delta;
} kv_work;

typedef struct kv_stats {
    uint32_t n_used, n_shared, n_reserved, n_free_runs, largest_run;  // see mf_kv_group
    uint64_t n_stale, compactions, generation;
} kv_stats;

typedef struct kv_cache kv_cache;

int kv_cache_new(kv_cache **out, const kv_config *config);
void kv_cache_free(kv_cache *kv);

// Appends rows at next_pos.. of each sequence, in private cells of every group (MF_KV_FULL,
// MF_KV_RANGE, MF_ARG). Sum of n at most n_batch; a sequence at most once. A group in which some
// sequence's read would take more than KV_MAP_MAX_SPANS is regrouped: the moves.
int kv_cache_append(kv_work *work, kv_cache *kv, const kv_append *items, uint32_t n_items);
// MF_KV_FULL unless every item could be appended now, in batches of n_batch rows cut from the items
// in their order. Changes nothing; not bound by n_batch.
int kv_cache_can_append(kv_cache *kv, const kv_append *items, uint32_t n_items);

int kv_cache_trim(kv_cache *kv, int32_t seq, uint32_t n);
int kv_cache_max_trim(uint32_t *n, const kv_cache *kv, int32_t seq);
int kv_cache_free_seq(kv_cache *kv, int32_t seq);
int kv_cache_share(kv_cache *kv, int32_t dst, int32_t src, uint32_t n);
int kv_cache_rm(kv_work *work, kv_cache *kv, int32_t seq, int32_t p0, int32_t p1);
int kv_cache_shift(kv_work *work, kv_cache *kv, int32_t seq, int32_t p0, int32_t delta);

int kv_cache_reserve(kv_cache *kv, int32_t seq, uint32_t n);
int kv_cache_reserve_with_defrag(kv_work *work, kv_cache *kv, int32_t seq, uint32_t n);
int kv_cache_defrag(kv_work *work, kv_cache *kv, uint32_t need);
// Gives away the moves of the last call's work; free with mem_free. NULL if there were none.
mf_kv_move *kv_cache_take_moves(kv_cache *kv);

int kv_cache_len(uint32_t *rows, const kv_cache *kv, int32_t seq);
// Leading rows that equal a plain prefill of their tokens: none was moved, and none has seen a row
// that was removed since. Whoever has the same tokens may read these rows and no others.
int kv_cache_clean(uint32_t *rows, const kv_cache *kv, int32_t seq);
int kv_cache_next_pos(uint32_t *pos, const kv_cache *kv, int32_t seq);
// Positions of rows [first, first + n).
int kv_cache_positions(uint32_t *pos, const kv_cache *kv, int32_t seq, uint32_t first, uint32_t n);
// Borrowed until the next change: the live rows of a sequence as spans in position order, maximal.
int kv_cache_spans(const mf_kv_span **spans, uint32_t *n, const kv_cache *kv, uint32_t group,
                   int32_t seq);
int kv_cache_stats(kv_stats *out, const kv_cache *kv, uint32_t group);
const kv_group_spec *kv_cache_group(const kv_cache *kv, uint32_t group);
uint32_t kv_cache_n_groups(const kv_cache *kv);
void kv_cache_config(kv_config *out, const kv_cache *kv);  // what it was made with

// ---- the windows of a batch: what a forward reads and writes ---------------------------------

// How the queries of a batch find the rows they see, the cheapest first.
typedef enum kv_window_mode {
    KV_WINDOW_CAUSAL,  // one sequence, position p is in cell p: nothing to be told
    KV_WINDOW_RANGE,   // the window of each query is the cells [lo, hi); cell c holds position
                       // q - (hi - 1 - c)
    KV_WINDOW_RUNS,    // at most KV_MAP_MAX_SPANS spans for each sequence; a query at q reads their
                       // positions in (q - window, q]
    KV_WINDOW_MODES
} kv_window_mode;
enum { KV_WINDOW_ALL = (1 << KV_WINDOW_MODES) - 1 };

typedef struct kv_range {
    uint32_t lo, hi;
} kv_range;

typedef struct kv_window {
    kv_window_mode mode;
    kv_range *ranges;          // [rows of all items], the caller's; KV_WINDOW_RANGE
    const mf_kv_span **spans;  // [n_items], the caller's; KV_WINDOW_RUNS, borrowed from the cache
    uint32_t *n_spans;         // [n_items], the caller's; KV_WINDOW_RUNS
} kv_window;

// The window of the last items[i].n rows of each sequence as queries, in the first mode of the bit
// set `modes` that is true; MF_KV_SPANS if none is.
int kv_cache_window(kv_window *out, const kv_cache *kv, uint32_t group, const kv_append *items,
                    uint32_t n_items, uint32_t modes);
// Cells of rows [first, first + n) in a group: where a store writes them. All must be live there,
// and nobody else may read them (MF_KV_SHARED).
int kv_cache_store_cells(int32_t *cells, const kv_cache *kv, uint32_t group, int32_t seq,
                         uint32_t first, uint32_t n);

// Walks every invariant; MF_INTERNAL names the broken one.
int kv_cache_check(const kv_cache *kv);

#endif
