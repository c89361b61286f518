// The order in which groups of tokens meet panels where running sums lie in memory. Included by
// matmul_avx2.c and matmul_neon.c after they define GROUP, the most tokens of a group, and
// group_q8: a whole group takes one panel at a time, fewer tokens take several side by side.

MATMUL_INLINE void matmul_q8(float *y, size_t y_stride, const panels *w, uint32_t p0, uint32_t p1,
                             const act_q8 *x, uint32_t t0, uint32_t t1, const dtype type) {
    const uint32_t step = matmul_token_step(w->n_cols, GROUP);
    for (uint32_t from = t0; from < t1; from += step) {
        const uint32_t to = u32_min(from + step, t1);
        const uint32_t few = (to - from) % GROUP;
        for (uint32_t p = p0; p < p1; p += MATMUL_PANELS) {
            const uint32_t end = u32_min(p + MATMUL_PANELS, p1);
            for (uint32_t i = p; i < end; i++)
                for (uint32_t t = from; t < to - few; t += GROUP)
                    group_q8(y, y_stride, w, i, i + 1, x, t, t + GROUP, type);
            if (few) group_q8(y, y_stride, w, p, end, x, to - few, to, type);
        }
    }
}
