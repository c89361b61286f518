// The CPU's arithmetic: one table of functions per instruction set. The *_scalar.c files are the
// definition; every other table must equal it bit for bit, for any split of the work
// (tests/kernel_check.c compares them by memcmp).
//
// Rules that make this possible: SIMD lanes are outputs, so each output is summed in one order;
// integer dots are exact; norms reduce on a virtual 16-lane machine; no contraction by the
// compiler, every fma is written; results are canonical: no kernel that sums returns -0 where
// noted, and a NaN is always the quiet NaN 0x7fc00000.
#ifndef MF_CPU_KERNELS_H
#define MF_CPU_KERNELS_H

#include "../kvformat.h"
#include "../op.h"
#include "panel.h"

enum {
    ACT_BLOCK = 32,     // elements that share one activation scale
    ATTN_TILE = 64,     // positions per attention tile, aligned to position 0
    ATTN_LANES = 16,    // virtual lanes of the softmax denominator
    HEAD_DIM_MAX = 512  // head_dim is a multiple of 16
};

// Activations of n_tokens tokens, quantised: x ~ q * d, |q| <= 127, in blocks of 32, block-major so
// that a weight block meets its tokens side by side. d = amax/127; q = x * (127/amax) to nearest,
// ties to even. A block whose amax is below 0x1p-100 is zero (q = 0, d = 0); one with a NaN or Inf
// has q = 0, d = NaN.
typedef struct act_q8 {
    uint32_t n_tokens;  // the stride between blocks
    int8_t *q;          // [n_blocks][n_tokens][32], 64-byte aligned
    float *d;           // [n_blocks][n_tokens]
    int32_t *neg_sum;   // [n_blocks][n_tokens]       -(sum of q)
    int32_t *neg_half;  // [n_blocks][n_tokens][2]    the same for elements 0..15 and 16..31
} act_q8;

typedef struct matmul_input {
    const float *f;  // [n_tokens][f_stride]; read by weights in F32, F16, BF16
    size_t f_stride;
    act_q8 q;       // read by all others; n_cols % 32 == 0
    void *scratch;  // matmul_scratch bytes of the calling thread's, 64-byte aligned; written over
} matmul_input;

enum { MATMUL_PANELS = 4 };  // that kernels read side by side when tokens are few

// y[t * y_stride + r] = W[r] . x[t] for the rows of panels [p0, p1) and tokens [t0, t1). Rows
// beyond n_rows are not written. Float weights: fma over columns in order. Quantised: per block of
// 32 columns, in order,
//   f = fma((float)dot, scale * d, f), then, for types with minima, f = fma((float)neg_sum, min *
//   d, f);
// see panel.h for scale, min and dot per type. Result + 0 (no -0), NaN canonical.
typedef void matmul_fn(float *y, size_t y_stride, const panels *w, uint32_t p0, uint32_t p1,
                       const matmul_input *x, uint32_t t0, uint32_t t1);

// Queries of one KV head as packed rows are asked: in blocks of 32 as act_q8 has them, row r at
// element at = i * stride + g * head_dim, its blocks at at / 32.
typedef struct attn_packed {
    const int8_t *q;
    const float *d;
    const int32_t *neg_sum;
    size_t stride;  // a multiple of 32
} attn_packed;

// One KV head's attention. Rows r = i * group + g are query i (position pos0 + i), query head g of
// the KV head.
typedef struct attn_job {
    const float *q;  // row r at q + i * q_stride + g * head_dim
    size_t q_stride;
    attn_packed packed;  // the same; read with q8_0 rows only
    float *out;          // same layout, own stride
    size_t out_stride;
    uint32_t head_dim;
    uint32_t group;  // query heads per KV head
    uint32_t n_queries;
    uint32_t pos0;
    uint32_t window;  // keys a query sees, itself included; UINT32_MAX: all
    float scale;      // of q . k
    float softcap;    // 0: none; else cap * tanh(scale * dot / cap)
} attn_job;

