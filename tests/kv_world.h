// A CPU device of a few small layers without a model: what the tests of its KV rows share. Layers
// are in two groups, each with both rope kinds; tokens are rows of three tables, which stand for
// what a model's projections would make of them.
#ifndef MF_TESTS_KV_WORLD_H
#define MF_TESTS_KV_WORLD_H

#include <stdlib.h>
#include <string.h>

#include "../engine/cpu/backend_cpu.h"
#include "check.h"
#include "counted.h"

enum { GROUPS = 2, LAYERS = 4, MAX_HALF = 32, BATCH = 48, VOCAB = 40, MAX_THREADS = 3 };

static const device *const dev = &device_cpu;

static const uint32_t layer_group[LAYERS] = {0, 1, 0, 1}, layer_rope[LAYERS] = {0, 0, 1, 1};
static const float magnitudes[ROPE_KINDS] = {1.0f, 1.1875f};

typedef struct shape {
    uint32_t n_head, n_head_kv, head_dim, n_rot;
    bool interleaved;
    uint32_t cells[GROUPS], window;
    kv_format format;
    bool widened;
} shape;

static inline uint32_t width_of(const shape *s) { return s->n_head_kv * s->head_dim; }

// Kind 0 as in a plain model, kind 1 stretched unevenly as scaled ropes are.
static inline double frequency(const shape *s, uint32_t kind, uint32_t i) {
    const double f = pow(kind ? 1e6 : 1e4, -2.0 * i / s->n_rot);
    return kind ? f / (1.0 + 0.37 * i) : f;
}

static inline backend *open_backend(const shape *s, uint32_t threads, const char *isa) {
    double freq[ROPE_KINDS][MAX_HALF];
    uint32_t windows[LAYERS];
    for (uint32_t k = 0; k < ROPE_KINDS; k++)
        for (uint32_t i = 0; i < s->n_rot / 2; i++) freq[k][i] = frequency(s, k, i);
    for (uint32_t i = 0; i < LAYERS; i++) windows[i] = s->window;
    const backend_config c = {.n_layer = LAYERS,
                              .n_embd = s->n_head * s->head_dim,
                              .n_vocab = VOCAB,
                              .n_head = s->n_head,
                              .n_head_kv = s->n_head_kv,
                              .head_dim = s->head_dim,
                              .n_rot = s->n_rot,
                              .rope_interleaved = s->interleaved,
                              .rope = {{freq[0], magnitudes[0]}, {freq[1], magnitudes[1]}},
                              .attn_scale = 0.3f,
                              .layer_group = layer_group,
                              .layer_window = windows,
                              .layer_rope = layer_rope,
                              .group_cells = s->cells,
                              .n_groups = GROUPS,
                              .kv_format = s->format,
                              .kv_widened = s->widened,
                              .n_batch = BATCH,
                              .n_ctx = 256,
                              .n_threads = threads,
                              .isa = isa};
    backend *b = NULL;
    if (dev->backend_new(&b, &c)) {
        printf("backend_new: %s\n", mf_last_error());
        exit(1);
    }
    return b;
}

