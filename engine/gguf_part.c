// Reads the bytes of one GGUF part into tables: its values and its tensors.
//
// Refuses, before anything is allocated for it, every count, length, offset and product that the
// bytes of the file do not bear out; unknown value types, unsupported tensor types; names that are
// empty, too long, repeated, not UTF-8 or contain NUL; tensors that overlap.
//
// Invariant: every pointer in the tables is followed by as many bytes of the file as the tables
// say, and memory taken is bounded by the limits below, not by what the file asks for.
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "gguf_file.h"

enum {
    MAX_KEYS = 1 << 16,
    MAX_KEY_BYTES = 65535,
    MAX_NAME_BYTES = 64,
    MAX_DIMS = 4,
    MIN_KEY_BYTES = 8 + 1 + 4 + 1,             // the least that a key and its value take in a file
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8,  // likewise
    MIN_ALIGNMENT = 8,
    MAX_ALIGNMENT = 1 << 20,
    DEFAULT_ALIGNMENT = 32
};

// ---- reading -----------------------------------------------------------------------------------

typedef struct reader {
    const char *path;      // for messages
    const uint8_t *bytes;  // [size]
    uint64_t size, at;
    const char *item;  // "key", "tensor" or NULL: what is being read, its number and its name
    uint64_t index;
    const char *name;
    uint64_t name_len;
} reader;

int gguf_shown(const char *s, uint64_t n) {
    uint64_t shown = n < 80 ? n : 80;
    while (shown && shown < n && ((unsigned char)s[shown] & 0xc0) == 0x80) shown--;
    return (int)shown;
}

static int bad(const reader *r, int status, const char *format, ...) MF_PRINTF(3, 4);

// "file: key 3 (general.alignment): ..."
static int bad(const reader *r, int status, const char *format, ...) {
    char cause[384], item[160] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(cause, sizeof cause, format, args);
    va_end(args);
    if (r->item && r->name) {
        snprintf(item, sizeof item, " %s %" PRIu64 " (%.*s):", r->item, r->index,
                 gguf_shown(r->name, r->name_len), r->name);
    } else if (r->item) {
        snprintf(item, sizeof item, " %s %" PRIu64 ":", r->item, r->index);
    }
    return fail(status, "%s:%s %s", r->path, item, cause);
}

static int read_span(const uint8_t **out, reader *r, uint64_t n, const char *field) {
    uint64_t end;
    if (!u64_add(&end, r->at, n) || end > r->size) {
        return bad(r, MF_FORMAT,
                   "the %s needs %" PRIu64 " bytes at offset %" PRIu64 " but the file has %" PRIu64
                   "; it is cut or damaged, get it again",
                   field, n, r->at, r->size);
    }
    *out = r->bytes + r->at;
    r->at = end;
    return MF_OK;
}

static int read_u32(uint32_t *out, reader *r, const char *field) {
    const uint8_t *p = NULL;
    TRY(read_span(&p, r, sizeof *out, field));
    memcpy(out, p, sizeof *out);
    return MF_OK;
}

static int read_u64(uint64_t *out, reader *r, const char *field) {
    const uint8_t *p = NULL;
    TRY(read_span(&p, r, sizeof *out, field));
    memcpy(out, p, sizeof *out);
    return MF_OK;
}

