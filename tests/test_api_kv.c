// The KV functions of minfer.h: what each refuses, with which status and which words, and that a
// refusal changes nothing, whatever it ran into: a bad number, a full arena or a failed allocation.
#define _POSIX_C_SOURCE 200809L
#include <limits.h>

#include "api_kv_test.h"

// ---- handles ---------------------------------------------------------------------------------

static mf_kv_move *const untouched = (mf_kv_move *)(uintptr_t)64;  // what a refusal must leave

static void test_null(mf_engine *e) {
    uint32_t n = 7;
    size_t count = 7;
    mf_kv_move *moves = untouched;
    const mf_kv_move move = {.src = 0, .dst = 1, .n = 1};
    REFUSED(MF_ARG, "rows is NULL", mf_kv_len(NULL, e, 0));
    REFUSED(MF_ARG, "pos is NULL", mf_kv_next_pos(NULL, e, 0));
    REFUSED(MF_ARG, "n is NULL", mf_kv_max_trim(NULL, e, 0));
    REFUSED(MF_ARG, "out is NULL", mf_kv_get_group(NULL, e, 0));
    REFUSED(MF_ARG, "group is NULL", mf_kv_layer_group(NULL, e, 0));
    REFUSED(MF_ARG, "n is NULL", mf_kv_spans(NULL, NULL, 0, e, 0, 0));
    KEPT(MF_ARG, "n_moves is NULL", mf_kv_reserve_with_defrag(&moves, NULL, e, 0, 1));
    KEPT(MF_ARG, "moves is NULL", mf_kv_reserve_with_defrag(NULL, &count, e, 0, 1));
    KEPT(MF_ARG, "n_moves is NULL", mf_kv_defrag(&moves, NULL, e, 0));
    KEPT(MF_ARG, "moves is NULL", mf_kv_defrag(NULL, &count, e, 0));
    REFUSED(MF_ARG, "ordered is NULL", mf_kv_order_moves(NULL, &count, &move, 1));
    REFUSED(MF_ARG, "n_ordered is NULL", mf_kv_order_moves(&moves, NULL, &move, 1));
    REFUSED(MF_ARG, "moves is NULL", mf_kv_order_moves(&moves, &count, NULL, 1));
    check(n == 7 && count == 7 && moves == untouched, "a refusal wrote: %u %zu %p", n, count,
          (void *)moves);
    mf_kv_moves_free(NULL);
}

// Every function of an engine, on one that is none.
static void test_no_engine(mf_engine *e, const char *words) {
    uint32_t n = 7;
    size_t count = 7;
    mf_kv_move *moves = untouched;
    mf_kv_group group = {.size = sizeof group};
    REFUSED(MF_ARG, words, mf_kv_len(&n, e, 0));
    REFUSED(MF_ARG, words, mf_kv_next_pos(&n, e, 0));
    REFUSED(MF_ARG, words, mf_kv_trim(e, 0, 0));
    REFUSED(MF_ARG, words, mf_kv_max_trim(&n, e, 0));
    REFUSED(MF_ARG, words, mf_kv_free(e, 0));
    REFUSED(MF_ARG, words, mf_kv_rm(e, 0, 0, 0));
    REFUSED(MF_ARG, words, mf_kv_shift(e, 0, 0, 0));
    REFUSED(MF_ARG, words, mf_kv_share(e, 1, 0, 0));
    REFUSED(MF_ARG, words, mf_kv_reserve(e, 0, 0));
    REFUSED(MF_ARG, words, mf_kv_reserve_with_defrag(&moves, &count, e, 0, 0));
    REFUSED(MF_ARG, words, mf_kv_defrag(&moves, &count, e, 0));
    REFUSED(MF_ARG, words, mf_kv_get_group(&group, e, 0));
    REFUSED(MF_ARG, words, mf_kv_layer_group(&n, e, 0));
    REFUSED(MF_ARG, words, mf_kv_spans(&count, NULL, 0, e, 0, 0));
    REFUSED(MF_ARG, words, mf_kv_check(e));
    check(n == 7 && count == 7 && moves == untouched && !group.n_cells, "a refusal wrote");
}

