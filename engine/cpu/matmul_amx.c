// Matrix products of many tokens with AMX. A tile instruction multiplies 16 tokens by a panel's 16
// rows in the time in which AVX-512 makes the int8 dots of two; its sums over a block are exact, in
// int8 or in bf16 (below), and AVX-512 scales and adds them, which takes most of the time.
//
// A few blocks of a panel are unpacked and wait in the first-level cache while all tokens pass,
// then the same blocks of the next panel, which meets the tokens' codes where this one left them;
// sums wait in scratch. Tokens that fill no tile are left to AVX-512: a tile filled up, or of fewer
// rows, was slower. Equal to matmul_scalar.c bit for bit.
#include <string.h>

#include "matmul_avx512.h"

enum {
    TOKENS = 16,      // of a tile
    TILE_BYTES = 64,  // of a row of a tile
    PASS = 512,       // tokens that pass
    SHARE = 16,       // panels that they pass together
    N_DOTS = 4,       // blocks unpacked at a time for dots of int8
    PAIR = 2          // and for sums of bf16
};

// As a register is stored: of each token 16 dots, integers or floats.
typedef uint8_t tile[TOKENS][TILE_BYTES];

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

// The intrinsics of gcc 12 do not tell the compiler which memory they read.
#define TILE_MEMORY(at, stride) ::"r"(at), "r"((int64_t)(stride)) : "memory"
#define TILE_LOAD(reg, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #reg TILE_MEMORY(from, stride))
#define TILE_STORE(reg, to) \
    __asm__ volatile("tilestored %%tmm" #reg ", (%0,%1,1)" TILE_MEMORY(to, TILE_BYTES))
#define TILE_ZERO(reg) __asm__ volatile("tilezero %%tmm" #reg ::)
#define TILE_DOT_INT8(sum, a, w) __asm__ volatile("tdpbssd %%tmm" #w ", %%tmm" #a ", %%tmm" #sum ::)
#define TILE_DOT_BF16(sum, a, w) \
    __asm__ volatile("tdpbf16ps %%tmm" #w ", %%tmm" #a ", %%tmm" #sum ::)

// While tiles multiply, conversions, products and fmas have one port instead of two, but additions
// keep both: so a dot, of magnitude below 2^22, becomes a float by two of them.
MATMUL_INLINE __m512 float_of_dot(__m512i dot) {
    const __m512 big = _mm512_set1_ps(0x1.8p23f);
    const __m512i bits = _mm512_add_epi32(dot, _mm512_castps_si512(big));
    return _mm512_sub_ps(_mm512_castsi512_ps(bits), big);
}

// Adds a block's dots of 16 tokens to their sums f. The first token's are the `first` of x.
MATMUL_INLINE void fold_tile(__m512 f[TOKENS], tile *dots, const weight_scales *s, const act_q8 *x,
                             size_t first, const quant_traits q) {
    const int n_neg = q.sub_width == 16 ? 2 : 1;
    _Alignas(64) float neg[2 * TOKENS];
    if (q.has_min) {
        const int32_t *const sums = n_neg == 2 ? x->neg_half + 2 * first : x->neg_sum + first;
        for (int i = 0; i < TOKENS * n_neg; i += 16)
            _mm512_store_ps(neg + i, _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + i)));
        __asm__("" : "+m"(neg));  // as in load_sums of matmul_avx512.c
    }
    MATMUL_UNROLL
    for (int i = 0; i < TOKENS; i++) {
        const __m512i dot = _mm512_load_si512((*dots)[i]);
        const __m512 sum = q.sub_width == 16 ? _mm512_castsi512_ps(dot) : float_of_dot(dot);
        f[i] = fold_sum(f[i], s, sum, x->d[first + (size_t)i], neg + i * n_neg, q);
    }
}

// Zeros if the block is a panel's first.
MATMUL_INLINE void resume_sums(__m512 f[TOKENS], float (*sums)[PANEL_ROWS],
                               const bool first_block) {
    const __mmask16 rows = first_block ? 0 : 0xffff;
    MATMUL_UNROLL
    for (int i = 0; i < TOKENS; i++) f[i] = _mm512_maskz_load_ps(rows, sums[i]);
}

