// The three ways to find a batch's rows, seen from an engine: all give the same bits, a way that is
// not true is refused and changes nothing, a window that changes its mode rebuilds no graph twice,
// and a group that a forward has to regroup answers as before.
#define _DEFAULT_SOURCE
#include <string.h>

#include "../engine/engine.h"
#include "model_test.h"

enum {
    VOCAB = 40,
    MAX_TOKENS = 400,
    CAUSAL = 1 << KV_WINDOW_CAUSAL,
    RANGE = 1 << KV_WINDOW_RANGE,
    RUNS = 1 << KV_WINDOW_RUNS
};

static int32_t tokens[MAX_TOKENS];
static float plain[MAX_TOKENS][VOCAB];  // the logits behind each token of a sequence alone
static uint32_t stride;                 // sequence s has the tokens from s * stride on

static mf_engine_options options(uint32_t n_ctx, uint32_t n_seq, uint32_t n_batch) {
    return (mf_engine_options){.size = sizeof(mf_engine_options),
                               .n_ctx = n_ctx,
                               .n_seq = n_seq,
                               .n_batch = n_batch,
                               .n_threads = 2};
}

static mf_engine *start(mf_model *model, uint32_t n_ctx, uint32_t n_seq, uint32_t n_batch) {
    const mf_engine_options o = options(n_ctx, n_seq, n_batch);
    return must_start(model, &o);
}

static uint32_t length(mf_engine *e, int32_t seq) {
    uint32_t n = UINT32_MAX;
    check(!mf_kv_len(&n, e, seq), "mf_kv_len");
    return n;
}

// What the n tokens from `first` on have for logits in a sequence alone, in cells one after the
// other.
static void run_alone(float *out, mf_model *model, uint32_t first, uint32_t n) {
    mf_engine *e = start(model, MAX_TOKENS, 1, MAX_TOKENS);
    e->window_modes = RUNS;
    const mf_chunk all = {.logits = MF_LOGITS_ALL, .tokens = tokens + first, .n_tokens = n};
    check(!mf_engine_forward(out, (size_t)n * VOCAB, e, &all, 1), "%u tokens", n);
    mf_engine_free(e);
}

static void check_logits(mf_engine *e, const float *out, int32_t seq, uint32_t first, uint32_t n) {
    static float others[MAX_TOKENS][VOCAB];
    if (stride) run_alone(others[0], e->m, (uint32_t)seq * stride, first + n);
    check(!memcmp(out, stride ? others[first] : plain[first], n * sizeof *plain),
          "sequence %d: other logits behind tokens %u to %u", seq, first, first + n - 1);
}

// Appends the next n tokens of each of the sequences; their logits must be the plain ones.
static int forward(mf_engine *e, const int32_t *seqs, const uint32_t *n, uint32_t n_seqs) {
    static float out[MAX_TOKENS][VOCAB];
    mf_chunk chunks[8];
    uint32_t rows = 0, first[8];
    for (uint32_t i = 0; i < n_seqs; i++) {
        first[i] = length(e, seqs[i]);
        chunks[i] = (mf_chunk){.seq = seqs[i],
                               .logits = MF_LOGITS_ALL,
                               .tokens = tokens + (uint32_t)seqs[i] * stride + first[i],
                               .n_tokens = n[i]};
        rows += n[i];
    }
    const int status = mf_engine_forward(out[0], (size_t)rows * VOCAB, e, chunks, n_seqs);
    for (uint32_t i = 0, row = 0; i < n_seqs && !status; row += n[i++])
        check_logits(e, out[row], seqs[i], first[i], n[i]);
    return status;
}

static int feed(mf_engine *e, const int32_t *seqs, const uint32_t *n, uint32_t n_seqs) {
    const int status = forward(e, seqs, n, n_seqs);
    check(!mf_kv_check(e), "mf_kv_check");
    return status;
}

static int feed_one(mf_engine *e, int32_t seq, uint32_t n) { return feed(e, &seq, &n, 1); }

static mf_stats stats_of(mf_engine *e) {
    mf_stats s = {.size = sizeof s};
    check(!mf_engine_stats(&s, e), "mf_engine_stats");
    return s;
}

// ---- modes -------------------------------------------------------------------------------------

