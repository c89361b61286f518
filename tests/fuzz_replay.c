// Runs a libFuzzer target (LLVMFuzzerTestOneInput) without libFuzzer: the files and folders given,
// and after them mutants of those files, the same ones in every run.
//
//   fuzz_replay [-n mutants] [-s seed] [-w last] FILE|FOLDER...
//
// With -w every mutant is written to the file `last` before it runs: after a crash it is the
// culprit.
//
// The mutants know how binary formats are built, though no format in particular: words that look
// like a length, a count or an offset (little-endian and not above the file's size) are replaced by
// values that overflow, wrap or are off by one more often than other bytes are.
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

enum { MAX_INPUTS = 4096, MAX_EDITS = 4, MAX_GROWTH = 512, WORD_TRIES = 16 };

typedef struct input {
    uint8_t *bytes;
    size_t n;
} input;

static input inputs[MAX_INPUTS];
static size_t n_inputs;
static uint64_t state = 1;
static const char *last;  // of -w

// splitmix64
static uint64_t next(void) {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static size_t below(size_t n) { return n ? (size_t)(next() % n) : 0; }

static void give_up(const char *what, const char *path) {
    fprintf(stderr, "fuzz_replay: %s: %s\n", path, what);
    exit(2);
}

static void *room_for(size_t n) {
    void *p = malloc(n ? n : 1);
    if (!p) give_up("out of memory", "input");
    return p;
}

static void add_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END)) give_up("cannot be read", path);
    const long n = ftell(f);
    if (n < 0 || fseek(f, 0, SEEK_SET)) give_up("cannot be read", path);
    if (n_inputs == MAX_INPUTS) give_up("one input too many", path);
    input *in = &inputs[n_inputs++];
    in->n = (size_t)n;
    in->bytes = room_for(in->n);
    if (fread(in->bytes, 1, in->n, f) != in->n) give_up("cannot be read", path);
    fclose(f);
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// A folder's files in the order of their names, so that the mutants do not depend on the disk.
static void add_path(const char *path) {
    DIR *dir = opendir(path);
    if (!dir) {
        add_file(path);
        return;
    }
    char *names[MAX_INPUTS];
    size_t n = 0;
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        if (e->d_name[0] == '.') continue;
        if (n == MAX_INPUTS) give_up("one file too many", path);
        const size_t len = strlen(path) + strlen(e->d_name) + 2;
        names[n] = room_for(len);
        snprintf(names[n++], len, "%s/%s", path, e->d_name);
    }
    closedir(dir);
    qsort(names, n, sizeof *names, by_name);
    for (size_t i = 0; i < n; i++) {
        add_file(names[i]);
        free(names[i]);
    }
}

// A copy of exactly n bytes, so that an address sanitizer sees a read of byte n.
static void run(const uint8_t *bytes, size_t n) {
    uint8_t *copy = room_for(n);
    if (n) memcpy(copy, bytes, n);
    if (last) {
        FILE *f = fopen(last, "wb");
        if (!f || fwrite(copy, 1, n, f) != n || fclose(f)) give_up("cannot be written", last);
    }
    LLVMFuzzerTestOneInput(copy, n);
    free(copy);
}

static uint64_t interesting(size_t n, uint64_t old) {
    static const uint64_t values[] = {
        0,
        1,
        2,
        3,
        7,
        8,
        13,
        31,
        64,
        255,
        256,
        65535,
        65536,
        0x7fffffff,
        0x80000000,
        0xffffffff,
        0x100000000,
        0x2000000000000000,
        0x4000000000000000,
        0x7fffffffffffffff,
        0x8000000000000000,
        0xfffffffffffffff8,
        0xffffffffffffffff,
    };
    const size_t n_values = sizeof values / sizeof *values;
    switch (below(8)) {
        case 0:
            return old + 1;
        case 1:
            return old - 1;
        case 2:
            return n - below(32);
        case 3:
            return old << below(8);
        case 4:
            return next();
        default:
            return values[below(n_values)];
    }
}

// Where a word of `width` bytes that looks like a size lies; any place if none is found quickly.
static size_t find_word(const uint8_t *bytes, size_t n, size_t width) {
    size_t at = 0;
    for (int i = 0; i < WORD_TRIES; i++) {
        uint64_t value = 0;
        at = below(n - width + 1);
        memcpy(&value, bytes + at, width);
        if (value && value <= n && bytes[at + width - 1] == 0) break;
    }
    return at;
}

// One edit of bytes [n], which have room for MAX_GROWTH more. Returns the new n.
static size_t edit(uint8_t *bytes, size_t n) {
    static const size_t widths[] = {1, 2, 4, 4, 8, 8, 8};
    const size_t width = widths[below(sizeof widths / sizeof *widths)];
    const size_t at = below(n), len = 1 + below(32);
    const input *other = &inputs[below(n_inputs)];
    switch (below(10)) {
        case 0:  // cut
            return at;
        case 1:  // flip a bit
            if (n) bytes[at] ^= (uint8_t)(1u << below(8));
            return n;
        case 2:  // remove a run
            if (n - at <= len) return at;
            memmove(bytes + at, bytes + at + len, n - at - len);
            return n - len;
        case 3:  // repeat a run
            if (n - at < len) return n;
            memmove(bytes + at + len, bytes + at, n - at);
            return n + len;
        case 4:  // a run of another input
            if (other->n < len || n - at < len) return n;
            memcpy(bytes + at, other->bytes + below(other->n - len + 1), len);
            return n;
        default: {  // a size
            if (n < width) return n;
            const size_t word = find_word(bytes, n, width);
            uint64_t value = 0;
            memcpy(&value, bytes + word, width);
            value = interesting(n, value);
            memcpy(bytes + word, &value, width);
            return n;
        }
    }
}

static void run_mutant(void) {
    const input *in = &inputs[below(n_inputs)];
    uint8_t *bytes = room_for(in->n + MAX_GROWTH);
    size_t n = in->n;
    if (n) memcpy(bytes, in->bytes, n);
    for (size_t edits = 1 + below(MAX_EDITS); edits; edits--) n = edit(bytes, n);
    run(bytes, n);
    free(bytes);
}

int main(int argc, char **argv) {
    size_t mutants = 20000;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "-n") && i + 1 < argc)
            mutants = strtoul(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "-s") && i + 1 < argc)
            state = strtoull(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "-w") && i + 1 < argc)
            last = argv[++i];
        else
            add_path(argv[i]);
    }
    if (!n_inputs) give_up("no inputs; give files or folders", "arguments");
    for (size_t i = 0; i < n_inputs; i++) run(inputs[i].bytes, inputs[i].n);
    for (size_t i = 0; i < mutants; i++) run_mutant();
    printf("%zu inputs and %zu mutants passed, 0 failed\n", n_inputs, mutants);
    for (size_t i = 0; i < n_inputs; i++) free(inputs[i].bytes);
    return 0;
}
