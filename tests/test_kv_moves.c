// The order of moves against all of them at once: every placement of rows in a small arena, random
// runs that overlap their own destinations, several groups, every refusal.
#include <string.h>

#include "alloc.h"
#include "counted.h"
#include "kv_moves.h"

enum { CELLS = 64, GROUPS = 3, SCRATCH = CELLS };

// What every cell of every group holds: at first its own number. The last one is the scratch row.
typedef int rows[GROUPS][CELLS + 1];

static void number(rows at) {
    for (int g = 0; g < GROUPS; g++) {
        for (int c = 0; c <= CELLS; c++) at[g][c] = c;
    }
}

static void execute(rows at, const mf_kv_move *moves, size_t n) {
    for (size_t i = 0; i < n; i++) {
        int *const cells = at[moves[i].group];
        memmove(cells + moves[i].dst, cells + moves[i].src, (size_t)moves[i].n * sizeof *cells);
    }
}

static void at_once(rows at, const mf_kv_move *moves, size_t n) {
    rows before;
    memcpy(before, at, sizeof before);
    for (size_t i = 0; i < n; i++) {
        for (int r = 0; r < moves[i].n; r++) {
            at[moves[i].group][moves[i].dst + r] = before[moves[i].group][moves[i].src + r];
        }
    }
}

static bool right(const mf_kv_move *moves, size_t n, const kv_moves *ordered) {
    rows got, want;
    number(got);
    number(want);
    execute(got, ordered->at, ordered->n);
    at_once(want, moves, n);
    for (int g = 0; g < GROUPS; g++) {
        if (memcmp(got[g], want[g], CELLS * sizeof got[g][0]) != 0) return false;
    }
    return true;
}

static uint32_t n_rows(const mf_kv_move *moves, size_t n) {
    uint32_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += moves[i].src != moves[i].dst ? (uint32_t)moves[i].n : 0;
    return sum;
}

// Does a row of some group come back to where it was?
static bool has_cycle(const mf_kv_move *moves, size_t n) {
    int to[GROUPS][CELLS];
    memset(to, 0xff, sizeof to);
    for (size_t i = 0; i < n; i++) {
        for (int r = 0; r < moves[i].n; r++)
            to[moves[i].group][moves[i].src + r] = moves[i].dst + r;
    }
    for (int g = 0; g < GROUPS; g++) {
        for (int c = 0; c < CELLS; c++) {
            int at = to[g][c];
            for (int step = 0; at >= 0 && at != c && step < CELLS; step++) at = to[g][at];
            if (at == c && to[g][c] != c) return true;
        }
    }
    return false;
}

// An upward move that lands on a row which a downward move reads.
static bool has_clash(const mf_kv_move *moves, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const mf_kv_move up = moves[i];
        for (size_t k = 0; k < n && up.dst > up.src; k++) {
            const mf_kv_move down = moves[k];
            if (down.dst < down.src && down.group == up.group && down.src < up.dst + up.n &&
                up.dst < down.src + down.n) {
                return true;
            }
        }
    }
    return false;
}

// Both ways, and all that is promised of the result.
static void order_both(const mf_kv_move *moves, size_t n, const char *what) {
    kv_moves ordered = {0};
    const bool cycle = has_cycle(moves, n);
    CHECK(kv_moves_order(&ordered, moves, n, SCRATCH) == MF_OK, "%s: %s", what, mf_last_error());
    CHECK(right(moves, n, &ordered), "%s, %zu moves, with a scratch row", what, n);
    CHECK(cycle ? n_rows(ordered.at, ordered.n) > n_rows(moves, n)
                : n_rows(ordered.at, ordered.n) == n_rows(moves, n),
          "%s: %u rows moved for %u", what, n_rows(ordered.at, ordered.n), n_rows(moves, n));
    CHECK(2 * ordered.n <= 3 * n_rows(moves, n), "%s: %u moves for %u rows", what, ordered.n,
          n_rows(moves, n));
    uint32_t moving = 0;
    for (size_t i = 0; i < n; i++) moving += moves[i].src != moves[i].dst;
    CHECK(has_clash(moves, n) || ordered.n == moving, "%s: %u moves cut into %u", what, moving,
          ordered.n);
    ordered.n = 0;
    const int status = kv_moves_order(&ordered, moves, n, KV_NO_SCRATCH);
    CHECK(status == (cycle ? MF_KV_CYCLE : MF_OK), "%s: status %d, a cycle: %d", what, status,
          (int)cycle);
    CHECK(cycle ? ordered.n == 0 : right(moves, n, &ordered), "%s, %zu moves", what, n);
    kv_moves_free(&ordered);
}

