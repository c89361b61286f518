// Owns the order of moves. Refuses moves that overlap, and circles of rows if there is no row to
// break them through.
//
// Upward moves by source from the top, then downward ones by source from the bottom: that is right
// unless an upward move lands on a row that a downward one has yet to read, and then no move need
// be cut. Otherwise holes are filled: the rows that land in a hole go there and leave another hole.
// What no hole reaches goes round in circles, one scratch row at a time.
//
// Invariant: a row is written only where no row is still to be read.
#include "kv_moves.h"

#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "error.h"

enum { MOVES_END = (1 << 24) + 1 };  // behind the scratch row of the largest arena

int kv_moves_reserve(kv_moves *moves, uint32_t n) {
    if (n <= moves->capacity) return MF_OK;
    mf_kv_move *const at = mem_grow(moves->at, n, sizeof *at);
    if (!at) return MF_NOMEM;
    moves->at = at;
    moves->capacity = n;
    return MF_OK;
}

void kv_moves_free(kv_moves *moves) {
    mem_free(moves->at);
    *moves = (kv_moves){0};
}

// ---- memory ----------------------------------------------------------------------------------

// None of it need be zeroed: what is asked for with care for the worst case is mostly not touched.
static int order_new(kv_order *order, size_t n) {
    *order = (kv_order){
        .by_src = mem_grow(NULL, n, sizeof *order->by_src),
        .by_dst = mem_grow(NULL, n, sizeof *order->by_dst),
        .first = mem_grow(NULL, n, sizeof *order->first),
        .holes = mem_grow(NULL, n <= SIZE_MAX - 2 ? n + 2 : n, sizeof *order->holes),
    };
    if (order->by_src && order->by_dst && order->first && order->holes) return MF_OK;
    kv_order_free(order);
    return MF_NOMEM;
}

static int order_rows(kv_order *order, size_t n_rows) {
    order->done = mem_grow(NULL, n_rows / 64 + 1, sizeof *order->done);
    return order->done ? MF_OK : MF_NOMEM;
}

int kv_order_new(kv_order *order, size_t n, size_t n_rows) {
    TRY(order_new(order, n));
    const int status = order_rows(order, n_rows);
    if (status) kv_order_free(order);
    return status;
}

void kv_order_free(kv_order *order) {
    mem_free(order->by_src);
    mem_free(order->by_dst);
    mem_free(order->first);
    mem_free(order->holes);
    mem_free(order->done);
    *order = (kv_order){0};
}

// ---- what comes out --------------------------------------------------------------------------

// Takes moves of one group; `at` NULL: only counts them.
typedef struct sink {
    mf_kv_move *at, last;
    uint64_t n;
} sink;

static void put(sink *out, mf_kv_move move) {
    out->last = move;
    if (out->at) out->at[out->n] = move;
    out->n++;
}

// Two steps that a memmove of both together equals become one: upward the next below, downward the
// next above.
static void put_joined(sink *out, mf_kv_move move) {
    mf_kv_move *const last = &out->last;
    const bool up = move.dst > move.src;
    if (out->n && up == (last->dst > last->src) && move.dst - move.src == last->dst - last->src &&
        (up ? move.src + move.n == last->src : last->src + last->n == move.src)) {
        if (up) {
            last->src = move.src;
            last->dst = move.dst;
        }
        last->n += move.n;
        if (out->at) out->at[out->n - 1] = *last;
    } else {
        put(out, move);
    }
}

// ---- one group -------------------------------------------------------------------------------

// The n moves of a group, none onto itself.
typedef struct slice {
    const mf_kv_move *by_src, *by_dst;
    size_t n;
    int32_t scratch;
    kv_order *memory;
} slice;

// Does an upward move land on a row that a downward move reads?
static bool clashes(const slice *g) {
    for (size_t i = 0, k = 0; i < g->n; i++) {
        const mf_kv_move up = g->by_dst[i];
        if (up.dst < up.src) continue;
        while (k < g->n && (g->by_src[k].dst > g->by_src[k].src ||
                            g->by_src[k].src + g->by_src[k].n <= up.dst)) {
            k++;
        }
        if (k < g->n && g->by_src[k].src < up.dst + up.n) return true;
    }
    return false;
}

static void put_rule(sink *out, const slice *g) {
    for (size_t i = g->n; i-- > 0;) {
        if (g->by_src[i].dst > g->by_src[i].src) put(out, g->by_src[i]);
    }
    for (size_t i = 0; i < g->n; i++) {
        if (g->by_src[i].dst < g->by_src[i].src) put(out, g->by_src[i]);
    }
}

