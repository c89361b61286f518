// Tests of the cell store's edits of positions: every refusal of rm and shift with the state
// unchanged, exact acceptance where rows are shared, what the device is told to do, failing
// allocations, and that kv_cache_check sees what no call leaves behind.
#include <stdio.h>

#include "../engine/alloc.h"
#include "../engine/kv_store.h"
#include "kv_test.h"

static bool idle(void) { return !work.n_moves && !work.n_roped; }

static bool roped_is(uint32_t i, uint32_t group, int32_t cell, uint32_t len) {
    if (i >= work.n_roped) return false;
    const kv_cell_run r = work.roped[i];
    return r.group == group && (cell < 0 || r.cell == (uint32_t)cell) && r.len == len;
}

// ---- rm and shift ----------------------------------------------------------------------------

static void test_edit_refusals(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 60}};
    kv_cache *const kv = make(groups, 2, 3, 50);
    IS(append(kv, 0, 10), MF_OK);
    static const int32_t bad[] = {-1, 3, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        REFUSED(kv, rm(kv, bad[i], 0, 0), MF_ARG);
        REFUSED(kv, shift(kv, bad[i], 0, 0), MF_ARG);
    }
    static const int32_t ranges[][2] = {{-1, 5},
                                        {5, 4},
                                        {0, 11},
                                        {11, 11},
                                        {INT32_MIN, INT32_MAX},
                                        {INT32_MAX, INT32_MIN},
                                        {0, -1},
                                        {INT32_MAX, INT32_MAX},
                                        {INT32_MIN, INT32_MIN},
                                        {10, 11}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        REFUSED(kv, rm(kv, 0, ranges[i][0], ranges[i][1]), MF_ARG);
    REFUSED(kv, rm(kv, 1, 0, 1), MF_ARG);  // an empty sequence ends at 0
    REFUSED(kv, rm(kv, 1, 0, 0), MF_OK);
    REFUSED(kv, rm(kv, 0, 10, 10), MF_OK);
    REFUSED(kv, rm(kv, 0, 3, 3), MF_OK);
    CHECK(idle(), "an empty rm gives work");
    static const int32_t starts[] = {-1, 11, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) REFUSED(kv, shift(kv, 0, starts[i], 1), MF_ARG);
    REFUSED(kv, shift(kv, 0, 11, 0), MF_ARG);
    REFUSED(kv, shift(kv, 1, 1, 0), MF_ARG);
    REFUSED(kv, shift(kv, 1, 0, INT32_MIN), MF_OK);  // no row at or above it
    REFUSED(kv, shift(kv, 0, 10, INT32_MAX), MF_OK);
    REFUSED(kv, shift(kv, 0, 5, 0), MF_OK);
    CHECK(idle(), "a shift by 0 gives work");
    static const int32_t far[] = {-1, INT32_MIN, INT32_MAX, KV_POS_MAX, KV_POS_MAX - 9};
    for (int i = 0; i < 5; i++) REFUSED(kv, shift(kv, 0, 0, far[i]), MF_KV_RANGE);
    REFUSED(kv, shift(kv, 0, 3, -4), MF_KV_RANGE);
    REFUSED(kv, shift(kv, 0, 3, -3), MF_KV_COLLIDES);
    REFUSED(kv, shift(kv, 0, 3, -1), MF_KV_COLLIDES);
    REFUSED(kv, shift(kv, 0, 9, KV_POS_MAX - 9), MF_KV_RANGE);
    IS(shift(kv, 0, 9, KV_POS_MAX - 10), MF_OK);
    CHECK(pos_of(kv, 0, 9) == KV_POS_MAX - 1, "row 9 at %u", pos_of(kv, 0, 9));
    REFUSED(kv, append(kv, 0, 1), MF_KV_RANGE);
    REFUSED(kv, shift(kv, 0, KV_POS_MAX - 1, 1), MF_KV_RANGE);
    REFUSED(kv, shift(kv, 0, KV_POS_MAX, 1), MF_OK);
    kv_cache_free(kv);

    kv_config config = config_of(groups, 2, 3, 50);
    config.can_rope = false;
    kv_cache *fixed = NULL;
    IS(kv_cache_new(&fixed, &config), MF_OK);
    IS(append(fixed, 0, 10), MF_OK);
    REFUSED(fixed, rm(fixed, 0, 2, 4), MF_UNSUPPORTED);
    REFUSED(fixed, shift(fixed, 0, 2, 1), MF_UNSUPPORTED);
    REFUSED(fixed, shift(fixed, 0, 2, -1), MF_KV_COLLIDES);
    REFUSED(fixed, shift(fixed, 0, 10, 1), MF_OK);
    REFUSED(fixed, rm(fixed, 0, 2, 11), MF_ARG);
    IS(rm(fixed, 0, 7, 10), MF_OK);  // no row moves: a trim
    CHECK(len_of(fixed, 0) == 7 && idle(), "len %u", len_of(fixed, 0));
    kv_cache_free(fixed);
}

