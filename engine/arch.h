// Layer 6: the architectures, one row of traits each. A new dense architecture should be a row and
// a test.
#ifndef MF_ARCH_H
#define MF_ARCH_H

#include "base.h"

typedef enum arch_flag {
    ARCH_PRE_NORM = 1 << 0,  // attn_norm and ffn_norm before each block
    ARCH_POST_NORM =
        1 << 1,  // post_attention_norm and post_ffw_norm after each block, before the residual
    ARCH_QK_NORM_HEAD = 1 << 2,  // q and k normalised per head
    ARCH_QK_NORM_ROW = 1 << 3,   // ... or over all heads at once
    ARCH_QKV_BIAS = 1 << 4,      // biases on q, k and v are required (elsewhere they are optional)
    ARCH_FUSED_QKV = 1 << 5,     // the file keeps q|k|v and gate|up as one matrix each
    ARCH_EMBED_SCALE = 1 << 6,   // embeddings times sqrt(n_embd)
    ARCH_ROPE_INTERLEAVED = 1 << 7,  // pairs (2i, 2i+1) instead of (i, i + n_rot/2)
    ARCH_GELU = 1 << 8,              // tanh-GELU instead of SiLU in the GLU
    ARCH_SOFTCAPS = 1 << 9           // tanh caps on attention scores and logits
} arch_flag;

typedef struct arch_traits {
    const char *name;         // general.architecture
    uint32_t flags;           // arch_flag
    uint32_t window_pattern;  // n > 1: every n-th layer sees everything, the others a window; 1:
                              // all windowed (if the file has a window); 0: none
    uint32_t default_window;  // where the file gives none
    float local_rope_base;    // of windowed layers; 0: as the others
    uint32_t big_n_layer;     // the size whose attention scale is 1/sqrt(n_embd/n_head) instead of
                              // 1/sqrt(head_dim)
} arch_traits;

// NULL with MF_UNSUPPORTED's line set, naming what this build knows.
const arch_traits *arch_find(const char *name, size_t len, const char *path);

#endif
