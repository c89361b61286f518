// attn_merge and attn_finish for all SIMD instruction sets, over the vector that a lanes_*.h has
// defined.
#ifndef MF_CPU_ATTN_FOLD_H
#define MF_CPU_ATTN_FOLD_H

#include "attn_rows.h"
#include "mathf_lanes.h"

static void attn_merge_lanes(uint32_t n_rows, uint32_t head_dim, const attn_state *part,
                             attn_state *state) {
    for (size_t r = 0; r < n_rows; r++) {
        if (part->max[r] == -INFINITY) continue;
        const float m = part->max[r] > state->max[r] ? part->max[r] : state->max[r];
        const vf old = v_set1(mathf_exp2_neg(state->max[r] - m)),
                 new = v_set1(mathf_exp2_neg(part->max[r] - m));
        const float *a = part->acc + r * head_dim, *l = part->lanes + r * ATTN_LANES;
        float *acc = state->acc + r * head_dim, *lanes = state->lanes + r * ATTN_LANES;
        for (uint32_t d = 0; d < head_dim; d += LANES)
            v_store(acc + d, v_fma(v_load(a + d), new, v_mul(v_load(acc + d), old)));
        for (uint32_t d = 0; d < ATTN_LANES; d += LANES)
            v_store(lanes + d, v_fma(v_load(l + d), new, v_mul(v_load(lanes + d), old)));
        state->max[r] = m;
    }
}

static void attn_finish_lanes(const attn_job *job, uint32_t i0, uint32_t i1,
                              const attn_state *state) {
    size_t r = 0;
    for (uint32_t i = i0; i < i1; i++) {
        for (uint32_t g = 0; g < job->group; g++, r++) {
            float t[ATTN_LANES], *out = attn_out(job, i, g);
            memcpy(t, state->lanes + r * ATTN_LANES, sizeof t);
            for (uint32_t width = ATTN_LANES / 2; width; width /= 2)
                for (uint32_t x = 0; x < width; x++) t[x] = t[x] + t[x + width];
            const vf l = v_set1(t[0]), zero = v_set1(0.0f);
            for (uint32_t d = 0; d < job->head_dim; d += LANES)
                v_store(out + d,
                        v_canon(v_add(v_div(v_load(state->acc + r * job->head_dim + d), l), zero)));
        }
    }
}

#endif
