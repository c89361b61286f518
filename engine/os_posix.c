// Owns file mapping, and the words for what the system refuses. Refuses everything that is not a
// regular file: a FIFO would block, a device has no size. Invariant: no descriptor outlives a call,
// a mapping needs none.
#define _DEFAULT_SOURCE
#include "os_posix.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"
#include "os_calls.h"

enum { PATH_TAIL = 160, REASON_BYTES = 96 };

const char *os_path_tail(const char *path) {
    const size_t n = strlen(path);
    if (n <= PATH_TAIL) return path;
    const char *tail = path + (n - PATH_TAIL);
    while ((*tail & 0xc0) == 0x80) tail++;  // not into the middle of a UTF-8 character
    return tail;
}

int os_refused(const char *what, const char *path, int error, const char *note) {
    char reason[REASON_BYTES];
    if (strerror_r(error, reason, sizeof reason)) reason[0] = '\0';
    return fail(MF_IO, "%s: cannot %s: %s (error %d)%s", os_path_tail(path), what, reason, error,
                note);
}

int os_require_regular(mode_t mode, const char *path) {
    if (S_ISREG(mode)) return MF_OK;
    const char *kind = S_ISDIR(mode)    ? "a folder"
                       : S_ISFIFO(mode) ? "a FIFO"
                       : S_ISSOCK(mode) ? "a socket"
                       : S_ISCHR(mode)  ? "a character device"
                                        : "a block device";
    return fail(MF_IO, "%s: is %s; give the path of a regular file", os_path_tail(path), kind);
}

int os_map_open(os_map *out, const char *path, const char *note) {
    // Asked before the open, which for a device may already do something, and again after it,
    // because the name may have come to mean another file in between.
    const os_calls *sys = os_calls_now();
    struct stat st;
    if (sys->stat(&st, AT_FDCWD, path, 0)) return os_refused("open", path, errno, note);
    TRY(os_require_regular(st.st_mode, path));
    int fd;
    do {
        fd = sys->open(AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return os_refused("open", path, errno, note);

    int status = MF_OK;
    if (sys->fstat(&st, fd)) {
        status = os_refused("examine", path, errno, note);
        goto done;
    }
    TRY_GOTO(done, os_require_regular(st.st_mode, path));
    const size_t size = (size_t)st.st_size;
    const void *bytes = "";
    if (size) {
        bytes = sys->map(size, fd);
        if (bytes == MAP_FAILED) {
            status = os_refused("map", path, errno, note);
            goto done;
        }
    }
    *out = (os_map){.bytes = bytes, .size = size};
done:
    sys->close(fd);
    return status;
}

void os_map_close(os_map *map) {
    if (map->size) munmap((void *)(uintptr_t)map->bytes, map->size);
    *map = (os_map){0};
}

void os_map_forget(const void *p, size_t n) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t from = ((uintptr_t)p + page - 1) / page * page;
    const uintptr_t to = ((uintptr_t)p + n) / page * page;
    if (from < to) madvise((void *)from, to - from, MADV_DONTNEED);
}
