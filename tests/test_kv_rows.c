// Whole rows of the CPU device's KV regions: moves against a copy made row by row, the rotation of
// K against doubles and against rows stored at the other position. Rows that a call does not name
// are compared too. Results must be the same bits for every instruction set, any number of threads
// and any division of a call. All of it in every format.
#include "../engine/alloc.h"
#include "kv_world.h"

// ---- regions as one picture ------------------------------------------------------------------

typedef struct picture {
    uint8_t *at[2 * LAYERS];  // as the regions, the spare row included
} picture;

static shape in_format(const shape *like, int format) {
    shape s = *like;
    s.format = (kv_format)format;
    if (format == KV_FORMAT_Q8_0) s.head_dim = (s.head_dim + 31) / 32 * 32;
    return s;
}

static picture picture_new(const shape *s) {
    picture p;
    for (uint32_t i = 0; i < 2 * LAYERS; i++) p.at[i] = claim(region_bytes(s, i));
    return p;
}

static void picture_free(picture *p) {
    for (uint32_t i = 0; i < 2 * LAYERS; i++) free(p->at[i]);
}

enum { MAX_WIDTH = 8 * 64 };

static void load_row(float *x, const uint8_t *row, const shape *s) {
    kernels_scalar()->kv_load[s->format](x, row, width_of(s));
}

static void fill_random(const picture *p, const shape *s, uint64_t seed) {
    float x[MAX_WIDTH];
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        for (size_t row = 0; row < region_rows(s, i); row++) {
            for (uint32_t d = 0; d < width_of(s); d++) x[d] = check_normal(&seed);
            kernels_scalar()->kv_store[s->format](p->at[i] + row * row_bytes(s), x, width_of(s));
        }
    }
}

static void put(const backend *b, const picture *p, const shape *s) {
    for (uint32_t i = 0; i < 2 * LAYERS; i++) memcpy(region_of(b, i), p->at[i], region_bytes(s, i));
}

// Whether the regions are the picture; and nothing was written between them.
static bool same(const backend *b, const picture *p, const shape *s) {
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        const size_t bytes = region_bytes(s, i), next = 64;
        const uint8_t *region = region_of(b, i);
        if (memcmp(region, p->at[i], bytes) != 0) return false;
        for (size_t x = bytes; x % next; x++)
            if (region[x]) return false;
    }
    return true;
}

// ---- moves -----------------------------------------------------------------------------------

// One row after the other, through a copy of what is there before the move.
static void move_plainly(const picture *p, const shape *s, const mf_kv_move *m) {
    const size_t row = row_bytes(s);
    uint8_t *before = claim((size_t)m->n * row);
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        if (layer_group[i / 2] != (uint32_t)m->group) continue;
        for (int32_t x = 0; x < m->n; x++)
            memcpy(before + (size_t)x * row, p->at[i] + (size_t)(m->src + x) * row, row);
        for (int32_t x = 0; x < m->n; x++)
            memcpy(p->at[i] + (size_t)(m->dst + x) * row, before + (size_t)x * row, row);
    }
    free(before);
}

// From anywhere to anywhere: moves that overlap themselves and each other, the spare row at times.
static mf_kv_move random_move(const shape *s, uint64_t *rng) {
    const uint32_t group = check_below(rng, GROUPS), rows = s->cells[group] + 1;
    const uint32_t n = 1 + check_below(rng, check_below(rng, 4) ? 9 : rows - 1);
    mf_kv_move m = {(int32_t)check_below(rng, rows - n + 1),
                    (int32_t)check_below(rng, rows - n + 1), (int32_t)n, (int32_t)group};
    if (check_below(rng, 3) == 0) {  // by less than its length, up or down
        const int32_t by = (int32_t)check_below(rng, n) * (check_below(rng, 2) ? 1 : -1);
        if (m.src + by >= 0 && m.src + by + m.n <= (int32_t)rows) m.dst = m.src + by;
    }
    return m;
}

