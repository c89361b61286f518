// Attention on AVX-512, bit for bit what attn_scalar.c defines. Two ways through a tile with the
// same arithmetic. Few rows (decode): K is transposed in registers and used at once, nothing is
// stored, and the next tile is prefetched to L2 in memory order (in order of use it takes twice as
// long). Many rows: K^T and V are copied to scratch once and serve all rows of the job as a matrix
// product. In q.k lanes are keys, in p.v they are elements of the output.
#include "lanes_avx512.h"
#include "attn_fold.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum {
    MAX_ROWS = 8,    // query rows of a register tile
    FEW_ROWS = 32,   // up to here transposing again for each MAX_ROWS is cheaper than storing
    BLOCK_ROWS = 5,  // with 4 vectors each: 20 accumulators, 4 of K or V, 1 broadcast
    LINE = 16        // floats of a cache line
};

static const float absent[HEAD_DIM_MAX];  // stands in for rows that must not be read

// One call of attn_tile.
typedef struct tile_call {
    const attn_job *job;
    attn_factors f;
    uint32_t i0, tile;
    uint64_t present;
    const float *k[ATTN_TILE], *v[ATTN_TILE];  // `absent` where nothing may be read
    const float *const *next_k, *const *next_v;
    attn_state *state;
    float *kt;              // [head_dim][64]
    float *vt;              // [64][head_dim]
    float (*s)[ATTN_TILE];  // scores, then weights, of the rows at hand
} tile_call;

// The rows at hand, n of them.
typedef struct rows {
    const float *q[MAX_ROWS];
    uint64_t keys[MAX_ROWS];          // positions each reads
    float max[16], old[16], new[16];  // of the tile; factors of the state so far and of this tile
} rows;

// The next tile's rows, to be fetched line by line in memory order. Fetches are spread among the
// arithmetic: bunched they wait for each other, which costs a quarter of decode's speed.
typedef struct ahead {
    const float *rows[ATTN_TILE];  // `absent` where there is none
    uint32_t row_floats;
    uint32_t inverse;  // line * inverse >> 16 is the row: exact for 64 rows of up to 32 lines
    bool on;
} ahead;

static void ahead_init(ahead *a, const float *const *next, bool on, uint32_t head_dim) {
    const uint32_t lines = head_dim / LINE;
    a->row_floats = head_dim;
    a->inverse = (65536 + lines - 1) / lines;
    a->on = on;
    if (!on) return;
    for (int x = 0; x < ATTN_TILE; x++) a->rows[x] = next[x] ? next[x] : absent;
}

INLINE void fetch(const ahead *a, uint32_t line) {
    const uint32_t row = line * a->inverse >> 16;
    _mm_prefetch((const char *)(a->rows[row] + line * LINE - row * a->row_floats), _MM_HINT_T1);
}

// 16 keys x elements d..d+15 -> r[e]: element d + e, lane = key.
INLINE void transpose16(const float *const *k, size_t d, __m512i r[16]) {
    __m512i a[16];
    UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(k[i] + d);
    UNROLL for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
}

// s[r][x] = q[r] . k[x], K straight from the cache.
INLINE void scores_few(const int n, const tile_call *c, const rows *u, const ahead *next) {
    const uint32_t head_dim = c->job->head_dim;
    for (uint32_t x = 0; x < ATTN_TILE; x += 16) {
        __m512 a[MAX_ROWS];
        UNROLL for (int r = 0; r < n; r++) a[r] = _mm512_setzero_ps();
        for (uint32_t d = 0; d < head_dim; d += 16) {
            __m512i k[16];
            transpose16(c->k + x, d, k);
            const uint32_t line = x * (head_dim / LINE) + d;
            UNROLL for (int e = 0; e < 16; e++) {
                const __m512 ke = _mm512_castsi512_ps(k[e]);
                if (next->on) fetch(next, line + (uint32_t)e);
                UNROLL for (int r = 0; r < n; r++) {
                    a[r] = _mm512_fmadd_ps(ke, _mm512_set1_ps(u->q[r][d + (size_t)e]), a[r]);
                }
            }
        }
        UNROLL for (int r = 0; r < n; r++) _mm512_storeu_ps(c->s[r] + x, a[r]);
    }
}

