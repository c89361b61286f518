// What the tests of the cell store share. REFUSED takes a picture of the store before and after the
// call: a refused call changes nothing that can be seen.
#ifndef MF_TESTS_KV_TEST_H
#define MF_TESTS_KV_TEST_H

#include <stdarg.h>
#include <string.h>

#include "../engine/kv_cache.h"
#include "counted.h"

#define IS(call, want)                                                                     \
    do {                                                                                   \
        const int is_status = (call);                                                      \
        CHECK(is_status == (want), "%d, not %d (%s)", is_status, (want), mf_last_error()); \
    } while (0)

#define REFUSED(kv, call, want)                                                     \
    do {                                                                            \
        kv_picture(kv_before, kv);                                                  \
        IS(call, want);                                                             \
        IS(kv_cache_check(kv), MF_OK);                                              \
        kv_picture(kv_after, kv);                                                   \
        CHECK(!strcmp(kv_before, kv_after), "%s\nbecame\n%s", kv_before, kv_after); \
    } while (0)

enum { KV_PICTURE = 1 << 16 };

static const kv_group_spec FULL_100 = {KV_FULL, 0, 100};

static char kv_before[KV_PICTURE], kv_after[KV_PICTURE];
static kv_work work;  // of the last call that gives work

static inline void kv_write(char *text, size_t *n, const char *format, ...) {
    va_list args;
    va_start(args, format);
    *n += (size_t)vsnprintf(text + *n, KV_PICTURE - *n, format, args);
    va_end(args);
    CHECK(*n < KV_PICTURE, "a picture of %zu bytes", *n);
}

// All that a caller can see, as text [KV_PICTURE].
static inline void kv_picture(char *text, const kv_cache *kv) {
    size_t n = 0;
    kv_stats st = {0};
    for (uint32_t g = 0; g < kv_cache_n_groups(kv); g++) {
        IS(kv_cache_stats(&st, kv, g), MF_OK);
        kv_write(text, &n, "group %u: used %u shared %u reserved %u stale %u runs %u %u, %u %u\n",
                 g, st.n_used, st.n_shared, st.n_reserved, (uint32_t)st.n_stale, st.n_free_runs,
                 st.largest_run, (unsigned)st.compactions, (unsigned)st.generation);
    }
    uint32_t len, pos;
    for (int32_t s = 0; !kv_cache_len(&len, kv, s); s++) {
        if (!len) continue;
        IS(kv_cache_max_trim(&pos, kv, s), MF_OK);
        kv_write(text, &n, "%d: len %u max_trim %u", s, len, pos);
        for (uint32_t i = 0; i < len; i += i + 1 < len ? len - 1 : 1) {
            IS(kv_cache_positions(&pos, kv, s, i, 1), MF_OK);
            kv_write(text, &n, " @%u", pos);
        }
        for (uint32_t g = 0; g < kv_cache_n_groups(kv); g++) {
            const mf_kv_span *spans;
            uint32_t n_spans;
            IS(kv_cache_spans(&spans, &n_spans, kv, g, s), MF_OK);
            kv_write(text, &n, " |");
            for (uint32_t i = 0; i < n_spans; i++)
                kv_write(text, &n, " %d:%d:%d", spans[i].pos, spans[i].cell, spans[i].len);
        }
        kv_write(text, &n, "\n");
    }
}

static inline kv_config config_of(const kv_group_spec *groups, uint32_t n_groups, uint32_t n_seq,
                                  uint32_t n_batch) {
    kv_config config = {.n_groups = n_groups, .n_seq = n_seq, .n_batch = n_batch, .can_rope = true};
    for (uint32_t g = 0; g < n_groups && g < KV_MAX_GROUPS; g++) config.groups[g] = groups[g];
    return config;
}

static inline int new_cache(kv_cache **kv, const kv_group_spec *groups, uint32_t n_groups,
                            uint32_t n_seq, uint32_t n_batch) {
    const kv_config config = config_of(groups, n_groups, n_seq, n_batch);
    return kv_cache_new(kv, &config);
}

static inline kv_cache *make(const kv_group_spec *groups, uint32_t n_groups, uint32_t n_seq,
                             uint32_t n_batch) {
    kv_cache *kv = NULL;
    IS(new_cache(&kv, groups, n_groups, n_seq, n_batch), MF_OK);
    return kv;
}

