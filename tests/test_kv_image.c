// Images: what sequences hold as plain numbers, to bytes and back into a cache. Bytes written by
// hand, every field wrong by name, every prefix and every byte flipped; loads beside other
// sequences, into arenas that are too small or only large enough without stale rows; failing
// allocations. A mutant must be refused, or be another state: loaded, it is saved as the same
// bytes.
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "kv_image.h"
#include "kv_test.h"

enum { SECTIONS = 3, MOST_WORDS = 256 };

typedef struct sections {
    uint32_t words[SECTIONS][MOST_WORDS];
    size_t n[SECTIONS];  // bytes
} sections;

static const kv_group_spec ROOMY[] = {{KV_FULL, 0, 400}, {KV_SLIDING, 4, 400}};
static const kv_group_spec BIG[] = {{KV_FULL, 0, 5000}, {KV_SLIDING, 4, 5000}};

static const sections VALID = {
    .words = {{3, 2,                    // n_seqs, n_groups
               0, 6, 6, 1, 0, 0,        // id, len, clean, n_runs, row, pos
               1, 8, 4, 2, 0, 0, 4, 9,  // rows 4 to 7 are at positions 9 to 12
               2, 1, 0, 1, 0, 5},       // a gap before row 0
              {0, 11,                   // window, n_rows
               0, 1, 0, 6,              // base, n_spans, first, len
               0, 2, 0, 4, 6, 4,        // four rows of sequence 0, four of its own
               0, 1, 10, 1},
              {4, 9,              //
               2, 1, 0, 4,        // rows 0 and 1 are lost
               2, 2, 0, 2, 4, 4,  //
               0, 1, 8, 1}},
    .n = {22 * 4, 16 * 4, 16 * 4},
};

static void bytes_of(kv_bytes *to, const sections *from) {
    for (int i = 0; i < SECTIONS; i++)
        to[i] = (kv_bytes){(const uint8_t *)from->words[i], from->n[i]};
}

static void encode(sections *to, const kv_image *image) {
    memset(to, 0xa5, sizeof *to);
    for (uint32_t i = 0; i < SECTIONS; i++) {
        to->n[i] = kv_image_size(image, i);
        CHECK(to->n[i] <= sizeof to->words[i], "%zu bytes", to->n[i]);
        kv_image_encode((uint8_t *)to->words[i], image, i);
    }
}

static bool equal(const sections *a, const sections *b) {
    for (int i = 0; i < SECTIONS; i++) {
        if (a->n[i] == b->n[i] && !memcmp(a->words[i], b->words[i], a->n[i])) continue;
        for (size_t k = 0; k < MOST_WORDS && (k < a->n[i] / 4 || k < b->n[i] / 4); k++)
            printf("%s%u/%u", k ? " " : "", a->words[i][k], b->words[i][k]);
        printf(" in section %d\n", i);
        return false;
    }
    return true;
}

static int decode(kv_image **out, const sections *from) {
    const kv_config config = config_of(ROOMY, 2, 6, 16);
    kv_bytes bytes[SECTIONS];
    bytes_of(bytes, from);
    return kv_image_decode(out, &config, bytes);
}

static int make_image(sections *to, const kv_cache *kv, const int32_t *seqs, uint32_t n) {
    kv_image *image = NULL;
    const int status = kv_image_make(&image, kv, seqs, n);
    if (!status) encode(to, image);
    kv_image_free(image);
    return status;
}

// Loads bytes into the sequences `into`.
static int load(kv_cache *kv, const sections *from, const int32_t *into, uint32_t n) {
    kv_image *image = NULL;
    kv_bytes bytes[SECTIONS];
    kv_config config;
    bytes_of(bytes, from);
    kv_cache_config(&config, kv);
    int status = kv_image_decode(&image, &config, bytes);
    if (!status) status = kv_image_load(kv, image, into, n);
    kv_image_free(image);
    IS(kv_cache_check(kv), MF_OK);
    return status;
}

static uint32_t clean_of(const kv_cache *kv, int32_t seq) {
    uint32_t n = 12345;
    IS(kv_cache_clean(&n, kv, seq), MF_OK);
    return n;
}

// ---- clean rows ------------------------------------------------------------------------------

