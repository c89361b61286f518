// Tests of how a batch finds its rows: when each mode is true, by hand and against a look at every
// row on random states; that each mode reads the same cells; every refusal of a window and a store.
//
// The states are laid out by hand, cell by cell: what the store's own placement would never do must
// be read rightly too. kv_cache_check says that they are sound.
#include <string.h>

#include "../engine/error.h"
#include "../engine/kv_store.h"
#include "check.h"
#include "counted.h"

enum {
    CAUSAL = 1 << KV_WINDOW_CAUSAL,
    RANGE = 1 << KV_WINDOW_RANGE,
    RUNS = 1 << KV_WINDOW_RUNS,
    MAX_ROWS = 220,  // of one sequence
    MAX_POS = 400,   // first position that no sequence reaches
    MAX_CELLS = 700,
    MAX_SEQS = 3,
    STATES = 400
};

#define IS(call, want)                                                                     \
    do {                                                                                   \
        const int is_status = (call);                                                      \
        CHECK(is_status == (want), "%d, not %d (%s)", is_status, (want), mf_last_error()); \
    } while (0)

static kv_range ranges[MAX_SEQS * MAX_ROWS];
static const mf_kv_span *item_spans[MAX_SEQS];
static uint32_t item_n_spans[MAX_SEQS];

static kv_window blank(void) {
    return (kv_window){
        .mode = KV_WINDOW_MODES, .ranges = ranges, .spans = item_spans, .n_spans = item_n_spans};
}

static kv_cache *make(kv_group_spec a, kv_group_spec b, uint32_t n_seq) {
    kv_cache *kv = NULL;
    const kv_config config = {
        .groups = {a, b}, .n_groups = 2, .n_seq = n_seq, .n_batch = MAX_ROWS, .can_rope = true};
    IS(kv_cache_new(&kv, &config), MF_OK);
    return kv;
}

static const kv_group_spec FULL = {KV_FULL, 0, MAX_CELLS};

static kv_group_spec sliding(uint32_t window) {
    return (kv_group_spec){KV_SLIDING, window, MAX_CELLS};
}

// n rows at positions pos.. of a sequence, which has none at or above.
static void add_rows(kv_cache *kv, uint32_t s, uint32_t pos, uint32_t n) {
    kv_seq *const seq = &kv->seqs[s];
    if (!seq->n_runs || kv_seq_next_pos(seq, seq->len) != pos)
        seq->runs[seq->n_runs++] = (kv_run){seq->len, pos};
    seq->len += n;
}

// The rows at positions pos.. lie in cells cell.. of a group; in position order.
static void put(kv_cache *kv, uint32_t g, uint32_t s, uint32_t pos, uint32_t cell, uint32_t n) {
    IS(kv_part_reserve(&kv->seqs[s].parts[g], 1), MF_OK);
    kv_part_push(&kv->seqs[s].parts[g], pos, cell, n);
    kv_cells_read(&kv->groups[g].cells, cell, n, 1);
}

static void add(kv_cache *kv, uint32_t s, uint32_t pos, uint32_t cell, uint32_t n) {
    add_rows(kv, s, pos, n);
    put(kv, 0, s, pos, cell, n);
    put(kv, 1, s, pos, cell, n);
}

static void clear(kv_cache *kv) {
    for (uint32_t s = 0; s < kv->n_seq; s++) IS(kv_cache_free_seq(kv, (int32_t)s), MF_OK);
}

// ---- the plain statement ---------------------------------------------------------------------

typedef struct place {
    uint32_t pos, cell;
} place;

// Cell of each position; -1 where a group has no row.
static void look(int32_t cells[MAX_POS], const kv_cache *kv, uint32_t g, uint32_t s) {
    const mf_kv_span *spans;
    uint32_t n;
    for (uint32_t p = 0; p < MAX_POS; p++) cells[p] = -1;
    IS(kv_cache_spans(&spans, &n, kv, g, (int32_t)s), MF_OK);
    for (uint32_t i = 0; i < n; i++)
        for (int32_t k = 0; k < spans[i].len; k++) cells[spans[i].pos + k] = spans[i].cell + k;
}

