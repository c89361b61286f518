// The container: what is written is what the specification says and what is read back; nothing that
// differs in one byte is accepted; a refusal costs neither time nor memory; writers that fail or
// are misused leave the old file.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "../engine/alloc.h"
#include "../engine/error.h"
#include "container_test.h"
#include "counted.h"
#include "os_faults.h"

enum {
    FLAGS = 5,  // of the small file
    KNOWN = 7,  // of the reader
    METADATA = 24,
    ROOM = 1 << 12,  // bytes, more than the small file has
    SMALL = 5,       // sections
    BIG = (9 << 20) + 77,
    SPARSE_SECONDS = 1
};

typedef unsigned long long ull;

static char folder[] = "/tmp/minfer_container_XXXXXX";
static char path[64];
static uint8_t noise[BIG];
static const uint8_t metadata[METADATA] = "twenty-four bytes of it";

// A section of odd size, an empty one, one whose index counts, one of a single byte, one of whole
// blocks.
static const container_section small[SMALL] = {
    {.type = 1, .index = 0, .n = 61, .bytes = noise + 1},
    {.type = 1, .index = 1, .n = 0},
    {.type = 1, .index = 7, .n = 1, .bytes = noise + 100},
    {.type = 4, .index = 0, .n = 130, .bytes = noise + 200},
    {.type = 9, .index = 3, .n = 64, .bytes = noise + 400},
};
static const container_plan small_plan = {.flags = FLAGS,
                                          .metadata = metadata,
                                          .n_metadata = METADATA,
                                          .n_sections = SMALL,
                                          .sections = small};
static const container_want want_small = {.known_flags = KNOWN, .n_metadata = METADATA};

static void must(bool ok, const char *what) {
    if (ok) return;
    printf("FAILED: %s: %s\n", what, strerror(errno));
    exit(1);
}

// Appends all in pieces of at most `piece` bytes.
static int save(const char *to, const container_plan *plan, size_t piece) {
    container_writer *w = NULL;
    int status = container_create(&w, to, plan);
    for (uint32_t i = 0; i < plan->n_sections && !status; i++) {
        const container_section *s = &plan->sections[i];
        for (uint64_t at = 0; at < s->n && !status; at += piece) {
            const size_t left = (size_t)(s->n - at), n = left < piece ? left : piece;
            status = container_append(w, s->type, s->index, s->bytes + at, n);
        }
    }
    if (!status) status = container_commit(w);
    container_writer_free(w);
    return status;
}

static size_t file_bytes(uint8_t *out, size_t room) {
    FILE *f = fopen(path, "rb");
    must(f != NULL, path);
    const size_t n = fread(out, 1, room, f);
    fclose(f);
    return n;
}

static void check_sections(const container *c, const container_plan *plan, const char *what) {
    CHECK(container_flags(c) == plan->flags, "%s: flags %x", what, container_flags(c));
    CHECK(!plan->n_metadata || !memcmp(container_metadata(c), plan->metadata, plan->n_metadata),
          "%s: metadata", what);
    CHECK(container_n_sections(c) == plan->n_sections, "%s: %u sections", what,
          container_n_sections(c));
    for (uint32_t i = 0; i < plan->n_sections; i++) {
        const container_section *s = container_at(c, i), *p = &plan->sections[i];
        CHECK(s->type == p->type && s->index == p->index && s->n == p->n, "%s: section %u", what,
              i);
        CHECK(s->offset % CONTAINER_ALIGN == 0, "%s: offset %llu", what, (ull)s->offset);
        CHECK(!s->n || !memcmp(s->bytes, p->bytes, (size_t)s->n), "%s: bytes of section %u", what,
              i);
        CHECK(container_find(c, s->type, s->index) == s, "%s: section %u is not found", what, i);
    }
    CHECK(!container_find(c, 0, 0) && !container_find(c, 1, 2) && !container_find(c, 4, 1) &&
              !container_find(c, UINT32_MAX, 0),
          "%s: a section that is not there", what);
}