// The same from kt, 64 keys at a time.
INLINE void scores_many(const int n, const tile_call *c, const rows *u) {
    const uint32_t head_dim = c->job->head_dim;
    __m512 a[BLOCK_ROWS][4];
    UNROLL for (int r = 0; r < n; r++) {
        UNROLL for (int v = 0; v < 4; v++) a[r][v] = _mm512_setzero_ps();
    }
    const float *kt = c->kt;
    for (uint32_t d = 0; d < head_dim; d++, kt += ATTN_TILE) {
        __m512 k[4];
        UNROLL for (int v = 0; v < 4; v++) k[v] = _mm512_load_ps(kt + 16 * v);
        UNROLL for (int r = 0; r < n; r++) {
            const __m512 q = _mm512_set1_ps(u->q[r][d]);
            UNROLL for (int v = 0; v < 4; v++) a[r][v] = _mm512_fmadd_ps(k[v], q, a[r][v]);
        }
    }
    UNROLL for (int r = 0; r < n; r++) {
        UNROLL for (int v = 0; v < 4; v++) _mm512_storeu_ps(c->s[r] + 16 * v, a[r][v]);
    }
}

// Scores of one row to weights in place (0 where no key); returns the 16 lane sums.
static __attribute__((noinline)) __m512 weigh(float *s, uint64_t keys, attn_factors f, float *max) {
    const __m512 zero = _mm512_setzero_ps();
    __m512 x[4], top = _mm512_set1_ps(-INFINITY), sum = zero;
    UNROLL for (int v = 0; v < 4; v++) {
        x[v] = _mm512_loadu_ps(s + 16 * v);
        if (f.cap != 0.0f) x[v] = v_mul(v_set1(f.cap), v_tanh(v_mul(x[v], v_set1(f.z))));
        // max(a, b) is a > b ? a : b, so that a NaN in x is passed over
        top = _mm512_mask_max_ps(top, (__mmask16)(keys >> 16 * v), x[v], top);
    }
    *max = attn_tile_max(_mm512_reduce_max_ps(top), f.c);
    const __m512 c = _mm512_set1_ps(f.c), m = _mm512_set1_ps(-*max);
    UNROLL for (int v = 0; v < 4; v++) {
        // min(a, b) is a < b ? a : b: a NaN stays
        const __m512 p = v_exp2_neg(_mm512_min_ps(zero, _mm512_fmadd_ps(x[v], c, m)));
        const __m512 masked = _mm512_maskz_mov_ps((__mmask16)(keys >> 16 * v), p);
        sum = _mm512_add_ps(sum, masked);
        _mm512_storeu_ps(s + 16 * v, masked);
    }
    return sum;
}

INLINE void weights(const int n, const tile_call *c, rows *u, uint32_t row) {
    const __mmask16 in = (__mmask16)((1u << n) - 1);
    __m512 sum[MAX_ROWS];
    __mmask16 live = 0;
    UNROLL for (int r = 0; r < 16; r++) u->max[r] = 0.0f;
    UNROLL for (int r = 0; r < n; r++) {
        sum[r] = _mm512_setzero_ps();
        if (!u->keys[r]) continue;
        live |= (__mmask16)(1u << r);
        sum[r] = weigh(c->s[r], u->keys[r], c->f, &u->max[r]);
    }
    const __m512 before = _mm512_maskz_loadu_ps(in, c->state->max + row),
                 tile = _mm512_loadu_ps(u->max);
    const __m512 both = _mm512_mask_max_ps(before, live, tile, before);
    _mm512_mask_storeu_ps(c->state->max + row, live, both);
    _mm512_storeu_ps(u->old, v_exp2_neg(_mm512_sub_ps(before, both)));
    _mm512_storeu_ps(u->new, v_exp2_neg(_mm512_sub_ps(tile, both)));
    UNROLL for (int r = 0; r < n; r++) {
        if (!u->keys[r]) continue;
        float *l = c->state->lanes + ((size_t)row + (size_t)r) * ATTN_LANES;
        v_store(l, v_fma(sum[r], v_set1(u->new[r]), v_mul(v_load(l), v_set1(u->old[r]))));
    }
}

