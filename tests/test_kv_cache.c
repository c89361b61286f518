// Tests of the cell store: refusals of append, trim and reading, the limits of the integers,
// placement, regrouping, memory failures; positions with gaps and extents by themselves. Shares,
// reservations and windows are test_kv_room.c's, edits test_kv_edit.c's; that all answers are those
// of the specification, test_kv_model.py's. kv_cache_check runs after every change.
#include <stdio.h>

#include "../engine/alloc.h"
#include "../engine/kv_cells.h"
#include "../engine/kv_seq.h"
#include "kv_test.h"

static void test_new(void) {
    kv_cache *kv = NULL;
    const kv_group_spec many[KV_MAX_GROUPS + 1] = {FULL_100, FULL_100, FULL_100, FULL_100, FULL_100,
                                                   FULL_100, FULL_100, FULL_100, FULL_100};
    IS(new_cache(&kv, many, 0, 1, 1), MF_ARG);
    IS(new_cache(&kv, many, KV_MAX_GROUPS + 1, 1, 1), MF_ARG);
    IS(new_cache(&kv, many, 1, 0, 1), MF_ARG);
    IS(new_cache(&kv, many, 1, (uint32_t)INT32_MAX + 1, 1), MF_ARG);
    IS(new_cache(&kv, many, 1, 1, 0), MF_ARG);
    IS(new_cache(&kv, &(kv_group_spec){KV_SLIDING, 0, 10}, 1, 1, 1), MF_ARG);
    IS(new_cache(&kv, &(kv_group_spec){(kv_kind)7, 1, 10}, 1, 1, 1), MF_ARG);
    IS(new_cache(&kv, &(kv_group_spec){KV_FULL, 0, 0}, 1, 1, 1), MF_ARG);
    IS(new_cache(&kv, &(kv_group_spec){KV_FULL, 0, (uint32_t)INT32_MAX + 1}, 1, 1, 1), MF_ARG);
    IS(new_cache(&kv, (kv_group_spec[]){FULL_100, {KV_SLIDING, 4, 0}}, 2, 1, 1), MF_ARG);
    CHECK(kv == NULL, "a refused call wrote its result");
    kv = make(many, KV_MAX_GROUPS, 2, 5);
    CHECK(kv_cache_n_groups(kv) == KV_MAX_GROUPS, "%u groups", kv_cache_n_groups(kv));
    CHECK(kv_cache_group(kv, 7)->n_cells == 100, "%u cells", kv_cache_group(kv, 7)->n_cells);
    kv_cache_free(kv);
    kv_cache_free(NULL);
}

static void test_append_refusals(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 60}};
    kv_cache *const kv = make(groups, 2, 3, 50);
    REFUSED(kv, append_items(kv, NULL, 0), MF_ARG);
    REFUSED(kv, append(kv, 0, 0), MF_ARG);
    REFUSED(kv, append(kv, -1, 1), MF_ARG);
    REFUSED(kv, append(kv, 3, 1), MF_ARG);
    REFUSED(kv, append(kv, INT32_MAX, 1), MF_ARG);
    REFUSED(kv, append(kv, INT32_MIN, 1), MF_ARG);
    REFUSED(kv, append(kv, 0, 51), MF_ARG);
    REFUSED(kv, append(kv, 0, UINT32_MAX), MF_ARG);
    REFUSED(kv, append_items(kv, (kv_append[]){{0, 1}, {0, 1}}, 2), MF_ARG);
    REFUSED(kv, append_items(kv, (kv_append[]){{0, 26}, {1, 25}}, 2), MF_ARG);
    REFUSED(kv, append_items(kv, (kv_append[]){{0, UINT32_MAX}, {1, UINT32_MAX}}, 2), MF_ARG);
    REFUSED(kv, append_items(kv, (kv_append[]){{0, 1}, {1, 1}, {2, 1}, {3, 1}}, 4), MF_ARG);
    CHECK(used(kv, 0) == 0 && used(kv, 1) == 0, "a refused call used cells");
    IS(append_items(kv, (kv_append[]){{0, 25}, {1, 25}}, 2), MF_OK);
    IS(append(kv, 0, 50), MF_OK);  // the sliding group lets stale rows go
    CHECK(used(kv, 0) == 100 && used(kv, 1) == 60, "%u and %u used", used(kv, 0), used(kv, 1));
    const uint32_t before = live_rows(kv, 1, 0);
    REFUSED(kv, append(kv, 2, 1), MF_KV_FULL);
    REFUSED(kv, kv_cache_can_append(kv, &(kv_append){2, 1}, 1), MF_KV_FULL);
    CHECK(len_of(kv, 2) == 0 && live_rows(kv, 1, 0) == before && used(kv, 1) == 60,
          "the refused append changed the other group");
    IS(kv_cache_free_seq(kv, 1), MF_OK);
    IS(kv_cache_can_append(kv, &(kv_append){2, 25}, 1), MF_OK);
    REFUSED(kv, kv_cache_can_append(kv, &(kv_append){2, 26}, 1), MF_KV_FULL);
    IS(append(kv, 2, 25), MF_OK);
    kv_cache_free(kv);
}

