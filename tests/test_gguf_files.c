// GGUF files on disk: what is no regular file, files that the system refuses, a file above 4 GB,
// and the parts of split models, whole and damaged in every way that a folder can be.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "../engine/alloc.h"
#include "../engine/gguf.h"
#include "gguf_test.h"

static char folder[] = "/tmp/minfer_gguf_XXXXXX";

static const char *in_folder(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const gguf_build *b) {
    FILE *f = fopen(in_folder(name), "wb");
    if (!f || fwrite(b->bytes, 1, b->n, f) != b->n || fclose(f)) {
        printf("FAILED: %s cannot be written\n", in_folder(name));
        exit(1);
    }
}

// The message must have the file's name and the words.
static void expect_path(const char *path, int status, const char *words) {
    const size_t alive = mem_alive();
    mf_gguf *file = NULL;
    const int got = mf_gguf_open(&file, path);
    check(got == status && (got == MF_OK) == (file != NULL), "%s: status %d, not %d", path, got,
          status);
    if (got) {
        const char *name = strrchr(path, '/');
        check(strstr(mf_last_error(), name ? name : path) != NULL, "%s is not named", path);
        check(strstr(mf_last_error(), words) != NULL, "%s: the message lacks \"%s\"", path, words);
    }
    mf_gguf_free(file);
    check(mem_alive() == alive, "%s: %zu allocations left", path, mem_alive() - alive);
}

static void test_no_regular_file(void) {
    expect_path(folder, MF_IO, "is a folder");
    expect_path("/dev/zero", MF_IO, "is a character device");
    expect_path(in_folder("absent.gguf"), MF_IO, "cannot open: No such file");
    expect_path("", MF_IO, "cannot open");
    check(!mkfifo(in_folder("fifo"), 0600), "mkfifo");
    expect_path(in_folder("fifo"), MF_IO, "is a FIFO");
    unlink(in_folder("fifo"));

    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", folder);
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    check(fd >= 0 && !bind(fd, (struct sockaddr *)&address, sizeof address), "bind");
    expect_path(in_folder("socket"), MF_IO, "is a socket");
    close(fd);
    unlink(in_folder("socket"));

    char too_long[5000];
    memset(too_long, 'x', sizeof too_long);
    too_long[sizeof too_long - 1] = '\0';
    mf_gguf *file = NULL;
    check(mf_gguf_open(&file, too_long) == MF_IO, "a path of 4999 bytes");
    check(strstr(mf_last_error(), "File name too long") != NULL, "the long path hides the cause");
}

static void test_regular_file(void) {
    size_t mark[N_MARKS];
    gguf_build b = build_tiny(3, mark);
    write_file("tiny.gguf", &b);
    expect_path(in_folder("tiny.gguf"), MF_OK, "");
    check(!symlink("tiny.gguf", in_folder("link.gguf")), "symlink");
    expect_path(in_folder("link.gguf"), MF_OK, "");

    mf_gguf *file = NULL;
    check(!mf_gguf_open(&file, in_folder("tiny.gguf")), "tiny.gguf");
    const gguf_tensor *t = gguf_find_tensor(file, last_tensor);
    const uint8_t *wanted = b.bytes + mark[AT_DATA] + 224;
    check(t && !memcmp(t->data, wanted, t->bytes), "the last tensor's bytes");
    if (t) gguf_forget(file, t);
    check(t && !memcmp(t->data, wanted, t->bytes), "the last tensor's bytes after gguf_forget");
    mf_gguf_free(file);

    struct rlimit limit, none;
    getrlimit(RLIMIT_NOFILE, &limit);
    none = limit;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NOFILE, &none);
    expect_path(in_folder("tiny.gguf"), MF_IO, "cannot open: Too many open files");
    setrlimit(RLIMIT_NOFILE, &limit);

    // A folder's name longer than a message keeps the cause and the end of the path.
    char name[201], path[600];
    memset(name, 'd', sizeof name);
    name[200] = '\0';
    check(!mkdir(in_folder(name), 0700), "mkdir");
    snprintf(path, sizeof path, "%s/%s/tiny.gguf", folder, name);
    check(!symlink("../tiny.gguf", path), "symlink");
    expect_path(path, MF_OK, "");
    b.bytes[0] = 'g';
    write_file("tiny.gguf", &b);
    expect_path(path, MF_FORMAT, "not a GGUF file");
    check(mf_last_error()[0] == 'd', "the path is not cut in front");
    unlink(path);
    rmdir(in_folder(name));

    b.n = 0;
    write_file("empty.gguf", &b);
    expect_path(in_folder("empty.gguf"), MF_FORMAT, "magic number of a GGUF file needs 4 bytes");
    free(b.bytes);
}

