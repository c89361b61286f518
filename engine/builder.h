// Layer 6: turns a model's traits into a graph.
#ifndef MF_BUILDER_H
#define MF_BUILDER_H

#include "model.h"

// Builds and plans the graph of `params` for a model. layer_group [n_layer]: each layer's KV group.
int builder_build(graph **out, const mf_model *m, const uint32_t *layer_group,
                  const graph_params *params);

#endif
