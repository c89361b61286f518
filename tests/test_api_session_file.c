// The functions of minfer.h for a session file without an engine: they say what the engine that
// saved it says, row for row; a file that says something no engine could is refused.
#define _DEFAULT_SOURCE
#include <sys/stat.h>
#include <unistd.h>

#include "../engine/api_engine.h"
#include "../engine/hash.h"
#include "api_kv_test.h"

enum { FILE_ROOM = 1 << 16, ROW_ROOM = 1 << 10 };
// Offsets of numbers in a file's header and metadata (docs/session-format.md).
enum { AT_FLAGS = 12, AT_N_HEADER = 24, AT_METADATA = 40, AT_TABLE = 88, ENTRY_BYTES = 32 };

static const char path[] = "/tmp/minfer_session_file.kv";

typedef struct file {
    uint8_t bytes[FILE_ROOM];
    size_t n;
} file;

static void read_file(file *f) {
    FILE *const stream = fopen(path, "rb");
    f->n = stream ? fread(f->bytes, 1, sizeof f->bytes, stream) : 0;
    if (stream) fclose(stream);
    check(f->n && f->n < sizeof f->bytes, "the file has %zu bytes", f->n);
}

static void write_file(const file *f) {
    FILE *const stream = fopen(path, "wb");
    check(stream && fwrite(f->bytes, 1, f->n, stream) == f->n && !fclose(stream), "no file");
}

static uint64_t word(const file *f, size_t at) {
    uint64_t w;
    memcpy(&w, f->bytes + at, sizeof w);
    return w;
}

// All checksums put right again.
static void repair(file *f) {
    const size_t n_header = (size_t)word(f, AT_N_HEADER);
    for (size_t at = AT_TABLE; at + 8 < n_header; at += ENTRY_BYTES) {
        const uint64_t sum = hash64_of(f->bytes + word(f, at + 8), (size_t)word(f, at + 16), 0);
        memcpy(f->bytes + at + 24, &sum, sizeof sum);
    }
    const uint64_t sum = hash64_of(f->bytes, n_header - 8, 0);
    memcpy(f->bytes + n_header - 8, &sum, sizeof sum);
}

static mf_session *must_open(uint32_t n_threads) {
    const mf_session_options o = {.size = sizeof o, .n_threads = n_threads};
    mf_session *s = NULL;
    ACCEPTED(mf_session_open(&s, path, &o));
    return s;
}

// ---- what it says ----------------------------------------------------------------------------

static void test_info(const mf_session *s, mf_engine *e, const char *host) {
    mf_session_info i = {.size = sizeof i};
    ACCEPTED(mf_session_get_info(&i, s));
    struct stat is;
    check(!stat(path, &is) && i.file_bytes == (uint64_t)is.st_size, "file_bytes");
    check(i.version == 2 && !i.flags && !strcmp(i.device, "cpu"), "version %u", i.version);
    check(!strcmp(i.kv_format, mf_engine_kv_format(e)), "format %s", i.kv_format);
    mf_model_info m = {.size = sizeof m};
    ACCEPTED(mf_model_get_info(&m, e->m));
    check(i.n_layer == m.n_layer && i.n_embd == m.n_embd && i.n_head_kv == m.n_head_kv &&
              i.head_dim == m.head_dim && i.n_ctx == CTX,
          "the model's numbers");
    check(i.row_bytes == m.n_head_kv * m.head_dim * 4, "row_bytes %u", i.row_bytes);
    check(i.n_groups == N_GROUPS && i.n_seqs == 3, "%u groups, %u sequences", i.n_groups, i.n_seqs);
    check(i.n_sections == 3 + i.n_groups + 2 * i.n_layer, "%u sections", i.n_sections);
    check(!memcmp(i.fingerprint, e->m->fingerprint, sizeof i.fingerprint), "fingerprint");
    check(i.host_bytes == strlen(host) && !memcmp(i.host_state, host, i.host_bytes), "host state");
}

