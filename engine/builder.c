// Owns the one description of a transformer that all architectures share. It reads traits and
// weights, never a name, and depends on nothing but the model, its groups and graph_params.
#include "builder.h"

#include "error.h"

typedef struct build {
    graph *g;
    const mf_model *m;
    const model_params *p;
    const uint32_t *layer_group;  // [n_layer]
    int32_t tables[ROPE_KINDS];   // values of the rope tables
} build;

static int32_t new_f32(const build *b, row_set rows, uint32_t width) {
    return graph_add_value(b->g, rows, VALUE_F32, width);
}

static row_set rows_of(const build *b, int32_t v) {
    return b->g->status ? ROWS_TOKENS : b->g->values[v].rows;
}
static uint32_t width_of(const build *b, int32_t v) {
    return b->g->status ? 0 : b->g->values[v].width;
}

static int32_t norm(const build *b, int32_t layer, int32_t x, const weight *w, uint32_t parts,
                    int32_t y) {
    graph_node *n = graph_add_node(b->g, OP_NORM, layer);
    n->in[0] = x;
    n->out[0] = y;
    n->w[0] = w;
    n->parts = parts;
    n->f = b->p->norm_eps;
    return y;
}

static int32_t norm_new(const build *b, int32_t layer, int32_t x, const weight *w) {
    return norm(b, layer, x, w, 1, new_f32(b, rows_of(b, x), width_of(b, x)));
}

// y[i] = W[i] . x for matrices that read the same x; x is quantised once if any of them needs it.
static void matmul(const build *b, int32_t layer, int32_t x, const weight *const w[], int32_t y[],
                   uint32_t n_mats) {
    int32_t q = GRAPH_NONE;
    bool quantised = false;
    for (uint32_t i = 0; i < n_mats; i++) quantised |= !weight_is_float(w[i]);
    if (quantised) {
        q = graph_add_value(b->g, rows_of(b, x), VALUE_Q8, width_of(b, x));
        graph_node *n = graph_add_node(b->g, OP_QUANTIZE, layer);
        n->in[0] = x;
        n->out[0] = q;
    }
    for (uint32_t i = 0; i < n_mats; i++)
        if (y[i] == GRAPH_NONE) y[i] = new_f32(b, rows_of(b, x), w[i]->n_rows);
    graph_node *n = graph_add_node(b->g, OP_MATMUL, layer);
    n->in[0] = x;
    n->in[1] = q;
    n->n_mats = n_mats;
    for (uint32_t i = 0; i < n_mats; i++) {
        n->w[i] = w[i];
        n->out[i] = y[i];
    }
}

static void in_place(const build *b, op o, int32_t layer, int32_t x, int32_t other,
                     const weight *w) {
    graph_node *n = graph_add_node(b->g, o, layer);
    n->in[0] = x;
    n->in[1] = other;
    n->out[0] = x;
    n->w[0] = w;
}

static void rope(const build *b, int32_t layer, int32_t x, uint32_t heads) {
    graph_node *n = graph_add_node(b->g, OP_ROPE, layer);
    n->in[0] = x;
    n->in[1] = b->tables[model_layer_rope(b->p, (uint32_t)layer)];
    n->out[0] = x;
    n->parts = heads;
}

static void qk_norms(const build *b, int32_t i, const layer_weights *w, int32_t q, int32_t k) {
    const bool per_head = b->p->arch->flags & ARCH_QK_NORM_HEAD;
    if (w->q_norm && q != GRAPH_NONE) norm(b, i, q, w->q_norm, per_head ? b->p->n_head : 1, q);
    if (w->k_norm) norm(b, i, k, w->k_norm, per_head ? b->p->n_head_kv : 1, k);
}

// q, k and v of a layer; k and v go to the cells, the result is attention's output before its
// projection.
static int32_t attention(const build *b, int32_t i, int32_t x, bool read) {
    const layer_weights *w = &b->m->layers[i];
    const int32_t h = w->attn_norm ? norm_new(b, i, x, w->attn_norm) : x;
    int32_t y[] = {GRAPH_NONE, GRAPH_NONE, GRAPH_NONE};
    matmul(b, i, h, (const weight *const[]){w->k, w->v, w->q}, y, read ? 3 : 2);
    const int32_t k = y[0], v = y[1], q = y[2];
    if (read && w->q_bias) in_place(b, OP_BIAS, i, q, GRAPH_NONE, w->q_bias);
    if (w->k_bias) in_place(b, OP_BIAS, i, k, GRAPH_NONE, w->k_bias);
    if (w->v_bias) in_place(b, OP_BIAS, i, v, GRAPH_NONE, w->v_bias);
    qk_norms(b, i, w, q, k);
    if (read) rope(b, i, q, b->p->n_head);
    rope(b, i, k, b->p->n_head_kv);
    graph_node *store = graph_add_node(b->g, OP_KV_STORE, i);
    store->in[0] = k;
    store->in[1] = v;
    if (!read) return GRAPH_NONE;
    const int32_t out = new_f32(b, ROWS_TOKENS, width_of(b, q));
    graph_node *attn = graph_add_node(b->g, OP_ATTN, i);
    attn->in[0] = q;
    attn->out[0] = out;
    attn->kind = b->g->params.window_modes[b->layer_group[i]];
    return out;
}