static void test_moves(void) {
    static const shape shapes[] = {{1, 1, 16, 16, false, {40, 23}, 8, KV_FORMAT_F32, false},
                                   {2, 2, 64, 32, false, {400, 131}, 8, KV_FORMAT_F32, false}};
    for (size_t i = 0; i < KV_FORMAT_COUNT * sizeof shapes / sizeof *shapes; i++) {
        const shape other = in_format(&shapes[i / KV_FORMAT_COUNT], i % KV_FORMAT_COUNT),
                    *s = &other;
        for (uint32_t threads = 1; threads <= MAX_THREADS; threads++) {
            backend *b = open_backend(s, threads, NULL);
            picture want = picture_new(s);
            uint64_t rng = 7 * threads + i;
            fill_random(&want, s, rng);
            put(b, &want, s);
            bool good = true;
            for (int round = 0; round < 30 && good; round++) {
                mf_kv_move moves[24];
                const uint32_t n = check_below(&rng, 25);
                for (uint32_t k = 0; k < n; k++) {
                    moves[k] = random_move(s, &rng);
                    move_plainly(&want, s, &moves[k]);
                }
                dev->copy_cells(b, moves, n);
                good = same(b, &want, s);
            }
            CHECK(good, "shape %zu, %u threads", i, threads);
            picture_free(&want);
            dev->backend_free(b);
        }
    }
}

// Two rows change places through the spare row, a run slides up and another down.
static void test_cycle(void) {
    static const shape s = {1, 1, 16, 16, false, {20, 20}, 8, KV_FORMAT_F32, false};
    backend *b = open_backend(&s, 2, NULL);
    picture want = picture_new(&s);
    fill_random(&want, &s, 3);
    put(b, &want, &s);
    static const mf_kv_move moves[] = {{4, 20, 1, 1},  {9, 4, 1, 1}, {20, 9, 1, 1},
                                       {10, 13, 6, 1}, {3, 0, 7, 0}, {0, 19, 1, 0}};
    for (size_t i = 0; i < sizeof moves / sizeof *moves; i++) move_plainly(&want, &s, &moves[i]);
    uint8_t first[16 * sizeof(float)];
    memcpy(first, region_of(b, 3) + 9 * sizeof first, sizeof first);
    dev->copy_cells(b, moves, sizeof moves / sizeof *moves);
    CHECK(same(b, &want, &s), "cycle and slides");
    CHECK(!memcmp(first, region_of(b, 3) + 4 * sizeof first, sizeof first),
          "row 9 of group 1 is in cell 4");
    picture_free(&want);
    dev->backend_free(b);
}

static const shape small = {4, 2, 32, 32, false, {50, 17}, 8, KV_FORMAT_F32, false};

// A row of 64 elements.
static void test_bytes(void) {
    static const size_t row[KV_FORMAT_COUNT] = {256, 128, 68};
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        const shape s = in_format(&small, format);
        backend *b = open_backend(&s, 1, NULL);
        backend_stats stats;
        dev->get_stats(b, &stats);
        const size_t rows = 2 * 2 * (size_t)(50 + 1 + 17 + 1);  // K and V of two layers each
        CHECK(stats.kv_bytes == rows * row[format], "%s: %zu bytes", kv_format_name(s.format),
              stats.kv_bytes);
        dev->backend_free(b);
    }
}

// Every allocation that a new backend makes fails once: an error, and nothing is left behind.
static void no_memory(kv_format format, bool widened) {
    const double freq[16] = {0};
    const uint32_t windows[LAYERS] = {8, 8, 8, 8};
    const backend_config c = {.n_layer = LAYERS,
                              .n_head = 4,
                              .n_head_kv = 2,
                              .head_dim = 32,
                              .n_rot = 32,
                              .rope = {{freq, 1.0f}, {freq, 1.0f}},
                              .layer_group = layer_group,
                              .layer_window = windows,
                              .layer_rope = layer_rope,
                              .group_cells = small.cells,
                              .n_groups = GROUPS,
                              .kv_format = format,
                              .kv_widened = widened,
                              .n_batch = BATCH,
                              .n_ctx = 64,
                              .n_threads = 1};
    const size_t alive = mem_alive();
    size_t n = 0;
    int status;
    backend *b = NULL;
    do {
        mem_fail_after(n++);
        status = dev->backend_new(&b, &c);
        mem_fail_after(SIZE_MAX);
        CHECK(status == MF_OK || (status == MF_NOMEM && mem_alive() == alive),
              "allocation %zu: status %d, %zu alive, before %zu", n, status, mem_alive(), alive);
    } while (status == MF_NOMEM && n < 1000);
    CHECK(status == MF_OK && n > 2 * LAYERS, "status %d after %zu", status, n);
    if (status == MF_OK) dev->backend_free(b);
    CHECK(mem_alive() == alive, "%zu alive, before %zu", mem_alive(), alive);
}

