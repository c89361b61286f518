// Owns the table of architectures. Each row states how a model differs from the plain pre-norm
// transformer with RoPE, grouped queries and a gated FFN; model.c and builder.c read the traits and
// never the name.
#include "arch.h"

#include <stdio.h>
#include <string.h>

#include "error.h"

static const arch_traits table[] = {
    {.name = "gemma2",
     .flags = ARCH_PRE_NORM | ARCH_POST_NORM | ARCH_EMBED_SCALE | ARCH_GELU | ARCH_SOFTCAPS,
     .window_pattern = 2,
     .default_window = 4096,
     .big_n_layer = 46},
    {.name = "gemma3",
     .flags = ARCH_PRE_NORM | ARCH_POST_NORM | ARCH_QK_NORM_HEAD | ARCH_EMBED_SCALE | ARCH_GELU,
     .window_pattern = 6,
     .local_rope_base = 10000.0f,
     .big_n_layer = 62},
    {.name = "llama", .flags = ARCH_PRE_NORM | ARCH_ROPE_INTERLEAVED, .window_pattern = 1},
    {.name = "mistral", .flags = ARCH_PRE_NORM | ARCH_ROPE_INTERLEAVED, .window_pattern = 1},
    {.name = "olmo2", .flags = ARCH_POST_NORM | ARCH_QK_NORM_ROW},
    {.name = "phi3", .flags = ARCH_PRE_NORM | ARCH_FUSED_QKV, .window_pattern = 1},
    {.name = "qwen2", .flags = ARCH_PRE_NORM | ARCH_QKV_BIAS},
    {.name = "qwen3", .flags = ARCH_PRE_NORM | ARCH_QK_NORM_HEAD},
};

const arch_traits *arch_find(const char *name, size_t len, const char *path) {
    char known[128] = "";
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (strlen(table[i].name) == len && !memcmp(table[i].name, name, len)) return &table[i];
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", table[i].name);
    }
    fail(MF_UNSUPPORTED, "%s: general.architecture is \"%.*s\"; this build runs %s", path,
         (int)(len < 40 ? len : 40), name, known);
    return NULL;
}
