// The three ways in which attention is told where rows lie, against each other, through the CPU
// device's own table of functions: the same rows in other cells, in other batches and by another
// mode must give the same bits, and no row outside a query's window is touched.
#include "kv_world.h"

// Maximal spans of rows [first, n).
static uint32_t spans_of(mf_kv_span *out, const row_list *r, uint32_t first) {
    uint32_t made = 0;
    for (uint32_t i = first; i < r->n; i++) {
        mf_kv_span *last = made ? &out[made - 1] : NULL;
        if (last && (int32_t)r->pos[i] == last->pos + last->len &&
            r->cell[i] == last->cell + last->len)
            last->len++;
        else
            out[made++] = (mf_kv_span){(int32_t)r->pos[i], r->cell[i], 1};
    }
    return made;
}

// What a sequence's row sees, which must be one range of cells.
static kv_range range_of(const row_list *r, uint32_t row, uint32_t window) {
    uint32_t first = row;
    while (first > 0 && (uint64_t)r->pos[first - 1] + window > r->pos[row]) first--;
    return (kv_range){(uint32_t)r->cell[first], (uint32_t)r->cell[row] + 1};
}

typedef struct reader {
    const shape *s;
    graph *store, *read[KV_WINDOW_MODES];
    batch *in;
} reader;

// The last `n` rows of each sequence as queries of one batch; the rows before are stored first.
static void read_rows(const reader *d, float *out, const row_list *seqs, uint32_t n_seqs,
                      uint32_t n, kv_window_mode mode, uint32_t threads) {
    static mf_kv_span spans[2][BATCH * 4];
    backend *b = open_backend(d->s, threads, NULL);
    for (uint32_t i = 0; i < 2 * LAYERS; i++)  // what is not read may be anything
        memset(region_of(b, i), 0xff, region_bytes(d->s, i));
    for (uint32_t i = 0; i < n_seqs; i++) store_rows(b, d->store, d->in, &seqs[i], seqs[i].n - n);
    batch_clear(d->in);
    for (uint32_t i = 0; i < n_seqs; i++) {
        const row_list *r = &seqs[i];
        const uint32_t first = r->n - n;
        kv_window *w = &d->in->groups[0].window;
        w->mode = mode;
        w->spans[i] = spans[i];
        w->n_spans[i] = mode == KV_WINDOW_RUNS ? spans_of(spans[i], r, 0) : 0;
        for (uint32_t x = 0; x < n && mode == KV_WINDOW_RANGE; x++)
            w->ranges[d->in->n_tokens + x] = range_of(r, first + x, d->s->window);
        add_rows(d->in, r, first, n);
    }
    compute(b, d->read[mode], d->in, out);
    dev->backend_free(b);
}

// Rows that lie in order behind `cell`; from row `jump` on in order behind `cell2`, `gap` positions
// later.
static row_list in_order(int32_t seq, uint32_t n, uint32_t jump, uint32_t gap, int32_t cell,
                         int32_t cell2) {
    row_list r = {.seq = seq, .n = n};
    for (uint32_t i = 0; i < n; i++) {
        r.pos[i] = i + (i >= jump ? gap : 0);
        r.cell[i] = i < jump ? cell + (int32_t)i : cell2 + (int32_t)(i - jump);
    }
    return r;
}

static row_list scattered(int32_t seq, const row_list *like, int32_t step, int32_t from) {
    row_list r = *like;
    r.seq = seq;
    for (uint32_t i = 0; i < r.n; i++) r.cell[i] = from + step * (int32_t)(r.n - 1 - i);
    return r;
}

static void compare(const reader *d, const char *what, const row_list *a, uint32_t n_seqs,
                    const row_list *b, uint32_t n, kv_window_mode mode) {
    static float want[BATCH * 128], got[BATCH * 128];
    const size_t bytes = (size_t)n_seqs * n * d->s->n_head * d->s->head_dim * sizeof(float);
    memset(want, 0, bytes);
    memset(got, 0x55, bytes);
    read_rows(d, want, a, n_seqs, n, KV_WINDOW_RUNS, 1);
    read_rows(d, got, b, n_seqs, n, mode, 1 + n % MAX_THREADS);
    CHECK(!memcmp(want, got, bytes) && want[0] == want[0], "%s: %s, window %u, %u queries, mode %d",
          what, kv_format_name(d->s->format), d->s->window, n, (int)mode);
}