// Softmax over the keys a query sees, in position order, tile by tile. Of the keys a row reads in a
// tile: dot = fma over elements in order, f16 rows as the floats they are; of q8_0 rows
// dot = fma((float)int_dot, k.d * q.d, dot) over blocks of 32 in order, int_dot exact. With a soft
// cap dot = cap * tanh(dot * (scale / cap));
// c = log2(e) * scale, or log2(e) with a soft cap. max_t = c * (largest dot, NaNs passed over) + 0,
// at least -FLT_MAX; p = exp2(min(fma(dot, c, -max_t), 0)); lane i sums p of keys i, i+16, ...;
// acc_t = fma of p * v over keys in order, v the exact float of the stored element. Then, max'
// being the larger of max and max_t, acc = fma(acc_t, exp2(max_t - max'), acc * exp2(max - max')),
// lanes likewise.
//
// Attention state of rows: acc [n_rows][head_dim], lanes [n_rows][16], max [n_rows]; start: 0, 0,
// -Inf. A max of -Inf means that the row has read no key yet.
typedef struct attn_state {
    float *acc, *lanes, *max;
} attn_state;

// Per-thread scratch of an attention kernel, 64-byte aligned.
enum {
    KV_BLOCK = KV_PACKED_BLOCK,
    KV_BLOCK_BYTES = 34,  // its scale as an f16, then 32 codes
    ATTN_SCRATCH_BYTES = (HEAD_DIM_MAX * ATTN_TILE * 2 + 16 * ATTN_TILE +
                          HEAD_DIM_MAX / KV_BLOCK * ATTN_TILE * 2 + 64) *
                         4
};

// Folds one tile into the state of the queries [i0, i1) (state row 0 is query i0, head 0).
// k_rows[x], v_rows[x]: the head's elements of position tile * 64 + x in the kernel's format, both
// NULL where the position has no row: an absent key is not touched, neither its memory nor, with p
// = 0, in the sums. Entries of positions that no query of [i0, i1) sees are not looked at. A row
// that reads no key of the tile keeps its state. next_k, next_v: the following tile's, NULL entries
// where absent; for prefetch only.
typedef void attn_tile_fn(const attn_job *job, uint32_t i0, uint32_t i1, uint32_t tile,
                          const void *const k_rows[ATTN_TILE], const void *const v_rows[ATTN_TILE],
                          const void *const next_k[ATTN_TILE], const void *const next_v[ATTN_TILE],
                          attn_state *state, void *scratch);
// Folds `part` (the state of one tile alone) into `state`, exactly as attn_tile does; called in the
// order of tiles. Rows of `part` that have read no key change nothing.
typedef void attn_merge_fn(uint32_t n_rows, uint32_t head_dim, const attn_state *part,
                           attn_state *state);
// out = acc / tree(lanes) + 0, one NaN; writes the rows of the queries [i0, i1).
typedef void attn_finish_fn(const attn_job *job, uint32_t i0, uint32_t i1, const attn_state *state);

// Bytes from one head of a row to the next.
static inline size_t kv_head_bytes(kv_format format, uint32_t head_dim) {
    return format == KV_FORMAT_Q8_0 ? (size_t)head_dim / KV_BLOCK * KV_BLOCK_BYTES
                                    : kv_format_row_bytes(format, head_dim);
}

// n elements of a row, a multiple of 32 for q8_0, from and to floats. f32: verbatim. f16: to
// nearest, ties to even, beyond 65504 Inf; one NaN, 0x7e00. q8_0, of each block of 32:
// d = amax / 127 rounded like an f16, codes = x * (127 / amax) to nearest, ties to even. A block
// whose d would be 0 is all zero; one with a NaN or Inf, or whose d would be Inf, has codes 0 and
// d = 0x7e00. Loading is exact, d * code.
typedef void kv_store_fn(void *row, const float *x, uint32_t n);
typedef void kv_load_fn(float *x, const void *row, uint32_t n);