MATMUL_INLINE void keep_sums(float (*sums)[PANEL_ROWS], const __m512 f[TOKENS]) {
    MATMUL_UNROLL
    for (int i = 0; i < TOKENS; i++) _mm512_store_ps(sums[i], f[i]);
}

// The sums [n] of tokens from t on are results.
MATMUL_INLINE void store_panel(float *y, size_t y_stride, const panels *w, uint32_t p,
                               float (*sums)[PANEL_ROWS], uint32_t t, uint32_t n) {
    float *const out = y + (size_t)p * PANEL_ROWS + t * y_stride;
    for (uint32_t i = 0; i < n; i++)
        store_rows(out + i * y_stride, rows_of(w, p), _mm512_load_ps(sums[i]));
}

// Block b of panel p; what comes later is asked for.
MATMUL_INLINE void next_block(weight_block *out, const panels *w, uint32_t p, uint32_t b,
                              const dtype type) {
    const panel_chunk at = panel_chunk_of(type);
    const uint8_t *const panel = w->data + p * w->panel_bytes;
    matmul_prefetch_block(w, p, SHARE, b, at);
    load_block(out, panel + (size_t)(b / at.blocks) * at.bytes, b % at.blocks, type);
}

typedef uint16_t bf16_codes[PASS][ACT_BLOCK];

typedef struct scratch {
    float sums[SHARE][PASS][PANEL_ROWS];
    bf16_codes codes[PAIR];
} scratch;

// --- Blocks of one scale: dots of int8 ---

MATMUL_INLINE void configure_int8(void) {
    tile_config c = {.palette = 1};
    for (int i = 0; i < N_DOTS; i++) c.rows[i] = TOKENS, c.row_bytes[i] = TILE_BYTES;
    c.rows[4] = TOKENS, c.row_bytes[4] = ACT_BLOCK;
    c.rows[5] = ACT_BLOCK / 4, c.row_bytes[5] = TILE_BYTES;
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
}

// Blocks that are read at a time.
typedef struct int8_blocks {
    _Alignas(64) int8_t words[N_DOTS][8][64];  // as in a panel of 8-bit codes, signed
    weight_scales scales[N_DOTS];
} int8_blocks;

MATMUL_INLINE void unpack_int8(int8_blocks *out, const panels *w, uint32_t p, uint32_t b,
                               const int n, const dtype type) {
    const __m512i bias = _mm512_set1_epi8((char)bias_of(quant_traits_of[type]));
    for (int i = 0; i < n; i++) {
        weight_block block;
        next_block(&block, w, p, b + (uint32_t)i, type);
        MATMUL_UNROLL
        for (int j = 0; j < 8; j++)
            _mm512_store_si512(out->words[i][j], _mm512_sub_epi8(block.word[j], bias));
        out->scales[i] = block.s;
    }
}

// Begins dots of 16 tokens in register i: of four some are stored while others are made. a: the
// first token's codes.
MATMUL_INLINE void start_int8(const int i, const int8_t *a, const int8_t *words) {
    TILE_LOAD(4, a, ACT_BLOCK);
    TILE_LOAD(5, words, TILE_BYTES);
    if (i == 0) {
        TILE_ZERO(0);
        TILE_DOT_INT8(0, 4, 5);
    } else if (i == 1) {
        TILE_ZERO(1);
        TILE_DOT_INT8(1, 4, 5);
    } else if (i == 2) {
        TILE_ZERO(2);
        TILE_DOT_INT8(2, 4, 5);
    } else {
        TILE_ZERO(3);
        TILE_DOT_INT8(3, 4, 5);
    }
}

MATMUL_INLINE void store_int8(tile *to, const int i) {
    if (i == 0) TILE_STORE(0, *to);
    if (i == 1) TILE_STORE(1, *to);
    if (i == 2) TILE_STORE(2, *to);
    if (i == 3) TILE_STORE(3, *to);
}

// Adds dots to the sums of 16 tokens, whose first are the `first` of block b, while those of the
// next 16 are made, if there are `more`.
MATMUL_INLINE void add_tile_int8(float (*sums)[PANEL_ROWS], const int8_blocks *w, const int n,
                                 const act_q8 *x, size_t first, const bool more,
                                 const quant_traits q) {
    tile dots[2] __attribute__((aligned(64)));
    __m512 f[TOKENS];
    resume_sums(f, sums, first < x->n_tokens);
    MATMUL_UNROLL
    for (int i = 0; i < n; i++) {
        const size_t at = first + (size_t)i * x->n_tokens;
        store_int8(&dots[i % 2], i);
        if (more) start_int8(i, x->q + (at + TOKENS) * ACT_BLOCK, w->words[i][0]);
        fold_tile(f, &dots[i % 2], &w->scales[i], x, at, q);
    }
    keep_sums(sums, f);
}

