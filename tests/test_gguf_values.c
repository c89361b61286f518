// The getters of an open GGUF: every type, what each refuses, ranges, NULL arguments, references.
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/alloc.h"
#include "../engine/gguf.h"
#include "gguf_test.h"

static uint64_t index_of(const mf_gguf *file, const char *key) {
    uint64_t index = UINT64_MAX;
    check(!mf_gguf_find(&index, file, key), "%s is not found", key);
    return index;
}

static void test_scalars(const mf_gguf *file) {
    static const struct {
        const char *key;
        int status;
        int64_t value;
    } ints[] = {{"x.u8", 0, 255},        {"x.i8", 0, -128},        {"x.u16", 0, 65535},
                {"x.i16", 0, -32768},    {"x.u32", 0, 4294967295}, {"x.i32", 0, INT32_MIN},
                {"x.i64", 0, INT64_MIN}, {"x.u64", MF_FORMAT, 0},  {"x.bool", 0, 1},
                {"x.f32", MF_ARG, 0},    {"x.f64", MF_ARG, 0},     {"general.name", MF_ARG, 0}};
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
        int64_t value = 42;
        const int status = mf_gguf_ints(&value, file, index_of(file, ints[i].key), 0, 1);
        check(status == ints[i].status, "%s: status %d", ints[i].key, status);
        check(value == (status ? 42 : ints[i].value), "%s = %lld", ints[i].key, (long long)value);
    }
    static const struct {
        const char *key;
        int status;  // of gguf_u32 in [1, 2^32-1] with the fallback 7
        uint32_t value;
        const char *words;
    } u32s[] = {{"x.u8", 0, 255, ""},
                {"x.u32", 0, UINT32_MAX, ""},
                {"x.absent", 0, 7, ""},
                {"x.i8", MF_FORMAT, 0, "x.i8 = -128; 1 to 4294967295"},
                {"x.u64", MF_FORMAT, 0, "x.u64 is 2^63 or more"},
                {"x.f32", MF_FORMAT, 0, "x.f32 is f32; an integer"},
                {"x.bool", MF_FORMAT, 0, "x.bool is bool; an integer"},
                {"x.u8s", MF_FORMAT, 0, "x.u8s is an array of u8; an integer"},
                {"general.name", MF_FORMAT, 0, "general.name is string; an integer"}};
    for (size_t i = 0; i < sizeof u32s / sizeof *u32s; i++) {
        uint32_t value = 42;
        const int status = gguf_u32(&value, file, u32s[i].key, 7, 1, UINT32_MAX);
        check(status == u32s[i].status && value == (status ? 42 : u32s[i].value),
              "%s = %u, status %d", u32s[i].key, value, status);
        check(!status || strstr(mf_last_error(), u32s[i].words), "lacks: %s", u32s[i].words);
    }
    static const struct {
        const char *key;
        int status;  // of gguf_f32 in [-1, inf] with the fallback 7
        float value;
        const char *words;
    } f32s[] = {{"x.f32", 0, 0.5f, ""},
                {"x.f64", 0, -0.25f, ""},
                {"x.zero", 0, 0.0f, ""},
                {"x.absent", 0, 7.0f, ""},
                {"x.nan", MF_FORMAT, 0, "x.nan = nan; a finite number from -1 to inf"},
                {"x.inf", MF_FORMAT, 0, "x.inf = inf"},
                {"x.huge", MF_FORMAT, 0, "x.huge = 1e+300"},
                {"x.u8", MF_FORMAT, 0, "x.u8 is u8; a float"}};
    for (size_t i = 0; i < sizeof f32s / sizeof *f32s; i++) {
        float value = 42;
        const int status = gguf_f32(&value, file, f32s[i].key, 7, -1, INFINITY);
        const float wanted = status ? 42 : f32s[i].value;
        check(status == f32s[i].status && !memcmp(&value, &wanted, 4), "%s = %g, status %d",
              f32s[i].key, (double)value, status);
        check(!status || strstr(mf_last_error(), f32s[i].words), "lacks: %s", f32s[i].words);
    }
    uint32_t u32;
    float f32;
    check(gguf_f32(&f32, file, "x.zero", 1, 1e-9f, 1) == MF_FORMAT, "0 where 1e-9 is the least");
    check(gguf_u32_required(&u32, file, "x.absent", 0, 9) == MF_FORMAT, "a required u32 is absent");
    check(strstr(mf_last_error(), "x.absent is missing") != NULL, "the absent key is not named");
    check(gguf_f32_required(&f32, file, "x.absent", 0, 9) == MF_FORMAT, "a required f32 is absent");
}

