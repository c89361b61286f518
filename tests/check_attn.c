// Attention of a candidate table against the scalar definition, by memcmp. First the kernels alone:
// one tile folded into a state, with absent rows and guard words. Then whole batches through
// attn_run: the same sequence in chunks of many sizes, on 1 to 3 threads, in one span and scattered
// among cells of NaN, with windows, gaps, soft caps and rows of Inf, NaN, subnormals and -0. What
// must come out is computed here the plainest way: one query at a time, tile by tile. That again is
// compared with doubles. All of it for every format of rows, and for packed rows read as floats.
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
    kv_format format;
    bool widened;
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
    printf("FAILED %s attention, %s%s, head_dim %u group %u kv %u n %u window %u softcap %g%s%s: ",
           c->isa, kv_format_name(c->format), c->widened ? " widened" : "", c->head_dim, c->group,
           c->n_kv, c->n, c->window, (double)c->softcap, c->special ? " special" : "",
           c->gaps ? " gaps" : "");
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
    float q[K_ROWS * K_DIM], row[K_DIM];
    uint8_t k[ATTN_TILE * K_DIM * 4], v[ATTN_TILE * K_DIM * 4];
    int8_t packed_q[K_ROWS * K_DIM];
    float packed_d[K_ROWS * K_DIM / 32];
    int32_t neg_sum[K_ROWS * K_DIM / 32], neg_half[K_ROWS * K_DIM / 16];
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

// Stored rows; of packed ones now and then the code that no store makes.
static void random_stored(kernel_memory *m, uint8_t *rows, const cpu_kernels *s, const setup *t,
                          uint64_t *rng) {
    const size_t bytes = kv_head_bytes(t->format, t->head_dim);
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        random_rows(m->row, t->head_dim, rng, t->special, 1.0f);
        s->kv_store[t->format](rows + x * bytes, m->row, t->head_dim);
        if (t->format == KV_FORMAT_Q8_0 && t->special && check_below(rng, 4) == 0)
            rows[x * bytes + 2 + check_below(rng, 32)] = 0x80;
    }
}

// The int8 form of all queries, as attn_run makes it.
static attn_packed pack_queries(kernel_memory *m, const cpu_kernels *s) {
    act_q8 out = {1, m->packed_q, m->packed_d, m->neg_sum, m->neg_half};
    s->quantize(&out, m->q, K_ROWS * K_DIM, K_ROWS * K_DIM, 0, 1);
    return (attn_packed){m->packed_q, m->packed_d, m->neg_sum, 0};
}

