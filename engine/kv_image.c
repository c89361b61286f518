// Owns the way of sequences from a cache to an image and back. Refuses an image that the cache
// cannot hold before it gives anything up: all memory first, then changes that cannot fail.
//
// Invariant: an image is a function of the sequences' rows and of which are shared. No cell and no
// count is in it, but for the runs that say where the row data is.
#include "kv_image.h"

#include <stdlib.h>

#include "alloc.h"
#include "error.h"
#include "kv_store.h"

// ---- life ------------------------------------------------------------------------------------

kv_image *kv_image_new(uint32_t n_seqs, uint32_t n_groups) {
    kv_image *const image = mem_alloc(1, sizeof *image);
    if (!image) return NULL;
    image->n_seqs = n_seqs;
    image->n_groups = n_groups;
    image->seqs = mem_alloc(n_seqs, sizeof *image->seqs);
    bool ok = image->seqs;
    for (uint32_t g = 0; g < n_groups && ok; g++) {
        image->groups[g].parts = mem_alloc(n_seqs, sizeof *image->groups[g].parts);
        ok = image->groups[g].parts;
    }
    if (ok) return image;
    kv_image_free(image);
    return NULL;
}

void kv_image_free(kv_image *image) {
    if (!image) return;
    for (uint32_t g = 0; g < image->n_groups; g++) {
        mem_free(image->groups[g].parts);
        mem_free(image->groups[g].spans);
        mem_free(image->groups[g].runs);
    }
    mem_free(image->seqs);
    mem_free(image->runs);
    mem_free(image);
}