// Multiply-adds of registers alone, a multiple of `rounds`; returns how many. Nothing is computed:
// their rate is what this instruction set can reach on one core, in the vector instructions that
// its kernels use.
typedef uint64_t peak_fn(uint64_t rounds);

typedef struct cpu_kernels {
    const char *name;  // "avx512"
    matmul_fn *matmul[DTYPE_COUNT];
    size_t matmul_scratch;  // bytes, a multiple of 64

    // Quantises tokens [t0, t1) of x [.][x_stride], n_cols columns (a multiple of 32).
    void (*quantize)(act_q8 *out, const float *x, size_t x_stride, uint32_t n_cols, uint32_t t0,
                     uint32_t t1);
    // y = x * (1 / sqrt(mean(x^2) + eps)) * w. The mean's sum: lane i adds x^2 (fma) over i, i+16,
    // ...; tree 8, 4, 2, 1. w may be NULL. y may be x, in all that follow too.
    void (*rms_norm)(float *y, const float *x, const float *w, uint32_t n, float eps);
    // Rotates the first n_rot elements of each of n_heads heads in place; cos, sin [n_rot/2]. Pairs
    // are (i, i + n_rot/2), or (2i, 2i+1) if interleaved. x0' = fma(x0, c, -(x1*s)), x1' = fma(x1,
    // c, x0*s).
    void (*rope)(float *x, const float *cos, const float *sin, uint32_t n_heads, uint32_t head_dim,
                 uint32_t n_rot, bool interleaved);
    void (*glu)(float *y, const float *gate, const float *up, uint32_t n,
                glu_kind kind);  // act(gate) * up
    void (*add)(float *y, const float *a, const float *b, uint32_t n);
    void (*scale)(float *y, const float *x, float by, uint32_t n);
    void (*softcap)(float *y, const float *x, float cap, uint32_t n);  // cap * tanh(x / cap)

    kv_store_fn *kv_store[KV_FORMAT_COUNT];
    kv_load_fn *kv_load[KV_FORMAT_COUNT];
    attn_tile_fn *attn_tile[KV_FORMAT_COUNT];
    attn_merge_fn *attn_merge;
    attn_finish_fn *attn_finish;

    peak_fn *peak_int8;  // products of bytes, added in 32 bits
    peak_fn *peak_f32;   // fused
} cpu_kernels;

// Tables, NULL where this build or machine has none. Best first in kernels_list.
const cpu_kernels *kernels_scalar(void);
const cpu_kernels *kernels_find(const char *isa);  // NULL: unknown name or not present
size_t kernels_list(const cpu_kernels *list[8]);
const char *kernels_names(void);  // of kernels_list, comma separated
// The table of that name; NULL: MINFER_ISA's, else the best. MF_ARG names one that is not present.
int kernels_choose(const cpu_kernels **out, const char *isa);

// Each ISA's files fill in what they have, on top of the scalar table (dispatch.c calls them in ISA
// order).
void matmul_init_scalar(cpu_kernels *k);
void matmul_init_avx2(cpu_kernels *k);
void matmul_init_avx512(cpu_kernels *k);
void matmul_init_amx(cpu_kernels *k);
void matmul_init_neon(cpu_kernels *k);
void matmul_init_dotprod(cpu_kernels *k);
void rows_init_scalar(cpu_kernels *k);
void ops_init_scalar(cpu_kernels *k);
void ops_init_avx2(cpu_kernels *k);
void ops_init_avx512(cpu_kernels *k);
void ops_init_neon(cpu_kernels *k);
void attn_init_scalar(cpu_kernels *k);
void attn_init_avx2(cpu_kernels *k);
void attn_init_avx512(cpu_kernels *k);
void attn_init_neon(cpu_kernels *k);
void peak_init_scalar(cpu_kernels *k);
void peak_init_avx2(cpu_kernels *k);
void peak_init_avx512(cpu_kernels *k);
void peak_init_neon(cpu_kernels *k);
void peak_init_dotprod(cpu_kernels *k);

#endif
