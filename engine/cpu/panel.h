// Weights as the CPU reads them: panels of 16 output rows whose lanes are rows, column blocks in
// order inside a panel. A panel stores integer codes and scales only, no more bytes than the file
// to within a few percent; every instruction set reads the same layout, so a packed model serves
// them all.
//
// Float types (F32, F16, BF16): [n_cols][16] values in the file's own width.
//
// Quantised types: chunks of 2 blocks of 32 columns (a last odd block leaves half a chunk unused)
// or, for the types with blocks of 256, of 8. A chunk holds for its blocks, in this order (offsets
// in panel_chunk):
//   low, high  The codes' lower and upper bits, one plane each per block, 64 * bits bytes. Its 32
//              columns are 8 words of 4. Word w of row r lies in bytes [w % bits * 64 + 4 * r, + 4)
//              of the plane, column 4 * w + i in byte i, shifted left by w / bits * bits: the
//              order of vpdpbusd and sdot, 16 rows side by side. code = low | high << low_bits
//   sub        int8 [blocks][32 / sub_width][16 rows]; for Q2_K sub | sub_min << 4 in one byte
//   sub_min    the same, for the types with minima except Q2_K
//   d, min     uint16 [2][16 rows], or [16 rows] for a chunk of 8
//
// What a matrix product computes, in the names of quant.h; a: the activations' codes, ad: their
// scale (act_q8 in kernels.h). q = code - bias, or codebook[code]. dot = the sum of q * a over a
// block of 32 columns, dot0 and dot1 over its halves, n, n0 and n1 the negated sums of a: integers,
// exact. f starts at 0; for each block in order
//   Q4_0 Q5_0 Q8_0 IQ4_NL MXFP4  f = fma(dot, d * ad, f)
//   Q4_1 Q5_1                    f = fma(dot, d * ad, f)
//                                f = fma(n, min * ad, f)
//   IQ4_XS                       f = fma(dot, (d * sub) * ad, f)
//   Q4_K Q5_K                    f = fma(dot, (d * sub) * ad, f)
//                                f = fma(n, (min * sub_min) * ad, f)
//   Q3_K Q6_K                    f = fma(sub0 * dot0 + sub1 * dot1, d * ad, f)
//   Q2_K                         f = fma(sub0 * dot0 + sub1 * dot1, d * ad, f)
//                                f = fma(sub_min0 * n0 + sub_min1 * n1, min * ad, f)
// d * sub and min * sub_min are exact in f32 (11 + 6 bits), and every integer stays below 2^24. At
// the end f + 0, and one NaN.
#ifndef MF_CPU_PANEL_H
#define MF_CPU_PANEL_H

#include "../quant.h"

enum { PANEL_ROWS = 16, PANEL_BLOCK = 32 };

typedef struct panels {
    dtype type;
    uint32_t n_rows, n_cols;
    uint32_t n_panels;   // n_rows / 16, rounded up; the missing rows are zero
    size_t panel_bytes;  // a multiple of 64
    size_t bytes;        // n_panels * panel_bytes
    uint8_t *data;       // 64-byte aligned, owned by the caller
} panels;

// Fills in everything but data. MF_UNSUPPORTED or MF_FORMAT when n_cols is not whole blocks,
// MF_LIMIT when sizes wrap.
int panels_layout(panels *out, dtype type, uint32_t n_rows, uint32_t n_cols);
// Packs panels [p0, p1) from `rows`: all n_rows rows in the file's format.
void panels_pack(panels *p, const void *rows, uint32_t p0, uint32_t p1);
// out [n_cols] = row `row`, dequantised: the values the matrix product multiplies, each rounded once.
void panels_row(float *out, const panels *p, uint32_t row);

// Byte offsets inside a chunk of a quantised type. Constant for a constant type.
typedef struct panel_chunk {
    uint32_t blocks;  // of 32 columns
    uint32_t low, high, sub, sub_min, d, min, bytes;
} panel_chunk;

static inline panel_chunk panel_chunk_of(dtype type) {
    const quant_traits q = quant_traits_of[type];
    const uint32_t blocks = q.sub_width ? 8 : 2;
    const uint32_t scales = (q.sub_width ? 1 : blocks) * PANEL_ROWS * 2;
    const uint32_t subs = q.sub_width ? blocks * (32u / q.sub_width) * PANEL_ROWS : 0;
    const bool own_sub_min = q.has_min && q.sub_width == 32;
    panel_chunk out = {.blocks = blocks, .low = 0};
    out.high = out.low + blocks * 64 * q.low_bits;
    out.sub = out.high + blocks * 64 * q.high_bits;
    out.sub_min = out.sub + subs;
    out.d = out.sub_min + (own_sub_min ? subs : 0);
    out.min = out.d + scales;
    out.bytes = (out.min + (q.has_min ? scales : 0) + 63) / 64 * 64;
    return out;
}

// 32 columns of one row of a quantised type, for the scalar definition and for reading rows back.
typedef struct panel_block {
    int8_t q[PANEL_BLOCK];
    float scale, min;  // with 16-wide sub-scales d and min, else d * sub and min * sub_min
    int32_t sub[2], sub_min[2];  // of columns 0..15 and 16..31 where sub-scales are 16 wide, else 1
} panel_block;

void panel_read(panel_block *out, const panels *p, uint32_t row, uint32_t block);
// Column `col` of `row` of a float type.
float panel_value(const panels *p, uint32_t row, uint32_t col);

#endif