static void test_no_memory(void) {
    for (int format = 0; format < KV_FORMAT_COUNT; format++) no_memory((kv_format)format, false);
    no_memory(KV_FORMAT_Q8_0, true);
}

// ---- rotation --------------------------------------------------------------------------------

// The K rows of the cells turned in doubles, by the textbook's formula.
static void turn_row(double *out, const float *row, const shape *s, uint32_t kind, double by) {
    const uint32_t half = s->n_rot / 2;
    for (uint32_t x = 0; x < width_of(s); x++) out[x] = row[x];
    for (uint32_t h = 0; h < s->n_head_kv; h++) {
        for (uint32_t i = 0; i < half; i++) {
            const uint32_t base = h * s->head_dim, a = base + (s->interleaved ? 2 * i : i),
                           b = s->interleaved ? a + 1 : a + half;
            const double angle = by * frequency(s, kind, i);
            out[a] = row[a] * cos(angle) - row[b] * sin(angle);
            out[b] = row[b] * cos(angle) + row[a] * sin(angle);
        }
    }
}

static bool is_turned(const kv_cell_run *runs, uint32_t n, uint32_t group, uint32_t cell) {
    for (uint32_t i = 0; i < n; i++)
        if (runs[i].group == group && cell >= runs[i].cell && cell < runs[i].cell + runs[i].len)
            return true;
    return false;
}

// What storing a turned row may be off by, in units of its largest element: half a step of an f16,
// or of an 8-bit code and, as often, the scale's rounding. The elements themselves turn within
// 2e-6.
static double tolerance(kv_format format) {
    static const double steps[KV_FORMAT_COUNT] = {0.0, 0x1p-11, 0.5 / 127 + 2 * 0x1p-11};
    return steps[format];
}

static double largest(const double *x, uint32_t n) {
    double top = 0.0;
    for (uint32_t i = 0; i < n; i++) top = fmax(top, fabs(x[i]));
    return top;
}

// Largest error of the turned rows beyond what storing explains, or 1e30 if another row changed, or
// an element that does not turn did (a packed one may: its block has got another scale).
static double turn_error(const backend *b, const picture *was, const shape *s,
                         const kv_cell_run *runs, uint32_t n, int32_t delta) {
    const uint32_t width = width_of(s);
    double want[MAX_WIDTH], worst = 0.0;
    float old[MAX_WIDTH], got[MAX_WIDTH];
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        const uint32_t group = layer_group[i / 2], kind = layer_rope[i / 2];
        for (uint32_t cell = 0; cell <= s->cells[group]; cell++) {
            const size_t at = (size_t)cell * row_bytes(s);
            if (i % 2 || !is_turned(runs, n, group, cell)) {
                if (memcmp(was->at[i] + at, region_of(b, i) + at, row_bytes(s)) != 0) worst = 1e30;
                continue;
            }
            load_row(old, was->at[i] + at, s);
            load_row(got, region_of(b, i) + at, s);
            turn_row(want, old, s, kind, delta);
            const double explained = tolerance(s->format) * largest(want, width);
            for (uint32_t x = 0; x < width; x++) {
                const bool may = x % s->head_dim < s->n_rot || s->format == KV_FORMAT_Q8_0;
                const double error = fabs(got[x] - want[x]);
                worst = fmax(worst, may ? error - explained : error * 1e30);
            }
        }
    }
    return worst;
}

