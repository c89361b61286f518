// Owns the public face of the KV cache: handles, sequences, groups and pointers are checked here,
// once; positions and counts are judged in the cell store, which knows what they may be. Each call
// runs under the engine's lock.
#include <string.h>

#include "alloc.h"
#include "api_engine.h"
#include "kv_moves.h"

int mf_kv_format_resolve(const char **name, const char *requested, const char *device_name,
                         uint64_t n_params) {
    NOT_NULL(name);
    (void)n_params;  // devices whose choice depends on the model's size read it
    const device *dev = device_find(device_name);
    if (!dev) return MF_ARG;
    kv_format format;
    TRY(kv_format_resolve(&format, requested, "cache_type", dev->name, dev->kv_formats));
    *name = kv_format_name(format);
    return MF_OK;
}

static int check_call(const mf_engine *e, int32_t seq, const char *function) {
    TRY(api_check_engine(e, function));
    return api_check_seq(e, seq, function);
}

// Runs one call under the engine's lock.
#define LOCKED(engine, call)              \
    do {                                  \
        TRY(api_lock(engine));            \
        const int locked_status = (call); \
        api_unlock(engine);               \
        return locked_status;             \
    } while (0)

// ---- sequences -------------------------------------------------------------------------------

int mf_kv_len(uint32_t *rows, mf_engine *engine, int32_t seq) {
    NOT_NULL(rows);
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_len(rows, engine->kv, seq));
}

int mf_kv_next_pos(uint32_t *pos, mf_engine *engine, int32_t seq) {
    NOT_NULL(pos);
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_next_pos(pos, engine->kv, seq));
}

int mf_kv_trim(mf_engine *engine, int32_t seq, uint32_t n) {
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_trim(engine->kv, seq, n));
}

int mf_kv_max_trim(uint32_t *n, mf_engine *engine, int32_t seq) {
    NOT_NULL(n);
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_max_trim(n, engine->kv, seq));
}

int mf_kv_free(mf_engine *engine, int32_t seq) {
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_free_seq(engine->kv, seq));
}

int mf_kv_rm(mf_engine *engine, int32_t seq, int32_t p0, int32_t p1) {
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, engine_kv_rm(engine, seq, p0, p1));
}

int mf_kv_shift(mf_engine *engine, int32_t seq, int32_t p0, int32_t delta) {
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, engine_kv_shift(engine, seq, p0, delta));
}

int mf_kv_share(mf_engine *engine, int32_t dst, int32_t src, uint32_t n) {
    TRY(check_call(engine, dst, __func__));
    TRY(api_check_seq(engine, src, __func__));
    LOCKED(engine, kv_cache_share(engine->kv, dst, src, n));
}

// ---- room ------------------------------------------------------------------------------------

int mf_kv_reserve(mf_engine *engine, int32_t seq, uint32_t n) {
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_reserve(engine->kv, seq, n));
}

int mf_kv_reserve_with_defrag(mf_kv_move **moves, size_t *n_moves, mf_engine *engine, int32_t seq,
                              uint32_t n) {
    NOT_NULL(moves);
    NOT_NULL(n_moves);
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, engine_kv_reserve_with_defrag(moves, n_moves, engine, seq, n));
}

int mf_kv_defrag(mf_kv_move **moves, size_t *n_moves, mf_engine *engine, uint32_t need) {
    NOT_NULL(moves);
    NOT_NULL(n_moves);
    TRY(api_check_engine(engine, __func__));
    LOCKED(engine, engine_kv_defrag(moves, n_moves, engine, need));
}

void mf_kv_moves_free(mf_kv_move *moves) { mem_free(moves); }

int mf_kv_order_moves(mf_kv_move **ordered, size_t *n_ordered, const mf_kv_move *moves, size_t n) {
    NOT_NULL(ordered);
    NOT_NULL(n_ordered);
    if (n) NOT_NULL(moves);
    for (size_t i = 0; i < n; i++)
        if (moves[i].group < 0)
            return fail(MF_ARG, "mf_kv_order_moves: move %zu is of group %d; groups count from 0",
                        i, moves[i].group);
    kv_moves result = {0};
    TRY(kv_moves_order(&result, moves, n, KV_NO_SCRATCH));
    if (!result.n) kv_moves_free(&result);
    *ordered = result.at;
    *n_ordered = result.n;
    return MF_OK;
}

// ---- looking ---------------------------------------------------------------------------------

static int check_group(const mf_engine *e, uint32_t group, const char *function) {
    if (group < e->n_groups) return MF_OK;
    return fail(MF_ARG, "%s: group %u; this model has 0 to %u", function, group, e->n_groups - 1);
}

int mf_kv_get_group(mf_kv_group *out, mf_engine *engine, uint32_t group) {
    NOT_NULL(out);
    TRY(api_check_engine(engine, __func__));
    TRY(check_group(engine, group, __func__));
    TRY(api_lock(engine));
    kv_stats stats;
    const int status = kv_cache_stats(&stats, engine->kv, group);
    api_unlock(engine);
    if (status) return status;
    const mf_kv_group info = {
        .kind = engine->kinds[group],
        .n_layers = engine->group_layers[group],
        .n_cells = kv_cache_group(engine->kv, group)->n_cells,
        .n_used = stats.n_used,
        .bytes_per_token = engine_bytes_per_token(engine, group),
        .n_shared = stats.n_shared,
        .n_stale = stats.n_stale,
        .n_reserved = stats.n_reserved,
        .n_free_runs = stats.n_free_runs,
        .largest_run = stats.largest_run,
        .compactions = stats.compactions,
        .generation = stats.generation,
    };
    return api_fill(out, &info, sizeof info, __func__);
}

int mf_kv_layer_group(uint32_t *group, mf_engine *engine, uint32_t layer) {
    NOT_NULL(group);
    TRY(api_check_engine(engine, __func__));
    if (layer >= engine->m->p.n_layer)
        return fail(MF_ARG, "mf_kv_layer_group: layer %u; this model has %u", layer,
                    engine->m->p.n_layer);
    *group = engine->layer_group[layer];
    return MF_OK;
}

static int copy_spans(size_t *n, mf_kv_span *spans, size_t capacity, const mf_engine *e,
                      int32_t seq, uint32_t group) {
    const mf_kv_span *from;
    uint32_t count;
    TRY(kv_cache_spans(&from, &count, e->kv, group, seq));
    if (spans && capacity < count)
        return fail(MF_ARG, "mf_kv_spans: capacity is %zu; %u spans are there", capacity, count);
    if (spans && count) memcpy(spans, from, count * sizeof *spans);
    *n = count;
    return MF_OK;
}

int mf_kv_spans(size_t *n, mf_kv_span *spans, size_t capacity, mf_engine *engine, int32_t seq,
                uint32_t group) {
    NOT_NULL(n);
    TRY(check_call(engine, seq, __func__));
    TRY(check_group(engine, group, __func__));
    LOCKED(engine, copy_spans(n, spans, capacity, engine, seq, group));
}

int mf_kv_check(mf_engine *engine) {
    TRY(api_check_engine(engine, __func__));
    LOCKED(engine, kv_cache_check(engine->kv));
}