static void test_clean(void) {
    kv_cache *const kv = make(ROOMY, 2, 4, 20);
    uint32_t n;
    IS(kv_cache_clean(&n, kv, 4), MF_ARG);
    IS(append(kv, 0, 10), MF_OK);
    CHECK(clean_of(kv, 0) == 10, "%u after an append", clean_of(kv, 0));
    IS(share(kv, 1, 0, 6), MF_OK);
    IS(append(kv, 1, 2), MF_OK);
    CHECK(clean_of(kv, 1) == 8, "%u of a reader that goes on", clean_of(kv, 1));
    IS(shift(kv, 0, 10, 3), MF_OK);
    IS(rm(kv, 0, 4, 4), MF_OK);
    CHECK(clean_of(kv, 0) == 10, "%u after calls that do nothing", clean_of(kv, 0));
    IS(rm(kv, 0, 7, 8), MF_OK);
    CHECK(clean_of(kv, 0) == 7, "%u after rm", clean_of(kv, 0));
    IS(append(kv, 0, 3), MF_OK);
    CHECK(clean_of(kv, 0) == 7, "%u: rows behind an edit have seen it", clean_of(kv, 0));
    IS(share(kv, 2, 0, 9), MF_OK);
    CHECK(clean_of(kv, 2) == 7, "%u of a reader", clean_of(kv, 2));
    IS(trim(kv, 0, 5), MF_OK);
    IS(append(kv, 0, 4), MF_OK);
    CHECK(len_of(kv, 0) == 11 && clean_of(kv, 0) == 11, "%u of %u: the edit was taken back",
          clean_of(kv, 0), len_of(kv, 0));
    IS(shift(kv, 1, 0, 5), MF_OK);
    IS(append(kv, 1, 1), MF_OK);
    CHECK(clean_of(kv, 1) == 0, "%u when all rows moved", clean_of(kv, 1));
    IS(trim(kv, 1, len_of(kv, 1)), MF_OK);
    IS(append(kv, 1, 3), MF_OK);
    CHECK(clean_of(kv, 1) == 3, "%u of a new start", clean_of(kv, 1));
    IS(kv_cache_free_seq(kv, 1), MF_OK);
    CHECK(clean_of(kv, 1) == 0, "%u of nothing", clean_of(kv, 1));
    kv_cache_free(kv);
}

// ---- bytes -----------------------------------------------------------------------------------

// The state of VALID, by calls; sequences 4, 2 and 5, and a hole at cell 0.
static kv_cache *valid_cache(void) {
    const kv_group_spec groups[] = {{KV_FULL, 0, 100}, {KV_SLIDING, 4, 10}};
    kv_cache *const kv = make(groups, 2, 6, 4);
    IS(append(kv, 0, 1), MF_OK);
    IS(append(kv, 4, 4), MF_OK);
    IS(share(kv, 2, 4, 4), MF_OK);
    IS(append(kv, 4, 2), MF_OK);
    IS(append(kv, 5, 1), MF_OK);
    IS(append(kv, 2, 2), MF_OK);
    IS(append(kv, 2, 2), MF_OK);  // the window is full: sequences 2 and 4 lose two rows
    IS(shift(kv, 5, 0, 5), MF_OK);
    IS(shift(kv, 2, 4, 5), MF_OK);
    IS(kv_cache_free_seq(kv, 0), MF_OK);
    return kv;
}

