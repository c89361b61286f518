// Owns a model's weights: which tensors an architecture needs, their shapes, and the loading of
// each onto the device. Refuses a file with a tensor missing, of another shape, or that the
// architecture would leave unread: a tensor that nothing reads means a variant this build would run
// wrongly without a sign.
#include "model.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "error.h"

// Sizes a tensor's dimensions are made of.
typedef enum dim { D_NONE, D_EMBD, D_Q, D_KV, D_HEAD, D_FF, D_VOCAB } dim;

typedef enum need { OPTIONAL, REQUIRED } need;

typedef struct tensor_rule {
    const char *name;  // after "blk.N."
    size_t field;      // offset in layer_weights
    dim cols, rows;    // rows == D_NONE: a vector
    uint32_t flags;    // applies to architectures with any of these flags; 0: to all
    uint32_t without;  // ... and none of these
    need need;
} tensor_rule;

#define FIELD(name) offsetof(layer_weights, name)
static const tensor_rule layer_rules[] = {
    {"attn_norm.weight", FIELD(attn_norm), D_EMBD, D_NONE, ARCH_PRE_NORM, 0, REQUIRED},
    {"ffn_norm.weight", FIELD(ffn_norm), D_EMBD, D_NONE, ARCH_PRE_NORM, 0, REQUIRED},
    {"post_attention_norm.weight", FIELD(attn_post_norm), D_EMBD, D_NONE, ARCH_POST_NORM, 0,
     REQUIRED},
    {"post_ffw_norm.weight", FIELD(ffn_post_norm), D_EMBD, D_NONE, ARCH_POST_NORM, 0, REQUIRED},
    {"attn_q_norm.weight", FIELD(q_norm), D_HEAD, D_NONE, ARCH_QK_NORM_HEAD, 0, REQUIRED},
    {"attn_k_norm.weight", FIELD(k_norm), D_HEAD, D_NONE, ARCH_QK_NORM_HEAD, 0, REQUIRED},
    {"attn_q_norm.weight", FIELD(q_norm), D_Q, D_NONE, ARCH_QK_NORM_ROW, 0, REQUIRED},
    {"attn_k_norm.weight", FIELD(k_norm), D_KV, D_NONE, ARCH_QK_NORM_ROW, 0, REQUIRED},
    {"attn_q.weight", FIELD(q), D_EMBD, D_Q, 0, ARCH_FUSED_QKV, REQUIRED},
    {"attn_k.weight", FIELD(k), D_EMBD, D_KV, 0, ARCH_FUSED_QKV, REQUIRED},
    {"attn_v.weight", FIELD(v), D_EMBD, D_KV, 0, ARCH_FUSED_QKV, REQUIRED},
    {"attn_q.bias", FIELD(q_bias), D_Q, D_NONE, ARCH_QKV_BIAS, 0, REQUIRED},
    {"attn_k.bias", FIELD(k_bias), D_KV, D_NONE, ARCH_QKV_BIAS, 0, REQUIRED},
    {"attn_v.bias", FIELD(v_bias), D_KV, D_NONE, ARCH_QKV_BIAS, 0, REQUIRED},
    {"attn_q.bias", FIELD(q_bias), D_Q, D_NONE, 0, ARCH_QKV_BIAS, OPTIONAL},
    {"attn_k.bias", FIELD(k_bias), D_KV, D_NONE, 0, ARCH_QKV_BIAS, OPTIONAL},
    {"attn_v.bias", FIELD(v_bias), D_KV, D_NONE, 0, ARCH_QKV_BIAS, OPTIONAL},
    {"attn_output.weight", FIELD(o), D_Q, D_EMBD, 0, 0, REQUIRED},
    {"attn_output.bias", FIELD(o_bias), D_EMBD, D_NONE, 0, 0, OPTIONAL},
    {"ffn_gate.weight", FIELD(gate), D_EMBD, D_FF, 0, ARCH_FUSED_QKV, REQUIRED},
    {"ffn_up.weight", FIELD(up), D_EMBD, D_FF, 0, ARCH_FUSED_QKV, REQUIRED},
    {"ffn_down.weight", FIELD(down), D_FF, D_EMBD, 0, 0, REQUIRED},
};
#undef FIELD

