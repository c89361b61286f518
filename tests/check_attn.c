// Attention of a candidate table against the scalar definition, by memcmp. First the kernels alone:
// one tile folded into a state, with absent rows and guard words. Then whole batches through
// attn_run: the same sequence in chunks of many sizes, on 1 to 3 threads, in one span and scattered
// among cells of NaN, with windows, gaps, soft caps and rows of Inf, NaN, subnormals and -0. What
// must come out is computed here the plainest way: one query at a time, tile by tile. That again is
// compared with doubles.
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/cpu/attn.h"

enum { SCATTER = 3 };  // cells per row of the scattered cache

static int failures;

typedef struct setup {
    uint32_t head_dim, group, n_kv, n, window;
    float softcap;
    bool special, gaps;
    const char *isa;
} setup;

static void *zalloc(size_t n, size_t size) {
    size_t bytes = (n * size + 63) / 64 * 64 + 64;
    void *p = aligned_alloc(64, bytes);
    if (!p) {
        fprintf(stderr, "check_attn: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    memset(p, 0, bytes);
    return p;
}

static void describe(const setup *c) {
    printf("FAILED %s attention, head_dim %u group %u kv %u n %u window %u softcap %g%s%s: ",
           c->isa, c->head_dim, c->group, c->n_kv, c->n, c->window, (double)c->softcap,
           c->special ? " special" : "", c->gaps ? " gaps" : "");
    failures++;
}

static size_t first_difference(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a)) return i;
    return n;
}

// ---- the kernels alone -----------------------------------------------------------------------

enum { K_DIM = 512, K_ROWS = 96, GUARD = 32 };

typedef struct kernel_memory {
    float q[K_ROWS * K_DIM], k[ATTN_TILE * K_DIM], v[ATTN_TILE * K_DIM];
    float acc[2][K_ROWS * K_DIM + GUARD], lanes[2][K_ROWS * ATTN_LANES + GUARD],
        max[2][K_ROWS + GUARD];
    float out[2][K_ROWS * (K_DIM + 16) + GUARD];
    _Alignas(64) uint8_t scratch[ATTN_SCRATCH_BYTES + 64];
} kernel_memory;

static bool same_states(const kernel_memory *m) {
    return !memcmp(m->acc[0], m->acc[1], sizeof m->acc[0]) &&
           !memcmp(m->lanes[0], m->lanes[1], sizeof m->lanes[0]) &&
           !memcmp(m->max[0], m->max[1], sizeof m->max[0]);
}

// A NaN inside a state may be any NaN; only results have the one.
static void canonical(float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (x[i] != x[i]) x[i] = NAN;
}

static void canonical_states(kernel_memory *m) {
    for (int e = 0; e < 2; e++) {
        canonical(m->acc[e], K_ROWS * K_DIM);
        canonical(m->lanes[e], K_ROWS * ATTN_LANES);
        canonical(m->max[e], K_ROWS);
    }
}

static void random_rows(float *x, size_t n, uint64_t *rng, bool special, float size) {
    static const float values[] = {INFINITY,   -INFINITY, NAN,      0x1p-149f,
                                   -0x1p-140f, -0.0f,     0x1p120f, -0x1p100f};
    for (size_t i = 0; i < n; i++) {
        x[i] = check_normal(rng) * size;
        if (special && check_below(rng, 300) == 0) x[i] = values[check_below(rng, 8)];
    }
}