static int compare_ids(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

// Ids that exist, each once.
static int check_ids(const kv_cache *kv, const int32_t *seqs, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (!kv_find_seq(kv, seqs[i])) return MF_ARG;
    int32_t *const sorted = mem_alloc(n, sizeof *sorted);
    if (!sorted) return MF_NOMEM;
    for (uint32_t i = 0; i < n; i++) sorted[i] = seqs[i];
    if (n) qsort(sorted, n, sizeof *sorted, compare_ids);
    int status = MF_OK;
    for (uint32_t i = 1; i < n && !status; i++)
        if (sorted[i] == sorted[i - 1]) status = fail(MF_ARG, "sequence %d twice", sorted[i]);
    mem_free(sorted);
    return status;
}

// ---- what it says ----------------------------------------------------------------------------

uint32_t kv_image_next_pos(const kv_image *image, uint32_t i) {
    const kv_image_seq *const seq = &image->seqs[i];
    if (!seq->n_runs) return 0;
    const kv_run last = image->runs[seq->run_at + seq->n_runs - 1];
    return last.pos + (seq->len - last.row);
}

size_t kv_image_spans(mf_kv_span *spans, size_t capacity, const kv_image *image, uint32_t g,
                      uint32_t i) {
    const kv_image_seq *const seq = &image->seqs[i];
    const kv_image_part *const part = &image->groups[g].parts[i];
    const kv_run *run = image->runs + seq->run_at, *const end = run + seq->n_runs;
    uint32_t row = part->base;
    size_t n = 0;
    for (uint32_t k = 0; k < part->n_spans; k++) {
        kv_image_span left = image->groups[g].spans[part->span_at + k];
        while (left.len) {
            while (run + 1 < end && run[1].row <= row) run++;
            const uint32_t len = u32_min(left.len, (run + 1 < end ? run[1].row : seq->len) - row);
            if (n < capacity)
                spans[n] = (mf_kv_span){.pos = (int32_t)(run->pos + (row - run->row)),
                                        .cell = (int32_t)left.first,
                                        .len = (int32_t)len};
            n++;
            row += len;
            left.first += len;
            left.len -= len;
        }
    }
    return n;
}

// ---- from a cache ----------------------------------------------------------------------------

static int grown(size_t *capacity, size_t n) {
    if (n < *capacity) return MF_OK;
    if (n > SIZE_MAX / 4) return fail(MF_LIMIT, "%zu runs in one image", n);
    *capacity = n < 8 ? 16 : 2 * n;
    return MF_OK;
}

// The next row of a part has this number, the rows after it the numbers that follow.
static int push_numbers(kv_image_group *group, kv_image_part *part, uint32_t first, uint32_t n) {
    if (part->n_spans) {
        kv_image_span *const last = &group->spans[group->n_spans - 1];
        if (last->first + last->len == first) {
            last->len += n;
            return MF_OK;
        }
    }
    size_t capacity = group->spans_capacity;
    TRY(grown(&capacity, group->n_spans));
    if (capacity > group->spans_capacity) {
        kv_image_span *const spans = mem_grow(group->spans, capacity, sizeof *spans);
        if (!spans) return MF_NOMEM;
        group->spans = spans;
        group->spans_capacity = capacity;
    }
    group->spans[group->n_spans++] = (kv_image_span){first, n};
    part->n_spans++;
    return MF_OK;
}

static void add_run(kv_image_group *group, uint32_t row, uint32_t cell, uint32_t n) {
    kv_row_run *const last = group->n_runs ? &group->runs[group->n_runs - 1] : NULL;
    if (last && last->row + last->len == row && last->cell + last->len == cell) {
        last->len += n;
        return;
    }
    group->runs[group->n_runs++] = (kv_row_run){row, cell, n};
}

// The next number, for n cells in a row.
static int push_rows(kv_image_group *group, kv_image_part *part, uint32_t cell, uint32_t n) {
    size_t capacity = group->runs_capacity;
    TRY(grown(&capacity, group->n_runs));
    if (capacity > group->runs_capacity) {
        kv_row_run *const runs = mem_grow(group->runs, capacity, sizeof *runs);
        if (!runs) return MF_NOMEM;
        group->runs = runs;
        group->runs_capacity = capacity;
    }
    TRY(push_numbers(group, part, group->n_rows, n));
    add_run(group, group->n_rows, cell, n);
    group->n_rows += n;
    return MF_OK;
}

// `numbers` [n_cells]: number + 1 of the shared cells that have one; not needed without any.
static int make_part(kv_image_group *group, kv_image_part *part, const kv_cache *kv, uint32_t g,
                     uint32_t s, uint32_t *numbers) {
    part->base = kv->seqs[s].parts[g].base;
    part->span_at = group->n_spans;
    kv_walk walk = kv_walk_rows(kv, g, s, part->base, kv->seqs[s].len);
    for (kv_piece p; kv_walk_next(&p, &walk);) {
        if (p.readers == 1) {
            TRY(push_rows(group, part, p.cell, p.len));
            continue;
        }
        for (uint32_t cell = p.cell; cell < p.cell + p.len; cell++) {
            if (numbers[cell]) {
                TRY(push_numbers(group, part, numbers[cell] - 1, 1));
                continue;
            }
            numbers[cell] = group->n_rows + 1;
            TRY(push_rows(group, part, cell, 1));
        }
    }
    return MF_OK;
}

static int make_group(kv_image *image, const kv_cache *kv, uint32_t g, const int32_t *seqs) {
    const kv_group *const from = &kv->groups[g];
    kv_image_group *const group = &image->groups[g];
    group->window = from->spec.kind == KV_SLIDING ? from->spec.window : 0;
    uint32_t *const numbers =
        mem_alloc(from->cells.n_shared ? from->cells.n_cells : 0, sizeof *numbers);
    int status = numbers ? MF_OK : MF_NOMEM;
    for (uint32_t i = 0; i < image->n_seqs && !status; i++)
        status = make_part(group, &group->parts[i], kv, g, (uint32_t)seqs[i], numbers);
    mem_free(numbers);
    return status;
}

static int make_seqs(kv_image *image, const kv_cache *kv, const int32_t *seqs) {
    size_t n_runs = 0;
    for (uint32_t i = 0; i < image->n_seqs; i++) n_runs += kv->seqs[seqs[i]].n_runs;
    image->runs = mem_alloc(n_runs, sizeof *image->runs);
    if (!image->runs) return MF_NOMEM;
    for (uint32_t i = 0; i < image->n_seqs; i++) {
        const kv_seq *const from = &kv->seqs[seqs[i]];
        image->seqs[i] =
            (kv_image_seq){seqs[i], from->len, from->clean, from->n_runs, image->n_runs};
        for (uint32_t k = 0; k < from->n_runs; k++) image->runs[image->n_runs++] = from->runs[k];
    }
    return MF_OK;
}

int kv_image_make(kv_image **out, const kv_cache *kv, const int32_t *seqs, uint32_t n) {
    TRY(check_ids(kv, seqs, n));
    kv_image *const image = kv_image_new(n, kv->n_groups);
    if (!image) return MF_NOMEM;
    int status = make_seqs(image, kv, seqs);
    for (uint32_t g = 0; g < kv->n_groups && !status; g++) status = make_group(image, kv, g, seqs);
    if (status) {
        kv_image_free(image);
        return status;
    }
    *out = image;
    return MF_OK;
}

// ---- into a cache ----------------------------------------------------------------------------

// What a load will do to one group.
typedef struct plan {
    bool lean;            // without the stale rows of the image and of all others
    kv_image_span *kept;  // [n_kept] row numbers in order, no two that touch
    size_t n_kept;
    uint32_t n_rows;  // in all of them
} plan;

typedef struct loading {
    kv_cache *kv;
    kv_image *image;
    const int32_t *into;  // [image->n_seqs]
    bool *replaced;       // [kv->n_seq]
    plan plans[KV_MAX_GROUPS];
} loading;

// Cells that are neither reserved nor needed by a sequence that stays.
static uint32_t cells_to_have(const loading *l, uint32_t g) {
    kv_cache *const kv = l->kv;
    uint32_t n = kv->groups[g].cells.n_cells;
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        if (l->replaced[s]) continue;
        n -= kv->seqs[s].parts[g].n_reserved;
        n -= kv_tally_needed(kv, g, s);
    }
    kv_tally_clear(kv, g);
    return n;
}

