// Owns the cell store: the arenas of all groups and the sequences. Refuses a call as a whole or
// does it as a whole: all checks and all allocations come before the first change, evictions
// included.
//
// Invariant N: no group lacks a row that the next query of a sequence sees. Rows older than that
// are stale: a sliding group keeps them until its arena wants their cells.
#include "kv_cache.h"

#include "alloc.h"
#include "error.h"
#include "kv_cells.h"
#include "kv_seq.h"

enum { KV_HUNK = 64 };  // most rows of one eviction

typedef struct kv_group {
    kv_group_spec spec;
    uint32_t window;  // KV_WHOLE_WINDOW: full
    uint32_t hunk;
    kv_cells cells;
} kv_group;

struct kv_cache {
    uint32_t n_groups, n_seq, n_batch;
    kv_group groups[KV_MAX_GROUPS];
    kv_seq *seqs;  // [n_seq]
};

// ---- life ------------------------------------------------------------------------------------

static int group_new(kv_group *group, const kv_group_spec *spec, uint32_t index) {
    if (spec->kind != KV_FULL && spec->kind != KV_SLIDING)
        return fail(MF_ARG, "group %u: kind %d", index, (int)spec->kind);
    const bool sliding = spec->kind == KV_SLIDING;
    if (sliding && !spec->window)
        return fail(MF_ARG, "group %u: a window of 0; give at least 1", index);
    group->spec = *spec;
    group->window = sliding ? spec->window : KV_WHOLE_WINDOW;
    // Hunks keep the freed cells in runs; half a window leaves enough slack to undo with.
    group->hunk = u32_max(1, u32_min(KV_HUNK, group->window / 2));
    return kv_cells_new(&group->cells, spec->n_cells);
}

int kv_cache_new(kv_cache **out, const kv_group_spec *groups, uint32_t n_groups, uint32_t n_seq,
                 uint32_t n_batch) {
    if (n_groups < 1 || n_groups > KV_MAX_GROUPS)
        return fail(MF_ARG, "%u groups: give 1 to %d", n_groups, KV_MAX_GROUPS);
    if (n_seq < 1 || n_seq > INT32_MAX)
        return fail(MF_ARG, "%u sequences: give 1 to %d", n_seq, INT32_MAX);
    if (n_batch < 1) return fail(MF_ARG, "batches of 0 rows: give at least 1");
    kv_cache *const kv = mem_alloc(1, sizeof *kv);
    if (!kv) return MF_NOMEM;
    int status = MF_OK;
    kv->n_seq = n_seq;
    kv->n_batch = n_batch;
    while (kv->n_groups < n_groups) {
        const uint32_t g = kv->n_groups++;
        TRY_GOTO(fail, group_new(&kv->groups[g], &groups[g], g));
    }
    kv->seqs = mem_alloc(n_seq, sizeof *kv->seqs);
    if (!kv->seqs) TRY_GOTO(fail, MF_NOMEM);
    *out = kv;
    return MF_OK;
fail:
    kv_cache_free(kv);
    return status;
}

void kv_cache_free(kv_cache *kv) {
    if (!kv) return;
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        kv_cells_free(&kv->groups[g].cells);
        for (uint32_t s = 0; kv->seqs && s < kv->n_seq; s++) mem_free(kv->seqs[s].parts[g].memory);
    }
    mem_free(kv->seqs);
    mem_free(kv);
}

// NULL after MF_ARG.
static kv_seq *find_seq(const kv_cache *kv, int32_t seq) {
    if (seq >= 0 && (uint32_t)seq < kv->n_seq) return &kv->seqs[seq];
    fail(MF_ARG, "sequence %d: there are 0 to %u", seq, kv->n_seq - 1);
    return NULL;
}

// ---- lazy windows ----------------------------------------------------------------------------

// Rows that the next query does not see.
static uint32_t stale(const kv_cache *kv, uint32_t g, uint32_t s) {
    const kv_seq *const seq = &kv->seqs[s];
    return kv_seq_first_needed(seq, seq->len, kv->groups[g].window) - seq->parts[g].base;
}

static uint64_t all_stale(const kv_cache *kv, uint32_t g) {
    uint64_t n = 0;
    for (uint32_t s = 0; s < kv->n_seq; s++) n += stale(kv, g, s);
    return n;
}

