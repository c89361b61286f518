// Compaction: a machine whose memory is an array of ints makes the moves, and every sequence must
// read what it read before. Random stores with shared prefixes, reservations and holes; what defrag
// promises; regroups into as few runs as the forest allows; refusals and failing allocations.
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "counted.h"
#include "error.h"
#include "kv_store.h"

enum { MOST_SEQ = 260, MOST_ROWS = 1024, MOST_CELLS = 1024, GROUPS = 2 };

typedef struct machine {
    kv_cache *kv;
    kv_config config;
    int next;                       // every row ever appended has a number of its own
    int rows[MOST_SEQ][MOST_ROWS];  // what each sequence must read
    uint32_t len[MOST_SEQ];
    int memory[GROUPS][MOST_CELLS + 1];  // what the cells hold; the last one is the scratch row
} machine;

static uint64_t state;

static uint32_t below(uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % n;
}

static machine *start(uint32_t n_seq, uint32_t n_full, uint32_t n_sliding) {
    machine *const m = calloc(1, sizeof *m);
    m->config = (kv_config){.groups = {{KV_FULL, 0, n_full}, {KV_SLIDING, 16, n_sliding}},
                            .n_groups = GROUPS,
                            .n_seq = n_seq,
                            .n_batch = 24,
                            .can_rope = true};
    if (kv_cache_new(&m->kv, &m->config)) abort();
    return m;
}

static void stop(machine *m) {
    kv_cache_free(m->kv);
    free(m);
}

static void execute(machine *m, const mf_kv_move *moves, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        int *const cells = m->memory[moves[i].group];
        memmove(cells + moves[i].dst, cells + moves[i].src, (size_t)moves[i].n * sizeof *cells);
    }
}

// Every invariant, and every live row of every sequence where its spans say.
static bool intact(const machine *m) {
    if (kv_cache_check(m->kv)) {
        printf("%s\n", mf_last_error());
        return false;
    }
    for (uint32_t s = 0; s < m->config.n_seq; s++) {
        for (uint32_t g = 0; g < GROUPS; g++) {
            const mf_kv_span *spans;
            uint32_t n, live = 0;
            kv_cache_spans(&spans, &n, m->kv, g, (int32_t)s);
            for (uint32_t i = 0; i < n; i++) live += (uint32_t)spans[i].len;
            uint32_t row = m->len[s] - live;
            for (uint32_t i = 0; i < n; i++) {
                for (int32_t k = 0; k < spans[i].len; k++, row++) {
                    if (m->memory[g][spans[i].cell + k] != m->rows[s][row]) {
                        printf("sequence %u, group %u, row %u\n", s, g, row);
                        return false;
                    }
                }
            }
        }
    }
    return true;
}

static int append(machine *m, uint32_t s, uint32_t n) {
    kv_work work;
    const kv_append item = {(int32_t)s, n};
    if (n > MOST_ROWS - m->len[s]) return MF_KV_FULL;
    TRY(kv_cache_append(&work, m->kv, &item, 1));
    execute(m, work.moves, work.n_moves);
    for (uint32_t i = 0; i < n; i++) m->rows[s][m->len[s]++] = ++m->next;
    for (uint32_t g = 0; g < GROUPS; g++) {
        int32_t cells[MOST_ROWS];
        TRY(kv_cache_store_cells(cells, m->kv, g, (int32_t)s, m->len[s] - n, n));
        for (uint32_t i = 0; i < n; i++) m->memory[g][cells[i]] = m->rows[s][m->len[s] - n + i];
    }
    return MF_OK;
}

static int share(machine *m, uint32_t dst, uint32_t src, uint32_t n) {
    TRY(kv_cache_share(m->kv, (int32_t)dst, (int32_t)src, n));
    if (n) {
        m->len[dst] = n;
        memcpy(m->rows[dst], m->rows[src], n * sizeof m->rows[dst][0]);
    }
    return MF_OK;
}

static int trim(machine *m, uint32_t s, uint32_t n) {
    TRY(kv_cache_trim(m->kv, (int32_t)s, n));
    m->len[s] -= n;
    return MF_OK;
}