// The first row that a sequence keeps in a lean load.
static uint32_t lean_base(const kv_image *image, uint32_t g, uint32_t i) {
    return u32_max(image->groups[g].parts[i].base, kv_image_first_needed(image, g, i));
}

static int compare_spans(const void *a, const void *b) {
    const kv_image_span *const x = a, *const y = b;
    return (x->first > y->first) - (x->first < y->first);
}

// The numbers that some sequence needs.
static void keep_needed(plan *p, const kv_image *image, uint32_t g) {
    const kv_image_group *const group = &image->groups[g];
    size_t n = 0;
    for (uint32_t i = 0; i < image->n_seqs; i++) {
        const kv_image_part *const part = &group->parts[i];
        uint32_t skip = lean_base(image, g, i) - part->base;
        for (uint32_t k = 0; k < part->n_spans; k++) {
            const kv_image_span span = group->spans[part->span_at + k];
            const uint32_t off = u32_min(skip, span.len);
            skip -= off;
            if (off < span.len) p->kept[n++] = (kv_image_span){span.first + off, span.len - off};
        }
    }
    if (n) qsort(p->kept, n, sizeof *p->kept, compare_spans);
    p->n_kept = p->n_rows = 0;
    for (size_t i = 0; i < n; i++) {
        const kv_image_span next = p->kept[i];
        kv_image_span *const last = p->n_kept ? &p->kept[p->n_kept - 1] : NULL;
        if (last && next.first <= last->first + last->len) {
            last->len = u32_max(last->len, next.first + next.len - last->first);
        } else {
            p->kept[p->n_kept++] = next;
        }
    }
    for (size_t i = 0; i < p->n_kept; i++) p->n_rows += p->kept[i].len;
}