static void check_kernels(const cpu_kernels *c, const cpu_kernels *s, uint64_t *rng) {
    static kernel_memory m;
    static const uint32_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 12};
    setup t = {.isa = c->name,
               .head_dim = 16 * (1 + check_below(rng, 18)),
               .group = groups[check_below(rng, 9)],
               .n_kv = 1};
    if (check_below(rng, 16) == 0) t.head_dim = K_DIM;
    t.n = 1 + check_below(rng, check_below(rng, 2) ? 4 : K_ROWS / t.group);
    if (t.n * t.group > K_ROWS) t.n = K_ROWS / t.group;
    t.window = check_below(rng, 3) ? UINT32_MAX : 1 + check_below(rng, 100);
    t.softcap = check_below(rng, 3) ? 0.0f : 20.0f;
    t.special = check_below(rng, 2);
    t.gaps = check_below(rng, 2);
    const uint32_t n_rows = t.n * t.group, i0 = check_below(rng, t.n),
                   i1 = i0 + 1 + check_below(rng, t.n - i0);
    const size_t stride = (size_t)t.group * t.head_dim + 16 * check_below(rng, 2);
    random_rows(m.q, K_ROWS * K_DIM, rng, t.special && check_below(rng, 4) == 0, 1.0f);
    random_rows(m.k, ATTN_TILE * K_DIM, rng, t.special, 1.0f);
    random_rows(m.v, ATTN_TILE * K_DIM, rng, t.special, 1.0f);
    attn_job job = {.q = m.q,
                    .q_stride = stride > K_DIM * K_ROWS / t.n ? t.group * t.head_dim : stride,
                    .head_dim = t.head_dim,
                    .group = t.group,
                    .n_queries = t.n,
                    .pos0 = check_below(rng, 200),
                    .window = t.window,
                    .scale = 1.0f / sqrtf((float)t.head_dim),
                    .softcap = t.softcap,
                    .out_stride = t.group * t.head_dim + 5};
    const float *k[ATTN_TILE], *v[ATTN_TILE], *none[ATTN_TILE] = {0};
    for (int e = 0; e < 2; e++) {
        for (size_t i = 0; i < sizeof m.acc[e] / 4; i++) m.acc[e][i] = -0.0f;
        memset(m.lanes[e], 0, sizeof m.lanes[e]);
        for (size_t i = 0; i < sizeof m.max[e] / 4; i++) m.max[e][i] = -INFINITY;
        memset(m.out[e], 0x55, sizeof m.out[e]);
    }
    const bool ahead = check_below(rng, 2);
    for (uint32_t tile = 0; tile <= (job.pos0 + t.n) / ATTN_TILE; tile++) {
        for (uint32_t x = 0; x < ATTN_TILE; x++) {
            const uint32_t row = (x * 7 + tile * 13) % ATTN_TILE;
            // Rows that no query sees are not to be read, so they may be anything.
            const uint32_t p = tile * ATTN_TILE + x;
            const bool seen =
                p <= job.pos0 + i1 - 1 && (t.window == UINT32_MAX || p + t.window > job.pos0 + i0);
            k[x] = seen ? m.k + row * t.head_dim : (const float *)16;
            v[x] = seen ? m.v + row * t.head_dim : (const float *)16;
            if (t.gaps && check_below(rng, 4) == 0) k[x] = v[x] = NULL;
        }
        for (int e = 0; e < 2; e++) {
            attn_state state = {m.acc[e], m.lanes[e], m.max[e]};
            (e ? c : s)->attn_tile(&job, i0, i1, tile, k, v, ahead ? none : k, ahead ? none : v,
                                   &state, m.scratch);
        }
    }
    canonical_states(&m);
    if (!same_states(&m)) {
        describe(&t);
        printf("attn_tile's state differs\n");
        return;
    }
    const attn_state state = {m.acc[0], m.lanes[0], m.max[0]};
    for (int e = 0; e < 2; e++) {
        job.out = m.out[e] + GUARD / 2;
        (e ? c : s)->attn_finish(&job, i0, i1, &state);
    }
    if (memcmp(m.out[0], m.out[1], sizeof m.out[0])) {
        describe(&t);
        printf("attn_finish differs\n");
    }
    // As a part, the upper half of the state into the lower.
    const uint32_t half = n_rows / 2;
    const attn_state part = {m.acc[0] + (size_t)half * t.head_dim,
                             m.lanes[0] + (size_t)half * ATTN_LANES, m.max[0] + half};
    for (int e = 1; e >= 0; e--) {
        attn_state into = {m.acc[e], m.lanes[e], m.max[e]};
        (e ? c : s)->attn_merge(half, t.head_dim, &part, &into);
    }
    canonical_states(&m);
    if (!same_states(&m)) {
        describe(&t);
        printf("attn_merge differs\n");
    }
}

// ---- whole batches ---------------------------------------------------------------------------

typedef struct world {
    setup c;
    uint32_t *pos;          // [n]: position of row i
    float *q, *out, *want;  // [n][n_head * head_dim]
    float *k[2], *v[2];     // one span (or one per run of positions); scattered
    mf_kv_span *spans[2];
    uint32_t n_spans[2];
    void *scratch;
    size_t scratch_bytes;
} world;

static size_t width_of(const setup *c) { return (size_t)c->n_kv * c->group * c->head_dim; }
static size_t row_of(const setup *c) { return (size_t)c->n_kv * c->head_dim; }

