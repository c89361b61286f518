// Owns XXH64, written from its published description: 32-byte blocks in four lanes, each a chain of
// multiply, rotate, multiply; the lanes merged; the tail in steps of 8, 4 and 1 byte; a final mix.
// Invariant: the sum of a state is that of the bytes added so far, however they were cut.
#include "hash.h"

#include <string.h>

enum { AHEAD = 2048 };  // bytes

static const uint64_t prime1 = 0x9e3779b185ebca87u;
static const uint64_t prime2 = 0xc2b2ae3d27d4eb4fu;
static const uint64_t prime3 = 0x165667b19e3779f9u;
static const uint64_t prime4 = 0x85ebca77c2b2ae63u;
static const uint64_t prime5 = 0x27d4eb2f165667c5u;

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t load64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline uint32_t load32(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline uint64_t step(uint64_t lane, uint64_t word) {
    return rotate(lane + word * prime2, 31) * prime1;
}

// The lanes live in registers for as long as there are blocks: the speed depends on it. So does
// asking for memory early: with the multiplications in between the processor alone does not run far
// enough ahead (4.4 against 10 GB/s). Asking beyond the end, or for a page that is not there, does
// nothing.
static const uint8_t *eat_blocks(uint64_t lanes[4], const uint8_t *p, size_t n_blocks) {
    uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
    for (; n_blocks; n_blocks--, p += HASH_BLOCK) {
        __builtin_prefetch((const void *)((uintptr_t)p + AHEAD));
        a = step(a, load64(p));
        b = step(b, load64(p + 8));
        c = step(c, load64(p + 16));
        d = step(d, load64(p + 24));
    }
    lanes[0] = a, lanes[1] = b, lanes[2] = c, lanes[3] = d;
    return p;
}

static uint64_t merge(const uint64_t lanes[4]) {
    uint64_t sum =
        rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
    for (int i = 0; i < 4; i++) sum = (sum ^ step(0, lanes[i])) * prime1 + prime4;
    return sum;
}

static uint64_t finish(uint64_t sum, const uint8_t *tail, size_t n) {
    for (; n >= 8; n -= 8, tail += 8) {
        sum = rotate(sum ^ step(0, load64(tail)), 27) * prime1 + prime4;
    }
    if (n >= 4) {
        sum = rotate(sum ^ load32(tail) * prime1, 23) * prime2 + prime3;
        n -= 4, tail += 4;
    }
    for (; n; n--, tail++) sum = rotate(sum ^ *tail * prime5, 11) * prime1;
    sum = (sum ^ sum >> 33) * prime2;
    sum = (sum ^ sum >> 29) * prime3;
    return sum ^ sum >> 32;
}

void hash64_begin(hash64 *h, uint64_t seed) {
    *h = (hash64){.lanes = {seed + prime1 + prime2, seed + prime2, seed, seed - prime1},
                  .seed = seed};
}

void hash64_add(hash64 *h, const void *bytes, size_t n) {
    if (!n) return;
    const uint8_t *p = bytes;
    const size_t held = h->total % HASH_BLOCK;
    h->total += n;
    if (held) {
        const size_t missing = HASH_BLOCK - held, take = n < missing ? n : missing;
        memcpy(h->tail + held, p, take);
        if (take < missing) return;
        eat_blocks(h->lanes, h->tail, 1);
        p += take, n -= take;
    }
    p = eat_blocks(h->lanes, p, n / HASH_BLOCK);
    memcpy(h->tail, p, n % HASH_BLOCK);
}

uint64_t hash64_end(const hash64 *h) {
    const uint64_t sum = h->total >= HASH_BLOCK ? merge(h->lanes) : h->seed + prime5;
    return finish(sum + h->total, h->tail, h->total % HASH_BLOCK);
}

uint64_t hash64_of(const void *bytes, size_t n, uint64_t seed) {
    hash64 h;
    hash64_begin(&h, seed);
    hash64_add(&h, bytes, n);
    return hash64_end(&h);
}
