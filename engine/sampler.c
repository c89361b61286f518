// Owns the sampling steps and the counter-based random number.
//
// Invariant: after every step the tokens still in play are a beginning of the rank order (larger
// logit first, then lower id). Such a set is two numbers, `floor` and `last`, so nothing is sorted
// and nothing is copied: a step walks the logits and raises the floor. Walks skip every block whose
// largest logit lies below the floor; after top_k or top_p hardly any block is left.
#include "sampler.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "alloc.h"
#include "error.h"

__extension__ typedef unsigned __int128 u128;

enum {
    CHUNK = 256,      // tokens handled together; whatever is kept per token lives on the stack
    N_BLOCKS = 1024,  // most parts of the vocabulary whose largest logit is remembered
    DIGIT_BITS = 11   // a rank is found digit by digit, as a radix sort would
};

typedef struct candidates {
    const float *logits;  // [n], before the penalty
    size_t n;
    const uint64_t *marked;  // one bit per token: penalised; NULL: none is
    float penalty;
    size_t block;  // tokens per block, a multiple of CHUNK
    size_t n_blocks;
    float best[N_BLOCKS];  // largest logit of each block, after the penalty; -Inf if it has none
    float max;             // largest of all
    float floor;           // in play: logit > floor,
    uint32_t last;         //          or logit == floor and id <= last
    double one;            // 2^b, the weight of the best token
} candidates;

// ---- random bits -----------------------------------------------------------------------------

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11),
// a keyed bijection of 128-bit counters that passes BigCrush. Its sizes are ours: the seed is the
// key, (position, choice) is the counter, so two draws of one seed never share a counter and there
// is nothing to hash. The first half of the output is used.
uint64_t sampler_bits(uint64_t seed, uint64_t choice, uint64_t position) {
    uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32);
    uint32_t c2 = (uint32_t)choice, c3 = (uint32_t)(choice >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)c0 * 0xD2511F53u;
        const uint64_t b = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;  // golden ratio and sqrt(3) - 1, the paper's key schedule
        k1 += 0xBB67AE85u;
    }
    return (uint64_t)c1 << 32 | c0;
}

// ---- weights ---------------------------------------------------------------------------------