static void make_rows(world *w, uint64_t *rng) {
    const setup *c = &w->c;
    const size_t row = row_of(c);
    w->pos = zalloc(c->n, sizeof *w->pos);
    uint32_t p = c->gaps ? 3 : 0;
    for (uint32_t i = 0; i < c->n; i++, p++) {
        if (c->gaps && i % 50 == 49) p += i % 3 == 0 ? 300 : 1 + check_below(rng, 70);
        w->pos[i] = p;
    }
    w->q = zalloc(c->n, width_of(c) * 4);
    w->out = zalloc(c->n, width_of(c) * 4);
    w->want = zalloc(c->n, width_of(c) * 4);
    random_rows(w->q, c->n * width_of(c), rng, false, 1.5f);
    for (int e = 0; e < 2; e++) {
        const size_t cells = (size_t)c->n * (e ? SCATTER : 1);
        w->k[e] = zalloc(cells, row * 4);
        w->v[e] = zalloc(cells, row * 4);
        memset(w->k[e], 0xff, cells * row * 4);
        memset(w->v[e], 0xff, cells * row * 4);
        w->spans[e] = zalloc(c->n, sizeof(mf_kv_span));
    }
    random_rows(w->k[0], c->n * row, rng, false, 2.0f);
    random_rows(w->v[0], c->n * row, rng, false, 1.0f);
    if (c->special) {
        for (uint32_t i = 0; i < c->n; i++) w->v[0][i * row + 7] = i <= 64 ? -0x1p-149f : -0.0f;
        w->v[0][c->n / 3 * row] = INFINITY;
        w->v[0][5 * row] = 0x1p-140f;
        w->k[0][c->n / 3 * 2 * row + 1] = NAN;
        w->k[0][c->n / 2 * row + 2] = -INFINITY;
    }
}

// Runs of consecutive positions, cut short at random for the scattered copy.
static void make_spans(world *w, uint64_t *rng) {
    const setup *c = &w->c;
    const size_t row = row_of(c);
    for (int e = 0; e < 2; e++) {
        size_t top = (size_t)c->n * SCATTER;
        for (uint32_t i = 0, len; i < c->n; i += len) {
            const uint32_t longest = e ? 1 + check_below(rng, 40) : c->n;
            for (len = 1; i + len < c->n && len < longest && w->pos[i + len] == w->pos[i] + len;)
                len++;
            uint32_t cell = i;
            if (e) {
                const uint32_t gap = check_below(rng, 2);
                top -= len + gap;  // at most 2 n cells in all, from the top down
                cell = (uint32_t)top;
                memcpy(w->k[1] + cell * row, w->k[0] + i * row, len * row * 4);
                memcpy(w->v[1] + cell * row, w->v[0] + i * row, len * row * 4);
            }
            w->spans[e][w->n_spans[e]++] =
                (mf_kv_span){(int32_t)w->pos[i], (int32_t)cell, (int32_t)len};
        }
    }
}

static attn_batch batch_of(const world *w, int scattered, const attn_seq *seqs, uint32_t n_seqs) {
    const setup *c = &w->c;
    return (attn_batch){.seqs = seqs,
                        .n_seqs = n_seqs,
                        .q = w->q,
                        .q_stride = width_of(c),
                        .out = w->out,
                        .out_stride = width_of(c),
                        .k_region = w->k[scattered],
                        .v_region = w->v[scattered],
                        .n_head = c->n_kv * c->group,
                        .n_head_kv = c->n_kv,
                        .head_dim = c->head_dim,
                        .window = c->window,
                        .scale = 1.0f / sqrtf((float)c->head_dim),
                        .softcap = c->softcap,
                        .scratch = w->scratch,
                        .scratch_bytes = w->scratch_bytes};
}

// What must come out for rows [first, n): each query alone, all its tiles in order, by the scalar
// kernels.
static void plain(world *w, const cpu_kernels *s, uint32_t first) {
    const setup *c = &w->c;
    float *acc = zalloc(c->group, c->head_dim * 4), lanes[64 * ATTN_LANES], max[64];
    for (uint32_t i = first; i < c->n; i++) {
        for (uint32_t h = 0; h < c->n_kv; h++) {
            const size_t at = i * width_of(c) + (size_t)h * c->group * c->head_dim;
            const attn_job job = {.q = w->q + at,
                                  .out = w->want + at,
                                  .head_dim = c->head_dim,
                                  .group = c->group,
                                  .n_queries = 1,
                                  .pos0 = w->pos[i],
                                  .window = c->window,
                                  .scale = 1.0f / sqrtf((float)c->head_dim),
                                  .softcap = c->softcap};
            attn_state state = {acc, lanes, max};
            memset(acc, 0, (size_t)c->group * c->head_dim * 4);
            memset(lanes, 0, sizeof lanes);
            for (uint32_t g = 0; g < c->group; g++) max[g] = -INFINITY;
            for (uint32_t j = 0; j <= i;) {
                const float *k[ATTN_TILE] = {0}, *v[ATTN_TILE] = {0};
                const uint32_t tile = w->pos[j] / ATTN_TILE;
                for (; j <= i && w->pos[j] / ATTN_TILE == tile; j++) {
                    if (c->window != UINT32_MAX && w->pos[j] + c->window <= w->pos[i]) continue;
                    k[w->pos[j] % ATTN_TILE] = w->k[0] + j * row_of(c) + (size_t)h * c->head_dim;
                    v[w->pos[j] % ATTN_TILE] = w->v[0] + j * row_of(c) + (size_t)h * c->head_dim;
                }
                s->attn_tile(&job, 0, 1, tile, k, v, k, v, &state, NULL);
            }
            s->attn_finish(&job, 0, 1, &state);
        }
    }
    free(acc);
}