static void test_unknown(mf_engine *e) {
    static const int32_t wrong[] = {-1, N_SEQ, INT32_MIN, INT32_MAX};
    uint32_t n = 7;
    size_t count = 7;
    mf_kv_move *moves = untouched;
    mf_kv_group group = {.size = sizeof group};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const int32_t s = wrong[i];
        char words[64];
        snprintf(words, sizeof words, "sequence %d; this engine has 0 to 3", s);
        REFUSED(MF_ARG, words, mf_kv_len(&n, e, s));
        REFUSED(MF_ARG, words, mf_kv_next_pos(&n, e, s));
        REFUSED(MF_ARG, words, mf_kv_max_trim(&n, e, s));
        REFUSED(MF_ARG, words, mf_kv_spans(&count, NULL, 0, e, s, 0));
        KEPT(MF_ARG, words, mf_kv_trim(e, s, 0));
        KEPT(MF_ARG, words, mf_kv_free(e, s));
        KEPT(MF_ARG, words, mf_kv_rm(e, s, 0, 0));
        KEPT(MF_ARG, words, mf_kv_shift(e, s, 0, 0));
        KEPT(MF_ARG, words, mf_kv_share(e, s, 0, 1));
        KEPT(MF_ARG, words, mf_kv_share(e, 3, s, 1));
        KEPT(MF_ARG, words, mf_kv_share(e, s, s, 0));
        KEPT(MF_ARG, words, mf_kv_reserve(e, s, 0));
        KEPT(MF_ARG, words, mf_kv_reserve_with_defrag(&moves, &count, e, s, 0));
    }
    REFUSED(MF_ARG, "group 2", mf_kv_get_group(&group, e, 2));
    REFUSED(MF_ARG, "group 4294967295", mf_kv_get_group(&group, e, UINT32_MAX));
    REFUSED(MF_ARG, "layer 3", mf_kv_layer_group(&n, e, 3));
    REFUSED(MF_ARG, "group 2", mf_kv_spans(&count, NULL, 0, e, 1, 2));
    check(n == 7 && count == 7 && moves == untouched && !group.n_cells, "a refusal wrote");
}

// ---- looking ---------------------------------------------------------------------------------

static void test_spans_and_trim(mf_engine *e) {
    size_t count = 7;
    mf_kv_span span[4] = {{-1, -1, -1}};
    KEPT(MF_ARG, "has 16", mf_kv_trim(e, 0, 17));
    KEPT(MF_ARG, "4294967295", mf_kv_trim(e, 0, UINT32_MAX));
    KEPT(MF_ARG, "has 0", mf_kv_trim(e, 3, 1));
    ACCEPTED(mf_kv_spans(&count, NULL, 0, e, 2, 1));
    check(count == 2, "%zu spans of a sequence with one gap", count);
    REFUSED(MF_ARG, "capacity is 1", mf_kv_spans(&count, span, 1, e, 2, 1));
    check(span[0].pos == -1, "a refusal wrote a span");
    ACCEPTED(mf_kv_spans(&count, span, 4, e, 2, 1));
    check(span[0].pos == 0 && span[0].len == 3 && span[1].pos == 8 && span[1].len == 3,
          "spans %d +%d, %d +%d", span[0].pos, span[0].len, span[1].pos, span[1].len);
}

static void test_groups(mf_engine *e) {
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        mf_kv_group group = {.size = sizeof group};
        ACCEPTED(mf_kv_get_group(&group, e, g));
        check(group.n_cells == CTX && group.n_used == 25 && group.n_shared == 10 &&
                  !group.n_reserved && group.n_free_runs >= 1 && group.largest_run <= CTX - 25 &&
                  !group.compactions && group.bytes_per_token && group.n_layers,
              "group %u: %u cells, %u used, %u shared, %u reserved, %u runs", g, group.n_cells,
              group.n_used, group.n_shared, group.n_reserved, group.n_free_runs);
        check((group.n_stale > 0) == (strncmp(group.kind, "sliding", 7) == 0), "%s: %llu stale",
              group.kind, (unsigned long long)group.n_stale);
        check((group.largest_run + group.n_free_runs > CTX - 25) == (group.n_free_runs == 1),
              "%u free runs, the largest of %u", group.n_free_runs, group.largest_run);
    }
}

// ---- numbers ---------------------------------------------------------------------------------

