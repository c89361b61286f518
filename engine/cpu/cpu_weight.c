// Owns the CPU's form of weights, in memory that all of a model's share: a matrix is seldom whole
// huge pages. A matrix is packed once, by all threads, and the file's bytes are not needed after.
#include "cpu_weight.h"

#include <math.h>
#include <string.h>

#include "../alloc.h"
#include "../error.h"
#include "../os_posix.h"

enum { PACK_BYTES = 1 << 20 };  // of a task: small enough to balance, large enough to stream

struct weight_store {
    mem_arena memory;
};

int cpu_weights_new(weight_store **out) {
    *out = mem_alloc(1, sizeof **out);
    return *out ? MF_OK : MF_NOMEM;
}

void cpu_weights_free(weight_store *s) {
    if (!s) return;
    mem_arena_free(&s->memory);
    mem_free(s);
}

typedef struct packing {
    panels *p;
    const void *rows;
    uint32_t panels_per_task;
    uint64_t row_bytes;
    bool is_mapped;  // rows are, and leave memory as they are packed: never is a matrix there twice
    uint64_t *n_done;
} packing;

static void pack_task(void *arg, uint32_t task, uint32_t thread) {
    (void)thread;
    const packing *job = arg;
    const uint32_t p0 = task * job->panels_per_task;
    const uint32_t p1 = u32_min(p0 + job->panels_per_task, job->p->n_panels);
    panels_pack(job->p, job->rows, p0, p1);
    const size_t row0 = (size_t)p0 * PANEL_ROWS;
    const size_t n_rows = u32_min(p1 * PANEL_ROWS, job->p->n_rows) - row0;
    if (job->is_mapped)
        os_map_forget((const uint8_t *)job->rows + row0 * job->row_bytes, n_rows * job->row_bytes);
    if (job->n_done) __atomic_fetch_add(job->n_done, n_rows * job->row_bytes, __ATOMIC_RELAXED);
}

int cpu_matrix_load(weight **out, weight_store *in, const gguf_tensor *t, pool *threads,
                    uint64_t *n_done) {
    panels p;
    if (t->dims[0] > UINT32_MAX || t->dims[1] > UINT32_MAX)
        return fail(MF_LIMIT, "tensor %.*s is larger than 2^32 in a dimension", (int)t->name_len,
                    t->name);
    TRY(panels_layout(&p, t->type, (uint32_t)t->dims[1], (uint32_t)t->dims[0]));
    cpu_weight *const w = mem_arena_alloc(&in->memory, sizeof *w);
    p.data = mem_arena_alloc(&in->memory, p.bytes);
    if (!w || !p.data) return MF_NOMEM;
    w->base = (weight){.type = t->type, .n_rows = p.n_rows, .n_cols = p.n_cols, .bytes = p.bytes};
    w->p = p;
    const uint32_t per_task = u32_max(1, (uint32_t)(PACK_BYTES / p.panel_bytes));
    packing job = {.p = &w->p,
                   .rows = t->data,
                   .panels_per_task = per_task,
                   .row_bytes = t->bytes / t->dims[1],
                   .is_mapped = t->is_mapped,
                   .n_done = n_done};
    pool_run(threads, pack_task, &job, (p.n_panels + per_task - 1) / per_task);
    *out = &w->base;
    return MF_OK;
}

// Vectors are norm weights and biases; a panel of one row gives their exact values whatever the
// type.
int cpu_vector_load(weight **out, weight_store *in, const gguf_tensor *t) {
    if (t->dims[0] > UINT32_MAX)
        return fail(MF_LIMIT, "tensor %.*s has more than 2^32 elements", (int)t->name_len, t->name);
    panels p;
    TRY(panels_layout(&p, t->type, 1, (uint32_t)t->dims[0]));
    cpu_weight *const w = mem_arena_alloc(&in->memory, sizeof *w);
    float *const vec = mem_arena_alloc(&in->memory, p.n_cols * sizeof *vec);
    p.data = mem_pages(p.bytes);
    if (!w || !vec || !p.data) {
        mem_pages_free(p.data, p.bytes);
        return MF_NOMEM;
    }
    panels_pack(&p, t->data, 0, 1);
    panels_row(vec, &p, 0);
    mem_pages_free(p.data, p.bytes);
    w->base = (weight){
        .type = DTYPE_F32, .n_rows = 1, .n_cols = p.n_cols, .bytes = p.n_cols * sizeof *vec};
    w->vec = vec;
    *out = &w->base;
    return MF_OK;
}