static void test_gap_limit(void) {
    for (uint32_t n_seq = 1; n_seq <= 5; n_seq += 2) {
        const uint32_t most = KV_MAP_MAX_SPANS - (n_seq == 1 ? 1 : n_seq == 3 ? 2 : 3);
        kv_cache *const kv = make(&FULL_100, 1, n_seq, 100);
        IS(append(kv, 0, 80), MF_OK);
        IS(shift(kv, 0, 0, 100), MF_OK);  // one at the start is free
        for (uint32_t i = 1; i <= most; i++) IS(shift(kv, 0, (int32_t)(99 + 2 * i), 1), MF_OK);
        CHECK(pos_of(kv, 0, most) == 100 + 2 * most, "row at %u", pos_of(kv, 0, most));
        REFUSED(kv, shift(kv, 0, (int32_t)(101 + 2 * most), 1), MF_KV_GAPS);
        IS(shift(kv, 0, (int32_t)(100 + 2 * most), 1), MF_OK);  // a gap that grows is no other one
        IS(append(kv, 0, 1), MF_OK);
        IS(shift(kv, 0, 100, -100), MF_OK);
        IS(rm(kv, 0, 1, 2), MF_OK);  // closes one
        CHECK(pos_of(kv, 0, 1) == 1 && n_spans(kv, 0, 0) == most, "row 1 at %u, %u spans",
              pos_of(kv, 0, 1), n_spans(kv, 0, 0));
        kv_cache_free(kv);
    }
}

static void test_edits_alone(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 8, 60}};
    kv_cache *const kv = make(groups, 2, 2, 50);
    IS(append(kv, 0, 12), MF_OK);
    IS(rm(kv, 0, 3, 5), MF_OK);
    CHECK(work.n_moves == 0 && work.delta == -2 && roped_is(0, 0, 5, 7) && roped_is(1, 1, 5, 7) &&
              work.n_roped == 2,
          "%u moves, %u roped by %d", work.n_moves, work.n_roped, work.delta);
    CHECK(len_of(kv, 0) == 10 && pos_of(kv, 0, 9) == 9 && used(kv, 0) == 10, "len %u",
          len_of(kv, 0));
    for (uint32_t g = 0; g < 2; g++)
        CHECK(span_is(kv, g, 0, 0, 0, 0, 3) && span_is(kv, g, 0, 1, 3, 5, 7), "group %u", g);
    IS(shift(kv, 0, 6, 4), MF_OK);
    CHECK(work.n_moves == 0 && work.delta == 4 && roped_is(0, 0, 8, 4) && work.n_roped == 2,
          "%u moves, %u roped by %d", work.n_moves, work.n_roped, work.delta);
    CHECK(span_is(kv, 0, 0, 1, 3, 5, 3) && span_is(kv, 0, 0, 2, 10, 8, 4), "a gap");
    IS(rm(kv, 0, 7, 9), MF_OK);  // a range without rows
    CHECK(len_of(kv, 0) == 10 && pos_of(kv, 0, 6) == 8 && work.delta == -2, "row 6 at %u",
          pos_of(kv, 0, 6));
    IS(shift(kv, 0, 7, -2), MF_OK);  // the first row at or above it is at 8
    CHECK(pos_of(kv, 0, 6) == 6 && n_spans(kv, 0, 0) == 2, "row 6 at %u, %u spans",
          pos_of(kv, 0, 6), n_spans(kv, 0, 0));
    IS(rm(kv, 0, 0, 3), MF_OK);
    CHECK(span_is(kv, 0, 0, 0, 0, 5, 7) && n_spans(kv, 1, 0) == 1, "%u spans", n_spans(kv, 0, 0));
    IS(rm(kv, 0, 2, 7), MF_OK);
    CHECK(len_of(kv, 0) == 2 && idle() && used(kv, 0) == 2, "len %u", len_of(kv, 0));
    IS(rm(kv, 0, 0, 2), MF_OK);
    CHECK(len_of(kv, 0) == 0 && used(kv, 0) == 0 && used(kv, 1) == 0, "len %u", len_of(kv, 0));
    kv_cache_free(kv);
}

