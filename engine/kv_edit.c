// Owns rm and shift: which rows go, which positions change, and what the device has to do for it.
// Refuses an edit after which a group would lack a row that the next query sees, positions out of
// range or order, and more gaps than a read can carry.
//
// Rows that move and that others read too are copied: an edit acts on the sequence it names and on
// no other. A shared row that is only stale is let go instead of copied, with those before it.
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "kv_store.h"

// Rows [i0, i1) of sequence s go, those from i1 on move by delta.
typedef struct edit {
    uint32_t s, i0, i1;
    int32_t delta;
    kv_seq after;  // its positions afterwards
} edit;

// ---- may it be -------------------------------------------------------------------------------

static uint32_t base_after(const kv_part *part, const edit *e) {
    if (part->base <= e->i0) return part->base;
    return part->base > e->i1 ? part->base - (e->i1 - e->i0) : e->i0;
}

static uint32_t first_needed_after(const kv_cache *kv, uint32_t g, const edit *e) {
    return kv_seq_first_needed(&e->after, e->after.len, kv->groups[g].window);
}

// Of rows [from, to): how many have several readers, or only this one.
static uint32_t count_rows(const kv_cache *kv, uint32_t g, uint32_t s, uint32_t from, uint32_t to,
                           bool shared) {
    uint32_t n = 0;
    kv_walk walk = kv_walk_rows(kv, g, s, from, to);
    for (kv_piece p; kv_walk_next(&p, &walk);) n += (p.readers > 1) == shared ? p.len : 0;
    return n;
}

// Moved rows to copy, at most: those that others read and the next query sees.
static uint32_t most_copies(const kv_cache *kv, uint32_t g, const edit *e) {
    const kv_seq *const seq = &kv->seqs[e->s];
    const uint32_t needed = first_needed_after(kv, g, e) + (e->i1 - e->i0);
    const uint32_t from = u32_max(needed, u32_max(e->i1, seq->parts[g].base));
    return count_rows(kv, g, e->s, from, seq->len, true);
}

// Is there a cell for each copy? If not at once, then maybe without any stale row: that frees cells
// and leaves some rows to this sequence alone.
static int check_copies(kv_cache *kv, uint32_t g, const edit *e) {
    const kv_seq *const seq = &kv->seqs[e->s];
    const kv_cells *const cells = &kv->groups[g].cells;
    const uint32_t base = seq->parts[g].base, moved = u32_max(e->i1, base);
    uint64_t copies = most_copies(kv, g, e);
    uint64_t room =
        (uint64_t)cells->n_free + count_rows(kv, g, e->s, u32_max(e->i0, base), moved, false);
    if (copies > room && kv->groups[g].spec.kind == KV_SLIDING) {
        const uint32_t first = first_needed_after(kv, g, e);
        const uint32_t needed = u32_max(moved, first + (e->i1 - e->i0));
        room = cells->n_cells - kv_tally(kv, g, e->s, first, u32_max(first, e->i0), 1);
        for (uint32_t s = 0; s < kv->n_seq; s++) room -= s == e->s ? 0 : kv_tally_needed(kv, g, s);
        const uint32_t alone = kv_tally(kv, g, e->s, needed, seq->len, 1);
        copies = seq->len - needed - alone;
        room -= alone;
        kv_tally_clear(kv, g);
    }
    if (copies <= room) return MF_OK;
    return kv_full(kv, g, room, copies);
}

static int check_edit(kv_cache *kv, const edit *e) {
    if (!kv->can_rope) {
        return fail(MF_UNSUPPORTED,
                    "positions of this model cannot be moved; trim sequence %u or free it instead",
                    e->s);
    }
    if (e->after.n_runs > kv->max_gaps + 1) {
        return fail(MF_KV_GAPS,
                    "sequence %u would have %u gaps between its positions, a read can carry %u; "
                    "close one with rm",
                    e->s, e->after.n_runs - 1, kv->max_gaps);
    }
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        const uint32_t base = base_after(&kv->seqs[e->s].parts[g], e);
        if (first_needed_after(kv, g, e) < u32_min(base, e->after.len)) {
            return fail(MF_KV_GONE,
                        "KV group %u has dropped rows of sequence %u that its window would reach "
                        "after this edit; free the sequence and run its tokens again",
                        g, e->s);
        }
        TRY(check_copies(kv, g, e));
    }
    return MF_OK;
}

// ---- memory ----------------------------------------------------------------------------------

static int reserve_runs(kv_runs *runs, uint32_t n) {
    if (n <= runs->capacity) return MF_OK;
    kv_cell_run *const at = mem_grow(runs->at, n, sizeof *at);
    if (!at) return MF_NOMEM;
    runs->at = at;
    runs->capacity = n;
    return MF_OK;
}

static int reserve_spans(kv_spans *spans, uint32_t n) {
    if (n <= spans->capacity) return MF_OK;
    mf_kv_span *const at = mem_grow(spans->at, n, sizeof *at);
    if (!at) return MF_NOMEM;
    spans->at = at;
    spans->capacity = n;
    return MF_OK;
}