// Blocks [b, b + n) for n_tiles times 16 tokens from t on.
MATMUL_INLINE void add_int8(float (*sums)[PANEL_ROWS], const int8_blocks *w, uint32_t b,
                            const int n, const act_q8 *x, uint32_t t, uint32_t n_tiles,
                            const quant_traits q) {
    const size_t first = (size_t)b * x->n_tokens + t;
    MATMUL_UNROLL
    for (int i = 0; i < n; i++)
        start_int8(i, x->q + (first + (size_t)i * x->n_tokens) * ACT_BLOCK, w->words[i][0]);
    uint32_t i = 0;
    for (; i < (n_tiles - 1) * TOKENS; i += TOKENS)
        add_tile_int8(sums + i, w, n, x, first + i, true, q);
    add_tile_int8(sums + i, w, n, x, first + i, false, q);
}

// Blocks [b, b + n) of panel p.
MATMUL_INLINE void blocks_int8(float (*sums)[PANEL_ROWS], const panels *w, uint32_t p, uint32_t b,
                               const int n, const act_q8 *x, uint32_t t, uint32_t n_tiles,
                               const dtype type) {
    int8_blocks blocks;
    unpack_int8(&blocks, w, p, b, n, type);
    add_int8(sums, &blocks, b, n, x, t, n_tiles, quant_traits_of[type]);
}

// Panels [p0, p1), at most SHARE, for n_tiles times 16 tokens from t on.
MATMUL_INLINE void share_int8(scratch *s, const panels *w, uint32_t p0, uint32_t p1,
                              const act_q8 *x, uint32_t t, uint32_t n_tiles, const dtype type) {
    const uint32_t n_blocks = w->n_cols / PANEL_BLOCK, whole = n_blocks / N_DOTS * N_DOTS;
    for (uint32_t b = 0; b < n_blocks; b += b < whole ? N_DOTS : 1)
        for (uint32_t p = p0; p < p1; p++) {
            if (b < whole)
                blocks_int8(s->sums[p - p0], w, p, b, N_DOTS, x, t, n_tiles, type);
            else
                blocks_int8(s->sums[p - p0], w, p, b, 1, x, t, n_tiles, type);
        }
}

// --- Blocks whose halves have scales of their own: sums of bf16 products ---
//
// sub0 * dot0 + sub1 * dot1 is the sum of (q * sub) * a over the block. q * sub has at most 8
// significant bits, so that a bf16 holds it, or for Q6_K 13, which are cut into two. Of a column
// no part and no sum of parts is beyond 2^12, so that no sum of products in any order passes
// 32 * 127 * 2^12 < 2^24: floats hold them all. Weights are scaled by 2^-16 and activations by
// 2^16, which makes converting cheaper, and leaves no subnormals, which such tiles take for zeros.

typedef uint16_t bf16_words[16][2 * PANEL_ROWS];  // columns 2 i and 2 i + 1 of 16 rows

MATMUL_INLINE int parts_of(const dtype type) { return type == DTYPE_Q6_K ? 2 : 1; }

MATMUL_INLINE void configure_bf16(void) {
    tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) c.rows[i] = TOKENS, c.row_bytes[i] = TILE_BYTES;
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
}

// Two floats that bf16 holds, side by side.
MATMUL_INLINE __m512i bf16_pair(__m512 even, __m512 odd) {
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                           _mm512_castps_si512(odd));
}

// Codes of n tokens from a on.
MATMUL_INLINE void convert_codes(bf16_codes out, const int8_t *a, uint32_t n) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    for (uint32_t i = 0; i < n; i++) {
        const __m256i codes = _mm256_loadu_si256((const __m256i *)(a + i * ACT_BLOCK));
        const __m512i v = _mm512_cvtepi8_epi16(codes);
        _mm512_store_si512(out[i], bf16_pair(_mm512_cvtepi32_ps(_mm512_slli_epi32(v, 16)),
                                             _mm512_cvtepi32_ps(_mm512_and_si512(v, upper))));
    }
}

