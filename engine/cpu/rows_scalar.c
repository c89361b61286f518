// The definition of KV rows: what a format stores and what it reads back. Refuses nothing. The
// other instruction sets' rows_lanes.h equals it bit for bit.
#include "../quant.h"
#include "kernels.h"
#include "mathf.h"

static void store_f32(void *row, const float *x, uint32_t n) { memcpy(row, x, n * sizeof *x); }
static void load_f32(float *x, const void *row, uint32_t n) { memcpy(x, row, n * sizeof *x); }

static void store_f16(void *row, const float *x, uint32_t n) {
    uint16_t *h = row;
    for (uint32_t i = 0; i < n; i++) h[i] = mathf_f16(x[i]);
}

static void load_f16(float *x, const void *row, uint32_t n) {
    const uint16_t *h = row;
    for (uint32_t i = 0; i < n; i++) x[i] = f16_to_f32(h[i]);
}

static void store_q8_0(void *row, const float *x, uint32_t n) {
    uint8_t *block = row;
    for (uint32_t b = 0; b < n; b += KV_BLOCK, block += KV_BLOCK_BYTES) {
        uint32_t top = 0;  // bits of the largest magnitude: as integers, finite < Inf < NaN
        for (uint32_t i = 0; i < KV_BLOCK; i++) {
            const uint32_t size = mathf_bits(x[b + i]) & 0x7fffffffu;
            if (size > top) top = size;
        }
        const float amax = mathf_from_bits(top);
        uint16_t d = mathf_f16(amax / 127.0f);
        if (d >= 0x7c00) d = 0x7e00;
        memset(block, 0, KV_BLOCK_BYTES);
        memcpy(block, &d, sizeof d);
        if (d == 0 || d == 0x7e00) continue;
        const float inverse = 127.0f / amax;
        for (uint32_t i = 0; i < KV_BLOCK; i++)  // the sum's low byte is the nearest integer
            block[2 + i] = (uint8_t)mathf_bits(x[b + i] * inverse + MATHF_ROUND);
    }
}

static void load_q8_0(float *x, const void *row, uint32_t n) {
    const uint8_t *block = row;
    for (uint32_t b = 0; b < n; b += KV_BLOCK, block += KV_BLOCK_BYTES) {
        uint16_t d;
        memcpy(&d, block, sizeof d);
        for (uint32_t i = 0; i < KV_BLOCK; i++)
            x[b + i] = f16_to_f32(d) * (float)(int8_t)block[2 + i];
    }
}

void rows_init_scalar(cpu_kernels *k) {
    k->kv_store[KV_FORMAT_F32] = store_f32;
    k->kv_store[KV_FORMAT_F16] = store_f16;
    k->kv_store[KV_FORMAT_Q8_0] = store_q8_0;
    k->kv_load[KV_FORMAT_F32] = load_f32;
    k->kv_load[KV_FORMAT_F16] = load_f16;
    k->kv_load[KV_FORMAT_Q8_0] = load_q8_0;
}