// The sequence with the most stale rows (ties: the lowest) gives up its oldest hunk: that evens out
// the slack.
static void evict(kv_cache *kv, uint32_t g) {
    uint32_t victim = 0, most = 0;
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const uint32_t n = stale(kv, g, s);
        if (n > most) {
            most = n;
            victim = s;
        }
    }
    const uint32_t n = u32_min(most, kv->groups[g].hunk);
    kv_part *const part = &kv->seqs[victim].parts[g];
    kv_part_drop_oldest(part, &kv->groups[g].cells, n);
    part->base += n;
}

// ---- append ----------------------------------------------------------------------------------

// Each item by itself; `total` may exceed a batch.
static int check_items(uint64_t *total, const kv_cache *kv, const kv_append *items,
                       uint32_t n_items) {
    *total = 0;
    if (!n_items) return fail(MF_ARG, "an append without items");
    if (n_items > kv->n_seq) return fail(MF_ARG, "%u items for %u sequences", n_items, kv->n_seq);
    for (uint32_t i = 0; i < n_items; i++) {
        if (!items[i].n) return fail(MF_ARG, "sequence %d: 0 rows; leave it out", items[i].seq);
        for (uint32_t k = 0; k < i; k++) {
            if (items[k].seq == items[i].seq)
                return fail(MF_ARG, "sequence %d twice in one append", items[i].seq);
        }
        *total += items[i].n;
    }
    return MF_OK;
}

static int check_positions(const kv_cache *kv, const kv_append *items, uint32_t n_items) {
    for (uint32_t i = 0; i < n_items; i++) {
        const kv_seq *const seq = find_seq(kv, items[i].seq);
        if (!seq) return MF_ARG;
        const uint32_t pos = kv_seq_next_pos(seq, seq->len);
        if (items[i].n > KV_POS_MAX - pos) {
            return fail(MF_KV_RANGE,
                        "sequence %d: %u rows at position %u would pass %d; trim or free it",
                        items[i].seq, items[i].n, pos, KV_POS_MAX);
        }
    }
    return MF_OK;
}

static int kv_full(const kv_cache *kv, uint32_t g, uint64_t n) {
    const kv_cells *const cells = &kv->groups[g].cells;
    return fail(MF_KV_FULL,
                "KV group %u can give %llu of %u cells, %llu needed; free or trim a sequence, or "
                "raise n_ctx",
                g, (unsigned long long)(cells->n_free + all_stale(kv, g)), cells->n_cells,
                (unsigned long long)n);
}

// Evicting more never hurts, so whether it would fit without any stale row is the whole question.
static int check_room(const kv_cache *kv, uint64_t total) {
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        const kv_group *const group = &kv->groups[g];
        if (group->cells.n_free < total && group->cells.n_free + all_stale(kv, g) < total)
            return kv_full(kv, g, total);
    }
    return MF_OK;
}

// The cells right behind the other sequences' tails are theirs to grow into.
static void guard_tails(kv_cache *kv, uint32_t g, uint32_t s, bool guarded) {
    for (uint32_t i = 0; i < kv->n_seq; i++) {
        if (i != s)
            kv_cells_guard(&kv->groups[g].cells, kv_part_tail(&kv->seqs[i].parts[g]), guarded);
    }
}

// Gives n rows from position pos on cells in a group that has them.
static void take_cells(kv_cache *kv, uint32_t g, uint32_t s, uint32_t pos, uint32_t n) {
    kv_cells *const cells = &kv->groups[g].cells;
    kv_part *const part = &kv->seqs[s].parts[g];
    const bool in_place = kv_cells_room(cells, kv_part_tail(part)) >= n;
    if (!in_place) guard_tails(kv, g, s, true);
    while (n) {
        uint32_t cell;
        const uint32_t k = kv_cells_place(&cell, cells, n, kv_part_tail(part));
        kv_cells_read(cells, cell, k, 1);
        kv_part_push(part, pos, cell, k);
        pos += k;
        n -= k;
    }
    if (!in_place) guard_tails(kv, g, s, false);
}

int kv_cache_append(kv_cache *kv, const kv_append *items, uint32_t n_items) {
    uint64_t total;
    TRY(check_items(&total, kv, items, n_items));
    if (total > kv->n_batch) {
        return fail(MF_ARG, "%llu rows in one batch of at most %u", (unsigned long long)total,
                    kv->n_batch);
    }
    TRY(check_positions(kv, items, n_items));
    TRY(check_room(kv, total));
    for (uint32_t i = 0; i < n_items; i++) {
        for (uint32_t g = 0; g < kv->n_groups; g++) {
            TRY(kv_part_reserve(&kv->seqs[items[i].seq].parts[g], items[i].n));
        }
    }
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        while (kv->groups[g].cells.n_free < total) evict(kv, g);
        for (uint32_t i = 0; i < n_items; i++) {
            const kv_seq *const seq = &kv->seqs[items[i].seq];
            take_cells(kv, g, (uint32_t)items[i].seq, kv_seq_next_pos(seq, seq->len), items[i].n);
        }
    }
    for (uint32_t i = 0; i < n_items; i++) kv_seq_push(&kv->seqs[items[i].seq], items[i].n);
    return MF_OK;
}