static int64_t window_start(const kv_cache *kv, uint32_t g, uint32_t q) {
    const kv_group_spec *const spec = kv_cache_group(kv, g);
    const int64_t start = (int64_t)q - spec->window + 1;
    return spec->kind == KV_FULL || start < 0 ? 0 : start;
}

// The rows that a query at q sees, oldest first.
static uint32_t seen_by(place *out, const kv_cache *kv, uint32_t g, const int32_t *cells,
                        uint32_t q) {
    uint32_t n = 0;
    for (int64_t p = window_start(kv, g, q); p <= q; p++)
        if (cells[p] >= 0) out[n++] = (place){(uint32_t)p, (uint32_t)cells[p]};
    return n;
}

static uint32_t runs_of(const place *rows, uint32_t n) {
    uint32_t runs = 0;
    for (uint32_t i = 0; i < n; i++)
        runs += !i || rows[i].pos != rows[i - 1].pos + 1 || rows[i].cell != rows[i - 1].cell + 1;
    return runs;
}

// Bit set of the true modes, found by looking at every row of every query.
static uint32_t true_modes(const kv_cache *kv, uint32_t g, const kv_append *items,
                           uint32_t n_items) {
    uint32_t modes = n_items == 1 ? KV_WINDOW_ALL : KV_WINDOW_ALL & ~(uint32_t)CAUSAL;
    for (uint32_t i = 0; i < n_items; i++) {
        static int32_t cells[MAX_POS];
        static place rows[MAX_POS];
        const kv_seq *const seq = &kv->seqs[items[i].seq];
        look(cells, kv, g, (uint32_t)items[i].seq);
        uint32_t n_all = 0;
        for (uint32_t r = seq->len - items[i].n; r < seq->len; r++) {
            const uint32_t q = kv_seq_pos(seq, r), n = seen_by(rows, kv, g, cells, q);
            if (runs_of(rows, n) != 1) modes &= ~(uint32_t)RANGE;
            for (int64_t p = window_start(kv, g, q); p <= q; p++)
                if (cells[p] != p) modes &= ~(uint32_t)CAUSAL;
        }
        const uint32_t first = kv_seq_pos(seq, seq->len - items[i].n);
        for (int64_t p = window_start(kv, g, first); p < MAX_POS; p++)
            if (cells[p] >= 0) rows[n_all++] = (place){(uint32_t)p, (uint32_t)cells[p]};
        if (runs_of(rows, n_all) > KV_MAP_MAX_SPANS) modes &= ~(uint32_t)RUNS;
    }
    return modes;
}

// What a device makes of a window: the rows that query number `row` of all, at q, of item i reads.
static uint32_t resolve(place *out, const kv_cache *kv, uint32_t g, const kv_window *w, uint32_t i,
                        uint32_t row, uint32_t q) {
    uint32_t n = 0;
    if (w->mode == KV_WINDOW_CAUSAL)
        for (int64_t p = window_start(kv, g, q); p <= q; p++)
            out[n++] = (place){(uint32_t)p, (uint32_t)p};
    if (w->mode == KV_WINDOW_RANGE)
        for (uint32_t c = w->ranges[row].lo; c < w->ranges[row].hi; c++)
            out[n++] = (place){q - (w->ranges[row].hi - 1 - c), c};
    if (w->mode == KV_WINDOW_RUNS)
        for (uint32_t k = 0; k < w->n_spans[i]; k++)
            for (int32_t j = 0; j < w->spans[i][k].len; j++) {
                const int64_t p = w->spans[i][k].pos + j;
                if (p >= window_start(kv, g, q) && p <= q)
                    out[n++] = (place){(uint32_t)p, (uint32_t)(w->spans[i][k].cell + j)};
            }
    return n;
}

static bool reads_right(const kv_cache *kv, uint32_t g, const kv_window *w, const kv_append *items,
                        uint32_t n_items) {
    static int32_t cells[MAX_POS];
    static place is[MAX_POS], want[MAX_POS];
    uint32_t row = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        const kv_seq *const seq = &kv->seqs[items[i].seq];
        look(cells, kv, g, (uint32_t)items[i].seq);
        for (uint32_t r = seq->len - items[i].n; r < seq->len; r++, row++) {
            const uint32_t q = kv_seq_pos(seq, r);
            const uint32_t n = seen_by(want, kv, g, cells, q);
            if (resolve(is, kv, g, w, i, row, q) != n || memcmp(is, want, n * sizeof *is) != 0)
                return false;
        }
    }
    return true;
}