static int cut_out(machine *m, uint32_t s, uint32_t p0, uint32_t p1) {
    static uint32_t pos[MOST_ROWS];
    kv_work work;
    uint32_t kept = 0;
    TRY(kv_cache_positions(pos, m->kv, (int32_t)s, 0, m->len[s]));
    TRY(kv_cache_rm(&work, m->kv, (int32_t)s, (int32_t)p0, (int32_t)p1));
    execute(m, work.moves, work.n_moves);
    for (uint32_t i = 0; i < m->len[s]; i++) {
        if (pos[i] < p0 || pos[i] >= p1) m->rows[s][kept++] = m->rows[s][i];
    }
    m->len[s] = kept;
    return MF_OK;
}

static int shift(machine *m, uint32_t s, uint32_t p0, int32_t delta) {
    kv_work work;
    TRY(kv_cache_shift(&work, m->kv, (int32_t)s, (int32_t)p0, delta));
    execute(m, work.moves, work.n_moves);
    return MF_OK;
}

// ---- what may not change ---------------------------------------------------------------------

// All that can be seen of the store.
typedef struct view {
    mf_kv_span spans[MOST_SEQ * 64];
    uint32_t n;
    kv_stats stats[GROUPS];
} view;

static void look(view *v, const machine *m) {
    memset(v, 0, sizeof *v);
    for (uint32_t g = 0; g < GROUPS; g++) {
        kv_cache_stats(&v->stats[g], m->kv, g);
        for (uint32_t s = 0; s < m->config.n_seq; s++) {
            const mf_kv_span *spans;
            uint32_t n;
            kv_cache_spans(&spans, &n, m->kv, g, (int32_t)s);
            if (v->n + n > sizeof v->spans / sizeof *v->spans) abort();
            if (n) memcpy(v->spans + v->n, spans, n * sizeof *spans);
            v->n += n;
        }
    }
}

static bool unchanged(const view *before, const machine *m) {
    static view now;
    look(&now, m);
    return now.n == before->n && !memcmp(now.spans, before->spans, now.n * sizeof *now.spans) &&
           !memcmp(now.stats, before->stats, sizeof now.stats);
}

// ---- calls -----------------------------------------------------------------------------------

// 1 + floor(log2 n) for n sequences that are not empty
static uint32_t most_spans(const machine *m) {
    uint32_t n = 1, live = 0;
    for (uint32_t s = 0; s < m->config.n_seq; s++)
        live += m->len[s] || m->kv->seqs[s].parts[0].n_reserved;
    for (; live > 1; live /= 2) n++;
    return n;
}

static void check_regrouped(const machine *m, uint32_t g, const char *what) {
    for (uint32_t s = 0; s < m->config.n_seq; s++) {
        const mf_kv_span *spans;
        uint32_t n;
        kv_cache_spans(&spans, &n, m->kv, g, (int32_t)s);
        const uint32_t most = most_spans(m) + m->kv->seqs[s].n_runs;  // one more than the gaps
        CHECK(!n || n < most, "%s: sequence %u in %u spans, %u will do", what, s, n, most - 1);
    }
}

// Lays group g out anew, with every allocation failing once before.
static void regroup(machine *m, uint32_t g) {
    static view before, after;
    kv_work work;
    look(&before, m);
    kv_work_begin(&work, m->kv);
    int status = MF_NOMEM;
    for (size_t k = 0; status && k < 1000; k++) {
        mem_fail_after(k);
        status = kv_regroup_reserve(m->kv, g);
        CHECK(unchanged(&before, m), "regroup, allocation %zu", k);
    }
    mem_fail_after(0);  // none is made from here on
    kv_regroup(m->kv, g);
    mem_fail_after(SIZE_MAX);
    kv_work_end(&work, m->kv);
    execute(m, work.moves, work.n_moves);
    look(&after, m);
    CHECK(after.stats[g].generation == before.stats[g].generation + (work.n_moves > 0),
          "generation %llu after %llu, %u moves", (unsigned long long)after.stats[g].generation,
          (unsigned long long)before.stats[g].generation, work.n_moves);
    CHECK(after.stats[g].n_used == before.stats[g].n_used &&
              after.stats[g].n_shared == before.stats[g].n_shared &&
              after.stats[g].n_reserved == before.stats[g].n_reserved &&
              after.stats[g].n_free_runs <= 1,
          "%u used, %u shared, %u reserved, %u free runs", after.stats[g].n_used,
          after.stats[g].n_shared, after.stats[g].n_reserved, after.stats[g].n_free_runs);
    check_regrouped(m, g, "regroup");
    // A second one has nothing to do.
    kv_work_begin(&work, m->kv);
    CHECK(!kv_regroup_reserve(m->kv, g), "%s", mf_last_error());
    kv_regroup(m->kv, g);
    CHECK(!m->kv->moves.n, "%u moves the second time", m->kv->moves.n);
}

