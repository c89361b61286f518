// Packing rows into panels and reading them back. Owns the layout described in panel.h; refuses
// types and shapes it cannot hold before anything is allocated. Packing is deterministic: unused
// bytes are zero.

#include "panel.h"

#include <math.h>
#include <string.h>

#include "../error.h"

static bool is_quantised(dtype type) { return quant_traits_of[type].low_bits != 0; }

int panels_layout(panels *out, dtype type, uint32_t n_rows, uint32_t n_cols) {
    const dtype_info *const info = dtype_get((uint32_t)type);
    if (!info) return fail(MF_UNSUPPORTED, "weights of type %d cannot be packed", (int)type);
    if (n_rows == 0 || n_cols == 0 || n_cols % info->block_elems) {
        return fail(MF_FORMAT,
                    "a %s matrix of %u rows and %u columns: columns must be whole blocks of %u",
                    info->name, n_rows, n_cols, info->block_elems);
    }
    if (n_rows > UINT32_MAX - PANEL_ROWS)
        return fail(MF_LIMIT, "a matrix of %u rows: at most 2^32 - 17", n_rows);
    size_t units = n_cols, unit_bytes = (size_t)info->block_bytes * PANEL_ROWS;
    if (is_quantised(type)) {
        const panel_chunk chunk = panel_chunk_of(type);
        units = (n_cols / PANEL_BLOCK + chunk.blocks - 1) / chunk.blocks;
        unit_bytes = chunk.bytes;
    }
    *out = (panels){.type = type, .n_rows = n_rows, .n_cols = n_cols};
    out->n_panels = n_rows / PANEL_ROWS + (n_rows % PANEL_ROWS != 0);
    uint64_t panel_bytes = 0, bytes = 0;
    if (!u64_mul(&panel_bytes, units, unit_bytes) || !u64_align(&panel_bytes, panel_bytes, 64) ||
        !u64_mul(&bytes, out->n_panels, panel_bytes) || bytes > PTRDIFF_MAX) {
        return fail(MF_LIMIT, "a %s matrix of %u rows and %u columns exceeds the address space",
                    info->name, n_rows, n_cols);
    }
    out->panel_bytes = (size_t)panel_bytes;
    out->bytes = (size_t)bytes;
    return MF_OK;
}

// Adds `bits` of 32 codes, from bit `from` on, to a block's plane, for one row.
static inline void pack_words(uint8_t *plane, uint32_t row, const uint8_t code[32], unsigned from,
                              const unsigned bits) {
    const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
    for (unsigned w = 0; w < 8; w++) {
        uint32_t word, packed;
        uint8_t *const at = plane + w % bits * 64 + row * 4;
        memcpy(&word, code + 4 * w, 4);
        if (bits == 8) {  // all of the plane's
            memcpy(at, &word, 4);
            continue;
        }
        memcpy(&packed, at, 4);
        packed |= (word >> from & mask) << (w / bits * bits);
        memcpy(at, &packed, 4);
    }
}

// The same with constants for `bits`: loading a model is this loop.
static void pack_plane(uint8_t *plane, uint32_t row, const uint8_t code[32], unsigned from,
                       unsigned bits) {
    switch (bits) {
        case 1:
            pack_words(plane, row, code, from, 1);
            break;
        case 2:
            pack_words(plane, row, code, from, 2);
            break;
        case 4:
            pack_words(plane, row, code, from, 4);
            break;
        case 8:
            pack_words(plane, row, code, from, 8);
            break;
        default:
            break;
    }
}

// 32 columns of row r: block b of a chunk.
static void pack_codes(uint8_t *chunk, const panel_chunk *at, const quant_traits *q, uint32_t b,
                       uint32_t r, const uint8_t code[32]) {
    pack_plane(chunk + at->low + b * 64 * q->low_bits, r, code, 0, q->low_bits);
    if (q->high_bits)
        pack_plane(chunk + at->high + b * 64 * q->high_bits, r, code, q->low_bits, q->high_bits);
}

// Row r's sub-scales of one block of 256 columns, which is a whole chunk.
static void pack_subs(uint8_t *chunk, const panel_chunk *at, const quant_traits *q, uint32_t r,
                      const quant_block *in) {
    const uint32_t n = QUANT_BLOCK_MAX / q->sub_width;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t sub = (uint8_t)in->sub[i];
        if (q->has_min && q->sub_width == 16) sub |= (uint8_t)(in->sub_min[i] << 4);
        chunk[at->sub + i * PANEL_ROWS + r] = sub;
        if (q->has_min && q->sub_width == 32)
            chunk[at->sub_min + i * PANEL_ROWS + r] = (uint8_t)in->sub_min[i];
    }
}

static void pack_quantised_row(uint8_t *panel, const panels *p, uint32_t r, const uint8_t *bytes) {
    const quant_traits q = quant_traits_of[p->type];
    const panel_chunk at = panel_chunk_of(p->type);
    const dtype_info *const info = dtype_get((uint32_t)p->type);
    const uint32_t per_block = info->block_elems / PANEL_BLOCK;  // 1, or all 8 of a chunk
    quant_block in;
    for (uint32_t b = 0; b < p->n_cols / PANEL_BLOCK; b += per_block, bytes += info->block_bytes) {
        uint8_t *const chunk = panel + (size_t)(b / at.blocks) * at.bytes;
        const uint32_t i = b % at.blocks;
        quant_read(&in, p->type, bytes);
        for (uint32_t j = 0; j < per_block; j++)
            pack_codes(chunk, &at, &q, i + j, r, in.code + j * PANEL_BLOCK);
        if (q.sub_width) pack_subs(chunk, &at, &q, r, &in);
        memcpy(chunk + at.d + (i * PANEL_ROWS + r) * 2, &in.d, 2);
        if (q.has_min) memcpy(chunk + at.min + (i * PANEL_ROWS + r) * 2, &in.min, 2);
    }
}

