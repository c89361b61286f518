// The GGUF reader against hostile files. One valid file of about 4 KB is built in memory; each row
// of a table damages a copy and says which status and which words the refusal must have. Then every
// prefix, every flipped bit of the header, failing allocations, limits, and what the getters
// refuse.
//
//   test_gguf [--write FOLDER]   writes the valid file and the damaged ones as seeds for a fuzzer
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/alloc.h"
#include "../engine/gguf.h"
#include "gguf_test.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

// ---- damage, row by row ------------------------------------------------------------------------

typedef struct change {
    enum mark mark;
    int delta;     // from the mark
    size_t width;  // bytes of `value` to write
    uint64_t value;
    const char *text;  // to write instead, without its zero
} change;

typedef struct row {
    const char *name;
    int status;
    const char *words;  // the message has them
    change change[2];
} row;

#define KEY_NAME(...)                    \
    {                                    \
        { AT_KEY, 0, 0, 0, __VA_ARGS__ } \
    }

static const row rows[] = {
    {"nothing changed", MF_OK, "", {{0}}},
    {"wrong magic", MF_FORMAT, "67 67 6d 6c", {{AT_START, 0, 0, 0, "ggml"}}},
    {"magic of the other byte order", MF_UNSUPPORTED, "big-endian", {{AT_START, 0, 0, 0, "FUGG"}}},
    {"version of the other byte order",
     MF_UNSUPPORTED,
     "big-endian",
     {{AT_START, 4, 4, 3u << 24, 0}}},
    {"version 0", MF_UNSUPPORTED, "version 0", {{AT_START, 4, 4, 0, 0}}},
    {"version 1", MF_UNSUPPORTED, "version 1;", {{AT_START, 4, 4, 1, 0}}},
    {"version 4", MF_UNSUPPORTED, "version 4;", {{AT_START, 4, 4, 4, 0}}},
    {"version -1", MF_UNSUPPORTED, "version 4294967295", {{AT_START, 4, 4, UINT32_MAX, 0}}},

    {"no tensors", MF_OK, "", {{AT_START, 8, 8, 0, 0}}},
    {"a tensor too many", MF_FORMAT, "tensor 4", {{AT_START, 8, 8, 5, 0}}},
    {"2^31 tensors", MF_FORMAT, "n_tensors = 2147483648", {{AT_START, 8, 8, 1u << 31, 0}}},
    {"2^63 tensors",
     MF_FORMAT,
     "n_tensors = 9223372036854775808",
     {{AT_START, 8, 8, 1ull << 63, 0}}},
    {"-1 tensors",
     MF_FORMAT,
     "n_tensors = 18446744073709551615",
     {{AT_START, 8, 8, UINT64_MAX, 0}}},
    {"no keys", MF_FORMAT, "tensor 0 (general.architecture)", {{AT_START, 16, 8, 0, 0}}},
    {"a key too many", MF_FORMAT, "tensor", {{AT_START, 16, 8, 26, 0}}},
    {"2^31 keys", MF_FORMAT, "n_kv = 2147483648", {{AT_START, 16, 8, 1u << 31, 0}}},
    {"2^63 keys", MF_FORMAT, "n_kv = 9223372036854775808", {{AT_START, 16, 8, 1ull << 63, 0}}},
    {"-1 keys", MF_FORMAT, "n_kv = 18446744073709551615", {{AT_START, 16, 8, UINT64_MAX, 0}}},

    {"key of length 0", MF_FORMAT, "key 1: its name has 0 bytes", {{AT_KEY, -8, 8, 0, 0}}},
    {"key of length 2^16", MF_FORMAT, "its name has 65536", {{AT_KEY, -8, 8, 65536, 0}}},
    {"key of length 2^63",
     MF_FORMAT,
     "its name has 9223372036854775808",
     {{AT_KEY, -8, 8, 1ull << 63, 0}}},
    {"key longer than the file",
     MF_FORMAT,
     "key 1: the name needs 60000",
     {{AT_KEY, -8, 8, 60000, 0}}},
    {"key with a NUL", MF_FORMAT, "key 1: its name has a NUL", {{AT_KEY, 3, 1, 0, 0}}},
    {"key with a lone continuation byte", MF_FORMAT, "key 1: its name is not UTF-8",
     KEY_NAME("\x80")},
    {"key with an overlong slash", MF_FORMAT, "not UTF-8", KEY_NAME("\xc0\xaf")},
    {"key with an overlong 3-byte form", MF_FORMAT, "not UTF-8", KEY_NAME("\xe0\x80\xaf")},
    {"key with a surrogate", MF_FORMAT, "not UTF-8", KEY_NAME("\xed\xa0\x80")},
    {"key above U+10FFFF", MF_FORMAT, "not UTF-8", KEY_NAME("\xf4\x90\x80\x80")},
    {"key with a 5-byte form", MF_FORMAT, "not UTF-8", KEY_NAME("\xf8\x88\x80\x80\x80")},
    {"key ending within a character",
     MF_FORMAT,
     "not UTF-8",
     {{AT_KEY, 11, 0, 0, "\xc3"}, {AT_TYPE, 0, 4, 0x80, 0}}},
    {"key with a character cut short", MF_FORMAT, "not UTF-8", KEY_NAME("\xc3x")},
    {"key with a control character", MF_OK, "", KEY_NAME("\x1b[31m")},
    {"key twice",
     MF_FORMAT,
     "keys 0 and 24 have the same name general.architecture",
     {{AT_LAST_KEY, 0, 0, 0, first_key}}},
    {"value type 13", MF_FORMAT, "key 1 (general.name): value type 13", {{AT_TYPE, 0, 4, 13, 0}}},
    {"value type 255", MF_FORMAT, "value type 255", {{AT_TYPE, 0, 4, 255, 0}}},
    {"value type -1", MF_FORMAT, "value type 4294967295", {{AT_TYPE, 0, 4, UINT32_MAX, 0}}},

    {"string of 2^63 bytes",
     MF_FORMAT,
     "(general.name): the string needs 9223372036854775808",
     {{AT_TEXT, 0, 8, 1ull << 63, 0}}},
    {"string of -1 bytes",
     MF_FORMAT,
     "needs 18446744073709551615",
     {{AT_TEXT, 0, 8, UINT64_MAX, 0}}},
    {"string not UTF-8",
     MF_FORMAT,
     "(general.name): its string is not UTF-8",
     {{AT_TEXT, 8, 1, 0xff, 0}}},
    {"array of arrays", MF_UNSUPPORTED, "(x.u8s): an array of arrays", {{AT_ARRAY, 0, 4, 9, 0}}},
    {"array of type 13", MF_FORMAT, "(x.u8s): element type 13", {{AT_ARRAY, 0, 4, 13, 0}}},
    {"array of 2^61 u8",
     MF_FORMAT,
     "(x.u8s): the array needs 2305843009213693952",
     {{AT_ARRAY, 4, 8, 1ull << 61, 0}}},
    {"array of -1 u8", MF_FORMAT, "the array needs", {{AT_ARRAY, 4, 8, UINT64_MAX, 0}}},
    {"array of 2^61 u64: 2^64 bytes",
     MF_FORMAT,
     "(x.u8s): the array needs",
     {{AT_ARRAY, 0, 4, MF_GGUF_U64, 0}, {AT_ARRAY, 4, 8, 1ull << 61, 0}}},
    {"array of 2^61 strings",
     MF_FORMAT,
     "an array of 2305843009213693952 strings",
     {{AT_STRINGS, 4, 8, 1ull << 61, 0}}},
    {"array of -1 strings",
     MF_FORMAT,
     "an array of 18446744073709551615 strings",
     {{AT_STRINGS, 4, 8, UINT64_MAX, 0}}},
    {"string of 2^63 bytes in an array",
     MF_FORMAT,
     "(tokenizer.ggml.tokens): the string needs",
     {{AT_STRINGS, 12, 8, 1ull << 63, 0}}},
    {"bool 2", MF_FORMAT, "(x.bool): a bool with the value 2", {{AT_BOOL, 0, 1, 2, 0}}},
    {"bool 255 in an array",
     MF_FORMAT,
     "(x.bools): a bool with the value 255",
     {{AT_BOOLS, 2, 1, 255, 0}}},

    {"alignment 0",
     MF_FORMAT,
     "general.alignment = 0; a power of two from 8",
     {{AT_ALIGN, 0, 4, 0, 0}}},
    {"alignment 1", MF_FORMAT, "general.alignment = 1;", {{AT_ALIGN, 0, 4, 1, 0}}},
    {"alignment 3", MF_FORMAT, "general.alignment = 3;", {{AT_ALIGN, 0, 4, 3, 0}}},
    {"alignment 4", MF_FORMAT, "general.alignment = 4;", {{AT_ALIGN, 0, 4, 4, 0}}},
    {"alignment 24", MF_FORMAT, "general.alignment = 24;", {{AT_ALIGN, 0, 4, 24, 0}}},
    {"alignment 2^21", MF_FORMAT, "general.alignment = 2097152;", {{AT_ALIGN, 0, 4, 1u << 21, 0}}},
    {"alignment 2^31",
     MF_FORMAT,
     "general.alignment = 2147483648",
     {{AT_ALIGN, 0, 4, 1u << 31, 0}}},
    {"alignment 2^20", MF_FORMAT, "start at 1048576", {{AT_ALIGN, 0, 4, 1u << 20, 0}}},
    {"alignment of type f32",
     MF_FORMAT,
     "general.alignment is f32; an integer",
     {{AT_ALIGN, -4, 4, 6, 0}}},

    {"tensor without dimensions",
     MF_FORMAT,
     "tensor 1 (blk.0.ffn_up.weight): it has 0 dim",
     {{AT_TENSOR, N_DIMS, 4, 0, 0}}},
    {"5 dimensions", MF_FORMAT, "it has 5 dimensions", {{AT_TENSOR, N_DIMS, 4, 5, 0}}},
    {"-1 dimensions", MF_FORMAT, "it has 4294967295 dim", {{AT_TENSOR, N_DIMS, 4, UINT32_MAX, 0}}},
    {"dimension 0",
     MF_FORMAT,
     "(blk.0.ffn_up.weight): dimension 1 is 0",
     {{AT_TENSOR, DIM_1, 8, 0, 0}}},
    {"first dimension 0", MF_FORMAT, "dimension 0 is 0", {{AT_TENSOR, DIM_0, 8, 0, 0}}},
    {"negative dimension",
     MF_FORMAT,
     "dimension 0 is 18446744073709551584",
     {{AT_TENSOR, DIM_0, 8, (uint64_t)-32, 0}}},
    {"2^64 elements",
     MF_FORMAT,
     "dimension 1 is 4294967296: more elements",
     {{AT_TENSOR, DIM_0, 8, 1ull << 32, 0}, {AT_TENSOR, DIM_1, 8, 1ull << 32, 0}}},
    {"elements that wrap to a few",
     MF_FORMAT,
     "more elements",
     {{AT_TENSOR, DIM_0, 8, 1ull << 60, 0}, {AT_TENSOR, DIM_1, 8, 17, 0}}},
    {"bytes that wrap to a few",
     MF_FORMAT,
     "more bytes",
     {{AT_TENSOR, TYPE, 4, DTYPE_F32, 0}, {AT_TENSOR, DIM_0, 8, (1ull << 61) + 1, 0}}},
    {"rows that end within a block",
     MF_FORMAT,
     "33 elements, not a multiple of Q4_0's block of 32",
     {{AT_TENSOR, DIM_0, 8, 33, 0}}},
    {"whole blocks but not whole rows",
     MF_FORMAT,
     "16 elements, not a multiple",
     {{AT_TENSOR, DIM_0, 8, 16, 0}}},
    {"type 77",
     MF_UNSUPPORTED,
     "(blk.0.ffn_up.weight): type unknown (77)",
     {{AT_TENSOR, TYPE, 4, 77, 0}}},
    {"type -1", MF_UNSUPPORTED, "unknown (4294967295)", {{AT_TENSOR, TYPE, 4, UINT32_MAX, 0}}},
    {"removed type", MF_UNSUPPORTED, "type Q4_2 (removed", {{AT_TENSOR, TYPE, 4, 4, 0}}},
    {"unsupported type",
     MF_UNSUPPORTED,
     "type IQ2_XXS (16) is not read by this build; supported: F32, ",
     {{AT_TENSOR, TYPE, 4, 16, 0}}},
    {"the list of types is whole", MF_UNSUPPORTED, "BF16, MXFP4", {{AT_TENSOR, TYPE, 4, 16, 0}}},
    {"tensor name twice",
     MF_FORMAT,
     "two tensors have the name blk.0.ffn_up.weight",
     {{AT_LAST, 0, 0, 0, tensor_1}}},
    {"tensor name of 65 bytes",
     MF_FORMAT,
     "tensor 1: its name has 65",
     {{AT_TENSOR, -8, 8, 65, 0}}},
    {"tensor name of 0 bytes", MF_FORMAT, "tensor 1: its name has 0", {{AT_TENSOR, -8, 8, 0, 0}}},
    {"tensor name not UTF-8", MF_FORMAT, "tensor 1: its name is not", {{AT_TENSOR, 0, 1, 0xff, 0}}},
    {"tensor name with NUL", MF_FORMAT, "tensor 1: its name has a NUL", {{AT_TENSOR, 0, 1, 0, 0}}},

    {"offset not aligned",
     MF_FORMAT,
     "(blk.0.ffn_dn.weight): offset 225",
     {{AT_LAST, OFFSET, 8, 225, 0}}},
    {"offset behind the end",
     MF_FORMAT,
     "(blk.0.ffn_dn.weight): 210 bytes at offset 4096",
     {{AT_LAST, OFFSET, 8, 4096, 0}}},
    {"last byte behind the end",
     MF_FORMAT,
     "210 bytes at offset 256",
     {{AT_LAST, OFFSET, 8, 256, 0}}},
    {"offset whose end wraps",
     MF_FORMAT,
     "at offset 18446744073709551584",
     {{AT_LAST, OFFSET, 8, (uint64_t)-32, 0}}},
    {"overlap",
     MF_FORMAT,
     "tensors b and blk.0.ffn_dn.weight overlap",
     {{AT_LAST, OFFSET, 8, 192, 0}}},
    {"same place", MF_FORMAT, "overlap", {{AT_LAST, OFFSET, 8, 128, 0}}},
    {"overlap by padding only", MF_OK, "", {{AT_TENSOR, DIM_1, 8, 1, 0}}},
};