// A file with a hole: tensor data beyond 4 GB.
static void test_large_file(void) {
    gguf_build b = {0};
    const uint64_t offset = 5ull << 30;
    put_header(&b, 3, 2, 0);
    put_tensor(&b, "near", DTYPE_Q8_0, 32, 1ull << 20, 0);
    put_tensor(&b, "far", DTYPE_Q8_0, 32, 1, offset);
    put_padding(&b, 32);
    write_file("large.gguf", &b);
    const off_t size = (off_t)(b.n + offset + 34);
    check(!truncate(in_folder("large.gguf"), size), "truncate to 5 GB");
    expect_path(in_folder("large.gguf"), MF_OK, "");
    check(!truncate(in_folder("large.gguf"), size - 1), "truncate to 5 GB");
    expect_path(in_folder("large.gguf"), MF_FORMAT, "tensor 1 (far)");
    unlink(in_folder("large.gguf"));
    free(b.bytes);
}

// ---- split models ------------------------------------------------------------------------------

typedef struct part {
    int no, count, total;  // -1: the key is left out
    const char *arch, *name;
    uint32_t alignment;  // 0: not said
    const char *tensor;  // the one this part has
} part;

static void write_part(const char *file_name, const part *p) {
    gguf_build b = {0};
    const int n_kv =
        (p->no >= 0) + (p->count >= 0) + (p->total >= 0) + !!p->arch + !!p->name + !!p->alignment;
    put_header(&b, 3, 1, (uint64_t)n_kv);
    if (p->arch) put_kv_text(&b, "general.architecture", p->arch);
    if (p->name) put_kv_text(&b, "general.name", p->name);
    if (p->alignment) put_kv_int(&b, "general.alignment", MF_GGUF_U32, p->alignment);
    if (p->no >= 0) put_kv_int(&b, "split.no", MF_GGUF_U16, (uint64_t)p->no);
    if (p->count >= 0) put_kv_int(&b, "split.count", MF_GGUF_U16, (uint64_t)p->count);
    if (p->total >= 0) put_kv_int(&b, "split.tensors.count", MF_GGUF_I32, (uint64_t)p->total);
    put_tensor(&b, p->tensor, DTYPE_F16, 8, 0, 0);
    put_padding(&b, p->alignment ? p->alignment : 32);
    for (int i = 0; i < 8; i++) put_int(&b, (uint64_t)p->tensor[0], 2);
    write_file(file_name, &b);
    free(b.bytes);
}

static const char *const part_names[3] = {"m-00001-of-00003.gguf", "m-00002-of-00003.gguf",
                                          "m-00003-of-00003.gguf"};

static const part good_parts[3] = {{0, 3, 3, "llama", "tiny", 0, "a"},
                                   {1, 3, 3, NULL, NULL, 64, "b"},
                                   {2, 3, 3, "llama", "tiny", 0, "c"}};

static void write_good_parts(void) {
    for (int i = 0; i < 3; i++) write_part(part_names[i], &good_parts[i]);
}