static void test_bytes(void) {
    kv_cache *kv = make(ROOMY, 2, 3, 9);
    IS(append(kv, 2, 5), MF_OK);
    IS(share(kv, 1, 2, 4), MF_OK);
    IS(append(kv, 1, 2), MF_OK);
    IS(shift(kv, 1, 4, 10), MF_OK);
    sections got;
    IS(make_image(&got, kv, (int32_t[]){2, 1}, 2), MF_OK);
    const sections first = {{{2, 2, 2, 5, 5, 1, 0, 0, 1, 6, 4, 2, 0, 0, 4, 14},
                             {0, 7, 0, 1, 0, 5, 0, 2, 0, 4, 5, 2},
                             {4, 7, 0, 1, 0, 5, 0, 2, 0, 4, 5, 2}},
                            {16 * 4, 12 * 4, 12 * 4}};
    CHECK(equal(&got, &first), "a state that is shared");
    IS(make_image(&got, kv, (int32_t[]){1, 2}, 2), MF_OK);
    const sections second = {{{2, 2, 1, 6, 4, 2, 0, 0, 4, 14, 2, 5, 5, 1, 0, 0},
                              {0, 7, 0, 1, 0, 6, 0, 2, 0, 4, 6, 1},
                              {4, 7, 0, 1, 0, 6, 0, 2, 0, 4, 6, 1}},
                             {16 * 4, 12 * 4, 12 * 4}};
    CHECK(equal(&got, &second), "the same in another order");
    IS(make_image(&got, kv, (int32_t[]){0}, 1), MF_OK);
    const sections empty = {{{1, 2, 0, 0, 0, 0}, {0, 0, 0, 0}, {4, 0, 0, 0}},
                            {6 * 4, 4 * 4, 4 * 4}};
    CHECK(equal(&got, &empty), "an empty sequence");
    IS(make_image(&got, kv, NULL, 0), MF_OK);
    CHECK(equal(&got, &(sections){{{0, 2}, {0, 0}, {4, 0}}, {8, 8, 8}}), "no sequence");
    IS(load(kv, &got, NULL, 0), MF_OK);
    IS(make_image(&got, kv, (int32_t[]){1, 3}, 2), MF_ARG);
    IS(make_image(&got, kv, (int32_t[]){1, -1}, 2), MF_ARG);
    IS(make_image(&got, kv, (int32_t[]){1, 2, 1}, 3), MF_ARG);
    kv_cache_free(kv);
}

// A slide changes where the rows are, and nothing else; the runs are all rows in order.
static void test_placement(void) {
    kv_cache *const kv = valid_cache();
    const int32_t seqs[] = {4, 2, 5};
    sections before, after;
    IS(make_image(&before, kv, seqs, 3), MF_OK);
    sections want = VALID;  // but for the ids
    want.words[0][2] = 4;
    want.words[0][8] = 2;
    want.words[0][16] = 5;
    CHECK(equal(&before, &want), "a state with lost rows");
    IS(kv_cache_defrag(&work, kv, 0), MF_OK);
    CHECK(work.n_moves > 1, "%u moves", work.n_moves);
    IS(make_image(&after, kv, seqs, 3), MF_OK);
    CHECK(equal(&before, &after), "a state whose rows have moved");
    kv_image *image = NULL;
    IS(kv_image_make(&image, kv, seqs, 3), MF_OK);
    for (uint32_t g = 0; g < 2; g++) {
        uint32_t row = 0;
        for (size_t i = 0; i < image->groups[g].n_runs; i++) {
            CHECK(image->groups[g].runs[i].row == row, "row %u", image->groups[g].runs[i].row);
            row += image->groups[g].runs[i].len;
        }
        CHECK(row == image->groups[g].n_rows && image->groups[g].n_runs <= 5, "%u rows in %zu runs",
              row, image->groups[g].n_runs);
    }
    kv_image_free(image);
    kv_cache_free(kv);
}

// ---- refusals --------------------------------------------------------------------------------

// Bytes that were changed: refused, or a state that is saved as these bytes. True if it loads.
static bool sound(const sections *mutant) {
    kv_image *image = NULL;
    const int status = decode(&image, mutant);
    CHECK(status == MF_OK || status == MF_FORMAT, "%d: %s", status, mf_last_error());
    if (status) {
        CHECK(!image && strlen(mf_last_error()) > 8, "a refusal without a line");
        return false;
    }
    static sections again;
    encode(&again, image);
    CHECK(equal(&again, mutant), "encode(decode(x)) is not x");
    const int32_t into[] = {5, 3, 4, 0, 2, 1};
    kv_cache *const kv = make(BIG, 2, 6, 16);
    IS(kv_image_load(kv, image, into, image->n_seqs), MF_OK);
    IS(kv_cache_check(kv), MF_OK);
    kv_image *saved = NULL;
    IS(kv_image_make(&saved, kv, into, image->n_seqs), MF_OK);
    for (uint32_t i = 0; saved && i < saved->n_seqs; i++) saved->seqs[i].id = image->seqs[i].id;
    if (saved) encode(&again, saved);
    CHECK(saved && equal(&again, mutant), "save(load(x)) is not x");
    kv_image_free(saved);
    kv_image_free(image);
    kv_cache_free(kv);
    return true;
}

typedef struct change {
    uint32_t section, word, value;
    const char *line;  // a part of the refusal's; NULL: another state
} change;

