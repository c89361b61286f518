// The sampler against a naive twin that sorts everything and uses libm, and its random numbers
// against published answers and statistics. All streams are seeded, so a run is repeatable.
#include <fenv.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/alloc.h"
#include "../engine/sampler.h"
#include "check.h"
#include "counted.h"

__extension__ typedef unsigned __int128 u128;

// ---- the twin --------------------------------------------------------------------------------

typedef struct ranked {
    float logit;
    int32_t id;
    uint64_t weight;
} ranked;

static int by_rank(const void *a, const void *b) {
    const ranked *const x = a, *const y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static int by_id(const void *a, const void *b) {
    return ((const ranked *)a)->id < ((const ranked *)b)->id ? -1 : 1;
}

static uint64_t twin_weigh(ranked *r, size_t m, size_t n_vocab, double temperature) {
    int bits = 51;
    while (bits + (int)ceil(log2((double)n_vocab)) > 63) bits--;
    const float max = r[0].logit;
    uint64_t total = 0;
    for (size_t i = 0; i < m; i++) {
        const double gap = r[i].logit == max ? 0 : ((double)r[i].logit - (double)max) / temperature;
        r[i].weight = (uint64_t)llrint(ldexp(exp(gap), bits));
        total += r[i].weight;
    }
    return total;
}

// Tokens in play after all steps, in rank order; r [n] is scratch.
static size_t twin_keep(ranked *r, const float *logits, size_t n, const mf_sampling *s,
                        const int32_t *recent, size_t n_recent) {
    size_t m = 0;
    for (size_t i = 0; i < n; i++) {
        float l = logits[i];
        bool seen = false;
        for (size_t j = 0; j < n_recent; j++) seen |= recent[j] == (int32_t)i;
        if (seen && s->repeat_penalty > 0) {
            const double exact = l > 0 ? (double)l / (double)s->repeat_penalty
                                       : (double)l * (double)s->repeat_penalty;
            if (!isinf(l))
                l = exact > FLT_MAX ? FLT_MAX : exact < -FLT_MAX ? -FLT_MAX : (float)exact;
        }
        if (!isnan(l) && l != -INFINITY) r[m++] = (ranked){l, (int32_t)i, 0};
    }
    qsort(r, m, sizeof *r, by_rank);
    if (m == 0) return 0;
    if (s->temperature == 0) return 1;
    if (s->top_k > 0 && (size_t)s->top_k < m) m = (size_t)s->top_k;
    if (s->top_p > 0 && s->top_p < 1) {
        const long double goal = (long double)s->top_p * twin_weigh(r, m, n, 1.0);
        uint64_t sum = r[0].weight;
        size_t kept = 1;
        while (kept < m && (long double)sum < goal) sum += r[kept++].weight;
        m = kept;
    }
    if (s->min_p > 0) {
        const float max = r[0].logit;
        while (r[m - 1].logit != max &&
               exp((double)r[m - 1].logit - (double)max) < (double)s->min_p) {
            m--;
        }
    }
    return m;
}

static int32_t twin_draw(ranked *r, size_t m, size_t n, const mf_sampling *s, uint64_t position) {
    if (m == 1) return r[0].id;
    const uint64_t total = twin_weigh(r, m, n, (double)s->temperature);
    uint64_t rest = (uint64_t)((u128)sampler_bits(s->seed, s->choice, position) * total >> 64);
    qsort(r, m, sizeof *r, by_id);
    size_t i = 0;
    for (; rest >= r[i].weight; i++) rest -= r[i].weight;
    return r[i].id;
}

// ---- random cases ----------------------------------------------------------------------------

static uint64_t stream;

static size_t below(size_t n) { return (size_t)check_below(&stream, (uint32_t)n); }

static float pick_float(const float *values, size_t n) { return values[below(n)]; }
#define PICK(...) \
    pick_float((const float[]){__VA_ARGS__}, sizeof((const float[]){__VA_ARGS__}) / sizeof(float))

static void fill(float *logits, size_t n) {
    const size_t kind = below(8);
    const float scale = PICK(0.01f, 1, 3, 10, 100);
    for (size_t i = 0; i < n; i++) {
        switch (kind) {
            case 0:
                logits[i] = 5;
                break;
            case 1:
                logits[i] = (float)below(3) - 1;
                break;  // ties everywhere
            case 2:
                logits[i] = scale * (float)i / (float)n;
                break;
            case 3:
                logits[i] = -scale * (float)i / (float)n;
                break;
            case 4:  // every special value, and both zeros
                logits[i] = PICK(0.0f, -0.0f, NAN, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX, 1e-45f,
                                 -1e-45f, 1, -1, 2);
                break;
            case 5:
                logits[i] = below(4) ? PICK(-INFINITY, NAN) : check_normal(&stream);
                break;
            case 6:
                logits[i] = roundf(4 * check_normal(&stream)) / 4;
                break;
            default:
                logits[i] = scale * check_normal(&stream);
                break;
        }
        if (kind != 4 && below(50) == 0) logits[i] = PICK(NAN, -INFINITY, -0.0f, 0);
    }
}

static mf_sampling options(size_t n) {
    mf_sampling s = {.size = sizeof s, .seed = check_rand(&stream), .choice = below(3)};
    // A huge temperature makes all weights equal: then a draw shows where the set ends.
    s.temperature = PICK(1, 0.7f, 1e30f, FLT_MAX, 1e30f, 1e-3f, 1e-45f, 2, 0);
    if (below(2)) s.top_k = below(4) ? 1 + (int32_t)below(n + 2) : (int32_t)PICK(1, 2, 40, 2e9f);
    if (below(2)) s.top_p = PICK(0.95f, 0.5f, 0.1f, 0.999f, 0.99999994f, 1e-3f, 1e-30f, 1e-45f, 1);
    if (below(3) == 0) s.min_p = PICK(0.05f, 0.5f, 1, 1e-6f, 1e-40f);
    if (below(2)) s.repeat_penalty = PICK(1.1f, 2, 0.5f, 1, 1e-40f, 3e38f);
    return s;
}

static void test_against_twin(size_t n_cases, size_t max_n, size_t draws) {
    float *const logits = malloc(max_n * sizeof *logits);
    ranked *const r = malloc(max_n * sizeof *r), *const scratch = malloc(max_n * sizeof *r);
    size_t wrong = 0, refused = 0;
    for (size_t i = 0; i < n_cases && wrong < 5; i++) {
        const size_t n = below(2) ? max_n : 1 + below(max_n);
        int32_t recent[8];
        const size_t n_recent = below(9);
        for (size_t j = 0; j < n_recent; j++) recent[j] = (int32_t)below(n);
        fill(logits, n);
        mf_sampling s = options(n);
        const size_t m = twin_keep(r, logits, n, &s, recent, n_recent);
        for (size_t draw = 0; draw < draws; draw++) {
            const uint64_t position = draw * 977;
            int32_t expected = -7, got = -7;
            if (m) {
                memcpy(scratch, r, m * sizeof *r);
                expected = twin_draw(scratch, m, n, &s, position);
            }
            const int status = mf_sample(&got, logits, n, &s, recent, n_recent, position);
            refused += status != MF_OK;
            if (status == (m ? MF_OK : MF_ARG) && got == expected) continue;
            wrong++;
            printf("case %zu: n %zu, temperature %g, top_k %" PRId32
                   ", top_p %.9g, min_p %g, "
                   "repeat_penalty %g, %zu recent, %zu kept: token %" PRId32 ", expected %" PRId32
                   ", status %d\n",
                   i, n, (double)s.temperature, s.top_k, (double)s.top_p, (double)s.min_p,
                   (double)s.repeat_penalty, n_recent, m, got, expected, status);
            break;
        }
    }
    CHECK(wrong == 0, "%zu cases of up to %zu tokens differ from the twin", wrong, max_n);
    CHECK(max_n > 40 || refused > 0, "no case of up to %zu tokens had nothing to pick", max_n);
    free(logits);
    free(r);
    free(scratch);
}

// ---- random numbers --------------------------------------------------------------------------

// Random123's known answers for philox4x32-10: counter and key of zeros, ones and digits of pi.
static void test_known_answers(void) {
    const struct {
        uint64_t seed, choice, position, bits;
    } known[] = {
        {0, 0, 0, 0xe169c58d6627e8d5},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, 0x41c83b0e408f276d},
        {0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88, 0x94fdccebd16cfe09},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const uint64_t got = sampler_bits(known[i].seed, known[i].choice, known[i].position);
        CHECK(got == known[i].bits, "known answer %zu: %016" PRIx64 ", expected %016" PRIx64, i,
              got, known[i].bits);
    }
}