// One step in the given modes alone; where none is true, nothing may change, and all modes do.
static void step(mf_engine *e, uint32_t modes, uint32_t *n_refused, const int32_t *seqs,
                 const uint32_t *n, uint32_t n_seqs) {
    uint32_t before[8];
    for (uint32_t i = 0; i < n_seqs; i++) before[i] = length(e, seqs[i]);
    e->window_modes = modes;
    int status = feed(e, seqs, n, n_seqs);
    if (status == MF_KV_SPANS) {
        check(is_one_line(mf_last_error()) && strstr(mf_last_error(), "KV group"), "words: %s",
              mf_last_error());
        for (uint32_t i = 0; i < n_seqs; i++)
            check(length(e, seqs[i]) == before[i], "a refused forward left rows");
        ++*n_refused;
        e->window_modes = KV_WINDOW_ALL;
        status = feed(e, seqs, n, n_seqs);
    }
    check(!status, "a forward in modes %u: %d", modes, status);
}

// Every node of attention is told the mode that its group is read in.
static void check_graphs(const mf_engine *e) {
    for (uint32_t i = 0; i < e->n_graphs; i++) {
        const graph *g = e->graphs[i];
        uint32_t n_attn = 0;
        for (uint32_t k = 0; k < g->n_nodes; k++) {
            const graph_node *node = &g->nodes[k];
            if (node->op != OP_ATTN) continue;
            n_attn++;
            check(node->kind == g->params.window_modes[e->layer_group[node->layer]],
                  "graph %u, layer %d: mode %u", i, node->layer, node->kind);
        }
        check(n_attn > 0, "a graph without attention");
        for (uint32_t k = e->n_groups; k < KV_MAX_GROUPS; k++)
            check(!g->params.window_modes[k], "graph %u: a mode of no group", i);
    }
}

static void check_refused(uint32_t n_refused, uint32_t n_steps, uint32_t modes) {
    const bool right =
        modes & RUNS ? n_refused == 0 : n_refused > n_steps / 10 && n_refused < n_steps - 1;
    check(right, "modes %u: %u of %u steps refused", modes, n_refused, n_steps);
}

// A sequence alone, from its first token to beyond two turns of its window's arena.
static void test_alone(mf_model *model, uint32_t modes) {
    mf_engine *e = start(model, 128, 1, 8);  // the window's arena has 2 * 8 + 8 cells
    uint32_t refused = 0, steps = 0;
    const int32_t seq = 0;
    for (uint32_t done = 0, n; done < 110; done += n) {
        n = done < 20 ? 5 : done > 60 && done < 75 ? 3 : 1;
        step(e, modes, &refused, &seq, &n, 1);
        steps++;
    }
    check_refused(refused, steps, modes);
    check_graphs(e);
    mf_engine_free(e);
}

// Sequences that take turns, in batches of one, two and all of them; a window of one of them
// reaches over the others' cells.
static void test_together(mf_model *model, uint32_t modes) {
    mf_engine *e = start(model, 256, 3, 16);
    uint32_t refused = 0;
    for (uint32_t i = 0; i < 70; i++) {
        const int32_t seqs[] = {(int32_t)(i % 3), (int32_t)((i + 1) % 3), (int32_t)((i + 2) % 3)};
        const uint32_t n[] = {i % 7 == 0 ? 6 : 1, 1, i % 11 == 0 ? 4 : 1};
        step(e, modes, &refused, seqs, n, 1 + i % 3);
        if (i == 40) check(!mf_kv_free(e, 1) && !mf_kv_share(e, 1, 0, length(e, 0)), "mf_kv_share");
        if (i % 17 == 16) check(!mf_kv_trim(e, 2, 3), "mf_kv_trim");
    }
    check_refused(refused, 70, modes);
    check_graphs(e);
    mf_engine_free(e);
}

// In the middle of a forward of several batches: the earlier ones stay.
static void test_refused_half_way(mf_model *model) {
    mf_engine *e = start(model, 128, 1, 8);
    e->window_modes = CAUSAL;
    check(feed_one(e, 0, 60) == MF_KV_SPANS, "60 rows in a causal arena of 24");
    const uint32_t len = length(e, 0);
    check(len == 24, "%u rows are left", len);
    check(feed_one(e, 0, 1) == MF_KV_SPANS && length(e, 0) == len, "one more");
    e->window_modes = KV_WINDOW_ALL;
    check(!feed_one(e, 0, 60), "in all modes");
    mf_engine_free(e);
}

