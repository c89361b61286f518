// Layer 0: what the library asks of the operating system about files it reads, by mapping them;
// os_file.h writes.
#ifndef MF_OS_POSIX_H
#define MF_OS_POSIX_H

#include <sys/types.h>

#include "base.h"

typedef struct os_map {
    const uint8_t *bytes;  // [size], read-only pages of the file; valid but unmapped when size is 0
    size_t size;           // of the file when it was opened
} os_map;

// Maps a regular file. Anything else (folder, FIFO, device, socket) is refused without waiting on
// it. `note` is added to the message of a failure, "" for nothing.
int os_map_open(os_map *out, const char *path, const char *note);
void os_map_close(os_map *map);  // a zeroed map is allowed
// The whole pages within [p, p + n) of a mapping leave memory; they come back when read again.
void os_map_forget(const void *p, size_t n);

// The end of `path`, at most 160 bytes: long paths must not push the cause out of an error line.
const char *os_path_tail(const char *path);
// MF_IO: "PATH: cannot WHAT: REASON (error N)NOTE" for an errno.
int os_refused(const char *what, const char *path, int error, const char *note);
// MF_IO for the st_mode of what is no regular file, saying what it is.
int os_require_regular(mode_t mode, const char *path);

#endif
