// Container files made without the writer, field by field as docs/session-format.md has them, and
// the repair of their checksums after a change.
#ifndef MF_TESTS_CONTAINER_TEST_H
#define MF_TESTS_CONTAINER_TEST_H

#include <stdint.h>
#include <string.h>

#include "../engine/container.h"
#include "../engine/hash.h"

// Offsets in the header, and in an entry of the table.
enum {
    AT_VERSION = 8,
    AT_FLAGS = 12,
    AT_N_FILE = 16,
    AT_N_HEADER = 24,
    AT_N_METADATA = 32,
    AT_N_SECTIONS = 36,
    HEADER = 40,
    AT_TYPE = 0,
    AT_INDEX = 4,
    AT_OFFSET = 8,
    AT_N = 16,
    AT_SUM = 24,
    ENTRY = 32
};

static inline uint32_t get32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t get64(const uint8_t *p) {
    return (uint64_t)get32(p) | (uint64_t)get32(p + 4) << 32;
}

static inline void put32(uint8_t *p, uint32_t x) {
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(x >> 8 * i);
}

static inline void put64(uint8_t *p, uint64_t x) {
    put32(p, (uint32_t)x);
    put32(p + 4, (uint32_t)(x >> 32));
}

// Sets the checksums of all sections and of the header to those of the bytes, as far as the file's
// own numbers lead to places inside of it.
static inline void repair(uint8_t *file, size_t n) {
    if (n < HEADER) return;
    const uint64_t n_sections = get32(file + AT_N_SECTIONS);
    const uint64_t table = HEADER + (uint64_t)get32(file + AT_N_METADATA);
    const uint64_t end = table + n_sections * ENTRY;
    for (uint64_t i = 0; i < n_sections && table + (i + 1) * ENTRY <= n; i++) {
        uint8_t *e = file + table + i * ENTRY;
        const uint64_t offset = get64(e + AT_OFFSET), bytes = get64(e + AT_N);
        if (offset <= n && bytes <= n - offset) {
            put64(e + AT_SUM, hash64_of(file + offset, (size_t)bytes, 0));
        }
    }
    if (end <= n && n - end >= 8) put64(file + end, hash64_of(file, (size_t)end, 0));
}

// Writes the file of a plan whose sections' bytes are set to `out`, which has room and is zeroed;
// returns its size.
static inline size_t build(uint8_t *out, const container_plan *plan) {
    const uint64_t table = HEADER + (uint64_t)plan->n_metadata;
    const uint64_t n_header = table + (uint64_t)plan->n_sections * ENTRY + 8;
    uint64_t end = n_header;
    memcpy(out, "\x89MFK\r\n\x1a\n", 8);
    put32(out + AT_VERSION, 2);
    put32(out + AT_FLAGS, plan->flags);
    put64(out + AT_N_HEADER, n_header);
    put32(out + AT_N_METADATA, plan->n_metadata);
    put32(out + AT_N_SECTIONS, plan->n_sections);
    if (plan->n_metadata) memcpy(out + HEADER, plan->metadata, plan->n_metadata);
    for (uint32_t i = 0; i < plan->n_sections; i++) {
        const container_section *s = &plan->sections[i];
        uint8_t *e = out + table + (uint64_t)i * ENTRY;
        while (end % 64) end++;
        put32(e + AT_TYPE, s->type);
        put32(e + AT_INDEX, s->index);
        put64(e + AT_OFFSET, end);
        put64(e + AT_N, s->n);
        if (s->n) memcpy(out + end, s->bytes, (size_t)s->n);
        end += s->n;
    }
    put64(out + AT_N_FILE, end);
    repair(out, (size_t)end);
    return (size_t)end;
}

#endif