// Tensors outside layers, and those of a layer that hold several matrices.
enum { OUTPUT_NORM, TOKEN_EMBD, OUTPUT, ROPE_FREQS, ROPE_LONG, ROPE_SHORT, N_OUTSIDE };
static const char *const outside[N_OUTSIDE] = {
    [OUTPUT_NORM] = "output_norm.weight",
    [TOKEN_EMBD] = "token_embd.weight",
    [OUTPUT] = "output.weight",
    [ROPE_FREQS] = "rope_freqs.weight",
    [ROPE_LONG] = "rope_factors_long.weight",
    [ROPE_SHORT] = "rope_factors_short.weight",
};
enum { FUSED_QKV, FUSED_UP, N_FUSED };
static const char *const fused[N_FUSED] = {"attn_qkv.weight", "ffn_up.weight"};

static bool rule_applies(const tensor_rule *rule, uint32_t flags) {
    return (!rule->flags || (rule->flags & flags)) && !(rule->without & flags);
}

typedef struct loader {
    mf_model *m;
    pool *threads;
    uint64_t *progress;
} loader;

static uint64_t size_of(const mf_model *m, dim d) {
    const model_params *p = &m->p;
    switch (d) {
        case D_NONE:
            return 1;
        case D_EMBD:
            return p->n_embd;
        case D_Q:
            return (uint64_t)p->n_head * p->head_dim;
        case D_KV:
            return (uint64_t)p->n_head_kv * p->head_dim;
        case D_HEAD:
            return p->head_dim;
        case D_FF:
            return p->n_ff;
        case D_VOCAB:
            return p->n_vocab;
    }
    return 0;
}

static int check_shape(const mf_model *m, const gguf_tensor *t, uint64_t cols, uint64_t rows) {
    if (t->dims[0] == cols && t->dims[1] == rows && t->dims[2] == 1 && t->dims[3] == 1)
        return MF_OK;
    return fail(MF_FORMAT, "%s: tensor %.*s is [%llu, %llu, %llu, %llu]; %s needs [%llu, %llu]",
                gguf_path(m->file), (int)t->name_len, t->name, (unsigned long long)t->dims[0],
                (unsigned long long)t->dims[1], (unsigned long long)t->dims[2],
                (unsigned long long)t->dims[3], m->p.arch->name, (unsigned long long)cols,
                (unsigned long long)rows);
}

// Loads rows [row0, row0 + rows) of a matrix, or a vector (rows 0). The device's own form is all
// that is kept.
static int load_part(const weight **out, loader *l, const gguf_tensor *t, uint64_t row0,
                     uint64_t rows) {
    weight *w;
    if (rows) {
        gguf_tensor part = *t;
        const uint64_t row_bytes = t->bytes / t->dims[1];
        part.data = (const char *)t->data + row0 * row_bytes;
        part.dims[1] = rows;
        part.bytes = rows * row_bytes;
        TRY(l->m->dev->matrix_load(&w, l->m->weights, &part, l->threads, l->progress));
    } else {
        const dtype_info *type = dtype_get(t->type);
        if (type->block_elems > 1)
            return fail(MF_UNSUPPORTED,
                        "%s: tensor %.*s is %s; norms and biases must be F32, F16 or BF16",
                        gguf_path(l->m->file), (int)t->name_len, t->name, type->name);
        TRY(l->m->dev->vector_load(&w, l->m->weights, t));
        if (l->progress) __atomic_fetch_add(l->progress, t->bytes, __ATOMIC_RELAXED);
    }
    l->m->weight_bytes += w->bytes;
    l->m->n_params += (uint64_t)w->n_rows * w->n_cols;
    *out = w;
    return MF_OK;
}

static int find(const gguf_tensor **out, const loader *l, const char *name, need n) {
    *out = gguf_find_tensor(l->m->file, name);
    if (*out || n == OPTIONAL) return MF_OK;
    return fail(MF_FORMAT, "%s: tensor %s is missing, which %s needs", gguf_path(l->m->file), name,
                l->m->p.arch->name);
}

static int load(const weight **out, loader *l, const char *name, dim cols, dim rows, need n) {
    const gguf_tensor *t;
    TRY(find(&t, l, name, n));
    if (!t) return MF_OK;
    TRY(check_shape(l->m, t, size_of(l->m, cols), size_of(l->m, rows)));
    TRY(load_part(out, l, t, 0, rows == D_NONE ? 0 : size_of(l->m, rows)));
    gguf_forget(l->m->file, t);
    return MF_OK;
}

// A matrix that holds several, row after row.
static int load_fused(loader *l, const char *name, const weight **parts[], const dim dims[],
                      int n) {
    const gguf_tensor *t;
    uint64_t rows = 0, row0 = 0;
    TRY(find(&t, l, name, REQUIRED));
    for (int i = 0; i < n; i++) rows += size_of(l->m, dims[i]);
    TRY(check_shape(l->m, t, l->m->p.n_embd, rows));
    for (int i = 0; i < n; i++) {
        TRY(load_part(parts[i], l, t, row0, size_of(l->m, dims[i])));
        row0 += size_of(l->m, dims[i]);
    }
    gguf_forget(l->m->file, t);
    return MF_OK;
}

