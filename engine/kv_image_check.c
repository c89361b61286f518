// Owns the question whether an image is one that could have been made. Refuses, with the field and
// what is wrong with it, everything else: the numbers may come from a file that somebody wrote by
// hand. Time and memory go with the spans of the image, not with its rows.
//
// Invariant of an image: positions increase, in as few runs as can be; no row that the next query
// sees is missing; the rows that two sequences share are a common prefix of both, with one row
// before each, the same in all groups; numbers are given in the order of the first visit.
#include <stdlib.h>

#include "alloc.h"
#include "error.h"
#include "kv_image.h"
#include "kv_store.h"

// Row numbers from `first` on, up to the next stretch, were given in one go to the rows from `row`
// on of sequence `owner`.
typedef struct stretch {
    uint32_t first, owner, row;
    uint32_t before;  // number + 1 of the row before the first; 0: nobody has one
} stretch;

// Numbers [a, a + len) of one group are the same rows as [b, b + len) of another.
typedef struct twin {
    uint32_t a, b, len;
} twin;

typedef struct checking {
    const kv_image *image;
    uint32_t g;
    stretch *stretches;  // [n], in order
    size_t n;
    uint32_t next;  // the next number
} checking;

// ---- positions -------------------------------------------------------------------------------

static uint32_t run_end(const kv_image *image, const kv_image_seq *seq, uint32_t k) {
    return k + 1 < seq->n_runs ? image->runs[seq->run_at + k + 1].row : seq->len;
}

static int check_runs(const kv_image *image, uint32_t i, uint32_t max_gaps) {
    const kv_image_seq *const seq = &image->seqs[i];
    const kv_run *const runs = image->runs + seq->run_at;
    if (seq->len > KV_POS_MAX) {
        return fail(MF_FORMAT, "SEQS: sequence %u has len %u; positions allow at most %d rows", i,
                    seq->len, KV_POS_MAX);
    }
    if ((seq->n_runs == 0) != (seq->len == 0)) {
        return fail(MF_FORMAT, "SEQS: sequence %u has %u runs of positions for %u rows", i,
                    seq->n_runs, seq->len);
    }
    if (seq->n_runs > max_gaps + 1) {
        return fail(MF_FORMAT,
                    "SEQS: sequence %u has %u gaps between its positions; a read here can carry %u",
                    i, seq->n_runs - 1, max_gaps);
    }
    for (uint32_t k = 0; k < seq->n_runs; k++) {
        const uint32_t end = run_end(image, seq, k);
        const uint64_t end_pos = (uint64_t)runs[k].pos + end - runs[k].row;
        if ((k == 0 && runs[k].row != 0) || runs[k].row >= end || end > seq->len) {
            return fail(MF_FORMAT,
                        "SEQS: sequence %u, run %u starts at row %u and ends at row %u; runs start "
                        "at row 0 and go up to %u",
                        i, k, runs[k].row, end, seq->len);
        }
        if (end_pos > KV_POS_MAX) {
            return fail(MF_FORMAT,
                        "SEQS: sequence %u, run %u ends at position %llu; the limit is %d", i, k,
                        (unsigned long long)end_pos, KV_POS_MAX);
        }
        if (k + 1 < seq->n_runs && runs[k + 1].pos <= end_pos) {
            return fail(MF_FORMAT,
                        "SEQS: sequence %u, run %u starts at position %u; the one before reaches "
                        "%llu, so at least %llu is needed",
                        i, k + 1, runs[k + 1].pos, (unsigned long long)end_pos,
                        (unsigned long long)end_pos + 1);
        }
    }
    return MF_OK;
}

// As much of a sequence as its positions take.
static kv_seq positions_of(const kv_image *image, uint32_t i) {
    const kv_image_seq *const from = &image->seqs[i];
    kv_seq seq = {.len = from->len, .n_runs = from->n_runs};
    for (uint32_t k = 0; k < from->n_runs; k++) seq.runs[k] = image->runs[from->run_at + k];
    return seq;
}

