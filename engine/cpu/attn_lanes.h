// Attention once for AVX2 and NEON: included by their attn_*.c after the lanes_*.h that defines the
// vector. A tile's keys are transposed into scratch as floats, so that in q.k lanes are keys and in
// p.v lanes are elements of the output; packed keys are multiplied as integers where they lie. Up
// to ROWS query rows share each load. Equals attn_scalar.c bit for bit.
#ifndef MF_CPU_ATTN_LANES_H
#define MF_CPU_ATTN_LANES_H

#include "attn_fold.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    ROWS = 4,           // query rows of a register tile
    WIDE = 16 / LANES,  // its vectors
    LANE_BITS = (1 << LANES) - 1
};

static const uint8_t absent[HEAD_DIM_MAX * 4];  // stands in for rows that must not be read

// Up to ROWS query rows in one tile.
typedef struct rows {
    const float *q[ROWS];
    attn_packed packed[ROWS];  // with q8_0
    float *out_acc[ROWS];
    uint64_t keys[ROWS];         // positions each reads
    float old[ROWS], new[ROWS];  // factors of the state so far and of this tile
} rows;

// One call of attn_tile. Of packed rows the scales are floats in ks, vs [head_dim/32][64].
typedef struct tile_call {
    const attn_job *job;
    attn_factors f;
    uint32_t i0, tile;
    uint64_t present;
    const uint8_t *k[ATTN_TILE], *v[ATTN_TILE];  // `absent` where nothing may be read
    attn_state *state;
    float *kt;  // [head_dim][64]
    float *vt;  // [64][head_dim]
    float (*s)[ATTN_TILE];
    float *ks, *vs;
} tile_call;

// Elements d .. d + LANES of a row; `scale`: of its block, if packed.
INLINE vf load_row(const int format, const uint8_t *row, size_t d, float scale) {
    if (format == KV_FORMAT_F32) return v_load((const float *)(const void *)row + d);
    if (format == KV_FORMAT_F16) return v_load_f16((const uint16_t *)(const void *)row + d);
    const uint8_t *block = row + d / KV_BLOCK * KV_BLOCK_BYTES;
    return v_mul(v_set1(scale), v_load_i8((const int8_t *)block + 2 + d % KV_BLOCK));
}

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

