// Layer 1: the quantised tensor types, as the file stores them: one block of any type to integer
// codes and scales.
//
// Every type is one form. Element i of a block, in column order, is
//     d * sub * q - min * sub_min      with  q = code - bias,  or  q = codebook[code]
// where d and min belong to the block, the small integers sub and sub_min to 16 or 32 columns of it
// (1 and 1 for types without), and min is 0 for types without minima. Q4_1 and Q5_1 add their
// minimum: their `min` is its negative.
#ifndef MF_QUANT_H
#define MF_QUANT_H

#include "dtype.h"

enum { QUANT_BLOCK_MAX = 256, QUANT_SUBS_MAX = 16 };

typedef enum quant_codebook { CODEBOOK_NONE, CODEBOOK_IQ4, CODEBOOK_MXFP4 } quant_codebook;

typedef struct quant_traits {
    uint8_t low_bits;  // a code is low_bits + high_bits wide; both 0: not a quantised type
    uint8_t high_bits;
    uint8_t bias;       // without a codebook
    uint8_t codebook;   // quant_codebook
    uint8_t sub_width;  // columns that share sub and sub_min: 16 or 32; 0: the block has none
    bool has_min;
    bool d_is_bf16;  // the d handed out: bf16 (exact for MXFP4's powers of two), else f16
} quant_traits;

// A static table, so that a kernel instantiated for one type sees constants.
static const quant_traits quant_traits_of[DTYPE_COUNT] = {
    [DTYPE_Q4_0] = {.low_bits = 4, .bias = 8},
    [DTYPE_Q4_1] = {.low_bits = 4, .has_min = true},
    [DTYPE_Q5_0] = {.low_bits = 4, .high_bits = 1, .bias = 16},
    [DTYPE_Q5_1] = {.low_bits = 4, .high_bits = 1, .has_min = true},
    [DTYPE_Q8_0] = {.low_bits = 8, .bias = 128},
    [DTYPE_Q2_K] = {.low_bits = 2, .sub_width = 16, .has_min = true},
    [DTYPE_Q3_K] = {.low_bits = 2, .high_bits = 1, .bias = 4, .sub_width = 16},
    [DTYPE_Q4_K] = {.low_bits = 4, .sub_width = 32, .has_min = true},
    [DTYPE_Q5_K] = {.low_bits = 4, .high_bits = 1, .sub_width = 32, .has_min = true},
    [DTYPE_Q6_K] = {.low_bits = 4, .high_bits = 2, .bias = 32, .sub_width = 16},
    [DTYPE_IQ4_NL] = {.low_bits = 4, .codebook = CODEBOOK_IQ4},
    [DTYPE_IQ4_XS] = {.low_bits = 4, .codebook = CODEBOOK_IQ4, .sub_width = 32},
    [DTYPE_MXFP4] = {.low_bits = 4, .codebook = CODEBOOK_MXFP4, .d_is_bf16 = true},
};

// [codebook][code]; MXFP4's are twice the E2M1 values, and its d is half the block's scale.
extern const int8_t quant_codebooks[3][16];

// One block. Only the fields the type has are written.
typedef struct quant_block {
    uint8_t code[QUANT_BLOCK_MAX];
    uint16_t d, min;  // bits of an f16 (d: or bf16)
    int8_t sub[QUANT_SUBS_MAX], sub_min[QUANT_SUBS_MAX];
} quant_block;

// `type` has a row in quant_traits_of; bytes [dtype_get(type)->block_bytes].
void quant_read(quant_block *out, dtype type, const uint8_t *bytes);

// The exact f32 value; a NaN stays one.
float f16_to_f32(uint16_t bits);
float bf16_to_f32(uint16_t bits);

#endif
