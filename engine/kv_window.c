// Owns how a batch finds its rows: the spans that its queries see, the cheapest mode in which the
// device can be told, and the cells that its own rows are stored in. Refuses a mode that is not
// true, and a store into a cell that has another reader. Changes nothing.
//
// Modes are judged by spans, never by rows: of all queries in one span the first one looks back the
// furthest beyond it.
#include "error.h"
#include "kv_store.h"

// ---- spans -----------------------------------------------------------------------------------

// Oldest position that a query at q sees.
static uint32_t oldest_seen(uint32_t q, uint32_t window) { return q < window ? 0 : q - window + 1; }

static uint32_t end_of(const mf_kv_span *span) { return (uint32_t)(span->pos + span->len); }

// Position of the first of a sequence's last n rows; n = 0: of the next row.
static uint32_t first_query(const kv_seq *seq, uint32_t n) {
    return n ? kv_seq_pos(seq, seq->len - n) : kv_seq_next_pos(seq, seq->len);
}

uint32_t kv_read_spans(const mf_kv_span **spans, const kv_cache *kv, uint32_t g, uint32_t s,
                       uint32_t n) {
    const kv_part *const part = &kv->seqs[s].parts[g];
    const mf_kv_span *const all = kv_part_spans(part);
    const uint32_t oldest = oldest_seen(first_query(&kv->seqs[s], n), kv->groups[g].window);
    const uint32_t first = kv_span_above(all, part->n_spans, oldest);
    *spans = first ? all + first : all;  // no arithmetic on NULL
    return part->n_spans - first;
}

// ---- modes -----------------------------------------------------------------------------------

// What the queries of one item see in one group.
typedef struct view {
    const mf_kv_span *spans;  // [n_spans], from the one with the oldest row seen on
    uint32_t n_spans, window;
    uint32_t query;  // position of the first query; the others are all rows above it
} view;

static view view_of(const kv_cache *kv, uint32_t g, const kv_append *item) {
    view v = {.window = kv->groups[g].window, .query = first_query(&kv->seqs[item->seq], item->n)};
    v.n_spans = kv_read_spans(&v.spans, kv, g, (uint32_t)item->seq, item->n);
    return v;
}

// Not after a gap at the start: causal means every position from 0 or the window's start on.
static bool is_causal(const view *v) {
    if (v->window > 1 &&
        (v->n_spans != 1 || (uint32_t)v->spans[0].pos > oldest_seen(v->query, v->window)))
        return false;
    for (uint32_t i = 0; i < v->n_spans; i++)
        if (v->spans[i].cell != v->spans[i].pos) return false;
    return true;
}

static bool is_range(const view *v) {
    uint32_t i = kv_span_above(v->spans, v->n_spans, v->query);
    for (i = u32_max(i, 1); i < v->n_spans; i++) {
        const uint32_t query = u32_max(v->query, (uint32_t)v->spans[i].pos);
        if (oldest_seen(query, v->window) < end_of(&v->spans[i - 1])) return false;
    }
    return true;
}

// Returns the number of queries.
static uint32_t fill_ranges(kv_range *ranges, const view *v) {
    uint32_t n = 0;
    for (uint32_t i = kv_span_above(v->spans, v->n_spans, v->query); i < v->n_spans; i++) {
        const uint32_t pos = (uint32_t)v->spans[i].pos, cell = (uint32_t)v->spans[i].cell;
        for (uint32_t q = u32_max(v->query, pos); q < end_of(&v->spans[i]); q++) {
            const uint32_t oldest = u32_max(oldest_seen(q, v->window), pos);
            ranges[n++] = (kv_range){.lo = cell + (oldest - pos), .hi = cell + (q - pos) + 1};
        }
    }
    return n;
}

static bool is_true(kv_window_mode mode, const kv_cache *kv, uint32_t g, const kv_append *items,
                    uint32_t n_items) {
    if (mode == KV_WINDOW_CAUSAL && n_items > 1) return false;
    for (uint32_t i = 0; i < n_items; i++) {
        const view v = view_of(kv, g, &items[i]);
        const bool holds = mode == KV_WINDOW_CAUSAL  ? is_causal(&v)
                           : mode == KV_WINDOW_RANGE ? is_range(&v)
                                                     : v.n_spans <= KV_MAP_MAX_SPANS;
        if (!holds) return false;
    }
    return true;
}

static void fill(kv_window *out, const kv_cache *kv, uint32_t g, const kv_append *items,
                 uint32_t n_items) {
    for (uint32_t i = 0, rows = 0; i < n_items && out->mode != KV_WINDOW_CAUSAL; i++) {
        const view v = view_of(kv, g, &items[i]);
        if (out->mode == KV_WINDOW_RANGE) {
            rows += fill_ranges(out->ranges + rows, &v);
        } else {
            out->spans[i] = v.spans;
            out->n_spans[i] = v.n_spans;
        }
    }
}