static void test_arrays_and_strings(const mf_gguf *file) {
    int64_t ints[4] = {0};
    double floats[2];
    const uint64_t types = index_of(file, "tokenizer.ggml.token_type");
    const uint64_t scores = index_of(file, "tokenizer.ggml.scores");
    const uint64_t tokens = index_of(file, "tokenizer.ggml.tokens");
    check(!mf_gguf_ints(ints, file, types, 0, 2) && ints[0] == -1 && ints[1] == 0, "types from 0");
    check(!mf_gguf_ints(ints, file, types, 98, 2) && ints[1] == 98, "the last types");
    check(!mf_gguf_ints(NULL, file, types, 100, 0), "no types");
    check(mf_gguf_ints(ints, file, types, 98, 3) == MF_ARG, "one type too many");
    check(mf_gguf_ints(ints, file, types, UINT64_MAX, 2) == MF_ARG, "a range that wraps");
    check(mf_gguf_ints(ints, file, scores, 0, 1) == MF_ARG, "scores as integers");
    check(!mf_gguf_floats(floats, file, scores, 99, 1) && floats[0] == -99.0, "the last score");
    check(mf_gguf_floats(floats, file, types, 0, 1) == MF_ARG, "types as floats");

    size_t n = 0, again = 7;
    uint64_t ends[N_TOKENS] = {0};
    check(!mf_gguf_strings(&n, NULL, 0, NULL, file, tokens), "size of the tokens");
    check(n == 8 * 6 + 90 * 7 + 2, "%zu bytes of tokens", n);
    char text[1024];
    check(mf_gguf_strings(&again, text, n - 1, ends, file, tokens) == MF_ARG, "a byte too little");
    check(again == 7 && ends[0] == 0, "a refused call wrote something");
    check(!mf_gguf_strings(&again, text, n, ends, file, tokens) && again == n, "all tokens");
    check(ends[0] == 6 && !memcmp(text, "token0", 6), "token 0");
    check(ends[3] - ends[2] == 2 && !memcmp(text + ends[2], "\xff\xfe", 2), "token 3");
    check(ends[4] == ends[3] && ends[99] == n && !memcmp(text + n - 7, "token99", 7),
          "tokens 4, 99");
    check(mf_gguf_strings(&again, text, n, NULL, file, tokens) == MF_ARG, "ends is NULL");
    check(mf_gguf_strings(&again, text, n, ends, file, types) == MF_ARG, "types as strings");
    check(!mf_gguf_strings(&again, text, 0, NULL, file, index_of(file, "x.none")) && !again,
          "none");

    const char *s;
    size_t len;
    check(!gguf_str(&s, &len, file, "general.name") && len == 10 && !memcmp(s, "caf\xc3\xa9 ", 6),
          "text");
    check(!gguf_str(&s, &len, file, "general.nam") && !s && !len, "a text that is absent");
    check(gguf_str(&s, &len, file, "tokenizer.ggml.tokens") == MF_FORMAT, "an array is no text");
}

static void test_tensors(const mf_gguf *file, const uint8_t *data) {
    mf_tensor_info info;
    check(mf_gguf_n_tensors(file) == 4 && mf_gguf_data_bytes(file) == 28 + 72 + 96 + 210, "sums");
    check(!mf_gguf_tensor(&info, file, 1), "tensor 1");
    check(info.name_len == 19 && !memcmp(info.name, tensor_1, 19) && !strcmp(info.type, "Q4_0") &&
              info.n_dims == 2 && info.dims[0] == 64 && info.dims[1] == 2 && info.dims[2] == 1 &&
              info.dims[3] == 1 && info.bytes == 72,
          "tensor 1 is described wrongly");
    const gguf_tensor *t = gguf_find_tensor(file, last_tensor);
    check(t && t == gguf_tensor_at(file, 3) && t->data == data + 224 && t->type == DTYPE_Q6_K,
          "the last tensor by name");
    check(!gguf_find_tensor(file, "blk.0.ffn_up.weigh") && !gguf_find_tensor(file, ""),
          "no tensor");
    check(!gguf_tensor_at(file, 4), "a fifth tensor");
    check(mf_gguf_tensor(&info, file, 4) == MF_ARG, "a fifth tensor's description");
}

