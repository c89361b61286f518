// Owns the question what a session file means: the metadata and sections of a container, made of an
// image of the bookkeeping and of the rows in the image's order. Refuses a file that another model,
// format, device or n_ctx wrote, and one that no engine could have saved.
//
// Invariant: what the header and the table say is judged before a section is read, so that no file
// costs more time than the rows of n_ctx cells and its host's bytes take.
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "kv_session_file.h"

typedef unsigned long long ull;  // what printf takes

typedef struct opening {
    mf_session *s;
    const kv_session_shape *here;  // or NULL
    session_metadata meta;
} opening;

session_metadata session_metadata_of(const kv_session_shape *s) {
    return (session_metadata){.backend = s->backend,
                              .n_layer = s->n_layer,
                              .n_ctx = s->n_ctx,
                              .n_embd = s->n_embd,
                              .n_head_kv = s->n_head_kv,
                              .head_dim = s->head_dim,
                              .row_bytes = (uint32_t)kv_session_row_bytes(s),
                              .n_groups = s->config.n_groups,
                              .model = {s->model[0], s->model[1]}};
}

size_t kv_session_row_bytes(const kv_session_shape *s) {
    return kv_format_row_bytes(s->format, s->n_head_kv * s->head_dim);
}

uint32_t session_flags(kv_format format) {
    return format == KV_FORMAT_Q8_0 ? FLAG_PACKED : format == KV_FORMAT_F16 ? FLAG_F16 : 0;
}

const char *kv_session_section_name(uint32_t type) {
    static const char *const names[] = {"", "KINDS", "SEQS", "ROWS", "K", "V", "HOST"};
    return names[type];
}

// ---- header and table ------------------------------------------------------------------------

static int differs(const container *c, const char *field, uint64_t file, uint64_t run) {
    return fail(MF_FORMAT,
                "%s: %s is %llu in the file, %llu here; load the model as it was when "
                "the file was saved",
                container_name(c), field, (ull)file, (ull)run);
}

static int compare(const container *c, const session_metadata *file, kv_format format,
                   const kv_session_shape *shape) {
    const session_metadata here = session_metadata_of(shape);
    if (file->backend != here.backend)
        return differs(c, "the backend", file->backend, here.backend);
    if (file->model[0] != here.model[0] || file->model[1] != here.model[1])
        return fail(MF_FORMAT,
                    "%s: the model's fingerprint is %016llx%016llx in the file, %016llx%016llx "
                    "here; load the model that it was saved with",
                    container_name(c), (ull)file->model[0], (ull)file->model[1], (ull)here.model[0],
                    (ull)here.model[1]);
    if (format != shape->format)
        return fail(MF_FORMAT, "%s: the KV rows are %s in the file, %s here; load with cache_type",
                    container_name(c), kv_format_name(format), kv_format_name(shape->format));
    if (file->n_ctx != here.n_ctx) return differs(c, "n_ctx", file->n_ctx, here.n_ctx);
    if (file->n_layer != here.n_layer) return differs(c, "n_layer", file->n_layer, here.n_layer);
    if (file->n_embd != here.n_embd) return differs(c, "n_embd", file->n_embd, here.n_embd);
    if (file->n_head_kv != here.n_head_kv)
        return differs(c, "n_head_kv", file->n_head_kv, here.n_head_kv);
    if (file->head_dim != here.head_dim)
        return differs(c, "head_dim", file->head_dim, here.head_dim);
    if (file->row_bytes != here.row_bytes)
        return differs(c, "the bytes of a row", file->row_bytes, here.row_bytes);
    if (file->n_groups != here.n_groups)
        return differs(c, "n_groups", file->n_groups, here.n_groups);
    return MF_OK;
}