// ---- graphs ------------------------------------------------------------------------------------

static void test_graphs_are_kept(mf_model *model) {
    mf_engine *e = start(model, 256, 1, 8);
    check(!feed_one(e, 0, 20), "a prompt");
    for (uint32_t i = 0; i < 60; i++) check(!feed_one(e, 0, 1), "a token");
    const mf_stats before = stats_of(e);
    const uint64_t asked = mem_asked();
    bool seen[KV_WINDOW_MODES] = {false};
    for (uint32_t i = 0; i < 100; i++) {
        check(!forward(e, (int32_t[]){0}, (uint32_t[]){1}, 1), "a token");
        seen[e->batch->groups[0].window.mode] = true;
    }
    const mf_stats after = stats_of(e);
    check(seen[KV_WINDOW_RANGE] && seen[KV_WINDOW_RUNS], "the window kept its mode");
    check(after.graph_builds == before.graph_builds &&
              after.graph_reuses == before.graph_reuses + 100,
          "100 tokens: %llu graphs built, %llu used again",
          (unsigned long long)(after.graph_builds - before.graph_builds),
          (unsigned long long)(after.graph_reuses - before.graph_reuses));
    check(mem_asked() == asked, "decode steps asked for %llu bytes",
          (unsigned long long)(mem_asked() - asked));
    // A mode new to this size is built once.
    static const uint32_t modes[] = {RUNS, KV_WINDOW_ALL, RUNS, KV_WINDOW_ALL, RUNS};
    for (uint32_t i = 0; i < 5; i++) {
        e->window_modes = modes[i];
        check(!feed_one(e, 0, 1), "a token in modes %u", modes[i]);
        const mf_stats now = stats_of(e);
        check(now.graph_builds - after.graph_builds == 1, "step %u: %llu graphs built", i,
              (unsigned long long)(now.graph_builds - after.graph_builds));
    }
    check(after.kv_seconds > 0 && after.kv_seconds < after.prefill_seconds + after.decode_seconds,
          "%g s for the cache of %g and %g", after.kv_seconds, after.prefill_seconds,
          after.decode_seconds);
    mf_engine_free(e);
}

// More kinds of batches than an engine keeps graphs: decode goes on with its own.
static void test_hot_graph_stays(mf_model *model) {
    mf_engine *e = start(model, MAX_TOKENS, 1, 128);
    static float out[128][VOCAB];
    uint32_t n_batches = 0;
    for (uint32_t mode = KV_WINDOW_MODES; mode-- > 0;) {
        for (uint32_t n = 128; n > 0; n /= 2) {
            for (int32_t logits = MF_LOGITS_NONE; logits <= MF_LOGITS_ALL; logits++) {
                const size_t rows = logits == MF_LOGITS_ALL ? n : (size_t)logits;
                const mf_chunk c = {.logits = logits, .tokens = tokens, .n_tokens = n};
                e->window_modes = 1u << mode;
                check(!mf_engine_forward(out[0], rows * VOCAB, e, &c, 1), "%u tokens", n);
                const uint64_t builds = e->stats.graph_builds;
                e->window_modes = CAUSAL;
                check(!forward(e, (int32_t[]){0}, (uint32_t[]){1}, 1), "a token");
                check(e->stats.graph_builds == builds + !n_batches, "batch %u: decode rebuilt",
                      n_batches);
                check(!mf_kv_free(e, 0), "mf_kv_free");
                n_batches++;
            }
        }
    }
    check(e->n_graphs == ENGINE_MAX_GRAPHS && n_batches > ENGINE_MAX_GRAPHS,
          "%u batches, %u graphs", n_batches, e->n_graphs);
    mf_engine_free(e);
}