static void test_trim(void) {
    // 6 rows of window 4 need 3: a small arena has dropped all that is stale.
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 5}};
    kv_cache *const kv = make(groups, 2, 2, 2);
    for (int i = 0; i < 10; i++) IS(append(kv, 0, 2), MF_OK);
    const uint32_t rows = live_rows(kv, 1, 0), most = max_trim(kv, 0);
    CHECK(rows == 5 && most == 2, "%u rows, max_trim %u", rows, most);
    REFUSED(kv, trim(kv, 0, 21), MF_ARG);
    REFUSED(kv, trim(kv, 0, UINT32_MAX), MF_ARG);
    REFUSED(kv, trim(kv, -1, 0), MF_ARG);
    REFUSED(kv, trim(kv, 2, 0), MF_ARG);
    REFUSED(kv, trim(kv, 0, 3), MF_KV_GONE);
    REFUSED(kv, trim(kv, 0, 19), MF_KV_GONE);
    CHECK(len_of(kv, 0) == 20 && used(kv, 0) == 20 && live_rows(kv, 1, 0) == 5,
          "a refused trim cut rows");
    IS(trim(kv, 0, 0), MF_OK);
    IS(trim(kv, 0, 2), MF_OK);
    CHECK(len_of(kv, 0) == 18 && used(kv, 0) == 18 && live_rows(kv, 1, 0) == 3 &&
              max_trim(kv, 0) == 0,
          "len %u, %u cells, %u live, max_trim %u", len_of(kv, 0), used(kv, 0), live_rows(kv, 1, 0),
          max_trim(kv, 0));
    IS(trim(kv, 0, 18), MF_OK);  // an empty sequence needs nothing
    CHECK(used(kv, 0) == 0 && used(kv, 1) == 0, "cells left");
    IS(append(kv, 0, 1), MF_OK);
    kv_cache_free(kv);
}

