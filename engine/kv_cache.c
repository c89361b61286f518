// Owns the cell store: the arenas of all groups and the sequences. Refuses a call as a whole or
// does it as a whole: all checks and all allocations come before the first change, evictions
// included.
//
// Invariant N: no group lacks a row that the next query of a sequence sees. Rows older than that
// are stale: a sliding group keeps them until its arena wants their cells.
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "kv_store.h"

enum { KV_HUNK = 64 };  // most rows of one eviction

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
    TRY(kv_cells_new(&group->cells, spec->n_cells));
    group->needed = mem_alloc(spec->n_cells, sizeof *group->needed);
    return group->needed ? MF_OK : MF_NOMEM;
}

uint32_t kv_max_gaps(uint32_t n_seq) {
    return KV_MAP_MAX_SPANS - (32 - (uint32_t)__builtin_clz(n_seq));
}

int kv_cache_new(kv_cache **out, const kv_config *c) {
    if (c->n_groups < 1 || c->n_groups > KV_MAX_GROUPS)
        return fail(MF_ARG, "%u groups: give 1 to %d", c->n_groups, KV_MAX_GROUPS);
    if (c->n_seq < 1 || c->n_seq > INT32_MAX)
        return fail(MF_ARG, "%u sequences: give 1 to %d", c->n_seq, INT32_MAX);
    if (c->n_batch < 1) return fail(MF_ARG, "batches of 0 rows: give at least 1");
    kv_cache *const kv = mem_alloc(1, sizeof *kv);
    if (!kv) return MF_NOMEM;
    int status = MF_OK;
    kv->n_seq = c->n_seq;
    kv->n_batch = c->n_batch;
    kv->can_rope = c->can_rope;
    kv->max_gaps = kv_max_gaps(c->n_seq);
    while (kv->n_groups < c->n_groups) {
        const uint32_t g = kv->n_groups++;
        TRY_GOTO(fail, group_new(&kv->groups[g], &c->groups[g], g));
    }
    kv->seqs = mem_alloc(c->n_seq, sizeof *kv->seqs);
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
        mem_free(kv->groups[g].needed);
        kv_regroup_release(&kv->groups[g]);
        for (uint32_t s = 0; kv->seqs && s < kv->n_seq; s++) {
            mem_free(kv->seqs[s].parts[g].memory);
            mem_free(kv->seqs[s].parts[g].held);
        }
    }
    kv_moves_free(&kv->moves);
    mem_free(kv->roped.at);
    mem_free(kv->edited.at);
    mem_free(kv->seqs);
    mem_free(kv);
}

kv_seq *kv_find_seq(const kv_cache *kv, int32_t seq) {
    if (seq >= 0 && (uint32_t)seq < kv->n_seq) return &kv->seqs[seq];
    fail(MF_ARG, "sequence %d: there are 0 to %u", seq, kv->n_seq - 1);
    return NULL;
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
        const kv_seq *const seq = kv_find_seq(kv, items[i].seq);
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

// Cells that the items take from the free ones.
static uint64_t fresh_cells(const kv_cache *kv, uint32_t g, const kv_append *items,
                            uint32_t n_items) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        n += items[i].n - u32_min(items[i].n, kv->seqs[items[i].seq].parts[g].n_reserved);
    }
    return n;
}

// All memory that place_rows of the group, and the regroup that may have to follow, need.
static int reserve_rows(kv_cache *kv, uint32_t g, const kv_append *items, uint32_t n_items) {
    const uint32_t pieces = kv_pieces(kv, g, (uint32_t)fresh_cells(kv, g, items, n_items));
    bool regroup = false;
    for (uint32_t i = 0; i < n_items; i++) {
        kv_part *const part = &kv->seqs[items[i].seq].parts[g];
        // Each item before may have cut a free run in two.
        const uint64_t most = (uint64_t)pieces + i + (part->n_held - part->held_first);
        const uint32_t n = most < items[i].n ? (uint32_t)most : items[i].n;
        TRY(kv_part_reserve(part, n));
        const mf_kv_span *spans;
        regroup |= (uint64_t)kv_read_spans(&spans, kv, g, (uint32_t)items[i].seq, 0) + n >
                   KV_MAP_MAX_SPANS;
    }
    return regroup ? kv_regroup_reserve(kv, g) : MF_OK;
}