static uint64_t bits_along(int axis, uint64_t i) {
    return sampler_bits(axis == 0 ? i : 7, axis == 1 ? i : 3, axis == 2 ? i : 11);
}

static void test_statistics(void) {
    enum { N = 100000, BUCKETS = 256 };
    static const char *const axes[] = {"seed", "choice", "position"};
    for (int axis = 0; axis < 3; axis++) {
        for (int shift = 0; shift < 64; shift += 8) {
            uint32_t count[BUCKETS] = {0};
            for (uint64_t i = 0; i < N; i++) count[bits_along(axis, i) >> shift & 255]++;
            double chi2 = 0;
            for (int b = 0; b < BUCKETS; b++) {
                const double d = count[b] - (double)N / BUCKETS;
                chi2 += d * d / ((double)N / BUCKETS);
            }
            // 255 degrees of freedom: mean 255, deviation 22.6
            CHECK(chi2 > 165 && chi2 < 345, "chi-square along %s, byte %d: %g", axes[axis],
                  shift / 8, chi2);
        }
        for (int other = 0; other < 3; other++) {  // neighbours along `other`
            double sum = 0;
            for (uint64_t i = 0; i < N; i++) {
                uint64_t at[3] = {5, 5, 5};
                at[axis] = i;
                const uint64_t a = sampler_bits(at[0], at[1], at[2]);
                at[other]++;
                const uint64_t b = sampler_bits(at[0], at[1], at[2]);
                sum += ((double)a * 0x1p-64 - 0.5) * ((double)b * 0x1p-64 - 0.5) * 12;
            }
            // deviation 1/sqrt(N)
            CHECK(fabs(sum / N) < 0.0135, "correlation of neighbouring %ss along %s: %g",
                  axes[other], axes[axis], sum / N);
        }
    }
    double flips = 0;
    for (uint64_t i = 0; i < 200 * 192; i++) {
        uint64_t at[3] = {i / 192, i / 192 * 3, i / 192 * 5};
        const uint64_t a = sampler_bits(at[0], at[1], at[2]);
        at[i % 192 / 64] ^= (uint64_t)1 << i % 64;
        const uint64_t changed = a ^ sampler_bits(at[0], at[1], at[2]);
        const int n = __builtin_popcountll(changed);
        flips += n;
        if (n < 8 || n > 56)
            CHECK(false, "flipping input bit %d changes %d bits", (int)(i % 192), n);
    }
    CHECK(fabs(flips / (200 * 192) - 32) < 0.12, "an input bit changes %g bits",
          flips / (200 * 192));
}