static const change CHANGES[] = {
    {0, 0, 2, "bytes behind its last field"},
    {0, 0, 4, "SEQS ends within id"},
    {0, 0, 6, "n_seqs is 6"},
    {0, 0, UINT32_MAX, "n_seqs is 4294967295"},
    {0, 1, 0, "n_groups is 0"},
    {0, 1, 1, "n_groups is 1"},
    {0, 1, UINT32_MAX, "n_groups is 4294967295"},
    {0, 2, 1, "two sequences have id 1"},
    {0, 2, 1u << 31, "id 2147483648"},
    {0, 2, INT32_MAX, NULL},
    {0, 3, 0, "1 runs of positions for 0 rows"},
    {0, 3, 5, "clean 6"},
    {0, 3, 7, "ROWS 0: the spans of sequence 0 have 6 rows"},
    {0, 3, KV_POS_MAX + 1, "len 16777217"},
    {0, 3, UINT32_MAX, "len 4294967295"},
    {0, 4, 7, "clean 7"},
    {0, 4, 5, NULL},
    {0, 4, 3, "clean 3 and 4"},
    {0, 5, 0, "n_runs is 8"},
    {0, 5, 2, "8 bytes behind its last field"},
    {0, 5, 1u << 30, "n_runs is 1073741824"},
    {0, 10, 5, "clean 5"},
    {0, 12, 1, "starts at row 1"},
    {0, 13, 1, "clean 4"},
    {0, 14, 0, "run 0 starts at row 0 and ends at row 0"},
    {0, 14, 8, "run 1 starts at row 8"},
    {0, 14, 9, "starts at row 0 and ends at row 9"},
    {0, 14, 3, "clean 4"},
    {0, 15, 4, "starts at position 4"},
    {0, 15, 3, "starts at position 3"},
    {0, 15, 5, NULL},
    {0, 15, KV_POS_MAX - 4, NULL},
    {0, 15, KV_POS_MAX - 3, "ends at position 16777217"},
    {0, 15, UINT32_MAX, "ends at position 4294967299"},
    {0, 21, KV_POS_MAX - 1, NULL},
    {0, 21, KV_POS_MAX, "ends at position 16777217"},
    {1, 0, 4, "ROWS 0: window is 4"},
    {2, 0, 0, "ROWS 1: window is 0"},
    {2, 0, 5, "ROWS 1: window is 5"},
    {1, 1, 10, "ROWS 0: sequence 2, span 0 is [10, +1); n_rows is 10"},
    {1, 1, 12, "n_rows is 12; the spans name 11"},
    {1, 1, 0, "n_rows is 0"},
    {1, 2, 1, "ROWS 0: sequence 0 has base 1"},
    {2, 2, 4, "ROWS 1: sequence 0 has base 4; its next token needs the rows from 3 on"},
    {2, 2, 3, "ROWS 1: sequence 0, span 0 has len 4; 3 rows are left"},
    {2, 2, 1, "ROWS 1: the spans of sequence 0 have 4 rows"},
    {2, 2, UINT32_MAX, "base 4294967295"},
    {1, 3, 0, "ROWS 0"},
    {1, 3, 6, "ROWS 0 ends within base"},
    {1, 3, 7, "n_spans is 7"},
    {1, 3, UINT32_MAX, "n_spans is 4294967295"},
    {1, 4, 1, "goes on with number 1; the next one is 0"},
    {1, 4, UINT32_MAX, "[4294967295, +6)"},
    {1, 5, 0, "has len 0"},
    {1, 5, 5, "the spans of sequence 0 have 5 rows"},
    {1, 5, UINT32_MAX, "has len 4294967295"},
    {1, 8, 1, "row 0 of sequence 1 is number 1"},
    {1, 10, 4, "they must be one"},
    {1, 10, 5, "row 4 of sequence 1 is number 5, which is row 5 of sequence 0"},
    {1, 10, 7, "goes on with number 7"},
    {1, 14, 9, "row 0 of sequence 2 is number 9"},
    {1, 14, 0, "only their first 0 rows"},
    {2, 14, 9, "ROWS 1: sequence 2, span 0 is [9, +1)"},
};

static void refused(const sections *mutant, const char *line) {
    const bool loads = sound(mutant);
    CHECK(loads == !line && (!line || strstr(mf_last_error(), line)), "%s, not %s",
          loads ? "it loads" : mf_last_error(), line ? line : "another state");
}