static void test_sections(const mf_session *s, const file *f) {
    static const char *const names[] = {"KINDS", "SEQS", "ROWS", "ROWS"};
    mf_session_info i = {.size = sizeof i};
    ACCEPTED(mf_session_get_info(&i, s));
    for (uint32_t k = 0; k < i.n_sections; k++) {
        mf_session_section section = {.size = sizeof section};
        ACCEPTED(mf_session_get_section(&section, s, k));
        const uint32_t layer = k - 2 - N_GROUPS;
        const char *const name = k < 4                   ? names[k]
                                 : k + 1 == i.n_sections ? "HOST"
                                 : layer < i.n_layer     ? "K"
                                                         : "V";
        check(!strcmp(section.name, name), "section %u: %s", k, section.name);
        check(section.checksum == hash64_of(section.data, section.bytes, 0) &&
                  !memcmp(section.data, f->bytes + section.offset, section.bytes),
              "section %u: its bytes", k);
    }
}

// The rows of a sequence in the file are those of the engine's cells.
static void compare_rows(const mf_session *s, mf_engine *e, uint32_t index, int32_t seq,
                         uint32_t layer) {
    uint32_t group = 99;
    ACCEPTED(mf_session_layer_group(&group, s, layer));
    mf_kv_span spans[MAX_SPANS], cells[MAX_SPANS];
    size_t n = 0, n_cells = 0;
    ACCEPTED(mf_session_spans(&n, spans, MAX_SPANS, s, index, group));
    ACCEPTED(mf_kv_spans(&n_cells, cells, MAX_SPANS, e, seq, group));
    mf_session_info i = {.size = sizeof i};
    ACCEPTED(mf_session_get_info(&i, s));
    for (int value = 0; value < 2; value++) {
        mf_session_section section = {.size = sizeof section};
        ACCEPTED(
            mf_session_get_section(&section, s, 2 + N_GROUPS + layer + (value ? i.n_layer : 0)));
        size_t at = 0;
        int32_t off = 0;
        for (size_t k = 0; k < n; k++) {
            for (int32_t r = 0; r < spans[k].len; r++) {
                if (at < n_cells && off == cells[at].len) at++, off = 0;
                if (at == n_cells) break;
                uint8_t row[ROW_ROOM];
                e->m->dev->get_rows(e->b, layer, value, (uint32_t)(cells[at].cell + off), 1, row);
                const size_t number = (size_t)(spans[k].cell + r);
                check(spans[k].pos + r == cells[at].pos + off &&
                          !memcmp(row, (const uint8_t *)section.data + number * i.row_bytes,
                                  i.row_bytes),
                      "sequence %d, layer %u, position %d", seq, layer, spans[k].pos + r);
                off++;
            }
        }
        check(at + 1 == n_cells && off == cells[at].len, "sequence %d has other rows", seq);
    }
}

static void test_seqs(const mf_session *s, mf_engine *e) {
    for (uint32_t i = 0; i < 3; i++) {
        mf_session_seq seq = {.size = sizeof seq};
        ACCEPTED(mf_session_get_seq(&seq, s, i));
        uint32_t len, next, clean;
        ACCEPTED(mf_kv_len(&len, e, (int32_t)i));
        ACCEPTED(mf_kv_next_pos(&next, e, (int32_t)i));
        ACCEPTED(kv_cache_clean(&clean, e->kv, (int32_t)i));
        check(seq.seq == (int32_t)i && seq.len == len && seq.next_pos == next && seq.clean == clean,
              "sequence %u: %u rows, then %u, clean %u", i, seq.len, seq.next_pos, seq.clean);
        for (uint32_t layer = 0; layer < e->m->p.n_layer; layer++)
            compare_rows(s, e, i, (int32_t)i, layer);
    }
    mf_kv_span a[MAX_SPANS], b[MAX_SPANS];
    size_t n = 0;
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        ACCEPTED(mf_session_spans(&n, a, MAX_SPANS, s, 0, g));
        ACCEPTED(mf_session_spans(&n, b, MAX_SPANS, s, 1, g));
        check(a[0].cell == b[0].cell && a[0].pos == b[0].pos, "shared rows have one number");
        ACCEPTED(mf_session_spans(&n, b, MAX_SPANS, s, 2, g));
        check(n == 2 && b[1].pos == b[0].pos + b[0].len + 5, "a gap of 5: %zu spans", n);
    }
}

