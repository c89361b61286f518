// Owns what a session file means: the metadata and sections of a container, made of an image of the
// bookkeeping and of the rows in the image's order. Refuses a file that another model, format,
// device or n_ctx wrote, and one whose bookkeeping no cache could have.
//
// Invariant: loading changes nothing before the whole file is verified, and cannot fail after.
#include "kv_session.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "kv_image.h"

enum section_type { KINDS = 1, SEQS, ROWS, KEYS, VALUES, HOST };
enum { FLAG_PACKED = 1, FLAG_F16 = 2, BUFFER_BYTES = 1 << 20 };

typedef struct metadata {
    uint32_t backend, n_layer, n_ctx, n_embd, n_head_kv, head_dim, row_bytes, n_groups;
    uint64_t model[2];
} metadata;

static metadata metadata_of(const kv_session_shape *s) {
    return (metadata){
        .backend = s->backend,
        .n_layer = s->n_layer,
        .n_ctx = s->n_ctx,
        .n_embd = s->n_embd,
        .n_head_kv = s->n_head_kv,
        .head_dim = s->head_dim,
        .row_bytes = (uint32_t)kv_format_row_bytes(s->format, s->n_head_kv * s->head_dim),
        .n_groups = s->config.n_groups,
        .model = {s->model[0], s->model[1]}};
}

