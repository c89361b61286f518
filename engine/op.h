// Layer 4: the operations a graph is made of. Rows are tokens of the batch, or the tokens whose
// logits are wanted.
#ifndef MF_OP_H
#define MF_OP_H

#include "base.h"

typedef enum op {
    OP_EMBED,       // y[row] = table[token] * scale
    OP_ROPE_TABLE,  // y[row] = cos, sin of position * frequency      [2][n_rot/2]
    OP_NORM,        // y = rms_norm(x) * w, over `parts` equal parts of a row
    OP_QUANTIZE,    // y = x as int8 blocks
    OP_MATMUL,      // y[i] = W[i] . x, up to 3 matrices that read the same x
    OP_BIAS,        // x += w
    OP_ROPE,        // rotates the heads of x in place
    OP_KV_STORE,    // rows of k and v go to the layer's region, at the cells of its group
    OP_ATTN,        // y = attention of q over the layer's region
    OP_GLU,         // y = act(gate) * up
    OP_ADD,         // x += y
    OP_TAKE_ROWS,   // y[i] = x[output row i]
    OP_SOFTCAP,     // x = cap * tanh(x / cap)
    OP_COUNT
} op;

typedef enum glu_kind { GLU_SILU, GLU_GELU_TANH } glu_kind;

// A row-wise operation reads and writes row r of its values only, so neighbours in the graph can be
// run on the same few rows one after the other, by one thread.
static inline bool op_is_rowwise(op o) { return o != OP_MATMUL && o != OP_ATTN; }

#endif