static void test_frequencies(void) {
    enum { N = 200000, TOKENS = 8 };
    const float logits[TOKENS] = {1, 3, -2, 0.5f, NAN, 2.75f, 3, -INFINITY};
    const struct {
        float temperature, top_p, min_p;
        int32_t top_k;
        size_t kept;  // in rank order 1 6 5 0 3 2
        int freedom;
    } cases[] = {{1, 0, 0, 0, 6, 5},
                 {0.5f, 0, 0, 3, 3, 2},
                 {4, 0.9f, 0, 0, 3, 2},
                 {2, 0, 0.05f, 0, 5, 4},
                 {1e30f, 0, 0, 5, 5, 4}};
    const int32_t rank[] = {1, 6, 5, 0, 3, 2};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        double total = 0, chi2 = 0;
        uint32_t count[TOKENS] = {0}, seen = 0;
        mf_sampling s = {.size = sizeof s,
                         .temperature = cases[c].temperature,
                         .top_k = cases[c].top_k,
                         .top_p = cases[c].top_p,
                         .min_p = cases[c].min_p,
                         .seed = 42};
        for (uint64_t i = 0; i < N; i++) {
            int32_t token = -1;
            if (mf_sample(&token, logits, TOKENS, &s, NULL, 0, i) == MF_OK) count[token]++;
        }
        for (size_t i = 0; i < cases[c].kept; i++) {
            total += exp((double)logits[rank[i]] / (double)s.temperature);
        }
        for (size_t i = 0; i < cases[c].kept; i++) {
            const double e = N * exp((double)logits[rank[i]] / (double)s.temperature) / total;
            chi2 += (count[rank[i]] - e) * (count[rank[i]] - e) / e;
            seen += count[rank[i]];
        }
        CHECK(seen == N, "frequencies %zu: %u of %d draws are in the set", c, seen, N);
        CHECK(chi2 < cases[c].freedom + 5 * sqrt(2.0 * cases[c].freedom),
              "frequencies %zu: chi-square %g with %d degrees of freedom", c, chi2,
              cases[c].freedom);
    }
}

// ---- the contract ----------------------------------------------------------------------------