static void pack_float_row(uint8_t *panel, const panels *p, uint32_t r, const uint8_t *bytes) {
    if (p->type == DTYPE_F32) {
        for (size_t c = 0; c < p->n_cols; c++)
            memcpy(panel + (c * PANEL_ROWS + r) * 4, bytes + c * 4, 4);
    } else {
        for (size_t c = 0; c < p->n_cols; c++)
            memcpy(panel + (c * PANEL_ROWS + r) * 2, bytes + c * 2, 2);
    }
}

void panels_pack(panels *p, const void *rows, uint32_t p0, uint32_t p1) {
    const dtype_info *const info = dtype_get((uint32_t)p->type);
    const size_t row_bytes = (size_t)(p->n_cols / info->block_elems) * info->block_bytes;
    for (uint32_t i = p0; i < p1; i++) {
        uint8_t *const panel = p->data + i * p->panel_bytes;
        memset(panel, 0, p->panel_bytes);
        for (uint32_t r = 0; r < PANEL_ROWS && i * PANEL_ROWS + r < p->n_rows; r++) {
            const uint8_t *const bytes =
                (const uint8_t *)rows + (i * PANEL_ROWS + (size_t)r) * row_bytes;
            if (is_quantised(p->type))
                pack_quantised_row(panel, p, r, bytes);
            else
                pack_float_row(panel, p, r, bytes);
        }
    }
}

static uint8_t read_plane(const uint8_t *plane, uint32_t row, unsigned col, unsigned bits) {
    const unsigned w = col / 4;
    return (uint8_t)(plane[w % bits * 64 + row * 4 + col % 4] >> (w / bits * bits) &
                     ((1u << bits) - 1));
}

static uint16_t read_u16(const uint8_t *at, uint32_t i) {
    uint16_t out;
    memcpy(&out, at + 2 * (size_t)i, 2);
    return out;
}

// Codes of row r in block b of its chunk.
static void read_codes(int8_t out[32], const uint8_t *chunk, const panel_chunk *at,
                       const quant_traits *q, uint32_t b, uint32_t r) {
    const uint8_t *const low = chunk + at->low + b * 64 * q->low_bits;
    const uint8_t *const high = chunk + at->high + b * 64 * q->high_bits;
    for (unsigned c = 0; c < PANEL_BLOCK; c++) {
        int code = read_plane(low, r, c, q->low_bits);
        if (q->high_bits) code |= read_plane(high, r, c, q->high_bits) << q->low_bits;
        out[c] = (int8_t)(q->codebook ? quant_codebooks[q->codebook][code] : code - q->bias);
    }
}

void panel_read(panel_block *out, const panels *p, uint32_t row, uint32_t block) {
    const quant_traits q = quant_traits_of[p->type];
    const panel_chunk at = panel_chunk_of(p->type);
    const uint32_t r = row % PANEL_ROWS, b = block % at.blocks;
    const uint8_t *const chunk =
        p->data + row / PANEL_ROWS * p->panel_bytes + (size_t)(block / at.blocks) * at.bytes;
    const uint32_t scale = (q.sub_width ? 0 : b * PANEL_ROWS) + r;
    const uint16_t d = read_u16(chunk + at.d, scale);

    read_codes(out->q, chunk, &at, &q, b, r);
    out->scale = q.d_is_bf16 ? bf16_to_f32(d) : f16_to_f32(d);
    out->min = q.has_min ? f16_to_f32(read_u16(chunk + at.min, scale)) : 0.0f;
    for (uint32_t i = 0; i < 2; i++) out->sub[i] = out->sub_min[i] = 1;
    if (q.sub_width == 32) {
        out->scale *= (float)(int8_t)chunk[at.sub + b * PANEL_ROWS + r];
        if (q.has_min) out->min *= (float)(int8_t)chunk[at.sub_min + b * PANEL_ROWS + r];
    } else if (q.sub_width == 16) {
        for (uint32_t i = 0; i < 2; i++) {
            const uint8_t sub = chunk[at.sub + (b * 2 + i) * PANEL_ROWS + r];
            out->sub[i] = q.has_min ? sub & 15 : (int8_t)sub;
            out->sub_min[i] = sub >> 4;
        }
    }
}

float panel_value(const panels *p, uint32_t row, uint32_t col) {
    const uint8_t *const panel = p->data + row / PANEL_ROWS * p->panel_bytes;
    const size_t i = (size_t)col * PANEL_ROWS + row % PANEL_ROWS;
    uint16_t narrow;
    float wide;
    if (p->type == DTYPE_F32) {
        memcpy(&wide, panel + 4 * i, 4);
        return wide;
    }
    memcpy(&narrow, panel + 2 * i, 2);
    return p->type == DTYPE_F16 ? f16_to_f32(narrow) : bf16_to_f32(narrow);
}

void panels_row(float *out, const panels *p, uint32_t row) {
    if (!is_quantised(p->type)) {
        for (uint32_t c = 0; c < p->n_cols; c++) out[c] = panel_value(p, row, c);
        return;
    }
    const bool has_min = quant_traits_of[p->type].has_min;
    panel_block in;
    for (uint32_t b = 0; b < p->n_cols / PANEL_BLOCK; b++) {
        panel_read(&in, p, row, b);
        for (uint32_t c = 0; c < PANEL_BLOCK; c++) {
            const uint32_t half = c / 16;
            const float scaled = in.scale * (float)(in.sub[half] * in.q[c]);
            out[b * PANEL_BLOCK + c] =
                has_min ? fmaf(-in.min, (float)in.sub_min[half], scaled) : scaled;
        }
    }
}
