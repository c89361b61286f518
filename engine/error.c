// Owns the calling thread's last error line. Never allocates: it must work when memory has run out.
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

int fail(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    for (unsigned char *c = (unsigned char *)last_error; *c; c++) {
        if (*c < 32 || *c == 127) *c = '?';
    }
    return status;
}

const char *mf_last_error(void) { return last_error; }
