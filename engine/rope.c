// Owns the frequencies of rotary embeddings and how they are scaled to longer contexts. In doubles
// and without libm, so that every machine gets the same bits.
//
// freq_i = base^(-2i/n_rot) (Su et al. 2021, RoFormer). Linear: divided by the factor (Chen et al.
// 2023). Divisors per frequency: Llama 3's rope_freqs and phi3's long and short factors. YaRN (Peng
// et al. 2023): frequencies that turn often within the original context stay, those that turn less
// than beta_slow times are interpolated, with a linear ramp between, and cos and sin grow by 0.1
// ln(factor) + 1.
#include "mathd.h"
#include "model.h"

static const double PI = 3.14159265358979323846;

// Index of the frequency that turns `turns` times within the original context.
static double yarn_dim(const model_params *p, double base, double turns) {
    return p->n_rot * math_log(p->rope_orig_ctx / (turns * 2.0 * PI)) / (2.0 * math_log(base));
}

static double floor_of(double x) {
    const double whole = (double)(int64_t)x;
    return whole > x ? whole - 1.0 : whole;
}

// How much of the unscaled frequency i keeps: 1 for fast ones, 0 for slow ones.
static double yarn_keep(const model_params *p, double base, uint32_t i) {
    double low = floor_of(yarn_dim(p, base, p->yarn_beta_fast));
    double high = -floor_of(-yarn_dim(p, base, p->yarn_beta_slow));
    if (low < 0.0) low = 0.0;
    if (high > p->n_rot - 1.0) high = p->n_rot - 1.0;
    const double width = high - low > 0.001 ? high - low : 0.001;
    const double ramp = (i - low) / width;
    return 1.0 - (ramp < 0.0 ? 0.0 : ramp > 1.0 ? 1.0 : ramp);
}

void rope_frequencies(double *freq, float *magnitude, const model_params *p, bool local,
                      const float *factors) {
    const double base = local ? p->rope_base_local : p->rope_base;
    // Windowed layers with a base of their own were never stretched.
    const bool scaled = !(local && p->arch->local_rope_base > 0);
    double size = scaled ? p->rope_attn_factor : 1.0;
    for (uint32_t i = 0; i < p->n_rot / 2; i++) {
        double f = math_pow(base, -2.0 * i / p->n_rot);
        if (factors && scaled) f /= factors[i];
        if (scaled && p->rope_scaling == ROPE_SCALE_LINEAR) f /= p->rope_factor;
        if (scaled && p->rope_scaling == ROPE_SCALE_YARN) {
            const double keep = base > 1.0 ? yarn_keep(p, base, i) : 1.0;
            f = f * keep + f / p->rope_factor * (1.0 - keep);
        }
        freq[i] = f;
    }
    if (scaled && p->rope_scaling == ROPE_SCALE_YARN && p->rope_factor > 1.0f)
        size *= 0.1 * math_log(p->rope_factor) + 1.0;
    *magnitude = (float)size;
}