// Shortest forms only, no surrogates, nothing above U+10FFFF.
static bool is_utf8(const uint8_t *s, uint64_t n) {
    for (uint64_t i = 0; i < n;) {
        const uint8_t lead = s[i++];
        if (lead < 0x80) continue;
        uint32_t more, least, code;
        if ((lead & 0xe0) == 0xc0) {
            more = 1, least = 0x80, code = lead & 0x1f;
        } else if ((lead & 0xf0) == 0xe0) {
            more = 2, least = 0x800, code = lead & 0x0f;
        } else if ((lead & 0xf8) == 0xf0) {
            more = 3, least = 0x10000, code = lead & 0x07;
        } else {
            return false;
        }
        if (n - i < more) return false;
        for (; more; more--, i++) {
            if ((s[i] & 0xc0) != 0x80) return false;
            code = code << 6 | (s[i] & 0x3f);
        }
        if (code < least || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return false;
    }
    return true;
}

// A key or a tensor name; from then on messages have it.
static int read_name(const char **out, uint32_t *len, reader *r, uint64_t max) {
    uint64_t n;
    const uint8_t *s = NULL;
    TRY(read_u64(&n, r, "length of its name"));
    if (n < 1 || n > max) {
        return bad(r, MF_FORMAT,
                   "its name has %" PRIu64 " bytes; 1 to %" PRIu64
                   " are allowed, so the file is damaged",
                   n, max);
    }
    TRY(read_span(&s, r, n, "name"));
    if (!is_utf8(s, n)) return bad(r, MF_FORMAT, "its name is not UTF-8; the file is damaged");
    if (memchr(s, 0, n)) return bad(r, MF_FORMAT, "its name has a NUL byte; the file is damaged");
    *out = r->name = (const char *)s;
    *len = (uint32_t)n;
    r->name_len = n;
    return MF_OK;
}

// ---- order -------------------------------------------------------------------------------------

static void sift_down(uint32_t *order, uint32_t root, uint32_t n, const void *items,
                      gguf_compare *compare) {
    for (;;) {
        uint32_t child = 2 * root + 1;
        if (child >= n) return;
        if (child + 1 < n && compare(items, order[child], order[child + 1]) < 0) child++;
        if (compare(items, order[root], order[child]) >= 0) return;
        const uint32_t moved = order[root];
        order[root] = order[child];
        order[child] = moved;
        root = child;
    }
}

void gguf_sort(uint32_t *order, uint32_t n, const void *items, gguf_compare *compare) {
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint32_t i = n / 2; i-- > 0;) sift_down(order, i, n, items, compare);
    for (uint32_t i = n; i-- > 1;) {
        const uint32_t largest = order[0];
        order[0] = order[i];
        order[i] = largest;
        sift_down(order, 0, i, items, compare);
    }
}

int gguf_compare_text(const char *a, size_t a_len, const char *b, size_t b_len) {
    const int c = memcmp(a, b, a_len < b_len ? a_len : b_len);
    return c ? c : (a_len > b_len) - (a_len < b_len);
}

static int compare_keys(const void *items, uint32_t a, uint32_t b) {
    const gguf_kv *x = (const gguf_kv *)items + a, *y = (const gguf_kv *)items + b;
    return gguf_compare_text(x->key, x->key_len, y->key, y->key_len);
}

static int compare_addresses(const void *items, uint32_t a, uint32_t b) {
    const uint8_t *x = ((const gguf_tensor *)items + a)->data;
    const uint8_t *y = ((const gguf_tensor *)items + b)->data;
    return (x > y) - (x < y);
}

// ---- values ------------------------------------------------------------------------------------

static int read_strings(gguf_kv *kv, reader *r) {
    if (kv->n > (r->size - r->at) / sizeof(uint64_t)) {
        return bad(r, MF_FORMAT,
                   "an array of %" PRIu64 " strings but only %" PRIu64
                   " bytes of file left; it is cut or damaged, get it again",
                   kv->n, r->size - r->at);
    }
    for (uint64_t i = 0; i < kv->n; i++) {
        uint64_t len;
        const uint8_t *s = NULL;
        TRY(read_u64(&len, r, "length of a string"));
        TRY(read_span(&s, r, len, "string"));
        kv->bytes += len;  // no overflow: all lie in the file
        // Tokens may be any bytes; a text of its own may not.
        if (!kv->is_array && !is_utf8(s, len)) {
            return bad(r, MF_FORMAT, "its string is not UTF-8; the file is damaged");
        }
    }
    return MF_OK;
}