static int defrag_once(machine *m, uint32_t need) {
    kv_work work;
    TRY(kv_cache_defrag(&work, m->kv, need));
    execute(m, work.moves, work.n_moves);
    return MF_OK;
}

static int reserve_once(machine *m, uint32_t s, uint32_t n) {
    kv_work work;
    TRY(kv_cache_reserve_with_defrag(&work, m->kv, (int32_t)s, n));
    execute(m, work.moves, work.n_moves);
    return MF_OK;
}

// The call, with every allocation failing once before. A failure or a refusal changes nothing.
static int defrag(machine *m, uint32_t need) {
    static view before;
    look(&before, m);
    for (size_t k = 0; k < 1000; k++) {
        mem_fail_after(k);
        const int status = defrag_once(m, need);
        mem_fail_after(SIZE_MAX);
        CHECK(!status || unchanged(&before, m), "defrag(%u): status %d", need, status);
        if (status != MF_NOMEM) return status;
    }
    return MF_NOMEM;
}

static int reserve_with_defrag(machine *m, uint32_t s, uint32_t n) {
    static view before;
    look(&before, m);
    for (size_t k = 0; k < 1000; k++) {
        mem_fail_after(k);
        const int status = reserve_once(m, s, n);
        mem_fail_after(SIZE_MAX);
        CHECK(!status || unchanged(&before, m), "reserve(%u, %u): status %d", s, n, status);
        if (status != MF_NOMEM) return status;
    }
    return MF_NOMEM;
}

static bool too_many_spans(const machine *m, uint32_t g) {
    for (uint32_t s = 0; s < m->config.n_seq; s++) {
        const mf_kv_span *spans;
        if (kv_read_spans(&spans, m->kv, g, s, 0) > KV_MAP_MAX_SPANS) return true;
    }
    return false;
}

static void check_defrag(machine *m, uint32_t need) {
    static view before, after;
    look(&before, m);
    const bool tangled[GROUPS] = {too_many_spans(m, 0), too_many_spans(m, 1)};
    const int status = defrag(m, need);
    const uint32_t n_free = m->config.groups[0].n_cells - before.stats[0].n_used;
    // The sliding arena is so large that it never refuses.
    CHECK(status == (need <= n_free ? MF_OK : MF_KV_FULL), "defrag(%u) with %u free: status %d",
          need, n_free, status);
    if (status) return;
    look(&after, m);
    uint32_t n_moves[GROUPS] = {0};
    for (uint32_t i = 0; i < m->kv->moves.n; i++) n_moves[m->kv->moves.at[i].group]++;
    for (uint32_t g = 0; g < GROUPS; g++) {
        CHECK(after.stats[g].generation == before.stats[g].generation + (n_moves[g] > 0),
              "defrag(%u): %u moves in group %u", need, n_moves[g], g);
        const uint32_t n = g ? u32_min(need, m->config.n_batch) : need;
        CHECK(after.stats[g].largest_run >= n, "defrag(%u): %u cells in group %u", need,
              after.stats[g].largest_run, g);
        CHECK(need || after.stats[g].n_free_runs <= 1, "%u free runs", after.stats[g].n_free_runs);
        CHECK(!too_many_spans(m, g), "group %u is still scattered", g);
        if (tangled[g]) check_regrouped(m, g, "defrag");
        CHECK(!need || before.stats[g].largest_run < n || tangled[g] ||
                  after.stats[g].generation == before.stats[g].generation,
              "defrag(%u): group %u moved for nothing", need, g);
    }
}

static void check_reserve(machine *m, uint32_t s, uint32_t n) {
    static view before, after;
    look(&before, m);
    const kv_part *const part = &m->kv->seqs[s].parts[0];
    const uint32_t n_free = m->config.groups[0].n_cells - before.stats[0].n_used + part->n_reserved;
    const int status = reserve_with_defrag(m, s, n);
    CHECK(status == (n <= n_free ? MF_OK : MF_KV_FULL), "reserve of %u with %u free: status %d", n,
          n_free, status);
    if (status) return;
    look(&after, m);
    CHECK(part->n_reserved == n && part->n_held - part->held_first == (n > 0),
          "%u reserved of %u, in %u runs", part->n_reserved, n, part->n_held - part->held_first);
    CHECK(after.stats[1].generation == before.stats[1].generation, "a sliding group moved");
}

