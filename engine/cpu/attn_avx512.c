// Attention on AVX-512, bit for bit what attn_scalar.c defines. Two ways through a tile with the
// same arithmetic. Few rows (decode): K is transposed in registers and used at once, nothing is
// stored, and the next tile is prefetched to L2 in memory order (in order of use it takes twice as
// long). Many rows: K^T and V are copied to scratch once and serve all rows of the job as a matrix
// product. In q.k lanes are keys, in p.v they are elements of the output. Packed keys are
// transposed four codes at a time, which is what an integer dot takes.
#include "lanes_avx512.h"
#include "attn_fold.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum {
    MAX_ROWS = 8,    // query rows of a register tile
    FEW_ROWS = 32,   // up to here transposing again for each MAX_ROWS is cheaper than storing
    BLOCK_ROWS = 5,  // with 4 vectors each: 20 accumulators, 4 of K or V, 1 broadcast
    LINE = 64,       // bytes of a cache line
    F32 = KV_FORMAT_F32,
    F16 = KV_FORMAT_F16,
    Q8_0 = KV_FORMAT_Q8_0
};

static const uint8_t absent[HEAD_DIM_MAX * 4];  // stands in for rows that must not be read

// One call of attn_tile.
typedef struct tile_call {
    const attn_job *job;
    attn_factors f;
    uint32_t i0, tile;
    uint64_t present;
    const uint8_t *k[ATTN_TILE], *v[ATTN_TILE];  // `absent` where nothing may be read
    const void *const *next_k, *const *next_v;
    attn_state *state;
    float *kt;              // [head_dim][64]; packed: int32_t [head_dim/4][64], 4 codes + 128 each
    float *vt;              // [64][head_dim]
    float (*s)[ATTN_TILE];  // scores, then weights, of the rows at hand
    float *ks, *vs;         // packed rows' scales as floats, [head_dim/32][64]
} tile_call;

// The rows at hand, n of them.
typedef struct rows {
    const float *q[MAX_ROWS];
    attn_packed packed[MAX_ROWS];     // with q8_0
    uint64_t keys[MAX_ROWS];          // positions each reads
    float max[16], old[16], new[16];  // of the tile; factors of the state so far and of this tile
} rows;

// The next tile's rows, to be fetched line by line in memory order. Fetches are spread among the
// arithmetic: bunched they wait for each other, which costs a quarter of decode's speed. A packed
// row is fetched block by block: steps of 34 bytes leave out no line.
typedef struct ahead {
    const uint8_t *rows[ATTN_TILE];  // `absent` where there is none
    uint32_t lines, step;            // of a row; bytes from one to the next
    uint32_t inverse;  // line * inverse >> 16 is the row: exact for 64 rows of up to 32 lines
    bool on;
} ahead;

INLINE void ahead_init(const int format, ahead *a, const void *const *next, bool on,
                       uint32_t head_dim) {
    a->step = format == Q8_0 ? KV_BLOCK_BYTES : LINE;
    a->lines = format == F32 ? head_dim / 16 : (head_dim + 31) / 32;
    a->inverse = (65536 + a->lines - 1) / a->lines;
    a->on = on;
    if (!on) return;
    for (int x = 0; x < ATTN_TILE; x++) a->rows[x] = next[x] ? next[x] : absent;
}

INLINE void fetch(const ahead *a, uint32_t line) {
    const uint32_t row = line * a->inverse >> 16;
    _mm_prefetch((const char *)(a->rows[row] + (size_t)((line - row * a->lines) * a->step)),
                 _MM_HINT_T1);
}

// Elements d .. d + 15 of a row; `scale`: of their block, if packed.
INLINE __m512 load16(const int format, const uint8_t *row, size_t d, float scale) {
    if (format == F32) return v_load((const float *)(const void *)row + d);
    if (format == F16) return v_load_f16((const uint16_t *)(const void *)row + d);
    const uint8_t *block = row + d / KV_BLOCK * KV_BLOCK_BYTES;
    return _mm512_mul_ps(_mm512_set1_ps(scale),
                         v_load_i8((const int8_t *)block + 2 + d % KV_BLOCK));
}

