// Owns the container's layout and both directions. Plan and table go through the same arithmetic
// (place_section), so only what the writer would have written is accepted: no section has a choice
// of where to lie, no byte is left out. Refuses everything else before the caller sees a byte of a
// section. Invariant: nothing is allocated by a number of the file that its size does not bear out.
//
// Writers replace files and never change one, so a mapped file stands still. Whoever overwrites it
// in place while it is read changes the bytes of sections under the reader, never the table, which
// is copied before it is verified.
#include "container.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "hash.h"
#include "os_file.h"
#include "os_posix.h"

enum {
    MAGIC_BYTES = 8,
    CHECKSUM_BYTES = 8,
    BUFFER_BYTES = 1 << 18,    // hashed and written at a time: stays in the second-level cache
    PROGRESS_BYTES = 1 << 22,  // between two reports
    NAME_BYTES = 192           // more than os_path_tail gives
};

// A byte above 127, both line ends and an end-of-file mark: what mangles text mangles this first.
static const uint8_t magic[MAGIC_BYTES] = {0x89, 'M', 'F', 'K', '\r', '\n', 0x1a, '\n'};
static const uint8_t zeros[CONTAINER_ALIGN];

typedef struct header {
    uint8_t magic[MAGIC_BYTES];
    uint32_t version, flags;
    uint64_t n_file;    // bytes of the file
    uint64_t n_header;  // bytes of this, the metadata, the table and the checksum behind it
    uint32_t n_metadata, n_sections;
} header;

typedef struct entry {
    uint32_t type, index;
    uint64_t offset, n, checksum;
} entry;

_Static_assert(sizeof(header) == 40 && sizeof(entry) == 32, "the file's layout, without padding");

typedef unsigned long long ull;  // what printf takes

static uint64_t header_bytes(uint32_t n_metadata, uint32_t n_sections) {
    return sizeof(header) + n_metadata + sizeof(entry) * (uint64_t)n_sections + CHECKSUM_BYTES;
}

// Where n bytes lie behind a part that ends at `end`; false if no file is that large.
static bool place_section(uint64_t *offset, uint64_t *new_end, uint64_t end, uint64_t n) {
    return u64_align(offset, end, CONTAINER_ALIGN) && u64_add(new_end, *offset, n) &&
           *new_end <= INT64_MAX;
}

static bool is_before(uint32_t type_a, uint32_t index_a, uint32_t type_b, uint32_t index_b) {
    return type_a < type_b || (type_a == type_b && index_a < index_b);
}

typedef struct reporter {
    container_progress *call;
    void *arg;
    uint64_t reported, total;
} reporter;

// The last report, of the total, is left to the caller.
static void report(reporter *r, uint64_t done) {
    if (!r->call || done - r->reported < PROGRESS_BYTES || done == r->total) return;
    r->reported = done;
    r->call(r->arg, done, r->total);
}

// Writing

struct container_writer {
    char *path;
    os_replace file;
    bool is_open;  // `file` is; false for good after a failure
    header header;
    uint8_t *front;  // [n_front]: header, metadata, table, checksum, padding
    uint64_t n_front;
    container_section *sections;  // [header.n_sections]
    uint32_t current;             // the section whose turn it is
    uint64_t filled;              // bytes it has
    hash64 hash;                  // of them
    uint8_t *buffer;              // [BUFFER_BYTES]
    size_t held;                  // bytes in the buffer, which belong
    uint64_t at;                  // here in the file
    reporter progress;
};

static int check_plan(const container_plan *plan) {
    if (plan->n_sections > CONTAINER_MAX_SECTIONS || plan->n_metadata > CONTAINER_MAX_METADATA ||
        plan->n_metadata % 8) {
        return fail(MF_INTERNAL, "a container of %u sections and %u bytes of metadata",
                    plan->n_sections, plan->n_metadata);
    }
    for (uint32_t i = 0; i < plan->n_sections; i++) {
        const container_section *s = &plan->sections[i];
        if (!s->type || (i && !is_before(s[-1].type, s[-1].index, s->type, s->index))) {
            return fail(MF_INTERNAL, "section %u.%u is announced out of order", s->type, s->index);
        }
    }
    return MF_OK;
}