static void replace(sections *to, uint32_t section, const uint32_t *words, size_t n) {
    memcpy(to->words[section], words, n * 4);
    to->n[section] = n * 4;
}

#define SECTION(to, i, ...) \
    replace(to, i, (const uint32_t[]){__VA_ARGS__}, sizeof((uint32_t[]){__VA_ARGS__}) / 4)

static void test_refusals(void) {
    CHECK(sound(&VALID), "%s", mf_last_error());
    for (size_t i = 0; i < sizeof CHANGES / sizeof *CHANGES; i++) {
        sections s = VALID;
        s.words[CHANGES[i].section][CHANGES[i].word] = CHANGES[i].value;
        refused(&s, CHANGES[i].line);
    }
    sections s = VALID;  // the fourth shared row is elsewhere
    s.words[0][14] = s.words[0][10] = s.words[0][4] = 3;
    refused(&s, "share row 3; only their first 3 rows");
    s = VALID;  // five rows shared: the fifth is elsewhere
    SECTION(&s, 1, 0, 10, 0, 1, 0, 6, 0, 2, 0, 5, 6, 3, 0, 1, 9, 1);
    refused(&s, "share row 4; only their first 4 rows are at the same positions");
    s = VALID;  // rows 2 and 3 shared, and not those before
    SECTION(&s, 1, 0, 13, 0, 1, 0, 6, 0, 3, 6, 2, 2, 2, 8, 4, 0, 1, 12, 1);
    refused(&s, "shared rows are a common prefix");
    s = VALID;  // sequence 1 has kept a row more; and then another one
    SECTION(&s, 2, 4, 10, 2, 1, 0, 4, 1, 3, 4, 1, 0, 2, 5, 4, 0, 1, 9, 1);
    refused(&s, NULL);
    s = VALID;  // the row that sequence 1 has kept is another one for sequence 2
    SECTION(&s, 0, 3, 2, 0, 6, 6, 1, 0, 0, 1, 8, 4, 2, 0, 0, 4, 9, 2, 4, 4, 1, 0, 0);
    SECTION(&s, 1, 0, 10, 0, 1, 0, 6, 0, 2, 0, 4, 6, 4, 0, 1, 0, 4);
    SECTION(&s, 2, 4, 10, 2, 1, 0, 4, 1, 3, 4, 1, 0, 2, 5, 4, 1, 2, 9, 1, 0, 2);
    refused(&s, "ROWS 1: sequence 2 has number 9 before 0; another has 4 there");
    SECTION(&s, 2, 4, 9, 2, 1, 0, 4, 1, 3, 4, 1, 0, 2, 5, 4, 1, 2, 4, 1, 0, 2);
    refused(&s, NULL);
    s = VALID;  // shared in group 0 only
    SECTION(&s, 2, 4, 11, 2, 1, 0, 4, 2, 1, 4, 6, 0, 1, 10, 1);
    refused(&s, "share a row in one group and not in the other");
    s = VALID;  // shared in group 1 only
    SECTION(&s, 1, 0, 15, 0, 1, 0, 6, 0, 1, 6, 8, 0, 1, 14, 1);
    refused(&s, "share a row in one group and not in the other");
    s = VALID;  // a row that is one number in two rows of one sequence
    SECTION(&s, 1, 0, 11, 0, 2, 0, 5, 4, 1, 0, 2, 0, 4, 6, 4, 0, 1, 10, 1);
    refused(&s, "row 5 of sequence 0 is number 4, which is row 4 of sequence 0");
}

static void test_limits(void) {
    sections s = {{{1, 2, 0, 0, 0, 0}, {0, 0, 0, 1, 0, 0}, {4, 0, 0, 1, 0, 0}}, {0, 24, 24}};
    const uint32_t most = KV_MAP_MAX_SPANS - 3;  // gaps, with six sequences
    for (uint32_t runs = most + 1; runs <= most + 2; runs++) {
        s.words[0][3] = s.words[0][5] = s.words[1][1] = s.words[1][5] = runs;
        s.words[2][1] = s.words[2][5] = runs;
        for (uint32_t i = 0; i < runs; i++) {
            s.words[0][6 + 2 * i] = i;
            s.words[0][7 + 2 * i] = 1 + 2 * i;
        }
        s.n[0] = (6 + 2 * runs) * 4;
        refused(&s,
                runs > most + 1 ? "62 gaps between its positions; a read here can carry 61" : NULL);
    }
    // Seven sequences for a cache of six.
    s = (sections){{{7, 2}, {0, 0}, {4, 0}}, {30 * 4, 16 * 4, 16 * 4}};
    for (uint32_t i = 0; i < 7; i++) s.words[0][2 + 4 * i] = i;
    refused(&s, "n_seqs is 7; this cache has 6 sequences");
}

