// Owns the names of KV formats and the rule that resolves one per load. Refuses what it does not
// know: a format is never guessed, because a wrong guess is silent garbage.
#include "kvformat.h"

#include <stdio.h>
#include <string.h>

#include "error.h"

static const char *const names[KV_FORMAT_COUNT] = {"f32", "f16", "q8_0"};

const char *kv_format_name(kv_format format) { return names[format]; }

// Strict: exactly one of the names; anything else is MF_ARG listing them.
static int kv_format_parse(kv_format *out, const char *text, const char *origin) {
    for (int i = 0; i < KV_FORMAT_COUNT; i++) {
        if (!strcmp(text, names[i])) {
            *out = (kv_format)i;
            return MF_OK;
        }
    }
    return fail(MF_ARG, "%s: unknown KV format \"%.40s\"; use f32, f16 or q8_0", origin, text);
}

int kv_format_resolve(kv_format *out, const char *requested, const char *origin, const char *device,
                      uint32_t readable) {
    kv_format format = KV_FORMAT_F32;
    if (requested && strcmp(requested, "auto") != 0)
        TRY(kv_format_parse(&format, requested, origin));
    if (!(readable >> format & 1))
        return fail(MF_UNSUPPORTED, "%s: the %s device does not read a %s cache; use f32", origin,
                    device, names[format]);
    *out = format;
    return MF_OK;
}

size_t kv_format_row_bytes(kv_format format, uint32_t width) {
    switch (format) {
        case KV_FORMAT_F32:
            return (size_t)width * 4;
        case KV_FORMAT_F16:
            return (size_t)width * 2;
        case KV_FORMAT_Q8_0:  // blocks of 32 in 34 bytes, in whole words
            return ((size_t)width / 32 * 34 + 3) / 4 * 4;
        case KV_FORMAT_COUNT:
            break;
    }
    return 0;
}

void kv_kind_format(char out[KV_KIND_BYTES], uint32_t window, kv_format format, bool widened,
                    uint32_t n_head_kv, uint32_t head_dim, const char *rope) {
    char group[24] = "full";
    if (window) snprintf(group, sizeof group, "sliding-%u", window);
    snprintf(out, KV_KIND_BYTES, "%s/%s/kv%ux%u%s%s%s", group, names[format], n_head_kv, head_dim,
             rope ? "/" : "", rope ? rope : "", widened ? "/widened" : "");
}
