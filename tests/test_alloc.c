// Pages and arenas: zeroed, aligned, of the size asked for to the last byte, given back whole; and
// an allocation that fails changes nothing.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc.h"
#include "counted.h"

enum { HUGE_PAGE = 2 << 20, HUGE_FROM = 8 << 20 };

static bool is_zero(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (p[i]) return false;
    return true;
}

// Pages that this process has mapped.
static long mapped_pages(void) {
    long pages = -1;
    FILE *const file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld", &pages) != 1) pages = -1;
    if (file) fclose(file);
    return pages;
}

static void test_pages(void) {
    static const size_t sizes[] = {
        0,
        1,
        4096,
        HUGE_FROM - 1,
        HUGE_FROM,
        HUGE_FROM + 1,
        HUGE_FROM + (64 << 10),
        HUGE_FROM + HUGE_PAGE - 1,
        5 * HUGE_PAGE,
    };
    (void)mapped_pages();  // what reading takes is taken
    const long before = mapped_pages();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const size_t n = sizes[i];
        uint8_t *const p = mem_pages(n);
        CHECK(p != NULL, "%zu bytes", n);
        CHECK((uintptr_t)p % 64 == 0, "%zu bytes at %p", n, (void *)p);
        CHECK(n < HUGE_FROM || (uintptr_t)p % HUGE_PAGE == 0, "%zu bytes at %p", n, (void *)p);
        CHECK(is_zero(p, n), "%zu bytes", n);
        memset(p, 0xff, n);
        mem_pages_free(p, n);
    }
    const long after = mapped_pages();
    // An emulator keeps account of what it maps, in a few pages more.
    CHECK(after - before < HUGE_PAGE / 4096 / 4, "%ld pages more are mapped", after - before);
    mem_pages_free(NULL, 1);
}

static void test_arena(void) {
    static const size_t sizes[] = {1, 64, 65, 0, 100000, HUGE_FROM - 200, 30 << 20, 3, 9 << 20, 64};
    enum { N = sizeof sizes / sizeof *sizes };
    const size_t alive = mem_alive();
    const uint64_t asked = mem_asked();
    size_t total = 0;
    uint8_t *at[N];
    mem_arena a = {0};
    for (size_t i = 0; i < N; i++) {
        at[i] = mem_arena_alloc(&a, sizes[i]);
        CHECK(at[i] != NULL && (uintptr_t)at[i] % 64 == 0, "array %zu at %p", i, (void *)at[i]);
        CHECK(is_zero(at[i], sizes[i]), "array %zu", i);
        memset(at[i], (int)i + 1, sizes[i]);
        total += sizes[i];
    }
    for (size_t i = 0; i < N; i++)
        for (size_t x = 0; x < sizes[i]; x++)
            if (at[i][x] != i + 1) CHECK(false, "byte %zu of array %zu is %d", x, i, at[i][x]);
    CHECK(mem_asked() - asked <= 2 * total + HUGE_FROM, "%llu bytes for %zu",
          (unsigned long long)(mem_asked() - asked), total);
    const size_t blocks = mem_alive() - alive;
    CHECK(blocks < N, "%zu blocks", blocks);
    mem_fail_after(0);
    CHECK(mem_arena_alloc(&a, 500 << 20) == NULL, "an allocation that had to fail");
    CHECK(mem_alive() - alive == blocks, "%zu blocks", mem_alive() - alive);
    uint8_t *const more = mem_arena_alloc(&a, 64);
    CHECK(more && is_zero(more, 64) && *at[N - 1] == N, "after a failure");
    CHECK(mem_arena_alloc(&a, SIZE_MAX - 1) == NULL, "more than there can be");
    mem_arena_free(&a);
    CHECK(mem_alive() == alive, "%zu left", mem_alive() - alive);
    CHECK(!a.blocks && !a.bytes, "an arena that is freed starts anew");
}

int main(void) {
    test_pages();
    test_arena();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
