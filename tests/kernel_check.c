// Every instruction set of this machine against the scalar definition, bit for bit, and the scalar
// definition against the bits it gives everywhere. `kernel_check [seed]` repeats a run.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static int passed, failed;

static void count(const char *isa, const char *what, int failures) {
    if (failures) printf("%s %s: %d differences\n", isa, what, failures);
    if (failures)
        failed++;
    else
        passed++;
}

static uint64_t hash_add(uint64_t h, const void *data, size_t n) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < n; i++) h = (h ^ bytes[i]) * 0x100000001b3u;  // FNV-1a
    return h;
}

// Results of the scalar kernels on fixed input.
static uint64_t scalar_hash(const cpu_kernels *k) {
    enum { N = 320, DIM = 80 };
    static float x[N], y[N], z[N], rows[ATTN_TILE * DIM];
    static float acc[4 * DIM], lanes[4 * ATTN_LANES],
        max[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    const void *at[ATTN_TILE];
    uint64_t rng = 1, h = 0xcbf29ce484222325u;
    for (int i = 0; i < N; i++) x[i] = check_normal(&rng) * 9.0f;
    for (int i = 0; i < N; i++) y[i] = check_normal(&rng);
    for (int i = 0; i < ATTN_TILE * DIM; i++) rows[i] = check_normal(&rng);
    x[3] = NAN, x[40] = INFINITY, x[41] = -INFINITY, x[42] = -0.0f, x[43] = 0x1p-149f;
    for (int kind = 0; kind < 2; kind++) {
        k->glu(z, x, y, N, kind ? GLU_SILU : GLU_GELU_TANH);
        h = hash_add(h, z, sizeof z);
    }
    k->softcap(z, x, 30.0f, N);
    h = hash_add(h, z, sizeof z);
    k->add(z, x, x + 1, N - 1);
    h = hash_add(h, z, sizeof z);
    k->rms_norm(z, y, x, N, 1e-6f);
    h = hash_add(h, z, sizeof z);
    k->rope(z, x + 60, y, 2, 160, 100, true);
    h = hash_add(h, z, sizeof z);
    for (int i = 0; i < ATTN_TILE; i++) at[i] = rows + i * DIM;
    const attn_job job = {.q = y,
                          .q_stride = 2 * DIM,
                          .out = z,
                          .out_stride = 2 * DIM,
                          .head_dim = DIM,
                          .group = 2,
                          .n_queries = 2,
                          .pos0 = 61,
                          .window = 50,
                          .scale = 0.3f,
                          .softcap = 10.0f};
    attn_state state = {acc, lanes, max};
    k->attn_tile[KV_FORMAT_F32](&job, 0, 2, 0, at, at, at, at, &state, NULL);
    k->attn_finish(&job, 0, 2, &state);
    return hash_add(h, z, sizeof z);
}

// The same of stored rows, and of attention that reads them.
static uint64_t rows_hash(const cpu_kernels *k) {
    enum { DIM = 64, QUERIES = 4 };
    static float x[ATTN_TILE * DIM], z[QUERIES * DIM], d[QUERIES * DIM / 32];
    static int8_t q[QUERIES * DIM];
    static int32_t neg_sum[QUERIES * DIM / 32], neg_half[QUERIES * DIM / 16];
    static uint8_t rows[ATTN_TILE * DIM * 4];
    uint64_t rng = 2, h = 0xcbf29ce484222325u;
    for (int i = 0; i < ATTN_TILE * DIM; i++) x[i] = check_normal(&rng) * 3.0f;
    act_q8 packed = {1, q, d, neg_sum, neg_half};
    k->quantize(&packed, x, QUERIES * DIM, QUERIES * DIM, 0, 1);
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        const size_t bytes = kv_head_bytes((kv_format)format, DIM);
        const void *at[ATTN_TILE];
        float acc[QUERIES * DIM] = {0}, lanes[QUERIES * ATTN_LANES] = {0}, max[QUERIES];
        for (int i = 0; i < QUERIES; i++) max[i] = -INFINITY;
        for (int i = 0; i < ATTN_TILE; i++) {
            at[i] = rows + (size_t)i * bytes;
            k->kv_store[format](rows + (size_t)i * bytes, x + i * DIM, DIM);
        }
        h = hash_add(h, rows, ATTN_TILE * bytes);
        k->kv_load[format](x, rows, ATTN_TILE * DIM);
        h = hash_add(h, x, sizeof x);
        const attn_job job = {.q = x,
                              .q_stride = 2 * DIM,
                              .packed = {q, d, neg_sum, 2 * DIM},
                              .out = z,
                              .out_stride = 2 * DIM,
                              .head_dim = DIM,
                              .group = 2,
                              .n_queries = 2,
                              .pos0 = 61,
                              .window = 50,
                              .scale = 0.3f};
        attn_state state = {acc, lanes, max};
        k->attn_tile[format](&job, 0, 2, 0, at, at, at, at, &state, NULL);
        k->attn_finish(&job, 0, 2, &state);
        h = hash_add(h, z, sizeof z);
    }
    return h;
}

static void check_hash(const char *what, uint64_t hash, uint64_t expected) {
    if (hash != expected)
        printf("%s give %016llx on fixed input, must be %016llx on every machine\n", what,
               (unsigned long long)hash, (unsigned long long)expected);
    count("scalar", what, hash != expected);
}

int main(int argc, char **argv) {
    const cpu_kernels *list[8], *scalar = kernels_scalar();
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    const size_t n = kernels_list(list);
    printf("seed %llu\n", (unsigned long long)seed);
    check_hash("kernels", scalar_hash(scalar), 0xe742898efffc32fdu);
    check_hash("stored rows", rows_hash(scalar), 0x9ac3e0efcc81b0b2u);
    for (size_t i = 0; i < n; i++) {
        const cpu_kernels *k = list[i], *base = i + 1 < n ? list[i + 1] : NULL;
        // What a table has from the one below it is checked there.
        if (!base || k->glu != base->glu) count(k->name, "elementwise", check_ops(k, scalar, seed));
        if (!base || k->attn_tile[KV_FORMAT_F32] != base->attn_tile[KV_FORMAT_F32])
            count(k->name, "attention", check_attention(k, scalar, seed));
        count(k->name, "matmul", check_matmul(k, scalar, seed));
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
