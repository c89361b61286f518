// Fuzz target of the container: opens the bytes as they are, then with all checksums repaired,
// which lets mutants reach what is behind them. Beyond crashes it finds broken promises: a file
// that is accepted though its parts do not cover it exactly, a failure without a message or with
// memory left behind, memory beyond the file's size, and an accepted file that the layout would not
// give.
#include <stdio.h>
#include <stdlib.h>

#include "../engine/alloc.h"
#include "container_test.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

enum { METADATA = 16, KNOWN_FLAGS = 3, SMALL_MEMORY = 4096 };

static void require(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "fuzz_container: broken promise: %s (last error: %s)\n", what, mf_last_error());
    abort();
}

typedef struct seen {
    uint64_t accepted, done;
} seen;

static int accept_file(void *arg, const container *c) {
    seen *s = arg;
    s->accepted++;
    for (uint32_t i = 0; i < container_n_sections(c); i++) {
        require(!container_at(c, i)->bytes, "no bytes before they are verified");
    }
    return MF_OK;
}

static void see(void *arg, uint64_t done, uint64_t total) {
    seen *s = arg;
    require(done > s->done && done <= total, "progress goes on");
    s->done = done;
}

// The file again, from what was read: it must be the same to the last byte.
static void write_again(const container *c, const uint8_t *bytes, size_t n) {
    const uint32_t n_sections = container_n_sections(c);
    container_section *sections = malloc((n_sections + 1) * sizeof *sections);
    uint8_t *again = calloc(n + 1, 1);
    require(sections && again, "memory for the walk");
    uint64_t total = 0;
    for (uint32_t i = 0; i < n_sections; i++) {
        const container_section *s = container_at(c, i);
        require(s->bytes == bytes + s->offset && s->offset <= n && s->n <= n - s->offset,
                "a section within the file");
        require(container_find(c, s->type, s->index) == s, "a section by its name");
        total += s->n;
        sections[i] = *s;
    }
    require(total <= n, "no byte in two sections");
    const container_plan plan = {.flags = container_flags(c),
                                 .metadata = container_metadata(c),
                                 .n_metadata = METADATA,
                                 .n_sections = n_sections,
                                 .sections = sections};
    require(build(again, &plan) == n && !memcmp(again, bytes, n), "the same file again");
    free(again);
    free(sections);
}

static void try_file(const uint8_t *bytes, size_t n) {
    static const char name[] = "fuzz.kv";
    const size_t alive = mem_alive();
    const uint64_t asked = mem_asked();
    seen s = {0};
    const container_want want = {.known_flags = KNOWN_FLAGS,
                                 .n_metadata = METADATA,
                                 .accept = accept_file,
                                 .arg = &s,
                                 .progress = see,
                                 .progress_arg = &s};
    container *c = NULL;
    const int status = container_open_memory(&c, bytes, n, name, &want);
    require(mem_asked() - asked <= 3 * n + SMALL_MEMORY, "no memory beyond the file's size");
    if (status) {
        require(status == MF_FORMAT && !c, "a refusal is one of the format and hands out nothing");
        require(!strncmp(mf_last_error(), "fuzz.kv: ", sizeof name + 1), "the file is named");
        require(strlen(mf_last_error()) > sizeof name + 1, "the message says more than the name");
    } else {
        require(s.accepted == 1 && s.done == n, "judged once, read to the end");
        require(container_bytes(c) == n, "bytes of the file");
        require(!(container_flags(c) & ~(uint32_t)KNOWN_FLAGS), "known flags");
        write_again(c, bytes, n);
        container_free(c);
    }
    require(mem_alive() == alive, "memory is given back");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    try_file(bytes, n);
    uint8_t *repaired = malloc(n ? n : 1);
    require(repaired != NULL, "memory for a copy");
    if (n) memcpy(repaired, bytes, n);
    repair(repaired, n);
    try_file(repaired, n);
    free(repaired);
    return 0;
}
