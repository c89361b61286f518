// The public header alone must be C++17, and its structs keep their sizes: they grow at the end
// only, and each change here is a decision.
#include "minfer.h"

static_assert(MF_INTERNAL == 12 && MF_KV_COLLIDES == 13 && MF_KV_SHARED == 19);  // appended only
static_assert(sizeof(mf_kv_info) == 32);
static_assert(sizeof(mf_tensor_info) == 72);
static_assert(sizeof(mf_model_options) == 32);
static_assert(sizeof(mf_model_info) == 72);
static_assert(sizeof(mf_engine_options) == 40);
static_assert(sizeof(mf_chunk) == 24);
static_assert(sizeof(mf_stats) == 88);
static_assert(sizeof(mf_kv_span) == 12);
static_assert(sizeof(mf_kv_group) == 80);
static_assert(sizeof(mf_kv_move) == 16);
static_assert(sizeof(mf_kv_save_options) == 48);
static_assert(sizeof(mf_kv_load_options) == 32);
static_assert(sizeof(mf_sampling) == 48);
