// Owns the ways of sequences into a session file and out of it. What a file must be is judged in
// kv_session_open.c.
//
// Invariant: loading changes nothing before the whole file is verified, and cannot fail after.
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "kv_session_file.h"
#include "os_posix.h"

enum { BUFFER_BYTES = 1 << 18 };  // rows on their way: they stay in the second-level cache

void kv_session_report(void *arg, uint64_t done, uint64_t total) {
    uint64_t *const numbers = arg;
    __atomic_store_n(&numbers[1], total, __ATOMIC_RELAXED);
    __atomic_store_n(&numbers[0], done, __ATOMIC_RELAXED);
}

// ---- saving ----------------------------------------------------------------------------------

typedef struct saving {
    const kv_session *s;
    const kv_image *image;
    container_writer *w;
    uint8_t *buffer;  // [buffer_bytes]
    size_t buffer_bytes, row_bytes;
} saving;

static int save_kinds(const saving *v) {
    const kv_session_shape *shape = v->s->shape;
    for (uint32_t i = 0; i < shape->n_layer; i++) {
        char kind[KV_KIND_BYTES] = {0};  // what is behind the text must be zero in the file
        strcpy(kind, shape->kinds[shape->layer_group[i]]);
        TRY(container_append(v->w, KINDS, 0, kind, sizeof kind));
    }
    return MF_OK;
}

static int save_books(const saving *v) {
    const uint32_t n = 1 + v->image->n_groups;
    for (uint32_t i = 0; i < n; i++) {
        const size_t bytes = kv_image_size(v->image, i);
        uint8_t *const to = mem_alloc(bytes, 1);
        if (!to) return MF_NOMEM;
        kv_image_encode(to, v->image, i);
        const int status = container_append(v->w, i ? ROWS : SEQS, i ? i - 1 : 0, to, bytes);
        mem_free(to);
        TRY(status);
    }
    return MF_OK;
}

static int save_rows(const saving *v, uint32_t layer, bool value) {
    const kv_session *s = v->s;
    const kv_image_group *g = &v->image->groups[s->shape->layer_group[layer]];
    const uint32_t most = (uint32_t)(v->buffer_bytes / v->row_bytes);
    for (size_t i = 0; i < g->n_runs; i++) {
        for (uint32_t done = 0, n; done < g->runs[i].len; done += n) {
            n = u32_min(g->runs[i].len - done, most);
            s->rows->get(s->rows->arg, layer, value, g->runs[i].cell + done, n, v->buffer);
            TRY(container_append(v->w, value ? VALUES : KEYS, layer, v->buffer, n * v->row_bytes));
        }
    }
    return MF_OK;
}

static int save_all(const saving *v, const void *host, size_t n_host) {
    TRY(save_kinds(v));
    TRY(save_books(v));
    for (int value = 0; value < 2; value++)
        for (uint32_t i = 0; i < v->s->shape->n_layer; i++) TRY(save_rows(v, i, value));
    if (n_host) TRY(container_append(v->w, HOST, 0, host, n_host));
    return container_commit(v->w);
}

// The sections of an image, in their order in the file; NULL after MF_NOMEM.
static container_section *plan_sections(uint32_t *n, const kv_session_shape *shape,
                                        const kv_image *image, size_t row_bytes, size_t n_host) {
    container_section *const list =
        mem_alloc(3 + (size_t)image->n_groups + 2 * (size_t)shape->n_layer, sizeof *list);
    if (!list) return NULL;
    uint32_t k = 0;
    list[k++] = (container_section){.type = KINDS, .n = (uint64_t)shape->n_layer * KV_KIND_BYTES};
    list[k++] = (container_section){.type = SEQS, .n = kv_image_size(image, 0)};
    for (uint32_t g = 0; g < image->n_groups; g++)
        list[k++] = (container_section){.type = ROWS, .index = g, .n = kv_image_size(image, 1 + g)};
    for (uint32_t type = KEYS; type <= VALUES; type++) {
        for (uint32_t i = 0; i < shape->n_layer; i++) {
            const uint64_t rows = image->groups[shape->layer_group[i]].n_rows;
            list[k++] = (container_section){.type = type, .index = i, .n = rows * row_bytes};
        }
    }
    list[k++] = (container_section){.type = HOST, .n = n_host};
    *n = k;
    return list;
}