static int check_seq(const kv_image *image, uint32_t i, uint32_t max_gaps) {
    const kv_image_seq *const from = &image->seqs[i];
    if (from->id < 0) {
        return fail(MF_FORMAT, "SEQS: sequence %u has id %u; it must be below 2^31", i,
                    (uint32_t)from->id);
    }
    TRY(check_runs(image, i, max_gaps));
    const kv_seq seq = positions_of(image, i);
    if (from->clean > kv_seq_clean_rows(&seq)) {
        return fail(MF_FORMAT, "SEQS: sequence %u has clean %u; %u rows are at position = row", i,
                    from->clean, kv_seq_clean_rows(&seq));
    }
    for (uint32_t g = 0; g < image->n_groups; g++) {
        const uint32_t base = image->groups[g].parts[i].base;
        const uint32_t most = kv_image_first_needed(image, g, i);
        if (base > most) {
            return fail(
                MF_FORMAT,
                "ROWS %u: sequence %u has base %u; its next token needs the rows from %u on", g, i,
                base, most);
        }
    }
    return MF_OK;
}

uint32_t kv_image_first_needed(const kv_image *image, uint32_t g, uint32_t i) {
    const uint32_t window = image->groups[g].window;
    const kv_seq seq = positions_of(image, i);
    return kv_seq_first_needed(&seq, seq.len, window ? window : KV_WHOLE_WINDOW);
}