static void test_modes(void) {
    static const uint32_t windows[] = {1, 5, 64, 100, UINT32_MAX};
    enum { WAYS = KV_FORMAT_COUNT + 1 };  // and packed rows read as floats
    for (size_t i = 0; i < WAYS * sizeof windows / sizeof *windows; i++) {
        const uint32_t window = windows[i / WAYS];
        const bool widened = i % WAYS == KV_FORMAT_COUNT;
        const kv_format format = widened ? KV_FORMAT_Q8_0 : (kv_format)(i % WAYS);
        const uint32_t head_dim = format == KV_FORMAT_Q8_0 ? 32 : 16;
        const shape s = {4, 2, head_dim, 16, false, {600, 600}, window, format, widened};
        tables t = load_tables(&s);
        reader d = {.s = &s, .in = new_batch(), .store = make_graph(&s, &t, KV_WINDOW_MODES)};
        for (uint32_t m = 0; m < KV_WINDOW_MODES; m++) d.read[m] = make_graph(&s, &t, m);
        const row_list plain = in_order(0, 150, 150, 0, 0, 0),
                       moved = in_order(0, 150, 150, 0, 17, 0),
                       strewn = scattered(0, &plain, 3, 11);
        for (uint32_t n = 1; n <= BATCH; n += 23) {
            compare(&d, "causal", &plain, 1, &plain, n, KV_WINDOW_CAUSAL);
            compare(&d, "in order", &plain, 1, &plain, n, KV_WINDOW_RANGE);
            compare(&d, "behind a cell", &plain, 1, &moved, n, KV_WINDOW_RANGE);
            compare(&d, "scattered", &plain, 1, &strewn, n, KV_WINDOW_RUNS);
        }
        // Positions jump or rows lie elsewhere from row 100 on, which some windows do not see.
        if (window <= 5) {
            const row_list gap = in_order(0, 150, 100, 90, 200, 20);
            const row_list gap_strewn = scattered(0, &gap, 2, 7);
            compare(&d, "after a gap", &gap_strewn, 1, &gap, 40, KV_WINDOW_RANGE);
            const row_list wrapped = in_order(0, 150, 100, 0, 200, 20);
            compare(&d, "wrapped", &plain, 1, &wrapped, 40, KV_WINDOW_RANGE);
        }
        if (window == UINT32_MAX) {  // the first row is not at position 0
            const row_list late = in_order(0, 150, 0, 70, 0, 30);
            const row_list late_strewn = scattered(0, &late, 2, 7);
            compare(&d, "a gap first", &late_strewn, 1, &late, 40, KV_WINDOW_RANGE);
        }
        // Two sequences side by side; with a window of 1 each query may lie anywhere.
        const row_list pair[] = {in_order(0, 60, 60, 0, 300, 0), in_order(1, 90, 90, 0, 5, 0)};
        row_list pair_strewn[] = {scattered(0, &pair[0], 2, 400), scattered(1, &pair[1], 3, 8)};
        compare(&d, "two", pair, 2, pair, BATCH / 2, KV_WINDOW_RANGE);
        compare(&d, "two scattered", pair, 2, pair_strewn, BATCH / 2, KV_WINDOW_RUNS);
        if (window == 1)
            compare(&d, "each alone", pair, 2, pair_strewn, BATCH / 2, KV_WINDOW_RANGE);
        for (uint32_t m = 0; m < KV_WINDOW_MODES; m++) graph_free(d.read[m]);
        graph_free(d.store);
        batch_free(d.in);
        free_tables(&t);
    }
}

// A graph of one mode with a batch of another is refused, not misread.
static void test_mismatch(void) {
    const shape s = {4, 2, 16, 16, false, {60, 60}, UINT32_MAX, KV_FORMAT_F32, false};
    tables t = load_tables(&s);
    batch *in = new_batch();
    const row_list r = in_order(0, 8, 8, 0, 0, 0);
    add_rows(in, &r, 0, r.n);
    static float out[8 * 64];
    const atomic_int state = RUN_ACTIVE;
    for (uint32_t built = 0; built < KV_WINDOW_MODES; built++) {
        graph *g = make_graph(&s, &t, built);
        backend *b = open_backend(&s, 1, NULL);
        CHECK(dev->reserve(b, g->buffer_bytes) == MF_OK, "%s", mf_last_error());
        in->groups[0].window.mode = (kv_window_mode)((built + 1) % KV_WINDOW_MODES);
        const int status = dev->compute(b, g, in, out, &state);
        CHECK(status == MF_INTERNAL && strstr(mf_last_error(), "window mode"), "status %d: %s",
              status, mf_last_error());
        dev->backend_free(b);
        graph_free(g);
    }
    batch_free(in);
    free_tables(&t);
}

int main(void) {
    test_modes();
    test_mismatch();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
