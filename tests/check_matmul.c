// Every matrix product of a candidate table against the scalar definition, by memcmp. Weights are
// random bytes with mostly finite scales, or the extreme codes that would saturate a 16-bit sum;
// activations include zero, NaN and Inf blocks, subnormal scales and all-equal +-127 codes. The
// candidate computes a random part of the product into a buffer whose every other word is checked
// to be untouched.

#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// More tokens than a kernel takes at once: with long rows, and with short ones. Both leave some
// that fill no tile.
enum { TRIALS = 24, LONG_COLS = 24576, LONG_FLOAT_COLS = 6001, LONG_TOKENS = 87 };
enum { MANY_TOKENS = 512 + 32 + 5, MANY_ROWS = 16 * 17 + 3 };
enum { GUARD = 256 };  // words before and after the results

// Where the f16 scales lie in a block of the file; MXFP4's one exponent byte needs no care.
typedef struct scale_places {
    uint8_t n, at[2];
} scale_places;

static const scale_places scale_places_of[DTYPE_COUNT] = {
    [DTYPE_Q4_0] = {1, {0}},    [DTYPE_Q4_1] = {2, {0, 2}}, [DTYPE_Q5_0] = {1, {0}},
    [DTYPE_Q5_1] = {2, {0, 2}}, [DTYPE_Q8_0] = {1, {0}},    [DTYPE_Q2_K] = {2, {80, 82}},
    [DTYPE_Q3_K] = {1, {108}},  [DTYPE_Q4_K] = {2, {0, 2}}, [DTYPE_Q5_K] = {2, {0, 2}},
    [DTYPE_Q6_K] = {1, {208}},  [DTYPE_IQ4_NL] = {1, {0}},  [DTYPE_IQ4_XS] = {1, {0}},
};

// The arrays of one trial.
typedef struct trial {
    panels w;
    uint8_t *rows;  // the weights as a file has them
    matmul_input x;
    uint32_t n_tokens;
    size_t y_stride;
    size_t y_size;
    float *want, *got;  // [y_size] = GUARD, [n_tokens][y_stride], GUARD
} trial;

