// Owns the edits of the cache that concern rows: the cell store judges and plans them, the device
// moves and turns the rows. Refuses positions that the engine's rope factors do not reach.
#include "engine.h"
#include "error.h"
#include "pool.h"

void engine_kv_work(mf_engine *e, const kv_work *work) {
    const device *const dev = e->m->dev;
    if (work->n_moves) dev->copy_cells(e->b, work->moves, work->n_moves);
    if (!work->n_roped) return;
    const uint64_t saved = fpenv_enter();
    dev->rope_cells(e->b, work->roped, work->n_roped, work->delta);
    fpenv_restore(saved);
}

int engine_kv_rm(mf_engine *e, int32_t seq, int32_t p0, int32_t p1) {
    kv_work work;
    TRY(kv_cache_rm(&work, e->kv, seq, p0, p1));
    engine_kv_work(e, &work);
    return MF_OK;
}

int engine_kv_shift(mf_engine *e, int32_t seq, int32_t p0, int32_t delta) {
    uint32_t next;
    kv_work work;
    TRY(kv_cache_next_pos(&next, e->kv, seq));
    const bool moves = p0 >= 0 && (uint32_t)p0 < next;
    if (moves && e->pos_end < KV_POS_MAX && (int64_t)next + delta > e->pos_end)
        return fail(MF_KV_RANGE,
                    "shift of sequence %d by %d: its last row would pass position %u, up to which "
                    "the rope factors of this engine are meant; load with an n_ctx above that",
                    seq, delta, e->pos_end - 1);
    TRY(kv_cache_shift(&work, e->kv, seq, p0, delta));
    engine_kv_work(e, &work);
    return MF_OK;
}

static void finish_moves(mf_kv_move **moves, size_t *n_moves, mf_engine *e, const kv_work *work) {
    engine_kv_work(e, work);
    *n_moves = work->n_moves;
    *moves = kv_cache_take_moves(e->kv);
}

int engine_kv_reserve_with_defrag(mf_kv_move **moves, size_t *n_moves, mf_engine *e, int32_t seq,
                                  uint32_t n) {
    kv_work work;
    TRY(kv_cache_reserve_with_defrag(&work, e->kv, seq, n));
    finish_moves(moves, n_moves, e, &work);
    return MF_OK;
}

int engine_kv_defrag(mf_kv_move **moves, size_t *n_moves, mf_engine *e, uint32_t need) {
    kv_work work;
    TRY(kv_cache_defrag(&work, e->kv, need));
    finish_moves(moves, n_moves, e, &work);
    return MF_OK;
}