static void test_round_trip(void) {
    static const size_t pieces[] = {1, 7, 64, 1 << 20};
    uint8_t right[ROOM] = {0}, file[ROOM];
    const size_t n = build(right, &small_plan);
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        CHECK(!save(path, &small_plan, pieces[i]), "%s", mf_last_error());
        CHECK(file_bytes(file, ROOM) == n && !memcmp(file, right, n),
              "pieces of %zu: not the bytes of the specification", pieces[i]);
        container *c = NULL;
        CHECK(!container_open(&c, path, &want_small), "%s", mf_last_error());
        if (c) check_sections(c, &small_plan, "small");
        CHECK(c && container_bytes(c) == n, "bytes of the file");
        container_free(c);
    }
    // No metadata, no sections, no bytes.
    const container_section empty = {.type = 3};
    for (uint32_t k = 0; k < 2; k++) {
        const container_plan plan = {.n_sections = k, .sections = &empty};
        memset(right, 0, sizeof right);
        const size_t n_right = build(right, &plan);
        CHECK(!save(path, &plan, 1), "%s", mf_last_error());
        CHECK(file_bytes(file, ROOM) == n_right && !memcmp(file, right, n_right), "%u empty", k);
        container *c = NULL;
        CHECK(!container_open(&c, path, &(container_want){0}), "%s", mf_last_error());
        if (c) check_sections(c, &plan, "empty");
        container_free(c);
    }
}

typedef struct seen {
    uint64_t calls, done, total;
    bool is_wrong;
} seen;

static void see(void *arg, uint64_t done, uint64_t total) {
    seen *s = arg;
    s->is_wrong |= (s->calls && (done <= s->done || total != s->total)) || done > total;
    s->calls++;
    s->done = done;
    s->total = total;
}

// Larger than all buffers, in pieces around their sizes; progress; no memory by the size.
static void test_big(void) {
    static const size_t pieces[] = {BIG, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 100003};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        const container_section sections[] = {{.type = 1, .n = 100, .bytes = noise},
                                              {.type = 2, .n = BIG, .bytes = noise},
                                              {.type = 3, .n = 99, .bytes = noise}};
        seen writing = {0}, reading = {0};
        const container_plan plan = {
            .n_sections = 3, .sections = sections, .progress = see, .arg = &writing};
        uint64_t asked = mem_asked();
        CHECK(!save(path, &plan, pieces[i]), "%s", mf_last_error());
        const container_want want = {.progress = see, .progress_arg = &reading};
        container *c = NULL;
        CHECK(!container_open(&c, path, &want), "%s", mf_last_error());
        asked = mem_asked() - asked;
        CHECK(asked < 1 << 20, "%llu bytes of memory", (ull)asked);
        if (!c) continue;
        check_sections(c, &plan, "big");
        CHECK(!writing.is_wrong && writing.calls >= 3 && writing.done == container_bytes(c) &&
                  writing.total == writing.done,
              "writing: %llu calls, the last %llu", (ull)writing.calls, (ull)writing.done);
        CHECK(!reading.is_wrong && reading.calls >= 3 && reading.done == container_bytes(c) &&
                  reading.total == reading.done,
              "reading: %llu calls, the last %llu", (ull)reading.calls, (ull)reading.done);
        container_free(c);
    }
}

// With threads: the same file, and the same damage is named whoever finds it.
static void test_threads(void) {
    enum { SECTIONS = 40, BYTES = 1 << 16, FIRST = 1344 };  // FIRST: offset of section 0
    container_section sections[SECTIONS];
    for (uint32_t i = 0; i < SECTIONS; i++)
        sections[i] = (container_section){.type = 5, .index = i, .n = BYTES, .bytes = noise};
    const container_plan plan = {.n_sections = SECTIONS, .sections = sections};
    CHECK(!save(path, &plan, BYTES), "%s", mf_last_error());
    pool *threads = NULL;
    must(!pool_new(&threads, 3), "a pool");
    for (int round = 0; round < 20; round++) {
        if (round == 10)
            must(
                !truncate(path, FIRST + 8 * BYTES - 1) && !truncate(path, FIRST + SECTIONS * BYTES),
                "zeros");
        seen reading = {0};
        const container_want want = {.threads = threads, .progress = see, .progress_arg = &reading};
        container *c = NULL;
        const int status = container_open(&c, path, &want);
        if (c) check_sections(c, &plan, "threads");
        CHECK(!reading.is_wrong && (!c || reading.done == container_bytes(c)), "progress");
        CHECK(round < 10 ? !status : status == MF_FORMAT && strstr(mf_last_error(), "section 5.7:"),
              "status %d: %s", status, mf_last_error());
        container_free(c);
    }
    pool_free(threads);
}