static void check_kernels(const cpu_kernels *c, const cpu_kernels *s, kv_format format,
                          uint64_t *rng) {
    static kernel_memory m;
    static const uint32_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 12};
    setup t = {.isa = c->name,
               .head_dim = 16 * (1 + check_below(rng, 18)),
               .group = groups[check_below(rng, 9)],
               .n_kv = 1,
               .format = format};
    if (format == KV_FORMAT_Q8_0) t.head_dim = (t.head_dim + 31) / 32 * 32;
    if (check_below(rng, 16) == 0) t.head_dim = K_DIM;
    t.n = 1 + check_below(rng, check_below(rng, 2) ? 4 : K_ROWS / t.group);
    if (t.n * t.group > K_ROWS) t.n = K_ROWS / t.group;
    t.window = check_below(rng, 3) ? UINT32_MAX : 1 + check_below(rng, 100);
    t.softcap = check_below(rng, 3) ? 0.0f : 20.0f;
    t.special = check_below(rng, 2);
    t.gaps = check_below(rng, 2);
    const uint32_t n_rows = t.n * t.group, i0 = check_below(rng, t.n),
                   i1 = i0 + 1 + check_below(rng, t.n - i0);
    const size_t stride = (size_t)t.group * t.head_dim + 32 * check_below(rng, 2);
    random_rows(m.q, K_ROWS * K_DIM, rng, t.special && check_below(rng, 4) == 0, 1.0f);
    random_stored(&m, m.k, s, &t, rng);
    random_stored(&m, m.v, s, &t, rng);
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
    if (format == KV_FORMAT_Q8_0) {
        job.packed = pack_queries(&m, s);
        job.packed.stride = job.q_stride;
    }
    const size_t bytes = kv_head_bytes(format, t.head_dim);
    const void *k[ATTN_TILE], *v[ATTN_TILE], *none[ATTN_TILE] = {0};
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
            k[x] = seen ? (const void *)(m.k + row * bytes) : (const void *)16;
            v[x] = seen ? (const void *)(m.v + row * bytes) : (const void *)16;
            if (t.gaps && check_below(rng, 4) == 0) k[x] = v[x] = NULL;
        }
        for (int e = 0; e < 2; e++) {
            attn_state state = {m.acc[e], m.lanes[e], m.max[e]};
            (e ? c : s)->attn_tile[format](&job, i0, i1, tile, k, v, ahead ? none : k,
                                           ahead ? none : v, &state, m.scratch);
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
    int8_t *packed_q;       // [n][n_head * head_dim], and what belongs to it
    float *packed_d;
    int32_t *neg_sum, *neg_half;
    float *kf, *vf;        // [n][n_kv * head_dim], exactly what the stored rows mean
    uint8_t *k[2], *v[2];  // one span (or one per run of positions); scattered
    mf_kv_span *spans[2];
    uint32_t n_spans[2];
    void *scratch;
    size_t scratch_bytes;
} world;

static size_t width_of(const setup *c) { return (size_t)c->n_kv * c->group * c->head_dim; }
static size_t row_of(const setup *c) { return (size_t)c->n_kv * c->head_dim; }
static size_t bytes_of(const setup *c) {
    return kv_format_row_bytes(c->format, c->n_kv * c->head_dim);
}

static void store_world(world *w, const cpu_kernels *s) {
    const setup *c = &w->c;
    const size_t row = row_of(c), bytes = bytes_of(c);
    for (uint32_t i = 0; i < c->n; i++) {
        s->kv_store[c->format](w->k[0] + i * bytes, w->kf + i * row, (uint32_t)row);
        s->kv_store[c->format](w->v[0] + i * bytes, w->vf + i * row, (uint32_t)row);
        s->kv_load[c->format](w->kf + i * row, w->k[0] + i * bytes, (uint32_t)row);
        s->kv_load[c->format](w->vf + i * row, w->v[0] + i * bytes, (uint32_t)row);
    }
}

static void make_rows(world *w, const cpu_kernels *s, uint64_t *rng) {
    const setup *c = &w->c;
    const size_t row = row_of(c), bytes = bytes_of(c);
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
    const size_t blocks = c->n * width_of(c) / 32;
    w->packed_q = zalloc(blocks, 32);
    w->packed_d = zalloc(blocks, sizeof *w->packed_d);
    w->neg_sum = zalloc(blocks, sizeof *w->neg_sum);
    w->neg_half = zalloc(2 * blocks, sizeof *w->neg_half);
    act_q8 packed = {1, w->packed_q, w->packed_d, w->neg_sum, w->neg_half};
    s->quantize(&packed, w->q, blocks * 32, (uint32_t)blocks * 32, 0, 1);
    for (int e = 0; e < 2; e++) {
        const size_t cells = (size_t)c->n * (e ? SCATTER : 1);
        w->k[e] = zalloc(cells, bytes);
        w->v[e] = zalloc(cells, bytes);
        memset(w->k[e], 0xff, cells * bytes);
        memset(w->v[e], 0xff, cells * bytes);
        w->spans[e] = zalloc(c->n, sizeof(mf_kv_span));
    }
    w->kf = zalloc(c->n, row * 4);
    w->vf = zalloc(c->n, row * 4);
    random_rows(w->kf, c->n * row, rng, false, 2.0f);
    random_rows(w->vf, c->n * row, rng, false, 1.0f);
    if (c->special) {
        for (uint32_t i = 0; i < c->n; i++) w->vf[i * row + 7] = i <= 64 ? -0x1p-149f : -0.0f;
        w->vf[c->n / 3 * row] = INFINITY;
        w->vf[5 * row] = 0x1p-140f;
        w->kf[c->n / 3 * 2 * row + 1] = NAN;
        w->kf[c->n / 2 * row + 2] = -INFINITY;
    }
    store_world(w, s);
}