static void test_edits_of_lost_rows(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 5}};
    kv_cache *const kv = make(groups, 2, 1, 2);
    for (int i = 0; i < 10; i++) IS(append(kv, 0, 2), MF_OK);  // the window has rows 15 to 19
    IS(rm(kv, 0, 0, 10), MF_OK);                               // long lost there
    CHECK(len_of(kv, 0) == 10 && live_rows(kv, 1, 0) == 5 && span_is(kv, 1, 0, 0, 5, -1, 5),
          "len %u, %u live", len_of(kv, 0), live_rows(kv, 1, 0));
    IS(rm(kv, 0, 4, 6), MF_OK);  // one lost, one stale
    CHECK(len_of(kv, 0) == 8 && live_rows(kv, 1, 0) == 4, "len %u, %u live", len_of(kv, 0),
          live_rows(kv, 1, 0));
    REFUSED(kv, rm(kv, 0, 5, 7), MF_KV_GONE);
    REFUSED(kv, rm(kv, 0, 6, 8), MF_KV_GONE);  // a trim
    IS(rm(kv, 0, 5, 6), MF_OK);
    REFUSED(kv, rm(kv, 0, 5, 6), MF_KV_GONE);
    IS(shift(kv, 0, 6, 5), MF_OK);  // the window is short now
    IS(append(kv, 0, 2), MF_OK);
    IS(append(kv, 0, 2), MF_OK);
    IS(trim(kv, 0, 4), MF_OK);
    REFUSED(kv, shift(kv, 0, 11, -5), MF_KV_GONE);
    REFUSED(kv, rm(kv, 0, 6, 11), MF_KV_GONE);
    IS(shift(kv, 0, 11, -1), MF_OK);
    kv_cache_free(kv);
}