static void damage(gguf_build *b, const size_t *mark, const row *r) {
    for (int i = 0; i < 2; i++) {
        const change *c = &r->change[i];
        uint8_t *at = b->bytes + mark[c->mark] + c->delta;
        if (c->text)
            memcpy(at, c->text, strlen(c->text));
        else
            memcpy(at, &c->value, c->width);
    }
}

// Opens exactly n bytes and checks everything that any outcome promises.
static void expect(const char *name, const uint8_t *bytes, size_t n, int status,
                   const char *words) {
    static const char path[] = "tiny.gguf";
    const size_t alive = mem_alive();
    uint8_t *copy = malloc(n ? n : 1);
    if (!copy) exit(1);
    if (n) memcpy(copy, bytes, n);
    mf_gguf *file = NULL;
    const int got = gguf_open_memory(&file, copy, n, path);
    check(got == status, "%s: status %d instead of %d", name, got, status);
    check((got == MF_OK) == (file != NULL), "%s: a file handed out by status %d", name, got);
    if (got) {
        const char *message = mf_last_error();
        check(!strncmp(message, path, strlen(path)), "%s: the message names no file", name);
        check(strstr(message, words) != NULL, "%s: the message lacks \"%s\"", name, words);
        check(!strpbrk(message, "\n\r\033"), "%s: control characters in the message", name);
        check(strlen(message) < 500, "%s: the message was cut", name);
    }
    mf_gguf_free(file);
    check(mem_alive() == alive, "%s: %zu allocations left", name, mem_alive() - alive);
    LLVMFuzzerTestOneInput(copy, n);
    free(copy);
}

