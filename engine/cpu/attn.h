// Attention of a whole batch for one layer: who computes what, and where the rows lie. The
// arithmetic is the kernels'. For packed rows the queries are quantised first, once.
//
// A unit is (sequence, KV head, block of queries). When there are enough units for the threads each
// is one task; when there are few, as in decode, a unit's tiles are shared out, each keeps the
// state of every tile it computes, and the states are merged in the order of tiles. Neither choice,
// nor the sizes, changes a bit.
#ifndef MF_CPU_ATTN_H
#define MF_CPU_ATTN_H

#include "../pool.h"
#include "kernels.h"

// Consecutive tokens of one sequence: query i is row first_token + i of q and out, at position pos0
// + i. Its K and V are stored already.
typedef struct attn_seq {
    uint32_t first_token, n_tokens, pos0;
    const mf_kv_span
        *spans;  // [n_spans] in position order; positions outside have no row and are skipped
    uint32_t n_spans;
} attn_seq;

typedef struct attn_batch {
    const attn_seq *seqs;  // [n_seqs], n_tokens >= 1
    uint32_t n_seqs;
    const float *q;  // [tokens][q_stride], of which n_head * head_dim
    size_t q_stride;
    float *out;  // likewise
    size_t out_stride;
    kv_format format;
    bool widened;                     // q8_0 rows are copied out as floats and read as f32 rows are
    const void *k_region, *v_region;  // [cells][kv_format_row_bytes(format, n_head_kv * head_dim)]
    uint32_t n_head, n_head_kv, head_dim;
    uint32_t window;       // UINT32_MAX: none
    float scale, softcap;  // see attn_job
    void *scratch;         // 64-byte aligned
    size_t scratch_bytes;  // as attn_scratch_bytes says
} attn_batch;

// Upper bounds of what will be run. n_ctx only decides how many states may be kept at a time:
// longer sequences work.
typedef struct attn_limits {
    uint32_t n_ctx, n_batch, n_head, n_head_kv, head_dim, n_threads;
    kv_format format;
    bool widened;
} attn_limits;

size_t attn_scratch_bytes(const attn_limits *limits);
void attn_run(const cpu_kernels *k, pool *p, const attn_batch *b);

#endif
