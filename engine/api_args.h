// Layer 7: what the public functions check alike.
#ifndef MF_API_ARGS_H
#define MF_API_ARGS_H

#include "error.h"

int api_null(const char *function, const char *name);

#define NOT_NULL(pointer) \
    if (!(pointer)) return api_null(__func__, #pointer)

// `to` [known bytes] = the option struct `from`, or all defaults where it is NULL. Structs of an
// older header are shorter (the rest is zero: the defaults), those of a newer one longer: allowed
// as long as what this build does not know is zero. `least`: bytes that every header had.
int api_options(void *to, size_t known, const void *from, size_t least, const char *function);

// Fills in as much of the out-struct `to` as its caller knows.
int api_fill(void *to, const void *from, size_t known, const char *function);

#endif