// Gives the new rows cells in a group that has them: first those reserved for the sequence.
static void place_rows(kv_cache *kv, uint32_t g, const kv_append *items, uint32_t n_items) {
    kv_make_room(kv, g, (uint32_t)fresh_cells(kv, g, items, n_items));
    for (uint32_t i = 0; i < n_items; i++) {
        kv_seq *const seq = &kv->seqs[items[i].seq];
        kv_part *const part = &seq->parts[g];
        const uint32_t pos = kv_seq_next_pos(seq, seq->len);
        for (uint32_t done = kv_part_draw(part, pos, items[i].n), k; done < items[i].n; done += k) {
            uint32_t cell;
            k = kv_take(&cell, kv, g, (uint32_t)items[i].seq, items[i].n - done,
                        kv_part_tail(part));
            kv_part_push(part, pos + done, cell, k);
        }
    }
}

// Placement does its best; a sequence that still lies in more spans than a read can carry is put
// together, with all others of the group.
static void regroup_if_scattered(kv_cache *kv, uint32_t g, const kv_append *items,
                                 uint32_t n_items) {
    for (uint32_t i = 0; i < n_items; i++) {
        const mf_kv_span *spans;
        if (kv_read_spans(&spans, kv, g, (uint32_t)items[i].seq, items[i].n) <= KV_MAP_MAX_SPANS)
            continue;
        kv_regroup(kv, g);
        kv->groups[g].compactions++;
        return;
    }
}

void kv_work_begin(kv_work *work, kv_cache *kv) {
    *work = (kv_work){0};
    kv->moves.n = kv->roped.n = 0;
}

void kv_work_end(kv_work *work, const kv_cache *kv) {
    work->moves = kv->moves.at;
    work->n_moves = kv->moves.n;
    work->roped = kv->roped.at;
    work->n_roped = kv->roped.n;
}

int kv_cache_append(kv_work *work, kv_cache *kv, const kv_append *items, uint32_t n_items) {
    uint64_t total;
    kv_work_begin(work, kv);
    TRY(check_items(&total, kv, items, n_items));
    if (total > kv->n_batch) {
        return fail(MF_ARG, "%llu rows in one batch of at most %u", (unsigned long long)total,
                    kv->n_batch);
    }
    TRY(check_positions(kv, items, n_items));
    for (uint32_t g = 0; g < kv->n_groups; g++)
        TRY(kv_check_room(kv, g, fresh_cells(kv, g, items, n_items)));
    for (uint32_t g = 0; g < kv->n_groups; g++) TRY(reserve_rows(kv, g, items, n_items));
    for (uint32_t g = 0; g < kv->n_groups; g++) place_rows(kv, g, items, n_items);
    for (uint32_t i = 0; i < n_items; i++) kv_seq_push(&kv->seqs[items[i].seq], items[i].n);
    for (uint32_t g = 0; g < kv->n_groups; g++) regroup_if_scattered(kv, g, items, n_items);
    kv_work_end(work, kv);
    return MF_OK;
}

int kv_cache_can_append(kv_cache *kv, const kv_append *items, uint32_t n_items) {
    uint64_t total;
    TRY(check_items(&total, kv, items, n_items));
    TRY(check_positions(kv, items, n_items));
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        const kv_cells *const cells = &kv->groups[g].cells;
        const uint64_t fresh = fresh_cells(kv, g, items, n_items);
        if (kv->groups[g].spec.kind == KV_FULL ? fresh <= cells->n_free
                                               : kv_batches_fit(kv, g, items, n_items, total))
            continue;
        return kv_full(kv, g, (uint64_t)cells->n_free + kv_freeable(kv, g), fresh);
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
    kv_seq *const found = kv_find_seq(kv, seq);
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
    const kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    *n = found->len - fewest_rows(kv, found);
    return MF_OK;
}

int kv_cache_free_seq(kv_cache *kv, int32_t seq) {
    kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    cut(kv, found, 0);
    for (uint32_t g = 0; g < kv->n_groups; g++) kv_hold_release(kv, g, (uint32_t)seq, 0);
    return MF_OK;
}

// Live rows of src below n, with the stale ones: how far dst can be trimmed follows from them.
static void share_part(kv_cache *kv, uint32_t g, kv_seq *dst, const kv_seq *src, uint32_t n) {
    kv_part *const to = &dst->parts[g];
    const kv_part *const from = &src->parts[g];
    to->base = u32_min(from->base, n);
    uint32_t left = n - to->base;
    for (const mf_kv_span *span = kv_part_spans(from); left; span++) {
        const uint32_t k = u32_min(left, (uint32_t)span->len);
        kv_part_push(to, (uint32_t)span->pos, (uint32_t)span->cell, k);
        kv_cells_read(&kv->groups[g].cells, (uint32_t)span->cell, k, 1);
        left -= k;
    }
}

