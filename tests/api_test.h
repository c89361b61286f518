// What the tests of the public functions share: a refusal has the right status, and wrote its own
// line, with the words that matter. A marker in the error line shows whose line it is.
#ifndef MF_TESTS_API_TEST_H
#define MF_TESTS_API_TEST_H

#include "../engine/error.h"
#include "model_test.h"

static inline void judge(int status, int wanted, const char *words, const char *what) {
    const char *const line = mf_last_error();
    check(status == wanted && is_one_line(line) && strcmp(line, "marker") && strstr(line, words),
          "%s: status %d, wanted %d with \"%s\"", what, status, wanted, words);
}

#define REFUSED(wanted, words, call)             \
    do {                                         \
        (void)fail(MF_OK, "marker");             \
        judge((call), (wanted), (words), #call); \
    } while (0)
#define ACCEPTED(call) check((call) == MF_OK, "%s is refused", #call)

#endif
