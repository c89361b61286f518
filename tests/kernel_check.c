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
    const float *at[ATTN_TILE];
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
    k->attn_tile(&job, 0, 2, 0, at, at, at, at, &state, NULL);
    k->attn_finish(&job, 0, 2, &state);
    return hash_add(h, z, sizeof z);
}

int main(int argc, char **argv) {
    static const uint64_t expected_hash = 0xe742898efffc32fdu;
    const cpu_kernels *list[8], *scalar = kernels_scalar();
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    const size_t n = kernels_list(list);
    const uint64_t hash = scalar_hash(scalar);
    printf("seed %llu\n", (unsigned long long)seed);
    if (hash != expected_hash)
        printf("the scalar kernels give %016llx on fixed input, must be %016llx on every machine\n",
               (unsigned long long)hash, (unsigned long long)expected_hash);
    count("scalar", "hash", hash != expected_hash);
    for (size_t i = 0; i < n; i++) {
        const cpu_kernels *k = list[i], *base = i + 1 < n ? list[i + 1] : NULL;
        // What a table has from the one below it is checked there.
        if (!base || k->glu != base->glu) count(k->name, "elementwise", check_ops(k, scalar, seed));
        if (!base || k->attn_tile != base->attn_tile)
            count(k->name, "attention", check_attention(k, scalar, seed));
        count(k->name, "matmul", check_matmul(k, scalar, seed));
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