// An edit acts on the sequence it names: what moves and has other readers is copied first.
static void test_shared_edits(void) {
    kv_cache *const kv = make(&(kv_group_spec){KV_FULL, 0, 22}, 1, 3, 20);
    IS(append(kv, 0, 10), MF_OK);
    IS(share(kv, 1, 0, 8), MF_OK);
    IS(rm(kv, 0, 2, 4), MF_OK);  // rows 4 to 7 are shared, 8 and 9 are not
    CHECK(work.n_moves == 1 && work.moves[0].src == 4 && work.moves[0].n == 4 &&
              work.moves[0].group == 0,
          "%u moves", work.n_moves);
    const int32_t to = work.moves[0].dst;
    CHECK(to >= 10 && work.n_roped == 2 && roped_is(0, 0, to, 4) && roped_is(1, 0, 8, 2) &&
              work.delta == -2,
          "to %d, %u roped", to, work.n_roped);
    CHECK(span_is(kv, 0, 1, 0, 0, 0, 8) && n_spans(kv, 0, 1) == 1 && len_of(kv, 1) == 8,
          "the other sequence changed");
    CHECK(span_is(kv, 0, 0, 0, 0, 0, 2) && span_is(kv, 0, 0, 1, 2, to, 4) &&
              span_is(kv, 0, 0, 2, 6, 8, 2),
          "the edited sequence");
    CHECK(used(kv, 0) == 14 && stats_of(kv, 0).n_shared == 2 && stats_of(kv, 0).generation == 1,
          "%u used, %u shared", used(kv, 0), stats_of(kv, 0).n_shared);
    IS(kv_cache_free_seq(kv, 0), MF_OK);
    IS(share(kv, 0, 1, 8), MF_OK);
    IS(append(kv, 2, 7), MF_OK);
    REFUSED(kv, shift(kv, 0, 0, 1), MF_KV_FULL);  // 7 of 8
    REFUSED(kv, shift(kv, 1, 0, 1), MF_KV_FULL);
    IS(shift(kv, 1, 1, 1), MF_OK);
    CHECK(used(kv, 0) == 22 && stats_of(kv, 0).n_shared == 1 && span_is(kv, 0, 0, 0, 0, 0, 8),
          "%u used", used(kv, 0));
    IS(shift(kv, 1, 2, 1), MF_OK);  // private now
    CHECK(work.n_moves == 0 && stats_of(kv, 0).generation == 2, "%u moves", work.n_moves);
    kv_cache_free(kv);

    // Copies that do not fit into one hole.
    kv_cache *const holes = make(&(kv_group_spec){KV_FULL, 0, 20}, 1, 12, 20);
    IS(append(holes, 0, 6), MF_OK);
    for (int32_t s = 1; s < 8; s++) IS(append(holes, s, 2), MF_OK);
    for (int32_t s = 1; s < 8; s++) IS(trim(holes, s, 1), MF_OK);
    IS(share(holes, 8, 0, 6), MF_OK);
    IS(shift(holes, 8, 0, 7), MF_OK);
    uint32_t copied = 0;
    for (uint32_t i = 0; i < work.n_moves; i++) {
        CHECK(work.moves[i].src == (int32_t)copied, "move %u from %d", i, work.moves[i].src);
        copied += (uint32_t)work.moves[i].n;
    }
    CHECK(copied == 6 && used(holes, 0) == 19 && stats_of(holes, 0).n_shared == 0 &&
              pos_of(holes, 8, 0) == 7,
          "%u rows copied", copied);
    kv_cache_free(holes);
}

static void test_shared_edits_in_windows(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 40}};
    kv_cache *kv = make(groups, 2, 3, 20);
    IS(append(kv, 0, 10), MF_OK);
    IS(share(kv, 1, 0, 10), MF_OK);
    IS(shift(kv, 0, 5, 1), MF_OK);  // needs rows 7 to 9 now: the shared ones before are let go
    CHECK(used(kv, 0) == 15 && used(kv, 1) == 13 && live_rows(kv, 1, 0) == 3 &&
              live_rows(kv, 1, 1) == 10 && max_trim(kv, 0) == 0,
          "%u and %u used, %u live", used(kv, 0), used(kv, 1), live_rows(kv, 1, 0));
    CHECK(work.n_moves == 2 && work.moves[0].n == 5 && work.moves[1].n == 3 && work.n_roped == 2,
          "%u moves, %u roped", work.n_moves, work.n_roped);
    kv_cache_free(kv);

    // No cell is free: stale rows make room for copies, or leave rows to one sequence.
    kv = make(&(kv_group_spec){KV_SLIDING, 8, 8}, 1, 2, 8);
    IS(append(kv, 0, 8), MF_OK);
    IS(share(kv, 1, 0, 8), MF_OK);
    REFUSED(kv, shift(kv, 0, 6, 1), MF_KV_FULL);  // two copies, and row 0 is all that is stale
    IS(shift(kv, 0, 7, 1), MF_OK);
    CHECK(used(kv, 0) == 8 && live_rows(kv, 0, 0) == 6 && live_rows(kv, 0, 1) == 7,
          "%u used, %u and %u live", used(kv, 0), live_rows(kv, 0, 0), live_rows(kv, 0, 1));
    kv_cache_free(kv);
    kv = make(&(kv_group_spec){KV_SLIDING, 8, 20}, 1, 2, 16);
    IS(append(kv, 0, 16), MF_OK);
    IS(share(kv, 1, 0, 16), MF_OK);
    IS(append(kv, 1, 4), MF_OK);
    kv_evict(kv, 0);  // of sequence 1: rows 0 to 3 are read by 0 only
    IS(rm(kv, 0, 0, 3), MF_OK);
    CHECK(live_rows(kv, 0, 0) == 7 && live_rows(kv, 0, 1) == 12 && used(kv, 0) == 19,
          "%u and %u live, %u used", live_rows(kv, 0, 0), live_rows(kv, 0, 1), used(kv, 0));
    kv_cache_free(kv);
    // The other reader does not need the rows: once it has let go, nothing is left to copy.
    kv = make(&(kv_group_spec){KV_SLIDING, 8, 20}, 1, 2, 12);
    IS(append(kv, 0, 8), MF_OK);
    IS(share(kv, 1, 0, 8), MF_OK);
    IS(append(kv, 1, 12), MF_OK);
    CHECK(used(kv, 0) == 20, "%u used", used(kv, 0));
    IS(shift(kv, 0, 1, 1), MF_OK);
    CHECK(work.n_moves == 0 && live_rows(kv, 0, 1) == 12 && used(kv, 0) == 20,
          "%u moves, %u live, %u used", work.n_moves, live_rows(kv, 0, 1), used(kv, 0));
    kv_cache_free(kv);
}

