// Owns an open GGUF: the mappings of its parts, the values of the first and the tensors of all.
//
// Refuses parts that are missing, out of place or of another model, and names that occur twice.
// Invariant: a file that opened is whole; lookups by name take O(log n).
#include "gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "gguf_file.h"

enum { MAX_PARTS = UINT16_MAX };

// ---- search ------------------------------------------------------------------------------------

static int compare_names(const void *items, uint32_t a, uint32_t b) {
    const gguf_tensor *x = (const gguf_tensor *)items + a, *y = (const gguf_tensor *)items + b;
    return gguf_compare_text(x->name, x->name_len, y->name, y->name_len);
}

const gguf_kv *gguf_kvs_find(const gguf_kvs *kvs, const char *key) {
    const size_t len = strlen(key);
    for (uint32_t low = 0, high = kvs->n; low < high;) {
        const uint32_t mid = low + (high - low) / 2;
        const gguf_kv *kv = &kvs->items[kvs->by_key[mid]];
        const int c = gguf_compare_text(key, len, kv->key, kv->key_len);
        if (c == 0) return kv;
        if (c < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

const gguf_tensor *gguf_find_tensor(const mf_gguf *file, const char *name) {
    const size_t len = strlen(name);
    for (uint32_t low = 0, high = file->n_tensors; low < high;) {
        const uint32_t mid = low + (high - low) / 2;
        const gguf_tensor *tensor = &file->tensors[file->by_name[mid]];
        const int c = gguf_compare_text(name, len, tensor->name, tensor->name_len);
        if (c == 0) return tensor;
        if (c < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

// ---- parts -------------------------------------------------------------------------------------

typedef struct split {
    uint32_t no, count, n_tensors;
} split;

// count 1: not split. Merging tools leave a count of 0 behind, which means the same.
static int read_split(split *out, const gguf_kvs *kvs) {
    const uint32_t none = 0;
    *out = (split){.count = 1};
    uint32_t count;
    TRY(gguf_kvs_u32(&count, kvs, "split.count", &none, 0, MAX_PARTS));
    if (count < 2) return MF_OK;
    out->count = count;
    TRY(gguf_kvs_u32(&out->no, kvs, "split.no", NULL, 0, count - 1));
    return gguf_kvs_u32(&out->n_tensors, kvs, "split.tensors.count", NULL, 0, GGUF_MAX_TENSORS);
}

// A part that names its model must name the one of the first part. Most parts do not.
static int check_same_text(const gguf_kvs *first, const gguf_kvs *part, const char *key) {
    const char *a, *b;
    size_t a_len, b_len;
    TRY(gguf_kvs_str(&a, &a_len, first, key));
    TRY(gguf_kvs_str(&b, &b_len, part, key));
    if (!b || (a && !gguf_compare_text(a, a_len, b, b_len))) return MF_OK;
    return fail(MF_FORMAT, "%s: a part of another model: %s is %.*s, in the first part it is %.*s",
                part->path, key, gguf_shown(b, b_len), b, a ? gguf_shown(a, a_len) : 4,
                a ? a : "none");
}

static int open_part(mf_gguf *file, const split *whole, uint32_t no, const char *path) {
    char note[96];
    snprintf(note, sizeof note, "; part %" PRIu32 " of %" PRIu32 " must lie beside the first part",
             no + 1, whole->count);
    os_map *map = &file->maps[file->n_maps];
    TRY(os_map_open(map, path, note));
    file->n_maps++;

    gguf_kvs kvs = {0};
    split part;
    int status;
    TRY_GOTO(done, gguf_read_part(file, &kvs, os_path_tail(path), map->bytes, map->size));
    TRY_GOTO(done, read_split(&part, &kvs));
    if (part.count != whole->count || part.no != no || part.n_tensors != whole->n_tensors) {
        status =
            fail(MF_FORMAT,
                 "%s: split.no = %" PRIu32 ", split.count = %" PRIu32
                 ", split.tensors.count = %" PRIu32 "; the model's first part needs %" PRIu32
                 ", %" PRIu32 ", %" PRIu32 " here: a part of another model or a wrong name",
                 kvs.path, part.no, part.count, part.n_tensors, no, whole->count, whole->n_tensors);
        goto done;
    }
    TRY_GOTO(done, check_same_text(&file->kvs, &kvs, "general.architecture"));
    TRY_GOTO(done, check_same_text(&file->kvs, &kvs, "general.name"));
done:
    gguf_free_kvs(&kvs);
    return status;
}

// Opens the parts after the first, whose values are read.
static int open_other_parts(mf_gguf *file) {
    split whole;
    TRY(read_split(&whole, &file->kvs));
    if (whole.count == 1) return MF_OK;
    const char *shown = file->kvs.path;
    if (whole.no != 0) {
        return fail(MF_FORMAT,
                    "%s: part %" PRIu32 " of %" PRIu32 " (split.no = %" PRIu32
                    "); open the first part, -00001-of-%05" PRIu32 ".gguf",
                    shown, whole.no + 1, whole.count, whole.no, whole.count);
    }
    if (!file->n_maps) {
        return fail(MF_FORMAT,
                    "%s: split.count = %" PRIu32 ", but bytes in memory are one part only", shown,
                    whole.count);
    }
    char suffix[48];
    const int suffix_len =
        snprintf(suffix, sizeof suffix, "-00001-of-%05" PRIu32 ".gguf", whole.count);
    const size_t len = strlen(file->path);
    const size_t stem = len - (len < (size_t)suffix_len ? len : (size_t)suffix_len);
    if (strcmp(file->path + stem, suffix)) {
        return fail(MF_FORMAT,
                    "%s: split.count = %" PRIu32
                    ", but the name does not end in %s: the other parts cannot be found; rename it",
                    shown, whole.count, suffix);
    }
    os_map *maps = mem_grow(file->maps, whole.count, sizeof *maps);
    if (!maps) return MF_NOMEM;
    file->maps = maps;
    char *path = mem_alloc(stem + sizeof suffix, 1);
    if (!path) return MF_NOMEM;
    memcpy(path, file->path, stem);
    int status = MF_OK;
    for (uint32_t i = 1; i < whole.count && !status; i++) {
        snprintf(path + stem, sizeof suffix, "-%05" PRIu32 "-of-%05" PRIu32 ".gguf", i + 1,
                 whole.count);
        status = open_part(file, &whole, i, path);
    }
    mem_free(path);
    if (status) return status;
    if (file->n_tensors != whole.n_tensors) {
        return fail(MF_FORMAT,
                    "%s: split.tensors.count = %" PRIu32 ", but the %" PRIu32 " parts have %" PRIu32
                    " tensors; get them again",
                    shown, whole.n_tensors, whole.count, file->n_tensors);
    }
    return MF_OK;
}

// ---- the whole ---------------------------------------------------------------------------------

static int index_tensors(mf_gguf *file) {
    file->by_name = mem_alloc(file->n_tensors, sizeof *file->by_name);
    if (!file->by_name) return MF_NOMEM;
    gguf_sort(file->by_name, file->n_tensors, file->tensors, compare_names);
    for (uint32_t i = 0; i < file->n_tensors; i++) {
        const gguf_tensor *tensor = &file->tensors[file->by_name[i]];
        if (i && !compare_names(file->tensors, file->by_name[i - 1], file->by_name[i])) {
            return fail(MF_FORMAT, "%s: two tensors have the name %.*s; the file is damaged",
                        file->kvs.path, gguf_shown(tensor->name, tensor->name_len), tensor->name);
        }
        if (!u64_add(&file->data_bytes, file->data_bytes, tensor->bytes)) {
            return fail(MF_LIMIT, "%s: the tensors of all parts have 2^64 bytes or more",
                        file->kvs.path);
        }
    }
    return MF_OK;
}

// With bytes == NULL the file `path` is mapped, otherwise `path` is only a name for messages.
static int open_gguf(mf_gguf **out, const char *path, const void *bytes, size_t size) {
    mf_gguf *file = mem_alloc(1, sizeof *file);
    if (!file) return MF_NOMEM;
    int status = MF_NOMEM;
    file->refs = 1;
    file->path = mem_alloc(strlen(path) + 1, 1);
    if (!file->path) goto failed;
    memcpy(file->path, path, strlen(path) + 1);
    if (!bytes) {
        file->maps = mem_alloc(1, sizeof *file->maps);
        if (!file->maps) goto failed;
        TRY_GOTO(failed, os_map_open(file->maps, path, ""));
        file->n_maps = 1;
        bytes = file->maps->bytes;
        size = file->maps->size;
    }
    TRY_GOTO(failed, gguf_read_part(file, &file->kvs, gguf_path(file), bytes, size));
    TRY_GOTO(failed, open_other_parts(file));
    TRY_GOTO(failed, index_tensors(file));
    *out = file;
    return MF_OK;
failed:
    mf_gguf_free(file);
    return status;
}

int mf_gguf_open(mf_gguf **out, const char *path) {
    if (!out || !path) return fail(MF_ARG, "mf_gguf_open: %s is NULL", out ? "path" : "out");
    return open_gguf(out, path, NULL, 0);
}

int gguf_open_memory(mf_gguf **out, const void *bytes, size_t n, const char *name) {
    return open_gguf(out, name, bytes, n);
}

void gguf_retain(mf_gguf *file) { atomic_fetch_add(&file->refs, 1); }

void mf_gguf_free(mf_gguf *file) {
    if (!file || atomic_fetch_sub(&file->refs, 1) != 1) return;
    for (uint32_t i = 0; i < file->n_maps; i++) os_map_close(&file->maps[i]);
    mem_free(file->maps);
    gguf_free_kvs(&file->kvs);
    mem_free(file->tensors);
    mem_free(file->by_name);
    mem_free(file->path);
    mem_free(file);
}

const char *gguf_path(const mf_gguf *file) { return os_path_tail(file->path); }

void gguf_forget(const mf_gguf *file, const gguf_tensor *tensor) {
    // Borrowed memory is not ours to drop: anonymous pages would come back as zeros.
    if (file->n_maps) os_map_forget(tensor->data, tensor->bytes);
}
