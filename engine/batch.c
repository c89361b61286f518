// Owns the arrays of one batch, allocated once for the largest. Invariant: after batch_fill_inputs
// every token has a private cell in every group and every run's spans include its own tokens.
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
        group->spans = mem_alloc(max_runs, sizeof *group->spans);
        group->n_spans = mem_alloc(max_runs, sizeof *group->n_spans);
        complete = group->cells && group->spans && group->n_spans;
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
        mem_free(b->groups[g].spans);
        mem_free(b->groups[g].n_spans);
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

int batch_fill_inputs(batch *b, kv_cache *kv) {
    for (uint32_t i = 0; i < b->n_runs; i++)
        b->appends[i] = (kv_append){.seq = b->runs[i].seq, .n = b->runs[i].n_tokens};
    TRY(kv_cache_append(kv, b->appends, b->n_runs));
    for (uint32_t i = 0; i < b->n_runs; i++) {
        batch_run *run = &b->runs[i];
        uint32_t len;
        TRY(kv_cache_len(&len, kv, run->seq));
        const uint32_t row = len - run->n_tokens, t = run->first_token;
        TRY(kv_cache_positions(b->positions + t, kv, run->seq, row, run->n_tokens));
        run->pos0 = b->positions[t];
        for (uint32_t g = 0; g < b->n_groups; g++) {
            batch_group *group = &b->groups[g];
            TRY(kv_cache_cells(group->cells + t, kv, g, run->seq, row, run->n_tokens));
            TRY(kv_cache_spans(&group->spans[i], &group->n_spans[i], kv, g, run->seq));
        }
    }
    return MF_OK;
}

void batch_undo(const batch *b, kv_cache *kv) {
    // A batch just appended can always be taken back: nothing that its rows' queries need was
    // evicted for it.
    for (uint32_t i = 0; i < b->n_runs; i++)
        (void)kv_cache_trim(kv, b->runs[i].seq, b->runs[i].n_tokens);
}