// ---- memory ----------------------------------------------------------------------------------

static int call(kv_cache *kv, int which) {
    switch (which) {
        case 0:
            return kv_cache_share(kv, 2, 0, 9);
        case 1:
            return kv_cache_reserve(kv, 2, 30);
        case 2:
            return kv_cache_rm(&work, kv, 0, 2, 4);
        case 3:
            return kv_cache_shift(&work, kv, 1, 1, 3);
        default:
            return append_items(kv, (kv_append[]){{1, 3}, {2, 2}}, 2);
    }
}

static void test_memory_failures(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 20}};
    const size_t alive = mem_alive();
    for (int which = 0; which < 5; which++) {
        int status = MF_NOMEM;
        size_t n = 0;
        for (; status; n++) {
            kv_cache *const kv = make(groups, 2, 3, 10);
            IS(append(kv, 0, 10), MF_OK);
            IS(share(kv, 1, 0, 8), MF_OK);
            kv_picture(kv_before, kv);
            mem_fail_after(n);
            status = call(kv, which);
            mem_fail_after(SIZE_MAX);
            kv_picture(kv_after, kv);
            IS(kv_cache_check(kv), MF_OK);
            CHECK(status == MF_OK || status == MF_NOMEM, "%d", status);
            CHECK(!status == !!strcmp(kv_before, kv_after), "call %d, allocation %zu: %d\n%s",
                  which, n, status, kv_after);
            kv_cache_free(kv);
        }
        CHECK(n > 1, "call %d allocates nothing: the test shows nothing", which);
    }
    kv_cache *const kv = make(groups, 2, 3, 10);
    IS(append(kv, 0, 10), MF_OK);
    IS(share(kv, 1, 0, 8), MF_OK);
    for (size_t n = 0; n < 4; n++) {  // the check asks for memory too
        mem_fail_after(n);
        IS(kv_cache_check(kv), MF_NOMEM);
        mem_fail_after(SIZE_MAX);
    }
    kv_cache_free(kv);
    CHECK(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
}

// ---- the check itself ------------------------------------------------------------------------

// kv_cache_check finds what no call leaves behind.
static void test_check(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 20}};
    kv_cache *const kv = make(groups, 2, 3, 10);
    IS(append(kv, 0, 10), MF_OK);
    IS(share(kv, 1, 0, 8), MF_OK);
    IS(reserve(kv, 2, 5), MF_OK);
    IS(append(kv, 2, 1), MF_OK);
    IS(kv_cache_check(kv), MF_OK);
    kv_cells *const cells = &kv->groups[0].cells;
    kv_part *const part = &kv->seqs[2].parts[0];