static int load_layer(loader *l, uint32_t i) {
    layer_weights *w = &l->m->layers[i];
    const uint32_t flags = l->m->p.arch->flags;
    char name[64];
    for (size_t r = 0; r < sizeof layer_rules / sizeof *layer_rules; r++) {
        const tensor_rule *rule = &layer_rules[r];
        if (!rule_applies(rule, flags)) continue;
        snprintf(name, sizeof name, "blk.%u.%s", i, rule->name);
        TRY(load((const weight **)((char *)w + rule->field), l, name, rule->cols, rule->rows,
                 rule->need));
    }
    if (!(flags & ARCH_FUSED_QKV)) return MF_OK;
    snprintf(name, sizeof name, "blk.%u.%s", i, fused[FUSED_QKV]);
    TRY(load_fused(l, name, (const weight **[]){&w->q, &w->k, &w->v},
                   (const dim[]){D_Q, D_KV, D_KV}, 3));
    snprintf(name, sizeof name, "blk.%u.%s", i, fused[FUSED_UP]);
    return load_fused(l, name, (const weight **[]){&w->gate, &w->up}, (const dim[]){D_FF, D_FF}, 2);
}

// Divisors of the rope frequencies: F32 and finite, or the file is refused.
static int load_factors(float **out, loader *l, const char *name) {
    const gguf_tensor *t;
    const uint32_t n = l->m->p.n_rot / 2;
    TRY(find(&t, l, name, OPTIONAL));
    if (!t) return MF_OK;
    TRY(check_shape(l->m, t, n, 1));
    if (t->type != DTYPE_F32)
        return fail(MF_UNSUPPORTED, "%s: tensor %s is %s; it must be F32", gguf_path(l->m->file),
                    name, dtype_get(t->type)->name);
    *out = mem_alloc(n, sizeof **out);
    if (!*out) return MF_NOMEM;
    memcpy(*out, t->data, n * sizeof **out);
    if (l->progress) __atomic_fetch_add(l->progress, t->bytes, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < n; i++) {
        const float f = (*out)[i];
        if (!(f > 1e-6f && f < 1e6f))
            return fail(MF_FORMAT, "%s: %s[%u] is %g; 1e-6 to 1e6 is possible",
                        gguf_path(l->m->file), name, i, (double)f);
    }
    return MF_OK;
}

// Factors that would not be used, or that the scaling lacks, are another model than the file means.
static int check_factors(const mf_model *m) {
    const char *const path = gguf_path(m->file);
    if (!m->rope_long != !m->rope_short)
        return fail(MF_FORMAT, "%s: tensor rope_factors_%s.weight is missing; both are needed",
                    path, m->rope_long ? "short" : "long");
    if (m->p.rope_scaling == ROPE_SCALE_LONG && !m->rope_long)
        return fail(MF_FORMAT,
                    "%s: rope.scaling.type is longrope, but tensor rope_factors_long.weight is "
                    "missing",
                    path);
    if (m->rope_long && m->rope_freqs)
        return fail(MF_UNSUPPORTED,
                    "%s: has both rope_freqs.weight and rope_factors_long.weight; this build runs "
                    "models with one of them",
                    path);
    return MF_OK;
}

// The vocabulary's size is the embedding's; a tokens array of another length would index beyond it.
static int read_vocab(mf_model *m) {
    const gguf_tensor *t = gguf_find_tensor(m->file, outside[TOKEN_EMBD]);
    if (!t) return fail(MF_FORMAT, "%s: tensor token_embd.weight is missing", gguf_path(m->file));
    if (t->dims[1] > INT32_MAX)
        return fail(MF_LIMIT, "%s: token_embd.weight has %llu rows; at most 2^31 - 1 are possible",
                    gguf_path(m->file), (unsigned long long)t->dims[1]);
    m->p.n_vocab = (uint32_t)t->dims[1];
    uint64_t index;
    mf_kv_info info;
    if (!gguf_find_key(&index, m->file, "tokenizer.ggml.tokens")) return MF_OK;
    TRY(mf_gguf_kv(&info, m->file, index));
    if (info.n != m->p.n_vocab)
        return fail(MF_FORMAT,
                    "%s: tokenizer.ggml.tokens has %llu entries, token_embd.weight %u rows",
                    gguf_path(m->file), (unsigned long long)info.n, m->p.n_vocab);
    return MF_OK;
}