// What must agree with itself, where there is nothing to compare with.
static int check_metadata(const container *c, const session_metadata *m, kv_format format) {
    const uint64_t width = (uint64_t)m->n_head_kv * m->head_dim;
    if (!m->n_embd || !width || width > UINT32_MAX / 4)
        return fail(MF_FORMAT,
                    "%s: n_embd is %u in the file, with %u KV heads of %u: no such model",
                    container_name(c), m->n_embd, m->n_head_kv, m->head_dim);
    if (format == KV_FORMAT_Q8_0 && m->head_dim % KV_PACKED_BLOCK != 0)
        return fail(MF_FORMAT,
                    "%s: head_dim is %u in the file, with rows of q8_0; it packs blocks "
                    "of %d",
                    container_name(c), m->head_dim, KV_PACKED_BLOCK);
    const uint64_t bytes = kv_format_row_bytes(format, (uint32_t)width);
    if (m->row_bytes != bytes)
        return fail(MF_FORMAT,
                    "%s: the bytes of a row are %u in the file; %u heads of %u in %s take %llu",
                    container_name(c), m->row_bytes, m->n_head_kv, m->head_dim,
                    kv_format_name(format), (ull)bytes);
    if (!m->n_ctx || m->n_ctx > KV_POS_MAX)
        return fail(MF_FORMAT, "%s: n_ctx is %u in the file; 1 to %d are possible",
                    container_name(c), m->n_ctx, KV_POS_MAX);
    if (!m->n_layer || m->n_layer > CONTAINER_MAX_SECTIONS)
        return fail(MF_FORMAT, "%s: n_layer is %u in the file; 1 to %d are possible",
                    container_name(c), m->n_layer, CONTAINER_MAX_SECTIONS);
    if (!m->n_groups || m->n_groups > KV_MAX_GROUPS)
        return fail(MF_FORMAT, "%s: n_groups is %u in the file; 1 to %d are possible",
                    container_name(c), m->n_groups, KV_MAX_GROUPS);
    return MF_OK;
}

static int check_size(const container *c, uint32_t type, uint32_t index, uint64_t least,
                      uint64_t most) {
    const container_section *const s = container_find(c, type, index);
    if (!s)
        return fail(MF_FORMAT, "%s: section %u.%u (%s) is missing; the file is damaged",
                    container_name(c), type, index, kv_session_section_name(type));
    if (least <= s->n && s->n <= most) return MF_OK;
    return fail(MF_FORMAT, "%s: section %u.%u (%s) has %llu bytes, %s%llu are needed",
                container_name(c), type, index, kv_session_section_name(type), (ull)s->n,
                least < most ? "at most " : "", (ull)most);
}

// Every section there must be, and no other, none larger than it can be in a cache of n_ctx cells.
static int check_table(const container *c, const session_metadata *m) {
    // A sequence's positions are in as many runs as a read can carry, and each row may be a span.
    const uint64_t seqs = 8 + (uint64_t)KV_MAX_SEQS * (16 + 8 * KV_MAP_MAX_SPANS);
    const uint64_t spans = 8 + (uint64_t)KV_MAX_SEQS * (8 + 8 * (uint64_t)m->n_ctx);
    const uint64_t kinds = (uint64_t)m->n_layer * KV_KIND_BYTES;
    const uint64_t cells = (uint64_t)m->n_ctx * m->row_bytes;
    TRY(check_size(c, KINDS, 0, kinds, kinds));
    TRY(check_size(c, SEQS, 0, 0, seqs));
    for (uint32_t g = 0; g < m->n_groups; g++) TRY(check_size(c, ROWS, g, 0, spans));
    for (uint32_t type = KEYS; type <= VALUES; type++)
        for (uint32_t i = 0; i < m->n_layer; i++) TRY(check_size(c, type, i, 0, cells));
    TRY(check_size(c, HOST, 0, 0, KV_SESSION_MAX_HOST));
    const uint32_t n_sections = 3 + m->n_groups + 2 * m->n_layer;
    if (container_n_sections(c) == n_sections) return MF_OK;
    return fail(MF_FORMAT, "%s: %u sections, %u are needed", container_name(c),
                container_n_sections(c), n_sections);
}

