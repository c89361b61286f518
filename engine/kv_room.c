// Owns the answer to "are there cells, and which": lazy windows, the placement of new rows, and
// reservations. Refuses what would not fit even without any stale row, before it evicts one.
//
// Invariant: a needed row is never let go; group->needed is all zero between calls.
#include <assert.h>

#include "error.h"
#include "kv_store.h"

// ---- rows and their readers ------------------------------------------------------------------

kv_walk kv_walk_rows(const kv_cache *kv, uint32_t g, uint32_t s, uint32_t from, uint32_t to) {
    kv_walk walk = {.cells = &kv->groups[g].cells};
    if (from >= to) return walk;
    const kv_part *const part = &kv->seqs[s].parts[g];
    const uint32_t pos = kv_seq_pos(&kv->seqs[s], from);
    walk.span = kv_part_spans(part);
    walk.span += kv_span_above(walk.span, part->n_spans, pos);
    walk.skip = pos - (uint32_t)walk.span->pos;
    walk.n_left = to - from;
    return walk;
}

bool kv_walk_next(kv_piece *piece, kv_walk *walk) {
    if (!walk->n_left) return false;
    if (walk->skip == (uint32_t)walk->span->len) {
        walk->span++;
        walk->skip = 0;
    }
    piece->cell = (uint32_t)walk->span->cell + walk->skip;
    const uint32_t n = kv_cells_extent(&piece->readers, walk->cells, piece->cell);
    piece->len = u32_min(n, u32_min(walk->n_left, (uint32_t)walk->span->len - walk->skip));
    walk->skip += piece->len;
    walk->n_left -= piece->len;
    return true;
}

// ---- lazy windows ----------------------------------------------------------------------------

static uint32_t first_needed(const kv_cache *kv, uint32_t g, uint32_t s) {
    return kv_seq_first_needed(&kv->seqs[s], kv->seqs[s].len, kv->groups[g].window);
}

uint32_t kv_stale(const kv_cache *kv, uint32_t g, uint32_t s) {
    return first_needed(kv, g, s) - kv->seqs[s].parts[g].base;
}

uint32_t kv_tally(kv_cache *kv, uint32_t g, uint32_t s, uint32_t from, uint32_t to, int32_t delta) {
    uint32_t *const needed = kv->groups[g].needed, n = 0;
    kv_walk walk = kv_walk_rows(kv, g, s, from, to);
    for (kv_piece p; kv_walk_next(&p, &walk);) {
        if (p.readers == 1) {  // nobody else needs it: no count to keep
            n += p.len;
            continue;
        }
        for (uint32_t cell = p.cell; cell < p.cell + p.len; cell++) {
            n += needed[cell] == (delta < 0);
            needed[cell] += (uint32_t)delta;
        }
    }
    return n;
}

uint32_t kv_tally_needed(kv_cache *kv, uint32_t g, uint32_t s) {
    return kv_tally(kv, g, s, first_needed(kv, g, s), kv->seqs[s].len, 1);
}

void kv_tally_clear(kv_cache *kv, uint32_t g) {
    if (!kv->groups[g].cells.n_shared) return;
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        kv_walk walk = kv_walk_rows(kv, g, s, kv->seqs[s].parts[g].base, kv->seqs[s].len);
        for (kv_piece p; kv_walk_next(&p, &walk);) {
            if (p.readers == 1) continue;
            for (uint32_t i = 0; i < p.len; i++) kv->groups[g].needed[p.cell + i] = 0;
        }
    }
}

uint32_t kv_freeable(kv_cache *kv, uint32_t g) {
    const kv_group *const group = &kv->groups[g];
    uint32_t n = 0;
    if (group->spec.kind == KV_FULL) return 0;
    if (!group->cells.n_shared) {
        for (uint32_t s = 0; s < kv->n_seq; s++) n += kv_stale(kv, g, s);
        return n;
    }
    for (uint32_t s = 0; s < kv->n_seq; s++) n += kv_tally_needed(kv, g, s);
    kv_tally_clear(kv, g);
    return group->cells.n_cells - group->cells.n_free - n;
}