// The header's sizes and the sections' offsets.
static int lay_out(container_writer *w, const container_plan *plan) {
    const uint64_t n_header = header_bytes(plan->n_metadata, plan->n_sections);
    uint64_t end = n_header;
    for (uint32_t i = 0; i < plan->n_sections; i++) {
        const container_section *s = &plan->sections[i];
        w->sections[i] = (container_section){.type = s->type, .index = s->index, .n = s->n};
        if (!place_section(&w->sections[i].offset, &end, end, s->n)) {
            return fail(MF_INTERNAL, "section %u.%u of %llu bytes", s->type, s->index, (ull)s->n);
        }
    }
    w->header = (header){.version = CONTAINER_VERSION,
                         .flags = plan->flags,
                         .n_file = end,
                         .n_header = n_header,
                         .n_metadata = plan->n_metadata,
                         .n_sections = plan->n_sections};
    memcpy(w->header.magic, magic, MAGIC_BYTES);
    w->n_front = plan->n_sections ? w->sections[0].offset : n_header;
    return MF_OK;
}

static int start_writer(container_writer *w, const char *path, const container_plan *plan) {
    const size_t n_path = strlen(path) + 1;
    w->path = mem_alloc(n_path, 1);
    w->sections = mem_alloc(plan->n_sections, sizeof *w->sections);
    w->buffer = mem_alloc(BUFFER_BYTES, 1);
    if (!w->path || !w->sections || !w->buffer) return MF_NOMEM;
    memcpy(w->path, path, n_path);
    TRY(lay_out(w, plan));
    w->front = mem_alloc(w->n_front, 1);
    if (!w->front) return MF_NOMEM;
    if (plan->n_metadata) memcpy(w->front + sizeof(header), plan->metadata, plan->n_metadata);
    hash64_begin(&w->hash, 0);
    w->at = w->n_front;
    w->progress = (reporter){.call = plan->progress, .arg = plan->arg, .total = w->header.n_file};
    TRY(os_replace_begin(&w->file, w->path));
    w->is_open = true;
    return MF_OK;
}

int container_create(container_writer **out, const char *path, const container_plan *plan) {
    TRY(check_plan(plan));
    container_writer *w = mem_alloc(1, sizeof *w);
    if (!w) return MF_NOMEM;
    const int status = start_writer(w, path, plan);
    if (status)
        container_writer_free(w);
    else
        *out = w;
    return status;
}

void container_writer_free(container_writer *w) {
    if (!w) return;
    if (w->is_open) os_replace_abort(&w->file);
    mem_free(w->path);
    mem_free(w->front);
    mem_free(w->sections);
    mem_free(w->buffer);
    mem_free(w);
}

static int flush(container_writer *w) {
    TRY(os_replace_write(&w->file, w->at, w->buffer, w->held));
    w->at += w->held;
    w->held = 0;
    return MF_OK;
}

// At most BUFFER_BYTES. A full buffer's worth goes to the file without a copy in between.
static int put(container_writer *w, const void *bytes, size_t n) {
    if (w->held + n > BUFFER_BYTES) TRY(flush(w));
    if (n == BUFFER_BYTES) {
        TRY(os_replace_write(&w->file, w->at, bytes, n));
        w->at += n;
    } else {
        memcpy(w->buffer + w->held, bytes, n);
        w->held += n;
    }
    report(&w->progress, w->at + w->held);
    return MF_OK;
}

// The current section must be complete; then it is the next one's turn.
static int end_section(container_writer *w) {
    container_section *s = &w->sections[w->current];
    if (w->filled != s->n) {
        return fail(MF_INTERNAL, "%s: section %u.%u has %llu of its %llu bytes",
                    os_path_tail(w->path), s->type, s->index, (ull)w->filled, (ull)s->n);
    }
    s->checksum = hash64_end(&w->hash);
    hash64_begin(&w->hash, 0);
    w->filled = 0;
    if (++w->current == w->header.n_sections) return MF_OK;
    return put(w, zeros, (size_t)(s[1].offset - s->offset - s->n));
}