// The last two are large enough to be shared out among threads.
static const shape turned_shapes[] = {
    {1, 1, 16, 16, false, {60, 41}, 8, KV_FORMAT_F32, false},
    {2, 2, 32, 32, true, {60, 41}, 8, KV_FORMAT_F32, false},
    {3, 3, 48, 20, false, {60, 41}, 8, KV_FORMAT_F32, false},
    {2, 2, 48, 36, true, {60, 41}, 8, KV_FORMAT_F32, false},
    {1, 1, 64, 2, false, {60, 41}, 8, KV_FORMAT_F32, false},
    {8, 8, 64, 64, false, {200, 90}, 8, KV_FORMAT_F32, false},
    {8, 8, 64, 48, true, {200, 90}, 8, KV_FORMAT_F32, false},
};
enum { TURNED_SHAPES = KV_FORMAT_COUNT * sizeof turned_shapes / sizeof *turned_shapes };

static shape turned_shape(uint32_t i) {
    return in_format(&turned_shapes[i / KV_FORMAT_COUNT], i % KV_FORMAT_COUNT);
}

static const kv_cell_run turned[] = {{0, 3, 1}, {1, 0, 12}, {0, 9, 30}, {1, 20, 21}, {0, 58, 2}};
enum { TURNED = sizeof turned / sizeof *turned };

static void test_turn(void) {
    static const int32_t deltas[] = {1, -1, 7, -300, 4096, KV_POS_MAX - 1, 1 - KV_POS_MAX};
    for (uint32_t i = 0; i < TURNED_SHAPES; i++) {
        const shape other = turned_shape(i), *s = &other;
        backend *b = open_backend(s, 2, NULL);
        picture was = picture_new(s);
        fill_random(&was, s, i);
        for (size_t k = 0; k < sizeof deltas / sizeof *deltas; k++) {
            put(b, &was, s);
            dev->rope_cells(b, turned, TURNED, deltas[k]);
            const double error = turn_error(b, &was, s, turned, TURNED, deltas[k]);
            CHECK(error < 2e-6, "shape %u, delta %d: %g", i, deltas[k], error);
        }
        // No rows, and no turn: not even a NaN is another one after.
        put(b, &was, s);
        dev->rope_cells(b, turned, 0, 5);
        CHECK(same(b, &was, s), "shape %u: no runs", i);
        memset(was.at[0] + 9 * row_bytes(s), 0xff, row_bytes(s));
        put(b, &was, s);
        dev->rope_cells(b, turned, TURNED, 0);
        CHECK(same(b, &was, s), "shape %u: delta 0", i);
        picture_free(&was);
        dev->backend_free(b);
    }
}

static picture picture_of(const backend *b, const shape *s) {
    picture p = picture_new(s);
    for (uint32_t i = 0; i < 2 * LAYERS; i++) memcpy(p.at[i], region_of(b, i), region_bytes(s, i));
    return p;
}

// Next instruction set of the list, or false.
static bool next_isa(char *out, size_t size, const char **list) {
    const size_t n = strcspn(*list, ",");
    if (n == 0 || n >= size) return false;
    memcpy(out, *list, n);
    out[n] = 0;
    *list += n + ((*list)[n] == ',');
    return true;
}

// `runs` cut at random, in another order; returns how many.
static uint32_t cut_runs(kv_cell_run *out, const kv_cell_run *runs, uint32_t n, uint64_t *rng) {
    uint32_t made = 0;
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t at = 0, len; at < runs[i].len; at += len) {
            len = 1 + check_below(rng, runs[i].len - at);
            out[made++] = (kv_cell_run){runs[i].group, runs[i].cell + at, len};
        }
    }
    for (uint32_t i = made; i > 1; i--) {
        const uint32_t k = check_below(rng, i);
        const kv_cell_run swap = out[k];
        out[k] = out[i - 1];
        out[i - 1] = swap;
    }
    return made;
}

// One element of a stored row replaced.
static void poke(const picture *p, const shape *s, uint32_t region, size_t row, uint32_t d,
                 float value) {
    float x[MAX_WIDTH];
    load_row(x, p->at[region] + row * row_bytes(s), s);
    x[d] = value;
    kernels_scalar()->kv_store[s->format](p->at[region] + row * row_bytes(s), x, width_of(s));
}

