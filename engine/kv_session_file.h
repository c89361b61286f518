// Layer 3, inside: the layout of a session file, which who writes one and who reads one share.
#ifndef MF_KV_SESSION_FILE_H
#define MF_KV_SESSION_FILE_H

#include "kv_session.h"

enum section_type { KINDS = 1, SEQS, ROWS, KEYS, VALUES, HOST };
enum { FLAG_PACKED = 1, FLAG_F16 = 2 };

typedef struct session_metadata {
    uint32_t backend, n_layer, n_ctx, n_embd, n_head_kv, head_dim, row_bytes, n_groups;
    uint64_t model[2];
} session_metadata;

session_metadata session_metadata_of(const kv_session_shape *shape);
uint32_t session_flags(kv_format format);

#endif