// Every subset of modes: the first true one is chosen and reads the right rows, or none is.
// Returns the true modes.
static uint32_t check_modes(const kv_cache *kv, uint32_t g, const kv_append *items,
                            uint32_t n_items) {
    const uint32_t truth = true_modes(kv, g, items, n_items);
    IS(kv_cache_check(kv), MF_OK);
    for (uint32_t modes = 0; modes <= KV_WINDOW_ALL; modes++) {
        kv_window w = blank();
        const int status = kv_cache_window(&w, kv, g, items, n_items, modes);
        if (!(modes & truth)) {
            CHECK(status == MF_KV_SPANS, "group %u: modes %u of %u: %d", g, modes, truth, status);
            CHECK(w.mode == KV_WINDOW_MODES, "a refused window wrote mode %d", (int)w.mode);
            continue;
        }
        const uint32_t first = modes & truth & -(modes & truth);
        CHECK(!status && 1u << w.mode == first, "group %u: modes %u of %u: %d, mode %d (%s)", g,
              modes, truth, status, (int)w.mode, mf_last_error());
        if (!status)
            CHECK(reads_right(kv, g, &w, items, n_items), "group %u, mode %d: wrong rows", g,
                  (int)w.mode);
    }
    return truth;
}

// One item.
static uint32_t modes_of(const kv_cache *kv, uint32_t g, int32_t s, uint32_t n) {
    return check_modes(kv, g, &(kv_append){s, n}, 1);
}

#define MODES(got, want)                                                             \
    do {                                                                             \
        const uint32_t modes_got = (got);                                            \
        CHECK(modes_got == (want), "modes %u, not %u", modes_got, (uint32_t)(want)); \
    } while (0)

// ---- by hand ---------------------------------------------------------------------------------

static void test_causal(void) {
    kv_cache *const kv = make(FULL, sliding(4), 3);
    add(kv, 0, 0, 0, 10);
    for (uint32_t n = 1; n <= 10; n++) {
        MODES(modes_of(kv, 0, 0, n), CAUSAL | RANGE | RUNS);
        MODES(modes_of(kv, 1, 0, n), CAUSAL | RANGE | RUNS);
    }
    add(kv, 1, 0, 100, 3);  // elsewhere
    MODES(modes_of(kv, 0, 1, 1), RANGE | RUNS);
    const kv_append both[] = {{0, 3}, {1, 2}};
    MODES(check_modes(kv, 0, both, 2), RANGE | RUNS);
    MODES(check_modes(kv, 1, both, 2), RANGE | RUNS);
    clear(kv);
    add(kv, 0, 0, 1, 5);  // one cell off
    MODES(modes_of(kv, 0, 0, 2), RANGE | RUNS);
    MODES(modes_of(kv, 1, 0, 2), RANGE | RUNS);
    kv_cache_free(kv);
}

static void test_gap_at_the_start(void) {
    kv_cache *const kv = make(FULL, sliding(4), 1);
    add(kv, 0, 5, 5, 3);
    MODES(modes_of(kv, 0, 0, 1), RANGE | RUNS);  // position 0 is seen and has no row
    MODES(modes_of(kv, 1, 0, 1), RANGE | RUNS);  // 7 sees 4
    clear(kv);
    add(kv, 0, 5, 5, 4);
    MODES(modes_of(kv, 0, 0, 1), RANGE | RUNS);
    MODES(modes_of(kv, 1, 0, 1), CAUSAL | RANGE | RUNS);  // 8 sees 5 and no older one
    MODES(modes_of(kv, 1, 0, 2), RANGE | RUNS);
    kv_cache_free(kv);
}

