// Owns the memory of KV rows and what is done to whole rows: store, move, turn. Refuses regions
// that do not fit in memory; which cells are whose was decided above.
//
// All regions lie in one mapping, so that they share huge pages: between two tokens the weights
// push the rows out of all caches, and those of addresses too, and to find a row in small pages
// again took ten times as long as reading it.
//
// Rows that are not f32 are turned as floats and stored again by the rule that stored them; the
// floats between never stay, so that a row is always what its bytes say.
//
// Invariant: a row is made by one thread from its own bytes and from the call's arguments, so no
// division of the work changes a bit. Moves of one region are made in their order by one thread.
#include "kv_region.h"

#include <string.h>

#include "../alloc.h"
#include "../error.h"
#include "../mathd.h"

enum {
    ALIGN = 64,
    INLINE_BYTES = 1 << 18,  // work on fewer is done before a sleeping thread has woken
    TASKS_PER_THREAD = 4     // what a thread that falls behind leaves to the others
};

static int too_large(uint32_t n_cells) {
    return fail(MF_LIMIT, "KV regions of %u cells do not fit in memory; use a smaller n_ctx",
                n_cells);
}

static int measure(kv_regions *r) {
    const backend_config *const c = r->c;
    for (uint32_t i = 0; i < c->n_layer; i++) {
        const uint32_t g = c->layer_group[i];
        uint64_t rows, region;
        if (!u64_mul(&rows, (uint64_t)c->group_cells[g] + 1, r->row_bytes) ||
            !u64_align(&region, rows, ALIGN) || region > (PTRDIFF_MAX - r->memory_bytes) / 2)
            return too_large(c->group_cells[g]);
        r->region_bytes[g] = (size_t)region;
        r->memory_bytes += 2 * (size_t)region;
        r->bytes += 2 * (size_t)rows;
    }
    return MF_OK;
}

int kv_regions_new(kv_regions *r, const backend_config *c, const cpu_kernels *kernels,
                   uint32_t n_threads) {
    const uint32_t width = c->n_head_kv * c->head_dim;
    *r = (kv_regions){.c = c, .kernels = kernels};
    r->row_bytes = kv_format_row_bytes(c->kv_format, width);
    TRY(measure(r));
    r->k = mem_alloc(c->n_layer, sizeof *r->k);
    r->v = mem_alloc(c->n_layer, sizeof *r->v);
    r->rope_by = mem_alloc((size_t)ROPE_KINDS * c->n_rot, sizeof *r->rope_by);
    r->turning = mem_alloc((size_t)n_threads * width, sizeof *r->turning);
    r->memory = mem_pages(r->memory_bytes);
    if (!r->k || !r->v || !r->rope_by || !r->turning || !r->memory) return MF_NOMEM;
    uint8_t *at = r->memory;
    for (uint32_t i = 0; i < c->n_layer; i++) {
        const size_t bytes = r->region_bytes[c->layer_group[i]];
        r->k[i] = at;
        r->v[i] = at + bytes;
        at += 2 * bytes;
        r->used[c->layer_rope[i]] = true;
    }
    return MF_OK;
}

void kv_regions_free(kv_regions *r) {
    mem_pages_free(r->memory, r->memory_bytes);
    mem_free(r->k);
    mem_free(r->v);
    mem_free(r->rope_by);
    mem_free(r->turning);
    *r = (kv_regions){0};
}

void kv_regions_store(const kv_regions *r, uint32_t layer, uint32_t cell, const float *k,
                      const float *v) {
    kv_store_fn *const store = r->kernels->kv_store[r->c->kv_format];
    const uint32_t width = r->c->n_head_kv * r->c->head_dim;
    store(kv_region_row(r, r->k[layer], cell), k, width);
    store(kv_region_row(r, r->v[layer], cell), v, width);
}

// ---- moves -----------------------------------------------------------------------------------

typedef struct copy_job {
    const kv_regions *r;
    const mf_kv_move *moves;
    uint32_t n;
} copy_job;

// One region: K of a layer for even tasks, V for odd ones.
static void copy_task(void *arg, uint32_t task, uint32_t thread) {
    (void)thread;
    const copy_job *job = arg;
    const kv_regions *r = job->r;
    uint8_t *const region = (task % 2 ? r->v : r->k)[task / 2];
    const uint32_t group = r->c->layer_group[task / 2];
    for (uint32_t i = 0; i < job->n; i++) {
        const mf_kv_move *m = &job->moves[i];
        if ((uint32_t)m->group != group) continue;
        memmove(kv_region_row(r, region, (uint32_t)m->dst),
                kv_region_row(r, region, (uint32_t)m->src), (uint32_t)m->n * r->row_bytes);
    }
}

