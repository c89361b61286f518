// Owns the bridge between an engine and its session files: what shapes its rows, and how rows leave
// and enter the device.
#include "alloc.h"
#include "engine.h"
#include "error.h"
#include "kv_session.h"

static void get_rows(void *arg, uint32_t layer, bool value, uint32_t cell, uint32_t n, void *rows) {
    const mf_engine *const e = arg;
    e->m->dev->get_rows(e->b, layer, value, cell, n, rows);
}

static void put_rows(void *arg, uint32_t layer, bool value, uint32_t cell, uint32_t n,
                     const void *rows) {
    mf_engine *const e = arg;
    e->m->dev->put_rows(e->b, layer, value, cell, n, rows);
}

static kv_session_shape shape_of(const mf_engine *e) {
    const mf_model *m = e->m;
    return (kv_session_shape){.backend = m->dev->id,
                              .n_layer = m->p.n_layer,
                              .n_ctx = e->n_ctx,
                              .n_embd = m->p.n_embd,
                              .n_head_kv = m->p.n_head_kv,
                              .head_dim = m->p.head_dim,
                              .format = e->kv_format,
                              .model = {m->fingerprint[0], m->fingerprint[1]},
                              .layer_group = e->layer_group,
                              .kinds = e->kinds,
                              .config = e->kv_config};
}

// A session and what it points at.
typedef struct bridge {
    kv_session_shape shape;
    kv_session_rows rows;
    kv_session session;
} bridge;

static void bridge_init(bridge *b, mf_engine *e, uint64_t *progress) {
    b->shape = shape_of(e);
    b->rows = (kv_session_rows){.arg = e, .get = get_rows, .put = put_rows};
    b->session = (kv_session){.shape = &b->shape,
                              .rows = &b->rows,
                              .kv = e->kv,
                              .work = {.threads = e->m->dev->threads(e->b),
                                       .progress = progress ? kv_session_report : NULL,
                                       .progress_arg = progress}};
}

// All sequences with rows, ascending; `list` [n_seq].
static uint32_t live_sequences(int32_t *list, const mf_engine *e) {
    uint32_t n = 0, len = 0;
    for (uint32_t s = 0; s < e->n_seq; s++)
        if (!kv_cache_len(&len, e->kv, (int32_t)s) && len) list[n++] = (int32_t)s;
    return n;
}

int engine_kv_save(mf_engine *e, const char *path, const mf_kv_save_options *o) {
    bridge b;
    bridge_init(&b, e, o->progress);
    if (o->seqs)
        return kv_session_save(&b.session, path, o->seqs, (uint32_t)o->n_seqs, o->host_state,
                               o->host_bytes);
    int32_t *const live = mem_alloc(e->n_seq, sizeof *live);
    if (!live) return MF_NOMEM;
    const uint32_t n = live_sequences(live, e);
    const int status = kv_session_save(&b.session, path, live, n, o->host_state, o->host_bytes);
    mem_free(live);
    return status;
}

int engine_kv_load(void **host, size_t *n_host, mf_engine *e, const char *path,
                   const mf_kv_load_options *o) {
    bridge b;
    bridge_init(&b, e, o->progress);
    return kv_session_load(host, n_host, &b.session, path, o->seqs, (uint32_t)o->n_seqs);
}