int kv_session_save(const kv_session *s, const char *path, const int32_t *seqs, uint32_t n_seqs,
                    const void *host, size_t n_host) {
    if (n_host > KV_SESSION_MAX_HOST)
        return fail(MF_LIMIT, "%s: %zu bytes of host state; at most %d can be saved",
                    os_path_tail(path), n_host, KV_SESSION_MAX_HOST);
    const session_metadata meta = session_metadata_of(s->shape);
    kv_image *image;
    TRY(kv_image_make(&image, s->kv, seqs, n_seqs));
    int status;
    container_plan plan = {.flags = session_flags(s->shape->format),
                           .metadata = &meta,
                           .n_metadata = sizeof meta,
                           .progress = s->work.progress,
                           .arg = s->work.progress_arg};
    saving v = {.s = s, .image = image, .row_bytes = meta.row_bytes};
    v.buffer_bytes = meta.row_bytes > BUFFER_BYTES ? meta.row_bytes : BUFFER_BYTES;
    v.buffer = mem_alloc(v.buffer_bytes, 1);
    container_section *const sections =
        plan_sections(&plan.n_sections, s->shape, image, meta.row_bytes, n_host);
    if (!v.buffer || !sections) TRY_GOTO(done, MF_NOMEM);
    plan.sections = sections;
    TRY_GOTO(done, container_create(&v.w, path, &plan));
    status = save_all(&v, host, n_host);
done:
    container_writer_free(v.w);
    mem_free(sections);
    mem_free(v.buffer);
    kv_image_free(image);
    return status;
}

// ---- loading ---------------------------------------------------------------------------------

typedef struct putting {
    const kv_session *to;
    const mf_session *from;
} putting;

// Task: K or V of a layer.
static void put_layer(void *arg, uint32_t task, uint32_t thread) {
    (void)thread;
    const putting *const p = arg;
    const uint32_t layer = task / 2;
    const bool value = task % 2;
    const kv_session_rows *const rows = p->to->rows;
    const kv_image_group *const g = &p->from->image->groups[p->from->layer_group[layer]];
    const uint8_t *const bytes = kv_session_layer(p->from, layer, value);
    const size_t row_bytes = kv_session_row_bytes(p->to->shape);
    for (size_t i = 0; i < g->n_runs; i++)
        rows->put(rows->arg, layer, value, g->runs[i].cell, g->runs[i].len,
                  bytes + g->runs[i].row * row_bytes);
}

static void put_rows(const kv_session *to, const mf_session *from) {
    putting p = {to, from};
    const uint32_t n = 2 * to->shape->n_layer;
    if (to->work.threads)
        pool_run(to->work.threads, put_layer, &p, n);
    else
        for (uint32_t i = 0; i < n; i++) put_layer(&p, i, 0);
}

// Each sequence to where it was.
static int load_same(const kv_session *s, const mf_session *file) {
    kv_image *const image = file->image;
    int32_t *const same = mem_alloc(image->n_seqs, sizeof *same);
    if (!same) return MF_NOMEM;
    int status = MF_OK;
    for (uint32_t i = 0; i < image->n_seqs && !status; i++) {
        same[i] = image->seqs[i].id;
        if ((uint32_t)same[i] >= s->shape->config.n_seq)
            status = fail(MF_ARG, "%s: holds sequence %d, this engine has %u; say where it goes",
                          container_name(file->c), same[i], s->shape->config.n_seq);
    }
    if (!status) status = kv_image_load(s->kv, image, same, image->n_seqs);
    mem_free(same);
    return status;
}

int kv_session_load(void **host, size_t *n_host, const kv_session *s, const char *path,
                    const int32_t *into, uint32_t n_into) {
    mf_session *file = NULL;
    void *copy = NULL;
    int status;
    TRY_GOTO(done, kv_session_open(&file, path, s->shape, &s->work));
    const container_section *const section = kv_session_host(file);
    copy = mem_alloc((size_t)section->n, 1);
    if (!copy) TRY_GOTO(done, MF_NOMEM);
    if (section->n) memcpy(copy, section->bytes, (size_t)section->n);
    TRY_GOTO(done, into ? kv_image_load(s->kv, file->image, into, n_into) : load_same(s, file));
    put_rows(s, file);
    *host = copy;
    *n_host = (size_t)section->n;
    copy = NULL;
done:
    mem_free(copy);
    kv_session_close(file);
    return status;
}