static int plan_group(loading *l, uint32_t g) {
    const kv_image_group *const group = &l->image->groups[g];
    plan *const p = &l->plans[g];
    const uint32_t room = cells_to_have(l, g);
    p->kept = mem_alloc(group->n_spans, sizeof *p->kept);
    if (!p->kept) return MF_NOMEM;
    p->lean = group->n_rows > room;
    if (p->lean) {
        keep_needed(p, l->image, g);
    } else if (group->n_rows) {
        p->kept[p->n_kept++] = (kv_image_span){0, group->n_rows};
        p->n_rows = group->n_rows;
    }
    if (p->n_rows <= room) return MF_OK;
    return kv_full(l->kv, g, room, p->n_rows);
}

// Most runs of free cells that the rows of a group go to. A run of used cells starts where
// somebody's span or reservation starts; each sequence and each stretch of kept rows may cut a free
// run in two.
static size_t most_runs(const loading *l, uint32_t g) {
    const kv_cache *const kv = l->kv;
    const plan *const p = &l->plans[g];
    size_t n = 1 + 2 * (l->image->n_seqs + p->n_kept);
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const kv_part *const part = &kv->seqs[s].parts[g];
        n += part->n_spans + (part->n_held - part->held_first);
    }
    return n < p->n_rows ? n : p->n_rows;
}

static int reserve_group(loading *l, uint32_t g) {
    kv_image_group *const group = &l->image->groups[g];
    const size_t n_runs = most_runs(l, g);
    if (n_runs > group->runs_capacity) {
        kv_row_run *const runs = mem_grow(group->runs, n_runs, sizeof *runs);
        if (!runs) return MF_NOMEM;
        group->runs = runs;
        group->runs_capacity = n_runs;
    }
    for (uint32_t i = 0; i < l->image->n_seqs; i++) {
        const kv_image_seq *const from = &l->image->seqs[i];
        const size_t most = n_runs + group->parts[i].n_spans + from->n_runs;
        const uint32_t n_live = from->len - group->parts[i].base;
        TRY(kv_part_reserve(&l->kv->seqs[l->into[i]].parts[g],
                            most < n_live ? (uint32_t)most : n_live));
    }
    return MF_OK;
}

static void make_room(const loading *l, uint32_t g) {
    kv_cache *const kv = l->kv;
    if (l->plans[g].lean) {
        for (uint32_t s = 0; s < kv->n_seq; s++) kv_forget(kv, g, s, kv_stale(kv, g, s));
    }
    kv_make_room(kv, g, l->plans[g].n_rows);
}

// Cells for the rows that get their numbers with this sequence: those below `end`. Each run has one
// reader for the time being.
static void place_rows(const loading *l, uint32_t g, uint32_t s, size_t *kept, uint32_t end) {
    const plan *const p = &l->plans[g];
    kv_image_group *const group = &l->image->groups[g];
    uint32_t tail = KV_NO_CELL;
    for (; *kept < p->n_kept && p->kept[*kept].first < end; ++*kept) {
        kv_image_span *const span = &p->kept[*kept];
        uint32_t left = u32_min(span->len, end - span->first);
        while (left) {
            uint32_t cell;
            const uint32_t k = kv_take(&cell, l->kv, g, s, left, tail);
            add_run(group, span->first, cell, k);
            span->first += k;
            span->len -= k;
            left -= k;
            tail = cell + k;
        }
        if (span->len) return;  // the rest is the next sequence's
    }
}