static void test_rm_numbers(mf_engine *e) {
    KEPT(MF_ARG, "-1", mf_kv_rm(e, 0, -1, 3));
    KEPT(MF_ARG, "-1", mf_kv_rm(e, 0, -1, -1));
    KEPT(MF_ARG, "-2147483648", mf_kv_rm(e, 0, INT32_MIN, INT32_MAX));
    KEPT(MF_ARG, "-2147483648", mf_kv_rm(e, 0, 3, INT32_MIN));
    KEPT(MF_ARG, "5", mf_kv_rm(e, 0, 5, 4));
    KEPT(MF_ARG, "17", mf_kv_rm(e, 0, 0, 17));
    KEPT(MF_ARG, "17", mf_kv_rm(e, 0, 17, 17));
    KEPT(MF_ARG, "2147483647", mf_kv_rm(e, 0, 0, INT32_MAX));
    KEPT(MF_ARG, "2147483647", mf_kv_rm(e, 0, INT32_MAX, INT32_MAX));
    KEPT(MF_ARG, "1", mf_kv_rm(e, 3, 0, 1));
    view before, after;
    look(&before, e);
    ACCEPTED(mf_kv_rm(e, 0, 0, 0));
    ACCEPTED(mf_kv_rm(e, 0, 16, 16));
    ACCEPTED(mf_kv_rm(e, 3, 0, 0));
    look(&after, e);
    check(!memcmp(&before, &after, sizeof after), "removing nothing changed something");
}

static void test_shift_numbers(mf_engine *e) {
    KEPT(MF_ARG, "-1", mf_kv_shift(e, 0, -1, 0));
    KEPT(MF_ARG, "17", mf_kv_shift(e, 0, 17, 0));
    KEPT(MF_ARG, "-2147483648", mf_kv_shift(e, 0, INT32_MIN, INT32_MAX));
    KEPT(MF_ARG, "2147483647", mf_kv_shift(e, 0, INT32_MAX, INT32_MIN));
    KEPT(MF_ARG, "1", mf_kv_shift(e, 3, 1, 0));
    KEPT(MF_KV_RANGE, "-1", mf_kv_shift(e, 0, 0, -1));
    KEPT(MF_KV_RANGE, "2147483647", mf_kv_shift(e, 0, 0, INT32_MAX));
    KEPT(MF_KV_RANGE, "-2147483648", mf_kv_shift(e, 0, 0, INT32_MIN));
    KEPT(MF_KV_RANGE, "16777201", mf_kv_shift(e, 0, 0, (1 << 24) - 15));
    KEPT(MF_KV_COLLIDES, "-1", mf_kv_shift(e, 0, 3, -1));
    KEPT(MF_KV_COLLIDES, "-6", mf_kv_shift(e, 2, 8, -6));
    view before, after;
    look(&before, e);
    ACCEPTED(mf_kv_shift(e, 0, 3, 0));
    ACCEPTED(mf_kv_shift(e, 0, 16, INT32_MAX));
    ACCEPTED(mf_kv_shift(e, 0, 16, INT32_MIN));
    ACCEPTED(mf_kv_shift(e, 3, 0, 1));
    look(&after, e);
    check(!memcmp(&before, &after, sizeof after), "shifting nothing changed something");
}

// The largest position there is; nothing can follow it.
static void test_last_position(mf_engine *e) {
    append(e, 3, 2);
    KEPT(MF_KV_RANGE, "16777215", mf_kv_shift(e, 3, 0, (1 << 24) - 1));
    ACCEPTED(mf_kv_shift(e, 3, 0, (1 << 24) - 2));
    uint32_t next = 0;
    check(!mf_kv_next_pos(&next, e, 3) && next == 1 << 24, "next position %u", next);
    const mf_chunk c = {.seq = 3, .tokens = (const int32_t[]){1}, .n_tokens = 1};
    KEPT(MF_KV_RANGE, "16777216", mf_engine_forward(NULL, 0, e, &c, 1));
    ACCEPTED(mf_kv_trim(e, 3, 2));
}

static void test_share_numbers(mf_engine *e) {
    KEPT(MF_ARG, "17", mf_kv_share(e, 3, 0, 17));
    KEPT(MF_ARG, "4294967295", mf_kv_share(e, 3, 0, UINT32_MAX));
    KEPT(MF_ARG, "0", mf_kv_share(e, 0, 0, 4));
    KEPT(MF_ARG, "3", mf_kv_share(e, 3, 3, 0));
    KEPT(MF_KV_NOT_EMPTY, "13", mf_kv_share(e, 1, 0, 4));
    ACCEPTED(mf_kv_share(e, 3, 0, 0));
}

static void test_room_numbers(mf_engine *e) {
    size_t count = 7;
    mf_kv_move *moves = untouched;
    KEPT(MF_KV_FULL, "40", mf_kv_reserve(e, 3, 40));
    KEPT(MF_KV_FULL, "4294967295", mf_kv_reserve(e, 3, UINT32_MAX));
    KEPT(MF_KV_FULL, "40", mf_kv_reserve_with_defrag(&moves, &count, e, 3, 40));
    KEPT(MF_KV_FULL, "4294967295", mf_kv_reserve_with_defrag(&moves, &count, e, 3, UINT32_MAX));
    KEPT(MF_KV_FULL, "40", mf_kv_defrag(&moves, &count, e, 40));
    KEPT(MF_KV_FULL, "4294967295", mf_kv_defrag(&moves, &count, e, UINT32_MAX));
    check(count == 7 && moves == untouched, "a refusal wrote: %zu %p", count, (void *)moves);
}

