// Drives one cell store from stdin, a call a line, for test_kv_model.py. The answer is one line of
// JSON, a list that starts with the status; a refusal goes on with its line. Numbers beyond a
// parameter's type wrap as a cast does, so every value of the type can be passed.
//
//   new can_rope n_seq n_batch {full cells | sliding cells window}...
//   append {seq n}...      rm seq p0 p1      shift seq p0 delta      defrag need
//   defrag_reserve seq n   (these give [0, moves, roped, delta])
//   can {seq n}...   trim seq n   free seq   share dst src n   reserve seq n
//   window group modes {seq n}...   cells group seq first n   order scratch {src dst n group}...
//   dump seq...            (sections as hex, then [row, cell, len] of each group)
//   load section... into seq...   (one section and one for each group; [row, cell, len] as above)
//   state
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../engine/alloc.h"
#include "../engine/kv_image.h"
#include "../engine/kv_store.h"

enum { MAX_ITEMS = 512, MAX_ROWS = 1 << 16, MAX_LINE = 1 << 18, MAX_SECONDS = 60 };

static kv_cache *kv;
static kv_append items[MAX_ITEMS];
static const char *const separators = " \n";

static uint32_t number(void) {
    const char *const word = strtok(NULL, separators);
    return word ? (uint32_t)strtoll(word, NULL, 10) : 0;
}

static uint32_t read_items(void) {
    uint32_t n = 0;
    for (const char *seq; n < MAX_ITEMS && (seq = strtok(NULL, separators)); n++) {
        items[n].seq = (int32_t)strtoll(seq, NULL, 10);
        items[n].n = number();
    }
    return n;
}

static int make(void) {
    kv_config config = {.can_rope = number() != 0};
    kv_cache_free(kv);
    kv = NULL;
    config.n_seq = number();
    config.n_batch = number();
    for (const char *kind; config.n_groups < KV_MAX_GROUPS && (kind = strtok(NULL, separators));) {
        kv_group_spec *const group = &config.groups[config.n_groups++];
        group->kind = strcmp(kind, "full") ? KV_SLIDING : KV_FULL;
        group->n_cells = number();
        if (group->kind == KV_SLIDING) group->window = number();
    }
    return kv_cache_new(&kv, &config);
}

static const char *comma(uint32_t i) { return i ? "," : ""; }

static void print_moves(const mf_kv_move *moves, uint32_t n) {
    printf(",[");
    for (uint32_t i = 0; i < n; i++) {
        const mf_kv_move *const m = &moves[i];
        printf("%s[%d,%d,%d,%d]", comma(i), m->src, m->dst, m->n, m->group);
    }
    printf("]");
}

static void print_spans(const mf_kv_span *spans, uint32_t n) {
    printf("[");
    for (uint32_t i = 0; i < n; i++)
        printf("%s[%d,%d,%d]", comma(i), spans[i].pos, spans[i].cell, spans[i].len);
    printf("]");
}

static void print_work(const kv_work *work) {
    print_moves(work->moves, work->n_moves);
    printf(",[");
    for (uint32_t i = 0; i < work->n_roped; i++) {
        const kv_cell_run *const run = &work->roped[i];
        printf("%s[%u,%u,%u]", comma(i), run->group, run->cell, run->len);
    }
    printf("],%d", work->delta);
}

// Begins every answer; a refusal is then complete but for its bracket.
static int answer(int status) {
    printf("[%d", status);
    if (status) printf(",\"%s\"", mf_last_error());
    return status;
}

static void print_group(uint32_t g) {
    kv_stats s;
    if (kv_cache_stats(&s, kv, g)) s = (kv_stats){0};
    printf("%s[%u,%u,%u,%u,%u,%u,%" PRIu64 ",%" PRIu64 "]", comma(g), s.n_used, s.n_shared,
           s.n_reserved, (uint32_t)s.n_stale, s.n_free_runs, s.largest_run, s.compactions,
           s.generation);
}

