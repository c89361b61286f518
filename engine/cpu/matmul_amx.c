// Matrix products of many tokens with AMX: one instruction makes the dots of 16 tokens with a
// panel's 16 rows over a block, in the time in which AVX-512 makes those of two tokens. They are
// exact integers as everywhere; AVX-512 scales and adds them, and that takes most of the time.
//
// A panel is read a few blocks at a time, which are unpacked once and stay in the first-level cache
// while all tokens pass; the tokens' sums wait in memory in between. Tokens that fill no tile are
// left to AVX-512: a tile filled up, or of fewer rows, was slower. Equal to matmul_scalar.c bit for
// bit.
#include <string.h>

#include "matmul_avx512.h"

enum {
    TOKENS = 16,  // of a tile
    GROUP = 512   // that pass while a panel is read
};

// Tile registers, by the numbers that the instructions below have: dots from 0 on, enough that some
// are stored while others are made.
enum { N_DOTS = 4, ACTIVATIONS = 4, WORDS = 5, N_TILES = 6 };

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

// The intrinsics of gcc 12 do not tell the compiler which memory they read.
#define TILE_LOAD(tile, from, stride)                                                     \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)stride) \
                     : "memory")
#define TILE_STORE(tile, to)                                                                     \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)TILE_STRIDE) \
                     : "memory")
#define TILE_DOT(sum, a, w)                \
    __asm__ volatile("tilezero %%tmm" #sum \
                     "\n\t"                \
                     "tdpbssd %%tmm" #w ", %%tmm" #a ", %%tmm" #sum ::)
enum { TILE_STRIDE = PANEL_ROWS * 4 };

MATMUL_INLINE void configure(const int n_columns) {
    tile_config c = {.palette = 1};
    for (int i = 0; i < N_TILES; i++) {
        c.rows[i] = i == WORDS ? (uint8_t)(n_columns / 4) : TOKENS;
        c.row_bytes[i] = i == ACTIVATIONS ? (uint16_t)n_columns : TILE_STRIDE;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
}

// Dots of a block: of its halves where these have scales of their own.
MATMUL_INLINE int n_dots_of(const quant_traits q) { return q.sub_width == 16 ? 2 : 1; }

// Blocks that are read at a time.
typedef struct unpacked {
    _Alignas(64) int8_t words[N_DOTS][8][64];  // as in a panel of 8-bit codes, signed
    weight_scales scales[N_DOTS];
} unpacked;

MATMUL_INLINE void unpack(unpacked *out, const uint8_t *panel, uint32_t b, const int n,
                          const dtype type) {
    const panel_chunk at = panel_chunk_of(type);
    const __m512i bias = _mm512_set1_epi8((char)bias_of(quant_traits_of[type]));
    for (int i = 0; i < n; i++, b++) {
        const uint8_t *const chunk = panel + (size_t)(b / at.blocks) * at.bytes;
        weight_block w;
        matmul_prefetch_block(chunk, b % at.blocks, at);
        load_block(&w, chunk, b % at.blocks, type);
        MATMUL_UNROLL
        for (int j = 0; j < 8; j++)
            _mm512_store_si512(out->words[i][j], _mm512_sub_epi8(w.word[j], bias));
        out->scales[i] = w.s;
    }
}

// Dots as a tile register is stored.
typedef int32_t tile_dots[TOKENS][PANEL_ROWS];

// Begins dots of 16 tokens in register i. a: of the first token.
MATMUL_INLINE void start_dots(const int i, const int8_t *a, const int8_t (*words)[64]) {
    TILE_LOAD(4, a, ACT_BLOCK);
    TILE_LOAD(5, words, TILE_STRIDE);
    if (i == 0) TILE_DOT(0, 4, 5);
    if (i == 1) TILE_DOT(1, 4, 5);
    if (i == 2) TILE_DOT(2, 4, 5);
    if (i == 3) TILE_DOT(3, 4, 5);
}

MATMUL_INLINE void store_dots(tile_dots *to, const int i) {
    if (i == 0) TILE_STORE(0, *to);
    if (i == 1) TILE_STORE(1, *to);
    if (i == 2) TILE_STORE(2, *to);
    if (i == 3) TILE_STORE(3, *to);
}

// f [16]: the tokens' sums; the first's codes of the block are the `first` of x.
MATMUL_INLINE void fold_tile(__m512 f[TOKENS], tile_dots dots[2], const weight_scales *s,
                             const act_q8 *x, size_t first, const quant_traits q) {
    const int n_dots = n_dots_of(q);
    _Alignas(64) float neg[2 * TOKENS];
    if (q.has_min) {
        const int32_t *const sums = n_dots == 2 ? x->neg_half + 2 * first : x->neg_sum + first;
        for (int i = 0; i < TOKENS * n_dots; i += 16)
            _mm512_store_ps(neg + i, _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + i)));
        __asm__("" : "+m"(neg));  // as in load_sums of matmul_avx512.c
    }
    MATMUL_UNROLL
    for (int i = 0; i < TOKENS; i++) {
        const __m512i dot0 = _mm512_load_si512(dots[0][i]);
        const __m512i dot1 = n_dots == 2 ? _mm512_load_si512(dots[1][i]) : dot0;
        f[i] = fold_block(f[i], s, dot0, dot1, x->d[first + (size_t)i], neg + i * n_dots, q);
    }
}

