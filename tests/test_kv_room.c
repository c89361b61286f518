// Tests of who holds which cells: shares, reservations and lazy windows, with every refusal and the
// state unchanged, and exact acceptance where several windows hold one row.
#include <stdio.h>

#include "../engine/kv_store.h"
#include "kv_test.h"

// ---- sharing ---------------------------------------------------------------------------------

static void test_share_refusals(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 8}};
    kv_cache *const kv = make(groups, 2, 4, 5);
    IS(append(kv, 0, 5), MF_OK);
    IS(append(kv, 0, 5), MF_OK);  // the window keeps rows 2 to 9
    IS(append(kv, 1, 1), MF_OK);  // and now a hunk of 2 less
    static const int32_t bad[] = {-1, 4, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        REFUSED(kv, share(kv, bad[i], 0, 1), MF_ARG);
        REFUSED(kv, share(kv, 2, bad[i], 1), MF_ARG);
    }
    REFUSED(kv, share(kv, 0, 0, 1), MF_ARG);
    REFUSED(kv, share(kv, 2, 2, 0), MF_ARG);
    REFUSED(kv, share(kv, 2, 0, 11), MF_ARG);
    REFUSED(kv, share(kv, 2, 0, UINT32_MAX), MF_ARG);
    REFUSED(kv, share(kv, 2, 3, 1), MF_ARG);
    REFUSED(kv, share(kv, 1, 0, 10), MF_KV_NOT_EMPTY);
    REFUSED(kv, share(kv, 1, 0, 0), MF_KV_NOT_EMPTY);
    REFUSED(kv, share(kv, 1, 0, 11), MF_ARG);
    const uint32_t fewest = 10 - max_trim(kv, 0);
    CHECK(fewest == 7, "max_trim %u", max_trim(kv, 0));
    REFUSED(kv, share(kv, 2, 0, fewest - 1), MF_KV_GONE);
    REFUSED(kv, share(kv, 2, 0, 1), MF_KV_GONE);
    REFUSED(kv, share(kv, 2, 0, 0), MF_OK);
    REFUSED(kv, share(kv, 2, 3, 0), MF_OK);
    const uint32_t before[2] = {used(kv, 0), used(kv, 1)};
    IS(share(kv, 2, 0, fewest), MF_OK);
    CHECK(len_of(kv, 2) == 7 && live_rows(kv, 1, 2) == 3 && max_trim(kv, 2) == 0,
          "len %u, %u live rows, max_trim %u", len_of(kv, 2), live_rows(kv, 1, 2), max_trim(kv, 2));
    CHECK(used(kv, 0) == before[0] && used(kv, 1) == before[1], "a share took cells");
    kv_cache_free(kv);
}