// ---- random stores ---------------------------------------------------------------------------

static void step(machine *m) {
    const uint32_t n_seq = m->config.n_seq, s = below(n_seq), t = below(n_seq);
    const uint32_t kind = below(23);
    if (kind < 7) {
        append(m, s, 1 + below(kind < 3 ? 24 : 3));
    } else if (kind < 9) {
        trim(m, s, below(m->len[s] + 1) / (kind == 7 ? 1 : 4));
    } else if (kind < 13) {
        share(m, s, t, m->len[t] - below(m->len[t] + 1) / 2);
    } else if (kind < 15) {
        if (!kv_cache_free_seq(m->kv, (int32_t)s)) m->len[s] = 0;
    } else if (kind < 17) {
        kv_cache_reserve(m->kv, (int32_t)s, below(10));
    } else if (kind < 18) {
        check_reserve(m, s, below(60));
    } else if (kind < 19) {
        check_defrag(m, below(3) ? below(120) : 0);
    } else if (kind < 20) {
        regroup(m, below(GROUPS));
    } else if (m->len[s]) {
        uint32_t end;
        kv_cache_next_pos(&end, m->kv, (int32_t)s);
        const uint32_t p0 = below(end + 1);
        if (kind < 22) {
            cut_out(m, s, p0, p0 + below(end - p0 + 1) / 2);
        } else {
            shift(m, s, p0, (int32_t)below(6) - 2);
        }
    }
}

static void test_random(void) {
    for (uint32_t seed = 0; seed < 120; seed++) {
        state = seed;
        const uint32_t n_seq = 2 + below(9), n_full = 60 + below(200);
        machine *const m = start(n_seq, n_full, n_seq * 32 + 24);
        for (uint32_t i = 0; i < 150; i++) {
            step(m);
            const bool ok = intact(m);
            CHECK(ok, "seed %u, step %u", seed, i);
            if (!ok) break;
        }
        stop(m);
    }
}

// ---- interleaved -----------------------------------------------------------------------------

enum { FILLERS = 240 };

// Some rows of sequence 0, then an arena of single rows, every other one free again: whoever grows
// now lies in pieces.
static machine *sieve(uint32_t n_before) {
    const uint32_t n_sliding = (4 + FILLERS) * 32 + 24;
    machine *const m = start(4 + FILLERS, n_before + FILLERS, u32_min(n_sliding, MOST_CELLS));
    uint32_t at[FILLERS];
    for (uint32_t i = 0; i < n_before; i += 20) CHECK(!append(m, 0, 20), "%s", mf_last_error());
    for (uint32_t i = 0; i < FILLERS; i++) {
        CHECK(!append(m, 4 + i, 1), "%s", mf_last_error());
        const mf_kv_span *spans;
        uint32_t n;
        kv_cache_spans(&spans, &n, m->kv, 0, (int32_t)(4 + i));
        at[i] = (uint32_t)spans[0].cell;
    }
    for (uint32_t i = 0; i < FILLERS; i++) {
        if (at[i] % 2 == 0 && !kv_cache_free_seq(m->kv, (int32_t)(4 + i))) m->len[4 + i] = 0;
    }
    return m;
}

static uint32_t n_spans(const machine *m, uint32_t s) {
    const mf_kv_span *spans;
    uint32_t n;
    kv_cache_spans(&spans, &n, m->kv, 0, (int32_t)s);
    return n;
}