static int read_numbers(gguf_kv *kv, reader *r) {
    static const uint8_t width[] = {
        [MF_GGUF_U8] = 1,  [MF_GGUF_I8] = 1,  [MF_GGUF_U16] = 2, [MF_GGUF_I16] = 2,
        [MF_GGUF_U32] = 4, [MF_GGUF_I32] = 4, [MF_GGUF_F32] = 4, [MF_GGUF_BOOL] = 1,
        [MF_GGUF_U64] = 8, [MF_GGUF_I64] = 8, [MF_GGUF_F64] = 8,
    };
    const uint8_t *p = NULL;
    if (!u64_mul(&kv->bytes, kv->n, width[kv->type])) kv->bytes = UINT64_MAX;  // refused next
    TRY(read_span(&p, r, kv->bytes, kv->is_array ? "array" : "value"));
    if (kv->type != MF_GGUF_BOOL) return MF_OK;
    for (uint64_t i = 0; i < kv->n; i++) {
        if (p[i] > 1)
            return bad(r, MF_FORMAT, "a bool with the value %u; 0 and 1 are allowed", p[i]);
    }
    return MF_OK;
}

static int read_kv(gguf_kv *out, reader *r) {
    TRY(read_name(&out->key, &out->key_len, r, MAX_KEY_BYTES));
    uint32_t type;
    TRY(read_u32(&type, r, "value type"));
    out->n = 1;
    if (type == MF_GGUF_ARRAY) {
        out->is_array = true;
        TRY(read_u32(&type, r, "element type"));
        if (type == MF_GGUF_ARRAY) {
            return bad(r, MF_UNSUPPORTED,
                       "an array of arrays, which this build does not read; flatten it");
        }
        TRY(read_u64(&out->n, r, "array length"));
    }
    if (type > MF_GGUF_F64) {
        return bad(r, MF_FORMAT, "%s type %" PRIu32 "; 0 to %d are known, so the file is damaged",
                   out->is_array ? "element" : "value", type, MF_GGUF_F64);
    }
    out->type = (uint8_t)type;
    out->data = r->bytes + r->at;
    TRY(type == MF_GGUF_STRING ? read_strings(out, r) : read_numbers(out, r));
    out->end = r->bytes + r->at;
    return MF_OK;
}

static int read_kvs(gguf_kvs *out, reader *r, uint64_t n) {
    if (n > (r->size - r->at) / MIN_KEY_BYTES) {
        return bad(r, MF_FORMAT,
                   "n_kv = %" PRIu64 " keys but only %" PRIu64
                   " bytes of file left; it is cut or damaged, get it again",
                   n, r->size - r->at);
    }
    if (n > MAX_KEYS) {
        return bad(r, MF_LIMIT, "n_kv = %" PRIu64 " keys; this build reads %d at most", n,
                   MAX_KEYS);
    }
    out->path = r->path;
    out->items = mem_alloc(n, sizeof *out->items);
    out->by_key = mem_alloc(n, sizeof *out->by_key);
    if (!out->items || !out->by_key) return MF_NOMEM;
    r->item = "key";
    for (r->index = 0; r->index < n; r->index++) {
        r->name = NULL;
        TRY(read_kv(&out->items[r->index], r));
    }
    r->item = NULL;
    out->n = (uint32_t)n;
    gguf_sort(out->by_key, out->n, out->items, compare_keys);
    for (uint32_t i = 1; i < out->n; i++) {
        const uint32_t a = out->by_key[i - 1], b = out->by_key[i];
        if (compare_keys(out->items, a, b)) continue;
        const gguf_kv *kv = &out->items[a];
        return bad(r, MF_FORMAT,
                   "keys %" PRIu32 " and %" PRIu32 " have the same name %.*s; remove one of them",
                   u32_min(a, b), u32_max(a, b), gguf_shown(kv->key, kv->key_len), kv->key);
    }
    return MF_OK;
}

void gguf_free_kvs(gguf_kvs *kvs) {
    mem_free(kvs->items);
    mem_free(kvs->by_key);
}

// ---- tensors -----------------------------------------------------------------------------------

static int refuse_type(const reader *r, uint32_t type) {
    char list[192];
    size_t used = 0;
    for (uint32_t i = 0; i < DTYPE_COUNT; i++) {
        if (!dtype_get(i) || used >= sizeof list) continue;
        const int n =
            snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", dtype_get(i)->name);
        used += (size_t)n;
    }
    const char *name = dtype_unsupported_name(type);
    return bad(r, MF_UNSUPPORTED, "type %s (%" PRIu32 ") is not read by this build; supported: %s",
               name ? name : "unknown", type, list);
}

