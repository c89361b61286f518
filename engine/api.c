// Layer 7: the public ABI but for the cache (api_kv.c) and sampling (api_sample.c). Arguments are
// checked here, once; below it they are asserted. Everything else is one call down.
#define _POSIX_C_SOURCE 200809L
#include <time.h>
#include <unistd.h>

#include "api_engine.h"

const char *mf_version(void) { return MF_VERSION; }

const char *mf_isas(void) { return device_cpu.isas(); }

int mf_measure_limits(mf_limits *out, const char *isa, uint32_t n_threads) {
    NOT_NULL(out);
    if (n_threads > 1024)
        return fail(MF_ARG, "mf_measure_limits: n_threads is %u; at most 1024", n_threads);
    mf_limits limits;
    const uint64_t saved = fpenv_enter();
    const int status = device_cpu.limits(&limits, isa, n_threads);
    fpenv_restore(saved);
    return status ? status : api_fill(out, &limits, sizeof limits, __func__);
}

// ---- models ----------------------------------------------------------------------------------

int mf_model_load(mf_model **out, mf_gguf *file, const mf_model_options *options) {
    NOT_NULL(out);
    NOT_NULL(file);
    mf_model_options o;
    TRY(api_options(&o, sizeof o, options, sizeof(size_t), __func__));
    if (o.n_threads > 1024)
        return fail(MF_ARG, "mf_model_load: n_threads is %u; at most 1024", o.n_threads);
    const uint64_t saved = fpenv_enter();  // constants are computed here: no mode of the host's
    const int status = model_load(out, file, &o);
    fpenv_restore(saved);
    return status;
}

void mf_model_free(mf_model *model) { model_release(model); }

int mf_model_get_info(mf_model_info *out, const mf_model *model) {
    NOT_NULL(out);
    NOT_NULL(model);
    const model_params *p = &model->p;
    bool full = false, sliding = false;
    for (uint32_t i = 0; i < p->n_layer; i++) *(model_layer_window(p, i) ? &sliding : &full) = true;
    const mf_model_info info = {
        .arch = p->arch->name,
        .n_layer = p->n_layer,
        .n_embd = p->n_embd,
        .n_head = p->n_head,
        .n_head_kv = p->n_head_kv,
        .head_dim = p->head_dim,
        .n_ff = p->n_ff,
        .n_vocab = p->n_vocab,
        .n_ctx_train = p->n_ctx_train,
        .n_groups = (uint32_t)full + sliding,
        .n_params = model->n_params,
        .weight_bytes = model->weight_bytes,
    };
    return api_fill(out, &info, sizeof info, __func__);
}

// ---- engines ---------------------------------------------------------------------------------

int api_check_engine(const mf_engine *e, const char *function) {
    if (!e) return api_null(function, "engine");
    // Cheap, and right for every handle that is still memory: a freed engine has no magic.
    if (e->magic != ENGINE_MAGIC)
        return fail(MF_ARG, "%s: engine is not an open mf_engine", function);
    return MF_OK;
}

int api_check_seq(const mf_engine *e, int32_t seq, const char *function) {
    if (seq >= 0 && (uint32_t)seq < e->n_seq) return MF_OK;
    return fail(MF_ARG, "%s: sequence %d; this engine has 0 to %u (n_seq at load raises it)",
                function, seq, e->n_seq - 1);
}