static void test_gap_in_the_window(void) {
    kv_cache *const kv = make(FULL, sliding(3), 1);
    add(kv, 0, 0, 0, 5);
    add(kv, 0, 6, 6, 5);  // position 6 sees 4
    MODES(modes_of(kv, 0, 0, 1), RUNS);
    MODES(modes_of(kv, 1, 0, 3), CAUSAL | RANGE | RUNS);  // from 8 on
    MODES(modes_of(kv, 1, 0, 4), RANGE | RUNS);           // 7 sees 5, which no row has
    MODES(modes_of(kv, 1, 0, 5), RUNS);
    MODES(modes_of(kv, 1, 0, 6), RUNS);
    clear(kv);
    add(kv, 0, 0, 0, 5);
    add(kv, 0, 7, 7, 5);  // position 7 sees none of the others: the windows lie in two spans
    MODES(modes_of(kv, 0, 0, 5), RUNS);
    MODES(modes_of(kv, 1, 0, 5), RANGE | RUNS);
    MODES(modes_of(kv, 1, 0, 10), RANGE | RUNS);
    kv_window w = blank();
    IS(kv_cache_window(&w, kv, 1, &(kv_append){0, 10}, 1, RANGE), MF_OK);
    CHECK(ranges[4].lo == 2 && ranges[4].hi == 5, "[%u, %u)", ranges[4].lo, ranges[4].hi);
    CHECK(ranges[5].lo == 7 && ranges[5].hi == 8, "[%u, %u)", ranges[5].lo, ranges[5].hi);
    kv_cache_free(kv);
}

static void test_wrapped_ring(void) {
    kv_cache *const kv = make(FULL, sliding(4), 1);
    add_rows(kv, 0, 0, 10);
    put(kv, 0, 0, 0, 0, 10);
    kv->seqs[0].parts[1].base = 4;
    put(kv, 1, 0, 4, 4, 4);
    put(kv, 1, 0, 8, 0, 2);
    MODES(modes_of(kv, 1, 0, 1), RUNS);  // 9 sees 6 and 7 in the old place
    MODES(modes_of(kv, 1, 0, 2), RUNS);
    MODES(modes_of(kv, 1, 0, 3), RUNS);
    IS(kv_cache_window(&(kv_window){0}, kv, 1, &(kv_append){0, 7}, 1, RUNS), MF_KV_GONE);
    add_rows(kv, 0, 10, 1);
    put(kv, 0, 0, 10, 10, 1);
    put(kv, 1, 0, 10, 2, 1);
    MODES(modes_of(kv, 1, 0, 1), RUNS);  // 10 still sees 7
    add_rows(kv, 0, 11, 2);
    put(kv, 0, 0, 11, 11, 2);
    put(kv, 1, 0, 11, 3, 1);
    put(kv, 1, 0, 12, 8, 1);
    MODES(modes_of(kv, 1, 0, 1), RUNS);
    MODES(modes_of(kv, 0, 0, 1), CAUSAL | RANGE | RUNS);
    IS(kv_cache_trim(kv, 0, 1), MF_OK);
    MODES(modes_of(kv, 1, 0, 1), RANGE | RUNS);  // 11 sees 8 to 11 in cells 0 to 3
    MODES(modes_of(kv, 1, 0, 2), RUNS);
    kv_cache_free(kv);
}

static void test_shared_prefix(void) {
    kv_cache *const kv = make(FULL, sliding(4), 2);
    add(kv, 0, 0, 0, 10);
    add(kv, 1, 0, 0, 6);    // shared
    add(kv, 1, 6, 100, 6);  // its own
    MODES(modes_of(kv, 0, 1, 2), RUNS);
    MODES(modes_of(kv, 1, 1, 3), RANGE | RUNS);  // 9 sees 6 on
    MODES(modes_of(kv, 1, 1, 4), RUNS);
    MODES(check_modes(kv, 1, (kv_append[]){{1, 3}, {0, 1}}, 2), RANGE | RUNS);
    MODES(check_modes(kv, 1, (kv_append[]){{0, 1}, {1, 4}}, 2), RUNS);
    MODES(modes_of(kv, 0, 0, 1), CAUSAL | RANGE | RUNS);
    kv_cache_free(kv);
}