static void test_mutants(void) {
    const uint32_t values[] = {0, 1,  2,  3,       4,       5,         6,        7,         8,
                               9, 10, 11, 1 << 24, 1 << 30, INT32_MAX, 1u << 31, UINT32_MAX};
    uint32_t n = 0, loaded = 0;
    for (uint32_t i = 0; i < SECTIONS; i++) {
        for (size_t k = 0; k < VALID.n[i] / 4; k++) {
            for (size_t v = 0; v < sizeof values / sizeof *values; v++, n++) {
                sections s = VALID;
                s.words[i][k] = values[v];
                loaded += sound(&s) && values[v] != VALID.words[i][k];
            }
        }
        for (size_t k = 0; k < VALID.n[i]; k++) {
            for (uint32_t bit = 0; bit < 8; bit++, n++) {
                sections s = VALID;
                ((uint8_t *)s.words[i])[k] ^= (uint8_t)(1u << bit);
                loaded += sound(&s);
            }
            sections s = VALID;
            s.n[i] = k;
            refused(&s, i ? "ROWS" : "SEQS");
        }
        sections s = VALID;
        s.n[i]++;
        refused(&s, "1 bytes behind its last field");
    }
    printf("%u mutants, %u of them another state\n", n, loaded);
    CHECK(loaded > 20 && loaded < n / 4, "%u of %u mutants are another state", loaded, n);
}

// Counts that are large ask for no more than the bytes do.
static void test_memory_asked(void) {
    for (uint32_t i = 0; i < SECTIONS; i++) {
        for (size_t k = 0; k < VALID.n[i] / 4; k++) {
            sections s = VALID;
            s.words[i][k] = 1u << 31;
            kv_image *image = NULL;
            const uint64_t asked = mem_asked();
            decode(&image, &s);
            kv_image_free(image);
            CHECK(mem_asked() - asked < 4096, "%u, word %zu: %llu bytes", i, k,
                  (unsigned long long)(mem_asked() - asked));
        }
    }
}

// ---- loads -----------------------------------------------------------------------------------

static void test_load_arguments(void) {
    kv_cache *const kv = make(ROOMY, 2, 6, 16);
    IS(append(kv, 1, 3), MF_OK);
    REFUSED(kv, load(kv, &VALID, (int32_t[]){0, 1}, 2), MF_ARG);
    REFUSED(kv, load(kv, &VALID, (int32_t[]){0, 1, 2, 3}, 4), MF_ARG);
    REFUSED(kv, load(kv, &VALID, (int32_t[]){0, 1, 6}, 3), MF_ARG);
    REFUSED(kv, load(kv, &VALID, (int32_t[]){0, 1, -1}, 3), MF_ARG);
    REFUSED(kv, load(kv, &VALID, (int32_t[]){3, 1, 3}, 3), MF_ARG);
    kv_image *image = NULL;
    IS(decode(&image, &VALID), MF_OK);
    kv_cache *const other = make((kv_group_spec[]){{KV_FULL, 0, 9}, {KV_SLIDING, 5, 9}}, 2, 6, 4);
    REFUSED(other, kv_image_load(other, image, (int32_t[]){0, 1, 2}, 3), MF_FORMAT);
    kv_cache_free(other);
    kv_image_free(image);
    kv_cache_free(kv);
}

