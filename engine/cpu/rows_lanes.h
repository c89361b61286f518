// KV rows once for all SIMD instruction sets: included by an ops_*.c after the lanes_*.h that
// defines its vector. Equals rows_scalar.c bit for bit. f32 rows are copied there.
#ifndef MF_CPU_ROWS_LANES_H
#define MF_CPU_ROWS_LANES_H

#include "../quant.h"
#include "mathf_lanes.h"

static void store_f16_lanes(void *row, const float *x, uint32_t n) {
    uint16_t *h = row;
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store_f16(h + i, v_canon(v_load(x + i)));
    for (; i < n; i++) h[i] = mathf_f16(x[i]);
}

static void load_f16_lanes(float *x, const void *row, uint32_t n) {
    const uint16_t *h = row;
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store(x + i, v_load_f16(h + i));
    for (; i < n; i++) x[i] = f16_to_f32(h[i]);
}

static void store_q8_0_lanes(void *row, const float *x, uint32_t n) {
    uint8_t *block = row;
    for (uint32_t b = 0; b < n; b += KV_BLOCK, block += KV_BLOCK_BYTES) {
        const float amax = mathf_from_bits(v_top32(x + b));
        uint16_t d = mathf_f16(amax / 127.0f);
        if (d >= 0x7c00) d = 0x7e00;
        memcpy(block, &d, sizeof d);
        if (d == 0 || d == 0x7e00) {
            memset(block + 2, 0, KV_BLOCK);
            continue;
        }
        const float inverse = 127.0f / amax;
        v_quantize16((int8_t *)block + 2, x + b, inverse);
        v_quantize16((int8_t *)block + 18, x + b + 16, inverse);
    }
}

static void load_q8_0_lanes(float *x, const void *row, uint32_t n) {
    const uint8_t *block = row;
    for (uint32_t b = 0; b < n; b += KV_BLOCK, block += KV_BLOCK_BYTES) {
        uint16_t d;
        memcpy(&d, block, sizeof d);
        const vf by = v_set1(f16_to_f32(d));
        for (uint32_t i = 0; i < KV_BLOCK; i += LANES)
            v_store(x + b + i, v_mul(by, v_load_i8((const int8_t *)block + 2 + i)));
    }
}

static void rows_init_lanes(cpu_kernels *k) {
    k->kv_store[KV_FORMAT_F16] = store_f16_lanes;
    k->kv_store[KV_FORMAT_Q8_0] = store_q8_0_lanes;
    k->kv_load[KV_FORMAT_F16] = load_f16_lanes;
    k->kv_load[KV_FORMAT_Q8_0] = load_q8_0_lanes;
}

#endif
