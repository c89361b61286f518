// Owns the pass from tokens to logits: room for all rows first, then batch by batch cells, graph,
// computing. Invariant: a call that fails leaves whole batches or nothing; a graph is built once
// per graph_params, so a window that changes its mode and changes it back builds nothing new.
#define _POSIX_C_SOURCE 200809L
#include "engine.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "alloc.h"
#include "error.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Phi-3's two sets of frequency divisors: which one is used is part of every layer's kind, because
// it shapes K rows. The short set is for the context that the model grew up with, and computes no
// position beyond it. Returns what the kind says, or NULL.
static const char *choose_factors(mf_engine *e) {
    const mf_model *m = e->m;
    e->pos_end = KV_POS_MAX;
    e->rope_factors = m->rope_freqs;
    if (!m->rope_long) return NULL;
    if (e->n_ctx > m->p.rope_orig_ctx) {
        e->rope_factors = m->rope_long;
        return "rope-long";
    }
    e->rope_factors = m->rope_short;
    e->pos_end = m->p.rope_orig_ctx;
    return "rope-short";
}

// Layers with equal windows keep the same positions, so they share one cell store. Group 0 is that
// of layer 0.
static int make_groups(mf_engine *e, const char *rope) {
    const model_params *p = &e->m->p;
    e->layer_group = mem_alloc(p->n_layer, sizeof *e->layer_group);
    if (!e->layer_group) return MF_NOMEM;
    for (uint32_t i = 0; i < p->n_layer; i++) {
        const uint32_t window = model_layer_window(p, i);
        uint32_t g = 0;
        while (g < e->n_groups && e->group_window[g] != window) g++;
        if (g == e->n_groups) {
            e->group_window[e->n_groups++] = window;
            kv_kind_format(e->kinds[g], window, e->kv_format, e->kv_widened, p->n_head_kv,
                           p->head_dim, rope);
        }
        e->layer_group[i] = g;
        e->group_layers[g]++;
    }
    return MF_OK;
}

// A sliding arena of n_seq * 2w + n_batch cells never refuses (the live rows of all sequences and a
// batch fit, with w rows a sequence to take back). One of n_ctx cells refuses nothing that the full
// group beside it has cells for; without a full group n_ctx is what all windows share.
static uint32_t arena_cells(const mf_engine *e, uint32_t window) {
    const uint64_t cells = window ? (uint64_t)e->n_seq * 2 * window + e->n_batch : e->n_ctx;
    return cells < e->n_ctx ? (uint32_t)cells : e->n_ctx;
}

static int make_cache(mf_engine *e, uint32_t cells[KV_MAX_GROUPS]) {
    const device *const dev = e->m->dev;
    e->kv_config = (kv_config){.n_groups = e->n_groups,
                               .n_seq = e->n_seq,
                               .n_batch = e->n_batch,
                               .can_rope = dev->rope_formats >> e->kv_format & 1};
    for (uint32_t g = 0; g < e->n_groups; g++) {
        const uint32_t window = e->group_window[g];
        cells[g] = arena_cells(e, window);
        e->kv_config.groups[g] = (kv_group_spec){
            .kind = window ? KV_SLIDING : KV_FULL, .window = window, .n_cells = cells[g]};
    }
    return kv_cache_new(&e->kv, &e->kv_config);
}