// ---- every placement -------------------------------------------------------------------------

enum { SMALL = 6 };

static uint32_t n_placements;

static void check_placement(const int *to) {
    mf_kv_move single[SMALL], runs[SMALL];
    size_t n_single = 0, n_runs = 0;
    for (int c = 0; c < SMALL; c++) {
        if (to[c] < 0) continue;
        single[n_single++] = (mf_kv_move){c, to[c], 1, 0};
        mf_kv_move *const last = &runs[n_runs ? n_runs - 1 : 0];
        if (n_runs && last->src + last->n == c && last->dst + last->n == to[c]) {
            last->n++;
        } else {
            runs[n_runs++] = (mf_kv_move){c, to[c], 1, 0};
        }
    }
    n_placements++;
    order_both(single, n_single, "rows");
    order_both(runs, n_runs, "runs");
}

// Cells from `cell` on: each is free or goes to a place that is not taken.
static void place(int *to, int cell, unsigned taken) {
    if (cell == SMALL) {
        check_placement(to);
        return;
    }
    to[cell] = -1;
    place(to, cell + 1, taken);
    for (int dst = 0; dst < SMALL; dst++) {
        if (taken >> dst & 1) continue;
        to[cell] = dst;
        place(to, cell + 1, taken | 1u << dst);
    }
    to[cell] = -1;
}

static void test_all_placements(void) {
    int to[SMALL];
    place(to, 0, 0);
    CHECK(n_placements == 13327, "%u placements of rows in %d cells", n_placements, SMALL);
}

// ---- random runs -----------------------------------------------------------------------------

static uint64_t state;

static uint32_t below(uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % n;
}

static void shuffle(size_t *order, size_t n) {
    for (size_t i = 0; i < n; i++) order[i] = i;
    for (size_t i = n; i > 1; i--) {
        const size_t k = below((uint32_t)i), t = order[i - 1];
        order[i - 1] = order[k];
        order[k] = t;
    }
}

// Puts runs of the lengths at random places in this order.
static void lay_out(int32_t *at, const int32_t *lens, const size_t *order, size_t n,
                    int32_t spare) {
    int32_t cell = 0;
    for (size_t i = 0; i < n; i++) {
        const int32_t skip = (int32_t)below((uint32_t)spare + 1);
        spare -= skip;
        cell += skip;
        at[order[i]] = cell;
        cell += lens[order[i]];
    }
}

// A few runs in one group; with `keep` in the same order before and after.
static size_t random_runs(mf_kv_move *moves, int32_t group, bool keep) {
    int32_t lens[6], src[6], dst[6], sum = 0;
    size_t order[6];
    const size_t n = 1 + below(6);
    for (size_t i = 0; i < n; i++) sum += lens[i] = (int32_t)(1 + below(10));
    const int32_t cells = sum + (int32_t)below((uint32_t)(CELLS - sum) + 1);
    shuffle(order, n);
    lay_out(src, lens, order, n, cells - sum);
    if (!keep) shuffle(order, n);
    lay_out(dst, lens, order, n, cells - sum);
    for (size_t i = 0; i < n; i++) moves[i] = (mf_kv_move){src[i], dst[i], lens[i], group};
    return n;
}

static void test_random_runs(void) {
    for (uint32_t seed = 0; seed < 20000; seed++) {
        state = seed;
        mf_kv_move moves[6];
        const bool keep = seed % 3 == 0;
        const size_t n = random_runs(moves, 0, keep);
        order_both(moves, n, keep ? "kept order" : "random runs");
        CHECK(!keep || (!has_cycle(moves, n) && !has_clash(moves, n)), "seed %u", seed);
    }
}