// Before any section was read.
static int accept(void *arg, const container *c) {
    opening *const o = arg;
    const uint32_t flags = container_flags(c);
    if (flags == (FLAG_PACKED | FLAG_F16))
        return fail(MF_FORMAT, "%s: flags say both packed and f16 rows; the file is damaged",
                    container_name(c));
    const kv_format format = flags & FLAG_PACKED ? KV_FORMAT_Q8_0
                             : flags             ? KV_FORMAT_F16
                                                 : KV_FORMAT_F32;
    memcpy(&o->meta, container_metadata(c), sizeof o->meta);
    TRY(o->here ? compare(c, &o->meta, format, o->here) : check_metadata(c, &o->meta, format));
    TRY(check_table(c, &o->meta));
    o->s->shape = (kv_session_shape){.backend = o->meta.backend,
                                     .n_layer = o->meta.n_layer,
                                     .n_ctx = o->meta.n_ctx,
                                     .n_embd = o->meta.n_embd,
                                     .n_head_kv = o->meta.n_head_kv,
                                     .head_dim = o->meta.head_dim,
                                     .format = format,
                                     .model = {o->meta.model[0], o->meta.model[1]}};
    return MF_OK;
}

// ---- kinds -----------------------------------------------------------------------------------

static const char *kind_of(const mf_session *s, uint32_t layer) {
    return (const char *)container_find(s->c, KINDS, 0)->bytes + (size_t)layer * KV_KIND_BYTES;
}

static int compare_kinds(const mf_session *s, const kv_session_shape *here) {
    for (uint32_t i = 0; i < here->n_layer; i++) {
        char kind[KV_KIND_BYTES] = {0};
        strcpy(kind, here->kinds[here->layer_group[i]]);
        if (memcmp(kind_of(s, i), kind, KV_KIND_BYTES) != 0)
            return fail(MF_FORMAT, "%s: layer %u stores \"%.*s\" in the file, \"%s\" here",
                        container_name(s->c), i, KV_KIND_BYTES - 1, kind_of(s, i), kind);
    }
    return MF_OK;
}

// A window, what the metadata says of rows, and perhaps more after a slash.
static bool is_kind(uint32_t *window, const char *kind, const kv_session_shape *shape) {
    static const char sliding[] = "sliding-";
    const size_t n = strnlen(kind, KV_KIND_BYTES);
    for (size_t i = 0; i < n; i++)
        if (kind[i] <= ' ' || kind[i] > '~') return false;
    for (size_t i = n; i < KV_KIND_BYTES; i++)
        if (kind[i]) return false;
    if (n == KV_KIND_BYTES) return false;
    *window = strncmp(kind, sliding, strlen(sliding)) != 0
                  ? 0
                  : (uint32_t)strtoull(kind + strlen(sliding), NULL, 10);
    char start[KV_KIND_BYTES];
    kv_kind_format(start, *window, shape->format, false, shape->n_head_kv, shape->head_dim, NULL);
    const size_t n_start = strlen(start);
    if (*window > KV_POS_MAX || strncmp(kind, start, n_start) != 0) return false;
    return !kind[n_start] || (kind[n_start] == '/' && kind[n_start + 1]);
}

// Layers of one kind are a group; groups are in the order of their first layers.
static int read_kinds(mf_session *s, uint32_t n_groups) {
    kv_session_shape *const shape = &s->shape;
    kv_config *const config = &shape->config;
    s->layer_group = mem_alloc(shape->n_layer, sizeof *s->layer_group);
    s->kinds = mem_alloc(n_groups, sizeof *s->kinds);
    if (!s->layer_group || !s->kinds) return MF_NOMEM;
    for (uint32_t i = 0; i < shape->n_layer; i++) {
        const char *const kind = kind_of(s, i);
        uint32_t g = 0, window;
        while (g < config->n_groups && memcmp(s->kinds[g], kind, KV_KIND_BYTES) != 0) g++;
        s->layer_group[i] = g;
        if (g < config->n_groups) continue;
        if (!is_kind(&window, kind, shape))
            return fail(MF_FORMAT,
                        "%s: layer %u stores \"%.*s\", which is no kind of the rows that the "
                        "metadata tells of",
                        container_name(s->c), i, KV_KIND_BYTES - 1, kind);
        if (g == n_groups)
            return fail(MF_FORMAT, "%s: n_groups is %u in the file; its layers are of more kinds",
                        container_name(s->c), n_groups);
        memcpy(s->kinds[g], kind, KV_KIND_BYTES);
        config->groups[config->n_groups++] = (kv_group_spec){
            .kind = window ? KV_SLIDING : KV_FULL, .window = window, .n_cells = shape->n_ctx};
    }
    shape->layer_group = s->layer_group;
    shape->kinds = (const char(*)[KV_KIND_BYTES])s->kinds;
    if (config->n_groups == n_groups) return MF_OK;
    return fail(MF_FORMAT, "%s: n_groups is %u in the file; its layers are of %u kinds",
                container_name(s->c), n_groups, config->n_groups);
}