// Nothing may be left of what the heap held before.
static void test_heap_patterns(void) {
    uint8_t files[2][ROOM] = {{0}};
    size_t n[2];
    for (int k = 0; k < 2; k++) {
        void *held[64];
        for (size_t i = 0; i < 64; i++) {
            held[i] = malloc(1 + i * 977);
            must(held[i] != NULL, "malloc");
            memset(held[i], k ? 0xaa : 0x55, 1 + i * 977);
        }
        for (int i = 0; i < 64; i++) free(held[i]);
        CHECK(!save(path, &small_plan, 1 << 20), "%s", mf_last_error());
        n[k] = file_bytes(files[k], ROOM);
    }
    CHECK(n[0] == n[1] && !memcmp(files[0], files[1], ROOM), "two saves differ");
}

// `bytes` must be refused, and what is said must have the words.
static void refuse(const uint8_t *bytes, size_t n, const container_want *want, const char *words,
                   const char *what, size_t at) {
    const size_t alive = mem_alive();
    uint8_t *copy = malloc(n + 1);
    must(copy != NULL, "malloc");
    memcpy(copy + 1, bytes, n);
    container *c = NULL;
    const int status = container_open_memory(&c, copy + 1, n, "f.kv", want);
    CHECK(status == MF_FORMAT && !c, "%s %zu: status %d", what, at, status);
    CHECK(!strncmp(mf_last_error(), "f.kv: ", 6) && strstr(mf_last_error(), words),
          "%s %zu: \"%s\" lacks \"%s\"", what, at, mf_last_error(), words);
    container_free(c);
    free(copy);
    CHECK(mem_alive() == alive, "%s %zu: memory left", what, at);
}

static void test_every_byte(void) {
    uint8_t file[ROOM + 64] = {0};
    const size_t n = build(file, &small_plan);
    for (size_t i = 0; i < n; i++) refuse(file, i, &want_small, "", "prefix", i);
    for (size_t i = 1; i <= 64; i++) refuse(file, n + i, &want_small, "size", "zeros behind", i);
    for (size_t i = 0; i < n; i++) {
        for (int bit = 0; bit < 9; bit++) {
            const uint8_t flip = (uint8_t)(bit < 8 ? 1 << bit : 0xff);
            file[i] ^= flip;
            refuse(file, n, &want_small, "", "flip of byte", i);
            file[i] ^= flip;
        }
    }
    // Padding is refused even when every checksum is right.
    size_t n_padding = 0;
    const size_t n_header = (size_t)get64(file + AT_N_HEADER);
    for (size_t i = n_header; i < n; i++) {
        bool is_padding = true;
        for (uint32_t k = 0; k < SMALL; k++) {
            const uint8_t *e = file + HEADER + METADATA + k * ENTRY;
            is_padding &= i < get64(e + AT_OFFSET) || i - get64(e + AT_OFFSET) >= get64(e + AT_N);
        }
        if (!is_padding) continue;
        n_padding++;
        file[i] = 1;
        repair(file, n);
        refuse(file, n, &want_small, "padding", "padding", i);
        file[i] = 0;
    }
    CHECK(n_padding > 100, "%zu bytes of padding", n_padding);
    // Swapped sections of equal size: each checksum fits its bytes, but not the table's sum.
    repair(file, n);
    container *c = NULL;
    CHECK(!container_open_memory(&c, file, n, "f.kv", &want_small), "%s", mf_last_error());
    container_free(c);
}