static int make_backend(mf_engine *e, const mf_engine_options *o, const uint32_t *cells) {
    const mf_model *m = e->m;
    const model_params *p = &m->p;
    const uint32_t half = p->n_rot / 2;
    double *freq = mem_alloc((size_t)half * ROPE_KINDS, sizeof *freq);
    uint32_t *window = mem_alloc(p->n_layer, sizeof *window);
    uint32_t *rope = mem_alloc(p->n_layer, sizeof *rope);
    int status = MF_NOMEM;
    if (!freq || !window || !rope) goto done;
    backend_config c = {
        .n_layer = p->n_layer,
        .n_embd = p->n_embd,
        .n_vocab = p->n_vocab,
        .n_head = p->n_head,
        .n_head_kv = p->n_head_kv,
        .head_dim = p->head_dim,
        .n_rot = p->n_rot,
        .rope_interleaved = p->arch->flags & ARCH_ROPE_INTERLEAVED,
        .attn_scale = p->attn_scale,
        .attn_softcap = p->attn_softcap,
        .layer_group = e->layer_group,
        .layer_window = window,
        .layer_rope = rope,
        .group_cells = cells,
        .n_groups = e->n_groups,
        .kv_format = e->kv_format,
        .kv_widened = e->kv_widened,
        .n_batch = e->n_batch,
        .n_ctx = e->n_ctx,
        .n_threads = o->n_threads,
        .isa = o->isa,
    };
    for (uint32_t k = 0; k < ROPE_KINDS; k++) {
        rope_frequencies(freq + k * half, &c.rope[k].magnitude, p, k == 1, e->rope_factors);
        c.rope[k].freq = freq + k * half;
    }
    for (uint32_t i = 0; i < p->n_layer; i++) {
        const uint32_t w = model_layer_window(p, i);
        window[i] = w ? w : UINT32_MAX;
        rope[i] = model_layer_rope(p, i);
    }
    status = m->dev->backend_new(&e->b, &c);
done:
    mem_free(freq);
    mem_free(window);
    mem_free(rope);
    return status;
}

// MINFER_CACHE_TYPE and MINFER_NO_FUSED_Q8_KV are read here, once per engine, and nowhere else.
static int resolve_format(mf_engine *e, const char *requested) {
    const device *const dev = e->m->dev;
    const char *origin = "cache_type";
    if (!requested) {
        const char *const set = getenv("MINFER_CACHE_TYPE");
        if (set && *set) {
            requested = set;
            origin = "MINFER_CACHE_TYPE";
        }
    }
    TRY(kv_format_resolve(&e->kv_format, requested, origin, dev->name, dev->kv_formats));
    if (e->kv_format != KV_FORMAT_Q8_0) return MF_OK;
    if (e->m->p.head_dim % KV_PACKED_BLOCK != 0)
        return fail(MF_UNSUPPORTED,
                    "%s: q8_0 packs %d elements of a head into a block, and the model's heads have "
                    "%u; use f16",
                    origin, KV_PACKED_BLOCK, e->m->p.head_dim);
    const char *const off = getenv("MINFER_NO_FUSED_Q8_KV");
    if (!off || !*off || !strcmp(off, "0")) return MF_OK;
    if (strcmp(off, "1") != 0)
        return fail(MF_ARG, "MINFER_NO_FUSED_Q8_KV: \"%.40s\"; use 0 or 1", off);
    e->kv_widened = true;
    return MF_OK;
}

int engine_new(mf_engine **out, mf_model *m, const mf_engine_options *o) {
    mf_engine *e = mem_alloc(1, sizeof *e);
    if (!e) return MF_NOMEM;
    e->magic = ENGINE_MAGIC;
    e->m = m;
    model_retain(m);
    e->n_ctx = o->n_ctx ? o->n_ctx : u32_min(4096, m->p.n_ctx_train);
    e->n_seq = o->n_seq ? o->n_seq : 1;
    e->window_modes = m->dev->window_modes;
    e->n_batch = u32_min(o->n_batch ? o->n_batch : 512, e->n_ctx);
    uint32_t cells[KV_MAX_GROUPS];
    int status;
    pthread_mutex_init(&e->lock, NULL);
    atomic_store(&e->lock_pid, getpid());
    TRY_GOTO(failed, resolve_format(e, o->cache_type));
    TRY_GOTO(failed, make_groups(e, choose_factors(e)));
    TRY_GOTO(failed, make_cache(e, cells));
    TRY_GOTO(failed, batch_new(&e->batch, e->n_batch, u32_min(e->n_seq, e->n_batch), e->n_groups));
    e->wanted = mem_alloc(e->n_seq, sizeof *e->wanted);
    if (!e->wanted) TRY_GOTO(failed, MF_NOMEM);
    TRY_GOTO(failed, make_backend(e, o, cells));
    backend_stats stats;
    m->dev->get_stats(e->b, &stats);
    e->isa = stats.isa;
    e->n_threads = stats.n_threads;
    *out = e;
    return MF_OK;
failed:
    engine_free(e);
    return status;
}