// Rows in a window of the next query once `done` rows more are there.
static uint64_t needed_after(const kv_seq *seq, uint32_t window, uint32_t done) {
    const uint64_t end = (uint64_t)kv_seq_next_pos(seq, seq->len) + done + 1;
    const uint32_t below = end <= window ? 0 : kv_seq_rows_below(seq, end - window);
    return seq->len - below + u32_min(done, window - 1);
}

// Would all batches fit, cut from the items in their order? Each needs its cells beside all rows
// needed before it.
static bool batches_fit(const kv_cache *kv, uint32_t g, const kv_append *items, uint32_t n_items,
                        uint64_t total) {
    const kv_group *const group = &kv->groups[g];
    const uint32_t n_cells = group->cells.n_cells, n_batch = kv->n_batch;
    uint64_t needed = n_cells - group->cells.n_free - all_stale(kv, g);
    uint32_t in_batch = 0;  // rows of the open batch so far
    for (uint32_t i = 0; i < n_items; i++) {
        const kv_seq *const seq = &kv->seqs[items[i].seq];
        for (uint32_t done = 0, n; done < items[i].n; done += n) {
            if (!in_batch && needed + (total < n_batch ? total : n_batch) > n_cells) return false;
            n = u32_min(items[i].n - done, n_batch - in_batch);
            // Once the window lies in the new rows, all further whole batches are alike.
            const uint32_t whole = (items[i].n - done) / n_batch * n_batch;
            if (!in_batch && done >= group->window && whole) n = whole;
            needed -= needed_after(seq, group->window, done);
            needed += needed_after(seq, group->window, done + n);
            total -= n;
            in_batch = (uint32_t)(((uint64_t)in_batch + n) % n_batch);
        }
    }
    return true;
}

int kv_cache_can_append(const kv_cache *kv, const kv_append *items, uint32_t n_items) {
    uint64_t total;
    TRY(check_items(&total, kv, items, n_items));
    TRY(check_positions(kv, items, n_items));
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        const kv_group *const group = &kv->groups[g];
        const bool fits = group->spec.kind == KV_FULL ? total <= group->cells.n_free
                                                      : batches_fit(kv, g, items, n_items, total);
        if (!fits) return kv_full(kv, g, total);
    }
    return MF_OK;
}

// ---- edits -----------------------------------------------------------------------------------

// The most rows >= 1 that some group forbids to go below; 0 if every trim is accepted.
static uint32_t fewest_rows(const kv_cache *kv, const kv_seq *seq) {
    uint32_t fewest = 0;
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        fewest = u32_max(fewest, kv_seq_fewest_rows(seq, seq->parts[g].base, kv->groups[g].window));
    }
    return fewest;
}

static void cut(kv_cache *kv, kv_seq *seq, uint32_t rows) {
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        kv_part *const part = &seq->parts[g];
        kv_part_drop_newest(part, &kv->groups[g].cells,
                            u32_min(seq->len - rows, seq->len - part->base));
        part->base = u32_min(part->base, rows);
    }
    kv_seq_cut(seq, rows);
}

int kv_cache_trim(kv_cache *kv, int32_t seq, uint32_t n) {
    kv_seq *const found = find_seq(kv, seq);
    if (!found) return MF_ARG;
    if (n > found->len)
        return fail(MF_ARG, "trim of %u rows: sequence %d has %u", n, seq, found->len);
    const uint32_t rows = found->len - n, fewest = fewest_rows(kv, found);
    if (rows && rows < fewest) {  // an empty sequence needs nothing
        return fail(MF_KV_GONE,
                    "trim of %u rows: a window of sequence %d has dropped rows that %u rows need; "
                    "trim at most %u, or all",
                    n, seq, rows, found->len - fewest);
    }
    cut(kv, found, rows);
    return MF_OK;
}

int kv_cache_max_trim(uint32_t *n, const kv_cache *kv, int32_t seq) {
    const kv_seq *const found = find_seq(kv, seq);
    if (!found) return MF_ARG;
    *n = found->len - fewest_rows(kv, found);
    return MF_OK;
}

