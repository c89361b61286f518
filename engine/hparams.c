// Owns the translation of a file's hyperparameters into model_params. Refuses every value that the
// code below could not take without checking again: after this nothing divides by zero, overflows
// or indexes by a number from the file.
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "model.h"

typedef struct reader {
    const mf_gguf *file;
    char arch[32];
    char key[96];
} reader;

// "<arch>.<suffix>", valid until the next call.
static const char *key_of(reader *r, const char *suffix) {
    snprintf(r->key, sizeof r->key, "%s.%s", r->arch, suffix);
    return r->key;
}

static int read_u32(uint32_t *out, reader *r, const char *suffix, uint32_t min, uint32_t max) {
    return gguf_u32_required(out, r->file, key_of(r, suffix), min, max);
}

static int read_f32(float *out, reader *r, const char *suffix, float fallback, float min,
                    float max) {
    return gguf_f32(out, r->file, key_of(r, suffix), fallback, min, max);
}

// head_count and head_count_kv may be one number or one per layer; layers that differ are not
// built.
static int read_heads(uint32_t *out, reader *r, const char *suffix, uint32_t fallback,
                      uint32_t n_layer) {
    const char *key = key_of(r, suffix);
    uint64_t index;
    mf_kv_info info;
    if (!gguf_find_key(&index, r->file, key)) {
        if (!fallback) return fail(MF_FORMAT, "%s: key %s is missing", gguf_path(r->file), key);
        *out = fallback;
        return MF_OK;
    }
    TRY(mf_gguf_kv(&info, r->file, index));
    if (!info.is_array) return gguf_u32_required(out, r->file, key, 1, 4096);
    if (info.n != n_layer)
        return fail(MF_FORMAT, "%s: %s has %llu entries for %u layers", gguf_path(r->file), key,
                    (unsigned long long)info.n, n_layer);
    if (info.type == MF_GGUF_F32 || info.type == MF_GGUF_F64 || info.type == MF_GGUF_STRING)
        return fail(MF_FORMAT, "%s: %s must be integers", gguf_path(r->file), key);
    for (uint64_t i = 0; i < info.n; i++) {
        int64_t v;
        TRY(mf_gguf_ints(&v, r->file, index, i, 1));
        if (v < 1 || v > 4096)
            return fail(MF_FORMAT, "%s: %s is %lld; 1 to 4096 is possible", gguf_path(r->file), key,
                        (long long)v);
        if (i && (uint32_t)v != *out)
            return fail(
                MF_UNSUPPORTED,
                "%s: %s differs between layers (%u and %lld), which this build does not run",
                gguf_path(r->file), key, *out, (long long)v);
        *out = (uint32_t)v;
    }
    return MF_OK;
}

static int read_sizes(model_params *p, reader *r) {
    TRY(read_u32(&p->n_layer, r, "block_count", 1, 1024));
    TRY(read_u32(&p->n_embd, r, "embedding_length", 1, 1 << 20));
    TRY(read_u32(&p->n_ff, r, "feed_forward_length", 1, 1 << 22));
    TRY(read_u32(&p->n_ctx_train, r, "context_length", 1, KV_POS_MAX));
    TRY(read_heads(&p->n_head, r, "attention.head_count", 0, p->n_layer));
    TRY(read_heads(&p->n_head_kv, r, "attention.head_count_kv", p->n_head, p->n_layer));
    if (p->n_head % p->n_head_kv)
        return fail(MF_FORMAT,
                    "%s: attention.head_count %u is not a multiple of attention.head_count_kv %u",
                    gguf_path(r->file), p->n_head, p->n_head_kv);
    const uint32_t derived = p->n_embd / p->n_head;
    uint32_t v_dim;
    TRY(gguf_u32(&p->head_dim, r->file, key_of(r, "attention.key_length"), derived, 0, UINT32_MAX));
    TRY(gguf_u32(&v_dim, r->file, key_of(r, "attention.value_length"), p->head_dim, 0, UINT32_MAX));
    if (v_dim != p->head_dim)
        return fail(
            MF_UNSUPPORTED,
            "%s: attention.key_length %u and attention.value_length %u differ, which this build "
            "does not run",
            gguf_path(r->file), p->head_dim, v_dim);
    if (!p->head_dim || p->head_dim % 2 || p->head_dim > 1024)
        return fail(MF_FORMAT,
                    "%s: head dimension %u (attention.key_length, else embedding_length / "
                    "attention.head_count); an even number up to 1024 is possible",
                    gguf_path(r->file), p->head_dim);
    TRY(gguf_u32(&p->n_rot, r->file, key_of(r, "rope.dimension_count"), p->head_dim, 2,
                 p->head_dim));
    if (p->n_rot % 2)
        return fail(MF_FORMAT, "%s: rope.dimension_count %u is odd", gguf_path(r->file), p->n_rot);
    return MF_OK;
}