static void test_groups(const mf_session *s, mf_engine *e) {
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        mf_session_group group = {.size = sizeof group};
        mf_kv_group live = {.size = sizeof live};
        ACCEPTED(mf_session_get_group(&group, s, g));
        ACCEPTED(mf_kv_get_group(&live, e, g));
        check(!strcmp(group.kind, live.kind) && group.n_layers == live.n_layers, "%s", group.kind);
        check(group.window == e->group_window[g], "window %u", group.window);
        check(group.n_rows == live.n_used - live.n_reserved, "%u rows", group.n_rows);
    }
    for (uint32_t i = 0; i < e->m->p.n_layer; i++) {
        uint32_t group = 99;
        ACCEPTED(mf_session_layer_group(&group, s, i));
        check(group == e->layer_group[i], "layer %u: group %u", i, group);
    }
}

// ---- what it refuses -------------------------------------------------------------------------

static void test_arguments(const mf_session *s) {
    mf_session *const before = (mf_session *)(uintptr_t)64;
    mf_session *out = before;
    const mf_session_options none = {0};
    REFUSED(MF_ARG, "out is NULL", mf_session_open(NULL, path, NULL));
    REFUSED(MF_ARG, "path is NULL", mf_session_open(&out, NULL, NULL));
    REFUSED(MF_ARG, "options.size", mf_session_open(&out, path, &none));
    const mf_session_options many = {.size = sizeof many, .n_threads = UINT32_MAX};
    REFUSED(MF_ARG, "threads", mf_session_open(&out, path, &many));
    REFUSED(MF_IO, "nothing.kv", mf_session_open(&out, "/tmp/minfer_nothing.kv", NULL));
    check(out == before, "a refusal wrote");
    mf_session_info info = {.size = sizeof info};
    mf_session_section section = {.size = sizeof section};
    mf_session_group group = {.size = sizeof group};
    mf_session_seq seq = {.size = sizeof seq};
    mf_kv_span spans[MAX_SPANS];
    uint32_t g = 7;
    size_t n = 7;
    REFUSED(MF_ARG, "out is NULL", mf_session_get_info(NULL, s));
    REFUSED(MF_ARG, "session is NULL", mf_session_get_info(&info, NULL));
    REFUSED(MF_ARG, "index is 99", mf_session_get_section(&section, s, 99));
    REFUSED(MF_ARG, "session is NULL", mf_session_get_section(&section, NULL, 0));
    REFUSED(MF_ARG, "group is 2; the file has 2", mf_session_get_group(&group, s, 2));
    REFUSED(MF_ARG, "session is NULL", mf_session_get_group(&group, NULL, 0));
    REFUSED(MF_ARG, "layer is 4294967295", mf_session_layer_group(&g, s, UINT32_MAX));
    REFUSED(MF_ARG, "group is NULL", mf_session_layer_group(NULL, s, 0));
    REFUSED(MF_ARG, "index is 3; the file has 3", mf_session_get_seq(&seq, s, 3));
    REFUSED(MF_ARG, "session is NULL", mf_session_get_seq(&seq, NULL, 0));
    REFUSED(MF_ARG, "index is 3", mf_session_spans(&n, spans, MAX_SPANS, s, 3, 0));
    REFUSED(MF_ARG, "group is 2", mf_session_spans(&n, spans, MAX_SPANS, s, 0, 2));
    REFUSED(MF_ARG, "n is NULL", mf_session_spans(NULL, spans, MAX_SPANS, s, 0, 0));
    REFUSED(MF_ARG, "there are 2 spans", mf_session_spans(&n, spans, 1, s, 2, 0));
    REFUSED(MF_ARG, "out.size is 0", mf_session_get_info(&(mf_session_info){0}, s));
    check(n == 7 && g == 7, "a refusal wrote");
    ACCEPTED(mf_session_spans(&n, NULL, 0, s, 2, 0));
    check(n == 2, "%zu spans", n);
    mf_session_free(NULL);
}