static void test_good_split(void) {
    write_good_parts();
    mf_gguf *file = NULL;
    check(!mf_gguf_open(&file, in_folder(part_names[0])), "the split model does not open");
    if (!file) return;
    check(mf_gguf_n_tensors(file) == 3 && mf_gguf_data_bytes(file) == 48, "its tensors");
    check(mf_gguf_n_kv(file) == 5, "%d values", (int)mf_gguf_n_kv(file));
    for (uint64_t i = 0; i < 3; i++) {
        const char name[] = {(char)('a' + i), '\0'};
        const gguf_tensor *t = gguf_find_tensor(file, name);
        check(t && t == gguf_tensor_at(file, i), "tensor %s", name);
        check(t && *(const uint16_t *)t->data == 'a' + i, "the data of tensor %s", name);
    }
    mf_gguf_free(file);

    const size_t alive = mem_alive();
    size_t n = 0;
    for (int status = MF_NOMEM; status && n < 200; n++) {
        mem_fail_after(n);
        status = mf_gguf_open(&file, in_folder(part_names[0]));
        mem_fail_after(SIZE_MAX);
        check(!status || status == MF_NOMEM, "status %d when allocation %zu fails", status, n);
        check(!status || mem_alive() == alive, "memory left when allocation %zu fails", n);
    }
    check(n > 15, "opening three parts takes %zu allocations", n - 1);
    mf_gguf_free(file);
}

