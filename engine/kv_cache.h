// Layer 2: which cell holds which row. Pure integers: no float, no I/O, no model. One object owns,
// per group, an arena of cells, and per sequence the positions of its rows and, per group, its
// spans. Rows are moved by nobody here.
#ifndef MF_KV_CACHE_H
#define MF_KV_CACHE_H

#include "base.h"

enum {
    KV_POS_MAX = 1 << 24,  // first illegal position: each one below is exact in a float
    KV_MAX_GROUPS = 8
};

typedef enum kv_kind { KV_FULL, KV_SLIDING } kv_kind;

typedef struct kv_group_spec {
    kv_kind kind;
    uint32_t window;   // KV_SLIDING: a query at q sees positions (q - window, q]; at least 1
    uint32_t n_cells;  // of the arena, below 2^31
} kv_group_spec;

typedef struct kv_append {
    int32_t seq;
    uint32_t n;  // rows, at least 1
} kv_append;

typedef struct kv_cache kv_cache;

int kv_cache_new(kv_cache **out, const kv_group_spec *groups, uint32_t n_groups, uint32_t n_seq,
                 uint32_t n_batch);
void kv_cache_free(kv_cache *kv);

// Appends rows at next_pos.. of each sequence, in private cells of every group; all or nothing
// (MF_KV_FULL, MF_KV_RANGE, MF_ARG). Sum of n at most n_batch; a sequence at most once.
int kv_cache_append(kv_cache *kv, const kv_append *items, uint32_t n_items);
// MF_KV_FULL unless every item could be appended now, in batches of n_batch rows cut from the items
// in their order. Changes nothing; not bound by n_batch.
int kv_cache_can_append(const kv_cache *kv, const kv_append *items, uint32_t n_items);
int kv_cache_trim(kv_cache *kv, int32_t seq, uint32_t n);
int kv_cache_max_trim(uint32_t *n, const kv_cache *kv, int32_t seq);
int kv_cache_free_seq(kv_cache *kv, int32_t seq);

int kv_cache_len(uint32_t *rows, const kv_cache *kv, int32_t seq);
int kv_cache_next_pos(uint32_t *pos, const kv_cache *kv, int32_t seq);
// Positions of rows [first, first + n).
int kv_cache_positions(uint32_t *pos, const kv_cache *kv, int32_t seq, uint32_t first, uint32_t n);
// Cells of rows [first, first + n) in a group: where a store writes them. All must be live there.
int kv_cache_cells(int32_t *cells, const kv_cache *kv, uint32_t group, int32_t seq, uint32_t first,
                   uint32_t n);
// Borrowed until the next change: the live rows of a sequence as spans in position order, maximal.
int kv_cache_spans(const mf_kv_span **spans, uint32_t *n, const kv_cache *kv, uint32_t group,
                   int32_t seq);
uint32_t kv_cache_used(const kv_cache *kv, uint32_t group);  // cells that hold a row
const kv_group_spec *kv_cache_group(const kv_cache *kv, uint32_t group);
uint32_t kv_cache_n_groups(const kv_cache *kv);

// Walks every invariant; MF_INTERNAL names the broken one.
int kv_cache_check(const kv_cache *kv);

#endif
