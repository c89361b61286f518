// Layer 2: one sequence. Its rows have strictly increasing positions, the same in all groups; each
// group keeps a suffix of the rows, as spans.
#ifndef MF_KV_SEQ_H
#define MF_KV_SEQ_H

#include "kv_cache.h"
#include "kv_cells.h"

enum { KV_MAX_RUNS = KV_MAP_MAX_SPANS };  // of positions in a sequence, each a span of its own
#define KV_WHOLE_WINDOW UINT32_MAX        // of a full group: every position is in it

// Rows from `row` on, up to the next run, are at pos, pos + 1, ...
typedef struct kv_run {
    uint32_t row, pos;
} kv_run;

// Cells [cell, cell + len) that hold no row yet.
typedef struct kv_hold {
    uint32_t cell, len;
} kv_hold;

// A sequence in one group.
typedef struct kv_part {
    uint32_t base;  // rows [0, base) are lost, [base, len) are live
    uint32_t n_spans, first, capacity;
    mf_kv_span *memory;  // [capacity]; the spans are memory[first, first + n_spans)
    // Cells kept for the next rows, in the order they will be taken: held[held_first, n_held).
    uint32_t n_reserved;  // cells in all of them
    uint32_t held_first, n_held, held_capacity;
    kv_hold *held;
} kv_part;

typedef struct kv_seq {
    uint32_t len, n_runs;
    uint32_t clean;                // leading rows that equal a plain prefill of their tokens
    kv_run runs[KV_MAX_RUNS + 1];  // one to spare while an edit is being judged
    kv_part parts[KV_MAX_GROUPS];
} kv_seq;

// Number of rows below a position.
uint32_t kv_seq_rows_below(const kv_seq *seq, uint64_t pos);
uint32_t kv_seq_pos(const kv_seq *seq, uint32_t row);
// Position of the next row if the sequence were its first `rows` rows.
uint32_t kv_seq_next_pos(const kv_seq *seq, uint32_t rows);
// Of the first `rows` rows the oldest that the next query sees; `rows` if it sees none.
uint32_t kv_seq_first_needed(const kv_seq *seq, uint32_t rows, uint32_t window);
// The fewest rows >= 1 that the sequence can be cut to without needing a row below `base`; 0 if any
// number will do.
uint32_t kv_seq_fewest_rows(const kv_seq *seq, uint32_t base, uint32_t window);

// n more rows at next_pos..; which cells they have is up to kv_part_push.
void kv_seq_push(kv_seq *seq, uint32_t n);
// Keeps the first `rows` rows.
void kv_seq_cut(kv_seq *seq, uint32_t rows);
// Rows [i0, i1) go, later ones move by delta positions, which keeps the order. May leave one run
// more than KV_MAX_RUNS.
void kv_seq_edit(kv_seq *seq, uint32_t i0, uint32_t i1, int32_t delta);
// Rows that lie where a plain prefill puts them: at most these are clean.
uint32_t kv_seq_clean_rows(const kv_seq *seq);

static inline const mf_kv_span *kv_part_spans(const kv_part *part) {
    return part->n_spans ? part->memory + part->first : part->memory;  // no arithmetic on NULL
}
// The cell behind the last reserved cell, else behind the last row; KV_NO_CELL without either.
uint32_t kv_part_tail(const kv_part *part);
// Room for n_spans more: the pushes that follow cannot fail.
int kv_part_reserve(kv_part *part, uint32_t n_spans);
void kv_part_push(kv_part *part, uint32_t pos, uint32_t cell, uint32_t n);
// Stops reading the oldest or the newest n live rows; `base` is the caller's to keep.
void kv_part_drop_oldest(kv_part *part, kv_cells *cells, uint32_t n);
void kv_part_drop_newest(kv_part *part, kv_cells *cells, uint32_t n);
// The first of n spans with a row at or above a position; n if there is none.
uint32_t kv_span_above(const mf_kv_span *spans, uint32_t n, uint32_t pos);

// Room for n_holds more runs of reserved cells.
int kv_part_reserve_holds(kv_part *part, uint32_t n_holds);
// Cells [cell, cell + n) are reserved, behind the others. Their reader is the caller's to count.
void kv_part_hold(kv_part *part, uint32_t cell, uint32_t n);
// Gives the last reserved cells back until n are left.
void kv_part_release(kv_part *part, kv_cells *cells, uint32_t n);
// Up to n rows from position pos on get the first reserved cells; how many did.
uint32_t kv_part_draw(kv_part *part, uint32_t pos, uint32_t n);

// Positions, spans and reserved cells against each other; adds 1 to readers[group][cell] for every
// row and every reserved cell of every group.
int kv_seq_check(const kv_seq *seq, uint32_t n_groups, const uint32_t *n_cells,
                 uint32_t *const *readers);

#endif
