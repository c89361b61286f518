// Every elementwise kernel of a candidate table against the scalar definition, by memcmp over the
// output and the guard words on both sides of it; and the scalar definition against doubles, so
// that both cannot be wrong together. Inputs mix normal numbers with zeros, subnormals, huge
// values, Inf and NaN; lengths and alignments are random.
#include "check.h"

#include <stdio.h>
#include <string.h>

enum { MAX_N = 700, GUARD = 24, TRIALS = 300 };

static int failures;

static void report(const char *isa, const char *what, uint32_t n, const float *want,
                   const float *got, size_t words) {
    for (size_t i = 0; i < words; i++) {
        if (!memcmp(want + i, got + i, sizeof *want)) continue;
        printf("FAILED %s %s, n %u: word %zu (output starts at %d) is %a, must be %a\n", isa, what,
               n, i, GUARD, (double)got[i], (double)want[i]);
        failures++;
        return;
    }
}

static float any_float(uint64_t *rng, bool special) {
    static const float values[] = {0.0f,      -0.0f,      INFINITY,   -INFINITY, NAN,
                                   0x1p-149f, -0x1p-130f, 0x1.8p127f, -0x1p100f, 126.0f,
                                   -88.5f,    0x1p-60f,   1e4f,       -1e-4f};
    if (special && check_below(rng, 6) == 0)
        return values[check_below(rng, sizeof values / sizeof *values)];
    if (special && check_below(rng, 8) == 0) {
        const uint32_t bits = (uint32_t)(check_rand(rng) >> 32);
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    return check_normal(rng) * 4.0f;
}

static void fill(float *x, size_t n, uint64_t *rng, bool special) {
    for (size_t i = 0; i < n; i++) x[i] = any_float(rng, special);
}

typedef struct buffers {
    float a[MAX_N + 2 * GUARD], b[MAX_N + 2 * GUARD], want[MAX_N + 2 * GUARD],
        got[MAX_N + 2 * GUARD];
} buffers;

static void check_elementwise(const cpu_kernels *c, const cpu_kernels *s, uint64_t *rng) {
    static buffers m;
    const uint32_t n = 1 + check_below(rng, check_below(rng, 2) ? 40 : MAX_N),
                   shift = check_below(rng, 4);
    const bool special = check_below(rng, 2);
    const float *a = m.a + shift, *b = m.b + 3 - shift, by = any_float(rng, special),
                cap = 5.0f + (float)check_below(rng, 60);
    const size_t words = MAX_N + 2 * GUARD;
    fill(m.a, words, rng, special);
    fill(m.b, words, rng, special);
    for (int what = 0; what < 7; what++) {
        static const char *const names[] = {
            "rms_norm", "rms_norm without weights", "glu silu", "glu gelu", "add", "scale",
            "softcap"};
        for (int turn = 0; turn < 2; turn++) {
            const cpu_kernels *k = turn ? c : s;
            float *y = turn ? m.got : m.want, *out = y + GUARD;
            memcpy(y, m.a, sizeof m.a);
            if (what == 0) k->rms_norm(out, a, b, n, 1e-6f);
            if (what == 1) k->rms_norm(out, out, NULL, n, 1e-5f);
            if (what == 2) k->glu(out, a, b, n, GLU_SILU);
            if (what == 3) k->glu(out, a, b, n, GLU_GELU_TANH);
            if (what == 4) k->add(out, out, b, n);
            if (what == 5) k->scale(out, a, by, n);
            if (what == 6) k->softcap(out, a, cap, n);
        }
        report(c->name, names[what], n, m.want, m.got, words);
    }
}

static void check_rope(const cpu_kernels *c, const cpu_kernels *s, uint64_t *rng) {
    static buffers m;
    float cos[64], sin[64];
    const uint32_t half = 1 + check_below(rng, 48), head_dim = 2 * half + 2 * check_below(rng, 8);
    const uint32_t n_heads = 1 + check_below(rng, MAX_N / head_dim);
    const bool special = check_below(rng, 2), interleaved = check_below(rng, 2);
    fill(m.want, MAX_N + 2 * GUARD, rng, special);
    memcpy(m.got, m.want, sizeof m.want);
    fill(cos, 64, rng, false);
    fill(sin, 64, rng, false);
    s->rope(m.want + GUARD, cos, sin, n_heads, head_dim, 2 * half, interleaved);
    c->rope(m.got + GUARD, cos, sin, n_heads, head_dim, 2 * half, interleaved);
    report(c->name, interleaved ? "rope interleaved" : "rope", half, m.want, m.got,
           MAX_N + 2 * GUARD);
}

enum { Q_TOKENS = 6, Q_BLOCKS = 5, Q_ALL = Q_TOKENS * Q_BLOCKS };

typedef struct quantized {
    float d[Q_ALL + 2];
    int32_t neg_sum[Q_ALL + 2], neg_half[2 * Q_ALL + 2];
    _Alignas(64) int8_t q[Q_ALL * ACT_BLOCK + 64];
} quantized;

static void check_quantize(const cpu_kernels *c, const cpu_kernels *s, uint64_t *rng) {
    enum { STRIDE = Q_BLOCKS * ACT_BLOCK + 7 };
    static float x[Q_TOKENS * STRIDE];
    static quantized want, got;
    const uint32_t n_blocks = 1 + check_below(rng, Q_BLOCKS), t0 = check_below(rng, Q_TOKENS);
    const uint32_t t1 = t0 + check_below(rng, Q_TOKENS + 1 - t0);
    fill(x, Q_TOKENS * STRIDE, rng, check_below(rng, 2));
    for (uint32_t t = 0; t < Q_TOKENS; t++) {
        for (uint32_t b = 0; b < Q_BLOCKS; b++) {
            float *v = x + t * STRIDE + b * ACT_BLOCK;
            const uint32_t kind = check_below(rng, 8);
            if (kind == 0) memset(v, 0, ACT_BLOCK * sizeof *v);
            if (kind == 1)  // around the limit below which a block is zero
                for (int i = 0; i < ACT_BLOCK; i++)
                    v[i] = ldexpf(check_normal(rng), -101 + (int)check_below(rng, 3));
            if (kind == 2)  // ties
                for (int i = 0; i < ACT_BLOCK; i++)
                    v[i] = i ? (float)check_below(rng, 253) * 0.5f - 63.0f : 127.0f;
        }
    }
    for (int turn = 0; turn < 2; turn++) {
        quantized *y = turn ? &got : &want;
        memset(y, 0x55, sizeof *y);
        act_q8 out = {Q_TOKENS, y->q, y->d, y->neg_sum, y->neg_half};
        (turn ? c : s)->quantize(&out, x, STRIDE, n_blocks * ACT_BLOCK, t0, t1);
    }
    if (!memcmp(&want, &got, sizeof want)) return;
    printf("FAILED %s quantize, %u blocks, tokens [%u, %u): differs from scalar\n", c->name,
           n_blocks, t0, t1);
    failures++;
}

static void expect_near(const char *what, double x, double got, double want, double tolerance) {
    if (fabs(got - want) <= tolerance) return;
    printf("FAILED scalar %s at %.9g: %.9g, must be %.9g within %.2g\n", what, x, got, want,
           tolerance);
    failures++;
}

// The scalar definition against libm's doubles.
static void check_truth(const cpu_kernels *s, uint64_t *rng) {
    enum { N = 512 };
    static float x[N], one[N], y[N];
    double squares = 0.0;
    for (int i = 0; i < N; i++) {
        x[i] = check_normal(rng) * (float)(1 << i % 7);
        one[i] = 1.0f;
        squares += (double)x[i] * x[i];
    }
    s->glu(y, x, one, N, GLU_SILU);
    for (int i = 0; i < N; i++) {
        const double v = x[i];
        expect_near("silu", v, y[i], v / (1.0 + exp(-v)), 1e-6 * fabs(v) + 1e-30);
    }
    s->glu(y, x, one, N, GLU_GELU_TANH);
    for (int i = 0; i < N; i++) {
        const double v = x[i];
        const double want =
            0.5 * v * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (v + 0.044715 * v * v * v)));
        expect_near("gelu", v, y[i], want, 1e-6 * fabs(v) + 1e-30);
    }
    s->softcap(y, x, 30.0f, N);
    for (int i = 0; i < N; i++) expect_near("softcap", x[i], y[i], 30.0 * tanh(x[i] / 30.0), 1e-5);
    s->rms_norm(y, x, NULL, N, 1e-6f);
    for (int i = 0; i < N; i++) {
        const double want = x[i] / sqrt(squares / N + 1e-6);
        expect_near("rms_norm", x[i], y[i], want, 1e-6 * fabs(want) + 1e-30);
    }
    act_q8 q = {1, (int8_t[ACT_BLOCK]){0}, (float[1]){0}, (int32_t[1]){0}, (int32_t[2]){0}};
    s->quantize(&q, x, 0, ACT_BLOCK, 0, 1);
    int32_t sum = 0;
    for (int i = 0; i < ACT_BLOCK; i++) {
        expect_near("quantize", x[i], (double)q.q[i] * q.d[0], x[i], 0.5001 * q.d[0]);
        sum += q.q[i];
    }
    expect_near("quantize's neg_sum", 0.0, q.neg_sum[0], -sum, 0.0);
    expect_near("quantize's neg_half", 0.0, q.neg_half[0] + q.neg_half[1], -sum, 0.0);
}

