// The block formats of GGUF. Owns where each bit of a code, scale or minimum lies in the file, and
// nothing else: bytes come in with their length already checked, and no value is refused (a scale
// may be NaN; that is the file's affair).

#include "quant.h"

#include <string.h>

const int8_t quant_codebooks[3][16] = {
    [CODEBOOK_IQ4] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    [CODEBOOK_MXFP4] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

static uint16_t load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

float bf16_to_f32(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float out;
    memcpy(&out, &wide, sizeof out);
    return out;
}

float f16_to_f32(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    uint32_t wide;
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
        const float magnitude = (float)fraction * 0x1p-24f;
        memcpy(&wide, &magnitude, sizeof wide);
    } else if (exponent == 31) {
        wide = 0x7f800000 | fraction << 13;
    } else {
        wide = (exponent + 112) << 23 | fraction << 13;
    }
    wide |= sign;
    float out;
    memcpy(&out, &wide, sizeof out);
    return out;
}

// 16 bytes: columns 0..15 in the low nibbles, 16..31 in the high ones.
static void read_nibbles(uint8_t code[32], const uint8_t *bytes) {
    for (int i = 0; i < 16; i++) {
        code[i] = bytes[i] & 15;
        code[i + 16] = bytes[i] >> 4;
    }
}

// 32 bytes: columns 0..31 low, 32..63 high (the K types' order, in groups of 64 columns).
static void read_wide_nibbles(uint8_t code[64], const uint8_t *bytes) {
    for (int i = 0; i < 32; i++) {
        code[i] = bytes[i] & 15;
        code[i + 32] = bytes[i] >> 4;
    }
}