// ---- moves -----------------------------------------------------------------------------------

static int order(const mf_kv_move *moves, size_t n) {
    mf_kv_move *ordered = untouched;
    size_t count = 7;
    const int status = mf_kv_order_moves(&ordered, &count, moves, n);
    check(!status || (ordered == untouched && count == 7), "a refusal wrote");
    if (!status) mf_kv_moves_free(ordered);
    return status;
}

static void test_order_moves(void) {
    const mf_kv_move bad[] = {{-1, 0, 1, 0},       {0, -1, 1, 0},        {0, 1, 0, 0},
                              {0, 1, -1, 0},       {0, 1, INT32_MAX, 0}, {INT32_MAX, 0, 1, 0},
                              {0, INT32_MIN, 1, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) REFUSED(MF_ARG, "", order(&bad[i], 1));
    REFUSED(MF_ARG, "group -1", order(&(mf_kv_move){0, 1, 1, -1}, 1));
    const mf_kv_move overlap[] = {{0, 8, 4, 0}, {3, 20, 1, 0}};
    const mf_kv_move landing[] = {{0, 8, 4, 0}, {20, 11, 1, 0}};
    const mf_kv_move swap[] = {{0, 1, 1, 0}, {1, 0, 1, 0}};
    REFUSED(MF_KV_OVERLAP, "3", order(overlap, 2));
    REFUSED(MF_KV_OVERLAP, "11", order(landing, 2));
    REFUSED(MF_KV_CYCLE, "", order(swap, 2));

    const mf_kv_move chain[] = {{0, 1, 1, 1}, {1, 2, 1, 1}, {5, 3, 2, 0}};
    mf_kv_move *ordered = NULL;
    size_t n = 0;
    ACCEPTED(mf_kv_order_moves(&ordered, &n, chain, 3));
    check(n == 3 && ordered[0].group == 0 && ordered[1].src == 1 && ordered[2].src == 0,
          "%zu moves, or not in order", n);
    mf_kv_moves_free(ordered);
    ordered = untouched;
    ACCEPTED(mf_kv_order_moves(&ordered, &n, NULL, 0));
    check(!n && !ordered, "%zu moves of none at %p", n, (void *)ordered);
}

// Cells with holes between: row p of sequence 0 lies apart from the others.
static mf_engine *start_scattered(mf_model *model) {
    mf_engine *const e = start(model);
    for (int32_t i = 0; i < 6; i++) {
        append(e, 0, 2);
        append(e, 1, 2);
        append(e, 2, 2);
    }
    ACCEPTED(mf_kv_free(e, 1));
    return e;
}

// The moves returned are the caller's, and tell where every row went.
static void test_moves(mf_model *model) {
    mf_engine *const e = start_scattered(model);
    mf_kv_move *first = NULL, *second = untouched;
    size_t n_first = 0, n_second = 7;
    view before, after;
    look(&before, e);
    ACCEPTED(mf_kv_defrag(&first, &n_first, e, 0));
    look(&after, e);
    check(n_first > 0 && first, "nothing moved");
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        check(after.groups[g].n_free_runs == 1 && after.groups[g].largest_run == CTX - 24,
              "group %u: %u free runs", g, after.groups[g].n_free_runs);
        int32_t cell = before.spans[g][2][before.n_spans[g][2] - 1].cell;  // of the last span
        int32_t last = before.spans[g][2][before.n_spans[g][2] - 1].len - 1 + cell;
        for (size_t i = 0; i < n_first; i++)
            if (first[i].group == (int32_t)g && last >= first[i].src &&
                last < first[i].src + first[i].n)
                last += first[i].dst - first[i].src;
        const mf_kv_span *const now = &after.spans[g][2][after.n_spans[g][2] - 1];
        check(last == now->cell + now->len - 1, "group %u: the last row is said to be in %d", g,
              last);
    }
    ACCEPTED(mf_kv_defrag(&second, &n_second, e, 0));
    check(!second && !n_second, "a compact cache moved: %zu", n_second);

    ACCEPTED(mf_kv_free(e, 0));
    ACCEPTED(mf_kv_reserve_with_defrag(&second, &n_second, e, 3, CTX - 12));
    mf_kv_group full = {.size = sizeof full};
    ACCEPTED(mf_kv_get_group(&full, e, 1));
    check(full.n_reserved == CTX - 12 && full.n_used == CTX, "%u reserved", full.n_reserved);
    KEPT(MF_KV_FULL, "1", mf_kv_reserve(e, 2, 1));
    ACCEPTED(mf_kv_reserve(e, 3, 0));
    ACCEPTED(mf_kv_get_group(&full, e, 1));
    check(!full.n_reserved && full.n_used == 12, "%u still reserved", full.n_reserved);
    mf_engine_free(e);
    check(first[0].n > 0, "the moves are gone with the engine");
    mf_kv_moves_free(first);
    mf_kv_moves_free(second);
}