void kv_forget(kv_cache *kv, uint32_t g, uint32_t s, uint32_t n) {
    kv_part *const part = &kv->seqs[s].parts[g];
    kv_part_drop_oldest(part, &kv->groups[g].cells, n);
    part->base += n;
}

// Most stale first evens out the slack, and hunks keep the freed cells in runs. Rows that others
// still read free nothing yet: the caller goes on until it has what it wants.
void kv_evict(kv_cache *kv, uint32_t g) {
    uint32_t victim = 0, most = 0;
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const uint32_t n = kv_stale(kv, g, s);
        if (n > most) {
            most = n;
            victim = s;
        }
    }
    assert(most);  // else the caller's check was wrong, and it would never end
    kv_forget(kv, g, victim, u32_min(most, kv->groups[g].hunk));
}

int kv_full(const kv_cache *kv, uint32_t g, uint64_t given, uint64_t needed) {
    uint64_t reserved = 0;
    for (uint32_t s = 0; s < kv->n_seq; s++) reserved += kv->seqs[s].parts[g].n_reserved;
    return fail(MF_KV_FULL,
                "KV group %u can give %llu of %u cells (%llu are reserved), %llu needed; free or "
                "trim a sequence, or raise n_ctx",
                g, (unsigned long long)given, kv->groups[g].cells.n_cells,
                (unsigned long long)reserved, (unsigned long long)needed);
}

// So large that the needed rows of all sequences leave room for any batch.
static bool never_full(const kv_cache *kv, uint32_t g) {
    const kv_group *const group = &kv->groups[g];
    return group->spec.kind == KV_SLIDING &&
           (uint64_t)kv->n_seq * (group->window - 1) + kv->n_batch <= group->cells.n_cells;
}

// Evicting more never hurts, so whether it would fit without any stale row is the whole question.
int kv_check_room(kv_cache *kv, uint32_t g, uint64_t n) {
    const kv_cells *const cells = &kv->groups[g].cells;
    if (cells->n_free >= n || (n <= kv->n_batch && never_full(kv, g))) return MF_OK;
    const uint64_t most = (uint64_t)cells->n_free + kv_freeable(kv, g);
    if (most >= n) return MF_OK;
    return kv_full(kv, g, most, n);
}

void kv_make_room(kv_cache *kv, uint32_t g, uint32_t n) {
    while (kv->groups[g].cells.n_free < n) kv_evict(kv, g);
}

// A full group that holds each row of this one in a cell of its own and has no more cells decides
// alone.
static bool full_group_decides(const kv_cache *kv, uint32_t g) {
    for (uint32_t f = 0; f < kv->n_groups; f++) {
        const kv_group_spec *const spec = &kv->groups[f].spec;
        if (spec->kind == KV_FULL && spec->n_cells <= kv->groups[g].spec.n_cells) return true;
    }
    return false;
}

// Of the rows there are the oldest that is needed once `done` rows more are there.
static uint32_t first_needed_after(const kv_seq *seq, uint32_t window, uint32_t done) {
    const uint64_t end = (uint64_t)kv_seq_next_pos(seq, seq->len) + done + 1;
    return end <= window ? 0 : kv_seq_rows_below(seq, end - window);
}