static void test_fields(void) {
    enum { TABLE = HEADER + METADATA };
    static const uint64_t values[] = {
        0,          1,          2,          3,          63,        64,         65,
        UINT32_MAX, 1ull << 31, 1ull << 32, 1ull << 62, INT64_MAX, UINT64_MAX, UINT64_MAX - 63,
    };
    static const struct {
        size_t at, width;
        const char *words;
    } fields[] = {
        {0, 8, "magic"},
        {AT_VERSION, 4, "version: the file says"},
        {AT_N_FILE, 8, "size: the file says"},
        {AT_N_HEADER, 8, "header: the file says"},
        {AT_N_METADATA, 4, "metadata: the file says"},
        {AT_N_SECTIONS, 4, "the file says"},
        {TABLE + AT_OFFSET, 8, "section 1.0: the table says offset"},
        {TABLE + AT_N, 8, ""},
        {TABLE + ENTRY + AT_OFFSET, 8, "section 1.1: the table says offset"},
        {TABLE + ENTRY + AT_N, 8, "section 1."},
        {TABLE + ENTRY + AT_INDEX, 4, "section 1."},
        {TABLE + 4 * ENTRY + AT_OFFSET, 8, "section 9.3: the table says offset"},
        {TABLE + 4 * ENTRY + AT_N, 8, "64"},
    };
    uint8_t right[ROOM] = {0}, file[ROOM];
    const size_t n = build(right, &small_plan);
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++) {
        uint64_t old = 0;
        memcpy(&old, right + fields[f].at, fields[f].width);
        for (size_t v = 0; v < sizeof values / sizeof *values + 4; v++) {
            const uint64_t near[] = {old + 1, old - 1, old + 64, old - 64};
            const size_t n_values = sizeof values / sizeof *values;
            const uint64_t value = v < n_values ? values[v] : near[v - n_values];
            memcpy(file, right, sizeof file);
            memcpy(file + fields[f].at, &value, fields[f].width);
            if (!memcmp(file, right, n)) continue;
            repair(file, n);
            // An index between its neighbours and a size that ends in the old padding make other
            // valid files.
            const bool is_index = fields[f].at == TABLE + ENTRY + AT_INDEX;
            if (is_index && value > 0 && value < 7) continue;
            if (fields[f].at == TABLE + AT_N && value > 61 && value <= 64) continue;
            if (fields[f].at == TABLE + ENTRY + AT_N && value <= 64) continue;
            refuse(file, n, &want_small, is_index ? "order" : fields[f].words, "field", f);
        }
    }
}

static void refuse_with(size_t at, uint32_t value, const char *words) {
    uint8_t file[ROOM] = {0};
    const size_t n = build(file, &small_plan);
    put32(file + at, value);
    repair(file, n);
    refuse(file, n, &want_small, words, "value", value);
}

static void test_by_name(void) {
    enum { TABLE = HEADER + METADATA };
    refuse_with(AT_VERSION, 1,
                "version: the file says 1, which had no host state, and 2 is needed");
    refuse_with(AT_VERSION, 3, "version: the file says 3, this library reads 2");
    refuse_with(AT_VERSION, 0, "version: the file says 0");
    refuse_with(AT_VERSION, 0x02000000, "version");  // of the other byte order
    refuse_with(AT_FLAGS, 8, "flags: the file says 0x8, this library knows 0x7");
    refuse_with(AT_FLAGS, FLAGS | 1u << 31, "flags");
    refuse_with(TABLE + AT_TYPE, 0, "order");
    refuse_with(TABLE + 2 * ENTRY + AT_INDEX, 1, "entry 2: section 1.1 is not in ascending order");
    refuse_with(TABLE + 3 * ENTRY + AT_TYPE, 1, "order");
    refuse_with(TABLE + 3 * ENTRY + AT_TYPE, 10, "entry 4: section 9.3");
    refuse_with(TABLE + 4 * ENTRY + AT_N, 65, "section 9.3: the table says 65 bytes, the file has");
    refuse_with(AT_N_SECTIONS, CONTAINER_MAX_SECTIONS + 1,
                "sections: the file says 65537, at most 65536");
    static const uint8_t zeros[ROOM];
    refuse(zeros, ROOM, &want_small, "magic", "zeros", 0);
    refuse(zeros, 0, &want_small, "is empty", "nothing", 0);
    refuse((const uint8_t *)"\x89MFK\r\n\x1a\n\x03\0\0", 12, &want_small, "says 3", "short", 3);
    refuse((const uint8_t *)"\x89MFK\n\x1a\n\x02\0\0\0\0", 12, &want_small, "magic", "text", 0);

    // Version 1 of any shape, as soon as its number is there.
    uint8_t file[ROOM] = {0};
    const size_t n = build(file, &small_plan);
    put32(file + AT_VERSION, 1);
    for (size_t i = 12; i <= n; i++) refuse(file, i, &want_small, "host state", "version 1", i);
    put32(file + AT_VERSION, 2);
    // A table that agrees with itself and is longer than the file.
    uint8_t many[ROOM];
    memcpy(many, file, sizeof many);
    put32(many + AT_N_SECTIONS, 2000);
    put64(many + AT_N_HEADER, TABLE + 2000 * ENTRY + 8);
    refuse(many, n, &want_small, "header: the file says 64072 bytes", "a long table", 2000);
    const container_want other = {.known_flags = KNOWN, .n_metadata = METADATA + 8};
    refuse(file, n, &other, "metadata: the file says 24 bytes, 32 are needed", "metadata", 0);
}