static int fail_spans(const kv_cache *kv, uint32_t g, const kv_append *items, uint32_t n_items,
                      uint32_t modes) {
    static const char *const names[] = {"no", "causal", "range", "causal or range"};
    int32_t seq = items[0].seq;
    uint32_t most = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        const view v = view_of(kv, g, &items[i]);
        if (v.n_spans > most) {
            most = v.n_spans;
            seq = items[i].seq;
        }
    }
    if (modes >> KV_WINDOW_RUNS & 1)
        return fail(MF_KV_SPANS,
                    "KV group %u: sequence %d reads %u spans, more than %d; compact the cache "
                    "(mf_kv_defrag)",
                    g, seq, most, KV_MAP_MAX_SPANS);
    return fail(MF_KV_SPANS,
                "KV group %u: a batch of %u sequence%s, sequence %d with %u span%s, cannot be read "
                "in %s mode; allow runs, or compact the cache (mf_kv_defrag)",
                g, n_items, n_items == 1 ? "" : "s", seq, most, most == 1 ? "" : "s",
                names[modes & (1 << KV_WINDOW_CAUSAL | 1 << KV_WINDOW_RANGE)]);
}

static int check_items(const kv_cache *kv, uint32_t g, const kv_append *items, uint32_t n_items) {
    TRY(kv_find_group(kv, g));
    if (!n_items) return fail(MF_ARG, "a window of no sequence");
    for (uint32_t i = 0; i < n_items; i++) {
        const kv_seq *const seq = kv_find_seq(kv, items[i].seq);
        if (!seq) return MF_ARG;
        if (!items[i].n || items[i].n > seq->len)
            return fail(MF_ARG, "a window of %u rows: sequence %d has %u", items[i].n, items[i].seq,
                        seq->len);
        const uint32_t oldest = oldest_seen(first_query(seq, items[i].n), kv->groups[g].window);
        if (kv_seq_rows_below(seq, oldest) < seq->parts[g].base)
            return fail(MF_KV_GONE,
                        "KV group %u: %u rows of sequence %d see position %u, which is dropped", g,
                        items[i].n, items[i].seq, oldest);
    }
    return MF_OK;
}

int kv_cache_window(kv_window *out, const kv_cache *kv, uint32_t group, const kv_append *items,
                    uint32_t n_items, uint32_t modes) {
    TRY(check_items(kv, group, items, n_items));
    for (uint32_t mode = 0; mode < KV_WINDOW_MODES; mode++) {
        if (!(modes >> mode & 1)) continue;
        if (!is_true((kv_window_mode)mode, kv, group, items, n_items)) continue;
        out->mode = (kv_window_mode)mode;
        fill(out, kv, group, items, n_items);
        return MF_OK;
    }
    return fail_spans(kv, group, items, n_items, modes);
}

// ---- stores ----------------------------------------------------------------------------------

// The belt to the brace that appended cells are private.
static int check_private(const kv_cache *kv, uint32_t g, uint32_t cell, uint32_t n) {
    for (uint32_t end = cell + n, readers, same; cell < end; cell += same) {
        same = kv_cells_extent(&readers, &kv->groups[g].cells, cell);
        if (readers != 1)
            return fail(MF_KV_SHARED,
                        "a store into cell %u of KV group %u, which has %u readers; please report "
                        "it",
                        cell, g, readers);
    }
    return MF_OK;
}

int kv_cache_store_cells(int32_t *cells, const kv_cache *kv, uint32_t group, int32_t seq,
                         uint32_t first, uint32_t n) {
    TRY(kv_find_group(kv, group));
    const kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    const kv_part *const part = &found->parts[group];
    if (first < part->base || first > found->len || n > found->len - first)
        return fail(MF_ARG,
                    "a store into rows [%u, +%u) of sequence %d: KV group %u has rows [%u, %u)",
                    first, n, seq, group, part->base, found->len);
    if (!n) return MF_OK;
    const mf_kv_span *const spans = kv_part_spans(part);
    const uint32_t pos = kv_seq_pos(found, first), at = kv_span_above(spans, part->n_spans, pos);
    uint32_t skip = pos - (uint32_t)spans[at].pos;
    for (uint32_t i = at, done = 0, k; done < n; i++, done += k, skip = 0) {
        k = u32_min(n - done, (uint32_t)spans[i].len - skip);
        TRY(check_private(kv, group, (uint32_t)spans[i].cell + skip, k));
        for (uint32_t r = 0; r < k; r++) cells[done + r] = spans[i].cell + (int32_t)(skip + r);
    }
    return MF_OK;
}