// 16 keys x elements d..d+15 -> r[e]: element d + e, lane = key.
INLINE void transpose16(const int format, const uint8_t *const *k, size_t d, __m512i r[16]) {
    __m512i a[16];
    UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_castps_si512(load16(format, k[i], d, 0.0f));
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

// 16 packed keys x one block -> w[e]: codes 4e .. 4e + 3 of the block, each + 128, lane = key.
INLINE void transpose_block(const uint8_t *const *k, uint32_t block, __m512i w[8]) {
    const size_t at = (size_t)block * KV_BLOCK_BYTES + 2;
    __m512i a[8];
    UNROLL for (int i = 0; i < 8; i++) {
        const __m256i low = _mm256_loadu_si256((const __m256i *)(k[i] + at)),
                      high = _mm256_loadu_si256((const __m256i *)(k[i + 8] + at));
        w[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    UNROLL for (int i = 0; i < 8; i += 2) {
        a[i] = _mm512_unpacklo_epi32(w[i], w[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(w[i], w[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        w[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        w[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        w[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        w[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                  odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15),
                  bias = _mm512_set1_epi8(-128);
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512i low = w[i], high = w[i + 4];
        w[i] = _mm512_xor_si512(bias, _mm512_permutex2var_epi64(low, even, high));
        w[i + 4] = _mm512_xor_si512(bias, _mm512_permutex2var_epi64(low, odd, high));
    }
}

// sum + the block's term of q . k. The codes are 128 too large, which the start value takes back.
INLINE __m512 dot_block(const __m512i w[8], attn_packed q, uint32_t block, __m512 scale,
                        __m512 sum) {
    const int8_t *codes = q.q + (size_t)block * KV_BLOCK;
    __m512i dot = _mm512_slli_epi32(_mm512_set1_epi32(q.neg_sum[block]), 7);
    UNROLL for (int e = 0; e < 8; e++) {
        int32_t four;
        memcpy(&four, codes + 4 * e, sizeof four);
        dot = _mm512_dpbusd_epi32(dot, w[e], _mm512_set1_epi32(four));
    }
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot),
                           _mm512_mul_ps(scale, _mm512_set1_ps(q.d[block])), sum);
}

// s[r][x] = q[r] . k[x], K straight from the cache.
INLINE void scores_few(const int format, const int n, const tile_call *c, const rows *u,
                       const ahead *next) {
    const uint32_t head_dim = c->job->head_dim;
    for (uint32_t x = 0; x < ATTN_TILE; x += 16) {
        __m512 a[MAX_ROWS];
        UNROLL for (int r = 0; r < n; r++) a[r] = _mm512_setzero_ps();
        for (uint32_t d = 0; d < head_dim; d += 16) {
            __m512i k[16];
            transpose16(format, c->k + x, d, k);
            const uint32_t line = x * (head_dim / 16) + d;
            UNROLL for (int e = 0; e < 16; e++) {
                const __m512 ke = _mm512_castsi512_ps(k[e]);
                if (next->on && format == F32) fetch(next, line + (uint32_t)e);
                if (next->on && format == F16 && e % 2) fetch(next, (line + (uint32_t)e) / 2);
                UNROLL for (int r = 0; r < n; r++) {
                    a[r] = _mm512_fmadd_ps(ke, _mm512_set1_ps(u->q[r][d + (size_t)e]), a[r]);
                }
            }
        }
        UNROLL for (int r = 0; r < n; r++) _mm512_storeu_ps(c->s[r] + x, a[r]);
    }
}

// The same of packed rows.
INLINE void scores_few_packed(const int n, const tile_call *c, const rows *u, const ahead *next) {
    const uint32_t n_blocks = c->job->head_dim / KV_BLOCK;
    for (uint32_t x = 0; x < ATTN_TILE; x += 16) {
        __m512 a[MAX_ROWS];
        UNROLL for (int r = 0; r < n; r++) a[r] = _mm512_setzero_ps();
        for (uint32_t b = 0; b < n_blocks; b++) {
            __m512i w[8];
            transpose_block(c->k + x, b, w);
            const __m512 scale = _mm512_loadu_ps(c->ks + (size_t)b * ATTN_TILE + x);
            const uint32_t line = x * n_blocks + b * 16;
            if (next->on) UNROLL for (uint32_t e = 0; e < 16; e++) fetch(next, line + e);
            UNROLL for (int r = 0; r < n; r++) a[r] = dot_block(w, u->packed[r], b, scale, a[r]);
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

// The same of packed rows, 16 keys at a time.
INLINE void scores_many_packed(const int n, const tile_call *c, const rows *u) {
    const int32_t *kt = (const int32_t *)(const void *)c->kt;
    for (uint32_t x = 0; x < ATTN_TILE; x += 16) {
        __m512 a[BLOCK_ROWS];
        UNROLL for (int r = 0; r < n; r++) a[r] = _mm512_setzero_ps();
        for (uint32_t b = 0; b < c->job->head_dim / KV_BLOCK; b++) {
            __m512i w[8];
            UNROLL for (int e = 0; e < 8; e++) {
                w[e] = _mm512_load_si512(kt + ((size_t)b * 8 + (size_t)e) * ATTN_TILE + x);
            }
            const __m512 scale = _mm512_loadu_ps(c->ks + (size_t)b * ATTN_TILE + x);
            UNROLL for (int r = 0; r < n; r++) a[r] = dot_block(w, u->packed[r], b, scale, a[r]);
        }
        UNROLL for (int r = 0; r < n; r++) _mm512_storeu_ps(c->s[r] + x, a[r]);
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

// Elements d .. d + 16 * wide of a key's V, in `format`.
INLINE void load_wide(const int format, const int wide, const tile_call *c, uint32_t x, uint32_t d,
                      __m512 b[4]) {
    UNROLL for (int v = 0; v < wide; v++) {
        const uint32_t at = d + 16 * (uint32_t)v;
        const float scale = format == Q8_0 ? c->vs[at / KV_BLOCK * ATTN_TILE + x] : 0.0f;
        b[v] = load16(format, c->v[x], at, scale);
    }
}

// Elements d .. d + 16 * wide of acc[r] = fma(sum over keys of p * v, new, acc * old).
INLINE void values_at(const int format, const int n, const int wide, const tile_call *c,
                      const rows *u, uint32_t row, uint32_t d, uint64_t all, uint64_t any,
                      const ahead *next) {
    const int lines = format == F32 ? wide : wide / 2;
    __m512 a[MAX_ROWS][4];
    UNROLL for (int r = 0; r < n; r++) {
        UNROLL for (int v = 0; v < wide; v++) a[r][v] = _mm512_setzero_ps();
    }
    const uint32_t first = (uint32_t)__builtin_ctzll(any);
    const uint32_t last = 63 - (uint32_t)__builtin_clzll(any);
    for (uint32_t x = first; x <= last; x++) {
        __m512 b[4];
        const uint32_t line = d / (format == F32 ? 16 : 32) * ATTN_TILE + x * (uint32_t)lines;
        if (next && next->on)
            UNROLL for (int v = 0; v < lines; v++) fetch(next, line + (uint32_t)v);
        if (all >> x & 1) {
            load_wide(format, wide, c, x, d, b);
            UNROLL for (int r = 0; r < n; r++) {
                const __m512 p = _mm512_set1_ps(c->s[r][x]);
                UNROLL for (int v = 0; v < wide; v++) a[r][v] = _mm512_fmadd_ps(b[v], p, a[r][v]);
            }
        } else if (any >> x & 1) {
            load_wide(format, wide, c, x, d, b);
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

INLINE void values(const int format, const int n, const tile_call *c, const rows *u, uint32_t row,
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
        for (; d + 64 <= head_dim; d += 64) values_at(format, n, 4, c, u, row, d, all, any, next);
    for (; d + 32 <= head_dim; d += 32) values_at(format, n, 2, c, u, row, d, all, any, next);
    // Packed rows have whole blocks of 32.
    if (format != Q8_0 && d < head_dim) values_at(format, n, 1, c, u, row, d, all, any, next);
}

INLINE void rows_at(const int format, const int n, rows *u, const tile_call *c, uint32_t row) {
    uint32_t i = c->i0 + row / c->job->group, g = row % c->job->group;
    UNROLL for (int r = 0; r < n; r++) {
        u->q[r] = attn_q(c->job, i, g);
        if (format == Q8_0) u->packed[r] = attn_packed_q(c->job, i, g);
        u->keys[r] = c->present & attn_seen(c->job, i, i + 1, c->tile);
        if (++g == c->job->group) {
            g = 0;
            i++;
        }
    }
}

INLINE void few(const int format, const int n, const tile_call *c, uint32_t row) {
    rows u;
    ahead k, v;
    ahead_init(format, &k, c->next_k, row == 0, c->job->head_dim);
    ahead_init(format, &v, c->next_v, row == 0, c->job->head_dim);
    rows_at(format, n, &u, c, row);
    if (format == Q8_0)
        scores_few_packed(n, c, &u, &k);
    else
        scores_few(format, n, c, &u, &k);
    weights(n, c, &u, row);
    values(format, n, c, &u, row, &v);
}

// From scratch, where V is float whatever the format.
INLINE void many(const int format, const int n, const tile_call *c, uint32_t row) {
    rows u;
    rows_at(format, n, &u, c, row);
    if (format == Q8_0)
        scores_many_packed(n, c, &u);
    else
        scores_many(n, c, &u);
    weights(n, c, &u, row);
    values(F32, n, c, &u, row, NULL);
}

// State rows [row, row + n).
#define ROWS(how, format, n)                                                                       \
    static __attribute__((noinline)) void how##_##format##_##n(const tile_call *c, uint32_t row) { \
        how(format, n, c, row);                                                                    \
    }
#define FEW(format)                                                             \
    ROWS(few, format, 1)                                                        \
    ROWS(few, format, 2)                                                        \
    ROWS(few, format, 3)                                                        \
    ROWS(few, format, 4)                                                        \
    ROWS(few, format, 5)                                                        \
    ROWS(few, format, 6)                                                        \
    ROWS(few, format, 7)                                                        \
    ROWS(few, format, 8)                                                        \
    static rows_fn *const few_##format[MAX_ROWS] = {                            \
        few_##format##_1, few_##format##_2, few_##format##_3, few_##format##_4, \
        few_##format##_5, few_##format##_6, few_##format##_7, few_##format##_8};
#define MANY(format)                                                                         \
    ROWS(many, format, 1)                                                                    \
    ROWS(many, format, 2)                                                                    \
    ROWS(many, format, 3)                                                                    \
    ROWS(many, format, 4)                                                                    \
    ROWS(many, format, 5)                                                                    \
    static rows_fn *const many_##format[BLOCK_ROWS] = {many_##format##_1, many_##format##_2, \
                                                       many_##format##_3, many_##format##_4, \
                                                       many_##format##_5};
typedef void rows_fn(const tile_call *c, uint32_t row);
FEW(F32)
FEW(F16)
FEW(Q8_0)
MANY(F32)
MANY(Q8_0)

// K^T and V of the keys present, in scratch.
INLINE void gather(const int format, tile_call *c) {
    const uint32_t head_dim = c->job->head_dim;
    int32_t *words = (int32_t *)(void *)c->kt;
    for (uint32_t x = 0; x < ATTN_TILE; x += 16) {
        for (uint32_t b = 0; format == Q8_0 && b < head_dim / KV_BLOCK; b++) {
            __m512i w[8];
            transpose_block(c->k + x, b, w);
            UNROLL for (int e = 0; e < 8; e++)
                _mm512_store_si512(words + ((size_t)b * 8 + (size_t)e) * ATTN_TILE + x, w[e]);
        }
        for (uint32_t d = 0; format != Q8_0 && d < head_dim; d += 16) {
            __m512i k[16];
            transpose16(format, c->k + x, d, k);
            UNROLL for (int e = 0; e < 16; e++)
                _mm512_store_si512(c->kt + (d + (size_t)e) * ATTN_TILE + x, k[e]);
        }
    }
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        if (!(c->present >> x & 1)) continue;
        float *v = c->vt + (size_t)x * head_dim;
        for (uint32_t d = 0; d < head_dim; d += 16) {
            const float scale = format == Q8_0 ? c->vs[d / KV_BLOCK * ATTN_TILE + x] : 0.0f;
            _mm512_store_ps(v + d, load16(format, c->v[x], d, scale));
        }
        c->v[x] = (const uint8_t *)v;
    }
}

// Packed rows' scales as floats: [head_dim/32][64].
static void scales(float *out, const uint8_t *const at[ATTN_TILE], uint32_t n_blocks) {
    _Alignas(64) uint16_t bits[HEAD_DIM_MAX / KV_BLOCK * ATTN_TILE];
    for (uint32_t x = 0; x < ATTN_TILE; x++)
        for (uint32_t b = 0; b < n_blocks; b++)
            memcpy(bits + b * ATTN_TILE + x, at[x] + (size_t)b * KV_BLOCK_BYTES, sizeof *bits);
    for (uint32_t i = 0; i < n_blocks * ATTN_TILE; i += 16) v_store(out + i, v_load_f16(bits + i));
}

INLINE void attn_tile_avx512(const int format, rows_fn *const few_rows[MAX_ROWS],
                             rows_fn *const many_rows[BLOCK_ROWS], const attn_job *job, uint32_t i0,
                             uint32_t i1, uint32_t tile, const void *const k_rows[ATTN_TILE],
                             const void *const v_rows[ATTN_TILE],
                             const void *const next_k[ATTN_TILE],
                             const void *const next_v[ATTN_TILE], attn_state *state,
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
    c.ks = c.s[16];
    c.vs = c.ks + HEAD_DIM_MAX / KV_BLOCK * ATTN_TILE;
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        const bool reads = c.present >> x & 1;
        c.k[x] = reads ? k_rows[x] : absent;
        c.v[x] = reads ? v_rows[x] : absent;
    }
    if (format == Q8_0) {
        scales(c.ks, c.k, job->head_dim / KV_BLOCK);
        scales(c.vs, c.v, job->head_dim / KV_BLOCK);
    }
    const uint32_t n_rows = (i1 - i0) * job->group, n_few = n_rows <= FEW_ROWS ? n_rows : 0;
    for (uint32_t row = 0, n; row < n_few; row += n) {
        n = u32_min(n_rows - row, MAX_ROWS);
        few_rows[n - 1](&c, row);
    }
    if (n_few) return;
    gather(format, &c);
    for (uint32_t row = 0, n; row < n_rows; row += n) {
        n = u32_min(n_rows - row, BLOCK_ROWS);
        many_rows[n - 1](&c, row);
    }
}

#define TILE(format, from_scratch)                                                             \
    static void attn_tile_##format(                                                            \
        const attn_job *job, uint32_t i0, uint32_t i1, uint32_t tile,                          \
        const void *const k_rows[ATTN_TILE], const void *const v_rows[ATTN_TILE],              \
        const void *const next_k[ATTN_TILE], const void *const next_v[ATTN_TILE],              \
        attn_state *state, void *scratch) {                                                    \
        attn_tile_avx512(format, few_##format, many_##from_scratch, job, i0, i1, tile, k_rows, \
                         v_rows, next_k, next_v, state, scratch);                              \
    }
TILE(F32, F32)
TILE(F16, F32)
TILE(Q8_0, Q8_0)

void attn_init_avx512(cpu_kernels *k) {
    k->attn_tile[KV_FORMAT_F32] = attn_tile_F32;
    k->attn_tile[KV_FORMAT_F16] = attn_tile_F16;
    k->attn_tile[KV_FORMAT_Q8_0] = attn_tile_Q8_0;
    k->attn_merge = attn_merge_lanes;
    k->attn_finish = attn_finish_lanes;
}
