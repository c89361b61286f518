// Layer 7: the public ABI. Arguments are checked here, once; below it they are asserted. Everything
// else is one call down.
#define _POSIX_C_SOURCE 200809L
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "api_args.h"
#include "engine.h"

const char *mf_version(void) { return MF_VERSION; }

const char *mf_isas(void) { return device_cpu.isas(); }

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

static int check_engine(const mf_engine *e, const char *function) {
    if (!e) return api_null(function, "engine");
    // Cheap, and right for every handle that is still memory: a freed engine has no magic.
    if (e->magic != ENGINE_MAGIC)
        return fail(MF_ARG, "%s: engine is not an open mf_engine", function);
    return MF_OK;
}

// A child of fork() inherits the lock of a call that its parent's thread was in; nobody will ever
// open it. A thread of the child that has just taken a free lock says so within moments: waited
// for.
static int lock(mf_engine *e) {
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

static void unlock(mf_engine *e) { pthread_mutex_unlock(&e->lock); }

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
    TRY(check_range("n_seq", o.n_seq, 4096));
    TRY(check_range("n_batch", o.n_batch, 1 << 16));
    TRY(check_range("n_threads", o.n_threads, 1024));
    const uint64_t saved = fpenv_enter();
    const int status = engine_new(out, model, &o);
    fpenv_restore(saved);
    return status;
}

void mf_engine_free(mf_engine *engine) { engine_free(engine); }

static int check_seq(const mf_engine *e, int32_t seq, const char *function) {
    if (seq >= 0 && (uint32_t)seq < e->n_seq) return MF_OK;
    return fail(MF_ARG, "%s: sequence %d; this engine has 0 to %u (n_seq at load raises it)",
                function, seq, e->n_seq - 1);
}

static int check_chunk(const mf_engine *e, const mf_chunk *chunks, size_t i, size_t *rows) {
    const mf_chunk *c = &chunks[i];
    const char *const me = "mf_engine_forward";
    TRY(check_seq(e, c->seq, me));
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
    TRY(check_engine(engine, __func__));
    TRY(check_forward(logits, n_floats, engine, chunks, n_chunks));
    TRY(lock(engine));
    const int status = engine_forward(engine, logits, chunks, n_chunks);
    unlock(engine);
    return status;
}

void mf_engine_cancel(mf_engine *engine) {
    if (!engine || engine->magic != ENGINE_MAGIC) return;
    int active = RUN_ACTIVE;  // never one that is over or not begun
    atomic_compare_exchange_strong(&engine->run, &active, RUN_CANCELLED);
}

int mf_engine_stats(mf_stats *out, mf_engine *engine) {
    NOT_NULL(out);
    TRY(check_engine(engine, __func__));
    mf_stats stats;
    TRY(lock(engine));
    engine_get_stats(engine, &stats);
    unlock(engine);
    return api_fill(out, &stats, sizeof stats, __func__);
}

const char *mf_engine_isa(const mf_engine *engine) {
    return check_engine(engine, __func__) ? NULL : engine->isa;
}

const char *mf_engine_kv_format(const mf_engine *engine) {
    return check_engine(engine, __func__) ? NULL : kv_format_name(engine->kv_format);
}

uint32_t mf_engine_n_threads(const mf_engine *engine) {
    return check_engine(engine, __func__) ? 0 : engine->n_threads;
}

uint32_t mf_engine_n_ctx(const mf_engine *engine) {
    return check_engine(engine, __func__) ? 0 : engine->n_ctx;
}

// ---- KV cache --------------------------------------------------------------------------------

int mf_kv_format_resolve(const char **name, const char *requested, const char *device_name,
                         uint64_t n_params) {
    NOT_NULL(name);
    (void)n_params;  // devices whose choice depends on the model's size read it
    const device *dev = device_find(device_name);
    if (!dev) return MF_ARG;
    kv_format format;
    TRY(kv_format_resolve(&format, requested, "cache_type", dev->name, dev->kv_formats));
    *name = kv_format_name(format);
    return MF_OK;
}

static int check_call(const mf_engine *e, int32_t seq, const char *function) {
    TRY(check_engine(e, function));
    return check_seq(e, seq, function);
}

// Runs one call of the cell store under the engine's lock.
#define LOCKED(engine, call)              \
    do {                                  \
        TRY(lock(engine));                \
        const int locked_status = (call); \
        unlock(engine);                   \
        return locked_status;             \
    } while (0)

int mf_kv_len(uint32_t *rows, mf_engine *engine, int32_t seq) {
    NOT_NULL(rows);
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_len(rows, engine->kv, seq));
}

int mf_kv_next_pos(uint32_t *pos, mf_engine *engine, int32_t seq) {
    NOT_NULL(pos);
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_next_pos(pos, engine->kv, seq));
}

int mf_kv_trim(mf_engine *engine, int32_t seq, uint32_t n) {
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_trim(engine->kv, seq, n));
}

int mf_kv_max_trim(uint32_t *n, mf_engine *engine, int32_t seq) {
    NOT_NULL(n);
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_max_trim(n, engine->kv, seq));
}

int mf_kv_free(mf_engine *engine, int32_t seq) {
    TRY(check_call(engine, seq, __func__));
    LOCKED(engine, kv_cache_free_seq(engine->kv, seq));
}

static int check_group(const mf_engine *e, uint32_t group, const char *function) {
    if (group < e->n_groups) return MF_OK;
    return fail(MF_ARG, "%s: group %u; this model has 0 to %u", function, group, e->n_groups - 1);
}

int mf_kv_get_group(mf_kv_group *out, mf_engine *engine, uint32_t group) {
    NOT_NULL(out);
    TRY(check_engine(engine, __func__));
    TRY(check_group(engine, group, __func__));
    TRY(lock(engine));
    const mf_kv_group info = {
        .kind = engine->kinds[group],
        .n_layers = engine->group_layers[group],
        .n_cells = kv_cache_group(engine->kv, group)->n_cells,
        .n_used = kv_cache_used(engine->kv, group),
        .bytes_per_token = engine_bytes_per_token(engine, group),
    };
    unlock(engine);
    return api_fill(out, &info, sizeof info, __func__);
}

int mf_kv_layer_group(uint32_t *group, mf_engine *engine, uint32_t layer) {
    NOT_NULL(group);
    TRY(check_engine(engine, __func__));
    if (layer >= engine->m->p.n_layer)
        return fail(MF_ARG, "mf_kv_layer_group: layer %u; this model has %u", layer,
                    engine->m->p.n_layer);
    *group = engine->layer_group[layer];
    return MF_OK;
}

static int copy_spans(size_t *n, mf_kv_span *spans, size_t capacity, const mf_engine *e,
                      int32_t seq, uint32_t group) {
    const mf_kv_span *from;
    uint32_t count;
    TRY(kv_cache_spans(&from, &count, e->kv, group, seq));
    if (spans && capacity < count)
        return fail(MF_ARG, "mf_kv_spans: capacity is %zu; %u spans are there", capacity, count);
    if (spans && count) memcpy(spans, from, count * sizeof *spans);
    *n = count;
    return MF_OK;
}

int mf_kv_spans(size_t *n, mf_kv_span *spans, size_t capacity, mf_engine *engine, int32_t seq,
                uint32_t group) {
    NOT_NULL(n);
    TRY(check_call(engine, seq, __func__));
    TRY(check_group(engine, group, __func__));
    LOCKED(engine, copy_spans(n, spans, capacity, engine, seq, group));
}

int mf_kv_check(mf_engine *engine) {
    TRY(check_engine(engine, __func__));
    LOCKED(engine, kv_cache_check(engine->kv));
}