// ---- KV rows ---------------------------------------------------------------------------------

enum { ROW_BYTES = MAX_N * 4 };

typedef struct row_buffers {
    float x[MAX_N], back[2][MAX_N + 2 * GUARD];
    uint8_t row[2][ROW_BYTES + 2 * GUARD];
} row_buffers;

static void report_row(const char *isa, const char *what, int format, uint32_t n) {
    printf("FAILED %s %s of %s rows, n %u\n", isa, what, kv_format_name((kv_format)format), n);
    failures++;
}

// Stores random elements and reads them back; then reads any bytes.
static void check_rows(const cpu_kernels *c, const cpu_kernels *s, uint64_t *rng) {
    static row_buffers m;
    const uint32_t n = KV_BLOCK * (1 + check_below(rng, MAX_N / KV_BLOCK));
    const bool special = check_below(rng, 2);
    fill(m.x, MAX_N, rng, special);
    const float size = check_below(rng, 3) ? 1.0f : ldexpf(1.0f, (int)check_below(rng, 60) - 30);
    for (uint32_t i = 0; i < n; i++) m.x[i] *= size;
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        const uint32_t len = format == KV_FORMAT_Q8_0 ? n : n - check_below(rng, KV_BLOCK);
        memset(m.row, 0x55, sizeof m.row);
        s->kv_store[format](m.row[0] + GUARD, m.x, len);
        c->kv_store[format](m.row[1] + GUARD, m.x, len);
        if (memcmp(m.row[0], m.row[1], sizeof m.row[0])) report_row(c->name, "store", format, len);
        for (int any = 0; any < 2; any++) {
            memset(m.back, 0x55, sizeof m.back);
            s->kv_load[format](m.back[0] + GUARD, m.row[0] + GUARD, len);
            c->kv_load[format](m.back[1] + GUARD, m.row[0] + GUARD, len);
            for (int e = 0; e < 2; e++)  // of rows that no store made, any NaN
                for (int i = 0; i < MAX_N + 2 * GUARD; i++)
                    if (m.back[e][i] != m.back[e][i]) m.back[e][i] = NAN;
            if (memcmp(m.back[0], m.back[1], sizeof m.back[0]))
                report_row(c->name, any ? "load of any" : "load", format, len);
            for (int i = 0; i < ROW_BYTES; i++) m.row[0][GUARD + i] = (uint8_t)check_rand(rng);
        }
    }
}