static int load_all(loader *l) {
    mf_model *m = l->m;
    m->layers = mem_alloc(m->p.n_layer, sizeof *m->layers);
    if (!m->layers) return MF_NOMEM;
    for (uint32_t i = 0; i < m->p.n_layer; i++) TRY(load_layer(l, i));
    TRY(load(&m->output_norm, l, outside[OUTPUT_NORM], D_EMBD, D_NONE, REQUIRED));
    TRY(load(&m->embed, l, outside[TOKEN_EMBD], D_EMBD, D_VOCAB, REQUIRED));
    TRY(load(&m->output, l, outside[OUTPUT], D_EMBD, D_VOCAB, OPTIONAL));
    if (!m->output) m->output = m->embed;
    TRY(load_factors(&m->rope_freqs, l, outside[ROPE_FREQS]));
    TRY(load_factors(&m->rope_long, l, outside[ROPE_LONG]));
    TRY(load_factors(&m->rope_short, l, outside[ROPE_SHORT]));
    return check_factors(m);
}

static bool is_read(const mf_model *m, const gguf_tensor *t) {
    char name[65], again[65];
    snprintf(name, sizeof name, "%.*s", (int)t->name_len, t->name);
    for (size_t i = 0; i < N_OUTSIDE; i++)
        if (!strcmp(name, outside[i])) return true;
    unsigned layer;
    int at = 0;
    if (sscanf(name, "blk.%9u.%n", &layer, &at) != 1 || !at || layer >= m->p.n_layer) return false;
    snprintf(again, sizeof again, "blk.%u.%s", layer, name + at);
    if (strcmp(name, again)) return false;  // blk.00.: never looked up
    const uint32_t flags = m->p.arch->flags;
    for (size_t r = 0; r < sizeof layer_rules / sizeof *layer_rules; r++) {
        const tensor_rule *rule = &layer_rules[r];
        if (rule_applies(rule, flags) && !strcmp(name + at, rule->name)) return true;
    }
    for (int i = 0; i < N_FUSED && (flags & ARCH_FUSED_QKV); i++)
        if (!strcmp(name + at, fused[i])) return true;
    return false;
}

// Before anything is packed: a model of many GB with one tensor too many is refused at once.
static int refuse_unread(const mf_model *m) {
    for (uint64_t i = 0; i < mf_gguf_n_tensors(m->file); i++) {
        const gguf_tensor *t = gguf_tensor_at(m->file, i);
        if (!is_read(m, t))
            return fail(MF_UNSUPPORTED, "%s: tensor %.*s is no part of %s as this build knows it",
                        gguf_path(m->file), (int)t->name_len, t->name, m->p.arch->name);
    }
    return MF_OK;
}

static int check_device(const mf_model *m) {
    const device *d = m->dev;
    if (m->p.head_dim % d->head_dim_step == 0 && m->p.head_dim <= d->head_dim_max) return MF_OK;
    return fail(
        MF_UNSUPPORTED,
        "%s: head dimension %u (attention.key_length); the %s device runs multiples of %u up to "
        "%u",
        gguf_path(m->file), m->p.head_dim, d->name, d->head_dim_step, d->head_dim_max);
}

int model_load(mf_model **out, mf_gguf *file, const mf_model_options *options) {
    const device *dev = device_find(options->device);
    if (!dev) return MF_ARG;
    mf_model *m = mem_alloc(1, sizeof *m);
    if (!m) return MF_NOMEM;
    loader l = {.m = m, .progress = options->progress};
    m->refs = 1;
    m->file = file;
    m->dev = dev;
    gguf_fingerprint(m->fingerprint, file);
    gguf_retain(file);
    int status;
    TRY_GOTO(failed, model_params_read(&m->p, file));
    TRY_GOTO(failed, check_device(m));
    TRY_GOTO(failed, read_vocab(m));
    TRY_GOTO(failed, refuse_unread(m));
    TRY_GOTO(failed, pool_new(&l.threads,
                              options->n_threads ? options->n_threads : pool_default_threads()));
    TRY_GOTO(failed, m->dev->weights_new(&m->weights));
    TRY_GOTO(failed, load_all(&l));
    pool_free(l.threads);
    *out = m;
    return MF_OK;
failed:
    pool_free(l.threads);
    model_release(m);
    return status;
}

void model_retain(mf_model *m) { m->refs++; }

void model_release(mf_model *m) {
    if (!m || --m->refs) return;
    m->dev->weights_free(m->weights);
    mem_free(m->layers);
    mem_free(m->rope_freqs);
    mem_free(m->rope_long);
    mem_free(m->rope_short);
    mf_gguf_free(m->file);
    mem_free(m);
}