static void test_window_of_one(void) {
    kv_cache *const kv = make(FULL, sliding(1), 1);
    add_rows(kv, 0, 0, 4);
    put(kv, 0, 0, 0, 0, 4);
    for (uint32_t p = 0; p < 4; p++) put(kv, 1, 0, p, 40 - 2 * p, 1);  // scattered
    MODES(modes_of(kv, 1, 0, 4), RANGE | RUNS);
    MODES(modes_of(kv, 1, 0, 1), RANGE | RUNS);
    clear(kv);
    add(kv, 0, 2, 2, 2);
    add(kv, 0, 9, 9, 1);
    MODES(modes_of(kv, 1, 0, 3), CAUSAL | RANGE | RUNS);  // each row sees itself, in its cell
    const mf_kv_span *spans;
    CHECK(kv_read_spans(&spans, kv, 1, 0, 0) == 0, "the next query sees no row");
    kv_cache_free(kv);
}

// Neighbours in positions, every second cell.
static void test_span_limit(void) {
    kv_cache *const kv = make(FULL, sliding(2), 1);
    add_rows(kv, 0, 0, KV_MAP_MAX_SPANS);
    for (uint32_t p = 0; p < KV_MAP_MAX_SPANS; p++) put(kv, 0, 0, p, 2 * p, 1);
    put(kv, 1, 0, 0, 0, KV_MAP_MAX_SPANS);
    MODES(modes_of(kv, 0, 0, 1), RUNS);
    add_rows(kv, 0, KV_MAP_MAX_SPANS, 1);
    put(kv, 0, 0, KV_MAP_MAX_SPANS, 2 * KV_MAP_MAX_SPANS, 1);
    put(kv, 1, 0, KV_MAP_MAX_SPANS, KV_MAP_MAX_SPANS, 1);
    MODES(modes_of(kv, 0, 0, 1), 0);
    kv_window w = blank();
    IS(kv_cache_window(&w, kv, 0, &(kv_append){0, 1}, 1, KV_WINDOW_ALL), MF_KV_SPANS);
    CHECK(strstr(mf_last_error(), "group 0") && strstr(mf_last_error(), "sequence 0") &&
              strstr(mf_last_error(), "65 spans") && strstr(mf_last_error(), "mf_kv_defrag"),
          "%s", mf_last_error());
    IS(kv_cache_window(&w, kv, 0, &(kv_append){0, 1}, 1, CAUSAL | RANGE), MF_KV_SPANS);
    CHECK(
        strstr(mf_last_error(), "in causal or range mode") && strstr(mf_last_error(), "allow runs"),
        "%s", mf_last_error());
    MODES(modes_of(kv, 1, 0, 1), CAUSAL | RANGE | RUNS);
    kv_cache_free(kv);
}

static void test_read_spans(void) {
    kv_cache *const kv = make(FULL, sliding(4), 1);
    const mf_kv_span *spans;
    CHECK(kv_read_spans(&spans, kv, 0, 0, 0) == 0, "an empty sequence has spans");
    add(kv, 0, 0, 0, 3);
    add(kv, 0, 3, 10, 3);
    add(kv, 0, 6, 20, 3);  // positions 0 to 8; the next query is 9
    CHECK(kv_read_spans(&spans, kv, 0, 0, 0) == 3 && spans[0].pos == 0, "full, next query");
    CHECK(kv_read_spans(&spans, kv, 1, 0, 0) == 1 && spans[0].pos == 6, "9 sees 6 on");
    CHECK(kv_read_spans(&spans, kv, 1, 0, 1) == 2 && spans[0].pos == 3, "8 sees 5 on");
    CHECK(kv_read_spans(&spans, kv, 1, 0, 3) == 2 && spans[0].pos == 3, "6 sees 3 on");
    CHECK(kv_read_spans(&spans, kv, 1, 0, 4) == 3 && spans[0].pos == 0, "5 sees 2 on");
    CHECK(kv_read_spans(&spans, kv, 1, 0, 9) == 3 && spans[0].pos == 0, "0 sees itself");
    kv_cache_free(kv);
}