static uint32_t flags_of(kv_format format) {
    return format == KV_FORMAT_Q8_0 ? FLAG_PACKED : format == KV_FORMAT_F16 ? FLAG_F16 : 0;
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
    const metadata meta = metadata_of(s->shape);
    kv_image *image;
    TRY(kv_image_make(&image, s->kv, seqs, n_seqs));
    int status;
    container_plan plan = {.flags = flags_of(s->shape->format),
                           .metadata = &meta,
                           .n_metadata = sizeof meta,
                           .progress = s->progress,
                           .arg = s->progress_arg};
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

static int differs(const container *c, const char *field, uint64_t file, uint64_t run) {
    return fail(MF_FORMAT,
                "%s: %s is %llu in the file, %llu here; load the model as it was when "
                "the file was saved",
                container_name(c), field, (unsigned long long)file, (unsigned long long)run);
}

// Before anything but the header was read: does the file describe this run?
static int accept(void *arg, const container *c) {
    const kv_session_shape *const shape = arg;
    const metadata here = metadata_of(shape);
    metadata file;
    memcpy(&file, container_metadata(c), sizeof file);
    const uint32_t flags = container_flags(c);
    if (flags == (FLAG_PACKED | FLAG_F16))
        return fail(MF_FORMAT, "%s: flags say both packed and f16 rows; the file is damaged",
                    container_name(c));
    if (file.backend != here.backend) return differs(c, "the backend", file.backend, here.backend);
    if (file.model[0] != here.model[0] || file.model[1] != here.model[1])
        return fail(MF_FORMAT,
                    "%s: the model's fingerprint is %016llx%016llx in the file, %016llx%016llx "
                    "here; load the model that it was saved with",
                    container_name(c), (unsigned long long)file.model[0],
                    (unsigned long long)file.model[1], (unsigned long long)here.model[0],
                    (unsigned long long)here.model[1]);
    if (flags != flags_of(shape->format))
        return fail(MF_FORMAT, "%s: the KV rows are %s in the file, %s here; load with cache_type",
                    container_name(c),
                    flags & FLAG_PACKED ? "q8_0"
                    : flags             ? "f16"
                                        : "f32",
                    kv_format_name(shape->format));
    if (file.n_ctx != here.n_ctx) return differs(c, "n_ctx", file.n_ctx, here.n_ctx);
    if (file.n_layer != here.n_layer) return differs(c, "n_layer", file.n_layer, here.n_layer);
    if (file.n_embd != here.n_embd) return differs(c, "n_embd", file.n_embd, here.n_embd);
    if (file.n_head_kv != here.n_head_kv)
        return differs(c, "n_head_kv", file.n_head_kv, here.n_head_kv);
    if (file.head_dim != here.head_dim) return differs(c, "head_dim", file.head_dim, here.head_dim);
    if (file.row_bytes != here.row_bytes)
        return differs(c, "the bytes of a row", file.row_bytes, here.row_bytes);
    if (file.n_groups != here.n_groups) return differs(c, "n_groups", file.n_groups, here.n_groups);
    return MF_OK;
}

// Every section there must be, of the size it must have; NULL `image`: those before the rows.
static int find(const container_section **out, const container *c, uint32_t type, uint32_t index) {
    *out = container_find(c, type, index);
    return *out ? MF_OK
                : fail(MF_FORMAT, "%s: section %u of type %u is missing; the file is damaged",
                       container_name(c), index, type);
}

static int check_size(const container *c, const container_section *section, uint64_t n) {
    if (section->n == n) return MF_OK;
    return fail(MF_FORMAT, "%s: section %u of type %u has %llu bytes, %llu are needed",
                container_name(c), section->index, section->type, (unsigned long long)section->n,
                (unsigned long long)n);
}

static int check_kinds(const container *c, const kv_session_shape *shape) {
    const container_section *section;
    TRY(find(&section, c, KINDS, 0));
    TRY(check_size(c, section, (uint64_t)shape->n_layer * KV_KIND_BYTES));
    for (uint32_t i = 0; i < shape->n_layer; i++) {
        char here[KV_KIND_BYTES] = {0};
        strcpy(here, shape->kinds[shape->layer_group[i]]);
        const char *const file = (const char *)section->bytes + (size_t)i * KV_KIND_BYTES;
        if (memcmp(file, here, KV_KIND_BYTES) != 0)
            return fail(MF_FORMAT, "%s: layer %u stores \"%.*s\" in the file, \"%s\" here",
                        container_name(c), i, KV_KIND_BYTES - 1, file, here);
    }
    return MF_OK;
}

static int read_books(kv_image **image, const container *c, const kv_session_shape *shape) {
    kv_bytes bytes[1 + KV_MAX_GROUPS];
    for (uint32_t i = 0; i < 1 + shape->config.n_groups; i++) {
        const container_section *section;
        TRY(find(&section, c, i ? ROWS : SEQS, i ? i - 1 : 0));
        bytes[i] = (kv_bytes){section->bytes, (size_t)section->n};
    }
    const int status = kv_image_decode(image, &shape->config, bytes);
    if (status != MF_FORMAT) return status;
    char line[256];
    snprintf(line, sizeof line, "%s", mf_last_error());
    return fail(status, "%s: %s", container_name(c), line);  // an image knows no file
}

static int check_rows(const container *c, const kv_session_shape *shape, const kv_image *image,
                      size_t row_bytes) {
    const container_section *section;
    for (uint32_t type = KEYS; type <= VALUES; type++) {
        for (uint32_t i = 0; i < shape->n_layer; i++) {
            TRY(find(&section, c, type, i));
            const uint64_t rows = image->groups[shape->layer_group[i]].n_rows;
            TRY(check_size(c, section, rows * row_bytes));
        }
    }
    TRY(find(&section, c, HOST, 0));
    const uint32_t n = 3 + shape->config.n_groups + 2 * shape->n_layer;
    if (container_n_sections(c) == n) return MF_OK;
    return fail(MF_FORMAT, "%s: %u sections, %u are needed", container_name(c),
                container_n_sections(c), n);
}

static void put_rows(const kv_session *s, const container *c, const kv_image *image,
                     size_t row_bytes) {
    for (uint32_t layer = 0; layer < s->shape->n_layer; layer++) {
        const kv_image_group *g = &image->groups[s->shape->layer_group[layer]];
        for (int value = 0; value < 2; value++) {
            const uint8_t *rows = container_find(c, value ? VALUES : KEYS, layer)->bytes;
            for (size_t i = 0; i < g->n_runs; i++)
                s->rows->put(s->rows->arg, layer, value, g->runs[i].cell, g->runs[i].len,
                             rows + g->runs[i].row * row_bytes);
        }
    }
}

static int load_image(const kv_session *s, kv_image *image, const int32_t *into, uint32_t n) {
    if (into) return kv_image_load(s->kv, image, into, n);
    int32_t *const same = mem_alloc(image->n_seqs, sizeof *same);
    if (!same) return MF_NOMEM;
    for (uint32_t i = 0; i < image->n_seqs; i++) same[i] = image->seqs[i].id;
    const int status = kv_image_load(s->kv, image, same, image->n_seqs);
    mem_free(same);
    return status;
}

int kv_session_load(void **host, size_t *n_host, const kv_session *s, const char *path,
                    const int32_t *into, uint32_t n_into) {
    const kv_session_shape *shape = s->shape;
    const size_t row_bytes = metadata_of(shape).row_bytes;
    const container_want want = {.known_flags = FLAG_PACKED | FLAG_F16,
                                 .n_metadata = sizeof(metadata),
                                 .accept = accept,
                                 .progress = s->progress,
                                 .arg = (void *)(uintptr_t)shape,
                                 .progress_arg = s->progress_arg};
    container *c = NULL;
    kv_image *image = NULL;
    void *copy = NULL;
    int status;
    TRY_GOTO(done, container_open(&c, path, &want));
    TRY_GOTO(done, check_kinds(c, shape));
    TRY_GOTO(done, read_books(&image, c, shape));
    TRY_GOTO(done, check_rows(c, shape, image, row_bytes));
    const container_section *const section = container_find(c, HOST, 0);
    copy = mem_alloc((size_t)section->n, 1);
    if (!copy) TRY_GOTO(done, MF_NOMEM);
    if (section->n) memcpy(copy, section->bytes, (size_t)section->n);
    TRY_GOTO(done, load_image(s, image, into, n_into));
    put_rows(s, c, image, row_bytes);
    *host = copy;
    *n_host = (size_t)section->n;
    copy = NULL;
done:
    mem_free(copy);
    kv_image_free(image);
    container_free(c);
    return status;
}