static int accept_status;

static int judge(void *arg, const container *c) {
    const container_section *s = container_at(c, container_n_sections(c) - 1);
    const bool *sparse = arg;
    CHECK(s->n && !s->bytes, "no bytes before they are verified");
    CHECK(*sparse || !memcmp(container_metadata(c), metadata, METADATA), "metadata is verified");
    if (accept_status) fail(accept_status, "%s: not accepted", container_name(c));
    return accept_status;
}

static void test_accept(void) {
    uint8_t file[ROOM] = {0};
    const size_t n = build(file, &small_plan);
    bool sparse = false;
    const container_want want = {
        .known_flags = KNOWN, .n_metadata = METADATA, .accept = judge, .arg = &sparse};
    container *c = NULL;
    CHECK(!container_open_memory(&c, file, n, "f.kv", &want) && c, "%s", mf_last_error());
    container_free(c);
    c = NULL;
    accept_status = MF_LIMIT;
    file[n - 1] ^= 1;  // the judgement comes before the sections are read
    CHECK(container_open_memory(&c, file, n, "f.kv", &want) == MF_LIMIT && !c, "refused");
    CHECK(!strcmp(mf_last_error(), "f.kv: not accepted"), "%s", mf_last_error());
    accept_status = 0;
    refuse(file, n, &want, "checksum of section 9.3", "last byte", n - 1);
}

// Files of 5 GB with nothing on the disk: refused at once.
static void test_sparse(void) {
    const off_t size = 5ll << 30;
    bool sparse = true;
    const container_want want = {
        .known_flags = KNOWN, .n_metadata = METADATA, .accept = judge, .arg = &sparse};
    const container_section section = {.type = 1, .n = (uint64_t)size - 192};
    container_plan plan = {.n_metadata = METADATA, .metadata = metadata, .n_sections = 1};
    plan.sections = &section;
    uint8_t front[192] = {0};
    accept_status = MF_LIMIT;
    for (int k = 0; k < 3; k++) {
        const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
        must(fd >= 0 && !ftruncate(fd, size), "a sparse file");
        if (k) {  // a right header, of a file that is cut, and of one that is all there
            container_section none = {.type = 1};
            container_plan with_none = plan;
            with_none.sections = &none;
            const size_t n_front = build(front, &with_none);
            put64(front + AT_N_FILE, (uint64_t)size + (k == 1));
            put64(front + HEADER + METADATA + AT_N, (uint64_t)size - n_front);
            const size_t end = HEADER + METADATA + ENTRY;
            put64(front + end, hash64_of(front, end, 0));
            must(pwrite(fd, front, n_front, 0) == (ssize_t)n_front, "pwrite");
        }
        close(fd);
        const uint64_t asked = mem_asked();
        const size_t alive = mem_alive();
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        container *c = NULL;
        const int status = container_open(&c, path, &want);
        clock_gettime(CLOCK_MONOTONIC, &b);
        CHECK(status == (k == 2 ? MF_LIMIT : MF_FORMAT) && !c, "%d: status %d: %s", k, status,
              mf_last_error());
        CHECK(b.tv_sec - a.tv_sec <= SPARSE_SECONDS, "%d: %d s", k, (int)(b.tv_sec - a.tv_sec));
        CHECK(mem_asked() - asked < 4096 && mem_alive() == alive, "%d: %llu bytes of memory", k,
              (ull)(mem_asked() - asked));
    }
    accept_status = 0;
    unlink(path);
}