#define BROKEN(change, undo)                 \
    do {                                     \
        change;                              \
        IS(kv_cache_check(kv), MF_INTERNAL); \
        undo;                                \
        IS(kv_cache_check(kv), MF_OK);       \
    } while (0)
    BROKEN(cells->n_shared++, cells->n_shared--);
    BROKEN(cells->n_free_runs++, cells->n_free_runs--);
    BROKEN(cells->n_extents++, cells->n_extents--);
    BROKEN(cells->n_free++, cells->n_free--);
    BROKEN(kv_cells_read(cells, 3, 1, 1), kv_cells_read(cells, 3, 1, -1));
    BROKEN(part->n_reserved++, part->n_reserved--);
    BROKEN(part->held[part->held_first].len--, part->held[part->held_first].len++);
    BROKEN(kv->groups[1].needed[7] = 1, kv->groups[1].needed[7] = 0);
    // A reservation that somebody reads: its counts agree, but it is not private.
    const kv_hold hold = part->held[part->held_first];
    IS(kv_part_reserve_holds(&kv->seqs[1].parts[0], 1), MF_OK);
    BROKEN(
        (kv_part_hold(&kv->seqs[1].parts[0], hold.cell, 1), kv_cells_read(cells, hold.cell, 1, 1)),
        kv_part_release(&kv->seqs[1].parts[0], cells, 0));
    // Two rows of a shared prefix change places.
    IS(kv_part_reserve(&kv->seqs[1].parts[0], 3), MF_OK);
    mf_kv_span *const moved = &kv->seqs[1].parts[0].memory[kv->seqs[1].parts[0].first];
    const mf_kv_span whole = *moved;
    BROKEN((moved[0] = (mf_kv_span){0, 4, 4}, moved[1] = (mf_kv_span){4, 0, 4},
            kv->seqs[1].parts[0].n_spans = 2),
           (moved[0] = whole, kv->seqs[1].parts[0].n_spans = 1));
    // Their first rows are two, the later ones one and the same.
    const uint32_t own = kv_part_tail(part);
    BROKEN((moved[0] = (mf_kv_span){0, (int32_t)own, 1}, moved[1] = (mf_kv_span){1, 1, 7},
            kv->seqs[1].parts[0].n_spans = 2, kv_cells_read(cells, 0, 1, -1),
            kv_cells_read(cells, own, 1, 1)),
           (moved[0] = whole, kv->seqs[1].parts[0].n_spans = 1, kv_cells_read(cells, 0, 1, 1),
            kv_cells_read(cells, own, 1, -1)));
    // A reservation in a window, and more gaps than a read can carry.
    kv_part *const window = &kv->seqs[2].parts[1];
    const uint32_t cell = kv_part_tail(window);
    IS(kv_part_reserve_holds(window, 1), MF_OK);
    BROKEN((kv_part_hold(window, cell, 1), kv_cells_read(&kv->groups[1].cells, cell, 1, 1)),
           kv_part_release(window, &kv->groups[1].cells, 0));
    IS(shift(kv, 0, 9, 1), MF_OK);
    BROKEN(kv->max_gaps = 0, kv->max_gaps = 62);
    // A needed row is gone: the group's rows agree with its cells.
    kv_forget(kv, 1, 0, 9);
    IS(kv_cache_check(kv), MF_INTERNAL);
    IS(kv_cache_free_seq(kv, 0), MF_OK);
    IS(kv_cache_check(kv), MF_OK);
    kv_forget(kv, 0, 1, 1);  // a full group loses none
    IS(kv_cache_check(kv), MF_INTERNAL);
    kv_cache_free(kv);
}

int main(void) {
    test_edit_refusals();
    test_gap_limit();
    test_edits_alone();
    test_edits_of_lost_rows();
    test_shared_edits();
    test_shared_edits_in_windows();
    test_memory_failures();
    test_check();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