static void test_reading(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 2, 4}};
    kv_cache *const kv = make(groups, 2, 2, 3);
    for (int i = 0; i < 4; i++) IS(append(kv, 1, 3), MF_OK);
    uint32_t pos[12], n = 7;
    int32_t cells[12];
    const mf_kv_span *spans = NULL;
    IS(kv_cache_positions(pos, kv, 1, 0, 12), MF_OK);
    for (uint32_t i = 0; i < 12; i++) CHECK(pos[i] == i, "row %u at position %u", i, pos[i]);
    REFUSED(kv, kv_cache_positions(pos, kv, 1, 0, 13), MF_ARG);
    IS(kv_cache_positions(pos, kv, 1, 12, 0), MF_OK);
    REFUSED(kv, kv_cache_positions(pos, kv, 1, 13, 0), MF_ARG);
    REFUSED(kv, kv_cache_positions(pos, kv, 1, 1, UINT32_MAX), MF_ARG);
    IS(kv_cache_store_cells(cells, kv, 0, 1, 0, 12), MF_OK);
    for (int32_t i = 0; i < 12; i++) CHECK(cells[i] == i, "row %d in cell %d", i, cells[i]);
    const uint32_t live = live_rows(kv, 1, 1);
    IS(kv_cache_store_cells(cells, kv, 1, 1, 12 - live, live), MF_OK);
    REFUSED(kv, kv_cache_store_cells(cells, kv, 1, 1, 11 - live, 1), MF_ARG);  // lost there
    IS(kv_cache_spans(&spans, &n, kv, 1, 1), MF_OK);
    CHECK(spans[0].pos == (int32_t)(12 - live) && spans[0].cell == cells[0],
          "first span {%d %d %d}", spans[0].pos, spans[0].cell, spans[0].len);
    REFUSED(kv, kv_cache_store_cells(cells, kv, 2, 1, 11, 1), MF_ARG);
    IS(kv_cache_spans(&spans, &n, kv, 2, 1), MF_ARG);
    IS(kv_cache_spans(&spans, &n, kv, 0, 2), MF_ARG);
    IS(kv_cache_len(&n, kv, 2), MF_ARG);
    IS(kv_cache_next_pos(&n, kv, -1), MF_ARG);
    IS(kv_cache_max_trim(&n, kv, -1), MF_ARG);
    REFUSED(kv, kv_cache_free_seq(kv, 2), MF_ARG);
    IS(kv_cache_next_pos(&n, kv, 1), MF_OK);
    CHECK(n == 12, "next_pos %u", n);
    IS(kv_cache_next_pos(&n, kv, 0), MF_OK);
    CHECK(n == 0 && n_spans(kv, 0, 0) == 0, "next_pos %u of an empty sequence", n);
    kv_cache_free(kv);
}

// The last legal position, and counts that would wrap.
static void test_limits(void) {
    const kv_group_spec groups[] = {{KV_FULL, 0, KV_POS_MAX + 10},
                                    {KV_SLIDING, UINT32_MAX, KV_POS_MAX + 10}};
    kv_cache *const kv = make(groups, 2, 2, UINT32_MAX);
    IS(append_items(kv, &(kv_append){0, KV_POS_MAX + 1}, 1), MF_KV_RANGE);
    IS(append_items(kv, &(kv_append){0, UINT32_MAX}, 1), MF_KV_RANGE);
    IS(kv_cache_can_append(kv, (kv_append[]){{0, UINT32_MAX}, {1, UINT32_MAX}}, 2), MF_KV_RANGE);
    IS(kv_cache_can_append(kv, (kv_append[]){{0, KV_POS_MAX}, {1, KV_POS_MAX}}, 2), MF_KV_FULL);
    for (uint32_t i = 0; i < 16; i++)
        IS(append_items(kv, &(kv_append){0, KV_POS_MAX / 16}, 1), MF_OK);
    IS(append_items(kv, &(kv_append){0, 1}, 1), MF_KV_RANGE);
    IS(kv_cache_can_append(kv, &(kv_append){0, 1}, 1), MF_KV_RANGE);
    CHECK(len_of(kv, 0) == KV_POS_MAX && max_trim(kv, 0) == KV_POS_MAX, "len %u", len_of(kv, 0));
    IS(append_items(kv, &(kv_append){1, 11}, 1), MF_KV_FULL);
    IS(append_items(kv, &(kv_append){1, 10}, 1), MF_OK);
    IS(kv_cache_trim(kv, 0, 5), MF_OK);
    IS(append_items(kv, (kv_append[]){{0, 5}, {1, 1}}, 2), MF_KV_FULL);
    IS(append_items(kv, &(kv_append){0, 5}, 1), MF_OK);
    uint32_t pos = 0;
    IS(kv_cache_positions(&pos, kv, 0, KV_POS_MAX - 1, 1), MF_OK);
    CHECK(pos == KV_POS_MAX - 1, "position %u", pos);
    IS(kv_cache_check(kv), MF_OK);
    kv_cache_free(kv);

    // Few cells, all positions: 2^24 rows through a window.
    kv_cache *const ring = make(&(kv_group_spec){KV_SLIDING, 200, 200 + (1 << 16)}, 1, 1, 1 << 16);
    for (int i = 0; i < 256; i++) IS(append_items(ring, &(kv_append){0, 1 << 16}, 1), MF_OK);
    IS(append_items(ring, &(kv_append){0, 1}, 1), MF_KV_RANGE);
    IS(kv_cache_check(ring), MF_OK);
    CHECK(max_trim(ring, 0) >= 1 << 16, "max_trim %u: the last batch can be taken back",
          max_trim(ring, 0));
    kv_cache_free(ring);
}

