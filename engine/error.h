// Errors: a status and one thread-local line, written where the cause is known and passed up
// unchanged.
#ifndef MF_ERROR_H
#define MF_ERROR_H

#include "base.h"

// Keeps the formatted line (cut at 511 bytes, control characters replaced: names come from files)
// and returns `status`.
int fail(int status, const char *format, ...) MF_PRINTF(2, 3);

// Return on failure; the only macro that hides control flow, with TRY_GOTO.
#define TRY(call)                          \
    do {                                   \
        const int try_status = (call);     \
        if (try_status) return try_status; \
    } while (0)
// For functions with one exit label: needs `int status` in scope.
#define TRY_GOTO(label, call)   \
    do {                        \
        status = (call);        \
        if (status) goto label; \
    } while (0)

#endif
