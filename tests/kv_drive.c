// Drives one cell store from stdin, a call a line, for test_kv_model.py. The answer is one line:
// the status, then what the call gives. A state line ends with kv_cache_check's status.
//
//   new n_seq n_batch {full cells | sliding cells window}...
//   append {seq n}...     can {seq n}...     trim seq n     free seq     state
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/kv_cache.h"

enum { MAX_ITEMS = 64 };

static kv_cache *kv;
static uint32_t n_seq;

static uint32_t number(void) {
    const char *const word = strtok(NULL, " \n");
    return word ? (uint32_t)strtoll(word, NULL, 10) : 0;  // -1 arrives as UINT32_MAX
}

static int make(void) {
    kv_group_spec groups[KV_MAX_GROUPS] = {0};
    uint32_t n = 0;
    kv_cache_free(kv);
    kv = NULL;
    n_seq = number();
    const uint32_t n_batch = number();
    for (const char *kind; n < KV_MAX_GROUPS && (kind = strtok(NULL, " \n")); n++) {
        groups[n].kind = strcmp(kind, "full") ? KV_SLIDING : KV_FULL;
        groups[n].n_cells = number();
        if (groups[n].kind == KV_SLIDING) groups[n].window = number();
    }
    return kv_cache_new(&kv, groups, n, n_seq, n_batch);
}

static uint32_t read_items(kv_append *items) {
    uint32_t n = 0;
    for (const char *seq; n < MAX_ITEMS && (seq = strtok(NULL, " \n")); n++) {
        items[n].seq = (int32_t)strtol(seq, NULL, 10);
        items[n].n = number();
    }
    return n;
}

// Per group the used cells; per sequence len, next_pos, max_trim and per group the spans as
// pos:cell:len.
static void print_state(void) {
    for (uint32_t g = 0; g < kv_cache_n_groups(kv); g++) printf(" %u", kv_cache_used(kv, g));
    for (uint32_t s = 0; s < n_seq; s++) {
        uint32_t len = 0, pos = 0, trim = 0, n = 0;
        kv_cache_len(&len, kv, (int32_t)s);
        kv_cache_next_pos(&pos, kv, (int32_t)s);
        kv_cache_max_trim(&trim, kv, (int32_t)s);
        printf(" | %u %u %u", len, pos, trim);
        for (uint32_t g = 0; g < kv_cache_n_groups(kv); g++) {
            const mf_kv_span *spans = NULL;
            kv_cache_spans(&spans, &n, kv, g, (int32_t)s);
            printf(" ,");
            for (uint32_t i = 0; i < n; i++)
                printf(" %d:%d:%d", spans[i].pos, spans[i].cell, spans[i].len);
        }
    }
    const int status = kv_cache_check(kv);
    printf(" | %d %s", status, status ? mf_last_error() : "");
}

int main(void) {
    char line[4096];
    while (fgets(line, sizeof line, stdin)) {
        kv_append items[MAX_ITEMS];
        const char *const name = strtok(line, " \n");
        if (!name) continue;
        int status = MF_OK;
        if (!strcmp(name, "new")) {
            status = make();
        } else if (!kv) {
            status = -1;
        } else if (!strcmp(name, "append")) {
            const uint32_t n = read_items(items);
            status = kv_cache_append(kv, items, n);
        } else if (!strcmp(name, "can")) {
            const uint32_t n = read_items(items);
            status = kv_cache_can_append(kv, items, n);
        } else if (!strcmp(name, "trim")) {
            const int32_t seq = (int32_t)number();
            status = kv_cache_trim(kv, seq, number());
        } else if (!strcmp(name, "free")) {
            status = kv_cache_free_seq(kv, (int32_t)number());
        } else if (strcmp(name, "state") != 0) {
            status = -1;
        }
        printf("%d", status);
        if (!strcmp(name, "state") && kv) print_state();
        printf("\n");
        fflush(stdout);
    }
    kv_cache_free(kv);
    return 0;
}