// can_append counts batches, not rows: what one batch pushes out of the window is room for the
// next.
static void test_can_append(void) {
    kv_cache *const kv =
        make(&(kv_group_spec){KV_SLIDING, 4, 8}, 1, 2, 5);  // 3 needed + a batch of 5
    IS(kv_cache_can_append(kv, &(kv_append){0, 1000}, 1), MF_OK);
    IS(kv_cache_can_append(kv, (kv_append[]){{0, 5}, {1, 1}}, 2), MF_OK);
    // Before the third batch 3 + 3 rows are needed, so it may have 2.
    IS(kv_cache_can_append(kv, (kv_append[]){{0, 5}, {1, 7}}, 2), MF_OK);
    REFUSED(kv, kv_cache_can_append(kv, (kv_append[]){{0, 5}, {1, 8}}, 2), MF_KV_FULL);
    REFUSED(kv, kv_cache_can_append(kv, (kv_append[]){{0, 1000}, {1, 1000}}, 2), MF_KV_FULL);
    IS(kv_cache_can_append(kv, (kv_append[]){{0, 5}, {1, 5}}, 2), MF_OK);
    REFUSED(kv, kv_cache_can_append(kv, &(kv_append){0, 0}, 1), MF_ARG);
    CHECK(used(kv, 0) == 0, "can_append took cells");
    IS(append(kv, 1, 3), MF_OK);  // a sequence at its window needs no more cells when it grows
    IS(kv_cache_can_append(kv, (kv_append[]){{0, 1}, {1, 8}}, 2), MF_OK);
    REFUSED(kv, kv_cache_can_append(kv, (kv_append[]){{0, 1}, {1, 9}}, 2), MF_KV_FULL);
    kv_cache_free(kv);
    kv_cache *const huge = make(&(kv_group_spec){KV_SLIDING, 4, 100}, 1, 30, 1);
    kv_append items[30];
    for (int32_t i = 0; i < 30; i++) items[i] = (kv_append){i, KV_POS_MAX};
    IS(kv_cache_can_append(huge, items, 30), MF_OK);  // 5 * 10^8 batches are not walked one by one
    kv_cache_free(huge);
}

// Rows added one by one in turns must not lie in one run each.
static void test_placement(void) {
    kv_cache *const kv = make(&(kv_group_spec){KV_FULL, 0, 2000}, 1, 4, 8);
    for (int i = 0; i < 400; i++) {
        IS(append_items(kv, (kv_append[]){{0, 1}, {1, 1}, {2, 1}, {3, 1}}, 4), MF_OK);
    }
    IS(kv_cache_check(kv), MF_OK);
    uint32_t most = 0;
    for (int32_t s = 0; s < 4; s++) most = u32_max(most, n_spans(kv, 0, s));
    printf("4 interleaved sequences of 400 rows: at most %u spans\n", most);
    CHECK(most <= 10, "%u spans", most);
    kv_cache_free(kv);
    kv_cache *const one = make(&FULL_100, 1, 1, 100);
    for (int i = 0; i < 100; i++) IS(append(one, 0, 1), MF_OK);
    CHECK(n_spans(one, 0, 0) == 1, "%u spans of a sequence alone", n_spans(one, 0, 0));
    REFUSED(one, append(one, 0, 1), MF_KV_FULL);
    kv_cache_free(one);
}