int kv_cache_share(kv_cache *kv, int32_t dst, int32_t src, uint32_t n) {
    kv_seq *const to = kv_find_seq(kv, dst);
    const kv_seq *const from = kv_find_seq(kv, src);
    if (!to || !from) return MF_ARG;
    if (to == from)
        return fail(MF_ARG, "sequence %d cannot share with itself; name another one", dst);
    if (n > from->len)
        return fail(MF_ARG, "share of %u rows: sequence %d has %u", n, src, from->len);
    if (to->len) {
        return fail(MF_KV_NOT_EMPTY, "share into sequence %d, which has %u rows; free it first",
                    dst, to->len);
    }
    const uint32_t fewest = fewest_rows(kv, from);
    if (n && n < fewest) {
        return fail(MF_KV_GONE,
                    "share of %u rows: a window of sequence %d has dropped rows that %u rows need; "
                    "share %u to %u",
                    n, src, n, fewest, from->len);
    }
    if (!n) return MF_OK;
    for (uint32_t g = 0; g < kv->n_groups; g++)
        TRY(kv_part_reserve(&to->parts[g], from->parts[g].n_spans));
    for (uint32_t g = 0; g < kv->n_groups; g++) share_part(kv, g, to, from, n);
    memcpy(to->runs, from->runs, from->n_runs * sizeof *from->runs);
    to->n_runs = from->n_runs;
    to->clean = from->clean;
    kv_seq_cut(to, n);
    return MF_OK;
}

// A sliding group holds nothing: its arena is large enough.
int kv_cache_reserve(kv_cache *kv, int32_t seq, uint32_t n) {
    const kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        if (kv->groups[g].spec.kind != KV_FULL) continue;
        const uint32_t has = found->parts[g].n_reserved;
        if (n > has) TRY(kv_check_room(kv, g, n - has));
    }
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        const uint32_t has = found->parts[g].n_reserved;
        if (kv->groups[g].spec.kind == KV_FULL && n > has)
            TRY(kv_hold_reserve(kv, g, (uint32_t)seq, n - has));
    }
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        if (kv->groups[g].spec.kind != KV_FULL) continue;
        kv_hold_release(kv, g, (uint32_t)seq, n);
        kv_hold_take(kv, g, (uint32_t)seq, n - found->parts[g].n_reserved);
    }
    return MF_OK;
}

// ---- reading ---------------------------------------------------------------------------------

int kv_cache_len(uint32_t *rows, const kv_cache *kv, int32_t seq) {
    const kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    *rows = found->len;
    return MF_OK;
}

int kv_cache_clean(uint32_t *rows, const kv_cache *kv, int32_t seq) {
    const kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    *rows = found->clean;
    return MF_OK;
}

int kv_cache_next_pos(uint32_t *pos, const kv_cache *kv, int32_t seq) {
    const kv_seq *const found = kv_find_seq(kv, seq);
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
    const kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    TRY(check_rows(found, seq, 0, first, n));
    for (uint32_t i = 0; i < n; i++) pos[i] = kv_seq_pos(found, first + i);
    return MF_OK;
}

int kv_find_group(const kv_cache *kv, uint32_t group) {
    return group < kv->n_groups
               ? MF_OK
               : fail(MF_ARG, "KV group %u: there are 0 to %u", group, kv->n_groups - 1);
}

int kv_cache_spans(const mf_kv_span **spans, uint32_t *n, const kv_cache *kv, uint32_t group,
                   int32_t seq) {
    TRY(kv_find_group(kv, group));
    const kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    *spans = kv_part_spans(&found->parts[group]);
    *n = found->parts[group].n_spans;
    return MF_OK;
}

int kv_cache_stats(kv_stats *out, const kv_cache *kv, uint32_t g) {
    TRY(kv_find_group(kv, g));
    const kv_group *const group = &kv->groups[g];
    *out = (kv_stats){
        .n_used = group->cells.n_cells - group->cells.n_free,
        .n_shared = group->cells.n_shared,
        .n_free_runs = group->cells.n_free_runs,
        .largest_run = kv_cells_largest(&group->cells),
        .compactions = group->compactions,
        .generation = group->generation,
    };
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        out->n_reserved += kv->seqs[s].parts[g].n_reserved;
        out->n_stale += kv_stale(kv, g, s);
    }
    return MF_OK;
}

const kv_group_spec *kv_cache_group(const kv_cache *kv, uint32_t group) {
    return &kv->groups[group].spec;
}