// Dropping pages is for mappings: bytes in memory belong to the caller.
static void test_forget_in_memory(void) {
    enum { PAGES = 1 << 18 };
    gguf_build b = {0};
    put_header(&b, 3, 1, 0);
    put_tensor(&b, "t", DTYPE_F32, PAGES / 4, 0, 0);
    put_padding(&b, 32);
    const size_t start = b.n;
    for (int i = 0; i < PAGES; i++) put_int(&b, 0x5a, 1);
    mf_gguf *file = NULL;
    check(!gguf_open_memory(&file, b.bytes, b.n, "pages.gguf"), "a tensor of many pages");
    if (file) gguf_forget(file, gguf_tensor_at(file, 0));
    size_t lost = 0;
    for (size_t i = start; i < b.n; i++) lost += b.bytes[i] != 0x5a;
    check(lost == 0, "gguf_forget took %zu of the caller's bytes", lost);
    mf_gguf_free(file);
    free(b.bytes);
}

int main(void) {
    test_forget_in_memory();
    size_t mark[N_MARKS];
    gguf_build b = build_tiny(3, mark);
    mf_gguf *file = NULL;
    check(!gguf_open_memory(&file, b.bytes, b.n, "tiny.gguf"), "the valid file does not open");
    if (!file) return 1;
    check(!strcmp(gguf_path(file), "tiny.gguf"), "gguf_path is %s", gguf_path(file));
    test_scalars(file);
    test_arrays_and_strings(file);
    test_tensors(file, b.bytes + mark[AT_DATA]);

    mf_kv_info kv;
    uint64_t index = 42;
    check(mf_gguf_n_kv(file) == 25 && !mf_gguf_kv(&kv, file, 24) && kv.key_len == 20 &&
              !memcmp(kv.key, last_key, 20) && kv.type == MF_GGUF_U32 && !kv.is_array && kv.n == 1,
          "the last key is described wrongly");
    check(!mf_gguf_kv(&kv, file, index_of(file, "x.bools")) && kv.is_array && kv.n == 3 &&
              kv.type == MF_GGUF_BOOL,
          "x.bools is described wrongly");
    check(mf_gguf_kv(&kv, file, 25) == MF_ARG, "key 25 of 25");
    check(mf_gguf_find(&index, file, "x") == MF_NOT_FOUND && index == 42, "x is not there");
    check(mf_gguf_find(&index, file, "") == MF_NOT_FOUND, "the empty key is not there");

    mf_tensor_info info;
    mf_gguf *none = NULL;
    size_t n;
    check(mf_gguf_open(NULL, "x") == MF_ARG && mf_gguf_open(&none, NULL) == MF_ARG && !none,
          "open");
    check(mf_gguf_kv(NULL, file, 0) == MF_ARG && mf_gguf_kv(&kv, NULL, 0) == MF_ARG, "kv");
    check(mf_gguf_tensor(NULL, file, 0) == MF_ARG && mf_gguf_tensor(&info, NULL, 0) == MF_ARG,
          "tensor");
    check(mf_gguf_find(NULL, file, "x") == MF_ARG && mf_gguf_find(&index, NULL, "x") == MF_ARG &&
              mf_gguf_find(&index, file, NULL) == MF_ARG,
          "find");
    check(mf_gguf_ints(NULL, file, index_of(file, "x.u8"), 0, 1) == MF_ARG, "ints");
    check(mf_gguf_floats(NULL, file, index_of(file, "x.f32"), 0, 1) == MF_ARG, "floats");
    check(mf_gguf_strings(NULL, NULL, 0, NULL, file, 0) == MF_ARG, "strings");
    check(mf_gguf_strings(&n, NULL, 0, NULL, NULL, 0) == MF_ARG, "strings of nothing");
    check(!mf_gguf_n_kv(NULL) && !mf_gguf_n_tensors(NULL) && !mf_gguf_data_bytes(NULL), "counts");

    const size_t alive = mem_alive();
    gguf_retain(file);
    mf_gguf_free(file);
    check(mem_alive() == alive && gguf_find_tensor(file, "b"), "a retained file was freed");
    mf_gguf_free(file);
    mf_gguf_free(NULL);
    check(mem_alive() == 0, "%zu allocations left", mem_alive());
    free(b.bytes);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