// Tokens drawn on every machine, by every compiler: the constant was made once.
static void test_same_everywhere(void) {
    enum { N = 3000 };
    float logits[N];
    uint64_t hash = 0xcbf29ce484222325u, state = 1;
    for (uint64_t i = 0; i < 2000; i++) {
        for (size_t j = 0; i % 100 == 0 && j < N; j++) {
            logits[j] = (float)(int32_t)check_rand(&state) * 0x1p-28f;
        }
        const int32_t recent[] = {(int32_t)i, 5, 9};
        const mf_sampling s = {sizeof s, 0.8f, i % 3 ? 0 : 300, i % 2 ? 0.9f : 0, 1e-4f, 1.2f,
                               i,        2};
        int32_t token = -1;
        if (mf_sample(&token, logits, N, &s, recent, 3, i * i)) break;
        hash = (hash ^ (uint64_t)token) * 0x100000001b3u;
    }
    CHECK(hash == 0x047b1db2a033cdfc, "hash of 2000 drawn tokens: %016" PRIx64, hash);
}

static void test_by_hand(void) {
    const float logits[] = {1, NAN, 4, -INFINITY, 4, 3};
    int32_t token;
    mf_sampling s = {.size = sizeof s};
    CHECK(!mf_sample(&token, logits, 6, &s, NULL, 0, 0) && token == 2, "greedy: %d", token);
    s.repeat_penalty = 1.5f;  // 4 / 1.5 < 3
    CHECK(!mf_sample(&token, logits, 6, &s, (int32_t[]){2, 2}, 2, 0) && token == 4,
          "greedy, 2 penalised: %d", token);
    CHECK(!mf_sample(&token, logits, 6, &s, (int32_t[]){2, 4, 4}, 3, 0) && token == 5,
          "greedy, 2 and 4 penalised: %d", token);
    const float twice[] = {6, 3.5f};  // once 4 wins, twice 2.67 would not
    CHECK(!mf_sample(&token, twice, 2, &s, (int32_t[]){0, 0, 0}, 3, 0) && token == 0,
          "greedy, penalised once: %d", token);
    const float inf[] = {1, INFINITY, 2, INFINITY};
    s.repeat_penalty = 0;
    CHECK(!mf_sample(&token, inf, 4, &s, NULL, 0, 0) && token == 1, "greedy, Inf: %d", token);
    s.temperature = 1;
    int drawn[4] = {0};
    for (uint64_t i = 0; i < 100; i++) {
        if (!mf_sample(&token, inf, 4, &s, NULL, 0, i)) drawn[token]++;
    }
    CHECK(drawn[1] > 20 && drawn[3] > 20 && drawn[1] + drawn[3] == 100,
          "two Inf drawn %d and %d times of 100", drawn[1], drawn[3]);
}

// The host's rounding must not reach the token: rounded down, 1 / 3 equals its rival of lower id.
// fegetround would not do for the second check: on x86 it reads the register that SSE ignores.
static void test_host_rounding(void) {
    volatile float one = 1;
    const float down = nextafterf(one / 3.0f, 0);
    const float logits[] = {down, 1};
    const mf_sampling s = {.size = sizeof s, .repeat_penalty = 3};
    int32_t token = -1;
    fesetround(FE_DOWNWARD);
    const int status = mf_sample(&token, logits, 2, &s, (int32_t[]){1}, 1, 0);
    const float after = one / 3.0f;
    fesetround(FE_TONEAREST);
    CHECK(status == MF_OK && token == 1, "host rounds down: status %d, token %d", status, token);
    CHECK(after == down, "the host's rounding mode was not restored: 1/3 = %.9g", (double)after);
}

// Above 2^18 tokens a block has several chunks; here two tokens share a block, one has its own.
static void test_wide_blocks(void) {
    enum { N = 300001 };
    float *const logits = malloc(N * sizeof *logits);
    const int32_t ids[] = {10, 300, N - 1};
    int drawn[3] = {0};
    for (size_t i = 0; i < N; i++) logits[i] = -INFINITY;
    for (size_t i = 0; i < 3; i++) logits[ids[i]] = 1;
    for (uint64_t i = 0; i < 90; i++) {
        const mf_sampling s = {.size = sizeof s, .temperature = 1, .top_p = i % 2 ? 0 : 0.999f};
        int32_t token = -1;
        if (mf_sample(&token, logits, N, &s, NULL, 0, i)) continue;
        for (size_t j = 0; j < 3; j++) drawn[j] += token == ids[j];
    }
    CHECK(drawn[0] > 15 && drawn[1] > 15 && drawn[2] > 15 && drawn[0] + drawn[1] + drawn[2] == 90,
          "three equal tokens drawn %d, %d and %d times of 90", drawn[0], drawn[1], drawn[2]);
    free(logits);
}

static void refuse(int status, int expected, int32_t token, const char *needle) {
    CHECK(status == expected && token == -7 && strstr(mf_last_error(), needle) &&
              !strchr(mf_last_error(), '\n'),
          "refusal '%s': status %d, token %d, message '%s'", needle, status, token,
          mf_last_error());
}