// Cells that a reader holds are nobody's to write: not when their owner is trimmed, freed or
// edited.
static void test_share(void) {
    kv_cache *const kv = make(&FULL_100, 1, 5, 50);
    IS(append(kv, 0, 10), MF_OK);
    IS(share(kv, 1, 0, 10), MF_OK);
    IS(share(kv, 2, 1, 6), MF_OK);  // a chain
    CHECK(span_is(kv, 0, 2, 0, 0, 0, 6) && used(kv, 0) == 10 && stats_of(kv, 0).n_shared == 10,
          "%u used, %u shared", used(kv, 0), stats_of(kv, 0).n_shared);
    IS(trim(kv, 0, 8), MF_OK);
    CHECK(used(kv, 0) == 10 && stats_of(kv, 0).n_shared == 6, "%u used, %u shared", used(kv, 0),
          stats_of(kv, 0).n_shared);
    IS(append(kv, 0, 3), MF_OK);  // cells 2 to 4 are not free
    CHECK(n_spans(kv, 0, 0) == 2 && used(kv, 0) == 13, "%u spans, %u used", n_spans(kv, 0, 0),
          used(kv, 0));
    CHECK(span_is(kv, 0, 1, 0, 0, 0, 10) && span_is(kv, 0, 2, 0, 0, 0, 6), "a reader's rows moved");
    IS(append(kv, 2, 2), MF_OK);
    CHECK(n_spans(kv, 0, 2) == 2, "a reader grew over its owner's rows");
    IS(kv_cache_free_seq(kv, 0), MF_OK);
    IS(kv_cache_free_seq(kv, 1), MF_OK);
    IS(kv_cache_check(kv), MF_OK);
    CHECK(used(kv, 0) == 8 && stats_of(kv, 0).n_shared == 0 && span_is(kv, 0, 2, 0, 0, 0, 6),
          "%u used, %u shared", used(kv, 0), stats_of(kv, 0).n_shared);
    IS(kv_cache_free_seq(kv, 2), MF_OK);
    IS(kv_cache_free_seq(kv, 2), MF_OK);
    CHECK(used(kv, 0) == 0 && stats_of(kv, 0).largest_run == 100, "%u used", used(kv, 0));
    // Gaps and a share that ends inside a run of positions.
    IS(append(kv, 0, 10), MF_OK);
    IS(shift(kv, 0, 4, 3), MF_OK);
    IS(shift(kv, 0, 11, 5), MF_OK);
    IS(share(kv, 1, 0, 7), MF_OK);
    CHECK(len_of(kv, 1) == 7 && pos_of(kv, 1, 6) == 9 && n_spans(kv, 0, 1) == 2, "row 6 at %u",
          pos_of(kv, 1, 6));
    IS(append(kv, 1, 1), MF_OK);
    CHECK(pos_of(kv, 1, 7) == 10, "row 7 at %u", pos_of(kv, 1, 7));
    kv_cache_free(kv);
}

// ---- reservations ----------------------------------------------------------------------------

static void test_reserve(void) {
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 4, 60}};
    kv_cache *const kv = make(groups, 2, 4, 50);
    IS(append(kv, 0, 10), MF_OK);
    REFUSED(kv, reserve(kv, -1, 1), MF_ARG);
    REFUSED(kv, reserve(kv, 4, 0), MF_ARG);
    REFUSED(kv, reserve(kv, 1, 91), MF_KV_FULL);
    REFUSED(kv, reserve(kv, 1, UINT32_MAX), MF_KV_FULL);
    REFUSED(kv, reserve(kv, 1, 0), MF_OK);
    IS(reserve(kv, 1, 70), MF_OK);
    CHECK(used(kv, 0) == 80 && stats_of(kv, 0).n_reserved == 70 && used(kv, 1) == 10 &&
              stats_of(kv, 1).n_reserved == 0,
          "%u and %u used", used(kv, 0), used(kv, 1));
    REFUSED(kv, reserve(kv, 1, 70), MF_OK);
    REFUSED(kv, append(kv, 0, 21), MF_KV_FULL);
    REFUSED(kv, can(kv, 0, 21), MF_KV_FULL);
    REFUSED(kv, reserve(kv, 1, 91), MF_KV_FULL);  // its own cells count, and do not suffice
    REFUSED(kv, reserve(kv, 2, 21), MF_KV_FULL);
    REFUSED(kv, append_items(kv, (kv_append[]){{1, 30}, {0, 20}, {2, 1}}, 3), MF_ARG);
    REFUSED(kv, kv_cache_can_append(kv, (kv_append[]){{1, 71}, {0, 20}}, 2), MF_KV_FULL);
    REFUSED(kv, kv_cache_can_append(kv, (kv_append[]){{1, 70}, {0, 20}}, 2), MF_OK);
    REFUSED(kv, kv_cache_can_append(kv, (kv_append[]){{1, 80}, {0, 10}}, 2), MF_OK);
    IS(append(kv, 0, 20), MF_OK);
    CHECK(used(kv, 0) == 100, "%u used", used(kv, 0));
    REFUSED(kv, append(kv, 0, 1), MF_KV_FULL);
    IS(append(kv, 1, 50), MF_OK);  // no cell is free, but these are its own
    CHECK(stats_of(kv, 0).n_reserved == 20 && used(kv, 0) == 100 && n_spans(kv, 0, 1) == 1,
          "%u reserved, %u spans", stats_of(kv, 0).n_reserved, n_spans(kv, 0, 1));
    IS(trim(kv, 1, 5), MF_OK);  // does not fill the reservation up again
    CHECK(stats_of(kv, 0).n_reserved == 20 && used(kv, 0) == 95, "%u reserved, %u used",
          stats_of(kv, 0).n_reserved, used(kv, 0));
    IS(rm(kv, 1, 0, 5), MF_OK);
    CHECK(stats_of(kv, 0).n_reserved == 20 && used(kv, 0) == 90, "%u reserved, %u used",
          stats_of(kv, 0).n_reserved, used(kv, 0));
    REFUSED(kv, append(kv, 1, 31), MF_KV_FULL);
    IS(append(kv, 1, 30), MF_OK);  // 20 reserved and 10 others
    CHECK(stats_of(kv, 0).n_reserved == 0 && used(kv, 0) == 100, "%u reserved, %u used",
          stats_of(kv, 0).n_reserved, used(kv, 0));
    kv_cache_free(kv);
}