static int compare_u32(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static int check_ids(const kv_image *image) {
    uint32_t *const ids = mem_alloc(image->n_seqs, sizeof *ids);
    if (!ids) return MF_NOMEM;
    for (uint32_t i = 0; i < image->n_seqs; i++) ids[i] = (uint32_t)image->seqs[i].id;
    if (image->n_seqs) qsort(ids, image->n_seqs, sizeof *ids, compare_u32);
    int status = MF_OK;
    for (uint32_t i = 1; i < image->n_seqs && !status; i++) {
        if (ids[i] == ids[i - 1])
            status = fail(MF_FORMAT, "SEQS: two sequences have id %u; give each its own", ids[i]);
    }
    mem_free(ids);
    return status;
}

// ---- shared rows -----------------------------------------------------------------------------

// Leading rows that two sequences have at the same positions.
static uint32_t common_rows(const kv_image *image, uint32_t i, uint32_t j) {
    const kv_image_seq *const a = &image->seqs[i], *const b = &image->seqs[j];
    const uint32_t n = u32_min(a->n_runs, b->n_runs);
    uint32_t k = 0, rows = 0;
    for (; k < n; k++) {
        const kv_run x = image->runs[a->run_at + k], y = image->runs[b->run_at + k];
        if (x.row != y.row || x.pos != y.pos) break;
        rows = u32_min(run_end(image, a, k), run_end(image, b, k));
    }
    return rows;
}

static size_t stretch_with(const checking *c, uint32_t number) {
    size_t lo = 0, hi = c->n;
    while (hi - lo > 1) {
        const size_t mid = lo + (hi - lo) / 2;
        if (c->stretches[mid].first <= number) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    return lo;
}

// Row `row` of sequence i, behind the row with number + 1 `before` (0: none is live), and n - 1
// more have numbers of one stretch that was there before.
static int check_shared(checking *c, uint32_t i, uint32_t row, uint32_t number, uint32_t n,
                        uint32_t before, stretch *s) {
    const uint32_t off = number - s->first;
    if (row != s->row + off) {
        return fail(MF_FORMAT,
                    "ROWS %u: row %u of sequence %u is number %u, which is row %u of sequence %u; "
                    "shared rows are the same rows of both",
                    c->g, row, i, number, s->row + off, s->owner);
    }
    const uint32_t same = common_rows(c->image, i, s->owner);
    if (row + n > same) {
        return fail(MF_FORMAT,
                    "ROWS %u: sequences %u and %u share row %u; only their first %u rows are at "
                    "the same positions",
                    c->g, s->owner, i, row + n - 1, same);
    }
    const uint32_t clean = c->image->seqs[i].clean, other = c->image->seqs[s->owner].clean;
    if (u32_min(clean, row + n) != u32_min(other, row + n)) {
        return fail(
            MF_FORMAT,
            "SEQS: sequences %u and %u have clean %u and %u; they share their first %u rows",
            s->owner, i, other, clean, row + n);
    }
    if (!before) return MF_OK;
    if (off == 0 && !s->before) s->before = before;
    const uint32_t want = off ? number : s->before;
    if (before != want) {
        return fail(MF_FORMAT,
                    "ROWS %u: sequence %u has number %u before %u; another has %u there: shared "
                    "rows are a common prefix",
                    c->g, i, before - 1, number, want - 1);
    }
    return MF_OK;
}

// One span: first what has been seen, then what is new.
static int check_numbers(checking *c, uint32_t i, uint32_t row, kv_image_span span,
                         uint32_t before) {
    if (span.first > c->next) {
        return fail(MF_FORMAT, "ROWS %u: sequence %u goes on with number %u; the next one is %u",
                    c->g, i, span.first, c->next);
    }
    for (size_t k = stretch_with(c, span.first); span.len && span.first < c->next; k++) {
        const uint32_t end = k + 1 < c->n ? c->stretches[k + 1].first : c->next;
        const uint32_t n = u32_min(span.len, end - span.first);
        TRY(check_shared(c, i, row, span.first, n, before, &c->stretches[k]));
        row += n;
        span.first += n;
        span.len -= n;
        before = span.first;
    }
    if (!span.len) return MF_OK;
    c->stretches[c->n++] = (stretch){c->next, i, row, before};
    c->next += span.len;
    return MF_OK;
}

static int check_part(checking *c, uint32_t i) {
    const kv_image_group *const group = &c->image->groups[c->g];
    const kv_image_part *const part = &group->parts[i];
    const uint32_t len = c->image->seqs[i].len;
    uint32_t row = part->base, before = 0;
    for (uint32_t k = 0; k < part->n_spans; k++) {
        const kv_image_span span = group->spans[part->span_at + k];
        if (!span.len || span.len > len - row) {
            return fail(MF_FORMAT,
                        "ROWS %u: sequence %u, span %u has len %u; %u rows are left for it", c->g,
                        i, k, span.len, len - row);
        }
        if (span.len > group->n_rows || span.first > group->n_rows - span.len) {
            return fail(MF_FORMAT, "ROWS %u: sequence %u, span %u is [%u, +%u); n_rows is %u", c->g,
                        i, k, span.first, span.len, group->n_rows);
        }
        if (before && span.first == before) {
            return fail(MF_FORMAT,
                        "ROWS %u: sequence %u, span %u goes on at %u where the one before ends; "
                        "they must be one",
                        c->g, i, k, span.first);
        }
        TRY(check_numbers(c, i, row, span, before));
        row += span.len;
        before = span.first + span.len;
    }
    if (row == len) return MF_OK;
    return fail(MF_FORMAT, "ROWS %u: the spans of sequence %u have %u rows; base and len need %u",
                c->g, i, row - part->base, len - part->base);
}

static int check_group(const kv_image *image, uint32_t g) {
    const kv_image_group *const group = &image->groups[g];
    checking c = {.image = image, .g = g};
    c.stretches = mem_alloc(group->n_spans, sizeof *c.stretches);
    int status = c.stretches ? MF_OK : MF_NOMEM;
    for (uint32_t i = 0; i < image->n_seqs && !status; i++) status = check_part(&c, i);
    mem_free(c.stretches);
    if (status || c.next == group->n_rows) return status;
    return fail(MF_FORMAT, "ROWS %u: n_rows is %u; the spans name %u", g, group->n_rows, c.next);
}

// ---- the same in all groups ------------------------------------------------------------------

static int by_a(const void *x, const void *y) {
    const uint32_t a = ((const twin *)x)->a, b = ((const twin *)y)->a;
    return (a > b) - (a < b);
}

static int by_b(const void *x, const void *y) {
    const uint32_t a = ((const twin *)x)->b, b = ((const twin *)y)->b;
    return (a > b) - (a < b);
}

// Where a walk along the rows of a part is: the span, and how far in it.
typedef struct place {
    const kv_image_span *span;
    uint32_t off;
} place;

static place place_of(const kv_image_group *group, uint32_t i, uint32_t row) {
    const kv_image_part *const part = &group->parts[i];
    place p = {group->spans + part->span_at, row - part->base};
    while (p.off >= p.span->len) p.off -= p.span++->len;
    return p;
}

// Adds the rows that sequence i has in both groups.
static size_t add_twins(twin *twins, size_t n, const kv_image *image, uint32_t g, uint32_t h,
                        uint32_t i) {
    const kv_image_group *const a = &image->groups[g], *const b = &image->groups[h];
    const uint32_t first = u32_max(a->parts[i].base, b->parts[i].base);
    uint32_t left = image->seqs[i].len - first;
    if (!left) return n;
    place p = place_of(a, i, first), q = place_of(b, i, first);
    while (left) {
        const uint32_t len = u32_min(p.span->len - p.off, q.span->len - q.off);
        twins[n++] = (twin){p.span->first + p.off, q.span->first + q.off, len};
        left -= len;
        p.off += len;
        q.off += len;
        if (p.off == p.span->len) p = (place){p.span + 1, 0};
        if (q.off == q.span->len) q = (place){q.span + 1, 0};
    }
    return n;
}

// Sorted by one of the two numbers: where intervals of it overlap, the other number agrees.
static bool agree(const twin *twins, size_t n, bool by_second) {
    uint64_t end = 0;
    uint32_t delta = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t at = by_second ? twins[i].b : twins[i].a, here = twins[i].a - twins[i].b;
        if (at < end && here != delta) return false;
        const uint64_t last = (uint64_t)at + twins[i].len;
        end = last > end ? last : end;
        delta = here;
    }
    return true;
}

static uint64_t live_rows(const kv_image *image, uint32_t g) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < image->n_seqs; i++)
        n += image->seqs[i].len - image->groups[g].parts[i].base;
    return n;
}

