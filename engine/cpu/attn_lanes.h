// Attention once for AVX2 and NEON: included by their attn_*.c after the lanes_*.h that defines the
// vector. A tile's keys are transposed into scratch, so that in q.k lanes are keys and in p.v lanes
// are elements of the output; up to ROWS query rows share each load. Equals attn_scalar.c bit for
// bit.
#ifndef MF_CPU_ATTN_LANES_H
#define MF_CPU_ATTN_LANES_H

#include "attn_fold.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    ROWS = 4,           // query rows of a register tile
    WIDE = 16 / LANES,  // its vectors
    LANE_BITS = (1 << LANES) - 1
};

static const float absent[HEAD_DIM_MAX];  // stands in for rows that must not be read

// Up to ROWS query rows in one tile.
typedef struct rows {
    const float *q[ROWS];
    float *out_acc[ROWS];
    uint64_t keys[ROWS];         // positions each reads
    float old[ROWS], new[ROWS];  // factors of the state so far and of this tile
} rows;

// s[r][x] = q[r] . k[x]; kt [head_dim][64]
INLINE void scores(const int n, const rows *u, uint32_t head_dim, const float *kt,
                   float (*s)[ATTN_TILE]) {
    for (uint32_t x = 0; x < ATTN_TILE; x += 16) {
        vf a[ROWS][WIDE];
        for (int r = 0; r < n; r++)
            for (int v = 0; v < WIDE; v++) a[r][v] = v_set1(0.0f);
        for (uint32_t d = 0; d < head_dim; d++) {
            vf k[WIDE];
            for (int v = 0; v < WIDE; v++)
                k[v] = v_load(kt + (size_t)d * ATTN_TILE + x + v * LANES);
            for (int r = 0; r < n; r++) {
                const vf q = v_set1(u->q[r][d]);
                for (int v = 0; v < WIDE; v++) a[r][v] = v_fma(q, k[v], a[r][v]);
            }
        }
        for (int r = 0; r < n; r++)
            for (int v = 0; v < WIDE; v++) v_store(s[r] + x + v * LANES, a[r][v]);
    }
}

// Scores of one row to weights in place (0 where no key), folded into lanes and max; returns the
// two factors.
static void weights(float *s, uint64_t keys, attn_factors f, float *lanes, float *max, float *old,
                    float *new) {
    const vf lowest = v_set1(-INFINITY), zero = v_set1(0.0f);
    vf top = lowest, sum[WIDE];
    float tops[LANES], score = -INFINITY;
    for (uint32_t x = 0; x < ATTN_TILE; x += LANES) {
        vf a = v_load(s + x);
        if (f.cap != 0.0f) {
            a = v_mul(v_set1(f.cap), v_tanh(v_mul(a, v_set1(f.z))));
            v_store(s + x, a);
        }
        a = v_select(v_mask((uint32_t)(keys >> x) & LANE_BITS), a, lowest);
        top = v_select(v_less(top, a), a, top);
    }
    v_store(tops, top);
    for (int i = 0; i < LANES; i++) score = tops[i] > score ? tops[i] : score;
    const float m = attn_tile_max(score, f.c);
    for (int v = 0; v < WIDE; v++) sum[v] = zero;
    for (uint32_t x = 0; x < ATTN_TILE; x += 16) {
        for (int v = 0; v < WIDE; v++) {
            const uint32_t at = x + (uint32_t)(v * LANES);
            vf e = v_fma(v_load(s + at), v_set1(f.c), v_set1(-m));
            e = v_exp2_neg(v_select(v_less(zero, e), zero, e));
            e = v_select(v_mask((uint32_t)(keys >> at) & LANE_BITS), e, zero);
            sum[v] = v_add(sum[v], e);
            v_store(s + at, e);
        }
    }
    const float both = m > *max ? m : *max;
    *old = mathf_exp2_neg(*max - both);
    *new = mathf_exp2_neg(m - both);
    *max = both;
    for (int v = 0; v < WIDE; v++) {
        float *l = lanes + v * LANES;
        v_store(l, v_fma(sum[v], v_set1(*new), v_mul(v_load(l), v_set1(*old))));
    }
}