static void test_reservations_live_on(void) {
    kv_cache *const kv = make(&FULL_100, 1, 4, 50);
    IS(reserve(kv, 0, 40), MF_OK);
    IS(reserve(kv, 0, 15), MF_OK);
    IS(reserve(kv, 0, 25), MF_OK);
    CHECK(used(kv, 0) == 25 && stats_of(kv, 0).n_reserved == 25, "%u used", used(kv, 0));
    IS(append(kv, 1, 10), MF_OK);
    IS(share(kv, 0, 1, 10), MF_OK);  // an empty sequence keeps its reservation
    CHECK(used(kv, 0) == 35 && stats_of(kv, 0).n_reserved == 25 && stats_of(kv, 0).n_shared == 10,
          "%u used, %u shared", used(kv, 0), stats_of(kv, 0).n_shared);
    IS(append(kv, 0, 5), MF_OK);
    CHECK(used(kv, 0) == 35 && stats_of(kv, 0).n_reserved == 20, "%u used", used(kv, 0));
    IS(trim(kv, 0, 15), MF_OK);
    CHECK(used(kv, 0) == 30 && stats_of(kv, 0).n_reserved == 20, "%u used", used(kv, 0));
    IS(kv_cache_free_seq(kv, 0), MF_OK);
    CHECK(used(kv, 0) == 10 && stats_of(kv, 0).n_reserved == 0, "%u used", used(kv, 0));
    IS(reserve(kv, 0, 25), MF_OK);
    IS(reserve(kv, 0, 0), MF_OK);
    CHECK(used(kv, 0) == 10 && kv_cache_free_seq(kv, 1) == MF_OK, "%u used", used(kv, 0));

    // A reservation that grows goes on behind its cells.
    IS(reserve(kv, 0, 10), MF_OK);
    IS(append(kv, 2, 1), MF_OK);
    IS(reserve(kv, 0, 20), MF_OK);
    IS(append(kv, 0, 20), MF_OK);
    CHECK(n_spans(kv, 0, 0) == 1, "%u spans", n_spans(kv, 0, 0));
    IS(kv_cache_free_seq(kv, 0), MF_OK);
    IS(kv_cache_free_seq(kv, 2), MF_OK);

    // In holes: the reserved cells are taken in their order, then others.
    for (int32_t s = 1; s < 4; s++) IS(append(kv, s, 10), MF_OK);
    IS(kv_cache_free_seq(kv, 2), MF_OK);
    IS(reserve(kv, 0, 75), MF_OK);
    REFUSED(kv, reserve(kv, 0, 81), MF_KV_FULL);
    IS(append(kv, 0, 50), MF_OK);
    IS(append(kv, 0, 30), MF_OK);
    CHECK(used(kv, 0) == 100 && stats_of(kv, 0).n_reserved == 0 && live_rows(kv, 0, 0) == 80,
          "%u used", used(kv, 0));
    kv_cache_free(kv);

    kv_cache *const window = make(&(kv_group_spec){KV_SLIDING, 4, 20}, 1, 2, 5);
    REFUSED(window, reserve(window, 0, UINT32_MAX), MF_OK);  // there is no full group
    REFUSED(window, reserve(window, 2, 1), MF_ARG);
    kv_cache_free(window);
}

