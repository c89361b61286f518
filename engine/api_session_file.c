// Owns the public face of an open session file: what it says, without an engine.
#include "api_args.h"
#include "backend.h"
#include "kv_session.h"

static int check_device(const mf_session *s) {
    if (device_name(s->shape.backend)) return MF_OK;
    return fail(MF_UNSUPPORTED,
                "%s: the backend is %u in the file, which this library does not know",
                container_name(s->c), s->shape.backend);
}

int mf_session_open(mf_session **out, const char *path, const mf_session_options *options) {
    mf_session_options o;
    NOT_NULL(out);
    NOT_NULL(path);
    TRY(api_options(&o, sizeof o, options, sizeof(size_t), __func__));
    kv_session_work work = {.progress = o.progress ? kv_session_report : NULL,
                            .progress_arg = o.progress};
    TRY(pool_new(&work.threads, o.n_threads ? o.n_threads : pool_default_threads()));
    mf_session *s = NULL;
    int status = kv_session_open(&s, path, NULL, &work);
    pool_free(work.threads);
    if (!status) status = check_device(s);
    if (status)
        kv_session_close(s);
    else
        *out = s;
    return status;
}

void mf_session_free(mf_session *session) { kv_session_close(session); }

int mf_session_get_info(mf_session_info *out, const mf_session *session) {
    NOT_NULL(out);
    NOT_NULL(session);
    const kv_session_shape *const shape = &session->shape;
    const container_section *const host = kv_session_host(session);
    const mf_session_info info = {.file_bytes = container_bytes(session->c),
                                  .version = CONTAINER_VERSION,
                                  .flags = container_flags(session->c),
                                  .device = device_name(shape->backend),
                                  .kv_format = kv_format_name(shape->format),
                                  .n_layer = shape->n_layer,
                                  .n_ctx = shape->n_ctx,
                                  .n_embd = shape->n_embd,
                                  .n_head_kv = shape->n_head_kv,
                                  .head_dim = shape->head_dim,
                                  .row_bytes = (uint32_t)kv_session_row_bytes(shape),
                                  .n_groups = session->image->n_groups,
                                  .n_seqs = session->image->n_seqs,
                                  .n_sections = container_n_sections(session->c),
                                  .fingerprint = {shape->model[0], shape->model[1]},
                                  .host_state = host->bytes,
                                  .host_bytes = (size_t)host->n};
    return api_fill(out, &info, sizeof info, __func__);
}

static int check_index(const char *function, const char *name, uint32_t i, uint32_t n) {
    if (i < n) return MF_OK;
    return fail(MF_ARG, "%s: %s is %u; the file has %u", function, name, i, n);
}

int mf_session_get_section(mf_session_section *out, const mf_session *session, uint32_t index) {
    NOT_NULL(out);
    NOT_NULL(session);
    TRY(check_index(__func__, "index", index, container_n_sections(session->c)));
    const container_section *const s = container_at(session->c, index);
    const mf_session_section section = {.name = kv_session_section_name(s->type),
                                        .index = s->index,
                                        .offset = s->offset,
                                        .checksum = s->checksum,
                                        .data = s->bytes,
                                        .bytes = (size_t)s->n};
    return api_fill(out, &section, sizeof section, __func__);
}

int mf_session_get_group(mf_session_group *out, const mf_session *session, uint32_t group) {
    NOT_NULL(out);
    NOT_NULL(session);
    TRY(check_index(__func__, "group", group, session->image->n_groups));
    mf_session_group g = {.kind = session->kinds[group],
                          .window = session->image->groups[group].window,
                          .n_rows = session->image->groups[group].n_rows};
    for (uint32_t i = 0; i < session->shape.n_layer; i++)
        g.n_layers += session->layer_group[i] == group;
    return api_fill(out, &g, sizeof g, __func__);
}

int mf_session_layer_group(uint32_t *group, const mf_session *session, uint32_t layer) {
    NOT_NULL(group);
    NOT_NULL(session);
    TRY(check_index(__func__, "layer", layer, session->shape.n_layer));
    *group = session->layer_group[layer];
    return MF_OK;
}

int mf_session_get_seq(mf_session_seq *out, const mf_session *session, uint32_t index) {
    NOT_NULL(out);
    NOT_NULL(session);
    TRY(check_index(__func__, "index", index, session->image->n_seqs));
    const kv_image_seq *const from = &session->image->seqs[index];
    const mf_session_seq seq = {.seq = from->id,
                                .len = from->len,
                                .next_pos = kv_image_next_pos(session->image, index),
                                .clean = from->clean};
    return api_fill(out, &seq, sizeof seq, __func__);
}

int mf_session_spans(size_t *n, mf_kv_span *spans, size_t capacity, const mf_session *session,
                     uint32_t index, uint32_t group) {
    NOT_NULL(n);
    NOT_NULL(session);
    TRY(check_index(__func__, "index", index, session->image->n_seqs));
    TRY(check_index(__func__, "group", group, session->image->n_groups));
    const size_t total = kv_image_spans(NULL, 0, session->image, group, index);
    if (spans && capacity < total)
        return fail(MF_ARG, "%s: capacity is %zu; there are %zu spans", __func__, capacity, total);
    if (spans) kv_image_spans(spans, capacity, session->image, group, index);
    *n = total;
    return MF_OK;
}