int kv_cache_free_seq(kv_cache *kv, int32_t seq) {
    kv_seq *const found = find_seq(kv, seq);
    if (!found) return MF_ARG;
    cut(kv, found, 0);
    return MF_OK;
}

// ---- reading ---------------------------------------------------------------------------------

int kv_cache_len(uint32_t *rows, const kv_cache *kv, int32_t seq) {
    const kv_seq *const found = find_seq(kv, seq);
    if (!found) return MF_ARG;
    *rows = found->len;
    return MF_OK;
}

int kv_cache_next_pos(uint32_t *pos, const kv_cache *kv, int32_t seq) {
    const kv_seq *const found = find_seq(kv, seq);
    if (!found) return MF_ARG;
    *pos = kv_seq_next_pos(found, found->len);
    return MF_OK;
}

static int check_rows(const kv_seq *seq, int32_t index, uint32_t base, uint32_t first, uint32_t n) {
    if (first < base || first > seq->len || n > seq->len - first) {
        return fail(MF_ARG, "rows [%u, +%u): sequence %d has the rows [%u, %u) there", first, n,
                    index, base, seq->len);
    }
    return MF_OK;
}

int kv_cache_positions(uint32_t *pos, const kv_cache *kv, int32_t seq, uint32_t first, uint32_t n) {
    const kv_seq *const found = find_seq(kv, seq);
    if (!found) return MF_ARG;
    TRY(check_rows(found, seq, 0, first, n));
    for (uint32_t i = 0; i < n; i++) pos[i] = kv_seq_pos(found, first + i);
    return MF_OK;
}

static int check_group(const kv_cache *kv, uint32_t group) {
    return group < kv->n_groups
               ? MF_OK
               : fail(MF_ARG, "KV group %u: there are 0 to %u", group, kv->n_groups - 1);
}

int kv_cache_cells(int32_t *cells, const kv_cache *kv, uint32_t group, int32_t seq, uint32_t first,
                   uint32_t n) {
    TRY(check_group(kv, group));
    const kv_seq *const found = find_seq(kv, seq);
    if (!found) return MF_ARG;
    const kv_part *const part = &found->parts[group];
    TRY(check_rows(found, seq, part->base, first, n));
    for (uint32_t i = 0; i < n; i++) cells[i] = kv_part_cell(part, kv_seq_pos(found, first + i));
    return MF_OK;
}

int kv_cache_spans(const mf_kv_span **spans, uint32_t *n, const kv_cache *kv, uint32_t group,
                   int32_t seq) {
    TRY(check_group(kv, group));
    const kv_seq *const found = find_seq(kv, seq);
    if (!found) return MF_ARG;
    *spans = kv_part_spans(&found->parts[group]);
    *n = found->parts[group].n_spans;
    return MF_OK;
}

uint32_t kv_cache_used(const kv_cache *kv, uint32_t group) {
    return kv->groups[group].cells.n_cells - kv->groups[group].cells.n_free;
}

const kv_group_spec *kv_cache_group(const kv_cache *kv, uint32_t group) {
    return &kv->groups[group].spec;
}

uint32_t kv_cache_n_groups(const kv_cache *kv) { return kv->n_groups; }

// ---- check -----------------------------------------------------------------------------------

int kv_cache_check(const kv_cache *kv) {
    uint32_t *readers[KV_MAX_GROUPS] = {0}, n_cells[KV_MAX_GROUPS];
    int status = MF_OK;
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        n_cells[g] = kv->groups[g].cells.n_cells;
        readers[g] = mem_alloc(n_cells[g], sizeof **readers);
        if (!readers[g]) TRY_GOTO(done, MF_NOMEM);
    }
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const kv_seq *const seq = &kv->seqs[s];
        TRY_GOTO(done, kv_seq_check(seq, kv->n_groups, n_cells, readers));
        for (uint32_t g = 0; g < kv->n_groups; g++) {
            if (kv_seq_first_needed(seq, seq->len, kv->groups[g].window) < seq->parts[g].base) {
                TRY_GOTO(done, fail(MF_INTERNAL,
                                    "group %u lost a row that sequence %u needs; please report it",
                                    g, s));
            }
        }
    }
    for (uint32_t g = 0; g < kv->n_groups; g++)
        TRY_GOTO(done, kv_cells_check(&kv->groups[g].cells, readers[g]));
done:
    for (uint32_t g = 0; g < kv->n_groups; g++) mem_free(readers[g]);
    return status;
}