static void check_truth(const world *w, uint32_t first) {
    const setup *c = &w->c;
    for (uint32_t i = first; i < c->n; i += 11) {
        const uint32_t h = i % (c->n_kv * c->group), head = h / c->group;
        const float *q = w->q + i * width_of(c) + (size_t)h * c->head_dim;
        const float *got = w->want + i * width_of(c) + (size_t)h * c->head_dim;
        double out[HEAD_DIM_MAX] = {0}, sum = 0.0, error = 0.0, size = 0.0;
        for (uint32_t j = 0; j <= i; j++) {
            if (c->window != UINT32_MAX && w->pos[j] + c->window <= w->pos[i]) continue;
            const size_t at = j * row_of(c) + (size_t)head * c->head_dim;
            double dot = 0.0;
            for (uint32_t d = 0; d < c->head_dim; d++) dot += (double)q[d] * w->k[0][at + d];
            dot /= sqrt((double)c->head_dim);
            if (c->softcap > 0.0f) dot = c->softcap * tanh(dot / c->softcap);
            const double p = exp(dot - 10.0);
            sum += p;
            for (uint32_t d = 0; d < c->head_dim; d++) out[d] += p * w->v[0][at + d];
        }
        for (uint32_t d = 0; d < c->head_dim; d++) {
            const double want = out[d] / sum;
            error += (got[d] - want) * (got[d] - want);
            size += want * want;
        }
        if (sqrt(error / size) <= 1e-5) continue;
        describe(c);
        printf("row %u head %u is %.2g off the one in doubles\n", i, h, sqrt(error / size));
        return;
    }
}

// Rows [first, n) in chunks; a chunk also ends where positions jump.
static void run_chunks(world *w, const cpu_kernels *k, pool *p, int scattered, uint32_t first,
                       uint32_t chunk) {
    const setup *c = &w->c;
    for (uint32_t i = first, len; i < c->n; i += len) {
        for (len = 1; i + len < c->n && len < chunk && w->pos[i + len] == w->pos[i] + len;) len++;
        const attn_seq seq = {i, len, w->pos[i], w->spans[scattered], w->n_spans[scattered]};
        const attn_batch b = batch_of(w, scattered, &seq, 1);
        attn_run(k, p, &b);
    }
}

// All chunks as one batch of several sequences (which here share their cells).
static void run_together(world *w, const cpu_kernels *k, pool *p, uint32_t first, uint32_t chunk) {
    const setup *c = &w->c;
    attn_seq *seqs = zalloc(c->n, sizeof *seqs);
    uint32_t n_seqs = 0;
    for (uint32_t i = first, len; i < c->n; i += len) {
        for (len = 1; i + len < c->n && len < chunk && w->pos[i + len] == w->pos[i] + len;) len++;
        seqs[n_seqs++] = (attn_seq){i, len, w->pos[i], w->spans[1], w->n_spans[1]};
    }
    const attn_batch b = batch_of(w, 1, seqs, n_seqs);
    attn_run(k, p, &b);
    free(seqs);
}

static void compare(world *w, uint32_t first, const char *how, uint32_t chunk, uint32_t threads) {
    const setup *c = &w->c;
    const size_t n = c->n * width_of(c), at = first_difference(w->want, w->out, n);
    if (at < n) {
        describe(c);
        printf("%s, chunks of %u, %u threads: row %zu element %zu is %a, must be %a\n", how, chunk,
               threads, at / width_of(c), at % width_of(c), (double)w->out[at],
               (double)w->want[at]);
    }
    memset(w->out + first * width_of(c), 0x55, (c->n - first) * width_of(c) * 4);
}