// Holes everywhere: an append fills them all, row by row.
static void test_fragments(void) {
    kv_cache *const kv = make(&FULL_100, 1, 101, 100);
    for (int32_t s = 0; s < 100; s++) IS(append(kv, s, 1), MF_OK);
    for (int32_t s = 0; s < 100; s += 2) IS(kv_cache_free_seq(kv, s), MF_OK);
    IS(kv_cache_check(kv), MF_OK);
    REFUSED(kv, append(kv, 100, 51), MF_KV_FULL);
    IS(append(kv, 100, 50), MF_OK);
    CHECK(live_rows(kv, 0, 100) == 50, "%u rows", live_rows(kv, 0, 100));
    IS(trim(kv, 100, 25), MF_OK);
    CHECK(used(kv, 0) == 75, "%u used", used(kv, 0));
    kv_cache_free(kv);
}

static void test_memory_failures(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 20}};
    const size_t alive = mem_alive();
    kv_cache *kv = NULL;
    size_t n = 0;
    for (int status = MF_NOMEM; status; n++) {
        mem_fail_after(n);
        status = new_cache(&kv, groups, 2, 3, 10);
        mem_fail_after(SIZE_MAX);
        CHECK(status == (kv ? MF_OK : MF_NOMEM), "allocation %zu: %d", n, status);
        if (status) CHECK(mem_alive() == alive, "allocation %zu: %zu left", n, mem_alive() - alive);
    }
    CHECK(n == 9, "%zu allocations", n - 1);
    kv_cache_free(kv);
    for (size_t i = 0; i <= 4; i++) {  // spans of two sequences in two groups
        kv = make(groups, 2, 3, 10);
        mem_fail_after(i);
        const int status = append_items(kv, (kv_append[]){{0, 2}, {2, 3}}, 2);
        mem_fail_after(SIZE_MAX);
        CHECK(status == (i < 4 ? MF_NOMEM : MF_OK), "allocation %zu: %d", i, status);
        if (status) CHECK(len_of(kv, 0) == 0 && used(kv, 0) == 0, "a failed append left rows");
        IS(kv_cache_check(kv), MF_OK);
        if (i < 4) kv_cache_free(kv);
    }
    mem_fail_after(0);
    IS(kv_cache_check(kv), MF_NOMEM);
    mem_fail_after(SIZE_MAX);
    kv_cache_free(kv);
    CHECK(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
}

// Positions with gaps, as an edit of positions will leave them: rows 0-2 at 0-2, 3-4 at 10-11, 5-9
// at 20-24.
static void test_gaps(void) {
    static kv_seq seq = {.len = 10, .n_runs = 3, .runs = {{0, 0}, {3, 10}, {5, 20}}};
    static const uint32_t pos[10] = {0, 1, 2, 10, 11, 20, 21, 22, 23, 24};
    for (uint32_t i = 0; i < 10; i++)
        CHECK(kv_seq_pos(&seq, i) == pos[i], "row %u at %u", i, kv_seq_pos(&seq, i));
    for (uint32_t p = 0; p < 30; p++) {
        uint32_t below = 0;
        while (below < 10 && pos[below] < p) below++;
        CHECK(kv_seq_rows_below(&seq, p) == below, "%u rows below %u", kv_seq_rows_below(&seq, p),
              p);
    }
    for (uint32_t window = 1; window < 30; window++) {
        for (uint32_t rows = 0; rows <= 10; rows++) {
            const uint32_t next = rows ? pos[rows - 1] + 1 : 0;
            uint32_t first = 0;
            while (first < rows && pos[first] + window <= next) first++;
            CHECK(kv_seq_first_needed(&seq, rows, window) == first,
                  "window %u, %u rows: %u, not %u", window, rows,
                  kv_seq_first_needed(&seq, rows, window), first);
        }
        for (uint32_t base = 0; base <= kv_seq_first_needed(&seq, 10, window); base++) {
            uint32_t fewest = 10;  // the smallest count from which on no lost row is needed
            while (fewest &&
                   kv_seq_first_needed(&seq, fewest - 1, window) >= u32_min(base, fewest - 1))
                fewest--;
            CHECK(kv_seq_fewest_rows(&seq, base, window) == fewest,
                  "window %u, base %u: %u, not %u", window, base,
                  kv_seq_fewest_rows(&seq, base, window), fewest);
        }
    }
    kv_seq_push(&seq, 2);
    CHECK(kv_seq_next_pos(&seq, 12) == 27 && kv_seq_pos(&seq, 11) == 26, "next_pos %u",
          kv_seq_next_pos(&seq, 12));
    kv_seq_cut(&seq, 5);
    CHECK(seq.n_runs == 2 && kv_seq_next_pos(&seq, 5) == 12, "next_pos %u",
          kv_seq_next_pos(&seq, 5));
    kv_seq_push(&seq, 1);
    CHECK(seq.n_runs == 2 && kv_seq_pos(&seq, 5) == 12, "row 5 at %u", kv_seq_pos(&seq, 5));
    kv_seq_cut(&seq, 0);
    CHECK(seq.n_runs == 0 && kv_seq_next_pos(&seq, 0) == 0, "%u runs", seq.n_runs);
}

