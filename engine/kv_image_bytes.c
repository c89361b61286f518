// Owns an image as bytes. Refuses, when reading, sections that end too early or too late; what the
// numbers say is kv_image_check's. Counts are compared with the bytes that are there before
// anything is allocated for them.
//
// Invariant: decode takes exactly what encode gives, so an image and its bytes are one.
#include "alloc.h"
#include "error.h"
#include "kv_image.h"

enum { WORD = 4, PAIR = 8 };  // bytes

// ---- writing ---------------------------------------------------------------------------------

static uint8_t *put(uint8_t *to, uint32_t value) {
    for (uint32_t i = 0; i < WORD; i++) to[i] = (uint8_t)(value >> 8 * i);
    return to + WORD;
}

size_t kv_image_size(const kv_image *image, uint32_t section) {
    if (!section) {
        return 2 * WORD + (size_t)image->n_seqs * 4 * WORD + image->n_runs * PAIR;
    }
    return 2 * WORD + (size_t)image->n_seqs * 2 * WORD + image->groups[section - 1].n_spans * PAIR;
}

static void encode_seqs(uint8_t *to, const kv_image *image) {
    to = put(to, image->n_seqs);
    to = put(to, image->n_groups);
    for (uint32_t i = 0; i < image->n_seqs; i++) {
        const kv_image_seq *const seq = &image->seqs[i];
        to = put(to, (uint32_t)seq->id);
        to = put(to, seq->len);
        to = put(to, seq->clean);
        to = put(to, seq->n_runs);
        for (uint32_t k = 0; k < seq->n_runs; k++) {
            to = put(to, image->runs[seq->run_at + k].row);
            to = put(to, image->runs[seq->run_at + k].pos);
        }
    }
}

void kv_image_encode(uint8_t *to, const kv_image *image, uint32_t section) {
    if (!section) {
        encode_seqs(to, image);
        return;
    }
    const kv_image_group *const group = &image->groups[section - 1];
    to = put(to, group->window);
    to = put(to, group->n_rows);
    for (uint32_t i = 0; i < image->n_seqs; i++) {
        const kv_image_part *const part = &group->parts[i];
        to = put(to, part->base);
        to = put(to, part->n_spans);
        for (uint32_t k = 0; k < part->n_spans; k++) {
            to = put(to, group->spans[part->span_at + k].first);
            to = put(to, group->spans[part->span_at + k].len);
        }
    }
}

// ---- reading ---------------------------------------------------------------------------------

typedef struct reader {
    kv_bytes bytes;  // those still to come
    char name[16];
} reader;

static int take(uint32_t *value, reader *r, const char *field) {
    if (r->bytes.n < WORD) {
        return fail(MF_FORMAT, "%s ends within %s: %zu bytes are left, %d needed", r->name, field,
                    r->bytes.n, WORD);
    }
    *value = 0;
    for (uint32_t i = 0; i < WORD; i++) *value |= (uint32_t)r->bytes.at[i] << 8 * i;
    r->bytes.at += WORD;
    r->bytes.n -= WORD;
    return MF_OK;
}

// Are there as many pieces of so many bytes?
static int expect(const reader *r, const char *field, uint32_t n, size_t bytes) {
    if (n <= r->bytes.n / bytes) return MF_OK;
    return fail(MF_FORMAT, "%s: %s is %u; the %zu bytes behind it hold %zu", r->name, field, n,
                r->bytes.n, r->bytes.n / bytes);
}

static int expect_end(const reader *r) {
    if (!r->bytes.n) return MF_OK;
    return fail(MF_FORMAT, "%s has %zu bytes behind its last field; there must be none", r->name,
                r->bytes.n);
}

static int read_seq(kv_image *image, kv_image_seq *seq, reader *r) {
    uint32_t id = 0;
    TRY(take(&id, r, "id"));
    TRY(take(&seq->len, r, "len"));
    TRY(take(&seq->clean, r, "clean"));
    TRY(take(&seq->n_runs, r, "n_runs"));
    TRY(expect(r, "n_runs", seq->n_runs, PAIR));
    seq->id = (int32_t)id;
    seq->run_at = image->n_runs;
    for (uint32_t k = 0; k < seq->n_runs; k++) {
        kv_run *const run = &image->runs[image->n_runs++];
        TRY(take(&run->row, r, "row"));
        TRY(take(&run->pos, r, "pos"));
    }
    return MF_OK;
}

// The image, for the caller to free, also when it is refused.
static int read_seqs(kv_image **out, const kv_config *config, kv_bytes section) {
    reader r = {section, "SEQS"};
    uint32_t n_seqs = 0, n_groups = 0;
    TRY(take(&n_seqs, &r, "n_seqs"));
    TRY(take(&n_groups, &r, "n_groups"));
    TRY(expect(&r, "n_seqs", n_seqs, 4 * WORD));
    if (n_groups != config->n_groups) {
        return fail(MF_FORMAT, "SEQS: n_groups is %u; this model has %u", n_groups,
                    config->n_groups);
    }
    kv_image *const image = *out = kv_image_new(n_seqs, n_groups);
    if (!image) return MF_NOMEM;
    image->runs = mem_alloc(r.bytes.n / PAIR, sizeof *image->runs);
    if (!image->runs) return MF_NOMEM;
    for (uint32_t i = 0; i < n_seqs; i++) TRY(read_seq(image, &image->seqs[i], &r));
    return expect_end(&r);
}

static int read_rows(kv_image *image, uint32_t g, kv_bytes section) {
    kv_image_group *const group = &image->groups[g];
    reader r = {section, {'R', 'O', 'W', 'S', ' ', (char)('0' + g), 0}};
    TRY(take(&group->window, &r, "window"));
    TRY(take(&group->n_rows, &r, "n_rows"));
    group->spans_capacity = r.bytes.n / PAIR;
    group->spans = mem_alloc(group->spans_capacity, sizeof *group->spans);
    if (!group->spans) return MF_NOMEM;
    for (uint32_t i = 0; i < image->n_seqs; i++) {
        kv_image_part *const part = &group->parts[i];
        TRY(take(&part->base, &r, "base"));
        TRY(take(&part->n_spans, &r, "n_spans"));
        TRY(expect(&r, "n_spans", part->n_spans, PAIR));
        part->span_at = group->n_spans;
        for (uint32_t k = 0; k < part->n_spans; k++) {
            kv_image_span *const span = &group->spans[group->n_spans++];
            TRY(take(&span->first, &r, "first"));
            TRY(take(&span->len, &r, "len"));
        }
    }
    return expect_end(&r);
}

int kv_image_decode(kv_image **out, const kv_config *config, const kv_bytes *sections) {
    kv_image *image = NULL;
    int status = read_seqs(&image, config, sections[0]);
    for (uint32_t g = 0; g < config->n_groups && !status; g++)
        status = read_rows(image, g, sections[1 + g]);
    if (!status) status = kv_image_check(image, config);
    if (status) {
        kv_image_free(image);
        return status;
    }
    *out = image;
    return MF_OK;
}