static inline void *claim(size_t bytes) {
    void *p = calloc(1, bytes);
    if (!p) {
        printf("no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

// Region i is K of layer i/2, or V if i is odd.
static inline uint8_t *region_of(const backend *b, uint32_t i) {
    const kv_regions *r = cpu_regions(b);
    return (i % 2 ? r->v : r->k)[i / 2];
}

static inline size_t row_bytes(const shape *s) {
    return kv_format_row_bytes(s->format, width_of(s));
}

static inline size_t region_rows(const shape *s, uint32_t i) {
    return (size_t)s->cells[layer_group[i / 2]] + 1;
}

static inline size_t region_bytes(const shape *s, uint32_t i) {
    return region_rows(s, i) * row_bytes(s);
}

// ---- graphs that store and read --------------------------------------------------------------

// Tokens are rows of three tables: what the projections of a model would make of them.
typedef struct tables {
    weight_store *store;
    weight *q, *k, *v;
} tables;

static inline weight *load_table(weight_store *in, pool *p, uint32_t width, uint64_t seed) {
    float *rows = claim((size_t)VOCAB * width * sizeof *rows);
    for (size_t i = 0; i < (size_t)VOCAB * width; i++) rows[i] = check_normal(&seed);
    const gguf_tensor t = {.name = "table",
                           .name_len = 5,
                           .type = DTYPE_F32,
                           .n_dims = 2,
                           .dims = {width, VOCAB, 1, 1},
                           .data = rows,
                           .bytes = (uint64_t)VOCAB * width * sizeof *rows};
    weight *w = NULL;
    if (dev->matrix_load(&w, in, &t, p, NULL)) {
        printf("matrix_load: %s\n", mf_last_error());
        exit(1);
    }
    free(rows);
    return w;
}

static inline tables load_tables(const shape *s) {
    pool *p = NULL;
    tables t;
    if (pool_new(&p, 1) || dev->weights_new(&t.store)) exit(1);
    t.q = load_table(t.store, p, s->n_head * s->head_dim, 1);
    t.k = load_table(t.store, p, width_of(s), 2);
    t.v = load_table(t.store, p, width_of(s), 3);
    pool_free(p);
    return t;
}

static inline void free_tables(tables *t) { dev->weights_free(t->store); }

static inline int32_t embed(graph *g, const weight *w, uint32_t width) {
    graph_node *n = graph_add_node(g, OP_EMBED, GRAPH_NONE);
    n->out[0] = graph_add_value(g, ROWS_TOKENS, VALUE_F32, width);
    n->w[0] = w;
    n->f = 1.0f;
    return n->out[0];
}

static inline void rope(graph *g, int32_t layer, int32_t x, int32_t table, uint32_t heads) {
    graph_node *n = graph_add_node(g, OP_ROPE, layer);
    n->in[0] = n->out[0] = x;
    n->in[1] = table;
    n->parts = heads;
}

// Every layer stores the tokens' rows; with `mode` below KV_WINDOW_MODES layer 0 reads too, and
// what it reads is the output.
static inline graph *make_graph(const shape *s, const tables *t, uint32_t mode) {
    graph_params params;
    memset(&params, 0, sizeof params);
    params.max_tokens = params.max_outputs = BATCH;
    graph *g = NULL;
    if (graph_new(&g, &params)) exit(1);
    int32_t table[ROPE_KINDS];
    for (uint32_t kind = 0; kind < ROPE_KINDS; kind++) {
        table[kind] = graph_add_value(g, ROWS_TOKENS, VALUE_F32, s->n_rot);
        graph_node *n = graph_add_node(g, OP_ROPE_TABLE, GRAPH_NONE);
        n->out[0] = table[kind];
        n->kind = kind;
    }
    for (int32_t i = 0; i < LAYERS; i++) {
        const int32_t k = embed(g, t->k, width_of(s)), v = embed(g, t->v, width_of(s));
        rope(g, i, k, table[layer_rope[i]], s->n_head_kv);
        graph_node *n = graph_add_node(g, OP_KV_STORE, i);
        n->in[0] = k;
        n->in[1] = v;
    }
    if (mode < KV_WINDOW_MODES) {
        const uint32_t width = s->n_head * s->head_dim;
        const int32_t q = embed(g, t->q, width);
        rope(g, 0, q, table[layer_rope[0]], s->n_head);
        graph_node *n = graph_add_node(g, OP_ATTN, 0);
        const int32_t read = graph_add_value(g, ROWS_TOKENS, VALUE_F32, width);
        n->in[0] = q;
        n->out[0] = read;
        n->kind = mode;
        n = graph_add_node(g, OP_TAKE_ROWS, GRAPH_NONE);
        n->in[0] = read;
        n->out[0] = graph_add_value(g, ROWS_OUTPUTS, VALUE_LOGITS, width);
    }
    if (graph_plan(g)) exit(1);
    return g;
}

// Row i of a sequence: token (7 i + seq) % VOCAB at position pos[i] in cell[i] of both groups.
typedef struct row_list {
    int32_t seq;
    uint32_t n, pos[BATCH * 4];
    int32_t cell[BATCH * 4];
} row_list;

static inline void add_rows(batch *in, const row_list *r, uint32_t first, uint32_t n) {
    int32_t tokens[BATCH];
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t at = in->n_tokens + i;
        tokens[i] = (int32_t)((7 * (first + i) + (uint32_t)r->seq) % VOCAB);
        in->positions[at] = r->pos[first + i];
        for (uint32_t g = 0; g < GROUPS; g++) in->groups[g].cells[at] = r->cell[first + i];
    }
    batch_add(in, r->seq, tokens, n, n);
    in->runs[in->n_runs - 1].pos0 = r->pos[first];
}

static inline void compute(backend *b, const graph *g, const batch *in, float *out) {
    const atomic_int state = RUN_ACTIVE;
    int status = dev->reserve(b, g->buffer_bytes);
    if (!status) status = dev->compute(b, g, in, out, &state);
    CHECK(status == MF_OK, "compute: %s", mf_last_error());
}

static inline void store_rows(backend *b, const graph *g, batch *in, const row_list *r,
                              uint32_t n) {
    for (uint32_t i = 0, len; i < n; i += len) {
        for (len = 1; i + len < n && len < BATCH && r->pos[i + len] == r->pos[i] + len;) len++;
        batch_clear(in);
        add_rows(in, r, i, len);
        compute(b, g, in, NULL);
    }
}

static inline batch *new_batch(void) {
    batch *in = NULL;
    if (batch_new(&in, BATCH, BATCH, GROUPS)) exit(1);
    return in;
}

#endif