static int32_t take_rows(const build *b, int32_t layer, int32_t x) {
    const int32_t y = new_f32(b, ROWS_OUTPUTS, width_of(b, x));
    graph_node *n = graph_add_node(b->g, OP_TAKE_ROWS, layer);
    n->in[0] = x;
    n->out[0] = y;
    return y;
}

// x += block's output, normalised first where the architecture does.
static void add_to(const build *b, int32_t layer, int32_t x, int32_t y, const weight *post_norm) {
    if (post_norm) norm(b, layer, y, post_norm, 1, y);
    in_place(b, OP_ADD, layer, x, y, NULL);
}

static void feed_forward(const build *b, int32_t i, int32_t x) {
    const layer_weights *w = &b->m->layers[i];
    const int32_t h = w->ffn_norm ? norm_new(b, i, x, w->ffn_norm) : x;
    int32_t gate_up[] = {GRAPH_NONE, GRAPH_NONE};
    matmul(b, i, h, (const weight *const[]){w->gate, w->up}, gate_up, 2);
    graph_node *glu = graph_add_node(b->g, OP_GLU, i);
    glu->in[0] = gate_up[0];
    glu->in[1] = gate_up[1];
    glu->out[0] = gate_up[0];
    glu->kind = b->p->arch->flags & ARCH_GELU ? GLU_GELU_TANH : GLU_SILU;
    int32_t down[] = {GRAPH_NONE};
    matmul(b, i, gate_up[0], &w->down, down, 1);
    add_to(b, i, x, down[0], w->ffn_post_norm);
}

static void rope_tables(build *b) {
    bool used[ROPE_KINDS] = {false};
    for (uint32_t i = 0; i < b->p->n_layer; i++) used[model_layer_rope(b->p, i)] = true;
    for (uint32_t kind = 0; kind < ROPE_KINDS; kind++) {
        if (!used[kind]) continue;
        b->tables[kind] = new_f32(b, ROWS_TOKENS, b->p->n_rot);
        graph_node *n = graph_add_node(b->g, OP_ROPE_TABLE, GRAPH_NONE);
        n->out[0] = b->tables[kind];
        n->kind = kind;
    }
}

static void transformer(build *b) {
    const mf_model *m = b->m;
    const bool has_outputs = b->g->params.max_outputs != 0;
    rope_tables(b);
    int32_t x = new_f32(b, ROWS_TOKENS, b->p->n_embd);
    graph_node *embed = graph_add_node(b->g, OP_EMBED, GRAPH_NONE);
    embed->out[0] = x;
    embed->w[0] = m->embed;
    embed->f = b->p->embed_scale;
    for (int32_t i = 0; i < (int32_t)b->p->n_layer; i++) {
        const bool last = i + 1 == (int32_t)b->p->n_layer;
        int32_t a = attention(b, i, x, !last || has_outputs);
        if (last) {  // behind the last layer's K and V only the rows whose logits are wanted go on
            if (!has_outputs) return;
            a = take_rows(b, i, a);
            x = take_rows(b, i, x);
        }
        int32_t o[] = {GRAPH_NONE};
        matmul(b, i, a, &m->layers[i].o, o, 1);
        if (m->layers[i].o_bias) in_place(b, OP_BIAS, i, o[0], GRAPH_NONE, m->layers[i].o_bias);
        add_to(b, i, x, o[0], m->layers[i].attn_post_norm);
        feed_forward(b, i, x);
    }
    const int32_t h = norm_new(b, GRAPH_NONE, x, m->output_norm);
    int32_t logits[] = {graph_add_value(b->g, ROWS_OUTPUTS, VALUE_LOGITS, b->p->n_vocab)};
    matmul(b, GRAPH_NONE, h, &m->output, logits, 1);
    if (b->p->final_softcap > 0) {
        in_place(b, OP_SOFTCAP, GRAPH_NONE, logits[0], GRAPH_NONE, NULL);
        if (!b->g->status) b->g->nodes[b->g->n_nodes - 1].f = b->p->final_softcap;
    }
}

int builder_build(graph **out, const mf_model *m, const uint32_t *layer_group,
                  const graph_params *params) {
    build b = {.m = m, .p = &m->p, .layer_group = layer_group};
    TRY(graph_new(&b.g, params));
    transformer(&b);
    const int status = graph_plan(b.g);
    if (status) {
        graph_free(b.g);
        return status;
    }
    *out = b.g;
    return MF_OK;
}