// The same of packed rows, straight from the cache.
INLINE void scores_packed(const int n, const rows *u, const tile_call *c) {
    for (uint32_t x = 0; x < ATTN_TILE; x += LANES) {
        vf a[ROWS];
        for (int r = 0; r < n; r++) a[r] = v_set1(0.0f);
        for (uint32_t b = 0; b < c->job->head_dim / KV_BLOCK; b++) {
            const vf scale = v_load(c->ks + (size_t)b * ATTN_TILE + x);
            for (int r = 0; r < n; r++) {
                const vf dots = v_dots(c->k + x, (size_t)b * KV_BLOCK_BYTES + 2,
                                       u->packed[r].q + (size_t)b * KV_BLOCK);
                a[r] = v_fma(dots, v_mul(scale, v_set1(u->packed[r].d[b])), a[r]);
            }
        }
        for (int r = 0; r < n; r++) v_store(c->s[r] + x, a[r]);
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

// acc[r] = fma(sum over keys of p * v, new, acc * old); c->v in `format`
INLINE void values(const int n, const int format, const rows *u, const tile_call *c) {
    const uint32_t head_dim = c->job->head_dim;
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
            const float scale =
                format == KV_FORMAT_Q8_0 ? c->vs[(size_t)d / KV_BLOCK * ATTN_TILE + (size_t)x] : 0;
            vf b[WIDE];
            for (int v = 0; v < WIDE; v++)
                b[v] = load_row(format, c->v[x], d + (size_t)(v * LANES), scale);
            for (int r = 0; r < n; r++) {
                if (!shared && !(u->keys[r] >> x & 1)) continue;
                const vf w = v_set1(c->s[r][x]);
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

// State rows [row, row + n); K in k_format, V in v_format.
INLINE void block(const int n, const int k_format, const int v_format, const tile_call *c,
                  uint32_t row) {
    const attn_job *job = c->job;
    rows u;
    for (int r = 0; r < n; r++) {
        const uint32_t at = row + (uint32_t)r, i = c->i0 + at / job->group, g = at % job->group;
        u.q[r] = attn_q(job, i, g);
        if (k_format == KV_FORMAT_Q8_0) u.packed[r] = attn_packed_q(job, i, g);
        u.out_acc[r] = c->state->acc + (size_t)at * job->head_dim;
        u.keys[r] = c->present & attn_seen(job, i, i + 1, c->tile);
    }
    if (k_format == KV_FORMAT_Q8_0)
        scores_packed(n, &u, c);
    else
        scores(n, &u, job->head_dim, c->kt, c->s);
    for (int r = 0; r < n; r++)
        if (u.keys[r])
            weights(c->s[r], u.keys[r], c->f,
                    c->state->lanes + ((size_t)row + (size_t)r) * ATTN_LANES,
                    c->state->max + row + r, u.old + r, u.new + r);
    values(n, v_format, &u, c);
}

// Packed rows' scales as floats: [head_dim/32][64].
static void scales(float *out, const uint8_t *const at[ATTN_TILE], uint32_t n_blocks) {
    uint16_t bits[HEAD_DIM_MAX / KV_BLOCK * ATTN_TILE];
    for (uint32_t x = 0; x < ATTN_TILE; x++)
        for (uint32_t b = 0; b < n_blocks; b++)
            memcpy(bits + b * ATTN_TILE + x, at[x] + (size_t)b * KV_BLOCK_BYTES, sizeof *bits);
    for (uint32_t i = 0; i < n_blocks * ATTN_TILE; i += LANES)
        v_store(out + i, v_load_f16(bits + i));
}

// V of the keys present as floats in vt, where c->v then points.
INLINE void widen(const int format, tile_call *c) {
    const uint32_t head_dim = c->job->head_dim;
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        if (!(c->present >> x & 1)) continue;
        float *v = c->vt + (size_t)x * head_dim;
        for (uint32_t d = 0; d < head_dim; d += LANES) {
            const float scale =
                format == KV_FORMAT_Q8_0 ? c->vs[d / KV_BLOCK * ATTN_TILE + x] : 0.0f;
            v_store(v + d, load_row(format, c->v[x], d, scale));
        }
        c->v[x] = (const uint8_t *)v;
    }
}

INLINE void transpose(const int format, const tile_call *c) {
    for (uint32_t x = 0; x < ATTN_TILE; x += LANES) {
        for (uint32_t d = 0; d < c->job->head_dim; d += LANES) {
            vf r[LANES];
            for (uint32_t i = 0; i < LANES; i++) r[i] = load_row(format, c->k[x + i], d, 0.0f);
            v_transpose(c->kt + (size_t)d * ATTN_TILE + x, ATTN_TILE, r);
        }
    }
}

INLINE void attn_tile_lanes(const int format, const attn_job *job, uint32_t i0, uint32_t i1,
                            uint32_t tile, const void *const k_rows[ATTN_TILE],
                            const void *const v_rows[ATTN_TILE], attn_state *state, void *scratch) {
    tile_call c = {.job = job, .f = attn_factors_of(job), .i0 = i0, .tile = tile, .state = state};
    const uint32_t n_rows = (i1 - i0) * job->group;
    c.present = attn_present(k_rows, attn_seen(job, i0, i1, tile));
    if (!c.present) return;
    c.kt = scratch;
    c.vt = c.kt + (size_t)HEAD_DIM_MAX * ATTN_TILE;
    c.s = (float(*)[ATTN_TILE])(c.vt + (size_t)HEAD_DIM_MAX * ATTN_TILE);
    c.ks = c.s[16];
    c.vs = c.ks + HEAD_DIM_MAX / KV_BLOCK * ATTN_TILE;
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        const bool reads = c.present >> x & 1;
        c.k[x] = reads ? k_rows[x] : absent;
        c.v[x] = reads ? v_rows[x] : absent;
    }
    if (format == KV_FORMAT_Q8_0) {
        scales(c.ks, c.k, job->head_dim / KV_BLOCK);
        scales(c.vs, c.v, job->head_dim / KV_BLOCK);
    } else {
        transpose(format, &c);
    }
    uint32_t r = 0;
    if (format != KV_FORMAT_F32 && n_rows > ROWS) {
        widen(format, &c);
        for (; r + ROWS <= n_rows; r += ROWS) block(ROWS, format, KV_FORMAT_F32, &c, r);
        for (; r < n_rows; r++) block(1, format, KV_FORMAT_F32, &c, r);
        return;
    }
    for (; r + ROWS <= n_rows; r += ROWS) block(ROWS, format, format, &c, r);
    for (; r < n_rows; r++) block(1, format, format, &c, r);
}

#define TILE(name, format)                                                          \
    static void attn_tile_lanes_##name(                                             \
        const attn_job *job, uint32_t i0, uint32_t i1, uint32_t tile,               \
        const void *const k_rows[ATTN_TILE], const void *const v_rows[ATTN_TILE],   \
        const void *const next_k[ATTN_TILE], const void *const next_v[ATTN_TILE],   \
        attn_state *state, void *scratch) {                                         \
        (void)next_k, (void)next_v;                                                 \
        attn_tile_lanes(format, job, i0, i1, tile, k_rows, v_rows, state, scratch); \
    }
TILE(f32, KV_FORMAT_F32)
TILE(f16, KV_FORMAT_F16)
TILE(q8_0, KV_FORMAT_Q8_0)

static inline void attn_init_lanes(cpu_kernels *k) {
    k->attn_tile[KV_FORMAT_F32] = attn_tile_lanes_f32;
    k->attn_tile[KV_FORMAT_F16] = attn_tile_lanes_f16;
    k->attn_tile[KV_FORMAT_Q8_0] = attn_tile_lanes_q8_0;
    k->attn_merge = attn_merge_lanes;
    k->attn_finish = attn_finish_lanes;
}

#endif