// e^x for x in [-200, 0], exactly 1 at 0, error below 2^-51. x = k ln 2 + r with |r| <= ln 2 / 2,
// then Taylor's series to r^12. Adding 1.5 * 2^52 rounds to an integer and leaves it in the low
// bits, ready to be added to the exponent: no branch, so compilers make vector code of the loop.
static inline double exp_negative(double x) {
    const double shifted = x * 0x1.71547652b82fep0 + 0x1.8p52;
    const double k = shifted - 0x1.8p52;
    const double r = (x - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
    double y = 1.0 / 479001600;
    y = y * r + 1.0 / 39916800;
    y = y * r + 1.0 / 3628800;
    y = y * r + 1.0 / 362880;
    y = y * r + 1.0 / 40320;
    y = y * r + 1.0 / 5040;
    y = y * r + 1.0 / 720;
    y = y * r + 1.0 / 120;
    y = y * r + 1.0 / 24;
    y = y * r + 1.0 / 6;
    y = y * r + 0.5;
    y = y * r + 1.0;
    y = y * r + 1.0;
    uint64_t bits, exponent;
    memcpy(&bits, &y, sizeof bits);
    memcpy(&exponent, &shifted, sizeof exponent);
    bits += exponent << 52;
    memcpy(&y, &bits, sizeof y);
    return y;
}

// (logit - max) / temperature for logit <= max, cut at -200, where a weight is 0 and e^x is
// below the least min_p. Inf - Inf, which is NaN, counts as equal.
static inline double gap_of(float logit, double max, double inverse_temperature) {
    const double gap = ((double)logit - max) * inverse_temperature;
    const double at_most_0 = gap < 0.0 ? gap : 0.0;
    return at_most_0 > -200.0 ? at_most_0 : -200.0;
}

// weights [n] of logits [n], n <= CHUNK. Two loops, because in one gcc branches on the cuts instead
// of making vector code. Adding 2^52 leaves the rounded integer in the mantissa.
static void weigh(uint64_t *weights, const candidates *c, const float *logits, size_t n,
                  double inverse_temperature) {
    double gaps[CHUNK];
    const double max = (double)c->max;
    const double one = c->one;
    for (size_t i = 0; i < n; i++) gaps[i] = gap_of(logits[i], max, inverse_temperature);
    for (size_t i = 0; i < n; i++) {
        const double w = exp_negative(gaps[i]) * one + 0x1p52;
        uint64_t bits;
        memcpy(&bits, &w, sizeof bits);
        weights[i] = bits & (((uint64_t)1 << 52) - 1);
    }
}

// ---- the rank order --------------------------------------------------------------------------

// A key orders like its logit; -0 has the key of 0.
static inline uint32_t key_of(float logit) {
    uint32_t bits;
    memcpy(&bits, &logit, sizeof bits);
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static float logit_of(uint32_t key) {
    const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float logit;
    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

static void raise_floor(candidates *c, uint32_t key) {
    if (key <= key_of(c->floor)) return;
    c->floor = logit_of(key);
    c->last = UINT32_MAX;
}

static float penalised(float logit, float penalty) {
    const float l = logit > 0 ? logit / penalty : logit * penalty;
    if (isinf(l) && !isinf(logit)) return l > 0 ? FLT_MAX : -FLT_MAX;
    return l;
}

// Logits of the tokens [from, from + n), one chunk: the caller's, or `patched` if one is penalised.
static const float *chunk_logits(float patched[CHUNK], const candidates *c, size_t from, size_t n) {
    if (!c->marked) return c->logits + from;
    const uint64_t *const marked = c->marked + from / 64;
    uint64_t any = 0;
    for (size_t i = 0; i < CHUNK / 64; i++) any |= marked[i];
    if (!any) return c->logits + from;
    memcpy(patched, c->logits + from, n * sizeof *patched);
    for (size_t i = 0; i < n; i++) {
        if (marked[i / 64] >> (i % 64) & 1) patched[i] = penalised(patched[i], c->penalty);
    }
    return patched;
}

// The largest of l [n]; a NaN never compares greater, so it never wins. Lanes, so that the compiler
// may keep several maxima at once; which of them a logit meets makes no difference.
static float chunk_max(const float *l, size_t n) {
    enum { LANES = 16 };
    float lane[LANES];
    for (size_t j = 0; j < LANES; j++) lane[j] = -INFINITY;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t j = 0; j < LANES; j++) lane[j] = l[i + j] > lane[j] ? l[i + j] : lane[j];
    }
    for (; i < n; i++) lane[0] = l[i] > lane[0] ? l[i] : lane[0];
    for (size_t j = 1; j < LANES; j++) lane[0] = lane[j] > lane[0] ? lane[j] : lane[0];
    return lane[0];
}

// The first walk: the largest logits, and everything in play but NaN and -Inf.
static void survey(candidates *c) {
    float patched[CHUNK];
    c->max = -INFINITY;
    for (size_t b = 0; b < c->n_blocks; b++) {
        float best = -INFINITY;
        const size_t end = c->n - b * c->block < c->block ? c->n : (b + 1) * c->block;
        for (size_t from = b * c->block; from < end; from += CHUNK) {
            const size_t n = end - from < CHUNK ? end - from : CHUNK;
            const float max = chunk_max(chunk_logits(patched, c, from, n), n);
            if (max > best) best = max;
        }
        c->best[b] = best;
        if (best > c->max) c->max = best;
    }
    c->floor = -FLT_MAX;
    c->last = UINT32_MAX;
}

// Visits the tokens in play by id, chunk by chunk: after walk_next, `n` >= 1 of them lie in `logit`
// and `token`, all of block `block`.
typedef struct walk {
    size_t next, end;  // ids still to look at
    float ceiling;     // only logits below it; NaN: all
    size_t block;
    size_t n;
    float logit[CHUNK];
    uint32_t token[CHUNK];
    float patched[CHUNK];
} walk;

static void walk_start(walk *w, size_t begin, size_t end) {
    w->next = begin;
    w->end = end;
    w->ceiling = NAN;
}

static bool walk_next(walk *w, const candidates *c) {
    const float floor = c->floor;
    const float ceiling = w->ceiling;
    const uint32_t last = c->last;
    while (w->next < w->end) {
        const size_t from = w->next;
        w->block = from / c->block;
        if (c->best[w->block] < floor) {
            w->next = (w->block + 1) * c->block;
            continue;
        }
        const size_t n = w->end - from < CHUNK ? w->end - from : CHUNK;
        const float *const l = chunk_logits(w->patched, c, from, n);
        uint32_t in_play[CHUNK];
        for (size_t i = 0; i < n; i++) {
            const uint32_t id = (uint32_t)(from + i);
            const uint32_t ranked = (l[i] > floor) | ((l[i] == floor) & (id <= last));
            in_play[i] = ranked & !(l[i] >= ceiling);
        }
        size_t kept = 0;
        for (size_t i = 0; i < n; i++) {  // without a branch: it would be a coin toss
            w->logit[kept] = l[i];
            w->token[kept] = (uint32_t)(from + i);
            kept += in_play[i];
        }
        w->n = kept;
        w->next = from + n;
        if (kept) return true;
    }
    return false;
}

// ---- the steps -------------------------------------------------------------------------------

// Keeps the first `wanted` of the tokens whose logit is exactly the floor.
static void limit_ties(candidates *c, uint64_t wanted) {
    walk w;
    walk_start(&w, 0, c->n);
    while (walk_next(&w, c)) {
        for (size_t i = 0; i < w.n; i++) {
            if (w.logit[i] == c->floor && --wanted == 0) {
                c->last = w.token[i];
                return;
            }
        }
    }
}

// Adds up, by the digit of the key at `shift`, the number or weight of the tokens in play whose
// higher digits are `high`. The floor is the lowest key of that kind already; the ceiling is the
// first key beyond, which above Inf is a NaN and so no ceiling.
static void fill_bins(uint64_t bins[1 << DIGIT_BITS], const candidates *c, bool by_weight,
                      uint32_t high, unsigned shift) {
    walk w;
    uint64_t weights[CHUNK];
    memset(bins, 0, sizeof *bins << DIGIT_BITS);
    walk_start(&w, 0, c->n);
    w.ceiling = logit_of((uint32_t)((uint64_t)(high + 1) << (shift + DIGIT_BITS)));
    while (walk_next(&w, c)) {
        if (by_weight) weigh(weights, c, w.logit, w.n, 1.0);
        for (size_t i = 0; i < w.n; i++) {
            const uint32_t digit = key_of(w.logit[i]) >> shift & ((1 << DIGIT_BITS) - 1);
            bins[digit] += by_weight ? weights[i] : 1;
        }
    }
}

// Keeps the shortest beginning of the rank order that holds `need` tokens (top_p == 0) or the
// fraction top_p of the weight. 32 bits of key are three digits; each round finds the one at which
// the running sum, from the best token down, reaches `need`, and raises the floor to it.
static void keep_beginning(candidates *c, uint64_t need, float top_p) {
    const bool by_weight = top_p > 0;
    uint64_t bins[1 << DIGIT_BITS];
    uint64_t above = 0;  // the sum over all tokens with larger digits
    uint32_t high = 0;   // the digits found so far
    for (int round = 0; round < 3; round++) {
        // 10 + 11 + 11 bits
        static const unsigned shifts[] = {22, 11, 0};
        fill_bins(bins, c, by_weight, high, shifts[round]);
        if (round == 0) {
            uint64_t total = 0;
            for (size_t i = 0; i < 1 << DIGIT_BITS; i++) total += bins[i];
            if (by_weight) {  // ceil(top_p * total), top_p as a fraction of 2^63, at least 1
                const uint64_t p = (uint64_t)((double)top_p * 0x1p63);
                need = (uint64_t)(((u128)total * p + (((uint64_t)1 << 63) - 1)) >> 63);
                if (need == 0) need = 1;
            }
            if (need >= total) return;
        }
        uint32_t digit = (1 << DIGIT_BITS) - 1;
        for (; digit && above + bins[digit] < need; digit--) above += bins[digit];
        high = high << DIGIT_BITS | digit;
        raise_floor(c, high << shifts[round]);
    }
    uint64_t each = 1;  // of the tokens that share the key found
    if (by_weight) weigh(&each, c, &c->floor, 1, 1.0);
    limit_ties(c, (need - above + each - 1) / each);
}

// k blocks have k best tokens, so the k-th largest of those is a floor under the k-th token: found
// by bisection of the keys, it leaves about k blocks to look at.
static void keep_top_k(candidates *c, uint64_t k) {
    uint32_t low = key_of(c->floor), high = key_of(c->max);
    while (k <= c->n_blocks && low < high) {
        const uint32_t middle = high - (high - low) / 2;
        const float floor = logit_of(middle);
        uint64_t n = 0;
        for (size_t b = 0; b < c->n_blocks; b++) n += c->best[b] >= floor;
        if (n >= k) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    raise_floor(c, low);
    keep_beginning(c, k, 0.0f);
}

static void keep_min_p(candidates *c, float min_p) {
    uint32_t low = key_of(c->floor), high = key_of(c->max);
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (exp_negative(gap_of(logit_of(middle), (double)c->max, 1.0)) >= (double)min_p) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    raise_floor(c, low);
}

// Every walk reads the caller's memory anew.
static int changed_meanwhile(void) {
    return fail(MF_ARG, "logits: changed while a token was picked; keep other threads off them");
}

// The token whose interval, of the weights laid end to end by id, holds bits / 2^64 of the total.
// Its probability is thus right to 2^-64, which 53-bit floats would not give.
static int draw(int32_t *token, const candidates *c, double inverse_temperature, uint64_t bits) {
    walk w;
    uint64_t weights[CHUNK];
    uint64_t sums[N_BLOCKS] = {0};
    uint64_t total = 0;
    walk_start(&w, 0, c->n);
    while (walk_next(&w, c)) {
        uint64_t sum = 0;
        weigh(weights, c, w.logit, w.n, inverse_temperature);
        for (size_t i = 0; i < w.n; i++) sum += weights[i];
        sums[w.block] += sum;
        total += sum;
    }
    uint64_t rest = (uint64_t)((u128)bits * total >> 64);
    size_t b = 0;
    for (; b < c->n_blocks && rest >= sums[b]; b++) rest -= sums[b];
    if (b == c->n_blocks) return changed_meanwhile();
    const size_t begin = b * c->block;
    walk_start(&w, begin, c->n - begin < c->block ? c->n : begin + c->block);
    while (walk_next(&w, c)) {
        weigh(weights, c, w.logit, w.n, inverse_temperature);
        for (size_t i = 0; i < w.n; i++) {
            if (rest < weights[i]) {
                *token = (int32_t)w.token[i];
                return MF_OK;
            }
            rest -= weights[i];
        }
    }
    return changed_meanwhile();
}

// The first of the largest logits.
static int greedy(int32_t *token, candidates *c) {
    walk w;
    raise_floor(c, key_of(c->max));
    walk_start(&w, 0, c->n);
    if (!walk_next(&w, c)) return changed_meanwhile();
    *token = (int32_t)w.token[0];
    return MF_OK;
}

static int mark_recent(uint64_t **marked, size_t n_vocab, const int32_t *recent, size_t n_recent) {
    uint64_t *const bits = mem_alloc((n_vocab + CHUNK - 1) / CHUNK, CHUNK / 8);
    if (!bits) return MF_NOMEM;
    for (size_t i = 0; i < n_recent; i++) {
        bits[recent[i] / 64] |= (uint64_t)1 << (recent[i] % 64);
    }
    *marked = bits;
    return MF_OK;
}

int sampler_pick(int32_t *token, const float *logits, size_t n_vocab, const mf_sampling *s,
                 const int32_t *recent, size_t n_recent, uint64_t position) {
    assert(n_vocab >= 1 && n_vocab <= INT32_MAX);
    candidates c = {.logits = logits, .n = n_vocab, .penalty = s->repeat_penalty};
    uint64_t *marked = NULL;
    if (n_recent > 0 && s->repeat_penalty != 0.0f && s->repeat_penalty != 1.0f) {
        TRY(mark_recent(&marked, n_vocab, recent, n_recent));
    }
    c.marked = marked;
    c.block = ((n_vocab - 1) / N_BLOCKS / CHUNK + 1) * CHUNK;
    c.n_blocks = (n_vocab - 1) / c.block + 1;
    c.one = 0x1p51;
    for (size_t n = 1 << 12; n < n_vocab; n *= 2) c.one *= 0.5;
    survey(&c);

    int status;
    if (c.max == -INFINITY) {
        status = fail(MF_ARG,
                      "logits: all %zu are NaN or -Inf, so no token can be picked; check the "
                      "weights and what was added to the logits",
                      n_vocab);
    } else if (s->temperature == 0.0f) {
        status = greedy(token, &c);
    } else {
        if (s->top_k > 0) keep_top_k(&c, (uint64_t)s->top_k);
        if (s->top_p > 0.0f && s->top_p < 1.0f) keep_beginning(&c, 0, s->top_p);
        if (s->min_p > 0.0f) keep_min_p(&c, s->min_p);
        const uint64_t bits = sampler_bits(s->seed, s->choice, position);
        status = draw(token, &c, 1.0 / (double)s->temperature, bits);
    }
    mem_free(marked);
    return status;
}