// Elements d .. d + 16 * wide of acc[r] = fma(sum over keys of p * v, new, acc * old).
INLINE void values_at(const int n, const int wide, const tile_call *c, const rows *u, uint32_t row,
                      uint32_t d, uint64_t all, uint64_t any, const ahead *next) {
    __m512 a[MAX_ROWS][4];
    UNROLL for (int r = 0; r < n; r++) {
        UNROLL for (int v = 0; v < wide; v++) a[r][v] = _mm512_setzero_ps();
    }
    const uint32_t first = (uint32_t)__builtin_ctzll(any);
    const uint32_t last = 63 - (uint32_t)__builtin_clzll(any);
    for (uint32_t x = first; x <= last; x++) {
        __m512 b[4];
        const uint32_t line = d / LINE * ATTN_TILE + x * (uint32_t)wide;
        if (next && next->on) UNROLL for (int v = 0; v < wide; v++) fetch(next, line + (uint32_t)v);
        if (all >> x & 1) {
            UNROLL for (int v = 0; v < wide; v++) b[v] = _mm512_loadu_ps(c->v[x] + d + 16 * v);
            UNROLL for (int r = 0; r < n; r++) {
                const __m512 p = _mm512_set1_ps(c->s[r][x]);
                UNROLL for (int v = 0; v < wide; v++) a[r][v] = _mm512_fmadd_ps(b[v], p, a[r][v]);
            }
        } else if (any >> x & 1) {
            UNROLL for (int v = 0; v < wide; v++) b[v] = _mm512_loadu_ps(c->v[x] + d + 16 * v);
            UNROLL for (int r = 0; r < n; r++) {
                const __mmask16 reads = u->keys[r] >> x & 1 ? 0xffff : 0;
                const __m512 p = _mm512_set1_ps(c->s[r][x]);
                UNROLL for (int v = 0; v < wide; v++) {
                    a[r][v] = _mm512_mask3_fmadd_ps(b[v], p, a[r][v], reads);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < n; r++) {
        if (!u->keys[r]) continue;
        float *acc = c->state->acc + ((size_t)row + (size_t)r) * c->job->head_dim + d;
        const __m512 old = _mm512_set1_ps(u->old[r]), new = _mm512_set1_ps(u->new[r]);
        UNROLL for (int v = 0; v < wide; v++) {
            float *o = acc + 16 * v;
            _mm512_storeu_ps(o,
                             _mm512_fmadd_ps(a[r][v], new, _mm512_mul_ps(_mm512_loadu_ps(o), old)));
        }
    }
}

INLINE void values(const int n, const tile_call *c, const rows *u, uint32_t row,
                   const ahead *next) {
    uint64_t all = ~(uint64_t)0, any = 0;
    UNROLL for (int r = 0; r < n; r++) {
        all &= u->keys[r];
        any |= u->keys[r];
    }
    const uint32_t head_dim = c->job->head_dim;
    uint32_t d = 0;
    if (!any) return;
    if (n <= 6)
        for (; d + 64 <= head_dim; d += 64) values_at(n, 4, c, u, row, d, all, any, next);
    for (; d + 32 <= head_dim; d += 32) values_at(n, 2, c, u, row, d, all, any, next);
    if (d < head_dim) values_at(n, 1, c, u, row, d, all, any, next);
}

INLINE void rows_at(const int n, rows *u, const tile_call *c, uint32_t row) {
    uint32_t i = c->i0 + row / c->job->group, g = row % c->job->group;
    UNROLL for (int r = 0; r < n; r++) {
        u->q[r] = attn_q(c->job, i, g);
        u->keys[r] = c->present & attn_seen(c->job, i, i + 1, c->tile);
        if (++g == c->job->group) {
            g = 0;
            i++;
        }
    }
}

// State rows [row, row + n).
#define FEW(n)                                                                        \
    static __attribute__((noinline)) void few_##n(const tile_call *c, uint32_t row) { \
        rows u;                                                                       \
        ahead k, v;                                                                   \
        ahead_init(&k, c->next_k, row == 0, c->job->head_dim);                        \
        ahead_init(&v, c->next_v, row == 0, c->job->head_dim);                        \
        rows_at(n, &u, c, row);                                                       \
        scores_few(n, c, &u, &k);                                                     \
        weights(n, c, &u, row);                                                       \
        values(n, c, &u, row, &v);                                                    \
    }
#define MANY(n)                                                                        \
    static __attribute__((noinline)) void many_##n(const tile_call *c, uint32_t row) { \
        rows u;                                                                        \
        rows_at(n, &u, c, row);                                                        \
        scores_many(n, c, &u);                                                         \
        weights(n, c, &u, row);                                                        \
        values(n, c, &u, row, NULL);                                                   \
    }
typedef void rows_fn(const tile_call *c, uint32_t row);
// clang-format off
FEW(1) FEW(2) FEW(3) FEW(4) FEW(5) FEW(6) FEW(7) FEW(8)
MANY(1) MANY(2) MANY(3) MANY(4) MANY(5)
static rows_fn *const few[MAX_ROWS] = {few_1, few_2, few_3, few_4, few_5, few_6, few_7, few_8};
static rows_fn *const many[BLOCK_ROWS] = {many_1, many_2, many_3, many_4, many_5};
// clang-format on

// K^T and V of the keys present, in scratch.
static void gather(tile_call *c) {
    const uint32_t head_dim = c->job->head_dim;
    for (uint32_t x = 0; x < ATTN_TILE; x += 16) {
        for (uint32_t d = 0; d < head_dim; d += 16) {
            __m512i k[16];
            transpose16(c->k + x, d, k);
            UNROLL for (int e = 0; e < 16; e++)
                _mm512_store_si512(c->kt + (d + (size_t)e) * ATTN_TILE + x, k[e]);
        }
    }
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        if (!(c->present >> x & 1)) continue;
        float *v = c->vt + (size_t)x * head_dim;
        for (uint32_t d = 0; d < head_dim; d += 16)
            _mm512_store_ps(v + d, _mm512_loadu_ps(c->v[x] + d));
        c->v[x] = v;
    }
}