// 4 bytes: bit i is the fifth bit of column i.
static void read_fifth_bits(uint8_t code[32], const uint8_t *bytes) {
    uint32_t bits;
    memcpy(&bits, bytes, sizeof bits);
    for (int i = 0; i < 32; i += 8) {
        // Bit k of a byte to byte k, where it becomes the top bit without a carry, then bit 4.
        uint64_t codes, spread = ((bits >> i & 0xff) * 0x0101010101010101u) & 0x8040201008040201u;
        spread = ((spread + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
        memcpy(&codes, code + i, sizeof codes);
        codes |= spread;
        memcpy(code + i, &codes, sizeof codes);
    }
}

// 64 bytes of 2-bit codes: in each group of 128 columns, column c lies in byte c % 32, bits 2 * (c
// / 32).
static void read_pairs(uint8_t code[256], const uint8_t *bytes) {
    for (int g = 0; g < 2; g++) {
        for (int j = 0; j < 4; j++) {
            for (int i = 0; i < 32; i++)
                code[g * 128 + j * 32 + i] = bytes[g * 32 + i] >> 2 * j & 3;
        }
    }
}

// 32 bytes: bit c / 32 of byte c % 32 belongs to column c; it becomes bit `to` of the code.
static void read_top_bits(uint8_t code[256], const uint8_t *bytes, int to) {
    for (int j = 0; j < 8; j++) {
        for (int i = 0; i < 32; i++) code[j * 32 + i] |= (uint8_t)((bytes[i] >> j & 1) << to);
    }
}

// 12 bytes of 6-bit scales and minima of Q4_K and Q5_K: the last four take their upper two bits
// from the first four's bytes.
static void read_packed_subs(int8_t sub[8], int8_t sub_min[8], const uint8_t s[12]) {
    for (int i = 0; i < 4; i++) {
        sub[i] = (int8_t)(s[i] & 63);
        sub_min[i] = (int8_t)(s[i + 4] & 63);
        sub[i + 4] = (int8_t)((s[i + 8] & 15) | s[i] >> 6 << 4);
        sub_min[i + 4] = (int8_t)(s[i + 8] >> 4 | s[i + 4] >> 6 << 4);
    }
}

// d, 16 nibble bytes.
static void read_q4_0(quant_block *out, const uint8_t *bytes) {
    out->d = load_u16(bytes);
    read_nibbles(out->code, bytes + 2);
}

// d, m, 16 nibble bytes.
static void read_q4_1(quant_block *out, const uint8_t *bytes) {
    out->d = load_u16(bytes);
    out->min = load_u16(bytes + 2) ^ 0x8000;
    read_nibbles(out->code, bytes + 4);
}

// d, 4 bytes of fifth bits, 16 nibble bytes.
static void read_q5_0(quant_block *out, const uint8_t *bytes) {
    out->d = load_u16(bytes);
    read_nibbles(out->code, bytes + 6);
    read_fifth_bits(out->code, bytes + 2);
}

// d, m, 4 bytes of fifth bits, 16 nibble bytes.
static void read_q5_1(quant_block *out, const uint8_t *bytes) {
    out->d = load_u16(bytes);
    out->min = load_u16(bytes + 2) ^ 0x8000;
    read_nibbles(out->code, bytes + 8);
    read_fifth_bits(out->code, bytes + 4);
}

// d, 32 signed bytes.
static void read_q8_0(quant_block *out, const uint8_t *bytes) {
    out->d = load_u16(bytes);
    for (int i = 0; i < 32; i++) out->code[i] = bytes[2 + i] ^ 0x80;  // signed to biased by 128
}

// 16 bytes of (scale, minimum) nibbles, 64 bytes of 2-bit codes, d, dmin.
static void read_q2_k(quant_block *out, const uint8_t *bytes) {
    for (int i = 0; i < 16; i++) {
        out->sub[i] = (int8_t)(bytes[i] & 15);
        out->sub_min[i] = (int8_t)(bytes[i] >> 4);
    }
    read_pairs(out->code, bytes + 16);
    out->d = load_u16(bytes + 80);
    out->min = load_u16(bytes + 82);
}

// 32 bytes of third bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, d. The
// scales' low nibbles fill 8 bytes (0..7 low, 8..15 high), their upper pairs 4 (i % 4, bits 2 * (i
// / 4)).
static void read_q3_k(quant_block *out, const uint8_t *bytes) {
    const uint8_t *const scales = bytes + 96;
    read_pairs(out->code, bytes + 32);
    read_top_bits(out->code, bytes, 2);
    for (int i = 0; i < 16; i++) {
        const int low = scales[i % 8] >> (i / 8 * 4) & 15;
        const int high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        out->sub[i] = (int8_t)((low | high << 4) - 32);
    }
    out->d = load_u16(bytes + 108);
}

// d, dmin, 12 bytes of scales and minima, 128 nibble bytes.
static void read_q4_k(quant_block *out, const uint8_t *bytes) {
    out->d = load_u16(bytes);
    out->min = load_u16(bytes + 2);
    read_packed_subs(out->sub, out->sub_min, bytes + 4);
    for (int g = 0; g < 4; g++) read_wide_nibbles(out->code + 64 * g, bytes + 16 + 32 * g);
}

// d, dmin, 12 bytes of scales and minima, 32 bytes of fifth bits, 128 nibble bytes.
static void read_q5_k(quant_block *out, const uint8_t *bytes) {
    out->d = load_u16(bytes);
    out->min = load_u16(bytes + 2);
    read_packed_subs(out->sub, out->sub_min, bytes + 4);
    for (int g = 0; g < 4; g++) read_wide_nibbles(out->code + 64 * g, bytes + 48 + 32 * g);
    read_top_bits(out->code, bytes + 16, 4);
}

// 128 nibble bytes, 64 bytes of upper pairs, 16 signed scales, d. In each group of 128 columns the
// low nibbles of 64 bytes hold columns 0..63 and the high ones 64..127.
static void read_q6_k(quant_block *out, const uint8_t *bytes) {
    uint8_t pairs[256];
    read_pairs(pairs, bytes + 128);
    for (int g = 0; g < 4; g++) {  // 64 columns
        const uint8_t *const low = bytes + g / 2 * 64;
        for (int i = 0; i < 64; i++) out->code[g * 64 + i] = low[i] >> g % 2 * 4 & 15;
    }
    for (int c = 0; c < 256; c++) out->code[c] |= (uint8_t)(pairs[c] << 4);
    memcpy(out->sub, bytes + 192, 16);
    out->d = load_u16(bytes + 208);
}

// d, 2 bytes of the 8 scales' upper pairs, 4 bytes of their low nibbles, 128 nibble bytes (16 per
// 32 columns).
static void read_iq4_xs(quant_block *out, const uint8_t *bytes) {
    const int high_bits = load_u16(bytes + 2);
    out->d = load_u16(bytes);
    for (int i = 0; i < 8; i++) {
        const int low = bytes[4 + i / 2] >> (i % 2 * 4) & 15;
        out->sub[i] = (int8_t)((low | (high_bits >> 2 * i & 3) << 4) - 32);
        read_nibbles(out->code + 32 * i, bytes + 8 + 16 * i);
    }
}

// One exponent byte e, 16 nibble bytes. d = 2^(e - 128) as bf16: normal from e = 2 on, below that
// its two subnormals.
static void read_mxfp4(quant_block *out, const uint8_t *bytes) {
    const unsigned e = bytes[0];
    out->d = (uint16_t)(e < 2 ? 0x20u << e : (e - 1) << 7);
    read_nibbles(out->code, bytes + 1);
}

void quant_read(quant_block *out, dtype type, const uint8_t *bytes) {
    switch (type) {
        case DTYPE_Q4_0:
        case DTYPE_IQ4_NL:
            read_q4_0(out, bytes);
            break;
        case DTYPE_Q4_1:
            read_q4_1(out, bytes);
            break;
        case DTYPE_Q5_0:
            read_q5_0(out, bytes);
            break;
        case DTYPE_Q5_1:
            read_q5_1(out, bytes);
            break;
        case DTYPE_Q8_0:
            read_q8_0(out, bytes);
            break;
        case DTYPE_Q2_K:
            read_q2_k(out, bytes);
            break;
        case DTYPE_Q3_K:
            read_q3_k(out, bytes);
            break;
        case DTYPE_Q4_K:
            read_q4_k(out, bytes);
            break;
        case DTYPE_Q5_K:
            read_q5_k(out, bytes);
            break;
        case DTYPE_Q6_K:
            read_q6_k(out, bytes);
            break;
        case DTYPE_IQ4_XS:
            read_iq4_xs(out, bytes);
            break;
        case DTYPE_MXFP4:
            read_mxfp4(out, bytes);
            break;
        case DTYPE_F32:
        case DTYPE_F16:
        case DTYPE_BF16:
        case DTYPE_COUNT:
            break;  // not quantised
    }
}
