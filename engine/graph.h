// Layer 4: a computation as a list of nodes over values, and the plan that gives values memory.
//
// A graph is built from graph_params and nothing else: no position, no cell, no length of a cache
// is in it. Equal params therefore mean the same graph, and a graph is built once per params and
// kept.
#ifndef MF_GRAPH_H
#define MF_GRAPH_H

#include "kv_cache.h"
#include "kvformat.h"
#include "op.h"
#include "weight.h"

enum { GRAPH_NONE = -1, NODE_MATS = 3 };

// The graph's identity. Compared by memcmp: zero the struct before filling it in.
typedef struct graph_params {
    uint32_t max_tokens;   // bucket: power of two that holds the batch's tokens
    uint32_t max_outputs;  // bucket of the rows whose logits are wanted; 0: none
    uint32_t kv_format;
    uint32_t window_modes[KV_MAX_GROUPS];  // kv_window_mode of each group
} graph_params;

typedef enum row_set { ROWS_TOKENS, ROWS_OUTPUTS } row_set;
typedef enum value_format {
    VALUE_F32,
    VALUE_Q8,
    VALUE_LOGITS
} value_format;  // LOGITS: f32 in the caller's memory

typedef struct graph_value {
    row_set rows;
    value_format format;
    uint32_t width;  // elements per row
    int32_t first_step, last_step;
    size_t offset, bytes;  // in the compute buffer
} graph_value;

typedef struct graph_node {
    op op;
    int32_t layer;          // GRAPH_NONE outside layers
    int32_t in[NODE_MATS];  // values; OP_MATMUL: in[0] f32 and in[1] its int8 form (or GRAPH_NONE)
    int32_t out[NODE_MATS];
    const weight *w[NODE_MATS];
    uint32_t n_mats;  // OP_MATMUL
    uint32_t parts;   // OP_NORM, OP_ROPE: heads in a row
    uint32_t kind;  // OP_GLU: glu_kind; OP_ROPE_TABLE: index of the rope kind; OP_ATTN: window mode
    float f;        // OP_EMBED: scale; OP_NORM: eps; OP_SOFTCAP: cap
    int32_t step;
} graph_node;

typedef struct graph_step {  // nodes [first, last): one node, or neighbours that are row-wise over
                             // the same rows
    uint32_t first, last;
    row_set rows;
} graph_step;

typedef struct graph {
    graph_params params;
    graph_node *nodes;
    graph_value *values;
    graph_step *steps;
    uint32_t n_nodes, n_values, n_steps;
    size_t buffer_bytes;  // of the compute buffer, for params.max_tokens and max_outputs
    uint32_t cap_nodes, cap_values;
    int status;  // first failure while building; sticky
} graph;

int graph_new(graph **out, const graph_params *params);
void graph_free(graph *g);

// Building. Failures are kept in g->status and returned by graph_plan, so that builders read like
// formulas.
int32_t graph_add_value(graph *g, row_set rows, value_format format, uint32_t width);
graph_node *graph_add_node(
    graph *g, op o, int32_t layer);  // never NULL: after a failure a node that is thrown away
// Cuts the nodes into steps, finds how long each value lives and lays the values out in one buffer.
int graph_plan(graph *g);

// Bytes a value takes for `rows` rows; the int8 form is laid out as in graph_q8_layout.
size_t graph_value_bytes(value_format format, uint32_t width, uint32_t rows);
typedef struct q8_layout {
    size_t q, d, neg_sum, neg_half, bytes;  // offsets from the value's start, and the whole
} q8_layout;
q8_layout graph_q8_layout(uint32_t width, uint32_t rows);

#endif