static inline int append_items(kv_cache *kv, const kv_append *items, uint32_t n_items) {
    return kv_cache_append(&work, kv, items, n_items);
}

static inline int append(kv_cache *kv, int32_t seq, uint32_t n) {
    const int status = append_items(kv, &(kv_append){seq, n}, 1);
    IS(kv_cache_check(kv), MF_OK);
    return status;
}

static inline int can(kv_cache *kv, int32_t seq, uint32_t n) {
    return kv_cache_can_append(kv, &(kv_append){seq, n}, 1);
}

static inline int trim(kv_cache *kv, int32_t seq, uint32_t n) {
    const int status = kv_cache_trim(kv, seq, n);
    IS(kv_cache_check(kv), MF_OK);
    return status;
}

static inline int share(kv_cache *kv, int32_t dst, int32_t src, uint32_t n) {
    const int status = kv_cache_share(kv, dst, src, n);
    IS(kv_cache_check(kv), MF_OK);
    return status;
}

static inline int reserve(kv_cache *kv, int32_t seq, uint32_t n) {
    const int status = kv_cache_reserve(kv, seq, n);
    IS(kv_cache_check(kv), MF_OK);
    return status;
}

static inline int rm(kv_cache *kv, int32_t seq, int32_t p0, int32_t p1) {
    const int status = kv_cache_rm(&work, kv, seq, p0, p1);
    IS(kv_cache_check(kv), MF_OK);
    return status;
}

static inline int shift(kv_cache *kv, int32_t seq, int32_t p0, int32_t delta) {
    const int status = kv_cache_shift(&work, kv, seq, p0, delta);
    IS(kv_cache_check(kv), MF_OK);
    return status;
}

static inline kv_stats stats_of(const kv_cache *kv, uint32_t group) {
    kv_stats stats = {0};
    IS(kv_cache_stats(&stats, kv, group), MF_OK);
    return stats;
}

static inline uint32_t used(const kv_cache *kv, uint32_t group) {
    return stats_of(kv, group).n_used;
}

static inline uint32_t len_of(const kv_cache *kv, int32_t seq) {
    uint32_t n = 12345;
    IS(kv_cache_len(&n, kv, seq), MF_OK);
    return n;
}

static inline uint32_t pos_of(const kv_cache *kv, int32_t seq, uint32_t row) {
    uint32_t pos = 12345;
    IS(kv_cache_positions(&pos, kv, seq, row, 1), MF_OK);
    return pos;
}

static inline uint32_t max_trim(const kv_cache *kv, int32_t seq) {
    uint32_t n = 12345;
    IS(kv_cache_max_trim(&n, kv, seq), MF_OK);
    return n;
}

static inline uint32_t n_spans(const kv_cache *kv, uint32_t group, int32_t seq) {
    const mf_kv_span *spans;
    uint32_t n = 12345;
    IS(kv_cache_spans(&spans, &n, kv, group, seq), MF_OK);
    return n;
}

static inline uint32_t live_rows(const kv_cache *kv, uint32_t group, int32_t seq) {
    const mf_kv_span *spans;
    uint32_t n, rows = 0;
    IS(kv_cache_spans(&spans, &n, kv, group, seq), MF_OK);
    for (uint32_t i = 0; i < n; i++) rows += (uint32_t)spans[i].len;
    return rows;
}

// Span i of a sequence is {pos, cell, len}; a cell of -1 may be any.
static inline bool span_is(const kv_cache *kv, uint32_t group, int32_t seq, uint32_t i, int32_t pos,
                           int32_t cell, int32_t len) {
    const mf_kv_span *spans;
    uint32_t n;
    IS(kv_cache_spans(&spans, &n, kv, group, seq), MF_OK);
    if (i < n && spans[i].pos == pos && (cell < 0 || spans[i].cell == cell) && spans[i].len == len)
        return true;
    for (uint32_t k = 0; k < n; k++)
        printf("group %u, sequence %d: {%d %d %d}\n", group, seq, spans[k].pos, spans[k].cell,
               spans[k].len);
    return false;
}

#endif