// Beside sequences that stay, into one that has rows, a reservation and a reader.
static void test_load_beside(void) {
    kv_cache *const kv = make(ROOMY, 2, 6, 16);
    IS(append(kv, 0, 16), MF_OK);
    IS(append(kv, 5, 7), MF_OK);
    IS(share(kv, 3, 5, 7), MF_OK);
    IS(reserve(kv, 5, 9), MF_OK);
    IS(reserve(kv, 0, 4), MF_OK);
    const uint64_t generation = stats_of(kv, 0).generation;
    IS(load(kv, &VALID, (int32_t[]){5, 1, 4}, 3), MF_OK);
    CHECK(stats_of(kv, 0).generation != generation, "the rows of sequence 5 are elsewhere");
    CHECK(stats_of(kv, 0).n_reserved == 4, "%u reserved", stats_of(kv, 0).n_reserved);
    CHECK(used(kv, 0) == 16 + 4 + 7 + 11 && used(kv, 1) == 16 + 7 + 9, "%u, %u used", used(kv, 0),
          used(kv, 1));
    CHECK(stats_of(kv, 0).n_shared == 4 && stats_of(kv, 1).n_shared == 2, "%u, %u shared",
          stats_of(kv, 0).n_shared, stats_of(kv, 1).n_shared);
    CHECK(len_of(kv, 3) == 7 && live_rows(kv, 0, 3) == 7, "the reader of what was replaced");
    CHECK(len_of(kv, 1) == 8 && clean_of(kv, 1) == 4 && pos_of(kv, 1, 4) == 9, "positions");
    CHECK(live_rows(kv, 1, 5) == 4 && max_trim(kv, 5) == 1, "max_trim %u", max_trim(kv, 5));
    IS(append(kv, 5, 1), MF_OK);  // there is room behind each of them
    IS(append(kv, 1, 1), MF_OK);
    IS(append(kv, 4, 1), MF_OK);
    CHECK(n_spans(kv, 0, 5) == 1 && n_spans(kv, 0, 1) == 2 && n_spans(kv, 0, 4) == 1,
          "%u, %u, %u spans", n_spans(kv, 0, 5), n_spans(kv, 0, 1), n_spans(kv, 0, 4));
    IS(kv_cache_free_seq(kv, 5), MF_OK);
    CHECK(stats_of(kv, 0).n_shared == 0 && live_rows(kv, 0, 1) == 9, "the other reader");
    kv_cache_free(kv);
}

static void test_load_room(void) {
    const kv_group_spec groups[] = {{KV_FULL, 0, 14}, {KV_SLIDING, 4, 12}};
    kv_cache *const kv = make(groups, 2, 6, 4);
    const int32_t into[] = {0, 1, 2};
    IS(append(kv, 3, 4), MF_OK);
    REFUSED(kv, load(kv, &VALID, into, 3), MF_KV_FULL);  // 11 into 10
    IS(trim(kv, 3, 1), MF_OK);
    IS(reserve(kv, 3, 1), MF_OK);
    REFUSED(kv, load(kv, &VALID, into, 3), MF_KV_FULL);  // a reservation is as good as rows
    IS(share(kv, 0, 3, 3), MF_OK);
    REFUSED(kv, load(kv, &VALID, into, 3), MF_KV_FULL);  // what it gives back another one reads
    IS(kv_cache_free_seq(kv, 3), MF_OK);
    IS(load(kv, &VALID, into, 3), MF_OK);  // what sequence 0 had is enough
    CHECK(used(kv, 0) == 11 && used(kv, 1) == 9, "%u, %u used", used(kv, 0), used(kv, 1));
    IS(append(kv, 5, 3), MF_OK);
    IS(load(kv, &VALID, (int32_t[]){1, 0, 2}, 3), MF_OK);
    kv_cache_free(kv);
}