// [len, next_pos, max_trim, positions, spans of each group, [cell, len] held in each group, clean]
static void print_seq(uint32_t s) {
    static uint32_t positions[MAX_ROWS];
    const int32_t seq = (int32_t)s;
    uint32_t len = 0, pos = 0, trim = 0, clean = 0, n = 0;
    kv_cache_len(&len, kv, seq);
    kv_cache_next_pos(&pos, kv, seq);
    kv_cache_max_trim(&trim, kv, seq);
    kv_cache_clean(&clean, kv, seq);
    printf("%s[%u,%u,%u,[", comma(s), len, pos, trim);
    if (len <= MAX_ROWS && !kv_cache_positions(positions, kv, seq, 0, len))
        for (uint32_t i = 0; i < len; i++) printf("%s%u", comma(i), positions[i]);
    printf("],[");
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        const mf_kv_span *spans = NULL;
        kv_cache_spans(&spans, &n, kv, g, seq);
        printf("%s", comma(g));
        print_spans(spans, n);
    }
    printf("],[");
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        const kv_part *const part = &kv->seqs[s].parts[g];
        printf("%s[", comma(g));
        for (uint32_t i = part->held_first; i < part->n_held; i++)
            printf("%s[%u,%u]", comma(i - part->held_first), part->held[i].cell, part->held[i].len);
        printf("]");
    }
    printf("],%u]", clean);
}

// [status of kv_cache_check, stats of each group, sequences]
static void state(void) {
    if (answer(kv_cache_check(kv))) return;
    printf(",[");
    for (uint32_t g = 0; g < kv->n_groups; g++) print_group(g);
    printf("],[");
    for (uint32_t s = 0; s < kv->n_seq; s++) print_seq(s);
    printf("]");
}

// [0, mode, the [lo, hi) of every query or the spans of every item]
static void window(void) {
    static kv_range ranges[MAX_ROWS];
    static const mf_kv_span *spans[MAX_ITEMS];
    static uint32_t n_spans[MAX_ITEMS];
    const uint32_t group = number(), modes = number(), n = read_items();
    kv_window w = {.ranges = ranges, .spans = spans, .n_spans = n_spans};
    uint64_t rows = 0;
    for (uint32_t i = 0; i < n; i++) rows += items[i].n;
    if (rows > MAX_ROWS) exit(2);
    if (answer(kv_cache_window(&w, kv, group, items, n, modes))) return;
    printf(",%d,[", (int)w.mode);
    for (uint32_t i = 0; w.mode == KV_WINDOW_RANGE && i < rows; i++)
        printf("%s[%u,%u]", comma(i), ranges[i].lo, ranges[i].hi);
    for (uint32_t i = 0; w.mode == KV_WINDOW_RUNS && i < n; i++) {
        printf("%s", comma(i));
        print_spans(spans[i], n_spans[i]);
    }
    printf("]");
}

static void cells(void) {
    static int32_t found[MAX_ROWS];
    const uint32_t group = number();
    const int32_t seq = (int32_t)number();
    const uint32_t first = number(), n = number();
    if (answer(kv_cache_store_cells(found, kv, group, seq, first, n))) return;
    printf(",[");
    for (uint32_t i = 0; i < n; i++) printf("%s%d", comma(i), found[i]);
    printf("]");
}

static void order(void) {
    static mf_kv_move moves[MAX_ITEMS];
    kv_moves ordered = {0};
    const int32_t scratch = (int32_t)number();
    size_t n = 0;
    for (const char *src; n < MAX_ITEMS && (src = strtok(NULL, separators)); n++) {
        moves[n].src = (int32_t)strtoll(src, NULL, 10);
        moves[n].dst = (int32_t)number();
        moves[n].n = (int32_t)number();
        moves[n].group = (int32_t)number();
    }
    if (!answer(kv_moves_order(&ordered, moves, n, scratch))) print_moves(ordered.at, ordered.n);
    kv_moves_free(&ordered);
}

static uint32_t read_seqs(int32_t *seqs) {
    uint32_t n = 0;
    for (const char *word; n < MAX_ITEMS && (word = strtok(NULL, separators)); n++)
        seqs[n] = (int32_t)strtoll(word, NULL, 10);
    return n;
}

static void print_row_runs(const kv_image *image) {
    for (uint32_t g = 0; g < image->n_groups; g++) {
        const kv_image_group *const group = &image->groups[g];
        printf(",[");
        for (uint32_t i = 0; i < group->n_runs; i++)
            printf("%s[%u,%u,%u]", comma(i), group->runs[i].row, group->runs[i].cell,
                   group->runs[i].len);
        printf("]");
    }
}