static void test_open_refused(void) {
    container *c = NULL;
    CHECK(container_open(&c, folder, &want_small) == MF_IO, "a folder: %s", mf_last_error());
    CHECK(container_open(&c, "/dev/zero", &want_small) == MF_IO, "a device");
    CHECK(container_open(&c, "/tmp/minfer/absent.kv", &want_small) == MF_IO, "no file");
    CHECK(!c && strstr(mf_last_error(), "absent.kv: cannot open: No such file"), "%s",
          mf_last_error());
}

static void misuse(const container_plan *plan, const char *words) {
    container_writer *w = NULL;
    CHECK(container_create(&w, path, plan) == MF_INTERNAL && !w, "%s", words);
    CHECK(strstr(mf_last_error(), words) != NULL, "\"%s\" lacks \"%s\"", mf_last_error(), words);
}

static void test_misuse(void) {
    container_section s[2] = {{.type = 1}, {.type = 1}};
    container_plan plan = {.n_sections = 2, .sections = s};
    misuse(&plan, "section 1.0 is announced out of order");
    s[0].index = 1;
    misuse(&plan, "section 1.0 is announced out of order");
    s[0].type = 0;
    misuse(&plan, "section 0.1 is announced out of order");
    s[0] = (container_section){.type = 1, .n = UINT64_MAX - 100};
    s[1].index = 1;
    misuse(&plan, "bytes");
    s[0].n = s[1].n = 1ull << 62;
    misuse(&plan, "bytes");
    plan.n_sections = CONTAINER_MAX_SECTIONS + 1;
    misuse(&plan, "65537 sections");
    plan = (container_plan){.n_metadata = 12, .metadata = metadata};
    misuse(&plan, "12 bytes of metadata");

    // Bytes too many, too few, at the wrong time: the old file stands, the writer is done for.
    static const struct {
        uint32_t type, index;
        size_t n;
        const char *words;
    } wrong[] = {
        {1, 0, 62, "section 1.0: 1 bytes more than its 61"},
        {1, 1, 1, "section 1.0 has 0 of its 61 bytes"},
        {2, 0, 1, "section 1.0 has 0 of its 61 bytes"},
        {0, 0, 1, "section 0.0 was not announced"},
    };
    CHECK(!save(path, &(container_plan){0}, 1), "%s", mf_last_error());
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        container_writer *w = NULL;
        CHECK(!container_create(&w, path, &small_plan), "%s", mf_last_error());
        CHECK(container_append(w, wrong[i].type, wrong[i].index, noise, wrong[i].n) == MF_INTERNAL,
              "%zu", i);
        CHECK(strstr(mf_last_error(), wrong[i].words), "%s", mf_last_error());
        CHECK(container_append(w, 1, 0, noise, 1) == MF_INTERNAL, "after a failure");
        CHECK(container_commit(w) == MF_INTERNAL, "after a failure");
        container_writer_free(w);
    }
    container_writer *w = NULL;
    CHECK(!container_create(&w, path, &small_plan), "%s", mf_last_error());
    CHECK(!container_append(w, 1, 0, noise, 61), "%s", mf_last_error());
    CHECK(!container_append(w, 1, 1, NULL, 0), "nothing for an empty section");
    CHECK(!container_append(w, 1, 7, noise, 1), "%s", mf_last_error());
    CHECK(container_append(w, 1, 0, noise, 0) == MF_INTERNAL, "a section whose turn is over");
    container_writer_free(w);
    CHECK(!container_create(&w, path, &small_plan), "%s", mf_last_error());
    CHECK(container_commit(w) == MF_INTERNAL, "no bytes");
    container_writer_free(w);
    CHECK(!container_create(&w, path, &small_plan), "%s", mf_last_error());
    CHECK(!container_append(w, 1, 0, noise, 61), "%s", mf_last_error());
    container_writer_free(w);
    uint8_t file[ROOM];
    CHECK(file_bytes(file, ROOM) == 48, "the old file stands");
    char temporary[80];
    snprintf(temporary, sizeof temporary, "%s/.s.kv.save0", folder);
    CHECK(access(temporary, F_OK) && errno == ENOENT, "%s is left", temporary);
}