static void test_groups(void) {
    for (uint32_t seed = 0; seed < 3000; seed++) {
        state = seed;
        mf_kv_move sorted[18], moves[18];
        size_t order[18], n = 0;
        for (int32_t g = 0; g < GROUPS; g++) n += random_runs(sorted + n, g, below(2));
        shuffle(order, n);
        for (size_t i = 0; i < n; i++) moves[i] = sorted[order[i]];
        order_both(moves, n, "groups");
        kv_moves ordered = {0};
        kv_moves_order(&ordered, moves, n, SCRATCH);
        for (uint32_t i = 1; i < ordered.n; i++) {
            CHECK(ordered.at[i - 1].group <= ordered.at[i].group, "group %d before %d",
                  ordered.at[i - 1].group, ordered.at[i].group);
        }
        kv_moves_free(&ordered);
    }
}

// ---- what is promised of the order -----------------------------------------------------------

static bool equal(const kv_moves *ordered, const mf_kv_move *want, uint32_t n) {
    return ordered->n == n && !memcmp(ordered->at, want, n * sizeof *want);
}

static void test_order(void) {
    kv_moves ordered = {0};
    // Upward from the top, then downward from the bottom; a move onto itself is left out.
    const mf_kv_move plain[] = {
        {40, 30, 4, 0}, {0, 2, 3, 0}, {25, 25, 2, 0}, {5, 9, 3, 0}, {20, 16, 5, 0}};
    const mf_kv_move want[] = {{5, 9, 3, 0}, {0, 2, 3, 0}, {20, 16, 5, 0}, {40, 30, 4, 0}};
    CHECK(!kv_moves_order(&ordered, plain, 5, KV_NO_SCRATCH), "%s", mf_last_error());
    CHECK(equal(&ordered, want, 4), "%u moves", ordered.n);
    // Appended to what was there.
    const mf_kv_move chain[] = {{0, 2, 1, 7}, {2, 1, 1, 7}},
                     chained[] = {{2, 1, 1, 7}, {0, 2, 1, 7}};
    CHECK(!kv_moves_order(&ordered, chain, 2, KV_NO_SCRATCH), "%s", mf_last_error());
    CHECK(ordered.n == 6 && !memcmp(ordered.at, want, sizeof want) &&
              !memcmp(ordered.at + 4, chained, sizeof chained),
          "%u moves", ordered.n);
    // A long run beside a chain stays in few pieces.
    ordered.n = 0;
    const mf_kv_move swapped[] = {{0, 30, 20, 0}, {30, 10, 20, 0}};
    CHECK(!kv_moves_order(&ordered, swapped, 2, KV_NO_SCRATCH), "%s", mf_last_error());
    CHECK(right(swapped, 2, &ordered) && ordered.n <= 4, "%u moves", ordered.n);
    ordered.n = 0;
    const mf_kv_move near[] = {{0, 2, 1, 0}, {2, 1, 1, 0}, {10, 11, 20, 0}, {41, 40, 20, 0}};
    CHECK(!kv_moves_order(&ordered, near, 4, KV_NO_SCRATCH), "%s", mf_last_error());
    CHECK(right(near, 4, &ordered) && ordered.n == 4, "%u moves", ordered.n);
    CHECK(!kv_moves_order(&ordered, NULL, 0, KV_NO_SCRATCH), "%s", mf_last_error());
    kv_moves_free(&ordered);
}

// ---- refusals --------------------------------------------------------------------------------

static void refused(const mf_kv_move *moves, size_t n, int32_t scratch, int status,
                    const char *named) {
    mf_kv_move one = {1, 2, 3, 4};
    kv_moves ordered = {&one, 1, 1};
    const size_t alive = mem_alive();
    const int got = kv_moves_order(&ordered, moves, n, scratch);
    CHECK(got == status && strstr(mf_last_error(), named), "%d, not %d: %s", got, status,
          mf_last_error());
    CHECK(ordered.at == &one && ordered.n == 1 && ordered.capacity == 1 && one.src == 1,
          "changed: %u moves", ordered.n);
    CHECK(mem_alive() == alive, "%zu allocations, %zu before", mem_alive(), alive);
}