static void attn_tile_avx512(const attn_job *job, uint32_t i0, uint32_t i1, uint32_t tile,
                             const float *const k_rows[ATTN_TILE],
                             const float *const v_rows[ATTN_TILE],
                             const float *const next_k[ATTN_TILE],
                             const float *const next_v[ATTN_TILE], attn_state *state,
                             void *scratch) {
    tile_call c = {.job = job,
                   .f = attn_factors_of(job),
                   .i0 = i0,
                   .tile = tile,
                   .next_k = next_k,
                   .next_v = next_v};
    c.present = attn_present(k_rows, attn_seen(job, i0, i1, tile));
    if (!c.present) return;
    c.state = state;
    c.kt = scratch;
    c.vt = c.kt + (size_t)HEAD_DIM_MAX * ATTN_TILE;
    c.s = (float(*)[ATTN_TILE])(c.vt + (size_t)HEAD_DIM_MAX * ATTN_TILE);
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        const bool reads = c.present >> x & 1;
        c.k[x] = reads ? k_rows[x] : absent;
        c.v[x] = reads ? v_rows[x] : absent;
    }
    const uint32_t n_rows = (i1 - i0) * job->group, n_few = n_rows <= FEW_ROWS ? n_rows : 0;
    for (uint32_t row = 0, n; row < n_few; row += n) {
        n = u32_min(n_rows - row, MAX_ROWS);
        few[n - 1](&c, row);
    }
    if (n_few) return;
    gather(&c);
    for (uint32_t row = 0, n; row < n_rows; row += n) {
        n = u32_min(n_rows - row, BLOCK_ROWS);
        many[n - 1](&c, row);
    }
}

void attn_init_avx512(cpu_kernels *k) {
    k->attn_tile = attn_tile_avx512;
    k->attn_merge = attn_merge_lanes;
    k->attn_finish = attn_finish_lanes;
}
