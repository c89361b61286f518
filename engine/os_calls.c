// Owns the system's table of file calls and the pointer to the table in force. Adds nothing to the
// calls: interrupted and short ones are the business of the callers, and of their tests.
#define _GNU_SOURCE  // sync_file_range
#include "os_calls.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

static int call_open(int folder, const char *path, int flags, mode_t mode) {
    return openat(folder, path, flags, mode);
}

static int call_stat(struct stat *out, int folder, const char *path, int flags) {
    return fstatat(folder, path, out, flags);
}

static int call_fstat(struct stat *out, int fd) { return fstat(fd, out); }

static void *call_map(size_t n, int fd) { return mmap(NULL, n, PROT_READ, MAP_PRIVATE, fd, 0); }

// Waits for nothing unless the disk's queue is full. What goes wrong is found by fsync.
static void call_begin_sync(int fd) {
#ifdef SYNC_FILE_RANGE_WRITE
    (void)sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE);
#else
    (void)fd;
#endif
}

static int call_rename(int folder, const char *from, const char *to) {
    return renameat(folder, from, folder, to);
}

static int call_unlink(int folder, const char *path) { return unlinkat(folder, path, 0); }

const os_calls os_calls_system = {
    .open = call_open,
    .stat = call_stat,
    .fstat = call_fstat,
    .chmod = fchmod,
    .lock = flock,
    .map = call_map,
    .write = pwrite,
    .begin_sync = call_begin_sync,
    .sync = fsync,
    .rename = call_rename,
    .unlink = call_unlink,
    .close = close,
};

static const os_calls *in_force = &os_calls_system;

const os_calls *os_calls_now(void) { return in_force; }

void os_calls_replace(const os_calls *calls) { in_force = calls ? calls : &os_calls_system; }
