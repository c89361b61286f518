// Owns the extents of one arena. Refuses an arena without cells or of 2^31 and more.
//
// Invariant: the extents tile the arena, neighbours differ in readers, `starts` marks their first
// cells and no others, and each free extent is in the list of its size class. The state is a
// function of the readers of each cell, but for the order of the lists.
#include "kv_cells.h"

#include <string.h>

#include "alloc.h"
#include "error.h"

// ---- bits ------------------------------------------------------------------------------------

static int bits_new(kv_bits *bits, uint32_t n) {
    size_t total = 0, words = n;
    bits->n_levels = 0;
    do {
        words = (words + 63) / 64;
        bits->level_at[bits->n_levels++] = total;
        total += words;
    } while (words > 1);
    bits->n_words = total;
    bits->words = mem_alloc(total, sizeof *bits->words);
    return bits->words ? MF_OK : MF_NOMEM;
}

static void bits_set(kv_bits *bits, uint32_t i) {
    for (uint32_t level = 0; level < bits->n_levels; level++, i /= 64) {
        bits->words[bits->level_at[level] + i / 64] |= (uint64_t)1 << i % 64;
    }
}

static void bits_clear(kv_bits *bits, uint32_t i) {
    for (uint32_t level = 0; level < bits->n_levels; level++, i /= 64) {
        uint64_t *const word = &bits->words[bits->level_at[level] + i / 64];
        *word &= ~((uint64_t)1 << i % 64);
        if (*word) return;
    }
}

// The last set bit at or before i; cell 0 is always set.
static uint32_t bits_last(const kv_bits *bits, uint32_t i) {
    uint32_t level = 0;
    uint64_t found = bits->words[i / 64] & (UINT64_MAX >> (63 - i % 64));
    while (!found) {  // up, to the words before this one
        i /= 64;
        level++;
        found = bits->words[bits->level_at[level] + i / 64] & (((uint64_t)1 << i % 64) - 1);
    }
    for (;; level--) {
        i = i / 64 * 64 + 63 - (uint32_t)__builtin_clzll(found);
        if (level == 0) return i;
        found = bits->words[bits->level_at[level - 1] + i];
        i *= 64;
    }
}

static bool bits_has(const kv_bits *bits, uint32_t i) { return bits->words[i / 64] >> i % 64 & 1; }

// ---- extents ---------------------------------------------------------------------------------

static uint32_t class_of(uint32_t len) { return 31 - (uint32_t)__builtin_clz(len); }

static void link_free(kv_cells *cells, uint32_t first) {
    kv_extent *const e = &cells->at[first];
    uint32_t *const head = &cells->free_head[class_of(e->len)];
    e->prev = KV_NO_CELL;
    e->next = *head;
    if (*head != KV_NO_CELL) cells->at[*head].prev = first;
    *head = first;
    cells->n_free += e->len;
    cells->n_free_runs++;
}

static void unlink_free(kv_cells *cells, uint32_t first) {
    const kv_extent *const e = &cells->at[first];
    if (e->next != KV_NO_CELL) cells->at[e->next].prev = e->prev;
    if (e->prev != KV_NO_CELL) {
        cells->at[e->prev].next = e->next;
    } else {
        cells->free_head[class_of(e->len)] = e->next;
    }
    cells->n_free -= e->len;
    cells->n_free_runs--;
}

static void add_extent(kv_cells *cells, uint32_t first, uint32_t len, uint32_t readers) {
    cells->at[first].len = len;
    cells->at[first].readers = readers;
    bits_set(&cells->starts, first);
    cells->n_extents++;
    if (readers > 1) cells->n_shared += len;
    if (!readers) link_free(cells, first);
}

static void remove_extent(kv_cells *cells, uint32_t first) {
    const kv_extent *const e = &cells->at[first];
    cells->n_extents--;
    if (e->readers > 1) cells->n_shared -= e->len;
    if (!e->readers) unlink_free(cells, first);
    bits_clear(&cells->starts, first);
}

// Makes `cell` the start of an extent.
static void split(kv_cells *cells, uint32_t cell) {
    if (cell == cells->n_cells || bits_has(&cells->starts, cell)) return;
    const uint32_t first = bits_last(&cells->starts, cell);
    const kv_extent whole = cells->at[first];
    remove_extent(cells, first);
    add_extent(cells, first, cell - first, whole.readers);
    add_extent(cells, cell, first + whole.len - cell, whole.readers);
}