// Elements and bytes from the dimensions. Sets out->bytes.
static int measure(gguf_tensor *out, const reader *r) {
    const dtype_info *info = dtype_get(out->type);
    uint64_t n_elems = 1;
    for (uint32_t i = 0; i < out->n_dims; i++) {
        if (out->dims[i] < 1) return bad(r, MF_FORMAT, "dimension %" PRIu32 " is 0", i);
        if (out->dims[i] > INT64_MAX || !u64_mul(&n_elems, n_elems, out->dims[i])) {
            return bad(r, MF_FORMAT,
                       "dimension %" PRIu32 " is %" PRIu64
                       ": more elements than 64 bits count; the file is damaged",
                       i, out->dims[i]);
        }
    }
    if (out->dims[0] % info->block_elems) {
        return bad(r, MF_FORMAT,
                   "its rows have %" PRIu64 " elements, not a multiple of %s's block of %" PRIu32,
                   out->dims[0], info->name, info->block_elems);
    }
    if (!u64_mul(&out->bytes, n_elems / info->block_elems, info->block_bytes)) {
        return bad(r, MF_FORMAT,
                   "%" PRIu64 " elements: more bytes than 64 bits count; the file is damaged",
                   n_elems);
    }
    return MF_OK;
}

static int read_tensor(gguf_tensor *out, uint64_t *offset, reader *r) {
    TRY(read_name(&out->name, &out->name_len, r, MAX_NAME_BYTES));
    TRY(read_u32(&out->n_dims, r, "number of dimensions"));
    if (out->n_dims < 1 || out->n_dims > MAX_DIMS) {
        return bad(r, MF_FORMAT, "it has %" PRIu32 " dimensions; 1 to %d are allowed", out->n_dims,
                   MAX_DIMS);
    }
    for (uint32_t i = 0; i < MAX_DIMS; i++) {
        out->dims[i] = 1;
        if (i < out->n_dims) TRY(read_u64(&out->dims[i], r, "dimension"));
    }
    uint32_t type;
    TRY(read_u32(&type, r, "type"));
    if (!dtype_get(type)) return refuse_type(r, type);
    out->type = (dtype)type;
    TRY(measure(out, r));
    return read_u64(offset, r, "offset");
}

// Turns the offset into a pointer. `start`: where the tensor data begin.
static int place(gguf_tensor *t, const reader *r, uint64_t start, uint64_t offset,
                 uint32_t alignment) {
    if (offset % alignment) {
        return bad(r, MF_FORMAT,
                   "offset %" PRIu64 " is not a multiple of general.alignment = %" PRIu32
                   "; the file is damaged",
                   offset, alignment);
    }
    uint64_t begin, end;
    if (!u64_add(&begin, start, offset) || !u64_add(&end, begin, t->bytes) || end > r->size) {
        return bad(r, MF_FORMAT,
                   "%" PRIu64 " bytes at offset %" PRIu64 " of the data (which start at %" PRIu64
                   ") but the file has %" PRIu64 "; it is cut or damaged, get it again",
                   t->bytes, offset, start, r->size);
    }
    t->data = r->bytes + begin;
    return MF_OK;
}

// `order` [n] is scratch.
static int refuse_overlap(const gguf_tensor *tensors, uint32_t *order, uint32_t n,
                          const reader *r) {
    gguf_sort(order, n, tensors, compare_addresses);
    for (uint32_t i = 1; i < n; i++) {
        const gguf_tensor *a = &tensors[order[i - 1]], *b = &tensors[order[i]];
        if ((const uint8_t *)b->data - (const uint8_t *)a->data >= (int64_t)a->bytes) continue;
        return bad(r, MF_FORMAT, "the data of tensors %.*s and %.*s overlap; the file is damaged",
                   gguf_shown(a->name, a->name_len), a->name, gguf_shown(b->name, b->name_len),
                   b->name);
    }
    return MF_OK;
}