// Runs of consecutive positions, cut short at random for the scattered copy.
static void make_spans(world *w, uint64_t *rng) {
    const setup *c = &w->c;
    const size_t bytes = bytes_of(c);
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
                memcpy(w->k[1] + cell * bytes, w->k[0] + i * bytes, len * bytes);
                memcpy(w->v[1] + cell * bytes, w->v[0] + i * bytes, len * bytes);
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
                        .format = c->format,
                        .widened = c->widened,
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
    const kv_format format = c->widened ? KV_FORMAT_F32 : c->format;
    const size_t bytes = c->widened ? row_of(c) * 4 : bytes_of(c);
    const uint8_t *k_rows = c->widened ? (const uint8_t *)w->kf : w->k[0],
                  *v_rows = c->widened ? (const uint8_t *)w->vf : w->v[0];
    for (uint32_t i = first; i < c->n; i++) {
        for (uint32_t h = 0; h < c->n_kv; h++) {
            const size_t at = i * width_of(c) + (size_t)h * c->group * c->head_dim;
            const attn_job job = {
                .q = w->q + at,
                .packed = {w->packed_q + at, w->packed_d + at / 32, w->neg_sum + at / 32, 0},
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
                const void *k[ATTN_TILE] = {0}, *v[ATTN_TILE] = {0};
                const size_t head = h * kv_head_bytes(format, c->head_dim);
                const uint32_t tile = w->pos[j] / ATTN_TILE;
                for (; j <= i && w->pos[j] / ATTN_TILE == tile; j++) {
                    if (c->window != UINT32_MAX && w->pos[j] + c->window <= w->pos[i]) continue;
                    k[w->pos[j] % ATTN_TILE] = k_rows + j * bytes + head;
                    v[w->pos[j] % ATTN_TILE] = v_rows + j * bytes + head;
                }
                s->attn_tile[format](&job, 0, 1, tile, k, v, k, v, &state, NULL);
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
            for (uint32_t d = 0; d < c->head_dim; d++) {
                const size_t x = (size_t)(q - w->q) + d;
                const bool packed = c->format == KV_FORMAT_Q8_0 && !c->widened;
                const double asked = packed ? w->packed_q[x] * (double)w->packed_d[x / 32] : q[d];
                dot += asked * w->kf[at + d];
            }
            dot /= sqrt((double)c->head_dim);
            if (c->softcap > 0.0f) dot = c->softcap * tanh(dot / c->softcap);
            const double p = exp(dot - 10.0);
            sum += p;
            for (uint32_t d = 0; d < c->head_dim; d++) out[d] += p * w->vf[at + d];
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
    const attn_limits limits = {c->n,        c->n, c->n_kv * c->group, c->n_kv,
                                c->head_dim, 3,    c->format,          c->widened};
    w.scratch_bytes = attn_scratch_bytes(&limits);
    w.scratch = zalloc(w.scratch_bytes, 1);
    memset(w.scratch, 0xff, w.scratch_bytes);
    make_rows(&w, s, rng);
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
    void *const all[] = {w.scratch,  w.pos,      w.q,        w.out,     w.want,    w.k[0],
                         w.k[1],     w.v[0],     w.v[1],     w.kf,      w.vf,      w.spans[0],
                         w.spans[1], w.packed_q, w.packed_d, w.neg_sum, w.neg_half};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

enum { FORMATS = KV_FORMAT_COUNT + 1 };  // and packed rows read as floats

static setup in_format(const setup *like, const char *isa, int format) {
    setup c = *like;
    c.isa = isa;
    c.widened = format == KV_FORMAT_COUNT;
    c.format = c.widened ? KV_FORMAT_Q8_0 : (kv_format)format;
    if (c.format == KV_FORMAT_Q8_0) c.head_dim = (c.head_dim + 31) / 32 * 32;
    return c;
}

static void check_batches(const cpu_kernels *k, const cpu_kernels *s, uint64_t *rng) {
    static const uint32_t chunks[] = {1, 2, 3, 5, 16, 17, 64, 100, UINT32_MAX},
                          few[] = {1, 3, 8, UINT32_MAX}, some[] = {1, 5, 17, UINT32_MAX};
    static const setup setups[] = {
        {64, 1, 2, 333, UINT32_MAX, 0, false, false, NULL, KV_FORMAT_F32, false},
        {64, 4, 1, 333, 37, 0, true, false, NULL, KV_FORMAT_F32, false},
        {80, 3, 2, 190, UINT32_MAX, 0, false, true, NULL, KV_FORMAT_F32, false},
        {96, 1, 1, 200, 64, 30, false, false, NULL, KV_FORMAT_F32, false},
        {128, 8, 1, 150, 100, 0, true, true, NULL, KV_FORMAT_F32, false},
        {256, 4, 1, 200, UINT32_MAX, 50, false, false, NULL, KV_FORMAT_F32, false},
        {256, 4, 1, 200, UINT32_MAX, 0, true, false, NULL, KV_FORMAT_F32, false},
        {16, 3, 1, 333, 1, 0, false, true, NULL, KV_FORMAT_F32, false},
        {48, 5, 1, 200, UINT32_MAX, 0, true, true, NULL, KV_FORMAT_F32, false},
        {112, 7, 1, 120, 70, 20, true, true, NULL, KV_FORMAT_F32, false},
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
        for (int format = 0; format < FORMATS; format++) {
            if (format != KV_FORMAT_F32 && (i + (size_t)format) % 2) continue;
            const setup c = in_format(&setups[i], k->name, format);
            if (format == KV_FORMAT_F32)
                check_setup(&c, k, s, pools, 0, chunks, sizeof chunks / sizeof *chunks, rng);
            else
                check_setup(&c, k, s, pools, 0, some, sizeof some / sizeof *some, rng);
        }
    }
    // Long contexts, where the tiles of a few queries are shared out: more states than are kept at
    // a time, too. The last two are scattered over some 500 spans, with whole tiles missing.
    static const setup longs[] = {
        {32, 4, 1, 3000, UINT32_MAX, 0, false, false, NULL, KV_FORMAT_F32, false},
        {16, 1, 3, 2500, 1500, 0, true, true, NULL, KV_FORMAT_F32, false},
        {16, 4, 1, 6000, UINT32_MAX, 0, false, false, NULL, KV_FORMAT_F32, false},
        {16, 2, 1, 9000, UINT32_MAX, 0, false, true, NULL, KV_FORMAT_F32, false},
        {16, 2, 1, 9000, 4000, 0, true, true, NULL, KV_FORMAT_F32, false},
    };
    for (size_t i = 0; i < sizeof longs / sizeof *longs; i++) {
        const setup c = in_format(&longs[i], k->name, (int)(i % FORMATS));
        check_setup(&c, k, s, pools, c.n - 8, few, sizeof few / sizeof *few, rng);
    }
    for (uint32_t t = 0; t < 3; t++) pool_free(pools[t]);
}

int check_attention(const cpu_kernels *candidate, const cpu_kernels *scalar, uint64_t seed) {
    uint64_t rng = seed;
    failures = 0;
    for (int i = 0; i < 200 * KV_FORMAT_COUNT && failures < 10; i++)
        check_kernels(candidate, scalar, (kv_format)(i % KV_FORMAT_COUNT), &rng);
    check_batches(candidate, scalar, &rng);
    return failures;
}