// Adds blocks [b, b + n) to the sums of n_tiles times 16 tokens from t on. While the dots of one
// tile are made, those of the one before it are folded.
MATMUL_INLINE void add_tiles(float (*sums)[PANEL_ROWS], const unpacked *w, uint32_t b, const int n,
                             const act_q8 *x, uint32_t t, uint32_t n_tiles, const dtype type) {
    const quant_traits q = quant_traits_of[type];
    const int n_dots = n_dots_of(q);
    tile_dots dots[2][2] __attribute__((aligned(64)));
    for (uint32_t tile = 0; tile <= n_tiles; tile++) {
        const size_t first = (size_t)b * x->n_tokens + t + tile * TOKENS;
        float(*const done)[PANEL_ROWS] = sums + (tile ? tile - 1 : 0) * TOKENS;
        __m512 f[TOKENS];
        MATMUL_UNROLL
        for (int i = 0; i < TOKENS; i++) f[i] = _mm512_load_ps(done[i]);
        MATMUL_UNROLL
        for (int j = 0; j < n; j++) {
            const size_t at = first + (size_t)j * x->n_tokens;
            MATMUL_UNROLL
            for (int h = 0; h < n_dots; h++) {
                const int i = j * n_dots + h;
                if (tile) store_dots(&dots[j % 2][h], i);
                if (tile < n_tiles)
                    start_dots(i, x->q + at * ACT_BLOCK + 16 * h, w->words[j] + 4 * h);
            }
            if (tile) fold_tile(f, dots[j % 2], &w->scales[j], x, at - TOKENS, q);
        }
        MATMUL_UNROLL
        for (int i = 0; i < TOKENS; i++) _mm512_store_ps(done[i], f[i]);
    }
}

// Blocks [b, b + n) of a panel.
MATMUL_INLINE void add_blocks(float (*sums)[PANEL_ROWS], const uint8_t *panel, uint32_t b,
                              const int n, const act_q8 *x, uint32_t t, uint32_t n_tiles,
                              const dtype type) {
    unpacked w;
    unpack(&w, panel, b, n, type);
    add_tiles(sums, &w, b, n, x, t, n_tiles, type);
}

// One panel for n_tiles times 16 tokens from t on.
MATMUL_INLINE void panel_q8(float *y, size_t y_stride, __mmask16 rows, const uint8_t *panel,
                            uint32_t n_blocks, const act_q8 *x, uint32_t t, uint32_t n_tiles,
                            const dtype type) {
    const int step = N_DOTS / n_dots_of(quant_traits_of[type]);
    _Alignas(64) float sums[GROUP][PANEL_ROWS];
    const uint32_t n_tokens = n_tiles * TOKENS;
    memset(sums, 0, n_tokens * sizeof *sums);
    uint32_t b = 0;
    for (; n_blocks - b >= (uint32_t)step; b += (uint32_t)step)
        add_blocks(sums, panel, b, step, x, t, n_tiles, type);
    for (; b < n_blocks; b++) add_blocks(sums, panel, b, 1, x, t, n_tiles, type);
    for (uint32_t i = 0; i < n_tokens; i++)
        store_rows(y + (t + i) * y_stride, rows, _mm512_load_ps(sums[i]));
}

// t1 - t0: whole tiles.
MATMUL_INLINE void matmul_q8(float *y, size_t y_stride, const panels *w, uint32_t p0, uint32_t p1,
                             const act_q8 *x, uint32_t t0, uint32_t t1, const dtype type) {
    const uint32_t step = u32_min(GROUP, matmul_token_step(w->n_cols, TOKENS));
    configure(ACT_BLOCK / n_dots_of(quant_traits_of[type]));
    for (uint32_t t = t0; t < t1; t += step) {
        const uint32_t n_tiles = u32_min(step, t1 - t) / TOKENS;
        for (uint32_t p = p0; p < p1; p++)
            panel_q8(y + (size_t)p * PANEL_ROWS, y_stride, rows_of(w, p),
                     w->data + p * w->panel_bytes, w->n_cols / PANEL_BLOCK, x, t, n_tiles, type);
    }
    __asm__ volatile("tilerelease");
}

static matmul_fn *few_tokens[DTYPE_COUNT];  // the kernels of AVX-512

#define KERNEL(isa, name, type)                                                                   \
    static void matmul_q8_##name##_##isa(float *y, size_t y_stride, const panels *w, uint32_t p0, \
                                         uint32_t p1, const matmul_input *x, uint32_t t0,         \
                                         uint32_t t1) {                                           \
        const uint32_t few = (t1 - t0) % TOKENS, mid = t1 - few;                                  \
        if (mid > t0) matmul_q8(y, y_stride, w, p0, p1, &x->q, t0, mid, type);                    \
        if (few) few_tokens[type](y, y_stride, w, p0, p1, x, mid, t1);                            \
    }
MATMUL_Q8_TYPES(KERNEL, amx)

void matmul_init_amx(cpu_kernels *k) {
    memcpy(few_tokens, k->matmul, sizeof few_tokens);
    MATMUL_Q8_TYPES(MATMUL_INSTALL_Q8, amx)
}