// ---- bookkeeping -----------------------------------------------------------------------------

// Of an engine that could have saved the file: as many as it has, as far as that is possible.
static uint32_t count_seqs(kv_bytes seqs) {
    uint32_t n = 0;
    if (seqs.n >= sizeof n) memcpy(&n, seqs.at, sizeof n);
    return u32_min(u32_max(n, 1), KV_MAX_SEQS);
}

static int check_ids(const mf_session *s) {
    for (uint32_t i = 0; i < s->image->n_seqs; i++)
        if ((uint32_t)s->image->seqs[i].id >= KV_MAX_SEQS)
            return fail(MF_FORMAT, "%s: SEQS: sequence %u has id %d; no engine has more than %d",
                        container_name(s->c), i, s->image->seqs[i].id, KV_MAX_SEQS);
    return MF_OK;
}

static int read_books(mf_session *s, const kv_session_shape *here) {
    kv_config *const config = &s->shape.config;
    kv_bytes bytes[1 + KV_MAX_GROUPS];
    for (uint32_t i = 0; i < 1 + config->n_groups; i++) {
        const container_section *const section =
            container_find(s->c, i ? ROWS : SEQS, i ? i - 1 : 0);
        bytes[i] = (kv_bytes){section->bytes, (size_t)section->n};
    }
    config->n_seq = here ? here->config.n_seq : count_seqs(bytes[0]);
    const int status = kv_image_decode(&s->image, config, bytes);
    if (status != MF_FORMAT) return status;
    char line[256];
    snprintf(line, sizeof line, "%s", mf_last_error());
    return fail(status, "%s: %s", container_name(s->c), line);  // an image knows no file
}

static int check_rows(const mf_session *s) {
    const size_t row_bytes = kv_session_row_bytes(&s->shape);
    for (uint32_t type = KEYS; type <= VALUES; type++) {
        for (uint32_t i = 0; i < s->shape.n_layer; i++) {
            const uint64_t rows = s->image->groups[s->layer_group[i]].n_rows;
            TRY(check_size(s->c, type, i, rows * row_bytes, rows * row_bytes));
        }
    }
    return MF_OK;
}

// ---- the whole file --------------------------------------------------------------------------

static int open_file(opening *o, const char *path, const kv_session_work *work) {
    const container_want want = {.known_flags = FLAG_PACKED | FLAG_F16,
                                 .n_metadata = sizeof o->meta,
                                 .accept = accept,
                                 .arg = o,
                                 .progress = work->progress,
                                 .progress_arg = work->progress_arg,
                                 .threads = work->threads};
    mf_session *const s = o->s;
    TRY(container_open(&s->c, path, &want));
    if (o->here) TRY(compare_kinds(s, o->here));
    TRY(read_kinds(s, o->meta.n_groups));
    TRY(read_books(s, o->here));
    if (!o->here) TRY(check_ids(s));
    return check_rows(s);
}

int kv_session_open(mf_session **out, const char *path, const kv_session_shape *here,
                    const kv_session_work *work) {
    mf_session *const s = mem_alloc(1, sizeof *s);
    if (!s) return MF_NOMEM;
    opening o = {.s = s, .here = here};
    const int status = open_file(&o, path, work);
    if (status)
        kv_session_close(s);
    else
        *out = s;
    return status;
}

void kv_session_close(mf_session *s) {
    if (!s) return;
    kv_image_free(s->image);
    container_free(s->c);
    mem_free(s->layer_group);
    mem_free(s->kinds);
    mem_free(s);
}

const uint8_t *kv_session_layer(const mf_session *s, uint32_t layer, bool value) {
    return container_find(s->c, value ? VALUES : KEYS, layer)->bytes;
}

const container_section *kv_session_host(const mf_session *s) {
    return container_find(s->c, HOST, 0);
}