static void test_rows(const char *write_to) {
    size_t mark[N_MARKS];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        gguf_build b = build_tiny(3, mark);
        damage(&b, mark, &rows[i]);
        expect(rows[i].name, b.bytes, b.n, rows[i].status, rows[i].words);
        if (write_to) {
            char path[512];
            snprintf(path, sizeof path, "%s/row%02zu.gguf", write_to, i);
            FILE *f = fopen(path, "wb");
            if (!f || fwrite(b.bytes, 1, b.n, f) != b.n || fclose(f)) exit(1);
        }
        free(b.bytes);
    }
}

// ---- lengths, bits, memory, limits -------------------------------------------------------------

static void test_lengths(void) {
    for (uint32_t version = 2; version <= 3; version++) {
        size_t mark[N_MARKS];
        gguf_build b = build_tiny(version, mark);
        for (size_t n = 0; n <= mark[AT_DATA]; n++) {
            expect("cut in the header", b.bytes, n, MF_FORMAT, "get it again");
        }
        for (size_t i = 0; i < 64; i++) {
            const size_t n = mark[AT_DATA] + (b.n - mark[AT_DATA]) * i / 64;
            expect("cut in the data", b.bytes, n, MF_FORMAT, "get it again");
        }
        expect("cut before the last byte", b.bytes, b.n - 1, MF_FORMAT, "(blk.0.ffn_dn.weight)");
        expect("whole", b.bytes, b.n, MF_OK, "");
        put(&b, "junk", 4);
        expect("junk behind the end", b.bytes, b.n, MF_OK, "");
        free(b.bytes);
    }
}