// A number of the metadata that does not fit the others; one that nothing contradicts is fine.
static void test_metadata(const file *good) {
    static const struct {
        const char *words;
        size_t at;
        uint32_t value;
        int status;
    } rows[] = {
        {"the backend is 7", 0, 7, MF_UNSUPPORTED},
        {"n_layer is 0", 4, 0, MF_FORMAT},
        {"section 1.0 (KINDS) has 192 bytes, 256", 4, 4, MF_FORMAT},
        {"n_layer is 65537", 4, 65537, MF_FORMAT},
        {"at most", 8, 1, MF_FORMAT},
        {NULL, 8, 4096, MF_OK},
        {NULL, 12, 1, MF_OK},
        {"n_embd is 0", 12, 0, MF_FORMAT},
        {"1 KV heads of 4294967295: no such", 20, UINT32_MAX, MF_FORMAT},
        {"0 KV heads", 16, 0, MF_FORMAT},
        {"heads of", 16, 3, MF_FORMAT},
        {"the bytes of a row are 4", 24, 4, MF_FORMAT},
        {"n_groups is 0", 28, 0, MF_FORMAT},
        {"n_groups is 9", 28, 9, MF_FORMAT},
        {"section 3.2 (ROWS) is missing", 28, 3, MF_FORMAT},
        {"sections", 28, 1, MF_FORMAT},
        {NULL, 32, 1, MF_OK},
    };
    static file changed;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        changed = *good;
        memcpy(changed.bytes + AT_METADATA + rows[i].at, &rows[i].value, 4);
        repair(&changed);
        write_file(&changed);
        mf_session *s = NULL;
        if (rows[i].status)
            REFUSED(rows[i].status, rows[i].words, mf_session_open(&s, path, NULL));
        else
            ACCEPTED(mf_session_open(&s, path, NULL));
        mf_session_free(s);
    }
}

static void test_kinds(const file *good) {
    static const struct {
        const char *words, *kind;
    } rows[] = {
        {"layer 0 stores \"\"", ""},
        {"layer 0 stores \"full\"", "full"},
        {"layer 0 stores", "sliding-9/f32/kv1x16/\x7f"},
        {"layer 0 stores", "sliding-0/f32/kv1x16"},
        {"layer 0 stores", "sliding-007/f32/kv1x16"},
        {"layer 0 stores", "sliding-99999999999999999999999/f32/kv1x16"},
        {"layer 0 stores", "sliding-16777217/f32/kv1x16"},
        {"layer 0 stores", "full/f32/kv1x16/"},
        {"layer 0 stores", "full/q8_0/kv1x16"},
        {"layer 0 stores", "full/f32/kv1x160"},
        {"layer 0 stores", "full/f32/kv1x16\n"},
    };
    static file changed;
    const size_t kinds = (size_t)word(good, AT_TABLE + 8);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        changed = *good;
        memset(changed.bytes + kinds, 0, 64);
        memcpy(changed.bytes + kinds, rows[i].kind, strlen(rows[i].kind));
        repair(&changed);
        write_file(&changed);
        mf_session *s = NULL;
        REFUSED(MF_FORMAT, rows[i].words, mf_session_open(&s, path, NULL));
    }
    for (size_t at = 0; at < 64; at++) {  // and every byte of it
        changed = *good;
        changed.bytes[kinds + at] ^= 0x80;
        repair(&changed);
        write_file(&changed);
        mf_session *s = NULL;
        REFUSED(MF_FORMAT, "layer 0 stores", mf_session_open(&s, path, NULL));
    }
    changed = *good;  // all layers of one kind, in a file of two groups
    memcpy(changed.bytes + kinds + 128, changed.bytes + kinds, 64);
    repair(&changed);
    write_file(&changed);
    mf_session *s = NULL;
    REFUSED(MF_FORMAT, "its layers are of 1 kinds", mf_session_open(&s, path, NULL));
    memcpy(changed.bytes + kinds + 128, "sliding-9", 9);  // three kinds
    memcpy(changed.bytes + kinds + 64, good->bytes + kinds + 128, 64);
    repair(&changed);
    write_file(&changed);
    REFUSED(MF_FORMAT, "its layers are of more kinds", mf_session_open(&s, path, NULL));
}

