// The memory plan of random graphs against the plain statement of what it must keep: values that
// live in one step do not share a byte, steps cover the nodes in order, and a step of several nodes
// is row-wise over one set of rows.
#include <stdio.h>

#include "../engine/alloc.h"
#include "../engine/graph.h"
#include "check.h"

enum { GRAPHS = 300, MAX_NODES = 60 };

static int passed, failed;

static void check(bool ok, const char *what, uint64_t seed) {
    ok ? passed++ : failed++;
    if (!ok) printf("FAILED: %s (graph %llu)\n", what, (unsigned long long)seed);
}

// Nodes that each read an earlier value and make a new one or change it in place.
static void grow_graph(graph *g, uint64_t *rng) {
    static const op kinds[] = {OP_NORM, OP_ADD, OP_MATMUL, OP_ATTN, OP_QUANTIZE, OP_TAKE_ROWS};
    const uint32_t n = 2 + check_below(rng, MAX_NODES);
    graph_add_value(g, ROWS_TOKENS, VALUE_F32, 64);
    for (uint32_t i = 0; i < n; i++) {
        op o = kinds[check_below(rng, sizeof kinds / sizeof *kinds)];
        const int32_t from = (int32_t)check_below(rng, g->n_values);
        // Output rows are taken out of token rows.
        if (o == OP_TAKE_ROWS && g->values[from].rows == ROWS_OUTPUTS) o = OP_NORM;
        const value_format format = o == OP_QUANTIZE ? VALUE_Q8 : VALUE_F32;
        const row_set rows = o == OP_TAKE_ROWS ? ROWS_OUTPUTS : g->values[from].rows;
        int32_t to = from;
        if (o != OP_ADD) to = graph_add_value(g, rows, format, 32 * (1 + check_below(rng, 40)));
        graph_node *node = graph_add_node(g, o, 0);
        node->in[0] = from;
        node->out[0] = to;
    }
}

static bool uses(const graph *g, uint32_t step, int32_t v) {
    for (uint32_t i = g->steps[step].first; i < g->steps[step].last; i++)
        if (g->nodes[i].in[0] == v || g->nodes[i].out[0] == v) return true;
    return false;
}

// First and last step that a value is used in, found by looking at every node.
static void life(int32_t *first, int32_t *last, const graph *g, int32_t v) {
    *first = *last = -1;
    for (uint32_t s = 0; s < g->n_steps; s++) {
        if (!uses(g, s, v)) continue;
        if (*first < 0) *first = (int32_t)s;
        *last = (int32_t)s;
    }
}

static bool values_are_apart(const graph *g) {
    for (int32_t a = 0; a < (int32_t)g->n_values; a++) {
        int32_t a0, a1, b0, b1;
        life(&a0, &a1, g, a);
        const graph_value *va = &g->values[a];
        if (a0 < 0) continue;
        if (va->offset % 64 || va->offset + va->bytes > g->buffer_bytes) return false;
        for (int32_t b = 0; b < a; b++) {
            life(&b0, &b1, g, b);
            const graph_value *vb = &g->values[b];
            if (b0 < 0 || b1 < a0 || a1 < b0) continue;
            if (va->offset < vb->offset + vb->bytes && vb->offset < va->offset + va->bytes)
                return false;
        }
    }
    return true;
}

static row_set rows_of(const graph *g, uint32_t node) {
    return g->values[g->nodes[node].out[0]].rows;
}

static bool steps_are_sound(const graph *g) {
    uint32_t next = 0;
    for (uint32_t s = 0; s < g->n_steps; s++) {
        const graph_step *step = &g->steps[s];
        if (step->first != next || step->last <= step->first) return false;
        for (uint32_t i = step->first; i < step->last; i++) {
            if (step->last - step->first > 1 && !op_is_rowwise(g->nodes[i].op)) return false;
            if (rows_of(g, i) != step->rows) return false;
            // Taking rows reads rows that other threads may be making in the same step.
            for (uint32_t k = step->first; k < i && g->nodes[i].op == OP_TAKE_ROWS; k++)
                if (g->nodes[k].out[0] == g->nodes[i].in[0]) return false;
        }
        next = step->last;
    }
    return next == g->n_nodes;
}

static bool memory_is_used_again(const graph *g) {
    size_t sum = 0;
    for (uint32_t v = 0; v < g->n_values; v++) sum += g->values[v].bytes;
    return g->buffer_bytes < sum;
}

int main(void) {
    const size_t alive = mem_alive();
    uint32_t n_smaller = 0;
    for (uint64_t seed = 1; seed <= GRAPHS; seed++) {
        uint64_t rng = seed;
        const graph_params params = {.max_tokens = 1u << check_below(&rng, 6),
                                     .max_outputs = 1 + check_below(&rng, 4)};
        graph *g = NULL;
        if (graph_new(&g, &params)) return 1;
        grow_graph(g, &rng);
        check(!graph_plan(g), "the plan is made", seed);
        check(values_are_apart(g), "values that live together lie apart", seed);
        check(steps_are_sound(g), "steps", seed);
        n_smaller += memory_is_used_again(g);
        graph_free(g);
    }
    check(n_smaller > GRAPHS / 2, "memory is used again", 0);
    for (size_t n = 0; n < 5; n++) {  // a failing allocation sticks until graph_plan tells
        const graph_params params = {.max_tokens = 4, .max_outputs = 1};
        graph *g = NULL;
        mem_fail_after(n);
        int status = graph_new(&g, &params);
        if (!status) {
            const int32_t x = graph_add_value(g, ROWS_TOKENS, VALUE_F32, 32);
            graph_node *node = graph_add_node(g, OP_NORM, 0);
            node->in[0] = node->out[0] = x;
            status = graph_plan(g);
        }
        mem_fail_after(SIZE_MAX);
        check(status == (n < 4 ? MF_NOMEM : MF_OK), "a failed allocation is reported", n);
        graph_free(g);
    }
    check(mem_alive() == alive, "no memory is left", 0);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
