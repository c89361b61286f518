// Layer 0: the table of system calls through which the library uses files, all of them, so that a
// test can make the N-th one of a kind fail, write short, or end the process.
#ifndef MF_OS_CALLS_H
#define MF_OS_CALLS_H

#include <sys/stat.h>
#include <sys/types.h>

#include "base.h"

// Each behaves like the call of its name: -1 (map: MAP_FAILED) with errno on failure.
typedef struct os_calls {
    int (*open)(int folder, const char *path, int flags, mode_t mode);       // openat
    int (*stat)(struct stat *out, int folder, const char *path, int flags);  // fstatat
    int (*fstat)(struct stat *out, int fd);
    int (*chmod)(int fd, mode_t mode);   // fchmod
    int (*lock)(int fd, int operation);  // flock
    void *(*map)(size_t n, int fd);      // all of a file, read-only and private
    ssize_t (*write)(int fd, const void *bytes, size_t n, off_t offset);  // pwrite
    void (*begin_sync)(int fd);  // a hint: what was written may go to the disk already
    int (*sync)(int fd);         // fsync
    int (*rename)(int folder, const char *from, const char *to);  // renameat
    int (*unlink)(int folder, const char *path);                  // unlinkat
    int (*close)(int fd);
} os_calls;

extern const os_calls os_calls_system;

// The table in force. Only tests replace it, while no other thread uses files; NULL gives the
// system's back.
const os_calls *os_calls_now(void);
void os_calls_replace(const os_calls *calls);

#endif