static void check_setup(const setup *c, const cpu_kernels *k, const cpu_kernels *s,
                        pool *const pools[3], uint32_t first, const uint32_t *chunks,
                        uint32_t n_chunks, uint64_t *rng) {
    world w = {.c = *c};
    const attn_limits limits = {c->n, c->n, c->n_kv * c->group, c->n_kv, c->head_dim, 3};
    w.scratch_bytes = attn_scratch_bytes(&limits);
    w.scratch = zalloc(w.scratch_bytes, 1);
    memset(w.scratch, 0xff, w.scratch_bytes);
    make_rows(&w, rng);
    make_spans(&w, rng);
    plain(&w, s, first);
    if (!c->special) check_truth(&w, first);
    for (uint32_t i = 0; i < n_chunks; i++) {
        for (uint32_t t = 0; t < 3; t++) {
            if (k == s && t != i % 3) continue;
            run_chunks(&w, k, pools[t], (int)(i + t) % 2, first, chunks[i]);
            compare(&w, first, (i + t) % 2 ? "scattered" : "one span", chunks[i], t + 1);
        }
        run_together(&w, k, pools[i % 3], first, chunks[i]);
        compare(&w, first, "in one batch", chunks[i], i % 3 + 1);
    }
    const uint8_t *end = (const uint8_t *)w.scratch + w.scratch_bytes;
    for (int i = 0; i < 64; i++)
        if (end[i]) {
            describe(c);
            printf("byte %d after the scratch was written\n", i);
            break;
        }
    void *const all[] = {w.scratch, w.pos,  w.q,    w.out,      w.want,    w.k[0],
                         w.k[1],    w.v[0], w.v[1], w.spans[0], w.spans[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void check_batches(const cpu_kernels *k, const cpu_kernels *s, uint64_t *rng) {
    static const uint32_t chunks[] = {1, 2, 3, 5, 16, 17, 64, 100, UINT32_MAX},
                          few[] = {1, 3, 8, UINT32_MAX};
    static const setup setups[] = {
        {64, 1, 2, 333, UINT32_MAX, 0, false, false, NULL},
        {64, 4, 1, 333, 37, 0, true, false, NULL},
        {80, 3, 2, 190, UINT32_MAX, 0, false, true, NULL},
        {96, 1, 1, 200, 64, 30, false, false, NULL},
        {128, 8, 1, 150, 100, 0, true, true, NULL},
        {256, 4, 1, 200, UINT32_MAX, 50, false, false, NULL},
        {256, 4, 1, 200, UINT32_MAX, 0, true, false, NULL},
        {16, 3, 1, 333, 1, 0, false, true, NULL},
        {48, 5, 1, 200, UINT32_MAX, 0, true, true, NULL},
        {112, 7, 1, 120, 70, 20, true, true, NULL},
    };
    pool *pools[3];
    for (uint32_t t = 0; t < 3; t++) {
        if (pool_new(&pools[t], t + 1)) {
            printf("FAILED pool_new: %s\n", mf_last_error());
            failures++;
            return;
        }
    }
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++) {
        setup c = setups[i];
        c.isa = k->name;
        check_setup(&c, k, s, pools, 0, chunks, sizeof chunks / sizeof *chunks, rng);
    }
    // Long contexts, where the tiles of a few queries are shared out: more states than are kept at
    // a time, too. The last two are scattered over some 500 spans, with whole tiles missing.
    static const setup longs[] = {
        {32, 4, 1, 3000, UINT32_MAX, 0, false, false, NULL},
        {16, 1, 3, 2500, 1500, 0, true, true, NULL},
        {16, 4, 1, 6000, UINT32_MAX, 0, false, false, NULL},
        {16, 2, 1, 9000, UINT32_MAX, 0, false, true, NULL},
        {16, 2, 1, 9000, 4000, 0, true, true, NULL},
    };
    for (size_t i = 0; i < sizeof longs / sizeof *longs; i++) {
        setup c = longs[i];
        c.isa = k->name;
        check_setup(&c, k, s, pools, c.n - 8, few, sizeof few / sizeof *few, rng);
    }
    for (uint32_t t = 0; t < 3; t++) pool_free(pools[t]);
}

int check_attention(const cpu_kernels *candidate, const cpu_kernels *scalar, uint64_t seed) {
    uint64_t rng = seed;
    failures = 0;
    for (int i = 0; i < 200 && failures < 10; i++) check_kernels(candidate, scalar, &rng);
    check_batches(candidate, scalar, &rng);
    return failures;
}