void engine_free(mf_engine *e) {
    if (!e) return;
    if (e->b) e->m->dev->backend_free(e->b);
    for (uint32_t i = 0; i < e->n_graphs; i++) graph_free(e->graphs[i]);
    batch_free(e->batch);
    kv_cache_free(e->kv);
    mem_free(e->layer_group);
    mem_free(e->wanted);
    pthread_mutex_destroy(&e->lock);
    model_release(e->m);
    e->magic = 0;
    mem_free(e);
}

static uint32_t bucket(uint32_t n, uint32_t max) {
    uint32_t b = n ? 1 : 0;
    while (b < n) b *= 2;
    return u32_min(b, max);
}

static int get_graph(const graph **out, mf_engine *e) {
    graph_params params;
    memset(&params, 0, sizeof params);
    params.max_tokens = bucket(e->batch->n_tokens, e->n_batch);
    params.max_outputs = bucket(e->batch->n_outputs, e->n_batch);
    params.kv_format = e->kv_format;
    for (uint32_t g = 0; g < e->n_groups; g++)
        params.window_modes[g] = e->batch->groups[g].window.mode;
    for (uint32_t i = e->n_graphs; i-- > 0;) {
        graph *const found = e->graphs[i];
        if (memcmp(&found->params, &params, sizeof params) != 0) continue;
        memmove(e->graphs + i, e->graphs + i + 1, (e->n_graphs - 1 - i) * sizeof *e->graphs);
        e->graphs[e->n_graphs - 1] = found;
        e->stats.graph_reuses++;
        *out = found;
        return MF_OK;
    }
    graph *g;
    TRY(builder_build(&g, e->m, e->layer_group, &params));
    const int status = e->m->dev->reserve(e->b, g->buffer_bytes);
    if (status) {
        graph_free(g);
        return status;
    }
    // More params than slots would need odd sizes of everything at once; then the graph that was
    // not used for longest goes, never that of the decode steps between.
    if (e->n_graphs == ENGINE_MAX_GRAPHS) {
        graph_free(e->graphs[0]);
        memmove(e->graphs, e->graphs + 1, (ENGINE_MAX_GRAPHS - 1) * sizeof *e->graphs);
        e->n_graphs--;
    }
    e->graphs[e->n_graphs++] = g;
    e->stats.graph_builds++;
    *out = g;
    return MF_OK;
}

static int run_batch(mf_engine *e, float *logits) {
    const double start = now();
    kv_work work;
    int status = batch_fill_inputs(&work, e->batch, e->kv, e->window_modes);
    engine_kv_work(e, &work);  // of a refused batch too: the cells of other rows count on it
    if (status) return status;
    const double placed = now();
    const graph *g;
    status = get_graph(&g, e);
    if (!status) status = e->m->dev->compute(e->b, g, e->batch, logits, &e->run);
    if (status) {
        batch_undo(e->batch, e->kv);
        return status;
    }
    const bool decode = e->batch->n_tokens == e->batch->n_runs;
    e->stats.kv_seconds += placed - start;
    *(decode ? &e->stats.decode_tokens : &e->stats.prefill_tokens) += e->batch->n_tokens;
    *(decode ? &e->stats.decode_seconds : &e->stats.prefill_seconds) += now() - start;
    return MF_OK;
}