// ---- lazy windows ----------------------------------------------------------------------------

static void test_eviction_policy(void) {
    kv_cache *const kv = make(&(kv_group_spec){KV_SLIDING, 8, 100}, 1, 3, 50);
    IS(append(kv, 0, 20), MF_OK);
    IS(append(kv, 1, 20), MF_OK);
    IS(append(kv, 2, 10), MF_OK);
    static const uint32_t stale[3] = {13, 13, 3};
    for (uint32_t s = 0; s < 3; s++) {
        CHECK(kv_stale(kv, 0, s) == stale[s], "sequence %u: %u stale", s, kv_stale(kv, 0, s));
    }
    CHECK(stats_of(kv, 0).n_stale == 29 && kv_freeable(kv, 0) == 29, "%llu stale",
          (unsigned long long)stats_of(kv, 0).n_stale);
    // The one with most gives up a hunk of half a window; of equals the lowest.
    static const uint32_t victim[] = {0, 1, 0, 1, 0, 1, 2, 0, 1};
    static const uint32_t hunk[] = {4, 4, 4, 4, 4, 4, 3, 1, 1};
    for (uint32_t i = 0; i < 9; i++) {
        const uint32_t before = kv_stale(kv, 0, victim[i]), n_free = kv->groups[0].cells.n_free;
        kv_evict(kv, 0);
        const uint32_t gone = before - kv_stale(kv, 0, victim[i]);
        CHECK(gone == hunk[i] && kv->groups[0].cells.n_free == n_free + gone,
              "eviction %u: %u rows of sequence %u", i, gone, victim[i]);
        IS(kv_cache_check(kv), MF_OK);
    }
    CHECK(kv_freeable(kv, 0) == 0 && used(kv, 0) == 21, "%u used", used(kv, 0));
    kv_cache_free(kv);
    static const uint32_t windows[] = {1, 2, 3, 8, 128, 200}, hunks[] = {1, 1, 1, 4, 64, 64};
    for (int i = 0; i < 6; i++) {
        kv_cache *const one = make(&(kv_group_spec){KV_SLIDING, windows[i], 900}, 1, 1, 500);
        IS(append(one, 0, 500), MF_OK);
        kv_evict(one, 0);
        CHECK(live_rows(one, 0, 0) == 500 - hunks[i], "window %u: %u rows left", windows[i],
              live_rows(one, 0, 0));
        kv_cache_free(one);
    }
}