static int append(container_writer *w, uint32_t type, uint32_t index, const uint8_t *p, size_t n) {
    const container_section *s = w->sections + w->current;
    while (w->current < w->header.n_sections && is_before(s->type, s->index, type, index)) {
        TRY(end_section(w));
        s++;
    }
    if (w->current == w->header.n_sections || s->type != type || s->index != index) {
        return fail(MF_INTERNAL, "%s: section %u.%u was not announced or has had its turn",
                    os_path_tail(w->path), type, index);
    }
    if (n > s->n - w->filled) {
        return fail(MF_INTERNAL, "%s: section %u.%u: %zu bytes more than its %llu",
                    os_path_tail(w->path), type, index, n - (size_t)(s->n - w->filled), (ull)s->n);
    }
    while (n) {
        const size_t step = n < BUFFER_BYTES ? n : BUFFER_BYTES;
        hash64_add(&w->hash, p, step);
        TRY(put(w, p, step));
        w->filled += step, p += step, n -= step;
    }
    return MF_OK;
}

static int require_open(const container_writer *w) {
    if (w->is_open) return MF_OK;
    return fail(MF_INTERNAL, "%s: more for a file that is done or has failed",
                os_path_tail(w->path));
}

int container_append(container_writer *w, uint32_t type, uint32_t index, const void *bytes,
                     size_t n) {
    TRY(require_open(w));
    const int status = append(w, type, index, bytes, n);
    if (status) {
        os_replace_abort(&w->file);
        w->is_open = false;
    }
    return status;
}

static int write_front(container_writer *w) {
    uint8_t *p = w->front;
    memcpy(p, &w->header, sizeof w->header);
    p += sizeof w->header + w->header.n_metadata;
    for (uint32_t i = 0; i < w->header.n_sections; i++, p += sizeof(entry)) {
        const container_section *s = &w->sections[i];
        const entry e = {s->type, s->index, s->offset, s->n, s->checksum};
        memcpy(p, &e, sizeof e);
    }
    const uint64_t checksum = hash64_of(w->front, (size_t)(p - w->front), 0);
    memcpy(p, &checksum, sizeof checksum);
    return os_replace_write(&w->file, 0, w->front, (size_t)w->n_front);
}

static int complete(container_writer *w) {
    while (w->current < w->header.n_sections) TRY(end_section(w));
    TRY(flush(w));
    return write_front(w);
}

int container_commit(container_writer *w) {
    TRY(require_open(w));
    w->is_open = false;
    int status = complete(w);
    if (status)
        os_replace_abort(&w->file);
    else
        status = os_replace_commit(&w->file);
    if (!status && w->progress.call) {
        w->progress.call(w->progress.arg, w->header.n_file, w->header.n_file);
    }
    return status;
}

// Reading

struct container {
    os_map map;  // zeroed for bytes in memory
    const uint8_t *bytes;
    uint64_t n;
    char name[NAME_BYTES];
    header header;
    uint8_t *front;               // [header.n_header], a copy
    container_section *sections;  // [header.n_sections]
};

static int refuse_version(const container *c, uint32_t version) {
    if (version > CONTAINER_VERSION) {
        return fail(MF_FORMAT, "%s: version: the file says %u, this library reads %d; update it",
                    c->name, version, CONTAINER_VERSION);
    }
    return fail(MF_FORMAT, "%s: version: the file says %u, %s, and %d is needed; save it anew",
                c->name, version, version == 1 ? "which had no host state" : "which never was",
                CONTAINER_VERSION);
}

// The fields that need no checksum to be judged, in the order that gives the most useful refusal.
static int read_header(container *c, const container_want *want) {
    uint8_t first[sizeof(header)] = {0};  // of a shorter file too: its magic and version count
    memcpy(first, c->bytes, c->n < sizeof first ? (size_t)c->n : sizeof first);
    memcpy(&c->header, first, sizeof first);
    const header *h = &c->header;
    const size_t known = c->n < MAGIC_BYTES ? (size_t)c->n : MAGIC_BYTES;
    if (!c->n) return fail(MF_FORMAT, "%s: is empty; a session file is needed", c->name);
    if (memcmp(h->magic, magic, known)) {
        return fail(MF_FORMAT, "%s: magic: its first bytes are not those of a session file",
                    c->name);
    }
    if (c->n >= MAGIC_BYTES + sizeof h->version && h->version != CONTAINER_VERSION) {
        return refuse_version(c, h->version);
    }
    if (c->n < header_bytes(0, 0)) {
        return fail(MF_FORMAT, "%s: is cut: it has %llu bytes, a header alone has %llu", c->name,
                    (ull)c->n, (ull)header_bytes(0, 0));
    }
    if (h->flags & ~want->known_flags) {
        return fail(MF_FORMAT, "%s: flags: the file says 0x%x, this library knows 0x%x; update it",
                    c->name, h->flags, want->known_flags);
    }
    if (h->n_file != c->n) {
        return fail(MF_FORMAT, "%s: size: the file says %llu bytes, it has %llu; it is %s", c->name,
                    (ull)h->n_file, (ull)c->n, h->n_file > c->n ? "cut" : "longer than written");
    }
    if (h->n_metadata != want->n_metadata) {
        return fail(MF_FORMAT, "%s: metadata: the file says %u bytes, %u are needed", c->name,
                    h->n_metadata, want->n_metadata);
    }
    if (h->n_sections > CONTAINER_MAX_SECTIONS) {
        return fail(MF_FORMAT, "%s: sections: the file says %u, at most %d are possible", c->name,
                    h->n_sections, CONTAINER_MAX_SECTIONS);
    }
    const uint64_t n_header = header_bytes(h->n_metadata, h->n_sections);
    if (h->n_header != n_header || n_header > c->n) {
        return fail(MF_FORMAT, "%s: header: the file says %llu bytes, its fields need %llu of %llu",
                    c->name, (ull)h->n_header, (ull)n_header, (ull)c->n);
    }
    return MF_OK;
}

