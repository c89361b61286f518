// Layer 7: mf_sample. Owns the argument checks: whatever sampler_pick takes for granted is refused
// here, by name and value. Nothing is written on failure.
#include <inttypes.h>
#include <math.h>

#include "api_args.h"
#include "pool.h"
#include "sampler.h"

static int check_fraction(float value, const char *field) {
    if (value >= 0.0f && value <= 1.0f) return MF_OK;
    return fail(MF_ARG, "sampling.%s: %g is outside [0, 1]; 0 switches it off", field,
                (double)value);
}

static int check_factor(float value, const char *field, const char *meaning_of_0) {
    if (isfinite(value) && value >= 0.0f) return MF_OK;
    return fail(MF_ARG, "sampling.%s: %g is not a finite number >= 0; 0 means %s", field,
                (double)value, meaning_of_0);
}

static int check_sampling(const mf_sampling *s) {
    if (s->top_k < 0) {
        return fail(MF_ARG, "sampling.top_k: %" PRId32 " is negative; 0 switches it off", s->top_k);
    }
    TRY(check_factor(s->temperature, "temperature", "greedy"));
    TRY(check_fraction(s->top_p, "top_p"));
    TRY(check_fraction(s->min_p, "min_p"));
    return check_factor(s->repeat_penalty, "repeat_penalty", "no penalty");
}

static int check_recent(const int32_t *recent, size_t n_recent, size_t n_vocab) {
    if (n_recent > 0 && !recent) {
        return fail(MF_ARG, "recent: NULL, but n_recent is %zu; pass the tokens or 0", n_recent);
    }
    for (size_t i = 0; i < n_recent; i++) {
        if ((size_t)recent[i] >= n_vocab) {  // a negative one is huge here
            return fail(MF_ARG, "recent[%zu]: token %" PRId32 " is outside [0, n_vocab = %zu)", i,
                        recent[i], n_vocab);
        }
    }
    return MF_OK;
}

// Bytes of mf_sampling in the first header: no caller has less.
enum { FIRST_SIZE = offsetof(mf_sampling, choice) + sizeof(uint64_t) };

int mf_sample(int32_t *token, const float *logits, size_t n_vocab, const mf_sampling *sampling,
              const int32_t *recent, size_t n_recent, uint64_t position) {
    if (!token) return fail(MF_ARG, "token: NULL; pass where the token is to be written");
    if (!logits) return fail(MF_ARG, "logits: NULL; pass one row of n_vocab floats");
    if (!sampling) return fail(MF_ARG, "sampling: NULL; pass a struct with its size set");
    if (n_vocab < 1 || n_vocab > INT32_MAX) {
        return fail(MF_ARG, "n_vocab: %zu is outside [1, 2^31); pass the model's n_vocab", n_vocab);
    }
    mf_sampling s;
    TRY(api_options(&s, sizeof s, sampling, FIRST_SIZE, __func__));
    TRY(check_sampling(&s));
    TRY(check_recent(recent, n_recent, n_vocab));
    // A host's rounding mode or flush-to-zero must not change the token.
    const uint64_t saved = fpenv_enter();
    const int status = sampler_pick(token, logits, n_vocab, &s, recent, n_recent, position);
    fpenv_restore(saved);
    return status;
}