// Rows that several windows hold: what is needed is the union, and what one lets go of frees
// nothing as long as another keeps it.
static void test_shared_windows(void) {
    kv_cache *kv = make(&(kv_group_spec){KV_SLIDING, 8, 24}, 1, 3, 20);
    IS(append(kv, 0, 20), MF_OK);
    IS(share(kv, 1, 0, 12), MF_OK);
    CHECK(kv_stale(kv, 0, 0) == 13 && kv_stale(kv, 0, 1) == 5, "%u and %u stale",
          kv_stale(kv, 0, 0), kv_stale(kv, 0, 1));
    CHECK(kv_freeable(kv, 0) == 6, "%u freeable", kv_freeable(kv, 0));  // not rows 5-11, 13-19
    REFUSED(kv, append(kv, 2, 11), MF_KV_FULL);
    REFUSED(kv, can(kv, 2, 11), MF_KV_FULL);
    REFUSED(kv, can(kv, 2, 10), MF_OK);
    IS(append(kv, 2, 10), MF_OK);
    CHECK(live_rows(kv, 0, 0) == 7 && live_rows(kv, 0, 1) == 7 && used(kv, 0) == 24,
          "%u and %u live, %u used", live_rows(kv, 0, 0), live_rows(kv, 0, 1), used(kv, 0));
    kv_cache_free(kv);

    kv = make(&(kv_group_spec){KV_SLIDING, 8, 24}, 1, 2, 20);
    IS(append(kv, 0, 20), MF_OK);
    IS(share(kv, 1, 0, 20), MF_OK);
    kv_evict(kv, 0);
    CHECK(used(kv, 0) == 20 && live_rows(kv, 0, 0) == 16, "%u used", used(kv, 0));
    kv_evict(kv, 0);
    CHECK(used(kv, 0) == 16 && live_rows(kv, 0, 1) == 16, "%u used", used(kv, 0));
    REFUSED(kv, append(kv, 0, 18), MF_KV_FULL);
    IS(append(kv, 0, 17), MF_OK);
    CHECK(used(kv, 0) == 24 && live_rows(kv, 0, 1) == 7, "%u used", used(kv, 0));
    kv_cache_free(kv);

    // Batch by batch: a window that two sequences share is counted once, until one has left it.
    static const struct {
        uint32_t n[2];
        int status;
    } plans[] = {{{4, 0}, MF_OK},       {{10, 0}, MF_OK},      {{11, 0}, MF_OK},
                 {{14, 0}, MF_OK},      {{15, 0}, MF_KV_FULL}, {{24, 0}, MF_KV_FULL},
                 {{10, 4}, MF_OK},      {{10, 5}, MF_KV_FULL}, {{3, 7}, MF_OK},
                 {{3, 12}, MF_KV_FULL}, {{5, 12}, MF_KV_FULL}, {{6, 9}, MF_OK},
                 {{6, 10}, MF_KV_FULL}};
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        kv = make(&(kv_group_spec){KV_SLIDING, 8, 18}, 1, 2, 10);
        IS(append(kv, 0, 10), MF_OK);
        IS(share(kv, 1, 0, 10), MF_OK);
        kv_append items[2] = {{0, plans[i].n[0]}, {1, plans[i].n[1]}};
        const uint32_t n_items = items[1].n ? 2 : 1;
        REFUSED(kv, kv_cache_can_append(kv, items, n_items), plans[i].status);
        int status = MF_OK;
        while (!status && (items[0].n || items[1].n)) {  // the batches themselves
            kv_append batch[2];
            uint32_t n = 0, room = 10;
            for (int k = 0; k < 2; k++) {
                const uint32_t take = u32_min(items[k].n, room);
                if (take) batch[n++] = (kv_append){k, take};
                items[k].n -= take;
                room -= take;
            }
            status = append_items(kv, batch, n);
            IS(kv_cache_check(kv), MF_OK);
        }
        CHECK(status == plans[i].status, "plan %zu: %d", i, status);
        kv_cache_free(kv);
    }

    // A full group decides for a window only if it has no more cells.
    const kv_group_spec groups[] = {FULL_100, {KV_SLIDING, 8, 18}};
    kv = make(groups, 2, 2, 10);
    IS(append(kv, 0, 10), MF_OK);
    IS(append(kv, 1, 5), MF_OK);
    REFUSED(kv, kv_cache_can_append(kv, (kv_append[]){{0, 10}, {1, 10}}, 2), MF_KV_FULL);
    kv_cache_free(kv);
}

int main(void) {
    test_share_refusals();
    test_share();
    test_reserve();
    test_reservations_live_on();
    test_eviction_policy();
    test_shared_windows();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