void kv_cache_config(kv_config *out, const kv_cache *kv) {
    *out = (kv_config){.n_groups = kv->n_groups,
                       .n_seq = kv->n_seq,
                       .n_batch = kv->n_batch,
                       .can_rope = kv->can_rope};
    for (uint32_t g = 0; g < kv->n_groups; g++) out->groups[g] = kv->groups[g].spec;
}

uint32_t kv_cache_n_groups(const kv_cache *kv) { return kv->n_groups; }

// ---- check -----------------------------------------------------------------------------------

static int broken(const char *what, uint32_t g, uint32_t s) {
    return fail(MF_INTERNAL, "KV group %u, sequence %u: %s; please report it", g, s, what);
}

static int check_seq(const kv_cache *kv, uint32_t s) {
    const kv_seq *const seq = &kv->seqs[s];
    if (seq->n_runs > kv->max_gaps + 1) return broken("more gaps than a read can carry", 0, s);
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        const kv_part *const part = &seq->parts[g];
        if (kv->groups[g].spec.kind == KV_SLIDING && part->n_reserved)
            return broken("cells reserved in a window", g, s);
        if (kv_seq_first_needed(seq, seq->len, kv->groups[g].window) < part->base)
            return broken("a lost row that the next query needs", g, s);
        for (uint32_t i = part->held_first; i < part->n_held; i++) {
            const kv_hold hold = part->held[i];
            uint32_t readers;
            const uint32_t n = kv_cells_extent(&readers, &kv->groups[g].cells, hold.cell);
            if (n < hold.len || readers != 1) return broken("reserved cells with readers", g, s);
        }
    }
    return MF_OK;
}

// Rows that several sequences read are a common prefix of theirs: each cell has one position and
// one cell before it. Both are kept as value + 1; `before` [n_cells], `at` [n_cells], all zero.
static int check_prefixes(const kv_cache *kv, uint32_t g, uint32_t *before, uint32_t *at) {
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const mf_kv_span *const spans = kv_part_spans(&kv->seqs[s].parts[g]);
        uint32_t last = 0;  // cell before, + 1
        for (uint32_t i = 0; i < kv->seqs[s].parts[g].n_spans; i++) {
            for (uint32_t k = 0; k < (uint32_t)spans[i].len; k++) {
                const uint32_t cell = (uint32_t)spans[i].cell + k, pos = (uint32_t)spans[i].pos + k;
                if (at[cell] && at[cell] != pos + 1) return broken("a row at two positions", g, s);
                if (last && before[cell] && before[cell] != last)
                    return broken("shared rows that are no common prefix", g, s);
                at[cell] = pos + 1;
                if (last) before[cell] = last;
                last = cell + 1;
            }
        }
    }
    return MF_OK;
}

static int check_group(const kv_cache *kv, uint32_t g, const uint32_t *readers) {
    const kv_group *const group = &kv->groups[g];
    TRY(kv_cells_check(&group->cells, readers));
    for (uint32_t i = 0; group->needed && i < group->cells.n_cells; i++) {
        if (group->needed[i]) return broken("a count left behind", g, i);
    }
    if (!group->cells.n_shared) return MF_OK;
    uint32_t *const before = mem_alloc(group->cells.n_cells, sizeof *before);
    uint32_t *const at = mem_alloc(group->cells.n_cells, sizeof *at);
    const int status = before && at ? check_prefixes(kv, g, before, at) : MF_NOMEM;
    mem_free(before);
    mem_free(at);
    return status;
}

int kv_cache_check(const kv_cache *kv) {
    uint32_t *readers[KV_MAX_GROUPS] = {0}, n_cells[KV_MAX_GROUPS];
    int status = MF_OK;
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        n_cells[g] = kv->groups[g].cells.n_cells;
        readers[g] = mem_alloc(n_cells[g], sizeof **readers);
        if (!readers[g]) TRY_GOTO(done, MF_NOMEM);
    }
    for (uint32_t s = 0; s < kv->n_seq; s++)
        TRY_GOTO(done, kv_seq_check(&kv->seqs[s], kv->n_groups, n_cells, readers));
    for (uint32_t g = 0; g < kv->n_groups; g++) TRY_GOTO(done, check_group(kv, g, readers[g]));
    for (uint32_t s = 0; s < kv->n_seq; s++) TRY_GOTO(done, check_seq(kv, s));
done:
    for (uint32_t g = 0; g < kv->n_groups; g++) mem_free(readers[g]);
    return status;
}
