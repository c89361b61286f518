// Layer 2: the bookkeeping of some sequences as plain numbers, without a cell in it: what a session
// file holds beside the rows themselves. The same state gives the same image wherever its rows lie.
//
// The live rows of all sequences of an image have numbers, in each group from 0 on: sequence by
// sequence in the image's order, each in row order, a row that has no number yet gets the next one.
// Rows that several sequences read have one number. Row data is saved in the order of the numbers.
#ifndef MF_KV_IMAGE_H
#define MF_KV_IMAGE_H

#include "kv_cache.h"
#include "kv_seq.h"

// Row numbers [row, row + len) of a group are in its cells [cell, cell + len).
typedef struct kv_row_run {
    uint32_t row, cell, len;
} kv_row_run;

// Row numbers [first, first + len) of a group.
typedef struct kv_image_span {
    uint32_t first, len;
} kv_image_span;

// A sequence in a group: its rows [base, len) have the numbers of its spans, one after the other.
typedef struct kv_image_part {
    uint32_t base, n_spans;
    size_t span_at;  // its spans are group->spans[span_at, span_at + n_spans)
} kv_image_part;

typedef struct kv_image_group {
    uint32_t window;       // 0: full
    uint32_t n_rows;       // numbers are [0, n_rows)
    kv_image_part *parts;  // [n_seqs]
    kv_image_span *spans;  // [n_spans]
    size_t n_spans, spans_capacity;
    // Where the rows lie, in the order of their numbers: in the cache that the image was made of or
    // was loaded into last, until that changes. After a load, rows in no run were left out.
    kv_row_run *runs;  // [n_runs], as long as they can be
    size_t n_runs, runs_capacity;
} kv_image_group;

typedef struct kv_image_seq {
    int32_t id;  // in the cache that the image was made of
    uint32_t len, clean, n_runs;
    size_t run_at;  // its positions are image->runs[run_at, run_at + n_runs)
} kv_image_seq;

typedef struct kv_image {
    uint32_t n_seqs, n_groups;
    kv_image_seq *seqs;  // [n_seqs]
    kv_run *runs;        // [n_runs] of positions
    size_t n_runs;
    kv_image_group groups[KV_MAX_GROUPS];
} kv_image;

// The n sequences, in this order; empty ones and n = 0 are fine. A sequence that is not there or is
// named twice is MF_ARG. All memory is the image's own; the cache is as it was.
int kv_image_make(kv_image **out, const kv_cache *kv, const int32_t *seqs, uint32_t n);
void kv_image_free(kv_image *image);

// Sequence i of the image becomes sequence into[i] of the cache: ids that exist, each once, as many
// as the image has (MF_ARG). What they held is given back, reservations too; all others keep what
// they need. MF_FORMAT as kv_image_check says of this cache.
// MF_KV_FULL unless the rows that the next queries see fit, counting the cells of the replaced
// sequences and those that are freeable; stale rows are left out where they alone do not fit.
// Refused: nothing has changed. Accepted: the image's runs are the cells that its rows must be
// copied to, before anything is read.
int kv_image_load(kv_cache *kv, kv_image *image, const int32_t *into, uint32_t n);

// MF_FORMAT, with the field, what it says and what is needed, for all that kv_image_make could not
// have made in a cache of this configuration; n_cells, n_batch and can_rope do not matter.
int kv_image_check(const kv_image *image, const kv_config *config);
// Of a sequence that kv_image_check let pass, or its positions at least: the oldest row that the
// next query sees in a group.
uint32_t kv_image_first_needed(const kv_image *image, uint32_t g, uint32_t i);
// Spans of a sequence's rows with the numbers as cells, in position order, maximal: as many as
// there are, of which the first `capacity` are written.
size_t kv_image_spans(mf_kv_span *spans, size_t capacity, const kv_image *image, uint32_t g,
                      uint32_t i);
// One above the position of a sequence's last row.
uint32_t kv_image_next_pos(const kv_image *image, uint32_t i);
// Room for the sequences, and nothing in it yet; NULL without memory.
kv_image *kv_image_new(uint32_t n_seqs, uint32_t n_groups);

// ---- as bytes --------------------------------------------------------------------------------

// All numbers are little-endian u32; an image has exactly one form.
//   section 0, SEQS       n_seqs, n_groups, then for each sequence
//                         id, len, clean, n_runs, then n_runs times {row, pos}
//   section 1 + g, ROWS   window, n_rows, then for each sequence, in the same order,
//                         base, n_spans, then n_spans times {first, len}
typedef struct kv_bytes {
    const uint8_t *at;  // may be unaligned
    size_t n;
} kv_bytes;

size_t kv_image_size(const kv_image *image, uint32_t section);
void kv_image_encode(uint8_t *to, const kv_image *image, uint32_t section);  // [kv_image_size]
// The image of sections [1 + config->n_groups], for a cache of this configuration. MF_FORMAT with a
// line as kv_image_check's for all that is no such image. Memory is a small multiple of the input.
int kv_image_decode(kv_image **out, const kv_config *config, const kv_bytes *sections);

#endif