static void test_interleaved(void) {
    machine *const m = sieve(0);
    kv_stats stats;
    for (uint32_t i = 0; i < 55; i++) {
        CHECK(!append(m, 0, 1) && !append(m, 1, 1), "%s", mf_last_error());
    }
    CHECK(n_spans(m, 0) == 55 && n_spans(m, 1) == 55, "%u and %u spans", n_spans(m, 0),
          n_spans(m, 1));
    CHECK(!share(m, 2, 0, 30) && !share(m, 3, 2, 20), "%s", mf_last_error());
    // A slide leaves them as they are: A B A B.
    check_defrag(m, 0);
    CHECK(intact(m) && n_spans(m, 0) == 55, "%u spans", n_spans(m, 0));
    stop(m);

    machine *const r = sieve(0);
    for (uint32_t i = 0; i < 60; i++) {
        CHECK(!append(r, 0, 1) && (i > 50 || !append(r, 1, 1)), "%s", mf_last_error());
    }
    kv_cache_stats(&stats, r->kv, 0);
    CHECK(!stats.compactions && n_spans(r, 0) == 60, "%u spans", n_spans(r, 0));
    for (uint32_t i = 60; i < 66; i++) {
        CHECK(!append(r, 0, 1), "%s", mf_last_error());
        CHECK(intact(r), "row %u", i);
    }
    kv_cache_stats(&stats, r->kv, 0);
    CHECK(stats.compactions == 1 && n_spans(r, 0) <= 3, "%llu compactions, %u spans",
          (unsigned long long)stats.compactions, n_spans(r, 0));
    CHECK(n_spans(r, 1) == 1, "%u spans", n_spans(r, 1));
    stop(r);
}

// Chains of sharing whose rows lie one by one.
static void test_forest(void) {
    machine *const m = sieve(0);
    for (uint32_t i = 0; i < 40; i++) CHECK(!append(m, 0, 1), "%s", mf_last_error());
    for (uint32_t s = 1; s < 4; s++) {
        CHECK(!share(m, s, s - 1, 36 - 6 * s), "%s", mf_last_error());
        for (uint32_t i = 0; i < 12; i++) CHECK(!append(m, s, 1), "%s", mf_last_error());
    }
    CHECK(!kv_cache_reserve(m->kv, 2, 9), "%s", mf_last_error());
    CHECK(n_spans(m, 3) > 20, "%u spans", n_spans(m, 3));
    regroup(m, 0);
    CHECK(intact(m), "after a regroup");
    // The owner of a prefix goes, the readers stay.
    if (!kv_cache_free_seq(m->kv, 0)) m->len[0] = 0;
    regroup(m, 0);
    CHECK(intact(m), "after the owner has gone");
    stop(m);
}

// One long sequence that many leave, each with a row of its own, which lies before or behind the
// next rows of the long one: it must stay whole.
static void test_caterpillar(void) {
    for (uint32_t after = 0; after < 2; after++) {
        machine *const m = sieve(0);
        for (uint32_t s = 4; s < 4 + FILLERS; s++) {
            if (m->len[s] && s % 4 && !kv_cache_free_seq(m->kv, (int32_t)s)) m->len[s] = 0;
        }
        for (uint32_t s = 1, next = 4; s < 20; s++, next++) {
            while (m->len[next]) next++;
            CHECK(!append(m, 0, 2) && !share(m, next, 0, m->len[0]), "%s", mf_last_error());
            if (after) CHECK(!append(m, 0, 1), "%s", mf_last_error());
            CHECK(!append(m, next, 1), "%s", mf_last_error());
        }
        CHECK(!append(m, 0, 3), "%s", mf_last_error());
        regroup(m, 0);
        CHECK(intact(m) && n_spans(m, 0) <= 2, "%u spans", n_spans(m, 0));
        stop(m);
    }
}

// A sequence that has lost its oldest rows reads from the middle of another's.
static void test_lost_front(void) {
    machine *const m = start(4, 200, 64);
    CHECK(!append(m, 2, 24) && !append(m, 1, 24), "%s", mf_last_error());
    if (!kv_cache_free_seq(m->kv, 2)) m->len[2] = 0;
    CHECK(!append(m, 1, 16) && !share(m, 0, 1, 30), "%s", mf_last_error());
    kv_forget(m->kv, 1, 1, 24);
    const mf_kv_span *spans;
    uint32_t n;
    kv_cache_spans(&spans, &n, m->kv, 1, 0);
    CHECK(n == 2 && spans[0].cell > spans[1].cell, "%u spans", n);
    regroup(m, 1);
    kv_cache_spans(&spans, &n, m->kv, 1, 0);
    CHECK(intact(m) && n == 1, "%u spans", n);
    kv_cache_spans(&spans, &n, m->kv, 1, 1);
    CHECK(n == 1 && spans[0].pos == 24, "%u spans", n);
    stop(m);
}