// The run with a row number, which is in one.
static const kv_row_run *run_of(const kv_image_group *group, uint32_t row) {
    size_t lo = 0, hi = group->n_runs;
    while (hi - lo > 1) {
        const size_t mid = lo + (hi - lo) / 2;
        if (group->runs[mid].row <= row) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    return &group->runs[lo];
}

// The sequence, whose positions are in place, reads its rows.
static void read_rows(const loading *l, uint32_t g, uint32_t i) {
    const kv_image_group *const group = &l->image->groups[g];
    const kv_image_part *const from = &group->parts[i];
    const kv_seq *const seq = &l->kv->seqs[l->into[i]];
    kv_part *const part = &l->kv->seqs[l->into[i]].parts[g];
    part->base = l->plans[g].lean ? lean_base(l->image, g, i) : from->base;
    uint32_t row = from->base, position = 0;  // position: the run of them
    for (uint32_t k = 0; k < from->n_spans; k++) {
        kv_image_span span = group->spans[from->span_at + k];
        const uint32_t off = u32_min(row < part->base ? part->base - row : 0, span.len);
        row += off;
        span.first += off;
        span.len -= off;
        while (span.len) {
            while (position + 1 < seq->n_runs && seq->runs[position + 1].row <= row) position++;
            const kv_row_run *const run = run_of(group, span.first);
            const uint32_t in_run = span.first - run->row, cell = run->cell + in_run;
            uint32_t n = u32_min(span.len, run->len - in_run);
            if (position + 1 < seq->n_runs) n = u32_min(n, seq->runs[position + 1].row - row);
            kv_part_push(part, seq->runs[position].pos + (row - seq->runs[position].row), cell, n);
            kv_cells_read(&l->kv->groups[g].cells, cell, n, 1);
            row += n;
            span.first += n;
            span.len -= n;
        }
    }
}

static void load_group(const loading *l, uint32_t g) {
    kv_image_group *const group = &l->image->groups[g];
    kv_group *const to = &l->kv->groups[g];
    group->n_runs = 0;
    size_t kept = 0;
    uint32_t end = 0;  // numbers given so far
    for (uint32_t i = 0; i < l->image->n_seqs; i++) {
        const kv_image_part *const part = &group->parts[i];
        for (uint32_t k = 0; k < part->n_spans; k++) {
            const kv_image_span span = group->spans[part->span_at + k];
            end = u32_max(end, span.first + span.len);
        }
        place_rows(l, g, (uint32_t)l->into[i], &kept, end);
        read_rows(l, g, i);
    }
    for (size_t r = 0; r < group->n_runs; r++)
        kv_cells_read(&to->cells, group->runs[r].cell, group->runs[r].len, -1);
    to->generation += group->n_runs != 0;
}

static void load_positions(const loading *l, uint32_t i) {
    const kv_image_seq *const from = &l->image->seqs[i];
    kv_seq *const seq = &l->kv->seqs[l->into[i]];
    seq->len = from->len;
    seq->clean = from->clean;
    seq->n_runs = from->n_runs;
    for (uint32_t k = 0; k < from->n_runs; k++) seq->runs[k] = l->image->runs[from->run_at + k];
}

// Checks and memory: all that may fail.
static int prepare(loading *l) {
    l->replaced = mem_alloc(l->kv->n_seq, sizeof *l->replaced);
    if (!l->replaced) return MF_NOMEM;
    for (uint32_t i = 0; i < l->image->n_seqs; i++) l->replaced[l->into[i]] = true;
    for (uint32_t g = 0; g < l->kv->n_groups; g++) TRY(plan_group(l, g));
    for (uint32_t g = 0; g < l->kv->n_groups; g++) TRY(reserve_group(l, g));
    return MF_OK;
}

int kv_image_load(kv_cache *kv, kv_image *image, const int32_t *into, uint32_t n) {
    if (n != image->n_seqs) {
        return fail(MF_ARG, "a load into %u sequences: the image has %u", n, image->n_seqs);
    }
    TRY(check_ids(kv, into, n));
    kv_config config;
    kv_cache_config(&config, kv);
    TRY(kv_image_check(image, &config));
    loading l = {.kv = kv, .image = image, .into = into};
    const int status = prepare(&l);
    if (!status) {
        for (uint32_t i = 0; i < n; i++) kv_cache_free_seq(kv, into[i]);
        // While the sequences are empty: they have no stale rows to give.
        for (uint32_t g = 0; g < kv->n_groups; g++) make_room(&l, g);
        for (uint32_t i = 0; i < n; i++) load_positions(&l, i);
        for (uint32_t g = 0; g < kv->n_groups; g++) load_group(&l, g);
    }
    for (uint32_t g = 0; g < kv->n_groups; g++) mem_free(l.plans[g].kept);
    mem_free(l.replaced);
    return status;
}