// What is damaged, and a sequence that cannot be, are found without a model too.
static void test_damage(const file *good) {
    static file changed;
    mf_session *s = NULL;
    for (size_t at = 0; at < good->n; at += 7) {
        changed = *good;
        changed.bytes[at] ^= 1;
        write_file(&changed);
        REFUSED(MF_FORMAT, "session_file.kv: ", mf_session_open(&s, path, NULL));
    }
    const size_t seqs = (size_t)word(good, AT_TABLE + ENTRY_BYTES + 8);
    static const uint32_t wrong[] = {0, 4, UINT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        changed = *good;
        memcpy(changed.bytes + seqs, &wrong[i], 4);
        repair(&changed);
        write_file(&changed);
        REFUSED(MF_FORMAT, "SEQS", mf_session_open(&s, path, NULL));
    }
    for (uint32_t id = 4095; id < 4097; id++) {
        changed = *good;
        memcpy(changed.bytes + seqs + 8, &id, 4);
        repair(&changed);
        write_file(&changed);
        if (id > 4095)
            REFUSED(MF_FORMAT, "SEQS: sequence 0 has id 4096", mf_session_open(&s, path, NULL));
        else
            ACCEPTED(mf_session_open(&s, path, NULL));
        mf_session_free(s);
        s = NULL;
    }
    write_file(good);
}

static void test_short_of_memory(void) {
    const size_t alive = mem_alive();
    int status = MF_NOMEM;
    size_t n = 0;
    for (; status && n < 1000; n++) {
        mf_session *s = NULL;
        mem_fail_after(n);
        status = mf_session_open(&s, path, NULL);
        mem_fail_after(SIZE_MAX);
        check(!status || status == MF_NOMEM, "allocation %zu: status %d", n, status);
        mf_session_free(s);
        check(mem_alive() == alive, "allocation %zu leaves something", n);
    }
    check(!status && n > 5, "status %d after %zu tries", status, n);
}

static void test_progress(const file *good) {
    for (uint32_t n_threads = 0; n_threads < 4; n_threads++) {
        uint64_t done[2] = {5, 5};
        const mf_session_options o = {.size = sizeof o, .n_threads = n_threads, .progress = done};
        mf_session *s = NULL;
        ACCEPTED(mf_session_open(&s, path, &o));
        check(done[0] == good->n && done[1] == good->n, "%u threads: progress", n_threads);
        mf_session_free(s);
    }
}

int main(void) {
    unsetenv("MINFER_ISA");
    unsetenv("MINFER_CACHE_TYPE");
    const size_t alive = mem_alive();
    const gguf_build b = build_model(&two_groups);
    mf_model *model = must_load(&b);
    mf_engine *e = start_edited(model);
    static const char host[] = "what the host wants to find again";
    const mf_kv_save_options o = {.size = sizeof o, .host_state = host, .host_bytes = strlen(host)};
    ACCEPTED(mf_kv_save(e, path, &o));
    static file good;
    read_file(&good);
    for (uint32_t n_threads = 1; n_threads < 4; n_threads++) {
        mf_session *s = must_open(n_threads);
        test_info(s, e, host);
        test_sections(s, &good);
        test_seqs(s, e);
        test_groups(s, e);
        test_arguments(s);
        mf_session_free(s);
    }
    test_metadata(&good);
    test_kinds(&good);
    test_damage(&good);
    test_short_of_memory();
    test_progress(&good);
    mf_engine_free(e);
    mf_model_free(model);
    check(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
    unlink(path);
    free(b.bytes);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