static void test_turn_bits(void) {
    uint64_t rng = 11;
    for (uint32_t i = 0; i < TURNED_SHAPES; i++) {
        const shape other = turned_shape(i), *s = &other;
        backend *scalar = open_backend(s, 1, "scalar");
        picture was = picture_new(s);
        fill_random(&was, s, 100 + i);
        poke(&was, s, 0, 9, 0, NAN);
        poke(&was, s, 0, 10, 1, INFINITY);
        poke(&was, s, 4, 11, 0, -0.0f);
        poke(&was, s, 4, 12, 1, 60000.0f);  // may turn to more than an f16 holds
        put(scalar, &was, s);
        dev->rope_cells(scalar, turned, TURNED, -77);
        picture want = picture_of(scalar, s);
        const char *list = dev->isas();
        char isa[16];
        while (next_isa(isa, sizeof isa, &list)) {
            for (uint32_t threads = 1; threads <= MAX_THREADS; threads++) {
                kv_cell_run pieces[128];
                const uint32_t n = cut_runs(pieces, turned, TURNED, &rng);
                backend *b = open_backend(s, threads, isa);
                put(b, &was, s);
                dev->rope_cells(b, pieces, n, -77);
                CHECK(same(b, &want, s), "shape %u, %s, %u threads", i, isa, threads);
                dev->backend_free(b);
            }
        }
        picture_free(&want);
        picture_free(&was);
        dev->backend_free(scalar);
    }
}

static bool near(const backend *a, const backend *b, const shape *s, uint32_t region,
                 double bound) {
    float x[MAX_WIDTH], y[MAX_WIDTH];
    for (size_t row = 0; row < region_rows(s, region); row++) {
        load_row(x, region_of(a, region) + row * row_bytes(s), s);
        load_row(y, region_of(b, region) + row * row_bytes(s), s);
        for (uint32_t d = 0; d < width_of(s); d++)
            if (!(fabs((double)x[d] - y[d]) <= bound)) return false;
    }
    return true;
}

// Rows stored at p and turned by d are the rows stored at p + d: the direction is right, and the
// factor of the rope kind is not applied again. Up to three storings lie between the two, of rows
// whose elements are below 5.
static void test_direction(void) {
    static const int32_t deltas[] = {1, -20, 300};
    for (uint32_t i = 0; i < TURNED_SHAPES; i++) {
        const shape other = turned_shape(i), *s = &other;
        tables t = load_tables(s);
        graph *g = make_graph(s, &t, KV_WINDOW_MODES);
        batch *in = new_batch();
        for (size_t k = 0; k < sizeof deltas / sizeof *deltas; k++) {
            backend *b[2] = {open_backend(s, 1, NULL), open_backend(s, 2, NULL)};
            for (uint32_t e = 0; e < 2; e++) {
                row_list r = {.n = 40};
                for (uint32_t x = 0; x < r.n; x++) {
                    r.pos[x] = 25 + x + (uint32_t)(e ? deltas[k] : 0);
                    r.cell[x] = (int32_t)x;
                }
                store_rows(b[e], g, in, &r, r.n);
            }
            const kv_cell_run all[] = {{0, 0, 40}, {1, 0, 40}};
            dev->rope_cells(b[0], all, 2, deltas[k]);
            for (uint32_t region = 0; region < 2 * LAYERS; region++) {
                const double bound = region % 2 ? 0.0 : 1e-5 + 3 * 5.0 * tolerance(s->format);
                CHECK(near(b[0], b[1], s, region, bound), "shape %u, delta %d, region %u", i,
                      deltas[k], region);
            }
            dev->backend_free(b[0]);
            dev->backend_free(b[1]);
        }
        batch_free(in);
        graph_free(g);
        free_tables(&t);
    }
}

int main(void) {
    test_moves();
    test_cycle();
    test_bytes();
    test_no_memory();
    test_turn();
    test_turn_bits();
    test_direction();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
