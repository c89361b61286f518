// Layer 3: a versioned, checksummed file of sections; docs/session-format.md has every byte.
//
// It knows no meaning: a section has a type (from 1), an index and bytes; a block of metadata and
// the bits of the flags belong to the caller. Every byte of a file belongs to the header, to the
// table of sections, to one section, or to padding, which is zero and verified. Two files with the
// same flags, metadata and sections are equal byte for byte.
#ifndef MF_CONTAINER_H
#define MF_CONTAINER_H

#include "pool.h"

enum {
    CONTAINER_VERSION = 2,
    CONTAINER_ALIGN = 64,  // sections start at multiples of it
    CONTAINER_MAX_SECTIONS = 1 << 16,
    CONTAINER_MAX_METADATA = 1 << 12  // bytes
};

// Called on the calling thread after each few megabytes, and at the end with done == total, the
// bytes of the file.
typedef void container_progress(void *arg, uint64_t done, uint64_t total);

typedef struct container_section {
    uint32_t type, index;
    uint64_t n;            // bytes
    uint64_t offset;       // in the file; a plan need not fill it
    uint64_t checksum;     // XXH64; likewise
    const uint8_t *bytes;  // [n], of an open container; NULL while it is being verified
} container_section;

// Writing: all sections are announced with their sizes, in ascending order of (type, index), each
// pair once; then their bytes are appended in that order. Nothing is kept but a small buffer.

typedef struct container_plan {
    uint32_t flags;
    const void *metadata;  // [n_metadata], copied; n_metadata is a multiple of 8
    uint32_t n_metadata;
    uint32_t n_sections;
    const container_section *sections;  // [n_sections]: type, index and n; copied
    container_progress *progress;       // or NULL
    void *arg;                          // of progress
} container_plan;

typedef struct container_writer container_writer;

// Begins to replace the file `path` (copied), see os_replace_begin. MF_INTERNAL for a plan that
// breaks the rules above.
int container_create(container_writer **out, const char *path, const container_plan *plan);
// The next n bytes of a section. MF_INTERNAL if it is not its turn or its size would be exceeded.
int container_append(container_writer *w, uint32_t type, uint32_t index, const void *bytes,
                     size_t n);
// Puts the new file in place; MF_INTERNAL if a section lacks bytes. After any failed call the old
// file stands as it was (but see os_replace_commit) and only container_writer_free is left.
int container_commit(container_writer *w);
void container_writer_free(container_writer *w);  // uncommitted: the old file stands. NULL allowed

// Reading: everything is verified before container_open returns.

typedef struct container container;

typedef struct container_want {
    uint32_t known_flags;  // any other bit is refused
    uint32_t n_metadata;   // exactly
    // Called once header and table are verified and before the sections are read: the place to
    // refuse a file that does not fit, whatever its size, with a status and a message that begins
    // with container_name. NULL for none.
    int (*accept)(void *arg, const container *c);
    void *arg;                     // of accept
    container_progress *progress;  // or NULL
    void *progress_arg;
    pool *threads;  // sections are verified by all of them; NULL: by the caller alone
} container_want;

// Maps and verifies a file. MF_IO: the system refused; MF_FORMAT: the message names the field, what
// the file says and what is needed; or what `accept` returned.
int container_open(container **out, const char *path, const container_want *want);
// The same for n bytes that outlive the container; `name` stands for the path in messages.
int container_open_memory(container **out, const uint8_t *bytes, size_t n, const char *name,
                          const container_want *want);
void container_free(container *c);  // NULL allowed

const char *container_name(const container *c);  // the end of its path, for messages
uint64_t container_bytes(const container *c);    // of the file
uint32_t container_flags(const container *c);
const uint8_t *container_metadata(const container *c);  // [n_metadata], 8-byte aligned
uint32_t container_n_sections(const container *c);
const container_section *container_at(const container *c, uint32_t i);  // i < n_sections
// NULL if there is none.
const container_section *container_find(const container *c, uint32_t type, uint32_t index);

#endif