static void test_window_refusals(void) {
    kv_cache *const kv = make(FULL, sliding(4), 2);
    kv_window w = blank();
    add(kv, 0, 0, 0, 10);
    IS(kv_cache_window(&w, kv, 2, &(kv_append){0, 1}, 1, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, UINT32_MAX, &(kv_append){0, 1}, 1, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, 0, NULL, 0, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, 0, &(kv_append){-1, 1}, 1, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, 0, &(kv_append){2, 1}, 1, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, 0, &(kv_append){0, 0}, 1, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, 0, &(kv_append){0, 11}, 1, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, 0, &(kv_append){0, UINT32_MAX}, 1, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, 0, &(kv_append){1, 1}, 1, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, 0, (kv_append[]){{0, 1}, {1, 1}}, 2, KV_WINDOW_ALL), MF_ARG);
    IS(kv_cache_window(&w, kv, 0, &(kv_append){0, 1}, 1, 0), MF_KV_SPANS);
    CHECK(w.mode == KV_WINDOW_MODES, "a refused window wrote mode %d", (int)w.mode);
    kv_cache_free(kv);
}

// ---- stores ----------------------------------------------------------------------------------

static void test_store_cells(void) {
    kv_cache *const kv = make(FULL, sliding(4), 2);
    int32_t cells[32];
    add(kv, 0, 3, 30, 3);
    add(kv, 0, 9, 10, 4);
    add(kv, 0, 13, 50, 3);
    IS(kv_cache_store_cells(cells, kv, 0, 0, 0, 10), MF_OK);
    static const int32_t want[] = {30, 31, 32, 10, 11, 12, 13, 50, 51, 52};
    CHECK(!memcmp(cells, want, sizeof want), "wrong cells: %d %d", cells[0], cells[3]);
    for (uint32_t first = 0; first < 10; first++)
        for (uint32_t n = 0; first + n <= 10; n++) {
            memset(cells, 0xff, sizeof cells);
            IS(kv_cache_store_cells(cells, kv, 1, 0, first, n), MF_OK);
            CHECK(!memcmp(cells, want + first, n * sizeof *want) && cells[n] == -1,
                  "rows [%u, +%u)", first, n);
        }
    IS(kv_cache_store_cells(cells, kv, 0, 1, 0, 0), MF_OK);  // an empty sequence
    kv_cache_free(kv);
}

static void test_store_refusals(void) {
    kv_cache *const kv = make(FULL, sliding(4), 2);
    int32_t cells[32] = {-1};
    add(kv, 0, 0, 0, 6);
    add(kv, 0, 6, 20, 4);
    IS(kv_cache_store_cells(cells, kv, 2, 0, 0, 1), MF_ARG);
    IS(kv_cache_store_cells(cells, kv, 0, 2, 0, 1), MF_ARG);
    IS(kv_cache_store_cells(cells, kv, 0, -1, 0, 1), MF_ARG);
    IS(kv_cache_store_cells(cells, kv, 0, 1, 0, 1), MF_ARG);  // no rows
    IS(kv_cache_store_cells(cells, kv, 0, 0, 10, 1), MF_ARG);
    IS(kv_cache_store_cells(cells, kv, 0, 0, 9, 2), MF_ARG);
    IS(kv_cache_store_cells(cells, kv, 0, 0, 9, UINT32_MAX), MF_ARG);
    IS(kv_cache_store_cells(cells, kv, 0, 0, UINT32_MAX, 1), MF_ARG);
    // A window has dropped its oldest rows.
    kv_part_drop_oldest(&kv->seqs[0].parts[1], &kv->groups[1].cells, 3);
    kv->seqs[0].parts[1].base = 3;
    IS(kv_cache_check(kv), MF_OK);
    IS(kv_cache_store_cells(cells, kv, 1, 0, 2, 1), MF_ARG);
    CHECK(strstr(mf_last_error(), "[3, 10)"), "%s", mf_last_error());
    IS(kv_cache_store_cells(cells, kv, 1, 0, 0, 10), MF_ARG);
    CHECK(cells[0] == -1, "a refused call wrote cell %d", cells[0]);
    IS(kv_cache_store_cells(cells, kv, 0, 0, 2, 1), MF_OK);
    IS(kv_cache_store_cells(cells, kv, 1, 0, 3, 7), MF_OK);
    kv_cache_free(kv);
}