// Values alone, up to the very end of the file.
static void test_metadata_only(void) {
    gguf_build b = {0};
    put_header(&b, 3, 0, 0);
    expect("nothing but a header", b.bytes, b.n, MF_OK, "");
    b.n = 0;
    put_header(&b, 3, 0, 1);
    put_kv_text(&b, "k", "text");
    expect("a string up to the end", b.bytes, b.n, MF_OK, "");
    b.bytes[24 + 8 + 1 + 4]++;
    expect("a string one byte behind the end", b.bytes, b.n, MF_FORMAT,
           "key 0 (k): the string needs 5");
    b.n = 0;
    put_header(&b, 3, 0, 1);
    put_key(&b, "deep", MF_GGUF_ARRAY);
    for (int i = 0; i < 1000; i++) {
        put_int(&b, MF_GGUF_ARRAY, 4);
        put_int(&b, 1, 8);
    }
    expect("arrays 1000 deep", b.bytes, b.n, MF_UNSUPPORTED, "key 0 (deep): an array of arrays");
    free(b.bytes);
}

static void test_flipped_bits(void) {
    size_t mark[N_MARKS];
    gguf_build b = build_tiny(3, mark);
    const size_t alive = mem_alive();
    for (size_t bit = 0; bit < 8 * mark[AT_DATA]; bit++) {
        b.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        LLVMFuzzerTestOneInput(b.bytes, b.n);  // aborts if anything but the status is wrong
        b.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    check(mem_alive() == alive, "flipped bits leave %zu allocations", mem_alive() - alive);
    free(b.bytes);
}

static void test_failing_allocations(void) {
    size_t mark[N_MARKS];
    gguf_build b = build_tiny(3, mark);
    const size_t alive = mem_alive();
    mf_gguf *file = NULL;
    size_t n = 0;
    for (int status = MF_NOMEM; status && n < 100; n++) {
        mem_fail_after(n);
        status = gguf_open_memory(&file, b.bytes, b.n, "tiny.gguf");
        mem_fail_after(SIZE_MAX);
        check(!status || status == MF_NOMEM, "status %d when allocation %zu fails", status, n);
        check(!status || mem_alive() == alive, "memory left when allocation %zu fails", n);
    }
    check(file && n > 5, "opening takes %zu allocations", n - 1);
    mf_gguf_free(file);
    check(mem_alive() == alive, "memory left behind");
    free(b.bytes);
}

static void test_limits(void) {
    enum { KEYS = 1 << 16, TENSORS = 1 << 18 };
    char name[80];
    for (uint32_t more = 0; more <= 1; more++) {
        gguf_build b = {0};
        put_header(&b, 3, 0, KEYS + more);
        for (uint32_t i = 0; i < KEYS + more; i++) {
            snprintf(name, sizeof name, "%x", i * 0x9e3779b9u);
            put_kv_int(&b, name, MF_GGUF_BOOL, 1);
        }
        expect("2^16 keys and one more", b.bytes, b.n, more ? MF_LIMIT : MF_OK, "n_kv = 65537");
        free(b.bytes);
        b = (gguf_build){0};
        put_header(&b, 3, TENSORS + more, 0);
        for (uint32_t i = 0; i < TENSORS + more; i++) {
            snprintf(name, sizeof name, "%x", i * 0x9e3779b9u);
            put_tensor(&b, name, DTYPE_F16, 1, 0, 32ull * i);
        }
        put_padding(&b, 32);
        const size_t start = b.n;
        for (uint32_t i = 0; i < TENSORS + more; i++) {
            for (int j = 0; j < 4; j++) put_int(&b, i, 8);
        }
        expect("2^18 tensors and one more", b.bytes, b.n, more ? MF_LIMIT : MF_OK,
               "n_tensors = 262145");
        b.n = start + 32ull * TENSORS - 31;
        if (!more) expect("2^18 tensors, the last cut", b.bytes, b.n, MF_FORMAT, "tensor 262143");
        free(b.bytes);
    }
    gguf_build b = {0};
    put_header(&b, 3, 1, 0);
    memset(name, 'n', sizeof name);
    name[64] = '\0';
    put_tensor(&b, name, DTYPE_F16, 1, 0, 0);
    put_padding(&b, 32);
    put_int(&b, 0, 2);
    expect("a tensor name of 64 bytes", b.bytes, b.n, MF_OK, "");
    free(b.bytes);
}

// Every supported type's block, one block a row and one element more.
static void test_types(void) {
    static const struct {
        uint32_t type, elems, bytes;
    } blocks[] = {{0, 1, 4},      {1, 1, 2},      {2, 32, 18},    {3, 32, 20},
                  {6, 32, 22},    {7, 32, 24},    {8, 32, 34},    {10, 256, 84},
                  {11, 256, 110}, {12, 256, 144}, {13, 256, 176}, {14, 256, 210},
                  {20, 32, 18},   {23, 256, 136}, {30, 1, 2},     {39, 32, 17}};
    size_t next = 0, n_blocks = sizeof blocks / sizeof *blocks;
    for (uint32_t type = 0; type < 64; type++) {
        const bool supported = next < n_blocks && blocks[next].type == type;
        const uint32_t elems = supported ? blocks[next].elems : 1;
        const uint32_t bytes = supported ? blocks[next].bytes : 1;
        if (supported) next++;
        gguf_build b = {0};
        put_header(&b, 3, 1, 0);
        put_tensor(&b, "t", type, 2 * elems, 3, 0);
        put_padding(&b, 32);
        for (uint32_t i = 0; i < 6 * bytes; i++) put_int(&b, 0, 1);
        expect("a type's blocks", b.bytes, b.n, supported ? MF_OK : MF_UNSUPPORTED,
               "supported: F32");
        if (supported) {
            expect("a type's blocks, one byte less", b.bytes, b.n - 1, MF_FORMAT, "tensor 0 (t)");
        }
        free(b.bytes);
    }
    check(next == n_blocks, "%zu types tried", next);
}

int main(int argc, char **argv) {
    test_rows(argc == 3 && !strcmp(argv[1], "--write") ? argv[2] : NULL);
    test_lengths();
    test_metadata_only();
    test_flipped_bits();
    test_failing_allocations();
    test_limits();
    test_types();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
