// XXH64 against published sums, against a second implementation that is as plain as the description
// of the algorithm, and against itself in pieces of every size.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/hash.h"
#include "counted.h"

typedef unsigned long long ull;

enum { LONGEST = 300 };

static const uint64_t p1 = 11400714785074694791u, p2 = 14029467366897019727u,
                      p3 = 1609587929392839161u, p4 = 9650029242287828579u,
                      p5 = 2870177450012600261u;

static uint64_t turn(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

static uint64_t read_le(const uint8_t *p, int n) {
    uint64_t x = 0;
    for (int i = n - 1; i >= 0; i--) x = x << 8 | p[i];
    return x;
}

static uint64_t round_of(uint64_t acc, uint64_t word) { return turn(acc + word * p2, 31) * p1; }

static uint64_t plain(const uint8_t *p, size_t n, uint64_t seed) {
    uint64_t acc = seed + p5;
    size_t at = 0;
    if (n >= 32) {
        uint64_t v[4] = {seed + p1 + p2, seed + p2, seed, seed - p1};
        for (; at + 32 <= n; at += 32) {
            for (int i = 0; i < 4; i++) v[i] = round_of(v[i], read_le(p + at + 8 * i, 8));
        }
        acc = turn(v[0], 1) + turn(v[1], 7) + turn(v[2], 12) + turn(v[3], 18);
        for (int i = 0; i < 4; i++) acc = (acc ^ round_of(0, v[i])) * p1 + p4;
    }
    acc += n;
    for (; at + 8 <= n; at += 8) acc = turn(acc ^ round_of(0, read_le(p + at, 8)), 27) * p1 + p4;
    for (; at + 4 <= n; at += 4) acc = turn(acc ^ (read_le(p + at, 4) * p1), 23) * p2 + p3;
    for (; at < n; at++) acc = turn(acc ^ (p[at] * p5), 11) * p1;
    acc = (acc ^ (acc >> 33)) * p2;
    acc = (acc ^ (acc >> 29)) * p3;
    return acc ^ (acc >> 32);
}

static void test_published(void) {
    static const struct {
        const char *text;
        uint64_t sum;
    } known[] = {
        {"", 0xef46db3751d8e999},
        {"a", 0xd24ec4f1a98c6e5b},
        {"abc", 0x44bc2cf5ad770999},
        {"xxhash", 0x32dd38952c4bc720},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const uint64_t sum = hash64_of(known[i].text, strlen(known[i].text), 0);
        CHECK(sum == known[i].sum, "\"%s\": %016llx, not %016llx", known[i].text, (ull)sum,
              (ull)known[i].sum);
    }
    CHECK(hash64_of(NULL, 0, 0) == known[0].sum, "no bytes at no address");
    CHECK(hash64_of("xxhash", 6, 20141025) == 0xb559b98d844e0635, "with a seed: %016llx",
          (ull)hash64_of("xxhash", 6, 20141025));
}

static void test_lengths_and_cuts(void) {
    static const uint64_t seeds[] = {0, 1, 0x9e3779b185ebca8d, UINT64_MAX};
    uint8_t bytes[LONGEST];
    for (size_t i = 0; i < LONGEST; i++) bytes[i] = (uint8_t)(i * 151 + (i >> 3));
    srand(7);
    for (size_t n = 0; n <= LONGEST; n++) {
        // A copy of exactly n bytes at an odd address: an address sanitizer sees a read too far.
        uint8_t *copy = malloc(n + 1);
        if (!copy) exit(1);
        memcpy(copy + 1, bytes, n);
        for (size_t s = 0; s < sizeof seeds / sizeof *seeds; s++) {
            const uint64_t right = plain(bytes, n, seeds[s]);
            const uint64_t whole = hash64_of(copy + 1, n, seeds[s]);
            CHECK(whole == right, "%zu bytes: %016llx, not %016llx", n, (ull)whole, (ull)right);
            for (int way = 0; way < 8; way++) {
                hash64 h;
                hash64_begin(&h, seeds[s]);
                for (size_t at = 0; at < n;) {
                    size_t step = (size_t)rand() % (way < 4 ? 9 : 80);
                    if (step > n - at) step = n - at;
                    hash64_add(&h, copy + 1 + at, step);
                    at += step;
                    if (at == n / 2) hash64_end(&h);  // asking in between changes nothing
                }
                CHECK(hash64_end(&h) == right, "%zu bytes in pieces: %016llx, not %016llx", n,
                      (ull)hash64_end(&h), (ull)right);
            }
        }
        free(copy);
    }
}

int main(void) {
    test_published();
    test_lengths_and_cuts();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
