// Layer 2, inside: what the files that implement kv_cache.h share. Nobody above includes it.
#ifndef MF_KV_STORE_H
#define MF_KV_STORE_H

#include "kv_cache.h"
#include "kv_cells.h"
#include "kv_moves.h"
#include "kv_seq.h"

typedef struct kv_plan kv_plan;  // kv_compact.c

typedef struct kv_group {
    kv_group_spec spec;
    uint32_t window;  // KV_WHOLE_WINDOW: full
    uint32_t hunk;    // most rows of one eviction
    kv_cells cells;
    uint32_t *needed;  // [n_cells]: room to count in, all zero between calls
    uint64_t compactions, generation;
    kv_plan *plan;  // the memory of a regroup, NULL if none has been asked for
} kv_group;

typedef struct kv_runs {
    kv_cell_run *at;
    uint32_t n, capacity;
} kv_runs;

typedef struct kv_spans {
    mf_kv_span *at;
    uint32_t n, capacity;
} kv_spans;

struct kv_cache {
    uint32_t n_groups, n_seq, n_batch, max_gaps;
    bool can_rope;
    kv_group groups[KV_MAX_GROUPS];
    kv_seq *seqs;    // [n_seq]
    kv_moves moves;  // the work of the last call
    kv_runs roped;
    kv_spans edited;  // room for the spans that an edit moves
};

// ---- kv_cache.c ----
// Most gaps between the positions of a sequence. Where rows lie can alone take
// 1 + floor(log2 n_seq) runs of a read (kv_compact.c); shifts may use up the others.
uint32_t kv_max_gaps(uint32_t n_seq);
kv_seq *kv_find_seq(const kv_cache *kv, int32_t seq);  // NULL after MF_ARG
int kv_find_group(const kv_cache *kv, uint32_t group);
// Of a call that gives work: there is none yet; all of it is in kv->moves and kv->roped.
void kv_work_begin(kv_work *work, kv_cache *kv);
void kv_work_end(kv_work *work, const kv_cache *kv);

// ---- kv_room.c: lazy windows and placement ----
// Rows of a sequence in a group, piece by piece: cells that follow each other and have one number
// of readers.
typedef struct kv_walk {
    const kv_cells *cells;
    const mf_kv_span *span;
    uint32_t skip;    // of the span: before the next row
    uint32_t n_left;  // rows still to come
} kv_walk;
typedef struct kv_piece {
    uint32_t cell, len, readers;
} kv_piece;
// Rows [from, to); all live in the group, unless there are none.
kv_walk kv_walk_rows(const kv_cache *kv, uint32_t g, uint32_t s, uint32_t from, uint32_t to);
bool kv_walk_next(kv_piece *piece, kv_walk *walk);

// Rows of a sequence that its next query does not see.
uint32_t kv_stale(const kv_cache *kv, uint32_t g, uint32_t s);
// Counts in group->needed the sequences that need a cell: rows [from, to) of one sequence more (1)
// or less (-1). Returns the cells that are needed for the first time, or no more.
uint32_t kv_tally(kv_cache *kv, uint32_t g, uint32_t s, uint32_t from, uint32_t to, int32_t delta);
// The needed rows of one sequence: kv_tally +1.
uint32_t kv_tally_needed(kv_cache *kv, uint32_t g, uint32_t s);
// After any tallies of live rows: all zero again.
void kv_tally_clear(kv_cache *kv, uint32_t g);
// Used cells that become free once every stale row is let go: those that no sequence needs.
uint32_t kv_freeable(kv_cache *kv, uint32_t g);
// The oldest n rows of a sequence are lost.
void kv_forget(kv_cache *kv, uint32_t g, uint32_t s, uint32_t n);
// THE eviction policy: the sequence with the most stale rows (ties: the lowest) gives up its oldest
// hunk. Something must be stale.
void kv_evict(kv_cache *kv, uint32_t g);
// MF_KV_FULL with its line: of the `needed` cells that a call must find, `given` can be had.
int kv_full(const kv_cache *kv, uint32_t g, uint64_t given, uint64_t needed);
// MF_KV_FULL unless n cells are free or freeable.
int kv_check_room(kv_cache *kv, uint32_t g, uint64_t n);
// Evicts until n cells are free: kv_check_room has said that it can be.
void kv_make_room(kv_cache *kv, uint32_t g, uint32_t n);
// A sliding group: could `total` rows be appended in batches cut from the items in their order?
bool kv_batches_fit(kv_cache *kv, uint32_t g, const kv_append *items, uint32_t n_items,
                    uint64_t total);
// Most pieces that n cells are placed in, after the evictions for them.
uint32_t kv_pieces(const kv_cache *kv, uint32_t g, uint32_t n);
// One piece of up to n free cells for sequence s, behind cell `tail` - 1 if it can be, and read
// once from now on. Returns its length. `tail`: KV_NO_CELL for none.
uint32_t kv_take(uint32_t *cell, kv_cache *kv, uint32_t g, uint32_t s, uint32_t n, uint32_t tail);
// The reservation of a sequence in a full group. Memory to hold n cells more than now, in whatever
// pieces: kv_hold_take cannot fail then, also after kv_hold_release or a compaction.
int kv_hold_reserve(kv_cache *kv, uint32_t g, uint32_t s, uint32_t n);
// Gives the last cells back until n are left.
void kv_hold_release(kv_cache *kv, uint32_t g, uint32_t s, uint32_t n);
// n cells more; they are free.
void kv_hold_take(kv_cache *kv, uint32_t g, uint32_t s, uint32_t n);

// ---- kv_compact.c ----
// All memory that kv_regroup of the group needs; kv->moves included. An append calls it before it
// places its rows, with room for their spans already in the parts.
int kv_regroup_reserve(kv_cache *kv, uint32_t g);
// Lays the rows out so that every sequence fits into a read; appends to kv->moves. Cannot fail
// after kv_regroup_reserve, if no call came between.
void kv_regroup(kv_cache *kv, uint32_t g);
// Gives that memory back; a regroup has done it.
void kv_regroup_release(kv_group *group);

// ---- kv_window.c ----
// Spans of the rows that the last n rows of a sequence see as queries (n = 0: the next query).
// Borrowed; the first one may reach further back than the window.
uint32_t kv_read_spans(const mf_kv_span **spans, const kv_cache *kv, uint32_t g, uint32_t s,
                       uint32_t n);

#endif
