// Owns the public face of session files. What a file must be is judged in kv_session.c.
#include "alloc.h"
#include "api_engine.h"

static int check_seqs(const mf_engine *e, const int32_t *seqs, size_t n, const char *function) {
    if (!seqs && n) return api_null(function, "options.seqs");
    if (n > e->n_seq)
        return fail(MF_ARG, "%s: options.n_seqs is %zu; this engine has %u", function, n, e->n_seq);
    for (size_t i = 0; i < n; i++) TRY(api_check_seq(e, seqs[i], function));
    return MF_OK;
}

int mf_kv_save(mf_engine *engine, const char *path, const mf_kv_save_options *options) {
    mf_kv_save_options o;
    TRY(api_check_engine(engine, __func__));
    NOT_NULL(path);
    TRY(api_options(&o, sizeof o, options, sizeof(size_t), __func__));
    TRY(check_seqs(engine, o.seqs, o.n_seqs, __func__));
    if (o.host_bytes && !o.host_state) return api_null(__func__, "options.host_state");
    TRY(api_lock(engine));
    const int status = engine_kv_save(engine, path, &o);
    api_unlock(engine);
    return status;
}

int mf_kv_load(void **host_state, size_t *host_bytes, mf_engine *engine, const char *path,
               const mf_kv_load_options *options) {
    mf_kv_load_options o;
    NOT_NULL(host_state);
    NOT_NULL(host_bytes);
    TRY(api_check_engine(engine, __func__));
    NOT_NULL(path);
    TRY(api_options(&o, sizeof o, options, sizeof(size_t), __func__));
    TRY(check_seqs(engine, o.seqs, o.n_seqs, __func__));
    TRY(api_lock(engine));
    const int status = engine_kv_load(host_state, host_bytes, engine, path, &o);
    api_unlock(engine);
    return status;
}

void mf_kv_host_free(void *host_state) { mem_free(host_state); }