// A shift copies rows that others read into whatever cells are free: more pieces than a read can
// carry, which only a regroup puts right.
static void test_tangled(void) {
    machine *const m = sieve(100);
    CHECK(!share(m, 1, 0, 100) && !share(m, 2, 0, 60), "%s", mf_last_error());
    CHECK(!kv_cache_reserve(m->kv, 3, 12), "%s", mf_last_error());
    CHECK(!shift(m, 1, 20, 1), "%s", mf_last_error());
    CHECK(too_many_spans(m, 0) && n_spans(m, 1) > 70, "%u spans", n_spans(m, 1));
    check_defrag(m, 1);
    CHECK(intact(m) && n_spans(m, 1) <= 3, "%u spans", n_spans(m, 1));
    stop(m);
}

// Runs of a reservation become one when what lies between them goes.
static void test_reservation_slides(void) {
    machine *const m = sieve(0);
    CHECK(!kv_cache_reserve(m->kv, 0, 20) && !append(m, 0, 3), "%s", mf_last_error());
    for (uint32_t s = 4; s < 4 + FILLERS; s++) {
        if (s % 8 && !kv_cache_free_seq(m->kv, (int32_t)s)) m->len[s] = 0;
    }
    const kv_part *const part = &m->kv->seqs[0].parts[0];
    const uint32_t n_runs = part->n_held - part->held_first;
    check_defrag(m, 0);
    CHECK(intact(m) && part->n_reserved == 17 && part->n_held - part->held_first < n_runs,
          "%u cells in %u runs, %u before", part->n_reserved, part->n_held - part->held_first,
          n_runs);
    check_reserve(m, 0, 120);
    CHECK(intact(m) && !append(m, 0, 20) && intact(m), "%s", mf_last_error());
    stop(m);
}

static void test_bad_calls(void) {
    machine *const m = start(2, 100, 100);
    static view before;
    append(m, 0, 20);
    append(m, 1, 20);
    look(&before, m);
    kv_work work;
    CHECK(kv_cache_defrag(&work, m->kv, 61) == MF_KV_FULL && !work.n_moves, "%s", mf_last_error());
    CHECK(kv_cache_defrag(&work, m->kv, UINT32_MAX) == MF_KV_FULL, "%s", mf_last_error());
    CHECK(kv_cache_reserve_with_defrag(&work, m->kv, 2, 1) == MF_ARG, "%s", mf_last_error());
    CHECK(kv_cache_reserve_with_defrag(&work, m->kv, -1, 1) == MF_ARG, "%s", mf_last_error());
    CHECK(kv_cache_reserve_with_defrag(&work, m->kv, 0, 61) == MF_KV_FULL, "%s", mf_last_error());
    CHECK(kv_cache_reserve_with_defrag(&work, m->kv, 0, UINT32_MAX) == MF_KV_FULL, "%s",
          mf_last_error());
    CHECK(unchanged(&before, m) && intact(m), "a refused call changed something");
    // The moves are the caller's once, and the next call makes its own.
    CHECK(!trim(m, 0, 10), "%s", mf_last_error());
    CHECK(!kv_cache_defrag(&work, m->kv, 0) && work.n_moves > 0, "%s", mf_last_error());
    execute(m, work.moves, work.n_moves);
    mf_kv_move *const moves = kv_cache_take_moves(m->kv);
    CHECK(moves && moves == work.moves && !kv_cache_take_moves(m->kv), "moves %p", (void *)moves);
    mem_free(moves);
    CHECK(!defrag_once(m, 0) && intact(m), "%s", mf_last_error());
    // None to take where the call made none, though one before it did.
    CHECK(!trim(m, 0, 5), "%s", mf_last_error());
    CHECK(!kv_cache_defrag(&work, m->kv, 0) && work.n_moves > 0, "%s", mf_last_error());
    execute(m, work.moves, work.n_moves);
    CHECK(!kv_cache_defrag(&work, m->kv, 0) && !work.n_moves, "%u moves", work.n_moves);
    CHECK(!kv_cache_take_moves(m->kv), "moves to take after a call that made none");
    CHECK(intact(m), "%s", mf_last_error());
    stop(m);
}

int main(void) {
    const size_t alive = mem_alive();
    test_random();
    test_interleaved();
    test_forest();
    test_caterpillar();
    test_lost_front();
    test_tangled();
    test_reservation_slides();
    test_bad_calls();
    CHECK(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
