// Layer 0: XXH64, the 64-bit checksum of everything the library writes. It finds damage; against
// somebody who forges a file no checksum of this kind helps.
#ifndef MF_HASH_H
#define MF_HASH_H

#include "base.h"

enum { HASH_BLOCK = 32 };  // bytes the algorithm takes at a time

typedef struct hash64 {
    uint64_t lanes[4];
    uint64_t seed, total;      // total: bytes added
    uint8_t tail[HASH_BLOCK];  // the last total % HASH_BLOCK bytes
} hash64;

uint64_t hash64_of(const void *bytes, size_t n, uint64_t seed);

// The same in pieces: any cut gives what hash64_of gives. NULL is allowed for no bytes.
void hash64_begin(hash64 *h, uint64_t seed);
void hash64_add(hash64 *h, const void *bytes, size_t n);
uint64_t hash64_end(const hash64 *h);  // changes nothing: more may be added afterwards

#endif
