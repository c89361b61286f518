// Layer 6: a loaded model: hyperparameters and weights on a device. Immutable and shared by
// counting.
#ifndef MF_MODEL_H
#define MF_MODEL_H

#include "arch.h"
#include "backend.h"

typedef struct model_params {
    const arch_traits *arch;
    uint32_t n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, n_vocab, n_ctx_train, n_rot;
    uint32_t window;  // 0: no windowed layer
    uint32_t window_pattern;
    float norm_eps, embed_scale, attn_scale, attn_softcap, final_softcap;
    float rope_base, rope_base_local;
    // Rope scaling (rope.c): none, linear or yarn; longrope is a pair of factor tensors.
    enum { ROPE_SCALE_NONE, ROPE_SCALE_LINEAR, ROPE_SCALE_YARN, ROPE_SCALE_LONG } rope_scaling;
    float rope_factor, rope_attn_factor;
    float yarn_beta_fast, yarn_beta_slow;
    uint32_t rope_orig_ctx;
} model_params;

typedef struct layer_weights {
    const weight *attn_norm, *attn_post_norm, *ffn_norm, *ffn_post_norm, *q_norm, *k_norm;
    const weight *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias;
    const weight *gate, *up, *down;
} layer_weights;

struct mf_model {
    _Atomic int refs;
    mf_gguf *file;
    const device *dev;
    model_params p;
    const weight *embed, *output_norm, *output;  // output == embed when tied
    layer_weights *layers;                       // [n_layer]
    float *rope_freqs, *rope_long, *rope_short;  // [n_rot/2] divisors of the frequencies, or NULL
    weight_store *weights;                       // all of them, once each
    uint64_t weight_bytes, n_params;
    uint64_t fingerprint[2];  // gguf_fingerprint
};

int model_load(mf_model **out, mf_gguf *file, const mf_model_options *options);
void model_retain(mf_model *m);
void model_release(mf_model *m);

// Window of a layer, 0 for one that sees everything.
uint32_t model_layer_window(const model_params *p, uint32_t layer);
// Rope kind of a layer: 1 for windowed layers of models that give those a base of their own.
uint32_t model_layer_rope(const model_params *p, uint32_t layer);

// hparams.c: reads and validates the hyperparameters; names file, key and value of what is wrong.
int model_params_read(model_params *out, const mf_gguf *file);

// rope.c: frequencies of one rope kind, freq [n_rot/2], and the factor on cos and sin. `factors`
// [n_rot/2] or NULL.
void rope_frequencies(double *freq, float *magnitude, const model_params *p, bool local,
                      const float *factors);

#endif