static int read_window(model_params *p, reader *r) {
    const arch_traits *a = p->arch;
    uint32_t window;
    TRY(gguf_u32(&window, r->file, key_of(r, "attention.sliding_window"), a->default_window, 0,
                 UINT32_MAX));
    if (!a->window_pattern) {
        if (window && window < p->n_ctx_train)
            return fail(MF_UNSUPPORTED, "%s: %s is %u; this build runs %s without windows",
                        gguf_path(r->file), r->key, window, a->name);
        return MF_OK;
    }
    p->window = u32_min(window, KV_POS_MAX);
    p->window_pattern = a->window_pattern;
    uint64_t index;
    mf_kv_info info;
    const char *key = key_of(r, "attention.sliding_window_pattern");
    if (gguf_find_key(&index, r->file, key)) {
        TRY(mf_gguf_kv(&info, r->file, index));
        if (info.is_array)
            return fail(MF_UNSUPPORTED,
                        "%s: %s is a list of layers; this build runs one period for all",
                        gguf_path(r->file), key);
        TRY(gguf_u32(&p->window_pattern, r->file, key, 0, 1, 1024));
    }
    return MF_OK;
}

static int read_scaling_type(model_params *p, reader *r) {
    static const char *const names[] = {"none", "linear", "yarn", "longrope"};
    const char *text;
    size_t len;
    TRY(gguf_str(&text, &len, r->file, key_of(r, "rope.scaling.type")));
    p->rope_scaling = ROPE_SCALE_LINEAR;  // what files without a type mean by a factor
    if (!text) return MF_OK;
    for (int i = 0; i < 4; i++) {
        if (strlen(names[i]) == len && !memcmp(names[i], text, len)) {
            p->rope_scaling = i;
            return MF_OK;
        }
    }
    return fail(MF_UNSUPPORTED,
                "%s: %s is \"%.*s\"; this build runs none, linear, yarn and longrope",
                gguf_path(r->file), r->key, (int)(len < 40 ? len : 40), text);
}

static int read_rope(model_params *p, reader *r) {
    TRY(read_f32(&p->rope_base, r, "rope.freq_base", 10000.0f, 1.0f, 1e12f));
    p->rope_base_local = p->rope_base;
    if (p->arch->local_rope_base > 0)
        TRY(read_f32(&p->rope_base_local, r, "rope.freq_base_swa", p->arch->local_rope_base, 1.0f,
                     1e12f));
    TRY(read_scaling_type(p, r));
    float factor;  // by its older name
    TRY(read_f32(&factor, r, "rope.scale_linear", 1.0f, 1e-3f, 1e6f));
    TRY(read_f32(&p->rope_factor, r, "rope.scaling.factor", factor, 1e-3f, 1e6f));
    TRY(read_f32(&p->rope_attn_factor, r, "rope.scaling.attn_factor", 1.0f, 1e-3f, 1e3f));
    TRY(read_f32(&p->yarn_beta_fast, r, "rope.scaling.yarn_beta_fast", 32.0f, 1e-3f, 1e6f));
    TRY(read_f32(&p->yarn_beta_slow, r, "rope.scaling.yarn_beta_slow", 1.0f, 1e-3f, 1e6f));
    return gguf_u32(&p->rope_orig_ctx, r->file, key_of(r, "rope.scaling.original_context_length"),
                    p->n_ctx_train, 1, KV_POS_MAX);
}