typedef struct bf16_blocks {
    _Alignas(64) bf16_words words[PAIR][2];  // the parts' sum is q * sub * 2^-16
    weight_scales scales[PAIR];
} bf16_blocks;

// Words 2 i and 2 i + 1 of all parts, from word i of a block.
MATMUL_INLINE void split_word(bf16_words *out, const weight_block *w, const int i,
                              const dtype type) {
    const int bias = bias_of(quant_traits_of[type]), n_parts = parts_of(type);
    const __m512i top = _mm512_set1_epi32((int)0xff000000);
    const __m512 upper = _mm512_castsi512_ps(_mm512_set1_epi32((int)0xffff0000));
    const __m512 by = _mm512_mul_ps(w->s.sub[i / 4], _mm512_set1_ps(0x1p-40f));
    const __m512 unbias = _mm512_mul_ps(by, _mm512_set1_ps((float)bias * -0x1p24f));
    __m512 v[4];
    MATMUL_UNROLL
    for (int k = 0; k < 4; k++) {
        const __m512i code = _mm512_and_si512(_mm512_slli_epi32(w->word[i], 24 - 8 * k), top);
        v[k] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), by, unbias);
    }
    MATMUL_UNROLL
    for (int part = 0; part < n_parts; part++) {
        __m512 bf16[4];
        MATMUL_UNROLL
        for (int k = 0; k < 4; k++) {
            bf16[k] = part + 1 < n_parts ? _mm512_and_ps(v[k], upper) : v[k];
            v[k] = _mm512_sub_ps(v[k], bf16[k]);
        }
        _mm512_store_si512(out[part][2 * i], bf16_pair(bf16[0], bf16[1]));
        _mm512_store_si512(out[part][2 * i + 1], bf16_pair(bf16[2], bf16[3]));
    }
}

MATMUL_INLINE void unpack_bf16(bf16_blocks *out, const panels *w, uint32_t p, uint32_t b,
                               const dtype type) {
    for (int i = 0; i < PAIR; i++) {
        weight_block block;
        next_block(&block, w, p, b + (uint32_t)i, type);
        MATMUL_UNROLL
        for (int k = 0; k < 8; k++) split_word(out->words[i], &block, k, type);
        out->scales[i] = block.s;
    }
}

// Weights of block i lie in registers 2 i and 2 i + 1, its sums in 6 + i.
MATMUL_INLINE void load_bf16(const bf16_blocks *w, const int n_parts) {
    TILE_LOAD(0, w->words[0][0], TILE_BYTES);
    TILE_LOAD(2, w->words[1][0], TILE_BYTES);
    if (n_parts == 1) return;
    TILE_LOAD(1, w->words[0][1], TILE_BYTES);
    TILE_LOAD(3, w->words[1][1], TILE_BYTES);
}

// a: codes of 16 tokens.
MATMUL_INLINE void start_bf16(const int i, const uint16_t *a, const int n_parts) {
    if (i == 0) {
        TILE_LOAD(4, a, TILE_BYTES);
        TILE_ZERO(6);
        TILE_DOT_BF16(6, 4, 0);
        if (n_parts == 2) TILE_DOT_BF16(6, 4, 1);
    } else {
        TILE_LOAD(5, a, TILE_BYTES);
        TILE_ZERO(7);
        TILE_DOT_BF16(7, 5, 2);
        if (n_parts == 2) TILE_DOT_BF16(7, 5, 3);
    }
}

MATMUL_INLINE void store_bf16(tile *to, const int i) {
    if (i == 0) TILE_STORE(6, *to);
    if (i == 1) TILE_STORE(7, *to);
}

// As add_tile_int8. a: codes of both blocks, `next` those of the first of the next tokens.
MATMUL_INLINE void add_tile_bf16(float (*sums)[PANEL_ROWS], const bf16_blocks *w, bf16_codes *a,
                                 uint32_t next, const act_q8 *x, size_t first, const bool more,
                                 const dtype type) {
    tile dots[PAIR] __attribute__((aligned(64)));
    __m512 f[TOKENS];
    resume_sums(f, sums, first < x->n_tokens);
    MATMUL_UNROLL
    for (int i = 0; i < PAIR; i++) {
        store_bf16(&dots[i], i);
        if (more) start_bf16(i, a[i][next], parts_of(type));
        fold_tile(f, &dots[i], &w->scales[i], x, first + (size_t)i * x->n_tokens,
                  quant_traits_of[type]);
    }
    keep_sums(sums, f);
}