void kv_regions_copy(const kv_regions *r, pool *p, const mf_kv_move *moves, uint32_t n) {
    copy_job job = {r, moves, n};
    uint64_t rows[KV_MAX_GROUPS] = {0}, all = 0;
    for (uint32_t i = 0; i < n; i++) rows[moves[i].group] += (uint32_t)moves[i].n;
    for (uint32_t i = 0; i < r->c->n_layer; i++) all += 2 * rows[r->c->layer_group[i]];
    const uint32_t tasks = 2 * r->c->n_layer;
    if (all * r->row_bytes >= INLINE_BYTES) {
        pool_run(p, copy_task, &job, tasks);
        return;
    }
    for (uint32_t i = 0; i < tasks; i++) copy_task(&job, i, 0);
}

// ---- rotation --------------------------------------------------------------------------------

typedef struct rope_job {
    const kv_regions *r;
    const kv_cell_run *runs;
    uint32_t n;
    uint32_t pieces;               // tasks of each layer
    uint64_t rows[KV_MAX_GROUPS];  // in the runs of each group
} rope_job;

// The factor that a kind puts on cos and sin is in the stored rows already: only the angle is new.
static void rope_angles(const kv_regions *r, uint32_t kind, int32_t delta) {
    const uint32_t half = r->c->n_rot / 2;
    const double *freq = r->c->rope[kind].freq;
    float *const cosines = r->rope_by + (size_t)kind * r->c->n_rot, *const sines = cosines + half;
    for (uint32_t i = 0; i < half; i++) {
        double sine, cosine;
        math_sincos(&sine, &cosine, delta * freq[i]);
        cosines[i] = (float)cosine;
        sines[i] = (float)sine;
    }
}

static void rope_row(const kv_regions *r, void *row, const float *by, float *floats) {
    const backend_config *c = r->c;
    const uint32_t width = c->n_head_kv * c->head_dim;
    float *x = c->kv_format == KV_FORMAT_F32 ? row : floats;
    if (x != row) r->kernels->kv_load[c->kv_format](x, row, width);
    r->kernels->rope(x, by, by + c->n_rot / 2, c->n_head_kv, c->head_dim, c->n_rot,
                     c->rope_interleaved);
    if (x != row) r->kernels->kv_store[c->kv_format](row, x, width);
}

// A share of the rows in one layer, counted through the group's runs in their order.
static void rope_task(void *arg, uint32_t task, uint32_t thread) {
    const rope_job *job = arg;
    const kv_regions *r = job->r;
    const backend_config *c = r->c;
    const uint32_t layer = task / job->pieces, piece = task % job->pieces,
                   group = c->layer_group[layer];
    const float *by = r->rope_by + (size_t)c->layer_rope[layer] * c->n_rot;
    const uint64_t from = job->rows[group] * piece / job->pieces,
                   to = job->rows[group] * (piece + 1) / job->pieces;
    float *const floats = r->turning + (size_t)thread * c->n_head_kv * c->head_dim;
    uint64_t before = 0;  // rows of the runs passed
    for (uint32_t i = 0; i < job->n && before < to; i++) {
        const kv_cell_run *run = &job->runs[i];
        if (run->group != group) continue;
        const uint64_t first = from > before ? from - before : 0,
                       last = to - before < run->len ? to - before : run->len;
        for (uint64_t row = first; row < last; row++)
            rope_row(r, kv_region_row(r, r->k[layer], run->cell + row), by, floats);
        before += run->len;
    }
}

void kv_regions_rope(const kv_regions *r, pool *p, const kv_cell_run *runs, uint32_t n,
                     int32_t delta) {
    if (delta == 0) return;  // even a turn by nothing would make one NaN of all NaNs
    rope_job job = {.r = r, .runs = runs, .n = n, .pieces = 1};
    uint64_t all = 0;
    for (uint32_t i = 0; i < n; i++) job.rows[runs[i].group] += runs[i].len;
    for (uint32_t i = 0; i < r->c->n_layer; i++) all += job.rows[r->c->layer_group[i]];
    if (all == 0) return;
    for (uint32_t kind = 0; kind < ROPE_KINDS; kind++)
        if (r->used[kind]) rope_angles(r, kind, delta);
    if (all * r->row_bytes < INLINE_BYTES) {
        for (uint32_t i = 0; i < r->c->n_layer; i++) rope_task(&job, i, 0);
        return;
    }
    job.pieces = pool_threads(p) * TASKS_PER_THREAD;
    pool_run(p, rope_task, &job, job.pieces * r->c->n_layer);
}