// A child of fork() inherits the lock of a call that its parent's thread was in; nobody will ever
// open it. A thread of the child that has just taken a free lock says so within moments: waited
// for.
int api_lock(mf_engine *e) {
    for (int tries = 0; pthread_mutex_trylock(&e->lock); tries++) {
        if (atomic_load(&e->lock_pid) == getpid()) {
            pthread_mutex_lock(&e->lock);
            break;
        }
        if (tries == 100)
            return fail(
                MF_UNSUPPORTED,
                "the engine was computing when this process was forked; load it again here");
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    atomic_store(&e->lock_pid, getpid());
    return MF_OK;
}

void api_unlock(mf_engine *e) { pthread_mutex_unlock(&e->lock); }

static int check_range(const char *name, uint32_t value, uint32_t max) {
    if (value <= max) return MF_OK;
    return fail(MF_ARG, "mf_engine_new: %s is %u; at most %u", name, value, max);
}

int mf_engine_new(mf_engine **out, mf_model *model, const mf_engine_options *options) {
    NOT_NULL(out);
    NOT_NULL(model);
    mf_engine_options o;
    TRY(api_options(&o, sizeof o, options, sizeof(size_t), __func__));
    TRY(check_range("n_ctx", o.n_ctx, KV_POS_MAX));
    TRY(check_range("n_seq", o.n_seq, KV_MAX_SEQS));
    TRY(check_range("n_batch", o.n_batch, 1 << 16));
    TRY(check_range("n_threads", o.n_threads, 1024));
    const uint64_t saved = fpenv_enter();
    const int status = engine_new(out, model, &o);
    fpenv_restore(saved);
    return status;
}

void mf_engine_free(mf_engine *engine) { engine_free(engine); }

static int check_chunk(const mf_engine *e, const mf_chunk *chunks, size_t i, size_t *rows) {
    const mf_chunk *c = &chunks[i];
    const char *const me = "mf_engine_forward";
    TRY(api_check_seq(e, c->seq, me));
    for (size_t j = 0; j < i; j++)
        if (chunks[j].seq == c->seq)
            return fail(MF_ARG, "%s: sequence %d occurs twice; join its chunks", me, c->seq);
    if (!c->n_tokens || !c->tokens)
        return fail(MF_ARG, "%s: chunk %zu has no tokens; leave it out", me, i);
    if (c->n_tokens > KV_POS_MAX)
        return fail(MF_KV_RANGE, "%s: chunk %zu has %zu tokens; positions end at %d", me, i,
                    c->n_tokens, KV_POS_MAX);
    if (c->logits < MF_LOGITS_NONE || c->logits > MF_LOGITS_ALL)
        return fail(MF_ARG, "%s: logits of chunk %zu is %d; use an mf_logits", me, i, c->logits);
    for (size_t t = 0; t < c->n_tokens; t++)
        if (c->tokens[t] < 0 || (uint32_t)c->tokens[t] >= e->m->p.n_vocab)
            return fail(MF_ARG,
                        "%s: token %d at index %zu of chunk %zu; the vocabulary has 0 to %u", me,
                        c->tokens[t], t, i, e->m->p.n_vocab - 1);
    *rows += c->logits == MF_LOGITS_ALL ? c->n_tokens : (size_t)c->logits;
    return MF_OK;
}

static int check_forward(const float *logits, size_t n_floats, const mf_engine *e,
                         const mf_chunk *chunks, size_t n_chunks) {
    if (!chunks || !n_chunks)
        return fail(MF_ARG, "mf_engine_forward: no chunks; pass at least one");
    if (n_chunks > e->n_seq)
        return fail(MF_ARG, "mf_engine_forward: %zu chunks for %u sequences", n_chunks, e->n_seq);
    size_t rows = 0, need;
    for (size_t i = 0; i < n_chunks; i++) TRY(check_chunk(e, chunks, i, &rows));
    if (!size_mul(&need, rows, e->m->p.n_vocab) || need != n_floats)
        return fail(MF_ARG, "mf_engine_forward: n_floats is %zu; %zu rows of %u logits are needed",
                    n_floats, rows, e->m->p.n_vocab);
    if (need && !logits) return api_null("mf_engine_forward", "logits");
    return MF_OK;
}

int mf_engine_forward(float *logits, size_t n_floats, mf_engine *engine, const mf_chunk *chunks,
                      size_t n_chunks) {
    TRY(api_check_engine(engine, __func__));
    TRY(check_forward(logits, n_floats, engine, chunks, n_chunks));
    TRY(api_lock(engine));
    const int status = engine_forward(engine, logits, chunks, n_chunks);
    api_unlock(engine);
    return status;
}

void mf_engine_cancel(mf_engine *engine) {
    if (!engine || engine->magic != ENGINE_MAGIC) return;
    int active = RUN_ACTIVE;  // never one that is over or not begun
    atomic_compare_exchange_strong(&engine->run, &active, RUN_CANCELLED);
}

int mf_engine_stats(mf_stats *out, mf_engine *engine) {
    NOT_NULL(out);
    TRY(api_check_engine(engine, __func__));
    mf_stats stats;
    TRY(api_lock(engine));
    engine_get_stats(engine, &stats);
    api_unlock(engine);
    return api_fill(out, &stats, sizeof stats, __func__);
}

const char *mf_engine_isa(const mf_engine *engine) {
    return api_check_engine(engine, __func__) ? NULL : engine->isa;
}

const char *mf_engine_kv_format(const mf_engine *engine) {
    return api_check_engine(engine, __func__) ? NULL : kv_format_name(engine->kv_format);
}

uint32_t mf_engine_n_threads(const mf_engine *engine) {
    return api_check_engine(engine, __func__) ? 0 : engine->n_threads;
}

uint32_t mf_engine_n_ctx(const mf_engine *engine) {
    return api_check_engine(engine, __func__) ? 0 : engine->n_ctx;
}
