// Layer 6: picks the next token from a row of logits. A pure function: no state, the same token on
// every machine and compiler (no libm, no sum whose order could matter).
//
// The steps and their order are those of llama.cpp's default chain:
//   1. repeat_penalty: the logit of each distinct recent token, once: divided if positive, else
//      multiplied. A finite logit stays finite.
//   2. temperature 0: the largest logit wins, the lowest id among equals. The rest is skipped.
//   3. top_k: keeps the k first in rank order: larger logit first, lower id first among equals.
//   4. top_p: keeps the shortest beginning of the rank order whose probabilities, at temperature 1
//      and among the tokens left by 3, sum to at least top_p; at least one token.
//   5. min_p: keeps the tokens at least min_p times as probable, at temperature 1, as the best.
//   6. draws from what is left with probabilities proportional to e^(logit / temperature).
// NaN and -Inf are never picked. Where a logit is +Inf, only the tokens with +Inf have a chance.
//
// Probabilities are integers: weight = round(2^b * e^((logit - max) / temperature)), where
// b = min(51, 63 - ceil(log2(n_vocab))), 45 for 262,144 tokens, so that all weights together fit
// 64 bits. Integer sums are exact in any order; the price is that a token less than 2^-(b+1) times
// as likely as the best is never drawn.
#ifndef MF_SAMPLER_H
#define MF_SAMPLER_H

#include "base.h"

// mf_sample without its argument checks. MF_ARG: no logit can be picked. MF_NOMEM only with
// recent tokens and a penalty: n_vocab / 8 bytes mark them.
int sampler_pick(int32_t *token, const float *logits, size_t n_vocab, const mf_sampling *s,
                 const int32_t *recent, size_t n_recent, uint64_t position);

// The 64 random bits that decide a draw.
uint64_t sampler_bits(uint64_t seed, uint64_t choice, uint64_t position);

#endif
