// Owns the arrays of one batch, allocated once for the largest. Invariant: after batch_fill_inputs
// every token has a private cell in every group and is in the window that it reads, or no token is
// in the cache.
#include "batch.h"

#include <string.h>

#include "alloc.h"
#include "error.h"

int batch_new(batch **out, uint32_t max_tokens, uint32_t max_runs, uint32_t n_groups) {
    batch *b = mem_alloc(1, sizeof *b);
    if (!b) return MF_NOMEM;
    b->max_tokens = max_tokens;
    b->max_runs = max_runs;
    b->n_groups = n_groups;
    b->tokens = mem_alloc(max_tokens, sizeof *b->tokens);
    b->positions = mem_alloc(max_tokens, sizeof *b->positions);
    b->outputs = mem_alloc(max_tokens, sizeof *b->outputs);
    b->runs = mem_alloc(max_runs, sizeof *b->runs);
    b->appends = mem_alloc(max_runs, sizeof *b->appends);
    bool complete = b->tokens && b->positions && b->outputs && b->runs && b->appends;
    for (uint32_t g = 0; g < n_groups && complete; g++) {
        batch_group *group = &b->groups[g];
        group->cells = mem_alloc(max_tokens, sizeof *group->cells);
        kv_window *window = &group->window;
        window->ranges = mem_alloc(max_tokens, sizeof *window->ranges);
        window->spans = mem_alloc(max_runs, sizeof *window->spans);
        window->n_spans = mem_alloc(max_runs, sizeof *window->n_spans);
        complete = group->cells && window->ranges && window->spans && window->n_spans;
    }
    if (!complete) {
        batch_free(b);
        return MF_NOMEM;
    }
    *out = b;
    return MF_OK;
}

void batch_free(batch *b) {
    if (!b) return;
    for (uint32_t g = 0; g < b->n_groups; g++) {
        mem_free(b->groups[g].cells);
        mem_free(b->groups[g].window.ranges);
        mem_free(b->groups[g].window.spans);
        mem_free(b->groups[g].window.n_spans);
    }
    mem_free(b->tokens);
    mem_free(b->positions);
    mem_free(b->outputs);
    mem_free(b->runs);
    mem_free(b->appends);
    mem_free(b);
}

void batch_clear(batch *b) { b->n_tokens = b->n_runs = b->n_outputs = 0; }

void batch_add(batch *b, int32_t seq, const int32_t *tokens, uint32_t n, uint32_t outputs) {
    memcpy(b->tokens + b->n_tokens, tokens, n * sizeof *tokens);
    b->runs[b->n_runs++] = (batch_run){.seq = seq, .first_token = b->n_tokens, .n_tokens = n};
    b->n_tokens += n;
    for (uint32_t i = outputs; i > 0; i--) b->outputs[b->n_outputs++] = b->n_tokens - i;
}

// Every run's rows are in the cache, in cells of their own in every group.
static int resolve(batch *b, const kv_cache *kv, uint32_t modes) {
    for (uint32_t i = 0; i < b->n_runs; i++) {
        batch_run *run = &b->runs[i];
        uint32_t len;
        TRY(kv_cache_len(&len, kv, run->seq));
        const uint32_t row = len - run->n_tokens, t = run->first_token;
        TRY(kv_cache_positions(b->positions + t, kv, run->seq, row, run->n_tokens));
        run->pos0 = b->positions[t];
        for (uint32_t g = 0; g < b->n_groups; g++) {
            batch_group *group = &b->groups[g];
            TRY(kv_cache_store_cells(group->cells + t, kv, g, run->seq, row, run->n_tokens));
        }
    }
    for (uint32_t g = 0; g < b->n_groups; g++)
        TRY(kv_cache_window(&b->groups[g].window, kv, g, b->appends, b->n_runs, modes));
    return MF_OK;
}

int batch_fill_inputs(kv_work *work, batch *b, kv_cache *kv, uint32_t modes) {
    for (uint32_t i = 0; i < b->n_runs; i++)
        b->appends[i] = (kv_append){.seq = b->runs[i].seq, .n = b->runs[i].n_tokens};
    TRY(kv_cache_append(work, kv, b->appends, b->n_runs));
    const int status = resolve(b, kv, modes);
    if (status) batch_undo(b, kv);
    return status;
}

void batch_undo(const batch *b, kv_cache *kv) {
    // A batch just appended can always be taken back: for it only rows were evicted that were stale
    // before. A trim asks for no work, so that of the append stays valid.
    for (uint32_t i = 0; i < b->n_runs; i++)
        (void)kv_cache_trim(kv, b->runs[i].seq, b->runs[i].n_tokens);
}
