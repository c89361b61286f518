// Layer 1: KV storage formats and the kind string, the storage identity of a layer.
#ifndef MF_KVFORMAT_H
#define MF_KVFORMAT_H

#include "base.h"

enum { KV_PACKED_BLOCK = 32 };  // elements of a q8_0 block

typedef enum kv_format { KV_FORMAT_F32, KV_FORMAT_F16, KV_FORMAT_Q8_0, KV_FORMAT_COUNT } kv_format;

const char *kv_format_name(kv_format format);  // "f32"
// Bytes of one row of K or of V, `width` elements (whole blocks of 32 for q8_0).
size_t kv_format_row_bytes(kv_format format, uint32_t width);
// The one rule: `requested`, which came from `origin`; NULL and "auto" leave the choice to the
// device, which on the CPU is f32. `readable`: bit set of the formats the device's attention reads.
int kv_format_resolve(kv_format *out, const char *requested, const char *origin, const char *device,
                      uint32_t readable);

enum { KV_KIND_BYTES = 64 };
// "full/f32/kv1x256" or "sliding-512/f32/kv1x256"; window 0: full. `rope`: what else shapes a K
// row, such as "rope-long", or NULL. `widened`: packed rows are read as floats, which gives the
// layers above other rows; adds "/widened".
void kv_kind_format(char out[KV_KIND_BYTES], uint32_t window, kv_format format, bool widened,
                    uint32_t n_head_kv, uint32_t head_dim, const char *rope);

#endif