// A row is one row in all groups that have it: two sequences share it in all or in none.
static int check_twins(const kv_image *image, uint32_t g, uint32_t h) {
    const kv_image_group *const a = &image->groups[g], *const b = &image->groups[h];
    if (a->n_rows == live_rows(image, g) && b->n_rows == live_rows(image, h)) return MF_OK;
    twin *const twins = mem_alloc(a->n_spans + b->n_spans, sizeof *twins);
    if (!twins) return MF_NOMEM;
    size_t n = 0;
    for (uint32_t i = 0; i < image->n_seqs; i++) n = add_twins(twins, n, image, g, h, i);
    if (n) qsort(twins, n, sizeof *twins, by_a);
    bool ok = agree(twins, n, false);
    if (n) qsort(twins, n, sizeof *twins, by_b);
    ok = ok && agree(twins, n, true);
    mem_free(twins);
    if (ok) return MF_OK;
    return fail(MF_FORMAT,
                "ROWS %u and ROWS %u: two sequences share a row in one group and not in the other",
                g, h);
}

int kv_image_check(const kv_image *image, const kv_config *config) {
    if (image->n_groups != config->n_groups) {
        return fail(MF_FORMAT, "SEQS: n_groups is %u; this model has %u", image->n_groups,
                    config->n_groups);
    }
    if (image->n_seqs > config->n_seq) {
        return fail(MF_FORMAT, "SEQS: n_seqs is %u; this cache has %u sequences", image->n_seqs,
                    config->n_seq);
    }
    for (uint32_t g = 0; g < image->n_groups; g++) {
        const kv_group_spec *const spec = &config->groups[g];
        const uint32_t window = spec->kind == KV_SLIDING ? spec->window : 0;
        if (image->groups[g].window != window) {
            return fail(MF_FORMAT, "ROWS %u: window is %u; this model has %u (0: none)", g,
                        image->groups[g].window, window);
        }
    }
    for (uint32_t i = 0; i < image->n_seqs; i++)
        TRY(check_seq(image, i, kv_max_gaps(config->n_seq)));
    TRY(check_ids(image));
    for (uint32_t g = 0; g < image->n_groups; g++) TRY(check_group(image, g));
    for (uint32_t g = 0; g < image->n_groups; g++)
        for (uint32_t h = g + 1; h < image->n_groups; h++) TRY(check_twins(image, g, h));
    return MF_OK;
}