// A sequence's readers change at most twice for each other sequence, as those share a stretch of
// its rows; and each free run that copies go to may cut once more.
static int reserve_edit(kv_cache *kv, const edit *e) {
    uint64_t moves = 0, roped = 0;
    uint32_t spans = 0;
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        const kv_seq *const seq = &kv->seqs[e->s];
        kv_part *const part = &kv->seqs[e->s].parts[g];
        const uint32_t copies = most_copies(kv, g, e);
        const uint64_t cuts = (uint64_t)part->n_spans + 2 * (uint64_t)kv->n_seq;
        uint64_t more = copies ? 2 * cuts + kv_pieces(kv, g, copies) : 0;
        more = more < seq->len ? more : seq->len;
        TRY(kv_part_reserve(part, (uint32_t)more + 1));
        spans = u32_max(spans, part->n_spans + 1);
        roped += more + part->n_spans + 1;
        moves += more;
    }
    if (roped > UINT32_MAX)
        return fail(MF_LIMIT, "an edit of %llu runs", (unsigned long long)roped);
    TRY(reserve_spans(&kv->edited, spans));
    TRY(reserve_runs(&kv->roped, (uint32_t)roped));
    return kv_moves_reserve(&kv->moves, (uint32_t)moves);
}

// ---- doing it --------------------------------------------------------------------------------

// Rows from `row` on leave the part's spans for kv->edited. Their cells stay as they are.
static void take_out(kv_cache *kv, kv_part *part, const kv_walk *rows) {
    kv->edited.n = 0;
    if (!rows->n_left) return;
    const uint32_t index = (uint32_t)(rows->span - kv_part_spans(part));
    mf_kv_span *const spans = part->memory + part->first;
    kv->edited.n = part->n_spans - index;
    memcpy(kv->edited.at, spans + index, kv->edited.n * sizeof *spans);
    kv->edited.at[0].pos += (int32_t)rows->skip;
    kv->edited.at[0].cell += (int32_t)rows->skip;
    kv->edited.at[0].len -= (int32_t)rows->skip;
    spans[index].len = (int32_t)rows->skip;
    part->n_spans = index + (rows->skip != 0);
}

// Rows [i0, i1) are given up, the later ones get their new positions.
static void edit_part(kv_cache *kv, uint32_t g, const edit *e) {
    kv_part *const part = &kv->seqs[e->s].parts[g];
    kv_cells *const cells = &kv->groups[g].cells;
    const uint32_t len = kv->seqs[e->s].len, moved = u32_max(e->i1, part->base);
    const uint32_t gone = moved - u32_max(e->i0, part->base);
    const kv_walk rows = kv_walk_rows(kv, g, e->s, moved, len);
    take_out(kv, part, &rows);
    kv_part_drop_newest(part, cells, gone);
    for (uint32_t i = 0; i < kv->edited.n; i++) {
        const mf_kv_span span = kv->edited.at[i];
        kv_part_push(part, (uint32_t)(span.pos + e->delta), (uint32_t)span.cell,
                     (uint32_t)span.len);
    }
    part->base = base_after(part, e);
}

static void add_roped(kv_cache *kv, uint32_t g, uint32_t cell, uint32_t len) {
    kv_cell_run *const end = kv->roped.at + kv->roped.n;
    if (kv->roped.n && end[-1].group == g && end[-1].cell + end[-1].len == cell) {
        end[-1].len += len;
        return;
    }
    *end = (kv_cell_run){g, cell, len};
    kv->roped.n++;
}

static void add_move(kv_cache *kv, uint32_t g, uint32_t src, uint32_t dst, uint32_t n) {
    kv->moves.at[kv->moves.n++] = (mf_kv_move){(int32_t)src, (int32_t)dst, (int32_t)n, (int32_t)g};
}

// The moved rows, from kv->edited back to the part: those that others read go to fresh cells.
static void put_back(kv_cache *kv, uint32_t g, uint32_t s, uint32_t n_rows, uint32_t copies) {
    kv_part *const part = &kv->seqs[s].parts[g];
    kv_cells *const cells = &kv->groups[g].cells;
    uint32_t cell = 0, room = 0;  // of the fresh cells that are not used yet
    kv_walk walk = {.cells = cells, .span = kv->edited.at, .n_left = n_rows};
    for (kv_piece p; kv_walk_next(&p, &walk);) {
        uint32_t pos = (uint32_t)walk.span->pos + walk.skip - p.len;
        if (p.readers == 1) {
            kv_part_push(part, pos, p.cell, p.len);
            add_roped(kv, g, p.cell, p.len);
            continue;
        }
        for (uint32_t left = p.len, k; left; left -= k) {
            if (!room) {
                room = kv_take(&cell, kv, g, s, copies, kv_part_tail(part));
                copies -= room;
            }
            k = u32_min(left, room);
            kv_part_push(part, pos, cell, k);
            add_roped(kv, g, cell, k);
            add_move(kv, g, p.cell, cell, k);
            kv_cells_read(cells, p.cell, k, -1);
            p.cell += k;
            pos += k;
            cell += k;
            room -= k;
        }
    }
}