static void test_refusals(void) {
    enum { END = (1 << 24) + 1 };
    const mf_kv_move bad[] = {{0, 1, 0, 0},         {0, 1, -5, 0},
                              {-1, 2, 1, 0},        {1, -2, 1, 0},
                              {END, 0, 1, 0},       {0, END, 1, 0},
                              {0, END - 1, 2, 0},   {END - 1, 0, 2, 0},
                              {5, 9, INT32_MAX, 0}, {INT32_MAX, INT32_MAX, INT32_MAX, 0},
                              {INT32_MIN, 0, 1, 0}, {0, 0, INT32_MIN, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char named[40];
        snprintf(named, sizeof named, "move of %d rows from cell %d to %d", bad[i].n, bad[i].src,
                 bad[i].dst);
        refused(&bad[i], 1, KV_NO_SCRATCH, MF_ARG, named);
    }
    const mf_kv_move last[] = {{END - 1, 0, 1, 0}, {1, END - 2, 1, 0}};
    kv_moves ordered = {0};
    CHECK(!kv_moves_order(&ordered, last, 2, KV_NO_SCRATCH), "%s", mf_last_error());
    kv_moves_free(&ordered);
    refused((mf_kv_move[]){{0, 3, 2, 0}, {1, 7, 1, 0}}, 2, KV_NO_SCRATCH, MF_KV_OVERLAP,
            "both read cell 1");
    refused((mf_kv_move[]){{9, 4, 1, 0}, {0, 3, 2, 0}}, 2, KV_NO_SCRATCH, MF_KV_OVERLAP,
            "both write cell 4");
    refused((mf_kv_move[]){{4, 4, 2, 0}, {9, 5, 1, 0}}, 2, KV_NO_SCRATCH, MF_KV_OVERLAP,
            "both write cell 5");
    refused((mf_kv_move[]){{0, 3, 2, 1}, {9, 8, 1, 0}, {0, 7, 1, 1}}, 3, KV_NO_SCRATCH,
            MF_KV_OVERLAP, "group 1");
    refused((mf_kv_move[]){{5, 0, 3, 0}}, 1, 7, MF_KV_OVERLAP, "cell 7 is the scratch row");
    refused((mf_kv_move[]){{0, 5, 3, 0}}, 1, 5, MF_KV_OVERLAP, "cell 5 is the scratch row");
    refused((mf_kv_move[]){{0, 1, 1, 0}, {1, 0, 1, 0}}, 2, KV_NO_SCRATCH, MF_KV_CYCLE, "cell ");
    refused((mf_kv_move[]){{3, 4, 1, 0}, {0, 10, 5, 1}, {10, 0, 5, 1}}, 3, KV_NO_SCRATCH,
            MF_KV_CYCLE, "group 1");
}

static void test_failing_memory(void) {
    const mf_kv_move moves[] = {{0, 10, 5, 0}, {10, 2, 5, 0}, {0, 1, 1, 1}, {1, 0, 1, 1}};
    kv_moves ordered = {0};
    const size_t alive = mem_alive();
    int status = MF_NOMEM;
    uint32_t n = 0;
    for (; status == MF_NOMEM && n < 20; n++) {
        mem_fail_after(n);
        status = kv_moves_order(&ordered, moves, 4, SCRATCH);
        if (!status) break;
        CHECK(status == MF_NOMEM && !ordered.n && !ordered.at && mem_alive() == alive,
              "allocation %u: status %d, %u moves, %zu alive", n, status, ordered.n, mem_alive());
    }
    mem_fail_after(SIZE_MAX);
    CHECK(!status && n >= 5 && right(moves, 4, &ordered), "status %d after %u", status, n);
    kv_moves_free(&ordered);
}

int main(void) {
    test_all_placements();
    test_random_runs();
    test_groups();
    test_order();
    test_refusals();
    test_failing_memory();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