static void test_store_shared(void) {
    kv_cache *const kv = make(FULL, sliding(4), 2);
    int32_t cells[32];
    add(kv, 0, 0, 0, 6);
    add(kv, 0, 6, 20, 4);
    add_rows(kv, 1, 0, 8);  // the other sequence reads the first 8 rows of group 0
    put(kv, 0, 1, 0, 0, 6);
    put(kv, 0, 1, 6, 20, 2);
    put(kv, 1, 1, 0, 100, 8);
    IS(kv_cache_check(kv), MF_OK);
    IS(kv_cache_store_cells(cells, kv, 0, 0, 8, 2), MF_OK);
    IS(kv_cache_store_cells(cells, kv, 0, 0, 7, 1), MF_KV_SHARED);
    CHECK(strstr(mf_last_error(), "cell 21 ") && strstr(mf_last_error(), "group 0") &&
              strstr(mf_last_error(), "2 readers") && strstr(mf_last_error(), "please report it"),
          "%s", mf_last_error());
    IS(kv_cache_store_cells(cells, kv, 0, 0, 7, 3), MF_KV_SHARED);  // the first of three
    IS(kv_cache_store_cells(cells, kv, 0, 0, 0, 10), MF_KV_SHARED);
    IS(kv_cache_store_cells(cells, kv, 0, 1, 7, 1), MF_KV_SHARED);
    IS(kv_cache_store_cells(cells, kv, 1, 0, 0, 10), MF_OK);
    IS(kv_cache_store_cells(cells, kv, 1, 1, 0, 8), MF_OK);
    add(kv, 1, 8, 200, 2);
    IS(kv_cache_store_cells(cells, kv, 0, 1, 8, 2), MF_OK);
    IS(kv_cache_store_cells(cells, kv, 0, 1, 7, 3), MF_KV_SHARED);
    IS(kv_cache_free_seq(kv, 1), MF_OK);
    IS(kv_cache_store_cells(cells, kv, 0, 0, 0, 10), MF_OK);
    kv_cells_read(&kv->groups[0].cells, 22, 1, -1);  // broken: a row in a free cell
    IS(kv_cache_store_cells(cells, kv, 0, 0, 7, 3), MF_KV_SHARED);
    CHECK(strstr(mf_last_error(), "cell 22 ") && strstr(mf_last_error(), "0 readers"), "%s",
          mf_last_error());
    kv_cells_read(&kv->groups[0].cells, 22, 1, 1);
    kv_cache_free(kv);
}

// ---- random states ---------------------------------------------------------------------------

// Rows in runs of positions. The sequence may begin late.
static void random_positions(kv_cache *kv, uint32_t s, uint32_t rows, uint64_t *rng) {
    uint32_t pos = check_below(rng, 3) ? 0 : check_below(rng, 6);
    const uint32_t mean = 1 + check_below(rng, 60);
    while (rows && kv->seqs[s].n_runs < 40) {
        const uint32_t n = u32_min(rows, 1 + check_below(rng, 2 * mean));
        add_rows(kv, s, pos, n);
        rows -= n;
        pos += n + 1 + check_below(rng, 4);
        if (check_below(rng, 2)) return;
    }
}

static uint32_t free_cell(const bool *used, uint64_t *rng) {
    uint32_t cell = check_below(rng, MAX_CELLS);
    while (used[cell]) cell = (cell + 1) % MAX_CELLS;
    return cell;
}

// The live rows of a sequence go on behind each other, but for a jump once in a while; or each into
// the cell of its position.
static void random_cells(kv_cache *kv, uint32_t g, uint32_t s, bool *used, uint64_t *rng) {
    static const uint32_t odds[] = {2, 8, 40, 100000};
    kv_seq *const seq = &kv->seqs[s];
    const uint32_t jump = odds[check_below(rng, 4)], window = kv->groups[g].window;
    const bool causal = !check_below(rng, 3);
    uint32_t cell = free_cell(used, rng);
    if (window != KV_WHOLE_WINDOW)
        seq->parts[g].base = check_below(rng, kv_seq_first_needed(seq, seq->len, window) + 1);
    for (uint32_t r = seq->parts[g].base; r < seq->len; r++) {
        const uint32_t pos = kv_seq_pos(seq, r);
        if (causal && !used[pos]) {
            cell = pos;
        } else if (cell == MAX_CELLS || used[cell] || !check_below(rng, jump)) {
            cell = free_cell(used, rng);
        }
        used[cell] = true;
        put(kv, g, s, pos, cell++, 1);
    }
}

