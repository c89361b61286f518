// What the tests of the public KV and session functions share: an engine of a tiny model, and all
// that can be seen of its cache, which a refused call must leave alone.
#ifndef MF_TESTS_API_KV_TEST_H
#define MF_TESTS_API_KV_TEST_H

#include "api_test.h"

enum { N_SEQ = 4, CTX = 64, N_BATCH = 8, N_GROUPS = 2, VOCAB = 40, MAX_SPANS = 64 };

// All that can be seen of a cache.
typedef struct view {
    uint32_t len[N_SEQ], next_pos[N_SEQ], max_trim[N_SEQ];
    size_t n_spans[N_GROUPS][N_SEQ];
    mf_kv_span spans[N_GROUPS][N_SEQ][MAX_SPANS];
    mf_kv_group groups[N_GROUPS];
} view;

static inline void look(view *v, mf_engine *e) {
    memset(v, 0, sizeof *v);
    bool ok = !mf_kv_check(e);
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        v->groups[g].size = sizeof v->groups[g];
        ok &= !mf_kv_get_group(&v->groups[g], e, g);
        for (int32_t s = 0; s < N_SEQ; s++)
            ok &= !mf_kv_spans(&v->n_spans[g][s], v->spans[g][s], MAX_SPANS, e, s, g);
    }
    for (int32_t s = 0; s < N_SEQ; s++)
        ok &= !mf_kv_len(&v->len[s], e, s) && !mf_kv_next_pos(&v->next_pos[s], e, s) &&
              !mf_kv_max_trim(&v->max_trim[s], e, s);
    check(ok, "the cache cannot be looked at");
}

// REFUSED, and the cache of engine `e` is as before.
#define KEPT(wanted, words, call)                                                         \
    do {                                                                                  \
        view kept_before, kept_after;                                                     \
        look(&kept_before, e);                                                            \
        REFUSED(wanted, words, call);                                                     \
        look(&kept_after, e);                                                             \
        check(!memcmp(&kept_before, &kept_after, sizeof(view)), "%s left a mark", #call); \
    } while (0)

static inline void append(mf_engine *e, int32_t seq, uint32_t n) {
    int32_t tokens[CTX];
    for (uint32_t i = 0; i < n; i++) tokens[i] = (int32_t)(i * 7 + (uint32_t)seq) % VOCAB;
    const mf_chunk c = {.seq = seq, .logits = MF_LOGITS_NONE, .tokens = tokens, .n_tokens = n};
    ACCEPTED(mf_engine_forward(NULL, 0, e, &c, 1));
}

static inline mf_engine *start(mf_model *model) {
    const mf_engine_options o = {
        .size = sizeof o, .n_ctx = CTX, .n_seq = N_SEQ, .n_batch = N_BATCH, .n_threads = 1};
    return must_start(model, &o);
}

// Sequences 0 and 1 share 10 rows of 16 and go on alone, 2 has a gap, 3 is empty.
static inline mf_engine *start_edited(mf_model *model) {
    mf_engine *const e = start(model);
    append(e, 0, 16);
    ACCEPTED(mf_kv_share(e, 1, 0, 10));
    append(e, 1, 3);
    append(e, 2, 6);
    ACCEPTED(mf_kv_shift(e, 2, 3, 5));
    return e;
}

#endif
