// What every attn_*.c needs to know about a tile: which of its 64 positions a query reads, as bits,
// and where the rows of the job lie. A position is read iff the query sees it (causal, window) and
// it has a row; all others are never touched, neither their memory nor, with a weight of 0, in the
// arithmetic (0 * Inf is a NaN).
#ifndef MF_CPU_ATTN_ROWS_H
#define MF_CPU_ATTN_ROWS_H

#include "kernels.h"
#include "mathf.h"

// Scores become exponents of 2: c * dot, or c * (cap * tanh(z * dot)) with a soft cap.
typedef struct attn_factors {
    float c, z, cap;  // cap = 0: none
} attn_factors;

static inline attn_factors attn_factors_of(const attn_job *job) {
    attn_factors f = {job->scale * MATHF_LOG2E, 0.0f, job->softcap};
    if (f.cap != 0.0f) {
        f.c = MATHF_LOG2E;
        f.z = job->scale / f.cap;
    }
    return f;
}

// Bits of the positions of `tile` in [lo, hi).
static inline uint64_t attn_range(int64_t lo, int64_t hi, uint32_t tile) {
    lo -= (int64_t)tile * ATTN_TILE;
    hi -= (int64_t)tile * ATTN_TILE;
    if (lo < 0) lo = 0;
    if (hi > ATTN_TILE) hi = ATTN_TILE;
    if (lo >= hi) return 0;
    return ~(uint64_t)0 >> (ATTN_TILE - hi) & ~(uint64_t)0 << lo;
}

// What queries [i0, i1) see of a tile between them, and what one of them sees.
static inline uint64_t attn_seen(const attn_job *job, uint32_t i0, uint32_t i1, uint32_t tile) {
    const int64_t first = (int64_t)job->pos0 + i0, last = (int64_t)job->pos0 + i1 - 1;
    return attn_range(first + 1 - (int64_t)job->window, last + 1, tile);
}

// Bits of `seen` that have a row.
static inline uint64_t attn_present(const void *const rows[ATTN_TILE], uint64_t seen) {
    uint64_t present = 0;
    for (uint32_t x = 0; x < ATTN_TILE; x++)
        if (rows[x]) present |= (uint64_t)1 << x;
    return present & seen;
}

static inline const float *attn_q(const attn_job *job, uint32_t i, uint32_t g) {
    return job->q + i * job->q_stride + (size_t)g * job->head_dim;
}

// The int8 form of query i, head g.
static inline attn_packed attn_packed_q(const attn_job *job, uint32_t i, uint32_t g) {
    const size_t at = i * job->packed.stride + (size_t)g * job->head_dim;
    return (attn_packed){job->packed.q + at, job->packed.d + at / KV_BLOCK,
                         job->packed.neg_sum + at / KV_BLOCK, 0};
}

static inline float *attn_out(const attn_job *job, uint32_t i, uint32_t g) {
    return job->out + i * job->out_stride + (size_t)g * job->head_dim;
}

// The largest exponent of a tile: never -Inf, so that "no key yet" (-Inf) stays apart from "all
// scores -Inf", and keys of -Inf weigh 0 as they should; never -0.
static inline float attn_tile_max(float max_score, float c) {
    const float m = max_score * c + 0.0f;
    return m > -0x1.fffffep+127f ? m : -0x1.fffffep+127f;
}

#endif