// Each batch needs its cells beside all rows that are needed before it.
bool kv_batches_fit(kv_cache *kv, uint32_t g, const kv_append *items, uint32_t n_items,
                    uint64_t total) {
    const uint32_t window = kv->groups[g].window, n_batch = kv->n_batch;
    const uint32_t n_cells = kv->groups[g].cells.n_cells;
    if (total <= kv->groups[g].cells.n_free || never_full(kv, g) || full_group_decides(kv, g))
        return true;
    uint64_t needed = 0;
    for (uint32_t s = 0; s < kv->n_seq; s++) needed += kv_tally_needed(kv, g, s);
    uint32_t in_batch = 0;  // rows of the open batch so far
    bool fits = true;
    for (uint32_t i = 0; i < n_items && fits; i++) {
        const uint32_t s = (uint32_t)items[i].seq;
        const kv_seq *const seq = &kv->seqs[s];
        uint32_t first = first_needed_after(seq, window, 0);
        for (uint32_t done = 0, n; done < items[i].n; done += n) {
            fits = in_batch || needed + (total < n_batch ? total : n_batch) <= n_cells;
            if (!fits) break;
            n = u32_min(items[i].n - done, n_batch - in_batch);
            // Once the window lies in the new rows, all further whole batches are alike.
            const uint32_t whole = (items[i].n - done) / n_batch * n_batch;
            if (!in_batch && done >= window && whole) n = whole;
            const uint32_t next = first_needed_after(seq, window, done + n);
            needed -= kv_tally(kv, g, s, first, next, -1);
            needed += u32_min(done + n, window - 1) - u32_min(done, window - 1);
            first = next;
            total -= n;
            in_batch = (uint32_t)(((uint64_t)in_batch + n) % n_batch);
        }
    }
    kv_tally_clear(kv, g);
    return fits;
}

// ---- placement -------------------------------------------------------------------------------

// Every piece but the last is a whole free run. Evictions add at most a run for each piece of a
// span that has one number of readers.
uint32_t kv_pieces(const kv_cache *kv, uint32_t g, uint32_t n) {
    const kv_cells *const cells = &kv->groups[g].cells;
    uint64_t most = (uint64_t)cells->n_free_runs + 1;
    if (cells->n_free < n) {
        most += cells->n_extents;
        for (uint32_t s = 0; s < kv->n_seq; s++) most += kv->seqs[s].parts[g].n_spans;
    }
    return most < n ? (uint32_t)most : n;
}

// The cells right behind the other sequences' tails are theirs to grow into.
static void guard_tails(kv_cache *kv, uint32_t g, uint32_t s, bool guarded) {
    for (uint32_t i = 0; i < kv->n_seq; i++) {
        if (i != s)
            kv_cells_guard(&kv->groups[g].cells, kv_part_tail(&kv->seqs[i].parts[g]), guarded);
    }
}

uint32_t kv_take(uint32_t *cell, kv_cache *kv, uint32_t g, uint32_t s, uint32_t n, uint32_t tail) {
    kv_cells *const cells = &kv->groups[g].cells;
    const bool in_place = kv_cells_room(cells, tail) >= n;
    if (!in_place) guard_tails(kv, g, s, true);
    const uint32_t k = kv_cells_place(cell, cells, n, tail);
    if (!in_place) guard_tails(kv, g, s, false);
    kv_cells_read(cells, *cell, k, 1);
    return k;
}

// ---- reservations ----------------------------------------------------------------------------

// Giving cells back adds at most a free run for each run of them, and there is room for those.
int kv_hold_reserve(kv_cache *kv, uint32_t g, uint32_t s, uint32_t n) {
    const uint64_t pieces = (uint64_t)kv->groups[g].cells.n_free_runs + 1;
    return kv_part_reserve_holds(&kv->seqs[s].parts[g], pieces < n ? (uint32_t)pieces : n);
}

void kv_hold_release(kv_cache *kv, uint32_t g, uint32_t s, uint32_t n) {
    kv_part_release(&kv->seqs[s].parts[g], &kv->groups[g].cells, n);
}

void kv_hold_take(kv_cache *kv, uint32_t g, uint32_t s, uint32_t n) {
    kv_part *const part = &kv->seqs[s].parts[g];
    while (n) {
        uint32_t cell;
        const uint32_t k = kv_take(&cell, kv, g, s, n, kv_part_tail(part));
        kv_part_hold(part, cell, k);
        n -= k;
    }
}