static void dump(void) {
    static int32_t seqs[MAX_ITEMS];
    const uint32_t n = read_seqs(seqs);
    kv_image *image = NULL;
    if (answer(kv_image_make(&image, kv, seqs, n))) return;
    for (uint32_t i = 0; i <= image->n_groups; i++) {
        const size_t bytes = kv_image_size(image, i);
        uint8_t *const section = mem_alloc(bytes, 1);
        kv_image_encode(section, image, i);
        printf(",\"");
        for (size_t k = 0; k < bytes; k++) printf("%02x", section[k]);
        printf("\"");
        mem_free(section);
    }
    print_row_runs(image);
    kv_image_free(image);
}

static unsigned digit(char c) { return (unsigned)(c <= '9' ? c - '0' : c - 'a' + 10); }

static void load(void) {
    static int32_t into[MAX_ITEMS];
    kv_bytes sections[1 + KV_MAX_GROUPS] = {0};
    uint8_t *memory[1 + KV_MAX_GROUPS] = {0};
    kv_config config;
    kv_cache_config(&config, kv);
    for (uint32_t i = 0; i <= config.n_groups; i++) {
        const char *const hex = strtok(NULL, separators);
        if (!hex) exit(2);
        const size_t n = strlen(hex) / 2;
        memory[i] = mem_alloc(n, 1);
        for (size_t k = 0; k < n; k++)
            memory[i][k] = (uint8_t)(digit(hex[2 * k]) << 4 | digit(hex[2 * k + 1]));
        sections[i] = (kv_bytes){memory[i], n};
    }
    strtok(NULL, separators);  // "into"
    const uint32_t n = read_seqs(into);
    kv_image *image = NULL;
    int status = kv_image_decode(&image, &config, sections);
    if (!status) status = kv_image_load(kv, image, into, n);
    if (!answer(status)) print_row_runs(image);
    kv_image_free(image);
    for (uint32_t i = 0; i <= config.n_groups; i++) mem_free(memory[i]);
}

static bool is(const char *name, const char *call) { return !strcmp(name, call); }

// Calls that ask the device for work. A compaction's moves are given away, as the ABI does.
static bool worked(const char *name) {
    kv_work work = {0};
    int status;
    if (is(name, "append")) {
        const uint32_t n = read_items();
        status = kv_cache_append(&work, kv, items, n);
    } else if (is(name, "rm") || is(name, "shift")) {
        const int32_t seq = (int32_t)number(), p0 = (int32_t)number(), last = (int32_t)number();
        status = is(name, "rm") ? kv_cache_rm(&work, kv, seq, p0, last)
                                : kv_cache_shift(&work, kv, seq, p0, last);
    } else if (is(name, "defrag")) {
        status = kv_cache_defrag(&work, kv, number());
    } else if (is(name, "defrag_reserve")) {
        const int32_t seq = (int32_t)number();
        status = kv_cache_reserve_with_defrag(&work, kv, seq, number());
    } else {
        return false;
    }
    if (answer(status)) return true;
    print_work(&work);
    if (work.n_moves && name[0] == 'd') mem_free(kv_cache_take_moves(kv));
    return true;
}

static bool plain(const char *name) {
    int status;
    if (is(name, "can")) {
        const uint32_t n = read_items();
        status = kv_cache_can_append(kv, items, n);
    } else if (is(name, "trim")) {
        const int32_t seq = (int32_t)number();
        status = kv_cache_trim(kv, seq, number());
    } else if (is(name, "free")) {
        status = kv_cache_free_seq(kv, (int32_t)number());
    } else if (is(name, "share")) {
        const int32_t dst = (int32_t)number(), src = (int32_t)number();
        status = kv_cache_share(kv, dst, src, number());
    } else if (is(name, "reserve")) {
        const int32_t seq = (int32_t)number();
        status = kv_cache_reserve(kv, seq, number());
    } else {
        return false;
    }
    answer(status);
    return true;
}

int main(void) {
    static char line[MAX_LINE];
    while (fgets(line, sizeof line, stdin)) {
        const char *const name = strtok(line, separators);
        if (!name) continue;
        alarm(MAX_SECONDS);  // a call that goes round in circles ends the program
        if (is(name, "new")) {
            answer(make());
        } else if (is(name, "order")) {
            order();
        } else if (!kv) {
            return 2;
        } else if (is(name, "window")) {
            window();
        } else if (is(name, "cells")) {
            cells();
        } else if (is(name, "state")) {
            state();
        } else if (is(name, "dump")) {
            dump();
        } else if (is(name, "load")) {
            load();
        } else if (!worked(name) && !plain(name)) {
            return 2;
        }
        printf("]\n");
        fflush(stdout);
    }
    kv_cache_free(kv);
    return 0;
}