// Joins the extent that starts at `cell` with the one before, if they may be one.
static void join(kv_cells *cells, uint32_t cell) {
    if (cell == 0 || cell == cells->n_cells) return;
    const uint32_t first = bits_last(&cells->starts, cell - 1);
    const kv_extent left = cells->at[first], right = cells->at[cell];
    if (left.readers != right.readers) return;
    remove_extent(cells, cell);
    remove_extent(cells, first);
    add_extent(cells, first, left.len + right.len, left.readers);
}

int kv_cells_new(kv_cells *cells, uint32_t n_cells) {
    *cells = (kv_cells){.n_cells = n_cells};
    if (n_cells < 1 || n_cells > INT32_MAX) {
        return fail(MF_ARG, "an arena of %u cells: give 1 to %d", n_cells, INT32_MAX);
    }
    TRY(bits_new(&cells->starts, n_cells));
    cells->at = mem_alloc(n_cells, sizeof *cells->at);
    if (!cells->at) return MF_NOMEM;
    kv_cells_reset(cells);
    return MF_OK;
}

void kv_cells_reset(kv_cells *cells) {
    memset(cells->starts.words, 0, cells->starts.n_words * sizeof *cells->starts.words);
    memset(cells->free_head, 0xff, sizeof cells->free_head);
    cells->n_free = cells->n_shared = cells->n_extents = cells->n_free_runs = 0;
    add_extent(cells, 0, cells->n_cells, 0);
}

void kv_cells_free(kv_cells *cells) {
    mem_free(cells->starts.words);
    mem_free(cells->at);
}

void kv_cells_read(kv_cells *cells, uint32_t first, uint32_t n, int32_t delta) {
    const uint32_t end = first + n;
    split(cells, first);
    split(cells, end);
    for (uint32_t cell = first; cell < end;) {
        const kv_extent e = cells->at[cell];
        remove_extent(cells, cell);
        add_extent(cells, cell, e.len, e.readers + (uint32_t)delta);
        cell += e.len;
    }
    // Inside, neighbours differed before and still do: only the two ends can join.
    join(cells, end);
    join(cells, first);
}

uint32_t kv_cells_extent(uint32_t *readers, const kv_cells *cells, uint32_t cell) {
    const uint32_t first = bits_last(&cells->starts, cell);
    *readers = cells->at[first].readers;
    return first + cells->at[first].len - cell;
}

uint32_t kv_cells_largest(const kv_cells *cells) {
    uint32_t largest = 0;
    for (uint32_t c = KV_FREE_CLASSES; c-- > 0 && !largest;) {
        for (uint32_t cell = cells->free_head[c]; cell != KV_NO_CELL; cell = cells->at[cell].next)
            largest = u32_max(largest, cells->at[cell].len);
    }
    return largest;
}

// ---- placement -------------------------------------------------------------------------------

uint32_t kv_cells_room(const kv_cells *cells, uint32_t cell) {
    if (cell >= cells->n_cells || !bits_has(&cells->starts, cell)) return 0;
    return cells->at[cell].readers ? 0 : cells->at[cell].len;
}

void kv_cells_guard(kv_cells *cells, uint32_t cell, bool guarded) {
    if (cell < cells->n_cells) cells->at[cell].guarded = guarded;
}

// Cells to leave free at the start of a run of which n are taken.
static uint32_t skip_of(const kv_extent *run, uint32_t n) {
    return run->guarded && run->len > n ? u32_min(KV_GROW, (run->len - n) / 2) : 0;
}