static int check_positions(const mf_engine *e, const mf_chunk *chunks, size_t n_chunks) {
    for (size_t i = 0; i < n_chunks; i++) {
        uint32_t pos;
        TRY(kv_cache_next_pos(&pos, e->kv, chunks[i].seq));
        if (chunks[i].n_tokens > e->pos_end - u32_min(pos, e->pos_end))
            return fail(
                MF_KV_RANGE,
                "sequence %d: %zu rows at position %u would pass %u; load with an n_ctx above "
                "that, or trim or free the sequence",
                chunks[i].seq, chunks[i].n_tokens, pos, e->pos_end);
    }
    return MF_OK;
}

static int check_room(const mf_engine *e, const mf_chunk *chunks, size_t n_chunks) {
    for (size_t i = 0; i < n_chunks; i++)
        e->wanted[i] = (kv_append){.seq = chunks[i].seq, .n = (uint32_t)chunks[i].n_tokens};
    return kv_cache_can_append(e->kv, e->wanted, (uint32_t)n_chunks);
}

static uint32_t wanted_rows(const mf_chunk *c, size_t done, uint32_t n) {
    if (c->logits == MF_LOGITS_ALL) return n;
    return c->logits == MF_LOGITS_LAST && done + n == c->n_tokens;
}

// Of the copy that is computed with: the caller's memory may change under us.
static int check_tokens(const mf_engine *e) {
    for (uint32_t i = 0; i < e->batch->n_tokens; i++)
        if (e->batch->tokens[i] < 0 || (uint32_t)e->batch->tokens[i] >= e->m->p.n_vocab)
            return fail(MF_ARG, "token %d; the vocabulary has 0 to %u", e->batch->tokens[i],
                        e->m->p.n_vocab - 1);
    return MF_OK;
}

// Batches take the chunks in order, so that the wanted rows come out in order too.
static int run_chunks(mf_engine *e, float *logits, const mf_chunk *chunks, size_t n_chunks) {
    size_t chunk = 0, done = 0;  // of chunks[chunk]
    while (chunk < n_chunks) {
        batch_clear(e->batch);
        while (chunk < n_chunks && e->batch->n_tokens < e->n_batch) {
            const mf_chunk *c = &chunks[chunk];
            const size_t left = c->n_tokens - done, space = e->n_batch - e->batch->n_tokens;
            const uint32_t n = (uint32_t)(left < space ? left : space);
            batch_add(e->batch, c->seq, c->tokens + done, n, wanted_rows(c, done, n));
            done += n;
            if (done == c->n_tokens) {
                chunk++;
                done = 0;
            }
        }
        TRY(check_tokens(e));
        TRY(run_batch(e, logits));
        if (logits) logits += (size_t)e->batch->n_outputs * e->m->p.n_vocab;
    }
    return MF_OK;
}

int engine_forward(mf_engine *e, float *logits, const mf_chunk *chunks, size_t n_chunks) {
    if (e->pos_end < KV_POS_MAX) TRY(check_positions(e, chunks, n_chunks));
    TRY(check_room(e, chunks, n_chunks));
    atomic_store(&e->run, RUN_ACTIVE);
    const uint64_t saved = fpenv_enter();
    const int status = run_chunks(e, logits, chunks, n_chunks);
    fpenv_restore(saved);
    atomic_store(&e->run, RUN_IDLE);
    return status;
}

uint64_t engine_bytes_per_token(const mf_engine *e, uint32_t group) {
    const uint32_t width = e->m->p.n_head_kv * e->m->p.head_dim;
    return (uint64_t)e->group_layers[group] * 2 * kv_format_row_bytes(e->kv_format, width);
}

void engine_get_stats(const mf_engine *e, mf_stats *out) {
    backend_stats b;
    e->m->dev->get_stats(e->b, &b);
    *out = e->stats;
    out->weight_bytes = e->m->weight_bytes;
    out->kv_bytes = b.kv_bytes;
    out->compute_bytes = b.compute_bytes;
}
