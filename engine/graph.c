// Owns the graph's node and value lists and the memory plan. Invariant after graph_plan: two values
// whose lives overlap in any step do not overlap in the buffer. Lives are counted in steps, not
// nodes, because the nodes of a step are run side by side by several threads, each on its own rows.
#include "graph.h"

#include <string.h>

#include "alloc.h"
#include "error.h"

static const size_t ALIGN = 64;

static size_t align_up(size_t n) { return (n + ALIGN - 1) & ~(ALIGN - 1); }

int graph_new(graph **out, const graph_params *params) {
    graph *g = mem_alloc(1, sizeof *g);
    if (!g) return MF_NOMEM;
    g->params = *params;
    *out = g;
    return MF_OK;
}

void graph_free(graph *g) {
    if (!g) return;
    mem_free(g->nodes);
    mem_free(g->values);
    mem_free(g->steps);
    mem_free(g);
}

// Makes room for one more element; the first failure sticks.
static void *grow(graph *g, void *old, uint32_t n, uint32_t *cap, size_t size) {
    if (g->status || n < *cap) return old;
    const uint32_t more = *cap ? 2 * *cap : 64;
    void *p = mem_grow(old, more, size);
    if (!p) {
        g->status = MF_NOMEM;
        return old;
    }
    *cap = more;
    return p;
}

int32_t graph_add_value(graph *g, row_set rows, value_format format, uint32_t width) {
    g->values = grow(g, g->values, g->n_values, &g->cap_values, sizeof *g->values);
    if (g->status) return GRAPH_NONE;
    g->values[g->n_values] = (graph_value){.rows = rows, .format = format, .width = width};
    return (int32_t)g->n_values++;
}

graph_node *graph_add_node(graph *g, op o, int32_t layer) {
    static _Thread_local graph_node discarded;
    g->nodes = grow(g, g->nodes, g->n_nodes, &g->cap_nodes, sizeof *g->nodes);
    graph_node *node = g->status ? &discarded : &g->nodes[g->n_nodes++];
    memset(node, 0, sizeof *node);
    node->op = o;
    node->layer = layer;
    for (int i = 0; i < NODE_MATS; i++) node->in[i] = node->out[i] = GRAPH_NONE;
    return node;
}

q8_layout graph_q8_layout(uint32_t width, uint32_t rows) {
    const size_t blocks = (size_t)(width / 32) * rows;
    q8_layout l = {.q = 0};
    l.d = align_up(32 * blocks);
    l.neg_sum = l.d + align_up(4 * blocks);
    l.neg_half = l.neg_sum + align_up(4 * blocks);
    l.bytes = l.neg_half + align_up(8 * blocks);
    return l;
}

size_t graph_value_bytes(value_format format, uint32_t width, uint32_t rows) {
    switch (format) {
        case VALUE_F32:
            return align_up((size_t)width * rows * sizeof(float));
        case VALUE_Q8:
            return graph_q8_layout(width, rows).bytes;
        case VALUE_LOGITS:
            break;
    }
    return 0;
}

static row_set node_rows(const graph *g, const graph_node *node) {
    const int32_t v = node->out[0] != GRAPH_NONE ? node->out[0] : node->in[0];
    return g->values[v].rows;
}

// A node starts a step unless it and the one before it are row-wise over the same rows. Taking rows
// reads any token row, but a step over output rows makes none.
static int cut_steps(graph *g) {
    g->steps = mem_alloc(g->n_nodes, sizeof *g->steps);
    if (!g->steps) return MF_NOMEM;
    for (uint32_t i = 0; i < g->n_nodes; i++) {
        graph_node *node = &g->nodes[i];
        const graph_node *before = i ? node - 1 : NULL;
        const bool joins = before && op_is_rowwise(node->op) && op_is_rowwise(before->op) &&
                           node_rows(g, node) == node_rows(g, before);
        if (!joins) g->steps[g->n_steps++] = (graph_step){.first = i, .rows = node_rows(g, node)};
        g->steps[g->n_steps - 1].last = i + 1;
        node->step = (int32_t)g->n_steps - 1;
    }
    return MF_OK;
}

static void find_lives(graph *g) {
    for (uint32_t v = 0; v < g->n_values; v++) g->values[v].first_step = INT32_MAX;
    for (uint32_t i = 0; i < g->n_nodes; i++) {
        const graph_node *node = &g->nodes[i];
        for (int k = 0; k < 2 * NODE_MATS; k++) {
            const int32_t v = k < NODE_MATS ? node->in[k] : node->out[k - NODE_MATS];
            if (v == GRAPH_NONE) continue;
            graph_value *value = &g->values[v];
            if (node->step < value->first_step) value->first_step = node->step;
            if (node->step > value->last_step) value->last_step = node->step;
        }
    }
}

// First fit: the lowest offset at which no value that is alive at the same time lies. Values are
// placed in order of birth; their number is some hundreds, so the plain quadratic search is the
// right one.
static void place(graph *g, uint32_t v) {
    graph_value *value = &g->values[v];
    size_t offset = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (uint32_t u = 0; u < v; u++) {
            const graph_value *other = &g->values[u];
            const bool alive =
                other->first_step <= value->last_step && value->first_step <= other->last_step;
            if (alive && other->offset < offset + value->bytes &&
                offset < other->offset + other->bytes) {
                offset = other->offset + other->bytes;
                moved = true;
            }
        }
    }
    value->offset = offset;
    if (offset + value->bytes > g->buffer_bytes) g->buffer_bytes = offset + value->bytes;
}

int graph_plan(graph *g) {
    if (g->status) return g->status;
    TRY(cut_steps(g));
    find_lives(g);
    for (uint32_t v = 0; v < g->n_values; v++) {
        graph_value *value = &g->values[v];
        const uint32_t rows =
            value->rows == ROWS_TOKENS ? g->params.max_tokens : g->params.max_outputs;
        value->bytes = graph_value_bytes(value->format, value->width, rows);
        place(g, v);
    }
    return MF_OK;
}
