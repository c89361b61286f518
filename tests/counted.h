// What the plain C tests count and say: a line for each failed check, and the totals for the last
// line.
#ifndef MF_TESTS_COUNTED_H
#define MF_TESTS_COUNTED_H

#include <stdio.h>

static int passed, failed;

// CHECK(condition, format, values...)
#define CHECK(ok, ...)                                      \
    do {                                                    \
        if (ok) {                                           \
            passed++;                                       \
        } else {                                            \
            failed++;                                       \
            printf("%s:%d: %s: ", __func__, __LINE__, #ok); \
            printf(__VA_ARGS__);                            \
            printf("\n");                                   \
        }                                                   \
    } while (0)

#endif