// Stale rows of others go first, and then those of the image.
static void test_load_lean(void) {
    const kv_group_spec groups[] = {{KV_FULL, 0, 100}, {KV_SLIDING, 4, 12}};
    kv_cache *const kv = make(groups, 2, 6, 12);
    IS(append(kv, 5, 6), MF_OK);  // 3 of them stale; hunks of 2
    IS(load(kv, &VALID, (int32_t[]){0, 1, 2}, 3), MF_OK);
    CHECK(live_rows(kv, 1, 5) == 3 && live_rows(kv, 1, 0) == 4 && live_rows(kv, 1, 1) == 6,
          "%u live", live_rows(kv, 1, 5));
    IS(append(kv, 5, 1), MF_OK);
    IS(kv_cache_free_seq(kv, 0), MF_OK);
    IS(kv_cache_free_seq(kv, 1), MF_OK);
    IS(append(kv, 3, 7), MF_OK);
    kv_image *image = NULL;
    IS(decode(&image, &VALID), MF_OK);
    IS(kv_image_load(kv, image, (int32_t[]){0, 2, 1}, 3), MF_KV_FULL);  // 7 into 6
    IS(kv_cache_free_seq(kv, 5), MF_OK);
    IS(kv_image_load(kv, image, (int32_t[]){0, 2, 1}, 3), MF_OK);  // 7 into 9; 9 would fit, too
    CHECK(live_rows(kv, 1, 0) == 4, "%u live", live_rows(kv, 1, 0));
    IS(append(kv, 5, 1), MF_OK);  // nothing is needed of it but itself: room for 8
    IS(kv_image_load(kv, image, (int32_t[]){0, 2, 1}, 3), MF_OK);
    IS(kv_cache_check(kv), MF_OK);
    CHECK(live_rows(kv, 1, 0) == 3 && live_rows(kv, 1, 2) == 3 && live_rows(kv, 1, 1) == 1 &&
              live_rows(kv, 1, 3) == 3 && live_rows(kv, 0, 0) == 6,
          "%u %u %u %u live", live_rows(kv, 1, 0), live_rows(kv, 1, 2), live_rows(kv, 1, 1),
          live_rows(kv, 1, 3));
    CHECK(max_trim(kv, 0) == 0 && used(kv, 1) == 3 + 1 + 7 && stats_of(kv, 1).n_shared == 0,
          "%u used", used(kv, 1));
    // Numbers 1 to 3, 5 to 7 and 8; those left out are in no run.
    uint32_t row = 0, n = 0;
    for (size_t i = 0; i < image->groups[1].n_runs; i++) {
        const kv_row_run run = image->groups[1].runs[i];
        CHECK(run.row >= row, "row %u after %u", run.row, row);
        row = run.row + run.len;
        n += run.len;
        CHECK(run.row > 0 && (run.row > 4 || row <= 4), "rows [%u, %u) were loaded", run.row, row);
    }
    CHECK(n == 7 && row == 9, "%u rows were loaded", n);
    kv_image_free(image);
    kv_cache_free(kv);
}

// ---- failing allocations ---------------------------------------------------------------------

static void test_memory_failures(void) {
    kv_cache *const kv = valid_cache();
    const int32_t seqs[] = {4, 2, 5}, into[] = {2, 5, 1};
    kv_image *image = NULL;
    size_t alive = mem_alive(), n = 0;
    for (int status = MF_NOMEM; status; n++) {
        mem_fail_after(n);
        status = kv_image_make(&image, kv, seqs, 3);
        mem_fail_after(SIZE_MAX);
        CHECK(status == (image ? MF_OK : MF_NOMEM), "allocation %zu: %d", n, status);
        if (status) CHECK(mem_alive() == alive, "allocation %zu left something", n);
    }
    CHECK(n > 8, "%zu allocations", n);
    kv_image_free(image);
    image = NULL;
    n = 0;
    for (int status = MF_NOMEM; status; n++) {
        mem_fail_after(n);
        status = decode(&image, &VALID);
        mem_fail_after(SIZE_MAX);
        CHECK(status == (image ? MF_OK : MF_NOMEM), "allocation %zu: %d", n, status);
        if (status) CHECK(mem_alive() == alive, "allocation %zu left something", n);
    }
    CHECK(n > 8, "%zu allocations", n);
    n = 0;
    for (int status = MF_NOMEM; status; n++) {
        kv_picture(kv_before, kv);
        mem_fail_after(n);
        status = kv_image_load(kv, image, into, 3);
        mem_fail_after(SIZE_MAX);
        CHECK(status == MF_OK || status == MF_NOMEM, "allocation %zu: %d", n, status);
        IS(kv_cache_check(kv), MF_OK);
        kv_picture(kv_after, kv);
        CHECK(!status || !strcmp(kv_before, kv_after), "a failed load changed something");
    }
    CHECK(n > 8 && len_of(kv, 1) == 1, "%zu allocations", n);
    kv_image_free(image);
    kv_cache_free(kv);
}

int main(void) {
    const size_t alive = mem_alive();
    test_clean();
    test_bytes();
    test_placement();
    test_refusals();
    test_limits();
    test_mutants();
    test_memory_asked();
    test_load_arguments();
    test_load_beside();
    test_load_room();
    test_load_lean();
    test_memory_failures();
    CHECK(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