// Every call and every allocation fails once; the process dies in every call.
static void test_faults(void) {
    const container_section s[] = {{.type = 1, .n = 600000, .bytes = noise},
                                   {.type = 2, .n = 300, .bytes = noise}};
    const container_plan old = {.n_metadata = METADATA, .metadata = metadata};
    const container_plan new = {.n_sections = 2, .sections = s};
    static uint8_t file[1 << 20];
    const size_t alive = mem_alive();
    for (int call = 0; call < FAULT_CALLS; call++) {
        for (long at = 0, struck = 1; struck && at < 64; at++) {
            for (int dies = 0; dies < 2; dies++) {
                CHECK(!save(path, &old, 1), "%s", mf_last_error());
                fflush(stdout);
                const pid_t child = fork();
                must(child >= 0, "fork");
                if (!child) {
                    fault_on(call, at, dies ? FAULT_DIE_BEFORE : FAULT_ERROR, EIO);
                    const int status = save(path, &new, 100000);
                    _exit((status && status != MF_IO) || mem_alive() != alive ? 3 : fault_off());
                }
                int how;
                must(waitpid(child, &how, 0) == child, "waitpid");
                struck = WIFSIGNALED(how) || WEXITSTATUS(how);
                CHECK(WIFSIGNALED(how) || WEXITSTATUS(how) < 3, "%s %ld: status or memory",
                      fault_names[call], at);
                container *c = NULL;
                const bool is_old = file_bytes(file, sizeof file) < 100;
                const container_want want = {.n_metadata = is_old ? METADATA : 0};
                CHECK(!container_open(&c, path, &want), "%s %ld: %s", fault_names[call], at,
                      mf_last_error());
                container_free(c);
            }
        }
    }
    CHECK(!save(path, &new, 1000), "%s", mf_last_error());
    for (size_t i = 0, done = 0; !done; i++) {
        mem_fail_after(i);
        const int status = save(path, &new, 100000);
        mem_fail_after(SIZE_MAX);
        CHECK(mem_alive() == alive, "save, allocation %zu: memory left", i);
        CHECK(status ? status == MF_NOMEM : i >= 5, "save, allocation %zu: status %d", i, status);
        done = !status;
    }
    for (size_t i = 0, done = 0; !done; i++) {
        container *c = NULL;
        mem_fail_after(i);
        const int status = container_open(&c, path, &(container_want){0});
        mem_fail_after(SIZE_MAX);
        container_free(c);
        CHECK(mem_alive() == alive, "open, allocation %zu: memory left", i);
        CHECK(status ? status == MF_NOMEM : i >= 3, "open, allocation %zu: status %d", i, status);
        done = !status;
    }
}

int main(void) {
    must(mkdtemp(folder) != NULL, folder);
    snprintf(path, sizeof path, "%s/s.kv", folder);
    uint64_t x = 1;
    for (size_t i = 0; i < BIG; i++) noise[i] = (uint8_t)((x = x * 6364136223846793005u + 1) >> 56);
    test_round_trip();
    test_big();
    test_threads();
    test_heap_patterns();
    test_every_byte();
    test_fields();
    test_by_name();
    test_accept();
    test_sparse();
    test_open_refused();
    test_misuse();
    test_faults();
    unlink(path);
    CHECK(!rmdir(folder), "%s is not empty", folder);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