// Plain best fit would put every decoded row into the smallest hole. A run with KV_GROW cells to
// spare lets a sequence go on in place; if there is none, the largest one gives it most. Of each
// class only the KV_LOOK runs freed last are looked at: thousands of holes must not cost a scan.
uint32_t kv_cells_place(uint32_t *first, const kv_cells *cells, uint32_t n, uint32_t tail) {
    const uint32_t room = kv_cells_room(cells, tail);
    if (room >= n) {
        *first = tail;
        return n;
    }
    uint32_t roomy = KV_NO_CELL, roomy_len = UINT32_MAX, large = KV_NO_CELL, large_len = 0,
             most = KV_NO_CELL;
    for (uint32_t c = KV_FREE_CLASSES; c-- > 0;) {
        // Runs of this class are shorter than 2^(c+1). Once one fits, only a roomy one can be
        // better.
        const uint64_t wanted = large != KV_NO_CELL ? (uint64_t)n + KV_GROW : n;
        if (most != KV_NO_CELL && (uint64_t)2 << c <= wanted) break;
        uint32_t left = KV_LOOK;
        for (uint32_t cell = cells->free_head[c]; cell != KV_NO_CELL && left--;
             cell = cells->at[cell].next) {
            const kv_extent *const run = &cells->at[cell];
            const uint32_t skip = skip_of(run, n), len = run->len - skip;
            if (most == KV_NO_CELL || run->len > cells->at[most].len) most = cell;
            if (len < n) continue;
            if (len > large_len) {
                large = cell + skip;
                large_len = len;
            }
            if (len >= (uint64_t)n + KV_GROW && len < roomy_len) {
                roomy = cell + skip;
                roomy_len = len;
            }
        }
    }
    if (roomy != KV_NO_CELL || large != KV_NO_CELL) {
        *first = roomy != KV_NO_CELL ? roomy : large;
        return n;
    }
    *first = room ? tail : most;
    return room ? room : cells->at[most].len;
}

// ---- check -----------------------------------------------------------------------------------

static int broken(const char *what, uint32_t cell) {
    return fail(MF_INTERNAL, "cell store: %s at cell %u; please report it", what, cell);
}

static int check_bits(const kv_cells *cells) {
    const kv_bits *const bits = &cells->starts;
    size_t n = cells->n_cells;
    for (uint32_t level = 1; level < bits->n_levels; level++) {
        n = (n + 63) / 64;
        for (size_t i = 0; i < n; i++) {
            const bool mark = bits->words[bits->level_at[level] + i / 64] >> i % 64 & 1;
            if (mark != (bits->words[bits->level_at[level - 1] + i] != 0))
                return broken("wrong summary bit", (uint32_t)i);
        }
    }
    return MF_OK;
}

int kv_cells_check(const kv_cells *cells, const uint32_t *readers) {
    uint32_t n_free = 0, n_shared = 0, n_free_runs = 0, n_extents = 0, n_listed = 0;
    for (uint32_t cell = 0, before = UINT32_MAX; cell < cells->n_cells;) {
        const kv_extent *const e = &cells->at[cell];
        if (!bits_has(&cells->starts, cell)) return broken("an extent without its mark", cell);
        if (!e->len || e->len > cells->n_cells - cell)
            return broken("an extent of impossible length", cell);
        if (e->readers == before) return broken("two extents that are one", cell);
        if (e->guarded) return broken("a guard left behind", cell);
        for (uint32_t i = 0; i < e->len; i++) {
            if (readers[cell + i] != e->readers)
                return broken("a wrong number of readers", cell + i);
            if (i && bits_has(&cells->starts, cell + i))
                return broken("a mark inside an extent", cell + i);
        }
        n_free += e->readers ? 0 : e->len;
        n_shared += e->readers > 1 ? e->len : 0;
        n_free_runs += !e->readers;
        n_extents++;
        before = e->readers;
        cell += e->len;
    }
    if (n_free != cells->n_free) return broken("a wrong number of free cells", n_free);
    if (n_shared != cells->n_shared) return broken("a wrong number of shared cells", n_shared);
    if (n_free_runs != cells->n_free_runs) return broken("a wrong number of runs", n_free_runs);
    if (n_extents != cells->n_extents) return broken("a wrong number of extents", n_extents);
    for (uint32_t c = 0; c < KV_FREE_CLASSES; c++) {
        uint32_t prev = KV_NO_CELL;
        for (uint32_t cell = cells->free_head[c]; cell != KV_NO_CELL; cell = cells->at[cell].next) {
            const kv_extent *const e = &cells->at[cell];
            if (cell >= cells->n_cells || !bits_has(&cells->starts, cell) || e->readers ||
                class_of(e->len) != c || e->prev != prev || ++n_listed > n_free_runs) {
                return broken("a wrong list of free runs", cell);
            }
            prev = cell;
        }
    }
    if (n_listed != n_free_runs) return broken("a free run in no list", n_listed);
    return check_bits(cells);
}
