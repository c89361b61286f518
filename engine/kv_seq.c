// Owns the positions, spans and reserved cells of one sequence. Refuses nothing: kv_cache has
// checked every number.
//
// Invariant: runs and spans are in position order and maximal (neighbours would not continue each
// other), and the spans of a group hold exactly the positions of its live rows.
#include "kv_seq.h"

#include <string.h>

#include "alloc.h"
#include "error.h"

// ---- positions -------------------------------------------------------------------------------

static uint32_t run_end_row(const kv_seq *seq, uint32_t i) {
    return i + 1 < seq->n_runs ? seq->runs[i + 1].row : seq->len;
}

uint32_t kv_seq_rows_below(const kv_seq *seq, uint64_t pos) {
    uint32_t lo = 0, hi = seq->n_runs;  // the first run that starts at or above pos
    while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (seq->runs[mid].pos < pos) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    if (lo == 0) return 0;
    const kv_run run = seq->runs[lo - 1];
    const uint64_t row = run.row + (pos - run.pos);
    const uint32_t end = run_end_row(seq, lo - 1);
    return row < end ? (uint32_t)row : end;
}

uint32_t kv_seq_pos(const kv_seq *seq, uint32_t row) {
    uint32_t lo = 0, hi = seq->n_runs;  // the run that holds the row is lo
    while (hi - lo > 1) {
        const uint32_t mid = (lo + hi) / 2;
        if (seq->runs[mid].row <= row) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    return seq->runs[lo].pos + (row - seq->runs[lo].row);
}

uint32_t kv_seq_next_pos(const kv_seq *seq, uint32_t rows) {
    return rows ? kv_seq_pos(seq, rows - 1) + 1 : 0;
}

// The next query is at q = next_pos and sees the positions (q - window, q].
uint32_t kv_seq_first_needed(const kv_seq *seq, uint32_t rows, uint32_t window) {
    const uint64_t end = (uint64_t)kv_seq_next_pos(seq, rows) + 1;
    return end <= window ? 0 : u32_min(rows, kv_seq_rows_below(seq, end - window));
}

// Cut to n rows, row base - 1 must be out of sight: pos[base - 1] <= pos[n - 1] + 1 - window.
// Window 1 sees no row.
uint32_t kv_seq_fewest_rows(const kv_seq *seq, uint32_t base, uint32_t window) {
    if (base == 0 || window == 1) return 0;
    return kv_seq_rows_below(seq, (uint64_t)kv_seq_pos(seq, base - 1) + window - 1) + 1;
}

void kv_seq_push(kv_seq *seq, uint32_t n) {
    if (seq->n_runs == 0) seq->runs[seq->n_runs++] = (kv_run){0, 0};
    if (seq->clean == seq->len) seq->clean += n;
    seq->len += n;  // goes on behind the last row, so the last run grows
}

void kv_seq_cut(kv_seq *seq, uint32_t rows) {
    while (seq->n_runs && seq->runs[seq->n_runs - 1].row >= rows) seq->n_runs--;
    seq->len = rows;
    seq->clean = u32_min(seq->clean, rows);
}

void kv_seq_edit(kv_seq *seq, uint32_t i0, uint32_t i1, int32_t delta) {
    kv_run later[KV_MAX_RUNS + 1];  // of the rows that stay behind the cut
    uint32_t n = 0;
    if (i1 < seq->len) later[n++] = (kv_run){i1, kv_seq_pos(seq, i1)};
    for (uint32_t i = 0; i < seq->n_runs; i++) {
        if (seq->runs[i].row > i1) later[n++] = seq->runs[i];
    }
    const uint32_t len = seq->len - (i1 - i0);
    kv_seq_cut(seq, i0);
    for (uint32_t i = 0; i < n; i++) {
        const kv_run run = {later[i].row - (i1 - i0), later[i].pos + (uint32_t)delta};
        if (i == 0 && i0 && kv_seq_next_pos(seq, i0) == run.pos) continue;  // it goes on
        seq->runs[seq->n_runs++] = run;
    }
    seq->len = len;
}

uint32_t kv_seq_clean_rows(const kv_seq *seq) {
    return seq->n_runs && seq->runs[0].pos == 0 ? run_end_row(seq, 0) : 0;
}

// ---- spans -----------------------------------------------------------------------------------

uint32_t kv_part_tail(const kv_part *part) {
    if (part->n_reserved) {
        const kv_hold last = part->held[part->n_held - 1];
        return last.cell + last.len;
    }
    if (!part->n_spans) return KV_NO_CELL;
    const mf_kv_span last = kv_part_spans(part)[part->n_spans - 1];
    return (uint32_t)(last.cell + last.len);
}

int kv_part_reserve(kv_part *part, uint32_t n_spans) {
    if (part->capacity - part->first - part->n_spans >= n_spans) return MF_OK;
    size_t wanted;
    if (!size_add(&wanted, part->n_spans, n_spans)) wanted = SIZE_MAX;
    // Else half is dropped spans: moving the others down is cheap enough.
    if (wanted > part->capacity / 2) {
        const size_t capacity = wanted > UINT32_MAX / 2 ? wanted : 2 * wanted;
        if (capacity > UINT32_MAX) return fail(MF_LIMIT, "%zu spans in one sequence", wanted);
        mf_kv_span *const memory = mem_grow(part->memory, capacity, sizeof *memory);
        if (!memory) return MF_NOMEM;
        part->memory = memory;
        part->capacity = (uint32_t)capacity;
    }
    memmove(part->memory, part->memory + part->first, part->n_spans * sizeof *part->memory);
    part->first = 0;
    return MF_OK;
}

void kv_part_push(kv_part *part, uint32_t pos, uint32_t cell, uint32_t n) {
    mf_kv_span *const end = part->memory + part->first + part->n_spans;
    if (part->n_spans && (uint32_t)(end[-1].pos + end[-1].len) == pos &&
        (uint32_t)(end[-1].cell + end[-1].len) == cell) {
        end[-1].len += (int32_t)n;
        return;
    }
    *end = (mf_kv_span){(int32_t)pos, (int32_t)cell, (int32_t)n};
    part->n_spans++;
}

void kv_part_drop_oldest(kv_part *part, kv_cells *cells, uint32_t n) {
    while (n) {
        mf_kv_span *const span = part->memory + part->first;
        const uint32_t k = u32_min(n, (uint32_t)span->len);
        kv_cells_read(cells, (uint32_t)span->cell, k, -1);
        span->pos += (int32_t)k;
        span->cell += (int32_t)k;
        span->len -= (int32_t)k;
        if (!span->len) {
            part->first++;
            part->n_spans--;
        }
        n -= k;
    }
    if (!part->n_spans) part->first = 0;
}

void kv_part_drop_newest(kv_part *part, kv_cells *cells, uint32_t n) {
    while (n) {
        mf_kv_span *const span = part->memory + part->first + part->n_spans - 1;
        const uint32_t k = u32_min(n, (uint32_t)span->len);
        span->len -= (int32_t)k;
        kv_cells_read(cells, (uint32_t)(span->cell + span->len), k, -1);
        if (!span->len) part->n_spans--;
        n -= k;
    }
    if (!part->n_spans) part->first = 0;
}

uint32_t kv_span_above(const mf_kv_span *spans, uint32_t n, uint32_t pos) {
    uint32_t lo = 0, hi = n;
    while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if ((uint32_t)(spans[mid].pos + spans[mid].len) <= pos) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

// ---- reserved cells --------------------------------------------------------------------------

int kv_part_reserve_holds(kv_part *part, uint32_t n_holds) {
    const uint32_t n = part->n_held - part->held_first;
    if (part->held_first) {
        memmove(part->held, part->held + part->held_first, n * sizeof *part->held);
        part->held_first = 0;
        part->n_held = n;
    }
    if (part->held_capacity - n >= n_holds) return MF_OK;
    if (n_holds > UINT32_MAX - n) return fail(MF_LIMIT, "%u runs of reserved cells", n_holds);
    kv_hold *const held = mem_grow(part->held, n + n_holds, sizeof *held);
    if (!held) return MF_NOMEM;
    part->held = held;
    part->held_capacity = n + n_holds;
    return MF_OK;
}

void kv_part_hold(kv_part *part, uint32_t cell, uint32_t n) {
    kv_hold *const end = part->held + part->n_held;
    part->n_reserved += n;
    if (part->n_held > part->held_first && end[-1].cell + end[-1].len == cell) {
        end[-1].len += n;
        return;
    }
    *end = (kv_hold){cell, n};
    part->n_held++;
}

void kv_part_release(kv_part *part, kv_cells *cells, uint32_t n) {
    while (part->n_reserved > n) {
        kv_hold *const last = &part->held[part->n_held - 1];
        const uint32_t k = u32_min(part->n_reserved - n, last->len);
        last->len -= k;
        kv_cells_read(cells, last->cell + last->len, k, -1);
        part->n_reserved -= k;
        if (!last->len) part->n_held--;
    }
    if (!part->n_reserved) part->held_first = part->n_held = 0;
}

uint32_t kv_part_draw(kv_part *part, uint32_t pos, uint32_t n) {
    uint32_t drawn = 0;
    while (drawn < n && part->n_reserved) {
        kv_hold *const next = &part->held[part->held_first];
        const uint32_t k = u32_min(n - drawn, next->len);
        kv_part_push(part, pos + drawn, next->cell, k);
        next->cell += k;
        next->len -= k;
        part->n_reserved -= k;
        if (!next->len) part->held_first++;
        drawn += k;
    }
    if (!part->n_reserved) part->held_first = part->n_held = 0;
    return drawn;
}

// ---- check -----------------------------------------------------------------------------------

static int broken(const char *what, uint64_t value) {
    return fail(MF_INTERNAL, "sequence: %s (%llu); please report it", what,
                (unsigned long long)value);
}

static int check_runs(const kv_seq *seq) {
    if (seq->n_runs > KV_MAX_RUNS) return broken("too many runs", seq->n_runs);
    if ((seq->n_runs == 0) != (seq->len == 0))
        return broken("runs without rows or rows without runs", seq->len);
    if (seq->n_runs && seq->runs[0].row != 0)
        return broken("the first run does not start at row 0", seq->runs[0].row);
    for (uint32_t i = 0; i < seq->n_runs; i++) {
        const uint32_t end = run_end_row(seq, i);
        if (end <= seq->runs[i].row) return broken("an empty run", i);
        const uint64_t end_pos = (uint64_t)seq->runs[i].pos + (end - seq->runs[i].row);
        if (end_pos > KV_POS_MAX) return broken("a position out of range", end_pos);
        if (i + 1 < seq->n_runs && seq->runs[i + 1].pos <= end_pos)
            return broken("runs that touch or overlap", i);
    }
    if (seq->clean > kv_seq_clean_rows(seq)) return broken("clean rows that moved", seq->clean);
    return MF_OK;
}

static int check_part(const kv_seq *seq, const kv_part *part, uint32_t n_cells, uint32_t *readers) {
    if (part->base > seq->len) return broken("more lost rows than rows", part->base);
    if (part->n_spans > part->capacity || part->first > part->capacity - part->n_spans) {
        return broken("spans outside their memory", part->first);
    }
    uint32_t row = part->base;
    const mf_kv_span *const spans = kv_part_spans(part);
    for (uint32_t i = 0; i < part->n_spans; i++) {
        const mf_kv_span s = spans[i];
        if (s.len < 1 || (uint32_t)s.len > seq->len - row)
            return broken("a span of impossible length", i);
        if (s.cell < 0 || (uint32_t)s.cell >= n_cells ||
            (uint32_t)s.len > n_cells - (uint32_t)s.cell) {
            return broken("a span outside the arena", i);
        }
        const uint32_t last = row + (uint32_t)s.len - 1;
        if ((uint32_t)s.pos != kv_seq_pos(seq, row) ||
            (uint32_t)(s.pos + s.len) - 1 != kv_seq_pos(seq, last)) {
            return broken("a span at other positions than its rows", i);
        }
        if (i && spans[i - 1].pos + spans[i - 1].len == s.pos &&
            spans[i - 1].cell + spans[i - 1].len == s.cell) {
            return broken("two spans that are one", i);
        }
        for (int32_t k = 0; k < s.len; k++) readers[s.cell + k]++;
        row = last + 1;
    }
    return row == seq->len ? MF_OK : broken("live rows without a cell", row);
}

static int check_holds(const kv_part *part, uint32_t n_cells, uint32_t *readers) {
    if (part->held_first > part->n_held || part->n_held > part->held_capacity)
        return broken("reserved cells outside their memory", part->held_first);
    uint64_t total = 0;
    for (uint32_t i = part->held_first; i < part->n_held; i++) {
        const kv_hold h = part->held[i];
        if (!h.len || h.cell >= n_cells || h.len > n_cells - h.cell)
            return broken("reserved cells outside the arena", i);
        for (uint32_t k = 0; k < h.len; k++) readers[h.cell + k]++;
        total += h.len;
    }
    return total == part->n_reserved ? MF_OK : broken("a wrong number of reserved cells", total);
}

int kv_seq_check(const kv_seq *seq, uint32_t n_groups, const uint32_t *n_cells,
                 uint32_t *const *readers) {
    TRY(check_runs(seq));
    for (uint32_t g = 0; g < n_groups; g++) {
        TRY(check_part(seq, &seq->parts[g], n_cells[g], readers[g]));
        TRY(check_holds(&seq->parts[g], n_cells[g], readers[g]));
    }
    return MF_OK;
}