static int damaged(const container *c, const char *what, uint64_t says, uint64_t is) {
    return fail(MF_FORMAT,
                "%s: checksum of %s: the file says %016llx, its bytes give %016llx; "
                "it is damaged",
                c->name, what, (ull)says, (ull)is);
}

static int read_front(container *c) {
    const size_t n = (size_t)c->header.n_header, n_summed = n - CHECKSUM_BYTES;
    c->front = mem_alloc(n, 1);
    if (!c->front) return MF_NOMEM;
    memcpy(c->front, c->bytes, n);
    uint64_t says;
    memcpy(&says, c->front + n_summed, sizeof says);
    const uint64_t is = hash64_of(c->front, n_summed, 0);
    if (says != is) return damaged(c, "the header", says, is);
    // The fields just judged are those just summed, even if the file changes meanwhile.
    if (!memcmp(c->front, &c->header, sizeof c->header)) return MF_OK;
    return fail(MF_FORMAT, "%s: is being changed", c->name);
}

static int read_table(container *c) {
    const header *h = &c->header;
    c->sections = mem_alloc(h->n_sections, sizeof *c->sections);
    if (!c->sections) return MF_NOMEM;
    const uint8_t *p = c->front + sizeof *h + h->n_metadata;
    uint64_t end = h->n_header;
    for (uint32_t i = 0; i < h->n_sections; i++, p += sizeof(entry)) {
        container_section *s = &c->sections[i];
        entry e;
        memcpy(&e, p, sizeof e);
        *s = (container_section){e.type, e.index, e.n, e.offset, e.checksum, NULL};
        if (!e.type || (i && !is_before(s[-1].type, s[-1].index, e.type, e.index))) {
            return fail(MF_FORMAT, "%s: table, entry %u: section %u.%u is not in ascending order",
                        c->name, i, e.type, e.index);
        }
        uint64_t offset;
        if (!place_section(&offset, &end, end, e.n) || end > c->n) {
            return fail(MF_FORMAT,
                        "%s: section %u.%u: the table says %llu bytes, the file has %llu", c->name,
                        e.type, e.index, (ull)e.n, (ull)c->n);
        }
        if (e.offset != offset) {
            return fail(MF_FORMAT, "%s: section %u.%u: the table says offset %llu, %llu is needed",
                        c->name, e.type, e.index, (ull)e.offset, (ull)offset);
        }
    }
    if (end == c->n) return MF_OK;
    return fail(MF_FORMAT, "%s: size: its sections end at %llu, the file at %llu", c->name,
                (ull)end, (ull)c->n);
}

// The checksums of all sections, by any number of threads.
typedef struct summing {
    const container *c;
    uint64_t *sums;         // [n_sections]
    _Atomic uint64_t done;  // bytes summed
    reporter progress;      // of the calling thread
} summing;

