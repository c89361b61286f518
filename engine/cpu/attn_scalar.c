// The definition of attention: softmax over the keys a query sees, in position order, one float
// order for every query. A tile of 64 positions gives its own (max, lanes, acc), which is folded
// into the row's state; the fold is all that attn_merge does, so a tile's state may come from
// another thread. Refuses nothing: a row without keys ends as NaN.
#include "../quant.h"
#include "attn_rows.h"

enum { DIM = HEAD_DIM_MAX };

// max' = the larger one; both sides are rescaled to it, then added.
static void fold(uint32_t head_dim, const float *part_acc, const float *part_lanes, float part_max,
                 float *acc, float *lanes, float *max) {
    const float m = part_max > *max ? part_max : *max;
    const float old = mathf_exp2_neg(*max - m), new = mathf_exp2_neg(part_max - m);
    for (uint32_t d = 0; d < head_dim; d++) acc[d] = fmaf(part_acc[d], new, acc[d] * old);
    for (uint32_t d = 0; d < ATTN_LANES; d++) lanes[d] = fmaf(part_lanes[d], new, lanes[d] * old);
    *max = m;
}

// Element d of a stored row.
static float element(kv_format format, const void *row, uint32_t d) {
    if (format == KV_FORMAT_F32) return ((const float *)row)[d];
    if (format == KV_FORMAT_F16) return f16_to_f32(((const uint16_t *)row)[d]);
    const uint8_t *block = (const uint8_t *)row + (size_t)d / KV_BLOCK * KV_BLOCK_BYTES;
    uint16_t scale;
    memcpy(&scale, block, sizeof scale);
    return f16_to_f32(scale) * (float)(int8_t)block[2 + d % KV_BLOCK];
}

static float dot_packed(attn_packed q, const uint8_t *k, uint32_t head_dim) {
    float dot = 0.0f;
    for (uint32_t b = 0; b < head_dim / KV_BLOCK; b++, k += KV_BLOCK_BYTES) {
        int32_t sum = 0;
        uint16_t scale;
        memcpy(&scale, k, sizeof scale);
        for (uint32_t i = 0; i < KV_BLOCK; i++) sum += q.q[b * KV_BLOCK + i] * (int8_t)k[2 + i];
        dot = fmaf((float)sum, f16_to_f32(scale) * q.d[b], dot);
    }
    return dot;
}

typedef struct query {
    const float *q;
    attn_packed packed;
} query;

static float score(kv_format format, query q, const void *k, uint32_t head_dim, attn_factors f) {
    float dot = 0.0f;
    if (format == KV_FORMAT_Q8_0)
        dot = dot_packed(q.packed, k, head_dim);
    else
        for (uint32_t d = 0; d < head_dim; d++) dot = fmaf(q.q[d], element(format, k, d), dot);
    return f.cap != 0.0f ? f.cap * mathf_tanh(dot * f.z) : dot;
}

// `keys` (not empty): the positions this row reads.
static void tile_row(kv_format format, uint32_t head_dim, attn_factors f, uint64_t keys, query q,
                     const void *const k_rows[ATTN_TILE], const void *const v_rows[ATTN_TILE],
                     float *acc, float *lanes, float *max) {
    float s[ATTN_TILE], tile_acc[DIM] = {0}, tile_lanes[ATTN_LANES] = {0}, top = -INFINITY;
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        if (!(keys >> x & 1)) continue;
        s[x] = score(format, q, k_rows[x], head_dim, f);
        top = s[x] > top ? s[x] : top;  // a NaN is passed over here and comes back as a weight
    }
    const float m = attn_tile_max(top, f.c);
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        if (!(keys >> x & 1)) continue;
        const float e = fmaf(s[x], f.c, -m);  // of huge scores, rounding may leave it above 0
        const float p = mathf_exp2_neg(e > 0.0f ? 0.0f : e);
        tile_lanes[x % ATTN_LANES] = tile_lanes[x % ATTN_LANES] + p;
        for (uint32_t d = 0; d < head_dim; d++)
            tile_acc[d] = fmaf(p, element(format, v_rows[x], d), tile_acc[d]);
    }
    fold(head_dim, tile_acc, tile_lanes, m, acc, lanes, max);
}

static void tile(kv_format format, const attn_job *job, uint32_t i0, uint32_t i1, uint32_t index,
                 const void *const k_rows[ATTN_TILE], const void *const v_rows[ATTN_TILE],
                 attn_state *state) {
    const uint64_t present = attn_present(k_rows, attn_seen(job, i0, i1, index));
    const attn_factors f = attn_factors_of(job);
    size_t r = 0;
    for (uint32_t i = i0; i < i1; i++) {
        const uint64_t keys = present & attn_seen(job, i, i + 1, index);
        for (uint32_t g = 0; g < job->group; g++, r++) {
            query q = {.q = attn_q(job, i, g)};
            if (!keys) continue;
            if (format == KV_FORMAT_Q8_0) q.packed = attn_packed_q(job, i, g);
            tile_row(format, job->head_dim, f, keys, q, k_rows, v_rows,
                     state->acc + r * job->head_dim, state->lanes + r * ATTN_LANES, state->max + r);
        }
    }
}

#define TILE(name, format)                                                        \
    static void attn_tile_##name(                                                 \
        const attn_job *job, uint32_t i0, uint32_t i1, uint32_t index,            \
        const void *const k_rows[ATTN_TILE], const void *const v_rows[ATTN_TILE], \
        const void *const next_k[ATTN_TILE], const void *const next_v[ATTN_TILE], \
        attn_state *state, void *scratch) {                                       \
        (void)next_k, (void)next_v, (void)scratch;                                \
        tile(format, job, i0, i1, index, k_rows, v_rows, state);                  \
    }
TILE(f32, KV_FORMAT_F32)
TILE(f16, KV_FORMAT_F16)
TILE(q8_0, KV_FORMAT_Q8_0)

static void attn_merge_scalar(uint32_t n_rows, uint32_t head_dim, const attn_state *part,
                              attn_state *state) {
    for (size_t r = 0; r < n_rows; r++) {
        if (part->max[r] == -INFINITY) continue;  // saw no key
        fold(head_dim, part->acc + r * head_dim, part->lanes + r * ATTN_LANES, part->max[r],
             state->acc + r * head_dim, state->lanes + r * ATTN_LANES, state->max + r);
    }
}

static void attn_finish_scalar(const attn_job *job, uint32_t i0, uint32_t i1,
                               const attn_state *state) {
    size_t r = 0;
    for (uint32_t i = i0; i < i1; i++) {
        for (uint32_t g = 0; g < job->group; g++, r++) {
            float t[ATTN_LANES], *out = attn_out(job, i, g);
            memcpy(t, state->lanes + r * ATTN_LANES, sizeof t);
            for (uint32_t width = ATTN_LANES / 2; width; width /= 2)
                for (uint32_t x = 0; x < width; x++) t[x] = t[x] + t[x + width];
            for (uint32_t d = 0; d < job->head_dim; d++)
                out[d] = mathf_canon(state->acc[r * job->head_dim + d] / t[0] + 0.0f);
        }
    }
}

void attn_init_scalar(cpu_kernels *k) {
    k->attn_tile[KV_FORMAT_F32] = attn_tile_f32;
    k->attn_tile[KV_FORMAT_F16] = attn_tile_f16;
    k->attn_tile[KV_FORMAT_Q8_0] = attn_tile_q8_0;
    k->attn_merge = attn_merge_scalar;
    k->attn_finish = attn_finish_scalar;
}