// The empty dst reads the first n rows of src.
static void read_too(kv_cache *kv, uint32_t dst, uint32_t src, uint32_t n) {
    const kv_seq *const from = &kv->seqs[src];
    kv_seq *const to = &kv->seqs[dst];
    for (uint32_t r = 0; r < n; r++) add_rows(kv, dst, kv_seq_pos(from, r), 1);
    for (uint32_t g = 0; g < 2; g++) {
        to->parts[g].base = u32_min(from->parts[g].base, n);
        const mf_kv_span *span = kv_part_spans(&from->parts[g]);
        for (uint32_t r = to->parts[g].base; r < n; r++) {
            const uint32_t pos = kv_seq_pos(from, r);
            while ((uint32_t)(span->pos + span->len) <= pos) span++;
            put(kv, g, dst, pos, (uint32_t)span->cell + pos - (uint32_t)span->pos, 1);
        }
    }
}

static uint32_t n_seen[KV_WINDOW_ALL + 1];  // how often which modes were the true ones

static void test_random(uint64_t seed) {
    static const uint32_t windows[] = {1, 2, 5, 16, 70, 300};
    uint64_t rng = seed;
    kv_cache *const kv = make(FULL, sliding(windows[check_below(&rng, 6)]), MAX_SEQS);
    bool used[2][MAX_CELLS] = {{false}};
    for (uint32_t s = 0; s + 1 < MAX_SEQS; s++) {
        random_positions(kv, s, 1 + check_below(&rng, MAX_ROWS), &rng);
        for (uint32_t g = 0; g < 2; g++) random_cells(kv, g, s, used[g], &rng);
    }
    const kv_seq *const first = &kv->seqs[0];
    uint32_t n = 1 + check_below(&rng, first->len);
    for (uint32_t g = 0; g < 2; g++)  // rows that the shorter reader needs must be live
        n = u32_max(n, kv_seq_fewest_rows(first, first->parts[g].base, kv->groups[g].window));
    read_too(kv, MAX_SEQS - 1, 0, n);
    for (uint32_t i = 0; i < 12; i++) {
        kv_append items[MAX_SEQS];
        const uint32_t n_items = check_below(&rng, 2) ? 1 : 1 + check_below(&rng, MAX_SEQS);
        const uint32_t rotate = check_below(&rng, MAX_SEQS), g = check_below(&rng, 2);
        bool gone = false;
        for (uint32_t k = 0; k < n_items; k++) {
            const uint32_t s = (k + rotate) % MAX_SEQS;
            const kv_seq *const seq = &kv->seqs[s];
            const uint32_t most = check_below(&rng, 2) ? u32_min(4, seq->len) : seq->len;
            items[k] = (kv_append){(int32_t)s, 1 + check_below(&rng, most)};
            const int64_t start = window_start(kv, g, kv_seq_pos(seq, seq->len - items[k].n));
            gone |= kv_seq_rows_below(seq, (uint64_t)start) < seq->parts[g].base;
        }
        if (gone) {
            kv_window w = blank();
            IS(kv_cache_window(&w, kv, g, items, n_items, KV_WINDOW_ALL), MF_KV_GONE);
        } else {
            n_seen[check_modes(kv, g, items, n_items)]++;
        }
    }
    kv_cache_free(kv);
}

int main(void) {
    test_causal();
    test_gap_at_the_start();
    test_gap_in_the_window();
    test_wrapped_ring();
    test_shared_prefix();
    test_window_of_one();
    test_span_limit();
    test_read_spans();
    test_window_refusals();
    test_store_cells();
    test_store_refusals();
    test_store_shared();
    for (uint64_t seed = 1; seed <= STATES; seed++) test_random(seed);
    static const uint32_t kinds[] = {0, RUNS, RANGE | RUNS, CAUSAL | RANGE | RUNS};
    for (uint32_t i = 0; i < 4; i++)
        CHECK(n_seen[kinds[i]] > 20, "modes %u: in %u states only", kinds[i], n_seen[kinds[i]]);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
