// Owns the size rule of the public structs: the first field says how much of a struct its caller
// knows.
#include "api_args.h"

#include <string.h>

int api_null(const char *function, const char *name) {
    return fail(MF_ARG, "%s: %s is NULL; pass a pointer", function, name);
}

// No header ever had a struct of another size, and half a pointer must not be copied.
static bool is_struct_size(size_t size, size_t least) {
    return size >= least && size <= 4096 && size % sizeof(size_t) == 0;
}

int api_options(void *to, size_t known, const void *from, size_t least, const char *function) {
    memset(to, 0, known);
    if (!from) return MF_OK;
    const size_t size = *(const size_t *)from;
    if (!is_struct_size(size, least))
        return fail(MF_ARG, "%s: options.size is %zu; set it to sizeof of the struct", function,
                    size);
    for (size_t i = known; i < size; i++)
        if (((const char *)from)[i])
            return fail(MF_UNSUPPORTED,
                        "%s: options.size is %zu and uses fields this build (%s) does not know",
                        function, size, MF_VERSION);
    memcpy(to, from, size < known ? size : known);
    return MF_OK;
}

int api_fill(void *to, const void *from, size_t known, const char *function) {
    const size_t size = *(const size_t *)to;
    if (!is_struct_size(size, 2 * sizeof size))
        return fail(MF_ARG, "%s: out.size is %zu; set it to sizeof of the struct", function, size);
    memcpy((char *)to + sizeof size, (const char *)from + sizeof size,
           (size < known ? size : known) - sizeof size);
    return MF_OK;
}