// Appends the part's tensors to the file's.
static int read_tensors(mf_gguf *file, reader *r, uint64_t n, uint32_t alignment) {
    if (n > (r->size - r->at) / MIN_TENSOR_BYTES) {
        return bad(r, MF_FORMAT,
                   "n_tensors = %" PRIu64 " but only %" PRIu64
                   " bytes of file left; it is cut or damaged, get it again",
                   n, r->size - r->at);
    }
    if (n > GGUF_MAX_TENSORS - file->n_tensors) {
        return bad(r, MF_LIMIT, "n_tensors = %" PRIu64 "; this build reads %d in a model at most",
                   n, GGUF_MAX_TENSORS);
    }
    if (!n) return MF_OK;  // a file of metadata alone may end here, without padding
    const uint32_t added = (uint32_t)n;
    gguf_tensor *all = mem_grow(file->tensors, file->n_tensors + added, sizeof *all);
    if (!all) return MF_NOMEM;
    file->tensors = all;
    gguf_tensor *const tensors = all + file->n_tensors;

    int status = MF_NOMEM;
    uint64_t start, *offsets = mem_alloc(added, sizeof *offsets);
    uint32_t *order = offsets ? mem_alloc(added, sizeof *order) : NULL;
    if (!order) goto done;
    r->item = "tensor";
    for (r->index = 0; r->index < added; r->index++) {
        r->name = NULL;
        TRY_GOTO(done, read_tensor(&tensors[r->index], &offsets[r->index], r));
    }
    if (!u64_align(&start, r->at, alignment)) start = UINT64_MAX;  // place refuses it
    for (r->index = 0; r->index < added; r->index++) {
        r->name = tensors[r->index].name;
        r->name_len = tensors[r->index].name_len;
        TRY_GOTO(done, place(&tensors[r->index], r, start, offsets[r->index], alignment));
        tensors[r->index].is_mapped = file->n_maps > 0;
    }
    r->item = NULL;
    TRY_GOTO(done, refuse_overlap(tensors, order, added, r));
    file->n_tensors += added;
done:
    mem_free(offsets);
    mem_free(order);
    return status;
}

// ---- the part ----------------------------------------------------------------------------------

static int read_header(uint64_t *n_tensors, uint64_t *n_kv, reader *r) {
    const uint8_t *magic = NULL;
    uint32_t version;
    TRY(read_span(&magic, r, 4, "magic number of a GGUF file"));
    if (!memcmp(magic, "FUGG", 4)) {
        return bad(r, MF_UNSUPPORTED, "a big-endian GGUF file; convert it to little-endian");
    }
    if (memcmp(magic, "GGUF", 4)) {
        return bad(r, MF_FORMAT,
                   "not a GGUF file: it starts with %02x %02x %02x %02x, not \"GGUF\"", magic[0],
                   magic[1], magic[2], magic[3]);
    }
    TRY(read_u32(&version, r, "version"));
    if (version == 2u << 24 || version == 3u << 24) {
        return bad(r, MF_UNSUPPORTED, "a big-endian GGUF file; convert it to little-endian");
    }
    if (version != 2 && version != 3) {
        return bad(r, MF_UNSUPPORTED,
                   "GGUF version %" PRIu32 "; this build reads 2 and 3, convert the file", version);
    }
    TRY(read_u64(n_tensors, r, "number of tensors"));
    return read_u64(n_kv, r, "number of keys");
}

int gguf_read_part(mf_gguf *file, gguf_kvs *kvs, const char *path, const uint8_t *bytes,
                   uint64_t size) {
    reader r = {.path = path, .bytes = bytes, .size = size};
    uint64_t n_tensors = 0, n_kv = 0;
    TRY(read_header(&n_tensors, &n_kv, &r));
    TRY(read_kvs(kvs, &r, n_kv));
    uint32_t alignment;
    const uint32_t fallback = DEFAULT_ALIGNMENT;
    TRY(gguf_kvs_u32(&alignment, kvs, "general.alignment", &fallback, 0, UINT32_MAX));
    if (alignment < MIN_ALIGNMENT || alignment > MAX_ALIGNMENT || (alignment & (alignment - 1))) {
        return bad(&r, MF_FORMAT,
                   "general.alignment = %" PRIu32 "; a power of two from %d to %d is allowed",
                   alignment, MIN_ALIGNMENT, MAX_ALIGNMENT);
    }
    return read_tensors(file, &r, n_tensors, alignment);
}