// acc[r] = fma(sum over keys of p * v, new, acc * old)
INLINE void values(const int n, const rows *u, uint32_t head_dim, const float (*p)[ATTN_TILE],
                   const float *const v_rows[ATTN_TILE]) {
    uint64_t all = ~(uint64_t)0, any = 0;
    for (int r = 0; r < n; r++) {
        all &= u->keys[r];
        any |= u->keys[r];
    }
    for (uint32_t d = 0; d < head_dim; d += 16) {
        vf a[ROWS][WIDE];
        for (int r = 0; r < n; r++)
            for (int v = 0; v < WIDE; v++) a[r][v] = v_set1(0.0f);
        for (uint64_t left = any; left; left &= left - 1) {
            const int x = __builtin_ctzll(left);
            const bool shared = all >> x & 1;
            vf b[WIDE];
            for (int v = 0; v < WIDE; v++) b[v] = v_load(v_rows[x] + d + v * LANES);
            for (int r = 0; r < n; r++) {
                if (!shared && !(u->keys[r] >> x & 1)) continue;
                const vf w = v_set1(p[r][x]);
                for (int v = 0; v < WIDE; v++) a[r][v] = v_fma(w, b[v], a[r][v]);
            }
        }
        for (int r = 0; r < n; r++) {
            if (!u->keys[r]) continue;
            for (int v = 0; v < WIDE; v++) {
                float *o = u->out_acc[r] + d + v * LANES;
                v_store(o, v_fma(a[r][v], v_set1(u->new[r]), v_mul(v_load(o), v_set1(u->old[r]))));
            }
        }
    }
}

INLINE void block(const int n, const attn_job *job, attn_factors f, uint32_t i0, uint32_t row,
                  uint32_t tile, uint64_t present, const float *const v_rows[ATTN_TILE],
                  const float *kt, float (*s)[ATTN_TILE], attn_state *state) {
    rows u;
    for (int r = 0; r < n; r++) {
        const uint32_t at = row + (uint32_t)r, i = i0 + at / job->group;
        u.q[r] = attn_q(job, i, at % job->group);
        u.out_acc[r] = state->acc + (size_t)at * job->head_dim;
        u.keys[r] = present & attn_seen(job, i, i + 1, tile);
    }
    scores(n, &u, job->head_dim, kt, s);
    for (int r = 0; r < n; r++)
        if (u.keys[r])
            weights(s[r], u.keys[r], f, state->lanes + ((size_t)row + (size_t)r) * ATTN_LANES,
                    state->max + row + r, u.old + r, u.new + r);
    values(n, &u, job->head_dim, (const float(*)[ATTN_TILE])s, v_rows);
}

static void attn_tile_lanes(const attn_job *job, uint32_t i0, uint32_t i1, uint32_t tile,
                            const float *const k_rows[ATTN_TILE],
                            const float *const v_rows[ATTN_TILE],
                            const float *const next_k[ATTN_TILE],
                            const float *const next_v[ATTN_TILE], attn_state *state,
                            void *scratch) {
    (void)next_k, (void)next_v;
    const uint64_t present = attn_present(k_rows, attn_seen(job, i0, i1, tile));
    const uint32_t n_rows = (i1 - i0) * job->group;
    const attn_factors f = attn_factors_of(job);
    const float *k[ATTN_TILE];
    float *kt = scratch,
          (*s)[ATTN_TILE] = (float(*)[ATTN_TILE])(kt + (size_t)HEAD_DIM_MAX * ATTN_TILE);
    if (!present) return;
    for (uint32_t x = 0; x < ATTN_TILE; x++) k[x] = present >> x & 1 ? k_rows[x] : absent;
    for (uint32_t x = 0; x < ATTN_TILE; x += LANES)
        for (uint32_t d = 0; d < job->head_dim; d += LANES)
            v_transpose(kt + (size_t)d * ATTN_TILE + x, ATTN_TILE, k + x, d);
    uint32_t r = 0;
    for (; r + ROWS <= n_rows; r += ROWS)
        block(ROWS, job, f, i0, r, tile, present, v_rows, kt, s, state);
    for (; r < n_rows; r++) block(1, job, f, i0, r, tile, present, v_rows, kt, s, state);
}

static inline void attn_init_lanes(cpu_kernels *k) {
    k->attn_tile = attn_tile_lanes;
    k->attn_merge = attn_merge_lanes;
    k->attn_finish = attn_finish_lanes;
}

#endif