// The first move of by_dst that ends above a cell.
static size_t lands_at(const slice *g, int32_t cell) {
    size_t lo = 0, hi = g->n;
    while (lo < hi) {
        const size_t mid = (lo + hi) / 2;
        if (g->by_dst[mid].dst + g->by_dst[mid].n <= cell) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

static bool is_done(const slice *g, uint32_t row) {
    return g->memory->done[row / 64] >> row % 64 & 1;
}

static void mark_done(const slice *g, uint32_t row, int32_t n) {
    for (uint32_t end = row + (uint32_t)n; row < end; row++) {
        g->memory->done[row / 64] |= (uint64_t)1 << row % 64;
    }
}

// Fills the hole, and the holes which that leaves. What is left of a hole for later starts where a
// move of by_dst ends, so there are never more than n, and the one in hand.
static void fill_hole(sink *out, const slice *g, kv_hole hole) {
    kv_hole *const holes = g->memory->holes;
    size_t n_holes = 0;
    holes[n_holes++] = hole;
    while (n_holes) {
        hole = holes[--n_holes];
        const size_t i = lands_at(g, hole.lo);
        if (i == g->n || g->by_dst[i].dst >= hole.hi) continue;
        const mf_kv_move m = g->by_dst[i];
        const int32_t lo = m.dst > hole.lo ? m.dst : hole.lo;
        const int32_t hi = m.dst + m.n < hole.hi ? m.dst + m.n : hole.hi;
        put_joined(out, (mf_kv_move){m.src + (lo - m.dst), lo, hi - lo, m.group});
        mark_done(g, g->memory->first[i] + (uint32_t)(lo - m.dst), hi - lo);
        if (hi < hole.hi) holes[n_holes++] = (kv_hole){hi, hole.hi};
        holes[n_holes++] = (kv_hole){m.src + (lo - m.dst), m.src + (hi - m.dst)};
    }
}

// From the destinations that are nobody's source.
static void put_chains(sink *out, const slice *g) {
    for (size_t i = 0, k = 0; i < g->n; i++) {
        const int32_t end = g->by_dst[i].dst + g->by_dst[i].n;
        for (int32_t lo = g->by_dst[i].dst; lo < end;) {
            while (k < g->n && g->by_src[k].src + g->by_src[k].n <= lo) k++;
            const bool more = k < g->n && g->by_src[k].src < end;
            const int32_t hi = more ? g->by_src[k].src : end;
            if (lo < hi) fill_hole(out, g, (kv_hole){lo, hi});
            lo = more ? g->by_src[k].src + g->by_src[k].n : end;
        }
    }
}

// The rows that no hole reached.
static int put_circles(sink *out, const slice *g) {
    for (size_t i = 0; i < g->n; i++) {
        const mf_kv_move m = g->by_dst[i];
        for (int32_t r = 0; r < m.n; r++) {
            if (is_done(g, g->memory->first[i] + (uint32_t)r)) continue;
            const int32_t start = m.src + r;
            if (g->scratch == KV_NO_SCRATCH) {
                return fail(MF_KV_CYCLE,
                            "group %d: the moves go in a circle through cell %d, which no order "
                            "makes right; move a row of it to a free cell first",
                            m.group, start);
            }
            put_joined(out, (mf_kv_move){start, g->scratch, 1, m.group});
            for (int32_t hole = start;;) {
                const size_t k = lands_at(g, hole);
                const int32_t at = hole - g->by_dst[k].dst, from = g->by_dst[k].src + at;
                mark_done(g, g->memory->first[k] + (uint32_t)at, 1);
                put_joined(out, (mf_kv_move){from == start ? g->scratch : from, hole, 1, m.group});
                if (from == start) break;
                hole = from;
            }
        }
    }
    return MF_OK;
}

// MF_KV_CYCLE, or nothing that fails.
static int put_group(sink *out, const slice *g) {
    if (!clashes(g)) {
        put_rule(out, g);
        return MF_OK;
    }
    uint32_t rows = 0;
    for (size_t i = 0; i < g->n; i++) {
        g->memory->first[i] = rows;
        rows += (uint32_t)g->by_dst[i].n;
    }
    memset(g->memory->done, 0, (rows / 64 + 1) * sizeof *g->memory->done);
    put_chains(out, g);
    return put_circles(out, g);
}

static int compare(int64_t a, int64_t b) { return (a > b) - (a < b); }

static int compare_src(const void *a, const void *b) {
    const mf_kv_move *const x = a, *const y = b;
    return x->group != y->group ? compare(x->group, y->group) : compare(x->src, y->src);
}

static int compare_dst(const void *a, const void *b) {
    const mf_kv_move *const x = a, *const y = b;
    return x->group != y->group ? compare(x->group, y->group) : compare(x->dst, y->dst);
}

void kv_order_run(kv_moves *ordered, kv_order *order, size_t n, int32_t scratch) {
    size_t moving = 0;
    for (size_t i = 0; i < n; i++) {
        if (order->by_src[i].src != order->by_src[i].dst)
            order->by_src[moving++] = order->by_src[i];
    }
    if (!moving) return;
    memcpy(order->by_dst, order->by_src, moving * sizeof *order->by_dst);
    qsort(order->by_src, moving, sizeof *order->by_src, compare_src);
    qsort(order->by_dst, moving, sizeof *order->by_dst, compare_dst);
    const slice g = {order->by_src, order->by_dst, moving, scratch, order};
    sink out = {.at = ordered->at + ordered->n};
    put_group(&out, &g);
    ordered->n += (uint32_t)out.n;
}

// ---- moves from outside ----------------------------------------------------------------------

static int check_move(const mf_kv_move *m, int32_t scratch) {
    if (m->n < 1 || m->src < 0 || m->dst < 0 || m->src > MOVES_END - m->n ||
        m->dst > MOVES_END - m->n) {
        return fail(MF_ARG,
                    "move of %d rows from cell %d to %d: give at least 1 row, and cells from 0 to "
                    "%d",
                    m->n, m->src, m->dst, MOVES_END - 1);
    }
    if (scratch != KV_NO_SCRATCH && ((scratch >= m->src && scratch < m->src + m->n) ||
                                     (scratch >= m->dst && scratch < m->dst + m->n))) {
        return fail(MF_KV_OVERLAP,
                    "move of %d rows from cell %d to %d: cell %d is the scratch row; leave it out",
                    m->n, m->src, m->dst, scratch);
    }
    return MF_OK;
}

// Of the sorted moves.
static int check_overlap(const kv_order *order, size_t n) {
    for (size_t i = 1; i < n; i++) {
        const mf_kv_move a = order->by_src[i - 1], b = order->by_src[i];
        if (a.group == b.group && a.src + a.n > b.src) {
            return fail(MF_KV_OVERLAP,
                        "group %d: a move of %d rows from cell %d and one from cell %d both read "
                        "cell %d; move each row once",
                        a.group, a.n, a.src, b.src, b.src);
        }
        const mf_kv_move c = order->by_dst[i - 1], d = order->by_dst[i];
        if (c.group == d.group && c.dst + c.n > d.dst) {
            return fail(MF_KV_OVERLAP,
                        "group %d: a move of %d rows to cell %d and one to cell %d both write cell "
                        "%d; give each row a place of its own",
                        c.group, c.n, c.dst, d.dst, d.dst);
        }
    }
    return MF_OK;
}

static size_t drop_idle(mf_kv_move *moves, size_t n) {
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        if (moves[i].src != moves[i].dst) moves[kept++] = moves[i];
    }
    return kept;
}

static size_t group_end(const mf_kv_move *moves, size_t first, size_t n) {
    size_t end = first;
    while (end < n && moves[end].group == moves[first].group) end++;
    return end;
}

// Of the group with the most, after the overlap check: at most MOVES_END.
static size_t most_rows(const mf_kv_move *moves, size_t n) {
    size_t most = 0;
    for (size_t i = 0, end; i < n; i = end) {
        end = group_end(moves, i, n);
        size_t rows = 0;
        for (size_t k = i; k < end; k++) rows += (size_t)moves[k].n;
        if (rows > most) most = rows;
    }
    return most;
}

// All groups; `at` NULL: only counts, and finds the cycles.
static int put_all(uint64_t *n_out, mf_kv_move *at, kv_order *order, size_t n, int32_t scratch) {
    *n_out = 0;
    for (size_t i = 0, end; i < n; i = end) {
        end = group_end(order->by_src, i, n);
        const slice g = {order->by_src + i, order->by_dst + i, end - i, scratch, order};
        sink out = {.at = at ? at + *n_out : NULL};
        TRY(put_group(&out, &g));
        *n_out += out.n;
    }
    return MF_OK;
}

int kv_moves_order(kv_moves *ordered, const mf_kv_move *moves, size_t n, int32_t scratch) {
    for (size_t i = 0; i < n; i++) TRY(check_move(&moves[i], scratch));
    if (!n) return MF_OK;
    int status = MF_OK;
    kv_order order;
    TRY(order_new(&order, n));
    memcpy(order.by_src, moves, n * sizeof *moves);
    memcpy(order.by_dst, moves, n * sizeof *moves);
    qsort(order.by_src, n, sizeof *moves, compare_src);
    qsort(order.by_dst, n, sizeof *moves, compare_dst);
    TRY_GOTO(done, check_overlap(&order, n));
    drop_idle(order.by_dst, n);
    n = drop_idle(order.by_src, n);
    TRY_GOTO(done, order_rows(&order, most_rows(order.by_src, n)));
    uint64_t n_out;
    TRY_GOTO(done, put_all(&n_out, NULL, &order, n, scratch));
    if (n_out > UINT32_MAX - ordered->n) TRY_GOTO(done, fail(MF_LIMIT, "%zu moves at once", n));
    TRY_GOTO(done, kv_moves_reserve(ordered, ordered->n + (uint32_t)n_out));
    TRY_GOTO(done,
             put_all(&n_out, ordered->at ? ordered->at + ordered->n : NULL, &order, n, scratch));
    ordered->n += (uint32_t)n_out;
done:
    kv_order_free(&order);
    return status;
}