// A row in every second cell: what is appended to one sequence lies in a run for each row, until
// that is more than a read can carry.
static kv_cache *comb(uint32_t n_cells) {
    kv_cache *const kv = make(&(kv_group_spec){KV_FULL, 0, n_cells}, 1, n_cells + 1, n_cells);
    for (uint32_t s = 1; s <= n_cells; s++)
        IS(append_items(kv, &(kv_append){(int32_t)s, 1}, 1), MF_OK);
    for (uint32_t s = 1; s <= n_cells; s++) {
        const mf_kv_span *span;
        uint32_t n;
        IS(kv_cache_spans(&span, &n, kv, 0, (int32_t)s), MF_OK);
        if (span->cell % 2) IS(kv_cache_free_seq(kv, (int32_t)s), MF_OK);
    }
    IS(kv_cache_check(kv), MF_OK);
    return kv;
}

static void test_regroup(void) {
    kv_cache *const kv = comb(200);
    IS(append(kv, 0, KV_MAP_MAX_SPANS), MF_OK);
    CHECK(n_spans(kv, 0, 0) == KV_MAP_MAX_SPANS && work.n_moves == 0, "%u spans, %u moves",
          n_spans(kv, 0, 0), work.n_moves);
    CHECK(stats_of(kv, 0).compactions == 0, "a compaction too early");
    IS(append(kv, 0, 1), MF_OK);
    CHECK(n_spans(kv, 0, 0) == 1 && work.n_moves > 0 && work.n_roped == 0,
          "%u spans, %u moves, %u roped", n_spans(kv, 0, 0), work.n_moves, work.n_roped);
    CHECK(stats_of(kv, 0).compactions == 1 && stats_of(kv, 0).generation == 1, "%u compactions",
          (unsigned)stats_of(kv, 0).compactions);
    IS(append(kv, 0, 1), MF_OK);
    CHECK(work.n_moves == 0, "%u moves of a call that made none", work.n_moves);
    kv_cache_free(kv);
    int status = MF_NOMEM;
    for (size_t n = 0; status; n++) {
        kv_cache *const poor = comb(200);
        kv_picture(kv_before, poor);
        mem_fail_after(n);
        status = append_items(poor, &(kv_append){0, KV_MAP_MAX_SPANS + 1}, 1);
        mem_fail_after(SIZE_MAX);
        kv_picture(kv_after, poor);
        CHECK(status == MF_OK ? n > 1 : status == MF_NOMEM, "allocation %zu: %d", n, status);
        CHECK(!status || !strcmp(kv_before, kv_after), "%s\nbecame\n%s", kv_before, kv_after);
        IS(kv_cache_check(poor), MF_OK);
        kv_cache_free(poor);
    }
}