// As add_int8, blocks b and b + 1. a: their codes from token t on.
MATMUL_INLINE void add_bf16(float (*sums)[PANEL_ROWS], const bf16_blocks *w, uint32_t b,
                            bf16_codes *a, const act_q8 *x, uint32_t t, uint32_t n_tiles,
                            const dtype type) {
    const size_t first = (size_t)b * x->n_tokens + t;
    load_bf16(w, parts_of(type));
    MATMUL_UNROLL
    for (int i = 0; i < PAIR; i++) start_bf16(i, a[i][0], parts_of(type));
    uint32_t i = 0;
    for (; i < (n_tiles - 1) * TOKENS; i += TOKENS)
        add_tile_bf16(sums + i, w, a, i + TOKENS, x, first + i, true, type);
    add_tile_bf16(sums + i, w, a, 0, x, first + i, false, type);
}

// As share_int8.
MATMUL_INLINE void share_bf16(scratch *s, const panels *w, uint32_t p0, uint32_t p1,
                              const act_q8 *x, uint32_t t, uint32_t n_tiles, const dtype type) {
    for (uint32_t b = 0; b < w->n_cols / PANEL_BLOCK; b += PAIR) {
        for (uint32_t i = 0; i < PAIR; i++)
            convert_codes(s->codes[i], x->q + ((size_t)(b + i) * x->n_tokens + t) * ACT_BLOCK,
                          n_tiles * TOKENS);
        for (uint32_t p = p0; p < p1; p++) {
            bf16_blocks blocks;
            unpack_bf16(&blocks, w, p, b, type);
            add_bf16(s->sums[p - p0], &blocks, b, s->codes, x, t, n_tiles, type);
        }
    }
}

// --- Kernels ---

// t1 - t0: whole tiles.
MATMUL_INLINE void matmul_tiles(float *y, size_t y_stride, const panels *w, uint32_t p0,
                                uint32_t p1, const matmul_input *in, uint32_t t0, uint32_t t1,
                                const dtype type) {
    const bool halves = quant_traits_of[type].sub_width == 16;
    const act_q8 x = in->q;  // a copy: nothing that tiles store can be in it
    scratch *const s = in->scratch;
    if (halves)
        configure_bf16();
    else
        configure_int8();
    for (uint32_t t = t0; t < t1; t += PASS) {
        const uint32_t n = u32_min(PASS, t1 - t);
        for (uint32_t p = p0; p < p1; p += SHARE) {
            const uint32_t end = u32_min(p + SHARE, p1);
            if (halves)
                share_bf16(s, w, p, end, &x, t, n / TOKENS, type);
            else
                share_int8(s, w, p, end, &x, t, n / TOKENS, type);
            for (uint32_t i = p; i < end; i++) store_panel(y, y_stride, w, i, s->sums[i - p], t, n);
        }
    }
    __asm__ volatile("tilerelease");
}

static matmul_fn *few_tokens[DTYPE_COUNT];  // of AVX-512

#define KERNEL(isa, name, type)                                                                   \
    static void matmul_q8_##name##_##isa(float *y, size_t y_stride, const panels *w, uint32_t p0, \
                                         uint32_t p1, const matmul_input *x, uint32_t t0,         \
                                         uint32_t t1) {                                           \
        const uint32_t few = (t1 - t0) % TOKENS, mid = t1 - few;                                  \
        if (mid > t0) matmul_tiles(y, y_stride, w, p0, p1, x, t0, mid, type);                     \
        if (few) few_tokens[type](y, y_stride, w, p0, p1, x, mid, t1);                            \
    }
MATMUL_Q8_TYPES(KERNEL, amx)

void matmul_init_amx(cpu_kernels *k) {
    memcpy(few_tokens, k->matmul, sizeof few_tokens);
    k->matmul_scratch = sizeof(scratch);
    MATMUL_Q8_TYPES(MATMUL_INSTALL_Q8, amx)
}