// ---- memory ----------------------------------------------------------------------------------

static mf_kv_move *made;
static size_t n_made;

static int edit_rm(mf_engine *e) { return mf_kv_rm(e, 0, 4, 7); }
static int edit_shift(mf_engine *e) { return mf_kv_shift(e, 1, 5, 4); }
static int edit_share(mf_engine *e) { return mf_kv_share(e, 3, 0, 13); }
static int edit_reserve(mf_engine *e) { return mf_kv_reserve(e, 3, 20); }
static int edit_room(mf_engine *e) { return mf_kv_reserve_with_defrag(&made, &n_made, e, 3, 20); }
static int edit_defrag(mf_engine *e) { return mf_kv_defrag(&made, &n_made, e, 0); }

// Each allocation of a call fails once: the call is refused and the cache is as it was.
static void test_short_of_memory(mf_model *model, mf_engine *(*begin)(mf_model *),
                                 int (*edit)(mf_engine *), const char *name) {
    const size_t alive = mem_alive();
    mf_engine *const e = begin(model);
    view before, after;
    look(&before, e);
    int status = MF_NOMEM;
    for (size_t n = 0; status && n < 100; n++) {
        made = NULL;
        mem_fail_after(n);
        status = edit(e);
        mem_fail_after(SIZE_MAX);
        look(&after, e);
        if (!status) break;
        check(status == MF_NOMEM && !made, "%s without allocation %zu: status %d", name, n, status);
        check(!memcmp(&before, &after, sizeof after), "%s without allocation %zu", name, n);
    }
    check(!status && memcmp(&before, &after, sizeof after), "%s: status %d", name, status);
    mf_kv_moves_free(made);
    mf_engine_free(e);
    check(mem_alive() == alive, "%s leaves %zu allocations", name, mem_alive() - alive);
}

static void test_order_short_of_memory(void) {
    static const mf_kv_move chain[] = {{0, 2, 1, 0}, {2, 1, 1, 0}, {9, 8, 1, 1}};
    const size_t alive = mem_alive();
    int status = MF_NOMEM;
    size_t n = 0;
    for (; status && n < 100; n++) {
        mem_fail_after(n);
        status = order(chain, 3);
        mem_fail_after(SIZE_MAX);
        check((!status || status == MF_NOMEM) && mem_alive() == alive,
              "without allocation %zu: status %d, %zu left", n, status, mem_alive() - alive);
    }
    check(!status && n > 1, "status %d after %zu tries", status, n);
}

int main(void) {
    unsetenv("MINFER_ISA");
    unsetenv("MINFER_CACHE_TYPE");
    const size_t alive = mem_alive();
    const gguf_build b = build_model(&two_groups);
    mf_model *model = must_load(&b);
    mf_engine *e = start_edited(model);
    static uint64_t closed[64];
    test_null(e);
    test_no_engine(NULL, "engine is NULL");
    test_no_engine((mf_engine *)(void *)closed, "not an open");
    test_unknown(e);
    test_spans_and_trim(e);
    test_groups(e);
    test_rm_numbers(e);
    test_shift_numbers(e);
    test_last_position(e);
    test_share_numbers(e);
    test_room_numbers(e);
    mf_engine_free(e);
    test_order_moves();
    test_order_short_of_memory();
    test_moves(model);
    test_short_of_memory(model, start_edited, edit_rm, "rm");
    test_short_of_memory(model, start_edited, edit_shift, "shift");
    test_short_of_memory(model, start_edited, edit_share, "share");
    test_short_of_memory(model, start_edited, edit_reserve, "reserve");
    test_short_of_memory(model, start_scattered, edit_room, "reserve with defrag");
    test_short_of_memory(model, start_scattered, edit_defrag, "defrag");
    mf_model_free(model);
    check(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
    free(b.bytes);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