static void sum_section(void *arg, uint32_t task, uint32_t thread) {
    summing *const s = arg;
    const container_section *const section = &s->c->sections[task];
    const uint8_t *at = s->c->bytes + section->offset;
    hash64 hash;
    hash64_begin(&hash, 0);
    for (uint64_t left = section->n; left;) {
        const size_t step = (size_t)(left < PROGRESS_BYTES ? left : PROGRESS_BYTES);
        hash64_add(&hash, at, step);
        at += step, left -= step;
        const uint64_t done = atomic_fetch_add(&s->done, step) + step;
        if (!thread) report(&s->progress, done);
    }
    s->sums[task] = hash64_end(&hash);
}

static int check_padding(const container *c, uint64_t at, uint64_t end) {
    for (; at < end; at++) {
        if (!c->bytes[at]) continue;
        return fail(MF_FORMAT, "%s: padding: byte %llu is %u, 0 is needed; it is damaged", c->name,
                    (ull)at, c->bytes[at]);
    }
    return MF_OK;
}

// All sections are summed before one is judged, so that what a damaged file is refused for does not
// depend on the threads.
static int check_sections(const container *c, const uint64_t *sums) {
    uint64_t end = c->header.n_header;
    for (uint32_t i = 0; i < c->header.n_sections; i++) {
        const container_section *s = &c->sections[i];
        TRY(check_padding(c, end, s->offset));
        end = s->offset + s->n;
        if (sums[i] == s->checksum) continue;
        char what[40];
        snprintf(what, sizeof what, "section %u.%u", s->type, s->index);
        return damaged(c, what, s->checksum, sums[i]);
    }
    return MF_OK;
}

static int read_sections(container *c, const container_want *want) {
    const uint32_t n = c->header.n_sections;
    summing s = {.c = c,
                 .sums = mem_alloc(n, sizeof *s.sums),
                 .progress = {.call = want->progress, .arg = want->progress_arg, .total = c->n}};
    if (!s.sums) return MF_NOMEM;
    if (want->threads)
        pool_run(want->threads, sum_section, &s, n);
    else
        for (uint32_t i = 0; i < n; i++) sum_section(&s, i, 0);
    const int status = check_sections(c, s.sums);
    mem_free(s.sums);
    if (status) return status;
    for (uint32_t i = 0; i < n; i++) c->sections[i].bytes = c->bytes + c->sections[i].offset;
    if (want->progress) want->progress(want->progress_arg, c->n, c->n);
    return MF_OK;
}

static int read_all(container *c, const container_want *want) {
    TRY(read_header(c, want));
    TRY(read_front(c));
    TRY(read_table(c));
    if (want->accept) TRY(want->accept(want->arg, c));
    return read_sections(c, want);
}

static int open_mapped(container **out, const os_map *map, const uint8_t *bytes, size_t n,
                       const char *name, const container_want *want) {
    container *c = mem_alloc(1, sizeof *c);
    if (!c) return MF_NOMEM;
    c->bytes = bytes;
    c->n = n;
    snprintf(c->name, sizeof c->name, "%s", os_path_tail(name));
    const int status = read_all(c, want);
    if (status) {
        container_free(c);
        return status;
    }
    if (map) c->map = *map;
    *out = c;
    return MF_OK;
}

int container_open(container **out, const char *path, const container_want *want) {
    os_map map;
    TRY(os_map_open(&map, path, ""));
    const int status = open_mapped(out, &map, map.bytes, map.size, path, want);
    if (status) os_map_close(&map);
    return status;
}

int container_open_memory(container **out, const uint8_t *bytes, size_t n, const char *name,
                          const container_want *want) {
    return open_mapped(out, NULL, bytes, n, name, want);
}

void container_free(container *c) {
    if (!c) return;
    mem_free(c->front);
    mem_free(c->sections);
    os_map_close(&c->map);
    mem_free(c);
}

const char *container_name(const container *c) { return c->name; }

uint64_t container_bytes(const container *c) { return c->n; }

uint32_t container_flags(const container *c) { return c->header.flags; }

const uint8_t *container_metadata(const container *c) { return c->front + sizeof(header); }

uint32_t container_n_sections(const container *c) { return c->header.n_sections; }

const container_section *container_at(const container *c, uint32_t i) { return &c->sections[i]; }

const container_section *container_find(const container *c, uint32_t type, uint32_t index) {
    uint32_t low = 0, high = c->header.n_sections;
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        const container_section *s = &c->sections[mid];
        if (s->type == type && s->index == index) return s;
        if (is_before(s->type, s->index, type, index))
            low = mid + 1;
        else
            high = mid;
    }
    return NULL;
}