static void *allocate(size_t bytes) {
    void *const p = aligned_alloc(64, bytes / 64 * 64 + 64);
    if (!p) {
        fprintf(stderr, "check_matmul: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

static float special_float(uint64_t *rng) {
    static const float values[] = {0.0f,      -0.0f,      INFINITY, -INFINITY,   NAN,
                                   0x1p-149f, -0x1p-140f, 0x1p127f, -0x1.8p120f, 0x1p-126f};
    return values[check_below(rng, sizeof values / sizeof *values)];
}

static void fill_rows(trial *c, const dtype_info *info, uint64_t *rng) {
    const size_t n_blocks = (size_t)c->w.n_rows * c->w.n_cols / info->block_elems;
    const size_t bytes = n_blocks * info->block_bytes;
    const scale_places places = scale_places_of[c->w.type];
    static const uint8_t extremes[] = {0x00, 0xff, 0x80, 0x7f};
    const bool extreme = check_below(rng, 4) == 0;  // one byte for all codes
    const uint8_t byte = extremes[check_below(rng, 4)], sub = extremes[check_below(rng, 4)];

    c->rows = allocate(bytes);
    for (size_t i = 0; i < bytes; i++)
        c->rows[i] = extreme ? byte : (uint8_t)(check_rand(rng) >> 56);
    for (size_t b = 0; b < n_blocks; b++) {
        for (uint8_t i = 0; i < places.n; i++) {
            // An f16 between 2^-9 and 2^-2 of either sign; now and then any bits at all.
            uint16_t bits = (uint16_t)((6 + check_below(rng, 8)) << 10 | check_below(rng, 1024) |
                                       check_below(rng, 2) << 15);
            if (check_below(rng, 800) == 0) bits = (uint16_t)(check_rand(rng) >> 48);
            memcpy(c->rows + b * info->block_bytes + places.at[i], &bits, 2);
        }
        uint8_t *const block = c->rows + b * info->block_bytes;
        if (c->w.type == DTYPE_MXFP4 && check_below(rng, 50))
            block[0] = (uint8_t)(120 + check_below(rng, 10));
        if (c->w.type == DTYPE_Q6_K && extreme) memset(block + 192, sub, 16);
    }
    if (info->block_elems > 1) return;
    for (size_t i = 0; i < n_blocks; i++) {
        const bool special = check_below(rng, 8 * c->w.n_cols) == 0;  // in one row of 8
        const float v = special ? special_float(rng) : check_normal(rng);
        uint32_t wide;
        memcpy(&wide, &v, 4);
        const uint16_t bf16 = (uint16_t)(wide >> 16);
        const uint16_t f16 =
            (uint16_t)((10 + check_below(rng, 8)) << 10 | (wide & 0x83ff));  // 2^-5 .. 2^2
        if (c->w.type == DTYPE_F32)
            memcpy(c->rows + i * 4, &wide, 4);
        else if (c->w.type == DTYPE_BF16)
            memcpy(c->rows + i * 2, &bf16, 2);
        else
            memcpy(c->rows + i * 2, special ? &bf16 : &f16, 2);  // bf16's bits as any f16
    }
}

static void fill_block(int8_t q[ACT_BLOCK], float *d, uint64_t *rng) {
    const uint32_t kind = check_below(rng, 64);
    *d = (0.25f + fabsf(check_normal(rng))) * 0.01f;
    for (int i = 0; i < ACT_BLOCK; i++) {
        if (kind < 4)
            q[i] = kind == 0 || (kind == 3 && i % 2) ? -127 : 127;
        else if (kind < 7)
            q[i] = 0;
        else
            q[i] = (int8_t)((int)check_below(rng, 255) - 127);
    }
    if (kind == 4) *d = 0.0f;
    if (kind == 7) *d = 0x1p-100f * (1.0f + *d);
    if (kind == 8) *d = 0x1p-140f;
}

static void fill_quantised(trial *c, uint64_t *rng) {
    const size_t n = (size_t)(c->w.n_cols / ACT_BLOCK) * c->n_tokens;
    act_q8 *const x = &c->x.q;
    x->n_tokens = c->n_tokens;
    x->q = allocate(n * ACT_BLOCK);
    x->d = allocate(n * sizeof *x->d);
    x->neg_sum = allocate(n * sizeof *x->neg_sum);
    x->neg_half = allocate(n * 2 * sizeof *x->neg_half);
    for (size_t i = 0; i < n; i++) {
        fill_block(x->q + i * ACT_BLOCK, &x->d[i], rng);
        for (size_t half = 0; half < 2; half++) {
            int32_t sum = 0;
            for (size_t j = 0; j < 16; j++) sum += x->q[i * ACT_BLOCK + half * 16 + j];
            x->neg_half[i * 2 + half] = -sum;
        }
        x->neg_sum[i] = x->neg_half[i * 2] + x->neg_half[i * 2 + 1];
    }
    for (uint32_t t = 0; t < c->n_tokens; t++) {
        if (check_below(rng, 8)) continue;
        const size_t i = check_below(rng, c->w.n_cols / ACT_BLOCK) * (size_t)c->n_tokens + t;
        memset(x->q + i * ACT_BLOCK, 0, ACT_BLOCK);
        x->neg_sum[i] = x->neg_half[i * 2] = x->neg_half[i * 2 + 1] = 0;
        x->d[i] = NAN;
    }
}

// tiny: so small that products round to +-0, and the sum's sign shows.
static void fill_floats(trial *c, bool tiny, uint64_t *rng) {
    c->x.f_stride = c->w.n_cols + check_below(rng, 20);
    float *const f = allocate(c->n_tokens * c->x.f_stride * sizeof *f);
    for (size_t i = 0; i < c->n_tokens * c->x.f_stride; i++) {
        f[i] = check_below(rng, 8 * c->w.n_cols) ? check_normal(rng) : special_float(rng);
        if (tiny) f[i] = copysignf(0x1p-149f, f[i]);
    }
    c->x.f = f;
}

// index 0: the long trial; 1: the one of signed zeros, for float weights; 2: of many tokens; 4: of
// more panels than a kernel takes at once; others: any shape.
static void make_trial(trial *c, dtype type, uint32_t index, size_t scratch_bytes, uint64_t *rng) {
    const dtype_info *const info = dtype_get((uint32_t)type);
    const bool floats = info->block_elems == 1, tiny = index == 1 && floats;
    const uint32_t most = tiny ? 3 : floats ? 100 : info->block_elems == 32 ? 12 : 4;
    uint32_t n_rows = 1 + check_below(rng, 70), n_blocks = 1 + check_below(rng, most);
    *c = (trial){.n_tokens = 1 + check_below(rng, 40)};
    if (index == 0) {
        n_rows = 20;
        n_blocks = floats ? LONG_FLOAT_COLS : LONG_COLS / info->block_elems - 1;
        c->n_tokens = LONG_TOKENS;
    } else if (index == 2) {
        c->n_tokens = MANY_TOKENS;
    } else if (index == 4) {
        n_rows = MANY_ROWS;
        n_blocks = info->block_elems == 32 ? 5 : 1;
        c->n_tokens = 35;
    }
    if (panels_layout(&c->w, type, n_rows, n_blocks * info->block_elems)) {
        fprintf(stderr, "check_matmul: panels_layout refused %u x %u\n", n_rows,
                n_blocks * info->block_elems);
        exit(1);
    }
    fill_rows(c, info, rng);
    c->w.data = allocate(c->w.bytes);
    panels_pack(&c->w, c->rows, 0, c->w.n_panels);
    if (info->block_elems == 1)
        fill_floats(c, tiny, rng);
    else
        fill_quantised(c, rng);
    c->y_stride = n_rows + check_below(rng, 20);
    c->y_size = c->n_tokens * c->y_stride + 2 * GUARD;
    const size_t y_bytes = c->y_size * sizeof *c->want;
    c->x.scratch = allocate(scratch_bytes);
    memset(c->x.scratch, 0xa5, scratch_bytes);
    c->want = allocate(y_bytes);
    c->got = allocate(y_bytes);
    memset(c->want, 0xa5, y_bytes);
    memset(c->got, 0xa5, y_bytes);
}

static void free_trial(trial *c) {
    free(c->rows);
    free(c->w.data);
    free((void *)(uintptr_t)c->x.f);
    free(c->x.q.q);
    free(c->x.q.d);
    free(c->x.q.neg_sum);
    free(c->x.q.neg_half);
    free(c->x.scratch);
    free(c->want);
    free(c->got);
}

static uint32_t bits_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

// Compares the part [p0, p1) x [t0, t1); prints and counts at most one failure per call.
static int compare(const trial *c, const char *isa, uint32_t p0, uint32_t p1, uint32_t t0,
                   uint32_t t1) {
    const char *const type = dtype_get((uint32_t)c->w.type)->name;
    const uint32_t r0 = p0 * PANEL_ROWS, r1 = u32_min(p1 * PANEL_ROWS, c->w.n_rows);
    for (size_t i = 0; i < c->y_size; i++) {
        // token is vast in the first guard.
        const size_t row = (i - GUARD) % c->y_stride, token = (i - GUARD) / c->y_stride;
        const bool inside = token >= t0 && token < t1 && row >= r0 && row < r1;
        const uint32_t want = inside ? bits_of(c->want[i]) : 0xa5a5a5a5, got = bits_of(c->got[i]);
        if (want == got) continue;
        printf("matmul %s %s %u x %u, %u tokens, panels %u..%u, tokens %u..%u: ", isa, type,
               c->w.n_rows, c->w.n_cols, c->n_tokens, p0, p1, t0, t1);
        printf("y[%td] (row %zu, token %zu) is %08x, %s %08x\n", (ptrdiff_t)i - GUARD, row, token,
               got, inside ? "not" : "a stray write over", want);
        return 1;
    }
    return 0;
}

static int check_trial(const cpu_kernels *candidate, const cpu_kernels *scalar, trial *c,
                       bool whole, uint64_t *rng) {
    const dtype type = c->w.type;
    uint32_t p0 = 0, p1 = c->w.n_panels, t0 = 0, t1 = c->n_tokens;
    scalar->matmul[type](c->want + GUARD, c->y_stride, &c->w, p0, p1, &c->x, t0, t1);
    if (!whole) {
        p0 = check_below(rng, p1);
        p1 = p0 + 1 + check_below(rng, p1 - p0);
        t0 = check_below(rng, t1);
        t1 = t0 + 1 + check_below(rng, t1 - t0);
    }
    candidate->matmul[type](c->got + GUARD, c->y_stride, &c->w, p0, p1, &c->x, t0, t1);
    return compare(c, candidate->name, p0, p1, t0, t1);
}

int check_matmul(const cpu_kernels *candidate, const cpu_kernels *scalar, uint64_t seed) {
    int failures = 0;
    for (uint32_t type = 0; type < DTYPE_COUNT; type++) {
        if (!dtype_get(type)) continue;
        if (!candidate->matmul[type] || !scalar->matmul[type]) {
            printf("matmul %s: no kernel for %s\n", candidate->name, dtype_get(type)->name);
            failures++;
            continue;
        }
        for (uint32_t i = 0; i < TRIALS; i++) {
            uint64_t rng = seed + type * 1000 + i + 1;
            for (int warm = 0; warm < 8; warm++) check_rand(&rng);
            trial c;
            make_trial(&c, (dtype)type, i, candidate->matmul_scratch, &rng);
            failures += check_trial(candidate, scalar, &c, i % 2 == 0, &rng);
            free_trial(&c);
        }
    }
    return failures;
}