static void test_refusals(void) {
    const float logits[4] = {1, 2, 3, 4};
    const mf_sampling good = {.size = sizeof good};
    int32_t t = -7;
    refuse(mf_sample(NULL, logits, 4, &good, NULL, 0, 0), MF_ARG, t, "token: NULL");
    refuse(mf_sample(&t, NULL, 4, &good, NULL, 0, 0), MF_ARG, t, "logits: NULL");
    refuse(mf_sample(&t, logits, 4, NULL, NULL, 0, 0), MF_ARG, t, "sampling: NULL");
    refuse(mf_sample(&t, logits, 0, &good, NULL, 0, 0), MF_ARG, t, "n_vocab: 0");
    refuse(mf_sample(&t, logits, (size_t)1 << 31, &good, NULL, 0, 0), MF_ARG, t,
           "n_vocab: 2147483648");
    refuse(mf_sample(&t, logits, 4, &good, NULL, 3, 0), MF_ARG, t, "n_recent is 3");
    const int32_t high[] = {0, 4}, low[] = {0, 3, -1};
    refuse(mf_sample(&t, logits, 4, &good, high, 2, 0), MF_ARG, t, "recent[1]: token 4");
    refuse(mf_sample(&t, logits, 4, &good, low, 3, 0), MF_ARG, t, "recent[2]: token -1");

    mf_sampling s;
#define REFUSE(field, value, needle) \
    s = good;                        \
    s.field = value;                 \
    refuse(mf_sample(&t, logits, 4, &s, NULL, 0, 0), MF_ARG, t, needle)
    REFUSE(size, 0, "options.size is 0;");
    REFUSE(size, sizeof s - 1, "options.size is 47;");
    REFUSE(size, SIZE_MAX, "options.size is 18446744073709551615;");
    REFUSE(temperature, -0.5f, "sampling.temperature: -0.5");
    REFUSE(temperature, NAN, "sampling.temperature: nan");
    REFUSE(temperature, INFINITY, "sampling.temperature: inf");
    REFUSE(top_k, -5, "sampling.top_k: -5");
    REFUSE(top_p, 1.5f, "sampling.top_p: 1.5");
    REFUSE(top_p, -0.25f, "sampling.top_p: -0.25");
    REFUSE(top_p, NAN, "sampling.top_p: nan");
    REFUSE(min_p, 2, "sampling.min_p: 2");
    REFUSE(min_p, -INFINITY, "sampling.min_p: -inf");
    REFUSE(repeat_penalty, -1, "sampling.repeat_penalty: -1");
    REFUSE(repeat_penalty, NAN, "sampling.repeat_penalty: nan");
    REFUSE(repeat_penalty, INFINITY, "sampling.repeat_penalty: inf");

    const float none[3] = {NAN, -INFINITY, -NAN};
    s = good;
    refuse(mf_sample(&t, none, 3, &s, NULL, 0, 0), MF_ARG, t, "logits: all 3");
    s.temperature = 1;
    s.repeat_penalty = 2;
    refuse(mf_sample(&t, none, 3, &s, (int32_t[]){1}, 1, 0), MF_ARG, t, "logits: all 3");

    const size_t alive = mem_alive();
    mem_fail_after(0);
    refuse(mf_sample(&t, logits, 4, &s, low, 2, 0), MF_NOMEM, t, "out of memory");
    mem_fail_after(0);
    s.repeat_penalty = 0;
    s.top_k = 2;
    s.top_p = 0.5f;
    const int status = mf_sample(&t, logits, 4, &s, low, 2, 0);
    mem_fail_after(SIZE_MAX);
    CHECK(status == MF_OK && t >= 2, "without a penalty nothing is allocated: status %d", status);
    s.repeat_penalty = 2;
    CHECK(mf_sample(&t, logits, 4, &s, low, 2, 0) == MF_OK, "after a failed allocation: '%s'",
          mf_last_error());
    CHECK(mem_alive() == alive, "%zu allocations alive, %zu before", mem_alive(), alive);
}

int main(void) {
    stream = 20240601;
    test_known_answers();
    test_statistics();
    test_by_hand();
    test_same_everywhere();
    test_against_twin(6000, 12, 4);
    test_against_twin(1500, 700, 3);
    test_against_twin(100, 5000, 2);
    test_against_twin(12, 300001, 1);  // above 2^18: blocks of two chunks
    test_frequencies();
    test_wide_blocks();
    test_host_rounding();
    test_refusals();
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