static void let_go_of_stale(kv_cache *kv, uint32_t g, const edit *e) {
    const uint32_t base = kv->seqs[e->s].parts[g].base;
    uint32_t row = u32_max(e->i0, base), end = 0;  // behind the last stale row that others read
    kv_walk walk = kv_walk_rows(kv, g, e->s, row, first_needed_after(kv, g, e));
    for (kv_piece p; kv_walk_next(&p, &walk);) {
        row += p.len;
        if (p.readers > 1) end = row;
    }
    if (end) kv_forget(kv, g, e->s, end - base);
}

// Positions and bases are the new ones already; the rows from i0 on are to be made private and
// roped.
static void move_rows(kv_cache *kv, uint32_t g, const edit *e) {
    const kv_seq *const seq = &kv->seqs[e->s];
    kv_part *const part = &kv->seqs[e->s].parts[g];
    let_go_of_stale(kv, g, e);
    uint32_t first, copies;
    for (;;) {  // an eviction may also leave a row to this sequence alone
        first = u32_max(e->i0, part->base);
        copies = count_rows(kv, g, e->s, first, seq->len, true);
        if (copies <= kv->groups[g].cells.n_free) break;
        kv_evict(kv, g);
    }
    kv_walk rows = kv_walk_rows(kv, g, e->s, first, seq->len);
    if (copies) {
        take_out(kv, part, &rows);
        put_back(kv, g, e->s, seq->len - first, copies);
        kv->groups[g].generation++;
        return;
    }
    for (kv_piece p; kv_walk_next(&p, &rows);) add_roped(kv, g, p.cell, p.len);
}

static int make_edit(kv_work *work, kv_cache *kv, edit *e) {
    kv_seq *const seq = &kv->seqs[e->s];
    e->after = *seq;
    kv_seq_edit(&e->after, e->i0, e->i1, e->delta);
    TRY(check_edit(kv, e));
    TRY(reserve_edit(kv, e));
    for (uint32_t g = 0; g < kv->n_groups; g++) edit_part(kv, g, e);
    seq->len = e->after.len;
    seq->n_runs = e->after.n_runs;
    seq->clean = e->after.clean;
    memcpy(seq->runs, e->after.runs, sizeof seq->runs);
    for (uint32_t g = 0; g < kv->n_groups; g++) move_rows(kv, g, e);
    kv_work_end(work, kv);
    work->delta = e->delta;
    return MF_OK;
}

// ---- calls -----------------------------------------------------------------------------------

int kv_cache_rm(kv_work *work, kv_cache *kv, int32_t seq, int32_t p0, int32_t p1) {
    kv_work_begin(work, kv);
    const kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    const uint32_t next = kv_seq_next_pos(found, found->len);
    if (p0 < 0 || p1 < p0 || (uint32_t)p1 > next) {
        return fail(MF_ARG, "rm of positions [%d, %d): give a range in [0, %u) of sequence %d", p0,
                    p1, next, seq);
    }
    if (p0 == p1) return MF_OK;
    const uint32_t i0 = kv_seq_rows_below(found, (uint32_t)p0);
    const uint32_t i1 = kv_seq_rows_below(found, (uint32_t)p1);
    if (i1 == found->len) return kv_cache_trim(kv, seq, found->len - i0);
    edit e = {.s = (uint32_t)seq, .i0 = i0, .i1 = i1, .delta = p0 - p1};
    return make_edit(work, kv, &e);
}

int kv_cache_shift(kv_work *work, kv_cache *kv, int32_t seq, int32_t p0, int32_t delta) {
    kv_work_begin(work, kv);
    const kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    const uint32_t next = kv_seq_next_pos(found, found->len);
    if (p0 < 0 || (uint32_t)p0 > next) {
        return fail(MF_ARG, "shift from position %d: give one in [0, %u] of sequence %d", p0, next,
                    seq);
    }
    const uint32_t i = kv_seq_rows_below(found, (uint32_t)p0);
    if (i == found->len || !delta) return MF_OK;
    const int64_t first = (int64_t)kv_seq_pos(found, i) + delta, last = (int64_t)next - 1 + delta;
    if (first < 0 || last >= KV_POS_MAX) {
        return fail(MF_KV_RANGE,
                    "shift of sequence %d by %d: its rows would be at positions %lld to %lld; "
                    "keep within [0, %d)",
                    seq, delta, (long long)first, (long long)last, KV_POS_MAX);
    }
    if (i && first <= kv_seq_pos(found, i - 1)) {
        return fail(MF_KV_COLLIDES,
                    "shift of sequence %d by %d: a row would be at position %lld, and the one "
                    "before it is at %u; rm those between first",
                    seq, delta, (long long)first, kv_seq_pos(found, i - 1));
    }
    edit e = {.s = (uint32_t)seq, .i0 = i, .i1 = i, .delta = delta};
    return make_edit(work, kv, &e);
}