// The nearest f16, by its definition: a multiple of 2^-24 or of 2^-10 of the power of two below.
static double nearest_f16(double x) {
    if (x != x) return x;
    const int unit = fabs(x) < 0x1p-14 ? -24 : ilogb(x) - 10;
    const double near = ldexp(nearbyint(ldexp(x, -unit)), unit);
    return fabs(near) > 65504.0 ? copysign((double)INFINITY, x) : near;
}

// What scalar rows mean, against doubles.
static void check_rows_truth(const cpu_kernels *s, uint64_t *rng) {
    for (int trial = 0; trial < 2000; trial++) {
        float x[KV_BLOCK], back[KV_BLOCK];
        uint8_t row[4 * KV_BLOCK];
        fill(x, KV_BLOCK, rng, true);
        if (trial % 2)
            x[0] = ldexpf(1.0f + 0x1p-11f * (float)check_below(rng, 8192), trial % 60 - 40);
        s->kv_store[KV_FORMAT_F16](row, x, KV_BLOCK);
        s->kv_load[KV_FORMAT_F16](back, row, KV_BLOCK);
        for (int i = 0; i < KV_BLOCK; i++) {
            const float want = (float)nearest_f16(x[i]);
            if (memcmp(&want, back + i, 4) == 0 || (want != want && back[i] != back[i])) continue;
            printf("FAILED scalar f16: %a is stored as %a, must be %a\n", (double)x[i],
                   (double)back[i], (double)want);
            failures++;
            return;
        }
        fill(x, KV_BLOCK, rng, trial % 4 == 0);
        const float size = ldexpf(1.0f, trial % 50 - 30);
        double top = 0.0;
        for (int i = 0; i < KV_BLOCK; i++) {
            x[i] *= size;
            top = x[i] == x[i] ? fmax(top, fabs((double)x[i])) : (double)INFINITY;
            if (top == (double)INFINITY) break;
        }
        s->kv_store[KV_FORMAT_Q8_0](row, x, KV_BLOCK);
        s->kv_load[KV_FORMAT_Q8_0](back, row, KV_BLOCK);
        const double d = nearest_f16((float)top / 127.0f);
        for (int i = 0; i < KV_BLOCK; i++) {
            const bool lost = !(d <= 65504.0);
            const double error = fabs(back[i] - x[i]), bound = 0.501 * d + fabs(127 * d - top);
            if (lost ? back[i] != back[i] : d == 0.0 ? back[i] == 0.0f : error <= bound) continue;
            printf("FAILED scalar q8_0: %a of a block up to %a is stored as %a\n", (double)x[i],
                   top, (double)back[i]);
            failures++;
            return;
        }
    }
}

int check_ops(const cpu_kernels *candidate, const cpu_kernels *scalar, uint64_t seed) {
    uint64_t rng = seed;
    failures = 0;
    check_truth(scalar, &rng);
    check_rows_truth(scalar, &rng);
    for (int i = 0; i < TRIALS && failures < 20; i++) {
        check_elementwise(candidate, scalar, &rng);
        check_rope(candidate, scalar, &rng);
        check_quantize(candidate, scalar, &rng);
        check_rows(candidate, scalar, &rng);
    }
    return failures;
}