// Decoding asks for no memory, whether its cells are free, evicted or reserved. (Spans that grow in
// number do, now and then; a sequence alone has few.)
static void test_decode_allocates_nothing(void) {
    const kv_group_spec groups[] = {{KV_FULL, 0, 4000}, {KV_SLIDING, 16, 100}};
    kv_cache *const kv = make(groups, 2, 2, 64);
    IS(kv_cache_reserve(kv, 1, 500), MF_OK);
    for (int i = 0; i < 200; i++) IS(append_items(kv, &(kv_append){1, 1}, 1), MF_OK);
    const uint64_t asked = mem_asked();
    for (int i = 0; i < 900; i++) IS(append_items(kv, &(kv_append){1, 1}, 1), MF_OK);
    CHECK(mem_asked() == asked, "%u bytes asked for", (unsigned)(mem_asked() - asked));
    CHECK(stats_of(kv, 1).compactions == 0, "regrouped");
    IS(kv_cache_check(kv), MF_OK);
    kv_cache_free(kv);
}

// Extents against a count per cell, over several levels of the tree of marks.
static void compare_cells(const kv_cells *cells, const uint32_t *counts) {
    uint32_t n_free = 0, n_shared = 0, runs = 0, largest = 0;
    for (uint32_t c = 0, run = 0; c < cells->n_cells; c++) {
        n_free += counts[c] == 0;
        n_shared += counts[c] > 1;
        run = counts[c] ? 0 : run + 1;
        runs += run == 1;
        largest = u32_max(largest, run);
    }
    CHECK(cells->n_free == n_free && cells->n_shared == n_shared && cells->n_free_runs == runs,
          "%u free, %u shared, %u runs; not %u %u %u", cells->n_free, cells->n_shared,
          cells->n_free_runs, n_free, n_shared, runs);
    CHECK(kv_cells_largest(cells) == largest, "largest run %u, not %u", kv_cells_largest(cells),
          largest);
    bool same = true;
    for (uint32_t c = 0, readers, n; c < cells->n_cells && same; c += 1 + n / 3) {
        n = kv_cells_extent(&readers, cells, c);
        uint32_t naive = 1;
        while (c + naive < cells->n_cells && counts[c + naive] == counts[c]) naive++;
        same = n == naive && readers == counts[c];
        if (!same) printf("cell %u: %u cells of %u\n", c, n, readers);
    }
    CHECK(same, "a wrong extent");
    IS(kv_cells_check(cells, counts), MF_OK);
}

static void test_cells(void) {
    enum { N = 70000 };
    static uint32_t counts[N];
    kv_cells cells;
    IS(kv_cells_new(&cells, N), MF_OK);
    uint64_t state = 12345;
    for (int i = 0; i < 4000; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint32_t first = (uint32_t)(state >> 33) % N;
        const uint32_t n = 1 + (uint32_t)(state >> 20) % u32_min(N - first, i % 7 ? 90 : N);
        uint32_t least = UINT32_MAX;
        for (uint32_t c = first; c < first + n; c++) least = u32_min(least, counts[c]);
        const int32_t delta = least && state >> 63 ? -1 : 1;
        for (uint32_t c = first; c < first + n; c++) counts[c] += (uint32_t)delta;
        kv_cells_read(&cells, first, n, delta);
        if (i < 20 || i % 250 == 0) compare_cells(&cells, counts);
    }
    compare_cells(&cells, counts);
    counts[N / 2]++;
    IS(kv_cells_check(&cells, counts), MF_INTERNAL);
    kv_cells_reset(&cells);
    memset(counts, 0, sizeof counts);
    compare_cells(&cells, counts);
    CHECK(kv_cells_largest(&cells) == N, "largest run %u", kv_cells_largest(&cells));
    kv_cells_free(&cells);
}

int main(void) {
    test_new();
    test_append_refusals();
    test_trim();
    test_reading();
    test_limits();
    test_can_append();
    test_placement();
    test_fragments();
    test_memory_failures();
    test_regroup();
    test_decode_allocates_nothing();
    test_gaps();
    test_cells();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