static void test_bad_parts(void) {
    static const struct {
        int damaged;  // which part is replaced by:
        part part;
        const char *file, *words;  // that the message must have
    } rows[] = {
        {1, {1, 4, 3, NULL, NULL, 0, "b"}, "m-00002-of", "split.count = 4"},
        {1, {2, 3, 3, NULL, NULL, 0, "b"}, "m-00002-of", "split.no = 2"},
        {2, {0, 3, 3, NULL, NULL, 0, "c"}, "m-00003-of", "split.no = 0"},
        {1, {1, 3, 4, NULL, NULL, 0, "b"}, "m-00002-of", "split.tensors.count = 4"},
        {1, {-1, -1, -1, NULL, NULL, 0, "b"}, "m-00002-of", "split.count = 1"},
        {1, {-1, 3, 3, NULL, NULL, 0, "b"}, "m-00002-of", "split.no is missing"},
        {1, {3, 3, 3, NULL, NULL, 0, "b"}, "m-00002-of", "split.no = 3; 0 to 2"},
        {1,
         {1, 3, 3, "gemma3", NULL, 0, "b"},
         "m-00002-of",
         "is gemma3, in the first part it is llama"},
        {2, {2, 3, 3, "llama", "tinier", 0, "c"}, "m-00003-of", "general.name is tinier"},
        {2, {2, 3, 3, NULL, NULL, 0, "a"}, "m-00001-of", "two tensors have the name a"},
        {2, {2, 3, 3, NULL, NULL, 12, "c"}, "m-00003-of", "general.alignment = 12"},
        {0,
         {1, 3, 3, "llama", "tiny", 0, "a"},
         "m-00001-of",
         "part 2 of 3 (split.no = 1); open the first"},
        {0, {0, 2, 3, "llama", "tiny", 0, "a"}, "m-00001-of", "not end in -00001-of-00002.gguf"},
        {0, {0, 3, -1, "llama", "tiny", 0, "a"}, "m-00001-of", "split.tensors.count is missing"},
        {0, {-1, 3, 3, "llama", "tiny", 0, "a"}, "m-00001-of", "split.no is missing"},
        {0, {0, 3, 2, "llama", "tiny", 0, "a"}, "m-00002-of", "split.tensors.count = 3"},
        {0, {0, 3, 3, NULL, "tiny", 0, "a"}, "m-00003-of", "in the first part it is none"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        write_good_parts();
        write_part(part_names[rows[i].damaged], &rows[i].part);
        mf_gguf *file = NULL;
        const size_t alive = mem_alive();
        const int status = mf_gguf_open(&file, in_folder(part_names[0]));
        check(status == MF_FORMAT && !file && mem_alive() == alive, "row %zu: status %d", i,
              status);
        check(strstr(mf_last_error(), rows[i].file) != NULL, "row %zu names no %s", i,
              rows[i].file);
        check(strstr(mf_last_error(), rows[i].words) != NULL, "row %zu lacks %s", i, rows[i].words);
        mf_gguf_free(file);
    }
}

static void test_bad_folder(void) {
    mf_gguf *file = NULL;
    write_good_parts();
    expect_path(in_folder(part_names[1]), MF_FORMAT,
                "part 2 of 3 (split.no = 1); open the first part");

    // All parts agree on a number of tensors that is wrong.
    for (int i = 0; i < 3; i++) {
        part p = good_parts[i];
        p.total = 4;
        write_part(part_names[i], &p);
    }
    expect_path(in_folder(part_names[0]), MF_FORMAT,
                "split.tensors.count = 4, but the 3 parts have 3");

    write_good_parts();
    check(!truncate(in_folder(part_names[2]), 40), "truncate");
    check(mf_gguf_open(&file, in_folder(part_names[0])) == MF_FORMAT, "a part that is cut");
    check(strstr(mf_last_error(), "m-00003-of-00003.gguf:") != NULL, "the cut part is not named");
    unlink(in_folder(part_names[1]));
    check(mf_gguf_open(&file, in_folder(part_names[0])) == MF_IO, "a missing part");
    check(strstr(mf_last_error(), "m-00002-of-00003.gguf: cannot open: No such file") &&
              strstr(mf_last_error(), "part 2 of 3 must lie beside the first"),
          "the missing part is not named");
    check(!mkdir(in_folder(part_names[1]), 0700), "mkdir");
    check(mf_gguf_open(&file, in_folder(part_names[0])) == MF_IO, "a part that is a folder");
    check(strstr(mf_last_error(), "m-00002-of-00003.gguf: is a folder") != NULL,
          "folder not named");
    rmdir(in_folder(part_names[1]));

    write_part("renamed.gguf", &good_parts[0]);
    expect_path(in_folder("renamed.gguf"), MF_FORMAT, "does not end in -00001-of-00003.gguf");
    // What merging leaves behind, and a split into one part, are whole models under any name.
    for (int count = 0; count <= 1; count++) {
        write_part("renamed.gguf", &(part){-1, count, -1, "llama", "tiny", 0, "a"});
        expect_path(in_folder("renamed.gguf"), MF_OK, "");
    }
    const gguf_build garbage = {(uint8_t[]){'G', 'G', 'U', 'F', 3}, 5, 5};
    write_file(part_names[0], &garbage);
    expect_path(in_folder(part_names[0]), MF_FORMAT, "version needs 4 bytes");
    check(!file, "a failing open wrote to its out-parameter");

    gguf_build b = {0};
    put_header(&b, 3, 0, 3);
    put_kv_int(&b, "split.no", MF_GGUF_U16, 0);
    put_kv_int(&b, "split.count", MF_GGUF_U16, 3);
    put_kv_int(&b, "split.tensors.count", MF_GGUF_I32, 0);
    check(gguf_open_memory(&file, b.bytes, b.n, part_names[0]) == MF_FORMAT, "parts in memory");
    check(strstr(mf_last_error(), "bytes in memory are one part") != NULL, "parts in memory");
    free(b.bytes);
}

// No mapping of a file in the folder and no descriptor may be left.
static void test_nothing_left(int next_fd) {
    char line[512];
    FILE *f = fopen("/proc/self/maps", "r");
    int lines = 0, left = 0;
    for (; f && fgets(line, sizeof line, f); lines++) left += strstr(line, folder) != NULL;
    if (f) fclose(f);
    check(lines > 0 && left == 0, "%d of %d mappings are of the test's files", left, lines);
    const int fd = open("/dev/null", O_RDONLY);
    check(fd == next_fd, "descriptor %d is next, not %d: one was left open", fd, next_fd);
    close(fd);
}

int main(void) {
    if (!mkdtemp(folder)) {
        printf("FAILED: no folder %s\n", folder);
        return 1;
    }
    const int next_fd = open("/dev/null", O_RDONLY);
    close(next_fd);
    test_no_regular_file();
    test_regular_file();
    test_large_file();
    test_good_split();
    test_bad_parts();
    test_bad_folder();
    test_nothing_left(next_fd);
    check(mem_alive() == 0, "%zu allocations left", mem_alive());
    const char *const names[] = {"tiny.gguf",   "link.gguf",   "empty.gguf", "renamed.gguf",
                                 part_names[0], part_names[1], part_names[2]};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unlink(in_folder(names[i]));
    check(!rmdir(folder), "%s is not empty", folder);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