// Memory that runs out anywhere in a forward, its graph included, leaves the rows as they were.
static void test_no_memory(mf_model *model) {
    mf_engine *e = start(model, 64, 1, 8);
    check(!feed_one(e, 0, 1), "a token");
    uint32_t n_failures = 0;
    for (size_t after = 0; after < 100; after++) {
        mem_fail_after(after);
        const int status = forward(e, (int32_t[]){0}, (uint32_t[]){7}, 1);
        mem_fail_after(SIZE_MAX);
        if (!status) break;
        n_failures++;
        check(!mf_kv_check(e), "mf_kv_check");
        check(status == MF_NOMEM && length(e, 0) == 1, "allocation %zu: %d, %u rows", after, status,
              length(e, 0));
    }
    check(n_failures > 5, "%u failures", n_failures);
    check(length(e, 0) == 8 && !feed_one(e, 0, 1), "afterwards");
    mf_engine_free(e);
}

// ---- regrouping --------------------------------------------------------------------------------

enum { FRAGMENTS = 160 };

static uint64_t compactions(mf_engine *e, uint32_t group) {
    mf_kv_group g = {.size = sizeof g};
    check(!mf_kv_get_group(&g, e, group), "mf_kv_get_group");
    return g.compactions;
}

// The arenas hold one row of every second sequence, each with a free cell behind it. Returns the
// sequences left.
static uint32_t make_fragments(int32_t left[FRAGMENTS], mf_engine *e) {
    for (int32_t s = 0; s < FRAGMENTS; s++) check(!feed_one(e, s, 1), "sequence %d", s);
    uint32_t n = 0;
    for (int32_t s = 0; s < FRAGMENTS; s++) {
        mf_kv_span span;
        size_t n_spans;
        check(!mf_kv_spans(&n_spans, &span, 1, e, s, 0) && n_spans == 1, "mf_kv_spans");
        if (span.cell % 2) {
            check(!mf_kv_free(e, s), "mf_kv_free");
        } else {
            left[n++] = s;
        }
    }
    return n;
}

static void test_regroup(mf_model *model, bool refused) {
    stride = 1;
    mf_engine *e = start(model, FRAGMENTS, FRAGMENTS, FRAGMENTS);
    static int32_t left[FRAGMENTS];
    const uint32_t n_left = make_fragments(left, e);
    check(n_left == FRAGMENTS / 2, "%u sequences left", n_left);
    const int32_t grown[] = {left[n_left / 2], left[3]};
    const uint32_t n[] = {70, 2};
    const uint64_t before = compactions(e, 1);
    if (refused) {  // two sequences are never causal: the rows are taken back after the moves
        e->window_modes = CAUSAL;
        check(feed(e, grown, n, 2) == MF_KV_SPANS, "two sequences in causal mode");
        check(length(e, grown[0]) == 1 && length(e, grown[1]) == 1, "a refused forward left rows");
        e->window_modes = KV_WINDOW_ALL;
    } else {
        check(!feed(e, grown, n, 2), "70 rows in holes of one cell");
    }
    check(compactions(e, 0) >= 1 && compactions(e, 1) == before + 1, "%llu and %llu compactions",
          (unsigned long long)compactions(e, 0), (unsigned long long)compactions(e, 1));
    for (uint32_t i = 0; i < n_left; i += 7)
        if (length(e, left[i]) == 1)
            check(mf_kv_free(e, left[i + 1]) == MF_OK && !feed_one(e, left[i], 1), "sequence %d",
                  left[i]);
    check(!feed_one(e, grown[0], 3), "the sequence itself");
    mf_engine_free(e);
    stride = 0;
}

int main(void) {
    unsetenv("MINFER_ISA");
    unsetenv("MINFER_CACHE_TYPE");
    const size_t alive = mem_alive();
    uint64_t state = 5;
    for (size_t i = 0; i < MAX_TOKENS; i++) tokens[i] = (int32_t)(model_rand(&state) % VOCAB);
    const gguf_build b = build_model(&two_groups);
    mf_model *model = must_load(&b);
    run_alone(plain[0], model, 0, MAX_TOKENS);
    static const uint32_t modes[] = {KV_WINDOW_ALL, RUNS, RANGE | RUNS, RANGE, CAUSAL};
    for (uint32_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        test_alone(model, modes[i]);
        test_together(model, modes[i]);
    }
    test_refused_half_way(model);
    test_graphs_are_kept(model);
    test_hot_graph_stays(model);
    test_no_memory(model);
    test_regroup(model, false);
    test_regroup(model, true);
    mf_model_free(model);
    check(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
    free(b.bytes);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
