// Layer 2: in which order rows can be moved so that none is overwritten before it is read.
#ifndef MF_KV_MOVES_H
#define MF_KV_MOVES_H

#include "base.h"

enum { KV_NO_SCRATCH = -1 };

// A growable array of moves.
typedef struct kv_moves {
    mf_kv_move *at;
    uint32_t n, capacity;
} kv_moves;

int kv_moves_reserve(kv_moves *moves, uint32_t n);  // room for n in all
void kv_moves_free(kv_moves *moves);

// Appends to `ordered` the moves, cut where needed, in an order in which executing them in turn,
// each with memmove's meaning, equals all of them at once. Groups are independent and come in
// rising order; a move onto itself is left out. `scratch`: a row outside the arenas that cycles may
// use, or KV_NO_SCRATCH (MF_KV_CYCLE). MF_ARG: n below 1, a negative cell, or an end beyond
// 2^24 + 1; MF_KV_OVERLAP: two moves read or write one row, or one names the scratch row. A failure
// leaves `ordered` as it was.
int kv_moves_order(kv_moves *ordered, const mf_kv_move *moves, size_t n, int32_t scratch);

// Cells [lo, hi) whose rows have been read.
typedef struct kv_hole {
    int32_t lo, hi;
} kv_hole;

// The memory that an order of n moves of n_rows rows takes, for those who may not fail later.
typedef struct kv_order {
    mf_kv_move *by_src, *by_dst;  // [n]
    uint32_t *first;              // [n]: rows of by_dst before this move
    kv_hole *holes;               // [n + 2]
    uint64_t *done;               // a bit for each row, in the order of by_dst
} kv_order;

int kv_order_new(kv_order *order, size_t n, size_t n_rows);
void kv_order_free(kv_order *order);
// kv_moves_order of the n moves in order->by_src, which are of one group, overlap nowhere and do
// not name `scratch`, a row. `ordered` has room: for three moves for each two rows always, for n if
// the moves keep the order of rows. Never fails.
void kv_order_run(kv_moves *ordered, kv_order *order, size_t n, int32_t scratch);

#endif