static int read_scales(model_params *p, reader *r) {
    const arch_traits *a = p->arch;
    TRY(gguf_f32_required(&p->norm_eps, r->file, key_of(r, "attention.layer_norm_rms_epsilon"),
                          1e-30f, 1.0f));
    p->embed_scale = a->flags & ARCH_EMBED_SCALE ? sqrtf((float)p->n_embd) : 1.0f;
    // Gemma's largest sizes scale by the width per head, which differs from head_dim only there.
    const uint32_t width = p->n_layer == a->big_n_layer ? p->n_embd / p->n_head : p->head_dim;
    if (!width)
        return fail(MF_FORMAT, "%s: embedding_length %u is below head_count %u", gguf_path(r->file),
                    p->n_embd, p->n_head);
    TRY(read_f32(&p->attn_scale, r, "attention.scale", 1.0f / sqrtf((float)width), 1e-6f, 1e6f));
    if (a->flags & ARCH_SOFTCAPS) {
        TRY(read_f32(&p->attn_softcap, r, "attn_logit_softcapping", 50.0f, 0.0f, 1e6f));
        TRY(read_f32(&p->final_softcap, r, "final_logit_softcapping", 30.0f, 0.0f, 1e6f));
    }
    return MF_OK;
}

// Keys that change the arithmetic of other architectures, with the value at which they do nothing.
static int refuse_unread_keys(reader *r) {
    static const struct {
        const char *suffix;
        float neutral;
    } keys[] = {{"logit_scale", 1.0f},
                {"residual_scale", 1.0f},
                {"embedding_scale", 1.0f},
                {"attention.clamp_kqv", 0.0f},
                {"attention.max_alibi_bias", 0.0f},
                {"rope.scaling.yarn_ext_factor", 1.0f}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        float value;
        TRY(read_f32(&value, r, keys[i].suffix, keys[i].neutral, -FLT_MAX, FLT_MAX));
        if (value != keys[i].neutral)
            return fail(MF_UNSUPPORTED, "%s: %s is %g; this build runs only %g there",
                        gguf_path(r->file), r->key, (double)value, (double)keys[i].neutral);
    }
    uint32_t n_expert;
    TRY(gguf_u32(&n_expert, r->file, key_of(r, "expert_count"), 0, 0, UINT32_MAX));
    if (n_expert)
        return fail(MF_UNSUPPORTED, "%s: %s is %u; this build runs dense models only",
                    gguf_path(r->file), r->key, n_expert);
    return MF_OK;
}

int model_params_read(model_params *out, const mf_gguf *file) {
    model_params p = {0};
    reader r = {.file = file};
    const char *name;
    size_t len;
    TRY(gguf_str(&name, &len, file, "general.architecture"));
    if (!name) return fail(MF_FORMAT, "%s: key general.architecture is missing", gguf_path(file));
    p.arch = arch_find(name, len, gguf_path(file));
    if (!p.arch) return MF_UNSUPPORTED;
    snprintf(r.arch, sizeof r.arch, "%s", p.arch->name);
    TRY(read_sizes(&p, &r));
    TRY(read_window(&p, &r));
    TRY(read_rope(&p, &r));
    TRY(read_scales(&p, &r));
    TRY(refuse_unread_keys(&r));
    *out = p;
    return MF_OK;
}

uint32_t model_layer_window(const model_params *p, uint32_t layer) {
    if (!p->window) return 0;
    const bool sees_all =
        p->window_pattern > 1 && layer % p->window_pattern == p->window_pattern - 1;
    return sees_all ? 0 : p->window;
}

uint32_t model_layer_rope(const model_params *p, uint32_t layer) {
    return p->arch->local_rope_base > 0 && model_layer_window(p, layer);
}
